"""Run a function on several processes that form one process group, from a notebook or a script.

    def work(x):
        dist.all_reduce(x)
        return x

    launch(work, 4, torch.ones(3))      # [tensor([4., 4., 4.])] * 4

Each process ("rank") is its own Python with one compute thread and a process group already made. They meet through a
file, so no port is fixed, and talk over the loopback interface. On Linux they are forked from a server that has
imported PyTorch once and never ran anything (multiprocessing's forkserver); elsewhere they are spawned, which takes
some seconds more. Functions and classes defined in a notebook travel by value (cloudpickle).

Whatever happens, `launch` ends with no rank alive and says which rank is to blame: see rank_failures.py.
"""

import contextlib
import ctypes
import faulthandler
import io
import multiprocessing as mp
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar

import cloudpickle
import torch
import torch.distributed as dist

from shared import rank_failures
from shared.rank_failures import Failure, LaunchError, Standing

# Imported once by the fork server, so that no rank has to: the optimizers import torch._dynamo at first use.
_PRELOAD = [
    "numpy",
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "torch.utils.data.distributed",
    "shared.launcher",
]
_START_LIMIT = 180  # seconds for all ranks to exist; spawned ranks import PyTorch on a busy machine
_GRACE = 1.0  # seconds at most for the cause to show after a rank saw only a time-out or a lost connection
_DRAIN = 0.05  # seconds for failures that happened at the same moment to come in

_STARTING = threading.Lock()  # launches may run in several threads

# gloo logs what it then raises; and what C++ says as it ends a process is in the report
_ECHO = re.compile(
    r"(\[rank\d+\]:)?\[[EF]\d{4} [\d:.]+ ProcessGroupGloo\.cpp|terminate called |  what\(\):  \[.*/gloo/"
)


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
        backend: of the process group; None for "cpu:gloo,cuda:nccl" if there is a GPU for each rank, else "gloo".
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
    with _STARTING:  # another launch may be about to change a variable
        environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as folder:
        job = _Job(Path(folder), world_size, backend, timeout)
        with open(job.folder / "call", "wb") as file:
            _Pickler(file).dump((fn, args, environment))
        try:
            job.start()
            return job.results()
        finally:
            job.end()
            job.show_output()


def prepare_launch() -> None:
    """Start the server that ranks are forked from, in the background, so that the first launch needn't wait for it.

    Without effect where it runs already, and where ranks are spawned.
    """
    if sys.platform == "linux":
        from multiprocessing import forkserver  # Windows has none

        with _prepared_to_start():
            _context()
            forkserver.ensure_running()


def _code_of_file(build: Callable[..., CodeType], parts: tuple, file: str) -> CodeType:
    return build(*parts).replace(co_filename=file)


def _reduce_code(code: CodeType) -> tuple:
    build, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _code_of_file, (build, parts, code.co_filename)


class _Pickler(cloudpickle.Pickler):
    """Code keeps the name of its file, by which reports find its lines; cloudpickle drops it from 3.1.3 on."""

    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def default_backend(world_size: int) -> str:
    """What `launch` takes: gloo for the CPU and NCCL for GPUs if there is one for each rank, else gloo alone.

    NCCL can't serve two ranks on one GPU, gloo can. PyTorch's own default (2.15) is the accelerator's backend alone;
    with NCCL alone a tensor on the CPU would be refused.
    """
    enough = dist.is_nccl_available() and torch.cuda.device_count() >= world_size
    return "cpu:gloo,cuda:nccl" if enough else "gloo"


# ---------------------------------------------------------------- the notebook's side


@dataclass(kw_only=True)
class _Rank(Standing):
    """A rank as the parent sees it."""

    process: Any
    link: Connection
    value: Any = None  # what fn returned

    @property
    def open(self) -> bool:
        return self.state in ("starting", "running")


class _Job:
    def __init__(self, folder: Path, size: int, backend: str, timeout: float) -> None:
        self.folder, self.size, self.backend, self.timeout = folder, size, backend, timeout
        self.ranks: list[_Rank] = []

    def start(self) -> None:
        context = _context()
        group_timeout = self.timeout - min(2.0, self.timeout / 4)
        for number in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(theirs, str(self.folder), number, self.size, self.backend, group_timeout),
                name=f"rank {number}",
            )
            # If start() is interrupted the rank sees `ours` closed and ends itself.
            self.ranks.append(_Rank(number=number, process=process, link=ours))
            with _prepared_to_start():
                process.start()
            theirs.close()

    def results(self) -> list[Any]:
        self.limit, since = _START_LIMIT, time.monotonic()
        while any(rank.open for rank in self.ranks):
            if self.limit != self.timeout and all(rank.state != "starting" for rank in self.ranks):
                self.limit, since = self.timeout, time.monotonic()
            remaining = since + self.limit - time.monotonic()
            if remaining <= 0 or not self._receive(remaining):
                raise self._standstill()
            if any(rank.failure for rank in self.ranks):
                raise self._cause()
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
                    continue
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

    def _death(self, rank: _Rank) -> Failure:
        code = rank.process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended without returning (exit code {code})"
        said = self._output(rank.number, "err")
        if "collective operation timeout" in said:  # NCCL's watchdog aborts its process
            return Failure("late", "NCCL's watchdog gave up waiting", time.monotonic())
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
        return Failure("died", f"{how}: {last.strip()}" if last else how, time.monotonic())

    def _cause(self) -> LaunchError:
        """Some rank failed. Find out which one is to blame."""
        deadline = time.monotonic() + min(_GRACE, self.timeout / 8)
        while not rank_failures.culprits(self.ranks) and any(rank.open for rank in self.ranks):
            if not self._receive(deadline - time.monotonic()):
                break
        if not rank_failures.culprits(self.ranks):
            late = any(rank.failure and rank.failure.kind == "late" for rank in self.ranks)
            return self._standstill() if late else rank_failures.failed(self.ranks)
        deadline = time.monotonic() + _DRAIN
        while any(rank.open for rank in self.ranks) and self._receive(deadline - time.monotonic()):
            pass
        return rank_failures.failed(self.ranks)

    def _standstill(self) -> LaunchError:
        """Ask the running ranks where they are."""
        asked = [rank for rank in self.ranks if rank.state == "running" and hasattr(faulthandler, "register")]
        for rank in asked:
            with contextlib.suppress(OSError):
                os.kill(rank.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _GRACE
        while not all(rank.frames for rank in asked) and time.monotonic() < deadline:
            for rank in asked:
                report = self.folder / f"{rank.number}.stack"
                if report.exists():
                    text = report.read_text(encoding="utf-8", errors="replace")
                    rank.frames = rank_failures.parse_stack(text, _rank_main.__name__)
            time.sleep(0.01)
        return rank_failures.stood_still(self.ranks, self.limit)

    def end(self) -> None:
        """No rank is alive after this."""
        started = [rank for rank in self.ranks if rank.process.pid is not None]
        for rank in started:
            if rank.process.is_alive():
                with contextlib.suppress(OSError, AttributeError):
                    os.killpg(rank.process.pid, signal.SIGKILL)  # the rank leads a process group: what it started, too
                rank.process.kill()
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


# ---------------------------------------------------------------- the rank's side


def _rank_main(link: Connection, folder: str, rank: int, size: int, backend: str, group_timeout: float) -> None:
    """What each process runs."""
    with contextlib.suppress(AttributeError, OSError):
        os.setsid()  # an interrupt of the notebook does not reach it, and it can be ended with what it starts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    here = Path(folder)
    _capture(here, rank)
    threading.Thread(target=_watch, args=(link, here), daemon=True).start()
    stack = open(here / f"{rank}.stack", "w")  # noqa: SIM115 - faulthandler writes into it until the process ends
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    try:
        fn, args, environment = cloudpickle.loads((here / "call").read_bytes())
        _prepare(environment, rank, size)
        store = _meet(here, rank, size)
        link.send("running")
        _make_group(store, rank, size, backend, group_timeout)
        outcome, word = fn(*args), "returned"
        try:
            data = cloudpickle.dumps(outcome)
        except Exception as error:
            raise TypeError(f"what fn returned can't be sent: {error}") from error
    except BaseException as error:
        word = "failed"
        failure = rank_failures.describe(error)
        try:
            data = cloudpickle.dumps(failure)
            cloudpickle.loads(data)
        except Exception:
            failure.error = None
            data = cloudpickle.dumps(failure)
    (here / f"{rank}.outcome").write_bytes(data)
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)  # what C libraries (NCCL_DEBUG) have printed and not yet written
    link.send(word)
    # The parent ends this process together with its children, when no other rank can still read from it. No exit
    # handlers of what was imported, no waiting for threads of gloo or NCCL.
    threading.Event().wait()


def _capture(folder: Path, rank: int) -> None:
    """Send file descriptors 1 and 2, so also what C++ prints, into files that the parent shows."""
    for number, name, kind in ((1, "stdout", "out"), (2, "stderr", "err")):
        file = os.open(folder / f"{rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115 - unbuffered: a killed rank loses no word
        setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", errors="replace", write_through=True))


def _watch(link: Connection, folder: Path) -> None:
    """Wait for the parent's end. If it is gone, so is this rank with all it started, and the folder."""
    try:
        link.recv()  # it never says anything
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
    # 2.14 calls them deprecated; 2.12 and 2.15 don't
    two = r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"
    warnings.filterwarnings("ignore", two, FutureWarning)


def _meet(folder: Path, rank: int, size: int) -> dist.Store:
    """Wait for all ranks: what a late one had to import and to unpack is no time that others wait in a collective."""
    store = dist.FileStore(str(folder / "store"), size)
    store.set(f"here {rank}", "")
    store.wait([f"here {number}" for number in range(size)], timedelta(seconds=_START_LIMIT))
    return store


def _make_group(store: dist.Store, rank: int, size: int, backend: str, timeout: float) -> None:
    options = {}
    if "nccl" in backend:
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)  # the communicator is made now, not at first use
    store.set_timeout(timedelta(seconds=timeout))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout), **options
    )
