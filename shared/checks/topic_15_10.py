"""Checks of the exercises in 15-10, Building a Mini Training Framework."""

import copy
import gc
import hashlib
import io
import itertools
import math
import os
import random
import stat
import tempfile
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from shared.checks.exercise import exercise
from shared.checks.trial import Trial

_LESSON: dict[str, Any] = {}  # what the lesson defines, for stand-ins


def _derived(trial: Trial, answer: Any, base: str) -> None:
    """Hold that the answer is derived from a class of the lesson, and remember the lesson."""
    classes = {found.__name__: found for found in getattr(answer, "__mro__", ())[1:]}
    trial.needs(
        f"is derived from {base}",
        base in classes,
        expected=f"a class derived from {base}",
        got=repr(answer),
        hint="which class does the task name?",
    )
    method = next(value for value in vars(classes[base]).values() if hasattr(value, "__globals__"))
    _LESSON.update(names=method.__globals__, base=classes[base])


# ---------------------------------------------------------------- 15-10.1


def _verdicts(values: Sequence[float], mode: str, options: Mapping[str, Any]) -> list[tuple[float, int, bool]]:
    """(best, wait, whether it stops) after each value, up to the first at which it stops: the definition, in order."""
    values = [float(value) for value in values]
    better = (lambda a, b: a < b) if mode == "min" else (lambda a, b: a > b)
    least = options.get("min_delta", 0.0)
    found, best, wait = [], None, 0
    for value in values:
        if not math.isfinite(value):
            return [*found, (best, wait, True)]
        shifted = None if best is None else best - least if mode == "min" else best + least
        if best is None or better(value, shifted):
            best, wait = value, 0
        else:
            wait += 1
        stops = wait >= options.get("patience", 3)
        for name, sign in (("threshold", 1), ("divergence", -1)):
            limit = options.get(name)
            if limit is not None:
                stops |= better(value, limit) if sign > 0 else better(limit, value)
        found.append((best, wait, stops))
        if stops:
            break
    return found


_NO_MODES = ("minimum", "Max", "MIN", "mi", "mean", "", "minmax", "min ", "auto", "lower", None, 1, -1, True)


def _loop(**more: Any) -> SimpleNamespace:
    """What every loop has."""
    zeros = dict.fromkeys(("epoch", "step", "epochs_done", "batches_done", "rank"), 0)
    return SimpleNamespace(**{"metrics": {}, "values": {}, "ending": None, "ranks": 1, "max_epochs": 9} | zeros | more)


def _judged(answer: Any, values: Sequence[float], **options: Any) -> list[tuple[Any, Any, bool]]:
    """What the answer says after each of the values, up to the first at which it stops."""
    monitor = options.get("monitor", "val_loss")
    stopper, found = answer(**options), []
    loop = _loop()
    stopper.on_fit_start(loop)
    for value in map(float, values):
        loop.metrics = {"other": 0.0, monitor: value, "val_losses": -1.0}
        stops = _stops(lambda: stopper.on_epoch_end(loop))
        found.append((stopper.best, stopper.wait, stops))
        if stops:
            break
        loop.epoch += 1
    return found


def _stops(action: Callable[[], object]) -> bool:
    """Whether an action raises StopFit."""
    try:
        action()
    except Exception as error:
        if type(error).__name__ != "StopFit":
            raise
        return True
    return False


def _early_stopping() -> Any:
    stop_fit = _LESSON["names"]["StopFit"]

    class EarlyStopping(_LESSON["base"]):
        def __init__(self, monitor="val_loss", mode="min", **options: Any) -> None:
            if mode not in ("min", "max"):
                raise ValueError(f"mode is {mode!r}")
            self.monitor, self.mode, self.options, self.values = monitor, mode, options, []
            self.best, self.wait, self.reason = None, 0, None

        def on_fit_start(self, loop: Any) -> None:
            self.values, self.best, self.wait, self.reason = [], None, 0, None

        def on_epoch_end(self, loop: Any) -> None:
            if loop.ending is None:  # a metric that is missing raises KeyError with its name
                self.values.append(loop.metrics[self.monitor])
                self.best, self.wait, stops = _verdicts(self.values, self.mode, self.options)[-1]
                self.reason = "it is time" if stops else None
                self.on_checkpoint_load(loop)

        def on_checkpoint_load(self, loop: Any) -> None:
            if self.reason is not None:
                raise stop_fit(self.reason)

        def state_dict(self) -> dict[str, Any]:
            return {"values": self.values, "best": self.best, "wait": self.wait, "reason": self.reason}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            vars(self).update(state)

    return EarlyStopping


@exercise(
    "15-10.1",
    "Early stopping",
    points=15,
    demands=11,
    stand_in=lambda: _early_stopping(),
    stand_in_name="one of the check's",
)
def early_stopping(trial: Trial, answer: Any) -> None:
    """`answer(monitor, mode, patience, min_delta, threshold, divergence)` raises StopFit at the end of an epoch."""
    _derived(trial, answer, "Callback")
    with trial.group("best and wait follow the values", hint="follow the case by hand, with point 1"):
        for mode, delta in itertools.product(("min", "max"), (0.0, 0.5)):
            walks = [[6, 5, 5.5, 4.5, 4.5, 4, 3.25], [1, 2, 1.5, 2.5, 2.5, 3, 3.75], [-1, -2, -1.5, -1.25, 0.0, 0.5]]
            walks += [[1.0, 1.0 - 1e-5, 1.0, 1.0 + 1e-5, 1.0 - 3e-5, 1.0 + 3e-5], [1e7, -1e30, 1e30, 5.0]]
            for values in [*walks, *([random.choice(range(-8, 9)) / 4 for _ in range(9)] for _ in range(4))]:
                options = {"mode": mode, "patience": 99, "min_delta": delta}
                got = [entry[:2] for entry in _judged(answer, values, **options)]
                want = [entry[:2] for entry in _verdicts(values, mode, options)]
                hint, see = "follow the case by hand, with point 1", 1 if mode == "max" else None
                _followed(trial, f"{values}, mode {mode!r}, min_delta {delta}", got, want, hint=hint, see=see)
        for _ in range(4):
            _two_at_once(trial, answer, limits=False)
    with trial.group("no metric is changed", hint="what is in loop.metrics when it is done?"):
        for value in (1.0, 2.0, math.nan, math.inf, -math.inf):
            stopper = answer(patience=2, threshold=-9.0, divergence=1.5)
            loop = _loop(metrics={"val_loss": 1.0, "val_accuracy": 0.5})
            stopper.on_fit_start(loop)
            _stops(partial(stopper.on_epoch_end, loop))
            loop.metrics["val_loss"] = value
            _stops(partial(stopper.on_epoch_end, loop))
            want = {"val_loss": value, "val_accuracy": 0.5}
            trial.equal(f"loop.metrics after a loss of {value}", loop.metrics, want)
    with trial.group("stops when wait reaches patience", hint="which of the values is the one too many?", see=2):
        cases = [
            ([6, 5, 5, 5, 5, 5], 3),
            ([6, 5, 4, 4, 3, 3], 1),
            ([6, 5, 6, 5, 5, 5], 3),
            ([1, 1, 1, 0, 1, 1, 1, 1], 3),
        ]
        cases += [([random.randrange(4) for _ in range(12)], patience) for patience in (1, 2, 2, 4)]
        for (values, patience), mode in itertools.product(cases, ("min", "max")):
            got = len(_judged(answer, values, mode=mode, patience=patience))
            want = len(_verdicts(values, mode, {"patience": patience}))
            trial.equal(f"epochs run with {values}, mode {mode!r}, patience {patience}", got, want)
        short, long = answer(patience=1), answer(patience=3)
        loop, found = _loop(metrics={"val_loss": 1.0}), []
        for stopper in (short, long):
            stopper.on_fit_start(loop)
            stopper.on_epoch_end(loop)
        for stopper in (long, short):
            found.append(_stops(partial(stopper.on_epoch_end, loop)))
        case = "two objects, patience 3 and 1, at a second equal value: stops"
        trial.equal(case, found, [False, True], hint=_OTHER_OBJECT)
        trial.equal("epochs run with the default patience", len(_judged(answer, [1.0] * 9)), 4)
        case, hint = "epochs run with monitor='val_accuracy'", "which metric does your answer look at?"
        options = {"monitor": "val_accuracy", "mode": "max", "patience": 1}
        epochs = trial.call(case, lambda: len(_judged(answer, [0.1, 0.2, 0.2, 0.2], **options)), hint=hint)
        trial.equal(case, epochs, 3, hint=hint)
    for name, word in (("threshold", "better"), ("divergence", "worse")):
        with trial.group(f"{name}: stops when {word}, strictly"):
            for mode, limit in itertools.product(("min", "max"), (2.0, 0.0, -1.5)):
                for values in ([limit, limit, limit - 0.25, limit], [limit, limit + 0.25, limit], [limit] * 3):
                    options = {"mode": mode, "patience": 99, name: limit}
                    got, want = _judged(answer, values, **options), _verdicts(values, mode, options)
                    hint = f"which of the values is the first that is {word} than the limit?"
                    see = 1 if mode == "max" else None
                    case = f"{values}, mode {mode!r}, {name} {limit}"
                    _followed(trial, case, got, want, hint=hint, see=see, moved=_MOVED)
            for mode in ("min", "max"):  # several options at once
                for number in range(12):
                    values = [round(random.gauss(0, 2), 6) for _ in range(9)]
                    options = {"mode": mode, "patience": random.choice((2, 3, 99)), "min_delta": random.random()}
                    if number < 2:  # better than the threshold, but not by enough to be the best
                        values, options["min_delta"] = [-1.4, -1.6, -1.7], 1.0
                        values = values if mode == "min" else [-value for value in values]
                    limits = {"threshold": -1.5} if name == "threshold" else {"threshold": -3.0, "divergence": 1.5}
                    options |= {key: limit if mode == "min" else -limit for key, limit in limits.items()}
                    got, want = _judged(answer, values, **options), _verdicts(values, mode, options)
                    hint = "which value is the first beyond a limit, or uses up the patience?"
                    _followed(trial, f"{values}, {options}", got, want, hint=hint, moved=_MOVED)
            for _ in range(6 if name == "divergence" else 0):
                _two_at_once(trial, answer, limits=True)
    hint = "which values are not finite, and what do they change?"
    with trial.group("not finite: stops, and changes neither best nor wait", hint=hint, see=2):
        for value, mode in itertools.product((math.nan, math.inf, -math.inf), ("min", "max")):
            for before in ([], [3.0], [3.0, 3.0]):
                got = _judged(answer, [*before, value, 1.0], mode=mode, threshold=-9.0 if mode == "min" else 9.0)
                want = _verdicts([*before, value], mode, {})
                _followed(trial, f"{[*before, value, 1.0]}, mode {mode!r}", got, want, hint=hint, see=2)
    with trial.group("an epoch that is being left is not judged", hint="what does loop.ending say?"):
        for ending in (KeyboardInterrupt(), ValueError("x"), _LESSON["names"]["StopFit"]("enough")):
            stopper = answer(patience=1)
            loop = _loop(metrics={"val_loss": 1.0})
            stopper.on_fit_start(loop)
            stopper.on_epoch_end(loop)
            loop.metrics, loop.ending = random.choice([{"val_loss": math.nan}, {}]), ending
            stops = _stops(partial(stopper.on_epoch_end, loop))
            trial.equal(f"stops while {ending!r} is under way", stops, False)
            trial.equal("best and wait", (stopper.best, stopper.wait), (1.0, 0))
    with trial.group("reason: None until it stops, then a text", hint="when is it set, and when back to None?"):
        for last, options in ((1.0, {}), (0.5, {"threshold": 0.75}), (9.0, {"divergence": 8.0}), (math.nan, {})):
            stopper = answer(patience=1, **options)
            loop = _loop(metrics={"val_loss": 1.0})
            trial.equal("reason before a fit", stopper.reason, None)
            stopper.on_fit_start(loop)
            stopper.on_epoch_end(loop)
            trial.equal("reason after one epoch", stopper.reason, None)
            loop.metrics = {"val_loss": last}
            _stops(partial(stopper.on_epoch_end, loop))
            case = f"reason after losses of 1.0 and {last} with patience 1, {options}"
            trial.that(case, isinstance(stopper.reason, str), expected="a text", got=repr(stopper.reason))
            stopper.on_fit_start(loop)
            got = {name: getattr(stopper, name) for name in ("best", "wait", "reason")}
            want = {"best": None, "wait": 0, "reason": None}
            trial.equal("in a new fit", got, want, hint="what does on_fit_start set?")
    _held_state(trial, answer)
    errors = {}
    for name, action in {
        **{f"mode={mode!r}": partial(answer, mode=mode) for mode in _NO_MODES},
        "no such metric": lambda: answer("val_top5").on_epoch_end(_loop(metrics={"val": 1.0})),
    }.items():
        try:
            action()
            errors[name] = "no exception"
        except NotImplementedError:
            raise
        except Exception as error:
            errors[name] = type(error).__name__ + (", which names it" if "val_top5" in str(error) else "")
    want = {f"mode={mode!r}": "ValueError" for mode in _NO_MODES} | {"no such metric": "KeyError, which names it"}
    trial.equal(
        "ValueError for another mode, KeyError for a metric that isn't there", errors, want, hint="look at point 6"
    )


_MOVED = "which values move best and wait, also the one that stops it?"
_OTHER_OBJECT = "what of another object's reaches this one?"


def _followed(
    trial: Trial, values: str, got: list[Any], want: list[Any], *, hint: str, see: int | None = None, moved: str = ""
) -> None:
    """Hold what was found after each of the values: whether it stopped there, then best, then wait."""
    trial.equal(f"how many are judged of {values}", len(got), len(want), hint=hint, see=see)
    if len(want[0]) > 2:
        stops = [[entry[2] for entry in entries] for entries in (got, want)]
        trial.equal(f"whether it stops after each of {values}", *stops, hint=hint, see=see)
        hint, see = (moved, 2) if moved else (hint, see)
    for place, name in enumerate(("best", "wait")):
        both = [[entry[place] for entry in entries] for entries in (got, want)]
        trial.equal(f"{name} after each of {values}", *both, hint=hint, see=see)


def _two_at_once(trial: Trial, answer: Any, limits: bool) -> None:
    """Two objects with options of their own, which are asked in turns."""
    both: list[tuple[str, dict[str, Any], list[float]]] = []
    for mode, sign in (("min", 1), ("max", -1)):
        options = {"mode": mode, "patience": 99, "min_delta": random.choice((0.0, 0.5, 1.0))}
        values = [random.choice(range(-8, 9)) / 4 for _ in range(9)]
        if limits:
            options |= {"monitor": f"val_{mode}", "patience": random.randint(2, 5)}
            options |= {"threshold": -sign * random.choice((1.25, 2.25)), "divergence": sign * 1.75}
        else:
            values = both[0][2] if both else values  # one metric, of which more is worse or better
        both.append((mode, options, values))
    stoppers = [answer(**options) for _, options, _ in both]
    loop, found = _loop(), ([], [])
    for stopper in stoppers:
        stopper.on_fit_start(loop)
    for number in range(9):
        for stopper, verdicts in zip(stoppers, found, strict=True):
            loop.metrics = {options.get("monitor", "val_loss"): values[number] for _, options, values in both}
            if not verdicts or not verdicts[-1][2]:
                stops = _stops(partial(stopper.on_epoch_end, loop))
                verdicts.append((stopper.best, stopper.wait, stops))
    for (mode, options, values), verdicts in zip(both, found, strict=True):
        case = f"{values}, {options}, asked in turns with another object"
        _followed(trial, case, verdicts, _verdicts(values, mode, options), hint=_OTHER_OBJECT)


def _held_state(trial: Trial, answer: Any) -> None:
    """Early stopping's state goes into a new object, and what has stopped stays stopped."""
    values, options = [5.0, 4.0, 4.5, 4.2], {"patience": 4}
    loop = _loop()

    def follow(stopper: Any, values: Sequence[float]) -> list[tuple[Any, Any, bool]]:
        found = []
        for value in values:
            loop.metrics = {"val_loss": value}
            stops = _stops(lambda: stopper.on_epoch_end(loop))
            found.append((stopper.best, stopper.wait, stops))
        return found

    with trial.group("the state goes into a new object", hint="what does the next verdict depend on?"):
        hint = "a checkpoint of this epoch, written at order 100: which verdict does it hold?"
        trial.equal("its order", answer().order, 0, hint=hint)
        for more in ([4.1, 4.1], [3.0, 3.5], [math.nan]):
            whole, first, second = (answer(**options) for _ in range(3))
            for stopper in (whole, first, second):
                stopper.on_fit_start(loop)
            follow(whole, values)
            follow(first, values)
            state = torch.load(_saved(first.state_dict()), weights_only=True)
            second.load_state_dict(state)
            got = {name: getattr(second, name) for name in ("best", "wait", "reason")}
            trial.equal("after loading", got, {"best": 4.0, "wait": 2, "reason": None})
            case, hint = "on_checkpoint_load stops a run that had not", "when does on_checkpoint_load raise?"
            trial.equal(case, _stops(lambda s=second: s.on_checkpoint_load(loop)), False, hint=hint)
            trial.equal(f"verdicts on {more} after loading", follow(second, more), follow(whole, more))
        first, second = answer(mode="max"), answer(mode="max")
        first.on_fit_start(loop)
        second.on_fit_start(loop)
        follow(first, [0.0])
        second.load_state_dict(torch.load(_saved(first.state_dict()), weights_only=True))
        case = "best and wait after 0.0 and -1.0 in mode 'max', the state loaded in between"
        trial.equal(case, follow(second, [-1.0])[0][:2], (0.0, 1))
    hint = "does the reason come into the new object, and what does on_checkpoint_load do with it?"
    with trial.group("what has stopped stays stopped", hint=hint):
        for values in ([1.0, 1.0, 1.0, 1.0, 1.0], [1.0, math.inf]):
            first, second = answer(**options), answer(**options)
            first.on_fit_start(loop)
            follow(first, values)
            second.on_fit_start(loop)
            second.load_state_dict(torch.load(_saved(first.state_dict()), weights_only=True))
            trial.equal("on_checkpoint_load raises StopFit", _stops(partial(second.on_checkpoint_load, loop)), True)


def _saved(state: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


# ---------------------------------------------------------------- 15-10.2


class _Reads(TorchFunctionMode):
    """Notes the calls that make a Python value of a tensor."""

    NAMES = (
        "item",
        "tolist",
        "cpu",
        "numpy",
        "__float__",
        "__int__",
        "__bool__",
        "__index__",
        "__format__",
        "__repr__",
        "__array__",
        "equal",
        "allclose",
        "nonzero",
        "is_nonzero",
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        places = (
            str(value) for value in (*args[1:], *(kwargs or {}).values()) if isinstance(value, str | torch.device)
        )
        if name in self.NAMES or (name == "to" and "cpu" in places):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


class _Made(TorchDispatchMode):
    """Keeps weak references to the memory of each result of `least` bytes or more."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.seen = least, []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        storages = [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.seen += [StorageWeakRef(storage) for storage in storages if storage.nbytes() >= self.least]
        return result

    def alive(self, owners: Any) -> int:
        """How much of it there still is that is no memory of `owners`."""
        known = {StorageWeakRef(t.untyped_storage()).cdata for t in tree_leaves(owners) if isinstance(t, Tensor)}
        self.seen = [one for one in self.seen if not one.expired()]
        return len({one.cdata for one in self.seen} - known)


class _Ratios:
    """A small training that calls a callback's hooks in the order of the lesson's table.

    Args:
        seed, step: of the weights, and the number of the step before the first.
        width: how many times as large the parameters are.
        watched: whether what the hooks touch is noted.
        device: of the model; on 'meta', where tensors hold no values, `want` stays empty.
    """

    def __init__(
        self, seed: int = 0, step: int = 0, width: int = 1, watched: bool = False, device: str = "cpu"
    ) -> None:
        torch.manual_seed(seed)
        model = nn.Module()
        model.a = nn.Linear(5, 7 * width)
        model.ab = nn.Linear(7 * width, 3 * width).double()
        model.a_b = nn.Parameter(torch.tensor(0.5))
        model.zeros = nn.Parameter(torch.zeros(3 * width, dtype=torch.float64))
        model.unused = nn.Parameter(torch.randn(2, 2, 2 * width))
        model.frozen = nn.Parameter(torch.randn(4 * width), requires_grad=False)
        model.tied = model.a
        model.empty_like = nn.Parameter(torch.randn(6, 4 * width).t())  # not contiguous
        self.model, self.device = model.to(device), device
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.03, weight_decay=0.2)
        self.loop = SimpleNamespace(
            model=model, optimizer=self.optimizer, step=step, epoch=0, ending=None, rank=0,
            values={"seen": 1.5}, metrics={"val_loss": 0.5},
            ranks=1, whole=True, weight=1.0, first=True, last=True, max_epochs=3, epochs_done=0, batches_done=0,
        )  # fmt: skip
        self.want: dict[str, list[tuple[int, float]]] = {}
        self.reads: list[str] = []
        self.touched: list[str] = []
        self.held: list[str] = []
        self.watched = watched
        self.made = _Made(min(p.nbytes for p in model.parameters() if p.numel() > 1)) if width > 1 else None

    def call(self, callback: Any, hook: str) -> None:
        """One hook, which must leave everything as it is."""
        before = self._seen() if self.watched else {}
        with _Reads() as reads, self.made or nullcontext():
            getattr(callback, hook)(self.loop)
        if hook not in ("on_epoch_end", "on_fit_end"):
            self.reads += [f"{name.strip('_')}() in {hook}" for name in reads.names]
        after = self._seen() if self.watched else {}
        self.touched += [f"{name} in {hook}" for name in before if not _same(before[name], after[name])]
        torch.set_grad_enabled(True)  # or the training could not go on
        after_step = hook in ("on_after_step", "on_batch_end", "on_epoch_end", "on_fit_end")
        if self.made is not None and after_step and not self.held and self._copies():
            gc.collect()  # frees what only cycles of objects hold
            count = self._copies()
            self.held += [f"{count} tensors as large as a weight, after {hook} of step {self.loop.step}"] * (count > 0)

    def _copies(self) -> int:
        weights = list(self.model.parameters())
        loop = (self.loop.__dict__.get(name) for name in ("loss", "output", "batch"))
        return self.made.alive([weights, [p.grad for p in weights], list(self.optimizer.state.values()), *loop])

    def _seen(self) -> dict[str, Any]:
        grads = {f"gradient of {n}": p.grad for n, p in self.model.named_parameters()}
        found = {"weights": [p.detach().clone() for p in self.model.parameters()]}
        found |= {name: None if g is None else (id(g), g.clone()) for name, g in grads.items()}
        found["requires_grad"] = [p.requires_grad for p in self.model.parameters()]
        found["random numbers"] = torch.get_rng_state()
        found["random numbers of Python"] = hash(random.getstate())
        found["random numbers of NumPy"] = np.random.get_state()[1].tobytes() + bytes(np.random.get_state()[2] % 256)
        found["training mode"] = [module.training for module in self.model.modules()]
        found["autograd"] = torch.is_grad_enabled()
        groups = [{**group, "params": list(map(id, group["params"]))} for group in self.optimizer.param_groups]
        found["the optimizer"] = copy.deepcopy([groups, self.optimizer.defaults, list(self.optimizer.state.values())])
        others = {name: value for name, value in vars(self.loop).items() if not isinstance(value, _OTHERS)}
        held = ("loss", "output", "batch", "ending")  # the same objects
        found |= {f"loop.{name}": id(v) if name in held else copy.deepcopy(v) for name, v in others.items()}
        return found

    def batch(self, callback: Any, every: int, drop: bool = False) -> None:
        """One step; with `drop` another callback leaves the batch before its step."""
        model, x = self.model, torch.randn(4, 5, device=self.device)
        self.call(callback, "on_batch_start")
        with torch.no_grad():
            model.empty_like.mul_(0.9)  # somebody else's doing, no part of the step's update
        self.call(callback, "on_before_forward")
        y = model.ab(torch.relu(model.a(x)).double()) * model.a_b
        self.call(callback, "on_after_forward")
        loss = (y - model.zeros).square().mean() + model.empty_like.square().sum()
        self.loop.loss, self.loop.output, self.loop.batch = loss, y, (x, y)
        self.call(callback, "on_before_backward")
        loss.backward()
        self.call(callback, "on_after_backward")
        self.call(callback, "on_before_step")
        if not drop:
            old = {n: p.detach().double().clone() for n, p in model.named_parameters()}
            self.optimizer.step()
            self.loop.step += 1
            for name, p in model.named_parameters():
                if p.requires_grad and self.loop.step % every == 0 and self.device != "meta":
                    ratio = (p.detach().double() - old[name]).norm() / (old[name].norm() + 1e-12)
                    self.want.setdefault(name, []).append((self.loop.step, float(ratio)))
            self.call(callback, "on_after_step")
        self.optimizer.zero_grad()
        self.call(callback, "on_batch_end")


_OTHERS = (nn.Module, torch.optim.Optimizer, SimpleNamespace, type)  # that a callback may know, and doesn't own


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(two, Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, list | tuple):
        return isinstance(two, list | tuple) and len(one) == len(two) and all(map(_same, one, two))
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    return type(one) is type(two) and bool(np.all(one == two))


def _update_ratio() -> Any:
    class UpdateRatio(_LESSON["base"]):
        def __init__(self, every: int = 1) -> None:
            self.every, self.history, self.old = every, {}, {}

        def on_fit_start(self, loop: Any) -> None:
            self.history, self.old, self.late = {}, {}, []

        def on_before_step(self, loop: Any) -> None:
            named = loop.model.named_parameters() if (loop.step + 1) % self.every == 0 else ()
            self.old = {name: p.detach().clone() for name, p in named if p.requires_grad}

        def on_after_step(self, loop: Any) -> None:
            for name, p in loop.model.named_parameters():
                if name in self.old:
                    old = self.old[name]
                    self.late.append((name, loop.step, (p.detach() - old).norm() / (old.norm() + 1e-12)))
            self.old = {}

        def on_epoch_end(self, loop: Any) -> None:
            for name, step, ratio in self.late:
                self.history.setdefault(name, []).append((step, float(ratio)))
            self.late = []

        def on_fit_end(self, loop: Any) -> None:
            self.on_epoch_end(loop)

    return UpdateRatio


@exercise(
    "15-10.2",
    "Update-to-weight ratios",
    points=15,
    demands=9,
    stand_in=lambda: _update_ratio(),
    stand_in_name="one of the check's",
)
def update_ratio(trial: Trial, answer: Any) -> None:
    """`answer(every)` is a Callback whose history holds a ratio for each parameter and step."""
    _derived(trial, answer, "Callback")

    def trained(
        every: int = 1, epochs: Sequence[int] = (3, 2), step: int = 0, leave: bool = False, **options: Any
    ) -> Any:
        training, callback = _Ratios(seed=every, step=step, **options), answer(every)
        training.call(callback, "on_fit_start")
        for epoch, batches in enumerate(epochs):
            training.loop.epoch = epoch
            training.call(callback, "on_epoch_start")
            for number in range(batches):
                training.batch(callback, every, drop=leave and number == 1)
            if not leave or epoch < len(epochs) - 1:
                training.call(callback, "on_epoch_end")
        if leave:
            training.loop.ending = KeyboardInterrupt()
        training.call(callback, "on_fit_end")
        return training, callback

    first, callback = trained()
    trial.equal(
        "the names of the parameters that learn",
        sorted(callback.history),
        sorted(first.want),
        hint="which parameters of loop.model does the task want?",
    )
    training, callback = _Ratios(), answer()
    training.call(callback, "on_fit_start")
    for frozen, learns in (("unused", "frozen"), ("frozen", "unused")):  # what learns may change on the way
        getattr(training.model, frozen).requires_grad_(False)
        getattr(training.model, learns).requires_grad_(True)
        training.batch(callback, 1)
    training.call(callback, "on_epoch_end")
    training.call(callback, "on_fit_end")
    trial.equal(
        "the names of the parameters that learn",
        {name: len(callback.history.get(name, [])) for name in training.want},
        {name: len(rows) for name, rows in training.want.items()},
        hint="another callback freezes a parameter between two steps and thaws another: how many rows has each?",
    )
    rows = [ratio for rows in trained(1, (4, 3))[1].history.values() for _, ratio in rows]
    hint = "which norm, of what, divided by what?"
    if rows and not any(rows):
        hint = "no weight has moved: is what you kept before the step still what it was then?"
    with trial.group("the ratios of update to weight", hint=hint, see=1):
        for leave in (False, True):
            training, callback = trained(1, (4, 3), leave=leave)
            for name, rows in training.want.items():
                pairs = zip(callback.history[name], rows, strict=False)
                both = [(float(mine), want) for (_, mine), (_, want) in pairs]
                got, want = torch.tensor(both, dtype=torch.float64).reshape(-1, 2).t()
                case = "two batches without a step" if leave else "seven steps"
                trial.close(f"ratios of {name}, {case}", got, want, rtol=1e-4, atol=1e-9)
    with trial.group("looks at multiples of every", hint="which number has a step in which of the two hooks?", see=1):
        for every, epochs, step in ((1, (2, 1), 0), (3, (4, 6), 0), (4, (3, 3), 0), (5, (2, 9), 7), (7, (3,), 0)):
            training, callback = trained(every, epochs, step)
            want = {name: [number for number, _ in rows] for name, rows in training.want.items()}
            got = {name: [number for number, _ in callback.history.get(name, [])] for name in want}
            trial.equal(f"steps, every={every}, {sum(epochs)} steps behind number {step}", got, want)
    with trial.group("history: names, lists, an int and a float", hint="what is in a row, and of which types?"):
        callback = trained()[1]
        rows = [row for rows in callback.history.values() for row in rows]
        kinds = {tuple(type(part).__name__ for part in row) for row in rows}
        trial.equal("types of the rows", kinds, {("int", "float")})
        trial.equal("types of the lists", {type(rows).__name__ for rows in callback.history.values()}, {"list"})
    with trial.group("complete at the end of each epoch and of a run left early", hint="which hooks come then?", see=2):
        training, callback = _Ratios(), answer()
        training.call(callback, "on_fit_start")
        for _ in range(2):
            for _ in range(2):
                training.batch(callback, 1)
            training.call(callback, "on_epoch_end")
            want = {name: len(rows) for name, rows in training.want.items()}
            got = {name: len(callback.history.get(name, [])) for name in want}
            trial.equal("rows at the end of an epoch", got, want)
        training, callback = trained(1, (5, 4), leave=True)
        want = {name: [step for step, _ in rows] for name, rows in training.want.items()}
        got = {name: [step for step, _ in callback.history.get(name, [])] for name in want}
        trial.equal("steps of a run that is left in its second epoch", got, want)
    with trial.group("on_fit_start empties the history", hint="what does a second fit begin with?"):
        training, callback = trained()
        training.batch(callback, 1)  # a step that nobody has read yet
        again = _Ratios(seed=3)
        again.call(callback, "on_fit_start")
        again.batch(callback, 1)
        again.call(callback, "on_fit_end")
        got = {name: len(callback.history.get(name, [])) for name in again.want}
        trial.equal("rows after a second fit of one step", got, dict.fromkeys(again.want, 1))
    hint = "which line of the hook gives Python, or a tensor on the CPU, what a tensor on the device holds?"
    with trial.group("nothing is read in the hooks of a batch", hint=hint, see=2, free=True):
        reads = sorted(set(trained(1, (25, 3))[0].reads))
        trial.equal("calls that read, in 28 steps", reads, [])
        training, callback = _Ratios(device="meta"), answer()
        training.call(callback, "on_fit_start")
        training.call(callback, "on_epoch_start")
        case = "a model on 'meta', where tensors hold no values that could be read"
        for _ in range(2):
            trial.call(case, lambda: training.batch(callback, 1))
    touched = sorted(set(trained(1, (2, 2), watched=True)[0].touched))
    trial.equal("it only looks", touched, [], hint="what does the named hook change?", free=True)
    item, hint = "no copy of a weight is kept after its step", "who still holds one?"
    for every in (1, 3):
        training = trained(every, (2, 2), width=20)[0]
        trial.equal(item, training.held, [], hint=f"{hint} (every={every})", free=True)


# ---------------------------------------------------------------- 15-10.3

_SPRUNG: list[str] = []  # what unpickling has executed


class _Trap:
    """An object whose unpickling calls a function."""

    def __reduce__(self) -> Any:
        return _SPRUNG.append, ("unpickled",)


class _Power(BaseException):
    """The process ends here."""


def _number(file: Any) -> int:
    """The descriptor of what os.fsync is given."""
    return file if isinstance(file, int) else file.fileno()


class _Disk:
    """Watches what happens to a folder: what it holds at each call, and what is on the disk."""

    def __init__(self, path: Path, fail_at: int | None = None) -> None:
        self.path, self.fail_at, self.calls = path, fail_at, 0
        self.contents: list[bytes | None] = []  # of the file, at each call
        self.durable: dict[int, bytes] = {}  # inode → content that has been forced to the disk
        self.renamed: list[tuple[str, str, bool]] = []  # from, to, whether the content was on the disk
        self.folder_after = False  # the folder was forced to the disk after the last renaming

    def _look(self) -> None:
        self.contents.append(self.path.read_bytes() if self.path.exists() else None)
        self.calls += 1
        if self.calls == self.fail_at:
            raise _Power

    @contextmanager
    def watched(self) -> Iterator["_Disk"]:
        fsync, names = os.fsync, ("replace", "rename")
        originals = {name: getattr(os, name) for name in names}

        def forced(file: Any) -> None:
            self._look()
            found = os.fstat(_number(file))
            fsync(file)
            if stat.S_ISDIR(found.st_mode):
                self.folder_after = os.path.samestat(found, os.stat(self.path.parent))
            else:
                for other in self.path.parent.iterdir():
                    if other.is_file() and os.path.samestat(found, os.stat(other)):
                        self.durable[found.st_ino] = other.read_bytes()

        def moved(name: str) -> Callable[..., None]:
            def move(source: Any, target: Any, **options: Any) -> None:
                self._look()
                found = os.stat(source)
                whole = self.durable.get(found.st_ino) == Path(source).read_bytes()
                self.renamed.append((Path(source).name, Path(target).name, whole))
                originals[name](source, target, **options)
                self.folder_after = False

            return move

        with mock.patch.multiple(os, fsync=forced, **{name: moved(name) for name in names}):
            yield self


@contextmanager
def _full_disk(folder: Path) -> Iterator[list[str]]:
    """A folder's files take no more than 1,000 bytes, by `open`, pathlib or `os.write`; yields the writes cut short.

    As on a real disk, the write that meets the limit takes what there is room for and returns how much that was; only
    the next one raises.
    """
    kept, write = io.open, os.write
    cut: list[str] = []

    def room(place: int, data: Any) -> memoryview:
        rest = memoryview(data).cast("B")
        if len(rest) > 1000 - place:
            cut.append(f"{len(rest)} bytes")
            if place >= 1000:
                raise OSError(28, "No space left on device")
        return rest[: 1000 - place]

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(room(self.tell(), data))

    def elsewhere(file: Any) -> bool:
        if isinstance(file, int):
            return not stat.S_ISREG(os.fstat(file).st_mode)
        return Path(file).absolute().parent.resolve() != folder.resolve()

    def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+") or elsewhere(file):
            return kept(file, mode, buffering, *args, **options)
        given = {name: options[name] for name in ("closefd", "opener") if name in options}
        raw = Full(file, mode.replace("b", "").replace("t", ""), **given)
        if buffering == 0:
            return raw
        binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding="utf-8")

    def written(file: int, data: Any) -> int:
        return write(file, data if elsewhere(file) else room(os.lseek(file, 0, os.SEEK_CUR), data))

    patches = mock.patch.object(io, "open", opened), mock.patch.object(os, "write", written)
    with mock.patch("builtins.open", opened), patches[0], patches[1]:
        yield cut


def _states() -> dict[str, Any]:
    """Two states that differ in size, with what a checkpoint holds."""
    tensors = [torch.randn(5, 7).t(), torch.tensor(2, dtype=torch.int64), torch.randn(3).bfloat16(), torch.zeros(0)]
    first = {"tensors": tensors, "step": 3, "name": "a", "none": None, "nested": {"x": [1.5, (2, True)], 7: "seven"}}
    return {"first": first, "second": {"tensors": [torch.randn(300)], "step": 4}}


def _checkpoint_file() -> Any:
    damaged = _LESSON["names"]["DamagedCheckpoint"]

    class CheckpointFile:
        def __init__(self, path: Path | str) -> None:
            self.path = Path(path)

        def write(self, state: Any) -> None:
            content = _saved(state).getvalue()
            temporary = Path(f"{self.path}.tmp")
            with open(temporary, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
            if os.name == "posix":
                folder = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)

        def read(self) -> Any:
            whole = self.path.read_bytes()
            if hashlib.sha256(whole[32:]).digest() != whole[:32]:
                raise damaged(f"{self.path.name} is damaged")
            return torch.load(io.BytesIO(whole[32:]), map_location="cpu", weights_only=True)

    return CheckpointFile


def _lands_on_cpu(where: Any) -> bool:
    """Whether a map_location sends what lay on a GPU to the CPU."""
    if callable(where):
        storage = torch.UntypedStorage(1)
        return all(where(storage, tag) is storage for tag in ("cuda:0", "cuda:1", "mps"))
    if isinstance(where, Mapping):
        return all(where.get(tag) in ("cpu", torch.device("cpu")) for tag in ("cuda:0", "cuda:1", "mps"))
    return where is not None and torch.device(where).type == "cpu"


def _raised_by(action: Callable[[], object]) -> str:
    """The type of an exception and what it says, or "no exception"."""
    try:
        action()
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no exception"


@exercise(
    "15-10.3",
    "A checkpoint that is whole",
    points=20,
    demands=12,
    stand_in=lambda: _checkpoint_file(),
    stand_in_name="one of the check's",
)
def checkpoint_file(trial: Trial, answer: Any) -> None:
    """`answer(path)` has `write(state)` and `read()`."""
    _LESSON["names"] = answer.write.__globals__
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate((_read_back, _whole_always, _forced_to_disk, _noticed, _unpickled)):
            (place := Path(folder) / str(number)).mkdir()
            part(trial, answer, place)


def _read_back(trial: Trial, answer: Any, folder: Path) -> None:
    with trial.group("what was written comes back", hint="which bytes are written, to which file, and which read?"):
        for number, kind in enumerate((Path, str)):
            path = folder / f"run.{number}" / "a.b.ckpt"
            path.parent.mkdir()
            for name, state in [*_states().items(), ("none at all", {}), ("a list", [1, torch.ones(2)])]:
                case, hint = f"write, path is a {kind.__name__}", "what can your answer do with such a path?"
                trial.call(case, lambda k=kind, p=path, s=state: answer(k(p)).write(s), hint=hint)
                got = answer(path).read()
                trial.equal(f"whether what is read of {name!r} is what was written", _same(got, state), True)
                trial.equal(f"whether there is a file called {path.name}", path.is_file(), True)
                held, hint = path.read_bytes(), "what does reading do with the file?"
                trial.call(f"read a second time ({name!r})", lambda k=kind, p=path: answer(k(p)).read(), hint=hint)
                trial.equal(f"the file is left alone by reading ({name!r})", path.read_bytes() == held, True)
        with chdir(folder):
            hint = "which folder is that?"
            trial.call("write to a path without a folder", lambda: answer("bare.ckpt").write([7]), hint=hint)
            trial.equal("what is read of a path without a folder", answer("bare.ckpt").read(), [7])
            (folder / "bare.ckpt").unlink()
        with mock.patch.object(os, "write", side_effect=lambda file, data, write=os.write: write(file, data[:1000])):
            answer(path).write(state := {"x": torch.randn(3000)})
        case, hint = "read after a write of which the system takes 1,000 bytes at a time", "is all of it written?"
        got = trial.call(case, answer(path).read, hint=hint)
        trial.equal(case, _same(got, state), True, hint=hint)
    with trial.group("a missing file is a FileNotFoundError", hint="what does opening it raise?"):
        got = _raised_by(lambda: answer(folder / "missing.ckpt").read())
        trial.equal("what is raised", got.split(":")[0], "FileNotFoundError")


def _whole_always(trial: Trial, answer: Any, folder: Path) -> None:
    path, states = folder / "state.ckpt", _states()
    item = "at any moment the old one or the new one, whole"
    with trial.group(item, hint="what is at path when the named call begins?", see=1):
        answer(path).write(states["first"])
        old, kept = path.read_bytes(), folder / "kept"
        os.link(path, kept)
        with _Disk(path).watched() as disk:
            answer(path).write(states["second"])
        new = path.read_bytes()
        case = "whether the old file's bytes are still there for somebody who has it open"
        hint = "what is written into the file that was at path?"
        trial.equal(case, kept.read_bytes() == old, True, hint=hint, see=1)
        kept.unlink()
        for number, content in enumerate(disk.contents, start=1):
            found = {old: "the old one", new: "the new one", None: "nothing"}.get(content, "something else")
            whole = found in ("the old one", "the new one")
            case = f"at path, at call {number} of fsync or a renaming"
            trial.that(case, whole, expected="the old one or the new one", got=found)
        for number in range(1, disk.calls + 1):
            answer(path).write(states["first"])
            with suppress(_Power), _Disk(path, number).watched():
                answer(path).write(states["second"])
            got = answer(path).read()
            whole = _same(got, states["first"]) or _same(got, states["second"])
            case = f"whether the old or the new one is read after a process that ended at call {number}"
            trial.equal(case, whole, True)
            case, hint = (
                "write and read after such a process",
                "what did it leave, and what does the next write do with that?",
            )
            trial.call(case, lambda: answer(path).write(states["second"]), hint=hint)
            got = trial.call(case, answer(path).read, hint=hint)
            trial.equal("whether it is read after the next write", _same(got, states["second"]), True, hint=hint)
        answer(path).write(states["first"])
        with _full_disk(folder) as cut:
            got = _raised_by(lambda: answer(path).write({"x": torch.randn(30_000)}))
        if cut:
            hint = "what becomes of an exception in write, and of a number that a write returns?"
            trial.equal("whether write raises when the disk is full", got != "no exception", True, hint=hint)
            trial.equal("whether the old one is read after that", _same(answer(path).read(), states["first"]), True)
    with trial.group("torch.save that raises leaves the old one", hint="when is path touched?", see=1):
        for bad in ({"step": 1, "call": lambda: None}, {"tensors": [torch.ones(9)], "dice": (i for i in "ab")}):
            answer(path).write(states["first"])
            got = _raised_by(lambda b=bad: answer(path).write(b))
            hint = "what becomes of an exception in write?"
            trial.equal("whether write raises, too", got != "no exception", True, hint=hint)
            trial.equal("whether there is a file at path then", path.is_file(), True)
            trial.equal("whether the old one is read then", _same(answer(path).read(), states["first"]), True)
    with trial.group("the other name is path with .tmp, and is gone", hint="what is in the folder afterwards?"):
        for leftover in (None, b"x" * 9, b"x" * 99_999):
            temporary = folder / "state.ckpt.tmp"
            if leftover is not None:
                temporary.write_bytes(leftover)
            (other := folder / "neighbour.ckpt.tmp").write_bytes(b"somebody else's")
            with _Disk(path).watched() as disk:
                answer(path).write(states["second"])
            case = "whether neighbour.ckpt.tmp, another file's, is left alone"
            trial.equal(case, other.exists(), True, hint="which files does write clear away?")
            other.unlink()
            names = ", then ".join(f"{source} to {target}" for source, target, _ in disk.renamed)
            hint = "what are the two names called?"
            trial.equal("what gets another name", names, "state.ckpt.tmp to state.ckpt", hint=hint)
            trial.equal("in the folder", sorted(found.name for found in folder.iterdir()), ["state.ckpt"])
            trial.equal("whether the new one is read", _same(answer(path).read(), states["second"]), True)


def _forced_to_disk(trial: Trial, answer: Any, folder: Path) -> None:
    path, states = folder / "state.ckpt", _states()
    for name in ("first", "second"):
        with _Disk(path).watched() as disk:
            answer(path).write(states[name])
        whole = [whole for _, _, whole in disk.renamed]
        trial.that(
            "the content is on the disk before it gets its name",
            whole == [True],
            expected="one renaming, of a file whose content is on the disk",
            got=f"renamings: {len(whole)}, of such files: {sum(whole)}",
            hint="whose buffer still holds what, when the file gets its name?",
            see=2,
        )
        trial.that(
            "the folder's entry is on the disk when write returns",
            disk.folder_after or os.name == "nt",
            expected="the folder of path, forced to the disk after the renaming",
            got="not after the renaming",
            hint="content or name: which of them does the folder hold, and when?",
            see=2,
        )
    held = path.read_bytes()
    with mock.patch.object(os, "fsync", side_effect=OSError(28, "No space left on device")):
        got = _raised_by(lambda: answer(path).write(states["first"])).partition(":")[0]
    trial.equal(
        "the content is on the disk before it gets its name",
        {"what write raises": got, "the old file is still there": path.read_bytes() == held},
        {"what write raises": "OSError", "the old file is still there": True},
        hint="fsync has raised OSError: what comes out of write, and what is at path then?",
    )
    if os.name != "nt":
        fsync = os.fsync

        def files_only(file: Any) -> None:
            if stat.S_ISDIR(os.fstat(_number(file)).st_mode):
                raise OSError(5, "Input/output error")
            fsync(file)

        with mock.patch.object(os, "fsync", files_only):
            got = _raised_by(lambda: answer(path).write(states["first"])).partition(":")[0]
        trial.equal(
            "the folder's entry is on the disk when write returns",
            got,
            "OSError",
            hint="fsync of the folder has raised OSError: what comes out of write?",
        )
    if os.path.isdir("/proc/self/fd"):
        item, hint = "nothing stays open", "what was opened and not closed?"
        gc.collect()
        before, held = len(os.listdir("/proc/self/fd")), answer(path)
        for _ in range(3):
            held.write(states["first"])
            held.read()
        gc.collect()
        more, expected = len(os.listdir("/proc/self/fd")) - before, "no more open files than before"
        trial.that(item, more <= 0, expected=expected, got=f"{more} more", hint=hint, see=2)
        for number in (1, 2):
            calls = [None] * (number - 1) + [OSError(5, "Input/output error")] + [None] * 9
            with mock.patch.object(os, "fsync", side_effect=calls), suppress(OSError):
                held.write(states["first"])
            gc.collect()
            more, where = len(os.listdir("/proc/self/fd")) - before, f"(call {number} of fsync has raised OSError)"
            trial.that(item, more <= 0, expected=expected, got=f"{more} more", hint=f"{hint} {where}")
    else:
        trial.equal("nothing stays open", 0, 0)


def _noticed(trial: Trial, answer: Any, folder: Path) -> None:
    path = folder / "epoch-3.ckpt"
    answer(path).write(_states()["first"])
    whole = path.read_bytes()
    changes: dict[str, bytes] = {"empty": b"", "without its last byte": whole[:-1], "without its first": whole[1:]}
    for end in {1, 2, 31, 32, 33, 64, *(random.randrange(len(whole)) for _ in range(20))}:
        changes[f"cut off behind {end} bytes"] = whole[:end]
    for more in (b"\0", b"\0" * 64, whole):
        changes[f"with {len(more)} bytes added"] = whole + more
        changes[f"with {len(more)} bytes in front"] = more + whole
    bits = [*range(0, 8 * 34, 17), *(8 * len(whole) - 1 - i for i in (0, 7, 900))]
    ends = [*range(140), *range(len(whole) - 140, len(whole))]
    bits += [8 * place + 5 for place in ends]  # what a capital letter differs in: a sum may stand there as text
    for bit in [*bits, *(random.randrange(8 * len(whole)) for _ in range(120))]:
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        changes[f"with bit {bit} of {8 * len(whole)} changed"] = bytes(changed)
    hint = "what is compared with what before anything is unpickled, and what is raised then?"
    with trial.group("damage is a DamagedCheckpoint with the file's name", hint=hint, see=3):
        for name, content in changes.items():
            path.write_bytes(content)
            kind, _, text = _raised_by(answer(path).read).partition(":")
            expected, text = "a DamagedCheckpoint that names the file", text.strip()
            right = kind == "DamagedCheckpoint"
            got = kind + (f", which says {text[:60]!r}" + "..." * (len(text) > 60)) * bool(text)
            more = {"hint": "what does the message say?"} if right else {}
            if not right and path.name in text:
                more = {"hint": "which exception does the task name?"}
            trial.that(f"a file {name}", right and path.name in text, expected=expected, got=got, **more)
        answer(path).write({"x": torch.randn(70_000)})
        large = path.read_bytes()
        for place in (len(large) // 2, *(random.randrange(len(large)) for _ in range(12))):
            path.write_bytes(large[:place] + bytes([large[place] ^ 4]) + large[place + 1 :])
            got = _raised_by(answer(path).read).partition(":")[0]
            case = f"a file with byte {place} of {len(large)} changed"
            trial.that(case, got == "DamagedCheckpoint", expected="DamagedCheckpoint", got=got)
    with mock.patch.object(torch, "load", side_effect=torch.load) as load:
        for content in list(changes.values())[:9]:
            path.write_bytes(content)
            with suppress(Exception):
                answer(path).read()
    trial.that(
        "a damaged file is not unpickled",
        load.call_count == 0,
        expected="no call of torch.load",
        got=f"{load.call_count} calls for 9 damaged files",
        hint="what comes first, the comparison or torch.load?",
    )


def _unpickled(trial: Trial, answer: Any, folder: Path) -> None:
    path = folder / "state.ckpt"
    answer(path).write({"step": 1, "trap": _Trap()})
    _SPRUNG.clear()
    got = _raised_by(answer(path).read)
    hint = "which option of torch.load refuses code, and what comes out of read then?"
    found = {"read raises where there is code in the file": got != "no exception", "code that ran": _SPRUNG}
    want = {"read raises where there is code in the file": True, "code that ran": []}
    trial.equal("unpickled with weights_only", found, want, hint=hint)
    answer(path).write(_states()["first"])
    with mock.patch.object(torch, "load", side_effect=torch.load) as load:
        answer(path).read()
    places = [call.args[1] if len(call.args) > 1 else call.kwargs.get("map_location") for call in load.call_args_list]
    lands = bool(places) and all(_lands_on_cpu(where) for where in places)
    trial.that(
        "tensors arrive on the CPU",
        lands,
        expected="a map_location that leads from each accelerator to the CPU",
        got=", ".join("a function" if callable(where) else repr(where) for where in places) or "no call of torch.load",
        hint="what does a state from a GPU need, of whichever number?",
    )


# ---------------------------------------------------------------- 15-10.4


def _groups(batches: Sequence[Any], sizes: Sequence[int], count: int) -> list[tuple[int, float, bool]]:
    """(index of the batch, weight, last) of each batch, by arithmetic on its index."""
    found = []
    for index in range(len(batches)):
        start = index - index % count
        total = sum(sizes[start : start + count])
        found.append((index, sizes[index] / total, index % count == count - 1 or index == len(batches) - 1))
    return found


_Pair = namedtuple("_Pair", "note x")


class _Kind(Tensor):
    """A subclass, as libraries have them."""


def _nestings(size: int) -> list[Any]:
    """Batches of `size` samples whose first tensor lies at different places; other tensors have other sizes."""
    x, other = torch.randn(size, random.randint(1, 5)), torch.zeros(size + 3)
    return [
        x,
        torch.arange(size),
        (x, other),
        [x, other],
        {"x": x, "y": other},
        {"names": ["a"] * 9, "x": x, "y": other},
        ({"note": None, "n": 3, "deep": [(), {}, [("text", (x,))]]}, other),
        [None, "text", 5, [], {"none": None}, {"x": x}, other],
        _Pair("a note", x),
        (_Pair(other.numpy(), [x]), other),
        OrderedDict(note="a", x=x, y=other),
        (x.as_subclass(_Kind), other),
        {"number": torch.tensor(7), "x": x, "y": other},
    ]


def _grouped() -> Any:
    def grouped(batches: Any, count: int) -> Iterator[tuple[Any, float, bool]]:
        if count < 1:
            raise ValueError(f"count is {count}")
        rest, group = iter(batches), []
        while True:
            group = list(itertools.islice(rest, count))
            if not group:
                return
            sizes = [len(_first(batch)) for batch in group]
            if sum(sizes) == 0:
                raise ValueError("no sample")
            for index, batch in enumerate(group):
                yield batch, sizes[index] / sum(sizes), index == len(group) - 1

    return grouped


def _first(batch: Any) -> Tensor:
    tensors = [tensor for tensor in _walk(batch) if tensor.dim() > 0]
    if not tensors:
        raise ValueError("no tensor with samples")
    return tensors[0]


def _walk(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, list | tuple | Mapping):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _walk(part)


@exercise(
    "15-10.4",
    "Groups of batches",
    points=20,
    demands=6,
    stand_in=lambda: _grouped(),
    stand_in_name="one of the check's",
)
def grouped(trial: Trial, answer: Any) -> None:
    """`answer(batches, count)` yields (batch, weight, last)."""

    def sized(sizes: Sequence[int]) -> list[Any]:
        return [(torch.zeros(size, 1), torch.zeros(size)) for size in sizes]

    cases = [
        ([4] * 6, 2),
        ([4, 4, 1], 2),
        ([3, 5, 2, 7, 1], 3),
        ([1], 4),
        ([2, 2], 1),
        ([5, 1, 3, 8, 2, 2, 4], 7),
        ([], 3),
        ([2, 1] * 23, 40),
    ]
    cases += [([random.randint(1, 9) for _ in range(random.randint(1, 13))], random.randint(1, 5)) for _ in range(8)]
    found = []
    with trial.group("each batch once, in order, the same object", hint="follow the case by hand", see=1):
        for number, (sizes, count) in enumerate(cases):
            batches = sized(sizes)
            given = [batches, tuple(batches), iter(batches), (batch for batch in batches)][number % 4]
            case = f"{len(sizes)} batches in groups of {count}, given as a {type(given).__name__}"
            got = trial.call(case, lambda g=given, c=count: list(answer(g, c)), hint="what may batches be?")
            indices = [next((i for i, b in enumerate(batches) if b is batch), "another object") for batch, *_ in got]
            found.append((sizes, count, got))
            trial.equal(f"indices of {len(sizes)} batches in groups of {count}", indices, list(range(len(sizes))))
            kinds = {type(triple).__name__ for triple in got}
            hint = "what does the task say is yielded?"
            trial.that("types of what is yielded", kinds <= {"tuple"}, expected="tuples", got=sorted(kinds), hint=hint)
    with trial.group("last: at the end of each group", hint="where do groups end, and where the batches?"):
        for sizes, count, got in found:
            want = [last for *_, last in _groups(sizes, sizes, count)]
            trial.equal(f"last of {len(sizes)} batches in groups of {count}", [last for *_, last in got], want)
        one = torch.zeros(3, 1)
        got = [last for *_, last in answer([one] * 5, 2)]
        trial.equal("last of one and the same batch five times, in groups of 2", got, [False, True, False, True, True])
    hint = "whose samples are in the sum, and what is divided by it?"
    with trial.group("weight: the share of the group's samples", hint=hint, see=1):
        for sizes, count, got in found:
            want = torch.tensor([weight for _, weight, _ in _groups(sizes, sizes, count)], dtype=torch.float64)
            kinds = {type(weight).__name__ for _, weight, _ in got}
            hint = "what does the task say is yielded?"
            trial.that("types of the weights", kinds <= {"float"}, expected="floats", got=sorted(kinds), hint=hint)
            weights = torch.tensor([weight for _, weight, _ in got], dtype=torch.float64)
            shown = str(sizes) if len(sizes) < 14 else f"[{sizes[0]}, {sizes[1]}, ...]"
            trial.close(f"weights of {len(sizes)} batches of {shown} in groups of {count}", weights, want, rtol=1e-12)
    item = "samples are counted in the first tensor, however nested"
    hint = "which tensor is first, and how many samples does it hold?"
    with trial.group(item, hint=hint, see=2):
        for number in range(len(_nestings(1))):
            sizes = [3, 1, 4, 2, 5]
            batches = [_nestings(size)[number] for size in sizes]
            case = f"weights of batches like {_sketch(batches[1])}"
            got = trial.call(case, lambda b=batches: [weight for _, weight, _ in answer(b, 3)], see=2, hint=hint)
            weights = torch.tensor(got, dtype=torch.float64)
            want = torch.tensor([weight for _, weight, _ in _groups(batches, sizes, 3)], dtype=torch.float64)
            trial.close(case, weights, want, rtol=1e-12)
        empty = [(torch.zeros(n, 2), torch.ones(7)) for n in (0, 3, 1)]
        weights = torch.tensor([weight for _, weight, _ in answer(empty, 3)], dtype=torch.float64)
        want = torch.tensor([0.0, 0.75, 0.25], dtype=torch.float64)
        trial.close("weights of first tensors with 0, 3 and 1 samples", weights, want, rtol=1e-12)
        mixed = [_nestings(size)[index] for size, index in ((2, 0), (6, 7), (1, 4), (3, 6))]
        weights = torch.tensor([weight for _, weight, _ in answer(mixed, 4)], dtype=torch.float64)
        want = torch.tensor([2 / 12, 6 / 12, 1 / 12, 3 / 12], dtype=torch.float64)
        trial.close("weights of a group of differently nested batches", weights, want, rtol=1e-12)
    with trial.group("reads at most count batches ahead", hint="when is the next batch asked for?", see=1, free=True):
        for count in (1, 2, 3, 5):
            read, ahead = 0, []

            def many() -> Iterator[Any]:
                nonlocal read
                for _ in range(1000):  # an end, for those who read all of them
                    read += 1
                    yield torch.zeros(random.randint(1, 4), 2)

            for yielded, _ in enumerate(itertools.islice(answer(many(), count), 4 * count), start=1):
                ahead.append(read - yielded)
            most = count if count > 1 else 0
            trial.that(
                f"groups of {count}", max(ahead) <= most, expected=f"at most {most} ahead", got=f"{max(ahead)} ahead"
            )
            alive: weakref.WeakSet[Any] = weakref.WeakSet()
            held = [0]

            def note(alive: Any = alive, held: list[int] = held, count: int = count) -> None:
                if len(alive) > 2 * count >= held[0]:
                    gc.collect()  # frees what only cycles of objects hold
                held[0] = max(held[0], len(alive))

            def fresh(alive: Any = alive, note: Callable[[], None] = note) -> Iterator[Any]:
                for _ in range(12 * 5):
                    alive.add(batch := _Kept(x=torch.zeros(2, 1)))
                    note()
                    yield batch
                    del batch

            for _ in answer(fresh(), count):
                note()
            trial.that(
                f"batches held at once, in groups of {count}",
                held[0] <= 2 * count,
                expected=f"those of two groups, {2 * count} at most",
                got=f"{held[0]} of 60",
                hint="what still holds the batches of groups that are over?",
            )
    errors = {}
    for name, batches, count in (
        ("count 0", sized([2, 2]), 0),
        ("count -1", sized([2, 2]), -1),
        ("count -3", sized([2, 2]), -3),
        ("count 0 of none", [], 0),
        ("no tensor", [torch.ones(2), ("text", {"n": 3})], 2),
        ("an empty batch", [[]], 1),
        ("numbers only", [(torch.tensor(3.0), torch.tensor(1))], 1),
        ("a group without a sample", [torch.zeros(0, 3), torch.zeros(0, 3)], 2),
        ("a last group without a sample", [torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(0, 3)], 2),
    ):
        errors[name] = _raised_by(lambda b=batches, c=count: list(answer(b, c))).partition(":")[0]
    want = dict.fromkeys(errors, "ValueError") | {"count 0, before the first next": "no exception"}
    errors["count 0, before the first next"] = _raised_by(lambda: answer([], 0)).partition(":")[0]
    trial.equal("ValueError for what can't be grouped", errors, want, hint="look at point 5")


class _Kept(dict):
    """A dictionary that can be watched."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def _sketch(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return "a subclass's " * (type(batch) is not Tensor) + f"tensor{tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return (
            "OrderedDict" * isinstance(batch, OrderedDict)
            + "{"
            + ", ".join(f"{key!r}: {_sketch(value)}" for key, value in batch.items())
            + "}"
        )
    if isinstance(batch, list | tuple):
        inner = ", ".join(map(_sketch, batch))
        return f"[{inner}]" if isinstance(batch, list) else "namedtuple" * hasattr(batch, "_fields") + f"({inner})"
    return repr(batch) if isinstance(batch, str | int | None) else type(batch).__name__


# ---------------------------------------------------------------- 15-10.5


class _Noisy(Dataset):
    """Items into which three global generators draw."""

    def __init__(self, size: int) -> None:
        dice = torch.Generator().manual_seed(size)
        self.x, self.y = torch.randn(size, 6, generator=dice), torch.randint(3, (size,), generator=dice)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * (random.random() + np.random.random() + torch.rand(()).item())
        return self.x[index] + noise, self.y[index]


def _own_sampler(dataset: Dataset, seed: int) -> torch.utils.data.Sampler:
    return torch.utils.data.RandomSampler(dataset, generator=torch.Generator().manual_seed(seed))


class _Runs:
    """Small runs of a Trainer that can be saved and interrupted at a place."""

    LOADERS = ("global", "of the loader", "of the sampler", "of the validation loader", "of both")

    def __init__(self, answer: Any, folder: Path) -> None:
        self.answer, self.folder, self.lesson = answer, folder, _LESSON["names"]

    def callbacks(self, hook: str, step: int | None) -> list[Any]:
        """A callback with a state, one that keeps losses, one that saves and interrupts."""
        base, path = self.lesson["Callback"], self.folder / "run.ckpt"

        class Memory(base):
            def __init__(self, by: int = 1) -> None:
                self.by = by  # two of a type don't remember the same

            def on_fit_start(self, loop: Any) -> None:
                self.count, self.mean = 0, torch.zeros(())
                self.loop = loop  # no part of the state

            def on_after_step(self, loop: Any) -> None:
                self.count += self.by
                self.mean += (loop.loss.detach() - self.mean) / self.count
                loop.optimizer.param_groups[0]["lr"] *= 0.97

            def state_dict(self) -> dict[str, Any]:
                return {"count": self.count, "mean": self.mean}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                random.gauss(0, 1), np.random.standard_normal(3), torch.randn(5)  # as a new object may
                self.count, self.mean = state["count"], state["mean"].clone()

        class Trace(base):
            def on_fit_start(self, loop: Any) -> None:
                self.rows: list[Any] = []

            def on_after_step(self, loop: Any) -> None:
                self.rows.append((loop.step, loop.loss.item(), loop.optimizer.param_groups[0]["lr"]))

            def on_validation_end(self, loop: Any) -> None:
                self.rows.append((loop.step, loop.metrics["val_loss"], torch.rand(()).item()))

        class Saves(base):
            order = 100

            def at(self, loop: Any, name: str) -> None:
                if name == hook and loop.step == step:
                    loop.save(path)
                    raise KeyboardInterrupt

            def on_batch_end(self, loop: Any) -> None:
                self.at(loop, "on_batch_end")

            def on_epoch_end(self, loop: Any) -> None:
                self.at(loop, "on_epoch_end")

        return [Memory(), Trace(), Saves(), Memory(3)]

    def parts(self, kind: str, optimizer: str = "sgd") -> tuple[Any, ...]:
        """Model, optimizer, loss function and loaders; `kind` says who shuffles."""
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        made = {
            "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
            "adamw": lambda p: torch.optim.AdamW(p, 0.02),
            "plain": lambda p: torch.optim.SGD(p, 0.1),  # its state is its rate
        }[optimizer](model.parameters())
        train, val = _Noisy(22), _Noisy(9)
        loader = DataLoader(train, 4, shuffle=True)
        val_loader = DataLoader(val, 5)
        if kind == "of the loader":
            loader = DataLoader(train, 4, shuffle=True, generator=torch.Generator().manual_seed(1))
        elif kind == "of the sampler":
            loader = DataLoader(train, 4, sampler=_own_sampler(train, 2))
        if kind == "of both":  # and of both samplers
            dice = torch.Generator().manual_seed(1)
            loader = DataLoader(train, 4, sampler=_own_sampler(train, 2), generator=dice)
            dice = torch.Generator().manual_seed(3)
            val_loader = DataLoader(val, 5, sampler=_own_sampler(val, 4), generator=dice)
        if kind == "of the validation loader":
            val_loader = DataLoader(val, 5, shuffle=True, generator=torch.Generator().manual_seed(3))
        return model, made, F.cross_entropy, loader, val_loader

    def run(self, kind: str, hook: str = "", step: int | None = None, resume: Any = None, **options: Any) -> Any:
        """Three epochs: the loop and the callbacks; interrupted at a step if one is given."""
        parts = self.parts(kind, options.pop("optimizer", "sgd"))
        callbacks = self.callbacks(hook, step)
        loop = self.answer(callbacks, device="cpu", **options)
        with suppress(KeyboardInterrupt):
            loop.fit(*parts, max_epochs=3, resume=resume)
        return loop, callbacks


def _draws(loop: Any) -> dict[str, Any]:
    """What each generator that a run uses draws next."""
    loaders = {"training": loop.train_loader, "validation": loop.val_loader}
    found = {
        "Python": [random.random(), random.gauss(0, 1), random.gauss(0, 1)],
        "NumPy": [np.random.random(), np.random.standard_normal(), np.random.standard_normal()],
        "PyTorch": torch.rand(3).tolist(),
    }
    for name, loader in loaders.items():
        for owner, where in ((loader, "loader"), (getattr(loader, "sampler", None), "sampler")):
            generator = getattr(owner, "generator", None)
            if generator is not None:
                found[f"{name} {where}"] = torch.rand(3, generator=generator).tolist()
    return found


def _trainer() -> Any:
    base, generators = _LESSON["base"], _LESSON["names"]["loader_generators"]
    given = _LESSON["names"]["random_module"]

    def module_of(device: torch.device) -> Any:
        return globals().get("random_module", given)(device)  # the check puts one there for a moment

    class Trainer(base):
        def generator_states(self) -> dict[str, Any]:
            kind, keys, *rest = np.random.get_state()
            states: dict[str, Any] = {"numpy": [kind, [int(key) for key in keys], *rest], "python": random.getstate()}
            states["cpu"] = torch.get_rng_state()
            states["loaders"] = [one.get_state() for one in generators([self.train_loader, self.val_loader])]
            if module := module_of(self.device):
                states["device"] = module.get_rng_state(self.device)
            return states

        def set_generator_states(self, states: dict[str, Any]) -> None:
            np.random.set_state(tuple(states["numpy"]))
            random.setstate(states["python"])
            torch.set_rng_state(states["cpu"])
            for generator, state in zip(
                generators([self.train_loader, self.val_loader]), states["loaders"], strict=True
            ):
                generator.set_state(state)
            if module := module_of(self.device):
                module.set_rng_state(states["device"], self.device)

        def state_dict(self) -> dict[str, Any]:
            return copy.deepcopy(
                {
                    **base.state_dict(self),
                    "optimizer": self.optimizer.state_dict(),
                    "scaler": self.scaler.state_dict(),
                    "kinds": [type(one).__name__ for one in self.callbacks],
                    "callbacks": [one.state_dict() for one in self.callbacks],
                    "generators": self.generator_states(),
                }
            )

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state["kinds"] != [type(one).__name__ for one in self.callbacks]:
                raise ValueError("saved with other callbacks")
            base.load_state_dict(self, state)
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
            for one, own in zip(self.callbacks, state["callbacks"], strict=True):
                one.load_state_dict(own)
            self.set_generator_states(state["generators"])

    return Trainer


@exercise(
    "15-10.5",
    "A run that goes on",
    points=30,
    demands=7,
    stand_in=lambda: _trainer(),
    stand_in_name="one of the check's",
)
def trainer(trial: Trial, answer: Any) -> None:
    """`answer` is a Resumable with a complete state."""
    _derived(trial, answer, "Resumable")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            runs = _Runs(answer, Path(folder))
            loops = {kind: runs.run(kind)[0] for kind in runs.LOADERS}
            _generators(trial, loops)
            _accelerator(trial, answer, loops["global"])
            _all_parts(trial, runs)
            _other_callbacks(trial, runs)
            _goes_on(trial, runs)
    finally:
        torch.set_num_threads(threads)


_LOOKS = "generator_states() and state_dict() only look"


def _generators(trial: Trial, loops: dict[str, Any]) -> None:
    names = [
        "Python",
        "NumPy",
        "PyTorch",
        "training loader",
        "training sampler",
        "validation loader",
        "validation sampler",
    ]
    drawn: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    for loop in loops.values():
        random.gauss(0, 1), np.random.standard_normal()  # each keeps a second number for the next call
        before = _state_of_all(loop)
        states = torch.load(_saved(loop.generator_states()), weights_only=False)
        _set_all(loop, before)  # whatever the call has drawn
        want = _draws(loop)
        random.gauss(0, 1), np.random.standard_normal()
        loop.set_generator_states(states)
        got = _draws(loop)
        for name in want:
            drawn[name].append((got[name], want[name]))
    with trial.group("generators draw the same again", hint="is the whole state of the named one saved, and put back?"):
        for name in names:
            for got, want in drawn[name]:
                trial.equal(f"what {name}'s generator draws after set_generator_states", got, want)
    with trial.group(_LOOKS, hint="who draws, or seeds?", free=True):
        for loop in loops.values():
            before = _state_of_all(loop)
            want = _draws(loop)
            _set_all(loop, before)
            loop.generator_states()
            hint = "what does each part of the state hold, and can it be copied?"
            trial.call("a call of state_dict()", loop.state_dict, hint=hint)
            trial.equal("draws after a call (and one of state_dict()) and without", _draws(loop), want)
            for training in (True, False):
                loop.model.train(training)
                loop.model[-1].eval()
                for p in loop.model.parameters():
                    p.grad = torch.randn_like(p)
                before = _run_of(loop)
                loop.state_dict()
                after = _run_of(loop)
                changed = [name for name in before if not _same(_plain(before[name]), _plain(after[name]))]
                trial.equal("what state_dict() changes", changed, [], hint="what does a run need after it was saved?")


def _run_of(loop: Any) -> dict[str, Any]:
    """What goes on after a run was saved."""
    model, counters = loop.model, ("step", "epoch", "epochs_done", "batches_done", "metrics", "whole")
    return {
        "weights and buffers": copy.deepcopy(dict(model.state_dict())),
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "training or evaluation mode": [module.training for module in model.modules()],
        "the optimizer": copy.deepcopy(loop.optimizer.state_dict()),
        "the scaler": loop.scaler.state_dict(),
        "the callbacks": copy.deepcopy([one.state_dict() for one in loop.callbacks]),
        "the loop's place": copy.deepcopy([getattr(loop, name) for name in counters]),
    }


class _Dice:
    """Stands in for torch.cuda: two devices, each with a generator; the first one is current."""

    def __init__(self) -> None:
        self.states = [torch.arange(5, dtype=torch.uint8), torch.arange(50, 55, dtype=torch.uint8)]

    @staticmethod
    def _index(device: Any) -> int:
        if isinstance(device, int):
            return device
        return torch.device(device).index or 0

    def get_rng_state(self, device: Any = "cuda") -> Tensor:
        return self.states[self._index(device)].clone()

    def set_rng_state(self, new_state: Tensor, device: Any = "cuda") -> None:
        self.states[self._index(device)] = new_state.clone()


def _accelerator(trial: Trial, answer: Any, loop: Any) -> None:
    """An accelerator's generator, where `random_module` says that there is one: that of the run's device."""
    device = loop.device
    hint = "who knows whether there is one, and of which device is it?"
    with trial.group("an accelerator's generator, where there is one", hint=hint, see=3):
        for name in ("cuda:0", "cuda:1"):
            dice, index = _Dice(), int(name[-1])
            want = dice.states[index].clone()
            try:
                loop.device = torch.device(name)
                with mock.patch.dict(answer.generator_states.__globals__, random_module=lambda device, d=dice: d):
                    states = torch.load(_saved(loop.generator_states()), weights_only=False)
                    dice.states = [state + 7 for state in dice.states]
                    other = dice.states[1 - index].clone()
                    loop.set_generator_states(states)
            finally:
                loop.device = device
            trial.equal(
                f"{name}'s generator after set_generator_states, the current device is 0", dice.states[index], want
            )
            trial.equal("the other device's generator, which the run doesn't use", dice.states[1 - index], other)


def _own_generators(loop: Any) -> list[torch.Generator]:
    owners = [loop.train_loader, loop.val_loader, loop.train_loader.sampler, loop.val_loader.sampler]
    found = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in found if generator is not None]


def _state_of_all(loop: Any) -> list[Any]:
    own = [generator.get_state() for generator in _own_generators(loop)]
    return [random.getstate(), np.random.get_state(), torch.get_rng_state(), own]


def _set_all(loop: Any, states: list[Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    for generator, state in zip(_own_generators(loop), states[3], strict=True):
        generator.set_state(state)


def _all_parts(trial: Trial, runs: _Runs) -> None:
    """A snapshot, and what load_state_dict puts back."""
    loop, (memory, _, _, second) = runs.run("of the loader", precision="fp16", optimizer="adamw")
    loop.scaler.update(1234.0)
    state = loop.state_dict()
    kept = torch.load(_saved(state), weights_only=False)
    wanted = copy.deepcopy(_parts_of(loop, memory, second))
    again = runs.parts("of the loader")[3]
    for x, y in again:
        F.cross_entropy(loop.model.train()(x), y).backward()
        loop.optimizer.step()
        memory.mean += 1.0
        memory.count += 1
    loop.optimizer.param_groups[0]["lr"] = 7.0
    loop.scaler.update(8.0)
    changed = [name for name in kept if not _same(_plain(state[name]), _plain(kept[name]))]
    with trial.group("is a snapshot", hint="what does a later step change?", see=2):
        trial.equal("parts of state_dict() that two later steps have changed", changed, [])
    with trial.group("load_state_dict puts back", hint="who saves this part, and who loads it?"):
        loop.load_state_dict(torch.load(_saved(kept), weights_only=False))
        got = _parts_of(loop, memory, second)
        for name, want in wanted.items():
            trial.equal(
                f"the state of the {name} is the one that was saved", _same(_plain(got[name]), _plain(want)), True
            )


def _parts_of(loop: Any, memory: Any, second: Any) -> dict[str, Any]:
    return {
        "model": dict(loop.model.state_dict()),
        "optimizer": loop.optimizer.state_dict(),
        "scaler": loop.scaler.state_dict(),
        "callbacks": [memory.state_dict(), second.state_dict()],
    }


def _plain(value: Any) -> Any:
    """The same with plain dictionaries and lists, so that equal contents are equal."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _other_callbacks(trial: Trial, runs: _Runs) -> None:
    loop, _ = runs.run("global")
    state, base = loop.state_dict(), runs.lesson["Callback"]
    more = type("More", (base,), {})()
    mine = loop.callbacks
    item = "ValueError for other callbacks, before anything is changed"
    with trial.group(item, hint="what is compared, and when?"):
        for name, others in {
            "one missing": mine[:-1],
            "one more": [*mine, more],
            "another order": mine[::-1],
            "two exchanged": [mine[0], mine[2], mine[1], mine[3]],
            "one of another type": [*mine[:-1], more],
        }.items():
            other = runs.run("global", optimizer="sgd")[0]
            other.callbacks = others
            with torch.no_grad():
                for p in other.model.parameters():
                    p.add_(1.0)
            before = copy.deepcopy(dict(other.model.state_dict())), copy.deepcopy(other.optimizer.state_dict())
            dice = torch.get_rng_state()
            got = _raised_by(lambda o=other: o.load_state_dict(copy.deepcopy(state))).partition(":")[0]
            trial.equal(f"{name}: what is raised", got, "ValueError")
            after = dict(other.model.state_dict()), other.optimizer.state_dict()
            same = _same(_plain(before), _plain(after)) and torch.equal(dice, torch.get_rng_state())
            trial.equal(f"{name}: model, optimizer and generators are as before", same, True)


def _goes_on(trial: Trial, runs: _Runs) -> None:
    path = runs.folder / "run.ckpt"
    item = "a run that goes on ends with the same bits"
    with trial.group(item, hint="what isn't saved or put back, in which order, and who draws in between?"):
        for number, kind in enumerate(runs.LOADERS):
            options = [{}, {"optimizer": "adamw"}, {"accumulate": 4}, {"precision": "fp16"}, {"optimizer": "plain"}]
            options = options[number]
            whole, (memory, trace, _, second) = runs.run(kind, **options)
            per_epoch = whole.step // 3
            for hook, step in (
                ("on_batch_end", 1),
                ("on_batch_end", per_epoch),
                ("on_epoch_end", per_epoch),
                ("on_batch_end", per_epoch + 1),
            ):
                case = f"generator: {kind}; saved in {hook} of step {step}; {options}"
                saving = partial(runs.run, kind, hook, step, **options)
                hint = "which part of the state does the message name?"
                trial.call(f"a run that saves ({case})", saving, hint=hint, see=1)
                random.seed(99)
                np.random.seed(99)
                torch.manual_seed(99)
                resumed = partial(runs.run, kind, resume=path, **options)
                hint = "what does a resumed run look for in the state?"
                found = trial.call(f"the resumed run ({case})", resumed, hint=hint)
                loop, (memory_2, trace_2, _, second_2) = found
                rows = trace.rows[-len(trace_2.rows) :]
                names = ("step", "loss", "rate, or a draw after validation")
                both = [[dict(zip(names, row, strict=True)) for row in found] for found in (trace_2.rows, rows)]
                trial.equal(f"rows of a callback ({case})", *both)
                same = _same(dict(loop.model.state_dict()), dict(whole.model.state_dict()))
                trial.equal(f"weights ({case})", same, True)
                trial.equal(
                    f"what a callback remembers ({case})", _same(memory_2.state_dict(), memory.state_dict()), True
                )
                got, want = second_2.state_dict(), second.state_dict()
                trial.equal(f"what a second one of its type remembers ({case})", _same(got, want), True)
