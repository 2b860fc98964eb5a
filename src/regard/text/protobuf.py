"""The wire format of Protocol Buffers, as far as reading a file needs it.

A message is a row of fields. Each begins with a whole number, number << 3 | type, and type says how long it is:

    0   a whole number, 7 bits a byte, the last byte below 128
    1   8 bytes
    2   a length and that many bytes: text, bytes, or a message of its own
    5   4 bytes, such as a float

Nothing in it is code, so a file from anywhere can be read: what does not fit is an error, never an action.
"""

from __future__ import annotations

import struct

SIZES = {1: 8, 5: 4}


class Damaged(ValueError):
    """Bytes that are no such message."""


class Message:
    """The fields of one message. Of a field that occurs more than once the last counts, but for `many`."""

    def __init__(self, data: bytes) -> None:
        self.fields: dict[int, list[int | bytes]] = {}
        at = 0
        while at < len(data):
            key, at = _number(data, at)
            kind = key & 7
            value: int | bytes
            if kind == 0:
                value, at = _number(data, at)
            else:
                size = SIZES.get(kind)
                if size is None:
                    if kind != 2:
                        raise Damaged(f"a field of type {kind}")
                    size, at = _number(data, at)
                if at + size > len(data):
                    raise Damaged(f"a field of {size:,} bytes where {len(data) - at:,} are left")
                value, at = data[at : at + size], at + size
            self.fields.setdefault(key >> 3, []).append(value)

    def whole(self, field: int, default: int = 0) -> int:
        """A whole number; negative ones are written as 64 bits."""
        value = self.fields.get(field, [default])[-1]
        if not isinstance(value, int):
            raise Damaged(f"field {field} is no whole number")
        return value - 2**64 if value >= 2**63 else value

    def flag(self, field: int, default: bool) -> bool:
        return bool(self.whole(field, default))

    def raw(self, field: int, default: bytes = b"") -> bytes:
        value = self.fields.get(field, [default])[-1]
        if not isinstance(value, bytes):
            raise Damaged(f"field {field} is a whole number")
        return value

    def real(self, field: int) -> float:
        value = self.raw(field, bytes(4))
        if len(value) != 4:
            raise Damaged(f"field {field} is no float")
        return float(struct.unpack("<f", value)[0])

    def text(self, field: int) -> str:
        try:
            return self.raw(field).decode()
        except UnicodeDecodeError:
            raise Damaged(f"field {field} is no UTF-8 text") from None

    def message(self, field: int) -> Message:
        return Message(self.raw(field))

    def many(self, field: int) -> list[Message]:
        values = self.fields.get(field, [])
        if not all(isinstance(value, bytes) for value in values):
            raise Damaged(f"field {field} is no message")
        return [Message(value) for value in values if isinstance(value, bytes)]


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A whole number and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise Damaged("the file ends within a number")
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise Damaged("a number of more than 64 bits")
