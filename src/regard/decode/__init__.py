"""Decoding: choosing the next token, again and again."""

from regard.decode.search import greedy
from regard.decode.translate import Translator

__all__ = ["Translator", "greedy"]
