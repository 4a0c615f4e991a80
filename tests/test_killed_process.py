"""Functions in processes that are killed: what survives."""

import pytest

from shared.lessons.topic_15_10.killed_process import kill_here, launch_killed
from shared.rank_failures import LaunchError

pytestmark = pytest.mark.processes


def waits(path):
    path.write_text("begun")
    while True:
        pass


def speaks_of_it():
    raise RuntimeError("the worker was killed by SIGKILL")


for function in (waits, speaks_of_it):
    function.__module__ = "__main__"  # so they travel by value


def test_a_process_is_killed_or_was_quicker(tmp_path):
    assert launch_killed(abs, 20.0, -2) == 2
    assert launch_killed(kill_here, 20.0) is None
    assert launch_killed(waits, 0.3, tmp_path / "it") is None
    assert (tmp_path / "it").read_text() == "begun"
    with pytest.raises(LaunchError, match="the worker was killed"):
        launch_killed(speaks_of_it, 20.0)
