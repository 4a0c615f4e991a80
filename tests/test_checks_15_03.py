"""The checks of 15-03 accept right answers, however written, and reject what a student might really write."""

import copy
import json
import time
from collections import OrderedDict

import torch
import torch.nn.functional as F
from check_protocol import MODULE, CheckProtocol
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from course.answers import answers, definitions
from course.exercises import student_source
from shared.checks import topic_15_03 as check

CELLS = "mini-module flops-of groups-wrong assert-partition actnorm rule remap split-to-fused moves"
GIVEN = definitions("15-03", *CELLS.split())
ANSWERS = answers("15-03", given=GIVEN)
STUBS = answers("15-03", edit=student_source, given=GIVEN)
(PATH,) = MODULE.glob("15-03_*.ipynb")
SOURCES = {c["id"]: "".join(c["source"]) for c in json.loads(PATH.read_text(encoding="utf-8"))["cells"]}
NAMES = {
    "registration": "CarefulModule",
    "summary": "summarize",
    "groups": "param_groups",
    "lazy": "LazyActNorm",
    "surgery": "convert",
}


def variant(slug, *changes):
    """The notebook's own answer with pieces of its text replaced."""
    source = SOURCES[f"ex-{slug}"]
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    namespace = dict(GIVEN)
    exec(compile(source, slug, "exec", dont_inherit=True), namespace)
    return namespace[NAMES[slug]]


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
_DEL = "(self._parameters, self._modules, self._buffers, self.__dict__)"
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
                "        places[home][name] = value\n",
                "        places[home][name] = value\n"
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
        "ordinary attribute",
    ),
    "del of tables only": (
        variant("registration", (_DEL, "(self._parameters, self._modules, self._buffers)")),
        "del removes",
    ),
    "del of nothing is quiet": (
        variant(
            "registration", ('        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")\n', "")
        ),
        "del removes",
    ),
    "del raises KeyError": (variant("registration", ("raise AttributeError(", "raise KeyError(")), "del removes"),
    "del sets None": (variant("registration", ("del place[name]", "place[name] = None")), "del removes"),
}
_TAKES = "a parameter or a module takes the name over"
_STAYS = "a tensor for a buffer's name stays a buffer"
_NONE = "None keeps a registered name in its table"
_REFUSES = "another value for a registered name raises TypeError and changes nothing"
_ORDINARY = "a name that is not registered becomes an ordinary attribute"
_DELETES = "del removes the name, or raises AttributeError"
PROMISES_REGISTRATION = [
    ("Write `CarefulModule`, derived from `MiniModule`", "is derived from MiniModule", "not derived"),
    ("a name is held in one place at most", _TAKES, "leaves the buffer"),
    ("A MiniModule in which a name is held in one place at most.", _TAKES, "leaves the buffer"),
    ("a parameter takes the name over from wherever it was", _TAKES, "leaves the buffer"),
    ("an ordinary attribute included", _TAKES, "leaves the ordinary attribute"),
    ("so does a module, except from a parameter", _REFUSES, "a module takes a parameter's name"),
    (
        "for the name of a buffer, a tensor replaces it and it stays a buffer",
        _STAYS,
        "a tensor for a buffer becomes an attribute",
    ),
    ("keeps the name in its table, with the value `None`", _NONE, "None becomes an attribute"),
    ("anything else for a registered name", _REFUSES, "accepts anything"),
    ("raises `TypeError`", _REFUSES, "ValueError"),
    ("and nothing changes", _REFUSES, "empties before it raises"),
    ("File the value, or raise TypeError where the name is registered for another kind.", _REFUSES, "accepts anything"),
    ("a name that is not registered becomes an ordinary attribute", _ORDINARY, "tensors become buffers"),
    ("`del` removes the name from where it is", _DELETES, "del of tables only"),
    ("raises `AttributeError` if it is nowhere", _DELETES, "del of nothing is quiet"),
    ("Forget the name, or raise AttributeError.", _DELETES, "del raises KeyError"),
    (
        "A name that keeps its table keeps its place in the order of `state_dict()`.",
        _STAYS,
        "a buffer moves to the end",
    ),
]
CONTEXT_REGISTRATION = ["`MiniModule` goes wrong when a name is used again", "a parameter assigned over a buffer"]

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
WRONG_SUMMARY = {
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
        "autograd is on",
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
        "autograd is on",
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
    "hooks stay": (variant("summary", ("            handle.remove()\n", "            pass\n")), "hooks are gone"),
    "hooks stay after an exception": (
        variant("summary", (_FINALLY, "        for handle in handles:\n            handle.remove()\n    finally:\n")),
        "hooks are gone[\\s\\S]*after an exception",
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
        "those of others stay",
    ),
}
_ROWS = "one row for each call of a leaf, in order, under the first name"
_SHAPES = "shapes are those of all tensors in the output"
_ONCE = "parameters are counted once"
_MODES = "each module is in the mode it was in"
_GONE = "your hooks are gone, those of others stay and run"
_KEYS = "gives a list of dictionaries with the six keys"
PROMISES_SUMMARY = [
    ("run `model(*args, **kwargs)` once", "runs the model once", "a warm-up"),
    ("return a list with one dictionary for each call of a leaf", _KEYS, "a tuple of rows"),
    ("(a module without children), in the order of the calls", _ROWS, "sorted by name"),
    ("Its keys", _KEYS, "a key less"),
    ("name, kind, shapes, parameters, flops, seconds.", _KEYS, "a key less"),
    ("the first name of the module in `named_modules()`", _ROWS, "last names"),
    ("the name of its class", "kind is the name of the class", "kind as a class"),
    ("a list of the shapes, as tuples, of all tensors in its output, in order", _SHAPES, "torch.Size"),
    ("outputs may be nested tuples, lists and dictionaries, or hold no tensor", _SHAPES, "no dictionaries"),
    ("the number of elements of its own parameters that no row above has counted", _ONCE, "tensors, not elements"),
    ("so that a shared layer or a tied weight is counted once", _ONCE, "counted by module"),
    ("frozen ones count", _ONCE, "only what learns"),
    ("what `flops_of` gives for the call", "flops are those of flops_of", "flops of one row"),
    ("how long the call took", "seconds are those of the call", "a clock for all"),
    ("The pass runs in evaluation mode", "runs in evaluation mode", "in train mode"),
    ("and records no graph", "records no graph", "with a graph"),
    ("also if the model raised, each module is in the mode it was in", _MODES, "modes lost after an exception"),
    ("autograd is on if it was", "autograd is on if it was", "autograd off after an exception"),
    ("your hooks are gone", _GONE, "hooks stay"),
    ("hooks of others stay and run", _GONE, "clears everybody's hooks"),
    ("The exception goes on.", "an exception goes on", "swallows"),
    ("What one forward pass does, leaf by leaf", _ROWS, "all modules"),
]
CONTEXT_SUMMARY = [
    "Write `summarize(model, args, kwargs)`:",
    "`name`:",
    "`kind`:",
    "`shapes`:",
    "`parameters`:",
    "`flops`:",
    "`seconds`:",
]

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
                    group["params"] += (parameter,)
                    break
            else:
                found.append({"weight_decay": decay, "lr": rate, "params": (parameter,)})
    return found


_HOLDERS = 'if f"{path}.".startswith(f"{layer}.")]'
_PLACE = "layers.index(max(holders, key=len)) if holders else 0"
_PLAIN = "parameter.ndim < 2 or isinstance(modules[path], NORMS)"
_RETURN = '    return [{"params": ps, "lr": rate, "weight_decay": d} for (rate, d), ps in groups.items()]\n'
WRONG_GROUPS = {
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
                "if not any(n.startswith(layer) for n, _ in model.named_parameters(remove_duplicate=False)):",
            ),
        ),
        "unknown layer",
    ),
}
_FORM = "gives a list of groups with params, lr and weight_decay"
_IN_ONE = "each parameter that learns is in one group, no other"
_RATES = "rates are those of the layers"
_DECAY = "no decay for norms and for fewer than two dimensions"
_MERGED = "no group is empty, no two have the same rate and decay"
_UNKNOWN = "an unknown layer raises ValueError with its name"
PROMISES_GROUPS = [
    ("which returns the list of groups for an optimizer", _FORM, "a tuple of groups"),
    ("Each group is a dictionary with `params`, `lr` and `weight_decay`.", _FORM, "names"),
    ("Each parameter that learns is in exactly one group", _IN_ONE, "twice in one group"),
    ("a tied one too", _IN_ONE, "tied ones twice"),
    ("frozen ones (`requires_grad=False`) are in none", _IN_ONE, "frozen ones, too"),
    ("`layers` names submodules from the input to the output", _RATES, "the other way round"),
    ("A parameter belongs to the named submodule that holds it", _RATES, "rest at the full rate"),
    ("to the innermost one where several do", _RATES, "the outermost"),
    ("of `blocks.1` and `blocks.10` only the second holds `blocks.10.weight`", _RATES, "prefix without the dot"),
    ("Its rate is `lr` for the last layer", _RATES, "one step too many"),
    ("`layer_decay` times that of the next one for every other layer", _RATES, "linear in depth"),
    ("A parameter in none of them has the rate of the first.", _RATES, "rest at the full rate"),
    ("The decay is 0 for parameters with fewer than two dimensions", _DECAY, "one dimension only"),
    ("for all parameters of modules in `NORMS`, whatever their shape", _DECAY, "by dimension"),
    ("it is `weight_decay` for all others", _DECAY, "by name"),
    ("No group is empty", _MERGED, "an empty group"),
    ("no two groups have the same rate and decay", _MERGED, "groups by layer"),
    ("A name in `layers` that is not a submodule raises `ValueError` with that name.", _UNKNOWN, "unnamed"),
    ("A tied parameter counts under its first name", _IN_ONE, "tied ones twice"),
    ("rates that fall towards the input, no decay on norms and biases.", _RATES, "the other way round"),
]
CONTEXT_GROUPS = ["Groups for an optimizer:", 'such as `["stem"']

# ---------------------------------------------------------------- lazy


class LazyByOnes(LazyModuleMixin, GIVEN["ActNorm"]):
    """Statistics by einsum-like reductions, the load asked about by the class of the parameter."""

    cls_to_become = GIVEN["ActNorm"]

    def __init__(self):
        super().__init__(1)
        del self.mean, self.scale
        self.register_parameter("scale", UninitializedParameter())
        self.register_parameter("mean", UninitializedParameter())

    @torch.no_grad()
    def initialize_parameters(self, x):
        rest = [d for d in range(x.dim()) if d != 1]
        if isinstance(self.mean, UninitializedParameter):
            mean = x.mean(dim=rest)
            self.mean.materialize(mean.shape, x.device, x.dtype)
            self.mean.copy_(mean)
        if isinstance(self.scale, UninitializedParameter):
            deviation = x.var(dim=rest, unbiased=False).sqrt()
            self.scale.materialize(deviation.shape, x.device, x.dtype)
            self.scale.copy_(deviation.clamp_min(1e-5).reciprocal())


class NoInit(GIVEN["ActNorm"]):
    """Not lazy: waits for its first forward."""

    def __init__(self):
        super().__init__(1)


_ROWS_OF = "rows = x.transpose(0, 1).flatten(1)"
_RETURN_EARLY = "        if not self.has_uninitialized_params():\n            return\n"
_GUARD = ("        with torch.no_grad():\n", "        if True:\n")


class AllOver(ANSWERS["LazyActNorm"]):
    """Starts again in every training forward."""

    class cls_to_become(GIVEN["ActNorm"]):
        def forward(self, x):
            with torch.no_grad():
                rows = x.transpose(0, 1).flatten(1)
                self.mean.copy_(rows.mean(1))
            return super().forward(x)


AllOver.cls_to_become.__name__ = "ActNorm"


class EmptyScale(ANSWERS["LazyActNorm"]):
    """A plain parameter without elements stands for one without a shape."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(0))

    def initialize_parameters(self, x):
        if self.has_uninitialized_params():
            rows = x.detach().transpose(0, 1).flatten(1)
            self.mean.materialize((len(rows),), device=x.device, dtype=x.dtype)
            self.mean.data.copy_(rows.mean(dim=1))
            self.scale.data = 1 / rows.std(dim=1, correction=0).clamp(min=1e-5)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.scale.data = state_dict[prefix + "scale"].clone()
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Detaches(ANSWERS["LazyActNorm"]):
    def forward(self, x):  # the first call was bound before the class changed
        return GIVEN["ActNorm"].forward(self, x).detach()


class AddsOne(ANSWERS["LazyActNorm"]):
    def forward(self, x):
        return GIVEN["ActNorm"].forward(self, x) + 1


class FirstIsIdentity(ANSWERS["LazyActNorm"]):
    """The start comes after the first output."""

    def forward(self, x):
        return 1 * x


WRONG_LAZY = {
    "not lazy": (NoInit, "uninitialised before"),
    "an empty scale": (EmptyScale, "uninitialised before"),
    "only the mean is lazy": (
        variant(
            "lazy",
            (
                "self.mean, self.scale = UninitializedParameter(), UninitializedParameter()",
                "self.mean = UninitializedParameter()",
            ),
        ),
        "uninitialised before",
    ),
    "stays lazy": (variant("lazy", ("    cls_to_become = ActNorm\n", "")), "becomes ActNorm"),
    "over the batch only": (
        variant("lazy", (_ROWS_OF, "rows = x.transpose(0, 1).reshape(x.shape[1], len(x), -1)[:, :, 0]")),
        "mean is that",
    ),
    "over everything": (variant("lazy", ("rows.mean(dim=1)", "rows.mean()")), "mean is that"),
    "zero mean": (variant("lazy", ("self.mean.copy_(rows.mean(dim=1))", "self.mean.zero_()")), "mean is that"),
    "flatten of the wrong order": (variant("lazy", (_ROWS_OF, "rows = x.reshape(x.shape[1], -1)")), "mean is that"),
    "count less one": (variant("lazy", ("correction=0", "correction=1")), "scale is that"),
    "the deviation itself": (
        variant(
            "lazy",
            ("1 / rows.std(dim=1, correction=0).clamp(min=1e-5)", "rows.std(dim=1, correction=0).clamp(min=1e-5)"),
        ),
        "scale is that",
    ),
    "no least deviation": (variant("lazy", (".clamp(min=1e-5)", "")), "scale is that"),
    "added instead": (variant("lazy", (".clamp(min=1e-5)", ".add(1e-5)")), "scale is that"),
    "clamps the variance": (
        variant(
            "lazy",
            ("rows.std(dim=1, correction=0).clamp(min=1e-5)", "rows.var(dim=1, correction=0).clamp(min=1e-5).sqrt()"),
        ),
        "scale is that",
    ),
    "always float32": (variant("lazy", (", dtype=x.dtype", "")), "mean is that|dtype"),
    "float32 for floats": (
        variant("lazy", (", dtype=x.dtype", ", dtype=torch.float32 if len(rows) == 3 else x.dtype")),
        "dtype and device",
    ),
    "identity first": (FirstIsIdentity, "first output"),
    "adds one": (AddsOne, "first output"),
    "detaches": (Detaches, "gradients reach"),
    "frozen": (
        variant(
            "lazy",
            (
                "            self.mean.copy_(",
                "            self.mean.requires_grad_(False)\n            self.mean.copy_(",
            ),
        ),
        "gradients reach",
    ),
    "starts again": (AllOver, "second batch"),
    "overwrites what was loaded": (
        variant(
            "lazy",
            (_RETURN_EARLY, ""),
            (
                "            for parameter in (self.mean, self.scale):\n",
                "            for parameter in (self.mean, self.scale) if self.has_uninitialized_params() else ():\n",
            ),
        ),
        "checkpoint loaded",
    ),
    "asks only in train mode": (
        variant(
            "lazy",
            ("if not self.has_uninitialized_params():", "if not self.has_uninitialized_params() and self.training:"),
            (
                "            for parameter in (self.mean, self.scale):\n",
                "            for parameter in (self.mean, self.scale) if self.has_uninitialized_params() else ():\n",
            ),
        ),
        "checkpoint loaded",
    ),
}
_BEFORE = "mean and scale are uninitialised before the first forward"
_MEAN, _SCALE = "mean is that of the first batch", "scale is that of the first batch"
_LOADED = "a checkpoint loaded before the first forward is kept"
PROMISES_LAZY = [
    ("starts where the first batch has mean 0 and deviation 1", _MEAN, "zero mean"),
    ("becomes the `ActNorm` above at its first forward", "becomes ActNorm at the first forward", "stays lazy"),
    ("Before it, `mean` and `scale` are `UninitializedParameter`s.", _BEFORE, "only the mean is lazy"),
    ("Leave both parameters without a shape.", _BEFORE, "not lazy"),
    ("with any number of further dimensions, gives each channel's mean", _MEAN, "over the batch only"),
    ("and 1 over its deviation (divided by the count, not the count less one)", _SCALE, "count less one"),
    ("deviations below `1e-5` count as `1e-5`", _SCALE, "added instead"),
    ("Dtype and device are those of the input.", "dtype and device are those of the input", "float32 for floats"),
    ("The first output is already normalised", "the first output is normalised", "identity first"),
    ("gradients reach both parameters and the input", "gradients reach the parameters and the input", "frozen"),
    ("the start itself is no part of the graph", "gradients reach the parameters and the input", "detaches"),
    ("The second batch changes nothing", "the second batch changes nothing", "starts again"),
    ("A checkpoint that was loaded before the first forward is kept", _LOADED, "overwrites what was loaded"),
    ("the first batch doesn't overwrite it", _LOADED, "asks only in train mode"),
    ("An ActNorm that takes its shape and its start from the first batch.", _MEAN, "over everything"),
    ("Give them the first batch's means and 1 over its deviations.", _SCALE, "the deviation itself"),
]
CONTEXT_LAZY = []

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
        rules.append(rule(rf"(blocks\.\d+)\.{old}\.(\w+)", rf"\1.{new}.\2"))
    result, report = GIVEN["remap_state_dict"](state, rules, target)
    if report.left:
        raise ValueError(f"not planned: {', '.join(report.left)}")
    if report.missing:
        raise ValueError(f"nothing fills {', '.join(report.missing)}")
    for key in ("head.weight", "head.bias"):
        result[key] = torch.stack([result[key][k] for k in classes])
    old, new = result["position"].shape[1], target["position"].shape[1]
    if old != new:
        result["position"] = GIVEN["resize_positions"](result["position"], int(new**0.5 + 0.5))
    if result["patch.weight"].shape != target["patch.weight"].shape:
        result["patch.weight"] = torch.einsum("ochw->ohw", result["patch.weight"]).unsqueeze(1)
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


def _interleave(tensor):
    return tuple(tensor[k::3] for k in range(3))


def _writes(state, target, classes):
    result = ANSWERS["convert"](state, target, classes)
    state["_orig_mod.norm.bias"].add_(1)
    return result


def _pops(state, target, classes):
    result = ANSWERS["convert"](state, target, classes)
    state.pop("_orig_mod.steps")
    return result


_RAISE = """    if report.left or report.missing:
        raise ValueError(f"left over: {report.left}; missing: {report.missing}")
"""
_FILTER = "    result = {key: result[key] for key in target if key in result}\n"
_STEM = '"patch.weight", "patch.weight", lambda w: w if w.shape[1] == channels else fold_stem(w)'
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
            (_RAISE, ""),
        ),
        "load_state_dict accepts",
    ),
    "a key more": (wraps(lambda r, *_: {**r, "head.scale": r["head.bias"]}), "load_state_dict accepts"),
    "all classes": (variant("surgery", ("tensor[list(classes)]", "tensor")), "load_state_dict accepts"),
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
                r'r"blocks.\1.ln\2.\3"),',
                r'r"blocks.\1.l\2.\3"),'
                + '\n        Rule(BLOCK + r"l1\\.(.+)", r"blocks.\\1.ln2.\\2"),'
                + '\n        Rule(BLOCK + r"l2\\.(.+)", r"blocks.\\1.ln1.\\2"),',
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


_ACCEPTS = "load_state_dict accepts the result"
_GREY = "computes what the old net does with a grey image, for the chosen classes"
_STAYS_STEM = "a stem with as many channels stays as it is"
_RESIZED = "positions are resized to the target's grid"
_KEEPS = "state and its tensors stay as they are"
_DTYPE = "tensors keep the dtype of the checkpoint"
_LEFT = "an unplanned key raises ValueError with its name"
_MISSING = "a key that nothing fills raises ValueError with its name"
PROMISES_SURGERY = [
    ("which returns a state dict for a `SplitViT`", _ACCEPTS, "the pair"),
    ("`classes` says which of the old classes its outputs are, in order", _GREY, "sorted classes"),
    ("`load_state_dict` accepts the result without `strict=False`", _ACCEPTS, "prefix left"),
    ("every key of `target`, no other, each in the shape that `target` has", _ACCEPTS, "a key more"),
    ("Width, depth, number of channels and grid may be any.", _ACCEPTS, "ten blocks at most"),
    (
        "For the same grid the net computes what the old one does with the grey image in all of its channels",
        _GREY,
        "the mean of the stem",
    ),
    ("for the chosen classes", _GREY, "the first classes"),
    ("If `target` has as many channels as the checkpoint, the stem stays as it is.", _STAYS_STEM, "always folds"),
    ("For another grid, positions are resized as by `resize_positions`.", _RESIZED, "nearest"),
    ("`state` and its tensors stay as they are.", _KEEPS, "writes into a tensor"),
    ("Tensors keep the dtype of the checkpoint.", _DTYPE, "dtype of the target"),
    (
        "A key of the checkpoint that nobody has planned for raises `ValueError` with its name",
        _LEFT,
        "what is left over is dropped",
    ),
    ("so does a key of `target` that nothing fills", _MISSING, "missing ignored"),
    ("The checkpoint of a compiled FusedViT as a state dict for the SplitViT with `target`.", _GREY, "interleaved"),
]
CONTEXT_SURGERY = [
    "A `FusedViT` was trained on colour images",
    "Its checkpoint has keys such as",
    "`target` is the `state_dict()` of that net",
]

# ---------------------------------------------------------------- all

CHECKS = {
    "CarefulModule": check.careful_module,
    "summarize": check.summarize,
    "param_groups": check.param_groups,
    "LazyActNorm": check.lazy_act_norm,
    "convert": check.convert,
}
RIGHT = {
    "CarefulModule": [ByCases, ByTable],
    "summarize": [check._summary, summarize_by_wrapping],
    "param_groups": [check._groups, groups_by_owner],
    "LazyActNorm": [check._LazyActNorm, LazyByOnes],
    "convert": [check._convert, convert_by_two_passes],
}
WRONG = {
    "CarefulModule": WRONG_REGISTRATION,
    "summarize": WRONG_SUMMARY,
    "param_groups": WRONG_GROUPS,
    "LazyActNorm": WRONG_LAZY,
    "convert": WRONG_SURGERY,
}
PROMISES = {
    "CarefulModule": PROMISES_REGISTRATION,
    "summarize": PROMISES_SUMMARY,
    "param_groups": PROMISES_GROUPS,
    "LazyActNorm": PROMISES_LAZY,
    "convert": PROMISES_SURGERY,
}
CONTEXT = {
    "CarefulModule": CONTEXT_REGISTRATION,
    "summarize": CONTEXT_SUMMARY,
    "param_groups": CONTEXT_GROUPS,
    "LazyActNorm": CONTEXT_LAZY,
    "convert": CONTEXT_SURGERY,
}


class TestChecks(CheckProtocol):
    TOPIC = "15-03"
    CHECKS, ANSWERS, STUBS = CHECKS, ANSWERS, STUBS
    RIGHT, WRONG, PROMISES, CONTEXT = RIGHT, WRONG, PROMISES, CONTEXT

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
