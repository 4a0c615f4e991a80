"""Checks of the exercises in 15-05, TorchScript & JIT Compilation."""

import copy
import functools
import io
import json
import math
import random
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo.exc
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from shared import quiet
from shared.checks.comparing import difference
from shared.checks.exercise import exercise
from shared.checks.trial import Trial
from shared.checks.words import Sample, derived, gradients, outcome, raises, samples, unchanged

# ---- 15-05.1


_FIVE = {
    "Centre": lambda x: x - x.sum(dim=0) / len(x),
    "FillNaN": lambda x: torch.nan_to_num(x) if x.isnan().any() else x * 1,
    "Front": lambda x: x[: min(x.shape[0], 8)] * 2,
    "Pick": lambda x: x[torch.arange(x.shape[0]), x.abs().argmax(dim=1)],
    "Digits": lambda x: x.round(decimals=8 if x.dtype == torch.float64 else 2),
}
_RIGHT = ("Front", "Pick")


@functools.cache
def _traces() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    example = torch.randn(16, 4, generator=generator)
    with quiet():
        return {name: torch.jit.trace(function, example) for name, function in _FIVE.items()}


def _silently_wrong(name: str, x: Tensor) -> str:
    """What the trace of this model does with an input."""
    x = x.detach().cpu()
    try:
        got = _traces()[name](x.clone())
    except RuntimeError:
        return "an error from the trace"
    want = _FIVE[name](x.clone())
    same = difference(got, want, exact=False, rtol=0.0, atol=1e-3) is None
    return "the same result of both" if same else "different results"


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
    given = {name: x for name, x in found.items() if x is not None}
    with trial.group("inputs are of the kind that the traces are used for", hint="read the task's first lines"):
        for name, x in given.items():
            got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            expected = "a float32 or float64 tensor of shape (n, 4) with n from 1 on"
            fits = re.fullmatch(r"torch\.float(32|64) of shape \([1-9]\d*, 4\)", got) is not None
            trial.that(name, fits, expected=expected, got=got)
    hint = "run the model and the trace on it and compare"
    with trial.group("on each input the trace is silently wrong", hint=hint, see=1):
        for name, x in given.items():
            got = _silently_wrong(name, x)
            expected = "different results"
            see = 2 if name == "Front" else 1
            trial.that(name, got == expected, expected=expected, got=got, hint=hint, see=see)
    with trial.group("None stands for a trace that is right for all", hint="which input goes another way?", see=1):
        for name in found.keys() - given.keys():
            trial.that(name, name in _RIGHT, expected="an input on which the trace is wrong", got="None")


# ---- 15-05.2


class _Report(nn.Module):
    """As in the lesson; `scale` is an argument like others."""

    def __init__(self, labels: list[str], limit: float | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(4, len(labels))
        self.labels = labels
        self.limit = limit

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> tuple[Tensor, dict, str]:
        scores = self.fc(x) * scale
        if mask is not None:
            scores = scores.masked_fill(mask, -np.inf)
        if self.limit is not None:
            scores = scores.clamp(max=self.limit)
        names = [self.labels[i] for i in scores.argmax(dim=1).tolist()]
        counts: dict[str, int] = {}
        for name in names:
            counts[name] = counts.get(name, 0) + 1
        first = names[0] if names else "nothing"
        return scores, counts, f"{len(x)} rows, {len(counts)} labels, first: {first}"


def _scripted(trial: Trial, module: Any) -> Any:
    try:
        return torch.jit.script(module)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        decisive = [line for line in lines if line.startswith(("Expected a value", "Could not match"))]
        said = f"{type(error).__name__}: {(decisive or lines)[0]}"
        hint = "which construct does the error name?"
        see = 2 if "tolist" in said else 1
        trial.needs("torch.jit.script accepts it", False, expected="no exception", got=said, hint=hint, see=see)


def _bytes(save: Callable[[Any, Any], object], thing: Any) -> bytes:
    file = io.BytesIO()
    save(thing, file)
    return file.getvalue()


def _saved(module: Any) -> Any:
    return torch.jit.load(io.BytesIO(_bytes(torch.jit.save, module)))


def _reports(fc: nn.Linear) -> list[Sample]:
    """Calls with and without mask and scale, for several numbers of rows."""
    cases = []
    width = fc.out_features
    for rows in (0, 1, 2, random.randint(3, 9)):
        x = torch.randn(rows, 4, dtype=fc.weight.dtype, requires_grad=True)
        mask = torch.rand(rows, width) < 0.4
        mask[: rows // 2] = True  # nothing is left of these rows
        cases += [
            Sample(f"{rows} rows", x),
            Sample(f"{rows} rows, a mask", x, mask),
            Sample(f"{rows} rows, a mask of one row", x, mask=torch.arange(width) == 1),
            Sample(f"{rows} rows, scale -1.7", x, scale=-1.7),
            Sample(f"{rows} rows, a mask and scale 0.4", x, mask, 0.4),
        ]
    return cases


def _of_scores(result: Any, x: Tensor, *rest: Any) -> Any:
    """The gradient of the scores, without infinite ones."""
    return gradients(result[0].nan_to_num(0.0, 0.0, 0.0), x)


@exercise("15-05.2", "A module that can be scripted", points=20, demands=3)
def scriptable(trial: Trial, answer: Any) -> None:
    """`answer(labels, limit)` is a module; what it returns is what _Report returns, scripted or not."""
    pairs = []
    several = ["b", "a", "b", "c"]
    for labels, limit in ((["cat", "dog", "cow"], None), (several, 0.0), (several, 0.3), (["only"], -0.5)):
        options = {} if limit is None else {"limit": limit}
        pairs.append((_Report(labels, limit), answer(list(labels), **options)))
    for reference, mine in pairs:
        with trial.group("a state dict of Report loads", hint="compare the names of parameters"):
            mine.load_state_dict(reference.state_dict())
    for module in pairs[-1]:
        module.double()
    plain = "as plain Python it returns what Report returns"
    compiled = "scripted, or read from the file, it returns what Report returns"
    with quiet():
        scripts = [_scripted(trial, mine) for _, mine in pairs]
        saving = "the scripted module can be saved"
        hint = "is there Python left in it?"
        files = [trial.call(saving, partial(_saved, script), hint=hint) for script in scripts]
    for item, forms in ((plain, [mine for _, mine in pairs]), (compiled, scripts), (compiled, files)):
        with trial.group(item, hint="run Report on the same input"), quiet():
            for (reference, _), form in zip(pairs, forms, strict=True):
                cases = _reports(reference.fc)
                for case in cases:
                    case.text += f", labels {reference.labels}, limit {reference.limit}"
                samples(trial, form, reference, cases)
                samples(trial, form, reference, cases, look=_of_scores)


# ---- 15-05.3


class _Model(nn.Module):
    """One function, and a count of its calls."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.function(x)


def _noisy() -> _Model:
    """A layer of each kind that depends on the mode."""
    return _Model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(0.5))))


class _Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y * 3


def _loop(x: Tensor) -> Tensor:
    for i in range(x.shape[0]):
        x = x + i
    return x


def _raise(error: BaseException) -> None:
    raise error


_NOT_FOR_ALL = {
    "four parts": (4, lambda x: x.reshape(4, -1).sum(dim=1)),
    "a loop": (3, _loop),
}
_NOT_FOR_ONE = {
    "one row gives another result": (1, lambda x: x * 2 if x.shape[0] > 1 else x * 2.01),
    "one row raises in the model": (4, lambda x: x * 2 if x.shape[0] > 1 else _raise(ZeroDivisionError("spread"))),
    "one row raises in the program": (3, lambda x: x + x[1] if x.shape[0] > 1 else x + x[0]),
}


def _export_batches(model: nn.Module, *example: Tensor) -> ExportedProgram:
    """Stand-in of exercise 3."""
    model = copy.deepcopy(model).eval()
    one = [x[:1] for x in example]
    two = tuple(torch.cat([x, x]) for x in one)
    sizes = tuple({0: Dim("batch", min=1)} for _ in one)
    try:
        program = torch.export.export(copy.deepcopy(model), two, dynamic_shapes=sizes)
    except torch._dynamo.exc.UserError as error:
        raise ValueError(f"the batch is fixed: {error}") from None
    try:
        got = copy.deepcopy(program.module())(*copy.deepcopy(one))
        torch.testing.assert_close(got, model(*copy.deepcopy(one)), rtol=1e-4, atol=1e-6, equal_nan=True)
    except Exception as error:
        raise ValueError(f"a batch of one row: {error}") from None
    return program


@exercise(
    "15-05.3",
    "Export for every batch",
    points=20,
    demands=8,
    stand_in=lambda: _export_batches,
    stand_in_name="an export_batches of the checks",
)
def export_batches(trial: Trial, answer: Any) -> None:
    """`answer(model, *example)` exports for any batch size; the model itself says what is right."""

    def export(model: nn.Module, *example: Tensor) -> Any:
        with quiet():
            return answer(model, *example)

    linear = nn.Linear(4, 3)
    program = export(linear, torch.randn(5, 4))
    kind = type(program).__name__
    hint = "what does the task say is returned?"
    trial.needs("the result", kind == "ExportedProgram", expected="an ExportedProgram", got=kind, hint=hint)
    with trial.group("takes every batch size, whatever the example's", hint="what is special about this size?", see=2):
        for rows in (5, 2, 1):
            program = export(linear, torch.randn(rows, 4))
            for size in program.range_constraints.values():
                every = size.lower <= 1 and size.upper > 10**9
                got = f"from {size.lower} to {size.upper}"
                trial.that(f"exported with {rows}", every, expected="sizes from 1 on, and no largest", got=got)
            inputs = [Sample(f"{n} rows, exported with {rows}", torch.randn(n, 4)) for n in (1, 2, 3, 33)]
            samples(trial, program.module(), linear, inputs)
    with trial.group("NaN in both and rounding are no difference", hint="what does agree say?"):
        rounds = _Model(lambda x: (x / x.std(dim=0), x * (1e6 + 0.5 * torch.compiler.is_exporting())))
        samples(trial, export(rounds, torch.randn(7, 4)).module(), rounds, [Sample("5 rows", torch.randn(5, 4))])
    with trial.group("the batch is the same in all tensors, other sizes stay", hint="which sizes may vary?"):
        two = _Two()
        module = export(two, torch.randn(3, 4), torch.randn(3, 2, 2)).module()
        samples(trial, module, two, [Sample("5 rows", torch.randn(5, 4), torch.randn(5, 2, 2))])
        for shapes in (((3, 4), (5, 2, 2)), ((3, 5), (3, 2, 2)), ((3, 4), (3, 2, 1))):
            how = outcome(lambda shapes=shapes: module(*(torch.randn(shape) for shape in shapes)))
            trial.that(f"shapes {shapes}", how != "no exception", expected="an error", got="a result")
    with trial.group("is exported in evaluation mode", hint="in which mode does the model run, and is it exported?"):
        noisy = _noisy()
        for _ in range(3):
            noisy(torch.randn(6, 4))
        same = export(noisy, torch.randn(6, 4)).module()
        samples(trial, same, copy.deepcopy(noisy).eval(), [Sample("dropout and batch norm", torch.randn(9, 4))])
    with trial.group("model and example stay as they are", hint="who works with the original?", see=1, free=True):
        mixed = _noisy()
        mixed.function[1].eval()
        mixed.function[2][0].p = 0.0  # in training mode it would differ from its program, and be refused
        writes = _Model(lambda x: x.mul_(2) + 1)
        for case, model in (("a model in training", mixed), ("a model that writes into its input", writes)):
            x = torch.randn(6, 4)
            with unchanged(trial, case, model, x):
                export(model, x)
    for item, cases in (
        ("a model that can't take every size raises ValueError", _NOT_FOR_ALL),
        ("a model that differs from its program on one row raises ValueError", _NOT_FOR_ONE),
    ):
        with trial.group(item, hint="what do model and program do, and does the model stay as it is?", see=3):
            for case, (rows, function) in cases.items():
                model = _Model(function)
                x = torch.randn(rows, 4)
                with unchanged(trial, case, model, x):
                    raises(trial, case, lambda m=model, x=x: export(m, x), ValueError)
    with trial.group("other errors go on as they are", hint="which errors do you replace?", see=3):
        broken = _Model(lambda x: _raise(RuntimeError("a batch of images")))
        raises(trial, "an error of the model", lambda: export(broken, torch.randn(2, 4)), RuntimeError)
        by_data = _Model(lambda x: x if x.mean() > 0 else x * 2)
        how = outcome(lambda: export(by_data, torch.randn(2, 4)))
        trial.that("an if on the data", how != "ValueError", expected="the error of torch.export", got=how)


# ---- 15-05.4


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


def _scans(n: int) -> dict[str, Tensor]:
    """Batches (n, 1, 4, 5) for each way and each threshold."""
    x = torch.rand(n, 1, 4, 5)
    point = torch.zeros_like(x)
    point[0, 0, 0, 0] = x.numel()  # the mean is 1
    return {
        "a negative": 0.6 + 0.3 * x,
        "a nearly white negative": 1 - 0.12 * x,
        "an ordinary scan": 0.15 + 0.3 * x,
        "a dark scan with negative pixels": 0.2 * x - 0.05,
        "a dark scan with bright pixels": (x > 0.97) * 0.9 + 1e-3,
        "a level of exactly 0.5": 0.5 * point,
        "a level of exactly 0.1": 0.1 * point,
    }


_WORK = {
    "inverts": {"rsub", "sub", "neg"},
    "makes brighter": {"clamp", "minimum", "where", "lerp"},
    "asks torch.cond": {"<built-in function getitem>"},  # what takes its result
    "computes": {"add", "mul", "div"},  # for either of the first two
}


def _work(graph: torch.fx.Graph, size: int) -> list[str]:
    """What is done with as many numbers as the images have."""
    found = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.numel() == size:
            found.add(str(node.target).removeprefix("aten.").partition(".")[0])
    return [work for work, names in _WORK.items() if names & found]


def _refusal_of_export(error: Exception) -> tuple[str, int | None]:
    """What an error of torch.export says, and the number of the hint that helps."""
    text = str(error).rpartition("Got graph break/error:")[2].strip()  # that of torch.cond stands behind
    said = f"{type(error).__name__}: {text[:240]}"
    if "alias" in text:
        return said, 3
    if re.search("mutat|side effect|buffer|attribute", text):
        return f"{said} (a branch writes to a tensor or an attribute from outside)", 2
    return said, 1 if "data-dependent" in text else None


@exercise(
    "15-05.4",
    "Three ways through a model",
    points=20,
    demands=5,
    stand_in=lambda: _CondEnhance,
    stand_in_name="a CondEnhance of the checks",
)
def cond_enhance(trial: Trial, answer: Any) -> None:
    """`answer(body)` is an Enhance with its branches in the graph; Enhance itself says what is right."""
    enhance = derived(trial, answer, "Enhance")
    for example, sizes in (("an ordinary scan", None), ("a negative", {0: Dim("batch")})):
        body = nn.Sequential(nn.Flatten(), nn.Linear(20, 3)).eval()
        mine = answer(body).eval()
        x = _scans(3)[example]
        case = f"exported with {example}, {'one size' if sizes is None else 'any size'}"
        with trial.group("torch.export accepts it", free=True):
            try:
                with quiet():
                    program = torch.export.export(mine, (x,), dynamic_shapes=None if sizes is None else (sizes,))
            except NotImplementedError:
                raise
            except Exception as error:
                said, see = _refusal_of_export(error)
                hint = "which rule of torch.cond is broken, and in which branch?"
                trial.that(case, False, expected="a program", got=said, hint=hint, see=see)
                return
        with trial.group(
            "each way is a branch of torch.cond", hint="what runs for which kind of scan?", see=1, free=True
        ):
            if sizes is None:
                for name, part in program.graph_module.named_modules():
                    if isinstance(part, torch.fx.GraphModule):
                        work = _work(part.graph, x.numel())
                        one = work[:2] != ["inverts", "makes brighter"]
                        if not name or "asks torch.cond" in work:
                            one = set(work) <= {"asks torch.cond"}
                        where = name or "outside of the branches"
                        trial.that(where, one, expected="one of the three ways", got=", ".join(work))
        module = program.module()
        reference = enhance(body)
        start = int(module.dark)
        hint = "compare with Enhance, way by way"
        counts = []
        with trial.group("the exported program takes each way by itself", hint=hint, see=1), torch.no_grad():
            for n in (3,) if sizes is None else (1, 5):
                for kind, scan in _scans(n).items():
                    got = module(scan)
                    want = reference(scan)
                    counts.append((f"{kind}, {n} in the batch, {case}", int(module.dark) - start, int(reference.dark)))
                    trial.close(counts[-1][0], got, want)
        with trial.group("dark counts dark batches only", hint=hint, see=2, free=True):
            for count in counts:
                trial.equal(*count)
    with trial.group("as plain Python it does what Enhance does", hint="compare with Enhance, way by way", see=1):
        body = nn.Sequential(nn.Flatten(), nn.Linear(20, 3)).eval()
        mine = answer(body)
        reference = enhance(body)
        with quiet(), torch.no_grad():
            for kind, scan in _scans(3).items():
                trial.close(kind, mine(scan), reference(scan))
                trial.equal(f"state dict after {kind}", dict(mine.state_dict()), dict(reference.state_dict()))


# ---- 15-05.5


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.fc(x)))


_RUNS: list[str] = []


def _note_run(where: str) -> Tensor:
    _RUNS.append(where)
    return torch.zeros(1)


class _Program:
    """Unpickling it calls a function."""

    def __reduce__(self) -> tuple:
        return _note_run, ("a pickle's function was called",)


def _written(model: nn.Module, format_: str) -> bytes:
    """One form of a model; an exported program is always in evaluation mode."""
    if format_ == "export":
        program = torch.export.export(model.eval(), (torch.randn(4, 6),), dynamic_shapes=({0: Dim("batch")},))
        return _bytes(torch.export.save, program)
    if format_ == "torchscript":
        return _bytes(torch.jit.save, torch.jit.script(model))
    return _bytes(torch.save, model.state_dict())


def _shifted(model: nn.Module, shift: float | Tensor) -> nn.Module:
    """A copy whose answers are larger by a number."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.norm.bias.add_(shift)
    return model


class LoadError(RuntimeError):
    """No form of a shipped model works."""


def _load_shipped(folder: Path, build: Callable[[], nn.Module], tolerance: float = 1e-4) -> tuple[Any, list]:
    """Stand-in of exercise 5."""

    def fill(path: Path) -> nn.Module:
        model = build()
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return model.eval()

    load = {"state_dict": fill, "torchscript": lambda path: torch.jit.load(path, map_location="cpu").eval()}
    load["export"] = lambda path: torch.export.load(path).module()
    manifest = json.loads((folder / "manifest.json").read_text())
    sample = torch.load(folder / manifest["sample"], map_location="cpu", weights_only=True)
    failed = []
    for form in manifest["forms"]:
        try:
            with quiet(), torch.no_grad():
                model = load[form["format"]](folder / form["file"])
                torch.testing.assert_close(model(sample["input"]), sample["output"], rtol=0, atol=tolerance)
            return model, failed
        except Exception as error:
            failed.append((form["file"], f"{type(error).__name__}: {error}"))
    raise LoadError(f"no form works: {failed}")


@exercise(
    "15-05.5",
    "A loader that goes on",
    points=25,
    demands=8,
    stand_in=lambda: _load_shipped,
    stand_in_name="a load_shipped of the checks",
)
@quiet()
@torch.no_grad()
def load_shipped(trial: Trial, answer: Any) -> None:
    """`answer(folder, build, tolerance)` gives the first form that works, and what failed before it."""
    right = _Net().eval().requires_grad_(False)
    right.norm.running_mean.normal_()
    right.norm.bias.fill_(100.0)  # so that a relative tolerance is a generous one
    sample = {"input": torch.randn(4, 6), "output": Tensor()}
    sample["output"] = right(sample["input"])
    others = torch.randn(7, 6)
    forms = {format_: _written(right, format_) for format_ in ("export", "torchscript", "state_dict")}
    good = ("state_dict", forms["state_dict"])

    def load(*given: tuple[str, bytes | None], build: Any = _Net, more: Any = None, **options: Any) -> Any:
        """What the answer makes of a folder with these forms: (format, content)."""
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root)
            torch.save({**sample, "more": more}, folder / "the sample.pt")
            listed = []
            for letter, (format_, content) in zip("cabd", given, strict=False):
                listed.append({"format": format_, "file": f"{letter}.bin"})
                if content is not None:
                    (folder / f"{letter}.bin").write_bytes(content)
            (folder / "manifest.json").write_text(json.dumps({"sample": "the sample.pt", "forms": listed}))
            return answer(folder, build, **options)

    def takes(case: str, number: int, *given: tuple[str, bytes | None], like: Any = right, **options: Any) -> None:
        """The form with this number is taken, and the ones before it are listed."""
        model, failed = load(*given, **options)
        trial.equal(f"files in the list, {case}", [name for name, _ in failed], ["c.bin"][:number])
        trial.close(f"another batch, {case}", model(others), like(others), rtol=0, atol=1.6e-5)

    first = load(("export", forms["export"]), good)
    pair = isinstance(first, tuple) and len(first) == 2
    hint = "what does the task say is returned?"
    trial.needs("returns a model and a list", pair, expected="a tuple of two", got=repr(type(first)), hint=hint)
    with trial.group("the model is in evaluation mode", hint="in which mode is what you return?", see=3):
        for format_ in ("torchscript", "state_dict"):
            noisy = _written(copy.deepcopy(right).train(), format_)
            takes(f"{format_} in training mode", 0, (format_, noisy), good, build=lambda: _Net().train())
    with trial.group("the first form that works is returned", hint="which form comes first?", see=1):
        # told apart by their answers, all within the tolerance
        shifted = {format_: _shifted(right, 4e-5 * i) for i, format_ in enumerate(forms)}
        near = {format_: _written(model, format_) for format_, model in shifted.items()}
        for order in (["torchscript", "state_dict", "export"], ["state_dict", "export", "torchscript"]):
            takes(f"in the order {order}", 0, *((f, near[f]) for f in order), like=shifted[order[0]])
    with trial.group("a file that can't be loaded doesn't stop the search", hint="what stops the loop?", see=1):
        takes("junk in a file", 1, ("export", b"no model at all" * 20), good)
        takes("half of a file", 1, ("torchscript", forms["torchscript"][:1000]), good)
        takes("no file", 1, ("state_dict", None), good)
        takes("an unknown format", 1, ("safetensors", forms["state_dict"]), good)
        takes("build() raises", 1, good, ("export", forms["export"]), build=lambda: _raise(ImportError("no library")))
    with trial.group("each key of a state dict has to fit", hint="what does load_state_dict say?"):
        less = {name: value for name, value in right.state_dict().items() if name != "norm.running_var"}
        takes("a key is missing", 1, ("state_dict", _bytes(torch.save, less)), good)
    with trial.group("a form that answers otherwise is passed over", hint="what is compared, and how?", see=2):
        odd = {
            "NaN": lambda x: right(x) * torch.tensor([1.0, 1.0, math.nan, 1.0, 1.0]),
            "another shape": lambda x: right(x)[None],
            "another dtype": lambda x: right(x).double(),
        }
        for case, function in odd.items():
            takes(case, 1, ("torchscript", _bytes(torch.jit.save, torch.jit.trace(function, others))), good)
        two = _shifted(right, 1.5e-4 * torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0]))  # the mean stays
        takes("two numbers are off by 1.5e-4", 1, ("state_dict", _written(two, "state_dict")), good)
        off = _shifted(right, 0.01)
        takes("off by 0.01, tolerance 0.02", 0, ("state_dict", _written(off, "state_dict")), like=off, tolerance=0.02)
    with trial.group("state dict and sample run no code", hint="how is the pickle read?"):
        _RUNS.clear()
        pickled = _bytes(torch.save, {**right.state_dict(), "extra": _Program()})
        takes("a pickle with a program", 1, ("state_dict", pickled), ("export", forms["export"]))
        outcome(lambda: load(good, more=_Program()))
        trial.equal("what state dict and sample have run", list(_RUNS), [])
    item = "if none works LoadError names each file and its reason"
    with trial.group(item, hint="what is raised, and what does it say?"):
        far = _written(_shifted(right, 3.0), "torchscript")
        bad = [("export", b"junk" * 9), ("state_dict", b""), ("torchscript", far)]
        _, failed = load(*bad, good)
        texts = {reason for _, reason in failed if isinstance(reason, str)}
        trial.equal("different texts for three reasons", len(texts), 3)
        trial.equal("the exception", outcome(lambda: load(*bad)), "LoadError")
        for name, reason in failed:
            for part in (name, re.split(r"\W", str(reason))[0]):
                raises(trial, f"{name} and its reason", lambda: load(*bad), RuntimeError, part)
    with trial.group("Ctrl-C stops the search", hint="which exceptions do you catch?"):
        try:
            load(good, ("export", forms["export"]), build=lambda: _raise(KeyboardInterrupt()))
        except KeyboardInterrupt:
            return
        trial.that("while building", False, expected="KeyboardInterrupt goes on", got="it is caught")
