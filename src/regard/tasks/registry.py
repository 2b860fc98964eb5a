"""The tasks that can be trained, by the name that a recipe gives:  task = "language".

Each is a subclass of `regard.train.run.TaskRun`, imported only when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from regard.errors import UserError, suggest

if TYPE_CHECKING:
    import torch

    from regard.models import ModelConfig
    from regard.predict.bundle import Bundle
    from regard.train.run import TaskRun

# name: (module, class)
TASKS = {
    "translation": ("regard.tasks.translation", "TranslationRun"),
    "language": ("regard.tasks.language_modeling", "LanguageRun"),
    "text-to-text": ("regard.tasks.text_to_text", "TextToTextRun"),
    "masked": ("regard.tasks.masked_language_modeling", "MaskedRun"),
    "classification": ("regard.tasks.text_classification", "ClassificationRun"),
    "image-classification": ("regard.tasks.image_classification", "PicturesRun"),
    "captioning": ("regard.tasks.captioning", "CaptioningRun"),
    "numbers": ("regard.tasks.regression", "NumbersRun"),
}
DEFAULT = "translation"  # of a recipe that names none


def task_of(tables: Mapping[str, Any]) -> type[TaskRun]:
    """The class for the task that a recipe names."""
    name = tables.get("task", DEFAULT)
    if not isinstance(name, str) or name not in TASKS:
        raise UserError(f"task = {name!r}: there is no such task; {suggest(str(name), TASKS)}")
    module, kind = TASKS[name]
    return cast("type[TaskRun]", getattr(importlib.import_module(module), kind))


def load(path: str | Path, device: str | torch.device = "cpu") -> Bundle:
    """The model in a folder with everything that is needed to use it: `regard.load("runs/x").predict([...])`."""
    from regard.predict.bundle import load as load_bundle

    bundle = load_bundle(path, device)
    name = bundle.recipe.get("task", task_for(bundle.config))
    bundle.predictor_class = None if name is None else task_of({"task": name}).predictor
    return bundle


def task_for(config: ModelConfig) -> str | None:
    """The task of a model whose recipe names none: an imported one, or one that `regard.save` has written."""
    match config.architecture, config.input, config.output_head:
        case "decoder", _, _:
            return "language"
        case "encoder", "patches", "classes":
            return "image-classification"
        case "encoder", "tokens", "classes":
            return "classification"
        case "encoder", _, "tokens":
            return "masked"
        case "encoder", _, _:
            return None
        case _, _, "values":
            return "numbers"
        case _, "tokens", _:
            return "translation"
    return "captioning"
