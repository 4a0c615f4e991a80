"""What a data set, a split and a mirror are, and what can be wrong with them: the words of the other data files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

SPLITS = ("train", "test")


class DataError(RuntimeError):
    """Base of what can go wrong with the course's data."""


class DamagedFile(DataError):
    """A file that does not hold what it should: truncated, changed, or something else altogether."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged: {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple:  # exceptions travel between processes
        return type(self), (self.path, self.reason)


class Split(NamedTuple):
    """One split as it is hashed: images uint8 (N, H, W) or (N, H, W, 3), labels uint8 (N,)."""

    images: np.ndarray
    labels: np.ndarray


class Mirror(Protocol):
    """A place that a full set can be fetched from; `str()` names it for the user. See `shared.downloads`.

    Attributes:
        size: bytes that it downloads at most, 0 if nothing is downloaded.
        program: name of another program that it starts, or "".
    """

    @property
    def size(self) -> int: ...

    @property
    def program(self) -> str: ...

    def fetch(self, folder: Path, patience: Any, show_progress: bool) -> Path:
        """Put the files into `folder`; return the folder to decode. Raises DownloadError."""


@dataclass(frozen=True)
class SplitSpec:
    """One split: the number of its images, and the SHA-256 of its images and labels."""

    count: int
    images: str
    labels: str


@dataclass(frozen=True)
class DataSpec:
    """A data set.

    Attributes:
        key: what it is called in file names and on the command line.
        name: what it is called in text and by torchvision.
        layout: the files it comes in, "idx" or "cifar" (see `shared.data_formats`).
        image_shape: (H, W) or (H, W, 3) of one image.
        classes: their names, in the order of the labels.
        mean, std: of the full train split for each channel, of values in [0, 1].
        full, sample: the splits "train" and "test".
        mirrors: where the full set comes from, first choice first.
        archives: alternative sets of file names in which a user's own mirror may hold it.
        max_bytes: no file of it is larger.
        sample_folder: where the bundled sample lies.
        archive_sha256: of the authors' archive.
        batch_md5: of the files in it.
    """

    key: str
    name: str
    layout: str
    image_shape: tuple[int, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    full: Mapping[str, SplitSpec]
    sample: Mapping[str, SplitSpec]
    mirrors: tuple[Mirror, ...]
    archives: tuple[tuple[str, ...], ...]
    max_bytes: int
    sample_folder: Path
    archive_sha256: str = ""
    batch_md5: Mapping[str, str] = field(default_factory=dict)
