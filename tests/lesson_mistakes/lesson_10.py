"""Plausible mistakes in the exercises of lesson 10."""

BEAM = """
def beam_search(following, width, eos, limit):
    live, finished = [(0.0, [])], []
    for _ in range(limit):
        extensions = []
        for total, tokens in live:
            for token, score in enumerate(following(tokens).tolist()):
                if score > float("-inf"):
                    extensions.append(({total}, [*tokens, token]))
        extensions.sort(key=lambda one: {sign}one[0])
        finished += [(total, {tokens}) for total, tokens in extensions[:width] if tokens[-1] == eos]
        live = [one for one in extensions if one[1][-1] != eos][:{width}]
        if not live:
            break
    return {best}[1]
"""
CORRECT = {"total": "total + score", "sign": "-", "tokens": "tokens[:-1]", "width": "width", "best": "max(finished)"}
TOP_P = """
import torch
def top_p(probabilities, p):
    ordered, indices = probabilities.sort(descending=True)
    keep = {keep}
    result = torch.zeros_like(probabilities)
    result[{where}] = ordered[keep]
    return {result}
"""

MISTAKES = {
    1: [
        (
            "This is a probability",
            "import math\ndef log_probability(following, tokens):\n"
            "    return math.exp(sum(following(tokens[:t])[token].item() for t, token in enumerate(tokens)))",
        ),
        (
            "The first token counts too",
            "def log_probability(following, tokens):\n"
            "    return sum(following(tokens[:t])[tokens[t]].item() for t in range(1, len(tokens)))",
        ),
    ],
    2: [
        (
            "without eos",
            "def greedy(following, eos, limit):\n    tokens = []\n    while len(tokens) < limit and eos not in "
            "tokens:\n        tokens.append(following(tokens).argmax().item())\n    return tokens",
        ),
        (
            "after all tokens so far",
            "def greedy(following, eos, limit):\n    tokens = []\n    while len(tokens) < limit:\n"
            "        token = following([]).argmax().item()\n        if token == eos: break\n"
            "        tokens.append(token)\n    return tokens",
        ),
        (
            "after limit = 5 tokens",
            "def greedy(following, eos, limit):\n    tokens = []\n    while len(tokens) < 100:\n"
            "        token = following(tokens).argmax().item()\n        if token == eos: break\n"
            "        tokens.append(token)\n    return tokens",
        ),
    ],
    3: [
        (
            "normalise after cutting",
            TOP_P.format(keep="ordered.cumsum(0) - ordered < p", where="indices[keep]", result="result"),
        ),
        (
            "is still part of it",
            TOP_P.format(keep="ordered.cumsum(0) < p", where="indices[keep]", result="result / result.sum()"),
        ),
        (
            "keeps its own position",
            TOP_P.format(keep="ordered.cumsum(0) - ordered < p", where="keep", result="result / result.sum()"),
        ),
    ],
    4: [
        ("begins as greedy search does", BEAM.format(**CORRECT | {"width": "1"})),
        ("without eos", BEAM.format(**CORRECT | {"tokens": "tokens"})),
        ("best of all finished ones", BEAM.format(**CORRECT | {"best": "max(finished, key=lambda one: len(one[1]))"})),
    ],
}
