"""Text to ids and back: one small class over the Hugging Face `tokenizers` library.

A model sees integers. A tokenizer fixes which pieces of text they stand for, in four steps: normalise the
text, cut it (pre-tokenise), look up or assemble pieces (the model), and join the pieces again (decode).

    kind      a piece is                          unseen text         decode(encode(text)) gives
    word      a word, a punctuation mark, a digit <unk>               the words with spaces between them
    char      one Unicode character, spaces too   <unk>               NFC(text)
    byte      one byte of UTF-8                   cannot occur        text, whatever it is
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
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as RawTokenizer

from regard.errors import UserError
from regard.files import write_whole
from regard.text.bytes import byte_letters
from regard.text.learn import Kind, check_text, keep_apart, learn
from regard.text.normalizer import sentencepiece_normalizer

# The names that well-known models give the four roles; the first one present in a file counts.
PAD_NAMES = ("<pad>", "[PAD]")
UNK_NAMES = ("<unk>", "[UNK]")
BOS_NAMES = ("<s>", "<bos>", "[CLS]", "<|endoftext|>")
EOS_NAMES = ("</s>", "<eos>", "[SEP]", "<|endoftext|>")
MASK_NAMES = ("<mask>", "[MASK]")


class Tokenizer:
    """A trained tokenizer, made with `Tokenizer.train` or `Tokenizer.load`.

    `pad`, `unk`, `bos`, `eos` and `mask` are ids; None where there is no such token.
    """

    def __init__(self, text: str) -> None:
        """From the text of a `tokenizer.json` file, which `save` writes back unchanged."""
        self.json = text
        try:
            self._raw = RawTokenizer.from_str(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library has no narrower class for a wrong file, and panics at some
            raise UserError(f"this is not a tokenizer in the `tokenizers` JSON format: {error}") from error
        # A file may ask for padding, for cutting, or for "<s>" in the text to become the special token.
        # Here padding and cutting belong to the batch, and text is only text.
        self._raw.no_padding()
        self._raw.no_truncation()
        self._raw.encode_special_tokens = True
        self._added = self._raw.get_added_tokens_decoder()
        self.byte_level = self._raw.decoder is not None and "ByteLevel" in repr(self._raw.decoder)
        self.pad, self.unk = self._find(PAD_NAMES), self._find(UNK_NAMES)
        self.bos, self.eos = self._find(BOS_NAMES), self._find(EOS_NAMES)
        self.mask = self._find(MASK_NAMES)
        self._size = 1 + max(self._raw.get_vocab().values(), default=-1)
        self._known: set[int] = set()  # ids that were looked up and are there
        if isinstance(self._raw.model, models.Unigram):
            keep_apart(self._raw, [token.content for token in self._added.values() if token.special])
        self._normalize = sentencepiece_normalizer(self._raw)  # of the whole text, before symbols are split off
        if self._normalize is not None:
            self._raw.normalizer = None  # type: ignore[assignment]

    @classmethod
    def train(cls, lines: Iterable[str], kind: Kind, vocab_size: int | None = None, min_count: int = 1) -> Tokenizer:
        """Learn the pieces from `lines`, any iterable of strings, read once.

        `vocab_size` counts the four special tokens. `word` keeps the most frequent words within it; the other
        kinds need room for every character, `bpe` for every byte. None means no limit for `word` and `char`,
        8,000 for `bpe` and `unigram`, which stay below it when the text has no more to offer.
        `min_count` is how often a word, a character or a pair to merge must occur; `unigram` has no such
        rule. The same lines give the same tokenizer.
        """
        return cls(learn(lines, kind, vocab_size, min_count).to_str(pretty=True))

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

    def extended(self, names: Sequence[str]) -> Tokenizer:
        """The same with these special tokens at the end of its vocabulary; those that are there stay where they are."""
        raw = RawTokenizer.from_str(self.json)
        raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
        return Tokenizer(raw.to_str(pretty=True))

    @property
    def specials(self) -> set[int]:
        """The ids that no text turns into."""
        return {id for id, token in self._added.items() if token.special}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `tokenizer.json`: the old file or the whole new one is there, never half of one."""
        write_whole(path, self.json.encode())

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without <s> and </s>."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts at once, in parallel threads."""
        try:
            if self._normalize is not None:
                texts = [self._normalize(text) for text in texts]
            encodings = self._raw.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            for text in texts:
                check_text(text, "text")
            raise
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens are left out, and what follows </s> is not."""
        return str(self._raw.decode(self._numbers(ids), skip_special_tokens=True))

    def decode_batch(self, many: Iterable[Iterable[int]]) -> list[str]:
        """The texts of many sequences of ids at once, in parallel threads."""
        return list(self._raw.decode_batch([self._numbers(ids) for ids in many], skip_special_tokens=True))

    def _numbers(self, ids: Iterable[int]) -> list[int]:
        """The ids as a list, each of them known."""
        numbers = [int(id) for id in ids]
        for id in {*numbers} - self._known:
            self._check_id(id)
            self._known.add(id)
        return numbers

    def tokens(self, text: str) -> list[str]:
        """`text` cut into readable pieces, one per id, as labels for tables and figures."""
        return [self.token(id) for id in self.encode(text)]

    def token(self, id: int) -> str:
        """The piece with this id, readable: a space is "▁", the byte of a cut character "\\xea"."""
        piece = self._check_id(id)
        if self.byte_level and id not in self._added:
            piece = self.token_bytes(id).decode("utf-8", errors="backslashreplace")
        visible = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in piece)
        return "".join(visible).replace(" ", "▁")

    def token_bytes(self, id: int) -> bytes:
        """What a token of a `byte_level` vocabulary adds to a text, perhaps part of a character; b"" if special."""
        piece, table = self._check_id(id), _byte_of()
        if id in self._added and self._added[id].special:
            return b""
        return bytes(table[char] for char in piece) if all(char in table for char in piece) else piece.encode()

    def id_of(self, name: str) -> int | None:
        """The id of a token by its name in the vocabulary, such as "[MASK]"; None where there is none."""
        return self._find((name,))

    def __len__(self) -> int:
        """The rows an embedding needs: ids run from 0 to `len(tokenizer) - 1`."""
        return self._size

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[str]]:
        # Copies, also in worker processes, are rebuilt from JSON: the library's own copies would forget
        # `encode_special_tokens`.
        return Tokenizer, (self.json,)

    def _find(self, names: Sequence[str]) -> int | None:
        ids = (self._raw.token_to_id(name) for name in names)
        return next((id for id in ids if id is not None), None)

    def _check_id(self, id: int) -> str:
        piece = self._raw.id_to_token(id) if 0 <= id < len(self) else None
        if piece is None:
            raise UserError(f"token id {id} is not in the vocabulary; ids run from 0 to {len(self) - 1}")
        return str(piece)


@functools.cache
def _byte_of() -> dict[str, int]:
    """GPT-2's table backwards: printable bytes stand for themselves, the others for U+0100 onwards."""
    return {letter: byte for byte, letter in enumerate(byte_letters())}
