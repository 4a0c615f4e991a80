"""The allocator that 15-07 builds, against brute force and recordings; what it records and predicts."""

import itertools
import random
from bisect import bisect_left
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from course.lesson_code import definitions
from module_15_advanced_pytorch_internals.recordings.pack_history import pack, state_before
from shared.histories import FOLDER, Tape, layout, play_back, read_history
from shared.lessons.topic_15_07.simulated_gpu import SimulatedDriver, load, snapshot

CELLS = "segment-size tiny block splitting whole recorder record-steps dry-run schedule streams"
MIB, GIB = 2**20, 2**30
OOM = torch.OutOfMemoryError


@pytest.fixture(scope="module")
def lesson():
    """What the notebook's cells define; run by a worker that has one of these tests."""
    return SimpleNamespace(**definitions("15-07", *CELLS.split()))


class LoggingDriver:
    """cudaMalloc and cudaFree, each call written down; addresses are reused, the lowest gap first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.held, self.log = capacity, {}, []

    @property
    def used(self) -> int:
        return sum(self.held.values())

    def malloc(self, size: int) -> int | None:
        if sum(self.held.values()) + size > self.capacity:
            self.log.append(("no", size))
            return None
        address = 2**40
        for start in sorted(self.held):
            if start - address >= size:
                break
            address = start + self.held[start]
        self.held[address] = size
        self.log.append(("malloc", address, size))
        return address

    def free(self, address: int) -> None:
        self.log.append(("free", address, self.held.pop(address)))


class BruteForce:
    """The rules once more, with nothing but lists and linear searches: pieces are [address, size, stream, small, used].

    A segment is found by its pieces' position between the addresses that the driver gave out.
    """

    def __init__(self, driver: LoggingDriver) -> None:
        self.driver, self.pieces = driver, []

    def malloc(self, size: int, stream: int = 0) -> int:
        size = max(512, (size + 511) // 512 * 512)
        small = size <= MIB
        fits = [p for p in self.pieces if not p[4] and p[2] == stream and p[3] == small and p[1] >= size]
        if fits:
            piece = sorted(fits, key=lambda p: (p[1], p[0]))[0]
        else:
            total = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            address = self.driver.malloc(total)
            if address is None:
                self.empty_cache()
                address = self.driver.malloc(total)
            if address is None:
                raise OOM("out of memory")
            piece = [address, total, stream, small, False]
            self.pieces.append(piece)
        rest = piece[1] - size
        if (small and rest >= 512) or (not small and rest > MIB):
            self.pieces.append([piece[0] + size, rest, stream, small, False])
            piece[1] = size
        piece[4] = True
        return piece[0]

    def segment_of(self, address: int) -> int:
        starts = sorted(self.driver.held)
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
        return not piece[4] and self.driver.held.get(piece[0]) == piece[1]

    def release(self, piece: list) -> None:
        self.driver.free(piece[0])
        self.pieces = [p for p in self.pieces if p is not piece]

    def empty_cache(self) -> None:
        for small in (False, True):
            for piece in sorted(self.pieces, key=lambda p: (p[2], p[1], p[0])):
                if piece[3] == small and self.whole(piece):
                    self.release(piece)

    def layout(self) -> list[tuple[int, int, bool]]:
        return sorted((p[0], p[1], p[4]) for p in self.pieces)


def request(generator: random.Random) -> int:
    """Sizes around every threshold, and any other."""
    edges = (512, MIB, 10 * MIB, 20 * MIB, 2 * MIB, 64 * MIB)
    if generator.random() < 0.3:
        return max(1, generator.choice(edges) + generator.choice((-513, -512, -1, 0, 1, 512, 513)))
    return int(2 ** generator.uniform(0, 27))


@pytest.mark.parametrize("kind", ["CachingAllocator", "StreamAwareAllocator"])
@pytest.mark.parametrize("capacity", [GIB // 2, 64 * GIB], ids=["tight", "roomy"])
@pytest.mark.parametrize("seed", range(2))
def test_every_address_driver_call_and_count_equals_brute_force(lesson, seed, capacity, kind):
    generator, live = random.Random(seed), []
    ours, oracle = getattr(lesson, kind)(LoggingDriver(capacity)), BruteForce(LoggingDriver(capacity))
    failures = most_allocated = most_reserved = 0
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
        assert ours.allocated == sum(piece[1] for piece in oracle.pieces if piece[4])
        assert ours.reserved == ours.driver.used
        most_allocated, most_reserved = max(most_allocated, ours.allocated), max(most_reserved, ours.reserved)
    assert layout(snapshot(ours)) == [(place, size, not used) for place, size, used in oracle.layout()]
    assert (ours.max_allocated, ours.max_reserved >= most_reserved) == (most_allocated, True)
    assert (failures > 0) == (capacity < GIB), "a tight GPU runs out of memory, a roomy one does not"
    for address in live:
        ours.free(address)
    ours.empty_cache()
    assert (ours.allocated, ours.reserved, ours.blocks) == (0, 0, {})


@pytest.mark.parametrize("name", ["TinyAllocator", "SplittingAllocator"])
def test_the_steps_to_the_whole_hand_out_no_byte_twice(lesson, name):
    generator, live = random.Random(0), {}
    ours = getattr(lesson, name)(LoggingDriver(2**50))
    for _ in range(500):
        if live and generator.random() < 0.48:
            address = generator.choice(list(live))
            live.pop(address)
            ours.free(address)
        else:
            size = request(generator)
            address = ours.malloc(size)
            assert not any(a < address + size and address < a + s for a, s in live.items()), "overlap"
            live[address] = size
    assert ours.reserved == ours.driver.used


def test_what_cannot_be_is_said_and_leaves_a_usable_state(lesson):
    allocator = lesson.CachingAllocator(SimulatedDriver(32 * MIB))
    address = allocator.malloc(3 * MIB)
    with pytest.raises(OOM) as failure:
        allocator.malloc(20 * MIB + 1)
    text = str(failure.value)
    assert "Tried to allocate 22.00 MiB" in text
    assert "total capacity of 32.00 MiB of which 12.00 MiB is free" in text
    assert "3.00 MiB is allocated by PyTorch, and 17.00 MiB is reserved by PyTorch but unallocated" in text
    assert allocator.malloc(12 * MIB) > 0
    allocator.free(address)
    for wrong in (address, address + 512, 0):
        with pytest.raises(ValueError, match="invalid device pointer"):
            allocator.free(wrong)


def test_a_block_that_other_streams_use_waits_for_all_of_them(lesson):
    allocator = lesson.StreamAwareAllocator(SimulatedDriver())
    block = allocator.malloc(20 * MIB, 1)
    for stream in (0, 2, 1):  # 1 is its own: nothing to wait for
        allocator.record_stream(block, stream)
    allocator.free(block)
    assert allocator.allocated == 0
    assert [b["state"] for b in snapshot(allocator)[0]["blocks"]] == ["active_pending_free"]
    allocator.reach(0)
    assert allocator.malloc(20 * MIB, 1) != block
    allocator.reach(2)
    assert allocator.malloc(20 * MIB, 1) == block
    # empty_cache waits for all streams
    allocator.record_stream(block, 0)
    allocator.free(block)
    allocator.empty_cache()
    assert block not in [s["address"] for s in snapshot(allocator)]


# ---------------------------------------------------------------- histories


def live_on(allocator, generator, live, events):
    """Allocate and free at random, on two streams; out of memory and emptied caches included."""
    for _ in range(events):
        choice = generator.random()
        if choice < 0.01:
            allocator.empty_cache()
        elif live and choice < 0.48:
            allocator.free(live.pop(generator.randrange(len(live))))
        else:
            try:
                live.append(allocator.malloc(request(generator), generator.randrange(2)))
            except OOM:
                allocator.trace.append({"action": "oom", "addr": 0, "size": 0, "stream": 0})


def played(lesson, history):
    """(allocations, how many of them the notebook's allocator puts elsewhere, whether the blocks are the same)."""
    tape = Tape(history["trace"])
    allocator = lesson.CachingAllocator(tape)
    load(allocator, history["before"], lesson.Block)
    count, wrong = play_back(history, tape, allocator)
    return count, wrong, layout(snapshot(allocator)) == layout(history["after"])


@pytest.mark.parametrize("seed", range(2))
def test_a_history_plays_back_from_any_moment_and_in_its_compact_form(lesson, tmp_path, seed):
    """The driver hands out addresses again."""
    generator, live = random.Random(seed), []
    first = lesson.CachingAllocator(LoggingDriver(GIB // 2))
    live_on(first, generator, live, 800)
    before = snapshot(first)
    del first.trace[:]
    live_on(first, generator, live, 800)
    history = {"before": before, "trace": first.trace, "after": snapshot(first)}
    assert {"segment_free", "oom"} <= {event["action"] for event in first.trace}
    count, wrong, same = played(lesson, history)
    assert (count > 300, wrong, same) == (True, 0, True)

    # the state at the start, found by undoing events backwards
    packed = pack(state_before(first.trace, history["after"]), first.trace, history["after"], gpu="none")
    (tmp_path / "some_history.json.gz").write_bytes(packed)
    again = read_history("some", tmp_path)
    assert again["gpu"] == "none"
    assert played(lesson, again) == (count, 0, True)
    for segment in again["after"]:
        used = sum(block["size"] for block in segment["blocks"] if block["state"] != "inactive")
        assert segment["active_size"] == segment["allocated_size"] == used <= segment["total_size"]
    with pytest.raises(FileNotFoundError, match="there are some"):
        read_history("other", tmp_path)

    # and a wrong address is noticed
    next(e for e in reversed(again["trace"]) if e["action"] == "alloc")["addr"] += 512
    assert played(lesson, again)[1] == 1


def test_recordings_play_back_and_stay_small(lesson):
    for path in FOLDER.glob("*_history.json.gz"):
        assert played(lesson, read_history(path.name.removesuffix("_history.json.gz")))[1:] == (0, True), path.name
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 1_000_000


# ---------------------------------------------------------------- recording and predicting


def test_the_recorder_hears_nothing_after_its_block(lesson):
    with lesson.AllocationRecorder() as recorder:
        kept = torch.ones(256)
    del kept
    assert recorder.events == [("alloc", 0, 1024)]


def tied_net():
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 64))
    net[2].weight = net[0].weight
    net[3].requires_grad_(False)
    return net, torch.optim.Adam(net.parameters(), lr=1e-3, foreach=True)


def test_a_dry_run_is_the_real_one_and_leaves_the_model_alone(lesson):
    """Tied and frozen parameters, buffers, an optimizer with a state."""
    x, y = torch.randn(8, 64), torch.zeros(8, dtype=torch.long)
    model, optimizer = tied_net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dry = lesson.dry_run(model, optimizer, x, y)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not optimizer.state
    assert next(model.parameters()).grad is None
    real = lesson.record_steps(*tied_net(), x, y)
    assert (dry.events, dry.kinds) == (real.events, real.kinds)
    # weight, bias, batch norm's two; the frozen layer's two; three buffers
    assert dry.kinds.count("parameter") == 4 + 2 + 3


def test_a_dry_run_by_hand(lesson):
    """One linear layer, no bias, SGD: weight, input, output, loss, gradients: few enough to count."""
    with torch.device("meta"):
        model = nn.Linear(1024, 1024, bias=False)
        batch = torch.empty(1024, 1024), torch.empty(1024, dtype=torch.long)
    recorder = lesson.dry_run(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), *batch)
    sizes = {number: size for action, number, size in recorder.events if action == "alloc"}
    changes = [sizes[number] if action == "alloc" else -sizes[number] for action, number, _ in recorder.events]
    matrix = 4 * MIB
    # weight, input, log-probabilities, their gradient and the logits' gradient; then the weight's gradient
    assert 5 * matrix <= max(itertools.accumulate(changes)) <= 6 * matrix


def test_the_schedule_by_hand(lesson):
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
