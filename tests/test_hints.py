"""Mistakes are answered with a sentence that names the value and the remedy."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch

from regard.cli import main
from regard.data.lines import Notes, Problem, read_lines
from regard.data.pairs import PairData
from regard.errors import UserError, listed
from regard.interop import read_folder
from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.nn.attention import attend
from regard.nn.mask import AttentionMask, Positions, causal, from_tensor

SMALL = ModelConfig(dim=16, heads=2, layers=1, ff_dim=32, vocab_size=10, architecture="decoder")


@pytest.mark.parametrize("family", ["roberta", "mt5", "mbart", None])
def test_a_family_that_is_not_supported(tmp_path: Path, family: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(UserError, match="is not supported yet; supported are gpt2, bert, vit, marian, bart, t5"):
        read_folder(tmp_path)


@pytest.mark.parametrize("setting, home", [("steps", "train"), ("dim", "model"), ("skip_bad", "data"), ("lr", "train")])
def test_a_setting_without_its_table(
    empty_folder: Path, capsys: pytest.CaptureFixture[str], setting: str, home: str
) -> None:
    Path("mine.toml").write_text('[data]\ntrain = ["a.tsv"]\nskip_bad = true\n[train]\nsteps = 3\n')
    assert main(["train", "mine.toml", "--set", f"{setting}=10"]) == 2
    assert f"name its table, such as --set {home}.{setting}=10" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, encoding",
    [("정말 재미있는 영화였다", "CP949"), ("Männer fröhlich", "CP1252")],
)
def test_other_encodings_are_recognised(tmp_path: Path, text: str, encoding: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode(encoding) + b"\n")
    (problem,) = read_lines(path, Notes())
    assert (
        isinstance(problem, Problem) and f'looks like {encoding}: set  encoding = "{encoding.lower()}"' in problem.what
    )


def test_bytes_that_are_no_text_have_no_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(128, 160)))
    (problem,) = read_lines(path, Notes())
    assert isinstance(problem, Problem) and "is not UTF-8" in problem.what and "looks like" not in problem.what


def test_a_file_name_is_not_a_text(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("test.en").write_text("A dog runs.\n")
    assert main(["translate", "run", "test.en"]) == 2
    assert "'test.en' is the name of a file: read its lines with  --files test.en" in capsys.readouterr().err


def test_a_tensor_is_not_a_mask() -> None:
    q, mask = torch.randn(1, 2, 3, 4), torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(UserError, match="attention_mask is a Tensor: pass an AttentionMask"):
        attend(q, q, q, mask)
    positions = Positions.of(3, q.device)
    with pytest.raises(UserError, match="from_tensor"):
        AttentionMask(mask, positions, positions)
    with pytest.raises(UserError, match="from_tensor"):
        causal & mask
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, mask)
    torch.testing.assert_close(attend(q, q, q, AttentionMask(from_tensor(mask), positions, positions)), expected)


def test_a_name_is_not_a_config() -> None:
    with pytest.raises(UserError, match=r"build\('gpt2'\): pass a ModelConfig; preset\('gpt2'\) makes one"):
        build("gpt2")


@pytest.mark.parametrize("ids", [[[1, 10]], [[-1, 3]]])
def test_an_id_beyond_the_vocabulary(ids: list[list[int]]) -> None:
    with pytest.raises(UserError, match=r"token ids are (1 to 10|-1 to 3): the vocabulary has 0 to 9"):
        build(SMALL)(torch.tensor(ids))


@pytest.mark.parametrize(
    "names, said", [([], ""), (["a"], "a"), (["a", 2], "a and 2"), (["a", "b", "c"], "a, b and c")]
)
def test_a_list_as_a_person_writes_it(names: list[object], said: str) -> None:
    assert listed(names) == said and listed(names, "or") == said.replace(" and ", " or ")


def test_no_message_prints_a_list_of_python() -> None:
    """In a message, the repr of a collection is the value of a setting (name = [...]) or a shape."""
    for path in (Path(__file__).parent.parent / "src" / "regard").rglob("*.py"):
        for text in ast.walk(ast.parse(path.read_text())):
            before = ""
            for part in text.values if isinstance(text, ast.JoinedStr) else ():
                if isinstance(part, ast.Constant):
                    before = str(part.value)
                elif isinstance(part, ast.FormattedValue):
                    code = ast.unparse(part.value)
                    collection = code.startswith(("list(", "tuple(", "sorted(", "set(", "dict(", "[", "{"))
                    assert not collection or "shape" in code or before.endswith("= "), f"{path}: {code}"
                    before = ""


def test_files_are_named_without_brackets() -> None:
    with pytest.raises(UserError, match=r"^a\.en, b\.de and c\.fr: give two files"):
        PairData(train=("a.en", "b.de", "c.fr")).read(("a.en", "b.de", "c.fr")).check()
