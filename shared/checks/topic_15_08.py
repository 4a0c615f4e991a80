"""Checks of the exercises in 15-08, Distributed Primitives & Communication.

A check runs the answer on real processes, all its cases in one launch, smaller rings as groups of the world; what
they send is recorded below torch.distributed's functions (shared/traffic.py), whichever of them an answer uses. What
runs on the ranks is named `*_on_ranks`.
"""

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, fsum, inf, isfinite, log2, nan, prod
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared.checks.exercise import exercise
from shared.checks.ranks import Notes, ranks
from shared.checks.trial import Trial
from shared.traffic import Call, collectives, recorded, rounds

_LATE = 0.15  # seconds that one rank comes later than the others, where a case asks for it

# ---------------------------------------------------------------- numbers and texts


def _numbers(
    rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float32, salt: int = 0, limit: int = 50
) -> Tensor:
    """Numbers that differ between ranks and that no narrower dtype holds, nor another of the same width; but for
    float64, sums of five are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    whole = torch.randint(-limit, limit, tuple(shape), generator=generator)
    wide = {
        torch.float64: whole / 7,
        torch.float32: whole * (2**12 + 1),
        torch.bfloat16: whole.double() * 2.0**100,
        torch.float16: whole * 8 + whole.sign(),
        torch.int64: whole * (2**53 + 1),
        torch.int32: whole * (2**22 + 1),
        torch.complex64: whole * (4097 + 2j),
    }
    return wide.get(dtype, whole % 2 if dtype == torch.bool else whole).to(dtype)


def _shown(calls: Sequence[Call]) -> str:
    counts = Counter(f"{call.name} of {call.size} bytes" for call in calls)
    return ", ".join(f"{count} times {call}" if count > 1 else call for call, count in counts.items()) or "none"


def _told(got: Any, want: Tensor, before: Tensor | None = None) -> dict[str, Any]:
    """A hint for numbers that are nearly right or what they were before; for all others the group's own serves."""
    if not isinstance(got, Tensor) or got.shape != want.shape:
        return {}
    error, size = ((t.to(torch.complex128) - o).abs() for t, o in ((got, want.to(torch.complex128)), (want, 0)))
    if got.dtype != want.dtype or (want.numel() and bool(error.max() < 0.01 * size.max())):
        return {"hint": "follow the dtype: what is sent, and what is returned?"}
    if before is not None and torch.equal(got, before):
        return {"hint": "these are the old numbers of this rank: has nothing arrived, or was it written elsewhere?"}
    return {}


def _snapshot(value: Any) -> Any:
    """The value of now: what arrives later is not in it."""
    return value.clone() if isinstance(value, Tensor) else value


def _apart(a: Any, others: Sequence[Tensor]) -> bool:
    """Whether the tensor `a` has memory that none of the others uses."""
    if not isinstance(a, Tensor):
        return False
    used = {other.untyped_storage().data_ptr() for other in others if other.numel()}
    return a.untyped_storage().data_ptr() not in used


def _hold_memory(trial: Trial, entries: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """In a group on new results, with its hint for those that are what was passed."""
    for name, entry in entries:
        trial.that(name, entry["own"], expected="memory of its own", got="memory of a tensor that was passed")
    for name, entry in entries:
        expected, got = "memory of its own", "memory of the result of an earlier call"
        trial.that(name, entry["fresh"], expected=expected, got=got, hint="what does one call leave to the next?")


# ---------------------------------------------------------------- 15-08.1


@dataclass(frozen=True)
class _Shift:
    """A case of the ring shift: the ranks in the ring (None: the world of five, by default), and what moves."""

    members: tuple[int, ...] | None
    by: int
    shape: tuple[int, ...] = (2, 3)
    dtype: torch.dtype = torch.float32
    late: bool = False  # the last rank comes late
    overwrite: bool = False  # the caller overwrites what it passed, as soon as the answer has returned

    @property
    def ring(self) -> tuple[int, ...]:
        return self.members or tuple(range(5))

    def __str__(self) -> str:
        where = "the world of five ranks" if self.members is None else f"the group of ranks {self.members}"
        late = ", the last rank late" * self.late
        return f"by {self.by} in {where}, {self.dtype} of shape {self.shape}{late}"

    def other(self, rank: int, places: int) -> int:
        """The rank of the world that many places to the right of `rank`."""
        return self.ring[(self.ring.index(rank) + places) % len(self.ring)]


_RINGS = (None, (0, 1, 3, 4), (1, 2, 4), (0, 3), (2,))
_TYPES = (
    (torch.float64, ()),
    (torch.int64, (3,)),
    (torch.bfloat16, (1, 2, 2)),
    (torch.float16, (4,)),
    (torch.bool, (2, 1)),
    (torch.complex64, (1,)),
    (torch.uint8, (1, 3)),
)


def _shifts() -> list[_Shift]:
    cases = []
    for ring in _RINGS:
        n = len(ring or range(5))
        cases += [_Shift(ring, by) for by in sorted({0, 1, -1, 2, -n, n + 1, -23})]
    cases += [_Shift(None, 1, shape, dtype) for dtype, shape in _TYPES]
    cases += [_Shift(None, 5, shape, dtype) for dtype, shape in _TYPES[:2]]
    return [*cases, _Shift(None, 1, late=True), _Shift(None, 1, late=True, overwrite=True)]


def _shift_on_ranks(notes: Notes, answer: Callable, cases: list[_Shift]) -> list[dict[str, Any]]:
    rank, found, alive = dist.get_rank(), [], []
    groups = {members: dist.new_group(list(members)) for members in _RINGS if members}
    for place, case in enumerate(cases):
        if rank not in case.ring:
            found.append({})
            continue
        notes.write(case, place)
        mine = _numbers(rank, case.shape, case.dtype)
        before, version = mine.clone(), mine._version
        dist.barrier(group=groups.get(case.members))  # or who receives from anybody gets the next case's message
        if case.late and rank == case.ring[-1]:
            time.sleep(_LATE)
        with recorded(named=True) as calls:
            got = answer(mine, case.by, groups[case.members]) if case.members else answer(mine, case.by)
        kept = torch.equal(mine, before) and mine._version == version  # also where the old numbers are written back
        entry = {"got": _snapshot(got), "kept": kept, "calls": calls}
        entry["own"], entry["fresh"] = _apart(got, [mine]), _apart(got, alive)
        found.append(entry)
        alive.append(got if isinstance(got, Tensor) else mine)
        if case.overwrite:
            mine.fill_(77)
    return found


@exercise("15-08.1", "Ring shift", points=10, demands=6)
def ring_shift(trial: Trial, answer: Any) -> None:
    """`answer(tensor, by, group)` returns the tensor from `by` places to the left."""
    cases = _shifts()
    found = ranks(
        trial,
        _shift_on_ranks,
        5,
        answer,
        cases,
        hint="do all of them wait in the same direction, or for a message that was started and dropped?",
        see=3,
    )
    entries = [(case, rank, found[rank][i]) for i, case in enumerate(cases) for rank in case.ring]
    with trial.group(
        "every rank has the tensor from `by` places to its left",
        hint="draw the ring and follow one tensor: whose is it, and has it arrived when you return?",
        see=1,
    ):
        for case, rank, entry in entries:
            if not case.overwrite:
                want = _numbers(case.other(rank, -case.by), case.shape, case.dtype)
                told = _told(entry["got"], want)
                if case.other(rank, case.by) == rank and not told:
                    told = {"hint": "what do you return where nothing moves?", "see": 4}
                trial.equal(f"rank {rank}, {case}", entry["got"], want, **told)
    with trial.group("no collective", hint="which call of yours do all ranks take part in?", free=True):
        for case, rank, entry in entries:
            calls = collectives(entry["calls"])
            trial.that(f"rank {rank}, {case}", not calls, expected="messages only", got=_shown(calls))
    with trial.group("one message, straight to its rank, none to itself", hint="who needs the tensor?", see=1):
        for case, rank, entry in entries:
            to = case.other(rank, case.by)
            sent = [(call.peer, call.size) for call in entry["calls"] if call.name == "send"]
            want = [(to, prod(case.shape) * case.dtype.itemsize)] if to != rank else []
            trial.equal(f"(rank, bytes) of what rank {rank} sends, {case}", sent, want)
    with trial.group("the tensor passed in stays as it was", hint="where do you put what arrives?", free=True):
        for case, rank, entry in entries:
            trial.that(f"rank {rank}, {case}", entry["kept"], expected="never written to", got="written to")
    with trial.group("the result is a new tensor", hint="look at what you return when nothing moves", see=4):
        _hold_memory(trial, [(f"rank {rank}, {case}", entry) for case, rank, entry in entries])
    with trial.group("the tensor may be overwritten at once", hint="has its message left when you return?", see=3):
        for case, rank, entry in entries:
            if case.overwrite:
                trial.equal(f"rank {rank}, {case}", entry["got"], _numbers(case.other(rank, -case.by), case.shape))


# ---------------------------------------------------------------- 15-08.2


_ROOTS = {
    1: (0,),
    2: (0, 1),
    3: (0, 1, 2),
    4: (0, 3),
    5: (0, 2, 4),
    6: (1, 5),
    7: (0, 4, 6),
}  # by size of the group
_WORLD = 7


@dataclass(frozen=True)
class _Broadcast:
    """A case of the broadcast in a group of the last `count` of seven ranks (0: the world and rank 0, by default)."""

    count: int
    src: int = 0
    shape: tuple[int, ...] = (5,)
    dtype: torch.dtype = torch.float32
    late: bool = False  # all but the root come late, and the root overwrites its tensor as soon as it returns
    late_root: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(range(_WORLD - (self.count or _WORLD), _WORLD))

    @property
    def hint(self) -> int:
        """The task's hint for an answer that is right in the cases before: on rounds, on roots, or on sizes."""
        return 3 if self.count not in (2, 4) else 1 if self.src else 0

    def __str__(self) -> str:
        where = f"group of ranks {self.members}, src={self.src}" if self.count else "the world, by default"
        late = ", all but the root late" * self.late + ", the root late" * self.late_root
        return f"{where}, {self.dtype} of shape {self.shape}{late}"


def _broadcasts() -> list[_Broadcast]:
    """Powers of two first, and of these root 0: the first case that hangs tells which hint will help."""
    cases = [_Broadcast(n, src) for n, roots in _ROOTS.items() for src in roots]
    cases.sort(key=lambda case: (case.hint, case.count))
    cases.insert(next(i for i, case in enumerate(cases) if case.count == _WORLD), _Broadcast(0))
    cases += [_Broadcast(3, 1, shape, dtype) for dtype, shape in _TYPES]
    return [*cases, *(_Broadcast(5, src, late_root=True) for src in (0, 2)), _Broadcast(5, 3, late=True)]


def _tree_on_ranks(notes: Notes, answer: Callable, cases: list[_Broadcast]) -> list[dict[str, Any]]:
    rank, found = dist.get_rank(), []
    groups = {n: dist.new_group(list(_Broadcast(n).members)) for n in _ROOTS}
    for place, case in enumerate(cases):
        if rank not in case.members:
            found.append({})
            continue
        notes.write(case, place)
        around = _numbers(rank, (3, *case.shape), case.dtype)
        mine = around[1]  # in place, so also in a part of another tensor
        root = case.members[case.src]
        dist.barrier(group=groups.get(case.count))  # see _shift_on_ranks
        if (case.late and rank != root) or (case.late_root and rank == root):
            time.sleep(_LATE)
        with recorded(named=True) as calls:
            said = answer(mine, case.src, groups[case.count]) if case.count else answer(mine)
        found.append({"all": around.clone(), "said": said, "calls": calls})
        if case.late and rank == root:
            mine.fill_(77)
    dist.barrier()
    return [*found, _acted(notes, answer) if rank == 0 else []]


_ACTED = (37, 5)  # ranks and root of a group that is only acted


def _acted(notes: Notes, answer: Callable) -> list[list[Call]]:
    """What each rank of a large group would send and receive: one process takes their places, one after another."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size, root = _ACTED
    notes.write(f"{size} ranks, src={root}, acted: no message is sent", len(_broadcasts()))
    found = []
    for place in range(size):
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=place, world_size=size)
        with recorded(named=True) as calls:
            answer(torch.zeros(3), root)
        found.append(calls)
    return found


def _tree_stand_in(tensor: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> int:
    """PyTorch's broadcast."""
    dist.broadcast(tensor, group=group, group_src=src)
    return 0


@exercise(
    "15-08.2", "Tree broadcast", points=15, demands=6, stand_in=lambda: _tree_stand_in, stand_in_name="dist.broadcast"
)
def tree_broadcast(trial: Trial, answer: Any) -> None:
    """`answer(tensor, src, group)` broadcasts in place in ceil(log2 N) rounds and returns the messages sent."""
    cases = _broadcasts()
    found = ranks(
        trial,
        _tree_on_ranks,
        _WORLD,
        answer,
        cases,
        hint="compare, for one pair of ranks, the round in which the one sends with that in which the other receives",
        see=lambda text: next((case.hint or 2 for case in cases if str(case) == text), 3),
    )
    entries = [(case, rank, found[rank][i]) for i, case in enumerate(cases) for rank in case.members]

    def held(case: _Broadcast, rank: int, entry: dict[str, Any]) -> None:
        before = _numbers(rank, (3, *case.shape), case.dtype)
        want = before.clone()
        want[1] = _numbers(case.members[case.src], (3, *case.shape), case.dtype)[1]
        told = _told(entry["all"], want, before)
        trial.equal(f"rank {rank}, {case}, between two tensors that don't take part", entry["all"], want, **told)

    with trial.group("the root's tensor on every rank, in place", hint="which rank is at which place?", see=1):
        for case, rank, entry in entries:
            if not case.late:
                held(case, rank, entry)
    with trial.group("sends and receives only", hint="which call of yours do all ranks take part in?", free=True):
        for case, rank, entry in entries:
            calls = collectives(entry["calls"])
            trial.that(f"rank {rank}, {case}", not calls, expected="no collective", got=_shown(calls))
    with trial.group(
        "in ceil(log2 N) rounds", hint="who could send, and stands idle, in your second round?", see=2, free=True
    ):
        for i, case in enumerate(cases):
            messages = rounds([found[rank][i].get("calls", []) for rank in range(_WORLD)], case.members[case.src])
            first = {to: turn for turn, _, to in sorted(messages, reverse=True) if to != case.members[case.src]}
            took, most = 1 + max(first.values(), default=-1), ceil(log2(len(case.members)))
            got = f"{took} rounds: {', '.join(f'{a} to {b}' for _, a, b in messages)}"
            trial.that(f"{case}", took <= most, expected=f"at most {most} rounds", got=got)
    with trial.group("every rank receives once, the root never", hint="count on paper who sends to this rank"):
        for case, rank, entry in entries:
            received = sum(call.name == "recv" for call in entry["calls"])
            trial.equal(f"messages to rank {rank}, {case}", received, int(rank != case.members[case.src]))
        size, root = _ACTED
        links: dict[str, list[tuple[int, int]]] = {"send": [], "recv": []}  # (rank, peer)
        for place, calls in enumerate(found[0][-1]):
            for call in calls:
                if call.name in links:
                    links[call.name].append((place, call.peer))
        for place in range(size):
            name = f"messages to rank {place} of {size}, src={root}"
            trial.equal(name, [to for _, to in links["send"]].count(place), int(place != root))
            taken = [source for to, source in links["recv"] if to == place]
            trial.equal(f"whom it names, {name}", taken, [source for source, to in links["send"] if to == place])
    with trial.group("returns the messages it sent", hint="what does this rank do to be counted? Others don't matter"):
        for case, rank, entry in entries:
            sent = sum(call.name == "send" for call in entry["calls"])
            trial.equal(f"rank {rank}, {case}", entry["said"], sent)
    with trial.group("the tensor may be overwritten at once", hint="have its messages left when you return?"):
        for case, rank, entry in entries:
            if case.late:
                held(case, rank, entry)


# ---------------------------------------------------------------- 15-08.3


@dataclass(frozen=True)
class _Ring:
    """A case of the ring in both directions: the ranks in it (None: the world of five, by default), and what is summed.

    Of the tensor's rows only the middle one takes part, so that what is written beside it shows.
    """

    members: tuple[int, ...] | None
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    late: bool = False  # the last rank comes late
    overwrite: bool = False  # the caller overwrites the tensor as soon as the answer has returned

    @property
    def ring(self) -> tuple[int, ...]:
        return self.members or tuple(range(5))

    @property
    def most_bytes(self) -> int:
        """What a rank may send one way: 2(N-1) chunks of half of the tensor, the largest there are."""
        half = ceil(prod(self.shape) / 2)
        return 2 * (len(self.ring) - 1) * ceil(half / len(self.ring)) * self.dtype.itemsize

    def rows(self, rank: int) -> Tensor:
        return _numbers(rank, (3, *self.shape), self.dtype)

    def total(self, rank: int) -> Tensor:
        """All three rows of `rank`, the middle one summed over the ring."""
        rows = self.rows(rank)
        rows[1] = sum(self.rows(other)[1] for other in self.ring)
        return rows

    def __str__(self) -> str:
        where = "the world of five ranks" if self.members is None else f"the group of ranks {self.members}"
        late = ", the last rank late" * self.late
        return f"{self.dtype} of shape {self.shape} in {where}{late}"


_TWO_WAYS = (
    *(_Ring(ring, (shape,)) for ring in _RINGS for shape in (60, 37)),
    _Ring(None, (4, 25)),
    _Ring(None, (3,)),  # fewer elements than ranks
    _Ring((1, 2, 4), ()),
    _Ring((1, 2, 4), (0,)),
    *(_Ring((1, 2, 4), (2, 13), dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64)),
    _Ring((0, 3), (7,), torch.int32),
    _Ring(None, (41,), late=True),
    _Ring(None, (41,), late=True, overwrite=True),
)


class _Lingering:
    """The last rank hesitates before its last two receives, so that what the others send it then has not left yet."""

    def __init__(self, case: _Ring) -> None:
        self.left = 4 * (len(case.ring) - 1) if dist.get_rank() == case.ring[-1] else 0

    def __call__(self, call: Call) -> None:
        self.left -= call.name == "recv"
        if self.left == 1:
            self.left = 0
            time.sleep(_LATE)


class _BothWays:
    """Leaves a sign when rank 0, to which nothing has come from its left yet, has started a message each way."""

    def __init__(self, notes: Notes, case: _Ring) -> None:
        self.notes, self.name, self.to = notes, f"both {case.overwrite}", set()

    def __call__(self, call: Call) -> None:
        if call.name == "send":
            self.to.add(call.peer)
        if dist.get_rank() == 0 and len(self.to) == 2:
            self.notes.leave(self.name)


def _two_ways_on_ranks(notes: Notes, answer: Callable) -> list[dict[str, Any]]:
    rank, found = dist.get_rank(), []
    groups = {members: dist.new_group(list(members)) for members in _RINGS if members}
    for place, case in enumerate(_TWO_WAYS):
        if rank not in case.ring:
            found.append({})
            continue
        notes.write(case, place)
        rows, both = case.rows(rank), True
        dist.barrier(group=groups.get(case.members))  # or who receives from anybody gets the next case's message
        if case.late and rank == case.ring[-1]:
            both = case.overwrite or notes.seen(f"both {case.overwrite}")
        hook = _Lingering(case) if case.overwrite else _BothWays(notes, case) if case.late else None
        with recorded(named=True, each=hook) as calls:
            answer(rows[1], groups[case.members]) if case.members else answer(rows[1])
        found.append({"all": rows.clone(), "calls": calls, "both": both})
        if case.overwrite:
            rows[1].fill_(77)
    return found


@exercise("15-08.3", "A ring in both directions", points=20, demands=6)
def two_way_ring(trial: Trial, answer: Any) -> None:
    """`answer(tensor, group)` sums in place; half of the tensor goes one way around the ring, half the other."""
    hint = "does each rank start all messages of a step before it waits for one?"
    broken = "does each rank send, in each step and each way, the chunk that its neighbour makes room for? "
    broken += "Compare the chunk numbers of two neighbours on paper"
    found = ranks(trial, _two_ways_on_ranks, 5, answer, hint=hint, see=3, broken=(broken, 2))
    entries = [(case, rank, found[rank][i]) for i, case in enumerate(_TWO_WAYS) for rank in case.ring]
    with trial.group("the sum on every rank, in place", hint="follow one chunk of each half around the ring", see=2):
        for case, rank, entry in entries:
            if not case.overwrite:
                where = f"rank {rank}, {case}, between two tensors that don't take part"
                total = case.total(rank)
                trial.close(where, entry["all"], total, **_told(entry["all"], total, case.rows(rank)))
    with trial.group("no collective", hint="which call of yours do all ranks take part in?", free=True):
        for case, rank, entry in entries:
            calls = collectives(entry["calls"])
            trial.that(f"rank {rank}, {case}", not calls, expected="messages only", got=_shown(calls))
    with trial.group("to the two neighbours only", hint="with whom does a rank of a ring talk?", free=True):
        for case, rank, entry in entries:
            place, n = case.ring.index(rank), len(case.ring)
            neighbours = {case.ring[(place + 1) % n], case.ring[(place - 1) % n]} - {rank}
            others = [call for call in entry["calls"] if call.name == "send" and call.peer not in neighbours]
            got = f"messages to {sorted({call.peer for call in others})}"
            trial.that(f"rank {rank}, {case}", not others, expected=f"messages to {sorted(neighbours)}", got=got)
    with trial.group(
        "no link carries more than half of the plain ring's",
        hint="what goes to the left, what to the right?",
        see=1,
        free=True,
    ):
        for case, rank, entry in entries:
            for peer in set(case.ring) - {rank}:
                sent = sum(call.size for call in entry["calls"] if call.name == "send" and call.peer == peer)
                most = case.most_bytes * (2 if len(case.ring) == 2 else 1)  # both neighbours are the same rank
                name = f"from rank {rank} to {peer}, {case}"
                trial.that(name, sent <= most, expected=f"at most {most} bytes", got=f"{sent} bytes")
    with trial.group("in 2(N-1) steps, a message each way in each", hint="what could travel at the same time?", see=3):
        for case, rank, entry in entries:
            most = 4 * (len(case.ring) - 1)
            sent = sum(call.name == "send" for call in entry["calls"])
            trial.that(f"rank {rank}, {case}", sent <= most, expected=f"at most {most} messages", got=f"{sent}")
            expected = "rank 0 sends both ways in its first step, before anything has come from the late rank"
            trial.that(f"{case}", entry["both"], expected=expected, got="one way, and the other has to wait")
    with trial.group("the tensor may be overwritten at once", hint="have its messages left when you return?"):
        for case, rank, entry in entries:
            if case.overwrite:
                trial.close(f"rank {rank}, {case}", entry["all"], case.total(rank))


# ---------------------------------------------------------------- 15-08.4


@dataclass(frozen=True)
class _Training:
    """A case of the early stop: the losses of each rank of the group, and the patience."""

    losses: tuple[tuple[float, ...], ...]
    patience: int
    name: str = ""

    @property
    def size(self) -> int:
        return len(self.losses)

    def outcome(self) -> tuple[list[float], int]:
        """The means, and the steps that are taken at most on a rank."""
        means: list[float] = []
        for step in range(max(map(len, self.losses), default=0)):
            finite = [mine[step] for mine in self.losses if step < len(mine) and isfinite(mine[step])]
            means += [fsum(finite) / len(finite)] if finite else []
            lowest = min(range(len(means)), key=means.__getitem__, default=0)  # the first of them
            if finite and len(means) - 1 - lowest == self.patience:
                return means, step + 1
        return means, max(map(len, self.losses), default=0)

    def __str__(self) -> str:
        alike = self.size > 1 and len(set(map(repr, self.losses))) == 1  # by repr: NaN differs from itself
        return f"losses {f'{self.losses[0]} on each rank' if alike else self.losses}, patience {self.patience}"


_BIG = 2.0**25 + 1  # not a float32
_SIZES = (3, 5, 2, 1)


def _trainings(size: int) -> list[_Training]:
    rng = random.Random(size)

    def repeated(*losses: float) -> tuple[tuple[float, ...], ...]:
        return (losses,) * size

    falling = tuple(tuple(8.0 - step + rank / 4 for step in range(4)) for rank in range(size))
    cases = [
        _Training(falling, 2),
        _Training(repeated(3.0, 2.0, 2.0, 2.0, 1.0), 2),  # as low as before is not lower
        _Training(repeated(3.0, 4.0, 2.0, 5.0, 6.0, 1.0, 7.0), 2),
        _Training(repeated(5.0, 6.0, 4.0), 1),
        _Training(tuple(mine[: 1 + rank % 3] for rank, mine in enumerate(falling)), 3),
        _Training((*((),) * (size - 1), (4.0, 3.0, 5.0)), 3),
        _Training(((0.0, 1.0, 0.0), *((),) * (size - 1)), 3),
        _Training(tuple((nan, 3.0) if rank else (2.0, inf) for rank in range(size)), 2),
        _Training(repeated(2.0, nan, -inf, 3.0, nan, 1.5), 2),  # steps without a mean don't count
        _Training(repeated(nan, nan, nan), 1),
        _Training(((),) * size, 1),
        # one rank improves, the mean does not; and the other way round
        _Training(tuple(tuple(9.0 - s if rank == 0 else 1.0 + 9 * s for s in range(6)) for rank in range(size)), 2),
        _Training(tuple(tuple(1.0 + s / 4 if rank == 0 else 20.0 - s for s in range(6)) for rank in range(size)), 2),
    ]
    if size == _SIZES[0]:  # who judges them wrongly does so on any number of ranks
        cases += [
            _Training(repeated(-1.0, -2.0, 1.5, -1.5, -3.0), 2),
            _Training(repeated(*(2.0**30 * factor for factor in (4, 2, 3, 2.5, 1))), 2),
            _Training(repeated(*(1 - step * 2.0**-20 for step in range(6)), 2.0, 0.5), 2),
            _Training(repeated(*(64.0 - step for step in range(24))), 1),
        ]
    for _ in range(4):
        lengths = [rng.randrange(8) for _ in range(size)]
        draw = [tuple(rng.choice([nan, *(k / 4 for k in range(40))]) for _ in range(n)) for n in lengths]
        cases.append(_Training(tuple(draw), rng.randrange(1, 4)))
    cases.append(_Training(tuple((_BIG + rank, 0.1 + rank, 1 / 3) for rank in range(size)), 5, "numeric"))
    return [*cases, _Training(repeated(1.0), 2, "rank 0 late")]


class _Steps:
    """An iterator that counts the steps which were really taken."""

    def __init__(self, losses: Sequence[float]) -> None:
        self.taken, self._losses = 0, iter(losses)

    def __iter__(self) -> Iterator[float]:
        return self

    def __next__(self) -> float:
        loss = next(self._losses)
        self.taken += 1
        return loss


def _train_on_ranks(notes: Notes, answer: Callable) -> dict[int, list[tuple[Any, int, list[Call]]]]:
    """Size of the group → what the answer returned, steps taken and calls of each case."""
    rank, found = dist.get_rank(), {}
    groups = {size: dist.new_group(list(range(5 - size, 5))) for size in _SIZES}
    for size in _SIZES:
        place = rank - (5 - size)
        for number, case in enumerate(_trainings(size) if place >= 0 else ()):
            notes.write(case, 1000 * _SIZES.index(size) + number)
            dist.barrier(group=groups[size])  # who is not where the others are does not meet them in the next case
            if case.name == "rank 0 late" and place == 0:
                time.sleep(_LATE)
            steps = _Steps(case.losses[place])
            with recorded() as calls:
                said = answer(steps, case.patience) if size == 5 else answer(steps, case.patience, groups[size])
            found.setdefault(size, []).append((said, steps.taken, calls))
    return found


@exercise("15-08.4", "Find the deadlock", points=20, demands=5)
def train_until(trial: Trial, answer: Any) -> None:
    """`answer(steps, patience, group)` trains until the mean loss no longer falls; all ranks stop together."""
    hint = "in this case, how often does each rank come to the call that it waits in?"
    found = ranks(trial, _train_on_ranks, 5, answer, hint=hint, see=1)
    entries = [
        (f"place {place} of {size}, {case}", case, place, *found[5 - size + place][size][i])
        for size in _SIZES
        for i, case in enumerate(_trainings(size))
        for place in range(size)
    ]
    with trial.group("a list of floats", hint="what does your return statement give, on each rank?"):
        for name, _, _, said, *_ in entries:
            right = isinstance(said, list) and all(isinstance(value, float) for value in said)
            trial.that(name, right, expected="a list of floats", got=repr(said))
    with trial.group("the means, until they stop falling", hint="work this case out by hand, step by step", see=2):
        for name, case, _, said, *_ in entries:
            if case.name != "numeric":
                trial.close(name, [float(mean) for mean in said], case.outcome()[0])
    with trial.group("no rank takes a step in vain", hint="when is it known that this was the last step?"):
        for name, case, place, _, taken, _ in entries:
            trial.equal(f"steps taken, {name}", taken, min(len(case.losses[place]), case.outcome()[1]))
    with trial.group("added in float64", hint="follow the dtype from the loss to the mean"):
        for name, case, _, said, *_ in entries:
            if case.name == "numeric":
                trial.close(name, [float(mean) for mean in said], case.outcome()[0], rtol=1e-12, atol=0.0)
    with trial.group(
        "one collective a step, one at the end, nothing else",
        hint="what must be known each step? (An object takes two collectives: its size, then its bytes.)",
        see=3,
        free=True,
    ):
        for name, case, *_, calls in entries:
            most = case.outcome()[1] + 1
            right = len(calls) <= most and len(collectives(calls)) == len(calls)
            trial.that(name, right, expected=f"at most {most} collectives", got=f"{len(calls)} calls: {_shown(calls)}")


# ---------------------------------------------------------------- 15-08.5


@dataclass(frozen=True)
class _Grads:
    """A case of the averaging: shapes of the gradients, None where there is none."""

    shapes: tuple[tuple[int, ...] | None, ...]
    limit: int
    dtype: torch.dtype = torch.float32
    late: bool = False  # rank 0 of the group comes late

    def grad(self, rank: int, number: int, size: int) -> Tensor | None:
        """Multiples of `size`: their mean is exact. The memory layout differs from rank to rank."""
        shape = self.shapes[number]
        if shape is None:
            return None
        grad = size * _numbers(rank, shape, self.dtype, salt=number, limit=8)
        if len(shape) == 4 and rank % 2:
            return grad.contiguous(memory_format=torch.channels_last)
        return grad.t().contiguous().t() if len(shape) == 2 and rank % 2 == 0 else grad

    def mean(self, number: int, size: int) -> Tensor | None:
        return None if self.shapes[number] is None else sum(self.grad(r, number, size) for r in range(size)) / size

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
        return f"bucket_bytes {self.limit}, {self.dtype} of shapes {self.shapes}{', rank 0 late' * self.late}"


_SHAPES = ((10, 10), (3,), None, (7, 2), (2, 3, 2, 2), (1,), (), (20, 3), (5,))


def _averages(size: int) -> list[_Grads]:
    cases = [_Grads(_SHAPES, limit) for limit in (10**6, 1, 399, 400, 411, 412)]
    cases += [_Grads(_SHAPES, 900, dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)]
    cases += [_Grads((), 100), _Grads((None, None), 100), _Grads((None, (2, 3)), 24), _Grads(((4,), None), 15)]
    rng = random.Random(8)
    for _ in range(8):
        sizes = [(rng.randrange(1, 12),) if rng.random() < 0.85 else None for _ in range(rng.randrange(1, 9))]
        cases.append(_Grads(tuple(sizes), 4 * rng.randrange(1, 30)))
    cases = [*cases, _Grads(_SHAPES, 200, late=True)]
    return cases[:: 1 if size == 3 else 4]


def _average_on_ranks(notes: Notes, answer: Callable) -> dict[int, list[dict[str, Any]]]:
    rank, found = dist.get_rank(), {}
    groups = {size: dist.new_group(list(range(5 - size, 5))) for size in _SIZES}
    for size in _SIZES:
        place = rank - (5 - size)
        for i, case in enumerate(_averages(size) if place >= 0 else ()):
            notes.write(f"{size} ranks, {case}", 1000 * _SIZES.index(size) + i)
            dist.barrier(group=groups[size])
            parameters = []
            for number, shape in enumerate(case.shapes):
                data = torch.zeros((2,) if shape is None else shape, dtype=case.dtype)
                parameters.append(torch.nn.Parameter(data, requires_grad=number % 3 != 1))  # frozen after backward
                parameters[-1].grad = case.grad(place, number, size)
            held = [(p.grad, 0 if p.grad is None else p.grad.data_ptr()) for p in parameters]
            if case.late and place == 0:
                time.sleep(_LATE)
            with recorded() as calls:
                given = (iter(parameters), case.limit)
                said = answer(*given) if size == 5 else answer(*given, groups[size])
            pairs = zip(parameters, held, strict=True)
            same = all(h is None or (p.grad is h and h.data_ptr() == place) for p, (h, place) in pairs)
            grads = [_snapshot(p.grad) for p in parameters]
            befores = [case.grad(place, number, size) for number in range(len(grads))]
            written = [i for i, (a, b) in enumerate(zip(grads, befores, strict=True)) if not _same(a, b)]
            entry = {"grads": grads, "same": same, "said": said, "calls": calls, "written": written}
            found.setdefault(size, []).append(entry)
    return found


_UNWRITTEN = "p.grad has its old numbers: did the mean come back, and into p.grad or into a copy?"


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


@exercise("15-08.5", "Bucketed averaging", points=15, demands=5)
def average_gradients(trial: Trial, answer: Any) -> None:
    """`answer(parameters, bucket_bytes, group)` averages gradients in buckets and returns how many there were."""
    hint = "do all ranks make the same buckets, whatever the layout of their gradients?"
    found = ranks(trial, _average_on_ranks, 5, answer, hint=hint, see=1)
    entries = []
    for size in _SIZES:
        for i, case in enumerate(_averages(size)):
            means = [case.mean(number, size) for number in range(len(case.shapes))]
            entries += [
                (f"place {place} of {size}, {case}", size, means, case, found[5 - size + place][size][i])
                for place in range(size)
            ]
    with trial.group(
        "every gradient is the mean over the ranks",
        hint="which piece goes to which parameter, and is it complete when you read it?",
        see=2,
    ):
        for name, size, means, _, entry in entries:
            for number, mean in enumerate(means):
                if mean is not None:
                    grad = entry["grads"][number]
                    told = _told(grad, mean) if number in entry["written"] else {"hint": _UNWRITTEN, "see": 2}
                    if size > 1 and not told and _told(grad, size * mean):
                        told = {"hint": "read again what every gradient is replaced by"}
                    trial.close(f"gradient {number}, {name}", grad, mean, **told)
    with trial.group("None stays None", hint="which parameters do you leave out?", free=True):
        for name, _, means, _, entry in entries:
            for number, mean in enumerate(means):
                right = mean is not None or entry["grads"][number] is None
                trial.that(f"gradient {number}, {name}", right, expected="None", got="a tensor")
    with trial.group("p.grad is the tensor it was", hint="somebody else may hold p.grad", free=True):
        for name, *_, entry in entries:
            trial.that(name, entry["same"], expected="the same object, changed in place", got="another tensor")
    with trial.group("one all_reduce for each bucket", hint="fill the buckets on paper for these shapes", see=1):
        for name, *_, case, entry in entries:
            calls = entry["calls"]
            trial.that(
                name,
                all(re.match("all_?reduce", call.name) for call in calls),
                expected="calls of all_reduce",
                got=_shown(calls),
                hint="what do the other calls do that an all_reduce doesn't?",
            )
            sizes, want = sorted(call.size for call in calls), sorted(case.buckets)
            trial.that(f"bytes of the buckets, sorted, {name}", sizes == want, expected=want, got=sizes)
    with trial.group("returns the number of buckets", hint="what do you count?"):
        for name, *_, case, entry in entries:
            trial.equal(name, entry["said"], len(case.buckets))


# ---------------------------------------------------------------- 15-08.6


@dataclass(frozen=True)
class _Backward:
    """A case of the cut: when gradients are complete (s), their bytes, the ranks, and their links."""

    ready: tuple[float, ...]
    sizes: tuple[int, ...]
    ranks: int
    alpha: float
    beta: float

    def cost(self, size: float) -> float:
        """Seconds of a ring all-reduce of `size` bytes."""
        steps = 2 * (self.ranks - 1)
        return steps * (self.alpha + size / self.ranks / self.beta)

    def spans(self, counts: Sequence[int]) -> list[tuple[int, float, float]]:
        """Start and end of each all-reduce, for a cut into buckets of so many gradients."""
        found, first, free = [], 0, 0.0
        for count in counts:
            start = max(free, *self.ready[first : first + count])
            free = start + self.cost(sum(self.sizes[first : first + count]))
            found.append((count, start, free))
            first += count
        return found

    def earliest(self) -> float:
        """The end of the last all-reduce, by trying every cut."""
        n = len(self.sizes)
        ends = []
        for cut in range(2 ** (n - 1)):
            marks = [0, *(k + 1 for k in range(n - 1) if cut >> k & 1), n]
            ends.append(self.spans([b - a for a, b in pairwise(marks)])[-1][2])
        return min(ends)

    def __str__(self) -> str:
        times = ", ".join(f"{t:.3g}" for t in self.ready[:10])
        return f"ready ({times}), sizes {self.sizes[:10]}, {self.ranks} ranks, alpha {self.alpha:g}, beta {self.beta:g}"


def _backwards() -> list[_Backward]:
    rng = random.Random(6)
    cases = []
    for n in (1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9):
        ready = [rng.uniform(0.0, 0.02) for _ in range(n)]
        if n % 3 == 0:
            ready.sort()
        sizes = tuple(rng.choice([4, 4_000, 400_000, 4_000_000]) * rng.randrange(1, 10) for _ in range(n))
        links = rng.choice([1, 2, 2, 3, 8, 64]), 10 ** rng.uniform(-6, -3), 10 ** rng.uniform(8, 10)
        cases.append(_Backward(tuple(ready), sizes, *links))
    even = tuple(k / 100 for k in range(1, 9))
    cases.append(_Backward(even, (1_000_000,) * 8, 2, 1e-5, 1e9))  # small steps pay: the last bucket is short
    cases.append(_Backward(even, (1_000_000,) * 8, 64, 1e-3, 1e10))  # latency: one bucket
    cases.append(_Backward(tuple(k / 100 for k in range(1, 10)), (10_000_000,) * 9, 2, 1e-6, 1e9))  # each alone
    cases.append(_Backward((0.01, 0.01, 0.02, 0.02, 0.02, 0.04), (4_000_000,) * 6, 3, 1e-5, 1e9))
    for _ in range(12):  # many buckets, of many lengths
        ready = sorted(rng.uniform(0.0, 0.03) for _ in range(10))
        sizes = tuple(rng.randrange(1, 60) * 50_000 for _ in range(10))
        cases.append(_Backward(tuple(ready), sizes, 3, 10 ** rng.uniform(-6, -3.5), 1e9))
    cases.append(_Backward(even[::-1], (1_000_000,) * 8, 4, 1e-4, 1e9))  # the first gradient comes last
    return cases


_MANY = 40  # gradients: 2**39 cuts
_NEAR = 1e-6  # float32 will do


def _earliest_of_many(case: _Backward) -> float:
    """The end of the last all-reduce, from the last gradient backwards: how late may the link be free before it?"""
    n = len(case.sizes)
    low, high = 0.0, case.spans([n])[-1][2]
    for _ in range(45):
        end = (low + high) / 2
        latest = [-inf] * n + [end]  # latest[i]: the links must be free by then, to send i, i+1, … in time
        for i in reversed(range(n)):
            for j in range(i + 1, n + 1):
                start = latest[j] - case.cost(sum(case.sizes[i:j]))
                if start >= max(case.ready[i:j]):
                    latest[i] = max(latest[i], start)
        low, high = (low, end) if latest[0] >= 0 else (end, high)
    return high


def _uncut(
    ready: list[float], sizes: list[int], ranks: int, alpha: float, beta: float
) -> list[tuple[int, float, float]]:
    """All gradients in one bucket."""
    return _Backward(tuple(ready), tuple(sizes), ranks, alpha, beta).spans([len(sizes)])


@exercise(
    "15-08.6", "Cut the buckets", points=20, demands=5, stand_in=lambda: _uncut, stand_in_name="all in one bucket"
)
def cut_buckets(trial: Trial, answer: Any) -> None:
    """`answer(ready, sizes, ranks, alpha, beta)` returns (gradients, start, end) of the buckets that end earliest."""

    def ask(case: _Backward) -> Any:
        return answer(list(case.ready), list(case.sizes), case.ranks, case.alpha, case.beta)

    cases = _backwards()
    found = [(case, ask(case)) for case in cases]
    with trial.group("a list of (gradients, start, end)", hint="what is in a bucket, and what do you return?"):
        for case, said in found:
            right = isinstance(said, list) and all(
                isinstance(t, tuple) and len(t) == 3 and isinstance(t[0], Integral) and not isinstance(t[0], bool)
                for t in said
            )
            trial.that(f"{case}", right, expected="a list of tuples (int, float, float)", got=repr(said)[:120])
    with trial.group("every gradient is in one bucket", hint="add up the gradients of your buckets"):
        for case, said in found:
            counts = [count for count, *_ in said]
            right = sum(counts) == len(case.sizes) and all(count > 0 for count in counts)
            expected = f"counts above 0 that add up to {len(case.sizes)}"
            trial.that(f"{case}", right, expected=expected, got=f"counts {counts}")
        told = {"hint": "what do you return where there is none?"}
        trial.equal("no gradient", answer([], [], 2, 1e-5, 1e9), [], **told)
    with trial.group("start and end as the model says", hint="draw your buckets below the times of ready", see=1):
        for case, said in found:
            for number, (got, want) in enumerate(zip(said, case.spans([count for count, *_ in said]), strict=True)):
                for what, a, b in zip(("start", "end"), got[1:], want[1:], strict=True):
                    trial.close(f"{what} of bucket {number}, {case}", float(a), b, rtol=_NEAR, atol=1e-9)
    many, said_of_many = None, None
    with trial.group(
        f"{_MANY} gradients take less than a second", hint="what do you work out again and again?", see=3, free=True
    ):
        rng = random.Random(40)
        for n in range(16, _MANY + 1, 2):  # what takes twice as long for each more fails before it takes for ever
            sizes = tuple(rng.randrange(1, 10) * 100_000 for _ in range(n))
            ready = sorted(rng.uniform(0, 0.05) for _ in range(n))
            many = _Backward(tuple(ready), sizes, 4, 1e-5, 1e9)
            began = time.perf_counter()
            said_of_many = ask(many)
            took = time.perf_counter() - began
            trial.that(f"{n} gradients", took < 1, expected="less than 1 s", got=f"{took:.1f} s")
            if took >= 1:  # reached only where this item is left out
                break
    with trial.group("the last bucket ends as early as it can", hint="which cut is better here, and why?", see=2):
        for case, said in found:
            trial.close(f"end of the last bucket, {case}", float(said[-1][2]), case.earliest(), rtol=_NEAR, atol=1e-9)
        trial.close(f"end of the last bucket, {many}", float(said_of_many[-1][2]), _earliest_of_many(many), rtol=_NEAR)
