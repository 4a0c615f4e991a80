"""The checks of 15-07 accept right answers, however written, and reject what a student might really write."""

import copy
import itertools
import math
from typing import NamedTuple

import torch
from check_protocol import CheckProtocol
from notebook_code import answers

from course.exercises import student_source
from shared.checks import topic_15_07 as check

MIB = 2**20


class Op(NamedTuple):
    """The notebook defines it beside the simulator; the answer cell only uses it."""

    name: str
    engine: str
    stream: str
    seconds: float
    after: tuple[str, ...] = ()


ANSWERS = answers("15-07", given={"Op": Op})
STUBS = answers("15-07", edit=student_source, given={"Op": Op})
CHECKS = {
    "plan": check.plan,
    "fit": check.fit,
    "give_back": check.give_back,
    "post_mortem": check.post_mortem,
    "fixed_bytes": check.fixed_bytes,
    "prefetch_schedule": check.prefetch_schedule,
}


# ---------------------------------------------------------------- rounding and pool choice


def right_plan(size, divisions=1):
    """Another right answer: floor division and modulo, the power of two by shifting."""
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


def plan(
    step=512, limit=MIB, below=10 * MIB, by_request=False, round_large=True, threshold=512, floats=False, up=False
):
    """A plan with chosen faults."""

    def answer(size, divisions=1):
        unit = step
        if divisions > 1 and size > threshold * divisions:
            power = 1 << (size.bit_length() - (0 if up else 1))
            unit = power // divisions
        block = math.ceil(size / unit) * unit if not floats else int(2 ** math.floor(math.log2(size)))
        judged = size if by_request else block
        if judged <= limit:
            return block, "small", 2 * MIB
        if judged < below:
            return block, "large", 20 * MIB
        return block, "large", math.ceil(block / (2 * MIB)) * 2 * MIB if round_large else block

    return answer


WRONG_PLAN = [
    (plan(step=256), "requests round up to 512"),
    (lambda size, divisions=1: right_plan(size + 1, divisions), "512 stays 512"),
    (plan(limit=MIB - 1), "1 MiB itself is"),
    (plan(by_request=True), "compare the rounded size with 10 MiB"),
    (plan(below=10 * MIB + 1), "which is not\\s+below it"),
    (plan(round_large=False), "multiple of 2 MiB"),
    (lambda size, divisions=1: right_plan(size), "roundup_power2_divisions"),
    (plan(threshold=64), "only if size > 512"),
    (plan(up=True), "the largest power of two"),
    (lambda size, divisions=1: list(right_plan(size, divisions)), "a tuple such as"),
]

# ---------------------------------------------------------------- best fit


def right_fit(free, size, stream, small, max_split_size=math.inf):
    """Another right answer: one pass, keeping the best so far."""
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


def fit(
    choose=min,
    streams=True,
    small_rest=512,
    large_rest=MIB + 1,
    keep=True,
    limits="ses",
    offset=True,
    pop=False,
    rest=True,
):
    """Best fit with chosen faults; `limits` lists which of max_split_size's three rules hold."""

    def answer(free, size, stream, small, max_split_size=math.inf):
        found = [b for b in free if (b[0] == stream or not streams) and b[1] >= size]
        if not found:
            return None
        block = choose(found)
        if pop:
            free.remove(block)
        if "s" in limits[:1] and size < max_split_size <= block[1]:
            return None
        if "e" in limits and size >= max_split_size and block[1] >= size + 20 * MIB:
            return None
        left = block[1] - size
        cut = left >= small_rest if small else left >= large_rest
        if not small and limits.endswith("s") and size >= max_split_size:
            cut = False
        if not cut:
            empty = (stream, 0, block[2] + size) if not rest and left == 0 else None
            return ((block[0], block[1] if keep else size, block[2]), empty)
        return (stream, size, block[2]), (stream, left, block[2] + (size if offset else 0))

    return answer


def lowest_address(blocks):
    return min(blocks, key=lambda b: b[2])


def last_of_equals(blocks):
    return min(blocks, key=lambda b: (b[1], -b[2]))


def uncut_oversize(free, size, stream, small, max_split_size=math.inf):
    """Keeps requests of max_split_size and more whole in both pools."""
    found = right_fit(free, size, stream, small, max_split_size)
    if found is None or size < max_split_size or found[1] is None:
        return found
    return (stream, found[0][1] + found[1][1], found[0][2]), None


WRONG_FIT = [
    (fit(choose=max), "best fit, not first fit"),
    (fit(choose=lowest_address), "best fit, not first fit"),
    (fit(choose=last_of_equals), "the lower address"),
    (fit(streams=False), "filter by the stream"),
    (fit(small_rest=513), "at least 512 bytes"),
    (fit(large_rest=MIB), "more than 1 MiB must be left"),
    (fit(keep=False), "keeps the size it was found with"),
    (fit(offset=False), "starts at\\s+address \\+ size"),
    (fit(limits="-es"), "max_split_size <= found"),
    (fit(limits="se-"), "the whole block"),
    (fit(limits="s-s"), "20 MiB itself is too much"),
    (fit(pop=True), "free stays as it is|don't pop"),
    (fit(rest=False), "is None if\\s+there is nothing left"),
    (uncut_oversize, "only the large pool"),
    (fit(small_rest=10**9, large_rest=10**12), "the right block, but it is to be split"),
]

# ---------------------------------------------------------------- coalescing


def right_give_back(blocks, address):
    """Another right answer: find the index, look left and right."""
    index = next((i for i, b in enumerate(blocks) if b[0] == address and b[2] == "used"), None)
    if index is None:
        raise ValueError(address)
    low = index - (index > 0 and blocks[index - 1][2] == "free")
    high = index + (index + 1 < len(blocks) and blocks[index + 1][2] == "free")
    joined = (blocks[low][0], sum(b[1] for b in blocks[low : high + 1]), "free")
    return [*blocks[:low], joined, *blocks[high + 1 :]]


def coalesce(left=True, right=True, size=True, start=True, strict=True, mutate=False, drop=False, lists=False):
    """Coalescing with chosen faults."""

    def answer(blocks, address):
        index = next((i for i, b in enumerate(blocks) if b[0] == address and (b[2] == "used" or not strict)), None)
        if index is None:
            if strict:
                raise ValueError(address)
            return list(blocks)
        work = blocks if mutate else list(blocks)
        at, length, _ = work[index]
        low = high = index
        if left and low > 0 and work[low - 1][2] == "free":
            low -= 1
            length += work[low][1] * size
            at = work[low][0] if start else at
        if right and high + 1 < len(work) and work[high + 1][2] == "free":
            high += 1
            length += work[high][1] * size
        work[low : high + 1] = [] if drop else [[at, length, "free"] if lists else (at, length, "free")]
        return work

    return answer


def joins_everything_free(blocks, address):
    """Moves all free bytes to the end: that is compaction, not coalescing."""
    result = right_give_back(blocks, address)
    used = [b for b in result if b[2] == "used"]
    at, out = blocks[0][0], []
    for _, size, _ in used:
        out.append((at, size, "used"))
        at += size
    return [*out, (at, sum(b[1] for b in result if b[2] == "free"), "free")]


WRONG_COALESCE = [
    (coalesce(left=False), "neighbours are never both free"),
    (coalesce(right=False), "neighbours are never both free"),
    (coalesce(size=False), "bytes are conserved"),
    (coalesce(start=False), "no gap and no overlap"),
    (coalesce(drop=True), "bytes are conserved|blocks are"),
    (coalesce(mutate=True), "the argument stays as it is"),
    (coalesce(strict=False), "ValueError for"),
    (coalesce(lists=True), "blocks are \\(address, size, state\\)"),
    (joins_everything_free, "used blocks are untouched"),
]

# ---------------------------------------------------------------- post-mortem


def right_post_mortem(message, segments):
    """Another right answer: words before the units, in their order."""
    scale = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
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


def post_mortem(edit):
    """The right answer, spoilt by edit(found, message, segments)."""

    def answer(message, segments):
        found = right_post_mortem(message, segments)
        edit(found, message, segments)
        return found

    return answer


def decimal_units(found, message, segments):
    found["requested"] = found["requested"] / 2**30 * 1e9


def no_units(found, message, segments):
    found["free"] = float(message.split("of which ")[1].split()[0])


def counts_pending(found, message, segments):
    states = ("inactive", "active_pending_free")
    found["largest_hole"] = max(
        (b["size"] for s in segments for b in s["blocks"] if b["state"] != "active_allocated" and b["state"] in states),
        default=0,
    )
    found["largest_hole"] = sum(b["size"] for s in segments for b in s["blocks"] if b["state"] in states)


def wrong_order(found, message, segments):
    if found["free"] + found["cached"] >= found["requested"]:
        found["verdict"] = "fragmented"
    elif found["requested"] + found["allocated"] <= found["capacity"]:
        found["verdict"] = "held elsewhere"
    else:
        found["verdict"] = "too large"


def ignores_free(found, message, segments):
    found["verdict"] = "fragmented" if found["cached"] >= found["requested"] else found["verdict"]
    if found["verdict"] == "held elsewhere":
        found["verdict"] = "does not fit"


def only_cached(found, message, segments):
    if found["verdict"] == "fragmented" and found["cached"] < found["requested"]:
        found["verdict"] = "held elsewhere"


def strictly_more(found, message, segments):
    if found["verdict"] == "fragmented" and found["free"] + found["cached"] <= found["requested"]:
        found["verdict"] = "held elsewhere"


def no_byte_left(found, message, segments):
    if found["requested"] + found["allocated"] >= found["capacity"]:
        found["verdict"] = "does not fit"


def pending_is_a_hole(found, message, segments):
    sizes = [b["size"] for s in segments for b in s["blocks"] if b["state"] != "active_allocated"]
    found["largest_hole"] = max(sizes, default=0)


def in_use_for_allocated(found, message, segments):
    number, unit = message.split("this process has ")[1].split()[:2]
    found["allocated"] = float(number) * {"MiB": 2**20, "GiB": 2**30}[unit]


def swapped(found, message, segments):
    found["allocated"], found["cached"] = found["cached"], found["allocated"]


def missing_key(found, message, segments):
    del found["cached"]


def no_default(message, segments):
    found = right_post_mortem(message, segments)
    found["largest_hole"] = max(b["size"] for s in segments for b in s["blocks"] if b["state"] == "inactive")
    return found


def only_gib_and_mib(message, segments):
    if "KiB" in message:
        raise KeyError("KiB")
    return right_post_mortem(message, segments)


WRONG_POST_MORTEM = [
    (post_mortem(decimal_units), "2 \\* 2\\*\\*30"),
    (post_mortem(no_units), "the unit differs"),
    (post_mortem(counts_pending), "waits for an event"),
    (post_mortem(wrong_order), "in this order"),
    (post_mortem(ignores_free), "in this order"),
    (post_mortem(only_cached), "in this order"),
    (post_mortem(strictly_more), "in this order"),
    (post_mortem(no_byte_left), "in this order"),
    (post_mortem(pending_is_a_hole), "waits for an event"),
    (post_mortem(in_use_for_allocated), "after 'Of the allocated memory'"),
    (post_mortem(swapped), "allocated in bytes"),
    (post_mortem(missing_key), "the seven names"),
    (no_default, "max\\(\\) of nothing raises"),
    (only_gib_and_mib, "no exception with '512.00 KiB'"),
]

# ---------------------------------------------------------------- fixed bytes


def right_fixed_bytes(model, optimizer):
    """Another right answer: loops, and sizes by dtype."""
    found = dict.fromkeys(("parameters", "buffers", "gradients", "optimizer"), 0)
    for p in model.parameters():
        size = max(512, (p.numel() * p.dtype.itemsize + 511) // 512 * 512)
        found["parameters"] += size
        if p.requires_grad:
            found["gradients"] += size
            found["optimizer"] += size * ("sgd", "momentum", "adam").index(optimizer)
    for b in model.buffers():
        found["buffers"] += max(512, (b.numel() * b.element_size() + 511) // 512 * 512)
    return found


def fixed(each=True, itemsize=None, frozen=False, tied=False, states=(0, 1, 2), no_buffers=False, moves=False):
    """Estimates with chosen faults."""

    def answer(model, optimizer):
        parameters = list(model.named_parameters(remove_duplicate=not tied))
        if moves:
            for _, p in parameters:
                p.data.zero_()

        def total(tensors):
            sizes = [t.numel() * (itemsize or t.element_size()) for t in tensors]
            if each:
                return sum(max(512, -(-s // 512) * 512) for s in sizes)
            return -(-sum(sizes) // 512) * 512

        trained = total([p for _, p in parameters if p.requires_grad or frozen])
        return {
            "parameters": total([p for _, p in parameters]),
            "buffers": 0 if no_buffers else total(list(model.buffers())),
            "gradients": trained,
            "optimizer": states[("sgd", "momentum", "adam").index(optimizer)] * trained,
        }

    return answer


def state_dict_buffers(model):
    """Buffers are what the state dict has beside the parameters: a tied parameter's second name as well."""
    names = set(model.state_dict()) - {name for name, _ in model.named_parameters()}
    sizes = [model.state_dict()[name].nbytes for name in names]
    return {"buffers": sum(max(512, -(-size // 512) * 512) for size in sizes)}


WRONG_FIXED = [
    (fixed(each=False), "round each one up"),
    (fixed(itemsize=4), "has 2 bytes"),
    (lambda model, optimizer: right_fixed_bytes(model, optimizer) | state_dict_buffers(model), "and no parameter"),
    (fixed(frozen=True), "no gradient and no state"),
    (fixed(tied=True), "a tied\\s+one once"),
    (fixed(states=(0, 1, 1)), "sgd 0, momentum 1, adam 2"),
    (fixed(states=(1, 2, 3)), "sgd 0, momentum 1, adam 2"),
    (fixed(no_buffers=True), "model.buffers"),
    (fixed(moves=True), "the model stays as it is|nothing needs to be computed"),
    (lambda model, optimizer: sum(right_fixed_bytes(model, optimizer).values()), "the four keys|parameters, buffers"),
]

# ---------------------------------------------------------------- prefetcher


def right_prefetch(batches, copy, compute, depth):
    """Another right answer: the copies that fill the buffers are issued first, a stream for each buffer."""
    ops = [Op(f"copy {k}", "copy", "c", copy) for k in range(min(depth, batches))]
    for k in range(batches):
        ops.append(Op(f"compute {k}", "compute", "x", compute, (f"copy {k}",)))
        if k + depth < batches:
            ops.append(Op(f"copy {k + depth}", "copy", "c", copy, (f"compute {k}",)))
    return ops


def prefetch(wait_copy=True, wait_buffer="depth", streams=("c", "x"), late=False, names="{} {}", engine=None):
    """Schedules with chosen faults."""

    def answer(batches, copy, compute, depth):
        ops = []
        for k in range(batches):
            back = {"depth": k - depth, "next": k - depth + 1, "last": k - 1}.get(wait_buffer, -1)
            before = (f"compute {back}",) if 0 <= back < k else ()
            after = (f"copy {k}",) if wait_copy else ()
            ops.append(Op(names.format("copy", k), engine or "copy", streams[0], copy, before))
            ops.append(Op(names.format("compute", k), "compute", streams[1], compute, after))
        return ops[::-1] if late else ops

    return answer


WRONG_PREFETCH = [
    (prefetch(wait_copy=False), "compute waits for its copy"),
    (prefetch(wait_buffer="none"), "a buffer is not overwritten"),
    (prefetch(wait_buffer="last"), "as fast as it can be"),
    (prefetch(wait_buffer="next"), "as fast as it can be"),
    (prefetch(streams=("x", "x")), "as fast as it can be"),
    (prefetch(late=True), "earlier ones only"),
    (prefetch(names="{}-{}"), "a copy and a compute for each batch"),
    (prefetch(engine="compute"), "engines and seconds"),
    (lambda batches, copy, compute, depth: right_prefetch(batches, copy, compute, 2), "depth 1|depth 3"),
    (lambda batches, copy, compute, depth: right_prefetch(batches - 1, copy, compute, depth), "for each batch"),
]

WRONG = [
    *(("plan", a, m) for a, m in WRONG_PLAN),
    *(("fit", a, m) for a, m in WRONG_FIT),
    *(("give_back", a, m) for a, m in WRONG_COALESCE),
    *(("post_mortem", a, m) for a, m in WRONG_POST_MORTEM),
    *(("fixed_bytes", a, m) for a, m in WRONG_FIXED),
    *(("prefetch_schedule", a, m) for a, m in WRONG_PREFETCH),
]
RIGHT = {
    "plan": right_plan,
    "fit": right_fit,
    "give_back": right_give_back,
    "post_mortem": right_post_mortem,
    "fixed_bytes": right_fixed_bytes,
    "prefetch_schedule": right_prefetch,
}


class TestChecks(CheckProtocol):
    CHECKS, ANSWERS, STUBS, RIGHT, WRONG = CHECKS, ANSWERS, STUBS, RIGHT, WRONG

    def hold_stand_in(self, name, stand_in):
        assert CHECKS[name].run(stand_in).status == "passed"


def test_checks_leave_the_random_state_alone():
    torch.manual_seed(3)
    before = copy.deepcopy(torch.get_rng_state())
    check.fixed_bytes.run(right_fixed_bytes)
    assert torch.equal(before, torch.get_rng_state())
