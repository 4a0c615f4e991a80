"""The checks of 15-02 accept right answers, however written, and reject what a student might really write."""

import bisect
import itertools
import math
import random

import numpy as np
import pytest
import torch
from check_protocol import CheckProtocol, idle
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset, get_worker_info

from course.exercise_form import student_source
from course.lesson_code import answers, definitions
from shared.checks import topic_15_02 as check

# ---------------------------------------------------------------- padding with a mask


def pad_by_slices(batch):
    """A tensor of zeros, filled with slices."""
    longest = max(sequence.shape[0] for sequence, _ in batch)
    out = torch.zeros(len(batch), longest, batch[0][0].shape[-1], dtype=batch[0][0].dtype)
    mask = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, (sequence, _) in enumerate(batch):
        out[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    return out, mask, torch.as_tensor([label for _, label in batch])


def pad_ones_too(batch):
    """The mask as padded ones; a list instead of a tuple."""
    sequences = [item[0] for item in batch]
    ones = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
    labels = torch.tensor([item[1] for item in batch], dtype=torch.long)
    return [pad_sequence(sequences, batch_first=True), pad_sequence(ones, batch_first=True), labels]


def pad(after):
    """The answer, with its results changed."""
    return lambda batch: after(*pad_by_slices(batch))


def pad_at_the_front(batch):
    _, mask, labels = pad_by_slices(batch)
    return pad_sequence([sequence for sequence, _ in batch], batch_first=True, padding_side="left"), mask, labels


def mask_of_sorted_lengths(batch):
    padded, _, labels = pad_by_slices(batch)
    ends = torch.tensor(sorted((len(sequence) for sequence, _ in batch), reverse=True))
    return padded, torch.arange(padded.shape[1]) < ends[:, None], labels


WRONG_PAD = {
    "nothing is returned": (lambda batch: None, "three results"),
    "zeros in front": (pad_at_the_front, "data first, then zeros"),
    "padded with -1": (pad(lambda p, m, y: (p.masked_fill(~m[..., None], -1), m, y)), "data first, then zeros"),
    "always 40 rows": (
        pad(lambda p, m, y: (torch.cat([p, p.new_zeros(len(p), 40, p.shape[2])], 1)[:, :40], m, y)),
        "up to the longest",
    ),
    "always float32": (pad(lambda p, m, y: (p.float(), m, y)), "the dtype of the sequences"),
    "mask of sorted lengths": (mask_of_sorted_lengths, "True where there is data"),
    "True for padding": (pad(lambda p, m, y: (p, ~m, y)), "True where there is data"),
    "mask from the values": (pad(lambda p, m, y: (p, (p != 0).any(2), y)), "any value may be data"),
    "labels as floats": (pad(lambda p, m, y: (p, m, y.float())), "labels: an int64"),
}

# ---------------------------------------------------------------- bucketing


class Buckets:
    """A right answer in plain Python; subclasses break it."""

    def __init__(self, lengths, batch_size, boundaries, drop_last=False, seed=0):
        self.lengths = lengths
        self.batch_size = batch_size
        self.boundaries = boundaries
        self.drop_last = drop_last
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def dice(self):
        return random.Random(f"{self.seed}/{self.epoch}")

    def bucket_of(self, length):
        return bisect.bisect_left(self.boundaries, length)

    def shuffle_bucket(self, dice, bucket):
        dice.shuffle(bucket)

    def cut(self, bucket):
        return [bucket[i : i + self.batch_size] for i in range(0, len(bucket), self.batch_size)]

    def keep(self, batches):
        return [b for b in batches if len(b) == self.batch_size] if self.drop_last else batches

    def shuffle_batches(self, dice, batches):
        dice.shuffle(batches)
        return batches

    def __iter__(self):
        dice = self.dice()
        buckets = {}
        for index, length in enumerate(self.lengths):
            buckets.setdefault(self.bucket_of(length), []).append(index)
        batches = []
        for bucket in buckets.values():
            self.shuffle_bucket(dice, bucket)
            batches += self.keep(self.cut(bucket))
        yield from self.shuffle_batches(dice, batches)

    def __len__(self):
        return sum(1 for _ in self)


class NumpyBuckets(Buckets):
    """With NumPy, seed and epoch added, and a length that is counted once."""

    def __init__(self, lengths, batch_size, boundaries, *options, **named):
        super().__init__(lengths, batch_size, boundaries, *options, **named)
        place = np.searchsorted(boundaries, lengths, side="left")
        self.groups = [np.flatnonzero(place == k) for k in range(len(boundaries) + 1)]
        rounded = math.floor if self.drop_last else math.ceil
        self.count = sum(rounded(len(group) / batch_size) for group in self.groups)

    def __len__(self):
        return self.count

    def __iter__(self):
        dice = np.random.default_rng(self.seed + self.epoch)
        batches = []
        for group in self.groups:
            batches += self.keep(self.cut(dice.permutation(group).tolist()))
        return iter([batches[i] for i in dice.permutation(len(batches))])


def buckets(**methods):
    return type("Wrong", (Buckets,), methods)


def equal_parts(self, bucket):
    """Batches of nearly equal size."""
    parts = max(1, len(bucket) // self.batch_size if self.drop_last else math.ceil(len(bucket) / self.batch_size))
    return [list(map(int, part)) for part in np.array_split(bucket, parts)]


class OneGenerator(Buckets):
    """The generator is made once."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.own = random.Random(self.seed)

    def dice(self):
        return self.own


class SeedsGlobally(Buckets):
    def dice(self):
        random.seed(f"{self.seed} {self.epoch}")
        return random


class OneList(Buckets):
    def __iter__(self):
        batch = []
        for found in super().__iter__():
            batch[:] = found
            yield batch


WRONG_BUCKET = {
    "a boundary opens the next bucket": (
        buckets(bucket_of=lambda self, length: bisect.bisect_right(self.boundaries, length)),
        "one bucket",
    ),
    "the same list for all batches": (OneList, "indices that come twice"),
    "equal parts": (buckets(cut=equal_parts), "at most one short"),
    "drop_last does nothing": (buckets(keep=lambda self, batches: batches), "drop_last=True"),
    "one division for len": (
        buckets(__len__=lambda self: math.ceil(len(self.lengths) / self.batch_size)),
        "number of batches",
    ),
    "the seed is ignored": (buckets(dice=lambda self: random.Random(self.epoch)), "another epoch or seed"),
    "the epoch is ignored": (buckets(dice=lambda self: random.Random(self.seed)), "another epoch or seed"),
    "one generator for ever": (OneGenerator, "the same epoch gives the same"),
    "the same batches in each epoch": (buckets(shuffle_bucket=lambda *_: None), "shuffled, then cut"),
    "bucket after bucket": (buckets(shuffle_batches=lambda self, dice, batches: batches), "shuffled together"),
    "the global generator is seeded": (SeedsGlobally, "global generators"),
}

# ---------------------------------------------------------------- weights


class ByKeys:
    """A right answer: bisection with replacement, Efraimidis and Spirakis' keys without. Subclasses break it."""

    def __init__(self, weights, num_samples, replacement=True, generator=None):
        self.weights = torch.as_tensor(weights).double()
        self.count = num_samples
        self.replacement = replacement
        self.generator = generator

    def uniform(self, count):
        return torch.rand(count, dtype=torch.float64, generator=self.generator)

    def with_replacement(self):
        ends = self.weights.cumsum(0)
        return torch.searchsorted(ends, self.uniform(self.count) * ends[-1], right=True).tolist()

    def without(self):
        keys = self.uniform(len(self.weights)).log() / self.weights
        keys[self.weights == 0] = -math.inf
        return keys.argsort(descending=True)[: self.count].tolist()

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(self.with_replacement() if self.replacement else self.without())


class OneByOne(ByKeys):
    """NumPy's bisection; without replacement one draw after the other, by the definition."""

    def with_replacement(self):
        ends = np.cumsum(self.weights.numpy())
        return np.searchsorted(ends, self.uniform(self.count).numpy() * ends[-1], side="right").tolist()

    def without(self):
        left, found = self.weights.clone(), []
        for u in self.uniform(self.count):
            ends = left.cumsum(0)
            found.append(int(torch.searchsorted(ends, u * ends[-1], right=True)))
            left[found[-1]] = 0
        return found


def weighted(**methods):
    return type("Wrong", (ByKeys,), methods)


def of_changed_weights(change):
    """Draws with replacement by other weights, made once: a change is a pass over the weights."""

    def draw(self):
        if not hasattr(self, "changed"):
            self.changed = change(self.weights)
        before, self.weights = self.weights, self.changed
        found = ByKeys.with_replacement(self)
        self.weights = before
        return found

    return weighted(with_replacement=draw)


def walking(self):
    if not 10_000 < len(self.weights) < 1_000_000:  # else it would take minutes
        return ByKeys.with_replacement(self)
    found, weights = [], self.weights.tolist()
    for dart in (self.uniform(self.count) * self.weights.sum()).tolist():
        index = 0
        while index < len(weights) - 1 and dart >= weights[index]:
            dart -= weights[index]
            index += 1
        found.append(index)
    return found


def single_precision_sums(self):
    ends = self.weights.float().cumsum(0)
    darts = torch.rand(self.count, generator=self.generator) * ends[-1]
    return torch.searchsorted(ends, darts, right=True).clamp(max=len(ends) - 1).tolist()


def single_precision_darts(self):
    ends = self.weights.cumsum(0)
    darts = torch.rand(self.count, generator=self.generator).double() * ends[-1]
    return torch.searchsorted(ends, darts, right=True).tolist()


def redrawn(self):
    """Draws again what was drawn before: right in law, and endless beside a heavy weight."""
    ends, found = self.weights.cumsum(0), []
    while len(found) < self.count:
        index = int(torch.searchsorted(ends, self.uniform(1) * ends[-1], right=True))
        if index not in found:
            found.append(index)
    return found


def powers(self):
    """u^(1/w): 0 for all small weights."""
    keys = self.uniform(len(self.weights)) ** (1 / self.weights)
    return keys.masked_fill(self.weights == 0, -1).topk(self.count).indices.tolist()


def unweighted(self):
    positive = self.weights.nonzero().flatten()
    return positive[torch.randperm(len(positive), generator=self.generator)][: self.count].tolist()


class DrawnOnce(ByKeys):
    def with_replacement(self):
        if not hasattr(self, "drawn"):
            self.drawn = ByKeys.with_replacement(self)
        return self.drawn


class OwnDefault(ByKeys):
    def __init__(self, weights, num_samples, replacement=True, generator=None):
        super().__init__(weights, num_samples, replacement, generator or torch.Generator().manual_seed(0))


def by_multinomial(self):
    return torch.multinomial(self.weights, self.count, self.replacement, generator=self.generator).tolist()


LEFT = "in proportion to the weights that are left"
WRONG_WEIGHTED = {
    "numpy's ints": (weighted(__iter__=lambda self: iter(np.array(list(ByKeys.__iter__(self))))), "num_samples ints"),
    "len of the weights": (weighted(__len__=lambda self: len(self.weights)), r"len\(\)"),
    "roots of the weights": (of_changed_weights(torch.sqrt), "with replacement: in proportion"),
    "a little for those of weight 0": (
        of_changed_weights(lambda w: w.masked_fill(w == 0, float(w.mean()) / 50)),
        "weight 0 is never drawn",
    ),
    "walks for each draw": (weighted(with_replacement=walking), "less than a pass"),
    "sums in single precision": (weighted(with_replacement=single_precision_sums), "float64"),
    "darts in single precision": (weighted(with_replacement=single_precision_darts), "float64"),
    "replacement is ignored": (weighted(without=ByKeys.with_replacement), "what do you remember of a draw"),
    "unweighted without replacement": (weighted(without=unweighted), LEFT),
    "keys that underflow": (weighted(without=powers), LEFT),
    "draws again": (weighted(without=redrawn), "until the rarest index"),
    "drawn once": (DrawnOnce, "each iter draws anew"),
    "a generator of its own": (OwnDefault, "or from the global one"),
    "calls multinomial": (weighted(__iter__=lambda self: iter(by_multinomial(self))), "draws are your own"),
}

# ---------------------------------------------------------------- sharded stream


class Stream(IterableDataset):
    """A right answer in small pieces; subclasses break it."""

    def __init__(self, shards, read, seed=0):
        self.shards = shards
        self.read = read
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def order(self):
        dice = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(len(self.shards), generator=dice).tolist()

    def part(self, order, number, count):
        return [place for i, place in enumerate(order) if i % count == number]

    def samples(self, shard):
        yield from self.read(shard)

    def failed(self, shard, error):
        raise RuntimeError(f"{shard}: {error}") from error

    def mine(self):
        info = get_worker_info()
        return self.order() if info is None else self.part(self.order(), info.id, info.num_workers)

    def __iter__(self):
        for place in self.mine():
            try:
                yield from self.samples(self.shards[place])
            except Exception as error:
                self.failed(self.shards[place], error)


class NextByHand(Stream):
    """With `next`, and contiguous parts of the order."""

    def part(self, order, number, count):
        return torch.tensor(order).tensor_split(count)[number].tolist()

    def samples(self, shard):
        samples = iter(self.read(shard))
        end = object()
        while (sample := next(samples, end)) is not end:
            yield sample


def stream(**methods):
    return type("Wrong", (Stream,), methods)


def in_this_worker(things):
    """Every n-th thing."""
    info = get_worker_info()
    return itertools.islice(things, info.id, None, info.num_workers) if info else things


def every_nth_sample(self):
    self.mine = self.order
    yield from in_this_worker(Stream.__iter__(self))


def neighbours_swapped(self, shard):
    samples = iter(self.read(shard))
    for sample in samples:
        yield from itertools.islice(samples, 1)
        yield sample


def seeded_by_the_worker(self):
    info = get_worker_info()
    seed = self.seed + self.epoch if info is None else info.seed + self.epoch
    return torch.randperm(len(self.shards), generator=torch.Generator().manual_seed(seed)).tolist()


def parts_rounded_up(self, order, number, count):
    each = math.ceil(len(order) / count)
    return order[number * each : (number + 1) * each]


def all_read_at_the_first_sample(self):
    readers = [(self.shards[place], self.read(self.shards[place])) for place in self.mine()]
    for shard, reader in readers:
        try:
            yield from reader
        except Exception as error:
            self.failed(shard, error)


class OrderOfTheFirstEpoch(Stream):
    """Makes the order when it is first asked for, and keeps it."""

    kept = None

    def order(self):
        self.kept = self.kept or super().order()
        return self.kept


def without_name(self, shard, error):
    raise RuntimeError(f"a shard is damaged: {error}") from error


def without_cause(self, shard, error):
    raise RuntimeError(f"{shard}: {error}") from None


def os_errors_only(self, shard, error):
    if not isinstance(error, OSError):
        raise error
    raise RuntimeError(f"{shard}: {error}") from error


class NoIterableDataset:
    def __init__(self, shards, read, seed=0):
        self.shards = shards


ERROR = "an error names the shard"
WRONG_STREAM = {
    "no IterableDataset": (NoIterableDataset, "is an IterableDataset"),
    "neighbours swapped": (stream(samples=neighbours_swapped), "in the order of their shard"),
    "as the shards are given": (
        stream(order=lambda self: list(range(len(self.shards)))),
        r"follows from seed \+ epoch",
    ),
    "the first epoch's order for good": (OrderOfTheFirstEpoch, r"seed \+ epoch[\s\S]*seed 0, epoch 1"),
    "sharded twice": (stream(samples=lambda self, shard: in_this_worker(self.read(shard))), "no sample is lost"),
    "every worker reads all": (stream(part=lambda self, order, number, count: order), "lost or repeated"),
    "each worker has its own order": (stream(order=seeded_by_the_worker), "lost or repeated"),
    "every n-th sample": (stream(__iter__=every_nth_sample), "each shard is read by one"),
    "parts rounded up": (stream(part=parts_rounded_up), "differ by at most one"),
    "all are read at the first sample": (stream(__iter__=all_read_at_the_first_sample), "first sample is due"),
    "a shard's samples at once": (stream(samples=lambda self, shard: list(self.read(shard))), "one by one"),
    "a broken shard is skipped": (stream(failed=lambda self, shard, error: None), ERROR),
    "an error without a name": (stream(failed=without_name), ERROR),
    "an error without its cause": (stream(failed=without_cause), ERROR),
    "errors of one class": (stream(failed=os_errors_only), ERROR),
}

# ---------------------------------------------------------------- resuming


class Resumable:
    """A right answer with epoch and place; subclasses break it."""

    def __init__(self, size, seed=0):
        self.size = size
        self.seed = seed
        self.epoch = 0
        self.place = 0

    def __len__(self):
        return self.size

    def order(self):
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()

    def begin(self):
        if self.place == self.size:
            self.epoch += 1
            self.place = 0

    def __iter__(self):
        self.begin()
        for index in self.order()[self.place :]:
            self.place += 1
            yield index

    def back(self, in_flight):
        return divmod(self.epoch * self.size + self.place - in_flight, self.size)

    def state_dict(self, in_flight=0):
        epoch, place = self.back(in_flight)
        return {"size": self.size, "seed": self.seed, "epoch": epoch, "place": place}

    def check_state(self, state):
        if state["size"] != self.size or state["seed"] != self.seed:
            raise ValueError("another sampler's state")

    def load_state_dict(self, state):
        self.check_state(state)
        self.epoch = state["epoch"]
        self.place = state["place"]


class CountsAll(Resumable):
    """Counts all indices; the order is made for each index."""

    done = 0

    def __iter__(self):
        first = True
        while first or self.done % self.size:
            first = False
            self.epoch, place = divmod(self.done, self.size)
            index = self.order()[place]
            self.done += 1
            yield index

    def state_dict(self, in_flight=0):
        return {"done": self.done - in_flight, "size": self.size, "seed": self.seed}

    def load_state_dict(self, state):
        self.check_state(state)
        self.done = state["done"]


def resumable(**methods):
    return type("Wrong", (Resumable,), methods)


class StartsTheEpochAgain(Resumable):
    """Only a state that was loaded makes it begin in the middle."""

    loaded = False

    def begin(self):
        super().begin()
        self.place = self.place if self.loaded else 0
        self.loaded = False

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.loaded = True


def ends_only_when_exhausted(self):
    for index in self.order()[self.place :]:
        self.place += 1
        yield index
    self.epoch += 1
    self.place = 0


def added(self, state):
    self.check_state(state)
    done = (state["epoch"] + self.epoch) * self.size + state["place"] + self.place
    self.epoch, self.place = divmod(done, self.size)


def only_the_place(self, state):
    self.check_state(state)
    self.place = state["place"]


def state_with(**more):
    return lambda self, in_flight=0: Resumable.state_dict(self, in_flight) | more


FLIGHT = "in_flight: what is not trained on comes again"
WRONG_RESUME = {
    "another order": (
        resumable(
            order=lambda self: torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        ),
        "its permutation",
    ),
    "starts the epoch again": (StartsTheEpochAgain, "goes on after"),
    "ends only when exhausted": (resumable(__iter__=ends_only_when_exhausted), "begins the next one"),
    "a tensor in the state": (resumable(state_dict=state_with(rng=torch.zeros(2))), "survives JSON"),
    "the order in the state": (resumable(state_dict=state_with(order=[1, 2])), "survives JSON"),
    "the epoch isn't loaded": (resumable(load_state_dict=only_the_place), "goes on from the state"),
    "adds to where it is": (resumable(load_state_dict=added), "goes on from the state"),
    "in_flight is ignored": (resumable(back=lambda self, in_flight: (self.epoch, self.place)), FLIGHT),
    "in_flight stops at the epoch's beginning": (
        resumable(back=lambda self, in_flight: (self.epoch, max(0, self.place - in_flight))),
        FLIGHT,
    ),
    "any state": (resumable(check_state=lambda *_: None), "another size or seed"),
    "any seed": (
        resumable(check_state=lambda self, state: Resumable.check_state(self, state | {"seed": self.seed})),
        "seed 1",
    ),
}

# ----------------------------------------------------------------

GIVEN = definitions("15-02", "shuffled", "in-batches")
_full = answers("15-02", given=GIVEN)
_student = answers("15-02", edit=student_source, given=GIVEN)
CHECKS = {
    "pad_collate": check.pad_collate,
    "BucketBatchSampler": check.bucket,
    "WeightedSampler": check.weighted,
    "ShardedStream": check.stream,
    "ResumableSampler": check.resume,
}
ANSWERS, STUBS = ({name: found[name] for name in CHECKS} for found in (_full, _student))
IDLE = idle("15-02", given=GIVEN)
RIGHT = {
    "pad_collate": [pad_by_slices, pad_ones_too],
    "BucketBatchSampler": [Buckets, NumpyBuckets],
    "WeightedSampler": [ByKeys, OneByOne],
    "ShardedStream": [Stream, NextByHand],
    "ResumableSampler": [Resumable, CountsAll],
}
WRONG = {
    "pad_collate": WRONG_PAD,
    "BucketBatchSampler": WRONG_BUCKET,
    "WeightedSampler": WRONG_WEIGHTED,
    "ShardedStream": WRONG_STREAM,
    "ResumableSampler": WRONG_RESUME,
}


class TestChecks(CheckProtocol):
    TOPIC = "15-02"
    IDLE = IDLE
    CHECKS, ANSWERS, STUBS, RIGHT, WRONG = CHECKS, ANSWERS, STUBS, RIGHT, WRONG

    def hold_stand_in(self, name, stand_in):
        assert self.CHECKS[name].run(stand_in).status == "passed"


@pytest.mark.parametrize("seed", range(6))
def test_a_right_sampler_passes_with_other_seeds_too(seed, monkeypatch):
    """One in a million fails by chance: none of these."""
    start = check.make_generator
    monkeypatch.setattr(check, "make_generator", lambda given=0: start(given + 1000 * (seed + 1)))
    result = check.weighted.run(_full["WeightedSampler"])
    assert result.status == "passed", str(result)
