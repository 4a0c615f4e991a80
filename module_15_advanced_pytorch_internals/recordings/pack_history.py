"""The compact form in which an allocator's history is kept, and the program that makes it of somebody's snapshot.

    python -m module_15_advanced_pytorch_internals.recordings.pack_history SNAPSHOT NAME --source TEXT --licence TEXT

SNAPSHOT is what `torch.cuda.memory._dump_snapshot()` wrote (a pickle), or the same as JSON, gzipped or not. NAME ends
in `history.json.gz` and is written beside this file. Only a history of the default allocator settings is of use.

The form is one JSON object. `actions` has one letter an event (`shared.histories.ACTIONS`), and `addresses`, `sizes`
and `streams` have one number for each. `before` and `after` are the segments at both ends: [address, stream, pool,
sizes of the blocks], in which a free block has a negative size. What else the file holds says where it comes from.
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import json
import pickle
import sys
from pathlib import Path

from module_15_advanced_pytorch_internals.recordings.record import LETTERS, pack

FOLDER = Path(__file__).parent
MIB = 2**20


def state_before(trace: list[dict], after: list[dict]) -> list[dict]:
    """The segments before the first event: those after the last one, with the events undone backwards.

    A free event tells what was requested, not how large the block was. In the large pool a remainder of up to 1 MiB is
    never a free block of its own, so that it was part of the block on its left.
    """
    segments = {segment["address"]: segment | {"blocks": [dict(b) for b in segment["blocks"]]} for segment in after}
    starts = sorted(segments)
    for event in reversed([event for event in trace if event["action"] in LETTERS]):
        address, action = event["addr"], event["action"]
        if action == "segment_alloc":
            del segments[address]
            starts.remove(address)
        elif action == "segment_free":
            pool = "small" if event["size"] <= 2 * MIB else "large"
            free = [{"address": address, "size": event["size"], "state": "inactive"}]
            segments[address] = {"address": address, "stream": event["stream"], "segment_type": pool, "blocks": free}
            bisect.insort(starts, address)
        else:
            segment = segments[starts[bisect.bisect(starts, address) - 1]]
            undo = _undo_alloc if action == "alloc" else _undo_free
            segment["blocks"] = undo(segment, address, event["size"])
    return [segments[start] for start in starts]


def _undo_alloc(segment: dict, address: int, size: int) -> list[dict]:
    blocks: list[dict] = []
    for block in segment["blocks"]:
        if block["address"] == address:
            block["state"] = "inactive"
        if blocks and block["state"] == blocks[-1]["state"] == "inactive":
            blocks[-1]["size"] += block["size"]
        else:
            blocks.append(block)
    return blocks


def _undo_free(segment: dict, address: int, size: int) -> list[dict]:
    blocks = segment["blocks"]
    place = next(k for k, b in enumerate(blocks) if b["address"] <= address < b["address"] + b["size"])
    start, end = blocks[place]["address"], blocks[place]["address"] + blocks[place]["size"]
    stop = address + max(512, -(-size // 512) * 512)
    if segment["segment_type"] == "large" and end - stop <= MIB:
        stop = end
    parts = [(start, address, "inactive"), (address, stop, "active_allocated"), (stop, end, "inactive")]
    left = [dict(block) for block in blocks[:place]]
    if left and segment["segment_type"] == "large" and 0 < address - start <= MIB:
        left[-1]["size"] += address - start
        parts = parts[1:]
    new = [{"address": a, "size": b - a, "state": state} for a, b, state in parts if b > a]
    return [*left, *new, *blocks[place + 1 :]]


def main(arguments: list[str] | None = None) -> int:
    """Make the compact form of a snapshot's first device that has a history."""
    parser = argparse.ArgumentParser(description="Keep the allocator history of a snapshot in this folder.")
    parser.add_argument(
        "snapshot", type=Path, help="what torch.cuda.memory._dump_snapshot() wrote, or the same as JSON"
    )
    parser.add_argument("name", help="of the file in this folder; ends in history.json.gz")
    parser.add_argument("--source", required=True, help="where it comes from")
    parser.add_argument("--licence", required=True, help="under which it may be passed on")
    parser.add_argument("--machine", default="unknown", help="what is known of GPU and versions")
    args = parser.parse_args(arguments)
    if not args.name.endswith("history.json.gz"):
        parser.error(f"{args.name!r} must end in history.json.gz, by which the tests find it")
    content = args.snapshot.read_bytes()
    content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    snapshot = json.loads(content) if content[:1] == b"{" else pickle.loads(content)
    device = next(number for number, trace in enumerate(snapshot["device_traces"]) if trace)
    trace = snapshot["device_traces"][device]
    after = [segment for segment in snapshot["segments"] if segment.get("device", 0) == device]
    facts = {"source": args.source, "licence": args.licence, "machine": args.machine}
    packed = pack(state_before(trace, after), trace, after, **facts)
    (FOLDER / args.name).write_bytes(packed)
    print(f"{args.name}: {len(packed):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
