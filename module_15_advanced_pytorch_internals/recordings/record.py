"""Record on an NVIDIA GPU what 15-07 shows where there is none.

    python record.py --folder FOLDER

Needs torch and the standard library, one GPU with 16 GiB free, and about a minute. It writes

    gpu_measurements.json               what the notebook's live cells measure, one entry for each part
    gpu_training_history.json.gz        the caching allocator's own history, from an empty process: training with a
                                        varying batch size, empty_cache, two streams, an out-of-memory error

Each part runs by itself: one that fails is named at the end, and the others are written all the same. With settings of
the allocator that aren't the default (PYTORCH_ALLOC_CONF) nothing is recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import json
import linecache
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
KIB, MIB, GIB = 2**10, 2**20, 2**30
LETTERS = {"alloc": "a", "free_completed": "f", "segment_alloc": "+", "segment_free": "-"}


# ---------------------------------------------------------------- histories


def pack(before: list[dict], trace: list[dict], after: list[dict], **facts: Any) -> bytes:
    """The compact form of an allocator's history, gzipped; pack_history.py says what it is.

    Events that move no memory (a free that was asked for, a snapshot, an error) are left out.
    """
    events = [event for event in trace if event["action"] in LETTERS]
    history = facts | {
        "before": [pack_segment(segment) for segment in before],
        "actions": "".join(LETTERS[event["action"]] for event in events),
        "addresses": [event["addr"] for event in events],
        "sizes": [event["size"] for event in events],
        "streams": [event["stream"] for event in events],
        "after": [pack_segment(segment) for segment in after],
    }
    return gzip.compress(json.dumps(history, separators=(",", ":")).encode(), mtime=0)


def pack_segment(segment: dict) -> list:
    """[address, stream, pool, sizes of the blocks], in which a free block has a negative size."""
    blocks = sorted(segment["blocks"], key=lambda block: block["address"])
    sizes = [-block["size"] if block["state"] == "inactive" else block["size"] for block in blocks]
    return [segment["address"], segment["stream"], segment["segment_type"], sizes]


def allocator_history(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The first part: nothing of this process is on the GPU yet."""
    import torch

    memory = torch.cuda.memory
    torch.cuda.empty_cache()
    before = memory._snapshot()["segments"]
    memory._record_memory_history(max_entries=1_000_000, context=None)
    try:
        train_with_batches((64, 128, 96, 256, 32))
        torch.cuda.empty_cache()
        train_with_batches((128, 64))
        two_streams()
        run_out_of_memory()
        found = memory._snapshot()
    finally:
        memory._record_memory_history(enabled=None)
    trace = found["device_traces"][torch.cuda.current_device()]
    packed = pack(before, trace, found["segments"], **facts)
    (folder / "gpu_training_history.json.gz").write_bytes(packed)
    return {"events": len(trace), "bytes": len(packed)}


def train_with_batches(sizes: tuple[int, ...]) -> None:
    import torch
    import torch.nn.functional as F

    model, optimizer, _ = small_setup()
    for size in sizes:
        x, y = torch.randn(size, 3, 32, 32).cuda(), torch.zeros(size, dtype=torch.long).cuda()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def two_streams() -> None:
    import torch

    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    for size in (1 << 20, 3 << 20, 1 << 20):
        with torch.cuda.stream(side):
            batch = torch.ones(size, device="cuda")
        main.wait_stream(side)
        batch.record_stream(main)
        (batch * 2).sum()
        del batch
    torch.cuda.synchronize()


def run_out_of_memory() -> None:
    import torch

    kept = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del kept[::2]
    total = torch.cuda.mem_get_info()[1]
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")


# ---------------------------------------------------------------- a training step


def small_setup(images: int = 64) -> tuple[Any, Any, tuple]:
    """The net, the optimizer and a batch of the notebook."""
    import torch
    from torch import nn

    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    net = nn.Sequential(
        *stage(3, 32),
        *stage(32, 32),
        nn.MaxPool2d(2),
        *stage(32, 64),
        *stage(64, 64),
        nn.MaxPool2d(2),
        *stage(64, 128),
        nn.Flatten(),
        nn.Linear(8192, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    ).cuda()
    batch = torch.randn(images, 3, 32, 32).cuda(), torch.randint(10, (images,)).cuda()
    return net, torch.optim.Adam(net.parameters(), foreach=True), batch


def train_step(net: Any, optimizer: Any, x: Any, y: Any) -> Any:
    import torch.nn.functional as F

    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def peaks() -> dict[str, Any]:
    """memory_allocated and its peak, step by step, and some of memory_stats."""
    import torch

    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    net, optimizer, batch = small_setup()
    found: dict[str, Any] = {"base": base, "built": torch.cuda.memory_allocated(), "steps": []}
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        train_step(net, optimizer, *batch)
        row = {"after": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}
        row |= {"reserved": torch.cuda.memory_reserved(), "peak reserved": torch.cuda.max_memory_reserved()}
        found["steps"].append(row)
    stats = torch.cuda.memory_stats()
    names = (
        "allocated_bytes.all.current",
        "allocated_bytes.all.peak",
        "reserved_bytes.all.current",
        "inactive_split_bytes.all.current",
        "allocation.all.allocated",
        "num_device_alloc",
        "num_alloc_retries",
        "num_ooms",
    )
    free, total = torch.cuda.mem_get_info()
    return found | {"stats": {name: stats.get(name) for name in names}, "free": free, "total": total}


def make_probe() -> Any:
    """A net with a debugging aid that somebody forgot: it keeps each batch's features."""
    import torch
    from torch import nn

    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            self.head = nn.Linear(64 * 16 * 16, 10)
            self.seen: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            features = self.stem(x)
            self.seen.append(features.detach())
            return self.head(features.flatten(1))

    return Probe()


def stacks() -> dict[str, Any]:
    """A snapshot with Python stacks, taken after five steps that leak."""
    import torch

    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=100_000, context="all", stacks="python")
    try:
        net = make_probe().cuda()
        optimizer = torch.optim.Adam(net.parameters())
        x, y = torch.randn(64, 3, 32, 32).cuda(), torch.randint(10, (64,)).cuda()
        for _ in range(5):
            train_step(net, optimizer, x, y)
        found = memory._snapshot()
    finally:
        memory._record_memory_history(enabled=None)
    known: dict[str, int] = {}
    rows: list[list] = []

    def number(frames: list[dict]) -> int:
        short = [[short_name(frame["filename"]), frame["line"], frame["name"], source(frame)] for frame in frames]
        key = json.dumps(short)
        if key not in known:
            known[key] = len(rows)
            rows.append(short)
        return known[key]

    segments = []
    for segment in found["segments"]:
        blocks = []
        for block in segment["blocks"]:
            frames = block.get("frames") or []
            blocks.append([block["size"], block.get("requested_size", 0), block["state"], number(frames)])
        segments.append([segment["address"], segment["total_size"], segment["segment_type"], blocks])
    return {"segments": segments, "stacks": rows, "steps": 5}


def short_name(path: str) -> str:
    parts = Path(path).parts
    return "/".join(parts[parts.index("site-packages") + 1 :]) if "site-packages" in parts else parts[-1]


def source(frame: dict) -> str:
    """The text of a line of this file."""
    return linecache.getline(frame["filename"], frame["line"]).strip() if frame["filename"] == __file__ else ""


# ---------------------------------------------------------------- out of memory


def take(count: int, size: int) -> list[Any]:
    import torch

    return [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(count)]


def workload(kept_first: bool = False, flush: bool = False, parts: int = 1) -> None:
    """The notebook's: a validation pass, a training pass that keeps features, then 2 GiB."""
    import torch

    validation = take(10, 768 * MIB)
    del validation
    if flush:
        torch.cuda.empty_cache()
    training, kept = [], take(10 * kept_first, 96 * MIB)
    for _ in range(10):
        training += take(1, 640 * MIB)
        kept += take(1 - kept_first, 96 * MIB)
    del training
    for _ in range(parts):
        take(1, 2 * GIB // parts)


def outcome(work: Callable[[], object]) -> dict[str, Any]:
    """How it ended, with the numbers of the moment. The cache is emptied first."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    found: dict[str, Any] = {"message": "", "segments": []}
    try:
        work()
    except torch.OutOfMemoryError as error:
        found["message"] = str(error)
        segments = torch.cuda.memory._snapshot()["segments"]  # the frames of the error still hold its tensors
        found["segments"] = [
            [s["device"], s["total_size"], [[b["size"], b["state"]] for b in s["blocks"]]] for s in segments
        ]
        del error
    stats = torch.cuda.memory_stats()
    found["peak reserved"] = torch.cuda.max_memory_reserved()
    found["stats"] = {name: stats.get(name) for name in ("num_device_alloc", "num_device_free", "num_alloc_retries")}
    return found


def capped(size: int, work: Callable[[], object]) -> dict[str, Any]:
    """The outcome under a cap of so many bytes."""
    import torch

    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(size / total)
    try:
        return outcome(work) | {"cap": size}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def too_little_for(size: int) -> dict[str, Any]:
    """The outcome of the workload on a GPU on which only so much is free: the rest is filled with one tensor."""
    import torch

    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    filler = take(1, (free - size) // (2 * MIB) * (2 * MIB))
    found = outcome(workload)
    found["filler"] = filler[0].numel()
    return found


def out_of_memory() -> dict[str, Any]:
    def simple() -> None:
        kept = take(1, 3 * GIB)
        take(len(kept), 2 * GIB)

    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "capped": lambda: capped(4 * GIB, simple),
        "fragmented": lambda: too_little_for(9 * GIB),
        "does not fit": lambda: outcome(lambda: take(1, 200 * GIB)),
        "as it is": lambda: capped(9 * GIB, workload),
        "kept tensors first": lambda: capped(9 * GIB, lambda: workload(kept_first=True)),
        "empty_cache between phases": lambda: capped(9 * GIB, lambda: workload(flush=True)),
        "half the batch, twice": lambda: capped(9 * GIB, lambda: workload(parts=2)),
        "expandable segments": lambda: child("expandable_segments:True"),
        "max_split_size 512 MiB": lambda: child("max_split_size_mb:512"),
    }
    found = {}
    for name, case in cases.items():
        try:
            found[name] = case()
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:300]}")
            found[name] = {"failed": type(error).__name__}
    return found


def child(settings: str) -> dict[str, Any]:
    """The workload in a process of its own, with these settings of the allocator."""
    env = os.environ | {"PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings}
    command = [sys.executable, __file__, "--child"]
    done = subprocess.run(command, env=env, timeout=100, check=False, capture_output=True, text=True)
    if done.returncode:
        print(f"  {settings}: {done.stderr[-1000:]}")
        return {"failed": done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


def trying_again() -> dict[str, Any]:
    """Bytes in use inside of `except`, and after it."""
    import torch

    def step() -> None:
        activations = take(1, GIB)
        take(len(activations), 400 * GIB)

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    inside = before
    try:
        step()
    except torch.OutOfMemoryError:
        inside = torch.cuda.memory_allocated()
    return {"before": before, "inside": inside, "after": torch.cuda.memory_allocated()}


# ---------------------------------------------------------------- time


def milliseconds(work: Callable[[], object], repeats: int = 7) -> float:
    """By events, the median."""
    import torch

    work()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def seconds_on_the_host(work: Callable[[], object], wait: bool) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if wait:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def clocks() -> dict[str, Any]:
    """Ten matmuls: a clock that doesn't wait, one that does, and events."""
    import torch

    a = torch.rand(4096, 4096, device="cuda")

    def work() -> None:
        for _ in range(10):
            torch.mm(a, a)

    work()
    without = statistics.median(seconds_on_the_host(work, wait=False) for _ in range(5))
    with_wait = statistics.median(seconds_on_the_host(work, wait=True) for _ in range(5))
    one = torch.zeros(1, device="cuda")

    def launches() -> None:
        for _ in range(1000):
            one.add_(1)

    launches()
    issued = statistics.median(seconds_on_the_host(launches, wait=False) for _ in range(5))
    waited = statistics.median(seconds_on_the_host(launches, wait=True) for _ in range(5))

    def single() -> None:
        one.add_(1)

    alone = statistics.median(seconds_on_the_host(single, wait=True) for _ in range(50))
    return {
        "without synchronize": without,
        "with synchronize": with_wait,
        "events": milliseconds(work) / 1e3,
        "1000 launches issued": issued,
        "1000 launches waited for": waited,
        "one launch waited for": alone,
    }


def graph() -> dict[str, Any]:
    """Twenty tiny kernels, launched one by one, and as a CUDA graph; and the graph's private pool."""
    import torch

    x = torch.zeros(2**20, device="cuda")

    def chain() -> Any:
        y = x
        for _ in range(20):
            y = y + 1
        return y

    chain()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        kept = chain()
    segments = torch.cuda.memory._snapshot()["segments"]
    private = [s for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    ways = {"launched": chain, "replayed": captured.replay}
    found: dict[str, Any] = {name: milliseconds(way, 21) / 1e3 for name, way in ways.items()}
    found["private pool, bytes"] = sum(s["total_size"] for s in private)
    found["in use there, bytes"] = sum(s["allocated_size"] for s in private)
    return found | {"result": kept.numel()}


def item_loop() -> dict[str, Any]:
    """A training loop that reads its loss in each step, and one that reads at the end."""
    import torch
    from torch import nn

    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x, y = torch.randn(64, 256, device="cuda"), torch.randint(10, (64,), device="cuda")

    def each(steps: int = 200) -> float:
        total = 0.0
        for _ in range(steps):
            total += train_step(net, optimizer, x, y).item()
        return total

    def at_the_end(steps: int = 200) -> float:
        losses = [train_step(net, optimizer, x, y).detach() for _ in range(steps)]
        return torch.stack(losses).sum().item()

    heavy = torch.rand(2048, 2048, device="cuda")

    def chain(read: bool, steps: int = 200) -> None:
        for _ in range(steps):
            out = heavy
            for _ in range(4):
                out = out * 1.01
            if read:
                out[0, 0].item()

    each(), at_the_end(), chain(True), chain(False)
    ways = {
        "item in each step": each,
        "read at the end": at_the_end,
        "four kernels, item in each step": lambda: chain(True),
        "four kernels, never read": lambda: chain(False),
    }
    return {
        name: statistics.median(seconds_on_the_host(work, wait=True) / 200 for _ in range(5))
        for name, work in ways.items()
    }


def sync_debug() -> list[dict[str, Any]]:
    """Which lines set_sync_debug_mode("warn") names."""
    import torch

    x = torch.rand(1000, 1000, device="cuda")
    host = torch.rand(1000, 1000)
    pinned = host.pin_memory()
    index = torch.tensor([1, 2, 3], device="cuda")
    lines: dict[str, Callable[[], object]] = {
        "x.sum().item()": lambda: x.sum().item(),
        "float(x.sum())": lambda: float(x.sum()),
        "if x.sum() > 0:": lambda: bool(x.sum() > 0),
        "print(x[0, 0])": lambda: str(x[0, 0]),
        "x.cpu()": lambda: x.cpu(),
        "x.tolist()": lambda: x[0].tolist(),
        "x.nonzero()": lambda: x.nonzero(),
        "x[x > 0.5]": lambda: x[x > 0.5],
        "x[index]": lambda: x[index],
        "torch.where(x > 0.5, x, 0)": lambda: torch.where(x > 0.5, x, 0),
        "x * 2": lambda: x * 2,
        "x.clamp_(max=1)": lambda: x.clamp_(max=1),
        "torch.unique(index)": lambda: torch.unique(index),
        "torch.equal(x, x)": lambda: torch.equal(x, x),
        "torch.isnan(x).any()": lambda: torch.isnan(x).any(),
        "host.cuda()": lambda: host.cuda(),
        "host.to('cuda', non_blocking=True)": lambda: host.to("cuda", non_blocking=True),
        "pinned.cuda()": lambda: pinned.cuda(),
        "pinned.to('cuda', non_blocking=True)": lambda: pinned.to("cuda", non_blocking=True),
        "torch.tensor([1, 2], device='cuda')": lambda: torch.tensor([1, 2], device="cuda"),
        "torch.zeros(2, device='cuda')": lambda: torch.zeros(2, device="cuda"),
        "torch.cuda.synchronize()": lambda: torch.cuda.synchronize(),
    }
    found = []
    for text, line in lines.items():
        line()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                line()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        messages = [str(w.message) for w in caught if "synchron" in str(w.message)]
        found.append({"line": text, "warns": bool(messages), "message": messages[0] if messages else ""})
    return found


# ---------------------------------------------------------------- copies and streams


def copy_rates(size: int) -> dict[str, float]:
    """Bytes a second of three ways to copy so many bytes."""
    import torch

    pageable = torch.ones(size // 4)
    pinned = pageable.pin_memory()
    target = torch.empty(size // 4, device="cuda")
    repeats = max(3, min(50, 2**28 // size))

    def rate(way: Callable[[], object]) -> float:
        def several() -> None:
            for _ in range(repeats):
                way()

        several()
        times = [seconds_on_the_host(several, wait=True) / repeats for _ in range(3)]
        return size / statistics.median(times)

    return {
        "pageable": rate(lambda: target.copy_(pageable)),
        "pinned": rate(lambda: target.copy_(pinned, non_blocking=True)),
        "pin_memory, then copy": rate(lambda: target.copy_(pageable.pin_memory(), non_blocking=True)),
    }


def copies() -> dict[str, Any]:
    """Bytes a second from the host to the GPU."""
    import torch

    names = ("pageable", "pinned", "pin_memory, then copy")
    found: dict[str, Any] = {"bytes": [2**power for power in range(14, 29, 2)], **{name: [] for name in names}}
    for size in found["bytes"]:
        for name, rate in copy_rates(size).items():
            found[name].append(rate)
    size = 2**28
    target = torch.empty(size // 4, device="cuda")
    pageable = torch.ones(size // 4)
    pinned = pageable.pin_memory()
    returns = {
        "pageable": seconds_on_the_host(lambda: target.copy_(pageable), wait=False),
        "pageable, non_blocking": seconds_on_the_host(lambda: target.copy_(pageable, non_blocking=True), wait=False),
        "pinned": seconds_on_the_host(lambda: target.copy_(pinned), wait=False),
        "pinned, non_blocking": seconds_on_the_host(lambda: target.copy_(pinned, non_blocking=True), wait=False),
    }
    torch.cuda.synchronize()
    return found | {"the call returns after, s": returns, "of bytes": size}


def races() -> dict[str, Any]:
    """What arrives if a buffer is refilled or freed too early. `_sleep` keeps the GPU busy before the copy."""
    import torch

    busy = 100_000_000  # cycles
    pinned = torch.empty(2**22).pin_memory()
    arrived = []
    for k in range(4):
        pinned.fill_(k)
        torch.cuda._sleep(busy)
        arrived.append(pinned.to("cuda", non_blocking=True))
    torch.cuda.synchronize()
    refilled = [sorted(set(t[:: 2**16].tolist())) for t in arrived]

    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    freed = {}
    for careful in (False, True):
        sums = []
        for k in range(4):
            with torch.cuda.stream(side):
                batch = torch.full((2**22,), float(k), device="cuda")
            main.wait_stream(side)
            torch.cuda._sleep(busy // 4)
            sums.append(batch.mean())
            if careful:
                batch.record_stream(main)
            del batch
        torch.cuda.synchronize()
        freed["record_stream" if careful else "without"] = [float(s) for s in sums]
    return {"refilled": refilled, "freed early": freed}


def overlap() -> dict[str, Any]:
    """Eight copies and computes in one stream and with a prefetcher: totals, and start and end of each by events."""
    import torch

    host = [torch.rand(2**24).pin_memory() for _ in range(8)]
    square = torch.rand(4096, 2048, device="cuda")  # as long as a copy, about
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()

    def mark(stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def compute(batch: Any) -> None:
        torch.mm(batch.view(4096, 4096), square)

    def one_stream() -> list:
        rows = []
        for k, x in enumerate(host):
            start = mark(main)
            batch = x.to("cuda", non_blocking=True)
            middle = mark(main)
            compute(batch)
            rows += [("copy", k, start, middle), ("compute", k, middle, mark(main))]
        return rows

    def prefetcher() -> list:
        rows: list = []

        def fetch(k: int) -> Any:
            if k == len(host):
                return None
            with torch.cuda.stream(side):
                start = mark(side)
                batch = host[k].to("cuda", non_blocking=True)
                rows.append(("copy", k, start, mark(side)))
            return batch

        ready = fetch(0)
        for k in range(len(host)):
            main.wait_stream(side)
            batch = ready
            batch.record_stream(main)
            ready = fetch(k + 1)
            start = mark(main)
            compute(batch)
            rows.append(("compute", k, start, mark(main)))
        return rows

    found: dict[str, Any] = {}
    for name, way in {"one stream": one_stream, "prefetcher": prefetcher}.items():
        way()
        torch.cuda.synchronize()
        times = [seconds_on_the_host(way, wait=True) for _ in range(5)]
        base = mark(main)
        side.wait_stream(main)
        rows = way()
        torch.cuda.synchronize()
        spans = [[kind, k, base.elapsed_time(start), base.elapsed_time(end)] for kind, k, start, end in rows]
        found[name] = {"seconds": statistics.median(times), "spans, ms": spans}
    return found


# ---------------------------------------------------------------- bytes and arithmetic


def elementwise() -> dict[str, list]:
    """Milliseconds, FLOPs and least bytes of operations on 2**26 floats."""
    import torch

    n = 2**26
    a, b, out = (torch.rand(n, device="cuda") for _ in range(3))
    return {
        "add": [milliseconds(lambda: torch.add(a, b, out=out)), n, 12 * n],
        "sum": [milliseconds(a.sum), n, 4 * n],
        "swish, two operations": [milliseconds(lambda: a * torch.sigmoid(a)), 0, 20 * n],
        "swish, one": [milliseconds(lambda: torch.nn.functional.silu(a)), 0, 8 * n],
    }


def roofline() -> dict[str, Any]:
    """Seconds, FLOPs and least bytes of some operations."""
    import torch

    rows = elementwise()
    for precision, label in (("highest", ""), ("high", " TF32"), ("highest", " bf16")):
        torch.set_float32_matmul_precision(precision)
        for side in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
            p, q = (torch.rand(side, side, device="cuda") for _ in range(2))
            if label == " bf16":
                p, q = p.bfloat16(), q.bfloat16()
            repeats = 200 if side <= 256 else 10 if side <= 2048 else 2

            def several(p: Any = p, q: Any = q, repeats: int = repeats) -> None:
                for _ in range(repeats):
                    torch.mm(p, q)

            ms = milliseconds(several, 5) / repeats
            rows[f"matmul {side}{label}"] = [ms, 2 * side**3, 3 * side * side * p.element_size()]
    torch.set_float32_matmul_precision("highest")
    return {name: {"seconds": ms / 1e3, "flops": flops, "bytes": size} for name, (ms, flops, size) in rows.items()}


def tf32() -> dict[str, Any]:
    """Time and error of a matmul in three precisions."""
    import torch

    a, b = torch.randn(4096, 4096, device="cuda"), torch.randn(4096, 4096, device="cuda")
    exact = a.double() @ b.double()
    scale = exact.abs().mean()
    found = {}
    for name, precision in (("float32", "highest"), ("TF32", "high")):
        torch.set_float32_matmul_precision(precision)
        error = ((a @ b).double() - exact).abs().mean() / scale
        found[name] = {"ms": milliseconds(lambda: a @ b), "mean relative error": error.item()}
    torch.set_float32_matmul_precision("highest")
    p, q = a.bfloat16(), b.bfloat16()
    error = ((p @ q).double() - exact).abs().mean() / scale
    found["bfloat16"] = {"ms": milliseconds(lambda: p @ q), "mean relative error": error.item()}
    return found


# ---------------------------------------------------------------- kernels of our own

KERNELS = r"""
extern "C" __global__ void spin(float* out, int rounds) {
    float x = threadIdx.x;
    for (int i = 0; i < rounds; ++i) x = x * 1.0001f + 0.5f;
    out[threadIdx.x] = x;
}
extern "C" __global__ void branches(float* out, int kinds, int by_warp, int rounds) {
    int kind = (by_warp ? threadIdx.x / 32 : threadIdx.x) % kinds;
    float x = threadIdx.x;
    for (int k = 0; k < kinds; ++k)
        if (kind == k)
            for (int i = 0; i < rounds; ++i) x = x * 1.0001f + 0.5f;
    out[threadIdx.x] = x;
}
extern "C" __global__ void banks(float* out, int stride, int rounds) {
    __shared__ volatile float data[2048];
    for (int i = threadIdx.x; i < 2048; i += blockDim.x) data[i] = i;
    __syncthreads();
    int place = threadIdx.x % 32 * stride;
    float sum = 0;
    for (int i = 0; i < rounds; ++i) sum += data[place];
    out[threadIdx.x] = sum;
}
extern "C" __global__ void strided(const float* in, float* out, int stride, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && in[i * stride] == 7.0f) out[0] = 1.0f;
}
extern "C" __global__ void copy1(const float* in, float* out, int n) {
    int step = gridDim.x * blockDim.x;
    #pragma unroll 1
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) out[i] = in[i];
}
extern "C" __global__ void copy4(const float4* in, float4* out, int n) {
    int step = gridDim.x * blockDim.x;
    #pragma unroll 1
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) out[i] = in[i];
}
extern "C" __global__ void reread(const float4* in, float* out, int n, int rounds, int near) {
    float sum = 0;
    int step = gridDim.x * blockDim.x;
    for (int r = 0; r < rounds; ++r)
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
            float4 x;
            if (near) asm volatile("ld.global.ca.v4.f32 {%0,%1,%2,%3}, [%4];"
                                   : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(in + i));
            else      asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                                   : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(in + i));
            sum += x.x + x.y + x.z + x.w;
        }
    if (sum == 7.0f) out[0] = sum;
}
"""
_COMPILED: dict[str, Any] = {}


class NvccKernel:
    """A kernel of a cubin that nvcc made, launched by the driver's interface."""

    library: Any = None
    module: Any = None

    def __init__(self, name: str) -> None:
        if NvccKernel.module is None:
            NvccKernel.library = ctypes.CDLL("libcuda.so.1")
            NvccKernel.module = self._load()
        self.function = ctypes.c_void_p()
        self._check(self.library.cuModuleGetFunction(ctypes.byref(self.function), self.module, name.encode()))

    def _load(self) -> Any:
        import torch

        torch.zeros(1, device="cuda")
        major, minor = torch.cuda.get_device_capability()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            (path / "k.cu").write_text(KERNELS)
            nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
            command = [nvcc, f"-arch=sm_{major}{minor}", "-cubin", "-o", str(path / "k.cubin"), str(path / "k.cu")]
            subprocess.run(command, check=True, timeout=60)
            module = ctypes.c_void_p()
            self._check(self.library.cuModuleLoadData(ctypes.byref(module), (path / "k.cubin").read_bytes()))
        return module

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA driver error {status}")

    def set_shared_memory_config(self, size: int) -> None:
        self._check(self.library.cuFuncSetAttribute(self.function, 8, size))

    def __call__(self, grid: tuple, block: tuple, args: list, shared_mem: int = 0) -> None:
        import torch

        held = [ctypes.c_int(a) if isinstance(a, int) else ctypes.c_void_p(a.data_ptr()) for a in args]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(a) for a in held))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        launched = self.library.cuLaunchKernel(self.function, *grid, *block, shared_mem, stream, pointers, None)
        self._check(launched)


def kernel(name: str) -> Any:
    """A compiled kernel, by torch's own compiler or by nvcc."""
    import torch

    if name not in _COMPILED:
        try:
            _COMPILED[name] = torch.cuda._compile_kernel(KERNELS, name)
        except Exception as error:
            print(f"  torch.cuda._compile_kernel({name}): {type(error).__name__}: {str(error)[:200]}; trying nvcc")
            _COMPILED[name] = NvccKernel(name)
    return _COMPILED[name]


def waves() -> dict[str, Any]:
    """Milliseconds over the number of blocks of 1,024 threads that each do the same."""
    import torch

    spin, out = kernel("spin"), torch.empty(1024, device="cuda")
    units = torch.cuda.get_device_properties(0).multi_processor_count
    counts = sorted({*range(1, 4 * units + 8, 8), *(k * units + d for k in (1, 2, 3, 4) for d in (-1, 0, 1))})
    times = [milliseconds(lambda n=n: spin(grid=(n, 1, 1), block=(1024, 1, 1), args=[out, 20_000]), 5) for n in counts]
    return {"SMs": units, "blocks": counts, "ms": times}


def divergence() -> dict[str, Any]:
    """Milliseconds over the number of branches that the threads take, threads or whole warps mixed."""
    import torch

    branches, out = kernel("branches"), torch.empty(1024, device="cuda")
    found: dict[str, Any] = {"branches": [1, 2, 4, 8, 16, 32]}
    for name, by_warp in (("within a warp", 0), ("warp by warp", 1)):
        found[name] = [
            milliseconds(
                lambda n=n, by_warp=by_warp: branches(
                    grid=(132, 1, 1), block=(1024, 1, 1), args=[out, n, by_warp, 20_000]
                ),
                5,
            )
            for n in found["branches"]
        ]
    return found


def bank_conflicts() -> dict[str, Any]:
    """Milliseconds over the stride, in floats, at which a warp reads shared memory."""
    import torch

    banks, out = kernel("banks"), torch.empty(1024, device="cuda")
    found: dict[str, Any] = {"stride": [0, 1, 2, 3, 4, 8, 16, 32, 33]}
    found["ms"] = [
        milliseconds(lambda s=s: banks(grid=(132, 1, 1), block=(1024, 1, 1), args=[out, s, 10_000]), 5)
        for s in found["stride"]
    ]
    return found


def coalescing() -> dict[str, Any]:
    """Nanoseconds for each of 2**24 floats that are read at a stride."""
    import torch

    strided, out = kernel("strided"), torch.zeros(1, device="cuda")
    data, n = torch.zeros(2**30, device="cuda"), 2**24
    found: dict[str, Any] = {"stride": [1, 2, 4, 8, 16, 32, 64]}
    found["ns"] = [
        milliseconds(lambda s=s: strided(grid=(n // 256, 1, 1), block=(256, 1, 1), args=[data, out, s, n])) / n * 1e6
        for s in found["stride"]
    ]
    return found


def occupancy() -> dict[str, Any]:
    """Bytes a second of a copy over the blocks of 256 threads that an SM may hold, limited by shared memory."""
    import torch

    units = torch.cuda.get_device_properties(0).multi_processor_count
    n = 2**27
    data, out = torch.zeros(n, device="cuda"), torch.empty(n, device="cuda")
    found: dict[str, Any] = {"blocks an SM": [1, 2, 3, 4, 5, 6, 7, 8], "threads a block": 256}
    for name, width in (("copy1", 1), ("copy4", 4)):
        copy, rates = kernel(name), []
        for resident in found["blocks an SM"]:
            room = (228 // resident - 1) * KIB
            copy.set_shared_memory_config(room)
            ms = milliseconds(
                lambda copy=copy, room=room, resident=resident, width=width: copy(
                    grid=(units * resident, 1, 1), block=(256, 1, 1), args=[data, out, n // width], shared_mem=room
                ),
                5,
            )
            rates.append(8 * n / ms * 1e3)
        found[f"{4 * width} bytes a thread"] = rates
    return found


def working_sets() -> dict[str, Any]:
    """Bytes a second of reading the same data again and again, over how much it is; with and without the L1 cache."""
    import torch

    reread, out = kernel("reread"), torch.zeros(1, device="cuda")
    units = torch.cuda.get_device_properties(0).multi_processor_count
    data = torch.zeros(2**28, device="cuda")
    found: dict[str, Any] = {"bytes": [2**k for k in range(22, 31)]}
    found["bytes"] = sorted([*found["bytes"], *(3 * 2**k for k in range(22, 28))])
    for name, near in (("through L1", 1), ("past L1", 0)):
        found[name] = []
        for size in found["bytes"]:
            rounds = max(2, 2**32 // size)
            arguments = [data, out, size // 16, rounds, near]
            ms = milliseconds(lambda a=arguments: reread(grid=(2 * units, 1, 1), block=(1024, 1, 1), args=a), 3)
            found[name].append(size * rounds / ms * 1e3)
    return found


# ---------------------------------------------------------------- all of it


def describe() -> dict[str, Any]:
    """Machine and versions."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    names = (
        "multi_processor_count",
        "max_threads_per_multi_processor",
        "regs_per_multiprocessor",
        "shared_memory_per_block",
        "shared_memory_per_block_optin",
        "shared_memory_per_multiprocessor",
        "L2_cache_size",
        "total_memory",
        "warp_size",
        "clock_rate",
        "memory_clock_rate",
        "memory_bus_width",
    )
    driver = ""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,memory.used", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        driver = f"unknown ({type(error).__name__})"
    free, total = torch.cuda.mem_get_info()
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "driver, highest clock, memory used": driver,
        "command": "python record.py --folder FOLDER",
        "properties": {name: getattr(properties, name, None) for name in names},
        "taken by an empty process": total - free,
    }


PARTS: dict[str, Callable[[], Any]] = {
    "peaks": peaks,
    "stacks": stacks,
    "out of memory": out_of_memory,
    "trying again": trying_again,
    "clocks": clocks,
    "graph": graph,
    "item loop": item_loop,
    "sync debug": sync_debug,
    "copies": copies,
    "races": races,
    "overlap": overlap,
    "roofline": roofline,
    "tf32": tf32,
    "waves": waves,
    "divergence": divergence,
    "bank conflicts": bank_conflicts,
    "coalescing": coalescing,
    "occupancy": occupancy,
    "working sets": working_sets,
}


def record_all(folder: Path) -> list[str]:
    """Run each part and write what it gave; the names of those that failed."""
    import torch

    failed = []
    facts = describe()
    results: dict[str, Any] = {"machine": facts}
    started = time.perf_counter()
    for name, part in {"allocator history": lambda: allocator_history(folder, facts), **PARTS}.items():
        begun = time.perf_counter()
        try:
            results[name] = part()
            ended = "ok"
        except Exception:
            failed.append(name)
            ended = "FAILED"
            traceback.print_exc()
        torch.cuda.empty_cache()
        print(f"{name:<20} {ended:<7} {time.perf_counter() - begun:5.1f} s", flush=True)
        text = json.dumps(rounded(results), separators=(",", ":"))
        (folder / "gpu_measurements.json").write_text(text + "\n", encoding="utf-8")
    print(f"{time.perf_counter() - started:.0f} s; failed: {', '.join(failed) or 'none'}")
    return failed


def rounded(value: Any) -> Any:
    """Floats with five digits, which no clock is better than."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main(arguments: list[str] | None = None) -> int:
    """Record. Returns 1, with a line that says why, where nothing can be recorded."""
    import torch

    parser = argparse.ArgumentParser(description="Record on an NVIDIA GPU what 15-07 shows where there is none.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files are written")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("This machine has no CUDA device, so there is nothing to record. Nothing was written.", file=sys.stderr)
        return 1
    if args.child:
        print(json.dumps(capped(9 * GIB, workload)))
        return 0
    if any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        print(
            "PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF is set, and the notebook's allocator has the default's "
            "rules. Unset it and start again. Nothing was written.",
            file=sys.stderr,
        )
        return 1
    args.folder.mkdir(parents=True, exist_ok=True)
    return 1 if record_all(args.folder) else 0


if __name__ == "__main__":
    sys.exit(main())
