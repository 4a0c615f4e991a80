"""Counts how often a program waits for its device by making a Python value of a tensor."""

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

_READING = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")


class Reads(TorchFunctionMode):
    """with Reads() as reads: ...; then reads.count calls of `item`, `tolist`, `float` and the like were made."""

    count = 0

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += getattr(function, "__name__", "") in _READING
        return function(*args, **(kwargs or {}))
