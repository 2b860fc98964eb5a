"""Inside: every map against a trace and the written-out formula, every intervention against another implementation."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from inside_models import SHAPES, TEXTS, given, opened
from regard.errors import UserError
from regard.explore.changes import Changes
from regard.explore.forward import difference
from regard.explore.inside import Inside
from regard.nn.block import Stack
from regard.nn.mask import Positions
from regard.nn.trace import trace
from regard.predict.beam import beam
from regard.predict.bundle import Bundle
from regard.predict.config import SearchConfig

SENTENCE = "the animal did not cross"


def logits_of(inside: Inside, look, model=None) -> torch.Tensor:
    """The output of the model itself."""
    reading = look.input
    given = (reading.source,) if reading.target is None else (reading.source, reading.target)
    with torch.no_grad():
        return (model or inside.model)(*given)[0]


# What is seen


@pytest.mark.parametrize("architecture", SHAPES)
def test_maps_are_the_weights_of_a_trace(architecture: str) -> None:
    inside = opened(architecture)
    look = inside.look(**given(architecture))
    with torch.no_grad(), trace(inside.model) as seen:
        inside.forward(look.input)
    names = {name for name in seen if name.endswith(".weights")}
    for part in look.parts.values():
        for layer, weights in enumerate(part.weights):
            name = inside.anatomy.parts[part.name][layer][0] + ".weights"
            torch.testing.assert_close(weights, seen[name][0].float())
            assert weights.shape[1:] == (len(part.rows), len(part.columns))
            names.remove(name)
    assert not names  # nothing was left out


def test_a_map_is_the_softmax_computed_by_hand() -> None:
    """Layer 0 of a decoder without positions, from its matrices: softmax(x Wq (x Wk)ᵀ / 2), with a causal mask."""
    inside = opened("decoder", position="none")
    look = inside.look(SENTENCE)
    block, ids = inside.model.decoder.blocks[0], look.input.source[0]
    x = F.layer_norm(inside.model.embedding.tokens.weight[ids] * 4, (16,), *block.attention_norm.parameters())
    q, k, v = (x @ block.attention.qkv.weight.T + block.attention.qkv.bias).split(16, dim=-1)
    for head in range(4):
        own = slice(4 * head, 4 * head + 4)
        scores = q[:, own] @ k[:, own].T
        hidden = (scores / 2).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        steps = look.steps("decoder", 0, head, 3)
        torch.testing.assert_close(look.parts["decoder"].weights[0][head], hidden.softmax(dim=-1).float())
        torch.testing.assert_close(steps.scores, scores[3].float())
        torch.testing.assert_close(steps.scaled, scores[3].float() / 2)
        torch.testing.assert_close(steps.masked, hidden[3].float())
        torch.testing.assert_close(steps.output, (hidden.softmax(dim=-1) @ v[:, own])[3].float())
        assert steps.scale == 0.5


@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.parametrize("changed", [False, True])
def test_the_stages_of_a_query_follow_from_each_other(architecture: str, changed: bool) -> None:
    inside = opened(
        architecture, **({} if architecture == "recurrent" else {"kv_heads": 2, "value_dim": 3, "position": "alibi"})
    )
    part = list(inside.anatomy.parts)[-1]
    changes = Changes(heads=((part, 0, 0),), temperature=0.5) if changed else Changes()
    look = inside.look(**given(architecture), changes=changes)
    query = len(look.parts[part].rows) - 1
    for head in range(len(look.parts[part].weights[0])):
        steps = look.steps(part, 0, head, query)
        if architecture != "recurrent":  # whose score is additive
            torch.testing.assert_close(steps.scores, steps.k @ steps.q)
        torch.testing.assert_close(steps.weights, steps.masked.softmax(dim=-1))
        torch.testing.assert_close(steps.weights, look.parts[part].weights[0][head, query])
        torch.testing.assert_close(steps.values, steps.weights[:, None] * steps.v)
        off = changed and head == 0
        torch.testing.assert_close(steps.output, steps.values.sum(dim=0) * (not off), atol=1e-5, rtol=1e-5)


def test_probabilities_and_loss_are_those_of_the_model() -> None:
    for shape in ("decoder", "encoder-decoder"):
        inside = opened(shape)
        look = inside.look(SENTENCE, target="a b c" if shape == "encoder-decoder" else None)
        logits = logits_of(inside, look)
        expected = [id for id in look.input.expected if id is not None]
        loss = F.cross_entropy(logits[: len(expected)], torch.tensor(expected))
        assert look.output.loss == pytest.approx(loss.item(), rel=1e-5)
        best = logits.softmax(dim=-1).topk(8)
        for place, values, ids in zip(look.output.positions, best.values, best.indices, strict=True):
            assert [choice.id for choice in place.top] == ids.tolist()
            assert [choice.probability for choice in place.top] == pytest.approx(values.tolist(), rel=1e-4)
    assert [inside.reader.label(id) for id in expected] == list(look.input.written) == ["a", "b", "c", "</s>"]
    assert look.input.read == ("<s>", "a", "b", "c")


def test_classes_masks_and_vectors() -> None:
    inside = opened("classes")
    output = inside.look(SENTENCE).output
    assert sum(choice.probability for choice in output.positions[0].top) == pytest.approx(1)
    inside = opened("masked")
    look = inside.look("the [MASK] did not [MASK]")
    assert look.input.source_labels == ("[CLS]", "the", "[MASK]", "did", "not", "[MASK]", "[SEP]")
    assert [p.expected is None for p in look.output.positions] == [
        False,
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    vector = opened("vectors").look(SENTENCE)
    torch.testing.assert_close(vector.output.logits, logits_of(vector.inside, vector).float())


def test_the_patches_of_an_image_are_in_order() -> None:
    look = opened("vit").look(image=torch.rand(3, 16, 16))
    assert look.input.source_labels == ("[CLS]", *(f"{row},{column}" for row in range(4) for column in range(4)))
    assert opened("captions").look(image=torch.rand(3, 16, 16)).parts["cross"].columns[5] == "1,1"


# What is changed, done in another way


@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder", "captions", "masked"])
def test_a_head_that_is_off_is_a_column_without_weight(architecture: str) -> None:
    inside = opened(architecture)
    for part, layers in inside.anatomy.parts.items():
        look = inside.look(**given(architecture), changes=Changes(heads=((part, 1, 2), (part, 1, 0))), generate=False)
        attention = inside.attention(layers[1][0])
        before = attention.out.weight.detach().clone()
        attention.out.weight.data[:, 0:4] = 0
        attention.out.weight.data[:, 8:12] = 0
        torch.testing.assert_close(look.output.logits, logits_of(inside, look).float())
        attention.out.weight.data = before


@pytest.mark.parametrize("layers", [(0,), (1,), (0, 1), (1, 2)])
@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder"])
def test_a_skipped_layer_equals_a_model_without_it(layers: tuple[int, ...], architecture: str) -> None:
    inside = opened(architecture, layers=3, norm_order="post")
    look = inside.look(SENTENCE, changes=Changes(layers=tuple(("decoder", layer) for layer in layers)))
    stack = inside.model.decoder
    whole = stack.blocks
    stack.blocks = torch.nn.ModuleList(block for at, block in enumerate(whole) if at not in layers)
    torch.testing.assert_close(look.output.logits, logits_of(inside, look).float())
    stack.blocks = whole


def test_without_the_causal_mask_a_decoder_is_an_encoder() -> None:
    inside = opened("decoder")
    look = inside.look(SENTENCE, changes=Changes(future=True))
    both_ways = Stack(inside.config, causal=False).double().eval()
    both_ways.load_state_dict(inside.model.decoder.state_dict())
    ids = look.input.source
    with torch.no_grad():
        states = both_ways(inside.model.embedding(ids), Positions.of(ids.shape[1], ids.device))
        torch.testing.assert_close(look.output.logits, inside.model.output_head(states)[0].float())


@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder", "vit"])
def test_temperature_is_another_scale(architecture: str) -> None:
    """softmax(q·k s / T) = softmax(q·k (s / T))."""
    cold, plain = opened(architecture, attention_scale=0.25), opened(architecture, attention_scale=0.5)
    inputs = given(architecture)
    if architecture == "encoder-decoder":
        inputs["target"] = "a b"
    look = plain.look(**inputs, changes=Changes(temperature=2.0))
    torch.testing.assert_close(look.output.logits, cold.look(**inputs).output.logits)


@pytest.mark.parametrize("architecture", ["decoder", "masked", "vit"])
def test_shuffled_positions_are_a_shuffled_table(architecture: str) -> None:
    inside = opened(architecture, position="learned")
    look = inside.look(**given(architecture), changes=Changes(shuffle=7))
    count = len(look.input.source_labels)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(7))
    assert order.tolist() != list(range(count))
    table = getattr(inside.model, inside.anatomy.reads).position.embedding.weight
    table.data[:count] = table.data[order]
    torch.testing.assert_close(look.output.logits, torch.atleast_2d(logits_of(inside, look)).float())


@pytest.mark.parametrize("position", ["rope", "alibi", "t5", "relative", "sinusoidal"])
def test_shuffled_positions_are_the_tokens_in_another_order(position: str) -> None:
    """An encoder is blind to order but for positions: shuffling those is shuffling the tokens."""
    inside = opened("vectors", position=position)
    look = inside.look("a b c d e f g", changes=Changes(shuffle=3))
    count = len(look.input.source_labels)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3))  # place i is told order[i]
    moved = look.input.source[:, order.argsort()]  # the token that is told 0 stands first
    with torch.no_grad():
        torch.testing.assert_close(inside.model(moved)[0].float(), look.output.logits[order.argsort()])


def test_a_rewritten_row_takes_the_value_of_its_key() -> None:
    inside = opened("decoder")
    row = ("decoder", 1, 2, 3, (0.0, 5.0, 0.0, 0.0, 0.0))
    look = inside.look(SENTENCE, changes=Changes(rows=(row,)))
    weights = look.parts["decoder"].weights[1]
    assert weights[2, 3].tolist() == [0, 1, 0, 0, 0] and weights[2, 2].tolist() != [0, 1, 0, 0, 0]
    steps = look.steps("decoder", 1, 2, 3)
    torch.testing.assert_close(steps.output, steps.v[1])
    blind = Changes(rows=(("decoder", 1, 2, 3, (0.0,) * 5),))
    assert not inside.look(SENTENCE, changes=blind).steps("decoder", 1, 2, 3).output.any()


def greedy_without_cache(inside: Inside, source: torch.Tensor, edits: dict, limit: int = 10) -> list[int]:
    """Greedy search that reads the whole prefix for each token, with the interventions as edits."""
    begin, end = inside.bundle.target_frame
    read = [begin]
    with torch.no_grad():
        for _ in range(limit):
            with trace(inside.model, edits, only="encoder.output"):
                token = int(inside.model(source, torch.tensor([read]))[0, -1].argmax())
            if token == end:
                break
            read.append(token)
    return read[1:]


@pytest.mark.parametrize("part", ["encoder", "decoder", "cross"])
def test_generation_under_changes_equals_greedy_search_without_a_cache(part: str) -> None:
    """Rows are counted correctly during generation: one query per step with a cache, all of them without."""
    changed = 0
    for seed in range(4):
        inside = opened("encoder-decoder", seed)
        look = inside.look("the animal", generate=False)
        keys, queries = len(look.parts[part].columns), min(3, len(look.parts[part].rows))
        weights = [tuple(float(at == (query + 1) % keys) for at in range(keys)) for query in range(queries)]

        def point(value: torch.Tensor, weights=weights) -> torch.Tensor:
            value = value.clone()
            for query, row in enumerate(weights[: value.shape[2]]):
                short = torch.tensor(row[: value.shape[3]], dtype=value.dtype)
                value[:, :, query] = F.pad(short, (0, value.shape[3] - len(short)))
            return value

        rows = [(part, 1, head, query, row) for query, row in enumerate(weights) for head in range(4)]
        output = inside.change(look, Changes(rows=tuple(rows))).output.generated
        path = inside.anatomy.path(part, 1)
        wanted = greedy_without_cache(inside, look.input.source, {f"{path}.weights": point})
        assert output == inside.reader.decode(wanted)
        changed += output != inside.look("the animal").output.generated
    assert changed


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("part", ["decoder", "cross"])
def test_hypotheses_of_one_sentence_are_at_the_same_step(part: str, beams: int) -> None:
    """Every query attends to the first key: set row by row, or by replacing all weights at once."""
    for seed in range(3):
        inside = opened("encoder-decoder", seed)
        inside.search = SearchConfig(beam=beams, n_best=beams, max_length=8)
        look = inside.look("the animal did", target="a b c d e f g", generate=False)
        weights = (1.0,) + (0.0,) * (len(look.parts[part].columns) - 1)
        rows = tuple((part, 0, head, query, weights) for query in range(8) for head in range(4))

        def first(value: torch.Tensor) -> torch.Tensor:
            return F.one_hot(torch.zeros(value.shape[:3], dtype=torch.long), value.shape[3]).to(value)

        outputs = inside.change(look, Changes(rows=rows)).output.hypotheses
        bos, eos = inside.bundle.target_frame
        with trace(inside.model, {f"{inside.anatomy.path(part, 0)}.weights": first}, only="encoder.output"):
            wanted = beam(inside.model, look.input.source, None, inside.search, bos, eos)[0]
        assert [text for text, _ in outputs] == [inside.reader.decode(one.tokens) for one in wanted]
        assert [score for _, score in outputs] == pytest.approx([one.score for one in wanted])


@pytest.mark.parametrize("architecture", [*TEXTS, "captions", "vit"])
def test_no_change_changes_nothing(architecture: str) -> None:
    inside = opened(architecture)
    inputs = given(architecture)
    both = inside.compare(**inputs, changes=Changes())
    assert torch.equal(both.before.output.logits, both.after.output.logits)
    assert not any(both.difference.divergence) or max(both.difference.divergence) < 1e-9
    torch.testing.assert_close(both.before.output.logits, torch.atleast_2d(logits_of(inside, both.before)).float())


def test_differences_are_divergences() -> None:
    inside = opened("decoder")
    both = inside.compare(SENTENCE, changes=Changes(heads=(("decoder", 0, 1),)))
    p, q = (look.output.logits.log_softmax(dim=-1) for look in (both.before, both.after))
    wanted = F.kl_div(q, p, reduction="none", log_target=True).sum(dim=-1)
    torch.testing.assert_close(torch.tensor(both.difference.divergence), wanted)
    assert list(both.difference.flipped) == [at for at in range(5) if p[at].argmax() != q[at].argmax()]
    assert both.difference.loss == pytest.approx(both.after.output.loss - both.before.output.loss)
    vectors = opened("vectors").compare(SENTENCE, changes=Changes(layers=(("encoder", 0),)))
    cosine = F.cosine_similarity(vectors.before.output.logits, vectors.after.output.logits, dim=-1)
    assert difference(vectors.before.output, vectors.after.output).divergence == pytest.approx((1 - cosine).tolist())


# What is refused, and who may ask


def test_unreadable_inputs_are_reported() -> None:
    with pytest.raises(UserError, match="give an image"):
        opened("vit").look("text")
    with pytest.raises(UserError, match="not images"):
        opened("decoder").look(image=torch.rand(3, 16, 16))
    with pytest.raises(UserError, match=r"shape \(3, 8, 8\)"):
        opened("vit").look(image=torch.rand(3, 8, 8))
    with pytest.raises(UserError, match="no input text"):
        opened("decoder").look()
    with pytest.raises(UserError, match="32 learned positions"):
        opened("decoder", position="learned").look("a " * 40)
    with pytest.raises(UserError, match="give a shorter one"):
        opened("decoder", position="rope").look("a " * 20_000)
    with pytest.raises(UserError, match="has no tokenizer"):
        Inside(Bundle(opened("decoder").model)).look("a")
    with pytest.raises(UserError, match="do not belong together"):
        Inside(Bundle(opened("decoder", vocab_size=5).model, opened("decoder").bundle.tokenizers))
    with pytest.raises(UserError, match="no position information"):
        opened("decoder", position="none").look("a b", changes=Changes(shuffle=1))
    assert opened("decoder").look("").input.source_labels == ("<s>",)


def test_threads_take_turns() -> None:
    """One model, several threads, different changes: each gets its own output."""
    inside, found = opened("encoder-decoder"), {}
    wanted = {head: inside.look(SENTENCE, changes=Changes(heads=(("cross", 1, head),))) for head in range(4)}

    def work(head: int) -> None:
        for _ in range(3):
            found[head] = inside.look(SENTENCE, changes=Changes(heads=(("cross", 1, head),)))
            found[head].steps("cross", 1, head, 0)

    threads = [threading.Thread(target=work, args=(head,)) for head in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for head in range(4):
        assert torch.equal(found[head].output.logits, wanted[head].output.logits)
        assert found[head].output.generated == wanted[head].output.generated
