"""The checks of 15-08 accept right answers, however written, and reject what a student might really write."""

import sys
from math import ceil

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from check_protocol import CheckProtocol
from notebook_code import answers, definitions

from course.exercises import student_source
from shared import launch
from shared.checks import topic_15_08 as check
from shared.checks.feedback import CheckFailed

pytestmark = pytest.mark.processes
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest and the notebook

RING = definitions("15-08", "ring", "landing", "ring-all-reduce")["ring_all_reduce"]
ANSWERS, STUBS = answers("15-08"), answers("15-08", edit=student_source)
ANSWERS["hierarchical_all_reduce"].__globals__["ring_all_reduce"] = RING
CHECKS = {
    "ring_shift": check.ring_shift,
    "tree_broadcast": check.tree_broadcast,
    "reduce_scatter": check.reduce_scatter,
    "hierarchical_all_reduce": check.hierarchical_all_reduce,
    "evaluate": check.evaluate,
    "average_gradients": check.average_gradients,
}


@pytest.fixture(autouse=True)
def short_time_out(monkeypatch):
    monkeypatch.setattr(check, "_SECONDS", 3)


def swap(out, into, to, source, group=None):
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, out, group=group, group_peer=to),
            dist.P2POp(dist.irecv, into, group=group, group_peer=source),
        ]
    )
    for work in works:
        work.wait()


def me(group=None):
    return dist.get_rank(group), dist.get_world_size(group)


# ---------------------------------------------------------------- ring shift


def right_shift(tensor, by, group=None):
    """isend and irecv without a batch; even by = 0 by a copy through indexing a gathered list."""
    rank, size = me(group)
    out = tensor.detach().clone()
    if size > 1 and by % size:
        sending = dist.isend(tensor, group=group, group_dst=(rank + by) % size)
        dist.recv(out, group=group, group_src=(rank - by) % size)
        sending.wait()
    return out


def shift_blocking(tensor, by, group=None):
    rank, size = me(group)
    out = torch.empty_like(tensor)
    if by % size == 0:
        return tensor.clone()
    dist.send(tensor, group=group, group_dst=(rank + by) % size)
    dist.recv(out, group=group, group_src=(rank - by) % size)
    return out


def shift_left(tensor, by, group=None):
    return right_shift(tensor, -by, group)


def shift_unwrapped(tensor, by, group=None):
    rank, size = me(group)
    if by % size == 0:
        return tensor.clone()
    out = torch.empty_like(tensor)
    swap(tensor, out, rank + by if rank + by < size else 0, rank - by if rank >= by else size - 1, group)
    return out


def shift_world(tensor, by, group=None):
    return right_shift(tensor, by)


def shift_no_copy(tensor, by, group=None):
    return tensor if by % me(group)[1] == 0 else right_shift(tensor, by, group)


def shift_in_place(tensor, by, group=None):
    return tensor.copy_(right_shift(tensor, by, group))


def shift_gather(tensor, by, group=None):
    rank, size = me(group)
    everybody = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(everybody, tensor, group=group)
    return everybody[(rank - by) % size]


def shift_in_small_steps(tensor, by, group=None):
    out = tensor.clone()
    for _ in range(by % me(group)[1]):
        out = right_shift(out, 1, group)
    return out


def shift_by_world_peers(tensor, by, group=None):
    """Right in the world; in a part of it, places are taken for ranks of the world."""
    rank, size = me(group)
    out = tensor.clone()
    if by % size:
        sending = dist.isend(tensor, (rank + by) % size, group=group)
        dist.recv(out, (rank - by) % size, group=group)
        sending.wait()
    return out


WRONG_SHIFT = [
    (shift_gather, "calls no collective"),
    (shift_in_small_steps, "by -1: rank 0 sends one message"),
    (shift_by_world_peers, "outside of the group[\\s\\S]*group_peer="),
    (shift_blocking, "deadlock[\\s\\S]*batch_isend_irecv"),
    (shift_left, "by 1, on rank 0"),
    (shift_unwrapped, "runs on four ranks|by -1"),
    (shift_world, "in the group of ranks 1, 2, 3|runs on four ranks"),
    (shift_no_copy, "is a new tensor"),
    (shift_in_place, "stays as it was"),
]

# ---------------------------------------------------------------- tree broadcast


def right_tree(tensor, src=0, group=None):
    """Halving from the top: the far half's first place gets it first."""
    rank, size = me(group)
    place, sent = (rank - src) % size, 0
    reach = 1 << max(size - 1, 0).bit_length()
    have = place == 0
    while reach > 1:
        half = reach // 2
        if have and place % reach == 0 and place + half < size:
            dist.isend(tensor, group=group, group_dst=(place + half + src) % size).wait()
            sent += 1
        elif not have and place % reach == half:
            dist.irecv(tensor, group=group, group_src=(place - half + src) % size).wait()
            have = True
        reach = half
    return sent


def tree(src_used=True, renumber=True, bounded=True, count="sent"):
    """A tree with chosen faults."""

    def broadcast(tensor, src=0, group=None):
        rank, size = me(group)
        src = src if src_used else 0
        place, reach, sent = (rank - src) % size, 1, 0

        def peer(p):
            number = (p + src) % size
            return {"group_dst": number} if renumber else {"dst": number}

        while reach < size:
            if place < reach and (place + reach < size or not bounded):
                dist.send(tensor, group=group, **peer(place + reach))
                sent += 1
            elif reach <= place < 2 * reach:
                source = peer(place - reach)
                dist.recv(tensor, group=group, **{name.replace("dst", "src"): v for name, v in source.items()})
            reach *= 2
        return {"sent": sent, "none": None, "bytes": sent * tensor.nbytes, "rounds": reach.bit_length() - 1}[count]

    return broadcast


def tree_flat(tensor, src=0, group=None):
    rank, size = me(group)
    if rank != src:
        dist.recv(tensor, group=group, group_src=src)
        return 0
    for other in range(size):
        if other != src:
            dist.send(tensor, group=group, group_dst=other)
    return size - 1


def tree_collective(tensor, src=0, group=None):
    dist.broadcast(tensor, group=group, group_src=src)
    return 0


def tree_chain(tensor, src=0, group=None):
    """Right result, one message a rank, but N-1 rounds."""
    rank, size = me(group)
    place = (rank - src) % size
    if place:
        dist.recv(tensor, group=group, group_src=(rank - 1) % size)
    if place + 1 < size:
        dist.send(tensor, group=group, group_dst=(rank + 1) % size)
    return int(place + 1 < size)


def tree_out_of_place(tensor, src=0, group=None):
    return tree()(tensor.clone(), src, group)


WRONG_TREE = [
    (tree(src_used=False), "has the root's tensor"),
    (tree(renumber=False), "runs in groups|has the root's tensor"),
    (tree(bounded=False), "runs in groups|has the root's tensor|at most"),
    (tree(count="none"), "returns the messages it sent"),
    (tree(count="bytes"), "returns the messages it sent"),
    (tree(count="rounds"), "returns the messages it sent"),
    (tree_chain, "everybody has it after 2 rounds"),
    (tree_flat, "sends at most 2 messages"),
    (tree_collective, "uses sends and receives only"),
    (tree_out_of_place, "has the root's tensor"),
]

# ---------------------------------------------------------------- reduce-scatter


def right_scatter(chunks):
    """The own part added last to a buffer that is allocated once a step; direction by isend and recv."""
    rank, size = me()
    total = chunks[(rank + size - 1) % size].clone()
    for step in range(1, size):
        buffer = torch.zeros_like(total)
        work = dist.isend(total, (rank + 1) % size)
        dist.recv(buffer, (rank - 1) % size)
        work.wait()
        total = buffer.add_(chunks[(rank - step - 1) % size])
    return total


def scatter(start=1, mutate=False, collective=False, everything=False, blocking=False, lazy=False):
    """Reduce-scatter with chosen faults."""

    def reduce(chunks):
        rank, size = me()
        if collective:
            out = torch.empty_like(chunks[0])
            dist.reduce_scatter(out, chunks)
            return out
        if everything:
            mine = torch.stack(chunks)
            total = mine.clone()
            for _ in range(size - 1):
                into = torch.empty_like(mine)
                swap(mine, into, (rank + 1) % size, (rank - 1) % size)
                mine = into
                total += mine
            return total[rank]
        partial = chunks[(rank - start) % size] if mutate else chunks[(rank - start) % size].clone()
        for step in range(size - 1):
            into = torch.empty_like(partial)
            if blocking:
                dist.send(partial, (rank + 1) % size)
                dist.recv(into, (rank - 1) % size)
            else:
                swap(partial, into, (rank + 1) % size, (rank - 1) % size)
            own = chunks[(rank - start - step - 1) % size]
            partial = into if lazy else (own.add_(into) if mutate else own + into)
        return partial

    return reduce


WRONG_SCATTER = [
    (scatter(start=0), "has the sum of all chunks\\[0\\]"),
    (scatter(mutate=True), "leaves its chunks"),
    (scatter(collective=True), "sends one chunk a step|no collective"),
    (scatter(everything=True), "only the partial sum travels"),
    (scatter(blocking=True), "deadlock"),
    (scatter(lazy=True), "has the sum"),
]

# ---------------------------------------------------------------- hierarchical all-reduce


def right_hierarchy(tensor, inside, across):
    """List collectives, and gloo's all_reduce between nodes; bytes from the formulas."""
    local, nodes = dist.get_world_size(inside), dist.get_world_size(across)
    pieces = list(tensor.chunk(local))
    shard = torch.empty_like(pieces[0])
    dist.reduce_scatter(shard, pieces, group=inside)
    dist.all_reduce(shard, group=across)
    dist.all_gather(pieces, shard, group=inside)
    total = tensor.nbytes
    return 2 * (local - 1) * total // local, 2 * (nodes - 1) * total // (nodes * local)


def hierarchy(across_phase=True, whole=False, world=False, in_place=True, count="right"):
    """Two levels with chosen faults."""

    def reduce(tensor, inside, across):
        local, nodes = dist.get_world_size(inside), dist.get_world_size(across)
        total = tensor.nbytes
        numbers = 2 * (local - 1) * total // local, 2 * (nodes - 1) * total // (nodes * local)
        target = tensor if in_place else tensor.clone()
        if world:
            dist.all_reduce(target)
        elif whole:
            dist.all_reduce(target, group=inside)
            dist.all_reduce(target, group=across)
        else:
            shard = target.new_empty(target.numel() // local)
            dist.reduce_scatter_tensor(shard, target, group=inside)
            if across_phase:
                dist.all_reduce(shard, group=across)
            dist.all_gather_into_tensor(target, shard, group=inside)
        wrong = {
            "half": (numbers[0] // 2, numbers[1]),
            "whole": (numbers[0], numbers[1] * local),
            "float": tuple(map(float, numbers)),
            "sum": sum(numbers),
        }
        return wrong.get(count, numbers)

    return reduce


WRONG_HIERARCHY = [
    (hierarchy(across_phase=False), "has the sum over all six"),
    (hierarchy(whole=True), "sends only its shard across"),
    (hierarchy(world=True), "sends only its shard across"),
    (hierarchy(in_place=False), "has the sum over all six"),
    (hierarchy(count="half"), "returns the bytes"),
    (hierarchy(count="whole"), "returns the bytes"),
    (hierarchy(count="float"), "returns the bytes"),
    (hierarchy(count="sum"), "returns the bytes"),
]

# ---------------------------------------------------------------- evaluate


def right_evaluate(batches):
    """Two collectives: one for the sums, one for the count."""
    sums = torch.tensor(batches, dtype=torch.float64).reshape(-1, 2).sum(dim=0)
    count = torch.tensor(len(batches))
    dist.all_reduce(sums)
    dist.all_reduce(count)
    correct, loss = (sums / count.clamp(min=1)).tolist()
    return correct, loss


def evaluate_broken(batches):
    total = torch.zeros(2)
    for correct, loss in batches:
        now = torch.tensor([correct, loss])
        dist.all_reduce(now)
        total += now
    if dist.get_rank() == 0:
        count = torch.tensor(len(batches))
        dist.all_reduce(count)
        return (total / count).tolist()


def evaluate_root_counts(batches):
    total = torch.tensor(batches, dtype=torch.float64).reshape(-1, 2).sum(dim=0)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        count = torch.tensor(len(batches))
        dist.all_reduce(count)
        return tuple((total / count).tolist())


def evaluate_with(dtype=torch.float64, mean="global", root_only=False, calls=1, guard=True, kind=tuple):
    """The right idea with chosen faults."""

    def evaluate(batches):
        total = torch.zeros(3, dtype=dtype)
        for correct, loss in batches:
            total += torch.tensor([correct, loss, 1.0], dtype=dtype)
        if mean == "of means":
            total = total / total[2].clamp(min=1)
        local = float(total[2])
        for part in total.split(3 // calls):
            dist.all_reduce(part)
        correct, loss, count = total.tolist()
        count = local if mean == "local count" else count
        if root_only and dist.get_rank():
            return None
        if guard and not count:
            return kind((0.0, 0.0))
        return kind((correct / count, loss / count))

    return evaluate


def evaluate_without_guard(batches):
    """Tensors divide by zero without a word: NaN."""
    total = torch.tensor([(*pair, 1.0) for pair in batches], dtype=torch.float64).reshape(-1, 3).sum(dim=0)
    dist.all_reduce(total)
    return tuple((total[:2] / total[2]).tolist())


WRONG_EVALUATE = [
    (evaluate_broken, "runs on three ranks"),
    (evaluate_root_counts, "runs on three ranks"),
    (evaluate_with(dtype=torch.float32), "has the mean over all batches"),
    (evaluate_with(mean="of means"), "has the mean over all batches"),
    (evaluate_with(mean="local count"), "has the mean over all batches"),
    (evaluate_with(root_only=True), "rank 1 has the mean"),
    (evaluate_with(guard=False), "ZeroDivisionError"),
    (evaluate_with(calls=3), "at most two collectives"),
    (evaluate_without_guard, "with no batch anywhere the count is 0"),
]

# ---------------------------------------------------------------- bucketed averaging


def right_average(parameters, bucket_bytes):
    """Greedy in one pass, with views of a flat buffer and an all_reduce that is awaited at the end."""
    pending, bucket = [], []

    def flush():
        if bucket:
            flat = torch.nn.utils.parameters_to_vector([p.grad.contiguous() for p in bucket]) / dist.get_world_size()
            pending.append((flat, list(bucket), dist.all_reduce(flat, async_op=True)))
            bucket.clear()

    for p in [p for p in parameters if p.grad is not None]:
        if bucket and sum(q.grad.nbytes for q in bucket) + p.grad.nbytes > bucket_bytes:
            flush()
        bucket.append(p)
    flush()
    for flat, members, work in pending:
        work.wait()
        for p, piece in zip(members, flat.split([q.numel() for q in members]), strict=True):
            p.grad.set_(p.grad.copy_(piece.reshape(p.grad.shape)))
    return len(pending)


def average(
    divide=True,
    rebind=False,
    single=False,
    drop_last=False,
    late=False,
    fill=False,
    empty=False,
    twice=False,
    below=False,
):
    """Bucketed averaging with chosen faults."""

    def run(parameters, limit):
        if twice:
            sum(p.numel() for p in parameters)  # uses the iterator up
        buckets, filled = [[]], 0
        for p in parameters:
            if p.grad is None:
                if not fill:
                    continue
                p.grad = torch.zeros_like(p)
            size = p.grad.nbytes
            full = filled >= limit if late else filled + size >= limit + (not below)
            if buckets[-1] and (full or single):
                buckets.append([])
                filled = 0
            buckets[-1].append(p)
            filled += size
        if drop_last:
            buckets.pop()
        buckets = [bucket for bucket in buckets if bucket or empty]
        for bucket in buckets:
            flat = torch.cat([p.grad.reshape(-1) for p in bucket]) if bucket else torch.zeros(0)
            dist.all_reduce(flat)
            flat /= dist.get_world_size() if divide else 1
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                if rebind:
                    p.grad = piece.view_as(p).clone()
                else:
                    p.grad.copy_(piece.view_as(p.grad))
        return len(buckets)

    return run


WRONG_AVERAGE = [
    (average(divide=False), "is the mean over the ranks"),
    (average(rebind=True), "p.grad is the tensor it was"),
    (average(single=True), "one all_reduce for each bucket"),
    (average(drop_last=True), "is the mean over the ranks"),
    (average(late=True), "one all_reduce for each bucket"),
    (average(below=True), "bucket_bytes 468, rank 0: one all_reduce for each bucket"),
    (average(fill=True), "grad None stays None"),
    (average(empty=True), "no gradient at all"),
    (average(twice=True), "is the mean over the ranks"),
]

WRONG = [
    *(("ring_shift", a, m) for a, m in WRONG_SHIFT),
    *(("tree_broadcast", a, m) for a, m in WRONG_TREE),
    *(("reduce_scatter", a, m) for a, m in WRONG_SCATTER),
    *(("hierarchical_all_reduce", a, m) for a, m in WRONG_HIERARCHY),
    *(("evaluate", a, m) for a, m in WRONG_EVALUATE),
    *(("average_gradients", a, m) for a, m in WRONG_AVERAGE),
]
RIGHT = {
    "ring_shift": right_shift,
    "tree_broadcast": right_tree,
    "reduce_scatter": right_scatter,
    "hierarchical_all_reduce": right_hierarchy,
    "evaluate": right_evaluate,
    "average_gradients": right_average,
}


class TestChecks(CheckProtocol):
    CHECKS, ANSWERS, STUBS, RIGHT, WRONG = CHECKS, ANSWERS, STUBS, RIGHT, WRONG

    def hold_stand_in(self, name, stand_in):
        if name == "tree_broadcast":

            def broadcast():
                x = torch.tensor(dist.get_rank())
                return stand_in(x, 1), int(x)

            assert launch(broadcast, 3, backend="gloo") == [(0, 1)] * 3


def test_a_list_of_the_two_means_passes():
    result = check.evaluate.run(evaluate_with(kind=list))
    assert result.status == "passed", str(result)


def test_a_deadlock_is_reported_with_a_line_for_each_rank():
    with pytest.raises(CheckFailed) as failure:
        check.ring_shift(shift_blocking)
    lines = [line.strip() for line in str(failure.value).splitlines()]
    for rank in range(4):
        assert sum(line.startswith(f"rank {rank} waits in send in shift_blocking") for line in lines) == 1, lines
    with pytest.raises(CheckFailed) as failure:
        check.tree_broadcast(tree(bounded=False))
    ranks = [line.strip() for line in str(failure.value).splitlines() if line.strip().startswith("rank ")]
    assert "waits in send in broadcast" in ranks[0]
    assert all("outside of your function" in line for line in ranks[1:])


def test_hints_in_the_task_are_right():
    """The schedule of the reduce-scatter's second hint, and the rounds of the tree."""
    for size in range(2, 9):
        for rank in range(size):
            sent = [(rank - step - 1) % size for step in range(size - 1)]
            received = [(rank - step - 2) % size for step in range(size - 1)]
            assert received[-1] == rank
            assert sent[1:] == received[:-1]
        assert ceil(size / 2 ** (size - 1).bit_length()) == 1
