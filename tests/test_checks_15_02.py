"""The checks of 15-02 accept right answers, however written, and reject what a student might really write."""

import itertools
from functools import cached_property

import numpy as np
import pytest
import torch
from answer_variants import variants
from check_protocol import CheckProtocol, idle
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, get_worker_info

from course.exercise_form import student_source
from course.lesson_code import answers, definitions
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
GIVEN = definitions("15-02", "shuffled", "in-batches")
ANSWERS = answers("15-02", given=GIVEN)
variant = variants(
    "15-02",
    dict(zip(("pad", "bucket", "weighted", "stream", "resume"), CHECKS, strict=True)),
    {**GIVEN, "in_this_worker": in_this_worker},
)
RIGHT = {name: [one.stand_in()] for name, one in CHECKS.items()}
WRONG = {}

# ---------------------------------------------------------------- padding with a mask


def pad_ones_too(batch):
    """The mask as padded ones; a list instead of a tuple."""
    sequences = [item[0] for item in batch]
    ones = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
    labels = torch.tensor([item[1] for item in batch], dtype=torch.long)
    return [pad_sequence(sequences, batch_first=True), pad_sequence(ones, batch_first=True), labels]


def pad(old, new):
    return variant("pad", (old, new))


_LENGTHS = "lengths = torch.tensor([len(sequence) for sequence in sequences])"
RIGHT["pad_collate"] += [pad_ones_too]
WRONG["pad_collate"] = {
    "zeros in front": (pad("batch_first=True", 'batch_first=True, padding_side="left"'), "data first, then zeros"),
    "always float32": (pad("batch_first=True)", "batch_first=True).float()"), "the dtype of the sequences"),
    "mask of sorted lengths": (pad(_LENGTHS, f"{_LENGTHS}.sort(descending=True)[0]"), "True where there is data"),
    "mask from the values": (pad("positions < lengths[:, None]", "(padded != 0).any(2)"), "any value may be data"),
    "labels as floats": (pad("torch.tensor(labels)", "torch.tensor(labels).float()"), "labels: an int64"),
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


def bucket(old, new):
    return variant("bucket", (old, new))


_SEED = 'f"{self.seed} {self.epoch}"'
_ORDER = "order = dice.sample(bucket, len(bucket))"
RIGHT["BucketBatchSampler"] += [BucketsByNumPy]
WRONG["BucketBatchSampler"] = {
    "a boundary opens the next bucket": (
        bucket("bisect_left(boundaries, length)", "sum(boundary <= length for boundary in boundaries)"),
        "one bucket",
    ),
    "the same list for all batches": (
        bucket("yield from batches", "one = []\n        for one[:] in batches:\n            yield one"),
        "indices that come twice",
    ),
    "drawn with replacement": (
        bucket(_ORDER, "order = dice.choices(bucket, k=len(bucket))"),
        "indices that come twice",
    ),
    "drop_last does nothing": (bucket("self.batch_size, self.drop_last)", "self.batch_size)"), "drop_last=True"),
    "one division for len": (
        bucket("        return batches\n", "        return sum(map(len, self.buckets)) // self.batch_size\n"),
        "number of batches",
    ),
    "the seed is ignored": (bucket(_SEED, "self.epoch"), "another epoch or seed"),
    "the epoch is ignored": (bucket(_SEED, "self.seed"), "another epoch or seed"),
    "shuffled in place": (bucket(_ORDER, "order = bucket\n            dice.shuffle(order)"), "the same epoch gives"),
    "one generator for each epoch": (
        variant(
            "bucket",
            ("self.epoch = 0\n", "self.set_epoch(0)\n"),
            ("self.epoch = epoch\n", 'self.dice = random.Random(f"{self.seed} {epoch}")\n'),
            (f"dice = random.Random({_SEED})", "dice = self.dice"),
        ),
        "the same epoch gives[\\s\\S]*called again",
    ),
    "the same batches in each epoch": (bucket(_ORDER, "order = bucket"), "shuffled, then cut"),
    "bucket after bucket": (bucket("        dice.shuffle(batches)\n", ""), "shuffled together"),
    "the global generator is seeded": (
        bucket("dice = random.Random(", "dice = random\n        random.seed("),
        "global generators",
    ),
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


def weighted(*changes):
    return variant("weighted", *changes)


_ENDS = "self.weights.cumsum(0)"
_DARTS = "torch.rand(self.num_samples, dtype=torch.float64, generator=self.generator)"
_FOUND = "torch.searchsorted(self.ends, darts * self.ends[-1], right=True)"
_WALKED = "torch.stack([(self.ends <= dart * self.ends[-1]).sum() for dart in darts])"
_TIMES = "(times / self.weights).topk(self.num_samples, largest=False)"
_POWERS = "((-times).exp() ** (1 / self.weights)).topk(self.num_samples)"  # 0 for all small weights
RIGHT["WeightedSampler"] += [DrawnOneByOne]
WRONG["WeightedSampler"] = {
    "numpy's ints": (weighted(("found.tolist()", "found.numpy()")), "num_samples ints"),
    "len of the weights": (weighted(("return self.num_samples", "return len(self.weights)")), r"len\(\)"),
    "roots of the weights": (weighted((_ENDS, "self.weights.sqrt().cumsum(0)")), "with replacement: in proportion"),
    "a little for those of weight 0": (
        weighted((_ENDS, "torch.where(self.weights == 0, 0.02, self.weights).cumsum(0)")),
        "weight 0 is never drawn",
    ),
    "walks for each draw": (
        # with the other weights it would take minutes
        weighted((_FOUND, f"{_WALKED} if len(self.weights) == 200_000 else {_FOUND}")),
        "less than a pass",
    ),
    "sums in single precision": (weighted((_ENDS, "self.weights.float().cumsum(0).double()")), "float64"),
    "darts in single precision": (weighted((_DARTS, f"{_DARTS}.float().double()")), "float64"),
    "replacement is ignored": (weighted(("if self.replacement:", "if True:")), "what do you remember of a draw"),
    "unweighted without replacement": (
        weighted(("times / self.weights", "times / (self.weights > 0)")),
        "that are left",
    ),
    "keys that underflow": (weighted((_TIMES, _POWERS)), "that are left"),
    "draws again": (DrawsAgain, "until the rarest index"),
    "drawn once": (DrawnOnce, "each iter draws anew"),
    "a generator of its own": (
        weighted(("= generator\n", "= generator or torch.Generator().manual_seed(0)\n")),
        "or from the global one",
    ),
    "calls multinomial": (
        weighted((_FOUND, "torch.multinomial(self.weights, self.num_samples, True, generator=self.generator)")),
        "draws are your own",
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


def stream(*changes):
    return variant("stream", *changes)


_READ = "yield from self.read(shard)"
_SLICE = "            order = order[info.id :: info.num_workers]\n"
_NO_SLICE = ("if info is not None:", "if False:")
RIGHT["ShardedStream"] += [NextByHand]
WRONG["ShardedStream"] = {
    "no IterableDataset": (stream(("(IterableDataset)", "")), "is an IterableDataset"),
    "neighbours swapped": (
        stream(
            (_READ, "samples = iter(self.read(shard))\n                for sample in samples:\n" + " " * 20 + _READ),
            (_READ, f"yield from islice(samples, 1)\n{' ' * 20}yield sample"),
        ),
        "in the order of their shard",
    ),
    "the epoch is ignored": (stream(("self.seed + self.epoch", "self.seed")), r"seed \+ epoch[\s\S]*seed 0, epoch 1"),
    "sharded twice": (stream((_READ, "yield from in_this_worker(self.read(shard))")), "no sample is lost"),
    "every worker reads all": (stream(_NO_SLICE), "lost or repeated"),
    "each worker has its own order": (
        stream(("self.seed + self.epoch", "(get_worker_info() or self).seed + self.epoch")),
        "lost or repeated",
    ),
    "every n-th sample": (
        stream(
            _NO_SLICE,
            (
                "    def __iter__(self)",
                "    def __iter__(self):\n        return in_this_worker(self.all())\n\n    def all(self)",
            ),
        ),
        "each shard is read by one",
    ),
    "parts rounded up": (
        stream(
            (
                _SLICE,
                "            n = -(-len(order) // info.num_workers)\n            order = order[n * info.id :][:n]\n",
            )
        ),
        "differ by at most one",
    ),
    "all are read at the first sample": (
        stream(
            ("for place in order:", "for place, samples in [(i, self.read(self.shards[i])) for i in order]:"),
            (_READ, "yield from samples"),
        ),
        "first sample is due",
    ),
    "a shard's samples at once": (stream((_READ, "yield from list(self.read(shard))")), "one by one"),
    "an error without a name": (stream(("shard {shard}", "a shard")), "an error names the shard"),
    "an error without its cause": (stream(("from error", "from None")), "an error names the shard"),
    "errors of one class": (stream(("except Exception", "except OSError")), "an error names the shard"),
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


def resume(*changes):
    return variant("resume", *changes)


_TRAINED = "self.handed_out - in_flight"
_LOAD = 'self.handed_out = state["trained"]'
RIGHT["ResumableSampler"] += [EpochAndPlace]
WRONG["ResumableSampler"] = {
    "another order": (resume(("self.seed + epoch", "epoch")), "its permutation"),
    "starts the epoch again": (  # unless a state was loaded
        resume(
            (_LOAD, f"{_LOAD}\n        self.loaded = True"),
            (
                "        epoch, place",
                "        if not vars(self).pop('loaded', False):\n"
                "            self.handed_out -= self.handed_out % self.size\n"
                "        epoch, place",
            ),
        ),
        "goes on after",
    ),
    "ends only when exhausted": (EndsOnlyWhenExhausted, "begins the next one"),
    "the order in the state": (resume(('"trained": trained', '"trained": trained, "order": [1, 2]')), "survives JSON"),
    "the epoch isn't loaded": (resume((_LOAD, f"{_LOAD} % self.size")), "goes on from the state"),
    "adds to where it is": (resume((_LOAD, _LOAD.replace("=", "+="))), "goes on from the state"),
    "in_flight is ignored": (resume((_TRAINED, "self.handed_out")), "what is not trained on comes again"),
    "in_flight stops at the epoch's beginning": (
        resume((_TRAINED, f"max({_TRAINED}, self.handed_out // self.size * self.size)")),
        "what is not trained on comes again",
    ),
    "any seed": (resume((' or state["seed"] != self.seed', "")), "another size or seed[\\s\\S]*seed 1"),
}

# ---------------------------------------------------------------- all


class TestChecks(CheckProtocol):
    TOPIC = "15-02"
    CHECKS, RIGHT, WRONG = CHECKS, RIGHT, WRONG
    ANSWERS, STUBS = ANSWERS, answers("15-02", edit=student_source, given=GIVEN)
    IDLE = idle("15-02", given=GIVEN)


@pytest.mark.parametrize("seed", range(6))
def test_a_right_sampler_passes_with_other_seeds_too(seed, monkeypatch):
    """One in a million fails by chance: none of these."""
    start = check.make_generator
    monkeypatch.setattr(check, "make_generator", lambda given=0: start(given + 1000 * (seed + 1)))
    result = check.weighted.run(ANSWERS["WeightedSampler"])
    assert result.status == "passed", str(result)
