"""Training speed of language models side by side: tokens/s, Regard, Hugging Face's GPT-2 and x-transformers.

    python benchmarks/language.py --profile -o benchmarks/results/language-cpu.json
    python benchmarks/language.py --device cuda -o benchmarks/results/language-h200.json

    gpt2          GPT-2 with 124M parameters, 32 rows of 1,024 tokens, bf16 autocast: the size on a GPU
    shakespeare   nanoGPT's for tiny Shakespeare, 10.7M, 12 rows of 256 characters, fp32: the size on a CPU

All have the same layers, widths, learned positions, tied embeddings, biases and vocabulary (of gpt2 50,304 rows, 50,257
and some unused: a multiple of 128, which is faster for all), no dropout, and read random ids. GELU is GPT-2's
approximation in gpt2 and the exact one in shakespeare, as in nanoGPT; x-transformers has the exact one in both. A step
is: forward pass, cross-entropy, backward pass, gradient clipping at norm 1, fused AdamW. Ours is the step of
`regard.training.trainer.Trainer` as a recipe would set it up, batches cut from the text included; the others get theirs
ready on the device.

    regard, regard-compiled (train.compile), regard-graph (train.cuda_graph), regard-graph-compiled
    huggingface, huggingface-compiled      GPT2LMHeadModel with sdpa attention and its own loss; torch.compile of it
    x-transformers, x-transformers-compiled   Decoder in a TransformerWrapper; no biases in its attention

The tools take turns; the result is the median of the rounds, with minimum and maximum. On a GPU also peak memory
and MFU: 6 N + 12 · layers · dim · context FLOPs per token, N without position embeddings (nanoGPT's formula, after
PaLM's: all query-key pairs count, although half of them are masked), relative to 989 TFLOP/s, the dense bf16 peak in
NVIDIA's data sheet for H100 and H200, and relative to a matmul of two 8192 x 8192 matrices in the same run.
Needs  pip install 'regard[bench]'.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import measure
import numpy as np
import parts
import torch
import torch.nn.functional as F
from learners import Sample, clock
from torch import Tensor, nn
from training import LeftOut, ceiling, prepare

from regard.data.streams import Blocks
from regard.errors import UserError
from regard.interop.convert import config_to_hf
from regard.models.config import ModelConfig
from regard.models.recipe import preset
from regard.models.transformer import build
from regard.tasks.language_modeling import next_token
from regard.training.config import TrainConfig
from regard.training.trainer import Trainer

SHEET = 989e12  # FLOP/s, dense bf16
RATE, BETAS, EPS, DECAY, CLIP, SEED = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0, 1
PLAIN: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "embed_dropout": 0.0}
OURS: dict[str, dict[str, bool]] = {
    "regard": {},
    "regard-compiled": {"compile": True},
    "regard-graph": {"cuda_graph": True},
    "regard-graph-compiled": {"cuda_graph": True, "compile": True},
}
OTHERS = ("huggingface", "huggingface-compiled", "x-transformers", "x-transformers-compiled")
TOOLS = {
    "cpu": ("regard", "huggingface", "x-transformers"),
    "cuda": ("regard-compiled", "regard-graph-compiled", "huggingface-compiled"),
}
MODULES = {"huggingface": "transformers", "x-transformers": "x_transformers"}


@dataclass(frozen=True)
class Size:
    name: str
    config: ModelConfig
    rows: int
    steps: int  # of a sample

    @property
    def tokens(self) -> int:
        return self.rows * self.config.max_length


SIZES = {
    "gpt2": Size("gpt2", preset("gpt2", vocab_size=50304, **PLAIN), 32, 10),
    "shakespeare": Size(
        "shakespeare",
        preset(
            "gpt2", vocab_size=65, dim=384, layers=6, heads=6, ff_dim=1536, max_length=256, activation="gelu", **PLAIN
        ),
        12, 4,
    ),
}  # fmt: skip
SMOKE = Size("smoke", preset("gpt2", vocab_size=65, dim=16, layers=1, heads=2, ff_dim=32, max_length=16, **PLAIN), 2, 2)


class Tool(Protocol):
    parameters: int

    def step(self) -> None: ...


class Ours:
    """Our trainer's own step; `settings` are fields of [train] in a recipe."""

    def __init__(self, size: Size, settings: dict[str, bool], device: str, folder: Path) -> None:
        torch.manual_seed(SEED)
        length, place = size.config.max_length, torch.device(device)
        config = TrainConfig(
            batch_tokens=size.tokens, pack=length, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, clip=CLIP,
            label_smoothing=0.0, schedule="constant", warmup=0, precision=precision(device), **settings,
        )  # fmt: skip
        ids = np.random.default_rng(SEED).integers(size.config.vocab_size, size=64 * size.tokens + 1, dtype=np.uint16)
        model = build(size.config).to(place).train()
        stream = Blocks(torch.from_numpy(ids), size.rows, length, SEED, place)
        self.trainer = Trainer(model, stream, functools.partial(next_token, loss_chunk=0), config, folder)
        self.batches, self.parameters = iter(stream), count(model)

    def step(self) -> None:
        self.trainer.update([next(self.batches).to(self.trainer.device)])


class Other:
    """Another library's model in a plain training loop."""

    def __init__(self, name: str, size: Size, device: str) -> None:
        torch.manual_seed(SEED)
        kind, compiled = name.removesuffix("-compiled"), name.endswith("-compiled")
        made = (HuggingFace if kind == "huggingface" else XTransformers)(size.config)
        self.model = made.to(device).train()
        self.parameters, self.device = count(self.model), device
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
        )
        self.loss = torch.compile(self.model) if compiled else self.model
        shape = (4, size.rows, size.config.max_length + made.MORE)
        self.ids, self.at = torch.randint(size.config.vocab_size or 0, shape, device=device), 0

    def step(self) -> None:
        self.at = (self.at + 1) % len(self.ids)
        with torch.autocast(self.device, torch.bfloat16, enabled=precision(self.device) == "bf16"):
            loss = self.loss(self.ids[self.at])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()


class HuggingFace(nn.Module):
    MORE = 0  # ids of a row: it shifts them itself and ignores the last position

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        fields = {**config_to_hf(config, {}), "attn_implementation": "sdpa", "use_cache": False}
        self.model = GPT2LMHeadModel(GPT2Config.from_dict(fields))

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


class XTransformers(nn.Module):
    MORE = 1

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        from x_transformers import Decoder, TransformerWrapper

        decoder = Decoder(
            dim=config.dim, depth=config.layers, heads=config.heads, attn_dim_head=config.dim // config.heads,
            attn_flash=True, ff_mult=config.ff_dim / config.dim, verbose=False,
        )  # fmt: skip
        self.model = TransformerWrapper(
            num_tokens=config.vocab_size, max_seq_len=config.max_length, attn_layers=decoder, tie_embedding=True
        )

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def precision(device: str) -> str:
    return "bf16" if device == "cuda" else "fp32"


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def make(name: str, size: Size, device: str, folder: Path) -> Tool:
    if name in OURS:
        return Ours(size, OURS[name], device, folder)
    module = MODULES[name.removesuffix("-compiled")]
    if importlib.util.find_spec(module) is None:
        raise LeftOut(f"{module} is not installed: pip install 'regard[bench]'")
    return Other(name, size, device)


def warm_up(tool: Tool, device: str) -> None:
    for _ in range(6 if device == "cuda" else 1):  # a graph is captured at the fourth step
        tool.step()


def sample(tool: Tool, size: Size, device: str) -> Sample:
    begin = clock(device)
    for _ in range(size.steps):
        tool.step()
    return Sample(size.steps * size.tokens, clock(device) - begin)


def operations_per_token(config: ModelConfig) -> int:
    """nanoGPT's: 6 per parameter, and 12 for each query-key pair and dimension."""
    matrices = count(build(config)) - config.max_length * config.dim
    return 6 * matrices + 12 * config.layers * config.dim * config.max_length


def measured(size: Size, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    names = args.tools or TOOLS[args.device]
    tools, facts = prepare(
        names, lambda name: make(name, size, args.device, folder), lambda tool: warm_up(tool, args.device), args.device
    )
    calls = {name: functools.partial(sample, tool, size, args.device) for name, tool in tools.items()}
    samples = measure.take_turns(calls, args.repeats)
    rates = {name: [one.rate for one in some] for name, some in samples.items()}
    for name, some in rates.items():
        facts[name]["tokens_per_second"] = measure.spread(some)
    row: dict[str, Any] = {
        "size": size.name, "vocab_size": size.config.vocab_size, "rows": size.rows, "context": size.config.max_length,
        "tools": facts,
    }  # fmt: skip
    if args.device == "cuda":
        per_token, most = operations_per_token(size.config), ceiling()
        row |= {"operations_per_token": per_token, "ceiling_tflops": round(most / 1e12, 1)}
        for name, some in rates.items():
            work = statistics.median(some) * per_token
            facts[name] |= {"mfu": round(work / most, 4), "mfu_of_989": round(work / SHEET, 4)}
    if args.profile:
        row["profile"] = {name: parts.shares(tool.step, size.config.vocab_size or 0, 1) for name, tool in tools.items()}
    return row


def show(row: dict[str, Any]) -> None:
    for name, tool in row["tools"].items():
        if "tokens_per_second" in tool:
            speed = tool["tokens_per_second"]
            more = f"  MFU {tool['mfu']:.3f}, {tool['memory_gb']:.1f} GB" if "mfu" in tool else ""
            span = f"({speed['low']:,} to {speed['high']:,})"
            print(f"{row['size']:12} {name:24} {speed['median']:12,.0f} tokens/s  {span}{more}")
    for name, found in row.get("profile", {}).items():
        print(f"{row['size']:12} {name:24} {'  '.join(f'{part} {share:.0%}' for part, share in found.items())}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="default: shakespeare, on a GPU gpt2")
    parser.add_argument("--tools", nargs="+", choices=(*OURS, *OTHERS), help="those to measure (default: by device)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which the median is reported (default: 3)")
    parser.add_argument("--profile", action="store_true", help="also profile the step, on a CPU")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, as a test")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the result file here")
    args = parser.parse_args()
    if args.profile and args.device != "cpu":
        parser.error("--profile measures CPU times: remove it, or use --device cpu")
    if args.repeats < 1:
        parser.error("--repeats must be 1 or more")
    args.sizes = args.sizes or {"cpu": ("shakespeare",), "cuda": ("gpt2",)}[args.device]
    return args


def main() -> None:
    args, begin = arguments(), time.perf_counter()
    rows: list[dict[str, Any]] = []
    result = {"kind": "language", "machine": measure.machine(args.device), "rows": rows}
    result["precision"] = precision(args.device)
    with tempfile.TemporaryDirectory() as folder:
        for size in [SMOKE] if args.smoke else [SIZES[name] for name in args.sizes]:
            rows.append(measured(size, args, Path(folder)))
            show(rows[-1])
            torch.compiler.reset()
            if args.out:  # after every size, so that an interrupted run keeps its results
                measure.write(args.out, result)
    print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
