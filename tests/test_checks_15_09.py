"""The checks of 15-09 accept any fix that behaves, and reject what a student might really write."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from check_protocol import CheckProtocol, sources

from course.lesson_code import definitions
from shared.checks import topic_15_09 as check

CELLS = "projection projection-gradcheck numerical-jacobian analytical-jacobian gradcheck-result gradcheck"
GIVEN = definitions("15-09", *CELLS.split())


def broken(cell, name):
    """A broken script of the lesson."""
    namespace = dict(GIVEN)
    exec(compile(sources("15-09")[cell], cell, "exec", dont_inherit=True), namespace)
    return namespace[name]


# ---------------------------------------------------------------- right answers

DIMS = (1, 2, 3)


def contrast_by_norm(images):
    """The norm's own rule at 0, with what is nearly uniform made uniform."""
    centred = images - images.mean(DIMS, keepdim=True)
    centred = centred * (centred.abs() > 1e-6 * (1 + images.abs()))
    return torch.linalg.vector_norm(centred, dim=DIMS) / images[0].numel() ** 0.5


def contrast_with_eps(images):
    variance = images.flatten(1).var(dim=1, correction=0)
    return (variance + 1e-9).sqrt()


class ClipFromOutput(torch.autograd.Function):
    """setup_context, and everything from the output."""

    @staticmethod
    def forward(x, s):
        return torch.tanh(x / s.reshape(1, -1, *(1,) * (x.ndim - 2))) * s.reshape(1, -1, *(1,) * (x.ndim - 2))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx, grad):
        x, s, y = ctx.saved_tensors
        s4 = s.reshape(1, -1, *(1,) * (x.ndim - 2))
        slope = 1 - (y / s4) ** 2
        result = [None, None]
        if ctx.needs_input_grad[0]:
            result[0] = grad * slope
        if ctx.needs_input_grad[1]:
            both = grad * (y - x * slope) / s4
            result[1] = both.transpose(0, 1).reshape(len(s), -1).sum(1)
        return tuple(result)


class ClipByAutograd(torch.autograd.Function):
    """Lets autograd do it once more."""

    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x, s)
        wide = s[(slice(None), *(None,) * (x.dim() - 2))]
        return wide * (x / wide).tanh()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x, s = (t.detach().requires_grad_(n) for t, n in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True))
            wide = s[(slice(None), *(None,) * (x.dim() - 2))]
            y = wide * (x / wide).tanh()
        needed = [t for t in (x, s) if t.requires_grad]
        found = iter(torch.autograd.grad(y, needed, grad))
        return tuple(next(found) if t.requires_grad else None for t in (x, s))


def record_by_wrapping(model, batches):
    """No hooks: forward of each leaf is replaced on the instance."""
    result, wrapped = {}, []

    def wrap(module, inner, numbers):
        def forward(*args, **kwargs):
            out = inner(*args, **kwargs)
            numbers.append(float(out.detach().abs().mean()))
            return out

        module.forward = forward

    try:
        for name, module in model.named_modules():
            if not module._modules:
                result[name] = []
                wrapped.append(module)
                wrap(module, module.forward, result[name])
        for x, _ in batches:
            model(x)
    finally:
        for module in wrapped:
            vars(module).pop("forward", None)
    return result


def confusion_by_einsum(logits, y):
    classes = torch.arange(logits.shape[1], device=logits.device)
    true = (y[:, None] == classes).double()
    found = (logits.argmax(dim=1)[:, None] == classes).double()
    return torch.einsum("ni,nj->ij", true, found).long()


def train_6_lazily(model, optimizer, images, labels, epochs, held):
    """Standardises each batch when it is used."""
    m, s = images[held:].mean((0, 2, 3)).view(1, -1, 1, 1), images[held:].std((0, 2, 3)).view(1, -1, 1, 1)
    result = []
    for _ in range(epochs):
        model.train()
        index = held
        while index < len(images):
            loss = F.cross_entropy(model((images[index : index + 64] - m).div(s)), labels[index : index + 64])
            model.zero_grad()
            loss.backward()
            optimizer.step()
            index += 64
        model.eval()
        with torch.inference_mode():
            guess = model((images[:held] - m) / s).max(1).indices
        result.append(float((guess == labels[:held]).double().mean()))
    return result


GRADCHECK = (  # the full check, at the first two rows
    "gap = projection_gradcheck(run, [t.requires_grad_() for t in tensors], draws=8)",
    "found = numerical_gradcheck(run, [t.requires_grad_() for t in tensors])",
    "if gap is not None and gap > 1e-3:",
    "if not found.ok and not found.kinks:",
    "args[0].detach()",
    "args[0][:2].detach()",
)

# ---------------------------------------------------------------- wrong answers

CENTRED = "centred = images - images.mean(dim=(1, 2, 3), keepdim=True)"
SAFE = "safe = torch.where(uniform, torch.ones_like(variance), variance)"
LAST = "return torch.where(uniform, torch.zeros_like(variance), safe.sqrt())"
VALUE = "the value is that of the formula"
CONTRAST = {
    "added behind the root": (VALUE, "safe.sqrt()", "safe.sqrt() + 0.01"),
    "a large eps": (VALUE, LAST, "return (variance + 1e-6).sqrt()"),
    "one colour is uniform": (
        VALUE,
        "images.amax(dim=(1, 2, 3)) == images.amin(dim=(1, 2, 3))",
        "(images.amax(dim=(2, 3)) == images.amin(dim=(2, 3))).all(dim=1)",
    ),
    "the script's": ("gradient 0", LAST, "return variance.sqrt()"),
    "where behind the root": ("gradient 0[\\s\\S]*Hint 1", SAFE, "safe = variance"),
    "detached": (
        "the gradient is that of the formula",
        LAST,
        "return torch.where(uniform, 0.0, safe.sqrt()).detach() + 0 * images.sum(dim=(1, 2, 3))",
    ),
    "a floor for uniform images": ("has the value 0", "torch.zeros_like(variance)", "torch.full_like(variance, 1e-3)"),
    "drops the batch's gradient": (
        "gradient of another",
        SAFE,
        "safe = variance",
        CENTRED,
        f"""if images.requires_grad:
    images = images * 1
    images.register_hook(lambda g: torch.zeros_like(g) if g.isnan().any() else g)
{CENTRED}""",
    ),
    "in place": (
        "images stay as they were",
        CENTRED,
        "with torch.no_grad():\n    images -= images.mean(dim=(1, 2, 3), keepdim=True)\ncentred = images",
    ),
}
FUNCTION = {
    "the script's": ("the gradient of x", broken("broken-clip", "BrokenSoftClip")),
    "no upstream gradient": ("the gradient of x", "grad_x = grad * slope", "grad_x = slope"),
    "s without its second term": ("the gradient of s", "grad * (t - slope * x / wide)", "grad * t"),
    "tanh by exp": (
        "forward is",
        "return s * torch.tanh(x / s)",
        "e = torch.exp(2 * x / s)\nreturn s * (e - 1) / (e + 1)",
    ),
    "s always": ("gets None", "if ctx.needs_input_grad[1]:", "if True:"),
    "on ctx": (
        "tensors on ctx itself",
        "ctx.save_for_backward(x, s)",
        "ctx.x, ctx.s = x, s",
        "ctx.saved_tensors",
        "ctx.x, ctx.s",
    ),
}

TENSORS, COPIED = (
    "tensors = [given, *(weight.detach() for weight in weights.values())]",
    "copied = copy.deepcopy(model)",
)
LAYER = {
    "inputs only": (
        "whose parameter[\\s\\S]*Hint 2",
        TENSORS,
        "tensors = [given]",
        "dict(zip(names, values, strict=True))",
        "{}",
    ),
    "not the first layer's input": (
        "whose input",
        TENSORS,
        f"{TENSORS}\nif name == next(iter(inputs)):\n    run, tensors = partial(run, given), tensors[1:]",
    ),
    "numbers of its own": ("inputs that", TENSORS, f"{TENSORS}\ntensors[0] = torch.randn_like(given)"),
    "always somebody": ("None if all are right", "return None", "return name"),
    "in float32": ("None if all|whose|inputs that", ".double()", ".float()", "draws=8", "draws=8, eps=1e-3"),
    "the model itself": ("the model stays as it is", COPIED, "copied = model"),
}


def with_verdict(**changed):
    return lambda: {**TestChecks.ANSWERS["verdicts"](), **changed}


WARD = {
    "A's first block": ("patient A[\\s\\S]*another place[\\s\\S]*Hint 2", with_verdict(A=("wrong gradient", "body.2"))),
    "B is dead": ("patient B[\\s\\S]*Hint 1", with_verdict(B=("dead", "body.2"))),
    "the layer before the NaN": ("patient C[\\s\\S]*Hint 2", with_verdict(C=("NaN", "body.4"))),
    "D is healthy": ("patient D[\\s\\S]*Hint 1", with_verdict(D=("healthy", ""))),
    "E's optimizer": ("patient E", with_verdict(E=("gradients pile up", "optimizer"))),
    "F in the doctor's words": ("patient F[\\s\\S]*which words", with_verdict(F=("labels don't fit", "batch"))),
    "a list": ("a dictionary of pairs", lambda: ["A", "B"]),
}

NOTE, BIN = (
    "found[name].append(out.detach().abs().mean().item())",
    "return counts.index_add_(0, pairs, torch.ones_like(pairs))",
)
FINALLY, NO_GRAD = "finally:\n    for handle in handles:\n        handle.remove()", "with torch.no_grad():"
GROWTH = {
    "the scripts": (
        "record_4: one float for each batch",
        (broken("broken-record", "broken_record_4"), broken("broken-confusion", "broken_confusion_5")),
    ),
    "all modules": ("record_4: one list for each leaf", " if not list(m.children())", ""),
    "a model that is a leaf is left out": (
        "record_4: one list for each leaf",
        "if not list(m",
        "if name and not list(m",
    ),
    "late name": (
        "record_4: one float for each batch",
        "partial(note, name=name)",
        "lambda m, a, out: note(m, a, out, list(leaves)[-1])",
    ),
    "numbers at the end": (
        "record_4: no output is alive",
        NOTE,
        "found[name].append(out)",
        "return found",
        "return {k: [o.abs().mean().item() for o in v] for k, v in found.items()}",
    ),
    "in evaluation mode": ("record_4: the modes stay", NO_GRAD, f"model.eval()\n{NO_GRAD}"),
    "hooks stay after an exception": (
        "record_4: its hooks are gone[\\s\\S]*raised",
        FINALLY,
        "    for handle in handles:\n        handle.remove()\nfinally:\n    pass",
    ),
    "swallows": ("record_4: the exception goes on", FINALLY, f"except BaseException:\n    pass\n{FINALLY}"),
    "transposed": (
        "confusion_5: the counts",
        "y * classes + logits.argmax(dim=1)",
        "logits.argmax(dim=1) * classes + y",
    ),
    "always on the CPU": ("confusion_5: Python reads no value", ", device=logits.device", ""),
    "a boolean mask": (
        "confusion_5: Python reads no value[\\s\\S]*boolean masks",
        BIN,
        f"pairs[pairs >= 0] = pairs.clone()\n{BIN}",
    ),
    "a loop over classes": (
        "confusion_5: at most 20 operations",
        f"{BIN}.view(classes, classes)",
        "return torch.stack([(pairs == i).sum() for i in range(classes * classes)]).view(classes, classes)",
    ),
}

STANDARD, CLEARS, STEPS = "standard = (images - mean) / std", "optimizer.zero_grad()", "optimizer.step()"
TRAINING, MODES = "the training is that of the script", "trains in training mode, measures"
PAIR = {
    "the script's": ("the training is that of the script[\\s\\S]*Hint 1", broken("script-9", "broken_train_6")),
    "mean over all": (TRAINING, "mean = images[held:]", "mean = images"),
    "the last batch dropped": (TRAINING, "range(held, len(images), 64)", "range(held, len(images) - 63, 64)"),
    "old gradients": (TRAINING, f"{CLEARS}\n", "", STEPS, f"{STEPS}\n{CLEARS}"),
    "held images as bytes": ("the held images[\\s\\S]*Hint 2", "model(standard[:held])", "model(images[:held])"),
    "measured with a graph": (MODES, "with torch.no_grad():", "if True:"),
    "eval for good": (MODES, "for _ in range(epochs):\n    model.train()", "model.train()\nfor _ in range(epochs):"),
    "in place": ("images and labels stay", STANDARD, "standard = images.sub_(mean).div_(std)"),
    "tensors": ("one float for each epoch", "correct.float().mean().item()", "correct.float().mean()"),
}


class TestChecks(CheckProtocol, topic="15-09", given=GIVEN):
    CHECKS: ClassVar = {
        "contrast": check.contrast,
        "SoftClip": check.soft_clip,
        "wrong_layer": check.wrong_layer,
        "verdicts": check.verdicts,
        "GROWTH": check.growth,
        "train_6": check.pair,
    }
    RIGHT: ClassVar = {
        "contrast": [contrast_by_norm, contrast_with_eps],
        "SoftClip": [ClipFromOutput, ClipByAutograd],
        "wrong_layer": [GRADCHECK, ("draws=8", "draws=3", "gap > 1e-3", "gap > 1e-4")],
        "verdicts": [
            lambda: dict(reversed(check._VERDICTS.items())),
            lambda: {k: list(v) for k, v in check._VERDICTS.items()},
        ],
        "GROWTH": [
            (record_by_wrapping, confusion_by_einsum),
            ("torch.no_grad()", "torch.inference_mode()"),
        ],
        "train_6": [train_6_lazily, ("std(dim=(0, 2, 3)", "std(correction=0, dim=(0, 2, 3)")],
    }
    WRONG: ClassVar = {
        "contrast": CONTRAST,
        "SoftClip": FUNCTION,
        "wrong_layer": LAYER,
        "verdicts": WARD,
        "GROWTH": GROWTH,
        "train_6": PAIR,
    }

    def hold_stand_in(self, name, stand_in):
        if name in ("SoftClip", "verdicts"):
            assert stand_in is None
        else:
            assert self.CHECKS[name].run(stand_in).status == "passed"
