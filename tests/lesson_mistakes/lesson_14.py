"""Plausible mistakes in the exercises of lesson 14."""

FLIP = """
import itertools
def sign_flip_p(differences):
    observed = sum(differences)
    choices = list(itertools.product((1, -1), repeat=len(differences)))
    sums = [sum(s * x for s, x in zip(signs, differences)) for signs in choices]
    return sum({test} for one in sums) / {count}
"""
MERGE = (
    "import math\ndef merge(first, second):\n    (m1, l1, o1), (m2, l2, o2) = first, second\n    m = {m}\n    {rest}"
)

MISTAKES = {
    1: [
        ("smaller than dim x dim", "def attention_parameters(dim, heads, kv_heads): return 4 * dim * dim"),
        (
            "output projection is missing",
            "def attention_parameters(dim, heads, kv_heads): return dim * dim + 2 * dim * kv_heads * dim // heads",
        ),
        (
            "K and V dim x",
            "def attention_parameters(dim, heads, kv_heads): return 2 * dim * dim + dim * kv_heads * dim // heads",
        ),
    ],
    2: [
        ("keys and values", "def cache_bytes(layers, h, d, n, rows, size): return layers * h * d * n * rows * size"),
        ("Every layer", "def cache_bytes(layers, h, d, n, rows, size): return 2 * h * d * n * rows * size"),
        ("rows", "def cache_bytes(layers, h, d, n, rows, size): return 2 * layers * h * d * n * size"),
    ],
    3: [
        (
            "two products with n²",
            "def share_of_scores(n, dim, ff_dim):\n    s = 2 * n * n * dim\n"
            "    return s / (s + 8 * n * dim**2 + 4 * n * dim * ff_dim)",
        ),
        (
            "projections 8·n·dim²",
            "def share_of_scores(n, dim, ff_dim):\n    s = 4 * n * n * dim\n"
            "    return s / (s + 6 * n * dim**2 + 4 * n * dim * ff_dim)",
        ),
        ("4·n²·dim", "def share_of_scores(n, dim, ff_dim): return n / (n + dim)"),
    ],
    4: [
        ("larger of the two", MERGE.format(m="m1", rest="return m, l1 + l2, o1 + o2")),
        ("multiplied by exp", MERGE.format(m="max(m1, m2)", rest="return m, l1 + l2, o1 + o2")),
        (
            "not a mean",
            MERGE.format(
                m="max(m1, m2)",
                rest="a, b = math.exp(m1 - m), math.exp(m2 - m)\n"
                "    return m, (a * l1 + b * l2) / 2, (a * o1 + b * o2) / 2",
            ),
        ),
    ],
    5: [
        (
            "other direction",
            FLIP.format(test="one >= observed if observed > 0 else one <= observed", count="len(choices)"),
        ),
        ("without a flip counts", FLIP.format(test="abs(one) > abs(observed) + 1e-9", count="len(choices)")),
        ("as large", FLIP.format(test="abs(one) >= abs(observed) - 1e-9", count="len(differences)")),
    ],
}
