"""`regard cost --sweep`: every row equals a single call, in every format; what is measured is bounded."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree

import pytest

from regard.cli import main
from regard.cost import cost
from regard.cost.sweep import read_sweep, sizes_of_a_model
from regard.models.recipe import preset

SMALL = ("tiny", "--set", "vocab_size=60", "--set", "dim=32", "--set", "layers=1")


def run(capsys, *arguments: str) -> str:
    assert main(["cost", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seq=128:1024", (128, 256, 512, 1024)),
        ("seq=3:20", (3, 6, 12, 20)),
        ("seq=5:5", (5,)),
        ("batch=100:400:100", (100, 200, 300, 400)),
        ("batch=1:10:4", (1, 5, 9)),
        ("heads=8,1,2", (8, 1, 2)),
        ("target-seq=7", (7,)),
    ],
)
def test_values(text, values):
    assert read_sweep(text).values == values


def test_what_can_be_swept():
    names = sizes_of_a_model()
    assert {"seq", "target_seq", "batch", "heads", "kv_heads", "layers", "dim", "window", "vocab_size"} <= set(names)
    assert not {"dropout", "bias", "norm", "pruned"} & set(names)


@pytest.mark.parametrize(
    ("text", "single"),
    [
        ("seq=64:256", lambda value: cost(preset("base"), seq=value, batch=2, target_seq=9)),
        ("heads=1,2,4,8", lambda value: cost(preset("base", heads=value), batch=2, target_seq=9)),
        ("layers=1:6", lambda value: cost(preset("base", layers=value), batch=2, target_seq=9)),
        ("dim=64:512", lambda value: cost(preset("base", dim=value), batch=2, target_seq=9)),  # ff_dim follows
    ],
)
def test_every_row_equals_a_single_call(capsys, text, single):
    result = json.loads(run(capsys, "base", "--sweep", text, "--batch", "2", "--target-seq", "9", "--json"))
    sizes = read_sweep(text)
    assert result["sweep"] == {"name": sizes.name, "values": list(sizes.values)}
    for value, row in zip(sizes.values, result["rows"], strict=True):
        assert row.pop(sizes.name) == value
        assert row == single(value).to_dict()


def test_the_table_and_the_file_have_the_same_numbers(capsys, tmp_path):
    file = tmp_path / "sweep.csv"
    lines = run(capsys, "gpt2", "--sweep", "batch=1,8", "--csv", str(file)).splitlines()
    assert lines[0] == "gpt2: decoder, 12 layers, dim 768, 12 heads, ff_dim 3072, vocab_size 50257 (at batch = 1)"
    assert lines[-1].split() == [
        "8", "124.44", "M", "2.33", "T", "7.00", "T", "4.96", "GiB", "288.00", "MiB", "9.11", "GiB",
    ]  # fmt: skip
    assert len({len(line) for line in lines[3:]}) == 1  # aligned
    rows = list(csv.DictReader(file.open()))
    single = cost(preset("gpt2"), batch=8)
    assert rows[1] == {
        "batch": "8", "parameters": "124439808", "forward_flops": str(sum(single.forward.values())),
        "training_flops": str(single.train), "activation_bytes": str(sum(single.activations.values())),
        "kv_cache_bytes": str(sum(single.kv_cache.values())), "training_bytes": str(single.training_memory),
    }  # fmt: skip


def test_an_encoder_has_no_column_for_a_cache(capsys):
    assert "cache" not in run(capsys, "bert-base", "--sweep", "seq=64,128")


def test_plots(capsys, tmp_path):
    pytest.importorskip("resvg_py")
    for name in ("sweep.svg", "sweep.PNG"):
        run(capsys, "gpt2", "--sweep", "layers=1:12", "--plot", str(tmp_path / name))
    assert (tmp_path / "sweep.PNG").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "sweep.svg").read_text()
    labels = {element.text for element in ElementTree.fromstring(text).iter() if element.tag.endswith("text")}
    assert {"gpt2: FLOPs", "training step", "key/value cache", "gpt2: parameters", "MiB", "layers"} <= labels
    assert {"1", "2", "4", "8"} <= labels  # ticks at powers of two


def test_measurements_are_beside_the_formula(capsys, tmp_path):
    plot, file = tmp_path / "sweep.svg", tmp_path / "sweep.csv"
    arguments = ("--sweep", "seq=64:256", "--batch", "4", "--measure", "--device", "cpu", "--json")
    rows = json.loads(run(capsys, *SMALL, *arguments, "--plot", str(plot), "--csv", str(file)))["rows"]
    for row in rows:
        assert row["workload"]["dtype"] == "fp32"  # on a CPU
        assert 0 < row["measured"]["seconds"] < 5
        assert 0.8 < row["measured"]["peak"] / row["memory"]["training"] < 1.6
    assert rows[-1]["measured"]["peak"] > rows[0]["measured"]["peak"]
    assert "measured (thin: constant · FLOPs)" in plot.read_text()
    assert float(list(csv.DictReader(file.open()))[2]["seconds"]) == rows[2]["measured"]["seconds"]


@pytest.mark.parametrize("name", ["rnn-small", "vit-tiny"])
def test_models_that_read_other_inputs_are_measured_too(capsys, name):
    sizes = ("--set", "dim=32", "--set", "layers=1", "--measure", "--device", "cpu")
    more = ("--seq", "8", "--set", "vocab_size=50") if name == "rnn-small" else ("--set", "heads=2")
    text = run(capsys, name, *sizes, *more)
    assert "measured on the CPU" in text and " ms" in text


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        (("--max-memory", "0.00001"), "10.49 KiB are allowed (--max-memory)"),
        (("--max-seconds", "0.000000001"), "of 1e-09 are left (--max-seconds)"),
    ],
)
def test_measuring_stops_at_its_limits(capsys, limit, why):
    text = run(capsys, *SMALL, "--sweep", "seq=64:128", "--measure", "--device", "cpu", *limit)
    assert text.splitlines()[-1].startswith("measuring stopped at seq = 64: it ") and why in text
    assert text.splitlines()[4].split()[-3:] == ["-", "-", "-"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["base", "--sweep", "seq"], ["--sweep seq: write a range"]),
        (["base", "--sweep", "seq=a:b"], ["--sweep seq=a:b: write a range"]),
        (["base", "--sweep", "seq=1:2:3:4"], ["write a range"]),
        (["base", "--sweep", "seq=0:8"], ["begins at 1 or more"]),
        (["base", "--sweep", "seq=9:8"], ["ends no lower"]),
        (["base", "--sweep", "seq=1:9:0"], ["the step must be 1 or more"]),
        (["base", "--sweep", "seq=1:9999:1"], ["more than 1000 values"]),
        (["base", "--sweep", "seq=1:99999999999999999999"], ["at most 1e+15"]),
        (["base", "--sweep", "seq=0,1"], ["seq = 0: must be 1 or more"]),
        (["base", "--sweep", "head=1,2"], ["'head' is not a size", "did you mean 'heads'?"]),
        (["base", "--sweep", "dropout=1,2"], ["'dropout' is not a size"]),
        (["base", "--sweep", "heads=2,3"], ["heads = 3 does not divide dim = 512"]),
        (["gpt2", "--sweep", "seq=512:2048"], ["seq = 2048", "max_length = 1024"]),
        (["base", "--sweep", "seq=1,2", "--seq", "4"], ["--seq 4", "sets it too"]),
        (["base", "--sweep", "batch=1,2", "--batch", "4"], ["--batch 4", "sets it too"]),
        (["base", "--sweep", "heads=1,2", "--set", "heads=4"], ["--set heads=4", "sets it too"]),
        (["base", "--csv", "a.csv"], ["--csv a.csv: only with --sweep or --layers"]),
        (["base", "--sweep", "seq=1,2", "--csv", "missing/a.csv"], ["missing/a.csv: the folder does not exist"]),
        (["base", "--sweep", "seq=1,2", "--plot", "a.pdf"], ["--plot a.pdf", ".svg or .png"]),
        (["base", "--device", "cpu"], ["--device cpu: only with --measure"]),
        (["base", "--measure", "--device", "tpu9"], ["device = 'tpu9'"]),
        (["base", "--measure", "--max-seconds", "0"], ["--max-seconds 0: must be greater than 0"]),
        (["base", "--measure", "--max-memory", "-1"], ["--max-memory -1: must be greater than 0"]),
        (["base", "--kernel", "3"], ["--kernel 3: only with --layers"]),
        (["base", "--dim", "64"], ["--dim 64: only with --layers; for a model, --set dim=64"]),
        (["--list", "--sweep", "seq=1,2"], ["--list shows every preset"]),
        (["--sweep", "seq=1,2"], ["no model: pass"]),
    ],
)
def test_errors_are_one_line_with_the_remedy(capsys, monkeypatch, tmp_path, arguments, parts):
    monkeypatch.chdir(tmp_path)
    assert main(["cost", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err
