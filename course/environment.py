"""The environment that every command runs in: a .venv in the repository root, made and kept up to date here.

Only the standard library is needed: this runs before anything is installed. Students get what requirements.txt names;
the first command for maintainers adds requirements-dev.txt. A stamp says what has been installed (by a digest of these
files, constraints.txt, pyproject.toml and the index of torch); while it matches, nothing is done and no network is
needed. Files of ours:

    .venv/made-by-course.json   this tool made the folder, here: only then may it empty it
    .venv/course-stamp.json     what is installed; removed first and written last, so an interrupted one leaves none
    .venv/course.lock           held (by the system, so never stale) while something is installed
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
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
REQUIREMENTS, TOOLS = "requirements.txt", "requirements-dev.txt"
NEED_TOOLS = {"run", "test", "lint"}  # `run` for the peers that optional sections are held against
CAN_EXEC = os.name == "posix"  # Windows has an exec that returns to the shell at once
PIP_LIMIT = 3 * 3600  # seconds; pip itself gives up much earlier on a connection that stalls
LOCK_LIMIT = 3600  # seconds to wait for another process's installation
TELL_EVERY = 10.0  # seconds; pip says nothing while it unpacks, for minutes
# what a command can do without when nothing may be installed (COURSE_ENV=current)
ONLY_FOR = {"pytest": {"test"}, "nbval": {"test"}, "jupyter": {"lab"}, "jupyter_server": {"lab"}}

PIP_ADVICE = """pip failed (exit status {status}); what it said is above. Likely causes:
- The package index can't be reached. Behind a proxy set HTTPS_PROXY; PIP_INDEX_URL names a mirror. If it is the one in
  COURSE_TORCH_INDEX, leave that out.
- The disk is full: the CUDA build takes 6.3 GB, CPU-only wheels (COURSE_TORCH_INDEX=<their index>) about 1.5 GB.
- There is no build of a pinned version for this Python and system; 3.11 to 3.13 have them all.
Call the same command again; what was downloaded is kept."""

NO_GPU = """No NVIDIA driver is here, so torch without CUDA does as well. To have that: Ctrl+C now, and then
    COURSE_TORCH_INDEX=https://download.pytorch.org/whl/cpu make lab"""

# what `python -m course site` imports: requirements-site.txt has it, and PyTorch isn't in it
FOR_THE_SITE = (
    "sphinx",
    "myst_nb",
    "sphinx_book_theme",
    "sphinx_copybutton",
    "mathjax",
    "nbclient",
    "ipykernel",
    "PIL",
)

SITE_ADVICE = """The site needs Sphinx and a few more packages, but not PyTorch: half a minute on a fast line, 0.4 GB.
In the course's folder:
    python3 -m venv .site
    .site/bin/python -m pip install -r requirements-site.txt -c constraints.txt
    .site/bin/python -m course site
(On Windows: py -m venv .site, and .site\\Scripts\\python in place of .site/bin/python.)"""

TORCH_ADVICE = """torch and torchvision don't import together. They must come from one index and belong together, as
the pair in constraints.txt does. Remove both and let them be installed again:
    python -m course clean --all
    python -m course setup
For another index (CPU-only wheels, another CUDA) set COURSE_TORCH_INDEX to its address for the second line."""


class SetupError(Exception):
    """The environment can't be made or used; the message says why and what to do."""


def run(command: list[str]) -> int:
    """Run a program whose output the user sees, and return its exit status."""
    # without what would make venv and pip look elsewhere
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET")}
    try:
        return subprocess.run(
            command, cwd=ROOT, env={**env, "PIP_USER": "0"}, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(),
            timeout=PIP_LIMIT, check=False,
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"{' '.join(command[:4])} took more than {PIP_LIMIT // 3600} hours and was ended.") from error


def end_of(process: subprocess.Popen) -> int:
    """Wait for a program in the foreground; returns its exit status. Ctrl-C reaches it as well, and it decides."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def probe(python: Path, code: str, timeout: float = 30) -> tuple[int, str]:
    """Run a line of Python; returns its exit status and what it printed or why it could not."""
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, encoding="utf-8", errors="replace", timeout=timeout, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout.strip()


@contextlib.contextmanager
def telling(line: Callable[[], str]) -> Iterator[None]:
    """Say a line from time to time, if it has changed since."""
    ended = threading.Event()

    def tell() -> None:
        told = line()
        while not ended.wait(TELL_EVERY):
            if (now := line()) != told:
                say(now)
                told = now

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def locked(path: Path, limit: float) -> Iterator[None]:
    """Hold the lock file at `path`. SetupError after `limit` seconds.

    The operating system holds the lock and drops it when this process ends however that happens, so it can't go stale.
    """
    deadline = time.monotonic() + limit
    with open(path, "ab") as file:
        if not _try_lock(file.fileno()):
            say("Another process is setting the environment up; waiting for it to finish.")
            while not _try_lock(file.fileno()):
                if time.monotonic() > deadline:
                    raise SetupError(
                        f"Another process has been setting up {path.parent} for {limit:.0f} s. Wait for it or end it "
                        "(look for `pip install` among the processes), then call this again."
                    )
                time.sleep(0.2)
        yield


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
        # where torch has come from; an index that didn't work is not used again
        self.known_index = {**read_json(self.stamp), **read_json(self.marker)}.get("index", "")
        self.index = self.known_index if index is None else index

    def broken(self) -> str | None:
        """Why the .venv can't be used as it is, or None."""
        if read_json(self.marker).get("root", str(self.root)) != str(self.root):
            return "the folder has been moved or copied"
        if not self.python.exists():
            return "its Python is gone" if (self.folder / "pyvenv.cfg").exists() else "there is none yet"
        # where it was made for another version of Python there is no pip
        status, said = probe(self.python, "import sys, pip; assert sys.version_info >= (3, 11); print(sys.prefix)")
        # the folder, not the file: .venv/bin/python is a link to the system's
        if status or Path(said).resolve() != self.folder.resolve():
            said = (said or "it says nothing").splitlines()[-1]
            return f"its Python doesn't start there, isn't 3.11 or newer or has no pip ({said})"
        return None

    def digest(self, tools: bool) -> str:
        """A hash of everything that decides what is installed."""
        names = [REQUIREMENTS, "constraints.txt", "pyproject.toml", *([TOOLS] if tools else [])]
        texts = {name: (self.root / name).read_text("utf-8") for name in names if (self.root / name).is_file()}
        return hashlib.sha256(json.dumps([texts, self.index]).encode()).hexdigest()

    def ready(self) -> bool:
        """Whether nothing has to be done: it can be used, and what the stamp says is what is asked for, or more."""
        enough = {self.digest(tools=True)} | (set() if self.tools else {self.digest(tools=False)})
        return self.broken() is None and read_json(self.stamp).get("digest") in enough

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
                f"Can't write the environment {self.folder}: {error}\nIf the disk isn't full, use a copy of the course "
                "in a folder of yours, or COURSE_ENV=current with a Python that has all of requirements.txt."
            ) from error
        return self.python

    def empty(self) -> None:
        """Delete what is in the folder, but for the marker and the lock. SetupError if it isn't this tool's."""
        if not self.marker.is_file():
            raise SetupError(
                f"{self.folder} was not made by this tool, so it is left alone. Delete or rename it yourself, then "
                "call this again."
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
        with locked(self.lock, 5) if self.marker.is_file() else contextlib.nullcontext():
            self.empty()
        shutil.rmtree(self.folder)
        return True

    def _write_marker(self) -> None:
        write_whole(self.marker, json.dumps({"root": str(self.root), "index": self.known_index}))

    def _install(self) -> None:
        installed, ours = read_json(self.stamp), self.marker.is_file()
        reason = (
            self.broken()
            or (installed.get("index", self.index) != self.index and "torch is to come from another index")
            or (ours and not installed and "an installation was interrupted, so packages may be half there")
        )
        if reason:
            self._make(reason)
        self.stamp.unlink(missing_ok=True)
        if not ours:
            say(f"{self.folder} was not made by this tool; it is used as it is, and gets what it lacks.")
        if reason or not installed:
            free = shutil.disk_usage(self.folder).free / 1e9
            say(
                "Installing what the course needs, 3 to 5 minutes on a fast line. With CUDA it takes about 3 GB to "
                f"download and 6 GB of disk, without it 1.5 GB of disk; {free:.0f} GB are free."
            )
            if not self.index and sys.platform == "linux" and shutil.which("nvidia-smi") is None:
                say(NO_GPU)
        else:
            say(f"Adding what {TOOLS if self.tools else REQUIREMENTS} asks for.")
        if self.index:
            # only these two: their dependencies come with the rest, in the versions that constraints.txt pins
            say(f"torch and torchvision come from {self.index}; without it: COURSE_TORCH_INDEX= (empty).")
            torch = [line for line in requirements(self.root) if re.match(r"torch(vision)?\b", line)]
            self._pip("--no-deps", "--index-url", self.index, *torch)
        self._pip("-r", TOOLS if self.tools else REQUIREMENTS)
        # wheels from two indexes install well and break here
        status, said = probe(self.python, "import torch, torchvision; from torchvision.ops import nms", timeout=300)
        if status:
            raise SetupError("\n".join([*said.splitlines()[-8:], "", TORCH_ADVICE]))
        write_whole(self.stamp, json.dumps({"digest": self.digest(self.tools), "index": self.index}))
        self.known_index = self.index
        if self.marker.is_file():
            self._write_marker()

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
        with telling(self._so_far):
            status = run([*command, *pins])
        if status:
            raise SetupError(PIP_ADVICE.format(status=status))

    def _so_far(self) -> str:
        """How many packages are in place."""
        places = ("lib/python*/site-packages", "Lib/site-packages")  # the second one on Windows
        count = sum(1 for place in places for _ in self.folder.glob(f"{place}/*.dist-info"))
        return f"{count} of about {190 if self.tools else 145} packages are in place"


def requirements(root: Path) -> list[str]:
    """The lines of requirements.txt that name a distribution, without comments."""
    text = (root / REQUIREMENTS).read_text(encoding="utf-8")
    return [line.strip() for line in re.findall(r"^\w[^#\n]*", text, re.MULTILINE)]


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


def can_build_site() -> bool:
    """Whether the running Python has what the site is built with."""
    return all(importlib.util.find_spec(name) for name in FOR_THE_SITE)


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
        if problems := unmet(ROOT, command):
            listed = "\n".join("  " + problem for problem in problems)
            raise SetupError(
                f"COURSE_ENV=current: this Python ({sys.executable}) can't run `{command}`:\n{listed}\n"
                "Install them in it (pip install -r requirements.txt), or unset COURSE_ENV to have .venv made."
            )
        # kernels start in other folders and this Python may not have the project installed
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        return None
    if choice:
        raise SetupError(f"COURSE_ENV={choice!r} is not known. Use COURSE_ENV=current, or unset it to have .venv made.")
    os.environ.pop("PYTHONHOME", None)  # which would lead the Python of .venv elsewhere, and that one back here
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


def describe() -> str:
    """One line on the running environment."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "torchvision"))
    return f"{sys.prefix}, Python {sys.version.split()[0]}, {versions}"


def say(text: str) -> None:
    """One line for the user, not on stdout: that belongs to the command."""
    print(text, file=sys.stderr, flush=True)


def read_json(path: Path) -> dict[str, str]:
    """The object in a small file of ours; empty if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}
