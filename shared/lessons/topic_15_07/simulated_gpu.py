"""What surrounds the caching allocator that 15-07 builds: a driver, the books, PyTorch's message.

The allocator itself is in the notebook. Its blocks have `address`, `size`, `stream`, `pool` ("small" or "large"),
`requested`, `state` as in PyTorch's snapshots ("active_allocated", "inactive", ...), and their neighbours `before` and
`after`.
"""

from dataclasses import dataclass, field
from typing import Any

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass
class SimulatedDriver:
    """cudaMalloc and cudaFree of a GPU with `capacity` bytes; addresses are never reused.

    Attributes:
        capacity: bytes of the GPU.
        used: bytes that are handed out.
        calls: successful calls of `malloc`.
        sizes: address → bytes, of what is handed out.
    """

    capacity: int = 80 * GIB
    used: int = 0
    calls: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    top: int = 0x7F00_0000_0000

    def malloc(self, size: int) -> int | None:
        """Address of `size` new bytes, or None if so many aren't free."""
        if self.used + size > self.capacity:
            return None
        address = self.top
        self.top += size
        self.used += size
        self.calls += 1
        self.sizes[address] = size
        return address

    def free(self, address: int) -> None:
        """Take back what `malloc` gave."""
        self.used -= self.sizes.pop(address)


class Ledger:
    """What an allocator counts, and the history that it writes, in the form of PyTorch's own.

    Attributes:
        trace: the events.
        kind: what the history says that new blocks hold.
        allocated, reserved, max_allocated, max_reserved: bytes now, and the most so far.
    """

    def __init__(self) -> None:
        self.trace: list[dict[str, Any]] = []
        self.kind = "block"
        self.allocated = self.reserved = self.max_allocated = self.max_reserved = 0

    def note(self, action: str, address: int, size: int, stream: int, change: int = 0) -> None:
        """Write an event down and count `change` bytes: reserved ones for a segment, else allocated ones."""
        event = {"action": action, "addr": address, "size": size, "stream": stream, "kind": self.kind}
        self.trace.append(event)
        if action.startswith("segment"):
            self.reserved += change
            self.max_reserved = max(self.max_reserved, self.reserved)
        else:
            self.allocated += change
            self.max_allocated = max(self.max_allocated, self.allocated)


def snapshot(allocator: Any) -> list[dict[str, Any]]:
    """The state, as `torch.cuda.memory._snapshot()["segments"]` gives it, of an allocator that has `blocks`."""
    segments: list[dict[str, Any]] = []
    for address, block in sorted(allocator.blocks.items()):
        if block.before is None:
            segments.append(
                {
                    "device": 0,
                    "address": address,
                    "total_size": 0,
                    "allocated_size": 0,
                    "active_size": 0,
                    "requested_size": 0,
                    "stream": block.stream,
                    "segment_type": block.pool,
                    "blocks": [],
                }
            )
        part = {"address": address, "size": block.size, "requested_size": block.requested, "state": block.state}
        segments[-1]["blocks"].append(part)
        segments[-1]["total_size"] += block.size
        segments[-1]["allocated_size"] += block.size * (block.state == "active_allocated")
        segments[-1]["active_size"] += block.size * (block.state != "inactive")
        segments[-1]["requested_size"] += block.requested
    return segments


def load(allocator: Any, segments: list[dict[str, Any]], make_block: Any) -> None:
    """Add the segments of a snapshot to an allocator; blocks that wait for an event count as handed out.

    Args:
        allocator: with `blocks`, `add_free(block)` for a free one, and the counts of a `Ledger`.
        segments: as `snapshot` gives them.
        make_block: the class of its blocks, called with (address, size, stream, pool).
    """
    for segment in segments:
        before = None
        for part in sorted(segment["blocks"], key=lambda part: part["address"]):
            block = make_block(part["address"], part["size"], segment["stream"], segment["segment_type"])
            block.before = before
            if before is not None:
                before.after = block
            before = allocator.blocks[block.address] = block
            if part["state"] == "inactive":
                allocator.add_free(block)
            else:
                block.state, block.requested = "active_allocated", part.get("requested_size", block.size)
                allocator.allocated += block.size
    allocator.reserved += sum(segment["total_size"] for segment in segments)
    allocator.max_allocated = max(allocator.max_allocated, allocator.allocated)
    allocator.max_reserved = max(allocator.max_reserved, allocator.reserved)


def pretty_bytes(size: float) -> str:
    """2097152 as '2.00 MiB'."""
    for unit, step in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= step:
            return f"{size / step:.2f} {unit}"
    return f"{size:.0f} bytes"


def oom_message(allocator: Any, size: int) -> str:
    """What PyTorch says when `size` bytes can't be had of the driver, for an allocator over a `SimulatedDriver`."""
    total = allocator.driver.capacity
    free, cached = total - allocator.driver.used, allocator.reserved - allocator.allocated
    return (
        f"CUDA out of memory. Tried to allocate {pretty_bytes(size)}. GPU 0 has a total capacity of "
        f"{pretty_bytes(total)} of which {pretty_bytes(free)} is free. Including non-PyTorch memory, this process has "
        f"{pretty_bytes(total - free)} memory in use. Of the allocated memory {pretty_bytes(allocator.allocated)} is "
        f"allocated by PyTorch, and {pretty_bytes(cached)} is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation."
    )
