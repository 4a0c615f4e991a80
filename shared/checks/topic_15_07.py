"""Checks of the exercises in 15-07, CUDA Memory Management & GPU Internals."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
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
from shared.checks.words import unchanged
from shared.histories import read_history

MIB = 2**20


def _entries(
    trial: Trial, answer: Any, reference: Any, cases: Sequence[tuple[str, tuple]], key: str, **room: float
) -> None:
    """Of each (name, arguments), the answer's dictionary must have the reference's entry `key`."""
    for told, arguments in cases:
        got = answer(*arguments)
        trial.returned(told, got, f"a dictionary with {key!r}")
        found = got.get(key) if isinstance(got, Mapping) else None
        found = f"no dictionary with {key!r}" if found is None else found
        trial.close(told, found, reference(*arguments)[key], **room)


# ---- 15-07.1


def _fixed_bytes(model: nn.Module, optimizer: str) -> dict[str, int]:
    """The reference, over tensors seen by identity."""

    def blocks(table: str, trained: bool = False) -> int:
        tensors = {id(t): t for m in model.modules() for t in getattr(m, table).values() if t is not None}
        sizes = [t.numel() * t.dtype.itemsize for t in tensors.values() if t.requires_grad or not trained]
        return sum(math.ceil(size / 512) * 512 for size in sizes)

    gradients = blocks("_parameters", trained=True)
    state = ("sgd", "momentum", "adam").index(optimizer) * gradients
    sizes = {"parameters": blocks("_parameters"), "buffers": blocks("_buffers")}
    return {**sizes, "gradients": gradients, "optimizer": state}


def _with_buffers(*buffers: Tensor, saved: bool = True) -> nn.Module:
    module = nn.Module()
    for number, buffer in enumerate(buffers):
        module.register_buffer(f"b{number}", buffer, persistent=saved)
    return module


def _models() -> dict[str, nn.Module]:
    """What an estimate may stumble over → a model that has it."""
    tied = nn.Sequential(nn.Embedding(50, 10), nn.Linear(10, 50, bias=False))
    tied[1].weight = tied[0].weight
    shared = torch.ones(300)
    frozen = nn.Linear(10, 10).requires_grad_(False)
    frozen.weight.grad = torch.ones(10, 10)  # from the time before
    return {
        "parameters around 512 bytes": nn.ParameterList([torch.ones(n) for n in (129, 128, 127, 1, 0)]),
        "buffers around 512 bytes": _with_buffers(*(torch.ones(n, dtype=torch.int8) for n in (511, 512, 513, 1025))),
        "batch norm in evaluation mode": nn.Sequential(nn.Sequential(nn.BatchNorm2d(200))).eval(),
        "buffers that are not saved": _with_buffers(torch.ones(200), torch.ones(600), saved=False),
        "a buffer in two modules": nn.Sequential(_with_buffers(shared), _with_buffers(shared)),
        "some parameters frozen": nn.Sequential(frozen, nn.Linear(10, 7)),
        "a tied parameter": tied,
        "bfloat16": nn.Linear(10, 1000, dtype=torch.bfloat16),
        "10 GB on the meta device": nn.Linear(50_000, 50_000, device="meta"),
    }


def _shapes(model: nn.Module) -> str:
    """The model on paper."""
    lines = []
    for kind in ("parameters", "buffers"):
        told = []
        for name, tensor in getattr(model, f"named_{kind}")(remove_duplicate=False):
            frozen = " frozen" if kind == "parameters" and not tensor.requires_grad else ""
            told.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}{frozen}")
        lines.append(f"{kind}: {', '.join(told) or 'none'}")
    return "\n".join(lines)


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
    stand_in_name="ours",
)
def fixed_bytes(trial: Trial, answer: Any) -> None:
    """`answer(model, optimizer)` is the bytes of parameters, buffers, gradients and optimizer state."""
    cases = []
    for name, model in _models().items():
        shapes = _shapes(model)
        cases += [(f"{name}, {opt}\n{shapes}", (model, opt)) for opt in ("sgd", "momentum", "adam")]
    for key, hint in {
        "parameters": "add up the blocks of this model's parameters on paper; as which type?",
        "buffers": "which tensors does this model hold beside its parameters?",
        "gradients": "which tensors of this model get a gradient, and of what size?",
        "optimizer": "which tensors does this optimizer keep, for which parameters?",
    }.items():
        with trial.group(key, hint=hint, see=2 if key == "buffers" else 1):
            _entries(trial, answer, _fixed_bytes, cases, key)
    hint = "what do shapes and dtypes tell alone?"
    with trial.group("nothing is computed, and the model stays as it is", hint=hint, free=True):
        for name, model in list(_models().items())[:-1]:  # new ones; on the meta device nothing is computed
            with unchanged(trial, name, model), _Computed([*model.parameters(), *model.buffers()]) as computed:
                answer(model, "adam")
            trial.equal(f"operators on tensors of the model; {name}", computed.operators, [])


# ---- 15-07.2

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": MIB, "GiB": 2**30}
_USED, _FREE, _PENDING = "active_allocated", "inactive", "active_pending_free"


def _message(gpu: int, requested: str, capacity: str, free: str) -> str:
    return (
        f"CUDA out of memory. Tried to allocate {requested}. GPU {gpu} has a total capacity of {capacity} of which "
        f"{free} is free. Including non-PyTorch memory, this process has 1.25 GiB memory in use. 4.00 GiB allowed; Of "
        "the allocated memory 1.25 GiB is allocated by PyTorch, and 2.25 GiB is reserved by PyTorch but unallocated."
    )


def _post_mortem(message: str, snapshot: dict) -> dict[str, Any]:
    """The reference: the numbers are words of the message; blocks are added up one by one."""
    words = message.replace(". ", " ").split()
    sizes = [float(number) * _UNITS[unit] for number, unit in itertools.pairwise(words) if unit in _UNITS]
    asked, capacity, free = sizes[:3]
    gpu = int(words[words.index("GPU") + 1])
    blocks = [(b["size"], b["state"]) for s in snapshot["segments"] if s["device"] == gpu for b in s["blocks"]]
    allocated = math.fsum(size for size, state in blocks if state == _USED)
    reserved = math.fsum(size for size, _ in blocks)
    hole = max([0.0, *(float(size) for size, state in blocks if state == _FREE)])
    verdict = "fragmented" if free + reserved - allocated >= asked else "held elsewhere"
    verdict = "does not fit" if asked + allocated > capacity else verdict
    found = {"requested": asked, "capacity": capacity, "free": free, "allocated": allocated, "reserved": reserved}
    return {**found, "largest_hole": hole, "verdict": "capped" if free >= asked else verdict}


def _segment(gpu: int, *parts: tuple[int, str]) -> dict:
    blocks = [{"size": size, "state": state} for size, state in parts]
    return {"device": gpu, "total_size": sum(size for size, _ in parts), "blocks": blocks}


@exercise(
    "15-07.2", "The post-mortem of an OOM", points=20, demands=10, stand_in=lambda: _post_mortem, stand_in_name="ours"
)
def post_mortem(trial: Trial, answer: Any) -> None:
    """`answer(message, snapshot)` is a dictionary of bytes and a verdict."""
    dice = random.Random(4)

    def size() -> str:
        unit = dice.choice(list(_UNITS))
        return f"{dice.randint(0, 1024)} bytes" if unit == "bytes" else f"{dice.randint(101, 102_400) / 100:.2f} {unit}"

    cases = []
    for _ in range(40):
        gpu = dice.choice([0, 1, 7, 10, 15])
        segments = [_segment(gpu + 1, (3 * MIB, _USED), (2**38, _FREE))]
        for shape in dice.choices(["fuf", "ufuu", "u", "f", "fu", "uf", "fufuf"], k=dice.choice((0, 1, 1, 2, 3, 6))):
            states = [_FREE if letter == "f" else dice.choice((_USED, _USED, _PENDING)) for letter in shape]
            segments.append(_segment(gpu, *((512 * dice.randint(1, 10**6), state) for state in states)))
        message = _message(gpu, size(), size(), size())
        told = [f"GPU {s['device']}: {[(b['state'], b['size']) for b in s['blocks']]}" for s in segments]
        cases.append((f"{message[20:110]}…; segments {', '.join(told)}", (message, {"segments": segments})))
    words = "look at the number, its unit and the words around it"
    for key, hint, see in (
        ("requested", words, 1),
        ("capacity", words, 1),
        ("free", words, 1),
        ("allocated", "which of these blocks count, and on which GPU?", 2),
        ("reserved", "what is reserved of the driver, blocks or segments?", None),
        ("largest_hole", "which of these blocks are free, which is the largest, and what if there is none?", 2),
    ):
        with trial.group(key, hint=hint, see=see):
            _entries(trial, answer, _post_mortem, cases, key, rtol=0.0, atol=0.99)
    rows = []
    for asked, free, used, cached in itertools.product((1, 3, 6), (0, 1, 3), (0, 2, 5), (0, 1, 4)):  # halves of a GiB
        for less in (0, 1):  # at each threshold, and a MiB beside it
            message = _message(0, f"{512 * asked - less:.2f} MiB", "4.00 GiB", f"{free / 2:.2f} GiB")
            parts = [(used, _USED), (cached // 2, _PENDING), (cached - cached // 2, _FREE)]
            segments = [_segment(0, (512 * MIB * halves, state)) for halves, state in parts if halves]
            segments.append(_segment(1, (2**38, _FREE)))
            told = f"{message[20:110]}…, allocated {used / 2} GiB, the rest of reserved {cached / 2} GiB"
            rows.append((told, (message, {"segments": segments})))
    for verdict in ("capped", "does not fit", "fragmented", "held elsewhere"):
        some = [(told, case) for told, case in rows if _post_mortem(*case)["verdict"] == verdict]
        with trial.group(f"verdict {verdict!r}", hint="try the conditions on these numbers, in their order"):
            _entries(trial, answer, _post_mortem, some, "verdict")


# ---- 15-07.3


def _matmul_cost(m: int, k: int, n: int, tile: int, itemsize: int, peak: float, bandwidth: float) -> dict[str, Any]:
    """The reference, tile by tile."""
    flops = elements = 0.0
    for top, left in itertools.product(range(0, m, tile), range(0, n, tile)):
        rows, columns = min(tile, m - top), min(tile, n - left)
        flops += 2 * rows * columns * k
        elements += rows * k + k * columns + rows * columns
    moved = itemsize * elements
    found = {"flops": flops, "bytes": moved, "intensity": flops / moved}
    found["seconds"] = max(flops / peak, moved / bandwidth)
    return {**found, "limit": "bytes" if moved / bandwidth > flops / peak else "arithmetic"}


@exercise(
    "15-07.3", "A matmul on the roofline", points=15, demands=5, stand_in=lambda: _matmul_cost, stand_in_name="ours"
)
def matmul_cost(trial: Trial, answer: Any) -> None:
    """`answer(m, k, n, tile, itemsize, peak, bandwidth)` is a dictionary: flops, bytes, intensity, seconds, limit."""
    dice = random.Random(5)
    shapes = [(1, 1, 1, 1), (8, 8, 8, 16), (1, 64, 64, 16), (64, 64, 1, 16), (64, 1, 64, 16), (16, 12, 40, 8)]
    shapes += [(*(dice.randint(1, 90) for _ in range(3)), dice.choice((1, 3, 8, 16, 100))) for _ in range(15)]
    cases = [(*s, dice.choice((1, 2, 4, 8)), 10.0 ** dice.randint(0, 5), 10.0 ** dice.randint(0, 4)) for s in shapes]
    for case in list(cases):  # as long for the arithmetic as for the bytes, and a little longer for either
        flops, moved = (_matmul_cost(*case)[key] for key in ("flops", "bytes"))
        near = (1, 1 + 2**-20, 1 - 2**-20) if flops / moved * moved == flops else ()
        cases += [(*case[:5], flops * by, moved) for by in near]
    rows = [(f"matmul_cost{case}", case) for case in cases]
    for key, hint, see in (
        ("flops", "how many multiplications and additions are there?", None),
        ("bytes", "how often is each matrix read or written in this case?", 1),
        ("intensity", "what is divided by what?", None),
        ("seconds", "how long do the arithmetic and the bytes take in this case?", 2),
        ("limit", "which takes longer in this case? and what if neither does?", None),
    ):
        with trial.group(key, hint=hint, see=see):
            _entries(trial, answer, _matmul_cost, rows, key, rtol=1e-9, atol=0.0)


# ---- 15-07.4

_WAITS = """item tolist numpy cpu __bool__ __float__ __int__ __index__ __format__ __repr__ nonzero
    masked_select unique equal"""


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
        moved = name == "to" and any(
            str(x) == "cpu" for x in tree_leaves((args[1:], kwargs)) if not isinstance(x, Tensor)
        )
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
    "15-07.4", "An evaluation that doesn't wait", points=15, demands=5, stand_in=lambda: _evaluate, stand_in_name="ours"
)
def wait_free(trial: Trial, answer: Any) -> None:
    """`answer(model, batches)` is evaluate_waiting's dictionary, with four waits at most, after the last batch."""
    cases = [
        ("batches of 5, 3, 1 and 9", _batches([5, 3, 1, 9])),
        ("one batch", _batches([7])),
        ("20 batches", _batches([6, 2] * 10)),
        ("no image misclassified", _batches([4, 3], wrong=0.0)),
        ("all images misclassified", _batches([4, 3], wrong=1.0)),
    ]
    rows = [(text, (nn.Identity(), batches)) for text, batches in cases]
    shares = "what is divided by how many, if batches have different sizes?"
    for key, hint in {
        "loss": shares,
        "accuracy": shares,
        "worst": "the worst of all images, or of one batch?",
        "missed": "which losses belong to misclassified images, and what is their share of all?",
    }.items():
        with trial.group(key, hint=hint):
            _entries(trial, answer, _evaluate, rows, key, rtol=1e-5, atol=1e-6)
    hint = "what does WaitFinder say, and in which of your lines is it?"
    with trial.group("at most four waits, after the last batch", hint=hint, see=2, free=True):
        for text, batches in cases:
            with _Waits(model := nn.Identity()) as waits:
                answer(model, batches)
            early = [name for name, seen in waits.found if seen < len(batches)]
            trial.equal(f"waits before the last batch; {text}", early, [])
            trial.equal(f"waits beyond the fourth one; {text}", [name for name, _ in waits.found[4:]], [])


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


def _times(ops: Sequence[Any], took: Mapping[str, float], engines: bool = True) -> dict[str, tuple[float, float]]:
    """Start and end of each op that takes so long; without `engines`, only streams and `after` say who waits."""
    free: dict[tuple[str, str], float] = {}
    times: dict[str, tuple[float, float]] = {}
    for op in ops:
        keys = [("stream", op.stream), ("engine", op.engine)][: 1 + engines]
        start = max([free.get(key, 0.0) for key in keys] + [times[name][1] for name in op.after])
        times[op.name] = start, start + took[op.name]
        free |= dict.fromkeys(keys, start + took[op.name])
    return times


@exercise(
    "15-07.5", "The schedule of a prefetcher", points=15, demands=5, stand_in=lambda: _prefetch, stand_in_name="ours"
)
def prefetch_schedule(trial: Trial, answer: Any) -> None:
    """`answer(batches, copy, compute, depth)` is a list of Ops that overlap without a race."""
    dice = random.Random(6)
    cases = [(1, 2.0, 3.0, 2), (2, 2.0, 3.0, 1), (3, 1.0, 1.0, 3), (2, 3.0, 1.0, 5), (12, 1.0, 0.0, 7)]
    for _ in range(20):
        copy, compute = dice.choice([0.5, 1.0, 2.0, 2.75]), dice.choice([0.5, 1.0, 2.0, 4.25])
        cases.append((dice.randint(2, 9), copy, compute, dice.randint(1, 4)))
    rows = [(f"prefetch_schedule{case}", *case) for case in cases]
    with trial.group("a copy and a compute for each batch, each with its engine and seconds", hint="print the list"):
        for text, *case in rows:
            ops = answer(*case)
            trial.equal(f"type of {text}", type(ops).__name__, "list")
            wanted = sorted((op.name, op.engine, op.seconds) for op in _prefetch(*case))
            trial.equal(f"ops of {text}", sorted((op.name, op.engine, op.seconds) for op in ops), wanted)
    with trial.group("an op waits for earlier ones only", hint="what does this op wait for, and where does it stand?"):
        for text, *case in rows:
            ops = answer(*case)
            place = {op.name: k for k, op in enumerate(ops)}
            unknown = [(op.name, name) for op in ops for name in op.after if place.get(name, 99) >= place[op.name]]
            trial.equal(f"(op, what it waits for without effect), {text}", unknown, [])
    runs = []  # each case with durations as they were said, and with others
    for text, batches, copy, compute, depth in rows:
        usual = {f"{kind} {k}": s for kind, s in (("copy", copy), ("compute", compute)) for k in range(batches)}
        for change in [{}, *({name: 99.0} for name in usual), {name: dice.random() for name in usual}]:
            told = f"{text}, where these take longer: {change}" if change else text
            runs.append((told, batches, copy, compute, depth, usual | change))
    for demand, first, second, hint in (
        ("a compute starts after its copy", "copy", "compute", "who tells one stream of the other?"),
        ("no buffer is overwritten while it is read", "compute", "copy", "which buffer is it, and who reads it?"),
    ):
        with trial.group(demand, hint=hint, see=1):
            for told, batches, copy, compute, depth, took in runs:
                times = _times(answer(batches, copy, compute, depth), took, engines=False)
                back = depth if second == "copy" else 0
                pairs = [(f"{first} {k - back}", f"{second} {k}") for k in range(back, batches)]
                early = [later for earlier, later in pairs if times[later][0] < times[earlier][1] - 1e-9]
                trial.equal(f"ops that start before the {first} has ended; {told}", early, [])
    with trial.group("as fast as it can be", hint="draw it: which op waits for more than it must?", see=2):
        for told, *case, took in runs:
            got, best = (
                max(end for name, (_, end) in _times(ops, took).items() if name.startswith("compute"))
                for ops in (answer(*case), _prefetch(*case))
            )
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
            found.append([time, last - first, -(-event["size"] // 512) * 512])
        elif event["action"] == "free_completed" and event["addr"] in number_at:
            found[number_at.pop(event["addr"])][1] = time
    return [(birth, death, size) for birth, death, size in found]


@exercise("15-07.6", "Stretch: plan the addresses of a step", points=20, demands=3)
def plan(trial: Trial, answer: Any) -> None:
    """`answer(tensors)` is a list of offsets at which tensors that are there together share no byte."""
    dice = random.Random(6)
    lives: list[list[Life]] = [[], [(5, 9, 1024), (0, 5, 512)], [(0, 5, 512), (4, 9, 1024)], [(0, 9, 512), (4, 5, 512)]]
    for count in (1, 2, 3, 5, 9, 20, 40) * 5:
        births = [dice.randrange(2 * count) for _ in range(count)]
        ends = [birth + dice.choice((1, 2, dice.randint(1, count), 3 * count)) for birth in births]
        sizes = [512 * dice.choice((1, 2, dice.randint(1, 40))) for _ in births]
        lives.append(list(zip(births, ends, sizes, strict=True)))
    cases = [(f"plan({tensors})"[:300], tensors) for tensors in lives]
    hint = "compare what you return with the task: its type, its length, each offset"
    with trial.group("a list of ints, multiples of 512, one for each tensor", hint=hint, free=True):
        for text, tensors in cases:
            got = answer(list(tensors))
            trial.equal(f"type and length of {text}", [type(got).__name__, len(got)], ["list", len(tensors)])
            wrong = [offset for offset in got if not isinstance(offset, Integral) or offset < 0 or offset % 512]
            trial.equal(f"offsets that are no such ints, {text}", wrong, [])
    hint = "draw these two lives on paper; is each offset at its tensor's place in the list?"
    with trial.group("tensors that are there together share no byte", hint=hint, see=1):
        for text, tensors in cases:
            rows = list(zip(answer(list(tensors)), tensors, strict=True))
            for (p, one), (q, other) in itertools.combinations(rows, 2):
                together = max(one[0], other[0]) < min(one[1], other[1])
                apart = p + one[2] <= q or q + other[2] <= p
                got = f"bytes {p} to {p + one[2]} and {q} to {q + other[2]}"
                trial.that(text, apart or not together, expected=f"{one} and {other} apart", got=got)
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
