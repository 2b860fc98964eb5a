"""Strings and ids: everything that turns text into numbers and back."""

from regard.text.sentencepiece import from_sentencepiece, load_tokenizer
from regard.text.tokenizer import Tokenizer

__all__ = ["Tokenizer", "from_sentencepiece", "load_tokenizer"]
