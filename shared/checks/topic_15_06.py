"""Checks of the exercises in 15-06, torch.fx & Graph Transformations."""
# ruff: noqa: E501 (tables of cases, a case a line)

import copy
import io
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.optimization import fuse
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

from shared.checks.exercise import exercise
from shared.checks.trial import Trial


def _graph_module(trial: Trial, result: Any) -> None:
    """Hold that an answer gave a GraphModule whose graph is sound."""
    item, module = (
        "returns a GraphModule with a sound graph, and the code of that graph",
        isinstance(result, fx.GraphModule),
    )
    got, hint = f"a {type(result).__name__}", "what does the function return?"
    if module:
        got, hint = _lint(result), "which node does lint name: what of its place, its name, its arguments?"
    trial.needs(item, module and not got, expected="a GraphModule whose graph passes lint", got=got, hint=hint)
    if module:
        trial.needs(
            item,
            result.graph.python_code("self").src == result.code,
            expected="code that was made from the graph as it is",
            got="code of another graph",
            hint="what has to follow the last edit?",
        )


def _lint(gm: fx.GraphModule) -> str:
    try:
        gm.graph.lint()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return ""


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op in ("call_function", "call_method", "call_module")]


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


_WHOLE = "the model"


def _shape_of(model: nn.Module) -> dict[str, str]:
    """What a model consists of: of each module the class, mode and number of hooks, of each parameter if it learns."""
    found = {}
    for path, module in model.named_modules():
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        found[path or _WHOLE] = f"{type(module).__name__}, training={module.training}, {hooks} hooks"
    return found | {name: f"requires_grad={p.requires_grad}" for name, p in model.named_parameters()}


def _shapes_of_same(result: fx.GraphModule, model: nn.Module) -> list[dict[str, str]]:
    """The same of a result and of its model, as to called modules and parameters whose names both have."""
    made, given = _shape_of(result), _shape_of(model)
    uncalled = {path or _WHOLE for path, _ in result.named_modules()} - {n.target for n in _calls(result.graph)}
    return [{name: one[name] for name in made if name in given and name not in uncalled} for one in (made, given)]


def _hold_shape(trial: Trial, item: str, got: dict[str, str], want: dict[str, str], hint: str) -> None:
    """Hold that two such shapes are the same; what one has and the other hasn't is named. Doing nothing meets it."""
    lists = {"more": [name for name in got if name not in want], "gone": [name for name in want if name not in got]}
    if shown := "; ".join(f"{kind}: {', '.join(names)}" for kind, names in lists.items() if names):
        trial.that(item, False, expected="the modules and parameters from before", got=shown, hint=hint, free=True)
    trial.equal(item, got, want, hint=hint, free=True)


class _Forward(nn.Module):
    """A model of named parts with a forward given as a function of (self, *inputs)."""

    def __init__(self, forward: Callable, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


# ---------------------------------------------------------------- 15-06.1


def _steep(x: Tensor) -> Tensor:
    return x * 3 - 1


def _bent(x: Tensor) -> Tensor:
    return (x + 0.5).abs()


class _OwnReLU(nn.ReLU):
    """A user's class: traced into, so that its F.relu is what a graph shows."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) * 2


def _relu_cases() -> list[tuple[str, Callable[[], nn.Module], Callable, int, int]]:
    """Label, model, what it computes with act in place of each ReLU, number of ReLUs, other calls."""
    return [
        ("nn.ReLU", lambda: _Forward(lambda m, x: m.act(x) * 2, act=nn.ReLU()), lambda act, x: act(x) * 2, 1, 1),
        (
            "one nn.ReLU called twice, another in a Sequential",
            lambda: _Forward(
                lambda m, x: m.act(m.rest(m.act(x))), act=nn.ReLU(), rest=nn.Sequential(nn.Tanh(), nn.ReLU())
            ),
            lambda act, x: act(act(torch.tanh(act(x)))),
            3,
            1,
        ),
        ("F.relu", lambda: _Forward(lambda m, x: F.relu(x) + x), lambda act, x: act(x) + x, 1, 1),
        ("a call that nobody uses", lambda: _Forward(lambda m, x: (x * 3, F.relu(x))[1]), lambda act, x: act(x), 1, 1),
        ("torch.relu", lambda: _Forward(lambda m, x: torch.relu(x) + x), lambda act, x: act(x) + x, 1, 1),
        ("the method relu", lambda: _Forward(lambda m, x: (x - 1).relu().exp()), lambda act, x: act(x - 1).exp(), 1, 2),
        ("F.relu(input=x)", lambda: _Forward(lambda m, x: F.relu(input=x)), lambda act, x: act(x), 1, 0),
        ("torch.relu(input=x)", lambda: _Forward(lambda m, x: torch.relu(input=x)), lambda act, x: act(x), 1, 0),
        (
            "nn.ReLU called with the keyword input",
            lambda: _Forward(lambda m, x: m.act(input=x), act=nn.ReLU()),
            lambda act, x: act(x),
            1,
            0,
        ),
        (
            "F.relu(x, inplace=True)",
            lambda: _Forward(lambda m, x: F.relu(x * 2, inplace=True)),
            lambda act, x: act(x * 2),
            1,
            1,
        ),
        (
            "nn.ReLU(inplace=True)",
            lambda: _Forward(lambda m, x: m.act(x * 2), act=nn.ReLU(inplace=True)),
            lambda act, x: act(x * 2),
            1,
            1,
        ),
        (
            "a subclass of nn.ReLU that computes something else",
            lambda: _Forward(lambda m, x: m.act(x), act=_OwnReLU()),
            lambda act, x: act(x) * 2,
            1,
            1,
        ),
        (
            "two results, one a ReLU used twice",
            lambda: _Forward(lambda m, x: (y := F.relu(x), y * y)),
            lambda act, x: (act(x), act(x) * act(x)),
            1,
            1,
        ),
    ]


@exercise(
    "15-06.1",
    "Replace one operation, however it is written",
    points=10,
    demands=6,
    stand_in=lambda: _replace_relu,
    stand_in_name="a replace_relu that knows modules and F.relu",
)
def replace_relu(trial: Trial, answer: Any) -> None:
    """`answer(model, new)` gives a GraphModule with `new` in place of each ReLU."""
    x = torch.randn(3, 5)
    for label, make, want, relus, others in _relu_cases():
        for new in (_steep, _bent):
            model = make()
            before = _shape_of(model)
            hint = f"run it on such a model: {label}"
            result = trial.call("takes any traceable model", lambda m=model, n=new: answer(m, n), hint=hint)
            _graph_module(trial, result)
            item = "computes what the model does with new in place of each ReLU"
            with (
                trial.group(item, hint="print the result's code: what becomes of this ReLU?", see=1),
                redirect_stderr(io.StringIO()),  # fx writes the code that raised
            ):
                trial.equal(label, result(x.clone()), want(new, x))
            found = [n for n in result.graph.nodes if n.op == "call_function" and n.target is new]
            with trial.group(
                "each ReLU is a call of new, the input its only argument", hint="read the node's arguments"
            ):
                hint = "print the graph: which calls of new does it have?"
                trial.equal(f"number of calls, {label}", len(found), relus, hint=hint)
                odd = [n for n in found if len(n.args) != 1 or n.kwargs]
                shown = "".join(f"args {n.args}, kwargs {n.kwargs}" for n in odd[:1])
                trial.that(label, not odd, expected="one in args, none in kwargs", got=shown)
            rest = len(_calls(result.graph)) - len(found)
            trial.that(
                "all other calls stay",
                rest == others,
                expected=f"calls besides those of new: {others}",
                got=f"calls besides those of new: {rest}",
                hint=f"print the graph of such a model, before and after: {label}",
            )
            with trial.group(
                "model stays as it is", hint="what of the model's modules and parameters is changed?", free=True
            ):
                _hold_shape(trial, label, _shape_of(model), before, "")
                trial.equal(label, model(x.clone()), want(torch.relu, x))
            left = [path for path, module in result.named_modules() if type(module) is nn.ReLU]
            trial.equal("the result holds no nn.ReLU", left, [], see=2)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.BatchNorm1d(4).eval(), nn.Dropout(0.5))
    model[0].bias.requires_grad_(False)
    before, result = _shape_of(model), answer(model, _bent)
    with trial.group("model stays as it is", hint="whose modes and parameters are switched?", free=True):
        _hold_shape(trial, "modes, hooks, parameters that learn", _shape_of(model), before, "")
    got, want = _shapes_of_same(result, model)
    trial.equal("all other calls stay", got, want, hint="in which mode is each module, and which parameters learn?")
    model = _Forward(
        lambda m, x: (m.six(x), m.leaky(x), F.leaky_relu(x), F.relu6(x), m.own(x), m.relu(x), x.prelu(m.slope)),
        six=nn.ReLU6(),
        leaky=nn.LeakyReLU(0.5),
        own=nn.Sequential(nn.PReLU(), nn.CELU()),
        relu=nn.GELU(),
        slope=torch.tensor([0.5]),
    )
    names = (
        "nn.ReLU6",
        "nn.LeakyReLU",
        "F.leaky_relu",
        "F.relu6",
        "nn.PReLU and nn.CELU",
        "an nn.GELU named relu",
        "the method prelu",
    )
    result = answer(model, _steep)
    with trial.group("other activations stay", hint="which classes and names does your test accept?", see=1):
        for name, got, wanted in zip(names, result(x), model(x), strict=True):
            trial.equal(name, got, wanted)


def _replace_relu(model: nn.Module, new: Callable) -> fx.GraphModule:
    """The stand-in: what the lesson needs."""
    gm = fx.symbolic_trace(model)
    for node in list(gm.graph.nodes):
        if node.target is F.relu or (node.op == "call_module" and isinstance(gm.get_submodule(node.target), nn.ReLU)):
            node.op, node.target, node.args, node.kwargs = "call_function", new, node.args[:1], {}
    gm.recompile()
    return gm


# ---------------------------------------------------------------- 15-06.2

_GRAD_MODES: list[bool] = []


@fx.wrap
def _spy(x: Tensor) -> Tensor:
    _GRAD_MODES.append(torch.is_grad_enabled())
    return x * 1


class _Brute(fx.Interpreter):
    """FlopCounterMode around each node on its own."""

    def run(self, *inputs: Any) -> dict[str, int]:
        self.counts: dict[str, int] = {}
        super().run(*inputs)
        return self.counts

    def run_node(self, node: fx.Node) -> Any:
        with FlopCounterMode(display=False) as counter:
            value = super().run_node(node)
        self.counts[node.name] = counter.get_total_flops()
        return value


def _flop_cases() -> list[tuple[str, str, nn.Module, tuple[int, ...]]]:
    def conv(kind: type, inputs: int, outputs: int, size: int, **options: Any) -> nn.Module:
        return kind(inputs, outputs, size, **options)

    linear, convs, products = "linear layers and convolutions", "strides, groups and dilation", "matrix products"
    weight, kernel = torch.randn(7, 5), torch.randn(6, 3, 2, 3)
    return [
        (linear, "nn.Linear", _Forward(lambda m, x: m.fc(x).relu(), fc=nn.Linear(5, 7)), (3, 5)),
        (linear, "nn.Linear on (2, 3, 4, 5), no bias", _Forward(lambda m, x: m.fc(x), fc=nn.Linear(5, 7, bias=False)), (2, 3, 4, 5)),
        (linear, "nn.Linear called with the keyword input", _Forward(lambda m, x: m.fc(input=x), fc=nn.Linear(5, 7)), (3, 5)),
        (linear, "F.linear with a bias", _Forward(lambda m, x: F.linear(x, m.w, m.b), w=weight, b=torch.randn(7)), (4, 5)),
        (linear, "F.linear with the keyword bias", _Forward(lambda m, x: F.linear(x, m.w, bias=m.b), w=weight, b=torch.randn(7)), (4, 5)),
        (linear, "F.conv2d with a bias", _Forward(lambda m, x: F.conv2d(x, m.k, m.b), k=kernel, b=torch.randn(6)), (2, 3, 5, 6)),
        (linear, "nn.Conv2d on an image without a batch dimension", _Forward(lambda m, x: m.c(x), c=nn.Conv2d(3, 4, 2)), (3, 6, 7)),
        (linear, "nn.Linear with one output", _Forward(lambda m, x: m.fc(x), fc=nn.Linear(5, 1)), (3, 5)),
        (linear, "F.linear with one output", _Forward(lambda m, x: F.linear(x, m.w), w=torch.randn(1, 5)), (3, 5)),
        (linear, "F.linear", _Forward(lambda m, x: F.linear(x, m.w) + 1, w=weight), (4, 5)),
        (linear, "F.linear(x, weight=w)", _Forward(lambda m, x: F.linear(x, weight=m.w), w=weight), (4, 5)),
        (linear, "nn.Conv1d", _Forward(lambda m, x: m.c(x), c=nn.Conv1d(3, 4, 5)), (2, 3, 11)),
        (linear, "nn.Conv2d", _Forward(lambda m, x: m.c(x).exp(), c=nn.Conv2d(3, 4, (3, 2))), (2, 3, 6, 7)),
        (linear, "nn.Conv3d", _Forward(lambda m, x: m.c(x), c=nn.Conv3d(2, 3, 2, padding=1)), (1, 2, 3, 4, 5)),
        (linear, "F.conv2d", _Forward(lambda m, x: F.conv2d(x, m.k, padding=1), k=kernel), (2, 3, 5, 6)),
        (linear, "F.conv1d with keywords", _Forward(lambda m, x: F.conv1d(input=x, weight=m.k), k=torch.randn(4, 3, 2)), (2, 3, 5)),
        (linear, "F.conv3d", _Forward(lambda m, x: F.conv3d(x, m.k), k=torch.randn(4, 2, 1, 2, 2)), (1, 2, 3, 4, 5)),
        (convs, "groups", _Forward(lambda m, x: m.c(x), c=nn.Conv2d(6, 4, 3, groups=2, bias=False)), (2, 6, 7, 5)),
        (convs, "depthwise, stride 2", _Forward(lambda m, x: m.c(x), c=nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6, bias=False)), (3, 6, 7, 5)),
        (convs, "dilation", _Forward(lambda m, x: m.c(x), c=nn.Conv1d(4, 6, 3, dilation=2, bias=False)), (1, 4, 12)),
        (convs, "F.conv2d, groups 3, stride", _Forward(lambda m, x: F.conv2d(x, m.k, None, (2, 1), 1, 1, 3), k=torch.randn(6, 1, 3, 3)), (2, 3, 6, 7)),
        (products, "x @ w", _Forward(lambda m, x: (x @ m.w).tanh(), w=torch.randn(5, 7)), (4, 5)),
        (products, "w @ x, batched", _Forward(lambda m, x: m.w @ x, w=weight), (2, 3, 5, 4)),
        (products, "torch.matmul of (2, 1, 3, 5) and (4, 5, 6)", _Forward(lambda m, x: torch.matmul(x, m.w), w=torch.randn(4, 5, 6)), (2, 1, 3, 5)),
        (products, "torch.matmul with keywords", _Forward(lambda m, x: torch.matmul(input=x, other=m.w), w=torch.randn(5, 7)), (4, 5)),
        (products, "torch.bmm", _Forward(lambda m, x: torch.bmm(x, x.transpose(1, 2)), w=weight), (3, 2, 7)),
        (products, "the method matmul", _Forward(lambda m, x: x.matmul(m.w), w=torch.randn(5, 2)), (3, 4, 5)),
        (products, "torch.bmm with keywords", _Forward(lambda m, x: torch.bmm(input=x, mat2=m.w), w=torch.randn(3, 7, 4)), (3, 2, 7)),
    ]  # fmt: skip


def _counted(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


@exercise(
    "15-06.2",
    "Count the operations",
    points=15,
    demands=10,
    stand_in=lambda: _count_flops,
    stand_in_name="FlopCounterMode around each node",
)
def count_flops(trial: Trial, answer: Any) -> None:
    """`answer(model, *inputs)` gives node name → operations."""
    for item, label, model, shape in _flop_cases():
        x = torch.randn(shape)
        traced = fx.symbolic_trace(model)
        want = _Brute(traced).run(x)
        got = trial.call(
            "takes the arguments as they are given",
            lambda model=model, x=x: answer(model, x),
            hint=f"run it on such a model: {label}; where may a node's arguments stand?",
        )
        with trial.group("all nodes are in it, in order", hint="which nodes does run_node see?"):
            trial.that(
                f"the result, {label}",
                isinstance(got, dict),
                expected="a dictionary",
                got=f"a {type(got).__name__}",
                hint="what does the task say is returned?",
            )
            trial.equal(label, list(got), list(want))
        with trial.group(item, hint="what is counted, how often, and as which type?", see=1):
            trial.equal(label, _counted(got), _counted(want))
    fc, conv = nn.Linear(6, 6, bias=False), nn.Conv1d(2, 2, 3, padding=1, bias=False)
    model = _Forward(lambda m, x: m.fc(m.conv(m.fc(x)[..., :4])[..., :3].repeat(1, 1, 2)) + m.conv(x), fc=fc, conv=conv)
    x = torch.randn(3, 2, 6)
    with trial.group("a layer that is called twice counts at each call", hint="what is the key of your dictionary?"):
        want = _Brute(fx.symbolic_trace(model)).run(x)
        trial.equal("one Linear and one Conv1d, two calls each", _counted(answer(model, x)), _counted(want))
    model = _Forward(lambda m, x: F.gelu(m.norm(x)).sum() + m.act(x).mean(), norm=nn.LayerNorm(6), act=nn.SELU())
    with trial.group(
        "nodes that aren't named count 0", hint="which modules, functions and methods does the task name?"
    ):
        trial.equal("layer norm, GELU, sums", _counted(answer(model, x)), {})
        model = _Forward(
            lambda m, x: (m.t(x), F.conv_transpose1d(x, m.w), F.conv_transpose2d(x, m.u), torch.mm(x[0], m.v), torch.addmm(m.v[:2], x[0], m.v)),
            t=nn.ConvTranspose1d(2, 3, 2), w=torch.randn(2, 3, 2), u=torch.randn(3, 1, 2, 2), v=torch.randn(6, 1),
        )  # fmt: skip
        trial.equal("transposed convolutions, torch.mm, torch.addmm", _counted(answer(model, x)), {})
        model = _Forward(lambda m, x: (x.shape[0], x.chunk(2), m.matmul(x)), matmul=nn.Tanh())
        trial.equal("sizes, tuples, a module of that name", _counted(answer(model, x)), {})
    model = _Forward(
        lambda m, x: m.fc(m.act(m.drop(x))), fc=nn.Linear(6, 1), act=nn.SELU().eval(), drop=nn.Dropout(0.0)
    )
    before = _shape_of(model)
    answer(model, x)
    hint = "what of the model's modules and parameters is switched?"
    _hold_shape(trial, "model stays as it is", _shape_of(model), before, hint)
    traced = fx.symbolic_trace(_Forward(lambda m, x: (x @ m.w).relu() @ m.w, w=torch.randn(6, 6)))
    first = next(n for n in traced.graph.nodes if n.target is operator.matmul)
    first.replace_all_uses_with(first.args[0])
    traced.graph.erase_node(first)
    traced.recompile()
    with trial.group("a GraphModule may be given", hint="are the names those of the graph that was given?"):
        trial.equal("one whose graph was edited", _counted(answer(traced, x)), _counted(_Brute(traced).run(x)))
    model = _Forward(lambda m, x: _spy(x) + 1)
    _GRAD_MODES.clear()
    answer(model, x.clone().requires_grad_())
    modes = list(_GRAD_MODES)
    trial.equal("the model runs once", len(modes), 1, hint="how often is it called?")
    item = "no gradients are recorded, and recording is as it was afterwards"
    with trial.group(item, hint="who switches recording off, and on again?", free=True):
        trial.that("while it runs", not any(modes), expected="recording is off", got="recording is on")
        trial.that("afterwards", torch.is_grad_enabled(), expected="recording is on", got="recording is off")


def _count_flops(model: nn.Module, *inputs: Any) -> dict[str, int]:
    gm = model if isinstance(model, fx.GraphModule) else fx.symbolic_trace(model)
    with torch.no_grad():
        return _Brute(gm).run(*inputs)


# ---------------------------------------------------------------- 15-06.3


def _fingerprint(gm: fx.GraphModule) -> str:
    return f"{gm.graph}\n{gm.code}"


def _structure(node: Any) -> str:
    """A node's whole expression as text: nodes are the same expression if their texts are."""
    if isinstance(node, fx.Node):
        if node.op in ("placeholder", "output"):
            return f"<{node.name}>"
        kwargs = ", ".join(f"{key}={_structure(node.kwargs[key])}" for key in sorted(node.kwargs))
        return f"{node.op}:{node.target}({', '.join(map(_structure, node.args))}; {kwargs})"
    if isinstance(node, tuple | list):
        return f"{type(node).__name__}[{', '.join(map(_structure, node))}]"
    if isinstance(node, slice):
        return f"slice({_structure(node.start)}, {_structure(node.stop)}, {_structure(node.step)})"
    return f"{type(node).__name__} {node!r}"


def _random_graph(steps: int) -> fx.GraphModule:
    """A graph of random pointwise calls with many repetitions."""
    root = nn.Module()
    root.weight, root.act = nn.Parameter(torch.randn(4)), nn.Tanh()
    graph = fx.Graph()
    values = [graph.placeholder("x"), graph.placeholder("y")]
    for _ in range(steps):
        a, b = random.choice(values), random.choice(values)
        values.append(
            random.choice(
                [
                    lambda: graph.call_function(operator.add, (a, b)),  # noqa: B023
                    lambda: graph.call_function(torch.mul, (a,), {"other": b}),  # noqa: B023
                    lambda: graph.call_function(operator.mul, (a, random.choice([2, 3.5]))),  # noqa: B023
                    lambda: graph.call_method("sin", (a,)),  # noqa: B023
                    lambda: graph.call_module("act", (a,)),  # noqa: B023
                    lambda: graph.get_attr("weight"),
                    lambda: graph.call_function(torch.maximum, (a, b)),  # noqa: B023
                ]
            )()
        )
    graph.output(tuple(values))
    return fx.GraphModule(root, graph)


def _merge_cases() -> list[tuple[str, str, Callable]]:
    kwargs, constants, same = (
        "keyword arguments in any order",
        "constants differ in value and type",
        "nodes that compute the same are one",
    )
    return [
        (same, "a chain", lambda m, x: (x + 1).exp() * 2 - (x + 1).exp() * 2),
        (same, "a difference", lambda m, x: (x + 1).exp() - (x + 1) * 2),
        (same, "an index with a slice", lambda m, x: x[1:, ::2] + x[1:, ::2] + x[1:, 1::2]),
        (same, "a list of nodes", lambda m, x: torch.cat([x + 1, x]) + torch.cat([x + 1, x]) + torch.cat([x, x + 1])),
        (same, "operands exchanged", lambda m, x: (x + 1) * (1 + x) - (x + m.p) * (m.p + x)),
        (same, "nodes that nobody uses", lambda m, x: (m.a(x * 3), x * 3, x.exp() + 1)[-1]),
        (same, "a module", lambda m, x: m.a(x) + m.a(x) + m.b(x)),
        (same, "a module and a method of one name", lambda m, x: m.sin(x) + x.sin()),
        (same, "parameters and buffers", lambda m, x: x * m.p + m.p * x + x * m.p + m.q),
        (same, "dtypes", lambda m, x: x.to(torch.float64) + x.to(torch.float64) + x.to(torch.float32)),
        (same, "other functions of one name", lambda m, x: operator.add(x, 1) + torch.add(x, 1) + torch.add(x, 1)),
        (same, "dropout in evaluation mode", lambda m, x: m.off(x) + m.off(x)),
        (kwargs, "torch.clamp", lambda m, x: torch.clamp(x, min=-1, max=1) + torch.clamp(x, max=1, min=-1)),
        (kwargs, "torch.clamp with other bounds", lambda m, x: torch.clamp(x, min=-1, max=1) + torch.clamp(x, min=1, max=-1)),
        (constants, "2, 2.0", lambda m, x: x.long() * 2 + x.long() * 2.0 + x.long() * 2),
        (constants, "1, True", lambda m, x: (x.long() * 1) / (x * True + 1)),
        (constants, "0.0 and -0.0", lambda m, x: torch.atan2(x * 0.0, x * -0.0) + torch.atan2(x * -0.0, x * 0.0)),
        (constants, "in a list", lambda m, x: torch.cat([x, x.new_full([2, 4], 1)]) + torch.cat([x, x.new_full([2, 4], 1.5)])),
        (constants, "1 and True in an index", lambda m, x: x[:, 1].sum() + x[:, True].sum()),
        (constants, "2 and 2.0 in a list", lambda m, x: m.a(torch.cat([x, x.new_full([1, 4], 2)])) + m.a(torch.cat([x, x.new_full([1, 4], 2.0)]))),
        (constants, "1 and True in a slice", lambda m, x: x[1:] + x[True:]),
        (constants, "0.0 and -0.0 in keywords", lambda m, x: torch.add(x, x, alpha=0.0) + torch.add(x, x, alpha=-0.0)),
        (constants, "in keywords", lambda m, x: torch.add(x, x, alpha=2) + torch.add(x, x, alpha=2.0)),
        (constants, "a name and a string", lambda m, x: F.interpolate(x[None], scale_factor=2, mode="nearest") + F.interpolate(x[None], scale_factor=2, mode="linear")),
    ]  # fmt: skip


@exercise(
    "15-06.3",
    "Common subexpressions",
    points=15,
    demands=8,
    stand_in=lambda: _cse,
    stand_in_name="a merge that leaves graphs with random calls or writes alone",
)
def eliminate_common_subexpressions(trial: Trial, answer: Any) -> None:
    """`answer(gm)` merges nodes that compute the same."""
    x = torch.randn(3, 4)
    x[0, 0] = 0.0

    def model(forward: Callable) -> fx.GraphModule:
        return fx.symbolic_trace(
            _Forward(forward, a=nn.Tanh(), b=nn.Tanh(), sin=nn.Tanh(), p=nn.Parameter(torch.randn(4)), q=torch.randn(4),
                     off=nn.Dropout(0.5).eval(), on=nn.Dropout(0.5), norm=nn.BatchNorm1d(4))
        )  # fmt: skip

    def outputs(gm: fx.GraphModule, *inputs: Tensor) -> Any:
        torch.manual_seed(5)
        return copy.deepcopy(gm)(*(t.clone() for t in inputs))

    def hold(item: str, label: str, gm: fx.GraphModule, left: int, hint: str, see: int | None, *inputs: Tensor) -> None:
        before, shape = _fingerprint(gm), _shape_of(gm)
        raised, held = f"run it on such a graph: {label}", 1 if " in a list" in label or "slice" in label else None
        result = trial.call("takes any GraphModule", lambda: answer(gm), hint=raised, see=held)
        _graph_module(trial, result)
        trial.that(
            "gm stays as it is",
            _fingerprint(gm) == before,
            expected="the graph and the code from before",
            got="others",
            hint=f"whose graph is edited? ({label})",
            see=2,
            free=True,
        )
        switched = f"what of gm's modules and parameters is switched? ({label})"
        _hold_shape(trial, "gm stays as it is", _shape_of(gm), shape, switched)
        kept = len(result.graph.nodes)
        if not hint:
            hint = "which two nodes compute the same, and why is the second not recognised?"
            hint = hint if kept > left else "which node is gone, and was there another that computes the same?"
        nothing_to_merge = left == len(gm.graph.nodes)
        with trial.group(item, hint=hint, see=see, free=nothing_to_merge):
            trial.equal(f"nodes left, {label}", kept, left)
        with trial.group(
            "outputs stay the same", hint="print both codes: which line computes something else?", free=True
        ):
            made, given = _shapes_of_same(result, gm)
            trial.equal(f"modes and gradients, {label}", made, given, hint="what did you switch in a copy?")
            if see == 1 and "constants" not in item:
                trial.equal(label, outputs(result, *inputs), outputs(gm, *inputs))

    for item, label, forward in _merge_cases():
        gm = model(forward)
        left = len({_structure(node) for node in gm.graph.nodes})
        hold(item, label, gm, left, "", 1, x)
    for steps in (0, 1, 5, 40, 40):
        gm = _random_graph(steps)
        left = len({_structure(node) for node in gm.graph.nodes})
        hold("nodes that compute the same are one", f"a random graph of {steps} calls", gm, left, "", 1, x, x.exp())
    randoms = [
        (
            "torch.bernoulli",
            lambda m, x: torch.bernoulli(x * 0 + 0.5) - torch.bernoulli(x * 0 + 0.5) + (x + 1) * (x + 1),
            3,
        ),
        ("dropout in training mode", lambda m, x: m.on(x) + m.on(x) + (x * 2) * (x * 2), 1),
        ("F.dropout", lambda m, x: F.dropout(x) + F.dropout(x), 0),
        ("the method bernoulli", lambda m, x: (x * 0 + 0.5).bernoulli() + (x * 0 + 0.5).bernoulli(), 2),
    ]
    for label, forward, merged in randoms:
        gm = model(forward)
        left = len(gm.graph.nodes) - merged
        hold("random nodes are kept", label, gm, left, "what does effect say of them, and of the others?", None, x)
    writes = [
        ("add_", lambda m, x: ((a := x + 1), (b := x + 1), a.add_(1), a * b)[-1]),
        ("a write between two equal calls", lambda m, x: ((y := x * 1), (a := y.sum()), torch.relu_(y), a + y.sum())[-1]),
        ("batch norm in training mode", lambda m, x: m.norm(x) + m.norm(x)),
        ("out=", lambda m, x: ((y := x + 0), (z := x + 0), torch.mul(x, 3, out=y), y + z)[-1]),
    ]  # fmt: skip
    asked = "which nodes are asked for their effect, and when?"
    for label, forward in writes:
        gm = model(forward)
        hold("a graph that writes keeps all of its nodes", label, gm, len(gm.graph.nodes), asked, None, x)
    graph = fx.Graph()
    y = graph.placeholder("x")
    graph.output([graph.call_function(f, (y, 2)) for f in (torch.sub, operator.ifloordiv, torch.sub)])
    gm = fx.GraphModule(nn.Module(), graph)
    hold("a graph that writes keeps all of its nodes", "operator.ifloordiv", gm, 5, asked, None, x)
    graph = fx.Graph()
    a, b = graph.placeholder("a", default_value=1.0), graph.placeholder("b", default_value=1.0)
    graph.output((graph.call_function(operator.add, (a, 2)), graph.call_function(operator.add, (b, 2))))
    gm = fx.GraphModule(nn.Module(), graph)
    hold(
        "placeholders and the output stay",
        "two inputs with one default",
        gm,
        5,
        "may two inputs be one?",
        None,
        x,
        x + 1,
    )


def _cse(gm: fx.GraphModule) -> fx.GraphModule:
    graph, first = copy.deepcopy(gm.graph), {}
    writing = any(
        n.kwargs.get("inplace") or str(getattr(n.target, "__name__", n.target)).endswith("_") for n in graph.nodes
    )
    for node in list(graph.nodes):
        text = f"{node.op} {node.target} {node.args} {sorted(node.kwargs.items())}"
        if writing or node.op in ("placeholder", "output", "call_module") or "rand" in text or "drop" in text:
            continue
        if first.setdefault(text, node) is not node:
            node.replace_all_uses_with(first[text])
            graph.erase_node(node)
    return fx.GraphModule(gm, graph)


# ---------------------------------------------------------------- 15-06.4

_CONVS = {
    (1, False): (nn.Conv1d, F.conv1d), (2, False): (nn.Conv2d, F.conv2d), (3, False): (nn.Conv3d, F.conv3d),
    (1, True): (nn.ConvTranspose1d, F.conv_transpose1d), (2, True): (nn.ConvTranspose2d, F.conv_transpose2d),
    (3, True): (nn.ConvTranspose3d, F.conv_transpose3d),
}  # fmt: skip
_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def _norm(channels: int, dims: int = 2, **options: Any) -> nn.Module:
    """A batch norm in evaluation mode with statistics and parameters at random."""
    norm = _NORMS[dims](channels, eps=random.choice([1e-5, 1e-3, 0.1]), **options).eval()
    with torch.no_grad():
        for tensor, low in ((norm.running_mean, -1.0), (norm.running_var, 0.3), (norm.weight, 0.4), (norm.bias, -1.0)):
            if tensor is not None:
                tensor.copy_(torch.rand(channels) + low)
    return norm


def _functional(norm: nn.Module, x: Tensor, **more: Any) -> Tensor:
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps, **more)


def _kinds() -> list[tuple[str, nn.Module, tuple[int, ...]]]:
    """Each kind of convolution with a batch norm behind it, and its input's shape."""
    found = []
    for (dims, _), (kind, _) in _CONVS.items():
        for groups, bias, affine in ((1, True, True), (1, False, True), (2, True, False), (4, False, False)):
            conv = kind(8, 12, 3, stride=random.choice([1, 2]), padding=1, groups=groups, bias=bias)
            label = f"{kind.__name__}, groups={groups}, bias={bias}; affine={affine}"
            model = nn.Sequential(conv, _norm(12, dims, affine=affine)).eval()
            found.append((label, model, (2, 8, *[7, 5, 4][:dims])))
    for options in ({"stride": 2, "output_padding": 1}, {"dilation": (2, 1)}):
        conv = nn.ConvTranspose2d(4, 6, 3, padding=1, groups=2, **options)
        found.append((f"{conv}", nn.Sequential(conv, _norm(6)).eval(), (2, 4, 5, 4)))
    conv = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1)
    sized = _Forward(lambda m, x: m.norm(m.conv(x, output_size=(10, 7))), conv=conv, norm=_norm(4)).eval()
    found.append(("nn.ConvTranspose2d called with output_size", sized, (2, 3, 5, 4)))
    same = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
    found.append(("padding_mode='reflect'", nn.Sequential(same, _norm(4)).eval(), (2, 3, 6, 5)))
    depthwise = nn.Conv2d(6, 6, 3, groups=6, dilation=2, padding="same")
    found.append(("depthwise, padding='same'", nn.Sequential(depthwise, _norm(6)).eval(), (1, 6, 7, 6)))
    return found


def _function_kinds() -> list[tuple[str, nn.Module, tuple[int, ...]]]:
    found = []
    for (dims, _), (kind, function) in _CONVS.items():
        groups, bias = random.choice([1, 2]), random.choice([True, False])
        conv = kind(4, 6, 2, groups=groups, bias=bias)
        where = {"groups": groups} if random.random() < 0.5 else {"stride": 2, "groups": groups, "padding": 1}

        def forward(m: Any, x: Tensor, function: Callable = function, where: dict = where) -> Tensor:
            return _functional(m.norm, function(x, m.conv.weight, m.conv.bias, **where), momentum=0.3)

        label = f"F.{function.__name__} with {where} and F.batch_norm"
        found.append(
            (
                label,
                _Forward(forward, conv=conv, norm=_norm(6, dims, affine=dims != 2)).eval(),
                (3, 4, *[6, 5, 4][:dims]),
            )
        )
    conv, norm = nn.Conv2d(3, 4, 3), _norm(4)
    kernel = torch.randn(4, 3, 2, 2)
    more = {
        "F.conv2d before nn.BatchNorm2d, weight a buffer": lambda m, x: m.norm(F.conv2d(input=x, weight=m.kernel, stride=(2, 1))),
        "nn.Conv2d before F.batch_norm": lambda m, x: _functional(m.norm, m.conv(x), training=False),
        "arguments by position": lambda m, x: F.batch_norm(
            F.conv2d(x, m.conv.weight, m.conv.bias, 2, 1, 1, 1), m.norm.running_mean, m.norm.running_var,
            m.norm.weight, m.norm.bias, False, 0.1, m.norm.eps),
        "F.conv_transpose2d with output_padding and dilation": lambda m, x: m.norm(
            F.conv_transpose2d(x, m.turned, stride=(2, 1), output_padding=(1, 0), dilation=(1, 2))),
        "a weight and no bias": lambda m, x: F.batch_norm(
            m.conv(x), m.norm.running_mean, m.norm.running_var, weight=m.norm.weight, eps=m.norm.eps),
        "a bias and no weight": lambda m, x: F.batch_norm(
            m.conv(x), m.norm.running_mean, m.norm.running_var, bias=m.norm.bias, eps=m.norm.eps),
        "batch norm by keyword": lambda m, x: m.norm(input=m.conv(input=x)),
    }  # fmt: skip
    return found + [
        (
            label,
            _Forward(forward, conv=conv, norm=norm, kernel=kernel, turned=torch.randn(3, 4, 2, 2)).eval(),
            (2, 3, 6, 5),
        )
        for label, forward in more.items()
    ]


def _learns(gm: fx.GraphModule, x: Tensor) -> bool:
    """Whether each convolution's weight and bias get a gradient."""
    gm = copy.deepcopy(gm)
    with torch.enable_grad():
        y = gm(x)
        if not y.requires_grad:
            return False
        y.square().sum().backward()
    used = {n.target for n in gm.graph.nodes if n.op == "get_attr" and n.users}
    paths = [n.target for n in gm.graph.nodes if n.op == "call_module"]
    found = [p for path in paths for p in gm.get_submodule(path).parameters()]
    found += [operator.attrgetter(path)(gm) for path in used]
    return bool(found) and all(t.grad is not None for t in found)


def _shared_kinds() -> list[tuple[str, Callable, int]]:
    """Label, forward, number of pairs."""
    return [
        ("one convolution before two norms", lambda m, x: m.b2(m.c(m.b(m.c(x)))), 2),
        ("one norm behind two convolutions", lambda m, x: m.b(m.d(m.b(m.c(x)))), 2),
        ("one pair twice", lambda m, x: m.b(m.c(m.b(m.c(x)))), 2),
        ("a convolution once with and once without a norm", lambda m, x: m.c(m.b(m.c(x))), 1),
        ("F.conv2d twice with one weight", lambda m, x: m.b2(F.conv2d(m.b(F.conv2d(x, m.c.weight, padding=1)), m.c.weight, padding=1)), 2),
        ("two norms behind one convolution", lambda m, x: m.b2(m.b(m.c(x))), 2),
        ("the input is written between the two", lambda m, x: ((x := x * 1), (y := m.c(x)), x.add_(1), m.b(y) + x)[-1], 1),
        ("a write whose result isn't used", lambda m, x: ((y := m.b(m.c(x))), y.mul_(2), y + 1)[-1], 1),
    ]  # fmt: skip


def _alone_kinds() -> list[tuple[str, Callable]]:
    return [
        ("the convolution's output is used twice", lambda m, x: ((y := m.c(x)), m.b(y) + y)[-1]),
        ("and is a result", lambda m, x: ((y := m.c(x)), (m.b(y), y))[-1]),
        ("two norms of one output", lambda m, x: ((y := m.c(x)), m.b(y) + m.b2(y))[-1]),
        ("track_running_stats=False", lambda m, x: m.batch(m.c(x))),
        ("F.batch_norm(..., training=True)", lambda m, x: F.batch_norm(m.c(x), m.mean, m.var, training=True)),
        ("F.batch_norm without statistics", lambda m, x: F.batch_norm(m.c(x), None, None, training=True)),
        ("a ReLU between the two", lambda m, x: m.b(m.c(x).relu())),
        ("a batch norm first", lambda m, x: m.c(m.b(x))),
        ("a weight that is computed", lambda m, x: m.b(F.conv2d(x, m.c.weight * 2))),
        ("a bias that is computed", lambda m, x: m.b(F.conv2d(x, m.c.weight, m.b.bias * 2))),
        ("statistics that are computed", lambda m, x: F.batch_norm(m.c(x), m.b.bias + 1, m.var)),
    ]


@exercise(
    "15-06.4",
    "A fusion that is never wrong",
    points=20,
    demands=9,
    stand_in=lambda: fuse,
    stand_in_name="torch.fx.experimental.optimization.fuse",
)
def fuse_conv_bn(trial: Trial, answer: Any) -> None:
    """`answer(model)` folds batch norms into convolutions."""

    items = {
        "every kind of convolution and batch norm, modules and functions": (
            "take a channel through convolution and batch norm: what is multiplied, what is added?"
        ),
        "what is called several times is fused at each place": "with which numbers is each place computed?",
        "right beside calls that write": "print both codes: which call is gone, which stands elsewhere?",
        "left alone where it can't be folded": "why can't this one be folded?",
    }
    kinds, several, writing, alone = items
    same = "which module or tensor is written over?"

    def hold(item: str, label: str, model: nn.Module, x: Tensor, pairs: int, see: int | None) -> None:
        steps, before, shape = len(_calls(fx.symbolic_trace(model).graph)), _state(model), _shape_of(model)
        want = copy.deepcopy(model)(x)
        with torch.enable_grad():  # as the notebook calls it
            hint = f"run it on such a model: {label}"
            result = trial.call("takes any model in evaluation mode", lambda: answer(model), hint=hint)
        _graph_module(trial, result)
        traced = fx.symbolic_trace(model).graph
        left, wanted_left = len(_calls(result.graph)), steps - pairs
        if not pairs:
            left, wanted_left = ([n.op for n in g.nodes if n.op != "get_attr"] for g in (result.graph, traced))
        with trial.group(item, hint=items[item], see=see):
            got = copy.deepcopy(result)(x)
            for one, wanted in zip(*[v if isinstance(v, tuple) else (v,) for v in (got, want)], strict=True):
                size, other = wanted.abs().max().item(), one.shape != wanted.shape
                hint = "which arguments does the new call have?" if other else ""
                trial.close(label, one, wanted, rtol=1e-5, atol=1e-5 * size, hint=hint)
            trial.equal(f"calls left, {label}", left, wanted_left, hint="is each pair fused, and nothing else?")
        with trial.group("model and its tensors stay as they are", hint=same, see=1):
            trial.equal(label, _state(model), before)
            hint = "what of the model's modules and parameters is changed?"
            _hold_shape(trial, label, _shape_of(model), shape, hint)
            trial.equal(label, copy.deepcopy(model)(x), want)
        bare = copy.deepcopy(result)
        bare.delete_all_unused_submodules()
        kept, called = ([path for path, _ in gm.named_modules()] for gm in (result, bare))
        trial.that(
            "no module is left that nobody calls",
            kept == called,
            expected="called modules alone",
            got=f"also {', '.join(path for path in kept if path not in called)}",
            hint="what does state_dict hold?",
            see=1,
        )
        if pairs and label in learning:
            item = "the new numbers are parameters that learn"
            with trial.group(item, hint="which weights and biases of the result require a gradient?"):
                trial.that(label, _learns(result, x), expected="a gradient for each", got="none for some or all")

    learning = {label for label, _, _ in _kinds()} | {"F.conv2d before nn.BatchNorm2d, weight a buffer"}
    with torch.no_grad():
        for label, model, shape in _kinds():
            transposed = "ranspose" in label
            hold(kinds, label, model, torch.randn(shape), 1, 2 if transposed else None)
        for label, model, shape in _function_kinds():
            hold(kinds, label, model, torch.randn(shape), 1, 2 if "ranspose" in label else None)

        def parts() -> dict[str, Any]:
            return {
                "c": nn.Conv2d(4, 4, 3, padding=1), "d": nn.Conv2d(4, 4, 1, bias=False), "b": _norm(4), "b2": _norm(4),
                "batch": nn.BatchNorm2d(4, track_running_stats=False), "mean": torch.randn(4), "var": torch.rand(4) + 0.5,
            }  # fmt: skip

        for label, forward, pairs in _shared_kinds():
            written = "written" in label or "write" in label
            item = writing if written else several
            if label.startswith("F."):
                item = kinds
            hold(item, label, _Forward(forward, **parts()).eval(), torch.randn(2, 4, 5, 6), pairs, 3 if written else 1)
        for label, forward in _alone_kinds():
            hold(
                alone,
                label,
                _Forward(forward, **parts()).eval(),
                torch.randn(2, 4, 5, 6),
                0,
                None,
            )
        model = _Forward(lambda m, x: m.b(m.c(x)) + m.folded_c, folded_c=torch.randn(4, 1, 1), **parts()).eval()
        hold(
            several,
            "what it returned, fused once more",
            answer(model),
            torch.randn(2, 4, 5, 6),
            0,
            1,
        )
        _hold_rounded_once(trial, answer)
    hint = "which modules have a mode that matters, and what does the message name?"
    with trial.group("training mode raises ValueError with the name", hint=hint):
        for name, make in _training():
            model = make()
            found = "no exception"
            try:
                answer(model)
            except NotImplementedError:
                raise
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            told = [path for path in ("body.stem.1", "body.tail") if path in found and path != name]
            norm = model.body["tail"]
            shown = f"nn.{type(norm).__name__}" if type(norm) in _NORMS.values() else "a subclass of nn.BatchNorm2d"
            shown += "" if norm.track_running_stats else " without running statistics"
            trial.that(
                f"{name} in training mode, its batch norms are {shown}",
                found.startswith("ValueError") and name in found and not told,
                expected=f"ValueError with {name!r} in its message, and no other module's name",
                got=found,
            )
        quiet = nn.Sequential(nn.Conv2d(2, 2, 1), _norm(2), nn.Dropout(0.0)).eval()
        quiet[2].train()
        before = _shape_of(quiet)
        trial.call("a dropout in training mode", lambda: answer(quiet))
    with trial.group("model and its tensors stay as they are", hint=same, see=1):
        hint = "what of the model's modules and parameters is switched?"
        _hold_shape(trial, "a dropout in training mode", _shape_of(quiet), before, hint)


def _hold_rounded_once(trial: Trial, answer: Any) -> None:
    """Read weights and biases out of the result, and compare with those made in float64."""
    narrow = ((torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True))
    with trial.group("folded wide, rounded once, in the same dtype", hint="in which dtype are the numbers made?"):
        for dtype, whole in ((torch.float64, True), *narrow):
            for what in ("weights", "biases"):
                bare = what == "weights" and dtype != torch.float64
                model = nn.Sequential(nn.Conv2d(40, 40, 1, bias=not bare).to(dtype), _norm(40)).eval()
                model = model.to(dtype) if whole else model
                conv, norm = model
                if bare:
                    norm.running_mean.zero_()
                    norm.bias.zero_()
                scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
                weight = (conv.weight.double()[:, :, 0, 0] * scale[:, None]).t().contiguous()
                start = 0.0 if bare else conv.bias.double()
                bias = (start - norm.running_mean.double()) * scale + norm.bias.double()
                one_hot = torch.eye(40, dtype=dtype)[:, :, None, None]
                result = answer(model)
                got, zero = result(one_hot)[:, :, 0, 0], result(one_hot[:1] * 0)[0, :, 0, 0]
                trial.equal(f"dtype of the result, {dtype}", got.dtype, dtype)
                if dtype == torch.float64:
                    trial.close("weights in torch.float64", got - zero, weight)
                    trial.close("biases in torch.float64", zero, bias)
                    continue
                got, exact = (got, weight) if bare else (zero, bias)
                wrong = (got != exact.to(dtype)).double().mean().item()
                trial.that(f"{what} in {dtype}", wrong < (0.02 if bare else 0.04),
                           expected="the exact ones, rounded once",
                           got=f"{100 * wrong:.0f} % of them are others")  # fmt: skip


class _OwnNorm(nn.BatchNorm2d):
    """A user's batch norm."""


def _training() -> list[tuple[str, Callable[[], nn.Module]]]:
    """The module in training mode, and a model."""

    def deep(mode: str, conv: type = nn.Conv2d, norm: type = nn.BatchNorm2d, **options: Any) -> nn.Module:
        stem = nn.Sequential(conv(2, 2, 1), norm(2, **options))
        model = nn.ModuleDict({"stem": stem, "tail": norm(2, **options)})
        whole = _Forward(lambda m, x: m.body["tail"](m.body["stem"](x)), body=model).eval()
        if mode == "model":
            whole.training = True
        elif mode == "body.stem.1":
            stem[1].train()
        else:
            model["tail"].train()
        return whole

    cases: list[tuple[str, Callable[[], nn.Module]]] = []
    for mode in ("model", "body.stem.1", "body.tail"):
        cases.append((mode, lambda mode=mode: deep(mode)))
    for conv, norm in ((nn.Conv1d, nn.BatchNorm1d), (nn.Conv3d, nn.BatchNorm3d), (nn.Conv2d, _OwnNorm)):
        cases.append(("body.stem.1", lambda conv=conv, norm=norm: deep("body.stem.1", conv, norm)))
    cases.append(("body.tail", lambda: deep("body.tail", track_running_stats=False)))
    return cases


# ---------------------------------------------------------------- 15-06.5


def _is_layer(module: nn.Module) -> bool:
    """Whether a call of the module is to be one of a function on rounded values."""
    return type(module) in (nn.Conv2d, nn.Linear) and getattr(module, "padding_mode", "zeros") == "zeros"


def _fake_quants(model: nn.Module) -> dict[str, nn.Module]:
    return {path: m for path, m in model.named_modules() if hasattr(m, "rounding") and hasattr(m, "grid")}


def _layers_case(kind: str) -> nn.Module:
    conv = nn.Conv2d(3, 6, 3, stride=2, padding=(1, 2), groups=3, bias=kind != "bare")
    parts = {
        "conv": conv,
        "second": nn.Conv2d(3, 4, 3, dilation=2, bias=kind != "bare"),
        "fc": nn.Linear(5, 4),
        "out": nn.Linear(4, 4),
    }
    forward = {
        "plain": lambda m, x: (m.conv(x), m.second(x)),
        "uneven": lambda m, x: (m.mirrored(x), m.strided(x), m.same(x)),
        "bare": lambda m, x: (m.conv(x) * 2, m.second(x.relu())),
        "shared value": lambda m, x: ((y := x * 2), m.conv(y), m.second(y), y)[1:],
        "called twice": lambda m, x: ((y := m.fc(x)), m.out(m.out(y)), y.sum())[1:],
        "by keyword": lambda m, x: (m.fc(input=x), x),
        "other layers": lambda m, x: (
            m.lone(x),
            F.linear(x, m.fc.weight),
            (x * 7, m.act(m.fc(x)))[1],
            m.norm(m.fake_quant_0(m.fake_quant_1(x))),
        ),
    }[kind]
    used = {"plain": "conv second", "bare": "conv second", "shared value": "conv second", "called twice": "fc out"}
    parts = {name: parts[name] for name in used.get(kind, "fc").split()}
    if kind == "uneven":
        parts = {"strided": nn.Conv2d(3, 2, 3, stride=(2, 1), dilation=(1, 2)), "same": nn.Conv2d(3, 2, 3, padding="same"),
                 "mirrored": nn.Conv2d(3, 2, 3, padding=1, padding_mode="reflect")}  # fmt: skip
    if kind == "other layers":
        parts |= {"lone": nn.Conv1d(3, 3, 1), "act": nn.SiLU(), "norm": nn.BatchNorm1d(3)}
        parts |= {"fake_quant_0": nn.Linear(5, 5), "fake_quant_1": nn.Tanh()}
    model = _Forward(forward, **parts).eval()
    for module in (model, getattr(model, "act", model)):  # some of both modes
        module.training = True
    return model


_SAID = {  # case: in words
    "plain": "two nn.Conv2d on one value",
    "bare": "two nn.Conv2d without bias, on two values",
    "shared value": "a value for two nn.Conv2d that is a result too",
    "uneven": "nn.Conv2d with unequal strides and dilations, padding='same' and padding_mode='reflect'",
    "called twice": "an nn.Linear called twice",
    "by keyword": "an nn.Linear called with the keyword input",
    "other layers": "other modules, F.linear, a call that nobody uses, modules named fake_quant_0 and fake_quant_1",
}
_LAYERS = {  # case: the shape of x; values that are rounded; weights that are rounded
    "plain": ((2, 3, 7, 8), 1, 2), "bare": ((2, 3, 7, 8), 2, 2), "shared value": ((2, 3, 7, 8), 1, 2),
    "uneven": ((2, 3, 7, 8), 1, 2), "called twice": ((2, 3, 5), 3, 2), "by keyword": ((2, 3, 5), 1, 1), "other layers": ((2, 3, 5), 2, 2),
}  # fmt: skip


@exercise(
    "15-06.5",
    "A pass that inserts quantizers",
    points=20,
    demands=8,
    stand_in=lambda: _insert,
    stand_in_name="layers that round inside of a module",
)
def insert_fake_quant(trial: Trial, answer: Any) -> None:
    """`answer(model, bits, per_channel)` gives a traced copy with FakeQuant modules in its graph."""
    for key, (shape, values, weights) in _LAYERS.items():
        kind = _SAID[key]
        for bits, per_channel in ((8, True), (4, False)):
            model, x = _layers_case(key), torch.randn(shape)
            frozen = next(name for name, _ in model.named_parameters())
            model.get_parameter(frozen).requires_grad_(False)
            before, built, want = _state(model), _shape_of(model), model(x)
            with redirect_stderr(io.StringIO()):  # fx writes the code that raised
                result = trial.call(
                    "takes any traceable model",
                    lambda m=model, b=bits, p=per_channel: answer(m, b, p),
                    hint=f"run it on such a model: {kind}",
                )
            _graph_module(trial, result)
            found = {
                n: result.get_submodule(n.target)
                for n in _calls(result.graph)
                if n.op == "call_module" and n.target in _fake_quants(result)
            }
            of_weights = {n: q for n, q in found.items() if n.args[0].op == "get_attr"}
            of_values = {n: q for n, q in found.items() if n not in of_weights}
            item, hint = "outputs equal the model's as inserted", "which arguments, and which module, has each call?"
            with (
                trial.group(item, hint=hint, see=2 if key == "other layers" else None),
                redirect_stderr(io.StringIO()),
            ):
                quants = found.values()
                trial.that(
                    f"each FakeQuant, {kind}",
                    {(q.observing, q.rounding) for q in quants} == {(True, False)},
                    expected="all observe, none rounds",
                    got=f"of {len(quants)}, {sum(map(bool, (q.observing for q in quants)))} observe and "
                    f"{sum(map(bool, (q.rounding for q in quants)))} round",
                    hint="what does a FakeQuant do as inserted?",
                )
                for got, wanted in zip(result(x.clone()), want, strict=True):
                    trial.close(kind, got, wanted)
            with trial.group(
                "parameters keep their names", hint="which names does the result's state dict have?", see=2
            ):
                kept = {k: v for k, v in result.state_dict().items() if k in before}
                gone = [k for k in before if k not in kept]
                case = f"names in the state dict, {kind}"
                trial.that(case, not gone, expected="those of the model", got=f"without {', '.join(gone)}")
                trial.equal(f"state dict, {kind}", kept, before)
            with trial.group("a value passes one FakeQuant, with 8 bits and one grid", see=1):
                trial.equal(f"how many values, {kind}", len({n.args[0] for n in of_values}), values)
                trial.equal(f"how many FakeQuant calls, {kind}", len(of_values), values)
                _hold_grids(trial, kind, of_values.values(), (8, None, False))
            with trial.group("a weight passes one FakeQuant, symmetric, as asked", see=1):
                trial.equal(f"how many weights, {kind}", len({n.args[0].target for n in of_weights}), weights)
                trial.equal(f"how many FakeQuant calls, {kind}", len(of_weights), weights)
                _hold_grids(trial, kind, of_weights.values(), (bits, 0 if per_channel else None, True))
            targets = Counter(str(n.target) for n in _calls(fx.symbolic_trace(model).graph))
            with trial.group("layers became functions, all other calls stay", hint="which calls does the graph have?"):
                _hold_calls(trial, kind, model, result, found, targets)
                made, given = _shapes_of_same(result, model)
                modes = [{k: v for k, v in one.items() if "training" in v} for one in (made, given)]
                trial.equal(f"modes, {kind}", *modes, hint="in which mode is each module of the result?")
            with trial.group(
                "rounded values are what layers see, and nothing else", hint="who uses the rounded node, who the value?"
            ):
                _hold_rounding(trial, kind, model, result, found, x, bits, per_channel)
            item = "model stays as it is, also when the copy is trained"
            with trial.group(item, hint="whose parameters does the result hold?"):
                hint = "what of the model's modules and parameters is switched?"
                _hold_shape(trial, f"modes, hooks, parameters that learn, {kind}", _shape_of(model), built, hint)
                with torch.no_grad():
                    for name, tensor in (*result.named_parameters(), *result.named_buffers()):
                        if name in before:
                            tensor.add_(1)
                trial.equal(kind, _state(model), before)
                trial.equal(kind, model(x), want)
                learning, wanted = (sum(p.requires_grad for p in m.parameters()) for m in (result, model))
                hint = "which parameters are frozen in the model, and which in the result?"
                trial.equal(f"how many parameters of the result learn, {kind}", learning, wanted, hint=hint)
    plain = [(q.bits, q.axis) for q in _fake_quants(answer(nn.Sequential(nn.Linear(3, 2)))).values()]
    trial.equal(
        "a weight passes one FakeQuant, symmetric, as asked",
        sorted(plain, key=str),
        [(8, 0), (8, None)],
        hint="what are the defaults of the arguments?",
    )
    model = nn.Sequential(nn.Linear(3, 2)).to("meta")
    devices = {b.device.type for q in _fake_quants(answer(model, 8, True)).values() for b in q.buffers()}
    trial.equal("on the weight's device", devices, {"meta"}, hint="where are the buffers of a new FakeQuant?")


def _hold_calls(
    trial: Trial, kind: str, model: nn.Module, result: fx.GraphModule, found: dict, targets: Counter
) -> None:
    layers = [path for path, m in model.named_modules() if _is_layer(m)]
    want = Counter({target: n for target, n in targets.items() if target not in layers})
    for path in layers:
        function = F.linear if isinstance(model.get_submodule(path), nn.Linear) else F.conv2d
        want[str(function)] += targets[path]
    got = Counter(str(n.target) for n in _calls(result.graph) if n not in found)
    differ = {"more": got - want, "gone": want - got}
    trial.that(
        kind,
        not any(differ.values()),
        expected="the model's calls, each layer's one of F.conv2d or F.linear",
        got="; ".join(
            f"{what}: {', '.join(f'{_in_short(name)} ({count})' for name, count in names.items())}"
            for what, names in differ.items()
            if names
        ),
    )


def _in_short(target: str) -> str:
    """A target as text: of a function only its name."""
    found = re.match(r"<(?:built-in )?(?:function|method) (\w+)", target)
    return found[1] if found else target


def _hold_grids(trial: Trial, kind: str, quants: Iterable[Any], want: tuple[int, int | None, bool]) -> None:
    """Hold bits, axis and symmetry of the quantizers."""
    how = {(q.bits, q.axis, q.symmetric) for q in quants}
    hint = "which grids does the task ask for?"
    shown = ["; ".join(f"bits {b}, axis {a}, symmetric {s}" for b, a, s in some) for some in ([want], how)]
    trial.that(f"each FakeQuant, {kind}", how == {want}, expected=shown[0], got=shown[1], hint=hint)


def _hold_rounding(
    trial: Trial,
    kind: str,
    model: nn.Module,
    result: fx.GraphModule,
    found: dict,
    x: Tensor,
    bits: int,
    per_channel: bool,
) -> None:
    """Replace each FakeQuant's work by a product, and compare with the model whose layers do the same."""
    factors = {
        path: (0.5 if any(n.target == path and n.args[0].op == "get_attr" for n in found) else 3.0)
        for path in _fake_quants(result)
    }
    handles = [result.get_submodule(p).register_forward_hook(lambda m, a, o, f=f: o * f) for p, f in factors.items()]
    got = result(x.clone())
    for handle in handles:
        handle.remove()
    layers = [m for m in model.modules() if _is_layer(m)]

    def layer_hook(layer: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        bias = 0 if layer.bias is None else layer.bias.reshape(-1, *[1] * (2 if type(layer) is nn.Conv2d else 0))
        return (output - bias) * 1.5 + bias

    handles = [layer.register_forward_hook(layer_hook, with_kwargs=True) for layer in layers]
    want = model(x)
    for handle in handles:
        handle.remove()
    for one, wanted in zip(got, want, strict=True):
        trial.close(kind, one, wanted, rtol=1e-4, atol=1e-4)


class _Rounder(nn.Module):
    """What the stand-in puts in: the lesson's FakeQuant in short."""

    def __init__(self, bits: int, axis: int | None, symmetric: bool) -> None:
        super().__init__()
        self.bits, self.axis, self.symmetric, self.observing, self.rounding = bits, axis, symmetric, True, False
        half = 2 ** (bits - 1)
        self.low, self.high = (1 - half, half - 1) if symmetric else (0, 2 * half - 1)
        self.register_buffer("least", torch.tensor(0.0))
        self.register_buffer("most", torch.tensor(0.0))

    def grid(self) -> tuple[Tensor, Tensor]:
        if self.symmetric:
            step = (torch.maximum(-self.least, self.most) / self.high).clamp(min=1e-8)
            return step, torch.zeros_like(step)
        step = ((self.most - self.least) / self.high).clamp(min=1e-8)
        return step, (-self.least / step).round()

    def forward(self, x: Tensor) -> Tensor:
        if self.observing and x.numel():
            dims = [d for d in range(x.dim()) if d != self.axis]
            self.least = torch.minimum(self.least, x.detach().amin(dims, keepdim=True))
            self.most = torch.maximum(self.most, x.detach().amax(dims, keepdim=True))
        if not self.rounding:
            return x
        step, zero = self.grid()
        inside = x.clamp((self.low - zero) * step, (self.high - zero) * step)
        rounded = (((x / step).round() + zero).clamp(self.low, self.high) - zero) * step
        return inside + (rounded - inside).detach()


def _insert(model: nn.Module, bits: int = 8, per_channel: bool = True) -> fx.GraphModule:
    """The stand-in: a quantizer for each layer's input and weight."""
    gm = fx.symbolic_trace(copy.deepcopy(model))
    for number, node in enumerate(list(gm.graph.nodes)):
        layer = gm.get_submodule(node.target) if node.op == "call_module" else None
        if type(layer) not in (nn.Conv2d, nn.Linear):
            continue
        for end, kind in (("x", _Rounder(8, None, False)), ("w", _Rounder(bits, 0 if per_channel else None, True))):
            gm.add_submodule(f"fake_quant_{number}{end}", kind.to(layer.weight.device))
        with gm.graph.inserting_before(node):
            x = gm.graph.call_module(f"fake_quant_{number}x", node.args)
            weight = gm.graph.call_module(f"fake_quant_{number}w", (gm.graph.get_attr(f"{node.target}.weight"),))
            bias = gm.graph.get_attr(f"{node.target}.bias") if layer.bias is not None else None
            conv = (layer.stride, layer.padding, layer.dilation, layer.groups) if type(layer) is nn.Conv2d else ()
            call = gm.graph.call_function(F.conv2d if conv else F.linear, (x, weight, bias, *conv))
        node.replace_all_uses_with(call)
        gm.graph.erase_node(node)
    gm.recompile()
    return gm


# ---------------------------------------------------------------- 15-06.6


def _drop_last(gm: fx.GraphModule) -> fx.GraphModule:
    """Right: a double negation goes."""
    for node in list(gm.graph.nodes):
        if node.target is operator.neg and node.args[0].target is operator.neg:
            node.replace_all_uses_with(node.args[0].args[0])
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _to_method(gm: fx.GraphModule) -> fx.GraphModule:
    """Right: torch.sin becomes a method."""
    for node in gm.graph.nodes:
        if node.target is torch.sin:
            node.op, node.target = "call_method", "sin"
    gm.recompile()
    return gm


def _sin_to_cos(gm: fx.GraphModule) -> fx.GraphModule:
    """Wrong, in the graph that it got."""
    for node in gm.graph.nodes:
        if node.target in (torch.sin, "sin"):
            node.op, node.target = "call_function", torch.cos
    gm.recompile()
    return gm


def _a_bit(gm: fx.GraphModule) -> fx.GraphModule:
    """Wrong by a little."""
    out = next(n for n in gm.graph.nodes if n.op == "output")
    with gm.graph.inserting_before(out):
        new = gm.graph.call_function(torch.mul, (out.args[0][0], 1.001))
    out.args = ((new, *out.args[0][1:]),)
    gm.recompile()
    return gm


def _second(gm: fx.GraphModule) -> fx.GraphModule:
    """Wrong in the second output alone."""
    out = next(n for n in gm.graph.nodes if n.op == "output")
    with gm.graph.inserting_before(out):
        new = gm.graph.call_function(torch.mul, (out.args[0][1], 2))
    out.args = ((out.args[0][0], new),)
    gm.recompile()
    return gm


def _no_dropout(gm: fx.GraphModule) -> fx.GraphModule:
    """Right in evaluation mode alone."""
    for node in list(gm.graph.nodes):
        if node.target == "noise":
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _halved(gm: fx.GraphModule) -> fx.GraphModule:
    """Right values in another dtype."""
    out = next(n for n in gm.graph.nodes if n.op == "output")
    with gm.graph.inserting_before(out):
        new = gm.graph.call_method("double", (out.args[0][0],))
    out.args = ((new, *out.args[0][1:]),)
    gm.recompile()
    return gm


def _raising(gm: fx.GraphModule) -> fx.GraphModule:
    _sin_to_cos(gm)
    raise RuntimeError("a pass that gives up halfway")


def _unsound(gm: fx.GraphModule) -> fx.GraphModule:
    """Fails lint, though it computes the same: two nodes of one name, the first of them unused."""
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    last = next(n for n in gm.graph.nodes if n.target in (torch.sin, "sin"))
    with gm.graph.inserting_before(first):
        unused = gm.graph.call_function(operator.neg, (next(iter(gm.graph.nodes)),))
    unused.name = last.name
    return gm


def _spied(gm: fx.GraphModule) -> fx.GraphModule:
    """Right, and leaves a trace when it runs."""
    out = next(n for n in gm.graph.nodes if n.op == "output")
    with gm.graph.inserting_before(out):
        new = gm.graph.call_function(_spy, (out.args[0][0],))
    out.args = ((new, *out.args[0][1:]),)
    gm.recompile()
    return gm


def _broken(gm: fx.GraphModule) -> fx.GraphModule:
    """Sound for lint; raises when run."""
    for node in gm.graph.nodes:
        if node.target in (torch.sin, "sin"):
            node.op, node.target, node.args = "call_function", torch.reshape, (node.args[0], (7, 11, 13))
    gm.recompile()
    return gm


def _same(gm: fx.GraphModule) -> fx.GraphModule:
    return gm


def _fewer(gm: fx.GraphModule) -> fx.GraphModule:
    """Right in the outputs that are left."""
    out = next(n for n in gm.graph.nodes if n.op == "output")
    out.args = (out.args[0][:1],)
    gm.recompile()
    return gm


def _wider(gm: fx.GraphModule) -> fx.GraphModule:
    """Right values in another shape."""
    out = next(n for n in gm.graph.nodes if n.op == "output")
    with gm.graph.inserting_before(out):
        new = gm.graph.call_method("unsqueeze", (out.args[0][0], 0))
    out.args = ((new, *out.args[0][1:]),)
    gm.recompile()
    return gm


def _doubles(gm: fx.GraphModule) -> fx.GraphModule:
    """Wrong, in the parameters of the module that it got."""
    with torch.no_grad():
        for parameter in gm.parameters():
            parameter.mul_(2)
    return gm


def _forgetful(gm: fx.GraphModule) -> None:
    """Returns nothing."""
    gm.recompile()


def _tidy(gm: fx.GraphModule) -> fx.GraphModule:
    """Right: modules go that nobody calls, and their tensors with them."""
    gm.delete_all_unused_submodules()
    return gm


def _dead_code(gm: fx.GraphModule) -> fx.GraphModule:
    """Wrong where a node that nobody uses writes."""
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def _dead_code_and_modules(gm: fx.GraphModule) -> fx.GraphModule:
    """Wrong where a node that nobody uses writes: what it would write is gone, too."""
    return _tidy(_dead_code(gm))


def _hold_log(trial: Trial, case: str, log: Any, want: list[list[tuple[str, int, bool]]], hint: str = "") -> None:
    """Hold the log of a backend, graph by graph and pass by pass."""
    right = type(log) is list and all(type(one) is list for one in log)
    right = right and all(type(entry) is tuple and len(entry) == 3 for one in log for entry in one)
    form, asked = "a list for each graph, in it (name, nodes, kept) for each pass", "what does the task say of the log?"
    trial.that(f"form of the {case}", right, expected=form, got=repr(log)[:160], hint=asked)
    trial.equal(f"graphs in the {case}", len(log), len(want), hint=asked)
    for found, wanted in zip(log, want, strict=True):
        trial.equal(f"names in the {case}", [entry[0] for entry in found], [entry[0] for entry in wanted], hint=asked)
        for (_, nodes, kept), (name, left, keep) in zip(found, wanted, strict=True):
            trial.equal(f"kept, of {name}, in the {case}", kept, keep, hint=hint)
            trial.equal(f"nodes after {name}, in the {case}", nodes, left, hint=hint)


def _symbolic_size(size: int) -> torch.SymInt:
    """What torch.compile gives a backend for a size that has changed."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return mode.from_tensor(torch.zeros(size)).shape[0]


def _wave(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    return (torch.sin(operator.neg(operator.neg(x))) * 2 + m.scale, x + 1)


@exercise(
    "15-06.6",
    "A backend that trusts no pass",
    points=20,
    demands=10,
    stand_in=lambda: _NoPasses,
    stand_in_name="a backend that runs no pass",
)
def pass_backend(trial: Trial, answer: Any) -> None:
    """`answer(passes)` is a backend."""

    def capture(forward: Callable = _wave) -> fx.GraphModule:
        return fx.symbolic_trace(
            _Forward(forward, scale=nn.Parameter(torch.randn(3)), noise=nn.Dropout(0.5), norm=nn.BatchNorm1d(3))
        )

    x = torch.randn(4, 3)
    backend = answer([_drop_last, _to_method])
    gm = capture()
    want, steps = gm(x), len(gm.graph.nodes)
    with trial.group(
        "passes run in order, each on the result of those before", hint="which graph does the next pass get?"
    ):
        hint = "what may the two arguments be?"
        run = trial.call("called with a GraphModule and a list", lambda: backend(gm, [x]), hint=hint)
        hint, got = "what does the call return?", f"a {type(run).__name__}"
        trial.that("what it returns", callable(run), expected="a callable", got=got, hint=hint)
        trial.equal("outputs", run(x), want)
        right = [("_drop_last", steps - 1, True), ("_to_method", steps - 1, True)]
        hint = "which graph does each pass get, and of which one are the nodes counted?"
        _hold_log(trial, "log of two right passes", backend.log, [right], hint)
        backend(capture(), (x,))
        _hold_log(trial, "log of two graphs", backend.log, [right, right], hint)
        hint = "what is there without a pass, and whose is the log?"
        trial.equal("no passes", (answer([])(capture(), [x])(x)[1], len(answer([]).log)), (x + 1, 0), hint=hint)
        trial.equal("graphs in the log after another object ran", len(backend.log), 2, hint=hint)
        run = answer([_spied, _drop_last])(capture(), [x])
        _GRAD_MODES.clear()
        run(x)
        case, hint = "how often a call runs that the first pass put in", "which graph does the callable run?"
        trial.equal(case, len(_GRAD_MODES), 1, hint=hint)
    cases = {
        "other outputs": (_sin_to_cos, "is the result compared, and what happens to it then?"),
        "outputs that are off by a thousandth": (_a_bit, "how close is close?"),
        "another second output": (_second, "how many outputs are compared?"),
        "another dtype": (_halved, "does your comparison look at dtypes?"),
        "an output less": (_fewer, "how many outputs are compared?"),
        "another shape": (_wider, "does your comparison look at shapes?"),
        "doubled parameters": (_doubles, "which tensors does the pass get?"),
        "a pass that returns nothing": (_forgetful, "what may a pass return?"),
        "a pass that raises": (_raising, "what goes on after an exception?"),
        "a graph that fails lint": (_unsound, "is lint called?"),
        "a result that raises": (_broken, "where can an exception come from?"),
    }
    for label, (bad, hint) in cases.items():
        item = {"a pass that raises": "a pass that raises isn't kept", "a pass that returns nothing": "a pass that raises isn't kept", "a graph that fails lint": "lint is asked",
                "a result that raises": "a result that raises isn't kept"}.get(label, "other outputs aren't kept")  # fmt: skip
        gm = capture()
        want = gm(x)
        backend = answer([bad, _drop_last, _same])
        copied = label in ("other outputs", "doubled parameters", "a pass that raises")
        with (
            trial.group(item, hint=hint, see=1 if copied else None),
            redirect_stderr(io.StringIO()),
        ):  # fx writes the code that raised
            run = backend(gm, [x])
            got, case = run(x), f"of three, the first pass: {label}"
            trial.equal(f"number of outputs {case}", len(got), len(want))
            trial.equal(f"outputs {case}", got, want)
            right = [(bad.__name__, steps, False), ("_drop_last", steps - 1, True), ("_same", steps - 1, True)]
            _hold_log(trial, f"log {case}", backend.log, [right])
    with trial.group("trying runs on copies", see=1, free=True):
        for label, forward in (
            ("an input that is written", lambda m, x: (x.add_(1), x * 2)),
            ("batch norm in training mode", lambda m, x: (m.norm(x), x)),
        ):
            gm, given = capture(forward), x.clone()
            before = _state(gm)
            answer([_same, _drop_last])(gm, [given])
            trial.equal(f"the example input, {label}", given, x)
            trial.equal(f"tensors of the graph, {label}", _state(gm), before)
        given = x.clone().requires_grad_()
        gm = capture(lambda m, x: (x * 2, x))
        answer([_same])(gm, [given])
        trial.equal("requires_grad of the example", (given.requires_grad, given.grad), (True, None))
        gm = capture(lambda m, x: (m.noise(x), torch.bernoulli(x * 0 + 0.5)))
        torch.manual_seed(3)
        state = torch.get_rng_state()
        backend = answer([_same, _drop_last])
        run = backend(gm, [x])
        as_before = torch.equal(torch.get_rng_state(), state)
        trial.that("PyTorch's generator", as_before, expected="the state from before", got="another state", see=2)
    with trial.group("random calls are compared under the same numbers", see=2):
        for entry, name in zip(backend.log[0], ("_same", "_drop_last"), strict=True):
            trial.equal(f"kept, of {name}, which changes nothing random", entry[2], True)
        strict = answer([_no_dropout, _same])
        strict(gm, [x])
        for entry, (name, keep) in zip(strict.log[0], (("_no_dropout", False), ("_same", True)), strict=True):
            trial.equal(f"kept, of {name}, in a graph with a dropout", entry[2], keep)
        torch.manual_seed(4)
        want = gm(x)
        torch.manual_seed(4)
        trial.equal("outputs", run(x), want)
    writing = {
        "an input that is written after its use": lambda m, x: ((y := x * 2), x.add_(1), y)[-1],
        "a buffer that is written": lambda m, x: (m.norm.running_mean.copy_(x.mean(0)), x * 2)[1],
        "batch norm in training mode, its output not used": lambda m, x: (m.norm(x), x * 2)[1],
    }
    with trial.group("the same is written", see=1, hint="what does a trial run leave besides its outputs?"):
        for label, forward in writing.items():
            gm = capture(lambda m, x, forward=forward: (forward(m, x),))
            steps = len(gm.graph.nodes)
            backend = answer([_same, _dead_code, _dead_code_and_modules, _same])
            backend(gm, [x.clone()])
            kept = {"_dead_code": False, "_dead_code_and_modules": False, "_same": True}
            want = [("_same", steps, True), *((name, steps, keep) for name, keep in kept.items())]
            _hold_log(trial, f"log of dead-code removal, {label}", backend.log, [want])
        gm = capture(lambda m, x: ((x * 3).exp(), x + m.scale)[1:])
        gm.add_submodule("spare", nn.Linear(2, 2))
        left = len(gm.graph.nodes) - 2
        backend = answer([_dead_code, _tidy])
        backend(gm, [x.clone()])
        want = [("_dead_code", left, True), ("_tidy", left, True)]
        case, hint = "log where nothing is written, and a module goes that nobody calls", "what has to be the same?"
        _hold_log(trial, case, backend.log, [want], hint)
    hint = "what does the callable do with gradient mode and with its inputs?"
    with trial.group("gradients flow through the callable", hint=hint, free=True):
        gm = capture()
        run = answer([_drop_last])(gm, [x])
        given = x.clone().requires_grad_()
        y = run(given)[0]
        trial.that("the output", y.requires_grad, expected="one that requires a gradient", got="one that doesn't")
        y.sum().backward()
        trial.close("the input's gradient", given.grad, 2 * x.cos())
    with trial.group("inputs that are no tensors are passed on", hint="what else may example_inputs hold?"):
        graph = fx.Graph()
        a, n = graph.placeholder("a"), graph.placeholder("n")
        graph.output((graph.call_function(operator.mul, (a, n)),))
        backend = answer([_same])
        run = backend(fx.GraphModule(nn.Module(), graph), [x, 3])
        trial.equal("outputs for a tensor and a number", run(x, 3), (x * 3,))
        _hold_log(trial, "log for a tensor and a number", backend.log, [[("_same", 4, True)]])
        hint = "what does the task say of symbolic sizes?"
        rows, backend = _symbolic_size(len(x)), answer([_drop_last, _sin_to_cos])
        gm = fx.symbolic_trace(lambda rows, x: (torch.sin(operator.neg(operator.neg(x))).reshape(rows * 3),))
        left = len(gm.graph.nodes) - 1
        with redirect_stderr(io.StringIO()):
            run = backend(gm, [rows, x])
        trial.equal("outputs for a symbolic size and a tensor", run(2, x[:2]), (torch.sin(x[:2]).reshape(6),))
        want = [("_drop_last", left, True), ("_sin_to_cos", left, False)]
        _hold_log(trial, "log for a symbolic size and a tensor", backend.log, [want], hint)
        stays, got = (
            rows.node.maybe_as_int() is None,
            "a fixed number: torch.compile would record a graph for each size",
        )
        trial.that("the size afterwards", stays, expected="one that is symbolic", got=got, hint=hint)


class _NoPasses:
    """The stand-in."""

    def __init__(self, passes: Sequence[Callable]) -> None:
        self.passes, self.log = passes, []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        self.log.append([])
        return gm.forward
