"""What counts as equal and as close, and how a difference is told."""

import re
from collections import OrderedDict

import numpy as np
import pytest
import torch

from shared.checks.exercise import exercise

INF, NAN = float("inf"), float("nan")


def held(body):
    """A check that was made of one function of the trial, run."""
    return exercise("15-98.1", "Held", points=1, demands=1)(lambda trial, answer: body(trial)).run(None)


@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        ([INF, 1.0], [INF, 2.0], r"expected: 2 at index \(1,\)\s+got:\s+1 at index \(1,\)"),
        ([NAN], [0.0], "expected: 0 at"),
        ([0.0], [NAN], "expected: nan at"),
        ([INF], [-INF], "expected: -inf"),
        ([INF], [3.4e38], "got:  *inf"),
        ([1 + 1e-4], [1.0], "expected: 1 at"),
        ([1e-4], [0.0], "expected: 0 at"),
        ([1.0, 1.5, 1.25], [1.0, 1.0, 1.0], r"1.5 at index \(1,\), the largest of 2"),
        ([1.00002], [1.0], r"1\.00002"),
        ([True, False], [True, True], r"expected: True at index \(1,\)\s+got:\s+False"),
        ([1, 2], [1, 3], "expected: 3"),
    ],
)
def test_close_rejects(got, want, message):
    result = held(lambda trial: trial.close("same", torch.tensor(got), torch.tensor(want)))
    assert result.status == "failed"
    assert re.search(message, str(result)), str(result)


@pytest.mark.parametrize(
    ("dtype", "near", "far"),
    [
        (torch.float64, 1e-10, 1e-7),
        (torch.float32, 5e-6, 1e-4),
        (torch.bfloat16, 1e-2, 0.1),
        (torch.float16, 1e-3, 0.01),
    ],
)
def test_close_allows_roundings_and_no_more(dtype, near, far):
    one = torch.ones(2, dtype=dtype)
    for error, status in ((near, "passed"), (-near, "passed"), (far, "failed"), (-far, "failed")):
        assert held(lambda trial, e=error: trial.close("same", one * (1 + e), one)).status == status
    assert held(lambda trial: trial.close("wider", one * (1 + far), one, rtol=0.2, atol=0)).status == "passed"
    special = torch.tensor([INF, -INF, NAN], dtype=dtype)
    assert held(lambda trial: trial.close("special", special.clone(), special)).status == "passed"
    assert held(lambda trial: trial.close("none", one[:0], one[:0])).status == "passed"


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (torch.tensor([INF]), torch.tensor([torch.finfo(torch.float32).max])),
        (torch.tensor([-0.0]), torch.tensor([0.0])),
        (torch.tensor([1.0]).nextafter(torch.tensor(2.0)), torch.tensor([1.0])),
        (torch.tensor([0.0]), torch.tensor([NAN])),
        (torch.tensor(1), 1),
        (1.0, 1),
        (True, 1),
        (1, True),
        (0.1 + 0.2, 0.3),
        ([1, 2], (1, 2)),
        ([1, 2, 3], [1, 2]),
        ({"a": 1}, {"b": 1}),
        ([torch.tensor([1.0])], [torch.tensor([2.0])]),
        ("a", "b"),
        (None, 0),
    ],
)
def test_equal_rejects(got, want):
    assert held(lambda trial: trial.equal("same", got, want)).status == "failed"


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (torch.tensor([NAN, INF, -0.0]), torch.tensor([NAN, INF, -0.0])),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j])),
        (torch.ones(0, 3), torch.ones(0, 3)),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (1, 1.0),
        (np.True_, True),
        ([torch.tensor([1.0]), 2], [torch.tensor([1.0]), 2]),
        (OrderedDict(a=1), {"a": 1}),
        (NAN, NAN),
    ],
)
def test_equal_accepts(got, want):
    assert held(lambda trial: trial.equal("same", got, want)).status == "passed"


def test_numbers_that_print_alike_are_shown_in_full():
    shown = str(held(lambda trial: trial.equal("same", torch.tensor([1.0000001]), torch.tensor([1.0]))))
    assert "1.0000001192" in shown
