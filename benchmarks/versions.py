"""Two versions of Regard side by side: the same benchmark in two source trees, sample by sample in turns.

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before --rounds 9 -- decoding.py --size small --peers regard
    python benchmarks/versions.py ../before --rounds 9 -o versions.json -- attention.py --modes eager --sizes small

Each tree runs its own `benchmarks/NAME.py` with the options after `--` in its own process. Only one of the two works at
a time: a sample of one is followed by the same sample of the other, so that a change in the machine's speed affects
both. Peers are sampled once, for the benchmark's own output. The result of a row is the median over the rounds of
after / before (above 1 is faster), with its quartiles and both medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import measure

WORKER = """
import json, os, runpy, sys
script, rounds, receive, send = sys.argv[1], int(sys.argv[2]), os.fdopen(int(sys.argv[3])), os.fdopen(int(sys.argv[4]), "w")
sys.argv = [script, *sys.argv[5:]]
sys.path[0] = os.path.dirname(script)
import measure

def tell(**said):
    print(json.dumps(said), file=send, flush=True)

def take_turns(calls, repeats):
    outcomes = {}
    for name, call in calls.items():
        outcomes[name] = []
        for _ in range(rounds if name.startswith("regard") else 1):
            tell(ready=name)
            receive.readline()
            outcome = call()
            outcomes[name].append(outcome)
            rate = getattr(outcome, "rate", None) or (1000 / outcome if isinstance(outcome, float) else None)
            tell(name=name, rate=rate)
    return outcomes

measure.take_turns = take_turns
runpy.run_path(script, run_name="__main__")
"""  # noqa: E501


class Worker:
    def __init__(self, tree: Path, rounds: int, benchmark: list[str]) -> None:
        their_receive, our_send = os.pipe()
        our_receive, their_send = os.pipe()
        script = str(tree / "benchmarks" / benchmark[0])
        extra = os.environ.get("PYTHONPATH", "")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(tree / "src"), extra]))}
        numbers = map(str, (rounds, their_receive, their_send))
        command = [sys.executable, "-c", WORKER, script, *numbers, *benchmark[1:]]
        fds = (their_receive, their_send)
        self.process = subprocess.Popen(command, cwd=tree, env=environment, pass_fds=fds, stdout=subprocess.DEVNULL)
        os.close(their_receive)
        os.close(their_send)
        self.send, self.receive = os.fdopen(our_send, "w"), os.fdopen(our_receive)

    def heard(self) -> dict[str, Any] | None:
        line = self.receive.readline()
        return json.loads(line) if line else None

    def go(self) -> dict[str, Any]:
        print(file=self.send, flush=True)
        if (outcome := self.heard()) is None:
            sys.exit("error: the benchmark stopped in the middle of a sample")
        return outcome


def compare(before: Path, after: Path, rounds: int, benchmark: list[str]) -> list[dict[str, Any]]:
    """One row per call of `measure.take_turns` and tool of ours, in the order of the benchmark."""
    workers = Worker(before, rounds, benchmark), Worker(after, rounds, benchmark)
    rows: list[dict[str, Any]] = []
    pairs: list[tuple[float, float]] = []
    while True:
        ready = [worker.heard() for worker in workers]
        if None in ready:
            break
        if len(pairs) % 2:
            second, first = workers[1].go(), workers[0].go()
        else:
            first, second = workers[0].go(), workers[1].go()
        if not first["name"].startswith("regard"):
            continue
        pairs.append((first["rate"], second["rate"]))
        if len(pairs) == rounds:
            rows.append({"row": len(rows), "tool": first["name"], **summary(pairs)})
            print(line(rows[-1]), flush=True)
            pairs = []
    for worker, message in zip(workers, ready, strict=True):
        if message:  # waits for a turn that will not come: the other one has stopped
            worker.process.kill()
    codes = [worker.process.wait() for worker in workers]
    if any(codes):
        sys.exit(f"error: the benchmark ended with exit codes {codes[0]} before and {codes[1]} after")
    return rows


def summary(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    before, after = zip(*pairs, strict=True)
    low, middle, high = statistics.quantiles([second / first for first, second in pairs], n=4, method="inclusive")
    ratio = {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}
    return {"before": measure.spread(before), "after": measure.spread(after), "ratio": ratio}


def line(row: dict[str, Any]) -> str:
    ratio = row["ratio"]
    medians = f"{row['before']['median']:12,.1f} -> {row['after']['median']:12,.1f}"
    return f"{row['row']:3} {row['tool']:24} {medians}  x {ratio['median']:.3f}  ({ratio['low']} to {ratio['high']})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, metavar="TREE", help="a checkout of the other version")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each version per row (default: 9)")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the result file here")
    parser.add_argument("benchmark", nargs="+", metavar="NAME.py OPTION", help="after --")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be 2 or more: quartiles are reported")
    here = Path(__file__).resolve().parent.parent
    rows = compare(args.before.resolve(), here, args.rounds, args.benchmark)
    if args.out:
        result = {"kind": "versions", "machine": measure.machine("cpu"), "benchmark": args.benchmark, "rows": rows}
        measure.write(args.out, result)


if __name__ == "__main__":
    main()
