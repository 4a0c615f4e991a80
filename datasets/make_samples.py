"""Make the bundled samples from the full sets.

    python datasets/make_samples.py

The full sets are where `make data` puts them. A sample is the first images of each
class, as many of each, in the order of the full set. The files are the same for the same version of Pillow's WebP
encoder; the arrays in them are the same for any, and their SHA-256, printed at the end, is what
`shared/data/facts.toml` holds them to.
"""

import numpy as np

from shared.data.arrays import SPLITS, Split, digest
from shared.data.decoding import read_split, sample_paths, write_sample
from shared.data.facts import ALL
from shared.data.fetching import data_root


def select(labels: np.ndarray, count: int, classes: int) -> np.ndarray:
    """Indices, ascending, of the first `count / classes` of each class."""
    if count % classes:
        raise ValueError(f"{count} images cannot be balanced over {classes} classes")
    return np.sort(np.concatenate([np.flatnonzero(labels == c)[: count // classes] for c in range(classes)]))


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
