"""The checks of 15-05 accept right answers, however written, and reject what a student might really write."""

import copy
import json
import math

import torch
from check_protocol import CheckProtocol
from torch import Tensor, nn
from torch.export import Dim

from course.lesson_code import definitions
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
RIGHT, WRONG = {}, {}


# ---------------------------------------------------------------- five traces


def found(**changes):
    """An answer that gives the right dictionary with some values replaced; `...` leaves the name out."""

    def counterexamples():
        right = {**TestChecks.ANSWERS["counterexamples"](), **changes}
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
    "a name is missing": ("five names", found(Front=...)),
    "True for what is wrong": ("float32 or float64", found(FillNaN=True)),
    "no rows": (r"\(0, 4\)", found(FillNaN=torch.ones(0, 4))),
    "one row without a batch": (r"\(4,\)", found(Centre=torch.ones(4))),
    "as many rows as the example": ("same result of both", found(Centre=torch.ones(16, 4))),
    "infinite in place of NaN": ("same result of both[\\s\\S]*Hint 1", found(FillNaN=torch.full((2, 4), math.inf))),
    "a warning taken for a mistake": ("same result of both[\\s\\S]*Hint 2", found(Front=torch.ones(3, 4))),
    "no warning taken for right": ("None stands", found(Digits=None)),
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


FC = "scores = self.fc(x) * scale"
SUPER = "super().__init__()"
FORWARD = "def forward("
ROWS = "@torch.jit.ignore\ndef rows(self, x: Tensor) -> int:\n    return len(x)\n\n"
MASKED = 'scores = scores.masked_fill(mask, -float("inf"))'
RIGHT["Scriptable"] = [ScriptableByHelper, ScriptableFromReport]
WRONG["Scriptable"] = {
    "Report itself": ("accepts it[\\s\\S]*Hint 1", GIVEN["Report"]),
    "tolist without a type": (
        "accepts it[\\s\\S]*RuntimeError: Expected type hint[\\s\\S]*Hint 2",
        "best: list[int] =",
        "best =",
    ),
    "another name": ("state dict of Report loads", "self.fc", "self.linear"),
    "an extra buffer": ("state dict of Report loads", SUPER, f'{SUPER}\nself.register_buffer("calls", torch.zeros(1))'),
    "Python is left in it": ("can be saved", FORWARD, ROWS + FORWARD, "{len(x)} rows", "{self.rows(x)} rows"),
    "another default when it isn't scripted": (
        "as plain Python",
        FC,
        f"scale = scale if torch.jit.is_scripting() else 1.0\n{FC}",
    ),
    "only in Python right": (
        "scripted, or read from the file",
        FC,
        f"scale = 1.0 if torch.jit.is_scripting() else scale\n{FC}",
    ),
    "a limit of zero is none": ("limit 0.0", "self.limit = limit", "self.limit = limit or None"),
    "breaks on no rows": ("0 rows", 'first = "nothing"', "first = self.labels[best[0]]"),
    "can't be trained": ("without a graph", "self.fc(x) * scale", "self.fc(x).detach() * scale"),
    "float32 whatever comes in": ("float64", "self.fc(x) * scale", "self.fc(x).float() * scale"),
    "a mask of all the scores' size": ("a mask of one row", MASKED, 'scores[mask] = -float("inf")'),
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


COPY = "model = copy.deepcopy(model).eval()"
TWO = "two = tuple(torch.cat([x, x]) for x in example)"
SIZE = 'Dim("batch", min=1)'
USER_ERROR = "except torch._dynamo.exc.UserError as error:"
ONE_ERROR = "except Exception as error:"
END = "return program"
ONE_ROW = "agree(module(*copied(one)), want)"
COMPARED = "torch.testing.assert_close(module(*copied(one)), want, {}) is None"
RIGHT["export_batches"] = [check.export_batches.stand_in(), batches_in_place]
WRONG["export_batches"] = {
    "returns the module": ("ExportedProgram", lambda *given: TestChecks.ANSWERS["export_batches"](*given).module()),
    "the example as it is": ("takes every batch size[\\s\\S]*Hint 2", TWO, "two = example"),
    "a million rows at most": ("no largest", SIZE, 'Dim("batch", min=1, max=10**6)'),
    "two rows at least": ("takes every batch size", SIZE, 'Dim("batch", min=2)'),
    "AUTO": ("special about this size", SIZE, "Dim.AUTO"),
    "every dimension may vary": (
        "other sizes stay",
        "{0: " + SIZE + "}",
        "{0: " + SIZE + ", **dict.fromkeys(range(1, _.ndim), Dim.AUTO)}",
    ),
    "a batch for each tensor": ("same in all", SIZE, 'Dim(f"batch{_.ndim}", min=1)'),
    "as the model is": ("evaluation mode", COPY, "model = copy.deepcopy(model)"),
    "only the outermost module": ("evaluation mode", COPY, "model = copy.deepcopy(model)\nmodel.training = False"),
    "the model itself": ("stay as they are", COPY, "model = model.eval()"),
    "modes are put back after success": (
        "stay as it is",
        COPY,
        "kept = [(m, m.training) for m in model.modules()]\nmodel.eval()",
        END,
        f"for m, mode in kept:\n    m.training = mode\n{END}",
    ),
    "one row is a view": (
        "stay as they are",
        "module(*copied(one))",
        "module(*one)",
        "model(*copied(one))",
        "model(*one)",
    ),
    "PyTorch's error goes on": ("every size", USER_ERROR, "except NotImplementedError as error:"),
    "an error for one row goes on": ("on one row", ONE_ERROR, "except AttributeError as error:"),
    "one row isn't compared": ("on one row", ONE_ROW, "True"),
    "compared absolutely": (
        "rounding are no difference",
        ONE_ROW,
        COMPARED.format("rtol=0, atol=1e-4, equal_nan=True"),
    ),
    "NaN differs from NaN": ("NaN in both", ONE_ROW, COMPARED.format("rtol=1e-4, atol=1e-4")),
    "all errors replaced": ("other errors", USER_ERROR, ONE_ERROR),
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


COUNT = "self.dark += dark.long()"
COND = "x = torch.cond(level > 0.5, invert, not_negative, (x, level))"
EITHER = "torch.where(a > 0.5, invert(x, a), lift(x, a))"
INNER = "torch.cond(level < 0.1, lift, keep, (x, level))"
LIFTED = "torch.cond(level < 0.1, lambda x, y: y.clone(), lambda x, y: x.clone(), (x, lift(x, level)))"
AGAIN = "x = torch.cond(x.mean() < 0.1, lift, keep, (x, x.mean()))"
EXPORTS = "torch.compiler.is_exporting()"
LIFT = "return (x * (0.28 / level)).clamp(max=1)"
RIGHT["CondEnhance"] = [type("Derived", (Enhance,), {"forward": check.cond_enhance.stand_in().forward}), DarkFirst]
WRONG["CondEnhance"] = {
    "as it was": ("torch.export accepts it", type("Same", (Enhance,), {"forward": Enhance.forward})),
    "an alias": ("accepts it[\\s\\S]*alias[\\s\\S]*Hint 3", "return x.clone()", "return x"),
    "counts in a branch": ("accepts it[\\s\\S]*Hint 2", COUNT, "", LIFT, f"self.dark += 1\n{LIFT}"),
    "where": (
        "branch of torch.cond",
        COND,
        "x = torch.where(level > 0.5, invert(x, level), torch.where(dark, lift(x, level), x))",
    ),
    "where in a branch": (
        "inverts, makes brighter",
        COND,
        f"x = torch.cond((level > 0.5) | dark, lambda x, a: {EITHER}, keep, (x, level))",
    ),
    "ordinary scans are lifted": ("makes brighter, asks torch.cond", INNER, LIFTED),
    "other thresholds in the program": ("0.5", "level > 0.5,", f"level >= 0.5 if {EXPORTS} else level > 0.5,"),
    "counts otherwise in the program": (
        "dark counts",
        "dark = level < 0.1",
        f"dark = level <= 0.1 if {EXPORTS} else level < 0.1",
    ),
    "half is a negative": ("exactly 0.5", "level > 0.5,", "level >= 0.5,"),
    "no pixel below zero": ("negative pixels", ".clamp(max=1)", ".clamp(0, 1)"),
    "never counts": ("dark counts", COUNT, ""),
    "the level of each image": (
        "takes each way",
        "(x * (0.28 / level))",
        "(x * (0.28 / x.mean(dim=(1, 2, 3), keepdim=True)))",
    ),
    "the level after inverting": (
        "a nearly white negative",
        COND,
        f"x = torch.cond(level > 0.5, invert, keep, (x, level))\n{AGAIN}",
    ),
    "only when exported": (
        "plain Python",
        COUNT,
        f"{COUNT}\nif not {EXPORTS} and level > 0.5:\n    return self.body(x)",
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


CLOSE = "torch.allclose(got, want, rtol=0, atol=tolerance)"
SHAPE_AND_DTYPE = "(got.shape, got.dtype) != (want.shape, want.dtype)"
SAMPLE = 'manifest["sample"], map_location="cpu", weights_only=True'
REASON = 'f"{type(error).__name__}: {error}"'
TOLD = 'f"{name}: {reason}" for name, reason'
CATCH = "except Exception as error:  # whatever"
TRY = "try:\n    with quiet()"
RIGHT["load_shipped"] = [check.load_shipped.stand_in(), loads_recursively]
WRONG["load_shipped"] = {
    "the model only": (
        "a model and a list",
        lambda *given, **more: TestChecks.ANSWERS["load_shipped"](*given, **more)[0],
    ),
    "the last that works": (
        "the first form",
        "return model, failed",
        "best = model",
        "raise LoadError",
        "if 'best' in locals():\n    return best, failed\nraise LoadError",
    ),
    "only some exceptions": (
        "stop the search|raised",
        CATCH,
        "except (RuntimeError, ValueError, OSError, EOFError) as error:  #",
    ),
    "an unknown format stops it": (
        "unknown format|raised",
        TRY,
        f'load = loaders[form["format"]]\n{TRY}',
        'loaders[form["format"]](',
        "load(",
    ),
    "keys may be missing": ("each key of a state dict", "only=True))", "only=True), strict=False)"),
    "shapes aren't compared": ("another shape", SHAPE_AND_DTYPE, "got.dtype != want.dtype"),
    "NaN passes": ("NaN", CLOSE, "not ((got - want).abs().max() > tolerance)"),
    "relative differences": ("answers otherwise", "rtol=0, atol=tolerance", "atol=tolerance, rtol=0.1"),
    "TorchScript in its mode": ("evaluation mode", 'path, map_location="cpu").eval()', 'path, map_location="cpu")'),
    "pickles are run": (
        "run no code",
        'torch.load(path, map_location="cpu", weights_only=True)',
        "torch.load(path, weights_only=False)",
    ),
    "the sample is run": ("run no code", SAMPLE, 'manifest["sample"], weights_only=False'),
    "one reason for all": ("three reasons", REASON, '"it failed"'),
    "a message without reasons": ("c.bin and its reason", TOLD, "name for name, _"),
    "another exception": ("LoadError names", "raise LoadError(", "raise RuntimeError("),
    "interrupts are caught": ("Ctrl-C", CATCH, "except BaseException as error:  #"),
}

# ---------------------------------------------------------------- all


class TestChecks(CheckProtocol, topic="15-05", given=GIVEN):
    CHECKS, RIGHT, WRONG = CHECKS, RIGHT, WRONG


def test_the_report_is_that_of_the_notebook():
    torch.manual_seed(0)
    ours, theirs = check._Report(["a", "b"], 0.3), GIVEN["Report"](["a", "b"], 0.3)
    theirs.load_state_dict(ours.state_dict())
    for rows in (0, 1, 6):
        x, mask = torch.randn(rows, 4), torch.rand(rows, 2) < 0.5
        for args, kwargs in (((x,), {}), ((x, mask), {"scale": -2.0})):
            assert str(ours(*args, **kwargs)) == str(theirs(*args, **kwargs))
