"""The environment that every command runs in: a .venv in the repository root, made and kept up to date here.

Only the standard library is needed: this runs before anything is installed. `prepare` returns the Python to use and
calls pip only if something has to be installed. A stamp says what has been (requirements*.txt, constraints.txt,
pyproject.toml, the Python version, the index of torch); while it matches, nothing is done and no network is needed.
Files of ours:

    .venv/made-by-course.json   this tool made the folder, here: only then may it empty it
    .venv/course-stamp.json     what is installed; removed first and written last, so an interrupted one leaves none
    .venv/course.lock           held (by the system, so never stale) while something is installed
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from course.files import write_whole

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
ARRIVED = "COURSE_STARTED_IN_ENVIRONMENT"  # set for the process that takes over, so that it can't start itself for ever
CAN_EXEC = os.name == "posix"  # Windows has an exec that returns to the shell at once
PIP_LIMIT = 3 * 3600  # seconds; pip itself gives up much earlier on a connection that stalls
LOCK_LIMIT = 3600  # seconds to wait for another process's installation
# what a command can do without when nothing may be installed (COURSE_ENV=current)
ONLY_FOR = {"pytest": {"test"}, "nbval": {"test"}, "jupyter": {"lab"}}

PIP_ADVICE = """pip failed (exit status {status}); what it said is above. Likely causes:
- The package index can't be reached. Behind a proxy set HTTPS_PROXY; PIP_INDEX_URL names a mirror.
- The disk is full: the CUDA build takes 6.3 GB, CPU-only wheels (COURSE_TORCH_INDEX=<their index>) about 1.5 GB.
- There is no build of a pinned version for this Python and system; 3.11 to 3.13 have them all.
Call the same command again; what was downloaded is kept."""

TORCH_ADVICE = """torch and torchvision don't import together. They must come from one index and belong together (0.26
to 2.11, 0.29.2 to 2.15). Remove both and let them be installed again:
    python -m course clean --all
    python -m course setup
For another index (CPU-only wheels, another CUDA) set COURSE_TORCH_INDEX to its address for the second line."""


class SetupError(Exception):
    """The environment can't be made or used; the message says why and what to do."""


def run(command: list[str]) -> int:
    """Run a program whose output the user sees, and return its exit status. Ctrl-C reaches it, too: it may clean up."""
    # without what would make venv and pip look elsewhere
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET")}
    process = subprocess.Popen(
        command, cwd=ROOT, env={**env, "PIP_USER": "0"}, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(),
        close_fds=False,  # it inherits the lock, which is held until the last of us has ended
    )  # fmt: skip
    try:
        return process.wait(timeout=PIP_LIMIT)
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"{' '.join(command[:4])} took more than {PIP_LIMIT // 3600} hours and was ended.") from error
    except KeyboardInterrupt:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        raise
    finally:
        process.kill()  # which does nothing to one that has ended
        process.wait(timeout=60)


def probe(command: list[str], timeout: float = 30) -> subprocess.CompletedProcess[str]:
    """Run a short program and capture what it prints."""
    return subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        encoding="utf-8", errors="replace", timeout=timeout, check=False,
    )  # fmt: skip


@contextlib.contextmanager
def locked(path: Path, limit: float) -> Iterator[None]:
    """Hold the lock file at `path`, for the programs started meanwhile, too. SetupError after `limit` seconds.

    The operating system holds the lock and drops it when its process ends however that happens, so it can't go stale.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.set_inheritable(descriptor, True)
    deadline = time.monotonic() + limit
    try:
        if not _try_lock(descriptor):
            say("Another process is setting the environment up; waiting for it to finish.")
            while not _try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise SetupError(
                        f"Another process has been setting up {path.parent} for {limit:.0f} s. Wait for it or end it "
                        "(look for `pip install` among the processes), then call this again."
                    )
                time.sleep(0.2)
        yield
    finally:
        os.close(descriptor)  # drops the lock


def _try_lock(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


class Environment:
    """The .venv of one repository.

    Args:
        root: the repository.
        index: address of the index for torch and torchvision; None means the one this .venv was made with, if any;
            "" means pip's usual one.
    """

    def __init__(self, root: Path, index: str | None = None) -> None:
        self.root = root.resolve()
        self.folder = self.root / ".venv"
        self.python = self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        self.marker = self.folder / "made-by-course.json"
        self.stamp = self.folder / "course-stamp.json"
        self.lock = self.folder / "course.lock"
        self.recorded_index = read_json(self.marker if self.ours else self.stamp).get("index", "")
        self.index = self.recorded_index if index is None else index

    @property
    def ours(self) -> bool:
        """Whether this tool made the folder, so that it may empty it."""
        return self.marker.is_file()

    def broken(self) -> str | None:
        """Why the .venv can't be used as it is, or None."""
        marker = read_json(self.marker)
        if self.ours and marker.get("root") != str(self.root):
            return "the folder has been moved or copied"
        if not self.python.exists():
            return "its Python is gone" if (self.folder / "pyvenv.cfg").exists() else "there is none yet"
        code = "import sys, pip; print('%d.%d' % sys.version_info[:2])"
        try:
            said = probe([str(self.python), "-I", "-c", code]).stdout.strip() or "it says nothing"
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
        if not re.fullmatch(r"\d+\.\d+", said):
            return f"its Python doesn't start or has no pip ({said.splitlines()[-1]})"
        if tuple(map(int, said.split("."))) < OLDEST_PYTHON:
            return f"its Python is {said}, and the course needs 3.11 or newer"
        if marker.get("python", said) != said:
            return f"it was made for Python {marker['python']}, and that is {said} now"
        return None

    def digest(self) -> str:
        """A hash of everything that decides what is installed."""
        names = sorted(path.name for path in self.root.glob("requirements*.txt"))
        paths = [self.root / name for name in (*names, "constraints.txt", "pyproject.toml")]
        texts = {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}
        decides = [texts, read_json(self.marker).get("python"), self.index]
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()

    def ready(self) -> bool:
        """Whether nothing has to be done: it can be used, and what the stamp says is what is asked for."""
        return self.broken() is None and read_json(self.stamp).get("digest") == self.digest()

    def ensure(self) -> Path:
        """Make or mend the environment if needed and return its Python. Raises SetupError."""
        if self.ready():
            return self.python
        try:
            self.folder.mkdir(exist_ok=True)
            with locked(self.lock, LOCK_LIMIT):
                # under the lock, so that nobody meets a folder that is being claimed
                if set(self.folder.iterdir()) == {self.lock}:  # nothing that anybody could miss
                    self._write_marker()
                if not self.ready():  # another process may have done all of it in the meantime
                    self._install()
        except OSError as error:
            raise SetupError(
                f"Can't write the environment {self.folder}: {error}\n"
                "If the disk isn't full, use a copy of the course in a folder of yours, or COURSE_ENV=current with a "
                "Python that has all of requirements.txt."
            ) from error
        return self.python

    def empty(self) -> None:
        """Delete what is in the folder, but for the marker and the lock. SetupError if it isn't this tool's."""
        if not self.ours:
            raise SetupError(
                f"{self.folder} was not made by this tool, so it is left alone. Delete or rename it "
                "yourself, then call this again."
            )
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path not in (self.marker, self.lock):
                path.unlink()

    def remove(self) -> bool:
        """Delete the folder; False if there is none. SetupError if it isn't this tool's or is in use."""
        if not self.folder.exists():
            return False
        with locked(self.lock, 5) if self.ours else contextlib.nullcontext():
            self.empty()
        shutil.rmtree(self.folder)
        return True

    def _write_marker(self) -> None:
        made_for = "{}.{}".format(*sys.version_info[:2])
        write_json(self.marker, {"root": str(self.root), "python": made_for, "index": self.index})

    def _install(self) -> None:
        reason, stamped = self.broken(), self.stamp.exists()
        if reason is None and stamped and self.index != self.recorded_index:
            reason = "torch is to come from another index"
        if reason is None and self.ours and not stamped:
            reason = "an installation was interrupted, so packages may be half there"
        if reason is not None:
            self._make(reason)
        self.stamp.unlink(missing_ok=True)
        if not self.ours:
            say(f"{self.folder} was not made by this tool; it is used as it is, and gets what it lacks.")
        free = shutil.disk_usage(self.folder).free / 1e9
        say(
            "Installing what the course needs. A new environment takes about 3 GB to download, 3 to 5 minutes on a "
            f"fast line, and 6.3 GB of disk with the CUDA build; {free:.0f} GB are free."
        )
        if self.index:
            # only these two: their dependencies come with the rest, in the versions that constraints.txt pins
            torch = [line for line in requirements(self.root) if re.match(r"torch(vision)?\b", line)]
            self._pip("--no-deps", "--index-url", self.index, *torch)
        self._pip("-r", "requirements-dev.txt")
        # wheels from two indexes install well and break here
        code = "import torch, torchvision; from torchvision.ops import nms"
        answer = probe([str(self.python), "-c", code], timeout=300)
        if answer.returncode:
            raise SetupError("\n".join([*answer.stdout.strip().splitlines()[-8:], "", TORCH_ADVICE]))
        write_json(self.stamp, {"digest": self.digest(), "index": self.index})

    def _make(self, reason: str) -> None:
        """A fresh virtual environment in the folder, from the Python below the running one."""
        base = getattr(sys, "_base_executable", None) or sys.executable
        say(f"Making the environment {self.folder} with {base}: {reason}.")
        self.empty()
        self._write_marker()
        if run([base, "-m", "venv", str(self.folder)]) or self.broken() is not None:
            shutil.rmtree(self.python.parent, ignore_errors=True)  # so that the next call begins again
            raise SetupError(
                f"`{base} -m venv` failed; what it said is above. On Debian and Ubuntu install the package "
                "python3-venv (or python3.12-venv, the version that you use)."
            )

    def _pip(self, *arguments: str) -> None:
        """pip install, in the versions of constraints.txt if it is there."""
        command = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments]
        pins = ["-c", "constraints.txt"] if (self.root / "constraints.txt").is_file() else []
        if status := run([*command, *pins]):
            raise SetupError(PIP_ADVICE.format(status=status))


# the running Python instead (COURSE_ENV=current) --------------------------------------------------------------------


def requirements(root: Path) -> list[str]:
    """The lines of requirements.txt that name a distribution, without comments."""
    text = (root / "requirements.txt").read_text(encoding="utf-8")
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("-")]


def unmet(root: Path, command: str) -> list[str]:
    """What of requirements.txt the running Python lacks for `command`, each as one line for the user."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging is missing, so nothing else could be looked at"]
    problems = []
    for line in requirements(root):
        wanted = Requirement(line)
        if command not in ONLY_FOR.get(wanted.name, {command}) or (wanted.marker and not wanted.marker.evaluate()):
            continue
        try:
            version = metadata.version(wanted.name)
            if not wanted.specifier.contains(version, prereleases=True):
                problems.append(f"{wanted.name} {version} is not supported ({line})")
        except metadata.PackageNotFoundError:
            problems.append(f"{wanted.name} is missing ({line})")
    return problems


# what __main__ calls ------------------------------------------------------------------------------------------------


def prepare(command: str) -> Path:
    """The Python in which `command` is to run, with everything installed. Raises SetupError."""
    choice = os.environ.get("COURSE_ENV", "")
    if choice == "current":
        if problems := unmet(ROOT, command):
            listed = "\n".join("  " + problem for problem in problems)
            raise SetupError(
                f"COURSE_ENV=current: this Python ({sys.executable}) can't run `{command}`:\n{listed}\n"
                "Install them in it (pip install -r requirements.txt), or unset COURSE_ENV to have .venv made."
            )
        # kernels start in other folders and this Python may not have the project installed
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        return Path(sys.executable)
    if choice:
        raise SetupError(f"COURSE_ENV={choice!r} is not known. Use COURSE_ENV=current, or unset it to have .venv made.")
    return Environment(ROOT, os.environ.get("COURSE_TORCH_INDEX")).ensure()


def is_running(python: Path) -> bool:
    """Whether `python` is the interpreter that runs now."""
    if python == Path(sys.executable):
        return True
    # the folder, not the file: .venv/bin/python is a link to the system's
    here = Path(sys.prefix).resolve() == python.parent.parent.resolve()
    if os.environ.pop(ARRIVED, None) and not here:
        raise SetupError(f"{python} starts as {sys.executable} ({sys.prefix}). Run `python -m course clean --all`.")
    return here


def hand_over(python: Path, arguments: list[str]) -> int:
    """Start `python -m course` again in the environment; on POSIX this never returns, else it gives the exit status."""
    command = [str(python), "-m", "course", *arguments]
    os.environ[ARRIVED] = "1"
    # programs that notebooks or tools start by name (ruff, ninja) come from the environment, too
    os.environ["PATH"] = str(python.parent) + os.pathsep + os.environ.get("PATH", "")
    if CAN_EXEC:
        os.execv(command[0], command)
    return end_of(subprocess.Popen(command))


def end_of(process: subprocess.Popen) -> int:
    """Wait for a program in the foreground; returns its exit status. Ctrl-C reaches it as well, and it decides."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def describe() -> str:
    """One line on the running environment."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "torchvision"))
    return f"{sys.prefix}, Python {sys.version.split()[0]}, {versions}"


# small things -------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """One line for the user, not on stdout: that belongs to the command."""
    print(text, file=sys.stderr, flush=True)


def read_json(path: Path) -> dict[str, str]:
    """The object in a small file of ours; empty if it is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: dict[str, str]) -> None:
    """Write a small file of ours, whole or not at all."""
    write_whole(path, json.dumps(value, indent=1) + "\n")
