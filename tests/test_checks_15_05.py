"""The checks of 15-05 accept right answers, however written, and reject what a student might really write."""

import copy
import json
import math

import torch
from answer_variants import variants
from check_protocol import CheckProtocol, idle
from torch import Tensor, nn
from torch.export import Dim

from course.exercise_form import student_source
from course.lesson_code import answers, definitions
from shared import quiet
from shared.checks import topic_15_05 as check

CHECKS = {
    "counterexamples": check.counterexamples,
    "Scriptable": check.scriptable,
    "export_batches": check.export_batches,
    "CondEnhance": check.cond_enhance,
    "load_shipped": check.load_shipped,
}
CELLS = "traced gate gate-inputs agree five five-traces report copied enhance"
GIVEN = definitions("15-05", *CELLS.split())
ANSWERS = answers("15-05", given=GIVEN)
SLUGS = ("five", "scriptable", "batches", "cond", "loader")
variant = variants("15-05", dict(zip(SLUGS, CHECKS, strict=True)), GIVEN)
RIGHT, WRONG = {}, {}


# ---------------------------------------------------------------- five traces


def found(**changes):
    """An answer that gives the right dictionary with some values replaced; `...` leaves the name out."""

    def counterexamples():
        right = {**ANSWERS["counterexamples"](), **changes}
        return {name: value for name, value in right.items() if value is not ...}

    return counterexamples


def large():
    x = torch.arange(256.0).view(64, 4)
    nan = x.clone()
    nan[17, 2] = math.nan
    digits = torch.linspace(0, 1, 4, dtype=torch.float64).repeat(3, 1)
    return {"Pick": None, "FillNaN": nan, "Centre": x, "Digits": digits, "Front": None}


RIGHT["counterexamples"] = [large, found(Centre=torch.ones(1, 4), FillNaN=torch.eye(4) * math.nan)]
WRONG["counterexamples"] = {
    "a name is missing": (found(Front=...), "five names"),
    "True for what is wrong": (found(FillNaN=True), "float32 or float64"),
    "no rows": (found(FillNaN=torch.ones(0, 4)), r"\(0, 4\)"),
    "one row without a batch": (found(Centre=torch.ones(4)), r"\(4,\)"),
    "as many rows as the example": (found(Centre=torch.ones(16, 4)), "same result of both"),
    "infinite in place of NaN": (found(FillNaN=torch.full((2, 4), math.inf)), "same result of both[\\s\\S]*Hint 1"),
    "a warning taken for a mistake": (found(Front=torch.ones(3, 4)), "same result of both[\\s\\S]*Hint 2"),
    "no warning taken for right": (found(Digits=None), "None stands"),
}

# ---------------------------------------------------------------- scriptable


class ScriptableByHelper(nn.Module):
    """The text and the counts by methods of their own; strings joined, a loop over indices."""

    def __init__(self, labels, limit=None):
        super().__init__()
        self.labels: list[str] = list(labels)
        self.fc = nn.Linear(4, len(labels))
        self.bounded = limit is not None
        self.limit = float(limit) if limit is not None else 0.0

    def count(self, names: list[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in names:
            if name not in found:
                found[name] = 0
            found[name] += 1
        return found

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0):
        scores = scale * self.fc(x)
        if mask is not None:
            scores = torch.where(mask, torch.full_like(scores, -float("inf")), scores)
        if self.bounded:
            scores = torch.clamp(scores, max=self.limit)
        names: list[str] = []
        best = scores.max(dim=1).indices
        for i in range(best.size(0)):
            names.append(self.labels[int(best[i])])
        counts = self.count(names)
        first = names[0] if len(names) > 0 else "nothing"
        return scores, counts, str(x.size(0)) + " rows, " + str(len(counts)) + " labels, first: " + first


class ScriptableFromReport(GIVEN["Report"]):
    """Derived from Report: only forward is new."""

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> tuple[Tensor, dict[str, int], str]:
        s = torch.mul(self.fc(x), scale)
        s = s if mask is None else s.masked_fill(mask, float("-inf"))
        limit = self.limit
        if limit is not None:
            s = s.clamp_max(limit)
        indices: list[int] = s.argmax(1).tolist()
        names = [self.labels[i] for i in indices]
        counts = torch.jit.annotate(dict[str, int], {})
        for name in names:
            counts[name] = counts.get(name, 0) + 1
        head = "nothing" if len(names) == 0 else names[0]
        return s, counts, "{} rows, {} labels, first: {}".format(len(x), len(counts), head)  # noqa: UP032


def scriptable(*changes):
    return variant("scriptable", *changes)


_FC = "scores = self.fc(x) * scale"
_SUPER = "        super().__init__()\n"
_FORWARD = "    def forward("
_ROWS = "    @torch.jit.ignore\n    def rows(self, x: Tensor) -> int:\n        return len(x)\n\n"
_MASKED = 'scores = scores.masked_fill(mask, -float("inf"))'
RIGHT["Scriptable"] = [ScriptableByHelper, ScriptableFromReport]
WRONG["Scriptable"] = {
    "Report itself": (GIVEN["Report"], "accepts it[\\s\\S]*Hint 1"),
    "tolist without a type": (
        scriptable(("best: list[int] =", "best =")),
        "accepts it[\\s\\S]*RuntimeError: Expected type hint[\\s\\S]*Hint 2",
    ),
    "another name": (scriptable(("self.fc", "self.linear")), "state dict of Report loads"),
    "an extra buffer": (
        scriptable((_SUPER, f'{_SUPER}        self.register_buffer("calls", torch.zeros(1))\n')),
        "state dict of Report loads",
    ),
    "Python is left in it": (
        scriptable((_FORWARD, _ROWS + _FORWARD), ("{len(x)} rows", "{self.rows(x)} rows")),
        "can be saved",
    ),
    "another default when it isn't scripted": (
        scriptable((_FC, f"scale = scale if torch.jit.is_scripting() else 1.0\n        {_FC}")),
        "as plain Python",
    ),
    "only in Python right": (
        scriptable((_FC, f"scale = 1.0 if torch.jit.is_scripting() else scale\n        {_FC}")),
        "scripted, or read from the file",
    ),
    "a limit of zero is none": (scriptable(("self.limit = limit", "self.limit = limit or None")), "limit 0.0"),
    "breaks on no rows": (scriptable(('first = "nothing"', "first = self.labels[best[0]]")), "0 rows"),
    "can't be trained": (scriptable(("self.fc(x) * scale", "self.fc(x).detach() * scale")), "without a graph"),
    "float32 whatever comes in": (scriptable(("self.fc(x) * scale", "self.fc(x).float() * scale")), "float64"),
    "a mask of all the scores' size": (scriptable((_MASKED, 'scores[mask] = -float("inf")')), "a mask of one row"),
}

# ---------------------------------------------------------------- batches


def batches_in_place(model, *example):
    """The model is switched, and everything is put back at the end."""
    kept = copy.deepcopy(model)
    size = Dim("n", min=1)
    try:
        model.eval()
        one = [x[:1] for x in example]
        pair = [torch.cat([x, x]) for x in one]
        with torch.no_grad(), quiet():
            try:
                program = torch.export.export(model, tuple(pair), dynamic_shapes=tuple({0: size} for _ in pair))
            except torch._dynamo.exc.UserError as problem:
                raise ValueError("the batch can't be of any size") from problem
            try:
                want = model(*[x.clone() for x in one])
                got = program.module()(*[x.clone() for x in one])
                torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-5)
            except Exception as problem:
                raise ValueError("no batch of one row") from problem
        return program
    finally:
        for module, earlier in zip(model.modules(), kept.modules(), strict=True):
            module.training = earlier.training
        for buffer, value in zip(model.buffers(), kept.buffers(), strict=True):
            buffer.data.copy_(value)


def batches(*changes):
    return variant("batches", *changes)


_COPY = "model = copy.deepcopy(model).eval()"
_TWO = "two = tuple(torch.cat([x, x]) for x in example)"
_SIZE = 'Dim("batch", min=1)'
_USER_ERROR = "    except torch._dynamo.exc.UserError as error:\n"
_ONE_ERROR = "    except Exception as error:\n"
_END = "    return program"
_ONE_ROW = "agree(module(*copied(one)), want)"
_CLOSE = "torch.testing.assert_close(module(*copied(one)), want, {}) is None"
RIGHT["export_batches"] = [check.export_batches.stand_in(), batches_in_place]
WRONG["export_batches"] = {
    "returns the module": (lambda *given: ANSWERS["export_batches"](*given).module(), "ExportedProgram"),
    "the example as it is": (batches((_TWO, "two = example")), "takes every batch size[\\s\\S]*Hint 2"),
    "a million rows at most": (batches((_SIZE, 'Dim("batch", min=1, max=10**6)')), "no largest"),
    "two rows at least": (batches((_SIZE, 'Dim("batch", min=2)')), "takes every batch size"),
    "AUTO": (batches((_SIZE, "Dim.AUTO")), "special about this size"),
    "every dimension may vary": (
        batches(("{0: " + _SIZE + "}", "{0: " + _SIZE + ", **dict.fromkeys(range(1, _.ndim), Dim.AUTO)}")),
        "other sizes stay",
    ),
    "a batch for each tensor": (batches((_SIZE, 'Dim(f"batch{_.ndim}", min=1)')), "same in all"),
    "as the model is": (batches((_COPY, "model = copy.deepcopy(model)")), "evaluation mode"),
    "only the outermost module": (
        batches((_COPY, "model = copy.deepcopy(model)\n    model.training = False")),
        "evaluation mode",
    ),
    "the model itself": (batches((_COPY, "model = model.eval()")), "stay as they are"),
    "one mode for all": (
        batches((_COPY, "mode = model.training\n    model.eval()"), (_END, f"    model.train(mode)\n{_END}")),
        "stay as they are",
    ),
    "modes are put back after success": (
        batches(
            (_COPY, "kept = [(m, m.training) for m in model.modules()]\n    model.eval()"),
            (_END, f"    for m, mode in kept:\n        m.training = mode\n{_END}"),
        ),
        "stay as it is",
    ),
    "one row is a view": (
        batches(("module(*copied(one))", "module(*one)"), ("model(*copied(one))", "model(*one)")),
        "stay as they are",
    ),
    "PyTorch's error goes on": (batches((_USER_ERROR, "    except NotImplementedError as error:\n")), "every size"),
    "an error for one row goes on": (batches((_ONE_ERROR, "    except AttributeError as error:\n")), "on one row"),
    "one row isn't compared": (batches((_ONE_ROW, "True")), "on one row"),
    "compared absolutely": (
        batches((_ONE_ROW, _CLOSE.format("rtol=0, atol=1e-4, equal_nan=True"))),
        "rounding are no difference",
    ),
    "NaN differs from NaN": (batches((_ONE_ROW, _CLOSE.format("rtol=1e-4, atol=1e-4"))), "NaN in both"),
    "all errors replaced": (batches((_USER_ERROR, _ONE_ERROR)), "other errors"),
}

# ---------------------------------------------------------------- cond

Enhance = GIVEN["Enhance"]


class DarkFirst(Enhance):
    """The dark way is asked for first; each branch takes what it needs."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        count = torch.cond(level < 0.1, lambda d: d + 1, lambda d: d + 0, (self.dark,))
        self.dark.copy_(count)
        prepared = torch.cond(
            level < 0.1,
            lambda x, level: (x * (0.28 / level)).clamp(max=1),
            lambda x, level: torch.cond(level > 0.5, lambda x: 1 - x, lambda x: x.clone(), (x,)),
            (x, level),
        )
        return self.body(prepared)


def cond(*changes):
    return variant("cond", *changes)


_COUNT = "        self.dark += dark.long()\n"
_COND = "x = torch.cond(level > 0.5, invert, not_negative, (x, level))"
_EITHER = "torch.where(a > 0.5, invert(x, a), lift(x, a))"
_INNER = "torch.cond(level < 0.1, lift, keep, (x, level))"
_LIFTED = "torch.cond(level < 0.1, lambda x, y: y.clone(), lambda x, y: x.clone(), (x, lift(x, level)))"
_AGAIN = "x = torch.cond(x.mean() < 0.1, lift, keep, (x, x.mean()))"
_EXPORTS = "torch.compiler.is_exporting()"
_LIFT = "return (x * (0.28 / level)).clamp(max=1)"
RIGHT["CondEnhance"] = [type("Derived", (Enhance,), {"forward": check.cond_enhance.stand_in().forward}), DarkFirst]
WRONG["CondEnhance"] = {
    "as it was": (type("Same", (Enhance,), {"forward": Enhance.forward}), "torch.export accepts it"),
    "an alias": (cond(("return x.clone()", "return x")), "accepts it[\\s\\S]*alias[\\s\\S]*Hint 3"),
    "counts in a branch": (
        cond((_COUNT, ""), (_LIFT, f"self.dark += 1\n            {_LIFT}")),
        "accepts it[\\s\\S]*Hint 2",
    ),
    "where": (
        cond((_COND, "x = torch.where(level > 0.5, invert(x, level), torch.where(dark, lift(x, level), x))")),
        "branch of torch.cond",
    ),
    "where in a branch": (
        cond((_COND, f"x = torch.cond((level > 0.5) | dark, lambda x, a: {_EITHER}, keep, (x, level))")),
        "inverts, makes brighter",
    ),
    "ordinary scans are lifted": (cond((_INNER, _LIFTED)), "makes brighter, asks torch.cond"),
    "other thresholds in the program": (cond(("level > 0.5,", f"level >= 0.5 if {_EXPORTS} else level > 0.5,")), "0.5"),
    "counts otherwise in the program": (
        cond(("dark = level < 0.1", f"dark = level <= 0.1 if {_EXPORTS} else level < 0.1")),
        "dark counts",
    ),
    "half is a negative": (cond(("level > 0.5,", "level >= 0.5,")), "exactly 0.5"),
    "no pixel below zero": (cond((".clamp(max=1)", ".clamp(0, 1)")), "negative pixels"),
    "never counts": (cond((_COUNT, "")), "dark counts"),
    "the level of each image": (
        cond(("(x * (0.28 / level))", "(x * (0.28 / x.mean(dim=(1, 2, 3), keepdim=True)))")),
        "takes each way",
    ),
    "the level after inverting": (
        cond((_COND, f"x = torch.cond(level > 0.5, invert, keep, (x, level))\n        {_AGAIN}")),
        "a nearly white negative",
    ),
    "only when exported": (
        cond((_COUNT, f"{_COUNT}        if not {_EXPORTS} and level > 0.5:\n            return self.body(x)\n")),
        "plain Python",
    ),
}

# ---------------------------------------------------------------- loader


def loads_recursively(folder, build, tolerance=1e-4, skip=0):
    """The rest of the list after a failure is another call."""
    plan = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    if skip == len(plan["forms"]):
        raise check.LoadError("no form is left")
    name, kind = plan["forms"][skip]["file"], plan["forms"][skip]["format"]
    try:
        with quiet(), torch.no_grad():
            if kind == "export":
                model = torch.export.load(str(folder / name)).module()
            elif kind == "torchscript":
                model = torch.jit.load(folder / name).eval()
            else:
                assert kind == "state_dict", kind
                model = build().eval()
                model.load_state_dict(torch.load(folder / name, weights_only=True))
            sample = torch.load(folder / plan["sample"], weights_only=True)
            torch.testing.assert_close(model(sample["input"]), sample["output"], rtol=0, atol=tolerance)
        return model, []
    except Exception as problem:
        failure = (name, repr(problem))
    try:
        model, failed = loads_recursively(folder, build, tolerance, skip + 1)
    except check.LoadError as problem:
        raise check.LoadError(f"{failure}; {problem}") from None
    return model, [failure, *failed]


def loader(*changes):
    return variant("loader", *changes)


def compares(text):
    return loader(("if not torch.allclose(got, want, rtol=0, atol=tolerance)", f"if not {text}"))


_SHAPE_AND_DTYPE = "(got.shape, got.dtype) != (want.shape, want.dtype)"
_SAMPLE = 'manifest["sample"], map_location="cpu", weights_only=True'
_REASON = 'f"{type(error).__name__}: {error}"'
_TOLD = 'f"{name}: {reason}" for name, reason'
_CATCH = "except Exception as error:  # whatever"
_TRY = "        try:\n            with quiet()"
RIGHT["load_shipped"] = [check.load_shipped.stand_in(), loads_recursively]
WRONG["load_shipped"] = {
    "the model only": (lambda *given, **more: ANSWERS["load_shipped"](*given, **more)[0], "a model and a list"),
    "in the order of the names": (
        loader(('manifest["forms"]:\n', 'sorted(manifest["forms"], key=lambda form: form["file"]):\n')),
        "the first form",
    ),
    "the last that works": (
        loader(
            ("            return model, failed\n", "            best = model\n"),
            ("    raise LoadError", "    if 'best' in locals():\n        return best, failed\n    raise LoadError"),
        ),
        "the first form",
    ),
    "only some exceptions": (
        loader((_CATCH, "except (RuntimeError, ValueError, OSError, EOFError) as error:  #")),
        "stop the search|raised",
    ),
    "builds before the loop": (
        loader(
            ("        model = build()\n", "        model = made\n"),
            ("failed = []\n", "failed = []\n    made = build()\n"),
        ),
        "stop the search[\\s\\S]*ImportError",
    ),
    "an unknown format stops it": (
        loader((_TRY, f'        load = loaders[form["format"]]\n{_TRY}'), ('loaders[form["format"]](', "load(")),
        "unknown format|raised",
    ),
    "keys may be missing": (loader(("only=True))\n", "only=True), strict=False)\n")), "each key of a state dict"),
    "shapes aren't compared": (loader((_SHAPE_AND_DTYPE, "got.dtype != want.dtype")), "another shape"),
    "dtypes aren't compared": (
        loader((_SHAPE_AND_DTYPE, "got.shape != want.shape"), ("allclose(got,", "allclose(got.to(want.dtype),")),
        "another dtype",
    ),
    "the mean is compared": (compares("(got - want).mean().abs() <= tolerance"), "answers otherwise"),
    "NaN passes": (compares("not ((got - want).abs().max() > tolerance)"), "NaN"),
    "relative differences": (loader(("rtol=0, atol=tolerance", "atol=tolerance, rtol=0.1")), "answers otherwise"),
    "a fixed tolerance": (loader(("atol=tolerance", "atol=1e-4")), "answers otherwise"),
    "TorchScript in its mode": (
        loader(('path, map_location="cpu").eval()', 'path, map_location="cpu")')),
        "evaluation mode",
    ),
    "the mode of build": (loader(("return model.eval()\n", "return model\n")), "evaluation mode|raised"),
    "pickles are run": (
        loader(('torch.load(path, map_location="cpu", weights_only=True)', "torch.load(path, weights_only=False)")),
        "run no code",
    ),
    "the sample is run": (loader((_SAMPLE, 'manifest["sample"], weights_only=False')), "run no code"),
    "one reason for all": (loader((_REASON, '"it failed"')), "three reasons"),
    "a message without reasons": (loader((_TOLD, "name for name, _")), "c.bin and its reason"),
    "without names": (loader((_TOLD, "reason for _, reason")), "c.bin and its reason"),
    "another exception": (loader(("    raise LoadError(", "    raise RuntimeError(")), "LoadError names"),
    "interrupts are caught": (loader((_CATCH, "except BaseException as error:  #")), "Ctrl-C"),
}

# ---------------------------------------------------------------- all


class TestChecks(CheckProtocol):
    TOPIC = "15-05"
    CHECKS, ANSWERS, RIGHT, WRONG = CHECKS, ANSWERS, RIGHT, WRONG
    STUBS, IDLE = answers("15-05", edit=student_source, given=GIVEN), idle("15-05", GIVEN)


def test_the_report_is_that_of_the_notebook():
    torch.manual_seed(0)
    ours, theirs = check._Report(["a", "b"], 0.3), GIVEN["Report"](["a", "b"], 0.3)
    theirs.load_state_dict(ours.state_dict())
    for rows in (0, 1, 6):
        x, mask = torch.randn(rows, 4), torch.rand(rows, 2) < 0.5
        for args, kwargs in (((x,), {}), ((x, mask), {"scale": -2.0})):
            assert str(ours(*args, **kwargs)) == str(theirs(*args, **kwargs))
