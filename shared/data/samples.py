"""The samples that come with the course: one lossless picture and the labels a split."""

from pathlib import Path

import numpy as np
from PIL import Image

from shared.data.arrays import DamagedFile, Split, blaming, check, npy_array
from shared.data.facts import Facts


def sample_paths(facts: Facts, split: str) -> tuple[Path, Path]:
    """The picture and the labels of one split."""
    stem = f"{facts.key}_{split}"
    return facts.sample_folder / f"{stem}_images.webp", facts.sample_folder / f"{stem}_labels.npy"


def read_sample(facts: Facts, split: str) -> Split:
    """Read one split. Raises DamagedFile with the remedy."""
    part, (path, labels_path) = facts.sample[split], sample_paths(facts, split)
    height, width = facts.image_shape[:2]
    try:
        with blaming(labels_path):
            labels = check(npy_array(labels_path.read_bytes(), labels_path), (part.count,), part.labels, labels_path)
        with blaming(path), Image.open(path, formats=("WEBP",)) as picture:
            columns, rows = picture.width // width, picture.height // height
            if (columns * width, rows * height) != picture.size or columns * rows != part.count:
                raise ValueError(f"a picture of {picture.size} pixels does not hold {part.count:,} images")
            pixels = np.asarray(picture.convert("RGB" if len(facts.image_shape) == 3 else "L"))
            tiles = pixels.reshape(rows, height, columns, width, -1).swapaxes(1, 2).reshape(-1, *facts.image_shape)
            images = np.empty_like(tiles)
            images[np.argsort(labels, kind="stable")] = tiles  # the picture is sorted by class, the sample is not
            return Split(check(images, tiles.shape, part.images, path), labels)
    except DamagedFile as error:
        raise DamagedFile(
            error.path,
            f"{error.reason}. It belongs to the course; take it from there again "
            f"(git -C {error.path.parent} checkout -- {error.path.name})",
        ) from error


def write_sample(facts: Facts, split: str, sample: Split, *, columns: int = 100, effort: int = 100) -> None:
    """Write one split: a lossless picture with one band of images a class, and the labels.

    Sorted by class, neighbours look alike, which makes the file smaller and the picture worth looking at.

    Args:
        columns: images side by side; must divide the number of images.
        effort: 0 (fast) to 100 (smallest file).
    """
    path, labels_path = sample_paths(facts, split)
    tiles = sample.images[np.argsort(sample.labels, kind="stable")]
    height, width, *channels = facts.image_shape
    rows = len(tiles) // columns
    grid = tiles.reshape(rows, columns, height, width, -1).swapaxes(1, 2)
    picture = Image.fromarray(np.ascontiguousarray(grid.reshape(rows * height, columns * width, *channels)))
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, "WEBP", lossless=True, method=6 if effort > 50 else 0, quality=effort)
    np.save(labels_path, sample.labels)
