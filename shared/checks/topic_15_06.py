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
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.flop_counter import FlopCounterMode

from shared.checks.exercise import exercise
from shared.checks.trial import Trial
from shared.checks.words import raises, snapshot, unchanged


class _Model(nn.Module):
    """Named parts, and a forward that is given as a function of (self, x)."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def _result(trial: Trial, case: str, action: Callable[[], Any]) -> fx.GraphModule:
    """What an answer returns: a GraphModule with the code of its graph."""
    gm = trial.call("takes any model of the task", action, hint=f"run it on such a model: {case}")
    item = "returns a GraphModule with the code of its graph"
    known = isinstance(gm, fx.GraphModule)
    trial.needs(item, known, expected="a GraphModule", got=f"a {type(gm).__name__}", hint="what is returned?")
    fresh = gm.graph.python_code("self").src == gm.code
    expected = "code that was made from the graph as it is"
    trial.needs(item, fresh, expected=expected, got="code of another graph", hint="what follows the last edit?")
    return gm


def _run(gm: nn.Module, x: Tensor) -> Any:
    """Outputs on copies, with the same random numbers each time; fx's own report of an error is kept out of sight."""
    torch.manual_seed(5)
    with redirect_stderr(io.StringIO()), torch.no_grad():
        return copy.deepcopy(gm)(x.clone())


def _calls(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op in ("call_function", "call_method", "call_module")]


# ---- 15-06.1

_RELUS = {
    "nn.ReLU": lambda m, x: m.act(x),
    "nn.ReLU(inplace=True) in a Sequential": lambda m, x: m.deep(x),
    "F.relu": lambda m, x: F.relu(x),
    "F.relu(x, inplace=True)": lambda m, x: F.relu(x, inplace=True),
    "torch.relu": lambda m, x: torch.relu(x),
    "the method relu": lambda m, x: x.relu(),
}


def _steep(x: Tensor) -> Tensor:
    return x * 3 - 1


def _twice(act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return act(act(x * 2) - 1).tanh()


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
    for text, relu in _RELUS.items():
        norm = nn.BatchNorm1d(5).eval()
        layers = {"act": nn.ReLU(), "deep": nn.Sequential(nn.ReLU(inplace=True)), "norm": norm}
        model = _Model(lambda m, x, relu=relu: m.norm(_twice(partial(relu, m), x)), **layers)
        before = snapshot(model)
        gm = _result(trial, text, partial(answer, model, _steep))
        with trial.group("model stays as it is", hint="whose modules are changed?", free=True):
            trial.equal(f"modules and tensors, {text}", snapshot(model), before)
        same = "computes what the model does with new in place of each ReLU"
        with trial.group(same, hint="print the result's code: what becomes of this ReLU?", see=1):
            trial.close(text, _run(gm, x), _run(norm, _twice(_steep, x)))
        with trial.group("each ReLU is a call of new, the input its only argument", hint="read the node's arguments"):
            new = [(len(node.args), node.kwargs) for node in _calls(gm) if node.target is _steep]
            trial.equal(text, new, [(1, {})] * 2)
        left = [path for path, module in gm.named_modules() if type(module) is nn.ReLU]
        trial.equal("the result holds no nn.ReLU", left, [], hint="which modules does nobody call?", see=2)
        with trial.group("everything else stays", hint="print the graph before and after"):
            trial.equal(f"number of calls, {text}", len(_calls(gm)), len(_calls(fx.symbolic_trace(model))))
    model = _Model(lambda m, x: m.relu(m.six(F.leaky_relu(x))), relu=nn.GELU(), six=nn.ReLU6())
    with trial.group("everything else stays", hint="which classes and names does your test accept?", see=1):
        text = "F.leaky_relu, nn.ReLU6 and a layer that is named relu"
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


@exercise(
    "15-06.2",
    "Count the operations",
    points=15,
    demands=6,
    stand_in=lambda: _count_flops,
    stand_in_name="FlopCounterMode around each node",
)
def count_flops(trial: Trial, answer: Any) -> None:
    """`answer(model, *inputs)` gives a node's name → operations."""
    layers, products = "linear layers and convolutions", "matrix products"

    def counted(counts: dict[str, int]) -> dict[str, int]:
        return {name: count for name, count in counts.items() if count}

    def product(forward: Callable[[Any, Tensor], Any], *shape: int) -> nn.Module:
        return _Model(forward, w=nn.Parameter(torch.randn(shape)))

    strided = nn.Conv2d(6, 4, (3, 2), stride=2, padding=1, groups=2)
    for demand, text, model, shape in (
        (layers, "nn.Linear on (2, 3, 4, 5)", nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh()), (2, 3, 4, 5)),
        (layers, "nn.Conv1d", nn.Sequential(nn.Conv1d(3, 4, 5)), (2, 3, 11)),
        (layers, "nn.Conv2d with stride and groups", nn.Sequential(strided), (2, 6, 7, 5)),
        (layers, "nn.Conv3d", nn.Sequential(nn.Conv3d(2, 3, 2)), (1, 2, 3, 4, 5)),
        (layers, "a layer that is called twice", _Model(lambda m, x: m.fc(m.fc(x)), fc=nn.Linear(6, 6)), (2, 6)),
        (layers, "layer norm", nn.Sequential(nn.LayerNorm(6)), (2, 6)),
        (products, "x @ w, with a size", product(lambda m, x: x.reshape(x.shape[0], 6) @ m.w, 6, 3), (4, 2, 3)),
        (products, "w.matmul(x), batched", product(lambda m, x: m.w.matmul(x), 7, 5), (2, 3, 5, 4)),
        (products, "torch.matmul(x, w)", product(lambda m, x: torch.matmul(x, m.w), 4, 5, 6), (2, 1, 3, 5)),
    ):
        x = torch.randn(shape)
        got = trial.call("takes any model of the task", partial(answer, model, x), hint=text)
        wanted = _count_flops(model, x)
        with trial.group("all nodes are in it", hint="which nodes does run_node see?", see=2):
            trial.equal(text, sorted(got), sorted(wanted))
        with trial.group(demand, hint="how long is a dot product, and how many are there?", see=1):
            trial.equal(text, counted(got), counted(wanted))

    x = torch.randn(3, 6)
    model = nn.Sequential(nn.Linear(6, 1), nn.Dropout(0.0))
    model[0].eval()
    recorded = []
    model[0].register_forward_hook(lambda *_: recorded.append(torch.is_grad_enabled()))
    hint = "what of the model's modules is switched?"
    with trial.group("the model stays as it is", hint=hint, free=True), unchanged(trial, "in both modes", model):
        answer(model, x)
    gradients = {"in the run": any(recorded), "after it": torch.is_grad_enabled()}
    hint = "who switches that off, and on again?"
    trial.equal("no gradients are recorded", gradients, {"in the run": False, "after it": True}, hint=hint, free=True)

    gm = fx.symbolic_trace(model)
    next(iter(gm.graph.find_nodes(op="call_module", target="0"))).name = "renamed"
    gm.recompile()
    with trial.group("a GraphModule is used as it is", hint="whose names are these?"):
        trial.equal("one with a node that was renamed", counted(answer(gm, x)), counted(_count_flops(gm, x)))


# ---- 15-06.3

_REPEATED = {  # demand: text: forward, and how many nodes are merged
    "nodes that compute the same are one": {
        "a chain": (lambda m, x: (x + 1).exp() * 2 - (x + 1).exp() * 2, 3),
        "x + 1 - x, x - (x + 1), torch.add(x, 1)": (lambda m, x: (x + 1 - x) * (x - (x + 1)) * torch.add(x, 1), 1),
        "a list of nodes": (lambda m, x: torch.cat([x + 1, x]) + torch.cat([x + 1, x]) + torch.cat([x, x + 1]), 3),
        "an index with a slice": (lambda m, x: x[1:, ::2] + x[1:, ::2] + x[1:, 1::2], 1),
        "one of two modules": (lambda m, x: m.a(x) + m.a(x) + m.b(x), 1),
        "keyword arguments": (lambda m, x: x.clamp(min=-1) + x.clamp(min=-1) + x.clamp(max=1), 1),
        "a tensor of the module": (lambda m, x: x * m.scale + x * m.scale, 2),
    },
    "constants differ in type, too": {
        "2 and 2.0": (lambda m, x: x.long() * 2 + x.long() * 2.0 + x.long() * 2, 3),
        "2 and 2.0 as keywords": (lambda m, x: x.add(x, alpha=2) + x.add(x, alpha=2.0) + x.add(x, alpha=2), 1),
    },
    "random nodes are kept": {
        "torch.rand_like": (lambda m, x: torch.rand_like(x) - torch.rand_like(x) + (x + 1) * (x + 1), 1),
        "dropout in training mode": (lambda m, x: m.drop(x) + m.drop(x) + (x * 2) * (x * 2), 1),
    },
    "a graph that writes keeps all of its nodes": {
        "add_": (lambda m, x: ((a := x + 1), (b := x + 1), a.add_(1), a * b)[-1], 0),
        "batch norm in training mode": (lambda m, x: m.norm(x) + m.norm(x), 0),
    },
}


@exercise(
    "15-06.3",
    "Common subexpressions",
    points=15,
    demands=5,
    stand_in=lambda: _cse,
    stand_in_name="torch._functorch.compile_utils.fx_graph_cse",
)
def eliminate_common_subexpressions(trial: Trial, answer: Any) -> None:
    """`answer(gm)` merges nodes that compute the same."""
    x = torch.randn(3, 4)
    parts = {"a": nn.Tanh(), "b": nn.Tanh(), "drop": nn.Dropout(0.5), "norm": nn.BatchNorm1d(4), "scale": x[0]}
    for demand, cases in _REPEATED.items():
        for text, (forward, merged) in cases.items():
            gm = fx.symbolic_trace(_Model(forward, **parts))
            before = [str(gm.graph), snapshot(gm)]
            left = len(gm.graph.nodes) - merged
            result = _result(trial, text, partial(answer, gm))
            with trial.group("gm stays as it is", hint="whose graph is edited?", see=2, free=True):
                trial.equal(f"its graph and modules, {text}", [str(gm.graph), snapshot(gm)], before)
            kept = len(result.graph.nodes)
            hint = "which node is gone, and was there another with its target and arguments?"
            if kept > left:
                hint = "which two nodes compute the same?"
            with trial.group(demand, hint=hint, see=1 if merged else None, free=merged == 0):
                trial.equal(f"nodes left, {text}", kept, left)
                trial.equal(f"outputs, {text}", _run(result, x), _run(gm, x))


def _cse(gm: fx.GraphModule) -> fx.GraphModule:
    """The stand-in: what PyTorch has for graphs of operators, which write nothing."""
    return fx.GraphModule(gm, fx_graph_cse(gm.graph))


# ---- 15-06.4

_CONVOLUTIONS = {  # dimensions of an image: convolutions, batch norm
    1: (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d),
    2: (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d),
    3: (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d),
}


def _norm(channels: int, dims: int = 2, affine: bool = True) -> nn.Module:
    """A batch norm in evaluation mode, with statistics and parameters at random."""
    norm = _CONVOLUTIONS[dims][2](channels, eps=0.1, affine=affine).eval()
    with torch.no_grad():
        for tensor, low in ((norm.running_mean, -1.0), (norm.running_var, 0.3), (norm.weight, 0.4), (norm.bias, -1.0)):
            if tensor is not None:
                tensor.copy_(torch.rand(channels) + low)
    return norm


def _pairs() -> Iterable[tuple[str, nn.Module, Tensor]]:
    """Each kind of convolution with a batch norm behind it, and an input."""
    for dims, (*kinds, _) in _CONVOLUTIONS.items():
        for kind in kinds:
            for groups, more in ((1, True), (2, False)):
                conv = kind(8, 12, 3, stride=2, padding=1, dilation=2, groups=groups, bias=more)
                text = f"{kind.__name__}, groups={groups}, bias={more}; affine={more}"
                yield text, nn.Sequential(conv, _norm(12, dims, more)).eval(), torch.randn(2, 8, *[7, 5, 4][:dims])


_SHARED = {  # text: forward, and how many pairs it has
    "one convolution before two norms": (lambda m, x: m.b2(m.c(m.b(m.c(x)))), 2),
    "one norm behind two convolutions": (lambda m, x: m.b(m.d(m.b(m.c(x)))), 2),
    "one pair twice": (lambda m, x: m.b(m.c(m.b(m.c(x)))), 2),
    "a pair behind a lone batch norm": (lambda m, x: m.b2(m.d(m.b(x))), 1),
    "a convolution with and without a norm": (lambda m, x: m.c(m.b(m.c(x))), 1),
}
_ALONE = {
    "the convolution's output is used twice": lambda m, x: ((y := m.c(x)), m.b(y) + y)[-1],
    "no running statistics": lambda m, x: m.batch(m.c(x)),
    "a ReLU between the two": lambda m, x: m.b(m.c(x).relu()),
    "a batch norm first": lambda m, x: m.c(m.b(x)),
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

    def hold(demand: str, text: str, model: nn.Module, x: Tensor, pairs: int, see: int | None = None) -> None:
        before = snapshot(model)
        gm = _result(trial, text, partial(answer, model))
        with trial.group("model and its tensors stay as they are", hint="what is written over?", see=1):
            trial.equal(text, snapshot(model), before)
        with trial.group(demand, hint=hints[demand], see=see):
            wanted = _run(model, x)
            trial.close(text, _run(gm, x), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())
            trial.equal(f"calls left, {text}", len(_calls(gm)), len(_calls(fx.symbolic_trace(model))) - pairs)
        with trial.group("no module is left that nobody calls", hint="what does state_dict hold?", see=1):
            called = copy.deepcopy(gm)
            called.delete_all_unused_submodules()
            trial.equal(text, *([path for path, _ in one.named_modules()] for one in (gm, called)))

    every, several, alone = hints
    for text, model, x in _pairs():
        hold(every, text, model, x, 1, see=2 if "ranspose" in text else None)

    convs = {"c": nn.Conv2d(4, 4, 3, padding=1), "d": nn.Conv2d(4, 4, 1, bias=False)}
    layers = {**convs, "b": _norm(4), "b2": _norm(4), "batch": nn.BatchNorm2d(4, track_running_stats=False)}
    x = torch.randn(2, 4, 5, 6)
    for text, (forward, pairs) in _SHARED.items():
        hold(several, text, _Model(forward, **layers).eval(), x, pairs, see=1)
    for text, forward in _ALONE.items():
        hold(alone, text, _Model(forward, **layers).eval(), x, 0)

    hint = "in which dtype are the numbers made, and which one do they get?"
    with trial.group("folded in float32 at least, in the convolution's dtype", hint=hint):
        for dtype, other in ((torch.float64,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2):
            model = nn.Sequential(nn.Conv2d(40, 40, 1).to(dtype), _norm(40).to(other)).eval()
            exact = fuse_conv_bn_eval(*copy.deepcopy(model).double())
            (new,) = [module for module in answer(model).modules() if isinstance(module, nn.Conv2d)]
            for name in ("weight", "bias"):
                case = f"{name}, {dtype} before a batch norm in {other}"
                got, wanted = getattr(new, name), getattr(exact, name).to(dtype)
                trial.equal(f"dtype of the {case}", got.dtype, dtype)
                wrong = ((got - wanted).abs() > 1e-12).double().mean().item()
                shown = f"{100 * wrong:.0f} % are others"
                trial.that(case, wrong < 0.04, expected="the exact numbers, rounded once", got=shown)

    with trial.group("training mode raises ValueError with the name", hint="whose modes matter, whose name is told?"):
        stem = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
        model = _Model(lambda m, x: m.tail(m.stem(x)), stem=stem, tail=nn.BatchNorm2d(2))
        for name in ("stem.1", "tail"):
            model.eval().get_submodule(name).train()
            raises(trial, f"{name} in training mode", partial(answer, model), ValueError, name)
        model.eval().training = True
        raises(trial, "the model in training mode", partial(answer, model), ValueError, "model")
    model = nn.Sequential(nn.Dropout(0.0), nn.BatchNorm2d(2)).eval()
    model[0].train()
    same = "model and its tensors stay as they are"
    with trial.group(same, hint="whose mode is switched?"), unchanged(trial, "a dropout in training mode", model):
        answer(model)


# ---- 15-06.5

_LAYERS = {  # text: forward, how many values pass a FakeQuant, how many weights
    "two nn.Conv2d on one value": (lambda m, x: m.conv(x) + m.other(x), 1, 2),
    "two nn.Conv2d on two values": (lambda m, x: m.bare(x * 2) + m.other(x.relu()), 2, 2),
    "a value that is used otherwise, too": (lambda m, x: ((y := x * 2), m.uneven(y) + y.sum())[-1], 1, 1),
    "padding_mode='reflect'": (lambda m, x: m.fc(m.mirrored(x)), 1, 1),
    "an nn.Linear called twice, and other layers": (lambda m, x: m.fc(m.act(m.norm(m.fc(x)))), 2, 1),
}


def _with_layers(forward: Callable[[Any, Tensor], Any]) -> nn.Module:
    return _Model(
        forward,
        conv=nn.Conv2d(4, 6, 3, padding=1, groups=2),
        other=nn.Conv2d(4, 6, 3, padding=1),
        bare=nn.Conv2d(4, 6, 1, bias=False),
        uneven=nn.Conv2d(4, 2, 3, stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
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


@exercise(
    "15-06.5",
    "A pass that inserts quantizers",
    points=20,
    demands=6,
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
            gm = _result(trial, text, partial(answer, model, bits, per_channel))
            with trial.group("outputs equal the model's as inserted", hint="which arguments has each call?"):
                trial.close(text, _run(gm, x), _run(model, x))
            found = _quantizers(gm)
            demands = {
                "a value passes one FakeQuant, with 8 bits and one grid": (8, None, False, True),
                "a weight passes one FakeQuant, symmetric, as asked": (bits, 0 if per_channel else None, True, True),
            }
            for (demand, kind), number, quantizers in zip(demands.items(), numbers, found, strict=True):
                with trial.group(demand, hint="how many, and with which arguments?", see=1):
                    kinds = [(q.bits, q.axis, q.symmetric, q.observing) for q in quantizers.values()]
                    trial.equal(f"bits, axis, symmetric, observing; {text}", kinds, [kind] * number)
            with trial.group("rounded values are what layers see, and nothing else", hint="who uses which node?"):
                quantized = {*found[0], *found[1]}
                layers = [node for node in _calls(gm) if node.target in (F.conv2d, F.linear)]
                seen = [len(quantized.intersection(node.all_input_nodes)) for node in layers]
                trial.equal(f"rounded arguments of F.conv2d and F.linear, {text}", seen, [2] * len(layers))
                others = [str(user) for node in quantized for user in node.users if user not in layers]
                trial.equal(f"other calls with a rounded argument, {text}", others, [])
                calls = len(_calls(gm)) - len(quantized)
                trial.equal(f"calls without the FakeQuants', {text}", calls, len(_calls(fx.symbolic_trace(model))))
            with trial.group("model stays as it is, also when the copy is trained", hint="whose parameters are these?"):
                with torch.no_grad():
                    for parameter in gm.parameters():
                        parameter.add_(1)
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


def _nearly_sin(x: Tensor) -> Tensor:
    """Close enough to be kept, and yet told from torch.sin."""
    return torch.sin(x) * (1 + 1e-6)


def _roughly_sin(x: Tensor) -> Tensor:
    return torch.sin(x) * 1.001


def _sin_in_float64(x: Tensor) -> Tensor:
    return torch.sin(x.double())


def _make_pass(name: str, edit: Callable[[fx.Graph], None]) -> Callable[[fx.GraphModule], fx.GraphModule]:
    """A pass that edits the graph that it gets."""

    def one(gm: fx.GraphModule) -> fx.GraphModule:
        edit(gm.graph)
        gm.recompile()
        return gm

    one.__name__ = name
    return one


def _sin_to(target: Callable, graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=torch.sin):
        node.target = target


def _skip_negations(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=operator.neg):
        if node.args[0].target is operator.neg:
            node.replace_all_uses_with(node.args[0].args[0])
            graph.erase_node(node)


def _two_of_one_name(graph: fx.Graph) -> None:
    """The graph computes the same: each negation is used by the next node only."""
    first, second = graph.find_nodes(op="call_function", target=operator.neg)
    second.name = first.name


def _doubles_parameters(gm: fx.GraphModule) -> fx.GraphModule:
    for parameter in gm.parameters():
        parameter.data.mul_(2)
    return gm


def _raises(gm: fx.GraphModule) -> fx.GraphModule:
    _ROUGHLY(gm)
    raise RuntimeError("a pass that gives up halfway")


def _dead_code(gm: fx.GraphModule) -> fx.GraphModule:
    """What dead code would have written is gone, too."""
    gm.graph.eliminate_dead_code()
    gm.delete_all_unused_submodules()
    gm.recompile()
    return gm


_SAME = _make_pass("no_change", lambda graph: None)
_SHORTER = _make_pass("no_double_negation", _skip_negations)  # right, a node less
_NEARLY = _make_pass("nearly_sin", partial(_sin_to, _nearly_sin))
_ROUGHLY = _make_pass("roughly_sin", partial(_sin_to, _roughly_sin))
_WIDE = _make_pass("sin_in_float64", partial(_sin_to, _sin_in_float64))
_NO_RUN = _make_pass("sin_to_inverse", partial(_sin_to, torch.linalg.inv))  # of a matrix that isn't square
_BAD = (  # demand, a pass that isn't kept, hints
    ("other outputs aren't kept", _ROUGHLY, "how closely is the result compared, and what follows?", 1),
    ("other outputs aren't kept", _WIDE, "what does assert_close compare besides numbers?", None),
    ("other outputs aren't kept", _doubles_parameters, "which tensors does the pass get?", 1),
    ("what raises isn't kept", _raises, "what goes on after an exception?", 1),
    ("what raises isn't kept", _NO_RUN, "where can an exception come from?", None),
    ("lint is asked", _make_pass("two_of_one_name", _two_of_one_name), "is lint called?", None),
)
_LEAVE = {  # graphs that write
    "an input that is written after its use": lambda m, x: ((y := x * 2), x.add_(1), y)[-1],
    "batch norm in training mode, its output not used": lambda m, x: (m.norm(x), x * 2)[1],
}


@exercise(
    "15-06.6",
    "A backend that trusts no pass",
    points=20,
    demands=8,
    stand_in=lambda: _NoPasses,
    stand_in_name="a backend that runs no pass",
)
def pass_backend(trial: Trial, answer: Any) -> None:
    """`answer(passes)` is a backend."""
    x = torch.randn(4, 3)

    def traced(forward: Callable[[Any, Tensor], Any] = _wave) -> fx.GraphModule:
        return fx.symbolic_trace(_Model(forward, scale=nn.Parameter(torch.randn(3)), norm=nn.BatchNorm1d(3)))

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
        gm = traced()
        run = hold("three right passes", gm, [x], [(_SAME, 0, True), (_SHORTER, 1, True), (_NEARLY, 1, True)])
        trial.equal("outputs of the graph kept last", run(x), (_nearly_sin(x) * gm.scale, x + 1))
        backend = answer([_SAME])
        for _ in range(2):
            backend(traced(), (x,))
        trial.equal("lists in the log of two graphs", [len(entries) for entries in backend.log], [1, 1])
    for demand, bad, hint, see in _BAD:
        with trial.group(demand, hint=hint, see=see):
            gm = traced()
            wanted = gm(x)
            expected = [(bad, 0, False), (_SHORTER, 1, True), (bad, 1, False)]
            run = hold(f"the first and the last pass are {bad.__name__}", gm, [x], expected)
            trial.equal(f"outputs, the first and the last pass are {bad.__name__}", run(x), wanted)
    for text, forward in _LEAVE.items():
        gm = traced(forward)
        given = x.clone()
        with trial.group("trying runs on copies", see=1, free=True), unchanged(trial, text, gm, given):
            answer([_SAME])(gm, [given])
        with trial.group("the same is written", see=1, hint="what does a trial run leave besides its outputs?"):
            hold(text, gm, [x.clone()], [(_SAME, 0, True), (_dead_code, 0, False)])
    gm = traced(lambda m, x: x * m.scale)
    gm.add_submodule("spare", nn.Linear(2, 2))
    hint = "a module that nobody calls is gone, and nothing is written: what has to be the same?"
    with trial.group("the same is written", see=1, hint=hint):
        hold("nothing is written", gm, [x], [(_dead_code, 0, True)])
    gm = traced(lambda m, x: F.dropout(x))
    state = torch.get_rng_state()
    with trial.group("random calls are compared under the same numbers", see=2):
        hold("a graph with dropout", gm, [x], [(_SAME, 0, True)])
    with trial.group("trying runs on copies", see=2, free=True):
        trial.equal("PyTorch's random state", torch.get_rng_state(), state)
    with trial.group("symbolic sizes are tried as numbers", hint="what does the task say of symbolic sizes?"):
        rows = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.zeros(4)).shape[0]
        gm = fx.symbolic_trace(lambda rows, x: x.reshape(rows * 3))
        hold("a size and a tensor", gm, [rows, x], [(_SAME, 0, True)])
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
