"""Checks of the exercises in 15-10, Building a Mini Training Framework."""

from typing import Any
from shared.checks.feedback import Trial, exercise


@exercise("15-10.1", "Early stopping", points=15)
def early_stopping(trial: Trial, answer: Any) -> None:
    pass
@exercise("15-10.2", "Update-to-weight ratios", points=15)
def update_ratio(trial: Trial, answer: Any) -> None:
    pass
@exercise("15-10.3", "A checkpoint that is whole", points=20)
def checkpoint_file(trial: Trial, answer: Any) -> None:
    pass
@exercise("15-10.4", "Groups of batches", points=20)
def grouped(trial: Trial, answer: Any) -> None:
    pass
@exercise("15-10.5", "A run that goes on", points=30)
def trainer(trial: Trial, answer: Any) -> None:
    pass
