"""The environment that every command runs in: a .venv in the repository root, made and kept up to date here.

Only the standard library is imported: this runs before anything is installed. `prepare` returns the Python to use and
installs only what is needed. A stamp says what has been installed (requirements*.txt, constraints.txt, pyproject.toml,
the Python version, the index of torch); while it matches, nothing is done and no network is needed. Files of ours:

    .venv/made-by-course.json   this tool made the folder, here: only then may it empty it
    .venv/course-stamp.json     what is installed; written last, so an interrupted installation has none
    .venv/course-install.log    what pip said
    .venv/course.lock           held (by the system, so never stale) while something is installed
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from course.files import write_whole

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
ARRIVED = "COURSE_STARTED_IN_ENVIRONMENT"  # set for the process that takes over, so that it can't start itself for ever
CAN_EXEC = os.name == "posix"  # Windows has an exec that returns to the shell at once
PIP_LIMIT = 3 * 3600  # seconds; pip itself gives up much earlier on a connection that stalls
LOCK_LIMIT = 3600  # seconds to wait for another process's installation
NEEDED_BYTES = 7e9  # of disk, for the CUDA build with room to unpack
# what a command can do without when nothing may be installed (COURSE_ENV=current)
ONLY_FOR = {"pytest": {"test"}, "nbval": {"test"}, "jupyter": {"lab"}}

TORCH_ADVICE = """torch and torchvision must come from one index and belong together (0.26 to 2.11, 0.29.2 to 2.15).
Remove both and let them be installed again:
    python -m course clean --all
    python -m course setup
For another index (CPU-only wheels, another CUDA) set COURSE_TORCH_INDEX to its address for the second line."""


class SetupError(Exception):
    """The environment can't be made or used; the message says why and what to do."""


# --------------------------------------------------------------------------------------------------------------------
# running a program with a live line


def follow(command: list[str], log: Path, title: str, env: dict[str, str], keep_open: int | None = None) -> int:
    """Run `command`, append what it prints to `log`, show its last line live, and return its exit status.

    `keep_open` is a file descriptor the program inherits: the lock, held until the last of us has ended.
    """
    start = time.monotonic()
    live = sys.stderr.isatty()
    inherited = {"pass_fds": (keep_open,)} if keep_open is not None and os.name == "posix" else {}
    process = subprocess.Popen(
        command, cwd=str(ROOT), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        encoding="utf-8", errors="replace", **inherited,
    )  # fmt: skip
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    last, shown = "", start
    try:
        with open(log, "a", encoding="utf-8") as file:
            while process.poll() is None or reader.is_alive() or not lines.empty():
                try:
                    line = lines.get(timeout=0.5)
                    file.write(line)
                    last = line.strip() or last
                    said = bool(re.match(r"(Downloading .*\(\d{3,}[\d.]* ?MB\)|Installing collected)", last))
                except queue.Empty:
                    said = False
                now = time.monotonic()
                width = shutil.get_terminal_size().columns - 1
                if live:
                    sys.stderr.write(f"\r\x1b[K{title}: {now - start:4.0f} s  {last}"[: width + 4])
                    sys.stderr.flush()
                elif said or now - shown > 20:
                    shown = now
                    sys.stderr.write(f"{title}: {now - start:.0f} s  {last[:100]}\n")
                    sys.stderr.flush()
                if now - start > PIP_LIMIT:
                    raise SetupError(f"{title} took more than {PIP_LIMIT // 3600} hours and was ended. See {log}")
        return process.wait(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=60)
        reader.join(timeout=5)
        if not reader.is_alive():  # a grandchild may still hold the other end; closing would wait for it
            process.stdout.close()
        if live:
            sys.stderr.write("\r\x1b[K")


def probe(command: list[str], timeout: float = 30) -> subprocess.CompletedProcess[str]:
    """Run a short program and capture what it prints."""
    return subprocess.run(
        command, cwd=str(ROOT), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        encoding="utf-8", errors="replace", timeout=timeout, check=False,
    )  # fmt: skip


@contextlib.contextmanager
def locked(path: Path, limit: float, waiting: Callable[[str], None]) -> Iterator[int]:
    """Hold the lock file at `path`; yields its descriptor.

    The operating system holds the lock and drops it when its process ends however that happens, so it can't go stale.
    SetupError after `limit` seconds.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + limit
    told = False
    try:
        while not _try_lock(descriptor):
            if not told:
                waiting("Another process is setting the environment up; waiting for it to finish.")
                told = True
            if time.monotonic() > deadline:
                raise SetupError(
                    f"Another process has been setting up {path.parent} for {limit:.0f} s. Wait for it or end it "
                    "(look for `pip install` among the processes), then call this again."
                )
            time.sleep(0.2)
        yield descriptor
    finally:
        os.close(descriptor)  # drops the lock


def _try_lock(descriptor: int) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


# --------------------------------------------------------------------------------------------------------------------
# the environment


class Environment:
    """The .venv of one repository.

    Args:
        root: the repository.
        index: address of the index for torch and torchvision; None means the one this .venv was made with, if any;
            "" means pip's usual one.
        follow, probe: how programs are run; tests put their own here.
    """

    def __init__(
        self,
        root: Path,
        index: str | None = None,
        follow: Callable[..., int] = follow,
        probe: Callable[..., subprocess.CompletedProcess[str]] = probe,
    ) -> None:
        self.root = root.resolve()
        self.folder = self.root / ".venv"
        self.python = self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        self.marker = self.folder / "made-by-course.json"
        self.stamp = self.folder / "course-stamp.json"
        self.log = self.folder / "course-install.log"
        self.lock = self.folder / "course.lock"
        self._follow, self._probe = follow, probe
        recorded = read_json(self.marker if self.ours else self.stamp).get("index", "")
        self.index_changed = index is not None and index != recorded
        self.index = recorded if index is None else index

    @property
    def ours(self) -> bool:
        """Whether this tool made the folder, so that it may empty it."""
        return self.marker.is_file()

    def broken(self) -> str | None:
        """Why the .venv can't be used as it is, or None."""
        if not self.folder.is_dir():
            return "there is none yet"
        if self.ours and read_json(self.marker).get("root") != str(self.root):
            return "the folder has been moved or copied"
        if not self.python.exists():
            return "its Python is gone" if (self.folder / "pyvenv.cfg").exists() else "there is none yet"
        try:
            answer = self._probe(
                [str(self.python), "-I", "-S", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"its Python doesn't start ({error})"
        version = answer.stdout.strip()
        if answer.returncode or not re.fullmatch(r"\d+\.\d+", version):
            return f"its Python doesn't start ({version.splitlines()[-1] if version else answer.returncode})"
        if tuple(map(int, version.split("."))) < OLDEST_PYTHON:
            return f"its Python is {version}, and the course needs 3.11 or newer"
        made_for = read_json(self.marker).get("python")
        if made_for and made_for != version:
            return f"it was made for Python {made_for}, and that is {version} now"
        return None

    def digest(self) -> str:
        """A hash of everything that decides what is installed."""
        digest = hashlib.sha256()
        names = sorted([*self.root.glob("requirements*.txt"), *self.root.glob("constraints.txt")])
        for path in [*names, self.root / "pyproject.toml"]:
            if path.is_file():
                content = path.read_bytes().replace(b"\r\n", b"\n")
                digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
        made_for = read_json(self.marker).get("python", "")
        digest.update(f"{made_for}\0{self.index}".encode())
        return digest.hexdigest()

    def up_to_date(self) -> bool:
        """Whether what the stamp says is what is asked for."""
        return read_json(self.stamp).get("digest") == self.digest()

    def ensure(self) -> Path:
        """Make or mend the environment if needed and return its Python. Raises SetupError."""
        if self.broken() is None and self.up_to_date():
            return self.python
        try:
            self.folder.mkdir(exist_ok=True)
            with locked(self.lock, LOCK_LIMIT, say) as descriptor:
                # under the lock, so that nobody meets a folder that is being claimed
                if not self.ours and set(self.folder.iterdir()) == {self.lock}:  # nothing that anybody could miss
                    self._write_marker()
                # another process may have done all of it in the meantime
                reason = self.broken()
                if reason is None and self.up_to_date():
                    return self.python
                self._install(reason, descriptor)
        except OSError as error:
            raise SetupError(
                f"Can't write the environment {self.folder}: {error}\n"
                "Use a copy of the course in a folder of yours, or COURSE_ENV=current with a Python that has all of "
                "requirements.txt."
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
            if path in (self.marker, self.lock):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def remove(self) -> bool:
        """Delete the folder; False if there is none. SetupError if it isn't this tool's or is in use."""
        if not self.folder.exists():
            return False
        if self.ours:
            with locked(self.lock, 5, say):
                self.empty()
        else:
            self.empty()  # raises
        shutil.rmtree(self.folder)
        return True

    def _write_marker(self) -> None:
        made_for = "{}.{}".format(*sys.version_info[:2])
        write_json(self.marker, {"root": str(self.root), "python": made_for, "index": self.index})

    def _install(self, reason: str | None, descriptor: int) -> None:
        if reason is None and self.index_changed and (self.ours or self.stamp.exists()):
            reason = "torch is to come from another index"
        if reason is None and self.ours and self._stopped_while_copying():
            reason = "an installation was interrupted while it copied files"
        if reason is not None:
            self._make(reason, descriptor)
        self.stamp.unlink(missing_ok=True)
        if not self.ours:
            say(
                f"{self.folder} was not made by this tool; it is used as it is, and what it lacks is installed into it."
            )
        free = shutil.disk_usage(self.folder).free
        if reason is None and self.log.exists():
            say("Bringing the environment up to date; what is there already is kept.")
        else:
            say(
                "Installing what the course needs: about 3 GB to download and 5.8 GB of disk with the CUDA build, 1 to "
                "2 minutes on a fast line. What pip has downloaded before is used again."
            )
        if free < NEEDED_BYTES and reason is not None:
            say(
                f"Only {free / 1e9:.1f} GB of disk are free. If that is too little, set COURSE_TORCH_INDEX to a "
                "CPU-only index."
            )
        options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
        pip = [str(self.python), "-m", "pip", "install", *options]
        constraints = ["-c", "constraints.txt"] if (self.root / "constraints.txt").is_file() else []
        start = time.monotonic()
        self.log.write_text("", encoding="utf-8")
        if self.index:
            # only these two: their dependencies come with the rest, in the versions that constraints.txt pins
            torch = [line for line in requirements(self.root) if re.match(r"torch(vision)?\b", line)]
            command = [*pip, "--no-deps", "--index-url", self.index, *constraints, *torch]
            self._pip(command, "Installing torch", descriptor)
        self._pip([*pip, "-r", "requirements-dev.txt", *constraints], "Installing", descriptor)
        self._verify()
        write_json(self.stamp, {"digest": self.digest(), "index": self.index})
        say(f"Installed in {time.monotonic() - start:.0f} s.")

    def _stopped_while_copying(self) -> bool:
        """Whether the last pip ended between starting to copy files and being done: packages may be half there."""
        if self.stamp.exists() or not self.log.exists():
            return False
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return text.rfind("Installing collected packages") > text.rfind("Successfully installed")

    def _make(self, reason: str, descriptor: int) -> None:
        """A fresh virtual environment in the folder, from the Python below the running one."""
        base = getattr(sys, "_base_executable", None) or sys.executable
        say(f"Making the environment {self.folder} with {base}: {reason}.")
        self.empty()
        self._write_marker()
        self.log.write_text("", encoding="utf-8")
        status = self._follow([base, "-m", "venv", str(self.folder)], self.log, "Making .venv", clean_env(), descriptor)
        if status != 0 or self.broken() is not None:
            raise SetupError(
                f"`{base} -m venv` failed:\n\n{tail(self.log)}\n\n"
                "On Debian and Ubuntu install the package python3-venv (or python3.12-venv, the version that you use)."
            )

    def _pip(self, command: list[str], title: str, descriptor: int) -> None:
        status = self._follow(command, self.log, title, clean_env(), descriptor)
        if status != 0:
            raise SetupError(
                f"pip failed (exit status {status}). The end of {self.log}:\n\n{tail(self.log)}\n\n"
                f"{advice(self.log.read_text(encoding='utf-8', errors='replace'))}\n"
                "What was downloaded is kept; the same command continues from here."
            )

    def _verify(self) -> None:
        """torch and torchvision import together: wheels from two indexes install well and break here."""
        say("Checking that torch and torchvision work together.")
        code = "import torch, torchvision; from torchvision.ops import nms"
        try:
            answer = self._probe([str(self.python), "-c", code], timeout=300)
        except subprocess.TimeoutExpired as error:
            raise SetupError("`import torch, torchvision` didn't finish in 300 s. Call this again.") from error
        if answer.returncode:
            said = "\n".join(answer.stdout.strip().splitlines()[-8:])
            raise SetupError(f"torch and torchvision don't import together:\n\n{said}\n\n{TORCH_ADVICE}")


# --------------------------------------------------------------------------------------------------------------------
# the running Python instead (COURSE_ENV=current)


def requirements(root: Path) -> list[str]:
    """The lines of requirements.txt that name a distribution, without comments."""
    lines = (root / "requirements.txt").read_text(encoding="utf-8").splitlines()
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    return [line for line in lines if line and not line.startswith("-")]


def unmet(root: Path, command: str, installed: Callable[[str], str] = metadata.version) -> list[str]:
    """What of requirements.txt the running Python lacks for `command`, each as one line for the user."""
    problems = []
    for line in requirements(root):
        name, ranges = re.fullmatch(r"([A-Za-z0-9_.-]+)\s*(.*)", line).groups()
        if command not in ONLY_FOR.get(name, {command}):
            continue
        try:
            version = installed(name)
        except metadata.PackageNotFoundError:
            problems.append(f"{name} is missing ({line})")
            continue
        if not satisfies(version, ranges):
            problems.append(f"{name} {version} is not supported ({line})")
    return problems


def satisfies(version: str, ranges: str) -> bool:
    """Whether the release in `version` is within `ranges` like '>=2.11,<2.16'; what follows the numbers is ignored."""

    def release(text: str) -> tuple[int, ...]:
        numbers = [int(number) for number in re.match(r"\d+(\.\d+)*", text.strip()).group().split(".")]
        return tuple(numbers + [0] * (6 - len(numbers)))

    have = release(version)
    compare = {
        ">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b, "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b, ">": lambda a, b: a > b, "<": lambda a, b: a < b,
    }  # fmt: skip
    for part in filter(None, ranges.split(",")):
        sign, wanted = re.fullmatch(r"\s*(>=|<=|==|!=|>|<)\s*(\S+)\s*", part).groups()
        if not compare[sign](have, release(wanted)):
            return False
    return True


# --------------------------------------------------------------------------------------------------------------------
# what __main__ calls


def prepare(command: str) -> Path:
    """The Python in which `command` is to run, with everything installed. Raises SetupError."""
    choice = os.environ.get("COURSE_ENV", "")
    if choice == "current":
        problems = unmet(ROOT, command)
        if problems:
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
    sys.stdout.flush()
    sys.stderr.flush()
    if CAN_EXEC:
        os.execv(command[0], command)
    process = subprocess.Popen(command)
    while True:  # Ctrl-C reaches the child as well, and the child decides
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def describe() -> str:
    """One line on the running environment."""
    versions = []
    for name in ("torch", "torchvision"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return f"{sys.prefix}, Python {sys.version.split()[0]}, {', '.join(versions)}"


# --------------------------------------------------------------------------------------------------------------------
# small things


def say(text: str) -> None:
    """One line for the user, not on stdout: that belongs to the command."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


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


def tail(log: Path, lines: int = 25) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-lines:])


def clean_env() -> dict[str, str]:
    """The environment variables for venv and pip, without those that make them look elsewhere."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET")}
    return {**env, "PIP_USER": "0", "PYTHONUNBUFFERED": "1"}


def advice(output: str) -> str:
    """What to do about a failed pip, from what it said."""
    text = output.lower()
    if "no space left" in text or "not enough space" in text:
        return "The disk is full: the CUDA build takes 5.8 GB, CPU-only wheels (COURSE_TORCH_INDEX) about 1.5 GB."
    network = (
        "name resolution|getaddrinfo|failed to establish|timed out|proxyerror|unreachable|connection (reset|refused)"
    )
    if re.search(network, text):
        return (
            "The package index can't be reached: check the network. Behind a proxy set HTTPS_PROXY; a mirror is named "
            "by PIP_INDEX_URL. Only the first set-up needs a network."
        )
    if "permission denied" in text:
        return "A file can't be written: use a copy of the course in a folder of yours."
    if re.search(r"(no matching distribution found for|conflict.*|depends on) torch", text):
        return "No such torch for this Python and system.\n" + TORCH_ADVICE
    if "no matching distribution found" in text or "resolutionimpossible" in text:
        return (
            "The index has no build of a pinned version for this Python and system. Try another Python (3.11 to 3.13), "
            "or install requirements.txt yourself and use COURSE_ENV=current."
        )
    return "If it isn't clear what is wrong: `python -m course clean --all`, then the same command again."
