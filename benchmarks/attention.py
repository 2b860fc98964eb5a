"""One block of Regard and the same block of other libraries: nn.Transformer*Layer, Hugging Face, x-transformers.

    python benchmarks/attention.py --out benchmarks/results/attention-cpu.json
    python benchmarks/attention.py --device cuda --dtype bfloat16 --out benchmarks/results/attention-h200.json

Three kinds of block, at several sizes:

    encoder   bidirectional self-attention, feed-forward; post-norm, ReLU       HF: BertLayer
    decoder   causal self-attention, cross-attention, feed-forward        HF: MarianDecoderLayer
    gpt       causal self-attention, feed-forward; pre-norm, tanh-GELU    HF: GPT2Block

each forward (no gradients, eval mode) and forward + backward (training mode, no dropout), eager and through
torch.compile. All have the same number of heads, width, feed-forward width and activation; x-transformers is always
pre-norm and has no biases in its attention. Needs  pip install 'regard[bench]'.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import torch
import transformers
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.marian.modeling_marian import MarianDecoderLayer

from regard.nn.block import Block
from regard.nn.config import StackConfig
from regard.nn.mask import AttentionMask, Positions, causal, everything
from regard.nn.multihead import Context


@dataclass(frozen=True)
class Size:
    name: str
    dim: int
    heads: int
    ff_dim: int
    batch: int
    length: int


CPU = [
    Size("tiny", 128, 4, 256, 64, 32),
    Size("small", 256, 4, 1024, 32, 32),
    Size("base", 512, 8, 2048, 8, 64),
    Size("gpt2", 768, 12, 3072, 1, 256),
]
CUDA = [
    Size("tiny", 128, 4, 256, 256, 32),
    Size("base", 512, 8, 2048, 64, 128),
    Size("gpt2", 768, 12, 3072, 16, 1024),
    Size("long", 1024, 16, 4096, 2, 8192),
]
KINDS = ("encoder", "decoder", "gpt")


def ours(kind: str, size: Size, device: str) -> nn.Module:
    gpt = kind == "gpt"
    config = StackConfig(
        dim=size.dim, heads=size.heads, ff_dim=size.ff_dim, dropout=0.0, position="none",
        norm_order="pre" if gpt else "post", activation="gelu-tanh" if gpt else "relu",
    )  # fmt: skip
    block = Block(config, memory=kind == "decoder")

    class Ours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block
            positions = Positions.of(size.length, torch.device(device))  # computed once for all blocks of a stack
            self.within = AttentionMask(everything if kind == "encoder" else causal, positions, positions)
            self.across = AttentionMask(everything, positions, positions)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.block(x, Context(self.within, memory=memory, memory_mask=self.across))

    return Ours()


def torch_layer(kind: str, size: Size, device: str) -> nn.Module:
    gpt = kind == "gpt"
    options = {"dropout": 0.0, "batch_first": True, "norm_first": gpt, "activation": _tanh_gelu if gpt else "relu"}
    make = nn.TransformerDecoderLayer if kind == "decoder" else nn.TransformerEncoderLayer
    layer = make(size.dim, size.heads, size.ff_dim, **options)

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer
            mask = nn.Transformer.generate_square_subsequent_mask(size.length)
            self.register_buffer("mask", mask, persistent=False)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            if kind == "encoder":
                return self.layer(x)
            if kind == "gpt":
                return self.layer(x, src_mask=self.mask, is_causal=True)
            return self.layer(x, memory, tgt_mask=self.mask, tgt_is_causal=True)

    return Torch()


def _tanh_gelu(x: Tensor) -> Tensor:
    return nn.functional.gelu(x, approximate="tanh")


def hugging_face(kind: str, size: Size, device: str) -> nn.Module:
    quiet = {"attn_implementation": "sdpa"}
    if kind == "encoder":
        config: Any = transformers.BertConfig(
            hidden_size=size.dim, num_attention_heads=size.heads, intermediate_size=size.ff_dim, hidden_act="relu",
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **quiet,
        )  # fmt: skip
        layer: nn.Module = BertLayer(config)
    elif kind == "gpt":
        config = transformers.GPT2Config(
            n_embd=size.dim, n_head=size.heads, n_inner=size.ff_dim, n_positions=size.length, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, **quiet,
        )  # fmt: skip
        layer = GPT2Block(config, layer_idx=0)
    else:
        config = transformers.MarianConfig(
            d_model=size.dim, decoder_attention_heads=size.heads, decoder_ffn_dim=size.ff_dim, dropout=0.0,
            attention_dropout=0.0, activation_function="relu", **quiet,
        )  # fmt: skip
        layer = MarianDecoderLayer(config, layer_idx=0)

    class HuggingFace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            out = self.layer(x, encoder_hidden_states=memory) if kind == "decoder" else self.layer(x)
            return out[0] if isinstance(out, tuple) else out

    return HuggingFace()


def x_transformers(kind: str, size: Size, device: str) -> nn.Module:
    from x_transformers import Decoder, Encoder

    make = Encoder if kind == "encoder" else Decoder
    layers = make(
        dim=size.dim, depth=1, heads=size.heads, attn_dim_head=size.dim // size.heads, attn_flash=True,
        ff_mult=size.ff_dim / size.dim, cross_attend=kind == "decoder", pre_norm_has_final_norm=False, verbose=False,
        ff_custom_activation=nn.GELU(approximate="tanh") if kind == "gpt" else nn.ReLU(),
    )  # fmt: skip

    class XTransformers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.layers(x, context=memory) if kind == "decoder" else self.layers(x)

    return XTransformers()


PEERS = {"regard": ours, "torch.nn": torch_layer, "huggingface": hugging_face, "x-transformers": x_transformers}


def passes(peer: nn.Module, size: Size, device: str, dtype: torch.dtype) -> Iterator[tuple[str, measure.Call]]:
    """The forward pass and the forward + backward pass of one peer, as calls."""
    x = torch.randn(size.batch, size.length, size.dim, device=device, dtype=dtype)
    memory = torch.randn_like(x)
    grad = torch.randn_like(x)

    def forward() -> Tensor:
        with torch.no_grad():
            return peer(x, memory)

    def both() -> None:
        peer.zero_grad(set_to_none=True)
        peer(x, memory).backward(grad)

    yield "forward", forward
    yield "forward+backward", both


def row(kind: str, size: Size, compiled: bool, args: argparse.Namespace) -> list[dict[str, Any]]:
    dtype = getattr(torch, args.dtype)
    calls: dict[str, dict[str, measure.Call]] = {}
    for name, make in PEERS.items():
        torch.manual_seed(0)
        peer = make(kind, size, args.device).to(args.device, dtype)
        if compiled:
            peer = torch.compile(peer)
        for what, call in passes(peer, size, args.device, dtype):
            calls.setdefault(what, {})[name] = _in_mode(peer, what, call)
    rows = []
    for what, race in calls.items():
        times = measure.race(race, args.device, args.rounds, args.least)
        best = min(figure["ms"] for name, figure in times.items() if name != "regard")
        rows.append(
            {
                "block": kind, "size": size.name, "mode": "compiled" if compiled else "eager", "pass": what,
                "batch": size.batch, "length": size.length, "times": times,
                "fastest_peer_over_ours": round(best / times["regard"]["ms"], 3),
            }
        )  # fmt: skip
        print(_line(rows[-1]), flush=True)
    torch.compiler.reset()
    return rows


def _in_mode(peer: nn.Module, what: str, call: measure.Call) -> measure.Call:
    def run() -> Any:
        peer.train(what != "forward")
        return call()

    return run


def _line(row: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {figure['ms']:8.3f}" for name, figure in row["times"].items())
    label = f"{row['block']:8} {row['size']:6} {row['mode']:9} {row['pass']:17}"
    return f"{label} {times}  | {row['fastest_peer_over_ours']:.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=7, help="samples per peer, of which the median is reported")
    parser.add_argument("--least", type=float, default=0.2, help="seconds per sample")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--sizes", nargs="+", help="only these sizes")
    parser.add_argument("--modes", nargs="+", default=("eager", "compiled"), choices=("eager", "compiled"))
    parser.add_argument("--out", type=Path, help="write the result file here")
    args = parser.parse_args()
    sizes = [size for size in (CUDA if args.device == "cuda" else CPU) if not args.sizes or size.name in args.sizes]
    rows: list[dict[str, Any]] = []
    for mode, size, kind in itertools.product(args.modes, sizes, args.kinds):
        rows += row(kind, size, mode == "compiled", args)
        if args.out:  # after every row, so that an interrupted run keeps its results
            measure.write(args.out, {"machine": measure.machine(args.device), "dtype": args.dtype, "rows": rows})


if __name__ == "__main__":
    main()
