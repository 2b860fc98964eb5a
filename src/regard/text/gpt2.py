"""GPT-2's byte-level BPE, from its vocabulary files.

    vocab.json, or encoder.json      {"token": id, …}; 50,257 tokens, the last is <|endoftext|>
    merges.txt, or vocab.bpe         one merge "a b" per line, in the order in which they are applied

A text is split into words by GPT-2's pattern (contractions, letters, digits, punctuation, white space), each word is
turned into bytes, and the merges are applied in order (Radford et al. 2019, section 2.2). The ids are the same as those
of `tiktoken` and `transformers`. The string "<|endoftext|>" in a text is encoded as ordinary characters (tiktoken's
`encode_ordinary`), never as the token that ends a document.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from regard.errors import UserError
from regard.text.tokenizer import Tokenizer
from regard.text.train import Normalization, bytes_to_unicode, set_normalizer

END = "<|endoftext|>"
VOCABULARIES = ("vocab.json", "encoder.json")
MERGES = ("merges.txt", "vocab.bpe")


def find_files(folder: str | os.PathLike[str]) -> tuple[Path, Path] | None:
    """The vocabulary and the merges file in `folder`, under either of their names; None if one is missing."""
    vocabulary, merges = (
        next((path for name in names if (path := Path(folder) / name).is_file()), None)
        for names in (VOCABULARIES, MERGES)
    )
    return None if vocabulary is None or merges is None else (vocabulary, merges)


def read_gpt2(folder: str | os.PathLike[str], normalize: Normalization = "none") -> Tokenizer:
    """The tokenizer whose vocabulary files are in `folder`; GPT-2's own does not normalise text."""
    files = find_files(folder)
    if files is None:
        raise UserError(
            f"{folder}: GPT-2's vocabulary needs {' or '.join(VOCABULARIES)} and {' or '.join(MERGES)} in this folder; "
            "download them with  regard data get gpt2-bpe"
        )
    vocabulary = _read_vocabulary(files[0])
    raw = RawTokenizer(models.BPE(vocabulary, _read_merges(files[1], vocabulary)))
    set_normalizer(raw, normalize)
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
        raise UserError(f"{path}: not JSON ({error}); copy or download it again") from None
    integers = isinstance(content, dict) and all(type(id) is int for id in content.values())
    if not integers or sorted(content.values()) != [*range(len(content))]:
        raise UserError(f"{path}: not a vocabulary, which maps tokens to the ids 0, 1, 2, …; copy it again")
    if missing := [byte for byte, char in enumerate(bytes_to_unicode()) if char not in content]:
        raise UserError(f"{path}: byte {missing[0]:#04x} is missing, so this is not a byte-level vocabulary")
    return dict(content)


def _read_merges(path: Path, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        parts = line.removesuffix("\r").split(" ")
        if len(parts) != 2 or any(token not in vocabulary for token in (*parts, "".join(parts))):
            raise UserError(
                f"{path}, line {number:,}: {line!r} does not merge two tokens of the vocabulary; check that both "
                "files belong to the same tokenizer"
            )
        merges.append((parts[0], parts[1]))
    return merges
