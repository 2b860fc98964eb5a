"""Strings and ids: everything that turns text into numbers and back."""

from regard.text.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
