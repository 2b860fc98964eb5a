"""Decoding: choosing the next token, again and again."""

from regard.predict.beam import beam
from regard.predict.config import SearchConfig
from regard.predict.sampling import sample
from regard.predict.search import Hypothesis, greedy
from regard.predict.translator import Translation, Translator

__all__ = ["Hypothesis", "SearchConfig", "Translation", "Translator", "beam", "greedy", "sample"]
