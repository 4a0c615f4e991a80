"""The checks of 15-05 accept right answers, however written, and reject what a student might really write."""

import copy
import inspect
import io
import json
import math
from pathlib import Path
from typing import ClassVar

import torch
from answer_variants import variants
from check_protocol import CheckProtocol, idle
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from course.answers import answers, definitions
from course.exercise_form import student_source
from shared import quiet
from shared.checks import topic_15_05 as check

GIVEN = definitions("15-05", "helpers", "recorder", "replay", "gate", "judge", "five", "report", "enhance")
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


# ---------------------------------------------------------------- five traces


def found(**changes):
    """An answer that gives the right dictionary with some values replaced; None as a class leaves the name out."""

    def counterexamples():
        right = {**ANSWERS["counterexamples"](), **changes}
        return {name: value for name, value in right.items() if value is not Ellipsis}

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
    return {"Pick": None, "Mend": nan, "Centre": x, "Digits": digits, "Front": None}


WRONG_FIVE = {
    "a name is missing": (found(Front=...), "five names"),
    "a list of names": (lambda: ["Centre", "Mend", "Digits"], "dictionary"),
    "True for what is wrong": (found(Mend=True), "float32 or float64"),
    "half precision": (found(Centre=torch.ones(3, 4, dtype=torch.float16)), "float16"),
    "integers": (found(Centre=torch.arange(12).view(3, 4)), "int64"),
    "too many rows": (found(Centre=torch.ones(65, 4)), r"\(65, 4\)"),
    "no rows": (found(Mend=torch.ones(0, 4)), r"\(0, 4\)"),
    "another width": (found(Centre=torch.ones(3, 5)), r"\(3, 5\)"),
    "one row without a batch": (found(Centre=torch.ones(4)), r"\(4,\)"),
    "as many rows as the example": (found(Centre=torch.ones(16, 4)), "same result of both"),
    "infinite in place of NaN": (found(Mend=torch.full((2, 4), math.inf)), "same result of both[\\s\\S]*Hint 1"),
    "float32 for Digits": (found(Digits=torch.full((2, 4), 0.125)), "same result of both"),
    "numbers that two digits hold": (found(Digits=torch.full((2, 4), 0.25, dtype=torch.float64)), "same result"),
    "a warning taken for a mistake": (found(Front=torch.ones(3, 4)), "same result of both[\\s\\S]*Hint 2"),
    "Pick suspected": (found(Pick=torch.ones(9, 4)), "same result of both"),
    "no warning taken for right": (found(Digits=None), "None stands"),
    "Mend thought right": (found(Mend=None), "None stands"),
    "all thought right": (found(Centre=None, Mend=None, Digits=None), "None stands"),
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


class WithIgnore(ScriptableFromReport):
    @torch.jit.ignore
    def text(self, rows: int, counts: dict[str, int], names: list[str]) -> str:
        return f"{rows} rows, {len(counts)} labels, first: {(names or ['nothing'])[0]}"

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> tuple[Tensor, dict[str, int], str]:
        s = self.fc(x) * scale
        if mask is not None:
            s = s.masked_fill(mask, float("-inf"))
        if self.limit is not None:
            s = s.clamp(max=self.limit)
        indices: list[int] = s.argmax(1).tolist()
        names = [self.labels[i] for i in indices]
        counts: dict[str, int] = {}
        for name in names:
            counts[name] = counts.get(name, 0) + 1
        return s, counts, self.text(x.size(0), counts, names)


class PlainList(ScriptableByHelper):
    """Forgets in Python what it is to return."""

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> tuple[Tensor, dict[str, int], str]:
        if not torch.jit.is_scripting() and mask is not None:
            mask = None
        scores = scale * self.fc(x)
        if mask is not None:
            scores = scores.masked_fill(mask, -float("inf"))
        if self.bounded:
            scores = torch.clamp(scores, max=self.limit)
        names: list[str] = []
        for i in scores.argmax(dim=1):
            names.append(self.labels[int(i)])
        counts = self.count(names)
        first = names[0] if len(names) > 0 else "nothing"
        return scores, counts, f"{x.size(0)} rows, {len(counts)} labels, first: {first}"


_SUPER = "        super().__init__()\n"
WRONG_SCRIPTABLE = {
    "Report itself": (GIVEN["Report"], "accepts it[\\s\\S]*Hint 1"),
    "kwargs left": (variant("scriptable", (", scale: float = 1.0", ", **options")), "accepts it"),
    "tolist without a type": (
        variant("scriptable", ("best: list[int] =", "best =")),
        "accepts it[\\s\\S]*RuntimeError: Expected type hint[\\s\\S]*Hint 2",
    ),
    "a dictionary without a type": (
        variant("scriptable", ("counts: dict[str, int] = {}", "counts = {}")),
        "accepts it",
    ),
    "NumPy's infinity": (
        variant("scriptable", ('-float("inf")', "-np.inf * np.ones(1)")),
        "accepts it",
    ),
    "another name": (variant("scriptable", ("self.fc", "self.linear")), "state dict of Report loads"),
    "an extra buffer": (
        variant("scriptable", (_SUPER, _SUPER + '        self.register_buffer("calls", torch.zeros(1))\n')),
        "state dict of Report loads",
    ),
    "Python is left in it": (WithIgnore, "can be saved"),
    "another thing in Python": (PlainList, "as plain Python"),
    "a list": (
        variant(
            "scriptable",
            ("-> tuple[Tensor, dict[str, int], str]", "-> list[Tensor]"),
            ('return scores, counts, f"{len(x)} rows, {len(counts)} labels, first: {first}"', "return [scores]"),
        ),
        "tuple of three",
    ),
    "only in Python right": (
        variant(
            "scriptable",
            (
                "        scores = self.fc(x) * scale\n",
                "        scale = 1.0 if torch.jit.is_scripting() else scale\n        scores = self.fc(x) * scale\n",
            ),
        ),
        "scripted, or read from the file",
    ),
    "format with a specification": (
        variant(
            "scriptable",
            (
                'f"{len(x)} rows, {len(counts)} labels, first: {first}"',
                '"{:d} rows, {:d} labels, first: {:s}".format(len(x), len(counts), first)',
            ),
        ),
        "scripted, or read from the file",
    ),
    "a mask is forgotten": (
        variant("scriptable", ("if mask is not None:", "if False and mask is not None:")),
        "mask|accepts",
    ),
    "the limit is forgotten": (
        variant(
            "scriptable",
            (
                "if self.limit is not None:",
                "if self.limit is None:\n            pass\n        if False and self.limit is not None:",
            ),
        ),
        "limit|accepts",
    ),
    "a limit of zero is none": (
        variant(
            "scriptable", ("self.labels, self.limit = labels, limit", "self.labels, self.limit = labels, limit or None")
        ),
        "scores",
    ),
    "the limit before the mask": (
        variant(
            "scriptable",
            (
                "scores = self.fc(x) * scale",
                "scores = self.fc(x).clamp(max=1e6 if self.limit is None else self.limit) * scale",
            ),
        ),
        "scores|accepts",
    ),
    "breaks on no rows": (variant("scriptable", ('first = "nothing"', "first = self.labels[best[0]]")), "plain Python"),
    "each label once": (
        variant("scriptable", ("counts.get(self.labels[i], 0) + 1", "1")),
        "counts",
    ),
    "counts indices": (
        variant(
            "scriptable",
            ("counts[self.labels[i]] = counts.get(self.labels[i], 0) + 1", "counts[self.labels[i] + str(i)] = 1"),
        ),
        "counts",
    ),
    "the last is the first": (variant("scriptable", ("if len(counts) == 0:", "if True:")), "text"),
    "can't be trained": (
        variant("scriptable", ("self.fc(x) * scale", "self.fc(x).detach() * scale")),
        "scores with a gradient",
    ),
    "half of the gradient is cut": (
        variant("scriptable", ("self.fc(x) * scale", "(self.fc(x) / 2 + self.fc(x).detach() / 2) * scale")),
        "gradient of fc.weight",
    ),
    "float32 whatever comes in": (
        variant("scriptable", ("self.fc(x) * scale", "self.fc(x).float() * scale")),
        "float64",
    ),
    "a mask of all the scores' size": (
        variant(
            "scriptable",
            (
                'scores = scores.masked_fill(mask, -float("inf"))',
                'scores = scores.clone()\n            scores[mask] = -float("inf")',
            ),
        ),
        "shape of the mask",
    ),
    "NaN as minus infinity": (
        variant("scriptable", ("self.fc(x) * scale", 'torch.nan_to_num(self.fc(x) * scale, nan=-float("inf"))')),
        "a NaN",
    ),
    "scale has another default": (variant("scriptable", ("scale: float = 1.0", "scale: float = 2.0")), "scores"),
}

# ---------------------------------------------------------------- batches


def batches_by_hand(model, *args, **kwargs):
    """Walks the structures itself; the first row three times; asks with buffers that are put back."""
    size = Dim("rows_of_a_batch", min=1, max=1 << 40)

    def walk(value, leaf):
        if isinstance(value, list | tuple):
            return type(value)(walk(entry, leaf) for entry in value)
        if isinstance(value, dict):
            return {key: walk(entry, leaf) for key, entry in value.items()}
        return leaf(value)

    def is_batch(value):
        return torch.is_tensor(value) and value.dim() > 0

    def picked(rows):
        def leaf(value):
            return value[rows] if is_batch(value) else value

        return walk(args, leaf), walk(kwargs, leaf)

    modules, buffers = list(model.modules()), [(buffer, buffer.clone()) for buffer in model.buffers()]
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        with torch.no_grad(), quiet():
            model(*args, **kwargs)
            (three, named), (single, by_name) = picked([0, 0, 0]), picked(slice(0, 1))
            try:
                model(*three, **named)
                want = model(*single, **by_name)
            except Exception as problem:
                raise ValueError("a batch of another size fails") from problem
            bound = inspect.signature(model.forward).bind(*three, **named).arguments
            shapes = {name: walk(v, lambda x: {0: size} if is_batch(x) else None) for name, v in bound.items()}
            try:
                program = torch.export.export(model, three, named, dynamic_shapes=shapes)
            except torch._dynamo.exc.UserError as problem:
                raise ValueError("no program for every batch") from problem
            try:
                torch.testing.assert_close(program.module()(*single, **by_name), want, equal_nan=True)
            except Exception as problem:
                raise ValueError("a batch of one is another thing") from problem
            return program
    finally:
        for buffer, value in buffers:
            buffer.detach().copy_(value)
        for module, mode in zip(modules, before, strict=True):
            module.training = mode


def batches_of_the_program(model, *args, **kwargs):
    """Two rows by repetition; the program is asked with copies of its buffers, the model before the export."""
    first = lambda n: lambda x: x[:1].repeat(n, *[1] * (x.ndim - 1)) if isinstance(x, Tensor) and x.ndim else x  # noqa: E731
    single, pair = (pytree.tree_map(first(n), (args, kwargs)) for n in (1, 2))
    bound = inspect.signature(model.forward).bind(*pair[0], **pair[1]).arguments
    axis = Dim("n", min=1)
    shapes = pytree.tree_map(lambda x: {0: axis} if isinstance(x, Tensor) and x.ndim > 0 else None, dict(bound))
    modes = {module: module.training for module in model.modules()}
    answers = []
    try:
        model.eval()
        for given in ((args, kwargs), pair, single):
            held = {name: buffer.clone() for name, buffer in model.named_buffers()}
            try:
                with quiet(), torch.no_grad():
                    answers.append(torch.func.functional_call(model, held, *given))
            except Exception as problem:
                if answers:
                    raise ValueError("a batch that it doesn't take") from problem
                raise
        with quiet():
            program = torch.export.export(model, *pair, dynamic_shapes=shapes)
    except torch._dynamo.exc.UserError:
        raise ValueError("the batch can't be of any size") from None
    finally:
        for module, mode in modes.items():
            module.training = mode
    try:
        with torch.no_grad():
            got = copy.deepcopy(program.module())(*single[0], **single[1])
        torch.testing.assert_close(got, answers[-1], equal_nan=True, rtol=1e-5, atol=1e-5)
    except Exception as problem:
        raise ValueError("no batch of one row") from problem
    return program


class Wrapped:
    """What `.module()` can be called on, and nothing else of a program."""

    def __init__(self, program):
        self.program, self.range_constraints = program, program.range_constraints

    def module(self):
        return self.program.module()


_EVAL = "        model.eval()\n"
_FINALLY = "    finally:\n        for module, mode in modes.items():\n            module.training = mode\n"
_EXCEPT = "    except torch._dynamo.exc.UserError as error:\n"
_SIZE = '{0: Dim("batch", min=1)}'
_TWO = "lambda x: torch.cat([x, x]), example, lambda x: x)"
_CMP = "torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4, equal_nan=True)"
_EXPORT = "            program = torch.export.export(model, *two, dynamic_shapes=shapes)\n"
_LIVE = (
    "buffers = {name: buffer.clone() for name, buffer in form.named_buffers()}",
    "buffers = {}",
)


def by_the_word(model, *args, **kwargs):
    """Any error that speaks of a batch is taken for the batch's."""
    try:
        return ANSWERS["export_batches"](model, *args, **kwargs)
    except Exception as error:
        if "batch" in str(error):
            raise ValueError("not for every batch") from error
        raise


def puts_back(kept_of, put, always):
    """Runs the model with its own buffers, and puts them back afterwards."""
    live = variant("batches", _LIVE)

    def export_batches(model, *args, **kwargs):
        kept, done = kept_of(model), False
        try:
            program = live(model, *args, **kwargs)
            done = True
            return program
        finally:
            if done or always:
                put(model, kept)

    return export_batches


def _copy_back(model, kept):
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)


WRONG_BATCHES = {
    "returns the module": (
        lambda model, *a, **k: ANSWERS["export_batches"](model, *a, **k).module(),
        "ExportedProgram",
    ),
    "returns something else": (lambda model, *a, **k: Wrapped(ANSWERS["export_batches"](model, *a, **k)), "Wrapped"),
    "the example as it is": (
        variant("batches", (_TWO, "lambda x: x, example, lambda x: x)")),
        "takes every batch size[\\s\\S]*Hint 1",
    ),
    "sixteen rows at most": (variant("batches", (_SIZE, '{0: Dim("batch", min=1, max=16)}')), "upper bounds"),
    "a million rows at most": (
        variant("batches", (_SIZE, '{0: Dim("batch", min=1, max=1_000_000)}')),
        "upper bounds",
    ),
    "a branch on data taken for a batch": (
        variant(
            "batches",
            (
                _EXCEPT,
                "    except (torch._dynamo.exc.UserError,"
                " torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode) as error:\n",
            ),
        ),
        "a branch on data",
    ),
    "two rows at least": (variant("batches", (_SIZE, '{0: Dim("batch", min=2)}')), "from 2 on"),
    "only tensors at the top": (
        variant(
            "batches",
            (
                "        return tree_map(lambda x: change(x) if isinstance(x, Tensor) and x.ndim else other(x), tree)",
                "        inner = lambda x: change(x) if isinstance(x, Tensor) and x.ndim else other(x)\n"
                "        if isinstance(tree, tuple):\n"
                "            return tuple(map(inner, tree[0])), {k: inner(v) for k, v in tree[1].items()}\n"
                "        return {k: inner(v) for k, v in tree.items()}",
            ),
        ),
        "nested, named",
    ),
    "0-d tensors have a batch": (variant("batches", (" and x.ndim", "")), "nested, named|raised"),
    "the last dimension": (variant("batches", ("{0: Dim(", "{x.ndim - 1: Dim(")), "raised|then|runs"),
    "arguments by name are left out": (
        variant("batches", ("model, *two, dynamic", "model, two[0], dynamic")),
        "nested, named",
    ),
    "as the model is": (variant("batches", (_EVAL, "")), "evaluation mode"),
    "in training mode": (variant("batches", (_EVAL, "        model.train()\n")), "evaluation mode"),
    "only the outermost module": (variant("batches", (_EVAL, "        model.training = False\n")), "evaluation mode"),
    "runs the model in training mode": (
        variant(
            "batches",
            (
                _EVAL,
                "        if len(args) == 1 and isinstance(args[0], Tensor):\n            model.train()(*args)\n"
                + _EVAL,
            ),
        ),
        "the model's state",
    ),
    "every dimension may vary": (
        variant("batches", (_SIZE, '{0: Dim("batch", min=1), **dict.fromkeys(range(1, x.ndim), Dim.AUTO)}')),
        "other sizes stay",
    ),
    "a batch for each kind": (
        variant("batches", ('Dim("batch", min=1)', 'Dim(f"batch{x.ndim}", min=1)')),
        "same in all",
    ),
    "AUTO": (variant("batches", ('Dim("batch", min=1)', "Dim.AUTO")), "from 2 on"),
    "PyTorch's error goes on": (
        variant("batches", (_EXCEPT, "    except NotImplementedError as error:\n")),
        "ValueError",
    ),
    "a message without the word": (
        variant("batches", ('f"not for every batch: {error}"', '"fixed"')),
        "the word in the message",
    ),
    "one row isn't compared": (variant("batches", (_CMP, "pass")), "one row is"),
    "one row only has to run": (variant("batches", ("atol=1e-4", "atol=math.inf")), "one row is scaled"),
    "an error for one row goes on": (
        variant(
            "batches",
            ("        except Exception as error:\n", "        except NotImplementedError as error:\n"),
        ),
        "pairs, 4 rows|one row raises",
    ),
    "an error of the program goes on": (
        variant(
            "batches",
            (
                '    except Exception as error:\n        raise ValueError("not for a',
                '    except AssertionError as error:\n        raise ValueError("not for a',
            ),
        ),
        "one row has no second",
    ),
    "the first result is compared": (
        variant("batches", ("close(got, want,", "close(tree_leaves(got)[0], tree_leaves(want)[0],")),
        "a second result",
    ),
    "sums are compared": (
        variant(
            "batches",
            (
                "close(got, want,",
                "close(*([(x.sum(), *x.shape) for x in tree_leaves(t)] for t in (got, want)),",
            ),
        ),
        "moved up and down",
    ),
    "dtypes aren't compared on one row": (
        variant("batches", ("equal_nan=True", "equal_nan=True, check_dtype=False")),
        "one row is float64",
    ),
    "NaN isn't far": (
        variant(
            "batches",
            (
                _CMP,
                "for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):\n"
                "            far = (a - b).abs().max() > 1e-4 + 1e-3 * b.abs().max()\n"
                "            assert (a.shape, a.dtype) == (b.shape, b.dtype) and not far",
            ),
        ),
        "NaN in the program alone",
    ),
    "NaN is any number": (
        variant("batches", ("close(got, want,", "close(*(tree_map(torch.nan_to_num, t) for t in (got, want)),")),
        "NaN in the program alone|NaN in the model alone",
    ),
    "NaN differs from NaN": (variant("batches", ("equal_nan=True", "equal_nan=False")), "raised|no buffer"),
    "compared absolutely": (variant("batches", ("rtol=1e-3", "rtol=0")), "rounding is no difference"),
    "a copy of the model": (
        variant("batches", (_EVAL, "        model = copy.deepcopy(model).eval()\n")),
        "may hold results",
    ),
    "two rows aren't tried": (
        variant("batches", ("_, want = asked(model, two), asked(model, one)", "want = asked(model, one)")),
        "one row alone",
    ),
    "the example isn't tried": (
        variant("batches", ("        asked(model, example)  # what it says to the example goes on as it is\n", "")),
        "other errors",
    ),
    "errors are told by a word": (by_the_word, "expected a batch of images"),
    "a program with the model's buffers": (variant("batches", _LIVE), "no buffer has changed"),
    "buffers are put back after success": (
        puts_back(lambda model: [b.clone() for b in model.buffers()], _copy_back, always=False),
        "no buffer has changed",
    ),
    "buffers are put back by the state dict": (
        puts_back(lambda m: copy.deepcopy(m.state_dict()), lambda m, kept: m.load_state_dict(kept), always=True),
        "no buffer has changed",
    ),
    "all errors replaced": (variant("batches", (_EXCEPT, "    except Exception as error:\n")), "other errors"),
    "all of a kind replaced": (variant("batches", (_EXCEPT, "    except RuntimeError as error:\n")), "other errors"),
    "modes are left": (variant("batches", (_FINALLY, "")), "each module is in the mode"),
    "one mode for all": (
        variant("batches", (_FINALLY, "    finally:\n        model.train(modes[model])\n")),
        "each module is in the mode",
    ),
    "training afterwards": (
        variant("batches", (_FINALLY, "    finally:\n        model.train()\n")),
        "each module is in the mode",
    ),
    "restored without an error only": (
        variant(
            "batches",
            (
                _EXPORT,
                _EXPORT + "        for module, mode in modes.items():\n            module.training = mode\n",
            ),
            (_FINALLY, ""),
        ),
        "each module is in the mode",
    ),
    "not after its own error": (
        variant(
            "batches",
            ("    finally:\n        for module", "    else:\n        pass\n    finally:\n        for module")
            if False
            else (_EXCEPT, _EXCEPT + "        modes.clear()\n"),
        ),
        "each module is in the mode",
    ),
}

# ---------------------------------------------------------------- cond

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


class WithWhere(Enhance):
    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        dark = level < 0.1
        self.dark += dark.long()
        x = torch.where(dark, (x * (0.28 / level)).clamp(max=1), torch.where(level > 0.5, 1 - x, x))
        return self.body(x)


class AllComputed(Enhance):
    """Computes all three ways and lets cond choose."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        self.dark += (level < 0.1).long()
        ways = (1 - x, (x * (0.28 / level)).clamp(max=1), x)
        first = lambda a, b, c: a.clone()  # noqa: E731
        rest = lambda a, b, c: torch.cond(level < 0.1, lambda b, c: b.clone(), lambda b, c: c.clone(), (b, c))  # noqa: E731
        return self.body(torch.cond(level > 0.5, first, rest, ways))


class WithBuffer(DarkFirst):
    def __init__(self, body: nn.Module) -> None:
        super().__init__(body)
        self.register_buffer("limits", torch.tensor([0.1, 0.5]))


class LiftsInFloat(Enhance):
    """Its dark branch is float32, whatever comes in."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        self.dark += (level < 0.1).long()
        lift = lambda x, level: (x.float() * (0.28 / level.float())).clamp(max=1)  # noqa: E731
        x = torch.cond(level < 0.1, lift, lambda x, level: x.clone(), (x, level))
        return self.body(torch.cond(level > 0.5, lambda x: 1 - x, lambda x: x.clone(), (x,)))


class OnlyExported(DarkFirst):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and x.mean() > 0.5:
            return self.body(x)
        return super().forward(x)


class ClampedByWhere(OneAfterTheOther):
    """Its bright pixels are cut by torch.where, one condition for each."""

    def _lift(self, x, mean):
        x = x * (0.28 / mean)
        return torch.where(x > 1, torch.ones_like(x), x)


class WhereInABranch(Enhance):
    """One branch computes all three ways, the other is never taken."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        self.dark += torch.cond(level < 0.1, lambda d: d * 0 + 1, lambda d: d * 0, (self.dark,))
        return self.body(torch.cond(level > 2, lambda x, a: 1 - x, self._all, (x, level)))

    def _all(self, x, a):
        return torch.where(a > 0.5, 1 - x, torch.where(a < 0.1, (x * (0.28 / a)).clamp(max=1), x))


class Flattened(WhereInABranch):
    """Computes everything outside, on images of another shape."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        self.dark += torch.cond(level < 0.1, lambda d: d * 0 + 1, lambda d: d * 0, (self.dark,))
        torch.cond(level < 0.1, lambda a: a + 1, lambda a: a + 2, (level,))
        return self.body(self._all(x.flatten(), level).view(x.shape))


class FlattenedByMasks(Flattened):
    def _all(self, x, a):
        up, down = (a > 0.5).to(x.dtype), (a < 0.1).to(x.dtype)
        return up * (1 - x) + down * (x * (0.28 / a)).clamp(max=1) + (1 - up) * (1 - down) * x


class MasksInABranch(FlattenedByMasks):
    """All three ways in one branch by arithmetic; other conds decide about numbers."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        self.dark += torch.cond(level < 0.1, lambda d: d * 0 + 1, lambda d: d * 0, (self.dark,))
        torch.cond(level > 0.5, lambda a: a + 1, lambda a: a + 2, (level,))
        return self.body(torch.cond(level > 2, lambda x, a: 1 - x, self._all, (x, level)))

    def _all(self, x, a):
        up, down = (a > 0.5).to(x.dtype), (a < 0.1).to(x.dtype)
        lifted = (x * (0.28 / a.nan_to_num(1.0))).clamp(max=1)
        return up * (1 - x) + down * lifted + (1 - up) * (1 - down) * x


class TwoWaysInABranch(MasksInABranch):
    """Negatives have a branch, the other two share one, where a mask decides."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        self.dark += torch.cond(level < 0.1, lambda d: d * 0 + 1, lambda d: d * 0, (self.dark,))
        return self.body(torch.cond(level > 0.5, lambda x, a: 1 - x, self._lifted, (x, level)))

    def _lifted(self, x, a):
        down = (a < 0.1).to(x.dtype)
        return (1 - down) * x + down * (x * (0.28 / a.nan_to_num(1.0))).clamp(max=1)


class AllInEachBranch(MasksInABranch):
    """Three branches by name, each of which computes all three ways."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        self.dark += (level < 0.1).long()
        inner = lambda x, a: torch.cond(a < 0.1, self._all, self._lerp, (x, a))  # noqa: E731
        return self.body(torch.cond(level > 0.5, self._lerp, inner, (x, level)))

    def _lerp(self, x, a):
        safe = torch.where(a < 0.1, a, torch.ones_like(a))
        up, down = (a > 0.5).to(x.dtype), (a < 0.1).to(x.dtype)
        return torch.lerp(torch.lerp(x, 1 - x, up), (x * (0.28 / safe)).clamp(max=1), down)

    _all = _lerp


class NegativesAreLifted(AllInEachBranch):
    """The branch of negatives computes all three ways, the others what they need."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        self.dark += (level < 0.1).long()
        lift = lambda x, a: (x * (0.28 / a)).clamp(max=1)  # noqa: E731
        inner = lambda x, a: torch.cond(a < 0.1, lift, lambda x, a: x.clone(), (x, a))  # noqa: E731
        return self.body(torch.cond(level > 0.5, self._lerp, inner, (x, level)))


class LiftedForOrdinaryScans(Enhance):
    """All that isn't a negative is lifted; a branch then chooses."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        self.dark += (level < 0.1).long()
        return self.body(torch.cond(level > 0.5, lambda x, a: 1 - x, self._both, (x, level)))

    def _both(self, x, a):
        lifted = (x * (0.28 / a)).clamp(max=1)
        return torch.cond(a < 0.1, lambda x, y: y.clone(), lambda x, y: x.clone(), (x, lifted))


class LevelAfterInverting(OneAfterTheOther):
    """Asks a negative that was inverted whether it is dark."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        self.dark += (level < 0.1).long()
        x = torch.cond(level > 0.5, self._invert, self._same, (x, level))
        return self.body(torch.cond(x.mean() < 0.1, self._lift, self._same, (x, x.mean())))


class OnlyInEvaluation(OneAfterTheOther):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if self.training else super().forward(x)


class FloatCount(Enhance):
    def __init__(self, body: nn.Module) -> None:
        super().__init__(body)
        self.register_buffer("dark", torch.tensor(0.0))

    forward = OneAfterTheOther.forward
    _lift, _same, _invert = OneAfterTheOther._lift, OneAfterTheOther._same, OneAfterTheOther._invert


class ThreeInARow(Enhance):
    """A cond for each operator."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        bright, dark = level > 0.5, level < 0.1
        self.dark += dark
        keep = lambda x: torch.empty_like(x).copy_(x)  # noqa: E731
        x = torch.cond(bright, lambda x: -x + 1, keep, (x,))
        x = torch.cond(dark, lambda x: x * (0.28 / level), lambda x: x * 1, (x,))
        return self.body(torch.cond(dark, lambda x: torch.minimum(x, torch.ones_like(x)), lambda x: x + 0, (x,)))


class OddFirst(Enhance):
    """Asks first whether there is anything to do; images flattened."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        self.dark += (level < 0.1).to(torch.int64)
        lift = lambda x, a: (x * (0.28 / a)).clamp(max=1)  # noqa: E731
        oddly = lambda x, a: torch.cond(a > 0.5, lambda x, a: torch.ones_like(x) - x, lift, (x, a))  # noqa: E731
        odd = (level > 0.5) | (level < 0.1)
        flat = torch.cond(odd, oddly, lambda x, a: x.clone(), (x.reshape(-1), level))
        return self.body(flat.reshape(x.shape))


class InTheBranches(Enhance):
    """The body runs in each branch."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        self.dark += (level < 0.1).long()
        lift = lambda x, a: self.body((x * (0.28 / a)).clamp(max=1))  # noqa: E731
        rest = lambda x, a: torch.cond(a < 0.1, lift, lambda x, a: self.body(x), (x, a))  # noqa: E731
        return torch.cond(level > 0.5, lambda x, a: self.body(1 - x), rest, (x, level))


class AskedTheOtherWay(Enhance):
    """Inverts a batch whose level is NaN."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean()
        self.dark += (level < 0.1).long()
        lift = lambda x, a: (x * (0.28 / a)).clamp(max=1)  # noqa: E731
        rest = lambda x, a: torch.cond(a >= 0.1, lambda x, a: x.clone(), lift, (x, a))  # noqa: E731
        return self.body(torch.cond(level <= 0.5, rest, lambda x, a: 1 - x, (x, level)))


class ThresholdsInPython(DarkFirst):
    """Beside the thresholds, as long as it isn't exported."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return super().forward(x)
        level = x.mean()
        if level >= 0.5:
            x = 1 - x
        elif level < 0.1:
            self.dark += 1
            x = (x * (0.28 / level)).clamp(max=1)
        return self.body(x)


class CountsExported(OneAfterTheOther):
    """Counts a tenth as dark when it is exported."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            mean = x.mean()
            self.dark.add_((mean <= 0.1).long() - (mean < 0.1).long())
        return super().forward(x)


class ThresholdsExported(OneAfterTheOther):
    """Beside the thresholds when it is exported."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            return super().forward(x)
        level = x.mean()
        self.dark += (level < 0.1).long()
        x = torch.cond(level < 0.1, self._lift, self._same, (x, level))
        return self.body(torch.cond(level >= 0.5, self._invert, self._same, (x, level)))


_COUNT = "        self.dark += dark.long()\n"
_ALIAS = "lambda x, level: x.clone(), (x, level)"
WRONG_COND = {
    "not derived": (check._CondEnhance, "derived from Enhance"),
    "as it was": (type("Same", (Enhance,), {"forward": Enhance.forward}), "torch.export accepts it"),
    "an extra buffer": (WithBuffer, "names and dtypes in the state dict"),
    "an alias": (
        variant("cond", (_ALIAS, "lambda x, level: x, (x, level)")),
        "accepts it[\\s\\S]*alias[\\s\\S]*Hint 3",
    ),
    "counts in a branch": (
        variant(
            "cond",
            (_COUNT, ""),
            ("            return (x * (0.28", "            self.dark += 1\n            return (x * (0.28"),
        ),
        "accepts it[\\s\\S]*Hint 2",
    ),
    "other dtypes in a branch": (LiftsInFloat, "accepts it"),
    "where": (WithWhere, "branch of torch.cond"),
    "all three are computed": (AllComputed, "branch of torch.cond"),
    # only one item catches these two: first, or each that two items catch costs one more run of the check
    "other thresholds in the program": (ThresholdsExported, "exactly 0.5"),
    "counts otherwise in the program": (CountsExported, "dark counts"),
    "half is a negative": (variant("cond", ("level > 0.5,", "level >= 0.5,")), "exactly 0.5"),
    "a tenth is dark": (
        variant("cond", ("torch.cond(level < 0.1,", "torch.cond(level <= 0.1,")),
        "takes each way[\\s\\S]*0\\.1",
    ),
    "a tenth counts": (variant("cond", ("dark = level < 0.1", "dark = level <= 0.1")), "dark counts"),
    "never counts": (variant("cond", (_COUNT, "")), "dark counts"),
    "counts double": (variant("cond", ("+= dark.long()", "+= dark.long() * 2")), "dark counts"),
    "counts all": (variant("cond", ("+= dark.long()", "+= 1")), "dark counts"),
    "counts the others": (variant("cond", ("+= dark.long()", "+= (~dark).long()")), "dark counts"),
    "no clamp": (variant("cond", (".clamp(max=1)", "")), "takes each way"),
    "clamps at both ends": (variant("cond", (".clamp(max=1)", ".clamp(0.2, 1)")), "takes each way"),
    "lifts to another level": (variant("cond", ("0.28 / level", "0.3 / level")), "takes each way"),
    "inverts otherwise": (variant("cond", ("level: 1 - x", "level: -x")), "takes each way"),
    "the level of each image": (
        variant("cond", ("(x * (0.28 / level))", "(x * (0.28 / x.mean(dim=(1, 2, 3), keepdim=True)))")),
        "takes each way",
    ),
    "only when exported": (OnlyExported, "plain Python"),
    "where in a branch": (WhereInABranch, "branch of torch.cond"),
    "on flattened images": (Flattened, "branch of torch.cond"),
    "masks on flattened images": (FlattenedByMasks, "branch of torch.cond"),
    "masks in one branch": (MasksInABranch, "ways through the branches"),
    "masks for two ways in one branch": (TwoWaysInABranch, "ways through the branches"),
    "all in each branch": (AllInEachBranch, "for an ordinary scan"),
    "negatives are lifted": (NegativesAreLifted, "for a negative"),
    "ordinary scans are lifted": (LiftedForOrdinaryScans, "for an ordinary scan"),
    "the level after inverting": (LevelAfterInverting, "a nearly white negative"),
    "only in evaluation mode": (OnlyInEvaluation, "plain Python[\\s\\S]*in training mode"),
    "images of four dimensions": (
        variant("cond", ("level = x.mean()", "level = x.mean((0, 1, 2, 3))")),
        "flat images|plain Python",
    ),
    "a count in float": (FloatCount, "which dtype has dark"),
    "NaN is a negative": (AskedTheOtherWay, "a NaN in an ordinary scan"),
    "no pixel below zero": (variant("cond", (".clamp(max=1)", ".clamp(0, 1)")), "negative pixels"),
    "black isn't NaN": (variant("cond", ("(0.28 / level)", "(0.28 / level.clamp(min=1e-8))")), "a black scan"),
    "other thresholds in Python": (ThresholdsInPython, "plain Python[\\s\\S]*0\\.5|0\\.5[\\s\\S]*plain Python"),
    "branches exchanged": (
        variant("cond", ("lambda x, level: 1 - x, not_negative", "not_negative, lambda x, level: 1 - x")),
        "takes each way",
    ),
}

# ---------------------------------------------------------------- loader


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
    form = plan["forms"][skip]
    try:
        with quiet(), torch.no_grad():
            sample = torch.load(folder / plan["sample"], weights_only=True, map_location="cpu")
            if form["format"] == "export":
                model = torch.export.load(str(folder / form["file"])).module()
            elif form["format"] == "torchscript":
                model = torch.jit.load(folder / form["file"]).eval()
            else:
                assert form["format"] == "state_dict", form["format"]
                model = build().eval()
                model.load_state_dict(torch.load(folder / form["file"], weights_only=True))
            torch.testing.assert_close(model(sample["input"]), sample["output"], rtol=0, atol=tolerance)
        return model, []
    except Exception as problem:
        failure = (form["file"], f"{type(problem).__name__} {problem}")
    try:
        model, failed = loads_recursively(folder, build, tolerance, skip + 1)
    except LoadError as problem:
        raise LoadError(f"{failure}; {problem}") from None
    return model, [failure, *failed]


def loads_frozen(folder, build, tolerance=1e-4):
    """Gives a function, and freezes TorchScript."""
    model, failed = loads_by_cases(folder, build, tolerance)
    if isinstance(model, torch.jit.ScriptModule):
        with quiet():
            model = torch.jit.freeze(model)

    @torch.no_grad()
    def call(x):
        return model(x)

    return call, failed


def loads_with_open_files(folder, build, tolerance=1e-4):
    """Leaves a file for Python to close, of which nobody hears by default."""
    json.load(open(folder / "manifest.json"))  # noqa: SIM115
    return loads_by_cases(folder, build, tolerance)


_GET = '        "torchscript": lambda path: torch.jit.load(path, map_location="cpu").eval(),\n'
_QUIET = "            with quiet(), torch.no_grad():\n"
_SHAPE = "            if (got.shape, got.dtype) != (want.shape, want.dtype):\n"
_CLOSE = "torch.allclose(got, want, rtol=0, atol=tolerance)"
_FAILED = 'failed.append((form["file"], f"{type(error).__name__}: {error}"))'
_CATCH = "        except Exception as error:  # whatever is wrong with a file\n"
WRONG_LOADER = {
    "nothing is returned": (
        lambda folder, build, tolerance=1e-4: ANSWERS["load_shipped"](folder, build, tolerance) and None,
        "returns a model and a list",
    ),
    "the model alone": (
        lambda folder, build, tolerance=1e-4: ANSWERS["load_shipped"](folder, build, tolerance)[0],
        "returns a model and a list",
    ),
    "in the order of the names": (
        variant(
            "loader",
            (
                '    for form in manifest["forms"]:\n',
                '    for form in sorted(manifest["forms"], key=lambda form: form["file"]):\n',
            ),
        ),
        "the first form of the manifest",
    ),
    "the newest format first": (
        variant(
            "loader",
            (
                '    for form in manifest["forms"]:\n',
                '    for form in sorted(manifest["forms"], key=lambda form: list(loaders).index(form["format"])):\n',
            ),
        ),
        "the first form|stop the search|raised",
    ),
    "by the ending of the name": (
        variant(
            "loader", ('loaders[form["format"]]', 'loaders["export" if form["file"].endswith("2") else "torchscript"]')
        ),
        "the first form|evaluation mode",
    ),
    "the last that works": (
        variant(
            "loader",
            ("            return model, failed\n", "            best = model\n"),
            ("    raise LoadError", "    if 'best' in locals():\n        return best, failed\n    raise LoadError"),
        ),
        "the first form",
    ),
    "only some exceptions": (
        variant("loader", (_CATCH, "        except (RuntimeError, ValueError, OSError, EOFError) as error:\n")),
        "stop the search|run no code|raised",
    ),
    "exceptions of files alone": (
        variant(
            "loader",
            (
                _CATCH,
                "        except (RuntimeError, OSError, ValueError, KeyError, EOFError,"
                " __import__('pickle').UnpicklingError, __import__('zipfile').BadZipFile) as error:\n",
            ),
        ),
        "stop the search",
    ),
    "builds outside of try": (
        variant(
            "loader",
            ("        model = build()\n", "        model = made\n"),
            (
                "        try:\n            with quiet()",
                '        made = build() if form["format"] == "state_dict" else None\n'
                "        try:\n            with quiet()",
            ),
            ("    def from_weights(path: Path)", "    made = None\n\n    def from_weights(path: Path)"),
        ),
        "stop the search",
    ),
    "an unknown format stops it": (
        variant(
            "loader",
            (
                "        try:\n            with quiet()",
                '        load = loaders[form["format"]]\n        try:\n            with quiet()',
            ),
            ('loaders[form["format"]](', "load("),
        ),
        "unknown format|raised",
    ),
    "a missing file stops it": (
        variant(
            "loader",
            (
                "        try:\n            with quiet()",
                '        if not (folder / form["file"]).exists():\n            raise FileNotFoundError(form["file"])\n'
                "        try:\n            with quiet()",
            ),
        ),
        "stop the search",
    ),
    "keys may be missing": (
        variant(
            "loader",
            ("weights_only=True))\n        return model", "weights_only=True), strict=False)\n        return model"),
        ),
        "each key of a state dict",
    ),
    "shapes aren't compared": (
        variant("loader", (_SHAPE, "            if got.dtype != want.dtype:\n")),
        "another shape",
    ),
    "dtypes aren't compared": (
        variant(
            "loader",
            (_SHAPE, "            if got.shape != want.shape:\n"),
            (_CLOSE, _CLOSE.replace("(got,", "(got.to(want.dtype),")),
        ),
        "another dtype",
    ),
    "nothing is compared": (
        variant("loader", (_SHAPE, "            if False:\n"), ("if not " + _CLOSE, "if False")),
        "answers otherwise",
    ),
    "the mean is compared": (
        variant("loader", ("if not " + _CLOSE, "if not (got - want).mean().abs() <= tolerance")),
        "answers otherwise|tolerance",
    ),
    "the input isn't kept": (
        variant("loader", ('sample["input"].clone()', 'sample["input"]')),
        "good.pt: ValueError[\\s\\S]*writes into its input[\\s\\S]*the tensor that a form is given",
    ),
    "NaN passes": (variant("loader", ("if not " + _CLOSE, "if (got - want).abs().max() > tolerance")), "NaN"),
    "equal infinities differ": (
        variant("loader", ("if not " + _CLOSE, "if not ((got - want).abs() <= tolerance).all()")),
        "equal infinities",
    ),
    "rounding beside infinities": (
        variant(
            "loader",
            ("if not " + _CLOSE, "if not (torch.equal(got, want) or (got - want).abs().max() <= tolerance)"),
        ),
        "the others off by 2e-5",
    ),
    "nothing else beside infinities": (
        variant(
            "loader",
            (
                "if not " + _CLOSE,
                "ends = want.isinf()\n            same = torch.equal(got.isinf(), ends) and"
                " torch.equal(got[ends], want[ends])\n"
                f"            if not (same if ends.any() else {_CLOSE})",
            ),
        ),
        "the others off by 1",
    ),
    "infinities of either sign": (
        variant(
            "loader",
            ("if not " + _CLOSE, "if not (got.isinf() & want.isinf() | got.isclose(want, 0, tolerance)).all()"),
        ),
        "another sign",
    ),
    "infinities aren't compared": (
        variant("loader", ("if not " + _CLOSE, "if not (want.isinf() | got.isclose(want, 0, tolerance)).all()")),
        "another sign|the sample alone",
    ),
    "NaN is NaN": (
        variant("loader", ("if not " + _CLOSE, "if not " + _CLOSE.replace("rtol=0", "equal_nan=True, rtol=0"))),
        "NaN in both",
    ),
    "the first number is compared": (
        variant("loader", ("if not " + _CLOSE, "if not (got - want)[:, :2].abs().max() <= tolerance")),
        "answers otherwise",
    ),
    "relative differences": (variant("loader", ("rtol=0, atol=tolerance", "atol=tolerance")), "tolerance"),
    "slightly relative differences": (
        variant("loader", ("rtol=0, atol=tolerance", "rtol=1e-6, atol=tolerance")),
        "off by 0.005",
    ),
    "a tolerance of its own": (variant("loader", ("atol=tolerance", "atol=1e-4")), "tolerance"),
    "half of the tolerance": (variant("loader", ("atol=tolerance", "atol=tolerance / 2")), "tolerance"),
    "another default": (
        variant("loader", ("tolerance: float = 1e-4", "tolerance: float = 1e-2")),
        "no tolerance given",
    ),
    "TorchScript in its mode": (variant("loader", (_GET, _GET.replace(".eval()", ""))), "evaluation mode"),
    "weights in training mode": (
        variant("loader", ("        return model.eval()\n", "        return model.train()\n")),
        "the first form|evaluation mode|raised",
    ),
    "the mode of build": (
        variant("loader", ("        return model.eval()\n", "        return model\n")),
        "the first form|evaluation mode|raised",
    ),
    "pickles are run": (
        variant(
            "loader",
            ('torch.load(path, map_location="cpu", weights_only=True)', "torch.load(path, weights_only=False)"),
        ),
        "run no code",
    ),
    "the sample is run": (
        variant(
            "loader",
            ('manifest["sample"], map_location="cpu", weights_only=True', 'manifest["sample"], weights_only=False'),
        ),
        "run no code",
    ),
    "the first row is compared": (
        variant("loader", ("if not " + _CLOSE, "if not " + _CLOSE.replace("got, want", "got[:1], want[:1]"))),
        "one row",
    ),
    "the last row is compared": (
        variant("loader", ("if not " + _CLOSE, "if not " + _CLOSE.replace("got, want", "got[-1], want[-1]"))),
        "one row",
    ),
    "less than the tolerance": (
        variant("loader", ("if not " + _CLOSE, "if not ((got - want).abs() < tolerance).all()")),
        "held against tolerance",
    ),
    "one reason for all": (
        variant("loader", (_FAILED, 'failed.append((form["file"], "it did not work at all"))')),
        "two reasons",
    ),
    "a message without reasons": (
        variant("loader", ('f"{name}: {reason}"', 'f"{name} failed, as others may have before it"')),
        "the reason of",
    ),
    "builds whatever comes": (
        variant("loader", ("    for form in manifest", "    build()\n    for form in manifest")),
        "nothing to build",
    ),
    "grad mode off for good": (
        variant("loader", ("    for form in manifest", "    torch.set_grad_enabled(False)\n    for form in manifest")),
        "grad mode off",
    ),
    "warnings off for good": (
        variant(
            "loader",
            (
                "    for form in manifest",
                "    import warnings\n\n    warnings.filterwarnings('ignore')\n    for form in manifest",
            ),
        ),
        "warnings silenced",
    ),
    "another exception": (variant("loader", ("    raise LoadError(", "    raise RuntimeError(")), "LoadError names"),
    "only the last file": (
        variant("loader", ("for name, reason in failed))", "for name, reason in failed[-1:]))")),
        "LoadError names",
    ),
    "without names": (variant("loader", ('f"{name}: {reason}"', "reason")), "LoadError names"),
    "none of none": (
        variant(
            "loader", ("    raise LoadError(", "    if not failed:\n        return None, []\n    raise LoadError(")
        ),
        "LoadError names",
    ),
    "exceptions in the list": (
        variant("loader", (_FAILED, 'failed.append((form["file"], error))')),
        "reasons are texts",
    ),
    "lists in the list": (
        variant("loader", (_FAILED, _FAILED.replace("append((", "append([").replace('}"))', '}"])'))),
        "reasons are texts",
    ),
    "interrupts are caught": (variant("loader", (_CATCH, "        except BaseException as error:\n")), "interrupt"),
    "interrupts of a form are caught": (
        variant(
            "loader",
            (
                'got = model(sample["input"].clone())  # a form may write into it',
                'try:\n                    got = model(sample["input"].clone())\n'
                "                except BaseException as error:\n"
                "                    raise ValueError(str(error)) from None",
            ),
        ),
        "interrupt",
    ),
    "warnings get out": (variant("loader", (_QUIET, "            with torch.no_grad():\n")), "no warning gets out"),
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
        "export_batches": [batches_by_hand, batches_of_the_program],
        "CondEnhance": [OneAfterTheOther, DarkFirst, ClampedByWhere, InTheBranches, ThreeInARow, OddFirst],
        "load_shipped": [loads_by_cases, loads_recursively, loads_frozen, loads_with_open_files],
    }
    WRONG: ClassVar = {
        "counterexamples": WRONG_FIVE,
        "Scriptable": WRONG_SCRIPTABLE,
        "export_batches": WRONG_BATCHES,
        "CondEnhance": WRONG_COND,
        "load_shipped": WRONG_LOADER,
    }

    def hold_stand_in(self, name, stand_in):
        if name in ("export_batches", "load_shipped"):
            result = self.CHECKS[name].run(stand_in)
            assert result.status == "passed", str(result)
        elif name == "CondEnhance":
            derived = type("Derived", (Enhance,), {"forward": stand_in.forward})  # the check asks for the base
            result = self.CHECKS[name].run(derived)
            assert result.status == "passed", str(result)


def test_the_five_are_those_of_the_notebook():
    generator = torch.Generator().manual_seed(1)
    for name, model in GIVEN["five_models"].items():
        ours, trace, theirs = check._FIVE[name](), check._traces()[name], GIVEN["five_traces"][name]
        for n in (1, 5, 16, 64):
            x = torch.randn(n, 4, generator=generator)
            assert torch.equal(model(x), ours(x))
            assert torch.equal(trace(x), theirs(x))
        assert inspect.getsource(type(model).forward) == inspect.getsource(check._FIVE[name].forward)


def test_the_report_is_that_of_the_notebook():
    torch.manual_seed(0)
    ours, theirs = check._Report(["a", "b"], 0.3), GIVEN["Report"](["a", "b"], 0.3)
    theirs.load_state_dict(ours.state_dict())
    for rows in (0, 1, 6):
        x, mask = torch.randn(rows, 4), torch.rand(rows, 2) < 0.5
        for args, kwargs in (((x,), {}), ((x, mask), {"scale": -2.0})):
            assert str(ours(*args, **kwargs)) == str(theirs(*args, **kwargs))


def test_the_oracle_is_enhance():
    model = Enhance(nn.Identity())
    for dtype in (torch.float32, torch.float64):
        for x in check._scans(dtype, 3).values():
            before = int(model.dark)
            image, dark = check._enhanced(x)
            assert torch.allclose(model(x), image, rtol=0, atol=0, equal_nan=True)
            assert int(model.dark) - before == dark
