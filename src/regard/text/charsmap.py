"""SentencePiece's normalisation: rules for characters, then for spaces.

A model file carries its rules ("①" -> "1", "ﾊﾟ" -> "パ", a line end -> a space) as a trie with the strings it leads
to. At each place of a text the longest rule that fits is applied, and what none fits is kept. Then, as the file says,
runs of spaces become one and those around the text go, a space is put in front, and each is written "▁".

The `tokenizers` library applies the same rules to whole graphemes or single letters only, so it leaves "か" + U+3099
or the separate letters of a Hangul syllable apart where SentencePiece joins them. Here the rules are applied as they
are meant: a tokenizer of that library whose normaliser has the form of `steps` gets this one instead.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Iterable
from itertools import product
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from regard.errors import UserError

SPACE = "▁"


class Rules:
    """Replacements of a character or several, from <size of the trie, 4 bytes><trie><strings, each ended by a zero>.

    The trie is a double array (Aoe 1989) of 32-bit units in the layout of the darts-clone library: the child of a
    node for byte b is unit  base(node) XOR b,  whose lowest byte is b; where a key ends, unit base(node) tells
    where its string begins. Keys with an end in common share units, so a few thousand hold 225,000 rules.
    """

    def __init__(self, content: bytes) -> None:
        size = int.from_bytes(content[:4], "little")
        if size % 4 or not 4 <= size <= len(content) - 4:
            raise UserError(f"the normalisation rules are damaged: a trie of {size:,} bytes in {len(content):,}")
        self.units = memoryview(content)[4 : 4 + size].cast("I").tolist()
        self.strings = content[4 + size :]
        self.begins, self.alone = self._first_letters()

    def longest(self, text: str, at: int) -> tuple[str, int] | None:
        """What the longest rule at this place makes, and of how many characters."""
        found = None
        node, letters = 0, at
        while letters < len(text):
            for byte in text[letters].encode():
                child = self._child(node, byte)
                if child is None:
                    return found
                node = child
            letters += 1
            if self.units[node] & 0x100:
                found = self._string(node), letters - at
        return found

    def _base(self, node: int) -> int:
        unit: int = self.units[node]
        return node ^ (unit >> 10 << ((unit & 0x200) >> 6))

    def _child(self, node: int, byte: int) -> int | None:
        at = self._base(node) ^ byte
        return at if at < len(self.units) and self.units[at] & 0x800000FF == byte else None

    def _string(self, node: int) -> str:
        base = self._base(node)
        at = self.units[base] & 0x7FFFFFFF if base < len(self.units) else len(self.strings)
        end = self.strings.find(b"\0", at)
        try:
            return self.strings[at : len(self.strings) if end < 0 else end].decode()
        except UnicodeDecodeError:
            raise UserError("the normalisation rules are damaged: they hold no UTF-8 text") from None

    def _first_letters(self) -> tuple[str, str]:
        """Letters that rules begin with, and those of them that need no letter beyond ASCII after them."""
        begins, alone = [], []
        waiting = [(0, b"")]
        while waiting:
            node, key = waiting.pop()
            try:
                letter = key.decode()
            except UnicodeDecodeError:
                letter = ""
            if not letter:
                if len(key) < 4:
                    children = ((byte, self._child(node, byte)) for byte in range(1, 256))
                    waiting += [(child, key + bytes([byte])) for byte, child in children if child is not None]
                continue
            begins.append(letter)
            if self.units[node] & 0x100 or any(self._child(node, byte) is not None for byte in range(1, 128)):
                alone.append(letter)
        return "".join(sorted(begins)), "".join(sorted(alone))


read_rules = functools.lru_cache(maxsize=4)(Rules)  # most models have the same


class Normaliser:
    """Text as SentencePiece's models read it; what `symbols` lists stays as it is."""

    def __init__(self, rules: Rules | None, symbols: Iterable[str], *, remove_spaces: bool, add_prefix: bool) -> None:
        self.rules, self.remove_spaces, self.add_prefix = rules, remove_spaces, add_prefix
        self.symbols = frozenset(symbols)
        patterns = sorted(map(re.escape, self.symbols), key=len, reverse=True)
        if rules is not None:
            patterns += [_any_of(rules.alone), _any_of(rules.begins) + r"(?=[^\0-\x7f])"]
        self.places = re.compile("|".join(patterns) or r"(?!)")  # where something may have to be replaced

    def __call__(self, text: str) -> str:
        if not text:
            return text
        text = self._replaced(text)
        if self.remove_spaces:
            text = re.sub(" +", " ", text).lstrip(" ")
        text = SPACE * self.add_prefix + text.replace(" ", SPACE)
        return text.rstrip(SPACE) if self.remove_spaces else text

    def _replaced(self, text: str) -> str:
        if self.rules is None:
            return text
        parts, done = [], 0
        while match := self.places.search(text, done):
            at, end = match.span()
            new = match[0]
            if new not in self.symbols and (found := self.rules.longest(text, at)):
                new, end = found[0], at + found[1]
            parts += [text[done:at], new]
            done = end
        return "".join([*parts, text[done:]]) if parts else text


def _any_of(letters: str) -> str:
    """A pattern for these letters, and for all beyond U+FFFF: Python searches a set of smaller ones much faster."""
    return "[" + "".join(re.escape(letter) for letter in letters if letter < "\U00010000") + "\U00010000-\U0010ffff]"


def steps(charsmap: bytes, *, remove_spaces: bool, add_prefix: bool) -> list[dict[str, Any]]:
    """The same as steps of the `tokenizers` library, in its JSON."""

    def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": pattern, "content": content}

    made: list[dict[str, Any]] = []
    if charsmap:
        made.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if remove_spaces:
        made += [replace({"Regex": " {2,}"}, " "), replace({"Regex": r"\A "}, "")]
    if add_prefix:
        made.append({"type": "Prepend", "prepend": SPACE})
    made.append(replace({"String": " "}, SPACE))
    if remove_spaces:
        made.append(replace({"Regex": rf"{SPACE}+\z"}, ""))
    return made


def normaliser_of(raw: RawTokenizer) -> Normaliser | None:
    """The one that `raw` means, if its steps are ours."""
    if raw.normalizer is None:
        return None
    given = json.loads(raw.normalizer.__getstate__())
    given = given.get("normalizers", [given])
    charsmap = b""
    if given and given[0].get("type") == "Precompiled":
        charsmap = base64.b64decode(given[0]["precompiled_charsmap"])
    for remove_spaces, add_prefix in product((True, False), repeat=2):
        if given == steps(charsmap, remove_spaces=remove_spaces, add_prefix=add_prefix):
            symbols = [token.content for token in raw.get_added_tokens_decoder().values() if not token.special]
            rules = read_rules(charsmap) if charsmap else None
            return Normaliser(rules, symbols, remove_spaces=remove_spaces, add_prefix=add_prefix)
    return None
