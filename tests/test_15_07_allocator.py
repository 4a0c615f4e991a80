"""The allocator that 15-07 builds, against recordings of a real GPU's; what it records and predicts.

What the notebook prints as a checked output isn't tested again: the steps to the whole allocator, what it is for.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from course.lesson_code import definitions
from shared.histories import FOLDER, read_history
from shared.lessons.topic_15_07.recordings import Tape, layout, play_back
from shared.lessons.topic_15_07.simulated_gpu import SimulatedDriver, load, snapshot

CELLS = "segment-size block whole recorder record-steps dry-run schedule streams"
MIB = 2**20
OOM = torch.OutOfMemoryError


@pytest.fixture(scope="module")
def lesson():
    """What the notebook's cells define; run by a worker that has one of these tests."""
    return SimpleNamespace(**definitions("15-07", *CELLS.split()))


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


def test_a_full_gpu_gets_whole_segments_back_before_memory_is_out(lesson):
    allocator = lesson.CachingAllocator(SimulatedDriver(42 * MIB))
    whole, part = allocator.malloc(20 * MIB), allocator.malloc(3 * MIB)
    allocator.malloc(1)
    allocator.free(whole)
    other = allocator.malloc(3 * MIB, stream=1)  # another stream's blocks don't serve it
    assert (allocator.reserved, allocator.max_reserved) == (42 * MIB, 42 * MIB)
    assert whole not in allocator.blocks
    assert {part, other} <= set(allocator.blocks)
    assert allocator.max_allocated == 23 * MIB + 512


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


def played(lesson, history):
    """(how many allocations the notebook's allocator puts elsewhere, whether the blocks in the end are the same)."""
    tape = Tape(history["trace"])
    allocator = lesson.CachingAllocator(tape)
    load(allocator, history["before"], lesson.Block)
    _, wrong = play_back(history, tape, allocator)
    return wrong, layout(snapshot(allocator)) == layout(history["after"])


def test_recordings_play_back_and_stay_small(lesson):
    for path in FOLDER.glob("*_history.json.gz"):
        history = read_history(path.name.removesuffix("_history.json.gz"))
        assert played(lesson, history) == (0, True), path.name
        next(event for event in reversed(history["trace"]) if event["action"] == "alloc")["addr"] += 512
        assert played(lesson, history)[0] == 1, "a wrong address is noticed"
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 1_000_000


def test_a_segment_is_given_back_each_time_also_if_the_driver_hands_out_its_address_again(lesson):
    def used(address):
        for action in ("segment_alloc", "alloc", "free_completed", "segment_free"):
            yield {"action": action, "addr": address, "size": 12 * MIB, "stream": 0}

    trace = [event for address in (MIB, MIB, 20 * MIB) for event in used(address)]
    assert played(lesson, {"trace": trace, "before": [], "after": []}) == (0, True)


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
