"""Checks of the exercises in 15-05, TorchScript & JIT Compilation."""

import copy
import functools
import inspect
import io
import itertools
import json
import math
import random
import re
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo.exc
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map

from shared import quiet
from shared.checks.exercise import exercise
from shared.checks.trial import Trial

# ---------------------------------------------------------------- 15-05.1


class _Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.sum(dim=0) / len(x)


class _Mend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nan_to_num(x) if x.isnan().any() else x * 1


class _Front(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[: min(x.shape[0], 8)] * 2


class _Pick(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[torch.arange(x.shape[0]), x.abs().argmax(dim=1)]


class _Digits(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.round(decimals=8 if x.dtype == torch.float64 else 2)


_FIVE = {cls.__name__[1:]: cls for cls in (_Centre, _Mend, _Front, _Pick, _Digits)}
_RIGHT = ("Front", "Pick")


@functools.cache
def _traces() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    example = torch.randn(16, 4, generator=generator)
    with quiet():
        return {name: torch.jit.trace(cls(), example) for name, cls in _FIVE.items()}


def _differ(got: Tensor, want: Tensor) -> bool:
    """In shape, in dtype, or somewhere by more than 0.001; NaN differs from every number."""
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return True
    same = (got == want) | (got.isnan() & want.isnan()) | ((got - want).abs() <= 1e-3)
    return not bool(same.all())


@exercise("15-05.1", "Five traces", points=15, demands=4)
def counterexamples(trial: Trial, answer: Any) -> None:
    """`answer()` gives for each of the five an input on which its trace is wrong, or None."""
    found = answer()
    trial.that(
        "gives a dictionary with the five names",
        isinstance(found, dict) and set(found) == set(_FIVE),
        expected=sorted(_FIVE),
        got=sorted(map(str, found)) if isinstance(found, dict) else repr(found),
        hint="which names has five_models?",
    )
    with trial.group("inputs are of the kind that the traces are to be used for", hint="read the task's first lines"):
        for name, x in found.items():
            if x is None:
                continue
            tensor = isinstance(x, Tensor) and x.dtype in (torch.float32, torch.float64)
            trial.that(
                name,
                tensor and x.ndim == 2 and 1 <= x.shape[0] <= 64 and x.shape[1] == 4,
                expected="a float32 or float64 tensor of shape (n, 4) with n from 1 to 64",
                got=f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__,
            )
    item = "on each input the trace is silently wrong"
    with trial.group(item, hint="run the model and the trace on it and compare", see=1):
        for name, x in found.items():
            if x is None:
                continue
            model, trace = _FIVE[name](), _traces()[name]
            x = x.detach().cpu()
            try:
                got = trace(x)
            except RuntimeError:
                trial.that(name, False, expected="a trace that returns", got="an error from the trace")
                continue
            trial.that(
                name,
                _differ(got, model(x)),
                expected="different results",
                got="the same result of both",
                hint="run the model and the trace on it and compare",
                see=2 if name == "Front" else 1,
            )
    with trial.group("None stands for a trace that is right for all", hint="which input goes another way?", see=1):
        for name, x in found.items():
            if x is None:
                wrong = name not in _RIGHT
                trial.that(name, not wrong, expected="an input on which the trace is wrong", got="None")


# ---------------------------------------------------------------- 15-05.2


class _Report(nn.Module):
    """As the notebook has it."""

    def __init__(self, labels: list[str], limit: float | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(4, len(labels))
        self.labels, self.limit = labels, limit

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: float) -> tuple[Tensor, dict[str, int], str]:
        scores = self.fc(x) * options.get("scale", 1)
        if mask is not None:
            scores = scores.masked_fill(mask, -np.inf)
        if self.limit is not None:
            scores = scores.clamp(max=self.limit)
        names = [self.labels[i] for i in scores.argmax(dim=1).tolist()]
        counts: dict[str, int] = {}
        for name in names:
            counts[name] = counts.get(name, 0) + 1
        return scores, counts, f"{len(x)} rows, {len(counts)} labels, first: {(names or ['nothing'])[0]}"


def _scripted(module: Any) -> tuple[Any, str]:
    """The scripted module; or None, and what its error says of which line."""
    try:
        return torch.jit.script(module), ""
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        decisive = [line for line in lines if line.startswith(("Expected a value", "Could not match"))]
        before = [line for line, mark in itertools.pairwise(lines) if mark.endswith("<--- HERE")]
        at = f" (in the line: {before[0]})" if before else ""
        return None, f"{type(error).__name__}: {(decisive or lines or [''])[0]}{at}"


def _saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


@exercise("15-05.2", "A module that can be scripted", points=20, demands=3)
def scriptable(trial: Trial, answer: Any) -> None:
    """`answer(labels, limit)` is a module; what it returns is what _Report returns, scripted or not."""
    pairs = []
    for labels in (["cat", "dog", "cow"], ["b", "a", "b", "c"], ["only"]):
        for limit in (None, 0.0, round(random.uniform(0.1, 0.9), 2), -0.5):
            reference = _Report(labels, limit)
            ours = answer(list(labels)) if limit is None else answer(list(labels), limit)
            pairs.append((reference, ours))
    for reference, ours in pairs:
        with trial.group("a state dict of Report loads", hint="compare the names of parameters"):
            ours.load_state_dict(reference.state_dict())
    with quiet():
        scripts = []
        for _, ours in pairs:
            script, said = _scripted(ours)
            trial.needs(
                "torch.jit.script accepts it",
                not said,
                expected="no exception",
                got=said,
                hint="which construct does the error name?",
                see=2 if "tolist" in said else 1,
            )
            scripts.append(script)
        files = []
        for script in scripts:
            item = "the scripted module can be saved"
            files.append(trial.call(item, lambda script=script: _saved(script), hint="is there Python left in it?"))
    forms = (
        ("as plain Python it returns what Report returns", [ours for _, ours in pairs]),
        ("scripted, or read from the file, it returns what Report returns", scripts),
        ("scripted, or read from the file, it returns what Report returns", files),
    )
    for item, made in forms:
        with trial.group(item, hint="run Report on the same input"):
            for (reference, _), form in zip(pairs, made, strict=True):
                _hold_report(trial, reference, form)


def _hold_report(trial: Trial, reference: _Report, form: Any) -> None:
    width = len(reference.labels)
    for rows in (0, 1, 2, random.randint(3, 9)):
        x = torch.randn(rows, 4)
        mask = torch.rand(rows, width) < 0.4
        if rows > 1:
            mask[0] = True  # nothing is left of this row
        scale = round(random.uniform(0.3, 3), 2)
        for args, kwargs in (
            ((x,), {}),
            ((x, mask), {}),
            ((x, None, -scale), {"scale": -scale}),
            ((x, mask, 0.0), {"scale": 0.0}),
            ((x, mask, scale), {"scale": scale}),
        ):
            with torch.no_grad():
                want, got = reference(*args[:2], **kwargs), form(*args)
            given = ["no mask" if len(args) < 2 or args[1] is None else "a mask", f"limit {reference.limit}"]
            case = f"{rows} rows, labels {reference.labels}, {', '.join(given)}, {kwargs or 'no scale'}"
            trial.that(
                case, isinstance(got, tuple) and len(got) == 3, expected="a tuple of three", got=type(got).__name__
            )
            trial.close(f"scores: {case}", got[0], want[0])
            trial.equal(f"counts: {case}", got[1], want[1])
            trial.equal(f"text: {case}", got[2], want[2])
        if rows:
            odd = x.clone()
            odd[-1, 2] = math.nan
            for case, given in (("a NaN", (odd,)), ("a mask of one row", (x, mask[-1]))):
                want, got = reference(*given), form(*given)
                trial.close(f"scores: {case}, {rows} rows", got[0], want[0])
                trial.equal(f"counts: {case}, {rows} rows", got[1], want[1])
            got, want = form(x)[0], reference(x)[0]
            case = f"the gradient of fc.weight, {rows} rows, limit {reference.limit}"
            trial.that(case, got.requires_grad, expected="scores with a gradient", got="scores without one")
            trial.close(
                case, *(torch.autograd.grad(z.sum(), m.fc.weight)[0] for z, m in ((got, form), (want, reference)))
            )
        named = form(x, scale=scale)
        trial.equal(f"scale by name: {rows} rows", named[1], reference(x, scale=scale)[1])
        trial.close(f"mask by name: {rows} rows", form(x=x, mask=mask)[0], reference(x, mask)[0])
    x = torch.randn(3, 4, dtype=torch.float64)
    want, got = reference.double()(x)[0], form.double()(x)[0]
    reference.float(), form.float()  # others are made of the same parameters
    trial.close(f"scores: float64, limit {reference.limit}", got.detach(), want.detach())


# ---------------------------------------------------------------- 15-05.3


class _Scale(nn.Module):
    """Works for every width, so that nothing but the export fixes it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + 1


class _Nest(nn.Module):
    """Nested arguments, a 0-d tensor, numbers, texts and None."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)

    def forward(
        self, pair: Sequence[Any], named: dict[str, Any], times: int = 2, *, gain: Tensor, mask: Tensor | None = None
    ) -> dict[str, Any]:
        x = self.embed(pair[0]) * times * named["factor"] * gain
        if mask is not None:
            x = x * mask[:, None]
        return {"x": x, "rows": (pair[1][0].flatten(1).sum(dim=1), named["y"].mean(dim=(1, 2)))}


class _Rest(nn.Module):
    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        for other in rest:
            x = x + other.sum(dim=1, keepdim=True)
        return x


class _Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y * 3


class _Fixed(nn.Module):
    """Takes some batch sizes alone; counts its calls."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.drop = kind, nn.Dropout(0.5)
        self.register_buffer("calls", torch.tensor(0), persistent=False)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        x = self.drop(x)
        if self.kind == "a second result":
            return x * 2, x * 3 if x.shape[0] > 1 else x * 4
        if self.kind == "one row is moved up and down":
            return x * 2 if x.shape[0] > 1 else x * 2 + torch.tensor([1.0, -1.0, 0.5, -0.5])
        if self.kind == "one row is float64":
            return x * 2 if x.shape[0] > 1 else (x * 2).double()
        if self.kind == "NaN in the program alone":
            return (x - x.mean(dim=0)) / (x.std(dim=0) if x.shape[0] > 1 else 1)
        if self.kind == "NaN in the model alone":
            return x * 2 if x.shape[0] > 1 else x * math.nan
        if self.kind == "one row has no second":
            return x + x[1] if x.shape[0] > 1 else x + x[0]
        if self.kind in ("four rows alone", "one row alone"):
            return x.reshape(4 if self.kind.startswith("four") else 1, 4) * 2
        if self.kind == "quarters":
            return x.reshape(4, -1).sum(dim=1)
        if self.kind == "loop":
            for i in range(x.shape[0]):
                x = x + i
            return x
        if self.kind == "pairs":
            return x.reshape(-1, 2, x.shape[1]).sum(dim=1)
        if self.kind == "one row is scaled":
            return x * 2 if x.shape[0] > 1 else x * 2.01
        if self.kind == "one row is flat":
            return x * 2 if x.shape[0] > 1 else x[0] * 2
        if self.kind == "one row raises":
            if x.shape[0] == 1:
                raise ZeroDivisionError("a spread of one row")
            return x * 2
        return x[:10] if x.shape[0] > 10 else x * 2


class _ByData(nn.Module):
    """What torch.export can't follow, whatever the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.mean() > 0 else x * 2


class _Spread(nn.Module):
    """Of one row it makes NaN, as its program does; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / x.std(dim=0)


class _Keeps(nn.Module):
    """Keeps a result, which copy.deepcopy refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.last = self.fc(torch.randn(2, 4)).mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class _Large(nn.Module):
    """Its program differs by what a few roundings make, of large numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1000000.5 if torch.compiler.is_exporting() else x * 1e6


class _Broken(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.drop, self.error = nn.Dropout(0.5), error
        self.register_buffer("calls", torch.tensor(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        raise self.error


def _nest_inputs(n: int) -> tuple[tuple, dict]:
    pair = [torch.randint(0, 5, (n,)), (torch.randn(n, 2, 3), "text")]
    named = {"y": torch.randn(n, 3, 2, dtype=torch.float64), "factor": 1.5, "nothing": None}
    return (pair, named), {"gain": torch.tensor(random.uniform(0.5, 2)), "mask": torch.rand(n) < 0.5}


def _modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def _mixed(model: nn.Module) -> nn.Module:
    for i, module in enumerate(model.modules()):
        module.training = i % 2 == 0
    return model


def _refuses(program: Callable[..., Any], *args: Any) -> bool:
    try:
        with quiet():
            program(*args)
    except Exception:
        return True
    return False


def _export_batches(model: nn.Module, *args: Any, **kwargs: Any) -> ExportedProgram:
    """Stand-in of exercise 3."""
    size = Dim("batch", min=1)
    example = (args, kwargs)
    single = tree_map(lambda x: x[:1] if isinstance(x, Tensor) and x.ndim else x, example)
    double = tree_map(lambda x: torch.cat([x, x]) if isinstance(x, Tensor) and x.ndim else x, example)
    given = dict(inspect.signature(model.forward).bind(*double[0], **double[1]).arguments)
    shapes = tree_map(lambda x: {0: size} if isinstance(x, Tensor) and x.ndim else None, given)

    def run(form: nn.Module, inputs: tuple) -> Any:
        buffers = {name: buffer.clone() for name, buffer in form.named_buffers()}
        with quiet(), torch.no_grad():
            return torch.func.functional_call(form, buffers, *inputs)

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        run(model, example)
        try:
            _, want = run(model, double), run(model, single)
        except Exception as error:
            raise ValueError(f"not every batch: {error}") from None
        with quiet():
            program = torch.export.export(model, *double, dynamic_shapes=shapes)
    except torch._dynamo.exc.UserError as error:
        raise ValueError(f"the batch is fixed: {error}") from None
    finally:
        for module, mode in modes:
            module.training = mode
    try:
        torch.testing.assert_close(run(program.module(), single), want, rtol=1e-4, atol=1e-4, equal_nan=True)
    except Exception as error:
        raise ValueError(f"a batch of one row: {error}") from None
    return program


_SIZES = (1, 2, 3, 8, 33)


@exercise(
    "15-05.3",
    "Export for every batch",
    points=20,
    demands=12,
    stand_in=lambda: _export_batches,
    stand_in_name="an export_batches of the checks",
)
def export_batches(trial: Trial, answer: Any) -> None:
    """`answer(model, *args, **kwargs)` exports for any batch size; the model itself says what is right."""
    kept: list[tuple[str, list[bool], list[bool]]] = []
    counted: list[tuple[str, int]] = []
    moved, modes = "no buffer has changed", "each module is in the mode it was in"

    def export(name: str, model: nn.Module, args: tuple, kwargs: dict | None = None) -> Any:
        before = _modes(model)
        with quiet():
            made = answer(model, *args, **(kwargs or {}))
        kept.append((name, _modes(model), before))
        return made

    def hold_model() -> None:
        """What the exports so far have left behind."""
        with trial.group(moved, hint="who shares the buffers with the model?", see=1, free=True):
            for name, calls in counted:
                trial.equal(name, calls, 0)
        with trial.group(modes, hint="remember what, and restore when?", free=True):
            for name, after, before in kept:
                trial.equal(name, after, before)
        kept.clear()
        counted.clear()

    linear = nn.Linear(4, 3)
    program = export("Linear", linear, (torch.randn(5, 4),))
    trial.that(
        "returns an ExportedProgram",
        isinstance(program, ExportedProgram),
        expected="an ExportedProgram",
        got=type(program).__name__,
        hint="what does the task say is returned?",
    )
    with trial.group("takes every batch size, whatever the example's", hint="what is special about this size?", see=1):
        for rows in (5, 1, 2):
            name = f"an example with {rows} row{'s' * (rows > 1)}"
            program = program if rows == 5 else export(name, linear, (torch.randn(rows, 4),))
            least = max((int(sizes.lower) for sizes in program.range_constraints.values()), default=1)
            trial.that(f"{name}: the range of the batch", least <= 1, expected="from 1 on", got=f"from {least} on")
            bounded = [str(sizes.upper) for sizes in program.range_constraints.values() if not sizes.upper >= 2**31]
            trial.equal(f"{name}: upper bounds of the batch", bounded, [])
            module = program.module()
            for n in _SIZES:
                x = torch.randn(n, 4)
                trial.close(f"{name}, then {n}", module(x), linear(x))
    with trial.group("arguments may be nested, named and of other kinds", hint="draw the nested structure", see=2):
        nest = _mixed(_Nest())
        for rows in (1, 4):
            args, kwargs = _nest_inputs(rows)
            module = export("nested arguments", nest, args, kwargs).module()
            for n in (1, 2, 7):
                args, kwargs = _nest_inputs(n)
                with torch.no_grad():
                    want = copy.deepcopy(nest).eval()(*args, **kwargs)
                    got = module(*args, **kwargs)
                for where, a, b in zip(
                    ("x", "rows[0]", "rows[1]"), (got["x"], *got["rows"]), (want["x"], *want["rows"]), strict=True
                ):
                    trial.close(f"{where} of {n} rows, exported with {rows}", a, b)
        rest = _Rest()
        for count in (0, 2):
            make = lambda n, count=count: [torch.randn(n, 3) for _ in range(1 + count)]  # noqa: E731
            module, given = export("*rest", rest, tuple(make(2))).module(), make(5)
            trial.close(f"forward(x, *rest) with {count} more", module(*given), rest(*given))
    hold_model()
    with trial.group("is exported in evaluation mode", hint="in which mode does the model run, and is it exported?"):
        noisy = _mixed(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(0.5))))
        state = copy.deepcopy(noisy.state_dict())
        module = export("dropout", noisy.train(), (torch.randn(6, 4),)).module()
        x = torch.randn(9, 4)
        trial.close("with dropout and batch norm", module(x), copy.deepcopy(noisy).eval()(x))
        trial.equal("the model's state", dict(noisy.state_dict()), dict(state))
    with trial.group("other sizes stay as in the example", hint="which dimensions may vary?"):
        module = export("elementwise", _Scale(), (torch.randn(3, 4, 5),)).module()
        for shape in ((3, 5, 5), (3, 4, 6), (2, 1, 5)):
            refused = _refuses(module, torch.randn(shape))
            trial.that(f"{shape} for (n, 4, 5)", refused, expected="an error", got="a result")
        x = torch.randn(2, 4, 5)
        trial.close("(2, 4, 5)", module(x), _Scale()(x))
    with trial.group("the batch is the same in all tensors", hint="one size or several?"):
        module = export("two tensors", _Two(), (torch.randn(3, 4), torch.randn(3, 2, 2))).module()
        refused = _refuses(module, torch.randn(3, 4), torch.randn(5, 2, 2))
        trial.that("3 rows and 5 rows", refused, expected="an error", got="a result")
    with trial.group("a model may hold results of earlier runs", hint="what can't be copied, and by what?", see=1):
        keeps, x = _Keeps(), torch.randn(5, 4)
        trial.close("5 rows", export("a result is kept", keeps, (torch.randn(2, 4),)).module()(x), keeps(x))
    with trial.group("rounding is no difference", hint="how far apart are numbers of this size?"):
        x = torch.randn(5, 4)
        for rows in (1, 7):
            example = torch.randn(rows, 4) * torch.tensor([1.0, 3.7, 5.3, 9.1])
            module = export("numbers about a million", _Large(), (example,)).module()
            trial.close(f"exported with {rows} rows", module(x), x * 1e6)
    with trial.group("other errors of the model go on as they are", see=3, hint="which errors do you replace?"):
        errors = [RuntimeError("broken"), KeyError("key"), TypeError("odd"), ZeroDivisionError("zero")]
        for error in (*errors, RuntimeError("expected a batch of images")):
            model = _mixed(_Broken(error))
            before = _modes(model)
            said = _error_of(lambda model=model: export("a model that raises", model, (torch.randn(2, 4),)))
            same = type(said) is type(error) and str(error) in str(said)
            trial.that(f"a {type(error).__name__}", same, expected=repr(error), got=repr(said)[:200])
            kept.append((f"after a {type(error).__name__}", _modes(model), before))
            counted.append((f"calls counted after a {type(error).__name__}", int(model.calls)))
        said = _error_of(lambda: export("a branch on data", _ByData(), (torch.randn(2, 4),)))
        goes_on = said is not None and type(said) is not ValueError
        trial.that("a branch on data", goes_on, expected="the error of torch.export", got=repr(said)[:200])
    hold_model()
    with trial.group("a model that can't take every batch size raises ValueError", see=3, hint="what raises, and why?"):
        kinds = [("quarters", 4), ("loop", 3), ("pairs", 4), ("a branch at 10", 6), ("loop", 1)]
        kinds += [("one row is scaled", 3), ("one row is scaled", 1), ("one row is flat", 2), ("one row raises", 4)]
        kinds += [("a second result", 3), ("one row is moved up and down", 2), ("one row is float64", 3)]
        kinds += [("NaN in the program alone", 4), ("NaN in the model alone", 2), ("one row has no second", 3)]
        kinds += [("four rows alone", 4), ("one row alone", 1)]
        for kind, rows in kinds:
            model = _mixed(_Fixed(kind))
            args = (kind, model, (torch.randn(rows, 4),))
            one_row = kind.startswith(("one row", "a second", "NaN")) and kind != "one row alone"
            hint = "what does it do with one row, what its program?" if one_row else ""
            said = _error_of(lambda args=args: export(*args))
            trial.equal(f"{kind}, {rows} row{'s' * (rows > 1)}", _named(said), "ValueError", hint=hint)
            told = "batch" in str(said)
            trial.that(f"the word in the message, {kind}", told, expected="'batch' in the message", got=str(said)[:200])
            kept.append((f"after a refusal: {kind}", _modes(model), _modes(_mixed(_Fixed(kind)))))
            counted.append((f"calls counted after a refusal: {kind}", int(model.calls)))
    hold_model()
    with trial.group(moved, hint="who shares the buffers with the model?", see=1, free=True):
        spread, x = _Spread(), torch.randn(5, 4)
        for rows in (1, 3):
            name = f"NaN for one row, {rows} in the example"
            program = trial.call(
                name,
                lambda name=name, rows=rows: export(name, spread, (torch.randn(rows, 4),)),
                hint="which results of model and program do you take for different?",
            )
            trial.equal("calls that the model has counted", int(spread.calls), 0)
        trial.close("5 rows", copy.deepcopy(program.module())(x), x / x.std(dim=0))
    hold_model()


def _named(error: Exception | None) -> str:
    return "no exception" if error is None else type(error).__name__


def _error_of(action: Callable[[], object]) -> Exception | None:
    """What an action raises; an unfinished answer's NotImplementedError goes on."""
    try:
        action()
    except NotImplementedError:
        raise
    except Exception as error:
        return error
    return None


# ---------------------------------------------------------------- 15-05.4


def _enhanced(x: Tensor) -> tuple[Tensor, int]:
    """What Enhance makes of a batch, and what it adds to `dark`; in Python, the level rounded to x's dtype."""
    level = x.mean()
    half, tenth = (torch.tensor(value, dtype=x.dtype) for value in (0.5, 0.1))
    if bool(level > half):
        return 1 - x, 0
    if bool(level < tenth):
        return (x * (0.28 / level)).clamp(max=1), 1
    return x, 0


class _CondEnhance(nn.Module):
    """Stand-in of exercise 4."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("dark", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        self.dark += (level < 0.1).long()
        x = torch.cond(level < 0.1, lambda x, a: (x * (0.28 / a)).clamp(max=1), lambda x, a: x.clone(), (x, level))
        return self.body(torch.cond(level > 0.5, lambda x: 1 - x, lambda x: x.clone(), (x,)))


def _scans(dtype: torch.dtype, n: int) -> dict[str, Tensor]:
    """Batches (n, 1, 4, 5) for each way and each threshold."""
    x = torch.rand(n, 1, 4, 5, dtype=dtype)

    def level(value: float) -> Tensor:
        """A batch that isn't uniform and whose mean is the value, rounded to dtype."""
        batch = (value * (0.5 + torch.linspace(0, 1, x.numel(), dtype=dtype))).view_as(x)
        wanted = torch.tensor(value, dtype=dtype)
        for _ in range(200):
            batch.view(-1)[0] += (wanted - batch.mean()) * batch.numel() / 2
        return batch

    below = torch.nextafter(torch.tensor(0.1, dtype=dtype), torch.tensor(0.0, dtype=dtype)).item()
    return {
        "a negative": 0.6 + 0.3 * x,
        "a nearly white negative": 1 - 0.12 * x,
        "an ordinary scan": 0.15 + 0.3 * x,
        "a dark scan": 0.12 * x,
        "a nearly black scan": 1e-6 * x + 1e-7,
        "a dark scan with bright pixels": (x > 0.97).to(dtype) * 0.9 + 1e-3,
        "a level of exactly 0.5": level(0.5),
        "a level of exactly 0.1": level(0.1),
        "a level just below 0.1": level(below),
        "a level just above 0.5": level(0.5 + 2**-20),
        "a NaN in an ordinary scan": torch.where(torch.arange(x.numel()).view_as(x) == 1, math.nan, 0.15 + 0.3 * x),
        "a black scan": torch.zeros_like(x),
        "a dark scan with negative pixels": 0.12 * x - 0.05,
        "a transposed ordinary scan": (0.15 + 0.3 * torch.rand(n, 1, 5, 4, dtype=dtype)).transpose(2, 3),
    }


_MOVES = ("clone", "alias", "detach", "_to_copy", "to", "contiguous", "view", "reshape", "lift_fresh_copy")
_MOVES += ("flatten", "unflatten", "transpose", "permute", "unsqueeze", "squeeze")


def _on_images(program: ExportedProgram, shape: torch.Size) -> list[str]:
    """Operators outside of all branches that compute something of the images' size, whatever its shape."""
    found = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor):
            continue
        size = value.numel()  # a symbol where the batch is one
        if value.shape[1:] != shape[1:] and not (isinstance(size, int) and size == math.prod(shape)):
            continue
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        if "getitem" not in name and "cond" not in name and name not in _MOVES:
            found.append(name)
    return found


def _graphs(module: torch.fx.GraphModule) -> list[torch.fx.Graph]:
    return [part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule)]


def _conds(module: torch.fx.GraphModule) -> int:
    return sum("cond" in str(node.target) for g in _graphs(module) for node in g.nodes if node.op == "call_function")


def _chosen(module: torch.fx.GraphModule) -> list[str]:
    """Choices by torch.where, in any branch, with one condition for several numbers."""
    nodes = [n for g in _graphs(module) for n in g.nodes if str(n.target).startswith("aten.where")]
    sizes = [(n.args[0].meta["val"].ndim, n.meta["val"].ndim) for n in nodes]
    return [str(node.target) for node, (asked, given) in zip(nodes, sizes, strict=True) if asked < given]


def _path(module: nn.Module, x: Tensor) -> tuple[str, ...]:
    """The branches that a batch goes through, of those that return more than a number."""
    taken: list[str] = []
    for name, part in module.named_modules():
        if isinstance(part, torch.fx.GraphModule) and name:

            def note(_: object, given: object, result: object, name: str = name) -> None:
                if any(isinstance(t, Tensor) and t.numel() > 1 for t in tree_leaves(result)):
                    taken.append(name)

            part.register_forward_hook(note)
    with torch.no_grad():
        module(x)
    return tuple(taken)


_STATE = "names and dtypes in the state dict stay"
_COPIES = (*_MOVES, "copy", "empty_like", "slice", "expand")
_BY_LEVEL = ("mul", "div", "lerp", "addcmul")
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}
_CUTS = ("clamp", "clamp_max", "clamp_min", "minimum", "clip")


def _work(module: torch.fx.GraphModule, x: Tensor) -> tuple[list[str], list[str]]:
    """What the branches that a batch goes through compute of the images' size: (anything, what lifting needs)."""
    parts = dict(module.named_modules())
    work, lifting = [], []
    for node in (node for name in _path(module, x) for node in parts[name].graph.nodes):
        if node.op != "call_function" or not _of_size(node, x) or _passes_on(node):
            continue
        name = str(node.target).removeprefix("aten.").partition(".")[0].removesuffix("_")
        others = [arg for arg in node.args[1:] if isinstance(arg, torch.fx.Node)]
        same = name in _NEUTRAL and len(node.args) == 2 and not others and node.args[1] == _NEUTRAL[name]
        if name not in _COPIES and not same:
            work.append(name)
        if name in _CUTS or (name in _BY_LEVEL and any(not _of_size(arg, x) for arg in others)):
            lifting.append(name)
    return work, lifting


def _passes_on(node: torch.fx.Node) -> bool:
    return "cond" in str(node.target) or "getitem" in str(node.target)


def _of_size(node: torch.fx.Node, x: Tensor) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.numel() == x.numel()


@exercise(
    "15-05.4",
    "Three ways through a model",
    points=20,
    demands=5,
    stand_in=lambda: _CondEnhance,
    stand_in_name="a CondEnhance of the checks",
)
def cond_enhance(trial: Trial, answer: Any) -> None:
    """`answer(body)` is an Enhance with its branches in the graph; Python's own branches say what is right."""
    bases = [base.__name__ for base in getattr(answer, "__mro__", ())[1:]]
    trial.needs(
        "is derived from Enhance",
        "Enhance" in bases,
        expected="a class derived from Enhance",
        got=repr(answer),
        hint="which class does the task name?",
    )

    def make(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
        body = nn.Sequential(nn.Flatten(), nn.Linear(20, 3)).to(dtype).eval()
        return answer(body).eval(), body

    model, body = make()
    state = model.state_dict()
    names = sorted(["dark", *(f"body.{name}" for name in body.state_dict())])
    trial.needs(_STATE, sorted(state) == names, expected=names, got=sorted(state), hint="what did you register?")
    dtype = str(state["dark"].dtype)
    trial.needs(_STATE, dtype == "torch.int64", expected="torch.int64", got=dtype, hint="which dtype has dark?")
    for name, dtype, rows, dynamic, sizes in (
        ("an ordinary scan", torch.float32, 3, False, (3,)),  # a size that is one number: see _on_images
        ("a negative", torch.float32, 4, True, (1, 2, 6)),
        ("a dark scan", torch.float64, 4, True, (5,)),
    ):
        model, body = make(dtype)
        example = f"{name}, {str(dtype).removeprefix('torch.')}, {'any' if dynamic else 'one'} batch size"
        _hold_exported(trial, model, body, example, _scans(dtype, rows)[name], dynamic, sizes)
    with trial.group("as plain Python it does what Enhance does", hint="compare with Enhance, way by way", see=1):
        model, body = make()
        counted = 0
        scans = {**_scans(torch.float32, 3), "a dark batch of flat images": 0.12 * torch.rand(3, 20)}
        for name, x in [*scans.items(), ("a dark scan, in training mode", scans["a dark scan"])]:
            model.train("training" in name)
            with quiet(), torch.no_grad():
                got = model(x)
            image, dark = _enhanced(x)
            counted += dark
            trial.close(name, got, body(image).detach())
            trial.equal(f"dark after {name}", int(model.dark), counted)


def _hold_exported(
    trial: Trial, model: nn.Module, body: nn.Module, example: str, x: Tensor, dynamic: bool, sizes: Sequence[int]
) -> None:
    """Export with an example, and hold the program's branches, results and counts for all kinds of scans."""
    with trial.group("torch.export accepts it", free=True):
        try:
            with quiet():
                program = torch.export.export(model, (x,), dynamic_shapes=({0: Dim("batch")},) if dynamic else None)
        except NotImplementedError:
            raise
        except Exception as error:
            said, see = _refusal(error)
            hint = "which rule of torch.cond is broken, and in which branch?"
            trial.that(example, False, expected="a program", got=said, hint=hint, see=see)
            return
    with trial.group("each way is a branch of torch.cond", hint="what is computed before it is decided?", see=1):
        outside = _on_images(program, torch.Size([3, 1, 4, 5]))
        trial.equal(f"computed on all images outside of the branches, {example}", outside, [])
        trial.equal(f"chosen between results by where, {example}", _chosen(program.graph_module), [])
        many = _conds(program.graph_module)
        trial.that(f"branches, {example}", many >= 2, expected="two torch.cond or more", got=many)
    ways, counts = "the exported program takes each way by itself", []
    with trial.group(ways, hint="compare with Enhance, way by way", see=1):
        module = program.module()
        start, counted = int(module.dark), 0
        for n in sizes:
            for name, scan in _scans(x.dtype, n).items():
                with torch.no_grad():
                    got = module(scan)
                image, dark = _enhanced(scan)
                counted += dark
                case = f"{name}, {n} in the batch, exported with {example}"
                counts.append((case, int(module.dark) - start, counted))
                trial.close(case, got, body(image).detach())
    with trial.group("dark counts dark batches alone", hint="compare with Enhance, way by way", see=2, free=True):
        for count in counts:
            trial.equal(*count)
    with trial.group("each way is a branch of torch.cond", hint="which branch does each kind of scan take?", see=1):
        scans = _scans(x.dtype, sizes[-1])
        taken = {_path(program.module(), scans[way]) for way in ("a negative", "an ordinary scan", "a dark scan")}
        trial.equal(f"ways through the branches that three kinds of scans take, {example}", len(taken), 3)
        if dynamic:
            return
        work = _work(program.module(), scans["an ordinary scan"])[0]
        trial.equal("computed in the branches for an ordinary scan", work, [])
        lifting = _work(program.module(), scans["a negative"])[1]
        trial.equal("computed in the branches for a negative, of what lifting needs", lifting, [])


def _refusal(error: Exception) -> tuple[str, int | None]:
    """What an error of torch.export says, and the number of the hint that helps."""
    text = str(error).rpartition("Got graph break/error:")[2]  # that of torch.cond stands behind
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    why = [line for line in lines[1:] if line.startswith("Explanation:")]
    said = " ".join([f"{type(error).__name__}: {lines[0]}", *why[:1]])[:240]
    if "alias" in said:
        return said, 3
    if re.search("mutat|side effect|buffer|attribute", said):
        return f"{said} (a branch writes to a tensor or an attribute from outside)", 2
    return said, 1 if "data-dependent" in said else None


# ---------------------------------------------------------------- 15-05.5


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.fc(x)))


class _Wide(_Net):
    """Gives one more dimension, over which a comparison would broadcast."""

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.fc(x))).unsqueeze(0)


class _OneRow(_Net):
    """Is off in one row of the sample, neither the first nor the last."""

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.fc(x))) + (x[:, :1] > 8).to(x.dtype)


class _Double(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.fc(x))).double()


class _Writes(_Net):
    """Spoils its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.fc(x.zero_())))


_RUNS: list[str] = []


def _note_run(where: str) -> Tensor:
    _RUNS.append(where)
    return torch.zeros(1)


class _Program:
    """Unpickling it calls a function."""

    def __reduce__(self) -> tuple:
        return _note_run, ("a pickle's function was called",)


_FORMATS = ("export", "torchscript", "state_dict")


@functools.cache
def _program(cls: type[_Net]) -> ExportedProgram:
    """A model of the class, exported in evaluation mode."""
    with quiet(), torch.no_grad():
        return torch.export.export(cls().eval(), (torch.randn(4, 6),), dynamic_shapes=({0: Dim("batch")},))


def _write(model: nn.Module, format_: str, path: Path) -> None:
    """One form of a model, in the mode that the model is in (exported: in evaluation mode)."""
    with quiet(), torch.no_grad():
        if format_ == "export":
            program = _program(type(model))
            for name, tensor in model.state_dict().items():
                program.state_dict[name].copy_(tensor)
            torch.export.save(program, path)
        elif format_ == "torchscript":
            torch.jit.save(torch.jit.script(model), str(path))
        else:
            torch.save(model.state_dict(), path)


@functools.cache
def _whole() -> tuple[_Net, dict[str, bytes], Tensor, Tensor]:
    """A model, its three forms as bytes, and a sample."""
    model, x = _Net().eval(), torch.randn(4, 6)
    x[1, 0] = 9.0  # see _OneRow
    with torch.no_grad():
        model.norm.running_mean.normal_()
        want = model(x)
    return model, {format_: _bytes_of(model, format_) for format_ in _FORMATS}, x, want


def _bytes_of(model: nn.Module, format_: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("form.pt2" if format_ == "export" else "form.pt")
        _write(model, format_, path)
        return path.read_bytes()


def _from_the_future(data: bytes) -> bytes:
    """The exported program with its schema's next major version."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(result, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("models/model.json"):
                described = json.loads(content)
                described["schema_version"]["major"] += 1
                content = json.dumps(described).encode()
            new.writestr(name, content)
    return result.getvalue()


def _changed(change: Callable[[nn.Module], object], cls: type = _Net, training: bool = False) -> nn.Module:
    model = cls()
    model.load_state_dict(_whole()[0].state_dict())
    with torch.no_grad():
        change(model)
    return model.train(training)


_OTHERS: dict[str, tuple[Callable[[Any], object], type[_Net]]] = {
    "as it is": (lambda m: None, _Net),
    **{f"off by {i} roundings": (lambda m, i=i: m.norm.bias.add_(2e-5 * i), _Net) for i in range(3)},
    "other weights": (lambda m: m.norm.bias[4].add_(1.0), _Net),  # the largest difference isn't the first
    "differences that cancel": (lambda m: m.norm.bias[3:].add_(torch.tensor([-1.0, 1.0])), _Net),
    "NaN": (lambda m: m.fc.weight.fill_(math.nan), _Net),
    "one row": (lambda m: None, _OneRow),
    "another shape": (lambda m: None, _Wide),
    "another dtype": (lambda m: None, _Double),
    "writes": (lambda m: None, _Writes),
    "off by 0.01": (lambda m: m.norm.bias.add_(0.01), _Net),
    "off by 5e-4": (lambda m: m.norm.bias.add_(5e-4), _Net),
    "far off": (lambda m: m.fc.bias.add_(3.0), _Net),
    "large": (lambda m: m.norm.bias.add_(1e4), _Net),
}


@functools.cache
def _form(case: str, format_: str, training: bool = False) -> bytes:
    """A form of the model, changed as _OTHERS says."""
    return _bytes_of(_changed(*_OTHERS[case], training), format_)


def _folder(root: str, forms: Sequence[tuple[str, str, bytes | None]], sample: object = None) -> Path:
    """A shipped folder with (format, file name, content); no file for None."""
    folder = Path(tempfile.mkdtemp(dir=root))
    _, _, x, want = _whole()
    torch.save({"input": x, "output": want} if sample is None else sample, folder / "sample one.pt")
    for _, name, content in forms:
        if content is not None:
            (folder / name).write_bytes(content)
    listed = [{"format": format_, "file": name} for format_, name, _ in forms]
    (folder / "manifest.json").write_text(json.dumps({"sample": "sample one.pt", "forms": listed}))
    return folder


class _Interrupted(_Net):
    """Is stopped by the reader while it computes."""

    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


_UNHEARD = (ResourceWarning, PendingDeprecationWarning, ImportWarning)  # Python's default filters ignore them


class LoadError(RuntimeError):
    """No form works."""


def _load_shipped(
    folder: Path, build: Callable[[], nn.Module], tolerance: float = 1e-4
) -> tuple[Callable[[Tensor], Tensor], list[tuple[str, str]]]:
    """Stand-in of exercise 5."""
    manifest, failed = json.loads((folder / "manifest.json").read_text()), []
    sample = torch.load(folder / manifest["sample"], weights_only=True)
    for form in manifest["forms"]:
        path = folder / form["file"]
        try:
            with quiet(), torch.no_grad():
                if form["format"] == "export":
                    model = torch.export.load(path).module()
                elif form["format"] == "torchscript":
                    model = torch.jit.load(path, map_location="cpu").eval()
                elif form["format"] == "state_dict":
                    model = build().eval()
                    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
                else:
                    raise ValueError(f"unknown format {form['format']!r}")
                got, want = model(sample["input"].clone()), sample["output"]
            same = got.shape == want.shape and got.dtype == want.dtype
            if not same or not bool(((got == want) | ((got - want).abs() <= tolerance)).all()):
                raise ValueError("another answer than the sample's")
            return model, failed
        except Exception as error:
            failed.append((form["file"], str(error) or type(error).__name__))
    raise LoadError(f"no form works: {failed}")


@exercise(
    "15-05.5",
    "A loader that goes on",
    points=25,
    demands=12,
    stand_in=lambda: _load_shipped,
    stand_in_name="a load_shipped of the checks",
)
def load_shipped(trial: Trial, answer: Any) -> None:
    """`answer(folder, build, tolerance)` gives the first form that works, and what failed before it."""
    with tempfile.TemporaryDirectory() as root:
        _hold_loader(trial, answer, root)


def _hold_loader(trial: Trial, answer: Any, root: str) -> None:
    reference, forms, x, want = _whole()
    other = torch.randn(7, 6)
    with torch.no_grad():
        wanted = reference(other)
    good = ("state_dict", "good.pt", forms["state_dict"])
    caught: list[str] = []
    left: list[tuple[bool, bool]] = []

    def load(*given: tuple[str, str, bytes | None], sample: object = None, build: Any = _Net, **options: Any) -> Any:
        folder = _folder(root, given, sample)
        return load_from(folder, build, **options)

    def load_from(folder: Path, build: Any, **options: Any) -> Any:
        with quiet() as warned:
            try:
                return answer(folder, build, **options)
            finally:
                heard = [w for w in warned if not issubclass(w.category, _UNHEARD)]
                caught.extend(f"{w.category.__name__}: {w.message}"[:120] for w in heard)
                warned.clear()
                warnings.warn("of the check's own", UserWarning, stacklevel=1)
                left.append((bool(warned), torch.is_grad_enabled()))
                torch.set_grad_enabled(True)

    def skips(case: str, form: tuple[str, str, bytes | None], hint: str = "", **options: Any) -> None:
        """The form is left out and the good one taken."""
        try:
            model, failed = load(form, good, **options)
        except NotImplementedError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"[:300]
            trial.that(f"{case}, a good form behind it", False, expected="the good form", got=said, hint=hint)
            return
        names = [name for name, _ in failed]
        trial.equal(f"files in the list, {case}", names, [form[1]], hint=hint)
        with torch.no_grad():
            trial.close(f"the form behind it answers, {case}", model(other), wanted, atol=1e-5)

    first = load(("export", "model.pt2", forms["export"]), good)
    trial.needs(
        "returns a model and a list",
        isinstance(first, tuple) and len(first) == 2 and callable(first[0]) and isinstance(first[1], list),
        expected="a tuple of a callable and a list",
        got=repr(type(first)),
        hint="read the task's first bullet",
    )
    with trial.group("the model is in evaluation mode", hint="in which mode is what you return?", see=3):
        for format_ in ("torchscript", "state_dict"):
            data = _form("as it is", format_, training=True)
            model, failed = load(
                (format_, "a train.pt", data), ("export", "later.pt2", forms["export"]), build=lambda: _Net().train()
            )
            trial.equal(f"failed before it, {format_} saved in training mode", failed, [])
            with torch.no_grad():
                trial.close(f"another batch, {format_}", model(other), wanted, atol=1e-5)
    with trial.group("the first form of the manifest that works is returned", hint="which form comes first?", see=1):
        # all within the tolerance, and told apart by their answers
        cases = {f: f"off by {i} roundings" for i, f in enumerate(_FORMATS)}
        shifted = {f: _changed(*_OTHERS[case]) for f, case in cases.items()}
        near = {f: _form(case, f) for f, case in cases.items()}
        for first_one, second, third in itertools.permutations(_FORMATS):
            given = [(f, name, near[f]) for name, f in zip("cab", (first_one, second, third), strict=True)]
            model, failed = load(*given)
            trial.equal(f"nothing failed before {first_one}", failed, [])
            with torch.no_grad():
                off = [(shifted[f](other) - model(other)).abs().max().item() for f in _FORMATS]
                trial.equal("the form that was taken", _FORMATS[off.index(min(off))], first_one)
                trial.close(f"{first_one}: the sample's input", model(x), shifted[first_one](x), atol=5e-6)
                trial.close(f"{first_one}: another batch size", model(other), shifted[first_one](other), atol=5e-6)

        def unbuilt() -> nn.Module:
            raise RuntimeError("nothing to build")

        form = ("export", "a.pt2", forms["export"])
        _, failed = trial.call(
            "a form without build()", lambda: load(form, good, build=unbuilt), hint="which forms need build()?"
        )
        trial.equal("nothing failed before a form that needs no build()", failed, [])
    with trial.group("a file that can't be loaded doesn't stop the search", hint="what stops the loop?", see=1):
        for format_ in _FORMATS:
            for case, content in (
                ("junk", b"no model at all" * 20),
                ("cut off", forms[format_][: len(forms[format_]) // 2]),
                ("empty", b""),
                ("missing", None),
            ):
                skips(f"{case}: {format_}", (format_, f"bad {case}.pt", content))
        skips("from the future", ("export", "future.pt2", _from_the_future(forms["export"])))
        skips("another format than told", ("export", "another.pt2", forms["state_dict"]))
        skips("an unknown format", ("safetensors", "a model.st", forms["state_dict"]))
        for error in (RuntimeError("nothing to build"), TypeError("odd"), ImportError("no such library")):

            def fails(error: Exception = error) -> nn.Module:
                raise error

            _, failed = load(good, ("export", "later.pt2", forms["export"]), build=fails)
            trial.equal(f"build() raises a {type(error).__name__}", [name for name, _ in failed], ["good.pt"])
    with trial.group("each key of a state dict has to fit", hint="what does load_state_dict say?"):
        for case, change in (
            ("a key is missing", lambda s: s.pop("fc.bias")),
            ("a key too many", lambda s: s.update(more=torch.zeros(1))),
            ("other shapes", lambda s: s.update({"fc.bias": torch.zeros(1)})),
        ):
            state = dict(reference.state_dict())
            change(state)
            file = io.BytesIO()
            torch.save(state, file)
            skips(case, ("state_dict", "bad keys.pt", file.getvalue()))
    with trial.group("a form that answers otherwise is passed over", hint="what is compared, and how?", see=2):
        for format_ in _FORMATS:
            shapes = ("one row", "another shape", "another dtype")  # what the class decides
            cases = ("other weights", "differences that cancel", "NaN", *shapes * (format_ != "state_dict"))
            for case in cases:
                skips(f"{case}: {format_}", (format_, "an other.pt", _form(case, format_)))
        form = ("torchscript", "an other.pt", _form("writes", "torchscript"))
        skips("a form that writes into its input", form, hint="what becomes of the tensor that a form is given?")
    with trial.group("differences are held against tolerance", hint="which number does tolerance bound?", see=2):
        shift = _changed(*_OTHERS["off by 0.01"])
        trial.equal("no difference, tolerance 0", load(good, tolerance=0.0)[1], [])
        near = ("torchscript", "a near.pt", _form("off by 0.01", "torchscript"))
        words = {True: "the form is taken", False: "the form is passed over"}
        with torch.no_grad():
            gap = (shift(x) - want).abs().max().item()
        for tolerance, taken in ((gap * 0.9, False), (gap * 1.1, True), (1.0, True)):
            _, failed = load(near, good, tolerance=tolerance)
            name, got = f"a difference of {gap:.3g}, tolerance {tolerance:.3g}", not failed
            trial.that(name, got == taken, expected=words[taken], got=words[got])
        large = {"input": x, "output": want + 1e4}
        scaled = _changed(*_OTHERS["large"])
        state = _bytes_of(_changed(lambda m: m.norm.bias.add_(1e4 + 0.05)), "state_dict")
        _, failed = load(
            ("state_dict", "off.pt", state),
            ("torchscript", "on.pt", _form("large", "torchscript")),
            sample=large,
            tolerance=0.02,
        )
        trial.equal("passed over: large numbers, off by 0.05, tolerance 0.02", [n for n, _ in failed], ["off.pt"])
        with torch.no_grad():
            large = {"input": x, "output": scaled(x)}
        state = _bytes_of(_changed(lambda m: m.norm.bias.add_(1e4 + 0.005)), "state_dict")
        on = ("state_dict", "on.pt", _bytes_of(scaled, "state_dict"))
        _, failed = load(("state_dict", "off.pt", state), on, sample=large, tolerance=1e-4)
        trial.equal("passed over: large numbers, off by 0.005, tolerance 1e-4", [n for n, _ in failed], ["off.pt"])
        tiny = ("torchscript", "a tiny.pt", _form("off by 5e-4", "torchscript"))
        _, failed = load(tiny, good)
        trial.equal("passed over: off by 5e-4, no tolerance given", [n for n, _ in failed], ["a tiny.pt"])
        ends = torch.tensor([math.inf, -math.inf])
        infinite, turned, empty = (
            _changed(lambda m, at=at: m.norm.bias[1:3].copy_(at)) for at in (ends, -ends, ends * math.nan)
        )
        beside, off = (_changed(lambda m, by=by: m.norm.bias.copy_(infinite.norm.bias).add_(by)) for by in (2e-5, 1.0))
        for case, sample_of, form, taken in (
            ("equal infinities", infinite, infinite, True),
            ("equal infinities, the others off by 2e-5, tolerance 1e-4", infinite, beside, True),
            ("equal infinities, the others off by 1", infinite, off, False),
            ("infinities of another sign", infinite, turned, False),
            ("infinities in the sample alone", infinite, reference, False),
            ("infinities in the form alone", reference, infinite, False),
            ("NaN in both", empty, empty, False),
        ):
            with torch.no_grad():
                sample = {"input": x, "output": sample_of(x)}
            data = _bytes_of(form, "state_dict")
            said = _error_of(lambda data=data, sample=sample: load(("state_dict", "a.pt", data), sample=sample))
            got, hint = said is None, "what does the task say of infinities and of NaN?"
            trial.that(case, got == taken, expected=words[taken], got=words[got], hint=hint, see=2)
    with trial.group("state dict and sample run no code", hint="how is the pickle read?"):
        _RUNS.clear()
        file = io.BytesIO()
        torch.save({**reference.state_dict(), "extra": _Program()}, file)
        for format_ in _FORMATS:
            skips(f"a pickle as {format_}", (format_, "a pickle.pt", file.getvalue()))
        trial.equal("what was run", list(_RUNS), [])
        _error_of(lambda: load(good, sample={"input": x, "output": want, "extra": _Program()}))
        trial.equal("what the sample has run", list(_RUNS), [])
    with trial.group(
        "if none works LoadError names each file and its reason", hint="what is raised, and what does it say?"
    ):
        bad = [("export", "one.pt2", b"junk" * 9), ("state_dict", "two.pt", b""), ("torchscript", "three.x", b"junk")]
        bad.append(("torchscript", "four.pt", _form("far off", "torchscript")))
        for some in (bad, bad[:1], []):
            said = _error_of(lambda some=some: load(*some))
            trial.equal(f"{len(some)} form{'s' * (len(some) != 1)}", _named(said), "LoadError")
            lacking = [name for _, name, _ in some if name not in str(said)]
            trial.equal("files that the message leaves out", lacking, [])
        folder = _folder(root, [*bad, good])
        _, failed = load_from(folder, _Net)
        listed = json.loads((folder / "manifest.json").read_text())
        listed["forms"].pop()
        (folder / "manifest.json").write_text(json.dumps(listed))
        said = str(_error_of(lambda: load_from(folder, _Net)))
        # a message may hold the list's repr: letters and digits are compared, up to the first odd character
        plain = lambda text: re.sub(r"[^A-Za-z0-9]", "", re.split(r"[\n\x1b]|\\n|\\x1b", text)[0])[:25]  # noqa: E731
        flat = re.sub(r"[^A-Za-z0-9]", "", said)
        for name, reason in failed:
            trial.that(f"the reason of {name}", plain(str(reason)) in flat, expected=str(reason)[:200], got=said[:400])
        reasons = {name: str(reason) for name, reason in failed}
        apart = reasons.get("one.pt2") != reasons.get("four.pt")
        trial.that("junk and another answer", apart, expected="two reasons", got=reasons.get("four.pt"))
    with trial.group("the reasons are texts", hint="what are the pairs made of?"):
        _, failed = load(("export", "a.pt2", b"junk"), ("torchscript", "b.pt", b""), good)
        for pair in failed:
            texts = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(t, str) and t for t in pair)
            trial.that("a pair", texts, expected="(file name, reason)", got=repr(pair))
        trial.equal("the files, in order", [pair[0] for pair in failed], ["a.pt2", "b.pt"])
    with trial.group("an interrupt goes on at once", hint="which exceptions do you catch?"):

        def interrupted() -> nn.Module:
            raise KeyboardInterrupt

        for case, build in (("building", interrupted), ("the form computes", _Interrupted)):
            try:
                load(good, ("export", "later.pt2", forms["export"]), build=build)
            except KeyboardInterrupt:
                stopped = True
            else:
                stopped = False
            trial.that(f"while {case}", stopped, expected="KeyboardInterrupt goes on", got="it is caught")
    trial.equal("no warning gets out", sorted(set(caught)), [], hint="which call warns, and who hears it?")
    trial.that(
        "warning filters and grad mode stay",
        all(heard and grad for heard, grad in left),
        expected="a later warning that is heard, grad mode on",
        got="warnings silenced" if not all(heard for heard, _ in left) else "grad mode off",
        hint="what did you switch for good?",
    )
