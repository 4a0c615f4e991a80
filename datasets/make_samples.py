"""Make the bundled samples from the full sets.

    python datasets/make_samples.py

The full sets are where `make data` puts them. A sample is the first images of each
class, as many of each, in the order of the full set. The files are the same for the same version of Pillow's WebP
encoder; the arrays in them are the same for any, and their SHA-256, printed at the end, is what
`shared/data/facts.toml` holds them to.
"""

import numpy as np
from PIL import Image

from shared.data.arrays import SPLITS, Split, digest
from shared.data.decoding import read_split, sample_paths
from shared.data.facts import ALL, Facts
from shared.data.fetching import data_root


def select(labels: np.ndarray, count: int, classes: int) -> np.ndarray:
    """Indices, ascending, of the first `count / classes` of each class."""
    if count % classes:
        raise ValueError(f"{count} images cannot be balanced over {classes} classes")
    return np.sort(np.concatenate([np.flatnonzero(labels == c)[: count // classes] for c in range(classes)]))


def write_sample(facts: Facts, split: str, sample: Split, *, columns: int = 100, effort: int = 100) -> None:
    """Write one split: a lossless picture with one band of images a class, and the labels.

    Sorted by class, neighbours look alike, which makes the file smaller and the picture worth looking at.

    Args:
        columns: images side by side; must divide the number of images.
        effort: 0 (fast) to 100 (smallest file).
    """
    path, labels_path = sample_paths(facts, split)
    height, width, *channels = facts.image_shape
    tiles = sample.images[np.argsort(sample.labels, kind="stable")].reshape(-1, columns, height, width, *channels)
    grid = tiles.swapaxes(1, 2).reshape(-1, columns * width, *channels)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(grid).save(path, "WEBP", lossless=True, method=6 if effort > 50 else 0, quality=effort)
    np.save(labels_path, sample.labels)


def main() -> None:
    """Write the samples of both sets and print their sizes and checksums."""
    root = data_root()
    for facts in ALL.values():
        for split in SPLITS:
            full = read_split(facts, root, split)
            rows = select(full.labels, facts.sample[split].count, len(facts.classes))
            sample = Split(full.images[rows], full.labels[rows])
            write_sample(facts, split, sample)
            size = sum(path.stat().st_size for path in sample_paths(facts, split))
            print(f"{facts.name} {split}: {len(rows):,} images, {size:,} bytes")
            print(f"  images {digest(sample.images)}\n  labels {digest(sample.labels)}", flush=True)


if __name__ == "__main__":
    main()
