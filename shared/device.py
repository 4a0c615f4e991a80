"""The device a notebook runs on, and one table that says what it is."""

import contextlib
import os
import platform

import psutil
import torch

DEVICE_VARIABLE = "COURSE_DEVICE"
PRETENDED = "pretended"  # a value of it: an accelerator that isn't there, see shared/pretended.py
_GIB = 2**30


def pick_device(request: str | None = None) -> torch.device:
    """The device of this name ('cpu', 'cuda', 'cuda:1', 'mps'), or without one the best: CUDA, then MPS, then CPU.

    Raises ValueError if the request is misspelt or names a device that this machine does not have.
    """
    available = []
    if torch.cuda.is_available():
        available += ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        available.append("mps")
    available.append("cpu")
    name = (request or "").strip().lower() or available[0]
    if name not in available:
        raise ValueError(
            f"{DEVICE_VARIABLE}={request!r} is not available here. Available: {', '.join(available)}. "
            f"Set {DEVICE_VARIABLE} to one of these, or unset it to get the best one."
        )
    return torch.device(name)


def get_device() -> torch.device:
    """Choose the notebook's device, print what it is, and return it.

    The environment variable COURSE_DEVICE overrides the choice; ValueError if this machine has no such device. A CUDA
    device with a number becomes the current one, so that what names no number ("cuda") means it, too.
    """
    request = os.environ.get(DEVICE_VARIABLE)
    pretended = request == PRETENDED
    if pretended:
        from shared.pretended import begin

        device = begin()
    else:
        device = pick_device(request)
    if device.index is not None:
        torch.cuda.set_device(device)
    rows = {
        "device": f"{device} (pretended)" if pretended else str(device),
        "name": _device_name(device),
        "memory": _memory(device),
        "torch": torch.__version__,
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} logical cores",
    }
    for key, value in rows.items():
        print(f"{key:<7}  {value}")
    return device


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # platform.processor() is empty on many Linux systems; /proc/cpuinfo is where the name is.
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory(device: torch.device) -> str:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return f"{free / _GIB:.1f} GiB free of {total / _GIB:.1f} GiB on the device"
    memory = psutil.virtual_memory()
    return f"{memory.available / _GIB:.1f} GiB free of {memory.total / _GIB:.1f} GiB"
