"""Tagged sentences: reading, schemes, entities, encoding of words, metrics against seqeval."""

from __future__ import annotations

import gzip
import json
import random
import sys
import unicodedata

import pytest
import torch

from regard.cli import main
from regard.data.batch import Labels
from regard.data.encode import store_tagged
from regard.data.entities import sentences
from regard.data.pack import Tagged, TagPacks
from regard.data.tags import Scheme, Sentence, TagData, check_sets, find_entities, is_prefixed, split_words
from regard.errors import MissingExtra, UserError
from regard.metrics.tagging import evaluate_tags, format_tags
from regard.text.tokenizer import Tokenizer
from regard.text.words import encode_words

TAGS = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in ("PER", "LOC"))]
CONLL = """-DOCSTART- -X- O O

EU NNP I-NP B-ORG
rejects VBZ I-VP O

Tom NNP I-NP B-PER
Kim NNP I-NP I-PER
. . O O
"""


def read(text: str, path="train.conll", **settings) -> list[Sentence]:
    write = gzip.open if str(path).endswith(".gz") else open
    with write(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return list(TagData(train=(str(path),), **settings).read([str(path)]))


def problem(text: str, path: str = "train.conll", **settings) -> str:
    with pytest.raises(UserError) as error:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        check_sets(TagData(train=(path,), **settings))
    return str(error.value)


# --- files


def test_columns_are_chosen_by_number_and_document_marks_skipped(empty_folder):
    first, second = read(CONLL)
    assert first == (("EU", "rejects"), ("B-ORG", "O"), "train.conll", 3)
    assert second.words == ("Tom", "Kim", ".") and second.tags == ("B-PER", "I-PER", "O") and second.line == 6
    assert read(CONLL, tags="2")[0].tags == ("NNP", "VBZ")
    assert read(CONLL, tokens="2", tags="1")[0].words == ("NNP", "VBZ")
    assert read(CONLL.replace(" ", "\t")) == [first, second]
    assert [one.words for one in read(CONLL, "train.conll.gz")] == [first.words, second.words]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("서울은\tB-LOC\n\n\n\n비\tO", [("서울은",), ("비",)]),
        ("New York\tB-LOC\nis\tO\n", [("New York", "is")]),  # a tab separates, so a token may have a space
        ("a\u00a0b O\r\n🙂  O\r\n", [("a\u00a0b", "🙂")]),  # no-break spaces belong to the token
        (unicodedata.normalize("NFD", "서울") + " B-LOC\n한 O", [(unicodedata.normalize("NFD", "서울"), "한")]),
        ("\ufeffTom B-PER\n \t \nKim B-PER", [("Tom",), ("Kim",)]),
    ],
)
def test_odd_lines(empty_folder, text, words):
    assert [one.words for one in read(text)] == words


def test_universal_dependencies(empty_folder):
    lines = [
        "# text = I can't",
        "1\tI\ti\tPRON",
        "2-3\tcan't\t_\t_",
        "2\tca\tcan\tAUX",
        "3\tn't\tnot\tPART",
        "3.1\tx\t_\tX",
    ]
    (one,) = read("\n".join(lines) + "\n", "train.conllu")
    assert one.words == ("I", "ca", "n't") and one.tags == ("PRON", "AUX", "PART")


def test_tables_of_lists(empty_folder):
    rows = [{"tokens": ["Tom", "ran"], "tags": ["B-PER", "O"]}, {"tokens": [], "tags": []}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    assert [one[:2] for one in read(text, "train.jsonl")] == [(("Tom", "ran"), ("B-PER", "O"))]
    numbers = json.dumps({"words": ["Tom", "ran"], "ner": [1, 0]})
    (one,) = read(numbers, "train.jsonl", tokens="words", tags="ner", names={"0": "O", "1": "B-PER"})
    assert one.tags == ("B-PER", "O")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"tokens": [["서울", "비"]], "tags": [["B-LOC", "O"]]})
    parquet.write_table(table, "train.parquet")
    (one,) = TagData(train=("train.parquet",)).read(["train.parquet"])
    assert one[:2] == (("서울", "비"), ("B-LOC", "O"))


@pytest.mark.parametrize(
    ("text", "path", "settings", "message"),
    [
        ("Tom B-PER\nran\n", "a.conll", {}, "line 2: has 1 column instead of 2"),
        ("Tom\nran\n", "a.conll", {}, "line 1: has 1 column for column 2"),
        ("Tom B-PER\n", "a.conll", {"tags": "4"}, "line 1: has 2 columns for column 4"),
        ("word tag\nTom B-PER\n", "a.conll", {}, "line 1: looks like a header"),
        ("Tom\t\n", "a.conll", {}, "line 1: token 1: its tag is empty"),
        ("a O\nb\0 O\n", "a.conll", {}, "line 2: contains a NUL character"),
        ("", "a.conll", {}, "no sentences"),
        ("Tom O\n", "a.conll", {"tokens": "words"}, "columns are counted"),
        ("Tom,O\n", "a.csv", {}, "CSV is not a format of tagged sentences"),
        ('{"tokens": ["a", "b"], "tags": ["O"]}', "a.jsonl", {}, "line 1: has 2 tokens but 1 tags"),
        ('{"tokens": "a b", "tags": ["O"]}', "a.jsonl", {}, "column 'tokens' is str, not a list"),
        ('{"tokens": ["a"], "tag": ["O"]}', "a.jsonl", {}, "column 'tags' is missing; did you mean 'tag'?"),
        ("a O\nb O\n", "a.conll", {}, "every token has the tag 'O'"),
        ("a B-X\nb L-X\n", "a.conll", {}, "BILOU becomes BIOES with L- as E- and U- as S-"),
        ("a B-X\nb X\n", "a.conll", {}, "tag 'X': with B- and I- in use"),
        ("a B-X\nb I-Y\n", "a.conll", {"classes": ["O", "B-X"]}, "tag 'I-Y' does not occur in training"),
    ],
)
def test_problems_name_the_line(empty_folder, text, path, settings, message):
    assert message in problem(text, path, **settings)


def test_a_bad_line_leaves_out_its_sentence(empty_folder):
    assert [one.words for one in read("a O\nb\n\nc O\nd B-X\n", skip_bad=True)] == [("c", "d")]


def test_settings_are_checked():
    for settings, message in (
        ({"tokens": "1", "tags": "1"}, "two different columns"),
        ({"tags": "0"}, "columns are counted from"),
        ({"classes": ["O"]}, "name two or more"),
        ({"max_length": 2}, "max_length = 2"),
        ({"word_dropout": 1.0}, "word_dropout"),
    ):
        with pytest.raises(UserError, match=message):
            TagData(train=("a",), **settings)


# --- schemes and entities


def scheme_of(*tags: str) -> Scheme:
    scheme = Scheme()
    for one in tags:
        scheme.add(Sentence(("x",) * len(one.split()), tuple(one.split()), "", 1))
    return scheme


@pytest.mark.parametrize(
    ("tags", "name", "invalid"),
    [
        (["B-A I-A O B-B", "O"], "IOB2", 0),
        (["B-A I-A O I-A", "I-B O"], "IOB2", 2),
        (["B-A I-B"], "IOB2", 1),
        (["I-A I-A O I-B B-B", "O"], "IOB1", 0),
        (["I-A O"], "IOB1", 0),
        (["S-A B-A I-A E-A O"], "BIOES", 0),
        (["B-A O E-A", "S-B I-B"], "BIOES", 4),  # B before O, E after O, I after S, I before the end
    ],
)
def test_schemes_are_detected(tags, name, invalid):
    scheme = scheme_of(*tags)
    assert (scheme.name, scheme.invalid) == (name, invalid)


def test_entities_are_those_of_seqeval():
    get_entities = pytest.importorskip("seqeval.metrics.sequence_labeling").get_entities
    generator = random.Random(1)
    for _ in range(3000):
        tags = generator.choices(TAGS, k=generator.randint(0, 9))
        assert [(kind, a, b - 1) for kind, a, b in find_entities(tags)] == get_entities(tags), tags


def test_parts_of_speech_are_not_a_scheme():
    assert not is_prefixed(["NOUN", "VERB", "-LRB-", "O", "E-X"]) and is_prefixed(["O", "I-X"])


def test_data_check_reports_scheme_and_transitions(empty_folder, capsys):
    (empty_folder / "train.conll").write_text("a B-X\nb I-X\n\nc I-X\nd O\n", encoding="utf-8")
    (empty_folder / "valid.conll").write_text("a I-X\nb I-X\n", encoding="utf-8")
    recipe = 'task = "token-classification"\n[data]\ntrain = ["train.conll"]\nvalid = ["valid.conll"]\n'
    (empty_folder / "mine.toml").write_text(recipe)
    assert main(["data", "check", "mine.toml"]) == 0
    out = capsys.readouterr().out
    assert "train: 2 sentences, 4 words, IOB2: O 1, B-X 1, I-X 2" in out
    assert "train.conll: 1 x I- without B- before it (IOB2)" in out
    assert "valid.conll: tags are IOB1, but those of the training data IOB2" in out
    assert main(["data", "check", "mine.toml", "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["train"]["scheme"] == "IOB2" and checked["train"]["words"] == 4
    (empty_folder / "train.conll").write_text("a B-X\nb I-X X\n", encoding="utf-8")
    assert main(["data", "check", "mine.toml"]) == 2
    assert "line 2: has 3 columns instead of 2" in capsys.readouterr().err


# --- words and tokens


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('Hi, (Tom) said: "No..."', ["Hi", ",", "(", "Tom", ")", "said", ":", '"', "No", "...", '"']),
        ("서울에 비가 온다.", ["서울에", "비가", "온다", "."]),
        ("... don't", ["...", "don't"]),
        (" \n", []),
    ],
)
def test_punctuation_is_split_off(text, words):
    assert [text[a:b] for a, b in split_words(text, "separate")] == words
    assert [text[a:b] for a, b in split_words(text)] == text.split()


TEXTS = ["Seoul is rainy .", "서울은 비가 온다 .", "Tom Kim 's dog 🙂", "a"]


@pytest.mark.parametrize("kind", ["word", "char", "byte", "bpe", "unigram"])
def test_words_have_the_tokens_of_their_text(kind):
    tokenizer = Tokenizer.train(TEXTS * 5, kind, {"bpe": 300, "unigram": 60}.get(kind))
    encoded = [*encode_words(tokenizer, [text.split() for text in TEXTS], 100)]
    assert [one.ids[1:-1] for one in encoded] == tokenizer.encode_batch(TEXTS)
    for text, one in zip(TEXTS, encoded, strict=True):
        words = text.split()
        assert len(one.first) == len(words) and one.begin == 0 and one.first == sorted(set(one.first))
        if kind in ("word", "char", "unigram"):
            for word, at in zip(words, one.first, strict=True):
                assert word.startswith(tokenizer.token(one.ids[at]).lstrip("▁")) or one.ids[at] == tokenizer.unk


def test_long_sentences_are_split_between_words():
    tokenizer = Tokenizer.train(TEXTS, "char")
    words = ["Seoul", "is", "", "rainy", "x" * 50] * 3
    parts = [*encode_words(tokenizer, [words], 12)]
    assert all(len(part.ids) <= 12 and part.ids[0] == tokenizer.bos and part.ids[-1] == tokenizer.eos for part in parts)
    assert [part.begin for part in parts][1:] == torch.tensor([len(part.first) for part in parts]).cumsum(0)[
        :-1
    ].tolist()
    assert sum(len(part.first) for part in parts) == len(words)
    assert [*encode_words(tokenizer, [[], []], 12)] == []


def test_labels_are_on_first_tokens(tmp_path):
    tokenizer = Tokenizer.train(TEXTS, "char")
    data = TagData(train=("x",), classes=("O", "B-LOC"), max_length=10)
    rows = [
        Sentence(("Seoul", "is"), ("B-LOC", "O"), "", 1),
        Sentence(("is", "Seoul", "a"), ("O", "B-LOC", "O"), "", 2),
    ]
    store = store_tagged([rows], data, tmp_path / "store", tokenizer, str)
    assert store.index["split"] == 1
    batch = Tagged.of(store).batch(torch.arange(3))
    ignore = Labels.IGNORE
    assert batch.labels.tolist() == [
        [ignore, 1, *[ignore] * 5, 0, ignore, ignore],
        [ignore, 0, ignore, ignore, 1, *[ignore] * 5],
        [ignore, ignore, 0, *[ignore] * 7],
    ]
    assert int(batch.tokens) == 5
    packs = TagPacks(Tagged.of(store), 1, 32, seed=1)
    packed = next(iter(packs))
    assert sorted(packed.labels[packed.labels != ignore].tolist()) == [0, 0, 0, 1, 1]
    for at in (packed.labels == 1).nonzero().tolist():
        assert tokenizer.token(int(packed.text[*at])) == "S"


# --- metrics


def predictions(generator: random.Random, classes: list[str]) -> tuple[list[torch.Tensor], list[list[str]]]:
    tags = [generator.choices(classes, k=generator.randint(1, 8)) for _ in range(60)]
    logits = [torch.randn(len(one), len(classes)) for one in tags]
    for rows, one in zip(logits, tags, strict=True):
        rows[torch.arange(len(one)), [classes.index(tag) for tag in one]] += 2
    return [rows.softmax(dim=-1) for rows in logits], tags


def test_metrics_equal_seqeval():
    seqeval = pytest.importorskip("seqeval.metrics")
    probabilities, tags = predictions(random.Random(1), TAGS)
    metrics = evaluate_tags(probabilities, tags, TAGS)
    predicted = [[TAGS[i] for i in rows.argmax(dim=-1)] for rows in probabilities]
    report = seqeval.classification_report(tags, predicted, output_dict=True)
    assert metrics["f1"] == seqeval.f1_score(tags, predicted) == report["micro avg"]["f1-score"]
    assert metrics["precision"] == seqeval.precision_score(tags, predicted)
    assert metrics["recall"] == seqeval.recall_score(tags, predicted)
    assert metrics["accuracy"] == pytest.approx(seqeval.accuracy_score(tags, predicted))
    for kind in ("PER", "LOC"):
        assert metrics["types"][kind]["f1"] == report[kind]["f1-score"]
        assert metrics["types"][kind]["entities"] == report[kind]["support"]
    assert json.loads(json.dumps(metrics)) == metrics
    assert format_tags(metrics)[0].startswith(f"F1 {metrics['f1']:.4f}  precision ")


def test_metrics_by_hand():
    pytest.importorskip("seqeval")
    classes = ["O", "B-X", "I-X"]
    tags = [["B-X", "I-X", "O", "B-X"], ["O", "O"]]
    predicted = [["B-X", "I-X", "O", "O"], ["O", "B-X"]]
    rows = [torch.tensor([[float(tag == name) for name in classes] for tag in one]) for one in predicted]
    metrics = evaluate_tags(rows, tags, classes)
    assert (metrics["precision"], metrics["recall"], metrics["f1"]) == (0.5, 0.5, 0.5)
    assert metrics["accuracy"] == 4 / 6 and metrics["entities"] == 2 and metrics["words"] == 6
    none = evaluate_tags([torch.eye(3)[[0, 0]]], [["O", "O"]], classes)  # neither entities nor predictions of them
    assert none["f1"] == 0.0 and none["accuracy"] == 1.0 and "no entities" in format_tags(none)[2]


def test_parts_of_speech_have_macro_f1_without_seqeval(monkeypatch):
    monkeypatch.setitem(sys.modules, "seqeval.metrics", None)
    classes = ["NOUN", "VERB", "DET"]
    probabilities, tags = predictions(random.Random(2), classes)
    metrics = evaluate_tags(probabilities, tags, classes)
    flat = [
        (tag, classes[i])
        for one, rows in zip(tags, probabilities, strict=True)
        for tag, i in zip(one, rows.argmax(-1), strict=True)
    ]
    scores = []
    for name in classes:
        hit = sum(a == b == name for a, b in flat)
        scores.append(2 * hit / (sum(a == name for a, _ in flat) + sum(b == name for _, b in flat)))
    assert metrics["f1"] == metrics["macro_f1"] == pytest.approx(sum(scores) / 3)
    assert "types" not in metrics and "macro-F1" in format_tags(metrics)[0]
    with pytest.raises(MissingExtra, match=r"pip install 'regard\[seqeval\]'"):
        evaluate_tags([torch.eye(2)], [["B-X", "O"]], ["B-X", "O"])


# --- generated sentences


def test_generated_names_of_the_test_are_not_in_training():
    found = {}
    for split in ("train", "test"):
        found[split] = set()
        for words, tags in sentences(split, 1500, 1):
            assert len(words) == len(tags) and scheme_of(" ".join(tags)).invalid == 0
            for kind, a, b in find_entities(tags):
                if kind != "DATE" and words[a].isascii():
                    found[split].add(" ".join(words[a:b]))
    assert len(found["test"]) > 50 and not found["train"] & found["test"]
    assert [*sentences("train", 5, 1)] == [*sentences("train", 5, 1)] != [*sentences("train", 5, 2)]


def test_korean_particles_follow_the_last_syllable():
    from regard.data.entities import _particle

    assert [_particle(*pair) for pair in (("서울", "은"), ("파리", "은"), ("서울", "으로"), ("인천", "으로"))] == [
        "은",
        "는",
        "로",
        "으로",
    ]
    assert _particle("London", "") == "" and _particle("파리", "에서") == "에서"
