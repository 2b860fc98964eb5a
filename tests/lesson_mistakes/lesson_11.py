"""Plausible mistakes in the exercises of lesson 11."""

SPANS = """
def corrupt_spans(tokens, spans, sentinels):
    source, target, at = [], [], 0
    for (start, end), sentinel in zip(spans, sentinels):
        source += {source}
        target += {target}
        at = end
    return {result}, target
"""
SOURCE, TARGET, RESULT = "[*tokens[at:start], sentinel]", "[sentinel, *tokens[start:end]]", "[*source, *tokens[at:]]"

MISTAKES = {
    1: [
        (
            "All positions are counted",
            "import torch.nn.functional as F\ndef masked_lm_loss(logits, ids, chosen):\n"
            "    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())",
        ),
        (
            "not over all ten",
            "import torch.nn.functional as F\ndef masked_lm_loss(logits, ids, chosen):\n"
            "    each = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction='none')\n"
            "    return (each * chosen.flatten()).mean()",
        ),
    ],
    2: [
        ("Padding must not count", "def mean_pool(states, is_real): return states.mean(dim=1)"),
        ("Padding must not count", "def mean_pool(states, is_real): return (states * is_real[..., None]).mean(dim=1)"),
        ("one vector per text", "def mean_pool(states, is_real): return states.mean(dim=-1)"),
    ],
    3: [
        (
            "work on a copy",
            "def replace_chosen(ids, chosen, dice, random_ids, mask_id):\n"
            "    ids[chosen & (dice < 0.8)] = mask_id\n    return ids",
        ),
        (
            "not chosen stay",
            "import torch\ndef replace_chosen(ids, chosen, dice, random_ids, mask_id):\n"
            "    return torch.where(dice < 0.8, mask_id, torch.where(dice < 0.9, random_ids, ids))",
        ),
        (
            "0.95 → unchanged",
            "import torch\ndef replace_chosen(ids, chosen, dice, random_ids, mask_id):\n"
            "    return torch.where(chosen, mask_id, ids)",
        ),
    ],
    4: [
        ("after the last span", SPANS.format(source=SOURCE, target=TARGET, result="source")),
        ("in place of each span", SPANS.format(source="tokens[at:start]", target=TARGET, result=RESULT)),
        ("then the tokens of its span", SPANS.format(source=SOURCE, target="tokens[start:end]", result=RESULT)),
    ],
}
