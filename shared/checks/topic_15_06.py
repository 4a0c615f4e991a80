"""Checks of the exercises in 15-06, torch.fx & Graph Transformations."""

import copy
import io
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.optimization import fuse
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

from shared.checks.exercise import exercise
from shared.checks.trial import Trial
from shared.checks.words import raises, snapshot


class _Model(nn.Module):
    """Named parts, and a forward that is given as a function of (self, x)."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def _result(trial: Trial, case: str, action: Callable[[], Any]) -> fx.GraphModule:
    """What an answer returns: a GraphModule with a sound graph and the code of that graph."""
    gm = trial.call("takes any model of the task", action, hint=f"run it on such a model: {case}")
    item = "returns a GraphModule with a sound graph, and the code of that graph"
    known = isinstance(gm, fx.GraphModule)
    trial.needs(item, known, expected="a GraphModule", got=f"a {type(gm).__name__}", hint="what is returned?")
    try:
        gm.graph.lint()
        found = ""
    except Exception as error:
        found = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    trial.needs(item, not found, expected="a graph that passes lint", got=found, hint="which node does lint name?")
    fresh = gm.graph.python_code("self").src == gm.code
    expected = "code that was made from the graph as it is"
    trial.needs(item, fresh, expected=expected, got="code of another graph", hint="what follows the last edit?")
    return gm


def _run(gm: nn.Module, *inputs: Any) -> Any:
    """Outputs on copies of the inputs, with the same random numbers each time; fx's own report of an error is kept
    out of sight."""
    torch.manual_seed(5)
    with redirect_stderr(io.StringIO()), torch.no_grad():
        return copy.deepcopy(gm)(*copy.deepcopy(inputs))


def _calls(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op in ("call_function", "call_method", "call_module")]


def _modes(gm: fx.GraphModule, model: nn.Module) -> list[dict[str, bool]]:
    """Of called modules that both have: in which mode they are, in the result and in the model."""
    called = {node.target for node in _calls(gm) if node.op == "call_module"}
    paths = [path for path, _ in model.named_modules() if path in called]
    return [{path: one.get_submodule(path).training for path in paths} for one in (gm, model)]


# ---- 15-06.1


def _steep(x: Tensor) -> Tensor:
    return x * 3 - 1


@fx.wrap
def relu(x: Tensor) -> Tensor:
    """Somebody's own function of that name."""
    return x * 5


class _OwnReLU(nn.ReLU):
    """Somebody's own class, which is traced into."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) * 2


_RELUS = [  # text, forward, the same with `act` in place of each ReLU, parts
    ("nn.ReLU", lambda m, x: m.act(x) * 2, lambda act, x: act(x) * 2),
    ("one nn.ReLU called twice", lambda m, x: m.act(m.act(x) - 1), lambda act, x: act(act(x) - 1)),
    ("nn.ReLU in a Sequential", lambda m, x: m.deep(x), lambda act, x: act(torch.tanh(x))),
    ("nn.ReLU(inplace=True)", lambda m, x: m.inplace(x * 2), lambda act, x: act(x * 2)),
    ("F.relu", lambda m, x: F.relu(x) + x, lambda act, x: act(x) + x),
    ("F.relu(x, inplace=True)", lambda m, x: F.relu(x * 2, inplace=True), lambda act, x: act(x * 2)),
    ("torch.relu", lambda m, x: torch.relu(x) + x, lambda act, x: act(x) + x),
    ("the method relu", lambda m, x: (x - 1).relu().exp(), lambda act, x: act(x - 1).exp()),
    ("a call that nobody uses", lambda m, x: (x * 3, F.relu(x))[1], lambda act, x: act(x)),
    ("a subclass of nn.ReLU", lambda m, x: m.own(x), lambda act, x: act(x) * 2),
]
_OTHERS = [
    ("nn.ReLU6", lambda m, x: m.six(x)),
    ("nn.LeakyReLU and F.leaky_relu", lambda m, x: m.leaky(F.leaky_relu(x))),
    ("F.relu6", lambda m, x: F.relu6(x)),
    ("a layer that is named relu", lambda m, x: m.relu(x)),
    ("somebody's own function that is named relu", lambda m, x: relu(x)),
    ("the method prelu", lambda m, x: x.prelu(m.slope)),
]


def _with_relus(forward: Callable[[Any, Tensor], Any]) -> nn.Module:
    layers = {"act": nn.ReLU(), "inplace": nn.ReLU(inplace=True), "own": _OwnReLU()}
    deep = nn.Sequential(nn.Tanh(), nn.Sequential(nn.ReLU()), nn.Dropout().eval())
    others = {
        "six": nn.ReLU6(),
        "leaky": nn.LeakyReLU(0.5),
        "relu": nn.GELU(),
        "slope": nn.Parameter(torch.tensor([0.5])),
    }
    return _Model(forward, deep=deep, **layers, **others)


@exercise(
    "15-06.1",
    "Replace one operation, however it is written",
    points=10,
    demands=5,
    stand_in=lambda: _replace_relu,
    stand_in_name="a replace_relu that knows modules and F.relu",
)
def replace_relu(trial: Trial, answer: Any) -> None:
    """`answer(model, new)` gives a GraphModule with `new` in place of each ReLU."""
    x = torch.randn(3, 5)
    same = "computes what the model does with new in place of each ReLU"
    for text, forward, wanted in _RELUS:
        model = _with_relus(forward)
        before = snapshot(model)
        gm = _result(trial, text, lambda model=model: answer(model, _steep))
        with trial.group("model stays as it is", hint="whose modules are changed?", free=True):
            trial.equal(f"modules and tensors, {text}", snapshot(model), before)
        with trial.group(same, hint="print the result's code: what becomes of this ReLU?", see=1):
            trial.close(text, _run(gm, x), wanted(_steep, x))
        with trial.group("each ReLU is a call of new, the input its only argument", hint="read the node's arguments"):
            new = [(len(node.args), node.kwargs) for node in gm.graph.nodes if node.target is _steep]
            wanted_calls: list[None] = []
            wanted(lambda value, calls=wanted_calls: (calls.append(None), value)[1], x)
            trial.equal(text, new, [(1, {})] * len(wanted_calls))
        left = [path for path, module in gm.named_modules() if type(module) is nn.ReLU]
        trial.equal("the result holds no nn.ReLU", left, [], hint="which modules does nobody call?", see=2)
        with trial.group("everything else stays", hint="print the graph before and after"):
            others = len(_calls(fx.symbolic_trace(model))) - len(new)
            trial.equal(f"other calls, {text}", len(_calls(gm)) - len(new), others)
            trial.equal(f"training mode of modules, {text}", *_modes(gm, model))
    with trial.group("everything else stays", hint="which classes and names does your test accept?", see=1):
        for text, forward in _OTHERS:
            model = _with_relus(forward)
            trial.equal(text, _run(answer(model, _steep), x), _run(model, x))


def _replace_relu(model: nn.Module, new: Callable) -> fx.GraphModule:
    """The stand-in: what the lesson needs."""
    gm = fx.symbolic_trace(model)
    for node in gm.graph.nodes:
        if node.target is F.relu or (node.op == "call_module" and isinstance(gm.get_submodule(node.target), nn.ReLU)):
            node.op, node.target, node.args, node.kwargs = "call_function", new, node.args[:1], {}
    gm.recompile()
    return gm


# ---- 15-06.2

_GRAD_MODES: list[bool] = []


@fx.wrap
def _spy(x: Tensor) -> Tensor:
    """Notes each run, and whether gradients are recorded."""
    _GRAD_MODES.append(torch.is_grad_enabled())
    return x * 1


class _Brute(fx.Interpreter):
    """FlopCounterMode around each node."""

    def run(self, *inputs: Any) -> dict[str, int]:
        self.counts: dict[str, int] = {}
        super().run(*inputs)
        return self.counts

    def run_node(self, node: fx.Node) -> Any:
        with FlopCounterMode(display=False) as counter:
            value = super().run_node(node)
        self.counts[node.name] = counter.get_total_flops()
        return value


def _count_flops(model: nn.Module, *inputs: Any) -> dict[str, int]:
    """The reference, and the stand-in."""
    gm = model if isinstance(model, fx.GraphModule) else fx.symbolic_trace(model)
    with torch.no_grad():
        return _Brute(gm).run(*inputs)


def _layer(layer: nn.Module, *shape: int) -> tuple[nn.Module, Tensor]:
    """A model of one layer, and an input."""
    return _Model(lambda m, x: m.layer(x).exp(), layer=layer), torch.randn(shape)


def _product(forward: Callable[[Any, Tensor], Any], other: Sequence[int], *shape: int) -> tuple[nn.Module, Tensor]:
    return _Model(forward, w=torch.randn(*other)), torch.randn(shape)


_FLOPS = {  # demand: cases
    "linear layers and convolutions": {
        "nn.Linear on (2, 3, 4, 5)": lambda: _layer(nn.Linear(5, 7, bias=False), 2, 3, 4, 5),
        "nn.Conv1d": lambda: _layer(nn.Conv1d(3, 4, 5), 2, 3, 11),
        "nn.Conv2d": lambda: _layer(nn.Conv2d(3, 4, (3, 2)), 2, 3, 6, 7),
        "nn.Conv3d": lambda: _layer(nn.Conv3d(2, 3, 2, padding=1), 1, 2, 3, 4, 5),
        "layer norm": lambda: _layer(nn.LayerNorm(6), 2, 6),
    },
    "strides and groups": {
        "groups": lambda: _layer(nn.Conv2d(6, 4, 3, groups=2), 2, 6, 7, 5),
        "depthwise, stride 2": lambda: _layer(nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6), 3, 6, 7, 5),
    },
    "matrix products": {
        "x @ w": lambda: _product(lambda m, x: (x @ m.w).tanh(), (5, 7), 4, 5),
        "w @ x, batched": lambda: _product(lambda m, x: m.w @ x, (7, 5), 2, 3, 5, 4),
        "x @ w, with a size in the graph": lambda: _product(
            lambda m, x: x.reshape(x.shape[0], 6) @ m.w, (6, 3), 4, 2, 3
        ),
        "torch.matmul": lambda: _product(lambda m, x: torch.matmul(x, m.w), (4, 5, 6), 2, 1, 3, 5),
    },
}


@exercise(
    "15-06.2",
    "Count the operations",
    points=15,
    demands=9,
    stand_in=lambda: _count_flops,
    stand_in_name="FlopCounterMode around each node",
)
def count_flops(trial: Trial, answer: Any) -> None:
    """`answer(model, *inputs)` gives a node's name → operations."""

    def counted(counts: dict[str, int]) -> dict[str, int]:
        return {name: count for name, count in counts.items() if count}

    for demand, cases in _FLOPS.items():
        for text, make in cases.items():
            model, x = make()
            got = trial.call("takes any model of the task", lambda model=model, x=x: answer(model, x), hint=text)
            wanted = _count_flops(model, x)
            with trial.group("all nodes are in it, in order", hint="which nodes does run_node see?", see=2):
                trial.equal(text, list(got), list(wanted))
            with trial.group(demand, hint="how long is a dot product, and how many are there?", see=1):
                trial.equal(text, counted(got), counted(wanted))
    x = torch.randn(3, 2, 6)
    model = _Model(lambda m, x: m.fc(m.fc(x)) + m.conv(m.conv(x)), fc=nn.Linear(6, 6), conv=nn.Conv1d(2, 2, 1))
    with trial.group("a layer that is called twice counts at each call", hint="what is the key of your dictionary?"):
        trial.equal("two layers, two calls each", counted(answer(model, x)), counted(_count_flops(model, x)))

    gm = fx.symbolic_trace(_Model(lambda m, x: (x @ m.w).relu() @ m.w, w=torch.randn(6, 6)))
    first = next(node for node in gm.graph.nodes if node.target is operator.matmul)
    first.replace_all_uses_with(first.args[0])
    gm.graph.erase_node(first)
    gm.recompile()
    with trial.group("a GraphModule is used as it is", hint="whose names are these?"):
        trial.equal("one whose graph was edited", counted(answer(gm, x)), counted(_count_flops(gm, x)))

    model = _Model(lambda m, x: m.drop(_spy(m.fc(x))), fc=nn.Linear(6, 1), drop=nn.Dropout(0.0))
    model.fc.eval()
    _GRAD_MODES.clear()
    before = snapshot(model)
    answer(model, x)
    with trial.group("the model stays as it is", hint="what of the model's modules is switched?", free=True):
        trial.equal("a model with modules in both modes", snapshot(model), before)
    trial.equal("the model runs once", len(_GRAD_MODES), 1, hint="how often is it called?")
    with trial.group("no gradients are recorded, and afterwards as before", hint="who switches?", free=True):
        trial.equal("recording while it runs", any(_GRAD_MODES), False)
        trial.equal("recording afterwards", torch.is_grad_enabled(), True)


# ---- 15-06.3


def _structure(node: Any) -> str:
    """A node's whole expression as text: two nodes compute the same if these are the same."""
    if isinstance(node, fx.Node):
        arguments = _structure([list(node.args), sorted(node.kwargs.items())])
        name = node.name if node.op == "placeholder" else node.target
        return f"{node.op}:{name}{arguments}"
    if isinstance(node, tuple | list):
        return f"[{', '.join(map(_structure, node))}]"
    return f"{type(node).__name__} {node!r}"


_MERGED = {
    "a chain": lambda m, x: (x + 1).exp() * 2 - (x + 1).exp() * 2,
    "a difference": lambda m, x: (x + 1).exp() - (x + 1) * 2,
    "a list of nodes": lambda m, x: torch.cat([x + 1, x]) + torch.cat([x + 1, x]) + torch.cat([x, x + 1]),
    "an index with a slice": lambda m, x: x[1:, ::2] + x[1:, ::2] + x[1:, 1::2],
    "operands exchanged": lambda m, x: (x + m.p) / (m.p + x),
    "one of two modules": lambda m, x: m.a(x) + m.a(x) + m.b(x),
    "a module and a method of one name": lambda m, x: m.sin(x) + x.sin(),
    "other functions of one name": lambda m, x: operator.add(x, 1) + torch.add(x, 1) + torch.add(x, 1),
    "keyword arguments": lambda m, x: torch.clamp(x, min=-1) + torch.clamp(x, min=-1) + torch.clamp(x, max=1),
    "parameters": lambda m, x: x * m.p + x * m.p + m.q,
    "dropout in evaluation mode": lambda m, x: m.off(x) + m.off(x),
}
_CONSTANTS = {
    "2 and 2.0": lambda m, x: x.long() * 2 + x.long() * 2.0 + x.long() * 2,
    "1 and True": lambda m, x: (x.long() * 1) / (x * True + 1),
    "2 and 2.0 in keywords": lambda m, x: torch.add(x, x, alpha=2) + torch.add(x, x, alpha=2.0),
}
_RANDOM = {  # text: forward, and how many nodes can be merged
    "torch.rand_like": (lambda m, x: torch.rand_like(x) - torch.rand_like(x) + (x + 1) * (x + 1), 1),
    "dropout in training mode": (lambda m, x: m.on(x) + m.on(x) + (x * 2) * (x * 2), 1),
    "F.dropout": (lambda m, x: F.dropout(x) + F.dropout(x), 0),
}
_WRITES = {
    "add_": lambda m, x: ((a := x + 1), (b := x + 1), a.add_(1), a * b)[-1],
    "a write between two equal calls": lambda m, x: ((y := x * 1), (a := y.sum()), torch.relu_(y), a + y.sum())[-1],
    "batch norm in training mode": lambda m, x: m.norm(x) + m.norm(x),
}


@exercise(
    "15-06.3",
    "Common subexpressions",
    points=15,
    demands=6,
    stand_in=lambda: _cse,
    stand_in_name="torch._functorch.compile_utils.fx_graph_cse",
)
def eliminate_common_subexpressions(trial: Trial, answer: Any) -> None:
    """`answer(gm)` merges nodes that compute the same."""
    x = torch.randn(3, 4)
    parts = {"a": nn.Tanh(), "b": nn.Tanh(), "sin": nn.Tanh(), "p": nn.Parameter(torch.randn(4)), "q": torch.randn(4)}
    parts |= {"off": nn.Dropout(0.5).eval(), "on": nn.Dropout(0.5), "norm": nn.BatchNorm1d(4)}

    def distinct(gm: fx.GraphModule) -> int:
        return len({_structure(node) for node in gm.graph.nodes})

    def hold(demand: str, text: str, gm: fx.GraphModule, left: int, *inputs: Tensor, see: int | None = None) -> None:
        before = [str(gm.graph), snapshot(gm)]
        result = _result(trial, text, lambda: answer(gm))
        with trial.group("gm stays as it is", hint="whose graph is edited?", see=2, free=True):
            trial.equal(f"graph and modules, {text}", [str(gm.graph), snapshot(gm)], before)
        kept = len(result.graph.nodes)
        hint = "which node is gone, and was there another that computes the same?"
        hint = "which two nodes compute the same?" if kept > left else hint
        with trial.group(demand, hint=hint, see=see, free=left == len(gm.graph.nodes)):
            trial.equal(f"nodes left, {text}", kept, left)
        with trial.group("outputs stay the same", hint="print both codes: which line differs?", free=True):
            trial.equal(f"training mode of modules, {text}", *_modes(result, gm))
            if demand == "nodes that compute the same are one":
                trial.equal(text, _run(result, *inputs), _run(gm, *inputs))

    same = "nodes that compute the same are one"
    for demand, cases in ((same, _MERGED), ("constants differ in type, too", _CONSTANTS)):
        for text, forward in cases.items():
            gm = fx.symbolic_trace(_Model(forward, **parts))
            hold(demand, text, gm, distinct(gm), x, see=1)
    graph = fx.Graph()
    graph.output([graph.call_method("sin", (graph.get_attr("p"),)) for _ in range(2)])
    hold(same, "one parameter read twice", fx.GraphModule(_Model(_wave, **parts), graph), 3, see=1)
    for text, (forward, merged) in _RANDOM.items():
        gm = fx.symbolic_trace(_Model(forward, **parts))
        hold("random nodes are kept", text, gm, len(gm.graph.nodes) - merged, x)
    for text, forward in _WRITES.items():
        gm = fx.symbolic_trace(_Model(forward, **parts))
        hold("a graph that writes keeps all of its nodes", text, gm, len(gm.graph.nodes), x)


def _cse(gm: fx.GraphModule) -> fx.GraphModule:
    """The stand-in: what PyTorch has for graphs of operators, which write nothing."""
    return fx.GraphModule(gm, fx_graph_cse(gm.graph))


# ---- 15-06.4

_CONVOLUTIONS = {  # dimensions of an image: convolutions, batch norm
    1: (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d),
    2: (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d),
    3: (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d),
}


def _norm(channels: int, dims: int = 2, **options: Any) -> nn.Module:
    """A batch norm in evaluation mode, with statistics and parameters at random."""
    norm = _CONVOLUTIONS[dims][2](channels, eps=0.1, **options).eval()
    with torch.no_grad():
        for tensor, low in ((norm.running_mean, -1.0), (norm.running_var, 0.3), (norm.weight, 0.4), (norm.bias, -1.0)):
            if tensor is not None:
                tensor.copy_(torch.rand(channels) + low)
    return norm


def _pairs() -> Iterable[tuple[str, nn.Module, Tensor]]:
    """Each kind of convolution with a batch norm behind it, and an input."""
    for dims, (*kinds, _) in _CONVOLUTIONS.items():
        for kind in kinds:
            for groups, bias, affine in ((1, True, True), (2, False, True), (4, True, False)):
                conv = kind(8, 12, 3, stride=2, padding=1, groups=groups, bias=bias)
                text = f"{kind.__name__}, groups={groups}, bias={bias}; affine={affine}"
                model = nn.Sequential(conv, _norm(12, dims, affine=affine)).eval()
                yield text, model, torch.randn(2, 8, *[7, 5, 4][:dims])
    for conv in (
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 6, 3, dilation=2),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.ConvTranspose2d(4, 6, 3, dilation=2),
    ):
        yield str(conv), nn.Sequential(conv, _norm(6)).eval(), torch.randn(2, 4, 6, 5)


_SHARED = {  # text: forward, and how many pairs it has
    "one convolution before two norms": (lambda m, x: m.b2(m.c(m.b(m.c(x)))), 2),
    "one norm behind two convolutions": (lambda m, x: m.b(m.d(m.b(m.c(x)))), 2),
    "one pair twice": (lambda m, x: m.b(m.c(m.b(m.c(x)))), 2),
    "a pair behind a lone batch norm": (lambda m, x: m.b2(m.d(m.b(x))), 1),
    "a convolution with and without a norm": (lambda m, x: m.c(m.b(m.c(x))), 1),
}
_ALONE = {
    "the convolution's output is used twice": lambda m, x: ((y := m.c(x)), m.b(y) + y)[-1],
    "two norms of one output": lambda m, x: ((y := m.c(x)), m.b(y) + m.b2(y))[-1],
    "no running statistics": lambda m, x: m.batch(m.c(x)),
    "a ReLU between the two": lambda m, x: m.b(m.c(x).relu()),
    "a batch norm first": lambda m, x: m.c(m.b(x)),
    "a batch norm of the input": lambda m, x: m.b(x),
}


@exercise(
    "15-06.4",
    "A fusion that is never wrong",
    points=20,
    demands=7,
    stand_in=lambda: fuse,
    stand_in_name="torch.fx.experimental.optimization.fuse",
)
def fuse_conv_bn(trial: Trial, answer: Any) -> None:
    """`answer(model)` folds batch norms into convolutions."""
    hints = {
        "every kind of convolution and batch norm": "take a channel through both: what is multiplied, what is added?",
        "what is called several times is fused at each place": "with which numbers is each place computed?",
        "left alone where it can't be folded": "why can't this one be folded?",
    }

    def hold(demand: str, text: str, model: nn.Module, x: Tensor, pairs: int, see: int | None) -> None:
        before = snapshot(model)
        calls = len(_calls(fx.symbolic_trace(model)))
        gm = _result(trial, text, lambda: answer(model))
        with trial.group("model and its tensors stay as they are", hint="what is written over?", see=1):
            trial.equal(text, snapshot(model), before)
        with trial.group(demand, hint=hints[demand], see=see):
            wanted = _run(model, x)
            trial.close(text, _run(gm, x), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())
            trial.equal(f"calls left, {text}", len(_calls(gm)), calls - pairs)
        with trial.group("no module is left that nobody calls", hint="what does state_dict hold?", see=1):
            called = copy.deepcopy(gm)
            called.delete_all_unused_submodules()
            trial.equal(text, *([path for path, _ in one.named_modules()] for one in (gm, called)))

    every, several, alone = hints
    for text, model, x in _pairs():
        hold(every, text, model, x, 1, 2 if "ranspose" in text else None)

    def layers() -> dict[str, nn.Module]:
        convs = {"c": nn.Conv2d(4, 4, 3, padding=1), "d": nn.Conv2d(4, 4, 1, bias=False)}
        return {**convs, "b": _norm(4), "b2": _norm(4), "batch": nn.BatchNorm2d(4, track_running_stats=False)}

    x = torch.randn(2, 4, 5, 6)
    for text, (forward, pairs) in _SHARED.items():
        hold(several, text, _Model(forward, **layers()).eval(), x, pairs, 1)
    for text, forward in _ALONE.items():
        hold(alone, text, _Model(forward, **layers()).eval(), x, 0, None)
    _rounded_once(trial, answer)
    with trial.group("training mode raises ValueError with the name", hint="whose modes matter, whose name is told?"):
        kinds = (nn.BatchNorm2d, nn.BatchNorm1d, _OwnNorm, partial(nn.BatchNorm2d, track_running_stats=False))
        for name, kind in (("tail", nn.BatchNorm2d), *(("stem.1", kind) for kind in kinds)):
            model = nn.Sequential()
            model.add_module("stem", nn.Sequential(nn.Conv2d(2, 2, 1), kind(2)))
            model.add_module("tail", nn.BatchNorm2d(2))
            model.eval().get_submodule(name).train()
            raises(trial, f"{name} in training mode", lambda model=model: answer(model), ValueError, name)
        model.eval().training = True
        raises(trial, "the model in training mode", lambda: answer(model), ValueError, "model")
        quiet = nn.Sequential(nn.Conv2d(2, 2, 1), _norm(2), nn.Dropout(0.0)).eval()
        quiet[2].train()
        before = snapshot(quiet)
        trial.equal("a dropout in training mode", len(_calls(answer(quiet))), 2)
    with trial.group("model and its tensors stay as they are", hint="whose mode is switched?", see=1):
        trial.equal("a dropout in training mode", snapshot(quiet), before)


def _rounded_once(trial: Trial, answer: Any) -> None:
    """Compare the folded numbers with those made in float64."""
    hint = "in which dtype are the numbers made, and which one do they get?"
    with trial.group("folded in float32 at least, in the convolution's dtype", hint=hint):
        for dtype, other in ((torch.float64,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2):
            conv = nn.Conv2d(40, 40, 1).to(dtype)
            norm = _norm(40).to(other)
            gm = answer(nn.Sequential(conv, norm).eval())
            (new,) = [module for module in gm.modules() if isinstance(module, nn.Conv2d)]
            scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
            bias = (conv.bias.double() - norm.running_mean.double()) * scale + norm.bias.double()
            weight = conv.weight.double() * scale.reshape(-1, 1, 1, 1)
            for name, got, exact in (("weight", new.weight, weight), ("bias", new.bias, bias)):
                case = f"{name}, {dtype} before a batch norm in {other}"
                trial.equal(f"dtype of the {case}", got.dtype, dtype)
                wrong = ((got - exact.to(dtype)).abs() > 1e-12).double().mean().item()
                shown = f"{100 * wrong:.0f} % are others"
                trial.that(case, wrong < 0.04, expected="the exact numbers, rounded once", got=shown)


class _OwnNorm(nn.BatchNorm2d):
    """Somebody's own batch norm."""


# ---- 15-06.5

_LAYERS = {  # text: forward, how many values pass a FakeQuant, how many weights, how many layers
    "two nn.Conv2d on one value": (lambda m, x: m.conv(x) + m.other(x), 1, 2),
    "two nn.Conv2d on two values": (lambda m, x: m.bare(x * 2) + m.other(x.relu()), 2, 2),
    "a value that is used otherwise, too": (lambda m, x: ((y := x * 2), m.conv(y) + y.sum())[-1], 1, 1),
    "uneven strides and dilations": (lambda m, x: m.uneven(x), 1, 1),
    "a value that is a result, too": (lambda m, x: ((y := x * 2), m.conv(y), y)[1:], 1, 1),
    "padding='same'": (lambda m, x: m.same(x), 1, 1),
    "padding_mode='reflect'": (lambda m, x: m.fc(m.mirrored(x)), 1, 1),
    "an nn.Linear called twice": (lambda m, x: m.fc(m.fc(x)), 2, 1),
    "other layers": (lambda m, x: m.norm(m.act(F.linear(x, m.fc.weight))), 0, 0),
}


def _with_layers(forward: Callable[[Any, Tensor], Any]) -> nn.Module:
    return _Model(
        forward,
        conv=nn.Conv2d(4, 6, 3, padding=1, groups=2),
        other=nn.Conv2d(4, 6, 3, padding=1),
        bare=nn.Conv2d(4, 6, 1, bias=False),
        uneven=nn.Conv2d(4, 2, 3, stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        same=nn.Conv2d(4, 2, 3, padding="same"),
        mirrored=nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect"),
        fc=nn.Linear(6, 6),
        act=nn.SiLU(),
        norm=nn.BatchNorm2d(4).eval(),
    )


def _quantizers(gm: fx.GraphModule) -> list[dict[fx.Node, nn.Module]]:
    """The calls of FakeQuants and the FakeQuants: first those on values, then those on weights."""
    found: list[dict[fx.Node, nn.Module]] = [{}, {}]
    for node in _calls(gm):
        if node.op == "call_module" and hasattr(gm.get_submodule(node.target), "rounding"):
            found[node.args[0].op == "get_attr"][node] = gm.get_submodule(node.target)
    return found


def _scaled(gm: fx.GraphModule, x: Tensor) -> Any:
    """The result's outputs if each FakeQuant tripled a value, or halved a weight, instead of rounding it."""
    gm = copy.deepcopy(gm)
    for quantizers, factor in zip(_quantizers(gm), (3.0, 0.5), strict=True):
        for quantizer in set(quantizers.values()):
            quantizer.register_forward_hook(lambda m, a, output, f=factor: output * f)
    return _run(gm, x)


def _wanted(model: nn.Module, x: Tensor) -> Any:
    """The same of the model: each layer to be rounded gives 1.5 times as much before its bias."""
    model = copy.deepcopy(model)

    def scale(layer, args, output):
        bias = 0 if layer.bias is None else layer.bias.reshape(-1, *[1] * (2 if isinstance(layer, nn.Conv2d) else 0))
        return (output - bias) * 1.5 + bias

    for layer in model.modules():
        if type(layer) in (nn.Conv2d, nn.Linear) and layer is not model.mirrored:
            layer.register_forward_hook(scale)
    return _run(model, x)


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
    x = torch.randn(2, 4, 6, 6)
    for text, (forward, *numbers) in _LAYERS.items():
        for bits, per_channel in ((8, True), (4, False)):
            model = _with_layers(forward)
            before = snapshot(model)
            traced = fx.symbolic_trace(model)
            gm = _result(trial, text, lambda m=model, b=bits, p=per_channel: answer(m, b, p))
            found = _quantizers(gm)
            with trial.group("outputs equal the model's as inserted", hint="which arguments has each call?"):
                working = [q for each in found for q in each.values() if q.rounding or not q.observing]
                trial.equal(f"FakeQuants that round or don't observe, {text}", len(working), 0)
                trial.close(text, _run(gm, x), _run(model, x))
            with trial.group("parameters keep their names", hint="which names does the state dict have?", see=2):
                paths = [node.target for node in _calls(traced) if node.op == "call_module"]
                keys = [key for key in model.state_dict() if key.rpartition(".")[0] in paths]
                trial.equal(text, [key for key in keys if key not in gm.state_dict()], [])
            demands = {
                "a value passes one FakeQuant, with 8 bits and one grid": (8, None, False),
                "a weight passes one FakeQuant, symmetric, as asked": (bits, 0 if per_channel else None, True),
            }
            for (demand, kind), number, quantizers in zip(demands.items(), numbers, found, strict=True):
                with trial.group(demand, hint="how many, and with which arguments?", see=1):
                    kinds = [(q.bits, q.axis, q.symmetric) for q in quantizers.values()]
                    trial.equal(f"bits, axis, symmetric; {text}", kinds, [kind] * number)
            with trial.group("all other calls stay", hint="which calls has the graph?"):
                others = len(_calls(gm)) - len(found[0]) - len(found[1])
                trial.equal(f"calls but for the quantizers', {text}", others, len(_calls(traced)))
                trial.equal(f"training mode of modules, {text}", *_modes(gm, model))
            with trial.group("rounded values are what layers see, and nothing else", hint="who uses which node?"):
                trial.close(text, _scaled(gm, x), _wanted(model, x), rtol=1e-4, atol=1e-4)
            with trial.group("model stays as it is, also when the copy is trained", hint="whose parameters are these?"):
                with torch.no_grad():
                    for tensor in gm.state_dict().values():
                        tensor.add_(1)
                trial.equal(text, snapshot(model), before)
    on_meta = answer(nn.Sequential(nn.Linear(3, 2)).to("meta"))
    devices = {buffer.device.type for buffer in on_meta.buffers()}
    trial.equal("on the weight's device", devices, {"meta"}, hint="where are the buffers of a new FakeQuant?")


class _Rounder(nn.Module):
    """What the stand-in inserts: the lesson's FakeQuant in short."""

    def __init__(self, bits: int, axis: int | None, symmetric: bool) -> None:
        super().__init__()
        self.bits, self.axis, self.symmetric = bits, axis, symmetric
        self.observing, self.rounding = True, False
        self.high = 2 ** (bits - symmetric) - 1
        self.low = -self.high if symmetric else 0
        self.register_buffer("least", torch.tensor(0.0))
        self.register_buffer("most", torch.tensor(0.0))

    def grid(self) -> tuple[Tensor, Tensor]:
        reach = torch.maximum(-self.least, self.most) if self.symmetric else self.most - self.least
        step = (reach / self.high).clamp(min=1e-8)
        return step, torch.zeros_like(step) if self.symmetric else (-self.least / step).round()

    def forward(self, x: Tensor) -> Tensor:
        if self.observing:
            dims = [d for d in range(x.dim()) if d != self.axis]
            self.least = torch.minimum(self.least, x.detach().amin(dims, keepdim=True))
            self.most = torch.maximum(self.most, x.detach().amax(dims, keepdim=True))
        if not self.rounding:
            return x
        step, zero = self.grid()
        inside = x.clamp((self.low - zero) * step, (self.high - zero) * step)
        return inside + ((inside / step).round() * step - inside).detach()


def _insert(model: nn.Module, bits: int = 8, per_channel: bool = True) -> fx.GraphModule:
    """The stand-in: a quantizer for each layer's input and weight."""
    gm = fx.symbolic_trace(copy.deepcopy(model))
    for node in list(gm.graph.nodes):
        layer = gm.get_submodule(node.target) if node.op == "call_module" else None
        if type(layer) not in (nn.Conv2d, nn.Linear):
            continue
        with gm.graph.inserting_before(node):
            values = [node.args[0], gm.graph.get_attr(f"{node.target}.weight")]
            for end, kind in enumerate((_Rounder(8, None, False), _Rounder(bits, 0 if per_channel else None, True))):
                gm.add_submodule(f"fake_quant_{end}_{node.name}", kind.to(layer.weight.device))
                values[end] = gm.graph.call_module(f"fake_quant_{end}_{node.name}", (values[end],))
            values.append(gm.graph.get_attr(f"{node.target}.bias") if layer.bias is not None else None)
            conv = (layer.stride, layer.padding, layer.dilation, layer.groups) if type(layer) is nn.Conv2d else ()
            call = gm.graph.call_function(F.conv2d if conv else F.linear, (*values, *conv))
        node.replace_all_uses_with(call)
        gm.graph.erase_node(node)
    gm.recompile()
    return gm


# ---- 15-06.6


def _wave(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """What most of the graphs below compute."""
    return torch.sin(operator.neg(operator.neg(x))) * m.scale, x + 1


def _make_pass(name: str, edit: Callable[[fx.Graph], None]) -> Callable[[fx.GraphModule], fx.GraphModule]:
    """A pass that edits the graph that it gets."""

    def one(gm: fx.GraphModule) -> fx.GraphModule:
        edit(gm.graph)
        gm.recompile()
        return gm

    one.__name__ = name
    return one


def _through(place: int, target: Any, *arguments: Any) -> Callable[[fx.Graph], None]:
    """One of the outputs goes through another call."""

    def edit(graph: fx.Graph) -> None:
        results = list(graph.output_node().args[0])
        with graph.inserting_before(graph.output_node()):
            results[place] = graph.call_function(target, (results[place], *arguments))
        graph.output_node().args = (tuple(results),)

    return edit


def _skip_negations(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=operator.neg):
        if node.args[0].target is operator.neg:
            node.replace_all_uses_with(node.args[0].args[0])
            graph.erase_node(node)


def _sin_to(target: Any, *more: Any) -> Callable[[fx.Graph], None]:
    def edit(graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.sin):
            node.target = target
            node.args += more

    return edit


def _two_of_one_name(graph: fx.Graph) -> None:
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        graph.call_function(operator.neg, first.args).name = first.name


def _no_noise(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_module", target="noise"):
        node.replace_all_uses_with(node.args[0])


def _doubles_parameters(gm: fx.GraphModule) -> fx.GraphModule:
    for parameter in gm.parameters():
        parameter.data.mul_(2)
    return gm


def _raises(gm: fx.GraphModule) -> fx.GraphModule:
    _sin_to(torch.cos)(gm.graph)
    gm.recompile()
    raise RuntimeError("a pass that gives up halfway")


def _dead_code_and_modules(gm: fx.GraphModule) -> fx.GraphModule:
    """What dead code would have written is gone, too."""
    _DEAD_CODE(gm).delete_all_unused_submodules()
    return gm


_SAME = _make_pass("no_change", lambda graph: None)
_SHORTER = _make_pass("no_double_negation", _skip_negations)  # right, a node less
_COSINE = _make_pass("sin_to_cos", _sin_to(torch.cos))
_NOISELESS = _make_pass("no_dropout", _no_noise)
_DEAD_CODE = _make_pass("dead_code", lambda graph: graph.eliminate_dead_code())
_BAD = {  # demand: passes that aren't kept, and the hint
    "other outputs aren't kept": {
        _COSINE: "is the result compared, and what happens to it then?",
        _make_pass("slightly_wrong", _through(0, torch.mul, 1.001)): "how close is close?",
        _make_pass("wrong_second_output", _through(1, torch.mul, 2)): "how many outputs are compared?",
        _make_pass("another_dtype", _through(0, torch.Tensor.double)): "does your comparison look at dtypes?",
        _doubles_parameters: "which tensors does the pass get?",
    },
    "a pass that raises isn't kept": {_raises: "what goes on after an exception?"},
    "lint is asked": {_make_pass("two_of_one_name", _two_of_one_name): "is lint called?"},
    "a result that raises isn't kept": {
        _make_pass("fails_when_run", _sin_to(torch.reshape, (7, 11))): "where can an exception come from?"
    },
}
_LEAVE = {  # graphs that write
    "an input that is written after its use": lambda m, x: ((y := x * 2), x.add_(1), y)[-1],
    "a buffer that is written": lambda m, x: (m.norm.running_mean.copy_(x.mean(0)), x * 2)[1],
    "batch norm in training mode, its output not used": lambda m, x: (m.norm(x), x * 2)[1],
}


@exercise(
    "15-06.6",
    "A backend that trusts no pass",
    points=20,
    demands=9,
    stand_in=lambda: _NoPasses,
    stand_in_name="a backend that runs no pass",
)
def pass_backend(trial: Trial, answer: Any) -> None:
    """`answer(passes)` is a backend."""
    x = torch.randn(4, 3)

    def traced(forward: Callable[[Any, Tensor], Any] = _wave) -> fx.GraphModule:
        parts = {"scale": nn.Parameter(torch.randn(3)), "noise": nn.Dropout(0.5), "norm": nn.BatchNorm1d(3)}
        return fx.symbolic_trace(_Model(forward, **parts))

    def hold(case: str, gm: fx.GraphModule, inputs: list[Any], expected: list[tuple], hint: str = "") -> Callable:
        """Run a backend, and compare its log with (pass, nodes fewer than before, kept)."""
        nodes = len(gm.graph.nodes)
        backend = answer([one for one, _, _ in expected])
        with redirect_stderr(io.StringIO()):  # fx writes the code that raised
            run = backend(gm, inputs)
        found = [[f"{name}, {left} nodes, kept: {kept}" for name, left, kept in entries] for entries in backend.log]
        wanted = [f"{one.__name__}, {nodes - fewer} nodes, kept: {kept}" for one, fewer, kept in expected]
        trial.equal(f"log, {case}", found, [wanted], hint=hint)
        return run

    with trial.group("passes run in order, each on the result of those before", hint="which graph goes on?"):
        right = [(_SAME, 0, True), (_SHORTER, 1, True), (_SHORTER, 1, True)]
        gm = traced()
        trial.equal("outputs", hold("three right passes", gm, [x], right)(x), gm(x))
        run = answer([_make_pass("spy", _through(0, _spy))])(traced(), [x])
        _GRAD_MODES.clear()
        run(x)
        trial.equal("how often a call runs that a pass has put in", len(_GRAD_MODES), 1)
        backend = answer([_SAME])
        for _ in range(2):
            backend(traced(), (x,))
        trial.equal("lists in the log of two graphs", [len(entries) for entries in backend.log], [1, 1])
    for demand, passes in _BAD.items():
        for bad, hint in passes.items():
            copied = bad in (_COSINE, _doubles_parameters, _raises)
            with trial.group(demand, hint=hint, see=1 if copied else None):
                gm = traced()
                wanted = gm(x)
                expected = [(bad, 0, False), (_SHORTER, 1, True), (_SAME, 1, True)]
                run = hold(f"the first pass is {bad.__name__}", gm, [x], expected)
                trial.equal(f"outputs, the first pass is {bad.__name__}", run(x), wanted)
    with trial.group("trying runs on copies", see=1, free=True):
        for text, forward in _LEAVE.items():
            gm = traced(forward)
            given = x.clone()
            before = snapshot(gm)
            answer([_SAME, _SAME])(gm, [given])
            trial.equal(f"the example input, {text}", given, x)
            trial.equal(f"the graph's tensors, {text}", snapshot(gm), before)
        gm = traced(lambda m, x: (m.noise(x), torch.bernoulli(x * 0 + 0.5)))
        state = torch.get_rng_state()
        answer([_SAME])(gm, [x])
        as_before = torch.equal(torch.get_rng_state(), state)
        trial.that("PyTorch's random state", as_before, expected="the state from before", got="another", see=2)
    with trial.group("random calls are compared under the same numbers", see=2):
        hold("a graph with dropout", gm, [x], [(_SAME, 0, True), (_NOISELESS, 0, False), (_SAME, 0, True)])
    hint = "what does a trial run leave besides its outputs?"
    with trial.group("the same is written", see=1, hint=hint):
        for text, forward in _LEAVE.items():
            expected = [(_SAME, 0, True), (_DEAD_CODE, 0, False), (_dead_code_and_modules, 0, False)]
            hold(text, traced(lambda m, x, f=forward: (f(m, x),)), [x.clone()], expected)
        gm = traced(lambda m, x: ((x * 3).exp(), x + m.scale)[1:])
        gm.add_submodule("spare", nn.Linear(2, 2))
        hint = "a module that nobody calls is gone, and nothing is written: what has to be the same?"
        hold("nothing is written", gm, [x.clone()], [(_dead_code_and_modules, 2, True)], hint)
    with trial.group("symbolic sizes are tried as numbers", hint="what does the task say of symbolic sizes?"):
        rows = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.zeros(4)).shape[0]
        gm = fx.symbolic_trace(lambda rows, x: (torch.sin(operator.neg(operator.neg(x))).reshape(rows * 3),))
        expected = [(_SHORTER, 1, True), (_COSINE, 1, False)]
        run = hold("a size and a tensor", gm, [rows, x], expected)
        trial.equal("outputs for another size", run(2, x[:2]), (torch.sin(x[:2]).reshape(6),))
        fixed = rows.node.maybe_as_int() is not None
        trial.that("the size afterwards", not fixed, expected="one that is symbolic", got="a fixed number")


class _NoPasses:
    """The stand-in."""

    def __init__(self, passes: Sequence[Callable]) -> None:
        self.passes = passes
        self.log: list[list[tuple[str, int, bool]]] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        self.log.append([])
        return gm.forward
