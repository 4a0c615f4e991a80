"""shared.rank_failures: who is to blame, from what is known about the ranks; no process is started."""

import contextlib
from pathlib import Path

import pytest
import torch

from shared.rank_failures import Failure, LaunchError, Standing, describe, failed, stood_still

ALL_REDUCE = (f"{torch.__path__[0]}/distributed/distributed_c10d.py", 1, "all_reduce")
MINE = (f"{Path(contextlib.__file__).parent}/site-packages/work.py", 7, "step")


def test_exceptions_are_told_apart():
    cases = {
        RuntimeError("the request timed out"): ("raised", "raised RuntimeError: the request timed out"),
        ConnectionError("closed by peer"): ("raised", "raised ConnectionError: closed by peer"),  # the user's own
        RuntimeError("[rank0]:[E1121 21:52:45.53 Gloo.cpp:69] no"): ("raised", "raised RuntimeError: Gloo.cpp: no"),
    }
    for error, wanted in cases.items():
        with pytest.raises(type(error)) as caught:
            raise error
        failure = describe(caught.value)
        assert (failure.kind, failure.text) == wanted
        assert error.__traceback__ is None, "frames would keep tensors alive"


def test_witnesses_are_not_blamed():
    ranks = [
        Standing(0, "failed", Failure("lost", "raised RuntimeError: closed", 1.0)),
        Standing(1, "failed", Failure("raised", "raised ValueError: no", 3.0)),
        Standing(2, "died", Failure("died", "was killed by SIGKILL", 2.0)),
        Standing(3, "returned"),
        Standing(4, "died", Failure("died", "was killed by SIGKILL", 2.5)),
    ]
    error = failed(ranks)
    assert error.ranks == [2, 4, 1], "in the order of the failures"
    assert error.reason == "died"
    assert str(error).splitlines() == [
        "rank 2 was killed by SIGKILL",
        "rank 4 did the same",
        "then rank 1 raised ValueError: no",
        "as a consequence rank 0 lost the connection",
    ]
    error = failed(ranks[:1])  # nobody else is to blame
    assert (error.ranks, error.reason, str(error)) == ([0], "raised", "rank 0 raised RuntimeError: closed")


def test_where_each_rank_stands():
    waits = Standing(0, "running", frames=[MINE, ALL_REDUCE])
    late = Standing(1, "failed", Failure("late", "raised RuntimeError: Timed out", 1.0, [MINE, ALL_REDUCE]))
    busy, silent, back = Standing(2, "running", frames=[MINE]), Standing(3, "running"), Standing(4, "returned")
    error = stood_still([waits, late, busy, silent, back], 2.5)
    assert (error.ranks, error.reason) == ([2, 3], "hung")
    assert str(error).splitlines() == [
        "ranks 2 and 3 did not arrive within 2.5 s; ranks 0, 1 and 4 waited",
        "  rank 0 waits in all_reduce in step, line 7 of work.py",
        "  rank 1 waits in all_reduce in step, line 7 of work.py",
        "  rank 2 is in step, line 7 of work.py",
        "  rank 3 is running",
        "  rank 4 has returned",
    ]


def test_a_recursion_is_shown_in_short():
    frames = [(MINE[0], line, "step") for line in range(1000)]
    lines = str(failed([Standing(0, "failed", Failure("raised", "raised RecursionError", 1.0, frames))])).splitlines()
    assert (len(lines), lines[-1]) == (17, "  in step, line 999 of work.py")


def test_jupyter_shows_the_message_and_no_frames_of_the_launcher(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.user_ns["error"] = LaunchError("rank 1 raised ValueError: no\n  in work, line 2", [1], "raised")
    assert not shell.run_cell("raise error").success
    assert capsys.readouterr().out.strip() == "LaunchError: rank 1 raised ValueError: no\n  in work, line 2"
