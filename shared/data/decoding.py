"""The files the full sets and the samples come in, decoded to the canonical arrays.

Nothing read here is trusted: archives are read member by member and never extracted, pickles are read by an unpickler
that can build lists of numbers and byte arrays only, and what comes out counts only when it has the expected SHA-256.
"""

import gzip
import io
import json
import pickle
import struct
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from shared.data.arrays import DamagedFile, DataError, Split, blaming, check, reason
from shared.data.facts import IN_WHEEL, Facts, SplitFacts


def read_split(facts: Facts, folder: Path, split: str, *, archives: bool = False) -> Split:
    """Read one split of the full set from whatever lies in `folder`; `archives` says whether packed sets count, too.

    Raises FileNotFoundError if nothing complete is there, DamagedFile if something is, but all of it is damaged.
    """
    damaged = None
    for layout in facts.layouts:
        place, names, archive = folder / layout["below"], layout[split], layout["below"].endswith("gz")
        try:
            with blaming(place):
                if (archives and place.is_file()) if archive else all((place / name).exists() for name in names):
                    return _read(facts, facts.full[split], place, names)
        except DamagedFile as error:
            damaged = damaged or error
    raise damaged or FileNotFoundError(f"no {facts.name} {split} files in {folder}")


def read_sample(facts: Facts, split: str) -> Split:
    """Read one split of the bundled sample. Raises DataError (DamagedFile if it is there) with the remedy."""
    names = [path.name for path in sample_paths(facts, split)]
    if not facts.sample_folder.is_dir():
        raise DataError(
            f"The course's sample of the data is missing: there is no folder {facts.sample_folder}. The course's wheel "
            "has it, and its repository; install `shared` again from one of them, with pip."
        )
    try:
        return _read(facts, facts.sample[split], facts.sample_folder, names)
    except DamagedFile as error:
        remedy = f"git -C {error.path.parent} checkout -- {error.path.name}"
        if IN_WHEEL:
            remedy = f"{sys.executable} -m pip install --force-reinstall --no-deps, and the course's wheel"
        text = f"It belongs to the course; take it from there again ({remedy})"
        if not error.path.exists():
            raise DataError(f"{error.path} is missing. {text}") from error
        raise DamagedFile(error.path, f"{error.reason}. {text}") from error


def sample_paths(facts: Facts, split: str) -> tuple[Path, Path]:
    """The bundled picture and labels of one split."""
    return tuple(facts.sample_folder / f"{facts.key}_{split}_{end}" for end in ("images.webp", "labels.npy"))


def _read(facts: Facts, part: SplitFacts, place: Path, names: Sequence[str]) -> Split:
    """Read a split from the files `names`, images first, of a folder or an archive. Raises DamagedFile."""
    if place.is_file():
        paths, contents = [place] * len(names), _read_members(place, names)
    else:
        paths = [place / name for name in names]
        contents = [_unpacked(path) for path in paths]
    decoded = []
    for path, name, data in zip(paths, names, contents, strict=True):
        with blaming(path):
            decoded.append(_decode(name, data, facts.image_shape))
    images, labels = zip(*decoded, strict=True) if isinstance(decoded[0], Split) else (decoded[:-1], decoded[-1:])
    with blaming(paths[0]):
        images, labels = np.concatenate(images), np.concatenate(labels)
        check(labels, (part.count,), part.labels, paths[-1])
        if names[0].endswith(".webp"):  # sorted by class, which the sample is not
            images = images[np.argsort(np.argsort(labels, kind="stable"))]
        # which of five batches is damaged nobody knows
        check(images, (part.count, *facts.image_shape), part.images, paths[0] if len(paths) == 2 else place)
    return Split(images, labels)


def _unpacked(path: Path) -> bytes:
    """The bytes of a file, unpacked if it is gzipped."""
    with blaming(path), (gzip.open if path.name.endswith("gz") else open)(path, "rb") as file:
        return file.read()


def _read_members(path: Path, names: Sequence[str]) -> list[bytes]:
    """Read the files called `names` (last part of the member's path) out of a gzipped tar archive.

    Nothing is extracted to disk, so member paths, links and modes have no effect. Raises DamagedFile.
    """
    with blaming(path), tarfile.open(path, "r:gz") as tar:
        found = {member.name.rsplit("/", 1)[-1]: member for member in tar if member.isreg()}
        if missing := sorted(set(names) - found.keys()):
            raise ValueError(f"truncated or another archive: lacks {', '.join(missing)}")
        return [tar.extractfile(found[name]).read() for name in names]


def _decode(name: str, data: bytes, shape: Sequence[int]) -> np.ndarray | Split:
    """The array in one file, with images of that shape; both arrays of a batch."""
    match Path(name.removesuffix(".gz")).suffix:
        case ".npy":
            return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        case ".json":
            return np.array(json.loads(data), np.uint8)
        case ".png" | ".webp":
            return _picture(data, shape)
    return _idx(data) if name.endswith(("ubyte", "ubyte.gz")) else _batch(data)


def _idx(data: bytes) -> np.ndarray:
    """IDX, the format of MNIST: two zeros, type 8 (bytes), the number of dimensions, their sizes, the bytes."""
    if not data.startswith((b"\0\0\x08\1", b"\0\0\x08\3")):
        raise ValueError(f"not an IDX file of images or labels (starts with {data[:12]!r})")
    shape = struct.unpack_from(f">{data[3]}I", data, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def _picture(data: bytes, shape: Sequence[int]) -> np.ndarray:
    """The images in a picture: one a row of a PNG, as packaged for npm; side by side in a WebP, as bundled."""
    with Image.open(io.BytesIO(data), formats=("PNG", "WEBP")) as picture:
        height, width = shape[:2] if picture.format == "WEBP" else (1, shape[0] * shape[1])
        rows, columns = picture.height // height, picture.width // width if picture.format == "WEBP" else 1
        pixels = np.asarray(picture.convert("RGB" if len(shape) == 3 else "L"))
    return pixels.reshape(rows, height, columns, width, -1).swapaxes(1, 2).reshape(-1, *shape)


def _batch(data: bytes) -> Split:
    """CIFAR-10 as its authors publish it, pickled by Python 2: `{"data": uint8 (n, 3072), "labels": list}`."""
    try:
        batch = _BatchUnpickler(io.BytesIO(data), encoding="bytes").load()
        _, shape, _, _, raw = batch[b"data"].state
        planes = np.frombuffer(raw, np.uint8).reshape(shape).reshape(-1, 3, 32, 32)
        return Split(planes.transpose(0, 2, 3, 1), np.array(batch[b"labels"], np.uint8))
    except Exception as error:  # a hostile pickle may fail in any way
        raise ValueError(f"not a CIFAR-10 batch ({reason(error)})") from error


class _BatchUnpickler(pickle.Unpickler):
    """Can call nothing but a stand-in for numpy's array and dtype, which only keeps its state."""

    class Recorded:
        def __init__(self, *_: object) -> None: ...

        def __setstate__(self, state: tuple) -> None:
            self.state = state

    def find_class(self, module: str, name: str) -> type:
        if f"{module}.{name}" in ("numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype"):
            return self.Recorded
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which no CIFAR-10 batch needs")
