"""Checks of the exercises in 15-02, Advanced Data Pipelines.

Draws are judged by chi-squared tests, each of which rejects a right answer with a probability of about ALPHA. The seeds
are fixed, so an answer passes or fails in the same way each time.
"""

import itertools
import json
import random
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any, ClassVar

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


# ---------------------------------------------------------------- 15-02.1


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


def _pairs(lengths: list[int], dtype: torch.dtype = torch.float32, value: float | None = None) -> list:
    """Random sequences with labels; the first and the last step of each is `value`, if there is one."""
    pairs = []
    for length in lengths:
        sequence = torch.randn(length, 3, dtype=dtype)
        if value is not None:
            sequence[[0, -1]] = value
        pairs.append((sequence, random.randrange(10)))
    return pairs


@exercise("15-02.1", "Padding with a mask", points=15, demands=5, stand_in=lambda: _pad, stand_in_name="a padding loop")
def pad_collate(trial: Trial, answer: Any) -> None:
    """`answer(batch)` is padded (B, T, D), mask (B, T) and labels (B,)."""
    plain = [_pairs(lengths) for lengths in ([3, 1, 2], [5], [2, 40, 40, 1, 4], [4, 4])]
    odd = [_pairs([5, 3, 2], value=value) for value in (0.0, -1.0, float("nan"))]
    double = [_pairs([2, 2], dtype=torch.float64)]
    table = (  # what, which of the three, for which batches, what to ask yourself, which hint
        ("padded: data first, then zeros up to the longest of the batch", 0, plain, "compare with the example", 1),
        ("padded: the dtype of the sequences", 0, double, "which dtype do your zeros have?", 1),
        ("mask: True where there is data", 1, plain, "how many True should each row have?", 2),
        ("mask: any value may be data", 1, odd, "do you look at lengths or at values?", 2),
        ("labels: an int64 tensor in the order of the batch", 2, plain, "what does cross_entropy expect?", None),
    )
    got = answer(_pairs([3, 1, 2]))
    three = isinstance(got, tuple | list) and len(got) == 3
    hint = "which three does the task name, in which order?"
    trial.needs("three results", three, expected="padded, mask and labels", got=type(got).__name__, hint=hint)
    for item, part, batches, hint, see in table:
        with trial.group(item, hint=hint, see=see):
            for batch in batches:
                lengths = [len(sequence) for sequence, _ in batch]
                trial.equal(f"lengths {lengths}", answer(list(batch))[part], _pad(batch)[part])


# ---------------------------------------------------------------- 15-02.2


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


def _numbers_after(work: Callable[[], Any]) -> list[float]:
    """What the global generators of Python, NumPy and PyTorch draw if they are seeded before `work`."""
    seed_everything(3)
    work()
    return [random.random(), float(np.random.random()), torch.rand(()).item()]


@exercise(
    "15-02.2",
    "Bucketing batch sampler",
    points=20,
    demands=9,
    stand_in=lambda: _Buckets,
    stand_in_name="a bucket sampler",
)
def bucket(trial: Trial, answer: Any) -> None:
    """`answer(lengths, batch_size, boundaries, drop_last, seed)` yields batches of one bucket each."""
    mixed = random.choices([5, 7, 8, 12, 13, 20, 21], k=157), 8, [7, 12, 20]
    apart = [3] * 7 + [20] * 6 + [50] * 5, 3, [10, 30]  # no length is a boundary
    for lengths, size, boundaries in (([5, 20, 12, 7, 13], 2, [12]), mixed, apart):
        for drop_last in (False, True):
            case = f"batch_size={size}, boundaries={boundaries}, drop_last={drop_last}"
            sampler = answer(lengths, size, boundaries, drop_last)
            batches = _epoch(sampler)
            with trial.group("a batch comes from one bucket", hint="which bucket gets a length of 12?", see=1):
                for batch in batches:
                    found = [lengths[index] for index in batch]
                    numbers = {bisect_left(boundaries, length) for length in found}
                    trial.that(case, len(numbers) == 1, expected="lengths of one bucket", got=found)
            with trial.group("no index comes twice", hint="is each batch a new list?"):
                often = Counter(itertools.chain.from_iterable(batches))
                trial.equal(case, [index for index, times in often.items() if times > 1], [])
            with trial.group("len() is the number of batches", hint="do short batches count in this case?", see=3):
                trial.equal(case, len(sampler), len(batches))

    lengths, size, boundaries = apart
    with trial.group("full batches, and at most one short one per bucket", hint="what is left in each bucket?"):
        for drop_last, sizes in (
            (False, {3: [3, 3, 1], 20: [3, 3], 50: [3, 2]}),
            (True, {3: [3, 3], 20: [3, 3], 50: [3]}),
        ):
            batches = _epoch(answer(lengths, size, boundaries, drop_last))
            for length, want in sizes.items():
                found = [len(batch) for batch in batches if lengths[batch[0]] == length]
                case = f"batches of 3 out of {lengths.count(length)} indices, drop_last={drop_last}"
                trial.equal(case, sorted(found, reverse=True), want)
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
        sampler = answer(*mixed)
        first = _epoch(sampler)
        trial.equal("first batch, `iter` called again", str(_epoch(sampler)[0]), str(first[0]))
        later = _epoch(sampler, 3)
        trial.equal("first batch, back in epoch 0", str(_epoch(sampler, 0)[0]), str(first[0]))
        trial.equal("first batch, another object, epoch 3", str(_epoch(answer(*mixed), 3)[0]), str(later[0]))
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
        got = _numbers_after(lambda: _epoch(answer(*mixed)))
        trial.equal("what random, numpy and torch draw next", got, _numbers_after(lambda: None))


# ---------------------------------------------------------------- 15-02.3


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


def _p_value(observed: Sequence[float], shares: Sequence[float]) -> float:
    """How often right draws are off by as much, after Pearson; expected counts are 5 or more."""
    count = sum(observed)
    expected = [count * share / sum(shares) for share in shares]
    chi_square = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    half = [torch.tensor(value / 2, dtype=torch.float64) for value in (len(shares) - 1, chi_square)]
    return float(torch.special.gammaincc(*half))


def _triples(weights: Sequence[float]) -> dict[tuple[int, ...], float]:
    """Probability of each ordered triple of draws without replacement, by its definition."""
    found = {}
    for triple in itertools.permutations([i for i, weight in enumerate(weights) if weight], 3):
        left = sum(weights)
        found[triple] = 1.0
        for index in triple:
            found[triple] *= weights[index] / left
            left -= weights[index]
    return found


class _BudgetSpentError(Exception):
    """More random numbers were drawn than were allowed."""


class _Watch(TorchDispatchMode):
    """Lets a block draw this many random numbers, and notes which operators it calls."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.left = numbers
        self.called: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = func(*args, **(kwargs or {}))
        self.called.add(func.overloadpacket.__name__)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.left -= drawn.numel()
        if self.left < 0:
            raise _BudgetSpentError
        return drawn


_MANY = 2_000_000


def _single_precision() -> dict[str, Tensor]:
    """Which of `_MANY` equal weights are drawn too often if something is in float32."""
    weight = torch.tensor(0.1).double()
    sums = (weight * torch.arange(_MANY + 1)).float()
    darts = (torch.arange(_MANY + 1, dtype=torch.float64) * (2**24 / _MANY)).ceil()
    return {"sums in float32": sums.diff() > weight, "darts in float32": darts.diff() > 8}


def _fastest(function: Callable[[], Any], times: int) -> float:
    """Seconds of the fastest call."""
    found = []
    for _ in range(times):
        start = perf_counter()
        function()
        found.append(perf_counter() - start)
    return min(found)


@exercise("15-02.3", "Weighted sampler", points=25, demands=10, stand_in=lambda: _Darts, stand_in_name="a dart sampler")
def weighted(trial: Trial, answer: Any) -> None:
    """`answer(weights, num_samples, replacement, generator)` draws indices by weights."""
    some = [0.5, 3.0, 1.0, 0.25, 7.0, 2.0]

    def drawn(*arguments: Any, seed: int = 1) -> list[int]:
        return list(answer(*arguments, generator=make_generator(seed)))

    def fits(case: str, observed: Sequence[int], shares: Sequence[float], names: Sequence[Any]) -> None:
        """Counts must be such as one right sampler in a million has."""
        p = _p_value(observed, shares)
        wanted = [sum(observed) * share / sum(shares) for share in shares]
        worst = max(range(len(shares)), key=lambda k: (observed[k] - wanted[k]) ** 2 / wanted[k])
        got = f"{observed[worst]:,} times, p = {p:.1g}"
        trial.that(case, p > ALPHA, expected=f"{names[worst]} about {wanted[worst]:,.0f} times", got=got)

    with trial.group("num_samples ints, and len() says so", hint="what is the type of what you yield?"):
        for count, replacement in ((6, True), (1, True), (17, True), (6, False), (4, False)):
            got = drawn(some, count, replacement)
            kinds = {type(index).__name__ for index in got}
            trial.equal(f"{count} draws, replacement={replacement}", [len(got), kinds], [count, {"int"}])
            trial.equal("len()", len(answer(some, count, replacement)), count)
    with trial.group("with replacement: in proportion to the weights", hint="which piece does a dart hit?", see=1):
        for seed, weights in enumerate((some, [1.0, 1.0], [2, 5, 1, 1], torch.tensor([1e-7, 2e-7, 5e-7]))):
            counts = Counter(drawn(weights, 20_000, seed=seed))
            shares = [float(weight) for weight in weights]
            fits(f"weights {shares}", [counts[i] for i in range(len(shares))], shares, range(len(shares)))
    with trial.group(
        "an index of weight 0 is never drawn", hint="whose piece is empty? without replacement: which key does it get?"
    ):
        for weights in ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 2.0, 0.0], [0, 0, 3]):
            positive = {i for i, weight in enumerate(weights) if weight}
            trial.equal(f"weights {weights}", set(drawn(weights, 5000)), positive)
            trial.equal(f"weights {weights}, without", set(drawn(weights, len(positive), False)), positive)
    with trial.group("a draw costs less than a pass over the weights", hint="what is done for each draw?", see=1):
        weights = torch.rand(200_000, dtype=torch.float64) + 0.5
        few, many = (answer(weights, count, True, make_generator()) for count in (5, 25))
        for _ in range(4):  # a busy machine is given more chances
            passing = _fastest(lambda: weights.cumsum(0), 3)
            short, long = (_fastest(lambda draws=draws: list(draws), 2) for draws in (few, many))
            each = (long - short) / 20
            fine = each < passing / 2 or long < 3 * short  # or both are spent on the one pass
            if fine or each > 20 * passing:
                break
        told = f"far less than the {1e6 * passing:,.0f} µs of a pass"
        trial.that("one more draw", fine, expected=told, got=f"{1e6 * each:,.0f} µs")
    with trial.group("sums and darts are float64", hint="which numbers can your sums and your darts be?", see=1):
        draws = torch.tensor(drawn(torch.full((_MANY,), 0.1), 60_000))
        for what, favoured in _single_precision().items():
            held = int(favoured[draws].sum())
            whole = int(favoured.sum())
            case = f"two million equal weights; {what} draw some too often"
            fits(case, [held, 60_000 - held], [whole, _MANY - whole], ["these", "the other indices"])
    with trial.group("without replacement no index comes twice", hint="what do you remember of a draw?", see=2):
        for weights, count in ((some, 6), (some, 3), ([1.0] * 50, 50), ([1000.0, 1.0, 1.0], 3)):
            trial.equal(f"{count} draws of {len(weights)}", len(set(drawn(weights, count, False))), count)
    hint = "how likely is an index to be the first, and the next?"
    with trial.group("without replacement: in proportion to the weights that are left", hint=hint, see=2):
        weights = [1e9, 1.0, 3.0]
        try:
            with _Watch(10_000):
                drawn(weights, 3, False)
        except _BudgetSpentError:
            hint = "how long do you wait until the rarest index turns up?"
            told = "10,000 random numbers at most"
            trial.that(f"3 draws, weights {weights}", False, expected=told, got="more", hint=hint, see=2)
        for weights in ([1.0, 2.0, 3.0, 4.0], [6.0, 0.0, 1.0, 1.0, 2.0], [1e-3, 2e-3, 1e-3, 6e-3]):
            sampler = answer(weights, 3, False, make_generator(8))
            wanted = _triples(weights)
            counts = Counter(tuple(sampler) for _ in range(3000))
            observed = [counts[triple] for triple in wanted]
            fits(f"the first three, weights {weights}", observed, list(wanted.values()), list(wanted))
    with trial.group("each iter draws anew", hint="where do you draw: in `__init__` or in `__iter__`?"):
        for replacement in (True, False):
            sampler = answer([1.0] * 40, 40, replacement, make_generator(3))
            same = list(sampler) == list(sampler)
            trial.that(f"replacement={replacement}", not same, expected="new draws", got="the same")
    hint = "which calls of yours draw numbers, and from which generator?"
    with trial.group("all randomness comes from `generator`, or from the global one", hint=hint):
        for replacement in (True, False):
            case = f"replacement={replacement}"
            ones = [1.0] * 30, 30, replacement
            trial.equal(f"the same seed, {case}", drawn(*ones, seed=9), drawn(*ones, seed=9))
            trial.equal(f"four seeds, {case}", len({str(drawn(*ones, seed=seed)) for seed in range(4)}), 4)
            both = []
            for seed in (1, 1, 2):
                torch.manual_seed(seed)
                both.append(list(answer(*ones)))
            trial.equal(f"no generator, manual_seed(1) twice, {case}", both[1], both[0])
            trial.that(
                f"no generator, {case}", both[2] != both[0], expected="other draws after manual_seed(2)", got="the same"
            )
    with trial.group("the draws are your own", hint="the task names what not to call"):
        for replacement in (True, False):
            with _Watch(10_000) as watch:
                drawn(some, 4, replacement)
            ready_made = "multinomial" in watch.called
            trial.that(f"replacement={replacement}", not ready_made, expected="no multinomial", got="torch.multinomial")


# ---------------------------------------------------------------- 15-02.4


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


@contextmanager
def _in_worker(number: int, count: int, dataset: Any) -> Iterator[None]:
    """As if this were a loader's worker with this data set: its number, and its own global seed."""
    before = worker_module._worker_info
    seed = 1000 + number
    torch.manual_seed(seed)
    worker_module._worker_info = SimpleNamespace(id=number, num_workers=count, seed=seed, dataset=dataset)
    try:
        yield
    finally:
        worker_module._worker_info = before


@dataclass(frozen=True)
class _Sample:
    """A sample that can be watched."""

    shard: str
    place: int


class _Disk:
    """Shards of different sizes, streamed by the answer; notes what is opened, and which samples are alive."""

    sizes: ClassVar = {
        f"shard-{letter}": int(size) for letter, size in ("i5", "a3", "c0", "h2", "d7", "b1", "g4", "e2", "f1")
    }

    errors: ClassVar = {"shard-i": OSError, "shard-d": EOFError, "shard-f": KeyError}

    def __init__(self, answer: Any, count: int = 9, seed: int = 0, epoch: int = 0, broken: str = "") -> None:
        self.opened: list[str] = []
        self.alive: weakref.WeakSet = weakref.WeakSet()
        self.broken = broken
        self.names = list(self.sizes)[:count]
        self.stream = answer(self.names, self.read, seed)
        if epoch:
            self.stream.set_epoch(epoch)

    def read(self, shard: str) -> Iterator[_Sample]:
        self.opened.append(shard)
        return self.samples(shard)

    def samples(self, shard: str) -> Iterator[_Sample]:
        for place in range(self.sizes[shard]):
            sample = _Sample(shard, place)
            self.alive.add(sample)
            yield sample
            del sample
            if shard == self.broken:
                raise self.errors[shard]("gone")

    def of_worker(self, number: int, count: int) -> list[_Sample]:
        with _in_worker(number, count, self.stream):
            return list(self.stream)


@exercise(
    "15-02.4", "Sharded stream", points=20, demands=8, stand_in=lambda: _Shards, stand_in_name="a finished stream"
)
def stream(trial: Trial, answer: Any) -> None:
    """`answer(shards, read, seed)` streams shards, dealt out to workers."""
    made = answer([[1]], iter)
    hint = "a loader asks other data sets for `len` and `[index]`"
    is_stream = isinstance(made, IterableDataset)
    trial.needs("is an IterableDataset", is_stream, expected="an IterableDataset", got=repr(made), hint=hint)

    with trial.group("main process: all samples, in the order of their shard", hint="what comes, of which shard?"):
        for count in (1, 2, 5, 9):
            disk = _Disk(answer, count)
            for shard in disk.names:
                got = [sample.place for sample in disk.stream if sample.shard == shard]
                trial.equal(f"{shard} of {count}", got, list(range(disk.sizes[shard])))
    with trial.group("the order of shards follows from seed + epoch", hint="when is the order made, and from what?"):
        for count, seed, epoch in ((9, 0, 0), (9, 3, 2), (5, 0, 7)):
            disk = _Disk(answer, count, seed, epoch)
            for number in (epoch, epoch + 1):
                want = [disk.names[place] for place in _order(count, seed + number)]
                disk.opened.clear()
                list(disk.stream)
                trial.equal(f"seed {seed}, epoch {number}", disk.opened, want)
                disk.stream.set_epoch(number + 1)
    for shards, count in itertools.product((1, 2, 5, 9), (1, 2, 3, 4, 11)):
        case = f"{shards} shards, {count} workers"
        parts = [_Disk(answer, shards, 2) for _ in range(count)]
        samples = [disk.of_worker(number, count) for number, disk in enumerate(parts)]
        want = {name: size for name, size in _Disk.sizes.items() if size and name in parts[0].names}
        with trial.group("workers: no sample is lost or repeated", hint="do all workers mean the same order?", see=1):
            found = Counter(sample.shard for part in samples for sample in part)
            trial.equal(case, dict(sorted(found.items())), dict(sorted(want.items())))
        with trial.group("workers: each shard is read by one of them", hint="how often is `read` called?", see=1):
            opened = [shard for disk in parts for shard in disk.opened]
            trial.equal(case, sorted(opened), sorted(parts[0].names))
        with trial.group("workers: their numbers of shards differ by at most one", hint="who has which?", see=1):
            held = [len(disk.opened) for disk in parts]
            trial.that(case, max(held) - min(held) < 2, expected="one more at most", got=f"shards of each: {held}")

    with trial.group("a shard is read when its first sample is due", hint="when is `read` called?", see=2):
        disk = _Disk(answer)
        order = [disk.names[place] for place in _order(9, 0)]
        samples = iter(disk.stream)
        trial.equal("read before the first sample", disk.opened, [])
        for sample in samples:
            due = order[: order.index(sample.shard) + 1]
            trial.equal(f"read when a sample of {sample.shard} comes", disk.opened, due)
            del sample
    with trial.group("samples are passed on one by one", hint="how many samples does the stream hold?", see=2):
        disk = _Disk(answer)
        most = max(len(disk.alive) for _ in disk.stream)
        trial.that("samples that are alive", most < 4, expected="two at most", got=f"{most} of 25")
    with trial.group("an error names the shard, and has a cause", hint="who catches it, and what is raised?", see=2):
        for bad, kind in _Disk.errors.items():
            wanted = f"RuntimeError naming {bad}, with the {kind.__name__} as its cause"
            try:
                list(_Disk(answer, broken=bad).stream)
                trial.that(f"{bad} breaks off", False, expected=wanted, got="no exception")
            except Exception as error:
                right = type(error) is RuntimeError and bad in str(error) and isinstance(error.__cause__, kind)
                got = f"{type(error).__name__}: {error}, cause {error.__cause__!r}"
                trial.that(f"{bad} breaks off", right, expected=wanted, got=got)


# ---------------------------------------------------------------- 15-02.5


class _Resumable(Sampler[int]):
    """The stand-in, and the reference for a random script: counts what was handed out since epoch 0."""

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

    def take(sampler: Any, count: int) -> list[int]:
        """The first indices of one `iter`, which is then left; an endless one is cut."""
        return list(itertools.islice(sampler, min(count, 60)))

    def follow(case: str, sampler: Any, size: int, seed: int, handed: int) -> None:
        """The sampler hands out what follows after so many indices: the rest of that epoch, then two whole ones."""
        whole = answer(size, seed)
        epochs = [take(whole, size + 1) for _ in range(handed // size + 3)]
        want = epochs[handed // size :]
        want[0] = want[0][handed % size :]
        for place, indices in enumerate(want, 1):
            trial.equal(f"{case}: `iter` number {place} after it", take(sampler, size + 1), indices)

    def after(size: int, seed: int, *pieces: int) -> Any:
        """A sampler from which so many indices were taken, one `iter` after the other."""
        sampler = answer(size, seed)
        for count in pieces:
            take(sampler, count)
        return sampler

    with trial.group("each epoch has its permutation", hint="compare with torch.randperm for epochs 0, 1 and 2"):
        for size, seed in ((7, 0), (20, 5), (1, 3)):
            sampler = answer(size, seed)
            trial.equal("len()", len(sampler), size)
            for epoch in range(4):
                got = take(sampler, size + 1)
                trial.equal(f"size {size}, seed {seed}, epoch {epoch}", got, _order(size, seed + epoch))
    with trial.group("iter goes on after the last index handed out", hint="break out of a loop, then begin another"):
        for size, seed, pieces in ((20, 0, (6,)), (20, 2, (21, 19)), (7, 4, (3, 1, 2))):
            handed = sum(min(count, size) for count in pieces)
            follow(f"{pieces} taken of {size}", after(size, seed, *pieces), size, seed, handed)
    with trial.group("after an epoch's last index, iter begins the next one", hint="stop exactly at the end"):
        for size, seed in ((7, 0), (20, 5), (1, 3)):
            follow(f"exactly two epochs of {size}", after(size, seed, size, size), size, seed, 2 * size)
    with trial.group("the state is a dict of numbers that survives JSON", hint="which values does your dict hold?"):
        for pieces in ((), (4,), (10, 3)):
            state = after(9, 0, *pieces).state_dict()
            numbers = isinstance(state, dict) and all(isinstance(value, int | float) for value in state.values())
            small = numbers and len(state) < 9 and json.loads(json.dumps(state)) == state
            trial.that(f"{pieces} taken", small, expected="a few numbers under names", got=repr(state)[:150])
    with trial.group("a sampler goes on from the state, new or used", hint="what of the old place is left?"):
        for size, seed, pieces in ((20, 0, ()), (20, 0, (6,)), (20, 3, (21, 21, 11)), (7, 1, (8, 6))):
            saved = after(size, seed, *pieces)
            state = saved.state_dict()
            take(saved, 2)  # going on changes no state that was saved
            handed = sum(min(count, size) for count in pieces)
            for name, sampler in (("new", answer(size, seed)), ("used", after(size, seed, size + 1, 3))):
                sampler.load_state_dict(dict(state))
                follow(f"{handed} handed out, {name}", sampler, size, seed, handed)
    with trial.group("in_flight: what is not trained on comes again", hint="where is training?", see=1):
        for size, pieces, ahead in ((20, (9,), 4), (20, (20,), 5), (20, (21, 3), 5), (6, (7, 7, 2), 9), (20, (6,), 6)):
            sampler = after(size, 1, *pieces)
            handed = sum(min(count, size) for count in pieces)
            first = sampler.state_dict(ahead)
            case = f"{handed} of epochs of {size}, {ahead} in flight"
            trial.equal(f"{case}: asked again", sampler.state_dict(ahead), first)
            new = answer(size, 1)
            new.load_state_dict(first)
            follow(case, new, size, 1, handed - ahead)
    with trial.group("the state of another size or seed raises ValueError", hint="what tells you whose state it is?"):
        state = after(9, 0, 4).state_dict()
        for size, seed in ((8, 0), (9, 1)):
            sampler = answer(size, seed)
            raises(trial, f"size {size}, seed {seed}", partial(sampler.load_state_dict, state), ValueError)
