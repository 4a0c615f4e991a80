"""The word for answers that run on several processes: `ranks` launches them, and tells how a launch failed."""

import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shared import LaunchError, launch
from shared.checks.trial import Trial

RETURNS = "every rank returns"
_SECONDS = 5  # for an answer that hangs; a right one takes a fraction of a second


class Notes:
    """Each rank leaves a note of the case it is in, so that a hang can be told with its case."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.count = 0

    def write(self, case: object, place: int) -> None:
        """Begin a case; place: its number in the list that all ranks go through, each with its own part of it."""
        self.count += 1
        (self.folder / str(dist.get_rank())).write_text(f"{place} {self.count} {case}")

    def leave(self, sign: str) -> None:
        """Leave a sign that another rank can wait for with `seen`."""
        (self.folder / sign).touch()

    def seen(self, sign: str, seconds: float = 1.5) -> bool:
        """Whether another rank leaves the sign within some seconds."""
        deadline = time.monotonic() + seconds
        while not (self.folder / sign).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return (self.folder / sign).exists()

    def read(self, rank: int) -> tuple[int, int, str]:
        """Of the last case that the rank has begun: its place, how many the rank has begun, its name."""
        path = self.folder / str(rank)
        place, count, case = (path.read_text() if path.exists() else "0 0 ").split(" ", 2)
        return int(place), int(count), case


@dataclass(frozen=True)
class _Failure:
    """What a launch came to that failed: the launcher's report, the case, and whether ranks waited in vain."""

    report: str
    case: str
    waits: bool
    untouched: bool  # nothing but the first case's NotImplementedError


def _outcome(function: Callable, size: int, answer: Callable, *args: Any) -> list[Any] | _Failure:
    """Run function(notes, answer, *args) on `size` ranks; what each returned."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Notes(folder)
        try:
            return launch(function, size, notes, answer, *args, backend="gloo", timeout=_SECONDS)
        except LaunchError as error:
            waits = error.reason in ("hung", "deadlock")
            # who takes no part in the case that hangs waits in a later one
            _, count, case = min(map(notes.read, error.ranks)) if waits else notes.read(error.ranks[0])
            untouched = type(error.error) is NotImplementedError and not error.error.args and count == 1
            return _Failure(_report(str(error)), case, waits, untouched)


def ranks(
    trial: Trial,
    function: Callable,
    size: int,
    *args: Any,
    hint: str,
    see: int | Callable[[str], int],
    broken: tuple[str, int | None] = ("do sender and receiver agree on the size of each message?", None),
    places: int | None = None,
) -> Any:
    """What function(notes, *args) returned on each of `size` ranks. One that fails or hangs fails the item RETURNS.

    found = ranks(trial, _sum_on_ranks, 3, answer, hint="who sends first?", see=1)  # _sum_on_ranks(notes, answer)

    hint and see (a number, or a function of the case) are for ranks that wait, broken is for those that gloo has ended.
    places is the folded hint on ranks of the world and places in a group, for answers that take the one for the other.
    """
    found = _outcome(function, size, *args)
    if not isinstance(found, _Failure):
        trial.needs(RETURNS, True, expected="", got="")
        return found
    if found.untouched and not trial.items:
        raise NotImplementedError
    told: dict[str, Any] = {"hint": "work out by hand what the named line does on that rank, in this case"}
    if found.waits:
        told["hint"] = f"ask of each line who sends what its rank waits for, or receives what it sends; {hint}"
        told["see"] = see if isinstance(see, int) else see(found.case)
    elif ", line " not in found.report:
        told["hint"], told["see"] = broken
    elif places and re.search(r"not part of|not in the group|of a group of|itself", found.report):
        told = {"hint": "is this number a rank of the world, or a place in the group?", "see": places}
    got = f"{found.report}\n(case: {found.case})"
    trial.needs(RETURNS, False, expected=RETURNS, got=got, **told)
    return None  # reached only where the item is left out


def _report(message: str) -> str:
    """The launcher's report; lines on the answer first, without those on this file."""
    message = re.sub(r"(group )?<\S+ProcessGroup object at 0x\w+>", "the group", message)
    head, *lines = message.splitlines()
    lines = [
        re.sub(r" waits .*_on_ranks,.*", " waits for the others, outside of your function", line)
        for line in lines
        if " waits " in line or not re.search(r"_on_ranks,|topic_\d\d_\d\d\.py|ranks\.py|traffic\.py", line)
    ]
    outside = re.compile(r"\s*rank (\d+) waits for the others, outside of your function")
    waiting = [match[1] for match in map(outside.fullmatch, lines) if match]
    lines = [line for line in lines if not outside.fullmatch(line)]
    if waiting:
        who = f"ranks {', '.join(waiting)} wait" if len(waiting) > 1 else f"rank {waiting[0]} waits"
        lines.append(f"  {who} for the others, outside of your function")
    return "\n".join([head, *lines])
