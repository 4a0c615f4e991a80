"""Checks of the exercises in 15-07, CUDA Memory Management & GPU Internals.

The cases of an item differ from another's in what they ask, so that each wrong answer is told about its own mistake.
"""

import itertools
import math
import random
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.checks.exercise import exercise
from shared.checks.trial import Trial
from shared.histories import read_history

MIB = 2**20


def _call(name: str, arguments: Sequence[Any]) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"


def _entry(trial: Trial, case: str, got: Any, key: str) -> Any:
    """The entry of what was returned; hold that there is one."""
    has = isinstance(got, Mapping) and key in got
    where = (
        f"the entries are {', '.join(map(repr, got))}"
        if isinstance(got, Mapping)
        else f"its type is {type(got).__name__}"
    )
    hint = "which entries does the task name?"
    trial.that(case, has, expected=f"a dictionary with {key!r}", got=f"no entry {key!r}; {where}", hint=hint)
    return got[key] if has else None


# ---------------------------------------------------------------- 15-07.1

Layout = Sequence[tuple[bool, int, Sequence[tuple[int, str]]]]  # small, stream, (bytes, state) of each block


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    stream: int
    small: bool
    state: str
    requested: int = 0
    before: "_Block | None" = None
    after: "_Block | None" = None


class _Cache:
    """As much of an allocator as the answer needs; it writes down what goes back to the driver.

    A `strict` one refuses a block that is a part of a segment.
    """

    def __init__(self, segments: Layout, strict: bool = True) -> None:
        self.strict = strict
        self.blocks: dict[int, _Block] = {}
        self.free_lists: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        self.freed: list[tuple[int, int]] = []  # address, bytes
        self.reserved = sum(size for _, _, parts in segments for size, _ in parts)
        at = 2**40
        for small, stream, parts in segments:
            before = None
            for size, state in parts:
                block = self.blocks[at] = _Block(at, size, stream, small, state, before=before)
                if before is not None:
                    before.after = block
                if state == "inactive":
                    insort(self.free_lists[small], (stream, size, at))
                before, at = block, at + size
            at += 2**30

    def cuda_free(self, block: _Block) -> None:
        part = block.before is not None or block.after is not None
        if self.strict and (part or block.state != "inactive"):
            raise ValueError(f"cuda_free of the block at {block.address}, which is a part of a segment that is in use")
        self.free_lists[block.small].remove((block.stream, block.size, block.address))
        del self.blocks[block.address]
        self.reserved -= block.size
        self.freed.append((block.address, block.size))

    def state(self) -> tuple[dict, list, int]:
        """What an answer may not change but by cuda_free."""
        lists = {small: list(keys) for small, keys in self.free_lists.items()}
        ends = [
            (b.address, b.size, b.state, b.before and b.before.address, b.after and b.after.address)
            for b in self.blocks.values()
        ]
        return lists, ends, self.reserved


def _whole(cache: _Cache) -> list[tuple[int, int]]:
    """Oracle: address and bytes of the segments that are one free block, in the order in which they go back."""
    segments = [b for b in cache.blocks.values() if b.state == "inactive" and b.before is None and b.after is None]
    return [(b.address, b.size) for b in sorted(segments, key=lambda b: (b.small, b.stream, b.size, b.address))]


def _give_back(allocator: Any) -> int:
    """Stand-in."""
    before = allocator.reserved
    for small in (False, True):
        for block in [allocator.blocks[address] for _, _, address in allocator.free_lists[small]]:
            if not (block.before or block.after):
                allocator.cuda_free(block)
    return before - allocator.reserved


def _caches(dice: random.Random, pools: Sequence[bool], split: bool) -> list[Layout]:
    """Segments by chance: none, one, many; `split`: some with blocks in use, whose free blocks have such neighbours."""
    in_use = ("active_allocated", "active_pending_free")
    shapes = [["free"], ["free"], ["used"], ["free", "used"], ["used", "free"], ["free", "used", "free"]]
    shapes += [["used", "free", "used"], ["used", "used"]]
    found: list[Layout] = []
    for number in (0, 1, 2, 3, 7, 12):
        for _ in range(4):
            segments = []
            for _ in range(number):
                small = dice.choice(pools)
                shape = dice.choice(shapes) if split else ["free"]
                unit = 512 if small else MIB
                parts = [
                    (unit * dice.randint(2, 9), "inactive" if part == "free" else dice.choice(in_use)) for part in shape
                ]
                segments.append((small, dice.choice((0, 0, 3)), parts))
            found.append(segments)
    return found


def _show(segments: Layout) -> str:
    rows = [
        f"{'small' if small else 'large'}, stream {stream}: " + " | ".join(f"{state} {size}" for size, state in parts)
        for small, stream, parts in segments
    ]
    return "segments: " + ("; ".join(rows) or "none")


@exercise(
    "15-07.1",
    "Give back what is cached",
    points=10,
    demands=5,
    stand_in=lambda: _give_back,
    stand_in_name="a finished give_back",
)
def give_back(trial: Trial, answer: Any) -> None:
    """`answer(allocator)` calls cuda_free for each segment that is one free block and returns their bytes."""
    dice = random.Random(1)

    def run(segments: Layout, strict: bool = True) -> tuple[_Cache, list[tuple[int, int]], Any]:
        cache = _Cache(segments, strict)
        want = _whole(cache)
        return cache, want, answer(cache)

    items = {
        "every free segment of the large pool": (False, "which of these segments did your loop not see, and why?", 2),
        "every free segment of the small pool": (True, "which of these segments did your loop not see, and why?", 2),
    }
    for item, (small, hint, see) in items.items():
        with trial.group(item, hint=hint, see=see):
            for segments in _caches(dice, [small], split=False) + _caches(dice, [small], split=True):
                cache, want, _ = run(segments, strict=False)
                left = sorted(set(want) - set(cache.freed))
                trial.equal(f"(address, bytes) of what stayed; {_show(segments)}", left, [])
    with trial.group(
        "a segment with a block in use stays", hint="look at this segment, block by block", see=1, free=True
    ):
        for segments in _caches(dice, [False, True], split=True):
            cache, want, _ = trial.call(_show(segments), lambda segments=segments: run(segments))
            trial.equal(f"what went back too much; {_show(segments)}", sorted(set(cache.freed) - set(want)), [])
            rest, kept = _Cache(segments), cache.state()
            for address, _ in cache.freed:
                rest.cuda_free(rest.blocks[address])
            hint = "what changes the allocator beside cuda_free?"
            for part, now, then in zip(("free lists", "blocks", "bytes reserved"), kept, rest.state(), strict=True):
                if part == "free lists":
                    now, then = (
                        {"small" if small else "large": keys for small, keys in one.items()} for one in (now, then)
                    )
                trial.equal(f"{part} afterwards; {_show(segments)}", now, then, hint=hint)
    with trial.group(
        "the order: the large pool first, each pool as in its list", hint="read the task on the order", free=True
    ):
        for segments in _caches(dice, [False, True], split=False):
            number = {address: n for n, address in enumerate(_Cache(segments).blocks, start=1)}
            cache, want, _ = run(segments)
            right = [pair for pair in want if pair in cache.freed]
            shown = [", ".join(str(number[address]) for address, _ in pairs) for pairs in (right, cache.freed)]
            case = f"numbers of the segments in the order in which they went back; {_show(segments)}"
            trial.that(case, cache.freed == right, expected=shown[0], got=shown[1])
    with trial.group("the bytes given back are returned, an int", hint="print what you return beside what went back"):
        for segments in _caches(dice, [False, True], split=False):
            cache, _, got = run(segments)
            trial.equal(_show(segments), got, sum(size for _, size in cache.freed))
            trial.equal(f"a second call; {_show(segments)}", answer(cache), 0)


# ---------------------------------------------------------------- 15-07.2

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BEFORE = {  # what the message says in front of each number
    "requested": "Tried to allocate ",
    "capacity": "has a total capacity of ",
    "free": " of which ",
}


def _message(gpu: int, requested: str, capacity: str, free: str, in_use: str, allocated: str, cached: str) -> str:
    return (
        f"CUDA out of memory. Tried to allocate {requested}. GPU {gpu} has a total capacity of {capacity} of which "
        f"{free} is free. Including non-PyTorch memory, this process has {in_use} memory in use. Of the allocated "
        f"memory {allocated} is allocated by PyTorch, and {cached} is reserved by PyTorch but unallocated. If reserved "
        "but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation."
    )


def _post_mortem(message: str, snapshot: dict) -> dict[str, Any]:
    """Oracle: cut out what follows the words before each number; add up block by block."""
    found: dict[str, Any] = {}
    for key, words in _BEFORE.items():
        number, unit = message[message.index(words) + len(words) :].split()[:2]
        found[key] = float(number) * _UNITS[unit.rstrip(".")]
    place = message.index(". GPU ") + len(". GPU ")
    gpu = int(message[place : message.index(" has a total", place)])
    found |= {"allocated": 0, "reserved": 0, "inactive_split_bytes": 0, "largest_hole": 0}
    for segment in snapshot["segments"]:
        for block in segment["blocks"] if segment["device"] == gpu else ():
            size, free = block["size"], block["state"] == "inactive"
            found["reserved"] += size
            found["allocated"] += size * (block["state"] == "active_allocated")
            found["inactive_split_bytes"] += size * (free and size < segment["total_size"])
            found["largest_hole"] = max(found["largest_hole"], size * free)
    found["outside"] = found["capacity"] - found["free"] - found["reserved"]
    found["verdict"] = "held elsewhere"
    if found["free"] + found["reserved"] - found["allocated"] >= found["requested"]:
        found["verdict"] = "fragmented"
    if found["requested"] + found["allocated"] > found["capacity"]:
        found["verdict"] = "does not fit"
    return found


def _segments(dice: random.Random, gpu: int, shapes: Sequence[Sequence[tuple[int, str]]]) -> list[dict]:
    """Segments of a GPU. As in a real one, a block is larger than what was requested of it."""
    found = []
    for n, parts in enumerate(shapes):
        blocks, at = [], (n + 1) * 2**44
        for size, state in parts:
            requested = max(0, size - dice.randint(1, 511))
            blocks.append({"address": at, "size": size, "requested_size": requested, "state": state})
            at += size
        total = sum(size for size, _ in parts)
        found.append({"device": gpu, "address": (n + 1) * 2**44, "total_size": total, "blocks": blocks})
        active = sum(size for size, state in parts if state != "inactive")
        used = sum(size for size, state in parts if state == "active_allocated")
        found[-1] |= {"active_size": active, "allocated_size": used, "requested_size": used // 2}
        found[-1] |= {"stream": dice.randrange(3), "segment_type": dice.choice(["small", "large"])}
    return found


def _shapes(dice: random.Random) -> list[list[list[tuple[int, str]]]]:
    """Segments by chance: none, one, many; free blocks in front, behind, between, alone, and none at all."""
    states = ("active_allocated", "active_pending_free")
    kinds = ["f", "u", "fu", "uf", "fuf", "ufu", "uuf", "fufuf", "f", "ufuf"]
    found = [[], [[(2 * MIB, "inactive")]], [[(2 * MIB, "active_allocated")]], [[(4 * MIB, states[1])]]]
    for number in (1, 2, 3, 6):
        for _ in range(6):
            found.append(
                [
                    [
                        (512 * dice.randint(1, 10**6), "inactive" if letter == "f" else dice.choice(states))
                        for letter in dice.choice(kinds)
                    ]
                    for _ in range(number)
                ]
            )
    return found


@exercise(
    "15-07.2",
    "The post-mortem of an OOM",
    points=20,
    demands=12,
    stand_in=lambda: _post_mortem,
    stand_in_name="a finished post_mortem",
)
def post_mortem(trial: Trial, answer: Any) -> None:
    """`answer(message, snapshot)` is a dictionary of bytes and a verdict."""
    dice = random.Random(4)

    def entry(case: str, message: str, segments: list[dict], key: str) -> Any:
        snapshot = {"segments": segments, "device_traces": [], "allocator_settings": {}}
        got = trial.call(case, lambda: answer(message, snapshot), hint="run it on such a message and snapshot")
        return _entry(trial, case, got, key)

    def size() -> str:
        unit = dice.choice(list(_UNITS))
        number = dice.choice([1024, dice.randint(1, 1023)]) if unit == "bytes" else dice.randint(101, 102_400) / 100
        return f"{number} bytes" if unit == "bytes" else f"{number:.2f} {unit}"

    texts = [[size() for _ in range(6)] for _ in range(40)]
    texts += [["512 bytes", "80.00 GiB", "0 bytes", "79.50 GiB", "0 bytes", "0 bytes"]]
    messages = [(gpu := dice.choice([0, 1, 7, 10, 15]), _message(gpu, *sizes)) for sizes in texts]
    for key, words in _BEFORE.items():
        with trial.group(f"{key}, in bytes", hint="look at the number, its unit and the words around it", see=1):
            for gpu, message in messages:
                place, segments = message.index(words), _segments(dice, gpu, [[(512, "inactive")]])
                case = f"in '... {message[place : place + len(words) + 16]} ...'"
                want = _post_mortem(message, {"segments": segments})[key]
                trial.close(case, entry(case, message, segments, key), want, rtol=0.0, atol=0.99)

    hints: dict[str, tuple[str, int | None]] = {
        "allocated": ("which of these blocks count, of which GPU, and which of their numbers?", 2),
        "reserved": ("what is reserved of the driver, blocks or segments?", None),
        "inactive_split_bytes": ("which of these free blocks could go back to the driver?", 3),
        "largest_hole": ("which of these blocks are free, which is the largest, and what if there is none?", 2),
        "outside": ("what does the driver count as taken, and how much of it is PyTorch's?", None),
    }
    for key, (hint, see) in hints.items():
        with trial.group(f"{key}, in bytes", hint=hint):
            for (gpu, message), shapes in zip(itertools.cycle(messages), _shapes(dice), strict=False):
                segments = _segments(dice, gpu, shapes)
                case = f"GPU {gpu}, segments {[[f'{state} {size}' for size, state in parts] for parts in shapes]}"
                want, got = _post_mortem(message, {"segments": segments})[key], entry(case, message, segments, key)
                opened = see if see != 2 or "pending" in case else None
                if key == "outside":
                    trial.close(case, got, want, rtol=0.0, atol=1.99, hint=hint, see=opened)
                else:
                    trial.equal(case, got, want, hint=hint, see=opened)
    with trial.group("only the GPU of the message counts", hint="whose segments are these?"):
        for (gpu, message), shapes in zip(messages, _shapes(dice), strict=False):
            others = [number for number in (0, 1, 5, 10, 11) if number != gpu]
            foreign = [[(3 * MIB, "active_allocated"), (2**38, "inactive"), (512, "active_allocated")]]
            mine = _segments(dice, gpu, shapes)
            segments = [*_segments(dice, dice.choice(others), foreign), *mine]
            segments += _segments(dice, dice.choice(others), [[(2**39, "inactive")]])
            for key in ("allocated", "reserved", "inactive_split_bytes", "largest_hole", "outside", "verdict"):
                case = f"{key} of GPU {gpu}, with segments of GPUs {sorted({s['device'] for s in segments})}"
                trial.equal(case, entry(case, message, segments, key), entry(case, message, mine, key))

    unit = 512 * MIB
    outcomes: dict[str, list[tuple[str, str, list[dict]]]] = {
        "does not fit": [],
        "fragmented": [],
        "held elsewhere": [],
    }
    for requested, free, allocated, cached in itertools.product((2, 3, 6), (0, 1, 2), (0, 2, 5, 6), (0, 1, 2, 4)):
        for near in (0, 1):  # half a unit less is asked: just fits
            asked = requested * 512 - near
            texts_ = [f"{asked:.2f} MiB", *(f"{n / 2:.2f} GiB" for n in (8, free, 8 - free, cached, allocated))]
            message, pending = _message(0, *texts_), 512 * dice.randint(0, 9)
            parts = [(allocated * unit, "active_allocated"), (cached * unit - pending, "inactive")]
            parts = [[part] for part in parts if part[0] > 0]
            parts += [[(pending, "active_pending_free")]] * (pending > 0 and cached > 0)
            segments = _segments(dice, 0, parts)
            case = f"requested {texts_[0]}, capacity 4.00 GiB, free {texts_[2]}; in the snapshot (GiB) allocated "
            case += f"{allocated / 2:.2f}, the rest of reserved {cached / 2:.2f}"
            outcomes[_post_mortem(message, {"segments": segments})["verdict"]].append((case, message, segments))
    ask = "try the three conditions on these numbers, in their order; what of equality?"
    for verdict, rows in outcomes.items():
        with trial.group(f"verdict {verdict!r}", hint=ask):
            for case, message, segments in rows:
                got = entry(case, message, segments, "verdict")
                hint = ask if got in list(outcomes) else "which verdicts does the task name?"
                trial.equal(case, got, verdict, hint=hint)


# ---------------------------------------------------------------- 15-07.3


def _fixed_bytes(model: nn.Module, optimizer: str) -> dict[str, int]:
    """Oracle: over tensors seen by identity."""

    def block(tensor: Tensor) -> int:
        return math.ceil(math.prod(tensor.shape) * tensor.dtype.itemsize / 512) * 512

    parameters = {id(p): p for m in model.modules() for p in m._parameters.values() if p is not None}
    buffers = {id(b): b for m in model.modules() for b in m._buffers.values() if b is not None}
    trained = sum(block(p) for p in parameters.values() if p.requires_grad)
    return {
        "parameters": sum(map(block, parameters.values())),
        "buffers": sum(map(block, buffers.values())),
        "gradients": trained,
        "optimizer": {"sgd": 0, "momentum": 1, "adam": 2}[optimizer] * trained,
    }


class _Tensors(nn.Module):
    """A module that holds these parameters and buffers, some buffers not in its state dict."""

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor] = (), lasting: bool = True) -> None:
        super().__init__()
        for n, tensor in enumerate(parameters):
            trained = tensor.is_floating_point() and n != 1
            self.register_parameter(f"p{n}", nn.Parameter(tensor, requires_grad=trained))
        self.register_parameter("none", None)
        for n, tensor in enumerate(buffers):
            self.register_buffer(f"b{n}", tensor, persistent=lasting)
        self.register_buffer("nothing", None)


def _models() -> dict[str, nn.Module]:
    """What an estimate may stumble over → a model that has it."""
    tied = nn.Sequential(nn.Embedding(50, 10), nn.Linear(10, 50, bias=False))
    tied[1].weight = tied[0].weight
    shared = nn.Sequential(_Tensors([], [torch.ones(300)]), _Tensors([], [torch.ones(2)]))
    shared[1].b0 = shared[0].b0
    with torch.device("meta"):
        meta = nn.Linear(50_000, 50_000)
    stepped = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 40).requires_grad_(False))
    stepped(torch.ones(1, 20)).sum().backward()
    stale = nn.Sequential(nn.Linear(20, 300), nn.Linear(300, 4))
    stale(torch.ones(1, 20)).sum().backward()
    stale[0].requires_grad_(False)
    mixed = [
        torch.ones(n, dtype=t)
        for n, t in ((300, torch.float64), (700, torch.float16), (700, torch.int8), (9, torch.bool))
    ]
    return {
        "one matrix": nn.Linear(128, 128, bias=False),
        "tensors around 512 bytes": _Tensors([torch.ones(n) for n in (129, 128, 127, 1)]),
        "buffers around 512 bytes": _Tensors(
            [], [torch.ones(n, dtype=torch.int8) for n in (511, 512, 513, 1024, 1025)]
        ),
        "a scalar": _Tensors([torch.tensor(1.0)], [torch.tensor(3)]),
        "tensors without elements": _Tensors([torch.ones(0), torch.ones(4, 0), torch.ones(5)], [torch.ones(0)]),
        "no tensors": nn.Sequential(nn.ReLU(), nn.Flatten()),
        "batch norm in evaluation mode": nn.Sequential(nn.Conv2d(3, 200, 1), nn.BatchNorm2d(200)).eval(),
        "buffers that are not persistent": _Tensors([torch.ones(3)], [torch.ones(200), torch.ones(600)], lasting=False),
        "a buffer in two modules": shared,
        "some parameters frozen": nn.Sequential(nn.Linear(10, 10).requires_grad_(False), nn.Linear(10, 7)),
        "all frozen": nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 7)).requires_grad_(False),
        "a tied parameter": tied,
        "bfloat16": nn.Linear(10, 1000, dtype=torch.bfloat16),
        "several dtypes": nn.ModuleDict({"inner": _Tensors(mixed, mixed)}),
        "modules in modules in modules": nn.Sequential(
            nn.Sequential(nn.Sequential(_Tensors([torch.ones(n) for n in (9, 8, 7)], mixed)))
        ),
        "a transposed parameter": _Tensors([torch.ones(3, 500).t(), torch.ones(2, 9)[:, 1:].contiguous()]),
        "gradients that are there already": stepped,
        "frozen after it got a gradient": stale,
        "10 GB on the meta device": meta,
    }


class _Touched(TorchDispatchMode):
    """Notes which operators write to a model's tensors or compute with them, which views and meta tensors don't."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        tensors = [t for p in (*model.parameters(), *model.buffers()) for t in (p, p.grad) if t is not None]
        self.storages = {t.untyped_storage()._cdata for t in tensors}
        self.operators: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        idle = all(isinstance(t, Tensor) and (t.is_meta or self.holds(t)) for t in tree_leaves(out))
        if (func._schema.is_mutable or not idle) and any(map(self.holds, tree_leaves((args, kwargs)))):
            self.operators.append(str(func))
        return out

    def holds(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self.storages


@exercise(
    "15-07.3",
    "Predict the part of a peak that does not depend on the batch",
    points=15,
    demands=5,
    stand_in=lambda: _fixed_bytes,
    stand_in_name="a finished fixed_bytes",
)
def fixed_bytes(trial: Trial, answer: Any) -> None:
    """`answer(model, optimizer)` is the bytes of parameters, buffers, gradients and optimizer state."""
    cases = [(name, model, opt) for name, model in _models().items() for opt in ("sgd", "momentum", "adam")]
    before = {name: _state(model) for name, model, _ in cases}
    hints: dict[str, tuple[str, int | None]] = {
        "parameters": ("add up the blocks of this model's parameters on paper; as which type?", 1),
        "buffers": ("which tensors does this model hold beside its parameters?", None),
        "gradients": ("which tensors of this model get a gradient, and of what size?", 1),
        "optimizer": ("which tensors does this optimizer keep, for which parameters?", 1),
    }
    for key, (hint, see) in hints.items():
        with trial.group(f"{key}, in bytes", hint=hint, see=see):
            for name, model, optimizer in cases:
                case, twice = f"{name}, {optimizer}", name in ("a tied parameter", "a buffer in two modules")
                got = trial.call(case, lambda m=model, o=optimizer: answer(m, o), hint="run it on such a model")
                found = _entry(trial, case, got, key)
                trial.equal(case, found, _fixed_bytes(model, optimizer)[key], hint=hint, see=2 if twice else see)
    with trial.group(
        "nothing is computed, and the model stays as it is", hint="what do shapes and dtypes tell alone?", free=True
    ):
        for name, model, optimizer in cases:
            with _Touched(model) as touched:
                answer(model, optimizer)
            reads = {"aten._local_scalar_dense.default": "a value read by Python"}
            operators = ", ".join(reads.get(one, one) for one in dict.fromkeys(touched.operators))
            case = f"operators that worked on tensors of the model; {name}, {optimizer}"
            trial.that(case, not operators, expected="none", got=operators)
            changed = [what for what, value in _state(model).items() if before[name].get(what) != value]
            case, hint = f"what has changed in the model; {name}, {optimizer}", "which line changes the model?"
            trial.that(case, not changed, expected="nothing", got=", ".join(changed), hint=hint)


def _state(model: nn.Module) -> dict[str, Any]:
    """What could change without any operator."""
    found: dict[str, Any] = {
        f"{name or 'model'}.{key}": len(value) if isinstance(value, dict) else value
        for name, m in model.named_modules()
        for key, value in vars(m).items()  # hooks among them
    }
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        found |= {name: id(p), f"{name}.grad": id(p.grad), f"{name}.requires_grad": p.requires_grad}
        found[f"attributes of {name}"] = sorted(vars(p))
    return found


# ---------------------------------------------------------------- 15-07.4


def _matmul_cost(
    m: int, k: int, n: int, tile: int, itemsize: int, peak: float, bandwidth: float
) -> dict[str, float | str]:
    """Oracle, tile by tile."""
    flops = elements = 0
    for top in range(0, m, tile):
        for left in range(0, n, tile):
            rows, columns = min(tile, m - top), min(tile, n - left)
            flops += 2 * rows * columns * k
            elements += rows * k + k * columns + rows * columns
    moved = itemsize * elements
    computing, moving = flops / peak, moved / bandwidth
    found = {"flops": flops, "bytes": moved, "intensity": flops / moved, "seconds": max(computing, moving)}
    return found | {"limit": "bytes" if moving > computing else "arithmetic"}


@exercise(
    "15-07.4",
    "A matmul on the roofline",
    points=15,
    demands=6,
    stand_in=lambda: _matmul_cost,
    stand_in_name="a finished matmul_cost",
)
def matmul_cost(trial: Trial, answer: Any) -> None:
    """`answer(m, k, n, tile, itemsize, peak, bandwidth)` is a dictionary: flops, bytes, intensity, seconds, limit."""
    dice = random.Random(5)
    shapes = [(1, 1, 1, 1), (8, 8, 8, 8), (8, 8, 8, 16), (1, 64, 64, 16), (64, 64, 1, 16), (64, 1, 64, 16)]
    shapes += [(7, 5, 9, 4), (16, 12, 40, 8), (33, 3, 31, 32), (30, 50, 20, 1), (17, 4, 64, 16), (64, 4, 17, 16)]
    shapes += [(*(dice.randint(1, 90) for _ in range(3)), dice.choice((1, 3, 8, 16, 100))) for _ in range(30)]
    cases = [
        (*shape, dice.choice((1, 2, 4, 8)), 10.0 ** dice.randint(0, 5), 10.0 ** dice.randint(0, 4)) for shape in shapes
    ]
    cases += [(*shape, 2, 989e12, 3.35e12) for shape in shapes[:6]]  # a real device: seconds are small numbers
    hints: dict[str, tuple[str, int | None]] = {
        "flops": ("how many multiplications and additions has a product of these shapes, and as which type?", None),
        "bytes": ("count this case on paper: how often is each matrix read or written, and as which type?", 1),
        "intensity": ("what is divided by what?", None),
        "seconds": ("how long do the arithmetic and the bytes take in this case?", 2),
    }

    def entry(case: tuple, key: str) -> Any:
        name = _call("matmul_cost", case)
        got = trial.call(name, lambda: answer(*case), hint="run it on this case")
        return _entry(trial, name, got, key)

    for key, (hint, see) in hints.items():
        kind = ", an int" if key in ("flops", "bytes") else ""
        with trial.group(f"{key}{kind}", hint=hint, see=see):
            for case in cases:
                got, want = entry(case, key), _matmul_cost(*case)[key]
                if kind:
                    trial.equal(_call("matmul_cost", case), got, want)
                else:
                    trial.close(_call("matmul_cost", case), got, want, rtol=1e-9, atol=0.0)
    balanced = []  # as long for the one as for the other, and a little longer for either
    for case in cases:
        cost = _matmul_cost(*case)
        balanced += [(*case[:5], float(cost["flops"] * by), float(cost["bytes"])) for by in (1, 1 + 2**-20, 1 - 2**-20)]
    # a tie that every way of writing it sees as one
    balanced = [case for case in balanced if case[5] / case[6] * case[6] == case[5]]
    for limit in ("bytes", "arithmetic"):
        with trial.group(f"limit {limit!r}"):
            for case in (*cases, *balanced):
                if _matmul_cost(*case)["limit"] == limit:
                    got, hint = entry(case, "limit"), "which takes longer in this case? and what if neither does?"
                    hint = hint if got in ["bytes", "arithmetic"] else "which two words does the task name?"
                    trial.equal(_call("matmul_cost", case), got, limit, hint=hint)


# ---------------------------------------------------------------- 15-07.5


class _Op(NamedTuple):
    name: str
    engine: str
    stream: str
    seconds: float
    after: tuple[str, ...] = ()


def _prefetch(batches: int, copy: float, compute: float, depth: int) -> list[Any]:
    """Stand-in: copies on one stream, compute on the other, events both ways."""
    ops = []
    for k in range(batches):
        reused = (f"compute {k - depth}",) if k >= depth else ()
        ops.append(_Op(f"copy {k}", "copy", "loader", copy, reused))
        ops.append(_Op(f"compute {k}", "compute", "main", compute, (f"copy {k}",)))
    return ops


def _end(ops: Sequence[Any]) -> float:
    """When the last compute ends; as in CUDA, waiting for what was not issued yet is no waiting."""
    free: dict[tuple[str, str], float] = {}
    ends: dict[str, float] = {}
    for op in ops:
        keys = ("engine", op.engine), ("stream", op.stream)
        start = max([0.0, *(free.get(key, 0.0) for key in keys), *(ends.get(name, 0.0) for name in op.after)])
        ends[op.name] = start + op.seconds
        free |= dict.fromkeys(keys, ends[op.name])
    return max((end for name, end in ends.items() if name.startswith("compute")), default=0.0)


def _best(copies: Sequence[float], computes: Sequence[float], depth: int) -> float:
    """The shortest possible time for batches whose ops take so long, by recurrence."""
    copied, computed = [0.0], [0.0] * depth
    for copy, compute in zip(copies, computes, strict=True):
        copied.append(max(copied[-1], computed[-depth]) + copy)
        computed.append(max(computed[-1], copied[-1]) + compute)
    return computed[-1]


def _ordered(ops: Sequence[Any]) -> dict[str, set[str]]:
    """Op → all that have ended when it starts, whatever takes how long: by its stream, by `after`, and by theirs."""
    last: dict[str, str] = {}  # stream → its last op
    found: dict[str, set[str]] = {}
    for op in ops:
        waits = [name for name in (*op.after, last.get(op.stream)) if name in found]
        found[op.name] = {name for wait in waits for name in (wait, *found[wait])}
        last[op.stream] = op.name
    return found


@exercise(
    "15-07.5",
    "The schedule of a prefetcher",
    points=15,
    demands=6,
    stand_in=lambda: _prefetch,
    stand_in_name="a finished prefetch_schedule",
)
def prefetch_schedule(trial: Trial, answer: Any) -> None:
    """`answer(batches, copy, compute, depth)` is a list of Ops that overlap without a race."""
    dice = random.Random(6)
    cases = [(0, 1.0, 2.0, 1), (1, 2.0, 3.0, 2), (2, 2.0, 3.0, 1), (3, 1.0, 1.0, 3), (2, 3.0, 1.0, 5), (5, 2.0, 3.0, 2)]
    cases += [(4, 0.0, 2.0, 2), (4, 2.0, 0.0, 2), (12, 1.0, 1.0, 7)]
    for _ in range(30):
        copy, compute = dice.choice([0.5, 1.0, 2.0, 2.75]), dice.choice([0.5, 1.0, 2.0, 4.25])
        cases.append((dice.randint(2, 9), copy, compute, dice.randint(1, 4)))
    with trial.group("a list with a copy and a compute for each batch, and no others", hint="print the names in order"):
        for case in cases:
            name, wanted = (
                _call("prefetch_schedule", case),
                [f"{kind} {k}" for kind in ("compute", "copy") for k in range(case[0])],
            )
            ops = trial.call(name, lambda case=case: answer(*case), hint="run it on this case")
            kind, hint = f"a {type(ops).__name__}", "what does the task say is returned?"
            trial.that(name, isinstance(ops, list), expected="a list", got=kind, hint=hint)
            others = [op for op in ops if not all(hasattr(op, field) for field in _Op._fields)]
            trial.that(name, not others, expected="an `Op` in each entry", got=repr(others[:1]), hint=hint)
            trial.equal(_call("names of prefetch_schedule", case), sorted(op.name for op in ops), sorted(wanted))
    with trial.group("engine and duration of each op", hint="compare this op with the sentence on the two kinds"):
        for case in cases:
            durations = {"copy": case[1], "compute": case[2]}
            for op in answer(*case):
                kind = op.name.split()[0]
                where = f"of {op.name!r}, {_call('prefetch_schedule', case)}"
                trial.equal(f"engine {where}", op.engine, kind)
                trial.equal(f"seconds {where}", op.seconds, durations[kind])
    with trial.group(
        "an op waits for earlier ones only", hint="what does this op wait for, and where does that stand?"
    ):
        for case in cases:
            seen: set[str] = set()
            for op in answer(*case):
                unknown = [name for name in op.after if name not in seen]
                got = f"also {', '.join(map(repr, unknown))}"
                if isinstance(op.after, str):
                    got = f"the letters of {op.after!r}, which isn't a tuple"
                name = f"what {op.name!r} waits for; {_call('prefetch_schedule', case)}"
                trial.that(name, not unknown, expected="ops that stand before it", got=got)
                seen.add(op.name)
    with trial.group(
        "a compute starts after its copy, whatever the durations", hint="who tells one stream of the other?", see=1
    ):
        for case in cases:
            before = _ordered(answer(*case))
            for k in range(case[0]):
                ends = f"copy {k}" in before[f"compute {k}"]
                name = f"'compute {k}', {_call('prefetch_schedule', case)}"
                trial.that(
                    name, ends, expected=f"starts after 'copy {k}'", got="with a longer copy it starts before its end"
                )
    with trial.group(
        "no buffer is overwritten while it is read",
        hint="which buffer does this copy write to, and who reads it?",
        see=1,
    ):
        for case in cases:
            before = _ordered(answer(*case))
            for k in range(case[3], case[0]):
                reader = f"compute {k - case[3]}"
                name = f"'copy {k}', {_call('prefetch_schedule', case)}"
                ends = reader in before[f"copy {k}"]
                trial.that(
                    name,
                    ends,
                    expected=f"starts after {reader!r}",
                    got="with a longer compute it starts before its end",
                )
    with trial.group(
        "as fast as it can be", hint="draw it with draw_timeline: which op waits for more than it must?", see=2
    ):
        for case in cases:
            batches, copy, compute, depth = case
            name, spans = _call("prefetch_schedule", case), [([copy] * batches, [compute] * batches)]
            for _ in range(2):  # the same ops, of which some take longer than was said
                spans.append(tuple([usual * dice.choice([1, 1, 3]) for usual in usuals] for usuals in spans[0]))
            at = dice.randrange(max(1, batches - depth))
            spans.append(
                (
                    [copy * (1 + 50 * (k == at + depth - 1)) for k in range(batches)],
                    [compute * (1 + 99 * (k == at)) for k in range(batches)],
                )
            )
            for copies, computes in spans:
                took = {
                    f"{kind} {k}": s
                    for kind, some in (("copy", copies), ("compute", computes))
                    for k, s in enumerate(some)
                }
                ops = [_Op(op.name, op.engine, op.stream, took[op.name], op.after) for op in answer(*case)]
                got, best = _end(ops), _best(copies, computes, depth)
                longer = [
                    f"{op} {took[op]:g}"
                    for kind, some, usual in (("copy", copies, copy), ("compute", computes, compute))
                    for op in (f"{kind} {k}" for k in range(len(some)))
                    if took[op] != usual
                ]
                trial.that(
                    f"{name}, then these took longer: {', '.join(longer)}" if longer else name,
                    got <= best + 1e-9,
                    expected=f"the last compute ends at {best:g}",
                    got=f"{got:g}",
                )


# ---------------------------------------------------------------- 15-07.6

Life = tuple[int, int, int]
SLACK = 0.06  # by which an arena may be longer than the bound


def _lives(name: str, first: int, last: int) -> list[Life]:
    """The lives of the blocks that a piece of a recorded history allocates."""
    found: list[list[int]] = []
    number_at: dict[int, int] = {}
    for time, event in enumerate(read_history(name)["trace"][first:last]):
        if event["action"] == "alloc":
            number_at[event["addr"]] = len(found)
            found.append([time, last - first, max(512, -(-event["size"] // 512) * 512)])
        elif event["action"] == "free_completed" and event["addr"] in number_at:
            found[number_at.pop(event["addr"])][1] = time
    return [(birth, death, size) for birth, death, size in found]


def _bound(tensors: Sequence[Life]) -> int:
    """The most bytes that are there at one event."""
    changes = sorted([(birth, size) for birth, _, size in tensors] + [(death, -size) for _, death, size in tensors])
    return max(itertools.accumulate((change for _, change in sorted(changes)), initial=0))


def _by_chance(dice: random.Random) -> list[list[Life]]:
    """None, one, many; lives that touch, are the same, lie in each other, last for ever, one event long."""
    cases: list[list[Life]] = [
        [],
        [(0, 5, 512)],
        [(3, 4, 1024)],
        [(0, 5, 512), (5, 9, 512)],
        [(5, 9, 1024), (0, 5, 512)],
        [(0, 5, 512), (4, 9, 1024)],
        [(0, 9, 512), (4, 5, 512)],
        [(0, 4, 512), (0, 4, 512), (0, 4, 512)],
        [(0, 2, 512), (1, 3, 1024), (2, 4, 512), (3, 5, 2048)],
    ]
    for count in (2, 3, 5, 9, 20, 40):
        for _ in range(6):
            tensors = []
            for _ in range(count):
                birth = dice.randrange(2 * count)
                length = dice.choice((1, 2, dice.randint(1, count), 3 * count))
                tensors.append((birth, birth + length, 512 * dice.choice((1, 2, dice.randint(1, 40)))))
            cases.append(sorted(tensors) if dice.random() < 0.5 else tensors)
    return cases


@exercise("15-07.6", "Stretch: plan the addresses of a step", points=25, demands=5)
def plan(trial: Trial, answer: Any) -> None:
    """`answer(tensors)` is a list of offsets at which tensors that are there together share no byte."""
    cases = _by_chance(random.Random(6))
    shown = {id(tensors): f"plan({tensors})" if len(tensors) < 10 else f"{len(tensors)} tensors" for tensors in cases}
    with trial.group("a list with an offset for each tensor", hint="compare what you return with the task", free=True):
        for tensors in cases:
            name = shown[id(tensors)]
            got = trial.call(name, lambda tensors=tensors: answer(list(tensors)), hint="run it on this case")
            trial.that(name, isinstance(got, list), expected="a list", got=f"a {type(got).__name__}")
            trial.equal(f"offsets of {name}", len(got), len(tensors))
    with trial.group(
        "offsets are ints, at least 0 and multiples of 512", hint="which of the three isn't this offset, and why?"
    ):
        for tensors in cases:
            for offset in answer(list(tensors)):
                whole = (
                    isinstance(offset, Integral) and not isinstance(offset, bool) and offset >= 0 and offset % 512 == 0
                )
                trial.that(shown[id(tensors)], whole, expected="an int ≥ 0, a multiple of 512", got=repr(offset))
    hint = "draw these two lives on paper; is each offset at its tensor's place in the list?"
    with trial.group("tensors that are there together share no byte", hint=hint, see=1):
        for tensors in cases:
            rows = list(zip(answer(list(tensors)), tensors, strict=True))
            for (p, one), (q, other) in itertools.combinations(rows, 2):
                together = max(one[0], other[0]) < min(one[1], other[1])
                apart = p + one[2] <= q or q + other[2] <= p
                trial.that(
                    shown[id(tensors)],
                    apart or not together,
                    expected=f"{one} and {other} apart",
                    got=f"bytes {p} to {p + one[2]} and {q} to {q + other[2]}",
                )
    with trial.group("tensors stays as it is", hint="which of your lines changes the list that was given?", free=True):
        for tensors in cases:
            given = list(tensors)
            answer(given)
            if given != tensors:
                got = "the same tensors in another order" if sorted(given) == sorted(tensors) else f"{given}"[:200]
                trial.that(shown[id(tensors)], False, expected=f"{tensors}"[:200], got=got)
            trial.equal(shown[id(tensors)], given, tensors)
    hint = "which bytes does your plan leave unused, and what of another order?"
    pieces = [
        ("transformer_inference", 0, 240),
        ("transformer_inference", 500, 980),
        ("transformer_training", 2400, 3000),
    ]
    with trial.group(f"an arena at most {SLACK:.0%} longer than it must be", hint=hint, see=2):
        for piece in pieces:
            tensors = _lives(*piece)
            bound = _bound(tensors)
            arena = max(place + size for place, (_, _, size) in zip(answer(list(tensors)), tensors, strict=True))
            trial.that(
                f"{piece[0]}, events {piece[1]} to {piece[2]}",
                arena <= (1 + SLACK) * bound,
                expected=f"at most {(1 + SLACK) * bound / MIB:.1f} MiB, where {bound / MIB:.1f} are there at one event",
                got=f"{arena / MIB:.1f} MiB",
            )
