"""Recorded histories of PyTorch's caching allocator, in the form of PyTorch's own snapshots."""

import gzip
import json
from collections import deque
from collections.abc import Mapping, Sequence
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


def read_snapshot(compact: Mapping[str, Any]) -> dict[str, Any]:
    """A snapshot with stacks, as `record.py` keeps it, in the form of PyTorch's `_snapshot()`.

    A frame has the `text` of its line as well, if the line is one of the recorded program's own.
    """
    names = ("filename", "line", "name", "text")
    stacks = [[dict(zip(names, frame, strict=True)) for frame in stack] for stack in compact["stacks"]]
    segments = []
    for address, total, pool, rows in compact["segments"]:
        blocks = [
            {"size": size, "requested_size": requested, "state": state, "frames": stacks[number]}
            for size, requested, state, number in rows
        ]
        segments.append({"address": address, "total_size": total, "segment_type": pool, "blocks": blocks})
    return {"segments": segments}


class Tape:
    """A driver that answers cudaMalloc with the addresses of a recording, as long as it is asked for the same sizes."""

    def __init__(self, trace: Sequence[Mapping[str, Any]]) -> None:
        new = (event for event in trace if event["action"] == "segment_alloc")
        self.waiting = deque((event["addr"], event["size"]) for event in new)
        self.freed: set[int] = set()
        self.capacity = self.used = 0  # what a message of the allocator's would ask for

    def malloc(self, size: int) -> int | None:
        """The recorded address, or None if the recording has another call here, or none."""
        if not self.waiting or self.waiting[0][1] != size:
            return None
        return self.waiting.popleft()[0]

    def free(self, address: int) -> None:
        """cudaFree."""
        self.freed.add(address)


def play_back(history: Mapping[str, Any], tape: Tape, allocator: Any) -> tuple[int, int]:
    """Give a recorded history to an allocator over `tape`, which holds the segments of `history["before"]` already.

    Where the recording gives segments back and the allocator has not done so by itself, its cache is emptied. Returns
    how many allocations there were, and how many of them the allocator put elsewhere.
    """
    places: dict[int, int] = {}  # recorded address → the allocator's
    count = wrong = 0
    for event in history["trace"]:
        action, address = event["action"], event.get("addr", 0)
        if action == "alloc":
            places[address] = allocator.malloc(event["size"], event["stream"])
            count, wrong = count + 1, wrong + (places[address] != address)
        elif action == "free_completed":
            allocator.free(places.pop(address, address))
        elif action == "segment_free" and address not in tape.freed:
            allocator.empty_cache()
        elif action == "segment_alloc":
            tape.freed.discard(address)  # a driver may hand out an address again
    return count, wrong


def layout(segments: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, bool]]:
    """(address, bytes, free or not) of every block, in the order of addresses; two snapshots are compared by it."""
    parts = [part for segment in segments for part in segment["blocks"]]
    return sorted((part["address"], part["size"], part["state"] == "inactive") for part in parts)
