"""Plausible mistakes in the exercises of lesson 12."""

LOSS = (
    "import torch\nimport torch.nn.functional as F\ndef contrastive_loss(images, texts, scale):\n"
    "    a, b = {vectors}\n    s = scale * a @ b.T\n    pair = torch.arange(len(s))\n    return {result}"
)
NORMAL = "F.normalize(images, dim=-1), F.normalize(texts, dim=-1)"
BOTH = "(F.cross_entropy(s, pair) + F.cross_entropy(s.T, pair)) / 2"

MISTAKES = {
    1: [
        ("rows and columns", "def tokens(image_size, patch_size, cls): return image_size // patch_size + int(cls)"),
        ("one more token", "def tokens(image_size, patch_size, cls): return (image_size // patch_size) ** 2"),
    ],
    2: [
        ("kernel - 1", "def layers_needed(side, kernel): return -(-side // kernel)"),
        ("1 + l", "def layers_needed(side, kernel): return (side - 1) // 2"),
    ],
    3: [
        (
            "plain reshape",
            "def to_patches(images, size):\n    b, c, h, w = images.shape\n"
            "    return images.reshape(b, (h // size) * (w // size), c * size * size)",
        ),
        (
            "second axis",
            "import torch.nn.functional as F\ndef to_patches(images, size):\n"
            "    return F.unfold(images, kernel_size=size, stride=size)",
        ),
        (
            "first the channel",
            "def to_patches(images, size):\n    b, c, h, w = images.shape\n"
            "    grid = images.reshape(b, c, h // size, size, w // size, size)\n"
            "    return grid.permute(0, 2, 4, 3, 5, 1).reshape(b, -1, c * size * size)",
        ),
    ],
    4: [
        ("changes nothing", "def window_of(row, column, size, shift): return row // size, column // size"),
        (
            "begin at",
            "def window_of(row, column, size, shift): return (row + shift) // size, (column + shift) // size",
        ),
        ("begin at", "def window_of(row, column, size, shift): return row // size"),
    ],
    5: [
        ("normalised", LOSS.format(vectors="images, texts", result=BOTH)),
        ("Both directions", LOSS.format(vectors=NORMAL, result="F.cross_entropy(s, pair)")),
        ("diagonal", LOSS.format(vectors=NORMAL, result="-s.diag().mean()")),
    ],
}
