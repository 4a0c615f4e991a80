"""The check of the warm-up on the workbook's start page."""

import torch

from shared.checks.exercise import exercise
from shared.checks.trial import Trial


def reference(x: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """The course's answer."""
    return 3 * x**2 * upstream


@exercise("0", "Warm-up", points=2, demands=2, stand_in=lambda: reference, stand_in_name="ours")
def cube_backward(trial: Trial, answer) -> None:
    """`answer(x, upstream)` is the gradient with respect to x, if that with respect to x ** 3 is `upstream`."""
    x, upstream = torch.tensor([1.0, 2.0, -3.0]), torch.tensor([1.0, 10.0, 0.0])
    slope = answer(x, torch.ones(3))
    forgotten = "does the function return something?"
    trial.close(
        "the slope of x ** 3, where upstream is 1",
        slope,
        reference(x, torch.ones(3)),
        hint=forgotten if slope is None else "for x = [1, 2, -3]; how steep is x ** 3 there?",
        see=None if slope is None else 1,
    )
    trial.close(
        "another upstream, [1, 10, 0]",
        answer(x, upstream),
        reference(x, upstream),
        hint=forgotten if slope is None else "what becomes of the gradient that comes from above?",
        see=None if slope is None else 2,
    )
