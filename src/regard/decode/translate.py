"""Translation: text in, text out, through a model with its tokenizers.

Sentences of similar length are decoded together; the answers come back in the order of the questions, a
line for a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from regard.data.batch import Ragged
from regard.decode.search import greedy
from regard.errors import UserError
from regard.models import EncoderDecoder
from regard.run import load, load_tokenizers
from regard.text.tokenizer import Tokenizer


class Translator:
    """An encoder-decoder with the tokenizers of its two sides."""

    def __init__(self, model: EncoderDecoder, source: Tokenizer, target: Tokenizer) -> None:
        self.model, self.source, self.target = model.eval(), source, target
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> Translator:
        model, tokenizers = load(folder, device), load_tokenizers(folder)
        if not isinstance(model, EncoderDecoder) or not tokenizers:
            raise UserError(
                f"{folder}: shape = {model.config.shape!r} with {len(tokenizers)} tokenizers; "
                "translation needs an encoder-decoder and its tokenizers"
            )
        both = tokenizers.get("tokenizer")
        source, target = tokenizers.get("source", both), tokenizers.get("target", both)
        if source is None or target is None:
            raise UserError(f"{folder}: needs tokenizer.json, or both source.json and target.json")
        return cls(model, source, target)

    def translate(self, lines: Sequence[str], *, batch: int = 128) -> list[str]:
        """One translation for each line; an empty line stays empty."""
        bos, eos = special(self.target, "bos"), special(self.target, "eos")
        ids = framed(self.source, lines)
        table, answers = Ragged(ids), [""] * len(ids)
        rows = [row for row in table.lengths.argsort(stable=True).tolist() if len(ids[row]) > 1]
        for at in range(0, len(rows), batch):
            chosen = rows[at : at + batch]
            source, valid = table.pad(torch.tensor(chosen))
            limit = 2 * source.shape[1] + 50
            if self.model.config.position == "learned":
                limit = min(limit, self.model.config.max_length)
            whole = None if bool(valid.all()) else valid.to(self.device)
            outputs = greedy(self.model, source.to(self.device), whole, bos=bos, eos=eos, limit=limit)
            for row, output in zip(chosen, outputs, strict=True):
                answers[row] = self.target.decode(output)
        return answers


def framed(tokenizer: Tokenizer, lines: Sequence[str], *, begin: bool = False) -> list[list[int]]:
    """ids of each line, ending with </s> and, where `begin`, starting with <s>."""
    before, after = [special(tokenizer, "bos")] if begin else [], [special(tokenizer, "eos")]
    return [before + ids + after for ids in tokenizer.encode_batch(list(lines))]


def special(tokenizer: Tokenizer, name: str) -> int:
    """The id of <s> (bos) or </s> (eos), which translation cannot do without."""
    found: int | None = getattr(tokenizer, name)
    if found is None:
        raise UserError(
            f"the tokenizer has no {name} token, which translation needs: use the one the model was trained with"
        )
    return found
