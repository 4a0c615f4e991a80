"""The allocator that 15-07 builds, against brute force, properties, and recordings where there are any."""

import gzip
import itertools
import json
import random
from bisect import bisect_left
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from course.answers import definitions
from course.syllabus import SYLLABUS_FILE

CELLS = """
    constants driver rounding block free-list split-and-merge segments oversize events arena expandable
    expandable-pages malloc-free reports snapshots allocator random-history problems tape play-back recorded
    recorded-allocator recorder record-steps replay predict-peak schedule
"""
lesson = SimpleNamespace(**definitions("15-07", *CELLS.split()))
KIB, MIB, GIB = 2**10, 2**20, 2**30
OOM = torch.OutOfMemoryError


class LoggingDriver:
    """cudaMalloc and cudaFree, each call written down; addresses are reused, the lowest gap first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used, self.log = capacity, {}, []

    def malloc(self, size: int) -> int:
        if sum(self.used.values()) + size > self.capacity:
            self.log.append(("no", size))
            raise MemoryError
        address = 2**40
        for start in sorted(self.used):
            if start - address >= size:
                break
            address = start + self.used[start]
        self.used[address] = size
        self.log.append(("malloc", address, size))
        return address

    def free(self, address: int) -> None:
        self.log.append(("free", address, self.used.pop(address)))


class BruteForce:
    """The rules once more, with nothing but lists and linear searches: pieces are [address, size, stream, small, used].

    A segment is found by its pieces' position between the addresses that the driver gave out.
    """

    def __init__(self, driver: LoggingDriver, max_split_size: float = float("inf")) -> None:
        self.driver, self.max_split_size, self.pieces = driver, max_split_size, []

    def malloc(self, size: int, stream: int = 0) -> int:
        size = max(512, (size + 511) // 512 * 512)
        small = size <= MIB
        piece = self.best(size, stream, small)
        if piece is None:
            total = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            piece = self.segment(total, stream, small)
            if piece is None and self.max_split_size != float("inf") and self.make_room(size, stream, small):
                piece = self.segment(total, stream, small)
            if piece is None:
                self.empty_cache()
                piece = self.segment(total, stream, small)
            if piece is None:
                raise OOM("out of memory")
        rest = piece[1] - size
        if (small and rest >= 512) or (not small and size < self.max_split_size and rest > MIB):
            self.pieces.append([piece[0] + size, rest, stream, small, False])
            piece[1] = size
        piece[4] = True
        return piece[0]

    def best(self, size: int, stream: int, small: bool) -> list | None:
        fits = [p for p in self.pieces if not p[4] and p[2] == stream and p[3] == small and p[1] >= size]
        if not fits:
            return None
        best = sorted(fits, key=lambda p: (p[1], p[0]))[0]
        if size < self.max_split_size and best[1] >= self.max_split_size:
            return None
        if size >= self.max_split_size and best[1] >= size + 20 * MIB:
            return None
        return best

    def segment(self, total: int, stream: int, small: bool) -> list | None:
        try:
            address = self.driver.malloc(total)
        except MemoryError:
            return None
        self.pieces.append([address, total, stream, small, False])
        return self.pieces[-1]

    def segment_of(self, address: int) -> int:
        starts = sorted(self.driver.used)
        return starts[bisect_left(starts, address + 1) - 1]

    def free(self, address: int) -> None:
        (piece,) = [p for p in self.pieces if p[0] == address and p[4]]
        piece[4] = False
        home = self.segment_of(address)
        mine = sorted(p for p in self.pieces if self.segment_of(p[0]) == home)
        for left, right in itertools.pairwise(mine):
            if not left[4] and not right[4]:
                right[0], right[1] = left[0], left[1] + right[1]
                self.pieces = [p for p in self.pieces if p is not left]

    def whole(self, piece: list) -> bool:
        return not piece[4] and self.driver.used.get(piece[0]) == piece[1]

    def release(self, piece: list) -> None:
        self.driver.free(piece[0])
        self.pieces = [p for p in self.pieces if p is not piece]

    def empty_cache(self) -> None:
        for small in (False, True):
            for piece in sorted(self.pieces, key=lambda p: (p[2], p[1], p[0])):
                if piece[3] == small and self.whole(piece):
                    self.release(piece)

    def make_room(self, size: int, stream: int, small: bool) -> bool:
        free = [p for p in self.pieces if not p[4] and p[2] == stream and p[3] == small]
        oversize = sorted((p for p in free if p[1] >= self.max_split_size), key=lambda p: (p[1], p[0]))
        wanted = max(size, self.max_split_size)
        enough = [p for p in oversize if p[1] >= wanted]
        if enough:
            self.release(enough[0])
            return True
        released = 0
        for piece in reversed(oversize):
            if released >= wanted:
                break
            released += piece[1]
            self.release(piece)
        return released >= wanted

    def layout(self) -> list[tuple[int, int, bool]]:
        return sorted((p[0], p[1], p[4]) for p in self.pieces)


def layout(allocator) -> list[tuple[int, int, bool]]:
    """Address, size, in use, of every block."""
    return [(b["address"], b["size"], b["state"] != "inactive") for s in allocator.snapshot() for b in s["blocks"]]


def request(generator: random.Random) -> int:
    """Sizes around every threshold, and any other."""
    edges = (512, MIB, 10 * MIB, 20 * MIB, 2 * MIB, 64 * MIB)
    if generator.random() < 0.3:
        return max(1, generator.choice(edges) + generator.choice((-513, -512, -1, 0, 1, 512, 513)))
    return int(2 ** generator.uniform(0, 27))


@pytest.mark.parametrize("limit", [float("inf"), 32 * MIB], ids=["default", "max_split_size"])
@pytest.mark.parametrize("capacity", [GIB // 2, 64 * GIB], ids=["tight", "roomy"])
@pytest.mark.parametrize("seed", range(4))
def test_every_address_and_driver_call_equals_brute_force(seed, capacity, limit):
    generator, live = random.Random(seed), []
    ours = lesson.CachingAllocator(LoggingDriver(capacity), max_split_size=limit)
    oracle = BruteForce(LoggingDriver(capacity), limit)
    failures = 0
    for _ in range(700):
        choice = generator.random()
        if choice < 0.01:
            ours.empty_cache()
            oracle.empty_cache()
        elif live and choice < 0.45:
            address = live.pop(generator.randrange(len(live)))
            ours.free(address)
            oracle.free(address)
        else:
            size, stream = request(generator), generator.choice((0, 0, 0, 7, 3))
            results = []
            for allocator in (ours, oracle):
                try:
                    results.append(allocator.malloc(size, stream))
                except OOM:
                    results.append(None)
            assert results[0] == results[1]
            failures += results[0] is None
            live += [results[0]] * (results[0] is not None)
        assert ours.driver.log == oracle.driver.log
    assert layout(ours) == oracle.layout()
    assert ours.reserved == sum(ours.driver.used.values())
    assert lesson.problems(ours) == []
    assert (failures > 0) == (capacity < GIB), "a tight GPU runs out of memory, a roomy one does not"


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_properties_hold_at_every_moment(seed, expandable):
    generator, live = random.Random(seed), {}
    driver = lesson.SimulatedDriver(GIB)
    allocator = lesson.CachingAllocator(driver, expandable_segments=expandable)
    peak_allocated = peak_reserved = 0
    for step in range(1500):
        if live and generator.random() < 0.5:
            address = generator.choice(list(live))
            live.pop(address)
            allocator.free(address)
        else:
            size = request(generator)
            try:
                address = allocator.malloc(size, generator.choice((0, 5)))
            except OOM:
                continue
            assert not any(a < address + size and address < a + s for a, s in live.items()), "overlap"
            live[address] = size
        peak_allocated = max(peak_allocated, allocator.allocated)
        peak_reserved = max(peak_reserved, allocator.reserved)
        if step % 50 == 0:
            assert lesson.problems(allocator) == []
            assert allocator.reserved == driver.used
            assert allocator.allocated >= sum(live.values())
    assert (allocator.max_allocated, allocator.max_reserved >= peak_reserved) == (peak_allocated, True)
    for address in live:
        allocator.free(address)
    assert (allocator.allocated, allocator.inactive_split) == (0, 0)
    allocator.empty_cache()
    assert (allocator.reserved, driver.used, allocator.snapshot(), allocator.unmapped) == (0, 0, [], [])


def test_inactive_split_counts_free_bytes_of_segments_in_use():
    allocator = lesson.CachingAllocator(lesson.SimulatedDriver())
    first, second = allocator.malloc(512), allocator.malloc(30 * MIB)
    assert allocator.inactive_split == 2 * MIB - 512
    allocator.free(second)  # a segment that is one free block can go back: not split
    assert allocator.inactive_split == 2 * MIB - 512
    allocator.free(first)
    assert allocator.inactive_split == 0


def test_out_of_memory_names_the_segment_and_the_holes_and_leaves_a_usable_state():
    allocator = lesson.CachingAllocator(lesson.SimulatedDriver(32 * MIB))
    allocator.malloc(3 * MIB)
    with pytest.raises(OOM) as failure:
        allocator.malloc(20 * MIB + 1)
    text = str(failure.value)
    assert "Tried to allocate 22.00 MiB" in text
    assert "total capacity of 32.00 MiB of which 12.00 MiB is free" in text
    assert "3.00 MiB is allocated by PyTorch, and 17.00 MiB is reserved by PyTorch but unallocated" in text
    assert lesson.problems(allocator) == []
    assert allocator.malloc(12 * MIB) > 0


def test_a_failed_cuda_malloc_gives_back_what_is_cached_and_tries_again():
    driver = LoggingDriver(60 * MIB)
    allocator = lesson.CachingAllocator(driver)
    for address in [allocator.malloc(size) for size in (12 * MIB, 14 * MIB, 16 * MIB, 512)]:
        allocator.free(address)
    allocator.malloc(40 * MIB)
    kinds = [(entry[0], entry[-1] // MIB) for entry in driver.log[4:]]
    assert kinds == [("no", 40), ("free", 12), ("free", 14), ("free", 16), ("free", 2), ("malloc", 40)]


def test_other_ways_in_which_a_driver_says_no():
    for answer in (lambda size: None, lambda size: (_ for _ in ()).throw(torch.OutOfMemoryError())):
        allocator = lesson.CachingAllocator(SimpleNamespace(malloc=answer, free=None))
        with pytest.raises(OOM, match=r"Tried to allocate 2\.00 MiB"):
            allocator.malloc(1)


def test_a_block_that_another_stream_uses_waits_for_it():
    allocator = lesson.CachingAllocator(lesson.SimulatedDriver())
    block = allocator.malloc(20 * MIB, 1)
    allocator.record_stream(block, 0)
    allocator.record_stream(block, 2)
    allocator.record_stream(block, 1)  # its own stream: nothing to wait for
    allocator.free(block)
    assert allocator.allocated == 0
    assert [b["state"] for b in allocator.snapshot()[0]["blocks"]] == ["active_pending_free"]
    allocator.reach(0)
    assert allocator.malloc(20 * MIB, 1) != block
    allocator.reach(2)
    assert allocator.malloc(20 * MIB, 1) == block
    # empty_cache waits for all streams
    allocator.record_stream(block, 0)
    allocator.free(block)
    allocator.empty_cache()
    assert block not in [s["address"] for s in allocator.snapshot()]


def test_wrong_addresses_are_refused_and_empty_requests_are_nothing():
    allocator = lesson.CachingAllocator(lesson.SimulatedDriver())
    assert allocator.malloc(0) == 0
    allocator.free(0)
    address = allocator.malloc(10)
    allocator.free(address)
    with pytest.raises(ValueError, match="invalid device pointer"):
        allocator.free(address)


@pytest.mark.parametrize("seed", range(3))
def test_a_snapshot_taken_in_the_middle_is_a_place_to_start_from(seed):
    first = lesson.RecordedAllocator(8 * GIB)
    live = lesson.random_history(first, 800, seed=seed)
    snapshot = first.snapshot()
    del first.trace[:]
    for address in live[::2]:
        first.free(address)
    lesson.random_history(first, 800, seed=seed + 100)
    count, wrong = lesson.play_back(first.trace, snapshot)
    assert (count > 300, wrong) == (True, 0)


@pytest.mark.parametrize("seed", range(3))
def test_a_history_with_streams_oom_and_empty_cache_plays_back(seed):
    generator, live = random.Random(seed), []
    recorded = lesson.RecordedAllocator(GIB // 2)
    for _ in range(1500):
        choice = generator.random()
        if choice < 0.01:
            recorded.empty_cache()
        elif live and choice < 0.48:
            recorded.free(live.pop(generator.randrange(len(live))))
        else:
            try:
                live.append(recorded.malloc(request(generator), generator.randrange(2)))
            except OOM:
                recorded.trace.append({"action": "oom", "size": 0, "stream": 0, "device_free": 0})
    assert {"segment_free", "oom"} <= {event["action"] for event in recorded.trace}
    count, wrong = lesson.play_back(recorded.trace, [])
    assert (count > 400, wrong) == (True, 0)
    # and a wrong address is noticed
    next(e for e in reversed(recorded.trace) if e["action"] == "alloc")["addr"] += 512
    assert lesson.play_back(recorded.trace, []) == (count, 1)


RECORDED = sorted(SYLLABUS_FILE.parent.glob("recordings/*history*.json.gz"))


@pytest.mark.skipif(not RECORDED, reason="no history recorded on a GPU is in recordings/ yet")
@pytest.mark.parametrize("path", RECORDED or ["none"], ids=lambda path: Path(path).name)
def test_recorded_histories_play_back_without_a_mismatch(path):
    recording = json.loads(gzip.decompress(path.read_bytes()))
    count, wrong = lesson.play_back(recording["trace"], recording["segments_before"])
    assert (count > 0, wrong) == (True, 0)


def test_a_hundred_thousand_events_take_seconds(capsys):
    allocator = lesson.CachingAllocator(lesson.SimulatedDriver(64 * GIB))
    start = perf_counter()
    lesson.random_history(allocator, 100_000)
    seconds = perf_counter() - start
    with capsys.disabled():
        print(f"\n100,000 allocator events: {seconds:.2f} s")
    assert seconds < 20  # on an idle core well under 2


# ---------------------------------------------------------------- recording and predicting


def test_the_recorder_sees_births_and_deaths_and_leaves_nothing_behind():
    with lesson.AllocationRecorder() as recorder:
        a = torch.ones(256)
        b = a[:10]  # a view: no storage of its own
        c = a + 1
        del a
        assert [kind for kind, *_ in recorder.events] == ["alloc", "alloc"]
        del b
        assert recorder.events[-1][:2] == ("free", 0)
    before = list(recorder.events)
    del c
    assert recorder.events == before
    assert [size for kind, _, size in before if kind == "alloc"] == [1024, 1024]


def test_a_predicted_peak_by_hand():
    """One frozen-free linear layer, no bias, SGD: weight, input, output, loss, gradients: few enough to count."""
    with torch.device("meta"):
        model = nn.Linear(1024, 1024, bias=False)
        batch = torch.empty(1024, 1024), torch.empty(1024, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    allocated, reserved = lesson.predict_peak(model, optimizer, batch)
    matrix = 4 * MIB
    # weight, input, log-probabilities, their gradient and the logits' gradient; then the weight's gradient
    assert 5 * matrix <= allocated <= 6 * matrix
    assert reserved >= allocated
    assert next(model.parameters()).grad is None
    assert optimizer.state == {}


def test_predicting_keeps_ties_frozen_parameters_and_the_models_own_state():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
    before = model[0].weight.detach().clone()
    recorder = lesson.dry_run(model, optimizer, (torch.randn(8, 64), torch.zeros(8, dtype=torch.long)))
    kinds = [recorder.kinds[number] for kind, number, _ in recorder.events if kind == "alloc"]
    assert kinds.count("parameter") == 1
    assert torch.equal(before, model[0].weight)
    assert not optimizer.state


def test_the_schedule_by_hand():
    op = lesson.Op
    times = lesson.schedule(
        [
            op("a", "copy", "s", 2),
            op("b", "compute", "s", 3),  # same stream: after a
            op("c", "copy", "t", 2),  # same engine as a
            op("d", "compute", "t", 1, ("b",)),
        ]
    )
    assert times == {"a": (0.0, 2.0), "b": (2.0, 5.0), "c": (2.0, 4.0), "d": (5.0, 6.0)}
