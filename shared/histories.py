"""Recorded histories of PyTorch's caching allocator, in the form of PyTorch's own snapshots."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[1] / "module_15_advanced_pytorch_internals" / "recordings"
ACTIONS = {"a": "alloc", "f": "free_completed", "+": "segment_alloc", "-": "segment_free"}


def read_history(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """A history of the folder `recordings/`, whose `histories.py` says how it is kept.

    Args:
        name: "transformer_training" for `transformer_training_history.json.gz`.
        folder: where the file is.

    Returns:
        `trace`, the events as `_snapshot()["device_traces"]` has them; `before` and `after`, the segments at both ends
        as `_snapshot()["segments"]` has them; `source` and what else the file says of where it comes from.

    Raises:
        FileNotFoundError: the folder has no such history; the message names those that it has.
    """
    path = folder / f"{name}_history.json.gz"
    if not path.exists():
        known = sorted(file.name.removesuffix("_history.json.gz") for file in folder.glob("*_history.json.gz"))
        raise FileNotFoundError(f"there is no recorded history {name!r}; there are {', '.join(known) or 'none'}")
    raw = json.loads(gzip.decompress(path.read_bytes()))
    columns = (raw.pop("actions"), raw.pop("addresses"), raw.pop("sizes"), raw.pop("streams"))
    raw["trace"] = [
        {"action": ACTIONS[letter], "addr": address, "size": size, "stream": stream}
        for letter, address, size, stream in zip(*columns, strict=True)
    ]
    return raw | {end: [_segment(*row) for row in raw[end]] for end in ("before", "after")}


def _segment(address: int, stream: int, pool: str, sizes: list[int]) -> dict[str, Any]:
    blocks, at = [], address
    for size in sizes:  # of a free block negative
        state = "active_allocated" if size > 0 else "inactive"
        blocks.append({"address": at, "size": abs(size), "state": state})
        at += abs(size)
    return {
        "address": address,
        "total_size": at - address,
        "stream": stream,
        "segment_type": pool,
        "blocks": blocks,
    }


def unusual_settings() -> str:
    """What is set of this process's CUDA allocator that isn't the default; empty if nothing is."""
    found = torch.cuda.memory._snapshot()["allocator_settings"]
    texts = {str(found[name]) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if found.get(name)}
    if found.get("expandable_segments") and not any("expandable_segments" in text for text in texts):
        texts.add("expandable_segments:True")
    backend = torch.cuda.get_allocator_backend()
    return ",".join(sorted(texts | ({f"backend:{backend}"} - {"backend:native"})))


def record_history(work: Callable[[], object]) -> dict[str, Any]:
    """What the current GPU's allocator does during work(): `trace`, and the segments `before` and `after` it.

    The cache is emptied first, so that segments which only hold what was used earlier don't show.
    """
    memory, number = torch.cuda.memory, torch.cuda.current_device()  # a snapshot has all devices
    torch.cuda.empty_cache()
    before = [segment for segment in memory._snapshot()["segments"] if segment["device"] == number]
    memory._record_memory_history(max_entries=1_000_000, context=None, clear_history=True)
    try:
        work()
        found = memory._snapshot()
    finally:
        memory._record_memory_history(enabled=None)
    after = [segment for segment in found["segments"] if segment["device"] == number]
    return {"before": before, "trace": found["device_traces"][number], "after": after}
