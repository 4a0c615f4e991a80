"""shared.launcher: results, faults, standstills in every collective, nothing left behind."""

import ctypes
import functools
import gc
import linecache
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist

from shared import LaunchError, launch, rank_failures
from shared.launcher import default_backend
from shared.lessons.topic_15_10.killed_process import kill_here

pytestmark = pytest.mark.processes
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a notebook; and ranks need not import pytest
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def warm():
    """The fork server, the resource tracker and a GPU's driver run and may stay."""
    if torch.cuda.is_available():
        torch.cuda.init()
    launch(os.getpid, 1, backend="gloo")


@pytest.fixture(autouse=True)
def nothing_left(warm, tmp_path, monkeypatch):
    """Every test ends with the processes, threads, descriptors and temporary folders it began with."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = inventory()
    yield
    wait_until(lambda: all(now <= then for now, then in zip(inventory(), before, strict=True)))
    assert not list(tmp_path.glob("launch-*"))


def inventory():
    gc.collect()
    me = psutil.Process()
    descriptors = me.num_fds() if hasattr(me, "num_fds") else 0
    return len(me.children(recursive=True)), threading.active_count(), descriptors


def wait_until(done, seconds=20):
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert done()


# ---------------------------------------------------------------- results


def identify(offset):
    x = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x, os.environ["RANK"], os.environ["WORLD_SIZE"]


def test_results_come_back_by_rank():
    total = torch.tensor(10.0 + 11 + 12)
    assert launch(identify, 3, 10, backend="gloo") == [(rank, 3, total, str(rank), "3") for rank in range(3)]


def test_what_a_notebook_defines_travels_and_its_environment_of_now(monkeypatch):
    class Seen:
        def __init__(self, data, *now):
            self.data, self.now = data, now

    big = torch.arange(2_000_000)

    def work(factor):
        os.kill(os.getpid(), signal.SIGINT)  # an interrupt of the terminal is not for the ranks
        time.sleep(0.01)  # Python acts on a signal between two operations
        variables = [os.environ.get(name) for name in ("COURSE_LAUNCH_TEST", "PATH", "GLOO_SOCKET_IFNAME")]
        settings = torch.get_num_threads(), dist.get_debug_level().name, os.getcwd(), dist.get_backend()
        return Seen(big * factor, *variables, *settings)

    monkeypatch.setenv("COURSE_LAUNCH_TEST", "now")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    monkeypatch.delenv("PATH")  # which the server that ranks are forked from still has
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    for seen in launch(work, 2, 3):
        assert isinstance(seen, Seen)
        assert torch.equal(seen.data, big * 3)
        assert seen.now == ("now", None, loopback, 1, "INFO", os.getcwd(), default_backend(2))
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_output_comes_back_in_order_of_ranks_without_noise(capsys):
    def speak():
        print("a line of", dist.get_rank(), "\udcff")
        dist.barrier()
        below = ctypes.CDLL(None).printf if os.name == "posix" else functools.partial(os.write, 1)
        below(b"from below\xff\n")
        dist.reduce_scatter_tensor(torch.empty(1), torch.ones(2))  # of which some releases of torch warn
        os.write(2, b"[rank0]:[E1121 21:52:45.53 ProcessGroupGloo.cpp:69] what is in the report\n")
        warnings.warn("another", FutureWarning, stacklevel=1)

    launch(speak, 2, backend="gloo")
    out, err = capsys.readouterr()
    lines = [f"[rank {rank}] {text}" for rank in range(2) for text in (f"a line of {rank} ?", "from below\ufffd")]
    assert out.splitlines() == lines
    assert err.count("FutureWarning: another") == 2
    assert "_tensor" not in err
    assert "ProcessGroupGloo" not in err


def test_impossible_wishes_are_refused():
    with pytest.raises(ValueError, match="world_size must be at least 1, not 0"):
        launch(os.getpid, 0)
    with pytest.raises(ValueError, match="timeout must be positive"):
        launch(os.getpid, 1, timeout=0)
    with pytest.raises(ValueError, match="no backend 'cpu:gloo,cuda:morse'"):
        launch(os.getpid, 1, backend="cpu:gloo,cuda:morse")


def test_ranks_that_never_start_are_named(monkeypatch):
    monkeypatch.setattr("shared.launcher._START_LIMIT", 0)
    with pytest.raises(LaunchError, match=r"^ranks 0 and 1 did not finish within 0 s\n  rank 0 is starting") as failure:
        launch(os.getpid, 2, backend="gloo")
    assert failure.value.ranks == [0, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_each_gpu_and_its_cpu():
    def both():
        x, y = torch.ones(8, device="cuda"), torch.ones(8)
        dist.all_reduce(x)
        dist.all_reduce(y)
        return x.device.index, float(x.sum()), float(y.sum())

    count = torch.cuda.device_count()
    assert launch(both, count, timeout=120) == [(rank, 8.0 * count, 8.0 * count) for rank in range(count)]


def test_the_default_backend_serves_both_devices_where_there_are_enough_gpus(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert default_backend(2) == "cpu:gloo,cuda:nccl"
    assert default_backend(3) == "gloo"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is the only way and the other tests use it")
def test_spawn_works_too(monkeypatch):
    monkeypatch.setattr("shared.launcher._context", lambda: mp.get_context("spawn"))
    assert launch(identify, 1, 0, backend="gloo")[0][:2] == (0, 1)  # the rank imports PyTorch, for seconds


# ---------------------------------------------------------------- faults


def faulty(fault, call):
    print("last words of", dist.get_rank(), end="")
    dist.barrier()
    if dist.get_rank() == 1:
        fault()
    call(torch.ones(1))


@pytest.mark.parametrize(
    ("fault", "call", "says", "reason"),
    [
        (lambda: int("no number"), dist.all_reduce, "raised ValueError: invalid literal", "raised"),
        (lambda: os.write(2, b"bad luck\n") and os._exit(0), lambda x: dist.recv(x, 1),
         r"ended without returning \(exit code 0\): bad luck", "died"),
        (kill_here, lambda x: dist.barrier(), "was killed by SIGKILL|^rank 1 ended without returning", "died"),
    ],
    ids=["raises", "exits", "is killed"],
)  # fmt: skip
def test_a_rank_that_fails_is_named_at_once(capsys, fault, call, says, reason):
    start = time.monotonic()
    with pytest.raises(LaunchError, match=f"^rank 1 {says}") as failure:
        launch(faulty, 2, fault, call, backend="gloo", timeout=60)
    assert time.monotonic() - start < 10
    assert (failure.value.ranks, failure.value.reason) == ([1], reason)
    if reason == "raised":
        assert isinstance(failure.value.error, ValueError)
        assert "in faulty, line" in str(failure.value)
    assert capsys.readouterr().out == "[rank 0] last words of 0\n[rank 1] last words of 1\n"


def test_what_cannot_be_sent_is_named():
    class Broken(Exception):
        def __reduce__(self):
            return int, ("broken on the way",)

    def fail():
        raise Broken("still named")

    with pytest.raises(LaunchError, match="raised TypeError: what fn returned can't be sent"):
        launch(threading.Lock, 2, backend="gloo")
    with pytest.raises(LaunchError, match="raised Broken: still named") as failure:
        launch(fail, 2, backend="gloo")
    assert failure.value.error is None


@pytest.mark.skipif(sys.platform == "win32", reason="process groups of POSIX")
def test_a_rank_may_have_children_and_takes_them_with_it(tmp_path):
    def bear(fails):
        child = mp.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        (tmp_path / f"{dist.get_rank()}").write_text(str(child.pid))
        dist.barrier()
        if fails:
            raise ValueError

    for fails in (False, True):
        try:
            launch(bear, 2, fails, backend="gloo")
        except LaunchError:
            assert fails
        pids = [int((tmp_path / f"{rank}").read_text()) for rank in range(2)]
        wait_until(lambda pids=pids: not any(map(psutil.pid_exists, pids)))


def test_a_report_finds_the_lines_of_a_cell():
    cell = "/tmp/ipykernel_1/cell.py"  # in no file, as in a notebook
    linecache.cache[cell] = (0, None, ["def faulty():\n", "    raise ValueError(5)\n"], cell)
    namespace = {"__name__": "__main__"}
    exec(compile("".join(linecache.cache[cell][2]), cell, "exec"), namespace)
    with pytest.raises(LaunchError, match=r"in faulty, line 2: raise ValueError\(5\)"):
        launch(namespace["faulty"], 1, backend="gloo")


# ---------------------------------------------------------------- standing still


def sleep_for_ever():
    time.sleep(3600)


def deaf():
    """Asked where it is, it doesn't say."""
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    sleep_for_ever()


def end_as_nccl_does():
    os.write(2, b"Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)\nterminate called")
    os.abort()


STANDSTILLS = [
    (2, lambda: dist.barrier() if dist.get_rank() == 0 else sleep_for_ever(), [1], "hung",
     "^rank 1 did not arrive within 2 s; rank 0 waited"),
    (2, deaf, [0, 1], "hung", "^ranks 0 and 1 did not finish within 2 s"),
    (2, lambda: sleep_for_ever() if dist.get_rank() else end_as_nccl_does(), [1], "hung", "rank 1 did not arrive"),
    (3, lambda: dist.get_rank() == 2 or dist.barrier(), [2], "hung", "rank 2 had already returned"),
    (2, lambda: dist.send(torch.ones(1), 1 - dist.get_rank()), [0, 1], "deadlock",
     r"^deadlock: ranks 0 and 1 (.*\n)*.*waits in send .*\n.*waits in send "),
]  # fmt: skip


def test_who_keeps_the_others_waiting_is_named_within_the_time_out():
    """All at once, so that the time-outs pass together."""

    def stand_still(case):
        size, function, ranks, reason, message = case
        start = time.monotonic()
        with pytest.raises(LaunchError, match=message) as failure:
            launch(function, size, backend="gloo", timeout=2)
        assert (failure.value.ranks, failure.value.reason) == (ranks, reason)
        assert time.monotonic() - start < 20
        return str(failure.value)

    with ThreadPoolExecutor(len(STANDSTILLS)) as pool:
        report, *_ = pool.map(stand_still, STANDSTILLS)
    assert sys.platform == "win32" or "time.sleep(3600)" in report  # on Windows ranks can't be asked where they are


def test_a_collective_gives_up_before_the_launch_does():
    def wait_in_vain():
        try:
            return dist.get_rank() or dist.recv(torch.ones(1), 1)
        except RuntimeError:
            return "gave up"

    assert launch(wait_in_vain, 2, backend="gloo", timeout=4) == ["gave up", 1]


CALLS = {
    "send": lambda x, group: dist.send(x, 1, group),
    "recv": lambda x, group: dist.recv(x, 1, group),
    "broadcast": lambda x, group: dist.broadcast(x, 1, group),
    "all_reduce": lambda x, group: dist.all_reduce(x, group=group),
    "reduce_scatter": lambda x, group: dist.reduce_scatter_tensor(torch.empty(1), x, group=group),
    "barrier": lambda x, group: dist.barrier(group),
    "wait": lambda x, group: dist.all_reduce(x, group=group, async_op=True).wait(),
}


def witness(how):
    """What rank 0 sees, in each call, of a rank 1 that has left the group or never comes."""
    groups = [dist.new_group(timeout=timedelta(seconds=1 if how == "late" else 30)) for _ in CALLS]
    dist.barrier()
    while dist.get_rank() == 1 and how == "lost" and groups:
        dist.destroy_process_group(groups.pop())
    dist.barrier()

    def see(call, group):
        try:
            call(torch.ones(2), group)
        except RuntimeError as error:
            return rank_failures.describe(error)

    seen = None
    if dist.get_rank() == 0:
        with ThreadPoolExecutor(len(CALLS)) as pool:
            seen = list(pool.map(see, CALLS.values(), groups))
    dist.barrier()
    return seen


@pytest.mark.parametrize("how", ["lost", "late"])
def test_what_pytorch_says_for_want_of_another_rank_is_understood(how):
    seen = launch(witness, 2, how, backend="gloo", timeout=60)[0]
    assert {name: failure.kind for name, failure in zip(CALLS, seen, strict=True)} == dict.fromkeys(CALLS, how)
    for name, failure in zip(CALLS, seen, strict=True):
        waiting = rank_failures.Standing(0, "failed", failure)
        report = str(rank_failures.stood_still([waiting, rank_failures.Standing(1, "running")], 1))
        assert report.startswith("rank 1 did not arrive within 1 s; rank 0 waited"), name
        assert f"rank 0 waits in {name}" in report


# ---------------------------------------------------------------- from the first launch to the kernel's end

SCRIPT = """
import os, psutil, signal, sys, time, torch, torch.distributed as dist
from pathlib import Path
from shared import launch, prepare_launch

def work(folder, name):
    (Path(folder) / f"{dist.get_rank()}.tmp").write_text(f"{os.getpid()} {os.getppid()} {torch.cuda._is_in_bad_fork()}")
    os.rename(Path(folder) / f"{dist.get_rank()}.tmp", Path(folder) / f"{name}{dist.get_rank()}")
    time.sleep(600)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs beside it
prepare_launch()
(Path(sys.argv[1]) / "servers").write_text(" ".join(str(child.pid) for child in psutil.Process().children()))
try:
    launch(work, 2, sys.argv[1], "first", backend="gloo", timeout=300)
except KeyboardInterrupt:
    launch(work, 2, sys.argv[1], "second", backend="gloo", timeout=300)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_script_s_ranks_come_from_the_prepared_server_and_end_with_it(tmp_path):
    """By an interrupt or a killed kernel. With a CUDA toolkit in sight an import can initialise CUDA; forked from there
    no rank could use a GPU."""
    (tmp_path / "toolkit").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)  # without a main guard, as in a notebook
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py", tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "CUDA_HOME": str(tmp_path / "toolkit")},
        start_new_session=True,
    )
    for name, end in (("first", signal.SIGINT), ("second", signal.SIGKILL)):  # Ctrl-C; a kernel that is killed
        files = [tmp_path / f"{name}{rank}" for rank in range(2)]
        wait_until(lambda files=files: all(file.exists() for file in files), 90)
        pids, parents, bad_forks = zip(*(file.read_text().split() for file in files), strict=True)
        assert set(bad_forks) == {"False"}, "the fork server asked for CUDA"
        if sys.platform == "linux":
            assert set(parents) <= set((tmp_path / "servers").read_text().split())
        process.send_signal(end)
        wait_until(lambda pids=pids: not any(psutil.pid_exists(int(pid)) for pid in pids))
    process.wait(10)
    wait_until(lambda: not list(tmp_path.glob("launch-*")))


class Late:
    """While it is unpacked, which takes two seconds in rank 1, a rank is still starting."""

    def __reduce__(self):
        return exec, ("import multiprocessing as mp, time\ntime.sleep(2 * ('1' in mp.current_process().name))",)


def test_the_time_begins_when_all_ranks_have_started():
    assert launch(lambda late: dist.barrier(), 2, Late(), timeout=0.8, backend="gloo") == [None, None]
