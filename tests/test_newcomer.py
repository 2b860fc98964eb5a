"""An afternoon with Regard: someone with files in odd formats tries everything from the command line.

Nothing here may give a traceback, a wrong result in silence, or an error without a remedy. Models are tiny and trained
for seconds on made-up data, so nothing is said about quality; other tests cover every point in depth.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from regard.cli import main

SMALL = "dim = 32\nlayers = 1\nheads = 2\nff_dim = 64\nmax_length = 64\n"
GPT2 = SMALL + 'position = "learned"\nnorm_order = "pre"\nembed_scale = false\nactivation = "gelu-tanh"\n'
BERT = SMALL + 'position = "learned"\nembed_norm = true\nembed_scale = false\nactivation = "gelu"\n'
TRAIN = "[train]\nsteps = {steps}\nbatch_tokens = 512\nlog_every = 5\nlr = 5e-3\n"
NOUNS = {"dog": "개", "cat": "고양이", "house": "집", "tree": "나무", "book": "책", "car": "자동차"}
VERBS = {"sees": "보았다", "likes": "좋아한다", "has": "가졌다"}
GOOD, BAD = ["좋다", "재밌다", "최고"], ["별로", "지루하다", "최악"]


class Reply(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


Call = Callable[..., Reply]


@pytest.fixture
def regard(shop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """`regard ARGUMENTS` in the folder of the shop; it never prints a traceback."""
    monkeypatch.chdir(shop)

    def call(*arguments: object, stdin: str = "") -> Reply:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        reply = Reply(code, *capsys.readouterr())
        assert "Traceback" not in reply.err and "unexpected" not in reply.err, reply.err
        return reply

    return call


def pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Sentences of three words and their translations."""
    source, rows = random.Random(seed), []
    for _ in range(count):
        subject, verb, thing = (source.choice(sorted(words)) for words in (NOUNS, VERBS, NOUNS))
        rows.append((f"the {subject} {verb} the {thing}", f"{NOUNS[subject]} {NOUNS[thing]} {VERBS[verb]}"))
    return rows


def reviews(count: int, seed: int = 0) -> list[tuple[str, str]]:
    source = random.Random(seed)
    rows = []
    for _ in range(count):
        label = source.choice(["positive", "negative"])
        words = source.choices(GOOD if label == "positive" else BAD, k=2)
        rows.append((f"이 영화 {' '.join(words)}", label))
    return rows


def write_table(path: Path, rows: list[tuple[str, ...]], separator: str = "\t", encoding: str = "utf-8") -> None:
    path.write_bytes("".join(separator.join(row) + "\n" for row in rows).encode(encoding))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, recipes and four trained runs."""
    folder = tmp_path_factory.mktemp("shop")
    before = Path.cwd()
    os.chdir(folder)
    try:
        write_table(Path("train.tsv"), [("en", "ko"), *pairs(300)])
        write_table(Path("valid.tsv"), [("en", "ko"), *pairs(30, 1)])
        write_table(Path("test.tsv"), [("en", "ko"), *pairs(30, 2)])
        write_table(Path("reviews.tsv"), [("text", "label"), *reviews(200)])
        write_table(Path("reviews-test.tsv"), [("text", "label"), *reviews(40, 2)])
        Path("book.txt").write_text("\n".join(english for english, _ in pairs(400, 3)) + "\n", encoding="utf-8")
        Path("mt.toml").write_text(
            '[data]\ntrain = ["train.tsv"]\nvalid = ["valid.tsv"]\ntest = { test = ["test.tsv"] }\nsource = "en"\n'
            f'target = "ko"\n[text]\nkind = "word"\n[model]\n{SMALL}{TRAIN.format(steps=120)}'
        )
        Path("labels.toml").write_text(
            'task = "text-classification"\n[data]\ntrain = ["reviews.tsv"]\ntest = { test = ["reviews-test.tsv"] }\n'
            f'text = "text"\nlabel = "label"\nmax_length = 32\n[text]\nkind = "char"\n[model]\n{BERT}'
            + 'pooling = "cls"\npooler = true\n'
            + TRAIN.format(steps=40)
        )
        Path("lm.toml").write_text(
            f'task = "language-modeling"\n[data]\ntrain = ["book.txt"]\n[text]\nkind = "char"\n[model]\n{GPT2}'
            + TRAIN.format(steps=40)
            + "pack = 64\n"
        )
        Path("masked.toml").write_text(
            'task = "masked-language-modeling"\n[data]\ntrain = ["book.txt"]\n[text]\nkind = "word"\n[model]\n'
            f"{BERT}head_layer = true\nlogit_bias = true\n{TRAIN.format(steps=20)}pack = 64\n"
        )
        for name in ("mt", "labels", "lm", "masked"):
            assert main(["train", f"{name}.toml", "-o", f"runs/{name}", "--device", "cpu"]) == 0
    finally:
        os.chdir(before)
    return folder


# --- 1 to 5: results that would be wrong in silence


def test_an_exported_folder_gives_the_same_texts(regard: Call) -> None:
    pytest.importorskip("transformers", reason="install it with  pip install 'regard[hf]'")
    for run in ("mt", "labels", "lm", "masked"):
        reply = regard("export", f"runs/{run}", "--hf", f"hf-{run}", "--check", "--json")
        assert reply.code == 0, reply.err
        result = json.loads(reply.out)
        assert result["identical"] == result["compared"] > 0
        assert (result["inputs"] == "generated") == (run in ("lm", "masked"))  # which have no other set
    names = json.loads(Path("hf-labels/config.json").read_text(encoding="utf-8"))["id2label"]
    assert sorted(names.values()) == ["negative", "positive"]
    assert regard("import", "hf-labels", "-o", "runs/back").code == 0
    assert regard("classify", "runs/back", "이 영화 최고").lines[1].split("\t")[0] in ("positive", "negative")


def test_decomposed_korean_is_the_same_text(regard: Call) -> None:
    composed, decomposed = (unicodedata.normalize(form, "이 영화 재밌다 최고") for form in ("NFC", "NFD"))
    replies = [json.loads(regard("classify", "runs/labels", text, "--json").out) for text in (composed, decomposed)]
    assert replies[0]["probabilities"] == replies[1]["probabilities"]


def test_settings_that_spoil_a_run_are_reported(regard: Call) -> None:
    reply = regard("train", "mt.toml", "-o", "runs/odd", "--set", "train.steps=3", "--set", "train.warmup=50")
    assert reply.code == 0 and "warning: train.warmup = 50 >= train.steps = 3" in reply.err
    lines = [json.loads(line) for line in Path("runs/mt/metrics.jsonl").read_text().splitlines()]
    assert sum("valid_loss" in line for line in lines) > 3, "with validation data, it is evaluated by default"


def test_data_that_would_train_something_else(regard: Call) -> None:
    Path("unnamed.toml").write_text(Path("mt.toml").read_text().replace('source = "en"\ntarget = "ko"\n', ""))
    reply = regard("data", "check", "unnamed.toml")
    assert reply.code == 2 and "looks like a header" in reply.err
    Path("same.toml").write_text(Path("mt.toml").read_text().replace('valid = ["valid.tsv"]', 'valid = ["train.tsv"]'))
    assert "data.valid" in regard("data", "check", "same.toml").err
    reply = regard("translate", "runs/mt", stdin="the dog sees the cat\n   \nthe cat has the dog\n")
    assert reply.code == 0 and len(reply.lines) == 3 and reply.lines[1] == "" and reply.lines[0]


# --- 6: sizes and time


def test_a_run_says_how_long_it_takes(regard: Call) -> None:
    reply = regard("train", "mt.toml", "-o", "runs/estimated", "--dry-run", "--json")
    estimate = json.loads(reply.out)
    assert reply.code == 0 and not Path("runs/estimated").exists()
    assert estimate["parameters"] > 0 and estimate["seconds"] > 0


@pytest.mark.slow
def test_progress_is_shown_in_a_pipe(shop: Path) -> None:
    command = [sys.executable, "-m", "regard", "train", "mt.toml", "-o", "runs/piped", "--set", "train.steps=30"]
    done = subprocess.run(command, cwd=shop, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "step 30/30" in done.stderr and "left" in done.stderr


# --- 7: formats


def formats(folder: Path) -> dict[str, str]:
    """The training pairs in every format, with the settings that read them."""
    rows = [("en", "ko"), *pairs(40, 5)]
    write_table(folder / "comma.csv", [tuple(f'"{cell}"' for cell in row) for row in rows], ",")
    (folder / "semicolon.csv").write_bytes("".join(f"{a};{b}\r\n" for a, b in rows).encode("utf-8-sig"))
    write_table(folder / "pipe.csv", rows, "|")
    write_table(folder / "old.tsv", rows, encoding="cp949")
    lines = "".join(json.dumps({"en": a, "ko": b}, ensure_ascii=False) + "\n" for a, b in rows[1:])
    (folder / "pairs.jsonl").write_text(lines, encoding="utf-8")
    table = "".join("\t".join(row) + "\n" for row in rows).encode()
    (folder / "pairs.tsv.gz").write_bytes(gzip.compress(table))
    for number, name in enumerate(("a.en", "a.ko")):
        (folder / name).write_text("".join(row[number] + "\n" for row in rows[1:]), encoding="utf-8")
    columns = 'source = "en"\ntarget = "ko"\n'
    settings = {name: f'train = ["{name}"]\n{columns}' for name in ("comma.csv", "semicolon.csv", "pipe.csv")}
    settings |= {name: f'train = ["{name}"]\n{columns}' for name in ("pairs.jsonl", "pairs.tsv.gz")}
    settings["old.tsv"] = f'train = ["old.tsv"]\nencoding = "cp949"\n{columns}'
    settings["aligned"] = 'train = ["a.en", "a.ko"]\n'
    settings["weights"] = 'train = [{ files = ["a.en", "a.ko"], weight = 2 }, { files = ["pairs.jsonl"] }]\n' + columns
    try:
        import pyarrow
        import pyarrow.parquet

        content = {"en": [row[0] for row in rows[1:]], "ko": [row[1] for row in rows[1:]]}
        pyarrow.parquet.write_table(pyarrow.table(content), folder / "pairs.parquet")
        settings["pairs.parquet"] = f'train = ["pairs.parquet"]\n{columns}'
    except ImportError:
        pass
    try:
        import zstandard

        (folder / "pairs.tsv.zst").write_bytes(zstandard.compress(table))
        settings["pairs.tsv.zst"] = f'train = ["pairs.tsv.zst"]\n{columns}'
    except ImportError:
        pass
    return settings


def test_every_format_is_the_same_data(regard: Call, shop: Path) -> None:
    counts = {}
    for name, data in formats(shop).items():
        Path("format.toml").write_text(
            f'[data]\n{data}[text]\nkind = "word"\n[model]\n{SMALL}{TRAIN.format(steps=1)}', encoding="utf-8"
        )
        reply = regard("data", "check", "format.toml")
        assert reply.code == 0, (name, reply.err)
        counts[name] = "80" if "80" in reply.out else "40" if "40" in reply.out else reply.out
    assert {name: count for name, count in counts.items() if count != "40"} == {"weights": "80"}


def test_another_encoding_is_named(regard: Call, shop: Path) -> None:
    formats(shop)
    Path("cp949.toml").write_text(
        f'[data]\ntrain = ["old.tsv"]\nsource = "en"\ntarget = "ko"\n[model]\n{SMALL}{TRAIN.format(steps=1)}'
    )
    reply = regard("data", "check", "cp949.toml")
    assert reply.code == 2 and 'encoding = "cp949"' in reply.err
    Path("cut.tsv.gz").write_bytes(gzip.compress(Path("train.tsv").read_bytes())[:-20])
    Path("cut.toml").write_text(Path("mt.toml").read_text().replace('"train.tsv"', '"cut.tsv.gz"'))
    assert "the gzip file is truncated" in regard("data", "check", "cut.toml").err


# --- 8: the prediction commands


@pytest.mark.parametrize(
    "command, run, good, bad",
    [
        ("translate", "mt", "the dog sees the cat", None),
        ("generate", "lm", "the dog", "the dog sees " * 20),
        ("classify", "labels", "이 영화 최고", None),
        ("fill", "masked", "the <mask> sees the cat", "no mask"),
    ],
)
def test_inputs_and_outputs_are_alike(regard: Call, command: str, run: str, good: str, bad: str | None) -> None:
    arguments = (command, f"runs/{run}", *(("--max-tokens", 5) if command == "generate" else ()))
    by_argument = regard(*arguments, good, "--json")
    assert by_argument.code == 0 and json.loads(by_argument.lines[0])
    by_input = regard(*arguments, "--json", stdin=f"{good}\n")
    Path("in.txt").write_text(f"{good}\n{good}\n", encoding="utf-8")
    by_file = regard(*arguments, "--files", "in.txt", "-o", f"{command}.jsonl", "--json")
    assert by_input.code == by_file.code == 0 and not by_file.out
    saved = Path(f"{command}.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(saved) == 2 and by_input.lines[0] == by_argument.lines[0]
    hint = regard(*arguments, "in.txt")
    assert hint.code == 2 and "is the name of a file" in hint.err and "--files in.txt" in hint.err
    if bad is not None:
        Path("bad.txt").write_text(f"{good}\n{bad}\n{good}\n", encoding="utf-8")
        reply = regard(*arguments, "--files", "bad.txt", "--json")
        lines = [json.loads(line) for line in reply.lines]
        assert reply.code == 3 and len(lines) == 3 and "error" in lines[1] and "error" not in lines[2]


# --- 9: what the best tool would have


def test_ensembles_prefixes_and_constraints(regard: Call) -> None:
    text = "the dog sees the cat"
    alone = regard("translate", "runs/mt", text).out
    assert regard("translate", "runs/mt", "runs/mt", text).out == alone
    assert regard("translate", "runs/mt", text, "--prefix", "집").out.startswith("집")
    assert "나무" in regard("translate", "runs/mt", text, "--constraint", "나무", "--beam", 4).out
    assert "개" not in regard("translate", "runs/mt", text, "--forbid", "개", "--beam", 4).out


def test_predictions_are_saved(regard: Call) -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    reply = regard("evaluate", "runs/mt", "-o", "predictions", "--json")
    assert reply.code == 0
    hypotheses = Path("predictions/test.txt").read_text(encoding="utf-8").splitlines()
    references = [korean for _, korean in pairs(30, 2)]
    metrics = json.loads(reply.out)["test"]
    tokenize = metrics["signature"].split("tok:")[1].split("|")[0]
    score = sacrebleu.corpus_bleu(hypotheses, [references], tokenize=tokenize).score
    assert score == pytest.approx(metrics["bleu"], abs=0.01)


def test_given_pairs_are_scored_and_words_aligned(regard: Call) -> None:
    (source, target) = pairs(1, 7)[0]
    scores = [json.loads(regard("score", "runs/mt", source, text, "--json").out) for text in (target, "집 집 집")]
    assert scores[0]["log_probability"] > scores[1]["log_probability"] and scores[0]["tokens"]
    assert json.loads(regard("score", "runs/lm", "the dog sees", "--json").out)["per_token"] < 0
    translation, _, links = regard("translate", "runs/mt", source, "--alignments").out.strip().partition(" ||| ")
    words = len(source.split()), len(translation.split())
    assert links and all(int(a) < words[0] and int(b) < words[1] for a, b in (one.split("-") for one in links.split()))


def test_names_are_tagged(regard: Call) -> None:
    pytest.importorskip("seqeval", reason="install it with  pip install 'regard[seqeval]'")
    source, lines = random.Random(1), []
    for _ in range(150):
        name, place = source.choice(["Anna", "민수", "Tom"]), source.choice(["Seoul", "부산", "Oslo"])
        lines += [f"{name} B-PER", "lives O", "in O", f"{place} B-LOC", ""]
    Path("names.conll").write_text("\n".join(lines) + "\n", encoding="utf-8")
    Path("tags.toml").write_text(
        'task = "token-classification"\n[data]\ntrain = ["names.conll"]\ntest = { test = ["names.conll"] }\n[text]\n'
        f'kind = "word"\n[model]\n{SMALL}{TRAIN.format(steps=60)}'
    )
    assert regard("train", "tags.toml", "-o", "runs/tags", "--device", "cpu").code == 0
    assert json.loads(Path("runs/tags/scores.json").read_text())["test"]["f1"] > 0.9
    entities = json.loads(regard("tag", "runs/tags", "Anna lives in Seoul", "--json").out)["entities"]
    assert [(one["type"], one["text"]) for one in entities] == [("PER", "Anna"), ("LOC", "Seoul")]


def test_a_series_with_time_stamps(regard: Call) -> None:
    rows = [f"2024-01-{1 + hour // 24:02d} {hour % 24:02d}:00,{10 + hour % 24}" for hour in range(24 * 20)]
    Path("load.csv").write_text("time,load\n" + "\n".join(rows) + "\n")
    Path("series.toml").write_text(
        'task = "regression"\n[data]\ntrain = ["load.csv"]\ncontext = 24\nhorizon = 3\nperiod = 24\n[model]\n'
        f"{SMALL}{TRAIN.format(steps=5)}"
    )
    assert regard("train", "series.toml", "-o", "runs/series", "--device", "cpu").code == 0
    reply = regard("predict", "runs/series", "--files", "load.csv")
    assert reply.code == 0 and [line.split(",")[0] for line in reply.lines] == [
        "time", "2024-01-21 00:00", "2024-01-21 01:00", "2024-01-21 02:00"
    ]  # fmt: skip


def test_tokenizers(regard: Call) -> None:
    reply = regard("tokenize", "runs/mt", "the dog", "--json")
    tokens = json.loads(reply.out)
    assert tokens["tokens"] and tokens["offsets"][0] == [0, 3]
    trained = regard("tokenizer", "train", "book.txt", "-o", "tokenizers/book", "--vocab-size", 300, "--json")
    assert trained.code == 0 and json.loads(trained.out)["vocab_size"] <= 300
    assert regard("tokenize", "tokenizers/book", "the dog").code == 0


def test_a_run_is_extended(regard: Call) -> None:
    assert regard("train", "lm.toml", "-o", "runs/longer", "--set", "train.steps=5").code == 0
    reply = regard("resume", "runs/longer", "--set", "train.steps=8")
    assert reply.code == 0
    assert json.loads(Path("runs/longer/metrics.jsonl").read_text().splitlines()[-1])["step"] == 8


def test_runs_are_listed_without_torch(shop: Path) -> None:
    code = "import sys; from regard.cli import main; code = main(['runs']); sys.exit(code or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=shop, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "mt" in done.stdout


def test_the_shell_completes(regard: Call) -> None:
    words = [regard("completion", "bash", "--", *typed).out for typed in (("tra",), ("translate", "runs/mt", "--f"))]
    assert "translate\t" in words[0] and "--files\t" in words[1]


# --- 10: hints


@pytest.mark.parametrize(
    "arguments, hint",
    [
        (("train", "mt.toml", "--set", "steps=10"), "--set train.steps=10"),
        (("train", "mt.toml", "--set", "train.stps=10"), "steps"),
        (("evaluate", "runs/lm", "--files", "train.en", "train.ko"), "train.en"),
        (("translate", "runs/lm", "hello"), "regard generate runs/lm"),
        (("generate", "runs/mt", "hello"), "regard translate runs/mt"),
        (("translate", "runs/nowhere", "hello"), "runs/nowhere"),
        (("tranlate", "runs/mt"), "translate"),
        (("translate", "runs/mt", "--baem", "5", "x"), "--beam"),
        (("train", "nowhere.toml"), "nowhere.toml"),
        (("train", "mt.toml", "--set", "model.heads=5"), "heads = 5"),
    ],
)
def test_hints(regard: Call, arguments: tuple[str, ...], hint: str) -> None:
    reply = regard(*arguments)
    assert reply.code == 2 and hint in reply.err and reply.err.startswith("error: ")


def test_families_that_cannot_be_imported(regard: Call) -> None:
    Path("roberta").mkdir(exist_ok=True)
    Path("roberta/config.json").write_text('{"model_type": "roberta"}')
    assert "is not supported yet; supported are" in regard("import", "roberta").err


# --- start-up: what remains beside PyTorch


def test_help_needs_no_torch(shop: Path) -> None:
    code = "import sys; from regard.cli import main; main(['translate', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=shop, capture_output=True, timeout=60)
    assert done.returncode == 0
