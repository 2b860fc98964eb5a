"""Plausible mistakes in the exercises of lesson 5."""

TABLE = """
import torch

def sinusoidal(length, dim):
    frequency = 10000.0 ** (-{exponent})
    angle = torch.arange(length)[:, None] * frequency
    return {result}
"""
BOTH = "torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)"
EXPONENT = "torch.arange(0, dim, 2) / dim"
ROPE = """
import torch

def rope(x, positions, base=10000.0):
    d = x.shape[-1]
    angle = positions[:, None] * base ** (-torch.arange(0, d, 2) / d)
    {pairs}
    return torch.stack(({first}, {second}), dim=-1).flatten(1)
"""
PAIRS = "a, b = x[:, 0::2], x[:, 1::2]"
FIRST, SECOND = "a * angle.cos() - b * angle.sin()", "b * angle.cos() + a * angle.sin()"
BLIND = "import torch\ndef is_order_blind(f, n, dim):\n    x = torch.randn(n, dim)\n"

ALIBI = "import torch\ndef alibi_bias(n, slope):\n    p = torch.arange(n)\n    return "
SWAPPED = BOTH.replace("(angle.sin(), angle.cos())", "(angle.cos(), angle.sin())")
HALVES = ROPE.format(pairs="a, b = x[:, : d // 2], x[:, d // 2 :]", first=FIRST, second=SECOND)

MISTAKES = {
    1: [
        ("interleaved", TABLE.format(exponent=EXPONENT, result="torch.cat((angle.sin(), angle.cos()), dim=1)")),
        ("2i / dim", TABLE.format(exponent="torch.arange(dim // 2) / dim", result=BOTH)),
        ("column 1 is cos", TABLE.format(exponent=EXPONENT, result=SWAPPED)),
        ("instead of (50, 8)", TABLE.format(exponent=EXPONENT, result="angle.sin()")),
    ],
    2: [
        ("never positive", ALIBI + "slope * (p[:, None] - p).abs()"),
        ("never positive", ALIBI + "-slope * (p[:, None] - p)"),
        ("both sides", ALIBI + "-slope * (p[:, None] - p).clamp(min=0)"),
    ],
    3: [
        ("keeps the length", ROPE.format(pairs=PAIRS, first="a * angle.cos()", second="b * angle.sin() + b")),
        ("counterclockwise", ROPE.format(pairs=PAIRS, first=FIRST.replace("-", "+"), second=SECOND.replace("+", "-"))),
        ("neighbours", HALVES.replace("dim=-1)", "dim=1)")),
        ("At position 0", ROPE.format(pairs=PAIRS, first=SECOND, second=FIRST)),
    ],
    4: [
        (
            "attention without positions is blind",
            BLIND + "    o = torch.arange(n).flip(0)\n    return torch.allclose(f(x[o]), f(x))",
        ),
        ("attention with positions is not", BLIND + "    return torch.allclose(f(x).sum(), f(x).sum())"),
        (
            "compare all rows",
            BLIND + "    o = torch.arange(n)\n    o[0], o[1] = 1, 0\n"
            "    return torch.allclose(f(x[o]), f(x)[o], atol=1e-4)",
        ),
    ],
}
