"""The checks of 15-02 accept right answers, however written, and reject what a student might really write."""

import itertools
from functools import cached_property

import numpy as np
import pytest
import torch
from check_protocol import CheckProtocol
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, get_worker_info

from course.lesson_code import definitions
from shared.checks import topic_15_02 as check


def in_this_worker(things):
    """Every n-th thing."""
    info = get_worker_info()
    return itertools.islice(things, info.id, None, info.num_workers) if info else things


CHECKS = {
    "pad_collate": check.pad_collate,
    "BucketBatchSampler": check.bucket,
    "WeightedSampler": check.weighted,
    "ShardedStream": check.stream,
    "ResumableSampler": check.resume,
}
GIVEN = definitions("15-02", "shuffled", "in-batches") | {"in_this_worker": in_this_worker}
RIGHT = {name: [one.stand_in()] for name, one in CHECKS.items()}
WRONG = {}

# ---------------------------------------------------------------- padding with a mask


def pad_ones_too(batch):
    """The mask as padded ones; a list instead of a tuple."""
    sequences = [item[0] for item in batch]
    ones = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
    labels = torch.tensor([item[1] for item in batch], dtype=torch.long)
    return [pad_sequence(sequences, batch_first=True), pad_sequence(ones, batch_first=True), labels]


LENGTHS = "lengths = torch.tensor([len(sequence) for sequence in sequences])"
RIGHT["pad_collate"] += [pad_ones_too]
WRONG["pad_collate"] = {
    "zeros in front": ("data first, then zeros", "batch_first=True", 'batch_first=True, padding_side="left"'),
    "always float32": ("the dtype of the sequences", "batch_first=True)", "batch_first=True).float()"),
    "mask of sorted lengths": ("True where there is data", LENGTHS, f"{LENGTHS}.sort(descending=True)[0]"),
    "mask from the values": ("any value may be data", "positions < lengths[:, None]", "(padded != 0).any(2)"),
    "labels as floats": ("labels: an int64", "torch.tensor(labels)", "torch.tensor(labels).float()"),
}

# ---------------------------------------------------------------- bucketing


class BucketsByNumPy(check._Buckets):
    """With NumPy, seed and epoch added."""

    def __iter__(self):
        dice = np.random.default_rng(self.seed + self.epoch)
        places = np.searchsorted(self.boundaries, self.lengths, side="left")
        batches = []
        for number in range(len(self.boundaries) + 1):
            bucket = dice.permutation(np.flatnonzero(places == number)).tolist()
            batches += BatchSampler(bucket, self.batch_size, self.drop_last)
        return iter([batches[i] for i in dice.permutation(len(batches))])


SEED = 'f"{self.seed} {self.epoch}"'
ORDER = "order = dice.sample(bucket, len(bucket))"
RIGHT["BucketBatchSampler"] += [BucketsByNumPy]
WRONG["BucketBatchSampler"] = {
    "a boundary opens the next bucket": (
        "one bucket",
        "bisect_left(boundaries, length)",
        "sum(boundary <= length for boundary in boundaries)",
    ),
    "the same list for all batches": (
        "indices that come twice",
        "yield from batches",
        "one = []\nfor one[:] in batches:\n    yield one",
    ),
    "drawn with replacement": ("indices that come twice", ORDER, "order = dice.choices(bucket, k=len(bucket))"),
    "drop_last does nothing": ("drop_last=True", "self.batch_size, self.drop_last)", "self.batch_size)"),
    "one division for len": (
        "number of batches",
        "return batches",
        "return sum(map(len, self.buckets)) // self.batch_size",
    ),
    "the seed is ignored": ("another epoch or seed", SEED, "self.epoch"),
    "the epoch is ignored": ("another epoch or seed", SEED, "self.seed"),
    "shuffled in place": ("the same epoch gives", ORDER, "order = bucket\ndice.shuffle(order)"),
    "one generator for each epoch": (
        "the same epoch gives[\\s\\S]*called again",
        "self.epoch = 0",
        "self.set_epoch(0)",
        "self.epoch = epoch",
        'self.dice = random.Random(f"{self.seed} {epoch}")',
        f"dice = random.Random({SEED})",
        "dice = self.dice",
    ),
    "the same batches in each epoch": ("shuffled, then cut", ORDER, "order = bucket"),
    "bucket after bucket": ("shuffled together", "dice.shuffle(batches)", ""),
    "the global generator is seeded": ("global generators", "dice = random.Random(", "dice = random\nrandom.seed("),
}

# ---------------------------------------------------------------- weights


class DrawnOneByOne(check._Darts):
    """NumPy's bisection; without replacement one draw after the other, by the definition."""

    def __iter__(self):
        left = torch.as_tensor(self.weights).double().numpy().copy()
        darts = torch.rand(self.num_samples, dtype=torch.float64, generator=self.generator).numpy()
        if self.replacement:
            ends = left.cumsum()
            return iter(ends.searchsorted(darts * ends[-1], side="right").tolist())
        found = []
        for dart in darts:
            ends = left.cumsum()
            found.append(int(ends.searchsorted(dart * ends[-1], side="right")))
            left[found[-1]] = 0
        return iter(found)


class DrawsAgain(check._Darts):
    """Draws again what was drawn before: right in law, and endless beside a heavy weight."""

    def __iter__(self):
        if self.replacement:
            return super().__iter__()
        found = {}
        while len(found) < self.num_samples:
            found |= dict.fromkeys(check._Darts(self.weights, 1, generator=self.generator))
        return iter(found)


class DrawnOnce(check._Darts):
    @cached_property
    def drawn(self):
        return list(super().__iter__())

    def __iter__(self):
        return iter(self.drawn) if self.replacement else super().__iter__()


ENDS = "self.weights.cumsum(0)"
DARTS = "torch.rand(self.num_samples, dtype=torch.float64, generator=self.generator)"
FOUND = "torch.searchsorted(self.ends, darts * self.ends[-1], right=True)"
WALKED = "torch.stack([(self.ends <= dart * self.ends[-1]).sum() for dart in darts])"
TIMES = "(times / self.weights).topk(self.num_samples, largest=False)"
POWERS = "((-times).exp() ** (1 / self.weights)).topk(self.num_samples)"  # 0 for all small weights
RIGHT["WeightedSampler"] += [DrawnOneByOne]
WRONG["WeightedSampler"] = {
    "numpy's ints": ("num_samples ints", "found.tolist()", "found.numpy()"),
    "len of the weights": (r"len\(\)", "return self.num_samples", "return len(self.weights)"),
    "roots of the weights": ("with replacement: in proportion", ENDS, "self.weights.sqrt().cumsum(0)"),
    "a little for those of weight 0": (
        "weight 0 is never drawn",
        ENDS,
        "torch.where(self.weights == 0, 0.02, self.weights).cumsum(0)",
    ),
    "walks for each draw": ("less than a pass", FOUND, f"{WALKED} if len(self.weights) == 200_000 else {FOUND}"),
    "sums in single precision": ("float64", ENDS, "self.weights.float().cumsum(0).double()"),
    "darts in single precision": ("float64", DARTS, f"{DARTS}.float().double()"),
    "replacement is ignored": ("what do you remember of a draw", "if self.replacement:", "if True:"),
    "unweighted without replacement": ("that are left", "times / self.weights", "times / (self.weights > 0)"),
    "keys that underflow": ("that are left", TIMES, POWERS),
    "draws again": ("until the rarest index", DrawsAgain),
    "drawn once": ("each iter draws anew", DrawnOnce),
    "a generator of its own": (
        "or from the global one",
        "= generator",
        "= generator or torch.Generator().manual_seed(0)",
    ),
    "calls multinomial": (
        "draws are your own",
        FOUND,
        "torch.multinomial(self.weights, self.num_samples, True, generator=self.generator)",
    ),
}

# ---------------------------------------------------------------- sharded stream


class NextByHand(check._Shards):
    """With `next`, and contiguous parts of the order."""

    def __iter__(self):
        order = torch.tensor(check._order(len(self.shards), self.seed + self.epoch))
        info = get_worker_info()
        end = object()
        for place in (order.tensor_split(info.num_workers)[info.id] if info else order).tolist():
            try:
                samples = iter(self.read(self.shards[place]))
                while (sample := next(samples, end)) is not end:
                    yield sample
            except Exception as error:
                raise RuntimeError(f"{self.shards[place]}: {error}") from error


READ = "yield from self.read(shard)"
SLICE = "order = order[info.id :: info.num_workers]"
NO_SLICE = ("if info is not None:", "if False:")
RIGHT["ShardedStream"] += [NextByHand]
WRONG["ShardedStream"] = {
    "no IterableDataset": ("is an IterableDataset", "(IterableDataset)", ""),
    "neighbours swapped": (
        "in the order of their shard",
        READ,
        f"samples = iter(self.read(shard))\nfor sample in samples:\n    {READ}",
        READ,
        "yield from islice(samples, 1)\nyield sample",
    ),
    "the epoch is ignored": (r"seed \+ epoch[\s\S]*seed 0, epoch 1", "self.seed + self.epoch", "self.seed"),
    "sharded twice": ("no sample is lost", READ, "yield from in_this_worker(self.read(shard))"),
    "every worker reads all": ("lost or repeated", *NO_SLICE),
    "each worker has its own order": (
        "lost or repeated",
        "self.seed + self.epoch",
        "(get_worker_info() or self).seed + self.epoch",
    ),
    "every n-th sample": (
        "each shard is read by one",
        *NO_SLICE,
        "def __iter__(self)",
        "def __iter__(self):\n    return in_this_worker(self.all())\n\ndef all(self)",
    ),
    "parts rounded up": (
        "differ by at most one",
        SLICE,
        "n = -(-len(order) // info.num_workers)\norder = order[n * info.id :][:n]",
    ),
    "all are read at the first sample": (
        "first sample is due",
        "for place in order:",
        "for place, samples in [(i, self.read(self.shards[i])) for i in order]:",
        READ,
        "yield from samples",
    ),
    "a shard's samples at once": ("one by one", READ, "yield from list(self.read(shard))"),
    "an error without a name": ("an error names the shard", "shard {shard}", "a shard"),
    "an error without its cause": ("an error names the shard", "from error", "from None"),
    "errors of one class": ("an error names the shard", "except Exception", "except OSError"),
}

# ---------------------------------------------------------------- resuming


class EpochAndPlace(check._Resumable):
    """Has both in its state."""

    epoch = 0
    place = 0

    def __iter__(self):
        if self.place == self.size:
            self.epoch += 1
            self.place = 0
        for index in check._order(self.size, self.seed + self.epoch)[self.place :]:
            self.place += 1
            yield index

    def state_dict(self, in_flight=0):
        epoch, place = divmod(self.epoch * self.size + self.place - in_flight, self.size)
        return {"size": self.size, "seed": self.seed, "epoch": epoch, "place": place}

    def load_state_dict(self, state):
        super().load_state_dict({**state, "count": 0})
        self.epoch, self.place = state["epoch"], state["place"]


class EndsOnlyWhenExhausted(EpochAndPlace):
    def __iter__(self):
        for index in check._order(self.size, self.seed + self.epoch)[self.place :]:
            self.place += 1
            yield index
        self.epoch += 1
        self.place = 0


TRAINED = "self.handed_out - in_flight"
LOAD = 'self.handed_out = state["trained"]'
RIGHT["ResumableSampler"] += [EpochAndPlace]
WRONG["ResumableSampler"] = {
    "another order": ("its permutation", "self.seed + epoch", "epoch"),
    "starts the epoch again": (
        "goes on after",
        LOAD,
        f"{LOAD}\nself.loaded = True",
        "epoch, place",
        "if not vars(self).pop('loaded', False):\n    self.handed_out -= self.handed_out % self.size\nepoch, place",
    ),
    "ends only when exhausted": ("begins the next one", EndsOnlyWhenExhausted),
    "the order in the state": ("survives JSON", '"trained": trained', '"trained": trained, "order": [1, 2]'),
    "the epoch isn't loaded": ("goes on from the state", LOAD, f"{LOAD} % self.size"),
    "adds to where it is": ("goes on from the state", LOAD, LOAD.replace("=", "+=")),
    "in_flight is ignored": ("what is not trained on comes again", TRAINED, "self.handed_out"),
    "in_flight stops at the epoch's beginning": (
        "what is not trained on comes again",
        TRAINED,
        f"max({TRAINED}, self.handed_out // self.size * self.size)",
    ),
    "any seed": ("another size or seed[\\s\\S]*seed 1", ' or state["seed"] != self.seed', ""),
}

# ---------------------------------------------------------------- all


class TestChecks(CheckProtocol, topic="15-02", given=GIVEN):
    CHECKS, RIGHT, WRONG = CHECKS, RIGHT, WRONG


@pytest.mark.parametrize("seed", range(6))
def test_a_right_sampler_passes_with_other_seeds_too(seed, monkeypatch):
    """One in a million fails by chance: none of these."""
    start = check.make_generator
    monkeypatch.setattr(check, "make_generator", lambda given=0: start(given + 1000 * (seed + 1)))
    result = check.weighted.run(TestChecks.ANSWERS["WeightedSampler"])
    assert result.status == "passed", str(result)
