"""Long documents from short labelled texts: several are joined, and the label is that of the majority.

    [data]
    train = ["ratings_train.txt"]           a table of short texts, as in any classification
    [data.join]
    texts = 51                              in a document, one per line
    majority = 0.65                         fraction of them that have the label of the document, on average
    copies = 10                             documents that a training text is part of, with other texts each time

    아 더빙.. 진짜 짜증나네요 목소리\\n연기 최고\\n …   ->   negative

No single text decides: with the true label of one, the label of its document is known with probability `majority`, and
the more of the document a model reads, the more often it is correct. For a document, a label c is chosen, each equally
often; every text in it is of c with probability `majority`, and of another label otherwise. The label of the document
is the one that most of its texts then have. A text occurs once per copy, and validation and test documents consist of
texts that are in no training document.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from regard.errors import UserError
from regard.settings import check_fields


@dataclass(frozen=True, kw_only=True)
class Join:
    """How texts are joined to documents."""

    texts: int = 51  # number of texts in a document
    majority: float = 0.65  # fraction of the texts that have the label of the document, on average
    copies: int = 10  # number of documents in which each training text occurs
    separator: str = "\n"  # string between the texts of a document
    seed: int = 1  # seed of the documents; it does not depend on train.seed

    def __post_init__(self) -> None:
        check_fields(self, ("majority",), texts=2, copies=1, seed=0)

    def documents(self, rows: Iterable[tuple[str, str]], name: str) -> Iterator[tuple[str, str]]:
        """(document, label) of the set `name`, from (text, label): for "train" as many copies as there should be."""
        generator, texts = random.Random(f"{name} {self.seed}"), defaultdict[str, list[str]](list)
        for text, label in rows:
            texts[label].append(text)
        labels, made = sorted(texts), 0
        if len(labels) < 2:
            raise UserError(f"data.join: the texts of {name} have the label {labels[0]!r} only; two or more are needed")
        for _ in range(self.copies if name == "train" else 1):
            left = {label: generator.sample(texts[label], len(texts[label])) for label in labels}
            for number in count():
                chosen = self._labels(labels, number % len(labels), generator)
                (label, most), (_, second) = [*Counter(chosen).most_common(2), ("", 0)][:2]
                if any(amount > len(left[one]) for one, amount in Counter(chosen).items()):
                    break
                if most == second:  # a tie
                    continue
                made += 1
                yield self.separator.join([left[one].pop() for one in chosen]), label
        if not made:
            total = sum(map(len, texts.values()))
            raise UserError(
                f"data.join.texts = {self.texts}: the {total:,} texts of {name} are too few for one document of each "
                "label; lower it"
            )

    def _labels(self, labels: list[str], main: int, generator: random.Random) -> list[str]:
        """The label of every text of a document, most of them probably `labels[main]`."""
        others = [*labels[:main], *labels[main + 1 :]]
        return [
            labels[main] if generator.random() < self.majority else generator.choice(others) for _ in range(self.texts)
        ]
