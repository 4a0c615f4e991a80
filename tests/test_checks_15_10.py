"""The checks of 15-10 accept right answers, however written, and reject what a student might really write."""
# ruff: noqa: E501 (pieces of the notebook's code are quoted as they stand)

import copy
import hashlib
import io
import math
import os
import random
from collections import OrderedDict, deque
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from answer_variants import variants
from check_protocol import CheckProtocol, idle

from course.answers import answers, definitions
from course.exercise_form import student_source
from shared.checks import topic_15_10 as check

CELLS = """data helpers plain-loop callback stages loop order ended signals ending-loop safe-loop read-together step-rows
    log-reads metrics-logger ex-file model-checkpoint place ex-groups group-loop engine parallel-engine resumable-sampler
    savable newest resumable"""
GIVEN = definitions("15-10", "device", *CELLS.split())
ANSWERS = answers("15-10", given=GIVEN)
STUBS = answers("15-10", edit=student_source, given=GIVEN)
IDLE = idle("15-10", GIVEN)
GIVEN.update({name: ANSWERS[name] for name in ("CheckpointFile", "grouped")})  # which the lesson's classes call
NAMES = {
    "stopping": "EarlyStopping",
    "ratio": "UpdateRatio",
    "file": "CheckpointFile",
    "groups": "grouped",
    "trainer": "Trainer",
}
variant = variants("15-10", NAMES, GIVEN)
Callback, Resumable, StopFit = GIVEN["Callback"], GIVEN["Resumable"], GIVEN["StopFit"]
DamagedCheckpoint, loader_generators = GIVEN["DamagedCheckpoint"], GIVEN["loader_generators"]
random_module = GIVEN["random_module"]


# ---------------------------------------------------------------- early stopping


class ByHistory(Callback):
    """Keeps a list of the values and works everything out anew."""

    def __init__(self, monitor="val_loss", mode="min", patience=3, min_delta=0.0, threshold=None, divergence=None):
        if mode not in {"min", "max"}:
            raise ValueError(mode)
        self.__dict__.update(locals())
        self.on_fit_start(None)

    def on_fit_start(self, loop):
        self.best, self.wait, self.reason = None, 0, None

    def on_epoch_end(self, loop):
        if loop.ending:
            return
        value = loop.metrics[self.monitor]
        if value != value or abs(value) == float("inf"):
            self.reason = "not a number"
            raise StopFit
        smaller = self.mode == "min"
        gain = math.inf if self.best is None else self.best - value if smaller else value - self.best
        if gain > self.min_delta:
            self.best, self.wait = value, 0
        else:
            self.wait = self.wait + 1
        over = (self.threshold is not None) and (value < self.threshold if smaller else value > self.threshold)
        lost = (self.divergence is not None) and (value > self.divergence if smaller else value < self.divergence)
        if over or lost or self.wait >= self.patience:
            self.reason = "reached" if over else "lost" if lost else "no better"
            raise StopFit(self.reason)

    def on_checkpoint_load(self, loop):
        if self.reason:
            raise StopFit(self.reason)

    def state_dict(self):
        return {"numbers": (self.best, self.wait), "reason": self.reason}

    def load_state_dict(self, state):
        (self.best, self.wait), self.reason = state["numbers"], state["reason"]


class ByNumbers(ByHistory):
    """Compares negated values in the other mode."""

    def on_epoch_end(self, loop):
        if loop.ending is not None:
            return None
        flip = (lambda v: v) if self.mode == "min" else (lambda v: -v)
        raw = loop.metrics[self.monitor]
        value = flip(raw)
        if not np.isfinite(raw):
            return self._stop(f"{raw}")
        if self.best is None or value < flip(self.best) - self.min_delta:
            self.best, self.wait = raw, 0
        else:
            self.wait += 1
        if self.wait >= self.patience:
            self._stop("patience")
        if self.threshold is not None and value < flip(self.threshold):
            self._stop("threshold")
        if self.divergence is not None and value > flip(self.divergence):
            self._stop("divergence")
        return None

    def _stop(self, reason):
        self.reason = reason
        raise StopFit(reason)


_INIT = "self.best, self.wait, self.reason = None, 0, None"
_BEST = "better = self.best is None or sign * value < sign * self.best - self.min_delta"
_SET = "self.best, self.wait = (value, 0) if better else (self.best, self.wait + 1)"
_THRESHOLD = "self.threshold is not None and sign * value < sign * self.threshold"
_DIVERGENCE = "self.divergence is not None and sign * value > sign * self.divergence"
_LOAD = 'self.best, self.wait, self.reason = state["best"], state["wait"], state["reason"]'
WRONG_STOPPING = {
    "not a callback": (type("Alone", (), dict(vars(ByHistory))), "derived from Callback"),
    "not strictly better": (variant("stopping", (_BEST, _BEST.replace("value <", "value <="))), "best and wait"),
    "delta added": (variant("stopping", (_BEST, _BEST.replace("- self.min_delta", "+ self.min_delta"))), "best and"),
    "delta forgotten": (variant("stopping", (_BEST, _BEST.replace(" - self.min_delta", ""))), "best and wait"),
    "delta as a share": (
        variant("stopping", (_BEST, _BEST.replace("- self.min_delta", "* (1 - self.min_delta)"))),
        "best and wait",
    ),
    "delta with the mode's sign": (
        variant("stopping", (_BEST, _BEST.replace("- self.min_delta", "- sign * self.min_delta"))),
        "best and wait[\\s\\S]*max",
    ),
    "best of all, delta or not": (
        variant(
            "stopping",
            (_SET, _SET + "\n            self.best = sign * min(sign * self.best, sign * value)"),
        ),
        "best and wait",
    ),
    "wait isn't set back": (
        variant("stopping", (_SET, _SET.replace("(value, 0)", "(value, self.wait)"))),
        "best and wait",
    ),
    "first value compared with zero": (
        variant("stopping", (_BEST, _BEST.replace("self.best is None", "not self.best"))),
        "best and wait",
    ),
    "stops one later": (
        variant("stopping", ("self.wait >= self.patience", "self.wait > self.patience")),
        "wait reaches patience",
    ),
    "stops one earlier": (
        variant("stopping", ("self.wait >= self.patience", "self.wait >= self.patience - 1")),
        "wait reaches patience",
    ),
    "patience is 5": (variant("stopping", ("patience=3", "patience=5")), "default patience"),
    "monitor is val_loss": (
        variant("stopping", ("self.monitor, self.sign", "self.monitor, self.sign"), ("= monitor,", '= "val_loss",')),
        "KeyError|wait reaches",
    ),
    "threshold reached is enough": (
        variant("stopping", (_THRESHOLD, _THRESHOLD.replace("value <", "value <="))),
        "threshold: stops",
    ),
    "threshold in one mode": (
        variant("stopping", (_THRESHOLD, "self.threshold is not None and value < self.threshold")),
        "threshold: stops",
    ),
    "threshold of zero is none": (
        variant("stopping", (_THRESHOLD, _THRESHOLD.replace("self.threshold is not None", "self.threshold"))),
        "threshold: stops",
    ),
    "threshold before best": (
        variant(
            "stopping",
            (
                _SET,
                "if self.threshold is not None and sign * value < sign * self.threshold:\n"
                "                self.reason = 'reached'\n"
                "                raise StopFit(self.reason)\n            " + _SET,
            ),
        ),
        "threshold: stops",
    ),
    "divergence reached is enough": (
        variant("stopping", (_DIVERGENCE, _DIVERGENCE.replace("value >", "value >="))),
        "divergence: stops",
    ),
    "divergence in one mode": (
        variant("stopping", (_DIVERGENCE, "self.divergence is not None and value > self.divergence")),
        "divergence: stops",
    ),
    "no divergence": (variant("stopping", (_DIVERGENCE, "False")), "divergence: stops"),
    "NaN only": (variant("stopping", ("not math.isfinite(value)", "math.isnan(value)")), "not finite"),
    "finite or not": (variant("stopping", ("not math.isfinite(value)", "False")), "not finite"),
    "NaN counts as waiting": (
        variant(
            "stopping",
            ('self.reason = f"{self.monitor} is {value}"', 'self.reason, self.wait = "bad", self.wait + 1'),
        ),
        "not finite",
    ),
    "judges what is being left": (
        variant("stopping", ("        if loop.ending is not None:\n            return\n", "")),
        "being left",
    ),
    "leaves out by KeyError only": (
        variant(
            "stopping",
            (
                "        if loop.ending is not None:\n",
                "        if loop.ending is not None and self.monitor not in loop.metrics:\n",
            ),
        ),
        "being left",
    ),
    "reason is True": (
        variant("stopping", ("raise StopFit(self.reason)", "self.reason = True\n            raise StopFit")),
        "reason",
    ),
    "a new fit keeps best": (
        variant(
            "stopping",
            (
                "        " + _INIT,
                "        self.best = getattr(self, 'best', None)\n        self.wait, self.reason = 0, None",
            ),
        ),
        "reason|best and wait",
    ),
    "a new fit keeps the reason": (
        variant(
            "stopping",
            (
                "        " + _INIT,
                "        self.best, self.wait = None, 0\n        self.reason = getattr(self, 'reason', None)",
            ),
        ),
        "reason",
    ),
    "state without wait": (
        variant("stopping", (_LOAD, 'self.best, self.reason = state["best"], state["reason"]')),
        "new object",
    ),
    "state without best": (
        variant("stopping", (_LOAD, 'self.wait, self.reason = state["wait"], state["reason"]')),
        "new object",
    ),
    "stops whatever is loaded": (
        variant(
            "stopping",
            (
                "    def on_checkpoint_load(self, loop: Loop) -> None:\n        if self.reason is not None:\n",
                "    def on_checkpoint_load(self, loop: Loop) -> None:\n        if self.wait or self.reason:\n",
            ),
            (
                "        self.on_checkpoint_load(loop)\n",
                "        if self.reason:\n            raise StopFit(self.reason)\n",
            ),
        ),
        "new object",
    ),
    "the reason isn't saved": (
        variant("stopping", (_LOAD, 'self.best, self.wait = state["best"], state["wait"]')),
        "stays stopped",
    ),
    "goes on after loading": (
        variant(
            "stopping",
            (
                "        self.on_checkpoint_load(loop)\n",
                "        if self.reason:\n            raise StopFit(self.reason)\n",
            ),
            ("    def on_checkpoint_load(", "    def on_checkpoint_loaded("),
        ),
        "stays stopped",
    ),
    "threshold is compared with the best": (
        variant("stopping", (_THRESHOLD, _THRESHOLD.replace("sign * value", "sign * self.best"))),
        "threshold: stops",
    ),
    "no divergence beside a threshold": (
        variant("stopping", (_DIVERGENCE, "self.threshold is None and " + _DIVERGENCE)),
        "threshold: stops|divergence: stops",
    ),
    "a least delta": (
        variant("stopping", (_BEST, _BEST.replace("self.min_delta", "max(self.min_delta, 1e-4)"))),
        "best and wait",
    ),
    "rounded": (
        variant(
            "stopping",
            ("value, sign = loop.metrics[self.monitor],", "value, sign = round(loop.metrics[self.monitor], 3),"),
        ),
        "best and wait",
    ),
    "in float32": (
        variant(
            "stopping",
            (
                "value, sign = loop.metrics[self.monitor],",
                "value, sign = float(np.float32(loop.metrics[self.monitor])),",
            ),
        ),
        "best and wait",
    ),
    "large is not finite": (
        variant("stopping", ("not math.isfinite(value)", "not abs(value) < 1e6")),
        "best and wait",
    ),
    "patience of the class": (
        variant(
            "stopping",
            (
                "        self.on_fit_start(None)\n",
                "        type(self).last = patience\n        self.on_fit_start(None)\n",
            ),
            ("self.wait >= self.patience", "self.wait >= self.last"),
        ),
        "wait reaches patience",
    ),
    "a best of zero is lost": (
        variant("stopping", (_LOAD, _LOAD.replace('state["best"]', 'state["best"] or None'))),
        "new object",
    ),
    "judges after a StopFit": (
        variant(
            "stopping",
            ("if loop.ending is not None:", "if loop.ending is not None and not isinstance(loop.ending, StopFit):"),
        ),
        "being left",
    ),
    "any mode": (variant("stopping", ('if mode not in ("min", "max"):', "if False:")), "ValueError for another"),
    "mode and min_delta of the class": (
        variant(
            "stopping",
            ("self.monitor, self.sign, self.patience =", "self.monitor, type(self).sign, self.patience ="),
            ("self.min_delta, self.threshold,", "type(self).min_delta, self.threshold,"),
        ),
        "best and wait",
    ),
    "limits of the class": (
        variant(
            "stopping",
            (
                "self.min_delta, self.threshold, self.divergence =",
                "self.min_delta, self.threshold, type(self).divergence =",
            ),
        ),
        "divergence: stops",
    ),
    "judged behind the checkpoint": (
        variant("stopping", ("    def __init__(self,", "    order = 200\n\n    def __init__(self,")),
        "new object",
    ),
    "takes the metric away": (
        variant("stopping", ("loop.metrics[self.monitor]", "loop.metrics.pop(self.monitor)")),
        "no metric is changed",
    ),
    "clears the metrics when they are bad": (
        variant(
            "stopping",
            (
                'self.reason = f"{self.monitor} is {value}"\n',
                'self.reason = f"{self.monitor} is {value}"\n            loop.metrics.clear()\n',
            ),
        ),
        "no metric is changed",
    ),
    "two other modes": (
        variant("stopping", ('if mode not in ("min", "max"):', 'if mode in ("minimum", "Max"):')),
        "ValueError for another",
    ),
    "modes by their beginning": (
        variant("stopping", ('mode not in ("min", "max")', 'mode[:3].lower() not in ("min", "max")')),
        "ValueError for another",
    ),
    "a missing metric is passed over": (
        variant("stopping", ("loop.metrics[self.monitor]", "loop.metrics.get(self.monitor, 0.0)")),
        "ValueError for another",
    ),
}

# ---------------------------------------------------------------- update ratios


class RatiosByPairs(Callback):
    """One row a parameter and step, read at the end."""

    def __init__(self, every=1):
        self.every = every
        self.history = {}
        self.pending = []
        self.snapshot = None

    def on_fit_start(self, loop):
        self.history.clear()
        self.pending.clear()
        self.snapshot = None

    def on_before_step(self, loop):
        self.snapshot = None
        if (loop.step + 1) % self.every == 0:
            self.snapshot = [(n, p, p.detach().clone()) for n, p in loop.model.named_parameters() if p.requires_grad]

    def on_after_step(self, loop):
        if self.snapshot is not None:
            for name, p, old in self.snapshot:
                moved = torch.linalg.vector_norm(p.detach() - old)
                self.pending.append((name, loop.step, moved / (torch.linalg.vector_norm(old) + 1e-12)))
        self.snapshot = None

    def _read(self):
        for name, step, ratio in self.pending:
            self.history.setdefault(name, []).append((step, ratio.item()))
        self.pending.clear()

    def on_epoch_end(self, loop):
        self._read()

    def on_fit_end(self, loop):
        self._read()


class RatiosInPlace(RatiosByPairs):
    """Subtracts into the copies, with foreach."""

    def on_after_step(self, loop):
        if self.snapshot:
            names, new, old = zip(*self.snapshot, strict=True)
            sizes = [t.norm() for t in old]
            with torch.no_grad():
                for mine, theirs in zip(old, new, strict=True):
                    mine.sub_(theirs)
            moves = [t.norm() for t in old]
            self.pending += [(n, loop.step, m / (s + 1e-12)) for n, m, s in zip(names, moves, sizes, strict=True)]
        self.snapshot = None


class RatiosInABuffer(RatiosByPairs):
    """One tensor for all ratios of a step, filled one by one, where the first weight is."""

    def on_after_step(self, loop):
        if self.snapshot:
            step = torch.zeros(len(self.snapshot), dtype=torch.float64, device=self.snapshot[0][1].device)
            for i, (_, p, old) in enumerate(self.snapshot):
                step[i] = (p.detach() - old).norm() / (old.norm() + 1e-12)
            self.pending += [(row[0], loop.step, ratio) for row, ratio in zip(self.snapshot, step, strict=True)]
        self.snapshot = None


def ratios(**changes):
    """RatiosByPairs with some methods replaced."""
    return type("Ratios", (RatiosByPairs,), changes)


def _by_gradient(self, loop):
    lr = loop.optimizer.param_groups[0]["lr"]
    for name, p in loop.model.named_parameters():
        if p.requires_grad and loop.step % self.every == 0:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            self.pending.append((name, loop.step, lr * grad.norm() / (p.detach().norm() + 1e-12)))


def _reads_now(self, loop):
    RatiosByPairs.on_after_step(self, loop)
    self._read()


def _turned_off(self, loop):
    torch.set_grad_enabled(False)
    RatiosByPairs.on_before_step(self, loop)


def _keeps_graph(self, loop):
    if self.snapshot is not None:
        for name, p, old in self.snapshot:
            self.pending.append((name, loop.step, (p - old).norm() / (old.norm() + 1e-12)))
    self.snapshot = None


def _keeps_copies(self, loop):
    kept = self.snapshot
    RatiosByPairs.on_after_step(self, loop)
    self.snapshot = kept


def _keeps_the_rest(self, loop):
    if self.snapshot is not None:
        self.pending += [(n, loop.step, p.detach().clone(), old) for n, p, old in self.snapshot]
    self.snapshot = None


def _reads_the_rest(self, loop=None):
    for name, step, new, old in self.pending:
        ratio = (new - old).norm() / (old.norm() + 1e-12)
        self.history.setdefault(name, []).append((step, ratio.item()))
    self.pending.clear()


def _quotient(new, old):
    return (new - old).norm() / (old.norm() + 1e-12)


def _keeps_in_functions(self, loop):
    for name, p, old in self.snapshot or ():
        self.pending.append((name, loop.step, partial(_quotient, p.detach().clone(), old)))
    self.snapshot = None


def _calls_the_rest(self, loop=None):
    for name, step, late in self.pending:
        self.history.setdefault(name, []).append((step, late().item()))
    self.pending.clear()


def _keeps_small_ones(self, loop):
    self.small = [old for _, _, old in self.snapshot or () if old.dim() == 1]
    RatiosByPairs.on_after_step(self, loop)


def _keeps_on_the_class(self, loop):
    type(self).kept = [old for _, _, old in self.snapshot or ()]
    RatiosByPairs.on_after_step(self, loop)


_LEFT = []  # copies that a step left behind


def _divides_later(self, loop):
    _LEFT[:] = [(n, loop.step, p.detach().clone(), old) for n, p, old in self.snapshot or ()]
    self.snapshot = None


def _divides_now(self, loop):
    self.pending += [(n, step, _quotient(p, old)) for n, step, p, old in _LEFT]
    _LEFT.clear()


def _copies_the_model(self, loop):
    RatiosByPairs.on_before_step(self, loop)
    self.model = iter([copy.deepcopy(loop.model)])


def _reads_in_tens(self, loop):
    RatiosByPairs.on_after_step(self, loop)
    if loop.step % 10 == 0:
        self._read()


def _collects(collect):
    """An on_after_step that makes one tensor of all ratios of a step."""

    def on_after_step(self, loop):
        if self.snapshot:
            step = collect([(p.detach() - old).norm() / (old.norm() + 1e-12) for _, p, old in self.snapshot])
            self.pending += [(row[0], loop.step, ratio) for row, ratio in zip(self.snapshot, step, strict=True)]
        self.snapshot = None

    return on_after_step


def _fills_a_buffer(values):
    buffer = torch.zeros(len(values), dtype=torch.float64)
    for i, value in enumerate(values):
        buffer[i] = value
    return buffer


def _copies_to_a_buffer(values):
    return torch.zeros(len(values), dtype=torch.float64).copy_(torch.stack(values))


def _moves_by_type(values):
    return torch.stack(values).type(torch.DoubleTensor)


def _noisy(self, loop):
    RatiosByPairs.on_before_step(self, loop)
    torch.rand(1)


def _clears(self, loop):
    RatiosByPairs.on_after_step(self, loop)
    loop.optimizer.zero_grad()


_LEARNING = "if p.requires_grad]"
WRONG_RATIO = {
    "not a callback": (type("Alone", (), dict(vars(RatiosByPairs))), "derived from Callback"),
    "frozen ones, too": (variant("ratio", (_LEARNING, "]")), "names of the parameters"),
    "weights only": (variant("ratio", (_LEARNING, "if p.requires_grad and p.dim() > 1]")), "names of the parameters"),
    "only those with a gradient": (
        variant("ratio", (_LEARNING, "if p.requires_grad and p.grad is not None]")),
        "names of the parameters",
    ),
    "one number for all": (
        ratios(on_after_step=lambda self, loop: self.pending.append(("all", loop.step, torch.zeros(())))),
        "names of the parameters",
    ),
    "gradient times rate": (ratios(on_after_step=_by_gradient), "ratios of update"),
    "divided by the new size": (
        variant("ratio", ("(w.norm() + 1e-12)", "(new[n].norm() + 1e-12)")),
        "ratios of update",
    ),
    "difference of the norms": (
        variant("ratio", ("(new[n] - w).norm()", "(new[n].norm() - w.norm()).abs()")),
        "ratios of update",
    ),
    "largest element": (variant("ratio", ("(new[n] - w).norm()", "(new[n] - w).abs().max()")), "ratios of update"),
    "squared": (variant("ratio", ("1e-12) for n", "1e-12) ** 2 for n")), "ratios of update"),
    "a large epsilon": (variant("ratio", ("1e-12", "1e-3")), "ratios of update"),
    "infinite for zeros": (variant("ratio", (" + 1e-12", "")), "ratios of update"),
    "each step": (variant("ratio", ("(loop.step + 1) % self.every == 0", "True")), "multiples of every"),
    "one step late": (
        variant("ratio", ("(loop.step + 1) % self.every", "loop.step % self.every")),
        "multiples of every",
    ),
    "numbered from zero": (variant("ratio", ("append((loop.step,", "append((loop.step - 1,")), "multiples of every"),
    "counts its own steps": (
        ratios(
            on_before_step=lambda self, loop: (
                setattr(self, "count", getattr(self, "count", 0) + 1),
                setattr(self, "snapshot", None),
                self.count % self.every == 0
                and setattr(
                    self,
                    "snapshot",
                    [(n, p, p.detach().clone()) for n, p in loop.model.named_parameters() if p.requires_grad],
                ),
            )
        ),
        "multiples of every",
    ),
    "tensors in the history": (
        variant("ratio", ("ratios.tolist()", "ratios")),
        "history: names",
    ),
    "only at the end of the run": (
        variant("ratio", ("    def on_epoch_end(", "    def _read("), ("self.on_epoch_end(loop)", "self._read(loop)")),
        "complete at the end",
    ),
    "only at the end of epochs": (variant("ratio", ("self.on_epoch_end(loop)", "pass")), "complete at the end"),
    "the history goes on": (
        ratios(on_fit_start=lambda self, loop: None),
        "on_fit_start empties",
    ),
    "what waits is kept": (
        ratios(on_fit_start=lambda self, loop: self.history.clear()),
        "on_fit_start empties",
    ),
    "reads at each step": (ratios(on_after_step=_reads_now), "nothing is read"),
    "looks whether it moved": (
        variant("ratio", ("if self.old:", "if self.old and all((w == w).all() for w in self.old.values()):")),
        "nothing is read",
    ),
    "waits by .to": (variant("ratio", ("torch.stack(ratios)))", 'torch.stack(ratios).to("cpu")))')), "nothing is read"),
    "asks whether they are equal": (
        ratios(
            on_after_step=lambda self, loop: (
                self.snapshot and torch.equal(*self.snapshot[0][1:]),
                RatiosByPairs.on_after_step(self, loop),
            )
        ),
        "nothing is read",
    ),
    "copies at the start of the batch": (
        ratios(on_batch_start=RatiosByPairs.on_before_step, on_before_step=lambda self, loop: None),
        "ratios of update",
    ),
    "names of the first step": (
        variant(
            "ratio",
            (
                _LEARNING,
                "if n in self.__dict__.setdefault('names', [n for n, p in loop.model.named_parameters() if p.requires_grad])]",
            ),
        ),
        "names of the parameters",
    ),
    "evaluation mode": (
        ratios(on_after_step=lambda self, loop: (loop.model.eval(), RatiosByPairs.on_after_step(self, loop))),
        "only looks",
    ),
    "draws from Python": (
        ratios(on_after_step=lambda self, loop: (random.random(), RatiosByPairs.on_after_step(self, loop))),
        "only looks",
    ),
    "draws from NumPy": (
        ratios(on_after_step=lambda self, loop: (np.random.rand(), RatiosByPairs.on_after_step(self, loop))),
        "only looks",
    ),
    "copies in a deque": (
        ratios(
            on_after_step=lambda self, loop: (
                setattr(self, "kept", deque(old for *_, old in self.snapshot or ())),
                RatiosByPairs.on_after_step(self, loop),
            )
        ),
        "no copy of a weight",
    ),
    "copies at each step": (
        variant(
            "ratio",
            ("if (loop.step + 1) % self.every == 0:", "if True:"),
            ("if self.old:", "if self.old and loop.step % self.every == 0:"),
        ),
        "no copy of a weight",
    ),
    "writes into the log's values": (
        ratios(
            on_after_step=lambda self, loop: (
                loop.values.update(ratio=1.0),
                RatiosByPairs.on_after_step(self, loop),
            )
        ),
        "only looks",
    ),
    "clears the log's values": (
        ratios(on_after_step=lambda self, loop: (loop.values.clear(), RatiosByPairs.on_after_step(self, loop))),
        "only looks",
    ),
    "sets the optimizer's defaults": (
        ratios(
            on_after_step=lambda self, loop: (
                loop.optimizer.defaults.update(lr=9.0),
                RatiosByPairs.on_after_step(self, loop),
            )
        ),
        "only looks",
    ),
    "turns autograd off": (ratios(on_before_step=_turned_off), "only looks"),
    "draws a number": (ratios(on_before_step=_noisy), "only looks"),
    "clears the gradients": (ratios(on_after_step=_clears), "only looks"),
    "keeps the graph": (ratios(on_after_step=_keeps_graph), "no copy of a weight"),
    "keeps the copies": (ratios(on_after_step=_keeps_copies), "no copy of a weight"),
    "keeps copies in functions": (
        ratios(on_after_step=_keeps_in_functions, _read=_calls_the_rest),
        "no copy of a weight",
    ),
    "keeps copies of the small ones": (ratios(on_after_step=_keeps_small_ones), "no copy of a weight"),
    "keeps copies on the class": (ratios(on_after_step=_keeps_on_the_class), "no copy of a weight"),
    "keeps copies until the end of the batch": (
        ratios(on_after_step=_divides_later, on_batch_end=_divides_now),
        "no copy of a weight",
    ),
    "a copy of the model": (ratios(on_before_step=_copies_the_model), "no copy of a weight"),
    "a tensor of tensors": (ratios(on_after_step=_collects(torch.tensor)), "nothing is read[\\s\\S]*'meta'"),
    "a buffer on the CPU": (ratios(on_after_step=_collects(_fills_a_buffer)), "nothing is read[\\s\\S]*'meta'"),
    "copied to the CPU": (ratios(on_after_step=_collects(_copies_to_a_buffer)), "nothing is read[\\s\\S]*'meta'"),
    "moved by its type": (ratios(on_after_step=_collects(_moves_by_type)), "nothing is read[\\s\\S]*'meta'"),
    "reads every tenth step": (ratios(on_after_step=_reads_in_tens), "nothing is read"),
    "keeps all copies until they are read": (
        ratios(on_after_step=_keeps_the_rest, _read=_reads_the_rest),
        "no copy of a weight",
    ),
}

# ---------------------------------------------------------------- checkpoint files


class Crc(ANSWERS["CheckpointFile"]):
    """Streams into the file, the sum at its end, with a length."""

    def write(self, state):
        folder, name = os.path.split(os.path.abspath(self.path))
        temporary = os.path.join(folder, name + ".tmp")
        with open(temporary, "wb", buffering=0) as file:
            memory = io.BytesIO()
            torch.save(state, memory)
            data = memory.getvalue()
            file.write(len(data).to_bytes(8, "big"))
            file.write(data)
            file.write(hashlib.blake2b(len(data).to_bytes(8, "big") + data).digest())
            os.fsync(file)
        os.rename(temporary, self.path)
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def read(self):
        with open(self.path, "rb") as file:
            whole = file.read()
        body, digest = whole[:-64], whole[-64:]
        size = int.from_bytes(body[:8], "big")
        if len(whole) < 72 or hashlib.blake2b(body).digest() != digest or len(body) != size + 8:
            raise DamagedCheckpoint(os.path.basename(self.path) + " was damaged")
        return torch.load(io.BytesIO(body[8:]), "cpu", weights_only=True)


class ByPathlib(ANSWERS["CheckpointFile"]):
    """pathlib all the way, and a file descriptor of its own."""

    def __init__(self, path):
        self.file = Path(path).absolute()

    def write(self, state):
        memory = io.BytesIO()
        torch.save(state, memory)
        text = hashlib.sha512(memory.getbuffer()).hexdigest().encode() + b"\n"
        other = self.file.parent / f"{self.file.name}.tmp"
        other.unlink(missing_ok=True)
        self._forced(os.open(other, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), text + memory.getvalue())
        other.rename(self.file)
        self._forced(os.open(self.file.parent, os.O_RDONLY))

    def _forced(self, handle, content=b""):
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        finally:
            os.close(handle)

    def read(self):
        first, newline, content = self.file.read_bytes().partition(b"\n")
        if not newline or hashlib.sha512(content).hexdigest().encode() != first:
            raise DamagedCheckpoint(f"{self.file} is damaged")
        return torch.load(io.BytesIO(content), map_location=lambda storage, where: storage, weights_only=True)


class Unbuffered(ANSWERS["CheckpointFile"]):
    """A raw file, which may take less than it is given."""

    def write(self, state):
        content = io.BytesIO()
        torch.save(state, content)
        rest = memoryview(hashlib.sha256(content.getvalue()).digest() + content.getvalue())
        temporary = Path(f"{self.path}.tmp")
        with open(temporary, "wb", buffering=0) as file:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


_MOVE = "        os.replace(temporary, self.path)\n"
_FLUSH = "            file.flush()\n            os.fsync(file.fileno())\n"
_FOLDER = "            os.fsync(folder)\n"
_WITH = '        with open(temporary, "wb") as file:\n'
_SUM = "        if hashlib.sha256(content).digest() != digest:\n"
_RAISE = '            raise DamagedCheckpoint(f"{self.path.name}: its {len(whole):,} bytes were changed")\n'
_RETURN = 'return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)'
_SAVE = "        buffer = io.BytesIO()\n        torch.save(state, buffer)\n        content = buffer.getvalue()\n"


WRONG_FILE = {
    "no read": (type("Writes", (), {"write": ANSWERS["CheckpointFile"].write}), "comes back|runs"),
    "reads a copy from memory": (
        variant(
            "file",
            (_MOVE, _MOVE + "        self.state = state\n"),
            (
                "        whole = self.path",
                "        if not hasattr(self, 'state'):\n            return {}\n        whole = self.path",
            ),
        ),
        "comes back",
    ),
    "appends a suffix": (
        variant("file", ("self.path = Path(path)", 'self.path = Path(path).with_suffix(".pt")')),
        "comes back|FileNotFound",
    ),
    "takes no string": (variant("file", ("self.path = Path(path)", "self.path = path")), "comes back"),
    "a path without a folder": (
        variant("file", ("os.open(self.path.parent,", "os.open(os.path.dirname(self.path),")),
        "comes back",
    ),
    "one system call": (
        variant("file", ("file.write(hashlib", "os.write(file.fileno(), hashlib")),
        "comes back|damage",
    ),
    "one raw write": (
        variant("file", (_WITH, _WITH.replace('"wb")', '"wb", buffering=0)'))),
        "old one or the new one[\\s\\S]*disk is full",
    ),
    "the folder's failing fsync is passed over": (
        variant("file", (_FOLDER, "            with suppress(OSError):\n                    os.fsync(folder)\n")),
        "folder's entry",
    ),
    "a failing fsync is passed over": (
        variant(
            "file",
            (
                _FLUSH,
                "            file.flush()\n            try:\n                os.fsync(file.fileno())\n            except OSError:\n                pass\n",
            ),
        ),
        "on the disk before",
    ),
    "a full disk is passed over": (
        variant(
            "file",
            (
                "            file.write(hashlib.sha256(content).digest() + content)\n",
                "            with suppress(OSError):\n"
                "                file.write(hashlib.sha256(content).digest() + content)\n",
            ),
        ),
        "old one or the new one",
    ),
    "open when fsync raises": (
        variant(
            "file",
            (_WITH, '        self.file = file = open(temporary, "wb")\n        if file:\n'),
            (_MOVE, "        file.close()\n" + _MOVE),
        ),
        "stays open",
    ),
    "the folder is open when fsync raises": (
        variant(
            "file",
            (
                "            try:\n                os.fsync(folder)\n            finally:\n                os.close(folder)\n",
                "            os.fsync(folder)\n            os.close(folder)\n",
            ),
        ),
        "stays open",
    ),
    "a sum as text, in capitals or not": (
        variant(
            "file",
            ("hashlib.sha256(content).digest() + content", "content + hashlib.sha256(content).hexdigest().encode()"),
            ("digest, content = whole[:32], whole[32:]", "content, digest = whole[:-64], whole[-64:].lower()"),
            (_SUM, "        if hashlib.sha256(content).hexdigest().encode() != digest:\n"),
        ),
        "damage is",
    ),
    "clears up everybody's": (
        variant(
            "file",
            (_SAVE, "        for other in self.path.parent.glob('*.tmp'):\n            other.unlink()\n" + _SAVE),
        ),
        "other name",
    ),
    "checksum of 64 KiB": (
        variant(
            "file",
            ("hashlib.sha256(content).digest() + content", "hashlib.sha256(content[:65536]).digest() + content"),
            (_SUM, _SUM.replace("(content)", "(content[:65536])")),
        ),
        "damage is",
    ),
    "checksum of both ends": (
        variant(
            "file",
            (
                "hashlib.sha256(content).digest() + content",
                "hashlib.sha256(content[:4096] + content[-4096:]).digest() + content",
            ),
            (_SUM, _SUM.replace("(content)", "(content[:4096] + content[-4096:])")),
        ),
        "damage is",
    ),
    "from the first GPU only": (
        variant("file", ('map_location="cpu"', 'map_location={"cuda:0": "cpu"}')),
        "arrive on the CPU",
    ),
    "reading touches the file": (
        variant(
            "file", ("        digest, content", "        self.path.write_bytes(whole + b' ')\n        digest, content")
        ),
        "comes back",
    ),
    "a missing file is damage": (
        variant(
            "file",
            (
                "        whole = self.path.read_bytes()\n",
                "        if not self.path.exists():\n            raise DamagedCheckpoint(self.path.name)\n"
                "        whole = self.path.read_bytes()\n",
            ),
        ),
        "FileNotFoundError",
    ),
    "a missing file is None": (
        variant(
            "file",
            (
                "        whole = self.path.read_bytes()\n",
                "        if not self.path.exists():\n            return None\n        whole = self.path.read_bytes()\n",
            ),
        ),
        "FileNotFoundError",
    ),
    "in place": (
        variant("file", (_WITH, '        with open(self.path, "wb") as file:\n'), (_MOVE, "")),
        "old one or the new one",
    ),
    "deletes the old one first": (
        variant("file", (_MOVE, "        self.path.unlink(missing_ok=True)\n" + _MOVE)),
        "old one or the new one",
    ),
    "moves the old one away": (
        variant(
            "file",
            (
                _MOVE,
                "        if self.path.exists():\n            os.replace(self.path, str(self.path) + '.old')\n" + _MOVE,
            ),
        ),
        "old one or the new one",
    ),
    "copies the bytes": (
        variant("file", (_MOVE, "        self.path.write_bytes(temporary.read_bytes())\n        temporary.unlink()\n")),
        "old one or the new one",
    ),
    "saves into the old one on the way": (
        variant(
            "file",
            (_SAVE, "        torch.save(state, self.path)\n" + _SAVE),
        ),
        "old one or the new one|leaves the old",
    ),
    "forgets the old one at the beginning": (
        variant(
            "file",
            (
                _SAVE,
                "        buffer = io.BytesIO()\n        try:\n            torch.save(state, buffer)\n"
                "        except Exception:\n            self.path.unlink()\n            raise\n"
                "        content = buffer.getvalue()\n",
            ),
        ),
        "leaves the old one",
    ),
    "says nothing of a state that can't be saved": (
        variant(
            "file",
            (
                _SAVE,
                "        buffer = io.BytesIO()\n        try:\n            torch.save(state, buffer)\n"
                "        except Exception:\n            return\n        content = buffer.getvalue()\n",
            ),
        ),
        "leaves the old one",
    ),
    "another name": (variant("file", ('+ ".tmp"', '+ ".new"')), "other name"),
    "suffix replaced": (
        variant("file", ('self.path.with_name(self.path.name + ".tmp")', 'self.path.with_suffix(".tmp")')),
        "other name|comes back",
    ),
    "a leftover is in the way": (
        variant("file", ('open(temporary, "wb")', 'open(temporary, "xb")')),
        "old one or|other name",
    ),
    "appends to a leftover": (
        variant("file", ('open(temporary, "wb")', 'open(temporary, "ab")')),
        "old one or|other name",
    ),
    "leaves the sum beside it": (
        variant("file", (_MOVE, _MOVE + "        Path(str(self.path) + '.sha').write_text('x')\n")),
        "other name",
    ),
    "no fsync": (variant("file", (_FLUSH, "            file.flush()\n")), "on the disk before"),
    "no flush": (variant("file", (_FLUSH, "            os.fsync(file.fileno())\n")), "on the disk before"),
    "fsync too early": (
        variant(
            "file",
            (_WITH, _WITH + "            os.fsync(file.fileno())\n"),
            (_FLUSH, "            file.flush()\n"),
        ),
        "on the disk before",
    ),
    "fsync after the name": (
        variant(
            "file",
            (_FLUSH, "            file.flush()\n"),
            (_MOVE, _MOVE + "        with open(self.path, 'rb') as file:\n            os.fsync(file.fileno())\n"),
        ),
        "on the disk before",
    ),
    "the folder is forgotten": (variant("file", (_FOLDER, "            pass\n")), "folder's entry"),
    "the folder too early": (
        variant(
            "file",
            (_MOVE, ""),
            ("            os.close(folder)\n", "            os.close(folder)\n" + _MOVE),
        ),
        "folder's entry",
    ),
    "another folder": (
        variant("file", ("self.path.parent, os.O_RDONLY", "self.path.parent.parent, os.O_RDONLY")),
        "folder's entry",
    ),
    "the folder stays open": (variant("file", ("            os.close(folder)\n", "            pass\n")), "stays open"),
    "no checksum": (variant("file", (_SUM, "        if False:\n")), "damage is"),
    "checksum of the beginning": (
        variant(
            "file",
            ("hashlib.sha256(content).digest() + content", "hashlib.sha256(content[:200]).digest() + content"),
            (_SUM, _SUM.replace("(content)", "(content[:200])")),
        ),
        "damage is",
    ),
    "checksum without its end": (
        variant(
            "file",
            ("hashlib.sha256(content).digest() + content", "hashlib.sha256(content[:-1]).digest() + content"),
            (_SUM, _SUM.replace("(content)", "(content[:-1])")),
        ),
        "damage is",
    ),
    "half of the checksum": (
        variant("file", (_SUM, "        if hashlib.sha256(content).digest()[:16] != digest[:16]:\n")),
        "damage is",
    ),
    "length only": (
        variant(
            "file",
            ("hashlib.sha256(content).digest() + content", "len(content).to_bytes(32, 'big') + content"),
            (_SUM, "        if len(content).to_bytes(32, 'big') != digest:\n"),
        ),
        "damage is",
    ),
    "sum of the bytes": (
        variant(
            "file",
            ("hashlib.sha256(content).digest() + content", "(sum(content) % 255).to_bytes(32, 'big') + content"),
            (_SUM, "        if (sum(content) % 255).to_bytes(32, 'big') != digest:\n"),
        ),
        "damage is",
    ),
    "another exception": (variant("file", (_RAISE, "            raise RuntimeError(self.path.name)\n")), "damage is"),
    "the file isn't named": (
        variant("file", (_RAISE, '            raise DamagedCheckpoint("it is damaged")\n')),
        "damage is",
    ),
    "unpickles first": (
        variant(
            "file",
            (
                _SUM,
                "        try:\n            torch.load(io.BytesIO(content), map_location='cpu', weights_only=True)\n"
                "        except Exception:\n            pass\n" + _SUM,
            ),
        ),
        "not unpickled",
    ),
    "unpickles anything": (variant("file", ("weights_only=True", "weights_only=False")), "weights_only"),
    "says None of what it refuses": (
        variant(
            "file",
            (
                _RETURN,
                "try:\n            " + _RETURN + "\n        except Exception:\n            return None",
            ),
        ),
        "weights_only",
    ),
    "back to the GPU": (variant("file", ('map_location="cpu", ', "")), "arrive on the CPU"),
    "to the meta device": (
        variant("file", ('map_location="cpu"', 'map_location={"cuda:0": "meta"}')),
        "arrive on the CPU",
    ),
}

# ---------------------------------------------------------------- groups


def grouped_by_chunks(batches, count):
    """A list that is handed on when it is full."""
    if not count >= 1:
        raise ValueError("at least one batch a group")

    def leaves(batch):
        if torch.is_tensor(batch):
            return [batch] if batch.dim() else []
        if isinstance(batch, dict):
            batch = batch.values()
        elif not isinstance(batch, (list, tuple)):
            return []
        return list(chain.from_iterable(leaves(part) for part in batch))

    def triples(group):
        sizes = []
        for batch in group:
            found = leaves(batch)
            if not found:
                raise ValueError("nothing to count")
            sizes.append(found[0].size(0))
        total = float(sum(sizes))
        if group and not total:
            raise ValueError("no samples")
        return [
            (batch, size / total, i + 1 == len(group)) for i, (batch, size) in enumerate(zip(group, sizes, strict=True))
        ]

    group = []
    for batch in batches:
        group.append(batch)
        if len(group) == count:
            yield from triples(group)
            group = []
    yield from triples(group)


def grouped_by_recursion(batches, count):
    """One group, then the rest."""
    if count < 1:
        raise ValueError(count)

    def size(batch):
        stack = [batch]
        while stack:
            part = stack.pop()
            if isinstance(part, torch.Tensor) and part.ndim:
                return part.shape[0]
            if isinstance(part, dict):
                stack.extend(reversed(list(part.values())))
            elif isinstance(part, (tuple, list)):
                stack.extend(reversed(part))
        raise ValueError(f"no tensor in {batch!r}")

    stream = iter(batches)
    group = tuple(islice(stream, count))
    while group:
        sizes = list(map(size, group))
        if not any(sizes):
            raise ValueError(f"nothing to weigh in {group!r}")
        for i in range(len(group)):
            yield group[i], sizes[i] / sum(sizes), i == len(group) - 1
        group = tuple(islice(stream, count))


def refuses_at_the_call(batches, count):
    if count < 1:
        raise ValueError(count)
    return grouped_by_chunks(batches, count)


_SLICE = "while group := list(islice(rest, count)):"
_YIELD = "yield batch, size / sum(sizes), number == len(group)"
_MAPPING = "        if isinstance(batch, Mapping):\n            batch = list(batch.values())\n"
_NEXT = "return next((size for size in found if size is not None), None)"
_COUNT = "    if count < 1:\n"
_LEN = "return len(batch) if batch.dim() else None"
_NONE = "        if None in sizes or sum(sizes) == 0:\n"
WRONG_GROUPS = {
    "drops the last group": (
        variant("groups", (_SLICE, "while len(group := list(islice(rest, count))) == count:")),
        "each batch once",
    ),
    "the reverse order": (
        variant("groups", ("enumerate(zip(group, sizes", "enumerate(zip(group[::-1], sizes[::-1]")),
        "each batch once",
    ),
    "copies": (variant("groups", ("yield batch,", "yield copy.deepcopy(batch),")), "each batch once"),
    "lists for tuples": (variant("groups", (_YIELD, f"yield [{_YIELD[6:]}]")), "each batch once"),
    "takes lists only": (
        variant("groups", ("rest = iter(batches)", "rest = iter([batches[i] for i in range(len(batches))])")),
        "raised|each batch",
    ),
    "last by the count": (variant("groups", ("number == len(group)", "number == count")), "last: at"),
    "last at the end of all": (
        variant("groups", ("number == len(group)", "number == len(group) < count or number == count == 1")),
        "last: at",
    ),
    "one over the count": (variant("groups", ("size / sum(sizes)", "1 / count")), "weight: the share"),
    "one over the group's batches": (variant("groups", ("size / sum(sizes)", "1 / len(group)")), "weight: the share"),
    "samples, not shares": (variant("groups", ("size / sum(sizes)", "float(size)")), "weight: the share"),
    "share of the largest": (variant("groups", ("size / sum(sizes)", "size / max(sizes)")), "weight: the share"),
    "sum of a full group": (
        variant("groups", ("size / sum(sizes)", "size / (sizes[0] * len(group))")),
        "weight: the share",
    ),
    "tensors for floats": (
        variant("groups", ("size / sum(sizes)", "torch.tensor(size / sum(sizes), dtype=torch.float64)")),
        "weight: the share",
    ),
    "rounded weights": (variant("groups", ("size / sum(sizes)", "round(size / sum(sizes), 6)")), "weight: the share"),
    "dictionaries are not entered": (variant("groups", (_MAPPING, "")), "counted in the first|raised"),
    "keys of dictionaries": (variant("groups", ("list(batch.values())", "list(batch)")), "counted in the first|raised"),
    "tuples only": (variant("groups", ("list | tuple) else ()", "tuple) else ()")), "counted in the first|raised"),
    "first place only": (
        variant("groups", (_NEXT, "return next(iter(found), None)")),
        "counted in the first|raised",
    ),
    "the last tensor": (
        variant("groups", (_NEXT, "return next((size for size in reversed(list(found)) if size is not None), None)")),
        "counted in the first|each batch|weight",
    ),
    "elements for samples": (variant("groups", ("return len(batch)", "return batch.numel()")), "counted in the first"),
    "length of what comes first": (
        variant(
            "groups",
            (
                "        if isinstance(batch, Tensor):",
                "        if hasattr(batch, '__len__') and not isinstance(batch, list | tuple | dict):",
            ),
            (_LEN, "return len(batch)"),
        ),
        "counted in the first",
    ),
    "reads all first": (
        variant("groups", ("rest = iter(batches)", "rest = iter(list(islice(batches, 10**5)))")),
        "at most count",
    ),
    "all in a list first": (variant("groups", ("rest = iter(batches)", "rest = iter(list(batches))")), "at most count"),
    "looks for the end": (
        variant(
            "groups",
            (
                _SLICE,
                "head = list(islice(rest, count))\n    while group := head:\n        head = list(islice(rest, count))",
            ),
        ),
        "at most count",
    ),
    "reads one more": (
        variant(
            "groups",
            ("rest = iter(batches)", "rest = (a for a, _ in pairs(batches))"),
            (
                "def grouped(",
                "def pairs(batches):\n    rest = iter(batches)\n    last = list(islice(rest, 1))\n"
                "    while last:\n        more = list(islice(rest, 1))\n        yield last[0], None\n        last = more\n\n\n"
                "def grouped(",
            ),
        ),
        "at most count",
    ),
    "last by identity": (variant("groups", ("number == len(group)", "batch is group[-1]")), "last: at"),
    "an empty tensor is none": (
        variant("groups", ("size for size in found if size is not None", "size for size in found if size")),
        "counted in the first|raised",
    ),
    "groups of sixteen at most": (
        variant("groups", ("islice(rest, count)", "islice(rest, min(count, 16))")),
        "last: at|at most|weight",
    ),
    "plain dictionaries only": (
        variant("groups", ("isinstance(batch, Mapping)", "type(batch) is dict")),
        "counted in the first|raised",
    ),
    "refuses at the call": (refuses_at_the_call, "ValueError for"),
    "any count": (variant("groups", (_COUNT, "    if False:\n")), "ValueError"),
    "zero is one": (variant("groups", (_COUNT, "    count = count or 1\n    if count < 1:\n")), "ValueError"),
    "no tensor counts as none": (
        variant("groups", (_NONE, "        sizes = [s or 0 for s in sizes]\n        if sum(sizes) == 0:\n")),
        "ValueError",
    ),
    "a TypeError": (variant("groups", (_NONE, "        if sum(sizes) == 0:\n")), "ValueError"),
    "a division by zero": (variant("groups", (_NONE, "        if None in sizes:\n")), "ValueError"),
    "plain tensors only": (
        variant("groups", ("isinstance(batch, Tensor)", "type(batch) in (Tensor, nn.Parameter)")),
        "counted in the first|raised",
    ),
    "a number is a sample": (
        variant("groups", (_LEN, "return len(batch) if batch.dim() else 1")),
        "counted in the first",
    ),
    "a number has no length": (variant("groups", (_LEN, "return len(batch)")), "counted in the first"),
    "keeps the group before": (
        variant(
            "groups",
            ("    while group :=", "    before = ()\n    while group :="),
            ("        sizes = [samples", "        before, old = group, before\n        sizes = [samples"),
        ),
        "held at once",
    ),
    "keeps one batch too many": (
        variant(
            "groups",
            ("    while group :=", "    ends = []\n    while group :="),
            ("        sizes = [samples", "        ends = [*ends[-1:], group[-1]]\n        sizes = [samples"),
        ),
        "held at once",
    ),
    "keeps all batches": (
        variant(
            "groups",
            ("    while group :=", "    held = []\n    while group :="),
            ("        sizes = [samples", "        held += group\n        sizes = [samples"),
        ),
        "at most count",
    ),
}

# ---------------------------------------------------------------- a run that goes on


class InOneDict(Resumable):
    """All states by their names, the generators in a list."""

    def generator_states(self):
        numpy_state = dict(np.random.get_state(legacy=False))
        inner = dict(numpy_state["state"])
        inner["key"] = torch.from_numpy(inner["key"].astype(np.int64))
        states = [list(random.getstate()), {**numpy_state, "state": inner}, torch.random.get_rng_state()]
        module = random_module(self.device)
        device = module.get_rng_state(self.device) if module is not None else None
        return [device, *states, *(g.get_state() for g in self._own())]

    def set_generator_states(self, states):
        device, python, numpy_state, cpu, *own = states
        if device is not None:
            random_module(self.device).set_rng_state(device, device=self.device)
        random.setstate((python[0], tuple(python[1]), python[2]))
        inner = {**numpy_state["state"], "key": numpy_state["state"]["key"].numpy().astype(np.uint32)}
        np.random.set_state({**numpy_state, "state": inner})
        torch.random.set_rng_state(cpu)
        for generator, state in zip(self._own(), own, strict=True):
            generator.set_state(state)

    def _own(self):
        return loader_generators((self.train_loader, self.val_loader))

    def _names(self):
        return [f"{i}-{c.__class__.__qualname__}" for i, c in enumerate(self.callbacks)]

    def state_dict(self):
        parts = {"optimizer": self.optimizer, **dict(zip(self._names(), self.callbacks, strict=True))}
        if self.scaler is not None:
            parts["scaler"] = self.scaler
        states = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
        mine = copy.deepcopy(super().state_dict())
        return {**mine, "parts": states, "names": self._names(), "generators": self.generator_states()}

    def load_state_dict(self, state):
        if state["names"] != self._names():
            raise ValueError(f"{state['names']} were saved")
        super().load_state_dict(state)
        parts = state["parts"]
        for name, callback in zip(self._names(), self.callbacks, strict=True):
            callback.load_state_dict(parts[name])
        if "scaler" in parts and self.scaler:
            self.scaler.load_state_dict(parts["scaler"])
        self.optimizer.load_state_dict(parts["optimizer"])
        self.set_generator_states(state["generators"])


class InAFile(InOneDict):
    """The snapshot goes through torch.save; ordered dictionaries."""

    def state_dict(self):
        buffer = io.BytesIO()
        torch.save(super().state_dict(), buffer)
        return OrderedDict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))


_SETS = '        self.set_generator_states(state["generators"])\n'
_SUPER = "        super().load_state_dict(state)\n"
_NUMPY = 'np.random.set_state(tuple(states["numpy"]))'
_PYTHON = 'random.setstate(states["python"])'
_OWN = "[one.get_state() for one in own]"
_OWN_SET = (
    '        for generator, state in zip(own, states["own"], strict=True):\n            generator.set_state(state)\n'
)
_CALLBACKS = "[[type(c).__name__, c.state_dict()] for c in self.callbacks]"
_LOADED = "            callback.load_state_dict(own)\n"
_DIFFER = "        if saved != here:\n"
WRONG_TRAINER = {
    "not a Resumable": (type("Alone", (), dict(vars(ANSWERS["Trainer"]))), "derived from Resumable"),
    "Python's is left out": (variant("trainer", (_PYTHON, "pass")), "draw the same"),
    "NumPy's is left out": (variant("trainer", (_NUMPY, "pass")), "draw the same"),
    "NumPy's second Gaussian is lost": (
        variant("trainer", (_NUMPY, 'np.random.set_state(tuple(states["numpy"])[:3])')),
        "draw the same",
    ),
    "Python's second Gaussian is lost": (
        variant("trainer", (_PYTHON, 'random.setstate((*states["python"][:2], None))')),
        "draw the same",
    ),
    "PyTorch's is left out": (
        variant("trainer", ('        torch.set_rng_state(states["torch"])\n', "")),
        "draw the same",
    ),
    "a seed for a state": (
        variant(
            "trainer",
            ("torch.get_rng_state()", "torch.initial_seed()"),
            ('torch.set_rng_state(states["torch"])', 'torch.manual_seed(states["torch"])'),
        ),
        "draw the same|same bits",
    ),
    "the loaders' are left out": (variant("trainer", (_OWN_SET, "")), "draw the same"),
    "the training loader's only": (
        variant(
            "trainer",
            (_OWN, _OWN.replace("own]", "own[:1]]")),
            (", strict=True):\n            generator", ", strict=False):\n            generator"),
        ),
        "draw the same|same bits",
    ),
    "the loader's seeds": (
        variant(
            "trainer",
            (_OWN, _OWN.replace("get_state", "initial_seed")),
            ("generator.set_state(state)", "generator.manual_seed(state)"),
        ),
        "draw the same",
    ),
    "the accelerator's is left out": (
        variant("trainer", ('            module.set_rng_state(states["device"], self.device)\n', "            pass\n")),
        "accelerator's generator",
    ),
    "the current device's": (
        variant(
            "trainer",
            ("get_rng_state(self.device)", "get_rng_state()"),
            ('set_rng_state(states["device"], self.device)', 'set_rng_state(states["device"])'),
        ),
        "accelerator's generator",
    ),
    "put back on the current device": (
        variant("trainer", ('set_rng_state(states["device"], self.device)', 'set_rng_state(states["device"])')),
        "accelerator's generator",
    ),
    "draws while it saves": (
        variant("trainer", ("        return states |", "        random.random()\n        return states |")),
        "only look",
    ),
    "seeds while it saves": (
        variant("trainer", ("        kind, keys, *rest", "        torch.manual_seed(0)\n        kind, keys, *rest")),
        "only look|draw the same",
    ),
    "without what Savable gives": (
        variant("trainer", ("super().state_dict() | ", '{"model": self.model.state_dict()} | ')),
        "puts back|same bits|runs",
    ),
    "NumPy's array as it is": (variant("trainer", ("keys.tolist()", "keys")), "weights_only|Weights only"),
    "a generator object": (
        variant(
            "trainer",
            (_OWN, "own"),
            ("generator.set_state(state)", "generator.set_state(state.get_state())"),
        ),
        "is a snapshot",
    ),
    "evaluation mode while it saves": (
        variant("trainer", ("return copy.deepcopy(state)", "self.model.eval()\n        return copy.deepcopy(state)")),
        "only look",
    ),
    "no gradients while it saves": (
        variant(
            "trainer",
            ("return copy.deepcopy(state)", "self.optimizer.zero_grad()\n        return copy.deepcopy(state)"),
        ),
        "only look",
    ),
    "the optimizer only if it has a state": (
        variant(
            "trainer",
            (
                '        self.optimizer.load_state_dict(state["optimizer"])\n',
                '        if state["optimizer"]["state"]:\n'
                '            self.optimizer.load_state_dict(state["optimizer"])\n',
            ),
        ),
        "same bits",
    ),
    "the callbacks themselves": (
        variant("trainer", (_CALLBACKS, "[[type(c).__name__, vars(c)] for c in self.callbacks]")),
        "puts back|weights_only|snapshot|runs|only look",
    ),
    "no snapshot": (variant("trainer", ("return copy.deepcopy(state)", "return state")), "snapshot"),
    "a shallow one": (variant("trainer", ("copy.deepcopy(state)", "copy.copy(state)")), "snapshot"),
    "a snapshot of the model only": (
        variant(
            "trainer",
            ("return copy.deepcopy(state)", 'state["model"] = copy.deepcopy(state["model"])\n        return state'),
        ),
        "snapshot",
    ),
    "without the model": (variant("trainer", (_SUPER, "")), "puts back"),
    "without the optimizer": (
        variant("trainer", ('        self.optimizer.load_state_dict(state["optimizer"])\n', "")),
        "puts back",
    ),
    "without the scaler": (
        variant("trainer", ('        self.scaler.load_state_dict(state["scaler"])\n', "")),
        "puts back",
    ),
    "without callbacks": (variant("trainer", (_LOADED, "            pass\n")), "puts back"),
    "the first callback for all": (
        variant("trainer", (_LOADED, '            callback.load_state_dict(state["callbacks"][-1][1])\n')),
        "puts back|raised|runs",
    ),
    "states by their types' names": (
        variant(
            "trainer",
            (
                _CALLBACKS,
                "[[type(c).__name__ for c in self.callbacks], {type(c).__name__: c.state_dict() for c in self.callbacks}]",
            ),
            ('[n for n, _ in state["callbacks"]]', 'state["callbacks"][0]'),
            (
                'for callback, (_, own) in zip(self.callbacks, state["callbacks"], strict=True):',
                "for callback in self.callbacks:",
            ),
            (_LOADED, '            callback.load_state_dict(state["callbacks"][1][type(callback).__name__])\n'),
        ),
        "puts back|same bits|snapshot",
    ),
    "two of the loaders' generators": (
        variant(
            "trainer",
            (_OWN, _OWN.replace("own]", "own[:2]]")),
            (", strict=True):\n            generator", ", strict=False):\n            generator"),
        ),
        "draw the same",
    ),
    "the first callback and the set of all": (
        variant(
            "trainer",
            (_DIFFER, "        if len(saved) != len(here) or saved[0] != here[0] or set(saved) != set(here):\n"),
        ),
        "other callbacks",
    ),
    "any callbacks": (
        variant(
            "trainer",
            (_DIFFER, "        if False:\n"),
            ('state["callbacks"], strict=True', 'state["callbacks"], strict=False'),
        ),
        "other callbacks",
    ),
    "as many callbacks": (variant("trainer", (_DIFFER, "        if len(saved) != len(here):\n")), "other callbacks"),
    "in any order": (variant("trainer", (_DIFFER, "        if sorted(saved) != sorted(here):\n")), "other callbacks"),
    "refused too late": (
        variant(
            "trainer",
            (_SUPER, ""),
            ("        saved, here =", "        super().load_state_dict(state)\n        saved, here ="),
        ),
        "other callbacks",
    ),
    "generators before callbacks": (variant("trainer", (_SETS, ""), (_SUPER, _SETS + _SUPER)), "same bits"),
    "generators are not put back": (variant("trainer", (_SETS, "")), "same bits"),
    "begins its epoch anew": (
        variant(
            "trainer",
            (
                _SETS,
                _SETS
                + '        self.batches_done = 0\n        self.step += 0\n        self.group_loss = 0\n        self.step = state["place"]["step"] - state["place"]["batches_done"] // 4\n',
            ),
        ),
        "same bits",
    ),
}

CHECKS = {
    "EarlyStopping": check.early_stopping,
    "UpdateRatio": check.update_ratio,
    "CheckpointFile": check.checkpoint_file,
    "grouped": check.grouped,
    "Trainer": check.trainer,
}


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # as some wrong answers leave it
class TestChecks(CheckProtocol):
    TOPIC = "15-10"
    IDLE = IDLE
    CHECKS, ANSWERS, STUBS = CHECKS, ANSWERS, STUBS
    RIGHT: ClassVar = {
        "EarlyStopping": [ByHistory, ByNumbers],
        "UpdateRatio": [RatiosByPairs, RatiosInPlace, RatiosInABuffer],
        "CheckpointFile": [Crc, ByPathlib, Unbuffered],
        "grouped": [grouped_by_chunks, grouped_by_recursion],
        "Trainer": [InOneDict, InAFile],
    }
    WRONG: ClassVar = {
        "EarlyStopping": WRONG_STOPPING,
        "UpdateRatio": WRONG_RATIO,
        "CheckpointFile": WRONG_FILE,
        "grouped": WRONG_GROUPS,
        "Trainer": WRONG_TRAINER,
    }

    def hold_stand_in(self, name, stand_in):
        assert CHECKS[name].run(stand_in).status == "passed"
