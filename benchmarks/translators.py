"""One tool in decoding: lines in, translations out, and how many target tokens they have.

All tools have the same weights and lines, so that their translations can be compared:

    regard        `regard.predict.translator.Translator`
    huggingface   transformers.MarianMTModel.generate with its cache, from the folder that `regard export` saves
    ctranslate2   CTranslate2, converted from that folder by its own converter, in fp32 or int8
    regard-ct2    Regard on the folder that `regard export --ctranslate2` saves, in fp32 or int8
    joeynmt       JoeyNMT's search, which has no cache, over our weights (`joey.py`)

A score is log P without a length penalty, which each tool defines differently. Sentences of similar length are
decoded together. From text to text, except for JoeyNMT: from ids to ids.

The tokens of a translation include </s>; one that was truncated at the limit has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from joey import JoeySearch
from torch import Tensor

from regard.data.batch import Ragged
from regard.models.transformer import SequenceToSequence
from regard.predict.bundle import Bundle
from regard.predict.config import SearchConfig
from regard.predict.translator import Translator
from regard.settings import to_dict
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Search:
    """The task of every tool; `least` = `most`: translations of a fixed length."""

    beam: int
    batch: int
    least: int  # minimum tokens
    most: int  # maximum tokens, with </s>


@dataclass(frozen=True)
class Translations:
    texts: list[str]
    tokens: int
    seconds: float
    cpu_seconds: float = 0.0  # of the process that translated

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Tool(Protocol):
    def translate(self, lines: Sequence[str], search: Search) -> Translations: ...


def count_tokens(lengths: Iterable[int], most: int) -> int:
    """Target tokens of translations of these lengths: one more each for </s>, unless truncated."""
    return sum(min(length + 1, most) for length in lengths)


def until_end(ids: Sequence[int], end: int) -> list[int]:
    """The ids before the first `end`."""
    listed = list(ids)
    return listed[: listed.index(end)] if end in listed else listed


def by_length(sequences: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Indices of the sequences in batches of `size`, shortest first."""
    order = sorted(range(len(sequences)), key=lambda row: len(sequences[row]))
    return [order[at : at + size] for at in range(0, len(order), size)]


class Counting(Tokenizer):
    """A tokenizer that counts the decoded tokens."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lengths: list[int] = []

    def decode_batch(self, many: Iterable[Iterable[int]]) -> list[str]:
        listed = [list(ids) for ids in many]
        self.lengths += map(len, listed)
        return super().decode_batch(listed)


class Ours:
    def __init__(self, model: Any, folder: Path, kind: type[Translator] = Translator) -> None:
        """`folder` contains tokenizer.json."""
        self.source = Tokenizer.load(folder / "tokenizer.json")
        self.target = Counting((folder / "tokenizer.json").read_text(encoding="utf-8"))
        self.translator = kind(Bundle(model, {"source": self.source, "target": self.target}))

    def translate(self, lines: Sequence[str], search: Search) -> Translations:
        config = SearchConfig(beam=search.beam, min_length=search.least, max_length=search.most)
        self.target.lengths.clear()
        begin = time.perf_counter()
        texts = self.translator.translate(lines, batch=search.batch, config=config)
        seconds = time.perf_counter() - begin
        if len(self.target.lengths) != len(lines):
            raise RuntimeError(f"{len(self.target.lengths)} translations were decoded for {len(lines)} lines")
        return Translations(texts, count_tokens(self.target.lengths, search.most), seconds)


class OursOnCTranslate2(Ours):
    """Regard on an export of `model`."""

    def __init__(self, model: SequenceToSequence, folder: Path, int8: bool) -> None:
        from regard.interop.ctranslate2 import export_ctranslate2
        from regard.predict.ctranslate2 import CTranslate2Model, CTranslate2Translator

        exported = folder / f"regard-ctranslate2{'-int8' if int8 else ''}"
        exported.mkdir()
        bundle = Bundle(model, {"tokenizer": Tokenizer.load(folder / "tokenizer.json")})
        export_ctranslate2(bundle, exported, int8=int8)
        recipe = {"model": to_dict(model.config)}
        super().__init__(CTranslate2Model(exported, "cpu", recipe), folder, CTranslate2Translator)


class Alone:
    """A tool in a process of its own, as it is used, which threads of other libraries do not affect: of two engines of
    CTranslate2 in one process, the second takes twice the time in fp32."""

    def __init__(self, make: Callable[[], Tool]) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, make, torch.get_num_threads()))
        self.process.start()
        there.close()

    def translate(self, lines: Sequence[str], search: Search) -> Translations:
        self.pipe.send((lines, search))
        translations: Translations = self.pipe.recv()
        return translations

    def close(self) -> None:
        self.pipe.close()
        self.process.join()


def _serve(pipe: Any, make: Callable[[], Tool], threads: int) -> None:
    torch.set_num_threads(threads)
    tool = make()
    with suppress(EOFError):  # the other end is closed
        while True:
            lines, search = pipe.recv()
            spent = time.process_time()
            translations = tool.translate(lines, search)
            pipe.send(replace(translations, cpu_seconds=time.process_time() - spent))


class HuggingFace:
    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        from transformers import MarianMTModel

        self.tokenizer = Tokenizer.load(folder / "tokenizer.json")
        self.model = MarianMTModel.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.end = self.tokenizer.special_id("eos")

    def translate(self, lines: Sequence[str], search: Search) -> Translations:
        begin = time.perf_counter()
        table = Ragged.of(ids := self.tokenizer.encode_batch(lines, add_eos=True))
        outputs: list[list[int]] = [[] for _ in lines]
        for rows in by_length(ids, search.batch):
            source, is_real = table.pad(torch.tensor(rows))
            for row, translation in zip(rows, self._generate(source, is_real, search).tolist(), strict=True):
                outputs[row] = until_end(translation[1:], self.end)  # the first is <s>
        texts = [self.tokenizer.decode(translation) for translation in outputs]
        return Translations(texts, count_tokens(map(len, outputs), search.most), time.perf_counter() - begin)

    def _generate(self, source: Tensor, is_real: Tensor, search: Search) -> Tensor:
        device = self.model.device
        beams = {"length_penalty": 0.0, "early_stopping": False} if search.beam > 1 else {}
        with torch.inference_mode():
            translations: Tensor = self.model.generate(
                source.to(device), attention_mask=is_real.long().to(device), num_beams=search.beam, do_sample=False,
                max_new_tokens=search.most, min_new_tokens=search.least or None, use_cache=True, **beams,
            )  # fmt: skip
        return translations


class CTranslate2:
    """Its vocabulary is our ids as text, in order."""

    def __init__(self, folder: Path, int8: bool = False) -> None:
        import ctranslate2

        self.tokenizer = Tokenizer.load(folder / "tokenizer.json")
        self.names = [str(number) for number in range(len(self.tokenizer))]
        kind = "int8" if int8 else "float32"
        converted = folder / f"ctranslate2-{kind}"
        if not converted.exists():
            _converter(folder, self.names, self.tokenizer).convert(str(converted), quantization=kind)
        self.engine = ctranslate2.Translator(  # like ours: one core per batch, which is faster than all cores on each
            str(converted), device="cpu", compute_type=kind, inter_threads=torch.get_num_threads(), intra_threads=1
        )

    def translate(self, lines: Sequence[str], search: Search) -> Translations:
        begin = time.perf_counter()
        sources = [[self.names[number] for number in ids] for ids in self.tokenizer.encode_batch(lines, add_eos=True)]
        results = self.engine.translate_batch(
            sources, beam_size=search.beam, max_batch_size=search.batch, length_penalty=0.0,
            min_decoding_length=search.least, max_decoding_length=search.most, return_scores=False,
        )  # fmt: skip
        outputs = [[int(name) for name in result.hypotheses[0]] for result in results]
        texts = [self.tokenizer.decode(translation) for translation in outputs]
        return Translations(texts, count_tokens(map(len, outputs), search.most), time.perf_counter() - begin)


def _converter(folder: Path, names: list[str], tokenizer: Tokenizer) -> Any:
    """CTranslate2's own conversion of the layers, for a Marian that starts with <s> and has <pad> at 0.

    Its converter expects Opus-MT models, which start from a zero vector and have <pad> at the end.
    """
    from ctranslate2.converters.converter import Converter
    from ctranslate2.converters.transformers import BartLoader
    from transformers import MarianMTModel

    class Marian(Converter):
        def _load(self) -> Any:
            model, loader = MarianMTModel.from_pretrained(folder), BartLoader()
            model.config.normalize_before = model.config.normalize_embedding = False
            with torch.no_grad():
                spec = loader.get_model_spec(model)
            loader.set_vocabulary(spec, names)
            spec.config.bos_token = spec.config.decoder_start_token = names[tokenizer.special_id("bos")]
            spec.config.eos_token = names[tokenizer.special_id("eos")]
            spec.config.unk_token = names[tokenizer.unk or 0]
            return spec

    return Marian()


class JoeyNMT:
    def __init__(self, model: SequenceToSequence, folder: Path, python: Path) -> None:
        self.tokenizer = Tokenizer.load(folder / "tokenizer.json")
        self.joey = JoeySearch(model, folder, python)
        self.versions = self.joey.versions

    def close(self) -> None:
        self.joey.worker.close()

    def translate(self, lines: Sequence[str], search: Search) -> Translations:
        outputs, seconds = self.joey.search(self.tokenizer.encode_batch(lines, add_eos=True), **vars(search))
        texts = [self.tokenizer.decode(translation) for translation in outputs]
        return Translations(texts, count_tokens(map(len, outputs), search.most), seconds)
