"""Readings: what a model is given to look at, framed as it was in training, with a label for each place.

encoder-decoder   source … </s>      target  <s> …         reads <s> and what stands before, writes the next
decoder           tokens             as they are; an empty text is the token that begins one
encoder           <s> … </s>         BERT's [CLS] … [SEP]; [MASK] in the text is the token of that name
patches           a picture, cut into squares, row by row (with [CLS] in front where the model has it)
features          vectors [regions, size] that another model made
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError
from regard.explore.changes import PartName
from regard.explore.picture import Grid, grid_of, read_features, read_picture
from regard.models.config import ModelConfig
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reading:
    """One input, ready for the model.

    read       the label of what is read at each place that has an output
    expected   the id that stands there, None where none is known
    written    labels of what an encoder-decoder writes: `read` moved by one
    """

    source: Tensor  # ids [1, N], a picture [1, C, H, W] or features [1, R, F]
    source_labels: tuple[str, ...]
    target: Tensor | None = None  # [1, T]
    read: tuple[str, ...] = ()
    expected: tuple[int | None, ...] = ()
    written: tuple[str, ...] = ()
    masked: tuple[int, ...] = ()  # places of [MASK]
    text: str | None = None
    picture: Tensor | None = None  # [C, H, W] between 0 and 1, as it is shown
    grid: Grid | None = None  # how the places of a picture lie in it

    def labels(self, part: PartName) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Labels of the queries and of the keys."""
        if part == "cross":
            return self.written, self.source_labels
        own = self.read if part == "decoder" and self.target is not None else self.source_labels
        return own, own


class Readings:
    """Texts and pictures to ids and pixels and back, for one model."""

    def __init__(
        self, config: ModelConfig, tokenizers: Mapping[str, Tokenizer], tables: Mapping[str, Any], like: Tensor
    ) -> None:
        """`like` is a parameter of the model: pictures take its device and its precision."""
        self.config, self.device, self.like = config, like.device, like
        if config.output_head == "values":
            raise UserError(
                "output_head = 'values': this model reads and writes numbers; only texts and pictures can be shown"
            )
        self.writes = config.architecture in ("encoder-decoder", "recurrent")
        both = tokenizers.get("tokenizer")
        self.source = tokenizers.get("source", both)
        self.target = tokenizers.get("target", both) if self.writes else self.source
        for name, tokenizer, size in (
            ("source", self.source, config.vocab_size if config.input == "tokens" else None),
            ("target", self.target, config.target_size if self.writes else None),
        ):
            if size is not None and tokenizer is not None and len(tokenizer) > size:
                raise UserError(
                    f"the {name} tokenizer has {len(tokenizer):,} pieces, but the model knows {size:,}: "
                    "they do not belong together"
                )
        data = tables.get("data")
        named = data.get("classes") if isinstance(data, dict) else None
        self.classes = [str(name) for name in named] if isinstance(named, list) else []  # as the recipe orders them
        notes = tables.get("hf")
        self.notes: dict[str, Any] = notes if isinstance(notes, dict) else {}

    @property
    def frame(self) -> tuple[int, int]:
        """The ids with which a target begins and ends."""
        target = self._tokenizer(self.target, "target")
        start = self.notes.get("decoder_start_token_id")
        return (target.special_id("bos") if start is None else int(start)), target.special_id("eos")

    def read(self, text: str | None, picture: Any = None, *, cut: bool = False) -> Reading:
        """A text or a picture; `cut` shortens a text that is too long for learned positions, which is refused else."""
        if self.config.input != "tokens":
            if picture is None:
                raise UserError(f"this model reads {self.config.input}, not text: give a picture")
            return self._read_picture(picture)
        if picture is not None:
            raise UserError("this model reads text, not pictures: give a text")
        if text is None:
            raise UserError("text: there is none; give the text that the model shall read")
        return self._read_text(text, cut)

    def _read_text(self, text: str, cut: bool) -> Reading:
        tokenizer = self._tokenizer(self.source, "source")
        masked: tuple[int, ...] = ()
        match self.config.architecture:
            case "decoder":
                ids = tokenizer.encode(text) or self._first(tokenizer)
                expected: list[int | None] = [*ids[1:], None]
            case "encoder":
                ids, masked = self._with_masks(tokenizer, text)
                if cut and self.limit is not None and len(ids) > self.limit:
                    ids = [*ids[: self.limit - 1], ids[-1]]
                expected = [None if at in masked else id for at, id in enumerate(ids)]
            case _:
                ids, expected = [*tokenizer.encode(text), tokenizer.special_id("eos")], []
        self._check_length(len(ids))
        labels = tuple(tokenizer.token(id) for id in ids)
        source = torch.tensor([ids], device=self.device)
        return Reading(source, labels, read=labels, expected=tuple(expected), masked=masked, text=text)

    def _with_masks(self, tokenizer: Tokenizer, text: str) -> tuple[list[int], tuple[int, ...]]:
        """<s> … </s>, where [MASK] in the text is the token of that name, if there is one."""
        mask = tokenizer.mask
        pieces = [text] if mask is None else text.split(tokenizer.token(mask))
        ids = [] if tokenizer.bos is None else [tokenizer.bos]
        masked = []
        for number, piece in enumerate(pieces):
            if number and mask is not None:
                masked.append(len(ids))
                ids.append(mask)
            ids += tokenizer.encode(piece)
        ids += [] if tokenizer.eos is None else [tokenizer.eos]
        if not ids:
            raise UserError("text: it is empty; give at least one word")
        return ids, tuple(masked)

    def _first(self, tokenizer: Tokenizer) -> list[int]:
        if tokenizer.bos is None:
            raise UserError("text: it is empty, and the tokenizer has no token that begins a text; give a word")
        return [tokenizer.bos]

    def _read_picture(self, picture: Any) -> Reading:
        config = self.config
        if config.input == "features":
            features = read_features(picture)
            if features.dim() != 2 or features.shape[1] != config.feature_dim:
                raise UserError(
                    f"features have shape {tuple(features.shape)}: give [regions, feature_dim = {config.feature_dim}]"
                )
            labels = tuple(f"region {index}" for index in range(len(features)))
            return Reading(features[None].to(self.like), labels)
        pixels, shown = read_picture(picture, config)
        grid = grid_of(config)
        return Reading(pixels[None].to(self.like), grid.labels, picture=shown, grid=grid)

    def target_ids(self, text: str) -> list[int]:
        return self._tokenizer(self.target, "target").encode(text)

    def with_target(self, reading: Reading, ids: Sequence[int]) -> Reading:
        """The same source, with what is to be written: <s> and `ids` are read, `ids` and </s> expected."""
        begin, end = self.frame
        read, written = [begin, *ids], [*ids, end]
        self._check_length(len(read))
        return replace(
            reading,
            target=torch.tensor([read], device=self.device),
            read=tuple(map(self.label, read)),
            expected=tuple(written),
            written=tuple(map(self.label, written)),
        )

    def label(self, id: int) -> str:
        """The piece of text that an id of the output stands for; a model may have more rows than its tokenizer ids."""
        target = self._tokenizer(self.target, "target")
        return target.token(id) if id < len(target) else f"#{id}"

    def decode(self, ids: Sequence[int]) -> str:
        target = self._tokenizer(self.target, "target")
        return target.decode([id for id in ids if id < len(target)])

    def class_name(self, index: int) -> str:
        names = self.notes.get("id2label")
        if isinstance(names, dict):
            return str(names.get(str(index), index))
        return self.classes[index] if index < len(self.classes) else f"class {index}"

    def _tokenizer(self, tokenizer: Tokenizer | None, side: str) -> Tokenizer:
        if tokenizer is None:
            raise UserError(f"the folder has no tokenizer for its {side}: add tokenizer.json (or {side}.json) to it")
        return tokenizer

    @property
    def limit(self) -> int | None:
        """The most tokens that the model's positions reach; None: as many as you like."""
        ends = self.config.position == "learned" and self.config.architecture != "recurrent"
        return self.config.max_length if ends else None

    def _check_length(self, length: int) -> None:
        if self.limit is not None and length > self.limit:
            raise UserError(
                f"the text has {length:,} tokens, but the model's learned positions end at "
                f"max_length = {self.config.max_length}: give a shorter one"
            )
