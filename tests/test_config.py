"""Configs: what cannot work is refused by name, value and remedy; what can comes back from TOML unchanged."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.recipe import PRESETS, preset
from regard.nn.config import Activation, Norm, PositionKind, Score, StackConfig
from regard.settings import from_dict, read_toml, to_dict, write_toml

# field values that cannot work, and words that the message must hold besides the first field and its value
BAD = [
    ({"heads": 7}, ["dim = 512", "heads = 8"]),
    ({"heads": 1000}, ["heads = 512"]),
    ({"heads": 0}, ["1 or more"]),
    ({"heads": -8}, ["1 or more"]),
    ({"heads": "8"}, ["integer", "str"]),
    ({"heads": True}, ["integer", "bool"]),
    ({"heads": 8.0}, ["integer", "float"]),
    ({"heads": None}, ["integer"]),
    ({"heads": [8]}, ["integer"]),
    ({"kv_heads": 3}, ["heads = 8"]),
    ({"kv_heads": 16}, ["heads = 8"]),
    ({"kv_heads": 0}, ["1 or more"]),
    ({"kv_heads": True}, ["integer"]),
    ({"head_dim": 0}, []),
    ({"value_dim": -1}, []),
    ({"dim": 0}, []),
    ({"layers": 0}, []),
    ({"layers": 2.5}, ["integer"]),
    ({"ff_dim": 0}, []),
    ({"window": 0}, []),
    ({"max_length": 0}, []),
    ({"dropout": -0.1}, ["at least 0"]),
    ({"dropout": 1.0}, ["below 1"]),
    ({"dropout": 1}, ["below 1"]),
    ({"dropout": "0.1"}, ["a number"]),
    ({"dropout": True}, ["a number"]),
    ({"dropout": float("nan")}, ["finite"]),
    ({"attention_dropout": 1.5}, []),
    ({"embed_dropout": -1}, []),
    ({"norm_eps": 0}, ["greater than 0"]),
    ({"norm_eps": float("inf")}, ["finite"]),
    ({"rope_base": -1.0}, ["greater than 0"]),
    ({"attention_scale": float("nan")}, ["finite"]),
    ({"logit_scale": float("-inf")}, ["finite"]),
    ({"position": "sinusodial"}, ["did you mean 'sinusoidal'", "alibi", "rope"]),
    ({"position": 3}, ["Choose one of"]),
    ({"activation": "relu2"}, ["did you mean 'relu'"]),
    ({"norm": "batch"}, ["layer"]),
    ({"norm_order": "middle"}, ["pre", "post"]),
    ({"attention": "flash"}, ["fused"]),
    ({"attention_score": "dots"}, ["did you mean 'dot'"]),
    ({"architecture": "gpt"}, ["decoder"]),
    ({"pairs": "both"}, ["halves"]),
    ({"bias": 1}, ["true or false"]),
    ({"residual": "yes"}, ["true or false"]),
    ({"position": "rope", "dim": 24, "heads": 8}, ["head_dim = 3", "even"]),
    ({"position": "rope", "head_dim": 5}, ["head_dim = 5", "even"]),
    ({"position": "sinusoidal", "dim": 21, "heads": 7}, ["dim = 21", "even"]),
    ({"position_buckets": 7, "position": "t5"}, ["even"]),
    ({"position_buckets": 2}, ["4 or more"]),
    ({"position_distance": 16, "position": "t5"}, ["position_buckets"]),
    ({"position_distance": 0}, []),
    ({"experts": -1}, []),
    ({"experts_per_token": 5, "experts": 4}, ["experts = 4"]),
    ({"experts_per_token": 0}, []),
    ({"attention": "flex", "attention_dropout": 0.1}, ["attention_dropout = 0.1", "fused"]),
    ({"attention_score": "additive"}, ["attention = 'reference'"]),
    ({"vocab_size": None}, ["8000"]),
    ({"vocab_size": 0}, []),
    ({"vocab_size": "8000"}, ["integer"]),
    ({"target_vocab_size": 200}, ["share"]),
    ({"token_types": -1}, []),
    ({"input": "patches", "architecture": "decoder"}, ["encoder"]),
    ({"input": "audio"}, ["features"]),
    ({"patch_size": 15, "input": "patches"}, ["image_size = 224"]),
    ({"position_axes": 2}, ["input = 'tokens'"]),
    ({"position_axes": 3, "input": "patches"}, ["2"]),
    ({"position_axes": 2, "input": "patches", "position": "alibi"}, ["'alibi'", "rope", "or set position_axes = 1"]),
    ({"position_axes": 2, "input": "patches", "position": "rope", "head_dim": 6}, ["head_dim = 6", "4"]),
    ({"shifted_window": 4}, ["input = 'tokens'"]),
    ({"shifted_window": 14, "input": "patches"}, ["14 x 14", "less than 14"]),
    ({"window": 5, "shifted_window": 4, "input": "patches"}, ["remove one of them"]),
    ({"stem": "conv"}, ["input = 'tokens'"]),
    ({"stem": "conv", "input": "patches", "image_size": 28, "patch_size": 7}, ["patch_size = 7"]),
    ({"output_head": "values"}, ["features"]),
    ({"max_length": 50, "input": "patches", "position": "learned"}, ["196"]),
    ({"output_head": "classes"}, ["tokens"]),
    ({"output_head": "tokens", "architecture": "encoder", "input": "features"}, ["output_head = 'classes'"]),
    ({"classes": None, "output_head": "classes", "architecture": "encoder"}, ["classes = 2"]),
    ({"classes": 1}, ["2 or more"]),
    ({"decoder_layers": 0}, []),
    ({"init": "zeros"}, ["xavier"]),
    ({"pooling": "max"}, ["mean"]),
]  # fmt: skip


def test_what_only_some_architectures_can_leave_out() -> None:
    assert not ModelConfig(vocab_size=9, causal=False).causal
    with pytest.raises(UserError, match=r"causal = false.*'decoder'.*'encoder-decoder'"):
        ModelConfig(vocab_size=9, architecture="decoder", causal=False)
    with pytest.raises(UserError, match=r"cross_attention = false.*'recurrent'"):
        ModelConfig(vocab_size=9, cross_attention=False)


@pytest.mark.parametrize(("changes", "words"), BAD, ids=[str(changes) for changes, _ in BAD])
def test_what_cannot_work_is_refused_by_name_and_value(changes: dict, words: list[str]) -> None:
    name, value = next(iter(changes.items()))
    with pytest.raises(UserError) as caught:
        ModelConfig(**{"vocab_size": 100, **changes})
    message = str(caught.value)
    shown = f"{name} is not set" if value is None and name != "heads" else f"{name} = {value!r}"
    number = f"{name} = {float(value)}" if isinstance(value, int) else shown  # whole numbers become floats
    assert shown in message or number in message
    assert all(word in message for word in words)


def test_parameters_per_head_need_a_key_head_each() -> None:
    with pytest.raises(UserError, match="kv_heads = 4"):
        StackConfig(attention_score="additive", attention="reference", kv_heads=4)


def test_a_whole_number_is_welcome_where_a_float_is_meant() -> None:
    config = StackConfig(dropout=0, rope_base=10**6, attention_scale=1)
    assert (config.dropout, config.rope_base, config.attention_scale) == (0.0, 1e6, 1.0)
    assert all(isinstance(value, float) for value in (config.dropout, config.rope_base, config.attention_scale))
    with pytest.raises(UserError, match="rope_base"):
        StackConfig(rope_base=10**400)


def test_a_config_is_frozen() -> None:
    config = ModelConfig(vocab_size=10)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.heads = 4
    assert hash(config) == hash(ModelConfig(vocab_size=10))
    assert dataclasses.replace(config, heads=4) == ModelConfig(vocab_size=10, heads=4) != config


@pytest.mark.parametrize(("heads", "dim", "near"), [(7, 512, 8), (3, 10, 2), (100, 512, 128), (6, 1_000_003, 1)])
def test_the_remedy_for_heads_works(heads: int, dim: int, near: int) -> None:
    with pytest.raises(UserError, match=f"use heads = {near},"):
        StackConfig(heads=heads, dim=dim, position="none")
    StackConfig(heads=near, dim=dim, position="none")


def test_a_prime_width_is_refused_at_once() -> None:
    with pytest.raises(UserError, match="use heads = 1,"):
        StackConfig(heads=12, dim=1_000_000_007, position="none")


def test_what_follows_from_the_fields() -> None:
    config = StackConfig(dim=48, heads=6)
    assert (config.key_heads, config.key_dim, config.val_dim, config.scale) == (6, 8, 8, 8**-0.5)
    config = StackConfig(dim=50, heads=6, kv_heads=2, head_dim=5, value_dim=7, attention_scale=0.5)
    assert (config.key_heads, config.key_dim, config.val_dim, config.scale) == (2, 5, 7, 0.5)
    assert StackConfig(attention_score="additive", attention="reference").scale == 1.0
    assert [StackConfig(norm_order=order).ends_with_norm for order in ("pre", "post")] == [True, False]
    assert StackConfig(norm_order="post", final_norm=True).ends_with_norm


# Tables


def test_an_unknown_key_is_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(UserError, match=r"model\.head_count: unknown setting.*Choose one of"):
        from_dict(ModelConfig, {"vocab_size": 10, "head_count": 8}, "model.")
    with pytest.raises(UserError, match="droput: unknown setting; did you mean 'dropout'"):
        from_dict(ModelConfig, {"vocab_size": 10, "droput": 0.1})
    with pytest.raises(UserError, match=r"^model\.heads = '8'"):
        from_dict(ModelConfig, {"vocab_size": 10, "heads": "8"}, "model.")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_toml(name: str, tmp_path: Path) -> None:
    config, path = preset(name), tmp_path / "model.toml"
    write_toml(path, to_dict(config))
    assert from_dict(ModelConfig, read_toml(path)) == config


def test_presets_change_by_name() -> None:
    assert preset("gpt2", layers=3, position="rope") == dataclasses.replace(preset("gpt2"), layers=3, position="rope")
    with pytest.raises(UserError, match="did you mean 'gpt2'"):
        preset("gpt-2")
    with pytest.raises(UserError, match="layer: unknown setting; did you mean 'layers'"):
        preset("gpt2", layer=3)
    with pytest.raises(UserError, match="heads = 7"):
        preset("gpt2", heads=7)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Valid by construction, over every field."""
    heads, size = draw(st.integers(1, 8)), draw(st.integers(1, 16)) * 2
    divisors = [number for number in range(1, heads + 1) if heads % number == 0]
    score = draw(st.sampled_from(get_args(Score)))
    path = "reference" if score != "dot" else draw(st.sampled_from(["fused", "reference", "flex"]))
    architecture = draw(st.sampled_from(["encoder-decoder", "decoder", "encoder"]))
    input = "tokens" if architecture == "decoder" else draw(st.sampled_from(["tokens", "patches", "features"]))
    heads_out = ["none", "pooled", "classes", *(["tokens"] if input == "tokens" else [])]
    optional = lambda strategy: draw(st.one_of(st.none(), strategy))  # noqa: E731
    chance = st.floats(0, 0.99)
    positive = st.floats(1e-12, 1e9)
    share = draw(st.booleans())
    vocab_size = draw(st.integers(1, 10**6))
    return ModelConfig(
        dim=heads * size,
        heads=heads,
        layers=draw(st.integers(1, 48)),
        kv_heads=optional(st.sampled_from(divisors)) if score == "dot" else None,
        head_dim=optional(st.integers(1, 32).map(lambda n: 2 * n)),
        value_dim=optional(st.integers(1, 64)),
        attention_score=score,
        attention_scale=optional(st.floats(-10, 10)),
        qk_norm=draw(st.booleans()),
        window=optional(st.integers(1, 4096)),
        attention=path,
        attention_dropout=0.0 if path == "flex" else draw(chance),
        dropout=draw(chance),
        embed_dropout=draw(chance),
        ff_dim=draw(st.integers(1, 4096)),
        activation=draw(st.sampled_from(get_args(Activation))),
        experts=(experts := draw(st.integers(0, 8))),
        experts_per_token=draw(st.integers(1, experts or 9)),
        norm=draw(st.sampled_from(get_args(Norm))),
        norm_order=draw(st.sampled_from(["pre", "post"])),
        norm_eps=draw(positive),
        final_norm=optional(st.booleans()),
        embed_norm=draw(st.booleans()),
        residual=draw(st.booleans()),
        bias=draw(st.booleans()),
        position=draw(st.sampled_from(get_args(PositionKind))),
        pairs=draw(st.sampled_from(["interleaved", "halves"])),
        max_length=draw(st.integers(200, 10**6)),
        rope_base=draw(positive),
        position_distance=draw(st.integers(100, 1000)),
        position_buckets=draw(st.integers(2, 50)) * 2,
        architecture=architecture,
        decoder_layers=optional(st.integers(1, 12)),
        input=input,
        vocab_size=vocab_size,
        target_vocab_size=optional(st.just(vocab_size) if share else st.integers(1, 10**6)),
        token_types=draw(st.integers(0, 4)),
        share_embeddings=share,
        tie_embeddings=draw(st.booleans()),
        logit_scale=draw(st.floats(-4, 4)),
        logit_bias=draw(st.booleans()),
        output_head="tokens" if architecture != "encoder" else draw(st.sampled_from(heads_out)),
        classes=draw(st.integers(2, 1000)),
        init=draw(st.sampled_from(["xavier", "normal"])),
    )


@settings(max_examples=150, deadline=None)
@given(configs())
def test_every_config_survives_toml(config: ModelConfig) -> None:
    text = tomli_w.dumps(to_dict(config))
    assert from_dict(ModelConfig, tomllib.loads(text)) == config


# Files


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    broken = {
        "syntax.toml": b"heads = = 8",
        "bytes.toml": b"\xff\xfe",
        "number.toml": b"heads = 1" + b"0" * 5000,
        "depth.toml": b"heads = " + b"[" * 100_000,
    }
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            read_toml(tmp_path / name)
    with pytest.raises(UserError, match="cannot be read"):
        read_toml(tmp_path / "missing.toml")
    with pytest.raises(UserError, match="cannot be read"):
        read_toml(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.toml"
    write_toml(path, {"heads": 8})

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("regard.files.os.replace", fail)
    with pytest.raises(UserError, match=r"model\.toml: cannot be written: disk full"):
        write_toml(path, {"heads": 4})
    assert read_toml(path) == {"heads": 8} and list(tmp_path.iterdir()) == [path]
