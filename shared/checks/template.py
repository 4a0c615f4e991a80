"""The check of the example exercise in the two templates."""

import torch
import torch.nn.functional as F

from shared.checks.feedback import Trial, exercise


@exercise("1", "Mean absolute error", stand_in=lambda: F.l1_loss)
def mean_absolute_error(trial: Trial, answer) -> None:
    """`answer(prediction, target)` returns the mean of |prediction - target| as a scalar tensor."""
    prediction, target = torch.randn(5, 3), torch.randn(5, 3)
    trial.close(
        "equals F.l1_loss",
        answer(prediction, target),
        F.l1_loss(prediction, target),
        hint="absolute value first, then the mean over every element",
    )
    prediction.requires_grad_()
    answer(prediction, target).backward()
    trial.close(
        "its gradient is sign(prediction - target) / n",
        prediction.grad,
        torch.sign(prediction.detach() - target) / target.numel(),
        hint="stay in tensor operations: .item() or .detach() cuts the graph",
    )
