"""Baselines for text classification without a Transformer.

    python benchmarks/sentiment.py recipes/nsmc.toml --data data/nsmc -o benchmarks/results/sentiment-nsmc-cpu.json
    python benchmarks/sentiment.py recipes/nsmc.toml --data data/nsmc --fraction 0.01 --quality nsmc-1.json -o 1.json

    majority   always the most frequent class
    linear     scikit-learn: tf-idf of character n-grams (1 to 4, in at least two texts), logistic regression
    cnn        torch: characters, convolutions of widths 2 to 5 with 128 filters each, the maximum over the text,
               dropout 0.5 (Kim 2014, arXiv 1408.5882)

Both are trained on the recipe's training set and tuned on its validation set: the linear model its regularisation, the
network its number of epochs. So all models of a table use the same texts and labels. Each seed samples a `--fraction`
and the network's weights; the linear model is deterministic. `--quality` adds the results of `quality.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure
import torch
from torch import Tensor, nn

from regard.data.batch import Ragged
from regard.data.labels import Example
from regard.data.pack import Labelled
from regard.data.streams import Batches
from regard.metrics.classification import evaluate_classes
from regard.models.recipe import override, read_recipe, smoke_form
from regard.samples import sample_folder
from regard.tasks.text_classification import TextClassification
from regard.text.tokenizer import Tokenizer

STRENGTHS = (0.3, 1.0, 3.0, 10.0)  # of the linear model: C, the inverse of its regularisation
EPOCHS, RATE, BUDGET = 8, 1e-3, 8192  # of the network
WIDTHS, FILTERS, DIM = (2, 3, 4, 5), 128, 128


@dataclasses.dataclass(frozen=True)
class Texts:
    """The input of every model."""

    train: list[Example]
    valid: list[Example]
    test: list[Example]
    classes: tuple[str, ...]

    def labels(self, rows: Sequence[Example]) -> Tensor:
        return torch.tensor([self.classes.index(one.label) for one in rows])

    def evaluate(self, probabilities: Tensor, rows: Sequence[Example]) -> dict[str, Any]:
        return evaluate_classes(probabilities, self.labels(rows), self.classes)


def read(args: argparse.Namespace, seed: int) -> Texts:
    """The recipe's texts, with the fraction of labels given by `data.fraction` and the seed."""
    tables = read_recipe(args.recipe)
    plain = {name: one for name, one in tables.items() if name != "smoke"}
    tables = smoke_form(tables, args.recipe) if args.smoke else plain
    folder = sample_folder(args.data or tables["data"].get("folder", ".")) or Path(
        args.data or Path(args.recipe).parent
    )
    tables["data"] = {**tables["data"], "folder": str(folder.resolve())}
    tables = override(tables, [f"data.fraction={args.fraction}", f"train.seed={seed}"])
    task = TextClassification(tables, Path("nowhere"), torch.device("cpu"))
    task.check_data()
    name = next(name for name in task.sets if name != "valid")
    return Texts(task.examples("train"), task.examples("valid"), task.examples(name), task.data.classes)


def read_all(args: argparse.Namespace) -> dict[int, Texts]:
    """By seed; all labels are the same ones for every seed, and read once."""
    if args.fraction == 1:
        return dict.fromkeys(args.seeds, read(args, args.seeds[0]))
    return {seed: read(args, seed) for seed in args.seeds}


def majority(texts: Texts, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    counts = texts.labels(texts.train).bincount(minlength=len(texts.classes))
    return texts.evaluate((counts / counts.sum()).expand(len(texts.test), -1), texts.test)


def linear(texts: Texts, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    least = 2 if len(texts.train) > 5000 else 1
    vectors = TfidfVectorizer(analyzer="char", ngram_range=(1, 4), min_df=least, sublinear_tf=True, lowercase=False)
    known = vectors.fit_transform([one.text for one in texts.train])
    labels = texts.labels(texts.train).numpy()
    best: tuple[float, Any] | None = None
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=300).fit(known, labels)
        found = torch.from_numpy(model.predict_proba(vectors.transform([one.text for one in texts.valid])))
        accuracy = texts.evaluate(found, texts.valid)["accuracy"]
        if best is None or accuracy > best[0]:
            best = accuracy, model
    assert best is not None
    outputs = best[1].predict_proba(vectors.transform([one.text for one in texts.test]))
    return texts.evaluate(torch.from_numpy(outputs), texts.test)


class Convolutions(nn.Module):
    """Character embeddings, convolutions, maximum over the text."""

    def __init__(self, vocab_size: int, classes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, DIM, padding_idx=0)
        self.widths = nn.ModuleList(nn.Conv1d(DIM, FILTERS, width, padding=width - 1) for width in WIDTHS)
        self.dropout, self.classify = nn.Dropout(0.5), nn.Linear(FILTERS * len(WIDTHS), classes)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).transpose(1, 2)  # [B, DIM, N]
        found = [torch.relu(detect(x)).amax(dim=2) for detect in self.widths]
        logits: Tensor = self.classify(self.dropout(torch.cat(found, dim=1)))
        return logits


def cnn(texts: Texts, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    tokenizer = Tokenizer.train(
        (one.text for one in texts.train), "char", min_count=2 if len(texts.train) > 5000 else 1
    )
    device = torch.device(args.device)
    model = Convolutions(len(tokenizer), len(texts.classes)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    train, valid, test = (_ids(texts, rows, tokenizer) for rows in (texts.train, texts.valid, texts.test))
    batches, best = Batches(train, BUDGET, seed), (-1.0, {})
    for epoch in range(EPOCHS):
        model.train()
        for rows in batches.plan(epoch):
            batch = train.batch(rows).to(device)
            loss = nn.functional.cross_entropy(model(batch.text), batch.labels[:, 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = texts.evaluate(_answers(model, valid, device), texts.valid)["accuracy"]
        if accuracy > best[0]:
            best = accuracy, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(best[1])
    return texts.evaluate(_answers(model, test, device), texts.test)


def _ids(texts: Texts, rows: Sequence[Example], tokenizer: Tokenizer) -> Labelled:
    return Labelled(Ragged.of(tokenizer.encode_batch([one.text for one in rows], add_eos=True)), texts.labels(rows))


@torch.inference_mode()
def _answers(model: Convolutions, data: Labelled, device: torch.device) -> Tensor:
    model.eval()
    found = torch.empty(len(data), model.classify.out_features)
    for rows in Batches(data, BUDGET, 0).plan(0):
        found[rows] = model(data.batch(rows).text.to(device)).softmax(dim=1).cpu()
    return found


MODELS: dict[str, Callable[[Texts, argparse.Namespace, int], dict[str, Any]]] = {
    "majority": majority, "linear": linear, "cnn": cnn
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", help='a recipe with task = "text-classification"')
    parser.add_argument("--data", help="folder of the data files, or sample:NAME (default: that of the recipe)")
    parser.add_argument("--fraction", type=float, default=1.0, help="fraction of the training labels (default: 1)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--quality", nargs="+", type=Path, default=[], metavar="FILE", help="results of quality.py")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true", help="the recipe's --smoke form")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    texts = read_all(args)
    for name in args.only:
        begin = time.perf_counter()
        evaluations = [MODELS[name](texts[seed], args, seed) for seed in args.seeds]
        rows.append(_row(name, evaluations, (time.perf_counter() - begin) / len(evaluations)))
        print(f"{name}: accuracy {rows[-1]['accuracy']['mean']:.4f}", flush=True)
    for path in args.quality:
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        found = [next(one for name, one in reversed(run["scores"].items()) if name != "valid") for run in runs]
        rows.append(_row(path.stem, found, statistics.mean(run["seconds"] for run in runs)))
    data = {"recipe": Path(args.recipe).name, "fraction": args.fraction, "seeds": args.seeds}
    measure.write(args.out, {"kind": "classes", "machine": measure.machine(args.device), **data, "rows": rows})


def _row(name: str, found: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Mean and spread over the seeds of the metrics in the table."""
    row: dict[str, Any] = {"model": name}
    for figure in ("accuracy", "macro_f1", "loss", "calibration_error"):
        values = [one[figure] for one in found]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        row[figure] = {"mean": round(statistics.mean(values), 5), "deviation": round(spread, 5), "all": values}
    return {**row, "examples": found[0]["examples"], "seconds": round(seconds, 1)}


if __name__ == "__main__":
    main()
