"""Checks of the exercises in 15-01, Custom Autograd Functions & Hooks."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as every_module
from torch.nn.utils import clip_grad_value_
from torch.overrides import TorchFunctionMode

from shared.checks.feedback import Trial, exercise


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


def _same_hooks(trial: Trial, item: str, model: nn.Module, before: list[tuple[int, str, int]], **hints: Any) -> None:
    """Pass if the model has the hooks that it had."""
    after = _hooks(model)
    more, fewer = len(set(after) - set(before)), len(set(before) - set(after))
    trial.that(item, not more + fewer, expected="the hooks from before", got=f"{more} more, {fewer} gone", **hints)


# ---------------------------------------------------------------- 15-01.1


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


def _kept_besides_the_input(apply: Callable[[Tensor], Tensor]) -> int:
    """Bytes that a call made and that outlive its output, wherever they are kept, while its node lives."""
    x = torch.randn(64, requires_grad=True)
    with _Memory() as memory:
        y = apply(x)
    node = y.grad_fn  # keeps what is saved for backward
    del y
    own = StorageWeakRef(x.untyped_storage())
    kept = {made.cdata: size for made, size in memory.made if made != own and not made.expired()}
    del node
    return sum(kept.values())


@exercise(
    "15-01.1",
    "Swish as a Function",
    points=10,
    stand_in=lambda: SimpleNamespace(apply=F.silu),
    stand_in_name="F.silu",
)
def swish(trial: Trial, answer: Any) -> None:
    """`answer` is a Function: x · sigmoid(x), keeps x only, twice differentiable."""
    trial.needs(
        "is an autograd Function",
        isinstance(answer, type) and issubclass(answer, Function),
        expected="a class derived from torch.autograd.Function",
        got=repr(answer),
        hint="see how `Softplus` of section 2 is declared",
    )
    apply = answer.apply

    def near(case: str, got: Any, want: Tensor) -> None:
        """As `close`, with room for a few roundings to bfloat16, and for those to float64 only."""
        room = {torch.bfloat16: {"rtol": 0.05, "atol": 0.05}, torch.float64: {"rtol": 1e-9, "atol": 1e-11}}
        trial.close(case, got, want, see=3 if case in (far, fine) else None, **room.get(want.dtype, {}))

    far, fine = "|x| from 10 to 10⁴", "x from -40 to 40, torch.float64"
    large = 10.0 ** torch.arange(1, 5)
    large = torch.cat([-large, torch.zeros(1), large])
    x = large.clone().requires_grad_()
    apply(x)
    trial.equal("x stays as it is", x, large, hint="does an operation of forward write into x?")
    cases = [*_inputs(torch.float32, torch.bfloat16), (far, large)]
    with trial.group("the value is x · sigmoid(x)", hint="compare forward with the formula, and its dtype with x's"):
        for case, x in cases:
            want = F.silu(x)
            near(case, apply(x.detach().requires_grad_()), want)
    with trial.group(
        "the gradient is grad_output · f'(x)", hint="read the contract of backward in section 2 again", see=1
    ):
        for case, x in (*cases, (fine, torch.linspace(-40, 40, 21, dtype=torch.float64))):
            x = x.detach().requires_grad_()
            first, _, reference = apply(x), apply(2 * x), F.silu(x)  # a backward belongs to its own forward
            sent = torch.randn_like(x)
            (want,) = torch.autograd.grad(reference, x, sent)
            for again in (True, False):
                (got,) = torch.autograd.grad(first, x, sent.clone(), retain_graph=again, allow_unused=True)
                near(case, got, want)
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
    trial.equal("grad_output stays as it is", incoming, sent, hint="does backward write into grad_output?")

    points = [torch.randn(shape, dtype=torch.float64).t().requires_grad_() for shape in ((), (5,), (2, 3))]
    with trial.group("gradcheck in float64", hint="is the dtype of x kept in every step?", see=3):
        for x in points:
            gradcheck(apply, x)
    with trial.group(
        "gradgradcheck in float64", hint="can autograd follow backward, from x and from grad_output?", see=2
    ):
        for x in points:
            gradgradcheck(apply, x)

    kept = _kept_besides_the_input(apply)
    trial.that(
        "keeps its input and no other memory",
        kept == 0,
        expected="no more than x itself",
        got=f"{kept} bytes besides the {64 * 4} of x",
        hint="what of forward is still referred to when backward has not run?",
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
    )


# ---------------------------------------------------------------- 15-01.2


class _HookedReversal(nn.Module):
    """Stand-in, written with a tensor hook instead of a Function."""

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        if y.requires_grad:
            y.register_hook(lambda grad, alpha=self.alpha: -alpha * grad)
        return y


@exercise(
    "15-01.2",
    "Gradient reversal as a Module",
    points=10,
    stand_in=lambda: _HookedReversal,
    stand_in_name="a Module with a tensor hook",
)
def gradient_reversal(trial: Trial, answer: Any) -> None:
    """`answer(alpha)` is a Module: identity in forward, gradient times -alpha in backward."""
    module = answer(alpha=0.5)
    trial.needs(
        "is a Module without parameters",
        isinstance(module, nn.Module) and not list(module.parameters()),
        expected="an nn.Module with no parameters",
        got=f"{type(module).__name__} with {len(list(getattr(module, 'parameters', list)()))} parameters",
        hint="what of it should an optimizer change?",
    )
    module.train()

    with trial.group("returns its input unchanged", hint="what may forward do to the values?", see=1):
        special = torch.tensor([-0.0, 0.0, torch.nan, torch.inf, -torch.inf, 1e-45])
        kinds = (torch.float32, torch.float64, torch.bfloat16)
        for case, x in (*_inputs(*kinds), ("integers", torch.arange(3)), ("special values", special)):
            for training in (True, False):
                module.train(training)
                trial.equal(case, module(x), x)
                if x.is_floating_point():
                    trial.equal(case, module(x.clone().requires_grad_()), x)
    with trial.group(
        "the gradient is -alpha times the incoming one",
        hint="does backward of your Function run, and with alpha?",
        see=2,
    ):
        for case, x in _inputs(*kinds):
            sent = torch.randn_like(x)
            for alpha in (0.5, -1.5, 0.0, 3, random.uniform(0.1, 0.9)):
                for made in (answer(alpha), answer(alpha=alpha).eval()):
                    x = x.detach().requires_grad_()
                    (got,) = torch.autograd.grad(made(x), x, sent.clone(), allow_unused=True)
                    exact = {"rtol": 1e-12, "atol": 0.0} if x.dtype == torch.float64 else {}
                    trial.close(f"alpha {alpha}, {case}, training {made.training}", got, -alpha * sent, **exact)
        x = torch.randn(2, 3, requires_grad=True)
        ones = torch.ones(2, 3)
        (got,) = torch.autograd.grad(answer()(x), x, ones.clone(), allow_unused=True)
        trial.close("no alpha given", got, -ones)
    x = torch.randn(2, 3, requires_grad=True)
    sent, ones = torch.randn(2, 3), torch.ones(2, 3)
    incoming = sent.clone()
    torch.autograd.grad(answer(0.5)(x), x, incoming)
    trial.equal("the incoming gradient stays as it is", incoming, sent, hint="does backward write into grad_output?")

    x = torch.randn(2, 3, requires_grad=True)
    (got,) = torch.autograd.grad([3 * x, answer(0.5)(x)], x, [torch.ones(2, 3), torch.ones(2, 3)], allow_unused=True)
    trial.close(
        "only the path through the module is reversed",
        got,
        torch.full_like(x, 3 - 0.5),
        hint="is the output a tensor of its own, or the input itself?",
        see=1,
    )
    with trial.group("a backward uses alpha of its own forward", hint="at which moment is alpha read?", see=3):
        module, other, calls = answer(0.5), answer(0.25), []
        for made, alpha in ((module, 0.5), (module, 2.0), (other, 0.25), (module, 7.0)):
            x = torch.randn(2, 3, requires_grad=True)
            if alpha > 1:
                made.alpha = alpha
            calls.append((alpha, x, made(x)))
            made(torch.randn(2, 3))  # without a backward
        for number in (2, 0, 3, 1, 1, 3, 2, 0):  # in no order, each twice
            alpha, x, y = calls[number]
            (got,) = torch.autograd.grad(y, x, torch.ones(2, 3), retain_graph=True, allow_unused=True)
            trial.close(f"the call with alpha {alpha}", got, torch.full_like(x, -alpha))


# ---------------------------------------------------------------- 15-01.3


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


def _seeded(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(0)  # dropout
    return model(x)


@exercise("15-01.3", "An activation recorder that cleans up", points=25)
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
        shown = sorted(recorded) if isinstance(recorded, dict) else recorded
        trial.that("keys", shown == sorted(names), expected=f"a dictionary with the keys {sorted(names)}", got=shown)
    trial.that(
        "`with ... as recorder` gives the recorder",
        entered is recorder,
        expected="the recorder itself",
        got=repr(entered),
        hint="what does `as` bind?",
    )
    with trial.group(
        "one tensor for each call, equal to the output when it was recorded",
        hint="which hook appends where, and is the memory that it stores written to later?",
        see=2,
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
                    trial.that(
                        f"calls of {case}",
                        isinstance(got, list) and len(got) == len(want[name]),
                        expected=f"a list of {len(want[name])} tensors",
                        got=f"{len(got)} tensors" if isinstance(got, list) else type(got).__name__,
                        hint="which hook appends to which list?",
                        see=4,
                    )
                    for made, right in zip(got, want[name], strict=True):
                        trial.equal(case, made, right)
    net.float().train()
    x = torch.randn(3, 4)
    recorded = _record(answer(net, names), lambda: net(x))
    trial.that(
        "recordings are detached",
        not any(tensor.requires_grad for tensors in recorded.values() for tensor in tensors),
        expected="requires_grad False",
        got="a tensor that keeps the graph alive",
        hint="what does a stored output still refer to?",
    )
    with trial.group(
        "the model computes and learns as without the recorder",
        hint="does a hook return something, or the block change a mode?",
        see=4,
    ):
        net.train()
        net.block.eval()
        modes, results = [module.training for module in net.modules()], []
        for block in (nullcontext(), answer(net, names)):
            net.zero_grad()
            with block:
                _seeded(net, x).sum().backward()
                output = _seeded(net, x)
            output.sum().backward()
            results.append([output, *(p.grad for p in net.parameters() if p.grad is not None)])
        trial.equal("output and gradients", results[1], results[0])
        trial.equal("modes", [module.training for module in net.modules()], modes)
        net.train()
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
        trial.equal("after a block in which somebody else registered one: new hooks", new, [late[0].id])
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
        trial.equal("calls that two overlapping recorders saw", counts, [1, 2])

    error: BaseException | None = None
    recorder = answer(net, ["stem"])
    try:
        _record(recorder, lambda: net(x), lambda: next(iter(())))
    except Exception as caught:
        error = caught
    trial.that(
        "an exception goes on",
        isinstance(error, StopIteration),
        expected="the block's StopIteration",
        got="no exception" if error is None else repr(error),
        hint="what does __exit__ return?",
        see=3,
    )
    trial.that(
        "the recordings stay after an exception",
        len(recorder.activations.get("stem", ())) == 1,
        expected="1 recording of 'stem'",
        got=f"{len(recorder.activations.get('stem', ()))}",
        hint="what does __exit__ do with them?",
    )
    counts = [len(_record(recorder, *[lambda: net(x)] * calls)["stem"]) for calls in (5, 1)]
    trial.equal("entering again starts afresh", counts, [5, 1], hint="where are the lists made?")

    before = _hooks(net)
    with trial.group("an unknown name raises KeyError on entering", hint="when is a name looked up?", see=1):
        for name in ("nowhere", "block.7", "stem.weight"):
            recorder = answer(net, ["stem", name])
            try:
                recorder.__enter__()
                error = None
                recorder.__exit__(None, None, None)
            except Exception as caught:
                error = caught
            trial.that(
                name,
                isinstance(error, KeyError) and name in str(error),
                expected=f"KeyError naming {name!r}",
                got=repr(error),
            )
    item = "no hook is left after an unknown name"
    _same_hooks(trial, item, net, before, hint="what was registered or removed before it raised?", see=1)
    for handle in handles:
        handle.remove()

    # the meta device holds no data: a copy to the CPU raises there, so it can stand for a device elsewhere
    there, x = nn.Sequential(nn.Linear(4, 2, device="meta")), torch.empty(3, 4, device="meta")
    with trial.group("to_cpu=False leaves them on the output's device", hint="is to_cpu looked at?", see=2):
        outputs = []
        (kept,) = _record(answer(there, ["0"], to_cpu=False), lambda: outputs.append(there(x)))["0"]
        trial.equal("device", str(kept.device), "meta")
        shared = kept.untyped_storage()._cdata == outputs[0].untyped_storage()._cdata
        trial.that("memory", not shared, expected="a copy", got="the output's own memory")
    left: list[str] = []
    with suppress(NotImplementedError, RuntimeError, TypeError):
        left = [str(kept.device) for kept in _record(answer(there, ["0"]), lambda: there(x))["0"] if not kept.is_cpu]
    item = "by default they are moved to the CPU"
    trial.that(item, not left, expected="device cpu", got=left, hint="where are the recordings of a GPU's model?")


# ---------------------------------------------------------------- 15-01.4


class _Shift(nn.Module):
    """Overwrites its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class _WithSpare(nn.Module):
    """Calls `body` and leaves a ReLU uncalled."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.spare, self.body = nn.ReLU(), nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _relu_net(dims: int) -> tuple[_WithSpare, Callable[..., Tensor]]:
    """A random net of linear layers (dims 0) or convolutions, with units that are seldom or never active; and what
    makes a batch of a given size for it, for convolutions also one of wider images."""
    if dims == 0:
        twice = nn.ReLU()
        inner = nn.Sequential(nn.Dropout(0.9), nn.Linear(6, 5), nn.ReLU(inplace=True), _Shift())
        end = nn.LeakyReLU(), nn.Linear(6, 6), nn.ReLU6(), nn.Linear(6, 1), nn.ReLU()
        net = _WithSpare(nn.Linear(3, 6), twice, inner, nn.Linear(5, 6), twice, *end)
    else:
        conv, norm = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "BatchNorm"))
        frozen = norm(6).requires_grad_(False).eval()  # as in fine-tuning
        top = nn.Sequential(nn.Dropout(0.9), conv(6, 5, 1), norm(5), nn.ReLU())
        net = _WithSpare(conv(1, 6, 2), frozen, nn.ReLU(), top)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-2.0, 0.5)

    def batch(size: int, wider: int = 0) -> Tensor:
        return torch.randn(size, *((3,), (1, 3 + wider), (1, 3, 4 + wider), (1, 2, 3, 4 + wider))[dims])

    return net, batch


def _leaves(body: nn.Sequential) -> Iterator[nn.Module]:
    for module in body:
        yield from _leaves(module) if isinstance(module, nn.Sequential) else [module]


@torch.no_grad()
def _dead_by_definition(net: _WithSpare, batches: list[Tensor]) -> dict[str, Tensor]:
    """The definition, word for word: every output kept, module by module, and looked at one unit at a time."""
    net = copy.deepcopy(net).eval()
    outputs: dict[nn.Module, list[Tensor]] = {}
    for x in batches:
        for module in _leaves(net.body):
            x = module(x)
            if isinstance(module, nn.ReLU):
                outputs.setdefault(module, []).append(x.clone())
    dead = {}
    for name, module in net.named_modules():
        if module in outputs:
            units = range(outputs[module][0].shape[1])
            dead[name] = torch.tensor([not any(y.select(1, unit).any() for y in outputs[module]) for unit in units])
    return dead


@exercise("15-01.4", "A dead-unit detector", points=25)
def dead_units(trial: Trial, answer: Any) -> None:
    """`answer(model, batches)` returns ReLU name → bool tensor, True where a unit was always zero."""
    net, batch = _relu_net(dims=0)
    got, want = answer(net, [batch(3)]), sorted(_dead_by_definition(net, [batch(3)]))
    trial.that(
        "has the name of every nn.ReLU that was called, and no other",
        isinstance(got, dict) and sorted(got) == want,
        expected=str(want),
        got=str(sorted(got) if isinstance(got, dict) else got),
        hint="this net has nested ones, one that is used twice and one that is not called",
    )
    with trial.group("a unit is dead if all its outputs are zero", hint="which outputs belong to one unit?", see=1):
        for dims in (0, 1, 2, 3):
            for wider in (0, 0, 0, 2):
                net, batch = _relu_net(dims)
                batches = [batch(random.randint(1, 4)) for _ in range(random.choice((1, 2, 5)))]
                batches += [batch(random.randint(1, 4), wider)] * bool(wider and dims)
                sizes = [tuple(x.shape) for x in batches]
                net.eval()  # the pass has an item of its own
                layers = f"{dims}-d convolutions" if dims else "linear layers"
                got = answer(net, batches)
                for name, want in _dead_by_definition(net, batches).items():
                    trial.equal(f"{name}, {layers}, batches of {sizes}", got[name], want)
        for dtype, little in ((torch.float32, 1e-38), (torch.bfloat16, 1e-38), (torch.float64, 1e-300)):
            x = torch.zeros(2000, 4, dtype=dtype)
            x[random.randrange(len(x))] = torch.tensor([0, little, 1, -1], dtype=dtype)
            got, want = answer(_WithSpare(nn.ReLU()), [x]), torch.tensor([True, False, False, True])
            trial.equal(f"outputs 0 but for one input, there {little}, {dtype}", got["body.0"], want)

    net, batch = _relu_net(dims=2)
    net.other = nn.Sequential(net.body[1])  # a submodule in eval mode has a second parent, in train mode
    batches = [batch(4), batch(3)]
    net(batches[0]).sum().backward()
    before = copy.deepcopy([(name, p, p.requires_grad, p.grad) for name, p in net.named_parameters()])
    buffers, modes = copy.deepcopy(dict(net.named_buffers())), [m.training for m in net.modules()]
    passes: list[tuple[bool, bool]] = []
    for module in net.modules():
        module.register_forward_hook(lambda m, args, out: passes.append((m.training, out.requires_grad)))
    hooks = _hooks(net)
    with trial.group("autograd is on or off as it was", hint="who turns it off, and who on again?", see=3):
        for on in (True, False):
            with torch.set_grad_enabled(on):
                answer(net, batches)
                trial.equal(f"was {'on' if on else 'off'}", torch.is_grad_enabled(), on)
            if on:
                seen = list(passes)
    trial.that(
        "runs in eval mode",
        not any(training for training, _ in seen),
        expected="no submodule in train mode during the pass",
        got="some in train mode",
        hint="what do dropout and batch norm do to what a unit sees?",
        see=3,
    )
    trial.that(
        "records no graph",
        not any(graph for _, graph in seen),
        expected="outputs without requires_grad",
        got="outputs with requires_grad",
        hint="what does autograd keep during the pass?",
        see=3,
    )
    item = "each submodule is in the mode it was in"
    trial.equal(item, [m.training for m in net.modules()], modes, hint="had all of them the same mode?", see=3)
    with trial.group("parameters, buffers and gradients are untouched", hint="what else has the pass changed?", see=3):
        trial.equal("buffers", dict(net.named_buffers()), buffers)
        for (name, p), (_, value, flag, grad) in zip(net.named_parameters(), before, strict=True):
            trial.equal(name, p.detach(), value)
            trial.equal(f"{name}.requires_grad", p.requires_grad, flag)
            trial.equal(f"{name}.grad", p.grad, grad)
    _same_hooks(trial, "the hooks are those from before", net, hooks, hint="which of them are yours?", see=3)

    modes, hooks, error = [m.training for m in net.modules()], _hooks(net), None
    try:
        answer(net, [batches[0], torch.zeros(1, 7, 2, 2), batches[1]])
    except RuntimeError as caught:
        error = caught
    item = "an exception goes on"
    trial.that(item, error is not None, expected="the model's RuntimeError", got="no exception", hint="who catches it?")
    with trial.group("everything is restored after an exception too", hint="which of your lines still run?", see=3):
        trial.equal("modes", [m.training for m in net.modules()], modes)
        trial.equal("autograd is on", torch.is_grad_enabled(), True)
        _same_hooks(trial, "hooks", net, hooks)


# ---------------------------------------------------------------- 15-01.5


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
        trial.equal("new hooks", [hook[-1] for hook in after if hook not in hooks], [others.id])
        trial.equal("hooks from before that are gone", [hook for hook in hooks if hook not in after], [])
        trial.equal("hooks that another model has lost", [h for h in elsewhere if h not in _hooks(bystander)], [])
        net.zero_grad()
        usual = copy.deepcopy(net)
        _backward((net, usual), 20.0)
        trial.equal("gradients of a backward", _gradients(net), _gradients(usual))
        trial.equal("parameters after it", net.state_dict(), usual.state_dict())


@exercise("15-01.5", "Clip as the gradient arrives", points=10)
def clip_at_accumulation(trial: Trial, answer: Any) -> None:
    """`answer(model, limit)` clips at accumulation and returns a function that undoes it."""
    net, usual = _twins()
    stale = {"frozen.weight": net.frozen.weight, "unused": net.unused, "heads.1.weight": net.heads[1].weight}
    for parameter in stale.values():
        parameter.grad = torch.full_like(parameter, 9.0)
    net.scale.register_hook(lambda grad: None)
    hooks = _hooks(net)
    undo = _undo(trial, answer(net, 0.0625))
    _backward((net, usual), 20.0)
    with trial.group(
        "weights, frozen and unreached gradients are left alone", hint="what does your hook write to?", see=2
    ):
        for (name, p), q in zip(net.named_parameters(), usual.parameters(), strict=True):
            trial.equal(f"{name} itself", p.detach(), q.detach())
        for name, p in stale.items():
            trial.equal(f"{name}.grad", p.grad, torch.full_like(p, 9.0))
    with trial.group(
        "gradients equal clip_grad_value_'s bit for bit", hint="what exactly is clipped, and when?", see=1
    ):
        for case in range(15):
            dtype = (torch.float32, torch.float64, torch.bfloat16)[case % 3]
            pair, limit = _twins(dtype), random.choice((0.1, 0.02, 0.003, 1))
            kept = [answer(pair[0], limit)]  # an answer may live as long as what it returned
            for step in range(3):  # without zero_grad between
                scale = random.choice((0.01, -1.0, 20.0)) if case else float("inf")
                _backward(pair, scale, head=step % 2)
                clip_grad_value_(pair[1].parameters(), limit)
                trial.equal(f"limit {limit}, {dtype}, backward {step + 1}", *map(_gradients, pair))
        pair = _twins()
        kept = [answer(pair[0], 0.25)]
        for one in pair:
            (one.unused * torch.tensor([-torch.inf, 0.1, 7.0])).sum().backward()
        clip_grad_value_(pair[1].parameters(), 0.25)
        trial.equal("an infinite gradient among others", *map(_gradients, pair))
        pair, others = _twins(), _twins()
        kept = [answer(pair[0], 0.01), answer(others[0], 2.0)]
        _backward(pair, 20.0)
        clip_grad_value_(pair[1].parameters(), 0.01)
        trial.equal("the first of two models with two limits", *map(_gradients, pair))
    _undoes(trial, undo, net, others[0], hooks, see=3)
    del kept


# ---------------------------------------------------------------- 15-01.6


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
    points=20,
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
    undo = _undo(trial, answer(undone, makers["SGD"]))
    arrived: list[Tensor] = []
    late: list[Tensor] = []

    def watch(param: Tensor) -> None:  # what arrives now may still be dealt with after this hook
        late.extend(p for p in arrived if p.grad is not None or torch.equal(p, start[p]))
        arrived.append(param)

    handles = [p.register_post_accumulate_grad_hook(watch) for p in undone.parameters() if p.requires_grad]
    _backward((undone,))
    for handle in handles:
        handle.remove()
    trial.equal(
        "each parameter is updated and its gradient dropped before the next one comes",
        (len(late), sum(p.grad is not None for p in arrived)),
        (0, 0),
        hint="what is left in memory when the next gradient arrives?",
    )
    equal = "parameters equal the usual loop's bit for bit"
    with trial.group(equal, hint="which optimizer steps what, and how often?", see=1):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            pairs = {name: _twins(dtype) for name in makers}
            optimizers, kept = {}, []  # an answer may live as long as what it returned
            for name, (net, usual) in pairs.items():
                kept.append(answer(net, makers[name]))
                optimizers[name] = makers[name]([p for p in usual.parameters() if p.requires_grad])
            for head, scale in ((0, 1), (0, 1), (1, 1), (0, 0), (1, 1)):  # one head has no gradient, then zeros for all
                for name, (net, usual) in pairs.items():
                    optimizers[name].zero_grad()
                    _backward((net, usual), scale, head)
                    optimizers[name].step()
            for name, (net, usual) in pairs.items():
                for (parameter, p), q in zip(net.named_parameters(), usual.parameters(), strict=True):
                    trial.equal(f"{parameter}, {name}, {dtype}", p.detach(), q.detach())
    net, usual = _twins()
    for one in (net.frozen.bias, net.unused):  # from before the one was frozen, and of another loss
        one.grad = torch.ones_like(one)
    kept.append(answer(net, makers["SGD"]))
    _backward((net,))
    item = "frozen parameters stay"
    trial.equal(item, net.frozen.bias.detach(), usual.frozen.bias.detach(), hint="which ones may be stepped?", see=2)
    trial.equal(
        "one that a backward doesn't reach isn't stepped, even if it has a gradient",
        net.unused.detach(),
        usual.unused.detach(),
        hint="which parameters does one step of yours look at?",
        see=1,
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
