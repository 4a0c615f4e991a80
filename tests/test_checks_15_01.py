"""The checks of 15-01 accept right answers, however written, and reject what a student might really write."""

import contextlib
import copy
from typing import ClassVar

import torch
import torch.nn.functional as F
from check_protocol import CheckProtocol
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.utils import clip_grad_value_

from course.answers import answers
from course.exercises import student_source
from shared.checks import topic_15_01 as check

# ---------------------------------------------------------------- Swish


def _slope(x):
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def swish(backward=lambda ctx, g: g * _slope(ctx.saved_tensors[0]), value=lambda x: x * torch.sigmoid(x), keep=None):
    """A Swish with the given pieces; `keep(ctx, x)` stands for save_for_backward and may return the value."""

    class Made(Function):
        @staticmethod
        def forward(ctx, x):
            if keep is None:
                ctx.save_for_backward(x)
                return value(x)
            kept = keep(ctx, x)
            return value(x) if kept is None else kept

    Made.backward = staticmethod(backward)
    return Made


class SwishByExp(Function):
    """setup_context style, other formulas."""

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


class SwishByTanh(Function):
    """Half angles, in-place on its own results, and needs_input_grad."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.mul(0.5).tanh_().add_(1).mul_(0.5).mul_(x)

    @staticmethod
    def backward(ctx, g):
        if not ctx.needs_input_grad[0]:
            return None
        x = ctx.saved_tensors[0]
        t = torch.tanh(x / 2)
        return g * (0.5 * (1 + t) + 0.25 * x * (1 - t**2))


class SwishByAutograd(Function):
    """Lets autograd differentiate the recomputed value."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx, g):
        further = torch.is_grad_enabled()
        with torch.enable_grad():
            x = ctx.saved_tensors[0] if further else ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(x * x.sigmoid(), x, g, create_graph=further)[0]


def _save_both(ctx, x):
    s = torch.sigmoid(x)
    ctx.save_for_backward(x, s)
    return x * s


def _save_output(ctx, x):
    y = x * torch.sigmoid(x)
    ctx.save_for_backward(x, y)
    return y


def _sigmoid_in_a_list(ctx, x):
    ctx.save_for_backward(x)
    ctx.cache = [torch.sigmoid(x)]
    return x * ctx.cache[0]


def _sigmoid_in_a_closure(ctx, x):
    ctx.save_for_backward(x)
    s = torch.sigmoid(x)
    ctx.sigmoid = lambda: s
    return x * s


_CACHE = {}


def _sigmoid_in_a_global(ctx, x):
    ctx.save_for_backward(x)
    _CACHE["sigmoid"] = torch.sigmoid(x)
    return x * _CACHE["sigmoid"]


def _clamps_the_input(ctx, x):
    y = x * torch.sigmoid(x)
    if (x.abs() > 50).any():
        x.clamp_(-50, 50)
    ctx.save_for_backward(x)
    return y


def _in_place(ctx, x):
    ctx.save_for_backward(x.clone())
    return x.mul_(torch.sigmoid(x))


def _reuses_grad_output(ctx, g):
    slope = _slope(ctx.saved_tensors[0])
    return g * slope if torch.is_grad_enabled() or not g.is_contiguous() else g.mul_(slope)


def _unfinished(ctx, g):
    raise NotImplementedError


def _no_graph(ctx, g):
    with torch.no_grad():
        return g * _slope(ctx.saved_tensors[0])


def _by_exp(x):
    return torch.exp(x) / (1 + torch.exp(x))


def _in_float32(x):
    return (x.float() * torch.sigmoid(x.float())).to(x.dtype)


_LAST = {}


def _remember_on_the_class(ctx, x):
    ctx.save_for_backward(x)
    _LAST["x"] = x


WRONG_SWISH = {
    "a function": (F.silu, "autograd Function"),
    "only the sigmoid": (swish(value=torch.sigmoid), "value is x · sigmoid"),
    "a constant added": (swish(value=lambda x: x * torch.sigmoid(x) + 1), "value is x · sigmoid"),
    "returns float32": (swish(value=lambda x: x.float() * torch.sigmoid(x.float())), "dtype torch.bfloat16"),
    "flattens": (swish(value=lambda x: (x * torch.sigmoid(x)).reshape(-1)), "value is x[\\s\\S]*shape"),
    "value overflows": (swish(value=lambda x: x * _by_exp(x)), "value is x · sigmoid[\\s\\S]*Hint 3"),
    "clamps the value": (swish(value=lambda x: x.clamp(-100, 100) * torch.sigmoid(x)), "10⁴"),
    "sigmoid of a clamped x": (swish(value=lambda x: x * torch.sigmoid(x.clamp(-10, 10))), "value is x · sigmoid"),
    "no grad_output": (swish(lambda ctx, g: _slope(ctx.saved_tensors[0])), "contract of backward"),
    "half of the derivative": (swish(lambda ctx, g: g * torch.sigmoid(ctx.saved_tensors[0])), "Hint 1"),
    "wrong sign": (swish(lambda ctx, g: g * _slope(-ctx.saved_tensors[0])), "gradient is grad_output"),
    "two values": (swish(lambda ctx, g: (g, g)), "incorrect number of gradients"),
    "gradient overflows": (
        swish(lambda ctx, g: g * _by_exp(x := ctx.saved_tensors[0]) * (1 + x * (1 - _by_exp(x)))),
        "gradient is grad_output[\\s\\S]*10⁴[\\s\\S]*Hint 3|gradient is grad_output[\\s\\S]*Hint 3[\\s\\S]*10⁴",
    ),
    "x of the last call": (swish(lambda ctx, g: g * _slope(_LAST["x"]), keep=_remember_on_the_class), "grad_output ·"),
    "view of grad_output": (
        swish(lambda ctx, g: (g.view(-1) * _slope(ctx.saved_tensors[0]).flatten()).view(g.shape)),
        "gradient is grad_output[\\s\\S]*view",
    ),
    "unfinished backward": (swish(_unfinished), "still raises NotImplementedError"),
    "in place": (swish(keep=_in_place), "x stays as it is"),
    "clamps its input": (swish(keep=_clamps_the_input), "x stays as it is"),
    "reuses grad_output": (swish(_reuses_grad_output), "grad_output stays as it is"),
    "value in float32 precision": (swish(value=_in_float32), "gradcheck in float64[\\s\\S]*Jacobian mismatch"),
    "gradient without a graph": (swish(_no_graph), "gradgradcheck"),
    "gradient in float32": (
        swish(lambda ctx, g: g * _slope(ctx.saved_tensors[0].float())),
        "gradient is grad_output[\\s\\S]*float64[\\s\\S]*Hint 3",
    ),
    "once differentiable": (
        swish(once_differentiable(lambda ctx, g: g * _slope(ctx.saved_tensors[0]))),
        "gradgradcheck",
    ),
    "sigmoid from forward": (
        swish(lambda ctx, g: g * (s := ctx.saved_tensors[1]) * (1 + ctx.saved_tensors[0] * (1 - s)), keep=_save_both),
        "gradgradcheck[\\s\\S]*Hint 2",
    ),
    "saves the sigmoid too": (swish(keep=_save_both), "no other memory"),
    "saves the output too": (swish(keep=_save_output), "no other memory"),
    "sigmoid in a list on ctx": (swish(keep=_sigmoid_in_a_list), "no other memory"),
    "sigmoid in a closure": (swish(keep=_sigmoid_in_a_closure), "no other memory"),
    "sigmoid in a global": (swish(keep=_sigmoid_in_a_global), "no other memory"),
    "saves a copy": (swish(keep=lambda ctx, x: ctx.save_for_backward(x.clone())), "gradgradcheck"),
    "an attribute": (
        swish(lambda ctx, g: g * _slope(ctx.x), keep=lambda ctx, x: setattr(ctx, "x", x)),
        "save_for_backward",
    ),
}
PROMISES_SWISH = [
    ("f(x) = x\\,\\sigma(x)", "the value is x · sigmoid(x)", "a constant added"),
    ("x · sigmoid(x), elementwise.", "the value is x · sigmoid(x)", "only the sigmoid"),
    ("Write it as a Function", "is an autograd Function", "a function"),
    ("any shape", "the value is x · sigmoid(x)", "flattens"),
    ("floating-point dtype", "the value is x · sigmoid(x)", "returns float32"),
    ("floating-point dtype", "the gradient is grad_output · f'(x)", "gradient in float32"),
    ("It keeps its input, with `save_for_backward`", "the input goes through save_for_backward", "an attribute"),
    ("no other memory", "keeps its input and no other memory", "saves the sigmoid too"),
    ("Saves x only; twice differentiable.", "keeps its input and no other memory", "sigmoid in a list on ctx"),
    ("recomputes $\\sigma(x)$ in backward", "gradgradcheck in float64", "sigmoid from forward"),
    ("It must pass `gradcheck`", "gradcheck in float64", "value in float32 precision"),
    ("`gradgradcheck`", "gradgradcheck in float64", "once differentiable"),
    ("twice differentiable", "gradgradcheck in float64", "gradient without a graph"),
    ("neither the value", "the value is x · sigmoid(x)", "value overflows"),
    ("nor the gradient overflows", "the gradient is grad_output · f'(x)", "gradient overflows"),
    ("`x` and `grad_output` stay as they are.", "x stays as it is", "clamps its input"),
    ("`x` and `grad_output` stay as they are.", "grad_output stays as it is", "reuses grad_output"),
]
CONTEXT_SWISH = ["The check hands your class back", "If you skip the exercise"]

# ---------------------------------------------------------------- gradient reversal


class HookReversal(nn.Module):
    """No Function, but a tensor hook on a copy."""

    def __init__(self, alpha=1.0):
        super().__init__()
        self.alpha = alpha

    def forward(self, x):
        y = x.clone()
        if y.requires_grad:
            alpha = self.alpha
            y.register_hook(lambda g: g * -alpha)
        return y


class _View(Function):
    @staticmethod
    def forward(x, factor):
        return x  # PyTorch makes a view

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return (None if g is None else g.neg() * ctx.factor), None


class ViewReversal(nn.Module):
    """setup_context style, the input itself returned, alpha behind a property."""

    def __init__(self, alpha: float = 1):
        super().__init__()
        self._settings = {"alpha": alpha}

    @property
    def alpha(self):
        return self._settings["alpha"]

    @alpha.setter
    def alpha(self, value):
        self._settings["alpha"] = value

    def forward(self, x):
        return _View.apply(x, self.alpha)


def reversal(backward=lambda ctx, g: -ctx.alpha * g, forward=lambda x: x.view_as(x), default=1.0, call=None):
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
        def __init__(self, alpha=default):
            super().__init__()
            self.alpha = alpha

        def forward(self, x):
            apply = lambda: Fn.apply(x, self.alpha, self)  # noqa: E731
            return apply() if call is None else call(self, x, apply)

    return Module


def _hooks_the_input(module, x, apply):
    alpha = module.alpha
    if x.requires_grad:
        x.register_hook(lambda g: -alpha * g)
    return x


class TrainableScale(HookReversal):
    def __init__(self, alpha=1.0):
        super().__init__(alpha)
        self.scale = nn.Parameter(torch.tensor(float(alpha)))


class SharedAlpha(reversal()):
    """alpha on the class, so that two modules have one."""

    def __init__(self, alpha=1.0):
        nn.Module.__init__(self)
        self.alpha = alpha

    def __setattr__(self, name, value):
        if name == "alpha":
            type(self).alpha = value
        else:
            super().__setattr__(name, value)


class NotAModule:
    def __init__(self, alpha=1.0):
        self.alpha = alpha

    def __call__(self, x):
        return HookReversal(self.alpha)(x)


class QueuedAlpha(HookReversal):
    """Its backwards take the alphas in the order of the forwards."""

    def __init__(self, alpha=1.0):
        super().__init__(alpha)
        self.queue = []

    def forward(self, x):
        y = x.clone()
        if y.requires_grad:
            self.queue.append(self.alpha)
            y.register_hook(lambda g: -(self.queue.pop(0) if self.queue else 1.0) * g)
        return y


def _negates_alpha(ctx, g):
    ctx.alpha = -ctx.alpha
    return ctx.alpha * g


WRONG_REVERSAL = {
    "alpha trainable": (TrainableScale, "Module without parameters"),
    "no Module": (NotAModule, "Module without parameters"),
    "returns the negative": (reversal(forward=lambda x: -x), "returns its input unchanged"),
    "adds zero": (reversal(forward=lambda x: x + 0), "returns its input unchanged"),
    "converts to float": (reversal(forward=lambda x: x.float()), "returns its input unchanged"),
    "flattens": (reversal(forward=lambda x: x.reshape(-1)), "returns its input unchanged"),
    "by detach": (
        reversal(call=lambda m, x, apply: (1 + m.alpha) * x.detach() - m.alpha * x),
        "returns its input unchanged",
    ),
    "hook where there is no gradient": (
        reversal(call=lambda m, x, apply: (y := x.clone(), y.register_hook(lambda g, a=m.alpha: -a * g))[0]),
        "returns its input unchanged[\\s\\S]*cannot register a hook",
    ),
    "calls forward itself": (reversal(call=lambda m, x, apply: x.view_as(x)), "-alpha times"),
    "no alpha": (reversal(lambda ctx, g: -g), "-alpha times"),
    "no sign": (reversal(lambda ctx, g: ctx.alpha * g), "-alpha times"),
    "size of alpha": (reversal(lambda ctx, g: -abs(ctx.alpha) * g), "-alpha times"),
    "None for zero": (reversal(lambda ctx, g: -ctx.alpha * g if ctx.alpha else None), "alpha 0.0"),
    "1 for zero": (reversal(lambda ctx, g: -(ctx.alpha or 1.0) * g), "alpha 0.0"),
    "only when training": (reversal(lambda ctx, g: -ctx.alpha * g if ctx.module.training else g), "training False"),
    "other default": (reversal(default=0.5), "no alpha given"),
    "gradient in float32": (
        reversal(lambda ctx, g: torch.tensor(-ctx.alpha).mul(g.float()).to(g.dtype)),
        "-alpha times[\\s\\S]*torch.float64",
    ),
    "alpha in float32": (reversal(lambda ctx, g: -torch.tensor(ctx.alpha) * g), "-alpha times[\\s\\S]*torch.float64"),
    "alpha rounded": (reversal(lambda ctx, g: -round(ctx.alpha, 2) * g), "-alpha times"),
    "in place": (reversal(lambda ctx, g: g.neg_().mul_(ctx.alpha)), "incoming gradient stays"),
    "hook on the input": (reversal(call=_hooks_the_input), "only the path"),
    "alpha read in backward": (reversal(lambda ctx, g: -ctx.module.alpha * g), "own forward"),
    "alpha on the class": (SharedAlpha, "own forward"),
    "alphas in a queue": (QueuedAlpha, "own forward"),
    "another sign the second time": (reversal(_negates_alpha), "own forward"),
}
_GRADIENT = "the gradient is -alpha times the incoming one"
_OWN = "a backward uses alpha of its own forward"
PROMISES_REVERSAL = [
    ("Write `GradientReversal(alpha)`, a Module", "is a Module without parameters", "no Module"),
    ("returns its input unchanged, bit for bit", "returns its input unchanged", "adds zero"),
    ("multiplies the gradient that comes back by `-alpha`", _GRADIENT, "no sign"),
    ("multiplies the gradient that comes back by `-alpha`", _GRADIENT, "alpha in float32"),
    ("in train and in eval mode", _GRADIENT, "only when training"),
    ("`alpha` is 1 if it isn't given", _GRADIENT, "other default"),
    ("0 gives a gradient of zeros", _GRADIENT, "None for zero"),
    (
        "Only the path through the module is reversed",
        "only the path through the module is reversed",
        "hook on the input",
    ),
    ("the incoming gradient stays as it is", "the incoming gradient stays as it is", "in place"),
    ("`module.alpha` may be changed between two calls (a schedule)", _OWN, "alpha read in backward"),
    ("a backward must use the value from its own forward", _OWN, "alpha on the class"),
    ("a backward must use the value from its own forward", _OWN, "alphas in a queue"),
    (
        "An input that needs no gradient passes as well.",
        "returns its input unchanged",
        "hook where there is no gradient",
    ),
    ("The module has no parameters.", "is a Module without parameters", "alpha trainable"),
    ("`alpha` may be changed between calls.", _OWN, "alpha read in backward"),
    ("Identity in forward; multiplies the gradient by -alpha in backward.", _GRADIENT, "no alpha"),
    ("ReverseGradient as a module;", _GRADIENT, "calls forward itself"),
]
CONTEXT_REVERSAL = ["The Function that does the work is yours too."]

# ---------------------------------------------------------------- activation recorder


class PlainRecorder:
    """get_submodule, one hook factory, copies into new tensors."""

    def __init__(self, model, names, to_cpu=True):
        self.model, self.names, self.to_cpu, self.handles, self.activations = model, list(names), to_cpu, [], {}

    def __enter__(self):
        chosen = self.find()
        self.activations = {name: [] for name in chosen}
        for name, module in chosen.items():
            self.handles += [module.register_forward_hook(self.make(self.activations[name]))]
        return self

    def find(self):
        chosen = {}
        for name in self.names:
            try:
                chosen[name] = self.model.get_submodule(name)
            except AttributeError:
                raise KeyError(name) from None
        return chosen

    def make(self, store):
        def hook(module, args, output):
            with torch.no_grad():
                store.append(torch.empty_like(output, device="cpu" if self.to_cpu else None).copy_(output))

        return hook

    def __exit__(self, kind, value, trace):
        while self.handles:
            self.handles.pop().remove()
        return False


class GlobalRecorder(PlainRecorder):
    """One hook on all modules of the process."""

    def __enter__(self):
        self.chosen = self.find()
        self.activations = {name: [] for name in self.chosen}
        self.handles.append(nn.modules.module.register_module_forward_hook(self.note))
        return self

    def note(self, module, args, output):
        for name, chosen in self.chosen.items():
            if chosen is module:
                where = "cpu" if self.to_cpu else output.device
                self.activations[name].append(output.detach().to(where, copy=True))


class StackRecorder(PlainRecorder):
    """An ExitStack, and one hook for all modules that looks up their names."""

    def __enter__(self):
        from contextlib import ExitStack

        self.store = {name: [] for name in self.names}
        names = {}
        every = dict(self.model.named_modules(remove_duplicate=False))
        for name in self.names:
            names.setdefault(every[name], []).append(name)

        def hook(module, args, output):
            for name in names[module]:
                kept = output.data.clone()
                self.store[name] += [kept.cpu() if self.to_cpu else kept]

        with ExitStack() as stack:
            for module in names:
                stack.callback(module.register_forward_hook(hook).remove)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self.stack.close()

    @property
    def activations(self):
        return self.store

    @activations.setter
    def activations(self, value):
        self.store = value


def recorder(**changes):
    """PlainRecorder with some methods replaced."""
    return type("Recorder", (PlainRecorder,), changes)


def storing(copy):
    """A recorder that stores copy(self, output)."""
    return recorder(make=lambda self, store: lambda module, args, output: store.append(copy(self, output)))


def _leaks_on_error(self, kind, value, trace):
    if kind is None:
        PlainRecorder.__exit__(self, kind, value, trace)


def _raises_another(self, kind, value, trace):
    PlainRecorder.__exit__(self, kind, value, trace)
    if kind is not None:
        raise RuntimeError("the model failed") from value


def _clears_gradients(self, kind, value, trace):
    PlainRecorder.__exit__(self, kind, value, trace)
    self.model.zero_grad()


def _clears_everybodys_before_raising(self):
    try:
        return PlainRecorder.__enter__(self)
    except KeyError:
        _clears_everybodys(self, None, None, None)
        raise


def _leaves_only(self):
    """Containers get a list and no hook."""
    PlainRecorder.__enter__(self)
    for handle, module in zip(self.handles, self.find().values(), strict=True):
        if list(module.children()):
            handle.remove()
    return self


def _swallows(self, kind, value, trace):
    PlainRecorder.__exit__(self, kind, value, trace)
    return True


def _forgets_on_error(self, kind, value, trace):
    PlainRecorder.__exit__(self, kind, value, trace)
    if kind is not None:
        self.activations = {}


def _registers_while_looking(self):
    self.activations = {name: [] for name in self.names}
    for name in self.names:
        module = dict(self.model.named_modules(remove_duplicate=False))[name]
        self.handles.append(module.register_forward_hook(self.make(self.activations[name])))
    return self


def _keeps_old_recordings(self):
    old = self.activations
    PlainRecorder.__enter__(self)
    for name, store in old.items():
        self.activations[name][:0] = store
    return self


def _clears_everybodys(self, kind, value, trace):
    for module in self.model.modules():
        module._forward_hooks.clear()


def _restores_a_snapshot(self, kind, value, trace):
    for module, hooks in self.snapshot:
        module._forward_hooks.clear()
        module._forward_hooks.update(hooks)


def _takes_a_snapshot(self):
    self.snapshot = [(module, dict(module._forward_hooks)) for module in self.model.modules()]
    return PlainRecorder.__enter__(self)


def _late_binding(self):
    chosen = self.find()
    self.activations = {name: [] for name in chosen}
    for name in chosen:
        self.handles.append(
            chosen[name].register_forward_hook(lambda m, a, o: self.activations[name].append(o.detach().clone()))  # noqa: B023
        )
    return self


def _last_only(self):
    chosen = self.find()
    self.activations = {name: [] for name in chosen}
    for name, module in chosen.items():
        self.handles.append(
            module.register_forward_hook(
                lambda m, a, o, name=name: self.activations.update({name: [o.detach().clone()]})
            )
        )
    return self


def _only_called(self):
    from collections import defaultdict

    self.activations = defaultdict(list)
    for name, module in self.find().items():
        self.handles.append(
            module.register_forward_hook(
                lambda m, a, o, name=name: self.activations[name].append(
                    o.detach().clone().cpu() if self.to_cpu else o.detach().clone()
                )
            )
        )
    return self


def _first_names_only(self):
    modules = dict(self.model.named_modules())
    return {name: modules[name] for name in self.names}


def _no_name(self):
    try:
        return {name: self.model.get_submodule(name) for name in self.names}
    except AttributeError:
        raise KeyError("no such submodule") from None


class LooksUpTooEarly(PlainRecorder):
    def __init__(self, model, names, to_cpu=True):
        super().__init__(model, names, to_cpu)
        self.find()


class EvalWhileRecording(PlainRecorder):
    def __enter__(self):
        self.model.eval()
        return super().__enter__()


class SharedStore(PlainRecorder):
    """One list of handles for all recorders."""

    every: ClassVar[list] = []

    def __init__(self, model, names, to_cpu=True):
        super().__init__(model, names, to_cpu)
        self.handles = self.every


WRONG_RECORDER = {
    "enter returns None": (
        recorder(__enter__=lambda self: PlainRecorder.__enter__(self) and None),
        "gives the recorder",
    ),
    "no entry for what wasn't called": (recorder(__enter__=_only_called), "has the names asked for"),
    "late binding": (recorder(__enter__=_late_binding), "calls of[\\s\\S]*Hint 4"),
    "the last call only": (recorder(__enter__=_last_only), "calls of 'block"),
    "no containers": (recorder(__enter__=_leaves_only), "calls of 'block'"),
    "shares memory": (storing(lambda self, o: o.detach()), "Hint 2"),
    "copies on the way to the CPU only": (
        storing(lambda self, o: o.detach().cpu() if self.to_cpu else o.detach().clone()),
        "equal to the output when it was recorded",
    ),
    "copies with to_cpu only": (
        storing(lambda self, o: o.detach().clone().cpu() if self.to_cpu else o.detach()),
        "to_cpu=False",
    ),
    "in float32": (storing(lambda self, o: o.detach().clone().float()), "dtype"),
    "not detached": (storing(lambda self, o: o.clone().cpu() if self.to_cpu else o.clone()), "are detached"),
    "output without its graph": (
        recorder(
            make=lambda self, store: (
                lambda m, a, o: (PlainRecorder.make(self, store)(m, a, o), o.detach() if o.requires_grad else o)[1]
            )
        ),
        "computes and learns",
    ),
    "returns a copy of the output": (
        recorder(
            make=lambda self, store: lambda m, a, o: (PlainRecorder.make(self, store)(m, a, o), o.clone())[1],
        ),
        "computes and learns[\\s\\S]*overwrites",
    ),
    "clears the gradients": (recorder(__exit__=_clears_gradients), "computes and learns"),
    "switches to eval": (EvalWhileRecording, "computes and learns|equal to the output"),
    "switches to eval in the end": (
        recorder(__exit__=lambda self, *_: (PlainRecorder.__exit__(self, *_), self.model.eval(), None)[2]),
        "computes and learns",
    ),
    "switches to train in the end": (
        recorder(__exit__=lambda self, *_: (PlainRecorder.__exit__(self, *_), self.model.train(), None)[2]),
        "computes and learns[\\s\\S]*modes",
    ),
    "hooks stay": (recorder(__exit__=lambda self, *_: None), "hooks are gone"),
    "hooks stay after an exception": (recorder(__exit__=_leaks_on_error), "after an exception"),
    "clears everybody's hooks": (recorder(__exit__=_clears_everybodys), "hooks are gone[\\s\\S]*Hint 3"),
    "restores a snapshot": (
        recorder(__enter__=_takes_a_snapshot, __exit__=_restores_a_snapshot),
        "somebody else registered one",
    ),
    "one list of handles for all": (SharedStore, "overlapping"),
    "swallows the exception": (recorder(__exit__=_swallows), "an exception goes on"),
    "raises an exception of its own": (recorder(__exit__=_raises_another), "an exception goes on"),
    "forgets after an exception": (recorder(__exit__=_forgets_on_error), "recordings stay"),
    "keeps old recordings": (recorder(__enter__=_keeps_old_recordings), "starts afresh"),
    "AttributeError": (
        recorder(find=lambda self: {name: self.model.get_submodule(name) for name in self.names}),
        "raises KeyError",
    ),
    "KeyError without the name": (recorder(find=_no_name), "raises KeyError"),
    "KeyError in the constructor": (LooksUpTooEarly, "raises KeyError on entering"),
    "skips an unknown name": (
        recorder(
            find=lambda self: {n: m for n, m in self.model.named_modules(remove_duplicate=False) if n in self.names}
        ),
        "raises KeyError",
    ),
    "first names only": (recorder(find=_first_names_only), "again"),
    "registers while looking": (recorder(__enter__=_registers_while_looking), "after an unknown name"),
    "clears everybody's hooks and raises": (
        recorder(__enter__=_clears_everybodys_before_raising),
        "after an unknown name[\\s\\S]*gone",
    ),
    "always to the CPU": (storing(lambda self, o: o.detach().clone().cpu()), "to_cpu=False"),
    "copies on the CPU only": (
        storing(lambda self, o: o.detach().clone().cpu() if self.to_cpu else (o.detach().clone() if o.is_cpu else o)),
        "output's own memory|are detached",
    ),
    "never to the CPU": (storing(lambda self, o: o.detach().clone()), "moved to the CPU"),
}
_CALLS = "one tensor for each call, equal to the output when it was recorded"
_HOOKS = "your hooks are gone and those of others are there"
PROMISES_RECORDER = [
    ("as recorder:", "`with ... as recorder` gives the recorder", "enter returns None"),
    ("one tensor for each call of that submodule", _CALLS, "the last call only"),
    ("name → list of detached tensors, one for each call.", _CALLS, "late binding"),
    ("Recorded tensors are detached", "recordings are detached", "not detached"),
    ("the outputs of chosen submodules", _CALLS, "no containers"),
    ("have the output's dtype", _CALLS, "in float32"),
    ("are on the CPU", "by default they are moved to the CPU", "never to the CPU"),
    (
        "with `to_cpu=False` on the output's device",
        "to_cpu=False leaves them on the output's device",
        "always to the CPU",
    ),
    ("They must stay what they were when recorded", _CALLS, "shares memory"),
    (
        "A submodule that wasn't called has an empty list",
        "activations has the names asked for",
        "no entry for what wasn't called",
    ),
    ("one with two names in the model is found by either", "activations has the names asked for", "first names only"),
    (
        "The model computes and learns what it would",
        "the model computes and learns as without the recorder",
        "output without its graph",
    ),
    (
        "The model computes and learns what it would",
        "the model computes and learns as without the recorder",
        "returns a copy of the output",
    ),
    (
        "The model computes and learns what it would",
        "the model computes and learns as without the recorder",
        "clears the gradients",
    ),
    ("your hooks are gone", _HOOKS, "hooks stay"),
    ("also by an exception", _HOOKS, "hooks stay after an exception"),
    ("those of others are still there", _HOOKS, "clears everybody's hooks"),
    ("the recordings stay", "the recordings stay after an exception", "forgets after an exception"),
    ("The exception goes on.", "an exception goes on", "swallows the exception"),
    ("The exception goes on.", "an exception goes on", "raises an exception of its own"),
    ("Entering again starts afresh.", "entering again starts afresh", "keeps old recordings"),
    ("An unknown name raises `KeyError`", "an unknown name raises KeyError on entering", "AttributeError"),
    ("naming it", "an unknown name raises KeyError on entering", "KeyError without the name"),
    ("on entering", "an unknown name raises KeyError on entering", "KeyError in the constructor"),
    ("no hook is left then", "no hook is left after an unknown name", "registers while looking"),
]
CONTEXT_RECORDER = [
    "Write a context manager that records",
    'model(x) recorder.activations["0"]',
    "Attributes:",
    "activations:",
    "Record the outputs of named submodules",
    "Store one output of the submodule `name`.",
]

# ---------------------------------------------------------------- dead units


def dead_by_maxima(model, batches):
    """Maxima instead of masks, hooks in a list, modes by name, inference mode."""
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


def dead_on_a_copy(model, batches):
    """Works on a copy of the model, in which each ReLU is replaced by one that counts."""

    class Counting(nn.ReLU):
        count = None

        def forward(self, x):
            y = torch.relu(x)
            now = (y != 0).sum([0, *range(2, y.dim())])
            self.count = now if self.count is None else self.count + now
            return y

    work = copy.deepcopy(model).eval()
    swapped = {}
    for module in [m for m in work.modules() if not isinstance(m, Counting)]:
        for name, child in list(module._modules.items()):
            if type(child) is nn.ReLU:
                module._modules[name] = swapped.setdefault(child, Counting())
    with torch.no_grad():
        for batch in batches:
            work(batch)
    return {n: m.count == 0 for n, m in work.named_modules() if isinstance(m, Counting) and m.count is not None}


def detector(
    reduce=lambda out: (out.transpose(0, 1).flatten(1) > 0).any(1),
    combine=torch.logical_or,
    chosen=lambda model: {n: m for n, m in model.named_modules() if isinstance(m, nn.ReLU)},
    before=lambda model: model.eval(),
    no_grad=torch.no_grad,
    after=lambda model: None,
    restore=True,
    cleanup="own",
    always=True,
    swallow=False,
    uncalled=False,
):
    """A dead-unit detector with chosen faults."""

    def detect(model, batches):
        modes = {m: m.training for m in model.modules()}
        active, handles = {}, []

        def watch(name):
            def hook(module, args, out):
                now = reduce(out)
                active[name] = combine(active[name], now) if name in active else now

            return hook

        def finish():
            after(model)
            if cleanup == "everybody's":
                for m in model.modules():
                    m._forward_hooks.clear()
            elif cleanup == "own":
                for handle in handles:
                    handle.remove()
            if restore:
                for m, mode in modes.items():
                    m.training = mode

        relus = chosen(model)
        for name, module in relus.items():
            handles.append(module.register_forward_hook(watch(name)))
        before(model)
        try:
            with no_grad():
                for batch in batches:
                    model(batch)
        except RuntimeError:
            if always:
                finish()
            if not swallow:
                raise
        else:
            finish()
        if uncalled:
            active.update({name: torch.zeros(0, dtype=torch.bool) for name in relus if name not in active})
        return {name: ~ever for name, ever in active.items()}

    return detect


def _any(out, threshold=0.0):
    return (out.transpose(0, 1).flatten(1) > threshold).any(1)


def looks_afterwards(model, batches):
    """Keeps the outputs and looks at them when a later module may have overwritten them."""
    outputs = {}
    look = detector(reduce=lambda out: out, combine=lambda a, b: b)
    del look
    handles = [
        m.register_forward_hook(lambda m, a, out, n=n: outputs.setdefault(n, []).append(out))
        for n, m in model.named_modules()
        if isinstance(m, nn.ReLU)
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    return {name: ~torch.stack([_any(out) for out in outs]).any(0) for name, outs in outputs.items()}


def _modes_by_train(model, batches):
    """Each mode put back with train(), which sets the children too."""
    modes = {m: m.training for m in model.modules()}
    try:
        return detector(restore=False)(model, batches)
    finally:
        for m, mode in modes.items():
            m.train(mode)


def _all_batches_as_one(model, batches):
    return detector()(model, [torch.cat(batches)])


@contextlib.contextmanager
def _turns_autograd_off_and_on():
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(True)


WRONG_DEAD = {
    "top level only": (
        detector(chosen=lambda model: {n: m for n, m in model.body.named_children() if isinstance(m, nn.ReLU)}),
        "name of every nn.ReLU",
    ),
    "with the uncalled one": (detector(uncalled=True), "name of every nn.ReLU"),
    "every activation": (
        detector(chosen=lambda model: {n: m for n, m in model.named_modules() if not list(m.children())}),
        "name of every nn.ReLU",
    ),
    "both names of a shared one": (
        detector(
            chosen=lambda model: {
                n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.ReLU)
            }
        ),
        "name of every nn.ReLU",
    ),
    "last batch only": (detector(combine=lambda a, b: b), "Hint 1|batches of"),
    "first batch only": (detector(combine=lambda a, b: a), "batches of"),
    "dead in one batch": (detector(combine=torch.logical_and), "batches of"),
    "last call only": (detector(combine=lambda a, b: b), "body.1"),
    "positions as units": (detector(reduce=lambda out: (out.flatten(1) > 0).any(0)), "convolutions"),
    "first image only": (detector(reduce=lambda out: _any(out[:1])), "a unit is dead"),
    "one position": (
        detector(reduce=lambda out: (out.flatten(2)[..., 0] > 0).any(0) if out.dim() > 2 else _any(out)),
        "convolutions",
    ),
    "names with ReLU": (
        detector(chosen=lambda model: {n: m for n, m in model.named_modules() if "ReLU" in type(m).__name__}),
        "name of every nn.ReLU",
    ),
    "all batches as one": (_all_batches_as_one, "a unit is dead[\\s\\S]*Sizes of tensors"),
    "mean of all": (detector(reduce=lambda out: out.transpose(0, 1).flatten(1).mean(1) != 0), "there 1e-38"),
    "active for less than one in a thousand": (
        detector(reduce=lambda out: (out.transpose(0, 1).flatten(1) > 0).double().mean(1) > 1e-3),
        "there 1e-38",
    ),
    "mean": (detector(reduce=lambda out: out.transpose(0, 1).flatten(1).mean(1) > 0.01), "a unit is dead"),
    "all": (detector(reduce=lambda out: (out.transpose(0, 1).flatten(1) > 0).all(1)), "a unit is dead"),
    "nearly zero": (detector(reduce=lambda out: _any(out, 1e-12)), "there 1e-38"),
    "squeezes": (detector(reduce=lambda out: _any(out).squeeze()), "a unit is dead"),
    "numbers": (
        lambda model, batches: {n: d.int() for n, d in dead_by_maxima(model, batches).items()},
        "dtype torch.bool",
    ),
    "alive for dead": (
        lambda model, batches: {n: ~d for n, d in dead_by_maxima(model, batches).items()},
        "a unit is dead",
    ),
    "2-d only": (
        detector(reduce=lambda out: (out > 0).any(0) if out.dim() == 2 else (out > 0).any(3).any(2).any(0)),
        "a unit is dead",
    ),
    "looks afterwards": (looks_afterwards, "a unit is dead"),
    "turns autograd on": (detector(no_grad=_turns_autograd_off_and_on), "was off"),
    "train mode": (detector(before=lambda model: None), "runs in eval mode"),
    "batch norm in eval only": (
        detector(before=lambda model: [m.eval() for m in model.modules() if isinstance(m, nn.BatchNorm2d)]),
        "runs in eval mode",
    ),
    "records a graph": (detector(no_grad=contextlib.nullcontext), "records no graph"),
    "train in the end": (detector(restore=False, after=lambda model: model.train()), "mode it was in"),
    "eval in the end": (detector(restore=False), "mode it was in"),
    "modes by train()": (_modes_by_train, "mode it was in"),
    "clears gradients": (detector(after=lambda model: model.zero_grad()), "gradients are untouched"),
    "freezes the parameters": (
        detector(before=lambda model: model.eval().requires_grad_(False)),
        "gradients are untouched[\\s\\S]*requires_grad",
    ),
    "hooks stay": (detector(cleanup=None), "hooks are those from before"),
    "clears everybody's hooks": (detector(cleanup="everybody's"), "hooks are those from before"),
    "swallows the exception": (detector(swallow=True), "an exception goes on"),
    "no finally": (detector(always=False), "restored after an exception"),
}
_UNITS = "a unit is dead if all its outputs are zero"
_UNTOUCHED = "parameters, buffers and gradients are untouched"
_AFTER = "everything is restored after an exception too"
PROMISES_DEAD = [
    ("its output is zero for every input of a data set", _UNITS, "first image only"),
    ("The units are dimension 1 of the output", _UNITS, "positions as units"),
    ("exactly zero", _UNITS, "nearly zero"),
    ("at every position of every image", _UNITS, "active for less than one in a thousand"),
    ("at every position of every image", _UNITS, "one position"),
    ("`(N, units, ...)`", _UNITS, "2-d only"),
    (
        "for every `nn.ReLU` that the model calls",
        "has the name of every nn.ReLU that was called, and no other",
        "with the uncalled one",
    ),
    ("nested ones too", "has the name of every nn.ReLU that was called, and no other", "top level only"),
    ("a boolean tensor", _UNITS, "numbers"),
    ("of shape `(units,)`", _UNITS, "squeezes"),
    (
        "for every `nn.ReLU` that the model calls",
        "has the name of every nn.ReLU that was called, and no other",
        "names with ReLU",
    ),
    (
        "by its name in `model.named_modules()`",
        "has the name of every nn.ReLU that was called, and no other",
        "both names of a shared one",
    ),
    ("results of all batches, whatever their sizes, are combined", _UNITS, "last batch only"),
    ("whatever their sizes", _UNITS, "all batches as one"),
    ("those of all calls", _UNITS, "last call only"),
    ("The pass runs in eval mode", "runs in eval mode", "batch norm in eval only"),
    ("records no graph", "records no graph", "records a graph"),
    ("also after an exception", _AFTER, "no finally"),
    ("each submodule is in the mode it was in", "each submodule is in the mode it was in", "train in the end"),
    ("each submodule is in the mode it was in", "each submodule is in the mode it was in", "modes by train()"),
    ("parameters, buffers and gradients are untouched", _UNTOUCHED, "clears gradients"),
    ("the hooks are those from before", "the hooks are those from before", "clears everybody's hooks"),
    ("autograd is on or off as it was", "autograd is on or off as it was", "turns autograd on"),
    ("An exception goes on.", "an exception goes on", "swallows the exception"),
    (
        "Name of each nn.ReLU → bool tensor (units,): True where the unit was zero for all inputs.",
        _UNITS,
        "alive for dead",
    ),
]
CONTEXT_DEAD = ["One batch isn't enough to call a unit dead:"]

# ---------------------------------------------------------------- clipping


def clip_out_of_place(model, limit):
    """torch.clip, and a new gradient."""
    handles = []
    for p in model.parameters():
        if p.requires_grad:
            handles.append(
                p.register_post_accumulate_grad_hook(lambda q: setattr(q, "grad", torch.clip(q.grad, -limit, limit)))
            )
    return lambda: [h.remove() for h in handles]


class ClipByComparison:
    """An object as the function that undoes, masks instead of clamp, one set of parameters seen."""

    def __init__(self, model, limit):
        self.limit, self.handles, seen = limit, {}, set()
        for module in model.modules():
            for p in module._parameters.values():
                if p is not None and p.requires_grad and id(p) not in seen:
                    seen.add(id(p))
                    self.handles[p] = p.register_post_accumulate_grad_hook(self.clip)

    def clip(self, p):
        with torch.no_grad():
            p.grad[p.grad > self.limit] = self.limit
            p.grad[p.grad < -self.limit] = -self.limit

    def __call__(self):
        while self.handles:
            self.handles.popitem()[1].remove()


def clip_one_by_one(model, limit):
    """PyTorch's own function on the parameter that arrives."""
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: clip_grad_value_([p], limit))
        for p in model.parameters()
        if p.requires_grad
    ]

    def undo():
        for handle in handles:
            handle.remove()

    return undo


def clip_at_the_node(model, limit):
    """Hooks on the AccumulateGrad nodes, which live as long as the returned function."""
    nodes, handles = [], []
    for p in model.parameters():
        if p.requires_grad:

            def clamp(grad_inputs, grad_outputs, p=p):
                p.grad.clamp_(-limit, limit)

            nodes.append(p.view_as(p).grad_fn.next_functions[0][0])
            handles.append(nodes[-1].register_hook(clamp))

    def undo():
        for handle in handles:
            handle.remove()
        nodes.clear()

    return undo


def clip(post=lambda p, limit: p.grad.clamp_(-limit, limit), tensor=None, undo="own", chosen=nn.Module.parameters):
    """Clipping with chosen faults."""

    def start(model, limit):
        handles = []

        def arrived(p):
            post(p, limit)

        for p in chosen(model):
            if p.requires_grad and tensor is None:
                handles.append(p.register_post_accumulate_grad_hook(arrived))
            elif p.requires_grad:
                handles.append(p.register_hook(lambda g, p=p: tensor(p, g, limit)))

        def remove():
            if undo == "everybody's":
                for p in model.parameters():
                    for hooks in (p._post_accumulate_grad_hooks, p._backward_hooks):
                        if hooks:
                            hooks.clear()
            for handle in handles[:1] if undo == "first" else handles:
                handle.remove()

        return None if undo is None else remove

    return start


def clips_once_now(model, limit):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.clamp_(-limit, limit)
    return lambda: None


def clips_everything_there_is(model, limit):
    """In each hook all gradients of the model."""
    handles = [
        p.register_post_accumulate_grad_hook(lambda _: clip_grad_value_(model.parameters(), limit))
        for p in model.parameters()
        if p.requires_grad
    ]
    return lambda: [handle.remove() for handle in handles]


_HANDLES = []


def _one_list_of_handles(model, limit):
    """Undoing for one model undoes it for all."""

    def arrived(p):
        p.grad.clamp_(-limit, limit)

    _HANDLES.extend(p.register_post_accumulate_grad_hook(arrived) for p in model.parameters() if p.requires_grad)
    return lambda: [handle.remove() for handle in _HANDLES]


_LIMIT = {}


def _limit_of_the_last_call(model, limit):
    _LIMIT["limit"] = limit
    return clip(lambda p, _: p.grad.clamp_(-_LIMIT["limit"], _LIMIT["limit"]))(model, limit)


def _weights_too(p, limit):
    p.grad.clamp_(-limit, limit)
    p.data.clamp_(-limit, limit)


def _new_part_by_difference(p, g, limit):
    """Equal in exact arithmetic."""
    if p.grad is None:
        return g.clamp(-limit, limit)
    return (p.grad + g).clamp(-limit, limit) - p.grad


WRONG_CLIP = {
    "once, now": (clips_once_now, "left alone|bit for bit"),
    "a new tensor": (clip(lambda p, limit: p.grad.clamp(-limit, limit)), "bit for bit"),
    "tensor hook": (clip(tensor=lambda p, g, limit: g.clamp(-limit, limit)), "bit for bit"),
    "tensor hook, by difference": (clip(tensor=_new_part_by_difference), "bit for bit"),
    "one side": (clip(lambda p, limit: p.grad.clamp_(max=limit)), "bit for bit"),
    "zero and up": (clip(lambda p, limit: p.grad.clamp_(0, limit)), "bit for bit"),
    "by norm": (clip(lambda p, limit: p.grad.mul_((limit / p.grad.norm()).clamp(max=1))), "bit for bit"),
    "NaN to zero": (clip(lambda p, limit: p.grad.nan_to_num_(0.0).clamp_(-limit, limit)), "bit for bit"),
    "finite gradients only": (
        clip(lambda p, limit: p.grad.clamp_(-limit, limit) if p.grad.isfinite().all() else None),
        "bit for bit[\\s\\S]*infinite",
    ),
    "limit in float32": (
        clip(lambda p, limit: p.grad.clamp_(-torch.tensor(limit), torch.tensor(limit))),
        "bit for bit[\\s\\S]*float64",
    ),
    "weights only": (clip(lambda p, limit: not p.grad.is_cuda and p.requires_grad), "bit for bit"),
    "skips what has one element": (
        clip(chosen=lambda model: [p for p in model.parameters() if p.dim()]),
        "bit for bit",
    ),
    "skips the tied one": (
        clip(chosen=lambda model: [p for n, p in model.named_parameters() if n != "first.weight"]),
        "bit for bit",
    ),
    "limit of the last call": (_limit_of_the_last_call, "bit for bit|undoing"),
    "weights too": (clip(_weights_too), "weights, frozen"),
    "everything there is": (clips_everything_there_is, "weights, frozen[\\s\\S]*grad"),
    "undoes the first": (clip(undo="first"), "undoing"),
    "one list of handles for all models": (_one_list_of_handles, "another model has lost"),
    "undoes everybody's": (clip(undo="everybody's"), "undoing"),
    "nothing returned": (clip(undo=None), "returns a function"),
}
_CLIPPED = "gradients equal clip_grad_value_'s bit for bit"
_ALONE = "weights, frozen and unreached gradients are left alone"
_UNDOING = "undoing removes your hooks and no others"
PROMISES_CLIP = [
    ("from then on, every gradient", _CLIPPED, "a new tensor"),
    ("exactly what", _CLIPPED, "by norm"),
    ("every gradient that `loss.backward()` adds to", _CLIPPED, "finite gradients only"),
    ("bit for bit", _CLIPPED, "tensor hook, by difference"),
    ("also where `.grad` wasn't empty before", _CLIPPED, "tensor hook"),
    ("A tied parameter (used in two places) is clipped once", _CLIPPED, "skips the tied one"),
    ("Weights,", _ALONE, "weights too"),
    ("frozen parameters and gradients that this backward doesn't reach are left alone", _ALONE, "everything there is"),
    ("The returned function removes your hooks", _UNDOING, "undoes the first"),
    ("and no others", _UNDOING, "undoes everybody's"),
    ("Clip every gradient to [-limit, limit] when it has been accumulated", _CLIPPED, "one side"),
    ("A function that stops it.", "returns a function", "nothing returned"),
]

# ---------------------------------------------------------------- optimizer in backward


def step_by_id(model, make_optimizer):
    """Looked up by id, the gradient dropped with zero_grad."""
    by_id = {id(p): make_optimizer([p]) for p in model.parameters() if p.requires_grad}
    handles = []
    for p in model.parameters():
        if id(p) in by_id:

            def hook(p):
                by_id[id(p)].step()
                by_id[id(p)].zero_grad(set_to_none=True)

            handles.append(p.register_post_accumulate_grad_hook(hook))
    return lambda: [h.remove() for h in handles]


def one_optimizer_for_all(model, make, trained_only=True, drop_old=True):
    """Stepped again and again it sees only the one gradient that is there, if old ones are dropped first."""
    optimizer = make([p for p in model.parameters() if p.requires_grad or not trained_only])
    for p in model.parameters():
        if p.requires_grad and drop_old:
            p.grad = None

    def hook(p):
        optimizer.step()
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters() if p.requires_grad]
    return lambda: [h.remove() for h in handles]


def step_lazily(model, make):
    """Optimizers are made when the first gradient comes; a closure for each parameter."""
    undo = []

    def follow(p):
        made = []

        def hook(_):
            made[:] = made or [make([p])]
            made[0].step()
            del p.grad

        undo.append(p.register_post_accumulate_grad_hook(hook).remove)

    for p in filter(lambda p: p.requires_grad, model.parameters()):
        follow(p)
    return lambda: [one() for one in undo]


def step(drop="none", undo="own", used="own", chosen=lambda model: [p for p in model.parameters() if p.requires_grad]):
    """Stepping in backward with chosen faults."""

    def start(model, make):
        params = chosen(model)
        optimizers = {p: make([p]) for p in params}
        handles = []
        for p in params:

            def hook(q):
                which = {"own": lambda: optimizers[q], "new": lambda: make([q]), "last": lambda: optimizers[params[-1]]}
                which[used]().step()
                if drop == "none":
                    q.grad = None
                elif drop == "zero":
                    q.grad.zero_()

            handles.append(p.register_post_accumulate_grad_hook(hook))

        def remove():
            if undo == "everybody's":
                for p in model.parameters():
                    (p._post_accumulate_grad_hooks or {}).clear()
            for handle in handles if undo == "own" else handles[:1]:
                handle.remove()

        return None if undo is None else remove

    return start


def plain_sgd(model, make):
    """The demonstration's rule, not what make_optimizer builds."""

    def hook(p):
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters() if p.requires_grad]
    return lambda: [h.remove() for h in handles]


def all_at_the_end(model, make):
    """Puts the gradients aside and steps when the last parameter has its own."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer, aside = make(params), {}

    def step_all():
        for p, grad in aside.items():
            p.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        aside.clear()

    def hook(p):
        if not aside:
            torch.autograd.Variable._execution_engine.queue_callback(step_all)
        aside[p], p.grad = p.grad, None

    handles = [p.register_post_accumulate_grad_hook(hook) for p in params]
    return lambda: [h.remove() for h in handles]


def tied_twice(model, make):
    """One hook for each place in which a parameter is used."""
    named = [(n, p) for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    optimizers = {p: make([p]) for _, p in named}
    handles = [p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step()) for _, p in named]
    for p in optimizers:
        handles.append(p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)))
    return lambda: [h.remove() for h in handles]


_KEPT = {}


def one_optimizer_for_ever(model, make):
    """A second call finds the optimizers of the first."""
    for p in model.parameters():
        if p.requires_grad and p not in _KEPT:
            _KEPT[p] = make([p])

    def hook(p):
        _KEPT[p].step()
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters() if p.requires_grad]
    return lambda: [h.remove() for h in handles]


def skips_zeros(model, make):
    """Takes a gradient of zeros for none."""
    optimizers = {p: make([p]) for p in model.parameters() if p.requires_grad}

    def hook(p):
        if p.grad.count_nonzero():
            optimizers[p].step()
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(hook) for p in optimizers]
    return lambda: [h.remove() for h in handles]


def steps_what_was_not_reached(model, make):
    """A gradient of zeros for those that have none."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizers = {p: make([p]) for p in params}

    def hook(p):
        optimizers[p].step()
        p.grad = None
        if p is model.first.weight:  # the last to arrive
            for q in (model.unused, *model.heads[0].parameters(), *model.heads[1].parameters()):
                q.grad = torch.zeros_like(q)
                optimizers[q].step()
                q.grad = None

    handles = [p.register_post_accumulate_grad_hook(hook) for p in params]
    return lambda: [h.remove() for h in handles]


WRONG_STEP = {
    "gradients of zeros": (step(drop="zero"), "gradient dropped"),
    "gradients kept": (step(drop="keep"), "gradient dropped"),
    "all at the end": (all_at_the_end, "gradient dropped"),
    "the loop's last optimizer": (step(used="last"), "updated and its gradient dropped"),
    "a new optimizer each time": (step(used="new"), "bit for bit[\\s\\S]*Hint 1"),
    "plain SGD": (plain_sgd, "bit for bit"),
    "tied stepped twice": (tied_twice, "bit for bit"),
    "zeros where none arrived": (steps_what_was_not_reached, "bit for bit"),
    "weights without biases": (
        step(chosen=lambda model: [p for n, p in model.named_parameters() if p.requires_grad and "bias" not in n]),
        "gradient dropped",
    ),
    "no step for zeros": (skips_zeros, "bit for bit"),
    "a generator for the list": (
        lambda model, make: step_by_id(model, lambda params: make(p for p in params)),
        "bit for bit",
    ),
    "groups for the list": (lambda model, make: step_by_id(model, lambda params: make([{"params": params}])), "."),
    "optimizers kept for ever": (one_optimizer_for_ever, "bit for bit[\\s\\S]*undone"),
    "frozen ones stepped": (
        lambda model, make: one_optimizer_for_all(model, make, trained_only=False),
        "frozen parameters stay",
    ),
    "an old gradient stepped": (
        lambda model, make: one_optimizer_for_all(model, make, drop_old=False),
        "even if it has a gradient",
    ),
    "undoes the first": (step(undo="first"), "undoing"),
    "undoes everybody's": (step(undo="everybody's"), "undoing"),
    "nothing returned": (step(undo=None), "returns a function"),
}
_SOON = "each parameter is updated and its gradient dropped before the next one comes"
_EQUAL = "parameters equal the usual loop's bit for bit"
PROMISES_STEP = [
    ("`make_optimizer(params)` builds an optimizer", _EQUAL, "plain SGD"),
    ("`loss.backward()` alone trains the model", _SOON, "weights without biases"),
    ("its gradient dropped (`p.grad is None`)", _SOON, "gradients of zeros"),
    ("as soon as the gradient is accumulated, before the next one is", _SOON, "all at the end"),
    ("The result must equal the usual loop exactly", _EQUAL, "a new optimizer each time"),
    ("Frozen parameters stay", "frozen parameters stay", "frozen ones stepped"),
    ("tied ones are stepped once", _EQUAL, "tied stepped twice"),
    ("one that a backward doesn't reach isn't stepped", _EQUAL, "zeros where none arrived"),
    (
        "one that a backward doesn't reach isn't stepped",
        "one that a backward doesn't reach isn't stepped, even if it has a gradient",
        "an old gradient stepped",
    ),
    ("builds an optimizer for a list of parameters", _EQUAL, "a generator for the list"),
    ("The result must equal the usual loop exactly", _EQUAL, "no step for zeros"),
    ("Return a function that undoes it", "returns a function", "nothing returned"),
    ("your hooks are gone", _UNDOING, "undoes the first"),
    ("those of others are still there", _UNDOING, "undoes everybody's"),
    ("Step each parameter as soon as its gradient is accumulated, then drop the gradient", _SOON, "gradients kept"),
    ("A function that stops it.", "returns a function", "nothing returned"),
]
CONTEXT_STEP = [
    "Returns:",
    "Write `step_in_backward(model, make_optimizer)`.",
    "`lambda params:",
    "torch.optim.Adam(params, lr=1e-3)`.",
]


ANSWERS, STUBS = answers("15-01"), answers("15-01", edit=student_source)
CHECKS = {
    "Swish": check.swish,
    "GradientReversal": check.gradient_reversal,
    "ActivationRecorder": check.activation_recorder,
    "dead_units": check.dead_units,
    "clip_at_accumulation": check.clip_at_accumulation,
    "step_in_backward": check.step_in_backward,
}
RIGHT = {
    "Swish": [SwishByExp, SwishByTanh, SwishByAutograd],
    "GradientReversal": [HookReversal, ViewReversal],
    "ActivationRecorder": [PlainRecorder, GlobalRecorder, StackRecorder],
    "dead_units": [dead_by_maxima, dead_on_a_copy, detector()],
    "clip_at_accumulation": [clip_out_of_place, ClipByComparison, clip_one_by_one, clip_at_the_node],
    "step_in_backward": [step_by_id, one_optimizer_for_all, step_lazily],
}
WRONG = {
    "Swish": WRONG_SWISH,
    "GradientReversal": WRONG_REVERSAL,
    "ActivationRecorder": WRONG_RECORDER,
    "dead_units": WRONG_DEAD,
    "clip_at_accumulation": WRONG_CLIP,
    "step_in_backward": WRONG_STEP,
}
PROMISES = {
    "Swish": PROMISES_SWISH,
    "GradientReversal": PROMISES_REVERSAL,
    "ActivationRecorder": PROMISES_RECORDER,
    "dead_units": PROMISES_DEAD,
    "clip_at_accumulation": PROMISES_CLIP,
    "step_in_backward": PROMISES_STEP,
}
CONTEXT = {
    "Swish": CONTEXT_SWISH,
    "GradientReversal": CONTEXT_REVERSAL,
    "ActivationRecorder": CONTEXT_RECORDER,
    "dead_units": CONTEXT_DEAD,
    "clip_at_accumulation": ["Write `clip_at_accumulation(model, limit)`:", "Returns:"],
    "step_in_backward": CONTEXT_STEP,
}


class TestChecks(CheckProtocol):
    TOPIC = "15-01"
    CHECKS, ANSWERS, STUBS = CHECKS, ANSWERS, STUBS
    RIGHT, WRONG, PROMISES, CONTEXT = RIGHT, WRONG, PROMISES, CONTEXT

    def hold_stand_in(self, name, stand_in):
        if name == "Swish":
            x = torch.randn(4)
            assert torch.equal(stand_in.apply(x), F.silu(x))
        elif name in ("GradientReversal", "step_in_backward"):
            assert CHECKS[name].run(stand_in).status == "passed"
