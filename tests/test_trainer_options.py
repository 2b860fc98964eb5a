"""What [train] can ask for beyond plain steps, each against its definition, and exact resuming with all of it on."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from regard.data.pack import Packs
from regard.data.streams import Batches
from regard.errors import UserError
from regard.models.folder import WEIGHTS, cudnn_attention, read_weights, weights_of
from regard.models.transformer import build
from regard.nn.feedforward import Experts
from regard.training.config import TrainConfig
from regard.training.history import read_metrics
from regard.training.objective import target_states, translation
from regard.training.optimizer import rate
from regard.training.snapshots import read_snapshot, saved_steps
from regard.training.trainer import LOSS, Metric, Trainer
from reversal import MODEL, TRAIN, assert_same, reversal_pairs, train
from stopping import interrupt_at

STILL = replace(MODEL, dropout=0.0, embed_dropout=0.0)
VALID = reversal_pairs(8, seed=9)
METRICS = {"loss": LOSS, "bleu": Metric("bleu", higher=True)}


def valid_loss(model) -> dict[str, float]:
    with torch.inference_mode():
        loss, count = translation(model, VALID.batch(torch.arange(len(VALID))))
    return {"valid_loss": loss.item() / int(count)}


def make(folder, config=TRAIN, model=MODEL, evaluate=None, objective=None, metric=LOSS) -> Trainer:
    torch.manual_seed(config.seed)
    pairs = reversal_pairs()
    packed = config.pack and Packs(pairs, config.batch_tokens // config.pack, config.pack, config.seed)
    stream = packed or Batches(pairs, config.batch_tokens, config.seed)
    usual = partial(translation, label_smoothing=config.label_smoothing, r_drop=config.r_drop)
    return Trainer(build(model), stream, objective or usual, config, folder, evaluate, metric)


def weights(trainer):
    return {name: tensor.clone() for name, tensor in weights_of(trainer.model).items()}


@pytest.mark.parametrize("pack", [0, 32])
def test_attention_uses_cudnn_where_all_batches_have_one_shape(tmp_path, pack):
    """Only in steps: what is evaluated has other shapes."""
    allowed = {"step": set(), "evaluation": set()}

    def objective(model, batch):
        allowed["step"].add(torch.backends.cuda.cudnn_sdp_enabled())
        return translation(model, batch)

    def evaluate(model):
        allowed["evaluation"].add(torch.backends.cuda.cudnn_sdp_enabled())
        return valid_loss(model)

    with cudnn_attention(allowed=False):  # as `find_device` leaves it
        make(tmp_path, replace(TRAIN, pack=pack, steps=2, evaluate_every=1), STILL, evaluate, objective).run()
    assert allowed == {"step": {pack > 0}, "evaluation": {False}}


# --- mixtures of experts


def test_the_load_balancing_loss_is_added_to_every_objective(tmp_path):
    """Fedus et al. 2021, eq. 4: α times the sum over layers, per token."""
    trainer = make(tmp_path, model=replace(STILL, experts=2), objective=cross_entropy)
    batch = next(iter(trainer.batches))
    loss, tokens = trainer.engine.compute(batch)
    balances = [module.balance for module in trainer.model.modules() if isinstance(module, Experts)]
    plain, _ = cross_entropy(trainer.model, batch)
    assert len(balances) == 2 and tokens == batch.tokens
    torch.testing.assert_close(loss, plain + 0.01 * tokens * sum(balances))


# --- several batches a step


def cross_entropy(model, batch):
    """The loss in the precision of the model: float64 here."""
    logits = model.output_head(target_states(model, batch)).flatten(0, 1)
    return F.cross_entropy(logits, batch.labels.flatten(), ignore_index=-100, reduction="sum"), batch.tokens


class Gradients(Trainer):
    """Keeps the gradient that the optimizer was handed, before clipping (clip is large)."""

    def _update(self, batches):
        kept = {}
        step, self.scaler.step = (
            self.scaler.step,
            lambda optimizer: kept.update({name: p.grad.clone() for name, p in self.model.named_parameters()}),
        )
        try:
            return super()._update(batches)
        finally:
            self.scaler.step, self.kept = step, kept


def gradients(folder, config, stream):
    torch.manual_seed(1)
    trainer = Gradients(build(STILL).double(), stream, cross_entropy, config, folder)
    trainer.run()
    return trainer.kept


def test_accumulated_batches_give_the_gradient_of_one_large_batch(tmp_path):
    """The mean is over tokens, not over batches, although these have different sizes."""
    pairs, config = reversal_pairs(), replace(TRAIN, steps=1, clip=1e9)
    stream = Batches(pairs, TRAIN.batch_tokens, 1)
    parts = stream.plan(0)
    assert len(parts) > 2 and len({int(pairs.batch(rows).tokens) for rows in parts}) > 1
    many = gradients(tmp_path / "many", replace(config, gradient_accumulation=len(parts)), stream)
    one = gradients(tmp_path / "one", config, Batches(pairs, 10_000, 1))
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=1e-9, atol=1e-12)


def test_accumulating_takes_the_batches_in_turn(tmp_path):
    trainer = make(tmp_path, replace(TRAIN, gradient_accumulation=3, steps=4))
    plain = Batches(reversal_pairs(), TRAIN.batch_tokens, 1)
    for _ in zip(range(12), plain, strict=False):
        pass
    trainer.run()
    assert trainer.batches.position == plain.position


# --- the running mean


def test_the_mean_follows_its_recursion(tmp_path):
    """m_t = β m_(t-1) + (1 - β) θ_t, from the first weights on."""
    config = replace(TRAIN, steps=6, ema=0.7, save_every=1, keep=6)
    trainer = make(tmp_path, config)
    mean = {name: tensor.double() for name, tensor in weights(trainer).items()}
    trainer.run()
    for step in range(1, 7):
        now = read_weights(tmp_path / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
        mean = {name: 0.7 * mean[name] + 0.3 * now[name].double() for name in mean}
    for running, (name, _) in zip(trainer.mean, trainer.model.named_parameters(), strict=True):
        torch.testing.assert_close(running.double(), mean[name], rtol=1e-5, atol=1e-6)
        assert not running.requires_grad  # no graph grows behind it, step after step


def test_the_mean_is_what_is_judged_and_kept(tmp_path):
    evaluations = []

    def evaluate(model):
        assert not model.training
        evaluations.append({name: tensor.clone() for name, tensor in weights_of(model).items()})
        return valid_loss(model)

    trainer = make(tmp_path, replace(TRAIN, ema=0.9), evaluate=evaluate)
    trainer.run()
    means = dict(zip((name for name, _ in trainer.model.named_parameters()), trainer.mean, strict=True))
    assert_same(evaluations[-1], means)
    assert_same(read_weights(tmp_path / WEIGHTS), means)
    newest = read_weights(tmp_path / "checkpoints" / "step-00000023" / "model.safetensors")
    assert_same(newest, weights(trainer))  # training itself goes on with the weights, not their mean
    assert any(not torch.equal(newest[name], means[name]) for name in means)


# --- the best weights, and enough


def falling_then_rising(best_at: int):
    """A validation figure with its minimum at one evaluation, whatever the model does."""
    count = 0

    def evaluate(model):
        nonlocal count
        count += 1
        return {"valid_loss": 1.0 + abs(count - best_at), "bleu": 50.0 - abs(count - best_at)}

    return evaluate


@pytest.mark.parametrize("metric", ["loss", "bleu"])
def test_patience_ends_training_and_the_best_weights_are_kept(tmp_path, metric):
    config = replace(TRAIN, steps=1000, evaluate_every=2, patience=3, save_every=2, keep=100, metric=metric)
    trainer = make(tmp_path, config, evaluate=falling_then_rising(4), metric=METRICS[metric])
    assert trainer.run() and trainer.step == 14  # best at step 8, then three that are worse
    assert trainer.best == {"step": 8, "stale": 3, "value": 1.0 if metric == "loss" else 50.0}
    best = read_weights(tmp_path / "checkpoints" / "step-00000008" / "model.safetensors")
    assert_same(read_weights(tmp_path / WEIGHTS), best)
    again = make(tmp_path, config, evaluate=falling_then_rising(1), metric=METRICS[metric])
    assert again.resume() and again.finished and again.run() and again.step == 14


def test_a_metric_that_is_not_there_is_an_error(tmp_path):
    trainer = make(tmp_path, replace(TRAIN, steps=1, metric="bleu"), evaluate=valid_loss, metric=METRICS["bleu"])
    with pytest.raises(UserError, match=r"train.metric = 'bleu'.*valid_loss"):
        trainer.run()


def test_evaluation_changes_nothing(tmp_path):
    plain = train(tmp_path / "plain")
    evaluations = make(tmp_path / "evaluated", replace(TRAIN, evaluate_every=2), evaluate=valid_loss)
    evaluations.run()
    assert_same(weights(plain), weights(evaluations))


# --- stopped and resumed, with everything on


ALL = replace(
    TRAIN, steps=24, pack=12, gradient_accumulation=2, ema=0.9, r_drop=1.0, precision="bf16", nonfinite="skip",
    evaluate_every=3, patience=6, save_every=4, log_every=5, keep=3,
)  # fmt: skip


def everything(trainer):
    """All that a run has to show but measured time."""
    lines = [
        {k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")}
        for line in read_metrics(trainer.folder)
    ]
    means = {str(i): mean for i, mean in enumerate(trainer.mean)}
    moments = {
        f"{i}/{key}": value
        for i, p in enumerate(trainer.model.parameters())
        for key, value in trainer.optimizer.state[p].items()
    }
    return weights(trainer) | means | moments | read_weights(trainer.folder / WEIGHTS), (
        lines, trainer.best, trainer.step, trainer.batches.position, torch.get_rng_state().tolist(),
        sorted(path.name for path in (trainer.folder / "checkpoints").iterdir()),
    )  # fmt: skip


@pytest.mark.parametrize("stops", [(1,), (5, 6), (4, 13, 22)])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, stops):
    whole = make(tmp_path / "whole", ALL, evaluate=valid_loss)
    assert whole.run()
    tensors, others = everything(whole)

    for stop in stops:
        part = make(tmp_path / "parts", ALL, evaluate=valid_loss)
        part.resume()
        real = part._update

        def update(batches, part=part, real=real, stop=stop):
            if part.step + 1 == stop:
                signal.raise_signal(signal.SIGINT)
            return real(batches)

        part.update = update
        assert not part.run() and part.step == stop
    last = make(tmp_path / "parts", ALL, evaluate=valid_loss)
    assert last.resume() and last.step == stops[-1] and last.run()
    again, same = everything(last)
    assert same == others
    assert_same(again, tensors)


def test_patience_runs_on_over_a_stop(tmp_path, monkeypatch):
    """Two stale evaluations before a stop and one after it make three."""
    config = replace(TRAIN, steps=1000, evaluate_every=2, patience=3)
    interrupt_at(monkeypatch, 5)
    first = make(tmp_path, config, evaluate=falling_then_rising(1))
    assert not first.run() and first.best["stale"] == 2
    second = make(tmp_path, config, evaluate=lambda model: {"valid_loss": 2.0})
    assert second.resume() and second.run() and second.step == 8


# --- what does not go together


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ema": 1.0}, r"ema = 1.0"),
        ({"ema": -0.1}, r"ema = -0.1"),
        ({"ema": 0.9, "average": 2}, r"average = 2: ema = 0.9 .* choose one"),
        ({"average": 5}, r"average = 5: .* keep >= 5"),
        ({"snapshots": 1}, r"snapshots = 1: at least 2"),
        ({"pack": 5000}, r"pack = 5000: .* batch_tokens = 4096"),
        ({"patience": 2, "evaluate_every": 0}, r"patience = 2: .* evaluate_every"),
        ({"cuda_graph": True}, r"cuda_graph = true .* pack > 0"),
        ({"cuda_graph": True, "pack": 64, "gradient_accumulation": 2}, r"gradient_accumulation = 1"),
        ({"gradient_accumulation": 0}, r"gradient_accumulation = 0"),
        ({"r_drop": -1.0}, r"r_drop = -1.0"),
        ({"precision": "half"}, r"precision = 'half'.*bf16"),
        ({"nonfinite": "ignore"}, r"nonfinite = 'ignore'.*skip"),
        ({"tensorboard": 1}, r"tensorboard = 1: expected true or false"),
    ],
)
def test_refusals_name_the_field(fields, message):
    with pytest.raises(UserError, match=message):
        TrainConfig(**fields)


def test_a_graph_needs_a_gpu(tmp_path):
    with pytest.raises(UserError, match=r"cuda_graph = true: a CUDA graph needs an NVIDIA GPU, not cpu"):
        make(tmp_path, replace(TRAIN, cuda_graph=True, pack=16))


def test_warmup_and_evaluations_follow_the_number_of_steps():
    for steps, warmup in ((10, 1), (300, 30), (10_000, 1000), (100_000, 4000)):
        config = TrainConfig(steps=steps)
        assert config.warmup_steps == warmup and config.evaluation_interval == steps // 10
        assert max(rate(step, config) for step in range(1, steps + 1)) == config.lr
    assert TrainConfig(steps=10, warmup=0, evaluate_every=0).evaluation_interval == 0


def test_the_best_weights_are_kept_by_default(tmp_path):
    trainer = make(tmp_path, replace(TRAIN, steps=20, evaluate_every=None), evaluate=falling_then_rising(4))
    assert trainer.run() and trainer.best["step"] == 8
    assert [line["step"] for line in read_metrics(tmp_path) if "valid_loss" in line] == [*range(2, 21, 2)]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"warmup": 100}, r"train\.warmup = 100 >= train\.steps = 100: .*never reaches train\.lr"),
        ({"average": 5, "keep": 5, "save_every": 40}, r"train\.average = 5: .* saves 3; set train\.save_every = 20"),
        ({"ema": 0.999}, r"train\.ema = 0\.999: the mean covers about 1,000 steps, more than train\.steps = 100"),
    ],
)
def test_settings_that_spoil_a_run_are_reported(fields, message):
    (line,) = TrainConfig(steps=100, **fields).warnings()
    assert re.match(message, line)
    assert not [*TrainConfig(steps=100).warnings()] and not [*TrainConfig(steps=1).warnings()]


# --- snapshots


def test_snapshots_are_the_weights_along_the_way_and_change_nothing(tmp_path, monkeypatch):
    """At S (i / (n - 1))², from the initial weights to the last, also where training was interrupted."""
    config = replace(TRAIN, steps=16, snapshots=5, save_every=1, keep=16)
    interrupt_at(monkeypatch, 7)
    trainer = make(tmp_path, config)
    first = weights(trainer)
    assert not trainer.run()
    again = make(tmp_path, config)
    assert again.resume() and again.run()
    assert_same(weights(again), weights(train(tmp_path / "plain", replace(config, snapshots=0))))
    assert saved_steps(tmp_path) == [0, 1, 4, 9, 16]
    for step in saved_steps(tmp_path):
        path = tmp_path / "checkpoints" / f"step-{step:08d}" / "model.safetensors"
        expected = read_weights(path) if step else first
        for name, tensor in read_snapshot(tmp_path, step).items():  # half precision: 11 bits, subnormal below 6e-5
            torch.testing.assert_close(tensor, expected[name], rtol=2**-11, atol=2**-25)
    with pytest.raises(UserError, match=r"step = 3: .* steps 0, 1, 4, 9, 16"):
        read_snapshot(tmp_path, 3)


def test_snapshots_of_a_mean_are_the_mean(tmp_path):
    trainer = make(tmp_path, replace(TRAIN, steps=4, snapshots=2, ema=0.7))
    trainer.run()
    names = [name for name, _ in trainer.model.named_parameters()]
    snapshot = read_snapshot(tmp_path, 4)
    for name, running in zip(names, trainer.mean, strict=True):
        torch.testing.assert_close(snapshot[name], running, rtol=2**-11, atol=2**-25)
