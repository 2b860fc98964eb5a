"""The recurrent baseline: against a loop over torch's cells, its own stepping, padding, and tasks it must learn."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from regard.cost import cost
from regard.data.batch import PairBatch
from regard.errors import UserError
from regard.interop.convert import config_to_hf
from regard.models.config import ModelConfig
from regard.models.folder import load, save
from regard.models.recipe import preset
from regard.models.transformer import EncoderDecoder, Recurrent, SequenceToSequence, build
from regard.nn.trace import replace as put
from regard.nn.trace import trace
from regard.predict.beam import greedy
from regard.settings import from_dict, to_dict
from regard.training.objective import translation

CELLS, SCORES = ("gru", "lstm"), ("additive", "multiplicative", "dot")
EVERY = [(cell, score) for cell in CELLS for score in SCORES]
VOCAB = 17


def config(**changes: Any) -> ModelConfig:
    fields = {"architecture": "recurrent", "vocab_size": VOCAB, "dim": 8, "embed_dim": 6, "layers": 2, "dropout": 0.0}
    return ModelConfig(**{**fields, "embed_dropout": 0.0, **changes})


def make(**changes: Any) -> Recurrent:
    model = build(config(**changes)).double().eval()
    assert isinstance(model, Recurrent)
    for parameter in model.parameters():  # biases too
        nn.init.normal_(parameter, std=0.4)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape)


PADDINGS = {
    "right": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]],
    "left": [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]],
    "between": [[1, 0, 1, 0, 1], [0, 1, 0, 1, 1], [1, 1, 1, 1, 0]],
}


# --- the formulas


def by_hand(model: Recurrent, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The module's docstring as loops, one sentence at a time, over torch's single cells: logits and weights."""
    c, dim = model.config, model.config.dim
    kind = nn.LSTMCell if c.cell == "lstm" else nn.GRUCell
    scale = c.token_dim**0.5 if c.embed_scale else 1.0

    def cell(weights: dict[str, Tensor], x: Tensor, state: Any) -> Any:
        made = kind(x.shape[-1], dim, device="meta", dtype=x.dtype)
        return torch.func.functional_call(made, weights, (x, state))

    def zero() -> Any:
        z = source.new_zeros(dim, dtype=torch.float64)
        return (z, z) if c.cell == "lstm" else z

    def hidden(state: Any) -> Tensor:
        return state[0] if c.cell == "lstm" else state

    def direction(xs: list[Tensor], layer: int, suffix: str) -> list[Tensor]:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        weights = {name: getattr(model.encoder.layers, f"{name}_l{layer}{suffix}") for name in names}
        state, out = zero(), []
        for x in xs:
            state = cell(weights, x, state)
            out.append(hidden(state))
        return out

    rows, looks = [], []
    for words, given in zip(source, target, strict=True):
        h = [model.source_embedding.tokens.weight[word] * scale for word in words]
        for layer in range(c.layers):
            ahead, back = direction(h, layer, ""), direction(h[::-1], layer, "_reverse")[::-1]
            h = [torch.cat(pair) for pair in zip(ahead, back, strict=True)]
        begin = torch.tanh(model.decoder.first.weight @ h[0][dim:] + model.decoder.first.bias).split(dim)
        states = [(s, torch.zeros_like(s)) if c.cell == "lstm" else s for s in begin]
        cross, logits, weights = model.decoder.cross, [], []
        for word in given:
            s, y = hidden(states[-1]), model.target_embedding.tokens.weight[word] * scale
            match c.attention_score:
                case "additive":
                    e = [cross.v[0] @ torch.tanh(cross.q.weight @ s + cross.k.weight @ one) for one in h]
                case "multiplicative":
                    e = [s @ cross.k.weight @ one for one in h]
                case _:
                    e = [s @ (one[:dim] + one[dim:]) for one in h]
            alpha = torch.softmax(torch.stack(e), 0)
            context = sum(a * one for a, one in zip(alpha, h, strict=True))
            x = torch.cat((y, context))
            for layer, own in enumerate(model.decoder.cells):
                states[layer] = cell(dict(own.named_parameters()), x, states[layer])
                x = hidden(states[layer])
            read = model.decoder.readout.weight @ torch.cat((x, context, y)) + model.decoder.readout.bias
            t = torch.maximum(read[: c.token_dim], read[c.token_dim :])
            logits.append(model.output_head.project.weight @ t)
            weights.append(alpha)
        rows.append(torch.stack(logits))
        looks.append(torch.stack(weights))
    return torch.stack(rows), torch.stack(looks)[:, None]


@pytest.mark.parametrize("padding", PADDINGS)
def test_without_attention_the_context_is_the_last_state_of_each_direction(padding: str) -> None:
    """Cho et al. 2014: one vector is all that the decoder knows of the source."""
    model, source, is_real = make(cross_attention=False), tokens(3, 5), torch.tensor(PADDINGS[padding]).bool()
    assert not list(model.decoder.cross.parameters())
    with trace(model) as seen:
        logits = model(source, tokens(3, 4), is_real)
    assert logits.shape == (3, 4, VOCAB)
    for row, real, context in zip(source, is_real, seen["decoder.cross.heads"], strict=True):
        states = model.encode(row[real][None]).states[0]  # [S, 2 dim] without padding
        expected = torch.cat((states[-1, : model.config.dim], states[0, model.config.dim :]))
        torch.testing.assert_close(context, expected.expand_as(context))


@pytest.mark.parametrize(("cell", "score"), EVERY)
def test_equals_a_loop_over_torchs_cells(cell: str, score: str) -> None:
    model = make(
        cell=cell, attention_score=score, decoder_layers=1 if score == "dot" else None, tie_embeddings=score != "dot"
    )
    source, target = tokens(2, 4), tokens(2, 3)
    expected, weights = by_hand(model, source, target)
    with trace(model) as seen:
        ours = model(source, target)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(seen["decoder.cross.weights"], weights)
    parameters = list(model.parameters())
    for own, other in zip(
        torch.autograd.grad(ours.sin().sum(), parameters),
        torch.autograd.grad(expected.sin().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("cell", CELLS)
def test_the_encoder_is_torchs(cell: str) -> None:
    model, source = make(cell=cell), tokens(3, 5)
    kind = {"gru": nn.GRU, "lstm": nn.LSTM}[cell]
    theirs = kind(6, 8, num_layers=2, bidirectional=True, batch_first=True).double()
    theirs.load_state_dict(model.encoder.layers.state_dict())
    expected, _ = theirs(model.source_embedding(source))
    torch.testing.assert_close(model.encode(source).states, expected)
    torch.testing.assert_close(model.encode(source, torch.ones(3, 5, dtype=torch.bool)).states, expected)


# --- stepping, padding, rows


@pytest.mark.parametrize(("cell", "score"), EVERY)
def test_stepping_equals_teacher_forcing(cell: str, score: str) -> None:
    model, source, target = make(cell=cell, attention_score=score), tokens(3, 5), tokens(3, 6)
    is_real = torch.tensor(PADDINGS["right"], dtype=torch.bool)
    state = model.start(source, is_real, capacity=6)
    parts = [model.step(part, state) for part in target.split([1, 1, 3, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(source, target, is_real))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("side", PADDINGS)
def test_padding_changes_nothing(cell: str, side: str) -> None:
    model = make(cell=cell)
    source, target, is_real = tokens(3, 5), tokens(3, 4), torch.tensor(PADDINGS[side], dtype=torch.bool)
    with trace(model) as seen:
        together = model(source, target, is_real)
    weights = seen["decoder.cross.weights"]
    assert weights.shape == (3, 1, 4, 5)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones_like(weights[..., 0]))
    assert not weights.masked_select(~is_real[:, None, None]).any()
    for row in range(3):
        alone = model(source[row, is_real[row]][None], target[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone)
    other = torch.where(is_real, source, tokens(3, 5))
    torch.testing.assert_close(model(other, target, is_real), together, rtol=0, atol=0)


def test_padding_in_the_target_is_passed_over() -> None:
    model, source, target = make(), tokens(3, 4), tokens(3, 5)
    is_real = torch.tensor(PADDINGS["left"], dtype=torch.bool)
    logits = model(source, target, target_is_real=is_real)
    for row in range(3):
        alone = model(source[row : row + 1], target[row, is_real[row]][None])
        torch.testing.assert_close(logits[row, is_real[row]][None], alone)


def test_a_source_of_padding_alone_gives_finite_numbers_that_ignore_it() -> None:
    model, target = make(), tokens(2, 3)
    is_real = torch.tensor([[True, True], [False, False]])
    first, second = (model(torch.stack((torch.tensor([1, 2]), padding)), target, is_real) for padding in tokens(2, 2))
    assert first.isfinite().all()
    assert torch.equal(first, second)


def test_rows_can_be_reordered_and_repeated() -> None:
    model, source, target = make(cell="lstm"), tokens(2, 5), tokens(3, 4)
    is_real = torch.tensor(PADDINGS["right"][:2], dtype=torch.bool)
    rows = torch.tensor([1, 0, 1])
    begun = tokens(2, 2)
    state = model.start(source, is_real)
    model.step(begun, state)
    state.reorder(rows)
    logits = model.step(target, state)
    whole = model(source[rows], torch.cat((begun[rows], target), dim=1), is_real[rows])
    torch.testing.assert_close(logits, whole[:, 2:])


# --- tracing


def test_tracing_changes_nothing_and_collects_over_time() -> None:
    model, source, target = make(), tokens(2, 5), tokens(2, 4)
    plain = model(source, target)
    with trace(model) as seen:
        assert torch.equal(model(source, target), plain)
    assert set(seen.names) == set(seen)
    shapes = {stage: tuple(seen[f"decoder.cross.{stage}"].shape) for stage in ("q", "k", "v", "weights", "heads")}
    assert shapes == {
        "q": (2, 1, 4, 8), "k": (2, 1, 5, 8), "v": (2, 1, 5, 16), "weights": (2, 1, 4, 5), "heads": (2, 1, 4, 16),
    }  # fmt: skip
    assert all(len(seen.history(name)) == 1 for name in seen)
    with trace(model, only="decoder.cross.weights") as steps:
        state = model.start(source)
        for at in range(4):
            model.step(target[:, at : at + 1], state)
    torch.testing.assert_close(torch.cat(steps.history("decoder.cross.weights"), dim=2), seen["decoder.cross.weights"])


def test_an_intervention_reaches_what_follows() -> None:
    """Looking at source token 2 alone is the same as its state being the only one there is."""
    model, source, target = make(), tokens(2, 5), tokens(2, 4)
    with trace(model, {"decoder.cross.weights": put(F.one_hot(torch.tensor(2), 5))}) as seen:
        edited = model(source, target)
    assert torch.equal(seen["decoder.cross.weights"], F.one_hot(torch.tensor(2), 5).double().expand(2, 1, 4, 5))
    memory = model.encode(source)
    with trace(model, {"decoder.cross.v": lambda v: v[:, :, 2:3].expand_as(v)}):  # every value is that of token 2
        expected = model.output_head(model.states(target, memory))
    torch.testing.assert_close(edited, expected)
    assert not torch.allclose(edited, model(source, target))


# --- learning


BLIND = {"decoder.cross.heads": torch.zeros_like}  # an edit: attention says nothing


def reversal(rows: int, length: int, words: int = 12) -> PairBatch:
    """Read w_1 … w_n, write w_n … w_1 and </s>. 0 is <s>, 1 is </s>."""
    source = torch.randint(2, words, (rows, length))
    end = torch.ones(rows, 1, dtype=torch.long)
    target = torch.cat((0 * end, source.flip(1), end), dim=1)
    return PairBatch(torch.cat((source, end), dim=1), None, target[:, :-1], target[:, 1:])


def taught(steps: int, edits: dict[str, Any], **changes: Any) -> Recurrent:
    """Trained while `edits` are in force."""
    model = build(config(vocab_size=12, dim=32, embed_dim=32, layers=1, **changes))
    assert isinstance(model, Recurrent)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        with trace(model, edits, only="decoder.output") if edits else nullcontext():
            loss, count = translation(model, reversal(32, 8))
        optimizer.zero_grad()
        (loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def right(model: Recurrent, batch: PairBatch) -> float:
    """The share of tokens that greedy search gets right."""
    found = greedy(model, batch.source, None, bos=0, eos=1, limit=batch.target.shape[1])
    wanted = batch.labels[:, :-1].tolist()
    hits = sum(a == b for own, want in zip(found, wanted, strict=True) for a, b in zip(own, want, strict=False))
    return hits / sum(map(len, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", pytest.param("gru", marks=pytest.mark.slow)])
def test_it_learns_to_reverse_because_of_attention(cell: str) -> None:
    torch.set_num_threads(1)
    unseen = reversal(100, 8)
    seeing = taught(150, {}, cell=cell)
    loss, count = translation(seeing, unseen)
    assert loss / count < 0.2
    assert right(seeing, unseen) > 0.9
    with trace(seeing) as seen:
        seeing(unseen.source, unseen.target)
    looks = seen["decoder.cross.weights"][:, 0, :8].argmax(dim=-1).float().mean(dim=0)
    assert looks[0] > looks[-1] + 3  # from the end of the source towards its beginning
    blind = taught(150, BLIND, cell=cell)  # the same model that has s_0 alone to remember the source by
    with trace(blind, BLIND):
        assert right(blind, unseen) < right(seeing, unseen) - 0.4


def test_dropout_is_for_training_alone() -> None:
    model = build(config(dropout=0.5, embed_dropout=0.5, attention_dropout=0.5))
    source, target = tokens(2, 5), tokens(2, 4)
    assert not torch.equal(model(source, target), model(source, target))
    model.eval()
    assert torch.equal(model(source, target), model(source, target))


# --- its config, its cost, its folder


def test_the_same_config_with_one_key_changed() -> None:
    """What describes Transformer blocks is not read, so a Transformer's recipe needs one change."""
    table = {"vocab_size": 11, "dim": 6, "layers": 1, "heads": 2, "ff_dim": 16, "position": "rope", "head_dim": 4}
    transformer = build(from_dict(ModelConfig, table))
    recurrent = build(from_dict(ModelConfig, {**table, "architecture": "recurrent"}))
    assert isinstance(transformer, EncoderDecoder) and transformer.config.attention_score == "dot"
    assert isinstance(recurrent, Recurrent) and recurrent.config.attention_score == "additive"
    assert isinstance(recurrent, SequenceToSequence)
    for changes in ({"heads": 7, "head_dim": None}, {"position": "learned", "max_length": 1}, {"experts": 4}):
        torch.manual_seed(0)
        one = build(recurrent.config).eval()
        torch.manual_seed(0)
        other = build(replace(recurrent.config, **changes)).eval()
        source, target = torch.randint(11, (2, 5)), torch.randint(11, (2, 4))
        assert torch.equal(one(source, target), other(source, target))
        assert cost(one.config, seq=5) == cost(other.config, seq=5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_score": "concat"}, "attention_score = 'concat'.*attention_score = 'additive'"),
        ({"input": "patches"}, "input = 'patches': a recurrent model reads tokens"),
        ({"output_head": "none"}, "output_head = 'none': a recurrent model predicts tokens"),
        ({"embed_dim": 0}, "embed_dim = 0: must be 1 or more"),
        ({"cell": "rnn"}, "cell = 'rnn'.*gru, lstm"),
        ({"target_vocab_size": 9}, "share_embeddings = true needs one vocabulary"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        config(**changes)


def test_inputs_that_cannot_be_read_are_refused() -> None:
    model, source = make(), tokens(2, 5)
    with pytest.raises(UserError, match=r"document.*packing"):
        model.encode(source, document=torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(UserError, match=r"document.*packing"):
        model.states(source, model.encode(source), document=torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(UserError, match=r"source has shape \(2, 0\)"):
        model(tokens(2, 0), source)
    with pytest.raises(UserError, match=r"target has shape \(2, 0\)"):
        model(source, tokens(2, 0))
    with pytest.raises(UserError, match="is_real has dtype"):
        model(source, source, torch.ones(2, 5))
    with pytest.raises(UserError, match=r"no Hugging Face family.*architecture = 'recurrent'"):
        config_to_hf(model.config)


@pytest.mark.parametrize("cell", CELLS)
def test_saved_and_loaded_it_is_the_same(cell: str, tmp_path: Path) -> None:
    model = build(config(cell=cell, share_embeddings=False, target_vocab_size=9, tie_embeddings=False)).eval()
    save(model, tmp_path)
    again = load(tmp_path)
    source, target = tokens(2, 5), torch.randint(9, (2, 4))
    assert again.config == model.config == from_dict(ModelConfig, to_dict(model.config))
    assert torch.equal(again(source, target), model(source, target))


SIZES = [
    {
        "cell": cell,
        "attention_score": score,
        "layers": 1 + (score == "dot"),
        "decoder_layers": decoder_layers,
        "bias": bias,
    }
    for cell, score in EVERY
    for decoder_layers, bias in ((None, True), (3, False))
]


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize(
    "changes",
    [
        *SIZES,
        {"cross_attention": False},
        {"share_embeddings": False, "tie_embeddings": False, "logit_bias": True, "target_vocab_size": 9},
    ],
)
def test_parameters_and_operations_by_formula(changes: dict[str, Any]) -> None:
    found, model = cost(config(**changes), seq=5, target_seq=4, batch=3), build(config(**changes))
    assert sum(found.parameters.values()) == sum(parameter.numel() for parameter in model.parameters())
    cross = sum(parameter.numel() for parameter in model.decoder.cross.parameters())
    assert found.parameters.get("decoder.cross", 0) == cross
    assert found.parameters["encoder.cells"] == sum(p.numel() for p in model.encoder.parameters())
    source, target = tokens(3, 5), torch.randint(9, (3, 4))
    with torch.backends.mkldnn.flags(enabled=False):  # whose LSTM the counter does not see into
        with FlopCounterMode(display=False) as forward:
            logits = model(source, target)
        with FlopCounterMode(display=False) as backward:
            logits.sum().backward()
        state = model.start(source)
        with FlopCounterMode(display=False) as step, torch.no_grad():
            model.step(target[:, :1], state)
    assert forward.get_total_flops() == sum(found.forward.values())
    assert backward.get_total_flops() == found.backward
    assert step.get_total_flops() == found.step


@pytest.mark.parametrize("cell", CELLS)
def test_the_state_is_as_large_as_the_formula_says(cell: str) -> None:
    model, found = build(config(cell=cell)), cost(config(cell=cell), seq=5, target_seq=4, batch=3, dtype="fp32")
    state = model.start(tokens(3, 5))
    model.step(tokens(3, 4), state)
    assert found.kv_cache["self"] == sum(part.nbytes for layer in state.layers for part in layer)
    assert found.kv_cache["cross"] == state.k.nbytes + state.v.nbytes


def test_presets() -> None:
    """Bahdanau et al. 2015, appendix B: 1000 hidden units each way, 620 numbers a word, 30 000 words."""
    paper, small = preset("rnn-2015"), preset("rnn-small")
    assert (paper.dim, paper.token_dim, paper.vocab_size, paper.target_vocab_size) == (1000, 620, 30000, 30000)
    sizes = [sum(cost(one).parameters.values()) for one in (small, preset("small"))]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)
