"""JoeyNMT in a separate environment: one JSON request per line in, one response per line out.

Started by `joey.py`; nothing of Regard is imported here. It runs JoeyNMT's own code: `build_model`, `Batch`, the step
of `TrainManager`, `search`. JoeyNMT puts <unk> at 0 and <pad> at 1, Regard the other way round: ids are
swapped.

    {"do": "learn", "shape": …, "batches": [[sources, targets], …]}    -> {"parameters": n, "versions": …}
    {"do": "step"}                                                     -> {"tokens": n, "seconds": s}   (all batches)
    {"do": "load", "shape": …, "weights": FILE}                        -> {"parameters": n, "versions": …}
    {"do": "search", "sources": [ids, …], "batch", "beam", "least", "most"}  -> {"ids": …, "seconds": s}
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from joeynmt.batch import Batch
from joeynmt.config import parse_train_args
from joeynmt.model import build_model
from joeynmt.search import search
from joeynmt.training import TrainManager
from joeynmt.transformer_layers import MultiHeadedAttention, PositionwiseFeedForward
from joeynmt.vocabulary import Vocabulary

UNK, PAD, BOS, EOS = range(4)
SYMBOLS = SimpleNamespace(
    unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>", sep_token=None, lang_tags=[],
    unk_id=UNK, pad_id=PAD, bos_id=BOS, eos_id=EOS, sep_id=None,
)  # fmt: skip
CPU = torch.device("cpu")
AUTOCAST = {"device_type": "cpu", "enabled": False}


def make_model(shape: dict[str, Any]) -> Any:
    """The Transformer of 2017 in the given shape; dropout where the other tools have it."""
    stack = {
        "type": "transformer", "num_heads": shape["heads"], "hidden_size": shape["dim"], "ff_size": shape["ff_dim"],
        "dropout": shape["dropout"], "layer_norm": "post", "activation": "relu",
        "embeddings": {"embedding_dim": shape["dim"], "scale": True, "dropout": shape["embed_dropout"]},
    }  # fmt: skip
    settings = {
        "encoder": {**stack, "num_layers": shape["layers"]},
        "decoder": {**stack, "num_layers": shape["decoder_layers"]},
        "tied_embeddings": True, "tied_softmax": True,
    }  # fmt: skip
    vocabulary = Vocabulary([str(number) for number in range(4, shape["vocab_size"])], SYMBOLS)
    model = build_model(settings, vocabulary, vocabulary)
    for part in model.modules():
        if isinstance(part, MultiHeadedAttention):
            part.dropout.p = 0.0
        elif isinstance(part, PositionwiseFeedForward):
            part.pwff_layer[2].p = 0.0
        elif isinstance(part, torch.nn.LayerNorm):
            part.eps = shape["norm_eps"]
    return model


def swapped(ids: list[int]) -> list[int]:
    return [1 - number if number < 2 else number for number in ids]


def rectangle(sequences: list[list[int]]) -> torch.Tensor:
    longest = max(map(len, sequences))
    return torch.tensor([[*swapped(line), *[PAD] * (longest - len(line))] for line in sequences])


def make_batch(source: torch.Tensor, target: torch.Tensor | None) -> Batch:
    lengths = (source != PAD).sum(dim=1)
    return Batch(
        src=source, src_length=lengths, src_prompt_mask=None, trg=target, trg_prompt_mask=None,
        indices=torch.arange(len(source)), device=CPU, pad_index=PAD, eos_index=EOS, is_train=target is not None,
    )  # fmt: skip


class Learning:
    """JoeyNMT's training loop without its validation and logging."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.model = make_model(request["shape"])
        self.model.loss_function = ("crossentropy", request["label_smoothing"])
        arguments = parse_train_args({
            "batch_size": 1, "normalization": "tokens", "optimizer": "adam", "adam_betas": request["betas"],
            "learning_rate": request["rate"], "label_smoothing": request["label_smoothing"],
            "clip_grad_norm": request["clip"], "scheduling": "warmupinversesquareroot",
        })  # fmt: skip
        self.folder = tempfile.TemporaryDirectory()  # for its TensorBoard file
        self.manager = TrainManager(
            rank=0, model=self.model, model_dir=Path(self.folder.name), device=CPU, autocast=AUTOCAST,
            train_args=arguments,
        )  # fmt: skip
        self.batches = [(rectangle(sources), rectangle(targets)) for sources, targets in request["batches"]]

    def step(self, sources: torch.Tensor, targets: torch.Tensor) -> int:
        batch, manager = make_batch(sources, targets), self.manager
        manager._train_step(batch)
        manager.clip_grad_fun(parameters=self.model.parameters())
        manager.optimizer.step()
        manager.scheduler.step(manager.stats.steps)
        self.model.zero_grad()
        manager.stats.steps += 1
        return batch.ntokens

    def run(self, count: int | None) -> dict[str, Any]:
        begin = time.perf_counter()
        tokens = sum(self.step(*batch) for batch in self.batches[:count])
        return {"tokens": tokens, "seconds": time.perf_counter() - begin}


def translate(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Greedy or beam search over batches of similar length; ids without </s>, in the order of the sources."""
    begin = time.perf_counter()
    sources, size = request["sources"], request["batch"]
    order = sorted(range(len(sources)), key=lambda row: len(sources[row]))
    translations: list[list[int]] = [[] for _ in sources]
    for at in range(0, len(order), size):
        rows = order[at : at + size]
        batch = make_batch(rectangle([sources[row] for row in rows]), None)
        found, _, _ = search(
            model, batch, request["most"], request["beam"], beam_alpha=-1, min_output_length=request["least"],
            autocast=AUTOCAST,
        )  # fmt: skip
        for row, ids in zip(rows, found.tolist(), strict=True):
            translations[row] = swapped([int(number) for number in ids[: ids.index(EOS) if EOS in ids else None]])
    return {"ids": translations, "seconds": time.perf_counter() - begin}


def load(request: dict[str, Any]) -> Any:
    """The model with our weights, with the first two rows of the embedding matrix swapped."""
    model = make_model(request["shape"])
    tensors = torch.load(request["weights"], weights_only=True)
    missing, unknown = model.load_state_dict(tensors, strict=False)
    if unknown or any(not name.endswith(".pe") for name in missing):
        raise ValueError(f"weights do not fit: {missing} are missing, {unknown} are unknown")
    return model.eval()


def main() -> None:
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with the responses
    torch.set_num_threads(int(sys.argv[1]))
    state: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        match request["do"]:
            case "learn":
                state = Learning(request)
            case "load":
                state = load(request)
            case "step":
                response = state.run(request["count"])
            case "search":
                response = translate(state, request)
        if request["do"] in ("learn", "load"):
            model = state.model if isinstance(state, Learning) else state
            response = {
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "versions": {name: version(name) for name in ("joeynmt", "torch")},
            }
        print(json.dumps(response), file=responses, flush=True)


if __name__ == "__main__":
    main()
