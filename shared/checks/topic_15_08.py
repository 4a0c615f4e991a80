"""Checks of the exercises in 15-08, Distributed Primitives & Communication.

Every check runs the answer on a few real processes, many cases in one launch, and records what reaches the process
groups below torch.distributed's functions, so that it sees messages whichever of them an answer uses. What runs on the
ranks is named `*_on_ranks`.
"""

import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import ceil, fsum, log2, prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shared import LaunchError, launch
from shared.checks.feedback import Trial, exercise

_SECONDS = 5  # for an answer that hangs; a right one takes a fraction of a second
_LATE = 0.15  # seconds that one rank comes later than the others, where a case asks for it
RETURNS = "every rank returns"

# ---------------------------------------------------------------- what an answer sends

_COLLECTIVE = re.compile(r"_?(all|broadcast|reduce|gather|scatter|barrier|monitored_barrier)")


@dataclass(frozen=True)
class Call:
    """What reached a process group.

    Attributes:
        name: 'send', 'recv', or the collective's.
        group: the ranks in the group, as ranks of the world.
        size: bytes of the message; of a collective, those that its cost grows with (`ring_bytes`).
        peer: rank of the world a message goes to or comes from; None if it may come from any.
    """

    name: str
    group: tuple[int, ...]
    size: int
    peer: int | None = None

    @property
    def ring_bytes(self) -> float:
        """What a rank sends if a ring carries the call: the mean over the ranks of the group."""
        if self.name in ("send", "recv"):
            return self.size if self.name == "send" else 0
        passes = 2 if re.match("all_?reduce", self.name) else 1
        return passes * (len(self.group) - 1) / len(self.group) * self.size


@contextmanager
def _recorded(named: bool = False) -> Iterator[list[Call]]:
    """The calls of this rank inside the block, in order. Where receives must be `named`, one from any rank raises: it
    would take what comes first, sometimes another call's."""
    calls: list[Call] = []
    kept = []

    def watch(owner: Any, name: str, note: Callable[..., Call]) -> None:
        kept.append((owner, name, vars(owner).get(name)))  # None: inherited
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(note(name, *args, *kwargs.values()))
            return original(*args, **kwargs)

        for overload in getattr(original, "overloads", list)():  # of an operator; the dispatcher looks them up here
            setattr(call, overload, getattr(original, overload))
        setattr(owner, name, call)

    for name in dir(dist.ProcessGroup):
        if name in ("send", "recv"):
            watch(dist.ProcessGroup, name, _message)
        elif name == "recv_anysource":
            watch(dist.ProcessGroup, name, _refuse if named else _from_any)
        elif _COLLECTIVE.match(name):
            watch(dist.ProcessGroup, name, _collective)
    for name in _operators():
        watch(torch.ops._c10d_functional, name, _functional)
    try:
        yield calls
    finally:
        for owner, name, method in reversed(kept):
            if method is None:
                delattr(owner, name)
            else:
                setattr(owner, name, method)


@cache
def _operators() -> list[str]:
    """The functional collectives, which reach the groups without Python."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    names = {name.removeprefix("_c10d_functional::") for name in names if name.startswith("_c10d_functional::")}
    return sorted(name for name in names if _COLLECTIVE.match(name))


def _members(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _message(name: str, group: dist.ProcessGroup, tensors: list[Tensor], place: int, *_: Any) -> Call:
    """Gloo's own words for a peer that can't be are a failed assertion or a crash; these can be read."""
    members, verb = _members(group), {"send": "sends to", "recv": "receives from"}[name]
    if not 0 <= place < len(members):
        raise ValueError(f"rank {dist.get_rank()} {verb} place {place} of a group of {len(members)}")
    if members[place] == dist.get_rank():
        raise ValueError(f"rank {dist.get_rank()} {verb} itself")
    return Call(name, members, _nbytes(tensors), members[place])


def _from_any(_: str, group: dist.ProcessGroup, *__: Any) -> Call:
    return Call("recv", _members(group), 0)


def _refuse(*_: Any) -> Call:
    raise ValueError(f"rank {dist.get_rank()} receives from any rank, so perhaps what belongs to another call")


def _collective(name: str, group: dist.ProcessGroup, *args: Any) -> Call:
    """At a gather's root one argument is the whole, elsewhere all are a part; else one is the whole everywhere."""
    sizes = [size for size in map(_nbytes, args) if size] or [0]
    return Call(name, _members(group), min(sizes) if re.match("gather|scatter", name) else max(sizes))


def _functional(name: str, *args: Any) -> Call:
    group = dist.distributed_c10d._resolve_process_group([arg for arg in args if isinstance(arg, str)][-1])
    size = _nbytes(args) * (group.size() if name.startswith("all_gather") else 1)
    return Call(name, _members(group), size)


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0


def _collectives(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.name not in ("send", "recv")]


def _shown(calls: Sequence[Call]) -> str:
    return ", ".join(f"{call.name} of {call.size} bytes" for call in calls) or "none"


# ---------------------------------------------------------------- running it


class _Notes:
    """Each rank leaves a note of the case it is in, so that a hang can be told with its case."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.count = 0

    def write(self, case: object) -> None:
        self.count += 1
        (self.folder / str(dist.get_rank())).write_text(f"{self.count} {case}")

    def read(self, rank: int) -> tuple[int, str]:
        """Number and name of the last case that the rank has begun."""
        path = self.folder / str(rank)
        number, _, case = (path.read_text() if path.exists() else "0 ").partition(" ")
        return int(number or 0), case


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
        notes = _Notes(folder)
        try:
            return launch(function, size, notes, answer, *args, backend="gloo", timeout=_SECONDS)
        except LaunchError as error:
            number, case = notes.read(error.ranks[0])
            untouched = type(error.error) is NotImplementedError and not error.error.args and number == 1
            return _Failure(_report(str(error)), case, error.reason in ("hung", "deadlock"), untouched)


def _ranks(trial: Trial, function: Callable, size: int, *args: Any, hint: str, see: int) -> Any:
    """What each rank returned. A rank that fails or hangs fails the item RETURNS; hint and see are for the latter."""
    found = _outcome(function, size, *args)
    if not isinstance(found, _Failure):
        trial.needs(RETURNS, True, expected="", got="")
        return found
    if found.untouched and not trial.items:
        raise NotImplementedError
    if found.waits:
        told = {
            "hint": f"ask of each line who sends what its rank waits for, or receives what it sends; {hint}",
            "see": see,
        }
    else:
        told = {"hint": "work out by hand what the named line does on that rank, in this case"}
    got = f"{found.report}\n(case: {found.case})"
    trial.needs(RETURNS, False, expected=RETURNS, got=got, **told)
    return None  # reached only where the item is left out


def _report(message: str) -> str:
    """The launcher's report; lines on the answer first, without those on this file."""
    head, *lines = message.splitlines()
    lines = [
        re.sub(r" waits .*_on_ranks,.*", " waits for the others, outside of your function", line)
        for line in lines
        if " waits " in line or not re.search(rf"_on_ranks,|{Path(__file__).name}", line)
    ]
    return "\n".join([head, *sorted(lines, key=lambda line: line.endswith("outside of your function"))])


def _numbers(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float32, salt: int = 0) -> Tensor:
    """Numbers that differ between ranks and that no other dtype holds; float32 and narrower ones are whole, so that
    their sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    whole = torch.randint(-50, 50, tuple(shape), generator=generator)
    wide = {torch.float64: whole / 7, torch.int64: whole * (2**40 + 1), torch.complex64: whole * (1 + 2j)}
    return wide.get(dtype, whole % 2 if dtype == torch.bool else whole).to(dtype)


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


def _shift_on_ranks(notes: _Notes, answer: Callable, cases: list[_Shift]) -> list[dict[str, Any]]:
    rank, found, alive = dist.get_rank(), [], []
    groups = {members: dist.new_group(list(members)) for members in _RINGS if members}
    for case in cases:
        if rank not in case.ring:
            found.append({})
            continue
        notes.write(case)
        mine = _numbers(rank, case.shape, case.dtype)
        before = mine.clone()
        dist.barrier(group=groups.get(case.members))  # or who receives from anybody gets the next case's message
        if case.late and rank == case.ring[-1]:
            time.sleep(_LATE)
        with _recorded(named=True) as calls:
            got = answer(mine, case.by, groups[case.members]) if case.members else answer(mine, case.by)
        entry = {"got": _snapshot(got), "kept": torch.equal(mine, before), "calls": calls}
        entry["own"], entry["fresh"] = _apart(got, [mine]), _apart(got, alive)
        found.append(entry)
        alive.append(got if isinstance(got, Tensor) else mine)
        if case.overwrite:
            mine.fill_(77)
    return found


@exercise("15-08.1", "Ring shift", points=10)
def ring_shift(trial: Trial, answer: Any) -> None:
    """`answer(tensor, by, group)` returns the tensor from `by` places to the left."""
    cases = _shifts()
    found = _ranks(
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
        "every rank has the tensor from `by` places to its left", hint="draw the ring, and follow one tensor", see=1
    ):
        for case, rank, entry in entries:
            if not case.overwrite:
                want = _numbers(case.other(rank, -case.by), case.shape, case.dtype)
                trial.equal(f"rank {rank}, {case}", entry["got"], want)
    with trial.group("no collective", hint="which call of yours do all ranks take part in?"):
        for case, rank, entry in entries:
            calls = _collectives(entry["calls"])
            trial.that(f"rank {rank}, {case}", not calls, expected="messages only", got=_shown(calls))
    with trial.group("one message, straight to its rank, none to itself", hint="who needs the tensor?", see=1):
        for case, rank, entry in entries:
            to = case.other(rank, case.by)
            sent = [call.peer for call in entry["calls"] if call.name == "send"]
            want = [to] if to != rank else []
            trial.equal(f"ranks that rank {rank} sends to, {case}", sent, want)
    with trial.group("the tensor passed in stays as it was", hint="where do you put what arrives?"):
        for case, rank, entry in entries:
            trial.that(f"rank {rank}, {case}", entry["kept"], expected="unchanged", got="overwritten")
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
    7: (0, 4),
    9: (0, 4, 7),
}  # by size of the group


@dataclass(frozen=True)
class _Broadcast:
    """A case of the broadcast in a group of the last `count` of nine ranks (0: the world and rank 0, by default)."""

    count: int
    src: int = 0
    shape: tuple[int, ...] = (5,)
    dtype: torch.dtype = torch.float32
    late: bool = False  # all but the root come late, and the root overwrites its tensor as soon as it returns
    late_root: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(range(9 - (self.count or 9), 9))

    def __str__(self) -> str:
        where = f"group of ranks {self.members}, src={self.src}" if self.count else "the world, by default"
        late = ", all but the root late" * self.late + ", the root late" * self.late_root
        return f"{where}, {self.dtype} of shape {self.shape}{late}"


def _broadcasts() -> list[_Broadcast]:
    cases = [_Broadcast(0)] + [_Broadcast(n, src) for n, roots in _ROOTS.items() for src in roots]
    cases += [_Broadcast(3, 1, shape, dtype) for dtype, shape in _TYPES]
    return [*cases, *(_Broadcast(5, src, late_root=True) for src in (0, 2)), _Broadcast(5, 3, late=True)]


def _tree_on_ranks(notes: _Notes, answer: Callable, cases: list[_Broadcast]) -> list[dict[str, Any]]:
    rank, found = dist.get_rank(), []
    groups = {n: dist.new_group(list(_Broadcast(n).members)) for n in _ROOTS}
    for case in cases:
        if rank not in case.members:
            found.append({})
            continue
        notes.write(case)
        around = _numbers(rank, (3, *case.shape), case.dtype)
        mine = around[1]  # in place, so also in a part of another tensor
        root = case.members[case.src]
        dist.barrier(group=groups.get(case.count))  # see _shift_on_ranks
        if (case.late and rank != root) or (case.late_root and rank == root):
            time.sleep(_LATE)
        with _recorded(named=True) as calls:
            said = answer(mine, case.src, groups[case.count]) if case.count else answer(mine)
        found.append({"all": around.clone(), "said": said, "calls": calls})
        if case.late and rank == root:
            mine.fill_(77)
    return found


def _rounds(sent: dict[int, list[int]], root: int) -> int:
    """Rounds that a broadcast takes at least, from the ranks that each rank sent to, in order."""
    arrival, waiting = {root: 0}, [root]
    while waiting:
        rank = waiting.pop()
        for turn, peer in enumerate(sent[rank], start=1):
            if peer not in arrival:
                arrival[peer] = arrival[rank] + turn
                waiting.append(peer)
    return max(arrival.values())


def _tree_stand_in(tensor: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> int:
    """PyTorch's broadcast."""
    dist.broadcast(tensor, group=group, group_src=src)
    return 0


@exercise("15-08.2", "Tree broadcast", points=15, stand_in=lambda: _tree_stand_in, stand_in_name="dist.broadcast")
def tree_broadcast(trial: Trial, answer: Any) -> None:
    """`answer(tensor, src, group)` broadcasts in place in ceil(log2 N) rounds and returns the messages sent."""
    cases = _broadcasts()
    found = _ranks(
        trial,
        _tree_on_ranks,
        9,
        answer,
        cases,
        hint="compare, for one pair of ranks, the round in which the one sends with that in which the other receives",
        see=2,
    )
    entries = [(case, rank, found[rank][i]) for i, case in enumerate(cases) for rank in case.members]

    def held(case: _Broadcast, rank: int, entry: dict[str, Any]) -> None:
        want = _numbers(rank, (3, *case.shape), case.dtype)
        want[1] = _numbers(case.members[case.src], (3, *case.shape), case.dtype)[1]
        trial.equal(f"rank {rank}, {case}, between two tensors that don't take part", entry["all"], want)

    with trial.group("the root's tensor on every rank, in place", hint="which rank is at which place?", see=1):
        for case, rank, entry in entries:
            if not case.late:
                held(case, rank, entry)
    with trial.group("sends and receives only", hint="which call of yours do all ranks take part in?"):
        for case, rank, entry in entries:
            calls = _collectives(entry["calls"])
            trial.that(f"rank {rank}, {case}", not calls, expected="no collective", got=_shown(calls))
    peers = [
        {rank: [c.peer for c in found[rank][i]["calls"] if c.name == "send"] for rank in case.members}
        for i, case in enumerate(cases)
    ]
    with trial.group("in ceil(log2 N) rounds", hint="who could send, and stands idle, in your second round?", see=2):
        for case, sent in zip(cases, peers, strict=True):
            took, rounds = _rounds(sent, case.members[case.src]), ceil(log2(len(case.members)))
            trial.that(f"{case}", took <= rounds, expected=f"at most {rounds} rounds", got=f"{took} rounds: {sent}")
    with trial.group("every rank receives once, the root never", hint="when is a rank's part in it to receive over?"):
        for case, rank, entry in entries:
            received = sum(call.name == "recv" for call in entry["calls"])
            trial.equal(f"messages to rank {rank}, {case}", received, int(rank != case.members[case.src]))
    with trial.group("returns the messages it sent", hint="what does this rank do to be counted? Others don't matter"):
        for (case, rank, entry), sent in ((e, peers[cases.index(e[0])]) for e in entries):
            trial.equal(f"rank {rank}, {case}", entry["said"], len(sent[rank]))
    with trial.group("the tensor may be overwritten at once", hint="have its messages left when you return?"):
        for case, rank, entry in entries:
            if case.late:
                held(case, rank, entry)


# ---------------------------------------------------------------- 15-08.3


@dataclass(frozen=True)
class _Chunks:
    """A case of the reduce-scatter."""

    shape: tuple[int, ...] = (2, 3)
    dtype: torch.dtype = torch.float32
    late: bool = False  # rank 0 comes late

    def of(self, rank: int, number: int) -> Tensor:
        return _numbers(rank, self.shape, self.dtype, salt=number)

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}{', rank 0 late' * self.late}"


_CHUNKS = (
    _Chunks(),
    _Chunks((), torch.float64),
    _Chunks((4,), torch.int64),
    _Chunks((1, 2, 2), torch.bfloat16),
    _Chunks((3, 1), torch.int32),
    _Chunks(late=True),
)


def _scatter_on_ranks(notes: _Notes, answer: Callable) -> list[dict[str, Any]]:
    rank, size, found, alive = dist.get_rank(), dist.get_world_size(), [], []
    for case in _CHUNKS:
        notes.write(f"{size} ranks, {case}")
        chunks = [case.of(rank, number) for number in range(size)]
        if case.late and rank == 0:
            time.sleep(_LATE)
        with _recorded() as calls:
            got = answer(passed := list(chunks))
        kept = all(torch.equal(chunk, case.of(rank, number)) for number, chunk in enumerate(chunks))
        listed = [id(chunk) for chunk in passed] == [id(chunk) for chunk in chunks]
        entry = {"got": _snapshot(got), "kept": kept, "listed": listed, "calls": calls}
        entry["own"], entry["fresh"] = _apart(got, chunks), _apart(got, alive)
        found.append(entry)
        alive.append(got if isinstance(got, Tensor) else chunks[0])
    return found


@exercise("15-08.3", "Reduce-scatter", points=20)
def reduce_scatter(trial: Trial, answer: Any) -> None:
    """`answer(chunks)` returns the sum of everybody's chunks[rank], by a ring of N-1 steps."""
    entries = []
    for size in (5, 3, 2, 1):
        hint = "do all of them wait in the same direction, or for a message that was started and dropped?"
        found = _ranks(trial, _scatter_on_ranks, size, answer, hint=hint, see=3)
        entries += [
            (f"rank {rank} of {size}, {case}", size, rank, case, found[rank][i])
            for i, case in enumerate(_CHUNKS)
            for rank in range(size)
        ]

    with trial.group("rank r has the sum of all chunks[r]", hint="where does the sum that ends here begin?", see=2):
        for name, size, rank, case, entry in entries:
            trial.close(name, entry["got"], sum(case.of(other, rank) for other in range(size)).to(case.dtype))
    with trial.group("what was passed in is not changed", hint="where do you put a sum?"):
        for name, *_, entry in entries:
            trial.that(name, entry["kept"], expected="unchanged", got="a chunk was overwritten")
            trial.that(name, entry["listed"], expected="unchanged", got="the list holds other tensors, or not as many")
    with trial.group("the result is a new tensor", hint="look at what you return when there is one rank"):
        _hold_memory(trial, [(name, entry) for name, *_, entry in entries])
    with trial.group("no collective", hint="which call of yours do all ranks take part in?"):
        for name, *_, entry in entries:
            calls = _collectives(entry["calls"])
            trial.that(name, not calls, expected="messages only", got=_shown(calls))
    with trial.group("N-1 messages of one tensor to the right neighbour", hint="what must travel, and how far?", see=1):
        for name, size, rank, case, entry in entries:
            width = prod(case.shape) * case.dtype.itemsize
            trial.equal(
                f"(rank, bytes) of the messages of {name}",
                [(call.peer, call.size) for call in entry["calls"] if call.name == "send"],
                [((rank + 1) % size, width)] * (size - 1),
            )


# ---------------------------------------------------------------- 15-08.4


@dataclass(frozen=True)
class _Nodes:
    """A case of the two levels: six ranks in `nodes` nodes, whose ranks follow each other or (striped) alternate."""

    nodes: int
    striped: bool = False
    elements: int = 36
    dtype: torch.dtype = torch.float32
    late: bool = False  # rank 0 comes late

    @property
    def local(self) -> int:
        return 6 // self.nodes

    @property
    def sent(self) -> tuple[int, int]:
        """The bytes that a rank sends inside and across."""
        total = self.elements * self.dtype.itemsize
        return 2 * (self.local - 1) * total // self.local, 2 * (self.nodes - 1) * total // 6

    def __str__(self) -> str:
        ranks = "alternating" if self.striped else "consecutive"
        late = ", rank 0 late" * self.late
        return f"{self.nodes} nodes of {self.local} {ranks} ranks, {self.elements} x {self.dtype}{late}"


_NODES = (
    *(_Nodes(nodes, striped) for nodes, striped in ((2, False), (3, False), (6, False), (1, False), (2, True))),
    *(_Nodes(3, True, 12, dtype) for dtype in (torch.float64, torch.bfloat16, torch.int64)),
    _Nodes(2, elements=6, dtype=torch.int32),
    _Nodes(2, late=True),
)


def _hierarchy_on_ranks(notes: _Notes, answer: Callable) -> list[dict[str, Any]]:
    rank, found = dist.get_rank(), []
    for case in _NODES:
        shape, names = ((case.local, case.nodes), ("in", "out")) if case.striped else ((case.nodes, case.local), "oi")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(names))
        inside, across = (mesh.get_group(names.index(n)) for n in (("in", "out") if case.striped else "io"))
        notes.write(case)
        around = _numbers(rank, (3 * case.elements,), case.dtype)
        mine = around[case.elements : -case.elements]  # in place, so also in a part of another tensor
        if case.late and rank == 0:
            time.sleep(_LATE)
        with _recorded() as calls:
            said = answer(mine, inside, across)
        groups = [_members(inside), _members(across)]
        found.append({"all": around.clone(), "said": said, "calls": calls, "groups": groups})
    return found


@exercise("15-08.4", "Hierarchical ring all-reduce with byte count", points=20)
def hierarchical_all_reduce(trial: Trial, answer: Any) -> None:
    """`answer(tensor, inside, across)` sums over the world in two levels and returns (bytes inside, bytes across)."""
    hint = "does every rank run all three phases, each with its own groups?"
    found = _ranks(trial, _hierarchy_on_ranks, 6, answer, hint=hint, see=1)
    entries = [(case, rank, found[rank][i]) for i, case in enumerate(_NODES) for rank in range(6)]

    with trial.group("the sum over the world, in place", hint="who is in the sum after each phase?", see=1):
        for case, rank, entry in entries:
            everybody = [_numbers(other, (3 * case.elements,), case.dtype) for other in range(6)]
            want, part = everybody[rank].clone(), slice(case.elements, -case.elements)
            want[part] = sum(tensor[part] for tensor in everybody)
            trial.close(f"rank {rank}, {case}, between two tensors that don't take part", entry["all"], want)
    with trial.group("nothing else is sent", hint="which ranks must exchange what in each phase?", see=1):
        for i, case in enumerate(_NODES):
            calls = [(call, found[rank][i]["groups"]) for rank in range(6) for call in found[rank][i]["calls"]]
            other = [call for call, groups in calls if call.group not in groups or "barrier" in call.name]
            trial.that(f"{case}", not other, expected="calls on the two groups, to move data", got=_shown(other[:3]))
            for level, where in enumerate(("inside", "across")):
                sent = sum(call.ring_bytes for call, groups in calls if call.group == groups[level]) / 6
                trial.that(
                    f"{where}, {case}",
                    sent <= case.sent[level] + 1e-6,
                    expected=f"{case.sent[level]} bytes a rank, if rings carry the calls",
                    got=f"{sent:g} bytes a rank",
                )
    with trial.group("returns (bytes inside, bytes across)", hint="count both on paper for 2 nodes of 3", see=2):
        for case, rank, entry in entries:
            trial.equal(f"rank {rank}, {case}", entry["said"], case.sent)


# ---------------------------------------------------------------- 15-08.5

_Batches = list[list[tuple[float, float]]]  # for each rank
_BIG = 2.0**25 + 1  # not a float32


def _evaluations(size: int) -> dict[str, _Batches]:
    rng = random.Random(size)

    def draw(lengths: Sequence[int]) -> _Batches:
        return [[(float(rng.randrange(64)), rng.randrange(64) / 8) for _ in range(n)] for n in lengths]

    lengths = [(2,) * size, (0,) * (size - 1) + (3,), (1,) + (0,) * (size - 1)]
    lengths += [(*(rng.randrange(4) for _ in range(size - 1)), 1) for _ in range(4)]
    cases = {f"{n} batches": draw(n) for n in lengths}
    cases["nothing correct"] = [[(0.0, 1.5)]] * size
    cases["no loss"] = [[(2.0, 0.0)]] * size
    cases["no batch"] = [[] for _ in range(size)]
    cases["large numbers"] = [[(_BIG, 2 * _BIG), (1.0, 0.0)]] * size
    cases["fractions"] = [[(0.1 + rank, 1 / 3)] for rank in range(size)]
    return cases | {"rank 0 late": draw((1,) * size)}


def _evaluate_on_ranks(notes: _Notes, answer: Callable, cases: dict[str, _Batches]) -> list[tuple[Any, list[Call]]]:
    rank, found = dist.get_rank(), []
    for name, batches in cases.items():
        notes.write(name)
        if name == "rank 0 late" and rank == 0:
            time.sleep(_LATE)
        with _recorded() as calls:
            found.append((answer(list(batches[rank])), calls))
    return found


@exercise("15-08.5", "Find the deadlock", points=15)
def evaluate(trial: Trial, answer: Any) -> None:
    """`answer(batches)` returns the mean over the batches of all ranks, with the same collectives on every rank."""
    entries = []
    for size in (3, 1, 2, 5):
        cases = _evaluations(size)
        hint = "does every rank come to each collective, and as often?"
        found = _ranks(trial, _evaluate_on_ranks, size, answer, cases, hint=hint, see=1)
        for i, (name, batches) in enumerate(cases.items()):
            pairs = [pair for batch in batches for pair in batch]
            want = tuple(fsum(p[j] for p in pairs) / len(pairs) if pairs else 0.0 for j in (0, 1))
            entries += [(name, f"rank {rank} of {size}, {name}", want, *found[rank][i]) for rank in range(size)]
    numeric = ("large numbers", "fractions")
    with trial.group("a tuple of two floats", hint="what does your return statement make?"):
        for _, where, _, said, _ in entries:
            right = isinstance(said, tuple) and len(said) == 2 and all(isinstance(value, float) for value in said)
            trial.that(where, right, expected="a tuple of two floats", got=repr(said))
    with trial.group(
        "the mean over all batches of all ranks", hint="which sums, and what count, give what is expected?", see=3
    ):
        for name, where, want, said, _ in entries:
            if name not in (*numeric, "no batch"):
                trial.close(where, tuple(said), want)
    with trial.group("(0.0, 0.0) if no rank has a batch", hint="what do you divide by then?"):
        for name, where, want, said, _ in entries:
            if name == "no batch":
                trial.close(where, tuple(said), want)
    with trial.group("added in float64", hint="follow the dtype from the batches to the result"):
        for name, where, want, said, _ in entries:
            if name in numeric:
                trial.close(where, tuple(said), want)
    with trial.group("at most two collectives, and nothing else", hint="how many numbers must travel?", see=3):
        for _, where, _, _, calls in entries:
            right = len(calls) <= 2 and len(_collectives(calls)) == len(calls)
            trial.that(where, right, expected="at most 2 collectives", got=_shown(calls))


# ---------------------------------------------------------------- 15-08.6


@dataclass(frozen=True)
class _Grads:
    """A case of the averaging: shapes of the gradients, None where there is none."""

    shapes: tuple[tuple[int, ...] | None, ...]
    limit: int
    dtype: torch.dtype = torch.float32
    late: bool = False  # rank 0 comes late

    def grad(self, rank: int, number: int, size: int) -> Tensor | None:
        """Multiples of `size`: their mean is exact. The memory layout differs from rank to rank."""
        shape = self.shapes[number]
        if shape is None:
            return None
        grad = size * _numbers(rank, shape, self.dtype, salt=number).fmod(8)
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


def _averages() -> list[_Grads]:
    cases = [_Grads(_SHAPES, limit) for limit in (10**6, 1, 399, 400, 411, 412)]
    cases += [_Grads(_SHAPES, 900, dtype) for dtype in (torch.float64, torch.bfloat16)]
    cases += [_Grads((), 100), _Grads((None, None), 100), _Grads((None, (2, 3)), 24), _Grads(((4,), None), 15)]
    cases.append(_Grads(((0,), (3,), (2, 0), (1,)), 16))
    rng = random.Random(8)
    for _ in range(8):
        sizes = [(rng.randrange(1, 12),) if rng.random() < 0.85 else None for _ in range(rng.randrange(1, 9))]
        cases.append(_Grads(tuple(sizes), 4 * rng.randrange(1, 30)))
    return [*cases, _Grads(_SHAPES, 200, late=True)]


def _average_on_ranks(notes: _Notes, answer: Callable, cases: list[_Grads]) -> list[dict[str, Any]]:
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for case in cases:
        notes.write(f"{size} ranks, {case}")
        parameters = []
        for number, shape in enumerate(case.shapes):
            data = torch.zeros((2,) if shape is None else shape, dtype=case.dtype)
            parameters.append(torch.nn.Parameter(data, requires_grad=number % 3 != 1))  # some frozen after backward
            parameters[-1].grad = case.grad(rank, number, size)
        held = [p.grad for p in parameters]
        if case.late and rank == 0:
            time.sleep(_LATE)
        with _recorded() as calls:
            said = answer(iter(parameters), case.limit)
        same = all(h is None or p.grad is h for p, h in zip(parameters, held, strict=True))
        grads = [_snapshot(p.grad) for p in parameters]
        found.append({"grads": grads, "same": same, "said": said, "calls": calls})
    return found


@exercise("15-08.6", "Bucketed averaging", points=20)
def average_gradients(trial: Trial, answer: Any) -> None:
    """`answer(parameters, bucket_bytes)` averages gradients in buckets and returns how many there were."""
    entries = []
    for size in (3, 1, 2, 5):
        cases = _averages()[:: 1 if size == 3 else 4]
        hint = "do all ranks make the same buckets, whatever the layout of their gradients?"
        found = _ranks(trial, _average_on_ranks, size, answer, cases, hint=hint, see=1)
        for i, case in enumerate(cases):
            means = [case.mean(number, size) for number in range(len(case.shapes))]
            entries += [(f"rank {rank} of {size}, {case}", means, case, found[rank][i]) for rank in range(size)]
    with trial.group("every gradient is the mean over the ranks", hint="which piece goes to which parameter?", see=2):
        for name, means, _, entry in entries:
            for number, mean in enumerate(means):
                if mean is not None:
                    trial.close(f"gradient {number}, {name}", entry["grads"][number], mean)
    with trial.group("None stays None", hint="which parameters do you leave out?"):
        for name, means, _, entry in entries:
            want = [mean is None for mean in means]
            trial.equal(f"is None, {name}", [grad is None for grad in entry["grads"]], want)
    with trial.group("p.grad is the tensor it was", hint="somebody else may hold p.grad", see=3):
        for name, _, _, entry in entries:
            trial.that(name, entry["same"], expected="the same object, changed in place", got="another tensor")
    with trial.group("one all_reduce for each bucket", hint="fill the buckets on paper for these shapes", see=1):
        for name, _, case, entry in entries:
            calls = entry["calls"]
            trial.that(
                name,
                all(re.match("all_?reduce", call.name) for call in calls),
                expected="calls of all_reduce",
                got=_shown(calls),
            )
            trial.equal(f"bytes of the buckets, sorted, {name}", sorted(c.size for c in calls), sorted(case.buckets))
    with trial.group("returns the number of buckets", hint="what do you count?"):
        for name, _, case, entry in entries:
            trial.equal(name, entry["said"], len(case.buckets))
