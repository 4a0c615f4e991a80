"""Checks of the exercises in 15-01, Custom Autograd Functions & Hooks."""

import copy
import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import thread_time
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import Node, get_gradient_edge

from shared.checks.exercise import exercise
from shared.checks.trial import Trial
from shared.checks.words import Sample, derived, outcome, raises, samples, snapshot


def _hooks(model: nn.Module) -> dict[str, Any]:
    """Names of a model's modules → the hooks on each."""
    return {name: module["hooks"] for name, module in snapshot(model).items()}


# ---- 15-01.1


def _nodes(loss: Tensor) -> list[Node]:
    """Every node behind a loss."""
    found = [loss.grad_fn]
    for node in found:
        found += {target for target, _ in node.next_functions if target is not None}.difference(found)
    return found


def _run_by(action: Callable[[], Any], loss: Tensor) -> set[Node]:
    """The nodes behind a loss that run while an action does."""
    ran: set[Node] = set()
    handles = [node.register_prehook(lambda _, node=node: ran.add(node)) for node in _nodes(loss)]
    action()
    for handle in handles:
        handle.remove()
    return ran


def _seen_running(loss: Tensor, inputs: list[Tensor]) -> set[Node]:
    """Stand-in and reference: the nodes that torch.autograd.grad runs, by watching it."""
    return _run_by(partial(torch.autograd.grad, loss, inputs, retain_graph=True), loss)


def _random_graph() -> tuple[Tensor, list[Tensor]]:
    """A loss and up to three inputs that lie behind it: leaves and results, of which one may lead to another."""
    made = [torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True), torch.randn(2)]
    for _ in range(random.randint(1, 9)):
        a, b = random.choices(made, k=2)
        made.append(random.choice([a + b, a * b, torch.tanh(a)]))
    loss = sum(random.sample(made, 3), made[0]).sum()
    nodes = _nodes(loss)
    parts = [t for t in made if t.requires_grad and get_gradient_edge(t).node in nodes]
    return loss, random.choices(parts, k=random.randint(1, 3))


@exercise(
    "15-01.1",
    "Which nodes run",
    points=15,
    demands=3,
    stand_in=lambda: _seen_running,
    stand_in_name="torch.autograd.grad, watched",
)
def nodes_that_run(trial: Trial, answer: Any) -> None:
    """`answer(loss, inputs)` returns the set of nodes that torch.autograd.grad(loss, inputs) runs."""
    loss, inputs = _random_graph()
    got = answer(loss, inputs)
    right = isinstance(got, set | frozenset)
    hint = "what does the signature return?"
    trial.needs("returns a set", right, expected="a set of nodes", got=type(got).__name__, hint=hint)
    with trial.group("the nodes are those that torch.autograd.grad runs", hint="which nodes lead to which?", see=1):
        for _ in range(60):
            loss, inputs = _random_graph()
            want = _seen_running(loss, inputs)
            got = answer(loss, inputs)
            found = {"not found": want - got, "too many": got - want}
            wrong = {what: ", ".join(type(node).__name__ for node in nodes) for what, nodes in found.items() if nodes}
            told = [f"{len(got)} nodes", *(f"{what}: {names}" for what, names in wrong.items())]
            names = ", ".join(get_gradient_edge(t).node.name() for t in inputs)
            case = f"a graph of {len(_nodes(loss))} nodes, those of the inputs: {names}"
            trial.that(case, got == want, expected=f"{len(want)} nodes", got="; ".join(told))
    loss, inputs = _random_graph()
    ran = _run_by(partial(answer, loss, inputs), loss)
    hint = "does something of yours compute a gradient?"
    trial.equal("no node is run", len(ran), 0, hint=hint, see=1, free=True)
    hint = "how deep do your calls nest, and how often is a node visited?"
    with trial.group("long chains and many paths take less than a second", hint=hint, see=2, free=True):
        # What takes four times as long for each step of two more doublings fails before it takes for ever.
        for kind, sizes in (("doublings", range(8, 61, 2)), ("nodes in a chain", [3000])):
            for size in sizes:
                x = y = torch.randn((), requires_grad=True)
                for _ in range(size):
                    y = y + y if kind == "doublings" else y.neg()
                start = thread_time()
                answer(y, [x])
                took = thread_time() - start
                trial.that(f"{size} {kind}", took < 1, expected="less than a second", got=f"{took:.2f} s")


# ---- 15-01.2


def _tensors(dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """Random tensors of some shapes, one of them not contiguous, each with what it is."""
    tensors = [torch.randn(()), torch.randn(0, 3), torch.randn(2, 3, 4), torch.randn(4, 3).t()]
    return [(f"shape {tuple(x.shape)}, {dtype}", x.to(dtype)) for x in tensors]


def _sent_back(apply: Callable[..., Tensor], x: Tensor, grad_output: Tensor, *more: Any) -> tuple[Tensor, ...]:
    """What a Function sends back; between its forward and its backward it is called on something else."""
    y = apply(x, *more)
    apply(0.1 * x, *more)
    return torch.autograd.grad(y, x, grad_output, allow_unused=True)


def _kept(y: Tensor) -> list[Tensor]:
    """What the node of a Function's result keeps: saved tensors, and those that are attributes of ctx."""
    things = [*y.grad_fn.saved_tensors, *vars(y.grad_fn).values()]
    return [thing for thing in things if isinstance(thing, Tensor)]


@exercise(
    "15-01.2",
    "Swish as a Function",
    points=10,
    demands=6,
    stand_in=lambda: SimpleNamespace(apply=F.silu),
    stand_in_name="F.silu",
)
def swish(trial: Trial, answer: Any) -> None:
    """`answer` is a Function: x · sigmoid(x), keeps x only, twice differentiable."""
    derived(trial, answer, "Function")
    far = 10.0 ** torch.arange(1, 5)
    cases = [
        *_tensors(torch.float32),
        ("|x| from 10 to 10⁴", torch.cat([-far, far])),
        ("x from -45 to 45, torch.float64", torch.linspace(-45, 45, 67, dtype=torch.float64)),
    ]
    hint = "compare forward with the formula, and its shape and dtype with x's; does a line write into x?"
    with trial.group("the value is x · sigmoid(x), and x stays as it is", hint=hint, see=3):
        samples(trial, answer.apply, F.silu, [Sample(text, x.requires_grad_()) for text, x in cases])
        samples(trial, answer.apply, F.silu, [Sample(*one) for one in _tensors(torch.bfloat16)], rtol=0.05, atol=0.05)
    hint = "take one x of one call through the formula, see the contract of backward; what is written to?"
    with trial.group("the gradient is grad_output · f'(x), and grad_output stays as it is", hint=hint, see=1):
        pair = partial(_sent_back, answer.apply), partial(_sent_back, F.silu)
        sent = [Sample(text, x.detach().requires_grad_(), torch.randn_like(x)) for text, x in cases]
        samples(trial, *pair, sent)
    hint = "can autograd follow backward, from x and from grad_output?"
    with trial.group("gradcheck and gradgradcheck accept it", hint=hint, see=2, free=True):
        x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        gradcheck(answer.apply, x)
        gradgradcheck(answer.apply, x)
    hint = "read in section 3 what the second style has, and what vmap needs"
    with trial.group("torch.func can differentiate it and map it over a batch", hint=hint):
        x = torch.randn(5)
        found, want = (torch.func.vmap(torch.func.grad(f))(x) for f in (answer.apply, F.silu))
        trial.close("vmap(grad)", found, want)
    hint = "what of forward is still referred to when backward has not run, and by whom?"
    with trial.group("keeps its input and nothing else", hint=hint, free=True):
        x = torch.randn(64, requires_grad=True)
        others = [tensor for tensor in _kept(answer.apply(x)) if tensor.data_ptr() != x.data_ptr()]
        trial.equal("tensors that it keeps beside x", len(others), 0)
    x = torch.randn(3, requires_grad=True)
    y = answer.apply(x)
    with torch.no_grad():
        x.add_(1)
    hint = "read again what `save_for_backward` does and an attribute doesn't"
    item = "save_for_backward notices that x was overwritten before backward"
    trial.equal(item, outcome(lambda: y.sum().backward()), "RuntimeError", hint=hint, free=True)


# ---- 15-01.3


def _quantised(x: Tensor, levels: int) -> Tensor:
    """The reference: the values by operators, the slope by where."""
    inside = torch.where(x.abs() <= 1, x, x.detach().clamp(-1, 1))
    steps = levels - 1
    return inside + (torch.round((inside + 1) / 2 * steps) / steps * 2 - 1 - inside).detach()


def _numbers(levels: int, dtype: torch.dtype) -> Tensor:
    """Numbers at each level and on both sides of the middle of two; just beside ±1, and far away."""
    level = torch.linspace(-1, 1, levels, dtype=dtype)
    near = 0.45 * 2 / (levels - 1)
    one = torch.tensor([1.0, -1.0], dtype=dtype)
    return torch.cat([level, level - near, level + near, one.nextafter(0 * one), one.nextafter(2 * one), 1e4 * one])


@exercise(
    "15-01.3",
    "A quantiser with a straight-through gradient",
    points=20,
    demands=3,
    stand_in=lambda: SimpleNamespace(apply=_quantised),
    stand_in_name="a composition with detach",
)
def quantise(trial: Trial, answer: Any) -> None:
    """`answer.apply(x, levels)` rounds to the nearest level; straight-through where |x| <= 1; keeps a byte each."""
    derived(trial, answer, "Function")
    cases = []
    for dtype in (torch.float32, torch.float64):
        cases += [(f"{levels} levels, {dtype}", _numbers(levels, dtype), levels) for levels in (2, 3, 7, 256)]
        cases += [(f"7 levels, {text}", x, 7) for text, x in _tensors(dtype)]
    hint = "take one x through your steps: which are the levels, which is nearest, in which dtype? Is x written to?"
    with trial.group("the value is the nearest level, and x stays as it is", hint=hint, see=1):
        samples(trial, answer.apply, _quantised, [Sample(text, x, levels) for text, x, levels in cases])
        elsewhere = Sample("the device 'meta', which stands for a GPU", torch.empty(3, device="meta"), 4)
        samples(trial, answer.apply, _quantised, [elsewhere], look=lambda y, *_: str(y.device))
    hint = "at one place: what comes in, what was |x| in this call? Is infinity times 0 always 0? What is written to?"
    item = "the gradient is grad_output where |x| <= 1, and 0 elsewhere, and grad_output stays as it is"
    with trial.group(item, hint=hint, see=2):
        sent = [Sample(text, x.requires_grad_(), torch.randn_like(x.detach()), levels) for text, x, levels in cases]
        x = torch.tensor([0.5, 1.5, -0.5, -2.0, 3.0], requires_grad=True)
        sent.append(Sample("an infinite grad_output", x, torch.full((5,), torch.inf), 4))
        pair = partial(_sent_back, answer.apply), partial(_sent_back, _quantised)
        samples(trial, *pair, sent)
    with trial.group("keeps at most one byte for each element", hint="what has backward to know?", see=2, free=True):
        y = answer.apply(torch.randn(64, requires_grad=True), 7)
        size = sum(tensor.nbytes for tensor in _kept(y))
        trial.that("64 elements", size <= 64, expected="64 bytes", got=f"{size} bytes")


# ---- 15-01.4


class _Net(nn.Module):
    """Names that begin alike; a submodule called twice, one that is overwritten, one that isn't called."""

    def __init__(self) -> None:
        super().__init__()
        self.block1 = nn.Linear(4, 5)
        self.block = nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True))
        self.silent = nn.Identity()
        for module in self.modules():
            module.register_forward_hook(lambda *_: None)  # somebody else's

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(self.block1(x)))


class _Recorder:
    """The reference."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.model = model
        self.names = names

    def __enter__(self) -> "_Recorder":
        modules = dict(self.model.named_modules())
        chosen = {name: modules[name] for name in self.names}
        self.activations = {name: [] for name in chosen}
        self.handles = [module.register_forward_hook(partial(self.keep, name)) for name, module in chosen.items()]
        return self

    def keep(self, name: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        self.activations[name].append(torch.empty_like(output, device="cpu").copy_(output).detach())

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()


def _block(kind: Any, net: nn.Module, x: Tensor, error: Exception | None = None) -> dict[str, list[Tensor]]:
    """What is recorded in a block in which a net computes and learns, and which may raise an error at its end."""
    recorder = kind(net, ["block1", "block", "block.0", "block.1", "silent"])
    with recorder:
        net(x).sum().backward()
        if error:
            raise error
    return recorder.activations


@exercise(
    "15-01.4",
    "An activation recorder that cleans up",
    points=20,
    demands=6,
    stand_in=lambda: _Recorder,
    stand_in_name="the course's own recorder",
)
def activation_recorder(trial: Trial, answer: Any) -> None:
    """`answer(model, names)` is a context manager that records outputs of submodules."""
    net = _Net()
    x = torch.randn(3, 4)
    same = partial(samples, trial, partial(_block, answer), partial(_block, _Recorder), [Sample("a net", net, x)])
    item = "each name has a list, with the output of each call as it was then"
    with trial.group(item, hint="what does __enter__ return?"):
        recorder = answer(net, ["block1"])
        with recorder as entered:
            trial.equal("as recorder gives the recorder", entered is recorder, True)
    with trial.group(item, hint="who adds to which list?", see=4):
        same(look=lambda recorded, *_: {name: len(tensors) for name, tensors in recorded.items()})
    with trial.group(item, hint="whose output is it, and is its memory written to later?", see=2):
        same(look=lambda recorded, *_: recorded)
    item = "recordings are detached, and on the CPU"
    with trial.group(item, hint="what does a stored output still refer to?", free=True):
        learning = [name for name, found in _block(answer, net, x).items() if any(t.requires_grad for t in found)]
        trial.equal("whose recordings require a gradient", learning, [])
    far = nn.Sequential(nn.Linear(4, 2)).to("meta")  # its outputs hold no data, so a copy to the CPU raises
    with trial.group(item, hint="where are the outputs of a model on a GPU?", free=True):
        recorder = answer(far, ["0"])
        with suppress(RuntimeError), recorder:
            far(torch.empty(3, 4, device="meta"))
        trial.equal("recordings on the device 'meta'", len(recorder.activations["0"]), 0)
    net = _Net()
    hooks = _hooks(net)
    with trial.group("your hooks are gone, others' are there", hint="which handles are yours?", see=3, free=True):
        for error in (None, ValueError()):
            with suppress(ValueError):
                _block(answer, net, x, error)
            trial.equal(f"after a block that raises {error!r}", _hooks(net), hooks)
    with trial.group("an exception goes on", hint="what does __exit__ return, or raise?", see=3, free=True):
        raises(trial, "a block that raises a ValueError", partial(_block, answer, net, x, ValueError()), ValueError)
    with trial.group("entering again starts afresh", hint="when are the lists made?"):
        recorder = answer(net, ["block1"])
        for _ in range(2):
            with recorder:
                net(x)
        trial.equal("recordings the second time", len(recorder.activations["block1"]), 1)
    hint = "when is a name looked up, and what was registered or removed before it raised?"
    with trial.group("an unknown name raises KeyError on entering, and leaves no hook", hint=hint, see=1):
        recorder = answer(net, ["block1", "nowhere"])
        hooks = _hooks(net)
        raises(trial, "entering with the name 'nowhere'", recorder.__enter__, KeyError, "nowhere")
        trial.equal("after entering with the name 'nowhere'", _hooks(net), hooks)


# ---- 15-01.5


class _Branches(nn.Module):
    """Linear layers of all kinds in two branches, not called in the order of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 5)
        self.body = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        self.side = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x) * torch.sigmoid(self.side(x)))


def _norms_one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """By definition: a forward and a backward for each image."""
    norms = []
    for one, label in zip(x.split(1), y.split(1), strict=True):
        grads = torch.autograd.grad(F.cross_entropy(model(one), label), list(model.parameters()))
        norms.append(torch.sqrt(sum(grad.square().sum() for grad in grads)))
    return torch.stack(norms)


@exercise(
    "15-01.5",
    "Every image's gradient from one backward",
    points=20,
    demands=6,
    stand_in=lambda: _norms_one_by_one,
    stand_in_name="one backward for each image",
)
def image_norms(trial: Trial, answer: Any) -> None:
    """`answer(model, x, y)` returns the norm of each image's gradient, by hooks, from one backward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that x needs no gradient
        _image_norms(trial, answer)


def _image_norms(trial: Trial, answer: Any) -> None:
    cases = []
    for dtype in (torch.float32, torch.float64):
        for net in (nn.Linear(3, 5, bias=False), _Branches()):
            for number in (1, 7):
                x = 3 * torch.randn(number, 3, dtype=dtype)
                text = f"{type(net).__name__}, {number} images, {dtype}"
                cases.append(Sample(text, copy.deepcopy(net).to(dtype), x, torch.randint(5, (number,))))
    same = partial(samples, trial, answer, _norms_one_by_one)

    def form(norms: Tensor, *_: Any) -> dict[str, Any]:
        return {"shape": tuple(norms.shape), "dtype": str(norms.dtype), "graph": norms.requires_grad}

    hint = "in which dtype do you add up, and who keeps the graph?"
    with trial.group("a detached tensor (N,) in the dtype of x", hint=hint):
        same(cases, look=form)
    hint = "which layers and biases, what becomes of the sum, in which dtype? And is each image's loss whole?"
    with trial.group("the norm of each image's own gradient", hint=hint, see=2):
        same(cases[:4], look=lambda norms, *_: norms.double(), rtol=1e-4)
        same(cases[4:], look=lambda norms, *_: norms.double())
    net = _Branches()
    x = torch.randn(6, 3)
    y = torch.randint(5, (6,))
    net.last.weight.grad = torch.full((5, 4), 2.0)  # and none for the others
    calls: list[str] = []
    net.register_forward_hook(lambda *_: calls.append("model"))
    net.last.register_full_backward_pre_hook(lambda *_: calls.append("backward"))
    answer(net, x, y)
    hint = "how can one call and one backward of the sum serve all images?"
    trial.equal("calls the model once, and runs one backward", calls, ["model", "backward"], hint=hint, see=1)

    parameters = list(net.parameters())
    hooks = _hooks(net)
    grads = snapshot([p.grad for p in parameters])
    for case, labels in (("a call", y), ("an error of the loss", y + 7)):
        ended = outcome(partial(answer, net, x, labels))
        with trial.group("your hooks are gone, others' are there", hint="which lines always run?", see=3, free=True):
            trial.equal(f"after {case}", _hooks(net), hooks)
        with trial.group("each .grad is what it was", hint="which functions write to .grad?", see=3, free=True):
            trial.equal(f"after {case}", snapshot([p.grad for p in parameters]), grads)
    trial.equal("an exception goes on", ended, "IndexError", hint="who catches it?", free=True)


# ---- 15-01.6


class _TiedNet(nn.Module):
    """A weight used twice, a frozen layer, and two heads, of which a backward reaches one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.heads[head](self.frozen(x))


_MAKERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=0.01),
}


def _step_in_backward(
    model: nn.Module, make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> Callable[[], object]:
    """Stand-in: one optimizer a parameter, stepped by its post-accumulate hook."""
    optimizers = {param: make_optimizer([param]) for param in model.parameters() if param.requires_grad}

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    handles = [param.register_post_accumulate_grad_hook(step) for param in optimizers]
    return lambda: [handle.remove() for handle in handles]


def _train(start: Any, net: _TiedNet, make: Any, x: Tensor) -> None:
    """Train by backward alone, as `start` has made it, or, without a `start`, by the usual loop."""
    optimizer = None if start else make([p for p in net.parameters() if p.requires_grad])
    if start:
        start(net, make)
    for head in (0, 0, 1, 0, 1):
        net(x, head).square().mean().backward()
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()


@exercise(
    "15-01.6",
    "Stretch: an optimizer in backward",
    points=15,
    demands=4,
    stand_in=lambda: _step_in_backward,
    stand_in_name="the course's own",
)
def step_in_backward(trial: Trial, answer: Any) -> None:
    """`answer(model, make_optimizer)` makes backward train; returns a function that undoes it."""
    net = _TiedNet()
    x = torch.randn(8, 6)
    start = {p: p.detach().clone() for p in net.parameters()}
    arrived: list[Tensor] = []
    late: set[Tensor] = set()

    def look() -> None:
        late.update(p for p in arrived if p.grad is not None or torch.equal(p, start[p]))

    def arrives(param: Tensor) -> None:
        look()
        arrived.append(param)

    for param in net.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(arrives)
    undo = answer(net, _MAKERS["SGD"])
    trial.needs("returns a function", callable(undo), expected="a function", got=repr(undo), hint="see the signature")
    net(x, 0).sum().backward()
    look()
    hint = "what is in .grad when your hook has run, and which parameter does each call deal with?"
    item = "each parameter is updated and its gradient dropped before the next one comes"
    expected = f"{len(arrived)} parameters dealt with in time"
    trial.that(item, not late, expected=expected, got=f"{len(late)} of them late, or never", hint=hint, see=2)

    cases = [Sample(f"{name}, 5 backwards", _TiedNet(), make, x) for name, make in _MAKERS.items()]
    hint = "what is make_optimizer called with, and how often? Which gradient leads to which step?"
    with trial.group("parameters equal those of the usual loop", hint=hint, see=1):
        pair = partial(_train, answer), partial(_train, None)
        samples(trial, *pair, cases, look=lambda _, net, *others: dict(net.state_dict()), rtol=0.0, atol=0.0)

    other = _TiedNet()
    still = [other.frozen.bias, other.heads[1].bias]
    for p in still:  # a gradient from before the one was frozen, and one of another loss
        p.grad = torch.ones_like(p)
    before = snapshot(still)
    answer(other, _MAKERS["SGD"])
    other(x, 0).sum().backward()
    hint = "which parameters does one step of yours look at?"
    item = "frozen parameters, and those that a backward doesn't reach, stay"
    trial.equal(item, snapshot(still), before, hint=hint, see=1, free=True)

    with trial.group("undoing removes your hooks and no others", hint="which handles are yours?"):
        count = len(arrived)
        arrived.clear()
        undo()
        net(x, 0).sum().backward()
        trial.equal("gradients that one of your hooks has dropped", sum(p.grad is None for p in arrived), 0)
        trial.equal("calls of another hook", len(arrived), count)
