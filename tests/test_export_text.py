"""Exported folders from text to text: AutoTokenizer and the model of transformers give the predictions of Regard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'regard[hf]'")

import transformers

import regard
from regard.cli import main
from regard.interop import compare, export_folder, read_folder
from regard.interop.check import TEXTS, compare_texts
from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.predict.bundle import Bundle
from regard.predict.classifier import TextClassifier
from regard.predict.generator import Generator
from regard.predict.mask_predictor import MaskPredictor
from regard.predict.translator import Translator
from regard.text.tokenizer import Tokenizer

SIZE: dict[str, Any] = {"dim": 32, "heads": 4, "layers": 2, "ff_dim": 64, "max_length": 256}
MARIAN: dict[str, Any] = {**SIZE, "norm_order": "post", "position": "sinusoidal", "activation": "relu"}
BERT: dict[str, Any] = {
    **SIZE, "architecture": "encoder", "position": "learned", "norm_order": "post", "embed_norm": True,
    "activation": "gelu", "embed_scale": False,
}  # fmt: skip
GPT2: dict[str, Any] = {
    **SIZE, "architecture": "decoder", "position": "learned", "norm_order": "pre", "activation": "gelu-tanh",
    "embed_scale": False,
}  # fmt: skip
NAMES = ("negative", "neutral", "positive")


def tokenizer(kind: str) -> Tokenizer:
    sizes = {"bpe": 400, "unigram": 200}
    return Tokenizer.train(TEXTS, kind, sizes.get(kind))


def exported(bundle: Bundle, folder: Path) -> Path:
    names = {str(number): name for number, name in enumerate(bundle.classes)} if bundle.config.classes else None
    export_folder(bundle.model, folder, bundle.tokenizers, metadata={"id2label": names} if names else {})
    return folder


def loud(model: Any) -> Any:
    """Larger output weights, so that outputs depend on the text."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model.eval()


def translator(kinds: tuple[str, ...]) -> Bundle:
    tokenizers = {name: tokenizer(kind) for name, kind in zip(("source", "target"), kinds, strict=False)}
    if len(kinds) == 1:
        tokenizers = {"tokenizer": tokenizers["source"]}
    source, target = next(iter(tokenizers.values())), [*tokenizers.values()][-1]
    sizes = {"vocab_size": len(source)}
    if len(kinds) == 2:
        sizes |= {"target_vocab_size": len(target), "share_embeddings": False}
    return Bundle(loud(build(ModelConfig(**MARIAN, **sizes))), tokenizers, predictor=Translator)


@pytest.mark.parametrize("kinds", [("bpe",), ("unigram",), ("word",), ("char",), ("byte",)], ids="-".join)
def test_a_translator_gives_the_same_texts(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    bundle = translator(kinds)
    agreement = compare_texts(bundle, exported(bundle, tmp_path))
    assert agreement is not None and agreement.identical == agreement.compared == len(TEXTS), agreement
    assert len({one.text for one in bundle.predict(TEXTS, max_length=24)}) > 3


def test_the_check_notices_a_tokenizer_without_its_special_tokens(tmp_path: Path) -> None:
    bundle = translator(("bpe",))
    path = exported(bundle, tmp_path) / "tokenizer.json"
    content = json.loads(path.read_text())
    assert content["post_processor"]["single"][-1]["SpecialToken"]["id"] == "</s>"
    path.write_text(json.dumps({**content, "post_processor": None}))
    agreement = compare_texts(bundle, tmp_path)
    assert agreement is not None and agreement.identical < 0.9 * agreement.compared and agreement.first is not None


def classifier(**settings: Any) -> Bundle:
    own = tokenizer("bpe")
    config = ModelConfig(**BERT, vocab_size=len(own), output_head="classes", classes=3, **settings)
    return Bundle(loud(build(config)), {"tokenizer": own}, {"data": {"classes": list(NAMES)}}, predictor=TextClassifier)


def test_a_classifier_gives_the_same_classes_and_probabilities(tmp_path: Path) -> None:
    bundle = classifier(pooling="cls", pooler=True)
    agreement = compare_texts(bundle, exported(bundle, tmp_path))
    assert agreement is not None and agreement.identical == agreement.compared
    pipeline = transformers.pipeline("text-classification", str(tmp_path), top_k=None)
    for text, ours in zip(TEXTS, bundle.predict(TEXTS), strict=True):
        (theirs,) = pipeline([text])
        assert {one["label"]: pytest.approx(one["score"], abs=1e-5) for one in theirs} == ours.probabilities
    assert read_folder(tmp_path).metadata["id2label"] == {"0": "negative", "1": "neutral", "2": "positive"}


def test_a_masked_model_fills_the_same_tokens(tmp_path: Path) -> None:
    own = tokenizer("bpe").with_special_tokens(["<mask>"])
    config = ModelConfig(**BERT, vocab_size=len(own), output_head="tokens", head_layer=True, logit_bias=True)
    bundle = Bundle(loud(build(config)), {"tokenizer": own}, predictor=MaskPredictor)
    agreement = compare_texts(bundle, exported(bundle, tmp_path))
    assert agreement is not None and agreement.identical == agreement.compared
    (best, *_) = transformers.pipeline("fill-mask", str(tmp_path))("It costs <mask> euros!")
    ((ours, *_),) = bundle.predict(["It costs <mask> euros!"])[0].masks
    assert own.token(best["token"]) == ours.token and best["score"] == pytest.approx(ours.probability, abs=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_a_language_model_continues_texts_alike(tmp_path: Path, bias: bool) -> None:
    own = tokenizer("bpe")
    bundle = Bundle(
        loud(build(ModelConfig(**GPT2, vocab_size=len(own), bias=bias))), {"tokenizer": own}, predictor=Generator
    )
    agreement = compare_texts(bundle, exported(bundle, tmp_path))
    assert agreement is not None and agreement.identical == agreement.compared == len(TEXTS)
    assert compare(bundle.model, tmp_path).within_tolerance


@pytest.mark.parametrize(
    "channels, mean, std", [(1, (0.286,), (0.353,)), (3, (0.5,), (0.25,)), (3, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))]
)
def test_pixel_statistics_go_to_the_preprocessor_and_back(
    tmp_path: Path, channels: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    config = ModelConfig(
        **{**SIZE, "max_length": 17}, architecture="encoder", input="patches", position="learned", norm_order="pre",
        activation="gelu", image_size=16, patch_size=4, channels=channels, pixel_mean=mean, pixel_std=std,
        output_head="classes", classes=5, pooling="cls",
    )  # fmt: skip
    model = loud(build(config))
    export_folder(model, tmp_path)
    assert compare(model, tmp_path).within_tolerance
    again = read_folder(tmp_path).model
    images = torch.rand(2, channels, 16, 16)
    torch.testing.assert_close(again.eval()(images.expand(-1, 3, -1, -1)), model(images))
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert len(written["image_mean"]) == len(written["image_std"]) == 3


@pytest.mark.parametrize("size", [(16, 16), (21, 13)])
def test_a_pipeline_classifies_gray_images(tmp_path: Path, size: tuple[int, int]) -> None:
    """transformers opens every image in RGB: the exported model gives the classes of the grayscale model for it."""
    image = pytest.importorskip("PIL.Image", reason="pip install 'regard[images]'")
    config = ModelConfig(
        **{**SIZE, "max_length": 17}, architecture="encoder", input="patches", position="learned", norm_order="pre",
        activation="gelu", image_size=16, patch_size=4, channels=1, pixel_mean=(0.286,), pixel_std=(0.353,),
        output_head="classes", classes=3, pooling="cls",
    )  # fmt: skip
    recipe = {"task": "image-classification", "data": {"classes": [*NAMES]}}
    regard.save(loud(build(config)), tmp_path / "run", recipe=recipe)
    assert main(["export", str(tmp_path / "run"), "--hf", str(tmp_path / "hf")]) == 0
    assert main(["import", str(tmp_path / "hf"), "-o", str(tmp_path / "again")]) == 0
    noise = torch.randint(256, (*reversed(size), 3), dtype=torch.uint8)
    image.fromarray(noise.numpy()[..., 0]).save(tmp_path / "gray.png")
    image.fromarray(noise.numpy()).save(tmp_path / "color.png")
    pipeline = transformers.pipeline("image-classification", str(tmp_path / "hf"))
    for name, error in (("gray.png", 1e-5), ("color.png", 0.02)):  # Pillow rounds the brightness to a byte
        (ours,), (again,) = (regard.load(tmp_path / run).predict([tmp_path / name]) for run in ("run", "again"))
        theirs = {one["label"]: one["score"] for one in pipeline(str(tmp_path / name))}
        assert theirs == pytest.approx(ours.probabilities, abs=error)
        assert again.probabilities == pytest.approx(ours.probabilities, abs=error)


def test_the_check_says_why_it_compares_no_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tokenizer("char")
    sizes = {**GPT2, "max_length": 8, "vocab_size": len(own)}
    regard.save(build(ModelConfig(**sizes)), tmp_path / "run", tokenizers={"tokenizer": own})
    assert main(["export", str(tmp_path / "run"), "--hf", str(tmp_path / "hf"), "--check"]) == 0
    assert "not compared, because each has more tokens than fit into max_length = 8" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "run"), "--hf", str(tmp_path / "hf"), "--check", "--json", "--force"]) == 0
    texts = json.loads(capsys.readouterr().out)["texts"]
    assert texts["compared"] == 0 and "max_length = 8" in texts["reason"]
