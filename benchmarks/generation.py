"""Generation side by side: tokens/s of a language model, Regard, transformers and x-transformers.

    python benchmarks/generation.py -o benchmarks/results/generation-cpu.json --curve
    python benchmarks/generation.py --device cuda -o benchmarks/results/generation-h200.json --curve --profile

On a GPU the shape is GPT-2's with 124M parameters in bf16; on a CPU that of nanoGPT's Shakespeare (dim 384, 6 layers,
6 heads, 65 characters, 256 tokens) in fp32. The weights are random, and the same for transformers' `generate`; every
tool reads 32 tokens and generates 224, in 1 or more rows. `writers.py` describes the tools and how they sample.
The tools take turns; the result is the median of the rounds, with minimum and maximum. `same` is the fraction of
our tokens before the first that differs from `generate`, with greedy decoding.

A step must read all weights and all keys and values. `bandwidth` is that divided by the time of a step, as a fraction
of the bandwidth of a large copy on the same device, measured in the same run.

`--curve` measures the time per token as a function of the context length, with the cache and without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
import writers
from writers import Generated, Ours, Tool, Wish

from regard.errors import UserError
from regard.interop import export_folder
from regard.models.config import ModelConfig
from regard.models.folder import save
from regard.models.recipe import preset
from regard.models.transformer import Decoder
from regard.predict.config import SearchConfig
from regard.text.tokenizer import Tokenizer

PEERS = {"cpu": ("regard", "huggingface", "x-transformers"), "cuda": ("regard", "huggingface")}
ALL = ("regard", "huggingface", "huggingface-static", "x-transformers")
BATCHES = {"cpu": (1, 8), "cuda": (1, 64)}
SHAKESPEARE = {"dim": 384, "layers": 6, "heads": 6, "ff_dim": 1536, "max_length": 256}
SMOKE = {"dim": 24, "layers": 2, "heads": 2, "ff_dim": 96, "max_length": 64}
REFERENCE = "huggingface"
WINDOW = 16  # tokens over which the curve is averaged


def make_model(args: argparse.Namespace, folder: Path, **changes: Any) -> tuple[Decoder, Tokenizer, str]:
    """Random weights, the tokenizer, and a text for prompts."""
    letters = args.device == "cpu" or args.smoke
    tokenizer, text = writers.letters_tokenizer() if letters else writers.large_tokenizer(folder)
    size: dict[str, Any] = SMOKE if args.smoke else SHAKESPEARE if letters else {}
    torch.manual_seed(1)
    model = Decoder(preset("gpt2", **{**size, "vocab_size": len(tokenizer), **changes})).eval()
    return model.to(torch.bfloat16 if args.precision == "bf16" else torch.float32), tokenizer, text


def cut_prompt(tokenizer: Tokenizer, text: str, tokens: int) -> str:
    """The prefix of the text that has so many tokens."""
    for end in range(tokens, len(text) + 1):
        if len(tokenizer.encode(text[:end])) == tokens:
            return text[:end]
    raise UserError(f"--prompt {tokens}: the text is shorter; use fewer")


def make_tools(
    args: argparse.Namespace, folder: Path, config: ModelConfig, tokenizer: Tokenizer
) -> tuple[dict[str, Tool], dict[str, str]]:
    """The tools, and the reasons why others are skipped."""
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    tools: dict[str, Tool] = {}
    left_out: dict[str, str] = {}
    for name in args.peers:
        package = "x_transformers" if name == "x-transformers" else "transformers"
        if name != "regard" and importlib.util.find_spec(package) is None:
            left_out[name] = "pip install 'regard[bench]'"
            print(f"{name}: left out: {left_out[name]}", file=sys.stderr)
        else:
            tools[name] = writers.make_tool(name, folder, config, tokenizer, args.device, dtype)
    return tools, left_out


def measured(tools: dict[str, Tool], wish: Wish, repeats: int) -> dict[str, Any]:
    """All tools at one number of rows."""
    for tool in tools.values():  # warm up: compile and capture graphs for every length
        tool(wish)
    generated = measure.take_turns({name: partial(tool, wish) for name, tool in tools.items()}, repeats)
    row: dict[str, Any] = {"batch": wish.rows, "draw": "likeliest" if wish.greedy else "sample", "tools": {}}
    for name, outputs in generated.items():
        check(name, outputs[-1], wish)
        row["tools"][name] = {"tokens_per_second": measure.spread([each.rate for each in outputs])}
    if wish.greedy and {"regard", REFERENCE} <= generated.keys():
        ours, theirs = (generated[name][-1].ids for name in ("regard", REFERENCE))
        row["tools"]["regard"]["same"] = writers.same_fraction(ours, theirs)
    return row


def check(name: str, outputs: Generated, wish: Wish) -> None:
    lengths = {len(ids) for ids in outputs.ids}
    if len(outputs.ids) != wish.rows or lengths != {wish.count}:
        raise RuntimeError(f"{name} generated {len(outputs.ids)} rows of {lengths} tokens")


def copy_bandwidth() -> float:
    """Bytes per second of a large copy on the GPU, read and written."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    took = measure.race({"copy": lambda: target.copy_(source)}, "cuda", rounds=5, least=0.02)["copy"]["ms"]
    return 2 * source.nbytes / took * 1000


def add_bandwidth(row: dict[str, Any], model: Decoder, args: argparse.Namespace, copy: float) -> None:
    for tool in row["tools"].values():
        step = row["batch"] / tool["tokens_per_second"]["median"]  # seconds
        read = writers.bytes_per_step(model, row["batch"], args.prompt + args.new / 2)
        tool["step_us"] = round(step * 1e6, 1)
        tool["bandwidth"] = round(read / step / copy, 4)


def curve(args: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Milliseconds per token after so many others, with the cache and without it."""
    longest = 48 if args.smoke else 1024
    model, tokenizer, text = make_model(args, folder, max_length=longest)
    save(model, folder / "long", tokenizers={"tokenizer": tokenizer})
    tool, prompt = Ours(folder / "long", args.device), cut_prompt(tokenizer, text, 1)
    lengths = [length for length in (16, 32, 64, 128, 256, 512, 768, 1024) if length <= longest]
    runs = [token_times(tool, prompt, longest) for _ in range(args.repeats + 1)][1:]  # the first is a warm-up
    points = []
    for length in lengths:
        with_cache = statistics.median((run[length] - run[length - WINDOW]) / WINDOW for run in runs)
        ids = torch.randint(4, len(tokenizer), (1, length), device=tool.generator.device)
        read = partial(read_all, tool.generator.model, ids)
        without = measure.race({"all": read}, args.device, rounds=args.repeats, least=0.01)["all"]["ms"]
        points.append({"tokens": length, "cache_ms": round(with_cache * 1000, 4), "no_cache_ms": round(without, 4)})
        print(
            f"after {length:5} tokens: {with_cache * 1000:8.3f} ms with the cache, {without:8.3f} without", flush=True
        )
    return points


def token_times(tool: Ours, prompt: str, count: int) -> list[float]:
    """The start time, and the time when each token was available."""
    config = SearchConfig(sample=True, min_length=count, max_length=count)
    stream = tool.generator.stream([prompt], config=config)
    return [writers.clock(torch.device("cpu")), *(writers.clock(torch.device("cpu")) for _ in stream)]


@torch.inference_mode()
def read_all(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model.step(ids, model.start(), last=True)
    return logits


def kernels(tool: Tool, wish: Wish) -> list[dict[str, Any]]:
    """Where the GPU spends a step: kernels by time, per token of a row."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        tool(wish)
    kernels = [
        {"kernel": event.key[:90], "count": round(event.count / wish.count, 2),
         "us": round(event.self_device_time_total / wish.count, 2)}
        for event in seen.key_averages()
    ]  # fmt: skip
    kernels = sorted(kernels, key=lambda one: -one["us"])
    total = sum(one["us"] for one in kernels)
    print(f"GPU: {total:.0f} us and {sum(one['count'] for one in kernels):.0f} kernels per step at batch {wish.rows}")
    for one in kernels[:20]:
        print(f"  {one['us']:8.2f} us {one['count']:7.2f} x  {one['kernel']}")
    return kernels[:20]


def show(row: dict[str, Any]) -> None:
    for name, tool in row["tools"].items():
        speed, notes = tool["tokens_per_second"], ""
        notes += f"  same {tool['same']:.1%}" if "same" in tool else ""
        notes += f"  {tool['step_us']:.0f} us a step, {tool['bandwidth']:.1%} of copying" if "step_us" in tool else ""
        print(
            f"{row['draw']:9} batch {row['batch']:3} {name:18} {speed['median']:10,.0f} tokens/s "
            f"({speed['low']:,.0f} to {speed['high']:,.0f}){notes}",
            flush=True,
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cpu", choices=tuple(PEERS))
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default: fp32 on a CPU, bf16 on a GPU")
    parser.add_argument("--peers", nargs="+", choices=ALL, metavar="NAME", help=f"tools: {', '.join(ALL)}")
    parser.add_argument("--batches", type=int, nargs="+", metavar="N", help="rows generated together")
    parser.add_argument("--draws", nargs="+", default=["likeliest", "sample"], choices=("likeliest", "sample"))
    parser.add_argument("--prompt", type=int, default=32, metavar="N", help="tokens read (32)")
    parser.add_argument("--new", type=int, default=224, metavar="N", help="tokens generated (224)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds (3)")
    parser.add_argument("--threads", type=int, metavar="N", help="of a CPU (default: all)")
    parser.add_argument("--curve", action="store_true", help="also the time per token by context length")
    parser.add_argument("--profile", action="store_true", help="also where a GPU spends its time")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few tokens, as a test")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the result file here")
    args = parser.parse_args()
    if min(args.repeats, args.prompt, args.new, args.threads or 1, *(args.batches or (1,))) < 1:
        parser.error("--repeats, --prompt, --new, --threads and --batches must be 1 or more")
    args.peers, args.batches = args.peers or PEERS[args.device], args.batches or BATCHES[args.device]
    args.precision = args.precision or {"cpu": "fp32", "cuda": "bf16"}[args.device]
    if args.smoke:
        args.prompt, args.new, args.batches = min(args.prompt, 8), min(args.new, 20), (1, 2)
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def measure_all(args: argparse.Namespace, folder: Path) -> None:
    model, tokenizer, text = make_model(args, folder)
    save(model, folder, tokenizers={"tokenizer": tokenizer})
    export_folder(model, folder / "hf", {"tokenizer": tokenizer})
    tools, left_out = make_tools(args, folder, model.config, tokenizer)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "kind": "generation", "machine": measure.machine(args.device), "precision": args.precision,
        "parameters": sum(parameter.numel() for parameter in model.parameters()), "left_out": left_out,
        "prompt": args.prompt, "new": args.new, "rows": rows,
    }  # fmt: skip
    copy = copy_bandwidth() if args.device == "cuda" else None
    if copy is not None:
        result["copy_gb_per_second"] = round(copy / 1e9, 1)
    prompt = cut_prompt(tokenizer, text, args.prompt)
    for batch, draw in itertools.product(args.batches, args.draws):
        wish = Wish(prompt, batch, args.new, greedy=draw == "likeliest")
        rows.append(measured(tools, wish, args.repeats))
        if copy is not None:
            add_bandwidth(rows[-1], model, args, copy)
        show(rows[-1])
        if args.profile and args.device == "cuda" and "regard" in tools:
            rows[-1]["kernels"] = kernels(tools["regard"], wish)
        if args.out:  # after every row, so that an interrupted run keeps its results
            measure.write(args.out, result)
    if args.curve:
        result["curve"] = curve(args, folder)
    if args.out:
        measure.write(args.out, result)


def main() -> None:
    args: argparse.Namespace = arguments()
    with tempfile.TemporaryDirectory() as folder:
        measure_all(args, Path(folder))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
