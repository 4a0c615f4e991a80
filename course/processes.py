"""Starting other programs: their share of the cores, their exit status, and being asked to end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from course.environment import ROOT, end_of

PATIENCE = 15.0  # seconds that a program has to end when it is asked to


def share_of_cores(at_once: int) -> dict[str, str]:
    """Environment variables that give each of `at_once` PyTorch processes its share of the cores.

    Without this each takes all cores, and threads that wait for each other by spinning slow all of them down: two
    runs of 15-01 at once on two cores took 204 s, with one thread each 31 s, and one alone 24 s. A number of threads
    that the user has set stays.
    """
    if at_once < 2 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // at_once))}


def subprocess_status(arguments: list[str], env: dict[str, str]) -> int:
    """Run a program in the foreground; Ctrl-C is for it to handle.

    If we are asked to end (SIGTERM), so is the program, and it is ended if that takes longer than PATIENCE: JupyterLab
    waits for ever for a kernel that was just starting.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    process = subprocess.Popen(arguments, cwd=ROOT, env=env)
    try:
        return end_of(process)
    finally:
        process.terminate()  # which does nothing to one that has ended
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()


@contextlib.contextmanager
def asked_to_end() -> Iterator[None]:
    """SIGTERM, a polite end asked for from outside, is treated like Ctrl-C: what was started is ended."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
