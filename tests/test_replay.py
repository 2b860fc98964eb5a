"""Generation in fixed shapes: the text of plain steps, and steps that a graph can record."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from regard.errors import UserError
from regard.models.transformer import Decoder
from regard.nn.trace import trace
from regard.predict import SearchConfig
from regard.predict.bundle import Bundle
from regard.predict.generator import Generator, Sample, Sampler, lay_columns
from regard.predict.recorded import TURN, FixedCache, together
from regard.predict.replay import FixedSampler, FixedStep, reach
from regard.predict.sampling import Uniform, sample_token
from test_generate import BYTES, certain, make, uncached
from variants import slow

pytestmark = pytest.mark.grid

SETTINGS = [
    {"top_k": 1},
    {},
    {"temperature": 0.7, "top_k": 5, "n_best": 3},
    {"top_k": 9, "top_p": 0.5, "temperature": 1.3},
    {"top_p": 0.8, "seed": 4},
    {"n_best": 4, "min_length": 30},
]


def facts(samples: list[Sample]) -> list[tuple[list[int], str, str | None]]:
    return [(sample.ids, sample.text, sample.ended) for sample in samples]


def both(generator: Generator, prompt: str, config: SearchConfig, **settings) -> tuple[list[Sample], list[Sample]]:
    """In plain steps, and in fixed shapes."""
    found = []
    for generator.fixed in (False, True):
        found.append(generator.generate(prompt, config=config, **settings))
    return found[0], found[1]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
@pytest.mark.parametrize("position", ["rope", "learned", *slow("t5", "relative", "sinusoidal")])
def test_the_text_is_that_of_plain_steps(position, changes):
    generator = make(position=position)
    for prompt, overflow, limit in (("To be", "stop", 60), ("한", "slide", 100), ("x" * 32, "slide", 33)):
        config = SearchConfig(sample=True, **{"max_length": limit, **changes})
        plain, fixed = both(generator, prompt, config, overflow=overflow, stops=["\n", "be"])
        assert facts(fixed) == facts(plain)
        for one, other in zip(fixed, plain, strict=True):
            assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-12)


@pytest.mark.parametrize("changes", [{"kv_heads": 1}, {"window": 4}, {"norm_order": "post"}, {"norm": "rms"}], ids=str)
def test_other_models_and_reading_everything_again(changes):
    generator = make(**changes)
    generator.fixed = True
    config = SearchConfig(sample=True, top_k=1, max_length=20, min_length=20)
    found = generator.generate("To be", config=config)[0]
    assert found.ids == uncached(generator, BYTES.encode("To be"), 20)


def test_reach_grows_with_the_text():
    generator = make(max_length=600)
    config = SearchConfig(sample=True, max_length=590, min_length=590, n_best=2)
    plain, fixed = both(generator, "To be", config)
    assert facts(fixed) == facts(plain)
    (step,) = generator._replays.ready.values()
    assert set(step.graphs) == {128, 256, 512, 640} and step.cache.capacity == 640
    assert [reach(tokens) for tokens in (1, 128, 129, 256, 1000)] == [128, 128, 256, 256, 1024]


def test_it_ends_where_plain_steps_do():
    for token, stops in ((BYTES.eos, []), (BYTES.encode("x")[0], ["xxx"]), (BYTES.encode("x")[0], ["x" * 17])):
        generator = certain(token, make())
        plain, fixed = both(generator, "a", SearchConfig(sample=True, max_length=30), stops=stops)
        assert facts(fixed) == facts(plain) and fixed[0].ended in ("end", "stop")


def test_texts_side_by_side_have_steps_of_their_own():
    generator = make()
    generator.fixed = True
    config = SearchConfig(sample=True, max_length=25, min_length=25)
    alone = [facts(generator.generate(prompt, config=config)) for prompt in ("To be", "한국")]
    streams = [generator.stream([prompt], config=config) for prompt in ("To be", "한국")]
    samples = [Sample(), Sample()]
    for tokens in zip(*streams, strict=True):
        for sample, token in zip(samples, tokens, strict=True):
            sample.take(token)
    assert [facts([sample]) for sample in samples] == alone
    left = generator.stream(["To be"], config=config)
    assert len(list(islice(left, 3))) == 3
    left.close()  # a text that nobody wants any more leaves nothing behind
    assert facts(generator.generate("To be", config=config)) == alone[0] and len(generator._replays.ready) == 1


def test_few_are_kept_and_other_weights_are_noticed():
    generator = make()
    generator.fixed = True
    for temperature in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        generator.generate("a", config=SearchConfig(sample=True, max_length=3, temperature=temperature))
    assert len(generator._replays.ready) == 4
    config = SearchConfig(sample=True, max_length=9, top_k=1)
    generator.generate("a", config=config)
    generator.model.float()  # new memory, and the old one is gone
    assert facts(generator.generate("a", config=config)) == facts(both(generator, "a", config)[0])


def test_numbers_that_are_none_are_named_and_leave_nothing_behind():
    generator = make()
    generator.fixed = True
    config, weight = SearchConfig(sample=True, max_length=9), generator.model.output_head.project.weight
    kept, expected = weight.detach().clone(), generator.generate("a", config=config)
    for changes in ({}, {"top_k": 1}, {"top_k": 3, "top_p": 0.5}):
        weight.data.fill_(float("nan"))
        for generator.fixed in (True, False):
            with pytest.raises(UserError, match="not numbers"):
                generator.generate("a", config=SearchConfig(sample=True, max_length=9, **changes))
    weight.data.copy_(kept)
    generator.fixed = True
    assert facts(generator.generate("a", config=config)) == facts(expected)


def test_what_cannot_be_recorded_takes_plain_steps():
    config = SearchConfig(sample=True, max_length=4)
    for changes in ({"position": "alibi"}, {"experts": 2}, {"attention": "flex"}):
        assert not make(**changes)._replays.fits(config)
    generator = make()
    assert generator._replays.fits(config)
    assert not generator._replays.fits(SearchConfig(sample=True, no_repeat_ngram=2))
    generator.fixed = True
    with trace(generator.model, only="*.attention.weights") as seen:
        generator.generate("To be", config=config)
    assert len(seen.history("decoder.0.attention.weights")) == 4
    kinds = []
    for generator.fixed in (False, True):
        with torch.inference_mode(), generator._sampler([5], config, 8, 4) as sampler:
            kinds.append(type(sampler))
    assert kinds == [Sampler, FixedSampler]


class Operations(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.name())
        return function(*args, **(kwargs or {}))


def suspicious(position: str, config: SearchConfig) -> set[str]:
    """Operations of a step that no graph can record."""
    sizes = make(position=position, kv_heads=1, window=9).model.config
    with FakeTensorMode(), torch.no_grad(), Operations() as seen:
        step = FixedStep(Decoder(sizes).eval(), config, 128, 260, BYTES.eos)
        seen.names.clear()
        step.next()
        step.next()
    return {name for name in seen.names if "lift_fresh" in name or "local_scalar" in name}


@pytest.mark.parametrize("position", ["rope", "learned", "t5", "relative", "alibi", "sinusoidal", "none"])
def test_a_step_depends_on_no_value_and_takes_none_from_the_processor(position):
    """Tensors with shapes but no numbers fail where one is read back; `lift_fresh`: a tensor made of Python numbers."""
    for changes in ({}, {"top_k": 1}, {"temperature": 0.5, "top_p": 0.9, "min_length": 1}, {"top_k": 7, "n_best": 3}):
        assert not suspicious(position, SearchConfig(sample=True, **changes))
    with FakeTensorMode(), Operations() as seen:
        torch.tensor([1.0])
    assert any("lift_fresh" in name for name in seen.names)  # which is found where it happens


@torch.no_grad()
def test_a_fixed_cache_takes_what_a_growing_one_holds():
    model = make().model
    prompt, following = torch.randint(4, 260, (1, 7)), torch.randint(4, 260, (3, 5))
    state, fixed = model.start(), model.start()
    model.step(prompt, state)
    cache = fixed.cache = FixedCache(32, prompt.device)
    for _ in range(2):  # again: nothing of what came after may be left
        cache.take(state.cache, 3)
        for at in range(5):
            cache.reach = 16
            logits = model.step(following[:, at : at + 1], fixed, last=True)[:, -1]
            whole = torch.cat((prompt.expand(3, -1), following[:, : at + 1]), dim=1)
            torch.testing.assert_close(logits, model(whole)[:, -1])


def test_parts_of_one_tensor_are_seen_together():
    whole = torch.arange(2 * 3 * 20.0).view(2, 3, 20)
    _, k, v = whole.split((4, 8, 8), dim=-1)
    found = together(k.view(2, 3, 2, 4).transpose(1, 2), v.view(2, 3, 2, 4).transpose(1, 2))
    assert found is not None and found.shape == (2, 2, 2, 3, 4)
    for part, one in zip((k, v), found, strict=True):
        assert torch.equal(one.transpose(1, 2).flatten(2), part)
    assert together(v, k) is None and together(k, v.clone()) is None and together(k, k) is None
    assert together(*whole.split((12, 8), dim=-1)) is None


@torch.no_grad()
def test_of_a_prompt_only_the_end_is_scored():
    model = make().model
    ids = torch.randint(4, 260, (2, 9))
    logits = model.step(ids, model.start(), last=True)
    assert logits.shape == (2, 1, 260)
    torch.testing.assert_close(logits, model(ids)[:, -1:])


def test_numbers_one_by_one_or_together():
    one, together = Uniform(7, [0, 3], 2), Uniform(7, [0, 3], 2)
    singly = torch.cat([one.following(1) for _ in range(100)], dim=1)
    assert torch.equal(singly, torch.cat((together.following(30), together.following(70)), dim=1))


def test_the_likeliest_is_the_first_of_equals():
    scores = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    for chance in (0.0, 0.5, 0.999):
        assert sample_token(scores, SearchConfig(sample=True, top_k=1), torch.tensor([chance])).tolist() == [1]


def test_matrices_by_column_are_the_same_model():
    generator, other = make(), make()
    lay_columns(other.model)
    assert other.model.decoder.blocks[0].attention.qkv.weight.stride(0) == 1
    assert (
        other.model.embedding.tokens.weight.is_contiguous() and other.model.output_head.project.weight.is_contiguous()
    )
    config = SearchConfig(sample=True, max_length=20, n_best=2)
    assert facts(other.generate("To be", config=config)) == facts(generator.generate("To be", config=config))


@pytest.mark.cuda
@pytest.mark.parametrize("changes", SETTINGS, ids=str)
@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal"])
def test_recorded_as_a_graph(position, changes):
    generator = make(position=position, max_length=600)
    generator = Generator(Bundle(generator.model.cuda(), {"tokenizer": BYTES}))
    assert generator.fixed
    config = SearchConfig(sample=True, **{"max_length": 300, **changes})
    for prompt in ("To be", "한국"):  # the second is replayed from its first step
        plain, fixed = both(generator, prompt, config, context=200, overflow="slide")
        assert facts(fixed) == facts(plain)
    assert all(any(step.graphs.values()) for step in generator._replays.ready.values())


def test_texts_under_way_at_once_in_threads_and_turns():
    """A recorded step serves one text at a time, and none works while another thread may be recording."""
    generator, prompts = make(), ["To be", "한", "x" * 30, "or not"]
    config = SearchConfig(sample=True, top_k=5, max_length=24)
    expected = [facts(both(generator, prompt, config, overflow="slide")[0]) for prompt in prompts]

    def write(prompt: str) -> list[tuple[list[int], str, str | None]]:
        return facts(generator.generate(prompt, config=config, overflow="slide"))

    generator.fixed = True
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(write, prompts)) == expected
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(write("To be")))
    with TURN:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and not found
    thread.join(20)
    assert found == expected[:1]
