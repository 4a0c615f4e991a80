"""The checks of 15-03 accept right answers, however written, and reject what a student might really write."""

import copy
import re

import torch
from answer_variants import variants
from check_protocol import CheckProtocol, idle
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from course.exercise_form import student_source
from course.lesson_code import answers, definitions
from shared.checks import topic_15_03 as check

CHECKS = {
    "CarefulModule": check.careful_module,
    "summarize": check.summarize,
    "param_groups": check.param_groups,
    "LazyNormLinear": check.lazy_norm_linear,
    "convert": check.convert,
}
CELLS = """
    mini-tables mini-walk mini-module flops-of norms assert-partition norm-linear first-renames rule
    split-to-fused rule-find rule-complete rule-results rule-tensors rule-entries apply-rule remap stems moves
"""
GIVEN = definitions("15-03", *CELLS.split())
ANSWERS = answers("15-03", given=GIVEN)
SLUGS = ("registration", "summary", "groups", "lazy", "surgery")
variant = variants("15-03", dict(zip(SLUGS, CHECKS, strict=True)), GIVEN)
RIGHT = {name: [one.stand_in()] for name, one in CHECKS.items() if one.stand_in}
WRONG = {}


# ---------------------------------------------------------------- registration

MiniModule = GIVEN["MiniModule"]


class ByTable(MiniModule):
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

    def __delattr__(self, name):
        for table in (self._parameters, self._modules, self._buffers):
            if table.pop(name, self) is not self:
                return
        object.__delattr__(self, name)


def registration(old, new):
    return variant("registration", (old, new))


_DEL = "        object.__delattr__(self, name)\n"
_NO_HOME = "        if home is None:"
_RAISE = "            raise TypeError"
RIGHT["CarefulModule"] = [
    ByTable,
    registration("super().__setattr__(name, value)", "object.__setattr__(self, name, value)"),
]
WRONG["CarefulModule"] = {
    "leaves the ordinary attribute": (
        registration("        self.__dict__.pop(name, None)\n", ""),
        "takes the name over[\\s\\S]*Hint 2",
    ),
    "parameters of one class": (
        registration("if isinstance(value, nn.Parameter):", "if type(value) is nn.Parameter:"),
        "takes the name over",
    ),
    "a module takes a parameter's name": (
        registration(' and home != "_parameters":', ":"),
        "raises TypeError[\\s\\S]*a module for a name in _parameters",
    ),
    "a buffer moves to the end": (
        registration("table != home:", "table != home or (table == '_buffers' and value is not None):"),
        "stays a buffer",
    ),
    "None becomes an attribute": (
        registration(_NO_HOME, f"        home = None if value is None else home\n{_NO_HOME}"),
        "None keeps",
    ),
    "empties before it raises": (
        registration(_RAISE, f"            tables[home].pop(name)\n{_RAISE}"),
        "changes nothing",
    ),
    "ValueError": (registration("raise TypeError", "raise ValueError"), "ValueError: cannot assign"),
    "a property loses its setter": (
        registration("super().__setattr__(name, value)", "self.__dict__[name] = value"),
        "go to MiniModule[\\s\\S]*a property",
    ),
    "del of tables only": (registration(_DEL, "        raise AttributeError(name)\n"), "del removes"),
    "del of nothing": (registration(_DEL, "        del self.__dict__[name]\n"), "del for a name in nowhere"),
}

# ---------------------------------------------------------------- summary


def summarize_by_wrapping(model, *args, **kwargs):
    """No hooks: forward of each leaf is replaced on the instance."""
    names, rows, seen, modes = {}, [], set(), [m.training for m in model.modules()]
    for name, module in model.named_modules():
        if not module._modules:
            names[module] = name

    def wrap(module):
        inner = module.forward

        def forward(*a, **k):
            start = check.time.perf_counter()
            out = inner(*a, **k)
            seconds = check.time.perf_counter() - start
            mine = [p for p in module.parameters() if not any(p is q for q in seen)]
            seen.update(mine)
            rows.append(
                {
                    "seconds": seconds,
                    "flops": GIVEN["flops_of"](module, out),
                    "parameters": sum(p.numel() for p in mine),
                    "shapes": [tuple(leaf.shape) for leaf in tree_leaves(out) if torch.is_tensor(leaf)],
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


def summary(*changes):
    return variant("summary", *changes)


_RUN = "model(*args, **kwargs)"
_HANDLES = "        for handle in handles:\n            handle.remove()\n"
_MODES = "        for module, mode in modes.items():\n            module.training = mode\n"
RIGHT["summarize"] += [summarize_by_wrapping]
WRONG["summarize"] = {
    "a copy runs": (
        lambda model, *a, **k: ANSWERS["summarize"](copy.deepcopy(model), *a, **k),
        "runs the model itself",
    ),
    "a warm-up": (summary((_RUN, f"{_RUN}; rows.clear(); counted.clear(); {_RUN}")), "runs the model itself, once"),
    "under each of its names": (
        summary(("model.named_modules():", "model.named_modules(remove_duplicate=False):")),
        "one row for each call[\\s\\S]*Hint 1",
    ),
    "kind as a class": (summary(("type(module).__name__", "type(module)")), "one row for each call"),
    "no dictionaries": (summary(("dict | list | tuple", "list | tuple")), "shapes are[\\s\\S]*Hint 2"),
    "counted by module": (
        summary(
            ("set(module.parameters()) - counted", "set() if module in counted else set(module.parameters())"),
            ("counted.update(new)", "counted.add(module)"),
        ),
        "counted once[\\s\\S]*Hint 3",
    ),
    "flops of the input": (summary(("flops_of(module, output)", "flops_of(module, args[0])")), "flops are"),
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
        summary(
            (
                f"    finally:\n{_HANDLES}",
                f"    except Exception:\n{_HANDLES}        raise\n    else:\n{_HANDLES}    finally:\n",
            )
        ),
        "modes, hooks[\\s\\S]*KeyboardInterrupt",
    ),
    "autograd off after an exception": (
        summary(
            ("with torch.no_grad():\n            model", "torch.set_grad_enabled(False)\n        model"),
            ("    finally:\n", "        torch.set_grad_enabled(True)\n    finally:\n"),
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


def groups(old, new):
    return variant("groups", (old, new))


_PLAIN = "parameter.ndim < 2 or isinstance(modules[path], NORMS)"
_DICTIONARIES = '[{"params": ps, "lr": rate, "weight_decay": d} for (rate, d), ps in groups.items()]'
_FOR_EACH = '[{"params": [p], "lr": rate, "weight_decay": d} for (rate, d), ps in groups.items() for p in ps]'
RIGHT["param_groups"] += [groups_by_owner]
WRONG["param_groups"] = {
    "frozen ones, too": (
        groups("        if not parameter.requires_grad:\n            continue\n", ""),
        r"no frozen one in any[\s\S]*0 in entry 'groups of 0\.weight, which is frozen'[\s\S]*\(a frozen layer\)",
    ),
    "tied ones twice": (
        groups("model.named_parameters()", "model.named_parameters(remove_duplicate=False)"),
        "in one group",
    ),
    "prefix without the dot": (
        groups('if f"{path}.".startswith(f"{layer}.")]', "if name.startswith(layer)]"),
        "rates are[\\s\\S]*Hint 1",
    ),
    "one step too many": (groups("len(layers) - 1 - place", "len(layers) - place"), "rates are"),
    "by dimension": (groups(_PLAIN, "parameter.ndim < 2"), "no decay"),
    "by name": (groups(_PLAIN, '"bias" in name or "norm" in name'), "no decay"),
    "by the class's name": (
        groups(_PLAIN, 'parameter.ndim < 2 or "Norm" in type(modules[path]).__name__'),
        "no decay",
    ),
    "a group each": (groups(_DICTIONARIES, _FOR_EACH), "no two have the same[\\s\\S]*Hint 2"),
    "an empty group": (groups("    return", "    groups.setdefault((lr, 0.0), [])\n    return"), "no group is empty"),
    "KeyError": (groups("raise ValueError(", "raise KeyError("), "unknown layer"),
    "parameters count as layers": (
        groups("layer not in modules:", "not any(name.startswith(layer) for name in model.state_dict()):"),
        "unknown layer",
    ),
}

# ---------------------------------------------------------------- lazy


class LazyByOnes(check._Lazy):
    """Runs the layer itself with length 1 and bias 0, and corrects what it gives."""

    @torch.no_grad()
    def initialize_parameters(self, x):
        given = {n: p.clone() for n, p in self.named_parameters() if not isinstance(p, UninitializedParameter)}
        if "direction" not in given:
            self.direction.materialize((self.outputs, x.shape[-1]), x.device, x.dtype)
            self.direction.normal_(0, 0.05)
        for name, parameter in (("length", self.length), ("bias", self.bias)):
            if name not in given:
                parameter.materialize((self.outputs,), x.device, x.dtype)
            parameter.fill_(1 if name == "length" else 0)
        y = self.forward(x).reshape(-1, self.outputs)
        deviation = (y - y.mean(0)).pow(2).mean(0).sqrt()
        self.length.copy_(given.get("length", torch.where(deviation >= 1e-4, deviation.reciprocal(), 1)))
        self.bias.copy_(given.get("bias", -y.mean(0) * self.length))


def lazy(old, new):
    return variant("lazy", (old, new))


_GAIN = "self.gain = nn.Parameter(torch.ones(outputs))"
_START_LENGTH = "self.length.copy_(torch.where(deviation < 1e-4, 1.0, 1 / deviation))"
_NEW_LENGTH = "self.length = nn.Parameter(torch.where(deviation < 1e-4, 1.0, 1 / deviation))"
_START_BIAS = "-self.length * rows.mean(dim=0)"
RIGHT["LazyNormLinear"] += [LazyByOnes]
WRONG["LazyNormLinear"] = {
    "a fourth parameter": (
        lazy("        self.outputs = outputs\n", f"        self.outputs = outputs\n        {_GAIN}\n"),
        "wait for the first forward",
    ),
    "always float32": (lazy(", dtype=x.dtype", ""), "in place"),
    "other objects": (lazy(_START_LENGTH, _NEW_LENGTH), "in place[\\s\\S]*Hint 3"),
    "direction of deviation 1": (lazy("normal_(std=0.05)", "normal_()"), "drawn with deviation"),
    "a loaded bias is started anew": (lazy('if "bias" in lazy:', "if True:"), "was loaded is kept[\\s\\S]*Hint 1"),
    "count less one": (lazy(", correction=0", ""), "length gives[\\s\\S]*Hint 2"),
    "a variance below 1e-4": (lazy("deviation < 1e-4", "deviation**2 < 1e-4"), "length gives"),
    "mean square less square of the mean": (
        lazy("rows.std(dim=0, correction=0)", "(rows.square().mean(0) - rows.mean(0).square()).relu().sqrt()"),
        "length gives[\\s\\S]*far from 0",
    ),
    "a bias for length 1": (
        lazy(_START_BIAS, "-rows.mean(dim=0) * (self.length if 'length' in lazy else 1)"),
        "bias gives[\\s\\S]*a loaded length",
    ),
    "of shares the weight": (lazy("made.direction.data.copy_(weight)", "made.direction.data = weight"), "has a copy"),
}

# ---------------------------------------------------------------- surgery


def convert_by_two_passes(state, target, classes):
    """Rules for the names; then the shapes, by the keys of the target."""
    rule, parts = GIVEN["Rule"], ("query", "key", "value")
    rules = [rule(r"_orig_mod\.steps", None), rule(r"_orig_mod\.(.*)", r"\1")]
    for end in ("weight", "bias"):
        new = tuple(rf"blocks.\1.{part}.{end}" for part in parts)
        rules.append(rule(rf"blocks\.(\d+)\.self_attn\.in_proj_{end}", new, lambda t: torch.tensor_split(t, 3)))
    for old, new in check._RENAMED.items():
        rules.append(rule(rf"(blocks\.\d+)\.{re.escape(old)}\.(\w+)", rf"\1.{new}.\2"))
    result, report = GIVEN["remap_state_dict"](state, rules, target)
    if report.left or report.missing:
        raise ValueError(f"not planned: {', '.join(report.left)}; nothing fills {', '.join(report.missing)}")
    for key in ("head.weight", "head.bias"):
        result[key] = torch.stack([result[key][k] for k in classes])
    if result["position"].shape != target["position"].shape:
        side = int(target["position"].shape[1] ** 0.5 + 0.5)
        result["position"] = GIVEN["resize_positions"](result["position"], side)
    if target["patch.weight"].shape[1] == 1:
        result["patch.weight"] = torch.einsum("ochw->ohw", result["patch.weight"]).unsqueeze(1)
    for key, tensor in target.items():
        if result[key].shape != tensor.shape:
            raise ValueError(f"{key} is {tuple(result[key].shape)}")
    return result


def surgery(old, new):
    return variant("surgery", (old, new))


_COMPLETE = "    if not report.complete:\n"
_RETURN = "    return result\n"
RIGHT["convert"] += [convert_by_two_passes]
WRONG["convert"] = {
    "the pair": (surgery(_RETURN, "    return result, report\n"), "a dict\\s+got:\\s+'a tuple"),
    "dtype of the target": (
        surgery(_RETURN, "    return {key: result[key].to(net_state[key].dtype) for key in result}\n"),
        "checkpoint's dtype",
    ),
    "interleaved": (surgery("tensor.chunk(3)", "tuple(tensor[k::3] for k in range(3))"), "blocks have new names"),
    "sorted classes": (surgery("list(classes)", "sorted(classes)"), "chosen classes, in order"),
    "the mean of the stem": (
        surgery('"patch.weight", fold_stem)', '"patch.weight", lambda w: w.mean(dim=1, keepdim=True))'),
        "stem is folded",
    ),
    "along the row of patches": (
        surgery("resize_positions(tensor, grid)", "F.interpolate(tensor.mT, size=grid**2).mT"),
        "positions are resized",
    ),
    "takes keys away": (
        surgery(_RETURN, f'    del state["_orig_mod.steps"]\n{_RETURN}'),
        "state, net_state and their tensors stay",
    ),
    "what is left over is dropped": (
        surgery(_COMPLETE, "    if report.missing or report.mismatched:\n"),
        "that is left over",
    ),
    "left over without its name": (surgery("left over: {report.left}", "left over"), "that is left over"),
    "missing is filled from the target": (
        surgery(_COMPLETE, "    result = {**net_state, **result}\n    if report.left or report.mismatched:\n"),
        "nothing fills",
    ),
    "no look at shapes": (
        surgery(_COMPLETE, "    if report.left or report.missing:\n"),
        "of another shape[\\s\\S]*Hint 3",
    ),
}

# ---------------------------------------------------------------- all


class TestChecks(CheckProtocol):
    TOPIC = "15-03"
    CHECKS, ANSWERS, RIGHT, WRONG = CHECKS, ANSWERS, RIGHT, WRONG
    STUBS, IDLE = answers("15-03", edit=student_source, given=GIVEN), idle("15-03", GIVEN)


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
