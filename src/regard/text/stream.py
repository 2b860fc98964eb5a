"""Text from tokens one at a time: what is certain is given out, what is not yet is held back.

A token of a byte-level vocabulary may end in the middle of a character: "한" is ed 95 9c, and a model may write it as
two tokens. Its bytes go through an incremental UTF-8 decoder, which holds up to three of them back. In the other
vocabularies a token's text depends on its neighbours (a space between words), so the new token is decoded together
with the one before it. Either way the parts joined are exactly `Tokenizer.decode` of all tokens.

    Letters   ids -> text          Until   text -> text that ends before the first stop string
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from regard.text.tokenizer import Tokenizer


class Letters:
    """`add` a token, get the text that it completes; `end` gives what was still held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids: list[int] = []  # since the last place where the text was certain
        self._known = ""  # what of their text was given out before

    def add(self, id: int) -> str:
        if self.tokenizer.byte_level:
            return self._decoder.decode(self.tokenizer.token_bytes(id))
        text = self.tokenizer.decode([*self._ids, id])
        if text.endswith("\ufffd"):  # a character that is spelled in bytes, and not complete
            self._ids.append(id)
            return ""
        fresh = text.removeprefix(self._known)
        if fresh:  # else it is special, and the next one follows the one before
            # Only the last token is kept: the next one's text is what it adds to this one's.
            self._ids = [id]
            self._known = self.tokenizer.decode(self._ids)
        return fresh

    def end(self) -> str:
        if self.tokenizer.byte_level:
            return self._decoder.decode(b"", final=True)
        rest = self.tokenizer.decode(self._ids).removeprefix(self._known)
        self._ids, self._known = [], ""
        return rest


class Until:
    """Text up to the stop string that is complete first, which is left out."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [stop for stop in stops if stop]
        self.stopped = False
        self._held = ""

    def add(self, text: str) -> str:
        """What of the text so far is certain to stand before any stop string, beyond what was given before."""
        if self.stopped:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:  # whatever the sizes in which the text comes, the same one ends it
            self.stopped = True
            ready, self._held = self._held[: min(found)[1]], ""
            return ready
        keep = max((_overlap(self._held, stop) for stop in self.stops), default=0)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return ready

    def end(self) -> str:
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """How many letters at the end of `text` may be the beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
