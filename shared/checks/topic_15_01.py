"""Checks of the exercises in 15-01, Custom Autograd Functions & Hooks."""

import contextlib
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import clip_grad_value_

from shared.checks.feedback import Trial, exercise

# ---------------------------------------------------------------- 15-01.1


@exercise("15-01.1", "Swish as a Function", stand_in=lambda: SimpleNamespace(apply=F.silu))
def swish(trial: Trial, answer: Any) -> None:
    """`answer` is a Function: x · sigmoid(x), saves x only, twice differentiable."""
    trial.needs(
        "is an autograd Function",
        isinstance(answer, type) and issubclass(answer, Function),
        expected="a class derived from torch.autograd.Function",
        got=repr(answer),
        hint="class Swish(Function), with static methods forward and backward",
    )
    x = torch.randn(3, 5, requires_grad=True)
    before = x.detach().clone()
    y = answer.apply(x)
    trial.close("forward is x · sigmoid(x)", y.detach(), F.silu(before), hint="x * torch.sigmoid(x)")
    trial.equal("forward leaves its input as it was", x.detach(), before, hint="no in-place operation on x")

    grad_output = torch.linspace(-2, 2, 15).reshape(3, 5)
    sent = grad_output.clone()
    got = trial.call(
        "backward runs",
        lambda: torch.autograd.grad(y, x, sent)[0],
        hint="backward(ctx, grad_output) returns one tensor, the gradient of x; what it needs was saved in forward",
    )
    reference = before.clone().requires_grad_()
    (want,) = torch.autograd.grad(F.silu(reference), reference, grad_output)
    forgot_factor = isinstance(got, Tensor) and torch.allclose(got * grad_output, want, atol=1e-5)
    trial.that(
        "backward multiplies by grad_output",
        not forgot_factor,
        expected="grad_output · f'(x)",
        got="f'(x) alone",
        hint="backward is a vector-Jacobian product: it scales the incoming gradient",
    )
    trial.close(
        "backward is grad_output · f'(x)",
        got,
        want,
        hint="product rule: f'(x) = s · (1 + x · (1 - s)) with s = sigmoid(x)",
    )
    trial.equal("backward leaves grad_output as it was", sent, grad_output, hint="no in-place operation on grad_output")

    far = torch.tensor([-100.0, 0.0, 100.0], requires_grad=True)
    y = answer.apply(far)
    (slope,) = torch.autograd.grad(y.sum(), far)
    for item, got, want in (
        ("no overflow in forward at x = ±100", y.detach(), torch.tensor([0.0, 0.0, 100.0])),
        ("no overflow in backward at x = ±100", slope, torch.tensor([0.0, 0.5, 1.0])),
    ):
        trial.close(item, got, want, hint="exp(x) / (1 + exp(x)) overflows; torch.sigmoid(x) does not")

    points = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    for item, verify, hint in (
        (
            "gradcheck in float64",
            gradcheck,
            "work in x's dtype: a constant tensor of dtype float32 costs the precision that gradcheck needs",
        ),
        (
            "gradgradcheck in float64",
            gradgradcheck,
            "compute the sigmoid in backward from the saved x; one kept from forward, or detached, is a constant "
            "to the second derivative",
        ),
    ):
        problem = _problem(lambda verify=verify: verify(answer.apply, points))
        trial.that(item, problem is None, expected="True", got=problem, hint=hint)

    saved, attributes, x = _kept_by(answer)
    trial.that(
        "tensors go through save_for_backward",
        not attributes,
        expected="no tensor among ctx's attributes",
        got=f"ctx.{', ctx.'.join(attributes)}",
        hint="an attribute makes a reference cycle and bypasses the version counter",
    )
    own = x.untyped_storage()
    trial.that(
        "saves its input and nothing else",
        saved == {own.data_ptr(): own.nbytes()},
        expected=f"{own.nbytes()} bytes: those of x",
        got=f"{sum(saved.values())} bytes in {len(saved)} tensors",
        hint="ctx.save_for_backward(x) alone; recompute the rest",
    )


def _problem(verify: Callable[[], bool]) -> str | None:
    """First line of what gradcheck or gradgradcheck complains about, or None."""
    try:
        verify()
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def _kept_by(function: type[Function]) -> tuple[dict[int, int], list[str], Tensor]:
    """Storages that a call keeps (address → bytes), names of tensor attributes of ctx, and the input."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(64, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function.apply(x)
    attributes = [name for name, value in vars(y.grad_fn).items() if isinstance(value, Tensor)]
    return saved, attributes, x


# ---------------------------------------------------------------- 15-01.2


class _HookedReversal(nn.Module):
    """Stand-in, written with a tensor hook instead of a Function."""

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        y = x.view_as(x)
        if y.requires_grad:
            y.register_hook(lambda grad, alpha=self.alpha: -alpha * grad)
        return y


@exercise("15-01.2", "Gradient reversal as a Module", stand_in=lambda: _HookedReversal)
def gradient_reversal(trial: Trial, answer: Any) -> None:
    """`answer(alpha)` is a Module: identity in forward, gradient times -alpha in backward."""
    module = answer(alpha=0.5)
    trial.needs(
        "is a Module without parameters",
        isinstance(module, nn.Module) and not list(module.parameters()),
        expected="an nn.Module with no parameters",
        got=f"{type(module).__name__} with {len(list(getattr(module, 'parameters', list)()))} parameters",
        hint="alpha is a number, not an nn.Parameter",
    )
    x = torch.randn(2, 3, 4, requires_grad=True)
    y = module(x)
    trial.equal("forward is the identity", y.detach(), x.detach(), hint="return x.view_as(x) in the Function's forward")

    grad_output = torch.randn(2, 3, 4)
    sent = grad_output.clone()
    (got,) = torch.autograd.grad(y, x, sent, allow_unused=True)
    trial.that(
        "backward is the Function's",
        got is None or not torch.equal(got, grad_output),
        expected="a changed gradient",
        got="the incoming one, unchanged",
        hint="calling forward yourself makes no node; use ReverseGradient.apply(x, self.alpha)",
    )
    trial.close(
        "gradient is -alpha times the incoming one",
        got,
        -0.5 * grad_output,
        hint="return -ctx.alpha * grad_output: both the sign and the factor",
    )
    trial.equal("the incoming gradient is left as it was", sent, grad_output, hint="neg_() and mul_() write into it")

    (got,) = torch.autograd.grad((3 * x).sum() + module(x).sum(), x, allow_unused=True)
    trial.close(
        "only the path through the module is reversed",
        got,
        torch.full_like(x, 3 - 0.5),
        hint="the output has to be a new tensor with a node of its own; a hook on the input changes every path",
    )

    module.alpha = 2.0
    y = module(x)
    module.alpha = 7.0
    (got,) = torch.autograd.grad(y, x, grad_output, allow_unused=True)
    trial.close(
        "a backward uses alpha from its own forward",
        got,
        -2.0 * grad_output,
        hint="pass alpha to apply and keep it on ctx; reading self.alpha in backward sees the new value",
    )
    module.alpha = 0.0
    (got,) = torch.autograd.grad(module(x), x, grad_output, allow_unused=True)
    trial.close(
        "alpha = 0 gives a gradient of zeros", got, torch.zeros_like(x), hint="zero is a valid factor, not None"
    )


# ---------------------------------------------------------------- 15-01.3


def _hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def _foreign_hooks_stay(trial: Trial, model: nn.Module, x: Tensor, use: Callable[[], object]) -> None:
    """Pass if forward hooks that somebody else has put on every submodule are still called after `use()`."""
    called: set[nn.Module] = set()
    handles = [m.register_forward_hook(lambda m, args, out: called.add(m)) for m in model.modules()]
    use()
    called.clear()
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    trial.that(
        "hooks of others stay",
        called == set(model.modules()),
        expected="the hooks that were there before",
        got="some of them gone",
        hint="remove your own handles; clearing a module's dictionary of hooks takes everybody's",
    )


@exercise("15-01.3", "An activation recorder that cleans up")
def activation_recorder(trial: Trial, answer: Any) -> None:
    """`answer(model, names, to_cpu)` is a context manager that records outputs of submodules."""
    block = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True))
    model = nn.Sequential(nn.Linear(4, 6), block, nn.Linear(5, 2))
    x = torch.randn(3, 4)
    names = ["0", "1.0", "2"]
    first = model[0](x)
    want = {"0": first, "1.0": block[0](first), "2": model(x)}

    recorder = answer(model, names)
    with recorder as entered:
        output = model(x)
    trial.that(
        "`with ... as recorder` gives the recorder",
        entered is recorder,
        expected="the recorder itself",
        got=repr(entered),
        hint="__enter__ returns self",
    )
    recorded = recorder.activations
    trial.that(
        "has the names asked for",
        isinstance(recorded, dict) and sorted(recorded) == sorted(names),
        expected=str(sorted(names)),
        got=str(sorted(recorded) if isinstance(recorded, dict) else recorded),
        hint="activations is a dictionary with one entry for each name",
    )
    trial.that(
        "keeps a list with one tensor for each call",
        all(isinstance(v, list) and len(v) == 1 for v in recorded.values()),
        expected="lists of length 1 after one forward",
        got=str({k: len(v) if isinstance(v, list) else type(v).__name__ for k, v in recorded.items()}),
        hint="append to a list: a submodule may be called several times; and a hook made in a loop sees the loop's "
        "last name unless it binds its own (name=name)",
    )
    for name in names:
        trial.close(
            f"output of {name!r} as it was when recorded",
            recorded[name][0].detach(),
            want[name].detach(),
            hint="a later in-place ReLU writes into the same memory: detach().clone()",
        )
    trial.that(
        "recordings are detached",
        not any(v[0].requires_grad for v in recorded.values()),
        expected="requires_grad False",
        got="a tensor that keeps the graph alive",
        hint="output.detach()",
    )
    trial.that(
        "the model's own output still has its graph",
        output.requires_grad,
        expected="requires_grad True",
        got="False",
        hint="the hook must return None, and the block must not switch autograd off",
    )
    trial.equal("no hook is left after the block", _hook_count(model), 0, hint="remove every handle in __exit__")

    with recorder:
        model(x)
        model(x)
    trial.equal(
        "entering again starts afresh",
        [len(v) for v in recorder.activations.values()],
        [2, 2, 2],
        hint="empty the lists in __enter__; two calls in the block give two entries",
    )

    raised = False
    try:
        with recorder:
            model(x)
            model(torch.randn(3, 9))
    except RuntimeError:
        raised = True
    trial.that(
        "an exception in the block goes on",
        raised,
        expected="the block's RuntimeError",
        got="no exception",
        hint="__exit__ returns None (or False); True would swallow it",
    )
    trial.equal("no hook is left after an exception", _hook_count(model), 0, hint="__exit__ runs in this case too")
    trial.that(
        "what was recorded before the exception is kept",
        len(recorder.activations["2"]) == 1,
        expected="1 recording of '2'",
        got=f"{len(recorder.activations['2'])}",
        hint="don't clear the lists in __exit__",
    )

    error: BaseException | None = None
    try:
        with answer(model, ["0", "nowhere"]):
            pass
    except (KeyError, AttributeError) as caught:
        error = caught
    trial.that(
        "an unknown name raises KeyError",
        isinstance(error, KeyError) and "nowhere" in str(error),
        expected="KeyError naming 'nowhere'",
        got=repr(error),
        hint="look each name up in dict(model.named_modules())",
    )
    trial.equal(
        "no hook is left after an unknown name",
        _hook_count(model),
        0,
        hint="look up every name before the first hook is registered: __exit__ does not run when __enter__ raises",
    )

    def record() -> None:
        with recorder:
            model(x)

    _foreign_hooks_stay(trial, model, x, record)

    # the meta device holds no data, so a copy to the CPU raises: an answer that keeps to_cpu=False passes
    elsewhere = nn.Sequential(nn.Linear(4, 2, device="meta"))
    with answer(elsewhere, ["0"], to_cpu=False) as staying:
        trial.call(
            "to_cpu=False leaves tensors on their device",
            lambda: elsewhere(torch.empty(3, 4, device="meta")),
            hint="copy to the CPU only if self.to_cpu is true",
        )
    trial.equal(
        "to_cpu=False leaves tensors on their device",
        str(staying.activations["0"][0].device),
        "meta",
        hint="copy to the CPU only if self.to_cpu is true",
    )
    if torch.cuda.is_available():
        there = nn.Sequential(nn.Linear(4, 2, device="cuda"))
        with answer(there, ["0"]) as moving:
            there(torch.empty(3, 4, device="cuda"))
        trial.equal(
            "to_cpu=True moves them",
            str(moving.activations["0"][0].device),
            "cpu",
            hint="output.detach().clone().cpu()",
        )


# ---------------------------------------------------------------- 15-01.4


def _net_with_dead_units() -> tuple[nn.Sequential, list[Tensor], dict[str, Tensor]]:
    """A small net in mixed modes, two batches, and which units are dead on them by construction."""
    conv, norm, linear = nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.Linear(12, 4)
    with torch.no_grad():
        conv.weight.fill_(1.0)
        conv.bias.copy_(torch.tensor([0.0, -100.0, -5.0]))  # channel 1 never, channel 2 for inputs above 5 only
        linear.weight.zero_()
        linear.bias.copy_(torch.tensor([1.0, -1.0, 0.0, 2.0]))  # units 1 and 2 are never above zero
    head = nn.Sequential(linear, nn.ReLU())
    net = nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), nn.Dropout(0.9), head)
    net.train()
    norm.eval()  # frozen statistics, as in fine-tuning
    quiet = torch.rand(4, 1, 2, 2)
    loud = quiet.clone()
    loud[2, 0, 1, 1] = 9.0  # one position of one image wakes channel 2
    dead = {"2": torch.tensor([False, True, False]), "5.1": torch.tensor([False, True, True, False])}
    return net, [loud, quiet], dead


@exercise("15-01.4", "A dead-unit detector")
def dead_units(trial: Trial, answer: Any) -> None:
    """`answer(model, batches)` returns ReLU name → bool tensor, True where a unit was always zero."""
    net, batches, want = _net_with_dead_units()
    net(batches[0]).sum().backward()
    grads = {name: p.grad.clone() for name, p in net.named_parameters()}
    before = copy.deepcopy(net.state_dict())
    modes = [m.training for m in net.modules()]
    watched: list[tuple[bool, bool]] = []
    handle = net[5].register_forward_hook(lambda m, args, out: watched.append((net[4].training, out.requires_grad)))
    got = answer(net, batches)
    handle.remove()
    trial.that(
        "names every nn.ReLU and nothing else",
        isinstance(got, dict) and sorted(got) == sorted(want),
        expected=str(sorted(want)),
        got=str(sorted(got) if isinstance(got, dict) else got),
        hint="[n for n, m in model.named_modules() if isinstance(m, nn.ReLU)]: nested ones too",
    )
    for name, kind in (("5.1", "linear layer"), ("2", "convolution")):
        trial.equal(
            f"units of the {kind}",
            got[name],
            want[name],
            hint="bool, shape (units,); a channel is alive if it is above zero at any position of any image of any "
            "batch, and exactly zero is not active",
        )
    trial.equal("the other order of batches gives the same", answer(net, batches[::-1])["2"], want["2"], hint="combine "
        "the batches with 'or': the last one must not replace the others")  # fmt: skip
    trial.that(
        "runs in eval mode",
        not any(training for training, _ in watched),
        expected="model.eval() during the pass",
        got="dropout was active",
        hint="in train mode dropout and batch statistics change what a unit sees",
    )
    trial.that(
        "records no graph",
        not any(graph for _, graph in watched),
        expected="torch.no_grad()",
        got="outputs with requires_grad",
        hint="wrap the pass in torch.no_grad()",
    )
    trial.equal(
        "every module is in the mode it was in",
        [m.training for m in net.modules()],
        modes,
        hint="model.train() sets all submodules; one that was frozen in eval mode must stay so: note each module's own",
    )
    after = net.state_dict()
    trial.that(
        "parameters and buffers are unchanged",
        all(torch.equal(before[k], after[k]) for k in before),
        expected="the same state_dict",
        got="a changed one",
        hint="batch norm updates its running statistics in train mode",
    )
    trial.that(
        "gradients are untouched",
        all(p.grad is not None and torch.equal(p.grad, grads[name]) for name, p in net.named_parameters()),
        expected="the gradients from before",
        got="others, or none",
        hint="without a graph there is nothing to zero: no zero_grad",
    )
    trial.equal("no hook is left", _hook_count(net), 0, hint="remove the handles, in finally")
    _foreign_hooks_stay(trial, net, batches[0], lambda: answer(net, batches))
    bad = [batches[0], torch.zeros(1, 7, 2, 2)]
    with contextlib.suppress(RuntimeError):
        answer(net, bad)
    trial.equal(
        "no hook is left and the modes are back after a batch that raises",
        (_hook_count(net), [m.training for m in net.modules()]),
        (0, modes),
        hint="put the pass into try and the restoring into finally",
    )


# ---------------------------------------------------------------- 15-01.5


class _TiedNet(nn.Module):
    """One weight used twice, one frozen layer, one parameter that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(torch.tanh(self.second(torch.tanh(self.first(x))))))


def _post_hook_count(model: nn.Module) -> int:
    return sum(
        len(getattr(p, "_post_accumulate_grad_hooks", None) or ()) + len(p._backward_hooks or ())
        for p in model.parameters()
    )


def _loss(model: nn.Module, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    return scale * F.mse_loss(model(x), y)


@exercise("15-01.5", "Clip as the gradient arrives")
def clip_at_accumulation(trial: Trial, answer: Any) -> None:
    """`answer(model, limit)` clips at accumulation and returns a function that undoes it."""
    model = _TiedNet()
    usual = copy.deepcopy(model)
    limit = 0.0625  # a power of two: the same number in float32 and in Python
    remove = answer(model, limit)
    trial.that(
        "returns a function",
        callable(remove),
        expected="a function that removes the hooks",
        got=repr(remove),
        hint="keep the handles in a list and return a function that removes each",
    )
    model.zero_grad()
    _loss(model, seed=1, scale=20.0).backward()
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    trial.that(
        "no gradient is beyond the limit",
        largest <= limit,
        expected=f"at most {limit}",
        got=f"{largest:.3g}",
        hint="change param.grad itself: clamp_ (with underscore) in a post-accumulate hook; clamp makes a new tensor",
    )
    for item, fresh in (("after one backward", True), ("after a second one without zero_grad", False)):
        for net in (model, usual):
            if fresh:
                net.zero_grad()
            _loss(net, seed=1, scale=20.0).backward()
        clip_grad_value_(usual.parameters(), limit)
        _same_gradients(
            trial,
            f"gradients equal clip_grad_value_ bit for bit, {item}",
            model,
            usual,
            "clamp param.grad to [-limit, limit] in a post-accumulate hook; a tensor hook sees only what is added, "
            "not the sum",
        )
    trial.equal(
        "weights are not touched",
        [torch.equal(a, b) for a, b in zip(model.parameters(), usual.parameters(), strict=True)],
        [True] * len(list(usual.parameters())),
        hint="clip param.grad, not param",
    )
    other = nn.Linear(2, 1)
    stop = answer(other, 0.01)
    other(torch.full((1, 2), 50.0)).sum().backward()
    trial.close(
        "a second model may have another limit",
        other.weight.grad,
        torch.full((1, 2), 0.01),
        hint="use the limit that was given, not a constant",
    )
    stop()

    foreign = model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    remove()
    trial.equal(
        "after undoing, only a hook of somebody else's is left",
        _post_hook_count(model),
        1,
        hint="remove the handle of every parameter, and no hook that isn't yours",
    )
    foreign.remove()
    for net in (model, usual):
        net.zero_grad()
        _loss(net, seed=3, scale=20.0).backward()
    _same_gradients(
        trial, "gradients are unclipped after undoing", model, usual, "remove the handle of every parameter"
    )


def _same_gradients(trial: Trial, item: str, model: nn.Module, usual: nn.Module, hint: str) -> None:
    for (name, p), q in zip(model.named_parameters(), usual.parameters(), strict=True):
        if (p.grad is None) != (q.grad is None):
            trial.that(
                item,
                False,
                expected=f"{name}.grad is {'None' if q.grad is None else 'a tensor'}",
                got="the opposite",
                hint="frozen and unused parameters have no gradient; all others have one",
            )
        if q.grad is not None and not torch.equal(p.grad, q.grad):
            where = f"{name}: {p.grad.flatten()[:3].tolist()} ..."
            trial.that(item, False, expected=f"{name}: {q.grad.flatten()[:3].tolist()} ...", got=where, hint=hint)
    trial.passes(item)


# ---------------------------------------------------------------- 15-01.6


def _step_in_backward(
    model: nn.Module, make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> Callable[[], None]:
    """Stand-in: one optimizer a parameter, stepped by its post-accumulate hook."""
    optimizers = {param: make_optimizer([param]) for param in model.parameters() if param.requires_grad}

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    handles = [param.register_post_accumulate_grad_hook(step) for param in optimizers]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


@exercise("15-01.6", "An optimizer in backward", stand_in=lambda: _step_in_backward)
def step_in_backward(trial: Trial, answer: Any) -> None:
    """`answer(model, make_optimizer)` makes backward train; returns a function that undoes it."""
    makers = {
        "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
        "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    }
    for label, make in makers.items():
        model = _TiedNet()
        usual = copy.deepcopy(model)
        optimizer = make([p for p in usual.parameters() if p.requires_grad])
        remove = answer(model, make)
        trial.that(
            f"{label}: returns a function",
            callable(remove),
            expected="a function that removes the hooks",
            got=repr(remove),
            hint="keep the handles in a list and return a function that removes each",
        )
        held: list[int] = []
        counters = [
            p.register_post_accumulate_grad_hook(
                lambda _, model=model, held=held: held.append(sum(q.grad is not None for q in model.parameters()))
            )
            for p in model.parameters()
            if p.requires_grad
        ]
        for seed in range(4):
            _loss(model, seed).backward()
            optimizer.zero_grad()
            _loss(usual, seed).backward()
            optimizer.step()
        for counter in counters:
            counter.remove()
        trial.equal(
            f"{label}: every gradient is dropped as soon as it was used",
            (max(held), [p.grad for p in model.parameters()]),
            (0, [None] * len(list(model.parameters()))),
            hint="set param.grad = None in the hook, right after the step; zeros still take memory",
        )
        different = [
            n for (n, p), q in zip(model.named_parameters(), usual.parameters(), strict=True) if not p.equal(q)
        ]
        trial.that(
            f"{label}: parameters after 4 steps equal the usual loop's",
            not different,
            expected="the same bits in every parameter",
            got=f"other values in {', '.join(different)}",
            hint="step each parameter once, with its own optimizer (a function made in a loop sees the last one: "
            "look it up by parameter), built once, since Adam's state lives in it",
        )
        remove()
        trial.equal(
            f"{label}: no hook is left after undoing",
            _post_hook_count(model),
            0,
            hint="remove the handle of every parameter",
        )
