"""Record a GPU's allocator, so that the tests of 15-07 can hold its allocator against the real one.

Needs an NVIDIA GPU and writes a file beside this one:

    training_history.json.gz    the caching allocator's own history, from an empty process: training with a varying
                                batch size, empty_cache, two streams, an out-of-memory error (pack_history.py says
                                in which form)

It names the machine and the versions. With settings of the allocator that aren't the default (PYTORCH_ALLOC_CONF)
nothing is recorded: the notebook's allocator has the default's rules.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import sys
from pathlib import Path
from typing import Any

from module_15_advanced_pytorch_internals.recordings.pack_history import pack

FOLDER = Path(__file__).parent
COMMAND = "python -m module_15_advanced_pytorch_internals.recordings.record"


def main(arguments: list[str] | None = None) -> int:
    """Record. Returns 1, with a line that says why, on a machine without an NVIDIA GPU."""
    import torch

    parser = argparse.ArgumentParser(prog=COMMAND, description="Record the allocator of an NVIDIA GPU.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the file is written")
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
    print(f"{len(history['trace']):,} allocator events are in {args.folder}")
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


if __name__ == "__main__":
    sys.exit(main())
