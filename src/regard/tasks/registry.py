"""The tasks that can be trained, by the name in a recipe:  task = "language-modeling".

Each is a subclass of `regard.training.task.Task`, imported only when it is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from regard.errors import UserError, suggest

if TYPE_CHECKING:
    import torch

    from regard.models.config import ModelConfig
    from regard.predict.bundle import Bundle, Predictor
    from regard.training.task import Task

# name: (module, class)
TASKS = {
    "translation": ("regard.tasks.translation", "Translation"),
    "text-to-text": ("regard.tasks.text_to_text", "TextToText"),
    "language-modeling": ("regard.tasks.language_modeling", "LanguageModeling"),
    "masked-language-modeling": ("regard.tasks.masked_language_modeling", "MaskedLanguageModeling"),
    "token-classification": ("regard.tasks.token_classification", "TokenClassification"),
    "text-classification": ("regard.tasks.text_classification", "TextClassification"),
    "image-classification": ("regard.tasks.image_classification", "ImageClassification"),
    "image-captioning": ("regard.tasks.image_captioning", "ImageCaptioning"),
    "regression": ("regard.tasks.regression", "Regression"),
}
# name: the `predictor` of the task, which a prediction imports without what only training needs; a test compares them
PREDICTORS = {
    "translation": ("regard.predict.translator", "Translator"),
    "text-to-text": ("regard.predict.translator", "Translator"),
    "language-modeling": ("regard.predict.generator", "Generator"),
    "masked-language-modeling": ("regard.predict.mask_predictor", "MaskPredictor"),
    "token-classification": ("regard.predict.tagger", "Tagger"),
    "text-classification": ("regard.predict.classifier", "TextClassifier"),
    "image-classification": ("regard.predict.classifier", "ImageClassifier"),
    "image-captioning": ("regard.predict.captioner", "Captioner"),
    "regression": ("regard.predict.regressor", "Regressor"),
}
DEFAULT = "translation"  # of a recipe that names none
VERIFICATION = "export.json"  # in the folder of an export: how it compares with the run
NOT_A_RUN = "is an export, which computes outputs only; use the run that it was exported from"


def task_of(tables: Mapping[str, Any]) -> type[Task]:
    """The class of the task that a recipe names."""
    name = tables.get("task", DEFAULT)
    if not isinstance(name, str) or name not in TASKS:
        raise UserError(f"task = {name!r}: unknown task; {suggest(str(name), TASKS)}")
    module, kind = TASKS[name]
    return cast("type[Task]", getattr(importlib.import_module(module), kind))


def predictor_of(task: str) -> type[Predictor[Any, Any]]:
    """What predicts with a model of this task."""
    if task not in PREDICTORS:  # a task of one's own
        return task_of({"task": task}).predictor
    module, kind = PREDICTORS[task]
    return cast("type[Predictor[Any, Any]]", getattr(importlib.import_module(module), kind))


def load(
    path: str | Path,
    device: str | torch.device = "cpu",
    recipe: Mapping[str, Any] | None = None,
    ensemble: Sequence[str | Path] = (),
) -> Bundle:
    """The model in a folder with everything that is needed to use it: `regard.load("runs/x").predict([...])`.

    "sample:korean-small" is the model that is installed with Regard.
    `recipe`: the tables of its recipe, if already read; they are parsed once, and travel with the bundle.
    `ensemble`: folders of other models, which translate or caption together with it (`regard.predict.ensemble`).
    """
    from regard.models import folder
    from regard.models.recipe import read_recipe
    from regard.predict.bundle import Bundle
    from regard.predict.onnx import is_exported, load_exported
    from regard.samples import sample_folder

    path = sample_folder(path) or path
    recipe = read_recipe(path, saved=True) if recipe is None else recipe
    if (Path(path) / "model.bin").is_file():  # `regard export --ctranslate2`
        from regard.predict.ctranslate2 import load_ctranslate2

        if ensemble:
            raise UserError(f"{path}: a folder for CTranslate2 cannot be part of an ensemble; pass the runs")
        return load_ctranslate2(path, device, recipe, folder.load_tokenizers(path))
    model: Any
    if is_exported(path):
        model, tokenizers = load_exported(path, recipe)
    else:
        model, tokenizers = folder.load(path, device, recipe), folder.load_tokenizers(path)
    bundle = Bundle(model, tokenizers, recipe, path, others=[load(other, device) for other in ensemble])
    bundle.own = True
    if name := bundle.recipe.get("task") or task_for(bundle.config):
        bundle.predictor_class = predictor_of(name)
    return bundle


def load_run(path: str | Path, device: str | torch.device = "cpu", recipe: Mapping[str, Any] | None = None) -> Bundle:
    """`load` for those who need the model itself, its weights and activations: an export computes its outputs only."""
    from regard.models.transformer import Model

    bundle = load(path, device, recipe)
    if not isinstance(bundle.model, Model):
        raise UserError(f"{path}: {NOT_A_RUN}")
    return bundle


def task_for(config: ModelConfig) -> str | None:
    """The task of a model whose recipe names none: an imported one, or one that `regard.save` has written."""
    match config.architecture, config.input, config.output_head:
        case "decoder", _, _:
            return "language-modeling"
        case "encoder", "patches", "classes":
            return "image-classification"
        case "encoder", "tokens", "classes":
            return "token-classification" if config.per_token else "text-classification"
        case "encoder", _, "tokens":
            return "masked-language-modeling"
        case "encoder", _, _:
            return None
        case _, _, "values":
            return "regression"
        case _, "tokens", _:
            return "translation"
    return "image-captioning"
