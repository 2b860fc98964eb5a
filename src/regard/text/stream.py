"""Incremental decoding: text from tokens one at a time, emitted as soon as it can no longer change.

A token of a byte-level vocabulary may end in the middle of a character: "한" is ed 95 9c, which may be two tokens. Its
bytes go through an incremental UTF-8 decoder, which buffers up to three of them. In other vocabularies the text of a
token depends on its neighbours (a space between words), so a new token is decoded together with the previous one.
In both cases the emitted parts, joined, equal `Tokenizer.decode` of all tokens.

    StreamDecoder   ids -> text          StopStrings   text -> text up to the first stop string
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from regard.text.tokenizer import Tokenizer


class StreamDecoder:
    """`add` returns the text that a token completes; `end` returns what is still buffered."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids: list[int] = []  # since the last position where the text was final
        self._emitted = ""  # the part of their text that was already returned

    def add(self, id: int) -> str:
        if self.tokenizer.byte_level:
            return self._decoder.decode(self.tokenizer.token_bytes(id))
        text = self.tokenizer.decode([*self._ids, id])
        if text.endswith("\ufffd"):  # an incomplete character spelled in bytes
            self._ids.append(id)
            return ""
        new = text.removeprefix(self._emitted)
        if new:  # otherwise the token is special, and the next one follows the previous one
            # Only the last token is kept: the text of the next one is what it adds to this one.
            self._ids = [id]
            self._emitted = self.tokenizer.decode(self._ids)
        return new

    def end(self) -> str:
        if self.tokenizer.byte_level:
            return self._decoder.decode(b"", final=True)
        rest = self.tokenizer.decode(self._ids).removeprefix(self._emitted)
        self._ids, self._emitted = [], ""
        return rest


class StopStrings:
    """Text up to the stop string that is completed first, which is excluded."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [stop for stop in stops if stop]
        self.stopped = False
        self._buffer = ""

    def add(self, text: str) -> str:
        """The new text that certainly precedes every stop string."""
        if self.stopped:
            return ""
        self._buffer += text
        matches = [(at + len(stop), at) for stop in self.stops if (at := self._buffer.find(stop)) >= 0]
        if matches:  # the one that ends first, however the text is split into parts
            self.stopped = True
            ready, self._buffer = self._buffer[: min(matches)[1]], ""
            return ready
        suffixes = ((at, self._buffer[at:]) for at in range(len(self._buffer)))  # one may be the start of a stop string
        starts = (at for at, suffix in suffixes if any(stop.startswith(suffix) for stop in self.stops))
        end = next(starts, len(self._buffer))
        ready, self._buffer = self._buffer[:end], self._buffer[end:]
        return ready

    def end(self) -> str:
        rest, self._buffer = self._buffer, ""
        return rest
