"""The checks of 15-03 accept right answers, however written, and reject what a student might really write."""

import copy
import re

import torch
from check_protocol import CheckProtocol
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from course.lesson_code import definitions
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


DEL = "object.__delattr__(self, name)"
NO_HOME = "if home is None:"
RAISE = "            raise TypeError"
RIGHT["CarefulModule"] = [
    ByTable,
    ("super().__setattr__(name, value)", "object.__setattr__(self, name, value)"),
]
WRONG["CarefulModule"] = {
    "leaves the ordinary attribute": ("takes the name over[\\s\\S]*Hint 2", "self.__dict__.pop(name, None)", ""),
    "parameters of one class": (
        "takes the name over",
        "if isinstance(value, nn.Parameter):",
        "if type(value) is nn.Parameter:",
    ),
    "a module takes a parameter's name": (
        "raises TypeError[\\s\\S]*a module for a name in _parameters",
        ' and home != "_parameters":',
        ":",
    ),
    "a buffer moves to the end": (
        "stays a buffer",
        "table != home:",
        "table != home or (table == '_buffers' and value is not None):",
    ),
    "None becomes an attribute": ("None keeps", NO_HOME, f"home = None if value is None else home\n{NO_HOME}"),
    "empties before it raises": ("changes nothing", RAISE, f"            tables[home].pop(name)\n{RAISE}"),
    "ValueError": ("ValueError: cannot assign", "raise TypeError", "raise ValueError"),
    "a property loses its setter": (
        "go to MiniModule[\\s\\S]*a property",
        "super().__setattr__(name, value)",
        "self.__dict__[name] = value",
    ),
    "del of tables only": ("del removes", DEL, "raise AttributeError(name)"),
    "del of nothing": ("del for a name in nowhere", DEL, "del self.__dict__[name]"),
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


RUN = "model(*args, **kwargs)"
HANDLES = "    for handle in handles:\n        handle.remove()\n"
MODES = "for module, mode in modes.items():\n    module.training = mode"
RIGHT["summarize"] += [summarize_by_wrapping]
WRONG["summarize"] = {
    "a copy runs": (
        "runs the model itself",
        lambda model, *a, **k: TestChecks.ANSWERS["summarize"](copy.deepcopy(model), *a, **k),
    ),
    "a warm-up": ("runs the model itself, once", RUN, f"{RUN}; rows.clear(); counted.clear(); {RUN}"),
    "under each of its names": (
        "one row for each call[\\s\\S]*Hint 1",
        "model.named_modules():",
        "model.named_modules(remove_duplicate=False):",
    ),
    "kind as a class": ("one row for each call", "type(module).__name__", "type(module)"),
    "no dictionaries": ("shapes are[\\s\\S]*Hint 2", "dict | list | tuple", "list | tuple"),
    "counted by module": (
        "counted once[\\s\\S]*Hint 3",
        "set(module.parameters()) - counted",
        "set() if module in counted else set(module.parameters())",
        "counted.update(new)",
        "counted.add(module)",
    ),
    "flops of the input": ("flops are", "flops_of(module, output)", "flops_of(module, args[0])"),
    "a clock for all": ("seconds are", "clock() - started.pop()", "clock() - started[0]"),
    "only the root in eval mode": (
        "evaluation mode[\\s\\S]*training, no graph",
        "model.eval()",
        "model.training = False",
    ),
    "raises its own": (
        "exception goes through",
        "finally:",
        "except Exception as e:\n    raise ValueError from e\nfinally:",
    ),
    "the mode of the root for all": ("modes, hooks", MODES, "model.train(modes[model])"),
    "hooks stay after an interrupt": (
        "modes, hooks[\\s\\S]*KeyboardInterrupt",
        f"finally:\n{HANDLES}",
        f"except Exception:\n{HANDLES}    raise\nelse:\n{HANDLES}finally:\n",
    ),
    "autograd off after an exception": (
        "autograd after",
        "with torch.no_grad():\n    model",
        "torch.set_grad_enabled(False)\nmodel",
        "finally:",
        "    torch.set_grad_enabled(True)\nfinally:",
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


PLAIN = "parameter.ndim < 2 or isinstance(modules[path], NORMS)"
DICTIONARIES = '[{"params": ps, "lr": rate, "weight_decay": d} for (rate, d), ps in groups.items()]'
FOR_EACH = '[{"params": [p], "lr": rate, "weight_decay": d} for (rate, d), ps in groups.items() for p in ps]'
RIGHT["param_groups"] += [groups_by_owner]
WRONG["param_groups"] = {
    "frozen ones, too": (
        r"no frozen one in any[\s\S]*0 in entry 'groups of 0\.weight, which is frozen'[\s\S]*\(a frozen layer\)",
        "if not parameter.requires_grad:\n    continue",
        "",
    ),
    "tied ones twice": ("in one group", "model.named_parameters()", "model.named_parameters(remove_duplicate=False)"),
    "prefix without the dot": (
        "rates are[\\s\\S]*Hint 1",
        'if f"{path}.".startswith(f"{layer}.")]',
        "if name.startswith(layer)]",
    ),
    "one step too many": ("rates are", "len(layers) - 1 - place", "len(layers) - place"),
    "by dimension": ("no decay", PLAIN, "parameter.ndim < 2"),
    "by name": ("no decay", PLAIN, '"bias" in name or "norm" in name'),
    "by the class's name": ("no decay", PLAIN, 'parameter.ndim < 2 or "Norm" in type(modules[path]).__name__'),
    "a group each": ("no two have the same[\\s\\S]*Hint 2", DICTIONARIES, FOR_EACH),
    "an empty group": ("no group is empty", "return", "groups.setdefault((lr, 0.0), [])\nreturn"),
    "KeyError": ("unknown layer", "raise ValueError(", "raise KeyError("),
    "parameters count as layers": (
        "unknown layer",
        "layer not in modules:",
        "not any(name.startswith(layer) for name in model.state_dict()):",
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


GAIN = "self.gain = nn.Parameter(torch.ones(outputs))"
START_LENGTH = "self.length.copy_(torch.where(deviation < 1e-4, 1.0, 1 / deviation))"
NEW_LENGTH = "self.length = nn.Parameter(torch.where(deviation < 1e-4, 1.0, 1 / deviation))"
START_BIAS = "-self.length * rows.mean(dim=0)"
RIGHT["LazyNormLinear"] += [LazyByOnes]
WRONG["LazyNormLinear"] = {
    "a fourth parameter": ("wait for the first forward", "self.outputs = outputs", f"self.outputs = outputs\n{GAIN}"),
    "always float32": ("in place", ", dtype=x.dtype", ""),
    "other objects": ("in place[\\s\\S]*Hint 3", START_LENGTH, NEW_LENGTH),
    "direction of deviation 1": ("drawn with deviation", "normal_(std=0.05)", "normal_()"),
    "a loaded bias is started anew": ("was loaded is kept[\\s\\S]*Hint 1", 'if "bias" in lazy:', "if True:"),
    "count less one": ("length gives[\\s\\S]*Hint 2", ", correction=0", ""),
    "a variance below 1e-4": ("length gives", "deviation < 1e-4", "deviation**2 < 1e-4"),
    "mean square less square of the mean": (
        "length gives[\\s\\S]*far from 0",
        "rows.std(dim=0, correction=0)",
        "(rows.square().mean(0) - rows.mean(0).square()).relu().sqrt()",
    ),
    "a bias for length 1": (
        "bias gives[\\s\\S]*a loaded length",
        START_BIAS,
        "-rows.mean(dim=0) * (self.length if 'length' in lazy else 1)",
    ),
    "of shares the weight": ("has a copy", "made.direction.data.copy_(weight)", "made.direction.data = weight"),
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


COMPLETE = "if not report.complete:"
RETURN = "return result"
RIGHT["convert"] += [convert_by_two_passes]
WRONG["convert"] = {
    "the pair": ("a dict\\s+got:\\s+'a tuple", RETURN, "return result, report"),
    "dtype of the target": (
        "checkpoint's dtype",
        RETURN,
        "return {key: result[key].to(net_state[key].dtype) for key in result}",
    ),
    "interleaved": ("blocks have new names", "tensor.chunk(3)", "tuple(tensor[k::3] for k in range(3))"),
    "sorted classes": ("chosen classes, in order", "list(classes)", "sorted(classes)"),
    "the mean of the stem": (
        "stem is folded",
        '"patch.weight", fold_stem)',
        '"patch.weight", lambda w: w.mean(dim=1, keepdim=True))',
    ),
    "along the row of patches": (
        "positions are resized",
        "resize_positions(tensor, grid)",
        "F.interpolate(tensor.mT, size=grid**2).mT",
    ),
    "takes keys away": ("state, net_state and their tensors stay", RETURN, f'del state["_orig_mod.steps"]\n{RETURN}'),
    "what is left over is dropped": ("that is left over", COMPLETE, "if report.missing or report.mismatched:"),
    "left over without its name": ("that is left over", "left over: {report.left}", "left over"),
    "missing is filled from the target": (
        "nothing fills",
        COMPLETE,
        "result = {**net_state, **result}\nif report.left or report.mismatched:",
    ),
    "no look at shapes": ("of another shape[\\s\\S]*Hint 3", COMPLETE, "if report.left or report.missing:"),
}

# ---------------------------------------------------------------- all


class TestChecks(CheckProtocol, topic="15-03", given=GIVEN):
    CHECKS, RIGHT, WRONG = CHECKS, RIGHT, WRONG


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
