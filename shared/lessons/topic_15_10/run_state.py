"""What a checkpoint needs of objects that are PyTorch's or NumPy's: samplers, generators, plain numbers."""

import io
import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def _inner(loader: Any, depth: int = 3) -> list[Any]:
    """The loader itself, or those that a wrapper (something to iterate over) holds in its attributes."""
    if hasattr(loader, "sampler") or hasattr(loader, "batch_sampler"):
        return [loader]
    if not depth or not isinstance(loader, Iterable) or not hasattr(loader, "__dict__"):
        return []
    return [one for value in vars(loader).values() for one in _inner(value, depth - 1)]


def sampler_of(loader: Any) -> Any:
    """A loader's sampler, also one in a batch sampler of one's own or in a wrapper's loader; None if there is none."""
    loader = next(iter(_inner(loader)), None)
    batches = getattr(loader, "batch_sampler", None)
    return getattr(batches, "sampler", getattr(loader, "sampler", None))


def loader_generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    """The generators that loaders and their samplers own, in a fixed order; a shared one stands there twice."""
    loaders = [one for loader in loaders for one in _inner(loader)]
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
    """Empty tensors for plain ones, so that a trial costs little; one with attributes is pickled with them."""
    return torch.empty(0) if type(value) is Tensor and not vars(value) else _mapped(value, _without_contents)


def _mapped(value: Any, function: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(function, value))
    if isinstance(value, dict):
        parts = {key: function(part) for key, part in value.items()}
        if type(value) is dict:
            return parts
        copied = value.copy()  # keeps the type, and what a module's state carries as an attribute
        for key, part in parts.items():  # a Counter's update() would add: MultiStepLR's milestones are one
            copied[key] = part
        return copied
    return value


def begin_sampler(loader: Any, epoch: int, done: int) -> int:
    """Tell a loader's sampler the epoch and, if it has a `start` (an index), how much of it was done.

    A sampler can't begin late if the loader has a batch sampler of its own, or workers: what these draw depends on
    the batches before. Nor if the loader is in a wrapper, whose batches needn't be the loader's.

    Returns:
        How many of the `done` batches are left to be read and dropped.
    """
    for sampler in map(sampler_of, _inner(loader)):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
    sampler = sampler_of(loader)
    if hasattr(sampler, "start") and getattr(loader, "batch_size", None) and not loader.num_workers:
        sampler.start, done = done * loader.batch_size, 0
    return done
