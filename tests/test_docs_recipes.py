"""Every complete recipe that the documentation prints is trained for a few steps, as it is printed."""

from __future__ import annotations

import json
import random
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from regard.cli import main

DOCS = Path(__file__).parent.parent / "docs"
WORDS = ["dog", "cat", "runs", "on", "the", "red", "blue", "house", "two", "men", "play", "in", "a", "small", "park"]
# Only what decides the time of a step is smaller; the recipe stays as it is.
FEWER = ("train.steps=2", "model.layers=1", "train.batch_tokens=2048")


def recipes() -> list[Any]:
    """The TOML blocks with a model and training data."""
    found = []
    for page in sorted(DOCS.glob("**/*.md")):
        short = page.parent.name == "howto" or page.stem == "train"  # forms of the others
        marks = [pytest.mark.slow] if short else []
        for number, block in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.S)):
            tables = tomllib.loads(block)
            if "data" in tables and "model" in tables:
                found.append(pytest.param(block, id=f"{page.stem}-{number}", marks=marks))
    return found


def sentences(count: int) -> list[str]:
    source = random.Random(count)
    return [" ".join(source.choices(WORDS, k=source.randint(3, 8))) for _ in range(count)]


def write_file(path: Path, task: str) -> None:
    """Made-up data of the kind that the task reads from a file of this name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts, numbers = sentences(400), random.Random(1)
    if not path.suffix or path.suffix == ".png":
        from PIL import Image

        paths = [path] if path.suffix else [path / name / f"{n}.png" for name in ("cat", "dog") for n in range(20)]
        for one in paths:
            one.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 32), tuple(numbers.randbytes(3))).save(one)
        return
    if task == "token-classification":
        lines = [
            line
            for text in texts
            for line in (*(f"{word} {'B-X' if word == 'dog' else 'O'}" for word in text.split()), "")
        ]
    elif task == "regression" and path.suffix == ".tsv":
        lines = [" ".join(str(numbers.randint(0, 9)) for _ in range(4)) for _ in range(200)]
        lines = [f"{line}\t{line}" for line in lines]
    elif path.suffix == ".csv":
        lines = ["load,wind", *(f"{numbers.random():.3f},{numbers.random():.3f}" for _ in range(800))]
    elif path.suffix == ".jsonl":
        write_file(path.parent / "a.png", task)
        lines = [json.dumps({"image": "a.png", "caption": text}) for text in texts[:30]]
    elif path.suffix == ".tsv":
        lines = ["text\tlabel", *(f"{text}\t{'good' if 'dog' in text else 'bad'}" for text in texts)]
    else:
        lines = texts
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def files_of(table: Any) -> list[str]:
    """The file names in a [data] table and the tables inside it."""
    names: list[str] = []
    for key, value in table.items():
        if isinstance(value, dict):
            names += [name for some in value.values() for name in some] if key == "test" else files_of(value)
        elif key in ("train", "valid"):
            names += value
    return names


@pytest.mark.parametrize("recipe", recipes())
def test_a_printed_recipe_trains(empty_folder: Path, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    tables = tomllib.loads(recipe)
    task = tables.get("task", "translation")
    if task.startswith("image"):
        pytest.importorskip("PIL")
    for name in files_of(tables["data"]):
        write_file(empty_folder / name, task)
    (empty_folder / "mine.toml").write_text(recipe, encoding="utf-8")
    fewer = [option for setting in FEWER for option in ("--set", setting)]
    assert main(["train", "mine.toml", *fewer, "--device", "cpu"]) == 0, capsys.readouterr().err
    assert (empty_folder / "runs" / "mine" / "model.safetensors").is_file()


def test_the_documentation_has_recipes_of_every_task() -> None:
    tasks = {tomllib.loads(one.values[0]).get("task", "translation") for one in recipes()}
    assert tasks >= {
        "translation", "text-classification", "image-classification", "image-captioning", "language-modeling",
        "masked-language-modeling", "regression", "text-to-text", "token-classification",
    }  # fmt: skip
