"""The canonical arrays of a data set, known by their checksums, and what can be wrong with a file of them."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

SPLITS = ("train", "test")


class DataError(RuntimeError):
    """Base of what can go wrong with the course's data."""


class DamagedFile(DataError):
    """A file that does not hold what it should: truncated, changed, or something else altogether."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path} is damaged: {self.reason}"


class Split(NamedTuple):
    """One split: images uint8 (N, H, W) or (N, H, W, 3), labels uint8 (N,)."""

    images: np.ndarray
    labels: np.ndarray


def digest(array: np.ndarray) -> str:
    """SHA-256 of an array's bytes in C order, as hex."""
    return hashlib.sha256(memoryview(np.ascontiguousarray(array)).cast("B")).hexdigest()


def check(array: np.ndarray, shape: tuple[int, ...], expected: str, path: Path) -> None:
    """Raise DamagedFile naming `path` unless `array` is uint8, has `shape` and the `expected` SHA-256."""
    if array.dtype != np.uint8 or array.shape != shape:
        raise DamagedFile(path, f"holds {array.dtype} {array.shape}, expected uint8 {shape}")
    if (found := digest(array)) != expected:
        raise DamagedFile(path, f"SHA-256 of its contents is {found[:12]}…, expected {expected[:12]}…")


@contextlib.contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Makes every exception a DamagedFile that names `path`: on damaged files readers fail in many ways."""
    try:
        yield
    except DamagedFile:
        raise
    except Exception as error:
        raise DamagedFile(path, reason(error)) from error


def reason(error: BaseException) -> str:
    """One line for an exception."""
    text = (getattr(error, "strerror", None) or str(error)).splitlines()
    return text[0][:160] if text else type(error).__name__
