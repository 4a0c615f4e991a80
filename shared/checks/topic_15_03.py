"""Checks of the exercises in 15-03, Advanced nn.Module Patterns."""

import copy
import itertools
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from torch.utils.flop_counter import FlopCounterMode

from shared.checks.exercise import exercise
from shared.checks.trial import Trial
from shared.checks.words import outcome

# ---------------------------------------------------------------- 15-03.1

_TABLES = ("_parameters", "_buffers", "_modules")
_NAMES = ("fc", "fc2", "fc2_")  # each begins like its neighbours


class _Marked(nn.Parameter):
    """A parameter of a class of its own."""


class _Labelled(Tensor):
    """A tensor of a class of its own."""


def _contents(module: Any, labels: dict[int, str]) -> dict[str, Any]:
    """What a module holds under the names of a case: each table in its order, attributes, and what reading gives."""

    def label(value: object) -> str:
        return labels.get(id(value), repr(value))

    found: dict[str, Any] = {
        table: [f"{name}: {label(value)}" for name, value in getattr(module, table).items()] for table in _TABLES
    }
    own = vars(module)
    found["ordinary attributes"] = [f"{name}: {label(own[name])}" for name in _NAMES if name in own]
    found["reading"] = [f"{name}: {label(getattr(module, name, 'nothing'))}" for name in _NAMES]
    return found


def _put(module: Any, name: str, place: str, value: object) -> None:
    """Put a value where it would be, past any __setattr__."""
    (vars(module) if place == "attribute" else getattr(module, place))[name] = value


@exercise("15-03.1", "Registration that survives reassignment", points=15, demands=6)
def careful_module(trial: Trial, answer: Any) -> None:
    """`answer` is a MiniModule in which a name is held once; nn.Module says what is right."""
    bases = [base.__name__ for base in getattr(answer, "__mro__", ())[1:]]
    trial.needs(
        "is derived from MiniModule",
        "MiniModule" in bases,
        expected="a class derived from MiniModule",
        got=repr(answer),
        hint="which class does the task name?",
    )
    mini = next(base for base in answer.__mro__ if base.__name__ == "MiniModule")
    labels: dict[int, str] = {}
    kept: list[object] = []

    def pair(kind: str) -> tuple[object, object]:
        """The same value for nn.Module and for the answer."""
        made = {
            "a parameter": lambda: (value := nn.Parameter(torch.randn(2)), value),
            "a frozen 0-d parameter": lambda: (value := nn.Parameter(torch.tensor(1.0), requires_grad=False), value),
            "a parameter of a derived class": lambda: (value := _Marked(torch.randn(1)), value),
            "a module": lambda: (nn.Module(), answer()),
            "a plain MiniModule": lambda: (nn.Module(), mini()),
            "a module of a derived class": lambda: (nn.Linear(1, 1), type("Derived", (mini,), {})()),
            "a tensor": lambda: (value := torch.randn(3), value),
            "a tensor of a derived class": lambda: (value := torch.randn(3).as_subclass(_Labelled), value),
            "None": lambda: (None, None),
            "a string": lambda: ("text", "text"),
            "zero": lambda: (0, 0),
            "a number": lambda: (0.5, 0.5),
            "a list": lambda: (value := [torch.randn(1)], value),
        }[kind]()
        kept.extend(made)  # an id may not be used again
        for value in made:
            if value is not None and not isinstance(value, str | int | float):
                labels[id(value)] = f"{kind} (number {len(kept) // 2})"
        return made

    places = {
        "nothing": [],
        "attribute": ["a string", "a tensor", "None"],
        "_parameters": ["a parameter", "None"],
        "_buffers": ["a tensor", "None"],
        "_modules": ["a module", "a plain MiniModule", "None"],
    }
    parameters = ["a parameter", "a frozen 0-d parameter", "a parameter of a derived class"]
    modules = ["a module", "a plain MiniModule", "a module of a derived class"]
    tensors = ["a tensor", "a tensor of a derived class"]
    values = [*parameters, *modules, *tensors, "None", "a string", "zero", "a number", "a list"]
    hints = {
        "a parameter or a module takes the name over": ("where else may the name still be?", 2),
        "a tensor for a buffer's name stays a buffer": ("which table has the name, and in which place?", 1),
        "None keeps a registered name in its table": ("what may the table of the name hold?", 1),
        "another value for a registered name raises TypeError and changes nothing": ("who refuses, and when?", 1),
        "anything else for another name is set as by MiniModule": ("who sets what MiniModule doesn't file?", 1),
        "del removes the name, or raises AttributeError": ("in which places may a name be?", None),
    }
    takes_over, stays, empties, refuses, ordinary, deletes = hints
    for place, olds in places.items():
        for old, new in itertools.product(olds or ["nothing"], [*values, "del"]):
            name = random.choice(_NAMES)
            others = [other for other in _NAMES if other != name]
            theirs, ours = nn.Module(), answer()
            for table in _TABLES:
                neighbours = [others[0], name, others[1]] if table == place else others[:1] * (table == "_buffers")
                for each in neighbours:
                    kind = old if each == name else {"_parameters": "a parameter", "_modules": "a module"}.get(table)
                    for module, value in zip((theirs, ours), pair(kind or "a tensor"), strict=True):
                        _put(module, each, table, value)
            if place == "attribute":
                for module, value in zip((theirs, ours), pair(old), strict=True):
                    _put(module, name, place, value)
            if new == "del":
                item, done = deletes, [outcome(lambda m=m, n=name: delattr(m, n)) for m in (theirs, ours)]
            else:
                given = pair(new)
                done = [
                    outcome(lambda m=m, n=name, v=v: setattr(m, n, v))
                    for m, v in zip((theirs, ours), given, strict=True)
                ]
                if new in parameters or (new in modules and place != "_parameters"):
                    item = takes_over
                elif place in ("nothing", "attribute"):
                    item = ordinary
                elif new == "None":
                    item = empties
                else:
                    item = stays if place == "_buffers" and new in tensors else refuses
            where = {"nothing": "nowhere", "attribute": f"an ordinary attribute ({old})"}.get(place, f"{place} ({old})")
            with trial.group(item, hint=hints[item][0], see=hints[item][1]):
                case = f"{new} for a name that was in {where}" if new != "del" else f"del of a name in {where}"
                trial.equal(case, done[1], done[0])
                trial.equal(case, *[_contents(m, labels) for m in (ours, theirs)])
    rated = [_with_property(base) for base in (answer, nn.Module)]
    for module in rated:
        module.rate = 5
    with trial.group(ordinary, hint=hints[ordinary][0], see=hints[ordinary][1]):
        trial.equal("the value that a property's setter got", *[vars(module).get("kept") for module in rated])
    done = [outcome(lambda m=m: delattr(m, "rate")) for m in rated]
    with trial.group(deletes, hint=hints[deletes][0]):
        trial.equal("del of a property that has a deleter", *done)
        trial.equal("what its deleter has left", *["kept" in vars(module) for module in rated])


def _with_property(base: Any) -> Any:
    """A module with a property `rate`, which keeps its value under another name."""

    class Rated(base):
        @property
        def rate(self) -> object:
            return self.kept

        @rate.setter
        def rate(self, value: object) -> None:
            vars(self)["kept"] = value

        @rate.deleter
        def rate(self) -> None:
            del vars(self)["kept"]

    return Rated()


# ---------------------------------------------------------------- 15-03.2


class _Nest(nn.Module):
    """A leaf whose output is nested and holds other things, too."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        ordered = OrderedDict(f=x[:3], g=torch.max(x.flatten(1), dim=1))  # a named tuple of two
        return {"a": x[:, :1], "b": [x, (x[0, 0], 3, None), []], "c": "text", "d": {"e": x.sum(0)}, "o": ordered}


class _Fails(nn.Module):
    """Raises what it was given."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


class _Count(nn.Module):
    """A leaf that returns no tensor."""

    def forward(self, x: Tensor) -> int:
        return len(x)


class _Sleep(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x


class _Body(nn.Module):
    """Shared, tied, frozen, uncalled and nested layers; `twice` and `extra` come as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Parameter(torch.zeros(5))  # of no leaf
        self.inputs = nn.Linear(4, 6).requires_grad_(False)
        self.box = nn.ModuleDict({"drop.out"[:4]: nn.Dropout(0.5), "same": nn.Linear(6, 6)})
        self.same = self.box["same"]
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.same.weight
        self.norm = nn.BatchNorm1d(6)
        self.conv = nn.Conv1d(2, 4, 3, groups=2, padding=1)
        self.gru = nn.GRU(6, 3, batch_first=True)
        self.nest, self.count, self.idle = _Nest(), _Count(), nn.Linear(9, 9)
        self.same_again = nn.Sequential()  # has no children
        self.late = nn.ModuleList([self.same])  # a second parent, listed later
        self.calls = 0

    def forward(self, x: Tensor, extra: Tensor, *, twice: bool = False) -> Tensor:
        self.calls += 1
        x = self.same(self.box["drop"](self.inputs(x))) + extra
        if twice:
            x = self.same(x)
        x = self.same_again(self.norm(self.tied(x)))
        self.count(x)
        y = self.conv(x.reshape(len(x) // 2, 2, 6))
        self.gru(y)
        self.nest(y)
        return y


def _rows_of_body(n: int, twice: bool) -> list[tuple[str, str, list[tuple[int, ...]], int, int]]:
    """What _Body does with n rows, worked out by hand."""
    m, linear = n // 2, 2 * n * 36
    again = [("box.same", "Linear", [(n, 6)], 0, linear)] * twice
    return [
        ("inputs", "Linear", [(n, 6)], 30, 2 * n * 24),
        ("box.drop", "Dropout", [(n, 6)], 0, 0),
        ("box.same", "Linear", [(n, 6)], 42, linear),
        *again,
        ("tied", "Linear", [(n, 6)], 6, linear),
        ("norm", "BatchNorm1d", [(n, 6)], 12, 0),
        ("same_again", "Sequential", [(n, 6)], 0, 0),
        ("count", "_Count", [], 0, 0),
        ("conv", "Conv1d", [(m, 4, 6)], 16, 2 * m * 4 * 6 * 3),
        ("gru", "GRU", [(m, 4, 3), (1, m, 3)], 3 * 3 * (6 + 3 + 2), 0),
        ("nest", "_Nest", [(m, 1, 6), (m, 4, 6), (6,), (4, 6), (min(m, 3), 4, 6), (m,), (m,)], 0, 0),
    ]


def _flops(module: nn.Module, output: Any) -> int:
    counted = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    return 2 * output.numel() * module.weight[0].numel() if counted else 0


def _shapes(output: Any) -> Iterator[tuple[int, ...]]:
    if isinstance(output, Tensor):
        yield tuple(output.shape)
    elif isinstance(output, dict):
        yield from _shapes(list(output.values()))
    elif isinstance(output, list | tuple):
        for entry in output:
            yield from _shapes(entry)


_ENDS = (KeyboardInterrupt(), StopIteration("done"))


class _Multiplies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(60):
            x = torch.mm(x, x)
        return x


def _long_call(answer: Any) -> Iterator[tuple[str, float, float]]:
    """On an accelerator: a call that returns long before its work is done, what it takes at least, what was found."""
    if torch.accelerator.is_available():
        x = torch.eye(2048, device=torch.accelerator.current_accelerator())
        model = _Multiplies()
        model(x)
        torch.accelerator.synchronize()
        start = time.perf_counter()
        model(x)
        torch.accelerator.synchronize()
        least = (time.perf_counter() - start) / 2
        yield "work on an accelerator", least, float(answer(model, x)[0]["seconds"])


def _summary(model: nn.Module, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """Stand-in of exercise 2."""
    leaves = {module: name for name, module in model.named_modules() if not list(module.children())}
    modes = [(module, module.training) for module in model.modules()]
    rows: list[dict[str, Any]] = []
    seen: set[Tensor] = set()
    start = 0.0

    def now() -> float:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter()

    def before(module: nn.Module, args: Any) -> None:
        nonlocal start
        start = now()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        took = now() - start
        new = [p for p in module.parameters() if p not in seen]
        seen.update(new)
        row = {"name": leaves[module], "kind": type(module).__name__, "shapes": list(_shapes(output))}
        sizes = {"parameters": sum(p.numel() for p in new), "flops": _flops(module, output), "seconds": took}
        rows.append(row | sizes)

    handles = [module.register_forward_pre_hook(before) for module in leaves]
    handles += [module.register_forward_hook(after) for module in leaves]
    try:
        with torch.no_grad():
            model.eval()(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    return rows


def _left_on(model: nn.Module) -> list[str]:
    """All forward hooks of a model's modules and of all modules, and the names of what else each module holds."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_global_forward_hooks", "_global_forward_pre_hooks")
    owners = {**dict(model.named_modules()), "all modules": nn.modules.module}
    hooks = [f"{name}.{k}[{key}]" for name, owner in owners.items() for k in kinds for key in getattr(owner, k, ())]
    return hooks + [f"{path}.{name}" for path, module in model.named_modules() for name in vars(module)]


@exercise(
    "15-03.2",
    "A summary from hooks",
    points=20,
    demands=14,
    stand_in=lambda: _summary,
    stand_in_name="one of the check's",
)
def summarize(trial: Trial, answer: Any) -> None:
    """`answer(model, *args, **kwargs)` gives a dictionary for each call of a leaf."""
    net = _Body()
    keys = ["name", "kind", "shapes", "parameters", "flops", "seconds"]
    n = 2 * random.randint(2, 5)
    x, extra = torch.randn(n, 4), torch.randn(n, 6)
    rows = answer(net, x, extra)
    trial.that(
        "gives a list of dictionaries with the six keys",
        isinstance(rows, list) and bool(rows) and all(isinstance(r, dict) and r.keys() >= set(keys) for r in rows),
        expected=f"a list of dictionaries with {', '.join(keys)}",
        got=repr(rows[0] if isinstance(rows, list) and rows else rows)[:200],
        hint="what does the task ask for, by which names?",
    )
    hint = "how often is the model called, and is it this one or a copy?"
    trial.equal("runs the model once", net.calls, 1, hint=hint)
    item = "one row for each call of a leaf, in order, under the first name"
    with trial.group(item, hint="what is registered on which modules, and when is the name looked up?", see=1):
        for twice in (False, True):
            rows = answer(net, x, extra=extra, twice=twice)
            trial.equal(f"names, twice={twice}", [r["name"] for r in rows], [r[0] for r in _rows_of_body(n, twice)])
        alone = nn.Linear(4, 2)
        trial.equal("a model that is a leaf itself", [row["name"] for row in answer(alone, x)], [""])
    columns = {
        "kind": ("kind is the name of the class", "what has a class's name?", None),
        "shapes": ("shapes are those of all tensors in the output", "what may be inside of an output?", 2),
        "parameters": ("parameters are counted once", "which were counted by a row above?", 3),
        "flops": ("flops are those of flops_of", "what is given to flops_of?", None),
    }
    for place, (key, (item, hint, see)) in enumerate(columns.items(), start=1):
        with trial.group(item, hint=hint, see=see):
            for twice in (True, False):
                rows = answer(net, x, extra, twice=twice)
                for row, want in zip(rows, _rows_of_body(n, twice), strict=False):
                    trial.equal(f"{row['name']} ({row['kind']})", row[key], want[place])
            if key == "parameters":
                meta = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False)).to("meta")
                found = [row[key] for row in answer(meta, torch.zeros(2, 4, device="meta"))]
                trial.equal("two layers on the meta device", found, [15, 6])
            convs = nn.Sequential(nn.Conv2d(2, 4, (3, 2), stride=2), nn.Flatten(), nn.Linear(4, 3, bias=False))
            batch = torch.randn(3, 2, 3, 2)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                convs(batch)
            if key == "flops":
                total = sum(row["flops"] for row in answer(convs, batch))
                trial.equal("in all, as FlopCounterMode counts", total, counter.get_total_flops())

    slow = nn.Sequential(_Sleep(0.012), nn.Sequential(_Sleep(0.03), nn.ReLU()), _Sleep(0.004))
    start = time.perf_counter()
    rows = answer(slow, x)
    total = time.perf_counter() - start
    took = [row["seconds"] for row in rows]
    slept = (0.012, 0.03, 0.0, 0.004)
    fine = all(isinstance(t, Real) and t >= s * 0.98 for t, s in zip(took, slept, strict=True)) and sum(took) <= total
    with trial.group("seconds are those of the call", hint="when does the clock start and stop?", see=1):
        trial.that("sleeping layers", fine, expected=f"at least {slept}, in all at most {total:.3f}", got=str(took))
        for kind, least, found in _long_call(answer):
            trial.that(kind, found >= least, expected=f"at least {least:.4f}", got=f"{found:.4f}")

    seen: list[tuple[bool, bool]] = []
    handles = [
        module.register_forward_hook(
            lambda m, a, o: seen.append((m.training, isinstance(o, Tensor) and o.requires_grad))
        )
        for module in net.modules()
    ]
    net.train()
    net.box.eval()
    net.norm.eval()
    modes, hooks = [m.training for m in net.modules()], _left_on(net)
    answer(net, x, extra)
    passes = len(seen)
    modes_after, hooks_after, autograd = [m.training for m in net.modules()], _left_on(net), [torch.is_grad_enabled()]
    with torch.no_grad():
        answer(net, x, extra)
        autograd.append(torch.is_grad_enabled())
    trial.that(
        "runs in evaluation mode",
        not any(mode for mode, _ in seen),
        expected="no module in train mode during the pass",
        got="some in train mode",
        hint="what would batch norm learn from the pass?",
        see=4,
    )
    trial.that(
        "records no graph",
        not any(graph for _, graph in seen),
        expected="outputs without requires_grad",
        got="outputs with requires_grad",
        hint="what does autograd keep during the pass?",
    )
    failing: list[nn.Module] = [net, *(nn.Sequential(nn.Dropout(), _Fails(e)) for e in (RuntimeError("size"), *_ENDS))]
    failing[1:] = [nn.Sequential(nn.Linear(4, 4).eval(), module) for module in failing[1:]]
    raised, left, after_all = [], [], []
    for model in failing:
        modes_of, hooks_of = [m.training for m in model.modules()], _left_on(model)
        error: BaseException | None = None
        try:
            answer(model, x, torch.randn(n, 7)) if model is net else answer(model, x)
        except BaseException as caught:
            error = caught
        autograd.append(torch.is_grad_enabled())
        torch.set_grad_enabled(True)
        raised.append(error)
        after_all.append(([m.training for m in model.modules()], modes_of))
        left.append((_left_on(model), hooks_of))
    with trial.group("an exception goes on", hint="who catches it, and what is raised then?"):
        size = isinstance(raised[0], RuntimeError) and "size" in str(raised[0])
        trial.that("wrong shapes", size, expected="the model's RuntimeError", got=repr(raised[0]))
        for model, error in zip(failing[1:], raised[1:], strict=True):
            want = model[1][1].error
            trial.that("the same object", error is want, expected=repr(want), got=f"{error!r}, not that object")
    names = ["after an exception", "after an exception", *(f"after {type(end).__name__}" for end in _ENDS)]
    with trial.group("each module is in the mode it was in", hint="had all the same mode?", see=4):
        trial.equal("after a pass", modes_after, modes)
        for name, (got, want) in zip(names, after_all, strict=True):
            trial.equal(name, got, want)
    item, on = "autograd is as it was", "after a pass, a pass with autograd off, exceptions: who restores it?"
    trial.equal(item, autograd, [True, False] + [True] * len(failing), hint=on, see=4)
    with trial.group("nothing of yours is left, hooks of others stay and run", hint="which handles are yours?", see=4):
        for name, (got, want) in zip(["after a pass", *names], [(hooks_after, hooks), *left], strict=True):
            trial.equal(f"left on the model {name}", [entry for entry in got if entry not in want], [])
            trial.equal(f"taken from the model {name}", [entry for entry in want if entry not in got], [])
        trial.that("calls of others' hooks", passes >= 10, expected="one for each call", got=str(passes))
    for handle in handles:
        handle.remove()


# ---------------------------------------------------------------- 15-03.3

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


class _Normal(nn.Linear):
    """Named like a norm, but none."""


class _Rescaled(nn.LayerNorm):
    """A norm by another name."""


class _Tall(nn.Module):
    """Twelve blocks, a table of two dimensions in a norm, a 0-d parameter, tied and frozen ones, a shared module."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.token = nn.Parameter(torch.zeros(1, 1, 2))
        self.embed = nn.Embedding(5, 2)
        self.stem = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2))
        blocks = [nn.ModuleDict({"fc": nn.Linear(2, 2), "norm": nn.LayerNorm((3, 2))}) for _ in range(12)]
        self.blocks = nn.ModuleList(blocks)
        self.blocks[3]["fc"] = self.blocks[1]["fc"]
        self.blocks[7].requires_grad_(False)
        self.blocks[10]["fc"].bias.requires_grad_(False)
        self.block = nn.GroupNorm(1, 2)
        self.layernorm, self.last = _Normal(2, 2), _Rescaled((2, 2))
        self.root_mean, self.act = nn.RMSNorm((3, 2)), nn.ReLU()
        self.scales = nn.ParameterList([torch.ones(2, 2), torch.ones(2)])
        self.head = nn.Linear(2, 5)
        self.head.weight = self.embed.weight


def _wanted(
    model: nn.Module, lr: float, decay: float, layers: Sequence[str], factor: float
) -> dict[str, tuple[float, float]]:
    """Name → rate and decay, one parameter at a time, by the words of the task."""
    wanted = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        parts = name.split(".")[:-1]
        place = 0
        for length in range(len(parts), -1, -1):  # 0: the model itself
            if ".".join(parts[:length]) in layers:
                place = list(layers).index(".".join(parts[:length]))
                break
        rate = lr
        for _ in range(len(layers) - 1 - place if layers else 0):
            rate *= factor
        owner = model.get_submodule(".".join(parts))
        plain = isinstance(owner, _NORMS) or parameter.dim() in (0, 1)
        wanted[name] = rate, 0.0 if plain else decay
    return wanted


def _groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.0,
    layers: Sequence[str] = (),
    layer_decay: float = 1.0,
) -> list[dict[str, Any]]:
    """Stand-in of exercise 3."""
    for layer in layers:
        if layer not in dict(model.named_modules(remove_duplicate=False)):
            raise ValueError(f"{layer!r} is no submodule")
    groups: dict[tuple[float, float], list[Tensor]] = {}
    parameters = dict(model.named_parameters())
    for name, key in _wanted(model, lr, weight_decay, layers, layer_decay).items():
        groups.setdefault(key, []).append(parameters[name])
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]


@exercise(
    "15-03.3", "Parameter groups", points=20, demands=7, stand_in=lambda: _groups, stand_in_name="one of the check's"
)
def param_groups(trial: Trial, answer: Any) -> None:
    """`answer(model, lr, weight_decay, layers, layer_decay)` gives groups for an optimizer."""
    layers = ["stem", *(f"blocks.{i}" for i in range(12)), "head"]
    nested = ["blocks.1", "blocks", "blocks.11.norm", "stem.1", "block"]
    cases: list[tuple[str, nn.Module, tuple[Any, ...]]] = [
        ("no layers", _Tall(), (0.1, 0.01)),
        ("no decay given", _Tall(), (0.1,)),
        ("14 layers", _Tall(), (random.uniform(0.1, 0.9), 0.05, layers, 0.5)),
        ("a tuple of layers, growing rates", _Tall(), (0.1, 0.05, tuple(reversed(layers)), 1.5)),
        ("nested layers", _Tall(), (0.1, 0.05, nested, 0.25)),
        ("one layer", _Tall(), (0.1, 0.05, ["head"], 0.5)),
        ("a layer without parameters", _Tall(), (0.1, 0.05, ["stem", "act", "blocks.2.fc"], 0.5)),
        ("the model itself as a layer", _Tall(), (0.1, 0.05, ["stem", "", "blocks"], 0.5)),
        ("small rates", _Tall(), (1e-5, 0.05, layers, 0.5)),
        ("no decay of rates", _Tall(), (0.1, 0.05, layers)),
        ("no layers, and a decay for them", _Tall(), (0.1, 0.05, (), 0.5)),
        ("a shared layer by its second name", _Tall(), (0.1, 0.05, ["blocks.3.fc", "head"], 0.5)),
        ("a norm by itself", nn.LayerNorm((3, 2)), (0.1, 0.05)),
        ("a linear layer by itself", nn.Linear(3, 2), (0.1, 0.05)),
        (
            "instance norm",
            nn.Sequential(nn.Linear(2, 2), nn.InstanceNorm1d(2, affine=True)),
            (0.1, 0.05, ["1", "0"], 2),
        ),
        ("all frozen", nn.Linear(3, 2).requires_grad_(False), (0.1, 0.05)),
    ]
    found, unchanged = [], []
    for case, model, arguments in cases:
        asked = copy.copy(arguments[2]) if len(arguments) > 2 else ()
        groups = answer(model, *arguments)
        if len(arguments) > 2:
            unchanged.append((case, arguments[2], asked))
            arguments = (*arguments[:2], asked, *arguments[3:])
        form = isinstance(groups, list) and all(
            isinstance(group, dict) and group.keys() >= {"params", "lr", "weight_decay"} for group in groups
        )
        trial.that(
            "gives a list of groups with params, lr and weight_decay",
            form
            and all(isinstance(group["params"], list) for group in groups)
            and all(isinstance(p, nn.Parameter) for group in groups for p in group["params"]),
            expected="a list of dictionaries with params (a list of parameters), lr and weight_decay",
            got=repr(groups)[:200],
            hint="what does the constructor of an optimizer take?",
        )
        wanted = _wanted(model, *(list(arguments) + [0.0, (), 1.0][len(arguments) - 1 :]))
        found.append((case, model, groups, wanted))
    with trial.group("each parameter that learns is in one group, no other", hint="how often, and with which name?"):
        for case, model, groups, wanted in found:
            times = {name: sum(p is q for g in groups for q in g["params"]) for name, p in model.named_parameters()}
            trial.equal(case, times, {name: int(name in wanted) for name in times})
    for place, (key, item, hint, see) in enumerate(
        (
            (
                "lr",
                "rates are those of the layers",
                "which layer holds the parameter, and how far is it from the last?",
                1,
            ),
            ("weight_decay", "no decay for norms and for fewer than two dimensions", "who is spared, and by what?", 1),
        )
    ):
        with trial.group(item, hint=hint, see=see):
            for case, model, groups, wanted in found:
                has = {p: group[key] for group in groups for p in group["params"]}
                for name, parameter in model.named_parameters():
                    if name in wanted and parameter in has:
                        trial.close(f"{name}, {case}", float(has[parameter]), wanted[name][place], rtol=1e-9)
    item = "no group is empty, no two have the same rate and decay"
    with trial.group(item, hint="what makes a new group?", see=2):
        for case, _, groups, wanted in found:
            sizes = [len(group["params"]) for group in groups]
            trial.that(f"parameters of each group, {case}", all(sizes), expected="one or more in each", got=sizes)
            keys = {(f"{rate:.9g}", decay) for rate, decay in wanted.values()}
            trial.equal(f"groups, {case}", len(groups), len(keys))
    with trial.group("layers stays as it is", hint="what is done to the caller's list?"):
        for case, got, want in unchanged:
            trial.equal(case, got, want)
    with trial.group("an unknown layer raises ValueError with its name", hint="when would nobody notice?"):
        for layer in ("blocks.12", "bloc", "head.weight", "nowhere", "frozen.nowhere"):
            error = None
            model = _Tall().requires_grad_(not layer.startswith("frozen"))
            try:
                answer(model, 0.1, 0.05, ["stem", layer, "head"], 0.5)
            except Exception as caught:
                error = caught
            right = isinstance(error, ValueError) and layer in str(error)
            trial.that(layer, right, expected=f"ValueError naming {layer!r}", got=repr(error))


# ---------------------------------------------------------------- 15-03.4


class NormLinear(nn.Module):
    """length · (direction x / ‖direction‖) + bias for each output."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(0.05 * torch.randn(outputs, inputs))
        self.length, self.bias = nn.Parameter(torch.ones(outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.length * F.linear(x, F.normalize(self.direction, dim=1)) + self.bias


_STARTED = ("direction", "length", "bias")


class _LazyNormLinear(LazyModuleMixin, NormLinear):
    """Stand-in of exercise 4."""

    cls_to_become = NormLinear

    def __init__(self, outputs: int) -> None:
        super().__init__(0, 0)
        self.outputs = outputs
        self.direction, self.length, self.bias = (
            UninitializedParameter(),
            UninitializedParameter(),
            UninitializedParameter(),
        )

    @classmethod
    def of(cls, linear: nn.Linear) -> "_LazyNormLinear":
        made = cls(linear.out_features).to(linear.weight)
        made.load_state_dict({"direction": linear.weight}, strict=False)
        return made

    def initialize_parameters(self, x: Tensor) -> None:
        def start(parameter: Tensor, value: Callable[[], Tensor]) -> None:
            if isinstance(parameter, UninitializedParameter):
                new = value().to(x)
                parameter.materialize(new.shape, device=x.device, dtype=x.dtype)
                parameter.data.copy_(new)

        x = x.detach()
        start(self.direction, lambda: 0.05 * torch.randn(self.outputs, x.shape[-1]))
        mean, scale = _statistics(x, self.direction.detach())
        start(self.length, lambda: scale)
        start(self.bias, lambda: -self.length.detach() * mean.to(x.dtype))


def _statistics(x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, and 1 over the deviation, of each output at length 1, in float64 and one output at a time."""
    means, scales = [], []
    for row in direction.double():
        values = (x.double() * (row / row.square().sum().sqrt())).sum(dim=-1).flatten()
        mean = values.sum() / values.numel()
        deviation = ((values - mean).square().sum() / values.numel()).sqrt()
        means.append(mean)
        scales.append(1 / deviation if deviation >= 1e-4 else torch.ones_like(deviation))
    return torch.stack(means), torch.stack(scales)


def _first_inputs() -> Iterator[tuple[str, Tensor]]:
    """Inputs of many shapes, dtypes and sizes; the last is loaded with directions along the axes."""
    for shape in ((40, 3), (6, 5, 7), (2, 3, 4, 6), (9, 1)):
        yield f"shape {shape}", 3 * torch.randn(shape) + torch.randn(())
    yield "not contiguous", (2 * torch.randn(5, 8, 6) + 1).permute(2, 1, 0)
    yield "one row", torch.randn(1, 4)
    yield "far from 0", 1000 + 0.1 * torch.randn(512, 3)
    yield "float64", torch.randn(30, 4, dtype=torch.float64)
    for dtype in (torch.float16, torch.bfloat16):
        constant = torch.randn(4).expand(8, 4)  # no deviation at all
        yield f"constant, {dtype}", constant.to(dtype)


@exercise(
    "15-03.4",
    "A layer that starts from its first batch",
    points=20,
    demands=12,
    stand_in=lambda: _LazyNormLinear,
    stand_in_name="one of the check's",
)
def lazy_norm_linear(trial: Trial, answer: Any) -> None:
    """`answer(outputs)` is a lazy NormLinear that starts from its first batch."""
    fresh = answer(3)
    names = sorted(name for name, _ in fresh.named_parameters())
    trial.that(
        "its three parameters are uninitialised before the first forward",
        names == sorted(_STARTED) and all(isinstance(p, UninitializedParameter) for p in fresh.parameters()),
        expected="direction, length and bias, each an UninitializedParameter",
        got=", ".join(f"{name}: {type(p).__name__}" for name, p in fresh.named_parameters()) or "no parameters",
        hint="what takes the place of NormLinear's parameters?",
    )
    with trial.group(
        "shape, dtype and device are those of the outputs and the input", hint="what does materialize take?"
    ):
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        for outputs, x in ((4, torch.randn(5, 3, dtype=torch.float64)), (1, torch.randn(2, 5, 3, device=here))):
            module = answer(outputs)
            module(x)
            kinds = {n: (tuple(p.shape), p.dtype, str(p.device)) for n, p in module.named_parameters()}
            shapes = {"direction": (outputs, 3), "length": (outputs,), "bias": (outputs,)}
            want = {name: (shapes[name], x.dtype, str(x.device)) for name in kinds}
            trial.equal(f"{x.dtype} on {x.device}", kinds, want)
    made = []
    for case, x in _first_inputs():
        module = answer(random.randint(2, 6)).train(len(made) % 2 == 0)
        objects = {name: getattr(module, name) for name in _STARTED}
        given = x.clone()
        made.append((case, x, module, objects, module(given), given))
    with trial.group("becomes NormLinear at the first forward", hint="which attribute of the mixin says so?"):
        for case, _, module, _, _, _ in made:
            trial.equal(case, type(module).__name__, "NormLinear")
    with trial.group("direction is drawn from a normal distribution", hint="with which deviation?"):
        drawn = []
        for _ in range(2):
            module = answer(100)
            module(torch.randn(3, 200))
            drawn.append(module.direction.detach())
        values = torch.cat(drawn).flatten().double()  # 40,000: each bound is five standard errors or more
        trial.close("mean", values.mean().item(), 0.0, atol=0.00125)
        trial.close("deviation", values.std().item(), 0.05, atol=0.0009)
        trial.close("share beyond two deviations", (values.abs() > 0.1).double().mean().item(), 0.0455, atol=0.0052)
        trial.that("two draws", not torch.equal(*drawn), expected="two directions", got="the same twice")
    axes = torch.eye(6, dtype=torch.float64) * torch.tensor([2.0, 0.5, 1.0, 3.0, 1.0, 0.1])[:, None]
    small = torch.randn(64, 6, dtype=torch.float64)
    small = (small - small.mean(dim=0)) / small.std(dim=0, correction=0)
    small = small * torch.tensor([0.0, 1e-6, 0.9e-4, 1.1e-4, 0.3, 40.0]) + torch.tensor([7.0, 0.0, -1.0, 2.0, 0.0, 5.0])
    item = {"length": "each output has deviation 1 over the first batch", "bias": "each output has mean 0 over it, too"}
    for name in ("length", "bias"):
        with trial.group(item[name], hint="over which dimensions, divided by what, and in which order?", see=2):
            cases = [(case, x, module) for case, x, module, _, _, _ in made]
            along = answer(6)
            along.load_state_dict({"direction": axes}, strict=False)
            along.double()(small)
            for case, x, module in [*cases, ("deviations around 1e-4", small, along)]:
                mean, scale = _statistics(x, module.direction.detach())
                want = scale if name == "length" else -mean * module.length.detach().double()
                rough = {torch.float32: 2e-3, torch.float64: 1e-7}.get(x.dtype, 3e-2)
                got = getattr(module, name).detach().double()
                trial.close(
                    case, got, want, rtol=rough, atol=rough * (name == "bias") * max(1.0, want.abs().max().item())
                )
    with trial.group("the three stay the same objects", hint="what would an optimizer hold?", see=3):
        for case, _, module, objects, _, _ in made:
            same = {name: getattr(module, name) is parameter for name, parameter in objects.items()}
            trial.equal(case, same, dict.fromkeys(same, True))
    with trial.group("the first output is that of the started layer", hint="does forward run as NormLinear's?"):
        for case, x, module, _, y, given in made:
            trial.close(case, y.detach(), module(x).detach(), rtol=1e-3, atol=1e-3)
            trial.equal(f"the input, {case}", given, x)
    with trial.group("gradients reach the parameters and the input", hint="is the start recorded by autograd?"):
        x, sent = (
            torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True),
            torch.randn(6, 2, 4, dtype=torch.float64),
        )
        module = answer(4)
        (module(x) * sent).sum().backward()
        plain = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
        again = x.detach().clone().requires_grad_()
        unit = plain["direction"] / plain["direction"].square().sum(dim=1, keepdim=True).sqrt()
        ((plain["length"] * (again @ unit.T) + plain["bias"]) * sent).sum().backward()
        zero = torch.zeros(())  # where nothing arrived
        pairs = [(name, getattr(module, name).grad, plain[name].grad) for name in _STARTED]
        for name, got, want in [("x", x.grad, again.grad), *pairs]:
            trial.close(f"gradient of {name}", got if got is not None else zero, want, rtol=1e-6, atol=1e-8)
        with torch.no_grad():
            module = answer(2)
            module(torch.randn(3, 4))
        trial.equal(
            "requires_grad, first forward without autograd", [p.requires_grad for p in module.parameters()], [True] * 3
        )
    with trial.group("later inputs change nothing", hint="when is the start computed?"):
        for case, x, module, _, _, _ in made:
            before = copy.deepcopy([p.detach() for p in module.parameters()])
            for mode in (True, False):
                module.train(mode)(x * 3 + 1)
            trial.equal(case, [p.detach() for p in module.parameters()], before)
    loaded = {
        "direction": torch.randn(3, 4),
        "length": torch.tensor([2.0, 0.25, -1.0]),
        "bias": torch.tensor([0.5, -1.0, 3.0]),
    }
    with trial.group("what was loaded is kept, the others are started for it", hint="who is asked, and when?", see=1):
        for count in (1, 2, 3):
            for chosen in itertools.combinations(_STARTED, count):
                for mode in (True, False):
                    module = answer(3).train(mode)
                    module.load_state_dict({name: loaded[name] for name in chosen}, strict=False)
                    x = 2 * torch.randn(5, 7, 4) + 1
                    case = f"loaded {', '.join(chosen)}; training {mode}"
                    trial.call(case, lambda module=module, x=x: module(x), hint="which has a shape already?", see=1)
                    mean, scale = _statistics(x, module.direction.detach())
                    length = loaded["length"].double() if "length" in chosen else scale
                    want = {"length": length, "bias": -mean * length}
                    want |= {name: loaded[name].double() for name in chosen}
                    for name, value in want.items():
                        got = getattr(module, name).detach().double()
                        trial.close(f"{name}; {case}", got, value, rtol=1e-3, atol=1e-4)
    with trial.group("LazyNormLinear.of has the linear layer's weight as its direction", hint="what is copied?"):
        for linear in (nn.Linear(4, 3), nn.Linear(4, 5, bias=False).double(), nn.Linear(4, 2).requires_grad_(False)):
            weight = linear.weight.detach().clone()
            module = answer.of(linear)
            case = f"{linear}, {weight.dtype}"
            trial.equal(f"its class, {case}", type(module).__name__, answer.__name__)
            trial.equal(f"direction, {case}", module.direction.detach(), weight)
            x = torch.randn(20, 4, dtype=weight.dtype)
            y = module(x).detach()
            trial.close(f"means, {case}", y.mean(dim=0), torch.zeros_like(y[0]), atol=1e-4)
            trial.close(f"deviations, {case}", y.std(dim=0, correction=0), torch.ones_like(y[0]), atol=1e-4)
            with torch.no_grad():
                module.direction.zero_()
            trial.equal(f"the linear layer's own weight, {case}", linear.weight.detach(), weight)


# ---------------------------------------------------------------- 15-03.5


class _SplitBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        q, k, v = (layer(h).unflatten(2, (4, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        x = x + self.out((torch.softmax(q @ k.mT / k.shape[-1] ** 0.5, -1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.ln2(x))))


class _Split(nn.Module):
    """The notebook's SplitViT, and its FusedViT with fused=True."""

    def __init__(
        self, channels: int = 1, classes: int = 10, grid: int = 7, width: int = 8, depth: int = 2, fused: bool = False
    ) -> None:
        super().__init__()
        self.patch = nn.Conv2d(channels, width, 4, stride=4)
        self.position = nn.Parameter(torch.randn(1, grid * grid, width))
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, **options) if fused else _SplitBlock(width)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def _checkpoint(dtype: torch.dtype = torch.float64, **sizes: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A FusedViT with random numbers everywhere, and its checkpoint as the task describes it."""
    net = _Split(fused=True, **sizes).to(dtype).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
    state = {f"_orig_mod.{key}": value for key, value in net.state_dict().items()}
    return net, {**state, "_orig_mod.steps": torch.tensor(1234)}


def _convert(state: Mapping[str, Tensor], target: Mapping[str, Tensor], classes: Sequence[int]) -> dict[str, Tensor]:
    """Stand-in of exercise 5: written as a loop, to be seen beside the rules."""
    result: dict[str, Tensor] = {}
    names = {"self_attn.out_proj": "out", "norm1": "ln1", "norm2": "ln2", "linear1": "up", "linear2": "down"}
    for full, tensor in state.items():
        key = full.removeprefix("_orig_mod.")
        if full != key and key in state:
            raise ValueError(f"{full} and {key} are the same")
        if key == "steps":
            continue
        for old, new in names.items() if key.startswith("blocks.") else ():
            key = key.replace(f".{old}.", f".{new}.")
        if ".self_attn.in_proj_" in key:
            block, _, end = key.partition(".self_attn.in_proj_")
            for part, value in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                result[f"{block}.{part}.{end}"] = value
            continue
        if key.startswith("head."):
            tensor = tensor[list(classes)]
        elif key == "patch.weight" and target[key].shape[1] == 1:
            tensor = tensor.sum(dim=1, keepdim=True)
        elif key == "position":
            tensor = _resized(tensor, round(target[key].shape[1] ** 0.5))
        result[key] = tensor
    if wrong := sorted(result.keys() ^ target.keys()):
        raise ValueError(f"left over or missing: {wrong}")
    if wrong := [key for key in target if result[key].shape != target[key].shape]:
        raise ValueError(f"of another shape: {wrong}")
    return result


def _resized(position: Tensor, grid: int) -> Tensor:
    """Positions on another grid: one component at a time."""
    old = round(position.shape[1] ** 0.5)
    planes = [
        F.interpolate(plane.reshape(1, 1, old, old), size=(grid, grid), mode="bicubic", align_corners=False).flatten()
        for plane in position[0].T
    ]
    return torch.stack(planes, dim=1)[None]


@exercise(
    "15-03.5",
    "The other way round",
    points=25,
    demands=9,
    stand_in=lambda: _convert,
    stand_in_name="a loop of the check's",
)
def convert(trial: Trial, answer: Any) -> None:
    """`answer(state, target, classes)` makes a SplitViT's state dict of a compiled FusedViT's checkpoint."""
    cases: list[tuple[str, dict[str, int], dict[str, int], Sequence[int]]] = [
        ("grey", {"channels": 3, "classes": 12, "grid": 3}, {"channels": 1, "grid": 3}, (7, 0, 11, 7, 3)),
        ("11 blocks", {"channels": 3, "classes": 5, "grid": 2, "depth": 11}, {"channels": 1, "grid": 2}, range(5)),
        ("one block, wide", {"channels": 3, "classes": 9, "grid": 2, "depth": 1, "width": 12}, {"grid": 2}, [8]),
        ("four channels", {"channels": 4, "classes": 6, "grid": 2}, {"channels": 1, "grid": 2}, (3, 1, 2)),
        ("two channels", {"channels": 2, "classes": 6, "grid": 2}, {"channels": 1, "grid": 2}, (0, 5)),
        ("colour", {"channels": 3, "classes": 12, "grid": 3}, {"channels": 3, "grid": 3}, [2, 1]),
        ("grey before", {"channels": 1, "classes": 12, "grid": 3}, {"channels": 1, "grid": 3}, [5, 6, 0]),
        ("a finer grid", {"channels": 3, "classes": 4, "grid": 3}, {"channels": 1, "grid": 5}, [3, 0]),
        ("a coarser grid", {"channels": 3, "classes": 4, "grid": 5}, {"channels": 1, "grid": 2}, [0]),
    ]
    results = []
    for case, old, new, classes in cases:
        net, state = _checkpoint(**old)
        same = {key: value for key, value in old.items() if key in ("depth", "width")}
        target = _Split(classes=len(classes), **new, **same).double().eval()
        given = target.state_dict()
        before = copy.deepcopy((state, given))
        result = answer(state, given, classes)
        after = copy.deepcopy((state, given))  # target's tensors are the net's, which is loaded below
        results.append((case, net, after, before, target, result, classes))
    with trial.group("load_state_dict accepts the result", hint="compare the two state dicts key by key", see=1):
        for case, _, _, _, target, result, _ in results:
            shapes = {key: tuple(value.shape) for key, value in result.items()}
            wanted = {key: tuple(value.shape) for key, value in target.state_dict().items()}
            missing, more = sorted(wanted.keys() - shapes.keys()), sorted(shapes.keys() - wanted.keys())
            trial.that(
                f"keys, {case}",
                not missing and not more,
                expected="the keys of target",
                got=f"{len(missing)} missing {missing[:3]}, {len(more)} others {more[:3]}",
            )
            trial.equal(f"shapes, {case}", shapes, wanted)
    grey = "computes what the old net does with a grey image, for the chosen classes"
    colour = "a stem with as many channels stays as it is"
    for item, chosen, hint in (
        (grey, results[:5], "which of the moves above is which, and in which order are the parts?"),
        (colour, results[5:7], "when is the stem folded?"),
    ):
        with trial.group(item, hint=hint, see=2):
            for case, net, _, _, target, result, classes in chosen:
                target.load_state_dict(result, strict=False)
                channels, side = target.patch.weight.shape[1], 4 * round(target.position.shape[1] ** 0.5)
                x = torch.randn(3, channels, side, side, dtype=torch.float64)
                with torch.no_grad():
                    want = net(x.expand(-1, net.patch.weight.shape[1], -1, -1))[:, list(classes)]
                    trial.close(f"logits, {case}", target(x), want, rtol=1e-7, atol=1e-7)
    with trial.group(
        "positions are resized to the target's grid",
        hint="what is the grid of target, and the dtype on the way?",
        see=2,
    ):
        for case, net, _, _, target, result, _ in results:
            want = _resized(net.position.detach(), round(target.position.shape[1] ** 0.5))
            trial.close(case, result["position"], want, rtol=1e-7, atol=1e-7)
    with trial.group("state, target and their tensors stay as they are", hint="what do you write into?"):
        for case, _, after, before, _, _, _ in results:
            for name, got, want in zip(("state", "target"), after, before, strict=True):
                trial.equal(f"keys of {name}, {case}", list(got), list(want))
                trial.equal(f"tensors of {name}, {case}", dict(got), dict(want))
    with trial.group("tensors keep the dtype of the checkpoint", hint="where does a dtype change?"):
        for dtype in (torch.float32, torch.bfloat16):
            _, state = _checkpoint(dtype, channels=3, classes=4, grid=2)
            result = answer(state, _Split(classes=2, grid=2).double().state_dict(), [0, 3])
            trial.equal(str(dtype), {key: value.dtype for key, value in result.items()}, dict.fromkeys(result, dtype))

    def refused(case: str, state: dict[str, Tensor], names: Sequence[str], **sizes: int) -> None:
        error = None
        try:
            answer(state, _Split(**{"classes": 2, "grid": 2, **sizes}).state_dict(), [0, 3])
        except Exception as caught:
            error = caught
        right = isinstance(error, ValueError) and any(
            name in str(error).replace("\\", "") for name in names
        )  # of an expression
        trial.that(case, right, expected=f"ValueError naming {names[0]!r}", got=repr(error)[:200])

    with trial.group(
        "an unplanned key raises ValueError with its name",
        hint="which list of the report; what does a dot match?",
        see=3,
    ):
        strangers = ["_orig_mod.extra.bias", "_orig_mod.blocks.0.gate", "ema", "_orig_mod.head_bias"]
        for key in (*strangers, "_orig_mod.blocks.0.steps", "_orig_mod.ema_updates", "head.bias", "norm.weight"):
            _, state = _checkpoint(channels=3, classes=4, grid=2)
            tensor = state.get(
                f"_orig_mod.{key}", torch.tensor(3) if "steps" in key or "updates" in key else torch.zeros(2)
            )
            refused(key, {**state, key: tensor}, [key.removeprefix("_orig_mod.")])
        _, state = _checkpoint(channels=3, classes=4, grid=2)
        key = "blocks.0.self_attn_out_proj.bias"  # a name like the planned one, in its place
        state[f"_orig_mod.{key}"] = state.pop("_orig_mod.blocks.0.self_attn.out_proj.bias")
        refused(key, state, [key, "blocks.0.out.bias"])
        _, state = _checkpoint(channels=3, classes=4, grid=2, depth=3)
        refused("a block more than target has", state, ["blocks.2."])
    item = "a key that nothing fills raises ValueError with its name"
    with trial.group(item, hint="who raises first, and which list of the report?", see=3):
        for key, names in (
            ("norm.bias", ["norm.bias"]),
            ("position", ["position"]),
            ("patch.weight", ["patch.weight"]),
            ("patch.bias", ["patch.bias"]),
            ("head.weight", ["head.weight"]),
            ("blocks.1.norm2.weight", ["blocks.1.ln2.weight"]),
            ("blocks.0.self_attn.in_proj_bias", [f"blocks.0.{part}.bias" for part in ("query", "key", "value")]),
        ):
            _, state = _checkpoint(channels=3, classes=4, grid=2)
            del state[f"_orig_mod.{key}"]
            refused(key, state, names)
    with trial.group(
        "a tensor that doesn't get its shape raises ValueError with its name", hint="who compares?", see=3
    ):
        one, head = ["patch.weight"], ["head.weight", "head.bias"]
        wide = list(_Split(classes=2, grid=2, width=12).state_dict())
        for channels, old, keys, sizes in (
            (3, 1, one, {}),
            (2, 3, one, {}),
            (4, 2, one, {}),
            (1, 3, wide, {"width": 12}),
            (1, 3, head, {"classes": 3}),
        ):
            _, state = _checkpoint(channels=old, classes=4, grid=2)
            refused(f"{old} channels for {channels}, {sizes}", state, keys, channels=channels, **sizes)
