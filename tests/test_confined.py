"""Code that nobody vouches for: what it may take, that it ends with all that it has started, what it can't reach."""

import os
import socket
import sys
import threading
import time
from pathlib import Path

import confined_work
import psutil
import pytest

from course import confined
from course.confined import Confined, Limits, Stopped

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it takes minutes")]

LIMITS = Limits(memory=2**30, processes=12, file_size=2**20, open_files=64)


@pytest.fixture(scope="module", autouse=True)
def prepared():
    """PyTorch is imported once for all processes of this module."""
    confined.prepare([], also=["confined_work"])


@pytest.fixture(params=["open", "sealed"])
def is_sealed(request):
    if request.param == "sealed" and (reason := confined.can_seal()):
        pytest.skip(f"processes can't be sealed here: {reason}")
    return request.param == "sealed"


def outcome(source, is_sealed=False, seconds=60, limits=LIMITS, **more):
    """What the code tells, or why it was stopped. `seconds` count from where it begins."""
    try:
        with Confined(confined_work.run, (f"tell(0)\n{source}",), limits, is_sealed=is_sealed, **more) as process:
            assert process.hear(confined.START_SECONDS) == 0
            return process.hear(seconds)
    except Stopped as error:
        return str(error)


def test_it_tells_what_json_knows_and_its_folder_is_gone_afterwards(is_sealed):
    source = (
        "import os; open('x', 'w').write('1'); os.mkdir('y'); tell([os.getcwd(), os.environ['HOME'], os.listdir()])"
    )
    here, home, names = outcome(source, is_sealed)
    assert (here == home, sorted(names)) == (True, ["x", "y"])
    assert not Path(here).exists()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os; os._exit(0)", "its process ended before there was a result"),
        ("import os; os._exit(3)", "its process ended with exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "its process was ended by SIGKILL"),
        ("import os; os.kill(os.getpid(), 15)", "its process was ended by SIGTERM"),
        ("import ctypes; ctypes.string_at(0)", "its process was ended by SIGSEGV"),
        ("import os; os.close(link.fileno())", "its process ended with exit status 1"),
        ("raise SystemExit(2)", "its process ended with exit status 2"),
        ("import os; os.fork() or __import__('time').sleep(60); os._exit(4)", "its process ended with exit status 4"),
        ("link.send_bytes(b'{')", "it sent what is no result"),
        ("link.send_bytes(b'[' * 100_000)", "it sent what is no result"),
        ("link.send_bytes(b'1' * 3_000_000)", "it sent what is no result"),
        ("import os, time; os.write(link.fileno(), b'\\0\\0\\0\\x09{'); time.sleep(60)", "it sent what is no result"),
        ("import time; time.sleep(60)", "it took more than 1 s"),
        ("while True:\n  try:\n    while True: pass\n  except BaseException: pass", "it took more than 1 s"),
        ("tell(len(bytearray(3 << 30)))", "its process ended with exit status 1"),
        ("import resource as r; tell(r.getrlimit(r.RLIMIT_CORE)[1])", 0),
    ],
)
def test_whatever_it_does_there_is_an_answer_or_a_reason(source, reason, is_sealed):
    said = outcome(source, is_sealed, seconds=1 if "time" in source or "while" in source else 60)
    assert str(said).startswith(str(reason))


def test_files_and_open_files_are_limited(is_sealed):
    source = """
try: open("big", "wb").write(bytes(2 << 20))
except OSError as error: big = type(error).__name__
files = []
try:
    while True: files.append(open("/dev/null"))
except OSError as error: many = len(files)
tell([big, many])
"""
    big, many = outcome(source, is_sealed)
    assert big == "OSError"
    assert many < LIMITS.open_files


def test_memory_that_no_process_owns_counts(is_sealed):
    source = """
import mmap, os, time
memory = mmap.mmap(-1, 1400 << 20)  # shared
for page in range(0, len(memory), 1 << 20):
    memory[page : page + (1 << 20)] = bytes(1 << 20)
time.sleep(60)
"""
    assert outcome(source, is_sealed) == "it took more than 1 GiB of memory"


def test_a_fork_bomb_ends(is_sealed):
    # 40 and no more, should nobody stop it
    bomb = "import os, time\nfor _ in range(40):\n  if os.fork() == 0: time.sleep(60)\ntime.sleep(60)"
    start = time.monotonic()
    assert outcome(bomb, is_sealed) == "it had started more than 12 processes"
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("how", ["told", "hangs", "dies"])
def test_nothing_is_left_even_of_what_hides(how, is_sealed):
    """A daemon in a session of its own, whose parent has ended."""
    mark = f"hold-{os.getpid()}-{time.monotonic_ns()}"
    end = {"told": "tell(1)", "hangs": "time.sleep(60)", "dies": "os._exit(1)"}[how]
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


def test_a_sealed_process_changes_nothing_outside_and_reaches_nobody(tmp_path):
    if reason := confined.can_seal():
        pytest.skip(f"processes can't be sealed here: {reason}")
    (tmp_path / "mine").write_text("1")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        source = f"""
import ctypes, os, signal, socket
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
    "unshare": libc.unshare(0x20000) == -1,
    "unshare and mount": libc.unshare(0x10020000) == -1 or libc.mount(None, b"/", None, 32 | 4096, None) == -1,
    "server": not any(os.listdir({confined.multiprocessing.util.get_temp_dir()!r})),
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


def test_who_waits_can_be_interrupted():
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    assert outcome("import time; time.sleep(60)", stop=stop) == "it was interrupted"


def test_what_is_printed_goes_nowhere(capfd, is_sealed):
    source = "import os\nfor _ in range(500): os.write(1, bytes(100_000)); print('noise', flush=True)\ntell(1)"
    assert outcome(source, is_sealed) == 1
    assert "noise" not in "".join(capfd.readouterr())
