"""Functions in processes that are killed: what survives."""

import pytest

from shared.lessons.topic_15_10.killed_process import kill_here, launch_killed
from shared.rank_failures import LaunchError

pytestmark = pytest.mark.processes


def _quick(x):
    return x + 1


def _dies():
    kill_here()
    return "alive"


def _raises():
    raise ValueError("mine")


def _speaks_of_it():
    raise RuntimeError("the worker was killed by SIGKILL")


def _waits(path):
    path.write_text("begun")
    while True:
        pass


for function in (_quick, _dies, _raises, _speaks_of_it, _waits):
    function.__module__ = "__main__"  # so they travel by value


def test_a_process_is_killed_or_was_quicker(tmp_path):
    assert launch_killed(_quick, 20.0, 1) == 2
    assert launch_killed(_dies, 20.0) is None
    assert launch_killed(_waits, 0.3, tmp_path / "it") is None
    assert (tmp_path / "it").read_text() == "begun"
    with pytest.raises(LaunchError, match="mine"):
        launch_killed(_raises, 20.0)
    with pytest.raises(LaunchError, match="the worker was killed"):
        launch_killed(_speaks_of_it, 20.0)
