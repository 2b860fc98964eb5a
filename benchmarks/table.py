"""A result file of a benchmark (`attention.py`, `training.py`, `language.py`, …) as a Markdown table.

    python benchmarks/table.py benchmarks/results/attention-h200.json

Times of blocks are milliseconds on a GPU; on a shared CPU only ratios are meaningful: each peer's time over ours.
Speeds are tokens/s, median (minimum to maximum), with ratios that do not depend on the machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def table(path: Path) -> str:
    result = json.loads(path.read_text(encoding="utf-8"))
    tables = {
        "training": training, "language": training, "lengths": lengths, "decoding": decoding, "generation": generation,
        "classes": classes, "tasks": tasks, "exported": exported, "recall": recall,
        "long-inputs": long_inputs, "packing": packing, "long-training": long_training,
        "traffic": traffic,
    }  # fmt: skip
    return tables.get(result.get("kind"), blocks)(result)


def blocks(result: Json) -> str:
    ratios = "CPU" in result["machine"]["hardware"] or "threads" in result["machine"]["hardware"]
    peers = list(result["rows"][0]["times"])
    shown = [peer for peer in peers if not (ratios and peer == "regard")]
    lines = [
        f"| block | size | mode | pass | {' | '.join(shown)} | fastest peer / ours |",
        "|---|---|---|---|" + "--:|" * (len(shown) + 1),
    ]
    for row in result["rows"]:
        own = row["times"]["regard"]["ms"]
        times = [row["times"][peer]["ms"] for peer in shown]
        cells = [f"{time / own:.2f}" if ratios else f"{time:.3f}" for time in times]
        head = f"| {row['block']} | {row['size']} {row['batch']}x{row['length']} | {row['mode']} | {row['pass']} |"
        lines.append(f"{head} {' | '.join(cells)} | {row['fastest_peer_over_ours']:.2f} |")
    return "\n".join(lines)


def traffic(result: Json) -> str:
    lines = [
        "| tokens | mixer | kernels | read and written, GB | stored for the backward pass, GB |",
        "|--:|---|--:|--:|--:|",
    ]
    for row in result["rows"]:
        cells = row["mixer"], str(row["kernels"]), f"{row['read_and_written_gb']:.2f}", f"{row['stored_gb']:.2f}"
        lines.append(f"| {row['length']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def training(result: Json) -> str:
    """One row per tool, then the profile, if there is one."""
    gpu = any("mfu" in tool for row in result["rows"] for tool in row["tools"].values())
    more = " MFU | memory, GB |" if gpu else ""
    tokens = "target tokens" if result["kind"] == "training" else "tokens"
    lines = [
        f"| size | library | parameters | {tokens}/s | best of Regard / library |{more}",
        "|---|---|--:|--:|--:|" + "--:|--:|" * gpu,
    ]
    for row in result["rows"]:
        tools = {name: tool for name, tool in row["tools"].items() if "tokens_per_second" in tool}
        best = max((_median(tool) for name, tool in tools.items() if name.startswith("regard")), default=None)
        for name, tool in row["tools"].items():
            if name not in tools:
                lines.append(f"| {row['size']} | {name} | | {tool.get('left_out') or tool.get('failed')} | |")
                continue
            cells = [f"{tool['parameters']:,}", _speed(tool), f"{best / _median(tool):.2f}" if best else ""]
            if gpu:
                cells += [f"{tool['mfu']:.3f}", f"{tool['memory_gb']:.1f}"]
            lines.append(f"| {row['size']} | {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, *_profiles(result)])


def _profiles(result: Json) -> list[str]:
    found = [(row["size"], name, shares) for row in result["rows"] for name, shares in row.get("profile", {}).items()]
    if not found:
        return []
    names = list(found[0][2])
    lines = ["", f"| size | library | {' | '.join(names)} |", "|---|---|" + "--:|" * len(names)]
    for size, tool, shares in found:
        lines.append(f"| {size} | {tool} | {' | '.join(f'{shares[name]:.0%}' for name in names)} |")
    return lines


def recall(result: Json) -> str:
    """One row per kind of layer: the accuracy at each distance, mean (lowest to highest)."""
    rows = result["rows"]
    distances = list(dict.fromkeys(row["distance"] for row in rows))
    lines = [f"| layer | parameters | {' | '.join(f'k = {distance}' for distance in distances)} |"]
    lines.append("|---|--:|" + "--:|" * len(distances))
    for kind in dict.fromkeys(row["layer"] for row in rows):
        own = {row["distance"]: row for row in rows if row["layer"] == kind}
        cells = [_spread(own[distance]) if distance in own else "" for distance in distances]
        lines.append(f"| {kind} | {next(iter(own.values()))['parameters']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(row: Json) -> str:
    low, high = min(row["accuracies"]), max(row["accuracies"])
    return f"{row['accuracy']:.2f}" + (f" ({low:.2f} to {high:.2f})" if high - low >= 0.01 else "")


def long_inputs(result: Json) -> str:
    """One row per mixer: the metric over seeds, and what it costs; then the baselines."""
    higher = result["higher_is_better"]
    lines = [
        f"| mixer | {result['metric']} on {result['test']} | lowest to highest | parameters | training FLOPs | "
        "seconds | difference | p | verdict |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    form = ".2%" if higher else ".4f"
    for row in sorted(result["rows"], key=lambda row: (row["mean"] is None, (row["mean"] or 0.0) * (-1) ** higher)):
        if row["mean"] is None:
            lines.append(f"| {row['name']} | {next(iter(row['failed'].values()), 'not trained')} | | | | | | | |")
            continue
        scores = row["scores"].values()
        cells = [
            row["name"], f"{row['mean']:{form}}", f"{min(scores):{form}} to {max(scores):{form}}",
            _cell(row["parameters"], ","), _cell(row["flops"], ".3g"), _cell(row["seconds"], ".0f"),
            _cell(row["difference"], f"+{form}"), _cell(row["p"], ".3f"), row["verdict"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| {name} | {value:{form}} | | | | | | | |" for name, value in result["baselines"].items()]
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def decoding(result: Json) -> str:
    lines = [
        "| search | batch | library | output tokens/s | ours / library | same as `generate` |",
        "|---|--:|---|--:|--:|--:|",
    ]
    for row in result["rows"]:
        own = row["tools"].get("regard")
        for name, tool in row["tools"].items():
            ratio = f"{_median(own) / _median(tool):.2f}" if own else ""
            same = f"{tool['same']:.1%}" if "same" in tool else ""
            lines.append(f"| {row['search']} | {row['batch']} | {name} | {_speed(tool)} | {ratio} | {same} |")
    return "\n".join(lines)


def lengths(result: Json) -> str:
    """The loss of each group of positions that ends at a power of two times the training length, and of all."""
    context, group, times = result["context"], result["group"], result["times"]
    ends = [context * n // group for n in (1, 2, 4, 8) if n <= times]
    head = " | ".join(f"{end * group - group + 1}-{end * group}" for end in ends)
    lines = [
        f"| model | rows of {context} | rows of {context * times} | at {head} |",
        "|---|--:|--:|" + "--:|" * len(ends),
    ]
    for row in result["rows"]:
        cells = [row["loss"], row["loss_at_8_times"], *(row["by_position"][end - 1] for end in ends)]
        lines.append(f"| {row['model']} | {' | '.join(f'{cell:.3f}' for cell in cells)} |")
    return "\n".join(lines)


def generation(result: Json) -> str:
    """One row per tool, then the time per token by context length, if it was measured."""
    gpu = "copy_gb_per_second" in result
    more = " µs per step | of copy bandwidth |" if gpu else ""
    lines = [
        f"| decoding | batch | library | tokens/s | ours / library |{more}",
        "|---|--:|---|--:|--:|" + "--:|--:|" * gpu,
    ]
    for row in result["rows"]:
        own = row["tools"].get("regard")
        for name, tool in row["tools"].items():
            cells = [_speed(tool), f"{_median(own) / _median(tool):.2f}" if own else ""]
            if gpu:
                cells += [f"{tool['step_us']:,.0f}", f"{tool['bandwidth']:.0%}"]
            lines.append(f"| {row['draw']} | {row['batch']} | {name} | {' | '.join(cells)} |")
    if "curve" in result:
        lines += ["", "| tokens so far | ms per token, with the cache | without |", "|--:|--:|--:|"]
        lines += [f"| {at['tokens']} | {at['cache_ms']:.2f} | {at['no_cache_ms']:.2f} |" for at in result["curve"]]
    return "\n".join(lines)


def classes(result: Json) -> str:
    lines = ["| model | accuracy | macro-F1 | loss | calibration error |", "|---|--:|--:|--:|--:|"]
    for row in result["rows"]:
        cells = [f"{row[name]['mean']:.4f} ± {row[name]['deviation']:.4f}" for name in ("macro_f1", "loss")]
        accuracy = f"{row['accuracy']['mean']:.2%} ± {row['accuracy']['deviation']:.2%}"
        error = f"{row['calibration_error']['mean']:.4f}"
        lines.append(f"| {row['model']} | {accuracy} | {' | '.join(cells)} | {error} |")
    return "\n".join(lines)


def tasks(result: Json) -> str:
    lines = ["| task | metric | mean (minimum to maximum) | goal | seeds | training, s |", "|---|---|--:|--:|--:|--:|"]
    for row in result["rows"]:
        spread = f"{row['mean']:.4f} ({row['least']:.4f} to {row['most']:.4f})"
        goal, seeds = row["goal"] or "", len(row.get("seeds", ())) or ""
        head = f"| {row['task']} | {row['figure']} on {row['test']} | {spread} | {goal}"
        lines.append(f"{head} | {seeds} | {row.get('training_seconds', row.get('seconds'))} |")
    return "\n".join(lines)


def exported(result: Json) -> str:
    """One row per model and engine; speeds as ratios to the run itself."""
    lines = [
        "| run | engine | metric | MB | size / run | size / fp32 | speed, torch = 1 | in CPU time | peak memory, MB |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        for name, one in row["models"].items():
            quality = f"{row['metric']} {one['quality']}"
            size = f"{one['bytes'] / 1e6:.1f} | {one['size']:.2f} | {one['size_of_fp32']:.2f}"
            speed = f"{one['speed']:.2f} | {one['speed_cpu']:.2f} | {one['memory'] / 1e6:.0f}"
            lines.append(f"| {row['run']} | {name} | {quality} | {size} | {speed} |")
    return "\n".join(lines)


def packing(result: Json) -> str:
    """One row per case; times relative to texts that are read by themselves."""
    lines = ["| width | tokens of a row | texts | all pairs of a row | padded batches |", "|--:|--:|---|--:|--:|"]
    for row in result["rows"]:
        all_pairs, own, padded = (row["passes"][name]["ms"] for name in ("all pairs", "texts", "padded"))
        what = f"{row['mean']} tokens on average" if row["mean"] else f"log-uniform, 4 to {row['row']}"
        lines.append(f"| {row['dim']} | {row['row']} | {what} | {all_pairs / own:.2f} | {padded / own:.2f} |")
    return "\n".join(lines)


def long_training(result: Json) -> str:
    """One row per mixer and kind of memory."""
    lines = ["| mixer | activations | tokens/s | memory, GB | loss, first to last |", "|---|---|--:|--:|--:|"]
    for row in result["rows"]:
        kept = "recomputed" if row["checkpointing"] else "stored"
        if "failed" in row:
            lines.append(f"| {row['mixer']} | {kept} | {row['failed']} | | |")
            continue
        speed, memory, losses = (
            row["tokens_per_second"],
            row["memory_gb"],
            f"{row['first_loss']:.2f} to {row['loss']:.2f}",
        )
        lines.append(f"| {row['mixer']} | {kept} | {speed:,} | {_cell(memory, '.1f')} | {losses} |")
    return "\n".join(lines)


def _median(tool: Json) -> float:
    return float(tool["tokens_per_second"]["median"])


def _speed(tool: Json) -> str:
    speed = tool["tokens_per_second"]
    return f"{speed['median']:,.0f} ({speed['low']:,.0f} to {speed['high']:,.0f})"


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
