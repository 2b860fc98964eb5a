"""Non-finite numbers and half precision: batches are skipped or reported, and the last checkpoint stays."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from regard.errors import UserError
from regard.models.folder import read_weights
from regard.training.history import read_metrics
from regard.training.objective import target_states, translation
from reversal import MODEL, TRAIN, assert_same, make_trainer
from stopping import interrupt_at
from variants import slow

STILL = replace(MODEL, dropout=0.0, embed_dropout=0.0)


def poisoned(at: int):
    """The usual loss, but infinite in batch number `at`."""
    seen = 0

    def objective(model, batch):
        nonlocal seen
        seen += 1
        loss, count = translation(model, batch)
        return loss * (float("inf") if seen == at else 1.0), count

    return objective


def test_a_bad_batch_is_left_out_where_that_is_asked(tmp_path, capsys):
    config = replace(TRAIN, steps=6, nonfinite="skip", save_every=1, keep=6, log_every=1)
    trainer = make_trainer(tmp_path, config, objective=poisoned(4))
    assert trainer.run()
    assert "step 4: the gradient is not finite" in capsys.readouterr().err
    read = [read_weights(tmp_path / "checkpoints" / f"step-{step:08d}" / "model.safetensors") for step in range(1, 7)]
    assert_same(read[2], read[3])
    assert any(not torch.equal(read[3][name], read[4][name]) for name in read[3])
    lines = read_metrics(tmp_path)  # nothing was learned in step 4, so there is nothing to tell of it
    assert [line["step"] for line in lines] == [1, 2, 3, 5, 6]
    json.loads(trainer.metrics.read_text().splitlines()[-1], parse_constant=pytest.fail)


def test_or_ends_training_with_the_last_checkpoint_as_it_was(tmp_path):
    trainer = make_trainer(tmp_path, replace(TRAIN, steps=6, save_every=1), objective=poisoned(4))
    with pytest.raises(UserError, match=r"loss = nan at step 4.*train.lr"):
        trainer.run()
    saved = read_weights(tmp_path / "checkpoints" / "step-00000003" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
    assert not (tmp_path / "checkpoints" / "step-00000004").exists()


@pytest.mark.parametrize("precision", ["bf16", *slow("fp16")])
def test_half_precision_trains_on_a_cpu(tmp_path, precision):
    """The products are rounded, the weights stay float32, and the loss falls about as it does in float32."""
    config = replace(TRAIN, steps=150, log_every=10, label_smoothing=0.0)
    kinds = set()

    def objective(model, batch):
        logits = model.output_head(target_states(model, batch))
        kinds.add(logits.dtype)
        return translation(model, batch)

    make_trainer(tmp_path / "full", config, STILL).run()
    trainer = make_trainer(tmp_path / "half", replace(config, precision=precision), STILL, objective=objective)
    assert trainer.run()
    assert kinds == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    full, half = ([line["loss"] for line in read_metrics(tmp_path / name)] for name in ("full", "half"))
    assert half[-1] < 0.7 * half[0] and half[-1] == pytest.approx(full[-1], abs=0.25)


def overflowing(steps: set[int]):
    """A loss whose gradient is infinite in the batches named, as half precision makes of one that is too large."""
    seen = 0

    def objective(model, batch):
        nonlocal seen
        seen += 1
        loss, count = translation(model, batch)
        return loss + (loss - loss).abs().sqrt() if seen in steps else loss, count

    return objective


def test_steps_that_loss_scaling_leaves_out_are_counted_and_told(tmp_path, capsys):
    config = replace(TRAIN, steps=9, precision="fp16", save_every=1, keep=9, log_every=3)
    assert make_trainer(tmp_path, config, objective=overflowing({2, 3, 4, 5, 6, 8})).run()
    found = [(line["step"], line.get("skipped"), line.get("scale")) for line in read_metrics(tmp_path)]
    assert found == [(3, 2, 2.0**14), (9, 4, 2.0**10)]  # of 4 to 6 nothing is left to tell but that
    result = capsys.readouterr().err
    for words in ("step 3: 2 skipped", "step 6: 3 skipped", "step 9: 4 skipped", "loss scale is now 1024"):
        assert words in result
    read = [read_weights(tmp_path / "checkpoints" / f"step-{step:08d}" / "model.safetensors") for step in range(1, 10)]
    assert_same(read[0], read[5])
    assert any(not torch.equal(read[5][name], read[6][name]) for name in read[5])


def test_gradients_that_stay_infinite_end_training(tmp_path):
    config = replace(TRAIN, steps=100, precision="fp16", log_every=2, save_every=5)
    with pytest.raises(UserError, match=r"loss scale = 3.05.*e-05.* at step 34: training has diverged.*train\.lr"):
        make_trainer(tmp_path, config, objective=overflowing({*range(4, 200)})).run()  # 2^16 halved more than 30 times
    saved = read_weights(tmp_path / "checkpoints" / "step-00000030" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())


def test_the_count_goes_on_over_a_stop(tmp_path, monkeypatch):
    config = replace(TRAIN, steps=6, precision="fp16", log_every=6)
    interrupt_at(monkeypatch, 2)
    first = make_trainer(tmp_path, config, objective=overflowing({1, 2}))
    assert not first.run() and first.step == 3
    second = make_trainer(tmp_path, config, objective=overflowing({1}))
    assert second.resume() and second.run()
    assert [line["skipped"] for line in read_metrics(tmp_path)] == [3]
