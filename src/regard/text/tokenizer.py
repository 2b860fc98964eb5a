"""Text to ids and back: one small class over the Hugging Face `tokenizers` library.

A tokenizer turns text into token ids in three steps, normalisation, pre-tokenisation (splitting into words) and
segmentation into tokens of its vocabulary; decoding turns ids back into text.

    kind      a token is                            unseen text         decode(encode(text)) gives
    word      a word, a punctuation mark, a digit   <unk>               the words with spaces between them
    char      one Unicode character, also a space   <unk>               the text
    byte      one byte of UTF-8                     cannot occur        the text
    bpe       merged UTF-8 bytes                    smaller tokens      the text
    unigram   a frequent substring                  <unk>               the text, with U+2581 read as a space

`bpe` starts from 256 bytes and repeatedly merges the most frequent adjacent pair (Sennrich et al. 2016,
arXiv 1508.07909; on bytes as in GPT-2). `unigram` starts from many candidates, repeatedly removes those that reduce
the likelihood of the text least, and segments a sentence into the tokens that maximise sum_i log p(token_i)
(Kudo 2018, arXiv 1804.10959); a space is written as U+2581 "▁" inside tokens.

Text is normalised to NFC first, so "the text" above is NFC(text): a letter and its accent, or the jamo of a Hangul
syllable, which some systems write as several characters, become one. NFKC also replaces variants, such as full-width
letters or ligatures, by the ordinary ones; "none" keeps every character. The choice is stored in tokenizer.json.

Ids 0 to 3 are <pad>, <unk>, <s>, </s>. Text is never encoded as <pad>, <s> or </s>: the string "<s>" becomes the tokens
"<", "s", ">" (or <unk>), so untrusted text cannot end a sequence or start a new one.
"""

from __future__ import annotations

import functools
import os
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as RawTokenizer

from regard.errors import MissingExtra, UserError
from regard.files import write_atomically
from regard.text.normalizer import sentencepiece_normalizer
from regard.text.train import Kind, Normalization, bytes_to_unicode, check_text, split_specials, train_tokenizer

# Names of special tokens in well-known models; the first one in the vocabulary is used.
PAD_NAMES = ("<pad>", "[PAD]")
UNK_NAMES = ("<unk>", "[UNK]")
BOS_NAMES = ("<s>", "<bos>", "[CLS]", "<|endoftext|>")
EOS_NAMES = ("</s>", "<eos>", "[SEP]", "<|endoftext|>")
MASK_NAMES = ("<mask>", "[MASK]")


class Tokenizer:
    """A trained tokenizer, made with `Tokenizer.train` or `Tokenizer.load`.

    `pad`, `unk`, `bos`, `eos` and `mask` are ids, or None if the vocabulary has no such token.
    """

    def __init__(self, text: str) -> None:
        """From the content of a `tokenizer.json` file, which `save` writes back unchanged."""
        self.json = text
        try:
            self._raw = RawTokenizer.from_str(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises no narrower class, and panics on some files
            raise UserError(f"not a tokenizer in the `tokenizers` JSON format: {error}") from error
        # A file may ask for padding, for truncation, or for "<s>" in the text to become the special token.
        # Here padding and truncation are done when batching, and text never becomes a special token.
        self._raw.no_padding()
        self._raw.no_truncation()
        self._raw.encode_special_tokens = True
        self._added = self._raw.get_added_tokens_decoder()
        self.byte_level = self._raw.decoder is not None and "ByteLevel" in repr(self._raw.decoder)
        vocab = self._raw.get_vocab()
        self._ids, self._size = set(vocab.values()), 1 + max(vocab.values(), default=-1)
        self.pad, self.unk, self.bos, self.eos, self.mask = (
            next((vocab[name] for name in names if name in vocab), None)
            for names in (PAD_NAMES, UNK_NAMES, BOS_NAMES, EOS_NAMES, MASK_NAMES)
        )
        if isinstance(self._raw.model, models.Unigram):
            split_specials(self._raw, [token.content for token in self._added.values() if token.special])
        self._normalize: Callable[[str], str] | None = None
        if self._raw.normalizer is not None:
            self._normalize = sentencepiece_normalizer(self._raw)  # of the whole text, before symbols are split off
            if self._normalize is not None:
                self._raw.normalizer = None  # type: ignore[assignment]

    @classmethod
    def train(
        cls,
        lines: Iterable[str],
        kind: Kind,
        vocab_size: int | None = None,
        min_count: int = 1,
        normalize: Normalization = "NFC",
    ) -> Tokenizer:
        """Train a tokenizer on `lines`, any iterable of strings, which is read once.

        `vocab_size` includes the four special tokens. `word` keeps the most frequent words; the other kinds need an
        entry for every character, `bpe` for every byte. None means no limit for `word` and `char` and at most 8,000
        for `bpe` and `unigram`. `min_count` is the minimum frequency of a word, a character or a merged pair;
        `unigram` does not use it. `normalize` is the Unicode normalisation of all text. The same lines give the same
        tokenizer.
        """
        return cls(train_tokenizer(lines, kind, vocab_size, min_count, normalize).to_str(pretty=True))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a `tokenizer.json` file, written by Regard or another program."""
        try:
            return cls(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the tokenizer file {str(path)!r} cannot be read: {error}") from error
        except MissingExtra:
            raise
        except UserError as error:
            raise UserError(
                f"the tokenizer file {str(path)!r} is damaged or of another format: {error}; "
                "copy it again or train a new one"
            ) from error

    def with_special_tokens(self, names: Sequence[str]) -> Tokenizer:
        """A copy with these special tokens appended to its vocabulary; those that exist keep their ids."""
        raw = RawTokenizer.from_str(self.json)
        raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
        return Tokenizer(raw.to_str(pretty=True))

    @property
    def specials(self) -> set[int]:
        """The ids of special tokens, which text is never encoded as."""
        return {id for id, token in self._added.items() if token.special}

    @property
    def has_spaces(self) -> bool:
        """Whether tokens include the space before a word."""
        tokens = (self.token(id) for id in self._raw.get_vocab().values())
        return any(token.startswith("▁") and len(token) > 1 for token in tokens)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save as `tokenizer.json`, atomically: a reader sees the old file or the complete new one."""
        write_atomically(path, self.json.encode())

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without <s> and </s>."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], *, add_bos: bool = False, add_eos: bool = False) -> list[list[int]]:
        """The ids of many texts at once, in parallel threads; optionally after <s> and before </s>."""
        before = [self.special_id("bos")] if add_bos else []
        after = [self.special_id("eos")] if add_eos else []
        try:
            if self._normalize is not None:
                texts = [self._normalize(text) for text in texts]
            encodings = self._raw.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            for text in texts:
                check_text(text, "text")
            raise
        return [before + encoding.ids + after for encoding in encodings]

    def encode_words(self, text: str) -> tuple[list[int], list[int]]:
        """The ids of `text`, and the number of the word of each, where words are between white space; -1: no word.

        A token belongs to the word of its first character that is not white space.
        """
        if self._normalize is not None:  # SentencePiece, which writes a space as U+2581
            text = self._normalize(text).replace("▁", " ")
        word, words = -1, []
        for before, char in zip(" " + text, text, strict=False):
            word += before.isspace() and not char.isspace()
            words.append(-1 if char.isspace() else word)
        encoding = self._raw.encode(text, add_special_tokens=False)
        return encoding.ids, [max(words[begin:end], default=-1) for begin, end in encoding.offsets]

    def offsets(self, texts: Sequence[str]) -> list[list[tuple[int, int]] | None]:
        """The characters [start, end) of each text that each of its tokens covers.

        Parts of one character all cover it. None where a SentencePiece model has its own normalisation of the text.
        """
        if self._normalize is not None:
            return [None] * len(texts)
        encodings = self._raw.encode_batch(list(texts), add_special_tokens=False)
        return [_with_marks(text, encoding.offsets) for text, encoding in zip(texts, encodings, strict=True)]

    def special_id(self, role: str) -> int:
        """The id of the special token `role`, such as "bos" or "eos"; an error if the vocabulary has none."""
        id: int | None = getattr(self, role)
        if id is None:
            raise UserError(
                f"the tokenizer has no {role} token, which is required here: use the one the model was trained with"
            )
        return id

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without special tokens; decoding continues after </s>."""
        return str(self._raw.decode(self._check(ids), skip_special_tokens=True))

    def decode_batch(self, many: Iterable[Iterable[int]]) -> list[str]:
        """The texts of many sequences of ids at once, in parallel threads."""
        return list(self._raw.decode_batch([self._check(ids) for ids in many], skip_special_tokens=True))

    def _check(self, ids: Iterable[int]) -> list[int]:
        """The ids as a list; an error if one is not in the vocabulary."""
        numbers = [int(id) for id in ids]
        if unknown := {*numbers} - self._ids:
            raise UserError(f"token id {min(unknown)} is not in the vocabulary; ids are 0 to {self._size - 1}")
        return numbers

    def tokens(self, text: str) -> list[str]:
        """The tokens of `text` in readable form, one per id, as labels for tables and figures."""
        return [self.token(id) for id in self.encode(text)]

    def token(self, id: int) -> str:
        """The token with this id in readable form: a space is "▁", a byte of an incomplete character "\\xea"."""
        token = str(self._raw.id_to_token(*self._check([id])))
        if self.byte_level and id not in self._added:
            token = self.token_bytes(id).decode("utf-8", errors="backslashreplace")
        visible = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in token)
        return "".join(visible).replace(" ", "▁")

    def token_bytes(self, id: int) -> bytes:
        """The bytes of a token of a `byte_level` vocabulary, possibly part of a character; b"" if special."""
        token, table = str(self._raw.id_to_token(*self._check([id]))), _unicode_to_bytes()
        if id in self._added and self._added[id].special:
            return b""
        return bytes(table[char] for char in token) if all(char in table for char in token) else token.encode()

    def name(self, id: int) -> str:
        """The name of a token in the vocabulary, as other programs read it; `token` is the readable form."""
        return str(self._raw.id_to_token(*self._check([id])))

    def token_to_id(self, name: str) -> int | None:
        """The id of a token by its name in the vocabulary, such as "[MASK]", or None."""
        return self._raw.token_to_id(name)

    def __len__(self) -> int:
        """The vocabulary size: ids are 0 to `len(tokenizer) - 1`."""
        return self._size

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[str]]:
        # Copies, also in worker processes, are rebuilt from JSON: copies made by the library lose
        # `encode_special_tokens`.
        return Tokenizer, (self.json,)


def _with_marks(text: str, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The library counts only the first of a letter and its accent, or of the jamo of a syllable: add the others."""
    if unicodedata.is_normalized("NFC", text):
        return offsets
    starts = sorted({len(text), *(start for start, _ in offsets)})
    complete = []
    for start, end in offsets:
        limit = starts[min(bisect_right(starts, start), len(starts) - 1)]
        while end < limit and _is_mark(text[end]):
            end += 1
        complete.append((start, end))
    return complete


def _is_mark(char: str) -> bool:
    """Whether normalisation may join a character to the one before it: an accent, or a vowel or final of Hangul."""
    return unicodedata.category(char).startswith("M") or "\u1160" <= char <= "\u11ff"


@functools.cache
def _unicode_to_bytes() -> dict[str, int]:
    return {char: byte for byte, char in enumerate(bytes_to_unicode())}
