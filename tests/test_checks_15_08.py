"""The checks of 15-08 accept right answers, however written, and reject what a student might really write."""

import math
import random
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import accumulate, combinations, pairwise
from math import gcd
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from check_protocol import CheckProtocol, idle

from course.answers import answers
from course.exercise_form import student_source
from shared import launch
from shared.checks import ranks
from shared.checks import topic_15_08 as check
from shared.checks.ranks import RETURNS
from shared.checks.report import CheckFailed
from shared.traffic import Call, observe, recorded, rounds

pytestmark = pytest.mark.processes
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest and the notebook

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

OUTCOMES = {}  # (function, size, answer) → Future of what the launch came to; the protocol asks several times
LOCK = threading.Lock()
HANGS = 2  # seconds for an answer that is to be found hanging; others have time enough for a busy machine


@pytest.fixture(scope="module")
def ahead():
    """Begins the launches of an exercise ahead, two at a time: while one waits in vain, another gets on."""
    run, start = ranks._outcome, ranks.launch

    def run_once(function, size, answer, *args):
        key = (function, size, answer)
        with LOCK:
            mine = key not in OUTCOMES
            future = OUTCOMES.setdefault(key, Future())
        if mine:
            try:
                future.set_result(run(function, size, answer, *args))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def limited(function, size, notes, answer, *args, timeout, **how):
        return start(function, size, notes, answer, *args, timeout=HANGS if answer in MAY_HANG else 30, **how)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(ranks, "_outcome", run_once)
        patch.setattr(ranks, "launch", limited)
        begin = cache(lambda name, *answers: [pool.submit(CHECKS[name].run, answer) for answer in answers])
        yield begin
        pool.shutdown(cancel_futures=True)


@pytest.fixture(autouse=True)
def each_launch_once(ahead, request):
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    if name is not None:
        ahead(name, *asked_for(name, tuple(request.session.items)))


@cache
def asked_for(name, items):
    """The answers that the collected tests put on processes, in their order."""
    found = {}
    for item in items:
        given = item.callspec.params if item.path.name == Path(__file__).name and hasattr(item, "callspec") else {}
        if given.get("name") == name != "cut_buckets":
            if "wrong" in given:
                answer = WRONG[name][given["wrong"]][0]
            else:
                answer = RIGHT[name][given["number"]] if "number" in given else ANSWERS[name]
            found[id(answer)] = answer
    return tuple(found.values())


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


def with_barrier_after(answer):
    """A collective that nobody needs, when all is done."""

    def run(*args):
        returned = answer(*args)
        dist.barrier(group=next((arg for arg in args if isinstance(arg, dist.ProcessGroup)), None))
        return returned

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


def shift_half_as_bfloat16(tensor, by, group=None):
    if tensor.dtype != torch.float16:
        return shift_without_batch(tensor, by, group)
    return shift_without_batch(tensor.bfloat16(), by, group).half()


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
    return out.clone()


def shift_written_back(tensor, by, group=None):
    """Receives into what was passed, and writes the old numbers back."""
    mine = tensor.clone()
    out = shift_in_place(tensor, by, group)
    tensor.copy_(mine)
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


def shift_whole_numbers_as_double(tensor, by, group=None):
    if tensor.dtype != torch.int64:
        return shift_without_batch(tensor, by, group)
    return shift_without_batch(tensor.double(), by, group).long()


WRONG_SHIFT = {
    "sends before it receives": (shift_blocking, "every rank returns[\\s\\S]*deadlock[\\s\\S]*Hint 3"),
    "odd places send first": (shift_even_first, "every rank returns"),
    "sends to itself": (shift_to_itself, "sends to itself"),
    "doesn't wrap around": (shift_unwrapped, "every rank returns"),
    "forgets the group": (shift_world, "every rank returns"),
    "takes places for ranks": (shift_by_world_peers, "not part of group|of a group of|itself"),
    "receives from anybody": (shift_from_anybody, "receives from any rank"),
    "a ring of five always": (shift_five, "not part of the group|of a group of 4|itself"),
    "to the left": (shift_left, "places to its left"),
    "zeros where nothing moves": (shift_zeros, "places to its left"),
    "in float32": (shift_as_float, "places to its left[\\s\\S]*dtype torch.float64"),
    "float16 through bfloat16": (shift_half_as_bfloat16, "places to its left[\\s\\S]*float16"),
    "int64 through float64": (shift_whole_numbers_as_double, "places to its left[\\s\\S]*torch.int64"),
    "doesn't wait for what arrives": (shift_no_wait, "places to its left"),
    "gathers all": (shift_gather, "no collective"),
    "in small steps": (shift_in_small_steps, "one message, straight to its rank"),
    "in halves": (shift_in_halves, "one message, straight to its rank"),
    "with a barrier": (with_barrier(shift_without_batch), "no collective"),
    "in place": (shift_in_place, "stays as it was"),
    "writes it back": (shift_written_back, "stays as it was"),
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


def tree_a_round_early(tensor, src=0, group=None):
    """Places from `reach` on receive, also those whose turn is later."""
    rank, size = me(group)
    place, reach, sent = (rank - src) % size, 1, 0
    while reach < size:
        if place < reach and place + reach < size:
            dist.send(tensor, group=group, group_dst=(place + reach + src) % size)
            sent += 1
        elif reach <= place:
            dist.recv(tensor, group=group, group_src=(place - reach + src) % size)
        reach *= 2
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


def tree_whole_numbers_as_double(tensor, src=0, group=None):
    copy = tensor.double() if tensor.dtype == torch.int64 else tensor.clone()
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
    "sends beyond the last place": (tree(bounded=False), "every rank returns[\\s\\S]*Hint 3"),
    "a round too early": (tree_a_round_early, "every rank returns[\\s\\S]*Hint 2"),
    "takes places for ranks": (tree(renumber=False), "every rank returns"),
    "receives from anybody": (tree_from_anybody, "receives from any rank"),
    "always from rank 0": (tree(src_used=False), "the root's tensor on every rank"),
    "by default from rank 1": (tree(default=1), "the root's tensor on every rank[\\s\\S]*the world, by default"),
    "out of place": (tree_out_of_place, "the root's tensor on every rank"),
    "rebinds the tensor": (tree_rebinds, "the root's tensor on every rank"),
    "in float32": (tree_as_float, "the root's tensor on every rank[\\s\\S]*torch.int64"),
    "int64 through float64": (tree_whole_numbers_as_double, "the root's tensor on every rank[\\s\\S]*torch.int64"),
    "broadcast": (tree_collective, "sends and receives only"),
    "with a barrier": (with_barrier(tree()), "sends and receives only"),
    "always two rounds": (tree(rounds=2), "the root's tensor on every rank[\\s\\S]*group of ranks"),
    "always four rounds": (tree(rounds=4), "receives once, the root never[\\s\\S]*of 37, src=5"),
    "a chain": (tree_chain, "ceil\\(log2 N\\) rounds[\\s\\S]*at most 2 rounds"),
    "a binary tree": (tree_binary, "ceil\\(log2 N\\) rounds[\\s\\S]*at most 3 rounds"),
    "all from the root": (tree_flat, "ceil\\(log2 N\\) rounds"),
    "the root gets a word back": (tree_with_thanks, "receives once, the root never"),
    "returns nothing": (tree(count="none"), "returns the messages it sent"),
    "returns bytes": (tree(count="bytes"), "returns the messages it sent"),
    "returns rounds": (tree(count="rounds"), "returns the messages it sent"),
    "counts receives too": (tree(count="both"), "returns the messages it sent"),
    "doesn't wait for its sends": (tree_without_waiting, "overwritten at once"),
}

# ---------------------------------------------------------------- a ring in both directions


def two_ways_by_single_calls(tensor, group=None):
    """Single calls, all started before one is awaited; the second ring runs mirrored."""
    rank, size = me(group)
    flat = tensor.view(-1)
    middle = len(flat) // 2
    parts = [flat[:middle].tensor_split(size), flat[middle:].tensor_split(size)]
    for step in range(2 * (size - 1)):
        works, landing = [], []
        for place, side, chunks in ((rank, 1, parts[0]), ((size - rank) % size, -1, parts[1])):
            out, into = chunks[(place - step) % size], chunks[(place - step - 1) % size]
            room = into.clone()
            if out.numel():
                works.append(dist.isend(out, group=group, group_dst=(rank + side) % size))
            if room.numel():
                works.append(dist.irecv(room, group=group, group_src=(rank - side) % size))
            landing.append((into, room))
        for work in works:
            work.wait()
        for into, room in landing:
            into.copy_(room + into if step < size - 1 else room)


def two_ways_padded(tensor, group=None):
    """In a padded copy of shape (2, N, length), whose rows are turned so that the same row goes both ways."""
    rank, size = me(group)
    if size == 1 or tensor.numel() == 0:
        return
    half = -(-tensor.numel() // 2)
    length = -(-half // size)
    room = tensor.new_zeros(2, size, length)
    flat = tensor.reshape(-1)
    room[0].view(-1)[:half] = flat[:half]
    room[1].view(-1)[: tensor.numel() - half] = flat[half:]
    right, left = (rank + 1) % size, (rank - 1) % size
    for add in (True, False):
        for turn in range(size - 1):
            shift = turn if add else turn - 1
            going = torch.stack([room[0, (rank - shift) % size], room[1, (rank + shift) % size]])
            coming = torch.empty_like(going)
            swap_both(going, coming, right, left, group)
            for row, place in ((0, (rank - shift - 1) % size), (1, (rank + shift + 1) % size)):
                room[row, place] = room[row, place] + coming[row] if add else coming[row]
    tensor.copy_(torch.cat([room[0].view(-1)[:half], room[1].view(-1)[: tensor.numel() - half]]).view_as(tensor))


def swap_both(going, coming, right, left, group):
    works = [
        dist.irecv(coming[0], group=group, group_src=left),
        dist.irecv(coming[1], group=group, group_src=right),
        dist.isend(going[0].contiguous(), group=group, group_dst=right),
        dist.isend(going[1].contiguous(), group=group, group_dst=left),
    ]
    for work in works:
        work.wait()


class TwoWays:
    """An object; even elements one way, odd elements the other."""

    def __call__(self, tensor, group=None):
        rank, size = me(group)
        flat = tensor.view(-1)
        rings = [Turning(part.clone(), rank * side, side, size) for part, side in ((flat[::2], 1), (flat[1::2], -1))]
        for step in range(2 * size - 2):
            operations = [p for ring in rings for p in ring.operations(step, rank, group)]
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            for ring in rings:
                ring.arrive()
        flat[::2], flat[1::2] = rings[0].part, rings[1].part


class Turning:
    def __init__(self, part, place, side, size):
        self.part, self.place, self.side, self.size = part, place, side, size
        self.chunks = part.tensor_split(size)

    def operations(self, step, rank, group):
        out = self.chunks[(self.place - step) % self.size]
        self.into, self.adds = self.chunks[(self.place - step - 1) % self.size], step < self.size - 1
        self.room = torch.empty_like(self.into)
        if out.numel():
            yield dist.P2POp(dist.isend, out, group=group, group_peer=(rank + self.side) % self.size)
        if self.room.numel():
            yield dist.P2POp(dist.irecv, self.room, group=group, group_peer=(rank - self.side) % self.size)

    def arrive(self):
        self.into.copy_(self.into + self.room if self.adds else self.room)


def two_ways(
    ways=((1, 0), (-1, 1)),
    add=True,
    gather=True,
    blocking=False,
    waits=True,
    mirrored=True,
    extra=False,
    crumbs=False,
    stride=1,
):
    """The ring in both directions with chosen faults; `ways` are (side, which half)."""

    def run(tensor, group=None):
        rank, size = me(group)
        halves = tensor.view(-1).tensor_split(2)
        apart = stride if size == 5 else 1  # in the ring of five a rank's neighbours are two places away
        for step in range((2 if gather else 1) * (size - 1)):
            works, arrivals = [], []
            for side, half in ways:
                chunks = halves[half].tensor_split(size)
                here = rank * side if mirrored else rank
                here *= pow(apart, -1, size) if size > 1 else 1
                out, into = chunks[(here - step) % size], chunks[(here - step - 1) % size]
                room = torch.zeros_like(into)
                to, source = (rank + apart * side) % size, (rank - apart * side) % size
                if blocking:
                    dist.send(out, group=group, group_dst=to)
                    dist.recv(room, group=group, group_src=source)
                for part in (room.split(1) if crumbs else [room]) if room.numel() and not blocking else ():
                    works.append(dist.irecv(part, group=group, group_src=source))
                for part in (out.split(1) if crumbs else [out]) if out.numel() and not blocking else ():
                    works.append(dist.isend(part, group=group, group_dst=to))
                arrivals.append((into, room))
            if waits:
                for work in works:
                    work.wait()
            else:
                PENDING.extend(works)
            for into, room in arrivals:
                into.copy_(into + room if add and step < size - 1 else room)
        if extra and size > 2:
            swap(torch.zeros(1), torch.zeros(1), (rank + 2) % size, (rank - 2) % size, group)

    return run


def ring_one_way(tensor, group=None):
    """The plain ring."""
    rank, size = me(group)
    chunks = tensor.view(-1).tensor_split(size)
    for step in range(2 * (size - 1)):
        out, into = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        room = torch.empty_like(into)
        works = [dist.isend(out, group=group, group_dst=(rank + 1) % size)] if out.numel() else []
        works += [dist.irecv(room, group=group, group_src=(rank - 1) % size)] if room.numel() else []
        for work in works:
            work.wait()
        into.copy_(into + room if step < size - 1 else room)


def two_ways_of_wholes(tensor, group=None):
    """Half of the bytes a link, in no steps of chunks: each half goes around whole, and is summed by everybody."""
    rank, size = me(group)
    halves = [half.clone() for half in tensor.view(-1).tensor_split(2)]
    totals = tensor.view(-1).tensor_split(2)
    for _ in range(size - 1):
        arriving, operations = [torch.empty_like(half) for half in halves], []
        for half, into, side in zip(halves, arriving, (1, -1), strict=True):
            if half.numel():
                operations.append(dist.P2POp(dist.isend, half, group=group, group_peer=(rank + side) % size))
                operations.append(dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - side) % size))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        halves = arriving
        for total, half in zip(totals, halves, strict=True):
            total.add_(half)


def two_ways_in_float32(tensor, group=None):
    copy = tensor.float()
    two_ways()(copy, group)
    tensor.copy_(copy)


def two_ways_half_in_bfloat16(tensor, group=None):
    copy = tensor.bfloat16() if tensor.dtype == torch.float16 else tensor.clone()
    two_ways()(copy, group)
    tensor.copy_(copy)


def two_ways_out_of_place(tensor, group=None):
    two_ways()(tensor.clone(), group)


def two_ways_even_only(tensor, group=None):
    """Cuts the rest off."""
    flat = tensor.view(-1)
    two_ways()(flat[: len(flat) // 2 * 2], group)


def two_ways_gather(tensor, group=None):
    everybody = [torch.empty_like(tensor) for _ in range(me(group)[1])]
    dist.all_gather(everybody, tensor, group=group)
    tensor.copy_(sum(everybody))


def two_ways_from_anybody(tensor, group=None):
    rank, size = me(group)
    if size > 1:
        sending = dist.isend(tensor, group=group, group_dst=(rank + 1) % size)
        dist.recv(torch.empty_like(tensor), group=group)
        sending.wait()


def two_ways_last_wait_missing(tensor, group=None):
    """Waits for all that arrives, and not for the last sends."""
    rank, size = me(group)
    halves = tensor.view(-1).tensor_split(2)
    for step in range(2 * (size - 1)):
        works, arrivals = [], []
        for side, half in ((1, 0), (-1, 1)):
            chunks = halves[half].tensor_split(size)
            out, into = chunks[(rank * side - step) % size], chunks[(rank * side - step - 1) % size]
            room = torch.empty_like(into)
            if out.numel():
                PENDING.append(dist.isend(out, group=group, group_dst=(rank + side) % size))
            if room.numel():
                works.append(dist.irecv(room, group=group, group_src=(rank - side) % size))
            arrivals.append((into, room))
        for work in works:
            work.wait()
        for into, room in arrivals:
            into.copy_(into + room if step < size - 1 else room)


def two_ways_one_after_the_other(tensor, group=None):
    """First the one half all the way, then the other."""
    for half, side in zip(tensor.view(-1).tensor_split(2), (1, -1), strict=True):
        one_way(half, side, group)


def one_way(half, side, group):
    rank, size = me(group)
    chunks = half.tensor_split(size)
    for step in range(2 * (size - 1)):
        out, into = chunks[(rank * side - step) % size], chunks[(rank * side - step - 1) % size]
        turn_once(out, into, side, group, step < size - 1)


def turn_once(out, into, side, group, adds):
    rank, size = me(group)
    room = torch.empty_like(into)
    works = [dist.isend(out, group=group, group_dst=(rank + side) % size)] if out.numel() else []
    works += [dist.irecv(room, group=group, group_src=(rank - side) % size)] if room.numel() else []
    for work in works:
        work.wait()
    into.copy_(into + room if adds else room)


def two_ways_in_turns(tensor, group=None):
    """In each step first the one way, then the other."""
    rank, size = me(group)
    for step in range(2 * (size - 1)):
        for half, side in zip(tensor.view(-1).tensor_split(2), (1, -1), strict=True):
            chunks = half.tensor_split(size)
            out, into = chunks[(rank * side - step) % size], chunks[(rank * side - step - 1) % size]
            turn_once(out, into, side, group, step < size - 1)


def two_ways_unmirrored(tensor, group=None):
    """To the left with the plain ring's chunk numbers: neighbours speak of different chunks."""
    two_ways(mirrored=False)(tensor, group)


def two_ways_by_halves_of_chunks(tensor, group=None):
    """Right: each chunk is halved, not the tensor."""
    rank, size = me(group)
    chunks = [chunk.tensor_split(2) for chunk in tensor.view(-1).tensor_split(size)]
    for step in range(2 * (size - 1)):
        works, arrivals = [], []
        for side, half in ((1, 0), (-1, 1)):
            out, into = (chunks[(rank * side - step - k) % size][half] for k in (0, 1))
            room = torch.empty_like(into)
            if out.numel():
                works.append(dist.isend(out, group=group, group_dst=(rank + side) % size))
            if room.numel():
                works.append(dist.irecv(room, group=group, group_src=(rank - side) % size))
            arrivals.append((into, room))
        for work in works:
            work.wait()
        for into, room in arrivals:
            into.copy_(into + room if step < size - 1 else room)


def two_ways_whole_numbers_as_double(tensor, group=None):
    copy = tensor.double() if tensor.dtype == torch.int64 else tensor.clone()
    two_ways()(copy, group)
    tensor.copy_(copy)


def two_ways_by_threads(tensor, group=None):
    """Right: each way has a thread and a tag of its own."""
    rank, size = me(group)

    def go(half, side):
        chunks = half.tensor_split(size)
        for step in range(2 * (size - 1)):
            out, into = chunks[(rank * side - step) % size], chunks[(rank * side - step - 1) % size]
            room, works, tag = torch.empty_like(into), [], 2 + side
            if out.numel():
                works.append(dist.isend(out, group=group, group_dst=(rank + side) % size, tag=tag))
            if room.numel():
                works.append(dist.irecv(room, group=group, group_src=(rank - side) % size, tag=tag))
            for work in works:
                work.wait()
            into.copy_(into + room if step < size - 1 else room)

    ways = [threading.Thread(target=go, args=way) for way in zip(tensor.view(-1).tensor_split(2), (1, -1), strict=True)]
    for way in ways:
        way.start()
    for way in ways:
        way.join()


WRONG_TWO_WAYS = {
    "sends before it receives": (two_ways(blocking=True), "every rank returns"),
    "receives from anybody": (two_ways_from_anybody, "receives from any rank"),
    "takes places for ranks": (lambda tensor, group=None: two_ways()(tensor), "every rank returns"),
    "replaces in place of adding": (two_ways(add=False), "the sum on every rank"),
    "only the first half of the steps": (two_ways(gather=False), "the sum on every rank"),
    "the same chunk both ways": (
        two_ways_unmirrored,
        "every rank returns[\\s\\S]*SIGABRT[\\s\\S]*chunk numbers[\\s\\S]*Hint 2",
    ),
    "one half only": (two_ways(ways=((1, 0),)), "the sum on every rank"),
    "out of place": (two_ways_out_of_place, "the sum on every rank"),
    "an even number of elements": (two_ways_even_only, "the sum on every rank"),
    "in float32": (two_ways_in_float32, "the sum on every rank"),
    "float16 through bfloat16": (two_ways_half_in_bfloat16, "the sum on every rank[\\s\\S]*float16"),
    "doesn't wait": (two_ways(waits=False), "the sum on every rank"),
    "gathers and sums": (two_ways_gather, "no collective"),
    "with a barrier": (with_barrier(two_ways()), "no collective"),
    "with a barrier at the end": (with_barrier_after(two_ways()), "no collective"),
    "a word to the next but one": (two_ways(extra=True), "the two neighbours only"),
    "every second rank": (two_ways(stride=2), "the two neighbours only"),
    "the plain ring": (ring_one_way, "more than half of the plain ring's"),
    "both halves the same way": (two_ways(ways=((1, 0), (1, 1))), "more than half of the plain ring's"),
    "whole halves": (two_ways_of_wholes, "more than half of the plain ring's"),
    "in pieces of one element": (two_ways(crumbs=True), "2\\(N-1\\) steps"),
    "int64 through float64": (two_ways_whole_numbers_as_double, "the sum on every rank[\\s\\S]*torch.int64"),
    "one way after the other": (two_ways_one_after_the_other, "a message each way[\\s\\S]*has to wait"),
    "one way, then the other, in each step": (two_ways_in_turns, "a message each way[\\s\\S]*has to wait"),
    "doesn't wait for its sends": (two_ways_last_wait_missing, "overwritten at once"),
}

# ---------------------------------------------------------------- train until


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


class Trainer:
    """An object, recursive; the flag that says who goes on is reduced along."""

    def __call__(self, steps, patience, group=None):
        self.steps, self.patience, self.group = steps, patience, group
        return self.go_on([], math.inf, 0)

    def go_on(self, means, best, bad):
        if bad >= self.patience:
            return means
        loss = next(iter(self.steps), None)
        here = 0.0 if loss is None else 1.0
        good = here and float(torch.isfinite(torch.tensor(loss)))
        row = torch.tensor([loss if good else 0.0, good, here], dtype=torch.float64)
        dist.all_reduce(row, group=self.group)
        if row[2] == 0:
            return means
        if row[1] == 0:
            return self.go_on(means, best, bad)
        mean = (row[0] / row[1]).item()
        return self.go_on([*means, mean], min(best, mean), 0 if mean < best else bad + 1)


def train_with_holes(
    skips=False, local=False, ends=True, dtype=torch.float64, divide="finite", tie=False, off=0, kind=list, more=False,
    flags=1, clean=True, root=False, waits=True, counts_empty=False, best_of="best", world=False, ahead=False,
    none_below=False,
):  # fmt: skip
    """The right idea with chosen faults."""

    def run(steps, patience, group=None):
        group = None if world else group
        means, best, bad = [], math.inf, 0
        coming = next(steps, None) if ahead else None
        while bad < patience + off:
            loss, coming = (coming, next(steps, None)) if ahead else (next(steps, None), None)
            if ends and loss is None and not clean:
                break
            finite = loss is not None and math.isfinite(loss)
            if skips and loss is not None and not finite:
                continue
            total = torch.tensor(
                [loss if finite or (divide == "with nan" and loss is not None) else 0.0, finite, loss is not None],
                dtype=dtype,
            )
            mine = loss
            for part in total.split(3 // flags):
                if waits:
                    dist.all_reduce(part, group=group)
                else:
                    PENDING.append((dist.all_reduce(part, group=group, async_op=True), part))
            summed, count, going = total.tolist()
            if not going:
                break
            count = {"size": me(group)[1], "going": going, "three": 3.0}.get(divide, count)
            if count and (total[1] or divide == "size"):
                mean = summed / count
                means.append(mean)
                shown = mine if local and mine is not None else mean
                bad = 0 if shown < best or (tie and shown == best) else bad + 1
                best = min(best, shown) if best_of == "best" else shown
            elif counts_empty:
                bad += 1
        if more:
            next(steps, None)
        if root and dist.get_rank(group):
            return None
        return kind(means)

    return run


def train_broken(steps, patience, group=None):
    """The function of the lesson."""
    means, best, waited = [], math.inf, 0
    for loss in steps:
        if not math.isfinite(loss):
            continue
        total = torch.tensor(loss)
        dist.all_reduce(total, group=group)
        means.append(total.item() / dist.get_world_size(group))
        waited = 0 if loss < best else waited + 1
        best = min(best, loss)
        if waited == patience:
            break
    dist.barrier(group=group)
    return means


def train_lists(steps, patience, group=None):
    """Takes all steps first, then talks once."""
    mine, everybody = list(steps), [None] * me(group)[1]
    dist.all_gather_object(everybody, mine, group=group)
    return train_alone(everybody, patience)


def train_alone(everybody, patience):
    means, best, bad = [], math.inf, 0
    for step in range(max(map(len, everybody), default=0)):
        finite = [mine[step] for mine in everybody if step < len(mine) and math.isfinite(mine[step])]
        if finite:
            means.append(math.fsum(finite) / len(finite))
            bad = 0 if means[-1] < best else bad + 1
            best = min(best, means[-1])
            if bad == patience:
                break
    return means


def train_by_messages(steps, patience, group=None):
    """Right, with messages in place of collectives."""

    class Group:
        def __init__(self):
            self.place, self.size = me(group)

        def total(self, row):
            for other in range(1, self.size):
                if self.place == other:
                    dist.send(row, group=group, group_dst=0)
                    dist.recv(row, group=group, group_src=0)
                elif self.place == 0:
                    room = torch.empty_like(row)
                    dist.recv(room, group=group, group_src=other)
                    row += room
            for other in range(1, self.size) if self.place == 0 else ():
                dist.send(row, group=group, group_dst=other)

    means, best, bad, talk = [], math.inf, 0, Group()
    while bad < patience:
        loss = next(steps, None)
        good = loss is not None and math.isfinite(loss)
        row = torch.tensor([loss if good else 0.0, good, loss is not None], dtype=torch.float64)
        talk.total(row)
        if not row[2]:
            break
        if row[1]:
            means.append(float(row[0] / row[1]))
            bad = 0 if means[-1] < best else bad + 1
            best = min(best, means[-1])
    return means


def train_by_objects(steps, patience, group=None):
    """One call a step, which is two collectives."""
    means, best, bad = [], math.inf, 0
    while bad < patience:
        everybody = [None] * me(group)[1]
        dist.all_gather_object(everybody, next(steps, None), group=group)
        if all(loss is None for loss in everybody):
            break
        finite = [loss for loss in everybody if loss is not None and math.isfinite(loss)]
        if finite:
            means.append(math.fsum(finite) / len(finite))
            bad = 0 if means[-1] < best else bad + 1
            best = min(best, means[-1])
    return means


def train_as_tensors(steps, patience, group=None):
    return [torch.tensor(mean) for mean in train_with_holes()(steps, patience, group)]


WRONG_TRAIN = {
    "the function of the lesson": (train_broken, "every rank returns"),
    "skips a bad loss": (train_with_holes(skips=True), "the means, until they stop"),
    "leaves when its steps are over": (train_with_holes(clean=False), "every rank returns"),
    "judges by its own loss": (train_with_holes(local=True), "every rank returns"),
    "forgets the group": (train_with_holes(world=True), "every rank returns"),
    "a tuple": (train_with_holes(kind=tuple), "a list of floats"),
    "tensors": (train_as_tensors, "a list of floats"),
    "on rank 0 only": (train_with_holes(root=True), "a list of floats[\\s\\S]*place 1"),
    "as low is lower": (train_with_holes(tie=True), "the means, until they stop"),
    "patience and one": (train_with_holes(off=1), "the means, until they stop"),
    "compares with the last": (train_with_holes(best_of="last"), "the means, until they stop"),
    "a step without a mean counts": (train_with_holes(counts_empty=True), "the means, until they stop"),
    "divides by the ranks": (train_with_holes(divide="size"), "the means, until they stop"),
    "divides by three": (train_with_holes(divide="three"), "the means, until they stop"),
    "divides by those that had a step": (train_with_holes(divide="going"), "the means, until they stop"),
    "NaN in the sum": (train_with_holes(divide="with nan"), "the means, until they stop"),
    "doesn't wait": (train_with_holes(waits=False), "every rank returns|the means, until they stop"),
    "one step more": (train_with_holes(more=True), "a step in vain"),
    "a step ahead": (train_with_holes(ahead=True), "a step in vain"),
    "all steps first": (train_lists, "a step in vain"),
    "in float32": (train_with_holes(dtype=torch.float32), "added in float64"),
    "three collectives a step": (train_with_holes(flags=3), "one collective a step"),
    "a barrier at the end": (with_barrier(train_with_holes()), "one collective a step"),
    "messages": (train_by_messages, "one collective a step"),
    "objects": (train_by_objects, "one collective a step[\\s\\S]*its size,\\s+then its bytes"),
}


def train_reports_another(steps, patience, group=None):
    """Decides by the right means, and returns those over the ranks that had a step."""
    said, means, best, bad = [], math.inf, math.inf, 0
    while bad < patience:
        loss = next(steps, None)
        good = loss is not None and math.isfinite(loss)
        row = torch.tensor([loss if good else 0.0, good, loss is not None], dtype=torch.float64)
        dist.all_reduce(row, group=group)
        summed, count, going = row.tolist()
        if not going:
            break
        if count:
            means = summed / count
            said.append(summed / going)
            bad = 0 if means < best else bad + 1
            best = min(best, means)
    return said


def train_judged(first=math.inf, lower=lambda mean, best: mean < best, good=math.isfinite, most=10**9, digits=99):
    """Decides by rules that are right for losses as one knows them."""

    def run(steps, patience, group=None):
        means, best, bad = [], first, 0
        while bad < patience and len(means) < most:
            loss = next(steps, None)
            fine = loss is not None and good(loss)
            row = torch.tensor([loss if fine else 0.0, fine, loss is not None], dtype=torch.float64)
            dist.all_reduce(row, group=group)
            summed, count, going = row.tolist()
            if not going:
                break
            if count:
                means.append(round(summed / count, digits))
                bad = 0 if lower(means[-1], best) else bad + 1
                best = means[-1] if lower(means[-1], best) else best
        return means

    return run


MEANS_ITEM = "the means, until they stop"
WRONG_TRAIN |= {
    "the best is at most 100": (train_judged(first=100.0), MEANS_ITEM),
    "lower by a hundredth": (train_judged(lower=lambda mean, best: mean < best - 0.01), MEANS_ITEM),
    "lower by little": (train_judged(lower=lambda mean, best: mean < best - 1e-5), MEANS_ITEM),
    "losses above zero": (train_judged(good=lambda loss: 0 <= loss < math.inf), MEANS_ITEM),
    "losses below 1e9": (train_judged(good=lambda loss: abs(loss) < 1e9), MEANS_ITEM),
    "absolute values": (train_judged(lower=lambda mean, best: abs(mean) < abs(best)), MEANS_ITEM),
    "at most 20 means": (train_judged(most=20), MEANS_ITEM),
    "rounds": (train_judged(digits=10), "added in float64"),
}
WRONG_TRAIN["reports the mean of those with a step"] = (train_reports_another, "the means, until they stop")

# ---------------------------------------------------------------- bucketed averaging


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


def average_by_avg(parameters, bucket_bytes, group=None):
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
        dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=group)
        for end, grad in zip(ends, bucket, strict=True):
            grad.data.copy_(flat[end - grad.numel() : end].view(grad.shape))
    return len(buckets)


def average_functional(parameters, bucket_bytes, group=None):
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
        flat = functional.wait_tensor(functional.all_reduce(flat, "sum", group or dist.group.WORLD))
        flat = flat / dist.get_world_size(group)
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
    reduce=lambda flat, group: dist.all_reduce(flat, group=group),
    count=len,
):
    """Bucketed averaging with chosen faults."""

    def run(parameters, limit, group=None):
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
            reduce(flat, group)
            flat /= dist.get_world_size(group) if divide else 1
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                if rebind:
                    p.grad = piece.view_as(p).clone()
                else:
                    p.grad.copy_(piece.view_as(p.grad))
        for p in nothing if fill else ():
            p.grad = torch.zeros_like(p)
        return count(buckets)

    return run


def gather_and_sum(flat, group):
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, flat, group=group)
    flat.copy_(sum(parts))


def reduce_and_broadcast(flat, group):
    dist.reduce(flat, group=group, group_dst=0)
    dist.broadcast(flat, group=group, group_src=0)


def reduce_as_float(flat, group):
    copy = flat.float()
    dist.all_reduce(copy, group=group)
    flat.copy_(copy)


def reduce_rounded(flat, group):
    """The bytes of float64, the digits of float32."""
    flat.copy_(flat.float())
    dist.all_reduce(flat, group=group)


def reduce_half_as_bfloat16(flat, group):
    if flat.dtype == torch.float16:
        flat.copy_(flat.bfloat16())
    dist.all_reduce(flat, group=group)


def reduce_in_the_world(flat, group):
    dist.all_reduce(flat)


def no_wait(flat, group):
    PENDING.append(dist.all_reduce(flat, group=group, async_op=True))


def in_memory_order(grad):
    return grad.as_strided((grad.numel(),), (1,))


def average_without_frozen(parameters, limit, group=None):
    return average()([p for p in parameters if p.requires_grad], limit, group)


def average_into_copies(parameters, limit, group=None):
    """Writes into what reshape returns, which is a copy for some layouts."""
    parameters = [p for p in parameters if p.grad is not None]
    copies = [torch.nn.Parameter(p.detach().reshape(-1), requires_grad=False) for p in parameters]
    for copy, p in zip(copies, parameters, strict=True):
        copy.grad = p.grad.reshape(-1)
    return average()(copies, limit, group)


def average_by_the_worlds_size(parameters, limit, group=None):
    parameters = list(parameters)
    count = average(divide=False)(parameters, limit, group)
    for p in parameters:
        if p.grad is not None:
            p.grad /= dist.get_world_size()
    return count


def average_into_new_memory(parameters, limit, group=None):
    parameters = [p for p in parameters if p.grad is not None]
    places = [p.grad.clone() for p in parameters]
    for p, grad in zip(parameters, places, strict=True):
        p.grad.data = grad
    return average()(parameters, limit, group)


WRONG_AVERAGE = {
    "flattens with view": (average(flatten=lambda grad: grad.view(-1)), "every rank returns"),
    "the sum": (average(divide=False), "is the mean over the ranks"),
    "forgets the last bucket": (average(drop_last=True), "is the mean over the ranks"),
    "goes through the iterator twice": (average(twice=True), "is the mean over the ranks"),
    "packs as it lies in memory": (average(flatten=in_memory_order), "is the mean over the ranks"),
    "rounds to float32": (average(reduce=reduce_rounded), "is the mean over the ranks[\\s\\S]*torch.float64"),
    "sends float32": (average(reduce=reduce_as_float), "is the mean over the ranks[\\s\\S]*torch.float64"),
    "doesn't wait": (average(reduce=no_wait), "is the mean over the ranks"),
    "float16 through bfloat16": (average(reduce=reduce_half_as_bfloat16), "is the mean over the ranks"),
    "forgets the group": (average(reduce=reduce_in_the_world), "every rank returns"),
    "divides by the world's size": (average_by_the_worlds_size, "is the mean over the ranks"),
    "leaves frozen parameters out": (average_without_frozen, "is the mean over the ranks"),
    "into copies": (average_into_copies, "is the mean over the ranks[\\s\\S]*into a\\s+copy"),
    "zeros for None": (average(fill=True), "None stays None"),
    "new memory for p.grad": (average_into_new_memory, "p.grad is the tensor it was"),
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

# ---------------------------------------------------------------- the cut


def ring_seconds(size, ranks, alpha, beta):
    return 2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * size / beta


def schedule(cuts, ready, sizes, *link):
    """(count, start, end) of buckets that end before the gradients `cuts`."""
    found, free = [], 0.0
    for a, b in pairwise([0, *cuts, len(sizes)]):
        start = max([free, *ready[a:b]])
        free = start + ring_seconds(sum(sizes[a:b]), *link)
        found.append((b - a, start, free))
    return found


def cut_recursively(ready, sizes, ranks, alpha, beta):
    """From the front, by a memo over the last bucket's first gradient."""

    @cache
    def best(stop):
        if stop == 0:
            return ()
        options = []
        for first in range(stop):
            before = best(first)
            start = max(max(ready[first:stop]), before[-1][2] if before else 0.0)
            end = start + ring_seconds(sum(sizes[first:stop]), ranks, alpha, beta)
            options.append((*before, (stop - first, start, end)))
        return min(options, key=lambda plan: plan[-1][-1])

    return list(best(len(sizes)))


def cut_with_running_sums(ready, sizes, ranks, alpha, beta):
    """Two tables and a walk back."""
    n, total = len(sizes), [0, *accumulate(sizes)]
    ends, come_from = [0.0] + [math.inf] * n, [0] * (n + 1)
    starts = [0.0] * (n + 1)
    for i in range(n):
        latest = ends[i]
        for j in range(i + 1, n + 1):
            latest = max(latest, ready[j - 1])
            end = latest + 2 * (ranks - 1) * (alpha + (total[j] - total[i]) / (ranks * beta))
            if end <= ends[j]:
                ends[j], starts[j], come_from[j] = end, latest, i
    plan, j = [], n
    while j:
        plan.insert(0, (j - come_from[j], starts[j], ends[j]))
        j = come_from[j]
    return plan


def cut_by_states(ready, sizes, ranks, alpha, beta):
    """Forward over the gradients: states are (end of the closed buckets, plan, gradients in the open one)."""
    states = {0: (0.0, [])}
    for stop in range(1, len(sizes) + 1):
        options = []
        for first, (free, plan) in states.items():
            start = max([free, *ready[first:stop]])
            end = start + ring_seconds(sum(sizes[first:stop]), ranks, alpha, beta)
            options.append((end, [*plan, (stop - first, start, end)]))
        states[stop] = min(options, key=lambda option: option[0])
    return states[len(sizes)][1]


def cut_all(ready, sizes, *link):
    """Every cut: right, and too slow."""
    if not sizes:
        return []
    n, best = len(sizes), None
    for count in range(n):
        for cuts in combinations(range(1, n), count):
            plan = schedule(cuts, ready, sizes, *link)
            best = plan if best is None or plan[-1][2] < best[-1][2] else best
    return best


def cut_once(ready, sizes, *link):
    return schedule([], ready, sizes, *link) if sizes else []


def cut_each(ready, sizes, *link):
    return schedule(range(1, len(sizes)), ready, sizes, *link) if sizes else []


def cut_greedy(ready, sizes, *link):
    """Opens a bucket whenever the links are free before the next gradient comes."""
    cuts, free, first = [], 0.0, 0
    for k in range(1, len(sizes)):
        end = max([free, *ready[first:k]]) + ring_seconds(sum(sizes[first:k]), *link)
        if end <= ready[k]:
            cuts, free, first = [*cuts, k], end, k
    return schedule(cuts, ready, sizes, *link) if sizes else []


def cut_with(change):
    """The best by other rules."""

    def cut(ready, sizes, ranks, alpha, beta):
        plans = [[]]
        for j in range(1, len(sizes) + 1):
            options = []
            for i in range(j):
                free = plans[i][-1][2] if plans[i] else 0.0
                latest = ready[j - 1] if change == "the last is the latest" else max(ready[i:j])
                start = latest if change == "all at once" else max(free, latest)
                cost = ring_seconds(sum(sizes[i:j]), ranks, alpha, beta)
                if change == "no latency":
                    cost = ring_seconds(sum(sizes[i:j]), ranks, 0.0, beta)
                if change == "no factor 2":
                    cost /= 2
                if change == "whole tensor":
                    cost = 2 * (ranks - 1) * (alpha + sum(sizes[i:j]) / beta)
                options.append([*plans[i], (j - i, start, start + cost)])
            plans.append(min(options, key=lambda plan: plan[-1][2]))
        return plans[-1]

    return cut


def cut_and(do):
    return lambda *given: do(cut_by_states(*given))


def cut_sorted(ready, sizes, *link):
    order = sorted(range(len(ready)), key=ready.__getitem__)
    return cut_by_states([ready[k] for k in order], [sizes[k] for k in order], *link)


def cut_from_ready(ready, sizes, *link):
    """The right cut and ends; as start the moment when the gradients are complete, though the links are not free."""
    said, first = [], 0
    for count, _, end in cut_by_states(ready, sizes, *link):
        said.append((count, max(ready[first : first + count]), end))
        first += count
    return said


def cut_into_few(most):
    """The best of at most so many buckets."""

    def cut(ready, sizes, *link):
        plans = {0: []}
        for _ in range(most):
            longer = dict(plans)
            for i, before in plans.items():
                for j in range(i + 1, len(sizes) + 1):
                    start = max(before[-1][2] if before else 0.0, *ready[i:j])
                    plan = [*before, (j - i, start, start + ring_seconds(sum(sizes[i:j]), *link))]
                    if j not in longer or plan[-1][2] < longer[j][-1][2]:
                        longer[j] = plan
            plans = longer
        return plans[len(sizes)]

    return cut


def cut_uphill(ready, sizes, *link):
    """Starts with each alone; merges two neighbours while that helps."""
    if not sizes:
        return []
    cuts = list(range(1, len(sizes)))
    while True:
        now = schedule(cuts, ready, sizes, *link)
        tries = [schedule(cuts[:k] + cuts[k + 1 :], ready, sizes, *link) for k in range(len(cuts))]
        best = min(range(len(tries)), key=lambda k: tries[k][-1][2], default=None)
        if best is None or tries[best][-1][2] >= now[-1][2]:
            return now
        del cuts[best]


WRONG_CUT = {
    "pairs": (cut_and(lambda plan: [(start, end) for _, start, end in plan]), "a list of \\(gradients"),
    "lists": (cut_and(lambda plan: [list(entry) for entry in plan]), "a list of \\(gradients"),
    "forgets the last bucket": (cut_and(lambda plan: plan[:-1]), "every gradient is in one bucket"),
    "an empty bucket first": (cut_and(lambda plan: [(0, 0.0, 0.0), *plan]), "every gradient is in one bucket"),
    "all but no gradient": (
        lambda ready, *rest: cut_by_states(ready, *rest) if ready else None,
        "every gradient is in one bucket[\\s\\S]*no gradient",
    ),
    "the last gradient is the latest": (cut_with("the last is the latest"), "as the model says"),
    "doesn't wait for the bucket before": (cut_with("all at once"), "as the model says"),
    "no latency": (cut_with("no latency"), "as the model says"),
    "a reduce-scatter only": (cut_with("no factor 2"), "as the model says"),
    "whole tensors in each step": (cut_with("whole tensor"), "as the model says"),
    "sorts the gradients": (cut_sorted, "as the model says"),
    "starts when its gradients are there": (cut_from_ready, "as the model says"),
    "in milliseconds": (cut_and(lambda plan: [(n, 1e3 * a, 1e3 * b) for n, a, b in plan]), "as the model says"),
    "one bucket": (cut_once, "as early as it can"),
    "each gradient alone": (cut_each, "as early as it can"),
    "as soon as the links are free": (cut_greedy, "as early as it can"),
    "four buckets at most": (cut_into_few(4), "as early as it can"),
    "eight buckets at most": (cut_into_few(8), "as early as it can"),
    "merges while it helps": (cut_uphill, "as early as it can"),
    "every cut": (cut_all, "less than a second"),
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
    "ring_shift": [
        shift_without_batch,
        shift_between_world_ranks,
        shift_by_thread,
        shift_cycle_by_cycle,
        ShiftOfBytes(),
    ],
    "tree_broadcast": [tree_by_halving, tree_by_ranges, tree_all_at_once, tree_by_schedule],
    "two_way_ring": [
        two_ways_by_single_calls,
        two_ways_padded,
        TwoWays(),
        two_ways(),
        two_ways_by_threads,
        two_ways_by_halves_of_chunks,
    ],
    "train_until": [train_gathered, Trainer(), train_with_holes()],
    "average_gradients": [average_async, average_by_avg, average_functional],
    "cut_buckets": [cut_recursively, cut_with_running_sums, cut_by_states],
}
MAY_HANG = {answer for wrong in WRONG.values() for answer, says in wrong.values() if says.startswith(RETURNS)}


class TestChecks(CheckProtocol):
    TOPIC = "15-08"
    IDLE = IDLE
    CHECKS, ANSWERS, STUBS, RIGHT, WRONG = CHECKS, ANSWERS, STUBS, RIGHT, WRONG

    def hold_stand_in(self, name, stand_in):
        if name == "tree_broadcast":

            def broadcast():
                x = torch.tensor(dist.get_rank())
                return stand_in(x, 1), int(x)

            assert launch(broadcast, 3, backend="gloo") == [(0, 1)] * 3
        if name == "cut_buckets":
            assert stand_in([0.5, 0.2], [100, 300], 2, 0.1, 1000.0) == [(2, 0.5, pytest.approx(1.1))]


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


def not_for_one_rank(tensor, group=None):
    if dist.get_world_size(group) == 1:
        raise NotImplementedError
    two_ways()(tensor, group)


@pytest.mark.parametrize(("exercise", "answer"), [("ring_shift", half_done), ("two_way_ring", not_for_one_rank)])
def test_an_answer_with_a_part_missing_was_attempted(exercise, answer):
    result = CHECKS[exercise].run(answer)
    assert result.status == "failed"
    assert "NotImplementedError" in str(result)


def all_kinds_of_calls():
    world, x = dist.group.WORLD, torch.ones(4)
    with recorded() as calls:
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
        assert "recorded" not in method  # put back


def meets_nobody(x):
    dist.send(x, 1) if dist.get_rank() == 0 else dist.send(x, 0)


def test_what_was_sent_is_known_of_a_run_that_hangs_too():
    calls, failure = observe(meets_nobody, 2, torch.ones(3), timeout=1)
    assert calls == [[Call("send", (0, 1), 12, 1)], [Call("send", (0, 1), 12, 0)]]
    assert "all wait" in failure
    assert observe(dist.barrier, 2) == ([[Call("barrier", (0, 1), 0)]] * 2, "")


def test_rounds_of_a_broadcast():
    def sends(*peers):
        return [Call("send", (0, 1, 2, 3), 4, peer) for peer in peers]

    tree = [sends(3), [], sends(0, 1), []]
    assert sorted(rounds(tree, root=2)) == [(0, 2, 0), (1, 0, 3), (1, 2, 1)]
    assert rounds([sends(1), [], [], sends(2)], root=0) == [(0, 0, 1), (-1, 3, 2)]  # rank 3 has nothing to send
    assert rounds([[]], root=0) == []


@pytest.mark.parametrize("seed", range(20))
def test_two_ways_to_the_best_cut_agree(seed):
    rng = random.Random(seed)
    n = rng.randrange(1, 9)
    ready = tuple(rng.uniform(0, 0.02) for _ in range(n))
    case = check._Backward(ready, tuple(rng.randrange(1, 10**6) for _ in range(n)), 4, 10 ** rng.uniform(-5, -3), 1e9)
    assert check._earliest_of_many(case) == pytest.approx(case.earliest(), rel=1e-9)
