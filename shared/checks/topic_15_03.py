"""Checks of the exercises in 15-03, Advanced nn.Module Patterns."""

import copy
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from torch.utils.flop_counter import FlopCounterMode

from shared.checks.feedback import Trial, exercise

# ---------------------------------------------------------------- 15-03.1

_TABLES = ("_parameters", "_buffers", "_modules")
_NAMES = ("first", "second", "third")


def _outcome(action: Callable[[], object]) -> str:
    """The name of the exception that an action raises, or 'no exception'; an unfinished answer's goes on."""
    try:
        action()
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__
    return "no exception"


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


@exercise("15-03.1", "Registration that survives reassignment", points=15)
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
    labels: dict[int, str] = {}
    kept: list[object] = []

    def pair(kind: str) -> tuple[object, object]:
        """The same value for nn.Module and for the answer."""
        made = {
            "a parameter": lambda: (value := nn.Parameter(torch.randn(2)), value),
            "a frozen 0-d parameter": lambda: (value := nn.Parameter(torch.tensor(1.0), requires_grad=False), value),
            "a module": lambda: (nn.Module(), answer()),
            "a tensor": lambda: (value := torch.randn(3), value),
            "None": lambda: (None, None),
            "a string": lambda: ("text", "text"),
            "zero": lambda: (0, 0),
        }[kind]()
        kept.extend(made)  # an id may not be used again
        for value in made:
            if value is not None and not isinstance(value, str | int):
                labels[id(value)] = f"{kind} (number {len(kept) // 2})"
        return made

    places = {
        "nothing": [],
        "attribute": ["a string", "a tensor", "None"],
        "_parameters": ["a parameter", "None"],
        "_buffers": ["a tensor", "None"],
        "_modules": ["a module", "None"],
    }
    values = ["a parameter", "a frozen 0-d parameter", "a module", "a tensor", "None", "a string", "zero"]
    hints = {
        "a parameter or a module takes the name over": ("where else may the name still be?", 2),
        "a tensor for a buffer's name stays a buffer": ("which table has the name, and in which place?", 1),
        "None keeps a registered name in its table": ("what may the table of the name hold?", 1),
        "another value for a registered name raises TypeError and changes nothing": ("who refuses, and when?", 1),
        "a name that is not registered becomes an ordinary attribute": ("where does MiniModule put it?", 1),
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
                item, done = deletes, [_outcome(lambda m=m, n=name: delattr(m, n)) for m in (theirs, ours)]
            else:
                given = pair(new)
                done = [
                    _outcome(lambda m=m, n=name, v=v: setattr(m, n, v))
                    for m, v in zip((theirs, ours), given, strict=True)
                ]
                if "parameter" in new or (new == "a module" and place != "_parameters"):
                    item = takes_over
                elif place in ("nothing", "attribute"):
                    item = ordinary
                elif new == "None":
                    item = empties
                else:
                    item = stays if (place, new) == ("_buffers", "a tensor") else refuses
            where = {"nothing": "nowhere", "attribute": f"an ordinary attribute ({old})"}.get(place, f"{place} ({old})")
            with trial.group(item, hint=hints[item][0], see=hints[item][1]):
                case = f"{new} for a name that was in {where}" if new != "del" else f"del of a name in {where}"
                trial.equal(case, done[1], done[0])
                trial.equal(case, *[_contents(m, labels) for m in (ours, theirs)])


# ---------------------------------------------------------------- 15-03.2


class _Nest(nn.Module):
    """A leaf whose output is nested and holds other things, too."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"a": x[:, :1], "b": [x, (x[0, 0], 3, None), []], "c": "text", "d": {"e": x.sum(0)}}


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
        self.calls = 0

    def forward(self, x: Tensor, extra: Tensor, *, twice: bool = False) -> Tensor:
        self.calls += 1
        x = self.same(self.box["drop"](self.inputs(x))) + extra
        if twice:
            x = self.same(x)
        x = self.norm(self.tied(x))
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
        ("count", "_Count", [], 0, 0),
        ("conv", "Conv1d", [(m, 4, 6)], 16, 2 * m * 4 * 6 * 3),
        ("gru", "GRU", [(m, 4, 3), (1, m, 3)], 3 * 3 * (6 + 3 + 2), 0),
        ("nest", "_Nest", [(m, 1, 6), (m, 4, 6), (6,), (4, 6)], 0, 0),
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


def _hook_ids(model: nn.Module) -> list[tuple[int, str, int]]:
    """All forward hooks of a model's modules, and of all modules."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_global_forward_hooks", "_global_forward_pre_hooks")
    owners = [*model.modules(), nn.modules.module]
    return [(i, k, key) for i, owner in enumerate(owners) for k in kinds for key in getattr(owner, k, ())]


@exercise("15-03.2", "A summary from hooks", points=20, stand_in=lambda: _summary, stand_in_name="one of the check's")
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
    trial.equal("runs the model once", net.calls, 1, hint="how often is the model called?")
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
    fine = all(isinstance(t, float) and t >= s * 0.98 for t, s in zip(took, slept, strict=True)) and sum(took) <= total
    trial.that(
        "seconds are those of the call",
        fine,
        expected=f"at least {slept}, in all at most {total:.3f}",
        got=str(took),
        hint="when does the clock start, and for which call?",
        see=1,
    )

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
    modes, hooks = [m.training for m in net.modules()], _hook_ids(net)
    answer(net, x, extra)
    passes = len(seen)
    modes_after, hooks_after, autograd = [m.training for m in net.modules()], _hook_ids(net), [torch.is_grad_enabled()]
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
    error: BaseException | None = None
    try:
        answer(net, x, torch.randn(n, 7))
    except Exception as caught:
        error = caught
    autograd.append(torch.is_grad_enabled())
    torch.set_grad_enabled(True)
    trial.that(
        "an exception goes on",
        isinstance(error, RuntimeError) and "size" in str(error),
        expected="the model's RuntimeError",
        got=repr(error),
        hint="who catches it?",
    )
    with trial.group("each module is in the mode it was in", hint="had all the same mode?", see=4):
        trial.equal("after a pass", modes_after, modes)
        trial.equal("after an exception", [m.training for m in net.modules()], modes)
    item = "autograd is on if it was"
    trial.equal(
        item, autograd, [True, True], hint="after a pass, and after an exception: who turns it on again?", see=4
    )
    with trial.group("your hooks are gone, those of others stay and run", hint="which handles are yours?", see=4):
        trial.equal("hooks after a pass", hooks_after, hooks)
        trial.equal("hooks after an exception", _hook_ids(net), hooks)
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
        for length in range(len(parts), 0, -1):
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


@exercise("15-03.3", "Parameter groups", points=20, stand_in=lambda: _groups, stand_in_name="one of the check's")
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
    found = []
    for case, model, arguments in cases:
        groups = answer(model, *arguments)
        form = isinstance(groups, list) and all(
            isinstance(group, dict) and group.keys() >= {"params", "lr", "weight_decay"} for group in groups
        )
        trial.that(
            "gives a list of groups with params, lr and weight_decay",
            form and all(isinstance(p, nn.Parameter) for group in groups for p in group["params"]),
            expected="a list of dictionaries with params (parameters), lr and weight_decay",
            got=repr(groups)[:200],
            hint="what does the constructor of an optimizer take?",
        )
        groups = [{**group, "params": list(group["params"])} for group in groups]
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
            trial.equal(f"sizes, {case}", [bool(group["params"]) for group in groups], [True] * len(groups))
            keys = {(f"{rate:.9g}", decay) for rate, decay in wanted.values()}
            trial.equal(f"groups, {case}", len(groups), len(keys))
    with trial.group("an unknown layer raises ValueError with its name", hint="when would nobody notice?"):
        for layer in ("blocks.12", "bloc", "head.weight", "nowhere"):
            error = None
            try:
                answer(_Tall(), 0.1, 0.05, ["stem", layer, "head"], 0.5)
            except Exception as caught:
                error = caught
            right = isinstance(error, ValueError) and layer in str(error)
            trial.that(layer, right, expected=f"ValueError naming {layer!r}", got=repr(error))


# ---------------------------------------------------------------- 15-03.4


class ActNorm(nn.Module):
    """scale · (x - mean) for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mean, self.scale = nn.Parameter(torch.zeros(channels)), nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, *[1] * (x.dim() - 2))
        return self.scale.view(shape) * (x - self.mean.view(shape))


class _LazyActNorm(LazyModuleMixin, ActNorm):
    """Stand-in of exercise 4."""

    cls_to_become = ActNorm

    def __init__(self) -> None:
        super().__init__(0)
        self.mean, self.scale = UninitializedParameter(), UninitializedParameter()

    def initialize_parameters(self, x: Tensor) -> None:
        if self.has_uninitialized_params():
            mean, scale = _statistics(x.detach())
            for parameter, value in ((self.mean, mean), (self.scale, scale)):
                parameter.materialize(value.shape, device=x.device, dtype=x.dtype)
                parameter.data.copy_(value)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and 1 over the deviation of each channel, one channel at a time."""
    means, scales = [], []
    for channel in range(x.shape[1]):
        values = x[:, channel].reshape(-1)
        mean = values.sum() / values.numel()
        deviation = (((values - mean) ** 2).sum() / values.numel()).sqrt()
        means.append(mean)
        scales.append(1 / torch.clamp(deviation, min=1e-5))
    return torch.stack(means), torch.stack(scales)


@exercise(
    "15-03.4",
    "A layer that starts from its first batch",
    points=20,
    stand_in=lambda: _LazyActNorm,
    stand_in_name="one of the check's",
)
def lazy_act_norm(trial: Trial, answer: Any) -> None:
    """`answer()` is a lazy ActNorm that starts from its first batch."""
    fresh = answer()
    lazy = [isinstance(getattr(fresh, name, None), UninitializedParameter) for name in ("mean", "scale")]
    trial.that(
        "mean and scale are uninitialised before the first forward",
        all(lazy) and [name for name, _ in fresh.named_parameters()] in (["mean", "scale"], ["scale", "mean"]),
        expected="the parameters mean and scale, both UninitializedParameter",
        got=", ".join(f"{name}: {type(p).__name__}" for name, p in fresh.named_parameters()) or "no parameters",
        hint="what takes the place of ActNorm's parameters?",
    )
    shapes = [(7, 3), (1, 4, 5), (5, 2, 3, 4), (2, 1, 2, 3, 2)]
    batches = [(f"shape {shape}", 3 * torch.randn(shape) + torch.randn(())) for shape in shapes]
    batches.append(("not contiguous", (2 * torch.randn(4, 6, 5) + 1).permute(2, 0, 1)))
    small = torch.randn(64, 5) * torch.tensor([0.0, 1e-7, 0.9e-5, 1.2e-5, 1.0])
    batches.append(("deviations around 1e-5", small.to(torch.float64)))
    made = []
    for case, x in batches:
        module = answer().train(len(made) % 2 == 0)
        made.append((case, x, module, module(x.clone())))
    with trial.group("becomes ActNorm at the first forward", hint="which attribute of the mixin says so?"):
        for case, _, module, _ in made:
            trial.equal(case, type(module).__name__, "ActNorm")
    for place, name in enumerate(("mean", "scale")):
        item = f"{name} is that of the first batch"
        with trial.group(item, hint="over which dimensions, and divided by what?", see=1):
            for case, x, module, _ in made:
                want = _statistics(x.double())[place].to(x.dtype)
                got = getattr(module, name).detach()
                trial.close(case, got, want, rtol=1e-4 if x.dtype == torch.float32 else 1e-7, atol=1e-6)
    with trial.group("dtype and device are those of the input", hint="what does materialize take?"):
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        for x in (torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, device=here)):
            module = answer()
            module(x)
            kinds = [(p.dtype, str(p.device)) for p in (module.mean, module.scale)]
            trial.equal(f"{x.dtype} on {x.device}", kinds, [(x.dtype, str(x.device))] * 2)
    with trial.group("the first output is normalised", hint="does forward run as ActNorm's?"):
        for case, x, module, y in made[:5]:
            mean, scale = module.mean.detach().double(), module.scale.detach().double()
            view = (-1, *[1] * (x.dim() - 2))
            want = (x.double() - mean.view(view)) * scale.view(view)
            trial.close(case, y.detach(), want.to(x.dtype), rtol=1e-4, atol=1e-4)
    with trial.group("gradients reach the parameters and the input", hint="is the start recorded by autograd?"):
        x = torch.randn(6, 3, 2, requires_grad=True)
        module = answer()
        sent = torch.randn(6, 3, 2)
        (module(x) * sent).sum().backward()
        mean, scale = (value.detach()[:, None] for value in (module.mean, module.scale))
        zero = torch.zeros(())  # where nothing arrived
        trial.close("x.grad", x.grad if x.grad is not None else zero, sent * scale, rtol=1e-4)
        grads = [p.grad if p.grad is not None else zero for p in (module.mean, module.scale)]
        trial.close("mean.grad", grads[0], -(sent * scale).sum(dim=(0, 2)), rtol=1e-4, atol=1e-5)
        trial.close("scale.grad", grads[1], (sent * (x.detach() - mean)).sum(dim=(0, 2)), rtol=1e-4, atol=1e-5)
    with trial.group("the second batch changes nothing", hint="when is the start computed?"):
        for case, x, module, _ in made:
            before = copy.deepcopy([p.detach() for p in module.parameters()])
            for mode in (True, False):
                with suppress(RuntimeError):
                    module.train(mode)(x * 3 + 1)
            trial.equal(case, [p.detach() for p in module.parameters()], before)
    with trial.group("a checkpoint loaded before the first forward is kept", hint="who is asked first?", see=2):
        state = {"mean": torch.tensor([0.5, -1.0]), "scale": torch.tensor([2.0, 0.25])}
        for mode in (True, False):
            module = answer().train(mode)
            module.load_state_dict(state)
            x = torch.randn(4, 2, 3)
            module(x)
            for name, value in state.items():
                trial.close(f"{name}, training {mode}", getattr(module, name).detach(), value)


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
    for key, tensor in state.items():
        key = key.removeprefix("_orig_mod.")
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
        elif key == "patch.weight" and tensor.shape[1] != target[key].shape[1]:
            tensor = tensor.sum(dim=1, keepdim=True)
        elif key == "position":
            tensor = _resized(tensor, round(target[key].shape[1] ** 0.5))
        result[key] = tensor
    if wrong := sorted(result.keys() ^ target.keys()):
        raise ValueError(f"left over or missing: {wrong}")
    return result


def _resized(position: Tensor, grid: int) -> Tensor:
    """Positions on another grid: one component at a time."""
    old = round(position.shape[1] ** 0.5)
    planes = [
        F.interpolate(plane.reshape(1, 1, old, old), size=(grid, grid), mode="bicubic", align_corners=False).flatten()
        for plane in position[0].T
    ]
    return torch.stack(planes, dim=1)[None]


@exercise("15-03.5", "The other way round", points=25, stand_in=lambda: _convert, stand_in_name="a loop of the check's")
def convert(trial: Trial, answer: Any) -> None:
    """`answer(state, target, classes)` makes a SplitViT's state dict of a compiled FusedViT's checkpoint."""
    cases: list[tuple[str, dict[str, int], dict[str, int], Sequence[int]]] = [
        ("grey", {"channels": 3, "classes": 12, "grid": 3}, {"channels": 1, "grid": 3}, (7, 0, 11, 7, 3)),
        ("11 blocks", {"channels": 3, "classes": 5, "grid": 2, "depth": 11}, {"channels": 1, "grid": 2}, range(5)),
        ("one block, wide", {"channels": 3, "classes": 9, "grid": 2, "depth": 1, "width": 12}, {"grid": 2}, [8]),
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
        before = copy.deepcopy(state)
        result = answer(state, target.state_dict(), classes)
        results.append((case, net, state, before, target, result, classes))
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
        (grey, results[:3], "which of the moves above is which, and in which order are the parts?"),
        (colour, results[3:5], "when is the stem folded?"),
    ):
        with trial.group(item, hint=hint, see=2):
            for case, net, _, _, target, result, classes in chosen:
                target.load_state_dict(result, strict=False)
                channels, side = target.patch.weight.shape[1], 4 * round(target.position.shape[1] ** 0.5)
                x = torch.randn(3, channels, side, side, dtype=torch.float64)
                with torch.no_grad():
                    want = net(x.expand(-1, net.patch.weight.shape[1], -1, -1))[:, list(classes)]
                    trial.close(f"logits, {case}", target(x), want, rtol=1e-7, atol=1e-7)
    with trial.group("positions are resized to the target's grid", hint="what is the grid of target?", see=2):
        for case, net, _, _, target, result, _ in results:
            want = _resized(net.position.detach(), round(target.position.shape[1] ** 0.5))
            trial.close(case, result["position"], want, rtol=1e-7, atol=1e-7)
    with trial.group("state and its tensors stay as they are", hint="what do you write into?"):
        for case, _, state, before, _, _, _ in results:
            trial.equal(f"keys, {case}", list(state), list(before))
            trial.equal(f"tensors, {case}", state, before)
    with trial.group("tensors keep the dtype of the checkpoint", hint="where does a dtype change?"):
        for dtype in (torch.float32, torch.bfloat16):
            _, state = _checkpoint(dtype, channels=3, classes=4, grid=2)
            result = answer(state, _Split(classes=2, grid=2).double().state_dict(), [0, 3])
            trial.equal(str(dtype), {key: value.dtype for key, value in result.items()}, dict.fromkeys(result, dtype))

    def refused(case: str, state: dict[str, Tensor], names: Sequence[str]) -> None:
        error = None
        try:
            answer(state, _Split(classes=2, grid=2).state_dict(), [0, 3])
        except Exception as caught:
            error = caught
        right = isinstance(error, ValueError) and any(name in str(error) for name in names)
        trial.that(case, right, expected=f"ValueError naming {names[0]!r}", got=repr(error)[:200])

    with trial.group("an unplanned key raises ValueError with its name", hint="which list of the report?", see=3):
        for key in ("_orig_mod.extra.bias", "_orig_mod.blocks.0.gate", "ema", "_orig_mod.head_bias"):
            _, state = _checkpoint(channels=3, classes=4, grid=2)
            refused(key, {**state, key: torch.zeros(2)}, [key.removeprefix("_orig_mod.")])
    with trial.group("a key that nothing fills raises ValueError with its name", hint="which list of it?", see=3):
        for key, names in (
            ("norm.bias", ["norm.bias"]),
            ("head.weight", ["head.weight"]),
            ("blocks.1.norm2.weight", ["blocks.1.ln2.weight"]),
            ("blocks.0.self_attn.in_proj_bias", [f"blocks.0.{part}.bias" for part in ("query", "key", "value")]),
        ):
            _, state = _checkpoint(channels=3, classes=4, grid=2)
            del state[f"_orig_mod.{key}"]
            refused(key, state, names)
