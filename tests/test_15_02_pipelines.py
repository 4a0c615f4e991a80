"""What 15-02 builds beside its exercises, by oracles of its own: loaders, shards, shuffling, resuming."""

import itertools
import json
import math
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, default_collate

from course.lesson_code import definitions

CELLS = """
    shuffled in-batches collate mini-loader data row-sequences padding-waste walk chi-by-hand chi-simulated chi-square
    with-workers one-epoch private-memory file-names write-shard write-shards tar-samples write-manifests read-shard
    ex-stream decode shuffle-buffer traced-peak resumable-stream ex-resume counted-sampler first-batches jittered
    whole-batches shifted-rows jittered-batches
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="the notebook's classes reach workers by fork only")


@pytest.fixture(scope="module")
def lesson():
    return SimpleNamespace(**definitions("15-02", *CELLS.split()))


def shards_of(lesson, folder, sizes):
    paths = lesson.write_shards(folder, sizes)
    lesson.write_manifests(paths)
    return paths


def test_items_of_several_kinds_are_collated_as_pytorch_does_it(lesson):
    items = [(torch.randn(2, 3), k, (k % 3, torch.tensor(k))) for k in range(9)]
    for mine, theirs in zip(lesson.mini_loader(items, 4), DataLoader(items, 4), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    torch.testing.assert_close(lesson.collate(items[:1]), default_collate(items[:1]), rtol=0, atol=0)


def test_row_sequences_are_the_rows_that_are_not_empty(lesson):
    images = torch.zeros(3, 28, 28, dtype=torch.uint8)
    images[0, 3:9, 5] = 7
    images[1, 4, 0] = images[1, 20, 27] = 255
    sequences = lesson.RowSequences(images, torch.tensor([4, 5, 6]))
    assert (len(sequences), sequences.lengths) == (3, [6, 2, 0])
    rows, label = sequences[1]
    assert (rows.shape, label, float(rows.max())) == ((2, 28), 5, 1.0)


def test_padding_waste_counts_places(lesson):
    dice = random.Random(0)
    lengths = [dice.randint(1, 30) for _ in range(101)]
    batches = [[dice.randrange(101) for _ in range(dice.randint(1, 9))] for _ in range(20)]
    padded = [torch.nn.utils.rnn.pad_sequence([torch.ones(lengths[i]) for i in b]) for b in batches]
    places, data = sum(p.numel() for p in padded), sum(float(p.sum()) for p in padded)
    assert lesson.padding_waste(lengths, batches) == pytest.approx(1 - data / places)


# ---------------------------------------------------------------- weights


def test_the_walk_finds_the_piece_that_a_search_finds(lesson):
    dice = random.Random(0)
    weights = [dice.choice([0.0, 1.0, 2.5, 0.125]) for _ in range(40)] + [1.0]
    ends = torch.tensor(weights, dtype=torch.float64).cumsum(0)
    for _ in range(500):
        dart = dice.choice([dice.uniform(0, float(ends[-1]) * 0.999), float(dice.choice(ends[:-1].tolist()))])
        assert lesson.draw_by_walking(weights, dart) == int(torch.searchsorted(ends, dart, right=True))
    with pytest.raises(ValueError, match="flew past"):
        lesson.draw_by_walking([1.0], 1.0)


@pytest.mark.parametrize(("freedom", "critical"), [(1, 10.828), (9, 27.877), (99, 148.230)])
def test_the_p_value_is_that_of_published_tables(lesson, freedom, critical):
    """Counts whose statistic is the critical value at 0.001; tables of NIST's handbook, 1.3.6.7.4."""
    kinds, count = freedom + 1, 10**6
    shift = math.sqrt(critical * count / kinds / 2)
    counts = torch.full((kinds,), count // kinds)
    counts[0] += round(shift)
    counts[1] -= round(shift)
    draws = torch.repeat_interleave(torch.arange(kinds), counts).tolist()
    assert lesson.p_value(draws, torch.ones(kinds)) == pytest.approx(0.001, rel=0.08)


# ---------------------------------------------------------------- workers and shards


@linux
def test_a_worker_that_reads_a_list_takes_private_memory_for_it(lesson):
    names = [f"image-{number:07d}.jpeg" for number in range(200_000)]
    grown = []
    for kept in (names, np.array(names, dtype="S")):
        ((before, after),) = lesson.one_epoch(lesson.FileNames(kept), 1)
        grown.append(after - before)
    assert grown[0] > 8 > 4 > grown[1]


def test_shards_hold_what_was_written(lesson, tmp_path):
    paths = shards_of(lesson, tmp_path, [3, 0, 5])
    samples = [[lesson.decode(sample) for sample in lesson.read_shard(path)] for path in paths]
    assert [len(part) for part in samples] == [3, 0, 5]
    for number, (image, label) in enumerate(itertools.chain.from_iterable(samples)):
        assert torch.equal(image, lesson.train.images[number, 0] / 255)
        assert label == int(lesson.train.labels[number])


def test_a_damaged_shard_is_named_unless_nothing_that_is_read_has_changed(lesson, tmp_path):
    """Bytes of the padding and of unused fields of a header change nothing that is read."""
    (path,) = shards_of(lesson, tmp_path, [4])
    whole, dice = path.read_bytes(), random.Random(0)
    expected, noticed = list(lesson.read_shard(path)), 0
    used = 4 * 5 * 512  # behind it come only zeros
    for end in [*range(0, used, 256), *range(1, used, 997)]:
        path.write_bytes(whole[:end])
        with pytest.raises(lesson.ShardError, match=r"shard-000\.tar"):
            list(lesson.read_shard(path))
    for place in dice.sample(range(used), 400):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << dice.randrange(8)]) + whole[place + 1 :])
        try:
            found = list(lesson.read_shard(path))
        except lesson.ShardError as error:
            noticed += "shard-000.tar" in str(error)
        else:
            assert [sample[1:] for sample in found] == [sample[1:] for sample in expected], place
    assert noticed > 100
    path.unlink()
    with pytest.raises(lesson.ShardError, match=r"shard-000\.tar"):
        list(lesson.read_shard(path))


def test_reading_a_longer_shard_takes_no_more_memory(lesson, tmp_path):
    short, long = shards_of(lesson, tmp_path, [60, 600])
    few, many = (lesson.traced_peak(lambda p=p: sum(1 for _ in lesson.read_shard(p))) for p in (short, long))
    assert many < few + 0.05


# ---------------------------------------------------------------- shuffling and resuming


def test_the_shuffle_buffer_permutes_evenly_and_no_sample_is_earlier_than_its_size(lesson):
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


def test_the_buffers_order_follows_from_the_seed_too(lesson):
    """With one shard the buffer alone makes the order."""
    streams = [lesson.ResumableStream([range(40)], iter, seed=seed, buffer=20) for seed in (0, 0, 1, 2)]
    first, again, *others = (list(stream) for stream in streams)
    assert first == again
    assert len({str(order) for order in (first, *others)}) == 3


@linux
def test_a_sampler_resumed_behind_a_prefetching_loader_loses_nothing(lesson):
    sampler, resumed, whole = (lesson.ResumableSampler(60, seed=4) for _ in range(3))
    counted = lesson.CountedSampler(sampler)
    trained = lesson.first_batches(counted, 4)
    resumed.load_state_dict(sampler.state_dict(counted.handed_out - len(trained)))
    assert trained + list(resumed) == list(whole)
    assert list(resumed) == list(whole)


# ---------------------------------------------------------------- speed


def test_whole_batches_are_those_of_single_items(lesson):
    batches = list(BatchSampler(torch.randperm(300).tolist(), 64, drop_last=False))
    one = DataLoader(lesson.train, batch_sampler=batches)
    two = DataLoader(lesson.WholeBatches(lesson.train), batch_sampler=batches, collate_fn=lesson.as_it_is)
    for (x, y), (u, v) in zip(one, two, strict=True):
        torch.testing.assert_close(x, u, rtol=0, atol=0)
        assert torch.equal(y, v)
    images, labels = lesson.train.images[:64], lesson.train.labels[:64]
    shifted = DataLoader(lesson.Jittered(64), 64)
    shifted_at_once = DataLoader(lesson.JitteredBatches(64), 64, collate_fn=lesson.as_it_is)
    for loader in (shifted, shifted_at_once):
        ((x, y),) = loader
        assert (x.dtype, x.shape, y.tolist()) == (torch.float32, (64, 1, 28, 28), labels.tolist())
        assert torch.equal(x.sort(dim=3).values, (images / 255).sort(dim=3).values)
        assert not torch.equal(x, images / 255)
