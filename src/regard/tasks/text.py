"""Runs that learn from plain text, whatever they learn from it: which text there is, and where it is held out.

    files -> survey (one pass: are they readable? how many characters?) -> pieces of the training part, of each set

What was found is kept in RUN/data/survey.json, so that a resumed run need not read it all again.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from regard.data.documents import Piece, Survey, TextData, find_texts, part, pieces, survey, text_fingerprint
from regard.data.sets import Files
from regard.files import make_folder, write_atomically
from regard.text.config import TextConfig
from regard.text.tokenizer import Tokenizer
from regard.train.run import TaskRun


class TextRun(TaskRun):
    """[data] is a `TextData`, and there is one tokenizer."""

    data: TextData
    text: TextConfig
    surveys: dict[str, Survey]
    prints: dict[str, str]  # the fingerprints of the sets

    @property
    def sets(self) -> dict[str, Files]:
        """What is judged: the validation text and the test sets."""
        held_out = self.data.train if self.data.valid_fraction else self.data.valid
        return {name: files for name, files in {"valid": held_out, **self.data.test}.items() if files}

    def find_data(self) -> None:
        for files in (self.data.train, *self.sets.values()):
            find_texts(files, self.data.folder)

    def check_data(self) -> None:
        """Every file once; what was found is kept in the folder, so that a resumed run need not read it all again."""
        wanted = {"train": self.data.train, **self.sets}
        known = self._read_surveys()
        self.prints = {name: text_fingerprint(files, self.data) for name, files in wanted.items()}
        self.surveys = {}
        for name, files in wanted.items():
            if self.prints[name] in known:
                self.surveys[name] = known[self.prints[name]]
                continue
            self.surveys[name] = known[self.prints[name]] = found = survey(files, self.data)
            for line in found.notes:
                print(f"note: {line}", file=sys.stderr)

    @property
    def _survey_file(self) -> Path:
        return self.folder / "data" / "survey.json"

    def _read_surveys(self) -> dict[str, Survey]:
        try:
            content = json.loads(self._survey_file.read_bytes())
            return {print: Survey(**found) for print, found in content.items()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}

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
        files = {"train": self.data.train, **self.sets}[name]
        return part(pieces(files, self.data), *self.span(name))

    def keep_surveys(self) -> None:
        make_folder(self.folder / "data")
        if any(print not in self._read_surveys() for print in self.prints.values()):
            content = {self.prints[name]: dataclasses.asdict(found) for name, found in self.surveys.items()}
            write_atomically(self._survey_file, json.dumps(content, indent=1).encode())

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers["tokenizer"]

    def make_tokenizers(self) -> dict[str, Tokenizer]:
        lines = (piece.text for piece in self.pieces("train"))
        return {"tokenizer": self.learn_tokenizer(lines, self.text, self.data.folder)}
