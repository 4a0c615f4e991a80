"""The checks of 15-01 accept right answers, however written, and reject what a student might really write."""

import contextlib
import warnings
from functools import partial

import torch
import torch.nn.functional as F
from answer_variants import variants
from check_protocol import CheckProtocol, idle
from torch import nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from course.exercise_form import student_source
from course.lesson_code import answers, definitions
from shared.checks import topic_15_01 as check

GIVEN = definitions("15-01")
ANSWERS, STUBS = answers("15-01"), answers("15-01", edit=student_source)
IDLE = idle("15-01")
NAMES = {
    "runs": "nodes_that_run",
    "swish": "Swish",
    "quantise": "Quantise",
    "recorder": "ActivationRecorder",
    "norms": "image_norms",
    "fused": "step_in_backward",
}
variant = variants("15-01", NAMES, GIVEN)

# ---------------------------------------------------------------- which nodes run


def runs_from_above(loss, inputs):
    """Nodes in the order of a depth-first walk that needs no recursion, then from the last to the first."""
    targets = {get_gradient_edge(t).node for t in inputs}
    order, seen, stack = [], set(), [(loss.grad_fn, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(target, False) for target, _ in node.next_functions]
    found = set()
    for node in order:
        if any(target in found or target in targets for target, _ in node.next_functions):
            found.add(node)
    return found


def runs_to_a_fixpoint(loss, inputs):
    """All edges, and a list that grows."""
    nodes, edges = [loss.grad_fn], {}
    for node in nodes:
        for target, _ in node.next_functions:
            if target not in edges and target is not None:
                nodes.append(target)
            edges.setdefault(target, set()).add(node)
    out, todo = set(), [t.grad_fn or get_gradient_edge(t).node for t in inputs]
    while todo:
        new = edges.get(todo.pop(), set()) - out
        out |= new
        todo += new
    return frozenset(out)


def runs_recursive(loss, inputs):
    targets, memo = {get_gradient_edge(t).node for t in inputs}, {}

    def leads(node):
        if node not in memo:
            found = [leads(target) or target in targets for target, _ in node.next_functions if target is not None]
            memo[node] = any(found)
        return memo[node]

    leads(loss.grad_fn)
    return {node for node, does in memo.items() if does}


runs = partial(variant, "runs")
_ALL = "    return runs\n"
_STEP = "            if node not in runs:\n"
WRONG_RUNS = {
    "a list": (runs((_ALL, "    return list(runs)\n")), "returns a set"),
    "the whole graph": (runs((_ALL, "    return set(fed_by)\n")), "too many"),
    "the loss alone": (lambda loss, inputs: {loss.grad_fn}, "not found"),
    "the first input only": (runs(("for t in inputs]", "for t in inputs[:1]]")), "not found"),
    "by running": (
        runs((_ALL, "    torch.autograd.grad(loss, inputs, retain_graph=True)\n    return runs\n")),
        "no node is run",
    ),
    "recursion": (runs_recursive, "long chains[\\s\\S]*Hint 2"),
    "every path": (runs((_STEP, "            if True:\n")), "doublings"),
}

# ---------------------------------------------------------------- Swish


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


class SwishByLogarithms(SwishByExp):
    """log σ, in-place on its own results, needs_input_grad."""

    @staticmethod
    def forward(x):
        return F.logsigmoid(x).exp_().mul_(x)

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0]
        sigmoid, other = F.logsigmoid(x).exp(), F.logsigmoid(-x).exp()
        return g * (sigmoid + x * sigmoid * other) if ctx.needs_input_grad[0] else None


swish = partial(variant, "swish")
_VALUE = "return x * torch.sigmoid(x)"
_SAVE = "ctx.save_for_backward(*inputs)"
_BACK = "return grad_output * sigmoid * (1 + x * (1 - sigmoid))"
_SIGMOID = "        sigmoid = torch.sigmoid(x)\n"
_UNPACK = "(x,) = ctx.saved_tensors"
WRONG_SWISH = {
    "a function": (F.silu, "derived from Function"),
    "value overflows": (swish((_VALUE, "return x * torch.exp(x) / (1 + torch.exp(x))")), "value is x[\\s\\S]*Hint 3"),
    "value cut off": (
        swish((_VALUE, "return torch.where(x > 20, x, torch.where(x < -20, 0 * x, x * torch.sigmoid(x)))")),
        "value is x[\\s\\S]*float64",
    ),
    "in place": (swish((_VALUE, "return x.mul_(torch.sigmoid(x)).clone()")), "x stays as it is"),
    "no grad_output": (swish((_BACK, _BACK.replace("grad_output * ", ""))), "contract of backward"),
    "gradient in float32": (
        swish((_UNPACK, "x = ctx.saved_tensors[0].float()")),
        "gradient is grad_output[\\s\\S]*float64",
    ),
    "slope cut off": (
        swish(
            (_BACK, "return grad_output * torch.where(x.abs() > 20, (x > 0) * 1.0, sigmoid * (1 + x * (1 - sigmoid)))")
        ),
        "gradient is grad_output[\\s\\S]*float64",
    ),
    "x of the last call": (
        swish((_SAVE, f"{_SAVE}\n        Swish.x = inputs[0]"), (_UNPACK, "x = Swish.x")),
        "gradient is grad_output",
    ),
    "writes into grad_output": (
        swish((_BACK, _BACK.replace("grad_output * sigmoid", "grad_output.mul_(sigmoid)"))),
        "grad_output stays as it is",
    ),
    "gradient without a graph": (
        swish((_UNPACK, "x = ctx.saved_tensors[0].detach()")),
        "gradgradcheck accept",
    ),
    "sigmoid from forward": (
        swish(
            (_SAVE, "ctx.save_for_backward(*inputs, torch.sigmoid(inputs[0]))"),
            (_UNPACK, "(x, sigmoid) = ctx.saved_tensors"),
            (_SIGMOID, ""),
        ),
        "gradgradcheck[\\s\\S]*Hint 2",
    ),
    "saves the output too": (
        swish((_SAVE, "ctx.save_for_backward(*inputs, output)"), (_UNPACK, "(x, _) = ctx.saved_tensors")),
        "nothing else",
    ),
    "no rule for vmap": (swish(("generate_vmap_rule = True", "generate_vmap_rule = False")), "torch.func can"),
    "an attribute": (swish((_SAVE, "ctx.x = inputs[0]"), (_UNPACK, "x = ctx.x")), "save_for_backward notices"),
}

# ---------------------------------------------------------------- quantiser


class QuantiseByComparison(Function):
    """setup_context style, the nearest of all levels, a mask by two comparisons."""

    @staticmethod
    def forward(x, levels):
        level = torch.linspace(-1, 1, levels, dtype=torch.float64, device=x.device)
        nearest = (x.detach().clamp(-1, 1).double()[..., None] - level).abs().argmin(-1)
        return level[nearest].to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, _ = inputs
        ctx.save_for_backward((x >= -1) & (x <= 1))

    @staticmethod
    def backward(ctx, g):
        return torch.where(ctx.saved_tensors[0], g, torch.zeros_like(g)), None


class QuantiseMasked(QuantiseByComparison):
    """Half a step for each level, and what is outside is filled with zeros."""

    @staticmethod
    def forward(x, levels):
        half = (levels - 1) / 2
        return ((x.clamp(-1, 1) + 1) * half).round() / half - 1

    @staticmethod
    def backward(ctx, g):
        return g.masked_fill(~ctx.saved_tensors[0], 0), None


quantise = partial(variant, "quantise")
_ROUND = "torch.round((x.clamp(-1, 1) + 1) / 2 * steps)"
_INSIDE = "ctx.save_for_backward(x.abs() <= 1)"
_WHERE = "torch.where(inside, grad_output, 0)"
WRONG_QUANTISE = {
    "a function": (lambda x, levels: x, "derived from Function"),
    "clamps in place": (quantise(("x.clamp(-1, 1)", "x.clamp_(-1, 1)")), "x stays as it is"),
    "rounds down": (quantise((_ROUND, _ROUND.replace("round", "floor"))), "nearest level"),
    "in float32": (
        quantise(
            ("x.clamp(-1, 1)", "x.float().clamp(-1, 1)"),
            ("* 2 - 1\n", "* 2 - 1).to(x.dtype)\n"),
            ("return n", "return (n"),
        ),
        "nearest level[\\s\\S]*float64",
    ),
    "levels on the CPU": (
        quantise((_ROUND, "torch.linspace(0, steps, levels).to(x.dtype)[" + _ROUND + ".long().cpu()]")),
        "nearest level[\\s\\S]*meta",
    ),
    "identity": (quantise((_WHERE, "grad_output")), "gradient is grad_output where"),
    "open interval": (quantise(("x.abs() <= 1", "x.abs() < 1")), "gradient is grad_output where"),
    "multiplied by the mask": (quantise((_WHERE, "grad_output * inside")), "nan[\\s\\S]*an infinite grad_output"),
    "writes into grad_output": (
        quantise((_WHERE, "grad_output.masked_fill_(~inside, 0)")),
        "grad_output stays",
    ),
    "keeps x": (
        quantise((_INSIDE, "ctx.save_for_backward(x)"), ("torch.where(inside", "torch.where(inside.abs() <= 1")),
        "one byte[\\s\\S]*256 bytes",
    ),
}

# ---------------------------------------------------------------- activation recorder


class PlainRecorder:
    """One hook for each list, copies into new tensors."""

    def __init__(self, model, names):
        self.model, self.names, self.handles, self.activations = model, list(names), [], {}

    def __enter__(self):
        modules = dict(self.model.named_modules())
        self.chosen = {name: modules[name] for name in self.names}
        self.activations = {name: [] for name in self.chosen}
        self.register()
        return self

    def register(self):
        for name, module in self.chosen.items():
            self.handles += [module.register_forward_hook(self.make(self.activations[name]))]

    def make(self, store):
        def hook(module, args, output):
            with torch.no_grad():
                store.append(torch.empty_like(output, device="cpu").copy_(output))

        return hook

    def __exit__(self, kind, value, trace):
        while self.handles:
            self.handles.pop().remove()
        return False


class GlobalRecorder(PlainRecorder):
    """One hook on all modules of the process."""

    def register(self):
        self.handles.append(nn.modules.module.register_module_forward_hook(self.note))

    def note(self, module, args, output):
        for name, chosen in self.chosen.items():
            if chosen is module:
                self.activations[name].append(output.detach().to("cpu", copy=True))


recorder = partial(variant, "recorder")
_HOOK = "                self.activations[name].append(output.detach().clone().cpu())\n"
_EXIT = "        for handle in self.handles:\n            handle.remove()\n"
_FRESH = "self.activations = {name: [] for name in self.names}"
_LOOK = "        for name in self.names:\n            if name not in modules:\n"
WRONG_RECORDER = {
    "enter returns None": (recorder(("        return self\n", "")), "gives the recorder"),
    "late binding": (recorder((", name: str = name", "")), "each name has a list[\\s\\S]*Hint 4"),
    "the last call only": (
        recorder((_HOOK, _HOOK.replace(".append(output", " = [output").replace("cpu())", "cpu()]"))),
        "each name has a list",
    ),
    "shares memory": (recorder((".clone()", "")), "as it was then[\\s\\S]*Hint 2"),
    "not detached": (recorder((".detach()", "")), "are detached"),
    "hooks stay": (recorder((_EXIT, "")), "hooks are gone"),
    "hooks stay after an exception": (
        recorder((_EXIT, "        if exception[0] is not None:\n            return\n" + _EXIT)),
        "hooks are gone[\\s\\S]*ValueError",
    ),
    "clears everybody's hooks": (
        recorder((_EXIT, "        for module in self.model.modules():\n            module._forward_hooks.clear()\n")),
        "hooks are gone[\\s\\S]*Hint 3",
    ),
    "swallows the exception": (
        recorder(("        self.handles.clear()\n", "        self.handles.clear()\n        return True\n")),
        "an exception goes on",
    ),
    "keeps old recordings": (
        recorder((_FRESH, "self.activations = self.activations or {name: [] for name in self.names}")),
        "starts afresh",
    ),
    "skips an unknown name": (
        recorder((_LOOK, "        self.names = [name for name in self.names if name in modules]\n" + _LOOK)),
        "unknown name raises KeyError",
    ),
    "registers while looking": (
        recorder(
            (
                _LOOK,
                "        self.handles.append(modules[self.names[0]].register_forward_hook(lambda *_: None))\n" + _LOOK,
            )
        ),
        "after entering with the name",
    ),
    "never to the CPU": (recorder((".cpu()", "")), "on the CPU"),
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
        model.zero_grad()
        try:
            (F.cross_entropy(model(x.clone().requires_grad_()), y) * len(x)).backward()
        finally:
            for p, grad in old.items():
                p.grad = grad
    squares = [deltas[m].pow(2).sum(1) * (seen[m].pow(2).sum(1) + (m.bias is not None)) for m in seen]
    return sum(squares).detach() ** 0.5


def many_backwards(model, x, y):
    found = []
    for loss in F.cross_entropy(model(x), y, reduction="none"):
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        found.append(sum(g.square().sum() for g in grads).sqrt())
    return torch.stack(found)


norms = partial(variant, "norms")
_RETURN = "torch.stack(squares).sum(dim=0).sqrt()"
_GRAD = "torch.autograd.grad(loss, list(model.parameters()))"
_FINALLY = "    finally:\n        for handle in handles:\n            handle.remove()\n"
WRONG_NORMS = {
    "always float64": (norms((_RETURN, _RETURN + ".double()")), "dtype of x"),
    "added up in float32 and cast back": (
        norms((_RETURN, "torch.stack(squares).float().sum(dim=0).sqrt().to(x.dtype)")),
        "own gradient[\\s\\S]*in which dtype",
    ),
    "of the mean loss": (norms((', reduction="sum"', "")), "own gradient[\\s\\S]*loss whole"),
    "without biases": (norms(("layer.bias is not None", "False")), "own gradient"),
    "with a graph": (norms((_RETURN, _RETURN + " + 0 * loss")), "False in entry 'graph'"),
    "the model twice": (norms(("        loss =", "        model(x)\n        loss =")), "calls the model once"),
    "many backwards": (many_backwards, "runs one backward"),
    "backward": (norms((_GRAD, "loss.backward()")), ".grad is what it was"),
    "hooks stay": (norms((_FINALLY, "    finally:\n        pass\n")), "hooks are gone"),
    "no finally": (
        norms((_FINALLY, "        for handle in handles:\n            handle.remove()\n    finally:\n        pass\n")),
        "after an error of the loss",
    ),
    "swallows the exception": (
        norms((_FINALLY, "    except Exception:\n        return torch.zeros(len(x))\n" + _FINALLY)),
        "an exception goes on",
    ),
}

# ---------------------------------------------------------------- optimizer in backward


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


def one_optimizer_for_all(model, make):
    """Stepped again and again it sees the one gradient that is there, and old ones."""
    optimizer = make([p for p in model.parameters() if p.requires_grad])

    def hook(p):
        optimizer.step()
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


step = partial(variant, "fused")
_OWN = "optimizers[param].step()"
_DROP = "        param.grad = None\n"
_REGISTER = "[param.register_post_accumulate_grad_hook(step) for param in optimizers]"
_UNDO = "        for handle in handles:\n            handle.remove()\n"
step_by_id = step(
    ("optimizers[p] =", "optimizers[id(p)] ="),
    (_OWN, "optimizers[id(param)].step()"),
    (_DROP, "        optimizers[id(param)].zero_grad(set_to_none=True)\n"),
    (_REGISTER, "[p.register_post_accumulate_grad_hook(step) for p in model.parameters() if p.requires_grad]"),
)
WRONG_STEP = {
    "gradients of zeros": (step((_DROP, "        param.grad.zero_()\n")), "gradient dropped"),
    "gradients kept": (step((_DROP, "")), "gradient dropped"),
    "all at the end": (all_at_the_end, "gradient dropped"),
    "the loop's last optimizer": (
        step((_OWN, "optimizers[p].step()")),
        "updated and its gradient dropped[\\s\\S]*Hint 2",
    ),
    "weights without biases": (step(("if p.requires_grad", "if p.requires_grad and p.dim() > 1")), "gradient dropped"),
    "a new optimizer each time": (step((_OWN, "make_optimizer([param]).step()")), "usual loop[\\s\\S]*Hint 1"),
    "an old gradient stepped": (one_optimizer_for_all, "doesn't reach"),
    "undoes the first": (step(("for handle in handles:", "for handle in handles[:1]:")), "undoing"),
    "undoes everybody's": (
        step(
            (_UNDO, "        for p in model.parameters():\n            (p._post_accumulate_grad_hooks or {}).clear()\n")
        ),
        "undoing",
    ),
    "nothing returned": (step(("    return undo\n", "")), "returns a function"),
}

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
    "Swish": [SwishByExp, SwishByLogarithms],
    "Quantise": [QuantiseByComparison, QuantiseMasked],
    "ActivationRecorder": [PlainRecorder, GlobalRecorder],
    "image_norms": [norms_by_tensor_hooks, norms_with_backward],
    "step_in_backward": [step_by_id, step_lazily],
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
        if name == "nodes_that_run":
            assert len(stand_in(torch.tanh(x.requires_grad_()).sum(), [x])) == 2
        elif name == "Swish":
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
