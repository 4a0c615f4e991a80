"""shared.launcher: results, faults in every collective, nothing left behind."""

import contextlib
import gc
import linecache
import multiprocessing as mp
import os
import platform
import signal
import subprocess
import sys
import tempfile
import textwrap
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
from shared.launcher import _environment, default_backend

pytestmark = pytest.mark.processes
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a notebook; and ranks need not import pytest
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def warm():
    """The fork server, the resource tracker and a GPU's driver run and may stay."""
    if torch.cuda.is_available():
        torch.cuda.init()
        torch.cuda.device_count()
    launch(os.getpid, 1, backend="gloo")


@pytest.fixture(autouse=True)
def nothing_left(warm):
    """Every test ends with the processes, threads, descriptors and temporary folders it began with."""
    before = _inventory()
    yield
    deadline = time.monotonic() + 5
    while (more := _more_than(before)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert not more


def _more_than(before):
    """What is there now and wasn't before: less is fine, since garbage of earlier tests may have been collected."""
    more = {}
    for what, now in _inventory().items():
        then = before[what]
        left = sorted(set(now) - set(then)) if isinstance(now, list) else max(0, now - then)
        if left:
            more[what] = left
    return more


def _inventory():
    me = psutil.Process()
    folders = sorted(path.name for path in Path(tempfile.gettempdir()).glob("launch-*") if _mine(path))
    ports = sorted(c.laddr.port for c in me.net_connections() if c.status == psutil.CONN_LISTEN)
    return {
        "children": sorted(child.pid for child in me.children(recursive=True)),
        "threads": threading.active_count(),
        "descriptors": me.num_fds() if hasattr(me, "num_fds") else 0,
        "folders": folders,
        "ports": ports,
    }


_OTHERS = {path.name for path in Path(tempfile.gettempdir()).glob("launch-*")}  # of other workers or older crashes
_STARTED = time.time()


def _mine(folder: Path) -> bool:
    """Other processes launch too: what a living one has is its own, and what a dead one left is swept soon."""
    owner = folder.name.split("-")[-2]
    pid = int(owner) if owner.isdigit() else 0
    if folder.name in _OTHERS or (pid != os.getpid() and psutil.pid_exists(pid)):
        return False
    try:
        return pid == os.getpid() or time.time() - folder.stat().st_mtime > 20
    except OSError:
        return False


# ---------------------------------------------------------------- results


def identify(offset):
    x = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x, os.environ["RANK"], os.environ["WORLD_SIZE"]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_results_come_back_by_rank(size):
    results = launch(identify, size, 10, backend="gloo")
    total = float(sum(range(10, 10 + size)))
    assert results == [(rank, size, torch.tensor(total), str(rank), str(size)) for rank in range(size)]


def test_closures_local_classes_and_large_results():
    class Pair:
        def __init__(self, a, b):
            self.a, self.b = a, b

    big = torch.arange(2_000_000)

    def work(factor):
        return Pair(dist.get_rank(), big * factor)

    for rank, pair in enumerate(launch(work, 2, 3, backend="gloo")):
        assert isinstance(pair, Pair)
        assert pair.a == rank
        assert torch.equal(pair.b, big * 3)


def test_a_function_of_a_module_and_a_lambda():
    assert launch(dist.get_rank, 3, backend="gloo") == [0, 1, 2]
    assert launch(lambda: dist.get_backend(), 2) == [default_backend(2)] * 2


def test_the_environment_of_now_reaches_the_ranks(monkeypatch):
    monkeypatch.setenv("COURSE_LAUNCH_TEST", "now")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    seen = launch(lambda: (os.environ["COURSE_LAUNCH_TEST"], torch.get_num_threads(), os.getcwd()), 2, backend="gloo")
    assert seen == [("now", 1, os.getcwd())] * 2
    assert os.environ["OMP_NUM_THREADS"] == "7"
    monkeypatch.delenv("PATH")  # which the server that ranks are forked from still has
    assert launch(lambda: os.environ.get("PATH"), 2, backend="gloo") == [None, None]


def test_output_comes_back_in_order_of_ranks(capsys):
    def speak():
        for i in range(3):
            print("line", i, "of", dist.get_rank())
            dist.barrier()
        os.write(1, b"from below\n")
        print("warning", file=sys.stderr)

    launch(speak, 3, backend="gloo")
    out, err = capsys.readouterr()
    lines = [f"[rank {r}] {text}" for r in range(3) for text in (*(f"line {i} of {r}" for i in range(3)), "from below")]
    assert out.splitlines() == lines
    assert err.splitlines() == [f"[rank {r}] warning" for r in range(3)]


def collects():
    for _ in range(2):
        dist.reduce_scatter_tensor(torch.empty(1), torch.ones(2))
        dist.all_gather_into_tensor(torch.empty(2), torch.ones(1))
    warnings.warn("another", FutureWarning, stacklevel=1)


def test_no_torch_warns_of_two_collectives_and_other_warnings_are_shown(capsys):
    launch(collects, 2, backend="gloo", timeout=60)
    err = capsys.readouterr().err
    assert "FutureWarning: another" in err
    assert "_tensor" not in err


def test_output_before_a_failure_is_shown(capsys):
    def speak():
        print("last words of", dist.get_rank(), end="")
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
        dist.barrier()

    with pytest.raises(LaunchError):
        launch(speak, 2, backend="gloo")
    assert capsys.readouterr() == ("[rank 0] last words of 0\n[rank 1] last words of 1\n", "")


def test_bad_arguments():
    with pytest.raises(ValueError, match="world_size"):
        launch(os.getpid, 0)
    with pytest.raises(ValueError, match="timeout"):
        launch(os.getpid, 1, timeout=0)
    with pytest.raises(ValueError, match="no backend 'morse'"):
        launch(os.getpid, 1, backend="morse")


def test_ranks_can_have_children_of_their_own():
    def load():
        data = torch.utils.data.TensorDataset(torch.arange(6))
        loader = torch.utils.data.DataLoader(data, batch_size=3, num_workers=1)
        return [int(batch[0].sum()) for batch in loader]

    assert launch(load, 2, backend="gloo") == [[3, 12]] * 2


# ---------------------------------------------------------------- faults, in every collective

CALLS = {
    "send": lambda x: dist.send(x, 1) if dist.get_rank() == 0 else dist.barrier(),
    "recv": lambda x: dist.recv(x, 1) if dist.get_rank() == 0 else dist.barrier(),
    "broadcast": lambda x: dist.broadcast(x, 1),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_reduce": dist.all_reduce,
    "all_gather": lambda x: dist.all_gather([torch.empty_like(x) for _ in range(2)], x),
    "reduce_scatter": lambda x: dist.reduce_scatter_tensor(torch.empty(1), x),
    "all_to_all": lambda x: dist.all_to_all_single(torch.empty_like(x), x),
    "barrier": lambda x: dist.barrier(),
    "wait": lambda x: dist.all_reduce(x, async_op=True).wait(),
}


def faulty(call, fault):
    if dist.get_rank() == 1:
        if fault == "raise":
            raise ValueError("on purpose")
        if fault == "exit":
            os._exit(7)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # for ever
            time.sleep(3600)
    call(torch.ones(2))
    return "done"


@pytest.mark.parametrize(("fault", "says"), [("raise", "raised ValueError"), ("exit", "code 7"), ("kill", "SIGKILL")])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_a_rank_that_fails_is_named_at_once(name, fault, says):
    start = time.monotonic()
    with pytest.raises(LaunchError, match=rf"^rank 1 .*{says}") as failure:
        launch(faulty, 2, CALLS[name], fault, backend="gloo", timeout=60)
    assert time.monotonic() - start < 10
    assert failure.value.ranks == [1]
    assert failure.value.reason == ("raised" if fault == "raise" else "died")
    if fault == "raise":
        assert isinstance(failure.value.error, ValueError)
        assert "in faulty, line" in str(failure.value)


def test_a_rank_that_sleeps_is_named_within_the_time_out():
    """In every collective; all at once, so that the time-outs pass together."""

    def hang(name):
        start = time.monotonic()
        with pytest.raises(LaunchError, match=r"^rank 1 did not arrive within 2 s; ") as failure:
            launch(faulty, 2, CALLS[name], "sleep", backend="gloo", timeout=2)
        assert failure.value.ranks == [1]
        assert failure.value.reason == "hung"
        if hasattr(signal, "SIGUSR1"):
            assert "time.sleep(3600)" in str(failure.value)  # where it stands
        return time.monotonic() - start

    with ThreadPoolExecutor(5) as pool:
        assert max(pool.map(hang, CALLS)) < 10


def test_a_computation_that_takes_too_long():
    with pytest.raises(LaunchError, match="ranks 0 and 1 did not finish within 1 s") as failure:
        launch(lambda: time.sleep(3600), 2, backend="gloo", timeout=1)
    assert failure.value.ranks == [0, 1]


def test_a_rank_that_returned_early_is_named():
    with pytest.raises(LaunchError, match="rank 2 had already returned") as failure:
        launch(lambda: dist.get_rank() == 2 or dist.barrier(), 3, backend="gloo", timeout=2)
    assert failure.value.ranks == [2]


def test_a_deadlock_names_every_rank_and_line():
    def both_send():
        dist.send(torch.ones(1), 1 - dist.get_rank())

    with pytest.raises(LaunchError, match="deadlock: ranks 0 and 1") as failure:
        launch(both_send, 2, backend="gloo", timeout=2)
    assert failure.value.reason == "deadlock"
    assert str(failure.value).count("waits in send") == 2


def test_a_time_out_of_the_users_own_is_an_exception_like_any_other():
    def work():
        if dist.get_rank() == 1:
            raise RuntimeError("the request timed out")
        time.sleep(3600)

    with pytest.raises(LaunchError, match=r"^rank 1 raised RuntimeError: the request timed out"):
        launch(work, 2, backend="gloo", timeout=60)


def test_the_first_failure_is_the_cause():
    def fail_in_turn():
        if dist.get_rank() == 2:
            raise KeyError("first")
        try:
            dist.barrier()
        except RuntimeError:
            raise ValueError("second") from None

    with pytest.raises(LaunchError, match=r"^rank 2 raised KeyError: 'first'"):
        launch(fail_in_turn, 3, backend="gloo", timeout=20)


@pytest.mark.parametrize("leave", [sys.exit, os._exit])
def test_leaving_is_a_failure_even_with_code_zero(leave):
    with pytest.raises(LaunchError, match=r"^rank 0 (left by sys.exit|ended without returning \(exit code 0\))"):
        launch(lambda: leave(0) if dist.get_rank() == 0 else dist.barrier(), 2, backend="gloo")


def test_a_result_that_cannot_be_sent_and_an_error_that_cannot():
    class Stubborn(Exception):
        def __reduce__(self):
            raise TypeError("no")

    def raise_it():
        raise Stubborn("still named")

    with pytest.raises(LaunchError, match="can't be sent"):
        launch(threading.Lock, 2, backend="gloo")
    with pytest.raises(LaunchError, match="Stubborn: still named") as failure:
        launch(raise_it, 2, backend="gloo")
    assert failure.value.error is None


@pytest.mark.skipif(sys.platform == "win32", reason="process groups of POSIX")
@pytest.mark.parametrize("fails", [True, False])
def test_a_rank_takes_its_children_with_it(tmp_path, fails):
    def spawn():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (tmp_path / f"pid{dist.get_rank()}").write_text(str(child.pid))
        dist.barrier()
        if fails:
            raise ValueError

    with pytest.raises(LaunchError) if fails else contextlib.nullcontext():
        launch(spawn, 2, backend="gloo")
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(psutil.pid_exists, pids))


def test_a_result_that_cannot_be_received_names_its_rank():
    class Fragile:
        def __setstate__(self, state):
            if os.getpid() == parent:
                raise ValueError("broken on the way")

        def __getstate__(self):
            return {"a": 1}

    parent = os.getpid()
    with pytest.raises(LaunchError, match=r"^rank 1 returned something that can't be received.*broken on") as failure:
        launch(lambda: dist.get_rank() and Fragile(), 2, backend="gloo")
    assert failure.value.ranks == [1]


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="signals of POSIX")
def test_a_stopped_rank_is_said_to_be_stopped():
    def stop():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    with pytest.raises(LaunchError, match="rank 1 did not arrive") as failure:
        launch(stop, 2, backend="gloo", timeout=2)
    assert "rank 1 is stopped" in str(failure.value)


def test_an_interrupt_of_the_terminal_does_not_reach_the_ranks():
    def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # Python acts on a signal between two operations
        return "went on"

    assert launch(interrupted, 2, backend="gloo") == ["went on"] * 2


# ---------------------------------------------------------------- what PyTorch says, in its own words


def witness(call, how, done):
    """What rank 0 sees of a rank 1 that leaves the group or never comes: the kind of its failure."""
    here, left = done.with_suffix(".here"), done.with_suffix(".left")
    if dist.get_rank() == 1:
        while not here.exists():  # or rank 0, still about to connect, couldn't
            time.sleep(0.01)
        if how == "lost":
            dist.destroy_process_group()
        left.touch()
        while not done.exists():
            time.sleep(0.01)
        return None
    here.touch()
    while not left.exists():  # a small send to who is still there succeeds
        time.sleep(0.01)
    try:
        call(torch.ones(2))
    except RuntimeError as error:
        return rank_failures.describe(error).kind, str(error)
    finally:
        done.touch()


@pytest.mark.parametrize("how", ["lost", pytest.param("late", marks=pytest.mark.slow)])
def test_failures_for_want_of_another_rank_are_recognised(how, tmp_path):
    """In every collective; at once, so that the time-outs pass together."""
    calls = {name: call for name, call in CALLS.items() if name != "broadcast"}  # which rank 0 has not to wait for
    calls |= {"send": lambda x: dist.send(x, 1), "recv": lambda x: dist.recv(x, 1)}

    def see(name):
        patience = 3 if how == "late" else 30  # nobody waits for who has left, and five launches at once take a while
        return launch(witness, 2, calls[name], how, tmp_path / name, backend="gloo", timeout=patience)[0]

    with ThreadPoolExecutor(5) as pool:
        for name, seen in zip(calls, pool.map(see, calls), strict=True):
            assert seen is not None, name
            assert seen[0] == how, (name, seen)


@pytest.mark.skipif(sys.platform != "linux", reason="reads a file descriptor's name")
def test_what_gloo_logs_is_not_shown_twice(capfd, tmp_path):
    def wait_for_the_other():
        if dist.get_rank() == 1:
            while not (tmp_path / "done").exists():
                time.sleep(0.01)
            return None
        with contextlib.suppress(RuntimeError):
            dist.monitored_barrier(timeout=timedelta(seconds=1))
        logged = Path(os.readlink("/proc/self/fd/2")).read_text()
        (tmp_path / "done").touch()
        return logged

    logged = launch(wait_for_the_other, 2, backend="gloo")[0]
    assert "ProcessGroupGloo.cpp" in logged, "gloo does log it"
    assert "ProcessGroupGloo" not in "".join(capfd.readouterr())


@pytest.mark.skipif(sys.platform == "win32", reason="processes of POSIX")
def test_folders_of_killed_kernels_are_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait(60)
    prefix = f"launch-{platform.node()}-"
    left, living, other = f"{prefix}{gone.pid}-abc", f"{prefix}{os.getpid()}-def", f"launch-elsewhere-{gone.pid}-ghi"
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as kernel:
        neighbour = f"{prefix}{kernel.pid}-jkl"  # another notebook's
        for name in (left, living, other, neighbour):
            (tmp_path / name).mkdir()
            (tmp_path / name / "call").touch()
        launch(os.getpid, 1, backend="gloo")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([living, other, neighbour])


# ---------------------------------------------------------------- again and again


def test_a_dozen_launches_leave_nothing():
    before = None
    for i in range(12):
        if i % 4 == 3:
            with pytest.raises(LaunchError):
                launch(faulty, 2, dist.all_reduce, "exit", backend="gloo")
        else:
            assert launch(dist.get_rank, 2, backend="gloo") == [0, 1]
        if i == 2:
            gc.collect()
            before = _inventory()
    gc.collect()
    assert not _more_than(before)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks are spawned")
def test_ranks_come_from_a_server_that_has_imported_pytorch_already():
    def parent():
        process = psutil.Process(os.getppid())
        return process.pid, "libtorch_python" in Path(f"/proc/{process.pid}/maps").read_text()

    servers = {*launch(parent, 2, backend="gloo"), *launch(parent, 2, backend="gloo")}
    assert len(servers) == 1, "one server for all launches"
    pid, imported = servers.pop()
    assert pid != os.getpid()
    assert imported


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks are spawned")
def test_a_prepared_launch_finds_the_server_there(tmp_path):
    """In a process of its own: here the server runs already."""
    script = tmp_path / "prepared.py"
    script.write_text(
        "import os, psutil\n"
        "from shared import launch, prepare_launch\n"
        "prepare_launch()\n"
        "before = {child.pid for child in psutil.Process().children()}\n"
        "prepare_launch()\n"
        "assert {child.pid for child in psutil.Process().children()} == before\n"
        "servers = launch(os.getppid, 2, backend='gloo')\n"
        "assert set(servers) <= before, (servers, before)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], env=env, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_an_interrupt_or_a_killed_kernel_ends_all_ranks(tmp_path):
    """And, in the same process: with a CUDA toolkit in sight an import can initialise CUDA; forked from there no rank
    could use a GPU."""
    (tmp_path / "toolkit").mkdir()
    script = tmp_path / "script.py"  # without a main guard, as in a notebook
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, sys, time, torch, torch.distributed as dist
            from pathlib import Path
            from shared import launch

            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs beside it

            def work(folder, name):
                (Path(folder) / f"{dist.get_rank()}.tmp").write_text(f"{os.getpid()} {torch.cuda._is_in_bad_fork()}")
                os.rename(Path(folder) / f"{dist.get_rank()}.tmp", Path(folder) / f"{name}{dist.get_rank()}")
                time.sleep(600)

            try:
                launch(work, 2, sys.argv[1], "first", backend="gloo", timeout=300)
            except KeyboardInterrupt:
                launch(work, 2, sys.argv[1], "second", backend="gloo", timeout=300)
            """
        )
    )
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path), "CUDA_HOME": str(tmp_path / "toolkit")},
        start_new_session=True,
    )
    for name, end in (("first", signal.SIGINT), ("second", signal.SIGKILL)):  # Ctrl-C; a kernel that is killed
        said = _appear(tmp_path / f"{name}0", tmp_path / f"{name}1")
        assert all(bad_fork == "False" for _, bad_fork in said), "the fork server asked for CUDA"
        pids = [int(pid) for pid, _ in said]
        process.send_signal(end)
        deadline = time.monotonic() + 20
        while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(psutil.pid_exists(pid) for pid in pids)
    process.wait(10)
    assert not list(tmp_path.glob("launch-*"))


def _appear(*files: Path) -> list[list[str]]:
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [file.read_text().split() for file in files]


def test_variables_may_come_and_go_while_a_launch_takes_them(monkeypatch):
    done = threading.Event()

    def change():
        while not done.is_set():
            os.environ["COMES_AND_GOES"] = "1"
            del os.environ["COMES_AND_GOES"]

    monkeypatch.setenv("STAYS", "yes")
    interval = sys.getswitchinterval()
    thread = threading.Thread(target=change)
    thread.start()
    try:
        sys.setswitchinterval(1e-6)
        assert all(_environment()["STAYS"] == "yes" for _ in range(500))
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join(60)


def test_launching_from_a_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(launch(dist.get_rank, 2, backend="gloo")))
    thread.start()
    thread.join(60)
    assert results == [[0, 1]]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is the only way and the other tests use it")
def test_spawn_works_too(monkeypatch):
    monkeypatch.setattr("shared.launcher._context", lambda: mp.get_context("spawn"))
    assert [r[0] for r in launch(identify, 1, 0, backend="gloo")] == [0]  # each rank imports PyTorch, for seconds
    with pytest.raises(LaunchError, match="rank 0 raised ValueError"):
        launch(int, 1, "no number", backend="gloo")


def test_a_report_finds_the_lines_of_a_cell():
    cell = "/tmp/ipykernel_1/cell.py"  # in no file, as in a notebook
    linecache.cache[cell] = (0, None, ["def faulty():\n", "    raise ValueError(5)\n"], cell)
    namespace = {"__name__": "__main__"}
    exec(compile("".join(linecache.cache[cell][2]), cell, "exec"), namespace)
    with pytest.raises(LaunchError, match=r"in faulty, line 2: raise ValueError\(5\)"):
        launch(namespace["faulty"], 1, backend="gloo")


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


def test_a_backend_for_each_device():
    assert launch(identify, 2, 0, backend="cpu:gloo")[1][:3] == (1, 2, torch.tensor(1.0))
    with pytest.raises(ValueError, match="no backend 'cpu:gloo,cuda:morse'"):
        launch(os.getpid, 1, backend="cpu:gloo,cuda:morse")
