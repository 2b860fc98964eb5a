"""Folders of finished runs, written without training: a recipe, scores, predictions and a learning curve."""

import json

import numpy as np

from regard.metrics.bleu import score, sentence_chrf
from regard.settings import write_toml

WORDS = ("the", "a", "dog", "cat", "man", "woman", "runs", "sits", "over", "under", "red", "blue", "ball", "river")
MODEL = {"architecture": "encoder-decoder", "dim": 16, "layers": 1, "heads": 2, "ff_dim": 32, "vocab_size": 50}
TRAIN = {"steps": 20, "batch_tokens": 256}


def sentences(count, seed=0):
    """`count` random sentences of 5 to 14 words."""
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, size=generator.integers(5, 15))) for _ in range(count)]


def corrupted(references, rate, seed=0):
    """The same with every word replaced by another with probability `rate`."""
    generator = np.random.default_rng(seed)

    def change(word):
        return str(generator.choice(WORDS)) if generator.random() < rate else word

    return [" ".join(map(change, line.split())) for line in references]


def write_run(folder, scores, records, *, seed=1, summary, task="translation", settings=None):
    """A run with these metrics and records by set; `settings` are changes to [model], [train] and [data]."""
    changes = settings or {}
    tables = {"data": {"test": {}}, "model": MODEL, "train": TRAIN}
    tables = {name: {**table, **changes.get(name, {})} for name, table in tables.items()}
    tables["train"]["seed"] = seed
    (folder / "predictions").mkdir(parents=True)
    write_toml(folder / "recipe.toml", {"task": task, **tables})
    (folder / "summary.json").write_text(json.dumps({"task": task, "steps": 20, "metric": "valid_loss", **summary}))
    (folder / "scores.json").write_text(json.dumps(scores))
    for name, rows in records.items():
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        (folder / "predictions" / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    curve = ({"step": step, "seconds": step / 10, "valid_loss": 3 / step} for step in (10, 20))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in curve))
    return folder


def translation_run(folder, references, hypotheses, **options):
    """A run of a translator with these outputs for its test set."""
    rows = [
        {"source": line.upper(), "reference": line, "hypothesis": found, "chrf": sentence_chrf(found, line)}
        for line, found in zip(references, hypotheses, strict=True)
    ]
    summary = {"higher": False, "headline": "BLEU", "test": "bleu"}
    return write_run(folder, {"test": score(hypotheses, references)}, {"test": rows}, summary=summary, **options)


def classifier_run(folder, labels, predicted, **options):
    """A run of a text classifier with these predicted classes."""
    rows = [
        {"text": f"text {number}", "reference": label, "label": found}
        for number, (label, found) in enumerate(zip(labels, predicted, strict=True))
    ]
    accuracy = sum(map(str.__eq__, labels, predicted)) / len(labels)
    summary = {"higher": True, "headline": "accuracy", "test": "accuracy"}
    return write_run(
        folder, {"test": {"accuracy": accuracy}}, {"test": rows}, summary=summary, task="text-classification",
        **options,
    )  # fmt: skip
