"""The table of rules, which each rule enters itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from course.rules.notebook import Notebook

Complaint = tuple[str, str]  # (cell id or "-", message)
Check = Callable[[Notebook], Iterator[Complaint]]


@dataclass(frozen=True)
class Rule:
    """A check under its name; it is not applied to topics whose status is in `not_for`."""

    check: Check
    not_for: tuple[str, ...]


RULES: dict[str, Rule] = {}


def rule(name: str, *, not_for: tuple[str, ...] = ()) -> Callable[[Check], Check]:
    """Enter a function of a notebook, which yields complaints, into the table.

    not_for: statuses of syllabus.toml; "draft" for what is asked of finished work only.
    """

    def enter(check: Check) -> Check:
        RULES[name] = Rule(check, not_for)
        return check

    return enter
