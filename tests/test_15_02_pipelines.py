"""What 15-02 builds beside its exercises, and the exercises' answers in real loaders, by oracles of their own."""

import gc
import itertools
import json
import math
import multiprocessing
import random
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, default_collate

from course.lesson_code import definitions

CELLS = """
    shuffled in-batches collate mini-loader extra-draws data row-sequences ex-pad pack-collate row-gru padding-waste
    ex-bucket walk ex-weighted chi-by-hand chi-simulated chi-square with-workers one-epoch private-memory file-names
    draws different-draws draws-fixed write-shard write-shards tar-samples write-manifests read-shard ex-stream
    worker-number decode shared-epoch shuffle-buffer traced-peak resumable-stream placed ex-resume first-batches
    counted-sampler jittered whole-batches shifted-rows jittered-batches
"""
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
linux = pytest.mark.skipif(sys.platform != "linux", reason="the notebook's classes reach workers by fork only")


@pytest.fixture(scope="module")
def lesson():
    found = definitions("15-02", *CELLS.split())
    with pytest.MonkeyPatch.context() as patch:
        # workers send samples back as pickles, which name the class where a notebook has it
        patch.setattr(sys.modules["__main__"], "Sample", found["Sample"], raising=False)
        yield SimpleNamespace(**found)


def shards_of(lesson, folder, sizes):
    paths = lesson.write_shards(folder, sizes)
    lesson.write_manifests(paths)
    return paths


def alive() -> int:
    gc.collect()  # an exception that was caught holds frames, and these a loader
    for worker in multiprocessing.active_children():
        worker.join(5)  # it may be about to end
    return len(multiprocessing.active_children())


# ---------------------------------------------------------------- the loader


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("size", "batch_size"), [(1, 1), (1, 9), (8, 4), (9, 4), (31, 7)])
def test_the_mini_loader_equals_the_real_one_for_items_of_several_kinds(lesson, size, batch_size, drop_last):
    items = [(torch.randn(2, 3), k, (k % 3, torch.tensor(k))) for k in range(size)]
    options = {"drop_last": drop_last}
    for seed in (0, 1):
        ours, theirs = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
        real = DataLoader(items, batch_size, shuffle=True, generator=theirs, **options)
        for _ in range(3):
            mine = list(lesson.mini_loader_with_extra_draws(items, batch_size, ours, **options))
            for a, b in zip(mine, real, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
    collated = lesson.collate(items[:1])
    torch.testing.assert_close(collated, default_collate(items[:1]), rtol=0, atol=0)


def test_what_the_lesson_says_of_generators_and_len_holds():
    """The base seed is drawn without workers, too; RandomSampler draws one permutation more; len changes no batch."""
    generator, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    iter(DataLoader(range(3), generator=generator))
    torch.empty((), dtype=torch.int64).random_(generator=other)
    assert torch.equal(generator.get_state(), other.get_state())
    list(RandomSampler(range(3), generator=generator))
    for _ in range(2):
        torch.randperm(3, generator=other)
    assert torch.equal(generator.get_state(), other.get_state())

    class Lies(list):
        def __len__(self):
            return 100

    loader = DataLoader(range(5), batch_size=2, sampler=Lies(range(5)))
    assert (len(loader), len(list(loader))) == (50, 3)


# ---------------------------------------------------------------- sequences


def test_row_sequences_are_the_rows_that_are_not_empty(lesson):
    images = torch.zeros(3, 28, 28, dtype=torch.uint8)
    images[0, 3:9, 5] = 7
    images[1, 4, 0] = images[1, 20, 27] = 255
    sequences = lesson.RowSequences(images, torch.tensor([4, 5, 6]))
    assert (len(sequences), sequences.lengths) == (3, [6, 2, 0])
    rows, label = sequences[1]
    assert (rows.shape, label, float(rows.max())) == ((2, 28), 5, 1.0)


@pytest.mark.parametrize("ends", [[5], [3, 3], [1, 9, 4, 9, 2]])
def test_padded_and_packed_batches_give_equal_logits_and_gradients(lesson, ends):
    torch.manual_seed(1)
    model = lesson.RowGRU(hidden=7).double()
    batch = [(torch.rand(end, 28, dtype=torch.float64), end % 10) for end in ends]
    (x, mask, y), (packed, labels) = lesson.pad_collate(batch), lesson.pack_collate(batch)
    assert torch.equal(y, labels)
    alone = torch.cat([model(sequence[None], torch.ones(1, len(sequence), dtype=torch.bool)) for sequence, _ in batch])
    for logits in (model(x, mask), model(packed)):
        torch.testing.assert_close(logits, alone)
    one, two = (
        torch.autograd.grad(logits.square().sum(), list(model.parameters()))
        for logits in (model(x, mask), model(packed))
    )
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b)


def test_padding_waste_counts_places(lesson):
    assert lesson.padding_waste([1, 1, 1, 9], [[0, 1, 2, 3]]) == pytest.approx(24 / 36)
    assert lesson.padding_waste([1, 1, 1, 9], [[0, 1, 2], [3]]) == 0
    dice = random.Random(0)
    lengths = [dice.randint(1, 30) for _ in range(101)]
    batches = [[dice.randrange(101) for _ in range(dice.randint(1, 9))] for _ in range(20)]
    padded = [torch.nn.utils.rnn.pad_sequence([torch.ones(lengths[i]) for i in b]) for b in batches]
    places, data = sum(p.numel() for p in padded), sum(float(p.sum()) for p in padded)
    assert lesson.padding_waste(lengths, batches) == pytest.approx(1 - data / places)


def test_a_loader_takes_the_bucketing_sampler_and_pads_little(lesson):
    dice = random.Random(0)
    lengths = [int(dice.lognormvariate(3, 0.6)) + 1 for _ in range(500)]
    items = [(torch.ones(length, 2), length) for length in lengths]
    sampler = lesson.BucketBatchSampler(lengths, 16, [10, 20, 30, 40, 60])
    loader = DataLoader(items, batch_sampler=sampler, collate_fn=lesson.pad_collate)
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = list(loader)
        assert len(batches) == len(loader)
        assert sorted(torch.cat([y for _, _, y in batches]).tolist()) == sorted(lengths)
        seen.append([y.tolist() for _, _, y in batches])
        assert 1 - sum(m.sum() for _, m, _ in batches) / sum(m.numel() for _, m, _ in batches) < 0.3
    assert seen[0] != seen[1]


# ---------------------------------------------------------------- weights


def test_the_walk_the_search_and_torch_find_the_same_piece(lesson):
    dice = random.Random(0)
    weights = [dice.choice([0.0, 1.0, 2.5, 0.125]) for _ in range(40)] + [1.0]
    ends = torch.tensor(weights, dtype=torch.float64).cumsum(0)
    for _ in range(500):
        dart = dice.choice([dice.uniform(0, float(ends[-1]) * 0.999), float(dice.choice(ends[:-1].tolist()))])
        assert lesson.draw_by_walking(weights, dart) == int(torch.searchsorted(ends, dart, right=True))
    with pytest.raises(ValueError, match="flew past"):
        lesson.draw_by_walking([1.0], 1.0)


@pytest.mark.parametrize(("freedom", "critical"), [(1, 10.828), (3, 16.266), (9, 27.877), (99, 148.230)])
def test_the_p_value_is_that_of_published_tables(lesson, freedom, critical):
    """Counts whose statistic is the critical value at 0.001; tables of NIST's handbook, 1.3.6.7.4."""
    kinds, count = freedom + 1, 10**6
    shift = math.sqrt(critical * count / kinds / 2)
    counts = torch.full((kinds,), count // kinds)
    counts[0] += round(shift)
    counts[1] -= round(shift)
    draws = torch.repeat_interleave(torch.arange(kinds), counts).tolist()
    assert lesson.p_value(draws, torch.ones(kinds)) == pytest.approx(0.001, rel=0.08)


def test_the_p_values_of_right_draws_are_uniform(lesson):
    shares = torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
    samplers = [lesson.WeightedSampler(shares, 400, generator=torch.Generator().manual_seed(s)) for s in range(400)]
    p = sorted(lesson.p_value(list(sampler), shares) for sampler in samplers)
    largest = max(max(abs(value - i / 400), abs(value - (i + 1) / 400)) for i, value in enumerate(p))
    assert largest < 1.95 / math.sqrt(400), "Kolmogorov and Smirnov at 0.001"


def test_torch_multinomial_has_the_limit_that_the_lesson_names():
    with pytest.raises(RuntimeError, match=r"2\^24"):
        torch.multinomial(torch.ones(2**24 + 1), 1)


def test_a_loader_takes_the_weighted_sampler(lesson):
    sampler = lesson.WeightedSampler([0.0, 1.0, 3.0], 10, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(range(3), batch_size=4, sampler=sampler)
    for _ in range(2):
        batches = [batch.tolist() for batch in loader]
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert set(itertools.chain.from_iterable(batches)) <= {1, 2}
    assert len(loader) == 3


# ---------------------------------------------------------------- workers


def _doubled_in_main(context: str) -> int:
    """Exit code of a process whose target is a function that only this process's __main__ has."""
    code = (
        "import multiprocessing, sys, types\n"
        "main = types.ModuleType('__main__'); sys.modules['__main__'] = main\n"
        "exec('def doubled(x): return 2 * x', main.__dict__)\n"
        f"process = multiprocessing.get_context({context!r}).Process(target=main.doubled, args=(3,))\n"
        "process.start(); process.join(60); sys.exit(process.exitcode)\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120).returncode


@linux
def test_a_function_of_main_reaches_a_forked_process_and_no_other():
    found = {context: _doubled_in_main(context) for context in ("fork", "forkserver", "spawn")}
    assert found == {"fork": 0, "forkserver": 1, "spawn": 1}


@linux
@pytest.mark.parametrize("persistent", [False, True])
def test_global_generators_differ_between_workers_and_epochs_and_an_own_one_does_not(lesson, persistent):
    assert lesson.different_draws() == {"torch": 4, "random": 4, "numpy": 4, "own": 1}
    assert lesson.different_draws(worker_init_fn=lesson.seed_own)["own"] == 4
    assert alive() == 0


@linux
def test_no_process_is_left_behind_by_a_loader_that_is_left_early(lesson):
    iterator = iter(DataLoader(range(50), **lesson.with_workers(2)))
    next(iterator)
    assert alive() == 2
    del iterator
    assert alive() == 0


@linux
@pytest.mark.parametrize("shared", [False, True])
def test_an_epoch_reaches_persistent_workers_only_through_shared_memory(lesson, shared):
    plain = lesson.ShardedStream([[k] for k in range(20)], iter)
    stream = lesson.SharedEpoch(plain) if shared else plain
    loader = DataLoader(stream, batch_size=None, **lesson.with_workers(2, persistent_workers=True))
    epochs = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        epochs.append(list(loader))
    assert len({str(order) for order in epochs}) == (3 if shared else 1)
    del loader
    assert alive() == 0


@linux
def test_a_worker_that_reads_a_list_takes_private_memory_for_it(lesson):
    names = [f"image-{number:07d}.jpeg" for number in range(200_000)]
    grown = []
    for kept in (names, np.array(names, dtype="S")):
        ((before, after),) = lesson.one_epoch(lesson.FileNames(kept), 1)
        grown.append(after - before)
    assert grown[0] > 8 > 4 > grown[1]


# ---------------------------------------------------------------- shards


def test_shards_hold_what_was_written(lesson, tmp_path):
    paths = shards_of(lesson, tmp_path, [3, 0, 5])
    samples = [[lesson.decode(sample) for sample in lesson.read_shard(path)] for path in paths]
    assert [len(part) for part in samples] == [3, 0, 5]
    for number, (image, label) in enumerate(itertools.chain.from_iterable(samples)):
        assert torch.equal(image, lesson.train.images[number, 0] / 255)
        assert label == int(lesson.train.labels[number])


def test_a_shard_that_is_cut_anywhere_is_named(lesson, tmp_path):
    (path,) = shards_of(lesson, tmp_path, [4])
    whole = path.read_bytes()
    used = 4 * 5 * 512  # behind it come only zeros
    for end in [*range(0, used, 256), *range(1, used, 997)]:
        path.write_bytes(whole[:end])
        with pytest.raises(lesson.ShardError, match=r"shard-000\.tar"):
            list(lesson.read_shard(path))


def test_a_shard_with_a_changed_byte_is_named_or_harmless(lesson, tmp_path):
    """Bytes of the padding and of unused fields of a header change nothing that is read."""
    (path,) = shards_of(lesson, tmp_path, [2])
    whole, dice = path.read_bytes(), random.Random(0)
    expected, noticed = list(lesson.read_shard(path)), 0
    for place in dice.sample(range(2 * 5 * 512), 400):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << dice.randrange(8)]) + whole[place + 1 :])
        try:
            found = list(lesson.read_shard(path))
        except lesson.ShardError as error:
            noticed += "shard-000.tar" in str(error)
        else:
            assert [sample[1:] for sample in found] == [sample[1:] for sample in expected], place
    assert noticed > 100


def test_a_missing_shard_is_named(lesson, tmp_path):
    paths = shards_of(lesson, tmp_path, [2, 2])
    paths[1].unlink()
    with pytest.raises(lesson.ShardError, match=r"shard-001\.tar"):
        list(lesson.read_shard(paths[1]))
    with pytest.raises(RuntimeError, match=r"shard-001\.tar"):
        list(lesson.ShardedStream(paths, lesson.read_shard))


@linux
def test_a_damaged_shard_stops_an_epoch_in_a_worker_and_is_named(lesson, tmp_path):
    paths = shards_of(lesson, tmp_path, [5, 5, 5])
    paths[1].write_bytes(paths[1].read_bytes()[: 3 * 5 * 512])
    with pytest.raises(RuntimeError, match=r"shard-001\.tar: 3 samples instead of 5"):
        lesson.one_epoch(lesson.ShardedStream(paths, lesson.read_shard), 2)
    assert alive() == 0


@linux
@pytest.mark.parametrize("sizes", [[1], [4, 4, 4], [0, 7, 1, 30, 2], [0, 0, 3]])
def test_every_sample_comes_once_for_any_number_of_workers(lesson, sizes, tmp_path):
    paths = shards_of(lesson, tmp_path, sizes)
    wanted = [f"{key:06d}" for key in range(sum(sizes))]
    for workers in (0, 1, 2, 3):
        for epoch in (0, 1):
            stream = lesson.ShardedStream(paths, lesson.read_shard, seed=7)
            stream.set_epoch(epoch)
            assert sorted(sample[0] for sample in lesson.one_epoch(stream, workers)) == wanted
    assert alive() == 0


@pytest.mark.parametrize("size", [0, 1, 5, 50, 500])
def test_the_shuffle_buffer_permutes_and_no_sample_is_earlier_than_its_size(lesson, size):
    order = list(lesson.shuffle_buffer(range(100), size, torch.Generator().manual_seed(size)))
    assert sorted(order) == list(range(100))
    assert min(place - index for place, index in enumerate(order)) >= -size
    assert size > 0 or order == list(range(100))


def test_a_full_buffer_shuffles_evenly(lesson):
    """Each sample is as often in each place: chi-square with 16 degrees of freedom for each, at 1e-6 in all."""
    counts = torch.zeros(5, 5)
    for seed in range(2000):
        for place, index in enumerate(lesson.shuffle_buffer(range(5), 5, torch.Generator().manual_seed(seed))):
            counts[place, index] += 1
    assert float(((counts - 400) ** 2 / 400).sum()) < 60


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("buffer", [0, 3, 100])
@pytest.mark.parametrize("taken", [0, 1, 11, 29])
def test_a_stream_goes_on_from_its_state(lesson, buffer, taken):
    def new():
        parts = [range(0, 4), range(4, 4), range(4, 20), range(20, 30)]
        return lesson.ResumableStream(parts, iter, seed=2, buffer=buffer)

    whole = new()
    epochs = [list(whole) for _ in range(3)]
    assert sorted(epochs[0]) == list(range(30))
    assert epochs[0] != epochs[1]
    first, second = new(), new()
    seen = list(itertools.islice(first, taken))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert seen + list(second) == epochs[0]
    assert [list(second), list(second)] == epochs[1:]


def test_a_stream_saved_after_its_last_sample_has_an_empty_rest(lesson):
    def new():
        return lesson.ResumableStream([range(4), range(4, 9)], iter, seed=0, buffer=3)

    whole, first, second = new(), new(), new()
    epochs = [list(whole) for _ in range(2)]
    assert list(itertools.islice(first, 9)) == epochs[0]
    second.load_state_dict(first.state_dict())
    assert [list(second), list(second)] == [[], epochs[1]]


@pytest.mark.parametrize("other", [{"buffer": 2}, {"seed": 1}])
def test_a_stream_takes_no_state_of_another_order(lesson, other):
    settings = {"seed": 0, "buffer": 3}
    state = lesson.ResumableStream([range(4)], iter, **settings).state_dict()
    with pytest.raises(ValueError, match="saved with"):
        lesson.ResumableStream([range(4)], iter, **(settings | other)).load_state_dict(state)


def test_the_buffers_order_follows_from_the_seed_too(lesson):
    """With one shard the buffer alone makes the order."""
    streams = [lesson.ResumableStream([range(40)], iter, seed=seed, buffer=20) for seed in (0, 0, 1, 2)]
    first, again, *others = (list(stream) for stream in streams)
    assert first == again
    assert len({str(order) for order in (first, *others)}) == 3


@linux
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stream_resumed_by_places_gives_the_rest_of_its_epoch(lesson, workers):
    def epoch(places):
        parts = [range(0, 11), range(11, 14), range(14, 30), range(30, 40)]
        stream = lesson.WithPlace(lesson.ResumableStream(parts, iter, seed=2, buffer=5), places)
        return DataLoader(stream, batch_size=None, **lesson.with_workers(workers))

    places, seen = {}, []
    for worker, taken, sample in itertools.islice(iter(epoch({})), 15):
        places[worker] = taken
        seen.append(sample)
    assert sorted(seen + [sample for _, _, sample in epoch(places)]) == list(range(40))
    assert alive() == 0


def test_the_streams_peak_does_not_grow_with_the_number_of_shards(lesson, tmp_path):
    paths = shards_of(lesson, tmp_path, [2] * 300)
    few, many = (
        lesson.traced_peak(lambda p=p: sum(1 for _ in lesson.ShardedStream(p, lesson.read_shard)))
        for p in (paths[:30], paths)
    )
    assert many < few + 0.05


@linux
@pytest.mark.parametrize("done", [1, 4, 9])
def test_a_sampler_resumed_behind_a_prefetching_loader_loses_nothing(lesson, done):
    sampler = lesson.ResumableSampler(60, seed=done)
    counted = lesson.CountedSampler(sampler)
    trained = lesson.first_batches(counted, done)
    resumed = lesson.ResumableSampler(60, seed=done)
    resumed.load_state_dict(sampler.state_dict(counted.handed_out - len(trained)))
    whole = lesson.ResumableSampler(60, seed=done)
    assert trained + list(resumed) == list(whole)
    assert list(resumed) == list(whole)
    assert alive() == 0


@linux
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_batches_of_a_stream_are_made_by_each_worker(lesson, workers):
    """Of five shards, the workers' shares decide how many samples drop_last loses."""
    shards = [range(size) for size in (400, 100, 250, 50, 300)]
    order = torch.randperm(5, generator=torch.Generator().manual_seed(0)).tolist()
    shares = [sum(len(shards[place]) for place in order[start :: workers or 1]) for start in range(workers or 1)]
    stream = lesson.ShardedStream(shards, iter)
    loader = DataLoader(stream, batch_size=64, drop_last=True, **lesson.with_workers(workers))
    assert sum(len(batch) for batch in loader) == sum(share // 64 * 64 for share in shares)


# ---------------------------------------------------------------- speed


def test_whole_batches_are_the_same_batches(lesson):
    batches = list(BatchSampler(torch.randperm(300).tolist(), 64, drop_last=False))
    one = DataLoader(lesson.train, batch_sampler=batches)
    two = DataLoader(lesson.WholeBatches(lesson.train), batch_sampler=batches, collate_fn=lesson.as_it_is)
    for (x, y), (u, v) in zip(one, two, strict=True):
        torch.testing.assert_close(x, u, rtol=0, atol=0)
        assert torch.equal(y, v)


def test_shifted_batches_have_the_rows_of_the_images(lesson):
    images, labels = lesson.train.images[:64], lesson.train.labels[:64]
    one = DataLoader(lesson.Jittered(64), 64)
    two = DataLoader(lesson.JitteredBatches(64), 64, collate_fn=lesson.as_it_is)
    for loader in (one, two):
        ((x, y),) = loader
        assert (x.dtype, x.shape, y.tolist()) == (torch.float32, (64, 1, 28, 28), labels.tolist())
        assert torch.equal(x.sort(dim=3).values, (images / 255).sort(dim=3).values)
        assert not torch.equal(x, images / 255)


def test_the_profiler_names_the_loaders_row_as_the_lesson_says():
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        list(DataLoader(range(3)))
    assert any(
        row.key.startswith("enumerate(DataLoader)#") and row.key.endswith("__next__") for row in recorded.key_averages()
    )


def test_pin_memory_without_an_accelerator_warns_and_does_nothing():
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (batch,) = DataLoader(torch.ones(2, 3), 2, pin_memory=True)
    assert "no accelerator is found" in str(caught[0].message)
    assert not batch.is_pinned()


def test_an_iterable_data_set_takes_no_sampler():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(ValueError, match="unspecified sampler"):
        DataLoader(Stream(), sampler=[0])
