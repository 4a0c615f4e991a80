"""Checks of the exercises in 15-08, Distributed Primitives & Communication.

A check runs the answer on real processes, all its cases in one launch, smaller rings as groups of the world; what
they send is recorded below torch.distributed's functions (shared/lessons/topic_15_08/traffic.py), whichever of them
an answer uses.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, cycle, pairwise
from math import ceil, fsum, inf, isfinite, log2, nan, prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.checks.exercise import exercise
from shared.checks.ranks import Notes, ranks
from shared.checks.trial import Trial
from shared.lessons.topic_15_08.traffic import Call, collectives, recorded, rounds

_WORLD = (0, 1, 2, 3, 4)
_RINGS = (_WORLD, (0, 1, 3, 4), (1, 2, 4), (0, 3), (2,))
_LATE = 0.15  # seconds that a rank comes later than the others, where a case asks for it


def _numbers(rank: int, shape: Sequence[int], dtype: torch.dtype, number: int = 0) -> Tensor:
    """Numbers that differ between ranks; a narrower dtype doesn't hold them."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1000 * number + rank))


@dataclass(frozen=True)
class _Case:
    """One call of an answer, in a group or in the whole world, where it gets no group."""

    ring: tuple[int, ...]  # ranks of the world
    late: float = field(default=0.0, kw_only=True)  # seconds that the last one waits for the first to send two ways

    @property
    def in_world(self) -> bool:
        return self.ring == tuple(range(len(self.ring)))

    def other(self, rank: int, places: int) -> int:
        """The rank of the world that many places to the right of `rank`."""
        return self.ring[(self.ring.index(rank) + places) % len(self.ring)]

    def __str__(self) -> str:
        told = [f"{name} {value}" for name, value in vars(self).items() if name != "ring" and value not in (0.0, False)]
        where = f"in the world of {len(self.ring)} ranks" if self.in_world else f"in the group of ranks {self.ring}"
        return f"{', '.join(told)} {where}"


def _cases_on_ranks(notes: Notes, answer: Callable, cases: Sequence[Any], call: Callable) -> list[dict[str, Any]]:
    """What call(answer, case, rank, group) and recording it gave for each case."""
    rank, found = dist.get_rank(), []
    groups = {ring: dist.new_group(ring) for ring in dict.fromkeys(case.ring for case in cases)}
    for number, case in enumerate(cases):
        if rank not in case.ring:
            found.append({})
            continue
        notes.write(case, number)
        dist.barrier(group=groups[case.ring])  # all begin together, but for who is late
        waits = case.late and rank == case.ring[-1]
        two_ways = notes.seen(f"{case.ring[0]} two ways, {number}", case.late) if waits else True
        with recorded(named=True, each=_two_ways(notes, f"{rank} two ways, {number}")) as calls:
            entry = call(answer, case, rank, () if case.in_world else (groups[case.ring],))
        found.append({**entry, "calls": calls, "two ways": two_ways})
    return found


def _two_ways(notes: Notes, sign: str) -> Callable[[Call], None]:
    """Called for every message: leaves the sign when this rank has started messages to two others."""
    sent_to = set()

    def note(call: Call) -> None:
        if call.name == "send":
            sent_to.add(call.peer)
            if len(sent_to) == 2:
                notes.leave(sign)

    return note


def _entries(cases: Sequence[Any], found: list[list[dict]]) -> list[tuple[str, Any, int, dict[str, Any]]]:
    """(name, case, rank, what was found)."""
    return [(f"rank {rank}, {case}", case, rank, found[rank][i]) for i, case in enumerate(cases) for rank in case.ring]


@dataclass(frozen=True)
class _WithTensor(_Case):
    """A call with a tensor and other arguments."""

    arguments: tuple[int, ...] = ()
    shape: tuple[int, ...] = (2, 3)
    dtype: torch.dtype = torch.float32
    overwritten: bool = False  # by the caller, as soon as the answer has returned

    def tensor(self, rank: int) -> Tensor:
        return _numbers(rank, self.shape, self.dtype)


def _with_tensor(answer: Callable, case: _WithTensor, rank: int, group: tuple) -> dict[str, Any]:
    """What the answer returned, the tensor afterwards, and whether these are two."""
    tensor = case.tensor(rank)
    got = answer(tensor, *case.arguments, *group)
    entry = {"got": got, "kept": got, "tensor": tensor.clone(), "new": False}
    if isinstance(got, Tensor):
        entry |= {"got": got.clone(), "new": got.data_ptr() != tensor.data_ptr()}
    if case.overwritten:
        tensor.fill_(77)
    return entry


_GROUP = "(In a group? In the whole world your function came to its end, so what is different here?)"

# ---- 15-08.1


@exercise("15-08.1", "Ring shift", points=10, demands=4)
def ring_shift(trial: Trial, answer: Any) -> None:
    """`answer(tensor, by, group)` returns the tensor from `by` places to the left."""
    cases = [_WithTensor(ring, (by,)) for ring in _RINGS for by in (0, 1, -1, 2, -len(ring), len(ring) + 1, -23)]
    cases += [_WithTensor(_WORLD, (by,), (3, 1), torch.float64) for by in (1, 5)]
    cases += [_WithTensor(_WORLD, (1,), ()), _WithTensor(_WORLD, (1,), late=_LATE)]
    cases.append(_WithTensor(_WORLD, (1,), late=_LATE, overwritten=True))
    hint = f"do all of them wait in the same direction, or for a message that was started and dropped? {_GROUP}"
    see = lambda case: 2 if "in the group" in case else 3  # noqa: E731
    found = ranks(trial, _cases_on_ranks, 5, answer, cases, _with_tensor, hint=hint, see=see, places=2)
    entries = _entries(cases, found)

    def hold(overwritten: bool) -> None:
        for name, case, rank, entry in entries:
            if case.overwritten == overwritten:
                trial.equal(name, entry["got"], case.tensor(case.other(rank, -case.arguments[0])))

    with trial.group("every rank has the tensor from `by` places to its left", hint="whose tensor is it?", see=1):
        hold(overwritten=False)
    with trial.group("one message, straight to its rank, and nothing else", hint="who needs the tensor?", see=1):
        for name, case, rank, entry in entries:
            to = case.other(rank, case.arguments[0])
            sent = [(call.name, call.peer, call.size) for call in entry["calls"] if call.name != "recv"]
            wanted = [("send", to, prod(case.shape) * case.dtype.itemsize)] if to != rank else []
            trial.equal(f"call, rank and bytes, {name}", sent, wanted)
    with trial.group("the result is a new tensor, and the argument stays as it is", hint="what is written?", see=4):
        for name, case, rank, entry in entries:
            trial.equal(f"the argument afterwards, {name}", entry["tensor"], case.tensor(rank))
            trial.that(name, entry["new"], expected="a new tensor", got="the argument")
            trial.equal(f"the result after later calls, {name}", entry["kept"], entry["got"])
    with trial.group("the tensor may be overwritten at once", hint="has its message left when you return?", see=3):
        hold(overwritten=True)


# ---- 15-08.2


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
    cases = []
    for n in (2, 4, 1, 3, 5, 6, 7):  # powers of two first: the first case that hangs tells which hint will help
        cases += [_WithTensor(tuple(range(7 - n, 7)), (src,)) for src in sorted({0, n // 2, n - 1})]
    cases += [_WithTensor(tuple(range(7))), _WithTensor((4, 5, 6), (1,), (), torch.float64)]
    cases.append(_WithTensor((2, 3, 4, 5, 6), (4,), late=_LATE))
    hints = {str(case): (1 if any(case.arguments) else 2) if len(case.ring) in (2, 4) else 3 for case in cases}
    hint = "compare, for one pair of ranks, the round in which the one sends with that in which the other receives"
    see = lambda case: hints.get(case, 3)  # noqa: E731
    found = ranks(trial, _cases_on_ranks, 7, answer, cases, _with_tensor, hint=hint, see=see, places=4)
    entries = _entries(cases, found)

    def root(case: _WithTensor) -> int:
        return case.ring[sum(case.arguments)]

    hint = "who sends to this rank, in which round, and does it have the tensor by then?"
    with trial.group("the root's tensor on every rank, in place", hint=hint, see=2):
        for name, case, _, entry in entries:
            see = 1 if any(case.arguments) else 2  # another root than place 0, or the tree itself
            trial.equal(name, entry["tensor"], case.tensor(root(case)), hint=hint, see=see)
    hint = "who could send, and stands idle, in your second round?"
    with trial.group("sends and receives, in ceil(log2 N) rounds", hint=hint, see=2, free=True):
        for name, _, _, entry in entries:
            trial.equal(f"collectives, {name}", [call.name for call in collectives(entry["calls"])], [])
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


@exercise("15-08.3", "A ring in both directions", points=20, demands=4)
def two_way_ring(trial: Trial, answer: Any) -> None:
    """`answer(tensor, group)` sums in place; half of the tensor goes one way around the ring, half the other."""
    cases = [_WithTensor(ring, (), (size,)) for ring in _RINGS for size in (60, 37)]
    cases += [_WithTensor(_WORLD, (), (4, 25), torch.float64), _WithTensor(_WORLD, (), (3,))]
    cases += [_WithTensor((1, 2, 4), (), ()), _WithTensor(_WORLD, (), (41,), late=1.5)]
    hint = f"does each rank start all messages of a step before it waits for one? {_GROUP}"
    broken = "does each rank send, in each step and each way, the chunk that its neighbour makes room for? "
    broken += "Compare the chunk numbers of two neighbours on paper"
    how = {"hint": hint, "see": 3, "broken": (broken, 2)}
    entries = _entries(cases, ranks(trial, _cases_on_ranks, 5, answer, cases, _with_tensor, **how))

    with trial.group("the sum on every rank, in place", hint="follow one chunk of each half around the ring", see=2):
        for name, case, _, entry in entries:
            trial.close(name, entry["tensor"], sum(case.tensor(other) for other in case.ring))
    with trial.group("messages to the two neighbours only", hint="with whom does a rank of a ring talk?", free=True):
        for name, case, rank, entry in entries:
            neighbours = {case.other(rank, 1), case.other(rank, -1)}
            others = [(call.name, call.peer) for call in entry["calls"] if call.peer not in neighbours]
            trial.equal(f"calls beside those to {sorted(neighbours)}, {name}", others, [])
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
            trial.that(f"{case}", entry["two ways"], expected=expected, got="one way, and the other has to wait")


# ---- 15-08.4


@dataclass(frozen=True)
class _Training(_Case):
    """A case of the early stop: the losses of each rank of the ring, and the patience."""

    losses: tuple[tuple[float, ...], ...]
    patience: int

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


def _trainings(ring: tuple[int, ...]) -> list[_Training]:
    size = len(ring)
    alike = [  # losses of each rank, patience
        ((203.0, 202.0, 202.0, 202.0, 201.0), 2),  # as low as before is not lower
        ((3.0, 4.0, 2.0, 5.0, 6.0, 1.0, 7.0), 2),
        ((1.0, 1 - 2.0**-20, 2.0, 0.5), 1),  # and a little lower is
        ((2.0, nan, -inf, 3.0, nan, -1.5), 2),  # steps without a mean don't count
        ((), 1),
    ]
    cases = [((losses,) * size, patience) for losses, patience in alike]
    cases.append(((*((),) * (size - 1), (4.0, 3.0, 5.0)), 3))
    # one rank improves, the mean doesn't, and vice versa
    cases.append((tuple(tuple(1.0 + 9 * s if rank else 9.0 - s for s in range(6)) for rank in range(size)), 2))
    cases.append((tuple(tuple(20.0 - s if rank else 1.0 + s / 4 for s in range(6)) for rank in range(size)), 2))
    for _ in range(6):
        some = [nan, inf, *(k / 4 for k in range(40))]
        cases.append((tuple(tuple(random.choices(some, k=random.randrange(8))) for _ in ring), random.randrange(1, 4)))
    return [_Training(ring, losses, patience) for losses, patience in cases]


def _train(answer: Callable, case: _Training, rank: int, group: tuple) -> dict[str, Any]:
    steps = iter(case.losses[case.ring.index(rank)])
    return {"means": answer(steps, case.patience, *group), "left": len(list(steps))}


@exercise("15-08.4", "Find the deadlock", points=20, demands=3)
def train_until(trial: Trial, answer: Any) -> None:
    """`answer(steps, patience, group)` trains until the mean loss no longer falls; all ranks stop together."""
    cases = [case for ring in ((1, 2, 4), _WORLD, (2,)) for case in _trainings(ring)]
    hint = "in this case, how often does each rank come to the call that it waits in?"
    entries = _entries(cases, ranks(trial, _cases_on_ranks, 5, answer, cases, _train, hint=hint, see=1))
    hint = "work this case out by hand: which losses does each mean have, and after which step do all ranks stop?"
    with trial.group("the means, on every rank, until they stop falling", hint=hint, see=3):
        for name, case, _, entry in entries:
            trial.close(name, entry["means"], case.outcome()[0], rtol=1e-6, atol=1e-6)
    with trial.group("no rank takes a step in vain", hint="when is it known that this was the last step?"):
        for name, case, rank, entry in entries:
            mine = case.losses[case.ring.index(rank)]
            trial.equal(f"losses left in steps, {name}", entry["left"], max(0, len(mine) - case.outcome()[1]))
    hint = "what must be known each step? (An object takes two collectives: its size, then its bytes.)"
    with trial.group("one collective a step, and one at the end", hint=hint, see=3, free=True):
        for name, case, _, entry in entries:
            most, calls = case.outcome()[1] + 1, [call.name for call in entry["calls"]]
            trial.that(name, len(calls) <= most, expected=f"at most {most}", got=f"{len(calls)}: {calls[:9]}")


# ---- 15-08.5


@dataclass(frozen=True)
class _Grads(_Case):
    """A case of the averaging: shapes of the gradients, None where there is none."""

    shapes: tuple[tuple[int, ...] | None, ...]
    bucket_bytes: int
    dtype: torch.dtype = torch.float32

    def grad(self, rank: int, number: int) -> Tensor | None:
        """The memory layout differs from rank to rank."""
        shape = self.shapes[number]
        if shape is None:
            return None
        grad = _numbers(rank, shape, self.dtype, number)
        return grad.contiguous(memory_format=torch.channels_last) if len(shape) == 4 and rank % 2 else grad

    @property
    def buckets(self) -> list[int]:
        """Bytes of the buckets that the task asks for."""
        found: list[int] = []
        for shape in self.shapes:
            if shape is not None:
                size = self.dtype.itemsize * prod(shape)
                if found and found[-1] + size <= self.bucket_bytes:
                    found[-1] += size
                else:
                    found.append(size)
        return found


def _gradients() -> list[_Grads]:
    shapes = ((10, 10), (3,), None, (7, 2), (2, 3, 2, 2), (1,), (), (20, 3), (5,))
    cases = [(shapes, limit) for limit in (10**6, 1, 399, 400, 411, 412)]
    cases += [((None, None), 100), ((None, (2, 3)), 24), (((4,), None), 15)]
    for _ in range(8):
        sizes = [random.choice([None, *((n,) for n in range(1, 12))]) for _ in range(random.randrange(1, 9))]
        cases.append((tuple(sizes), 4 * random.randrange(1, 30)))
    more = [_Grads(_WORLD, shapes, 900, torch.float64), _Grads(_WORLD, shapes, 200, late=_LATE)]
    return [_Grads(ring, *case) for ring, case in zip(cycle(_RINGS), cases, strict=False)] + more


def _average(answer: Callable, case: _Grads, rank: int, group: tuple) -> dict[str, Any]:
    parameters = []
    for number, shape in enumerate(case.shapes):
        parameters.append(nn.Parameter(torch.zeros((2,) if shape is None else shape, dtype=case.dtype)))
        parameters[-1].grad = case.grad(rank, number)
        parameters[-1].requires_grad_(number != 1)  # frozen after backward
    held = [p.grad for p in parameters]
    said = answer(iter(parameters), case.bucket_bytes, *group)
    same = all(p.grad is grad for p, grad in zip(parameters, held, strict=True))
    return {"grads": [p.grad for p in parameters], "same": same, "said": said}


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
    cases = _gradients()
    hint = "do all ranks make the same buckets, whatever the layout of their gradients?"
    entries = _entries(cases, ranks(trial, _cases_on_ranks, 5, answer, cases, _average, hint=hint, see=1))
    hint = "who shares this sum, is it complete when you read it, and which piece gets into which p.grad?"
    with trial.group("every gradient is the mean over the ranks", hint=hint, see=2):
        for name, case, _, entry in entries:
            for number, shape in enumerate(case.shapes):
                if shape is not None:
                    mean = sum(case.grad(rank, number) for rank in case.ring) / len(case.ring)
                    trial.close(f"gradient {number}, {name}", entry["grads"][number], mean)
    with trial.group("p.grad is the object it was, tensor or None", hint="somebody else may hold p.grad", free=True):
        for name, _, _, entry in entries:
            trial.that(name, entry["same"], expected="the same object, changed in place", got="another one")
    with trial.group("one all_reduce for each bucket", hint="fill the buckets on paper for these shapes", see=1):
        for name, case, _, entry in entries:
            got = [(call.name.replace("_", "").removesuffix("coalesced"), call.size) for call in entry["calls"]]
            trial.equal(f"calls and bytes, {name}", sorted(got), [("allreduce", size) for size in sorted(case.buckets)])
    with trial.group("returns the number of buckets", hint="what do you count?"):
        for name, case, _, entry in entries:
            trial.equal(name, entry["said"], len(case.buckets))


# ---- 15-08.6

_NEAR = {"rtol": 1e-6, "atol": 1e-9}  # float32 will do


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
        times = ", ".join(f"{t:.3g}" for t in self.ready)
        return f"ready ({times}), sizes {self.sizes}, {self.ranks} ranks, alpha {self.alpha:g}, beta {self.beta:g}"


def _backward(n: int) -> _Backward:
    """One of n gradients."""
    ready = sorted(random.uniform(0.0, 0.003 * n) for _ in range(n))
    sizes = [random.randrange(1, 60) * 50_000 for _ in ready]
    return _Backward(tuple(ready), tuple(sizes), random.choice((2, 3, 8)), 10 ** random.uniform(-6, -3), 1e9)


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

    cases = [_backward(n) for n in (1, 2, 3, 4, 5, 6, 7, *[10] * 12)]
    hint = "draw your buckets below the times of ready"
    with trial.group("a list of tuples with all gradients, start and end as the model says", hint=hint, see=1):
        for case in [*cases, _backward(0)]:
            said = ask(case)
            right = isinstance(said, list) and all(isinstance(bucket, tuple) and len(bucket) == 3 for bucket in said)
            right = right and sum(count for count, _, _ in said) == len(case.sizes)
            expected = f"a list of tuples (int, float, float) with {len(case.sizes)} gradients in all"
            trial.that(f"{case}", right, expected=expected, got=said, hint="add up the gradients")
            trial.close(f"{case}", said, case.spans([count for count, _, _ in said]), **_NEAR)
    hint = "which cut is better here, and why?"
    with trial.group("the last bucket ends as early as it can, found in less than a second", hint=hint, see=2):
        for case in cases:
            trial.close(f"end of the last bucket, {case}", ask(case)[-1][2], case.earliest(), **_NEAR)
        for n in range(16, 41, 2):  # what doubles with each fails before it takes for ever
            began = time.perf_counter()
            ask(_backward(n))
            took = time.perf_counter() - began
            slow = {"hint": "what do you work out again and again?", "see": 3}
            trial.that(f"{n} gradients", took < 1, expected="less than 1 s", got=f"{took:.1f} s", **slow)
