"""The checks of 15-07 accept right answers, however written, and reject what a student might really write."""

import itertools
import math
import re
from collections import OrderedDict, deque
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch
from check_protocol import CheckProtocol

from course.answers import answers
from course.exercises import student_source
from shared.checks import topic_15_07 as check

KIB, MIB, GIB = 2**10, 2**20, 2**30


class Op(NamedTuple):
    """The notebook defines it beside the simulator; the answer cell only uses it."""

    name: str
    engine: str
    stream: str
    seconds: float
    after: tuple[str, ...] = ()


# ---------------------------------------------------------------- rounding and pool choice


def plan_by_modulo(size, divisions=1):
    """The power of two by shifting, rounding by modulo."""
    unit = 512
    if divisions > 1 and size > 512 * divisions:
        power = 1
        while power << 1 <= size:
            power <<= 1
        unit = power // divisions
    block = size + (-size) % unit
    small = block <= MIB
    segment = 2 * MIB if small else (20 * MIB if block < 10 * MIB else block + (-block) % (2 * MIB))
    return block, ("small" if small else "large"), segment


class Plan(NamedTuple):
    block: int
    pool: str
    segment: int


def plan_by_bits(size, divisions=1):
    """Masks and a table of limits; a named tuple of NumPy's integers."""
    power = 1 << (size.bit_length() - 1)
    shift = max(9, (power // divisions).bit_length() - 1) if divisions > 1 and size > divisions << 9 else 9
    block = ((size - 1) >> shift) + 1 << shift
    table = [
        (MIB, "small", 2 * MIB),
        (10 * MIB - 1, "large", 20 * MIB),
        (math.inf, "large", (block + 2 * MIB - 1) & -(2 * MIB)),
    ]
    _, pool, segment = next(row for row in table if block <= row[0])
    return Plan(np.int64(block), pool, np.int64(segment))


def plan(
    step=512, limit=MIB, below=10 * MIB, by_request=False, round_large=2 * MIB, least=512, one=1, up=0, small=2 * MIB
):
    """A plan with chosen faults."""

    def answer(size, divisions=1):
        unit = step
        if divisions > one and size > least * divisions:
            unit = max(1, (1 << (size.bit_length() - 1 + up)) // divisions)
        block = math.ceil(size / unit) * unit
        if block <= limit:
            return block, "small", small
        if (size if by_request else block) < below:
            return block, "large", 20 * MIB
        return block, "large", math.ceil(block / round_large) * round_large

    return answer


def spoilt(answer, edit):
    """A right answer, and what `edit` makes of it and of its arguments."""
    return lambda *arguments: edit(answer(*arguments), *arguments)


WRONG_PLAN = {
    "256 bytes": (plan(step=256), "the block: a multiple"),
    "one step too many": (
        lambda size, d=1: (size // 512 * 512 + 512, *plan_by_modulo(size, d)[1:]),
        "512 at|the block: a",
    ),
    "powers of two without divisions": (plan(one=0), "the block: a multiple"),
    "two divisions by default": (lambda size, d=2: plan_by_modulo(size, d), "the block: a multiple"),
    "floats": (spoilt(plan_by_modulo, lambda got, *_: (float(got[0]), *got[1:])), "a float"),
    "a list": (spoilt(plan_by_modulo, lambda got, *_: list(got)), "expected: *a tuple"),
    "divisions for small requests": (plan(least=64), "not large enough"),
    "no divisions": (lambda size, divisions=1: plan_by_modulo(size), "the block, with divisions"),
    "the next power of two": (plan(up=1), "the block, with divisions"),
    "a large MiB": (plan(limit=MIB - 1), 'the pool: "small"'),
    "pools in capitals": (
        spoilt(plan_by_modulo, lambda got, *_: (got[0], got[1].upper(), got[2])),
        "expected: 'small'",
    ),
    "one small MiB": (plan(small=MIB), "of the small pool"),
    "a block as segment": (
        spoilt(plan_by_modulo, lambda got, *_: got if not MIB < got[0] < 10 * MIB else (*got[:2], got[0])),
        "below 10 MiB",
    ),
    "20 MiB for 10": (plan(below=10 * MIB + 1), "a request from 10 MiB on"),
    "segments not rounded": (plan(round_large=512), "a request from 10 MiB on"),
    "float segments": (
        spoilt(plan_by_modulo, lambda got, *_: got if got[0] < 10 * MIB else (*got[:2], got[2] / 1)),
        "a float",
    ),
    "segment by request": (plan(by_request=True), "follow from the rounded size"),
}

# ---------------------------------------------------------------- best fit


def fit_in_one_pass(free, size, stream, small, max_split_size=math.inf):
    """One pass, keeping the best so far."""
    best = None
    for block in free:
        if block[0] == stream and block[1] >= size and (best is None or block[1:] < best[1:]):
            best = block
    if best is None:
        return None
    oversize = size >= max_split_size
    if (not oversize and best[1] >= max_split_size) or (oversize and best[1] - size >= 20 * MIB):
        return None
    rest = best[1] - size
    if (small and rest < 512) or (not small and (rest <= MIB or oversize)):
        return best, None
    return (stream, size, best[2]), (stream, rest, best[2] + size)


class Free(NamedTuple):
    stream: int
    size: int
    address: int


def fit_by_filters(free, size, stream, small, max_split_size=math.inf):
    """Filter by every rule first, then sort; named tuples."""
    most = max_split_size - 1 if size < max_split_size else size + 20 * MIB - 1
    blocks = sorted((Free(*block) for block in free), key=lambda block: (block.size, block.address))
    for block in filter(lambda block: block.stream == stream and size <= block.size <= most, blocks):
        least = 512 if small else math.inf if size >= max_split_size else MIB + 1
        if block.size - size < least:
            return block, None
        return block._replace(size=size), block._replace(size=block.size - size, address=block.address + size)
    return None


def fit(choose=min, small_rest=512, large_rest=MIB + 1, keep=True, oversize=0, beyond=20 * MIB, whole=True, move=1):
    """Best fit with chosen faults."""

    def answer(free, size, stream, small, max_split_size=math.inf):
        found = [b for b in free if b[0] == stream and b[1] >= size]
        if not found:
            return None
        block = choose(found)
        left = block[1] - size
        if size < max_split_size <= block[1] - oversize or (size >= max_split_size and left >= beyond):
            return None
        if left < (small_rest if small else large_rest) or (whole and not small and size >= max_split_size):
            return (stream, block[1] if keep else size, block[2]), None
        return (stream, size, block[2]), (stream, left, block[2] + size * move)

    return answer


def largest_that_may_be_had(free, size, stream, small, max_split_size=math.inf):
    """Worst fit among the blocks that the limit allows."""
    most = max_split_size if size < max_split_size else size + 20 * MIB
    fits = [b for b in free if b[0] == stream and size <= b[1] < most]
    return (
        fit_in_one_pass([max(fits, key=lambda b: (b[1], -b[2]))], size, stream, small, max_split_size) if fits else None
    )


def no_limits_with_one(free, size, stream, small, max_split_size=math.inf):
    """Refuses every block as soon as one block is oversize."""
    if size < max_split_size and any(b[1] >= max_split_size for b in free):
        return None
    return fit_in_one_pass(free, size, stream, small, max_split_size)


def popping(free, *others):
    found = fit_in_one_pass(free, *others)
    if free:
        free.pop()
    return found


def sorting(free, *others):
    free.sort()
    return fit_in_one_pass(free, *others)


def handed_out_once():
    """Remembers what it has handed out, although `free` still lists it."""
    gone = set()

    def answer(free, *others):
        found = fit_in_one_pass([block for block in free if block not in gone], *others)
        gone.update(block for block in free if found and block[2] == found[0][2])
        return found

    return answer


def memory(make):
    """An answer that keeps something between calls, without what it kept from another check."""

    def answer(*arguments):
        if arguments == ([], 512, 0, True):  # the check's first case
            answer.own = make()
        return answer.own(*arguments)

    return answer


def best_of_all_streams(free, size, stream, small, max_split_size=math.inf):
    return fit_in_one_pass([(stream, *block[1:]) for block in free], size, stream, small, max_split_size)


WRONG_FIT = {
    "an error for an empty list": (
        lambda free, *others: fit_in_one_pass(free, *others) if free[0] else None,
        "IndexError",
    ),
    "the largest of all if none fits": (
        lambda free, *others: fit_in_one_pass(free, *others) or (free and (max(free), None)) or None,
        "None if no block",
    ),
    "any stream": (best_of_all_streams, "the stream's own"),
    "first fit": (fit(choose=lambda blocks: blocks[0]), "smallest that is large enough|lowest"),
    "worst fit": (fit(choose=lambda blocks: max(blocks, key=lambda b: (b[1], -b[2]))), "the smallest that"),
    "worst fit within limits": (largest_that_may_be_had, "the smallest that"),
    "lowest address first": (fit(choose=lambda blocks: min(blocks, key=lambda b: b[2])), "the smallest that"),
    "the last of equals": (fit(choose=lambda blocks: min(blocks, key=lambda b: (b[1], -b[2]))), "lowest address"),
    "the first of equals": (fit(choose=lambda blocks: min(blocks, key=lambda b: b[1])), "lowest address"),
    "an empty rest": (fit(small_rest=0), "an exact fit"),
    "more than 512": (fit(small_rest=513), "small pool"),
    "never split": (fit(small_rest=math.inf, large_rest=math.inf), "what is split off"),
    "1 MiB is split off": (fit(large_rest=MIB), "large pool: what stays"),
    "cut and lost": (fit(keep=False), "large pool: what stays"),
    "2 MiB before a split": (fit(large_rest=2 * MIB + 1), "large pool: what is split off"),
    "the rest at the start": (fit(move=0), "what is split off"),
    "two lists": (lambda *a: (found := fit_in_one_pass(*a)) and [*found], "a tuple"),
    "floats": (
        lambda *a: (found := fit_in_one_pass(*a)) and ((found[0][0], found[0][1] / 1, found[0][2]), found[1]),
        "a float",
    ),
    "oversize from one byte above": (fit(oversize=1), "which blocks it may not have"),
    "oversize for all": (
        lambda free, size, stream, small, max_split_size=0: fit()(free, size, stream, small),
        "may not have",
    ),
    "nothing with an oversize block about": (no_limits_with_one, "all else as ever"),
    "never split with a limit": (
        lambda free, size, stream, small, limit=math.inf: fit(
            *[min, *[math.inf if limit < math.inf else n for n in (512, MIB + 1)]]
        )(free, size, stream, small, limit),
        "all else as ever",
    ),
    "oversize requests are split": (fit(whole=False), "its block stays whole"),
    "20 MiB larger is fine": (fit(beyond=20 * MIB + 1), "a request ≥ max_split_size: which"),
    "any size for oversize requests": (fit(beyond=math.inf), "a request ≥ max_split_size: which"),
    "pops": (popping, "free stays as it is"),
    "sorts in place": (sorting, "free stays as it is"),
    "handed out once": (memory(handed_out_once), "free stays as it is"),
    "the block alone": (
        lambda *a: found[0] if (found := fit_in_one_pass(*a)) and not found[1] else found,
        "compare the form",
    ),
}

# ---------------------------------------------------------------- coalescing


def give_back_by_index(blocks, address):
    """Find the index, look left and right."""
    index = next((i for i, b in enumerate(blocks) if b[0] == address and b[2] == "used"), None)
    if index is None:
        raise ValueError(address)
    low = index - (index > 0 and blocks[index - 1][2] == "free")
    high = index + (index + 1 < len(blocks) and blocks[index + 1][2] == "free")
    joined = (blocks[low][0], sum(b[1] for b in blocks[low : high + 1]), "free")
    return [*blocks[:low], joined, *blocks[high + 1 :]]


def give_back_by_edges(blocks, address):
    """Start from the used blocks alone: what lies between them is free. A subclass of ValueError."""

    class DoubleFree(ValueError):
        pass

    kept = [block for block in blocks if block[2] == "used" and block[0] != address]
    if len(kept) + 1 != sum(block[2] == "used" for block in blocks):
        raise DoubleFree
    result, at = [], blocks[0][0]
    for start, size, state in [*kept, (sum(blocks[-1][:2]), 0, "end")]:
        if at < start:
            result.append(Piece(at, start - at, "free"))
        result.append(Piece(start, size, state))
        at = start + size
    return result[:-1]


class Piece(NamedTuple):
    address: int
    size: int
    state: str


def coalesce(left=True, right=True, both=None, alone=True, size=True, start=True, strict=True, pair=tuple):
    """Coalescing with chosen faults."""

    def answer(blocks, address):
        index = next((i for i, b in enumerate(blocks) if b[0] == address and (b[2] == "used" or not strict)), None)
        if index is None:
            raise ValueError(address)
        work = list(blocks)
        sides = [index > 0 and work[index - 1][2] == "free", index + 1 < len(work) and work[index + 1][2] == "free"]
        sides = (both or sides) if all(sides) else [sides[0] and left, sides[1] and right]
        if not any(sides) and not alone:
            return work
        low, high = index - sides[0], index + sides[1]
        at = work[low if start else index][0]
        length = sum(b[1] for b in work[low : high + 1]) if size else work[index][1]
        work[low : high + 1] = [pair((at, length, "free"))]
        return work

    return answer


def compacting(blocks, address):
    """Moves all free bytes to the end."""
    result = give_back_by_index(blocks, address)
    used = [b for b in result if b[2] == "used"]
    at, out = blocks[0][0], []
    for _, size, _ in used:
        out.append((at, size, "used"))
        at += size
    return [*out, (at, sum(b[1] for b in result if b[2] == "free"), "free")]


def round_the_corner(blocks, address):
    """blocks[i - 1] of the first block is the last one."""
    index = next((i for i, b in enumerate(blocks) if b[0] == address and b[2] == "used"), None)
    if index == 0 and len(blocks) > 1 and blocks[-1][2] == "free":
        return give_back_by_index([blocks[-1], *blocks[:-1]], address)
    return give_back_by_index(blocks, address)


def in_place(blocks, address):
    blocks[:] = give_back_by_index(blocks, address)
    return blocks


def index_error(blocks, address):
    index = [b[0] for b in blocks].index(address)
    _ = blocks[index + 1]
    return give_back_by_index(blocks, address)


def any_block_with_bytes_there(blocks, address):
    """Frees the used block that the address lies in."""
    for start, size, state in blocks:
        if state == "used" and start <= address < start + size:
            return give_back_by_index(blocks, start)
    raise ValueError(address)


def between_the_used(blocks, address):
    """Looks for the address between the first used block and the last one."""
    used = [block for block in blocks if block[2] == "used"]
    if not used[0][0] <= address <= used[-1][0]:
        raise ValueError(address)
    return give_back_by_index(blocks, address)


def rounded_down(blocks, address):
    """Frees the block that an aligned address lies in."""
    return (any_block_with_bytes_there if address % 512 == 0 else give_back_by_index)(blocks, address)


def key_error(blocks, address):
    try:
        return give_back_by_index(blocks, address)
    except ValueError:
        raise KeyError(address) from None


WRONG_COALESCE = {
    "free only where it joins": (coalesce(alone=False), "no free neighbour"),
    "an error for the last block": (index_error, "IndexError"),
    "the last block is left of the first": (round_the_corner, "no free neighbour|a free block on the right"),
    "lists": (coalesce(pair=list), "a tuple"),
    "compaction": (compacting, "no free neighbour"),
    "never left": (coalesce(left=False, both=[False, True]), "on the left"),
    "left only with right": (coalesce(left=False), "on the left"),
    "sizes not added": (coalesce(size=False), "on the left"),
    "the old address": (coalesce(start=False), "on the left"),
    "float sizes": (spoilt(give_back_by_index, lambda got, *_: [(a, s / 1, t) for a, s, t in got]), "a float"),
    "never right": (coalesce(right=False, both=[True, False]), "on the right"),
    "right only with left": (coalesce(right=False), "on the right"),
    "left else right": (coalesce(both=[True, False]), "on both sides"),
    "right else left": (coalesce(both=[False, True]), "on both sides"),
    "in place": (in_place, "the argument stays as it is"),
    "a double free passes": (coalesce(strict=False), "ValueError if"),
    "an address inside will do": (any_block_with_bytes_there, "ValueError if"),
    "nothing happens": (
        lambda blocks, address: (
            give_back_by_index(blocks, address) if (address in {b[0] for b in blocks if b[2] == "used"}) else blocks
        ),
        "got: *'no exception'",
    ),
    "a KeyError": (key_error, "got: *KeyError"),
    "an IndexError without used blocks": (between_the_used, "got: *IndexError"),
    "an aligned address inside will do": (rounded_down, "ValueError if"),
}

# ---------------------------------------------------------------- post-mortem


def post_mortem_in_order(message, segments):
    """The numbers by their units, in their order; loops."""
    scale = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
    words = message.replace(". ", " ").split()
    sizes = [float(a) * scale[b] for a, b in itertools.pairwise(words) if b in scale]
    requested, capacity, free, _, allocated, cached = sizes
    hole = 0
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] == "inactive" and block["size"] > hole:
                hole = block["size"]
    verdict = "held elsewhere"
    if requested + allocated > capacity:
        verdict = "does not fit"
    elif requested <= free + cached:
        verdict = "fragmented"
    return {
        "requested": requested,
        "capacity": capacity,
        "free": free,
        "allocated": allocated,
        "cached": cached,
        "largest_hole": hole,
        "verdict": verdict,
    }


def post_mortem_by_pattern(message, segments):
    """One regular expression; whole numbers, another kind of dictionary, an entry more."""
    number = r"([\d.]+) (bytes|[KMG]iB)"
    pattern = f"allocate {number}.*capacity of {number} of which {number}.*memory {number} is alloc.*and {number} is"
    read = re.search(pattern, message).groups()
    sizes = [
        round(float(read[i]) * 2 ** (10 * ["bytes", "KiB", "MiB", "GiB"].index(read[i + 1]))) for i in range(0, 10, 2)
    ]
    found = OrderedDict(zip(("requested", "capacity", "free", "allocated", "cached"), sizes, strict=True))
    blocks = itertools.chain.from_iterable(segment["blocks"] for segment in segments)
    found["largest_hole"] = reduce(max, (b["size"] for b in blocks if b["state"] == "inactive"), 0)
    fits = found["requested"] <= found["capacity"] - found["allocated"]
    there = found["requested"] - found["free"] <= found["cached"]
    found["verdict"] = ("fragmented" if there else "held elsewhere") if fits else "does not fit"
    found["note"] = "anything else"
    return found


def post_mortem(edit):
    """The right answer, spoilt by edit(found, message, segments)."""

    def answer(message, segments):
        found = post_mortem_in_order(message, segments)
        edit(found, message, segments)
        return found

    return answer


def in_units(key, before, scale):
    """Reads one field with these units; another unit is taken for bytes."""

    def edit(found, message, segments):
        number, unit = message.split(before)[1].split()[:2]
        found[key] = float(number) * scale.get(unit.rstrip("."), 1)

    return post_mortem(edit)


def decimal_units(found, message, segments):
    found["requested"] = found["requested"] / GIB * 1e9


def strings(found, message, segments):
    found["capacity"] = f"{found['capacity']}"


def in_use_for_allocated(found, message, segments):
    number, unit = message.split("this process has ")[1].split()[:2]
    found["allocated"] = float(number) * {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}[unit]


def swapped(found, message, segments):
    found["allocated"], found["cached"] = found["cached"], found["allocated"]


def without(key):
    return post_mortem(lambda found, message, segments: found.pop(key))


def holes(pick, states=("inactive",)):
    """largest_hole as pick(sizes of each segment)."""

    def edit(found, message, segments):
        sizes = [[b["size"] for b in s["blocks"] if b["state"] in states] for s in segments]
        found["largest_hole"] = pick(sizes) if any(sizes) else 0

    return post_mortem(edit)


def requested_hole(found, message, segments):
    blocks = (b for s in segments for b in s["blocks"] if b["state"] == "inactive")
    found["largest_hole"] = max((b["requested_size"] for b in blocks), default=0)


def large_pool_hole(found, message, segments):
    blocks = (b for s in segments if s["segment_type"] == "large" for b in s["blocks"] if b["state"] == "inactive")
    found["largest_hole"] = max((b["size"] for b in blocks), default=0)


def first_streams_hole(found, message, segments):
    blocks = (b for s in segments if s["stream"] == 0 for b in s["blocks"] if b["state"] == "inactive")
    found["largest_hole"] = max((b["size"] for b in blocks), default=0)


def one_digit(found, message, segments):
    found["requested"] = found["requested"] if re.search(r"GPU \d has", message) else 0.0


def by_the_hole(found, message, segments):
    """Fragmented only if no hole is large enough, which the task doesn't say."""
    if found["verdict"] == "fragmented" and found["largest_hole"] >= found["requested"]:
        found["verdict"] = "held elsewhere"


def fits_a_hole(found, message, segments):
    if found["largest_hole"] >= found["requested"]:
        found["verdict"] = "fragmented"


def no_default(found, message, segments):
    found["largest_hole"] = max(b["size"] for s in segments for b in s["blocks"] if b["state"] == "inactive")


def verdict(choose):
    """The verdict as choose(requested, capacity, free, allocated, cached, the right one)."""

    def edit(found, message, segments):
        numbers = (found[key] for key in ("requested", "capacity", "free", "allocated", "cached"))
        found["verdict"] = choose(*numbers, found["verdict"])

    return post_mortem(edit)


MIB_AND_GIB = {"MiB": MIB, "GiB": GIB}
WRONG_POST_MORTEM = {
    "decimal units": (post_mortem(decimal_units), "requested, in bytes"),
    "requested has no KiB": (in_units("requested", "allocate ", MIB_AND_GIB), "requested, in bytes"),
    "no entry requested": (without("requested"), "no entry 'requested'"),
    "None": (lambda message, segments: None, "no entry"),
    "strings": (post_mortem(strings), "capacity, in bytes"),
    "capacity has no KiB": (in_units("capacity", "capacity of ", MIB_AND_GIB), "capacity, in bytes"),
    "GPU 0 alone": (
        lambda message, segments: (
            post_mortem_in_order(message, segments) | {"capacity": float("GPU 0 has" in message) * 2}
        ),
        "capacity, in bytes",
    ),
    "free without unit": (in_units("free", "of which ", {}), "free, in bytes"),
    "free has no KiB": (in_units("free", "of which ", MIB_AND_GIB), "free, in bytes"),
    "in use for allocated": (post_mortem(in_use_for_allocated), "allocated, in bytes"),
    "allocated has no KiB": (in_units("allocated", "allocated memory ", MIB_AND_GIB), "allocated, in bytes"),
    "swapped": (post_mortem(swapped), "allocated, in bytes"),
    "no entry cached": (without("cached"), "no entry 'cached'"),
    "cached has no KiB": (in_units("cached", "PyTorch, and ", MIB_AND_GIB), "cached, in bytes"),
    "the sum of the holes": (holes(lambda sizes: sum(map(sum, sizes))), "largest_hole, with"),
    "the first segment's": (holes(lambda sizes: max(sizes[0], default=0)), "largest_hole, with"),
    "the last hole": (holes(lambda sizes: [s for s in sizes if s][-1][-1]), "largest_hole, with"),
    "the largest segment's holes": (holes(lambda sizes: max(map(sum, sizes))), "largest_hole, with"),
    "pending is a hole": (
        holes(lambda sizes: max(map(max, sizes)), ("inactive", "active_pending_free")),
        "largest_hole",
    ),
    "what was requested of a hole": (post_mortem(requested_hole), "largest_hole, with blocks"),
    "holes of the large pool": (post_mortem(large_pool_hole), "largest_hole, with blocks"),
    "holes of the first stream": (post_mortem(first_streams_hole), "largest_hole, with blocks"),
    "GPUs 0 to 9": (post_mortem(one_digit), "requested, in bytes"),
    "fragmented by the hole": (post_mortem(by_the_hole), "verdict 'fragmented'"),
    "a hole that would do": (post_mortem(fits_a_hole), "verdict 'does not fit'"),
    "no default": (post_mortem(no_default), "largest_hole, with no such block"),
    "one byte short of the capacity": (
        verdict(lambda r, c, f, a, k, right: "does not fit" if r + a >= c else right),
        "verdict '(fragmented|held elsewhere)'",
    ),
    "fragmented first": (
        verdict(lambda r, c, f, a, k, right: "fragmented" if f + k >= r else right),
        "verdict 'does not fit'",
    ),
    "too large": (
        verdict(lambda r, c, f, a, k, right: "too large" if right == "does not fit" else right),
        "verdict 'does not fit'",
    ),
    "strictly more": (
        verdict(lambda r, c, f, a, k, right: "held elsewhere" if right == "fragmented" and f + k <= r else right),
        "verdict 'fragmented'",
    ),
    "cached alone": (
        verdict(lambda r, c, f, a, k, right: "held elsewhere" if right == "fragmented" and k < r else right),
        "verdict 'fragmented'",
    ),
    "all that fits is fragmented": (
        verdict(lambda r, c, f, a, k, right: "fragmented" if right == "held elsewhere" else right),
        "verdict 'held elsewhere'",
    ),
}

# ---------------------------------------------------------------- fixed bytes


def fixed_bytes_by_loops(model, optimizer):
    """Loops, and sizes by dtype."""
    found = dict.fromkeys(("parameters", "buffers", "gradients", "optimizer"), 0)
    for p in model.parameters():
        size = (p.numel() * p.dtype.itemsize + 511) // 512 * 512
        found["parameters"] += size
        if p.requires_grad:
            found["gradients"] += size
            found["optimizer"] += size * ("sgd", "momentum", "adam").index(optimizer)
    for b in model.buffers():
        found["buffers"] += (b.numel() * b.element_size() + 511) // 512 * 512
    return found


def fixed_bytes_by_storages(model, optimizer):
    """Detached views, storages by identity, NumPy's ceil."""

    def blocks(tensors):
        sizes = {t.data_ptr() or id(t): t.detach().untyped_storage().nbytes() for t in tensors}
        return int(np.sum(np.ceil(np.array(list(sizes.values())) / 512)) * 512)

    modules = list(model.modules())
    parameters = [p for m in modules for p in m.parameters(recurse=False)]
    trained = blocks([p for p in parameters if p.requires_grad])
    return OrderedDict(
        optimizer={"sgd": 0, "momentum": trained, "adam": trained + trained}[optimizer],
        gradients=trained,
        buffers=blocks([b for m in modules for b in m.buffers(recurse=False)]),
        parameters=blocks(parameters),
    )


def fixed(each=True, itemsize=None, frozen=False, tied=False, states=(0, 1, 2), buffers=None):
    """Estimates with chosen faults."""

    def answer(model, optimizer):
        def total(tensors):
            sizes = [t.numel() * (itemsize or t.element_size()) for t in tensors]
            return sum(-(-s // 512) * 512 for s in sizes) if each else -(-sum(sizes) // 512) * 512

        parameters = list(model.named_parameters(remove_duplicate=not tied))
        trained = total([p for _, p in parameters if p.requires_grad or frozen])
        return {
            "parameters": total([p for _, p in parameters]),
            "buffers": total(model.buffers() if buffers is None else buffers(model)),
            "gradients": trained,
            "optimizer": states[("sgd", "momentum", "adam").index(optimizer)] * trained,
        }

    return answer


def in_state_dict(model):
    """Buffers are what the state dict has beside the parameters."""
    names = set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [model.state_dict()[name] for name in names]


def both_names(model):
    """A state dict's entries that are no named parameter: a tied parameter's second name is one."""
    return [t for name, t in model.state_dict().items() if name not in dict(model.named_parameters())]


def entry(key, value):
    """The right answer but for one entry, value(model, optimizer, right)."""
    return lambda model, opt: (right := fixed_bytes_by_loops(model, opt)) | {key: value(model, opt, right[key])}


def existing_gradients(model, optimizer, right):
    return sum(-(-p.grad.nbytes // 512) * 512 for p in model.parameters() if p.grad is not None)


def real_optimizer(model, optimizer):
    """Makes gradients and steps, takes everything back but for what the model held of its own."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    held = [p.grad for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    if parameters:
        torch.optim.SGD(parameters, lr=0.0).step()
    for p, grad in zip(parameters, held, strict=True):
        p.grad = grad
    return fixed_bytes_by_loops(model, optimizer)


def zero_grad(model, optimizer):
    model.zero_grad()
    return fixed_bytes_by_loops(model, optimizer)


def hooked(model, optimizer):
    model.register_forward_hook(lambda *_: None)
    return fixed_bytes_by_loops(model, optimizer)


def noted(model, optimizer):
    model.total = fixed_bytes_by_loops(model, optimizer)["parameters"]
    return fixed_bytes_by_loops(model, optimizer)


def of_children(model, optimizer, right):
    """The model's own parameters and its children's; theirs are forgotten."""
    found = {id(p): p for m in (model, *model.children()) for p in m.parameters(recurse=False)}
    return sum(-(-p.nbytes // 512) * 512 for p in found.values())


def train_mode(model, optimizer):
    return fixed_bytes_by_loops(model.train(), optimizer)


def reads(model, optimizer):
    """Looks at one value of each parameter that has data."""
    sum(float(p.detach().flatten()[0]) for p in model.parameters() if not p.is_meta)
    return fixed_bytes_by_loops(model, optimizer)


WRONG_FIXED = {
    "the sum rounded up": (fixed(each=False), "parameters, in bytes"),
    "four bytes for all": (fixed(itemsize=4), "parameters, in bytes"),
    "tied twice": (fixed(tied=True), "parameters, in bytes"),
    "trained parameters alone": (
        entry("parameters", lambda model, opt, right: fixed_bytes_by_loops(model, opt)["gradients"]),
        "parameters, in bytes",
    ),
    "floats": (entry("parameters", lambda model, opt, right: right / 1), "a float"),
    "one number": (lambda model, optimizer: sum(fixed_bytes_by_loops(model, optimizer).values()), "no entry"),
    "no buffers": (fixed(buffers=lambda model: []), "buffers, in bytes"),
    "persistent buffers": (fixed(buffers=in_state_dict), "buffers, in bytes"),
    "a tied parameter is a buffer": (fixed(buffers=both_names), "buffers, in bytes"),
    "a shared buffer twice": (
        fixed(buffers=lambda model: [b for m in model.modules() for b in m.buffers(recurse=False)]),
        "buffers, in bytes",
    ),
    "floating buffers": (
        fixed(buffers=lambda model: [b for b in model.buffers() if b.is_floating_point()]),
        "buffers, in bytes",
    ),
    "gradients of the frozen": (fixed(frozen=True), "gradients, in bytes"),
    "gradients that exist": (entry("gradients", existing_gradients), "gradients, in bytes"),
    "float32 gradients": (
        entry(
            "gradients",
            lambda model, opt, right: sum(-(-p.numel() // 128) * 512 for p in model.parameters() if p.requires_grad),
        ),
        "gradients, in bytes",
    ),
    "one state for Adam": (fixed(states=(0, 1, 1)), "optimizer, in bytes"),
    "parameters in the state": (fixed(states=(1, 2, 3)), "optimizer, in bytes"),
    "momentum for SGD": (fixed(states=(1, 1, 2)), "optimizer, in bytes"),
    "states of the frozen": (
        entry(
            "optimizer",
            lambda model, opt, right: 2 * fixed(frozen=True)(model, opt)["gradients"] if opt == "adam" else right,
        ),
        "optimizer, in bytes",
    ),
    "step counters": (
        entry("optimizer", lambda model, opt, right: right + 512 * len([*model.parameters()]) * (opt == "adam")),
        "optimizer, in bytes",
    ),
    "a real optimizer": (real_optimizer, "operators that worked"),
    "gradients dropped": (zero_grad, r"0.weight.grad"),
    "reads the data": (reads, "operators that worked"),
    "training mode": (train_mode, "training"),
    "a hook stays": (hooked, "_forward_hooks"),
    "an attribute stays": (noted, "model.total"),
    "children alone": (entry("parameters", of_children), "modules in modules"),
    "buffers of children": (
        fixed(
            buffers=lambda model: {
                id(b): b for m in (model, *model.children()) for b in m.buffers(recurse=False)
            }.values()
        ),
        "modules in modules",
    ),
}

# ---------------------------------------------------------------- prefetcher


def prefetch_filled_first(batches, copy, compute, depth):
    """The copies that fill the buffers are issued first, the others after the compute that they wait for."""
    ops = [Op(f"copy {k}", "copy", "c", copy) for k in range(min(depth, batches))]
    for k in range(batches):
        ops.append(Op(f"compute {k}", "compute", "x", compute, (f"copy {k}",)))
        if k + depth < batches:
            ops.append(Op(f"copy {k + depth}", "copy", "c", copy, (f"compute {k}",)))
    return ops


def prefetch_by_buffers(batches, copy, compute, depth):
    """A stream for each buffer: its own order does it all, without one event."""
    queue, ops = deque(range(batches)), []
    while queue:
        k = queue.popleft()
        stream = f"buffer {k % depth}"
        ops += [Op(f"copy {k}", "copy", stream, copy), Op(f"compute {k}", "compute", stream, compute)]
    return ops


def prefetch(wait_copy=True, back=lambda k, depth: k - depth, streams=("c", "x"), before=True, form=tuple):
    """Schedules with chosen faults; copy k waits for compute back(k, depth)."""

    def answer(batches, copy, compute, depth):
        ops = []
        for k in range(batches):
            reader = back(k, depth)
            waits = form((f"compute {reader}",)) if reader < k and (reader >= 0 or not before) else ()
            ops.append(Op(f"copy {k}", "copy", streams[0], copy, waits))
            ops.append(Op(f"compute {k}", "compute", streams[1], compute, (f"copy {k}",) if wait_copy else ()))
        return ops

    return answer


def changed(**new):
    """The right schedule with entries of its copies replaced."""
    return lambda *case: [op._replace(**new) if op.name[:4] == "copy" else op for op in prefetch_filled_first(*case)]


def swapped_durations(batches, copy, compute, depth):
    return prefetch_filled_first(batches, min(copy, compute), compute, depth)


def events_from_one_compute_on(batches, copy, compute, depth):
    """Forgets the last reuse of each buffer."""
    ops = prefetch_filled_first(batches, copy, compute, depth)
    return [op._replace(after=()) if op.name == f"copy {batches - 1}" and batches > depth else op for op in ops]


def on_engine_order(batches, copy, compute, depth):
    """A stream for each op, events for copies only: the order of the engines is relied on."""
    ops = prefetch_filled_first(batches, copy, compute, depth)
    return [op._replace(stream=op.name, after=op.after if op.name.startswith("compute") else ()) for op in ops]


def no_event_for_nothing(batches, copy, compute, depth):
    """A copy of no duration is not waited for."""
    ops = prefetch_filled_first(batches, copy, compute, depth)
    return [op if copy or op.name.startswith("copy") else op._replace(after=()) for op in ops]


def never_for_nothing(batches, copy, compute, depth):
    """A compute of no duration is not waited for."""
    ops = prefetch_filled_first(batches, copy, compute, depth)
    return [op if compute or op.name.startswith("compute") else op._replace(after=()) for op in ops]


def a_copy_too_many(batches, copy, compute, depth):
    return [*prefetch()(batches, copy, compute, depth), Op(f"copy {batches}", "copy", "c", copy, ())]


def error_for_none(batches, copy, compute, depth):
    ops = prefetch_filled_first(batches, copy, compute, depth)
    assert ops[0].name == "copy 0"
    return ops


def generator(*case):
    yield from prefetch_filled_first(*case)


WRONG_PREFETCH = {
    "a copy too many": (a_copy_too_many, "and no others"),
    "one batch less": (lambda batches, *others: prefetch()(batches - 1, *others), "and no others"),
    "an error for no batches": (error_for_none, "IndexError"),
    "other names": (
        lambda *case: [op._replace(name=op.name.replace(" ", "-")) for op in prefetch()(*case)],
        "no others",
    ),
    "a generator": (generator, "a list"),
    "counted from one": (
        lambda *case: [
            op._replace(name=f"{op.name.split()[0]} {int(op.name.split()[1]) + 1}") for op in prefetch()(*case)
        ],
        "and no others",
    ),
    "one engine": (changed(engine="compute"), "engine and duration"),
    "another engine": (changed(engine="dma"), "engine and duration"),
    "the shorter duration": (swapped_durations, "engine and duration"),
    "waits for compute -1": (prefetch(before=False), "an op waits for earlier ones only"),
    "a string for a tuple": (prefetch(form=lambda names: names[0]), "an op waits for earlier ones only"),
    "copies last": (lambda *case: sorted(prefetch()(*case), reverse=True), "an op waits for earlier ones only"),
    "no event for the compute": (prefetch(wait_copy=False), "a compute starts after its copy"),
    "no event for the buffer": (prefetch(back=lambda k, depth: -1), "no buffer is overwritten"),
    "two buffers whatever the depth": (prefetch(back=lambda k, depth: k - 2), "no buffer|as fast as"),
    "one buffer too many": (prefetch(back=lambda k, depth: k - depth - 1), "no buffer is overwritten"),
    "the last reuse forgotten": (events_from_one_compute_on, "no buffer is overwritten"),
    "the engines' order": (on_engine_order, "no buffer is overwritten"),
    "one stream": (prefetch(streams=("x", "x")), "as fast as it can be"),
    "each copy waits for the last compute": (prefetch(back=lambda k, depth: k - 1), "as fast as it can be"),
    "two buffers at most": (prefetch(back=lambda k, depth: k - min(depth, 2)), "as fast as it can be"),
    "four buffers at most": (prefetch(back=lambda k, depth: k - min(depth, 4)), "as fast as it can be"),
    "no event for a copy that takes no time": (no_event_for_nothing, "a compute starts after its copy"),
    "no event for a compute that takes no time": (never_for_nothing, "no buffer is overwritten"),
    "plain tuples": (lambda *case: [tuple(op) for op in prefetch()(*case)], "an `Op` in each entry"),
    "one buffer unused": (prefetch(back=lambda k, depth: k - max(1, depth - 1)), "as fast as it can be"),
}

# ---------------------------------------------------------------- what the tasks promise

BLOCK = "the block: a multiple of 512 bytes, no larger than it must be"
BELOW, FROM_ON = "a request < max_split_size: ", "a request ≥ max_split_size: "
NAMES = "a list with a copy and a compute for each batch, and no others"
UNTOUCHED = "nothing is computed, and the model stays as it is"
# words of the task, the item that holds them, the wrong answer that breaks them
PROMISES = {
    "plan": [
        ("`plan(size, divisions=1)`", BLOCK, "two divisions by default"),
        ("request of `size` ≥ 1 bytes", BLOCK, "256 bytes"),
        ("Return the tuple", BLOCK, "a list"),
        ("the rounded bytes", BLOCK, "one step too many"),
        ('`"small"` or `"large"`', 'the pool: "small" or "large"', "pools in capitals"),
        ("the bytes of the segment if a new one is needed", "the segment of the small pool", "one small MiB"),
        ("Bytes are `int`", BLOCK, "floats"),
        ("Bytes are `int`", "the segment of a request from 10 MiB on", "float segments"),
        ("With `divisions=1`, the default", BLOCK, "powers of two without divisions"),
        ("as in the rules above", 'the pool: "small" or "large"', "a large MiB"),
        ("as in the rules above", "the segment of a large block below 10 MiB", "a block as segment"),
        ("as in the rules above", "the segment of a request from 10 MiB on", "20 MiB for 10"),
        ("as in the rules above", "the segment of a request from 10 MiB on", "segments not rounded"),
        ("the block is the smallest multiple", "the block, with divisions", "no divisions"),
        ("the largest power of two that is ≤ `size`", "the block, with divisions", "the next power of two"),
        (
            "All other requests round to 512 bytes",
            "the block, with divisions: requests that are not large enough for them",
            "divisions for small requests",
        ),
        ("segment follow from the rounded size", "pool and segment follow from the rounded size", "segment by request"),
    ],
    "fit": [
        ("in any order", "the smallest that is large enough", "first fit"),
        ("the block handed out", "large pool: what stays in one piece", "cut and lost"),
        ("Return the tuple `(block, rest)`", "the block is the stream's own", "two lists"),
        ("`free` stays as it is", "free stays as it is", "handed out once"),
        ("in the same form", "an exact fit: rest is None", "floats"),
        ("the free block left over", "small pool: what is split off", "the rest at the start"),
        ("`rest` is `None` if nothing is split off", "an exact fit: rest is None", "an empty rest"),
        ("`None` if there is no block", "None if no block is large enough", "an error for an empty list"),
        ("`None` if there is no block", "None if no block is large enough", "the largest of all if none fits"),
        ("`free` stays as it is", "free stays as it is", "pops"),
        ("`free` stays as it is", "free stays as it is", "sorts in place"),
        ("Rules 4 and 5 hold", "the block is the stream's own", "any stream"),
        ("Rules 4 and 5 hold", "the smallest that is large enough", "worst fit"),
        ("Rules 4 and 5 hold", "the lowest address among equals", "the last of equals"),
        ("Rules 4 and 5 hold", "small pool: what is split off", "more than 512"),
        ("Rules 4 and 5 hold", "large pool: what stays in one piece", "1 MiB is split off"),
        ("Rules 4 and 5 hold", "large pool: what is split off", "2 MiB before a split"),
        ("Rules 4 and 5 hold, and three more", BELOW + "all else as ever", "never split with a limit"),
        ("may not have a block ≥", BELOW + "which blocks it may not have", "oversize from one byte above"),
        ("may not have a block ≥", BELOW + "all else as ever", "nothing with an oversize block about"),
        ("no block is split, it gets the whole one", FROM_ON + "its block stays whole", "oversize requests are split"),
        ("20 MiB or more larger", FROM_ON + "which blocks it may not have", "20 MiB larger is fine"),
    ],
    "give_back": [
        ("Return the list", "no free neighbour: only the state changes", "float sizes"),
        ("of such tuples", "no free neighbour: only the state changes", "lists"),
        ("after the used block at `address` has been freed", "no free neighbour: only the state changes", "compaction"),
        ("has been freed", "no free neighbour: only the state changes", "free only where it joins"),
        ("by rule 6", "a free block on the left", "left only with right"),
        ("by rule 6", "a free block on the right", "right only with left"),
        ("by rule 6", "free blocks on both sides", "left else right"),
        ("The argument stays as it is", "the argument stays as it is", "in place"),
        ("If no used block starts", "ValueError if no used block starts there", "a double free passes"),
        ("block starts at `address`", "ValueError if no used block starts there", "an address inside will do"),
        ("raise `ValueError`", "ValueError if no used block starts there", "a KeyError"),
        (
            "no used block starts at `address`",
            "ValueError if no used block starts there",
            "an aligned address inside will do",
        ),
        ("Raises ValueError", "ValueError if no used block starts there", "nothing happens"),
    ],
    "post_mortem": [
        ("The GPU's number and the sizes vary", "capacity, in bytes", "GPU 0 alone"),
        ("The GPU's number and the sizes vary", "requested, in bytes", "GPUs 0 to 9"),
        ("Return a dictionary", "requested, in bytes", "None"),
        ("`requested`", "requested, in bytes", "no entry requested"),
        ("`capacity`", "capacity, in bytes", "strings"),
        ("`free`", "free, in bytes", "free without unit"),
        ("`allocated`", "allocated, in bytes", "in use for allocated"),
        ("`cached` (reserved but unallocated)", "cached, in bytes", "no entry cached"),
        ("in bytes, read from the message", "requested, in bytes", "decimal units"),
        ("Each number comes as", "requested, in bytes", "requested has no KiB"),
        ("Each number comes as", "capacity, in bytes", "capacity has no KiB"),
        ("Each number comes as", "free, in bytes", "free has no KiB"),
        ("Each number comes as", "allocated, in bytes", "allocated has no KiB"),
        ("Each number comes as", "cached, in bytes", "cached has no KiB"),
        ("the size of the largest block", "largest_hole, with blocks in state 'inactive'", "the sum of the holes"),
        (
            "the size of the largest block",
            "largest_hole, with blocks in state 'inactive'",
            "what was requested of a hole",
        ),
        ("in the segments", "largest_hole, with blocks in state 'inactive'", "holes of the large pool"),
        ('with state `"inactive"`', "largest_hole, with blocks in state 'inactive'", "pending is a hole"),
        ("in the segments", "largest_hole, with blocks in state 'inactive'", "the first segment's"),
        ("(0 if there is none)", "largest_hole, with no such block", "no default"),
        ("the first that applies", "verdict 'does not fit'", "fragmented first"),
        ('`"does not fit"`', "verdict 'does not fit'", "too large"),
        ("requested + allocated > capacity", "verdict 'fragmented'", "one byte short of the capacity"),
        ('`"fragmented"`', "verdict 'fragmented'", "cached alone"),
        ("free + cached ≥ requested", "verdict 'fragmented'", "strictly more"),
        ("free + cached ≥ requested", "verdict 'fragmented'", "fragmented by the hole"),
        ('`"held elsewhere"`', "verdict 'held elsewhere'", "all that fits is fragmented"),
    ],
    "fixed_bytes": [
        ("Return a dictionary", "parameters, in bytes", "one number"),
        ("bytes (`int`)", "parameters, in bytes", "floats"),
        ("`parameters`", "parameters, in bytes", "trained parameters alone"),
        ("`buffers` (persistent or not)", "buffers, in bytes", "persistent buffers"),
        ("`buffers`", "buffers, in bytes", "no buffers"),
        ("each tensor is a block of its own, rounded up", "parameters, in bytes", "the sum rounded up"),
        ("`requires_grad=False` has no gradient", "gradients, in bytes", "gradients of the frozen"),
        ("no gradient and no state", "optimizer, in bytes", "states of the frozen"),
        ("a tied one counts once", "parameters, in bytes", "tied twice"),
        ("so does a buffer that two modules share", "buffers, in bytes", "a shared buffer twice"),
        ("every dtype has its own size", "parameters, in bytes", "four bytes for all"),
        ("every dtype has its own size", "gradients, in bytes", "float32 gradients"),
        ("every dtype has its own size", "buffers, in bytes", "floating buffers"),
        ('nothing for `"sgd"`', "optimizer, in bytes", "parameters in the state"),
        ('one tensor like the gradient for `"momentum"`', "optimizer, in bytes", "momentum for SGD"),
        ('two for `"adam"`', "optimizer, in bytes", "one state for Adam"),
        ("its step counters stay on the host", "optimizer, in bytes", "step counters"),
        ("Nothing may be computed", UNTOUCHED, "a real optimizer"),
        ("the model stays as it is", UNTOUCHED, "training mode"),
        ("the model stays as it is", UNTOUCHED, "gradients dropped"),
        ("the model stays as it is", UNTOUCHED, "a hook stays"),
        ("it may be on the meta device", UNTOUCHED, "reads the data"),
        ("it may have gradients already or none", "gradients, in bytes", "gradients that exist"),
    ],
    "prefetch_schedule": [
        ("the list of the `Op`s", NAMES, "a generator"),
        ("in the order of issue", "an op waits for earlier ones only", "copies last"),
        ("`batches` may be 0", NAMES, "an error for no batches"),
        ("Each batch `k` has two", NAMES, "one batch less"),
        ("there are no others", NAMES, "a copy too many"),
        ('`f"copy {k}"`', NAMES, "other names"),
        ('on engine `"copy"`', "engine and duration of each op", "another engine"),
        ("taking `copy` seconds", "engine and duration of each op", "the shorter duration"),
        ("waits (`after`) only for ops earlier", "an op waits for earlier ones only", "waits for compute -1"),
        (
            "a compute starts after its copy has ended",
            "a compute starts after its copy, whatever the durations",
            "no event for the compute",
        ),
        ("no buffer is overwritten", "no buffer is overwritten while it is read", "no event for the buffer"),
        ("There are `depth` ≥ 1", "no buffer is overwritten while it is read", "two buffers whatever the depth"),
        ("uses buffer `k % depth`", "no buffer is overwritten while it is read", "one buffer too many"),
        ("not by the order on an engine", "no buffer is overwritten while it is read", "the engines' order"),
        ("copies of later batches overlap with the compute", "as fast as it can be", "one stream"),
        ("as early as `schedule` and `depth` buffers allow", "as fast as it can be", "one buffer unused"),
        ("even if it then takes longer for some batches", "as fast as it can be", "two buffers at most"),
        (
            "whatever the durations are",
            "a compute starts after its copy, whatever the durations",
            "no event for a copy that takes no time",
        ),
    ],
}
CONTEXT = {
    "plan": ["is PyTorch's setting", 'Bytes of the block, "small" or "large"'],
    "fit": ["Write `fit(", "`small` says which pool", "The block for a rounded", "None if nothing fits."],
    "give_back": [
        "Write `give_back(",
        "`blocks` is one segment:",
        "in the order of addresses",
        "The segment with the used",
    ],
    "post_mortem": ["Write `post_mortem(", "the rest belongs to", "floats are fine", "largest_hole in bytes, and a"],
    "fixed_bytes": ["Write `fixed_bytes(", "State:", "Bytes of parameters, buffers"],
    "prefetch_schedule": [
        "Write `prefetch_schedule(",
        "Names of streams",
        "Requirements:",
        "The operations of a prefetching",
    ],
}


CHECKS = {
    "plan": check.plan,
    "fit": check.fit,
    "give_back": check.give_back,
    "post_mortem": check.post_mortem,
    "fixed_bytes": check.fixed_bytes,
    "prefetch_schedule": check.prefetch_schedule,
}
ANSWERS = answers("15-07", given={"Op": Op})
STUBS = answers("15-07", edit=student_source, given={"Op": Op})
RIGHT = {
    "plan": [plan_by_modulo, plan_by_bits],
    "fit": [fit_in_one_pass, fit_by_filters],
    "give_back": [give_back_by_index, give_back_by_edges],
    "post_mortem": [post_mortem_in_order, post_mortem_by_pattern],
    "fixed_bytes": [fixed_bytes_by_loops, fixed_bytes_by_storages],
    "prefetch_schedule": [prefetch_filled_first, prefetch_by_buffers],
}
WRONG = {
    "plan": WRONG_PLAN,
    "fit": WRONG_FIT,
    "give_back": WRONG_COALESCE,
    "post_mortem": WRONG_POST_MORTEM,
    "fixed_bytes": WRONG_FIXED,
    "prefetch_schedule": WRONG_PREFETCH,
}


class TestChecks(CheckProtocol):
    TOPIC = "15-07"
    CHECKS, ANSWERS, STUBS, RIGHT, WRONG = CHECKS, ANSWERS, STUBS, RIGHT, WRONG
    PROMISES, CONTEXT = PROMISES, CONTEXT

    def hold_stand_in(self, name, stand_in):
        assert stand_in is None or self.CHECKS[name].run(stand_in).status == "passed"
