"""Prediction: a bundle of a model and its tokenizers, and from there to text, classes or numbers."""

from regard.predict.beam import Hypothesis, beam, greedy
from regard.predict.bundle import Bundle, Prediction, Predictor, TextPrediction
from regard.predict.config import SearchConfig
from regard.predict.sampling import sample
from regard.predict.translator import Translator

__all__ = [
    "Bundle",
    "Hypothesis",
    "Prediction",
    "Predictor",
    "SearchConfig",
    "TextPrediction",
    "Translator",
    "beam",
    "greedy",
    "sample",
]
