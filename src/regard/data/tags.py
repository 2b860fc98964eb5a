"""Tagged sentences: the [data] table of a recipe that gives every word a tag.

    Regard    B-PROD         files     one token and its tags per line, separated by tabs or spaces, and a blank line
    runs      O                        after each sentence (CoNLL: Tjong Kim Sang & De Meulder 2003)
    in        O              tables    .jsonl or .parquet, each row with a list of tokens and a list of tags
    Seoul     B-LOC

    [data]
    train = ["train.conll"]
    tokens = "1"                          columns, counted from 1; by default the first and the last. In a table, names:
    tags = "4"                            "tokens" and "tags"

Named entities of several words are marked by prefixes. The scheme is detected from the training data:

    words     New     York    City    Tom     Kim
    IOB2      B-LOC   I-LOC   I-LOC   B-PER   I-PER         B- at each beginning
    IOB1      I-LOC   I-LOC   I-LOC   I-PER   I-PER         B- only between two neighbours of one type
    BIOES     B-LOC   I-LOC   E-LOC   B-PER   E-PER         S- for an entity of one word

Tags without such prefixes, such as parts of speech, are classes of single words. Lines that begin with -DOCSTART- are
skipped; of .conllu files (Universal Dependencies) also comments, and tokens without a number of their own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from regard.data.entities import sentences
from regard.data.lines import Notes, Problem, read_lines
from regard.data.sets import Group, TextFiles, file_names
from regard.data.tables import Report, Row, Rows, Table, label, table_kind, text
from regard.errors import UserError, suggest
from regard.settings import check_fields

MOST = 1000  # tags that are taken from the data; with more of them, the column is probably the wrong one
LONG = 1000  # words of a sentence that is probably several
HEADERS = {"tag", "tags", "label", "labels", "ner", "ner_tag", "ner_tags", "pos", "pos_tags", "upos", "xpos"}
MARKS = ".,;:!?…()[]{}<>\"'“”‘’«»。、，；：！？（）「」『』《》〈〉"
REPEATED = re.compile(r"(.)\1*")
PREFIXED = re.compile(r"O|[BIES]-.+")
Split = Literal["train", "test"]


class Sentence(NamedTuple):
    """Words with their tags, and where they are: the number of the first line, or of the row."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    file: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Generator:
    """Sentences by a rule: people, places and dates in English and Korean (`regard.data.entities`)."""

    name: Literal["entities"]  # the rule
    train: int = 4_000  # sentences
    test: int = 1_000  # with people and places that never occur in training
    seed: int = 1  # of the data; it does not depend on train.seed

    def __post_init__(self) -> None:
        check_fields(self, train=1, test=1)

    def sentences(self, split: Split) -> Iterator[Sentence]:
        pairs = sentences(split, self.train if split == "train" else self.test, self.seed)
        for number, (words, tags) in enumerate(pairs, 1):
            yield Sentence(tuple(words), tuple(tags), f"data.generator, {split}", number)


@dataclass(frozen=True, kw_only=True)
class TagData(TextFiles):
    """Where the sentences are, and how they are read."""

    tokens: str | None = None  # column of the words: its name, or in CoNLL files its number
    tags: str | None = None  # column of the tags
    classes: tuple[str, ...] = ()  # all tags, in their order; empty: those of `train`
    names: dict[str, str] = field(default_factory=dict)  # what a tag in the file is called here: { "0" = "O" }
    punctuation: Literal["attached", "separate"] | None = None  # in texts to be tagged; None: as in `train`
    max_length: int = 256  # tokens of the model, the two ends included; longer sentences are split between words
    word_dropout: float = 0.0  # probability that a token of a training sentence is masked
    generator: Generator | None = None  # instead of files

    EXAMPLE: ClassVar[str] = "train.conll"
    WEIGHTED: ClassVar[bool] = True
    GENERATORS: ClassVar[tuple[str, ...]] = ("generator",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, ("word_dropout",), max_length=3)  # a token and the two ends
        if self.generator is not None:
            object.__setattr__(self, "folder", ".")  # so that the recipe does not depend on where it was read
        if self.tokens is not None and self.tokens == self.tags:
            raise UserError(f"tokens = tags = {self.tokens!r}: name two different columns")
        if "0" in (self.tokens, self.tags):
            raise UserError(f'tokens = {self.tokens!r}, tags = {self.tags!r}: columns are counted from "1"')
        if len(set(self.classes)) < len(self.classes) or len(self.classes) == 1:
            raise UserError(f"classes = {list(self.classes)}: name two or more, each once, or remove them")

    def read(self, files: Sequence[str] | Sequence[Group]) -> Rows[Sentence]:
        """The sentences of `files`; a tag that is not among `classes` (if any) is a problem. `totals` are by tag."""
        paths = self.find(files)

        def scan(notes: Notes) -> Iterator[Sentence | Problem]:
            for path in paths:
                kind = table_kind(path)
                yield from self._table(path, notes) if kind in ("jsonl", "parquet") else self._columns(path, notes)

        def tally(one: Sentence, totals: Counter[str]) -> None:
            totals.update(one.tags)
            if len(totals) > MOST and not self.classes:
                raise UserError(
                    f"{one.file}: more than {MOST:,} different tags, such as {one.tags[0][:40]!r}: set tags in [data] "
                    "to the right column, or name them all in classes"
                )

        remedy = "write a token and its tag in each line, and a blank line after a sentence"
        return Rows(file_names(files), scan, self.skip_bad, "sentences", remedy, tally)

    def _sentence(self, words: Sequence[str], tags: Sequence[str], file: str, line: int, notes: Notes) -> Sentence:
        if len(words) != len(tags):
            raise ValueError(f"has {len(words)} tokens but {len(tags)} tags: each token needs one tag")
        for at, (word, tag) in enumerate(zip(words, tags, strict=True), 1):
            if not word.strip() or not tag.strip():
                raise ValueError(f"token {at}: {'its tag' if word.strip() else 'it'} is empty")
        named = tuple(self.names.get(tag, tag) for tag in tags)
        if unknown := [tag for tag in named if self.classes and tag not in self.classes]:
            near = suggest(unknown[0], self.classes)
            raise ValueError(f"tag {unknown[0][:40]!r} does not occur in training (name all tags in classes); {near}")
        if len(words) > LONG:
            notes[file, f"a sentence of more than {LONG:,} tokens; are blank lines between sentences missing?"] += 1
        return Sentence(tuple(words), named, file, line)

    def _table(self, path: Path, notes: Notes) -> Iterator[Sentence | Problem]:
        columns = (self.tokens or "tokens", self.tags or "tags")

        def make(row: Row, notes: Notes) -> Sentence | None:
            words, tags = row.cells
            return self._sentence(words, tags, row.file, row.line, notes) if words or tags else None

        remedy = "Set tokens and tags in [data] to the names of the columns"
        table = Table(
            path, columns, notes, convert=dict.fromkeys(columns, _labels), remedy=remedy, make=make, **self.format
        )
        return (row for row in table if row is not None)  # a row of two empty lists

    def _columns(self, path: Path, notes: Notes) -> Iterator[Sentence | Problem]:
        """A problem of a line leaves out its sentence."""
        name, universal, width = str(path), ".conllu" in path.name.lower(), 0
        token, tag = self.tokens or ("2" if universal else "1"), self.tags or ("4" if universal else "last")
        if table_kind(path) == "csv" or not token.isdecimal() or not (tag.isdecimal() or tag == "last"):
            what = f'columns are counted, such as tokens = "1", but tokens = {token!r} and tags = {tag!r}'
            what = "CSV is not a format of tagged sentences" if table_kind(path) == "csv" else what
            yield Problem(name, None, f"{what}; or use a table of lists (.jsonl, .parquet)", fatal=True)
            return
        columns = int(token) - 1, int(tag) - 1 if tag.isdecimal() else -1
        least = max(2, *(at + 1 for at in columns))

        def pick(number: int, line: str) -> list[str]:
            """A word and its tag; nothing of a line to skip."""
            nonlocal width
            between = self.delimiter or ("\t" if "\t" in line else None)
            cells = [cell.strip(" ") for cell in (line.split(between) if between else re.split(" +", line))]
            if cells[0] == "-DOCSTART-" or (universal and (line[0] == "#" or not cells[0].isdecimal())):
                return []
            width = width or len(cells)
            if len(cells) < least or len(cells) != width:
                need = f"instead of {width}" if len(cells) != width else f"for column {least}"
                raise ValueError(f"has {len(cells)} column{'s' * (len(cells) != 1)} {need}")
            if number == 1 and cells[columns[1]].lower() in HEADERS:
                raise ValueError(f"looks like a header ({cells[columns[1]]!r} is not a tag): remove the line")
            return [text(cells[at]) for at in columns]

        rows: list[list[str]] = []
        bad: list[Problem] = []
        first = 0  # line of the sentence
        for number, item in enumerate(chain(read_lines(path, notes, encoding=self.encoding), [""]), 1):
            if isinstance(item, Problem):
                bad.append(item)
                continue
            line = item.strip(" ")
            try:
                if line.strip("\t"):
                    first = first if rows else number
                    rows += [row for row in [pick(number, line)] if row]
                    continue
                if rows and not bad:
                    words, tags = zip(*rows, strict=True)
                    yield self._sentence(words, tags, name, first, notes)
            except ValueError as error:
                bad.append(Problem(name, number if line else first, str(error)))
            if not line.strip("\t"):
                yield from bad
                rows, bad = [], []


def _labels(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise ValueError(f'is {type(value).__name__}, not a list, such as ["Seoul", "is"]')
    return [label(one) for one in value]


# --- tags


def is_prefixed(tags: Sequence[str]) -> bool:
    """Whether the tags mark entities (B-, I-), and are not classes of single words; a mixture is a UserError."""
    other = [tag for tag in tags if not PREFIXED.fullmatch(tag)]
    if not any(tag.startswith(("B-", "I-")) for tag in tags):
        return False
    if other:
        bilou = "; BILOU becomes BIOES with L- as E- and U- as S-" if other[0].startswith(("L-", "U-")) else ""
        raise UserError(
            f"tag {other[0]!r}: with B- and I- in use, a tag is O or has one of the prefixes B-, I-, E-, S- (IOB1, "
            f"IOB2 or BIOES){bilou}; rename it in the files or with names in [data]"
        )
    return True


def find_entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """(type, first word, last word + 1) of each entity in tags of any scheme, invalid ones included.

    As conlleval does (Tjong Kim Sang & Buchholz 2000): I- after O, or after another type, begins an entity.
    """
    found: list[tuple[str, int, int]] = []
    before, kind, start = "O", "", -1
    for at, tag in enumerate((*tags, "O")):
        prefix, _, name = tag.partition("-")
        if start >= 0 and (prefix in "OBS" or before in "ES" or name != kind):
            found.append((kind, start, at))
            start = -1
        if start < 0 and prefix != "O":
            start = at
        before, kind = prefix, name
    return found


class Scheme:
    """Detects how tags mark entities, from sentences that it is shown."""

    def __init__(self) -> None:
        self.marks = 0  # words that are only punctuation
        self.tags = Counter[str]()
        self.prefixes = Counter[str]()
        self.transitions = Counter[str]()

    def add(self, sentence: Sentence) -> None:
        self.tags.update(sentence.tags)
        self.marks += sum(not word.strip(MARKS) for word in sentence.words)
        for before, tag in pairwise(("O", *sentence.tags, "O")):
            prefix, _, name = tag.partition("-")
            last, _, kind = before.partition("-")
            continues = last in ("B", "I") and kind == name
            self.prefixes[prefix] += 1
            self.transitions["I without B"] += prefix == "I" and (last == "O" or kind != name)
            self.transitions["B between"] += prefix == "B" and last != "O" and kind == name
            self.transitions["BIOES"] += (prefix in ("I", "E") and not continues) or (
                last in ("B", "I") and (prefix not in ("I", "E") or kind != name)
            )

    @property
    def name(self) -> str:
        if self.prefixes["E"] or self.prefixes["S"]:
            return "BIOES"
        first = self.prefixes["B"] - self.transitions["B between"]  # B- where IOB1 has I-
        return "IOB1" if self.transitions["I without B"] and not first else "IOB2"

    @property
    def invalid(self) -> int:
        """Words whose tag cannot follow the one before."""
        return {"IOB1": 0, "IOB2": self.transitions["I without B"], "BIOES": self.transitions["BIOES"]}[self.name]

    @property
    def punctuation(self) -> Literal["attached", "separate"]:
        return "separate" if self.marks else "attached"

    def notes(self, expected: str) -> list[str]:
        """What is odd about the tags; `expected` is the scheme of the training data."""
        what = "I- without B- before it" if self.name == "IOB2" else "tags that cannot follow the one before"
        invalid = f"{self.invalid:,} x {what} ({self.name}); read as the beginning of an entity"
        other = f"tags are {self.name}, but those of the training data {expected}: convert one of them"
        return [invalid] * bool(self.invalid) + [other] * (self.tags.keys() != {"O"} and self.name != expected)


def with_classes(data: TagData, scheme: Scheme) -> TagData:
    """The same with what the training data decides: all tags, O first, and how punctuation is written."""
    names = data.classes or tuple(sorted(scheme.tags, key=lambda tag: (tag != "O", tag)))
    if len(names) < 2:
        raise UserError(
            f"{', '.join(file_names(data.train))}: every token has the tag {names[0]!r}; set tags to the right column"
        )
    is_prefixed(names)
    return replace(data, classes=names, punctuation=data.punctuation or scheme.punctuation)


def check_sets(data: TagData) -> tuple[TagData, dict[str, tuple[Report, Scheme]]]:
    """Read all files once: the data with what the training files decide, and what each set contains."""
    found: dict[str, tuple[Report, Scheme]] = {}
    for name, files in {"train": data.train, **data.sets}.items():
        scheme = Scheme()
        report = data.read(files).check(scheme.add)
        data = with_classes(data, scheme) if name == "train" else data
        expected = found["train"][1] if found else scheme
        notes = scheme.notes(expected.name) if is_prefixed(data.classes) else []
        found[name] = replace(report, notes=[*report.notes, *(f"{report.files}: {note}" for note in notes)]), scheme
    return data, found


def split_words(running: str, punctuation: str = "attached") -> list[tuple[int, int]]:
    """Where the words of a text begin and end; "separate": punctuation around a word is split off."""
    words = [match.span() for match in re.finditer(r"\S+", running)]
    if punctuation == "attached":
        return words
    spans: list[tuple[int, int]] = []
    for begin, end in words:
        word = running[begin:end]
        first = end - len(word.lstrip(MARKS))
        last = first + len(word.strip(MARKS))
        marks = (REPEATED.finditer(running, *side) for side in ((begin, first), (last, end)))
        spans += sorted([*[(first, last)] * (first < last), *(mark.span() for mark in chain.from_iterable(marks))])
    return spans
