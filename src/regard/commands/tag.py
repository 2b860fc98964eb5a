"""Tag the words of texts: names, places, dates, or parts of speech, whatever the model was trained on. Texts are
arguments, the lines of files (of a table, one column), or the lines of standard input. The output has one line per
word, with its tag after a tab, and a blank line after each text (CoNLL). With --json it also has the entities, each
with its type, the characters of the text from start to before end, and the mean probability of its tags. Words are
separated by spaces and, if they were in training, by punctuation.

examples:
  regard tag runs/entities "Florence Young moved to Austin in May 2021."
  regard tag runs/entities "정선은 3월 2일에 강진에서 강의를 했다." --json
  regard tag runs/entities                          enter texts at a prompt
  regard tag runs/entities --files news.txt -o news.conll
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from regard.commands.inputs import Inputs, Item, check_inputs, note
from regard.commands.prediction import Chunk, Shown, input_options, open_predictor, predict_inputs

if TYPE_CHECKING:
    from regard.predict.tagger import TagPrediction

ARGUMENTS = input_options(
    "TEXT", "texts to tag", "text: text, words, entities, file, row", column="column of a table (default: text)"
)


def run(args: argparse.Namespace) -> int:
    from regard.predict.tagger import Tagger

    check_inputs(args)
    tagger = open_predictor(args, Tagger)

    def predict(chunk: Chunk) -> list[TagPrediction]:
        return tagger.predict(chunk.texts)

    def show(item: Item, prediction: TagPrediction) -> Shown:
        value = prediction.to_dict()
        if text := value.pop("note"):
            note(f"{item.text[:40]} …: {text}")
        yield {"text": item.text, **value, **item.origin}, [*((one.word, one.tag) for one in prediction.words), ("",)]

    return predict_inputs(args, Inputs("text"), predict, show, size=tagger.BATCH)
