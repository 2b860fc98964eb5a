"""Settings: TOML preserves values, and errors name the key with its table."""

from __future__ import annotations

import errno
import math
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from regard.errors import UserError
from regard.files import write_atomically
from regard.models.config import ModelConfig
from regard.settings import check_fields, from_dict, read_toml, to_dict, write_toml
from regard.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 3
    kind: Literal["small", "large"] = "small"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.size < 1:
            raise UserError(f"size = {self.size}: must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    rate: float = 0.5
    limit: int | None = None
    flag: bool = False
    pair: tuple[float, ...] = (0.5, 1.5)
    inner: Inner = Inner()
    more: Inner | None = None

    def __post_init__(self) -> None:
        check_fields(self)


outers = st.builds(
    Outer,
    name=st.text(st.characters(codec="utf-8")),
    rate=st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**60), 2**60),
    limit=st.none() | st.integers(-(2**63), 2**63 - 1),
    flag=st.booleans(),
    pair=st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9), max_size=4).map(tuple),
    inner=st.builds(Inner, size=st.integers(1, 99), kind=st.sampled_from(["small", "large"])),
    more=st.none() | st.builds(Inner),
)


# --- there and back


@given(outers)
@hypothesis_settings(max_examples=80, deadline=None)
def test_toml_preserves_values(tmp_path_factory, value):
    assert from_dict(Outer, to_dict(value)) == value
    path = tmp_path_factory.getbasetemp() / "value.toml"
    write_toml(path, {"outer": to_dict(value)})
    again = from_dict(Outer, read_toml(path)["outer"], "outer.")
    assert again == value
    assert all(type(getattr(again, field.name)) is type(getattr(value, field.name)) for field in fields(value))


@pytest.mark.parametrize(
    "config",
    [TrainConfig(), TrainConfig(betas=(0.8, 0.95), schedule="cosine", eps=1e-8), ModelConfig(vocab_size=9, kv_heads=2)],
    ids=["train", "train changed", "model"],
)
def test_toml_preserves_recipes(tmp_path, config):
    write_toml(tmp_path / "recipe.toml", {"table": to_dict(config)})
    assert from_dict(type(config), read_toml(tmp_path / "recipe.toml")["table"], "table.") == config


def test_none_is_omitted_and_lists_become_tuples():
    plain = to_dict(Outer(name="x"))
    assert "limit" not in plain and "more" not in plain
    assert plain["pair"] == [0.5, 1.5] and plain["inner"] == {"size": 3, "kind": "small"}


def test_integers_are_accepted_as_floats_also_in_tuples():
    value = Outer(name="x", rate=2, pair=(0, 1))
    assert type(value.rate) is float and [type(item) for item in value.pair] == [float, float]
    assert TrainConfig(betas=(0, 0.98)).betas == (0.0, 0.98)
    assert type(replace(value, rate=10**300).rate) is float


# --- what is wrong, and where


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "x", "raet": 1}, "top.raet: unknown setting; did you mean 'rate'?"),
        ({"name": "x", "rate": "1"}, "top.rate = '1': expected a number, got str"),
        ({"name": "x", "rate": True}, "top.rate = True: expected a number, got bool"),
        ({"name": "x", "rate": math.nan}, "top.rate = nan: must be a finite number"),
        ({"name": "x", "rate": math.inf}, "top.rate = inf: must be a finite number"),
        ({"name": "x", "rate": 10**400}, "top.rate = inf: must be a finite number"),
        ({"name": "x", "pair": [0.5, math.nan]}, "top.pair = (0.5, nan): must be a finite number"),
        ({"name": "x", "pair": 3}, "top.pair = 3: expected a list, each element a number, got int"),
        ({"name": "x", "pair": ["a"]}, "top.pair = ['a']: expected a list, each element a number, got list"),
        ({"name": "x", "limit": 1.0}, "top.limit = 1.0: expected an integer, got float"),
        ({"name": "x", "flag": 1}, "top.flag = 1: expected true or false, got int"),
        ({"name": 5}, "top.name = 5: expected a string in quotes, got int"),
        ({"name": "x", "inner": 5}, "top.inner = 5: expected a table [top.inner]"),
        ({"name": "x", "inner": {"size": 0}}, "top.inner.size = 0: must be 1 or more"),
        ({"name": "x", "more": {"kind": "larg"}}, "top.more.kind = 'larg': did you mean 'large'?"),
        ({"name": "x", "more": {"seize": 2}}, "top.more.seize: unknown setting; did you mean 'size'?"),
        ({}, "top: "),
    ],
)
def test_an_error_names_the_key_with_its_table(values, message):
    with pytest.raises(UserError) as caught:
        from_dict(Outer, values, "top.")
    assert str(caught.value).startswith(message)
    with pytest.raises(UserError) as caught:
        from_dict(Outer, values)
    assert "top" not in str(caught.value)


def test_a_missing_field_is_named():
    with pytest.raises(UserError, match=r"^table: .*'name'"):
        from_dict(Outer, {}, "table.")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"[data", "not readable as TOML"), (b"\xff\xfe", "not readable as TOML"), (b"a = " + b"[" * 99_999, "TOML")],
)
def test_a_file_that_is_not_toml_is_named(tmp_path, content, words):
    (tmp_path / "recipe.toml").write_bytes(content)
    with pytest.raises(UserError, match=rf"{tmp_path / 'recipe.toml'}: .*{words}"):
        read_toml(tmp_path / "recipe.toml")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "missing.toml"):
        with pytest.raises(UserError, match=rf"{path}: cannot be read: "):
            read_toml(path)


# --- whole or absent


def test_a_file_is_replaced_atomically(tmp_path, monkeypatch):
    path = tmp_path / "file"
    seen = []
    real = os.replace

    def look(source, target):
        seen.append((path.read_bytes(), Path(source).read_bytes(), Path(source).parent == tmp_path))
        real(source, target)

    write_atomically(path, b"old")
    monkeypatch.setattr(os, "replace", look)
    write_atomically(path, b"new")
    assert seen == [(b"old", b"new", True)] and path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_a_failed_write_names_the_path_and_keeps_the_old_file(tmp_path, monkeypatch, call, failure):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*arguments: object) -> None:
        raise failure

    monkeypatch.setattr(os, call, fail)
    if isinstance(failure, OSError):
        with pytest.raises(UserError, match=rf"^{path}: cannot be written: No space left on device$"):
            write_atomically(path, b"new")
    else:
        with pytest.raises(KeyboardInterrupt):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_a_missing_folder_is_an_error_with_the_path(tmp_path):
    with pytest.raises(UserError, match=rf"^{tmp_path / 'no' / 'file'}: cannot be written: No such file or directory"):
        write_atomically(tmp_path / "no" / "file", b"")


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_written_files_are_readable_by_others(tmp_path):
    write_atomically(tmp_path / "file", b"")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
