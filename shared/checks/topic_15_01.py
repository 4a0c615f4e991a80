"""Checks of the exercises in 15-01, Custom Autograd Functions & Hooks."""

import copy
import gc
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.autograd.graph import Node, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as every_module
from torch.overrides import TorchFunctionMode

from shared.checks.exercise import exercise
from shared.checks.traces import is_stub
from shared.checks.trial import Trial
from shared.checks.words import Sample, outcome, raises, samples, snapshot


def _hooks(model: nn.Module) -> list[tuple[int, str, int]]:
    """Every hook on the model's modules and parameters, and on all modules of the process."""
    found = []
    for number, owner in enumerate((every_module, *model.modules(), *model.parameters())):
        kinds = ("_backward_hooks", "_post_accumulate_grad_hooks") if isinstance(owner, Tensor) else vars(owner)
        for kind in kinds:
            registered = getattr(owner, kind)
            if "hooks" in kind and isinstance(registered, dict):
                found += [(number, kind, key) for key in registered]
    return found


def _same_hooks(trial: Trial, case: str, model: nn.Module, before: list[tuple[int, str, int]]) -> None:
    after = _hooks(model)
    changes = {"hooks left over": len({*after} - {*before}), "hooks that are gone": len({*before} - {*after})}
    trial.equal(case, changes, {"hooks left over": 0, "hooks that are gone": 0})


# ---- 15-01.1


def _nodes(loss: Tensor) -> list[Node]:
    """Every node behind a loss."""
    found = [loss.grad_fn]
    for node in found:
        found += {target for target, _ in node.next_functions if target is not None}.difference(found)
    return found


def _watched(loss: Tensor, action: Callable[[], Any]) -> tuple[set[Node], Any]:
    """The nodes that run while the action does, and what it returns."""
    ran: set[Node] = set()
    handles = [node.register_prehook(lambda _, node=node: ran.add(node)) for node in _nodes(loss)]
    try:
        return ran, action()
    finally:
        for handle in handles:
            handle.remove()


def _seen_running(loss: Tensor, inputs: list[Tensor]) -> set[Node]:
    """Stand-in and reference: the nodes that torch.autograd.grad runs, by watching it."""
    ran, _ = _watched(loss, partial(torch.autograd.grad, loss, inputs, retain_graph=True))
    return ran


_OPERATIONS = (
    lambda a, b, c: [a + b],
    lambda a, b, c: [a * b],
    lambda a, b, c: [torch.cat([a[:1], c[:1], b[:1]])[:2]],
    lambda a, b, c: [torch.tanh(a)],
    lambda a, b, c: torch.stack([a, b]).unbind(),
)


def _random_graph() -> tuple[Tensor, list[Tensor]]:
    """A loss and up to three inputs that are a part of it: leaves, results, one of two outputs, the loss itself."""
    made = [torch.randn(2, requires_grad=random.random() < 0.8) for _ in range(random.randint(2, 4))]
    made[0].requires_grad_()
    for _ in range(random.randint(1, 9)):
        made += random.choice(_OPERATIONS)(*random.choices(made, k=3))
    loss = made[0].sum() + sum(t.sum() for t in random.sample(made, min(len(made), 3)))
    nodes = set(_nodes(loss))
    parts = [t for t in (*made, loss) if t.requires_grad and get_gradient_edge(t).node in nodes]
    grads = torch.autograd.grad(loss, parts, retain_graph=True, allow_unused=True)  # of two outputs one may be no part
    parts = [part for part, grad in zip(parts, grads, strict=True) if grad is not None]
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
    x = torch.randn(2, requires_grad=True)
    loss = torch.tanh(x).exp().sum()
    ran, got = _watched(loss, lambda: answer(loss, [x]))
    form = type(got).__name__
    right = isinstance(got, set | frozenset)
    trial.needs("returns a set", right, expected="a set of nodes", got=form, hint="what does the signature return?")
    with trial.group("the nodes are those that torch.autograd.grad runs", hint="which nodes lead to which?", see=1):
        for _ in range(60):
            loss, inputs = _random_graph()
            want = _seen_running(loss, inputs)
            got = set(answer(loss, list(inputs)))
            strange = {type(node).__name__ for node in got if not isinstance(node, Node)}
            trial.equal("what is in the set, and no node", strange, set())
            found = {"not found": [n.name() for n in want - got], "too many": [n.name() for n in got - want]}
            names = ", ".join(get_gradient_edge(t).node.name() for t in inputs)
            case = f"a graph of {len(_nodes(loss))} nodes, those of the inputs: {names}"
            trial.that(case, not any(found.values()), expected=f"{len(want)} nodes", got=found)
    hint = "does something of yours compute a gradient?"
    trial.that("no node is run", not ran, expected="none ran", got=f"{len(ran)} ran", hint=hint, see=1, free=True)
    hint = "how deep do your calls nest, and how often is a node visited?"
    with trial.group("long chains and many paths take less than a second", hint=hint, see=2, free=True):
        # What takes twice as long for each doubling more fails before it takes for ever.
        for kind, sizes in (("doublings", range(8, 61, 2)), ("nodes in a chain", (300, 3000))):
            x = torch.randn((), requires_grad=True)
            for size in sizes:
                y = x
                for _ in range(size):
                    y = y + y if kind == "doublings" else y.neg()
                took = []
                while len(took) < 3 and 0.02 < min(took, default=1.0) < 2:
                    start = perf_counter()
                    answer(y, [x])
                    took.append(perf_counter() - start)
                fast = min(took) < 1
                trial.that(f"{size} {kind}", fast, expected="less than a second", got=f"{min(took):.2f} s")
                if not fast:  # reached only where this item is left out
                    break


# ---- 15-01.2


def _needs_function(trial: Trial, answer: Any, like: str) -> None:
    right = isinstance(answer, type) and issubclass(answer, Function)
    hint = f"see how `{like}` is declared"
    trial.needs("is an autograd Function", right, expected="a class derived from Function", got=answer, hint=hint)


def _tensors(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Random tensors of many shapes and layouts, each with what it is."""
    for shape in ((), (1,), (0, 3), (7,), (2, 3, 4)):
        yield f"shape {shape}, {dtype}", torch.randn(shape, dtype=dtype)
    yield f"a transposed (3, 4), {dtype}", torch.randn(4, 3, dtype=dtype).t()
    yield f"every second column, {dtype}", torch.randn(3, 8, dtype=dtype)[:, ::2]


def _sent_back(apply: Callable[..., Tensor], x: Tensor, grad_output: Tensor, *more: Any) -> tuple[Tensor, ...]:
    """What a Function sends back; between its forward and its backward it is called on something else."""
    y = apply(x, *more)
    apply(0.1 * x, *more)
    return torch.autograd.grad(y, x, grad_output, allow_unused=True)


class _Memory(TorchFunctionMode):
    """Notes the memory that operations make, without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[StorageWeakRef, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.made.append((StorageWeakRef(storage), storage.nbytes()))
        return result

    def alive(self) -> dict[int, int]:
        gc.collect()
        return {made.cdata: size for made, size in self.made if not made.expired()}


def _kept(apply: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> tuple[int, int, int]:
    """Bytes of an input of 64 elements, and of all else, that outlive the output of a call, wherever they are kept,
    while its node lives; and what is left of both when the node is gone."""
    leaf = torch.randn(64, dtype=dtype, requires_grad=True)
    with _Memory() as memory:
        x = leaf * 1
        y = apply(x)
    node, later = y.grad_fn, y + 0  # in torch 2.11 what is saved for backward is kept by a graph only, not by Python
    own = x.untyped_storage()._cdata
    plain = [value for value in vars(node).values() if isinstance(value, list | tuple | bytes | np.ndarray)]
    python = sum(sys.getsizeof(value) for value in plain if np.size(value) > 16)  # a shape is fine
    del x, y, plain
    sizes = memory.alive()
    input_ = sizes.get(own, 0)
    del node, later
    return input_, sum(sizes.values()) - input_ + python, sum(memory.alive().values())


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
    _needs_function(trial, answer, "Cube")
    far = 10.0 ** torch.arange(1, 5)
    cases = [
        *_tensors(torch.float32),
        ("|x| from 10 to 10⁴", torch.cat([-far, torch.zeros(1), far])),
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
        sent += [Sample("an expanded grad_output", torch.randn(3, 4).requires_grad_(), torch.randn(()).expand(3, 4))]
        samples(trial, *pair, sent)
    hint = "can autograd follow backward, from x and from grad_output?"
    with trial.group("gradcheck and gradgradcheck accept it", hint=hint, see=2, free=True):
        for shape in ((), (5,), (2, 3)):
            x = torch.randn(shape, dtype=torch.float64).t().requires_grad_()
            gradcheck(answer.apply, x)
            gradgradcheck(answer.apply, x)
    hint = "read in section 3 what the second style has, and what vmap needs"
    with trial.group("torch.func can differentiate it and map it over a batch", hint=hint):
        x = torch.randn(2, 3)
        found = [torch.func.vmap(f, in_dims=1, out_dims=1)(x) for f in (answer.apply, F.silu)]
        trial.close("vmap over dimension 1", *found)
        found = [torch.func.vmap(torch.func.grad(f))(x[0]) for f in (answer.apply, F.silu)]
        trial.close("vmap(grad)", *found)
    hint = "what of forward is still referred to when backward has not run, and by whom?"
    with trial.group("keeps its input and nothing else", hint=hint, free=True):
        _, other, left = _kept(answer.apply)
        trial.equal("bytes of other memory, while its node lives", other, 0)
        trial.equal("bytes that are left when its node is gone", left, 0)
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
    """Numbers at each level, beside it, close to the middle of two; ±1, just beside, and far away."""
    level = torch.linspace(-1, 1, levels, dtype=torch.float64)
    step = 2 / (levels - 1)
    near = 0.4999 if dtype == torch.float64 else 0.45
    one = torch.tensor([1.0, -1.0], dtype=dtype)
    beside = torch.cat([torch.nextafter(one, 0 * one), torch.nextafter(one, 2 * one)])
    far = torch.tensor([1.01, -1.01, 1e4, -1e4, torch.inf, -torch.inf], dtype=dtype)
    return torch.cat([level.to(dtype), *((level + by * step).to(dtype) for by in (near, -near)), one, beside, far])


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
    _needs_function(trial, answer, "SignClipped")
    cases = []
    for levels in (2, 3, 4, 7, 16, 255, 256):
        for dtype in (torch.float32, torch.float64):
            cases.append((f"{levels} levels, {dtype}", _numbers(levels, dtype), levels))
    for dtype in (torch.float32, torch.float64):
        cases += [(f"7 levels, {text}", x, 7) for text, x in _tensors(dtype)]
    hint = "take one x through your steps: which are the levels, which is nearest, in which dtype? Is x written to?"
    with trial.group("the value is the nearest level, and x stays as it is", hint=hint, see=1):
        samples(trial, answer.apply, _quantised, [Sample(text, x, levels) for text, x, levels in cases])
        elsewhere = Sample("the device 'meta', which stands for a GPU", torch.empty(3, device="meta"), 4)
        samples(trial, answer.apply, _quantised, [elsewhere], look=lambda y, *_: str(y.device))
    hint = "at one place: what comes in, what was |x| in this call? Is infinity times 0 always 0? What is written to?"
    item = "the gradient is grad_output where |x| <= 1, and 0 elsewhere, and grad_output stays as it is"
    with trial.group(item, hint=hint, see=2):
        sent = []
        for text, x, levels in cases:
            sent.append(Sample(text, x.requires_grad_(), torch.randn_like(x.detach()), levels))
        x = torch.tensor([0.5, 1.5, -0.5, -2.0, 3.0], requires_grad=True)
        sent.append(Sample("an infinite grad_output", x, torch.full((5,), torch.inf), 4))
        sent.append(Sample("an expanded grad_output", x, torch.randn(()).expand(5), 4))
        pair = partial(_sent_back, answer.apply), partial(_sent_back, _quantised)
        samples(trial, *pair, sent, rtol=0.0, atol=0.0)
    with trial.group("keeps at most one byte for each element", hint="what has backward to know?", see=2, free=True):
        for dtype in (torch.float32, torch.float64):
            own, other, left = _kept(lambda x: answer.apply(x, 7), dtype)
            text = f"64 elements, {dtype}"
            trial.that(text, own + other <= 64, expected="64 bytes", got=f"{own + other} bytes")
            trial.equal(f"bytes that are left when the node is gone, {text}", left, 0)


# ---- 15-01.4


class _Net(nn.Module):
    """Names that begin or end alike; a submodule called twice and overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.block1 = nn.Linear(4, 5)
        self.block = nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True))
        self.drop = nn.Dropout(0.5)
        self.top = nn.Sequential(nn.Flatten(), nn.Linear(3, 3))
        self.add_module("1", nn.Identity())
        for module in self.modules():
            module.register_forward_hook(_nothing)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.block(self.block(self.block1(x))))
        return self.get_submodule("1")(self.top(x[:, ::2])).relu_()


def _nothing(*_: Any) -> None:
    """Somebody else's hook."""


_NAMES = ["block1", "block", "block.0", "block.1", "drop", "top", "1", "top.1"]


class _Recorder:
    """The reference."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.model = model
        self.names = names
        self.activations: dict[str, list[Tensor]] = {}

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


def _block(kind: Any, net: nn.Module, x: Tensor, error: BaseException | None = None) -> dict[str, Any]:
    """What a recorder holds after a block in which a net computes and learns, and how the block ended."""
    torch.manual_seed(1)
    recorder = kind(net, list(_NAMES))
    entered = raised = None
    try:
        with recorder as entered:
            net(x).sum().backward()
            if error:
                raise error
    except BaseException as caught:
        if is_stub(caught):
            raise
        raised = caught
    ended = "the block's exception" if raised is error else repr(raised)
    return {"recorded": recorder.activations, "entered": entered is recorder, "raised": ended}


def _lengths(found: dict[str, Any], *_: Any) -> dict[str, int]:
    return {name: len(tensors) for name, tensors in found["recorded"].items()}


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
    cases = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for training in (True, False):
            net = _Net().to(dtype).train(training)
            net.block.eval()
            text = f"{dtype}, {'training' if training else 'evaluation'}"
            cases.append(Sample(text, net, torch.randn(3, 4, dtype=dtype)))
    same = partial(samples, trial, partial(_block, answer), partial(_block, _Recorder))
    item = "each name has a list, with the output of each call as it was then"
    with trial.group(item, hint="what does __enter__ return?"):
        trial.equal("as recorder gives the recorder", _block(answer, _Net(), torch.randn(3, 4))["entered"], True)
    with trial.group(item, hint="who adds to which list?", see=4):
        same(cases, look=_lengths)
    with trial.group(item, hint="whose output is it, and is its memory written to later?", see=2):
        same(cases, look=lambda found, *_: found["recorded"])
    item = "recordings are detached, and on the CPU"
    with trial.group(item, hint="what does a stored output still refer to?", free=True):
        for name, tensors in _block(answer, _Net(), torch.randn(3, 4))["recorded"].items():
            trial.equal(f"some of {name!r} require a gradient", any(t.requires_grad for t in tensors), False)
    net = nn.Sequential(nn.Linear(4, 2)).to("meta")  # its outputs hold no data, so a copy to the CPU raises
    with trial.group(item, hint="where are the outputs of a model on a GPU?", free=True):
        recorder = answer(net, ["0"])
        with suppress(NotImplementedError, RuntimeError, TypeError), recorder:
            net(torch.empty(3, 4, device="meta"))
        devices = {str(tensor.device) for tensor in recorder.activations.get("0", [])}
        trial.equal("devices of recordings elsewhere", devices - {"cpu"}, set())
    net = _Net()
    x = torch.randn(3, 4)
    before = _hooks(net)
    with trial.group("your hooks are gone, others' are there", hint="which handles are yours?", see=3):
        _block(answer, net, x)
        _same_hooks(trial, "after a block", net, before)
        with answer(net, ["block"]):
            trial.equal("hooks within a block for one submodule", len(_hooks(net)) - len(before), 1)
        _block(answer, net, x, ValueError())
        _same_hooks(trial, "after an exception", net, before)
    with trial.group("an exception goes on", hint="what does __exit__ return, or raise?", see=3, free=True):
        for error in (KeyError(), ValueError(), GeneratorExit()):
            trial.equal(repr(error), _block(answer, _Net(), x, error)["raised"], "the block's exception")
    net = _Net()
    with trial.group("entering again starts afresh", hint="when are the lists made?"):
        recorder = answer(net, ["block1"])
        for time in ("first", "second"):
            with recorder:
                net(x)
            trial.equal(f"recordings the {time} time", len(recorder.activations["block1"]), 1)
    net = _Net()
    before = _hooks(net)
    hint = "when is a name looked up, and what was registered or removed before it raised?"
    with trial.group("an unknown name raises KeyError on entering, and leaves no hook", hint=hint, see=1):
        for name in ("nowhere", "block.7", "block1.weight"):
            recorder = answer(net, ["block1", name])
            raises(trial, f"entering with the name {name!r}", recorder.__enter__, KeyError, name)
            _same_hooks(trial, f"after entering with the name {name!r}", net, before)


# ---- 15-01.5


class _Backwards:
    """Counts the backward passes of a block, and those that carry a gradient for each of many losses (vmap)."""

    def __enter__(self) -> "_Backwards":
        self.count = self.batched = 0
        run = torch.autograd._engine_run_backward

        def counted(tensors: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            given = [t for t in (*tensors, *gradients) if isinstance(t, Tensor)]
            self.batched += any(is_functorch_wrapped_tensor(t) or is_legacy_batchedtensor(t) for t in given)
            return run(tensors, gradients, *args, **kwargs)

        self._patch = patch.object(torch.autograd, "_engine_run_backward", counted)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()


class _Branches(nn.Module):
    """Linear layers of all kinds in two branches, not called in the order of their names; raises `error` if it has."""

    error: Exception | None = None

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 5)
        self.body = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        self.side = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.body(x) * torch.sigmoid(self.side(x)))
        if self.error:
            raise self.error
        return x


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
    demands=8,
    stand_in=lambda: _norms_one_by_one,
    stand_in_name="one backward for each image",
)
def image_norms(trial: Trial, answer: Any) -> None:
    """`answer(model, x, y)` returns the norm of each image's gradient, by hooks, from one backward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that x needs no gradient
        _image_norms(trial, answer)


def _image_norms(trial: Trial, answer: Any) -> None:
    nets = {
        "one layer": nn.Linear(3, 4),
        "one layer without a bias": nn.Linear(3, 2, bias=False),
        "branches": _Branches(),
        "deep": nn.Sequential(*(nn.Sequential(nn.Linear(3, 3, bias=i % 2 == 0), nn.Tanh()) for i in range(6))),
    }
    cases = {torch.float32: [], torch.float64: []}
    for dtype, found in cases.items():
        for text, net in nets.items():
            for number in (1, 2, 9):
                x = 3 * torch.randn(number, 3, dtype=dtype)
                y = torch.randint(2, (number,))
                found.append(Sample(f"{text}, {number} images, {dtype}", copy.deepcopy(net).to(dtype), x, y))
    with trial.group("a tensor (N,) in the dtype of x", hint="in which dtype do you add up?"):
        both = [*cases[torch.float32], *cases[torch.float64]]
        samples(trial, answer, _norms_one_by_one, both, look=lambda norms, *_: (tuple(norms.shape), str(norms.dtype)))
    hint = "which layers and biases, what becomes of the sum, in which dtype? And is each image's loss whole?"
    with trial.group("the norm of each image's own gradient", hint=hint, see=2):
        same = partial(samples, trial, answer, _norms_one_by_one, look=lambda norms, *_: norms.double())
        same(cases[torch.float64])
        same(cases[torch.float32], rtol=1e-4)
    net = _Branches()
    x = torch.randn(6, 3)
    y = torch.randint(5, (6,))
    net.last.weight.grad = torch.full((5, 4), 2.0)
    net.side.bias.grad = torch.zeros(4)  # and none for the others
    net.side.register_full_backward_hook(_nothing)
    net.last.weight.register_post_accumulate_grad_hook(_nothing)
    calls: list[int] = []
    net.register_forward_hook(lambda *_: calls.append(1))
    hooks = _hooks(net)
    grads = snapshot({name: p.grad for name, p in net.named_parameters()})
    with _Backwards() as backwards:
        got = answer(net, x, y)
    detached = isinstance(got, Tensor) and not got.requires_grad
    trial.that("is detached", detached, expected="no graph", got="a graph", hint="who keeps it?")
    trial.equal("calls the model once", len(calls), 1, hint="how can one call serve all images?", see=1)
    found = {"backwards": backwards.count, "for many losses at once": backwards.batched}
    hint = "what does one backward of the sum tell of each image and layer?"
    trial.equal("runs one backward", found, {"backwards": 1, "for many losses at once": 0}, hint=hint, see=1)

    ends = {}
    errors = ("a call", None, y), ("an error of the loss", None, y + 7), ("one of the model", EOFError(), y)
    for case, error, labels in errors:
        net.error = error
        ends[case] = outcome(lambda labels=labels: answer(net, x, labels))
        with trial.group("your hooks are gone, others' are there", hint="which lines always run?", see=3, free=True):
            _same_hooks(trial, f"after {case}", net, hooks)
        with trial.group("each .grad is what it was", hint="which functions write to .grad?", see=3, free=True):
            trial.equal(f"after {case}", snapshot({name: p.grad for name, p in net.named_parameters()}), grads)
    want = {"a call": "no exception", "an error of the loss": "IndexError", "one of the model": "EOFError"}
    trial.equal("an exception goes on", ends, want, hint="who catches it?", free=True)


# ---- 15-01.6


class _TiedNet(nn.Module):
    """A weight used twice, a frozen layer, a parameter that no output depends on, one number, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.scale * self.heads[head](self.frozen(x))


def _by_matrices(params: list[Tensor]) -> torch.optim.Optimizer:
    """With weight decay on matrices only."""
    groups = [{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1}]
    return torch.optim.SGD([*groups, {"params": [p for p in params if p.dim() < 2]}], lr=0.1)


_MAKERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "SGD with weight decay on matrices": _by_matrices,
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


def _train(start: Any, net: _TiedNet, make: Any, data: list[tuple[Tensor, Tensor, int, float]]) -> Any:
    """Train by backward alone, or, without a `start`, by the usual loop; then return what `start` did."""
    made = start(net, make) if start else None
    optimizer = None if start else make([p for p in net.parameters() if p.requires_grad])
    for x, y, head, factor in data:
        (factor * F.mse_loss(net(x, head), y)).backward()
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
    return made


def _data(dtype: torch.dtype, *rounds: tuple[int, float]) -> list[tuple[Tensor, Tensor, int, float]]:
    return [(torch.randn(8, 6, dtype=dtype), torch.randn(8, 3, dtype=dtype), *one) for one in rounds]


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
    net.scale.register_post_accumulate_grad_hook(_nothing)
    hooks = _hooks(net)
    learn = [p for p in net.parameters() if p.requires_grad]
    start = {p: p.detach().clone() for p in learn}
    arrived: list[Tensor] = []
    late: list[Tensor] = []

    def look(param: Tensor) -> None:  # what arrives now may still be dealt with after this hook
        late.extend(p for p in arrived if p is not param and (p.grad is not None or torch.equal(p, start[p])))

    handles = [p.register_post_accumulate_grad_hook(look) for p in learn]  # before the answer's hook, and behind it
    undo = answer(net, _MAKERS["SGD"])
    trial.needs("returns a function", callable(undo), expected="a function", got=repr(undo), hint="see the signature")
    handles += [p.register_post_accumulate_grad_hook(look) for p in learn]
    handles += [p.register_post_accumulate_grad_hook(arrived.append) for p in learn]
    _train(lambda *_: None, net, None, _data(torch.float32, (0, 1.0)))
    for handle in handles:
        handle.remove()
    found = {
        "not dealt with when the next gradient came": len({*late}),
        "not updated at the end": sum(torch.equal(p, start[p]) for p in arrived),
        "with a gradient at the end": sum(p.grad is not None for p in arrived),
    }
    hint = "what is in .grad when your hook has run, and which parameter does each call deal with?"
    item = "each parameter is updated and its gradient dropped before the next one comes"
    trial.equal(item, found, dict.fromkeys(found, 0), hint=hint, see=2)

    rounds = [(0, 1.0), (0, 1.0), (1, 1.0), (0, 0.0), (1, 1.0), (0, 1e6), (0, float("nan"))]  # head, factor of the loss
    cases = []
    for name, make in _MAKERS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for count in (2, 6, 7):
                data = _data(dtype, *rounds[:count])
                cases.append(Sample(f"{name}, {dtype}, {count} backwards", _TiedNet().to(dtype), make, data))
    hint = "what is make_optimizer called with, and how often? Which gradient leads to which step?"
    pair = partial(_train, answer), partial(_train, None)
    parameters = lambda made, net, *_: dict(net.state_dict())  # noqa: E731
    with trial.group("parameters equal those of the usual loop", hint=hint, see=1):
        samples(trial, *pair, cases, look=parameters, rtol=0.0, atol=0.0)

    other = _TiedNet()
    for p in (other.frozen.bias, other.unused):  # from before the one was frozen, and of another loss
        p.grad = torch.ones_like(p)
    kept = snapshot([other.frozen.bias, other.unused])
    _train(answer, other, _MAKERS["SGD"], _data(torch.float32, (0, 1.0)))
    hint = "which parameters does one step of yours look at?"
    item = "frozen parameters, and those that a backward doesn't reach, stay"
    trial.equal(item, snapshot([other.frozen.bias, other.unused]), kept, hint=hint, see=1, free=True)

    with trial.group("undoing removes your hooks and no others", hint="which handles are yours?"):
        elsewhere = _hooks(other)
        undo()
        _same_hooks(trial, "hooks of the model", net, hooks)
        _same_hooks(trial, "hooks of another model", other, elsewhere)
