"""Checks of the exercises in 15-07, CUDA Memory Management & GPU Internals."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.checks.exercise import exercise
from shared.checks.trial import Trial
from shared.checks.words import Sample, samples, unchanged
from shared.histories import read_history

MIB, GIB = 2**20, 2**30


def _entry(got: Any, key: str) -> Any:
    """The entry of what was returned, or words for what is there instead."""
    has = isinstance(got, Mapping) and key in got
    return got[key] if has else f"no dictionary with {key!r}: a {type(got).__name__}"


# ---- 15-07.1


def _fixed_bytes(model: nn.Module, optimizer: str) -> dict[str, int]:
    """The reference, over tensors seen by identity."""

    def blocks(tensors: Mapping[int, Tensor]) -> int:
        return sum(math.ceil(math.prod(t.shape) * t.dtype.itemsize / 512) * 512 for t in tensors.values())

    parameters = {id(p): p for m in model.modules() for p in m._parameters.values() if p is not None}
    buffers = {id(b): b for m in model.modules() for b in m._buffers.values() if b is not None}
    trained = blocks({key: p for key, p in parameters.items() if p.requires_grad})
    states = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer]
    found = {"parameters": blocks(parameters), "buffers": blocks(buffers), "gradients": trained}
    return {**found, "optimizer": states * trained}


class _Tensors(nn.Module):
    """A module that holds these parameters (the second one frozen) and these buffers."""

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor] = (), lasting: bool = True) -> None:
        super().__init__()
        for n, tensor in enumerate(parameters):
            self.register_parameter(f"p{n}", nn.Parameter(tensor, tensor.is_floating_point() and n != 1))
        for n, tensor in enumerate(buffers):
            self.register_buffer(f"b{n}", tensor, persistent=lasting)
        self.register_parameter("none", None)
        self.register_buffer("nothing", None)


def _models() -> dict[str, nn.Module]:
    """What an estimate may stumble over → a model that has it."""
    tied = nn.Sequential(nn.Embedding(50, 10), nn.Linear(10, 50, bias=False))
    tied[1].weight = tied[0].weight
    shared = nn.Sequential(_Tensors([], [torch.ones(300)]), _Tensors([], [torch.ones(2)]))
    shared[1].b0 = shared[0].b0
    stale = nn.Sequential(nn.Linear(20, 300), nn.Linear(300, 4))
    stale(torch.ones(1, 20)).sum().backward()
    stale[0].requires_grad_(False)
    kinds = {torch.float64: 300, torch.float16: 700, torch.int8: 700, torch.bool: 9}
    mixed = [torch.ones(n, dtype=kind) for kind, n in kinds.items()]
    deep = _Tensors([torch.ones(n) for n in (9, 8, 7)], mixed)
    return {
        "one matrix": nn.Linear(128, 128, bias=False),
        "tensors around 512 bytes": _Tensors([torch.ones(n) for n in (129, 128, 127, 1)]),
        "buffers around 512 bytes": _Tensors([], [torch.ones(n, dtype=torch.int8) for n in (511, 512, 513, 1025)]),
        "tensors without elements": _Tensors([torch.ones(0), torch.ones(4, 0), torch.ones(5)], [torch.ones(0)]),
        "no tensors": nn.Sequential(nn.ReLU(), nn.Flatten()),
        "batch norm in evaluation mode": nn.Sequential(nn.Conv2d(3, 200, 1), nn.BatchNorm2d(200)).eval(),
        "buffers that are not saved": _Tensors([torch.ones(3)], [torch.ones(200), torch.ones(600)], lasting=False),
        "a buffer in two modules": shared,
        "some parameters frozen": nn.Sequential(nn.Linear(10, 10).requires_grad_(False), nn.Linear(10, 7)),
        "all frozen": nn.Linear(10, 10).requires_grad_(False),
        "a tied parameter": tied,
        "bfloat16": nn.Linear(10, 1000, dtype=torch.bfloat16),
        "several dtypes": _Tensors(mixed, mixed),
        "modules in modules in modules": nn.Sequential(nn.Sequential(nn.Sequential(deep))),
        "frozen after it got a gradient": stale,
        "10 GB on the meta device": nn.Linear(50_000, 50_000, device="meta"),
    }


class _Computed(TorchDispatchMode):
    """Notes the operators that compute with a model's tensors or write to them; views don't."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        self.operators: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not func.is_view and any(x.untyped_storage()._cdata in self.storages for x in given):
            self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


@exercise(
    "15-07.1",
    "Predict the part that doesn't depend on the batch",
    points=15,
    demands=5,
    stand_in=lambda: _fixed_bytes,
    stand_in_name="a finished fixed_bytes",
)
def fixed_bytes(trial: Trial, answer: Any) -> None:
    """`answer(model, optimizer)` is the bytes of parameters, buffers, gradients and optimizer state."""
    cases = [(name, model, kind) for name, model in _models().items() for kind in ("sgd", "momentum", "adam")]
    for key, hint in {
        "parameters": "add up the blocks of this model's parameters on paper; as which type?",
        "buffers": "which tensors does this model hold beside its parameters?",
        "gradients": "which tensors of this model get a gradient, and of what size?",
        "optimizer": "which tensors does this optimizer keep, for which parameters?",
    }.items():
        with trial.group(f"{key}, in bytes", hint=hint):
            for name, model, kind in cases:
                see = 2 if name in ("a tied parameter", "a buffer in two modules") else 1
                want = _fixed_bytes(model, kind)[key]
                trial.equal(f"{name}, {kind}", _entry(answer(model, kind), key), want, hint=hint, see=see)
    hint = "what do shapes and dtypes tell alone?"
    with trial.group("nothing is computed, and the model stays as it is", hint=hint, free=True):
        for name, model, kind in cases:
            tensors = [*model.parameters(), *model.buffers()]

            def own(tensors=tensors):
                return [[sorted(vars(t)), t.grad is not None] for t in tensors]

            before = own()
            kept = [] if tensors and tensors[0].is_meta else [model]  # a meta tensor has nothing to compare
            with unchanged(trial, f"{name}, {kind}", *kept), _Computed(tensors) as computed:
                answer(model, kind)
            trial.equal(f"operators on tensors of the model; {name}, {kind}", computed.operators, [])
            trial.equal(f"attributes and gradients of its tensors; {name}, {kind}", own(), before)


# ---- 15-07.2

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": MIB, "GiB": GIB}


def _message(gpu: int, requested: str, capacity: str, free: str, *others: str) -> str:
    in_use, allocated, cached = others or ("1.00 GiB",) * 3
    return (
        f"CUDA out of memory. Tried to allocate {requested}. GPU {gpu} has a total capacity of {capacity} of which "
        f"{free} is free. Including non-PyTorch memory, this process has {in_use} memory in use. Of the allocated "
        f"memory {allocated} is allocated by PyTorch, and {cached} is reserved by PyTorch but unallocated. If reserved "
        "but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation."
    )


def _post_mortem(message: str, snapshot: dict) -> dict[str, Any]:
    """The reference: cut out what follows the words before each number; add up block by block."""
    found: dict[str, Any] = {}
    words = {"requested": "allocate ", "capacity": "total capacity of ", "free": " of which "}
    for key, before in words.items():
        number, unit = message.partition(before)[2].split()[:2]
        found[key] = float(number) * _UNITS[unit.rstrip(".")]
    gpu = int(message.partition(". GPU ")[2].split()[0])
    found |= {"allocated": 0, "reserved": 0, "largest_hole": 0}
    for block in [b for s in snapshot["segments"] if s["device"] == gpu for b in s["blocks"]]:
        found["reserved"] += block["size"]
        found["allocated"] += block["size"] * (block["state"] == "active_allocated")
        found["largest_hole"] = max(found["largest_hole"], block["size"] * (block["state"] == "inactive"))
    verdicts = {
        "capped": found["free"] >= found["requested"],
        "does not fit": found["requested"] + found["allocated"] > found["capacity"],
        "fragmented": found["free"] + found["reserved"] - found["allocated"] >= found["requested"],
        "held elsewhere": True,
    }
    return {**found, "verdict": next(verdict for verdict, holds in verdicts.items() if holds)}


def _segment(gpu: int, *parts: tuple[int, str]) -> dict:
    """A segment; as in a real one, a block is larger than what was requested of it."""
    blocks = [{"size": size, "requested_size": max(0, size - 9), "state": state} for size, state in parts]
    return {"device": gpu, "total_size": sum(size for size, _ in parts), "blocks": blocks}


def _segments(dice: random.Random, gpu: int) -> list[dict]:
    """None, one or many, with free blocks in front, behind, between, alone, and with none."""
    states = {"f": ["inactive"], "u": ["active_allocated", "active_allocated", "active_pending_free"]}
    kinds = ["f", "u", "fu", "uf", "fuf", "ufu", "uuf", "fufuf"]
    shapes = [dice.choice(kinds) for _ in range(dice.choice((0, 1, 1, 2, 3, 6)))]
    return [
        _segment(gpu, *((512 * dice.randint(1, 10**6), dice.choice(states[letter])) for letter in shape))
        for shape in shapes
    ]


def _verdict_cases(dice: random.Random) -> dict[str, list[Sample]]:
    """Verdict → cases, at each threshold and beside it, in halves of a GiB on a GPU of 4 GiB."""
    found: dict[str, list[Sample]] = {}
    for requested, free, allocated, cached in itertools.product((1, 2, 3, 6), (0, 1, 2, 3), (0, 2, 5, 6), (0, 1, 2, 4)):
        for less in (0, 1):  # a MiB less is asked: just fits
            asked = f"{512 * requested - less:.2f} MiB"
            message = _message(0, asked, "4.00 GiB", f"{free / 2:.2f} GiB")
            pending = 512 * dice.randint(0, 9) * (cached > 0)
            parts = [(512 * MIB * allocated, "active_allocated"), (pending, "active_pending_free")]
            parts.append((512 * MIB * cached - pending, "inactive"))
            snapshot = {"segments": [_segment(0, part) for part in parts if part[0]]}
            text = f"requested {asked}, capacity 4.00 GiB, free {free / 2:.2f} GiB, allocated {allocated / 2:.2f} GiB, "
            sample = Sample(text + f"the rest of reserved {cached / 2:.2f} GiB", message, snapshot)
            found.setdefault(_post_mortem(message, snapshot)["verdict"], []).append(sample)
    return found


@exercise(
    "15-07.2",
    "The post-mortem of an OOM",
    points=20,
    demands=11,
    stand_in=lambda: _post_mortem,
    stand_in_name="a finished post_mortem",
)
def post_mortem(trial: Trial, answer: Any) -> None:
    """`answer(message, snapshot)` is a dictionary of bytes and a verdict."""
    dice = random.Random(4)

    def size() -> str:
        unit = dice.choice(list(_UNITS))
        return f"{dice.randint(0, 1024)} bytes" if unit == "bytes" else f"{dice.randint(101, 102_400) / 100:.2f} {unit}"

    cases, foreign = [], []
    for _ in range(60):
        gpu = dice.choice([0, 1, 7, 10, 15])
        message, mine = _message(gpu, *(size() for _ in range(6))), _segments(dice, gpu)
        shapes = [[f"{block['state']} {block['size']}" for block in segment["blocks"]] for segment in mine]
        cases.append(Sample(f"{message[20:110]}…; segments {shapes}", message, {"segments": mine}))
        other = dice.choice([number for number in (0, 1, 5, 10, 11) if number != gpu])
        theirs = _segment(other, (3 * MIB, "active_allocated"), (2**38, "inactive"), (512, "active_allocated"))
        case = f"GPU {gpu}, with segments of GPU {other} as well"
        foreign.append(Sample(case, message, {"segments": [theirs, *mine, _segment(other, (2**39, "inactive"))]}))

    def same(key: str, cases: Sequence[Sample], **room: float) -> None:
        samples(trial, answer, _post_mortem, cases, look=lambda result, *_: _entry(result, key), **room)

    for key in ("requested", "capacity", "free"):
        with trial.group(f"{key}, in bytes", hint="look at the number, its unit and the words around it", see=1):
            same(key, cases, rtol=0.0, atol=0.99)
    for key, hint, see in (
        ("allocated", "which of these blocks count, and which of their numbers?", 2),
        ("reserved", "what is reserved of the driver, blocks or segments?", None),
        ("largest_hole", "which of these blocks are free, which is the largest, and what if there is none?", 2),
    ):
        with trial.group(f"{key}, in bytes", hint=hint, see=see):
            same(key, cases)
    with trial.group("only the GPU of the message counts", hint="whose segments are these?"):
        for key in ("allocated", "reserved", "largest_hole", "verdict"):
            same(key, foreign)
    for verdict, rows in _verdict_cases(dice).items():
        with trial.group(f"verdict {verdict!r}", hint="try the conditions on these numbers, in their order"):
            same("verdict", rows)


# ---- 15-07.3


def _matmul_cost(m: int, k: int, n: int, tile: int, itemsize: int, peak: float, bandwidth: float) -> dict[str, Any]:
    """The reference, tile by tile."""
    flops = elements = 0
    for top, left in itertools.product(range(0, m, tile), range(0, n, tile)):
        rows, columns = min(tile, m - top), min(tile, n - left)
        flops += 2 * rows * columns * k
        elements += rows * k + k * columns + rows * columns
    moved = itemsize * elements
    found = {"flops": flops, "bytes": moved, "intensity": flops / moved}
    found["seconds"] = max(flops / peak, moved / bandwidth)
    return {**found, "limit": "bytes" if moved / bandwidth > flops / peak else "arithmetic"}


@exercise(
    "15-07.3",
    "A matmul on the roofline",
    points=15,
    demands=6,
    stand_in=lambda: _matmul_cost,
    stand_in_name="a finished matmul_cost",
)
def matmul_cost(trial: Trial, answer: Any) -> None:
    """`answer(m, k, n, tile, itemsize, peak, bandwidth)` is a dictionary: flops, bytes, intensity, seconds, limit."""
    dice = random.Random(5)
    shapes = [(1, 1, 1, 1), (8, 8, 8, 16), (1, 64, 64, 16), (64, 64, 1, 16), (64, 1, 64, 16), (16, 12, 40, 8)]
    shapes += [(*(dice.randint(1, 90) for _ in range(3)), dice.choice((1, 3, 8, 16, 100))) for _ in range(30)]
    rates = [(10.0 ** dice.randint(0, 5), 10.0 ** dice.randint(0, 4)) for _ in shapes]
    cases = [(*shape, dice.choice((1, 2, 4, 8)), *pair) for shape, pair in zip(shapes, rates, strict=True)]
    cases += [(*shape, 2, 989e12, 3.35e12) for shape in shapes[:6]]  # a real device: seconds are small numbers
    near = []  # as long for the arithmetic as for the bytes, and a little longer for either
    for case in cases:
        cost = _matmul_cost(*case)
        near += [(*case[:5], float(cost["flops"] * by), float(cost["bytes"])) for by in (1, 1 + 2**-20, 1 - 2**-20)]
    near = [case for case in near if case[5] / case[6] * case[6] == case[5]]  # a tie for every way of writing it

    def same(key: str, cases: Sequence[tuple]) -> None:
        rows = [Sample(f"matmul_cost{case}", *case) for case in cases]
        look = lambda result, *_: _entry(result, key)  # noqa: E731
        samples(trial, answer, _matmul_cost, rows, look=look, rtol=1e-9, atol=0.0)

    for key, hint, see in (
        ("flops", "how many multiplications and additions are there, and as which type?", None),
        ("bytes", "count this case on paper: how often is each matrix read or written, and as which type?", 1),
        ("intensity", "what is divided by what?", None),
        ("seconds", "how long do the arithmetic and the bytes take in this case?", 2),
    ):
        with trial.group(key, hint=hint, see=see):
            same(key, cases)
    for limit in ("bytes", "arithmetic"):
        with trial.group(f"limit {limit!r}", hint="which takes longer in this case? and what if neither does?"):
            same("limit", [case for case in (*cases, *near) if _matmul_cost(*case)["limit"] == limit])


# ---- 15-07.4

_WAITS = (
    "item tolist numpy cpu __bool__ __float__ __int__ __index__ __format__ __repr__ nonzero masked_select unique equal"
)


class _Waits(TorchFunctionMode):
    """Notes the calls for which the host would wait for a GPU, with how many batches the model has seen by then."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.batches = 0
        self.found: list[tuple[str, int]] = []
        model.register_forward_pre_hook(lambda *_: setattr(self, "batches", self.batches + 1))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        masked = any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1:]))
        moved = name == "to" and any(str(x) == "cpu" for x in args[1:] if not isinstance(x, Tensor))
        if name in _WAITS.split() or moved or (name == "__getitem__" and masked):
            self.found.append((name, self.batches))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _evaluate(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """The reference: all images at once."""
    logits, y = torch.cat([model(x) for x, _ in batches]), torch.cat([y for _, y in batches])
    losses, right = F.cross_entropy(logits, y, reduction="none"), logits.argmax(dim=1) == y
    sums = [losses.mean(), right.float().mean(), losses.max(), torch.where(right, 0.0, losses).sum() / losses.sum()]
    return dict(zip(("loss", "accuracy", "worst", "missed"), torch.stack(sums).tolist(), strict=True))


def _batches(sizes: Sequence[int], wrong: float = 0.3) -> list[tuple[Tensor, Tensor]]:
    """Batches of (n, 4) for the identity as a model; about so many images are misclassified."""
    y = torch.randint(4, (sum(sizes),))
    shown = torch.where(torch.rand(len(y)) < wrong, (y + 1) % 4, y)
    return list(zip((F.one_hot(shown, 4) * 3 + torch.rand(len(y), 4)).split(sizes), y.split(sizes), strict=True))


@exercise(
    "15-07.4",
    "An evaluation that doesn't wait",
    points=15,
    demands=6,
    stand_in=lambda: _evaluate,
    stand_in_name="a finished evaluate",
)
def wait_free(trial: Trial, answer: Any) -> None:
    """`answer(model, batches)` is evaluate_waiting's dictionary, with four waits at most, after the last batch."""
    cases = [
        ("batches of 5, 3, 1 and 9", _batches([5, 3, 1, 9])),
        ("one batch", _batches([7])),
        ("20 batches", _batches([6, 2] * 10)),
        ("the worst image in the first batch", [(torch.tensor([[9.0, 0, 0, 0]]), torch.tensor([1])), *_batches([4])]),
        ("no image misclassified", _batches([4, 3], wrong=0.0)),
        ("all images misclassified", _batches([4, 3], wrong=1.0)),
    ]
    rows = [Sample(text, nn.Identity(), batches) for text, batches in cases]
    for key, hint in {
        "loss": "what is divided by how many, if batches have different sizes?",
        "accuracy": "what is divided by how many, if batches have different sizes?",
        "worst": "the worst of all images, or of one batch?",
        "missed": "which losses belong to misclassified images, and what is their share of all?",
    }.items():
        with trial.group(key, hint=hint):
            look = partial(lambda key, result, *_: _entry(result, key), key)
            samples(trial, answer, _evaluate, rows, look=look, rtol=1e-5, atol=1e-6)
    hint = "what does WaitFinder say, and in which of your lines is it?"
    with trial.group("no wait before the last batch", hint=hint, see=2):
        for text, batches in cases:
            with _Waits(model := nn.Identity()) as waits:
                answer(model, batches)
            early = [name for name, seen in waits.found if seen < len(batches)]
            trial.equal(f"waits after fewer than all batches; {text}", early, [])
    with trial.group("at most four waits altogether", hint=hint, see=1):
        for text, batches in cases:
            with _Waits(model := nn.Identity()) as waits:
                answer(model, batches)
            found = [name for name, _ in waits.found]
            trial.that(text, len(found) <= 4, expected="four waits at most", got=f"{len(found)}: {found[:8]}")


# ---- 15-07.5


class _Op(NamedTuple):
    name: str
    engine: str
    stream: str
    seconds: float
    after: tuple[str, ...] = ()


def _prefetch(batches: int, copy: float, compute: float, depth: int) -> list[Any]:
    """Stand-in: a stream for each buffer, whose order does it all."""
    kinds = {"copy": copy, "compute": compute}
    return [_Op(f"{kind} {k}", kind, f"{k % depth}", kinds[kind]) for k in range(batches) for kind in kinds]


def _end(ops: Sequence[Any], took: Mapping[str, float]) -> float:
    """When the last compute ends, if the ops take so long."""
    free: dict[tuple[str, str], float] = {}
    ends: dict[str, float] = {}
    for op in ops:
        keys = ("engine", op.engine), ("stream", op.stream)
        waits = [*(free.get(key, 0.0) for key in keys), *(ends.get(name, 0.0) for name in op.after)]
        ends[op.name] = max(waits) + took[op.name]
        free |= dict.fromkeys(keys, ends[op.name])
    return max(end for name, end in ends.items() if name.startswith("compute"))


def _best(batches: int, took: Mapping[str, float], depth: int) -> float:
    """The shortest possible time, by recurrence."""
    copied, computed = 0.0, [0.0] * depth
    for k in range(batches):
        copied = max(copied, computed[-depth]) + took[f"copy {k}"]
        computed.append(max(computed[-1], copied) + took[f"compute {k}"])
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
    cases = [(1, 2.0, 3.0, 2), (2, 2.0, 3.0, 1), (3, 1.0, 1.0, 3), (2, 3.0, 1.0, 5), (4, 0.0, 2.0, 2)]
    cases += [(4, 2.0, 0.0, 2), (12, 1.0, 1.0, 7)]
    for _ in range(30):
        copy, compute = dice.choice([0.5, 1.0, 2.0, 2.75]), dice.choice([0.5, 1.0, 2.0, 4.25])
        cases.append((dice.randint(2, 9), copy, compute, dice.randint(1, 4)))
    rows = [(f"prefetch_schedule{case}", *case) for case in cases]
    with trial.group("a list with a copy and a compute for each batch", hint="print the names in order"):
        for text, *case in rows:
            ops = trial.call(text, lambda case=case: answer(*case))
            names = [getattr(op, "name", f"{op!r}, which is no Op") for op in ops] if isinstance(ops, list) else ops
            wanted = [f"{kind} {k}" for kind in ("compute", "copy") for k in range(case[0])]
            trial.equal(f"names of {text}", sorted(names) if isinstance(names, list) else names, sorted(wanted))
    with trial.group("engine and duration of each op", hint="compare this op with the sentence on the two kinds"):
        for text, batches, copy, compute, depth in rows:
            for op in answer(batches, copy, compute, depth):
                kind = op.name.split()[0]
                seconds = {"copy": copy, "compute": compute}[kind]
                trial.equal(f"engine and seconds of {op.name!r}, {text}", [op.engine, op.seconds], [kind, seconds])
    with trial.group("an op waits for earlier ones only", hint="what does this op wait for, and where does it stand?"):
        for text, *case in rows:
            seen: set[str] = set()
            for op in answer(*case):
                unknown = [name for name in op.after if name not in seen]
                trial.equal(f"what {op.name!r} waits for without effect; {text}", unknown, [])
                seen.add(op.name)
    with trial.group("a compute starts after its copy", hint="who tells one stream of the other?", see=1):
        for text, batches, *others in rows:
            before = _ordered(answer(batches, *others))
            late = [k for k in range(batches) if f"copy {k}" not in before[f"compute {k}"]]
            trial.equal(f"batches whose compute may start before its copy has ended; {text}", late, [])
    hint = "which buffer does this copy write to, and who reads it?"
    with trial.group("no buffer is overwritten while it is read", hint=hint, see=1):
        for text, batches, copy, compute, depth in rows:
            before = _ordered(answer(batches, copy, compute, depth))
            early = [k for k in range(depth, batches) if f"compute {k - depth}" not in before[f"copy {k}"]]
            trial.equal(f"batches whose copy may overwrite what is still read; {text}", early, [])
    hint = "draw it with draw_timeline: which op waits for more than it must?"
    with trial.group("as fast as it can be", hint=hint, see=2):
        for text, batches, copy, compute, depth in rows:
            ops = answer(batches, copy, compute, depth)
            usual = {f"{kind} {k}": s for kind, s in (("copy", copy), ("compute", compute)) for k in range(batches)}
            at = dice.randrange(max(1, batches - depth))
            longer = [{}, {f"compute {at}": 99 * compute + 99.0, f"copy {at + depth - 1}": 50 * copy + 50.0}]
            longer += [{name: 3 * s for name, s in usual.items() if dice.random() < 0.3} for _ in range(2)]
            for change in longer:
                took = {name: change.get(name, seconds) for name, seconds in usual.items()}
                told = f"{text}, where these take longer: {change}" if change else text
                best, got = _best(batches, took, depth), _end(ops, took)
                trial.that(told, got <= best + 1e-9, expected=f"the last compute ends at {best:g}", got=f"{got:g}")


# ---- 15-07.6

Life = tuple[int, int, int]


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


def _by_chance(dice: random.Random) -> list[list[Life]]:
    """None, one, many; lives that touch, are the same, lie in each other, last for ever, one event long."""
    cases: list[list[Life]] = [
        [],
        [(0, 5, 512)],
        [(0, 5, 512), (5, 9, 512)],
        [(5, 9, 1024), (0, 5, 512)],
        [(0, 5, 512), (4, 9, 1024)],
        [(0, 9, 512), (4, 5, 512)],
        [(0, 4, 512), (0, 4, 512), (0, 4, 512)],
    ]
    for count in (2, 3, 5, 9, 20, 40) * 6:
        tensors = []
        for _ in range(count):
            birth, length = dice.randrange(2 * count), dice.choice((1, 2, dice.randint(1, count), 3 * count))
            tensors.append((birth, birth + length, 512 * dice.choice((1, 2, dice.randint(1, 40)))))
        cases.append(tensors)
    return cases


@exercise("15-07.6", "Stretch: plan the addresses of a step", points=20, demands=5)
def plan(trial: Trial, answer: Any) -> None:
    """`answer(tensors)` is a list of offsets at which tensors that are there together share no byte."""
    cases = [(f"plan({tensors})"[:300], tensors) for tensors in _by_chance(random.Random(6))]
    with trial.group("a list with an offset for each tensor", hint="compare what you return with the task", free=True):
        for text, tensors in cases:
            got = trial.call(text, lambda tensors=tensors: answer(list(tensors)))
            trial.equal(f"type and length of {text}", [type(got).__name__, len(got)], ["list", len(tensors)])
    with trial.group("offsets are ints, at least 0, multiples of 512", hint="which isn't this offset, and why?"):
        for text, tensors in cases:
            for offset in answer(list(tensors)):
                whole = isinstance(offset, Integral) and offset >= 0 and offset % 512 == 0
                trial.that(text, whole, expected="an int ≥ 0, a multiple of 512", got=repr(offset))
    hint = "draw these two lives on paper; is each offset at its tensor's place in the list?"
    with trial.group("tensors that are there together share no byte", hint=hint, see=1):
        for text, tensors in cases:
            rows = list(zip(answer(list(tensors)), tensors, strict=True))
            for (p, one), (q, other) in itertools.combinations(rows, 2):
                together = max(one[0], other[0]) < min(one[1], other[1])
                apart = p + one[2] <= q or q + other[2] <= p
                got = f"bytes {p} to {p + one[2]} and {q} to {q + other[2]}"
                trial.that(text, apart or not together, expected=f"{one} and {other} apart", got=got)
    with trial.group("tensors stays as it is", hint="which of your lines changes the list that was given?", free=True):
        for text, tensors in cases:
            with unchanged(trial, text, given := list(tensors)):
                answer(given)
    pieces = [("inference", 0, 240), ("inference", 500, 980), ("training", 2400, 3000)]
    hint = "which bytes does your plan leave unused, and what of another order?"
    with trial.group("an arena at most 6% longer than it must be", hint=hint, see=2):
        for name, first, last in pieces:
            tensors = _lives(f"transformer_{name}", first, last)
            changes = sorted([(birth, size) for birth, _, size in tensors] + [(d, -size) for _, d, size in tensors])
            most = max(itertools.accumulate(change for _, change in changes))
            arena = max(place + size for place, (_, _, size) in zip(answer(list(tensors)), tensors, strict=True))
            expected = f"at most {1.06 * most / MIB:.1f} MiB, where {most / MIB:.1f} are alive at one event"
            trial.that(f"{name}, {first} to {last}", arena <= 1.06 * most, expected=expected, got=f"{arena / MIB:.1f}")
