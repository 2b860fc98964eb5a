"""Pictures as data: files, idx and folders; augmentation; the loss of mixed pictures."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from regard.data.augment import Augmentation, AugmentConfig, ImageBatch, ImageStream, augment, sample
from regard.data.images import ImageData, Images, list_set, make_images, open_pixels, read_idx
from regard.data.streams import Examples
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.tasks.image_classification import image_loss, mixed_loss
from squares import write_idx, write_squares

# --- files


def test_a_picture_is_read_as_pillow_reads_it(tmp_path: Path) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    Image.fromarray(colours).save(tmp_path / "a.png")
    pixels, size = open_pixels(tmp_path / "a.png", 3, 8)
    expected = Image.fromarray(colours).resize((8, 8), Image.Resampling.BILINEAR)
    assert size == (20, 12) and torch.equal(pixels, torch.from_numpy(np.array(expected)).permute(2, 0, 1))
    grey, _ = open_pixels(tmp_path / "a.png", 1, 12)
    assert grey.shape == (1, 12, 12)
    Image.fromarray(np.full((4, 4), 65535, dtype=np.uint16)).save(tmp_path / "deep.png")  # 16 bits
    assert int(open_pixels(tmp_path / "deep.png", 1, 4)[0].min()) == 255
    Image.fromarray(np.full((4, 4), 257 * 77, dtype=np.uint16)).save(tmp_path / "deep.png")
    assert int(open_pixels(tmp_path / "deep.png", 1, 4)[0].max()) == 77
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert int(open_pixels(tmp_path / "clear.png", 3, 4)[0].min()) == 255  # laid on white
    turned = Image.fromarray(colours)
    exif = turned.getexif()
    exif[0x0112] = 6  # the camera was held upright
    turned.save(tmp_path / "turned.png", exif=exif)
    upright = torch.from_numpy(np.rot90(colours, -1).copy())
    want = Image.fromarray(upright.numpy()).resize((8, 8), Image.Resampling.BILINEAR)
    assert torch.equal(open_pixels(tmp_path / "turned.png", 3, 8)[0], torch.from_numpy(np.array(want)).permute(2, 0, 1))


def test_what_is_no_picture(tmp_path: Path) -> None:
    def save(name: str, image: Image.Image, **options: object) -> Path:
        image.save(tmp_path / name, **options)
        return tmp_path / name

    plain = Image.new("L", (4, 4))
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "cut.png").write_bytes(save("whole.png", Image.new("RGB", (64, 64))).read_bytes()[:60])
    frames = [Image.new("L", (4, 4), shade) for shade in (0, 100, 200)]
    for path, message in (
        (tmp_path / "none.png", "no such file"),
        (tmp_path / "text.png", "cannot be read as an image"),
        (tmp_path / "empty.png", "cannot be read as an image"),
        (tmp_path / "cut.png", "cannot be read as an image"),
        (save("moving.gif", frames[0], save_all=True, append_images=frames[1:]), "has 3 frames; save one of them"),
        (save("print.jpg", Image.new("CMYK", (4, 4))), "is in CMYK.*save it as RGB"),
        (save("dot.png", Image.new("L", (1, 1))), "has 1 x 1 pixels, too few"),
        (save("float.tiff", Image.new("F", (4, 4))), "of unknown range"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            open_pixels(path, 3, 4)
        assert str(path) in str(caught.value)
    with pytest.raises(UserError, match="channels = 2"):
        open_pixels(save("plain.png", plain), 2, 4)


def test_idx_files(tmp_path: Path) -> None:
    numbers = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    write_idx(tmp_path / "a", numbers)
    assert torch.equal(read_idx(tmp_path / "a"), torch.from_numpy(numbers).byte())
    (tmp_path / "a.gz").write_bytes(gzip.compress((tmp_path / "a").read_bytes()))
    assert torch.equal(read_idx(tmp_path / "a.gz"), torch.from_numpy(numbers).byte())
    whole = (tmp_path / "a").read_bytes()
    for content, message in (
        (whole[:-1], r"declares 2 x 3 x 4 bytes, but has 23"), (whole[:9], "truncated within its header"),
        (b"\x89PNG....", "is not an idx file of bytes: it begins with 89 50 4e 47"), (b"", "begins with nothing"),
        (gzip.compress(whole)[:-12], r"cannot be read \(Compressed file ended"),
    ):  # fmt: skip
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_idx(tmp_path / "a")


def test_folders_and_idx_give_the_same_pictures(tmp_path: Path) -> None:
    here = tmp_path
    write_squares(here)
    config = ImageData(train=("photos/train",), folder=str(here))
    listed = list_set(config.train, config, ("bright", "dark"))
    pictures = make_images(listed, here / "store", 1, 8, skip_bad=False)
    idx = read_idx(here / "train-images")[:, None]
    order = [int(path.stem) for path in listed.images]
    assert torch.equal(pictures[torch.arange(24)], idx[order])
    assert pictures.labels.tolist() == [1 - number % 2 for number in order]  # bright comes first by name
    before = (here / "store" / "pixels.values").stat().st_mtime_ns
    make_images(listed, here / "store", 1, 8, skip_bad=False)
    assert (here / "store" / "pixels.values").stat().st_mtime_ns == before  # not decoded again
    rest, held = pictures.split(0.25)
    both = torch.cat((rest[torch.arange(18)], held[torch.arange(6)])).flatten(1)
    assert len(rest) == 18 and sorted(both.tolist()) == sorted(pictures[torch.arange(24)].flatten(1).tolist())


# --- augmentation


def test_draws_follow_from_seed_epoch_and_batch_and_stay_in_bounds() -> None:
    config = AugmentConfig(crop=3, flip=0.5, erase=0.5, mixup=0.3)
    one, again, other = (sample(config, 200, 28, 1, epoch, 7) for epoch in (4, 4, 5))
    for name in vars(one):
        assert torch.equal(getattr(one, name), getattr(again, name))
        assert not torch.equal(getattr(one, name), getattr(other, name))
    top, bottom, left, right = one.box.T
    erased = bottom > 0
    area = ((bottom - top) * (right - left))[erased] / 28**2
    assert 0.35 < erased.float().mean() < 0.65 and area.min() > 0.01 and area.max() < 0.4
    assert one.box.min() >= 0 and one.box.max() <= 28 and one.shift.abs().max() == 3
    assert one.weight.min() >= 0.5 and one.weight.max() <= 1 and sorted(one.partner.tolist()) == list(range(200))
    assert 0.35 < one.mirrored.float().mean() < 0.65


def test_each_change_does_what_it_says() -> None:
    pixels = torch.rand(2, 3, 6, 6)
    nothing = sample(AugmentConfig(), 2, 6, 0)
    assert torch.equal(augment(pixels, nothing, 0), pixels)

    def changed(crop: int = 0, **given: torch.Tensor) -> torch.Tensor:
        return augment(pixels, Augmentation(**{**vars(nothing), **given}), crop)

    assert torch.equal(changed(mirrored=torch.tensor([True, False])), torch.stack((pixels[0].flip(-1), pixels[1])))
    moved = changed(2, shift=torch.tensor([[1, -2], [0, 0]]))
    expected = torch.zeros(3, 6, 6)
    expected[:, 1:, :4] = pixels[0, :, :5, 2:]  # one down, two to the left; black comes in
    assert torch.equal(moved[0], expected) and torch.equal(moved[1], pixels[1])
    both = changed(2, shift=torch.tensor([[0, 1], [0, 0]]), mirrored=torch.tensor([True, False]))
    assert torch.equal(both[0, :, :, 1:], pixels[0].flip(-1)[:, :, :5])  # mirrored, then moved
    erased = changed(box=torch.tensor([[1, 3, 2, 6], [0, 0, 0, 0]]), grey=torch.tensor([0.25, 0.5]))
    assert (erased[0, :, 1:3, 2:6] == 0.25).all() and torch.equal(erased[0, :, 3:], pixels[0, :, 3:])
    mixed = changed(weight=torch.tensor([0.7, 1.0]), partner=torch.tensor([1, 0]))
    torch.testing.assert_close(mixed[0], 0.7 * pixels[0] + 0.3 * pixels[1])
    assert torch.equal(mixed[1], pixels[1])


def test_the_loss_of_mixed_pictures_is_the_mix_of_losses() -> None:
    """λ CE(a) + (1 - λ) CE(b), as the paper writes it; with smoothing as torch defines it."""
    logits, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    draws = sample(AugmentConfig(mixup=0.5), 5, 8, 3)
    each = torch.nn.functional.cross_entropy
    for smoothing in (0.0, 0.1):
        own = each(logits, labels, reduction="none", label_smoothing=smoothing)
        other = each(logits, labels[draws.partner], reduction="none", label_smoothing=smoothing)
        expected = (draws.weight * own + (1 - draws.weight) * other).sum()
        torch.testing.assert_close(mixed_loss(logits, labels, draws, smoothing), expected)


def test_batches_of_one_shape_that_a_graph_can_record() -> None:
    model = build(ModelConfig(
        architecture="encoder", input="patches", output_head="classes", classes=3, dim=16, heads=2, layers=1, ff_dim=16,
        image_size=8, patch_size=4, channels=1, dropout=0.0, embed_dropout=0.0,
    ))  # fmt: skip
    config = AugmentConfig(crop=1, mixup=0.2)

    def make(rows: torch.Tensor) -> ImageBatch:
        draws = sample(config, len(rows), 8, 1, 0, 0)
        return ImageBatch(*vars(draws).values(), torch.zeros(len(rows), 1, 8, 8, dtype=torch.uint8), rows % 3)

    stream = iter(Examples(10, 4, 1, make))
    first, second = next(stream), next(stream)
    held = first.clone()
    held.copy_(second)
    assert all(torch.equal(getattr(held, name), getattr(second, name)) for name in vars(held))
    loss, count = image_loss(model, held, crop=1)
    assert int(count) == 4 and torch.isfinite(loss)
    seen = torch.cat([next(stream).labels for _ in range(2)])  # an epoch has two whole batches
    assert len(seen) == 8


def test_a_stream_of_pictures_draws_ahead_and_goes_on_from_any_point() -> None:
    """Whatever is drawn ahead is what `sample` gives for (seed, epoch, batch), and every row comes once an epoch."""
    config = AugmentConfig(crop=2, flip=0.5, erase=0.5, mixup=0.4)
    pixels = torch.randint(256, (21, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pictures = Images(pixels, torch.arange(21) % 3)

    def stream() -> ImageStream:
        return ImageStream(pictures, config, 4, 8, 7, torch.device("cpu"))

    first = stream()
    walk = iter(first)
    seen = [next(walk) for _ in range(8)]  # five batches an epoch
    position = first.position
    assert position == {"epoch": 1, "index": 3}
    again = stream()
    again.seek(position)
    ahead, other = next(walk), next(iter(again))
    assert all(torch.equal(getattr(ahead, name), getattr(other, name)) for name in vars(ahead))
    for number, batch in enumerate(seen):
        expected = sample(config, 4, 8, 7, *divmod(number, 5))
        assert all(torch.equal(getattr(batch, name), value) for name, value in vars(expected).items())
    epoch = torch.cat([batch.pixels for batch in seen[:5]]).flatten(1)
    assert len(epoch.unique(dim=0)) == 20 and not torch.equal(seen[0].pixels, seen[5].pixels)
