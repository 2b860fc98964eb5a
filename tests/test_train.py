"""Training: schedule, loss and updates against their formulas, and what is logged and shown."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from regard.data.batch import PairBatch, Pairs
from regard.errors import UserError
from regard.models.transformer import build
from regard.predict import greedy
from regard.training import progress
from regard.training.config import TrainConfig
from regard.training.history import read_metrics
from regard.training.objective import translation
from regard.training.optimizer import paper_rate, rate
from reversal import BOS, EOS, MODEL, TRAIN, make_trainer, reversal_pairs, train

# --- the schedule


@pytest.mark.parametrize(("dim", "warmup"), [(512, 4000), (1024, 4000), (64, 1), (16, 37)])
def test_inverse_sqrt_is_the_papers_formula(dim, warmup):
    """Vaswani et al. 2017, eq. 3."""
    config = TrainConfig(lr=paper_rate(dim, warmup), warmup=warmup)
    for step in [*range(1, 3 * warmup, max(1, warmup // 50)), warmup, 100_000, 300_000]:
        paper = dim**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert math.isclose(rate(step, config), paper, rel_tol=1e-12), step


def test_cosine_falls_from_the_peak_to_zero():
    config = TrainConfig(schedule="cosine", lr=0.5, warmup=100, steps=1100)
    assert rate(100, config) == 0.5 and math.isclose(rate(600, config), 0.25) and rate(1100, config) == 0.0
    rates = [rate(step, config) for step in range(100, 1101)]
    assert rates == sorted(rates, reverse=True)
    for step in range(100, 1101, 50):
        shape = 0.25 * (1 + math.cos(math.pi * (step - 100) / 1000))
        assert math.isclose(rate(step, config), shape, abs_tol=1e-15)
    assert rate(2000, config) == 0.0  # never below, should someone ask


def test_linear_falls_in_a_line_to_zero():
    config = TrainConfig(schedule="linear", lr=0.5, warmup=100, steps=1100)
    for step in range(100, 1101, 50):
        assert math.isclose(rate(step, config), 0.5 * (1100 - step) / 1000, abs_tol=1e-15)
    assert rate(2000, config) == 0.0


@pytest.mark.parametrize("schedule", ["inverse-sqrt", "cosine", "linear", "constant"])
def test_warm_up_rises_in_a_line_and_meets_the_peak(schedule):
    config = TrainConfig(schedule=schedule, lr=2e-3, warmup=40, steps=400)
    assert all(math.isclose(rate(step, config), 2e-3 * step / 40) for step in range(1, 41))


@pytest.mark.parametrize(
    ("schedule", "first", "tenth"),
    [("inverse-sqrt", 1.0, 10**-0.5), ("constant", 1.0, 1.0), ("cosine", (1 + math.cos(math.pi / 20)) / 2, 0.5)],
)
def test_without_warm_up_it_starts_at_the_peak(schedule, first, tenth):
    config = TrainConfig(schedule=schedule, lr=1.0, warmup=0, steps=20)
    assert math.isclose(rate(1, config), first) and math.isclose(rate(10, config), tenth)


def test_a_warm_up_longer_than_training_never_divides_by_zero():
    config = TrainConfig(schedule="cosine", lr=1.0, warmup=50, steps=50)
    assert rate(49, config) == 49 / 50 and rate(50, config) == 1.0


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("steps", 0, "1 or more"),
        ("warmup", -1, "0 or more"),
        ("keep", 0, "1 or more"),
        ("lr", 0.0, "greater than 0"),
        ("lr", math.nan, "finite"),
        ("label_smoothing", 1.0, "below 1"),
        ("weight_decay", -0.1, "0 or more"),
        ("betas", (), "two numbers"),
        ("betas", (0.9,), "two numbers"),
        ("betas", (0.9, 1.0), "two numbers"),
        ("betas", (-0.1, 0.9), "two numbers"),
        ("betas", (0.9, math.nan), "finite"),
        ("seed", -1, "from 0 to"),
        ("seed", 2**64, "from 0 to"),
        ("schedule", "cosin", "did you mean 'cosine'"),
        ("steps", 1.5, "integer"),
    ],
)
def test_a_setting_out_of_range_is_named(field, value, words):
    with pytest.raises(UserError, match=rf"^{field} = .*{words}"):
        TrainConfig(**{field: value})


# --- the loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_loss_is_label_smoothed_cross_entropy_written_out(smoothing):
    model = build(MODEL).double().eval()
    batch = reversal_pairs().batch(torch.arange(6))
    loss, count = translation(model, batch, smoothing)
    log_p = model(batch.source, batch.target, batch.source_is_real).log_softmax(dim=-1)
    expected, tokens = 0.0, 0
    for row in range(6):
        for place, right in enumerate(batch.labels[row].tolist()):
            if right == PairBatch.IGNORE:
                continue
            q = torch.full((log_p.shape[-1],), smoothing / log_p.shape[-1], dtype=torch.float64)
            q[right] += 1 - smoothing
            expected -= (q * log_p[row, place]).sum().item()
            tokens += 1
    assert int(count) == tokens
    assert math.isclose(loss.item(), expected, rel_tol=1e-9)
    real = batch.labels.flatten() >= 0
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="sum")
    theirs = criterion(log_p.flatten(0, 1)[real], batch.labels.flatten()[real])
    torch.testing.assert_close(loss, theirs)


def test_padding_changes_neither_loss_nor_gradient():
    """A batch of rows of different length is the sum of its rows alone, where there is no padding."""
    pairs = Pairs(
        [[5, 6, 7, 8, 9, EOS], [10, EOS], [4, 4, EOS]], [[BOS, 5, EOS], [BOS, 6, 7, 8, 9, EOS], [BOS, 4, EOS]]
    )
    model = build(MODEL).double().eval()

    def measure(batches: list[PairBatch]) -> tuple[float, int, list[torch.Tensor]]:
        model.zero_grad()
        parts = [translation(model, batch, 0.1) for batch in batches]
        sum(loss for loss, _ in parts).backward()
        grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        return sum(loss.item() for loss, _ in parts), sum(int(count) for _, count in parts), grads

    together = measure([pairs.batch(torch.arange(3))])
    alone = measure([pairs.batch(torch.tensor([row])) for row in range(3)])
    assert together[1] == alone[1] == 2 + 5 + 2
    assert math.isclose(together[0], alone[0], rel_tol=1e-6)
    for a, b in zip(together[2], alone[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# --- learning


def test_a_tiny_model_overfits_twenty_pairs(tmp_path):
    model = replace(MODEL, dim=32, ff_dim=64, position="sinusoidal", dropout=0.0, embed_dropout=0.0)
    config = replace(TRAIN, steps=200, schedule="cosine", warmup=20, label_smoothing=0.0, save_every=1000, log_every=50)
    trainer = make_trainer(tmp_path, config, model)
    assert trainer.run() and not trainer.model.training
    assert read_metrics(tmp_path)[-1]["loss"] < 0.05
    pairs = reversal_pairs()
    source, is_real = pairs.sources.pad(torch.arange(20))
    outputs = greedy(trainer.model, source, is_real, bos=BOS, eos=EOS, limit=10)
    target, real = pairs.targets.pad(torch.arange(20))
    assert outputs == [line[keep][1:-1].tolist() for line, keep in zip(target, real, strict=True)]


def test_updates_are_torchs_adamw_on_the_mean_loss(tmp_path):
    config = replace(TRAIN, steps=8, weight_decay=0.1, clip=0.7, log_every=1, warmup=3, eps=1e-4)
    model = replace(MODEL, dropout=0.0, embed_dropout=0.0)
    trainer, plain = make_trainer(tmp_path / "a", config, model), make_trainer(tmp_path / "b", config, model)
    trainer.run()
    plain.model.train()
    parameters = list(plain.model.parameters())
    # eps above the rounding noise of gradients that are 0 in theory, such as that of the keys' bias
    groups = [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.98), eps=1e-4, foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: rate(done + 1, config))
    losses = []
    for batch, _ in zip(plain.batches, range(8), strict=False):
        optimizer.zero_grad()
        logits = plain.model(batch.source, batch.target, batch.source_is_real)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), label_smoothing=0.1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.7)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    logged = [line["loss"] for line in read_metrics(tmp_path / "a")]
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(losses), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(trainer.model.parameters(), parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_the_log_tells_mean_loss_rate_and_speed(tmp_path):
    seen = []

    def spy(model, batch):
        loss, count = translation(model, batch, 0.1)
        seen.append((loss.item(), int(count)))
        return loss, count

    trainer = train(tmp_path, replace(TRAIN, save_every=3), spy)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [5, 10, 15, 20, 23]
    begin, before = 0, 0.0
    for line in lines:
        window = seen[begin : line["step"]]
        tokens = sum(count for _, count in window)
        assert math.isclose(line["loss"], sum(loss for loss, _ in window) / tokens, rel_tol=1e-5)
        assert line["lr"] == rate(line["step"], TRAIN)
        # not only the time since the last checkpoint
        assert math.isclose(line["tokens_per_second"] * (line["seconds"] - before), tokens, rel_tol=0.2, abs_tol=20)
        begin, before = line["step"], line["seconds"]
    assert trainer.seconds >= lines[-1]["seconds"] - 0.001


# --- what is shown


def test_without_a_terminal_lines_at_first_often_then_rarely_and_the_last(monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with closing(progress.Progress(400, done=20)) as shown:
        for step in range(21, 401):
            clock[0] += 1.0
            shown.advance(step)
            shown.show(clock[0])  # as the thread does
            if step % 10 == 0:
                shown.update(2.5, 1e-3, 12_345.6)
    lines = capsys.readouterr().err.splitlines()
    shown_at = [int(re.search(r"step (\d+)/400", line)[1]) - 20 for line in lines]
    assert shown_at == [2, 5, 11, 23, 47, 95, 155, 215, 275, 335, 380]
    assert lines[0] == "training: step 22/400, 6 min left"  # no loss is known yet
    assert lines[2] == "training: step 31/400, loss 2.5000, lr 1.0e-03, 12,346 tokens/s, 6 min left"
    assert lines[-1].endswith(" 0 s left")
    with closing(progress.Progress(1, unit="pictures")) as shown:
        shown.advance(1)
        shown.update(2.5, 1e-3, 12.0)
    assert "12 pictures/s, 0 s left" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_on_a_terminal_a_bar_with_loss_speed_and_time_left(tmp_path, monkeypatch):
    import pty
    import termios

    def slow(model, batch):
        time.sleep(0.02)
        return translation(model, batch)

    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 150))
    text = bytearray()
    reader = threading.Thread(target=read_until, args=(master, b"the end", text))
    reader.start()
    with os.fdopen(slave, "w", buffering=1) as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        train(tmp_path, TRAIN, slow)
        train(tmp_path)  # finished already: no second bar
        terminal.write("the end\n")
        reader.join(10)
    os.close(master)
    *shown, last = text.decode().replace("\n", "").split("\r")
    assert last == "" and shown[-1] == "the end"
    bar = r"training: +\d\d%.* \d+/23 \[00:0\d<00:0\d, .*step/s, loss \d\.\d{4}, lr \d\.\de-03, [\d,]+ tokens/s\]"
    assert any(re.fullmatch(bar, part.strip()) for part in shown), shown
    assert re.match(r"training: 100%.* 23/23 ", shown[-2])
    assert sum("23/23" in part for part in shown) <= 2  # the last update and the closing of one bar


def read_until(handle: int, end: bytes, text: bytearray) -> None:
    while end not in text:
        text += os.read(handle, 4096)
