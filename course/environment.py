"""The environment that every command runs in: a .venv in the repository root, made and kept up to date here.

Only the standard library is needed: this runs before anything is installed. Students get what requirements.txt names;
the first command for maintainers adds requirements-dev.txt. A stamp says what has been installed (by a digest of these
files, constraints.txt, pyproject.toml and the index of torch); while it matches, nothing is done and no network is
needed. Files of ours:

    .venv/made-by-course.json   this tool made the folder, here: only then may it empty it
    .venv/course-stamp.json     what is installed; without a digest while something is being installed
    .venv/course.lock           held (by the system, so never stale) while something is installed
    .venv/pip.log               what pip said when it was called last
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from course.files import write_whole

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS, TOOLS = "requirements.txt", "requirements-dev.txt"
NEED_TOOLS = {"run", "test", "lint"}  # `run` for the peers that optional sections are held against
CAN_EXEC = os.name == "posix"  # Windows has an exec that returns to the shell at once
TELL_EVERY = 10.0  # seconds between two lines on how far pip is
UNPACKING = ": one to three minutes, without another line"  # what the line on installing ends with
PIP_LIMIT = 3 * 3600  # seconds; pip itself gives up much earlier on a connection that stalls

PIP_ADVICE = """pip failed; what it said is above. Likely causes:
- The package index can't be reached. Behind a proxy set HTTPS_PROXY; PIP_INDEX_URL names a mirror. If it is the one in
  COURSE_TORCH_INDEX, set that to "" once, for pip's own.
- The disk is full: the CUDA build takes 6.3 GB, CPU-only wheels (COURSE_TORCH_INDEX=<their index>) about 1.5 GB.
- There is no build of a pinned version for this Python and system; 3.11 to 3.13 have them all.
Call the same command again; what was downloaded is kept."""

SIZE = """Installing what the course needs, 3 to 5 minutes on a fast line: with CUDA about 3 GB to download and 6 GB of
disk. On Linux without a GPU 1.5 GB of disk do as well. To have that: Ctrl+C now, and then
    COURSE_TORCH_INDEX=https://download.pytorch.org/whl/cpu make lab"""

SITE_ADVICE = """The site needs Sphinx and a few more packages, but not PyTorch: half a minute on a fast line, 0.4 GB.
In the course's folder:
    python3 -m venv .site
    .site/bin/python -m pip install -r requirements-site.txt -c constraints.txt
    .site/bin/python -m course site
(On Windows: py -m venv .site, and .site\\Scripts\\python in place of .site/bin/python.)"""


class SetupError(Exception):
    """The environment can't be made or used; the message says why and what to do."""


def end_of(process: subprocess.Popen) -> int:
    """Wait for a program in the foreground; returns its exit status. Ctrl-C reaches it as well, and it decides."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`, as SQLite holds a database: on every system, and never after this process's end."""
    with contextlib.closing(sqlite3.connect(path, timeout=1)) as database:
        try:
            database.executescript("PRAGMA journal_mode = OFF; BEGIN EXCLUSIVE")  # without a second file
        except sqlite3.Error as error:
            raise SetupError(
                f"Can't lock {path}: {error}. If another process is setting the environment up, wait for it or end it "
                "(look for `pip install` among the processes), then call this again."
            ) from None
        yield


class Environment:
    """The .venv of the repository `root`.

    `index` is the address of the index for torch and torchvision, "" pip's usual one, None the one it was made with;
    `tools`: whether what maintainers need is to be in it, too.
    """

    def __init__(self, root: Path, index: str | None = None, tools: bool = False) -> None:
        self.root = root.resolve()
        self.tools = tools
        self.folder = self.root / ".venv"
        self.python = self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        self.marker = self.folder / "made-by-course.json"
        self.stamp = self.folder / "course-stamp.json"
        self.lock = self.folder / "course.lock"
        self.index = read_json(self.stamp).get("index", "") if index is None else index

    def broken(self) -> str | None:
        """Why the .venv can't be used as it is, or None."""
        if not self.marker.is_file():
            return "there is none yet"
        if read_json(self.marker).get("root") != str(self.root):
            return "the folder has been moved or copied"
        # no pip: it was made for another version of Python; another prefix: without its pyvenv.cfg it is the system's
        code = "import os, sys, pip; sys.exit(not os.path.samefile(sys.prefix, sys.argv[1]))"
        try:
            status = subprocess.call(
                [self.python, "-I", "-c", code, self.folder], stderr=subprocess.DEVNULL, timeout=60
            )
        except OSError:
            status = 1
        return "its Python doesn't start there or has no pip" if status else None

    def digest(self, tools: bool) -> str:
        """A hash of everything that decides what is installed."""
        names = [REQUIREMENTS, "constraints.txt", "pyproject.toml", *([TOOLS] if tools else [])]
        texts = {name: (self.root / name).read_text("utf-8") for name in names if (self.root / name).is_file()}
        return hashlib.sha256(json.dumps([texts, self.index]).encode()).hexdigest()

    def ready(self) -> bool:
        """Whether nothing has to be done: it can be used, and what the stamp says is what is asked for, or more."""
        enough = {self.digest(tools=True)} | (set() if self.tools else {self.digest(tools=False)})
        return read_json(self.stamp).get("digest") in enough and self.broken() is None

    def ensure(self) -> Path:
        """Make or mend the environment if needed and return its Python. Raises SetupError."""
        if not self.ready():
            try:
                self.folder.mkdir(exist_ok=True)
                self._require_ours()
                with locked(self.lock):
                    self._install()
            except OSError as error:
                raise SetupError(
                    f"Can't write the environment {self.folder}: {error}\nIf the disk isn't full, use a copy of the "
                    "course in a folder of yours, or COURSE_ENV=current with a Python that has all of requirements.txt."
                ) from error
        return self.python

    def remove(self) -> bool:
        """Delete the folder; False if there is none. SetupError if it isn't this tool's or is in use."""
        if not self.folder.exists():
            return False
        self._require_ours()
        with locked(self.lock):
            self._empty()
        shutil.rmtree(self.folder)
        return True

    def _require_ours(self) -> None:
        """SetupError if the folder isn't this tool's: a link leads to what another folder uses."""
        is_ours = self.marker.is_file() or set(self.folder.iterdir()) <= {self.lock}
        if self.folder.is_symlink() or not is_ours:
            raise SetupError(
                f"{self.folder} was not made by this tool, so it is left alone. Delete or rename it, or activate it "
                "and set COURSE_ENV=current; then call this again."
            )

    def _empty(self) -> None:
        """Delete what is in the folder, but for the files that say whose it is."""
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path not in (self.marker, self.stamp, self.lock):
                path.unlink()

    def _install(self) -> None:
        installed = read_json(self.stamp)
        reason = (
            self.broken()
            or ("digest" not in installed and "an installation was interrupted, so packages may be half there")
            or (installed["index"] != self.index and "torch is to come from another index")
        )
        write_whole(self.marker, json.dumps({"root": str(self.root)}))
        write_whole(self.stamp, json.dumps({"index": self.index}))
        if reason:
            base = sys._base_executable  # not the one in .venv, which goes
            say(f"Making the environment {self.folder} with {base}: {reason}.")
            self._empty()
            if self._run([base, "-I", "-m", "venv", str(self.folder)]) or self.broken():
                raise SetupError(
                    f"`{base} -m venv` failed. On Debian and Ubuntu install the package python3-venv (or "
                    "python3.12-venv, the version that you use)."
                )
            if not self.index:
                say(SIZE)
        wanted = TOOLS if self.tools else REQUIREMENTS
        say(f"pip installs what {wanted} asks for; what it says is in {self.folder / 'pip.log'}.")
        if self.index:
            # only these two: their dependencies come with the rest, in the versions that constraints.txt pins
            say(f'torch and torchvision come from {self.index}; without it: COURSE_TORCH_INDEX="".')
            torch = [line for line in requirements(self.root) if re.match(r"torch(vision)?\b", line)]
            self._pip("--no-deps", "--index-url", self.index, *torch)
        self._pip("-r", wanted)
        write_whole(self.stamp, json.dumps({"digest": self.digest(self.tools), "index": self.index}))

    def _pip(self, *arguments: str) -> None:
        """pip install, in the versions of constraints.txt if it is there."""
        command = [str(self.python), "-I", "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        command += ["--progress-bar", "off", "--no-user"]  # which Gitpod, for one, has made the default
        pins = ["-c", "constraints.txt"] if (self.root / "constraints.txt").is_file() else []
        if self._run([*command, *arguments, *pins]):
            raise SetupError(PIP_ADVICE)

    def _run(self, command: list[str]) -> int:
        """The exit status of a program that speaks into pip.log: downloads are told, and the end if it fails."""
        log, over = self.folder / "pip.log", threading.Event()

        def tell() -> None:
            told = ""
            while not over.wait(TELL_EVERY):
                said = re.findall(r"^ *(Downloading .* MB\)|Installing collected packages)", read(log), re.MULTILINE)
                if said and said[-1] != told:
                    told = said[-1]
                    say(f"  {told}" + (UNPACKING if told.startswith("Installing") else ""))

        with open(log, "wb") as file:
            threading.Thread(target=tell, daemon=True).start()
            try:
                status = subprocess.call(
                    command, cwd=self.root, stdout=file, stderr=subprocess.STDOUT, timeout=PIP_LIMIT
                )
            finally:
                over.set()
        if status:
            say(read(log)[-2000:])
        return status


def read(path: Path) -> str:
    """What a program has written so far, whatever its encoding."""
    return path.read_text(encoding="utf-8", errors="replace")


def requirements(root: Path) -> list[str]:
    """The lines of requirements.txt that name a distribution, without comments."""
    text = (root / REQUIREMENTS).read_text(encoding="utf-8")
    return [line.strip() for line in re.findall(r"^\w[^#\n]*", text, re.MULTILINE)]


def unmet(root: Path) -> list[str]:
    """What of requirements.txt the running Python lacks, each as one line for the user."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging is missing, so nothing else could be looked at"]
    problems = []
    for wanted in map(Requirement, requirements(root)):
        try:
            version = metadata.version(wanted.name)
            if not wanted.specifier.contains(version, prereleases=True):
                problems.append(f"{wanted.name} {version} is not supported ({wanted})")
        except metadata.PackageNotFoundError:
            problems.append(f"{wanted.name} is missing ({wanted})")
    return problems


def is_there() -> bool:
    """Whether `enter` would find everything installed."""
    index = os.environ.get("COURSE_TORCH_INDEX")
    return os.environ.get("COURSE_ENV", "") == "current" or Environment(ROOT, index).ready()


def enter(command: str, arguments: list[str]) -> int | None:
    """Have `command` run where all that it needs is installed: None if that is here, or the status of who took over.

    Raises SetupError. On POSIX the one that takes over replaces this process.
    """
    choice = os.environ.get("COURSE_ENV", "")
    if choice == "current":
        if problems := unmet(ROOT):
            listed = "\n".join("  " + problem for problem in problems)
            raise SetupError(
                f"COURSE_ENV=current: this Python ({sys.executable}) can't run `{command}`:\n{listed}\n"
                "Install them in it (pip install -r requirements.txt), or unset COURSE_ENV to have .venv made."
            )
        # kernels start in other folders and this Python may not have the project installed
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return None
    if choice:
        raise SetupError(f"COURSE_ENV={choice!r} is not known. Use COURSE_ENV=current, or unset it to have .venv made.")
    needs_tools = command in NEED_TOOLS and not {"-h", "--help"} & set(arguments)
    made = Environment(ROOT, os.environ.get("COURSE_TORCH_INDEX"), tools=needs_tools)
    python = made.ensure()
    if Path(sys.prefix).resolve() == made.folder.resolve():
        return None
    # programs that notebooks or tools start by name (ruff, ninja) come from the environment, too
    os.environ["PATH"] = str(python.parent) + os.pathsep + os.environ.get("PATH", "")
    started = [str(python), "-m", "course", command, *arguments]
    if CAN_EXEC:
        os.execv(started[0], started)
    return end_of(subprocess.Popen(started))


def say(text: str) -> None:
    """One line for the user, not on stdout: that belongs to the command."""
    print(text, file=sys.stderr, flush=True)


def read_json(path: Path) -> dict[str, str]:
    """The object in a small file of ours; empty if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return {}
