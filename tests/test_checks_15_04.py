"""The checks of 15-04 accept right answers, however written, and reject what a student might really write."""

import copy
import math
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from answer_variants import variants
from check_protocol import CheckProtocol, idle
from torch import nn

from course.answers import answers, definitions
from course.exercise_form import student_source
from shared.checks import topic_15_04 as check

GIVEN = definitions("15-04", "log-probabilities", "shadow")
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
    if reduction not in {"none", "mean", "sum"}:
        raise ValueError(reduction)
    z = logits.movedim(1, -1)
    z = z.float() if z.element_size() < 4 else z
    log_p = z - z.logsumexp(dim=-1, keepdim=True)
    k = z.shape[-1]
    w = torch.ones(k, dtype=z.dtype, device=z.device) if weight is None else weight.to(z.dtype)
    known = labels.ne(ignore_index)
    safe = labels.masked_fill(~known, 0)
    target = (1 - epsilon) * F.one_hot(safe, k).to(z.dtype) + epsilon / k
    log_p = log_p.masked_fill(target == 0, 0)
    loss = -(target * w * log_p).sum(-1).masked_fill(~known, 0)
    if reduction == "mean":
        loss = loss.sum() / w[safe].masked_fill(~known, 0).sum()
    elif reduction == "sum":
        loss = loss.sum()
    return loss.to(logits.dtype)


def smoothing_by_rows(logits, labels, epsilon=0.1, weight=None, ignore_index=-100, reduction="mean"):
    """Flattened to rows, ignored rows never computed."""
    if reduction == "none":
        finish = lambda losses, weights: losses  # noqa: E731
    elif reduction == "sum":
        finish = lambda losses, weights: losses.sum()  # noqa: E731
    elif reduction == "mean":
        finish = lambda losses, weights: losses.sum() / weights.sum()  # noqa: E731
    else:
        raise ValueError("reduction")
    rows = logits.movedim(1, -1).reshape(-1, logits.shape[1])
    y = labels.reshape(-1)
    keep = (y != ignore_index).nonzero()[:, 0]
    dtype = torch.promote_types(rows.dtype, torch.float32)
    log_p = rows[keep].to(dtype).log_softmax(dim=1)
    w = torch.ones(rows.shape[1], dtype=dtype, device=rows.device) if weight is None else weight.to(dtype)
    own = w[y[keep]]
    losses = -(1 - epsilon) * own * log_p[torch.arange(len(keep), device=rows.device), y[keep]]
    if epsilon != 0:
        losses = losses - epsilon * (log_p @ w) / len(w)
    full = torch.zeros(len(y), dtype=dtype, device=rows.device).index_put((keep,), losses)
    return finish(full.view(labels.shape), own).to(logits.dtype)


def smoothing_by_torch(logits, labels, epsilon=0.1, weight=None, ignore_index=-100, reduction="mean"):
    wide = logits.float() if logits.element_size() < 4 else logits
    weight = None if weight is None else weight.to(wide.dtype)
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": epsilon}
    return F.cross_entropy(wide, labels, weight, **options).to(logits.dtype)


_MEAN_LINE = 'loss.sum() if reduction == "sum" else loss.sum() / own.sum()'
_SPREAD = "spread = (losses * weights.view(-1, *[1] * (wide.dim() - 2))).mean(dim=1)"
_KEPT = "loss = torch.where(kept, loss, 0.0)"
_WIDE = "logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits"


def _soft(logits, labels, epsilon, weight, ignore_index, reduction, **kwargs):
    """F.cross_entropy with probabilities."""
    ignore_index, weight = kwargs.get("ignore_index", ignore_index), kwargs.get("weight", weight)
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(reduction)
    k, kept = logits.shape[1], labels != ignore_index
    wide = logits if logits.dtype == torch.float64 else logits.float()
    weight = torch.ones(k, dtype=wide.dtype) if weight is None else weight.to(wide.dtype)
    safe = torch.where(kept, labels, 0)
    target = (1 - epsilon) * F.one_hot(safe, k).movedim(-1, 1).to(wide.dtype) + epsilon / k
    loss = F.cross_entropy(wide, target, weight, reduction="none") * kept
    if reduction == "mean":
        return (loss.sum() / (weight[safe] * kept).sum()).to(logits.dtype)
    return (loss.sum() if reduction == "sum" else loss).to(logits.dtype)


WRONG_SMOOTHING = {
    "a batch of one is squeezed": (
        variant("smoothing", ("return loss.to(logits.dtype)", "return loss.squeeze().to(logits.dtype)")),
        "reductions none",
    ),
    "log-probabilities with a floor": (
        variant("smoothing", ("-log_probabilities(wide)", "-log_probabilities(wide).clamp(min=-25000)")),
        "logits of ±10,000",
    ),
    "0 times infinity": (variant("smoothing", (" if epsilon else hard", "")), "masked classes"),
    "ignored by a product": (variant("smoothing", (_KEPT, "loss = loss * kept")), "masked classes"),
    "no infinity": (
        variant("smoothing", ("-log_probabilities(wide)", "(-log_probabilities(wide)).nan_to_num(nan=torch.nan)")),
        "masked classes",
    ),
    "no loss is infinite": (
        variant("smoothing", (_KEPT, _KEPT + "\n    loss = torch.where(loss.isinf(), 0.0, loss)")),
        "masked classes",
    ),
    "a NaN is 0": (
        variant("smoothing", (_KEPT, _KEPT + "\n    loss = torch.where(loss.isnan(), 0.0, loss)")),
        "masked classes",
    ),
    "a NaN in an ignored entry": (
        variant("smoothing", (_KEPT, "loss = torch.where(kept | loss.isnan(), loss, 0.0)")),
        "masked classes",
    ),
    "soft targets for PyTorch": (
        lambda z, y, e=0.1, w=None, i=-100, reduction="mean", **k: _soft(z, y, e, w, i, reduction, **k),
        "without cross_entropy",
    ),
    "no gradient in half precision": (
        variant("smoothing", ("wide = logits.float()", "wide = logits.detach().float()")),
        "gradients",
    ),
    "no gradient of the sum": (variant("smoothing", ("loss.sum() if", "loss.detach().sum() if")), "gradients"),
    "at least one in the mean": (
        variant("smoothing", ("own.sum()", "own.sum().clamp(min=1)")),
        "class weights and ignored",
    ),
    "no NaN where all are ignored": (
        variant("smoothing", ("own.sum()", "own.sum().clamp(min=1e-8)")),
        "class weights and ignored",
    ),
    "no weights beside ignored labels": (
        variant(
            "smoothing",
            ("(losses * weights.view", "(losses * (weights if kept.all() else weights.mean() + 0 * weights).view"),
        ),
        "class weights and ignored",
    ),
    "two further dimensions": (
        variant(
            "smoothing",
            (
                "    wide = logits.float()",
                "    if logits.dim() > 3:\n        logits, labels = logits.flatten(2), labels.flatten(1)\n"
                "    wide = logits.float()",
            ),
        ),
        "reductions none",
    ),
    "PyTorch's own": (smoothing_by_torch, "without cross_entropy"),
    "spread over the others": (
        variant(
            "smoothing",
            (
                "(1 - epsilon) * hard + epsilon * spread",
                "(1 - epsilon) * hard + epsilon * (losses.sum(1) - hard) / max(losses.shape[1] - 1, 1)",
            ),
        ),
        "reductions none",
    ),
    "epsilon not taken away": (variant("smoothing", ("(1 - epsilon) * hard", "hard")), "reductions none"),
    "a sum over the classes": (variant("smoothing", (".mean(dim=1)\n", ".sum(dim=1)\n")), "reductions none"),
    "always a mean": (
        variant("smoothing", ('    if reduction == "none":\n        return loss.to(logits.dtype)\n', "")),
        "reductions none",
    ),
    "picked from the last dimension": (
        variant(
            "smoothing",
            ("losses.gather(1, index.unsqueeze(1)).squeeze(1)", "losses.gather(-1, index.unsqueeze(-1)).squeeze(-1)"),
        ),
        "reductions none",
    ),
    "mean over the batch": (
        variant("smoothing", (_MEAN_LINE, 'loss.sum() if reduction == "sum" else loss.sum() / len(loss)')),
        "reductions none",
    ),
    "mean for sum": (
        variant("smoothing", ('loss.sum() if reduction == "sum"', 'loss.mean() if reduction == "sum"')),
        "reductions none",
    ),
    "weights in the first term only": (
        variant("smoothing", ("(losses * weights.view(-1, *[1] * (wide.dim() - 2)))", "losses")),
        "class weights and ignored",
    ),
    "the label's weight in the second": (
        variant("smoothing", (_SPREAD, "spread = losses.mean(dim=1) * weights[index]")),
        "class weights and ignored",
    ),
    "a mean that counts": (variant("smoothing", ("own.sum()", "kept.sum()")), "class weights and ignored"),
    "ignored in the first term only": (
        variant("smoothing", (_KEPT, "loss = loss - torch.where(kept, 0.0, (1 - epsilon) * hard)")),
        "class weights and ignored",
    ),
    "negative numbers only": (
        variant("smoothing", ("labels != ignore_index", "labels >= 0")),
        "class weights and ignored|no exception",
    ),
    "ignored counts in the mean": (
        variant("smoothing", ("own.sum()", "weights[index].sum()")),
        "class weights and ignored",
    ),
    "only -100": (variant("smoothing", ("labels != ignore_index", "labels != -100")), "class weights and ignored"),
    "clamped labels": (
        variant("smoothing", ("torch.where(kept, labels, 0)", "labels.clamp(min=0)")),
        "class weights and ignored",
    ),
    "detached spread": (
        variant("smoothing", (".mean(dim=1)\n", ".mean(dim=1).detach()\n")),
        "gradients",
    ),
    "no gradient": (
        variant("smoothing", ("-log_probabilities(wide)", "-log_probabilities(wide).detach()")),
        "gradients",
    ),
    "float64 in float32": (variant("smoothing", (_WIDE, "logits.float()")), "inputs are float64"),
    "class weights on the CPU": (
        variant("smoothing", ("wide.new_ones(wide.shape[1])", "torch.ones(wide.shape[1], dtype=wide.dtype)")),
        "device is that of the logits",
    ),
    "float32 comes back": (
        variant("smoothing", ("    return total.to(logits.dtype)\n", "    return total\n")),
        "dtype is that",
    ),
    "float32 for each": (variant("smoothing", ("return loss.to(logits.dtype)", "return loss")), "dtype is that"),
    "NaN at the edge": (
        variant("smoothing", ("-log_probabilities(wide)", "-wide.exp().div(wide.exp().sum(1, keepdim=True)).log()")),
        "logits of ±10,000",
    ),
    "all in half precision": (
        variant(
            "smoothing",
            (_WIDE, "logits"),
            (".mean(dim=1)\n", ".sum(dim=1) / wide.shape[1]\n"),
        ),
        "NaN|dtype is that",
    ),
    "softmax with a floor": (
        variant("smoothing", ("-log_probabilities(wide)", "-(wide.softmax(1) + 1e-12).log()")),
        "reductions none|logits of ±10,000",
    ),
    "labels overwritten": (
        variant(
            "smoothing",
            ("index = torch.where(kept, labels, 0)", "index = labels.masked_fill_(~kept, 0)"),
        ),
        "class weights and ignored|inputs stay",
    ),
    "labels overwritten and put back in the mean": (
        variant(
            "smoothing",
            (
                "    index = torch.where(kept, labels, 0)\n",
                "    given = labels.clone()\n    index = labels.masked_fill_(~kept, 0).clone()\n",
            ),
            ("    total = loss.sum()", "    labels.copy_(given)\n    total = loss.sum()"),
        ),
        "class weights and ignored|inputs stay",
    ),
    "logits shifted in place": (
        variant(
            "smoothing",
            (
                "    losses = -log_probabilities(wide)",
                "    with torch.no_grad():\n        logits.sub_(logits.amax(1, keepdim=True)) if logits.dtype == "
                "torch.float64 and not logits.requires_grad else None\n    losses = -log_probabilities(wide)",
            ),
        ),
        "inputs stay",
    ),
    "any reduction": (
        variant(
            "smoothing",
            (
                '    if reduction not in ("none", "sum", "mean"):\n'
                '        raise ValueError(f"reduction must be none, sum or mean, not {reduction!r}")\n',
                "",
            ),
        ),
        "another reduction",
    ),
    "KeyError": (variant("smoothing", ("raise ValueError(", "raise KeyError(")), "another reduction"),
}

# ---------------------------------------------------------------- NT-Xent


def ntxent_by_blocks(first, second, temperature=0.5):
    """Four blocks of similarities, their diagonals left out by a mask of numbers."""
    if first.ndim != 2 or tuple(first.shape) != tuple(second.shape):
        raise ValueError("shapes")
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
    if not (first.dim() == second.dim() == 2 and first.shape == second.shape):
        raise ValueError((first.shape, second.shape))
    dtype = first.dtype if first.element_size() >= 4 else torch.float32
    z = torch.stack([first, second]).flatten(0, 1).to(dtype)
    z = z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min(1e-12)
    n, total = len(first), 0.0
    for i in range(2 * n):
        rest = [k for k in range(2 * n) if k != i]
        log_p = ((z[rest] @ z[i]) / temperature).log_softmax(dim=0)
        total = total - log_p[rest.index((i + n) % (2 * n))]
    return (total / (2 * n)).to(first.dtype)


_NTX_Z = "z = F.normalize(z.float() if z.dtype in (torch.float16, torch.bfloat16) else z, dim=1)"
_NTX_RETURN = "F.cross_entropy(logits.masked_fill(itself, -torch.inf), partner).to(first.dtype)"
WRONG_NTXENT = {
    "at most eight images": (
        variant("ntxent", (".roll(len(first))", ".roll(min(len(first), 8))")),
        "equals a loop",
    ),
    "no gradient in half precision": (
        variant("ntxent", ("z.float() if z", "z.detach().float() if z")),
        "gradients in each format",
    ),
    "a large negative number for itself": (
        variant("ntxent", ("masked_fill(itself, -torch.inf)", "masked_fill(itself, -100.0)")),
        "one image|equals a loop",
    ),
    "temperature at least 0.05": (variant("ntxent", ("/ temperature", "/ max(temperature, 0.05)")), "equals a loop"),
    "a generous eps": (variant("ntxent", ("else z, dim=1)", "else z, dim=1, eps=5e-3)")), "length of a row"),
    "the eps of cosine_similarity": (
        variant("ntxent", ("else z, dim=1)", "else z, dim=1, eps=1e-8)")),
        "length of a row",
    ),
    "itself in the sum": (
        variant("ntxent", ("logits.masked_fill(itself, -torch.inf)", "logits")),
        "equals a loop|one image",
    ),
    "itself as a zero": (
        variant("ntxent", ("masked_fill(itself, -torch.inf)", "masked_fill(itself, 0)")),
        "equals a loop",
    ),
    "one side only": (
        variant(
            "ntxent",
            (
                _NTX_RETURN,
                "F.cross_entropy(logits.masked_fill(itself, -torch.inf)[: len(first)], partner[: "
                "len(first)]).to(first.dtype)",
            ),
        ),
        "equals a loop",
    ),
    "only the other side": (
        variant(
            "ntxent",
            (
                _NTX_RETURN,
                "F.cross_entropy(logits[: len(first), len(first) :], partner[: len(first)] - "
                "len(first)).to(first.dtype)",
            ),
        ),
        "equals a loop",
    ),
    "neighbours as partners": (variant("ntxent", (".roll(len(first))", " ^ 1")), "equals a loop|no exception"),
    "a sum": (variant("ntxent", ("partner).to", 'partner, reduction="sum").to')), "equals a loop"),
    "times the temperature": (variant("ntxent", ("/ temperature", "* temperature")), "equals a loop"),
    "without the partner below": (
        variant(
            "ntxent",
            (
                _NTX_RETURN,
                "(logits.masked_fill(itself | (torch.arange(len(z))[:, None] == partner), "
                "-torch.inf).logsumexp(1) - logits[torch.arange(len(z)), partner]).mean().to(first.dtype)",
            ),
        ),
        "equals a loop",
    ),
    "one image is NaN": (
        variant(
            "ntxent",
            (
                "    logits =",
                "    if len(first) == 1:\n        return (z.sum() * math.nan).to(first.dtype)\n    logits =",
            ),
        ),
        "one image",
    ),
    "one image is itself": (
        variant(
            "ntxent",
            ("    logits =", "    if len(first) == 1:\n        return (1 - z[0] @ z[1]).to(first.dtype)\n    logits ="),
        ),
        "one image",
    ),
    "as long as they are": (
        variant("ntxent", (_NTX_Z, "z = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z")),
        "length of a row|equals a loop",
    ),
    "one length for all": (
        variant(
            "ntxent",
            (
                _NTX_Z,
                "z = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z\n    z = z / z.norm(dim=1).mean()",
            ),
        ),
        "length of a row",
    ),
    "detached": (variant("ntxent", (_NTX_Z, _NTX_Z + "\n    z = z.detach()")), "gradients reach"),
    "the second as a target": (
        variant("ntxent", ("torch.cat([first, second])", "torch.cat([first, second.detach()])")),
        "gradients reach",
    ),
    "float32 comes back": (variant("ntxent", (".to(first.dtype)", "")), "dtype of the inputs"),
    "with a dimension": (variant("ntxent", (".to(first.dtype)", ".to(first.dtype).view(1)")), "equals a loop|dtype"),
    "float64 as float32": (
        variant("ntxent", ("z.float() if z.dtype in (torch.float16, torch.bfloat16) else z", "z.float()")),
        "equals a loop[\\s\\S]*inputs are float64",
    ),
    "a mask on the CPU": (
        variant("ntxent", ("dtype=torch.bool, device=z.device", "dtype=torch.bool")),
        "device is that of the inputs",
    ),
    "partners on the CPU": (
        variant("ntxent", ("torch.arange(len(z), device=z.device)", "torch.arange(len(z))")),
        "device is that of the inputs",
    ),
    "exponentials": (
        variant(
            "ntxent",
            (
                _NTX_RETURN,
                "(-(logits.exp()[torch.arange(len(z)), partner] / logits.exp().masked_fill(itself, "
                "0).sum(1)).log().mean()).to(first.dtype)",
            ),
        ),
        "finite",
    ),
    "normalised in half precision": (
        variant(
            "ntxent",
            (
                _NTX_Z,
                "z = F.normalize(z, dim=1)\n    z = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z",
            ),
        ),
        "finite|dtype of the inputs",
    ),
    "any shape": (
        variant("ntxent", ("    if first.shape != second.shape or first.dim() != 2:\n", "    if False:\n")),
        "other shapes",
    ),
    "unequal lengths": (
        variant("ntxent", ("first.shape != second.shape or ", "first.shape[1:] != second.shape[1:] or ")),
        "other shapes",
    ),
    "an assertion": (variant("ntxent", ("raise ValueError(", "raise AssertionError(")), "other shapes"),
}

# ---------------------------------------------------------------- variance


class VarianceByShift:
    """Sums of distances from the first value seen, in the dtype of the values."""

    def __init__(self):
        self.count, self.shift, self.s1, self.s2 = 0, None, None, None

    @property
    def mean(self):
        return self.shift + self.s1 / self.count if self.count else torch.tensor(math.nan)

    def update(self, values):
        with torch.no_grad():
            v = values.detach().reshape(-1)
            v = v.to(torch.float32) if v.dtype != torch.float64 else v
            if len(v) == 0:
                return
            if self.shift is None:
                self.shift, self.s1, self.s2 = v.double().mean().to(v.dtype), v.new_zeros(()), v.new_zeros(())
            self._take(len(v), (v - self.shift).sum(), ((v - self.shift) ** 2).sum())

    def _take(self, n, s1, s2):
        self.count += n
        self.s1, self.s2 = self.s1 + s1, self.s2 + s2

    def merge(self, other):
        if not other.count:
            return
        if self.shift is None:
            self.shift = other.shift.clone()
            self.s1, self.s2 = torch.zeros_like(self.shift), torch.zeros_like(self.shift)
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


class KeepsAll:
    """Remembers every value."""

    def __init__(self):
        self.seen, self.kind = [], torch.float32

    count = property(lambda self: sum(len(part) for part in self.seen))
    mean = property(lambda self: (torch.cat(self.seen) if self.seen else torch.zeros(0)).double().mean().to(self.kind))

    def update(self, values):
        if values.numel():
            self.kind = torch.float64 if values.dtype == torch.float64 else torch.float32
            self.seen.append(values.detach().reshape(-1).to(self.kind, copy=True))

    def merge(self, other):
        self.seen += [part.clone() for part in other.seen]
        self.kind = other.kind if other.seen else self.kind

    def variance(self, correction=1):
        if self.count <= correction:
            return torch.tensor(math.nan, dtype=self.kind)
        return torch.cat(self.seen).double().var(correction=correction).to(self.kind)


class VarianceOfSquares(VarianceByShift):
    """E[x^2] - E[x]^2, in the dtype of the values."""

    def update(self, values):
        if values.numel():
            v = values.detach()
            if self.shift is None:
                self.shift = torch.zeros((), dtype=torch.float64 if v.dtype == torch.float64 else torch.float32)
                self.s1 = self.s2 = torch.zeros_like(self.shift)
            v = v.to(self.shift.dtype)
            self._take(v.numel(), v.sum(), (v * v).sum())


class VarianceOfWideSquares(VarianceOfSquares):
    """E[x^2] - E[x]^2, in float64."""

    kind = torch.float32

    def update(self, values):
        self.kind = values.dtype if values.dtype == torch.float64 else torch.float32
        super().update(values.double() if values.dtype in (torch.float32, torch.float64) else values.float().double())

    def merge(self, other):
        super().merge(other)
        self.kind = other.kind if other.count else self.kind

    mean = property(lambda self: VarianceByShift.mean.fget(self).to(self.kind))

    def variance(self, correction=1):
        return super().variance(correction).to(self.kind)


class VarianceFromFirst(ANSWERS["RunningVariance"]):
    """Right in batches, and value by value from squares."""

    def update(self, values):
        if values.numel() == 1 and self.count:
            v = values.detach().reshape(()).to(self.mean.dtype)
            squares = self.m2 + self.count * self.mean**2 + v**2
            self.mean = (self.mean * self.count + v) / (self.count + 1)
            self.count += 1
            self.m2 = squares - self.count * self.mean**2
        else:
            super().update(values)


_ADD_M2 = "self.m2 = self.m2 + m2 + delta.square() * (self.count * (count / total))"
_EMPTY = "        if values.numel():\n"
WRONG_VARIANCE = {
    "a view of the batch": (
        variant("variance", ("        values = values.detach()\n", "        values = values.detach().view(-1)\n")),
        "no exception",
    ),
    "a graph in between": (
        variant(
            "variance",
            ("        values = values.detach()\n", "        self.last = values\n        values = values.detach()\n"),
            (
                "(values - mean).square().sum())",
                "(values - mean).square().sum())\n            self.last = self.last.sum() * 1",
            ),
        ),
        "no graph",
    ),
    "no term between the means": (variant("variance", (_ADD_M2, "self.m2 = self.m2 + m2")), "count, mean and variance"),
    "a mean of means": (variant("variance", ("delta * (count / total)", "delta / 2")), "count, mean and variance"),
    "the first dimension": (
        variant("variance", ("self._add(values.numel(), mean", "self._add(len(values) if values.dim() else 1, mean")),
        "count, mean and variance",
    ),
    "count as a tensor": (
        variant("variance", ("self.count = total", "self.count = torch.tensor(total)")),
        "count, mean and variance",
    ),
    "count as a number of NumPy": (
        variant("variance", ("self._add(values.numel(), mean", "self._add(np.prod(values.shape, dtype=int), mean")),
        "got: +int64",
    ),
    "divides once more": (
        variant(
            "variance", ("        return self.m2 /", "        self.m2 = self.m2 * 0.5\n        return 2 * self.m2 /")
        ),
        "count, mean and variance",
    ),
    "correction ignored": (
        variant("variance", ("self.m2 / (self.count - correction)", "self.m2 / (self.count - 1)")),
        "correction|no exception|ZeroDivision",
    ),
    "zero for too few": (
        variant("variance", ("torch.full_like(self.mean, math.nan)", "torch.zeros_like(self.mean)")),
        "correction",
    ),
    "infinite for too few": (
        variant("variance", ("self.count <= correction", "self.count < max(correction, 1)")),
        "correction|no exception",
    ),
    "a number": (
        variant(
            "variance",
            ("return self.m2 / (self.count - correction)", "return (self.m2 / (self.count - correction)).item()"),
        ),
        "count, mean and variance",
    ),
    "raises on nothing": (variant("variance", (_EMPTY, "        if True:\n")), "count, mean and variance|nothing seen"),
    "zero before anything": (
        variant("variance", ("torch.tensor(math.nan)", "torch.tensor(0.0)")),
        "nothing seen",
    ),
    "None before anything": (
        variant("variance", ("self.mean = torch.tensor(math.nan)", "self.mean = None")),
        "nothing seen|no exception",
    ),
    "always float32": (
        variant("variance", ("values if values.dtype == torch.float64 else values.float()", "values.float()")),
        "count, mean and variance",
    ),
    "always float64": (
        variant("variance", ("values if values.dtype == torch.float64 else values.float()", "values.double()")),
        "halves count as float32",
    ),
    "halves stay": (
        variant(
            "variance",
            (
                "values if values.dtype == torch.float64 else values.float()",
                "values if values.is_floating_point() else values.float()",
            ),
        ),
        "halves count as float32",
    ),
    "no integers": (
        variant(
            "variance",
            (
                "values if values.dtype == torch.float64 else values.float()",
                "values.float() if values.element_size() < 4 and values.is_floating_point() else values",
            ),
        ),
        "halves count as float32",
    ),
    "an empty one is merged": (
        variant("variance", ("        if other.count:\n", "        if True:\n")),
        "merging|nothing",
    ),
    "merging moves": (
        variant(
            "variance",
            (
                "            self._add(other.count, other.mean, other.m2)\n",
                "            self._add(other.count, other.mean, other.m2)\n            other.count = 0\n",
            ),
        ),
        "merging",
    ),
    "merging adds variances": (
        variant(
            "variance",
            ("self._add(other.count, other.mean, other.m2)", "self._add(other.count, other.mean, other.variance())"),
        ),
        "merging",
    ),
    "in place on what was merged": (
        variant(
            "variance",
            ("self.mean = self.mean + delta * (count / total)", "self.mean += delta * (count / total)"),
            (_ADD_M2, "self.m2 += m2 + delta.square() * (self.count * (count / total))"),
        ),
        "merging",
    ),
    "squares": (VarianceOfSquares, "values far"),
    "squares in float64": (VarianceOfWideSquares, "values far"),
    "NaN left out": (
        variant(
            "variance", ("        values = values.detach()\n", "        values = values[~values.isnan()].detach()\n")
        ),
        "NaN stays",
    ),
    "squares of single values": (VarianceFromFirst, "values far"),
    "keeps everything": (KeepsAll, "doesn't grow"),
    "keeps the graph": (variant("variance", ("        values = values.detach()\n", "")), "no graph"),
    "keeps the tensor": (
        variant(
            "variance",
            (
                "            mean = values.mean()\n",
                "            mean = values if values.dim() == 0 else values.mean()\n",
            ),
        ),
        "no graph",
    ),
}

# ---------------------------------------------------------------- clip


def clip_by_loops(parameters, max_norm, norm_type=2.0, nonfinite="keep"):
    """One tensor after the other, no list operations."""
    if nonfinite not in {"keep", "raise", "zero"}:
        raise ValueError(nonfinite)
    if torch.is_tensor(parameters):
        parameters = [parameters]
    parameters = list(parameters)
    groups = parameters if parameters and isinstance(parameters[0], dict) else None
    sets = [(list(g["params"]), g.get("max_norm", max_norm)) for g in groups or ()]
    sets = sets if groups is not None else [(parameters, max_norm)]
    norms = []
    with torch.no_grad():
        for members, _ in sets:
            each = [torch.linalg.vector_norm(p.grad, norm_type) for p in members if p.grad is not None]
            wide = torch.float32
            for norm in each:
                wide = torch.promote_types(wide, norm.dtype)
            each = torch.stack([n.to(wide) for n in each]) if each else torch.zeros(1)
            norms.append(torch.linalg.vector_norm(each, norm_type))
        wide = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
        result = torch.stack([n.to(wide) for n in norms])
        if nonfinite != "keep" and not bool(torch.isfinite(result).all()):
            if nonfinite == "raise":
                raise RuntimeError("not finite")
            for members, _ in sets:
                for p in members:
                    if p.grad is not None:
                        p.grad.fill_(0)
            return result if groups is not None else result[0]
        for (members, limit), norm in zip(sets, norms, strict=True):
            factor = torch.minimum(limit / (norm + 1e-6), torch.ones_like(norm))
            for p in members:
                if p.grad is not None:
                    p.grad.mul_(factor.to(p.grad.dtype))
    return result if groups is not None else norms[0]


def clip_by_torch(parameters, max_norm, norm_type=2.0, nonfinite="keep"):
    """On PyTorch's own two halves."""
    known = ["keep", "raise", "zero"]
    known.index(nonfinite)  # ValueError
    given = parameters if isinstance(parameters, torch.Tensor) else list(parameters)
    if isinstance(given, torch.Tensor) or not given or not hasattr(given[0], "keys"):
        given = [given] if isinstance(given, torch.Tensor) else given
        return clip_by_torch([{"params": given}], max_norm, norm_type, nonfinite)[0]
    sets = [[p for p in group["params"] if p.grad is not None] for group in given]
    norms = [torch.nn.utils.get_total_norm([p.grad for p in ps], norm_type) for ps in sets]
    fine = nonfinite == "keep" or all(norm.isfinite().item() for norm in norms)
    if not fine and nonfinite == "raise":
        raise RuntimeError([norm.item() for norm in norms])
    for group, ps, norm in zip(given, sets, norms, strict=True):
        if fine:
            torch.nn.utils.clip_grads_with_norm_(ps, group.get("max_norm", max_norm), norm)
        else:
            for p in ps:
                p.grad.zero_()
    return torch.stack(norms)


_MUL = "torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))"
_ZERO = "        for grads in filter(None, sets):\n            torch._foreach_zero_(grads)\n"
_INVENT = (
    '        for group in given if grouped else [{"params": given}]:\n'
    '            for p in group["params"]:\n'
    "                p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"
)
_CHECK_NAME = (
    '    if nonfinite not in ("keep", "raise", "zero"):\n'
    '        raise ValueError(f"nonfinite must be keep, raise or zero, not {nonfinite!r}")\n'
)
_GIVEN = "given = [parameters] if isinstance(parameters, Tensor) else list(parameters)"
_DECIDE = 'if nonfinite != "keep" and not all(math.isfinite(norm) for norm in norms):'
_LAST = "return torch.stack([norm.to(norms[0].device) for norm in norms]) if grouped else norms[0]"
WRONG_CLIP = {
    "one set isn't held against non-finite": (
        variant("clip", ('if nonfinite != "keep" and not', 'if grouped and nonfinite != "keep" and not')),
        "raise: RuntimeError",
    ),
    "groups by the 2-norm": (
        variant(
            "clip",
            ("_foreach_norm(grads, norm_type)", "_foreach_norm(grads, 2.0 if grouped else norm_type)"),
            ("torch.stack(each), norm_type)", "torch.stack(each), 2.0 if grouped else norm_type)"),
        ),
        "groups, each",
    ),
    "one set by the 2-norm": (
        variant(
            "clip",
            ("_foreach_norm(grads, norm_type)", "_foreach_norm(grads, norm_type if grouped else 2.0)"),
            ("torch.stack(each), norm_type)", "torch.stack(each), norm_type if grouped else 2.0)"),
        ),
        "norm and gradients",
    ),
    "zeros where there was no gradient": (
        variant("clip", (_ZERO, _ZERO + _INVENT)),
        "zero: all",
    ),
    "new zeros": (
        variant("clip", (_ZERO, _ZERO + _INVENT.replace("is None", "is not None"))),
        "zero: all",
    ),
    "a list of numbers": (
        variant(
            "clip",
            (
                "    if nonfinite != ",
                "    known = torch.stack([n.double() for n in norms]).tolist()\n    if nonfinite != ",
            ),
        ),
        "no value is read",
    ),
    "always the 2-norm": (
        variant(
            "clip",
            ("_foreach_norm(grads, norm_type)", "_foreach_norm(grads, 2.0)"),
            ("torch.stack(each), norm_type)", "torch.stack(each), 2.0)"),
        ),
        "norm and gradients",
    ),
    "a sum of norms": (
        variant("clip", ("torch.linalg.vector_norm(torch.stack(each), norm_type)", "torch.stack(each).sum()")),
        "norm and gradients",
    ),
    "each tensor by its own": (
        variant(
            "clip",
            (
                _MUL,
                "[g.mul_((limit / (n + 1e-6)).clamp(max=1.0)) for g, n in zip(grads, torch._foreach_norm(grads, "
                "norm_type))]",
            ),
        ),
        "norm and gradients",
    ),
    "scales up": (variant("clip", (".clamp(max=1.0)", "")), "norm and gradients"),
    "without the small number": (variant("clip", ("(norm + 1e-6)", "norm")), "norm and gradients"),
    "the norm afterwards": (
        variant(
            "clip",
            (
                _LAST,
                "norms = [norm.clamp(max=limit) if math.isfinite(limit) else norm for norm, limit in zip(norms, "
                "limits)]\n    " + _LAST,
            ),
        ),
        "norm and gradients",
    ),
    "lists only": (variant("clip", (_GIVEN, "given = parameters")), "norm and gradients|a tensor, a list"),
    "walks twice": (
        variant(
            "clip",
            (
                _GIVEN,
                "given = [parameters] if isinstance(parameters, Tensor) else parameters if iter(parameters) is "
                "parameters and not isinstance(next(parameters), Mapping) else parameters\n"
                "    given = list(given)",
            ),
        ),
        "a tensor, a list",
    ),
    "a tensor is its rows": (variant("clip", (_GIVEN, "given = list(parameters)")), "a tensor, a list"),
    "new gradients": (
        variant(
            "clip",
            (
                _MUL,
                "[setattr(p, 'grad', p.grad * (limit / (norm + 1e-6)).clamp(max=1.0).to(p.grad.dtype)) for s in "
                "(given if grouped else [{'params': given}]) for p in s['params'] if p.grad is not None and "
                "any(p.grad is g for g in grads)]",
            ),
        ),
        "in place",
    ),
    "fails without gradients": (
        variant("clip", (" if grads else [torch.zeros(())]", "")),
        "without gradients|no exception",
    ),
    "zeros for no gradient": (
        variant(
            "clip",
            (
                "    for group in given",
                '    for group in given if grouped else [{"params": given}]:\n'
                "        for p in group['params'] if not isinstance(group['params'], Tensor) else []:\n"
                "            p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n    for group in given",
            ),
        ),
        "without gradients",
    ),
    "one norm for all groups": (
        variant(
            "clip",
            (
                "    if nonfinite != ",
                "    norms = [torch.linalg.vector_norm(torch.stack([n.double() for n in norms]), "
                "norm_type).to(norms[0].dtype)] * len(norms)\n    if nonfinite != ",
            ),
        ),
        "groups, each",
    ),
    "one limit for all groups": (variant("clip", ('group.get("max_norm", max_norm)', "max_norm")), "groups, each"),
    "a limit of 0 is none": (
        variant("clip", ('group.get("max_norm", max_norm)', 'group.get("max_norm") or max_norm')),
        "groups, each",
    ),
    "writes the limit": (
        variant(
            "clip",
            ('group.get("max_norm", max_norm)', 'group.setdefault("max_norm", max_norm) if grouped else max_norm'),
        ),
        "groups, each",
    ),
    "a list of norms": (variant("clip", (_LAST, "return norms if grouped else norms[0]")), "groups, each"),
    "one group is none": (
        variant("clip", (" if grouped else norms[0]", " if grouped and len(norms) > 1 else norms[0]")),
        "groups, each",
    ),
    "one dtype": (
        variant(
            "clip",
            (
                "torch.stack(each), norm_type)",
                "torch.cat([g.reshape(-1) for g in grads]) if grads and all(g.dtype == grads[0].dtype for g in "
                "grads) else torch.stack([e.to(grads[-1].dtype).half() if grads else e for e in each]) * (1 if "
                "len({g.dtype for g in grads}) < 2 else 1.1), norm_type)",
            ),
        ),
        "several dtypes",
    ),
    "gradients in the dtype of the norm": (
        variant(
            "clip",
            (_MUL, "[setattr(g, 'data', (g * (limit / (norm + 1e-6)).clamp(max=1.0)).to(norm.dtype)) for g in grads]"),
        ),
        "several dtypes|no exception",
    ),
    "keep isn't kept": (
        variant(
            "clip", (_MUL, "torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0))")
        ),
        "keep: a non-finite",
    ),
    "zero by default": (
        variant("clip", (_DECIDE, 'if not all(bool(n.isfinite()) for n in norms) and (nonfinite == "keep" or True):')),
        "keep: a non-finite",
    ),
    "asks in any case": (
        variant("clip", (_DECIDE, 'if not all(math.isfinite(norm) for norm in norms) and nonfinite != "keep":')),
        "no value is read",
    ),
    "a factor in Python": (
        variant(
            "clip",
            (
                _MUL,
                "torch._foreach_mul_(grads, min(1.0, limit / (norm.item() + 1e-6)) if norm.item() == norm.item() "
                "else math.nan)",
            ),
        ),
        "no value is read",
    ),
    "raises too late": (
        variant(
            "clip",
            (
                "    if nonfinite != ",
                '    for grads, limit, norm in zip(sets, limits, norms) if nonfinite == "raise" else ():\n'
                "        if grads and math.isfinite(norm):\n"
                "            torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))\n"
                "    if nonfinite != ",
            ),
            ("    else:\n        for grads, limit", '    elif nonfinite != "raise":\n        for grads, limit'),
        ),
        "raise: RuntimeError",
    ),
    "another error": (
        variant("clip", ('raise RuntimeError(f"gradient', 'raise ArithmeticError(f"gradient')),
        "raise: RuntimeError",
    ),
    "NaN only": (
        variant("clip", ("not all(math.isfinite(norm) for norm in norms)", "any(math.isnan(norm) for norm in norms)")),
        "raise: RuntimeError",
    ),
    "the last group only": (
        variant("clip", ("not all(math.isfinite(norm) for norm in norms)", "not math.isfinite(norms[0])")),
        "raise: RuntimeError",
    ),
    "times zero": (variant("clip", ("torch._foreach_zero_(grads)", "torch._foreach_mul_(grads, 0.0)")), "zero: all"),
    "the bad group only": (
        variant(
            "clip",
            (
                _ZERO,
                "        for grads, norm in zip(sets, norms):\n"
                "            if grads and not math.isfinite(norm):\n                torch._foreach_zero_(grads)\n",
            ),
        ),
        "zero: all",
    ),
    "gradients removed": (
        variant(
            "clip",
            (
                _ZERO,
                "        for group in given if grouped else [{'params': given}]:\n"
                "            for p in group['params']:\n                p.grad = None\n",
            ),
        ),
        "zero: all|no exception|AttributeError",
    ),
    "norms of zero": (
        variant("clip", (_ZERO, _ZERO + "        norms = [torch.zeros_like(norm) for norm in norms]\n")),
        "zero: all",
    ),
    "any name": (variant("clip", (_CHECK_NAME, "")), "another nonfinite"),
    "a name is looked at late": (
        variant(
            "clip",
            (_CHECK_NAME, ""),
            (
                '        if nonfinite == "raise":',
                '        if nonfinite not in ("raise", "zero"):\n            raise ValueError(nonfinite)\n'
                '        if nonfinite == "raise":',
            ),
        ),
        "another nonfinite",
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
        with torch.no_grad():
            for n, t in self.shadow.items():
                t.set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())
                t[...] = state["shadow"][n]
        self.updates = state["updates"]


_OWN = "own = {name: t.detach().clone() for name, t in self.live.items()}"
_OUT = "        finally:\n            self._write(self.live, own)\n            self.swapped = False\n"
_NESTED = '        if self.swapped:\n            raise RuntimeError("applied() inside of applied()")\n'
_STATE_CLONE = "shadow = {name: t.clone() for name, t in self.shadow.items()}"
_NAMES_CHECK = (
    "        if wrong := sorted(given.keys() ^ self.shadow.keys()):\n"
    '            raise ValueError(f"missing or left over: {wrong}")\n'
)
_SHAPES_CHECK = (
    "            if mine.shape != given[name].shape:\n"
    '                raise ValueError(f"{name} is {given[name].shape}, here {mine.shape}")\n'
)
_LOADS = "        self._write(self.shadow, given)\n        self.updates = updates\n"
WRONG_EMA = {
    "another order of names": (
        variant(
            "ema",
            (
                "sorted(given.keys() ^ self.shadow.keys())",
                "[n for n, m in zip(given, self.shadow) if n != m] or sorted(given.keys() ^ self.shadow.keys())",
            ),
        ),
        "same bits|no exception",
    ),
    "turned over": (
        variant(
            "ema",
            (
                "mine.shape != given[name].shape",
                "(mine.numel(), mine.dim()) != (given[name].numel(), given[name].dim())",
            ),
        ),
        "other names or shapes",
    ),
    "another decay": (
        variant(
            "ema",
            ("        self.updates = updates\n", "        self.updates, self.decay = updates, min(self.decay, 0.9)\n"),
        ),
        "same bits",
    ),
    "not saved inside": (
        variant(
            "ema",
            (
                "        shadow = {name: t.clone()",
                '        if self.swapped:\n            raise RuntimeError("inside")\n        shadow = {name: t.clone()',
            ),
        ),
        "state_dict gives",
    ),
    "no class": (lambda model, decay=0.9, warmup=True: None, "is a Shadow"),
    "another class": (nn.Module, "is a Shadow"),
    "parameters only": (
        variant(
            "ema",
            (
                "            self._write(self.live, self.shadow)\n",
                "            self._write({n: t for n, t in self.live.items() if isinstance(t, nn.Parameter)}, "
                "self.shadow)\n",
            ),
        ),
        "has the averages",
    ),
    "floats only": (
        variant(
            "ema",
            (
                "            self._write(self.live, self.shadow)\n",
                "            self._write({n: t for n, t in self.live.items() if t.is_floating_point()}, self.shadow)\n",
            ),
        ),
        "has the averages",
    ),
    "does nothing": (variant("ema", ("            self._write(self.live, self.shadow)\n", "")), "has the averages"),
    "own values not copied": (
        variant("ema", (_OWN, "own = {name: t.detach() for name, t in self.live.items()}")),
        "bit for bit",
    ),
    "puts back a difference": (
        variant(
            "ema",
            (
                _OWN,
                "own = {name: t.detach() - self.shadow[name] if t.is_floating_point() else t.clone() for name, t "
                "in self.live.items()}",
            ),
            (
                "            self._write(self.live, own)\n",
                "            self._write(self.live, {n: t + self.shadow[n] if t.is_floating_point() else t for "
                "n, t in own.items()})\n",
            ),
        ),
        "bit for bit",
    ),
    "counters stay": (
        variant(
            "ema",
            (
                "            self._write(self.live, own)\n",
                "            self._write({n: t for n, t in self.live.items() if t.is_floating_point()}, own)\n",
            ),
        ),
        "bit for bit",
    ),
    "no finally": (
        variant(
            "ema",
            (
                _OUT,
                "        except ZeroDivisionError:\n            pass\n        self._write(self.live, own)\n"
                "        self.swapped = False\n",
            ),
        ),
        "after an exception",
    ),
    "Exception only": (
        variant(
            "ema",
            (
                _OUT,
                "        except Exception:\n            self._write(self.live, own)\n"
                "            self.swapped = False\n            raise\n        self._write(self.live, own)\n"
                "        self.swapped = False\n",
            ),
        ),
        "after an exception",
    ),
    "swallows": (
        variant("ema", ("        finally:\n", "        except ValueError:\n            pass\n        finally:\n")),
        "after an exception",
    ),
    "another exception": (
        variant(
            "ema",
            (
                "        finally:\n",
                "        except ValueError as e:\n            raise ValueError(str(e)) from e\n        finally:\n",
            ),
        ),
        "after an exception",
    ),
    "new parameters": (
        variant(
            "ema",
            (
                "            self._write(self.live, own)\n",
                "            self._write(self.live, own)\n            self._renew()\n",
            ),
            (
                "    @staticmethod",
                "    def _renew(self):\n        for name, t in list(self.live.items()):\n"
                "            if isinstance(t, nn.Parameter):\n                owner, _, last = name.rpartition('.')\n"
                "                new = nn.Parameter(t.detach().clone())\n"
                "                for module in self.model.modules():\n"
                "                    for key, p in list(module._parameters.items()):\n"
                "                        if p is t:\n                            module._parameters[key] = new\n"
                "                self.live[name] = new\n"
                "        self._averaged = ([self.shadow[n] for n, t in self.live.items() if t.is_floating_point()],"
                " [t for t in self.live.values() if t.is_floating_point()])\n\n    @staticmethod",
            ),
            (
                "    @contextmanager",
                "    def __init__(self, model, decay=0.999, warmup=True):\n"
                "        super().__init__(model, decay, warmup)\n        self.model = model\n\n"
                "    @contextmanager",
            ),
        ),
        "same tensor objects",
    ),
    "shares memory inside": (
        type("Shares", (EMAByData,), {"applied": contextmanager(lambda self: (yield from _shared(self)))}),
        "written inside is lost",
    ),
    "puts back what nobody wrote": (
        variant(
            "ema",
            (
                "            yield\n",
                "            entered = {n: t.clone() for n, t in self.shadow.items()}\n            yield\n",
            ),
            (
                "            self._write(self.live, own)\n",
                "            same = {n: t for n, t in self.live.items() if torch.equal(t, entered[n])}\n"
                "            self._write(same, own)\n",
            ),
        ),
        "written inside is lost",
    ),
    "update inside": (
        variant(
            "ema",
            ("        self.swapped = True\n", "        self.entered = True\n"),
            (_NESTED, '        if getattr(self, "entered", False):\n            raise RuntimeError("nested")\n'),
            ("            self.swapped = False\n", "            self.entered = False\n"),
        ),
        "inside raise RuntimeError",
    ),
    "nested": (
        variant("ema", (_NESTED, "        if self.swapped:\n            yield\n            return\n")),
        "inside raise RuntimeError",
    ),
    "nested ends it": (
        variant(
            "ema",
            (
                _NESTED,
                "        if self.swapped:\n            self.swapped = False\n"
                '            raise RuntimeError("nested")\n',
            ),
        ),
        "inside raise RuntimeError",
    ),
    "inside for good": (
        variant("ema", ("            self.swapped = False\n", "")),
        "work again|no exception|bit for bit",
    ),
    "inside after an exception": (
        variant(
            "ema",
            ("            yield\n", "            yield\n            self.swapped = False\n"),
            (
                "            self._write(self.live, own)\n            self.swapped = False\n",
                "            self._write(self.live, own)\n",
            ),
        ),
        "work again",
    ),
    "only floats saved": (
        variant(
            "ema",
            (_STATE_CLONE, "shadow = {name: t.clone() for name, t in self.shadow.items() if t.is_floating_point()}"),
        ),
        "state_dict gives",
    ),
    "the model's values": (
        variant("ema", (_STATE_CLONE, "shadow = {name: t.detach().clone() for name, t in self.live.items()}")),
        "state_dict gives",
    ),
    "updates as a tensor": (
        variant("ema", ('{"updates": self.updates,', '{"updates": torch.tensor(self.updates),')),
        "state_dict gives",
    ),
    "no snapshot": (variant("ema", (_STATE_CLONE, "shadow = dict(self.shadow)")), "snapshot"),
    "the dictionary itself": (variant("ema", (_STATE_CLONE, "shadow = self.shadow")), "snapshot"),
    "not for weights_only": (
        variant(
            "ema",
            (
                '        return {"updates"',
                "        class Kept(dict):\n            pass\n\n        Kept.__module__ = '__main__'\n"
                "        shadow = Kept(shadow)\n        globals()['Kept'] = Kept\n        return {\"updates\"",
            ),
        ),
        "torch.save",
    ),
    "updates lost": (variant("ema", ("        self.updates = updates\n", "")), "same bits"),
    "updates added": (
        variant("ema", ("self.updates = updates", "self.updates += updates")),
        "same bits",
    ),
    "dictionary replaced": (
        variant(
            "ema",
            (
                "        self._write(self.shadow, given)\n",
                "        self.shadow = {n: t.to(self.shadow[n].dtype).clone() for n, t in given.items()}\n",
            ),
        ),
        "same bits",
    ),
    "one update more": (
        variant("ema", ("self.updates = updates", "self.updates = max(updates, 1)")),
        "same bits",
    ),
    "floats only loaded": (
        variant(
            "ema",
            (
                "        self._write(self.shadow, given)\n",
                "        self._write({n: t for n, t in self.shadow.items() if t.is_floating_point()}, given)\n",
            ),
        ),
        "values|dtype",
    ),
    "dtype of the file": (
        variant(
            "ema",
            (
                "        self._write(self.shadow, given)\n",
                "        for name, mine in self.shadow.items():\n            mine.data = given[name].clone()\n",
            ),
        ),
        "dtype of the averages",
    ),
    "shares with the file": (
        variant(
            "ema",
            (
                "        self._write(self.shadow, given)\n",
                "        for name, mine in self.shadow.items():\n            mine.data = given[name].to(mine.dtype)\n",
            ),
        ),
        "state stays",
    ),
    "empties the file": (
        variant(
            "ema",
            (
                'given, updates = state["shadow"], state["updates"]',
                'given, updates = state.pop("shadow"), state["updates"]',
            ),
        ),
        "state stays|no exception|KeyError",
    ),
    "into the model": (variant("ema", (_LOADS, _LOADS + "        self._write(self.live, given)\n")), "touch the model"),
    "loading ends the swap": (
        variant("ema", (_LOADS, _LOADS + "        self.swapped = False\n")),
        "touch the model",
    ),
    "into the model inside": (
        variant("ema", (_LOADS, _LOADS + "        if self.swapped:\n            self._write(self.live, given)\n")),
        "touch the model",
    ),
    "not inside": (
        variant("ema", (_LOADS, "        if self.swapped:\n            raise RuntimeError\n" + _LOADS)),
        "touch the model|no exception|RuntimeError",
    ),
    "missing names pass": (
        variant(
            "ema",
            ("given.keys() ^ self.shadow.keys()", "given.keys() - self.shadow.keys()"),
            (
                "        for name, mine in self.shadow.items():\n",
                "        given = {**self.shadow, **given}\n        for name, mine in self.shadow.items():\n",
            ),
        ),
        "other names or shapes",
    ),
    "more names pass": (
        variant("ema", ("given.keys() ^ self.shadow.keys()", "self.shadow.keys() - given.keys()")),
        "other names or shapes",
    ),
    "KeyError for a name": (variant("ema", (_NAMES_CHECK, "")), "other names or shapes"),
    "shapes broadcast": (variant("ema", (_SHAPES_CHECK, "            pass\n")), "other names or shapes"),
    "number of elements": (
        variant("ema", ("mine.shape != given[name].shape", "mine.numel() != given[name].numel()")),
        "other names or shapes",
    ),
    "checks while it writes": (
        variant(
            "ema",
            (_SHAPES_CHECK, _SHAPES_CHECK + "            self._write({name: mine}, given)\n"),
            ("        self._write(self.shadow, given)\n", ""),
        ),
        "other names or shapes",
    ),
    "counts before it checks": (
        variant(
            "ema",
            (
                '        given, updates = state["shadow"], state["updates"]\n',
                '        given, updates = state["shadow"], state["updates"]\n        self.updates = updates\n',
            ),
        ),
        "other names or shapes",
    ),
    "no name": (
        variant("ema", ('f"{name} is {given[name].shape}, here {mine.shape}"', '"shapes differ"')),
        "other names or shapes",
    ),
}


def _shared(self):
    if self.inside:
        raise RuntimeError("inside")
    own = {n: t.data for n, t in self.live.items()}
    try:
        self.inside = True
        for n, t in self.live.items():
            t.data = self.shadow[n]
        yield
    finally:
        for n, t in self.live.items():
            t.data = own[n]
        self.inside = False


CHECKS = {
    "label_smoothing_cross_entropy": check.label_smoothing_cross_entropy,
    "nt_xent_loss": check.nt_xent_loss,
    "RunningVariance": check.running_variance,
    "clip_grad_norm": check.clip_grad_norm,
    "EMA": check.ema,
}
RIGHT = {
    "label_smoothing_cross_entropy": [
        smoothing_by_targets,
        smoothing_by_rows,
        variant("smoothing", (_WIDE, "logits.double()")),
    ],
    "nt_xent_loss": [
        ntxent_by_blocks,
        ntxent_by_rows,
        variant("ntxent", ("z.float() if z.dtype in (torch.float16, torch.bfloat16) else z", "z.double()")),
    ],
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
    IDLE = IDLE
    CHECKS = CHECKS
    ANSWERS = ANSWERS
    STUBS = STUBS
    RIGHT = RIGHT
    WRONG = WRONG

    def hold_stand_in(self, name, stand_in):
        """The cells below train and count with it, so all that the check asks must hold, but for the own operations."""
        result = self.CHECKS[name].run(stand_in)
        others = {item.name for item in result.failures} - {"is written without cross_entropy and nll_loss"}
        assert not others, str(result)
