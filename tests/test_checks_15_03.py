"""The checks of 15-03 accept right answers, however written, and reject what a student might really write."""

import copy
import re
import time
from collections import OrderedDict

import torch
import torch.nn.functional as F
from answer_variants import variants
from check_protocol import CheckProtocol
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from course.answers import answers, definitions
from course.exercise_form import student_source
from shared.checks import topic_15_03 as check

CELLS = "mini-module flops-of groups-wrong assert-partition norm-linear rule remap split-to-fused moves"
GIVEN = definitions("15-03", *CELLS.split())
ANSWERS = answers("15-03", given=GIVEN)
STUBS = answers("15-03", edit=student_source, given=GIVEN)
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


class NotDerived:
    pass


class KeepsBoth(ByCases):
    """Leaves the buffer where it was."""

    def _drop(self, name, *tables):
        pass


class Silent(ByCases):
    def _only_none(self, name, value):
        pass


class ValueErrors(ByCases):
    def _only_none(self, name, value):
        if value is not None:
            raise ValueError(name)


class RaisesLate(ByTable):
    """Takes the old value away before it refuses the new one."""

    def __setattr__(self, name, value):
        try:
            super().__setattr__(name, value)
        except TypeError:
            for table in ("_parameters", "_modules", "_buffers"):
                self.__dict__[table].pop(name, None)
            raise


_POP = "        for i, place in enumerate(places):\n            if i != home:\n"
_PLACES = "        for i, place in enumerate(places):\n"
_DEL = "        object.__delattr__(self, name)\n"
_SET = "            object.__setattr__(self, name, value)  # a property keeps its setter\n"
_MODULE = "elif isinstance(value, MiniModule) and home != 0:"
_REFUSE = "elif value is not None and not isinstance(value, kinds[home]):"
WRONG_REGISTRATION = {
    "not derived": (NotDerived, "derived from MiniModule"),
    "no __setattr__ of its own": (
        type("OnlyDelete", (MiniModule,), {"__delattr__": ANSWERS["CarefulModule"].__delattr__}),
        "takes the name over|TypeError",
    ),
    "leaves the buffer": (KeepsBoth, "takes the name over"),
    "leaves the ordinary attribute": (
        variant("registration", ("enumerate(places):", "enumerate(places[:3]):")),
        "takes the name over[\\s\\S]*Hint 2",
    ),
    "a parameter moves to the end": (
        variant(
            "registration",
            ("            if i != home:\n                place", "            if True:\n                place"),
        ),
        "takes the name over",
    ),
    "a module takes a parameter's name": (
        variant("registration", (" and home != 0:", ":")),
        "raises TypeError and changes nothing",
    ),
    "a tensor for a buffer becomes an attribute": (
        variant(
            "registration",
            (_PLACES, "        home = 3 if home == 2 and isinstance(value, Tensor) else home\n" + _PLACES),
        ),
        "stays a buffer",
    ),
    "a buffer moves to the end": (
        variant("registration", (_POP, _POP.replace("i != home", "i != home or (i == 2 and value is not None)"))),
        "stays a buffer",
    ),
    "None removes the name": (
        variant(
            "registration",
            (
                "            places[home][name] = value\n",
                "            places[home][name] = value\n"
                "        if value is None and home < 3:\n            del places[home][name]\n",
            ),
        ),
        "None keeps",
    ),
    "None refused": (variant("registration", ("value is not None and ", "")), "None keeps|ordinary"),
    "None becomes an attribute": (
        variant(
            "registration",
            ("        for i, place", "        home = 3 if value is None else home\n        for i, place"),
        ),
        "None keeps",
    ),
    "accepts anything": (Silent, "raises TypeError and changes nothing"),
    "ValueError": (ValueErrors, "raises TypeError and changes nothing"),
    "empties before it raises": (RaisesLate, "changes nothing"),
    "only falsy values for None": (
        variant("registration", ("elif value is not None and", "elif value and")),
        "no exception|bool|RuntimeError|Boolean",
    ),
    "tensors become buffers": (
        variant(
            "registration",
            (
                "        elif value is not None",
                "        elif isinstance(value, Tensor) and home == 3:\n            home = 2\n"
                "        elif value is not None",
            ),
        ),
        "set as by MiniModule",
    ),
    "del of tables only": (
        variant("registration", (_DEL, "        raise AttributeError(name)\n")),
        "del removes",
    ),
    "del of nothing is quiet": (
        variant("registration", (_DEL, "        if name in self.__dict__:\n            del self.__dict__[name]\n")),
        "del removes",
    ),
    "del raises KeyError": (variant("registration", (_DEL, "        del self.__dict__[name]\n")), "del removes"),
    "del sets None": (variant("registration", ("del table[name]", "table[name] = None")), "del removes"),
    "del passes a deleter by": (
        variant(
            "registration",
            (
                _DEL,
                "        if name not in self.__dict__:\n            raise AttributeError(name)\n"
                "        del self.__dict__[name]\n",
            ),
        ),
        "del removes[\\s\\S]*deleter",
    ),
    "del of all that begin so": (
        variant(
            "registration",
            (
                "            if name in table:\n                del table[name]\n                return\n",
                "            if found := [key for key in table if key.startswith(name)]:\n"
                "                for key in found:\n                    del table[key]\n                return\n",
            ),
        ),
        "del removes",
    ),
    "a property loses its setter": (
        variant("registration", (_SET, "            places[home][name] = value\n")),
        "set as by MiniModule[\\s\\S]*property",
    ),
    "children of its own class": (
        variant("registration", (_MODULE, _MODULE.replace("MiniModule", "CarefulModule"))),
        "takes the name over|registered",
    ),
    "children of the same class": (
        variant("registration", (_MODULE, "elif type(value) is type(self) and home != 0:")),
        "takes the name over",
    ),
    "children of no derived class": (
        variant("registration", (_MODULE, "elif type(value) in (MiniModule, type(self)) and home != 0:")),
        "takes the name over",
    ),
    "parameters of one class": (
        variant("registration", ("if isinstance(value, nn.Parameter):", "if type(value) is nn.Parameter:")),
        "takes the name over",
    ),
    "buffers of one class": (
        variant(
            "registration",
            (
                _REFUSE,
                "elif value is not None and home < 3 and (not isinstance(value, kinds[home])\n"
                "            or home == 2 and type(value) is not Tensor):",
            ),
        ),
        "stays a buffer",
    ),
    "refuses what comes to mind": (
        variant(
            "registration",
            (
                _REFUSE,
                "elif home < 3 and (isinstance(value, str | int | Tensor) and not isinstance(value, kinds[home])\n"
                "            or home == 0 and isinstance(value, MiniModule)):",
            ),
        ),
        "raises TypeError",
    ),
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


_FINALLY = "    finally:\n        for handle in handles:\n            handle.remove()\n"
_UNDO = _FINALLY + "        for module, mode in modes.items():\n            module.training = mode\n"


def summarize_and_leave(model, *args, **kwargs):
    """Its wrappers stay in place."""
    rows, seen, modes = [], set(), {m: m.training for m in model.modules()}
    for name, module in model.named_modules():
        if list(module.children()):
            continue

        def run(*a, m=module, n=name, inner=module.forward, **k):
            start = time.perf_counter()
            out = inner(*a, **k)
            took, new = time.perf_counter() - start, set(m.parameters()) - seen
            seen.update(new)
            row = {"name": n, "kind": type(m).__name__, "shapes": list(check._shapes(out)), "seconds": took}
            sizes = {"parameters": sum(p.numel() for p in new), "flops": GIVEN["flops_of"](m, out)}
            rows.append(row | sizes)
            return out

        module.forward = run
    try:
        model.eval()
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return rows


WRONG_SUMMARY = {
    "modes by train, parents first": (
        variant("summary", ("            module.training = mode\n", "            module.train(mode)\n")),
        "mode it was in",
    ),
    "a copy runs": (
        lambda model, *a, **k: ANSWERS["summarize"](copy.deepcopy(model), *a, **k),
        "runs the model once[\\s\\S]*copy",
    ),
    "autograd on for good": (
        variant(
            "summary",
            (
                "        with torch.no_grad():\n            model(*args, **kwargs)\n    finally:\n",
                "        torch.set_grad_enabled(False)\n        model(*args, **kwargs)\n"
                "    finally:\n        torch.set_grad_enabled(True)\n",
            ),
        ),
        "autograd is as it was",
    ),
    "cleans up after Exceptions only": (
        variant(
            "summary",
            (
                _UNDO,
                _UNDO.replace("finally:", "except Exception:")
                + "        raise\n"
                + _UNDO.replace("finally:", "if True:"),
            ),
        ),
        "mode it was in[\\s\\S]*KeyboardInterrupt",
    ),
    "exact types": (
        variant("summary", ("isinstance(output, dict | list | tuple)", "type(output) in (dict, list, tuple)")),
        "shapes are",
    ),
    "counted by address": (
        variant(
            "summary",
            (
                "new = set(module.parameters()) - counted",
                "new = [p for p in module.parameters() if p.data_ptr() not in counted]",
            ),
            ("counted.update(new)", "counted.update(p.data_ptr() for p in new)"),
        ),
        "counted once[\\s\\S]*meta",
    ),
    "another of its kind": (
        variant(
            "summary",
            (
                "    finally:\n",
                "    except RuntimeError as e:\n        raise RuntimeError(str(e)) from None\n    finally:\n",
            ),
        ),
        "exception goes on[\\s\\S]*not that object",
    ),
    "no empty containers": (
        variant(
            "summary",
            (
                "if not list(module.children()):",
                "if not list(module.children()) and type(module) is not nn.Sequential:",
            ),
        ),
        "one row for each call",
    ),
    "forward stays replaced": (summarize_and_leave, "nothing of yours"),
    "tuples": (
        variant(
            "summary",
            ("rows.append({**row", "rows.append(tuple({**row"),
            ('"seconds": seconds})', '"seconds": seconds}.values()))'),
        ),
        "six keys",
    ),
    "a tuple of rows": (variant("summary", ("    return rows\n", "    return tuple(rows)\n")), "six keys"),
    "a key less": (variant("summary", ('rows.append({**row, "seconds": seconds})', "rows.append(row)")), "six keys"),
    "a warm-up": (
        variant(
            "summary",
            (
                "            model(*args, **kwargs)\n",
                "            model(*args, **kwargs)\n            rows.clear()\n            counted.clear()\n"
                "            model(*args, **kwargs)\n",
            ),
        ),
        "runs the model once",
    ),
    "all modules": (variant("summary", ("if not list(module.children()):", "if True:")), "one row for each call"),
    "one row a module": (
        variant(
            "summary",
            ("        rows.append(", "        if not any(r['name'] == name for r in rows):\n            rows.append("),
        ),
        "one row for each call",
    ),
    "sorted by name": (
        variant("summary", ("    return rows\n", "    return sorted(rows, key=lambda row: row['name'])\n")),
        "one row for each call",
    ),
    "last names": (
        variant(
            "summary",
            ("model.named_modules():", "{m: n for n, m in model.named_modules(remove_duplicate=False)}.items():"),
            ("for name, module in {", "for module, name in {"),
        ),
        "one row for each call",
    ),
    "keywords lost": (
        variant("summary", ("model(*args, **kwargs)", "model(*args)")),
        "one row for each call|no exception",
    ),
    "kind as a class": (variant("summary", ("type(module).__name__", "type(module)")), "kind is"),
    "kind with its module": (
        variant("summary", ("type(module).__name__", "type(module).__module__ + type(module).__name__")),
        "kind is",
    ),
    "first shape only": (
        variant(
            "summary",
            (
                "[shape for entry in entries for shape in shapes(entry)]",
                "[shape for entry in entries for shape in shapes(entry)][:1]",
            ),
        ),
        "shapes are",
    ),
    "no dictionaries": (variant("summary", ("dict | list | tuple", "list | tuple")), "shapes are"),
    "torch.Size": (variant("summary", ("[tuple(output.shape)]", "[output.shape]")), "shapes are"),
    "keys of dictionaries": (
        variant("summary", ("output.values() if isinstance(output, dict) else output", "output")),
        "shapes are",
    ),
    "counted each time": (variant("summary", ("        counted.update(new)\n", "")), "counted once"),
    "counted by module": (
        variant(
            "summary",
            (
                "new = set(module.parameters()) - counted",
                "new = set() if module in counted else set(module.parameters())",
            ),
            ("counted.update(new)", "counted.add(module)"),
        ),
        "counted once",
    ),
    "only what learns": (
        variant("summary", ("sum(p.numel() for p in new)", "sum(p.numel() for p in new if p.requires_grad)")),
        "counted once",
    ),
    "tensors, not elements": (variant("summary", ("sum(p.numel() for p in new)", "len(new)")), "counted once"),
    "flops of one row": (
        variant(
            "summary",
            (
                "flops_of(module, output)",
                "flops_of(module, output[:1] if isinstance(output, Tensor) and output.ndim else output)",
            ),
        ),
        "flops are",
    ),
    "a clock for all": (
        variant("summary", ("seconds = clock() - started.pop()", "seconds = clock() - started[0]")),
        "seconds are",
    ),
    "milliseconds": (variant("summary", ('"seconds": seconds', '"seconds": 1000 * seconds')), "seconds are"),
    "no time": (variant("summary", ('"seconds": seconds', '"seconds": 0.0')), "seconds are"),
    "in train mode": (variant("summary", ("        model.eval()\n", "")), "evaluation mode"),
    "only the root in eval mode": (
        variant("summary", ("        model.eval()\n", "        model.training = False\n")),
        "evaluation mode",
    ),
    "with a graph": (variant("summary", ("torch.no_grad()", "torch.enable_grad()")), "no graph"),
    "autograd off for good": (
        variant(
            "summary", ("        with torch.no_grad():\n", "        torch.set_grad_enabled(False)\n        if True:\n")
        ),
        "autograd is as it was",
    ),
    "autograd off after an exception": (
        variant(
            "summary",
            (
                "        with torch.no_grad():\n            model(*args, **kwargs)\n",
                "        torch.set_grad_enabled(False)\n        model(*args, **kwargs)\n"
                "        torch.set_grad_enabled(True)\n",
            ),
        ),
        "autograd is as it was",
    ),
    "swallows": (
        variant("summary", ("    finally:\n", "    except RuntimeError:\n        pass\n    finally:\n")),
        "exception goes on",
    ),
    "raises its own": (
        variant(
            "summary",
            (
                "    finally:\n",
                "    except RuntimeError as e:\n        raise ValueError('the model failed') from e\n    finally:\n",
            ),
        ),
        "exception goes on",
    ),
    "train in the end": (
        variant(
            "summary",
            (
                "        for module, mode in modes.items():\n            module.training = mode\n",
                "        model.train()\n",
            ),
        ),
        "mode it was in",
    ),
    "mode of the root": (
        variant(
            "summary",
            (
                "        for module, mode in modes.items():\n            module.training = mode\n",
                "        model.train(modes[model])\n",
            ),
        ),
        "mode it was in",
    ),
    "modes lost after an exception": (
        variant(
            "summary",
            (
                "        for module, mode in modes.items():\n            module.training = mode\n    return",
                "    for module, mode in modes.items():\n        module.training = mode\n    return",
            ),
        ),
        "mode it was in[\\s\\S]*after an exception",
    ),
    "hooks stay": (variant("summary", ("            handle.remove()\n", "            pass\n")), "nothing of yours"),
    "hooks stay after an exception": (
        variant("summary", (_FINALLY, "        for handle in handles:\n            handle.remove()\n    finally:\n")),
        "nothing of yours is left[\\s\\S]*after an exception",
    ),
    "clears everybody's hooks": (
        variant(
            "summary",
            (
                "        for handle in handles:\n            handle.remove()\n",
                "        for module in modes:\n            module._forward_hooks.clear()\n"
                "            module._forward_pre_hooks.clear()\n",
            ),
        ),
        "hooks of others stay",
    ),
}

# ---------------------------------------------------------------- groups


def groups_by_owner(model, lr, weight_decay=0.0, layers=(), layer_decay=1.0):
    """Walks over the modules, and merges by a search in the list."""
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
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


_HOLDERS = 'if f"{path}.".startswith(layer and f"{layer}.")]'
_PLACE = "layers.index(max(holders, key=len)) if holders else 0"
_PLAIN = "parameter.ndim < 2 or isinstance(modules[path], NORMS)"
_RETURN = '    return [{"params": ps, "lr": rate, "weight_decay": d} for (rate, d), ps in groups.items()]\n'


def groups_in_reverse(model, lr, weight_decay=0.0, layers=(), layer_decay=1.0):
    """Turns the caller's list around."""
    if isinstance(layers, list):
        layers.reverse()
        layers = layers[::-1]
    return ANSWERS["param_groups"](model, lr, weight_decay, layers, layer_decay)


def groups_by_rounded_rate(*args):
    merged = {}
    for group in ANSWERS["param_groups"](*args):
        key = round(group["lr"], 6), group["weight_decay"]
        merged.setdefault(key, {**group, "params": []})["params"].extend(group["params"])
    return list(merged.values())


WRONG_GROUPS = {
    "turns layers around": (groups_in_reverse, "layers stays as it is"),
    "rates rounded": (groups_by_rounded_rate, "rates are"),
    "generators": (
        lambda *args: [{**g, "params": (p for p in g["params"])} for g in ANSWERS["param_groups"](*args)],
        "list of groups",
    ),
    "tuples": (
        lambda *args: [{**g, "params": tuple(g["params"])} for g in ANSWERS["param_groups"](*args)],
        "a list of parameters",
    ),
    "one kind of norm": (
        variant("groups", ("isinstance(modules[path], NORMS)", "isinstance(modules[path], (*NORMS[:2], NORMS[3]))")),
        "no decay",
    ),
    "layers hold parameters": (
        variant(
            "groups",
            (
                "if layer not in modules:",
                "if not list(modules.get(layer, nn.ReLU()).parameters()):",
            ),
        ),
        "without parameters|no submodule",
    ),
    "the model is no layer": (
        variant("groups", ('startswith(layer and f"{layer}.")', 'startswith(f"{layer}.")')),
        "rates are",
    ),
    "looks only if something learns": (
        variant(
            "groups",
            (
                "    for layer in layers:\n        if layer",
                "    learns = any(p.requires_grad for p in model.parameters())\n"
                "    for layer in layers if learns else ():\n        if layer",
            ),
        ),
        "unknown layer",
    ),
    "a tuple of groups": (
        variant("groups", (_RETURN, _RETURN.replace("return [", "return tuple([").replace("]\n", "])\n"))),
        "list of groups",
    ),
    "twice in one group": (
        variant("groups", (".append(parameter)", ".extend([parameter, parameter])")),
        "in one group",
    ),
    "a dictionary": (variant("groups", (_RETURN, "    return groups\n")), "list of groups"),
    "names": (variant("groups", (".append(parameter)", ".append((name, parameter))")), "list of groups"),
    "frozen ones, too": (variant("groups", (" if p.requires_grad]", "]")), "in one group, no other"),
    "tied ones twice": (
        variant("groups", ("model.named_parameters()", "model.named_parameters(remove_duplicate=False)")),
        "in one group, no other",
    ),
    "only what has a layer": (
        variant(
            "groups", ("        place =", "        if layers and not holders:\n            continue\n        place =")
        ),
        "in one group, no other",
    ),
    "prefix without the dot": (variant("groups", (_HOLDERS, "if name.startswith(layer)]")), "rates are"),
    "the outermost": (variant("groups", ("max(holders, key=len)", "min(holders, key=len)")), "rates are"),
    "the first that holds": (variant("groups", ("max(holders, key=len)", "holders[0]")), "rates are"),
    "the other way round": (variant("groups", ("max(len(layers) - 1 - place, 0)", "place")), "rates are"),
    "one step too many": (variant("groups", ("len(layers) - 1 - place", "len(layers) - place")), "rates are"),
    "one step without layers": (
        variant("groups", ("max(len(layers) - 1 - place, 0)", "(len(layers) - 1 - place)")),
        "rates are",
    ),
    "rest at the full rate": (
        variant("groups", (_PLACE, "layers.index(max(holders, key=len)) if holders else len(layers) - 1")),
        "rates are",
    ),
    "linear in depth": (
        variant(
            "groups",
            (
                "layer_decay ** max(len(layers) - 1 - place, 0)",
                "(1 - (1 - layer_decay) * max(len(layers) - 1 - place, 0))",
            ),
        ),
        "rates are",
    ),
    "other default": (variant("groups", ("layer_decay: float = 1.0", "layer_decay: float = 0.9")), "rates are"),
    "by name": (variant("groups", (_PLAIN, '"bias" in name or "norm" in name')), "no decay"),
    "by the class's name": (
        variant("groups", (_PLAIN, 'parameter.ndim < 2 or "Norm" in type(modules[path]).__name__')),
        "no decay",
    ),
    "by the exact class": (
        variant("groups", (_PLAIN, "parameter.ndim < 2 or type(modules[path]) in (*NORMS, nn.BatchNorm1d)")),
        "no decay",
    ),
    "by dimension": (variant("groups", (_PLAIN, "parameter.ndim < 2")), "no decay"),
    "one dimension only": (
        variant("groups", (_PLAIN, "parameter.ndim == 1 or isinstance(modules[path], NORMS)")),
        "no decay",
    ),
    "norms only": (variant("groups", (_PLAIN, "isinstance(modules[path], NORMS)")), "no decay"),
    "a decay by default": (variant("groups", ("weight_decay: float = 0.0", "weight_decay: float = 0.01")), "no decay"),
    "decay for all": (variant("groups", ("0.0 if plain else weight_decay", "weight_decay")), "no decay"),
    "a group each": (
        variant(
            "groups",
            (
                _RETURN,
                '    return [{"params": [p], "lr": r, "weight_decay": d} for (r, d), g in groups.items() for p in g]\n',
            ),
        ),
        "no group is empty",
    ),
    "an empty group": (
        variant("groups", (_RETURN, "    groups.setdefault((lr, 0.0), [])\n" + _RETURN)),
        "no group is empty",
    ),
    "groups by layer": (
        variant(
            "groups",
            (
                "groups.setdefault((rate, 0.0 if plain else weight_decay), [])",
                "groups.setdefault((rate, 0.0 if plain else weight_decay, place if holders else -1), [])",
            ),
            ("for (rate, d), ps in", "for (rate, d, _), ps in"),
        ),
        "no group is empty",
    ),
    "unknown ignored": (
        variant(
            "groups", ('            raise ValueError(f"{layer!r} in layers is no submodule")\n', "            pass\n")
        ),
        "unknown layer",
    ),
    "KeyError": (variant("groups", ("raise ValueError(", "raise KeyError(")), "unknown layer"),
    "unnamed": (
        variant("groups", ('f"{layer!r} in layers is no submodule"', '"a name in layers is no submodule"')),
        "unknown layer",
    ),
    "parameters count as layers": (
        variant(
            "groups",
            (
                "if layer not in modules:",
                "if not any(n.startswith(layer) for n in [*modules, *dict(model.named_parameters())]):",
            ),
        ),
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


class NotLazy(GIVEN["NormLinear"]):
    """Waits for its first forward."""

    def __init__(self, outputs):
        super().__init__(1, outputs)


_ROWS_OF = ".flatten(0, -2)"
_LENGTH = "torch.where(deviation < 1e-4, 1.0, 1 / deviation)"
_BIAS = "-self.length * rows.mean(dim=0)"
_STD = "rows.std(dim=0, correction=0)"
_STARTS = '            if "direction" in lazy:\n'
_LAZY = "        lazy = [n for n, p in self.named_parameters() if isinstance(p, UninitializedParameter)]\n"


class AllOver(ANSWERS["LazyNormLinear"]):
    """Centres its outputs in every training forward."""

    class cls_to_become(GIVEN["NormLinear"]):
        def forward(self, x):
            y = super().forward(x)
            if self.training:
                with torch.no_grad():
                    self.bias.sub_(y.flatten(0, -2).mean(dim=0))
            return y


AllOver.cls_to_become.__name__ = "NormLinear"


class Detaches(ANSWERS["LazyNormLinear"]):
    def forward(self, x):  # the first call was bound before the class changed
        return GIVEN["NormLinear"].forward(self, x).detach()


class AddsOne(ANSWERS["LazyNormLinear"]):
    def forward(self, x):
        return GIVEN["NormLinear"].forward(self, x) + (x.ndim > 2)


class EmptyLength(ANSWERS["LazyNormLinear"]):
    """A plain parameter without elements stands for one without a shape."""

    def __init__(self, outputs):
        super().__init__(outputs)
        self.length = nn.Parameter(torch.empty(0))

    def initialize_parameters(self, x):
        empty, centred = len(self.length) == 0, isinstance(self.bias, UninitializedParameter)
        if empty:
            self.length.data = torch.ones(self.outputs).to(x)
        super().initialize_parameters(x)
        with torch.no_grad():
            rows = F.linear(x, F.normalize(self.direction, dim=1)).flatten(0, -2)
            deviation = rows.std(dim=0, correction=0)
            if empty:
                self.length.copy_(torch.where(deviation < 1e-4, 1, 1 / deviation))
                if centred:
                    self.bias.copy_(-self.length * rows.mean(dim=0))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        if prefix + "length" in state_dict:
            self.length.data = state_dict[prefix + "length"].clone()
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Centres(ANSWERS["LazyNormLinear"]):
    """Writes into its first input."""

    def initialize_parameters(self, x):
        super().initialize_parameters(x)
        with torch.no_grad():
            x.add_(1)


class OfShares(ANSWERS["LazyNormLinear"]):
    @classmethod
    def of(cls, linear):
        made = cls(linear.out_features)
        made.direction = linear.weight
        return made


class OfStarts(ANSWERS["LazyNormLinear"]):
    @classmethod
    def of(cls, linear):
        made = super().of(linear)
        made.length.materialize((linear.out_features,))
        torch.nn.init.ones_(made.length)
        return made


class OfFloat32(ANSWERS["LazyNormLinear"]):
    @classmethod
    def of(cls, linear):
        made = cls(linear.out_features)
        made.load_state_dict({"direction": linear.weight}, strict=False)
        return made


WRONG_LAZY = {
    "not lazy": (NotLazy, "uninitialised before"),
    "an empty length": (EmptyLength, "uninitialised before"),
    "only the direction is lazy": (
        variant(
            "lazy",
            (
                "self.direction, self.length, self.bias = (UninitializedParameter() for _ in range(3))",
                "self.direction = UninitializedParameter()",
            ),
        ),
        "uninitialised before",
    ),
    "stays lazy": (variant("lazy", ("    cls_to_become = NormLinear\n", "")), "becomes NormLinear"),
    "always float32": (variant("lazy", (", dtype=x.dtype", "")), "shape, dtype|no exception"),
    "float32 for small batches": (
        variant("lazy", (", dtype=x.dtype", ", dtype=x.dtype if len(x) > 5 else torch.float32")),
        "shape, dtype",
    ),
    "direction of deviation 1": (variant("lazy", ("normal_(std=0.05)", "normal_()")), "drawn from a normal"),
    "direction uniform": (
        variant("lazy", ("normal_(std=0.05)", "uniform_(-0.0866, 0.0866)")),
        "drawn from a normal[\\s\\S]*share",
    ),
    "the same direction": (
        variant("lazy", (_STARTS, "            torch.manual_seed(0)\n" + _STARTS)),
        "drawn from a normal[\\s\\S]*two draws",
    ),
    "over the last batch dimension": (
        variant(
            "lazy", (_ROWS_OF, ".flatten(1, -2)[0] if x.ndim > 2 else F.linear(x, F.normalize(self.direction, dim=1))")
        ),
        "has deviation 1",
    ),
    "count less one": (variant("lazy", ("correction=0", "correction=1")), "has deviation 1"),
    "the deviation itself": (variant("lazy", ("1 / deviation)", "deviation)")), "has deviation 1"),
    "no least deviation": (variant("lazy", (_LENGTH, "1 / deviation")), "has deviation 1"),
    "clamped": (variant("lazy", (_LENGTH, "1 / deviation.clamp(min=1e-4)")), "has deviation 1"),
    "a variance below 1e-4": (variant("lazy", ("deviation < 1e-4", "deviation**2 < 1e-4")), "has deviation 1"),
    "mean square less square of the mean": (
        variant("lazy", (_STD, "((rows**2).mean(dim=0) - rows.mean(dim=0) ** 2).clamp(min=0).sqrt()")),
        "has deviation 1",
    ),
    "NaN for one row": (
        variant("lazy", (_STD, "rows.std(dim=0) * ((len(rows) - 1) / len(rows)) ** 0.5")),
        "has deviation 1[\\s\\S]*one row",
    ),
    "not normalised": (
        variant("lazy", ("F.linear(x, F.normalize(self.direction, dim=1))", "F.linear(x, self.direction)")),
        "has deviation 1",
    ),
    "centred over the first 40 rows": (variant("lazy", (_BIAS, "-self.length * rows[:40].mean(dim=0)")), "has mean 0"),
    "no bias": (variant("lazy", (_BIAS, "torch.zeros_like(self.bias)")), "has mean 0"),
    "the mean itself": (variant("lazy", (_BIAS, "-rows.mean(dim=0)")), "has mean 0"),
    "other objects": (
        variant(
            "lazy",
            (
                f"                self.length.copy_({_LENGTH})\n",
                f"                self.length = nn.Parameter({_LENGTH})\n",
            ),
        ),
        "same objects",
    ),
    "adds one": (AddsOne, "first output is"),
    "writes into the input": (Centres, "first output is[\\s\\S]*the input|has mean 0"),
    "detaches": (Detaches, "gradients reach"),
    "frozen": (
        variant(
            "lazy",
            (
                '            if "bias" in lazy:\n',
                '            self.bias.requires_grad_(False)\n            if "bias" in lazy:\n',
            ),
        ),
        "gradients reach",
    ),
    "starts again": (AllOver, "later inputs"),
    "overwrites what was loaded": (
        variant(
            "lazy",
            (_LAZY, _LAZY + "        chosen, lazy = lazy, ['direction', 'length', 'bias']\n"),
            ("for name in lazy", "for name in chosen"),
        ),
        "what was loaded",
    ),
    "all or nothing": (
        variant(
            "lazy",
            (_LAZY, "        if not self.has_uninitialized_params():\n            return\n" + _LAZY),
            (_STARTS, "            lazy = ['direction', 'length', 'bias']\n" + _STARTS),
        ),
        "what was loaded",
    ),
    "asks the direction only": (
        variant(
            "lazy",
            (
                _LAZY,
                "        lazy = ['direction', 'length', 'bias']\n"
                "        if not isinstance(self.direction, UninitializedParameter):\n            return\n",
            ),
        ),
        "what was loaded|no exception",
    ),
    "a bias for length 1": (
        variant("lazy", (_BIAS, "-rows.mean(dim=0) * (self.length if 'length' in lazy else 1)")),
        "what was loaded",
    ),
    "of shares the weight": (OfShares, "weight as its direction"),
    "of starts the length": (OfStarts, "weight as its direction"),
    "of in float32": (OfFloat32, "weight as its direction"),
    "of with the weight transposed": (
        variant("lazy", ("made.direction.data.copy_(weight)", "made.direction.data.copy_(weight.flip(0))")),
        "weight as its direction",
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

    def answer(state, target, classes):
        result = ANSWERS["convert"](state, target, classes)
        return change(dict(result), state, target, classes)

    return answer


def _swap(result, *_):
    for key in list(result):
        if ".query." in key:
            other = key.replace("query", "key")
            result[key], result[other] = result[other], result[key]
    return result


def _writes(state, target, classes):
    result = ANSWERS["convert"](state, target, classes)
    state["_orig_mod.norm.bias"].add_(1)
    return result


def _pops(state, target, classes):
    result = ANSWERS["convert"](state, target, classes)
    state.pop("_orig_mod.steps")
    return result


def _writes_into_target(state, target, classes):
    result = ANSWERS["convert"](state, target, classes)
    with torch.no_grad():
        target["norm.bias"].copy_(result["norm.bias"])
    return result


def _empties_target(state, target, classes):
    result = ANSWERS["convert"](state, target, classes)
    target.clear()
    return result


def _drops_blocks(state, target, classes):
    depth = len({key.split(".")[1] for key in target if key.startswith("blocks.")})
    kept = {
        k: v
        for k, v in state.items()
        if "blocks" not in k or "gate" in k or "steps" in k or int(k.split(".")[2]) < depth
    }
    return ANSWERS["convert"](kept, target, classes)


def _drops_scalars(state, target, classes):
    kept = {k: v for k, v in state.items() if v.ndim or k == "_orig_mod.blocks.0.steps"}
    return ANSWERS["convert"]({**kept, "_orig_mod.steps": torch.tensor(0)}, target, classes)


def _last_wins(state, target, classes):
    names = {key.removeprefix("_orig_mod."): tensor for key, tensor in state.items()}
    return ANSWERS["convert"]({f"_orig_mod.{key}": tensor for key, tensor in names.items()}, target, classes)


def _reads_first(state, target, classes):
    state["_orig_mod.position"], state["_orig_mod.patch.weight"]
    return ANSWERS["convert"](state, target, classes)


def _stem_from_target(state, target, classes):
    return ANSWERS["convert"]({"_orig_mod.patch.bias": target["patch.bias"], **state}, target, classes)


_RAISE = """    if report.left or report.missing:
        raise ValueError(f"left over: {report.left}; missing: {report.missing}")
"""
_SHAPES_TOO = """    if wrong := [key for key in target if result[key].shape != target[key].shape]:
        raise ValueError(f"other shapes than in target: {wrong}")
"""
_FILTER = "    result = {key: result[key] for key in target if key in result}\n"
WRONG_SURGERY = {
    "the pair": (
        lambda state, target, classes: (ANSWERS["convert"](state, target, classes), None),
        "load_state_dict accepts",
    ),
    "prefix left": (wraps(lambda r, *_: {f"_orig_mod.{k}": v for k, v in r.items()}), "load_state_dict accepts"),
    "ten blocks at most": (
        variant(
            "surgery",
            (
                "    result, report",
                '    rules[2] = Rule(rules[2].source.replace("d+", "d"), parts, rules[2].change)\n    result, report',
            ),
            (_RAISE + _SHAPES_TOO, ""),
        ),
        "load_state_dict accepts",
    ),
    "a key more": (wraps(lambda r, *_: {**r, "head.scale": r["head.bias"]}), "load_state_dict accepts"),
    "all classes": (
        variant("surgery", ("tensor[list(classes)]", "tensor"), (_SHAPES_TOO, "")),
        "load_state_dict accepts",
    ),
    "the first classes": (variant("surgery", ("tensor[list(classes)]", "tensor[: len(classes)]")), "grey image"),
    "sorted classes": (variant("surgery", ("tensor[list(classes)]", "tensor[sorted(classes)]")), "grey image"),
    "the bias of other classes": (
        wraps(lambda r, s, t, c: {**r, "head.bias": s["_orig_mod.head.bias"][: len(c)]}),
        "grey image",
    ),
    "the mean of the stem": (variant("surgery", ("fold_stem(w)", "w.mean(dim=1, keepdim=True)")), "grey image"),
    "one channel of the stem": (variant("surgery", ("fold_stem(w)", "w[:, :1]")), "grey image"),
    "query and key exchanged": (wraps(_swap), "grey image"),
    "interleaved": (variant("surgery", ("tensor.chunk(3)", "tuple(tensor[k::3] for k in range(3))")), "grey image"),
    "norms exchanged": (
        variant(
            "surgery",
            (
                r'r"blocks.\1.ln\2.\3")]',
                r'r"blocks.\1.l\2.\3")]'
                + '\n    rules += [Rule(BLOCK + r"l1\\.(.+)", r"blocks.\\1.ln2.\\2")]'
                + '\n    rules += [Rule(BLOCK + r"l2\\.(.+)", r"blocks.\\1.ln1.\\2")]',
            ),
        ),
        "grey image",
    ),
    "always folds": (
        wraps(
            lambda r, s, t, c: {
                **r,
                "patch.weight": s["_orig_mod.patch.weight"].sum(1, keepdim=True).expand_as(t["patch.weight"]),
            }
        ),
        "stem with as many",
    ),
    "nearest": (
        wraps(lambda r, s, t, c: {**r, "position": _nearest(s["_orig_mod.position"], t["position"])}),
        "positions are resized",
    ),
    "in a line": (
        wraps(lambda r, s, t, c: {**r, "position": _line(s["_orig_mod.position"], t["position"])}),
        "positions are resized",
    ),
    "cut off": (
        wraps(
            lambda r, s, t, c: {**r, "position": s["_orig_mod.position"].repeat(1, 9, 1)[:, : t["position"].shape[1]]}
        ),
        "positions are resized",
    ),
    "folds three channels only": (
        variant(
            "surgery", ("fold_stem(w) if channels == 1 else w", "w[:, :3].sum(1, keepdim=True) if channels == 1 else w")
        ),
        "grey image[\\s\\S]*four channels",
    ),
    "writes into the net of target": (_writes_into_target, "stay as they are"),
    "empties target": (_empties_target, "stay as they are"),
    "drops blocks": (_drops_blocks, "unplanned key[\\s\\S]*block more"),
    "a dot for any character": (
        variant("surgery", ("re.escape(old)", "old")),
        "unplanned key[\\s\\S]*self_attn_out_proj",
    ),
    "drops scalars": (_drops_scalars, "unplanned key[\\s\\S]*ema_updates"),
    "drops all steps": (
        variant("surgery", ('Rule("steps", None)', 'Rule(".*steps", None)')),
        "unplanned key[\\s\\S]*steps",
    ),
    "the last of two keys": (_last_wins, "unplanned key[\\s\\S]*head.bias"),
    "reads before it looks": (_reads_first, "nothing fills[\\s\\S]*position"),
    "a stem's bias from the target": (_stem_from_target, "nothing fills"),
    "no look at shapes": (variant("surgery", (_SHAPES_TOO, "")), "doesn't get its shape"),
    "a look at the stem only": (
        variant("surgery", ("[key for key in target if", "[key for key in target if key[:5] == 'patch' and")),
        "doesn't get its shape",
    ),
    "writes into a tensor": (_writes, "stay as they are"),
    "takes keys away": (_pops, "stay as they are"),
    "dtype of the target": (wraps(lambda r, s, t, c: {k: v.to(t[k].dtype) for k, v in r.items()}), "keep the dtype"),
    "float32 positions": (
        variant(
            "surgery",
            (
                "resize_positions(tensor, grid)",
                "resize_positions(tensor.float() if tensor.dtype == torch.bfloat16 else tensor, grid)",
            ),
        ),
        "keep the dtype",
    ),
    "what is left over is dropped": (
        variant("surgery", ("    if report.left or report.missing:\n", _FILTER + "    if report.missing:\n")),
        "unplanned key",
    ),
    "keys without the prefix dropped": (
        variant(
            "surgery",
            (
                "    result, report",
                '    state = {k: v for k, v in state.items() if k.startswith("_orig_mod.")}\n    result, report',
            ),
        ),
        "unplanned key[\\s\\S]*ema",
    ),
    "left over without its name": (
        variant(
            "surgery",
            (
                'f"left over: {report.left}; missing: {report.missing}"',
                'f"{len(report.left)} left over; missing: {report.missing}"',
            ),
        ),
        "unplanned key",
    ),
    "KeyError": (variant("surgery", ("raise ValueError(", "raise KeyError(")), "unplanned key"),
    "missing is filled from the target": (
        variant(
            "surgery",
            (
                "    if report.left or report.missing:\n",
                "    result |= {key: target[key] for key in report.missing}\n    if report.left:\n",
            ),
        ),
        "nothing fills",
    ),
    "missing ignored": (variant("surgery", ("if report.left or report.missing:", "if report.left:")), "nothing fills"),
    "missing without its name": (
        variant("surgery", ("missing: {report.missing}", "{len(report.missing)} missing")),
        "nothing fills",
    ),
}


def _nearest(position, target):
    old, new = (round(p.shape[1] ** 0.5) for p in (position, target))
    image = position.transpose(1, 2).unflatten(2, (old, old))
    return F.interpolate(image, size=(new, new), mode="bilinear").flatten(2).transpose(1, 2)


def _line(position, target):
    return F.interpolate(position.transpose(1, 2), size=target.shape[1], mode="linear").transpose(1, 2)


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
    "LazyNormLinear": [check._LazyNormLinear, LazyByOnes],
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
    CHECKS, ANSWERS, STUBS = CHECKS, ANSWERS, STUBS
    RIGHT, WRONG = RIGHT, WRONG

    def hold_stand_in(self, name, stand_in):
        if name != "CarefulModule":
            assert CHECKS[name].run(stand_in).status == "passed"


def test_the_checks_networks_are_those_of_the_notebook():
    lesson = definitions("15-03", "split-vit", "two-vits")
    for kind, fused in (("SplitViT", False), ("FusedViT", True)):
        sizes = {"channels": 3, "classes": 5, "grid": 3, "width": 8, "depth": 2}
        theirs, ours = lesson[kind](**sizes).eval(), check._Split(fused=fused, **sizes).eval()
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        x = torch.randn(2, 3, 12, 12)
        assert torch.allclose(theirs(x), ours(x), atol=1e-5)
