"""Checks of the exercises in 15-02, Advanced Data Pipelines.

Draws are held by chi-square tests. A right answer fails one of them with a probability of about ALPHA (at most twice
that, in simulations of each case) and meets some thirty; the seeds are fixed, so that an answer passes or fails in the
same way each time.
"""

import itertools
import json
import random
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, IterableDataset, Sampler, get_worker_info
from torch.utils.data._utils import worker as worker_module

from shared.checks.exercise import exercise
from shared.checks.trial import Trial
from shared.seeding import make_generator, seed_everything

ALPHA = 1e-6


def _raises(trial: Trial, what: str, function: Callable[[], Any], hint: str, see: int | None = None) -> None:
    """Inside a group: `function` must raise ValueError."""
    try:
        got = f"{type(function()).__name__}, no error"
    except ValueError:
        return
    except Exception as error:
        if type(error) is NotImplementedError and not error.args:
            raise  # an untouched stub
        got = f"{type(error).__name__}: {error}"
    trial.that(what, False, expected=f"ValueError for {what}", got=got, hint=hint, see=see)


def _global_state() -> list[Any]:
    numpy_ = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), (numpy_[1].tolist(), *numpy_[2:])]


def _seed_globally(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _order(size: int, seed: int) -> list[int]:
    return torch.randperm(size, generator=_generator(seed)).tolist()


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(values: Sequence[Any], most: int = 8) -> str:
    return f"{list(values[:most])}{' ...' if len(values) > most else ''} ({len(values)})"


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
            with trial.group("len() is the number of batches", hint="does each bucket have a short batch?", see=3):
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
    with trial.group("the same epoch gives the same batches", hint="when is your generator made?", see=2):
        sampler = answer(*mixed)
        first = _epoch(sampler)
        trial.equal("`iter` called again", _epoch(sampler), first)
        later = _epoch(sampler, 3)
        trial.equal("back in epoch 0", _epoch(sampler, 0), first)
        trial.equal("another object, epoch 3", _epoch(answer(*mixed), 3), later)
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
    """The stand-in: with replacement by bisection, without by taking what was drawn off the line."""

    weights: Any
    num_samples: int
    replacement: bool = True
    generator: torch.Generator | None = None

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        weights = torch.as_tensor(self.weights, dtype=torch.float64)
        darts = torch.rand(self.num_samples, dtype=torch.float64, generator=self.generator)
        if self.replacement:
            ends = weights.cumsum(0)
            yield from torch.searchsorted(ends, darts * ends[-1], right=True).tolist()
            return
        weights = weights.clone()
        for dart in darts:
            ends = weights.cumsum(0)
            index = int(torch.searchsorted(ends, dart * ends[-1], right=True))
            weights[index] = 0
            yield index


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
    with trial.group("an index of weight 0 is never drawn", hint="whose piece is empty?"):
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
            case = f"two million equal weights; those whom {what} favour"
            fits(case, [held, 60_000 - held], [whole, _MANY - whole], ["they", "the others"])
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


class _Shards(IterableDataset):
    """Stand-in."""

    def __init__(self, shards, read, seed=0):
        if not len(shards):
            raise ValueError("there are no shards")
        self.shards, self.read, self.seed, self.epoch = shards, read, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        for place, number in enumerate(_order(len(self.shards), self.seed + self.epoch)):
            if info is not None and place % info.num_workers != info.id:
                continue
            try:
                yield from self.read(self.shards[number])
            except Exception as error:
                raise RuntimeError(f"{self.shards[number]}: {error}") from error


@contextmanager
def _in_worker(number: int, count: int, dataset: Any) -> Iterator[None]:
    """As if this were a loader's worker with this copy of the data set: its number, its global seeds."""
    before = worker_module._worker_info
    seed = 1000 + number
    _seed_globally(seed)
    worker_module._worker_info = SimpleNamespace(id=number, num_workers=count, seed=seed, dataset=dataset)
    try:
        yield
    finally:
        worker_module._worker_info = before


class _TornError(Exception):
    """Not of Python's own."""


class _Read:
    """A sample that can be watched."""


@exercise(
    "15-02.4",
    "Sharded stream",
    points=20,
    demands=12,
    stand_in=lambda: _Shards,
    stand_in_name="a finished sharded stream",
)
def stream(trial: Trial, answer: Any) -> None:
    """`answer(shards, read, seed)` streams shards, dealt out to workers."""
    names = "iachdbgef"
    sizes = {"a": 3, "b": 1, "c": 0, "d": 7, "e": 2, "f": 1, "g": 4, "h": 2, "i": 5}
    opened: list[str] = []

    def read(shard: list[str]) -> Iterator[tuple[str, Any]]:
        opened.append(shard[0])
        return iter(samples(shard[0]))

    def samples(names: Iterable[str]) -> list[tuple[str, Any]]:
        # a sample may be anything: also what counts as false
        values = [0, "", None, [], 0.0, (), False]
        return [(name, values[number]) for name in names for number in range(sizes[name])]

    def shards_of(count: int) -> list[list[str]]:
        return [[name] for name in names[:count]]

    def new(count: int, seed: int = 0, epoch: int | None = None) -> Any:
        opened.clear()
        made = answer(shards_of(count), read, seed)
        if epoch is not None:
            made.set_epoch(epoch)
        return made

    def in_order(count: int, seed: int) -> list[str]:
        return [names[place] for place in _order(count, seed)]

    def shards_in(found: Iterable[Any]) -> list[str]:
        """The shards that samples are of, in the order of their first samples."""
        return list(dict.fromkeys(sample[0] for sample in found))

    def of_workers(shards: int, count: int, seed: int, epoch: int | None = None) -> list[list[Any]]:
        """What each worker yields from its own stream; `opened` lists what all of them opened."""
        found, all_opened = [], []
        for number in range(count):
            mine = new(shards, seed, epoch)
            with _in_worker(number, count, mine):
                found.append(list(mine))
            all_opened += opened
        opened[:] = all_opened
        return found

    made = new(3)
    trial.needs(
        "is an IterableDataset",
        isinstance(made, IterableDataset),
        expected="an IterableDataset",
        got=type(made).__mro__[1].__name__,
        hint="a loader asks other data sets for `len` and `[index]`",
    )
    with trial.group("main process: all samples, shard after shard", hint="list what comes, and which shard it is of"):
        for count in (1, 2, 5, 9):
            got = list(new(count))
            trial.equal(f"{count} shards", len(got), len(samples(names[:count])))
            blocks = [shard for shard, _ in itertools.groupby(got, key=lambda sample: sample[0])]
            trial.equal("shards that come once", len(blocks), len(set(blocks)))
            trial.equal("order within them", got, samples(blocks))
        flat = [0, "", None, False, 1.5]
        trial.equal("samples that count as false", list(answer([flat], iter)), flat)
        equal = list(answer([[1, 2], [1, 2], [3]], iter))
        trial.equal("two shards that are equal", sorted(equal), [1, 1, 2, 2, 3])
    with trial.group("the order of shards follows from seed + epoch", hint="the task says how; what is your seed?"):
        for count, seed, epoch in ((9, 0, 0), (9, 3, 0), (9, 3, 2), (5, 0, 7)):
            made, case = new(count, seed, epoch or None), f"seed {seed}, epoch {epoch}"
            wanted = [shard for shard in in_order(count, seed + epoch) if sizes[shard]]
            trial.equal(case, shards_in(made), wanted)
            trial.equal(f"{case}, again", shards_in(made), wanted)
            made.set_epoch(epoch + 1)
            wanted = [shard for shard in in_order(count, seed + epoch + 1) if sizes[shard]]
            case = f"{case}, and then set_epoch({epoch + 1})"
            trial.equal(case, shards_in(made), wanted, hint="when is the order made, and how long is it kept?")
    with trial.group("the global random state is neither used nor changed", hint="whose numbers does your order take?"):
        for count in (1, 9):
            before = _global_state()
            list(new(count))
            trial.that("state", before == _global_state(), expected="the state as it was", got="another state")
    workers = [(shards, count) for shards in (1, 2, 5, 9) for count in (1, 2, 3, 4, 7, 11)]
    with trial.group("workers: no sample is lost or repeated", hint="do all workers mean the same order?", see=1):
        for shards, count in workers:
            got = Counter(sample[0] for part in of_workers(shards, count, 2) for sample in part)
            wanted = {name: sizes[name] for name in names[:shards] if sizes[name]}
            trial.equal(f"{shards} shards, {count} workers", dict(sorted(got.items())), dict(sorted(wanted.items())))
    with trial.group("workers: each shard is read by one of them", hint="count how often `read` is called", see=1):
        for shards, count in workers:
            of_workers(shards, count, 2)
            trial.equal(f"{shards} shards, {count} workers", sorted(opened), sorted(names[:shards]))
    with trial.group("workers: none has two shards more than another", hint="who has which of them?", see=1):
        for shards, count in workers:
            held = []
            for number in range(count):
                mine = new(shards, 2)
                with _in_worker(number, count, mine):
                    list(mine)
                held.append(len(opened))
            case = f"{shards} shards, {count} workers"
            trial.that(case, max(held) - min(held) < 2, expected="one more at most", got=f"shards of each: {held}")
    with trial.group(
        "workers: the shards are in the epoch's order", hint="in which order does a worker read its part?"
    ):
        for shards, count in workers:
            wanted = shards_in(new(shards, 4, 1))
            for got in map(shards_in, of_workers(shards, count, 4, 1)):
                trial.equal(f"{shards} shards, {count} workers", got, [shard for shard in wanted if shard in got])
    with trial.group("a shard is read when its first sample is asked for", hint="when is `read` called?", see=2):
        for count, where in itertools.product((2, 9), ("main process", "worker")):
            made = new(count, 1)
            with nullcontext() if where == "main process" else _in_worker(0, 1, made):
                list(made)
                order = list(opened)
                opened.clear()
                iterator = iter(made)
                trial.equal(f"{where}: read before the first sample", opened, [])
                for shard, _ in iterator:
                    due = order[: order.index(shard) + 1]
                    trial.equal(f"{where}: read when a sample of shard {shard!r} comes", opened, due)
    with trial.group("samples are passed on one by one", hint="how many samples does the stream hold?", see=2):
        for where in ("main process", "worker"):
            alive: weakref.WeakSet = weakref.WeakSet()

            def watched(shard: Any, alive: weakref.WeakSet = alive) -> Iterator[Any]:
                for _ in range(20):
                    sample = _Read()
                    alive.add(sample)
                    yield sample
                    del sample

            made, most = answer([1, 2], watched), 0
            with nullcontext() if where == "main process" else _in_worker(0, 1, made):
                for _ in made:
                    most = max(most, len(alive))
            trial.that(where, most < 4, expected="two samples alive at most", got=f"{most} of 40")
    errors: list[Exception] = [OSError("gone"), ValueError("bad"), KeyError("k"), _TornError(), RuntimeError("torn")]
    with trial.group("an error names the shard", hint="which of your lines can raise it, and who catches it?", see=2):
        for number, error in enumerate(errors):
            kind = (list, tuple)[number % 2]
            shards = [kind(("of/shard", name)) for name in names]
            bad = "iadef"[number]
            for at_once, where in itertools.product((False, True), ("main process", "worker")):
                reads: list[str] = []

                def broken(
                    shard: Sequence[str], bad: str = bad, error: Exception = error, at_once=at_once, reads=reads
                ) -> Any:
                    reads.append(shard[1])
                    if shard[1] == bad and at_once:
                        raise error
                    return itertools.chain(samples(shard[1]), raising(error) if shard[1] == bad else ())

                def raising(error: Exception) -> Iterator[str]:
                    raise error
                    yield ""

                made = answer(shards, broken, 0)
                got: list[Any] = []
                raised: Exception | None = None
                with nullcontext() if where == "main process" else _in_worker(0, 1, made):
                    try:
                        got.extend(made)
                    except Exception as caught:
                        raised = caught
                name = str(kind(("of/shard", bad)))
                shown = "no error" if raised is None else f"{type(raised).__name__}: {raised}"
                case = f"{where}: {type(error).__name__} in shard {name}, {'from' if at_once else 'after'} `read`"
                fine = isinstance(raised, RuntimeError) and name in str(raised)
                trial.that(case, fine, expected=f"RuntimeError with {name}", got=shown)
                cause = raised and raised.__cause__
                trial.that(f"{case}: cause", raised is None or cause is error, expected=repr(error), got=repr(cause))
                trial.equal(f"{case}: how often it is read", reads.count(bad), 1)
    with trial.group("leaving the stream early is no error", hint="what does your `except` catch?"):
        for stop in (GeneratorExit, KeyboardInterrupt):
            iterator = answer([["x"]], lambda shard: iter("abc"))
            iterator = iter(iterator)
            next(iterator)
            if not hasattr(iterator, "throw"):
                break  # no generator: nothing can be thrown into it
            try:
                iterator.throw(stop())
                raised = None
            except BaseException as caught:
                raised = caught
            trial.that(stop.__name__, type(raised) is stop, expected=f"{stop.__name__}, as it came", got=repr(raised))
    with trial.group("ValueError without shards", hint="look at the shards in `__init__`"):
        _raises(trial, "no shards", lambda: answer([], read), "")


# ---------------------------------------------------------------- 15-02.5


class _Resumable(Sampler[int]):
    """Stand-in."""

    def __init__(self, size, seed=0):
        self.size, self.seed, self.count = size, seed, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        while True:
            epoch, place = divmod(self.count, self.size)
            self.count += 1
            yield _order(self.size, self.seed + epoch)[place]
            if place == self.size - 1:
                return

    def state_dict(self, in_flight=0):
        return {"size": self.size, "seed": self.seed, "count": self.count - in_flight}

    def load_state_dict(self, state):
        self.count = state["count"]


def _take(sampler: Any, count: int) -> list[int]:
    """The first indices of one `iter`, which is then left."""
    return list(itertools.islice(iter(sampler), count))


@exercise(
    "15-02.5",
    "Resumable sampler",
    points=20,
    demands=14,
    stand_in=lambda: _Resumable,
    stand_in_name="a finished resumable sampler",
)
def resume(trial: Trial, answer: Any) -> None:
    """`answer(size, seed)` is a sampler with a state."""

    def run(size: int, seed: int, start: int, count: int) -> list[int]:
        """Indices number `start` to `start + count` since epoch 0, of a sampler that nobody interrupts."""
        sampler, every = answer(size, seed), []
        while len(every) < start + count:
            every += itertools.islice(sampler, size + 1)
            trial.that("a whole epoch", len(every) % size == 0 and len(every) > 0, expected=size, got=len(every))
        return every[start : start + count]

    def follow(sampler: Any, size: int, seed: int, start: int, name: str) -> None:
        """The sampler goes on after `start` indices: the rest of that epoch, then two whole ones."""
        rest = size - start % size
        got = list(itertools.islice(sampler, size + 1))
        trial.equal(f"{name}: the next iter", got, run(size, seed, start, rest))
        for more in (0, 1):
            got = list(itertools.islice(sampler, size + 1))
            trial.equal(f"{name}: epoch {more + 1} after it", got, run(size, seed, start + rest + more * size, size))

    sizes = ((7, 0), (1, 3), (20, 5), (2, 1))
    with trial.group("each epoch has its permutation", hint="compare with torch.randperm for epochs 0, 1 and 2"):
        for size, seed in sizes:
            sampler = answer(size, seed) if seed else answer(size)
            for epoch in range(12):
                got = list(itertools.islice(sampler, size + 1))
                trial.equal(f"size {size}, seed {seed}, epoch {epoch}", got, _order(size, seed + epoch))
                trial.that("ints", all(map(_is_int, got)), expected="ints", got=type(got[0]).__name__)
    with trial.group("the global random state is neither used nor changed", hint="whose numbers does your order take?"):
        before = _global_state()
        list(itertools.islice(answer(20), 21))
        trial.that("state", before == _global_state(), expected="the state as it was", got="another state")
    with trial.group("iter goes on behind the last index handed out", hint="break out of a loop, then begin another"):
        for size, seed, count in ((20, 0, 6), (20, 2, 19), (7, 0, 1), (7, 4, 3)):
            sampler = answer(size, seed)
            trial.equal(f"the first {count}", _take(sampler, count), run(size, seed, 0, count))
            follow(sampler, size, seed, count, f"after {count} of {size}")
        sampler = answer(20)
        parts = [_take(sampler, count) for count in (3, 4, 5)]
        trial.equal("three pieces", list(itertools.chain.from_iterable(parts)), run(20, 0, 0, 12))
    with trial.group(
        "after an epoch's last index iter begins the next one", hint="stop exactly at the end of an epoch"
    ):
        for size, seed in sizes:
            sampler = answer(size, seed)
            for epoch in range(2):
                trial.equal(f"{size} of {size}", _take(sampler, size), run(size, seed, epoch * size, size))
            follow(sampler, size, seed, 2 * size, f"after exactly two epochs of {size}")
    with trial.group("the state survives JSON", hint="which values does your dict hold?"):
        for count in (0, 3, 9):
            sampler = answer(9)
            _take(sampler, count)
            state = sampler.state_dict()
            trial.that("kind", isinstance(state, dict), expected="a dict", got=type(state).__name__)
            trial.that("JSON", _survives(state), expected="the same dict", got=repr(state)[:150])

    with trial.group("the state is a few numbers, however far it is", hint="what grows with size, or with time?"):
        for size, epochs in ((3000, 1), (2, 500)):
            sampler = answer(size)
            for _ in range(epochs):
                list(itertools.islice(sampler, size + 1))
            state = sampler.state_dict()
            others = {key: value for key, value in state.items() if not isinstance(value, int | float)}
            hint = "which values does your dict hold?"
            trial.that("what it holds", not others, expected="numbers only", got=repr(others)[:150], hint=hint)
            length = len(json.dumps(state))
            trial.that(f"size {size}, {epochs} epochs", length < 300, expected="under 300 letters of JSON", got=length)

    def saved(size: int, seed: int, epochs: int, count: int, in_flight: int | None = None) -> tuple[Any, Any]:
        """A sampler that has handed out `epochs` epochs and `count` indices, and its state."""
        sampler = answer(size, seed)
        for _ in range(epochs):
            list(itertools.islice(sampler, size + 1))
        _take(sampler, count)
        return sampler, sampler.state_dict() if in_flight is None else sampler.state_dict(in_flight)

    places = ((20, 0, 0, 0), (20, 0, 0, 6), (20, 3, 2, 11), (7, 1, 1, 6), (7, 0, 3, 0), (1, 0, 2, 0))
    with trial.group("a new sampler goes on from the state", hint="what is saved, and when does your state change?"):
        for size, seed, epochs, count in places:
            sampler, state = saved(size, seed, epochs, count)
            _take(sampler, 3)  # going on changes no state that was saved
            new = answer(size, seed)
            new.load_state_dict(state)
            follow(new, size, seed, epochs * size + count, f"{epochs} epochs and {count} of {size}")
    with trial.group("a used sampler goes on from the state", hint="what of the old place is left after loading?"):
        for size, seed, epochs, count in places:
            _, state = saved(size, seed, epochs, count)
            used, _ = saved(size, seed, 1, min(4, size - 1))
            used.load_state_dict(state)
            follow(used, size, seed, epochs * size + count, f"{epochs} epochs and {count} of {size}")
    ahead_of = ((20, 0, 0, 9, 4), (20, 1, 1, 20, 5), (20, 1, 2, 0, 7), (20, 0, 0, 6, 6), (20, 0, 1, 3, 5))
    with trial.group("in_flight: what is not trained on comes again", hint="the sampler is ahead of training", see=1):
        for size, seed, epochs, count, ahead in (*ahead_of, (6, 2, 3, 2, 9), (3, 0, 4, 1, 13), (1, 0, 3, 0, 2)):
            sampler, state = saved(size, seed, epochs, count, ahead)
            done = epochs * size + count
            trial.equal("asked again", sampler.state_dict(ahead), state)
            new = answer(size, seed)
            new.load_state_dict(state)
            follow(new, size, seed, done - ahead, f"{done} handed out of epochs of {size}, {ahead} in flight")
    with trial.group("saved, loaded, saved and loaded again", hint="what does the state say after a state was loaded?"):
        for size, seed, pieces in ((20, 0, (6, 3, 15, 20, 1)), (7, 2, (5, 5, 5, 5))):
            state, done = None, 0
            for count in pieces:
                sampler = answer(size, seed)
                if state is not None:
                    kept = json.dumps(state)
                    sampler.load_state_dict(state)
                left = count
                while left:
                    got = _take(sampler, min(left, size - done % size))
                    trial.equal(f"after {done}", got, run(size, seed, done, len(got)))
                    left, done = left - len(got), done + len(got)
                if state is not None:
                    trial.equal("the state that was loaded", json.dumps(state), kept)
                state = sampler.state_dict()
            new = answer(size, seed)
            new.load_state_dict(sampler.state_dict(done))
            follow(new, size, seed, 0, f"{done} handed out, all of them in flight")
    with trial.group("len() is size", hint="whatever the state"):
        for size in (1, 9):
            sampler = answer(size)
            trial.equal("new", len(sampler), size)
            _take(sampler, 4)
            trial.equal("after some", len(sampler), size)
    with trial.group("ValueError for a size that can't be used", hint="look at it in `__init__`"):
        for size in (0, -3, 2.5, 2.0):
            _raises(trial, f"size={size}", lambda size=size: answer(size), "")
    with trial.group("ValueError for an impossible in_flight", hint="how many have been handed out, since epoch 0?"):
        for epochs, count in ((0, 0), (0, 4), (1, 2)):
            done = epochs * 9 + count
            for wrong in (-1, done + 1):
                what = f"in_flight={wrong} of {done}"
                _raises(trial, what, lambda e=epochs, c=count, w=wrong: saved(9, 0, e, c, w), "")
            saved(9, 0, epochs, count, done)
    with trial.group("ValueError for the state of another sampler", hint="what tells you whose state it is?"):
        _, state = saved(9, 0, 0, 4)
        for size, seed in ((8, 0), (9, 1)):
            what = f"size 9, seed 0 into size {size}, seed {seed}"
            _raises(trial, what, lambda s=size, d=seed: answer(s, d).load_state_dict(state), "")
            sampler = answer(size, seed)
            _take(sampler, 2)
            before = sampler.state_dict()
            try:
                sampler.load_state_dict(state)
            except ValueError:
                trial.equal("its own state afterwards", sampler.state_dict(), before)


def _survives(state: Any) -> bool:
    try:
        return json.loads(json.dumps(state)) == state
    except (TypeError, ValueError):
        return False
