"""The checks of 15-09 accept any fix that behaves, and reject what a student might really write."""

import copy
from functools import partial

import torch
import torch.nn.functional as F
from answer_variants import sources, variants
from check_protocol import CheckProtocol, idle

from course.exercise_form import student_source
from course.lesson_code import answers, definitions
from shared.checks import topic_15_09 as check

GIVEN = definitions(
    "15-09",
    "projection",
    "projection-gradcheck",
    "numerical-jacobian",
    "analytical-jacobian",
    "gradcheck-result",
    "gradcheck",
)
ANSWERS = answers("15-09", given=GIVEN)
STUBS = answers("15-09", edit=student_source, given=GIVEN)
IDLE = idle("15-09", GIVEN)
SOURCES = sources("15-09")
NAMES = {
    "contrast": "contrast",
    "function": "SoftClip",
    "layer": "wrong_layer",
    "ward": "verdicts",
    "growth": "GROWTH",
    "pair": "train_6",
}
variant = variants("15-09", NAMES, ANSWERS)


def broken(cell, name):
    """A broken script of the lesson."""
    namespace = dict(ANSWERS)
    exec(compile(SOURCES[cell], cell, "exec", dont_inherit=True), namespace)
    return namespace[name]


# ---- contrast

_DIMS = (1, 2, 3)


def contrast_by_norm(images):
    """The norm's own rule at 0, with what is nearly uniform made uniform."""
    centred = images - images.mean(_DIMS, keepdim=True)
    centred = centred * (centred.abs() > 1e-6 * (1 + images.abs()))
    return torch.linalg.vector_norm(centred, dim=_DIMS) / images[0].numel() ** 0.5


def contrast_with_eps(images):
    variance = images.flatten(1).var(dim=1, correction=0)
    return (variance + 1e-9).sqrt()


def contrast_by_rows(images):
    rows = []
    for image in images:
        flat = image.reshape(-1)
        rows.append(flat.std(correction=0) if flat.max() > flat.min() else flat.sum() * 0)
    return torch.stack(rows)


def contrast_plain(images):
    return images.var(_DIMS, correction=0).sqrt()


def contrast_where(images):
    v = contrast_variance(images)
    return torch.where(v > 0, v.sqrt(), 0.0)


def contrast_variance(images):
    return (images - images.mean(_DIMS, keepdim=True)).square().mean(_DIMS)


def contrast_unbiased(images):
    return contrast_by_rows(images) * (images[0].numel() / (images[0].numel() - 1)) ** 0.5


def contrast_large_eps(images):
    return (contrast_variance(images) + 1e-6).sqrt()


def contrast_detached(images):
    return contrast_by_rows(images).detach() + 0 * images.sum(_DIMS)


def contrast_floor(images):
    v = contrast_variance(images)
    return torch.where(v < 1e-8, 1e-3, v.clamp(min=1e-8).sqrt())


def contrast_hook(images):
    if images.requires_grad:
        images = images * 1
        images.register_hook(lambda g: torch.zeros_like(g) if g.isnan().any() else g)
    v = contrast_variance(images)
    return torch.where(v < 1e-9, 0.0, v.sqrt())


def contrast_in_place(images):
    with torch.no_grad():
        images -= images.mean(_DIMS, keepdim=True)
    return contrast_by_rows(images)


def contrast_by_channel(images):
    flat = (images.amax((2, 3)) == images.amin((2, 3))).all(1)
    return torch.where(flat, 0.0, torch.where(flat, 1.0, contrast_variance(images)).sqrt())


def contrast_offset(images):
    c = contrast_by_rows(images)
    return torch.where(c > 0, c + 0.01, c)


WRONG_CONTRAST = {
    "added behind the root": (contrast_offset, "the value is that of the formula"),
    "the script's": (contrast_plain, "gradient 0"),
    "where behind the root": (contrast_where, "gradient 0[\\s\\S]*Hint 1"),
    "divided by n - 1": (contrast_unbiased, "the value is that of the formula"),
    "a large eps": (contrast_large_eps, "the value is that of the formula"),
    "detached": (contrast_detached, "the gradient is that of the formula"),
    "a floor for uniform images": (contrast_floor, "has the value 0"),
    "drops the batch's gradient": (contrast_hook, "gradient of another"),
    "in place": (contrast_in_place, "images stay as they were"),
    "one colour is uniform": (contrast_by_channel, "the value is that of the formula"),
}

# ---- function


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


WRONG_FUNCTION = {
    "the script's": (broken("broken-clip", "BrokenSoftClip"), "the gradient of x"),
    "s without its second term": (
        variant("function", ("grad * (t - slope * x / wide)", "grad * t")),
        "the gradient of s",
    ),
    "no upstream gradient": (
        variant("function", ("grad_x = grad * slope", "grad_x = slope")),
        "the gradient of x",
    ),
    "tanh by exp": (
        variant(
            "function",
            ("return s * torch.tanh(x / s)", "e = torch.exp(2 * x / s)\n        return s * (e - 1) / (e + 1)"),
        ),
        "forward is",
    ),
    "s always": (variant("function", ("if ctx.needs_input_grad[1]:", "if True:")), "gets None"),
    "x always": (variant("function", ("if ctx.needs_input_grad[0]:", "if True:")), "gets None"),
    "on ctx": (
        variant(
            "function",
            ("ctx.save_for_backward(x, s)", "ctx.x, ctx.s = x, s"),
            ("x, s = ctx.saved_tensors", "x, s = ctx.x, ctx.s"),
        ),
        "tensors on ctx itself",
    ),
}

# ---- layer


def layer_by_jacobian(model, x):
    """The full check, at the first two rows."""
    seen = {}
    twin = copy.deepcopy(model).double()
    for name, module in twin.named_modules():
        if not module._modules:
            module.register_forward_hook(lambda m, args, out, name=name: seen.update({name: args[0].detach()}))
    twin(x.double())
    for name, given in seen.items():
        layer = twin.get_submodule(name)
        layer._forward_hooks.clear()
        inputs = [given[:2].clone().requires_grad_()]
        run = layer
        if weights := dict(layer.named_parameters()):
            inputs += [weight.detach().requires_grad_() for weight in weights.values()]
            run = lambda x, *values, f=layer, w=weights: torch.func.functional_call(  # noqa: E731
                f, dict(zip(w, values, strict=True)), (x,)
            )
        found = GIVEN["numerical_gradcheck"](run, inputs)
        if not found.ok and not found.kinks:
            return name
    return None


layer = partial(variant, "layer")
layer_of_defaults = layer(("draws=8", "draws=3"), ("gap > 1e-3", "gap > 1e-4"))
_TENSORS = "tensors = [given, *(weight.detach() for weight in weights.values())]"
_HOOKS = "    for handle in handles:\n        handle.remove()\n"
WRONG_LAYER = {
    "inputs only": (
        layer(
            (_TENSORS, "tensors = [given, *(w.detach() for w in weights.values())][:1]"),
            ("dict(zip(names, values, strict=True))", "{}"),
        ),
        "whose parameter[\\s\\S]*Hint 2",
    ),
    "parameters only": (
        layer(
            ("t.requires_grad_() for t in tensors]", "t.requires_grad_() for t in tensors[1:]]"),
            ("def run(value: Tensor, *values", "def run(*values"),
            ("layer=layer, names=", "layer=layer, value=given, names="),
            ("        gap = ", "        if not weights:\n            continue\n        gap = "),
        ),
        "whose input",
    ),
    "not the first layer's input": (
        layer(
            (
                _TENSORS,
                _TENSORS + "\n        if name == next(iter(inputs)):\n"
                "            run, tensors = partial(run, given), tensors[1:]",
            )
        ),
        "whose input",
    ),
    "numbers of its own": (
        layer((_TENSORS, _TENSORS + "\n        tensors[0] = torch.randn_like(given)")),
        "inputs that",
    ),
    "always somebody": (layer(("    return None", "    return name")), "None if all are right"),
    "in float32": (layer((".double()", ".float()"), ("draws=8", "draws=8, eps=1e-3")), "None if all|whose|inputs that"),
    "the model itself": (layer(("copied = copy.deepcopy(model)", "copied = model")), "the model stays as it is"),
    "hooks stay": (
        layer(
            ("copied = copy.deepcopy(model)", "copied = model"),
            (_HOOKS, ""),
            ("leaves[name].double()", "copy.deepcopy(leaves[name]).double()"),
        ),
        "the model stays as it is",
    ),
    "the one before": (
        layer(("            return name", "            return list(inputs)[list(inputs).index(name) - 1]")),
        "names the layer",
    ),
}

# ---- ward


def with_verdict(**changed):
    return lambda: {**ANSWERS["verdicts"](), **changed}


WRONG_WARD = {
    "the example": (lambda: {"A": ("labels", "batch")}, "patient A"),
    "A's first block": (with_verdict(A=("wrong gradient", "body.2")), "patient A[\\s\\S]*another place[\\s\\S]*Hint 2"),
    "B is dead": (with_verdict(B=("dead", "body.2")), "patient B[\\s\\S]*Hint 1"),
    "the layer before the NaN": (with_verdict(C=("NaN", "body.4")), "patient C[\\s\\S]*Hint 2"),
    "D is healthy": (with_verdict(D=("healthy", "")), "patient D[\\s\\S]*Hint 1"),
    "the layer after the dead one": (with_verdict(D=("dead", "body.4")), "patient D[\\s\\S]*Hint 2"),
    "E's optimizer": (with_verdict(E=("gradients pile up", "optimizer")), "patient E"),
    "F in the doctor's words": (with_verdict(F=("labels don't fit", "batch")), "patient F[\\s\\S]*which words"),
    "a list": (lambda: ["A", "B"], "a dictionary of pairs"),
}

# ---- growth


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


def record_with_defaults(model, batches):
    found, handles = {}, []
    for name, module in model.named_modules():
        if len(list(module.children())) == 0:
            handles.append(
                module.register_forward_hook(
                    lambda m, a, out, name=name: found.setdefault(name, []).append(out.abs().mean().item())
                )
            )
    try:
        with torch.inference_mode():
            for pair in batches:
                model(pair[0])
    finally:
        for handle in handles:
            handle.remove()
    return found


def confusion_by_scatter(logits, y):
    classes = logits.shape[-1]
    counts = torch.zeros(classes * classes, dtype=torch.int64, device=logits.device)
    index = y * classes + logits.max(dim=1).indices
    return counts.scatter_add_(0, index, torch.ones_like(index)).reshape(classes, classes)


def confusion_by_einsum(logits, y):
    classes = torch.arange(logits.shape[1], device=logits.device)
    true = (y[:, None] == classes).double()
    found = (logits.argmax(dim=1)[:, None] == classes).double()
    return torch.einsum("ni,nj->ij", true, found).long()


growth = partial(variant, "growth")


_NOTE = "found[name].append(out.detach().abs().mean().item())"
_FINALLY = "    finally:\n        for handle in handles:\n            handle.remove()\n"
_BIN = "counts.index_add_(0, pairs, torch.ones_like(pairs))"
WRONG_GROWTH = {
    "the scripts": (
        (broken("broken-record", "broken_record_4"), broken("broken-confusion", "broken_confusion_5")),
        "record_4: one float for each batch",
    ),
    "all modules": (growth((" if not list(m.children())", "")), "record_4: one list for each leaf"),
    "late name": (
        growth(("partial(note, name=name)", "lambda m, a, out: note(m, a, out, list(leaves)[-1])")),
        "record_4: one float for each batch",
    ),
    "tensors for floats": (
        growth((_NOTE, "found[name].append(out.detach().abs().mean())")),
        "record_4: one float for each batch",
    ),
    "numbers at the end": (
        growth(
            (_NOTE, "found[name].append(out)"),
            ("    return found\n", "    return {k: [o.abs().mean().item() for o in v] for k, v in found.items()}\n"),
        ),
        "record_4: no output is alive",
    ),
    "in evaluation mode": (
        growth(("        with torch.no_grad():\n", "        model.eval()\n        with torch.no_grad():\n")),
        "record_4: the modes stay",
    ),
    "hooks stay": (
        growth(("            handle.remove()\n", "            pass\n")),
        "record_4: (its hooks are gone|one float)",
    ),
    "hooks stay after an exception": (
        growth((_FINALLY, "        for handle in handles:\n            handle.remove()\n    finally:\n        pass\n")),
        "record_4: its hooks are gone[\\s\\S]*raised",
    ),
    "swallows": (
        growth(("    finally:\n", "    except BaseException:\n        pass\n    finally:\n")),
        "record_4: the exception goes on",
    ),
    "transposed": (
        growth(("y * classes + logits.argmax(dim=1)", "logits.argmax(dim=1) * classes + y")),
        "confusion_5: the counts",
    ),
    "always on the CPU": (growth((", device=logits.device", "")), "confusion_5: Python reads no value"),
    "a boolean mask": (
        growth((f"    return {_BIN}", f"    pairs[pairs >= 0] = pairs.clone()\n    return {_BIN}")),
        "confusion_5: Python reads no value[\\s\\S]*boolean masks",
    ),
    "bincount": (
        growth((f"    return {_BIN}", "    return torch.bincount(pairs, minlength=classes * classes)")),
        "confusion_5: Python reads no value",
    ),
    "a model that is a leaf is left out": (
        growth(("if not list(m.children())}", "if name and not list(m.children())}")),
        "record_4: one list for each leaf",
    ),
    "a loop over classes": (
        growth(
            (
                f"    return {_BIN}.view(classes, classes)\n",
                "    rows = [(pairs == i).sum() for i in range(classes * classes)]\n"
                "    return torch.stack(rows).view(classes, classes)\n",
            )
        ),
        "confusion_5: at most 20 operations",
    ),
}

# ---- pair


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


def train_6_copy(model, optimizer, images, labels, epochs, held):
    """A copy that is written to, once."""
    images = images.clone()
    mean, std = (getattr(images[held:], f)(dim=(0, 2, 3), keepdim=True) for f in ("mean", "std"))
    images -= mean
    images /= std
    accuracies = []
    for _ in range(epochs):
        model.train()
        for x, y in zip(images[held:].split(64), labels[held:].split(64), strict=True):
            loss = F.cross_entropy(model(x), y)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                p.grad = g
            optimizer.step()
        model.eval()
        with torch.no_grad():  # in parts
            right = torch.cat([model(x).argmax(1) for x in images[:held].split(5)]) == labels[:held]
        accuracies.append(right.sum().item() / held)
    return accuracies


pair = partial(variant, "pair")


_STANDARD = "    standard = (images - mean) / std\n"
WRONG_PAIR = {
    "the script's": (broken("script-9", "broken_train_6"), "the training is that of the script[\\s\\S]*Hint 1"),
    "held images as bytes": (
        pair(("model(standard[:held])", "model(images[:held])")),
        "the held images[\\s\\S]*Hint 2",
    ),
    "mean over all": (pair(("mean = images[held:]", "mean = images")), "the training is"),
    "each batch by its own mean": (
        pair(
            ("x, y = standard[start : start + 64],", "x, y = images[start : start + 64], "),
            ("F.cross_entropy(model(x), y)", "F.cross_entropy(model((x - x.mean((0, 2, 3), keepdim=True)) / std), y)"),
        ),
        "the training is",
    ),
    "the last batch dropped": (
        pair(("range(held, len(images), 64)", "range(held, len(images) - 63, 64)")),
        "the training is",
    ),
    "measured with a graph": (pair(("with torch.no_grad():", "if True:")), "trains in training mode, measures"),
    "measured in training mode": (pair(("        model.eval()\n", "")), "trains in training mode, measures"),
    "eval for good": (
        pair(
            ("    for _ in range(epochs):\n        model.train()\n", "    model.train()\n    for _ in range(epochs):\n")
        ),
        "trains in training mode, measures",
    ),
    "gradients pile up": (pair(("            optimizer.zero_grad()\n", "")), "the training is that of the script"),
    "in place": (
        pair((_STANDARD, "    standard = images.sub_(mean).div_(std)\n")),
        "images and labels stay",
    ),
    "in place, put back": (
        pair(
            (_STANDARD, "    kept = images.clone()\n    standard = images.sub_(mean).div_(std)\n"),
            ("    return accuracies", "    images.copy_(kept)\n    return accuracies"),
        ),
        "images and labels stay",
    ),
    "old gradients": (
        pair(
            ("            optimizer.zero_grad()\n", ""),
            ("            optimizer.step()\n", "            optimizer.step()\n            optimizer.zero_grad()\n"),
        ),
        "the training is that of the script",
    ),
    "tensors": (pair(("correct.float().mean().item()", "correct.float().mean()")), "one float for each epoch"),
}


# ---- all

CHECKS = {
    "contrast": check.contrast,
    "SoftClip": check.soft_clip,
    "wrong_layer": check.wrong_layer,
    "verdicts": check.verdicts,
    "GROWTH": check.growth,
    "train_6": check.pair,
}
RIGHT = {
    "contrast": [contrast_by_norm, contrast_with_eps],
    "SoftClip": [ClipFromOutput, ClipByAutograd],
    "wrong_layer": [layer_by_jacobian, layer_of_defaults],
    "verdicts": [
        lambda: dict(reversed(check._VERDICTS.items())),
        lambda: {k: list(v) for k, v in check._VERDICTS.items()},
    ],
    "GROWTH": [
        (record_by_wrapping, confusion_by_einsum),
        (record_with_defaults, confusion_by_scatter),
    ],
    "train_6": [train_6_lazily, train_6_copy, pair(("std(dim=(0, 2, 3)", "std(correction=0, dim=(0, 2, 3)"))],
}
WRONG = {
    "contrast": WRONG_CONTRAST,
    "SoftClip": WRONG_FUNCTION,
    "wrong_layer": WRONG_LAYER,
    "verdicts": WRONG_WARD,
    "GROWTH": WRONG_GROWTH,
    "train_6": WRONG_PAIR,
}


class TestChecks(CheckProtocol):
    TOPIC = "15-09"
    IDLE = IDLE
    CHECKS, ANSWERS, STUBS = CHECKS, ANSWERS, STUBS
    RIGHT, WRONG = RIGHT, WRONG

    def hold_stand_in(self, name, stand_in):
        if name in ("SoftClip", "verdicts"):
            assert stand_in is None
        else:
            assert CHECKS[name].run(stand_in).status == "passed"
