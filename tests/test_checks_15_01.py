"""The checks of 15-01 accept right answers, however written, and reject what a student might really write."""

import torch
import torch.nn.functional as F
from check_protocol import CheckProtocol
from torch import nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from shared.checks import topic_15_01 as check

CHECKS = {
    "nodes_that_run": check.nodes_that_run,
    "Swish": check.swish,
    "Quantise": check.quantise,
    "ActivationRecorder": check.activation_recorder,
    "image_norms": check.image_norms,
    "step_in_backward": check.step_in_backward,
}
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


ALL = "return runs"
RIGHT["nodes_that_run"] = [runs_to_a_fixpoint, (ALL, "return frozenset(runs)")]
WRONG["nodes_that_run"] = {
    "a list": ("returns a set", ALL, "return list(runs)"),
    "the whole graph": ("too many", ALL, "return set(fed_by)"),
    "the first input only": ("not found", "for t in inputs]", "for t in inputs[:1]]"),
    "by running": ("no node is run", ALL, f"torch.autograd.grad(loss, inputs, retain_graph=True)\n{ALL}"),
    "recursion": ("long chains[\\s\\S]*Hint 2", runs_recursive),
    "every path": ("doublings", "if node not in runs:", "if True:"),
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


VALUE = "return x * torch.sigmoid(x)"
SAVE = "ctx.save_for_backward(*inputs)"
SAVE_MORE = "ctx.save_for_backward(*inputs, torch.sigmoid(inputs[0]))"
BACK = "return grad_output * sigmoid"
SIGMOID = "sigmoid = torch.sigmoid(x)"
UNPACK = "(x,) = ctx.saved_tensors"
RIGHT["Swish"] = [SwishByExp, (VALUE, "return F.logsigmoid(x).exp_().mul_(x)")]
WRONG["Swish"] = {
    "a function": ("derived from Function", F.silu),
    "value overflows": ("value is x[\\s\\S]*Hint 3", VALUE, "return x * torch.exp(x) / (1 + torch.exp(x))"),
    "value in float32": ("value is x[\\s\\S]*float64", VALUE, "return F.silu(x.float()).to(x.dtype)"),
    "in place": ("x stays as it is", VALUE, "return x.mul_(torch.sigmoid(x)).clone()"),
    "no grad_output": ("contract of backward", BACK, "return sigmoid"),
    "gradient in float32": ("grad_output · f'[\\s\\S]*float64", UNPACK, "x = ctx.saved_tensors[0].float()"),
    "slope cut off": (
        "gradient is grad_output[\\s\\S]*float64",
        SIGMOID,
        "sigmoid = torch.where(x < -20, 0, torch.sigmoid(x))",
    ),
    "x of the last call": ("gradient is grad_output", SAVE, f"{SAVE}\nSwish.x = inputs[0]", UNPACK, "x = Swish.x"),
    "writes into grad_output": ("grad_output stays as it is", BACK, "return grad_output.mul_(sigmoid)"),
    "gradient without a graph": ("gradgradcheck accept", UNPACK, "x = ctx.saved_tensors[0].detach()"),
    "sigmoid from forward": (
        "gradgradcheck[\\s\\S]*Hint 2",
        SAVE,
        SAVE_MORE,
        UNPACK,
        "(x, sigmoid) = ctx.saved_tensors",
        SIGMOID,
        "",
    ),
    "saves the output too": (
        "nothing else",
        SAVE,
        "ctx.save_for_backward(*inputs, output)",
        UNPACK,
        "(x, _) = ctx.saved_tensors",
    ),
    "no rule for vmap": ("torch.func can", "generate_vmap_rule = True", "generate_vmap_rule = False"),
    "an attribute": ("save_for_backward notices", SAVE, "ctx.x = inputs[0]", UNPACK, "x = ctx.x"),
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


ROUND = "torch.round((x.clamp(-1, 1) + 1) / 2 * steps)"
WHERE = "torch.where(inside, grad_output, 0)"
RIGHT["Quantise"] = [QuantiseByComparison, (WHERE, "grad_output.masked_fill(~inside, 0)")]
WRONG["Quantise"] = {
    "clamps in place": ("x stays as it is", "x.clamp(-1, 1)", "x.clamp_(-1, 1)"),
    "rounds down": ("nearest level", "torch.round", "torch.floor"),
    "always float32": ("nearest level[\\s\\S]*float64", "x.clamp(-1, 1)", "x.float().clamp(-1, 1)"),
    "levels on the CPU": (
        "nearest level[\\s\\S]*meta",
        ROUND,
        f"torch.linspace(0, steps, levels).to(x.dtype)[{ROUND}.long().cpu()]",
    ),
    "identity": ("gradient is grad_output where", WHERE, "grad_output"),
    "open interval": ("gradient is grad_output where", "x.abs() <= 1", "x.abs() < 1"),
    "multiplied by the mask": ("nan[\\s\\S]*an infinite grad_output", WHERE, "grad_output * inside"),
    "writes into grad_output": ("grad_output stays", WHERE, "grad_output.masked_fill_(~inside, 0)"),
    "keeps x": (
        "one byte[\\s\\S]*256 bytes",
        "(x.abs() <= 1)",
        "(x)",
        "torch.where(inside",
        "torch.where(inside.abs() <= 1",
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


EXIT = "for handle in self.handles:\n    handle.remove()"
FRESH = "self.activations = {name: [] for name in self.names}"
LOOK = "for name in self.names:\n    if name not in modules:"
RIGHT["ActivationRecorder"] = [check.activation_recorder.stand_in(), OneHookForAll]
WRONG["ActivationRecorder"] = {
    "enter returns None": ("gives the recorder", "return self", ""),
    "late binding": ("each name has a list[\\s\\S]*Hint 4", ", name: str = name", ""),
    "shares memory": ("as it was then[\\s\\S]*Hint 2", ".clone()", ""),
    "not detached": ("are detached", ".detach()", ""),
    "never to the CPU": ("on the CPU", ".cpu()", ""),
    "hooks stay after an exception": (
        "hooks are gone[\\s\\S]*ValueError",
        EXIT,
        f"if exception[0] is not None:\n    return\n{EXIT}",
    ),
    "clears everybody's hooks": (
        "hooks are gone[\\s\\S]*Hint 3",
        EXIT,
        "for module in self.model.modules():\n    module._forward_hooks.clear()",
    ),
    "swallows the exception": ("goes on", "handles.clear()", "handles.clear()\nreturn True"),
    "keeps old recordings": ("starts afresh", FRESH, FRESH.replace("= {", "= self.activations or {")),
    "skips an unknown name": (
        "unknown name raises KeyError",
        LOOK,
        f"self.names = [name for name in self.names if name in modules]\n{LOOK}",
    ),
    "registers while looking": ("after entering with the name", LOOK, LOOK.replace("self.names", "()")),
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


SUM = "torch.stack(squares).sum(dim=0).sqrt()"
GRAD = "torch.autograd.grad(loss, list(model.parameters()))"
FINALLY = "finally:\n    for handle in handles:\n        handle.remove()"
BY_TENSOR_HOOKS = (
    "handles.append(layer.register_full_backward_pre_hook(backward_hook))",
    "",
    "].detach()",
    "].detach()\noutput.register_hook(lambda delta: backward_hook(layer, [delta]))",
)
RIGHT["image_norms"] = [norms_with_backward, BY_TENSOR_HOOKS]
WRONG["image_norms"] = {
    "always float64": ("dtype of x", SUM, SUM + ".double()"),
    "added up in float32 and cast back": (
        "own gradient[\\s\\S]*in which dtype",
        SUM,
        "torch.stack(squares).float().sum(dim=0).sqrt().to(x.dtype)",
    ),
    "of the mean loss": ("own gradient[\\s\\S]*loss whole", ', reduction="sum"', ""),
    "without biases": ("own gradient", "layer.bias is not None", "False"),
    "with a graph": ("False in entry 'graph'", SUM, SUM + " + 0 * loss"),
    "the model twice": ("calls the model once", "loss =", "model(x)\nloss ="),
    "many backwards": ("runs one backward", many_backwards),
    "backward": (".grad is what it was", GRAD, "loss.backward()"),
    "no finally": ("after an error", "finally:", "except ZeroDivisionError:\n    pass\nelse:"),
    "swallows the exception": (
        "an exception goes on",
        FINALLY,
        f"except Exception:\n    return torch.zeros(len(x))\n{FINALLY}",
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


OWN = "optimizers[param].step()"
UNDO = "for handle in handles:\n    handle.remove()"
RIGHT["step_in_backward"] = [check.step_in_backward.stand_in(), step_lazily]
WRONG["step_in_backward"] = {
    "gradients of zeros": ("gradient dropped", "param.grad = None", "param.grad.zero_()"),
    "the loop's last optimizer": ("its gradient dropped[\\s\\S]*Hint 2", OWN, "optimizers[p].step()"),
    "weights without biases": ("gradient dropped", "if p.requires_grad", "if p.requires_grad and p.dim() > 1"),
    "a new optimizer each time": ("usual loop[\\s\\S]*Hint 1", OWN, "make_optimizer([param]).step()"),
    "one optimizer for all": (
        "doesn't reach",
        "make_optimizer([p])",
        "p",
        "def step(",
        "optimizer = make_optimizer(list(optimizers))\n\ndef step(",
        OWN,
        "optimizer.step()",
    ),
    "undoes the first": ("undoing", "for handle in handles:", "for handle in handles[:1]:"),
    "undoes everybody's": ("undoing", UNDO, "for p in optimizers:\n    p._post_accumulate_grad_hooks.clear()"),
}

# ---------------------------------------------------------------- all


class TestChecks(CheckProtocol, topic="15-01"):
    CHECKS, RIGHT, WRONG = CHECKS, RIGHT, WRONG

    def hold_stand_in(self, name, stand_in):
        """Those that would pass their check are among the right answers; the others give what the answer gives."""
        x, images = torch.randn(4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
        if name == "nodes_that_run":
            assert len(stand_in(torch.tanh(x).sum(), [x])) == 2
        elif name in ("Swish", "Quantise"):
            given = (x,) if name == "Swish" else (x, 5)
            torch.testing.assert_close(stand_in.apply(*given), self.ANSWERS[name].apply(*given))
        elif name == "image_norms":
            given = nn.Linear(4, 3), images, torch.randint(3, (5,))
            torch.testing.assert_close(stand_in(*given), self.ANSWERS[name](*given))
