"""shared.rank_failures: who is to blame, from what is known about the ranks; no process is started."""

import pytest
import torch

from shared.rank_failures import Failure, LaunchError, Standing, culprits, describe, failed, parse_stack, stood_still

ALL_REDUCE = (f"{torch.__path__[0]}/distributed/distributed_c10d.py", 1, "all_reduce")
MINE = ("/home/me/work.py", 7, "step")


def raised(error: BaseException) -> Failure:
    try:
        raise error
    except BaseException as caught:
        return describe(caught)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("no"), "raised", "raised ValueError: no"),
        (ValueError(), "raised", "raised ValueError"),
        (SystemExit(3), "died", "left by sys.exit(3)"),
        (RuntimeError("Connection closed by peer [127.0.0.1]:8082"), "lost", None),
        (RuntimeError("Timed out waiting 1500ms for recv operation to complete"), "late", None),
        (RuntimeError("Wait timeout"), "late", None),
        (RuntimeError("the request timed out"), "raised", None),
        (ConnectionError("Connection closed by peer"), "raised", None),  # the user's own connection
        (
            RuntimeError("[rank0]:[E1121 21:52:45.53 ProcessGroupGloo.cpp:69] no"),
            "raised",
            "raised RuntimeError: ProcessGroupGloo.cpp: no",
        ),
    ],
)
def test_exceptions_are_told_apart(error, kind, text):
    failure = raised(error)
    assert failure.kind == kind
    assert text is None or failure.text == text
    assert failure.error is error
    assert error.__traceback__ is None, "frames would keep tensors alive"


def test_witnesses_are_not_blamed():
    ranks = [
        Standing(0, "failed", Failure("lost", "raised RuntimeError: closed", 1.0)),
        Standing(1, "failed", Failure("raised", "raised ValueError: no", 3.0)),
        Standing(2, "died", Failure("died", "was killed by SIGKILL", 2.0)),
        Standing(3, "returned"),
        Standing(4, "failed", Failure("raised", "raised ValueError: no", 4.0)),
        Standing(5, "died", Failure("died", "was killed by SIGKILL", 2.5)),
    ]
    assert [rank.number for rank in culprits(ranks)] == [1, 2, 4, 5]
    error = failed(ranks)
    assert error.ranks == [2, 5, 1, 4], "in the order of the failures"
    assert error.reason == "died"
    assert str(error).splitlines() == [
        "rank 2 was killed by SIGKILL",
        "rank 5 did the same",
        "then rank 1 raised ValueError: no",
        "then rank 4 raised ValueError: no",
        "as a consequence rank 0 lost the connection",
    ]


def test_without_a_culprit_who_lost_the_connection_is_named():
    error = failed([Standing(0, "failed", Failure("lost", "raised RuntimeError: closed", 1.0)), Standing(1, "running")])
    assert (error.ranks, error.reason, str(error)) == ([0], "raised", "rank 0 raised RuntimeError: closed")


def test_where_each_rank_stands():
    waits = Standing(0, "running", frames=[MINE, ALL_REDUCE])
    late = Standing(1, "failed", Failure("late", "raised RuntimeError: Timed out", 1.0, [MINE, ALL_REDUCE]))
    busy, stopped = Standing(2, "running", frames=[MINE]), Standing(3, "running", silence="is stopped (SIGSTOP)")
    back = Standing(4, "returned")

    error = stood_still([waits, late, busy, stopped, back], 2)
    assert (error.ranks, error.reason) == ([2, 3], "hung")
    assert str(error).splitlines() == [
        "ranks 2 and 3 did not arrive within 2 s; ranks 0, 1 and 4 waited",
        "  rank 0 waits in all_reduce in step, line 7 of work.py",
        "  rank 1 waits in all_reduce in step, line 7 of work.py",
        "  rank 2 is in step, line 7 of work.py",
        "  rank 3 is stopped (SIGSTOP)",
        "  rank 4 has returned",
    ]
    assert str(stood_still([busy], 2.5)).startswith("rank 2 did not finish within 2.5 s\n")
    error = stood_still([waits, back], 2)
    assert (error.ranks, error.reason) == ([4], "hung")
    assert str(error).startswith("rank 0 did not finish within 2 s; rank 4 had already returned\n")
    error = stood_still([waits, late], 2)
    assert (error.ranks, error.reason) == ([0, 1], "deadlock")
    assert str(error).startswith("deadlock: ranks 0 and 1 all wait, none can go on (within 2 s)\n")


def test_a_recursion_is_shown_at_both_ends():
    def outer():
        return down(0)

    def down(depth):
        return down(depth + 1)

    try:
        outer()
    except RecursionError as error:
        lines = str(failed([Standing(0, "failed", describe(error))])).splitlines()
    assert lines[0].startswith("rank 0 raised RecursionError: ")
    assert "in outer, line" in lines[1]
    assert "in down, line" in lines[-1]
    assert len(lines) < 20
    assert sum("more ..." in line for line in lines) == 1


@pytest.mark.parametrize(("depth", "told"), [(17, []), (18, ["  ... 2 more ..."])])
def test_no_line_is_spent_on_leaving_one_frame_out(depth, told):
    frames = [("<cell>", number, "down") for number in range(depth)]
    lines = str(failed([Standing(0, "failed", Failure("raised", "raised ValueError: no", 1.0, frames))])).splitlines()
    assert len(lines) == 18
    assert [line for line in lines if "more ..." in line] == told


def test_the_stack_of_a_rank_is_found_in_faulthandlers_report():
    report = (
        'Thread 0x1:\n  File "/lib/threading.py", line 5 in wait\n\n'
        'Current thread 0x2:\n  File "/lib/inner.py", line 3 in deep\n  File "<cell>", line 2 in work\n'
        '  File "/x/launcher.py", line 9 in _rank_main\n  File "/lib/process.py", line 1 in run\n'
    )
    assert parse_stack(report, "_rank_main") == [("<cell>", 2, "work"), ("/lib/inner.py", 3, "deep")]
    assert parse_stack("", "_rank_main") == []


def test_jupyter_shows_the_message_and_no_frames_of_the_launcher(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.user_ns["error"] = LaunchError("rank 1 raised ValueError: no\n  in work, line 2", [1], "raised")
    assert not shell.run_cell("raise error").success
    assert capsys.readouterr().out.strip() == "LaunchError: rank 1 raised ValueError: no\n  in work, line 2"
