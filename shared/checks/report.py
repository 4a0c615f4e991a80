"""What a check has found: the items that it judged, the points, and how both are told to a reader."""

import textwrap
from dataclasses import dataclass, field
from typing import Any, Literal

from shared.text import WIDTH

Status = Literal["passed", "failed", "not attempted", "check broken"]


class CheckFailed(AssertionError):
    """An answer is wrong; the message is the whole report.

    Args:
        report: what the check found.
        shown: what Jupyter shows in place of a traceback through the checks' own code; None: the report.
    """

    def __init__(self, report: str, shown: str | None = None) -> None:
        super().__init__(report)
        self.shown = report if shown is None else shown

    def _render_traceback_(self) -> list[str]:  # IPython asks for it
        return self.shown.splitlines()


@dataclass(frozen=True)
class Item:
    """One demand, judged.

    Attributes:
        name: what is demanded, the same in every run.
        passed: whether the answer meets it.
        guard: it keeps what follows from breaking; a guard that passed is not shown and earns nothing.
        free: an answer that does nothing meets it, too; it earns points only beside one that is not free.
        expected, got, hint: what is shown when it fails.
        see: number of the task's folded hint that helps, or None.
    """

    name: str
    passed: bool
    guard: bool = False
    expected: str = ""
    got: str = ""
    hint: str = ""
    see: int | None = None
    free: bool = False

    @property
    def advice(self) -> str:
        """The hint, and which of the task's hints to open."""
        if not self.see:
            return self.hint
        if self.hint.endswith("?"):
            return f"{self.hint} Open Hint {self.see} of the task"
        return f"{self.hint}; open Hint {self.see} of the task".removeprefix("; ")

    def lines(self) -> list[str]:
        """How the item is shown."""
        if self.passed:
            return [] if self.guard else [f"  ok     {self.name}"]
        indent = " " * 19
        shown = textwrap.wrap(f"  WRONG  {self.name}", WIDTH, subsequent_indent=indent[:9])
        for label, text in (("expected", self.expected), ("got", self.got), ("hint", self.advice)):
            if not text and label == "hint":
                continue
            first, *more = text.splitlines() or [""]
            first = f"{label + ':':<10}{first}"
            shown += textwrap.wrap(first, WIDTH, initial_indent=indent[:9], subsequent_indent=indent)
            for line in more:  # a report of several lines keeps them
                shown += textwrap.wrap(line, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
        return shown


@dataclass
class Result:
    """The outcome of one check.

    Attributes:
        exercise: the number, e.g. '15-01.1'.
        title: the exercise's title.
        points: what the exercise is worth.
        status: 'passed', 'failed', 'not attempted', or 'check broken' if the check itself raised.
        items: what was judged, in order.
        demands: how many demands the check has; each is worth the same share of the points.
        note: a sentence about the whole: why the check ended early, or what broke.
    """

    exercise: str
    title: str
    points: int
    status: Status = "passed"
    items: list[Item] = field(default_factory=list)
    demands: int = 0
    note: str = ""

    @property
    def earned(self) -> float:
        """The share of the points that the demands it meets are worth, to one decimal; 0 if all of these are free."""
        if self.status == "passed":
            return self.points
        if self.status != "failed" or not self.demands:
            return 0
        met = [item for item in self.items if item.passed and not item.guard]
        if all(item.free for item in met):
            return 0
        return round(self.points * min(len(met) / self.demands, 1.0), 1)

    @property
    def failures(self) -> list[Item]:
        """The items that failed."""
        return [item for item in self.items if not item.passed]

    @property
    def failure(self) -> Item | None:
        """The first item that failed."""
        return next(iter(self.failures), None)

    @property
    def unjudged(self) -> int:
        """How many demands could not be judged, since they build on one that failed."""
        judged = len({item.name for item in self.items if not item.guard})
        return max(self.demands - judged, 0) if self.status == "failed" else 0

    def record(self) -> dict[str, Any]:
        """What is kept of it in the notebook and in a table of grades."""
        return {"exercise": self.exercise, "status": self.status, "points": self.earned, "of": self.points}

    def __str__(self) -> str:
        head = f"Exercise {self.exercise} · {self.title}: {self.status}"
        if self.status == "failed":
            head += f", {self.earned:g} of {self.points} points"
        lines = [head, *(line for item in self.items for line in item.lines())]
        if self.status == "failed" and not self.earned and any(item.passed and item.free for item in self.items):
            said = "No points yet: what is ok above also holds for an answer that does nothing."
            lines += textwrap.wrap(said, WIDTH, initial_indent="  ", subsequent_indent="  ")
        if self.unjudged:
            rest = "1 more demand builds" if self.unjudged == 1 else f"{self.unjudged} more demands build"
            lines.append(f"  {rest} on what is wrong above and could not be judged")
        if self.note:
            lines += textwrap.wrap(self.note, WIDTH, initial_indent="  ", subsequent_indent="  ")
        return "\n".join(lines)
