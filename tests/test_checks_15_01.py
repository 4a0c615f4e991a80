"""The checks of 15-01 accept right answers, however written, and reject what a student might really write."""

import contextlib
import random
import warnings
from typing import ClassVar

import torch
import torch.nn.functional as F
from check_protocol import CheckProtocol, idle
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from course.answers import answers
from course.exercise_form import student_source
from shared.checks import topic_15_01 as check

# ---------------------------------------------------------------- which nodes run


def runs_from_above(loss, inputs):
    """Nodes in the order of a depth-first walk that needs no recursion, then from the last to the first."""
    targets = {torch.autograd.graph.get_gradient_edge(t).node for t in inputs}
    order, seen, stack = [], set(), [(loss.grad_fn, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(target, False) for target, _ in node.next_functions]
    runs = set()
    for node in order:
        if any(target in runs or target in targets for target, _ in node.next_functions if target is not None):
            runs.add(node)
    return runs


def runs_to_a_fixpoint(loss, inputs):
    """All edges, and a list that grows."""
    nodes, edges = [loss.grad_fn], {}
    known = set(nodes)
    for node in nodes:
        for target, _ in node.next_functions:
            if target is not None:
                edges.setdefault(target, set()).add(node)
                if target not in known:
                    known.add(target)
                    nodes.append(target)
    found = [t.grad_fn or torch.autograd.graph.get_gradient_edge(t).node for t in inputs]
    out, todo = set(), list(found)
    while todo:
        new = edges.get(todo.pop(), set()) - out
        out |= new
        todo += new
    return frozenset(out)


def runs_recursive(loss, inputs):
    targets, memo = {torch.autograd.graph.get_gradient_edge(t).node for t in inputs}, {}

    def leads(node):
        if node not in memo:
            found = [target in targets or leads(target) for target, _ in node.next_functions if target is not None]
            memo[node] = any(found)
        return memo[node]

    def walk(node, seen):
        if node is None or node in seen:
            return
        seen.add(node)
        leads(node)
        for target, _ in node.next_functions:
            walk(target, seen)

    walk(loss.grad_fn, set())
    return {node for node, does in memo.items() if does}


def runs_every_path(loss, inputs):
    """Visits a node once for each path to it."""
    targets, runs, stack = {torch.autograd.graph.get_gradient_edge(t).node for t in inputs}, set(), [[loss.grad_fn]]
    while stack:
        path = stack.pop()
        for target, _ in path[-1].next_functions:
            if target is not None:
                if target in targets:
                    runs.update(path)
                stack.append([*path, target])
    return runs


def runs_by_running(loss, inputs):
    seen = set()
    handles = [n.register_prehook(lambda _, n=n: seen.add(n)) for n in _all_nodes(loss)]
    torch.autograd.grad(loss, inputs, retain_graph=True)
    for handle in handles:
        handle.remove()
    return seen


def _all_nodes(loss):
    seen, stack = {loss.grad_fn}, [loss.grad_fn]
    while stack:
        new = {t for t, _ in stack.pop().next_functions if t is not None} - seen
        seen |= new
        stack += new
    return seen


def _targets(inputs):
    return {torch.autograd.graph.get_gradient_edge(t).node for t in inputs}


def runs_slowly(loss, inputs):
    """Right, with a walk of its own from each node."""
    targets, runs = _targets(inputs), set()
    for node in _all_nodes(loss):
        seen, stack = set(), [node]
        while stack:
            new = {t for t, _ in stack.pop().next_functions if t is not None} - seen
            seen |= new
            stack += new
        if seen & targets:
            runs.add(node)
    return runs


def runs_outer_edges(loss, inputs):
    """Looks at the first and the last edge of a node."""
    order, seen = [loss.grad_fn], {loss.grad_fn}
    edges = lambda n: [t for t, _ in n.next_functions[:1] + n.next_functions[-1:] if t is not None]  # noqa: E731
    for node in order:
        new = [t for t in edges(node) if t not in seen]
        seen.update(new)
        order += new
    targets, runs = _targets(inputs), set()
    for _ in order if len(order) < 100 else ():
        runs |= {n for n in order if any(t in runs or t in targets for t in edges(n))}
    return runs if len(order) < 100 else runs_from_above(loss, inputs)


def runs_first_edge(loss, inputs):
    """Follows the first edge of a node only."""
    targets, runs, node, path = _targets(inputs), set(), loss.grad_fn, []
    while node is not None:
        path.append(node)
        node = next((t for t, _ in node.next_functions if t is not None), None)
        if node in targets:
            runs.update(path)
    return runs


WRONG_RUNS = {
    "a list": (lambda loss, inputs: list(runs_from_above(loss, inputs)), "returns a set"),
    "the whole graph": (lambda loss, inputs: _all_nodes(loss), "too many"),
    "all but leaves": (
        lambda loss, inputs: {n for n in _all_nodes(loss) if not hasattr(n, "variable")},
        "too many",
    ),
    "the inputs' own nodes too": (lambda loss, inputs: runs_from_above(loss, inputs) | _targets(inputs), "too many"),
    "never an input's own": (lambda loss, inputs: runs_from_above(loss, inputs) - _targets(inputs), "not found"),
    "first and last edges": (runs_outer_edges, "not found"),
    "None among them": (lambda loss, inputs: runs_from_above(loss, inputs) | {None}, "nothing else"),
    "the first input only": (lambda loss, inputs: runs_from_above(loss, inputs[:1]), "not found"),
    "first edges": (runs_first_edge, "not found"),
    "results only": (
        lambda loss, inputs: runs_from_above(loss, [t for t in inputs if t.grad_fn is not None]),
        "not found",
    ),
    "loss always": (lambda loss, inputs: runs_from_above(loss, inputs) | {loss.grad_fn}, "too many"),
    "by running": (runs_by_running, "no node is run"),
    "recursion": (runs_recursive, "long chains[\\s\\S]*Hint 2|RecursionError"),
    "every path": (runs_every_path, "doublings"),
    "a walk from each node": (runs_slowly, "nodes in a chain"),
}


# ---------------------------------------------------------------- Swish


def _slope(x):
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def swish(backward=lambda ctx, g: g * _slope(ctx.saved_tensors[0]), value=lambda x: x * torch.sigmoid(x), keep=None):
    """A Swish with the given pieces; `keep(ctx, x, y)` stands for save_for_backward."""

    class Made(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return value(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            if keep is None:
                ctx.save_for_backward(*inputs)
            else:
                keep(ctx, inputs[0], output)

    Made.backward = staticmethod(backward)
    return Made


class SwishOldStyle(Function):
    """forward takes ctx."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        return g * _slope(ctx.saved_tensors[0])


class SwishByExp(Function):
    """Other formulas."""

    generate_vmap_rule = True

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


class SwishByLogarithms(Function):
    """log σ, in-place on its own results, needs_input_grad, and a vmap of its own."""

    @staticmethod
    def vmap(info, in_dims, x):
        return SwishByLogarithms.apply(x), in_dims[0]

    @staticmethod
    def forward(x):
        return F.logsigmoid(x).exp_().mul_(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        if not ctx.needs_input_grad[0]:
            return None
        x = ctx.saved_tensors[0]
        sigmoid, other = F.logsigmoid(x).exp(), F.logsigmoid(-x).exp()
        return g * (sigmoid + x * sigmoid * other)


class SwishByAutograd(Function):
    """F.silu forward and its own backward operator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return F.silu(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return torch.addcmul(s, x, s * (1 - s)) * g


def _save_both(ctx, x, y):
    ctx.save_for_backward(x, torch.sigmoid(x))


def _save_output(ctx, x, y):
    ctx.save_for_backward(x, y)


def _sigmoid_in_a_list(ctx, x, y):
    ctx.save_for_backward(x)
    ctx.cache = [torch.sigmoid(x)]


def _sigmoid_in_a_closure(ctx, x, y):
    ctx.save_for_backward(x)
    s = torch.sigmoid(x)
    ctx.sigmoid = lambda: s


_CACHE = {}


def _sigmoid_in_a_global(ctx, x, y):
    ctx.save_for_backward(x)
    _CACHE["sigmoid"] = torch.sigmoid(x)


def _x_in_a_global(ctx, x, y):
    ctx.save_for_backward(x)
    _CACHE["x"] = x


def _sigmoid_in_numpy(ctx, x, y):
    ctx.save_for_backward(x)
    if not torch._C._functorch.is_functorch_wrapped_tensor(x):
        ctx.sigmoid = torch.sigmoid(x.detach()).float().numpy().copy()


class WrongRule(swish()):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return WrongRule.apply(x), 0


def _clamps_its_input(x):
    y = x * torch.sigmoid(x)
    if not torch._C._functorch.is_functorch_wrapped_tensor(x):
        x.data.clamp_(-800, 800)
    return y


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


def _remember_on_the_class(ctx, x, y):
    ctx.save_for_backward(x)
    _LAST["x"] = x


WRONG_SWISH = {
    "a function": (F.silu, "autograd Function"),
    "only the sigmoid": (swish(value=torch.sigmoid), "value is x · sigmoid"),
    "a constant added": (swish(value=lambda x: x * torch.sigmoid(x) + 1), "value is x · sigmoid"),
    "returns float32": (swish(value=lambda x: x.float() * torch.sigmoid(x.float())), "dtype torch.bfloat16"),
    "flattens": (swish(value=lambda x: (x * torch.sigmoid(x)).reshape(-1)), "value is x[\\s\\S]*shape"),
    "value overflows": (swish(value=lambda x: x * _by_exp(x)), "value is x · sigmoid[\\s\\S]*Hint 3"),
    "value zero below -87": (
        swish(value=lambda x: torch.where(x < -87, torch.zeros_like(x), x * torch.sigmoid(x))),
        "value is x[\\s\\S]*from -700 to -10",
    ),
    "value by tanh": (swish(value=lambda x: x * (1 + torch.tanh(x / 2)) / 2), "value is x[\\s\\S]*from -700 to"),
    "value by 1 - sigmoid": (swish(value=lambda x: x * (1 - torch.sigmoid(-x))), "value is x · sigmoid[\\s\\S]*Hint 3"),
    "slope zero far out": (
        swish(lambda ctx, g: g * (_slope(ctx.saved_tensors[0]) * (ctx.saved_tensors[0] > -38))),
        "gradient is grad_output[\\s\\S]*from -700 to -10[\\s\\S]*Hint 3",
    ),
    "slope zero far out in float32": (
        swish(
            lambda ctx, g: (
                g
                * (_slope(x := ctx.saved_tensors[0]) * ((x > -34) if x.dtype == torch.float32 else torch.ones_like(x)))
            )
        ),
        "gradient is grad_output[\\s\\S]*from -80 to -10",
    ),
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
    "in place": (swish(value=lambda x: x.mul_(torch.sigmoid(x)).clone()), "x stays as it is"),
    "clamps its input": (swish(value=_clamps_its_input), "x stays as it is"),
    "reuses grad_output": (swish(_reuses_grad_output), "grad_output stays as it is"),
    "value in float32 precision": (swish(value=_in_float32), "value is x[\\s\\S]*float64"),
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
    "saves a copy": (swish(keep=lambda ctx, x, y: ctx.save_for_backward(x.clone())), "gradgradcheck"),
    "a backward with noise": (
        swish(lambda ctx, g: g * _slope(ctx.saved_tensors[0]) * (1 + 1e-14 * random.random())),
        "gradcheck in float64[\\s\\S]*reentrant",
    ),
    "the old style": (SwishOldStyle, "torch.func can[\\s\\S]*setup_context"),
    "no rule for vmap": (type("NoRule", (swish(),), {"generate_vmap_rule": False}), "torch.func can"),
    "sigmoid as a NumPy copy": (swish(keep=_sigmoid_in_numpy), "no other memory"),
    "vmap over dimension 0 only": (WrongRule, "torch.func can[\\s\\S]*vmap over dimension 1"),
    "x in a global": (swish(keep=_x_in_a_global), "goes away with its node"),
    "x beyond a threshold": (
        swish(value=lambda x: torch.where(x > 20, x, torch.where(x < -20, 0 * x, x * torch.sigmoid(x)))),
        "value is x[\\s\\S]*float64",
    ),
    "slope 1 beyond a threshold": (
        swish(lambda ctx, g: g * torch.where((x := ctx.saved_tensors[0]).abs() > 20, (x > 0).to(x.dtype), _slope(x))),
        "gradient is grad_output[\\s\\S]*float64",
    ),
    "an attribute": (
        swish(lambda ctx, g: g * _slope(ctx.x), keep=lambda ctx, x, y: setattr(ctx, "x", x)),
        "save_for_backward",
    ),
}

# ---------------------------------------------------------------- quantiser


class QuantiseByComparison(Function):
    """setup_context style, the nearest of all levels, a mask by two comparisons."""

    @staticmethod
    def forward(x, levels):
        level = torch.linspace(-1, 1, levels, dtype=torch.float64, device=x.device)
        nearest = (x.detach().double()[..., None] - level).abs().argmin(-1)
        return level[torch.where(x == torch.inf, levels - 1, torch.where(x == -torch.inf, 0, nearest))].to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, _ = inputs
        ctx.save_for_backward((x >= -1) & (x <= 1))

    @staticmethod
    def backward(ctx, g):
        return torch.where(ctx.saved_tensors[0], g, torch.zeros_like(g)), None


class QuantisePacked(Function):
    """An eighth of a byte: eight answers in a uint8."""

    @staticmethod
    def forward(ctx, x, levels):
        inside = (x.abs() <= 1).flatten()
        bits = torch.cat([inside, inside.new_zeros(-len(inside) % 8)]).view(-1, 8)
        ctx.save_for_backward((bits * 2 ** torch.arange(8, device=x.device)).sum(1).to(torch.uint8))
        ctx.shape = x.shape
        half = (levels - 1) / 2
        return ((x.clamp(-1, 1) + 1) * half).round() / half - 1

    @staticmethod
    def backward(ctx, g):
        packed = ctx.saved_tensors[0]
        inside = (packed[:, None] >> torch.arange(8, device=g.device)) & 1
        mask = inside.flatten()[: ctx.shape.numel()].view(ctx.shape).bool()
        return g.masked_fill(~mask, 0), None


def quantiser(
    value=lambda x, k: torch.round((x.clamp(-1, 1) + 1) / 2 * (k - 1)) / (k - 1) * 2 - 1,
    inside=lambda x: x.abs() <= 1,
    backward=lambda ctx, g: torch.where(ctx.saved_tensors[0].bool(), g, 0),
    keep=lambda ctx, mask, x: ctx.save_for_backward(mask),
):
    """A quantiser with the given pieces."""

    class Made(Function):
        @staticmethod
        def forward(ctx, x, levels):
            keep(ctx, inside(x), x)
            return value(x, levels)

    Made.backward = staticmethod(lambda ctx, g: (backward(ctx, g), None))
    return Made


_MASKS = []


def _mask_of_the_last_call(ctx, mask, x):
    ctx.save_for_backward(mask)
    _MASKS[:] = [mask]


def quantiser_index(x, level):
    return (x[..., None] - level.cpu()).abs().argmin(-1)


WRONG_QUANTISE = {
    "a function": (lambda x, levels: x, "autograd Function"),
    "clamps in place": (quantiser(value=lambda x, k: quantiser().apply(x.clamp_(-1, 1), k)), "x stays as it is"),
    "up from a little less than the middle": (
        quantiser(value=lambda x, k: torch.floor((x.clamp(-1, 1) + 1) / 2 * (k - 1) + 0.501) / (k - 1) * 2 - 1),
        "nearest level[\\s\\S]*close to the middle",
    ),
    "rounds down": (
        quantiser(value=lambda x, k: torch.floor((x.clamp(-1, 1) + 1) / 2 * (k - 1)) / (k - 1) * 2 - 1),
        "nearest level",
    ),
    "one level more": (
        quantiser(value=lambda x, k: torch.round((x.clamp(-1, 1) + 1) / 2 * k) / k * 2 - 1),
        "nearest level",
    ),
    "from 0 to 1": (
        quantiser(value=lambda x, k: torch.round((x.clamp(-1, 1) + 1) / 2 * (k - 1)) / (k - 1)),
        "nearest level",
    ),
    "no clamp": (
        quantiser(value=lambda x, k: torch.round((x + 1) / 2 * (k - 1)) / (k - 1) * 2 - 1),
        "nearest level",
    ),
    "middles of equal bins": (
        quantiser(value=lambda x, k: (((x.clamp(-1, 1) + 1) / 2 * k).floor().clamp(max=k - 1) + 0.5) / k * 2 - 1),
        "nearest level",
    ),
    "by the sign": (quantiser(value=lambda x, k: 2 * (x >= 0).to(x.dtype) - 1), "3 levels"),
    "float32": (quantiser(value=lambda x, k: quantiser().apply(x.float(), k)), "dtype and shape"),
    "flattens": (quantiser(value=lambda x, k: quantiser().apply(x, k).reshape(-1)), "dtype and shape"),
    "in float32": (
        quantiser(value=lambda x, k: quantiser().apply(x.float(), k).to(x.dtype)),
        "nearest level[\\s\\S]*(float64|close to the middle)",
    ),
    "levels on the CPU": (
        quantiser(value=lambda x, k: (level := torch.linspace(-1, 1, k).to(x))[quantiser_index(x, level)]),
        "nearest level",
    ),
    "identity": (quantiser(backward=lambda ctx, g: g), "incoming one where"),
    "open interval": (quantiser(inside=lambda x: x.abs() < 1), "incoming one where"),
    "one side": (quantiser(inside=lambda x: x <= 1), "incoming one where"),
    "with room": (quantiser(inside=lambda x: x.abs() <= 1 + 1e-6), "incoming one where"),
    "of x in float32": (
        quantiser(inside=lambda x: x.float().abs() <= 1),
        "incoming one where[\\s\\S]*float64",
    ),
    "all where anything is inside": (quantiser(backward=lambda ctx, g: g * ctx.saved_tensors[0].any()), "incoming"),
    "scaled by the steps": (quantiser(backward=lambda ctx, g: 0.999999 * g * ctx.saved_tensors[0]), "incoming"),
    "no grad_output": (quantiser(backward=lambda ctx, g: ctx.saved_tensors[0].to(g.dtype)), "incoming"),
    "multiplied by the mask": (
        quantiser(backward=lambda ctx, g: g * ctx.saved_tensors[0]),
        "nan[\\s\\S]*an infinite grad_output[\\s\\S]*Hint 2",
    ),
    "mask of the last call": (
        quantiser(backward=lambda ctx, g: g * _MASKS[0], keep=_mask_of_the_last_call),
        "incoming one where",
    ),
    "in place": (
        quantiser(
            backward=lambda ctx, g: (
                g.masked_fill_(~ctx.saved_tensors[0], 0)
                if g.stride() and min(g.stride())
                else g.masked_fill(~ctx.saved_tensors[0], 0)
            )
        ),
        "grad_output stays",
    ),
    "keeps x": (
        quantiser(
            backward=lambda ctx, g: torch.where(ctx.saved_tensors[0].abs() <= 1, g, 0),
            keep=lambda ctx, mask, x: ctx.save_for_backward(x),
        ),
        "one byte[\\s\\S]*256 bytes",
    ),
    "mask as float": (
        quantiser(keep=lambda ctx, mask, x: ctx.save_for_backward(mask.to(x.dtype))),
        "one byte",
    ),
    "mask in a global": (quantiser(keep=_mask_of_the_last_call), "one byte[\\s\\S]*gone"),
    "mask in a list": (
        quantiser(
            backward=lambda ctx, g: torch.where(
                torch.tensor(ctx.mask, dtype=torch.bool, device=g.device).view(g.shape), g, 0
            ),
            keep=lambda ctx, mask, x: setattr(ctx, "mask", [] if mask.is_meta else mask.flatten().tolist()),
        ),
        "one byte|nearest level",
    ),
    "x as an attribute": (
        quantiser(
            backward=lambda ctx, g: torch.where(ctx.x.abs() <= 1, g, 0),
            keep=lambda ctx, mask, x: setattr(ctx, "x", x),
        ),
        "one byte",
    ),
}


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
        for name in self.store:
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


def _swallows_the_rest(self, kind, value, trace):
    PlainRecorder.__exit__(self, kind, value, trace)
    return kind is not None and not issubclass(kind, Exception)


def _forgets_on_error(self, kind, value, trace):
    PlainRecorder.__exit__(self, kind, value, trace)
    if kind is not None:
        self.activations = {}


def _registers_while_looking(self):
    self.activations = {name: [] for name in self.names}
    for name in self.activations:
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


def _a_hook_for_each_given(self):
    chosen = self.find()
    self.activations = {name: [] for name in chosen}
    for name in self.names:
        self.handles.append(chosen[name].register_forward_hook(self.make(self.activations[name])))
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


def _first_that(self, fits):
    modules = dict(self.model.named_modules(remove_duplicate=False))
    found = {name: [module for key, module in modules.items() if fits(key, name)] for name in self.names}
    for name, some in found.items():
        if not some:
            raise KeyError(name)
    return {name: some[0] for name, some in found.items()}


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


class Reseeds(PlainRecorder):
    def __enter__(self):
        torch.manual_seed(0)
        return super().__enter__()


class DrawsARandomNumber(PlainRecorder):
    def __exit__(self, *exception):
        torch.rand(1)
        return super().__exit__(*exception)


WRONG_RECORDER = {
    "reseeds": (Reseeds, "computes and learns[\\s\\S]*random numbers"),
    "draws a random number": (DrawsARandomNumber, "computes and learns[\\s\\S]*random numbers"),
    "enter returns None": (
        recorder(__enter__=lambda self: PlainRecorder.__enter__(self) and None),
        "gives the recorder",
    ),
    "no entry for what wasn't called": (recorder(__enter__=_only_called), "has the names asked for"),
    "late binding": (recorder(__enter__=_late_binding), "calls of[\\s\\S]*Hint 4"),
    "the last call only": (recorder(__enter__=_last_only), "calls of 'block"),
    "twice for a name given twice": (recorder(__enter__=_a_hook_for_each_given), "'b' of \\['b', 'a', 'b'\\]"),
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
    "swallows what is no Exception": (recorder(__exit__=_swallows_the_rest), "block's GeneratorExit"),
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
    "the first name with that start": (
        recorder(find=lambda self: _first_that(self, str.startswith)),
        "'a' of a model",
    ),
    "the first name with that end": (recorder(find=lambda self: _first_that(self, str.endswith)), "'b' of a model"),
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

# ---------------------------------------------------------------- image norms


def norms_by_tensor_hooks(model, x, y):
    """A forward hook that hooks the output's gradient; the gradient matrices themselves."""
    found, handles = [], []

    def watch(layer, args, output):
        def arrived(delta):
            found.append(torch.einsum("no,ni->noi", delta, args[0].detach()).flatten(1))
            if layer.bias is not None:
                found.append(delta.detach().clone())

        output.register_hook(arrived)

    for module in model.modules():
        if type(module) is nn.Linear:
            handles.append(module.register_forward_hook(watch))
    try:
        total = F.cross_entropy(model(x), y, reduction="none").sum()
        torch.autograd.grad(total, [p for p in model.parameters() if p.requires_grad])
        return torch.cat(found, dim=1).norm(dim=1)
    finally:
        [handle.remove() for handle in handles]


def norms_with_backward(model, x, y):
    """loss.backward(), and the old gradients put back; inputs kept by a pre-hook, deltas by a full hook."""
    seen, deltas, old = {}, {}, {p: p.grad for p in model.parameters()}
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                stack.callback(module.register_forward_pre_hook(lambda m, args: seen.update({m: args[0]})).remove)
                hook = module.register_full_backward_hook(lambda m, gi, go: deltas.update({m: go[0]}))
                stack.callback(hook.remove)
        x = x.detach().clone().requires_grad_()
        for p in old:
            p.grad = None
        try:
            (F.cross_entropy(model(x), y) * len(x)).backward()
        finally:
            for p, grad in old.items():
                p.grad = grad
    with torch.no_grad():
        squares = [deltas[m].pow(2).sum(1) * (seen[m].pow(2).sum(1) + (m.bias is not None)) for m in seen]
        return sum(squares) ** 0.5


def norms(
    reduction="sum",
    bias=True,
    power=0.5,
    combine=lambda delta, x: delta.square().sum(1) * x.square().sum(1),
    backward=None,
    cleanup="finally",
    swallow=False,
    graph=False,
    calls=1,
    layers=lambda model: [m for m in model.modules() if isinstance(m, nn.Linear)],
):
    """image_norms with chosen faults."""

    def find(model, x, y):
        inputs, squares, handles = {}, [], []

        def backward_hook(layer, grad_output):
            squares.append(combine(grad_output[0], inputs[layer]))
            if layer.bias is not None and bias:
                squares.append(grad_output[0].square().sum(1))

        for layer in layers(model):
            handles.append(layer.register_forward_hook(lambda m, args, out: inputs.update({m: args[0].detach()})))
            handles.append(layer.register_full_backward_pre_hook(backward_hook))

        def remove():
            for handle in handles if cleanup != "first" else handles[:1]:
                handle.remove()
            if cleanup == "everybody's":
                for module in model.modules():
                    module._forward_hooks.clear()
                    module._backward_hooks.clear()

        try:
            for _ in range(calls):
                scores = model(x)
            loss = F.cross_entropy(scores, y, reduction=reduction)
            (backward or (lambda model, loss: torch.autograd.grad(loss, list(model.parameters()))))(model, loss)
        except Exception:
            if cleanup != "no finally":
                remove()
            if not swallow:
                raise
            return torch.zeros(len(x))
        if cleanup is not None:
            remove()
        total = sum(squares) ** power
        return total + 0 * next(model.parameters()).sum() if graph else total

    return find


def one_by_one(model, x, y):
    found = []
    for a, b in zip(x.split(1), y.split(1), strict=True):
        grads = torch.autograd.grad(F.cross_entropy(model(a), b), list(model.parameters()))
        found.append(sum(g.square().sum() for g in grads).sqrt())
    return torch.stack(found)


def one_forward_many_backwards(model, x, y):
    found = []
    for loss in F.cross_entropy(model(x), y, reduction="none"):
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        found.append(sum(g.square().sum() for g in grads).sqrt())
    return torch.stack(found)


def _further_backwards(model, x, y):
    """One backward for the deltas; then one for each image and layer, from the layer's own output."""
    outputs, handles = {}, []
    for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
        handles.append(layer.register_forward_hook(lambda m, args, out: outputs.update({m: out})))
    try:
        loss = F.cross_entropy(model(x), y, reduction="sum")
        deltas = torch.autograd.grad(loss, list(outputs.values()), retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    squares = torch.zeros(len(x), dtype=x.dtype)
    for (layer, out), delta in zip(outputs.items(), deltas, strict=True):
        for i in range(len(x)):
            grads = torch.autograd.grad(out[i], list(layer.parameters()), delta[i], retain_graph=True)
            squares[i] += sum(g.square().sum() for g in grads)
    return squares.sqrt()


def _batched_gradients(model, x, y):
    losses, rows = F.cross_entropy(model(x), y, reduction="none"), torch.eye(len(x), dtype=x.dtype)
    grads = torch.autograd.grad(losses, list(model.parameters()), rows, is_grads_batched=True)
    return torch.cat([g.flatten(1) for g in grads], dim=1).norm(dim=1)


def _vmap_of_grad(model, x, y):
    def loss(parameters, one, label):
        return F.cross_entropy(torch.func.functional_call(model, parameters, (one[None],)), label[None])

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x.detach(), y)
    return torch.cat([g.flatten(1) for g in grads.values()], dim=1).norm(dim=1)


def _zero_then_backward(model, loss):
    loss.backward()
    model.zero_grad()


def norms_in_zeros(then=lambda total, x: total):
    """Added up in `torch.zeros(len(x))`, which is float32 whatever the model is; `then` makes the result of it."""

    def find(model, x, y):
        total = torch.zeros(len(x))
        inputs, handles = {}, []

        def backward_hook(layer, grad_output):
            factor = inputs[layer].square().sum(1) + (layer.bias is not None)
            total.add_(grad_output[0].square().sum(1) * factor)

        for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
            handles.append(layer.register_forward_hook(lambda m, args, out: inputs.update({m: args[0].detach()})))
            handles.append(layer.register_full_backward_pre_hook(backward_hook))
        try:
            torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), list(model.parameters()))
        finally:
            for handle in handles:
                handle.remove()
        return then(total.sqrt(), x)

    return find


def _raises_its_own(model, x, y):
    try:
        return norms()(model, x, y)
    except Exception as error:
        raise RuntimeError("model or loss failed") from error


def _loses_gradients(model, x, y):
    old = [p.grad for p in model.parameters()]
    model.zero_grad()
    found = norms()(model, x, y)
    for p, grad in zip(model.parameters(), old, strict=True):
        p.grad = grad
    return found


def _eval_and_the_models_mode(model, x, y):
    """Every module gets the mode of the whole model."""
    was = model.training
    model.eval()
    try:
        return norms()(model, x, y)
    finally:
        model.train(was)


def _modes_lost_on_an_error(model, x, y):
    modes = {module: module.training for module in model.modules()}
    model.eval()
    found = norms()(model, x, y)
    for module, mode in modes.items():
        module.training = mode
    return found


WRONG_NORMS = {
    "of the mean loss": (norms(reduction="mean"), "own gradient[\\s\\S]*loss whole"),
    "added up in float32": (norms_in_zeros(), "dtype torch.float64[\\s\\S]*in which dtype"),
    "added up in float32 and cast back": (norms_in_zeros(lambda total, x: total.to(x.dtype)), "in which dtype"),
    "without biases": (norms(bias=False), "own gradient"),
    "without the root": (norms(power=1), "own gradient"),
    "no inputs": (norms(combine=lambda delta, x: delta.square().sum(1)), "own gradient"),
    "norms added": (norms(power=1, combine=lambda delta, x: delta.norm(dim=1) * x.norm(dim=1)), "own gradient"),
    "inputs of all images": (norms(combine=lambda delta, x: delta.square().sum(1) * x.square().sum()), "own gradient"),
    "last layer only": (
        norms(layers=lambda model: [m for m in model.modules() if isinstance(m, nn.Linear)][-1:]),
        "own gradient",
    ),
    "top level only": (
        norms(
            layers=lambda m: [m] if isinstance(m, nn.Linear) else [c for c in m.children() if isinstance(c, nn.Linear)]
        ),
        "own gradient",
    ),
    "layers with a bias only": (
        norms(layers=lambda model: [m for m in model.modules() if isinstance(m, nn.Linear) and m.bias is not None]),
        "own gradient",
    ),
    "one number": (lambda model, x, y: one_by_one(model, x, y).norm(), "own gradient"),
    "with a graph": (norms(graph=True), "is detached"),
    "one by one": (one_by_one, "calls the model once"),
    "the model twice": (norms(calls=2), "calls the model once"),
    "many backwards": (one_forward_many_backwards, "runs one backward"),
    "a backward for each layer": (_further_backwards, "runs one backward"),
    "a batch of gradients": (_batched_gradients, "one for each of many losses at once"),
    "vmap of grad": (_vmap_of_grad, "one for each of many losses at once"),
    "backward": (norms(backward=lambda model, loss: loss.backward()), "grad is what it was"),
    "backward and zero_grad": (norms(backward=_zero_then_backward), "grad is what it was"),
    "hooks stay": (norms(cleanup=None), "hooks are gone"),
    "removes the first": (norms(cleanup="first"), "hooks are gone|own gradient"),
    "no finally": (norms(cleanup="no finally"), "after an exception"),
    "everybody's hooks": (norms(cleanup="everybody's"), "hooks are gone"),
    "swallows the exception": (norms(swallow=True), "an exception goes on"),
    "another exception": (_raises_its_own, "an exception goes on"),
    "in evaluation mode for good": (lambda model, x, y: norms()(model.eval(), x, y), "modes are what they were"),
    "the model's mode for all": (_eval_and_the_models_mode, "modes are what they were[\\s\\S]*a call"),
    "modes lost on an error": (_modes_lost_on_an_error, "modes are what they were[\\s\\S]*exception of the loss"),
    "x requires a gradient": (
        lambda model, x, y: norms()(model, x.requires_grad_(), y),
        "x and the[\\s\\S]*requires_grad",
    ),
    "loses gradients on an error": (_loses_gradients, "grad is what it was[\\s\\S]*exception"),
}


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


def _trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def step(drop="none", undo="own", used="own", chosen=_trained):
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


def _clamp(p):
    p.grad.clamp_(-1e3, 1e3)


def clips_huge_ones(model, make):
    """The clip comes before the step and acts far out only."""
    kept = [p.register_post_accumulate_grad_hook(_clamp) for p in _trained(model)]
    undo = step()(model, make)
    return lambda: [undo(), *(handle.remove() for handle in kept)]


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
    "a huge gradient clipped": (clips_huge_ones, "bit for bit"),
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


ANSWERS, STUBS = answers("15-01"), answers("15-01", edit=student_source)
IDLE = idle("15-01")
CHECKS = {
    "nodes_that_run": check.nodes_that_run,
    "Swish": check.swish,
    "Quantise": check.quantise,
    "ActivationRecorder": check.activation_recorder,
    "image_norms": check.image_norms,
    "step_in_backward": check.step_in_backward,
}
RIGHT = {
    "nodes_that_run": [runs_from_above, runs_to_a_fixpoint],
    "Swish": [SwishByExp, SwishByLogarithms, SwishByAutograd],
    "Quantise": [QuantiseByComparison, QuantisePacked],
    "ActivationRecorder": [PlainRecorder, GlobalRecorder, StackRecorder],
    "image_norms": [norms_by_tensor_hooks, norms_with_backward, norms()],
    "step_in_backward": [step_by_id, one_optimizer_for_all, step_lazily],
}
WRONG = {
    "nodes_that_run": WRONG_RUNS,
    "Swish": WRONG_SWISH,
    "Quantise": WRONG_QUANTISE,
    "ActivationRecorder": WRONG_RECORDER,
    "image_norms": WRONG_NORMS,
    "step_in_backward": WRONG_STEP,
}


class TestChecks(CheckProtocol):
    TOPIC = "15-01"
    IDLE = IDLE
    CHECKS, ANSWERS, STUBS = CHECKS, ANSWERS, STUBS
    RIGHT, WRONG = RIGHT, WRONG

    def hold_stand_in(self, name, stand_in):
        x = torch.randn(4)
        if name == "Swish":
            assert torch.equal(stand_in.apply(x), F.silu(x))
        elif name == "Quantise":
            torch.testing.assert_close(stand_in.apply(x, 5), ANSWERS["Quantise"].apply(x, 5))
        elif name == "image_norms":
            net, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch 2.11 says of the answer's hook that x needs no gradient
                torch.testing.assert_close(stand_in(net, x, y), ANSWERS["image_norms"](net, x, y))
        elif name in ("ActivationRecorder", "step_in_backward"):
            assert CHECKS[name].run(stand_in).status == "passed"
