"""Examples of a run: its own test inputs, saved and read again by the page; and inputs unlike the training data."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fastapi")

from explorer import SMALL, make_decoder, make_masked, make_numbers, make_translator
from regard.data.numeric import parse_numbers
from regard.explore.inside import Inside
from regard.explore.server.inputs import SENTENCES, covered, read_examples, unlike
from regard.explore.server.models import Models, find_runs
from regard.models.config import ModelConfig
from regard.tasks.regression import Regression
from regard.text.scripts import scripts
from regard.training.examples import LONGEST, as_json, choose, describe


def task_of(inside):
    """What a task has that describes its examples."""
    tokenizers = {"tokenizer": inside.bundle.source}
    return SimpleNamespace(tokenizers=tokenizers, model_config=inside.config, as_example=lambda input: input)


def test_examples_of_different_targets_come_first_and_long_texts_last():
    inputs = ["good", "great", "bad", "x" * (LONGEST + 1), "fine"]
    assert choose(inputs, ["+", "+", "-", "0", "+"])[:2] == [("good", "+"), ("bad", "-")]
    assert "x" * (LONGEST + 1) not in [input for input, _ in choose(inputs, ["+"] * 5)]
    assert choose(["y" * 999], [None]) == [("y" * LONGEST, None)]  # better than none


def test_an_image_is_kept_byte_by_byte(tmp_path):
    pixels = torch.arange(48, dtype=torch.uint8).view(3, 4, 4)
    one = as_json(pixels)
    assert base64.b64decode(one["pixels"]) == pixels.numpy().tobytes()
    folder = make_decoder(tmp_path / "run")
    (folder / "examples.json").write_text(json.dumps({"inputs": [{**one, "target": "cat"}]}))
    models = Models(find_runs(folder))
    (example,) = models.describe("run")["examples"]
    assert example["target"] == "cat"
    assert models.images[example["image"]] == pixels.permute(1, 2, 0).contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"inputs": 3}', '{"inputs": [1]}', '{"inputs": [{"pixels": "?", "shape": [1]}]}']
)
def test_a_damaged_file_of_examples_is_no_catastrophe(tmp_path, content):
    folder = make_decoder(tmp_path / "run")
    (folder / "examples.json").write_text(content)
    assert Models(find_runs(folder)).describe("run")["examples"] is None


def test_a_model_without_examples_gets_sentences_that_its_tokenizer_covers(tmp_path):
    decoder = Inside.open(make_decoder(tmp_path / "decoder"))  # bytes: everything is covered
    assert covered(decoder)[0] == SENTENCES[0]
    translator = Inside.open(make_translator(tmp_path / "translator"))  # words of one English sentence
    assert covered(translator)[0] == "the cat sat on the mat"


def test_an_input_unlike_the_training_data_is_recognised(tmp_path):
    folder = make_decoder(tmp_path / "run")
    inside = Inside.open(folder)
    kinds = lambda text: [note["kind"] for note in unlike(inside, inside.reader.read(text))]  # noqa: E731
    assert kinds("the cat sat") == []  # nothing is known about the data
    assert kinds("나는 학교에 간다") == ["bytes"]  # but the tokenizer has two tokens per letter
    content = {"inputs": [], "scripts": scripts("the animal did not cross the street")}
    content |= {"tokens_per_character": 0.4, "tokens": 9}
    (folder / "examples.json").write_text(json.dumps(content))
    assert read_examples(folder)["scripts"] == {"LATIN": 1.0}
    assert kinds("the animal did not cross the street") == []
    assert kinds("나는 학교에 간다") == ["script"]
    assert kinds("Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich") == ["fertility"]
    words = Inside.open(make_translator(tmp_path / "words"))
    (words.bundle.path / "examples.json").write_text(json.dumps({"inputs": [], "tokens": 3}))
    (note,) = unlike(words, words.reader.read("the animal sat on the mat"))
    assert note == {"kind": "length", "what": "6", "trained": "3"}
    (words.bundle.path / "examples.json").unlink()
    (note,) = unlike(words, words.reader.read("the animal zebra sat"))
    assert note == {"kind": "unknown", "what": "zebra"}
    (note,) = unlike(words, words.reader.read("x" * 2000))
    assert note["what"] == "x" * 40 + "…"


def test_a_text_longer_than_the_rows_of_training_is_recognised(tmp_path):
    inside = Inside.open(make_decoder(tmp_path / "run"))
    inside.bundle.tables["train"] = {"pack": 4}
    text = "the animal did not cross the street"
    (note,) = unlike(inside, inside.reader.read(text))
    assert note == {"kind": "row", "what": str(len(inside.bundle.source.encode(text))), "trained": "4"}


def test_numbers_unlike_the_training_data_are_recognised(tmp_path):
    rule = {"low": 0.0, "high": 100.0}
    inside = Inside.open(make_numbers(tmp_path / "numbers", longest=3, rule=rule))
    notes = unlike(inside, inside.look("10 120 -7 30").input)
    assert notes[0] == {"kind": "range", "what": "120, -7", "trained": "0 … 100"}
    assert notes[1] == {"kind": "numbers", "what": "4", "trained": "3"}
    assert unlike(inside, inside.look("10 20 30").input) == []


def test_a_run_of_numbers_begins_with_its_own_test_data(tmp_path):
    series = {"seasonal": {"steps": 200, "channels": 2}, "context": 12, "horizon": 3, "period": 12}
    for data in ({"rule": {"train": 20, "valid": 5, "test": 5}, "longest": 4}, series):
        tables = {"data": data, "model": SMALL, "train": {"steps": 1, "batch_tokens": 64}}
        task = Regression(tables, tmp_path, torch.device("cpu"))
        task.check_data()
        inputs, targets = task.inputs("test", 5), task.references("test", 5)
        task.model_config = ModelConfig(input="features", output_head="values", feature_dim=1)
        kept = describe(task, "test", inputs, targets)
        batch = task.numbers.rows["test"]
        for at, one in enumerate(kept["inputs"]):
            for text, part, is_real in (
                (one["text"], batch.source, batch.source_is_real),
                (one["target"], batch.target, batch.target_is_real),
            ):
                real = part[at] if is_real is None else part[at][is_real[at]]
                numbers = torch.tensor(parse_numbers(text)).view(real.shape)
                torch.testing.assert_close(task.data.normalize(numbers), real, atol=1e-3, rtol=1e-3)
        assert len(kept["inputs"]) == 5


def test_no_example_of_a_run_is_called_unlike_its_data(tmp_path):
    folder = make_decoder(tmp_path / "run")
    inside = Inside.open(folder)
    texts = ["the animal did not cross the street"] * 9 + ["Friday, 1976-07-04, 12:30:59", "1"]
    task = task_of(inside)
    content = describe(task, "test", texts, [None] * len(texts))
    (folder / "examples.json").write_text(json.dumps(content))
    date = texts[-2]  # "1" is too short to count
    assert content["tokens_per_character"] == len(inside.bundle.source.encode(date)) / len(date)
    assert [unlike(inside, inside.reader.read(text)) for text in texts] == [[]] * len(texts)


def test_the_examples_of_a_run_fit_its_positions(tmp_path):
    inside = Inside.open(make_decoder(tmp_path / "run", position="learned", max_length=12))
    task = task_of(inside)
    long = "the animal did not cross the street because it was too tired"
    kept = describe(task, "test", [long, "the cat sat", long], ["0", "1", "2"])["inputs"]
    assert kept == [{"text": "the cat sat", "target": "1"}]
    kept = describe(task, "test", [long], ["0"])["inputs"]  # better than none, but the target is not that of the part
    assert len(kept) == 1 and long.startswith(kept[0]["text"]) and kept[0]["target"] is None
    assert len(inside.look(kept[0]["text"]).input.source_labels) > 3  # the model reads it


def test_a_masked_model_begins_with_a_masked_word_and_its_target(tmp_path):
    inside = Inside.open(make_masked(tmp_path / "masked"))
    task = task_of(inside)
    (kept,) = describe(task, "valid", ["the animal did not cross"], [None])["inputs"]
    assert kept == {"text": "the animal <mask> not cross", "target": "did"}
    assert [place.expected is None for place in inside.look(kept["text"]).output.positions].count(True) == 1


def test_scripts_are_fractions_of_the_letters():
    assert scripts("한글 abc 漢 123!") == {"LATIN": 0.5, "HANGUL": 1 / 3, "HAN": 1 / 6}
    assert scripts("123 !") == {}
