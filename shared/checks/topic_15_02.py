"""Checks of the exercises in 15-02, Advanced Data Pipelines.

Draws are judged by chi-squared tests, each of which rejects a right answer with a probability of about ALPHA. The seeds
are fixed, so an answer passes or fails in the same way each time.
"""

import itertools
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from timeit import repeat
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, IterableDataset, Sampler, get_worker_info
from torch.utils.data._utils import worker as worker_module

from shared.checks.exercise import exercise
from shared.checks.trial import Trial
from shared.checks.words import raises
from shared.seeding import make_generator, seed_everything

ALPHA = 1e-6


# ---- 15-02.1


def _pad(batch: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """The stand-in, row by row."""
    longest = max(len(sequence) for sequence, _ in batch)
    first, _ = batch[0]
    padded = first.new_zeros(len(batch), longest, first.shape[1])
    mask = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, (sequence, _) in enumerate(batch):
        padded[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = True
    return padded, mask, torch.tensor([label for _, label in batch])


@exercise("15-02.1", "Padding with a mask", points=15, demands=5, stand_in=lambda: _pad, stand_in_name="a padding loop")
def pad_collate(trial: Trial, answer: Any) -> None:
    """`answer(batch)` is padded (B, T, D), mask (B, T) and labels (B,)."""
    plain = [
        [(torch.randn(length, 3), random.randrange(10)) for length in lengths]
        for lengths in ([3, 1, 2], [5], [2, 40, 40, 1, 4], [4, 4])
    ]
    zeros = [[(torch.zeros(length, 3), 0) for length in (5, 3, 2)]]
    double = [[(torch.randn(2, 3, dtype=torch.float64), 1)]]
    table = (  # what, which of the three, for which batches, what to ask yourself, which hint
        ("padded: data first, then zeros up to the longest of the batch", 0, plain, "compare with the example", 1),
        ("padded: the dtype of the sequences", 0, double, "which dtype do your zeros have?", 1),
        ("mask: True where there is data", 1, plain, "how many True should each row have?", 2),
        ("mask: any value may be data", 1, zeros, "do you look at lengths or at values?", 2),
        ("labels: an int64 tensor in the order of the batch", 2, plain, "what does cross_entropy expect?", None),
    )
    got = answer(plain[0])
    three = isinstance(got, tuple | list) and len(got) == 3
    hint = "which three does the task name, in which order?"
    trial.needs("three results", three, expected="padded, mask and labels", got=type(got).__name__, hint=hint)
    for item, part, batches, hint, see in table:
        with trial.group(item, hint=hint, see=see):
            for batch in batches:
                lengths = [len(sequence) for sequence, _ in batch]
                trial.equal(f"lengths {lengths}", answer(list(batch))[part], _pad(batch)[part])


# ---- 15-02.2


@dataclass(eq=False)
class _Buckets(Sampler[list[int]]):
    """The stand-in, which makes all batches anew whatever it is asked."""

    lengths: list[int]
    batch_size: int
    boundaries: list[int]
    drop_last: bool = False
    seed: int = 0
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[list[int]]:
        dice = random.Random(f"{self.seed} {self.epoch}")
        order = dice.sample(range(len(self.lengths)), len(self.lengths))
        batches = []
        for number in range(len(self.boundaries) + 1):
            bucket = [index for index in order if bisect_left(self.boundaries, self.lengths[index]) == number]
            batches += BatchSampler(bucket, self.batch_size, self.drop_last)
        dice.shuffle(batches)
        yield from batches


def _epoch(sampler: Any, number: int | None = None) -> list[list[int]]:
    """An epoch's batches; all are there before the first is looked at."""
    if number is not None:
        sampler.set_epoch(number)
    return [[int(index) for index in batch] for batch in list(sampler)]


@exercise(
    "15-02.2",
    "Bucketing batch sampler",
    points=20,
    demands=8,
    stand_in=lambda: _Buckets,
    stand_in_name="a bucket sampler",
)
def bucket(trial: Trial, answer: Any) -> None:
    """`answer(lengths, batch_size, boundaries, drop_last, seed)` yields batches of one bucket each."""
    mixed = random.choices([5, 7, 8, 12, 13, 20, 21], k=157), 8, [7, 12, 20]
    for lengths, size, boundaries in (([5, 20, 12, 7, 13], 2, [12]), mixed):
        for drop_last in (False, True):
            case = f"batch_size={size}, boundaries={boundaries}, drop_last={drop_last}"
            sampler = answer(lengths, size, boundaries, drop_last)
            batches = _epoch(sampler)
            with trial.group("a batch comes from one bucket", hint="which bucket gets a length of 12?", see=1):
                for batch in batches:
                    found = [lengths[index] for index in batch]
                    numbers = {bisect_left(boundaries, length) for length in found}
                    trial.that(case, len(numbers) == 1, expected="lengths of one bucket", got=found)
            with trial.group("len() is the number of batches", hint="do short batches count in this case?", see=3):
                trial.equal(case, len(sampler), len(batches))

    lengths = [3] * 7 + [20] * 6 + [50] * 5
    hint = "what is left in each bucket? is each batch a new list?"
    with trial.group("each index once, at most one short batch per bucket", hint=hint):
        for drop_last in (False, True):
            batches = _epoch(answer(lengths, 3, [10, 30], drop_last))
            often = Counter(itertools.chain.from_iterable(batches))
            trial.equal("indices that come twice", [index for index, times in often.items() if times > 1], [])
            found, want = (
                sorted((lengths[batch[0]], len(batch)) for batch in some)
                for some in (batches, _Buckets(lengths, 3, [10, 30], drop_last))
            )
            trial.equal(f"batches of 3 as (length, size), drop_last={drop_last}", found, want)
    with trial.group("another epoch or seed gives other batches", hint="what is your generator seeded with?", see=2):
        sampler = answer(*mixed)
        epochs = {str(_epoch(sampler, number)) for number in range(12)}
        trial.equal("different ones among epochs 0 to 11", len(epochs), 12)
        seeds = {str(_epoch(answer(*mixed, seed=seed))) for seed in range(10)}
        trial.equal("different ones among seeds 0 to 9", len(seeds), 10)
    with trial.group(
        "the same epoch gives the same batches",
        hint="when is your generator made, and what is shuffled in place?",
        see=2,
    ):
        sampler, other = answer(*mixed), answer(*mixed)
        first = str(_epoch(sampler)[0])
        trial.equal("first batch, `iter` called again", str(_epoch(sampler)[0]), first)
        _epoch(other, 3)
        trial.equal("first batch, another object, back in epoch 0", str(_epoch(other, 0)[0]), first)
    with trial.group("a bucket's indices are shuffled, then cut", hint="which indices share a batch, in which epoch?"):
        sampler = answer([5] * 64, 8, [10])
        first, second = ({frozenset(batch) for batch in _epoch(sampler, number)} for number in (0, 1))
        same = len(first & second)
        trial.that("64 equal lengths", same < 4, expected="other batches in epoch 1", got=f"{same} of 8 are the same")
    with trial.group("the batches of all buckets are shuffled together", hint="what do you shuffle at the end?"):
        order = [batch[0] % 4 for batch in _epoch(answer([1, 2, 3, 4] * 40, 4, [1, 2, 3]))]
        changes = sum(one != other for one, other in itertools.pairwise(order))
        trial.that("in turn", changes > 15, expected="a mixed order", got=f"batches of bucket {order[:20]} ...")
    with trial.group("the global generators are left alone", hint="which lines draw from them, or seed them?", see=2):
        drawn = []
        for work in (lambda: None, lambda: _epoch(answer(*mixed))):
            seed_everything(3)
            work()
            drawn.append([random.random(), float(np.random.random()), torch.rand(()).item()])
        trial.equal("what random, numpy and torch draw next", drawn[1], drawn[0])


# ---- 15-02.3


@dataclass(eq=False)
class _Darts(Sampler[int]):
    """The stand-in."""

    weights: Any
    num_samples: int
    replacement: bool = True
    generator: torch.Generator | None = None

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        weights = torch.as_tensor(self.weights, dtype=torch.float64)
        if self.replacement:
            ends = weights.cumsum(0)
            darts = torch.rand(self.num_samples, dtype=torch.float64, generator=self.generator) * ends[-1]
            yield from torch.searchsorted(ends, darts, right=True).tolist()
        else:
            keys = torch.rand(len(weights), dtype=torch.float64, generator=self.generator).log() / weights
            yield from keys.topk(self.num_samples).indices.tolist()


class _Watch(TorchDispatchMode):
    """Counts which operators a block calls, and ends it after 10,000 calls."""

    def __init__(self) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called[func.overloadpacket.__name__] += 1
        if self.called.total() > 10_000:
            raise OverflowError
        return func(*args, **(kwargs or {}))


@exercise("15-02.3", "Weighted sampler", points=25, demands=9, stand_in=lambda: _Darts, stand_in_name="a dart sampler")
def weighted(trial: Trial, answer: Any) -> None:
    """`answer(weights, num_samples, replacement, generator)` draws indices by weights."""
    some = [0.5, 3.0, 1.0, 0.25, 7.0, 2.0]

    def drawn(*arguments: Any, seed: int = 1) -> list[int]:
        return list(answer(*arguments, generator=make_generator(seed)))

    def fits(case: str, draws: list[Any], shares: dict[Any, float]) -> None:
        """Pearson's test: counts must be such as one right sampler in a million has; 5 or more are expected of each."""
        counts = Counter(draws)
        wanted = {name: len(draws) * share / sum(shares.values()) for name, share in shares.items()}
        off = {name: (counts[name] - want) ** 2 / want for name, want in wanted.items()}
        half = torch.tensor([len(off) - 1, sum(off.values())], dtype=torch.float64) / 2
        p = torch.special.gammaincc(*half).item()
        worst = max(off, key=lambda name: off[name])
        got = f"{counts[worst]:,} times, p = {p:.1g}"
        trial.that(case, p > ALPHA, expected=f"{worst} about {wanted[worst]:,.0f} times", got=got)

    with trial.group("num_samples ints, and len() says so", hint="what is the type of what you yield?"):
        for count, replacement in ((17, True), (4, False)):
            got = drawn(some, count, replacement)
            kinds = {type(index).__name__ for index in got}
            trial.equal(f"{count} draws, replacement={replacement}", [len(got), kinds], [count, {"int"}])
            trial.equal("len()", len(answer(some, count, replacement)), count)
    with trial.group("with replacement: in proportion to the weights", hint="which piece does a dart hit?", see=1):
        for weights in (some, torch.tensor([1e-7, 2e-7, 5e-7])):
            fits(f"weights {weights}", drawn(weights, 20_000), {i: float(w) for i, w in enumerate(weights)})
    with trial.group(
        "an index of weight 0 is never drawn", hint="whose piece is empty? without replacement: which key does it get?"
    ):
        for weights in ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 2.0, 0.0], [0, 0, 3]):
            positive = {i for i, weight in enumerate(weights) if weight}
            trial.equal(f"weights {weights}", set(drawn(weights, 5000)), positive)
            trial.equal(f"weights {weights}, without", set(drawn(weights, len(positive), False)), positive)
    with trial.group("a draw costs less than a pass over the weights", hint="what is done for each draw?", see=1):
        weights = torch.rand(200_000, dtype=torch.float64) + 0.5
        works = [partial(list, answer(weights, 1)), partial(list, answer(weights, 31)), lambda: weights.cumsum(0)]
        for _ in range(4):  # a busy machine is given more chances
            one, many, passing = (min(repeat(work, number=1, repeat=3)) for work in works)
            fine = many < 2 * one + 10 * passing
            if fine or many > 100 * passing:
                break
        told = f"30 more cost far less than 30 passes of {1e6 * passing:,.0f} µs"
        trial.that("31 draws", fine, expected=told, got=f"{1e6 * one:,.0f} µs for one, {1e6 * many:,.0f} µs for 31")
    with trial.group("sums and darts are float64", hint="which numbers can your sums and your darts be?", see=1):
        weights = torch.ones(2**21 + 1)
        weights[0] = 2**25 - 2**21  # float32 has only the even numbers from there to the end
        draws = drawn(weights, 20_000)
        kinds = len({index % 4 for index in draws if index})
        case = "weights 31457280 and then two million ones"
        trial.that(case, kinds == 4, expected="all ones may be drawn", got=f"{kinds} of every four are drawn")
    hint = "how likely is an index to be the first, and the next?"
    with trial.group("without replacement: in proportion to the weights that are left", hint=hint, see=2):
        hint = "what do you remember of a draw?"
        trial.equal("6 draws of 6", sorted(drawn(some, 6, False)), list(range(6)), hint=hint, see=2)
        with suppress(OverflowError), _Watch() as watch:
            drawn([1e9, 1.0, 3.0], 3, False)
        calls = watch.called.total()
        hint = "how long do you wait until the rarest index turns up?"
        trial.that("weights [1e9, 1, 3]", calls < 10_000, expected="a few operators", got=calls, hint=hint, see=2)
        weights = [1e-4, 2e-4, 1e-4, 6e-4]
        sampler = answer(weights, 2, False, make_generator(8))
        pairs = itertools.permutations(range(4), 2)
        shares = {(i, j): weights[i] * weights[j] / (sum(weights) - weights[i]) for i, j in pairs}
        fits(f"two draws, weights {weights}", [tuple(sampler) for _ in range(3000)], shares)
    with trial.group("each iter draws anew", hint="where do you draw: in `__init__` or in `__iter__`?"):
        for replacement in (True, False):
            sampler = answer([1.0] * 40, 40, replacement, make_generator(3))
            same = list(sampler) == list(sampler)
            trial.that(f"replacement={replacement}", not same, expected="new draws", got="the same")
    hint = "which calls of yours draw numbers, and from which generator?"
    with trial.group("all randomness comes from `generator`, or from the global one", hint=hint):
        for replacement, given in itertools.product((True, False), (True, False)):
            draws = []
            for seed in (1, 1, 2):
                generator = make_generator(seed) if given else None
                if not given:
                    torch.manual_seed(seed)
                draws.append(list(answer([1.0] * 30, 30, replacement, generator)))
            first, again, other = draws
            case = f"replacement={replacement}, {'a generator' if given else 'no generator'}"
            trial.equal(f"the same seed, {case}", again, first)
            trial.that(f"another seed, {case}", other != first, expected="other draws", got="the same")
    with trial.group("the draws are your own", hint="the task names what not to call"):
        for replacement in (True, False):
            with _Watch() as watch:
                drawn(some, 4, replacement)
            ready_made = "multinomial" in watch.called
            trial.that(f"replacement={replacement}", not ready_made, expected="no multinomial", got="torch.multinomial")


# ---- 15-02.4


@dataclass(eq=False)
class _Shards(IterableDataset):
    """The stand-in."""

    shards: Sequence[Any]
    read: Callable[[Any], Iterable[Any]]
    seed: int = 0
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for place, number in enumerate(_order(len(self.shards), self.seed + self.epoch)):
            if info is not None and place % info.num_workers != info.id:
                continue
            try:
                yield from self.read(self.shards[number])
            except Exception as error:
                raise RuntimeError(f"{self.shards[number]}: {error}") from error


def _order(size: int, seed: int) -> list[int]:
    return torch.randperm(size, generator=make_generator(seed)).tolist()


_SIZES = {"iris": 5, "aster": 3, "clover": 0, "heath": 2, "daisy": 7, "lily": 1, "rose": 4, "fern": 2, "moss": 1}


class _Disk:
    """Shards, streamed by the answer as (shard, place); notes which are opened, and counts the samples read."""

    def __init__(self, answer: Any, seed: int = 0, broken: str = "") -> None:
        self.opened: list[str] = []
        self.count = 0
        self.broken = broken
        self.stream = answer(list(_SIZES), self.read, seed)

    def read(self, shard: str) -> Iterator[tuple[str, int]]:
        self.opened.append(shard)
        return self.samples(shard)

    def samples(self, shard: str) -> Iterator[tuple[str, int]]:
        for place in range(_SIZES[shard]):
            self.count += 1
            yield shard, place
            if shard == self.broken:
                raise KeyError("gone")

    def of_worker(self, number: int, count: int) -> list[tuple[str, int]]:
        """The samples of a loader's worker, which has its own global seed."""
        info = SimpleNamespace(id=number, num_workers=count, seed=1000 + number)
        torch.manual_seed(info.seed)
        with patch.object(worker_module, "_worker_info", info):
            return list(self.stream)


def _in_order(seed: int) -> list[str]:
    return [list(_SIZES)[place] for place in _order(len(_SIZES), seed)]


@exercise(
    "15-02.4", "Sharded stream", points=20, demands=8, stand_in=lambda: _Shards, stand_in_name="a finished stream"
)
def stream(trial: Trial, answer: Any) -> None:
    """`answer(shards, read, seed)` streams shards, dealt out to workers."""
    made = answer([[1]], iter)
    hint = "a loader asks other data sets for `len` and `[index]`"
    trial.needs("is an IterableDataset", isinstance(made, IterableDataset), expected="one", got=made, hint=hint)

    with trial.group("main process: all samples, in the order of their shard", hint="what comes, of which shard?"):
        samples = list(_Disk(answer).stream)
        for shard, size in _SIZES.items():
            got = [sample for sample in samples if shard in sample]
            trial.equal(shard, got, [(shard, place) for place in range(size)])
    with trial.group("the order of shards follows from seed + epoch", hint="when is the order made, and from what?"):
        for seed in (0, 3):
            disk = _Disk(answer, seed)
            for epoch in (0, 1, 7):
                disk.opened.clear()
                disk.stream.set_epoch(epoch)
                list(disk.stream)
                trial.equal(f"seed {seed}, epoch {epoch}", disk.opened, _in_order(seed + epoch))
    for count in (1, 2, 4, 11):
        case = f"9 shards, {count} workers"
        parts = [_Disk(answer, 2) for _ in range(count)]
        samples = [disk.of_worker(number, count) for number, disk in enumerate(parts)]
        with trial.group("workers: no sample is lost or repeated", hint="do all workers mean the same order?", see=1):
            found = Counter(shard for shard, _ in itertools.chain.from_iterable(samples))
            trial.equal(case, found, +Counter(_SIZES))
        with trial.group("workers: each shard is read by one of them", hint="how often is `read` called?", see=1):
            trial.equal(case, sorted(shard for disk in parts for shard in disk.opened), sorted(_SIZES))
        with trial.group("workers: their numbers of shards differ by at most one", hint="who has which?", see=1):
            held = [len(disk.opened) for disk in parts]
            trial.that(case, max(held) - min(held) < 2, expected="one more at most", got=f"shards of each: {held}")

    with trial.group("a shard is read when its first sample is due", hint="when is `read` called?", see=2):
        disk = _Disk(answer)
        order = _in_order(0)
        for shard, _ in disk.stream:
            trial.equal(f"read when a sample of {shard} comes", disk.opened, order[: order.index(shard) + 1])
    with trial.group("samples are passed on one by one", hint="how many samples does the stream hold?", see=2):
        disk = _Disk(answer)
        most = max(disk.count - number for number, _ in enumerate(disk.stream))
        trial.that("samples that are held", most < 4, expected="two at most", got=f"{most} of {disk.count}")
    with trial.group("an error names the shard, and has a cause", hint="who catches it, and what is raised?", see=2):
        error = None
        try:
            list(_Disk(answer, broken="daisy").stream)
        except Exception as caught:
            error = caught
        right = isinstance(error, RuntimeError) and "daisy" in str(error) and isinstance(error.__cause__, KeyError)
        got = f"{error!r}, cause {error.__cause__!r}" if error else "no exception"
        wanted = "RuntimeError naming daisy, with the KeyError as its cause"
        trial.that("daisy breaks off with a KeyError", right, expected=wanted, got=got)


# ---- 15-02.5


class _Resumable(Sampler[int]):
    """The stand-in: counts what was handed out since epoch 0."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self.seed = seed
        self.count = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        epoch, place = divmod(self.count, self.size)
        for index in _order(self.size, self.seed + epoch)[place:]:
            self.count += 1
            yield index

    def state_dict(self, in_flight: int = 0) -> dict[str, int]:
        return {"size": self.size, "seed": self.seed, "count": self.count - in_flight}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if (state["size"], state["seed"]) != (self.size, self.seed):
            raise ValueError("the state is of another sampler")
        self.count = state["count"]


@exercise(
    "15-02.5",
    "Resumable sampler",
    points=20,
    demands=7,
    stand_in=lambda: _Resumable,
    stand_in_name="a finished resumable sampler",
)
def resume(trial: Trial, answer: Any) -> None:
    """`answer(size, seed)` is a sampler with a state."""

    def take(sampler: Any, count: int = 60) -> list[int]:
        """The first indices of one `iter`, which is then left; an endless one is cut."""
        return list(itertools.islice(sampler, count))

    def after(handed: int) -> Any:
        """A sampler of 7 that has handed out so many indices; all epochs but the last have run to their end."""
        sampler = answer(7, 2)
        for _ in range(handed // 7):
            take(sampler)
        take(sampler, handed % 7)
        return sampler

    def follow(case: str, sampler: Any, handed: int) -> None:
        """The sampler hands out what follows: the rest of that epoch, then two whole ones."""
        whole = answer(7, 2)
        first, *more = [take(whole) for _ in range(handed // 7 + 3)][handed // 7 :]
        for place, want in enumerate((first[handed % 7 :], *more), 1):
            trial.equal(f"{case}: `iter` number {place} after it", take(sampler), want)

    with trial.group("each epoch has its permutation", hint="compare with torch.randperm for epochs 0, 1 and 2"):
        for size, seed in ((7, 0), (20, 5), (1, 3)):
            sampler = answer(size, seed)
            trial.equal("len()", len(sampler), size)
            for epoch in range(3):
                trial.equal(f"size {size}, seed {seed}, epoch {epoch}", take(sampler), _order(size, seed + epoch))
    with trial.group("iter goes on after the last index handed out", hint="break out of a loop, then begin another"):
        for handed in (3, 11):
            sampler = after(handed)
            take(sampler, 2)
            follow(f"{handed} and 2 taken of epochs of 7", sampler, handed + 2)
    with trial.group("after an epoch's last index, iter begins the next one", hint="stop exactly at the end"):
        sampler = answer(7, 2)
        take(sampler, 7)
        follow("exactly one epoch of 7", sampler, 7)
    with trial.group("the state is a dict of numbers that survives JSON", hint="which values does your dict hold?"):
        state = after(11).state_dict()
        numbers = isinstance(state, dict) and all(isinstance(value, int | float) for value in state.values())
        trial.that("11 taken", numbers, expected="a few numbers under names", got=repr(state)[:150])
    with trial.group("a sampler goes on from the state, new or used", hint="what of the old place is left?"):
        for handed in (0, 6, 14, 18):
            saved = after(handed)
            state = saved.state_dict()
            take(saved, 2)  # going on changes no state that was saved
            for name, sampler in (("new", answer(7, 2)), ("used", after(10))):
                sampler.load_state_dict(dict(state))
                follow(f"{handed} handed out, {name}", sampler, handed)
    with trial.group("in_flight: what is not trained on comes again", hint="where is training?", see=1):
        for handed, ahead in ((5, 3), (7, 4), (9, 4), (16, 11), (3, 3)):
            sampler = after(handed)
            state = sampler.state_dict(ahead)
            case = f"{handed} of epochs of 7, {ahead} in flight"
            trial.equal(f"{case}: asked again", sampler.state_dict(ahead), state)
            new = answer(7, 2)
            new.load_state_dict(state)
            follow(case, new, handed - ahead)
    with trial.group("the state of another size or seed raises ValueError", hint="what tells you whose state it is?"):
        for size, seed in ((8, 2), (7, 1)):
            load = partial(answer(size, seed).load_state_dict, after(4).state_dict())
            raises(trial, f"size {size}, seed {seed}", load, ValueError)
