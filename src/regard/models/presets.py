"""Presets: configurations with published sizes, listed in presets.toml.

    regard cost base --seq 512        from regard import preset, build
                                      model = build(preset("base", vocab_size=8000))

Any field can be changed by name: `preset("gpt2", layers=6, position="rope")`.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

from regard.errors import UserError, suggest
from regard.models.config import ModelConfig
from regard.settings import from_dict

_tables = tomllib.loads((resources.files("regard.models") / "presets.toml").read_text(encoding="utf-8"))
_likes = {name: _tables.get(table.pop("like", None), {}) for name, table in _tables.items()}
PRESETS: dict[str, dict[str, Any]] = {name: {**_likes[name], **table} for name, table in _tables.items()}


def preset(name: str, **changes: Any) -> ModelConfig:
    """The config called `name`, with these fields changed."""
    if name not in PRESETS:
        raise UserError(f"preset {name!r} does not exist; {suggest(name, PRESETS)}")
    return from_dict(ModelConfig, {**PRESETS[name], **changes})
