"""Checks of the exercises in 15-02, Advanced Data Pipelines.

Draws are held by chi-square tests. A right answer fails one with a probability of ALPHA; the seeds are fixed, so that
an answer passes or fails in the same way each time.
"""

import copy
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler, WeightedRandomSampler, get_worker_info
from torch.utils.data._utils import worker as worker_module

from shared.checks.feedback import Trial, exercise

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
    """Oracle and stand-in: row by row."""
    if not batch:
        raise ValueError("the batch is empty")
    first = batch[0][0]
    padded = first.new_zeros(len(batch), max(len(sequence) for sequence, _ in batch), first.shape[1])
    mask = torch.zeros(padded.shape[:2], dtype=torch.bool)
    for row, (sequence, _) in enumerate(batch):
        for step, values in enumerate(sequence):
            padded[row, step], mask[row, step] = values, True
    return padded, mask, torch.tensor([label for _, label in batch], dtype=torch.int64)


def _sequences(lengths: Sequence[int], features: int = 3, dtype: torch.dtype = torch.float32) -> list:
    return [((torch.rand(n, features) + 0.5).to(dtype), int(torch.randint(10, ()))) for n in lengths]


@exercise(
    "15-02.1", "Padding with a mask", points=15, stand_in=lambda: _pad, stand_in_name="a padding loop, row by row"
)
def pad_collate(trial: Trial, answer: Any) -> None:
    """`answer(batch)` is padded (B, T, D), mask (B, T) and labels (B,)."""
    plain = [_sequences(n, d) for n, d in (([3, 1, 2], 3), ([5], 2), ([2, 7, 7, 1, 4], 1), ([4, 4], 28))]
    transposed = [(torch.rand(3, n).T, n) for n in (4, 2, 6)]
    empty = [_sequences(n) for n in ([2, 0], [3, 0, 0], [1, 0])]
    zero = [_sequences([4, 3, 2]), _sequences([5, 2])]
    for batch in zero:
        for sequence, _ in batch:
            sequence[-1] = 0
        batch[0][0][0] = 0

    def parts(batch: list) -> Any:
        got = answer(batch)
        whole = isinstance(got, tuple | list) and len(got) == 3 and all(isinstance(part, Tensor) for part in got)
        trial.needs(
            "returns three tensors",
            whole,
            expected="three tensors",
            got=f"{type(got).__name__} of {[type(part).__name__ for part in got] if isinstance(got, tuple) else got}",
            hint="padded, mask, labels: in this order",
        )
        return got

    def hold(entry: int, batches: list) -> None:
        for batch in batches:
            got = parts(batch)[entry]
            trial.equal(f"lengths {[len(sequence) for sequence, _ in batch]}", got, _pad(batch)[entry])

    for batch in [*plain, *empty]:
        parts(batch)
    with trial.group("padded: data first, then zeros, as long as the longest of the batch", see=1):
        hold(0, [*plain, transposed])
    with trial.group("padded: the dtype of the sequences", hint="which dtype do your zeros have?"):
        hold(0, [_sequences([3, 3], dtype=dtype) for dtype in (torch.float64, torch.bfloat16)])
    with trial.group("the mask is True where there is data", see=2):
        hold(1, [*plain, transposed])
    with trial.group("the mask is True where the data is zero, too", see=2):
        hold(1, zero)
    with trial.group("sequences of no rows", hint="what do your lines do if L is 0?"):
        hold(0, empty)
        hold(1, empty)
    with trial.group("the labels", hint="which dtype is asked for, and which order?"):
        hold(2, plain)
    with trial.group("an empty batch raises ValueError", hint="look at the batch before anything else"):
        _raises(trial, "an empty batch", lambda: answer([]), "")


# ---------------------------------------------------------------- 15-02.2


class _Buckets(Sampler[list[int]]):
    """Stand-in."""

    def __init__(self, lengths, batch_size, boundaries, drop_last=False, seed=0):
        self.lengths, self.batch_size, self.boundaries = lengths, batch_size, boundaries
        self.drop_last, self.seed, self.epoch = drop_last, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(list(iter(self)))

    def __iter__(self):
        dice = random.Random(f"{self.seed} {self.epoch}")
        buckets: dict[int, list[int]] = {}
        for index, length in enumerate(self.lengths):
            buckets.setdefault(sum(length > boundary for boundary in self.boundaries), []).append(index)
        batches = []
        for bucket in buckets.values():
            dice.shuffle(bucket)
            batches += [bucket[start : start + self.batch_size] for start in range(0, len(bucket), self.batch_size)]
        dice.shuffle(batches)
        return iter([batch for batch in batches if len(batch) == self.batch_size or not self.drop_last])


def _bucket_of(length: int, boundaries: Sequence[int]) -> int:
    return sum(length > boundary for boundary in boundaries)


@exercise(
    "15-02.2",
    "Bucketing batch sampler",
    points=20,
    stand_in=lambda: _Buckets,
    stand_in_name="a finished bucketing sampler",
)
def bucket(trial: Trial, answer: Any) -> None:
    """`answer(lengths, batch_size, boundaries, drop_last, seed)` gives batches of one bucket each."""
    dice = random.Random(2)
    cases = [  # lengths, batch size, boundaries
        ([dice.choice([5, 7, 8, 12, 13, 20, 21, dice.randint(1, 30)]) for _ in range(157)], 8, [7, 12, 20]),
        ([dice.randint(1, 9) for _ in range(40)], 10, []),
        ([3] * 7 + [50] * 5 + [20], 3, [10, 30, 40]),
        ([4], 5, [2]),
        ([dice.randint(1, 100) for _ in range(64)], 1, [50]),
        ([6] * 16 + [9] * 15 + [12] * 17, 8, [7, 10]),
    ]

    def epoch(sampler: Any) -> list[list[int]]:
        return [list(batch) for batch in sampler]

    def made(number: int, **options: Any) -> Any:
        lengths, size, boundaries = cases[number]
        return answer(list(lengths), size, list(boundaries), **options)

    with trial.group("each batch is a list of ints", hint="what is the type of a batch, and of what is in it?"):
        for number in range(len(cases)):
            for batch in made(number):
                fine = isinstance(batch, list) and all(map(_is_int, batch))
                trial.that(f"case {number}", fine, expected="a list of ints", got=repr(batch)[:80])
    with trial.group("each batch is of one bucket", hint="where does a length go that equals a boundary?", see=1):
        for number, (lengths, _, boundaries) in enumerate(cases):
            for batch in epoch(made(number)):
                found = [lengths[i] for i in batch]
                alike = len({_bucket_of(length, boundaries) for length in found}) == 1
                trial.that(f"boundaries {boundaries}", alike, expected="lengths of one bucket", got=_short(found))
    with trial.group(
        "each index comes exactly once", hint="count the indices of an epoch: which is lacking, or twice?"
    ):
        for number, (lengths, *_) in enumerate(cases):
            got = sorted(itertools.chain.from_iterable(epoch(made(number))))
            trial.equal(f"{len(lengths)} indices", got, list(range(len(lengths))))
    with trial.group("only a bucket's last batch is shorter", hint="how large is each batch of one bucket?"):
        for number, (lengths, size, boundaries) in list(enumerate(cases))[1:]:
            sizes: dict[int, list[int]] = {}
            for batch in epoch(made(number)):
                sizes.setdefault(_bucket_of(lengths[batch[0]], boundaries), []).append(len(batch))
            for found in sizes.values():
                full, rest = divmod(sum(found), size)
                trial.equal(f"batch_size {size}", sorted(found), sorted([size] * full + [rest] * bool(rest)))
    with trial.group("drop_last leaves out the shorter batches, and nothing else", hint="each bucket has a rest"):
        for number, (lengths, size, boundaries) in list(enumerate(cases))[1:]:
            batches = epoch(made(number, drop_last=True))
            held = Counter(_bucket_of(length, boundaries) for length in lengths)
            trial.equal("sizes", [len(batch) for batch in batches], [size] * sum(n // size for n in held.values()))
            kept = list(itertools.chain.from_iterable(batches))
            trial.equal("different indices", len(set(kept)), len(kept))
    with trial.group(
        "a bucket's indices are shuffled before they are cut", hint="are the same indices together in each epoch?"
    ):
        sampler = answer([5] * 64, 8, [10])
        together = [{frozenset(batch) for batch in epoch(sampler)}]
        sampler.set_epoch(1)
        together += [{frozenset(batch) for batch in epoch(sampler)}]
        in_order = {frozenset(range(start, start + 8)) for start in range(0, 64, 8)}
        for one, other in ((together[0], in_order), (together[0], together[1])):
            trial.that(
                "one bucket", len(one & other) < 4, expected="other batches", got=f"{len(one & other)} of 8 alike"
            )
    with trial.group(
        "the batches of all buckets are shuffled together", hint="from which buckets do they come, in turn?"
    ):
        sampler, patterns = answer([1 + i % 4 for i in range(160)], 4, [1, 2, 3]), []
        for number in range(2):
            sampler.set_epoch(number)
            patterns.append([batch[0] % 4 for batch in epoch(sampler)])
        changes = sum(a != b for a, b in itertools.pairwise(patterns[0]))
        trial.that("order", changes > 15, expected="buckets in mixed order", got=_short(patterns[0], 12))
        trial.that(
            "epochs", patterns[0] != patterns[1], expected="another order in epoch 1", got=_short(patterns[1], 12)
        )
    with trial.group(
        "the same epoch gives the same batches", hint="make the random numbers anew in each `iter`", see=2
    ):
        for number in (0, 5):
            sampler = made(number, seed=4)
            first = epoch(sampler)
            trial.equal("gone over twice", epoch(sampler), first)
            trial.equal("another sampler of the same seed", epoch(made(number, seed=4)), first)
            sampler.set_epoch(3)
            third = epoch(sampler)
            sampler.set_epoch(0)
            trial.equal("back in epoch 0", epoch(sampler), first)
            sampler = made(number, seed=4)
            sampler.set_epoch(3)
            trial.equal("epoch 3 at once", epoch(sampler), third)
    with trial.group("another epoch, or another seed, gives others", hint="what is your generator seeded with?", see=2):
        sampler, seen = made(0, seed=1), []
        for number in range(3):
            sampler.set_epoch(number)
            seen.append(str(epoch(sampler)))
        trial.equal("different epochs, of 3", len(set(seen)), 3)
        trial.equal("different seeds, of 3", len({str(epoch(made(0, seed=seed))) for seed in (0, 1, 2)}), 3)
    with trial.group("the global random state is neither used nor changed", see=2):
        results = []
        for seed in (1, 2):
            _seed_globally(seed)
            before = _global_state()
            results.append(epoch(made(0)))
            trial.that("state", before == _global_state(), expected="the state as it was", got="another state")
        trial.that("use", results[0] == results[1], expected="the same batches", got="others after another manual_seed")
    with trial.group("len() is the number of batches", see=3):
        for number in range(len(cases)):
            for drop_last in (False, True):
                sampler = made(number, drop_last=drop_last)
                trial.equal(f"case {number}, drop_last={drop_last}", len(sampler), len(epoch(sampler)))
    with trial.group("ValueError for arguments that can't be used", hint="look at the arguments in `__init__`"):
        _raises(trial, "no lengths", lambda: answer([], 4, [3]), "")
        for size in (0, -2, 2.5):
            _raises(trial, f"batch_size {size}", lambda size=size: answer([1, 2], size, [3]), "")
        for wrong in ([3, 2], [1, 4, 4], [5, 5]):
            _raises(trial, f"boundaries {wrong}", lambda wrong=wrong: answer([1, 2], 1, wrong), "")


# ---------------------------------------------------------------- 15-02.3


class _Weighted(WeightedRandomSampler):
    """Stand-in."""

    def __init__(self, weights, num_samples=None, replacement=True, generator=None, size=None):
        if size is not None and len(weights) != size:
            raise ValueError(f"{len(weights)} weights for {size} items")
        super().__init__(weights, len(weights) if num_samples is None else num_samples, replacement, generator)


def _p_value(observed: Sequence[float], shares: Sequence[float]) -> float:
    """Probability that right draws are off by as much, after Pearson; expected counts are 5 or more."""
    count, whole = sum(observed), sum(shares)
    expected = [count * share / whole for share in shares]
    x = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return _upper(len(shares) - 1, x)


def _upper(freedom: int, x: float) -> float:
    """Probability that chi-square with these degrees of freedom is above x: the regularised upper gamma function."""
    half = [torch.tensor(value / 2, dtype=torch.float64) for value in (freedom, x)]
    return float(torch.special.gammaincc(*half))


def _triples(weights: Sequence[float]) -> dict[tuple[int, ...], float]:
    """Probability of each ordered triple of draws without replacement, by its definition."""
    found = {}
    for triple in itertools.permutations([i for i, weight in enumerate(weights) if weight], 3):
        left, found[triple] = sum(weights), 1.0
        for index in triple:
            found[triple] *= weights[index] / left
            left -= weights[index]
    return found


@exercise(
    "15-02.3", "Weighted sampler", points=20, stand_in=lambda: _Weighted, stand_in_name="torch's WeightedRandomSampler"
)
def weighted(trial: Trial, answer: Any) -> None:
    """`answer(weights, num_samples, replacement, generator, size)` draws indices by weights."""
    some = [0.5, 3.0, 1.0, 0.25, 7.0, 2.0]

    def drawn(*arguments: Any, seed: int = 1, **options: Any) -> list[int]:
        return list(answer(*arguments, generator=_generator(seed), **options))

    def fits(name: str, observed: Sequence[float], shares: Sequence[float]) -> None:
        p = _p_value(observed, shares)
        wanted = [round(sum(observed) * share / sum(shares)) for share in shares]
        trial.that(name, p > ALPHA, expected=f"about {wanted}", got=f"{list(observed)}: p = {p:.1g}")

    with trial.group("ints, as many as asked for", hint="what is the type of what you yield, and how many come?"):
        for weights in (some, torch.tensor(some), tuple(some)):
            for count, replacement in ((None, True), (1, True), (17, True), (None, False), (4, False)):
                got = drawn(weights, count, replacement)
                trial.equal("draws", len(got), count or 6)
                trial.that("ints", all(map(_is_int, got)), expected="ints", got=_short([type(x).__name__ for x in got]))
    with trial.group("with replacement: in proportion to the weights", see=1):
        for seed, weights in enumerate((some, [1.0, 1.0], [2, 5, 1, 1], [1e-3, 2e-3, 5e-3], [9.0, 1.0, 1.0, 30.0])):
            got = Counter(drawn(weights, 20_000, seed=seed))
            fits(f"weights {weights}", [got[i] for i in range(len(weights))], weights)
    with trial.group("weights of any real dtype", hint="in which dtype do you add up?", see=1):
        for dtype in (torch.int64, torch.float16, torch.bfloat16, torch.float32):
            many = torch.ones(6000).to(dtype)
            got = Counter(drawn(many, 60_000))
            p = _p_value([got[i] for i in range(6000)], [1] * 6000)
            most = f"{len(got):,} different indices, p = {p:.1g}"
            trial.that(
                f"60,000 draws, 6,000 equal weights, {dtype}", p > ALPHA, expected="each about ten times", got=most
            )
    with trial.group("weight 0 is never drawn", hint="whose piece is empty?"):
        for weights in ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 2.0, 0.0], [0, 0, 3]):
            positive = {i for i, weight in enumerate(weights) if weight}
            trial.equal(f"weights {weights}", set(drawn(weights, 5000)), positive)
            without = set(drawn(weights, len(positive), False)) | positive
            trial.equal(f"weights {weights}, without replacement", without, positive)
    with trial.group("with replacement: draws are independent", hint="does a draw depend on the one before it?"):
        got = drawn([1.0, 2.0, 3.0], 20_000, seed=5)
        pairs, alone = Counter(itertools.pairwise(got)), Counter(got)
        x = 0.0
        for cell in itertools.product(alone, repeat=2):
            share = alone[cell[0]] * alone[cell[1]] / len(got)
            x += (pairs[cell] - share) ** 2 / share
        p = _upper((len(alone) - 1) ** 2, x)
        trial.that("pairs of neighbours", p > ALPHA, expected="as often as by chance", got=f"p = {p:.1g}")
        x = 0.0
        for seed in range(50):
            counts = Counter(drawn(some, 200, seed=seed))
            shares = [200 * weight / sum(some) for weight in some]
            x += sum((counts[i] - share) ** 2 / share for i, share in enumerate(shares))
        even = 1 - _upper(50 * 5, x)
        trial.that("50 seeds", even > ALPHA, expected="counts that vary by chance", got=f"too even: p = {even:.1g}")
    with trial.group("without replacement no index comes twice", see=2):
        for weights, count in ((some, 6), (some, 3), ([1.0] * 50, 50), ([1000.0, 1.0, 1.0], 3)):
            trial.equal(f"{count} draws", len(set(drawn(weights, count, False))), count)
    with trial.group("without replacement: each draw in proportion to the weights that are left", see=2):
        for weights in ([1.0, 2.0, 3.0, 4.0], [6.0, 0.0, 1.0, 1.0, 2.0]):
            sampler, wanted = answer(weights, 3, False, _generator(8)), _triples(weights)
            got = Counter(tuple(sampler) for _ in range(3000))
            fits(f"the first three, weights {weights}", [got[triple] for triple in wanted], list(wanted.values()))
    with trial.group("each iter draws anew", hint="where do you draw: in `__init__` or in `__iter__`?"):
        for replacement in (True, False):
            sampler = answer([1.0] * 40, 40, replacement, _generator(3))
            trial.that(
                f"replacement={replacement}", list(sampler) != list(sampler), expected="new draws", got="the same"
            )
    with trial.group("the same state of the generator, the same draws", hint="which calls of yours draw numbers?"):
        for replacement in (True, False):
            results = []
            for seed in (1, 2):
                _seed_globally(seed)
                before = _global_state()
                results.append(drawn(some, 6, replacement, seed=9))
                trial.that("global state", before == _global_state(), expected="as it was", got="it was used")
            trial.equal("two samplers", results[1], results[0])
            found = {str(drawn([1.0] * 30, 30, replacement, seed=seed)) for seed in range(4)}
            trial.equal("different draws of 4 seeds", len(found), 4)
    with trial.group("without a generator: PyTorch's global one", hint="which generator does `torch.rand` use?"):
        for replacement in (True, False):
            results = []
            for seed in (1, 1, 2):
                torch.manual_seed(seed)
                results.append(list(answer([1.0] * 30, 30, replacement)))
            trial.equal("after manual_seed(1), twice", results[1], results[0])
            trial.that("manual_seed(2)", results[2] != results[0], expected="other draws", got="the same draws")
    with trial.group("len() is the number of draws", hint="what of None?"):
        for count in (None, 3, 60):
            trial.equal(f"num_samples={count}", len(answer(some, count)), count or 6)
    unusable = {
        "two dimensions": torch.ones(2, 3),
        "no dimension": torch.tensor(3.0),
        "no weights": [],
        "a negative weight": [1.0, -0.5, 2.0],
        "NaN": [1.0, float("nan")],
        "an infinite weight": [float("inf"), 1.0],
        "weights all zero": [0.0, 0.0],
    }
    with trial.group("ValueError for weights that can't be used", hint="look at the weights in `__init__`"):
        for what, weights in unusable.items():
            _raises(trial, what, lambda weights=weights: answer(weights, 2), "")
    with trial.group("ValueError for a number of weights that isn't size", hint="compare the two in `__init__`"):
        for size in (5, 7, 0):
            _raises(trial, f"6 weights, size={size}", lambda size=size: answer(some, 2, size=size), "")
        trial.equal("6 weights, size=6", len(drawn(some, 2, size=6)), 2)
    with trial.group("ValueError for a num_samples that can't be drawn", hint="look at it in `__init__`"):
        for count in (0, -1, 2.0):
            _raises(trial, f"num_samples={count}", lambda count=count: answer(some, count), "")
        zeros = [0.0, 1.0, 2.0]
        for weights, count in ((some, 7), (zeros, 3), (zeros, None)):
            what = f"{count} of {weights} without replacement"
            _raises(trial, what, lambda weights=weights, count=count: answer(weights, count, False), "")
        trial.equal("7 of 6 with replacement", len(drawn(some, 7)), 7)


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
def _in_worker(number: int, count: int, dataset: Any) -> Iterator[Any]:
    """As if this were a loader's worker: its copy of the data set, its number, its global seeds."""
    before = worker_module._worker_info
    seed = 1000 + number
    mine = copy.deepcopy(dataset)
    _seed_globally(seed)
    worker_module._worker_info = SimpleNamespace(id=number, num_workers=count, seed=seed, dataset=mine)
    try:
        yield mine
    finally:
        worker_module._worker_info = before


@exercise("15-02.4", "Sharded stream", points=20, stand_in=lambda: _Shards, stand_in_name="a finished sharded stream")
def stream(trial: Trial, answer: Any) -> None:
    """`answer(shards, read, seed)` streams shards, dealt out to workers."""
    sizes = {"a": 3, "b": 1, "c": 0, "d": 7, "e": 2, "f": 1, "g": 4, "h": 2, "i": 5}
    opened: list[str] = []

    def read(shard: str) -> Iterator[str]:
        opened.append(shard)
        for number in range(sizes[shard]):
            yield f"{shard}{number}"

    def samples(shards: Sequence[str]) -> list[str]:
        return [f"{shard}{number}" for shard in shards for number in range(sizes[shard])]

    def new(count: int, seed: int = 0) -> Any:
        opened.clear()
        return answer(list(sizes)[:count], read, seed)

    def in_order(count: int, seed: int) -> list[str]:
        return [list(sizes)[place] for place in _order(count, seed)]

    def shards_in(found: Iterable[str]) -> list[str]:
        """The shards that samples are of, in the order of their first samples."""
        return list(dict.fromkeys(sample[0] for sample in found))

    def of_workers(stream: Any, count: int) -> list[list[str]]:
        """What each worker yields; `opened` lists what all of them opened."""
        opened.clear()
        found = []
        for number in range(count):
            with _in_worker(number, count, stream) as mine:
                found.append(list(mine))
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
            trial.equal(f"{count} shards", sorted(got), sorted(samples(list(sizes)[:count])))
            blocks = [shard for shard, _ in itertools.groupby(got, key=lambda sample: sample[0])]
            trial.equal("shards that come once", len(blocks), len(set(blocks)))
            trial.equal("order within them", got, samples(blocks))
    with trial.group("the order of shards follows from seed + epoch", hint="the task says how; what is your seed?"):
        for count, seed, epoch in ((9, 0, 0), (9, 3, 0), (9, 3, 2), (5, 0, 7)):
            made = new(count, seed)
            if epoch:
                made.set_epoch(epoch)
            for time in ("", ", again"):
                wanted = [shard for shard in in_order(count, seed + epoch) if sizes[shard]]
                trial.equal(f"seed {seed}, epoch {epoch}{time}", shards_in(made), wanted)
    workers = [(shards, count) for shards in (1, 2, 5, 9) for count in (1, 2, 3, 4, 7, 11)]
    with trial.group("workers: no sample is lost or repeated", hint="do all workers mean the same order?", see=1):
        for shards, count in workers:
            got = sorted(itertools.chain.from_iterable(of_workers(new(shards, 2), count)))
            trial.equal(f"{shards} shards, {count} workers", got, sorted(samples(list(sizes)[:shards])))
    with trial.group("workers: each shard is read by one of them", hint="count how often `read` is called", see=1):
        for shards, count in workers:
            of_workers(new(shards, 2), count)
            trial.equal(f"{shards} shards, {count} workers", sorted(opened), list(sizes)[:shards])
    with trial.group(
        "workers: none has two shards more than another", hint="9 shards, 7 workers: who has which?", see=1
    ):
        for shards, count in workers:
            made, held = new(shards, 2), []
            for number in range(count):
                opened.clear()
                with _in_worker(number, count, made) as mine:
                    list(mine)
                held.append(len(opened))
            trial.that(f"{shards} shards", max(held) - min(held) < 2, expected="one more at most", got=str(held))
    with trial.group(
        "workers: the shards are in the epoch's order", hint="in which order does a worker read its part?"
    ):
        for shards, count in workers:
            made = new(shards, 4)
            made.set_epoch(1)
            wanted = shards_in(made)
            for got in map(shards_in, of_workers(made, count)):
                trial.equal(f"{shards} shards, {count} workers", got, [shard for shard in wanted if shard in got])
    with trial.group("a shard is opened when its first sample is asked for", see=2):
        for count in (2, 9):
            made = new(count, 1)
            first = next(iter(shards_in(made)))
            opened.clear()
            iterator = iter(made)
            trial.equal("opened before the first sample", len(opened), 0)
            next(iterator)
            trial.equal("the last opened at the first sample", opened[-1], first)
            list(iterator)
            trial.equal("opened at the end", sorted(opened), list(sizes)[:count])
    errors: list[Exception] = [OSError("gone"), ValueError("bad"), KeyError("k"), EOFError(), RuntimeError("torn")]
    with trial.group("an error names the shard", hint="what would a reader of the message have to know?", see=2):
        for number, error in enumerate(errors):
            bad = "abdef"[number]

            def broken(shard: str, bad: str = bad, error: Exception = error, at_once: int = number % 2) -> Any:
                if shard == bad and at_once:
                    raise error
                return itertools.chain(read(shard), raising(error) if shard == bad else ())

            def raising(error: Exception) -> Iterator[str]:
                raise error
                yield ""

            names = [f"shard-{shard}.tar" for shard in sizes]
            made = answer(names, lambda name, broken=broken: broken(name[6]), 0)
            got: list[str] = []
            try:
                got.extend(made)
                raised: Exception | None = None
            except Exception as caught:
                raised = caught
            shown = "no error" if raised is None else f"{type(raised).__name__}: {raised}"
            fine = isinstance(raised, RuntimeError) and f"shard-{bad}.tar" in str(raised)
            case = f"{type(error).__name__} in shard-{bad}.tar"
            trial.that(case, fine, expected=f"RuntimeError with shard-{bad}.tar", got=shown)
            trial.that(
                "cause", raised is None or raised.__cause__ is error, expected=repr(error), got=repr(raised.__cause__)
            )
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
    points=25,
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
            for epoch in range(3):
                got = list(itertools.islice(sampler, size + 1))
                trial.equal(f"size {size}, seed {seed}, epoch {epoch}", got, _order(size, seed + epoch))
                trial.that("ints", all(map(_is_int, got)), expected="ints", got=type(got[0]).__name__)
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
    with trial.group("len() is size", hint="whatever the state"):
        for size in (1, 9):
            sampler = answer(size)
            trial.equal("new", len(sampler), size)
            _take(sampler, 4)
            trial.equal("after some", len(sampler), size)
    with trial.group("ValueError for a size that can't be used", hint="look at it in `__init__`"):
        for size in (0, -3, 2.5):
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


def _survives(state: Any) -> bool:
    try:
        return json.loads(json.dumps(state)) == state
    except (TypeError, ValueError):
        return False
