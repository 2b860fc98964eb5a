"""Settings: frozen dataclasses that check their types and are stored as TOML and JSON.

`to_dict`/`from_dict` convert a frozen dataclass, with nested ones, to plain values and back; `read_toml`/`write_toml`
read and write files. None is stored by omitting the key. An unknown key, a wrong type or a value outside a `Literal`
raises a `UserError` that names the field.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

from regard.errors import UserError, suggest
from regard.files import write_atomically

T = TypeVar("T")


@cache
def _annotations(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)  # a millisecond for a class of 40 settings


def field_types(kind: type) -> dict[str, Any]:
    """The annotation of each setting by name; fields that are derived from others (init=False) are no settings."""
    hints = _annotations(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def check_fields(settings: object, fractions: Iterable[str] = (), /, **least: float) -> None:
    """Check the type of every field, then lower bounds, such as `heads=1`, and fractions: at least 0 and below 1.

    An integer is accepted for a float and a list for a tuple; None has no bounds.
    """
    for name, kind in field_types(type(settings)).items():
        value = getattr(settings, name)
        try:
            value = _convert(kind, value)
        except TypeError:
            raise UserError(f"{name} = {value!r}: {_expected(kind, value)}") from None
        object.__setattr__(settings, name, value)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"{name} = {value}: must be a finite number")
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is not None and value < bound:
            raise UserError(f"{name} = {value}: must be {bound} or more")
    for name in fractions:
        if not 0 <= getattr(settings, name) < 1:
            raise UserError(f"{name} = {getattr(settings, name)}: must be at least 0 and below 1, such as 0.1")


def _convert(kind: Any, value: Any) -> Any:
    """`value` as the annotation `kind` needs it; TypeError if it has another type."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in parts):
            return value
    elif origin in (Union, types.UnionType):
        for part in parts:
            with suppress(TypeError):
                return _convert(part, value)
    elif origin is tuple:
        if isinstance(value, list | tuple):
            kinds = parts[:1] * len(value) if parts[-1] is ... else parts  # tuple[int, ...] or tuple[str, int]
            if len(kinds) == len(value):
                return tuple(map(_convert, kinds, value))
    elif origin is dict:
        if isinstance(value, dict):
            return {_convert(parts[0], name): _convert(parts[1], item) for name, item in value.items()}
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**1000 else math.inf
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise TypeError


def _expected(kind: Any, value: Any) -> str:
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    if choices:
        return suggest(str(value), map(str, choices))
    names = {int: "an integer", float: "a number", str: "a string in quotes", bool: "true or false"}

    def word(part: Any) -> str:
        if get_origin(part) is Literal:
            return " | ".join(map(str, get_args(part)))
        if get_origin(part) is tuple:
            each = get_args(part)
            return f"a list, each element {word(each[0])}" if each[-1] is ... else f"[{', '.join(map(word, each))}]"
        return names.get(part, getattr(part, "__name__", str(part)))

    words = [word(part) for part in parts if part is not types.NoneType]
    return f"expected {' or '.join(words)}, got {'list' if isinstance(value, tuple) else type(value).__name__}"


def to_dict(settings: Any) -> Any:
    """Plain values; None is omitted, tuples become lists."""
    if dataclasses.is_dataclass(settings):
        settings = {name: getattr(settings, name) for name in field_types(type(settings))}
    if isinstance(settings, dict):
        return {name: to_dict(value) for name, value in settings.items() if value is not None}
    return [to_dict(value) for value in settings] if isinstance(settings, tuple) else settings


def from_dict(kind: type[T], values: dict[str, Any], where: str = "") -> T:
    """A `kind` from plain values; errors name the key with its table (`model.heads`)."""
    known, ready = field_types(kind), dict[str, Any]()
    for name, value in values.items():
        if name not in known:
            raise UserError(f"{where}{name}: unknown setting; {suggest(name, known)}")
        parts = get_args(known[name]) if get_origin(known[name]) in (Union, types.UnionType) else (known[name],)
        nested: Any = next((part for part in parts if dataclasses.is_dataclass(part)), None)
        if nested is not None:
            if not isinstance(value, dict):
                raise UserError(f"{where}{name} = {value!r}: expected a table [{where}{name}]")
            value = from_dict(nested, value, f"{where}{name}.")
        ready[name] = value
    try:
        return kind(**ready)
    except UserError as error:
        raise UserError(str(error) if str(error).startswith(where) else f"{where}{error}") from None
    except TypeError as error:
        raise UserError(f"{where.rstrip('.') or kind.__name__}: {error}") from None


def read_toml(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # invalid TOML or UTF-8, or a number that is too long
        raise UserError(f"{path}: not readable as TOML: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def write_toml(path: str | Path, values: dict[str, Any]) -> None:
    write_atomically(path, tomli_w.dumps(values).encode())
