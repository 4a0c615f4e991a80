"""Checks of the exercises in 15-01, Custom Autograd Functions & Hooks."""

import copy
import gc
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
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
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as every_module
from torch.overrides import TorchFunctionMode

from shared.checks.exercise import exercise
from shared.checks.trial import Trial


def _inputs(*dtypes: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Random tensors of these dtypes, of many shapes and layouts, each with what it is."""
    for dtype in dtypes:
        for shape in ((), (1,), (0, 3), (7,), (2, 3, 4)):
            yield f"shape {shape}, {dtype}", torch.randn(shape, dtype=dtype)
        yield f"a transposed (3, 4), {dtype}", torch.randn(4, 3, dtype=dtype).t()
        yield f"every second column, {dtype}", torch.randn(3, 8, dtype=dtype)[:, ::2]


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


def _kind(answer: Any) -> str:
    """What an answer is that should have been a Function."""
    return f"the class {answer.__name__}" if isinstance(answer, type) else f"a {type(answer).__name__}"


def _same_hooks(trial: Trial, item: str, model: nn.Module, before: list[tuple[int, str, int]], **hints: Any) -> None:
    """Pass if the model has the hooks that it had."""
    after = _hooks(model)
    more, fewer = len(set(after) - set(before)), len(set(before) - set(after))
    trial.that(item, not more + fewer, expected="the hooks from before", got=f"{more} more, {fewer} gone", **hints)


# ---------------------------------------------------------------- 15-01.1


def _reachable(loss: Tensor) -> list[Node]:
    found, stack = {loss.grad_fn}, [loss.grad_fn]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                stack.append(node)
    return list(found)


def _watched(loss: Tensor, function: Callable[[], Any]) -> tuple[set[Node], Any]:
    """The nodes that ran while the function did, and what it returned."""
    ran: set[Node] = set()
    handles = [node.register_prehook(lambda _, node=node: ran.add(node)) for node in _reachable(loss)]
    try:
        return ran, function()
    finally:
        for handle in handles:
            handle.remove()


class _Halves(Function):
    """Two outputs, of a tensor and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> tuple[Tensor, Tensor]:
        ctx.by = by
        return x * by, x * (1 - by)

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> tuple[Tensor, None]:
        return one * ctx.by + two * (1 - ctx.by), None


def _random_graph() -> tuple[Tensor, list[Tensor]]:
    """A loss and up to three inputs that are a part of it: leaves, results, one of two outputs, the loss itself."""
    leaves = [torch.randn(2, requires_grad=random.random() < 0.8) for _ in range(random.randint(2, 4))]
    leaves[0].requires_grad_()
    made = list(leaves)
    for _ in range(random.randint(1, 9)):
        a, b, c = (random.choice(made) for _ in range(3))
        made += random.choice(
            (lambda a=a, b=b: [a + b], lambda a=a, b=b: [a * b],
             lambda a=a, b=b, c=c: [torch.cat([a[:1], c[:1], b[:1]])[:2]], lambda a=a: [torch.tanh(a)],
             lambda a=a, b=b: torch.stack([a, b]).unbind(), lambda a=a: _Halves.apply(a, 0.3))
        )()  # fmt: skip
    loss = leaves[0].sum() + sum(t.sum() for t in random.sample(made, min(len(made), 3)))
    nodes = set(_reachable(loss))
    parts = [t for t in (*made, loss) if t.requires_grad and torch.autograd.graph.get_gradient_edge(t).node in nodes]
    grads = torch.autograd.grad(loss, parts, retain_graph=True, allow_unused=True)  # of two outputs one may be no part
    parts = [part for part, grad in zip(parts, grads, strict=True) if grad is not None]
    return loss, random.choices(parts, k=random.randint(1, 3))


@exercise("15-01.1", "Which nodes run", points=15, demands=3)
def nodes_that_run(trial: Trial, answer: Any) -> None:
    """`answer(loss, inputs)` returns the set of nodes that torch.autograd.grad(loss, inputs) runs."""
    x = torch.randn(2, requires_grad=True)
    got = answer(torch.tanh(x).sum(), [x])
    trial.needs(
        "returns a set",
        isinstance(got, set | frozenset),
        expected="a set of nodes",
        got=type(got).__name__,
        hint="see what the signature returns",
    )
    with trial.group("the nodes are those that torch.autograd.grad runs", hint="which nodes lead to which?", see=1):
        for _ in range(60):
            loss, inputs = _random_graph()
            want, _ = _watched(
                loss, lambda loss=loss, inputs=inputs: torch.autograd.grad(loss, inputs, retain_graph=True)
            )
            got, names = (
                set(answer(loss, list(inputs))),
                [torch.autograd.graph.get_gradient_edge(t).node.name() for t in inputs],
            )
            strange = {type(node).__name__ for node in got if not isinstance(node, Node)}
            trial.that(
                "elements",
                not strange,
                expected="nodes and nothing else",
                got=", ".join(sorted(strange)),
                hint="which line adds that, and what can next_functions hold?",
            )
            missing, more = ([node.name() for node in nodes] for nodes in (want - got, got - want))
            trial.that(
                f"a graph of {len(_reachable(loss))} nodes, those of the inputs: {', '.join(names)}",
                not missing + more,
                expected=f"{len(want)} nodes",
                got=f"{len(got)}; not found: {', '.join(missing) or 'none'}; too many: {', '.join(more) or 'none'}",
            )
    loss = torch.tanh(x).exp().sum()
    ran, _ = _watched(loss, lambda: answer(loss, [x]))
    trial.that(
        "no node is run",
        not ran,
        expected="none ran",
        got=f"{len(ran)} ran",
        hint="does something of yours compute a gradient?",
        see=1,
    )
    hint = "how deep do your calls nest, and how often is a node visited?"
    with trial.group("long chains and many paths take less than a second", hint=hint, see=2):
        for kind, sizes in (("doublings", range(8, 61, 2)), ("nodes in a chain", (300, 3000))):
            x = torch.randn((), requires_grad=True)
            for size in sizes:  # what takes twice as long for each more fails before it takes for ever
                y = x
                for _ in range(size):
                    y = y + y if kind == "doublings" else y.neg()
                seconds, got = float("inf"), None
                for _ in range(3):
                    start = perf_counter()
                    got = answer(y, [x])
                    seconds = min(seconds, perf_counter() - start)
                    if seconds < 0.02:
                        break
                limit = 0.15 if size < 60 else 1.0
                case = f"{size} {kind}"
                want = "less than 1 s" if limit == 1.0 else f"less than {limit} s, or 60 take more than 1 s"
                trial.that(case, seconds < limit, expected=want, got=f"{seconds:.2f} s")
                if seconds >= limit:  # reached only where this item is left out
                    break
                trial.equal(f"nodes that run, {case}", len(got), size)


# ---------------------------------------------------------------- 15-01.2


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


def _kept(apply: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> tuple[int, int, int]:
    """Bytes of the input of 64 elements and of all else that outlive the output of a call, wherever they are kept,
    while its node lives; and what is left of both when the node is gone."""
    leaf = torch.randn(64, dtype=dtype, requires_grad=True)
    with _Memory() as memory:
        x = leaf * 1
        y = apply(x)
    node, later = y.grad_fn, y + 0  # in torch 2.11 what is saved for backward is kept by a graph only, not by Python
    own = StorageWeakRef(x.untyped_storage())
    given = leaf.untyped_storage().data_ptr()
    plain = [
        value for value in vars(node).values() if isinstance(value, list | tuple | dict | set | bytes | np.ndarray)
    ]
    python = sum(sys.getsizeof(value) for value in plain if np.size(value) > 16)  # a shape is fine
    del x, y, plain
    gc.collect()
    sizes = {made.cdata: size for made, size in memory.made if not made.expired() and made.cdata != given}
    input_, all_ = sizes.get(own.cdata, 0), sum(sizes.values())
    del node, later
    gc.collect()
    left = {made.cdata: size for made, size in memory.made if not made.expired() and made.cdata != given}
    return input_, all_ - input_ + python, sum(left.values())


@exercise(
    "15-01.2",
    "Swish as a Function",
    points=10,
    demands=10,
    stand_in=lambda: SimpleNamespace(apply=F.silu),
    stand_in_name="F.silu",
)
def swish(trial: Trial, answer: Any) -> None:
    """`answer` is a Function: x · sigmoid(x), keeps x only, twice differentiable."""
    trial.needs(
        "is an autograd Function",
        isinstance(answer, type) and issubclass(answer, Function),
        expected="a class derived from torch.autograd.Function",
        got=_kind(answer),
        hint="see how `Softplus` of section 2 is declared",
    )
    apply = answer.apply

    def near(case: str, got: Any, want: Tensor, hint: str = "", see: int | None = None, after: str = "") -> None:
        """As `close`, with room for a few roundings to bfloat16, and for those to float64 only."""
        room = {torch.bfloat16: {"rtol": 0.05, "atol": 0.05}, torch.float64: {"rtol": 1e-12, "atol": 1e-14}}
        hint, see = ("", 3) if case in (far, fine) else (hint, see)
        trial.close(case + after, got, want, hint=hint, see=see, **room.get(want.dtype, {}))

    far, fine = "|x| from 10 to 10⁴", "x from -45 to 45, torch.float64"
    large = 10.0 ** torch.arange(1, 5)
    large = torch.cat([-large, torch.zeros(1), large])
    x = large.clone().requires_grad_()
    apply(x)
    trial.equal("x stays as it is", x, large, hint="does an operation of forward write into x?", free=True)
    cases = [*_inputs(torch.float32, torch.bfloat16), (far, large)]
    tails = [  # where value and slope are small, and no less precise for it
        ("x from -700 to -10, torch.float64", torch.linspace(-700, -10, 70, dtype=torch.float64), 1e-9),
        ("x from -80 to -10, torch.float32", torch.linspace(-80, -10, 36), 1e-4),
    ]
    hint = "compare forward with the formula, and its shape and dtype with x's"
    with trial.group("the value is x · sigmoid(x)", hint=hint):
        for case, x in cases:
            want = F.silu(x)
            near(case, apply(x.detach().requires_grad_()), want)
        x = torch.cat([torch.linspace(-45, 45, 31), 20 + torch.rand(9), -20 - torch.rand(9)]).double()
        trial.close(fine, apply(x), x / (1 + torch.exp(-x)), rtol=1e-13, atol=1e-13, see=3)
        for case, x, room in tails:
            trial.close(case, apply(x), x / (1 + torch.exp(-x)), rtol=room, atol=0.0, see=3)
    formula = "take one x through the formula: the x of which call, and times what? See the contract of backward"
    contract = "see the contract of backward in section 2; does each step take a grad_output of any strides?"
    with trial.group("the gradient is grad_output · f'(x)", hint=contract):
        for case, x in (*cases, (fine, torch.linspace(-45, 45, 61, dtype=torch.float64))):
            x = x.detach().requires_grad_()
            first, _, reference = apply(x), apply(2 * x), F.silu(x)  # a backward belongs to its own forward
            sent = torch.randn_like(x)
            (want,) = torch.autograd.grad(reference, x, sent)
            for again in (True, False):
                (got,) = torch.autograd.grad(first, x, sent.clone(), retain_graph=again, allow_unused=True)
                near(case, got, want, formula, 1, "; apply(2 * x) was called before backward")
        for case, x, room in tails:
            y = 1 / (1 + torch.exp(-x.detach()))
            (got,) = torch.autograd.grad(apply(x.requires_grad_()).sum(), x, allow_unused=True)
            trial.close(case, got, y * (1 + x.detach() * (1 - y)), rtol=room, atol=0.0, see=3)
        x = torch.randn(3, 4, requires_grad=True)
        sent = torch.randn(()).expand(3, 4)
        near(
            "an expanded grad_output",
            torch.autograd.grad(apply(x), x, sent)[0],
            torch.autograd.grad(F.silu(x), x, sent)[0],
        )

    x = torch.randn(3, 4, requires_grad=True)
    sent = torch.randn_like(x)
    incoming = sent.clone()
    torch.autograd.grad(apply(x), x, incoming)
    trial.equal("grad_output stays as it is", incoming, sent, hint="does backward write into grad_output?", free=True)

    points = [torch.randn(shape, dtype=torch.float64).t().requires_grad_() for shape in ((), (5,), (2, 3))]
    with trial.group(
        "gradcheck in float64", hint="is backward's result the same each time, and of x's dtype?", free=True
    ):
        for x in points:
            gradcheck(apply, x)
    with trial.group(
        "gradgradcheck in float64", hint="can autograd follow backward, from x and from grad_output?", see=2, free=True
    ):
        for x in points:
            gradgradcheck(apply, x)

    x = torch.randn(5)
    with trial.group(
        "torch.func can differentiate it and map it over a batch",
        hint="read in section 2 what the second style has, and what vmap needs",
    ):
        table, along = torch.randn(2, 3), "along which dimension does vmap go?"
        got = torch.func.vmap(apply, in_dims=1, out_dims=1)(table)
        trial.close("vmap over dimension 1", got, F.silu(table), hint=along)
        got = torch.func.vmap(torch.func.vmap(apply), in_dims=1)(table)
        trial.close("vmap of vmap", got, F.silu(table).t(), hint=along)
        trial.close(
            "vmap(grad)", torch.func.vmap(torch.func.grad(apply))(x), torch.func.vmap(torch.func.grad(F.silu))(x)
        )
    _, kept, left = _kept(apply)
    trial.that(
        "keeps its input and no other memory",
        kept == 0,
        expected="no more than x itself",
        got=f"{kept} bytes of other memory; x has {64 * 4}",
        hint="what of forward is still referred to when backward has not run?",
        free=True,
    )
    trial.that(
        "what it keeps goes away with its node",
        left == 0,
        expected="nothing is left when the output and its node are gone",
        got=f"{left} bytes, x's among them",
        hint="who but the node refers to x?",
        free=True,
    )
    x = torch.randn(3, requires_grad=True)
    y = apply(x)
    with torch.no_grad():
        x.add_(1)
    noticed = False
    try:
        y.sum().backward()
    except RuntimeError:
        noticed = True
    trial.that(
        "the input goes through save_for_backward",
        noticed,
        expected="backward raises when x was overwritten since forward",
        got="a gradient from the overwritten x",
        hint="read 'save_for_backward or an attribute?' in section 2 again",
        free=True,
    )


# ---------------------------------------------------------------- 15-01.3


def _quantised(x: Tensor, levels: int) -> Tensor:
    """Stand-in: the values by operators, the slope by clamp."""
    inside = x.clamp(-1, 1)
    steps = levels - 1
    return inside + (torch.round((inside + 1) / 2 * steps) / steps * 2 - 1 - inside).detach()


@exercise(
    "15-01.3",
    "A quantiser with a straight-through gradient",
    points=20,
    demands=5,
    stand_in=lambda: SimpleNamespace(apply=_quantised),
    stand_in_name="a composition with detach",
)
def quantise(trial: Trial, answer: Any) -> None:
    """`answer.apply(x, levels)` rounds to the nearest level; straight-through where |x| <= 1; keeps a byte each."""
    trial.needs(
        "is an autograd Function",
        isinstance(answer, type) and issubclass(answer, Function),
        expected="a class derived from torch.autograd.Function",
        got=_kind(answer),
        hint="see how `SignClipped` is declared",
    )
    apply = answer.apply
    x = torch.tensor([-3.0, -1.0, -0.4, 0.0, 0.7, 1.0, 2.0], requires_grad=True)
    given = x.detach().clone()
    apply(x, 3)
    trial.equal("x stays as it is", x.detach(), given, hint="does an operation of forward write into x?", free=True)

    def cases() -> Iterator[tuple[str, Tensor, int]]:
        for levels in (2, 3, 4, 7, 16, 255, 256):
            for dtype in (torch.float32, torch.float64):
                for case, x in _inputs(dtype) if levels in (2, 7) else ():
                    yield f"{levels} levels, {case}", x, levels
                level = torch.linspace(-1, 1, levels, dtype=torch.float64)
                close = level + 0.9998 / (levels - 1)  # a ten-thousandth of a step below the middle
                if dtype == torch.float64:
                    yield f"{levels} levels, close to the middle of two", torch.cat([close, -close]), levels
                at = torch.cat([level, level + 0.45 * 2 / (levels - 1), level - 0.45 * 2 / (levels - 1)]).to(dtype)
                yield f"{levels} levels, at each of them and beside, {dtype}", at, levels
                one = torch.tensor([1.0, -1.0], dtype=dtype)
                far = torch.tensor([1.01, -1.01, 1e4, -1e4, torch.inf, -torch.inf, 0.0, -0.0], dtype=dtype)
                beside = [one, *(torch.nextafter(one, k * one) for k in (0, 2)), far]
                yield f"{levels} levels, ±1, just beside and far, {dtype}", torch.cat(beside), levels

    item = "the value is the nearest level"
    hint = "take one x through your steps: which are the levels, which is nearest, what is outside, in which dtype?"
    with trial.group(item, hint=hint, see=1):
        for case, x, levels in cases():
            got, (room, digits) = apply(x.clone(), levels), (1e-12, 15) if x.dtype == torch.float64 else (1e-6, 9)
            kinds = [f"{tensor.dtype}, shape {tuple(tensor.shape)}" for tensor in (x, got)]
            same = kinds[0] == kinds[1]
            hint = "which dtype and which shape has x?"
            trial.that(f"dtype and shape, {case}", same, expected=kinds[0], got=kinds[1], hint=hint)
            level = torch.linspace(-1, 1, levels, dtype=torch.float64)
            distances = (x.double().clamp(-1, 1)[..., None] - level).abs()
            found = (got.double()[..., None] - level).abs().argmin(-1)
            chosen, nearest = distances.gather(-1, found[..., None])[..., 0], distances.amin(-1)
            want = level[torch.where(chosen <= nearest + room, found, distances.argmin(-1))]  # of two as near, either
            value = got.detach().double()
            for place in (~((value - want).abs() <= room)).nonzero()[:1].tolist():
                at, right, wrong = (f"{t[tuple(place)].item():.{digits}g}" for t in (x, want, value))
                trial.that(f"x = {at}, {case}", False, expected=right, got=wrong)
    with trial.group(item, hint="does each step work on the device of x? Here it is 'meta', which holds no data"):
        x = torch.empty(3, device="meta", requires_grad=True)  # stands for a device that isn't the CPU
        y = apply(x, 4)
        y.sum().backward()
        trial.equal("device", str(y.device), "meta")
    with trial.group(
        "the gradient is the incoming one where |x| <= 1, and 0 elsewhere",
        hint="at one place: what comes in, and what was |x| in this call? And is there a value for each argument?",
        see=2,
    ):
        for case, x, levels in cases():
            x, given = x.clone().requires_grad_(), x
            sent = torch.randn_like(x)
            first, _ = apply(x, levels), apply(0.1 * x, levels)  # a backward belongs to its own forward
            for again in (True, False):
                (got,) = torch.autograd.grad(first, x, sent.clone(), retain_graph=again, allow_unused=True)
                want, after = torch.where(given.abs() <= 1, sent, torch.zeros_like(sent)), "apply(0.1 * x, levels)"
                trial.close(f"{case}; {after} was called before backward", got, want, rtol=0, atol=0)
        x = torch.tensor([0.5, 1.5, -0.5]).requires_grad_()
        sent = torch.randn(()).expand(3)
        (got,) = torch.autograd.grad(apply(x, 4), x, sent)
        trial.close("an expanded grad_output", got, sent * torch.tensor([1.0, 0.0, 1.0]), rtol=0, atol=0)
        x = torch.tensor([0.5, 1.5, -0.5, -2.0, 3.0]).requires_grad_()
        sent, want = torch.full((5,), torch.inf), torch.tensor([torch.inf, 0.0, torch.inf, 0.0, 0.0])
        (got,) = torch.autograd.grad(apply(x, 4), x, sent)
        trial.close("an infinite grad_output", got, want, rtol=0, atol=0, hint="is a product with 0 always 0?", see=2)
    x = torch.randn(8, requires_grad=True)
    sent = torch.randn(8)
    incoming = sent.clone()
    torch.autograd.grad(apply(x, 5), x, incoming)
    trial.equal("grad_output stays as it is", incoming, sent, hint="does backward write into grad_output?", free=True)
    with trial.group("keeps at most one byte for each element", hint="what does backward have to know of x?", see=2):
        for dtype in (torch.float32, torch.float64):
            for levels in (2, 256):
                own, more, left = _kept(lambda x, levels=levels: apply(x, levels), dtype)
                case = f"{levels} levels, {dtype}"
                trial.that(case, own + more <= 64, expected="64 bytes for 64 elements", got=f"{own + more} bytes")
                case, hint = f"when its node is gone, {case}", "who but the node refers to it?"
                trial.that(case, not left, expected="0 bytes", got=f"{left} bytes", hint=hint)


# ---------------------------------------------------------------- 15-01.4


class _Argmax(nn.Module):
    """Returns an integer of no dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach().argmax()


class _Net(nn.Module):
    """A submodule called twice, by two names, and overwritten; one not called; dropout; outputs of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 5)
        self.block = nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True))
        self.again = self.block[0]
        self.drop = nn.Dropout(0.5)
        self.top = _Argmax()
        self.turn = nn.Flatten(0, 1)
        self.idle = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.block(self.block(self.stem(x))))
        self.top(x)
        return self.turn(x[:, ::2])

    def outputs(self, x: Tensor) -> dict[str, list[Tensor]]:
        """What each submodule returns in a forward, by operators alone."""
        stem = F.linear(x, self.stem.weight, self.stem.bias)
        inner, outer = self.block[0].weight, self.block[0].bias
        one = F.linear(stem, inner, outer)
        two = F.linear(one.relu(), inner, outer)
        drop = F.dropout(two.relu(), 0.5, self.training)
        return {
            "stem": [stem],
            "block": [one.relu(), two.relu()],
            "block.0": [one, two],
            "again": [one, two],
            "block.1": [one.relu(), two.relu()],
            "drop": [drop],
            "top": [drop.argmax()],
            "turn": [drop[:, ::2].flatten()],
            "idle": [],
        }


def _record(recorder: Any, *steps: Callable[[], object]) -> dict[str, list[Tensor]]:
    """What the recorder holds after a block with these steps."""
    with recorder:
        for step in steps:
            step()
    return recorder.activations


def _lacking_and_more(got: dict[Any, Any], want: list[str]) -> tuple[list[Any], list[Any]]:
    return [key for key in want if key not in got], [key for key in got if key not in want]


def _seeded(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(0)  # dropout
    return model(x)


class _Recorder:
    """Stand-in."""

    def __init__(self, model: nn.Module, names: list[str], to_cpu: bool = True) -> None:
        self.model, self.names, self.device = model, names, "cpu" if to_cpu else None
        self.activations: dict[str, list[Tensor]] = {}

    def __enter__(self) -> "_Recorder":
        modules = dict(self.model.named_modules(remove_duplicate=False))
        chosen = {name: modules[name] for name in self.names}
        self.activations = {name: [] for name in chosen}
        self.handles = [
            module.register_forward_hook(
                lambda m, args, out, name=name: self.activations[name].append(
                    out.detach().to(self.device or out.device, copy=True)
                )
            )
            for name, module in chosen.items()
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()


@exercise(
    "15-01.4",
    "An activation recorder that cleans up",
    points=20,
    demands=13,
    stand_in=lambda: _Recorder,
    stand_in_name="the course's own recorder",
)
def activation_recorder(trial: Trial, answer: Any) -> None:
    """`answer(model, names, to_cpu)` is a context manager that records outputs of submodules."""
    net, x = _Net(), torch.randn(3, 4)
    handles = [m.register_forward_hook(lambda *_: None) for m in net.modules()]
    before = _hooks(net)
    torch.manual_seed(0)
    names = list(net.outputs(x))

    recorder = answer(net, names)
    entered = None
    with trial.group("activations has the names asked for", hint="has each name, called or not, a list?", see=1):
        with recorder as entered:
            _seeded(net, x)
        recorded = recorder.activations
        right, got = False, f"a {type(recorded).__name__}"
        if isinstance(recorded, dict):
            lacking, more = (", ".join(map(repr, keys)) for keys in _lacking_and_more(recorded, names))
            right, got = not lacking + more, f"lacking: {lacking or 'none'}; too many: {more or 'none'}"
        trial.that("keys", right, expected=f"a dictionary with the {len(names)} names as keys", got=got)
    trial.that(
        "`with ... as recorder` gives the recorder",
        entered is recorder,
        expected="the recorder itself",
        got=repr(entered),
        hint="what does `as` bind?",
    )
    with trial.group(
        "one tensor for each call, equal to the output when it was recorded",
        hint="is it this submodule's output, and does the model run in its own mode?",
    ):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for training, to_cpu in ((True, True), (False, True), (True, False), (False, False)):
                net.to(dtype).train(training)
                x = torch.randn(3, 4, dtype=dtype)
                torch.manual_seed(0)
                want = net.outputs(x)
                recorded = _record(answer(net, names, to_cpu=to_cpu), lambda x=x: _seeded(net, x))
                for name in names:
                    got = recorded[name]
                    case = f"{name!r}, {dtype}, to_cpu={to_cpu}"
                    hint, see = "has this submodule a hook, and does each call add to its list?", None
                    if any(isinstance(recorded[k], list) and len(recorded[k]) > len(want[k]) for k in names):
                        hint, see = "which hook appends to which list?", 4
                    trial.that(
                        f"calls of {case}",
                        isinstance(got, list) and len(got) == len(want[name]),
                        expected=f"a list of length {len(want[name])}",
                        got=f"length {len(got)}" if isinstance(got, list) else type(got).__name__,
                        hint=hint,
                        see=see,
                    )
                    for made, right in zip(got, want[name], strict=True):
                        other = isinstance(made, Tensor) and made.dtype != right.dtype
                        hint, see = ("which dtype has the output?", None) if other else ("", None)
                        if not other and name in ("block.0", "again"):  # what the next one overwrites
                            hint, see = "whose output is it, and is its memory written to later?", 2
                        trial.equal(case, made, right, hint=hint, see=see)
        one, two, three = (nn.Linear(4, 4) for _ in range(3))
        inner = nn.Sequential()
        inner.add_module("b", two)
        alike, x = nn.Sequential(), torch.randn(3, 4)
        for name, part in (("a1", one), ("a", inner), ("b", three)):
            alike.add_module(name, part)
        with torch.no_grad():
            right = {"a": two(one(x)), "b": three(two(one(x)))}
        recorded = _record(answer(alike, ["a", "b"]), lambda: alike(x))
        for name, output in right.items():
            case, hint = f"{name!r} of a model that has 'a1', 'a', 'a.b' and 'b'", "which submodule has just this name?"
            trial.equal(case, recorded[name], [output], hint=hint, see=1)
        recorded = _record(answer(alike, ["b", "a", "b"]), lambda: alike(x))
        for name, output in right.items():
            case, hint = f"{name!r} of ['b', 'a', 'b']", "how many hooks add to the list of one name?"
            got = recorded[name]
            length = f"length {len(got)}" if isinstance(got, list) else type(got).__name__
            right_length = isinstance(got, list) and len(got) == 1
            trial.that(f"calls of {case}", right_length, expected="a list of length 1", got=length, hint=hint)
            trial.equal(case, got, [output], hint=hint)
    net.float().train()
    x = torch.randn(3, 4)
    recorded = _record(answer(net, names), lambda: net(x))
    trial.that(
        "recordings are detached",
        not any(tensor.requires_grad for tensors in recorded.values() for tensor in tensors),
        expected="requires_grad False",
        got="a tensor that keeps the graph alive",
        hint="what does a stored output still refer to?",
        free=True,
    )
    with trial.group(
        "the model computes and learns as without the recorder",
        hint="what do your hooks return, and does a line of yours change gradients?",
        see=4,
        free=True,
    ):
        net.train()
        net.block.eval()
        results: list[Any] = []

        def modes() -> dict[str, str]:
            return {n or "the model": "training" if m.training else "evaluation" for n, m in net.named_modules()}

        earlier = modes()
        for block in (nullcontext(), answer(net, names)):
            net.zero_grad()
            with block:
                _seeded(net, x).sum().backward()
                output = _seeded(net, x)
            output.sum().backward()
            results.append({"output": output} | {f"{n}.grad": p.grad for n, p in net.named_parameters()})
        trial.equal("output and gradients", results[1], results[0])
        trial.equal("modes", modes(), earlier, hint="which line of yours changes a mode?")
        with torch.no_grad():
            _record(answer(net, names), lambda: net(x))
            trial.equal(
                "gradients are off as before the block",
                torch.is_grad_enabled(),
                False,
                hint="which line of yours turns them on?",
            )
        net.train()
        results = []
        for block in (nullcontext(), answer(net, names)):
            torch.manual_seed(0)
            torch.rand(3)
            with block:
                results.append({"after dropout": net(x), "in the block": torch.rand(1)})
            results[-1]["after the block"] = torch.rand(1)
        trial.equal("random numbers", results[1], results[0], hint="which line of yours draws one, or sets a seed?")
        same = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
        given = torch.randn(3, 4)
        want = given.relu()
        _record(answer(same, ["0"]), lambda: same(given))
        trial.equal("a tensor that a module hands on and the next one overwrites", given, want)

    with trial.group("your hooks are gone and those of others are there", hint="which handles are yours?", see=3):
        late: list[Any] = []

        def someone_else() -> None:
            late.append(net.stem.register_forward_hook(lambda *_: None))

        def fails() -> None:
            net(torch.randn(3, 9))

        _same_hooks(trial, "after blocks", net, before)
        _record(recorder, someone_else)
        new = [hook[-1] for hook in _hooks(net) if hook not in before]
        name, state = "after a block in which somebody else registered one", "there" if late[0].id in new else "gone"
        got = f"it is {state}, {len(new) - (late[0].id in new)} others are new"
        trial.that(name, new == [late[0].id], expected="it is there, 0 others are new", got=got)
        late[0].remove()
        with suppress(RuntimeError):
            _record(recorder, fails)
        _same_hooks(trial, "after an exception", net, before)
        outer, inner = answer(net, ["stem"]), answer(net, ["stem"])
        outer.__enter__()
        inner.__enter__()
        net(x)
        outer.__exit__(None, None, None)
        net(x)
        inner.__exit__(None, None, None)
        net(x)
        counts = [len(one.activations["stem"]) for one in (outer, inner)]
        for which, count, want in zip(("first", "second"), counts, (1, 2), strict=True):
            trial.equal(f"calls that the {which} of two overlapping recorders saw", count, want)

    error: BaseException | None = None
    for kind in (KeyError, ValueError, StopIteration, GeneratorExit):

        def fail(kind: type[BaseException] = kind) -> None:
            raise kind

        recorder = answer(net, ["stem"])
        try:
            error = None
            _record(recorder, lambda: net(x), fail)
        except (Exception, GeneratorExit) as caught:
            error = caught
        trial.that(
            "an exception goes on",
            type(error) is kind,
            expected=f"the block's {kind.__name__}",
            got="no exception" if error is None else repr(error),
            hint="what does __exit__ return, or raise?",
            see=3,
            free=True,
        )
    trial.that(
        "the recordings stay after an exception",
        len(recorder.activations.get("stem", ())) == 1,
        expected="1 recording of 'stem'",
        got=f"{len(recorder.activations.get('stem', ()))}",
        hint="what does __exit__ do with them?",
    )
    counts = [len(_record(recorder, *[lambda: net(x)] * calls)["stem"]) for calls in (5, 1)]
    got, want = (f"{first} recordings, then {then}" for first, then in (counts, (5, 1)))
    item = "entering again starts afresh"
    trial.that(item, counts == [5, 1], expected=want, got=got, hint="when are the lists made?")

    before = _hooks(net)
    hint = "when is a name looked up, and what is raised if there is none?"
    with trial.group("an unknown name raises KeyError on entering", hint=hint, see=1):
        for name in ("nowhere", "block.7", "stem.weight"):
            make = lambda name=name: answer(net, ["stem", name])  # noqa: E731
            recorder = trial.call(f"before entering, with the name {name!r}", make)
            try:
                recorder.__enter__()
                error = None
                recorder.__exit__(None, None, None)
            except Exception as caught:
                error = caught
            trial.that(
                f"entering with the name {name!r}",
                isinstance(error, KeyError) and name in str(error),
                expected=f"KeyError naming {name!r}",
                got="no exception" if error is None else repr(error),
            )
    item = "no hook is left after an unknown name"
    _same_hooks(trial, item, net, before, hint="what was registered or removed before it raised?", see=1)
    for handle in handles:
        handle.remove()

    # the meta device holds no data: a copy to the CPU raises there, so it can stand for a device elsewhere
    there, x = nn.Sequential(nn.Linear(4, 2, device="meta")), torch.empty(3, 4, device="meta")
    hint = "is to_cpu looked at? The output is on the device 'meta' here, which holds no data"
    with trial.group("to_cpu=False leaves them on the output's device", hint=hint):
        outputs = []
        (kept,) = _record(answer(there, ["0"], to_cpu=False), lambda: outputs.append(there(x)))["0"]
        trial.equal("device", str(kept.device), "meta")
        shared = kept.untyped_storage()._cdata == outputs[0].untyped_storage()._cdata
        hint = "is a copy made whatever the device?"
        trial.that("memory", not shared, expected="a copy", got="the output's own memory", hint=hint, see=2)
    left: list[str] = []
    with suppress(NotImplementedError, RuntimeError, TypeError):
        left = [str(kept.device) for kept in _record(answer(there, ["0"]), lambda: there(x))["0"] if not kept.is_cpu]
    item = "by default they are moved to the CPU"
    trial.that(
        item,
        not left,
        expected="device cpu",
        got=f"device {', '.join(left)}",
        hint="where are the recordings of a GPU's model?",
    )


# ---------------------------------------------------------------- 15-01.5


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


class _Fails(nn.Module):
    """Hands its input on, or raises `error`."""

    error: Exception | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


class _Branches(nn.Module):
    """Linear layers of all kinds in two branches; in the order of their names they are not called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.last = nn.Linear(4, 5)
        self.body = nn.Sequential(nn.Linear(width, 4, bias=False), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        self.side = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x) * torch.sigmoid(self.side(x)))


def _linear_nets() -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    """Nets, each with the shape of one input."""
    yield "one layer", nn.Linear(3, 4), (3,)
    yield "one layer without a bias", nn.Linear(3, 2, bias=False), (3,)
    yield "two layers", nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3)), (1, 3, 4)
    yield "branches", _Branches(3), (3,)
    many = [layer for i in range(6) for layer in (nn.Linear(3, 3, bias=i % 2 == 0), nn.Tanh())]
    yield "deep", nn.Sequential(*many, nn.Linear(3, 7)), (3,)


def _norms_one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """By definition: a forward and a backward for each image."""
    norms = []
    for one, label in zip(x.split(1), y.split(1), strict=True):
        grads = torch.autograd.grad(F.cross_entropy(model(one), label), list(model.parameters()))
        norms.append(torch.sqrt(sum(grad.square().sum() for grad in grads)))
    return torch.stack(norms)


def _mistake_in_norms(got: Any, want: Tensor) -> dict[str, Any]:
    """The hint for a mistake that shows in the numbers, if they show one."""
    if not isinstance(got, Tensor) or got.shape != want.shape or got.device != want.device:
        return {}
    if got.dtype != want.dtype or torch.allclose(got, want):
        return {"hint": "in which dtype do you add up?"}
    if torch.allclose(got * len(want), want):
        return {"hint": "is each image's loss whole?", "see": 2}
    return {}


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
    hint = "which hooks are called, those of an earlier call too? What does each add, and what becomes of the sum?"
    with (
        warnings.catch_warnings(),
        trial.group("the norm of each image's own gradient", hint=hint, see=1),
    ):
        warnings.simplefilter("ignore")  # of full backward hooks, that x needs no gradient
        for dtype in (torch.float64, torch.float32):
            for case, net, shape in _linear_nets():
                net.to(dtype)
                for number in (1, 2, 9):
                    x = 3 * torch.randn(number, *shape, dtype=dtype)
                    y = torch.randint(2, (number,))
                    for training in (True, False):
                        net.train(training)
                        room = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-12}
                        got = answer(net, x.clone().requires_grad_(not training), y)
                        got = got.detach() if isinstance(got, Tensor) else got
                        want = _norms_one_by_one(net, x, y)
                        room |= _mistake_in_norms(got, want)
                        images = f"{number} image{'s' * (number > 1)}"
                        needs = "" if training else ", x requires a gradient"
                        trial.close(f"{case}, {images}, {dtype}{needs}", got, want, **room)
    failing = _Fails()
    net = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Tanh(), nn.Linear(4, 3, bias=False), failing)
    net[0].eval()
    x, y = torch.randn(6, 3), torch.randint(3, (6,))

    def rest() -> dict[str, Any]:
        modes = {f"training of {name or 'the model'}": module.training for name, module in net.named_modules()}
        return {**modes, "x": x.detach().clone(), "x.requires_grad": x.requires_grad, "x.grad": x.grad}

    rest_before = rest()
    net[0].weight.grad, net[3].weight.grad = torch.full((4, 3), 2.0), torch.zeros(3, 4)  # and none for the bias
    grads = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    calls: list[int] = []
    net.register_forward_hook(lambda *_: calls.append(1))
    with warnings.catch_warnings(), _Backwards() as backwards:
        warnings.simplefilter("ignore")
        got = answer(net, x, y)
    trial.that(
        "is detached", not got.requires_grad, expected="requires_grad False", got="True", hint="who keeps a graph?"
    )
    trial.equal("calls the model once", len(calls), 1, hint="how can one call serve all images?", see=1)
    trial.that(
        "runs one backward",
        backwards.count == 1 and not backwards.batched,
        expected="1, of one loss",
        got="one for each of many losses at once" if backwards.batched else f"{backwards.count}",
        hint="what does one backward of the sum tell of each image and each layer?",
        see=1,
    )
    net[0].register_full_backward_hook(lambda *_: None)
    net[3].weight.register_post_accumulate_grad_hook(lambda p: None)
    hooks = _hooks(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the full backward hook above says that x needs no gradient
        answer(net, x, y)

    def same_grads(case: str) -> None:
        for (name, p), before in zip(net.named_parameters(), grads, strict=True):
            trial.equal(f"{name}.grad {case}", p.grad, before)

    with trial.group("each parameter's .grad is what it was", hint="which functions write to .grad?", see=3):
        same_grads("after a call")
    states, rests, errors = [_hooks(net)], [rest()], []
    gradients = [[None if p.grad is None else p.grad.clone() for p in net.parameters()]]
    for error in (None, ZeroDivisionError("in the model")):  # the loss raises for a label of 10, then the model
        failing.error = error
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer(net, x, y if error else y + 7)
            errors.append(None)
        except (IndexError, RuntimeError, ZeroDivisionError) as caught:
            errors.append(caught)
        states.append(_hooks(net))
        rests.append(rest())
        gradients.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
    cases = ("a call", "an exception of the loss", "one of the model")
    hint = "which handles are yours, and which of your lines always run?"
    with trial.group("your hooks are gone and those of others are there", hint=hint, see=3):
        for case, state in zip(cases, states, strict=True):
            more, fewer = len(set(state) - set(hooks)), len(set(hooks) - set(state))
            got = f"{more} more, {fewer} gone"
            trial.that(f"after {case}", not more + fewer, expected="the hooks from before", got=got)
    hint = "which functions write to .grad, and which of your lines always run?"
    with trial.group("each parameter's .grad is what it was", hint=hint, see=3):
        for case, found in zip(cases, gradients, strict=True):
            for (name, _), grad, before in zip(net.named_parameters(), found, grads, strict=True):
                trial.equal(f"{name}.grad after {case}", grad, before)
    hint = "which of your lines change what they were given?"
    with trial.group("x and the modules' modes are what they were", hint=hint):
        for case, found in zip(cases, rests, strict=True):
            trial.equal(f"after {case}", found, rest_before)
    trial.that(
        "an exception goes on",
        errors[0] is not None and isinstance(errors[1], ZeroDivisionError),
        expected="the loss's IndexError, then the model's ZeroDivisionError",
        got=", ".join(type(error).__name__ if error else "no exception" for error in errors),
        hint="who catches it?",
        free=True,
    )


# ---------------------------------------------------------------- 15-01.6


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


def _twins(dtype: torch.dtype = torch.float32) -> tuple[_TiedNet, _TiedNet]:
    net = _TiedNet().to(dtype)
    return net, copy.deepcopy(net)


def _backward(nets: tuple[_TiedNet, ...], scale: float = 1.0, head: int = 0) -> None:
    """One backward on the same random data for each net; adds to its gradients."""
    dtype = nets[0].scale.dtype
    x, y = torch.randn(8, 6, dtype=dtype), torch.randn(8, 3, dtype=dtype)
    for net in nets:
        (scale * F.mse_loss(net(x, head), y)).backward()


def _gradients(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in net.named_parameters()}


def _undo(trial: Trial, made: Any) -> Callable[[], object]:
    """What an answer returned, which must be a function."""
    trial.needs(
        "returns a function",
        callable(made),
        expected="a function that removes the hooks",
        got=repr(made),
        hint="see what the signature returns",
    )
    return made


def _undoes(
    trial: Trial,
    undo: Callable[[], object],
    net: _TiedNet,
    bystander: nn.Module,
    hooks: list[tuple[int, str, int]],
    **see: int,
) -> None:
    """Pass if `undo` leaves the hooks from before, those that others added since, and a net that accumulates only.

    `bystander` is a model that the answer was called on too.
    """
    elsewhere = _hooks(bystander)
    others = net.first.weight.register_post_accumulate_grad_hook(lambda p: None)
    with trial.group("undoing removes your hooks and no others", hint="which handles are yours?", **see):
        undo()
        after = _hooks(net)
        new = [hook[-1] for hook in after if hook not in hooks]
        expected = "no new hook but the one that somebody else has added"
        got = f"{len(new) - (others.id in new)} others; that one is {'there' if others.id in new else 'gone'}"
        trial.that("new hooks", new == [others.id], expected=expected, got=got)
        trial.equal("hooks from before that are gone", sum(hook not in after for hook in hooks), 0)
        trial.equal("hooks that another model has lost", sum(h not in _hooks(bystander) for h in elsewhere), 0)
        net.zero_grad()
        usual = copy.deepcopy(net)
        _backward((net, usual), 20.0)
        trial.equal("gradients of a backward", _gradients(net), _gradients(usual))
        trial.equal("parameters after it", net.state_dict(), usual.state_dict())


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


@exercise(
    "15-01.6",
    "Stretch: an optimizer in backward",
    points=15,
    demands=5,
    stand_in=lambda: _step_in_backward,
    stand_in_name="the course's own",
)
def step_in_backward(trial: Trial, answer: Any) -> None:
    """`answer(model, make_optimizer)` makes backward train; returns a function that undoes it."""
    optim = torch.optim
    makers = {
        "SGD": lambda params: optim.SGD(params, lr=0.1),
        "SGD with momentum": lambda params: optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=0.1, nesterov=True),
        "Adam": lambda params: optim.Adam(params, lr=0.01),
        "AdamW": lambda params: optim.AdamW(params, lr=0.03, amsgrad=True),
        "RMSprop": lambda params: optim.RMSprop(params, lr=0.01),
        "SGD with weight decay on matrices": lambda params: optim.SGD(
            [
                {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in params if p.dim() < 2]},
            ],
            lr=0.1,
        ),
    }
    undone, _ = _twins()
    undone.scale.register_post_accumulate_grad_hook(lambda p: None)
    hooks, start = _hooks(undone), {p: p.detach().clone() for p in undone.parameters()}
    arrived: list[Tensor] = []
    late: list[Tensor] = []
    early: list[Tensor] = []
    watching = [
        p.register_post_accumulate_grad_hook(  # comes before the answer's hook on the same parameter
            lambda _: early.extend(p for p in arrived if p.grad is not None or torch.equal(p, start[p]))
        )
        for p in undone.parameters()
        if p.requires_grad
    ]
    undo = _undo(trial, answer(undone, makers["SGD"]))

    def watch(param: Tensor) -> None:  # what arrives now may still be dealt with after this hook
        late.extend(p for p in arrived if p.grad is not None or torch.equal(p, start[p]))
        arrived.append(param)

    handles = [p.register_post_accumulate_grad_hook(watch) for p in undone.parameters() if p.requires_grad]
    _backward((undone,))
    for handle in (*handles, *watching):
        handle.remove()
    late += early
    held = sum(p.grad is not None for p in arrived)
    kept_old = sum(torch.equal(p, start[p]) for p in arrived)
    hint, see = "what is in .grad when your hook has run, and when does it run?", None
    if kept_old:
        hint = "which parameter does each call of your hook deal with?"
        see = 2 if kept_old >= len(arrived) - 1 else None  # as if each call dealt with the loop's last one
    trial.that(
        "each parameter is updated and its gradient dropped before the next one comes",
        not late and not held,
        expected="each one updated, and its gradient dropped",
        got=f"{len(set(late))} of {len(arrived)} were not when the next gradient came; at the end {kept_old} are not "
        f"updated, {held} have a gradient",
        hint=hint,
        see=see,
    )
    equal = "parameters equal the usual loop's bit for bit"
    hint = "what is make_optimizer called with, and how often? Which gradient leads to which step, and how often?"
    with trial.group(equal, hint=hint):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            pairs = {name: _twins(dtype) for name in makers}
            optimizers, kept = {}, []  # an answer may live as long as what it returned
            for name, (net, usual) in pairs.items():
                kept.append(answer(net, makers[name]))
                optimizers[name] = makers[name]([p for p in usual.parameters() if p.requires_grad])
            rounds = {
                "after five backwards": ((0, 1), (0, 1), (1, 1), (0, 0), (1, 1)),
                "after a loss times a million": ((0, 1e6),),
                "after a loss that is NaN": ((0, float("nan")),),
            }
            for when, steps in rounds.items():  # one head has no gradient, then zeros for all
                for head, scale in steps:
                    for name, (net, usual) in pairs.items():
                        optimizers[name].zero_grad()
                        _backward((net, usual), scale, head)
                        optimizers[name].step()
                for name, (net, usual) in pairs.items():
                    for (parameter, p), q in zip(net.named_parameters(), usual.parameters(), strict=True):
                        see = 1 if name in ("SGD with momentum", "Adam", "AdamW", "RMSprop") else None
                        see = None if parameter == "unused" else see
                        case = f"{parameter}, {name}, {dtype}, {when}"
                        trial.equal(case, p.detach(), q.detach(), hint=hint, see=see)
    net, usual = _twins()
    for one in (net.frozen.bias, net.unused):  # from before the one was frozen, and of another loss
        one.grad = torch.ones_like(one)
    kept.append(answer(net, makers["SGD"]))
    _backward((net,))
    item = "frozen parameters stay"
    trial.equal(
        item, net.frozen.bias.detach(), usual.frozen.bias.detach(), hint="which ones may be stepped?", free=True
    )
    trial.equal(
        "one that a backward doesn't reach isn't stepped, even if it has a gradient",
        net.unused.detach(),
        usual.unused.detach(),
        hint="which parameters does one step of yours look at?",
        see=1,
        free=True,
    )
    _undoes(trial, undo, undone, net, hooks)
    with trial.group(equal, hint="what is left of the first call when yours is called once more?"):
        usual = copy.deepcopy(undone)
        optimizer = makers["Adam"]([p for p in usual.parameters() if p.requires_grad])
        optimizer.zero_grad()
        kept.append(answer(undone, makers["Adam"]))
        undone.zero_grad()
        _backward((undone, usual))
        optimizer.step()
        for (parameter, p), q in zip(undone.named_parameters(), usual.parameters(), strict=True):
            trial.equal(f"{parameter}, Adam after SGD was undone", p.detach(), q.detach())
