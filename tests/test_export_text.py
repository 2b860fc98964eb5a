"""Exported folders from text to text: AutoTokenizer and the model of transformers give the predictions of Regard."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'regard[hf]'")

import transformers

import regard
from regard.cli import main
from regard.interop import compare, export_folder, read_folder
from regard.interop.check import TEXTS, Agreement
from regard.interop.peer import Peer
from regard.interop.verify import compare_outputs
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


def compare_texts(bundle: Bundle, folder: Path) -> Agreement:
    return compare_outputs(bundle, Peer(bundle, folder), TEXTS)


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
    assert agreement.identical == agreement.compared == len(TEXTS), agreement
    assert len({one.text for one in bundle.predict(TEXTS, max_length=24)}) > 3


def test_the_check_notices_a_tokenizer_without_its_special_tokens(tmp_path: Path) -> None:
    bundle = translator(("bpe",))
    path = exported(bundle, tmp_path) / "tokenizer.json"
    content = json.loads(path.read_text())
    assert content["post_processor"]["single"][-1]["SpecialToken"]["id"] == "</s>"
    path.write_text(json.dumps({**content, "post_processor": None}))
    agreement = compare_texts(bundle, tmp_path)
    assert agreement.identical < 0.9 * agreement.compared and agreement.first is not None


def classifier(**settings: Any) -> Bundle:
    own = tokenizer("bpe")
    config = ModelConfig(**BERT, vocab_size=len(own), output_head="classes", classes=3, **settings)
    return Bundle(loud(build(config)), {"tokenizer": own}, {"data": {"classes": list(NAMES)}}, predictor=TextClassifier)


def test_a_classifier_gives_the_same_classes_and_probabilities(tmp_path: Path) -> None:
    bundle = classifier(pooling="cls", pooler=True)
    agreement = compare_texts(bundle, exported(bundle, tmp_path))
    assert agreement.identical == agreement.compared
    pipeline = transformers.pipeline("text-classification", str(tmp_path), top_k=None)
    for text, ours in zip(TEXTS, bundle.predict(TEXTS), strict=True):
        (theirs,) = pipeline([text])
        assert {one["label"]: pytest.approx(one["score"], abs=1e-5) for one in theirs} == ours.probabilities
    assert read_folder(tmp_path).metadata["id2label"] == {"0": "negative", "1": "neutral", "2": "positive"}


def test_a_pipeline_truncates_texts_where_regard_does(tmp_path: Path) -> None:
    bundle = classifier(pooling="cls", pooler=True)
    recipe = {"task": "text-classification", "data": {"classes": list(NAMES), "max_length": 12}}
    regard.save(bundle.model, tmp_path / "run", tokenizers=bundle.tokenizers, recipe=recipe)
    assert export(tmp_path / "run", tmp_path / "hf") == 0
    pipeline = transformers.pipeline("text-classification", str(tmp_path / "hf"), top_k=None, truncation=True)
    for text in (TEXTS[0], " ".join(TEXTS), " ".join(TEXTS * 40)):  # the last one exceeds the positions
        (ours,), (theirs,) = regard.load(tmp_path / "run").predict([text]), pipeline([text])
        assert {one["label"]: pytest.approx(one["score"], abs=1e-5) for one in theirs} == ours.probabilities


def test_a_translator_with_two_tokenizers_is_decoded_by_that_of_the_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, out = translator(("bpe", "word")), tmp_path / "hf"
    regard.save(bundle.model, tmp_path / "run", tokenizers=bundle.tokenizers)
    assert export(tmp_path / "run", out) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"decode outputs with the target's tokenizer:  AutoTokenizer.from_pretrained('{out}/target')"
    source, target = map(transformers.AutoTokenizer.from_pretrained, (out, out / "target"))
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(out)
    ids = model.generate(**source(TEXTS[0], return_tensors="pt"), max_new_tokens=12)
    assert target.decode(ids[0], skip_special_tokens=True) == bundle.predict([TEXTS[0]], max_length=12)[0].text


def test_a_masked_model_fills_the_same_tokens(tmp_path: Path) -> None:
    own = tokenizer("bpe").with_special_tokens(["<mask>"])
    config = ModelConfig(**BERT, vocab_size=len(own), output_head="tokens", head_layer=True, logit_bias=True)
    bundle = Bundle(loud(build(config)), {"tokenizer": own}, predictor=MaskPredictor)
    agreement = compare_texts(bundle, exported(bundle, tmp_path))
    assert agreement.identical == agreement.compared
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
    assert agreement.identical == agreement.compared == len(TEXTS)
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


def language_model(folder: Path, **changes: Any) -> Path:
    """A saved GPT-2 with random weights."""
    own = tokenizer("char")
    model = loud(build(ModelConfig(**{**GPT2, "vocab_size": len(own), **changes})))
    regard.save(model, folder, tokenizers={"tokenizer": own})
    return folder


def export(run: Path, out: Path, *options: str) -> int:
    return main(["export", str(run), "--hf", str(out), *options])


@pytest.mark.parametrize("length", [8, 64])
def test_an_export_verifies_itself(tmp_path: Path, length: int, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = language_model(tmp_path / "run", max_length=length), tmp_path / "hf"
    assert export(run, out, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["format"], printed["family"], printed["inputs"]) == ("hf", "GPT-2", "generated")
    assert json.loads((out / "export.json").read_text()).items() <= printed.items()
    assert (
        printed["values"] > 1000 and printed["difference"] < 1e-4 and printed["identical"] == printed["compared"] > 20
    )
    assert export(run, out, "--force") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("largest difference from the run: ") and "generated inputs: " in lines[2]


@pytest.mark.parametrize("part", ["weights", "tokenizer"])
def test_an_export_that_differs_leaves_nothing(
    tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from regard.interop import convert, folder

    run = language_model(tmp_path / "run")
    if part == "weights":
        right = convert.weights_to_hf
        wrong = lambda *arguments: {name: value * 1.001 for name, value in right(*arguments).items()}  # noqa: E731
        monkeypatch.setattr(convert, "weights_to_hf", wrong)
    else:
        other = Tokenizer.train(TEXTS[4:8], "char")
        right_tokenizer = folder.write_tokenizers
        wrong = lambda path, config, tokenizers, length: right_tokenizer(path, config, {"tokenizer": other}, length)  # noqa: E731
        monkeypatch.setattr(folder, "write_tokenizers", wrong)
    assert export(run, tmp_path / "hf") == 2
    assert "the exported model differs from the run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_runs_own_data_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = classifier(pooling="cls", pooler=True)
    rows = [f"{text}\t{NAMES[number % 3]}" for number, text in enumerate(TEXTS)]
    (tmp_path / "test.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n", encoding="utf-8")
    data = {"folder": str(tmp_path), "train": ["test.tsv"], "test": {"mine": ["test.tsv"]}, "classes": list(NAMES)}
    recipe = {"task": "text-classification", "data": {**data, "max_length": 16}}
    regard.save(bundle.model, tmp_path / "run", tokenizers=bundle.tokenizers, recipe=recipe)
    assert export(tmp_path / "run", tmp_path / "hf", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["inputs"] == "mine" and result["identical"] == result["compared"] == len(TEXTS)


@pytest.mark.parametrize("mode", [1, 3, 4])
def test_images_are_compared_through_the_image_processor(
    tmp_path: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL", reason="pip install 'regard[images]'")
    config = ModelConfig(
        **{**SIZE, "max_length": 17}, architecture="encoder", input="patches", position="learned", norm_order="pre",
        activation="gelu", image_size=16, patch_size=4, channels=mode, output_head="classes", classes=3, pooling="cls",
        pixel_mean=(0.4,), pixel_std=(0.3,),
    )  # fmt: skip
    regard.save(loud(build(config)), tmp_path / "run", recipe={"task": "image-classification"})
    assert export(tmp_path / "run", tmp_path / "hf", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["identical"] == result["compared"] == 32 and result["values"] == 96


def test_an_export_without_texts_compares_random_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    regard.save(loud(build(ModelConfig(**GPT2, vocab_size=31))), tmp_path / "run")
    assert export(tmp_path / "run", tmp_path / "hf") == 0
    assert "outputs: not compared, because the model has no tokenizer" in capsys.readouterr().out
    saved = json.loads((tmp_path / "hf" / "export.json").read_text())
    assert saved["inputs"] == "random" and saved["compared"] == 0 and saved["values"] > 0 and saved["reason"]


def test_an_encoder_without_output_layer_is_compared_by_its_vectors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tokenizer("bpe")
    config = ModelConfig(**BERT, vocab_size=len(own), output_head="none")
    regard.save(loud(build(config)), tmp_path / "run", tokenizers={"tokenizer": own})
    assert export(tmp_path / "run", tmp_path / "hf", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["difference"] < 1e-4 and result["values"] > 1000
    assert result["compared"] == 0 and result["reason"] == "the outputs are vectors"


def test_an_export_that_is_not_compared_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = language_model(tmp_path / "run"), tmp_path / "hf"
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert export(run, out, "--check") == 2 and not out.exists()
    assert "pip install 'regard[hf]'" in capsys.readouterr().err
    assert export(run, out) == 0
    assert "not compared with the run: " in (printed := capsys.readouterr().out) and "'regard[hf]'" in printed
    saved = json.loads((out / "export.json").read_text())
    assert saved["compared"] == saved["values"] == 0 and "transformers" in saved["reason"]
