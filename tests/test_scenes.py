"""Scenes: the grammar of their captions, where items stand, what is kept out of training, where nouns look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.data.captions import SceneStream, Targets, scene_sets
from regard.data.images import read_idx
from regard.data.scenes import COUNTS, NOUNS, QUADRANTS, Group, SceneGenerator, Scenes, ScenesData, coverage, describe
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.predict.bundle import Bundle
from regard.predict.captioner import Captioner
from regard.tasks.image_captioning import captioning, noun_attention
from regard.text.tokenizer import Tokenizer
from regard.training.objective import make_word_dropout

SAMPLE = Path(__file__).parent.parent / "src/regard/samples/fashion-mnist"


def make(part: str = "train", **options: object) -> SceneGenerator:
    pixels, labels = (read_idx(SAMPLE / f"{part}-{name}-ubyte.gz") for name in ("images-idx3", "labels-idx1"))
    return SceneGenerator(pixels, labels, 48, ScenesData(**options))  # type: ignore[arg-type]


# --- the grammar


def test_captions_say_what_the_material_says() -> None:
    sneaker, coats = Group("sneaker", 1, "normal"), Group("coat", 2, "normal")
    for language, caption in (("en", "a sneaker left of two coats"), ("ko", "코트 두 벌 왼쪽에 운동화 하나")):
        assert describe(sneaker, coats, False, language).text == caption
    # the group with fewer items is named first in English, last in Korean
    assert describe(coats, sneaker, False, "en").text == "a sneaker right of two coats"
    assert describe(coats, sneaker, True, "en").text == "a sneaker below two coats"
    assert describe(sneaker, coats, True, "ko").text == "코트 두 벌 위에 운동화 하나"
    # of equal ones, the left or upper one
    both = Group("bag", 2, "small"), Group("trousers", 2, "large")
    assert describe(*both, True, "en").text == "two small bags above two large pairs of trousers"
    assert describe(*both, True, "ko").text == "큰 바지 두 벌 위에 작은 가방 둘"


@pytest.mark.parametrize("language", ["en", "ko"])
def test_every_scene_has_one_caption_and_no_two_kinds_of_scene_share_one(language: str) -> None:
    generator = make(language=language)
    captions = generator.all_captions()
    count = len(NOUNS) * (len(NOUNS) - 1) * len(COUNTS) * 9 * 2
    assert sum(map(bool, captions)) == len(set(filter(None, captions))) == count
    scenes = generator.sample(300, False, 5)
    phrases = generator.phrases(scenes)
    assert [captions[number] for number in generator.caption_ids(scenes)] == [phrase.text for phrase in phrases]
    for phrase in phrases:
        (before, noun, group), (_, other, partner) = phrase.nouns()
        assert phrase.text.startswith(f"{before} {noun}".strip()) and {group, partner} == {0, 1}
        words = {word for one in NOUNS.values() for word in (one.one, one.several, one.korean)}
        assert {noun, other} <= {word.split()[-1] for word in words}


# --- scenes


def test_scenes_follow_from_their_seed() -> None:
    one, again, other = (make().sample(50, False, 1, seed) for seed in (2, 2, 3))
    for name in vars(one):
        assert torch.equal(getattr(one, name), getattr(again, name))
    assert not torch.equal(one.item, other.item)


def test_items_stand_in_their_quadrant_without_overlap() -> None:
    scenes = make().sample(400, False, 1)
    assert scenes.count.sum(dim=1).min() == 2 and scenes.count.sum(dim=1).max() == 4
    used = scenes.item >= 0
    assert torch.equal(used.sum(dim=1), scenes.count.sum(dim=1)) and (scenes.noun[:, 0] != scenes.noun[:, 1]).all()
    place = scenes.quadrant.gather(1, scenes.group)  # [N, 4]
    top, left, side = scenes.box.unbind(dim=2)
    for start, half in ((top, place // 2), (left, place % 2)):
        assert (start >= 24 * half)[used].all() and (start + side <= 24 * half + 24)[used].all()
    # the first group is to the left of the second, or above it
    both = scenes.quadrant
    step = torch.where(scenes.vertical, 2, 1)
    assert torch.equal(both[:, 1] - both[:, 0], step)
    inside = torch.zeros(400, 48, 48, dtype=torch.int)
    for row, boxes in enumerate(scenes.box.tolist()):
        for y, x, s in boxes:
            inside[row, y : y + s, x : x + s] += 1
    painted = make().render(scenes)
    assert inside.max() == 1 and not painted[:, 0][inside == 0].any()
    assert painted.flatten(1).any(dim=1).all() and painted.dtype == torch.uint8


def test_an_item_is_painted_as_it_is() -> None:
    """Of a canvas whose large size is 28 pixels, the item itself."""
    pixels, labels = read_idx(SAMPLE / "train-images-idx3-ubyte.gz"), read_idx(SAMPLE / "train-labels-idx1-ubyte.gz")
    own = SceneGenerator(pixels, labels, 116, ScenesData(sizes=("large",)))  # 0.242 · 116 = 28
    scenes = own.sample(20, False, 1)
    painted = own.render(scenes)[:, 0]
    for row in range(20):
        for item, (top, left, side) in zip(scenes.item[row].tolist(), scenes.box[row].tolist(), strict=True):
            if item >= 0:
                assert side == 28 and torch.equal(painted[row, top : top + 28, left : left + 28], pixels[item])
                assert int(labels[item]) in [NOUNS[own.config.nouns[noun]].label for noun in scenes.noun[row].tolist()]


def pairs(scenes: Scenes, nouns: Sequence[str]) -> list[set[str]]:
    """Which noun is where, as read off the boxes: {"bag 2 3", …} of each scene."""
    found = []
    for kinds, groups, items, boxes in zip(
        scenes.noun.tolist(), scenes.group.tolist(), scenes.item.tolist(), scenes.box.tolist(), strict=True
    ):
        own = [(kinds[group], box) for group, item, box in zip(groups, items, boxes, strict=True) if item >= 0]
        found.append({f"{nouns[kind]} {1 + top // 12} {1 + left // 12}" for kind, (top, left, _) in own})  # 12 = 48 / 4
    return found


def test_pairs_that_are_kept_out_are_in_no_training_scene_and_in_every_held_out_one() -> None:
    own = make(valid=40, test=40)
    sets = scene_sets(own, make("t10k", valid=40, test=40))
    kept_out = set(own.config.held_out)
    assert len(kept_out) == 2 * len(own.config.nouns)
    seen = pairs(own.sample(2000, False, 1, 1), own.config.nouns)
    assert not any(one & kept_out for one in seen)
    every = {f"{noun} {row} {column}" for noun in own.config.nouns for row in range(1, 5) for column in range(1, 5)}
    assert set().union(*seen) == every - kept_out
    assert all(one & kept_out for one in pairs(sets["held-out"].scenes, own.config.nouns))
    assert not any(one & kept_out for name in ("valid", "test") for one in pairs(sets[name].scenes, own.config.nouns))


def test_a_quadrant_is_its_four_cells() -> None:
    quadrant = make(held_out=("bag top right",))
    assert (quadrant.held_out == make(held_out=("bag 1 3", "bag 1 4", "bag 2 3", "bag 2 4")).held_out).all()
    scenes = quadrant.sample(300, True, 1)
    positions = scenes.quadrant
    assert (
        ((scenes.noun == quadrant.config.nouns.index("bag")) & (positions == QUADRANTS.index("top right")))
        .any(dim=1)
        .all()
    )


def test_in_common_scenes_a_place_says_nothing_about_the_noun() -> None:
    own = make()
    scenes = own.sample(3000, False, 1, common=True)
    seen = Counter(pair for one in pairs(scenes, own.config.nouns) for pair in one)
    fields = {pair.partition(" ")[2] for pair in seen}
    assert fields == {f"{row} {column}" for row in range(1, 5) for column in range(1, 5) if (row + column) % 2 == 0}
    assert len(seen) == len(own.config.nouns) * len(fields)  # every noun in each of them
    assert max(seen.values()) < 2 * min(seen.values())
    with pytest.raises(UserError, match="no scene is left"):
        make(held_out=("bag top left", "boot top right", "coat bottom left", "coat bottom right")).sample(
            1, False, 1, common=True
        )


def test_a_new_pair_makes_no_new_sentence() -> None:
    own = make(sizes=("normal",))
    new, known = (
        set(own.caption_ids(own.sample(count, held_out, 3)).tolist())
        for count, held_out in ((2000, True), (9000, False))
    )
    assert new <= known


def test_a_stream_goes_on_from_any_point() -> None:
    own = make(sizes=("normal",), nouns=("bag", "boot"), held_out=())
    captions = own.all_captions()
    tokenizer = Tokenizer.train(filter(None, captions), "word")
    targets = Targets.of(tokenizer, captions, 20)
    stream = SceneStream(own, targets, rows=4, seed=3)
    walk = iter(stream)
    for _ in range(4):
        next(walk)
    position = stream.position
    after = next(walk)
    again = SceneStream(own, targets, rows=4, seed=3)
    again.seek(position)
    other = next(iter(again))
    assert torch.equal(after.source, other.source) and torch.equal(after.target, other.target)
    for row in range(4):
        ids = [id for id in after.labels[row].tolist() if id >= 0]
        assert ids[-1] == tokenizer.eos and tokenizer.decode(ids) in captions
        assert after.target[row, : len(ids)].tolist() == [tokenizer.bos, *ids[:-1]]


def test_words_are_hidden_from_the_decoder_in_training_alone_and_still_expected() -> None:
    own = make(sizes=("normal",), nouns=("bag", "boot"), held_out=())
    captions = own.all_captions()
    tokenizer = Tokenizer.train(filter(None, captions), "word")
    batch = next(iter(SceneStream(own, Targets.of(tokenizer, captions, 20), rows=4, seed=3)))
    small = {"dim": 16, "layers": 1, "heads": 2, "ff_dim": 16, "image_size": 48, "patch_size": 8, "channels": 1}
    model = build(ModelConfig(**small, input="patches", vocab_size=len(tokenizer), dropout=0.0, embed_dropout=0.0))
    assert make_word_dropout(0.0, tokenizer) is None
    hide = make_word_dropout(1.0, tokenizer)  # every word
    plain, count = captioning(model.eval(), batch)
    assert torch.equal(captioning(model, batch, word_dropout=hide)[0], plain)
    blank = torch.where(batch.target == tokenizer.bos, batch.target, tokenizer.unk)
    blank = torch.where(batch.target == tokenizer.eos, batch.target, blank)
    expected = captioning(model, replace(batch, target=blank))
    assert not torch.equal(expected[0], plain)
    hidden = captioning(model.train(), batch, word_dropout=hide)
    torch.testing.assert_close(hidden, expected)
    assert int(hidden[1]) == int(count)


# --- where nouns look


def test_coverage_counts_pixels() -> None:
    scenes = make().sample(30, False, 1)
    for group in (0, 1):
        covered = torch.zeros(30, 48, 48)
        for row in range(30):
            for item, own, (top, left, side) in zip(
                scenes.item[row].tolist(), scenes.group[row].tolist(), scenes.box[row].tolist(), strict=True
            ):
                if item >= 0 and own == group:
                    covered[row, top : top + side, left : left + side] = 1
        expected = torch.nn.functional.avg_pool2d(covered[:, None], 8).flatten(1)
        torch.testing.assert_close(coverage(scenes, group, 48, 6), expected)


def test_attention_spread_evenly_gives_chance() -> None:
    own = make(valid=20, test=5)
    data = scene_sets(own, own)["valid"]
    tokenizer = Tokenizer.train(filter(None, own.all_captions()), "word")
    small = {"dim": 16, "layers": 1, "heads": 2, "ff_dim": 16, "image_size": 48, "patch_size": 8, "channels": 1}
    model = build(ModelConfig(**small, input="patches", vocab_size=len(tokenizer))).eval()
    with torch.no_grad():
        model.decoder.blocks[0].cross.q.weight.zero_()
        model.decoder.blocks[0].cross.q.bias.zero_()
    found = noun_attention(Captioner(Bundle(model, {"tokenizer": tokenizer})), data)
    assert found["inside"] == pytest.approx(found["inside_chance"], rel=1e-4)
    assert found["inside_best"] == pytest.approx(found["inside_chance"], rel=1e-4)


@pytest.mark.cuda
def test_scenes_composed_on_a_gpu_are_those_of_a_cpu() -> None:
    own = make()
    scenes = own.sample(20, False, 1)
    painted = own.render(scenes)
    assert torch.equal(own.to(torch.device("cuda")).render(scenes).cpu(), painted)
