"""Whether a change of the code changes a result: losses, weights and predictions of every recipe's `--smoke` form.

    python benchmarks/reproduce.py record before.json           # at the old commit
    python benchmarks/reproduce.py record after.json            # at the new one
    python benchmarks/reproduce.py compare before.json after.json

A refactoring must reproduce the loss curve exactly. Everything runs on the CPU in float32 with one thread and the
recipe's seed. Weights are compared by content, one SHA-256 per tensor, whatever a tensor is called; predictions by
what the command prints.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parent.parent
AFTER = {"nsmc-pretrained": "nsmc-masked", "naver-pretrained": "naver-masked"}
PREDICTIONS = {
    "multi30k-en-de": ["translate", "RUN", "March 3rd, 2021", "July 4th, 1976", "--beam=3", "--n-best=2", "--json"],
    "shakespeare-char": ["generate", "RUN", "ROMEO:", "--seed", "3", "--max-tokens", "40"],
    "shakespeare-bpe": ["generate", "RUN", "ROMEO:", "--seed", "3", "--max-tokens", "20"],
    "nsmc": ["classify", "RUN", "정말 재미있는 영화", "최악이다 😀", "--json"],
    "nsmc-pretrained": ["classify", "RUN", "정말 재미있는 영화", "최악이다 😀", "--json"],
    "nsmc-masked": ["fill", "RUN", "이 영화 [MASK] 재밌다"],
    "text-to-text": ["translate", "RUN", "reverse: a b c", "sum: 1 2"],
    "number-sequences": ["predict", "RUN", "10 20 30 40 50"],
    "fashion-mnist-vit": ["classify", "RUN", "IMAGE", "--json"],
    "fashion-scenes": ["caption", "RUN", "IMAGE", "--beam", "2"],
    "demo": ["translate", "RUN", "March 3rd, 2021", "seven hundred five"],
}


def regard(*arguments: str, tree: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree / "src"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "regard", *arguments], env=environment, cwd=tree, capture_output=True, text=True
    )


def hashes(path: Path) -> list[str]:
    tensors = load_file(path).values()
    return sorted(f"{list(t.shape)} {hashlib.sha256(t.tobytes()).hexdigest()[:16]}" for t in tensors)


def losses(path: Path) -> list[float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def record_one(name: str, tree: Path, runs: Path) -> dict[str, object]:
    run, begin = runs / f"{name}-smoke", time.perf_counter()
    if name == "demo":
        command = ["demo", "--out", str(run), "--steps", "100", "--json"]
    else:
        command = ["train", f"recipes/{name}.toml", "--smoke", "--device", "cpu", "-o", str(run)]
        if name in AFTER:
            command += ["--set", f"train.init_from={runs / f'{AFTER[name]}-smoke'}"]
    done = regard(*command, tree=tree)
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    result: dict[str, object] = {
        "losses": losses(run / "metrics.jsonl"),
        "weights": hashes(run / "model.safetensors"),
        "seconds": round(time.perf_counter() - begin, 1),
    }
    if name in PREDICTIONS:
        image = runs / "image.png"
        given = [{"RUN": str(run), "IMAGE": str(image)}.get(word, word) for word in PREDICTIONS[name]]
        output = regard(*given, tree=tree)
        text = output.stdout.replace(str(run), "RUN").replace(str(image), "IMAGE")
        result["prediction"] = text or f"exit {output.returncode}: {output.stderr[-500:]}"
    return result


def record(out: Path, tree: Path, only: list[str]) -> None:
    names = [path.stem for path in sorted((tree / "recipes").glob("*.toml"))]
    names = [name for name in [*names, "demo"] if not only or name in only]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        runs, results = Path(folder), {}
        Image.fromarray((np.indices((28, 28)).sum(axis=0) * 4).astype(np.uint8)).save(runs / "image.png")
        for group in ([n for n in names if n not in AFTER], [n for n in names if n in AFTER]):
            for name, result in zip(group, pool.map(lambda n: record_one(n, tree, runs), group), strict=True):
                results[name] = result
                print(f"{name:26} {result.get('seconds', 'FAILED')!s:>8}", flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True).stdout.strip()
    out.write_text(json.dumps({"commit": commit, "results": results}, indent=1, ensure_ascii=False) + "\n")


def compare(before: Path, after: Path) -> int:
    old, new = (json.loads(path.read_text())["results"] for path in (before, after))
    different = 0
    for name in new:
        a, b = old.get(name, {}), new[name]
        if "losses" not in a or "losses" not in b:
            print(f"{name:26} no result: {(b if 'losses' not in b else a).get('failed', 'not recorded')[-300:]}")
            different += 1
            continue
        gap = max((abs(x - y) for x, y in zip(a["losses"], b["losses"], strict=False)), default=0.0)
        words = [
            "losses equal" if a["losses"] == b["losses"] else f"losses differ by up to {gap:.3g}",
            "weights equal" if a["weights"] == b["weights"] else "weights differ",
            "prediction equal" if a.get("prediction") == b.get("prediction") else "prediction differs",
        ]
        different += any("differ" in word for word in words)
        print(f"{name:26} {', '.join(words)}")
    print(f"{len(new) - different} of {len(new)} equal")
    return int(different > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record", help="train every recipe's --smoke form and record the results")
    recorder.add_argument("out", type=Path)
    recorder.add_argument("--tree", type=Path, default=ROOT, help="another checkout to record (default: this one)")
    recorder.add_argument("--only", nargs="*", default=[], help="names of recipes")
    comparer = commands.add_parser("compare", help="list the differences of two recordings; exit code 1 if any")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "compare":
        return compare(args.before, args.after)
    record(args.out, args.tree.resolve(), args.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
