"""The check of the warm-up on the workbook's start page."""

import torch

from shared.checks.exercise import exercise
from shared.checks.trial import Trial
from shared.checks.words import Sample, samples


def reference(x: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """The course's answer."""
    return 3 * x**2 * upstream


@exercise("0", "Warm-up", points=2, demands=2, stand_in=lambda: reference, stand_in_name="ours")
def cube_backward(trial: Trial, answer) -> None:
    """`answer(x, upstream)` is the gradient with respect to x, if that with respect to x ** 3 is `upstream`."""
    x, upstream = torch.tensor([1.0, 2.0, -3.0]), torch.tensor([1.0, 10.0, 0.0])
    with trial.group("the slope of x ** 3, where upstream is 1", hint="how steep is x ** 3 at each x?", see=1):
        samples(trial, answer, reference, [Sample("x = [1, 2, -3]", x, torch.ones(3))])
    with trial.group("another upstream, [1, 10, 0]", hint="what becomes of the gradient that comes from above?", see=2):
        samples(trial, answer, reference, [Sample("x = [1, 2, -3]", x, upstream)])
