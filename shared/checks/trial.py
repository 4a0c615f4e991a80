"""Judging an answer, one demand after the other."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from shared.checks.comparing import difference
from shared.checks.report import Item
from shared.checks.traces import describe, is_stub, looks_like_our_fault, students_line

UNFINISHED = "a part of the answer still raises NotImplementedError"
AGAIN = "run that line by itself; other demands can't be judged before it works"


class StopChecking(Exception):
    """Ends a check: nothing that follows can be judged."""


class _LeaveGroup(Exception):
    """Ends a group of cases, one of which has failed."""


class Trial:
    """Collects what a check finds. A demand that fails doesn't keep the others from being judged.

    A demand is named by a text and is judged by one call or by many; it fails with its first case that does. Where the
    following lines need a demand to hold, `needs` and `call` end the check. A demand that an answer meets by doing
    nothing, such as "the arguments stay as they were", is `free`: it earns points only beside one that is not.

    What ends several groups alike, an exception of the same line or a forgotten `return`, is told in the first one; the
    others are not judged.

    Attributes:
        suspect: the group in which the check's own code raised, or "".
    """

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}
        self._group: tuple[str, str, int | None] | None = None
        self._ended_by: dict[Hashable, str] = {}  # what has ended a group → the first group that it has
        self.suspect = ""

    @property
    def items(self) -> list[Item]:
        """What was judged so far, in order."""
        return list(self._items.values())

    @property
    def attempted(self) -> bool:
        """Whether something was judged that an untouched stub does not reach."""
        return any(not item.guard for item in self._items.values())

    @property
    def has_failed(self) -> bool:
        """Whether a demand has failed so far."""
        return any(not item.passed for item in self._items.values())

    def that(
        self,
        item: str,
        condition: bool,
        *,
        expected: object,
        got: object,
        hint: str = "",
        see: int | None = None,
        free: bool = False,
    ) -> None:
        """Demand that `condition` holds; `expected` and `got` are shown if it does not.

        trial.that("all are positive", bool((y > 0).all()), expected="numbers above 0", got=y.min().item())
        """
        self._hold(item, condition, expected, got, hint, see, free=free)

    def needs(
        self, item: str, condition: bool, *, expected: object, got: object, hint: str = "", see: int | None = None
    ) -> None:
        """Like `that`, for what the following lines rely on: a failure ends the check, and a pass earns no points."""
        self._hold(item, condition, expected, got, hint, see, guard=True)

    def equal(
        self, item: str, got: Any, want: Any, *, hint: str = "", see: int | None = None, free: bool = False
    ) -> None:
        """Demand that the two are the same, as `shared.checks.comparing.difference` says with `exact`."""
        expected, found = difference(got, want, exact=True) or ("", "")
        self._hold(item, not expected, expected, found, hint, see, free=free)

    def close(
        self,
        item: str,
        got: Any,
        want: torch.Tensor | float,
        *,
        hint: str = "",
        see: int | None = None,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> None:
        """Like `equal`, but values may differ by atol + rtol·|want|; the defaults follow the dtype."""
        expected, found = difference(got, want, exact=False, rtol=rtol, atol=atol) or ("", "")
        self._hold(item, not expected, expected, found, hint, see)

    def call(self, item: str, function: Callable[[], Any], *, hint: str = "", see: int | None = None) -> Any:
        """Return function(); an exception of the answer's own fails the item and ends the check."""
        try:
            value = function()
        except (StopChecking, _LeaveGroup):
            raise
        except Exception as error:
            if is_stub(error) or looks_like_our_fault(error):
                raise
            if self._has_raised_before(error):
                raise _LeaveGroup from None
            self._hold(item, False, "no exception", describe(error), hint, see, guard=True)
        else:
            self._hold(item, True, "", "", hint, see, guard=True)
            return value

    def returned(self, item: str, got: Any, expected: object) -> None:
        """Demand that a call has returned something; of the groups that None ends only the first one is judged."""
        if got is not None:
            return
        if self._has_ended_another("None"):
            raise _LeaveGroup
        self._hold(item, False, expected, "None", "the function returned None: is `return` missing?", None)

    @contextmanager
    def group(self, item: str, *, hint: str = "", see: int | None = None, free: bool = False) -> Iterator[None]:
        """Judge many cases of one demand. The first case that fails ends the group and is named in the report; an
        exception of the answer's own fails it, too; `hint` and `see` serve the cases that have none.

        with trial.group("equals the brute force", see=2):
            for n in range(5):
                trial.equal(f"{n} elements", answer(n), brute_force(n))
        """
        self._group = (item, hint, see)
        try:
            yield
        except _LeaveGroup:
            return
        except StopChecking:
            raise
        except Exception as error:
            self._raised_in_group(error)
            return
        finally:
            self._group = None
        self._record(Item(item, passed=True, free=free))

    def _raised_in_group(self, error: Exception) -> None:
        item, hint, see = self._group or ("", "", None)
        if is_stub(error):
            if not self.attempted:
                raise error
            self._record(Item(item, False, expected="a finished answer", got=UNFINISHED, hint=hint, see=see))
        elif not looks_like_our_fault(error):
            if self._has_raised_before(error):
                return
            self._record(
                Item(item, False, expected="no exception", got=f"{describe(error)}\n(it raised)", hint=hint, see=see)
            )
        elif not self.has_failed:
            self.suspect = item
            raise error
        # else: these cases build on something that has failed already, so they cannot be judged

    def _has_raised_before(self, error: Exception) -> bool:
        """Whether the same line of the answer has ended another group with such an exception. Then no group's hint is
        about it. What the answer raises on purpose, and a warning, may have another reason each time.
        """
        line = students_line(error)
        if not line or isinstance(error, Warning) or line.partition(": ")[2].startswith("raise"):
            return False
        first = self._has_ended_another((type(error), line))
        if first:
            item, see = self._items[first], self._group[2]
            self._items[first] = replace(item, hint=AGAIN, see=see if see == item.see else None)
        return bool(first)

    def _has_ended_another(self, cause: Hashable) -> str:
        """The first group that this has ended, if it isn't the present one."""
        if self._group is None:
            return ""
        present = self._group[0]
        if present in self._items and not self._items[present].passed:  # told already, of another case
            return ""
        first = self._ended_by.setdefault(cause, present)
        return "" if first == present else first

    def _hold(
        self,
        item: str,
        passed: bool,
        expected: object,
        got: object,
        hint: str,
        see: int | None,
        guard: bool = False,
        free: bool = False,
    ) -> None:
        case = ""
        if self._group is not None:
            case = f"\n({item})"
            guard = False
            item = self._group[0]
            if not hint and not see:
                hint, see = self._group[1:]
        if passed:
            if not case:
                self._record(Item(item, passed=True, guard=guard, free=free))
            return
        self._record(Item(item, False, guard, str(expected), f"{got}{case}", hint, see))
        if case:
            raise _LeaveGroup
        if guard:
            raise StopChecking

    def _record(self, item: Item) -> None:
        earlier = self._items.get(item.name)
        if earlier is None or (earlier.passed and (earlier.guard or not item.passed)):
            self._items[item.name] = item
