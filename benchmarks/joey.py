"""JoeyNMT (Kreutzer et al. 2019) as a peer. It needs other package versions, so it runs in a separate process.

    python3 -m venv joey
    joey/bin/pip install torch==2.13.0 joeynmt==2.3.0 importlib_metadata

makes an environment for it, and  --joey joey/bin/python  tells the benchmarks where it is. JoeyNMT does not declare its
dependency importlib_metadata; on Linux, take torch from PyTorch's index of CPU-only builds. `joey_worker.py` runs
there.

Its Transformer is the paper's, so it can use our weights: post-norm, sinusoidal positions in interleaved pairs, shared
embeddings. It has no cache: each decoding step recomputes the complete prefix.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from learners import BETAS, CLIP, RATE, SMOOTHING, Sample, Task, padded_ids
from torch import Tensor

from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.folder import weights_of

WORKER = Path(__file__).with_name("joey_worker.py")


class Worker:
    """Requests to the other process, one at a time."""

    def __init__(self, python: Path) -> None:
        command = [str(python), str(WORKER), str(torch.get_num_threads())]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - an unread pipe would fill up and block it
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
            )
        except OSError as error:
            raise UserError(f"--joey {python}: cannot be started ({error.strerror}); see benchmarks/joey.py") from None

    def ask(self, do: str, **details: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            print(json.dumps({"do": do, **details}), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.process.wait()
            self.errors.seek(0)
            lines = self.errors.read().strip().splitlines()
            raise RuntimeError(f"JoeyNMT's process has ended: {lines[-1] if lines else 'without a message'}")
        response: dict[str, Any] = json.loads(line)
        return response

    def close(self) -> None:
        self.process.communicate()  # it exits at the end of its input


def shape(config: ModelConfig) -> dict[str, Any]:
    """The config for JoeyNMT; an error if it cannot represent ours."""
    wanted = {
        "architecture": "encoder-decoder", "position": "sinusoidal", "pairs": "interleaved", "norm": "layer",
        "norm_order": "post", "activation": "relu", "bias": True, "share_embeddings": True, "tie_embeddings": True,
        "embed_scale": True,
        "embed_norm": False, "experts": 0, "attention_score": "dot", "logit_bias": False, "window": None,
    }  # fmt: skip
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise UserError(f"{name} = {getattr(config, name)!r}: JoeyNMT has {value!r}; remove it from --peers")
    names = ("dim", "heads", "ff_dim", "layers", "dropout", "embed_dropout", "norm_eps")
    layers = config.layers if config.decoder_layers is None else config.decoder_layers
    return {
        **{name: getattr(config, name) for name in names},
        "decoder_layers": layers,
        "vocab_size": config.target_size,
    }


class Joey:
    """A `learners.Learner`: JoeyNMT's own step, with its own Adam, on the padded batches that all tools get."""

    def __init__(self, task: Task, python: Path) -> None:
        self.worker = Worker(python)
        batches = padded_ids(task)
        response = self.worker.ask(
            "learn", shape=shape(task.config), batches=batches, label_smoothing=SMOOTHING, betas=BETAS, clip=CLIP,
            rate=RATE,
        )  # fmt: skip
        self.parameters, self.versions = int(response["parameters"]), response["versions"]
        positions = sum(len(targets) * (max(map(len, targets)) - 1) for _, targets in batches)
        self.filled = sum(len(target) - 1 for _, targets in batches for target in targets) / positions

    def warm_up(self) -> None:
        self.worker.ask("step", count=1)

    def run(self) -> Sample:
        return Sample(**self.worker.ask("step", count=None))


class JoeySearch:
    """JoeyNMT's search over our weights."""

    def __init__(self, model: Any, folder: Path, python: Path) -> None:
        self.worker = Worker(python)
        path = folder / "joey.pt"
        torch.save(joey_weights(model), path)
        self.versions = self.worker.ask("load", shape=shape(model.config), weights=str(path))["versions"]

    def search(self, sources: Sequence[list[int]], **options: int) -> tuple[list[list[int]], float]:
        response = self.worker.ask("search", sources=sources, **options)
        return response["ids"], float(response["seconds"])


def joey_weights(model: Any) -> dict[str, Tensor]:
    """Our tensors under JoeyNMT's names; rows 0 and 1 of the embedding matrix, <pad> and <unk>, are swapped."""
    ours = {name: tensor.detach().float().cpu() for name, tensor in weights_of(model).items()}
    embedding = ours["source_embedding.tokens.weight"]
    embedding = torch.cat((embedding[1:2], embedding[:1], embedding[2:]))
    shared = ("src_embed.lut.weight", "trg_embed.lut.weight", "decoder.output_layer.weight")
    theirs = dict.fromkeys(shared, embedding)
    for stack, own, parts in (
        ("encoder", "src_src_att", {"layer_norm": "attention_norm"}),
        ("decoder", "trg_trg_att", {"x_layer_norm": "attention_norm", "dec_layer_norm": "cross_norm"}),
    ):
        for layer in range(len(getattr(model, stack).blocks)):
            here, there = f"{stack}.blocks.{layer}", f"{stack}.layers.{layer}"
            for end in ("weight", "bias"):
                qkv = ours[f"{here}.attention.qkv.{end}"].chunk(3)
                theirs |= {f"{there}.{own}.{name}_layer.{end}": part for name, part in zip("qkv", qkv, strict=True)}
                theirs[f"{there}.{own}.output_layer.{end}"] = ours[f"{here}.attention.out.{end}"]
                if stack == "decoder":
                    cross = (ours[f"{here}.cross.q.{end}"], *ours[f"{here}.cross.kv.{end}"].chunk(2))
                    names = (f"{there}.src_trg_att.{name}_layer.{end}" for name in "qkv")
                    theirs |= dict(zip(names, cross, strict=True))
                    theirs[f"{there}.src_trg_att.output_layer.{end}"] = ours[f"{here}.cross.out.{end}"]
                norms = {**parts, "feed_forward.layer_norm": "feedforward_norm"}
                theirs |= {f"{there}.{name}.{end}": ours[f"{here}.{norm}.{end}"] for name, norm in norms.items()}
                theirs[f"{there}.feed_forward.pwff_layer.0.{end}"] = ours[f"{here}.feedforward.up.{end}"]
                theirs[f"{there}.feed_forward.pwff_layer.3.{end}"] = ours[f"{here}.feedforward.down.{end}"]
    return theirs
