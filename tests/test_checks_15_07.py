"""The checks of 15-07 accept right answers, however written, and reject what a student might really write."""

import itertools
import math
import re
from collections import OrderedDict, deque
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from check_protocol import CheckProtocol, idle

from course.answers import answers
from course.exercise_form import student_source
from shared.checks import topic_15_07 as check

KIB, MIB, GIB = 2**10, 2**20, 2**30


class Op(NamedTuple):
    """The notebook defines it beside the simulator; the answer cell only uses it."""

    name: str
    engine: str
    stream: str
    seconds: float
    after: tuple[str, ...] = ()


def spoilt(answer, edit):
    """A right answer, and what `edit` makes of it and of its arguments."""
    return lambda *arguments: edit(answer(*arguments), *arguments)


# ---------------------------------------------------------------- give back


def is_whole(block):
    return block.state == "inactive" and block.before is None and block.after is None


def give_back_by_blocks(allocator):
    """All blocks, sorted as the lists are."""
    whole = sorted(filter(is_whole, allocator.blocks.values()), key=lambda b: (b.small, b.stream, b.size, b.address))
    for block in whole:
        allocator.cuda_free(block)
    return sum(block.size for block in whole)


def give_back_while_there_is_one(allocator):
    """One at a time, looking from the start of the list again."""
    total = np.int64(0)
    for small in (0, 1):
        while True:
            keys = [key for key in allocator.free_lists[small] if is_whole(allocator.blocks[key[2]])]
            if not keys:
                break
            allocator.cuda_free(allocator.blocks[keys[0][-1]])
            total += keys[0][1]
    return total


def giving(pools=(False, True), keep=is_whole, order=list, result=sum):
    """Give back with chosen faults."""

    def answer(allocator):
        sizes = []
        for small in pools:
            for _, size, address in order(allocator.free_lists[small]):
                block = allocator.blocks[address]
                if keep(block):
                    allocator.cuda_free(block)
                    sizes.append(size)
        return result(sizes)

    return answer


def changing_list(allocator):
    total = 0
    for small in (False, True):
        for _, size, address in allocator.free_lists[small]:
            if is_whole(allocator.blocks[address]):
                allocator.cuda_free(allocator.blocks[address])
                total += size
    return total


def stops_at_what_stays(allocator):
    total = 0
    for small in (False, True):
        for _, size, address in list(allocator.free_lists[small]):
            if not is_whole(allocator.blocks[address]):
                break
            allocator.cuda_free(allocator.blocks[address])
            total += size
    return total


def at_most_ten(allocator):
    """Stops after ten segments of a pool."""
    return giving(order=lambda keys: list(keys)[:10])(allocator)


class SoFar:
    """Adds up over all its calls."""

    def __init__(self):
        self.total = 0

    def __call__(self, allocator):
        if not allocator.freed:
            self.total = 0
        self.total += giving()(allocator)
        return self.total


def emptied_lists(allocator):
    total = giving()(allocator)
    for keys in allocator.free_lists.values():
        keys.clear()
    return total


def counted_twice(allocator):
    total = giving()(allocator)
    allocator.reserved -= total
    return total


WRONG_GIVE_BACK = {
    "the free lists emptied": (emptied_lists, "free lists afterwards"),
    "reserved counted twice": (counted_twice, "bytes reserved afterwards"),
    "the bytes of all calls": (SoFar(), "a second call"),
    "a list that changes under the loop": (changing_list, "of the large pool"),
    "the small pool alone": (giving(pools=(True,)), "of the large pool"),
    "the large pool alone": (giving(pools=(False,)), "of the small pool"),
    "one of each pool": (giving(order=lambda keys: list(keys)[:1]), "of the large pool"),
    "ten of each pool": (at_most_ten, "of the large pool"),
    "all free blocks": (giving(keep=lambda b: True), "with a block in use stays"),
    "no block on the left": (giving(keep=lambda b: b.before is None), "with a block in use stays"),
    "no block on the right": (giving(keep=lambda b: b.after is None), "with a block in use stays"),
    "a block on one side will do": (
        giving(keep=lambda b: b.before is None or b.after is None),
        "with a block in use stays",
    ),
    "stops at the first that stays": (stops_at_what_stays, "of the large pool"),
    "the small pool first": (giving(pools=(True, False)), "the order"),
    "from the end of the list": (giving(order=lambda keys: list(keys)[::-1]), "the order"),
    "by address": (giving(order=lambda keys: sorted(keys, key=lambda key: key[2])), "the order"),
    "by size": (giving(order=lambda keys: sorted(keys, key=lambda key: key[1])), "the order"),
    "the number of segments": (giving(result=len), "bytes given back"),
    "nothing returned": (giving(result=lambda sizes: None), "bytes given back"),
    "floats": (giving(result=lambda sizes: float(sum(sizes))), "a float"),
    "the last one's bytes": (giving(result=lambda sizes: ([0, *sizes])[-1]), "bytes given back"),
    "None for nothing": (giving(result=lambda sizes: sum(sizes) or None), "bytes given back"),
    "what was cached": (
        lambda allocator: (
            giving()(allocator) + sum(size for keys in allocator.free_lists.values() for _, size, _ in keys[:0]) + 1
        ),
        "bytes given back",
    ),
}

# ---------------------------------------------------------------- post-mortem

UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"


def post_mortem_by_pattern(message, snapshot):
    """One regular expression, sums over generators."""
    pattern = rf"allocate {SIZE}\. GPU (\d+) has a total capacity of {SIZE} of which {SIZE} is free"
    match = re.search(pattern, message)
    sizes = [float(match[k]) * UNITS[match[k + 1]] for k in (1, 4, 6)]
    segments = [s for s in snapshot["segments"] if str(s["device"]) == match[3]]
    blocks = [(b["size"], b["state"], len(s["blocks"])) for s in segments for b in s["blocks"]]
    found = OrderedDict(zip(("requested", "capacity", "free"), sizes, strict=True))
    found["reserved"] = sum(size for size, _, _ in blocks)
    found["allocated"] = sum(size for size, state, _ in blocks if state == "active_allocated")
    found["inactive_split_bytes"] = sum(size for size, state, n in blocks if state == "inactive" and n > 1)
    found["largest_hole"] = max([0, *(size for size, state, _ in blocks if state == "inactive")])
    found["outside"] = sizes[1] - sizes[2] - found["reserved"]
    if sizes[1] - found["allocated"] < sizes[0]:
        found["verdict"] = "does not fit"
    elif sizes[0] <= sizes[2] + found["reserved"] - found["allocated"]:
        found["verdict"] = "fragmented"
    else:
        found["verdict"] = "held elsewhere"
    return found


def post_mortem_word_by_word(message, snapshot):
    """The words in order; loops with counters; NumPy's integers."""
    words = message.replace(". ", " ").split()
    numbers = [float(a) * UNITS[b] for a, b in itertools.pairwise(words) if b in UNITS]
    gpu = int(words[words.index("GPU") + 1])
    allocated = reserved = split = np.int64(0)
    largest = 0
    for segment in snapshot["segments"]:
        if segment["device"] != gpu:
            continue
        reserved += segment["total_size"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                allocated += block["size"]
            if block["state"] == "inactive":
                largest = max(largest, block["size"])
                split += block["size"] if block["size"] != segment["total_size"] else 0
    requested, capacity, free = numbers[:3]
    verdicts = ["held elsewhere", "fragmented", "does not fit"]
    number = 2 if requested + allocated > capacity else int(free + reserved - allocated >= requested)
    return {
        "requested": requested, "capacity": capacity, "free": free, "allocated": allocated, "reserved": reserved,
        "outside": capacity - free - reserved, "inactive_split_bytes": split, "largest_hole": largest,
        "verdict": verdicts[number],
    }  # fmt: skip


def examined(key, value, **others):
    """The right answer but for one entry: value(message, the message's own segments, the right answer)."""

    def answer(message, snapshot):
        right = post_mortem_word_by_word(message, snapshot)
        gpu = int(message.split("GPU ")[1].split()[0])
        mine = [s for s in snapshot["segments"] if s["device"] == gpu]
        return right | {key: value(message, mine, right)}

    return answer


def without(key):
    return lambda *a: {k: v for k, v in post_mortem_word_by_word(*a).items() if k != key}


def in_units(mark, units):
    def read(message, mine, right):
        number, unit = message.split(mark)[1].split()[:2]
        return float(number) * units.get(unit.rstrip("."), 1)

    return read


def one_digit(message, snapshot):
    return post_mortem_word_by_word(re.sub(r"GPU (\d)\d*", r"GPU \1", message), snapshot)


def all_devices(message, snapshot):
    gpu = int(message.split("GPU ")[1].split()[0])
    return post_mortem_word_by_word(message, {"segments": [s | {"device": gpu} for s in snapshot["segments"]]})


def blocks(mine, *states):
    return [b["size"] for s in mine for b in s["blocks"] if b["state"] in states]


def judged(choose):
    """The verdict as choose(requested, capacity, free, allocated, reserved, the right one)."""
    keys = ("requested", "capacity", "free", "allocated", "reserved", "verdict")
    return examined("verdict", lambda m, mine, right: choose(*(right[key] for key in keys)))


BIG = {"MiB": MIB, "GiB": GIB}
WRONG_POST_MORTEM = {
    "decimal units": (
        examined("requested", in_units("allocate ", {"KiB": 1e3, "MiB": 1e6, "GiB": 1e9})),
        "requested, in bytes",
    ),
    "requested has no KiB": (examined("requested", in_units("allocate ", BIG)), "requested, in bytes"),
    "no entry requested": (without("requested"), "a dictionary with 'requested'"),
    "None": (lambda message, snapshot: None, "a dictionary with"),
    "strings": (examined("capacity", lambda m, mine, right: f"{right['capacity']}"), "capacity, in bytes"),
    "capacity has no KiB": (examined("capacity", in_units("capacity of ", BIG)), "capacity, in bytes"),
    "free has no KiB": (examined("free", in_units("of which ", BIG)), "free, in bytes"),
    "free without unit": (examined("free", in_units("of which ", {})), "free, in bytes"),
    "GPUs 0 to 9": (one_digit, "allocated, in bytes"),
    "all GPUs": (all_devices, "only the GPU of the message"),
    "the first GPU's": (
        lambda message, snapshot: (
            post_mortem_word_by_word(
                message,
                {"segments": [s for s in snapshot["segments"] if s["device"] == snapshot["segments"][0]["device"]]},
            )
            if snapshot["segments"] and len({s["device"] for s in snapshot["segments"]}) > 1
            else post_mortem_word_by_word(message, snapshot)
        ),
        "only the GPU of the message",
    ),
    "outside of all GPUs": (
        lambda message, snapshot: (
            (found := post_mortem_word_by_word(message, snapshot))
            | {"outside": found["capacity"] - found["free"] - sum(s["total_size"] for s in snapshot["segments"])}
        ),
        "only the GPU of the message",
    ),
    "a verdict of all GPUs": (
        lambda *a: post_mortem_word_by_word(*a) | {"verdict": all_devices(*a)["verdict"]},
        "only the GPU of the message",
    ),
    "a verdict of the message's numbers": (
        examined(
            "verdict",
            lambda m, mine, right: (
                "does not fit"
                if right["requested"] + (a := in_units("Of the allocated memory ", UNITS)(m, mine, right))
                > right["capacity"]
                else "fragmented"
                if right["free"] + in_units("by PyTorch, and ", UNITS)(m, mine, right) >= right["requested"] + 0 * a
                else "held elsewhere"
            ),
        ),
        "verdict",
    ),
    "pending is allocated": (
        examined("allocated", lambda m, mine, right: sum(blocks(mine, "active_allocated", "active_pending_free"))),
        "allocated, in bytes",
    ),
    "what was requested": (
        examined(
            "allocated",
            lambda m, mine, right: sum(
                b["requested_size"] for s in mine for b in s["blocks"] if b["state"] == "active_allocated"
            ),
        ),
        "allocated, in bytes",
    ),
    "the message's allocated": (
        examined("allocated", in_units("Of the allocated memory ", UNITS)),
        "allocated, in bytes",
    ),
    "float sums": (examined("allocated", lambda m, mine, right: float(right["allocated"])), "a float"),
    "reserved is active": (
        examined("reserved", lambda m, mine, right: right["allocated"]),
        "reserved, in bytes",
    ),
    "reserved without the whole": (
        examined("reserved", lambda m, mine, right: sum(s["total_size"] for s in mine if len(s["blocks"]) > 1)),
        "reserved, in bytes",
    ),
    "split is all that is free": (
        examined("inactive_split_bytes", lambda m, mine, right: sum(blocks(mine, "inactive"))),
        "inactive_split_bytes, in bytes",
    ),
    "split is a count": (
        examined("inactive_split_bytes", lambda m, mine, right: len(blocks(mine, "inactive"))),
        "inactive_split_bytes, in bytes",
    ),
    "split is what is not allocated": (
        examined("inactive_split_bytes", lambda m, mine, right: right["reserved"] - right["allocated"]),
        "inactive_split_bytes, in bytes",
    ),
    "the sum of the holes": (
        examined("largest_hole", lambda m, mine, right: sum(blocks(mine, "inactive"))),
        "largest_hole, in bytes",
    ),
    "the first hole": (
        examined("largest_hole", lambda m, mine, right: [*blocks(mine, "inactive"), 0][0]),
        "largest_hole, in bytes",
    ),
    "the last hole": (
        examined("largest_hole", lambda m, mine, right: [0, *blocks(mine, "inactive")][-1]),
        "largest_hole, in bytes",
    ),
    "the largest segment's holes": (
        examined("largest_hole", lambda m, mine, right: max((sum(blocks([s], "inactive")) for s in mine), default=0)),
        "largest_hole, in bytes",
    ),
    "pending is a hole": (
        examined(
            "largest_hole", lambda m, mine, right: max(blocks(mine, "inactive", "active_pending_free"), default=0)
        ),
        "largest_hole, in bytes",
    ),
    "None for no hole": (
        examined("largest_hole", lambda m, mine, right: max(blocks(mine, "inactive"), default=None)),
        "largest_hole, in bytes",
    ),
    "no default": (examined("largest_hole", lambda m, mine, right: max(blocks(mine, "inactive"))), "ValueError"),
    "what was requested of a hole": (
        examined(
            "largest_hole",
            lambda m, mine, right: max(
                (b["requested_size"] for s in mine for b in s["blocks"] if b["state"] == "inactive"), default=0
            ),
        ),
        "largest_hole, in bytes",
    ),
    "outside of the allocated": (
        examined("outside", lambda m, mine, right: right["capacity"] - right["free"] - right["allocated"]),
        "outside, in bytes",
    ),
    "all that is used": (
        examined("outside", lambda m, mine, right: right["capacity"] - right["free"]),
        "outside, in bytes",
    ),
    "outside is never negative": (
        examined("outside", lambda m, mine, right: max(0, right["outside"])),
        "outside, in bytes",
    ),
    "one byte short of the capacity": (
        judged(lambda r, c, f, a, k, right: "does not fit" if r + a >= c else right),
        "verdict '(fragmented|held elsewhere)'",
    ),
    "fragmented first": (
        judged(lambda r, c, f, a, k, right: "fragmented" if f + k - a >= r else right),
        "verdict 'does not fit'",
    ),
    "too large": (
        judged(lambda r, c, f, a, k, right: "too large" if right == "does not fit" else right),
        "verdict 'does not fit'",
    ),
    "strictly more": (
        judged(lambda r, c, f, a, k, right: "held elsewhere" if right == "fragmented" and f + k - a <= r else right),
        "verdict 'fragmented'",
    ),
    "cached alone": (
        judged(lambda r, c, f, a, k, right: "held elsewhere" if right == "fragmented" and k - a < r else right),
        "verdict 'fragmented'",
    ),
    "free alone": (
        judged(lambda r, c, f, a, k, right: "held elsewhere" if right == "fragmented" and f < r else right),
        "verdict 'fragmented'",
    ),
    "by the hole": (
        examined(
            "verdict",
            lambda m, mine, right: (
                "held elsewhere"
                if right["verdict"] == "fragmented" and right["largest_hole"] >= right["requested"]
                else right["verdict"]
            ),
        ),
        "verdict 'fragmented'",
    ),
    "all that fits is fragmented": (
        judged(lambda r, c, f, a, k, right: "fragmented" if right == "held elsewhere" else right),
        "verdict 'held elsewhere'",
    ),
    "reserved counts as free": (
        judged(lambda r, c, f, a, k, right: "fragmented" if right == "held elsewhere" and f + k >= r else right),
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


def left_over(model, optimizer, right):
    """A frozen parameter's old gradient is counted, too."""
    trained = [p for p in model.parameters() if p.requires_grad or p.grad is not None]
    return sum(-(-p.nbytes // 512) * 512 for p in trained)


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


def noted_on_tensors(model, optimizer):
    for p in model.parameters():
        p.block = p.nbytes
    return fixed_bytes_by_loops(model, optimizer)


def of_children(model, optimizer, right):
    """The model's own parameters and its children's; theirs are forgotten."""
    found = {id(p): p for m in (model, *model.children()) for p in m.parameters(recurse=False)}
    return sum(-(-p.nbytes // 512) * 512 for p in found.values())


def train_mode(model, optimizer):
    return fixed_bytes_by_loops(model.train(), optimizer)


def reads(model, optimizer):
    """Looks at one value of each parameter that has data."""
    sum(float(p.detach().flatten()[0]) for p in model.parameters() if p.numel() and not p.is_meta)
    return fixed_bytes_by_loops(model, optimizer)


WRONG_FIXED = {
    "the gradients that are left of the frozen": (entry("gradients", left_over), "gradients, in bytes"),
    "the sum rounded up": (fixed(each=False), "parameters, in bytes"),
    "512 bytes for nothing": (
        entry("parameters", lambda model, opt, right: right + 512 * sum(p.numel() == 0 for p in model.parameters())),
        "tensors without elements",
    ),
    "four bytes for all": (fixed(itemsize=4), "parameters, in bytes"),
    "tied twice": (fixed(tied=True), "parameters, in bytes"),
    "trained parameters alone": (
        entry("parameters", lambda model, opt, right: fixed_bytes_by_loops(model, opt)["gradients"]),
        "parameters, in bytes",
    ),
    "floats": (entry("parameters", lambda model, opt, right: right / 1), "a float"),
    "one number": (lambda model, optimizer: sum(fixed_bytes_by_loops(model, optimizer).values()), "a dictionary with"),
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
    "an attribute of a tensor stays": (noted_on_tensors, "attributes of"),
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

# ---------------------------------------------------------------- a matmul on the roofline


def cost_by_ceil(m, k, n, tile, itemsize, peak, bandwidth):
    """math.ceil, and one term for each matrix."""
    a = m * k * math.ceil(n / tile)
    b = k * n * math.ceil(m / tile)
    size = (a + b + m * n) * itemsize
    work = m * n * (k + k)
    times = {"arithmetic": work / peak, "bytes": size / bandwidth}
    limit = max(times, key=times.get)
    return OrderedDict(
        limit=limit, seconds=times[limit], intensity=work / size, bytes=np.int64(size), flops=np.int64(work)
    )


def cost_by_tiles(m, k, n, tile, itemsize, peak, bandwidth):
    """A row of tiles at a time; which side of the ridge it is on, by fractions."""
    heights = [min(tile, m - top) for top in range(0, m, tile)]
    widths = [min(tile, n - left) for left in range(0, n, tile)]
    elements = sum(h * k + k * w + h * w for h in heights for w in widths)
    size, flops = elements * itemsize, 2 * m * n * k
    by_bytes = Fraction(size) / Fraction(bandwidth) > Fraction(flops) / Fraction(peak)
    seconds = size / bandwidth if by_bytes else flops / peak
    limit = "bytes" if by_bytes else "arithmetic"
    return {"flops": flops, "bytes": size, "intensity": flops / size, "seconds": seconds, "limit": limit}


def cost_by_the_roofline(m, k, n, tile, itemsize, peak, bandwidth):
    """min(P, I·B), as the lesson has it."""
    found = cost_by_ceil(m, k, n, tile, itemsize, peak, bandwidth)
    rate = min(peak, found["intensity"] * bandwidth)
    limit = "bytes" if found["intensity"] * bandwidth < peak else "arithmetic"
    return found | {"seconds": found["flops"] / rate, "limit": limit}


def cost(key, value):
    """The right answer but for one entry: value(the right answer, m, k, n, tile, itemsize, peak, bandwidth)."""
    return lambda *a: (right := cost_by_ceil(*a)) | {key: value(right, *a)}


def moved(count):
    """Bytes by count(m, k, n, tiles in a column of C, tiles in a row)."""
    return cost(
        "bytes", lambda right, m, k, n, t, size, *_: size * int(count(m, k, n, math.ceil(m / t), math.ceil(n / t)))
    )


WRONG_MATMUL = {
    "half the FLOPs": (cost("flops", lambda right, *_: right["flops"] // 2), "flops, an int"),
    "n³": (cost("flops", lambda right, m, k, n, *_: 2 * n**3), "flops, an int"),
    "float FLOPs": (cost("flops", lambda right, *_: 2.0 * right["flops"] / 2), "a float"),
    "2k - 1": (cost("flops", lambda right, m, k, n, *_: m * n * (2 * k - 1)), "flops, an int"),
    "None": (lambda *a: None, "a dictionary with 'flops'"),
    "each element once": (moved(lambda m, k, n, i, j: m * k + k * n + m * n), "bytes, an int"),
    "no tiles": (moved(lambda m, k, n, i, j: 2 * m * n * k + m * n), "bytes, an int"),
    "A and B exchanged": (moved(lambda m, k, n, i, j: m * k * i + k * n * j + m * n), "bytes, an int"),
    "C not written": (moved(lambda m, k, n, i, j: m * k * j + k * n * i), "bytes, an int"),
    "C read, too": (moved(lambda m, k, n, i, j: m * k * j + k * n * i + 2 * m * n), "bytes, an int"),
    "edges forgotten": (
        cost("bytes", lambda right, m, k, n, t, size, *_: size * (m * k * (n // t) + k * n * (m // t) + m * n)),
        "bytes, an int",
    ),
    "edges padded": (
        moved(lambda m, k, n, i, j: (m * k * j + k * n * i + m * n) if i * j == 1 else i * j * k * 2 * 16 + m * n),
        "bytes, an int",
    ),
    "fractions of tiles": (
        cost("bytes", lambda right, m, k, n, t, size, *_: size * (2 * m * k * n / t + m * n)),
        "bytes, an int",
    ),
    "four bytes": (
        cost("bytes", lambda right, m, k, n, t, size, *_: right["bytes"] // size * 4),
        "bytes, an int",
    ),
    "float bytes": (cost("bytes", lambda right, *_: float(right["bytes"])), "a float"),
    "bytes a FLOP": (cost("intensity", lambda right, *_: 1 / right["intensity"]), "intensity"),
    "FLOPs an element": (
        cost("intensity", lambda right, m, k, n, t, size, *_: right["intensity"] * size),
        "intensity",
    ),
    "whole FLOPs a byte": (cost("intensity", lambda right, *_: right["flops"] // right["bytes"]), "intensity"),
    "one after the other": (
        cost(
            "seconds", lambda right, m, k, n, t, s, peak, bandwidth: right["flops"] / peak + right["bytes"] / bandwidth
        ),
        "seconds",
    ),
    "the faster one": (
        cost(
            "seconds",
            lambda right, m, k, n, t, s, peak, bandwidth: min(right["flops"] / peak, right["bytes"] / bandwidth),
        ),
        "seconds",
    ),
    "arithmetic alone": (
        cost("seconds", lambda right, m, k, n, t, s, peak, bandwidth: right["flops"] / peak),
        "seconds",
    ),
    "limits exchanged": (
        cost("limit", lambda right, *_: {"bytes": "arithmetic", "arithmetic": "bytes"}[right["limit"]]),
        "limit",
    ),
    "always arithmetic": (cost("limit", lambda right, *_: "arithmetic"), "limit 'bytes'"),
    "always bytes": (cost("limit", lambda right, *_: "bytes"), "limit 'arithmetic'"),
    "bytes if it is a draw": (
        cost(
            "limit",
            lambda right, m, k, n, t, s, peak, bandwidth: (
                "bytes" if right["bytes"] / bandwidth >= right["flops"] / peak else "arithmetic"
            ),
        ),
        "limit 'arithmetic'",
    ),
    "rounded seconds": (cost("seconds", lambda right, *_: round(right["seconds"], 6)), "seconds"),
    "memory": (
        cost("limit", lambda right, *_: "memory" if right["limit"] == "bytes" else "arithmetic"),
        "limit 'bytes'",
    ),
}

# ---------------------------------------------------------------- a plan


def together(one, other):
    return one[0] < other[1] and other[0] < one[1]


def planned(order, meet=together, step=512):
    """First fit: the lowest place, tensors in an order."""

    def answer(tensors):
        places = {}
        for k in sorted(range(len(tensors)), key=lambda k: order(tensors[k])):
            taken = sorted((places[j], places[j] + tensors[j][2]) for j in places if meet(tensors[k], tensors[j]))
            place = 0
            for start, end in taken:
                if start - place >= tensors[k][2]:
                    break
                place = max(place, end)
            places[k] = place
        return [places[k] // 512 * step for k in range(len(tensors))]

    return answer


by_size = planned(lambda t: (-t[2], t[0]))


def plan_by_the_best_of_orders(tensors):
    """Several orders, the shortest arena."""
    orders = [
        lambda t: t[0],
        lambda t: -t[2],
        lambda t: (-t[2], t[1]),
        lambda t: t[0] - t[1],
        lambda t: (t[0] - t[1]) * t[2],
    ]
    plans = [planned(order)(tensors) for order in orders]
    return min(plans, key=lambda plan: max((p + t[2] for p, t in zip(plan, tensors, strict=True)), default=0))


def plan_on_a_grid(tensors):
    """The largest first, on a grid of what is taken at each event; the lowest row of free cells."""
    if not tensors:
        return []
    events = sorted({t for birth, death, _ in tensors for t in (birth, death)})
    column = {event: k for k, event in enumerate(events)}
    spans: dict[int, list[tuple[int, int]]] = {k: [] for k in range(len(events))}
    result = [0] * len(tensors)
    for k in sorted(range(len(tensors)), key=lambda k: tensors[k][2], reverse=True):
        birth, death, size = tensors[k]
        columns = range(column[birth], column[death])
        place = 0
        for start, end in sorted({span for c in columns for span in spans[c]}):
            if start >= place + size:
                break
            place = max(place, end)
        for c in columns:
            spans[c].append((place, place + size))
        result[k] = np.int64(place)
    return result


def stacked(tensors):
    return [sum(size for _, _, size in tensors[:k]) for k in range(len(tensors))]


def downwards(tensors):
    """The right plan, with its top at 0."""
    return [-place - size for place, (_, _, size) in zip(by_size(tensors), tensors, strict=True)]


def in_place(tensors):
    found = by_size(tensors)
    tensors.sort(key=lambda t: -t[2])
    return found


def emptied(tensors):
    found = by_size(tensors)
    tensors.clear()
    return found


WRONG_PLANS = {
    "a tuple": (lambda tensors: tuple(by_size(tensors)), "expected: *a list"),
    "a dictionary": (lambda tensors: dict(enumerate(by_size(tensors))), "expected: *a list"),
    "one too few": (lambda tensors: by_size(tensors)[:-1], "a list with an offset for each"),
    "an error for none": (lambda tensors: by_size(tensors) if tensors[0] else [], "IndexError"),
    "floats": (lambda tensors: [float(place) for place in by_size(tensors)], "offsets are ints"),
    "negative offsets": (downwards, "offsets are ints"),
    "in units of 512": (planned(lambda t: -t[2], step=1), "offsets are ints"),
    "all at 0": (lambda tensors: [0] * len(tensors), "share no byte"),
    "lives that share their last event": (
        planned(lambda t: -t[2], lambda a, b: a[0] < b[1] - 1 and b[0] < a[1] - 1),
        "share no byte",
    ),
    "only those born before": (
        planned(lambda t: -t[2], lambda a, b: b[0] <= a[0] < b[1]),
        "share no byte",
    ),
    "in the wrong order": (
        lambda tensors: by_size(sorted(tensors, key=lambda t: -t[2])),
        "share no byte",
    ),
    "sorts in place": (in_place, "tensors stays as it is"),
    "empties": (emptied, "tensors stays as it is"),
    "stacked": (stacked, "an arena at most"),
    "in the order of birth": (planned(lambda t: t[0]), "an arena at most"),
    "in the order of death": (planned(lambda t: t[1]), "an arena at most"),
    "the smallest first": (planned(lambda t: t[2]), "an arena at most"),
}


CHECKS = {
    "give_back": check.give_back,
    "post_mortem": check.post_mortem,
    "fixed_bytes": check.fixed_bytes,
    "matmul_cost": check.matmul_cost,
    "prefetch_schedule": check.prefetch_schedule,
    "plan": check.plan,
}
ANSWERS = answers("15-07", given={"Op": Op})
STUBS = answers("15-07", edit=student_source, given={"Op": Op})
IDLE = idle("15-07", {"Op": Op})
RIGHT = {
    "give_back": [give_back_by_blocks, give_back_while_there_is_one],
    "post_mortem": [post_mortem_by_pattern, post_mortem_word_by_word],
    "fixed_bytes": [fixed_bytes_by_loops, fixed_bytes_by_storages],
    "matmul_cost": [cost_by_ceil, cost_by_tiles, cost_by_the_roofline],
    "prefetch_schedule": [prefetch_filled_first, prefetch_by_buffers],
    "plan": [plan_by_the_best_of_orders, plan_on_a_grid, planned(lambda t: t[0] - t[1])],
}
WRONG = {
    "give_back": WRONG_GIVE_BACK,
    "post_mortem": WRONG_POST_MORTEM,
    "fixed_bytes": WRONG_FIXED,
    "matmul_cost": WRONG_MATMUL,
    "prefetch_schedule": WRONG_PREFETCH,
    "plan": WRONG_PLANS,
}


class TestChecks(CheckProtocol):
    TOPIC = "15-07"
    IDLE = IDLE
    CHECKS, ANSWERS, STUBS, RIGHT, WRONG = CHECKS, ANSWERS, STUBS, RIGHT, WRONG

    def hold_stand_in(self, name, stand_in):
        assert stand_in is None or self.CHECKS[name].run(stand_in).status == "passed"
