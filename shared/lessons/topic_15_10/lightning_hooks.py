"""What a callback of Lightning hears of a run in which another callback fails."""

import logging
import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import nn

LIGHTNING_HOOKS = [
    "on_fit_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_end",
    "on_fit_end",
    "on_exception",
    "teardown",
]


def lightning_calls() -> list[str]:
    """The hooks that are called in a run of six batches in which a callback raises an OSError in the second step.

    Raises:
        ImportError: Lightning is not installed.
        AttributeError: this version of Lightning lacks a hook that the lesson names.
    """
    import lightning

    missing = [name for name in LIGHTNING_HOOKS if not hasattr(lightning.Callback, name)]
    if missing:
        raise AttributeError(f"lightning.Callback has no {', '.join(missing)}")
    heard: list[str] = []

    def note(name: str) -> Any:
        return lambda *args, **more: heard.append(name)

    listener = type("Listener", (lightning.Callback,), {name: note(name) for name in LIGHTNING_HOOKS})()

    class Failing(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                raise OSError("disk full")

    class Wrapped(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    off = {f"enable_{name}": False for name in ("progress_bar", "model_summary", "checkpointing")}
    options = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "callbacks": [listener, Failing()]}
    with warnings.catch_warnings(action="ignore"), suppress(OSError):
        lightning.Trainer(**options, **off).fit(Wrapped(), torch.utils.data.DataLoader(torch.ones(6, 4), 1))
    return heard
