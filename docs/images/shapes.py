"""Train the captioning model shown in docs/explore.md: two coloured shapes and their relative position.

    python docs/images/shapes.py RUN          about five minutes on one core

An image of 64 x 64 pixels has 64 patches; the caption is "a red circle above a blue square", or "left of". Images are
generated, so none occurs twice.
"""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.models.config import ModelConfig
from regard.models.folder import save
from regard.models.transformer import build
from regard.text.tokenizer import Tokenizer

SIDE = 64
COLOURS = {
    "red": (0.85, 0.25, 0.2),
    "green": (0.25, 0.6, 0.35),
    "blue": (0.2, 0.4, 0.8),
    "yellow": (0.95, 0.8, 0.25),
}
SHAPES = ("circle", "square", "triangle")
POSITIONS = {"above": ((0.5, 0.27), (0.5, 0.73)), "left of": ((0.27, 0.5), (0.73, 0.5))}
STEPS, BATCH = 900, 48


def draw(choose: random.Random) -> tuple[Tensor, str]:
    """An image [3, side, side] between 0 and 1, and its caption."""
    pixels = torch.full((3, SIDE, SIDE), 0.93)
    y, x = torch.meshgrid(torch.arange(SIDE) + 0.5, torch.arange(SIDE) + 0.5, indexing="ij")
    relation = choose.choice(list(POSITIONS))
    named = []
    for middle in POSITIONS[relation]:
        colour, shape = choose.choice(list(COLOURS)), choose.choice(SHAPES)
        radius = choose.uniform(8, 11)
        dx = x - (middle[0] + choose.uniform(-0.06, 0.06)) * SIDE
        dy = y - (middle[1] + choose.uniform(-0.06, 0.06)) * SIDE
        inside = {
            "circle": dx**2 + dy**2 < radius**2,
            "square": (dx.abs() < 0.88 * radius) & (dy.abs() < 0.88 * radius),
            "triangle": (dy < 0.8 * radius) & (dy > 2 * dx.abs() - radius),
        }[shape]
        pixels[:, inside] = torch.tensor(COLOURS[colour])[:, None]
        named.append(f"a {colour} {shape}")
    return pixels, f" {relation} ".join(named)


def example_image(seed: int = 5) -> bytes:
    """One of them as a PNG file."""
    from PIL import Image

    pixels, _ = draw(random.Random(seed))
    file = io.BytesIO()
    Image.fromarray((pixels.permute(1, 2, 0).numpy() * 255).astype("uint8")).save(file, "PNG")
    return file.getvalue()


def train(folder: Path) -> None:
    words = " ".join(("a above left of", *COLOURS, *SHAPES))
    tokenizer = Tokenizer.train([words], "word")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = ModelConfig(
        input="patches", image_size=SIDE, patch_size=8, vocab_size=len(tokenizer), position="learned", norm_order="pre",
        dim=96, layers=2, heads=4, ff_dim=256, dropout=0.0, embed_dropout=0.0, max_length=80,
    )  # fmt: skip
    model, choose = build(config), random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (step + 1) / 100) * max(0.05, 1 - step / STEPS)
        batch = [draw(choose) for _ in range(BATCH)]
        ids = [torch.tensor([tokenizer.bos, *tokenizer.encode(caption), tokenizer.eos]) for _, caption in batch]
        target = pad_sequence(ids, batch_first=True)
        logits = model(torch.stack([pixels for pixels, _ in batch]), target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=tokenizer.pad or 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}, loss {loss.item():.4f}", flush=True)
    save(model.eval(), folder, tokenizers={"tokenizer": tokenizer})


if __name__ == "__main__":
    train(Path(sys.argv[1]))
