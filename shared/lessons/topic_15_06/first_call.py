"""For the lesson of 15-06: whether Inductor can compile here, and what the first call of a compiled function costs."""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from shared import quick_compiler


def can_compile(device: torch.device) -> bool:
    """Whether there is a compiler for what Inductor writes for this device."""
    return device.type != "cpu" or quick_compiler.can_compile()


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def timed(function: Callable, *args: Any) -> tuple[Any, float]:
    """A call's result, and how many seconds it took."""
    _synchronize()
    start = time.perf_counter()
    result = function(*args)
    _synchronize()
    return result, time.perf_counter() - start


def compile_and_read(compiled: Callable, x: Tensor) -> tuple[str, float]:
    """Call a compiled function for the first time: Inductor's source, and the seconds it took.

    The cache is empty, so a first call is a first call in each run of the notebook.
    """
    # without a CUDA toolkit PyTorch would log that it found none
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with quick_compiler.quick_compiler(), torch.no_grad():
        result, seconds = timed(run_and_get_code, compiled, x)
    _, sources = result
    source = sources[0] if sources else ""  # Inductor has none for some devices
    return source, seconds
