"""Sums over a recorded history of PyTorch's caching allocator."""

from typing import Any


def recorded_bytes(history: dict[str, Any]) -> list[int]:
    """The bytes in use before the first event and after each event of a history from `shared.histories`."""
    total = sum(segment["allocated_size"] for segment in history["before"])
    used = [total]
    for event in history["trace"]:
        if event["action"] == "alloc":
            total += event["size"]
        elif event["action"] == "free_completed":
            total -= event["size"]
        used.append(total)
    return used
