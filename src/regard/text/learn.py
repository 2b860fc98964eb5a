"""Learning a vocabulary from text: which pieces there are, and in which order they are merged or how likely they are.

    word, char   every piece that occurs often enough
    bpe          bytes, then again and again the most frequent pair of neighbours as one new piece
    unigram      many candidates, then without those whose loss lowers the likelihood of the text least

The same lines give the same vocabulary, byte for byte. `regard.text.tokenizer` says what the kinds do with a text.
"""

from __future__ import annotations

import json
import re
import reprlib
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from regard.errors import UserError, suggest
from regard.text.bytes import make_bytes

Kind = Literal["word", "char", "byte", "bpe", "unigram"]

SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")
SUBWORD_VOCAB_SIZE = 8000  # for bpe and unigram when no size is given
NO_LIMIT = 2**31  # the library wants a number
LONGEST_WORD = 256  # characters of a word that bpe learns from
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1}}}")
_WITHOUT_SPACES = re.compile(  # Thai, Lao, Burmese, Khmer, Kana, Han
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"
)


def learn(lines: Iterable[str], kind: Kind, vocab_size: int | None, min_count: int) -> RawTokenizer:
    """A tokenizer of the library for `lines`; `Tokenizer.train` says what the arguments mean."""
    _check_arguments(lines, kind, vocab_size, min_count)
    match kind:
        case "word" | "char":
            raw = _train_whole(kind, lines, vocab_size, min_count)
        case "byte":
            raw = make_bytes(SPECIALS)
        case "bpe":
            raw = _train_bpe(lines, vocab_size or SUBWORD_VOCAB_SIZE, min_count)
        case "unigram":
            raw = _train_unigram(lines, vocab_size or SUBWORD_VOCAB_SIZE)
    return raw


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
    raw.train_from_iterator(_spaced(_checked(lines)) if kind == "word" else _checked(lines), trainer)
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
    raw.train_from_iterator(_short(_checked(lines)), trainer)
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
    keep_apart(raw, SPECIALS)
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


def keep_apart(raw: RawTokenizer, specials: Sequence[str]) -> None:
    """Cut after the first sign of "<s>" and its like, which a unigram model would find in its vocabulary.

    Not where they have the lowest score of all, as in `regard.text.sentencepiece`: then they lose by themselves.
    """
    scores = dict(json.loads(raw.to_str())["model"]["vocab"])
    lowest = min(scores.values(), default=0.0)
    specials = [name for name in specials if scores.get(name, 0.0) > lowest or lowest == 0.0]
    starts = [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in specials if len(name) > 1]
    if starts:
        guard = pre_tokenizers.Split(Regex("|".join(starts)), "isolated")
        rest = [raw.pre_tokenizer] if raw.pre_tokenizer is not None else []
        raw.pre_tokenizer = pre_tokenizers.Sequence([guard, *rest])


def _checked(lines: Iterable[str]) -> Iterator[str]:
    """The lines, each a proper string, and not all of them blank."""
    blank = True
    for line in lines:
        check_text(line, "a training line")
        blank = blank and not line.strip()
        yield line
    if blank:
        raise UserError("the training text is empty; give at least one line with words in it")


def _short(lines: Iterable[str]) -> Iterator[str]:
    """The lines, in parts where one has no space for long: a merge takes as long as the words that hold it are."""
    for line in lines:
        step = LONGEST_WORD if _LONG_WORD.search(line) else max(len(line), 1)
        yield from (line[at : at + step] for at in range(0, len(line), step))


def _spaced(lines: Iterable[str]) -> Iterator[str]:
    """The lines; an error if a good part of them is in a script without spaces and has none between its words."""
    letters = runs = inside = 0
    for line in lines:
        letters += len(line)
        found = _WITHOUT_SPACES.findall(line)
        runs += len(found)
        inside += sum(map(len, found))
        yield line
    if inside > letters / 10 and inside > 6 * runs:
        raise UserError(
            f"kind is 'word', but {inside / letters:.0%} of the text is in a script without spaces, such as Japanese, "
            f"Chinese or Thai, {inside / runs:.0f} letters at a stretch: whole sentences would be words; give kind "
            "'unigram', 'bpe' or 'char', or put spaces between the words"
        )


def check_text(text: object, name: str) -> None:
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
        if kind == "byte":
            raise UserError(f"vocab_size is {vocab_size}, but there are 256 bytes and 4 special tokens; leave it out")
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
