"""The checks of 15-04 accept right answers, however written, and reject what a student might really write."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from check_protocol import CheckProtocol
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from course.lesson_code import definitions
from shared.checks import topic_15_04 as check

CHECKS = {
    "label_smoothing_cross_entropy": check.label_smoothing_cross_entropy,
    "nt_xent_loss": check.nt_xent_loss,
    "RunningVariance": check.running_variance,
    "clip_grad_norm": check.clip_grad_norm,
    "EMA": check.ema,
}
GIVEN = definitions("15-04", "log-probabilities", "widened", "followed", "decay", "shadow")
RIGHT, WRONG = {}, {}


# ---------------------------------------------------------------- smoothing


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


PICKED = "losses.gather(1, index.unsqueeze(1)).squeeze(1)"
BY_TARGETS = "(losses * F.one_hot(index, wide.shape[1]).movedim(-1, 1)).sum(dim=1)"
SPREAD = "(losses.movedim(1, -1) * weight).mean(dim=-1)"
OWN_SUM = "(own_weight * kept).sum()"
WIDE = "wide = widened(logits)"
KEPT = "kept = labels != ignore_index"
RIGHT["label_smoothing_cross_entropy"] = [smoothing_by_rows, (PICKED, BY_TARGETS)]
WRONG["label_smoothing_cross_entropy"] = {
    "PyTorch's own": ("without cross_entropy", check.label_smoothing_cross_entropy.stand_in()),
    "spread over the others": (
        "reductions none",
        "epsilon * of_all",
        "epsilon * (of_all * wide.shape[1] - of_label) / (wide.shape[1] - 1)",
    ),
    "no epsilon of 0": ("reductions none", WIDE, f"epsilon = epsilon or 0.1\n{WIDE}"),
    "the mean of any reduction": (  # told once: all else is right
        r"(?s)\A(?!.*WRONG.*WRONG).*what does each `reduction` return",
        'if reduction == "sum":',
        "reduction = 'mean'\nif reduction == \"sum\":",
    ),
    "everything in float32": ("reductions none", WIDE, "wide = logits.float()"),
    "two dimensions only": (r"N, C, d1[\s\S]*the classes\?", SPREAD, "(losses * weight).mean(dim=1)"),
    "weights in the first term only": ("class weights", SPREAD, "losses.mean(dim=1)"),
    "no weights in the mean": ("class weights[\\s\\S]*mean count", OWN_SUM, "kept.sum()"),
    "ignored counts in the mean": ("ignored labels", OWN_SUM, "own_weight.sum()"),
    "ignored costs": ("ignored", "loss = torch.where(kept, loss, 0.0)", "loss = loss * 1"),
    "only negative numbers are ignored": ("ignored", KEPT, "kept = labels >= 0"),
    "writes into the labels": (
        "ignored[\\s\\S]*arguments afterwards",
        "index = torch.where(kept, labels, 0)",
        "index = labels.mul_(kept)",
    ),
    "no gradient of the sum": ("gradients", "    loss = loss.sum()\n", "    loss = loss.detach().sum()\n"),
    "float32 comes back": ("in the dtype of the logits", "loss.to(logits.dtype)", "loss"),
    "ones on the CPU": ("device[\\s\\S]*Hint 3", "wide.new_ones(wide.shape[1])", "torch.ones(wide.shape[1])"),
    "half precision throughout": ("10,000[\\s\\S]*Hint 2", WIDE, "wide = logits"),
}


# ---------------------------------------------------------------- NT-Xent


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


CAT = "torch.cat([first, second])"
NTX_WIDE = f"widened({CAT})"
WHERE_FINITE = "torch.where((a := logits.exp().sum(dim=1).log()).isfinite(), a, logits.logsumexp(dim=1))"
CROSS_ENTROPY = "F.cross_entropy(logits, partner)"
RIGHT["nt_xent_loss"] = [check.nt_xent_loss.stand_in(), ntxent_by_rows]
WRONG["nt_xent_loss"] = {
    "one way": ("the mean over all views[\\s\\S]*Hint 1", ntxent_one_way),
    "with itself": ("the mean over all views", ".masked_fill(itself, -torch.inf)", ""),
    "-100 for itself": ("the mean over", "-torch.inf", "-100.0"),
    "not normalised": ("whatever their lengths", "F.normalize(wide, dim=1)", "wide"),
    "everything in float32": ("the mean over", NTX_WIDE, f"{CAT}.float()"),
    "one side is a target": ("gradients reach both[\\s\\S]*cuts the graph", CAT, "torch.cat([first, second.detach()])"),
    "partners on the CPU": ("device of the inputs[\\s\\S]*Hint 3", ", device=z.device).roll", ").roll"),
    "float32 comes back": ("10,000, temperature", ".to(first.dtype)", ""),
    "half precision throughout": ("10,000, temperature", NTX_WIDE, CAT),
    "normalised too early": ("10,000, temperature", NTX_WIDE, f"F.normalize({CAT}, dim=1).float()"),
    "a short softmax": (
        "10,000, temperature",
        CROSS_ENTROPY,
        "logits.softmax(dim=1)[range(len(z)), partner].log().mean().neg()",
    ),
    "exp where it is finite": (
        "finite gradients, torch.float16",
        CROSS_ENTROPY,
        f"({WHERE_FINITE} - logits[range(len(z)), partner]).mean()",
    ),
}


# ---------------------------------------------------------------- variance


class VarianceByShift:
    """Sums of distances from the first mean."""

    def __init__(self):
        self.count, self.shift, self.s1, self.s2 = 0, torch.tensor(torch.nan), None, None

    @property
    def mean(self):
        return self.shift + self.s1 / self.count if self.count else self.shift

    def update(self, values):
        v = values.detach().reshape(-1)
        v = v.to(torch.float32) if v.dtype != torch.float64 else v
        if len(v):
            self.shift = self.shift if self.count else v.mean()
            self._take(len(v), (v - self.shift).sum(), ((v - self.shift) ** 2).sum())

    def _take(self, n, s1, s2):
        self.s1, self.s2 = (self.s1 + s1, self.s2 + s2) if self.count else (s1, s2)
        self.count += n

    def merge(self, other):
        if other.count:
            self.shift = self.shift if self.count else other.shift.clone()
            gap = other.shift - self.shift
            self._take(other.count, other.s1 + other.count * gap, other.s2 + 2 * gap * other.s1 + other.count * gap**2)

    def variance(self, correction=1):
        if self.count - correction <= 0:
            return torch.full_like(self.mean, torch.nan)
        return (self.s2 - self.s1**2 / self.count) / (self.count - correction)


SEES = "self._add(values.numel(), mean, m2)"
SEES_EACH = "for value in values.reshape(-1):\n    self._add(1, value, torch.zeros_like(value))"
MERGES = "self._add(other.count, other.mean, other.m2)"
WIDEN = "values = widened(values.detach())"
NOTHING = "if not count:\n    return"
RIGHT["RunningVariance"] = [VarianceByShift, (SEES, SEES_EACH)]
WRONG["RunningVariance"] = {
    "sums of squares": (
        "far from 0",
        "(values - mean).square().sum()",
        "values.square().sum() - values.numel() * mean.square()",
    ),
    "n is the number of rows": (
        "count, mean and variance",
        "values.numel()",
        "(values.shape[0] if values.dim() else 1)",
    ),
    "mean of means": ("count, mean and variance", "delta * (count / total)", "delta / 2"),
    "no delta": ("count, mean and variance", " + delta.square() * (self.count * count / total)", ""),
    "an empty batch in update only": (
        "empty batch[\\s\\S]*Hint 2",
        NOTHING,
        "",
        MERGES,
        f"if other.count:\n    {MERGES}",
    ),
    "everything in float32": ("float64 stays", WIDEN, "values = values.detach().float()"),
    "halves stay": ("count as float32", WIDEN, "values = values.detach() * 1.0"),
    "merge counts but doesn't shift": (
        "merging workers",
        MERGES,
        MERGES.replace("other.mean", "self.mean if self.count else other.mean"),
    ),
    "merge empties other": ("merging workers[\\s\\S]*which line changes other", MERGES, f"{MERGES}\nother.count = 0"),
    "a shared tensor": ("merging workers", "self.mean = self.mean + delta", "self.mean += delta"),
    "infinity where nothing is left": ("nothing can be said", "self.mean, math.nan", "self.mean, math.inf"),
    "keeps the graph": ("keeps neither[\\s\\S]*a graph", WIDEN, "values = widened(values)"),
    "keeps the values": (
        "keeps neither[\\s\\S]*400 values",
        SEES,
        f"{SEES}\nself.seen = [*getattr(self, 'seen', []), values]",
    ),
}


# ---------------------------------------------------------------- clipping


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


GROUPS = "groups = list(parameters)"
FINITE = 'finite = nonfinite == "keep" or all(math.isfinite(norm) for norm in norms)'
READS = 'finite = all(math.isfinite(norm) for norm in norms) or nonfinite == "keep"'
ONE_NORM = "norms = [torch.linalg.vector_norm(torch.stack(norms), norm_type)] * len(norms)"
FACTOR = 'factor = group.get("max_norm", max_norm) / (norm + 1e-6)'
CLAMP = "torch._foreach_mul_(of_group, factor.clamp(max=1.0))"
ZERO = "torch._foreach_zero_(of_group)"
WIDEST = "dtype = torch.promote_types(dtype, grad.dtype)"
RIGHT["clip_grad_norm"] = [check.clip_grad_norm.stand_in(), clip_by_torch]
WRONG["clip_grad_norm"] = {
    "enlarges": ("norm and gradients of one set", ".clamp(max=1.0)", ""),
    "no 1e-6": ("norm and gradients of one set", "(norm + 1e-6)", "norm"),
    "always the 2-norm": ("one set", "_foreach_norm(of_group, norm_type,", "_foreach_norm(of_group, 2,"),
    "norm afterwards": ("one set", "else norms[0]", "else norms[0].clamp(max=max_norm)"),
    "new gradients": (
        "in place[\\s\\S]*which tensor object",
        CLAMP,
        "for p in group['params']:\n    if p.grad is not None:\n        p.grad = p.grad * factor.clamp(max=1.0)",
    ),
    "goes through twice": ("any iterable[\\s\\S]*through a generator", GROUPS, f"sum(1 for _ in parameters)\n{GROUPS}"),
    "one norm for all groups": ("groups, each", FINITE, f"{ONE_NORM}\n{FINITE}"),
    "max_norm of the call": ("groups, each", FACTOR, "factor = max_norm / (norm + 1e-6)"),
    "a limit of 0 is none": ("groups, each", FACTOR, 'factor = (group.get("max_norm") or max_norm) / (norm + 1e-6)'),
    "stacks nothing": ("without a gradient", "    if of_group:\n", "    if True:\n"),
    "float16 overflows": ("float32", WIDEST, "dtype = grad.dtype"),
    "narrows float64": ("one set|float32", WIDEST, "dtype = torch.float32"),
    "reads with keep": ("keep: clips[\\s\\S]*Hint 3", FINITE, READS),
    "clips before it raises": (
        "raise: RuntimeError",
        FINITE,
        'finite = nonfinite != "zero" or all(math.isfinite(norm) for norm in norms)',
        "if of_group and finite:",
        "if nonfinite == 'raise' and not math.isfinite(norm):\n    raise RuntimeError\nif of_group and finite:",
    ),
    "ValueError": ("raise: RuntimeError", "raise RuntimeError", "raise ValueError"),
    "times zero": ("zero: all[\\s\\S]*what is 0 times infinity", ZERO, "torch._foreach_mul_(of_group, 0.0)"),
    "zeroes one group": ("zero: all", ZERO, f"if not math.isfinite(norm):\n    {ZERO}"),
}


# ---------------------------------------------------------------- EMA


class EMAByData(check._EMA):
    """Swaps storages in, filled with copies, and the own ones back."""

    @contextmanager
    def applied(self):
        if self.swapped:
            raise RuntimeError("inside")
        own = {name: t.data for name, t in self.live.items()}
        self.swapped = True
        try:
            for name, t in self.live.items():
                t.data = self.shadow[name].clone()
            yield self
        finally:
            for name, t in self.live.items():
                t.data = own[name]
            self.swapped = False


class NewParameters(check._EMA):
    def __init__(self, model):
        super().__init__(model)
        self.model = model

    @contextmanager
    def applied(self):
        with super().applied():
            yield
        for name, p in self.model._parameters.items():
            self.model._parameters[name] = nn.Parameter(p.detach().clone(), p.requires_grad)


IN = "self._write(self.live, self.shadow)"
OUT = "self._write(self.live, own)"
OWN = "own = {name: t.detach().clone() for name, t in self.live.items()}"
LEARNING = "{n: t for n, t in self.live.items() if t.requires_grad}"
NESTED = 'if self.swapped:\n    raise RuntimeError("applied() inside of applied()")'
LOADS = "self._write(self.shadow, given)"
RIGHT["EMA"] = [check.ema.stand_in(), EMAByData]
WRONG["EMA"] = {
    "not derived": ("derived from Shadow", nn.Module),
    "parameters only": ("inside, the model has", IN, IN.replace("self.live", LEARNING)),
    "own values not copied": ("was written inside", OWN, OWN.replace(".clone()", "")),
    "averages are the model's memory": (
        "was written inside",
        IN,
        "for name, t in self.live.items():\n    t.data = self.shadow[name]",
        OUT,
        "for name, t in self.live.items():\n    t.data = own[name]",
    ),
    "no finally": ("also after an exception", "finally:", "except ZeroDivisionError:\n    pass\nelse:"),
    "swallows": ("which is passed on", "finally:", "except ValueError:\n    pass\nfinally:"),
    "stays swapped after an exception": (
        "also after an exception",
        f"    {OUT}\n    self.swapped = False",
        f"    {OUT}\nself.swapped = False",
    ),
    "new parameters": ("what does an optimizer hold", NewParameters),
    "nested": ("raise RuntimeError", NESTED, ""),
    "updates inside": ("raise RuntimeError", "self.swapped = True", "self.inside = True"),
    "no snapshot": ("snapshot", "name: t.clone() for", "name: t for"),
    "updates forgotten": ("same bits", 'self.updates = state["updates"]', ""),
    "other tensors in shadow": ("same bits", LOADS, "self.shadow = dict(given)"),
    "takes the dtype of the state": (
        "keeps the averages' dtype",
        LOADS,
        "for name, mine in self.shadow.items():\n    mine.data = given[name].clone()",
    ),
    "no names": ("other names or shapes", "if different:", "if given.keys() < self.shadow.keys():"),
    "no shapes": ("other names or shapes", "!= given[name].shape", "is None"),
    "writes, then complains": ("nothing is changed", LOADS, f"    mine.copy_(given[name])\n{LOADS}"),
}


# ---------------------------------------------------------------- all


class TestChecks(CheckProtocol, topic="15-04", given=GIVEN):
    CHECKS, RIGHT, WRONG = CHECKS, RIGHT, WRONG

    def hold_stand_in(self, name, stand_in):
        """The cells below train and count with it. Two may do what an answer may not: call PyTorch, keep all values."""
        result = self.CHECKS[name].run(stand_in)
        allowed = {"is written without cross_entropy and nll_loss", "keeps neither the graph nor the values"}
        assert {item.name for item in result.failures} <= allowed, str(result)


def test_the_examples_of_the_tasks():
    """The stand-in of the first one is PyTorch's own loss."""
    for loss in (TestChecks.ANSWERS["label_smoothing_cross_entropy"], check._smoothed):
        assert loss(torch.tensor([[2.0, 0, 0]]), torch.tensor([0]), epsilon=0.3).item() == pytest.approx(
            0.640, abs=5e-4
        )
    for loss in (TestChecks.ANSWERS["nt_xent_loss"], check._nt_xent):
        assert loss(torch.eye(2), torch.eye(2), 1.0).item() == pytest.approx(0.551, abs=5e-4)
    stats = TestChecks.ANSWERS["RunningVariance"]()
    stats.update(torch.tensor([1.0, 3.0]))
    stats.update(torch.tensor(8.0))
    assert (stats.count, stats.mean.item(), stats.variance().item()) == (3, 4.0, 13.0)
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([3.0, 0.0, 4.0])
    assert TestChecks.ANSWERS["clip_grad_norm"]([p], 1.0).item() == 5.0
    assert p.grad.tolist() == pytest.approx([0.6, 0.0, 0.8], abs=1e-5)
