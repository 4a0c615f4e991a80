"""The checks of 15-01 accept right answers, however written, and reject what a student might really write."""

import copy

import torch
import torch.nn.functional as F
from check_protocol import CheckProtocol
from notebook_code import answers
from torch import nn
from torch.autograd import Function

from course.exercises import student_source
from shared.checks import topic_15_01 as check

ANSWERS, STUBS = answers("15-01"), answers("15-01", edit=student_source)
CHECKS = {
    "Swish": check.swish,
    "GradientReversal": check.gradient_reversal,
    "ActivationRecorder": check.activation_recorder,
    "dead_units": check.dead_units,
    "clip_at_accumulation": check.clip_at_accumulation,
    "step_in_backward": check.step_in_backward,
}


# ---------------------------------------------------------------- Swish


class RightSwish(Function):
    """Another right answer: setup_context style, other formulas."""

    @staticmethod
    def forward(x):
        return x / (1 + torch.exp(-x))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = 1 / (1 + torch.exp(-x))
        return (s + x * s * (1 - s)).mul(g)


class _Swish(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)


class NoGradOutput(_Swish):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return s * (1 + x * (1 - s))


class HalfDerivative(_Swish):
    @staticmethod
    def backward(ctx, g):
        return g * torch.sigmoid(ctx.saved_tensors[0])


class WrongSign(_Swish):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * s * (1 - x * (1 - s))


class SavesSigmoid(Function):
    @staticmethod
    def forward(ctx, x):
        s = torch.sigmoid(x)
        ctx.save_for_backward(x, s)
        return x * s

    @staticmethod
    def backward(ctx, g):
        x, s = ctx.saved_tensors
        return g * s * (1 + x * (1 - s))


class RecomputesButSavesBoth(SavesSigmoid):
    @staticmethod
    def backward(ctx, g):
        x, _ = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * s * (1 + x * (1 - s))


class Attribute(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        s = torch.sigmoid(ctx.x)
        return g * s * (1 + ctx.x * (1 - s))


class InPlaceForward(_Swish):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        return x.mul_(torch.sigmoid(x))

    backward = RightSwish.backward


class InPlaceBackward(_Swish):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g.mul_(s * (1 + x * (1 - s)))


class TwoValues(_Swish):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * s * (1 + x * (1 - s)), g


class ForwardIsSigmoid(Function):
    @staticmethod
    def forward(ctx, x):
        return torch.sigmoid(x)


class Overflows(_Swish):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.exp(x) / (1 + torch.exp(x))
        return g * s * (1 + x * (1 - s))


class Unfinished(_Swish):
    @staticmethod
    def backward(ctx, g):
        raise NotImplementedError


WRONG_SWISH = [
    (F.silu, "autograd Function"),
    (ForwardIsSigmoid, r"x \* torch.sigmoid\(x\)"),
    (InPlaceForward, "leaves its input|leaf Variable"),
    (NoGradOutput, "scales the incoming gradient"),
    (HalfDerivative, "product rule"),
    (WrongSign, "product rule"),
    (TwoValues, "returns one tensor"),
    (InPlaceBackward, "leaves grad_output as it was"),
    (SavesSigmoid, "gradgradcheck"),
    (Attribute, "save_for_backward"),
    (RecomputesButSavesBoth, "recompute the rest"),
    (Overflows, "torch.sigmoid\\(x\\) does not"),
    (Unfinished, "still raises NotImplementedError"),
]

# ---------------------------------------------------------------- gradient reversal


class RightReversal(nn.Module):
    """Another right answer: no Function, but a tensor hook on a copy."""

    def __init__(self, alpha=1.0):
        super().__init__()
        self.alpha = alpha

    def forward(self, x):
        y = x.clone()
        if y.requires_grad:
            alpha = self.alpha
            y.register_hook(lambda g: g * -alpha)
        return y


def reversal(backward, forward=lambda x: x.view_as(x)):
    """A reversal module with the given pieces."""

    class Fn(Function):
        @staticmethod
        def forward(ctx, x, alpha, module):
            ctx.alpha, ctx.module = alpha, module
            return forward(x)

        @staticmethod
        def backward(ctx, g):
            return backward(ctx, g), None, None

    class Module(nn.Module):
        def __init__(self, alpha=1.0):
            super().__init__()
            self.alpha = alpha

        def forward(self, x):
            return Fn.apply(x, self.alpha, self)

    return Module


class HooksTheInput(nn.Module):
    def __init__(self, alpha=1.0):
        super().__init__()
        self.alpha = alpha

    def forward(self, x):
        alpha = self.alpha
        x.register_hook(lambda g: -alpha * g)
        return x


class CallsForward(nn.Module):
    def __init__(self, alpha=1.0):
        super().__init__()
        self.alpha = alpha

    def forward(self, x):
        return x.view_as(x)


class TrainableAlpha(nn.Module):
    def __init__(self, alpha=1.0):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(alpha))

    def forward(self, x):
        return x


WRONG_REVERSAL = [
    (reversal(lambda ctx, g: -g), "both the sign and the factor"),
    (reversal(lambda ctx, g: ctx.alpha * g), "both the sign and the factor"),
    (reversal(lambda ctx, g: g.neg_().mul_(ctx.alpha)), "write into it"),
    (reversal(lambda ctx, g: -ctx.module.alpha * g), "from its own forward"),
    (reversal(lambda ctx, g: -ctx.alpha * g, forward=lambda x: -x), "forward is the identity"),
    (reversal(lambda ctx, g: -ctx.alpha * g if ctx.alpha else None), "alpha = 0"),
    (CallsForward, "apply"),
    (HooksTheInput, "only the path|both the sign"),
    (TrainableAlpha, "not an nn.Parameter"),
]

# ---------------------------------------------------------------- activation recorder


class RightRecorder:
    """Another right answer: get_submodule, one hook factory, copies into new tensors."""

    def __init__(self, model, names, to_cpu=True):
        self.model, self.names, self.to_cpu, self.handles, self.activations = model, list(names), to_cpu, [], {}

    def __enter__(self):
        chosen = {}
        for name in self.names:
            try:
                chosen[name] = self.model.get_submodule(name)
            except AttributeError:
                raise KeyError(name) from None
        self.activations = {name: [] for name in chosen}
        for name, module in chosen.items():
            self.handles += [module.register_forward_hook(self.make(self.activations[name]))]
        return self

    def make(self, store):
        def hook(module, args, output):
            with torch.no_grad():
                store.append(torch.empty_like(output, device="cpu" if self.to_cpu else None).copy_(output))

        return hook

    def __exit__(self, kind, value, trace):
        while self.handles:
            self.handles.pop().remove()
        return False


def recorder(**changes):
    """RightRecorder with some methods replaced."""
    return type("Recorder", (RightRecorder,), changes)


def _hook(store, output_of):
    return lambda module, args, output: store.append(output_of(output))


def _leaks_on_error(self, kind, value, trace):
    if kind is None:
        RightRecorder.__exit__(self, kind, value, trace)


def _swallows(self, kind, value, trace):
    RightRecorder.__exit__(self, kind, value, trace)
    return True


def _forgets(self, kind, value, trace):
    RightRecorder.__exit__(self, kind, value, trace)
    for store in self.activations.values():
        store.clear()


def _registers_while_looking(self):
    self.activations = {name: [] for name in self.names}
    for name in self.names:
        module = dict(self.model.named_modules())[name]
        self.handles.append(module.register_forward_hook(self.make(self.activations[name])))
    return self


def _keeps_old_recordings(self):
    old = self.activations
    RightRecorder.__enter__(self)
    for name, store in old.items():
        self.activations[name][:0] = store
    return self


def _clears_everybodys(self, kind, value, trace):
    for module in self.model.modules():
        module._forward_hooks.clear()


def _late_binding(self):
    RightRecorder.__enter__(self)
    RightRecorder.__exit__(self, None, None, None)
    for name in self.names:
        module = dict(self.model.named_modules())[name]
        self.handles.append(
            module.register_forward_hook(lambda m, a, o: self.activations[name].append(o.detach().clone()))  # noqa: B023
        )
    return self


def _last_only(self):
    self.activations = {}
    for name in self.names:
        module = dict(self.model.named_modules())[name]
        self.handles.append(
            module.register_forward_hook(lambda m, a, o, name=name: self.activations.update({name: o.detach().clone()}))
        )
    return self


WRONG_RECORDER = [
    (recorder(make=lambda self, store: _hook(store, lambda o: o.detach())), "in-place ReLU"),
    (recorder(make=lambda self, store: _hook(store, lambda o: o.clone())), "output.detach"),
    (
        recorder(make=lambda self, store: lambda m, a, o: (store.append(o.detach().clone()), o.detach())[1]),
        "return None",
    ),
    (recorder(__exit__=lambda self, *_: None), "no hook is left after the block"),
    (recorder(__exit__=_leaks_on_error), "no hook is left after an exception"),
    (recorder(__exit__=_swallows), "would swallow it"),
    (recorder(__exit__=_forgets), "list with one tensor|don't clear"),
    (recorder(__enter__=_registers_while_looking), "no hook is left after an unknown name"),
    (recorder(__enter__=_keeps_old_recordings), "starts afresh"),
    (recorder(__exit__=_clears_everybodys), "hooks of others stay"),
    (recorder(make=lambda self, store: _hook(store, lambda o: o.detach().clone().cpu())), "to_cpu=False"),
    (recorder(__enter__=_late_binding), "name=name"),
    (recorder(__enter__=_last_only), "append to a list"),
    (recorder(__enter__=lambda self: RightRecorder.__enter__(self) and None), "returns self"),
]

# ---------------------------------------------------------------- dead units


def right_dead_units(model, batches):
    """Another right answer: maxima instead of masks, hooks in a list, modes by name."""
    modes = {name: m.training for name, m in model.named_modules()}
    highest, handles = {}, []
    try:
        for name, module in model.named_modules():
            if isinstance(module, nn.ReLU):
                handles.append(
                    module.register_forward_hook(
                        lambda m, a, out, name=name: highest.setdefault(name, []).append(
                            out.amax(dim=[d for d in range(out.dim()) if d != 1])
                        )
                    )
                )
        model.eval()
        with torch.inference_mode():
            for batch in batches:
                model(batch)
    finally:
        for handle in handles:
            handle.remove()
        for name, module in model.named_modules():
            module.training = modes[name]
    return {name: (torch.stack(found).amax(0) == 0).clone() for name, found in highest.items()}


def dead(
    combine="any", restore="own", evaluate=True, no_grad=True, cleanup=True, reduce="channel", threshold=0.0, zero=False
):
    """A dead-unit detector with chosen faults."""

    def detector(model, batches):
        modes = {m: m.training for m in model.modules()}
        active, handles = {}, []

        def watch(name):
            def hook(module, args, out):
                flat = out.transpose(0, 1).flatten(1)
                if reduce == "channel":
                    now = (flat > threshold).any(1)
                elif reduce == "mean":
                    now = flat.mean(1) > 0.1
                elif reduce == "all":
                    now = (flat > 0).all(1)
                else:
                    now = (out.flatten(1) > 0).any(0)
                active[name] = active[name] | now if combine == "any" and name in active else now

            return hook

        for name, module in model.named_modules():
            if isinstance(module, nn.ReLU):
                handles.append(module.register_forward_hook(watch(name)))
        if evaluate:
            model.eval()
        with torch.set_grad_enabled(not no_grad):
            for batch in batches:
                model(batch)
        if zero:
            model.zero_grad()
        if cleanup == "everybody's":
            for m in model.modules():
                m._forward_hooks.clear()
        elif cleanup:
            for handle in handles:
                handle.remove()
        if restore == "own":
            for m, mode in modes.items():
                m.training = mode
        elif restore == "train":
            model.train()
        return {name: ~a for name, a in active.items()}

    return detector


WRONG_DEAD = [
    (dead(combine="last"), "units of the convolution|with 'or'"),
    (dead(reduce="unit"), "units of the convolution"),
    (dead(reduce="mean"), "units of the convolution"),
    (dead(reduce="all"), "units of the convolution"),
    (dead(threshold=-1.0), "units of the linear layer"),
    (dead(evaluate=False), "runs in eval mode"),
    (dead(no_grad=False), "records no graph"),
    (dead(restore="train"), "each module's own"),
    (dead(restore="none"), "mode it was in"),
    (dead(cleanup=False), "no hook is left"),
    (dead(cleanup="everybody's"), "finally|hooks of others stay"),
    (dead(zero=True), "gradients are untouched"),
    (dead(), "finally"),
    (lambda model, batches: {n: ~a for n, a in dead()(model, batches).items() if n == "2"}, "nested ones too"),
]

# ---------------------------------------------------------------- clipping


def right_clip(model, limit):
    """Another right answer: torch.clip out of place."""
    handles = []
    for p in model.parameters():
        if p.requires_grad:
            handles.append(
                p.register_post_accumulate_grad_hook(lambda q: setattr(q, "grad", torch.clip(q.grad, -limit, limit)))
            )
    return lambda: [h.remove() for h in handles]


def clip(register="post", low=-1.0, fixed=None, undo=True, touch_weights=False, by_norm=False, in_place=True):
    """Clipping with chosen faults."""

    def start(model, limit):
        bound = fixed or limit

        def post(p):
            if touch_weights:
                p.data.clamp_(-bound, bound)
            elif by_norm:
                p.grad.mul_(min(1.0, bound / float(p.grad.norm())))
            elif in_place:
                p.grad.clamp_(low * bound, bound)
            else:
                p.grad.clamp(-bound, bound)

        handles = []
        for p in model.parameters():
            if p.requires_grad:
                if register == "post":
                    handles.append(p.register_post_accumulate_grad_hook(post))
                else:
                    handles.append(p.register_hook(lambda g: g.clamp(-bound, bound)))

        def remove():
            if undo == "everybody's":
                for p in model.parameters():
                    if p._post_accumulate_grad_hooks:
                        p._post_accumulate_grad_hooks.clear()
            for handle in handles if undo is True else handles[:1]:
                handle.remove()

        return remove if undo is not None else None

    return start


def clips_once_now(model, limit):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.clamp_(-limit, limit)
    return lambda: None


WRONG_CLIP = [
    (clips_once_now, "beyond the limit"),
    (clip(in_place=False), "with underscore"),
    (clip(register="tensor"), "a second one without zero_grad[\\s\\S]*not the sum"),
    (clip(low=0.0), "bit for bit"),
    (clip(by_norm=True), "bit for bit"),
    (clip(touch_weights=True), "beyond the limit"),
    (clip(fixed=0.0625), "use the limit that was given"),
    (clip(undo=False), "remove the handle of every parameter"),
    (clip(undo="everybody's"), "no hook that isn't yours"),
    (clip(undo=None), "returns a function"),
]

# ---------------------------------------------------------------- optimizer in backward


def right_step(model, make_optimizer):
    """Another right answer: the optimizer is looked up by id, the gradient dropped with zero_grad."""
    by_id = {id(p): make_optimizer([p]) for p in model.parameters() if p.requires_grad}
    handles = []
    for p in model.parameters():
        if id(p) in by_id:

            def hook(p):
                by_id[id(p)].step()
                by_id[id(p)].zero_grad(set_to_none=True)

            handles.append(p.register_post_accumulate_grad_hook(hook))
    return lambda: [h.remove() for h in handles]


def step(rebuild=False, drop="none", undo=True, late_binding=False, tensor_hook=False):
    """Stepping in backward with chosen faults."""

    def start(model, make):
        params = [p for p in model.parameters() if p.requires_grad]
        optimizers = {p: make([p]) for p in params}
        handles = []
        for p in params:

            def hook(q, own=optimizers[p]):
                used = make([q]) if rebuild else (optimizers[params[-1]] if late_binding else own)
                used.step()
                if drop == "none":
                    q.grad = None
                elif drop == "zero":
                    q.grad.zero_()

            handles.append(p.register_post_accumulate_grad_hook(hook))
        return lambda: [h.remove() for h in (handles if undo else [])]

    return start


def one_optimizer_for_all(model, make):
    optimizer = make([p for p in model.parameters() if p.requires_grad])

    def hook(p):
        optimizer.step()
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters() if p.requires_grad]
    return lambda: [h.remove() for h in handles]


def decoupled_sgd_only(model, make):
    """Works for SGD with the demonstration's learning rate, not for what make_optimizer builds."""

    def hook(p):
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters() if p.requires_grad]
    return lambda: [h.remove() for h in handles]


WRONG_STEP = [
    (step(rebuild=True), "built once"),
    (step(drop="zero"), "dropped as soon"),
    (step(drop="keep"), "dropped as soon"),
    (step(late_binding=True), "look it up by parameter|dropped as soon"),
    (step(undo=False), "no hook is left"),
    (decoupled_sgd_only, "Adam: parameters after 4 steps"),
]

WRONG = [
    *(("Swish", a, m) for a, m in WRONG_SWISH),
    *(("GradientReversal", a, m) for a, m in WRONG_REVERSAL),
    *(("ActivationRecorder", a, m) for a, m in WRONG_RECORDER),
    *(("dead_units", a, m) for a, m in WRONG_DEAD),
    *(("clip_at_accumulation", a, m) for a, m in WRONG_CLIP),
    *(("step_in_backward", a, m) for a, m in WRONG_STEP),
]
RIGHT = {
    "Swish": RightSwish,
    "GradientReversal": RightReversal,
    "ActivationRecorder": RightRecorder,
    "dead_units": right_dead_units,
    "clip_at_accumulation": right_clip,
    "step_in_backward": right_step,
}


class TestChecks(CheckProtocol):
    CHECKS, ANSWERS, STUBS, RIGHT, WRONG = CHECKS, ANSWERS, STUBS, RIGHT, WRONG

    def hold_stand_in(self, name, stand_in):
        if name == "Swish":
            x = torch.randn(4)
            assert torch.equal(stand_in.apply(x), F.silu(x))
        elif name in ("GradientReversal", "step_in_backward"):
            assert CHECKS[name].run(stand_in).status == "passed"


def test_stepping_all_parameters_at_each_gradient_happens_to_be_right():
    """One optimizer stepped again and again sees only gradients that are there, and drops them: not a wrong answer."""
    assert check.step_in_backward.run(one_optimizer_for_all).status == "passed"


def test_checks_leave_the_random_state_alone():
    torch.manual_seed(3)
    before = copy.deepcopy(torch.get_rng_state())
    check.dead_units.run(right_dead_units)
    assert torch.equal(before, torch.get_rng_state())
