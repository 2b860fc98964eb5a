"""Training speed side by side: real target tokens/s, Regard, nn.Transformer, Marian, x-transformers, JoeyNMT.

    python benchmarks/training.py --data multi30k-tok --joey joey/bin/python --profile -o benchmarks/results/training-cpu.json
    python benchmarks/training.py --device cuda -o benchmarks/results/training-h200.json

The same shape, vocabulary, pairs, token budget and precision for all: fp32 on a CPU, bf16 autocast on a GPU. A step
and its timing are described in `learners.py`, the matching of the models in `peer_models.py`, JoeyNMT and its
environment in `joey.py`. The tools take turns; the result is the median of the rounds, with minimum and
maximum.

    regard                   padded batches                     torch, torch-compiled     nn.Transformer
    regard-packed            train.pack                         marian, marian-compiled   transformers.MarianMTModel
    regard-compiled          train.pack, train.compile          x-transformers
    regard-graph             train.pack, train.cuda_graph            joeynmt                   a CPU, and --joey, only
    regard-graph-compiled    train.pack, train.cuda_graph, train.compile

On a GPU also the most memory a tool held while it warmed up, and MFU: the operations that the real tokens of the model
need (`regard.cost`: 6 a parameter and token, and the attention that the mask lets through), a second, over what a
product of two 8192 x 8192 matrices in bf16 reaches in the same run. Needs  pip install 'regard[bench]'.
"""  # noqa: E501

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import measure
import parts
import torch
from joey import Joey
from learners import Learner, Ours, Padded, Sample, Task, clock
from sentences import MULTI30K, WMT, Corpus, Lengths, generate, multi30k

from regard.cost import cost
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.recipe import preset

OURS: dict[str, tuple[str, ...]] = {
    "regard": (),
    "regard-packed": ("pack",),
    "regard-compiled": ("pack", "compile"),
    "regard-graph": ("pack", "cuda_graph"),
    "regard-graph-compiled": ("pack", "cuda_graph", "compile"),
}
PADDED = ("torch", "torch-compiled", "marian", "marian-compiled", "x-transformers")
PEERS = {
    "cpu": ("regard", "regard-packed", "torch", "marian", "x-transformers", "joeynmt"),
    "cuda": ("regard-graph", "regard-graph-compiled", "torch", "torch-compiled", "marian"),
}
COUNTED = 4000  # pairs whose FLOPs are counted
MODULES = {"marian": "transformers", "marian-compiled": "transformers", "x-transformers": "x_transformers"}


@dataclass(frozen=True)
class Size:
    """A model and its data: on a GPU batches are larger."""

    name: str
    config: ModelConfig
    lengths: Lengths
    budget: dict[str, int]
    pack: dict[str, int]
    pairs: int = 29_000  # as many as Multi30k has; generated where there is no --data


SIZES = {
    "tiny": Size("tiny", preset("tiny"), MULTI30K, {"cpu": 4096, "cuda": 8192}, {"cpu": 64, "cuda": 128}),
    "small": Size("small", preset("small"), MULTI30K, {"cpu": 4096, "cuda": 8192}, {"cpu": 64, "cuda": 128}),
    "base": Size("base", preset("base"), WMT, {"cpu": 4096, "cuda": 25_000}, {"cpu": 256, "cuda": 256}, 50_000),
}
SMOKE = Size(
    "smoke", preset("tiny", dim=16, layers=1, heads=2, ff_dim=32, vocab_size=200), MULTI30K,
    {"cpu": 256, "cuda": 256}, {"cpu": 64, "cuda": 64}, 200,
)  # fmt: skip


class Counted(Protocol):
    parameters: int  # that are trained


Made = TypeVar("Made", bound=Counted)


class LeftOut(Exception):
    """A tool that is not installed."""


def make(name: str, task: Task, joey: Path | None) -> Learner:
    if name in OURS:
        settings = {field: task.pack if field == "pack" else True for field in OURS[name]}
        return Ours(task, settings)
    if name == "joeynmt":
        if joey is None or task.device != "cpu":
            raise LeftOut("on a CPU, --joey PYTHON names its environment: see benchmarks/joey.py")
        return Joey(task, joey)
    if (module := MODULES.get(name)) and importlib.util.find_spec(module) is None:
        raise LeftOut(f"{module} is not installed: pip install 'regard[bench]'")
    return Padded(name.removesuffix("-compiled"), task, name.endswith("-compiled"))


def prepare(
    names: Sequence[str], make: Callable[[str], Made], warm_up: Callable[[Made], None], device: str
) -> tuple[dict[str, Made], dict[str, Any]]:
    """The warmed-up tools, and the metadata of each."""
    tools: dict[str, Made] = {}
    facts: dict[str, Any] = {}
    for name in names:
        before, begin = 0, clock(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        try:
            tool = make(name)
            warm_up(tool)
        except UserError:
            raise
        except LeftOut as reason:
            facts[name] = {"left_out": str(reason)}
        except Exception as error:  # an error of a tool: recorded in the result, and the others continue
            facts[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        else:
            tools[name] = tool
            facts[name] = {"parameters": tool.parameters, "seconds_to_ready": round(clock(device) - begin, 1)}
            if device == "cuda":
                facts[name]["memory_gb"] = round((torch.cuda.max_memory_allocated() - before) / 1e9, 2)
        for word in ("left_out", "failed"):
            if word in facts[name]:
                print(f"{name}: {word.replace('_', ' ')}: {facts[name][word]}", file=sys.stderr)
    return tools, facts


def operations_per_token(config: ModelConfig, corpus: Corpus) -> float:
    """FLOPs of forward and backward per real target token, without masked query-key pairs.

    The first few thousand pairs are a random sample: the pairs are in no particular order.
    """
    sources = corpus.pairs.sources.lengths[:COUNTED].tolist()
    targets = (corpus.pairs.targets.lengths[:COUNTED] - 1).tolist()
    total = 0
    for (source, target), count in Counter(zip(sources, targets, strict=True)).items():
        needed = cost(config, seq=source, target_seq=target)
        total += count * (needed.train - 3 * needed.masked)
    return total / sum(targets)


@functools.cache
def ceiling() -> float:
    """FLOP/s of a large matmul in bf16: the median of nine samples."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = [measure.sample(lambda: left @ right, "cuda", 0.05) for _ in range(10)]
    return 2 * 8192**3 / statistics.median(times[1:]) * 1000


def profiled(learners: dict[str, Learner], medians: dict[str, float], vocab_size: int) -> dict[str, dict[str, float]]:
    """Profiles of the fastest variant of Regard and the fastest other tool in this process."""
    inside = {name: learner for name, learner in learners.items() if isinstance(learner, Ours | Padded)}
    found = {}
    for ours in (True, False):
        names = [name for name in inside if (name in OURS) == ours]
        if names:
            name = max(names, key=medians.__getitem__)
            found[name] = parts.shares(inside[name].run, vocab_size, steps=1)
    return found


def measured(size: Size, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    corpus = make_corpus(size, args)
    budget = args.tokens or size.budget[args.device]
    config = preset_with(size.config, corpus)
    task = Task(config, corpus, budget, size.pack[args.device], args.steps, args.device, folder)
    learners, facts = prepare(
        args.peers, lambda name: make(name, task, args.joey), lambda learner: learner.warm_up(), args.device
    )
    facts |= {
        name: {**facts[name], "versions": one.versions} for name, one in learners.items() if isinstance(one, Joey)
    }
    samples = measure.take_turns({name: learner.run for name, learner in learners.items()}, args.repeats)
    medians = {name: statistics.median(sample.rate for sample in some) for name, some in samples.items()}
    row: dict[str, Any] = {
        "size": size.name, "data": corpus.origin, "vocab_size": corpus.vocab_size, "batch_tokens": budget,
        "pack": task.pack,
        "tools": {name: {**facts[name], **figures(samples.get(name, []), learners.get(name))} for name in args.peers},
    }  # fmt: skip
    if args.device == "cuda":
        per_token = operations_per_token(config, corpus)
        row |= {"operations_per_token": round(per_token), "ceiling_tflops": round(ceiling() / 1e12, 1)}
        for name, rate in medians.items():
            row["tools"][name]["mfu"] = round(rate * per_token / ceiling(), 4)
    if args.profile:
        row["profile"] = profiled(learners, medians, corpus.vocab_size)
    for learner in learners.values():
        if isinstance(learner, Joey):
            learner.worker.close()
    return row


def figures(samples: Sequence[Sample], learner: Learner | None) -> dict[str, Any]:
    if learner is None:
        return {}
    found: dict[str, Any] = {
        "tokens_per_second": measure.spread([sample.rate for sample in samples]),
        "tokens": samples[-1].tokens,
        "filled": round(learner.filled, 3),
    }
    if isinstance(learner, Ours) and learner.packed is not None:
        found["layout_seconds"] = round(learner.layout_seconds, 3)
    return found


def make_corpus(size: Size, args: argparse.Namespace) -> Corpus:
    if args.data is not None and size.lengths is MULTI30K and not args.smoke:
        return multi30k(args.data, size.config.target_size)
    return generate(size.lengths, size.pairs, size.config.target_size)


def preset_with(config: ModelConfig, corpus: Corpus) -> ModelConfig:
    """The tokenizer may have fewer tokens than the limit."""
    return config if config.vocab_size == corpus.vocab_size else replace(config, vocab_size=corpus.vocab_size)


def show(row: dict[str, Any]) -> None:
    for name, tool in row["tools"].items():
        if "tokens_per_second" in tool:
            speed = tool["tokens_per_second"]
            print(
                f"{row['size']:6} {name:22} {speed['median']:12,.0f} tokens/s  ({speed['low']:,} to {speed['high']:,})"
            )
    for name, found in row.get("profile", {}).items():
        print(f"{row['size']:6} {name:22} {'  '.join(f'{part} {share:.0%}' for part, share in found.items())}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="default: tiny small, on a GPU tiny base")
    parser.add_argument("--peers", nargs="+", choices=(*OURS, *PADDED, "joeynmt"), help="the tools to measure")
    parser.add_argument("--data", type=Path, metavar="DIR", help="multi30k-tok (default: generated pairs)")
    parser.add_argument("--joey", type=Path, metavar="PYTHON", help="the Python of JoeyNMT's environment")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which the median is reported (default: 3)")
    parser.add_argument("--steps", type=int, help="padded batches of a sample (default: 8, on a GPU 12)")
    parser.add_argument("--tokens", type=int, help="token budget of a batch (default: by size)")
    parser.add_argument("--profile", action="store_true", help="also profile the step, on a CPU")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on generated pairs, as a test")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the result file here")
    args = parser.parse_args()
    if args.profile and args.device != "cpu":
        parser.error("--profile measures CPU times: remove it, or use --device cpu")
    if args.repeats < 1 or (args.steps or 1) < 1 or (args.tokens or 1) < 1:
        parser.error("--repeats, --steps and --tokens must be 1 or more")
    args.peers = args.peers or PEERS[args.device]
    args.steps = args.steps or (2 if args.smoke else {"cpu": 8, "cuda": 12}[args.device])
    args.sizes = args.sizes or {"cpu": ("tiny", "small"), "cuda": ("tiny", "base")}[args.device]
    return args


def main() -> None:
    args = arguments()
    rows: list[dict[str, Any]] = []
    result = {"kind": "training", "machine": measure.machine(args.device), "rows": rows}
    result["precision"] = "bf16" if args.device == "cuda" else "fp32"
    with tempfile.TemporaryDirectory() as folder:
        for size in [SMOKE] if args.smoke else [SIZES[name] for name in args.sizes]:
            rows.append(measured(size, args, Path(folder)))
            show(rows[-1])
            torch.compiler.reset()
            if args.out:  # after every size, so that an interrupted run keeps its results
                measure.write(args.out, result)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
