"""Decoding: choosing the next token, again and again."""

from regard.decode.beam import beam
from regard.decode.config import SearchConfig
from regard.decode.sample import sample
from regard.decode.search import Hypothesis, greedy
from regard.decode.translate import Translation, Translator

__all__ = ["Hypothesis", "SearchConfig", "Translation", "Translator", "beam", "greedy", "sample"]
