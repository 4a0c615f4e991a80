"""Checks of the exercises in 15-07, CUDA Memory Management & GPU Internals."""

import copy
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shared.checks.feedback import Trial, exercise

MIB = 2**20

# ---------------------------------------------------------------- 15-07.1


def _plan(size: int, divisions: int = 1) -> tuple[int, str, int]:
    """Oracle, by counting up to the first multiple that is large enough."""
    step = 512
    if divisions > 1 and size > 512 * divisions:
        power = 1
        while power * 2 <= size:
            power *= 2
        step = power // divisions
    block = math.ceil(size / step) * step
    if block <= MIB:
        return block, "small", 2 * MIB
    return block, "large", 20 * MIB if block < 10 * MIB else math.ceil(block / (2 * MIB)) * 2 * MIB


@exercise("15-07.1", "Rounding and pool choice", stand_in=lambda: _plan)
def plan(trial: Trial, answer: Any) -> None:
    """`answer(size, divisions)` is (bytes of the block, "small" or "large", bytes of a new segment)."""
    first = answer(1)
    trial.that(
        "returns (block, pool, segment)",
        isinstance(first, tuple) and len(first) == 3,
        expected='a tuple such as (512, "small", 2097152)',
        got=repr(first),
        hint="return block, pool, segment",
    )
    plain = {
        "requests round up to 512 bytes": ([1, 511, 512, 513, 1024, 1025], "-(-size // 512) * 512; 512 stays 512"),
        "1 MiB is the last small request": (
            [MIB - 512, MIB - 511, MIB, MIB + 1],
            "up to 1 MiB is small, and 1 MiB itself is",
        ),
        "large requests below 10 MiB get 20 MiB": (
            [MIB + 1, 3 * MIB, 10 * MIB - 512, 10 * MIB - 511, 10 * MIB - 1],
            "compare the rounded size with 10 MiB: 10 MiB - 1 rounds to 10 MiB, which is not below it",
        ),
        "from 10 MiB on a segment of its own": (
            [10 * MIB, 10 * MIB + 1, 11 * MIB, 21 * MIB, 22 * MIB, 2**33 + 1],
            "round the block up to a multiple of 2 MiB",
        ),
    }
    for item, (sizes, hint) in plain.items():
        for size in sizes:
            _same(trial, item, answer(size), _plan(size), f"size {size}", hint)
        trial.passes(item)
    cases = {2: (1024, 1025, 1536, 1537), 4: (313, 700, 2048, 2049, 1228800, 5 * MIB + 1), 8: (4096, 9999)}
    for divisions, sizes in cases.items():
        for size in sizes:
            _same(
                trial,
                "roundup_power2_divisions",
                answer(size, divisions),
                _plan(size, divisions),
                f"size {size}, divisions {divisions}",
                "only if size > 512 * divisions; the step is the largest power of two <= size, divided by divisions",
            )
    generator = random.Random(0)
    for _ in range(300):
        size, divisions = int(2 ** generator.uniform(0, 34)), 2 ** generator.randrange(5)
        hint = "run this case by itself and compare with the rules one by one"
        _same(
            trial, "300 sizes by chance", answer(size, divisions), _plan(size, divisions), f"{size}, {divisions}", hint
        )
    trial.passes("roundup_power2_divisions")
    trial.passes("300 sizes by chance")


def _same(trial: Trial, item: str, got: Any, want: Any, where: str, hint: str) -> None:
    """Fail the item if the two differ; a pass is not listed, so that many cases make one line."""
    trial.needs(item, got == want, expected=f"{want!r} for {where}", got=repr(got), hint=hint)


# ---------------------------------------------------------------- 15-07.2

FreeBlock = tuple[int, int, int]


def _fit(
    free: Sequence[FreeBlock], size: int, stream: int, small: bool, max_split_size: float = math.inf
) -> tuple[FreeBlock, FreeBlock | None] | None:
    """Oracle: a walk over the sorted list."""
    for owner, found, address in sorted(free):
        if owner == stream and found >= size:
            if size < max_split_size and found >= max_split_size:
                return None
            if size >= max_split_size and found - size >= 20 * MIB:
                return None
            rest = found - size
            if (small and rest >= 512) or (not small and rest > MIB and size < max_split_size):
                return (stream, size, address), (stream, rest, address + size)
            return (stream, found, address), None
    return None


def _fit_hint(got: Any, want: Any, limit: float) -> str:
    """What to look at when the block is the right one and only the cut is not; else nothing."""
    if not (isinstance(got, tuple) and isinstance(want, tuple) and len(got) == 2 and isinstance(got[0], tuple)):
        return ""
    if got[0] == want[0]:
        return "the block is right, the rest is not: it starts at address + size, and is None if there is nothing left"
    if limit == math.inf and want[1] is not None and got[1] is None and got[0][::2] == want[0][::2]:
        return "the right block, but it is to be split: rule 5 asks for at least 512 bytes left, or more than 1 MiB"
    return ""


@exercise("15-07.2", "Best fit with splitting", stand_in=lambda: _fit)
def fit(trial: Trial, answer: Any) -> None:
    """`answer(free, size, stream, small, max_split_size)` is (block, rest or None), or None."""
    k = 1024
    tables: list[tuple[str, list[FreeBlock], int, int, bool, float, str]] = [
        ("nothing fits: None", [(0, 512, 0)], 1024, 0, True, math.inf, "no block of this stream is large enough"),
        (
            "the smallest that is large enough",
            [(0, 8 * k, 0), (0, 4 * k, 20 * k), (0, 2 * k, 40 * k)],
            3 * k,
            0,
            True,
            math.inf,
            "best fit, not first fit and not the largest",
        ),
        (
            "the lowest address among equals",
            [(0, 4 * k, 90 * k), (0, 4 * k, 20 * k), (0, 4 * k, 50 * k)],
            4 * k,
            0,
            True,
            math.inf,
            "order (stream, size, address): of two equal sizes the lower address",
        ),
        (
            "never another stream's block",
            [(0, 4 * k, 0), (1, 64 * k, 8 * k), (2, 4 * k, 80 * k)],
            4 * k,
            1,
            True,
            math.inf,
            "filter by the stream first; a block of another stream may still be in use there",
        ),
        ("an exact fit leaves no rest", [(3, 4 * k, 0)], 4 * k, 3, True, math.inf, "rest is None, not an empty block"),
        ("small pool: 512 bytes are split off", [(0, 1536, 0)], 1024, 0, True, math.inf, "at least 512 bytes"),
        (
            "a request keeps what is not split off",
            [(0, 4 * MIB, 0)],
            3 * MIB + 512,
            0,
            False,
            math.inf,
            "the block handed out keeps the size it was found with",
        ),
        (
            "large pool: exactly 1 MiB is not split off",
            [(0, 4 * MIB, 0)],
            3 * MIB,
            0,
            False,
            math.inf,
            "more than 1 MiB must be left",
        ),
        (
            "large pool: more than 1 MiB is",
            [(0, 4 * MIB + 512, 7 * MIB)],
            3 * MIB,
            0,
            False,
            math.inf,
            "the rest starts where the block ends: address + size",
        ),
        (
            "max_split_size: a small request gets no oversize block",
            [(0, 64 * MIB, 0)],
            2 * MIB,
            0,
            False,
            32 * MIB,
            "size < max_split_size <= found: None",
        ),
        (
            "max_split_size: an oversize request isn't split",
            [(0, 64 * MIB, 0)],
            60 * MIB,
            0,
            False,
            32 * MIB,
            "the whole block, although 4 MiB are left over",
        ),
        (
            "max_split_size: nor gets a block 20 MiB larger",
            [(0, 64 * MIB, 0)],
            44 * MIB,
            0,
            False,
            32 * MIB,
            "found >= size + 20 MiB: None; 20 MiB itself is too much",
        ),
        (
            "max_split_size: below it blocks are split as ever",
            [(0, 30 * MIB, 0)],
            4 * MIB,
            0,
            False,
            32 * MIB,
            "the limit concerns requests and blocks of max_split_size and more",
        ),
        (
            "the small pool is split whatever max_split_size",
            [(0, 2 * MIB, 0)],
            1024,
            0,
            True,
            32 * MIB,
            "rule 5 for the small pool does not look at max_split_size",
        ),
        (
            "the small pool is split, however low max_split_size",
            [(0, 2048, 0)],
            1024,
            0,
            True,
            1024,
            "only the large pool's rule 5 looks at max_split_size",
        ),
    ]
    for item, free, size, stream, small, limit, hint in tables:
        given = list(free)
        got = answer(free, size, stream, small, limit)
        want = _fit(given, size, stream, small, limit)
        if item.startswith("nothing"):
            trial.needs(item, got is None, expected="None", got=repr(got), hint=hint)
        else:
            trial.that(item, got == want, expected=repr(want), got=repr(got), hint=_fit_hint(got, want, limit) or hint)
        trial.needs(
            "free stays as it is", free == given, expected="the list as it was given", got=repr(free), hint="don't pop"
        )
    generator = random.Random(1)
    for _ in range(200):
        small = generator.random() < 0.5
        unit = 512 if small else MIB // 2
        free = [(generator.randrange(3), unit * generator.randrange(3, 60), unit * 100 * i) for i in range(12)]
        generator.shuffle(free)
        size, limit = unit * generator.randrange(3, 60), generator.choice([math.inf, 21 * MIB, 8192])
        case = (list(free), size, generator.randrange(3), small, limit)
        trial.needs(
            "200 lists by chance",
            answer(free, *case[1:]) == _fit(*case),
            expected=f"{_fit(*case)!r} for {case!r}"[:300],
            got=repr(answer(list(case[0]), *case[1:])),
            hint="run this case by itself and compare with the rules one by one",
        )
    trial.passes("200 lists by chance")


# ---------------------------------------------------------------- 15-07.3

Piece = tuple[int, int, str]


def _give_back(blocks: Sequence[Piece], address: int) -> list[Piece]:
    """Oracle: free bytes marked one by one (in units of 512), then read off again."""
    if (address, "used") not in {(start, state) for start, _, state in blocks}:
        raise ValueError(f"no used block starts at {address}")
    owner: list[int | None] = []
    for start, size, state in blocks:
        owner += [None if state == "free" or start == address else start] * (size // 512)
    base, result = blocks[0][0], []
    for index, who in enumerate(owner):
        if result and result[-1][0] == who:
            result[-1][2] += 512
        else:
            result.append([who, base + 512 * index, 512])
    return [(start, size, "free" if who is None else "used") for who, start, size in result]


@exercise("15-07.3", "Coalescing", stand_in=lambda: _give_back)
def give_back(trial: Trial, answer: Any) -> None:
    """`answer(blocks, address)` is the segment after the used block at `address` was freed."""
    generator = random.Random(2)
    hints = {
        "no gap and no overlap": "each block starts where the one before it ends",
        "bytes are conserved": "the joined block has the sum of the sizes",
        "neighbours are never both free": "join with the left one and with the right one: three may become one",
        "used blocks are untouched": "only the block at `address` is freed",
        "blocks are (address, size, state)": 'tuples, state "used" or "free"',
        "the same as by definition": "nothing but the freed block and its free neighbours changes",
    }
    for _ in range(150):
        blocks = _random_segment(generator)
        address = generator.choice([start for start, _, state in blocks if state == "used"])
        given = list(blocks)
        got = answer(blocks, address)
        for item, holds in _properties(got, given, address).items():
            trial.needs(item, holds, expected=f"{_give_back(given, address)}", got=repr(got), hint=hints[item])
        trial.needs(
            "the argument stays as it is",
            blocks == given,
            expected=repr(given),
            got=repr(blocks),
            hint="build a new list",
        )
    for item in (*hints, "the argument stays as it is"):
        trial.passes(item)
    blocks = [(0, 512, "used"), (512, 1024, "free"), (1536, 512, "used")]
    for address, what in ((512, "a free block's address"), (1024, "an address inside a block"), (9999, "nowhere")):
        error: BaseException | None = None
        try:
            answer(blocks, address)
        except Exception as caught:
            error = caught
        trial.that(
            f"ValueError for {what}",
            isinstance(error, ValueError),
            expected="ValueError",
            got=repr(error),
            hint="a double free must not pass silently",
        )


def _random_segment(generator: random.Random) -> list[Piece]:
    """A segment of 2 to 12 blocks in which neighbours are never both free, at least one of them used."""
    at, last, blocks = 512 * generator.randrange(1000), "", []
    for _ in range(generator.randrange(2, 13)):
        state = "used" if last == "free" or generator.random() < 0.5 else "free"
        size = 512 * generator.randrange(1, 9)
        blocks.append((at, size, state))
        at, last = at + size, state
    return blocks


def _properties(got: Any, given: list[Piece], address: int) -> dict[str, bool]:
    """What must hold after a block was freed, the telling ones first."""
    item = "blocks are (address, size, state)"
    good = isinstance(got, list) and all(isinstance(p, tuple) and len(p) == 3 and p[2] in ("used", "free") for p in got)
    if not good or not got:
        return {item: False}
    neighbours = list(itertools.pairwise(got))
    used = [piece for piece in given if piece[2] == "used" and piece[0] != address]
    return {
        item: True,
        "bytes are conserved": sum(size for _, size, _ in got) == sum(size for _, size, _ in given),
        "no gap and no overlap": got[0][0] == given[0][0] and all(a[0] + a[1] == b[0] for a, b in neighbours),
        "neighbours are never both free": not any(a[2] == b[2] == "free" for a, b in neighbours),
        "used blocks are untouched": [piece for piece in got if piece[2] == "used"] == used,
        "the same as by definition": got == _give_back(given, address),
    }


# ---------------------------------------------------------------- 15-07.4


class _Case(NamedTuple):
    """An out-of-memory situation, in MiB."""

    requested: int
    capacity: int
    free: int
    allocated: int
    cached: int
    pieces: tuple[int, ...]

    def message(self) -> str:
        used = self.capacity - self.free
        return (
            f"CUDA out of memory. Tried to allocate {_pretty(self.requested)}. GPU 0 has a total capacity of "
            f"{_pretty(self.capacity)} of which {_pretty(self.free)} is free. Including non-PyTorch memory, this "
            f"process has {_pretty(used)} memory in use. Of the allocated memory {_pretty(self.allocated)} is "
            f"allocated by PyTorch, and {_pretty(self.cached)} is reserved by PyTorch but unallocated. If reserved "
            "but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
            "fragmentation.  See documentation for Memory Management"
        )

    def segments(self) -> list[dict]:
        """One segment a free piece, each beside a block in use; and one in which nothing is free yet."""
        found, at = [], 2**40
        for piece in (*self.pieces, 0):
            parts = [{"address": at, "size": 20 * MIB, "state": "active_allocated"}]
            if piece:
                parts.append({"address": at + 20 * MIB, "size": piece * MIB, "state": "inactive"})
            waiting = 512 if piece else 2 * max(self.pieces, default=1) * MIB  # the largest block is not a hole
            parts.append({"address": at + (20 + piece) * MIB, "size": waiting, "state": "active_pending_free"})
            found.append({"address": at, "total_size": sum(p["size"] for p in parts), "stream": 0, "blocks": parts})
            at += 2**36
        return found


def _pretty(mib: int) -> str:
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.2f} MiB"


_CASES = {
    "fragmented": _Case(2048, 8192, 512, 4096, 3072, (1024, 1024, 1024)),
    "fragmented, and only just": _Case(4096, 8192, 2304, 4096, 1792, (1024, 768)),
    "does not fit": _Case(6144, 8192, 2048, 4096, 1024, (512, 512)),
    "held elsewhere": _Case(2048, 8192, 128, 2048, 256, (256,)),
}


def _post_mortem(message: str, segments: list[dict]) -> dict[str, Any]:
    """Oracle: split at the words around the numbers."""

    def read(before: str, after: str) -> float:
        number, unit = message.split(before)[1].split(after)[0].split()
        return float(number) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]

    found: dict[str, Any] = {
        "requested": read("Tried to allocate ", ". GPU"),
        "capacity": read("total capacity of ", " of which"),
        "free": read("of which ", " is free"),
        "allocated": read("Of the allocated memory ", " is allocated"),
        "cached": read("PyTorch, and ", " is reserved"),
        "largest_hole": max((b["size"] for s in segments for b in s["blocks"] if b["state"] == "inactive"), default=0),
    }
    if found["requested"] + found["allocated"] > found["capacity"]:
        found["verdict"] = "does not fit"
    elif found["free"] + found["cached"] >= found["requested"]:
        found["verdict"] = "fragmented"
    else:
        found["verdict"] = "held elsewhere"
    return found


@exercise("15-07.4", "The post-mortem of an OOM", stand_in=lambda: _post_mortem)
def post_mortem(trial: Trial, answer: Any) -> None:
    """`answer(message, segments)` is a dictionary of bytes and a verdict."""
    before = {
        "requested": "Tried to allocate",
        "capacity": "total capacity of",
        "free": "of which",
        "allocated": "Of the allocated memory",
        "cached": "by PyTorch, and",
    }
    for name, case in _CASES.items():
        got = trial.call(
            f"no exception ({name})",
            lambda case=case: answer(case.message(), case.segments()),
            hint="call it with the message and the segments of this case by hand",
        )
        want = _post_mortem(case.message(), case.segments())
        trial.that(
            f"all the keys ({name})",
            isinstance(got, dict) and sorted(got) == sorted(want),
            expected=", ".join(want),
            got=", ".join(map(str, got)) if isinstance(got, dict) else repr(got),
            hint="the seven names are in the task",
        )
        for key, words in before.items():
            trial.that(
                f"{key} in bytes ({name})",
                isinstance(got[key], int | float) and abs(got[key] - want[key]) < 1,
                expected=f"{want[key]:.0f}",
                got=repr(got[key]),
                hint=f"it stands after {words!r}; '2.00 GiB' is 2 * 2**30, and the unit differs from field to field",
            )
        trial.that(
            f"the largest free block ({name})",
            got["largest_hole"] == want["largest_hole"],
            expected=str(want["largest_hole"]),
            got=repr(got["largest_hole"]),
            hint="the largest block with state 'inactive'; a block that waits for an event is not free",
        )
        trial.equal(
            f"the verdict ({name})",
            got["verdict"],
            want["verdict"],
            hint="in this order: requested + allocated > capacity; free + cached >= requested; else held elsewhere",
        )
    small = _Case(20, 8192, 4, 8000, 18, ()).message()
    got = trial.call("no segments", lambda: answer(small, []), hint="max() of nothing raises: max(..., default=0)")
    trial.that(
        "no free block at all: 0",
        got["largest_hole"] == 0 and abs(got["requested"] - 20 * MIB) < 1,
        expected="largest_hole 0, requested 20971520",
        got=f"{got['largest_hole']!r}, {got['requested']!r}",
        hint="max(..., default=0)",
    )
    for text, size in (("512.00 KiB", 2**19), ("512 bytes", 512)):
        changed = small.replace("4.00 MiB is free", f"{text} is free")
        got = trial.call(
            f"no exception with '{text}'",
            lambda changed=changed: answer(changed, []),
            hint="units are bytes, KiB, MiB and GiB",
        )
        trial.that(
            f"reads '{text}'",
            abs(got["free"] - size) < 1,
            expected=str(size),
            got=repr(got["free"]),
            hint="units are bytes, KiB, MiB and GiB; a count of bytes has no decimals",
        )


# ---------------------------------------------------------------- 15-07.5


def _fixed_bytes(model: nn.Module, optimizer: str) -> dict[str, int]:
    """Oracle: over storages seen by identity."""

    def block(tensor: torch.Tensor) -> int:
        return max(512, math.ceil(tensor.nbytes / 512) * 512)

    parameters = {id(p): p for m in model.modules() for p in m._parameters.values() if p is not None}
    buffers = {id(b): b for m in model.modules() for b in m._buffers.values() if b is not None}
    trained = sum(block(p) for p in parameters.values() if p.requires_grad)
    return {
        "parameters": sum(map(block, parameters.values())),
        "buffers": sum(map(block, buffers.values())),
        "gradients": trained,
        "optimizer": {"sgd": 0, "momentum": 1, "adam": 2}[optimizer] * trained,
    }


class _Tied(nn.Module):
    """An embedding whose weight is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 10)
        self.out = nn.Linear(10, 50, bias=False)
        self.out.weight = self.embed.weight


@exercise("15-07.5", "Predict the part of a peak that does not depend on the batch", stand_in=lambda: _fixed_bytes)
def fixed_bytes(trial: Trial, answer: Any) -> None:
    """`answer(model, optimizer)` is the bytes of parameters, buffers, gradients and optimizer state."""
    simple = nn.Linear(128, 128, bias=False)
    got = answer(simple, "adam")
    want = _fixed_bytes(simple, "adam")
    trial.that(
        "has the four keys",
        isinstance(got, dict) and sorted(got) == sorted(want),
        expected=", ".join(want),
        got=repr(got)[:200],
        hint="parameters, buffers, gradients, optimizer",
    )
    models = {
        "one matrix": (simple, "numel() * element_size() bytes a tensor"),
        "small tensors": (
            nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)),
            "every tensor is a block of its own: round each one up to 512 bytes, not their sum",
        ),
        "buffers": (
            nn.BatchNorm1d(300),
            "buffers have no gradient and no state",
        ),
        "frozen parameters": (
            nn.Sequential(nn.Linear(10, 10).requires_grad_(False), nn.Linear(10, 7)),
            "they are stored, but have no gradient and no state",
        ),
        "tied parameters": (_Tied(), "model.parameters() gives a tied one once"),
        "bfloat16": (nn.Linear(10, 1000, dtype=torch.bfloat16), "a bfloat16 element has 2 bytes"),
    }
    buffers = "model.buffers() gives each once, and no parameter"
    for name, (model, hint) in models.items():
        before = copy.deepcopy(model.state_dict())
        for optimizer in ("sgd", "momentum", "adam"):
            got, want = answer(model, optimizer), _fixed_bytes(model, optimizer)
            for key in want:
                trial.needs(
                    f"{name}: {key}",
                    got[key] == want[key],
                    expected=f"{want[key]} with {optimizer}",
                    got=repr(got[key]),
                    hint={"optimizer": f"sgd 0, momentum 1, adam 2 tensors a gradient; {hint}", "buffers": buffers}.get(
                        key, hint
                    ),
                )
        trial.needs(
            "the model stays as it is",
            all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)),
            expected="the same values",
            got="others",
            hint="nothing needs to be computed",
        )
        trial.passes(name)
    with torch.device("meta"):
        model = nn.Linear(50_000, 50_000)
    trial.that(
        "10 GB on the meta device",
        answer(model, "adam") == _fixed_bytes(model, "adam"),
        expected=repr(_fixed_bytes(model, "adam")),
        got=repr(answer(model, "adam")),
        hint="sizes are known without data",
    )


# ---------------------------------------------------------------- 15-07.6


class _Op(NamedTuple):
    name: str
    engine: str
    stream: str
    seconds: float
    after: tuple[str, ...] = ()


def _prefetch(batches: int, copy: float, compute: float, depth: int, op: Callable[..., Any] = _Op) -> list[Any]:
    """Stand-in: copies on one stream, compute on the other, events both ways."""
    ops = []
    for k in range(batches):
        reused = (f"compute {k - depth}",) if k >= depth else ()
        ops.append(op(f"copy {k}", "copy", "loader", copy, reused))
        ops.append(op(f"compute {k}", "compute", "main", compute, (f"copy {k}",)))
    return ops


def _run(ops: Sequence[Any]) -> dict[str, tuple[float, float]]:
    """Start and end of each op: after its engine's and its stream's last one, and after what it waits for."""
    engines: dict[str, float] = {}
    streams: dict[str, float] = {}
    times: dict[str, tuple[float, float]] = {}
    for op in ops:
        waits = [times[name][1] for name in op.after]
        start = max([engines.get(op.engine, 0.0), streams.get(op.stream, 0.0), *waits])
        times[op.name] = (start, start + op.seconds)
        engines[op.engine] = streams[op.stream] = start + op.seconds
    return times


def _best(batches: int, copy: float, compute: float, depth: int) -> float:
    """The shortest possible time, by recurrence."""
    copied, computed = [0.0] * batches, [0.0] * batches
    for k in range(batches):
        free = computed[k - depth] if k >= depth else 0.0
        copied[k] = max(copied[k - 1] if k else 0.0, free) + copy
        computed[k] = max(computed[k - 1] if k else 0.0, copied[k]) + compute
    return computed[-1]


@exercise("15-07.6", "Stretch: the schedule of a prefetcher", stand_in=lambda: _prefetch)
def prefetch_schedule(trial: Trial, answer: Any) -> None:
    """`answer(batches, copy, compute, depth)` is a list of Ops that overlap without a race."""
    for batches, copy_, compute, depth in ((5, 2.0, 3.0, 2), (6, 3.0, 2.0, 2), (4, 1.0, 1.0, 1), (7, 1.0, 4.0, 3)):
        where = f"({batches} batches, copy {copy_:g}, compute {compute:g}, depth {depth})"
        ops = list(answer(batches, copy_, compute, depth))
        names = [op.name for op in ops]
        wanted = {f"{kind} {k}" for kind in ("copy", "compute") for k in range(batches)}
        trial.that(
            f"a copy and a compute for each batch {where}",
            sorted(names) == sorted(wanted),
            expected=f"{len(wanted)} ops, 'copy 0', 'compute 0', 'copy 1', ...",
            got=", ".join(names)[:160],
            hint="name them by kind and batch, each once",
        )
        seconds = {"copy": copy_, "compute": compute}
        trial.needs(
            f"engines and seconds {where}",
            all(op.engine == op.name.split()[0] and op.seconds == seconds[op.engine] for op in ops),
            expected="engine 'copy' with `copy` seconds, engine 'compute' with `compute` seconds",
            got=repr([op for op in ops if op.seconds != seconds.get(op.engine)][:2]),
            hint="Op(name, engine, stream, seconds, after)",
        )
        seen: set[str] = set()
        for op in ops:
            unknown = [name for name in op.after if name not in seen]
            trial.needs(
                f"ops wait for earlier ones only {where}",
                not unknown,
                expected="names of ops that stand before it in the list",
                got=f"{op.name} waits for {unknown}",
                hint="an event can be waited for only once it has been recorded",
            )
            seen.add(op.name)
        _no_race(trial, ops, batches, depth, where)
        got, best = max(end for _, end in _run(ops).values()), _best(batches, copy_, compute, depth)
        trial.that(
            f"as fast as it can be {where}",
            math.isclose(got, best),
            expected=f"{best:g} s",
            got=f"{got:g} s",
            hint="two streams; nothing waits for more than it must, and copies are issued before they are needed",
        )


def _no_race(trial: Trial, ops: Sequence[Any], batches: int, depth: int, where: str) -> None:
    """Order must hold by streams and events, not by how long things take: try many durations."""
    generator = random.Random(3)
    for _ in range(25):
        varied = [_Op(op.name, op.name, op.stream, generator.uniform(0.01, 5), tuple(op.after)) for op in ops]
        times = _run(varied)
        for k in range(batches):
            trial.needs(
                f"compute waits for its copy {where}",
                times[f"compute {k}"][0] >= times[f"copy {k}"][1],
                expected=f"compute {k} after copy {k}, however long a copy takes",
                got="with other durations it starts before",
                hint="after=('copy k',): streams know nothing of each other; only an event makes one wait",
            )
            if k >= depth:
                trial.needs(
                    f"a buffer is not overwritten while it is read {where}",
                    times[f"copy {k}"][0] >= times[f"compute {k - depth}"][1],
                    expected=f"copy {k} after compute {k - depth}: both use buffer {k % depth}",
                    got="with other durations it starts before",
                    hint="there are `depth` buffers, so copy k has to wait for compute k - depth",
                )
    trial.passes(f"no race, whatever the durations {where}")
