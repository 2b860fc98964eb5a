"""GPT-2's own byte-level BPE, from its vocabulary files.

    vocab.json, also encoder.json      {"piece": id, …}; 50,257 of them, the last is <|endoftext|>
    merges.txt, also vocab.bpe         "a b" a line: piece a before piece b become one, the first line first

A text is cut into words by GPT-2's pattern (contractions, letters, digits, signs, white space), each word is turned
into bytes, and the merges are applied in their order (Radford et al. 2019, section 2.2). Any Unicode text gets the
same ids as from `tiktoken` and `transformers`, and back. As everywhere in Regard, text is only text: whoever types
"<|endoftext|>" gets its letters (tiktoken's `encode_ordinary`), never the token that ends a document.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from regard.errors import UserError
from regard.text.bytes import byte_letters
from regard.text.tokenizer import Tokenizer

END = "<|endoftext|>"
VOCABULARIES = ("vocab.json", "encoder.json")
MERGES = ("merges.txt", "vocab.bpe")


def find_files(folder: str | os.PathLike[str]) -> tuple[Path, Path] | None:
    """The two vocabulary files in `folder`, under either of their names."""
    found = [
        next((path for name in names if (path := Path(folder) / name).is_file()), None)
        for names in (VOCABULARIES, MERGES)
    ]
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def read_gpt2(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer whose vocabulary files are in `folder`."""
    files = find_files(folder)
    if files is None:
        raise UserError(
            f"{folder}: GPT-2's vocabulary needs {' or '.join(VOCABULARIES)} and {' or '.join(MERGES)} there; "
            "download them with  regard data get gpt2-bpe"
        )
    vocabulary = _read_vocabulary(files[0])
    raw = RawTokenizer(models.BPE(vocabulary, _read_merges(files[1], vocabulary)))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    if END in vocabulary:
        raw.add_special_tokens([END])
    return Tokenizer(raw.to_str(pretty=True))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); copy or download it again") from None


def _read_vocabulary(path: Path) -> dict[str, int]:
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON ({error}); copy or download it again") from None
    whole = isinstance(content, dict) and all(type(id) is int for id in content.values())
    if not whole or sorted(content.values()) != [*range(len(content))]:
        raise UserError(f"{path}: is no vocabulary, in which every piece has one of the ids from 0 on; copy it again")
    if missing := [byte for byte, letter in enumerate(byte_letters()) if letter not in content]:
        raise UserError(f"{path}: lacks byte {missing[0]:#04x} of 256, so it is no byte-level vocabulary like GPT-2's")
    return dict(content)


def _read_merges(path: Path, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        parts = line.removesuffix("\r").split(" ")
        if len(parts) != 2 or any(piece not in vocabulary for piece in (*parts, "".join(parts))):
            raise UserError(
                f"{path}, line {number:,}: {line!r} is no merge of two pieces of the vocabulary: do the files belong "
                "together?"
            )
        merges.append((parts[0], parts[1]))
    return merges
