"""Recorded histories of PyTorch's caching allocator, in the form of PyTorch's own snapshots."""

import gzip
import json
from pathlib import Path
from typing import Any

_CARRIED = Path(__file__).with_name("recordings")  # where a wheel has them, see pyproject.toml
_IN_REPOSITORY = Path(__file__).parents[1] / "module_15_advanced_pytorch_internals" / "recordings"
FOLDER = _CARRIED if _CARRIED.is_dir() else _IN_REPOSITORY
ACTIONS = {"a": "alloc", "f": "free_completed", "+": "segment_alloc", "-": "segment_free"}


def read_history(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """A history of the folder `recordings/`, whose `pack_history.py` says how it is kept.

    Its name is "transformer_training" for `transformer_training_history.json.gz`; FileNotFoundError if there is none.
    It has `trace`, the events as `_snapshot()["device_traces"]` has them; `before` and `after`, the segments at both
    ends as `_snapshot()["segments"]` has them; `source` and what else the file says of where it comes from.
    """
    raw = json.loads(gzip.decompress((folder / f"{name}_history.json.gz").read_bytes()))
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
        "allocated_size": sum(max(size, 0) for size in sizes),
        "stream": stream,
        "segment_type": pool,
        "blocks": blocks,
    }


def read_measurements(folder: Path = FOLDER) -> dict[str, Any]:
    """What `record.py` of the folder `recordings/` measured on a GPU, by part; `machine` says on which one."""
    return json.loads((folder / "gpu_measurements.json").read_text(encoding="utf-8"))
