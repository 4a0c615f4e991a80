"""Code that nobody vouches for: what it may take, that it ends with all that it has started, what it can't reach."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from course import confined
from course.confined import Confined, Limits, Stopped, say

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it takes minutes")]

LIMITS = Limits(memory=2**30, processes=12, file_size=2**20)


@pytest.fixture(scope="module", autouse=True)
def prepared():
    """PyTorch is imported once for all processes of this module."""
    confined.prepare([], also=[__name__])


@pytest.fixture(params=["open", "sealed"])
def is_sealed(request):
    if request.param == "sealed" and (reason := confined.can_seal()):
        pytest.skip(f"processes can't be sealed here: {reason}")
    return request.param == "sealed"


def run(link, source):
    """Run code that may `tell` something, in a confined process."""
    exec(source, {"tell": lambda value: say(link, value), "link": link})


def outcome(source, is_sealed=False, seconds=60):
    """What the code tells, or why it was stopped. `seconds` count from where it begins."""
    try:
        with Confined(run, (f"tell(0)\n{source}",), LIMITS, is_sealed=is_sealed) as process:
            assert process.hear(confined.START_SECONDS) == 0
            return process.hear(seconds)
    except Stopped as error:
        return str(error)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os; os._exit(3)", "its process ended before there was a result (exit status 3)"),
        ("import ctypes; ctypes.string_at(0)", "its process ended before there was a result (exit status 139)"),
        ("link.send_bytes(b'{')", "it sent what is no result"),
        ("link.send_bytes(b'1' * 3_000_000)", "it sent what is no result"),
        ("import os, time; os.write(link.fileno(), b'\\0\\0\\0\\x09{'); time.sleep(60)", "it sent what is no result"),
        ("while True:\n  try:\n    while True: pass\n  except BaseException: pass", "it took more than 1 s"),
        ("tell(len(bytearray(3 << 30)))", "its process ended before there was a result (exit status 1)"),
        # 40 and no more, should nobody stop it
        (
            "import os, time\nfor _ in range(40):\n  if os.fork() == 0: break\ntime.sleep(60)",
            "it had started more than 12",
        ),
        (
            "import mmap, time; memory = mmap.mmap(-1, 1400 << 20)  # shared, so that no process owns it\n"
            "for page in range(0, len(memory), 4096): memory[page] = 1\ntime.sleep(60)",
            "it took more than 1 GiB of memory",
        ),
    ],
)
def test_whatever_it_does_there_is_an_answer_or_a_reason(source, reason, is_sealed):
    assert outcome(source, is_sealed, seconds=1 if "fileno" in source or "while" in source else 30).startswith(reason)


def test_what_it_writes_and_prints_goes_nowhere_and_is_limited(is_sealed, capfd):
    source = """
import os, tempfile, torch
os.write(1, b"noise" * 100_000)
def fails(sizes):
    try: [open(f"{number}", "wb").write(bytes(size)) for number, size in enumerate(sizes)]
    except OSError: return True
    return False
names = "HOME TMPDIR TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR".split()
places = {os.getcwd(), tempfile.gettempdir(), *map(os.environ.get, names)}
links = [name for name in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{name}").endswith("]")]
found = [fails([900_000] * 3), fails([2 << 20]), links == [f"{link.fileno()}"]]
tell([*places, dict(os.environ), found, torch.get_num_threads()])
"""
    place, environment, found, threads = outcome(source, is_sealed)
    assert found == [is_sealed, True, True], "many files, a large one, no pipe but its own"
    assert not Path(place).exists()
    assert "noise" not in "".join(capfd.readouterr())
    same = {"COURSE_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "COURSE_DATA": "sample", "MPLBACKEND": "agg"}
    assert (environment | same, threads) == (environment, 1), "the same verdict on every machine"


def test_what_all_processes_hold_counts_once(is_sealed):
    source = """
import os, time
for number in range(8):
    if os.fork() == 0: time.sleep(60)
time.sleep(0.5)
tell(1)
"""
    assert outcome(source, is_sealed) == 1


def test_time_counts_from_word_to_word_and_one_that_ends_while_we_look_is_no_fault(monkeypatch):
    def ended(process):
        raise psutil.NoSuchProcess(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_info", ended)
    with Confined(run, ("import time; tell(0); tell(1); time.sleep(3); tell(2)",), LIMITS) as process:
        assert [process.hear(seconds) for seconds in (confined.START_SECONDS, 0.5, 60)] == [0, 1, 2]


@pytest.mark.parametrize("end", ["tell(1)", "time.sleep(60)", "os._exit(1)"])
def test_nothing_is_left_even_of_what_hides(end, is_sealed):
    """A daemon in a session of its own, whose parent has ended."""
    mark = f"hold-{os.getpid()}-{time.monotonic_ns()}"
    source = f"""
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", {mark!r}], start_new_session=True)
    os._exit(0)
time.sleep(0.5)
{end}
"""
    outcome(source, is_sealed, seconds=2)
    left = [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]
    assert psutil.wait_procs(left, timeout=5)[1] == []


def test_nothing_goes_on_when_we_are_killed(is_sealed):
    source = f"""
from test_confined import *
work = "import os, time; tell(os.environ['COURSE_DATA']); time.sleep(600)"
with Confined(run, (work,), LIMITS, is_sealed={is_sealed}) as process:
    print(process.hear(confined.START_SECONDS), flush=True)
    process.hear(600)
"""
    command, tests = [sys.executable, "-c", source], Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": str(tests.parent), "COURSE_DATA": "full"}
    with subprocess.Popen(command, cwd=tests, env=env, stdout=subprocess.PIPE) as ours:
        said = ours.stdout.readline()
        family = psutil.Process(ours.pid).children(recursive=True)
        ours.kill()
    assert (said, len(family) > 3) == (b"sample\n", True), "whatever is set here"
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_a_sealed_process_changes_nothing_outside_and_reaches_nobody(tmp_path):
    if reason := confined.can_seal():
        pytest.skip(f"processes can't be sealed here: {reason}")
    (tmp_path / "mine").write_text("1")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        source = f"""
import ctypes, os, resource, signal, socket
def fails(call, *arguments):
    try: call(*arguments)
    except OSError: return True
    return False
libc = ctypes.CDLL(None, use_errno=True)
mine = {str(tmp_path / "mine")!r}
here = [int(name) for name in os.listdir("/proc") if name.isdigit()]
found = {{
    "write": fails(open, mine, "w"),
    "remove": fails(os.remove, mine),
    "new file": fails(open, mine + "2", "w"),
    "connect": fails(socket.create_connection, {server.getsockname()!r}, 1),
    "abroad": fails(socket.create_connection, ("192.0.2.1", 80), 1),
    "few processes": len(here) < 5,
    "signal": fails(os.kill, {os.getpid()}, 0) or {os.getpid()} in here,
    "mount": libc.mount(None, b"/", None, 32, None) == -1,
    "no program gives powers": libc.prctl(39, 0, 0, 0, 0) == 1,
    "threads": resource.getrlimit(resource.RLIMIT_NPROC)[0] == 4 * {LIMITS.processes},
    "unshare": libc.unshare(0x20000) == -1,
    "server that starts others": not any(os.listdir({confined.multiprocessing.util.get_temp_dir()!r})),
}}
with socket.socket() as a:
    a.bind(("127.0.0.1", 0)); a.listen()
    found["loopback"] = not fails(socket.create_connection, a.getsockname(), 1)
found["kill all"] = found["few processes"] and fails(os.kill, -1, signal.SIGTERM)
tell(found)
"""
        found = outcome(source, True)
    assert isinstance(found, dict), found
    assert [name for name, holds in found.items() if not holds] == []
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine").read_text() == "1"
