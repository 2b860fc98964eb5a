"""Plausible mistakes in the exercises of lesson 8."""

ACCUMULATE = """
def accumulate(model, batches, loss_sum):
    {start}
    total = 0
    for batch in batches:
        {each}
        loss, tokens = loss_sum(model, batch)
        ({loss}).backward()
        total += tokens
    for parameter in model.parameters():
        parameter.grad /= {divide}
"""

MISTAKES = {
    1: [
        ("would only have to copy", "def shift(ids, bos, eos): return [bos, *ids], [bos, *ids]"),
        ("Three tokens need four positions", "def shift(ids, bos, eos): return ids[:-1], ids[1:]"),
        ("never reads </s>", "def shift(ids, bos, eos): return [*ids, eos], [bos, *ids]"),
    ],
    2: [
        (
            "distribution over 5 tokens with sum 1",
            "import torch\ndef smoothed(label, vocab_size, epsilon):\n    t = torch.full((vocab_size,), epsilon / "
            "vocab_size)\n    t[label] = 1 - epsilon\n    return t",
        ),
        (
            "the correct one included",
            "import torch\ndef smoothed(label, vocab_size, epsilon):\n    t = torch.full((vocab_size,), epsilon / "
            "(vocab_size - 1))\n    t[label] = 1 - epsilon\n    return t",
        ),
    ],
    3: [
        ("proportional to the step", "def learning_rate(step, dim, warmup): return dim**-0.5 * step**-0.5"),
        ("falls with the square root", "def learning_rate(step, dim, warmup): return dim**-0.5 * step * warmup**-1.5"),
        (
            "proportional to the step",
            "def learning_rate(step, dim, warmup): return dim**-0.5 * max(step**-0.5, step * warmup**-1.5)",
        ),
    ],
    4: [
        (
            "Padding is counted",
            "def masked_loss(logits, labels, pad):\n"
            "    return -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()",
        ),
        (
            "Divide the sum by the number of real labels",
            "def masked_loss(logits, labels, pad):\n"
            "    correct = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]\n"
            "    return -(correct * (labels != pad)).mean()",
        ),
    ],
    5: [
        ("earlier step", ACCUMULATE.format(start="pass", each="pass", loss="loss", divide="total")),
        (
            "a mean of the batches' means",
            ACCUMULATE.format(start="model.zero_grad()", each="pass", loss="loss / tokens", divide="len(batches)"),
        ),
        (
            "forgets the earlier ones",
            ACCUMULATE.format(start="pass", each="model.zero_grad()", loss="loss", divide="total"),
        ),
    ],
}
