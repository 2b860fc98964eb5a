"""Training a tokenizer: the vocabulary, and the order of merges or the log-probability of its tokens.

    word, char   every word or character that occurs at least `min_count` times
    byte         the 256 bytes of UTF-8: "é" -> c3 a9 -> ids 4 + 0xc3, 4 + 0xa9 (ByT5: Xue et al. 2021)
    bpe          bytes; then, repeatedly, the most frequent adjacent pair becomes a new token
    unigram      many candidates, from which those that reduce the likelihood of the text least are removed

The `tokenizers` library works on strings, so each byte is represented by a printable character, as in GPT-2 (Radford et
al. 2019): printable Latin-1 bytes by themselves, the other 68 by U+0100 onwards.

The same lines give the same vocabulary, byte for byte. `regard.text.tokenizer` describes the kinds.
"""

from __future__ import annotations

import functools
import json
import re
import reprlib
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from regard.errors import UserError, suggest

Kind = Literal["word", "char", "byte", "bpe", "unigram"]
Normalization = Literal["NFC", "NFKC", "none"]

SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")
SUBWORD_VOCAB_SIZE = 8000  # for bpe and unigram when no size is given
NO_LIMIT = 2**31  # the library requires a number
LONGEST_WORD = 256  # characters of a word in bpe training
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1}}}")
_WITHOUT_SPACES = re.compile(  # Thai, Lao, Burmese, Khmer, Kana, Han
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"
)


def train_tokenizer(
    lines: Iterable[str], kind: Kind, vocab_size: int | None, min_count: int, normalize: Normalization
) -> RawTokenizer:
    """A tokenizer of the `tokenizers` library trained on `lines`; `Tokenizer.train` describes the arguments."""
    if kind not in get_args(Kind):
        raise UserError(f"kind = {kind!r}: {suggest(str(kind), get_args(Kind))}")
    if normalize not in get_args(Normalization):
        raise UserError(f"normalize = {normalize!r}: {suggest(str(normalize), get_args(Normalization))}")
    if isinstance(lines, str | bytes):
        raise UserError("lines is a single string; pass a list of lines, an open text file or another iterable")
    if vocab_size is not None:
        _check_size(vocab_size, len(SPECIALS) + 1, "four entries are special tokens")
        if kind == "byte":
            raise UserError(f"vocab_size = {vocab_size}: kind 'byte' has 256 bytes and 4 special tokens; remove it")
    if min_count < 1:
        raise UserError(f"min_count = {min_count}: must be 1 or more")
    if kind == "unigram" and min_count != 1:
        raise UserError(
            f"min_count = {min_count}: unigram selects tokens by likelihood, not by count; "
            "leave min_count at 1 and set vocab_size"
        )
    match kind:
        case "word" | "char":
            return _train_words(kind, lines, vocab_size, min_count, normalize)
        case "byte":
            return _byte_tokenizer(normalize)
        case "bpe":
            return _train_bpe(lines, vocab_size or SUBWORD_VOCAB_SIZE, min_count, normalize)
        case "unigram":
            return _train_unigram(lines, vocab_size or SUBWORD_VOCAB_SIZE, normalize)


def set_normalizer(raw: RawTokenizer, normalize: Normalization) -> None:
    """Unicode normalisation before anything else; it is stored in tokenizer.json."""
    if normalize != "none":
        raw.normalizer = {"NFC": normalizers.NFC, "NFKC": normalizers.NFKC}[normalize]()


@functools.cache
def bytes_to_unicode() -> tuple[str, ...]:
    """The character that represents each byte, 0 to 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


def _byte_tokenizer(normalize: Normalization) -> RawTokenizer:
    """The special tokens first, then byte b with id  len(SPECIALS) + b."""
    raw = RawTokenizer(models.BPE({token: id for id, token in enumerate((*SPECIALS, *bytes_to_unicode()))}, []))
    set_normalizer(raw, normalize)
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIALS))
    return raw


def _train_words(
    kind: Literal["word", "char"],
    lines: Iterable[str],
    vocab_size: int | None,
    min_count: int,
    normalize: Normalization,
) -> RawTokenizer:
    """`word` and `char`: a word or character is in the vocabulary or it is <unk>."""
    raw = RawTokenizer(models.WordLevel(unk_token=SPECIALS[1]))
    set_normalizer(raw, normalize)
    if kind == "char":
        raw.pre_tokenizer = pre_tokenizers.FixedLength(length=1)  # spaces and line feeds are characters too
        raw.decoder = decoders.Fuse()  # joins without spaces, unlike words
    else:
        # "March 3rd, 2021" -> March | 3 | rd | , | 2 | 0 | 2 | 1: ten digits represent every number.
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
    _check_size(vocab_size, raw.get_vocab_size(), "one for every character; without vocab_size there is no limit")
    if raw.get_vocab_size() == len(SPECIALS):
        raise UserError(f"min_count = {min_count}: no {kind} occurs that often; lower it")
    return raw


def _train_bpe(lines: Iterable[str], vocab_size: int, min_count: int, normalize: Normalization) -> RawTokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # the 256 characters that represent bytes
    _check_size(vocab_size, len(SPECIALS) + len(alphabet), "bpe needs every byte")
    raw = RawTokenizer(models.BPE())
    set_normalizer(raw, normalize)
    # GPT-2's pattern separates letters, digits and punctuation, so no merge can produce "<s>".
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_count,
        special_tokens=list(SPECIALS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    raw.train_from_iterator(_split_long(_checked(lines)), trainer)
    return raw


def _train_unigram(lines: Iterable[str], vocab_size: int, normalize: Normalization) -> RawTokenizer:
    raw = RawTokenizer(models.Unigram())
    set_normalizer(raw, normalize)
    # No space is added before the first word, so that " a" and "a" stay different texts.
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="never")
    raw.pre_tokenizer = metaspace
    raw.decoder = decoders.Metaspace(prepend_scheme="never")
    alphabet: set[str] = set()

    def with_alphabet() -> Iterator[str]:
        for line in _checked(lines):
            normalized = line if normalize == "none" else unicodedata.normalize(normalize, line)
            alphabet.update(normalized.replace(" ", "▁"))
            yield line
        # Checked before training starts: the library's trainer may exceed a size that is too small.
        _check_size(vocab_size, len(SPECIALS) + len(alphabet), "unigram needs every character of the text")

    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIALS), unk_token=SPECIALS[1], show_progress=False
    )
    split_specials(raw, SPECIALS)
    raw.train_from_iterator(with_alphabet(), trainer)
    raw.pre_tokenizer = metaspace
    raw.model = models.Unigram(_deterministic(raw, vocab_size), unk_id=1, byte_fallback=False)
    return raw


def _deterministic(raw: RawTokenizer, vocab_size: int) -> list[tuple[str, float]]:
    """The list of (token, log p), with an order and digits that are the same in every run.

    The library iterates over randomly seeded hash tables. The tokens come out the same, but their scores differ from
    about the eleventh digit on, the order of equal ones varies, and characters that training removed are added again
    with scores lowest, lowest + 0.0001, lowest + 0.0002, ... in any order (NUL alone even with NaN). Here all of these
    get the lowest score, and scores are rounded to three decimals. Tokens beyond `vocab_size` are removed, the least
    probable first, except for single characters.
    """
    count = len(SPECIALS)
    vocab = json.loads(raw.to_str())["model"]["vocab"]
    lowest = min((score for _, score in vocab[count:] if score is not None), default=0.0)
    tokens: list[tuple[str, float]] = []
    restored = 0
    for token, score in sorted(vocab[count:], key=lambda item: lowest if item[1] is None else item[1]):
        if len(token) == 1 and (score is None or abs(score - lowest - 0.0001 * restored) < 1e-9):
            restored += 1
            score = lowest
        tokens.append((token, round(score, 3)))
    tokens.sort(key=lambda item: (len(item[0]) > 1, -item[1], item[0]))
    kept = sorted(tokens[: vocab_size - count], key=lambda item: (-item[1], item[0]))
    return [(token, score) for token, score in vocab[:count]] + kept


def split_specials(raw: RawTokenizer, specials: Sequence[str]) -> None:
    """Split strings such as "<s>" after their first character, so that a unigram model does not match them as tokens.

    This is not needed if they have the lowest score of all, as in `regard.text.sentencepiece`.
    """
    scores = dict(json.loads(raw.to_str())["model"]["vocab"])
    lowest = min(scores.values(), default=0.0)
    specials = [name for name in specials if scores.get(name, 0.0) > lowest or lowest == 0.0]
    starts = [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in specials if len(name) > 1]
    if starts:
        split = pre_tokenizers.Split(Regex("|".join(starts)), "isolated")
        rest = [raw.pre_tokenizer] if raw.pre_tokenizer is not None else []
        raw.pre_tokenizer = pre_tokenizers.Sequence([split, *rest])


def _checked(lines: Iterable[str]) -> Iterator[str]:
    """The lines; an error if one is not a string or all are blank."""
    blank = True
    for line in lines:
        check_text(line, "a training line")
        blank = blank and not line.strip()
        yield line
    if blank:
        raise UserError("the training text is empty; pass at least one line that is not blank")


def _split_long(lines: Iterable[str]) -> Iterator[str]:
    """The lines, split where a word is very long: the time for a merge is proportional to the length of words."""
    for line in lines:
        step = LONGEST_WORD if _LONG_WORD.search(line) else max(len(line), 1)
        yield from (line[at : at + step] for at in range(0, len(line), step))


def _spaced(lines: Iterable[str]) -> Iterator[str]:
    """The lines; an error if much of the text is in a script without spaces between words."""
    characters = runs = inside = 0
    for line in lines:
        characters += len(line)
        matches = _WITHOUT_SPACES.findall(line)
        runs += len(matches)
        inside += sum(map(len, matches))
        yield line
    if inside > characters / 10 and inside > 6 * runs:
        raise UserError(
            f"kind is 'word', but {inside / characters:.0%} of the text is in a script without spaces, such as "
            f"Japanese, Chinese or Thai, in runs of {inside / runs:.0f} characters: whole sentences would be words; "
            "use kind 'unigram', 'bpe' or 'char', or put spaces between the words"
        )


def check_text(text: object, name: str) -> None:
    if not isinstance(text, str):
        raise UserError(f"{name} is {reprlib.repr(text)}, a {type(text).__name__}; pass a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name} {reprlib.repr(text)} has half a surrogate pair at position {error.start}, "
            "which is not valid Unicode; read the file with errors='replace'"
        ) from error


def _check_size(vocab_size: int | None, needed: int, reason: str) -> None:
    if vocab_size is not None and vocab_size < needed:
        raise UserError(f"vocab_size = {vocab_size}: too small; at least {needed} entries are needed ({reason})")
