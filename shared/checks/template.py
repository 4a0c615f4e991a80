"""The check of the example exercise in the two templates."""

import torch
import torch.nn.functional as F

from shared.checks.exercise import exercise
from shared.checks.trial import Trial


@exercise("1", "Mean absolute error", points=10, demands=2, stand_in=lambda: F.l1_loss, stand_in_name="F.l1_loss")
def mean_absolute_error(trial: Trial, answer) -> None:
    """`answer(prediction, target)` returns the mean of |prediction - target| as a scalar tensor."""
    prediction, target = torch.randn(5, 3), torch.randn(5, 3)
    trial.close(
        "equals F.l1_loss",
        answer(prediction, target),
        F.l1_loss(prediction, target),
        hint="is the absolute value taken before the mean, and the mean over every element?",
        see=1,
    )
    prediction.requires_grad_()
    trial.call(
        "gradients flow through it",
        lambda: answer(prediction, target).backward(),
        hint="which call leaves the graph?",
        see=1,
    )
    trial.close(
        "its gradient is sign(prediction - target) / n",
        prediction.grad,
        torch.sign(prediction.detach() - target) / target.numel(),
        hint="the gradient of the value returned; is it that of your formula?",
    )
