"""The memory map of an allocator's history: address over time, one rectangle for each block.

A history is a list of events in the form of `torch.cuda.memory._snapshot()["device_traces"][device]`. An event may say
what its block holds, with the key `kind`.
"""

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke

from shared.lessons.topic_15_07.simulated_gpu import GIB, MIB
from shared.plotting import COLOURS

SMALL_SEGMENT = 2 * MIB  # a segment of the large pool has 10 MiB or more
FEW = 200
MOVING = ("alloc", "free_completed", "segment_alloc", "segment_free")
KIND_COLOURS = {
    "parameter": COLOURS["blue"],
    "there before": COLOURS["blue"],
    "optimizer state": COLOURS["sky"],
    "gradient": COLOURS["red"],
    "kept": COLOURS["red"],
    "activation": COLOURS["green"],
    "temporary": COLOURS["orange"],
    "workspace": COLOURS["purple"],
    "batch": COLOURS["ink"],
    "block": COLOURS["grey"],
    "overlap": "#FF0000",
    "reserved, free": COLOURS["pale"],
}


class Span(NamedTuple):
    """A rectangle of the map: from event `birth` to event `death`, `size` bytes from `offset` on."""

    birth: int
    death: int
    offset: int
    size: int
    kind: str


@dataclass
class MemoryMap:
    """What is drawn of a history.

    Attributes:
        blocks, segments: their spans; the small pool lies at the bottom.
        active, reserved: bytes in blocks and in segments, before the first event and after each one.
        small: bytes of the map that belong to the small pool.
        top: bytes of the map.
    """

    blocks: list[Span] = field(default_factory=list)
    segments: list[Span] = field(default_factory=list)
    active: list[int] = field(default_factory=lambda: [0])
    reserved: list[int] = field(default_factory=lambda: [0])
    small: int = 0
    top: int = 0


class _Places:
    """Address → place on the map, in each pool; addresses that no segment ever covered take no room."""

    def __init__(self, segments: Iterable[Mapping]) -> None:
        ranges: dict[bool, list[list[int]]] = {True: [], False: []}  # small → [start, end]
        for start, size in sorted({(event["addr"], event["size"]) for event in segments}):
            known = ranges[size <= SMALL_SEGMENT]
            if known and start <= known[-1][1]:
                known[-1][1] = max(known[-1][1], start + size)
            else:
                known.append([start, start + size])
        rows = [(small, *pair) for small in (True, False) for pair in ranges[small]]
        ends = list(accumulate((end - start for _, start, end in rows), initial=0))
        self.starts = {small: [start for start, _ in ranges[small]] for small in (True, False)}
        self.offsets = {True: ends[: len(ranges[True])], False: ends[len(ranges[True]) : -1]}
        self.small, self.top = ends[len(ranges[True])], ends[-1]

    def of(self, address: int, small: bool) -> int:
        place = bisect_right(self.starts[small], address) - 1
        return self.offsets[small][place] + address - self.starts[small][place]


def memory_map(trace: Sequence[Mapping], before: Iterable[Mapping] = ()) -> MemoryMap:
    """Lay a history out.

    Args:
        trace: its events; those that move no memory are left out of the time axis.
        before: the segments of a snapshot taken at its start; their blocks are of the kind "there before".
    """
    before = list(before)
    old = [{"action": "segment_alloc", "addr": s["address"], "size": s["total_size"]} for s in before]
    blocks = [block for segment in before for block in segment["blocks"] if block["state"] != "inactive"]
    old += [{"action": "alloc", "addr": b["address"], "size": b["size"], "kind": "there before"} for b in blocks]
    events = [event for event in (*old, *trace) if event["action"] in MOVING]
    places = _Places(event for event in events if event["action"] == "segment_alloc")
    found = MemoryMap(small=places.small, top=places.top)
    segments: dict[int, Span] = {}  # address → what is open
    live: dict[int, Span] = {}
    starts: list[int] = []  # of open segments, sorted
    for time, event in enumerate(events, start=-len(old)):
        action, address, size, now = event["action"], event["addr"], event["size"], max(time, 0)
        active, reserved = found.active[-1], found.reserved[-1]
        if action == "segment_alloc":
            offset = places.of(address, size <= SMALL_SEGMENT)
            segments[address] = Span(now, now, offset, size, "reserved, free")
            insort(starts, address)
            reserved += size
        elif action == "segment_free" and address in segments:
            span = segments.pop(address)
            starts.remove(address)
            found.segments.append(span._replace(death=now))
            reserved -= span.size
        elif action == "alloc":
            home = segments[starts[bisect_right(starts, address) - 1]]
            size = max(512, -(-size // 512) * 512)
            offset = places.of(address, home.size <= SMALL_SEGMENT)
            live[address] = Span(now, now, offset, size, event.get("kind", "block"))
            active += size
        elif action == "free_completed" and address in live:
            span = live.pop(address)
            found.blocks.append(span._replace(death=now))
            active -= span.size
        if time < 0:  # the state at the start
            found.active.pop(), found.reserved.pop()
        found.active.append(active)
        found.reserved.append(reserved)
    end = len(events) - len(old)
    found.segments += [span._replace(death=end) for span in segments.values()]
    found.blocks += [span._replace(death=end) for span in live.values()]
    return found


def at_peak(found: MemoryMap) -> tuple[int, Counter]:
    """The first event after which most is in blocks, and the bytes of each kind then."""
    most = found.active.index(max(found.active))
    moment = max(most - 1, 0)
    parts: Counter = Counter()
    for span in found.blocks:
        there_before = most == 0 and span.birth == 0  # even what the first event frees
        if there_before or span.birth <= moment < span.death:
            parts[span.kind] += span.size
    return moment, parts


def draw_map(
    ax: Axes, found: MemoryMap, title: str, *, unit: int = MIB, legend: bool = True, names: Sequence[str] = ()
) -> None:
    """Draw the spans: segments have a border, a thin line parts the small pool from the large one.

    Args:
        ax: where to draw.
        found: what `memory_map` made.
        title: of the axes.
        unit: MIB or GIB, of the address axis.
        legend: whether the kinds are named beside the axes.
        names: written into the blocks, in the order in which they were handed out.
    """
    for spans, edge, width in ((found.segments, COLOURS["grey"], 0.6), (found.blocks, "white", 0.15)):
        patches = [
            Rectangle((s.birth, s.offset / unit), s.death - s.birth, s.size / unit) for s in spans if s.death > s.birth
        ]
        colours = [KIND_COLOURS[s.kind] for s in spans if s.death > s.birth]
        width = width if len(patches) <= FEW else 0.0  # many borders hide what they surround
        ax.add_collection(PatchCollection(patches, facecolors=colours, edgecolors=edge, linewidths=width))
    for span, name in zip(sorted(found.blocks), names, strict=False):
        place = (span.birth + span.death) / 2, (span.offset + span.size / 2) / unit
        ax.text(
            *place,
            name,
            ha="center",
            va="center",
            fontsize=12,
            fontweight="bold",
            color="white",
            path_effects=[withStroke(linewidth=3, foreground=COLOURS["grey"])],
        )
    end = max((span.death for span in found.segments), default=1)
    if 0 < found.small < found.top:
        ax.axhline(found.small / unit, color=COLOURS["ink"], linestyle="-", linewidth=0.8)
        ax.text(end, found.small / unit, " small pool", ha="left", va="top", fontsize=9)
    if legend:
        drawn = {span.kind for span in (*found.blocks, *found.segments)}
        handles = [
            Patch(facecolor=colour, edgecolor=COLOURS["grey"], label=kind)
            for kind, colour in KIND_COLOURS.items()
            if kind in drawn
        ]
        ax.legend(handles=handles, fontsize=10, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ax.set(
        xlim=(0, max(end, 1)),
        ylim=(0, max(found.top, 1) / unit),
        title=title,
        xlabel="event",
        ylabel="place, " + ("GiB" if unit == GIB else "MiB"),
    )
