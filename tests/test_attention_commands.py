"""`regard figure` and `regard attend`: their output, and their error messages."""

from __future__ import annotations

import json
import struct
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from inside_models import WORDS, opened
from regard.cli import main


def png_size(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    inside = opened("encoder-decoder")
    regard.save(
        inside.model.float(), tmp_path / "run", tokenizers={"tokenizer": WORDS}, recipe={"decode": {"max_length": 6}}
    )
    return tmp_path


def test_figure_writes_every_kind(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("resvg_py")
    folder, text = str(run / "run"), "the animal <script>"
    for name, options in (
        ("a.svg", ""),
        ("b.svg", "--grid --part encoder"),
        ("c.svg", "--layer 1 --head 0 --query 0"),
        ("d.png", "--layer 0"),
        ("e.html", "--off cross.0.1"),
        ("f.json", "--temperature 2 --shuffle 1"),
    ):
        assert main(["figure", folder, text, "-o", str(run / name), *options.split()]) == 0, name
    for name in "abc":
        ElementTree.fromstring((run / f"{name}.svg").read_text())
    assert png_size((run / "d.png").read_bytes())[0] > 100
    assert "<script>" not in (run / "e.html").read_text().lower().replace("&lt;script&gt;", "")
    assert json.loads((run / "f.json").read_text())["changes"] == {"temperature": 2.0, "shuffle": 1}
    assert main(["figure", folder, text, "-o", str(run / "g.svg"), "--all"]) == 0
    assert sorted(path.name for path in run.glob("g*")) == ["g-cross.svg", "g-decoder.svg", "g-encoder.svg"]
    result = capsys.readouterr()
    assert "unchanged: generates" in result.out and "Jain & Wallace 2019" in result.err


@pytest.mark.parametrize("command", ["figure RUN text -o OUT/a.svg", "attend RUN text", "heads RUN --data OUT/a.tsv"])
def test_the_recipe_is_parsed_once(command: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "a.tsv").write_text("the animal\ta b\nthe street\tc d\n")
    parsed, loads = [], tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: parsed.append(text) or loads(text))
    assert main(command.replace("RUN", str(run / "run")).replace("OUT", str(run)).split()) == 0
    assert len(parsed) == 1


def test_attend_prints_text_and_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attend", str(run / "run"), "the animal", "--top", "2"]) == 0
    assert "Cross-attention, mean of all layers and heads" in capsys.readouterr().out
    assert main(["attend", str(run / "run"), "the animal", "--each", "--json", "--part", "encoder"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["maps"]) == 8 and result["maps"][0]["tokens"][0]["token"] == "the"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "a.gif"], "use one of .png, .svg, .html, .json"),
        (["-o", "a.svg", "--off", "cross"], "PART.LAYER.HEAD"),
        (["-o", "a.svg", "--off", "cross.0.9"], "heads 0 to 3"),
        (["-o", "a.svg", "--skip", "middle.0"], "PART.LAYER"),
        (["-o", "a.svg", "--layer", "7"], "layers 0 to 1"),
        (["-o", "a.json", "--layer", "7"], "--layer 7: a .json file holds every layer and head"),
        (["-o", "a.html", "--grid"], "--grid: a .html file holds every layer and head"),
        (["-o", "a.svg", "--zoom", "0"], "0.1 to 20"),
        (["-o", "missing/a.svg"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(
    run: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    assert main(["figure", str(run / "run"), "the animal", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error
    assert sorted(path.name for path in run.iterdir()) == ["run"]


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_text_is_refused(run: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["figure", str(run / "run"), text, "-o", str(run / "a.svg")], ["attend", str(run / "run"), text]):
        assert main(words) == 2
        assert "the text is empty" in capsys.readouterr().err
    assert not (run / "a.svg").exists()


def test_images_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    regard.save(opened("vit").model.float(), tmp_path / "vit")
    image.fromarray(np.full((40, 30, 3), (255, 0, 0), np.uint8)).save(tmp_path / "red.png")
    assert (
        main(["figure", str(tmp_path / "vit"), str(tmp_path / "red.png"), "-o", str(tmp_path / "a.svg"), "--grid"]) == 0
    )
    assert "class:" in capsys.readouterr().out
    for name, content in (("empty.png", b""), ("text.png", b"no picture")):
        (tmp_path / name).write_bytes(content)
        assert main(["figure", str(tmp_path / "vit"), str(tmp_path / name), "-o", str(tmp_path / "b.svg")]) == 2
        assert "cannot be read as an image" in capsys.readouterr().err
    look = opened("vit").look(image=tmp_path / "red.png")
    torch.testing.assert_close(look.input.image, torch.tensor([1.0, 0, 0])[:, None, None].expand(3, 16, 16))
