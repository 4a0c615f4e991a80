"""Checks of the exercises in 15-03, Advanced nn.Module Patterns."""

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from shared.checks.exercise import exercise
from shared.checks.trial import Trial
from shared.checks.words import Sample, derived, raises, samples, script, unchanged
from shared.device import pick_device

# ---- 15-03.1

_PLACES = ["nowhere", "__dict__", "a property", "_parameters", "_buffers", "_modules"]  # where a name may be
_GRID = {  # what is assigned: which demand that is for each place
    "a parameter": "take take - take take take",
    "a module": "take take - raise take take",
    "a tensor": "set set set raise stay raise",
    "None": "set set set none none none",
    "zero": "set set set raise raise raise",
    "del": "del del - del del del",
}
_DEMANDS = {  # what is demanded, where to look, and the folded hint
    "take": ("a parameter or a module takes the name over", "where else may the name still be?", 2),
    "stay": ("a tensor for a buffer's name stays a buffer, in its place", "which table has the name, and where?", 1),
    "none": ("None keeps a registered name in its table", "what may the table of the name hold?", 1),
    "raise": ("another value for a registered name raises TypeError and changes nothing", "who refuses, when?", 1),
    "set": ("other names and values go to MiniModule's __setattr__", "who sets what MiniModule doesn't file?", 1),
    "del": ("del removes the name from where it is", "in which places may a name be?", 1),
}


@exercise("15-03.1", "Registration that survives reassignment", points=15, demands=6)
def careful_module(trial: Trial, answer: Any) -> None:
    """`CarefulModule`, derived from MiniModule, files a name where nn.Module files it, and nowhere else."""
    mini_module = derived(trial, answer, "MiniModule")

    # a module to the answer and to nn.Module, whose name in an error is that of a class of the notebook
    Child = type("SomeModule", (mini_module, nn.Module), {"__module__": "__main__"})
    old = {"_parameters": nn.Parameter(torch.randn(2)), "_buffers": torch.randn(3), "_modules": Child()}
    new = {
        "a parameter": UninitializedParameter(),
        "a module": Child(),
        "a tensor": torch.randn(4),
        "None": None,
        "zero": 0,
    }
    texts = {id(value): text for text, value in new.items()}
    called = {"fc": "the name", "fc2": "another name"}

    def made(base, place, value):
        """A module that has the name fc in this place, and a property `rate` that stores its value as fc."""
        rate = property(None, lambda module, value: vars(module).update(fc=value))
        module = type("Made", (base,), {"rate": rate})()
        if hasattr(module, place):
            getattr(module, place).update(fc=value, fc2=value)  # fc2 shows whether fc keeps its place in the table
        return module

    def change(module, text, name):
        """Assign the value of this row of the grid, or delete the name."""
        if text == "del":
            delattr(module, name)
        else:
            setattr(module, name, new[text])

    def look(module):
        found = {}
        for place in ("__dict__", *old):
            entries = [(name, value) for name, value in getattr(module, place).items() if name in called]
            found[f"in {place}"] = [f"{called[name]}: {texts.get(id(value), 'old value')}" for name, value in entries]
        return found

    for text, demands in _GRID.items():
        for place, demand in zip(_PLACES, demands.split(), strict=True):
            if demand == "-":  # the task doesn't say
                continue
            name = "rate" if place == "a property" else "fc"
            event = partial(change, text=text, name=name)
            item, hint, see = _DEMANDS[demand]
            with trial.group(item, hint=hint, see=see):
                for value in (old.get(place, "text"), None):
                    pair = made(answer, place, value), made(nn.Module, place, value)
                    script(trial, *pair, [(f"{text} for a name in {place}", event)], look)


# ---- 15-03.2

_PREFIX = "_orig_mod."
_RENAMED = {"self_attn.out_proj": "out", "norm1": "ln1", "norm2": "ln2", "linear1": "up", "linear2": "down"}


def _checkpoint(channels=1, classes=4, grid=2, depth=2, dtype=torch.float64) -> dict[str, Tensor]:
    """A compiled FusedViT's, with random numbers."""
    net = nn.Module()
    net.patch = nn.Conv2d(channels, 8, 4)
    net.position = nn.Parameter(torch.empty(1, grid * grid, 8))
    net.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 4, 16) for _ in range(depth))
    net.norm = nn.LayerNorm(8)
    net.head = nn.Linear(8, classes)
    state = {_PREFIX + key: torch.randn(value.shape, dtype=dtype) for key, value in net.state_dict().items()}
    return {**state, f"{_PREFIX}steps": torch.tensor(1234)}


def _split(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors under the names of a SplitViT."""
    result: dict[str, Tensor] = {}
    for full, tensor in state.items():
        key = full.removeprefix(_PREFIX)
        if key == full:
            raise ValueError(f"{key} has no prefix")
        for old, new in _RENAMED.items():
            key = key.replace(f".{old}.", f".{new}.")
        block, found, end = key.partition(".self_attn.in_proj_")
        if found:
            for part, value in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                result[f"{block}.{part}.{end}"] = value
        elif key != "steps":
            result[key] = tensor
    return result


def _target(*args: int, **sizes: int) -> dict[str, Tensor]:
    """A SplitViT's."""
    return _split(_checkpoint(*args, **sizes, dtype=torch.float32))


def _convert(state: Mapping[str, Tensor], net_state: Mapping[str, Tensor], classes: Sequence[int]) -> dict[str, Tensor]:
    """The reference."""
    result = _split(state)
    if wrong := sorted(result.keys() ^ net_state.keys()):
        raise ValueError(f"left over or missing: {wrong}")
    for key in ("head.weight", "head.bias"):
        result[key] = result[key][list(classes)]
    if net_state["patch.weight"].shape[1] == 1:
        result["patch.weight"] = result["patch.weight"].sum(dim=1, keepdim=True)
    old, new = (round(tensor.shape[1] ** 0.5) for tensor in (result["position"], net_state["position"]))
    image = result["position"].mT.unflatten(2, (old, old))
    image = F.interpolate(image, size=(new, new), mode="bicubic", antialias=True)
    result["position"] = image.flatten(2).mT
    if wrong := [key for key in net_state if result[key].shape != net_state[key].shape]:
        raise ValueError(f"of another shape: {wrong}")
    return result


@exercise("15-03.2", "The other way round", points=25, demands=9, stand_in=lambda: _convert, stand_in_name="ours")
def convert(trial: Trial, answer: Any) -> None:
    """`convert(state, net_state, classes)` makes a SplitViT's state dict of a compiled FusedViT's checkpoint."""
    cases = [
        Sample("11 blocks, 12 classes", _checkpoint(3, 12, depth=11), _target(1, 5, depth=11), (7, 0, 11, 7, 3)),
        Sample("one block, four channels", _checkpoint(4, depth=1), _target(depth=1), [3, 1, 0, 2]),
        Sample("a finer grid", _checkpoint(grid=3), _target(classes=2, grid=5), [3, 0]),
        Sample("colour for colour, a coarser grid", _checkpoint(3, grid=5), _target(3, classes=1), [2]),
    ]
    same = partial(samples, trial, answer, _convert)
    with trial.group("has net_state's keys and shapes, and the checkpoint's dtype", hint="compare key by key", see=1):
        same(cases, look=lambda result, *_: {k: (*result[k].shape, result[k].dtype) for k in result})
    for names, demand, hint, see in (
        (("blocks", "norm", "patch.bias"), "blocks have new names; query, key, value are split", "which is which?", 1),
        (("head",), "the head has the chosen classes, in order", "which rows of which tensors?", 2),
        (("patch.weight",), "the stem is folded for one channel, or else stays", "what does a grey image give?", 2),
        (("position",), "positions are resized to net_state's grid", "what is that grid?", 2),
    ):
        with trial.group(demand, hint=hint, see=see):
            same(
                cases,
                look=lambda result, *_, names=names: {k: result[k].float() for k in result if k.startswith(names)},
            )
    with trial.group("state, net_state and their tensors stay as they are", hint="what do you write into?"):
        same(cases, look=lambda result, state, net_state, _: [sorted(result), state, net_state])

    def refused(state, *words, **sizes):
        raises(trial, words[0], partial(answer, state, _target(**{"classes": 2, **sizes}), [0, 3]), ValueError, *words)

    state = _checkpoint(3)
    with trial.group("a key that is left over raises ValueError with its name", hint="is it in report.left?", see=3):
        refused({**state, "_orig_mod.blocks.0.steps": torch.zeros(8)}, "blocks.0.steps")
        refused({**state, "norm.weight": torch.zeros(8)}, "norm.weight")
        refused(_checkpoint(3, depth=3), "blocks.2.")
    with trial.group("a key that nothing fills raises ValueError with its name", hint="who raises first?", see=3):
        for key, word in (("patch.bias", "patch.bias"), ("blocks.0.self_attn.in_proj_bias", "blocks.0.query.bias")):
            refused({name: state[name] for name in state if name != _PREFIX + key}, word)
    with trial.group("a tensor of another shape raises ValueError with its name", hint="who compares?", see=3):
        refused(state, "patch.weight", channels=4)
        refused(state, "head.weight", "head.bias", classes=3)


# ---- 15-03.3


class _Nested(nn.Module):
    """A leaf whose output is nested."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"a": x[:, :1], "b": [x, (x[0, 0], 3, None)]}


class _Net(nn.Module):
    """Shared, tied, frozen, empty and unused layers; raises `error` in the end, if there is one."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error
        self.calls: list[str] = []
        self.frozen = nn.Linear(4, 6).requires_grad_(False)
        self.box = nn.ModuleDict({"drop": nn.Dropout(), "same": nn.Linear(6, 6)}).eval()
        self.same = self.box["same"]
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.same.weight
        self.norm = nn.BatchNorm1d(6).eval()
        self.last = nn.Sequential(nn.Sequential(), _Nested())
        self.late = nn.ModuleList([self.same, nn.Linear(9, 9)])

    def forward(self, x: Tensor, extra: Tensor, *, twice: bool = False) -> Tensor:
        x = self.same(self.box["drop"](self.frozen(x))) + extra
        if twice:
            x = self.same(x)
        x = self.norm(self.tied(x))
        self.last(x)
        trains = any(module.training for module in self.modules())
        self.calls.append(f"{'training' if trains else 'evaluation'}, {'a graph' if x.requires_grad else 'no graph'}")
        if self.error:
            raise self.error
        return x


class _Slow(nn.Module):
    """A leaf that, on an accelerator, returns before its work is done."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            time.sleep(0.02)
        else:
            for _ in range(60):
                x = torch.mm(x, x)
        return x


def _shapes(output: Any) -> list[tuple[int, ...]]:
    if isinstance(output, Tensor):
        return [tuple(output.shape)]
    if isinstance(output, dict):
        return _shapes(list(output.values()))
    if isinstance(output, list | tuple):
        return [shape for entry in output for shape in _shapes(entry)]
    return []


def _summary(model: nn.Module, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """The reference: one dictionary for each call of a leaf."""
    rows: list[dict[str, Any]] = []
    seen: set[Tensor] = set()
    started: dict[nn.Module, float] = {}

    def now():
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter()

    def before(module, inputs):
        started[module] = now()

    def after(module, inputs, output):
        row = {"name": leaves[module], "kind": type(module).__name__, "seconds": now() - started[module], "flops": 0}
        new = [p for p in module.parameters() if p not in seen]
        seen.update(new)
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            row["flops"] = 2 * output.numel() * module.weight[0].numel()
        rows.append({**row, "shapes": _shapes(output), "parameters": sum(p.numel() for p in new)})

    leaves = {module: name for name, module in model.named_modules() if not list(module.children())}
    modes = {module: module.training for module in model.modules()}
    handles = [module.register_forward_pre_hook(before) for module in leaves]
    handles += [module.register_forward_hook(after) for module in leaves]
    try:
        with torch.no_grad():
            model.eval()(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return rows


def _needs_rows(trial: Trial, got: Any, *keys: str) -> None:
    fine = isinstance(got, list) and got and all(isinstance(entry, dict) and {*keys} <= {*entry} for entry in got)
    item = f"gives a list of dictionaries with {', '.join(keys)}"
    trial.needs(item, bool(fine), expected="such a list", got=repr(got)[:200], hint="by which names?")


@exercise("15-03.3", "A summary from hooks", points=20, demands=8, stand_in=lambda: _summary, stand_in_name="ours")
def summarize(trial: Trial, answer: Any) -> None:
    """`summarize(model, *args, **kwargs)` runs the model once and gives a dictionary for each call of a leaf."""
    x = torch.randn(6, 4)
    extra = torch.randn(6, 6)
    net = _Net()
    _needs_rows(trial, answer(net, x, extra), "name", "kind", "shapes", "parameters", "flops", "seconds")
    trial.equal("runs the model itself, once", len(net.calls), 1, hint="how often, and is it a copy?")
    item = "runs in evaluation mode and records no graph"
    trial.equal(item, {*net.calls}, {"evaluation, no graph"}, hint="which modules still train?", see=4)
    shared = Sample("a shared layer called twice", _Net(), x, extra=extra, twice=True)
    leaf = Sample("a model that is a leaf", nn.Conv2d(4, 6, (3, 2), groups=2), torch.randn(3, 4, 5, 4))
    for keys, demand, hint, see in (
        (("name", "kind"), "one row for each call of a leaf, in order, with first name and kind", "who has hooks?", 1),
        (("shapes",), "shapes are those of all tensors in the output", "what may be inside of an output?", 2),
        (("parameters",), "parameters are counted once", "which were counted by a row above?", 3),
        (("flops",), "flops are those of flops_of", "what is given to flops_of?", None),
    ):
        part = itemgetter(*keys)
        with trial.group(demand, hint=hint, see=see):
            samples(trial, answer, _summary, [shared, leaf], look=lambda rows, *_, part=part: list(map(part, rows)))

    with trial.group("seconds are those of the call", hint="when does the clock start and stop?", see=1):
        slow = nn.Sequential(_Slow(), nn.Sequential(_Slow()), _Slow())
        work = torch.eye(2048, device=pick_device())
        # Half of what the reference takes: less would mean that the clock stopped before the work was done.
        least = min(row["seconds"] for row in _summary(slow, work)) / 2
        start = time.perf_counter()
        took = [row["seconds"] for row in answer(slow, work)]
        total = time.perf_counter() - start
        right = min(took) >= least and sum(took) <= total
        trial.that("three calls", right, expected=f"at least {least:.3f} each, at most {total:.3f} in all", got=took)

    for error, enabled in itertools.product((None, RuntimeError("too large"), KeyboardInterrupt()), (True, False)):
        net = _Net(error)
        net.frozen.register_forward_hook(lambda *_: None)
        case = f"a model that raises {error!r}, grad mode {enabled}"
        item = "modes, hooks and autograd are as before, and an exception goes through"
        with (
            trial.group(item, hint="remember what, undo what?", see=4),
            unchanged(trial, case, net),
            torch.set_grad_enabled(enabled),
        ):
            raised = None
            try:
                answer(net, x, extra)
            except (Exception, KeyboardInterrupt) as caught:
                raised = caught
            trial.that(case, raised is error, expected=repr(error), got=f"{raised!r}, another object")
            trial.equal(f"autograd after {case}", torch.is_grad_enabled(), enabled)


# ---- 15-03.4

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


class _Tall(nn.Module):
    """Blocks 1, 3 and 10; shared and tied parameters, norms of two dimensions, a parameter of none."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.embed = nn.Embedding(5, 2)
        self.stem = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2))
        self.blocks = nn.ModuleDict(
            {name: nn.ModuleDict({"fc": nn.Linear(2, 2), "norm": nn.LayerNorm((3, 2))}) for name in ("1", "3", "10")}
        )
        self.blocks["3"]["fc"] = self.blocks["1"]["fc"]
        self.norms = nn.Sequential(type("Own", (nn.LayerNorm,), {})((2, 2)), nn.RMSNorm((3, 2)))
        self.head = nn.Linear(2, 5)
        self.head.weight = self.embed.weight


def _groups(model, lr, weight_decay=0.0, layers=(), layer_decay=1.0) -> list[dict[str, Any]]:
    """The reference."""
    modules = dict(model.named_modules())
    rates = {layer: lr * layer_decay**steps for steps, layer in enumerate(reversed(layers))}
    if unknown := rates.keys() - modules.keys():
        raise ValueError(f"no submodules: {unknown}")
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            path = name.rpartition(".")[0]
            plain = p.dim() < 2 or isinstance(modules[path], _NORMS)
            while path and path not in rates:  # from the parameter's module outwards
                path = path.rpartition(".")[0]
            rate = rates.get(path, rates[layers[0]] if layers else lr)
            groups.setdefault((rate, 0.0 if plain else weight_decay), []).append(p)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]


def _holders(key: str, groups: list[dict[str, Any]], model: nn.Module, *_: Any) -> dict[str, list[Any]]:
    """For each parameter, what the groups that hold it have under the key."""
    found = {}
    for name, p in model.named_parameters():
        text = f"groups of {name}" if p.requires_grad else f"groups of {name}, which is frozen"
        found[text] = [group[key] for group in groups for one in group["params"] if one is p]
    return found


@exercise("15-03.4", "Parameter groups", points=20, demands=5, stand_in=lambda: _groups, stand_in_name="ours")
def param_groups(trial: Trial, answer: Any) -> None:
    """`param_groups(model, lr, weight_decay, layers, layer_decay)` gives groups for an optimizer."""
    _needs_rows(trial, answer(nn.Linear(3, 2), 0.1), "params", "lr", "weight_decay")
    plain = [
        Sample("no decay given", _Tall(), 0.1),
        Sample("no layers, but a layer_decay", _Tall(), 0.1, 0.05, (), 0.5),
    ]
    names = [name for name, _ in _Tall().named_modules() if name]  # each under its first name, without the root
    layered = [
        Sample(f"layers {layers}", _Tall(), 1e-5, 0.05, layers, *random.choice(((), (0.5,))))
        for layers in (random.sample(names, count) for count in (1, 2, 3, 4, 5, 6, 7) * 3)
    ]
    half = nn.Sequential(nn.Linear(2, 2, bias=False).requires_grad_(False), nn.Linear(2, 2, bias=False))
    frozen = Sample("a frozen layer", half, 0.1, 0.05)
    same = partial(samples, trial, answer, _groups, rtol=1e-9, atol=0.0)
    item = "each parameter that learns is in one group, no frozen one in any"
    with trial.group(item, hint="under how many names do you come by it?"):
        same([*plain, frozen], look=lambda *given: {k: len(found) for k, found in _holders("lr", *given).items()})
    with trial.group("rates are those of the layers", hint="which layer holds it, how far from the last?", see=1):
        same([*plain, *layered], look=partial(_holders, "lr"))
    with trial.group("no decay for norms and below two dimensions", hint="who is spared, and by what?", see=1):
        same(plain, look=partial(_holders, "weight_decay"))
    with trial.group("no group is empty, no two have the same rate and decay", hint="what makes a group?", see=2):
        same(
            [frozen, *plain, *layered],
            look=lambda groups, *_: {"groups": len(groups), "empty": [group["params"] for group in groups].count([])},
        )
    with trial.group("an unknown layer raises ValueError with its name", hint="when would nobody notice?"):
        for layer in ("bloc", "head.weight"):
            asked = ["stem", layer, "head"]
            raises(trial, f"layers {asked}", partial(answer, _Tall(), 0.1, 0.05, asked, 0.5), ValueError, layer)


# ---- 15-03.5

_NAMES = ("direction", "length", "bias")


class NormLinear(nn.Module):
    """As in the lesson."""

    def forward(self, x: Tensor) -> Tensor:
        return self.length * F.linear(x, F.normalize(self.direction, dim=1)) + self.bias


class _Lazy(nn.modules.lazy.LazyModuleMixin, NormLinear):
    """The reference."""

    cls_to_become = NormLinear

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        for name in _NAMES:
            self.register_parameter(name, UninitializedParameter())

    @classmethod
    def of(cls, linear: nn.Linear) -> "_Lazy":
        made = cls(linear.out_features).to(linear.weight)
        made.load_state_dict({"direction": linear.weight}, strict=False)
        return made

    @torch.no_grad()
    def initialize_parameters(self, x: Tensor) -> None:
        def start(parameter, value):
            if isinstance(parameter, UninitializedParameter):
                parameter.materialize(value.shape, device=x.device, dtype=x.dtype)
                parameter.copy_(value)

        start(self.direction, 0.05 * torch.randn(self.outputs, x.shape[-1]))
        y = F.linear(x, F.normalize(self.direction, dim=1)).flatten(0, -2)
        deviation = y.std(dim=0, correction=0)
        # The task names this threshold; one row, or a dead input, has deviation 0.
        start(self.length, torch.where(deviation < 1e-4, 1.0, 1 / deviation))
        start(self.bias, -self.length * y.mean(dim=0))


def _start(kind, x, linear=None, **loaded) -> dict[str, Any]:
    """What there is after the first forward of a layer."""
    layer = kind.of(linear) if linear else kind(3)
    if loaded:
        layer.to(x).load_state_dict(loaded, strict=False)
    before = [getattr(layer, name) for name in _NAMES]
    layer(x)
    found = {name: getattr(layer, name) for name in _NAMES}
    form = [(old is new, new.dtype) for old, new in zip(before, found.values(), strict=True)]
    return {**found, "form": [type(layer).__name__, *form]}


@exercise(
    "15-03.5",
    "A layer that starts from its first batch",
    points=20,
    demands=7,
    stand_in=lambda: _Lazy,
    stand_in_name="ours",
)
def lazy_norm_linear(trial: Trial, answer: Any) -> None:
    """`LazyNormLinear(outputs)` is a lazy NormLinear that starts from its first batch."""
    kinds = {name: type(p).__name__ for name, p in answer(3).named_parameters()}
    lazy = dict.fromkeys(_NAMES, "UninitializedParameter")
    trial.equal("its three parameters wait for the first forward", kinds, lazy, hint="what takes the place of each?")

    def same(cases, *names):
        pair = partial(_start, answer), partial(_start, _Lazy)
        samples(trial, *pair, cases, look=lambda found, x: [found[name] for name in names], rtol=2e-3, atol=5e-3)

    rows = 3 * torch.randn(40, 3) + 1
    inputs = {
        "40 rows": rows,
        "a permuted view": torch.randn(3, 8, 6).permute(2, 1, 0),
        "rows far from 0": rows + 9000,
        "one row": rows[:1],
        "deviations of 0.9e-4, 1.1e-4, 40": torch.tensor([[1.0], [-1.0]]) @ torch.tensor([[0.9e-4, 1.1e-4, 40.0]]),
    }
    axes = 2 * torch.eye(3)
    aligned = [Sample(case, x, direction=axes) for case, x in inputs.items()]
    length = Sample("a loaded length", rows, direction=axes, length=rows[0])
    bias = Sample("a loaded bias", rows, direction=axes, bias=rows[1])
    everything = Sample("all three loaded", rows, direction=axes, length=rows[0], bias=rows[1])
    fresh = [Sample("float64", rows[:5].double()), Sample("no matrix", torch.randn(2, 5, 4, device=pick_device()))]
    with trial.group("becomes a NormLinear of the input's dtype, in place", hint="what does an optimizer hold?", see=3):
        same(fresh, "form")
    with trial.group("direction is drawn with deviation 0.05", hint="how large are its numbers?"):
        drawn = _start(answer, torch.randn(3, 13_000))["direction"].detach()
        found = torch.stack([drawn.mean(), drawn.std()])
        trial.close("mean and deviation", found, torch.tensor([0.0, 0.05]), rtol=0.0, atol=0.0015)
    with trial.group("what was loaded is kept", hint="who is asked, and when?", see=1):
        same([length], "direction", "length")
        same([bias], "direction", "bias")
        same([everything], *_NAMES)
    hint = "over which dimensions, divided by what, and in which order?"
    with trial.group("length gives each output deviation 1 over the first batch", hint=hint, see=2):
        same([*aligned, bias], "length")
    with trial.group("bias gives each output mean 0 over the first batch", hint=hint, see=2):
        same([*aligned, length], "bias")
    with trial.group("of(linear) has a copy of its weight as the direction", hint="what is copied?"):
        linear = nn.Linear(3, 2).double()
        same([Sample("float64", rows.double(), linear=linear)], *_NAMES)
        with unchanged(trial, "its weight when direction changes", linear), torch.no_grad():
            answer.of(linear).direction.zero_()
