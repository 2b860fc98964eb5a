"""Text to ids and back: one small class over the Hugging Face `tokenizers` library.

A model sees integers. A tokenizer fixes which pieces of text they stand for, in four steps: normalise the
text, cut it (pre-tokenise), look up or assemble pieces (the model), and join the pieces again (decode).

    kind      a piece is                          unseen text         decode(encode(text)) gives
    word      a word, a punctuation mark, a digit <unk>               the words with spaces between them
    char      one Unicode character, spaces too   <unk>               NFC(text)
    bpe       merged UTF-8 bytes                  smaller pieces      text, whatever it is
    unigram   the likeliest run of characters     <unk>               NFC(text), with U+2581 read as a space

`bpe` starts from 256 bytes and repeatedly merges the most frequent neighbours (Sennrich et al. 2016,
arXiv 1508.07909; on bytes as in GPT-2). `unigram` starts from many candidate pieces, removes those whose loss
hurts the likelihood of the text least, and cuts a sentence into the pieces that maximise sum_i log p(piece_i)
(Kudo 2018, arXiv 1804.10959); spaces are written as U+2581 "▁" inside the pieces. NFC joins a letter and its
accent, or the letters of a Hangul syllable, into one character; nothing else is changed, no case is folded.

Ids 0 to 3 are <pad>, <unk>, <s>, </s>. Plain text never turns into <pad>, <s> or </s>: someone who types
"<s>" gets the pieces "<", "s", ">" (or <unk>), so no text from outside can end a sentence or fake its start.
"""

from __future__ import annotations

import functools
import json
import os
import re
import reprlib
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from regard.errors import UserError, suggest
from regard.settings import write_whole

Kind = Literal["word", "char", "bpe", "unigram"]

SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")
SUBWORD_VOCAB_SIZE = 8000  # for bpe and unigram when no size is given
NO_LIMIT = 2**31  # the library wants a number

# The names that well-known models give the four roles; the first one present in a file counts.
PAD_NAMES = ("<pad>", "[PAD]")
UNK_NAMES = ("<unk>", "[UNK]")
BOS_NAMES = ("<s>", "<bos>", "[CLS]", "<|endoftext|>")
EOS_NAMES = ("</s>", "<eos>", "[SEP]", "<|endoftext|>")


class Tokenizer:
    """A trained tokenizer, made with `Tokenizer.train` or `Tokenizer.load`.

    `pad`, `unk`, `bos` and `eos` are ids; None where a file from elsewhere has no such token.
    """

    def __init__(self, text: str) -> None:
        """From the text of a `tokenizer.json` file, which `save` writes back unchanged."""
        self._json = text
        try:
            self._raw = RawTokenizer.from_str(text)
        except Exception as error:  # the library has no narrower class for a wrong file
            raise UserError(f"this is not a tokenizer in the `tokenizers` JSON format: {error}") from error
        # A file may ask for padding, for cutting, or for "<s>" in the text to become the special token.
        # Here padding and cutting belong to the batch, and text is only text.
        self._raw.no_padding()
        self._raw.no_truncation()
        self._raw.encode_special_tokens = True
        self._added = self._raw.get_added_tokens_decoder()
        self._byte_level = self._raw.decoder is not None and "ByteLevel" in repr(self._raw.decoder)
        self.pad, self.unk = self._find(PAD_NAMES), self._find(UNK_NAMES)
        self.bos, self.eos = self._find(BOS_NAMES), self._find(EOS_NAMES)
        self._size = 1 + max(self._raw.get_vocab().values(), default=-1)
        if isinstance(self._raw.model, models.Unigram):
            _keep_apart(self._raw, [token.content for token in self._added.values() if token.special])

    @classmethod
    def train(cls, lines: Iterable[str], kind: Kind, vocab_size: int | None = None, min_count: int = 1) -> Tokenizer:
        """Learn the pieces from `lines`, any iterable of strings, read once.

        `vocab_size` counts the four special tokens. `word` keeps the most frequent words within it; the other
        kinds need room for every character, `bpe` for every byte. None means no limit for `word` and `char`,
        8,000 for `bpe` and `unigram`, which stay below it when the text has no more to offer.
        `min_count` is how often a word, a character or a pair to merge must occur; `unigram` has no such
        rule. The same lines give the same tokenizer.
        """
        _check_arguments(lines, kind, vocab_size, min_count)
        match kind:
            case "word" | "char":
                raw = _train_whole(kind, lines, vocab_size, min_count)
            case "bpe":
                raw = _train_bpe(lines, vocab_size or SUBWORD_VOCAB_SIZE, min_count)
            case "unigram":
                raw = _train_unigram(lines, vocab_size or SUBWORD_VOCAB_SIZE)
        return cls(raw.to_str(pretty=True))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a `tokenizer.json`, ours or anybody's."""
        try:
            return cls(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the tokenizer file {str(path)!r} cannot be read: {error}") from error
        except UserError as error:
            raise UserError(
                f"the tokenizer file {str(path)!r} is damaged or of another format: {error}; "
                "copy it again or train a new one"
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `tokenizer.json`: the old file or the whole new one is there, never half of one."""
        write_whole(path, self._json.encode())

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without <s> and </s>."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts at once, in parallel threads."""
        try:
            encodings = self._raw.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            for text in texts:
                _check_text(text, "text")
            raise
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens are left out, and what follows </s> is not."""
        numbers = [int(id) for id in ids]
        for id in set(numbers):
            self._check_id(id)
        return str(self._raw.decode(numbers, skip_special_tokens=True))

    def tokens(self, text: str) -> list[str]:
        """`text` cut into readable pieces, one per id, as labels for tables and figures."""
        return [self.token(id) for id in self.encode(text)]

    def token(self, id: int) -> str:
        """The piece with this id, readable: a space is "▁", the byte of a cut character "\\xea"."""
        piece = self._check_id(id)
        table = _byte_of()
        if self._byte_level and id not in self._added and all(char in table for char in piece):
            piece = bytes(table[char] for char in piece).decode("utf-8", errors="backslashreplace")
        visible = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in piece)
        return "".join(visible).replace(" ", "▁")

    def __len__(self) -> int:
        """The rows an embedding needs: ids run from 0 to `len(tokenizer) - 1`."""
        return self._size

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[str]]:
        # Copies, also in worker processes, are rebuilt from JSON: the library's own copies would forget
        # `encode_special_tokens`.
        return Tokenizer, (self._json,)

    def _find(self, names: Sequence[str]) -> int | None:
        ids = (self._raw.token_to_id(name) for name in names)
        return next((id for id in ids if id is not None), None)

    def _check_id(self, id: int) -> str:
        piece = self._raw.id_to_token(id) if 0 <= id < len(self) else None
        if piece is None:
            raise UserError(f"token id {id} is not in the vocabulary; ids run from 0 to {len(self) - 1}")
        return str(piece)


def _train_whole(
    kind: Literal["word", "char"], lines: Iterable[str], vocab_size: int | None, min_count: int
) -> RawTokenizer:
    """`word` and `char`: a piece is in the vocabulary or it is <unk>."""
    raw = RawTokenizer(models.WordLevel(unk_token=SPECIALS[1]))
    raw.normalizer = normalizers.NFC()
    if kind == "char":
        raw.pre_tokenizer = pre_tokenizers.FixedLength(length=1)  # spaces and line ends are characters too
        raw.decoder = decoders.Fuse()  # joins without the spaces that words get
    else:
        # "March 3rd, 2021" -> March | 3 | rd | , | 2 | 0 | 2 | 1: ten digits are enough to read any year.
        spaces, marks = pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated")
        digits = pre_tokenizers.Digits(individual_digits=True)
        raw.pre_tokenizer = pre_tokenizers.Sequence([spaces, marks, digits])
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size if kind == "word" and vocab_size is not None else NO_LIMIT,
        min_frequency=min_count,
        special_tokens=list(SPECIALS),
        show_progress=False,
    )
    raw.train_from_iterator(_checked(lines), trainer)
    _check_room(vocab_size, raw.get_vocab_size(), "every character gets a place; a higher min_count drops rare ones")
    if raw.get_vocab_size() == len(SPECIALS):
        raise UserError(f"min_count is {min_count}, but no {kind} occurs that often; lower it")
    return raw


def _train_bpe(lines: Iterable[str], vocab_size: int, min_count: int) -> RawTokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # 256 printable stand-ins for the bytes
    _check_room(vocab_size, len(SPECIALS) + len(alphabet), "bpe needs every byte")
    raw = RawTokenizer(models.BPE())
    # GPT-2's cut: letters, digits and signs never share a piece, so no merge can build "<s>".
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_count,
        special_tokens=list(SPECIALS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    raw.train_from_iterator(_checked(lines), trainer)
    return raw


def _train_unigram(lines: Iterable[str], vocab_size: int) -> RawTokenizer:
    raw = RawTokenizer(models.Unigram())
    raw.normalizer = normalizers.NFC()
    # No space is added before the first word, so that " a" and "a" stay different texts.
    pieces = pre_tokenizers.Metaspace(prepend_scheme="never")
    raw.pre_tokenizer = pieces
    raw.decoder = decoders.Metaspace(prepend_scheme="never")
    alphabet: set[str] = set()

    def with_alphabet() -> Iterator[str]:
        for line in _checked(lines):
            alphabet.update(unicodedata.normalize("NFC", line).replace(" ", "▁"))
            yield line
        # Checked before the library starts: its trainer may overrun a size that is too small.
        _check_room(vocab_size, len(SPECIALS) + len(alphabet), "unigram needs every character of the text")

    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIALS), unk_token=SPECIALS[1], show_progress=False
    )
    _keep_apart(raw, SPECIALS)
    raw.train_from_iterator(with_alphabet(), trainer)
    raw.pre_tokenizer = pieces
    raw.model = models.Unigram(_settled(raw, vocab_size), unk_id=1, byte_fallback=False)
    return raw


def _settled(raw: RawTokenizer, vocab_size: int) -> list[tuple[str, float]]:
    """The (piece, log p) list, in an order and with digits that are the same in every run.

    The library walks through randomly seeded hash tables. The pieces come out the same, but their scores
    differ from about the eleventh digit on, equal ones change places, and characters that training lost are
    put back at lowest, lowest + 0.0001, lowest + 0.0002, ... in any order (NUL alone even as NaN). Here all of
    these get the lowest score, and three decimals are kept, enough to cut by. Pieces over `vocab_size` go,
    the least likely first, characters never.
    """
    count = len(SPECIALS)
    vocab = json.loads(raw.to_str())["model"]["vocab"]
    lowest = min((score for _, score in vocab[count:] if score is not None), default=0.0)
    learned: list[tuple[str, float]] = []
    lost = 0
    for piece, score in sorted(vocab[count:], key=lambda item: lowest if item[1] is None else item[1]):
        if len(piece) == 1 and (score is None or abs(score - lowest - 0.0001 * lost) < 1e-9):
            lost += 1
            score = lowest
        learned.append((piece, round(score, 3)))
    learned.sort(key=lambda item: (len(item[0]) > 1, -item[1], item[0]))
    kept = sorted(learned[: vocab_size - count], key=lambda item: (-item[1], item[0]))
    return [(piece, score) for piece, score in vocab[:count]] + kept


def _keep_apart(raw: RawTokenizer, specials: Sequence[str]) -> None:
    """Cut after the first sign of "<s>" and its like, which a unigram model would find in its vocabulary."""
    starts = [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in specials if len(name) > 1]
    if starts:
        guard = pre_tokenizers.Split(Regex("|".join(starts)), "isolated")
        rest = [raw.pre_tokenizer] if raw.pre_tokenizer is not None else []
        raw.pre_tokenizer = pre_tokenizers.Sequence([guard, *rest])


def _checked(lines: Iterable[str]) -> Iterator[str]:
    """The lines, each a proper string, and not all of them blank."""
    blank = True
    for line in lines:
        _check_text(line, "a training line")
        blank = blank and not line.strip()
        yield line
    if blank:
        raise UserError("the training text is empty; give at least one line with words in it")


def _check_text(text: object, name: str) -> None:
    if not isinstance(text, str):
        raise UserError(f"{name} is {reprlib.repr(text)}, a {type(text).__name__}; give a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name} {reprlib.repr(text)} has half a surrogate pair at position {error.start}, "
            "which is no Unicode text; read the file with errors='replace'"
        ) from error


def _check_arguments(lines: object, kind: str, vocab_size: int | None, min_count: int) -> None:
    if kind not in get_args(Kind):
        raise UserError(f"kind is {kind!r}; {suggest(str(kind), get_args(Kind))}")
    if isinstance(lines, str | bytes):
        raise UserError("lines is one string; give a list of lines, an open text file or another iterable")
    if vocab_size is not None:
        _check_room(vocab_size, len(SPECIALS) + 1, "four places go to the special tokens")
    if min_count < 1:
        raise UserError(f"min_count is {min_count}; give 1 or more")
    if kind == "unigram" and min_count != 1:
        raise UserError(
            f"min_count is {min_count}, but unigram chooses its pieces by likelihood; "
            "leave min_count at 1 and set vocab_size"
        )


def _check_room(vocab_size: int | None, needed: int, reason: str) -> None:
    if vocab_size is not None and vocab_size < needed:
        raise UserError(f"vocab_size is {vocab_size}, too small: at least {needed} are needed ({reason})")


@functools.cache
def _byte_of() -> dict[str, int]:
    """GPT-2's table backwards: printable bytes stand for themselves, the others for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
