"""The checks of 15-08 accept right answers, however written, and reject what a student might really write.

Most wrong answers are the notebook's own with a piece of its text replaced.
"""

import math
import sys
from functools import cache, partial
from itertools import accumulate, combinations, pairwise
from math import gcd

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from answer_variants import variants
from check_protocol import CheckProtocol, idle

from course.exercise_form import student_source
from course.lesson_code import answers, definitions
from shared import launch
from shared.checks import ranks
from shared.checks import topic_15_08 as check
from shared.checks.ranks import RETURNS
from shared.checks.report import CheckFailed

pytestmark = pytest.mark.processes
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest and the notebook

PENDING = []  # handles that nobody waits for; without them gloo would not send
ANSWERS = answers("15-08")
STUBS = answers("15-08", edit=student_source)
IDLE = idle("15-08")
CHECKS = {
    "ring_shift": check.ring_shift,
    "tree_broadcast": check.tree_broadcast,
    "two_way_ring": check.two_way_ring,
    "train_until": check.train_until,
    "average_gradients": check.average_gradients,
    "cut_buckets": check.cut_buckets,
}
CELLS = dict(zip(("shift", "tree", "two-ways", "deadlock", "buckets", "cut"), CHECKS, strict=True))
variant = variants("15-08", CELLS, {**definitions("15-08"), "PENDING": PENDING})
HANGS = 2  # seconds for an answer that is to hang; others have time enough for a busy machine


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    start = ranks.launch

    def limited(function, size, notes, answer, *args, timeout, **how):
        return start(function, size, notes, answer, *args, timeout=HANGS if answer in MAY_HANG else 30, **how)

    monkeypatch.setattr(ranks, "launch", limited)


def me(group=None):
    return dist.get_rank(group), dist.get_world_size(group)


_HERE = "    rank = dist.get_rank(group)\n"  # a place at the beginning

# ---------------------------------------------------------------- ring shift

shift = partial(variant, "shift")
_CALLS = """    operations = [
        dist.P2POp(dist.isend, tensor, group=group, group_peer=to),
        dist.P2POp(dist.irecv, arrived, group=group, group_peer=source),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
"""
_SEND = "    dist.send(tensor, group=group, group_dst=to)\n"
_RECEIVE = "    dist.recv(arrived, group=group, group_src=source)\n"
_START = "    sending = dist.isend(tensor, group=group, group_dst=to)\n"
_IF = "        return tensor.clone()\n"
_END = "    return arrived\n"


def shift_between_world_ranks(tensor, by, group=None):
    """Only numbers of the world; the receive is started first."""
    everybody = dist.get_process_group_ranks(group)
    place = everybody.index(dist.get_rank())
    to = everybody[(place + by) % len(everybody)]
    if to == dist.get_rank():
        return tensor.clone()
    out = torch.zeros_like(tensor)
    receiving = dist.irecv(out, everybody[(place - by) % len(everybody)])
    dist.isend(tensor, to).wait()
    receiving.wait()
    return out


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


def shift_in_small_steps(tensor, by, group=None):
    out = tensor.clone()
    for _ in range(by % me(group)[1]):
        out = ANSWERS["ring_shift"](out, 1, group)
    return out


GATHER = "    rows = [tensor.clone() for _ in range(size)]\n    dist.all_gather(rows, tensor, group=group)\n"
FROM_LEFT, ONE_MESSAGE, NEW = "places to its left", "one message, straight to its rank", "is a new tensor"
WRONG_SHIFT = {
    "sends before it receives": (shift((_CALLS, _SEND + _RECEIVE)), f"{RETURNS}[\\s\\S]*deadlock[\\s\\S]*Hint 3"),
    "sends to itself": (shift(("by % size == 0", "by == 0")), "sends to itself"),
    "doesn't wrap around": (shift(("(rank + by) % size", "rank + by"), ("(rank - by) % size", "rank - by")), RETURNS),
    "forgets the group": (shift((_HERE, "    group = None\n" + _HERE)), f"{RETURNS}[\\s\\S]*Hint 2"),
    "takes places for ranks": (
        shift(("group_peer=", "peer=")),
        "(not part of|of a group of|itself)[\\s\\S]*Hint 2",
    ),
    "receives from anybody": (
        shift((_CALLS, _START + "    dist.recv(arrived, group=group)\n    sending.wait()\n")),
        "receives from any rank",
    ),
    "to the left": (shift(("    to =", "    by = -by\n    to =")), FROM_LEFT),
    "zeros where nothing moves": (shift((_IF, "        return torch.zeros_like(tensor)\n")), FROM_LEFT),
    "in float32": (shift((_HERE, "    tensor = tensor.float()\n" + _HERE)), f"{FROM_LEFT}[\\s\\S]*torch.float64"),
    "doesn't wait for what arrives": (
        shift(("torch.empty_like", "torch.zeros_like"), ("work.wait()", "PENDING.append(work)")),
        FROM_LEFT,
    ),
    "gathers all": (shift((_CALLS, GATHER + "    arrived = rows[source].clone()\n")), ONE_MESSAGE),
    "in small steps": (shift_in_small_steps, ONE_MESSAGE),
    "in place": (shift((_END, "    return tensor.copy_(arrived).clone()\n")), "the argument stays"),
    "no copy where nothing moves": (shift((_IF, "        return tensor\n")), f"{NEW}[\\s\\S]*Hint 4"),
    "one buffer for all calls": (
        shift((_END, "    return vars(ring_shift).setdefault(tensor.shape, arrived).copy_(arrived)\n")),
        NEW,
    ),
    "doesn't wait for its send": (
        shift((_CALLS, _START + "    PENDING.append(sending)\n" + _RECEIVE)),
        "overwritten at once",
    ),
}

# ---------------------------------------------------------------- tree broadcast

tree = partial(variant, "tree")
_SENT = "    return sent\n"
_BROADCAST = "    dist.broadcast(tensor, group=group, group_src=src)\n    return 0\n"


def tree_by_ranges(tensor, src=0, group=None):
    """The first of a range sends to the first of its second half; addressed by ranks of the world."""
    everybody = dist.get_process_group_ranks(group)
    turned = everybody[src:] + everybody[:src]

    def pass_on(ranks):
        if len(ranks) == 1:
            return 0
        middle = (len(ranks) + 1) // 2
        near, far = ranks[:middle], ranks[middle:]
        if dist.get_rank() in far:
            if dist.get_rank() == far[0]:
                dist.recv(tensor, near[0])
            return pass_on(far)
        if dist.get_rank() == near[0]:
            dist.send(tensor, far[0])
        return (dist.get_rank() == near[0]) * 1 + pass_on(near)

    return pass_on(turned)


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
HELD, IN_ROUNDS, COUNTED = "the root's tensor on every rank", "ceil\\(log2 N\\) rounds", "returns the messages it sent"
WRONG_TREE = {
    "sends beyond the last place": (tree((" and place + reach < size", "")), f"{RETURNS}[\\s\\S]*Hint 3"),
    "a round too early": (tree(("reach <= place < 2 * reach", "reach <= place")), f"{RETURNS}[\\s\\S]*Hint 2"),
    "takes places for ranks": (tree(("group_dst=", "dst="), ("group_src=", "src=")), f"{RETURNS}[\\s\\S]*Hint 4"),
    "receives from anybody": (tree((", group_src=(place - reach + src) % size", "")), "receives from any rank"),
    "always from rank 0": (tree((_HERE, "    src = 0\n" + _HERE)), HELD),
    "by default from rank 1": (tree(("src: int = 0", "src: int = 1")), f"{HELD}[\\s\\S]*in the world"),
    "out of place": (tree((_HERE, "    tensor = tensor.clone()\n" + _HERE)), HELD),
    "in float32": (
        tree(
            (_HERE, "    whole, tensor = tensor, tensor.float()\n" + _HERE),
            (_SENT, "    whole.copy_(tensor)\n" + _SENT),
        ),
        f"{HELD}[\\s\\S]*torch.float64",
    ),
    "broadcast": (tree((_HERE, _BROADCAST + _HERE)), "sends and receives"),
    "always two rounds": (tree(("reach < size:", "reach < min(size, 4):")), HELD),
    "a chain": (
        tree_by_children(lambda place: place - 1, lambda place, size: [place + 1]),
        f"{IN_ROUNDS}[\\s\\S]*at most 2 rounds",
    ),
    "all from the root": (
        tree_by_children(lambda place: 0, lambda place, size: [] if place else range(1, size)),
        IN_ROUNDS,
    ),
    "returns nothing": (tree((_SENT, "")), COUNTED),
    "counts receives too": (tree((_SENT, "    return sent + (place > 0)\n")), COUNTED),
}

# ---------------------------------------------------------------- a ring in both directions

two_ways = partial(variant, "two-ways")
_WORKS = """        works = dist.batch_isend_irecv(operations) if operations else []
        for work in works:
            work.wait()
"""
_BLOCKING = """        for operation in operations:
            (dist.send if operation.op is dist.isend else dist.recv)(operation.tensor, operation.peer, group=group)
"""


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


SUM, HALF, STEPS = "the sum on every rank", "more than half of the plain ring's", "a message each way"
WRONG_TWO_WAYS = {
    "sends before it receives": (two_ways((_WORKS, _BLOCKING)), RETURNS),
    "takes places for ranks": (two_ways((_HERE, "    group = None\n" + _HERE)), RETURNS),
    "replaces in place of adding": (two_ways(("target + incoming if step < size - 1 else incoming", "incoming")), SUM),
    "only the first half of the steps": (two_ways(("range(2 * (size - 1))", "range(size - 1)")), SUM),
    "the same chunk both ways": (
        two_ways(("place = way * rank", "place = rank")),
        f"{RETURNS}[\\s\\S]*SIGABRT[\\s\\S]*chunk numbers[\\s\\S]*Hint 2",
    ),
    "out of place": (two_ways((_HERE, "    tensor = tensor.clone()\n" + _HERE)), SUM),
    "doesn't wait": (two_ways(("torch.empty_like", "torch.zeros_like"), ("work.wait()", "PENDING.append(work)")), SUM),
    "a barrier at the end": (barrier_at_the_end, "messages to the two neighbours"),
    "the plain ring": (
        two_ways_by_calls(lambda tensor, size: [tensor.view(-1).tensor_split(size)], ways=((1, 0),)),
        HALF,
    ),
    "both halves the same way": (two_ways_by_calls(ways=((1, 0), (1, 1))), HALF),
    "quarter": (two_ways(("tensor_split(2)", "tensor_split((tensor.numel() // 4,))")), HALF),
    "in pieces": (two_ways_by_calls(pieces=2), "2\\(N-1\\) steps"),
    "one way, then the other, in each step": (two_ways_by_calls(in_turns=True), f"{STEPS}[\\s\\S]*has to wait"),
}

# ---------------------------------------------------------------- train until

train = partial(variant, "deadlock")
_NEXT = "        loss = next(steps, None)\n"
_REDUCE = "        dist.all_reduce(total, group=group)\n"
_WAITED = "            waited = 0 if mean < best else waited + 1\n            best = min(best, mean)\n"
_MEANS = "    return means\n"
_ROWS = """        rows = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, total, group=group)
        total = sum(rows)
"""
_OBJECTS = """        rows = [None] * dist.get_world_size(group)
        dist.all_gather_object(rows, total, group=group)
        total = sum(rows)
"""


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


MEANS, VAIN, ONE = "the means, on every rank", "a step in vain", "one collective a step"
WRONG_TRAIN = {
    "skips a bad loss": (
        train((_NEXT, _NEXT + "        if loss is not None and not isfinite(loss):\n            continue\n")),
        MEANS,
    ),
    "leaves when its steps are over": (
        train((_NEXT, _NEXT + "        if loss is None:\n            break\n")),
        RETURNS,
    ),
    "judges by its own loss": (train((_WAITED, _WAITED.replace("mean", "(loss or mean)"))), RETURNS),
    "forgets the group": (train(("group=group", "group=None")), RETURNS),
    "tensors": (train((_MEANS, "    return [torch.tensor(mean) for mean in means]\n")), MEANS),
    "on rank 0 only": (
        train((_MEANS, "    return None if dist.get_rank(group) else means\n")),
        f"{MEANS}[\\s\\S]*rank 2",
    ),
    "as low is lower": (train(("mean < best", "mean <= best")), MEANS),
    "patience and one": (train(("waited < patience", "waited <= patience")), MEANS),
    "compares with the last": (train(("best = min(best, mean)", "best = mean")), MEANS),
    "a step without a mean counts": (train((_WAITED, _WAITED + "        else:\n            waited += 1\n")), MEANS),
    "divides by the ranks": (train(("summed / count", "summed / dist.get_world_size(group)")), MEANS),
    "divides by those that had a step": (train(("summed / count", "summed / going")), MEANS),
    "NaN in the sum": (train(("loss if finite else 0.0", "0.0 if loss is None else loss")), MEANS),
    "one step more": (train((_MEANS, "    next(steps, None)\n" + _MEANS)), VAIN),
    "all steps first": (train(("    means = []\n", "    means = []\n    steps = iter(list(steps))\n")), VAIN),
    "three collectives a step": (
        train((_REDUCE, "        for part in total.split(1):\n            dist.all_reduce(part, group=group)\n")),
        ONE,
    ),
    "objects": (train((_REDUCE, _OBJECTS)), f"{ONE}[\\s\\S]*its size,\\s+then its bytes"),
    "the best is at most 100": (train(("best = inf", "best = 100.0")), MEANS),
    "lower by little": (train(("mean < best", "mean < best - 1e-5")), MEANS),
    "losses above zero": (train(("isfinite(loss)", "0 <= loss < inf")), MEANS),
}

# ---------------------------------------------------------------- bucketed averaging

average = partial(variant, "buckets")
_ALONE = "if p.grad is None:\n            continue\n"
_FULL = "filled + p.grad.nbytes > bucket_bytes"
_ALL = "        dist.all_reduce(flat, group=group)\n"
_MEAN = "        dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=group)\n"
_DIVIDE = "        flat /= dist.get_world_size(group)\n"
_COUNT = "    return len(buckets)\n"
_PASS = "    for p in parameters:\n"
_LARGE_ASIDE = """    parameters = list(parameters)
    large = [p for p in parameters if p.grad is not None and p.grad.nbytes > bucket_bytes]
    for p in [p for p in parameters if p.grad is None or p.grad.nbytes <= bucket_bytes] + large:
"""


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


OF_ALL, SAME, EACH = "is the mean over the ranks", "p.grad is the object it was", "one all_reduce for each bucket"
GATHER_ALL = """        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, flat, group=group)
        flat = sum(parts)
"""
WRONG_AVERAGE = {
    "flattens with view": (average(("grad.reshape(-1)", "grad.view(-1)")), RETURNS),
    "the sum": (average((_DIVIDE, "")), OF_ALL),
    "forgets the last bucket": (average(("for grads in buckets:", "for grads in buckets[:-1]:")), OF_ALL),
    "goes through the iterator twice": (average((_PASS, "    len(list(parameters))\n" + _PASS)), OF_ALL),
    "packs as it lies in memory": (average(("grad.reshape(-1)", "grad.as_strided((grad.numel(),), (1,))")), OF_ALL),
    "sends float32": (average((_ALL, "        flat = flat.float()\n" + _ALL)), f"{OF_ALL}[\\s\\S]*torch.float64"),
    "doesn't wait": (
        average((_ALL, "        PENDING.append((flat, dist.all_reduce(flat, group=group, async_op=True)))\n")),
        OF_ALL,
    ),
    "forgets the group": (average((_ALL, "        dist.all_reduce(flat)\n")), RETURNS),
    "leaves frozen parameters out": (
        average(("if p.grad is None:", "if p.grad is None or not p.requires_grad:")),
        OF_ALL,
    ),
    "into copies": (average(("append(p.grad)", "append(p.grad.reshape(-1))")), OF_ALL),
    "zeros for None": (
        average((_ALONE, _ALONE.replace("continue", "p.grad = torch.zeros_like(p)\n            continue"))),
        SAME,
    ),
    "one bucket a parameter": (average((f"not buckets or {_FULL}", "True")), EACH),
    "closes a bucket that is too full": (average((_FULL, "filled >= bucket_bytes")), EACH),
    "never fills a bucket": (average((_FULL, _FULL.replace(">", ">="))), EACH),
    "large ones aside, small ones go on": (average((_PASS, _LARGE_ASIDE)), EACH),
    "gathers and sums": (average((_ALL, GATHER_ALL)), EACH),
    "returns parameters": (average((_COUNT, "    return sum(map(len, buckets))\n")), "returns the number of buckets"),
}

# ---------------------------------------------------------------- the cut

cut = partial(variant, "cut")
_START_AT = "max(free, ready[j - 1])"
_SECONDS = "steps * (alpha + sum(sizes[i:j]) / ranks / beta)"
_PLAN = "    return plans[-1]\n"


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


def cut_with_running_sums(ready, sizes, ranks, alpha, beta):
    """Two tables and a walk back."""
    n, total = len(sizes), [0, *accumulate(sizes)]
    ends, come_from, starts = [0.0] + [math.inf] * n, [0] * (n + 1), [0.0] * (n + 1)
    for i in range(n):
        for j in range(i + 1, n + 1):
            start = max(ends[i], ready[j - 1])
            end = start + 2 * (ranks - 1) * (alpha + (total[j] - total[i]) / (ranks * beta))
            if end <= ends[j]:
                ends[j], starts[j], come_from[j] = end, start, i
    plan, j = [], n
    while j:
        plan.insert(0, (j - come_from[j], starts[j], ends[j]))
        j = come_from[j]
    return plan


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


LISTED, MODEL, EARLY = "a list of tuples", "as the model says", "as early as it can"
WRONG_CUT = {
    "lists": (cut((_PLAN, "    return [list(entry) for entry in plans[-1]]\n")), LISTED),
    "forgets the last bucket": (cut((_PLAN, "    return plans[-1][:-1]\n")), LISTED),
    "all but no gradient": (cut((_PLAN, "    return plans[-1] or None\n")), f"{LISTED}[\\s\\S]*with 0 gradients"),
    "doesn't wait for the bucket before": (cut((_START_AT, "ready[j - 1]")), MODEL),
    "no latency": (cut((_SECONDS, "steps * sum(sizes[i:j]) / ranks / beta")), MODEL),
    "a reduce-scatter only": (cut(("steps = 2 * (ranks - 1)", "steps = ranks - 1")), MODEL),
    "whole tensors in each step": (cut((_SECONDS, "steps * (alpha + sum(sizes[i:j]) / beta)")), MODEL),
    "starts when its gradients are there": (cut(("(j - i, start,", "(j - i, ready[j - 1],")), MODEL),
    "one bucket": (cut_tried(1), EARLY),
    "each gradient alone": (cut(("enumerate(plans)", "list(enumerate(plans))[-1:]")), EARLY),
    "as soon as the links are free": (cut_greedily, EARLY),
    "two buckets at most": (cut_tried(2), EARLY),
    "every cut": (cut_tried(99), "less than a second"),
}

# ---------------------------------------------------------------- held to the protocol

WRONG = {
    "ring_shift": WRONG_SHIFT,
    "tree_broadcast": WRONG_TREE,
    "two_way_ring": WRONG_TWO_WAYS,
    "train_until": WRONG_TRAIN,
    "average_gradients": WRONG_AVERAGE,
    "cut_buckets": WRONG_CUT,
}
RIGHT = {
    "ring_shift": [shift_between_world_ranks, shift_cycle_by_cycle],
    "tree_broadcast": [tree_by_ranges, tree_by_children(*BINOMIAL)],
    "two_way_ring": [two_ways_by_calls(), two_ways_by_calls(halves_of_chunks)],
    "train_until": [train_gathered, train((_REDUCE, _ROWS), ("torch.float64", "torch.float32"))],
    "average_gradients": [average_async, average((_ALL, _MEAN), (_DIVIDE, ""))],
    "cut_buckets": [cut_recursively, cut_with_running_sums],
}
MAY_HANG = {answer for wrong in WRONG.values() for answer, says in wrong.values() if says.startswith(RETURNS)}


class TestChecks(CheckProtocol):
    TOPIC = "15-08"
    IDLE = IDLE
    CHECKS, ANSWERS, STUBS, RIGHT, WRONG = CHECKS, ANSWERS, STUBS, RIGHT, WRONG

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


# ---------------------------------------------------------------- what else a check says


def test_a_deadlock_is_reported_with_a_line_for_each_rank_and_its_case():
    with pytest.raises(CheckFailed) as failure:
        check.ring_shift(WRONG_SHIFT["sends before it receives"][0])
    lines = [line.strip() for line in str(failure.value).splitlines()]
    for rank in range(5):
        assert sum(line.startswith(f"rank {rank} waits in send in ring_shift") for line in lines) == 1, lines
    assert "(case: arguments (1,), shape (2, 3)" in str(failure.value)
    with pytest.raises(CheckFailed) as failure:
        check.tree_broadcast(WRONG_TREE["takes places for ranks"][0])
    assert "topic_15_08" not in str(failure.value)  # what isn't the student's is left out


@pytest.mark.parametrize("name", ["ring_shift", "two_way_ring"])
def test_an_answer_with_a_part_missing_was_attempted(name):
    def half_done(tensor, *args):
        if args and isinstance(args[-1], dist.ProcessGroup):
            raise NotImplementedError
        return ANSWERS[name](tensor, *args)

    result = CHECKS[name].run(half_done)
    assert result.status == "failed"
    assert "NotImplementedError" in str(result)
