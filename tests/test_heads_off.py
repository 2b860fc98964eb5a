"""Every head off once: the same numbers as interventions one by one, for every kind of output."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from explorer import TEXT, ask, ask_frame, make_decoder, make_translator, refusal, served
from regard.errors import UserError
from regard.explore import heads_off
from regard.explore.changes import Changes
from regard.explore.inside import Inside
from regard.models.folder import read_weights
from regard.training.snapshots import write_snapshot


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs")
    make_decoder(folder / "decoder")
    make_translator(folder / "translator")
    weights = read_weights(folder / "decoder" / "model.safetensors")
    for step, scale in ((0, 0.1), (5, 0.7), (20, 1.0)):
        write_snapshot(folder / "decoder", step, {name: scale * tensor for name, tensor in weights.items()})
    lines = [f'{{"step": {step}, "loss": {5 - step / 10}, "seconds": 1.0}}' for step in range(0, 21, 5)]
    (folder / "decoder" / "metrics.jsonl").write_text(
        "\n".join([*lines, '{"step": 20, "valid_loss": 4, "seconds": 1}'])
    )
    return folder


@pytest.mark.parametrize(("run", "heads"), [("decoder", 6), ("translator", 18)])
def test_each_head_off_is_that_intervention(runs, run, heads):
    inside = Inside.open(runs / run)
    look = inside.look(TEXT)
    off = heads_off(look)
    assert len(off.heads) == heads and off.changes.shape == (heads, len(look.output.positions))
    expected = [position.expected or position.top[0] for position in look.output.positions]
    assert off.labels == tuple(choice.label for choice in expected)
    for head, changes, flipped in list(zip(off.heads, off.changes, off.flipped, strict=True))[::2]:
        both = inside.compare(TEXT, changes=Changes(heads=(head,)))
        p, q = (one.output.logits.log_softmax(dim=-1) for one in (both.before, both.after))
        for at, choice in enumerate(expected):
            assert changes[at].item() == pytest.approx((p[at, choice.id] - q[at, choice.id]).item(), abs=1e-4)
        assert tuple(flipped.nonzero()[:, 0].tolist()) == both.difference.flipped
        known = [at for at, position in enumerate(look.output.positions) if position.expected]
        assert changes[known].mean().item() == pytest.approx(both.difference.loss, abs=1e-4)
    assert "mean change" in off._repr_html_()


def test_a_head_that_is_off_already_is_left_out(runs):
    inside = Inside.open(runs / "decoder")
    changed = inside.change(inside.look(TEXT), Changes(heads=(("decoder", 0, 1),)))
    off = heads_off(changed, [("decoder", 0, head) for head in range(3)])
    assert [head for _, _, head in off.heads] == [0, 2]
    both = inside.change(changed, Changes(heads=(("decoder", 0, 1), ("decoder", 0, 2))))
    assert off.flipped[1].sum() == (both.output.logits.argmax(-1) != changed.output.logits.argmax(-1)).sum()
    with pytest.raises(UserError, match="head"):
        heads_off(changed, [("decoder", 0, 9)])


def test_the_server_answers_with_roles_heads_off_snapshots_and_the_curve(runs):
    question = {"run": "decoder", "text": TEXT}
    inside = Inside.open(runs / "decoder")
    with served(runs) as listener:
        header, arrays = ask_frame(listener.address, "api/off", {**question, "part": "decoder", "layer": 1})
        off = heads_off(inside.look(TEXT), [("decoder", 1, head) for head in range(3)])
        assert header["heads"] == [0, 1, 2] and header["labels"] == list(off.labels)
        assert torch.allclose(torch.tensor(arrays["changes"]), off.changes, atol=1e-4)
        assert torch.equal(torch.tensor(arrays["flipped"]).bool(), off.flipped)
        status, content = ask(listener.address, "api/roles", question)
        assert status == 200 and b'"own":false' in content and content.count(b'"pattern"') == 6
        status, content = ask(listener.address, "api/training/decoder")
        assert status == 200 and b'"snapshots":[0,5,20]' in content and b'"valid_loss":[[20,4]]' in content
        _, final = ask_frame(listener.address, "api/look", question)
        _, last = ask_frame(listener.address, "api/look", {**question, "step": 20})  # the weights, in half precision
        _, first = ask_frame(listener.address, "api/look", {**question, "step": 0})
        apart = [abs(one["decoder.1"].astype(int) - final["decoder.1"]).max() / 65535 for one in (last, first)]
        assert apart[0] < 0.02 < apart[1]
        for path, body, said in (
            ("api/look", {**question, "step": 7}, "step = 7"),
            ("api/off", {**question, "part": "cross", "layer": 0}, "cross"),
            ("api/off", {**question, "part": "decoder", "layer": 9}, "layer"),
        ):
            status, sentence = refusal(ask(listener.address, path, body))
            assert status == 422 and said in sentence
        assert ask(listener.address, "api/training/nothing")[0] == 404
