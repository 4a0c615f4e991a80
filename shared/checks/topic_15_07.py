"""Checks of the exercises in 15-07, CUDA Memory Management & GPU Internals.

The cases of an item differ from another's in what they ask, so that each wrong answer is told about its own mistake.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.checks.feedback import Trial, exercise

MIB = 2**20


def _plain(value: Any) -> Any:
    """The value with named tuples as plain ones: either is a tuple."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return list(map(_plain, value)) if isinstance(value, list) else value


def _call(name: str, arguments: Sequence[Any]) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"


# ---------------------------------------------------------------- 15-07.1


def _block(size: int, divisions: int = 1) -> int:
    """Oracle, by counting multiples."""
    step = 512
    if divisions > 1 and size > 512 * divisions:
        step = max(2**k for k in range(64) if 2**k <= size) // divisions
    return step * next(n for n in itertools.count(size // step) if step * n >= size)


def _pool(block: int) -> str:
    return "small" if block <= MIB else "large"


def _segment(block: int) -> int:
    if block <= MIB:
        return 2 * MIB
    return 20 * MIB if block < 10 * MIB else math.ceil(block / (2 * MIB)) * 2 * MIB


@exercise("15-07.1", "Rounding and pool choice", points=10)
def plan(trial: Trial, answer: Any) -> None:
    """`answer(size, divisions)` is (bytes of the block, "small" or "large", bytes of a new segment)."""
    generator = random.Random(1)
    edges = [512, 1024, MIB // 2, MIB, 2 * MIB, 9 * MIB, 10 * MIB, 12 * MIB, 20 * MIB, 21 * MIB, 2**33]
    sizes = {edge + by for edge in edges for by in (-513, -512, -511, -1, 0, 1, 511, 512, 513)}
    sizes |= {int(2 ** generator.uniform(0, 36)) for _ in range(60)}
    cases: list[tuple[int, ...]] = [
        arguments for size in sorted(sizes) if size > 0 for arguments in ((size,), (size, 1))
    ]
    for divisions in (2, 4, 8, 16, 1024):
        some = {512 * divisions + by for by in (-512, -511, -1, 0, 1, 512)} | {
            2**k + by for k in (9, 16, 25) for by in (-1, 0, 1)
        }
        some |= {int(2 ** generator.uniform(0, 34)) for _ in range(30)} | {9 * MIB + 1}
        cases += [(size, divisions) for size in sorted(some)]

    def hold(entry: int, want: Callable[..., Any], concerns: Callable[..., bool]) -> None:
        """Pool and segment are judged by the answer's own block: a wrong one is another item's matter."""
        for arguments in cases:
            name = _call("plan", arguments)
            got = _plain(trial.call(name, lambda arguments=arguments: answer(*arguments)))
            whole = isinstance(got, tuple) and len(got) == 3
            size, divisions, block = arguments[0], (*arguments, 1)[1], got[0] if whole else _block(*arguments)
            if not whole:
                trial.equal(name, got, (block, _pool(block), _segment(block)))
            elif concerns(size, divisions, block):
                trial.equal(name, got[entry], want(size, divisions, block))

    ask = "do this case on paper, rule by rule"
    with trial.group("the block: a multiple of 512 bytes, no larger than it must be", hint=ask, see=1):
        hold(0, lambda s, d, b: _block(s, d), lambda s, d, b: d == 1)
    with trial.group("the block, with divisions: requests that are not large enough for them", hint=ask):
        hold(0, lambda s, d, b: _block(s, d), lambda s, d, b: d > 1 and s <= 512 * d)
    with trial.group("the block, with divisions", hint="compare with the example in the hint", see=2):
        hold(0, lambda s, d, b: _block(s, d), lambda s, d, b: d > 1 and s > 512 * d)
    with trial.group('the pool: "small" or "large"', hint="read rule 2 again; what of the limit itself?"):
        hold(1, lambda s, d, b: _pool(b), lambda s, d, b: True)
    with trial.group("the segment of the small pool", hint="rule 2 says it"):
        hold(2, lambda s, d, b: _segment(b), lambda s, d, b: b <= MIB)
    with trial.group("the segment of a large block below 10 MiB", hint="rule 3 says it"):
        hold(2, lambda s, d, b: _segment(b), lambda s, d, b: MIB < b < 10 * MIB)
    with trial.group("the segment of a request from 10 MiB on", hint="rule 3 says it; what of the limit itself?"):
        hold(2, lambda s, d, b: _segment(b), lambda s, d, b: s >= 10 * MIB)
    with trial.group(
        "pool and segment follow from the rounded size", hint="which size did you compare, and which does the task say?"
    ):
        hold(2, lambda s, d, b: _segment(b), lambda s, d, b: s < 10 * MIB <= b)


# ---------------------------------------------------------------- 15-07.2

FreeBlock = tuple[int, int, int]
Case = tuple[list[FreeBlock], int, int, bool, float]


def _fit(
    free: Sequence[FreeBlock], size: int, stream: int, small: bool, max_split_size: float = math.inf
) -> tuple[FreeBlock, FreeBlock | None] | None:
    """Oracle: a walk over the sorted list."""
    for owner, found, address in sorted(free):
        if owner == stream and found >= size:
            oversize = size >= max_split_size
            if (found >= max_split_size and not oversize) or (oversize and found - size >= 20 * MIB):
                return None
            rest = found - size
            if rest >= 512 if small else (rest > MIB and not oversize):
                return (stream, size, address), (stream, rest, address + size)
            return (stream, found, address), None
    return None


def _fit_cases(dice: random.Random) -> dict[str, list[Case]]:
    """Cases for each demand; the block that serves has only one trait that matters, the one that is asked for."""

    def case(size: int, own: Sequence[int], others: Sequence[int] = (), limit: float = math.inf) -> Case:
        """A request for the stream that has free blocks of sizes `own`; all around are blocks that are too small."""
        small = size <= MIB
        stream, *strangers = dice.sample(range(5), 3)
        least = 512 if small else MIB + 512
        below = [dice.randrange(least, size, 512) for _ in range(dice.randrange(3)) if size > least]
        blocks = [(stream, found) for found in (*own, *below)]
        blocks += [(dice.choice(strangers), found) for found in (*others, *below[:1])]
        dice.shuffle(blocks)
        free = [
            (*block, 2**30 * place) for block, place in zip(blocks, dice.sample(range(60), len(blocks)), strict=True)
        ]
        return free, size, stream, small, limit

    def choices(pick: Callable[[int, list[int]], tuple[list[int], list[int]]]) -> list[Case]:
        """`pick` makes sizes of own and others' blocks from a request and larger sizes; none is near a threshold."""
        cases = []
        for n in range(40):
            size = 512 * dice.randint(1, 2048) if n % 2 else MIB + 512 * dice.randint(1, 2**16)
            step, least = (512, 1024) if n % 2 else (MIB // 2, 4 * MIB)
            own, others = pick(size, sorted({size + least + step * dice.randrange(30) for _ in range(4)}))
            limits = [math.inf, 20 * MIB + max(size, *own, *others)] + [size] * (size >= 20 * MIB)
            cases.append(case(size, own, others, dice.choice(limits)))
        return cases

    def cuts(sizes: Sequence[int], lefts: Sequence[int]) -> list[Case]:
        return [case(size, [size + left]) for size in sizes for left in lefts]

    def limited(sizes: Callable[[int], list[tuple[int, list[int]]]]) -> list[Case]:
        return [case(size, own, limit=m) for m in (20 * MIB, 21 * MIB, 500 * MIB) for size, own in sizes(m)]

    small, large = (512, 5 * 512, MIB), (MIB + 512, 7 * MIB, 300 * MIB)
    return {
        "None if no block is large enough": [([], 512, 0, True, math.inf), *(case(s, []) for s in 4 * (small + large))],
        "the block is the stream's own": choices(lambda s, more: (more[-1:] * dice.randrange(2), [s, *more])),
        "the smallest that is large enough": choices(lambda s, more: (more, [])),
        "the lowest address among equals": choices(lambda s, more: (more[:1] * 3, [])),
        "an exact fit: rest is None": cuts(small + large, [0]),
        "small pool: what is split off": cuts(small, [512, 1024]),
        "large pool: what stays in one piece": cuts(large, [512, MIB - 512, MIB]),
        "large pool: what is split off": cuts(large, [MIB + 512, 2 * MIB, 99 * MIB]),
        "a request < max_split_size: which blocks it may not have": limited(
            lambda m: [(m - 512, [m]), (m - 512, [m + MIB]), (2 * MIB, [m, m + 512]), (2 * MIB, [3 * m, 2 * m])]
        ),
        "a request < max_split_size: all else as ever": limited(
            lambda m: [
                (MIB, [MIB + 4096]),
                (2 * MIB, [m, m - 512, 2 * m]),
                (m - 9 * MIB, [m - 512]),
                (m - 512, [m - 512]),
            ]
        ),
        "a request ≥ max_split_size: its block stays whole": limited(
            lambda m: [(s, [s + left]) for s in (m, m + 512, 2 * m) for left in (MIB + 512, 8 * MIB, 20 * MIB - 512)]
        ),
        "a request ≥ max_split_size: which blocks it may not have": limited(
            lambda m: [(s, [s + left]) for s in (m, m + 512, 2 * m) for left in (20 * MIB, 20 * MIB + 512, 2**30)]
        ),
    }


def _is_found(value: Any) -> bool:
    """Whether it has the form (block, rest or None)."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return all(
        isinstance(block, tuple) and len(block) == 3 for block in value if block is not None or block is value[0]
    )


@exercise("15-07.2", "Best fit with splitting", points=15)
def fit(trial: Trial, answer: Any) -> None:
    """`answer(free, size, stream, small, max_split_size)` is (block, rest or None), or None."""
    asked = {  # start of the item → hint, folded hint
        "None": ("what does your code do when it has no block to choose from?", None),
        "the block": ("whose memory is the block that you chose?", None),
        "the": ("rule 4 says which of these blocks it is", 1),
        "an exact": ("what is left over here, and is it a block?", None),
        "a request": ("which of the three sentences on max_split_size is about this case?", 3),
        "": ("what is left over, and what does rule 5 say of it?", 2),
    }

    every, earlier = _fit_cases(random.Random(2)), []
    for item, cases in every.items():
        hint, see = next(text for start, text in asked.items() if item.startswith(start))
        with trial.group(item, hint=hint, see=see):
            for case in cases:
                arguments = case[:4] if case[4] == math.inf else case
                name, want, told = _call("fit", arguments), _fit(*case), hint
                got = _plain(trial.call(name, lambda a=arguments: answer(list(a[0]), *a[1:])))
                earlier.append((arguments, got))
                if got is not None and not _is_found(got):
                    told = "compare the form of what you return with the task"
                elif item.startswith("the") and got and want:  # what is cut off is another item's matter
                    name, got, want = f"address of the block, {name}", got[0][2], want[0][2]
                elif item.startswith("the"):
                    told = "which rule says whether there is a block for this request?"
                trial.equal(name, got, want, hint=told, see=see if told == hint else None)
    with trial.group("free stays as it is", hint="what does a call of yours change that the next one sees?"):
        for (free, *others), found in earlier:
            if given := list(free):
                again, name = answer(given, *others), _call("fit", (free, *others))
                trial.equal(name, given, free)
                trial.equal(f"once more {name}", _plain(again), found)


# ---------------------------------------------------------------- 15-07.3

Piece = tuple[int, int, str]


def _give_back(blocks: Sequence[Piece], address: int) -> list[Piece]:
    """Oracle: free bytes marked one by one (in units of 512), then read off again."""
    owners = [
        None if state == "free" or start == address else start
        for start, size, state in blocks
        for _ in range(size // 512)
    ]
    result, at = [], blocks[0][0]
    for owner, units in itertools.groupby(owners):
        size = 512 * len(list(units))
        result.append((at, size, "free" if owner is None else "used"))
        at += size
    return result


def _segments_around(left: str, right: str, dice: random.Random) -> Iterator[tuple[list[Piece], int]]:
    """Segments, and the address of a used block with these neighbours: "used", "free" or "" for none."""
    for _ in range(12):
        states = [left, "used", right]
        while left and len(states) < 7 and dice.random() < 0.6:
            states.insert(0, "used" if states[0] == "free" else dice.choice(["used", "free"]))
        freed = len(states) - 2
        while right and len(states) < 9 and dice.random() < 0.6:
            states.append("used" if states[-1] == "free" else dice.choice(["used", "free"]))
        at, blocks, places = dice.choice([0, 512, 0x7F00_0000_0000]), [], []
        for state in states:
            places.append(at)
            if state:
                blocks.append((at, 512 * dice.randint(1, 9), state))
                at += blocks[-1][1]
        yield blocks, places[freed]


@exercise("15-07.3", "Coalescing", points=15)
def give_back(trial: Trial, answer: Any) -> None:
    """`answer(blocks, address)` is the segment after the used block at `address` was freed."""
    dice, every = random.Random(3), []
    neighbours = {
        "no free neighbour: only the state changes": [(a, b) for a in ("", "used") for b in ("", "used")],
        "a free block on the left": [("free", "used"), ("free", "")],
        "a free block on the right": [("used", "free"), ("", "free")],
        "free blocks on both sides": [("free", "free")],
    }
    for item, pairs in neighbours.items():
        cases = [case for left, right in pairs for case in _segments_around(left, right, dice)]
        every += cases
        with trial.group(item, hint="draw this segment before and after", see=1):
            for blocks, address in cases:
                name = _call("give_back", (blocks, address))
                got = _plain(trial.call(name, lambda blocks=blocks, address=address: answer(list(blocks), address)))
                trial.equal(name, got, _give_back(blocks, address))
    with trial.group("the argument stays as it is", hint="which of your lines changes the list that was given?"):
        for blocks, address in every:
            given = list(blocks)
            answer(given, address)
            trial.equal(_call("give_back", (blocks, address)), given, blocks)
    with trial.group("ValueError if no used block starts there"):
        for blocks in ([(512, 1024, "free")], *(blocks for blocks, _ in every[::5])):
            end = blocks[-1][0] + blocks[-1][1]
            free = [start for start, _, state in blocks if state == "free"]
            inside = [start + by for start, size, _ in blocks for by in (256, 512) if by < size]
            for address in (*free, *inside, blocks[0][0] - 512, end):
                error: object = "no exception"
                try:
                    answer(list(blocks), address)
                except Exception as raised:
                    error = raised
                name = _call("give_back", (blocks, address))
                hint = "a double free must not pass silently" if address in free else "what starts at this address?"
                if isinstance(error, Exception):
                    hint = "this is how your answer says that it can't be done; how does the task want it said?"
                trial.that(name, isinstance(error, ValueError), expected="ValueError", got=repr(error), hint=hint)


# ---------------------------------------------------------------- 15-07.4

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BEFORE = {  # what the message says in front of each number
    "requested": "Tried to allocate ",
    "capacity": "has a total capacity of ",
    "free": " of which ",
    "allocated": "Of the allocated memory ",
    "cached": "allocated by PyTorch, and ",
}


def _message(gpu: int, requested: str, capacity: str, free: str, in_use: str, allocated: str, cached: str) -> str:
    return (
        f"CUDA out of memory. Tried to allocate {requested}. GPU {gpu} has a total capacity of {capacity} of which "
        f"{free} is free. Including non-PyTorch memory, this process has {in_use} memory in use. Of the allocated "
        f"memory {allocated} is allocated by PyTorch, and {cached} is reserved by PyTorch but unallocated. If reserved "
        "but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation."
    )


def _post_mortem(message: str, segments: list[dict]) -> dict[str, Any]:
    """Oracle: cut out what follows the words before each number."""
    found: dict[str, Any] = {}
    for key, words in _BEFORE.items():
        number, unit = message[message.index(words) + len(words) :].split()[:2]
        found[key] = float(number) * _UNITS[unit.rstrip(".")]
    sizes = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]
    found["largest_hole"] = sorted([0, *sizes])[-1]
    found["verdict"] = "held elsewhere"
    if found["free"] + found["cached"] >= found["requested"]:
        found["verdict"] = "fragmented"
    if found["requested"] + found["allocated"] > found["capacity"]:
        found["verdict"] = "does not fit"
    return found


def _snapshot(dice: random.Random, holes: Sequence[int], segments: int) -> list[dict]:
    """Segments with these free blocks at places drawn by chance; the largest block is never a free one.

    As in a real one, a block is larger than what was requested of it, and a free one may tell an old request.
    """
    found = []
    for n in range(segments):
        mine = [size for k, size in enumerate(holes) if k % segments == n]
        parts = [(size, "inactive") for size in mine]
        parts += [
            (512 * dice.randint(1, 9999), dice.choice(["active_allocated", "active_pending_free"])) for _ in range(3)
        ]
        parts += [(2**36, "active_allocated"), (2**35, "active_pending_free")]
        dice.shuffle(parts)
        blocks, at = [], (n + 1) * 2**40
        for size, state in parts:
            requested = size - dice.randint(1, 511)
            blocks.append({"address": at, "size": size, "requested_size": requested, "state": state})
            at += size
        total = sum(size for size, _ in parts)
        found.append({"address": (n + 1) * 2**40, "total_size": total, "blocks": blocks})
        found[-1] |= {"stream": dice.randrange(3), "segment_type": dice.choice(["small", "large"])}
    return found


@exercise(
    "15-07.4",
    "The post-mortem of an OOM",
    points=20,
    stand_in=lambda: _post_mortem,
    stand_in_name="a finished post_mortem",
)
def post_mortem(trial: Trial, answer: Any) -> None:
    """`answer(message, segments)` is a dictionary of bytes and a verdict."""
    dice = random.Random(4)
    usual, roomy = _snapshot(dice, [512], 1), _snapshot(dice, [2**36], 2)

    def entry(case: str, message: str, segments: list[dict], key: str) -> Any:
        got = trial.call(case, lambda: answer(message, segments))
        return got[key] if isinstance(got, Mapping) and key in got else f"no entry {key!r} in {got!r}"

    def size() -> str:
        unit = dice.choice(list(_UNITS))
        number = dice.choice([1024, dice.randint(1, 1023)]) if unit == "bytes" else dice.randint(101, 102_400) / 100
        return f"{number} bytes" if unit == "bytes" else f"{number:.2f} {unit}"

    texts = [[size() for _ in range(6)] for _ in range(40)]
    texts += [["512 bytes", "80.00 GiB", "0 bytes", "79.50 GiB", "0 bytes", "0 bytes"]]
    messages = [_message(dice.choice([0, 1, 7, 10, 15]), *sizes) for sizes in texts]
    for key, words in _BEFORE.items():
        with trial.group(f"{key}, in bytes", hint="look at the number, its unit and the words around it", see=1):
            for message in messages:
                place = message.index(words)
                case = f"in '... {message[place : place + len(words) + 16]} ...'"
                got, want = entry(case, message, usual, key), _post_mortem(message, usual)[key]
                trial.close(case, got, want, rtol=0.0, atol=0.99)

    with trial.group(
        "largest_hole, with blocks in state 'inactive'", hint="print this snapshot, block by block", see=2
    ):
        for count, number in itertools.product((1, 2, 3, 7), (1, 2, 5)):
            holes = [512 * dice.randint(1, 10**6) for _ in range(count)]
            segments = _snapshot(dice, holes, number)
            case = f"{number} segments, the sizes of the free blocks are {holes}"
            got = entry(case, messages[0], segments, "largest_hole")
            trial.close(case, got, float(max(holes)), rtol=0.0, atol=0.0)
    with trial.group("largest_hole, with no such block", hint="what does your code do with no block to compare?"):
        for number in (0, 1, 3):
            got = entry(f"{number} segments", messages[0], _snapshot(dice, [], number), "largest_hole")
            trial.close(f"{number} segments", got, 0.0, rtol=0.0, atol=0.0)

    grid = itertools.product(
        ("1.00 GiB", "1025.00 MiB", "3.00 GiB"),
        ("0 bytes", "512.00 MiB", "1.00 GiB"),
        ("0 bytes", "1.00 GiB", "3071.00 MiB", "3.00 GiB"),
        ("0 bytes", "512.00 MiB", "513.00 MiB", "2.00 GiB"),
    )
    outcomes: dict[str, list[tuple[str, str]]] = {"does not fit": [], "fragmented": [], "held elsewhere": []}
    for requested, free, allocated, cached in grid:
        message = _message(0, requested, "4.00 GiB", free, "4.00 GiB", allocated, cached)
        case = f"requested {requested}, capacity 4.00 GiB, free {free}, allocated {allocated}, cached {cached}"
        outcomes[_post_mortem(message, usual)["verdict"]].append((case, message))
    ask = "try the three sentences on these numbers, in their order; what of equality?"
    for verdict, rows in outcomes.items():
        with trial.group(f"verdict {verdict!r}", hint=ask):
            for case, message in rows:
                for segments, hole in ((usual, "512 bytes"), (roomy, "64.00 GiB")):  # the verdict is the message's
                    name = f"{case}, largest hole {hole}"
                    trial.equal(name, entry(name, message, segments, "verdict"), verdict)


# ---------------------------------------------------------------- 15-07.5


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
    mixed = [
        torch.ones(n, dtype=t)
        for n, t in ((300, torch.float64), (700, torch.float16), (700, torch.int8), (9, torch.bool))
    ]
    return {
        "one matrix": nn.Linear(128, 128, bias=False),
        "tensors around 512 bytes": _Tensors([torch.ones(n) for n in (129, 128, 127, 1)]),
        "a scalar": _Tensors([torch.tensor(1.0)], [torch.tensor(3)]),
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
    "15-07.5",
    "Predict the part of a peak that does not depend on the batch",
    points=15,
    stand_in=lambda: _fixed_bytes,
    stand_in_name="a finished fixed_bytes",
)
def fixed_bytes(trial: Trial, answer: Any) -> None:
    """`answer(model, optimizer)` is the bytes of parameters, buffers, gradients and optimizer state."""
    cases = [(name, model, opt) for name, model in _models().items() for opt in ("sgd", "momentum", "adam")]
    before = {name: _state(model) for name, model, _ in cases}
    hints: dict[str, tuple[str, int | None]] = {
        "parameters": ("what is special about this model?", 1),
        "buffers": ("which tensors does this model hold beside its parameters?", None),
        "gradients": ("which tensors of this model get a gradient, and of what size?", 1),
        "optimizer": ("which tensors does this optimizer keep, for which parameters?", 1),
    }
    for key, (hint, see) in hints.items():
        with trial.group(f"{key}, in bytes", hint=hint, see=see):
            for name, model, optimizer in cases:
                case, twice = f"{name}, {optimizer}", name in ("a tied parameter", "a buffer in two modules")
                got = trial.call(case, lambda model=model, optimizer=optimizer: answer(model, optimizer))
                has = isinstance(got, Mapping) and key in got
                found = got[key] if has else f"no entry {key!r} in {got!r}"
                trial.equal(case, found, _fixed_bytes(model, optimizer)[key], hint=hint, see=2 if twice else see)
    with trial.group("nothing is computed, and the model stays as it is", hint="what do shapes and dtypes tell alone?"):
        for name, model, optimizer in cases:
            with _Touched(model) as touched:
                answer(model, optimizer)
            operators = ", ".join(dict.fromkeys(touched.operators))
            trial.equal(f"operators that worked on tensors of the model; {name}, {optimizer}", operators, "")
            changed = [what for what, value in _state(model).items() if before[name].get(what) != value]
            trial.equal(f"what has changed in the model; {name}, {optimizer}", changed, [])


def _state(model: nn.Module) -> dict[str, Any]:
    """What could change without any operator."""
    found: dict[str, Any] = {
        f"{name or 'model'}.{key}": len(value) if isinstance(value, dict) else value
        for name, m in model.named_modules()
        for key, value in vars(m).items()  # hooks among them
    }
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        found |= {name: id(p), f"{name}.grad": id(p.grad), f"{name}.requires_grad": p.requires_grad}
    return found


# ---------------------------------------------------------------- 15-07.6


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
    "15-07.6",
    "Stretch: the schedule of a prefetcher",
    points=25,
    stand_in=lambda: _prefetch,
    stand_in_name="a finished prefetch_schedule",
)
def prefetch_schedule(trial: Trial, answer: Any) -> None:
    """`answer(batches, copy, compute, depth)` is a list of Ops that overlap without a race."""
    dice = random.Random(6)
    cases = [(0, 1.0, 2.0, 1), (1, 2.0, 3.0, 2), (2, 2.0, 3.0, 1), (3, 1.0, 1.0, 3), (2, 3.0, 1.0, 5), (5, 2.0, 3.0, 2)]
    cases += [(4, 0.0, 2.0, 2), (4, 2.0, 0.0, 2), (12, 1.0, 1.0, 7)]
    for _ in range(30):
        copy, compute = dice.choice([0.5, 1.0, 2.0, 3.0]), dice.choice([0.5, 1.0, 2.0, 4.0])
        cases.append((dice.randint(2, 9), copy, compute, dice.randint(1, 4)))
    with trial.group("a list with a copy and a compute for each batch, and no others", hint="print the names in order"):
        for case in cases:
            ops, wanted = answer(*case), [f"{kind} {k}" for kind in ("compute", "copy") for k in range(case[0])]
            name = _call("prefetch_schedule", case)
            trial.that(name, isinstance(ops, list), expected="a list", got=repr(ops)[:200])
            others = [op for op in ops if not all(hasattr(op, field) for field in _Op._fields)]
            trial.that(name, not others, expected="an `Op` in each entry", got=repr(others[:1]))
            trial.equal(_call("names of prefetch_schedule", case), sorted(op.name for op in ops), sorted(wanted))
    with trial.group("engine and duration of each op", hint="compare this op with the sentence on the two kinds"):
        for case in cases:
            durations = {"copy": case[1], "compute": case[2]}
            for op in answer(*case):
                kind = op.name.split()[0]
                name = f"engine and seconds of {op.name!r}, {_call('prefetch_schedule', case)}"
                trial.equal(name, (op.engine, op.seconds), (kind, durations[kind]))
    with trial.group(
        "an op waits for earlier ones only", hint="what does this op wait for, and where does that stand?"
    ):
        for case in cases:
            seen: set[str] = set()
            for op in answer(*case):
                unknown = [name for name in op.after if name not in seen]
                trial.equal(f"{op.name!r} waits for what isn't there; {_call('prefetch_schedule', case)}", unknown, [])
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
    with trial.group("no buffer is overwritten while it is read", hint="which buffer does this copy write to?", see=2):
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
        "as fast as it can be", hint="draw it with draw_timeline: which op waits for more than it must?", see=3
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
                trial.that(
                    name if copies == spans[0][0] and computes == spans[0][1] else f"{name}, then it took {took}",
                    got <= best + 1e-9,
                    expected=f"the last compute ends at {best:g}",
                    got=f"{got:g}",
                )


@exercise("15-07.1", "Give back what is cached", points=10, stand_in=lambda: None, stand_in_name="tmp")
def give_back(trial, answer):
    pass


@exercise("15-07.4", "A matmul on the roofline", points=15, stand_in=lambda: None, stand_in_name="tmp")
def matmul_cost(trial, answer):
    pass
