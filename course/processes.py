"""Starting other programs: how many, their share of the cores, their exit status, and being asked to end."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from course.environment import ROOT, end_of

PATIENCE = 15.0  # seconds that a program has to end when it is asked to


def positive(text: str) -> int:
    """The `type` of an option such as --jobs or --timeout: a whole number above zero."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def share_of_cores(at_once: int) -> dict[str, str]:
    """Environment variables that let each of `at_once` PyTorch processes get on beside the others.

    Without them each takes all cores, and its threads spin while they wait for each other, which keeps the others from
    the cores. On two cores 15-03 took 63 s alone, beside another PyTorch program 91 s if both wait passively, and else
    it wasn't through after 240 s. What the user has set stays.
    """
    settings = {"OMP_WAIT_POLICY": "PASSIVE"}
    if at_once > 1:
        settings["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // at_once))
    return {name: value for name, value in settings.items() if name not in os.environ}


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
