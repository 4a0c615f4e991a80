"""Run code that nobody vouches for: in a process of its own, within limits, and end all that it has started.

    def work(link, x):                          # a function of a module
        say(link, [x, 2 * x])                   # anything that JSON knows

    with Confined(work, (21,), Limits()) as process:
        process.hear(10)                        # [21, 42], or Stopped says why there is no answer

On Linux processes are forked from a server that has imported PyTorch and never ran anything, elsewhere made anew, which
takes seconds. The code gets a folder that is removed, and what it prints goes nowhere. Where Linux allows it, a process
is sealed: it can write nowhere else, reaches no network, and sees no process but its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing as mp
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import psutil

from course.environment import ROOT

LINUX = sys.platform == "linux"
if LINUX:
    from course import namespaces

START_SECONDS = 180  # for a process to exist and to say its first word
LOOK_SECONDS = 0.1  # between two looks at what it holds and has started
MESSAGE = 2_000_000  # bytes; nothing longer is listened to

interrupted = threading.Event()  # whoever sets it ends all waiting: `hear` raises Stopped
_STARTING = threading.Lock()


class Stopped(Exception):
    """There is no answer; the message says why, as a part of a sentence about the code ("it took more than 5 s")."""


@dataclass(frozen=True)
class Limits:
    """What the code may take."""

    memory: int = 4 * 2**30  # bytes, of each process, and of all together above what PyTorch takes
    processes: int = 32  # how many there may be at a time. Where the kernel counts, it allows four threads for each
    file_size: int = 2**29  # bytes of a file; if the process is sealed, of all files


def say(link: Connection, message: Any) -> None:
    """Send something that JSON knows from the process to the one that started it."""
    link.send_bytes(json.dumps(message).encode())


def prepare(sources: Iterable[str], also: Iterable[str] = ()) -> None:
    """Let the processes that follow start with the modules that these sources import; no effect but on Linux.

    Not with a topic's checks: should one fail while it is being worked on, each process says so and the server lives.
    also: names of more modules.
    """
    # the optimizers import torch._dynamo at first use, which takes 2 s
    modules = {"course.confined", "shared.checks.exercise", "torch._dynamo", *also}
    for source in sources:
        modules |= set(re.findall(r"^(?:from|import) ([\w.]+)", source, re.MULTILINE))
    if LINUX:
        mp.get_context("forkserver").set_forkserver_preload(sorted(modules))


class Confined:
    """A process that runs a function; used as a context manager, at whose end nothing of it is left."""

    def __init__(self, work: Callable[..., None], arguments: tuple, limits: Limits, *, is_sealed: bool = False) -> None:
        """`work` is a function of a module; it gets a connection to `say` something through, and the arguments.

        `can_seal` says whether a process can be sealed.
        """
        self._work, self._arguments, self._limits, self._is_sealed = work, arguments, limits, is_sealed
        self._base = 0

    def __enter__(self) -> Confined:
        """Start it. Raises OSError or EOFError if no process can be started."""
        context = mp.get_context("forkserver" if LINUX else "spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="confined-", ignore_cleanup_errors=True)
        self._link, theirs = context.Pipe()
        # who reaches the server can leave all limits
        hidden = multiprocessing.util.get_temp_dir() if self._is_sealed else None
        arguments = (self._work, self._arguments, self._limits, self._folder.name, hidden, theirs)
        self._process = context.Process(target=_enter, args=arguments)
        with theirs, _STARTING:
            self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._process.join(60)
        self._link.close()
        self._folder.cleanup()

    def hear(self, seconds: float) -> Any:
        """What the process says next.

        Raises Stopped if it said nothing in so many seconds, died, took more than it may, or sent no JSON.
        """
        end = time.monotonic() + seconds
        # the announcement of a message that never comes would hold us for ever
        watch = threading.Timer(seconds + 1, self._kill)
        watch.start()
        try:
            while not self._link.poll(LOOK_SECONDS):
                if interrupted.is_set():
                    raise Stopped("it was interrupted")
                if time.monotonic() >= end:
                    raise Stopped(f"it took more than {seconds:g} s")
                self._look()
            return json.loads(self._link.recv_bytes(MESSAGE))
        except (EOFError, BrokenPipeError):
            self._process.join(5)
            status = self._process.exitcode
            raise Stopped(f"its process ended before there was a result (exit status {status})") from None
        except (OSError, ValueError, RecursionError):
            raise Stopped("it sent what is no result") from None
        finally:
            watch.cancel()

    def _look(self) -> None:
        """Raise Stopped if it has started too much, or all together hold too much."""
        with contextlib.suppress(psutil.Error):  # one has ended meanwhile
            first = psutil.Process(self._process.pid)
            family = [first, *first.children(recursive=True)]
            # on Linux a process or two do nothing but wait
            if len(family) > self._limits.processes + 2:
                raise Stopped(f"it had started more than {self._limits.processes} processes")
            # what each process is born with, PyTorch above all, is no memory that the code has taken
            self._base = self._base or first.memory_info().rss
            if sum(max(0, one.memory_info().rss - self._base) for one in family) > self._limits.memory:
                raise Stopped(f"it took more than {self._limits.memory / 2**30:g} GiB of memory")

    def _kill(self) -> None:
        """End it with all that it has started."""
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(self._process.pid)
            if LINUX and not self._is_sealed:  # when its child has ended, it ends the rest; else the kernel does
                for child in first.children():
                    _kill_group(child.pid)
                self._process.join(30)
            elif not LINUX:
                for member in first.children(recursive=True):
                    member.kill()
        _kill_group(self._process.pid)
        self._process.kill()


def _kill_group(leader: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # it leads none; Windows
        os.killpg(leader, signal.SIGKILL)


@functools.cache
def can_seal() -> str:
    """Why processes can't be sealed here; nothing if they can. The first call starts the server."""
    if not LINUX:
        return f"{sys.platform} has no namespaces"
    try:
        with Confined(say, ("",), Limits(), is_sealed=True) as process:
            return process.hear(START_SECONDS)
    except Stopped as error:
        return str(error)


# ---------------------------------------------------------------- in the new process


def _enter(
    work: Callable[..., None], arguments: tuple, limits: Limits, folder: str, hidden: str | None, link: Connection
) -> NoReturn:
    """Go through the doors and run the function. `hidden` is a folder that it must not see; None: nothing is sealed.

    On Linux this process only waits for its child, takes in orphans, and ends them all when the child has ended.
    """
    if hasattr(os, "setsid"):
        os.setsid()
    if LINUX:
        _close_all_but(link)
        namespaces.die_with_parent()
        namespaces.adopt_orphans()
        try:
            if hidden:
                namespaces.enter()
            _go_on_in_child(link)
            if hidden:
                namespaces.close_off(folder, hidden, limits.file_size)
                _go_on_in_child(link)
                namespaces.drop_powers()
        except OSError as error:
            say(link, f"{error.filename}: {error.strerror}")  # which `can_seal` hears
            os._exit(1)
    _settle(folder, limits, is_sealed=bool(hidden))
    work(link, *arguments)
    link.close()
    os._exit(0)  # a thread that was left must not hold the process


def _close_all_but(link: Connection) -> None:
    """Close the ends of multiprocessing's own pipes: one word into them ends the server, and others' processes."""
    os.closerange(3, link.fileno())
    os.closerange(link.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    tracker = multiprocessing.resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # whoever needs one starts one


def _go_on_in_child(link: Connection) -> None:
    """Return in a new child; here, wait for it, and end with its status and all that it has left."""
    child = os.fork()
    if child == 0:
        namespaces.die_with_parent()
        os.setsid()  # a group of its own, which is killed in one go
        return
    link.close()
    ended = 0
    while ended != child:
        ended, status = os.waitpid(-1, 0)
    # until there is none any more; what the first process of a tree leaves is ended by the kernel, and hidden from here
    with contextlib.suppress(ChildProcessError, psutil.Error):
        while os.getpid() != 1:
            for member in psutil.Process().children(recursive=True):
                _kill_group(member.pid)  # in one go, while processes may multiply faster than they are listed
                with contextlib.suppress(psutil.Error):
                    member.kill()
            os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _settle(folder: str, limits: Limits, is_sealed: bool) -> None:
    """What is printed goes nowhere, what is written into a folder that is removed; the rest has its limits."""
    os.chdir(folder)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    with contextlib.suppress(ImportError):  # Windows
        import resource

        values = {
            resource.RLIMIT_DATA: limits.memory,
            resource.RLIMIT_FSIZE: limits.file_size,
            resource.RLIMIT_CORE: 0,
        }
        if is_sealed:  # else it would count what the same user runs elsewhere, too
            values[resource.RLIMIT_NPROC] = 4 * limits.processes
        for kind, value in values.items():
            with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
                resource.setrlimit(kind, (value, value))
    tempfile.tempdir = folder
    os.environ |= dict.fromkeys(("TMPDIR", "HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), folder)
    # the same verdict on every machine
    os.environ |= {"COURSE_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "COURSE_DATA": "sample", "MPLBACKEND": "agg"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    import torch

    torch.set_num_threads(1)
    if LINUX:
        # Ranks that a check starts are forked from here, where all is imported and nothing ever ran on two threads: a
        # fork server for them, new in each process, would take 3 s each time.
        fork = mp.get_context("fork")
        mp.get_context = lambda method=None: fork
        # Ranks forked from one process hold the ends of each other's links, so they would not see that it is gone.
        os.register_at_fork(after_in_child=namespaces.die_with_parent)
