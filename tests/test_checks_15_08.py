"""The checks of 15-08 accept right answers, however written, and reject what a student might really write."""

import sys
import threading
from itertools import accumulate
from math import gcd

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from check_protocol import CheckProtocol

from course.answers import answers, definitions
from course.exercises import student_source
from shared import launch
from shared.checks import topic_15_08 as check
from shared.checks.feedback import CheckFailed

pytestmark = pytest.mark.processes
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest and the notebook

RING = definitions("15-08", "ring", "landing", "ring-all-reduce")["ring_all_reduce"]
ANSWERS = answers("15-08", given={"ring_all_reduce": RING})
STUBS = answers("15-08", edit=student_source)
CHECKS = {
    "ring_shift": check.ring_shift,
    "tree_broadcast": check.tree_broadcast,
    "reduce_scatter": check.reduce_scatter,
    "hierarchical_all_reduce": check.hierarchical_all_reduce,
    "evaluate": check.evaluate,
    "average_gradients": check.average_gradients,
}

OUTCOMES = {}  # a check starts processes, and the protocol runs it on each answer several times


@pytest.fixture(autouse=True)
def each_launch_once(monkeypatch):
    """And with time enough for a busy machine, but for answers that are to be found hanging."""
    run = check._outcome

    def run_once(function, size, answer, *args):
        key = (function, size, answer)
        if key not in OUTCOMES:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(check, "_SECONDS", 3 if answer in MAY_HANG else 30)
                OUTCOMES[key] = run(function, size, answer, *args)
        return OUTCOMES[key]

    monkeypatch.setattr(check, "_outcome", run_once)


def me(group=None):
    return dist.get_rank(group), dist.get_world_size(group)


def swap(out, into, to, source, group=None):
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, out, group=group, group_peer=to),
            dist.P2POp(dist.irecv, into, group=group, group_peer=source),
        ]
    )
    for work in works:
        work.wait()


def with_barrier(answer):
    """The answer, and a collective that nobody needs."""

    def run(*args):
        dist.barrier(group=next((arg for arg in args if isinstance(arg, dist.ProcessGroup)), None))
        return answer(*args)

    return run


PENDING = []  # handles that nobody waits for; without them gloo would not send

# ---------------------------------------------------------------- ring shift


def shift_without_batch(tensor, by, group=None):
    rank, size = me(group)
    out = tensor.detach().clone()
    if size > 1 and by % size:
        sending = dist.isend(tensor, group=group, group_dst=(rank + by) % size)
        dist.recv(out, group=group, group_src=(rank - by) % size)
        sending.wait()
    return out


def shift_between_world_ranks(tensor, by, group=None):
    """Only numbers of the world; the receive is started first."""
    everybody = dist.get_process_group_ranks(group)
    place = everybody.index(dist.get_rank())
    to = everybody[(place + by) % len(everybody)]
    if to == dist.get_rank():
        return tensor.new_tensor(tensor)
    out = torch.zeros_like(tensor)
    receiving = dist.irecv(out, everybody[(place - by) % len(everybody)])
    dist.isend(tensor, to).wait()
    receiving.wait()
    return out


def shift_by_thread(tensor, by, group=None):
    """The blocking calls, on two threads."""
    rank, size = me(group)
    out = torch.clone(tensor)
    by %= size
    if by == 0:
        return out
    sender = threading.Thread(target=lambda: dist.send(tensor, group=group, group_dst=(rank + by) % size))
    sender.start()
    dist.recv(out, group=group, group_src=(rank - by + size) % size)
    sender.join()
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


class ShiftOfBytes:
    """An object, which sends bytes whatever the dtype."""

    def __call__(self, tensor, by, group=None):
        rank, size = me(group)
        out = tensor.clone()
        if by % size:
            going, coming = (t.reshape(-1).view(torch.uint8) for t in (tensor, out))
            swap(going, coming, (rank + by) % size, (rank - by) % size, group)
        return out


def shift_blocking(tensor, by, group=None):
    rank, size = me(group)
    out = torch.empty_like(tensor)
    if by % size == 0:
        return tensor.clone()
    dist.send(tensor, group=group, group_dst=(rank + by) % size)
    dist.recv(out, group=group, group_src=(rank - by) % size)
    return out


def shift_even_first(tensor, by, group=None):
    """Right for steps of one place."""
    rank, size = me(group)
    out = tensor.clone()
    if by % size:
        calls = [
            lambda: dist.send(tensor, group=group, group_dst=(rank + by) % size),
            lambda: dist.recv(out, group=group, group_src=(rank - by) % size),
        ]
        for call in calls[:: 1 if rank % 2 else -1]:
            call()
    return out


def shift_left(tensor, by, group=None):
    return shift_without_batch(tensor, -by, group)


def shift_unwrapped(tensor, by, group=None):
    rank, size = me(group)
    if by % size == 0:
        return tensor.clone()
    out = torch.empty_like(tensor)
    swap(tensor, out, rank + by if rank + by < size else 0, rank - by if rank >= by else size - 1, group)
    return out


def shift_to_itself(tensor, by, group=None):
    rank, size = me(group)
    out = torch.empty_like(tensor)
    swap(tensor, out, (rank + by) % size, (rank - by) % size, group)
    return out


def shift_world(tensor, by, group=None):
    return shift_without_batch(tensor, by)


def shift_five(tensor, by, group=None):
    rank = dist.get_rank(group)
    out = tensor.clone()
    if by % 5:
        swap(tensor, out, (rank + by) % 5, (rank - by) % 5, group)
    return out


def shift_as_float(tensor, by, group=None):
    return shift_without_batch(tensor.float(), by, group)


def shift_zeros(tensor, by, group=None):
    return shift_without_batch(tensor, by, group) if by else torch.zeros_like(tensor)


def shift_no_wait(tensor, by, group=None):
    rank, size = me(group)
    out = torch.zeros_like(tensor)
    if by % size == 0:
        return tensor.clone()
    PENDING.append(dist.irecv(out, group=group, group_src=(rank - by) % size))
    dist.send(tensor, group=group, group_dst=(rank + by) % size)
    return out


def shift_without_waiting_for_its_send(tensor, by, group=None):
    rank, size = me(group)
    out = tensor.clone()
    if by % size:
        PENDING.append(dist.isend(tensor, group=group, group_dst=(rank + by) % size))
        dist.recv(out, group=group, group_src=(rank - by) % size)
    return out


def shift_no_copy(tensor, by, group=None):
    return tensor if by % me(group)[1] == 0 else shift_without_batch(tensor, by, group)


def shift_no_copy_on_rank_0(tensor, by, group=None):
    return shift_without_batch(tensor, by, group) if dist.get_rank() or by % me(group)[1] else tensor


BUFFERS = {}


def shift_into_one_buffer(tensor, by, group=None):
    buffer = BUFFERS.setdefault((tensor.shape, tensor.dtype), torch.empty_like(tensor))
    return buffer.copy_(shift_without_batch(tensor, by, group))


def shift_in_place(tensor, by, group=None):
    out = shift_without_batch(tensor, by, group)
    tensor.copy_(out)
    return out


def shift_gather(tensor, by, group=None):
    rank, size = me(group)
    everybody = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(everybody, tensor, group=group)
    return everybody[(rank - by) % size].clone()


def shift_in_small_steps(tensor, by, group=None):
    out = tensor.clone()
    for _ in range(by % me(group)[1]):
        out = shift_without_batch(out, 1, group)
    return out


def shift_in_halves(tensor, by, group=None):
    rank, size = me(group)
    out = tensor.clone()
    for going, coming in zip(tensor.reshape(-1).tensor_split(2), out.view(-1).tensor_split(2), strict=True):
        if by % size and going.numel():
            swap(going, coming, (rank + by) % size, (rank - by) % size, group)
    return out


def shift_from_anybody(tensor, by, group=None):
    """Right by itself; after another call it may take that one's message."""
    rank, size = me(group)
    out = tensor.clone()
    if by % size:
        sending = dist.isend(tensor, group=group, group_dst=(rank + by) % size)
        dist.recv(out, group=group)
        sending.wait()
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


WRONG_SHIFT = {
    "sends before it receives": (shift_blocking, "every rank returns[\\s\\S]*deadlock[\\s\\S]*Hint 3"),
    "odd places send first": (shift_even_first, "every rank returns"),
    "sends to itself": (shift_to_itself, "sends to itself"),
    "doesn't wrap around": (shift_unwrapped, "every rank returns"),
    "forgets the group": (shift_world, "every rank returns"),
    "takes places for ranks": (shift_by_world_peers, "not part of group|of a group of|itself"),
    "receives from anybody": (shift_from_anybody, "receives from any rank"),
    "a ring of five always": (shift_five, "not part of group|of a group of 4|itself"),
    "to the left": (shift_left, "places to its left"),
    "zeros where nothing moves": (shift_zeros, "places to its left"),
    "in float32": (shift_as_float, "places to its left[\\s\\S]*dtype torch.float64"),
    "doesn't wait for what arrives": (shift_no_wait, "places to its left"),
    "gathers all": (shift_gather, "no collective"),
    "in small steps": (shift_in_small_steps, "one message, straight to its rank"),
    "in halves": (shift_in_halves, "one message, straight to its rank"),
    "with a barrier": (with_barrier(shift_without_batch), "no collective"),
    "in place": (shift_in_place, "stays as it was"),
    "no copy where nothing moves": (shift_no_copy, "is a new tensor[\\s\\S]*Hint 4"),
    "no copy on rank 0": (shift_no_copy_on_rank_0, "is a new tensor"),
    "one buffer for all calls": (shift_into_one_buffer, "is a new tensor[\\s\\S]*an earlier call"),
    "doesn't wait for its send": (shift_without_waiting_for_its_send, "overwritten at once"),
}

# ---------------------------------------------------------------- tree broadcast


def tree_by_halving(tensor, src=0, group=None):
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


def tree_all_at_once(tensor, src=0, group=None):
    """Receives, then starts all its sends before it waits for any."""
    rank, size = me(group)
    place = (rank - src) % size
    if place:
        dist.recv(tensor, group=group, group_src=(place - 2 ** (place.bit_length() - 1) + src) % size)
    below = [place + 2**k for k in range(place.bit_length(), size.bit_length()) if place + 2**k < size]
    works = [dist.isend(tensor, group=group, group_dst=(child + src) % size) for child in below]
    for work in works:
        work.wait()
    return len(works)


def tree_by_schedule(tensor, src=0, group=None):
    """Who has it sends it to the next that hasn't; everybody works out the messages of all."""
    rank, size = me(group)
    have, rest, sent = [src], [(src - n) % size for n in range(1, size)], 0
    while rest:
        for source, to in zip(list(have), list(rest), strict=False):
            have.append(rest.pop(0))
            if rank == source:
                dist.send(tensor, group=group, group_dst=to)
                sent += 1
            elif rank == to:
                dist.recv(tensor, group=group, group_src=source)
    return sent


def tree(src_used=True, renumber=True, bounded=True, count="sent", default=0, rounds=99):
    """A tree with chosen faults."""

    def broadcast(tensor, src=default, group=None):
        rank, size = me(group)
        src = src if src_used else 0
        place, reach, sent = (rank - src) % size, 1, 0

        def peer(p):
            number = (p + src) % size
            return {"group_dst": number} if renumber else {"dst": number}

        while reach < min(size, 2**rounds):
            if place < reach and (place + reach < size or not bounded):
                dist.send(tensor, group=group, **peer(place + reach))
                sent += 1
            elif reach <= place < 2 * reach:
                source = peer(place - reach)
                dist.recv(tensor, group=group, **{name.replace("dst", "src"): v for name, v in source.items()})
            reach *= 2
        received = sent + (place > 0)
        said = {"sent": sent, "none": None, "bytes": sent * tensor.nbytes, "rounds": reach.bit_length() - 1}
        return (said | {"both": received})[count]

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


def tree_binary(tensor, src=0, group=None):
    """Everybody sends to two: ceil(log2 N) rounds for up to six ranks, more for seven."""
    rank, size = me(group)
    place = (rank - src) % size
    if place:
        dist.recv(tensor, group=group, group_src=((place - 1) // 2 + src) % size)
    below = [child for child in (2 * place + 1, 2 * place + 2) if child < size]
    for child in below:
        dist.send(tensor, group=group, group_dst=(child + src) % size)
    return len(below)


def tree_out_of_place(tensor, src=0, group=None):
    return tree()(tensor.clone(), src, group)


def tree_rebinds(tensor, src=0, group=None):
    """In place for the object that was passed, not for the memory that it is a part of."""
    copy = tensor.clone()
    sent = tree()(copy, src, group)
    tensor.set_(copy)
    return sent


def tree_as_float(tensor, src=0, group=None):
    copy = tensor.float()
    sent = tree()(copy, src, group)
    tensor.copy_(copy)
    return sent


def tree_with_thanks(tensor, src=0, group=None):
    """The last place sends the root a word."""
    rank, size = me(group)
    sent, last = tree()(tensor, src, group), (src - 1) % size
    if size > 1 and rank == last:
        dist.send(torch.zeros(1), group=group, group_dst=src)
        sent += 1
    if size > 1 and rank == src:
        dist.recv(torch.zeros(1), group=group, group_src=last)
    return sent


def tree_from_anybody(tensor, src=0, group=None):
    """Right by itself; after another call it may take that one's message."""
    rank, size = me(group)
    place = (rank - src) % size
    if place:
        dist.recv(tensor, group=group)
    below = [place + 2**k for k in range(place.bit_length(), size.bit_length()) if place + 2**k < size]
    for child in below:
        dist.send(tensor, group=group, group_dst=(child + src) % size)
    return len(below)


def tree_without_waiting(tensor, src=0, group=None):
    rank, size = me(group)
    place = (rank - src) % size
    if place:
        dist.recv(tensor, group=group, group_src=(place - 2 ** (place.bit_length() - 1) + src) % size)
    below = [place + 2**k for k in range(place.bit_length(), size.bit_length()) if place + 2**k < size]
    PENDING.extend(dist.isend(tensor, group=group, group_dst=(child + src) % size) for child in below)
    return len(below)


WRONG_TREE = {
    "sends beyond the last place": (tree(bounded=False), "every rank returns"),
    "takes places for ranks": (tree(renumber=False), "every rank returns"),
    "receives from anybody": (tree_from_anybody, "receives from any rank"),
    "always from rank 0": (tree(src_used=False), "the root's tensor on every rank"),
    "by default from rank 1": (tree(default=1), "the root's tensor on every rank[\\s\\S]*the world, by default"),
    "out of place": (tree_out_of_place, "the root's tensor on every rank"),
    "rebinds the tensor": (tree_rebinds, "the root's tensor on every rank"),
    "in float32": (tree_as_float, "the root's tensor on every rank[\\s\\S]*torch.int64"),
    "broadcast": (tree_collective, "sends and receives only"),
    "with a barrier": (with_barrier(tree()), "sends and receives only"),
    "always three rounds": (tree(rounds=3), "the root's tensor on every rank[\\s\\S]*the world"),
    "a chain": (tree_chain, "ceil\\(log2 N\\) rounds[\\s\\S]*at most 4 rounds"),
    "a binary tree": (tree_binary, "ceil\\(log2 N\\) rounds[\\s\\S]*at most 3 rounds"),
    "all from the root": (tree_flat, "ceil\\(log2 N\\) rounds"),
    "the root gets a word back": (tree_with_thanks, "receives once, the root never"),
    "returns nothing": (tree(count="none"), "returns the messages it sent"),
    "returns bytes": (tree(count="bytes"), "returns the messages it sent"),
    "returns rounds": (tree(count="rounds"), "returns the messages it sent"),
    "counts receives too": (tree(count="both"), "returns the messages it sent"),
    "doesn't wait for its sends": (tree_without_waiting, "overwritten at once"),
}

# ---------------------------------------------------------------- reduce-scatter


def scatter_into_received(chunks):
    """Direction by isend and recv; the own part added into a buffer that is allocated once a step."""
    rank, size = me()
    total = chunks[(rank + size - 1) % size].clone()
    for step in range(1, size):
        buffer = torch.zeros_like(total)
        work = dist.isend(total, (rank + 1) % size)
        dist.recv(buffer, (rank - 1) % size)
        work.wait()
        total = buffer.add_(chunks[(rank - step - 1) % size])
    return total


def scatter_alternating(chunks):
    """Two buffers that change places; rank 0 receives last, so that blocking calls do."""
    rank, size = me()
    order = [(rank - s) % size for s in range(1, size + 1)]
    going, coming = torch.empty_like(chunks[0]), torch.empty_like(chunks[0])
    going[...] = chunks[order[0]]
    for number in order[1:]:
        if rank:
            dist.recv(coming, rank - 1)
        dist.send(going, (rank + 1) % size)
        if not rank:
            dist.recv(coming, size - 1)
        coming += chunks[number]
        going, coming = coming, going
    return going


def scatter_all_receives_first(chunks):
    """Recursive: the sum that ends at `owner` comes from the left, unless it starts here."""
    rank, size = me()
    sends = []

    def partial(owner):
        if (owner + 1) % size == rank:
            return chunks[owner].clone()
        buffer = torch.empty_like(chunks[owner])
        dist.recv(buffer, (rank - 1) % size)
        return chunks[owner] + buffer

    for number in range(1, size + 1):
        total = partial((rank - number) % size)
        if number < size:
            sends.append((dist.isend(total, (rank + 1) % size), total))
    for work, _ in sends:
        work.wait()
    return total


def scatter_of_copies(chunks):
    """All chunks are copied first; then it adds in place, into one of the copies in each step."""
    rank, size = me()
    own = [chunk.clone() for chunk in chunks]
    into = torch.empty_like(own[0])
    for step in range(1, size):
        swap(own[(rank - step) % size], into, (rank + 1) % size, (rank - 1) % size)
        own[(rank - step - 1) % size].add_(into)
    return own[rank]


def scatter(start=1, collective=False, everything=False, blocking=False, lazy=False, clone=True, to=1, double=False):
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
            return total[rank].clone()
        first = chunks[(rank - start * to) % size]
        partial = first.clone() if clone else first
        for step in range(size - 1):
            into = torch.empty_like(partial)
            if blocking:
                dist.send(partial, (rank + to) % size)
                dist.recv(into, (rank - to) % size)
            else:
                swap(partial, into, (rank + to) % size, (rank - to) % size)
            own = chunks[(rank - to * (start + step + 1)) % size]
            partial = into if lazy else own + into
        if double and size > 1:
            swap(partial, torch.empty_like(partial), (rank + to) % size, (rank - to) % size)
        return partial

    return reduce


def scatter_as_float(chunks):
    return scatter()([chunk.float() for chunk in chunks]).to(chunks[0].dtype)


def scatter_keeps_float(chunks):
    return scatter()([chunk.float() for chunk in chunks])


def scatter_into_chunks(chunks):
    """Adds into what was passed, and returns a copy."""
    rank, size = me()
    for step in range(size - 1):
        into = torch.empty_like(chunks[0])
        swap(chunks[(rank - step - 1) % size], into, (rank + 1) % size, (rank - 1) % size)
        chunks[(rank - step - 2) % size].add_(into)
    return chunks[rank].clone()


def scatter_into_list(chunks):
    """The sums in new tensors, but these in the caller's list."""
    rank, size = me()
    for step in range(size - 1):
        into = torch.empty_like(chunks[0])
        swap(chunks[(rank - step - 1) % size], into, (rank + 1) % size, (rank - 1) % size)
        chunks[(rank - step - 2) % size] = chunks[(rank - step - 2) % size] + into
    return chunks[rank].clone()


def scatter_into_one_buffer(chunks):
    buffer = BUFFERS.setdefault(("scatter", chunks[0].shape, chunks[0].dtype), torch.empty_like(chunks[0]))
    return buffer.copy_(scatter()(chunks))


def scatter_without_waiting(chunks):
    rank, size = me()
    partial = chunks[(rank - 1) % size].clone()
    for step in range(size - 1):
        into = torch.zeros_like(partial)
        PENDING.append(dist.isend(partial, (rank + 1) % size))
        PENDING.append(dist.irecv(into, (rank - 1) % size))
        partial = into + chunks[(rank - step - 2) % size]
    return partial


WRONG_SCATTER = {
    "sends before it receives": (scatter(blocking=True), "every rank returns[\\s\\S]*deadlock"),
    "ends at the neighbour": (scatter(start=0), "has the sum of all chunks"),
    "forgets to add": (scatter(lazy=True), "has the sum"),
    "in float32": (scatter_as_float, "has the sum[\\s\\S]*torch.(float64|int64)"),
    "returns float32": (scatter_keeps_float, "has the sum[\\s\\S]*dtype torch.float64"),
    "doesn't wait": (scatter_without_waiting, "has the sum"),
    "adds into the chunks": (scatter_into_chunks, "is not changed[\\s\\S]*overwritten"),
    "puts sums into the list": (scatter_into_list, "is not changed[\\s\\S]*the list"),
    "no clone for one rank": (scatter(clone=False), "is a new tensor[\\s\\S]*of 1,"),
    "one buffer for all calls": (scatter_into_one_buffer, "is a new tensor[\\s\\S]*an earlier call"),
    "sends all chunks": (scatter(everything=True), "N-1 messages of one tensor"),
    "to the left": (scatter(to=-1), "N-1 messages of one tensor"),
    "one step too many": (scatter(double=True), "N-1 messages of one tensor"),
    "reduce_scatter": (scatter(collective=True), "no collective"),
    "with a barrier": (with_barrier(scatter()), "no collective"),
}

# ---------------------------------------------------------------- hierarchical all-reduce


def formula(tensor, inside, across):
    local, nodes = dist.get_world_size(inside), dist.get_world_size(across)
    total = tensor.nbytes
    return 2 * (local - 1) * total // local, 2 * (nodes - 1) * total // (nodes * local)


def hierarchy_by_lists(tensor, inside, across):
    """List collectives, and gloo's all_reduce between nodes; bytes from the formulas."""
    pieces = list(tensor.chunk(dist.get_world_size(inside)))
    shard = torch.empty_like(pieces[0])
    dist.reduce_scatter(shard, pieces, group=inside)
    dist.all_reduce(shard, group=across)
    dist.all_gather(pieces, shard, group=inside)
    return formula(tensor, inside, across)


def hierarchy_functional(tensor, inside, across):
    """PyTorch's functional collectives, which never pass through Python's process groups."""
    shard = functional.reduce_scatter_tensor(tensor, "sum", 0, inside)
    shard = functional.wait_tensor(functional.all_reduce(shard, "sum", across))
    tensor.copy_(functional.all_gather_tensor(shard, 0, inside))
    return formula(tensor, inside, across)


def hierarchy_by_roots(tensor, inside, across):
    """Each shard is reduced to its owner and broadcast from it; across, reduce and broadcast, too."""
    ranks = dist.get_process_group_ranks(inside)
    shards = tensor.tensor_split(len(ranks))
    for owner, shard in zip(ranks, shards, strict=True):
        dist.reduce(shard, owner, group=inside)
    mine = shards[dist.get_rank(inside)]
    root = dist.get_process_group_ranks(across)[0]
    dist.reduce(mine, root, group=across)
    dist.broadcast(mine, root, group=across)
    for owner, shard in zip(ranks, shards, strict=True):
        dist.broadcast(shard, owner, group=inside)
    return formula(tensor, inside, across)


def hierarchy(across_phase=True, whole=False, world=False, in_place=True, count="right", gather_in_world=False):
    """Two levels with chosen faults."""

    def reduce(tensor, inside, across):
        local = dist.get_world_size(inside)
        numbers = formula(tensor, inside, across)
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
            dist.all_gather_into_tensor(target, shard, group=None if gather_in_world else inside)
        wrong = {
            "half": (numbers[0] // 2, numbers[1]),
            "whole": (numbers[0], numbers[1] * local),
            "float": tuple(map(float, numbers)),
            "sum": sum(numbers),
            "list": list(numbers),
            "elements of 4": tuple(4 * number // tensor.element_size() for number in numbers),
            "swapped": numbers[::-1],
        }
        return wrong.get(count, numbers)

    return reduce


def hierarchy_by_number(tensor, inside, across):
    """Takes the place in the node from the rank's number."""
    local = dist.get_world_size(inside)
    dist.all_reduce(tensor, group=inside)
    shards = tensor.tensor_split(local)
    dist.all_reduce(shards[dist.get_rank() % local], group=across)
    dist.all_gather(list(shards), shards[dist.get_rank() % local].clone(), group=inside)
    return formula(tensor, inside, across)


def hierarchy_as_float(tensor, inside, across):
    copy = tensor.float()
    hierarchy()(copy, inside, across)
    tensor.copy_(copy)
    return formula(tensor, inside, across)


def hierarchy_whole_in_pieces(tensor, inside, across):
    """A ring across for the whole tensor, in messages no larger than a shard."""
    target = hierarchy(across_phase=False)
    target(tensor, inside, across)
    RING(tensor, group=across)
    return formula(tensor, inside, across)


def hierarchy_without_waiting(tensor, inside, across):
    shard = tensor.new_empty(tensor.numel() // dist.get_world_size(inside))
    dist.reduce_scatter_tensor(shard, tensor, group=inside)
    PENDING.append(dist.all_reduce(shard, group=across, async_op=True))
    dist.all_gather_into_tensor(tensor, shard, group=inside)
    return formula(tensor, inside, across)


def hierarchy_without_its_last_wait(tensor, inside, across):
    shard = tensor.new_empty(tensor.numel() // dist.get_world_size(inside))
    dist.reduce_scatter_tensor(shard, tensor, group=inside)
    dist.all_reduce(shard, group=across)
    PENDING.append((dist.all_gather_into_tensor(tensor, shard, group=inside, async_op=True), shard))
    return formula(tensor, inside, across)


WRONG_HIERARCHY = {
    "gathers in the world": (hierarchy(gather_in_world=True), "every rank returns"),
    "nothing across": (hierarchy(across_phase=False), "the sum over the world"),
    "out of place": (hierarchy(in_place=False), "the sum over the world"),
    "in float32": (hierarchy_as_float, "the sum over the world[\\s\\S]*torch.float64"),
    "places from the numbers of ranks": (hierarchy_by_number, "the sum over the world[\\s\\S]*alternating"),
    "all-reduce everywhere": (hierarchy(whole=True), "nothing else is sent"),
    "the whole across, in pieces": (hierarchy_whole_in_pieces, "nothing else is sent"),
    "all-reduce in the world": (hierarchy(world=True), "nothing else is sent"),
    "with a barrier": (with_barrier(hierarchy()), "nothing else is sent"),
    "returns half of the bytes inside": (hierarchy(count="half"), "returns \\(bytes"),
    "returns the bytes of the whole tensor across": (hierarchy(count="whole"), "returns \\(bytes"),
    "returns floats": (hierarchy(count="float"), "returns \\(bytes"),
    "returns the sum": (hierarchy(count="sum"), "returns \\(bytes"),
    "returns a list": (hierarchy(count="list"), "returns \\(bytes"),
    "returns (across, inside)": (hierarchy(count="swapped"), "returns \\(bytes"),
    "4 bytes a number": (hierarchy(count="elements of 4"), "returns \\(bytes[\\s\\S]*torch.float64"),
}

# ---------------------------------------------------------------- evaluate


def evaluate_in_two(batches):
    """Two collectives: one for the sums, one for the count."""
    sums = torch.tensor(batches, dtype=torch.float64).reshape(-1, 2).sum(dim=0)
    count = torch.tensor(len(batches))
    dist.all_reduce(sums)
    dist.all_reduce(count)
    correct, loss = (sums / count.clamp(min=1)).tolist()
    return correct, loss


def evaluate_objects(batches):
    """Everybody gets everybody's list; NumPy's floats."""
    import numpy as np

    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, batches)
    pairs = [pair for batch in everybody for pair in batch]
    if not pairs:
        return 0.0, 0.0
    correct, loss = np.array(pairs, dtype=np.float64).mean(axis=0)
    return correct, loss


def evaluate_by_the_root(batches):
    """Reduced to rank 0, which divides and broadcasts."""
    correct, loss = (sum(column) for column in zip((0.0, 0.0), *batches, strict=True))
    total = torch.tensor([correct, loss, len(batches)], dtype=torch.double)
    dist.reduce(total, 0)
    if dist.get_rank() == 0 and total[2] > 0:
        total = total / total[2]
    dist.broadcast(total, 0)
    return total[0].item(), total[1].item()


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


def evaluate_with(
    dtype=torch.float64,
    mean="global",
    root_only=False,
    calls=1,
    guard=True,
    kind=tuple,
    waits=True,
    zero_for=2,
):
    """The right idea with chosen faults."""

    def evaluate(batches):
        total = torch.zeros(3, dtype=dtype)
        for correct, loss in batches:
            total += torch.tensor([correct, loss, 1.0], dtype=dtype)
        if mean == "of means":
            total = total / total[2].clamp(min=1)
        local = max(float(total[2]), 1.0)
        for part in total.split(3 // calls):
            if waits:
                dist.all_reduce(part)
            else:
                PENDING.append((dist.all_reduce(part, async_op=True), part))
        correct, loss, count = total.tolist()
        count = {"local count": local, "by three": 3.0}.get(mean, count)
        if root_only and dist.get_rank():
            return None
        if guard and not (correct, loss, count)[zero_for]:
            return kind((0.0, 0.0))
        return kind((correct / count, loss / count))

    return evaluate


def evaluate_without_guard(batches):
    """Tensors divide by zero without a word: NaN."""
    total = torch.tensor([(*pair, 1.0) for pair in batches], dtype=torch.float64).reshape(-1, 3).sum(dim=0)
    dist.all_reduce(total)
    return tuple((total[:2] / total[2]).tolist())


def evaluate_float_first(batches):
    """The sums in float64, of numbers that are float32."""
    total = torch.tensor([(*pair, 1.0) for pair in batches]).reshape(-1, 3).double().sum(dim=0)
    dist.all_reduce(total)
    correct, loss, count = total.tolist()
    return (correct / count, loss / count) if count else (0.0, 0.0)


def evaluate_by_messages(batches):
    """Right, with messages in place of collectives."""
    total = torch.tensor([(*pair, 1.0) for pair in batches], dtype=torch.float64).reshape(-1, 3).sum(dim=0)
    rank, size = me()
    for other in range(1, size):
        buffer = torch.empty_like(total)
        if rank == other:
            dist.send(total, 0)
            dist.recv(total, 0)
        elif rank == 0:
            dist.recv(buffer, other)
            total += buffer
    for other in range(1, size):
        if rank == 0:
            dist.send(total, other)
    correct, loss, count = total.tolist()
    return (correct / count, loss / count) if count else (0.0, 0.0)


def as_tensors(batches):
    correct, loss = evaluate_in_two(batches)
    return torch.tensor(correct), torch.tensor(loss)


WRONG_EVALUATE = {
    "the function of the task": (evaluate_broken, "every rank returns"),
    "rank 0 counts alone": (evaluate_root_counts, "every rank returns"),
    "divides by zero": (evaluate_with(guard=False), "ZeroDivisionError"),
    "a list": (evaluate_with(kind=list), "a tuple of two floats"),
    "tensors": (as_tensors, "a tuple of two floats"),
    "on rank 0 only": (evaluate_with(root_only=True), "a tuple of two floats[\\s\\S]*rank 1"),
    "a mean of means": (evaluate_with(mean="of means"), "the mean over all batches"),
    "the own count": (evaluate_with(mean="local count"), "the mean over all batches"),
    "always three ranks": (evaluate_with(mean="by three"), "the mean over all batches"),
    "doesn't wait": (evaluate_with(waits=False), "the mean over all batches"),
    "zeros for nothing correct": (evaluate_with(zero_for=0), "the mean over all batches"),
    "zeros for no loss": (evaluate_with(zero_for=1), "the mean over all batches"),
    "nan for no batch": (evaluate_without_guard, "if no rank has a batch"),
    "in float32": (evaluate_with(dtype=torch.float32), "added in float64"),
    "float32 first": (evaluate_float_first, "added in float64"),
    "three collectives": (evaluate_with(calls=3), "at most two collectives"),
    "with a barrier": (with_barrier(evaluate_in_two), "at most two collectives"),
    "messages": (evaluate_by_messages, "at most two collectives"),
}

# ---------------------------------------------------------------- bucketed averaging


def average_async(parameters, bucket_bytes):
    """Greedy in one pass, divided before it is sent, awaited at the end."""
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
            p.grad[...] = piece.reshape(p.grad.shape)
    return len(pending)


def average_by_avg(parameters, bucket_bytes):
    """A preallocated buffer a bucket with views into it, gloo's own mean, buckets sent in reverse order."""
    grads = [p.grad for p in parameters if p.grad is not None]
    starts, room = [], 0
    for i, grad in enumerate(grads):
        room -= grad.numel() * grad.element_size()
        if room < 0 or i == 0:
            starts.append(i)
            room = bucket_bytes - grad.numel() * grad.element_size()
    buckets = [grads[a:b] for a, b in zip(starts, [*starts[1:], None], strict=False)]
    for bucket in reversed(buckets):
        ends = list(accumulate(grad.numel() for grad in bucket))
        flat = bucket[0].new_empty(ends[-1])
        for end, grad in zip(ends, bucket, strict=True):
            flat[end - grad.numel() : end] = grad.flatten()
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)
        for end, grad in zip(ends, bucket, strict=True):
            grad.data.copy_(flat[end - grad.numel() : end].view(grad.shape))
    return len(buckets)


def average_functional(parameters, bucket_bytes):
    """Recursive, with PyTorch's functional all_reduce."""
    with_grad = [p for p in parameters if p.grad is not None]

    def fill(rest):
        if not rest:
            return []
        total, count = rest[0].grad.nbytes, 1
        while count < len(rest) and total + rest[count].grad.nbytes <= bucket_bytes:
            total, count = total + rest[count].grad.nbytes, count + 1
        return [rest[:count], *fill(rest[count:])]

    buckets = fill(with_grad)
    for bucket in buckets:
        flat = torch.hstack([p.grad.ravel() for p in bucket])
        flat = functional.wait_tensor(functional.all_reduce(flat, "sum", dist.group.WORLD)).div(dist.get_world_size())
        offset = 0
        for p in bucket:
            p.grad.zero_().add_(flat[offset : offset + p.numel()].unflatten(0, p.shape) if p.dim() else flat[offset])
            offset += p.numel()
    return len(buckets)


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
    oversized_aside=False,
    flatten=lambda grad: grad.reshape(-1),
    reduce=lambda flat: dist.all_reduce(flat),
    count=len,
):
    """Bucketed averaging with chosen faults."""

    def run(parameters, limit):
        if twice:
            sum(p.numel() for p in parameters)  # uses the iterator up
        buckets, aside, filled, nothing = [[]], [], 0, []
        for p in parameters:
            if p.grad is None:
                nothing.append(p)
                continue
            size = p.grad.nbytes
            if oversized_aside and size > limit:
                aside.append([p])
                continue
            full = filled >= limit if late else filled + size >= limit + (not below)
            if buckets[-1] and (full or single):
                buckets.append([])
                filled = 0
            buckets[-1].append(p)
            filled += size
        if drop_last:
            buckets.pop()
        buckets = [bucket for bucket in buckets if bucket or empty] + aside
        for bucket in buckets:
            flat = torch.cat([flatten(p.grad) for p in bucket]) if bucket else torch.zeros(0)
            reduce(flat)
            flat /= dist.get_world_size() if divide else 1
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                if rebind:
                    p.grad = piece.view_as(p).clone()
                else:
                    p.grad.copy_(piece.view_as(p.grad))
        for p in nothing if fill else ():
            p.grad = torch.zeros_like(p)
        return count(buckets)

    return run


def gather_and_sum(flat):
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, flat)
    flat.copy_(sum(parts))


def reduce_and_broadcast(flat):
    dist.reduce(flat, 0)
    dist.broadcast(flat, 0)


def reduce_as_float(flat):
    copy = flat.float()
    dist.all_reduce(copy)
    flat.copy_(copy)


def reduce_rounded(flat):
    """The bytes of float64, the digits of float32."""
    flat.copy_(flat.float())
    dist.all_reduce(flat)


def no_wait(flat):
    PENDING.append(dist.all_reduce(flat, async_op=True))


def in_memory_order(grad):
    return grad.as_strided((grad.numel(),), (1,))


def average_without_frozen(parameters, limit):
    return average()([p for p in parameters if p.requires_grad], limit)


WRONG_AVERAGE = {
    "flattens with view": (average(flatten=lambda grad: grad.view(-1)), "every rank returns"),
    "the sum": (average(divide=False), "is the mean over the ranks"),
    "forgets the last bucket": (average(drop_last=True), "is the mean over the ranks"),
    "goes through the iterator twice": (average(twice=True), "is the mean over the ranks"),
    "packs as it lies in memory": (average(flatten=in_memory_order), "is the mean over the ranks"),
    "rounds to float32": (average(reduce=reduce_rounded), "is the mean over the ranks[\\s\\S]*torch.float64"),
    "sends float32": (average(reduce=reduce_as_float), "is the mean over the ranks[\\s\\S]*torch.float64"),
    "doesn't wait": (average(reduce=no_wait), "is the mean over the ranks"),
    "leaves frozen parameters out": (average_without_frozen, "is the mean over the ranks"),
    "zeros for None": (average(fill=True), "None stays None"),
    "rebinds p.grad": (average(rebind=True), "p.grad is the tensor it was"),
    "one bucket a parameter": (average(single=True), "one all_reduce for each bucket"),
    "closes a bucket that is too full": (average(late=True), "one all_reduce for each bucket"),
    "never fills a bucket": (average(below=True), "one all_reduce for each bucket"),
    "large ones aside, small ones go on": (average(oversized_aside=True), "one all_reduce for each bucket"),
    "an empty bucket": (average(empty=True), "one all_reduce for each bucket"),
    "gathers and sums": (average(reduce=gather_and_sum), "one all_reduce for each bucket"),
    "reduces and broadcasts": (average(reduce=reduce_and_broadcast), "one all_reduce for each bucket"),
    "with a barrier": (with_barrier(average()), "one all_reduce for each bucket"),
    "returns parameters": (average(count=lambda buckets: sum(map(len, buckets))), "returns the number of buckets"),
    "returns their sizes": (average(count=lambda buckets: [*map(len, buckets)]), "returns the number of buckets"),
}

# ---------------------------------------------------------------- held to the protocol

WRONG = {
    "ring_shift": WRONG_SHIFT,
    "tree_broadcast": WRONG_TREE,
    "reduce_scatter": WRONG_SCATTER,
    "hierarchical_all_reduce": WRONG_HIERARCHY,
    "evaluate": WRONG_EVALUATE,
    "average_gradients": WRONG_AVERAGE,
}
RIGHT = {
    "ring_shift": [
        shift_without_batch,
        shift_between_world_ranks,
        shift_by_thread,
        shift_cycle_by_cycle,
        ShiftOfBytes(),
    ],
    "tree_broadcast": [tree_by_halving, tree_by_ranges, tree_all_at_once, tree_by_schedule],
    "reduce_scatter": [scatter_into_received, scatter_alternating, scatter_all_receives_first, scatter_of_copies],
    "hierarchical_all_reduce": [hierarchy_by_lists, hierarchy_functional, hierarchy_by_roots],
    "evaluate": [evaluate_in_two, evaluate_objects, evaluate_by_the_root],
    "average_gradients": [average_async, average_by_avg, average_functional],
}
RETURNS = check.RETURNS
MAY_HANG = {answer for wrong in WRONG.values() for answer, says in wrong.values() if says.startswith(RETURNS)}
# items, where their names are long or many promises are held by them
OVERWRITTEN = "the tensor may be overwritten at once"
ONCE = "every rank receives once, the root never"
SHIFT = "every rank has the tensor from `by` places to its left"
ONE = "one message, straight to its rank, none to itself"
NEW = "the result is a new tensor"
TENSOR = "the root's tensor on every rank, in place"
ONLY = "sends and receives only"
ROUNDS = "in ceil(log2 N) rounds"
TOTAL = "rank r has the sum of all chunks[r]"
STEPS = "N-1 messages of one tensor to the right neighbour"
KEPT = "what was passed in is not changed"
WHOLE = "the sum over the world, in place"
SENT = "returns (bytes inside, bytes across)"
ELSE = "nothing else is sent"
MEAN = "the mean over all batches of all ranks"
PAIR = "a tuple of two floats"
WIDE = "added in float64"
TWO = "at most two collectives, and nothing else"
MEANS = "every gradient is the mean over the ranks"
BUCKET = "one all_reduce for each bucket"
PROMISES = {
    "ring_shift": [
        ("sends its tensor `by` places to the right", SHIFT, "to the left"),
        ("returns what arrives from `by` places to the left", SHIFT, "doesn't wait for what arrives"),
        ("`by` may be 0, negative, or larger than the ring", SHIFT, "zeros where nothing moves"),
        ("`by` may be 0, negative, or larger than the ring", RETURNS, "doesn't wrap around"),
        ("The group may be a part of the world, also a single rank", RETURNS, "forgets the group"),
        ("of any shape and dtype", SHIFT, "in float32"),
        ("in one message, straight to its rank", ONE, "in small steps"),
        ("in one message, straight to its rank", ONE, "in halves"),
        ("without collectives", "no collective", "gathers all"),
        ("without collectives", "no collective", "with a barrier"),
        ("Where that is the rank itself, nothing is sent", RETURNS, "sends to itself"),
        ("The result is a new tensor in each call", NEW, "no copy where nothing moves"),
        ("The result is a new tensor in each call", NEW, "one buffer for all calls"),
        ("The tensor that was passed stays as it was", "the tensor passed in stays as it was", "in place"),
        ("It must not deadlock", RETURNS, "sends before it receives"),
        ("however long the ring", RETURNS, "odd places send first"),
        ("so each receive names its sender", RETURNS, "receives from anybody"),
        ("the caller may overwrite the tensor at once", OVERWRITTEN, "doesn't wait for its send"),
        ("in the ring of the group", RETURNS, "takes places for ranks"),
    ],
    "tree_broadcast": [
        ("copies the tensor of rank `src` *of the group* into everybody's", TENSOR, "always from rank 0"),
        ("`tree_broadcast(tensor, src=0, group=None)`", TENSOR, "by default from rank 1"),
        ("in place", TENSOR, "out of place"),
        ("in place", TENSOR, "rebinds the tensor"),
        ("of any shape and dtype", TENSOR, "in float32"),
        ("Use sends and receives only", ONLY, "with a barrier"),
        ("Use sends and receives only", ONLY, "broadcast"),
        (r"that takes $\lceil\log_2 N\rceil$ rounds", ROUNDS, "a chain"),
        (r"that takes $\lceil\log_2 N\rceil$ rounds", ROUNDS, "a binary tree"),
        ("in each of which a rank sends at most one message", ROUNDS, "all from the root"),
        ("It works for every group size and every `src`", RETURNS, "sends beyond the last place"),
        ("It works for every group size and every `src`", RETURNS, "takes places for ranks"),
        ("It works for every group size", TENSOR, "always three rounds"),
        ("Every rank receives once, the root never", ONCE, "the root gets a word back"),
        ("so each receive names its sender", RETURNS, "receives from anybody"),
        ("Return the number of messages that this rank sent", "returns the messages it sent", "returns bytes"),
        ("the caller may overwrite the tensor at once", OVERWRITTEN, "doesn't wait for its sends"),
        ("return the number of messages sent", "returns the messages it sent", "counts receives too"),
    ],
    "reduce_scatter": [
        ("rank $r$ returns the sum over all ranks of their `chunks[r]`", TOTAL, "ends at the neighbour"),
        ("rank $r$ returns the sum over all ranks of their `chunks[r]`", TOTAL, "doesn't wait"),
        ("floating-point or integer, any shape", TOTAL, "in float32"),
        ("a new tensor of that shape and dtype", TOTAL, "returns float32"),
        ("a new tensor of that shape and dtype", "the result is a new tensor", "no clone for one rank"),
        ("It works for any number of ranks, also one", RETURNS, "sends before it receives"),
        ("every rank sends exactly one tensor of this size to its right neighbour", STEPS, "sends all chunks"),
        ("to its right neighbour and receives one from its left", STEPS, "to the left"),
        ("in each of $N-1$ steps", STEPS, "one step too many"),
        ("Use no collectives", "no collective", "with a barrier"),
        ("Use no collectives", "no collective", "reduce_scatter"),
        ("a new tensor of that shape and dtype", "the result is a new tensor", "one buffer for all calls"),
        ("The list and the tensors passed in are not changed", KEPT, "adds into the chunks"),
        ("The list and the tensors passed in are not changed", KEPT, "puts sums into the list"),
        ("by a ring of N-1 steps, one message a rank and step", STEPS, "sends all chunks"),
    ],
    "hierarchical_all_reduce": [
        ("over the whole world", WHOLE, "nothing across"),
        ("in place", WHOLE, "out of place"),
        ("of any numeric dtype", WHOLE, "in float32"),
        ("of any numeric dtype", SENT, "4 bytes a number"),
        ("Which ranks form a node can't be told from their numbers", WHOLE, "places from the numbers of ranks"),
        ("groups of one rank must work", RETURNS, "gathers in the world"),
        ("reduce-scatter inside, all-reduce of my shard across, all-gather inside", ELSE, "all-reduce everywhere"),
        ("all-reduce of my shard across", ELSE, "the whole across, in pieces"),
        ("nothing else is sent", ELSE, "with a barrier"),
        ("nothing else is sent", ELSE, "all-reduce in the world"),
        ("Return a tuple of two ints", SENT, "returns floats"),
        ("Return a tuple of two ints", SENT, "returns a list"),
        ("that this rank sends in ring algorithms inside and across", SENT, "returns half of the bytes inside"),
        ("return the bytes sent (inside, across)", SENT, "returns (across, inside)"),
    ],
    "evaluate": [
        ("Write `evaluate(batches)` without them", RETURNS, "the function of the task"),
        ("perhaps an empty one", RETURNS, "divides by zero"),
        ("every rank returns the mean over all batches of all ranks", MEAN, "a mean of means"),
        ("every rank returns the mean", PAIR, "on rank 0 only"),
        ("a tuple of two floats", PAIR, "a list"),
        ("Add in float64", WIDE, "in float32"),
        ("Add in float64", WIDE, "float32 first"),
        ("At most two collectives", TWO, "three collectives"),
        ("on every rank the same", RETURNS, "rank 0 counts alone"),
        ("nothing else is sent", TWO, "messages"),
        ("If no rank has a batch, return `(0.0, 0.0)`", "(0.0, 0.0) if no rank has a batch", "nan for no batch"),
        ("Mean of (correct, loss) over the batches of all ranks", MEAN, "the own count"),
        ("the same on every rank", MEAN, "always three ranks"),
    ],
    "average_gradients": [
        ("replaces every gradient by its mean over the ranks", MEANS, "the sum"),
        ("replaces every gradient by its mean over the ranks", MEANS, "leaves frozen parameters out"),
        ("Go through the parameters (an iterator) in the order given", MEANS, "goes through the iterator twice"),
        ("would then hold more than `bucket_bytes`", BUCKET, "closes a bucket that is too full"),
        ("unless the bucket would then hold more than `bucket_bytes`", BUCKET, "never fills a bucket"),
        ("in that case close it and open the next", BUCKET, "one bucket a parameter"),
        ("A gradient larger than `bucket_bytes` is alone in its bucket", BUCKET, "large ones aside, small ones go on"),
        ("One `all_reduce` for each bucket", BUCKET, "gathers and sums"),
        ("One `all_reduce` for each bucket", BUCKET, "an empty bucket"),
        ("nothing else is sent", BUCKET, "with a barrier"),
        ("Gradients that are `None` (on all ranks) stay so", "None stays None", "zeros for None"),
        ("one floating-point dtype", MEANS, "rounds to float32"),
        ("any shape; their memory layout is any", RETURNS, "flattens with view"),
        ("their memory layout is any, and may differ from rank to rank", MEANS, "packs as it lies in memory"),
        ("`p.grad` must stay the same tensor object", "p.grad is the tensor it was", "rebinds p.grad"),
        ("Return the number of buckets", "returns the number of buckets", "returns parameters"),
        ("Average all gradients over the ranks", MEANS, "forgets the last bucket"),
        ("over the ranks in buckets", BUCKET, "closes a bucket that is too full"),
        ("return the number of buckets", "returns the number of buckets", "returns their sizes"),
    ],
}  # fmt: skip
CONTEXT = {
    "ring_shift": [
        "The ranks stand in a ring",
        "Write `ring_shift(tensor, by, group=None)`",
        "The tensor is contiguous",
    ],
    "tree_broadcast": [],
    "reduce_scatter": ["Write `reduce_scatter(chunks)`", "Use a ring:"],
    "hierarchical_all_reduce": [
        "Write `hierarchical_all_reduce(tensor, inside, across)`",
        "`inside` is the group of the ranks of my node",
        "Three phases:",
        "Let $S$ be the tensor's bytes",
        "all divisions are without remainder",
        "You may use `dist.reduce_scatter_tensor`",
    ],
    "evaluate": [
        "The function below averages",
        "For two independent reasons it hangs",
        "Read the reports first",
        "def evaluate_broken(batches)",
        "for correct, loss in batches",
        "now = torch.tensor([correct, loss])",
        "count = torch.tensor(len(batches))",
        "evaluate_broken(lists[dist.get_rank()])",
        "lists = [[(1.0, 0.5)] * n for n in (3, 1, 0)]",
    ],
    "average_gradients": ["Write `average_gradients(parameters, bucket_bytes)`"],
}


class TestChecks(CheckProtocol):
    TOPIC = "15-08"
    CHECKS, ANSWERS, STUBS, RIGHT, WRONG = CHECKS, ANSWERS, STUBS, RIGHT, WRONG
    PROMISES, CONTEXT = PROMISES, CONTEXT

    def hold_stand_in(self, name, stand_in):
        if name == "tree_broadcast":

            def broadcast():
                x = torch.tensor(dist.get_rank())
                return stand_in(x, 1), int(x)

            assert launch(broadcast, 3, backend="gloo") == [(0, 1)] * 3


# ---------------------------------------------------------------- what else a check says


def test_a_deadlock_is_reported_with_a_line_for_each_rank_and_its_case():
    with pytest.raises(CheckFailed) as failure:
        check.ring_shift(shift_blocking)
    lines = [line.strip() for line in str(failure.value).splitlines()]
    for rank in range(5):
        assert sum(line.startswith(f"rank {rank} waits in send in shift_blocking") for line in lines) == 1, lines
    assert "(case: by -23 in the world of five ranks" in str(failure.value)
    with pytest.raises(CheckFailed) as failure:
        check.tree_broadcast(tree(renumber=False))
    assert "topic_15_08" not in str(failure.value)  # what isn't the student's is left out


def half_done(tensor, by, group=None):
    if by == 0:
        raise NotImplementedError
    return shift_without_batch(tensor, by, group)


def not_for_one_rank(chunks):
    if len(chunks) == 1:
        raise NotImplementedError
    return scatter()(chunks)


@pytest.mark.parametrize(("exercise", "answer"), [("ring_shift", half_done), ("reduce_scatter", not_for_one_rank)])
def test_an_answer_with_a_part_missing_was_attempted(exercise, answer):
    result = CHECKS[exercise].run(answer)
    assert result.status == "failed"
    assert "NotImplementedError" in str(result)


def all_kinds_of_calls():
    world, x = dist.group.WORLD, torch.ones(4)
    with check._recorded() as calls:
        dist.all_reduce(x)
        dist.barrier()
        dist.monitored_barrier()
        functional.wait_tensor(functional.all_reduce(functional.all_reduce(x, "sum", world), "sum", world))
        dist.all_gather_into_tensor(torch.zeros(8), x)
        dist.all_gather_object([None, None], "word")
        dist.gather(x, [torch.zeros(4) for _ in range(2)] if dist.get_rank() == 0 else None)
        dist.nn.functional.all_reduce(x)
    names = {name: vars(dist.ProcessGroup).get(name) for name in dir(dist.ProcessGroup)}
    return [(call.name, call.size, call.ring_bytes) for call in calls], str(names["allreduce"])


def test_collectives_of_every_kind_are_seen():
    for calls, method in launch(all_kinds_of_calls, 2, backend="gloo"):
        assert calls[0] == ("allreduce", 16, 16.0)  # 2(N-1)/N · S
        names = [name for name, *_ in calls]
        assert names[1:5] == ["barrier", "monitored_barrier", "all_reduce", "all_reduce"]
        assert calls[5][1:] == (32, 16.0)
        assert [size for _, size, _ in calls[8:]] == [16, 16]
        assert len(calls) == 10  # all_gather_object: sizes, then bytes
        assert "_recorded" not in method  # put back


def test_hints_in_the_task_are_right():
    """The schedule of the reduce-scatter's second hint."""
    for size in range(2, 9):
        for rank in range(size):
            sent = [(rank - step - 1) % size for step in range(size - 1)]
            received = [(rank - step - 2) % size for step in range(size - 1)]
            assert received[-1] == rank
            assert sent[1:] == received[:-1]
