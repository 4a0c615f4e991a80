"""The allocator that 15-07 builds, against brute force, properties, and recordings where there are any."""

import ast
import itertools
import json
import random
from bisect import bisect_left
from time import perf_counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from course.lesson_code import definitions
from module_15_advanced_pytorch_internals.recordings.pack_history import pack, state_before
from shared.histories import FOLDER, Tape, layout, play_back, read_history
from shared.lessons.topic_15_07.simulated_gpu import SimulatedDriver, load, snapshot

CELLS = "segment-size tiny block splitting whole random-history recorder record-steps dry-run schedule streams"
KIB, MIB, GIB = 2**10, 2**20, 2**30
OOM = torch.OutOfMemoryError


@pytest.fixture(scope="module")
def lesson():
    """What the notebook's cells define; run by a worker that has one of these tests."""
    return SimpleNamespace(**definitions("15-07", *CELLS.split()))


def problems(allocator) -> list[str]:
    """What is wrong with the blocks; an empty list if nothing is."""
    found = []
    for segment in snapshot(allocator):
        at, last = segment["address"], None
        for part in segment["blocks"]:
            found += [f"gap or overlap at {at}"] * (part["address"] != at)
            found += [f"two free neighbours at {at}"] * (part["state"] == last == "inactive")
            at, last = at + part["size"], part["state"]
    states = [(block.size, block.state) for block in allocator.blocks.values()]
    in_use = sum(size for size, state in states if state == "active_allocated")
    found += ["allocated is wrong"] * (in_use != allocator.allocated)
    found += ["reserved is wrong"] * (sum(size for size, _ in states) != allocator.reserved)
    free = {b.address for b in allocator.blocks.values() if b.state == "inactive"}
    listed = [address for keys in allocator.free_lists.values() for _, _, address in keys]
    return found + ["the free lists are wrong"] * (sorted(listed) != sorted(free))


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
@pytest.mark.parametrize("seed", range(4))
def test_every_address_and_driver_call_equals_brute_force(lesson, seed, capacity, kind):
    generator, live = random.Random(seed), []
    driver = LoggingDriver(capacity)
    ours, oracle = getattr(lesson, kind)(driver), BruteForce(LoggingDriver(capacity))
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
    assert layout(snapshot(ours)) == [(place, size, not used) for place, size, used in oracle.layout()]
    assert ours.reserved == ours.driver.used
    assert problems(ours) == []
    assert (failures > 0) == (capacity < GIB), "a tight GPU runs out of memory, a roomy one does not"


@pytest.mark.parametrize("seed", range(3))
def test_the_steps_to_the_whole_hand_out_no_byte_twice(lesson, seed):
    for name in ("TinyAllocator", "SplittingAllocator"):
        generator, live = random.Random(seed), {}
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


def test_the_first_allocator_that_runs_has_twenty_five_lines_at_most():
    """Without docstring and blank lines; two cells further down it runs and is drawn."""
    (path,) = FOLDER.parent.glob("15-07_*.ipynb")
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    place = [cell["id"] for cell in cells].index("tiny")
    assert [cell["id"] for cell in cells[place : place + 4]] == ["tiny", "story", "tiny-run", "tiny-figure"]
    (tree,) = ast.parse("".join(cells[place]["source"])).body
    del tree.body[0]
    assert len(ast.unparse(tree).replace("\n\n", "\n").splitlines()) <= 25


@pytest.mark.parametrize("kind", ["CachingAllocator", "StreamAwareAllocator"])
@pytest.mark.parametrize("seed", range(3))
def test_properties_hold_at_every_moment(lesson, seed, kind):
    generator, live = random.Random(seed), {}
    driver = SimulatedDriver(GIB)
    allocator = getattr(lesson, kind)(driver)
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
            assert problems(allocator) == []
            assert allocator.reserved == driver.used
            assert allocator.allocated >= sum(live.values())
    assert (allocator.max_allocated, allocator.max_reserved >= peak_reserved) == (peak_allocated, True)
    for address in live:
        allocator.free(address)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert (allocator.reserved, driver.used, allocator.blocks) == (0, 0, {})


def test_out_of_memory_names_the_segment_and_the_holes_and_leaves_a_usable_state(lesson):
    allocator = lesson.CachingAllocator(SimulatedDriver(32 * MIB))
    allocator.malloc(3 * MIB)
    with pytest.raises(OOM) as failure:
        allocator.malloc(20 * MIB + 1)
    text = str(failure.value)
    assert "Tried to allocate 22.00 MiB" in text
    assert "total capacity of 32.00 MiB of which 12.00 MiB is free" in text
    assert "3.00 MiB is allocated by PyTorch, and 17.00 MiB is reserved by PyTorch but unallocated" in text
    assert problems(allocator) == []
    assert allocator.malloc(12 * MIB) > 0


def test_a_failed_cuda_malloc_gives_back_what_is_cached_and_tries_again(lesson):
    driver = LoggingDriver(60 * MIB)
    allocator = lesson.CachingAllocator(driver)
    for address in [allocator.malloc(size) for size in (12 * MIB, 14 * MIB, 16 * MIB, 512)]:
        allocator.free(address)
    allocator.malloc(40 * MIB)
    kinds = [(entry[0], entry[-1] // MIB) for entry in driver.log[4:]]
    assert kinds == [("no", 40), ("free", 12), ("free", 14), ("free", 16), ("free", 2), ("malloc", 40)]


def test_a_block_that_another_stream_uses_waits_for_it(lesson):
    allocator = lesson.StreamAwareAllocator(SimulatedDriver())
    block = allocator.malloc(20 * MIB, 1)
    allocator.record_stream(block, 0)
    allocator.record_stream(block, 2)
    allocator.record_stream(block, 1)  # its own stream: nothing to wait for
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


def test_wrong_addresses_are_refused(lesson):
    allocator = lesson.CachingAllocator(SimulatedDriver())
    address = allocator.malloc(10)
    allocator.free(address)
    for wrong in (address, address + 512, 0):
        with pytest.raises(ValueError, match="invalid device pointer"):
            allocator.free(wrong)


def recorded(lesson, allocator):
    """What an allocator wrote down so far, as a recording of an empty process."""
    return {"before": [], "trace": list(allocator.trace), "after": snapshot(allocator)}


def played(lesson, history, make="CachingAllocator"):
    """(allocations, how many of them the notebook's allocator puts elsewhere, whether the blocks are the same)."""
    tape = Tape(history["trace"])
    allocator = getattr(lesson, make)(tape)
    load(allocator, history["before"], lesson.Block)
    count, wrong = play_back(history, tape, allocator)
    return count, wrong, layout(snapshot(allocator)) == layout(history["after"])


@pytest.mark.parametrize("seed", range(3))
def test_a_snapshot_taken_in_the_middle_is_a_place_to_start_from(lesson, seed):
    first = lesson.CachingAllocator(SimulatedDriver(8 * GIB))
    live = lesson.random_history(first, 800, seed=seed)
    before = snapshot(first)
    del first.trace[:]
    for address in live[::2]:
        first.free(address)
    lesson.random_history(first, 800, seed=seed + 100)
    count, wrong, same = played(lesson, recorded(lesson, first) | {"before": before})
    assert (count > 300, wrong, same) == (True, 0, True)


@pytest.mark.parametrize("seed", range(3))
def test_a_history_with_streams_oom_and_empty_cache_plays_back(lesson, seed):
    generator, live = random.Random(seed), []
    first = lesson.CachingAllocator(SimulatedDriver(GIB // 2))
    for _ in range(1500):
        choice = generator.random()
        if choice < 0.01:
            first.empty_cache()
        elif live and choice < 0.48:
            first.free(live.pop(generator.randrange(len(live))))
        else:
            try:
                live.append(first.malloc(request(generator), generator.randrange(2)))
            except OOM:
                first.trace.append({"action": "oom", "size": 0, "stream": 0, "device_free": 0})
    history = recorded(lesson, first)
    assert {"segment_free", "oom"} <= {event["action"] for event in history["trace"]}
    count, wrong, same = played(lesson, history)
    assert (count > 400, wrong, same) == (True, 0, True)
    # and a wrong address is noticed
    next(e for e in reversed(history["trace"]) if e["action"] == "alloc")["addr"] += 512
    assert played(lesson, history)[1] == 1


def test_a_history_whose_driver_hands_out_an_address_again_plays_back(lesson):
    first = lesson.CachingAllocator(LoggingDriver(GIB))
    places = []
    for _ in range(2):
        places.append(first.malloc(20 * MIB))
        first.free(places[-1])
        first.empty_cache()
    assert places[0] == places[1]
    assert played(lesson, recorded(lesson, first)) == (2, 0, True)


@pytest.mark.parametrize("seed", range(3))
def test_the_state_before_a_history_is_found_from_the_state_after_it(lesson, seed):
    """Undoing events backwards: the allocations of the recording come out where they were."""
    first = lesson.CachingAllocator(SimulatedDriver(8 * GIB))
    lesson.random_history(first, 600, seed=seed)
    del first.trace[:]
    lesson.random_history(first, 600, seed=seed + 50)
    history = recorded(lesson, first)
    history["before"] = state_before(history["trace"], history["after"])
    assert played(lesson, history)[1:] == (0, True)


def test_the_compact_form_holds_all_of_a_history(lesson, tmp_path):
    first = lesson.CachingAllocator(SimulatedDriver(GIB))
    lesson.random_history(first, 500, seed=3)
    history = recorded(lesson, first)
    (tmp_path / "some_history.json.gz").write_bytes(pack(history["before"], first.trace, history["after"], gpu="none"))
    again = read_history("some", tmp_path)
    keys = ("action", "addr", "size", "stream")
    moving = [e for e in first.trace if e["action"] != "free_requested"]
    assert again["trace"] == [{key: event[key] for key in keys} for event in moving]
    assert layout(again["after"]) == layout(history["after"])
    for segment in again["after"]:
        used = sum(block["size"] for block in segment["blocks"] if block["state"] != "inactive")
        assert segment["active_size"] == segment["allocated_size"] == used <= segment["total_size"]
    assert again["gpu"] == "none"
    with pytest.raises(FileNotFoundError, match="there are some"):
        read_history("other", tmp_path)


RECORDED = sorted(path.name.removesuffix("_history.json.gz") for path in FOLDER.glob("*_history.json.gz"))


def test_recordings_ship_and_stay_small():
    assert {"transformer_training", "transformer_inference"} <= set(RECORDED)
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 1_000_000


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_histories_play_back_without_a_mismatch(lesson, name):
    count, wrong, same = played(lesson, read_history(name))
    assert (count > 0, wrong, same) == (True, 0, True)


def test_a_hundred_thousand_events_take_seconds(lesson, capsys):
    allocator = lesson.CachingAllocator(SimulatedDriver(64 * GIB))
    start = perf_counter()
    lesson.random_history(allocator, 100_000)
    seconds = perf_counter() - start
    with capsys.disabled():
        print(f"\n100,000 allocator events: {seconds:.2f} s")
    assert seconds < 20  # on an idle core well under 2


# ---------------------------------------------------------------- recording and predicting


def test_the_recorder_sees_births_and_deaths_and_leaves_nothing_behind(lesson):
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


def test_a_dry_run_by_hand(lesson):
    """One linear layer, no bias, SGD: weight, input, output, loss, gradients: few enough to count."""
    with torch.device("meta"):
        model = nn.Linear(1024, 1024, bias=False)
        batch = torch.empty(1024, 1024), torch.empty(1024, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    recorder = lesson.dry_run(model, optimizer, *batch)
    sizes = {number: size for action, number, size in recorder.events if action == "alloc"}
    now = peak = 0
    for action, number, _ in recorder.events:
        now += sizes[number] if action == "alloc" else -sizes[number]
        peak = max(peak, now)
    matrix = 4 * MIB
    # weight, input, log-probabilities, their gradient and the logits' gradient; then the weight's gradient
    assert 5 * matrix <= peak <= 6 * matrix
    assert next(model.parameters()).grad is None
    assert optimizer.state == {}


def test_predicting_keeps_ties_frozen_parameters_and_the_models_own_state(lesson):
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
    before = model[0].weight.detach().clone()
    recorder = lesson.dry_run(model, optimizer, torch.randn(8, 64), torch.zeros(8, dtype=torch.long))
    kinds = [recorder.kinds[number] for kind, number, _ in recorder.events if kind == "alloc"]
    assert kinds.count("parameter") == 1
    assert torch.equal(before, model[0].weight)
    assert not optimizer.state


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
