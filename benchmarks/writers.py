"""One tool in generation: several continuations of a prompt with a fixed number of new tokens.

    regard               `regard.predict.generator.Generator` from a saved folder: from text to text, with log-probabilities
    huggingface          transformers.GPT2LMHeadModel.generate with its cache, the same weights (`regard export`)
    huggingface-static   the same with a static cache, which `generate` compiles: minutes, on a GPU
    x-transformers       AutoregressiveWrapper.generate with its cache, random weights of the same size

All use the same rule, greedy or sampling from the full distribution, and none may stop early.
"""  # noqa: E501

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import regard
from regard.models.config import ModelConfig
from regard.predict.config import SearchConfig
from regard.text.gpt2 import read_gpt2
from regard.text.tokenizer import Tokenizer
from regard.text.train import bytes_to_unicode


@dataclass(frozen=True)
class Wish:
    """The task of every tool: `rows` continuations of one prompt, `count` tokens each."""

    prompt: str
    rows: int
    count: int
    greedy: bool


@dataclass(frozen=True)
class Generated:
    ids: list[list[int]]
    seconds: float

    @property
    def rate(self) -> float:
        return sum(map(len, self.ids)) / self.seconds


Tool = Callable[[Wish], Generated]


def letters_tokenizer() -> tuple[Tokenizer, str]:
    """65 characters, as tiny Shakespeare has, and a text of them."""
    text = "".join(map(chr, range(ord(" "), ord(" ") + 65)))
    return Tokenizer.train([text], "char"), text


def large_tokenizer(folder: Path) -> tuple[Tokenizer, str]:
    """A vocabulary as large as GPT-2's, of bytes and pairs of them, and a text."""
    letters = bytes_to_unicode()
    pairs = [(first, second) for first in letters for second in letters][:50000]
    tokens = [*letters, *(first + second for first, second in pairs), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: id for id, token in enumerate(tokens)}), encoding="utf-8")
    merges = "\n".join(f"{first} {second}" for first, second in pairs)
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    return read_gpt2(folder), "The attention mechanism lets a model attend to every word it has read before. " * 4


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Ours:
    def __init__(self, folder: Path, device: str) -> None:
        self.generator = regard.load(folder, device).predictor

    def __call__(self, wish: Wish) -> Generated:
        settings = {"n_best": wish.rows, "min_length": wish.count, "max_length": wish.count}
        config = SearchConfig(sample=True, top_k=1 if wish.greedy else 0, **settings)
        begin = clock(self.generator.device)
        samples = self.generator.generate(wish.prompt, config=config)
        return Generated([sample.ids for sample in samples], clock(self.generator.device) - begin)


class HuggingFace:
    def __init__(self, folder: Path, tokenizer: Tokenizer, device: str, dtype: torch.dtype, static: bool) -> None:
        from transformers import GPT2LMHeadModel

        self.tokenizer, self.more = tokenizer, {"cache_implementation": "static"} if static else {}
        self.model = GPT2LMHeadModel.from_pretrained(folder, dtype=dtype).to(device).eval()

    def __call__(self, wish: Wish) -> Generated:
        device = self.model.device
        begin = clock(device)
        ids = torch.tensor([self.tokenizer.encode(wish.prompt)] * wish.rows, device=device)
        sampling = {"do_sample": False} if wish.greedy else {"do_sample": True, "top_k": 0}
        with torch.inference_mode():
            outputs = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=wish.count, min_new_tokens=wish.count,
                use_cache=True, pad_token_id=0, **sampling, **self.more,
            )  # fmt: skip
        return Generated(outputs[:, ids.shape[1] :].tolist(), clock(device) - begin)


class XTransformers:
    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, device: str, dtype: torch.dtype) -> None:
        from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

        self.tokenizer = tokenizer
        layers = Decoder(
            dim=config.dim, depth=config.layers, heads=config.heads, attn_dim_head=config.key_dim, attn_flash=True,
            ff_mult=config.ff_dim // config.dim,
        )  # fmt: skip
        model = TransformerWrapper(num_tokens=config.vocab_size, max_seq_len=config.max_length, attn_layers=layers)
        self.model = AutoregressiveWrapper(model).to(device, dtype).eval()

    def __call__(self, wish: Wish) -> Generated:
        device = next(self.model.parameters()).device
        begin = clock(device)
        ids = torch.tensor([self.tokenizer.encode(wish.prompt)] * wish.rows, device=device)
        with torch.inference_mode():
            outputs = self.model.generate(ids, wish.count, temperature=0.0 if wish.greedy else 1.0, cache_kv=True)
        return Generated(outputs.tolist(), clock(device) - begin)


def make_tool(
    name: str, folder: Path, config: ModelConfig, tokenizer: Tokenizer, device: str, dtype: torch.dtype
) -> Tool:
    """`folder` contains the run and, in `hf`, the export for transformers."""
    match name:
        case "regard":
            return Ours(folder, device)
        case "x-transformers":
            return XTransformers(config, tokenizer, device, dtype)
        case _:
            return HuggingFace(folder / "hf", tokenizer, device, dtype, static=name.endswith("static"))


def same_fraction(outputs: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """The fraction of tokens before the first that differs, as it may after a tie."""
    agreed = 0
    for one, other in zip(outputs, expected, strict=True):
        agreed += next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
    return round(agreed / max(1, sum(map(len, expected))), 4)


def bytes_per_step(model: Any, rows: int, tokens: float) -> int:
    """What a step must read: all weights except the position embeddings, and the keys and values of `tokens` tokens."""
    config = model.config
    weights = sum(weight.nbytes for name, weight in model.named_parameters() if "position" not in name)
    size = next(model.parameters()).element_size()
    return int(weights + rows * tokens * config.layers * config.key_heads * (config.key_dim + config.val_dim) * size)
