"""Checks of the exercises in 15-08, Distributed Primitives & Communication.

Every check runs the answer on a few real processes and counts what they send below torch.distributed's functions, so
that it sees messages whichever of them an answer uses. What runs on the ranks is named `*_on_ranks`.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil, log2
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shared.checks.feedback import Trial, exercise
from shared.launcher import LaunchError, launch

_SECONDS = 5  # for an answer that hangs; a right one takes a fraction of a second

_COLLECTIVES = [
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "alltoall",
    "alltoall_base",
    "barrier",
    "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
]


@dataclass
class Traffic:
    """What one rank sent and received.

    Attributes:
        sent, received: (peer, bytes) of each message; peers are ranks of the message's group.
        collectives: (group size, bytes of the largest tensor) of each collective.
        points: (group size, bytes) of each message sent.
    """

    sent: list[tuple[int, int]] = field(default_factory=list)
    received: list[tuple[int, int]] = field(default_factory=list)
    collectives: list[tuple[int, int]] = field(default_factory=list)
    points: list[tuple[int, int]] = field(default_factory=list)


@contextmanager
def _counted() -> Iterator[Traffic]:
    """Count the calls that reach the process groups of this rank."""
    traffic, kept = Traffic(), {}

    def watch(name: str, note: Callable) -> None:
        kept[name] = vars(dist.ProcessGroup).get(name)  # not getattr: that is no method any more
        original = getattr(dist.ProcessGroup, name)

        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            note(group, args, kwargs)
            return original(group, *args, **kwargs)

        setattr(dist.ProcessGroup, name, call)

    def sends(group: Any, args: tuple, kwargs: dict) -> None:
        traffic.sent.append((int(args[1]), _largest(args)))
        traffic.points.append((group.size(), _largest(args)))

    watch("send", sends)
    watch("recv", lambda group, args, kwargs: traffic.received.append((int(args[1]), _largest(args))))
    for name in _COLLECTIVES:
        if hasattr(dist.ProcessGroup, name):
            watch(
                name,
                lambda group, args, kwargs: traffic.collectives.append(
                    (group.size(), _largest([*args, *kwargs.values()]))
                ),
            )
    try:
        yield traffic
    finally:
        for name, method in kept.items():
            if method is None:  # inherited
                delattr(dist.ProcessGroup, name)
            else:
                setattr(dist.ProcessGroup, name, method)


def _largest(values: Any) -> int:
    if isinstance(values, Tensor):
        return values.nbytes
    return max((_largest(value) for value in values), default=0) if isinstance(values, list | tuple) else 0


def _ranks(trial: Trial, item: str, function: Callable, size: int, *args: Any, hint: str) -> list[Any]:
    """Run the function on `size` ranks; a rank that fails or hangs fails the item."""
    try:
        return launch(function, size, *args, backend="gloo", timeout=_SECONDS)
    except LaunchError as error:
        if type(error.error) is NotImplementedError and not error.error.args:
            raise NotImplementedError from None
        message = str(error)
        reason = error.reason
    waits = (
        "a rank waits for a message that nobody sends, or nobody receives what it sends. " if reason != "raised" else ""
    )
    if "Pair is not connected" in message or "not part of group" in message:
        waits = "a message went to a rank outside of the group: src= and dst= mean ranks of the world. "
    where = _where_ranks_stand(message)
    got = "\n".join([message.splitlines()[0], *where]) if where else message
    trial.that(item, False, expected="every rank returns", got=got, hint=waits + hint)
    raise AssertionError  # not reached: a failed item ends the check


def _where_ranks_stand(message: str) -> list[str]:
    """The report's lines on ranks that wait or have returned; those that stand in the answer come first."""
    _, *lines = message.splitlines()
    ranks = [line.strip() for line in lines if re.match(r"\s*rank \d+ (waits|has|did|is)\b", line)]
    ranks = ranks if len(ranks) == len(lines) else []  # anything else, such as a traceback, stays in one piece
    inside = [line for line in ranks if "_on_ranks" not in line]
    outside = [line.split(" waits ")[0] + " waits for the others, outside of your function" for line in ranks]
    outside = [line for line, report in zip(outside, ranks, strict=True) if report not in inside]
    return inside + outside


def _close(trial: Trial, item: str, got: Any, want: Tensor, *, hint: str) -> None:
    """Like trial.close, but a pass is not listed: there are many ranks, and one line for all of them follows."""
    comparable = isinstance(got, Tensor) and (got.shape, got.dtype) == (want.shape, want.dtype)
    if not comparable or not torch.allclose(got, want):
        trial.close(item, got, want, hint=hint)


def _numbers(rank: int, count: int, salt: int = 0) -> Tensor:
    """Whole numbers as float32, other ones on every rank: sums of them are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(-50, 50, (count,), generator=generator).float()


# ---------------------------------------------------------------- 15-08.1

_SHIFTS = (1, -1, 2, 0, 5, -7)


def _shift_on_ranks(answer: Callable) -> dict[str, Any]:
    size, rank = dist.get_world_size(), dist.get_rank()
    part = dist.new_group([1, 2, 3]) if size == 4 else None
    found: dict[str, Any] = {"world": [], "traffic": [], "part": [], "kept": True, "own memory": True}
    for by in _SHIFTS:
        mine = _numbers(rank, 6).view(2, 3)
        before = mine.clone()
        with _counted() as traffic:
            got = answer(mine, by)
        found["world"].append(got)
        found["traffic"].append(traffic)
        found["kept"] &= torch.equal(mine, before)
        found["own memory"] &= isinstance(got, Tensor) and got.data_ptr() != mine.data_ptr()
    if part is not None and rank in (1, 2, 3):
        found["part"] = [answer(_numbers(rank, 6).view(2, 3), by, part) for by in (1, -1)]
    return found


@exercise("15-08.1", "Ring shift")
def ring_shift(trial: Trial, answer: Any) -> None:
    """`answer(tensor, by, group)` returns the tensor from `by` places to the left."""
    hint = (
        "start the send and the receive, then wait for both: batch_isend_irecv. "
        "In a smaller group: rank and size of the group, and group_peer= (or group_dst=, group_src=)"
    )
    found = _ranks(trial, "runs on four ranks", _shift_on_ranks, 4, answer, hint=hint)
    for i, by in enumerate(_SHIFTS):
        want = [_numbers((rank - by) % 4, 6).view(2, 3) for rank in range(4)]
        for rank in range(4):
            _close(trial, f"by {by}, on rank {rank}", found[rank]["world"][i], want[rank], hint=_shift_hint(by))
            traffic, to = found[rank]["traffic"][i], [(rank + by) % 4] * bool(by % 4)
            trial.needs(
                f"by {by}: rank {rank} sends {'one message' if to else 'nothing'}, and calls no collective",
                [peer for peer, _ in traffic.sent] == to and not traffic.collectives,
                expected=f"messages to {to}, no collective",
                got=f"messages to {[peer for peer, _ in traffic.sent]}, {len(traffic.collectives)} collectives",
                hint="send straight to (rank + by) % size; nobody needs the other ranks' tensors",
            )
        trial.passes(f"by {by}: every rank has what it should")
    trial.that(
        "the tensor passed in stays as it was",
        all(f["kept"] for f in found),
        expected="unchanged",
        got="overwritten",
        hint="receive into a new tensor: torch.empty_like(tensor)",
    )
    trial.that(
        "the result is a new tensor",
        all(f["own memory"] for f in found),
        expected="memory of its own",
        got="the tensor that was passed",
        hint="for by = 0 return tensor.clone()",
    )
    for i, by in enumerate((1, -1)):
        for place in range(3):
            _close(
                trial,
                f"in the group of ranks 1, 2, 3, by {by}, on rank {place + 1}",
                found[place + 1]["part"][i],
                _numbers((place - by) % 3 + 1, 6).view(2, 3),
                hint="take rank and size from the group, and address by group_peer= (or group_dst=, group_src=)",
            )
    trial.passes("in the group of ranks 1, 2, 3")
    alone = _ranks(trial, "runs on one rank", _shift_on_ranks, 1, answer, hint="by % 1 is 0: return a copy")
    trial.close("on one rank", alone[0]["world"][0], _numbers(0, 6).view(2, 3), hint="a copy of the own tensor")


def _shift_hint(by: int) -> str:
    if by == 0:
        return "nobody moves: return a copy"
    if abs(by) > 4:
        return "once around the ring is no step: (rank + by) % size"
    return "send to (rank + by) % size, receive from (rank - by) % size, and wait for the receive before you return"


# ---------------------------------------------------------------- 15-08.2


def _tree_on_ranks(answer: Callable) -> list[dict[str, Any]]:
    size, rank, found = dist.get_world_size(), dist.get_rank(), []
    for count in range(1, size + 1):
        members = list(range(size - count, size))
        group = dist.new_group(members)
        if rank in members:
            mine = _numbers(rank, 5)
            with _counted() as traffic:
                said = answer(mine, count // 2, group)
            found.append({"tensor": mine, "said": said, "traffic": traffic})
        else:
            found.append({})
    mine = _numbers(rank, 5)
    answer(mine)
    found.append({"tensor": mine})
    return found


def _rounds(sent: list[list[tuple[int, int]]], root: int) -> int:
    """Rounds that a broadcast takes, from the messages (peer, bytes) that each rank sent, in order."""
    arrival, waiting = {root: 0}, [root]
    while waiting:
        rank = waiting.pop()
        for turn, (peer, _) in enumerate(sent[rank], start=1):
            if peer not in arrival:
                arrival[peer] = arrival[rank] + turn
                waiting.append(peer)
    return max(arrival.values())


def _tree_stand_in(tensor: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> int:
    """PyTorch's broadcast."""
    dist.broadcast(tensor, group=group, group_src=src)
    return 0


@exercise("15-08.2", "Tree broadcast", stand_in=lambda: _tree_stand_in)
def tree_broadcast(trial: Trial, answer: Any) -> None:
    """`answer(tensor, src, group)` broadcasts in place in ceil(log2 N) rounds and returns the messages sent."""
    size = 6
    found = _ranks(
        trial,
        "runs in groups of 1 to 6 ranks",
        _tree_on_ranks,
        size,
        answer,
        hint="compare, for one pair, the round in which the one sends with the round in which the other receives; "
        "to a place that is not below size nothing is sent",
    )
    for count in range(1, size + 1):
        first = size - count
        want = _numbers(first + count // 2, 5)
        rounds = ceil(log2(count))
        for rank in range(first, size):
            entry, place = found[rank][count - 1], rank - first
            label = f"group of {count}, src {count // 2}: rank {place}"
            _close(
                trial,
                f"{label} has the root's tensor",
                entry["tensor"],
                want,
                hint="place = (rank - src) % size, and back (place + src) % size; all ranks are ranks of the group",
            )
            traffic = entry["traffic"]
            trial.needs(
                f"{label} uses sends and receives only",
                not traffic.collectives,
                expected="no collective",
                got=f"{len(traffic.collectives)} collective calls",
                hint="build it from dist.send and dist.recv",
            )
            trial.needs(
                f"{label} sends at most {rounds} messages",
                len(traffic.sent) <= rounds,
                expected=f"at most {rounds}",
                got=f"{len(traffic.sent)}",
                hint="who has the tensor sends it once a round, and there are ceil(log2 N) rounds",
            )
            trial.needs(
                f"{label} receives once, the root never",
                len(traffic.received) == int(place != count // 2),
                expected=str(int(place != count // 2)),
                got=str(len(traffic.received)),
                hint="after its round of receiving a rank only sends",
            )
            trial.needs(
                f"{label} returns the messages it sent",
                type(entry["said"]) is int and entry["said"] == len(traffic.sent),
                expected=str(len(traffic.sent)),
                got=repr(entry["said"]),
                hint="count each send of this rank; return an int",
            )
        took = _rounds([found[rank][count - 1]["traffic"].sent for rank in range(first, size)], count // 2)
        trial.needs(
            f"group of {count}, src {count // 2}: everybody has it after {rounds} rounds",
            took <= rounds,
            expected=f"{rounds} rounds in which every rank sends at most one message",
            got=f"{took} rounds",
            hint="in every round all ranks that have the tensor send it on",
        )
        trial.passes(f"group of {count}, src {count // 2}: the root's tensor on every rank, in {rounds} rounds")
    for rank in range(size):
        _close(
            trial,
            f"defaults: rank {rank} has rank 0's tensor",
            found[rank][-1]["tensor"],
            _numbers(0, 5),
            hint="src=0, group=None",
        )
    trial.passes("defaults: rank 0's tensor, in the world")


# ---------------------------------------------------------------- 15-08.3


def _scatter_on_ranks(answer: Callable) -> dict[str, Any]:
    size, rank = dist.get_world_size(), dist.get_rank()
    chunks = [_numbers(rank, 6, salt=c).view(2, 3) for c in range(size)]
    before = [chunk.clone() for chunk in chunks]
    with _counted() as traffic:
        got = answer(chunks)
    kept = all(torch.equal(a, b) for a, b in zip(chunks, before, strict=True))
    return {"got": got, "kept": kept, "traffic": traffic}


@exercise("15-08.3", "Reduce-scatter")
def reduce_scatter(trial: Trial, answer: Any) -> None:
    """`answer(chunks)` returns the sum of everybody's chunks[rank], by a ring of N-1 steps."""
    for size in (4, 3, 1):
        found = _ranks(
            trial,
            f"runs on {size} rank{'s' * (size > 1)}",
            _scatter_on_ranks,
            size,
            answer,
            hint="start both directions before waiting for either; one rank sends nothing",
        )
        for rank, entry in enumerate(found):
            want = sum(_numbers(r, 6, salt=rank).view(2, 3) for r in range(size))
            _close(
                trial,
                f"{size} ranks: rank {rank} has the sum of all chunks[{rank}]",
                entry["got"],
                want,
                hint="in step s send the sum of chunk (rank - s - 1), receive that of (rank - s - 2), add yours",
            )
            trial.needs(
                f"{size} ranks: rank {rank} leaves its chunks as they were",
                entry["kept"],
                expected="unchanged",
                got="a chunk was overwritten",
                hint="start from a clone; add out of place, or into the buffer that was received",
            )
            traffic = entry["traffic"]
            right, left = (rank + 1) % size, (rank - 1) % size
            trial.needs(
                f"{size} ranks: rank {rank} sends one chunk a step, to the right only",
                traffic.sent == [(right, 24)] * (size - 1) and traffic.received == [(left, 24)] * (size - 1),
                expected=f"{size - 1} messages of 24 bytes to rank {right}, as many from rank {left}",
                got=f"sent (rank, bytes) {traffic.sent}, received {traffic.received}",
                hint="only the partial sum travels, not all chunks",
            )
            trial.needs(
                f"{size} ranks: no collective",
                not traffic.collectives,
                expected="messages only",
                got=f"{len(traffic.collectives)} collective calls",
                hint="use P2POp and batch_isend_irecv",
            )
        trial.passes(f"on {size} rank{'s' * (size > 1)}: the sums, and {size - 1} messages a rank")


# ---------------------------------------------------------------- 15-08.4

_MESHES = ((2, 3), (3, 2), (6, 1), (1, 6))
_ELEMENTS = 36


def _hierarchy_on_ranks(answer: Callable) -> list[dict[str, Any]]:
    found = []
    for shape in _MESHES:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("across", "inside"))
        mine = _numbers(dist.get_rank(), _ELEMENTS)
        with _counted() as traffic:
            said = answer(mine, mesh.get_group("inside"), mesh.get_group("across"))
        found.append({"tensor": mine, "said": said, "traffic": traffic})
    return found


@exercise("15-08.4", "Hierarchical ring all-reduce with byte count")
def hierarchical_all_reduce(trial: Trial, answer: Any) -> None:
    """`answer(tensor, inside, across)` sums over the world in two levels and returns (bytes inside, bytes across)."""
    found = _ranks(
        trial,
        "runs on six ranks",
        _hierarchy_on_ranks,
        6,
        answer,
        hint="every rank runs all three phases, each with its own groups",
    )
    want = sum(_numbers(rank, _ELEMENTS) for rank in range(6))
    total = _ELEMENTS * 4
    for i, (nodes, local) in enumerate(_MESHES):
        expected = (2 * (local - 1) * total // local, 2 * (nodes - 1) * total // (nodes * local))
        for rank in range(6):
            label = f"{nodes} nodes of {local}: rank {rank}"
            entry = found[rank][i]
            _close(
                trial,
                f"{label} has the sum over all six ranks",
                entry["tensor"],
                want,
                hint="reduce-scatter inside, all-reduce the shard across, all-gather inside, into the tensor passed in",
            )
            calls = entry["traffic"].collectives + entry["traffic"].points
            largest = max((size for group, size in calls if group == nodes and nodes != local), default=0)
            trial.needs(
                f"{label} sends only its shard across",
                largest <= total // local and not any(group == 6 != max(nodes, local) for group, _ in calls),
                expected=f"calls on the two groups, with at most {total // local} bytes between nodes",
                got=f"(group size, bytes) {calls}",
                hint="the all-reduce between nodes takes the shard, not the tensor, and nothing uses the whole world",
            )
            said = entry["said"]
            trial.needs(
                f"{label} returns the bytes it sent (inside, across)",
                isinstance(said, tuple) and len(said) == 2 and all(type(b) is int for b in said) and said == expected,
                expected=f"{expected}, with S = {total}, L = {local}, M = {nodes}",
                got=repr(said),
                hint="inside 2(L-1)/L · S; across 2(M-1)/M · S/L; a pair of ints",
            )
        trial.passes(f"{nodes} nodes of {local}: the sum, and the bytes {expected}")


# ---------------------------------------------------------------- 15-08.5

_BATCHES = (
    ([(3.0, 0.5), (5.0, 0.25), (1.0, 1.0)], [(2.0, 2.0)], []),
    ([], [], []),
    ([], [(4.0, 0.5)], [(2.0**25 + 1, 1.5), (1.0, 0.0)]),
)


def _evaluate_on_ranks(answer: Callable) -> list[tuple[Any, int, int]]:
    found = []
    for case in _BATCHES:
        with _counted() as traffic:
            said = answer(list(case[dist.get_rank()]))
        found.append((said, len(traffic.collectives), len(traffic.sent) + len(traffic.received)))
        dist.barrier()
    return found


@exercise("15-08.5", "Find the deadlock")
def evaluate(trial: Trial, answer: Any) -> None:
    """`answer(batches)` returns the mean over the batches of all ranks, with the same collectives on every rank."""
    found = _ranks(
        trial,
        "runs on three ranks with different numbers of batches",
        _evaluate_on_ranks,
        3,
        answer,
        hint="no collective inside a loop whose length differs, none under a condition that differs",
    )
    for i, case in enumerate(_BATCHES):
        pairs = [pair for rank in case for pair in rank]
        want = tuple(sum(p[j] for p in pairs) / len(pairs) if pairs else 0.0 for j in (0, 1))
        for rank in range(3):
            said, collectives, messages = found[rank][i]
            label = f"{[len(batches) for batches in case]} batches: rank {rank}"
            trial.needs(
                f"{label} has the mean over all batches",
                isinstance(said, tuple | list) and all(type(v) is float for v in said) and tuple(said) == want,
                expected=repr(want),
                got=repr(said),
                hint="sum of all ranks over count of all ranks, a pair of floats; float64 keeps large counts exact"
                if pairs
                else "with no batch anywhere the count is 0: don't divide by it",
            )
            trial.needs(
                f"{label} calls at most two collectives",
                collectives <= 2 and messages == 0,
                expected="at most 2",
                got=f"{collectives} collectives, {messages} messages",
                hint="one tensor of three numbers needs one",
            )
        trial.passes(f"{[len(batches) for batches in case]} batches: the mean on every rank")


# ---------------------------------------------------------------- 15-08.6

_SHAPES = ((10, 10), (3,), None, (7, 2), (4, 4), (1,), (20, 3), (5,))


def _parameters(rank: int, with_gradients: bool = True) -> list[torch.nn.Parameter]:
    parameters = []
    for i, shape in enumerate(_SHAPES):
        p = torch.nn.Parameter(torch.zeros(shape or (9, 9)))
        if shape is not None and with_gradients:
            p.grad = (
                _numbers(rank, p.numel(), salt=i).view(*reversed(shape)).t() if i == 3 else _gradient(rank, i, shape)
            )
        parameters.append(p)
    return parameters


def _gradient(rank: int, i: int, shape: tuple[int, ...]) -> Tensor:
    return _numbers(rank, torch.Size(shape).numel(), salt=i).view(shape)


def _average_on_ranks(answer: Callable) -> list[dict[str, Any]]:
    found = []
    for limit in _LIMITS:
        parameters = _parameters(dist.get_rank())
        held = [p.grad for p in parameters]
        with _counted() as traffic:
            said = answer(iter(parameters), limit)
        found.append(
            {
                "grads": [p.grad for p in parameters],
                "held": [None if g is None else g.clone() for g in held],
                "same": all(p.grad is g for p, g in zip(parameters, held, strict=True)),
                "said": said,
                "bytes": [size for _, size in traffic.collectives],
            }
        )
    with _counted() as traffic:
        said = answer(iter(_parameters(0, with_gradients=False)), 100)
    found.append({"said": said, "bytes": [size for _, size in traffic.collectives]})
    return found


_LIMITS = (10**6, 128, 1, 400, 468)  # 468: a bucket that is full to the byte


def _greedy(limit: int) -> list[int]:
    """Bytes of the buckets that the task asks for."""
    buckets: list[int] = []
    for shape in _SHAPES:
        if shape is not None:
            size = 4 * torch.Size(shape).numel()
            if buckets and buckets[-1] + size <= limit:
                buckets[-1] += size
            else:
                buckets.append(size)
    return buckets


@exercise("15-08.6", "Bucketed averaging")
def average_gradients(trial: Trial, answer: Any) -> None:
    """`answer(parameters, bucket_bytes)` averages gradients in buckets and returns how many there were."""
    size = 3
    hint = "skip parameters whose grad is None; `parameters` may be an iterator, so go through it once"
    found = _ranks(trial, "runs on three ranks", _average_on_ranks, size, answer, hint=hint)
    want = [
        None if p.grad is None else sum(_parameters(rank)[i].grad for rank in range(size)) / size
        for i, p in enumerate(_parameters(0))
    ]
    for case, limit in enumerate(_LIMITS):
        for rank in range(size):
            entry = found[rank][case]
            label = f"bucket_bytes {limit}, rank {rank}"
            trial.needs(
                f"{label}: grad None stays None",
                all((g is None) == (w is None) for g, w in zip(entry["grads"], want, strict=True)),
                expected="None where it was None",
                got=str([None if g is None else tuple(g.shape) for g in entry["grads"]]),
                hint="skip what has no gradient",
            )
            for i, mean in enumerate(want):
                if mean is not None:
                    _close(
                        trial,
                        f"{label}: gradient {i} is the mean over the ranks",
                        entry["grads"][i],
                        mean,
                        hint="sum, divide by the world size, and copy each piece back to its own parameter",
                    )
            trial.needs(
                f"{label}: p.grad is the tensor it was",
                entry["same"],
                expected="the same object, changed in place",
                got="another tensor",
                hint="p.grad.copy_(...), not p.grad = ...",
            )
            trial.needs(
                f"{label}: one all_reduce for each bucket",
                entry["bytes"] == _greedy(limit),
                expected=f"buckets of {_greedy(limit)} bytes",
                got=f"collectives of {entry['bytes']} bytes",
                hint="fill in the order given as long as the sum stays at or below the limit; a larger one goes alone",
            )
            trial.needs(
                f"{label}: returns the number of buckets",
                entry["said"] == len(entry["bytes"]),
                expected=str(len(entry["bytes"])),
                got=repr(entry["said"]),
                hint="return len(buckets)",
            )
        trial.passes(f"bucket_bytes {limit}: the mean, in {len(_greedy(limit))} buckets")
    trial.that(
        "no gradient at all: no bucket, no message",
        found[0][-1] == {"said": 0, "bytes": []},
        expected="0, and no all_reduce",
        got=f"{found[0][-1]['said']!r} with {len(found[0][-1]['bytes'])} collectives",
        hint="don't send an empty bucket",
    )
