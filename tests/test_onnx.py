"""ONNX folders: every task and position, exported with one batch size and run with others; refusals; 8 bits."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("onnxruntime", reason="pip install 'regard[onnx]'")
pytest.importorskip("onnxscript", reason="pip install 'regard[onnx]'")

import onnx

import regard
from regard.cli import main
from regard.errors import UserError
from regard.interop.check import TEXTS
from regard.interop.convert import config_to_hf
from regard.interop.onnx_graph import write_graphs
from regard.interop.verify import compare_outputs, generated_inputs
from regard.models import folder as runs
from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.nn.position import KINDS
from regard.predict.bundle import Bundle
from regard.predict.onnx import ExportedDecoder, ExportedEncoder, ExportedEncoderDecoder
from regard.tasks.registry import task_of
from regard.text.tokenizer import Tokenizer
from regard.training.task import run_inputs
from variants import mostly_slow

SIZE: dict[str, Any] = {"dim": 16, "heads": 4, "layers": 1, "ff_dim": 24, "max_length": 200}
IMAGE = {"input": "patches", "image_size": 8, "patch_size": 4, "channels": 1, "pixel_mean": (0.3,), "pixel_std": (0.2,)}

# Each task with other positions, norms, heads and activations, so that a few exports cover all of them.
TASKS: dict[str, dict[str, Any]] = {
    "translation": {"position": "t5", "norm": "rms", "norm_order": "pre", "target_vocab_size": True},
    "text-to-text": {"position": "sinusoidal", "pruned": {"decoder.0.cross": (1, 2)}},
    "language-modeling": {"architecture": "decoder", "position": "rope", "kv_heads": 2, "qk_norm": True},
    "masked-language-modeling": {
        "architecture": "encoder", "position": "relative", "head_layer": True, "token_types": 2
    },
    "text-classification": {
        "architecture": "encoder", "position": "alibi", "output_head": "classes", "classes": 3, "pooling": "mean"
    },
    "token-classification": {
        "architecture": "encoder", "position": "rope", "output_head": "classes", "classes": 3, "pooling": "none"
    },
    "image-classification": {
        "architecture": "encoder", **IMAGE, "position": "learned", "output_head": "classes", "classes": 3
    },
    "image-captioning": {**IMAGE, "position": "learned", "activation": "swiglu"},
    "regression": {"position": "none", "input": "features", "feature_dim": 2, "output_head": "values"},
}  # fmt: skip
DATA: dict[str, dict[str, Any]] = {
    "text-classification": {"classes": ["bad", "fair", "good"], "max_length": 100, "train": ["none.tsv"]},
    "token-classification": {"classes": ["O", "B-X", "I-X"], "train": ["none.conll"]},
    "image-classification": {"classes": ["bag", "coat", "dress"], "train": ["none"]},
    "regression": {
        "train": ["none.csv"],
        "context": 6,
        "period": 3,
        "horizon": 4,
        "mean": [1.0, 2.0],
        "std": [2.0, 0.5],
    },
}


def randomised(config: ModelConfig) -> Any:
    torch.manual_seed(0)
    model = build(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.1 * torch.randn_like(parameter))
    return model


def save_run(task: str, folder: Path) -> None:
    """A small model with random weights, saved as a run of the task."""
    settings, tokenizers = {**SIZE, **TASKS[task]}, dict[str, Tokenizer]()
    if settings.get("input") != "features" and task != "image-classification":
        own = Tokenizer.train(TEXTS, "bpe", 330)
        own = own.with_special_tokens(["<mask>"]) if task == "masked-language-modeling" else own
        tokenizers, settings["vocab_size"] = {"tokenizer": own}, len(own)
        if settings.pop("target_vocab_size", False):
            tokenizers = {"source": own, "target": Tokenizer.train(TEXTS, "char")}
            settings |= {"target_vocab_size": len(tokenizers["target"]), "share_embeddings": False}
    recipe = {"task": task, "data": DATA.get(task, {"train": ["none"]})}
    runs.save(randomised(ModelConfig(**settings)), folder, tokenizers=tokenizers, recipe=recipe)


Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture
def exported(once: Once, capsys: pytest.CaptureFixture[str]) -> Callable[[str], tuple[Bundle, Bundle]]:
    """The run of a task and the same as ONNX."""

    def open_both(task: str, *options: str) -> tuple[Bundle, Bundle]:
        run = once(f"onnx-run-{task}", lambda folder: save_run(task, folder))

        def export(folder: Path) -> None:
            assert main(["export", str(run), "--onnx", str(folder), *options]) == 0, capsys.readouterr().err
            assert "largest difference from the run" in capsys.readouterr().out

        return regard.load(run), regard.load(once(f"onnx-{task}{''.join(options)}", export))

    return open_both


def same_values(model: Any, graph: Any) -> None:
    """Batches of 1, 3 and 7, several lengths, padding on both sides, in one step and in several."""
    config = model.config

    def rows(count: int, length: int, size: int) -> Tensor:
        if config.output_head == "values":
            return torch.randn(count, length, config.feature_dim)
        return torch.randint(size, (count, length))

    def compare(ours: Tensor, theirs: Tensor, keep: Tensor | None = None) -> None:
        ours, theirs = (ours, theirs) if keep is None else (ours[keep], theirs[keep])
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)

    for count, length in ((1, 1), (3, 9), (7, 4)):
        is_real: Tensor | None = torch.arange(length) < torch.tensor([length, 1, *[2] * count])[:count, None]
        if config.input == "patches":
            source, is_real = torch.rand(count, 1, 8, 8), None
        else:
            source = rows(count, length, config.vocab_size or 0)
        if config.architecture == "encoder":
            per_token = config.per_token or config.output_head in ("tokens", "none")
            types = (torch.randint(2, source.shape),) if config.token_types else ()
            keep = is_real if per_token else None
            compare(model(source, is_real, *types), graph(source, is_real, *types), keep)
            continue
        target = rows(count, 5, config.target_size)
        masks = [is_real]
        if config.architecture == "decoder" and is_real is not None:
            masks = [None, is_real, is_real.flip(1)]
        for mask in masks:
            if config.architecture == "decoder":
                state, other = model.start(), graph.start()
                compare(model.step(source, state, mask), graph.step(source, other, mask), mask)
            else:
                state, other = model.start(source, mask), graph.start(source, mask)
                compare(model(source, target, mask), graph(source, target, mask))
            for part in (target[:, :1], target[:, 1:4], target[:, 4:]):
                compare(model.step(part, state), graph.step(part, other))


@torch.no_grad()
@pytest.mark.parametrize(
    "task", mostly_slow(TASKS, ["language-modeling", "text-classification", "image-classification"])
)
def test_every_task(task: str, exported: Any) -> None:
    run, other = exported(task)
    same_values(run.model, other.model)
    report = json.loads((other.path / "export.json").read_text())
    assert report["compared"] >= 14 and report["identical"] >= 0.9 * report["compared"]
    assert report["difference"] <= 1e-4 * max(1, report["largest_value"]) and report["inputs"] == "generated"
    assert other.recipe["task"] == task and "folder" not in other.tables["data"]
    config = json.loads((other.path / "config.json").read_text())
    kinds = {"language-modeling": "gpt2", "image-classification": "vit", "regression": "regard"} | {
        "masked-language-modeling": "bert", "text-classification": "bert", "token-classification": "bert",
        "image-captioning": "vision-encoder-decoder",
    }  # fmt: skip
    assert config["model_type"] == kinds.get(task, "marian")
    names = DATA.get(task, {}).get("classes")
    assert config.get("id2label") == (names and {str(number): name for number, name in enumerate(names)})


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("position", KINDS)
@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder", "encoder"])
def test_every_position(position: str, architecture: str, tmp_path: Path) -> None:
    model = randomised(ModelConfig(**SIZE, vocab_size=31, architecture=architecture, position=position, window=3))
    (tmp_path / "onnx").mkdir()
    write_graphs(model, tmp_path / "onnx")
    kinds = {"decoder": ExportedDecoder, "encoder": ExportedEncoder}
    same_values(model, kinds.get(architecture, ExportedEncoderDecoder)(model.config, tmp_path))


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"experts": 3},
        {"attention_score": "additive", "attention": "reference"},
        {"value_dim": 3, "head_dim": 6, "logit_bias": True, "tie_embeddings": False},
        {"architecture": "encoder", "output_head": "pooled", "token_types": 2, "pooler": True},
        {
            "architecture": "encoder",
            **IMAGE,
            "patch_size": 2,
            "shifted_window": 2,
            "stem": "conv",
            "output_head": "none",
        },
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_every_variant(settings: dict[str, Any], tmp_path: Path) -> None:
    model = randomised(ModelConfig(**{**SIZE, "vocab_size": 31, "architecture": "decoder", **settings}))
    (tmp_path / "onnx").mkdir()
    write_graphs(model, tmp_path / "onnx")
    kind = ExportedDecoder if model.config.architecture == "decoder" else ExportedEncoder
    same_values(model, kind(model.config, tmp_path))


def test_inputs_and_outputs_are_named_as_transformers_js_reads_them(exported: Any) -> None:
    _, other = exported("language-modeling")
    graph = onnx.load(other.path / "onnx" / "model.onnx").graph
    names = {
        one.name: [axis.dim_param or axis.dim_value for axis in one.type.tensor_type.shape.dim] for one in graph.input
    }
    assert names["input_ids"] == ["batch_size", "sequence_length"]
    assert names["attention_mask"] == ["batch_size", "total_length"]
    assert names["past_key_values.0.key"] == ["batch_size", 2, "past_length", 4]
    assert [one.name for one in graph.output] == ["logits", "present.0.key", "present.0.value"]
    _, other = exported("translation")
    graph = onnx.load(other.path / "onnx" / "decoder_model_merged.onnx").graph
    cached = [f"0.{side}.{part}" for side in ("decoder", "encoder") for part in ("key", "value")]
    mask, states = "encoder_attention_mask", "encoder_hidden_states"
    assert {one.name for one in graph.input} == {"input_ids", mask, states, *(f"past_key_values.{n}" for n in cached)}
    assert {one.name for one in graph.output} == {"logits", *(f"present.{name}" for name in cached)}
    (encoder,) = onnx.load(other.path / "onnx" / "encoder_model.onnx").graph.output
    assert encoder.name == "last_hidden_state"


def test_a_graph_names_no_file_of_this_machine(exported: Any) -> None:
    _, other = exported("language-modeling")
    content = (other.path / "onnx" / "model.onnx").read_bytes()
    assert b"onnx_graph.py" not in content and str(Path(regard.__file__).parent).encode() not in content


@pytest.mark.parametrize("options", [{"beam": 3, "n_best": 3}, {"sample": True, "n_best": 2, "temperature": 0.7}])
def test_every_search_runs_on_a_graph(options: dict[str, Any], exported: Any) -> None:
    run, other = exported("translation")
    texts = [*TEXTS, "", "  "]
    ours, theirs = (one.predict(texts, max_length=8, batch=5, **options) for one in (run, other))
    for one, two in zip(ours, theirs, strict=True):
        assert [part.text for part in one.n_best] == [part.text for part in two.n_best]
        for part, same in zip(one.n_best, two.n_best, strict=True):
            assert part.log_probability == pytest.approx(same.log_probability, abs=1e-3)


def test_generation_runs_on_a_graph(exported: Any) -> None:
    run, other = exported("language-modeling")
    options: dict[str, Any] = {"max_length": 20, "n_best": 2, "seed": 3, "overflow": "slide", "context": 12}
    ours, theirs = (one.predict(["나는 학교에", "It costs"], **options) for one in (run, other))
    assert [[part.ids for part in one.samples] for one in ours] == [
        [part.ids for part in one.samples] for one in theirs
    ]


def test_the_command_reads_the_folder(exported: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = exported("text-classification")
    outputs = []
    for folder in (run.path, other.path):
        assert main(["classify", str(folder), "Guten Morgen", "정말 재미있는 영화였다"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and outputs[0]


@pytest.mark.slow
def test_weights_in_8_bits(exported: Any) -> None:
    run, other = exported("language-modeling", "--int8")
    (path,) = (other.path / "onnx").iterdir()
    assert path.name == "model_quantized.onnx"
    graph = onnx.load(path).graph
    matrices = [one for one in graph.initializer if len(one.dims) == 2]
    assert matrices and all(one.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8) for one in matrices)
    assert json.loads((other.path / "config.json").read_text())["transformers.js_config"] == {"dtype": "q8"}
    ids = torch.randint(len(run.tokenizer), (3, 20))
    with torch.no_grad():
        difference = (run.model(ids) - other.model(ids)).square().mean().sqrt() / run.model(ids).std()
    assert 0 < difference < 0.1


def test_numbers_agree_within_the_tolerance(exported: Any) -> None:
    """Outputs that are numbers are not identical in 8 bits: they are compared as the values are."""
    run, other = exported("regression", "--int8")
    inputs = generated_inputs(run, 32)
    agreement = compare_outputs(run, other, inputs, int8=True)
    assert agreement.identical == agreement.compared == 32
    assert agreement.summary == "outputs for 32 texts: 32 within 0.15 of the largest value"
    strict = compare_outputs(run, other, inputs)
    assert strict.identical < 16 and not strict.enough and strict.first is not None
    assert compare_outputs(run, run, inputs).identical == 32


def test_an_export_that_differs_leaves_nothing(
    once: Once, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = once("onnx-run-text-classification", lambda folder: save_run("text-classification", folder))

    def shifted(model: Any, folder: Path, **options: Any) -> list[Path]:
        paths = write_graphs(model, folder, **options)
        with torch.no_grad():
            model.classifier.bias[0] += 0.01
        return paths

    monkeypatch.setattr("regard.interop.onnx_folder.write_graphs", shifted)
    assert main(["export", str(run), "--onnx", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "differs from the run" in message and "1.0e-02" in message and list(tmp_path.iterdir()) == []


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    own = Tokenizer.train(TEXTS, "char")
    config = ModelConfig(architecture="recurrent", dim=8, layers=1, vocab_size=len(own))
    run, out = tmp_path / "run", str(tmp_path / "out")
    runs.save(build(config), run, tokenizers={"tokenizer": own})

    def refused(*arguments: str) -> str:
        assert main(["export", str(run), *arguments]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "'recurrent'" in refused("--onnx", out)
    assert "--hf DIR or --onnx DIR" in refused()
    assert "several formats" in refused("--onnx", out, "--hf", out)
    assert "--int8: has no effect with --hf" in refused("--hf", out, "--int8")
    assert "--check: has no effect with --onnx" in refused("--onnx", out, "--check")
    runs.save(build(ModelConfig(dim=8, heads=2, layers=1, ff_dim=8, vocab_size=len(own))), run)
    seeing = ModelConfig(dim=8, heads=2, layers=1, ff_dim=8, vocab_size=len(own), causal=False)
    with pytest.raises(UserError, match="causal = false"):
        write_graphs(build(seeing), tmp_path)
    with pytest.raises(UserError, match="causal"):
        config_to_hf(seeing)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert "regard[onnx]" in refused("--onnx", out)
    with monkeypatch.context() as patch:
        patch.setattr("regard.interop.onnx_graph.LARGEST", 100)
        assert "export with --hf" in refused("--onnx", out)


@pytest.mark.slow
def test_learned_positions_end(exported: Any) -> None:
    _, other = exported("image-captioning")
    state = other.model.start(torch.rand(1, 1, 8, 8))
    with pytest.raises(UserError, match="201 tokens"):
        other.model.step(torch.zeros(1, 201, dtype=torch.long), state)


@pytest.mark.parametrize(
    "task, content",
    {
        "translation": "{}\t{}\n",
        "language-modeling": "{}\n",
        "masked-language-modeling": "{}\n",
        "text-classification": "{}\tgood\n",
        "token-classification": "{}\tO\n\n",
    }.items(),
)
def test_inputs_come_from_the_last_test_set(task: str, content: str, tmp_path: Path) -> None:
    save_run(task, tmp_path / "run")
    train, test = (["A", "B", "C"], ["X", "Y", "Z"])
    for name, words in (("train", train), ("test", test)):
        header = "text\tlabel\n" if task == "text-classification" else ""
        rows = (content.replace("{}", f"{word}{number}") for number in range(20) for word in words)
        (tmp_path / f"{name}.{'txt' if 'language' in task else 'tsv'}").write_text(header + "".join(rows))
    bundle = regard.load(tmp_path / "run")
    file = "{}.txt" if "language" in task else "{}.tsv"
    data = {"train": [file.format("train")], "test": {"new": [file.format("test")]}, "folder": str(tmp_path)}
    bundle.recipe["data"] = {**{key: value for key, value in DATA.get(task, {}).items() if key != "train"}, **data}
    name, inputs = run_inputs(task_of({"task": task}), bundle, 32)
    assert name == "new" and 1 < len(inputs) <= 32
    assert all(text.lstrip()[0] in "XYZ0123456789" for text in inputs) and inputs[0].startswith("X0")
    bundle.recipe["data"]["folder"] = str(tmp_path / "moved")
    assert run_inputs(task_of({"task": task}), bundle, 32) == ("", [])


@pytest.mark.slow
def test_scores_are_those_of_the_run(exported: Any) -> None:
    for task, inputs in (("translation", [("ok", "1"), ("나는", "2021")]), ("language-modeling", [*TEXTS[:3]])):
        ours, theirs = (one.predictor.score(inputs) for one in exported(task))
        for one, two in zip(ours, theirs, strict=True):
            assert one.log_probability == pytest.approx(two.log_probability, abs=1e-3) and len(one.tokens) > 1


def test_what_needs_the_model_itself_is_refused(
    exported: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, other = exported("translation")
    with pytest.raises(UserError, match="alignments need attention weights"):
        other.predictor.align([("ok", "ok")])
    assert main(["translate", str(other.path), "ok", "--alignments"]) == 2
    assert "which an export does not have; use the run" in capsys.readouterr().err
    assert main(["attend", str(other.path), "ok"]) == 2
    assert main(["export", str(other.path), "--onnx", str(tmp_path / "out")]) == 2
    assert main(["export", str(other.path), "--hf", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("exported") == 3 and not (tmp_path / "out").exists()


def test_a_server_completes_and_classifies_with_graphs(exported: Any) -> None:
    pytest.importorskip("fastapi", reason="pip install 'regard[serve]'")
    from serving import serving

    models = {task: exported(task) for task in ("language-modeling", "text-classification")}
    with serving({task: other.path for task, (_, other) in models.items()}) as server:
        body = {"model": "language-modeling", "prompt": "It costs", "max_tokens": 5, "temperature": 0}
        status, content = server.post("/v1/completions", body)
        run = models["language-modeling"][0].predict(["It costs"], sample=True, top_k=1, max_length=5)
        assert status == 200 and content["choices"][0]["text"] == run[0].text
        status, content = server.post("/v1/classify", {"model": "text-classification", "input": ["ok"]})
        (own,) = models["text-classification"][0].predict(["ok"])
        assert status == 200 and [one["label"] for one in content["outputs"]] == [own.label]
        status, content = server.post("/v1/embeddings", {"model": "text-classification", "input": "ok"})
        assert 400 <= status < 500


def test_a_fork_keeps_the_session_of_its_parent(exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its destructor waits for threads that a fork does not have."""
    graph = exported("language-modeling")[1].model.graph
    inherited, parent = graph.session, os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    own = graph.session
    assert own is not inherited and own is graph.session
    monkeypatch.undo()
    assert graph.session is inherited
