"""The full data sets on disk: finding, fetching and keeping them.

Whatever is stored was checked first, is written to a temporary file beside its place and moved there in one step, by
one process at a time. A file that somebody else put there is never deleted: if it must give way, it is renamed.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from shared.data_formats import (
    CIFAR_FOLDER,
    IDX_NAMES,
    NPY_FOLDER,
    decode,
    has_archive,
    idx_header,
    layouts,
    npy_bytes,
    read_split,
)
from shared.data_specs import DATASETS
from shared.data_types import SPLITS, DamagedFile, DataError, DataSpec, Split
from shared.downloads import PATIENT, QUICK, DownloadError, FolderMirror, Mirror, Patience, TooSlow, mirrors_at

REMEMBER_FAILURE_HOURS = 6

# Who asked for the full set should not wait an hour for the first mirror when the second would take a minute: all are
# tried quickly first, then those that were only too slow get the time they need.
PATIENT_ROUNDS = (QUICK, PATIENT)


class FetchError(DataError):
    """The full set could not be fetched.

    Attributes:
        summary: the reason in a few words, for a one-line message.
    """

    def __init__(self, message: str, summary: str) -> None:
        super().__init__(message)
        self.summary = summary

    def __reduce__(self) -> tuple:  # exceptions travel between processes
        return type(self), (self.args[0], self.summary)


@dataclass(frozen=True)
class Fetched:
    """Where a full set came from: a mirror's name, or None if it was there already; files renamed on the way."""

    mirror: str | None
    set_aside: tuple[Path, ...] = ()


def data_root(root: str | os.PathLike | None = None) -> Path:
    """The folder of the full sets: `root`, else COURSE_DATA_DIR, else datasets/full."""
    chosen = root or os.environ.get("COURSE_DATA_DIR") or DATASETS / "full"
    return Path(chosen).expanduser().absolute()


def mirrors_for(spec: DataSpec, root: Path, mirror: str | None = None) -> list[Mirror]:
    """The mirrors to try, in order.

    Args:
        mirror: a URL or folder to try first; default COURSE_DATA_MIRROR.

    Raises:
        ValueError: `mirror` is a URL of an unsupported kind.
    """
    first = mirror or os.environ.get("COURSE_DATA_MIRROR")
    mirrors = mirrors_at(first, spec.archives, spec.max_bytes) if first else []
    if has_archive(spec, root):
        mirrors.append(FolderMirror(root))  # an archive downloaded by hand
    absent = [m for m in spec.mirrors if isinstance(m, FolderMirror) and not m.path.is_dir()]
    return mirrors + [m for m in spec.mirrors if m not in absent]


def fetch(
    spec: DataSpec,
    root: Path,
    *,
    mirror: str | None = None,
    rounds: Sequence[Patience] = PATIENT_ROUNDS,
    show_progress: bool = False,
    heed_failure: bool = False,
    programs: bool = True,
    decline: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Fetched:
    """Make sure that the full set is in `root`, fetching it from the first mirror that delivers.

    Processes that do this at once wait for the first one, at most as long as a download may take.

    Args:
        mirror: a URL or folder to try first; default COURSE_DATA_MIRROR.
        rounds: how long a mirror may take; one that is too slow in a round is tried again in the next.
        heed_failure: give up at once if an attempt failed in the last hours.
        programs: whether other programs (npm, apt-get) may be started.
        decline: how to prevent a download, told with its size.
        say: is told in one line what is going to be downloaded, from where, and what else takes time.

    Raises:
        FetchError: no mirror delivered, each is listed with its reason; or `root` cannot be written to.
        ValueError: `mirror` is a URL of an unsupported kind.
    """
    mirrors = [m for m in mirrors_for(spec, root, mirror) if programs or not m.program]
    _require_writable(spec, root)
    lock = FileLock(root / f".{spec.key}.lock")
    try:
        try:
            lock.acquire(timeout=0.2)
        except Timeout:
            say(f"{spec.name}: another process is fetching it, waiting")
            lock.acquire(timeout=sum(patience.total for patience in rounds) * max(1, len(mirrors)))
    except (Timeout, OSError, NotImplementedError) as error:
        reason = "another process holds the lock" if isinstance(error, Timeout) else f"cannot be locked ({error})"
        raise FetchError(f"{spec.name}: {root}: {reason}", reason) from error
    try:
        if not missing_splits(spec, root):
            return Fetched(None)
        if heed_failure and (failure := recent_failure(spec, root)):
            raise FetchError(f"{spec.name}: {failure}", failure)
        return _fetch_locked(spec, root, mirrors, rounds, show_progress, decline, say)
    finally:
        lock.release()


def _fetch_locked(
    spec: DataSpec,
    root: Path,
    mirrors: list[Mirror],
    rounds: Sequence[Patience],
    show_progress: bool,
    decline: str,
    say: Callable[[str], None],
) -> Fetched:
    for left_over in root.glob(f".incoming-{spec.key}-*"):  # of a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    failures: dict[Mirror, Exception] = {}
    for number, patience in enumerate(rounds):
        for mirror in mirrors:
            if number > 0:
                if not isinstance(failures[mirror], TooSlow):
                    continue
                say(f"{spec.name}: trying {mirror} again, with patience; it was {failures[mirror]}")
            elif mirror.size:
                program = f" with {mirror.program}" if mirror.program else ""
                size = f"at most {mirror.size / 1e6:.0f} MB"
                say(f"{spec.name}: fetching the full set{program}, {size}, from {mirror}. {decline}".rstrip())
            try:
                set_aside = _fetch_from(mirror, spec, root, patience, show_progress)
            except (DataError, OSError, MemoryError) as error:
                failures[mirror] = error
                continue
            _failure_path(spec, root).unlink(missing_ok=True)
            return Fetched(str(mirror), set_aside)
    error = _fetch_error(spec, root, failures)
    remember_failure(spec, root, error.summary)
    raise error


def _fetch_from(
    mirror: Mirror, spec: DataSpec, root: Path, patience: Patience, show_progress: bool
) -> tuple[Path, ...]:
    """Fetch, check and store the set. Returns the files that had to give way."""
    incoming = Path(tempfile.mkdtemp(prefix=f".incoming-{spec.key}-", dir=root))
    try:
        folder = mirror.fetch(incoming, patience, show_progress)
        try:
            splits, originals = decode(spec, folder)
        except DamagedFile as error:
            raise DownloadError(f"{error.path.name}: not the expected file: {error.reason}") from error
        return _store(spec, root, splits, originals)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def _fetch_error(spec: DataSpec, root: Path, failures: Mapping[Mirror, Exception]) -> FetchError:
    tried = "".join(f"\n  - {mirror}: {error}" for mirror, error in failures.items())
    slow = [error for error in failures.values() if isinstance(error, TooSlow)]
    summary = str([*slow, *failures.values(), "no mirror to try"][0])
    return FetchError(
        f"{spec.name} could not be fetched into {root}. Tried:{tried}\n"
        "Give a mirror of your own with COURSE_DATA_MIRROR=<URL or folder> (datasets/README.md says what it must "
        "hold), or use the bundled sample with COURSE_DATA=sample.",
        summary,
    )


def _require_writable(spec: DataSpec, root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        reason = f"cannot write to {root} ({error.strerror or error})"
        raise FetchError(
            f"{spec.name}: {reason}. Set COURSE_DATA_DIR to a folder that can be written to.", reason
        ) from error


def missing_splits(spec: DataSpec, root: Path) -> dict[str, Exception]:
    """The splits that are not in `root` complete and undamaged, each with what is wrong."""
    wrong: dict[str, Exception] = {}
    for split in SPLITS:
        try:
            read_split(spec, root, split)
        except (FileNotFoundError, DamagedFile) as error:
            wrong[split] = error
    return wrong


# storing ------------------------------------------------------------------------------------------------------------


def _store(spec: DataSpec, root: Path, splits: Mapping[str, Split], originals: Mapping[str, bytes]) -> tuple[Path, ...]:
    """Write checked arrays in the set's layout. Returns the files that had to give way, by their new names."""
    set_aside = []
    for path, parts in _files(spec, root, splits, originals):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left_over in path.parent.glob(f".{path.name}.*.part"):
            left_over.unlink(missing_ok=True)
        if not _holds(path, parts):
            temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
            try:
                with temporary.open("wb") as file:
                    file.writelines(parts)
                if path.exists():
                    set_aside.append(_set_aside(path))
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
    # A damaged file in another of the folders that are looked at would be read, and complained about, every time.
    for split in SPLITS:
        for folder, reader in layouts(spec, root):
            try:
                reader(spec, folder, split)
            except FileNotFoundError:
                continue
            except DamagedFile as error:
                if error.path.is_file():
                    set_aside.append(_set_aside(error.path))
    return tuple(set_aside)


def _files(
    spec: DataSpec, root: Path, splits: Mapping[str, Split], originals: Mapping[str, bytes]
) -> list[tuple[Path, list[bytes]]]:
    if originals:
        return [(root / CIFAR_FOLDER / name, [data]) for name, data in originals.items()]
    files = []
    for split, arrays in splits.items():
        for kind, idx_name, array in zip(("images", "labels"), IDX_NAMES[split], arrays, strict=True):
            if spec.layout == "idx":
                files.append((root / spec.name / "raw" / idx_name, [idx_header(array.shape), array.tobytes()]))
            else:
                files.append((root / NPY_FOLDER / f"{split}_{kind}.npy", [npy_bytes(array)]))
    return files


def _holds(path: Path, parts: list[bytes]) -> bool:
    try:
        return path.stat().st_size == sum(map(len, parts)) and path.read_bytes() == b"".join(parts)
    except OSError:
        return False


def _set_aside(path: Path) -> Path:
    """Rename a file that must give way to NAME.corrupt, or NAME.corrupt-2 … if there is one."""
    number = 1
    while (new := path.with_name(f"{path.name}.corrupt" + (f"-{number}" if number > 1 else ""))).exists():
        number += 1
    path.rename(new)
    return new


# remembering that there is no network -------------------------------------------------------------------------------


def _failure_path(spec: DataSpec, root: Path) -> Path:
    return root / f".{spec.key}.failed.json"


def remember_failure(spec: DataSpec, root: Path, summary: str) -> None:
    """Note why fetching failed, in a few words, so that `recent_failure` knows."""
    note = {"time": time.time(), "summary": summary, "mirror": os.environ.get("COURSE_DATA_MIRROR")}
    try:
        _failure_path(spec, root).write_text(json.dumps(note), encoding="utf-8")
    except OSError:
        return  # then the next notebook tries again


def recent_failure(spec: DataSpec, root: Path) -> str | None:
    """What went wrong when fetching failed in the last hours with the same COURSE_DATA_MIRROR; None if it did not."""
    try:
        note = json.loads(_failure_path(spec, root).read_text(encoding="utf-8"))
        then, summary, mirror = float(note["time"]), str(note["summary"]), note["mirror"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    age = time.time() - then
    if not 0 <= age < REMEMBER_FAILURE_HOURS * 3600 or mirror != os.environ.get("COURSE_DATA_MIRROR"):
        return None
    clock = time.strftime("%H:%M", time.localtime(then))
    again = time.strftime("%H:%M", time.localtime(then + REMEMBER_FAILURE_HOURS * 3600))
    return f"{summary} at {clock}, tried again after {again}"
