"""What counts as equal and as close, and how a difference is told."""

import re
from collections import OrderedDict

import numpy as np
import pytest
import torch

from shared.checks.comparing import difference

INF, NAN = float("inf"), float("nan")


def told(got, want, **options):
    return " / ".join(difference(got, want, **options) or ())


@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        ([INF, 1.0], [INF, 2.0], r"2 at index \(1,\) / 1 at index \(1,\)"),
        ([0.0], [NAN], "nan at"),
        ([INF], [3.4e38], "/ inf"),
        ([1.0, 1.5, 1.25], [1.0, 1.0, 1.0], r"1.5 at index \(1,\), the largest of 2"),
        ([1.00002], [1.0], r"1\.00002"),
        ([True, False], [True, True], r"True at index \(1,\) / False"),
    ],
)
def test_tensors_that_are_not_close_are_told_with_the_worst_place(got, want, message):
    assert re.search(message, told(torch.tensor(got), torch.tensor(want), exact=False))


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
    for want in (one, -one, 1000 * one):
        for sign in (1, -1):
            assert not told(want * (1 + sign * near), want, exact=False)
            assert told(want * (1 + sign * far), want, exact=False)
    assert not told(one * (1 + far), one, exact=False, rtol=0.2, atol=0)
    special = torch.tensor([INF, -INF, NAN], dtype=dtype)
    assert not told(special.clone(), special, exact=False)
    assert not told(one[:0], one[:0], exact=False)


@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        (torch.tensor([-0.0]), torch.tensor([0.0]), "at index"),
        (torch.tensor([1.0]).nextafter(torch.tensor(2.0)), torch.tensor([1.0]), "1.0000001192"),  # in full
        (torch.tensor([0.0]), torch.tensor([NAN]), "nan at"),
        (torch.ones(1, 3), torch.ones(2, 3), r"shape \(2, 3\) / shape \(1, 3\)"),
        (torch.ones(2), torch.ones(2).long(), "dtype torch.int64 / dtype torch.float32"),
        (torch.ones(2, device="meta"), torch.ones(2), "device cpu / device meta"),
        (None, torch.ones(2), "a tensor of shape .*NoneType"),
        (torch.tensor(1), 1, "a Tensor"),
        (1.0, 1, "a float"),
        (True, 1, "1 / True"),
        (0.1 + 0.2, 0.3, "0.30000000000000004"),
        ([1, 2], (1, 2), "a tuple"),
        ([1, 2, 3], [1, 2], r"\[1, 2, 3\]"),
        ({"a": 1, "c": 2}, {"b": 1, "c": 2}, "2 entries / 2 entries, without 'b' and with 'a'"),
        ([torch.tensor([1.0])], [torch.tensor([2.0])], "in entry 0"),
    ],
)
def test_equal_rejects(got, want, message):
    assert re.search(message, told(got, want, exact=True))


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (torch.tensor([NAN, INF, -0.0]), torch.tensor([NAN, INF, -0.0])),
        (torch.ones(0, 3), torch.ones(0, 3)),
        (np.float64(0.5), 0.5),
        (1, 1.0),
        (np.True_, True),
        (OrderedDict(a=1), {"a": 1}),
        (NAN, NAN),
    ],
)
def test_equal_accepts(got, want):
    assert not told(got, want, exact=True)
