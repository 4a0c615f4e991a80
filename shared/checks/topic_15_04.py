"""Checks of the exercises in 15-04, Custom Loss Functions & Training Utilities."""

import copy
import math
import pickle
from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shared.checks.exercise import exercise
from shared.checks.trial import Trial
from shared.checks.words import Sample, derived, gradients, outcome, raises, samples, snapshot, unchanged

_FORMATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_READ = {"item", "tolist", "__bool__", "__float__", "is_nonzero", "allclose"}
_FORGOT = "on which device is each tensor that you make? The inputs lie on a pretended accelerator"


class _Functions(TorchFunctionMode):
    """Notes which functions are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _device_of_result(answer, *inputs) -> str:
    """Where the result lies, of inputs on a pretended accelerator."""
    from shared.pretended import pretended_accelerator  # slow to load

    with pretended_accelerator() as accelerator:
        try:
            return answer(*(x.to(accelerator) for x in inputs)).device.type
        except TypeError as error:
            if "float64" not in str(error):
                raise
            return accelerator.type  # a Mac's GPU refuses float64, others have it


# ---- 15-04.1


def _smoothed(logits, labels, epsilon=0.1, weight=None, ignore_index=-100, reduction="mean") -> Tensor:
    """The reference: PyTorch's own, with half precision widened."""
    wide = _widened(logits)
    weight = None if weight is None else weight.to(wide.dtype)
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": epsilon}
    return F.cross_entropy(wide, labels, weight, **options).to(logits.dtype)


def _classified(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits and labels."""
    return 3 * torch.randn(shape, dtype=torch.float64).to(dtype), torch.randint(shape[1], (shape[0], *shape[2:]))


@exercise(
    "15-04.1",
    "Label smoothing in log space",
    points=15,
    demands=6,
    stand_in=lambda: _smoothed,
    stand_in_name="F.cross_entropy",
)
def label_smoothing_cross_entropy(trial: Trial, answer: Any) -> None:
    """`answer(logits, labels, epsilon, weight, ignore_index, reduction)` is a smoothed cross-entropy."""
    with _Functions() as called:
        answer(*_classified(3, 4))
    used = sorted(called.names & {"cross_entropy", "nll_loss"})
    item = "is written without cross_entropy and nll_loss"
    hint = "which functions does the task exclude?"
    trial.needs(item, not used, expected="operations of your own", got=", ".join(used), hint=hint)

    same = partial(samples, trial, answer, _smoothed)
    shapes = [(5, 7), (6, 2), (1, 3), (6, 1)]
    hows = ("none", "sum", "mean")
    hint = "what does each `reduction` return, in which shape and which dtype?"
    with trial.group("reductions none, sum and mean", hint=hint):
        for shape in shapes:
            for epsilon in (0.0, 0.3, 1.0):
                same([Sample(f"reduction {how} {shape}", *_classified(*shape), epsilon, reduction=how) for how in hows])
            same([Sample(f"epsilon and reduction by default, {shape}", *_classified(*shape))])

    # whoever has forgotten a reduction is told so once
    hows = ("mean",) if trial.has_failed else hows
    hint = "whose weight does each term have? what does an ignored entry cost, and which entries does the mean count?"
    with trial.group("class weights and ignored labels; the arguments stay", hint=hint, see=1):
        for number in (-100, 255, 0):
            logits, labels = _classified(5, 7)
            labels[:2] = torch.tensor([number, 1])
            for weight in (None, 0.1 * torch.rand(7, dtype=torch.float64)):
                case = f"{'no' if weight is None else 'with'} weights, ignore_index {number}"
                same([Sample(f"{how}, {case}", logits, labels, 0.2, weight, number, how) for how in hows])

    with trial.group("gradients", hint="which dtype has each tensor? what has no derivative?"):
        for shape in shapes:
            logits, labels = _classified(*shape)
            logits.requires_grad_()
            same([Sample(f"reduction {how}", logits, labels, 0.2, reduction=how) for how in hows], look=gradients)

    with trial.group("the same for logits (N, C, d1, …)", hint="which dimension has the classes?", see=1):
        for shape in ((3, 5, 6), (2, 4, 3, 2)):
            logits, labels = _classified(*shape)
            labels.view(-1)[0] = -100
            weight = torch.rand(shape[1], dtype=torch.float64)
            same([Sample(f"reduction {how} {shape}", logits, labels, 0.2, weight, reduction=how) for how in hows])

    with trial.group("the result is on the device of the logits", hint=_FORGOT, see=3, free=True):
        trial.equal("float32", _device_of_result(answer, *_classified(7, 5, dtype=torch.float32)), "mps")

    item = "logits of ±10,000: the loss of float64 in the dtype of the logits, and no NaN in the gradient"
    hint = "which operation leaves the range of its dtype? in which dtype does the result come back?"
    with trial.group(item, hint=hint, see=2):
        for dtype in _FORMATS:
            for classes in (2, 40):
                logits = 10_000 * torch.randn(60, classes).sign()
                logits[:2] = torch.tensor([[10_000.0], [-10_000.0]])
                inputs = logits.to(dtype).requires_grad_(), torch.randint(classes, (60,))
                case = f"{dtype}, {classes} classes"
                same([Sample(f"{how}, {case}", *inputs, 0.2, reduction=how) for how in hows], rtol=2e-2)
                same([Sample(f"gradient, {case}", *inputs, 0.2)], look=gradients, rtol=2e-2, atol=1e-4)


# ---- 15-04.2


def _nt_xent(first: Tensor, second: Tensor, temperature: float = 0.5) -> Tensor:
    """The reference."""
    z = F.normalize(_widened(torch.cat([first, second])), dim=1)
    similarities = z @ z.T / temperature
    others = similarities.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -torch.inf)
    of_partner = torch.cat([similarities.diagonal(len(first)), similarities.diagonal(-len(first))])
    return (others.logsumexp(dim=1) - of_partner).mean().to(first.dtype)


def _views(n: int, d: int) -> tuple[Tensor, Tensor]:
    """Two views of n images; the rows have all lengths."""
    first = torch.randn(n, d, dtype=torch.float64)
    second = F.normalize(first, dim=1) + 0.1 * torch.randn_like(first)
    return 10.0 ** torch.randint(-3, 4, (n, 1)) * first, 10.0 ** torch.randint(-3, 4, (n, 1)) * second


@exercise("15-04.2", "NT-Xent", points=20, demands=4, stand_in=lambda: _nt_xent, stand_in_name="pair by pair")
def nt_xent_loss(trial: Trial, answer: Any) -> None:
    """`answer(first, second, temperature)` is the mean loss of all views."""
    same = partial(samples, trial, answer, _nt_xent)
    sizes = [(1, 3), (2, 2), (3, 1), (5, 4), (16, 8)]
    hint = "who is in the denominator, which similarity do the rows have, in which dtype?"
    with trial.group("the mean over all views of both sides, whatever their lengths", hint=hint, see=1):
        for n, d in sizes:
            same([Sample(f"{n} images, {d} dimensions, temperature {t}", *_views(n, d), t) for t in (0.01, 2)])
        same([Sample("one image, opposite views", *torch.tensor([[[1.0, 2.0]], [[-1.0, -2.0]]]), 0.01)])
    with trial.group("gradients reach both inputs", hint="which line cuts the graph?"):
        for n, d in sizes:
            leaves = torch.randn(2, n, d, dtype=torch.float64).unbind()
            same([Sample(f"{n} images", *(view.requires_grad_() for view in leaves), 2)], look=gradients)
    with trial.group("the result is on the device of the inputs", hint=_FORGOT, see=3, free=True):
        first, second = _views(4, 3)
        trial.equal("float32", _device_of_result(answer, first.float(), second.float()), "mps")
    item = "entries of ±10,000, temperature 0.01: the loss of float64 in the dtype of the inputs, finite gradients"
    hint = "which number leaves the range of its dtype? in which dtype does the result come back?"
    with trial.group(item, hint=hint, see=3):
        for dtype in _FORMATS:
            views = 10_000 * torch.randn(6, 64).sign()
            near = torch.cat([-views[:, :2], views[:, 2:]], dim=1)
            inputs = [x.to(dtype).requires_grad_() for x in (views.roll(1, 0), near)]
            same([Sample(f"{dtype}", *inputs, 0.01)], rtol=2e-2)
            finite = [bool(g.isfinite().all()) for g in gradients(answer(*inputs, 0.01), *inputs)]
            trial.equal(f"finite gradients, {dtype}", finite, [True, True])


# ---- 15-04.3


class _Variance:
    """The reference: keeps all values."""

    def __init__(self):
        self.values = torch.zeros(0)

    def update(self, values):
        if values.numel():
            values = _widened(values.detach()).reshape(-1)
            self.values = torch.cat([self.values.to(values), values])

    def merge(self, other):
        self.update(other.values)

    count = property(lambda self: len(self.values))
    mean = property(lambda self: self.values.double().mean().to(self.values.dtype))

    def variance(self, correction=1):
        if self.count <= correction:
            return torch.full((), math.nan, dtype=self.values.dtype)
        return self.values.double().var(correction=correction).to(self.values.dtype)


def _seen(kind, *batches):
    """Saw the batches."""
    stats = kind()
    for batch in batches:
        stats.update(batch)
    return stats


def _merged(kind, *workers):
    """Several objects, after the first has merged the others, and each has seen another batch."""
    several = [_seen(kind, *batches) for batches in workers]
    for other in several[1:]:
        several[0].merge(other)
    for stats in several:
        stats.update(torch.arange(3.0, dtype=torch.float64))
    return several


def _told(stats, *_):
    return {"count": stats.count, "mean": stats.mean, "variance()": stats.variance(), "variance(0)": stats.variance(0)}


@exercise("15-04.3", "A variance that merges", points=20, demands=7, stand_in=lambda: _Variance, stand_in_name="ours")
def running_variance(trial: Trial, answer: Any) -> None:
    """`answer()` sees batches, merges, and knows count, mean and variance."""
    same = partial(samples, trial, partial(_seen, answer), partial(_seen, _Variance), look=_told, rtol=1e-6)
    wide = partial(torch.randn, dtype=torch.float64)
    batches = [wide(shape) + 3 for shape in ((3,), (), (2, 3), (1,), (), (17,), (2, 1, 5))]
    hint = "two batches by the formula: who is n, in which dtype?"
    with trial.group("count, mean and variance of batches", hint=hint, see=1):
        same([Sample(f"{n} batches, the last {tuple(batches[n - 1].shape)}", *batches[:n]) for n in range(1, 8)])
        same([Sample("turned over", wide(4, 5).mT)])
    empty = wide(0, 3)
    with trial.group("an empty batch changes nothing", hint="by what does the formula divide here?", see=2):
        same([Sample("after two", *batches[:2], empty), Sample("before two", empty, *batches[:2])])
    with trial.group("integers and half precision count as float32, float64 stays", hint="what is converted, when?"):
        for dtype in (torch.uint8, torch.int64, *_FORMATS):
            values = (200 * torch.rand(3000)).to(dtype)
            same([Sample(f"{dtype}", *values.split(700))], rtol=1e-4)
    hint = "what do two triples give? which line changes other?"
    with trial.group("merging workers, which go on independently", hint=hint, see=1):
        merged = partial(samples, trial, partial(_merged, answer), partial(_merged, _Variance), rtol=1e-6)
        for number in (1, 2, 5):
            workers = [[wide(1 + 4 * w) + w, wide(2), wide(5)] for w in range(number)]
            case = Sample(f"{number} workers, before and behind them one that saw nothing", [], *workers, [])
            merged([case], look=lambda several, *_: [_told(it) for it in several])
    with trial.group("NaN where nothing can be said", hint="by what is M divided, and when is that 0 or less?"):
        cases = [Sample("no batch"), *(Sample(f"{n} values", wide(n)) for n in (1, 2, 3))]
        for correction in (0, 1, 2):
            same(cases, look=lambda it, *_, c=correction: it.variance(c).double())
    with trial.group("values far from 0 with a small deviation", hint="where are two large numbers subtracted?"):
        values = 1000 + 0.1 * torch.randn(1500)
        cases = [Sample(f"batches of {size}", *values.split(size)) for size in (1, 64, 1500)]
        same(cases, look=lambda it, *_: it.variance(), rtol=1e-2)
    with trial.group("keeps neither the graph nor the values", hint="what of the batch is kept?"):
        stats = _seen(answer, wide(6).requires_grad_())
        graph = [stats.mean.requires_grad, stats.variance().requires_grad]
        trial.equal("a graph of mean, of variance", graph, [False, False])
        few, many = (len(pickle.dumps(vars(_seen(answer, *wide(n).split(4))))) for n in (40, 400))
        trial.that("400 values", many < few + 1000, expected=f"{few} bytes, as of 40", got=f"{many} bytes")


# ---- 15-04.4


def _clip(parameters, max_norm, norm_type=2.0, nonfinite="keep") -> Tensor:
    """The reference."""
    groups = list(parameters)
    grouped = isinstance(groups[0], Mapping)
    groups = groups if grouped else [{"params": groups}]
    grads = [[p.grad for p in group["params"] if p.grad is not None] for group in groups]
    norms = []
    for group, some in zip(groups, grads, strict=True):
        nothing = torch.zeros(1, device=group["params"][0].device)
        flat = [_widened(grad).flatten() for grad in some] or [nothing]
        norms.append(torch.linalg.vector_norm(torch.cat(flat), norm_type))
    fine = nonfinite == "keep" or all(bool(norm.isfinite()) for norm in norms)
    if not fine and nonfinite == "raise":
        raise RuntimeError("a gradient isn't finite")
    for group, some, norm in zip(groups, grads, norms, strict=True):
        for grad in some:
            if fine:
                grad.mul_((group.get("max_norm", max_norm) / (norm + 1e-6)).clamp(max=1.0).to(grad.dtype))
            else:
                grad.zero_()
    return torch.stack(norms) if grouped else norms[0]


def _parameters(grads):
    """Parameters with these gradients."""
    made = []
    for grad in grads:
        p = nn.Parameter(torch.zeros(2) if grad is None else torch.zeros_like(grad))
        p.grad = grad
        made.append(p)
    return made


def _clipped(function, given, *options) -> dict[str, Any]:
    """Norm and gradients afterwards, of a list of gradients, or of groups: pairs of such a list and other entries."""
    grouped = isinstance(given[0], tuple)
    groups = [{"params": _parameters(grads), **more} for grads, more in (given if grouped else [(given, {})])]
    norm = function(groups if grouped else groups[0]["params"], *options)
    return {"norm": norm, "gradients": [p.grad for group in groups for p in group["params"]]}


@exercise(
    "15-04.4", "Clip by norm, for each group", points=20, demands=8, stand_in=lambda: _clip, stand_in_name="one by one"
)
def clip_grad_norm(trial: Trial, answer: Any) -> None:
    """`answer(parameters, max_norm, norm_type, nonfinite)` clips in place and gives norms."""
    both = partial(_clipped, answer), partial(_clipped, _clip)
    same = partial(samples, trial, *both, look=lambda found, *_: found)
    wide = partial(torch.randn, dtype=torch.float64)

    def some() -> list[Tensor | None]:
        return [wide(4, 2), wide(()), wide(7)]

    hint = "by which number is each gradient multiplied, and which tensor object is p.grad afterwards?"
    with trial.group("norm and gradients of one set, in place", hint=hint, see=1):
        for order in (2.0, 1.0, 3.0, 0.5, math.inf):
            for limit in (0.01, 1.0, 1e6, math.inf):
                samples(trial, *both, [Sample(f"norm_type {order}, max_norm {limit}", some(), limit, order)])
    with trial.group("any iterable, such as net.parameters()", hint="how often can one go through a generator?"):
        of_iterator = partial(_clipped, lambda parameters, *more: answer(iter(parameters), *more))
        samples(trial, of_iterator, both[1], [Sample("a generator", some(), 0.5)], look=lambda found, *_: found)
    with trial.group("groups, each by its own norm and max_norm", hint="what does each group have of its own?"):
        groups = [(some(), {"max_norm": 0.1}), (some(), {}), (some(), {"max_norm": 1e6}), (some(), {"max_norm": 0.0})]
        for kind in ("keep", "raise", "zero"):
            same([Sample(f"{n} groups, {kind!r}", groups[:n], 1.0, 2.0, kind) for n in (1, 2, 4)])
    with trial.group("without a gradient", hint="which parameters have a norm? whose grad is None afterwards?"):
        same([Sample("some have none", [None, wide(3), None], 0.5), Sample("all have none", [None, None], 0.5)])
        same([Sample("a group has none", [([None], {}), (some(), {})], 0.5)])
    hint = "which number leaves the range of float16?"
    with trial.group("the norm is computed at least in float32", hint=hint, see=1):
        for dtype in _FORMATS:
            long = torch.full((10_000,), 1000.0, dtype=dtype)
            same([Sample(f"10,000 entries of 1,000, {dtype}", [long], 1e4)], rtol=2e-2)
        same([Sample("several dtypes", [wide(5).half(), wide(5), wide(5).float()], 0.5)], rtol=2e-2)
    bad = [(some(), {}), ([wide(2), torch.tensor([1.0, math.inf, 2.0]).double()], {"max_norm": 0.5})]
    nan = [([torch.tensor([1.0, math.nan]).double()], {}), (some(), {})]
    hint = "what does the formula give, and which line must know a number?"
    with trial.group("keep: clips as usual, reads no value from the device", hint=hint, see=3):
        same([Sample("infinity in a group", bad, 1.0), Sample("NaN in a group", nan, 1.0, 2.0, "keep")])
        with _Functions() as called:
            _clipped(answer, some(), 1.0)
        trial.equal("functions that read a value", sorted(called.names & _READ), [])
    with trial.group("raise: RuntimeError, all gradients stay", hint="what is written before you know?", see=2):
        for groups in (bad, nan):
            with unchanged(trial, "groups", groups):
                raises(trial, "groups", partial(_clipped, answer, groups, 1.0, 2.0, "raise"), RuntimeError)
    with trial.group("zero: all gradients of all groups are 0", hint="what is 0 times infinity?", see=2):
        same([Sample("infinity", bad, 1.0, 2.0, "zero"), Sample("NaN", nan, 1.0, 2.0, "zero")])


# ---- 15-04.5


class Shadow:
    """As in the lesson, name by name."""

    def __init__(self, model, decay=0.999, warmup=True):
        self.decay = decay
        self.warmup = warmup
        self.updates = 0
        self.swapped = False
        learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.live = {**learning, **dict(model.named_buffers())}
        self.shadow = {name: t.detach().clone() for name, t in self.live.items()}

    @torch.no_grad()
    def update(self):
        if self.swapped:
            raise RuntimeError("swapped in")
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        for name, mine in self.shadow.items():
            if mine.is_floating_point() and self.updates:
                mine.lerp_(self.live[name], 1 - decay)
            else:
                mine.copy_(self.live[name])
        self.updates += 1


class _EMA(Shadow):
    """The stand-in."""

    @contextmanager
    def applied(self):
        if self.swapped:
            raise RuntimeError("swapped in")
        own = _copied(self.live)
        self.swapped = True
        try:
            _write(self.live, self.shadow)
            yield
        finally:
            _write(self.live, own)
            self.swapped = False

    def state_dict(self):
        return {"updates": self.updates, "shadow": _copied(self.shadow)}

    def load_state_dict(self, state):
        shapes, given = ({name: t.shape for name, t in one.items()} for one in (self.shadow, state["shadow"]))
        if shapes != given:
            raise ValueError(f"{shapes} and {given} differ")
        _write(self.shadow, state["shadow"])
        self.updates = state["updates"]


def _copied(tensors):
    return {name: t.detach().clone() for name, t in tensors.items()}


@torch.no_grad()
def _write(targets, values):
    for name, target in targets.items():
        target.copy_(values[name])


class _Averaged(nn.Module):
    """Parameters in two dtypes, statistics and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.brief = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.tall = nn.Parameter(torch.randn(3, 2))


def _train(model, ema, steps):
    """Change what a step changes, and update the average."""
    for _ in range(steps):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        model.norm(torch.randn(5, 3))
        ema.update()


def _followed(answer, steps=3):
    """A model and its average after some steps and another change."""
    model = _Averaged()
    ema = answer(model)
    _train(model, ema, steps)
    with torch.no_grad():
        model.brief.neg_()
        model.norm(torch.randn(5, 3))
    return model, ema


def _objects(model) -> list[int]:
    return [id(t) for t in model.state_dict(keep_vars=True).values()]


@exercise("15-04.5", "Swap in, save, resume", points=25, demands=9, stand_in=lambda: _EMA, stand_in_name="ours")
def ema(trial: Trial, answer: Any) -> None:
    """`answer(model, decay, warmup)` is a Shadow with applied, state_dict and load_state_dict."""
    derived(trial, answer, "Shadow")
    model, ema = _followed(answer)
    averages = _copied(ema.shadow)
    own = snapshot(model)
    objects = _objects(model)
    with trial.group("inside, the model has the averages", hint="what is written where, and of which names?", see=1):
        with ema.applied(), torch.no_grad():
            inside = _copied(model.state_dict())
            objects_inside = _objects(model)
            for t in ema.live.values():
                t.fill_(7)
        trial.equal("the tensors of live", inside, averages)
    hint = "which own values are kept, how, and put back? which memory do model and averages share inside?"
    with trial.group("what was written inside is lost: the model has its own values", hint=hint, see=1, free=True):
        trial.equal("the model", snapshot(model), own)
        trial.equal("the averages", ema.shadow, averages)
    with trial.group("the tensors stay the same objects", hint="what does an optimizer hold?", see=1, free=True):
        trial.equal("inside and afterwards", [objects_inside, _objects(model)], [objects, objects])
    with trial.group("also after an exception, which is passed on", hint="what runs in any case?", see=1):
        model, ema = _followed(answer)
        own = model.tall.detach().clone()

        def fail() -> None:
            with ema.applied():
                raise ValueError("a failed evaluation")

        trial.equal("how the block ends", outcome(fail), "ValueError")
        trial.equal("a parameter afterwards", model.tall, own)
        hint = "in which state does such a block leave the object?"
        trial.equal("update() afterwards", outcome(ema.update), "no exception", hint=hint, see=2)
    with trial.group("inside, update and applied raise RuntimeError", hint="who says whether we are inside?", see=2):
        _, ema = _followed(answer)
        with ema.applied():
            raises(trial, "applied()", lambda: ema.applied().__enter__(), RuntimeError)
            raises(trial, "update()", ema.update, RuntimeError)
    with trial.group("state_dict is a snapshot", hint="whose memory do its tensors have?"):
        model, ema = _followed(answer, 2)
        wanted = {"updates": 2, "shadow": _copied(ema.shadow)}
        state = ema.state_dict()
        trial.equal("at once", state, wanted)
        _train(model, ema, 2)
        trial.equal("after two more updates", state, wanted)
    with trial.group("a resumed run gives the same bits", hint="on what does the next update depend?"):
        for saved_at in (0, 1, 12):
            model, first = _followed(answer, saved_at)
            copied = copy.deepcopy(model)
            second = answer(copied)
            second.update()
            second.load_state_dict(first.state_dict())
            for one, average in ((model, first), (copied, second)):
                torch.manual_seed(saved_at)
                _train(one, average, 3)
            trial.equal(f"three updates after loading, saved after {saved_at}", second.shadow, first.shadow)
    item = "loading keeps the averages' dtype, and the state"
    with trial.group(item, hint="what is copied, and what is kept?"):
        model, ema = _followed(answer)
        averages = {name: t + 1 for name, t in ema.shadow.items()}
        wide = {name: t.double() if t.is_floating_point() else t.clone() for name, t in averages.items()}
        state = {"updates": 3, "shadow": wide}
        before = copy.deepcopy(state)
        ema.load_state_dict(state)
        trial.equal("the averages", ema.shadow, averages)
        _train(model, ema, 2)
        trial.equal("the state, after two updates", state, before)
    item = "other names or shapes raise ValueError with a name, nothing is changed"
    with trial.group(item, hint="what is compared, and when is the first value written?", see=3):
        _, ema = _followed(answer)
        before = ema.state_dict()
        good = {name: t + 1 for name, t in ema.shadow.items()}
        less = {name: t for name, t in good.items() if name != "brief"}
        others = {"norm.extra": {**good, "norm.extra": torch.ones(3)}, "tall": {**good, "tall": torch.ones(2, 3)}}
        for name, shadow in {"brief": less, **others}.items():
            state = {"updates": 40, "shadow": shadow}
            raises(trial, f"{name} differs", partial(ema.load_state_dict, state), ValueError, name)
            trial.equal(f"the averages afterwards, {name} differs", ema.state_dict(), before)
