"""The checks of 15-03 accept right answers, however written, and reject what a student might really write."""

import copy
import re
import time
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from answer_variants import variants
from check_protocol import CheckProtocol, idle
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from torch.utils.flop_counter import FlopCounterMode

from course.exercise_form import student_source
from course.lesson_code import answers, definitions
from shared.checks import topic_15_03 as check

CELLS = """
    mini-tables mini-walk mini-module flops-of norms assert-partition norm-linear first-renames rule
    split-to-fused rule-find rule-complete rule-results rule-tensors rule-entries apply-rule remap stems moves
"""
GIVEN = definitions("15-03", *CELLS.split())
ANSWERS = answers("15-03", given=GIVEN)
STUBS = answers("15-03", edit=student_source, given=GIVEN)
IDLE = idle("15-03", GIVEN)
NAMES = {
    "registration": "CarefulModule",
    "summary": "summarize",
    "groups": "param_groups",
    "lazy": "LazyNormLinear",
    "surgery": "convert",
}
variant = variants("15-03", NAMES, GIVEN)


# ---------------------------------------------------------------- registration

MiniModule = GIVEN["MiniModule"]


class ByCases(MiniModule):
    """One case after the other, with the tables' own names."""

    def __setattr__(self, name, value):
        own = vars(self)
        if isinstance(value, nn.Parameter):
            self._drop(name, "_buffers", "_modules")
            own.pop(name, None)
            self._parameters[name] = value
        elif name in self._parameters:
            self._only_none(name, value)
            self._parameters[name] = None
        elif isinstance(value, MiniModule):
            self._drop(name, "_buffers")
            own.pop(name, None)
            self._modules[name] = value
        elif name in self._modules:
            self._only_none(name, value)
            self._modules[name] = None
        elif name in self._buffers:
            if not isinstance(value, torch.Tensor):
                self._only_none(name, value)
            self._buffers[name] = value
        else:
            object.__setattr__(self, name, value)

    def _drop(self, name, *tables):
        for table in tables:
            getattr(self, table).pop(name, None)

    def _only_none(self, name, value):
        if value is not None:
            raise TypeError(f"{name} cannot be {value!r}")

    def __delattr__(self, name):
        for table in ("_parameters", "_modules", "_buffers"):
            if name in getattr(self, table):
                getattr(self, table).pop(name)
                return
        object.__delattr__(self, name)


class ByTable(ByCases):
    """Looks the table up first, and leaves the rest to MiniModule."""

    def __setattr__(self, name, value):
        tables = {"_parameters": nn.Parameter, "_modules": MiniModule, "_buffers": torch.Tensor}
        home = next((table for table in tables if name in self.__dict__[table]), None)
        moves = isinstance(value, nn.Parameter) or (isinstance(value, MiniModule) and home != "_parameters")
        if home and not moves:
            if not (value is None or isinstance(value, tables[home])):
                raise TypeError(name)
            self.__dict__[home][name] = value
            return
        if moves:
            goal = "_parameters" if isinstance(value, nn.Parameter) else "_modules"
            for table in {*tables} - {goal}:
                self.__dict__[table].pop(name, None)
            self.__dict__.pop(name, None)
        MiniModule.__setattr__(self, name, value)


registration = partial(variant, "registration")
_POP = "        self.__dict__.pop(name, None)\n"
_DEL = "        object.__delattr__(self, name)\n"
WRONG_REGISTRATION = {
    "not derived": (nn.Module, "derived from MiniModule"),
    "leaves the ordinary attribute": (
        registration((_POP, "")),
        "takes the name over[\\s\\S]*Hint 2",
    ),
    "parameters of one class": (
        registration(("if isinstance(value, nn.Parameter):", "if type(value) is nn.Parameter:")),
        "takes the name over",
    ),
    "children of the same class": (
        registration(("isinstance(value, MiniModule)", "type(value) is type(self)")),
        "takes the name over",
    ),
    "a module takes a parameter's name": (
        registration((' and home != "_parameters":', ":")),
        "raises TypeError[\\s\\S]*a module for a name in _parameters",
    ),
    "a buffer moves to the end": (
        registration(("table != home:", "table != home or (table == '_buffers' and value is not None):")),
        "stays a buffer",
    ),
    "None becomes an attribute": (
        registration(
            ("        if home is None:", "        home = None if value is None else home\n        if home is None:")
        ),
        "None keeps",
    ),
    "empties before it raises": (
        registration(
            ("            raise TypeError", "            tables[home].pop(name)\n            raise TypeError")
        ),
        "changes nothing",
    ),
    "ValueError": (registration(("raise TypeError", "raise ValueError")), "ValueError: cannot assign"),
    "a property loses its setter": (
        registration(("super().__setattr__(name, value)", "self.__dict__[name] = value")),
        "go to MiniModule[\\s\\S]*a property",
    ),
    "del of tables only": (registration((_DEL, "        raise AttributeError(name)\n")), "del removes"),
    "del of nothing": (registration((_DEL, "        del self.__dict__[name]\n")), "del for a name in nowhere"),
}

# ---------------------------------------------------------------- summary


def summarize_by_wrapping(model, *args, **kwargs):
    """No hooks: forward of each leaf is replaced on the instance."""
    names, rows, seen, modes = {}, [], set(), [m.training for m in model.modules()]
    for name, module in model.named_modules():
        if not module._modules:
            names[module] = name

    def shapes(out):
        if torch.is_tensor(out):
            return [tuple(out.shape)]
        if isinstance(out, dict):
            out = list(out.values())
        return [s for o in out for s in shapes(o)] if isinstance(out, list | tuple) else []

    def wrap(module):
        inner = module.forward

        def forward(*a, **k):
            start = time.perf_counter()
            out = inner(*a, **k)
            seconds = time.perf_counter() - start
            mine = [p for p in module.parameters() if not any(p is q for q in seen)]
            seen.update(mine)
            rows.append(
                {
                    "seconds": seconds,
                    "flops": GIVEN["flops_of"](module, out),
                    "parameters": sum(p.numel() for p in mine),
                    "shapes": shapes(out),
                    "kind": module.__class__.__name__,
                    "name": names[module],
                }
            )
            return out

        module.forward = forward

    try:
        for module in names:
            wrap(module)
        model.eval()
        with torch.inference_mode():
            model(*args, **kwargs)
    finally:
        for module in names:
            vars(module).pop("forward", None)
        for module, mode in zip(model.modules(), modes, strict=True):
            module.training = mode
    return rows


summary = partial(variant, "summary")
_RUN = "            model(*args, **kwargs)\n"
_HANDLES = "        for handle in handles:\n            handle.remove()\n"
_MODES = "        for module, mode in modes.items():\n            module.training = mode\n"
WRONG_SUMMARY = {
    "a key less": (summary(('            "seconds": seconds,\n', "")), "list of dictionaries with name"),
    "a copy runs": (
        lambda model, *a, **k: ANSWERS["summarize"](copy.deepcopy(model), *a, **k),
        "runs the model itself",
    ),
    "a warm-up": (
        summary((_RUN, _RUN + "            rows.clear()\n            counted.clear()\n" + _RUN)),
        "runs the model itself, once",
    ),
    "last names": (
        summary(
            ("model.named_modules():", "{m: n for n, m in model.named_modules(remove_duplicate=False)}.items():"),
            ("for name, module in {", "for module, name in {"),
        ),
        "one row for each call[\\s\\S]*Hint 1",
    ),
    "kind as a class": (summary(("type(module).__name__", "type(module)")), "one row for each call"),
    "no dictionaries": (summary(("dict | list | tuple", "list | tuple")), "shapes are[\\s\\S]*Hint 2"),
    "torch.Size": (summary(("[tuple(output.shape)]", "[output.shape]")), "shapes are"),
    "counted by module": (
        summary(
            (
                "new = set(module.parameters()) - counted",
                "new = set() if module in counted else set(module.parameters())",
            ),
            ("counted.update(new)", "counted.add(module)"),
        ),
        "counted once[\\s\\S]*Hint 3",
    ),
    "only what learns": (
        summary(("sum(p.numel() for p in new)", "sum(p.numel() for p in new if p.requires_grad)")),
        "counted once",
    ),
    "flops of one row": (
        summary(("flops_of(module, output)", "flops_of(module, output[:1] if torch.is_tensor(output) else output)")),
        "flops are",
    ),
    "a clock for all": (summary(("clock() - started.pop()", "clock() - started[0]")), "seconds are"),
    "only the root in eval mode": (
        summary(("        model.eval()\n", "        model.training = False\n")),
        "evaluation mode[\\s\\S]*training, no graph",
    ),
    "raises its own": (
        summary(("    finally:\n", "    except Exception as e:\n        raise ValueError from e\n    finally:\n")),
        "exception goes through",
    ),
    "the mode of the root for all": (summary((_MODES, "        model.train(modes[model])\n")), "modes, hooks"),
    "hooks stay after an interrupt": (
        summary(("    finally:\n" + _HANDLES, "    except Exception:\n" + _HANDLES + "        raise\n    finally:\n")),
        "modes, hooks",
    ),
    "autograd off after an exception": (
        summary(
            (
                "        with torch.no_grad():\n" + _RUN,
                "        torch.set_grad_enabled(False)\n" + _RUN[4:] + "        torch.set_grad_enabled(True)\n",
            )
        ),
        "autograd after",
    ),
}

# ---------------------------------------------------------------- groups


def groups_by_owner(model, lr, weight_decay=0.0, layers=(), layer_decay=1.0):
    """Walks over the modules, and merges by a search in the list."""
    known = {name for name, _ in model.named_modules()}
    for layer in layers:
        if layer not in known:
            raise ValueError(f"there is no submodule {layer}")
    rates = dict(zip(layers, (lr * layer_decay**k for k in reversed(range(len(layers)))), strict=True))
    found, seen = [], set()
    for path, module in model.named_modules():
        owner = path
        while owner and owner not in rates:
            owner = owner.rpartition(".")[0]
        rate = rates.get(owner, next(iter(rates.values()), lr))
        for parameter in module.parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            decay = weight_decay
            if isinstance(module, GIVEN["NORMS"]) or len(parameter.shape) <= 1:
                decay = 0.0
            for group in found:
                if (group["lr"], group["weight_decay"]) == (rate, decay):
                    group["params"] += [parameter]
                    break
            else:
                found.append({"weight_decay": decay, "lr": rate, "params": [parameter]})
    return found


groups = partial(variant, "groups")
_PLAIN = "parameter.ndim < 2 or isinstance(modules[path], NORMS)"
_RETURN = '    return [{"params": ps, "lr": rate, "weight_decay": d} for (rate, d), ps in groups.items()]\n'
WRONG_GROUPS = {
    "a dictionary": (groups((_RETURN, "    return groups\n")), "list of dictionaries with params"),
    "frozen ones, too": (
        groups(("        if not parameter.requires_grad:\n            continue\n", "")),
        r"no frozen one in any[\s\S]*0 in entry 'groups of 0\.weight, which is frozen'[\s\S]*\(a frozen layer\)",
    ),
    "tied ones twice": (
        groups(("model.named_parameters()", "model.named_parameters(remove_duplicate=False)")),
        "in one group",
    ),
    "prefix without the dot": (
        groups(('if f"{path}.".startswith(f"{layer}.")]', "if name.startswith(layer)]")),
        "rates are[\\s\\S]*Hint 1",
    ),
    "one step too many": (groups(("len(layers) - 1 - place", "len(layers) - place")), "rates are"),
    "the outermost": (groups(("max(holders, key=len)", "min(holders, key=len)")), "rates are"),
    "by name": (groups((_PLAIN, '"bias" in name or "norm" in name')), "no decay"),
    "by the class's name": (
        groups((_PLAIN, 'parameter.ndim < 2 or "Norm" in type(modules[path]).__name__')),
        "no decay",
    ),
    "by dimension": (groups((_PLAIN, "parameter.ndim < 2")), "no decay"),
    "a group each": (
        groups((_RETURN, _RETURN.replace("ps, ", "[p], ").replace("items()]", "items() for p in ps]"))),
        "no two have the same[\\s\\S]*Hint 2",
    ),
    "an empty group": (groups((_RETURN, "    groups.setdefault((lr, 0.0), [])\n" + _RETURN)), "no group is empty"),
    "KeyError": (groups(("raise ValueError(", "raise KeyError(")), "unknown layer"),
    "parameters count as layers": (
        groups(("layer not in modules:", "not any(name.startswith(layer) for name in model.state_dict()):")),
        "unknown layer",
    ),
}

# ---------------------------------------------------------------- lazy


class LazyByOnes(LazyModuleMixin, GIVEN["NormLinear"]):
    """Runs the layer itself with length 1 and bias 0, and corrects what it gives."""

    cls_to_become = GIVEN["NormLinear"]

    def __init__(self, outputs):
        super().__init__(1, 1)
        del self.direction, self.length, self.bias
        for name in ("bias", "length", "direction"):
            self.register_parameter(name, UninitializedParameter())
        self.shape = outputs

    @staticmethod
    def of(linear):
        made = LazyByOnes(linear.out_features)
        weight = linear.weight
        made.direction.materialize(weight.shape, weight.device, weight.dtype)
        with torch.no_grad():
            made.direction.copy_(weight)
        return made

    @torch.no_grad()
    def initialize_parameters(self, x):
        has = {n: not isinstance(p, UninitializedParameter) for n, p in self.named_parameters()}
        given = {n: p.clone() for n, p in self.named_parameters() if has[n]}
        for name, value in (
            ("direction", torch.empty(self.shape, x.shape[-1]).normal_(0, 0.05)),
            ("length", 1),
            ("bias", 0),
        ):
            parameter = getattr(self, name)
            if not has[name]:
                parameter.materialize(value.shape if name == "direction" else (self.shape,), x.device, x.dtype)
                parameter.copy_(value.to(x) if name == "direction" else torch.full((self.shape,), float(value)))
        self.length.fill_(1)
        self.bias.fill_(0)
        y = self.forward(x).reshape(-1, self.shape)
        deviation = (y - y.mean(0)).pow(2).mean(0).sqrt()
        self.length.copy_(given.get("length", torch.where(deviation >= 1e-4, deviation.reciprocal(), 1)))
        self.bias.copy_(given.get("bias", -y.mean(0) * self.length))


class Lazy(ANSWERS["LazyNormLinear"]):
    """The notebook's, to be spoilt."""


class FourthParameter(Lazy):
    def __init__(self, outputs):
        super().__init__(outputs)
        self.gain = nn.Parameter(torch.ones(outputs))


class OfShares(Lazy):
    @classmethod
    def of(cls, linear):
        made = cls(linear.out_features)
        made.direction = linear.weight
        return made


lazy = partial(variant, "lazy")
_LENGTH = "torch.where(deviation < 1e-4, 1.0, 1 / deviation)"
_BIAS = "-self.length * rows.mean(dim=0)"
WRONG_LAZY = {
    "a fourth parameter": (FourthParameter, "wait for the first forward"),
    "always float32": (lazy((", dtype=x.dtype", "")), "in place"),
    "other objects": (
        lazy((f"self.length.copy_({_LENGTH})", f"self.length = nn.Parameter({_LENGTH})")),
        "in place[\\s\\S]*Hint 3",
    ),
    "direction of deviation 1": (lazy(("normal_(std=0.05)", "normal_()")), "drawn with deviation"),
    "a loaded bias is started anew": (lazy(('if "bias" in lazy:', "if True:")), "was loaded is kept[\\s\\S]*Hint 1"),
    "all or nothing": (
        lazy(
            ("        for name in lazy:", "        if not lazy:\n            return\n        for name in lazy:"),
            ("in lazy:\n   ", "in ('direction', 'length', 'bias'):\n   "),
        ),
        "was loaded is kept",
    ),
    "count less one": (lazy(("correction=0", "correction=1")), "length gives[\\s\\S]*Hint 2"),
    "a variance below 1e-4": (lazy(("deviation < 1e-4", "deviation**2 < 1e-4")), "length gives"),
    "mean square less square of the mean": (
        lazy(
            (
                "rows.std(dim=0, correction=0)",
                "((rows**2).mean(dim=0) - rows.mean(dim=0) ** 2).clamp(min=0).sqrt()",
            )
        ),
        "length gives[\\s\\S]*far from 0",
    ),
    "over the first dimension": (
        lazy((".flatten(0, -2)", ".flatten(1, -2)[:, 0] if x.ndim > 2 else x @ F.normalize(self.direction, dim=1).T")),
        "length gives[\\s\\S]*permuted view",
    ),
    "a bias for length 1": (
        lazy((_BIAS, "-rows.mean(dim=0) * (self.length if 'length' in lazy else 1)")),
        "bias gives[\\s\\S]*a loaded length",
    ),
    "of shares the weight": (OfShares, "has a copy of its weight"),
    "of with the weight transposed": (
        lazy(("made.direction.data.copy_(weight)", "made.direction.data.copy_(weight.flip(0))")),
        "has a copy of its weight",
    ),
}

# ---------------------------------------------------------------- surgery


def convert_by_two_passes(state, target, classes):
    """Rules for the names; then the shapes, by the keys of the target."""
    rule, parts = GIVEN["Rule"], ("query", "key", "value")
    rules = [rule(r"_orig_mod\.steps", None), rule(r"_orig_mod\.(.*)", r"\1")]
    rules += [
        rule(
            rf"blocks\.(\d+)\.self_attn\.in_proj_{end}",
            tuple(rf"blocks.\1.{part}.{end}" for part in parts),
            lambda t: torch.tensor_split(t, 3),
        )
        for end in ("weight", "bias")
    ]
    for old, new in (
        ("self_attn.out_proj", "out"),
        ("linear1", "up"),
        ("linear2", "down"),
        ("norm1", "ln1"),
        ("norm2", "ln2"),
    ):
        rules.append(rule(rf"(blocks\.\d+)\.{re.escape(old)}\.(\w+)", rf"\1.{new}.\2"))
    result, report = GIVEN["remap_state_dict"](state, rules, target)
    if report.left:
        raise ValueError(f"not planned: {', '.join(report.left)}")
    if report.missing:
        raise ValueError(f"nothing fills {', '.join(report.missing)}")
    for key in ("head.weight", "head.bias"):
        result[key] = torch.stack([result[key][k] for k in classes])
    if len(target["head.bias"]) != len(classes):
        raise ValueError("head.bias has other classes")
    old, new = result["position"].shape[1], target["position"].shape[1]
    if old != new:
        result["position"] = GIVEN["resize_positions"](result["position"], int(new**0.5 + 0.5))
    if target["patch.weight"].shape[1] == 1:
        result["patch.weight"] = torch.einsum("ochw->ohw", result["patch.weight"]).unsqueeze(1)
    for key, tensor in target.items():
        if result[key].shape != tensor.shape:
            raise ValueError(f"{key} is {tuple(result[key].shape)}")
    return OrderedDict(result)


def wraps(change):
    """The notebook's answer with its result changed: change(result, state, target, classes)."""
    return lambda *given: change(dict(ANSWERS["convert"](*given)), *given)


def prepared(change):
    """The notebook's answer for another state: change(state, target)."""
    return lambda state, target, classes: ANSWERS["convert"](change(dict(state), target), target, classes)


def _swap(result, *_):
    """The parts of the fused weights in another order."""
    for key in list(result):
        if ".query." in key:
            other = key.replace("query", "key")
            result[key], result[other] = result[other], result[key]
    return result


def _takes_away(result, state, *_):
    del state["_orig_mod.steps"]
    return result


def _nearest(result, state, target, _):
    old, new = (round(p.shape[1] ** 0.5) for p in (state["_orig_mod.position"], target["position"]))
    image = state["_orig_mod.position"].mT.unflatten(2, (old, old))
    return {**result, "position": F.interpolate(image, size=(new, new)).flatten(2).mT}


def _keeps_planned_blocks(state, target):
    depth = len({key.split(".")[1] for key in target if key.startswith("blocks.")})
    return {key: value for key, value in state.items() if "blocks" not in key or int(key.split(".")[2]) < depth}


surgery = partial(variant, "surgery")
_COMPLETE = "    if not report.complete:\n"
WRONG_SURGERY = {
    "the pair": (wraps(lambda result, *_: (result, None)), "a dict\\s+got:\\s+'a tuple"),
    "prefix left": (
        wraps(lambda result, *_: {f"_orig_mod.{key}": value for key, value in result.items()}),
        "net_state's keys[\\s\\S]* with\\s+'_orig_mod[\\s\\S]*Hint 1",
    ),
    "dtype of the target": (
        wraps(lambda result, state, target, _: {key: value.to(target[key].dtype) for key, value in result.items()}),
        "checkpoint's dtype",
    ),
    "query and key exchanged": (wraps(_swap), "blocks have new names"),
    "interleaved": (surgery(("tensor.chunk(3)", "tuple(tensor[k::3] for k in range(3))")), "blocks have new names"),
    "the first classes": (surgery(("tensor[list(classes)]", "tensor[: len(classes)]")), "chosen classes, in order"),
    "sorted classes": (surgery(("list(classes)", "sorted(classes)")), "chosen classes, in order"),
    "the mean of the stem": (
        surgery(('"patch.weight", fold_stem)', '"patch.weight", lambda w: w.mean(dim=1, keepdim=True))')),
        "stem is folded",
    ),
    "always folds": (
        surgery(
            (
                '    if net_state["patch.weight"].shape[1] == 1:\n    ',
                '    channels = net_state["patch.weight"].shape[1]\n',
            ),
            ("fold_stem)", "lambda w: fold_stem(w).expand(-1, channels, -1, -1))"),
        ),
        "stem is folded",
    ),
    "nearest": (wraps(_nearest), "positions are resized"),
    "takes keys away": (wraps(_takes_away), "state, net_state and their tensors stay"),
    "what is left over is dropped": (
        surgery(
            (
                _COMPLETE,
                "    report.left = []\n    result = {k: result[k] for k in net_state if k in result}\n" + _COMPLETE,
            )
        ),
        "that is left over",
    ),
    "the last of two keys": (
        prepared(lambda state, _: {f"_orig_mod.{key.removeprefix('_orig_mod.')}": state[key] for key in state}),
        "that is left over",
    ),
    "drops blocks": (prepared(_keeps_planned_blocks), "that is left over[\\s\\S]*blocks.2"),
    "left over without its name": (surgery(("left over: {report.left}", "left over")), "that is left over"),
    "missing is filled from the target": (
        prepared(lambda state, target: {"_orig_mod.patch.bias": target["patch.bias"], **state}),
        "nothing fills",
    ),
    "no look at shapes": (
        surgery((_COMPLETE, "    if report.left or report.missing:\n")),
        "of another shape[\\s\\S]*Hint 3",
    ),
}

# ---------------------------------------------------------------- all

CHECKS = {
    "CarefulModule": check.careful_module,
    "summarize": check.summarize,
    "param_groups": check.param_groups,
    "LazyNormLinear": check.lazy_norm_linear,
    "convert": check.convert,
}
RIGHT = {
    "CarefulModule": [ByCases, ByTable],
    "summarize": [check._summary, summarize_by_wrapping],
    "param_groups": [check._groups, groups_by_owner],
    "LazyNormLinear": [check._Lazy, LazyByOnes],
    "convert": [check._convert, convert_by_two_passes],
}
WRONG = {
    "CarefulModule": WRONG_REGISTRATION,
    "summarize": WRONG_SUMMARY,
    "param_groups": WRONG_GROUPS,
    "LazyNormLinear": WRONG_LAZY,
    "convert": WRONG_SURGERY,
}


class TestChecks(CheckProtocol):
    TOPIC = "15-03"
    IDLE = IDLE
    CHECKS, ANSWERS, STUBS = CHECKS, ANSWERS, STUBS
    RIGHT, WRONG = RIGHT, WRONG

    def hold_stand_in(self, name, stand_in):
        if name != "CarefulModule":
            assert CHECKS[name].run(stand_in).status == "passed"


@pytest.mark.parametrize("name", CHECKS)
def test_an_answer_that_does_nothing_earns_nothing(name):
    for nothing in (None, lambda *a, **k: None, lambda *a, **k: a[0], lambda *a, **k: [], nn.Identity):
        assert CHECKS[name].run(nothing).earned == 0


def test_the_references_count_and_convert_as_pytorch_does():
    net, x, extra = check._Net().eval(), torch.randn(6, 4), torch.randn(6, 6)
    with FlopCounterMode(display=False) as counter:
        net(x, extra)
    rows = check._summary(net, x, extra)
    assert sum(row["flops"] for row in rows) == counter.get_total_flops()
    assert sum(row["parameters"] for row in rows) == sum(p.numel() for p in net.parameters()) - 90  # of late.1

    lesson = definitions("15-03", "split-vit", "two-vits")
    old = lesson["FusedViT"](channels=3, classes=7, grid=3, width=8).double().eval()
    new = lesson["SplitViT"](channels=1, classes=2, grid=3, width=8).double().eval()
    state = check._checkpoint(3, 7, grid=3)
    old.load_state_dict({key.removeprefix("_orig_mod."): state[key] for key in state if "steps" not in key})
    new.load_state_dict(check._convert(state, new.state_dict(), [5, 0]))
    x = torch.randn(2, 1, 12, 12).double()
    assert torch.allclose(new(x), old(x.expand(-1, 3, -1, -1))[:, [5, 0]])
