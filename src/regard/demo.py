"""The demo: the whole job on an embedded default, from rule to report.

    examples by rule -> tokenizers -> encoder-decoder -> training -> unseen examples -> report.html

English dates and numbers become Korean: the order of the words turns round and thousands are regrouped by
ten thousands, so the model has to learn an alignment, and its attention shows it. What it is made of stands
in `recipes/demo.toml`; the parts are those of any other model.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from regard.data.batch import Batches, Pairs
from regard.data.korean import Example, examples
from regard.errors import UserError
from regard.explore.report import write_report
from regard.files import make_folder
from regard.models import ModelConfig, SequenceToSequence, build
from regard.models.folder import load_recipe, save
from regard.models.recipe import RECIPE
from regard.predict.bundle import Bundle
from regard.predict.translator import Translator
from regard.settings import from_dict, read_toml, to_dict, write_toml
from regard.text.tokenizer import Tokenizer
from regard.training.config import TrainConfig
from regard.training.objective import translation
from regard.training.results import AttentionInput, Examples, Results, Section
from regard.training.trainer import Trainer, read_metrics

SHOWN = ("March 3rd, 2021", "three hundred forty-two thousand", "Friday, August 15th, 1947", "seven hundred five")
CONTENTS = ("source.json", "target.json", "model.safetensors", "metrics.jsonl", "report.html", "checkpoints", RECIPE)
FIXED = ("input", "vocab_size", "target_vocab_size", "output_head")  # they follow from the data
SHAPES = ("encoder-decoder", "recurrent")


@dataclass(frozen=True)
class Result:
    """(source, expected, predicted) of each test example."""

    lines: Sequence[tuple[str, str, str]]

    @property
    def right(self) -> int:
        return sum(expected == predicted for _, expected, predicted in self.lines)

    @property
    def exact(self) -> float:
        return self.right / len(self.lines)


@dataclass(frozen=True)
class Demo:
    """What a finished demo can tell."""

    folder: Path
    report: Path
    result: Result
    steps: int
    seconds: float
    parameters: int
    shown: list[tuple[str, str]]


class Setup:
    """Data, tokenizers, model and trainer of the demo in `folder`."""

    def __init__(self, folder: Path, changes: Mapping[str, Any], steps: int | None, seed: int | None) -> None:
        tables = read_toml(str(resources.files("regard").joinpath("recipes", "demo.toml")))
        self.folder, self.data = folder, tables["data"]
        for name in FIXED:
            if name in changes:
                raise UserError(f"{name} = {changes[name]!r}: the demo's data decides this; leave {name} as it is")
        if (shape := changes.get("architecture", SHAPES[0])) not in SHAPES:
            raise UserError(f"shape = {shape!r}: the demo translates; use {' or '.join(map(repr, SHAPES))}")
        config = from_dict(TrainConfig, tables["train"], "train.")
        self.config = replace(config, steps=steps or config.steps, seed=config.seed if seed is None else seed)
        self.pairs = examples("train", self.data["train"], self.data["seed"])
        self.source = Tokenizer.train((pair.source for pair in self.pairs), "word")
        self.target = Tokenizer.train((pair.target for pair in self.pairs), "char")
        sizes = {"vocab_size": len(self.source), "target_vocab_size": len(self.target)}
        self.model_config = from_dict(ModelConfig, {**tables["model"], **sizes, **changes}, "model.")
        self.recipe = {"model": to_dict(self.model_config), "train": to_dict(self.config), "data": self.data}

    def claim_folder(self, fresh: bool) -> None:
        """Make the folder this demo's, or say why it is not. The recipe is the mark: first to come, last to go."""
        make_folder(self.folder)
        found = [name for name in CONTENTS if os.path.lexists(self.folder / name)]
        recipe = load_recipe(self.folder) if RECIPE in found else {}
        if found and _task(recipe) != _task(self.recipe):
            raise UserError(f"{self.folder}: holds a {found[0]} that is not the demo's: name another folder with --out")
        if fresh:
            for name in found:
                path = self.folder / name
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        elif recipe and recipe != self.recipe:
            raise UserError(
                f"{self.folder}: holds a run with other settings (see {RECIPE} there): "
                "name another folder with --out, or start anew with --fresh"
            )
        write_toml(self.folder / RECIPE, self.recipe)
        self.source.save(self.folder / "source.json")
        self.target.save(self.folder / "target.json")

    def trainer(self) -> Trainer:
        torch.manual_seed(self.config.seed)
        model = build(self.model_config)
        sources = self.source.encode_batch([pair.source for pair in self.pairs], add_eos=True)
        targets = self.target.encode_batch([pair.target for pair in self.pairs], add_bos=True, add_eos=True)
        batches = Batches(Pairs(sources, targets), self.config.batch_tokens, self.config.seed)
        objective = partial(translation, label_smoothing=self.config.label_smoothing)
        return Trainer(model, batches, objective, self.config, self.folder)

    def finish(self, trainer: Trainer) -> Demo:
        """Save the model, try it on what it has never seen, write the report."""
        model = trainer.model
        assert isinstance(model, SequenceToSequence)
        save(model, self.folder, recipe=self.recipe)
        translator = Translator(Bundle(model, {"source": self.source, "target": self.target}, self.recipe, self.folder))
        unseen = examples("test", self.data["test"], self.data["seed"])
        result = judge(translator, unseen)
        shown = list(zip(SHOWN, translator.translate(SHOWN), strict=True))
        results = report_results(read_metrics(self.folder), result, *shown[0])
        report = write_report(self.folder / "report.html", results, translator.bundle)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return Demo(self.folder, report, result, trainer.step, trainer.seconds, parameters, shown)


def _task(recipe: Mapping[str, Any]) -> object:
    data = recipe.get("data")
    return data.get("task") if isinstance(data, dict) else None


def judge(translator: Translator, unseen: list[Example]) -> Result:
    answers = translator.translate([example.source for example in unseen])
    return Result([(example.source, example.target, answer) for example, answer in zip(unseen, answers, strict=True)])


def report_results(history: Sequence[Mapping[str, Any]], result: Result, source: str, output: str) -> Results:
    wrong = [line for line in result.lines if line[1] != line[2]]
    correct = [line for line in result.lines if line[1] == line[2]]
    sections = [
        Section(f"Wrong ({len(wrong):,})", [Examples(wrong[:12])] if wrong else ["None: all outputs are correct."]),
        Section(f"Correct ({len(correct):,})", [Examples(correct[:12])]),
    ]
    headline = [("exact match, never seen in training", f"{result.exact:.2%}"), ("examples", f"{len(result.lines):,}")]
    title, attention = "English dates and numbers → Korean", [AttentionInput(source, output)]
    return Results(title, headline, history, sections=sections, attention=attention)
