"""The checks of 15-05 accept right answers, however written, and reject what a student might really write."""

import copy
import io
import json
import math
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from answer_variants import variants
from check_protocol import CheckProtocol, idle
from torch import Tensor, nn
from torch.export import Dim

from course.exercise_form import student_source
from course.lesson_code import answers, definitions
from shared import quiet
from shared.checks import topic_15_05 as check

CELLS = "traced gate gate-inputs agree five five-traces report copied enhance"
GIVEN = definitions("15-05", *CELLS.split())
ANSWERS = answers("15-05", given=GIVEN)
STUBS = answers("15-05", edit=student_source, given=GIVEN)
IDLE = idle("15-05", GIVEN)
NAMES = {
    "five": "counterexamples",
    "scriptable": "Scriptable",
    "batches": "export_batches",
    "cond": "CondEnhance",
    "loader": "load_shipped",
}
variant = variants("15-05", NAMES, GIVEN)


# ---- five traces


def found(**changes):
    """An answer that gives the right dictionary with some values replaced; `...` leaves the name out."""

    def counterexamples():
        right = {**ANSWERS["counterexamples"](), **changes}
        return {name: value for name, value in right.items() if value is not ...}

    return counterexamples


def searched():
    """Tries inputs until model and trace differ."""
    models, traces = GIVEN["five_models"], GIVEN["five_traces"]
    result = dict.fromkeys(models)
    torch.manual_seed(3)
    for name, model in models.items():
        for n in (1, 8, 16, 64):
            for dtype in (torch.float32, torch.float64):
                x = torch.randn(n, 4, dtype=dtype)
                for value in (
                    x,
                    x.index_fill(0, torch.tensor(0), math.nan),
                    x.index_fill(1, torch.tensor(1), math.inf),
                ):
                    want, got = model(value), traces[name](value)
                    if not torch.allclose(got, want, atol=2e-3, rtol=0, equal_nan=True):
                        result[name] = value
    return result


def large():
    x = torch.arange(256.0).view(64, 4)
    nan = x.clone()
    nan[17, 2] = math.nan
    digits = torch.linspace(0, 1, 4, dtype=torch.float64).repeat(3, 1)
    return {"Pick": None, "FillNaN": nan, "Centre": x, "Digits": digits, "Front": None}


WRONG_FIVE = {
    "a name is missing": (found(Front=...), "five names"),
    "a list of names": (lambda: ["Centre", "FillNaN", "Digits"], "dictionary"),
    "True for what is wrong": (found(FillNaN=True), "float32 or float64"),
    "no rows": (found(FillNaN=torch.ones(0, 4)), r"\(0, 4\)"),
    "another width": (found(Centre=torch.ones(3, 5)), r"\(3, 5\)"),
    "one row without a batch": (found(Centre=torch.ones(4)), r"\(4,\)"),
    "as many rows as the example": (found(Centre=torch.ones(16, 4)), "same result of both"),
    "infinite in place of NaN": (found(FillNaN=torch.full((2, 4), math.inf)), "same result of both[\\s\\S]*Hint 1"),
    "float32 for Digits": (found(Digits=torch.full((2, 4), 0.125)), "same result of both"),
    "a warning taken for a mistake": (found(Front=torch.ones(3, 4)), "same result of both[\\s\\S]*Hint 2"),
    "no warning taken for right": (found(Digits=None), "None stands"),
    "all thought right": (found(Centre=None, FillNaN=None, Digits=None), "None stands"),
}

# ---- scriptable


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


_TEXT = 'f"{len(x)} rows, {len(counts)} labels, first: {first}"'
_FC = "scores = self.fc(x) * scale"
_SUPER = "        super().__init__()\n"
_FORWARD = "    def forward("
_COUNT_UP = "counts[name] = counts.get(name, 0) + 1"
scriptable = partial(variant, "scriptable")
WRONG_SCRIPTABLE = {
    "Report itself": (GIVEN["Report"], "accepts it[\\s\\S]*Hint 1"),
    "kwargs left": (scriptable((", scale: float = 1.0", ", **options")), "accepts it"),
    "tolist without a type": (
        scriptable(("best: list[int] =", "best =")),
        "accepts it[\\s\\S]*RuntimeError: Expected type hint[\\s\\S]*Hint 2",
    ),
    "a dictionary without a type": (scriptable(("counts: dict[str, int] = {}", "counts = {}")), "accepts it"),
    "NumPy's infinity": (scriptable(('-float("inf")', "-np.inf * np.ones(1)")), "accepts it"),
    "another name": (scriptable(("self.fc", "self.linear")), "state dict of Report loads"),
    "an extra buffer": (
        scriptable((_SUPER, _SUPER + '        self.register_buffer("calls", torch.zeros(1))\n')),
        "state dict of Report loads",
    ),
    "Python is left in it": (
        scriptable(
            (
                _FORWARD,
                "    @torch.jit.ignore\n    def rows(self, x: Tensor) -> int:\n        return len(x)\n\n" + _FORWARD,
            ),
            ("{len(x)} rows", "{self.rows(x)} rows"),
        ),
        "can be saved",
    ),
    "another default when it isn't scripted": (
        scriptable((_FC, "scale = scale if torch.jit.is_scripting() else 1.0\n        " + _FC)),
        "as plain Python",
    ),
    "only in Python right": (
        scriptable((_FC, "scale = 1.0 if torch.jit.is_scripting() else scale\n        " + _FC)),
        "scripted, or read from the file",
    ),
    "format with a specification": (
        scriptable((_TEXT, '"{:d} rows, {:d} labels, first: {:s}".format(len(x), len(counts), first)')),
        "scripted, or read from the file",
    ),
    "the limit before the scale": (
        scriptable((_FC, "scores = self.fc(x).clamp(max=1e6 if self.limit is None else self.limit) * scale")),
        "plain Python",
    ),
    "a limit of zero is none": (scriptable(("self.limit = limit", "self.limit = limit or None")), "limit 0.0"),
    "breaks on no rows": (scriptable(('first = "nothing"', "first = self.labels[best[0]]")), "0 rows"),
    "each label once": (scriptable((_COUNT_UP, "counts[name] = 1")), "plain Python"),
    "the last is the first": (scriptable(("if len(counts) == 0:", "if True:")), "plain Python"),
    "can't be trained": (scriptable(("self.fc(x) * scale", "self.fc(x).detach() * scale")), "without a graph"),
    "float32 whatever comes in": (scriptable(("self.fc(x) * scale", "self.fc(x).float() * scale")), "float64"),
    "a mask of all the scores' size": (
        scriptable(
            (
                'scores = scores.masked_fill(mask, -float("inf"))',
                'scores = scores.clone()\n            scores[mask] = -float("inf")',
            )
        ),
        "a mask of one row",
    ),
    "scale has another default": (scriptable(("scale: float = 1.0", "scale: float = 2.0")), "plain Python"),
}

# ---- batches


def batches_by_hand(model, *example):
    """Three rows from the first one; modes and buffers are put back."""
    axis = Dim("rows_of_a_batch", min=1, max=1 << 40)
    three = [x[:1].expand(3, *x.shape[1:]).clone() for x in example]
    single = [x[:1].clone() for x in example]
    kept = copy.deepcopy(model)
    kept.eval()
    with torch.no_grad(), quiet():
        try:
            shapes = [{0: axis} for _ in three]
            program = torch.export.export(kept, tuple(three), dynamic_shapes=tuple(shapes))
        except torch._dynamo.exc.UserError as problem:
            raise ValueError("no program for every batch") from problem
        try:
            want = copy.deepcopy(model).eval()(*[x.clone() for x in single])
            got = copy.deepcopy(program).module()(*single)
        except Exception as problem:
            raise ValueError("a batch of one fails") from problem
    if not GIVEN["agree"](got, want):
        raise ValueError("a batch of one is another thing")
    return program


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


batches = partial(variant, "batches")
_COPY = "model = copy.deepcopy(model).eval()"
_TWO = "two = tuple(torch.cat([x, x]) for x in example)"
_SIZE = 'Dim("batch", min=1)'
_AGREE = "same = agree(module(*copied(one)), want)"
_USER_ERROR = "    except torch._dynamo.exc.UserError as error:\n"
_ONE_ERROR = "    except Exception as error:\n"
_END = "    return program"
_EXAMPLE = "torch.export.export(copy.deepcopy(model), two,"


def same(*lines):
    """How one row is compared."""
    text = "\n            ".join(lines).replace("_got", "module(*copied(one))")
    return batches((_AGREE, text))


WRONG_BATCHES = {
    "returns the module": (lambda *given: ANSWERS["export_batches"](*given).module(), "ExportedProgram"),
    "the example as it is": (batches((_TWO, "two = example")), "takes every batch size[\\s\\S]*Hint 2"),
    "sixteen rows at most": (batches((_SIZE, 'Dim("batch", min=1, max=16)')), "takes every batch size"),
    "a million rows at most": (batches((_SIZE, 'Dim("batch", min=1, max=10**6)')), "no largest"),
    "two rows at least": (batches((_SIZE, 'Dim("batch", min=2)')), "takes every batch size"),
    "AUTO": (batches((_SIZE, "Dim.AUTO")), "special about this size"),
    "every dimension may vary": (
        batches(("{0: " + _SIZE + "}", "{0: " + _SIZE + ", **dict.fromkeys(range(1, _.ndim), Dim.AUTO)}")),
        "other sizes stay",
    ),
    "a batch for each tensor": (batches((_SIZE, 'Dim(f"batch{_.ndim}", min=1)')), "same in all"),
    "as the model is": (batches((_COPY, "model = copy.deepcopy(model)")), "evaluation mode"),
    "in training mode": (batches((_COPY, "model = copy.deepcopy(model).train()")), "evaluation mode"),
    "only the outermost module": (
        batches((_COPY, "model = copy.deepcopy(model)\n    model.training = False")),
        "evaluation mode",
    ),
    "the model itself": (batches((_COPY, "model = model.eval()")), "stay as they are"),
    "one mode for all": (
        batches((_COPY, "mode = model.training\n    model.eval()"), (_END, "    model.train(mode)\n" + _END)),
        "stay as they are",
    ),
    "modes are put back after success": (
        batches(
            (_COPY, "kept = [(m, m.training) for m in model.modules()]\n    model.eval()"),
            (_END, "    for m, mode in kept:\n        m.training = mode\n" + _END),
        ),
        "stay as it is",
    ),
    "buffers are put back after success": (
        batches(
            (_COPY, "kept = [b.clone() for b in model.buffers()]\n    model = copy.copy(model).eval()"),
            (_EXAMPLE, "torch.export.export(model, two,"),
            (_END, "    for b, value in zip(model.buffers(), kept):\n        b.data.copy_(value)\n" + _END),
        ),
        "stay as it is",
    ),
    "training afterwards": (
        batches((_COPY, "model = model.eval()"), (_END, "    model.train()\n" + _END)),
        "stay as they are",
    ),
    "runs the example": (
        batches((_SIZE, "Dim('batch', min=1)"), (_TWO, "model(*example)\n    " + _TWO)),
        "stay as they are",
    ),
    "one row is a view": (
        batches(("module(*copied(one))", "module(*one)"), ("model(*copied(one))", "model(*one)")),
        "stay as they are",
    ),
    "PyTorch's error goes on": (batches((_USER_ERROR, "    except NotImplementedError as error:\n")), "every size"),
    "an error for one row goes on": (batches((_ONE_ERROR, "    except AttributeError as error:\n")), "on one row"),
    "an error of the model for one row goes on": (
        batches((_ONE_ERROR, "    except (AssertionError, RuntimeError) as error:\n")),
        "on one row",
    ),
    "one row isn't compared": (same("same = True"), "on one row"),
    "one row only has to run": (same("same = module(*copied(one)) is not None"), "on one row"),
    "compared absolutely": (
        same("torch.testing.assert_close(_got, want, rtol=0, atol=1e-4, equal_nan=True)", "same = True"),
        "rounding are no difference",
    ),
    "NaN differs from NaN": (
        same("torch.testing.assert_close(_got, want, rtol=1e-4, atol=1e-4)", "same = True"),
        "NaN in both",
    ),
    "all errors replaced": (batches((_USER_ERROR, _ONE_ERROR)), "other errors"),
    "all of a kind replaced": (batches((_USER_ERROR, "    except RuntimeError as error:\n")), "other errors"),
    "a branch on data taken for a batch": (
        batches(
            (
                _USER_ERROR,
                "    except (torch._dynamo.exc.UserError,"
                " torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode) as error:\n",
            )
        ),
        "an if on the data",
    ),
}

# ---- cond

Enhance = GIVEN["Enhance"]


class OneAfterTheOther(Enhance):
    """Two conds in a row, both on the first level."""

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.mean(x)
        is_dark = mean.lt(0.1)
        self.dark.add_(is_dark.to(self.dark.dtype))
        # not the methods themselves: for the second cond torch 2.11 would run those of the first
        x = torch.cond(is_dark, lambda *a: self._lift(*a), lambda *a: self._same(*a), (x, mean))
        x = torch.cond(mean > 0.5, lambda *a: self._invert(*a), lambda *a: self._same(*a), (x, mean))
        return self.body(x)

    def _lift(self, x, mean):
        return torch.clamp(0.28 / mean * x, max=1.0)

    def _same(self, x, mean):
        return x + 0

    def _invert(self, x, mean):
        return torch.rsub(x, 1)


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


class WhereInABranch(Enhance):
    """One branch computes all three ways, one is never taken; others decide about numbers."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        self.dark += torch.cond(level < 0.1, lambda d: d * 0 + 1, lambda d: d * 0, (self.dark,))
        torch.cond(level > 0.5, lambda a: a + 1, lambda a: a + 2, (level,))
        return self.body(torch.cond(level > 2, lambda x, a: 1 - x, self._all, (x, level)))

    def _all(self, x, a):
        return torch.where(a > 0.5, 1 - x, torch.where(a < 0.1, (x * (0.28 / a)).clamp(max=1), x))


class MasksInABranch(WhereInABranch):
    def _all(self, x, a):
        up, down = (a > 0.5).to(x.dtype), (a < 0.1).to(x.dtype)
        lifted = (x * (0.28 / a)).clamp(max=1).nan_to_num()
        return up * (1 - x) + down * lifted + (1 - up) * (1 - down) * x


class AllInEachBranch(WhereInABranch):
    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        self.dark += (level < 0.1).long()
        ways = [lambda x, a, n=n: self._all(x, a) + n * 0 for n in (0.0, 1.0)]
        rest = lambda x, a: torch.cond(a < 0.1, *ways, (x, a))  # noqa: E731
        return self.body(torch.cond(level > 0.5, lambda x, a: self._all(x, a), rest, (x, level)))


_COUNT = "        self.dark += dark.long()\n"
_COND = "x = torch.cond(level > 0.5, invert, not_negative, (x, level))"
_LEVEL = "        level = x.mean()\n"
_EXPORTS = "torch.compiler.is_exporting()"
_LIFT = "return (x * (0.28 / level)).clamp(max=1)"
cond = partial(variant, "cond")
WRONG_COND = {
    "not derived": (check._CondEnhance, "derived from Enhance"),
    "as it was": (type("Same", (Enhance,), {"forward": Enhance.forward}), "torch.export accepts it"),
    "an alias": (cond(("return x.clone()", "return x")), "accepts it[\\s\\S]*alias[\\s\\S]*Hint 3"),
    "counts in a branch": (
        cond((_COUNT, ""), (_LIFT, "self.dark += 1\n            " + _LIFT)),
        "accepts it[\\s\\S]*Hint 2",
    ),
    "other dtypes in a branch": (cond(("(x * (0.28 / level))", "(x.half() * (0.28 / level).half())")), "accepts it"),
    "where": (
        cond((_COND, "x = torch.where(level > 0.5, invert(x, level), torch.where(dark, lift(x, level), x))")),
        "branch of torch.cond",
    ),
    "all three are computed": (
        cond(
            (
                _COND,
                "x = torch.cond(level > 0.5, lambda a, b, c: a.clone(), lambda a, b, c: torch.cond(dark, "
                "lambda b, c: b + 0, lambda b, c: c + 0, (b, c)), (invert(x, level), lift(x, level), x))",
            )
        ),
        "branch of torch.cond",
    ),
    "where in a branch": (WhereInABranch, "inverts, makes brighter"),
    "masks in one branch": (MasksInABranch, "inverts, makes brighter"),
    "all in each branch": (AllInEachBranch, "inverts, makes brighter"),
    "ordinary scans are lifted": (
        cond(
            (
                "return torch.cond(level < 0.1, lift, keep, (x, level))",
                "return torch.cond(level < 0.1, lambda x, y: y.clone(), lambda x, y: x.clone(), (x, lift(x, level)))",
            )
        ),
        "makes brighter, asks torch.cond",
    ),
    "other thresholds in the program": (cond(("level > 0.5,", f"level >= 0.5 if {_EXPORTS} else level > 0.5,")), "0.5"),
    "counts otherwise in the program": (
        cond(("dark = level < 0.1", f"dark = level <= 0.1 if {_EXPORTS} else level < 0.1")),
        "dark counts",
    ),
    "half is a negative": (cond(("level > 0.5,", "level >= 0.5,")), "exactly 0.5"),
    "a tenth is dark": (cond(("torch.cond(level < 0.1,", "torch.cond(level <= 0.1,")), "takes each way[\\s\\S]*0\\.1"),
    "a tenth counts": (cond(("dark = level < 0.1", "dark = level <= 0.1")), "dark counts"),
    "never counts": (cond((_COUNT, "")), "dark counts"),
    "no clamp": (cond((".clamp(max=1)", "")), "takes each way"),
    "clamps at both ends": (cond((".clamp(max=1)", ".clamp(0.2, 1)")), "takes each way"),
    "no pixel below zero": (cond((".clamp(max=1)", ".clamp(0, 1)")), "negative pixels"),
    "lifts to another level": (cond(("0.28 / level", "0.3 / level")), "takes each way"),
    "the level of each image": (
        cond(("(x * (0.28 / level))", "(x * (0.28 / x.mean(dim=(1, 2, 3), keepdim=True)))")),
        "takes each way",
    ),
    "only when exported": (
        cond((_LEVEL, f"        if not {_EXPORTS} and x.mean() > 0.5:\n            return self.body(x)\n" + _LEVEL)),
        "plain Python",
    ),
    "the level after inverting": (
        cond(
            (
                _COND,
                "x = torch.cond(level > 0.5, invert, keep, (x, level))\n"
                "        x = torch.cond(x.mean() < 0.1, lift, keep, (x, x.mean()))",
            )
        ),
        "a nearly white negative",
    ),
    "an extra buffer": (
        cond((_LEVEL, '        self.register_buffer("limit", x.mean())\n' + _LEVEL)),
        "accepts it|plain Python",
    ),
    "branches exchanged": (cond(("invert, not_negative", "not_negative, invert")), "takes each way"),
}

# ---- loader


def loads_by_cases(folder, build, tolerance=1e-4):
    """One case after the other, compared by brute force."""

    def load(kind, path):
        match kind:
            case "export":
                with open(path, "rb") as file:
                    return torch.export.load(io.BytesIO(file.read())).module()
            case "torchscript":
                module = torch.jit.load(str(path))
                module.eval()
                return module
            case "state_dict":
                module = build()
                module.load_state_dict(torch.load(str(path), weights_only=True), strict=True)
                module.train(False)
                return module
        raise LookupError(f"nobody reads {kind}")

    with quiet():
        plan = json.loads(Path(folder, "manifest.json").read_text())
        sample = torch.load(Path(folder, plan["sample"]), weights_only=True)
        reasons = []
        for entry in plan["forms"]:
            name = entry["file"]
            try:
                module = load(entry["format"], Path(folder, name))
                with torch.inference_mode():
                    answer = module(sample["input"].clone())
            except Exception as problem:
                reasons.append((name, repr(problem)))
                continue
            wanted = sample["output"]
            if answer.shape != wanted.shape or answer.dtype != wanted.dtype:
                reasons.append((name, "another shape or dtype"))
            elif not all(
                a == b or abs(a - b) <= tolerance
                for a, b in zip(answer.flatten().tolist(), wanted.flatten().tolist(), strict=True)
            ):
                reasons.append((name, "another answer"))
            else:
                return module, reasons
    raise LoadError(f"nothing works: {reasons}")


class LoadError(RuntimeError):
    """As the answer's."""


def loads_recursively(folder, build, tolerance=1e-4, skip=0):
    """The rest of the list after a failure is another call."""
    plan = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    if skip == len(plan["forms"]):
        raise LoadError("no form is left")
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
    except LoadError as problem:
        raise LoadError(f"{failure}; {problem}") from None
    return model, [failure, *failed]


_GET = '"torchscript": lambda path: torch.jit.load(path, map_location="cpu").eval(),'
_SHAPE = "            if (got.shape, got.dtype) != (want.shape, want.dtype):\n"
_CLOSE = "torch.allclose(got, want, rtol=0, atol=tolerance)"
_FAILED = 'failed.append((form["file"], f"{type(error).__name__}: {error}"))'
_CATCH = "        except Exception as error:  # whatever is wrong with a file\n"
_TRY = "        try:\n            with quiet()"
_FOR = '    for form in manifest["forms"]:\n'
loader = partial(variant, "loader")
compares = lambda text: loader(("if not " + _CLOSE, "if not " + text))  # noqa: E731
WRONG_LOADER = {
    "the model only": (lambda *given, **more: ANSWERS["load_shipped"](*given, **more)[0], "a model and a list"),
    "in the order of the names": (
        loader((_FOR, '    for form in sorted(manifest["forms"], key=lambda form: form["file"]):\n')),
        "the first form",
    ),
    "the newest format first": (
        loader((_FOR, '    for form in sorted(manifest["forms"], key=lambda form: form["format"]):\n')),
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
        loader((_CATCH, "        except (RuntimeError, ValueError, OSError, EOFError) as error:\n")),
        "stop the search|raised",
    ),
    "builds outside of try": (
        loader(
            ("        model = build()\n", "        model = made\n"),
            (_TRY, '        made = build() if form["format"] == "state_dict" else None\n' + _TRY),
            ("    def from_weights(path: Path)", "    made = None\n\n    def from_weights(path: Path)"),
        ),
        "stop the search",
    ),
    "an unknown format stops it": (
        loader(
            (_TRY, '        load = loaders[form["format"]]\n' + _TRY),
            ('loaders[form["format"]](', "load("),
        ),
        "unknown format|raised",
    ),
    "a missing file stops it": (
        loader(
            (
                _TRY,
                '        if not (folder / form["file"]).exists():\n            raise FileNotFoundError(form["file"])\n'
                + _TRY,
            )
        ),
        "stop the search",
    ),
    "keys may be missing": (
        loader(
            ("weights_only=True))\n        return model", "weights_only=True), strict=False)\n        return model")
        ),
        "each key of a state dict",
    ),
    "shapes aren't compared": (loader((_SHAPE, "            if got.dtype != want.dtype:\n")), "another shape"),
    "dtypes aren't compared": (
        loader(
            (_SHAPE, "            if got.shape != want.shape:\n"),
            (_CLOSE, _CLOSE.replace("(got,", "(got.to(want.dtype),")),
        ),
        "another dtype",
    ),
    "nothing is compared": (
        loader((_SHAPE, "            if False:\n"), ("if not " + _CLOSE, "if False")),
        "answers otherwise",
    ),
    "the mean is compared": (compares("(got - want).mean().abs() <= tolerance"), "answers otherwise"),
    "NaN passes": (compares("not ((got - want).abs().max() > tolerance)"), "NaN"),
    "relative differences": (loader(("rtol=0, atol=tolerance", "atol=tolerance, rtol=0.1")), "answers otherwise"),
    "slightly relative differences": (loader(("rtol=0, atol", "rtol=1e-6, atol")), "answers otherwise"),
    "one reason for all": (loader((_FAILED, 'failed.append((form["file"], "it failed"))')), "three reasons"),
    "exceptions in the list": (loader((_FAILED, 'failed.append((form["file"], error))')), "three reasons"),
    "a fixed tolerance": (loader(("atol=tolerance", "atol=1e-4")), "answers otherwise"),
    "another default": (loader(("tolerance: float = 1e-4", "tolerance: float = 1e-2")), "off by 1.5e-4"),
    "TorchScript in its mode": (loader((_GET, _GET.replace(".eval()", ""))), "evaluation mode"),
    "the mode of build": (
        loader(("        return model.eval()\n", "        return model\n")),
        "evaluation mode|raised",
    ),
    "pickles are run": (
        loader(('torch.load(path, map_location="cpu", weights_only=True)', "torch.load(path, weights_only=False)")),
        "run no code",
    ),
    "the sample is run": (
        loader(
            ('manifest["sample"], map_location="cpu", weights_only=True', 'manifest["sample"], weights_only=False'),
        ),
        "run no code",
    ),
    "a message without reasons": (loader(('f"{name}: {reason}"', "name")), "c.bin and its reason"),
    "without names": (loader(('f"{name}: {reason}"', "reason")), "c.bin and its reason"),
    "only the last file": (
        loader(("for name, reason in failed))", "for name, reason in failed[-1:]))")),
        "c.bin and its reason",
    ),
    "another exception": (loader(("    raise LoadError(", "    raise RuntimeError(")), "LoadError names"),
    "none of none": (
        loader(("    raise LoadError(", "    return None, failed\n    raise LoadError(")),
        "LoadError names",
    ),
    "interrupts are caught": (loader((_CATCH, "        except BaseException as error:\n")), "Ctrl-C"),
}


class TestChecks(CheckProtocol):
    TOPIC = "15-05"
    IDLE = IDLE
    ANSWERS, STUBS = ANSWERS, STUBS
    CHECKS: ClassVar = {
        "counterexamples": check.counterexamples,
        "Scriptable": check.scriptable,
        "export_batches": check.export_batches,
        "CondEnhance": check.cond_enhance,
        "load_shipped": check.load_shipped,
    }
    RIGHT: ClassVar = {
        "counterexamples": [searched, large],
        "Scriptable": [ScriptableByHelper, ScriptableFromReport],
        "export_batches": [batches_by_hand, batches_in_place],
        "CondEnhance": [OneAfterTheOther, DarkFirst],
        "load_shipped": [loads_by_cases, loads_recursively],
    }
    WRONG: ClassVar = {
        "counterexamples": WRONG_FIVE,
        "Scriptable": WRONG_SCRIPTABLE,
        "export_batches": WRONG_BATCHES,
        "CondEnhance": WRONG_COND,
        "load_shipped": WRONG_LOADER,
    }

    def hold_stand_in(self, name, stand_in):
        if name == "CondEnhance":  # the check asks for the base
            stand_in = type("Derived", (Enhance,), {"forward": stand_in.forward})
        if name in ("export_batches", "CondEnhance", "load_shipped"):
            result = self.CHECKS[name].run(stand_in)
            assert result.status == "passed", str(result)


def test_the_report_is_that_of_the_notebook():
    torch.manual_seed(0)
    ours, theirs = check._Report(["a", "b"], 0.3), GIVEN["Report"](["a", "b"], 0.3)
    theirs.load_state_dict(ours.state_dict())
    for rows in (0, 1, 6):
        x, mask = torch.randn(rows, 4), torch.rand(rows, 2) < 0.5
        for args, kwargs in (((x,), {}), ((x, mask), {"scale": -2.0})):
            assert str(ours(*args, **kwargs)) == str(theirs(*args, **kwargs))
