"""Metrics: BLEU and chrF, classification, perplexity, regression."""
