"""What 15-02 builds beside its exercises, by oracles of its own: loaders, shards, shuffling, resuming.

What the notebook prints as a checked output isn't tested again: order and size of batches, p-values, shifted rows.
"""

import itertools
import json
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from course.lesson_code import definitions

CELLS = """
    shuffled in-batches collate mini-loader data walk with-workers write-shard write-shards
    tar-samples write-manifests read-shard ex-stream decode shuffle-buffer traced-peak resumable-stream ex-resume
    counted-sampler first-batches whole-batches
"""


@pytest.fixture(scope="module")
def lesson():
    return SimpleNamespace(**definitions("15-02", *CELLS.split()))


def test_items_of_several_kinds_are_collated_as_pytorch_does_it(lesson):
    items = [(torch.randn(2, 3), k, (k % 3, torch.tensor(k))) for k in range(9)]
    for mine, theirs in zip(lesson.mini_loader(items, 4), DataLoader(items, 4), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_whole_batches_are_those_of_single_items(lesson):
    batches = list(BatchSampler(torch.randperm(300).tolist(), 64, drop_last=False))
    one = DataLoader(lesson.train, batch_sampler=batches)
    two = DataLoader(lesson.WholeBatches(lesson.train), batch_sampler=batches, collate_fn=lesson.as_it_is)
    for (x, y), (u, v) in zip(one, two, strict=True):
        torch.testing.assert_close(x, u, rtol=0, atol=0)
        assert torch.equal(y, v)


def test_a_shard_is_read_as_it_was_written_in_little_memory_and_if_it_is_damaged_named(lesson, tmp_path):
    paths = lesson.write_shards(tmp_path, [3, 0, 60, 600])
    lesson.write_manifests(paths)
    read = [lesson.decode(sample) for path in paths[:3] for sample in lesson.read_shard(path)]
    assert len(read) == 63
    for number, (image, label) in enumerate(read):
        assert torch.equal(image, lesson.train.images[number, 0] / 255)
        assert label == int(lesson.train.labels[number])
    few, many = (lesson.traced_peak(lambda p=p: sum(1 for _ in lesson.read_shard(p))) for p in paths[2:])
    assert many < few + 0.05

    path, used = paths[0], 3 * 5 * 512  # behind it come only zeros
    whole, expected, noticed = path.read_bytes(), list(lesson.read_shard(path)), 0
    for end in [*range(0, used, 256), *range(1, used, 997)]:
        path.write_bytes(whole[:end])
        with pytest.raises(lesson.ShardError, match=r"shard-000\.tar"):
            list(lesson.read_shard(path))
    for place in random.Random(0).sample(range(used), 300):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            found = list(lesson.read_shard(path))
        except lesson.ShardError:
            noticed += 1
        else:  # padding, and fields of a header that nobody reads
            assert [sample[1:] for sample in found] == [sample[1:] for sample in expected], place
    assert noticed > 75


def test_a_shuffle_buffer_keeps_all_delays_at_will_and_hastens_by_its_size_at_most(lesson):
    for size in (0, 1, 5):
        order = list(lesson.shuffle_buffer(range(100), size, torch.Generator().manual_seed(size)))
        assert sorted(order) == list(range(100))
        assert min(place - index for place, index in enumerate(order)) == -size
    # each sample is as often in each place: chi-square with 16 degrees of freedom, at 1e-6
    counts = torch.zeros(5, 5)
    for seed in range(2000):
        for place, index in enumerate(lesson.shuffle_buffer(range(5), 5, torch.Generator().manual_seed(seed))):
            counts[place, index] += 1
    assert float(((counts - 400) ** 2 / 400).sum()) < 60


@pytest.mark.parametrize("taken", [0, 11, 30])
def test_a_stream_goes_on_from_its_state(lesson, taken):
    def new(seed=2, buffer=3):
        parts = [range(0, 4), range(4, 4), range(4, 20), range(20, 30)]
        return lesson.ResumableStream(parts, iter, seed, buffer)

    whole, first, second = new(), new(), new()
    epochs = [list(whole) for _ in range(3)]
    assert sorted(epochs[0]) == list(range(30))
    assert epochs[0] != epochs[1]
    seen = list(itertools.islice(first, taken))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert seen + list(second) == epochs[0]
    assert [list(second), list(second)] == epochs[1:]
    for other in (new(seed=1), new(buffer=2)):
        with pytest.raises(ValueError, match="saved with"):
            other.load_state_dict(first.state_dict())


@pytest.mark.skipif(sys.platform != "linux", reason="the notebook's classes reach workers by fork only")
def test_a_sampler_resumed_behind_a_prefetching_loader_loses_nothing(lesson):
    sampler, resumed, whole = (lesson.ResumableSampler(60, seed=4) for _ in range(3))
    counted = lesson.CountedSampler(sampler)
    trained = lesson.first_batches(counted, 4)
    resumed.load_state_dict(sampler.state_dict(counted.handed_out - len(trained)))
    assert trained + list(resumed) == list(whole)
