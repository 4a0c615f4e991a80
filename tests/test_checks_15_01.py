"""The checks of 15-01 accept right answers, however written, and reject what a student might really write."""

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

ANSWERS = answers("15-01")
NAMES = {
    "runs": "nodes_that_run",
    "swish": "Swish",
    "quantise": "Quantise",
    "recorder": "ActivationRecorder",
    "norms": "image_norms",
    "fused": "step_in_backward",
}
variant = variants("15-01", NAMES, definitions("15-01"))
RIGHT, WRONG = {}, {}

# ---------------------------------------------------------------- which nodes run


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
    return out


def runs_recursive(loss, inputs):
    targets, memo = {get_gradient_edge(t).node for t in inputs}, {}

    def leads(node):
        if node not in memo:
            found = [leads(target) or target in targets for target, _ in node.next_functions if target is not None]
            memo[node] = any(found)
        return memo[node]

    leads(loss.grad_fn)
    return {node for node, does in memo.items() if does}


def runs(old, new):
    return variant("runs", (old, new))


_ALL = "    return runs\n"
RIGHT["nodes_that_run"] = [runs_to_a_fixpoint, runs(_ALL, "    return frozenset(runs)\n")]
WRONG["nodes_that_run"] = {
    "a list": (runs(_ALL, "    return list(runs)\n"), "returns a set"),
    "the whole graph": (runs(_ALL, "    return set(fed_by)\n"), "too many"),
    "the first input only": (runs("for t in inputs]", "for t in inputs[:1]]"), "not found"),
    "by running": (
        runs(_ALL, "    torch.autograd.grad(loss, inputs, retain_graph=True)\n    return runs\n"),
        "no node is run",
    ),
    "recursion": (runs_recursive, "long chains[\\s\\S]*Hint 2"),
    "every path": (runs("            if node not in runs:\n", "            if True:\n"), "doublings"),
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


def swish(*changes):
    return variant("swish", *changes)


_VALUE = "return x * torch.sigmoid(x)"
_SAVE = "ctx.save_for_backward(*inputs)"
_SAVE_MORE = "ctx.save_for_backward(*inputs, torch.sigmoid(inputs[0]))"
_BACK = "return grad_output * sigmoid"
_SIGMOID = "        sigmoid = torch.sigmoid(x)\n"
_UNPACK = "(x,) = ctx.saved_tensors"
RIGHT["Swish"] = [SwishByExp, swish((_VALUE, "return F.logsigmoid(x).exp_().mul_(x)"))]
WRONG["Swish"] = {
    "a function": (F.silu, "derived from Function"),
    "value overflows": (swish((_VALUE, "return x * torch.exp(x) / (1 + torch.exp(x))")), "value is x[\\s\\S]*Hint 3"),
    "value in float32": (swish((_VALUE, "return F.silu(x.float()).to(x.dtype)")), "value is x[\\s\\S]*float64"),
    "in place": (swish((_VALUE, "return x.mul_(torch.sigmoid(x)).clone()")), "x stays as it is"),
    "no grad_output": (swish((_BACK, "return sigmoid")), "contract of backward"),
    "gradient in float32": (swish((_UNPACK, "x = ctx.saved_tensors[0].float()")), "grad_output · f'[\\s\\S]*float64"),
    "slope cut off": (
        swish((_SIGMOID, "        sigmoid = torch.where(x < -20, 0, torch.sigmoid(x))\n")),
        "gradient is grad_output[\\s\\S]*float64",
    ),
    "x of the last call": (
        swish((_SAVE, f"{_SAVE}\n        Swish.x = inputs[0]"), (_UNPACK, "x = Swish.x")),
        "gradient is grad_output",
    ),
    "writes into grad_output": (swish((_BACK, "return grad_output.mul_(sigmoid)")), "grad_output stays as it is"),
    "gradient without a graph": (swish((_UNPACK, "x = ctx.saved_tensors[0].detach()")), "gradgradcheck accept"),
    "sigmoid from forward": (
        swish((_SAVE, _SAVE_MORE), (_UNPACK, "(x, sigmoid) = ctx.saved_tensors"), (_SIGMOID, "")),
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


def quantise(*changes):
    return variant("quantise", *changes)


_ROUND = "torch.round((x.clamp(-1, 1) + 1) / 2 * steps)"
_WHERE = "torch.where(inside, grad_output, 0)"
RIGHT["Quantise"] = [QuantiseByComparison, quantise((_WHERE, "grad_output.masked_fill(~inside, 0)"))]
WRONG["Quantise"] = {
    "clamps in place": (quantise(("x.clamp(-1, 1)", "x.clamp_(-1, 1)")), "x stays as it is"),
    "rounds down": (quantise(("torch.round", "torch.floor")), "nearest level"),
    "always float32": (quantise(("x.clamp(-1, 1)", "x.float().clamp(-1, 1)")), "nearest level[\\s\\S]*float64"),
    "levels on the CPU": (
        quantise((_ROUND, f"torch.linspace(0, steps, levels).to(x.dtype)[{_ROUND}.long().cpu()]")),
        "nearest level[\\s\\S]*meta",
    ),
    "identity": (quantise((_WHERE, "grad_output")), "gradient is grad_output where"),
    "open interval": (quantise(("x.abs() <= 1", "x.abs() < 1")), "gradient is grad_output where"),
    "multiplied by the mask": (quantise((_WHERE, "grad_output * inside")), "nan[\\s\\S]*an infinite grad_output"),
    "writes into grad_output": (quantise((_WHERE, "grad_output.masked_fill_(~inside, 0)")), "grad_output stays"),
    "keeps x": (
        quantise(("(x.abs() <= 1)", "(x)"), ("torch.where(inside", "torch.where(inside.abs() <= 1")),
        "one byte[\\s\\S]*256 bytes",
    ),
}

# ---------------------------------------------------------------- activation recorder


class OneHookForAll:
    """One hook on all modules of the process."""

    def __init__(self, model, names):
        self.model, self.names = model, names

    def __enter__(self):
        modules = dict(self.model.named_modules())
        self.chosen = {modules[name]: name for name in self.names}
        self.activations = {name: [] for name in self.names}
        self.handle = nn.modules.module.register_module_forward_hook(self.note)
        return self

    def note(self, module, args, output):
        if module in self.chosen:
            self.activations[self.chosen[module]].append(output.detach().to("cpu", copy=True))

    def __exit__(self, kind, value, trace):
        self.handle.remove()
        return False


def recorder(old, new):
    return variant("recorder", (old, new))


_EXIT = "        for handle in self.handles:\n            handle.remove()\n"
_FRESH = "self.activations = {name: [] for name in self.names}"
_LOOK = "        for name in self.names:\n            if name not in modules:\n"
RIGHT["ActivationRecorder"] = [check.activation_recorder.stand_in(), OneHookForAll]
WRONG["ActivationRecorder"] = {
    "enter returns None": (recorder("        return self\n", ""), "gives the recorder"),
    "late binding": (recorder(", name: str = name", ""), "each name has a list[\\s\\S]*Hint 4"),
    "shares memory": (recorder(".clone()", ""), "as it was then[\\s\\S]*Hint 2"),
    "not detached": (recorder(".detach()", ""), "are detached"),
    "never to the CPU": (recorder(".cpu()", ""), "on the CPU"),
    "hooks stay after an exception": (
        recorder(_EXIT, "        if exception[0] is not None:\n            return\n" + _EXIT),
        "hooks are gone[\\s\\S]*ValueError",
    ),
    "clears everybody's hooks": (
        recorder(_EXIT, "        for module in self.model.modules():\n            module._forward_hooks.clear()\n"),
        "hooks are gone[\\s\\S]*Hint 3",
    ),
    "swallows the exception": (recorder("handles.clear()\n", "handles.clear()\n        return True\n"), "goes on"),
    "keeps old recordings": (recorder(_FRESH, _FRESH.replace("= {", "= self.activations or {")), "starts afresh"),
    "skips an unknown name": (
        recorder(_LOOK, "        self.names = [name for name in self.names if name in modules]\n" + _LOOK),
        "unknown name raises KeyError",
    ),
    "registers while looking": (recorder(_LOOK, _LOOK.replace("self.names", "()")), "after entering with the name"),
}

# ---------------------------------------------------------------- image norms


def norms_with_backward(model, x, y):
    """loss.backward(), and the old gradients put back; inputs kept by a pre-hook, deltas by a full hook."""
    seen, deltas, handles, old = {}, {}, [], {p: p.grad for p in model.parameters()}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_pre_hook(lambda m, args: seen.update({m: args[0]})))
            handles.append(module.register_full_backward_hook(lambda m, gi, go: deltas.update({m: go[0]})))
    model.zero_grad()
    try:
        (F.cross_entropy(model(x.clone().requires_grad_()), y) * len(x)).backward()
    finally:
        for handle in handles:
            handle.remove()
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


def norms(*changes):
    return variant("norms", *changes)


_SUM = "torch.stack(squares).sum(dim=0).sqrt()"
_GRAD = "torch.autograd.grad(loss, list(model.parameters()))"
_FINALLY = "    finally:\n        for handle in handles:\n            handle.remove()\n"
_BY_TENSOR_HOOKS = (
    ("                handles.append(layer.register_full_backward_pre_hook(backward_hook))\n", ""),
    ("].detach()\n", "].detach()\n        output.register_hook(lambda delta: backward_hook(layer, [delta]))\n"),
)
RIGHT["image_norms"] = [norms_with_backward, norms(*_BY_TENSOR_HOOKS)]
WRONG["image_norms"] = {
    "always float64": (norms((_SUM, _SUM + ".double()")), "dtype of x"),
    "added up in float32 and cast back": (
        norms((_SUM, "torch.stack(squares).float().sum(dim=0).sqrt().to(x.dtype)")),
        "own gradient[\\s\\S]*in which dtype",
    ),
    "of the mean loss": (norms((', reduction="sum"', "")), "own gradient[\\s\\S]*loss whole"),
    "without biases": (norms(("layer.bias is not None", "False")), "own gradient"),
    "with a graph": (norms((_SUM, _SUM + " + 0 * loss")), "False in entry 'graph'"),
    "the model twice": (norms(("        loss =", "        model(x)\n        loss =")), "calls the model once"),
    "many backwards": (many_backwards, "runs one backward"),
    "backward": (norms((_GRAD, "loss.backward()")), ".grad is what it was"),
    "no finally": (
        norms(("    finally:\n", "    except ZeroDivisionError:\n        pass\n    else:\n")),
        "after an error",
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


def step(*changes):
    return variant("fused", *changes)


_OWN = "optimizers[param].step()"
_UNDO = "        for handle in handles:\n            handle.remove()\n"
RIGHT["step_in_backward"] = [check.step_in_backward.stand_in(), step_lazily]
WRONG["step_in_backward"] = {
    "gradients of zeros": (step(("param.grad = None", "param.grad.zero_()")), "gradient dropped"),
    "the loop's last optimizer": (step((_OWN, "optimizers[p].step()")), "its gradient dropped[\\s\\S]*Hint 2"),
    "weights without biases": (step(("if p.requires_grad", "if p.requires_grad and p.dim() > 1")), "gradient dropped"),
    "a new optimizer each time": (step((_OWN, "make_optimizer([param]).step()")), "usual loop[\\s\\S]*Hint 1"),
    "one optimizer for all": (
        step(
            ("make_optimizer([p])\n", "p\n    optimizer = make_optimizer(list(optimizers))\n"),
            (_OWN, "optimizer.step()"),
        ),
        "doesn't reach",
    ),
    "undoes the first": (step(("for handle in handles:", "for handle in handles[:1]:")), "undoing"),
    "undoes everybody's": (
        step((_UNDO, "        for p in optimizers:\n            p._post_accumulate_grad_hooks.clear()\n")),
        "undoing",
    ),
}

# ---------------------------------------------------------------- all


CHECKS = {
    "nodes_that_run": check.nodes_that_run,
    "Swish": check.swish,
    "Quantise": check.quantise,
    "ActivationRecorder": check.activation_recorder,
    "image_norms": check.image_norms,
    "step_in_backward": check.step_in_backward,
}


class TestChecks(CheckProtocol):
    TOPIC = "15-01"
    CHECKS, ANSWERS, RIGHT, WRONG = CHECKS, ANSWERS, RIGHT, WRONG
    STUBS, IDLE = answers("15-01", edit=student_source), idle("15-01")

    def hold_stand_in(self, name, stand_in):
        """Those that would pass their check are among the right answers; the others give what the answer gives."""
        x, images = torch.randn(4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
        if name == "nodes_that_run":
            assert len(stand_in(torch.tanh(x).sum(), [x])) == 2
        elif name in ("Swish", "Quantise"):
            given = (x,) if name == "Swish" else (x, 5)
            torch.testing.assert_close(stand_in.apply(*given), ANSWERS[name].apply(*given))
        elif name == "image_norms":
            given = nn.Linear(4, 3), images, torch.randint(3, (5,))
            torch.testing.assert_close(stand_in(*given), ANSWERS[name](*given))
