"""Whose code an exception came from: the student's, a library's, or the check's own."""

import linecache
import sysconfig
import traceback
from pathlib import Path

import torch

_CHECKS = str(Path(__file__).parent)
_COURSE = str(Path(__file__).parent.parent)
_LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent.parent), "<frozen ")


def is_stub(error: BaseException) -> bool:
    """Whether an unfinished answer raised it. PyTorch raises NotImplementedError too, but never without a message."""
    return type(error) is NotImplementedError and not error.args


def students_line(error: BaseException) -> str:
    """The last line of the student's own code that an exception came through, as "in f, line 3: x = 1"; or nothing."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_COURSE, *_LIBRARIES)):
            source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
            return f"in {frame.name}, line {frame.lineno}: {source}"
    return ""


def looks_like_our_fault(error: BaseException) -> bool:
    """Whether the check's own line raised, and no line of the student's is on the way to it.

    It may still be the student's mistake, such as None where the check expects a tensor.
    """
    if students_line(error):
        return False
    if isinstance(error, AttributeError) and "module 'torch" in str(error):
        return True  # a name that a release of PyTorch has not got, or no longer
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    frames = [name for name in frames if not name.startswith("<frozen ")]
    return bool(frames) and frames[-1].startswith(_CHECKS)


def describe(error: BaseException) -> str:
    """The exception, and the last line of the student's own code that it came through."""
    first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    said = f"{first} {more[0]}" if more and first.endswith(":") else first  # "Error(s) in loading ...:" and then what
    text = f"{type(error).__name__}: {said}"[:240]
    line = students_line(error)
    return f"{text} ({line})" if line else text
