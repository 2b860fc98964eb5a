"""Decoding speed side by side: output tokens/s, greedy and beam 5, Regard, transformers, CTranslate2, JoeyNMT.

    regard train recipes/multi30k-en-de.toml --data multi30k-tok -o runs/multi30k
    python benchmarks/decoding.py --run runs/multi30k --data multi30k-tok --joey joey/bin/python -o benchmarks/results/decoding-cpu.json
    python benchmarks/decoding.py --device cuda --run runs/multi30k --data multi30k-tok -o benchmarks/results/decoding-h200.json

All tools translate the 1,000 sentences of test2016 with the same weights; `translators.py` describes them and what is
timed. `same` is the fraction of sentences whose translation is identical to that of transformers' `generate`.
`cpu_seconds` is the CPU time of a round, which other programs on the machine change less than the wall-clock time. With
a batch of 1 every sentence is a call of its own.

    python benchmarks/decoding.py --run runs/multi30k --data multi30k-tok --batches 64 1 \\
        --peers ctranslate2 ctranslate2-int8 regard-ct2 regard-ct2-int8 -o benchmarks/results/decoding-engines-cpu.json

Without --run the weights are random (--size), so translations would never end: all tools generate exactly --length
tokens. Without --data the sentences are made-up words. fp32 on a CPU; on a GPU bf16 (--precision), ours and `generate`.

The tools take turns; the result is the median of the rounds, with minimum and maximum. Where a tool is so slow that
a round would take minutes (JoeyNMT, and batches of one sentence), it gets every n-th sentence, and the result says so.
"""  # noqa: E501

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import measure
import sentences
import torch
from translators import (
    Alone,
    CTranslate2,
    HuggingFace,
    JoeyNMT,
    Ours,
    OursOnCTranslate2,
    Search,
    Tool,
    Translations,
)

from regard.errors import UserError
from regard.interop import export_folder
from regard.models.folder import load, load_tokenizers
from regard.models.recipe import preset
from regard.models.transformer import SequenceToSequence, build
from regard.text.tokenizer import Tokenizer

PEERS = {"cpu": ("regard", "huggingface", "ctranslate2", "joeynmt"), "cuda": ("regard", "huggingface")}
ENGINES = ("regard-ct2", "regard-ct2-int8", "ctranslate2-int8")  # only if named with --peers
BATCHES = {"cpu": (64, 128), "cuda": (128, 1)}
BEAM = 5
EVERY = {"joeynmt": 5}  # one of so many sentences
EVERY_ALONE = 10  # the same in batches of one
REFERENCE = "huggingface"


def make_model(args: argparse.Namespace) -> tuple[SequenceToSequence, Tokenizer, list[str]]:
    """The weights, the tokenizer of both sides, and the lines to translate."""
    if args.run is not None:
        if args.data is None:
            raise UserError(f"--run {args.run}: also pass --data DIR with the sentences to translate")
        model, tokenizers = load(args.run), load_tokenizers(args.run)
        if not isinstance(model, SequenceToSequence) or "tokenizer" not in tokenizers:
            raise UserError(f"--run {args.run}: needs an encoder-decoder with one tokenizer for both sides")
        return model, tokenizers["tokenizer"], source_lines(args)
    torch.manual_seed(1)
    config = preset("tiny", dim=16, layers=1, heads=2, ff_dim=32, vocab_size=200) if args.smoke else preset(args.size)
    if args.data is None:
        tokenizer, lines = sentences.made_up_lines(args.sentences, config.target_size)
    else:
        tokenizer, lines = sentences.learn_tokenizer(args.data, config.target_size), source_lines(args)
    model = build(replace(config, vocab_size=len(tokenizer)))
    assert isinstance(model, SequenceToSequence)
    return model.eval(), tokenizer, lines


def source_lines(args: argparse.Namespace) -> list[str]:
    lines, _ = sentences.read_lines(args.data, "test_2016_flickr")
    return lines[: args.sentences]


def make_tool(name: str, model: SequenceToSequence, folder: Path, args: argparse.Namespace) -> Tool | str:
    """The tool, or the reason why it is skipped."""
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    plain = args.device == "cpu" and args.precision == "fp32"
    match name:
        case "regard":
            if args.device == "cpu":
                return Alone(partial(Ours, model.to(dtype), folder))
            return Ours(model.to(args.device, dtype), folder)
        case "huggingface":
            make = partial(HuggingFace, folder, args.device, dtype)
            return Alone(make) if args.device == "cpu" else make()
        case "ctranslate2" | "ctranslate2-int8" | "regard-ct2" | "regard-ct2-int8":
            if not plain or importlib.util.find_spec("ctranslate2") is None:
                return "on a CPU in fp32:  pip install 'regard[bench]'"
            int8 = name.endswith("int8")
            if name.startswith("c"):
                return Alone(partial(CTranslate2, folder, int8))
            return Alone(partial(OursOnCTranslate2, model, folder, int8))
        case _:
            if not plain or args.joey is None:
                return "on a CPU in fp32: --joey PYTHON names its environment, see benchmarks/joey.py"
            return JoeyNMT(model, folder, args.joey)


def every(name: str, batch: int) -> int:
    """This tool translates one of so many sentences."""
    return max(EVERY.get(name, 1), EVERY_ALONE if batch == 1 else 1)


def measured(tools: dict[str, Tool], lines: list[str], search: Search, repeats: int) -> dict[str, Any]:
    """One kind of search at one batch size, all tools."""
    chosen = {name: lines[:: every(name, search.batch)] or lines[:1] for name in tools}
    for name, tool in tools.items():  # warm up: two batches, on a GPU all, since each shape has its own graph
        tool.translate(chosen[name] if torch.cuda.is_available() else chosen[name][: 2 * search.batch], search)
    calls = {name: partial(translated, tool, chosen[name], search) for name, tool in tools.items()}
    translations = measure.take_turns(calls, repeats)
    kind = "greedy" if search.beam == 1 else f"beam {search.beam}"
    row: dict[str, Any] = {"search": kind, "batch": search.batch, "tools": {}}
    expected = _texts(translations, chosen, REFERENCE)
    for name, outputs in translations.items():
        row["tools"][name] = {
            "tokens_per_second": measure.spread([each.rate for each in outputs]),
            "sentences": len(chosen[name]),
            "tokens": outputs[-1].tokens,
        }
        cpu_seconds = statistics.median(each.cpu_seconds for each in outputs)
        if cpu_seconds and name != "regard":  # which starts processes of its own
            row["tools"][name]["cpu_seconds"] = round(cpu_seconds, 3)
        if expected and name != REFERENCE:
            row["tools"][name]["same"] = same_fraction(_texts(translations, chosen, name), expected)
    return row


def translated(tool: Tool, lines: list[str], search: Search) -> Translations:
    """All lines in one call; in batches of one, each in a call of its own, as they come to a service."""
    done = [tool.translate(some, search) for some in ([[line] for line in lines] if search.batch == 1 else [lines])]
    return Translations(
        [text for one in done for text in one.texts], sum(one.tokens for one in done),
        sum(one.seconds for one in done), sum(one.cpu_seconds for one in done),
    )  # fmt: skip


def _texts(translations: dict[str, list[Translations]], chosen: dict[str, list[str]], name: str) -> dict[str, str]:
    return dict(zip(chosen[name], translations[name][-1].texts, strict=True)) if name in translations else {}


def same_fraction(outputs: dict[str, str], expected: dict[str, str]) -> float:
    """The fraction of common lines with identical translations."""
    both = outputs.keys() & expected.keys()
    return round(sum(outputs[line] == expected[line] for line in both) / max(len(both), 1), 4)


def show(row: dict[str, Any]) -> None:
    for name, tool in row["tools"].items():
        speed, same = tool["tokens_per_second"], f"  same {tool['same']:.1%}" if "same" in tool else ""
        label = f"{row['search']:7} batch {row['batch']:<4} {name:12}"
        print(f"{label} {speed['median']:10,.0f} tokens/s  ({speed['low']:,} to {speed['high']:,}){same}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--run", type=Path, metavar="DIR", help="a trained model (default: random weights)")
    parser.add_argument("--size", choices=("tiny", "small", "base"), help="of random weights: small, on a GPU base")
    parser.add_argument("--data", type=Path, metavar="DIR", help="multi30k-tok (default: made-up words)")
    parser.add_argument("--joey", type=Path, metavar="PYTHON", help="the Python of JoeyNMT's environment")
    parser.add_argument("--peers", nargs="+", choices=(*PEERS["cpu"], *ENGINES), help="the tools to measure")
    parser.add_argument("--batches", nargs="+", type=int, metavar="N", help="default: 64 128, on a GPU 128 1")
    parser.add_argument("--beams", nargs="+", type=int, default=(1, BEAM), metavar="N", help="default: 1 5")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default: fp32, on a GPU bf16")
    parser.add_argument("--sentences", type=int, default=1000, help="how many are translated (default: 1000)")
    parser.add_argument("--length", type=int, help="tokens per translation: with --run at most (64), else exactly (20)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which the median is reported (default: 3)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few sentences, as a test")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the result file here")
    args = parser.parse_args()
    if min(args.repeats, args.sentences, args.length or 1, *(args.batches or (1,)), *args.beams) < 1:
        parser.error("--repeats, --sentences, --length, --batches and --beams must be 1 or more")
    args.size = args.size or {"cpu": "small", "cuda": "base"}[args.device]
    args.peers, args.batches = args.peers or PEERS[args.device], args.batches or BATCHES[args.device]
    args.precision = args.precision or {"cpu": "fp32", "cuda": "bf16"}[args.device]
    args.length = args.length or (20 if args.run is None else 64)
    if args.smoke:
        args.sentences, args.length, args.batches = 8, min(args.length, 5), (4,)
    return args


def measure_all(args: argparse.Namespace, folder: Path) -> None:
    model, tokenizer, lines = make_model(args)
    export_folder(model, folder, {"tokenizer": tokenizer})
    tools: dict[str, Tool] = {}
    left_out: dict[str, str] = {}
    versions: dict[str, str] = {}
    for name in args.peers:
        made = make_tool(name, model, folder, args)
        if isinstance(made, str):
            left_out[name] = made
            print(f"{name}: left out: {made}", file=sys.stderr)
        else:
            tools[name] = made
            versions |= {f"{name} {package}": v for package, v in getattr(made, "versions", {}).items()}
    rows: list[dict[str, Any]] = []
    result = {
        "kind": "decoding", "machine": measure.machine(args.device), "precision": args.precision,
        "weights": "random" if args.run is None else args.run.name, "left_out": left_out, "rows": rows,
        "length": {"exactly" if args.run is None else "at most": args.length}, "other_versions": versions,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }  # fmt: skip
    try:
        for beam in args.beams:
            for batch in args.batches:
                search = Search(beam, batch, least=args.length if args.run is None else 0, most=args.length)
                rows.append(measured(tools, lines, search, args.repeats))
                show(rows[-1])
                if args.out:  # after every row, so that an interrupted run keeps its results
                    measure.write(args.out, result)
    finally:
        for tool in tools.values():
            if isinstance(tool, Alone | JoeyNMT):
                tool.close()


def main() -> None:
    args: argparse.Namespace = arguments()
    with tempfile.TemporaryDirectory() as folder:
        measure_all(args, Path(folder))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
