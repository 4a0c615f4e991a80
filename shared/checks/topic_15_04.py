"""Checks of the exercises in 15-04, Custom Loss Functions & Training Utilities."""

import copy
import io
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shared.checks.exercise import exercise
from shared.checks.trial import Trial
from shared.checks.words import outcome

_HALVES = (torch.float16, torch.bfloat16)
_FORMATS = (*_HALVES, torch.float32)


class _Operations(TorchDispatchMode):
    """Notes the names of the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Notes the names of PyTorch's functions and methods that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def _works_on_an_accelerator(trial: Trial, case: str, answer: Any, *inputs: Any, **options: Any) -> None:
    """Inside a group: with inputs on an accelerator, a pretended one, the answer runs and its result is there, too."""
    from shared.pretended import pretended_accelerator  # which loads torch._dynamo: seconds that the setup cell saves

    with pretended_accelerator() as accelerator:
        moved = [one.to(accelerator) if isinstance(one, Tensor) else one for one in inputs]
        try:
            found = str(answer(*moved, **options).device)
        except TypeError as error:
            if "float64" not in str(error):
                raise
            return  # computed in float64, which is refused as on a Mac's GPU; others have it
        trial.equal(case, found, str(moved[0].device))


def _mistake_in_dtype(got: Any, want: Tensor, see: int) -> dict[str, Any]:
    """A hint for a result that isn't float64, or is off from `want` by no more than float32 rounds; else none."""
    if not isinstance(got, Tensor) or got.shape != want.shape or got.device != want.device:
        return {}
    if got.dtype == want.dtype and not torch.allclose(got, want, rtol=1e-6, atol=1e-6):
        return {}
    return {"hint": "the inputs are float64 here: in which dtype do you compute, and what comes back?", "see": see}


# ---------------------------------------------------------------- 15-04.1


def _smoothed(
    logits: Tensor,
    labels: Tensor,
    epsilon: float = 0.1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Stand-in of exercise 1, in other names for the arguments PyTorch's own; halves are widened."""
    wide = logits.float() if logits.dtype in _HALVES else logits
    weight = None if weight is None else weight.to(wide.dtype)
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": epsilon}
    return F.cross_entropy(wide, labels, weight, **options).to(logits.dtype)


def _classified(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits (N, C, ...) of irregular size and labels."""
    logits = (3 * torch.randn(shape, dtype=torch.float64) + torch.randn(shape[0], *[1] * (len(shape) - 1))).to(dtype)
    return logits, torch.randint(shape[1], (shape[0], *shape[2:]))


def _gradient(loss: Tensor, logits: Tensor, sent: Tensor | None = None) -> Tensor:
    """The gradient that reaches the logits; zeros where none does."""
    if not loss.requires_grad:
        return torch.zeros_like(logits)
    (found,) = torch.autograd.grad(loss, logits, sent, allow_unused=True)
    return torch.zeros_like(logits) if found is None else found


@exercise(
    "15-04.1",
    "Label smoothing in log space",
    points=15,
    demands=9,
    stand_in=lambda: _smoothed,
    stand_in_name="F.cross_entropy",
)
def label_smoothing_cross_entropy(trial: Trial, answer: Any) -> None:
    """`answer(logits, labels, epsilon, weight, ignore_index, reduction)` is a smoothed cross-entropy."""
    logits, labels = _classified((3, 4))
    with _Functions() as called, _Operations() as ran:
        answer(logits, labels, 0.2)
    names = {*called.names, *ran.names}
    used = sorted(name for name in names if "nll_loss" in name or "cross_entropy" in name)
    trial.needs(
        "is written without cross_entropy and nll_loss",
        not used,
        expected="operations of your own",
        got=", ".join(used),
        hint="which functions does the task exclude?",
    )
    shapes = [(5, 7), (4, 2), (3, 5, 6), (1, 3), (2, 4, 3, 2), (6, 1)]
    plain = [(f"{shape}, epsilon {e}", *_classified(shape), e) for shape in shapes for e in (0.0, 0.1, 0.35, 1.0)]
    few = [one for one in plain if len(one[2]) > 1]
    wide, labels = _classified((6, 9, 4))
    plain.append(("every second sample", wide[::2], labels[::2], 0.1))
    plain.append(("not contiguous", wide.mT.contiguous().mT, labels.T.contiguous().T, 0.1))
    close = {"rtol": 1e-9, "atol": 1e-10}
    entry = "take one entry through the formula; which shape do the losses have?"
    hints = {"none": entry} | dict.fromkeys(
        ("sum", "mean"), "the losses are right: what does this reduction make of them?"
    )
    with trial.group("reductions none, sum and mean", hint="along which dimension are the classes?", see=1):
        for case, z, y, e in plain:
            for how in ("none", "sum", "mean"):
                got, want = (f(z, y, e, reduction=how) for f in (answer, _smoothed))
                hint = {"hint": hints[how]} | _mistake_in_dtype(got, want, see=2)
                trial.close(f"{how}, {case}", got, want, **hint, **close)
            shown = f"epsilon and reduction by default, {case.partition(', epsilon')[0]}"
            trial.close(shown, answer(z, y), _smoothed(z, y), hint="take one entry through the formula", **close)
    item, mean = "class weights and ignored labels", "by what is the sum of the losses divided?"
    with trial.group(item, hint="which labels are ignored, and which may be an index?", see=1):
        for case, z, y, e in few:
            weights = 3 * torch.rand(z.shape[1], dtype=z.dtype) + 0.1
            for weight, number in itertools.product((None, weights, 0.01 * weights), (None, -100, 255, -1, 0)):
                if number == 0 and z.shape[1] == 1:
                    continue
                some, ignored = y.clone(), -100 if number is None else number
                if number is not None:
                    some.view(-1)[::2] = number
                    some.view(-1)[1] = z.shape[1] - 1
                for how in ("none", "sum", "mean"):
                    got, want = (f(z.clone(), some.clone(), e, weight, ignored, how) for f in (answer, _smoothed))
                    which = {None: "no weights"}.get(weight if weight is None else 0, "weights")
                    hint, see = "whose weight does each term have?", None
                    if number is not None:
                        hint, see = "what does an ignored entry cost, and what do those beside it?", 1
                    hint, see = (mean, None) if how == "mean" else (hint, see)
                    shown = f"{how}, {which}, ignore_index {number}, {case}"
                    trial.close(shown, got, want, hint=hint, see=see, **close)
        z, y = _classified((4, 3))
        for how in ("none", "sum", "mean"):
            got, want = (f(z, 0 * y - 100, 0.1, None, -100, how) for f in (answer, _smoothed))
            hint = mean if how == "mean" else "what does an ignored entry cost?"
            trial.close(f"{how}, all are ignored", got, want, hint=hint, **close)
        for dtype in _FORMATS:
            z, y = _classified((9, 4), dtype)
            weight = (torch.rand(4) + 0.5).to(dtype)
            want = _smoothed(z.double(), y, 0.3, weight.double()).to(dtype)
            hint = "in which dtype are weights and logits multiplied?"
            got = answer(z, y, 0.3, weight).to(dtype)
            trial.close(f"weights, {dtype}", got, want, hint=hint, rtol=2e-2, atol=1e-5)
    with trial.group("the inputs stay as they are", hint="which line writes into what it was given?", free=True):
        for *_, e in few:
            z, some = _classified((5, 7, 2))
            some.view(-1)[::2] = -100
            given = z.clone(), some.clone(), torch.rand(z.shape[1], dtype=z.dtype)
            kept = [part.clone() for part in given]
            for how in ("none", "mean"):
                answer(given[0], given[1], e, given[2], reduction=how)
                for name, part, before in zip(("logits", "labels", "weight"), given, kept, strict=True):
                    trial.equal(f"{name}, (5, 7, 2), epsilon {e}", part, before)
    with trial.group("gradients", hint="does everything on the way know its derivative?"):
        for case, z, y, e in few:
            some = y.clone()
            some.view(-1)[1:2] = -7
            for how in ("none", "sum", "mean"):
                sent = torch.randn(y.shape, dtype=z.dtype) if how == "none" else None
                found = []
                for f in (answer, _smoothed):
                    leaf = z.clone().requires_grad_()
                    found.append(_gradient(f(leaf, some.clone(), e, None, -7, how), leaf, sent))
                trial.close(f"{how}, {case}", *found, **close)
        for dtype in _FORMATS:
            z, y = _classified((6, 5), dtype)
            found = []
            for f, leaf in ((answer, z.clone().requires_grad_()), (_smoothed, z.double().requires_grad_())):
                found.append(_gradient(f(leaf, y, 0.2, reduction="sum"), leaf).double())
            trial.close(f"{dtype}", *found, rtol=2e-2, atol=1e-2)
    with trial.group("the dtype is that of the logits", hint="in which dtype do you compute, and what is returned?"):
        for dtype in (*_FORMATS, torch.float64):
            for shape in ((7, 5), (3, 4, 5)):
                z, y = _classified(shape, dtype)
                for how in ("none", "mean"):
                    want = _smoothed(z.double(), y, 0.1, reduction=how).to(dtype)
                    rtol, atol = (2e-2, 2e-2) if dtype in _HALVES else (1e-5, 1e-5)
                    trial.close(f"{dtype}, {how}", answer(z, y, 0.1, reduction=how), want, rtol=rtol, atol=atol)
    hint = "where does each tensor lie that you make? The logits are on a pretended accelerator here"
    with trial.group("the device is that of the logits", hint=hint, free=True):
        z, y = _classified((7, 5, 2), torch.float32)
        y[0] = -100
        for weight, how in itertools.product((None, torch.rand(5) + 0.1), ("none", "sum", "mean")):
            case = f"{how}, {'no weights' if weight is None else 'weights'}"
            _works_on_an_accelerator(trial, case, answer, z, y, 0.1, weight, reduction=how)
    item = "logits of ±10,000: the loss of float64, and no NaN"
    with trial.group(item, hint="which operation leaves the range of its dtype?", see=2):
        for dtype in _FORMATS:
            for classes in (2, 10, 40):
                signs = torch.randint(0, 2, (60, classes)) * 2.0 - 1  # the sum leaves float16, the mean doesn't
                signs[0], signs[1] = 1.0, -1.0
                signs[2, 0] = 0.0
                z, y = (1e4 * signs).to(dtype).requires_grad_(), torch.randint(classes, (60,))
                loss, case = answer(z, y, 0.1), f"{dtype}, {classes} classes"
                want = _smoothed(z.detach().double(), y, 0.1).to(dtype)
                trial.close(f"loss, {case}", loss.detach(), want, rtol=2e-2)
                trial.equal(f"NaNs in the gradient, {case}", int(_gradient(loss, z).isnan().sum()), 0)
        for size in (1e5, 1e9):
            z, y = (size * torch.randn(5, 4, dtype=torch.float64)), torch.randint(4, (5,))
            case, hint = f"logits around {size:.0e} in float64", "which operation has a bound for such logits?"
            trial.close(case, answer(z, y, 0.3), _smoothed(z, y, 0.3), rtol=1e-9, hint=hint)
    with trial.group("masked classes, and NaN", hint="what is 0 times infinity?", see=1):
        for shape, weighted, (e, how) in itertools.product(
            [(6, 5), (4, 3, 5)], (False, True), itertools.product((0.0, 0.2), ("none", "sum", "mean"))
        ):
            z, y = _classified(shape)
            weight = torch.rand(shape[1], dtype=z.dtype) + 0.1 if weighted else None
            away = (y + 1) % shape[1]
            z.scatter_(1, away.unsqueeze(1), -torch.inf)
            away[0], away[1] = 0, 0  # ignored entries, whose first class is masked
            z.scatter_(1, away.unsqueeze(1), -torch.inf)
            y[:2] = -100
            case, found = f"{how}, epsilon {e}, {'weights' if weighted else 'no weights'}, {shape}", []
            for f in (answer, _smoothed):
                leaf = z.clone().requires_grad_()
                loss = f(leaf, y.clone(), e, weight, -100, how)
                found.append((loss, None if e else _gradient(loss.sum(), leaf)))
            trial.close(f"a class is masked, {case}", found[0][0].detach(), found[1][0].detach(), **close)
            if not e:
                trial.close(f"gradient, a class is masked, {case}", found[0][1], found[1][1], **close)
            odds = [
                (2, "the label's class is masked in one entry, ", -torch.inf),
                (2, "one entry has a NaN, ", math.nan),
                (0, "an ignored entry has a NaN, ", math.nan),
            ]
            hint = "what does the task say of such an entry, and which line gives something else?"
            for row, kind, value in odds:
                odd = z.clone()
                odd[row].scatter_(0, y[row].clamp(min=0).unsqueeze(0), value)
                got, want = (f(odd, y.clone(), e, weight, -100, how) for f in (answer, _smoothed))
                trial.close(kind + case, got, want, hint=hint, see=None if row else 1, **close)
    with trial.group("another reduction raises ValueError", hint="what does the task say of other names?"):
        for how in ("average", "", "Mean"):
            found = outcome(lambda how=how: answer(*_classified((3, 4)), reduction=how))
            trial.equal(f"reduction={how!r}", found, "ValueError")


# ---------------------------------------------------------------- 15-04.2


def _nt_xent(first: Tensor, second: Tensor, temperature: float = 0.5) -> Tensor:
    """Stand-in of exercise 2: the definition, pair by pair."""
    rows = [*first, *second]
    wide = [row.float() if row.dtype in _HALVES else row for row in rows]
    units = [row / row.norm().clamp(min=1e-12) for row in wide]
    losses = []
    for i, row in enumerate(units):
        partner = (i + len(first)) % len(units)
        logits = torch.stack([row @ other / temperature for other in units])
        others = torch.cat([logits[:i], logits[i + 1 :]])
        losses.append(others.logsumexp(dim=0) - logits[partner])
    return torch.stack(losses).mean().to(first.dtype)


def _fast_nt_xent(first: Tensor, second: Tensor, temperature: float = 0.5) -> Tensor:
    """What the cells below get: quick enough to train with."""
    if first.shape != second.shape or first.dim() != 2:
        raise ValueError("two inputs (N, D) of one shape are needed")
    both = torch.cat([first, second])
    units = F.normalize(both.float() if both.dtype in _HALVES else both, dim=1)
    logits = (units @ units.T / temperature).fill_diagonal_(-torch.inf)
    own = torch.cat([logits.diagonal(len(first)), logits.diagonal(-len(first))])
    return (logits.logsumexp(dim=1) - own).mean().to(first.dtype)


@exercise(
    "15-04.2", "NT-Xent", points=20, demands=9, stand_in=lambda: _fast_nt_xent, stand_in_name="one of the check's"
)
def nt_xent_loss(trial: Trial, answer: Any) -> None:
    """`answer(first, second, temperature)` is the mean loss over both views of each image."""
    sizes = [(2, 3), (3, 1), (4, 5), (5, 2), (12, 4)]
    pairs = [[F.normalize(torch.randn(n, d, dtype=torch.float64), dim=1) for _ in range(2)] for n, d in sizes]
    taus = (0.01, 0.07, 0.5, 1.0, 3.0)
    hint = "take one view through the formula: who is in the sum, who is the partner, what is divided, in which dtype?"
    with trial.group("equals a loop over all views", hint=hint, see=1):
        for a, b in pairs:
            for tau in taus:
                got, want = answer(a, b, tau), _nt_xent(a, b, tau)
                case = f"{len(a)} images, temperature {tau}"
                trial.close(case, got, want, rtol=1e-7, atol=1e-9, **_mistake_in_dtype(got, want, see=3))
            trial.close(f"{len(a)} images, by default", answer(a, b), _nt_xent(a, b), rtol=1e-7, atol=1e-9)
    with trial.group("one image alone costs 0", hint="who else is there?", see=2):
        for d in (1, 4):
            a, b = torch.randn(2, 1, d, dtype=torch.float64)
            for tau, other in itertools.product((0.01, 0.3), (b, -a)):
                got = answer(a, other, tau)
                trial.close(f"{d} dimensions, temperature {tau}", got, torch.zeros((), dtype=torch.float64))
    hint = "which length does each row have when two are compared, a very short one too?"
    with trial.group("the length of a row doesn't matter", hint=hint, free=True):
        for a, b in pairs:
            scale = 10 ** (20 * torch.rand(2, len(a), 1, dtype=torch.float64) - 10)
            scale[0, 0], scale[1, -1] = 1e-10, 1e10
            case = f"{len(a)} images, lengths from 1e-10 to 1e10"
            trial.close(case, answer(a * scale[0], b * scale[1], 0.4), answer(a, b, 0.4), rtol=1e-6, atol=1e-8)
    with trial.group("gradients reach both inputs", hint="what on the way is detached?"):
        for a, b in pairs:
            for tau in (0.2, 1.0):
                for name in ("first", "second"):
                    chosen = a if name == "first" else b
                    step = 1e-6 * torch.randn_like(chosen)
                    ends = [(a + k * step, b) if name == "first" else (a, b + k * step) for k in (1, -1)]
                    slope = (answer(*ends[0], tau) - answer(*ends[1], tau)) / 2
                    leaf = chosen.clone().requires_grad_()
                    loss = answer(leaf, b, tau) if name == "first" else answer(a, leaf, tau)
                    got = (_gradient(loss, leaf) * step).sum()
                    case = f"slope along a random change of {name}, {len(a)} images, temperature {tau}"
                    trial.close(case, 1e6 * got, 1e6 * slope.detach(), rtol=1e-4, atol=1e-5)
    with trial.group("gradients in each format", hint="what on the way is detached?"):
        for dtype in _FORMATS:
            halves = torch.randn(2, 5, 8).to(dtype)
            found = []
            for kind in (dtype, torch.float64):
                leaves = [part.to(kind, copy=True).requires_grad_() for part in halves]
                found.append(torch.stack([_gradient(answer(*leaves, 0.3), leaf).double() for leaf in leaves]))
            trial.close(f"{dtype}", *found, rtol=5e-2, atol=5e-3)
    with trial.group("a tensor without dimensions in the dtype of the inputs", hint="what is converted, and back?"):
        for dtype in (*_FORMATS, torch.float64):
            loss = answer(*torch.randn(2, 6, 8, dtype=torch.float64).to(dtype), 0.5)
            is_tensor = torch.is_tensor(loss)
            got = f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}" if is_tensor else f"a {type(loss).__name__}"
            right = is_tensor and (tuple(loss.shape), loss.dtype) == ((), dtype)
            trial.that(f"inputs of {dtype}", right, expected=f"a tensor of shape () and {dtype}", got=got)
    hint = "where does each tensor lie that you make? The inputs are on a pretended accelerator here"
    with trial.group("the device is that of the inputs", hint=hint, free=True):
        _works_on_an_accelerator(trial, "6 images", answer, *torch.randn(2, 6, 8), 0.5)
    item = "low temperatures and large entries: the loss of float64, finite gradients"
    with trial.group(item, see=3):
        for dtype in _FORMATS:
            for tau in (0.01, 0.05, 1.0):
                signs = torch.randint(0, 2, (4, 70)) * 2.0 - 1
                ends = {"random": torch.randn(4, 70).sign(), "opposite": -signs, "the same": signs}
                for name, other in ends.items():
                    a, b = (1e4 * part.to(dtype) for part in (signs, other))
                    want = _nt_xent(a.double(), b.double(), tau).to(dtype)
                    a, b = a.requires_grad_(), b.requires_grad_()
                    loss = answer(a, b, tau)
                    case = f"{dtype}, temperature {tau}, second {name}"
                    trial.close(f"loss, {case}", loss.detach().float(), want.float(), rtol=2e-2, atol=2e-2)
                    got = torch.autograd.grad(loss, (a, b), allow_unused=True) if loss.requires_grad else ()
                    finite = all(g is None or bool(g.isfinite().all()) for g in got)
                    trial.that(f"gradients, {case}", finite, expected="finite entries", got="NaN or infinity")
    shapes = [
        ((3, 4), (3, 4, 1)),
        ((3, 4), (2, 4)),
        ((3, 4), (3, 5)),
        ((4,), (4,)),
        ((2, 3, 4), (2, 3, 4)),
        ((1, 4), (3, 4)),
    ]
    with trial.group("other shapes raise ValueError", hint="what does the task say of such shapes?"):
        for one, two in shapes:
            found = outcome(lambda one=one, two=two: answer(torch.randn(one), torch.randn(two), 0.5))
            trial.equal(f"{one} and {two}", found, "ValueError")


# ---------------------------------------------------------------- 15-04.3


class _Variance:
    """Stand-in of exercise 3: sums of the values and their squares in float64, on the CPU."""

    def __init__(self) -> None:
        self.count, self.sums, self.shift = 0, [0.0, 0.0], 0.0
        self._dtype = torch.float32

    @property
    def mean(self) -> Tensor:
        return torch.tensor(self.sums[0] / self.count + self.shift if self.count else math.nan, dtype=self._dtype)

    def update(self, values: Tensor) -> None:
        if values.numel():
            self._dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
            wide = values.detach().cpu().double()
            self.shift = self.shift if self.count else float(wide.mean())
            self._add(wide.numel(), [float((wide - self.shift).sum()), float((wide - self.shift).square().sum())])

    def merge(self, other: "_Variance") -> None:
        if other.count:
            self.shift, self._dtype = (self.shift, self._dtype) if self.count else (other.shift, other._dtype)
            move, (one, two) = other.shift - self.shift, other.sums
            self._add(other.count, [one + other.count * move, two + 2 * move * one + other.count * move**2])

    def _add(self, count: int, sums: list[float]) -> None:
        self.count += count
        self.sums = [a + b for a, b in zip(self.sums, sums, strict=True)]

    def variance(self, correction: int = 1) -> Tensor:
        if self.count <= correction:
            return torch.tensor(math.nan, dtype=self._dtype)
        m2 = self.sums[1] - self.sums[0] ** 2 / self.count
        return torch.tensor(m2 / (self.count - correction), dtype=self._dtype)


def _pieces(shift: float, *more: tuple[int, ...]) -> list[Tensor]:
    """Batches of irregular sizes, an empty one and single values among them; and those of further shapes."""
    shapes = [(3,), (), (0,), (6,), (1,), (), (17,), *more]
    random.shuffle(shapes)
    return [2 * torch.randn(shape, dtype=torch.float64) + shift for shape in shapes]


def _all_of(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat([piece.reshape(-1).double() for piece in pieces])


def _numbers(value: object) -> int:
    """How many numbers an object's attributes hold, in tensors and containers."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, dict):
        return sum(map(_numbers, value.values()))
    if isinstance(value, list | tuple | set):
        return sum(map(_numbers, value))
    return 1


def _state(stats: Any) -> tuple[int, float, float]:
    return stats.count, float(stats.mean), float(stats.variance(0))


@exercise(
    "15-04.3", "A variance that merges", points=20, demands=9, stand_in=lambda: _Variance, stand_in_name="float64 sums"
)
def running_variance(trial: Trial, answer: Any) -> None:
    """`answer()` sees batches, merges, and knows count, mean and variance."""
    formula = "take this batch and those before it through the formula; of which dtype is the result?"
    with trial.group("count, mean and variance of batches", hint="which shapes may a batch have, and which strides?"):
        for shift in (0.0, -3.0, 50.0):
            stats, pieces = answer(), _pieces(shift, (2, 3), (4, 0, 2), (2, 1, 5))
            for number, piece in enumerate(pieces, start=1):
                stats.update(piece)
                seen, hint = _all_of(pieces[:number]), "what is counted, and of which type is the count?"
                after = f"after {number} batches, the last of shape {tuple(piece.shape)}"
                trial.equal(f"count {after}", stats.count, len(seen), hint=hint)
                kind = type(stats.count).__name__
                trial.that("type of count", isinstance(stats.count, int), expected="int", got=kind, hint=hint)
                if len(seen) > 1:
                    see = 1 if piece.numel() else 2
                    trial.close(f"mean {after}", stats.mean, seen.mean(), hint=formula, see=see)
                    trial.close(f"variance {after}", stats.variance(), seen.var(), rtol=1e-8, hint=formula, see=see)
                    hint = "what does variance() change?"
                    trial.close("variance asked again", stats.variance(), seen.var(), rtol=1e-8, hint=hint)
        for case, values in (
            ("a matrix turned over", torch.randn(4, 5, dtype=torch.float64).mT),
            ("every third value", torch.randn(30, dtype=torch.float64)[::3]),
            ("a channel of images", torch.randn(3, 2, 4, 4, dtype=torch.float64)[:, 1]),
            ("expanded", torch.randn(3, 1, dtype=torch.float64).expand(3, 4)),
        ):
            stats = answer()
            stats.update(values)
            hint = "which values does such a batch have?"
            trial.close(f"variance, {case}", stats.variance(), values.var(), rtol=1e-8, hint=hint)
    with trial.group("the correction, NaN where nothing is left", hint="by what is M divided, and when is that 0?"):
        for n in (1, 2, 3, 8):
            values = torch.randn(n, dtype=torch.float64)
            stats = answer()
            stats.update(values)
            for correction in (0, 1, 2, 3):
                want = values.var(correction=correction) if n > correction else torch.tensor(math.nan).double()
                got = stats.variance(correction)
                got = got.double() if n <= correction and torch.is_tensor(got) else got
                trial.close(f"{n} values, correction {correction}", got, want, rtol=1e-8)
    hint = "what does a state without values say?"
    with trial.group("nothing seen", hint=hint):
        stats = answer()
        for number in range(3):
            after, see = f"after {number} empty batches", 2 if number else None
            trial.equal(f"count {after}", stats.count, 0, hint=hint, see=see)
            found = {"mean": stats.mean, "variance()": stats.variance(), "variance(0)": stats.variance(0)}
            for name, f in found.items():
                nan = torch.is_tensor(f) and f.dim() == 0 and bool(f.isnan())
                trial.that(f"{name} {after}", nan, expected="tensor(nan)", got=repr(f), hint=hint, see=see)
            stats.update(torch.zeros(0, 3))
        stats.update(torch.tensor([1.0, 3.0]))
        stats.update(torch.zeros(0))
        two, hint = torch.tensor(2.0), "what does an empty batch change?"
        trial.close("mean after 1, 3 and an empty batch", stats.mean.float(), two, hint=hint, see=2)
        trial.close("variance after 1, 3 and an empty batch", stats.variance().float(), two, hint=hint, see=2)
    with trial.group("integers, booleans and halves count as float32, float64 stays", hint="what is converted?"):
        kinds = (torch.uint8, torch.int64, torch.bool, *_HALVES, torch.float32, torch.float64)
        for dtype in kinds:
            values = (200 * torch.rand(3000)).to(dtype)
            stats, want = answer(), torch.float64 if dtype == torch.float64 else torch.float32
            for part in values.split(700):
                stats.update(part)
            for name, got, right in (
                ("mean", stats.mean, values.double().mean()),
                ("variance", stats.variance(), values.double().var()),
            ):
                trial.close(f"{name}, {dtype}", got, right.to(want), rtol=1e-4)
    with trial.group("merging workers", hint="what do two triples give, one without values too?", see=2):
        for workers in (1, 2, 3, 5):
            several, parts = [answer() for _ in range(workers)], [_pieces(4.0 * w) for w in range(workers)]
            for stats, pieces in zip(several, parts, strict=True):
                for piece in pieces:
                    stats.update(piece)
            several.insert(random.randrange(workers + 1), answer())  # one that saw nothing
            before = [_state(stats) for stats in several]
            total = answer()
            for stats in several:
                total.merge(stats)
            seen = torch.cat([_all_of(pieces) for pieces in parts])
            hint, see = "what do two triples give?", 2 if math.isnan(_state(total)[1]) else 1
            case = f"{workers} workers and one that saw nothing"
            trial.equal(f"count, {case}", total.count, len(seen), hint=hint, see=see)
            trial.close(f"mean, {case}", total.mean, seen.mean(), hint=hint, see=see)
            trial.close(f"variance, {case}", total.variance(), seen.var(), rtol=1e-8, hint=hint, see=see)
            more = torch.randn(5, dtype=torch.float64)
            total.update(more)
            want = torch.cat([seen, more]).var()
            case = "variance after merging and another batch"
            trial.close(case, total.variance(), want, rtol=1e-8, hint=hint, see=see)
            for place, (stats, kept) in enumerate(zip(several, before, strict=True)):
                for name, now, then in zip(("count", "mean", "variance"), _state(stats), kept, strict=True):
                    case = f"{name} of other, merged as number {place + 1} of {len(several)}"
                    trial.equal(case, now, then, hint="which line changes other, at once or later?")
    with trial.group("values far from 0 with a small deviation", hint="where are two large numbers subtracted?"):
        values = 1000 + 0.1 * torch.randn(2000)
        wide = 1e7 + 0.01 * torch.randn(600, dtype=torch.float64)
        for some, size in itertools.product((values, wide), (1, 3, 64, 2000)):
            stats, halves, want = answer(), [answer(), answer()], some.double().var().to(some.dtype)
            for number, part in enumerate(some.split(size)):
                stats.update(part)
                halves[number % 2].update(part)
            case = f"batches of {size}, {some.dtype}"
            trial.close(case, stats.variance(), want, rtol=1e-2)
            halves[0].merge(halves[1])
            trial.close(f"merged, {case}", halves[0].variance(), want, rtol=1e-2)
    with trial.group("a NaN stays", hint="which values are left out?"):
        for place, shape in itertools.product((0, 3, -1), ((4,), (2, 2))):
            stats, other, values = answer(), answer(), torch.randn(4, dtype=torch.float64)
            values[place] = math.nan
            for part in (torch.randn(3, dtype=torch.float64), values.view(shape), torch.randn(2, dtype=torch.float64)):
                stats.update(part)
            other.merge(stats)
            case = f"NaN at {place} of {shape}"
            for name, one in (("", stats), (", merged", other)):
                trial.equal(f"count, {case}{name}", one.count, 9)
                for kind, found in (("mean", one.mean), ("variance", one.variance())):
                    trial.that(f"{kind}, {case}{name}", bool(found.isnan()), expected="nan", got=f"{float(found):.6g}")
    with trial.group("no graph, and no tensor of the batch", hint="what of the batch is kept?"):
        for shape in ((), (1,), (8,)):
            stats, values = answer(), torch.randn(shape, dtype=torch.float64)
            wanted = values.mean().clone(), values.var(correction=0)
            leaf = values.clone().requires_grad_()
            stats.update(leaf)
            graph = [name for name, held in vars(stats).items() if getattr(held, "requires_grad", False)]
            graph += [name for name in ("mean",) if stats.mean.requires_grad]
            graph += ["variance"] * stats.variance(0).requires_grad
            trial.that(
                f"after a batch of shape {shape} that requires a gradient",
                not graph,
                expected="nothing that requires a gradient",
                got=", ".join(dict.fromkeys(graph)),
            )
            with torch.no_grad():
                leaf.fill_(7.0)
            trial.close(f"mean after the batch was overwritten, {shape}", stats.mean, wanted[0])
            trial.close(f"variance after the batch was overwritten, {shape}", stats.variance(0), wanted[1], atol=1e-9)
    with trial.group("the state doesn't grow", hint="what is kept of a batch?"):
        stats, other, sizes = answer(), answer(), []
        for _ in range(3):
            for part in torch.randn(60).split(4):
                stats.update(part)
                other.update(part)
            stats.merge(other)
            sizes.append(_numbers(vars(stats)))
        trial.that(
            "numbers in the attributes after 60, 120 and 180 values",
            sizes == sizes[:1] * 3,
            expected="the same each time",
            got=", ".join(map(str, sizes)),
        )


# ---------------------------------------------------------------- 15-04.4


def _clip(
    parameters: Tensor | Iterable[Tensor] | Sequence[Mapping],
    max_norm: float,
    norm_type: float = 2.0,
    nonfinite: str = "keep",
) -> Tensor:
    """Stand-in of exercise 4, on PyTorch's own."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grouped = bool(given) and isinstance(given[0], Mapping)
    groups = given if grouped else [{"params": given}]
    members = [list(group["params"]) for group in groups]
    grads = [[p.grad for p in ps if p.grad is not None] for ps in members]
    norms = [get_total_norm(some, norm_type) for some in grads]
    if nonfinite not in ("keep", "raise", "zero"):
        raise ValueError(f"there is no {nonfinite!r}")
    fine = nonfinite == "keep" or all(bool(norm.isfinite()) for norm in norms)
    if not fine and nonfinite == "raise":
        raise RuntimeError("a gradient isn't finite")
    for group, ps, some in zip(groups, members, grads, strict=True):
        if fine:
            clip_grad_norm_(ps, group.get("max_norm", max_norm), norm_type)
        for grad in [] if fine else some:
            grad.zero_()
    return torch.stack([norm.to(norms[0].device) for norm in norms]) if grouped else norms[0]


def _with_grads(*shapes: tuple[int, ...] | None, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Parameters with random gradients; None stands for one without a gradient."""
    made = []
    for shape in shapes:
        p = nn.Parameter(torch.zeros(shape if shape is not None else (2,), dtype=dtype))
        p.grad = None if shape is None else torch.randn(shape, dtype=torch.float64).to(dtype)
        made.append(p)
    return made


def _twin(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The same parameters and gradients, in other memory."""
    made = [nn.Parameter(p.detach().clone()) for p in parameters]
    for p, q in zip(parameters, made, strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    return made


def _grads(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    return [p.grad for p in parameters]


_MADE, _THE_TENSOR = "which line makes a gradient where there was none?", "the tensor object from before the call"


def _compare_grads(
    trial: Trial, case: str, got: Sequence[Any], want: Sequence[Any], hint: str = "", **tolerance: float
) -> None:
    for place, (mine, theirs) in enumerate(zip(_grads(got), _grads(want), strict=True)):
        where = f"gradient {place}, {case}"
        if theirs is None:
            trial.equal(where, mine, None, hint=_MADE)
        else:
            trial.close(where, mine, theirs, hint=hint, **tolerance)


@exercise(
    "15-04.4",
    "Clip by norm, for each group",
    points=20,
    demands=11,
    stand_in=lambda: _clip,
    stand_in_name="clip_grad_norm_",
)
def clip_grad_norm(trial: Trial, answer: Any) -> None:
    """`answer(parameters, max_norm, norm_type, nonfinite)` clips in place and gives norms."""
    shapes = [[(3,)], [(4, 2), (), (5,)], [(1, 1), (2, 3, 2), (7,), (2,)]]
    orders = (2.0, 1.0, 3.0, 0.5, math.inf, 2)
    factor = "by which number is each gradient multiplied?"
    item = "norm and gradients of one set, as clip_grad_norm_"
    with trial.group(item, hint="of what is this the norm, and when?", see=1):
        for some in shapes:
            for p in orders:
                ours = _with_grads(*some)
                exact = float(torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in _grads(ours)]), p))
                for limit in (0.5 * exact, exact * (1 - 1e-3), exact * (1 + 1e-3), 10 * exact, 0.0, math.inf):
                    mine, theirs = _twin(ours), _twin(ours)
                    case = f"norm_type {p}, max_norm {limit:.5g}, norm {exact:.5g}"
                    want = clip_grad_norm_(theirs, limit, p)
                    trial.close(f"norm, {case}", answer(mine, limit, p), want, rtol=1e-8)
                    _compare_grads(trial, case, mine, theirs, factor, rtol=1e-8)
        tiny = _with_grads((3,), (2,))
        for q in tiny:
            q.grad *= 1e-6
        mine, theirs = _twin(tiny), _twin(tiny)
        answer(mine, 1e-6)
        clip_grad_norm_(theirs, 1e-6)
        _compare_grads(trial, "a norm of about 1e-6", mine, theirs, factor, rtol=1e-8, atol=1e-14)
    with trial.group("a tensor, a list, a tuple, a generator", hint="how often may an iterable be walked?"):
        forms = (list, tuple, iter, lambda ps: (p for p in ps), lambda ps: nn.ParameterList(ps))
        for form in forms:
            mine, theirs = _with_grads((3,), (2, 2)), None
            theirs = _twin(mine)
            got, want = answer(form(mine), 0.1), clip_grad_norm_(theirs, 0.1)
            name = type(form(mine)).__name__
            trial.close(f"norm, {name}", got, want, rtol=1e-8)
            _compare_grads(trial, name, mine, theirs, rtol=1e-8)
        (mine,) = _with_grads((3, 2))
        (theirs,) = _twin([mine])
        hint = "what does a loop over a tensor give?"
        trial.close("norm, a tensor", answer(mine, 0.1), clip_grad_norm_(theirs, 0.1), rtol=1e-8, hint=hint)
        _compare_grads(trial, "a tensor", [mine], [theirs], hint, rtol=1e-8)
    with trial.group("the gradients are changed in place", hint="which tensor does the optimizer hold?"):
        ours = _with_grads((3,), (2, 2))
        held = _grads(ours)
        answer(ours, 0.1)
        for place, (q, g) in enumerate(zip(ours, held, strict=True)):
            trial.that(f"gradient {place}", q.grad is g, expected=_THE_TENSOR, got="another object")
        total = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in held])).item()
        trial.close("norm of the tensors that were held", total, 0.1, rtol=1e-4)
    with trial.group("groups, each by its own norm and max_norm", hint="whose norm, and whose limit?"):
        for limits in ((None, 0.3, None), (0.0, None), (None,), (5.0, 0.2, 100.0, None), (math.inf, None)):
            sets = [_with_grads((4,), (2, 3)) for _ in limits]
            twins = [_twin(ps) for ps in sets]
            groups = [
                {"params": ps, **({} if limit is None else {"max_norm": limit})}
                for ps, limit in zip(sets, limits, strict=True)
            ]
            keys = [sorted(group) for group in groups]
            p = random.choice((1.0, 2.0, math.inf))
            got = answer(groups, 0.7, p)
            want = [
                clip_grad_norm_(ps, 0.7 if limit is None else limit, p) for ps, limit in zip(twins, limits, strict=True)
            ]
            case = f"norm_type {p}, max_norm {limits}, otherwise 0.7"
            hint = "of which entries is each norm, for which p, and what is returned?"
            trial.close(f"norms, {case}", got, torch.stack(want), rtol=1e-8, hint=hint)
            for place, (ps, qs) in enumerate(zip(sets, twins, strict=True)):
                _compare_grads(trial, f"group {place}, {case}", ps, qs, rtol=1e-8)
            for place, (group, before) in enumerate(zip(groups, keys, strict=True)):
                trial.equal(f"keys of group {place}", sorted(group), before, hint="which line writes into a group?")
        optimizer = torch.optim.SGD(
            [{"params": _with_grads((3,)), "max_norm": 0.2}, {"params": _with_grads((2,))}], 0.1
        )
        before = [_twin(group["params"]) for group in optimizer.param_groups]
        answer(optimizer.param_groups, 0.4)
        for group, twin, limit in zip(optimizer.param_groups, before, (0.2, 0.4), strict=True):
            clip_grad_norm_(twin, limit)
            _compare_grads(trial, "param_groups of an optimizer", group["params"], twin, rtol=1e-8)
    with trial.group("without gradients", hint="what is left if nothing has a gradient?"):
        for some in ([None], [None, (3,), None, (2,)], [None, None], []):
            mine = _with_grads(*some)
            theirs = _twin(mine)
            want = clip_grad_norm_(theirs, 0.1) if some else torch.tensor(0.0)
            got = answer(mine, 0.1)
            trial.close(f"norm, {len(some)} parameters", got.double(), want.double(), rtol=1e-8)
            trial.equal("dimensions", got.dim(), 0)
            _compare_grads(trial, f"{len(some)} parameters", mine, theirs, rtol=1e-8)
        empty = [{"params": _with_grads(None)}, {"params": _with_grads((3,))}, {"params": []}]
        want = clip_grad_norm_(_twin(empty[1]["params"]), 9.0)
        got = answer(empty, 0.1)
        trial.close("groups without gradients", got.double(), torch.stack([0 * want, want, 0 * want]), rtol=1e-8)
    with trial.group("several dtypes in one set", hint="which dtype has each gradient, and the factor?"):
        kinds = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
        mine = [q for dtype in kinds for q in _with_grads((30,), dtype=dtype)]
        theirs = _twin(mine)
        got, want = answer(mine, 0.5), clip_grad_norm_(theirs, 0.5)
        trial.close("norm", got.double(), want.double(), rtol=2e-2)
        _compare_grads(trial, "four dtypes", mine, theirs, rtol=2e-2, atol=1e-3)
    bad = [(value, place) for value in (math.inf, -math.inf, math.nan) for place in (0, 1)]

    def spoilt(value: float, place: int) -> tuple[list[list[nn.Parameter]], list[dict[str, Any]]]:
        sets = [_with_grads((3,), (2,), None) for _ in range(3)]
        sets[2 * place][place].grad[1] = value
        return sets, [{"params": ps, "max_norm": 0.2 + k} for k, ps in enumerate(sets)]

    with trial.group("keep: a non-finite norm as in PyTorch", hint="what does the formula give for such a norm?"):
        for value, place in bad:
            for how in ({}, {"nonfinite": "keep"}):
                sets, groups = spoilt(value, place)
                twins = [_twin(ps) for ps in sets]
                want = [clip_grad_norm_(ps, 0.2 + k) for k, ps in enumerate(twins)]
                case = f"one entry is {value}, nonfinite {'given' if how else 'left out'}"
                trial.close(f"norms, {case}", answer(groups, 1.0, **how), torch.stack(want), rtol=1e-8)
                for k, (ps, qs) in enumerate(zip(sets, twins, strict=True)):
                    _compare_grads(trial, f"group {k}, {case}", ps, qs, rtol=1e-8)
    sets, groups = spoilt(1.0, 0)
    with _Functions() as called, _Operations() as ran:
        answer(groups, 1.0)
        answer(sets[0], 0.1)
    reads = {"item", "tolist", "numpy", "__array__", "cpu", "_local_scalar_dense", "is_nonzero", "equal", "nonzero"}
    reads = sorted(reads & {*called.names, *ran.names})
    trial.that(
        "keep: no value is read from the device",
        not reads,
        expected="no read",
        got=", ".join({"_local_scalar_dense": "a tensor taken as a number"}.get(name, name) for name in reads),
        hint="which line needs a number in Python?",
        see=3,
        free=True,
    )

    def finite_is_clipped(how: str) -> None:
        sets, groups = spoilt(0.5, 0)
        twins = [_twin(ps) for ps in sets]
        answer(groups, 1.0, nonfinite=how)
        for k, (ps, qs) in enumerate(zip(sets, twins, strict=True)):
            clip_grad_norm_(qs, 0.2 + k)
            hint = "what is done if all norms are finite?"
            _compare_grads(trial, f"group {k}, nonfinite={how!r}, all finite", ps, qs, hint, rtol=1e-8)

    late = "what was done before the bad one was met?"
    with trial.group("raise: RuntimeError, all gradients stay", hint="which norms are asked, and what is raised?"):
        for value, place in bad:
            for p in (2.0, math.inf):
                sets, groups = spoilt(value, place)
                twins = [_twin(ps) for ps in sets]
                error = outcome(lambda g=groups, p=p: answer(g, 1.0, p, "raise"))
                trial.equal(f"groups, one entry of group {2 * place} is {value}", error, "RuntimeError")
                error = outcome(lambda g=sets[2 * place], p=p: answer(g, 1.0, p, "raise"))
                trial.equal(f"one set without groups, one entry is {value}", error, "RuntimeError")
                for k, (ps, qs) in enumerate(zip(sets, twins, strict=True)):
                    case = f"gradients of group {k}, one entry of group {2 * place} is {value}"
                    trial.equal(case, _grads(ps), _grads(qs), hint=late, see=2)
        finite_is_clipped("raise")

    def are_zero(case: str, got: Sequence[Tensor | None], held: Sequence[Tensor | None]) -> None:
        for number, (now, before) in enumerate(zip(got, held, strict=True)):
            where, left = f"{number}, {case}", None if now is None else float(now.abs().sum())
            hint, see = "which gradients are set to 0, of which groups?", 2
            if before is None:
                hint, see = _MADE, None
            elif left is None:
                hint, see = "is no gradient the same as one of zeros?", None
            elif math.isnan(left):
                hint = "what is 0 times infinity?"
            want = None if before is None else 0.0
            trial.equal(f"sum of the magnitudes in gradient {where}", left, want, hint=hint, see=see)

    with trial.group("zero: all gradients of all groups are 0", hint="what is done to each gradient?"):
        for value, place in bad:
            for p in (2.0, 1.0):
                sets, groups = spoilt(value, place)
                held = [g for ps in sets for g in _grads(ps)]
                want = [clip_grad_norm_(_twin(ps), 1.0, p) for ps in sets]
                got = answer(groups, 1.0, p, "zero")
                case = f"one entry of group {2 * place} is {value}"
                hint = "are these the norms from before?"
                trial.close(f"norms, {case}", got, torch.stack(want), rtol=1e-8, hint=hint)
                for k, ps in enumerate(sets):
                    are_zero(f"group {k}, {case}", _grads(ps), held[3 * k : 3 * k + 3])
                hint = "which tensor does the optimizer hold?"
                for k, (now, before) in enumerate(zip([g for ps in sets for g in _grads(ps)], held, strict=True)):
                    where = f"gradient {k % 3}, group {k // 3}, {case}"
                    trial.that(where, now is before, expected=_THE_TENSOR, got="another object", hint=hint)
                sets, groups = spoilt(value, place)
                held = _grads(sets[2 * place])
                answer(sets[2 * place], 1.0, p, "zero")
                are_zero(f"one set without groups, one entry is {value}", _grads(sets[2 * place]), held)
        finite_is_clipped("zero")
    with trial.group("another nonfinite raises ValueError", hint="is it looked at in any case?"):
        for how in ("skip", "", "Zero"):
            found = outcome(lambda how=how: answer(_with_grads((3,)), 1.0, 2.0, how))
            trial.equal(f"nonfinite={how!r}, all finite", found, "ValueError")


# ---------------------------------------------------------------- 15-04.5


class _EMA:
    """Stand-in of exercise 5: Shadow and its three methods, name by name."""

    def __init__(self, model: nn.Module, decay: float = 0.999, warmup: bool = True) -> None:
        self.decay, self.warmup, self.updates, self.swapped = decay, warmup, 0, False
        learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.live = {**learning, **dict(model.named_buffers())}
        self.shadow = {name: t.detach().clone() for name, t in self.live.items()}

    def decay_now(self) -> float:
        early = (1 + self.updates) / (10 + self.updates) if self.warmup else 1.0
        return min(self.decay, early) if self.updates else 0.0

    @torch.no_grad()
    def update(self) -> None:
        if self.swapped:
            raise RuntimeError("update() while the averages are swapped in")
        for name, mine in self.shadow.items():
            if mine.is_floating_point():
                mine.lerp_(self.live[name], 1 - self.decay_now())
            else:
                mine.copy_(self.live[name])
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        if self.swapped:
            raise RuntimeError("applied() inside of applied()")
        own = copy.deepcopy({name: t.detach() for name, t in self.live.items()})
        self.swapped = True
        try:
            with torch.no_grad():
                for name, t in self.live.items():
                    t.copy_(self.shadow[name])
            yield
        finally:
            with torch.no_grad():
                for name, t in self.live.items():
                    t.copy_(own[name])
            self.swapped = False

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "shadow": {name: t.clone() for name, t in self.shadow.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        given = state["shadow"]
        wrong = [n for n in {*given, *self.shadow} if n not in given or n not in self.shadow]
        wrong += [n for n in self.shadow if n in given and given[n].shape != self.shadow[n].shape]
        if wrong:
            raise ValueError(f"these differ: {sorted(wrong)}")
        for name, mine in self.shadow.items():
            mine.copy_(given[name])
        self.updates = state["updates"]


class _Averaged(nn.Module):
    """Tied, frozen, 0-d and half-precision parameters, statistics and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.tall = nn.Parameter(torch.randn(3, 2))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x))) * self.scale


def _moved(model: nn.Module, seed: int) -> None:
    """Change everything that a step of training may change, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))
        model.train()(torch.randn(6, 3, generator=generator))
        model.flag.logical_not_()


def _followed(answer: Any, updates: int, decay: float = 0.9, warmup: bool = True) -> tuple[_Averaged, Any]:
    """A model that has moved, and its average; the model has gone one step further."""
    model = _Averaged()
    ema = answer(model, decay, warmup)
    for number in range(updates):
        _moved(model, number)
        ema.update()
    _moved(model, 1000)
    return model, ema


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items()}


def _objects(model: nn.Module) -> dict[str, int]:
    return {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}


def _same_objects(trial: Trial, case: str, now: Mapping[str, int], before: Mapping[str, int]) -> None:
    other = [name for name in (before | now) if now.get(name) != before.get(name)]
    trial.that(case, now == before, expected="the objects from before", got=f"others for {', '.join(other)}")


def _same_names(trial: Trial, case: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor], hint: str) -> None:
    lists = {"missing": [n for n in want if n not in got], "too many": [n for n in got if n not in want]}
    shown = "; ".join(f"{kind}: {', '.join(map(str, names))}" for kind, names in lists.items() if names)
    trial.that(case, not shown, expected="the names of the averages", got=shown, hint=hint)


@exercise(
    "15-04.5", "Swap in, save, resume", points=25, demands=14, stand_in=lambda: _EMA, stand_in_name="one of the check's"
)
def ema(trial: Trial, answer: Any) -> None:
    """`answer(model, decay, warmup)` is a Shadow with applied, state_dict and load_state_dict."""
    names = ("update", "applied", "state_dict", "load_state_dict", "decay_now")
    missing = [name for name in names if not callable(getattr(answer, name, None))]
    trial.needs(
        "is a Shadow with three more methods",
        isinstance(answer, type) and not missing,
        expected="a class derived from Shadow",
        got=f"{getattr(answer, '__name__', repr(answer))}, without {', '.join(missing) or 'being a class'}",
        hint="which class does the task name?",
    )
    model, ema = _followed(answer, 3)
    averages, own, state = _copied(ema.shadow), _copied(ema.live), _copied(model.state_dict())
    objects = _objects(model)
    with trial.group("inside, the model has the averages", hint="what is written where, and of which names?", see=1):
        with ema.applied():
            inside = _copied(model.state_dict())
            inside_objects = _objects(model)
        for name, wanted in averages.items():
            trial.equal(name, inside[name], wanted)
        trial.equal("a frozen parameter", inside["frozen"], state["frozen"])
        trial.equal("the tied weight", inside["second.weight"], averages["first.weight"])
    item = "afterwards it has its own, bit for bit, also after an exception, which goes on"

    class _Interrupt(BaseException):
        pass

    with trial.group(item, hint="in which state does a block leave the object?", see=2):
        hint = "which of the own values are kept, how, and put back?"
        trial.equal("after a block", _copied(model.state_dict()), state, hint=hint, see=1)
        with torch.no_grad():
            model.wide.copy_(torch.tensor([math.nan, -math.inf, -0.0, 1e300]))
            model.first.bias.copy_(torch.tensor([1e-40, 3e38, 1.0]))
        odd = _copied(model.state_dict())
        for number in range(2):
            with ema.applied():
                model.eval()(torch.randn(2, 3))
            trial.equal(f"odd values, after block {number + 1}", _copied(model.state_dict()), odd, hint=hint, see=1)
        for error in (ValueError("bad"), KeyError("key"), StopIteration(), KeyboardInterrupt(), _Interrupt()):
            model, ema = _followed(answer, 2)
            own, raised = _copied(model.state_dict()), None
            try:
                with ema.applied():
                    model.eval()(torch.randn(2, 3))
                    raise error
            except BaseException as caught:
                raised = caught.__cause__ if isinstance(error, StopIteration) and caught is not error else caught
            kind = type(error).__name__
            got, want = (
                "no exception" if raised is None else f"another object, {raised!r}",
                f"the {error!r} raised inside",
            )
            hint = "who catches it, and what is raised then?"
            trial.that(f"{kind} goes on", raised is error, expected=want, got=got, hint=hint, see=1)
            hint = "what runs in any case?"
            trial.equal(f"values after {kind}", _copied(model.state_dict()), own, hint=hint, see=1)
    with trial.group("the same tensor objects", hint="what does an optimizer hold?", see=1):
        _same_objects(trial, "inside", inside_objects, objects)
        model, ema = _followed(answer, 2)
        before = _objects(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        with ema.applied():
            pass
        _same_objects(trial, "afterwards", _objects(model), before)
        model(torch.randn(4, 3)).sum().backward()
        own = model.norm.bias.detach().clone()
        optimizer.step()
        trial.equal("the optimizer still moves the model", bool((model.norm.bias != own).any()), True)
    with trial.group("what is written inside is lost", hint="whose memory is written to inside?", see=1):
        model, ema = _followed(answer, 2)
        averages, own = _copied(ema.shadow), _copied(model.state_dict())
        with ema.applied():
            _moved(model, 7)
        trial.equal("the averages", _copied(ema.shadow), averages)
        hint = "which values are put back?"
        trial.equal("the model afterwards", _copied(model.state_dict()), own, hint=hint, see=1)
    with trial.group("update and applied inside raise RuntimeError and change nothing", see=2):
        model, ema = _followed(answer, 2)
        averages, own, count = _copied(ema.shadow), _copied(model.state_dict()), ema.updates
        with ema.applied():
            inside = _copied(model.state_dict())

            def again() -> None:
                with ema.applied():
                    pass

            later = "update(), after a second applied()"
            for name, action in (("update()", ema.update), ("applied()", again), (later, ema.update)):
                trial.equal(f"{name}, inside", outcome(action), "RuntimeError")
                trial.equal(f"the averages after {name}", _copied(ema.shadow), averages)
                trial.equal(f"the model after {name}", _copied(model.state_dict()), inside)
            trial.equal("updates", ema.updates, count)
        trial.equal("the model afterwards", _copied(model.state_dict()), own)
    with trial.group("afterwards both work again", see=2):
        for error in (None, RuntimeError("evaluation failed")):
            try:
                with ema.applied():
                    if error is not None:
                        raise error
            except RuntimeError:
                pass
            count, after = ema.updates, "after a block" + " that raised" * (error is not None)
            trial.equal(f"update() {after}", outcome(ema.update), "no exception")
            trial.equal(f"updates {after}", ema.updates, count + 1)
            trial.equal(f"applied() {after}", outcome(ema.applied().__enter__), "no exception")
            model, ema = _followed(answer, 2)
    with trial.group("state_dict gives updates and shadow", hint="which keys, and of which kinds?"):
        for updates in (0, 1, 4):
            model, ema = _followed(answer, updates)
            state = ema.state_dict()
            trial.equal("keys", [key in state for key in ("shadow", "updates")], [True, True])
            hint = "may it be called inside of applied()?"
            with ema.applied():
                inside = trial.call("state_dict() inside of applied()", ema.state_dict, hint=hint)
            hint = "which tensors are the averages?"
            _same_names(trial, "names in shadow, inside of applied()", inside["shadow"], ema.shadow, hint)
            case = "shadow, inside of applied()"
            trial.equal(case, dict(inside["shadow"]), _copied(ema.shadow), hint=hint)
            trial.equal("updates", state["updates"], updates)
            _same_names(trial, "names in shadow", state["shadow"], ema.shadow, hint)
            trial.equal("shadow", dict(state["shadow"]), _copied(ema.shadow), hint=hint)
            trial.equal("with a graph", [n for n, t in state["shadow"].items() if t.requires_grad], [])
    with trial.group("state_dict is a snapshot", hint="whose memory is in it?"):
        model, ema = _followed(answer, 2)
        state = ema.state_dict()
        kept = copy.deepcopy(state)
        for seed in range(3):
            _moved(model, seed)
            ema.update()
        trial.equal("updates", state["updates"], kept["updates"])
        trial.equal("shadow", dict(state["shadow"]), dict(kept["shadow"]))
    with trial.group("it passes torch.save and torch.load", hint="which types may a checkpoint hold?"):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file)
        trial.equal("shadow", dict(loaded["shadow"]), dict(state["shadow"]))
    with trial.group("a resumed run gives the same bits", hint="what does the next update depend on?"):
        for warmup, decay in ((True, 0.9), (False, 0.97)):
            for saved_after, before in ((4, 0), (1, 6), (0, 3)):
                model, ema = _followed(answer, saved_after, decay, warmup)
                weights, state = copy.deepcopy(model.state_dict()), ema.state_dict()
                other, resumed = _followed(answer, before, decay, warmup)
                turned = dict(reversed(state["shadow"].items()))  # names in another order
                renamed, hint = {**state, "shadow": turned}, "does the order of the names matter?"
                trial.call(
                    "load_state_dict(state), names in another order",
                    lambda resumed=resumed, state=renamed: resumed.load_state_dict(state),
                    hint=hint,
                )
                trial.equal("decay", resumed.decay, decay, hint="what may loading change?")
                other.load_state_dict(weights)
                for step in range(4):
                    for m, e in ((model, ema), (other, resumed)):
                        _moved(m, step)
                        e.update()
                    case = f"saved after {saved_after}, {step + 1} updates later, warmup {warmup}"
                    trial.equal(f"updates, {case}", resumed.updates, ema.updates)
                    hint = "which tensors does update() write to?"
                    trial.equal(f"averages, {case}", _copied(resumed.shadow), _copied(ema.shadow), hint=hint, see=1)
                with resumed.applied():
                    inside = _copied(other.state_dict())
                trial.equal("swapped in", {n: inside[n] for n in ema.shadow}, _copied(ema.shadow))
    with trial.group("loading copies to the dtype of the averages", hint="what is kept of what was there?"):
        model, ema = _followed(answer, 2)
        state = ema.state_dict()
        wide = {n: t.double() if t.is_floating_point() else t for n, t in state["shadow"].items()}
        kinds = {n: t.dtype for n, t in ema.shadow.items()}
        _, ema = _followed(answer, 1)
        ema.load_state_dict({"updates": 9, "shadow": wide})
        trial.equal("dtypes", {n: t.dtype for n, t in ema.shadow.items()}, kinds)
        hint = "which tensors are copied?"
        trial.equal("values", _copied(ema.shadow), dict(state["shadow"]), hint=hint)
    with trial.group("state stays as it is, and is not needed afterwards", hint="whose memory is written to?"):
        model, ema = _followed(answer, 2)
        state = copy.deepcopy(ema.state_dict())
        kept = copy.deepcopy(state)
        ema.load_state_dict(state)
        trial.equal("keys of state", sorted(state), sorted(kept), hint="which line changes state?")
        _moved(model, 5)
        ema.update()
        trial.equal("state after an update", dict(state["shadow"]), dict(kept["shadow"]))
        trial.equal("keys of state after an update", sorted(state), sorted(kept), hint="which line changes state?")
        averages = _copied(ema.shadow)
        for t in state["shadow"].values():
            t.zero_()
        state["shadow"].clear()
        trial.equal("averages after state was overwritten", _copied(ema.shadow), averages)
    with trial.group("loading doesn't touch the model", hint="which tensors belong to the model?"):
        model, ema = _followed(answer, 3)
        own = _copied(model.state_dict())
        ema.load_state_dict(_followed(answer, 1)[1].state_dict())
        trial.equal("the model", _copied(model.state_dict()), own)
        model, ema = _followed(answer, 3)
        own, state = _copied(model.state_dict()), _followed(answer, 2)[1].state_dict()
        kept = copy.deepcopy(state)
        with ema.applied():
            inside = _copied(model.state_dict())
            hint = "may it be called inside of applied()?"
            trial.call("load_state_dict(state) inside", lambda: ema.load_state_dict(state), hint=hint)
            trial.equal("the model inside, loaded inside", _copied(model.state_dict()), inside)
            hint = "does loading end the block?"
            trial.equal("update() after loading inside", outcome(ema.update), "RuntimeError", hint=hint)
        trial.equal("the model afterwards, loaded inside", _copied(model.state_dict()), own)
        trial.equal("averages, loaded inside", _copied(ema.shadow), dict(kept["shadow"]))
        trial.equal("updates, loaded inside", ema.updates, kept["updates"])
    item = "other names or shapes raise ValueError with the name, nothing is changed"
    with trial.group(item, hint="what was written before the mismatch was met?", see=3):
        compared = "which names and shapes are compared, and what is raised?"
        differs = {
            "missing": "is missing",
            "left over": "is one too many",
            "a shape": "has another shape",
            "a shape that broadcasts": "has a shape that broadcasts",
            "a 0-d shape": "has shape (1,) instead of ()",
            "turned over": "has shape (2, 3) instead of (3, 2)",
        }
        for kind in differs:
            model, ema = _followed(answer, 2)
            averages, count = _copied(ema.shadow), ema.updates
            shadow = _copied(_followed(answer, 4)[1].shadow)
            names = {"left over": "extra.weight", "a 0-d shape": "scale", "turned over": "tall"}
            name = names.get(kind, "norm.running_var")
            if kind == "missing":
                del shadow[name]
            else:
                shapes = {
                    "a shape": (2, 5),
                    "a shape that broadcasts": (1,),
                    "a 0-d shape": (1,),
                    "turned over": (2, 3),
                }
                shadow[name] = torch.ones(shapes.get(kind, (2,)))
            error = None
            try:
                ema.load_state_dict({"updates": 4, "shadow": shadow})
            except Exception as caught:
                error = caught
            right = isinstance(error, ValueError) and name in str(error)
            got, case = "no exception" if error is None else repr(error)[:160], f"{name} {differs[kind]}"
            trial.that(case, right, expected=f"ValueError naming {name!r}", got=got, hint=compared, see=3)
            trial.equal(f"averages, {case}", _copied(ema.shadow), averages)
            trial.equal(f"updates, {case}", ema.updates, count)
