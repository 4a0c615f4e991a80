"""Checks of the exercises in 15-04, Custom Loss Functions & Training Utilities."""

from typing import Any

from shared.checks.feedback import Trial, exercise


@exercise("15-04.1", "Label smoothing in log space", points=15)
def label_smoothing_cross_entropy(trial: Trial, answer: Any) -> None:
    """x"""


@exercise("15-04.2", "NT-Xent", points=20)
def nt_xent_loss(trial: Trial, answer: Any) -> None:
    """x"""


@exercise("15-04.3", "A variance that merges", points=20)
def running_variance(trial: Trial, answer: Any) -> None:
    """x"""


@exercise("15-04.4", "Clip by norm, for each group", points=20)
def clip_grad_norm(trial: Trial, answer: Any) -> None:
    """x"""


@exercise("15-04.5", "Swap in, save, resume", points=25)
def ema(trial: Trial, answer: Any) -> None:
    """x"""
