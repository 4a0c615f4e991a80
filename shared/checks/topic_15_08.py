"""Checks of the exercises in 15-08, Distributed Primitives & Communication.

A check runs the answer on real processes, all its cases in one launch, smaller rings as groups of the world; what
they send is recorded below torch.distributed's functions (shared/lessons/topic_15_08/traffic.py), whichever of them
an answer uses. What runs on the ranks is named `*_on_ranks`.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from math import ceil, fsum, inf, isfinite, log2, nan, prod
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.checks.exercise import exercise
from shared.checks.ranks import Notes, ranks
from shared.checks.trial import Trial
from shared.lessons.topic_15_08.traffic import Call, collectives, recorded, rounds

_LATE = 0.15  # seconds that a rank comes later than the others, where a case asks for it
_TYPES = (torch.float64, torch.int64, torch.bfloat16, torch.float16)


def _numbers(rank: int, shape: Sequence[int], dtype: torch.dtype, salt: int = 0, limit: int = 50) -> Tensor:
    """Numbers that differ between ranks and that no narrower dtype holds, nor another of the same width; but for
    float64, sums of five are exact."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    whole = torch.randint(-limit, limit, tuple(shape), generator=generator)
    wide = {
        torch.float64: whole / 7,
        torch.float32: whole * (2**12 + 1),
        torch.bfloat16: whole.double() * 2.0**100,
        torch.float16: whole * 8 + whole.sign(),
        torch.int64: whole * (2**53 + 1),
    }
    return wide[dtype].to(dtype)


@dataclass(frozen=True)
class _Case:
    """One call of an answer in a group, given by its ranks in the world; None is the whole world, by default."""

    members: tuple[int, ...] | None
    argument: int | None = None  # the second one, `by` or `src`
    shape: tuple[int, ...] = (2, 3)
    dtype: torch.dtype = torch.float32
    late: tuple[int, ...] = ()  # ranks that come late
    overwrite: bool = False  # the caller overwrites the tensor as soon as the answer has returned
    world: int = 5

    @property
    def ring(self) -> tuple[int, ...]:
        return self.members or tuple(range(self.world))

    def other(self, rank: int, places: int) -> int:
        """The rank of the world that many places to the right of `rank`."""
        return self.ring[(self.ring.index(rank) + places) % len(self.ring)]

    def rows(self, rank: int) -> Tensor:
        """Three, of which the middle one is passed, so that what is written beside it shows."""
        return _numbers(rank, (3, *self.shape), self.dtype)

    def with_middle(self, rank: int, middle: Tensor) -> Tensor:
        """The rank's three rows, the middle one replaced."""
        rows = self.rows(rank)
        rows[1] = middle
        return rows

    def __str__(self) -> str:
        what = "" if self.argument is None else f", {self.argument}"
        where = f"in the group of ranks {self.members}" if self.members else f"in the world of {self.world} ranks"
        late = f", ranks {self.late} late" if self.late else ""
        return f"(tensor{what}) {where}, {self.dtype} of shape {self.shape}{late}"


def _cases_on_ranks(
    notes: Notes, answer: Callable, cases: list[_Case], each: Callable[[Call, dict], None] | None = None
) -> list[dict[str, Any]]:
    """What this rank had after each case. `each` is called for every message, with a dictionary for what it keeps."""
    rank, found, results = dist.get_rank(), [], []
    groups = {members: dist.new_group(members) for members in dict.fromkeys(case.members for case in cases) if members}
    for place, case in enumerate(cases):
        if rank not in case.ring:
            found.append({})
            continue
        notes.write(case, place)
        rows = case.rows(rank)
        memory = {rows.untyped_storage().data_ptr(), *(result.untyped_storage().data_ptr() for result in results)}
        given = [value for value in (case.argument, groups.get(case.members)) if value is not None]
        dist.barrier(group=groups.get(case.members))  # or who receives from anybody gets the next case's message
        kept = {"case": case, "notes": notes}
        if rank in case.late:
            kept["seen"] = notes.seen(f"both, {place}", 1.5 if each else _LATE)
        with recorded(named=True, each=each and partial(each, kept=kept, place=place)) as calls:
            got = answer(rows[1], *given)
        entry = {"rows": rows.clone(), "got": got, "calls": calls, "seen": kept.get("seen", True)}
        entry["kept"] = rows._version == 0 and torch.equal(rows, case.rows(rank))
        if isinstance(got, Tensor):
            entry["new"] = got.untyped_storage().data_ptr() not in memory
            entry["got"] = got.clone()
            results.append(got)
        found.append(entry)
        if case.overwrite:
            rows[1].fill_(77)
    return found


def _entries(cases: list[_Case], found: list[list[dict]]) -> list[tuple[str, _Case, int, dict[str, Any]]]:
    """(name, case, rank, what the rank had)."""
    return [(f"rank {rank}, {case}", case, rank, found[rank][i]) for i, case in enumerate(cases) for rank in case.ring]


def _hold_no_collective(trial: Trial, entries: list) -> None:
    for name, _, _, entry in entries:
        others = [call.name for call in collectives(entry["calls"])]
        trial.that(name, not others, expected="no collective", got=f"{others[:5]}")


_GROUP = "(In a group? In the whole world your function came to its end, so what is different here?)"
_RINGS = (None, (0, 1, 3, 4), (1, 2, 4), (0, 3), (2,))

# ---- 15-08.1


@exercise("15-08.1", "Ring shift", points=10, demands=4)
def ring_shift(trial: Trial, answer: Any) -> None:
    """`answer(tensor, by, group)` returns the tensor from `by` places to the left."""
    cases = []
    for ring in _RINGS:
        n = len(ring or range(5))
        cases += [_Case(ring, by) for by in sorted({0, 1, -1, 2, -n, n + 1, -23})]
    cases += [_Case(None, by, (3, 1), dtype) for dtype in _TYPES for by in (1, 5)]
    cases += [_Case(None, 1, ()), _Case(None, 1, late=(4,)), _Case(None, 1, late=(4,), overwrite=True)]
    hint = f"do all of them wait in the same direction, or for a message that was started and dropped? {_GROUP}"
    see = lambda case: 2 if "in the group" in case else 3  # noqa: E731
    found = ranks(trial, _cases_on_ranks, 5, answer, cases, hint=hint, see=see, places=2)
    entries = _entries(cases, found)

    def hold(overwritten: bool) -> None:
        for name, case, rank, entry in entries:
            if case.overwrite == overwritten:
                trial.equal(name, entry["got"], case.rows(case.other(rank, -case.argument))[1])

    with trial.group("every rank has the tensor from `by` places to its left", hint="whose tensor is it?", see=1):
        hold(overwritten=False)
    with trial.group("one message, straight to its rank, and nothing else", hint="who needs the tensor?", see=1):
        for name, case, rank, entry in entries:
            to = case.other(rank, case.argument)
            sent = [(call.name, call.peer, call.size) for call in entry["calls"] if call.name != "recv"]
            wanted = [("send", to, prod(case.shape) * case.dtype.itemsize)] if to != rank else []
            trial.equal(f"call, rank and bytes, {name}", sent, wanted)
    with trial.group("the result is a new tensor, and the argument stays as it is", hint="what is written?", see=4):
        for name, _, _, entry in entries:
            trial.that(name, entry["kept"], expected="an argument that is only read", got="one that was written to")
            got = "memory of the argument, or of an earlier result"
            trial.that(name, entry.get("new", False), expected="memory of its own", got=got)
    with trial.group("the tensor may be overwritten at once", hint="has its message left when you return?", see=3):
        hold(overwritten=True)


# ---- 15-08.2

_ROOTS = {2: (0, 1), 4: (0, 3), 1: (0,), 3: (0, 1, 2), 5: (0, 2, 4), 6: (1, 5), 7: (0, 4, 6)}  # by size of the group


def _broadcasts() -> list[_Case]:
    """Powers of two first: the first case that hangs tells which hint will help."""
    cases = [_Case(tuple(range(7 - n, 7)), src, (5,), world=7) for n, roots in _ROOTS.items() for src in roots]
    cases += [_Case(None, None, (5,), world=7), _Case((4, 5, 6), 1, ())]
    cases += [_Case((4, 5, 6), 1, (3, 1), dtype) for dtype in _TYPES]
    return [*cases, _Case((2, 3, 4, 5, 6), 0, late=(2,))]


def _broadcast_stand_in(tensor: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> int:
    """PyTorch's broadcast."""
    dist.broadcast(tensor, group=group, group_src=src)
    return 0


@exercise(
    "15-08.2",
    "Tree broadcast",
    points=15,
    demands=3,
    stand_in=lambda: _broadcast_stand_in,
    stand_in_name="dist.broadcast",
)
def tree_broadcast(trial: Trial, answer: Any) -> None:
    """`answer(tensor, src, group)` broadcasts in place in ceil(log2 N) rounds and returns the messages sent."""
    cases = _broadcasts()
    hints = {str(case): (1 if case.argument else 2) if len(case.ring) in (2, 4) else 3 for case in cases}
    hint = "compare, for one pair of ranks, the round in which the one sends with that in which the other receives"
    see = lambda text: hints.get(text, 3)  # noqa: E731
    found = ranks(trial, _cases_on_ranks, 7, answer, cases, hint=hint, see=see, places=4)
    entries = _entries(cases, found)

    def root(case: _Case) -> int:
        return case.ring[case.argument or 0]

    hint = "who sends to this rank, in which round, and does it have the tensor by then?"
    with trial.group("the root's tensor on every rank, in place", hint=hint, see=2):
        for name, case, rank, entry in entries:
            see = 1 if case.argument else 2  # another root than place 0, or the tree itself
            trial.equal(name, entry["rows"], case.with_middle(rank, case.rows(root(case))[1]), hint=hint, see=see)
    hint = "who could send, and stands idle, in your second round?"
    with trial.group("sends and receives, in ceil(log2 N) rounds", hint=hint, see=2, free=True):
        _hold_no_collective(trial, entries)
        for i, case in enumerate(cases):
            messages = rounds([found[rank][i].get("calls", []) for rank in range(7)], root(case))
            first = {to: turn for turn, _, to in sorted(messages, reverse=True) if to != root(case)}
            took, most = 1 + max(first.values(), default=-1), ceil(log2(len(case.ring)))
            got = f"{took} rounds: {', '.join(f'{a} to {b}' for _, a, b in messages)}"
            trial.that(f"{case}", took <= most, expected=f"at most {most} rounds", got=got)
    with trial.group("returns the messages it sent", hint="what does this rank do to be counted? Others don't matter"):
        for name, _, _, entry in entries:
            trial.equal(name, entry["got"], sum(call.name == "send" for call in entry["calls"]))


# ---- 15-08.3


def _both_ways(call: Call, kept: dict[str, Any], place: int) -> None:
    """Where a rank is late, rank 0 leaves a sign when it has started a message each way: that rank waits for it."""
    if call.name == "send" and kept["case"].late and dist.get_rank() == 0:
        kept.setdefault("to", set()).add(call.peer)
        if len(kept["to"]) == 2:
            kept["notes"].leave(f"both, {place}")


@exercise("15-08.3", "A ring in both directions", points=20, demands=4)
def two_way_ring(trial: Trial, answer: Any) -> None:
    """`answer(tensor, group)` sums in place; half of the tensor goes one way around the ring, half the other."""
    cases = [_Case(ring, None, (shape,)) for ring in _RINGS for shape in (60, 37)]
    cases += [_Case(None, None, (4, 25)), _Case(None, None, (3,)), _Case((1, 2, 4), None, ())]
    cases += [_Case((1, 2, 4), None, (2, 13), dtype) for dtype in _TYPES]
    cases.append(_Case(None, None, (41,), late=(4,)))
    hint = f"does each rank start all messages of a step before it waits for one? {_GROUP}"
    broken = "does each rank send, in each step and each way, the chunk that its neighbour makes room for? "
    broken += "Compare the chunk numbers of two neighbours on paper"
    how = {"hint": hint, "see": 3, "broken": (broken, 2)}
    found = ranks(trial, _cases_on_ranks, 5, answer, cases, _both_ways, **how)
    entries = _entries(cases, found)

    with trial.group("the sum on every rank, in place", hint="follow one chunk of each half around the ring", see=2):
        for name, case, rank, entry in entries:
            total = sum(case.rows(other)[1] for other in case.ring)
            trial.close(name, entry["rows"], case.with_middle(rank, total))
    with trial.group("messages to the two neighbours only", hint="with whom does a rank of a ring talk?", free=True):
        _hold_no_collective(trial, entries)
        for name, case, rank, entry in entries:
            neighbours = {case.other(rank, 1), case.other(rank, -1)}
            others = sorted({call.peer for call in entry["calls"] if call.name == "send"} - neighbours)
            trial.that(name, not others, expected=f"messages to {sorted(neighbours)}", got=f"messages to {others}")
    hint = "what goes to the left, what to the right?"
    with trial.group("no link carries more than half of the plain ring's", hint=hint, see=1, free=True):
        for name, case, _, entry in entries:
            n, sent = len(case.ring), [call for call in entry["calls"] if call.name == "send"]
            half = 2 * (n - 1) * ceil(ceil(prod(case.shape) / 2) / n) * case.dtype.itemsize
            most = half * (2 if n == 2 else 1)  # of two ranks, both neighbours are the same
            for peer in {call.peer for call in sent}:
                size = sum(call.size for call in sent if call.peer == peer)
                trial.that(f"to {peer}, {name}", size <= most, expected=f"at most {most} bytes", got=f"{size} bytes")
    with trial.group("in 2(N-1) steps, a message each way in each", hint="what could travel at the same time?", see=3):
        for name, case, _, entry in entries:
            most = 4 * (len(case.ring) - 1)
            sent = sum(call.name == "send" for call in entry["calls"])
            trial.that(name, sent <= most, expected=f"at most {most} messages", got=f"{sent}")
            expected = "rank 0 sends both ways in its first step, before anything has come from the late rank"
            trial.that(f"{case}", entry["seen"], expected=expected, got="one way, and the other has to wait")


# ---- 15-08.4

_SIZES = (3, 5, 2, 1)  # of groups of the last ranks of five


@dataclass(frozen=True)
class _Training:
    """A case of the early stop: the losses of each rank of the group, and the patience."""

    losses: tuple[tuple[float, ...], ...]
    patience: int
    late: bool = False  # the first rank comes late

    def outcome(self) -> tuple[list[float], int]:
        """The means, and the steps that are taken at most on a rank."""
        means: list[float] = []
        steps = max(map(len, self.losses))
        for step in range(steps):
            finite = [mine[step] for mine in self.losses if step < len(mine) and isfinite(mine[step])]
            means += [fsum(finite) / len(finite)] if finite else []
            lowest = min(range(len(means)), key=means.__getitem__, default=0)  # the first of them
            if finite and len(means) - 1 - lowest == self.patience:
                return means, step + 1
        return means, steps

    def __str__(self) -> str:
        return f"losses {self.losses}, patience {self.patience}"


def _trainings(size: int) -> list[_Training]:
    rng = random.Random(size)
    alike = [  # losses of each rank, patience
        ((3.0, 2.0, 2.0, 2.0, 1.0), 2),  # as low as before is not lower
        ((3.0, 4.0, 2.0, 5.0, 6.0, 1.0, 7.0), 2),
        ((5.0, 6.0, 4.0), 1),
        ((2.0, nan, -inf, 3.0, nan, 1.5), 2),  # steps without a mean don't count
        ((nan, nan, nan), 1),
        ((), 1),
        ((-1.0, -2.0, 1.5, -1.5, -3.0), 2),
        (tuple(2.0**30 * factor for factor in (4, 2, 3, 2.5, 1)), 2),
        ((*(1 - step * 2.0**-20 for step in range(6)), 2.0, 0.5), 2),
        (tuple(64.0 - step for step in range(24)), 1),
    ]
    cases = [_Training((losses,) * size, patience) for losses, patience in alike]
    falling = tuple(tuple(8.0 - step + rank / 4 for step in range(4)) for rank in range(size))
    cases += [
        _Training(falling, 2),
        _Training(tuple(mine[: 1 + rank % 3] for rank, mine in enumerate(falling)), 3),
        _Training((*((),) * (size - 1), (4.0, 3.0, 5.0)), 3),
        _Training(((0.0, 1.0, 0.0), *((),) * (size - 1)), 3),
        _Training(tuple((nan, 3.0) if rank else (2.0, inf) for rank in range(size)), 2),
        # one rank improves, the mean doesn't, and vice versa
        _Training(tuple(tuple(1.0 + 9 * s if rank else 9.0 - s for s in range(6)) for rank in range(size)), 2),
        _Training(tuple(tuple(20.0 - s if rank else 1.0 + s / 4 for s in range(6)) for rank in range(size)), 2),
        _Training(((1.0,),) * size, 2, late=size == 5),
    ]
    for _ in range(4):
        draw = [[rng.choice([nan, *(k / 4 for k in range(40))]) for _ in range(rng.randrange(8))] for _ in range(size)]
        cases.append(_Training(tuple(map(tuple, draw)), rng.randrange(1, 4)))
    return cases


class _Steps:
    """An iterator that counts the steps which were really taken."""

    def __init__(self, losses: Sequence[float]) -> None:
        self.taken = 0
        self._losses = iter(losses)

    def __iter__(self) -> Iterator[float]:
        return self

    def __next__(self) -> float:
        loss = next(self._losses)
        self.taken += 1
        return loss


def _in_groups_on_ranks(notes: Notes, cases: Callable[[int], list], call: Callable) -> dict[tuple[int, int], Any]:
    """(size, number of the case) → call(case, place, group), where the world of five is the default."""
    rank, found = dist.get_rank(), {}
    groups = {size: dist.new_group(list(range(5 - size, 5))) for size in _SIZES}
    for size in _SIZES:
        place = rank - (5 - size)
        for number, case in enumerate(cases(size) if place >= 0 else ()):
            notes.write(f"{size} ranks, {case}", 1000 * _SIZES.index(size) + number)
            dist.barrier(group=groups[size])
            if case.late and place == 0:
                time.sleep(_LATE)
            found[size, number] = call(case, place, () if size == 5 else (groups[size],))
    return found


def _by_place(cases: Callable[[int], list], found: list[dict]) -> Iterator[tuple[str, Any, int, int, Any]]:
    """(name, case, size of the group, place in it, what was found)."""
    for size in _SIZES:
        for number, case in enumerate(cases(size)):
            for place in range(size):
                yield f"place {place} of {size}, {case}", case, size, place, found[5 - size + place][size, number]


def _train_on_ranks(notes: Notes, answer: Callable) -> dict[tuple[int, int], Any]:
    def train(case: _Training, place: int, group: tuple) -> tuple[Any, int, list[Call]]:
        steps = _Steps(case.losses[place])
        with recorded() as calls:
            said = answer(steps, case.patience, *group)
        return said, steps.taken, calls

    return _in_groups_on_ranks(notes, _trainings, train)


@exercise("15-08.4", "Find the deadlock", points=20, demands=3)
def train_until(trial: Trial, answer: Any) -> None:
    """`answer(steps, patience, group)` trains until the mean loss no longer falls; all ranks stop together."""
    hint = "in this case, how often does each rank come to the call that it waits in?"
    found = ranks(trial, _train_on_ranks, 5, answer, hint=hint, see=1)
    entries = list(_by_place(_trainings, found))
    hint = "work this case out by hand: which losses does each mean have, and after which step do all ranks stop?"
    with trial.group("the means, on every rank, until they stop falling", hint=hint, see=3):
        for name, case, _, _, (said, _, _) in entries:
            trial.close(name, said, case.outcome()[0], rtol=1e-6, atol=1e-6)
    with trial.group("no rank takes a step in vain", hint="when is it known that this was the last step?"):
        for name, case, _, place, (_, taken, _) in entries:
            trial.equal(f"steps taken, {name}", taken, min(len(case.losses[place]), case.outcome()[1]))
    with trial.group(
        "one collective a step, one at the end, nothing else",
        hint="what must be known each step? (An object takes two collectives: its size, then its bytes.)",
        see=3,
        free=True,
    ):
        for name, case, _, _, (_, _, calls) in entries:
            most = case.outcome()[1] + 1
            right = len(calls) <= most and len(collectives(calls)) == len(calls)
            got = f"{len(calls)} calls: {[call.name for call in calls[:9]]}"
            trial.that(name, right, expected=f"at most {most} collectives", got=got)


# ---- 15-08.5


@dataclass(frozen=True)
class _Grads:
    """A case of the averaging: shapes of the gradients, None where there is none."""

    shapes: tuple[tuple[int, ...] | None, ...]
    limit: int
    dtype: torch.dtype = torch.float32
    late: bool = False

    def grad(self, rank: int, number: int, size: int) -> Tensor | None:
        """Multiples of `size`: their mean is exact. The memory layout differs from rank to rank."""
        shape = self.shapes[number]
        if shape is None:
            return None
        grad = size * _numbers(rank, shape, self.dtype, salt=number, limit=8)
        if len(shape) == 4 and rank % 2:
            return grad.contiguous(memory_format=torch.channels_last)
        return grad.t().contiguous().t() if len(shape) == 2 and rank % 2 == 0 else grad

    def means(self, size: int) -> list[Tensor | None]:
        numbers = range(len(self.shapes))
        grads = [[self.grad(rank, number, size) for rank in range(size)] for number in numbers]
        return [None if of_all[0] is None else sum(of_all) / size for of_all in grads]

    @property
    def buckets(self) -> list[int]:
        """Bytes of the buckets that the task asks for."""
        found: list[int] = []
        for shape in self.shapes:
            if shape is not None:
                size = self.dtype.itemsize * prod(shape)
                if found and found[-1] + size <= self.limit:
                    found[-1] += size
                else:
                    found.append(size)
        return found

    def __str__(self) -> str:
        return f"bucket_bytes {self.limit}, {self.dtype} of shapes {self.shapes}"


def _averages(size: int) -> list[_Grads]:
    shapes = ((10, 10), (3,), None, (7, 2), (2, 3, 2, 2), (1,), (), (20, 3), (5,))
    cases = [_Grads(shapes, limit) for limit in (10**6, 1, 399, 400, 411, 412)]
    cases += [_Grads(shapes, 900, dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)]
    cases += [_Grads((), 100), _Grads((None, None), 100), _Grads((None, (2, 3)), 24), _Grads(((4,), None), 15)]
    rng = random.Random(8)
    for _ in range(8):
        sizes = [(rng.randrange(1, 12),) if rng.random() < 0.85 else None for _ in range(rng.randrange(1, 9))]
        cases.append(_Grads(tuple(sizes), 4 * rng.randrange(1, 30)))
    return [*cases, _Grads(shapes, 200, late=True)][:: 1 if size == 3 else 4]


def _average_on_ranks(notes: Notes, answer: Callable) -> dict[tuple[int, int], Any]:
    def average(case: _Grads, place: int, group: tuple) -> dict[str, Any]:
        size = dist.get_world_size(*group)
        parameters = []
        for number, shape in enumerate(case.shapes):
            parameters.append(nn.Parameter(torch.zeros((2,) if shape is None else shape, dtype=case.dtype)))
            parameters[-1].grad = case.grad(place, number, size)
            parameters[-1].requires_grad_(number % 3 != 1)  # frozen after backward
        held = [(p.grad, 0 if p.grad is None else p.grad.data_ptr()) for p in parameters]
        with recorded() as calls:
            said = answer(iter(parameters), case.limit, *group)
        same = all(
            p.grad is h and (h is None or h.data_ptr() == at) for p, (h, at) in zip(parameters, held, strict=True)
        )
        grads = [p.grad if p.grad is None else p.grad.clone() for p in parameters]
        return {"grads": grads, "same": same, "said": said, "calls": calls}

    return _in_groups_on_ranks(notes, _averages, average)


def _in_one_bucket(parameters: Any, bucket_bytes: int, group: dist.ProcessGroup | None = None) -> int:
    """All gradients at once, whatever bucket_bytes says."""
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad in grads:
        grad.copy_(flat[: grad.numel()].view_as(grad) / dist.get_world_size(group))
        flat = flat[grad.numel() :]
    return 1


@exercise(
    "15-08.5",
    "Bucketed averaging",
    points=15,
    demands=4,
    stand_in=lambda: _in_one_bucket,
    stand_in_name="one bucket for all",
)
def average_gradients(trial: Trial, answer: Any) -> None:
    """`answer(parameters, bucket_bytes, group)` averages gradients in buckets and returns how many there were."""
    hint = "do all ranks make the same buckets, whatever the layout of their gradients?"
    found = ranks(trial, _average_on_ranks, 5, answer, hint=hint, see=1)
    entries = list(_by_place(_averages, found))
    with trial.group(
        "every gradient is the mean over the ranks",
        hint="who shares this sum, is it complete when you read it, and which piece gets into which p.grad?",
        see=2,
    ):
        for name, case, size, _, entry in entries:
            for number, mean in enumerate(case.means(size)):
                if mean is not None:
                    trial.close(f"gradient {number}, {name}", entry["grads"][number], mean)
    with trial.group("p.grad is the object it was, tensor or None", hint="somebody else may hold p.grad", free=True):
        for name, _, _, _, entry in entries:
            trial.that(name, entry["same"], expected="the same object, changed in place", got="another one")
    with trial.group("one all_reduce for each bucket", hint="fill the buckets on paper for these shapes", see=1):
        for name, case, _, _, entry in entries:
            sent = [(call.name.replace("_", ""), call.size) for call in entry["calls"]]
            wanted = [("allreduce", size) for size in sorted(case.buckets)]
            got = sorted((name.removesuffix("coalesced"), size) for name, size in sent)
            trial.that(f"calls and bytes, {name}", got == wanted, expected=wanted, got=got)
    with trial.group("returns the number of buckets", hint="what do you count?"):
        for name, case, _, _, entry in entries:
            trial.equal(name, entry["said"], len(case.buckets))


# ---- 15-08.6

_NEAR = 1e-6  # float32 will do


@dataclass(frozen=True)
class _Backward:
    """A case of the cut: when gradients are complete (s), their bytes, the ranks, and their links."""

    ready: tuple[float, ...]
    sizes: tuple[int, ...]
    ranks: int
    alpha: float
    beta: float

    def spans(self, counts: Sequence[int]) -> list[tuple[int, float, float]]:
        """The buckets of so many gradients, and start and end of their all-reduces."""
        found, first, free = [], 0, 0.0
        for count in counts:
            start = max(free, self.ready[first + count - 1])
            size = sum(self.sizes[first : first + count])
            free = start + 2 * (self.ranks - 1) * (self.alpha + size / self.ranks / self.beta)
            found.append((count, start, free))
            first += count
        return found

    def earliest(self) -> float:
        """The end of the last all-reduce, by trying every cut."""
        n = len(self.sizes)
        cuts = [(0, *marks, n) for k in range(n) for marks in combinations(range(1, n), k)]
        return min(self.spans([b - a for a, b in pairwise(marks)])[-1][2] for marks in cuts)

    def __str__(self) -> str:
        times = ", ".join(f"{t:.3g}" for t in self.ready[:10])
        return f"ready ({times}), sizes {self.sizes[:10]}, {self.ranks} ranks, alpha {self.alpha:g}, beta {self.beta:g}"


def _backwards() -> list[_Backward]:
    rng = random.Random(6)
    even = tuple(k / 100 for k in range(1, 10))
    cases = [
        _Backward(even[:8], (1_000_000,) * 8, 64, 1e-3, 1e10),  # latency: one bucket
        _Backward(even[:8], (1_000_000,) * 8, 2, 1e-5, 1e9),  # small steps pay: the last bucket is short
        _Backward(even, (10_000_000,) * 9, 2, 1e-6, 1e9),  # each alone
        _Backward((0.01, 0.01, 0.02, 0.02, 0.02, 0.04), (4_000_000,) * 6, 3, 1e-5, 1e9),
    ]
    for n in (1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9):
        sizes = tuple(rng.choice([4, 4_000, 400_000, 4_000_000]) * rng.randrange(1, 10) for _ in range(n))
        links = rng.choice([1, 2, 2, 3, 8, 64]), 10 ** rng.uniform(-6, -3), 10 ** rng.uniform(8, 10)
        cases.append(_Backward(tuple(sorted(rng.uniform(0.0, 0.02) for _ in range(n))), sizes, *links))
    for _ in range(12):  # many buckets, of many lengths
        sizes = tuple(rng.randrange(1, 60) * 50_000 for _ in range(10))
        ready = tuple(sorted(rng.uniform(0.0, 0.03) for _ in range(10)))
        cases.append(_Backward(ready, sizes, 3, 10 ** rng.uniform(-6, -3.5), 1e9))
    return cases


def _uncut(ready: list[float], sizes: list[int], ranks: int, alpha: float, beta: float) -> list[tuple]:
    """All gradients in one bucket."""
    return _Backward(tuple(ready), tuple(sizes), ranks, alpha, beta).spans([len(sizes)])


@exercise(
    "15-08.6", "Cut the buckets", points=20, demands=2, stand_in=lambda: _uncut, stand_in_name="all in one bucket"
)
def cut_buckets(trial: Trial, answer: Any) -> None:
    """`answer(ready, sizes, ranks, alpha, beta)` returns (gradients, start, end) of the buckets that end earliest."""

    def ask(case: _Backward) -> Any:
        return answer(list(case.ready), list(case.sizes), case.ranks, case.alpha, case.beta)

    found = [(case, ask(case)) for case in _backwards()]
    hint = "draw your buckets below the times of ready"
    with trial.group("a list of tuples with all gradients, start and end as the model says", hint=hint, see=1):
        for case, said in found:
            right = isinstance(said, list) and all(isinstance(t, tuple) and len(t) == 3 for t in said)
            counts = [t[0] for t in said] if right else []
            whole = all(isinstance(count, Integral) and count > 0 for count in counts)
            expected = f"a list of tuples (int, float, float) with {len(case.sizes)} gradients in all"
            right = right and whole and sum(counts) == len(case.sizes)
            trial.that(f"{case}", right, expected=expected, got=said, hint="add up the gradients")
            for number, (got, want) in enumerate(zip(said, case.spans(counts), strict=True)):
                times = [float(moment) for moment in got[1:]]
                trial.close(f"bucket {number}, {case}", times, list(want[1:]), rtol=_NEAR, atol=1e-9)
        trial.equal("no gradient", answer([], [], 2, 1e-5, 1e9), [], hint="what do you return where there is none?")
    hint = "which cut is better here, and why?"
    with trial.group("the last bucket ends as early as it can, found in less than a second", hint=hint, see=2):
        for case, said in found:
            trial.close(f"end of the last bucket, {case}", float(said[-1][2]), case.earliest(), rtol=_NEAR, atol=1e-9)
        rng = random.Random(40)
        for n in range(16, 41, 2):  # what doubles with each fails before it takes for ever
            sizes = tuple(rng.randrange(1, 10) * 100_000 for _ in range(n))
            many = _Backward(tuple(sorted(rng.uniform(0, 0.05) for _ in range(n))), sizes, 4, 1e-5, 1e9)
            began = time.perf_counter()
            ask(many)
            took = time.perf_counter() - began
            slow = {"hint": "what do you work out again and again?", "see": 3}
            trial.that(f"{n} gradients", took < 1, expected="less than 1 s", got=f"{took:.1f} s", **slow)
            if took >= 1:  # reached only where this item is left out
                break
