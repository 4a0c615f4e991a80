"""What a checkpoint needs of objects that are PyTorch's or NumPy's: samplers, generators, plain numbers."""

import io
import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def sampler_of(loader: Any) -> Any:
    """A loader's sampler, also that of a batch sampler of one's own; None if there is none."""
    batches = getattr(loader, "batch_sampler", None)
    return getattr(batches, "sampler", getattr(loader, "sampler", None))


def loader_generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    """The generators that loaders and their samplers own, in a fixed order; a shared one stands there twice."""
    loaders = list(loaders)
    found = [getattr(owner, "generator", None) for owner in (*loaders, *map(sampler_of, loaders))]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


class _OneGenerator:
    """torch.mps, called like torch.cuda: it has one device."""

    @staticmethod
    def get_rng_state(device: Any = None) -> Tensor:
        return torch.mps.get_rng_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: Any = None) -> None:
        torch.mps.set_rng_state(state)


def random_module(device: torch.device) -> Any:
    """What has `get_rng_state(device)` and `set_rng_state(state, device)` for an accelerator; None for a CPU."""
    there = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
    if not there or there.type != device.type:
        return None
    return _OneGenerator if device.type == "mps" else getattr(torch, device.type)


def plain(state: Any) -> Any:
    """The same state with Python's numbers for NumPy's scalars.

    Raises:
        pickle.UnpicklingError: `torch.load` would refuse something in it with `weights_only=True`.
    """
    found = _with_numbers(state)
    _refuse(found, "state")
    return found


def _refuse(value: Any, where: str) -> None:
    """Raise for the first part that can't be read back, with its place and its type."""
    torch.save(_without_contents(value), buffer := io.BytesIO())
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except pickle.UnpicklingError:
        parts = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        for key, part in parts:
            _refuse(part, f"{where}[{key!r}]")
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        message = f"{where} is a {kind}, which torch.load refuses with weights_only=True"
        raise pickle.UnpicklingError(message) from None


def _with_numbers(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else _mapped(value, _with_numbers)


def _without_contents(value: Any) -> Any:
    """Empty tensors for plain ones, so that a trial costs little."""
    return torch.empty(0) if type(value) is Tensor else _mapped(value, _without_contents)


def _mapped(value: Any, function: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(function, value))
    if isinstance(value, dict):
        parts = {key: function(part) for key, part in value.items()}
        if type(value) is dict:
            return parts
        copied = value.copy()  # keeps the type, and what a module's state carries as an attribute
        copied.update(parts)
        return copied
    return value


def begin_sampler(loader: Any, epoch: int, done: int) -> int:
    """Tell a loader's sampler the epoch and, if it has a `start` (an index), how much of it was done.

    A sampler can't begin late if the loader has a batch sampler of its own, or workers: what these draw depends on
    the batches before.

    Returns:
        How many of the `done` batches are left to be read and dropped.
    """
    sampler = sampler_of(loader)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    if hasattr(sampler, "start") and loader.batch_size and not loader.num_workers:
        sampler.start, done = done * loader.batch_size, 0
    return done
