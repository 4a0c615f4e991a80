"""Record what 15-07 measures on a GPU, so that its tests can hold the simulated allocator against the real one.

Needs an NVIDIA GPU and writes two files beside this one:

    training_history.json.gz    the caching allocator's own history, from an empty process: training with a varying
                                batch size, empty_cache, two streams, an out-of-memory error (histories.py says in
                                which form)
    gpu_measurements.json       copy bandwidths, roofline points, and the timelines of a loop with and without prefetch

Each names the machine and the versions. With settings of the allocator that aren't the default (PYTORCH_ALLOC_CONF)
nothing is recorded: the notebook's allocator has the default's rules.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from module_15_advanced_pytorch_internals.recordings.histories import pack

FOLDER = Path(__file__).parent
COMMAND = "python -m module_15_advanced_pytorch_internals.recordings.record"


def main(arguments: list[str] | None = None) -> int:
    """Record. Returns 1, with a line that says why, on a machine without an NVIDIA GPU."""
    import torch

    parser = argparse.ArgumentParser(prog=COMMAND, description="Record what 15-07 measures on an NVIDIA GPU.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files are written")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "This machine has no CUDA device, so there is nothing to record. Nothing was written.",
            file=sys.stderr,
        )
        return 1
    from shared.histories import record_history, unusual_settings

    if unusual := unusual_settings():
        print(
            f"The allocator's settings aren't the default: {unusual}. Unset PYTORCH_ALLOC_CONF and "
            "PYTORCH_CUDA_ALLOC_CONF, and start again. Nothing was written.",
            file=sys.stderr,
        )
        return 1
    args.folder.mkdir(parents=True, exist_ok=True)
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "command": COMMAND,
    }
    history = record_history(_work)  # first: the process has allocated nothing on the GPU yet
    packed = pack(history["before"], history["trace"], history["after"], **machine)
    (args.folder / "training_history.json.gz").write_bytes(packed)
    measured = machine | {"copies": _copies(), "roofline": _roofline(), "timelines": _timelines()}
    (args.folder / "gpu_measurements.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    print(f"{len(history['trace']):,} allocator events and the measurements are in {args.folder}")
    return 0


def _net() -> Any:
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8192, 256), nn.ReLU(), nn.Linear(256, 10)),
    ).cuda()


def _work() -> None:
    import torch

    _train((64, 128, 96, 256, 32))
    torch.cuda.empty_cache()
    _train((128, 64))
    _two_streams()
    _out_of_memory()


def _train(sizes: tuple[int, ...]) -> None:
    import torch
    import torch.nn.functional as F

    model = _net()
    optimizer = torch.optim.Adam(model.parameters())
    for size in sizes:
        x, y = torch.randn(size, 3, 32, 32).cuda(), torch.zeros(size, dtype=torch.long).cuda()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _two_streams() -> None:
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


def _out_of_memory() -> None:
    import torch

    kept = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del kept[::2]
    total = torch.cuda.mem_get_info()[1]
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")


def _copies() -> list[dict[str, float]]:
    """Bytes and seconds of copies to the GPU from pageable and from pinned memory."""
    import torch

    from shared.timing import compare

    rows = []
    for power in range(16, 29, 2):
        pageable, target = torch.ones(2**power // 4), torch.empty(2**power // 4, device="cuda")
        pinned = pageable.pin_memory()
        ways = {
            "pageable": lambda t=target, p=pageable: t.copy_(p),
            "pinned": lambda t=target, p=pinned: t.copy_(p),
        }
        rows.append({"bytes": 2**power} | {name: timing.median for name, timing in compare(ways).items()})
    return rows


def _roofline() -> list[dict[str, Any]]:
    """FLOPs, bytes and seconds of an elementwise operation, a reduction and matrix products."""
    import torch

    from shared.timing import measure

    a, b = (torch.rand(2**28, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    work: dict[str, tuple[Callable[[], object], int, int]] = {
        "add": (lambda: torch.add(a, b, out=out), a.numel(), 12 * a.numel()),
        "sum": (a.sum, a.numel(), 4 * a.numel()),
    }
    for n in (64, 256, 1024, 4096, 8192):
        p = torch.rand(n, n, device="cuda")
        work[f"matmul {n}"] = (lambda p=p: p @ p, 2 * n**3, 12 * n * n)
    return [
        {"name": name, "flops": flops, "bytes": size, "seconds": measure(run).median}
        for name, (run, flops, size) in work.items()
    ]


def _timelines() -> dict[str, list[tuple[str, float, float]]]:
    """(lane, start, end) in ms of copies and kernels: in one stream, and with the copies in a stream of their own."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    host = [torch.randn(4096, 3, 32, 32).pin_memory() for _ in range(6)]
    model, side = _net(), torch.cuda.Stream()

    def one_stream() -> None:
        for x in host:
            model(x.cuda(non_blocking=True)).sum().backward()

    def overlapped() -> None:
        with torch.cuda.stream(side):
            ahead = host[0].cuda(non_blocking=True)
        for following in [*host[1:], None]:
            torch.cuda.current_stream().wait_stream(side)
            x = ahead
            x.record_stream(torch.cuda.current_stream())
            if following is not None:
                with torch.cuda.stream(side):
                    ahead = following.cuda(non_blocking=True)
            model(x).sum().backward()

    found = {}
    for name, loop in (("one stream", one_stream), ("overlapped", overlapped)):
        loop()  # warm-up
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
            loop()
            torch.cuda.synchronize()
        events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        first = min(e.time_range.start for e in events)
        found[name] = [
            (
                "copy" if "HtoD" in e.name else "compute",
                round((e.time_range.start - first) / 1e3, 4),
                round((e.time_range.end - first) / 1e3, 4),
            )
            for e in events
        ]
    return found


if __name__ == "__main__":
    sys.exit(main())
