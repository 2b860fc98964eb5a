"""Labels of tokens: bytes are joined to the characters that they are parts of."""

from __future__ import annotations

import pytest

from regard.text.labels import label, labels, pending_bytes
from regard.text.tokenizer import Tokenizer

TEXTS = ["동물은 길을 건너지 않았다", "naïve café 🦉 owl", "Đà Nẵng ớ b", "를 ab 를"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the owl did not cross the street 동물은"], "bpe", 270)  # most characters are bytes


@pytest.mark.parametrize("text", TEXTS)
def test_no_label_is_a_byte_and_together_they_are_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    made = labels(tokenizer, ids)
    assert len(made) == len(ids) and not any("\\x" in one or "\ufffd" in one or "⟨" in one for one in made)
    whole = "".join(one if one[-1] not in "₂₃₄" else "" for one in made)  # the first part of each character names it
    assert whole.replace("₁", "").replace("▁", " ").strip() == text


def test_a_predicted_part_of_a_character_completes_what_is_pending(tokenizer):
    ids = tokenizer.encode("를")
    parts = [tokenizer.token_bytes(id) for id in ids]
    ids, parts = (
        [id for id, part in zip(ids, parts, strict=True) if part.strip()],
        [part for part in parts if part.strip()],
    )
    assert b"".join(parts) == "를".encode() and len(parts) > 1
    assert pending_bytes(tokenizer, ids[:-1]) == b"".join(parts[:-1]) and pending_bytes(tokenizer, ids) == b""
    assert label(tokenizer, ids[-1], b"".join(parts[:-1])).startswith("를")
    assert label(tokenizer, ids[0]) == f"⟨{parts[0].hex(' ').upper()}⟩"
    letter = tokenizer.encode("owl")[0]
    assert label(tokenizer, letter) == tokenizer.token(letter)
