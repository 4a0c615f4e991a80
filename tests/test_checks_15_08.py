"""The checks of 15-08 accept right answers, however written, and reject what a student might really write."""

import math
import sys
from functools import cache
from itertools import accumulate, combinations, pairwise
from math import gcd
from typing import ClassVar

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from check_protocol import CheckProtocol

from course.lesson_code import answers, definitions
from shared import launch
from shared.checks import ranks
from shared.checks import topic_15_08 as check
from shared.checks.ranks import RETURNS
from shared.checks.report import CheckFailed

pytestmark = pytest.mark.processes
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest and the notebook

PENDING = []  # handles that nobody waits for; without them gloo would not send
GIVEN = definitions("15-08") | {"PENDING": PENDING}
ANSWERS = answers("15-08", given=GIVEN)  # the class itself need not travel to ranks
HANGS = 2  # seconds for an answer that is to hang; others have time enough for a busy machine


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    start = ranks.launch

    def limited(function, size, notes, answer, *args, timeout, **how):
        return start(function, size, notes, answer, *args, timeout=HANGS if answer in MAY_HANG else 30, **how)

    monkeypatch.setattr(ranks, "launch", limited)


# ---------------------------------------------------------------- right answers, some of which can be made wrong


def me(group=None):
    return dist.get_rank(group), dist.get_world_size(group)


def shift_cycle_by_cycle(tensor, by, group=None):
    """The blocking calls; steps of `by` cut the ring into cycles, and the first of each receives first."""
    rank, size = me(group)
    if by % size == 0:
        return tensor.clone()
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    calls = [
        lambda: dist.recv(out, group=group, group_src=(rank - by) % size),
        lambda: dist.send(tensor, group=group, group_dst=(rank + by) % size),
    ]
    for call in calls if rank < gcd(by, size) else reversed(calls):
        call()
    return out


def tree_by_children(parent, children):
    """Receives from parent(place), then starts all its sends to children(place, size)."""

    def run(tensor, src=0, group=None):
        rank, size = me(group)
        place = (rank - src) % size
        if place:
            dist.recv(tensor, group=group, group_src=(parent(place) + src) % size)
        below = [child for child in children(place, size) if child < size]
        works = [dist.isend(tensor, group=group, group_dst=(child + src) % size) for child in below]
        for work in works:
            work.wait()
        return len(below)

    return run


BINOMIAL = (
    lambda place: place - 2 ** (place.bit_length() - 1),
    lambda place, size: [place + 2**k for k in range(place.bit_length(), size.bit_length())],
)


def halves_of(tensor, size):
    return [half.tensor_split(size) for half in tensor.view(-1).tensor_split(2)]


def halves_of_chunks(tensor, size):
    chunks = [chunk.tensor_split(2) for chunk in tensor.view(-1).tensor_split(size)]
    return [[chunk[half] for chunk in chunks] for half in (0, 1)]


def two_ways_by_calls(cut=halves_of, ways=((1, 0), (-1, 1)), in_turns=False, pieces=1):
    """Single calls; `ways` are (side, which part). The faults are chosen."""

    def run(tensor, group=None):
        rank, size = me(group)
        parts = cut(tensor, size)
        for step in range(2 * (size - 1)):
            works, arrivals = [], []
            for side, part in ways:
                out, into = (parts[part][(rank * side - step - k) % size] for k in (0, 1))
                room = torch.empty_like(into)
                for piece in out.tensor_split(pieces) if out.numel() else ():
                    works.append(dist.isend(piece, group=group, group_dst=(rank + side) % size))
                for piece in room.tensor_split(pieces) if room.numel() else ():
                    works.append(dist.irecv(piece, group=group, group_src=(rank - side) % size))
                arrivals.append((into, room))
                while in_turns and works:
                    works.pop().wait()
            for work in works:
                work.wait()
            for into, room in arrivals:
                into.copy_(into + room if step < size - 1 else room)

    return run


def barrier_at_the_end(tensor, group=None):
    ANSWERS["two_way_ring"](tensor, group)
    dist.barrier(group=group)


def train_gathered(steps, patience, group=None):
    """Pairs (loss, 1 if there is one); whoever has none sends 2; NumPy's floats."""
    import numpy as np

    means, room = [], torch.zeros(me(group)[1], 2, dtype=torch.double)
    while len(means) <= patience or min(means[:-patience]) > min(means[-patience:]):
        try:
            loss = next(steps)
            pair = torch.tensor([loss, 1.0] if abs(loss) < math.inf else [0.0, 0.0], dtype=torch.double)
        except StopIteration:
            pair = torch.tensor([0.0, 2.0], dtype=torch.double)
        dist.all_gather_into_tensor(room, pair.unsqueeze(0), group=group)
        if bool((room[:, 1] == 2).all()):
            break
        taken = room[room[:, 1] == 1, 0].numpy()
        if len(taken):
            means.append(np.float64(taken.mean()))
    return means


def average_async(parameters, bucket_bytes, group=None):
    """Greedy in one pass, divided before it is sent, awaited at the end."""
    pending, bucket = [], []

    def flush():
        if bucket:
            flat = torch.nn.utils.parameters_to_vector([p.grad.contiguous() for p in bucket])
            flat /= dist.get_world_size(group)
            pending.append((flat, list(bucket), dist.all_reduce(flat, group=group, async_op=True)))
            bucket.clear()

    for p in [p for p in parameters if p.grad is not None]:
        if bucket and sum(q.grad.nbytes for q in bucket) + p.grad.nbytes > bucket_bytes:
            flush()
        bucket.append(p)
    flush()
    for flat, members, work in pending:
        work.wait()
        for p, piece in zip(members, flat.split([q.numel() for q in members]), strict=True):
            p.grad[...] = piece.reshape(p.grad.shape)
    return len(pending)


def schedule(cuts, ready, sizes, ranks, alpha, beta):
    """(count, start, end) of buckets that end before the gradients `cuts`."""
    found, free = [], 0.0
    for a, b in pairwise([0, *cuts, len(sizes)]):
        start = max([free, *ready[a:b]])
        free = start + 2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * sum(sizes[a:b]) / beta
        found.append((b - a, start, free))
    return found


def cut_recursively(ready, sizes, *link):
    """By a memo over the last bucket's first gradient."""

    @cache
    def best(stop):
        plans = [schedule([*best(first), first], ready[:stop], sizes[:stop], *link) for first in range(1, stop)]
        plans.append(schedule([], ready[:stop], sizes[:stop], *link))
        return list(accumulate(n for n, _, _ in min(plans, key=lambda plan: plan[-1][2])))[:-1]

    return schedule(best(len(sizes)), ready, sizes, *link) if sizes else []


def cut_tried(most):
    """Every cut into at most so many buckets."""

    def run(ready, sizes, *link):
        n = len(sizes)
        cuts = (cuts for k in range(min(n, most)) for cuts in combinations(range(1, n), k))
        plans = (schedule(cuts, ready, sizes, *link) for cuts in cuts)
        return min(plans, key=lambda plan: plan[-1][2], default=[])

    return run


def cut_greedily(ready, sizes, *link):
    """Opens a bucket whenever the links are free before the next gradient comes."""
    cuts = []
    for k in range(1, len(sizes)):
        if schedule(cuts, ready[:k], sizes[:k], *link)[-1][2] <= ready[k]:
            cuts.append(k)
    return schedule(cuts, ready, sizes, *link) if sizes else []


# ---------------------------------------------------------------- wrong answers

HERE = "rank = dist.get_rank(group)"  # a line at the beginning
OTHER_GROUP = (HERE, f"group = None\n{HERE}")
WORLD = "dist.get_process_group_ranks(group)"
BLOCKING = """for operation in operations:
    blocking = dist.send if operation.op is dist.isend else dist.recv
    blocking(operation.tensor, operation.peer, group=group)"""
NO_WAIT = ("torch.empty_like", "torch.zeros_like", "work.wait()", "PENDING.append(work)")

BATCH = "for work in dist.batch_isend_irecv(operations):\n    work.wait()"
SENT = "dist.isend(tensor, group=group, group_dst=to)"
GATHER = "rows = [tensor.clone() for _ in range(size)]\ndist.all_gather(rows, tensor, group=group)\n"
FROM_LEFT, SAME_PLACE = "places to its left", "return tensor.clone()"
SHIFT = {
    "sends before it receives": (f"{RETURNS}[\\s\\S]*deadlock[\\s\\S]*Hint 3", BATCH, BLOCKING),
    "forgets the group": (f"{RETURNS}[\\s\\S]*Hint 2", *OTHER_GROUP),
    "takes places for ranks": ("(not part of|of a group of|itself)[\\s\\S]*Hint 2", "group_peer=", "peer="),
    "receives from anybody": (
        "receives from any rank",
        BATCH,
        f"sending = {SENT}\ndist.recv(arrived, group=group)\nsending.wait()",
    ),
    "zeros where nothing moves": (FROM_LEFT, SAME_PLACE, "return torch.zeros_like(tensor)"),
    "doesn't wait for what arrives": (FROM_LEFT, *NO_WAIT),
    "gathers all": ("one message, straight to its rank", BATCH, f"{GATHER}arrived = rows[source].clone()"),
    "in place": ("the argument stays", "return arrived", "return tensor.copy_(arrived).clone()"),
    "no copy where nothing moves": ("is a new tensor[\\s\\S]*Hint 4", SAME_PLACE, "return tensor"),
    "doesn't wait for its send": (
        "overwritten at once",
        BATCH,
        f"PENDING.append({SENT})\ndist.recv(arrived, group=group, group_src=source)",
    ),
}

HELD, IN_ROUNDS, COUNTED = "the root's tensor on every rank", "ceil\\(log2 N\\) rounds", "returns the messages it sent"
TREE = {
    "a round too early": (f"{RETURNS}[\\s\\S]*Hint 2", "reach <= place < 2 * reach", "reach <= place"),
    "takes places for ranks": (f"{RETURNS}[\\s\\S]*Hint 4", "group_dst=", "dst=", "group_src=", "src="),
    "receives from anybody": ("receives from any rank", ", group_src=(place - reach + src) % size", ""),
    "always from rank 0": (HELD, HERE, f"src = 0\n{HERE}"),
    "out of place": (HELD, HERE, f"tensor = tensor.clone()\n{HERE}"),
    "broadcast": ("sends and receives", HERE, f"dist.broadcast(tensor, group=group, group_src=src)\nreturn 0\n{HERE}"),
    "a chain": (
        f"{IN_ROUNDS}[\\s\\S]*at most 2 rounds",
        tree_by_children(lambda place: place - 1, lambda place, size: [place + 1]),
    ),
    "counts receives too": (COUNTED, "return sent", "return sent + (place > 0)"),
}

WORKS = "works = dist.batch_isend_irecv(operations) if operations else []\nfor work in works:\n    work.wait()"
SUM, HALF = "the sum on every rank", "more than half of the plain ring's"
TWO_WAYS = {
    "sends before it receives": (RETURNS, WORKS, BLOCKING),
    "takes places for ranks": (RETURNS, *OTHER_GROUP),
    "only the first half of the steps": (SUM, "range(2 * (size - 1))", "range(size - 1)"),
    "the same chunk both ways": (
        f"{RETURNS}[\\s\\S]*SIGABRT[\\s\\S]*chunk numbers[\\s\\S]*Hint 2",
        "place = way * rank",
        "place = rank",
    ),
    "doesn't wait": (SUM, *NO_WAIT),
    "a barrier at the end": ("messages to the two neighbours", barrier_at_the_end),
    "a quarter": (HALF, "tensor_split(2)", "tensor_split((tensor.numel() // 4,))"),
    "both halves the same way": (HALF, two_ways_by_calls(ways=((1, 0), (1, 1)))),
    "in pieces": ("2\\(N-1\\) steps", two_ways_by_calls(pieces=2)),
    "one way, then the other, in each step": (
        "a message each way[\\s\\S]*has to wait",
        two_ways_by_calls(in_turns=True),
    ),
}

NEXT, MEAN, REDUCE = "loss = next(steps, None)", "summed / count", "dist.all_reduce(total, group=group)"
WAITED = "waited = 0 if mean < best else waited + 1"
BEST = "best = min(best, mean)"
ROWS = """rows = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]
dist.all_gather(rows, total, group=group)
total = sum(rows)"""
OBJECTS = "rows = [None] * dist.get_world_size(group)\ndist.all_gather_object(rows, total, group=group)"
MEANS = "the means, on every rank"
TRAIN = {
    "leaves when its steps are over": (RETURNS, NEXT, f"{NEXT}\nif loss is None:\n    break"),
    "judges by its own loss": (RETURNS, f"{WAITED}\n{BEST}", f"mean = loss or mean\n{WAITED}\n{BEST}"),
    "on rank 0 only": (f"{MEANS}[\\s\\S]*rank 2", "return means", "return None if dist.get_rank(group) else means"),
    "as low is lower": (MEANS, "mean < best", "mean <= best"),
    "lower by little": (MEANS, "mean < best", "mean < best - 1e-5"),
    "a step without a mean counts": (MEANS, "if count:", "waited += not count\nif count:"),
    "divides by the ranks": (MEANS, MEAN, "summed / dist.get_world_size(group)"),
    "NaN in the sum": (MEANS, "loss if finite else 0.0", "0.0 if loss is None else loss"),
    "one step more": ("a step in vain", "return means", "next(steps, None)\nreturn means"),
    "objects": ("one collective a step[\\s\\S]*its size,\\s+then its bytes", REDUCE, f"{OBJECTS}\ntotal = sum(rows)"),
}

FULL, ALL = "filled + p.grad.nbytes > bucket_bytes", "dist.all_reduce(flat, group=group)"
DIVIDED = "flat /= dist.get_world_size(group)"
GATHER_ALL = """parts = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
dist.all_gather(parts, flat, group=group)
flat = sum(parts)"""
OF_ALL, EACH = "is the mean over the ranks", "one all_reduce for each bucket"
AVERAGE = {
    "flattens with view": (RETURNS, "grad.reshape(-1)", "grad.view(-1)"),
    "forgets the group": (RETURNS, ALL, "dist.all_reduce(flat)"),
    "goes through the iterator twice": (OF_ALL, "for p in parameters:", "len(list(parameters))\nfor p in parameters:"),
    "packs as it lies in memory": (OF_ALL, "grad.reshape(-1)", "grad.as_strided((grad.numel(),), (1,))"),
    "doesn't wait": (OF_ALL, ALL, "PENDING.append((flat, dist.all_reduce(flat, group=group, async_op=True)))"),
    "into copies": (OF_ALL, "append(p.grad)", "append(p.grad.reshape(-1))"),
    "zeros for None": (
        "p.grad is the object it was",
        "if p.grad is None:",
        "if p.grad is None:\n    p.grad = torch.zeros_like(p)",
    ),
    "never fills a bucket": (EACH, FULL, FULL.replace(">", ">=")),
    "gathers and sums": (EACH, ALL, GATHER_ALL),
    "returns parameters": ("returns the number of buckets", "return len(buckets)", "return sum(map(len, buckets))"),
}

LISTED, MODEL, EARLY = "a list of tuples", "as the model says", "as early as it can"
CUT = {
    "forgets the last bucket": (LISTED, "return plans[-1]", "return plans[-1][:-1]"),
    "all but no gradient": (f"{LISTED}[\\s\\S]*with 0 gradients", "return plans[-1]", "return plans[-1] or None"),
    "doesn't wait for the bucket before": (MODEL, "max(free, ready[j - 1])", "ready[j - 1]"),
    "no latency": (MODEL, "alpha + ", ""),
    "as soon as the links are free": (EARLY, cut_greedily),
    "two buckets at most": (EARLY, cut_tried(2)),
    "every cut": ("less than a second", cut_tried(99)),
}


class TestChecks(CheckProtocol, topic="15-08", given=GIVEN):
    CHECKS: ClassVar = {
        "ring_shift": check.ring_shift,
        "tree_broadcast": check.tree_broadcast,
        "two_way_ring": check.two_way_ring,
        "train_until": check.train_until,
        "average_gradients": check.average_gradients,
        "cut_buckets": check.cut_buckets,
    }
    RIGHT: ClassVar = {
        "ring_shift": [
            shift_cycle_by_cycle,
            ("group_peer=to", f"peer={WORLD}[to]", "group_peer=source", f"peer={WORLD}[source]"),
        ],
        "tree_broadcast": [
            tree_by_children(*BINOMIAL),
            ("group_dst=", f"dst={WORLD}[", "group_src=", f"src={WORLD}[", ") % size)", ") % size])"),
        ],
        "two_way_ring": [two_ways_by_calls(), two_ways_by_calls(halves_of_chunks)],
        "train_until": [
            train_gathered,
            (REDUCE, ROWS, "torch.float64", "torch.float32"),
        ],
        "average_gradients": [
            average_async,
            (ALL, "dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=group)", DIVIDED, ""),
        ],
        "cut_buckets": [cut_recursively, ("min(options", "min(reversed(options)")],
    }
    WRONG: ClassVar = {
        "ring_shift": SHIFT,
        "tree_broadcast": TREE,
        "two_way_ring": TWO_WAYS,
        "train_until": TRAIN,
        "average_gradients": AVERAGE,
        "cut_buckets": CUT,
    }

    def hold_stand_in(self, name, stand_in):
        def broadcast():
            x = torch.tensor(dist.get_rank())
            return stand_in(x, 1), int(x)

        def averaged():
            p = torch.nn.Parameter(torch.zeros(2, 3))
            p.grad = torch.full((3, 2), float(dist.get_rank())).t()
            return stand_in([p, torch.nn.Parameter(torch.zeros(1))], 1), p.grad.tolist()

        if name == "tree_broadcast":
            assert launch(broadcast, 3, backend="gloo") == [(0, 1)] * 3
        if name == "average_gradients":
            assert launch(averaged, 3, backend="gloo") == [(1, [[1.0] * 3] * 2)] * 3
        if name == "cut_buckets":
            assert stand_in([0.2, 0.5], [100, 300], 2, 0.1, 1000.0) == [(2, 0.5, pytest.approx(1.1))]


WRONG = TestChecks.WRONG
MAY_HANG = {answer for wrong in WRONG.values() for says, answer in wrong.values() if says.startswith(RETURNS)}

# ---------------------------------------------------------------- what else a check says


def test_a_deadlock_is_reported_with_a_line_for_each_rank_and_its_case():
    with pytest.raises(CheckFailed) as failure:
        check.ring_shift(WRONG["ring_shift"]["sends before it receives"][1])
    lines = [line.strip() for line in str(failure.value).splitlines()]
    for rank in range(5):
        assert sum(line.startswith(f"rank {rank} waits in send in ring_shift") for line in lines) == 1, lines
    assert "(case: arguments (1,), shape (2, 3)" in str(failure.value)
    with pytest.raises(CheckFailed) as failure:
        check.tree_broadcast(WRONG["tree_broadcast"]["takes places for ranks"][1])
    assert "topic_15_08" not in str(failure.value)  # what isn't the student's is left out


def test_an_answer_with_a_part_missing_was_attempted():
    def half_done(tensor, *args):
        if args and isinstance(args[-1], dist.ProcessGroup):
            raise NotImplementedError
        return ANSWERS["ring_shift"](tensor, *args)

    result = check.ring_shift.run(half_done)
    assert result.status == "failed"
    assert "NotImplementedError" in str(result)
