"""Run a function on several processes that form one process group, from a notebook or a script.

    def work(x):
        dist.all_reduce(x)
        return x

    launch(work, 4, torch.ones(3))      # [tensor([4., 4., 4.])] * 4

Each process ("rank") is its own Python with one compute thread and a process group already made. They meet through a
file, so no port is fixed, and talk over the loopback interface. On Linux they are forked from a server that has
imported PyTorch once and never ran anything (multiprocessing's forkserver); elsewhere they are spawned, which takes
some seconds more. Functions and classes defined in a notebook travel by value (cloudpickle).

Whatever happens, `launch` ends with no rank alive and says which rank is to blame: see `LaunchError`.
"""

import contextlib
import ctypes
import faulthandler
import io
import linecache
import multiprocessing as mp
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

# Imported once by the fork server, so that no rank has to: the optimizers import torch._dynamo at first use.
_PRELOAD = [
    "numpy",
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "torch.utils.data.distributed",
    "shared.distributed",
]
_START_LIMIT = 180  # seconds for all ranks to exist; spawned ranks import PyTorch on a busy machine
_GRACE = 1.0  # seconds at most for the cause to show after a rank saw only a time-out or a lost connection
_DRAIN = 0.05  # seconds for failures that happened at the same moment to come in

_STARTING = threading.Lock()  # launches may run in several threads

_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|connection was closed|remote process exited|"
    r"communicator was aborted|ncclRemoteError|socket closed",
    re.IGNORECASE,
)
# only what PyTorch's stores and backends say: a time-out of the user's own is an exception like any other
_LATE = re.compile(
    r"timed out (waiting|after) \d|application timeout caused|wait timeout after|socket timeout|connectFullMesh failed",
    re.IGNORECASE,
)
_ECHO = re.compile(r"(\[rank\d+\]:)?\[[EF]\d{4} [\d:.]+ ProcessGroupGloo\.cpp")  # gloo logs what it then raises


class LaunchError(RuntimeError):
    """A rank failed; all of them have been ended.

    Attributes:
        ranks: those to blame, in order. A rank that failed only because it lost the connection to another is not.
        reason: "raised" (an exception), "died" (a signal, os._exit), "hung" (did not arrive or finish in time) or
            "deadlock" (every rank waited for another).
        error: the exception that the first of `ranks` raised, or None.
    """

    def __init__(self, message: str, ranks: list[int], reason: str, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.reason = reason
        self.error = error


def launch(
    fn: Callable[..., Any], world_size: int, *args: Any, backend: str | None = None, timeout: float = 30
) -> list[Any]:
    """Call fn(*args) on `world_size` processes that form a process group; return what each returned, by rank.

    Inside fn the default process group exists, and RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are set as
    torchrun sets them. Under NCCL the current CUDA device is the rank's own. What ranks print is printed here when
    they have ended, rank after rank.

    Args:
        fn: any function that cloudpickle can send: of a module, or defined in a notebook, closures included.
        world_size: number of ranks, at least 1.
        args: copied to every rank.
        backend: of the process group; None for "nccl" if there is a GPU for each rank, else "gloo".
        timeout: seconds from the moment all ranks have started. A collective gives up somewhat earlier, so that
            the ranks can tell who was missing.

    Raises:
        LaunchError: a rank raised, died or did not finish in time. No rank is left alive.
        ValueError: world_size or timeout is not positive, or the backend is not built into this PyTorch.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if timeout <= 0:
        raise ValueError(f"timeout must be positive, not {timeout}")
    backend = backend or default_backend(world_size)
    if not dist.is_backend_available(backend):
        raise ValueError(f"this PyTorch has no backend {backend!r}; gloo runs on every CPU")
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as folder:
        job = _Job(Path(folder), world_size, backend, timeout)
        environment = dict(os.environ)
        (job.folder / "call").write_bytes(cloudpickle.dumps((fn, args, environment)))
        try:
            job.start()
            return job.results()
        finally:
            job.end()
            job.show_output()


def default_backend(world_size: int) -> str:
    """The backend that `launch` takes: NCCL if there is a GPU for each rank, else gloo."""
    enough = dist.is_nccl_available() and torch.cuda.device_count() >= world_size
    return "nccl" if enough else "gloo"


# ---------------------------------------------------------------- the notebook's side


@dataclass
class _Rank:
    """What the parent knows about one rank."""

    number: int
    process: Any
    link: Connection
    state: str = "starting"  # starting → running → returned | failed | died
    value: Any = None  # what fn returned
    failure: "_Failure | None" = None

    @property
    def open(self) -> bool:
        return self.state in ("starting", "running")


@dataclass
class _Failure:
    """How a rank failed.

    Attributes:
        kind: "raised", "died", "late" (a collective timed out) or "lost" (a connection closed).
        text: one line.
        when: time.monotonic() of the failure; one clock for all processes of a machine.
        frames: (file, line, function) from fn inwards.
        error: the exception, if it could be sent.
    """

    kind: str
    text: str
    when: float
    frames: list[tuple[str, int, str]] = field(default_factory=list)
    error: BaseException | None = None


class _Job:
    def __init__(self, folder: Path, size: int, backend: str, timeout: float) -> None:
        self.folder, self.size, self.backend, self.timeout = folder, size, backend, timeout
        self.ranks: list[_Rank] = []

    def start(self) -> None:
        context = _context()
        for number in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(theirs, str(self.folder), number, self.size, self.backend, _group_timeout(self.timeout)),
                name=f"rank {number}",
            )
            # If start() is interrupted the rank sees `ours` closed and ends itself.
            self.ranks.append(_Rank(number, process, ours))
            with _prepared_to_start():
                process.start()
            theirs.close()

    def results(self) -> list[Any]:
        deadline = time.monotonic() + _START_LIMIT
        started = False
        while any(rank.open for rank in self.ranks):
            if not started and all(rank.state != "starting" for rank in self.ranks):
                started, deadline = True, time.monotonic() + self.timeout
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not self._receive(remaining):
                if not started:
                    names = _names(rank.number for rank in self.ranks if rank.state == "starting")
                    raise LaunchError(
                        f"{names} did not start within {_START_LIMIT} s",
                        [rank.number for rank in self.ranks if rank.state == "starting"],
                        "hung",
                    )
                raise self._standstill()
            if any(rank.failure for rank in self.ranks):
                raise self._cause()
        for rank in self.ranks:  # nobody closes a connection that another rank may still read from
            with contextlib.suppress(OSError):
                rank.link.send("all returned")
        return [rank.value for rank in self.ranks]

    def _receive(self, seconds: float) -> bool:
        """Take in what ranks report within `seconds`; False if nothing came."""
        owners = {}
        for rank in self.ranks:
            if rank.open:
                owners[rank.link] = owners[rank.process.sentinel] = rank
        ready = wait(list(owners), max(0.0, seconds))
        for rank in {owners[item].number: owners[item] for item in ready}.values():
            self._take(rank)
        return bool(ready)

    def _take(self, rank: _Rank) -> None:
        with contextlib.suppress(EOFError, OSError):
            while rank.open and rank.link.poll():
                word = rank.link.recv()
                if word == "running":
                    rank.state = "running"
                else:
                    outcome = cloudpickle.loads((self.folder / f"{rank.number}.outcome").read_bytes())
                    if word == "returned":
                        rank.state, rank.value = "returned", outcome
                    else:
                        rank.state, rank.failure = "failed", outcome
            if rank.open and rank.process.is_alive():
                return
        if rank.open:  # it ended without a word
            rank.process.join(_GRACE)
            rank.state, rank.failure = "died", self._death(rank)

    def _death(self, rank: _Rank) -> _Failure:
        code = rank.process.exitcode
        if code is not None and code < 0:
            try:
                how = f"was killed by {signal.Signals(-code).name}"
            except ValueError:
                how = f"was killed by signal {-code}"
        else:
            how = f"ended without returning (exit code {code})"
        said = self._output(rank.number, "err")
        if "collective operation timeout" in said:  # NCCL's watchdog aborts its process
            return _Failure("late", "NCCL's watchdog gave up waiting", time.monotonic())
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
        return _Failure("died", f"{how}: {last.strip()}" if last else how, time.monotonic())

    def _cause(self) -> LaunchError:
        """Some rank failed. Find out which one is to blame."""
        deadline = time.monotonic() + min(_GRACE, self.timeout / 8)
        while not self._primary() and any(rank.open for rank in self.ranks):
            if not self._receive(deadline - time.monotonic()):
                break
        if not self._primary():
            lost = [rank for rank in self.ranks if rank.failure and rank.failure.kind == "late"]
            return self._standstill() if lost else self._blame([rank for rank in self.ranks if rank.failure])
        deadline = time.monotonic() + _DRAIN
        while any(rank.open for rank in self.ranks) and self._receive(deadline - time.monotonic()):
            pass
        return self._blame(self._primary())

    def _primary(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.failure and rank.failure.kind in ("raised", "died")]

    def _blame(self, culprits: list[_Rank]) -> LaunchError:
        culprits = sorted(culprits, key=lambda rank: rank.failure.when)
        first = culprits[0]
        lines = [f"rank {first.number} {first.failure.text}", *_located(first.failure.frames)]
        same = [rank for rank in culprits[1:] if rank.failure.text == first.failure.text]
        if same:
            lines.append(f"{_names(rank.number for rank in same)} did the same")
        lines += [f"then rank {rank.number} {rank.failure.text}" for rank in culprits[1:] if rank not in same]
        lost = [rank.number for rank in self.ranks if rank.failure and rank not in culprits]
        if lost:
            lines.append(f"as a consequence {_names(lost)} lost the connection")
        reason = first.failure.kind if first.failure.kind in ("raised", "died") else "raised"
        return LaunchError("\n".join(lines), [rank.number for rank in culprits], reason, first.failure.error)

    def _standstill(self) -> LaunchError:
        """Nobody failed by itself, but the ranks don't get on. Say where each of them stands."""
        stacks = self._stacks()
        busy, lines, returned = [], {}, []
        for rank in self.ranks:
            if rank.state == "returned":
                returned.append(rank.number)
                lines[rank.number] = "has returned"
                continue
            frames = rank.failure.frames if rank.failure else stacks.get(rank.number, [])
            operation = _operation(frames)
            if not operation and not rank.failure:
                busy.append(rank.number)
            place = _located(frames)[-1:] or [""]
            lines[rank.number] = f"{'waits in ' + operation if operation else 'is'} {place[0].strip()}".rstrip()
            if rank.failure and not operation:
                lines[rank.number] = f"{rank.failure.text} {place[0].strip()}".rstrip()
        missing, reason = busy or returned, "hung"
        waiting = [rank.number for rank in self.ranks if rank.number not in missing]
        limit = f"within {self.timeout:g} s"
        if busy and waiting:
            head = f"{_names(busy)} did not arrive {limit}; {_names(waiting)} waited"
        elif busy:
            head = f"{_names(busy)} did not finish {limit}"
        elif returned:
            head = f"{_names(waiting)} did not finish {limit}; {_names(returned)} had already returned"
        else:
            missing, reason = waiting, "deadlock"
            head = f"deadlock: {_names(waiting)} all wait, none can go on ({limit})"
        details = [f"  rank {number} {line}" for number, line in lines.items()]
        return LaunchError("\n".join([head, *details]), missing, reason)

    def _stacks(self) -> dict[int, list[tuple[str, int, str]]]:
        """Where the running ranks are, from fn inwards; empty where the platform can't tell."""
        running = [rank for rank in self.ranks if rank.state == "running" and hasattr(faulthandler, "register")]
        for rank in running:
            with contextlib.suppress(OSError):
                os.kill(rank.process.pid, signal.SIGUSR1)
        stacks: dict[int, list[tuple[str, int, str]]] = {}
        deadline = time.monotonic() + _GRACE
        while len(stacks) < len(running) and time.monotonic() < deadline:
            for rank in running:
                frames = _parse_stack(self.folder / f"{rank.number}.stack")
                if frames:
                    stacks[rank.number] = frames
            time.sleep(0.01)
        return stacks

    def end(self) -> None:
        """No rank is alive after this."""
        complete = len(self.ranks) == self.size and all(rank.state == "returned" for rank in self.ranks)
        deadline = time.monotonic() + (2 if complete else 0)
        started = [rank for rank in self.ranks if rank.process.pid is not None]
        try:
            for rank in started:
                rank.process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for rank in started:
                _kill(rank.process)
            for rank in started:
                rank.process.join(5)
            for rank in self.ranks:
                rank.link.close()
                with contextlib.suppress(ValueError):
                    rank.process.close()

    def show_output(self) -> None:
        for number in range(self.size):
            for kind, stream in (("out", sys.stdout), ("err", sys.stderr)):
                for line in self._output(number, kind).splitlines():
                    if not _ECHO.match(line):
                        print(f"[rank {number}] {line}", file=stream)

    def _output(self, number: int, kind: str) -> str:
        path = self.folder / f"{number}.{kind}"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _context() -> Any:
    """Linux forks from a server that imported PyTorch and started no thread; elsewhere that isn't safe or possible."""
    if sys.platform != "linux":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)  # without effect once the server runs
    return context


@contextlib.contextmanager
def _prepared_to_start() -> Iterator[None]:
    """What starts in this block has one OpenMP thread and does not run the main script again.

    Threads that spin against other ranks cost up to 8-fold. And multiprocessing would run a script's file once more in
    every rank, though what it defines travels by value anyway.
    """
    main, missing = sys.modules["__main__"], object()
    with _STARTING:
        threads = os.environ.get("OMP_NUM_THREADS")
        kept = {name: main.__dict__.pop(name, missing) for name in ("__file__", "__spec__")}
        os.environ["OMP_NUM_THREADS"] = "1"
        main.__spec__ = None
        try:
            yield
        finally:
            del main.__spec__, os.environ["OMP_NUM_THREADS"]
            main.__dict__.update((name, value) for name, value in kept.items() if value is not missing)
            if threads is not None:
                os.environ["OMP_NUM_THREADS"] = threads


def _group_timeout(timeout: float) -> float:
    return timeout - min(2.0, timeout / 4)


def _kill(process: Any) -> None:
    """End a rank and what it started itself (it leads a process group of its own)."""
    if process.is_alive():
        with contextlib.suppress(OSError, AttributeError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def _names(numbers: Iterator[int] | list[int]) -> str:
    found = [str(number) for number in numbers]
    if len(found) == 1:
        return f"rank {found[0]}"
    return f"ranks {', '.join(found[:-1])} and {found[-1]}"


_TORCH = str(Path(torch.__file__).parent)
_STDLIB = str(Path(contextlib.__file__).parent)


def _inside_library(file: str) -> bool:
    return file.startswith((_TORCH, "<frozen")) or (file.startswith(_STDLIB) and "site-packages" not in file)


def _operation(frames: list[tuple[str, int, str]]) -> str:
    """Name of the communication a rank waits in, or "" if it is somewhere else."""
    inner = list(frames)
    while inner and not inner[-1][0].startswith(_TORCH):
        file, line, _ = inner.pop()
        if re.search(r"\.(wait|synchronize)\(", linecache.getline(file, line)) and len(inner) == len(frames) - 1:
            return "wait()"
        if not _inside_library(file):
            return ""
    calls = [name for file, _, name in inner if file.startswith(os.path.join(_TORCH, "distributed"))]
    names = [name for name in calls if name not in ("wrapper", "__exit__", "__enter__")]
    return names[0] if names else ""


def _located(frames: list[tuple[str, int, str]]) -> list[str]:
    """One line a frame of the user's own code; a notebook's cells are in this process's linecache."""
    lines = []
    for file, number, name in frames:
        if _inside_library(file):
            continue
        source = linecache.getline(file, number).strip()
        base = os.path.basename(file)
        where = f"in {name}, line {number}" + ("" if "ipykernel" in file or file.startswith("<") else f" of {base}")
        lines.append(f"  {where}: {source}" if source else f"  {where}")
    return lines


def _parse_stack(path: Path) -> list[tuple[str, int, str]]:
    """The frames of the rank's main thread, from fn inwards, out of faulthandler's report (innermost first)."""
    if not path.exists():
        return []
    for block in path.read_text(encoding="utf-8", errors="replace").split("\n\n"):
        frames = [(f, int(n), name) for f, n, name in re.findall(r'File "(.*?)", line (\d+) in (.*)', block)]
        outer = [i for i, frame in enumerate(frames) if frame[2] == _rank_main.__name__]
        if outer:
            return frames[: outer[0]][::-1]
    return []


# ---------------------------------------------------------------- the rank's side


def _rank_main(link: Connection, folder: str, rank: int, size: int, backend: str, group_timeout: float) -> None:
    """What each process runs."""
    _detach()
    here = Path(folder)
    _capture(here, rank)
    released = threading.Event()
    threading.Thread(target=_watch, args=(link, released, here), daemon=True).start()
    stack = open(here / f"{rank}.stack", "w")  # noqa: SIM115 - faulthandler writes into it until the process ends
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    try:
        fn, args, environment = cloudpickle.loads((here / "call").read_bytes())
        _prepare(environment, rank, size)
        link.send("running")
        _make_group(here, rank, size, backend, group_timeout)
        outcome, word = fn(*args), "returned"
        try:
            data = cloudpickle.dumps(outcome)
        except Exception as error:
            raise TypeError(f"what fn returned can't be sent: {error}") from error
    except BaseException as error:
        word = "failed"
        failure = _describe(error)
        try:
            data = cloudpickle.dumps(failure)
            cloudpickle.loads(data)
        except Exception:
            failure.error = None
            data = cloudpickle.dumps(failure)
    (here / f"{rank}.outcome").write_bytes(data)
    sys.stdout.flush()
    sys.stderr.flush()
    link.send(word)
    released.wait()  # until every rank has returned; the parent ends a failed job
    if dist.is_initialized():
        dist.destroy_process_group()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)  # what C libraries (NCCL_DEBUG) have printed and not yet written
    os._exit(0)  # no exit handlers of what was imported, no waiting for threads of gloo or NCCL


def _detach() -> None:
    """A process group of its own: an interrupt of the notebook does not reach it, and it can be ended as a whole."""
    with contextlib.suppress(AttributeError, OSError):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _capture(folder: Path, rank: int) -> None:
    """Send file descriptors 1 and 2, so also what C++ prints, into files that the parent shows."""
    for number, name, kind in ((1, "stdout", "out"), (2, "stderr", "err")):
        file = os.open(folder / f"{rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115 - unbuffered: a killed rank loses no word
        setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", errors="replace", write_through=True))


def _watch(link: Connection, released: threading.Event, folder: Path) -> None:
    """Wait for the parent's word. If the parent is gone, so is this rank with all it started, and the folder."""
    try:
        link.recv()
        released.set()
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        if hasattr(os, "killpg"):
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)


def _prepare(environment: dict[str, str], rank: int, size: int) -> None:
    """The parent's environment of now, not of when the server started, and torchrun's variables."""
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), OMP_NUM_THREADS="1"
    )
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    torch.set_num_threads(1)
    dist.set_debug_level_from_env()


def _make_group(folder: Path, rank: int, size: int, backend: str, timeout: float) -> None:
    options = {}
    if "nccl" in backend:
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)  # the communicator is made now, not at first use
    store = dist.FileStore(str(folder / "store"), size)
    store.set_timeout(timedelta(seconds=timeout))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout), **options
    )


def _describe(error: BaseException) -> _Failure:
    clock = r"\[rank\d+\]:\[\w+ [\d:.]+ ([\w.]+):\d+\] "  # what C++ puts before its messages
    text = re.sub(clock, r"\1: ", str(error).strip())
    kind = "raised"
    if isinstance(error, RuntimeError):
        kind = "lost" if _LOST.search(text) else "late" if _LATE.search(text) else kind
    frames = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SystemExit):
        kind, text = "died", f"left by sys.exit({error.code!r})"
    else:
        text = f"raised {type(error).__name__}" + (f": {text}" if text else "")
    return _Failure(kind, text, time.monotonic(), frames[1:], error.with_traceback(None))
