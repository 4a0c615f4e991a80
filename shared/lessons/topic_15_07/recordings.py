"""What 15-07 does with recordings: give a history to another allocator, and read a snapshot with its stacks."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any


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
