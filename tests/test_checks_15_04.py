"""The checks of 15-04 accept right answers, however written, and reject what a student might really write."""

from contextlib import contextmanager

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

CHECKS = {
    "label_smoothing_cross_entropy": check.label_smoothing_cross_entropy,
    "nt_xent_loss": check.nt_xent_loss,
    "RunningVariance": check.running_variance,
    "clip_grad_norm": check.clip_grad_norm,
    "EMA": check.ema,
}
GIVEN = definitions("15-04", "log-probabilities", "widened", "followed", "decay", "shadow")
ANSWERS = answers("15-04", given=GIVEN)
SLUGS = ("smoothing", "ntxent", "variance", "clip", "ema")
variant = variants("15-04", dict(zip(SLUGS, CHECKS, strict=True)), GIVEN)
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


def smoothing(*changes):
    return variant("smoothing", *changes)


_PICKED = "losses.gather(1, index.unsqueeze(1)).squeeze(1)"
_BY_TARGETS = "(losses * F.one_hot(index, wide.shape[1]).movedim(-1, 1)).sum(dim=1)"
_SPREAD = "(losses.movedim(1, -1) * weight).mean(dim=-1)"
_OWN_SUM = "(own_weight * kept).sum()"
_WIDE = "wide = widened(logits)"
_KEPT = "kept = labels != ignore_index"
RIGHT["label_smoothing_cross_entropy"] = [smoothing_by_rows, smoothing((_PICKED, _BY_TARGETS))]
WRONG["label_smoothing_cross_entropy"] = {
    "PyTorch's own": (check.label_smoothing_cross_entropy.stand_in(), "without cross_entropy"),
    "spread over the others": (
        smoothing(("epsilon * of_all", "epsilon * (of_all * wide.shape[1] - of_label) / (wide.shape[1] - 1)")),
        "reductions none",
    ),
    "no epsilon of 0": (smoothing((_WIDE, f"epsilon = epsilon or 0.1\n    {_WIDE}")), "reductions none"),
    "the mean of any reduction": (  # told once: all else is right
        smoothing(("    if reduction ==", "    reduction = 'mean'\n    if reduction ==")),
        r"(?s)\A(?!.*WRONG.*WRONG).*what does each `reduction` return",
    ),
    "everything in float32": (smoothing((_WIDE, "wide = logits.float()")), "reductions none"),
    "two dimensions only": (smoothing((_SPREAD, "(losses * weight).mean(dim=1)")), r"N, C, d1[\s\S]*the classes\?"),
    "weights in the first term only": (smoothing((_SPREAD, "losses.mean(dim=1)")), "class weights"),
    "no weights in the mean": (smoothing((_OWN_SUM, "kept.sum()")), "class weights[\\s\\S]*mean count"),
    "ignored counts in the mean": (smoothing((_OWN_SUM, "own_weight.sum()")), "ignored labels"),
    "ignored costs": (smoothing(("loss = torch.where(kept, loss, 0.0)", "loss = loss * 1")), "ignored"),
    "only negative numbers are ignored": (smoothing((_KEPT, "kept = labels >= 0")), "ignored"),
    "writes into the labels": (
        smoothing(("index = torch.where(kept, labels, 0)", "index = labels.mul_(kept)")),
        "ignored[\\s\\S]*arguments afterwards",
    ),
    "no gradient of the sum": (
        smoothing(("        loss = loss.sum()\n", "        loss = loss.detach().sum()\n")),
        "gradients",
    ),
    "float32 comes back": (smoothing(("loss.to(logits.dtype)", "loss")), "in the dtype of the logits"),
    "ones on the CPU": (
        smoothing(("wide.new_ones(wide.shape[1])", "torch.ones(wide.shape[1])")),
        "device[\\s\\S]*Hint 3",
    ),
    "half precision throughout": (smoothing((_WIDE, "wide = logits")), "10,000[\\s\\S]*Hint 2"),
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


def ntxent(old, new):
    return variant("ntxent", (old, new))


_CAT = "torch.cat([first, second])"
_NTX_WIDE = f"widened({_CAT})"
_WHERE_FINITE = "torch.where((a := logits.exp().sum(dim=1).log()).isfinite(), a, logits.logsumexp(dim=1))"
_CROSS_ENTROPY = "F.cross_entropy(logits, partner)"
RIGHT["nt_xent_loss"] = [check.nt_xent_loss.stand_in(), ntxent_by_rows]
WRONG["nt_xent_loss"] = {
    "one way": (ntxent_one_way, "the mean over all views[\\s\\S]*Hint 1"),
    "with itself": (ntxent(".masked_fill(itself, -torch.inf)", ""), "the mean over all views"),
    "-100 for itself": (ntxent("-torch.inf", "-100.0"), "the mean over"),
    "not normalised": (ntxent("F.normalize(wide, dim=1)", "wide"), "whatever their lengths"),
    "everything in float32": (ntxent(_NTX_WIDE, f"{_CAT}.float()"), "the mean over"),
    "one side is a target": (
        ntxent(_CAT, "torch.cat([first, second.detach()])"),
        "gradients reach both[\\s\\S]*cuts the graph",
    ),
    "partners on the CPU": (ntxent(", device=z.device).roll", ").roll"), "device of the inputs[\\s\\S]*Hint 3"),
    "float32 comes back": (ntxent(".to(first.dtype)", ""), "10,000, temperature"),
    "half precision throughout": (ntxent(_NTX_WIDE, _CAT), "10,000, temperature"),
    "normalised too early": (ntxent(_NTX_WIDE, f"F.normalize({_CAT}, dim=1).float()"), "10,000, temperature"),
    "a short softmax": (
        ntxent(_CROSS_ENTROPY, "logits.softmax(dim=1)[range(len(z)), partner].log().mean().neg()"),
        "10,000, temperature",
    ),
    "exp where it is finite": (
        ntxent(_CROSS_ENTROPY, f"({_WHERE_FINITE} - logits[range(len(z)), partner]).mean()"),
        "finite gradients, torch.float16",
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


def variance(*changes):
    return variant("variance", *changes)


_SEES = "self._add(values.numel(), mean, m2)"
_SEES_EACH = "for value in values.reshape(-1):\n            self._add(1, value, torch.zeros_like(value))"
_MERGES = "self._add(other.count, other.mean, other.m2)"
_WIDEN = "values = widened(values.detach())"
_NOTHING = "        if not count:\n            return\n"
RIGHT["RunningVariance"] = [VarianceByShift, variance((_SEES, _SEES_EACH))]
WRONG["RunningVariance"] = {
    "sums of squares": (
        variance(("(values - mean).square().sum()", "values.square().sum() - values.numel() * mean.square()")),
        "far from 0",
    ),
    "n is the number of rows": (
        variance(("values.numel()", "(values.shape[0] if values.dim() else 1)")),
        "count, mean and variance",
    ),
    "mean of means": (variance(("delta * (count / total)", "delta / 2")), "count, mean and variance"),
    "no delta": (variance((" + delta.square() * (self.count * count / total)", "")), "count, mean and variance"),
    "an empty batch in update only": (
        variance((_NOTHING, ""), (_MERGES, f"if other.count:\n            {_MERGES}")),
        "empty batch[\\s\\S]*Hint 2",
    ),
    "everything in float32": (variance((_WIDEN, "values = values.detach().float()")), "float64 stays"),
    "halves stay": (variance((_WIDEN, "values = values.detach() * 1.0")), "count as float32"),
    "merge counts but doesn't shift": (
        variance((_MERGES, _MERGES.replace("other.mean", "self.mean if self.count else other.mean"))),
        "merging workers",
    ),
    "merge empties other": (
        variance((_MERGES, f"{_MERGES}\n        other.count = 0")),
        "merging workers[\\s\\S]*which line changes other",
    ),
    "a shared tensor": (variance(("self.mean = self.mean + delta", "self.mean += delta")), "merging workers"),
    "infinity where nothing is left": (variance(("self.mean, math.nan", "self.mean, math.inf")), "nothing can be said"),
    "keeps the graph": (variance((_WIDEN, "values = widened(values)")), "keeps neither[\\s\\S]*a graph"),
    "keeps the values": (
        variance((_SEES, f"{_SEES}\n        self.seen = [*getattr(self, 'seen', []), values]")),
        "keeps neither[\\s\\S]*400 values",
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


def clip(*changes):
    return variant("clip", *changes)


_GROUPS = "groups = list(parameters)"
_FINITE = 'finite = nonfinite == "keep" or all(math.isfinite(norm) for norm in norms)'
_READS = 'finite = all(math.isfinite(norm) for norm in norms) or nonfinite == "keep"'
_ONE_NORM = "norms = [torch.linalg.vector_norm(torch.stack(norms), norm_type)] * len(norms)"
_FACTOR = 'factor = group.get("max_norm", max_norm) / (norm + 1e-6)'
_CLAMP = "torch._foreach_mul_(of_group, factor.clamp(max=1.0))"
_ZERO = "torch._foreach_zero_(of_group)"
_WIDEST = "dtype = torch.promote_types(dtype, grad.dtype)"
RIGHT["clip_grad_norm"] = [check.clip_grad_norm.stand_in(), clip_by_torch]
WRONG["clip_grad_norm"] = {
    "enlarges": (clip((".clamp(max=1.0)", "")), "norm and gradients of one set"),
    "no 1e-6": (clip(("(norm + 1e-6)", "norm")), "norm and gradients of one set"),
    "always the 2-norm": (clip(("_foreach_norm(of_group, norm_type,", "_foreach_norm(of_group, 2,")), "one set"),
    "norm afterwards": (clip(("else norms[0]", "else norms[0].clamp(max=max_norm)")), "one set"),
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
    "goes through twice": (
        clip((_GROUPS, f"sum(1 for _ in parameters)\n    {_GROUPS}")),
        "any iterable[\\s\\S]*through a generator",
    ),
    "one norm for all groups": (clip((_FINITE, f"{_ONE_NORM}\n    {_FINITE}")), "groups, each"),
    "max_norm of the call": (clip((_FACTOR, "factor = max_norm / (norm + 1e-6)")), "groups, each"),
    "a limit of 0 is none": (
        clip((_FACTOR, 'factor = (group.get("max_norm") or max_norm) / (norm + 1e-6)')),
        "groups, each",
    ),
    "stacks nothing": (clip(("        if of_group:\n", "        if True:\n")), "without a gradient"),
    "float16 overflows": (clip((_WIDEST, "dtype = grad.dtype")), "float32"),
    "narrows float64": (clip((_WIDEST, "dtype = torch.float32")), "one set|float32"),
    "reads with keep": (clip((_FINITE, _READS)), "keep: clips[\\s\\S]*Hint 3"),
    "clips before it raises": (
        clip(
            (_FINITE, 'finite = nonfinite != "zero" or all(math.isfinite(norm) for norm in norms)'),
            (
                "        if of_group and finite:\n",
                "        if nonfinite == 'raise' and not math.isfinite(norm):\n            raise RuntimeError\n"
                "        if of_group and finite:\n",
            ),
        ),
        "raise: RuntimeError",
    ),
    "ValueError": (clip(("raise RuntimeError", "raise ValueError")), "raise: RuntimeError"),
    "times zero": (
        clip((_ZERO, "torch._foreach_mul_(of_group, 0.0)")),
        "zero: all[\\s\\S]*what is 0 times infinity",
    ),
    "zeroes one group": (clip((_ZERO, f"if not math.isfinite(norm):\n                {_ZERO}")), "zero: all"),
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


def ema(*changes):
    return variant("ema", *changes)


_IN = "            self._write(self.live, self.shadow)\n"
_OUT = "            self._write(self.live, own)\n"
_OWN = "own = {name: t.detach().clone() for name, t in self.live.items()}"
_LEARNING = "{n: t for n, t in self.live.items() if t.requires_grad}"
_NESTED = '        if self.swapped:\n            raise RuntimeError("applied() inside of applied()")\n'
_LOADS = "        self._write(self.shadow, given)\n"
_HERE = 'here {mine.shape}")\n'
RIGHT["EMA"] = [check.ema.stand_in(), EMAByData]
WRONG["EMA"] = {
    "not derived": (nn.Module, "derived from Shadow"),
    "parameters only": (ema((_IN, _IN.replace("self.live", _LEARNING))), "inside, the model has"),
    "own values not copied": (ema((_OWN, _OWN.replace(".clone()", ""))), "was written inside"),
    "averages are the model's memory": (
        ema(
            (_IN, "            for name, t in self.live.items():\n                t.data = self.shadow[name]\n"),
            (_OUT, "            for name, t in self.live.items():\n                t.data = own[name]\n"),
        ),
        "was written inside",
    ),
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
    "new parameters": (NewParameters, "what does an optimizer hold"),
    "nested": (ema((_NESTED, "")), "raise RuntimeError"),
    "updates inside": (ema(("        self.swapped = True\n", "        self.inside = True\n")), "raise RuntimeError"),
    "no snapshot": (ema(("name: t.clone() for", "name: t for")), "snapshot"),
    "updates forgotten": (ema(('        self.updates = state["updates"]\n', "")), "same bits"),
    "other tensors in shadow": (ema((_LOADS, "        self.shadow = dict(given)\n")), "same bits"),
    "takes the dtype of the state": (
        ema((_LOADS, "        for name, mine in self.shadow.items():\n            mine.data = given[name].clone()\n")),
        "keeps the averages' dtype",
    ),
    "no names": (ema(("if different:", "if given.keys() < self.shadow.keys():")), "other names or shapes"),
    "no shapes": (ema(("!= given[name].shape", "is None")), "other names or shapes"),
    "writes, then complains": (ema((_HERE, f"{_HERE}            mine.copy_(given[name])\n")), "nothing is changed"),
}


# ---------------------------------------------------------------- all


class TestChecks(CheckProtocol):
    TOPIC = "15-04"
    CHECKS, ANSWERS, RIGHT, WRONG = CHECKS, ANSWERS, RIGHT, WRONG
    STUBS, IDLE = answers("15-04", edit=student_source, given=GIVEN), idle("15-04", GIVEN)

    def hold_stand_in(self, name, stand_in):
        """The cells below train and count with it. Two may do what an answer may not: call PyTorch, keep all values."""
        result = self.CHECKS[name].run(stand_in)
        allowed = {"is written without cross_entropy and nll_loss", "keeps neither the graph nor the values"}
        assert {item.name for item in result.failures} <= allowed, str(result)


def test_the_examples_of_the_tasks():
    """The stand-in of the first one is PyTorch's own loss."""
    for loss in (ANSWERS["label_smoothing_cross_entropy"], check._smoothed):
        assert loss(torch.tensor([[2.0, 0, 0]]), torch.tensor([0]), epsilon=0.3).item() == pytest.approx(
            0.640, abs=5e-4
        )
    for loss in (ANSWERS["nt_xent_loss"], check._nt_xent):
        assert loss(torch.eye(2), torch.eye(2), 1.0).item() == pytest.approx(0.551, abs=5e-4)
    stats = ANSWERS["RunningVariance"]()
    stats.update(torch.tensor([1.0, 3.0]))
    stats.update(torch.tensor(8.0))
    assert (stats.count, stats.mean.item(), stats.variance().item()) == (3, 4.0, 13.0)
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([3.0, 0.0, 4.0])
    assert ANSWERS["clip_grad_norm"]([p], 1.0).item() == 5.0
    assert p.grad.tolist() == pytest.approx([0.6, 0.0, 0.8], abs=1e-5)
