"""Which rank of a failed launch is to blame, and what to say about it. Starts and waits for nothing: see launcher.py.

A rank that only lost the connection or waited in vain is a witness; the one that raised, died or never came is not.
"""

import contextlib
import linecache
import os
import re
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

Frame = tuple[str, int, str]  # file, line, function

_SHOWN = 16  # innermost frames of a stack; a recursion has a thousand

_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|connection was closed|remote process exited|"
    r"communicator was aborted|ncclRemoteError|socket closed",
    re.IGNORECASE,
)
# only what PyTorch's stores and backends say: a time-out of the user's own is an exception like any other
_LATE = re.compile(
    r"timed out (waiting|after) \d|application timeout caused|wait timeout( after|$)|socket timeout|"
    r"connectFullMesh failed",
    re.IGNORECASE,
)

_TORCH = str(Path(torch.__file__).parent)
_STDLIB = str(Path(contextlib.__file__).parent)


class LaunchError(RuntimeError):
    """A rank failed; all of them have been ended.

    Attributes:
        ranks: those to blame, in order. A rank that failed only because it lost the connection to another is not.
        reason: "raised" (an exception), "died" (a signal, os._exit), "hung" (did not arrive or finish in time) or
            "deadlock" (every rank waited for another).
        error: the exception that the first of `ranks` raised, or None.
    """

    def __init__(self, message: str, ranks: list[int], reason: str, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.reason = reason
        self.error = error

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines; the launcher's own frames say nothing about the ranks
        return f"{type(self).__name__}: {self}".splitlines()


@dataclass
class Failure:
    """How a rank failed."""

    kind: str  # "raised", "died", "late" (a collective timed out) or "lost" (a connection closed)
    text: str  # one line
    when: float  # time.monotonic() of the failure; one clock for all processes of a machine
    frames: list[Frame] = field(default_factory=list)  # from fn inwards
    error: BaseException | None = None  # the exception, if it could be sent


@dataclass
class Standing:
    """What is known about one rank."""

    number: int
    state: str = "starting"  # or "running", "returned", "failed" or "died"
    failure: Failure | None = None  # of a rank that failed or died
    frames: list[Frame] = field(default_factory=list)  # of a running rank; empty if it doesn't say, as on Windows


def describe(error: BaseException) -> Failure:
    """The failure of the rank that raised `error`; called there."""
    clock = r"\[rank\d+\]:\[\w+ [\d:.]+ ([\w.]+):\d+\] "  # what C++ puts before its messages
    text = re.sub(clock, r"\1: ", str(error).strip())
    kind = "raised"
    if isinstance(error, RuntimeError):
        kind = "lost" if _LOST.search(text) else "late" if _LATE.search(text) else kind
    frames = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    text = f"raised {type(error).__name__}" + (f": {text}" if text else "")
    return Failure(kind, text, time.monotonic(), frames[1:], error.with_traceback(None))


def culprits(ranks: Sequence[Standing]) -> list[Standing]:
    """Those that failed by themselves, not for want of another."""
    return [rank for rank in ranks if rank.failure and rank.failure.kind in ("raised", "died")]


def failed(ranks: Sequence[Standing]) -> LaunchError:
    """Some rank failed: the first of the culprits is the cause; without one, whoever lost its connection."""
    blamed = culprits(ranks) or [rank for rank in ranks if rank.failure]
    blamed.sort(key=lambda rank: rank.failure.when)
    first = blamed[0]
    lines = [f"rank {first.number} {first.failure.text}", *_located(first.failure.frames)]
    same = [rank for rank in blamed[1:] if rank.failure.text == first.failure.text]
    if same:
        lines.append(f"{names(same)} did the same")
    lines += [f"then rank {rank.number} {rank.failure.text}" for rank in blamed[1:] if rank not in same]
    lost = [rank for rank in ranks if rank.failure and rank not in blamed]
    if lost:
        lines.append(f"as a consequence {names(lost)} lost the connection")
    reason = first.failure.kind if first.failure.kind in ("raised", "died") else "raised"
    return LaunchError("\n".join(lines), [rank.number for rank in blamed], reason, first.failure.error)


def stood_still(ranks: Sequence[Standing], timeout: float) -> LaunchError:
    """Nobody failed by itself, but the ranks didn't get on within `timeout` seconds. Says where each of them stands."""
    busy, returned, details = [], [], []
    for rank in ranks:
        if rank.state == "returned":
            returned.append(rank)
            details.append(f"  rank {rank.number} has returned")
            continue
        frames = rank.failure.frames if rank.failure else rank.frames
        operation = _operation(frames)
        place = "".join(_located(frames)[-1:]).strip()
        if operation:
            what = f"waits in {operation}"
        elif rank.failure:
            what = rank.failure.text
        else:
            busy.append(rank)
            what = "is" if place else f"is {rank.state}"
        details.append(f"  rank {rank.number} {what} {place}".rstrip())
    missing, reason = busy or returned, "hung"
    waiting = [rank for rank in ranks if rank not in missing]
    limit = f"within {timeout:g} s"
    if busy and waiting:
        head = f"{names(busy)} did not arrive {limit}; {names(waiting)} waited"
    elif busy:
        head = f"{names(busy)} did not finish {limit}"
    elif returned:
        head = f"{names(waiting)} did not finish {limit}; {names(returned)} had already returned"
    else:
        missing, reason = waiting, "deadlock"
        head = f"deadlock: {names(waiting)} all wait, none can go on ({limit})"
    return LaunchError("\n".join([head, *details]), [rank.number for rank in missing], reason)


def names(ranks: Iterable[Standing]) -> str:
    """'rank 2', 'ranks 0, 1 and 3'."""
    found = [str(rank.number) for rank in ranks]
    if len(found) == 1:
        return f"rank {found[0]}"
    return f"ranks {', '.join(found[:-1])} and {found[-1]}"


def parse_stack(report: str, outermost: str) -> list[Frame]:
    """The frames inside the function `outermost`, outer to inner, out of faulthandler's report (innermost first)."""
    for block in report.split("\n\n"):
        frames = [(f, int(n), name) for f, n, name in re.findall(r'File "(.*?)", line (\d+) in (.*)', block)]
        outer = [i for i, frame in enumerate(frames) if frame[2] == outermost]
        if outer:
            return frames[: outer[0]][::-1]
    return []


def _inside_library(file: str) -> bool:
    return file.startswith((_TORCH, "<frozen")) or (file.startswith(_STDLIB) and "site-packages" not in file)


def _operation(frames: list[Frame]) -> str:
    """Name of the communication a rank waits in, or "" if it is somewhere else."""
    inner = list(frames)
    while inner and not inner[-1][0].startswith(_TORCH):
        file, line, _ = inner.pop()
        if re.search(r"\.(wait|synchronize)\(", linecache.getline(file, line)) and len(inner) == len(frames) - 1:
            return "wait()"
        if not _inside_library(file):
            return ""
    calls = [name for file, _, name in inner if file.startswith(os.path.join(_TORCH, "distributed"))]
    found = [name for name in calls if name not in ("wrapper", "__exit__", "__enter__")]
    return found[0] if found else ""


def _located(frames: list[Frame]) -> list[str]:
    """One line a frame of the user's own code; a notebook's cells are in this process's linecache."""
    lines = []
    for file, number, name in frames:
        if _inside_library(file):
            continue
        source = linecache.getline(file, number).strip()
        base = os.path.basename(file)
        where = f"in {name}, line {number}" + ("" if "ipykernel" in file or file.startswith("<") else f" of {base}")
        lines.append(f"  {where}: {source}" if source else f"  {where}")
    return lines[-_SHOWN:]
