"""Tasks that learn from plain text: which text there is, and which part is held out.

    files -> survey (one pass: are they readable? how many characters?) -> pieces of the training part, of each set

The surveys are kept in RUN/data/survey.json, so that a resumed run need not read all files again.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from regard.data.documents import Piece, Survey, TextData, part, pieces, survey
from regard.data.sets import Files
from regard.files import make_folder, write_atomically
from regard.models import ModelConfig
from regard.models.recipe import with_preset
from regard.training.task import Task


class PlainTextTask(Task):
    """[data] is a `TextData`, there is one tokenizer, and rows have `train.pack` tokens."""

    data: TextData
    surveys: dict[str, Survey]
    fingerprints: dict[str, str]  # of the sets

    @classmethod
    def complete(cls, tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        complete = super().complete(tables)
        if not complete["train"].get("pack"):
            complete["train"]["pack"] = with_preset(complete["model"]).get("max_length", ModelConfig.max_length)
        return complete

    @property
    def files(self) -> dict[str, Files]:
        """The files of each set; a validation fraction is part of the training files."""
        held_out = {"valid": self.data.train} if self.data.valid_fraction else {}
        return {"train": self.data.train, **held_out, **self.data.sets}

    def check_data(self) -> None:
        known = self._read_surveys()
        self.fingerprints = {name: self.data.fingerprint(files) for name, files in self.files.items()}
        self.surveys = {}
        for name, files in self.files.items():
            key = self.fingerprints[name]
            if key not in known:
                known[key] = survey(files, self.data)
                print_notes(known[key])
            self.surveys[name] = known[key]

    def prepare_evaluation(self) -> None:
        self.check_data()

    @property
    def _survey_file(self) -> Path:
        return self.folder / "data" / "survey.json"

    def _read_surveys(self) -> dict[str, Survey]:
        try:
            content = json.loads(self._survey_file.read_bytes())
            return {key: Survey(**fields) for key, fields in content.items()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}

    def keep_surveys(self) -> None:
        make_folder(self.folder / "data")
        if not {*self.fingerprints.values()} <= self._read_surveys().keys():
            content = {self.fingerprints[name]: dataclasses.asdict(one) for name, one in self.surveys.items()}
            write_atomically(self._survey_file, json.dumps(content, indent=1).encode())

    def span(self, name: str) -> tuple[int, int]:
        """Which characters of its files a set has."""
        count = self.surveys[name].characters
        border = int(count * (1 - self.data.valid_fraction))
        match name:
            case "train":
                return 0, border
            case "valid" if self.data.valid_fraction:
                return border, count
        return 0, count

    def pieces(self, name: str) -> Iterator[Piece]:
        return part(pieces(self.files[name], self.data), *self.span(name))

    def training_texts(self) -> Iterable[str]:
        return (piece.text for piece in self.pieces("train"))

    def check_model(self, config: ModelConfig) -> None:
        self.check_positions(config, self.config.pack, "train.pack")


def print_notes(survey: Survey) -> None:
    for note in survey.notes:
        print(f"note: {note}", file=sys.stderr)
