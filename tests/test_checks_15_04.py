"""The checks of 15-04 accept right answers, however written, and reject what a student might really write."""

import copy
import math
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from answer_variants import variants
from check_protocol import CheckProtocol, idle
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from course.exercise_form import student_source
from course.lesson_code import answers, definitions
from shared.checks import topic_15_04 as check

GIVEN = definitions("15-04", "log-probabilities", "widened", "followed", "decay", "shadow")
ANSWERS = answers("15-04", given=GIVEN)
STUBS = answers("15-04", edit=student_source, given=GIVEN)
IDLE = idle("15-04", GIVEN)
NAMES = {
    "smoothing": "label_smoothing_cross_entropy",
    "ntxent": "nt_xent_loss",
    "variance": "RunningVariance",
    "clip": "clip_grad_norm",
    "ema": "EMA",
}
variant = variants("15-04", NAMES, GIVEN)


# ---------------------------------------------------------------- smoothing


def smoothing_by_targets(logits, labels, epsilon=0.1, weight=None, ignore_index=-100, reduction="mean"):
    """A product with the smoothed target, classes last."""
    z = logits.movedim(1, -1)
    z = z.float() if z.element_size() < 4 else z
    log_p = z - z.logsumexp(dim=-1, keepdim=True)
    k = z.shape[-1]
    w = torch.ones(k, dtype=z.dtype, device=z.device) if weight is None else weight.to(z.dtype)
    known = labels.ne(ignore_index)
    safe = labels.masked_fill(~known, 0)
    target = (1 - epsilon) * F.one_hot(safe, k).to(z.dtype) + epsilon / k
    loss = -(target * w * log_p).sum(-1).masked_fill(~known, 0)
    if reduction == "mean":
        loss = loss.sum() / w[safe].masked_fill(~known, 0).sum()
    elif reduction == "sum":
        loss = loss.sum()
    return loss.to(logits.dtype)


def smoothing_by_rows(logits, labels, epsilon=0.1, weight=None, ignore_index=-100, reduction="mean"):
    """Flattened to rows, ignored rows never computed."""
    rows = logits.movedim(1, -1).reshape(-1, logits.shape[1])
    y = labels.reshape(-1)
    keep = (y != ignore_index).nonzero()[:, 0]
    dtype = torch.promote_types(rows.dtype, torch.float32)
    log_p = rows[keep].to(dtype).log_softmax(dim=1)
    w = log_p.new_ones(rows.shape[1]) if weight is None else weight.to(dtype)
    own = w[y[keep]]
    losses = -(1 - epsilon) * own * log_p[torch.arange(len(keep), device=y.device), y[keep]]
    losses = losses - epsilon * (log_p @ w) / len(w)
    if reduction == "none":
        losses = log_p.new_zeros(len(y)).index_put((keep,), losses).view(labels.shape)
    else:
        losses = losses.sum() / (own.sum() if reduction == "mean" else 1)
    return losses.to(logits.dtype)


def smoothing_by_torch(logits, labels, epsilon=0.1, weight=None, ignore_index=-100, reduction="mean"):
    loss = nn.CrossEntropyLoss(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=epsilon)
    return loss(logits, labels)


smoothing = partial(variant, "smoothing")
_SPREAD = "(losses.movedim(1, -1) * weight).mean(dim=-1)"
_OWN_SUM = "(own_weight * kept).sum()"
_WIDE = "wide = widened(logits)"
WRONG_SMOOTHING = {
    "PyTorch's own": (smoothing_by_torch, "without cross_entropy"),
    "spread over the others": (
        smoothing(("epsilon * of_all", "epsilon * (of_all * wide.shape[1] - of_label) / (wide.shape[1] - 1)")),
        "reductions none",
    ),
    "no epsilon of 0": (smoothing((_WIDE, f"epsilon = epsilon or 0.1\n    {_WIDE}")), "reductions none"),
    "epsilon not taken away": (smoothing(("(1 - epsilon) * of_label", "of_label")), "reductions none"),
    "always a mean": (smoothing(('elif reduction == "mean":', "else:")), "reductions none"),
    "mean by len": (smoothing((_OWN_SUM, "(own_weight * kept).sum() * len(kept) / kept.numel()")), "N, C, d1"),
    "classes last": (smoothing((".gather(1, index.unsqueeze(1)).squeeze(1)", ".flatten(1)[:, :1]")), "reductions none"),
    "two dimensions only": (smoothing((_SPREAD, "(losses * weight).mean(dim=1)")), r"N, C, d1[\s\S]*the classes\?"),
    "weights in the first term only": (smoothing((_SPREAD, "losses.mean(dim=1)")), "class weights"),
    "no weights in the mean": (smoothing((_OWN_SUM, "kept.sum()")), "class weights[\\s\\S]*mean count"),
    "normalised weights": (
        smoothing(("    own_weight =", "    weight = weight / weight.mean()\n    own_weight =")),
        "class weights",
    ),
    "ignored counts in the mean": (
        smoothing((_OWN_SUM, "own_weight.sum()")),
        "ignored labels",
    ),
    "ignored costs": (smoothing(("loss = torch.where(kept, loss, 0.0)", "loss = loss * 1")), "ignored"),
    "only negative numbers are ignored": (
        smoothing(("kept = labels != ignore_index", "kept = labels >= 0")),
        "ignored",
    ),
    "writes into the labels": (
        smoothing(("index = torch.where(kept, labels, 0)", "index = labels.mul_(kept)")),
        "ignored[\\s\\S]*arguments afterwards",
    ),
    "no gradient of the sum": (
        smoothing(('if reduction == "sum":', 'if reduction == "sum":\n        loss = loss.detach()')),
        "gradients",
    ),
    "float32 comes back": (
        smoothing(("return loss.to(logits.dtype)", "return loss if wide is not logits else loss.to(logits.dtype)")),
        "in the dtype of the logits",
    ),
    "everything in float32": (smoothing((_WIDE, "wide = logits.float()")), "reductions none"),
    "ones on the CPU": (
        smoothing(("wide.new_ones(wide.shape[1])", "torch.ones(wide.shape[1])")),
        "device[\\s\\S]*Hint 3",
    ),
    "half precision throughout": (smoothing((_WIDE, "wide = logits")), "10,000[\\s\\S]*Hint 2"),
}


# ---------------------------------------------------------------- NT-Xent


def ntxent_by_blocks(first, second, temperature=0.5):
    """Four blocks of similarities."""
    wide = torch.promote_types(first.dtype, torch.float32)
    a, b = (F.normalize(part.to(wide), dim=1) for part in (first, second))
    away = torch.eye(len(a), dtype=torch.bool, device=a.device)
    aa, bb = ((p @ p.T / temperature).masked_fill(away, -math.inf) for p in (a, b))
    ab = a @ b.T / temperature
    one = torch.cat([ab, aa], dim=1).logsumexp(dim=1) - ab.diagonal()
    two = torch.cat([ab.T, bb], dim=1).logsumexp(dim=1) - ab.diagonal()
    return ((one.mean() + two.mean()) / 2).to(first.dtype)


def ntxent_by_rows(first, second, temperature=0.5):
    """A loop over the rows."""
    dtype = first.dtype if first.element_size() >= 4 else torch.float32
    z = torch.stack([first, second]).flatten(0, 1).to(dtype)
    z = z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min(1e-12)
    n, total = len(first), 0.0
    for i in range(2 * n):
        rest = [k for k in range(2 * n) if k != i]
        log_p = ((z[rest] @ z[i]) / temperature).log_softmax(dim=0)
        total = total - log_p[rest.index((i + n) % (2 * n))]
    return (total / (2 * n)).to(first.dtype)


def ntxent_one_way(first, second, temperature=0.5):
    """The denominator has the other side only, as in CLIP."""
    wide = torch.promote_types(first.dtype, torch.float32)
    a, b = (F.normalize(part.to(wide), dim=1) for part in (first, second))
    logits = a @ b.T / temperature
    partner = torch.arange(len(a), device=a.device)
    return ((F.cross_entropy(logits, partner) + F.cross_entropy(logits.T, partner)) / 2).to(first.dtype)


ntxent = partial(variant, "ntxent")
_MASK = ".masked_fill(itself, -torch.inf)"
_CAT = "torch.cat([first, second])"
_NTX_WIDE = f"wide = widened({_CAT})"
_RETURN = "return F.cross_entropy(logits, partner).to(first.dtype)"
WRONG_NTXENT = {
    "one way": (ntxent_one_way, "the mean over all views[\\s\\S]*Hint 1"),
    "with itself": (ntxent((_MASK, "")), "the mean over all views"),
    "a sum": (
        ntxent((_RETURN, "return F.cross_entropy(logits, partner, reduction='sum').to(first.dtype)")),
        "the mean over",
    ),
    "times the temperature": (ntxent(("z @ z.T / temperature", "z @ z.T * temperature")), "the mean over"),
    "the first side only": (
        ntxent((_RETURN, "return F.cross_entropy(logits[:len(first)], partner[:len(first)]).to(first.dtype)")),
        "the mean over",
    ),
    "not normalised": (ntxent(("F.normalize(wide, dim=1)", "wide")), "whatever their lengths"),
    "a generous eps": (
        ntxent(("F.normalize(wide, dim=1)", "F.normalize(wide, dim=1, eps=5e-3)")),
        "whatever their lengths",
    ),
    "-100 for itself": (ntxent(("(itself, -torch.inf)", "(itself, -100.0)")), "the mean over"),
    "one side is a target": (
        ntxent((_CAT, "torch.cat([first, second.detach()])")),
        "gradients reach both[\\s\\S]*cuts the graph",
    ),
    "float32 comes back": (
        ntxent(
            (
                _RETURN,
                "loss = F.cross_entropy(logits, partner)\n    return loss if z.dtype.itemsize < 8 else loss.double()",
            )
        ),
        "10,000, temperature",
    ),
    "everything in float32": (ntxent((_NTX_WIDE, f"wide = {_CAT}.float()")), "the mean over"),
    "partners on the CPU": (
        ntxent(("torch.arange(len(z), device=z.device)", "torch.arange(len(z))")),
        "device of the inputs[\\s\\S]*Hint 3",
    ),
    "half precision throughout": (ntxent((_NTX_WIDE, f"wide = {_CAT}")), "10,000, temperature"),
    "normalised too early": (ntxent((_NTX_WIDE, f"wide = F.normalize({_CAT}, dim=1).float()")), "10,000, temperature"),
    "a short softmax": (
        ntxent(
            (
                _RETURN,
                "p = logits.exp() / logits.exp().sum(1, True)\n"
                "    return -p[range(len(z)), partner].log().mean().to(first.dtype)",
            )
        ),
        "10,000, temperature",
    ),
}


# ---------------------------------------------------------------- variance


class VarianceByShift:
    """Sums of distances from the first mean."""

    def __init__(self):
        self.count, self.shift, self.s1, self.s2 = 0, None, None, None

    @property
    def mean(self):
        return self.shift + self.s1 / self.count if self.count else torch.tensor(math.nan)

    def update(self, values):
        v = values.detach().reshape(-1)
        v = v.to(torch.float32) if v.dtype != torch.float64 else v
        if len(v):
            self.shift = v.mean() if self.shift is None else self.shift
            self._take(len(v), (v - self.shift).sum(), ((v - self.shift) ** 2).sum())

    def _take(self, n, s1, s2):
        self.s1, self.s2 = (self.s1 + s1, self.s2 + s2) if self.count else (s1, s2)
        self.count += n

    def merge(self, other):
        if other.count:
            self.shift = other.shift.clone() if self.shift is None else self.shift
            gap = other.shift - self.shift
            self._take(other.count, other.s1 + other.count * gap, other.s2 + 2 * gap * other.s1 + other.count * gap**2)

    def variance(self, correction=1):
        if self.count - correction <= 0:
            return torch.full((), math.nan, dtype=self.mean.dtype)
        return (self.s2 - self.s1**2 / self.count) / (self.count - correction)


class VarianceByValues:
    """Welford's recurrence value by value, in Python numbers of float64."""

    def __init__(self):
        self.count, self._mean, self._m2, self._dtype = 0, math.nan, 0.0, torch.float32

    mean = property(lambda self: torch.tensor(self._mean, dtype=self._dtype))

    def update(self, values):
        for x in values.detach().reshape(-1).tolist():
            self._dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
            self.count += 1
            old = self._mean if self.count > 1 else 0.0
            self._mean = old + (x - old) / self.count
            self._m2 += (x - old) * (x - self._mean)

    def merge(self, other):
        if other.count and not self.count:
            vars(self).update(vars(other))
        elif other.count:
            n, gap = self.count + other.count, other._mean - self._mean
            self._m2 += other._m2 + gap * gap * self.count * other.count / n
            self._mean += gap * other.count / n
            self.count = n

    def variance(self, correction=1):
        left = self.count - correction
        return torch.tensor(self._m2 / left if left > 0 else math.nan, dtype=self._dtype)


class VarianceOfSquares(VarianceByShift):
    """E[x^2] - E[x]^2."""

    def update(self, values):
        v = values.detach() if values.dtype == torch.float64 else values.detach().float()
        if v.numel():
            self.shift = torch.zeros_like(v.sum())
            self._take(v.numel(), v.sum(), v.square().sum())


variance = partial(variant, "variance")
_ADD_M2 = "self.m2 + m2 + delta.square() * (self.count * count / total)"
_WIDEN = "values = widened(values.detach())"
WRONG_VARIANCE = {
    "sums of squares": (VarianceOfSquares, "far from 0"),
    "no delta": (variance((_ADD_M2, "self.m2 + m2")), "count, mean and variance"),
    "n is the number of batches": (
        variance(("values.numel(), mean", "(values.shape[0] if values.dim() else 1), mean")),
        "count, mean and variance",
    ),
    "mean of means": (variance(("delta * (count / total)", "delta / 2")), "count, mean and variance"),
    "variance divides what is kept": (
        variance(
            (
                "return self.m2 / (self.count - correction)",
                "self.m2 = self.m2 / (self.count - correction)\n        return self.m2",
            )
        ),
        "count, mean and variance",
    ),
    "an empty batch is NaN": (
        variance(("        if not count:\n            return\n", "")),
        "empty batch[\\s\\S]*Hint 2",
    ),
    "an empty batch in update only": (
        variance(
            ("        if not count:\n            return\n", ""),
            ("        self._add(other.count", "        if other.count:\n            self._add(other.count"),
        ),
        "empty batch",
    ),
    "everything in float32": (variance((_WIDEN, "values = values.detach().float()")), "float64 stays"),
    "halves stay": (
        variance((_WIDEN, "values = values.detach() * (1 if values.is_floating_point() else 1.0)")),
        "count as float32",
    ),
    "merge counts but doesn't shift": (
        variance(
            (
                "self._add(other.count, other.mean, other.m2)",
                "self._add(other.count, self.mean if self.count else other.mean, other.m2)",
            )
        ),
        "merging workers",
    ),
    "merge empties other": (
        variance(
            (
                "self._add(other.count, other.mean, other.m2)",
                "self._add(other.count, other.mean, other.m2)\n        other.count = 0",
            )
        ),
        "merging workers[\\s\\S]*which line changes other",
    ),
    "a shared tensor": (
        variance(
            ("self.mean = self.mean + delta * (count / total)", "self.mean += delta * (count / total)"),
            ("self.mean = mean\n", "self.mean = mean.clone()\n"),
            ("self.m2 = self.m2 + m2 +", "self.m2 += m2 +"),
        ),
        "merging workers",
    ),
    "always n - 1": (variance(("(self.count - correction)", "(self.count - 1)")), "count, mean|nothing can be said"),
    "infinity where nothing is left": (
        variance(("math.nan)\n        return self.m2", "math.inf)\n        return self.m2")),
        "nothing can be said",
    ),
    "0 where nothing is left": (
        variance(("torch.full_like(self.mean, math.nan)", "torch.zeros_like(self.mean)")),
        "nothing can be said|empty",
    ),
    "keeps the graph": (
        variance((_WIDEN, "values = widened(values)")),
        "keeps neither[\\s\\S]*a graph",
    ),
    "keeps the values": (
        variance(
            ("        m2 = (values", "        self.seen = [*getattr(self, 'seen', []), values]\n        m2 = (values")
        ),
        "keeps neither[\\s\\S]*400 values",
    ),
}


# ---------------------------------------------------------------- clipping


def clip_by_loops(parameters, max_norm, norm_type=2.0, nonfinite="keep"):
    """One tensor after the other, no list operations."""
    parameters = list(parameters)
    groups = parameters if isinstance(parameters[0], dict) else None
    sets = [(g["params"], g.get("max_norm", max_norm)) for g in groups or ({"params": parameters},)]
    grads = [[p.grad for p in members if p.grad is not None] for members, _ in sets]
    norms = []
    for some in grads:
        wide = torch.float64 if any(g.dtype == torch.float64 for g in some) else torch.float32
        each = [torch.linalg.vector_norm(g.to(wide), norm_type) for g in some] or [torch.zeros(())]
        norms.append(torch.linalg.vector_norm(torch.stack(each), norm_type))
    result = torch.stack(norms)
    bad = nonfinite != "keep" and not bool(torch.isfinite(result).all())
    if bad and nonfinite == "raise":
        raise RuntimeError("not finite")
    for (_, limit), some, norm in zip(sets, grads, norms, strict=True):
        factor = torch.minimum(limit / (norm + 1e-6), torch.ones_like(norm))
        for g in some:
            g.fill_(0) if bad else g.mul_(factor.to(g.dtype))
    return result if groups is not None else norms[0]


def clip_by_torch(parameters, max_norm, norm_type=2.0, nonfinite="keep"):
    """On PyTorch's own two halves."""
    given = list(parameters)
    if not hasattr(given[0], "keys"):
        return clip_by_torch([{"params": given}], max_norm, norm_type, nonfinite)[0]
    sets = [[p for p in group["params"] if p.grad is not None] for group in given]
    wide = [[p.grad.to(torch.promote_types(p.grad.dtype, torch.float32)) for p in ps] for ps in sets]
    norms = [get_total_norm(grads, norm_type) for grads in wide]
    fine = nonfinite == "keep" or all(norm.isfinite().item() for norm in norms)
    if not fine and nonfinite == "raise":
        raise RuntimeError([norm.item() for norm in norms])
    for group, ps, norm in zip(given, sets, norms, strict=True):
        if fine:
            clip_grads_with_norm_(ps, group.get("max_norm", max_norm), norm)
        for p in [] if fine else ps:
            p.grad.zero_()
    return torch.stack(norms)


clip = partial(variant, "clip")
_FACTOR = 'factor = group.get("max_norm", max_norm) / (norm + 1e-6)'
_CLAMP = "torch._foreach_mul_(of_group, factor.clamp(max=1.0))"
_GROUPS = "groups = list(parameters)"
_FINITE = '    finite = nonfinite == "keep" or all(math.isfinite(norm) for norm in norms)\n'
_ZERO = "            torch._foreach_zero_(of_group)"
_WIDEST = "dtype = torch.promote_types(dtype, grad.dtype)"
WRONG_CLIP = {
    "enlarges": (clip((".clamp(max=1.0)", "")), "norm and gradients of one set"),
    "no 1e-6": (clip(("(norm + 1e-6)", "norm")), "norm and gradients of one set"),
    "the largest norm": (
        clip(("vector_norm(torch.stack(each), norm_type)", "vector_norm(torch.stack(each), math.inf)")),
        "one set",
    ),
    "always the 2-norm": (clip(("_foreach_norm(of_group, norm_type,", "_foreach_norm(of_group, 2,")), "one set"),
    "norm afterwards": (
        clip(
            (
                "return torch.stack(norms) if grouped else norms[0]",
                "return torch.stack(norms) if grouped else norms[0].clamp(max=max_norm)",
            )
        ),
        "one set",
    ),
    "goes through twice": (
        clip((_GROUPS, "sum(1 for _ in parameters)\n    groups = list(parameters)")),
        "any iterable[\\s\\S]*through a generator",
    ),
    "new gradients": (
        clip(
            (
                _CLAMP,
                "for p in group['params']:\n                if p.grad is not None:\n"
                "                    p.grad = p.grad * factor.clamp(max=1.0)",
            )
        ),
        "in place[\\s\\S]*which tensor object",
    ),
    "one norm for all groups": (
        clip(
            (_FINITE, "    norms = [torch.linalg.vector_norm(torch.stack(norms), norm_type)] * len(norms)\n" + _FINITE)
        ),
        "groups, each",
    ),
    "max_norm of the call": (clip((_FACTOR, "factor = max_norm / (norm + 1e-6)")), "groups, each"),
    "a limit of 0 is none": (
        clip((_FACTOR, 'factor = (group.get("max_norm") or max_norm) / (norm + 1e-6)')),
        "groups, each",
    ),
    "gradients of 0 are made": (
        clip(
            (
                "        of_group = [",
                '        for p in group["params"]:\n'
                "            p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"
                "        of_group = [",
            )
        ),
        "without a gradient",
    ),
    "float16 overflows": (clip((_WIDEST, "dtype = grad.dtype")), "float32"),
    "narrows float64": (clip((_WIDEST, "dtype = torch.float32")), "one set|float32"),
    "reads with keep": (
        clip((_FINITE, '    finite = all(math.isfinite(norm) for norm in norms) or nonfinite == "keep"\n')),
        "keep: clips[\\s\\S]*Hint 3",
    ),
    "clips before it raises": (
        clip(
            (
                _FINITE,
                "    for of_group in grads:\n        if nonfinite == 'raise':\n"
                "            torch._foreach_mul_(of_group, 0.5)\n" + _FINITE,
            )
        ),
        "raise: RuntimeError",
    ),
    "looks at the first group": (
        clip(("all(math.isfinite(norm) for norm in norms)", "math.isfinite(norms[0])")),
        "raise: RuntimeError",
    ),
    "ValueError": (clip(("raise RuntimeError", "raise ValueError")), "raise: RuntimeError"),
    "times zero": (
        clip((_ZERO, "            torch._foreach_mul_(of_group, 0.0)")),
        "zero: all[\\s\\S]*what is 0 times infinity",
    ),
    "zeroes one group": (
        clip((_ZERO, "            if not math.isfinite(norm):\n                torch._foreach_zero_(of_group)")),
        "zero: all",
    ),
}


# ---------------------------------------------------------------- EMA

Shadow = GIVEN["Shadow"]


class EMAByLists(Shadow):
    """List operations, and a class for the block."""

    class _Block:
        def __init__(self, ema):
            self.ema = ema

        def __enter__(self):
            ema = self.ema
            if ema.swapped:
                raise RuntimeError("nested")
            ema.swapped = True
            with torch.no_grad():
                self.own = [t.clone() for t in ema.live.values()]
                torch._foreach_copy_(list(ema.live.values()), list(ema.shadow.values()))

        def __exit__(self, *error):
            with torch.no_grad():
                torch._foreach_copy_(list(self.ema.live.values()), self.own)
            self.ema.swapped = False
            return False

    def applied(self):
        return self._Block(self)

    def state_dict(self):
        return copy.deepcopy({"shadow": self.shadow, "updates": self.updates})

    def load_state_dict(self, state):
        mine, theirs = ({n: tuple(t.shape) for n, t in d.items()} for d in (self.shadow, state["shadow"]))
        for name in sorted(set(mine) | set(theirs)):
            if mine.get(name) != theirs.get(name):
                raise ValueError(f"{name}: {mine.get(name)} and {theirs.get(name)}")
        for name in mine:
            self.shadow[name].copy_(state["shadow"][name])
        self.updates = int(state["updates"])


class EMAByData(Shadow):
    """Swaps storages in, filled with copies, and the own ones back."""

    inside = False

    def update(self):
        if self.inside:
            raise RuntimeError("inside")
        super().update()

    @contextmanager
    def applied(self):
        if self.inside:
            raise RuntimeError("inside")
        own = {n: t.data for n, t in self.live.items()}
        try:
            self.inside = True
            for n, t in self.live.items():
                t.data = self.shadow[n].clone()
            yield self
        finally:
            for n, t in self.live.items():
                t.data = own[n]
            self.inside = False

    def state_dict(self):
        return {"shadow": {n: t.detach().clone() for n, t in self.shadow.items()}, "updates": self.updates}

    def load_state_dict(self, state):
        shadow = dict(state["shadow"])
        for n, t in self.shadow.items():
            if n not in shadow or shadow.pop(n).shape != t.shape:
                raise ValueError(f"{n} is missing or of another shape")
        if shadow:
            raise ValueError(f"unknown: {list(shadow)}")
        for n, t in self.shadow.items():
            t[...] = state["shadow"][n]
        self.updates = state["updates"]


ema = partial(variant, "ema")
_IN = "            self._write(self.live, self.shadow)\n"
_OUT = "            self._write(self.live, own)\n"
_OWN = "own = {name: t.detach().clone() for name, t in self.live.items()}"
_FLOATS = "{n: t for n, t in self.live.items() if t.is_floating_point()}"
_NESTED = '        if self.swapped:\n            raise RuntimeError("applied() inside of applied()")\n'
_LOADS = "        self._write(self.shadow, given)\n"
_CLONES = "shadow = {name: t.clone() for name, t in self.shadow.items()}"
_RENEW = (
    "    def _renew(self):\n        for name, p in self.model._parameters.items():\n"
    "            self.model._parameters[name] = nn.Parameter(p.detach().clone(), p.requires_grad)\n\n"
    "    def __init__(self, model, *args, **kwargs):\n        super().__init__(model, *args, **kwargs)\n"
    "        self.model = model\n\n    @contextmanager"
)
WRONG_EMA = {
    "not derived": (nn.Module, "derived from Shadow"),
    "does nothing": (ema((_IN, "")), "inside, the model has"),
    "parameters only": (
        ema((_IN, _IN.replace("self.live", "{n: t for n, t in self.live.items() if t.requires_grad}"))),
        "inside, the",
    ),
    "own values not copied": (ema((_OWN, _OWN.replace(".clone()", ""))), "was written inside"),
    "counters stay": (ema((_OUT, f"            self._write({_FLOATS}, own)\n")), "was written inside"),
    "no finally": (
        ema(("        finally:\n", "        except ZeroDivisionError:\n            pass\n        else:\n")),
        "also after an exception",
    ),
    "swallows": (
        ema(("        finally:\n", "        except ValueError:\n            pass\n        finally:\n")),
        "which is passed on",
    ),
    "stays swapped after an exception": (
        ema((_OUT + "            self.swapped = False\n", _OUT + "        self.swapped = False\n")),
        "also after an exception",
    ),
    "new parameters": (
        ema((_OUT, _OUT + "            self._renew()\n"), ("    @contextmanager", _RENEW)),
        "what does an optimizer hold",
    ),
    "averages are the model's memory": (
        ema(
            (_IN, "            for name, t in self.live.items():\n                t.data = self.shadow[name]\n"),
            (_OUT, "            for name, t in self.live.items():\n                t.data = own[name]\n"),
        ),
        "was written inside",
    ),
    "nested": (ema((_NESTED, "")), "raise RuntimeError"),
    "updates inside": (ema(("        self.swapped = True\n", "        self.inside = True\n")), "raise RuntimeError"),
    "no snapshot": (ema((_CLONES, "shadow = dict(self.shadow)")), "snapshot"),
    "the live values": (ema((_CLONES, _CLONES.replace("self.shadow", "self.live"))), "snapshot"),
    "updates forgotten": (ema(('        self.updates = state["updates"]\n', "")), "same bits"),
    "other tensors in shadow": (ema((_LOADS, "        self.shadow = dict(given)\n")), "same bits"),
    "takes the dtype of the state": (
        ema((_LOADS, "        for name, mine in self.shadow.items():\n            mine.data = given[name].clone()\n")),
        "keeps the averages' dtype",
    ),
    "no names": (ema(("if different:", "if given.keys() < self.shadow.keys():")), "other names or shapes"),
    "no shapes": (
        ema(("mine.shape != given[name].shape", "mine.numel() != given[name].numel()")),
        "other names or shapes",
    ),
    "writes, then complains": (
        ema(
            (
                "        for name, mine in self.shadow.items():\n            if",
                "        for name, mine in self.shadow.items():\n            "
                "mine.copy_(mine if mine.shape != given[name].shape else given[name])\n            if",
            ),
            ("    def load_state_dict", "    @torch.no_grad()\n    def load_state_dict"),
        ),
        "nothing is changed",
    ),
}


# ---------------------------------------------------------------- all

CHECKS = {
    "label_smoothing_cross_entropy": check.label_smoothing_cross_entropy,
    "nt_xent_loss": check.nt_xent_loss,
    "RunningVariance": check.running_variance,
    "clip_grad_norm": check.clip_grad_norm,
    "EMA": check.ema,
}
RIGHT = {
    "label_smoothing_cross_entropy": [smoothing_by_targets, smoothing_by_rows],
    "nt_xent_loss": [ntxent_by_blocks, ntxent_by_rows],
    "RunningVariance": [VarianceByShift, VarianceByValues],
    "clip_grad_norm": [clip_by_loops, clip_by_torch],
    "EMA": [EMAByLists, EMAByData],
}
WRONG = {
    "label_smoothing_cross_entropy": WRONG_SMOOTHING,
    "nt_xent_loss": WRONG_NTXENT,
    "RunningVariance": WRONG_VARIANCE,
    "clip_grad_norm": WRONG_CLIP,
    "EMA": WRONG_EMA,
}


class TestChecks(CheckProtocol):
    TOPIC = "15-04"
    CHECKS = CHECKS
    ANSWERS = ANSWERS
    STUBS = STUBS
    IDLE = IDLE
    RIGHT = RIGHT
    WRONG = WRONG

    def hold_stand_in(self, name, stand_in):
        """The cells below train and count with it. Two may do what an answer may not: call PyTorch, keep all values."""
        result = self.CHECKS[name].run(stand_in)
        allowed = {
            "is written without cross_entropy and nll_loss",
            "keeps neither the graph nor the values",
        }
        assert {item.name for item in result.failures} <= allowed, str(result)


@pytest.mark.parametrize("reference", [check.nt_xent_loss.stand_in(), ANSWERS["nt_xent_loss"]])
def test_nt_xent_of_the_tasks_example(reference):
    assert reference(torch.eye(2), torch.eye(2), 1.0).item() == pytest.approx(-math.log(math.e / (math.e + 2)))


def test_the_other_examples_of_the_tasks():
    loss = ANSWERS["label_smoothing_cross_entropy"](torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]), epsilon=0.3)
    assert loss.item() == pytest.approx(0.640, abs=5e-4)
    stats = ANSWERS["RunningVariance"]()
    stats.update(torch.tensor([1.0, 3.0]))
    stats.update(torch.tensor(8.0))
    assert (stats.count, stats.mean.item(), stats.variance().item()) == (3, 4.0, 13.0)
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([3.0, 0.0, 4.0])
    assert ANSWERS["clip_grad_norm"]([p], 1.0).item() == 5.0
    assert p.grad.tolist() == pytest.approx([0.6, 0.0, 0.8], abs=1e-5)
