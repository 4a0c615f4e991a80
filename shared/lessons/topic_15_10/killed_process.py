"""Run a function in a process that is killed (SIGKILL) some time after it has begun, to see what survives."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from shared.launcher import launch
from shared.rank_failures import LaunchError

_KILL = getattr(signal, "SIGKILL", 0x10000)  # Windows: the exit code by which multiprocessing tells an ended process


def kill_here(seconds: float = 0.0) -> None:
    """Have this process killed after some seconds; at once if there are none."""
    if seconds <= 0:
        os.kill(os.getpid(), _KILL)
    elif sys.platform == "win32":
        timer = threading.Timer(seconds, os.kill, (os.getpid(), _KILL))
        timer.daemon = True
        timer.start()
    else:  # from outside, so that the moment does not depend on what this process does
        subprocess.Popen(["sh", "-c", f"sleep {seconds:.3f}; kill -9 {os.getpid()} 2>/dev/null"])


def _mortal(function: Callable[..., Any], seconds: float, *args: Any) -> Any:
    kill_here(seconds)
    return function(*args)


def launch_killed(function: Callable[..., Any], seconds: float, *args: Any, timeout: float = 60) -> Any:
    """Call function(*args) in a process of its own that is killed after `seconds`.

    Returns what the function returned if it was quicker, else None.

    Raises:
        LaunchError: the process ended in another way, by an exception for example.
    """
    try:
        return launch(_mortal, 1, function, max(seconds, 1e-3), *args, timeout=timeout)[0]
    except LaunchError as error:
        if not str(error).startswith("rank 0 was killed by "):  # a text of its own may say so, too
            raise
        return None
