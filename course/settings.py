"""COURSE_DATA and COURSE_DEVICE, checked once before notebooks start, and not in the kernel of each of them."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable

SAMPLE = "sample"  # what a command uses that is given nothing else


class SettingError(ValueError):
    """A setting can't be met; the message names it and says what it may be."""


def check_settings() -> str:
    """The data mode that notebooks are to run with: COURSE_DATA, else "sample". Raises SettingError.

    COURSE_DEVICE is looked at as well.
    """
    mode = os.environ.get("COURSE_DATA", "").strip().lower() or SAMPLE
    device = os.environ.get("COURSE_DEVICE", "")
    try:
        if mode != SAMPLE:  # what follows imports PyTorch, which takes seconds
            from shared.data.finding import parse_mode

            mode = parse_mode(mode)
        if device.strip().lower() not in ("", "cpu", "pretended"):
            from shared.device import pick_device

            pick_device(device)
    except ValueError as error:
        raise SettingError(str(error)) from None
    return mode


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """The `type` of an argument that must be above zero."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < (value := kind(text)) < float("inf"):
                return value
        raise argparse.ArgumentTypeError(f"{text} is not a positive {'whole ' if kind is int else ''}number")

    return read
