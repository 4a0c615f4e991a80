"""The checks of 15-09 accept any mend that behaves, and reject what a student might really write."""

import re

import torch
import torch.nn.functional as F
from answer_variants import sources, variants
from check_protocol import CheckProtocol, idle
from torch import nn

from course.answers import answers, definitions
from course.exercise_form import student_source
from shared.checks import topic_15_09 as check

GIVEN = definitions("15-09", "patient")
ANSWERS = answers("15-09", given=GIVEN)
STUBS = answers("15-09", edit=student_source, given=GIVEN)
IDLE = idle("15-09", GIVEN)
SOURCES = sources("15-09")
NAMES = {
    "contrast": "contrast",
    "function": "SoftClip",
    "losses": "LOSSES",
    "loops": "LOOPS",
    "growth": "GROWTH",
    "pair": "train_9",
}
variant = variants("15-09", NAMES, ANSWERS)


def broken(cell, name):
    """A broken script, as the lesson's text shows it."""
    (script,) = re.findall(r"```python\n(.*?)```", SOURCES[cell], re.DOTALL)
    namespace = dict(ANSWERS)
    exec(compile(script, cell, "exec", dont_inherit=True), namespace)
    return namespace[name]


# ---------------------------------------------------------------- contrast

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


def contrast_exact_zero(images):
    v = contrast_variance(images)
    return torch.where(v == 0, 0.0, torch.where(v == 0, 1.0, v).sqrt())


def contrast_detached(images):
    return contrast_by_rows(images).detach() + 0 * images.sum(_DIMS)


def contrast_floor(images):
    """Uniform images get a small number."""
    v = contrast_variance(images)
    return torch.where(v < 1e-8, 1e-3, v.clamp(min=1e-8).sqrt())


def contrast_hook(images):
    """Drops the whole gradient if it has a NaN."""
    if images.requires_grad:
        images = images * 1
        images.register_hook(lambda g: torch.zeros_like(g) if g.isnan().any() else g)
    v = contrast_variance(images)
    return torch.where(v < 1e-9, 0.0, v.sqrt())


def contrast_offset(images):
    """Something is added behind the root."""
    c = contrast_by_rows(images)
    return torch.where(c > 0, c + 0.01, c)


def contrast_leaves_a_hook(images):
    """Mends the gradient at the caller's tensor."""
    if images.requires_grad:
        images.register_hook(lambda g: torch.nan_to_num(g, 0.0, 0.0, 0.0))
    return contrast_plain(images)


def contrast_writes(images):
    """Uniform images of the caller's get a first value of their own."""
    c = contrast_by_rows(images.clone())
    if images.requires_grad:
        images.data[(c == 0).nonzero().flatten(), 0, 0, 0] += 1e-6
    return c


def contrast_by_channel(images):
    """Takes an image of one colour for uniform."""
    flat = (images.amax((2, 3)) == images.amin((2, 3))).all(1)
    return torch.where(flat, 0.0, torch.where(flat, 1.0, contrast_variance(images)).sqrt())


def contrast_threshold(images):
    v = contrast_variance(images)
    return torch.where(v < 1.02e-6, 0.0, torch.where(v < 1.02e-6, 1.0, v).sqrt())


def contrast_half_slope(images):
    c = contrast_by_rows(images)
    return c / 2 + c.detach() / 2


WRONG_CONTRAST = {
    "the script's": (contrast_plain, "gradient 0"),
    "where behind the root": (contrast_where, "gradient 0[\\s\\S]*Hint 1"),
    "added behind the root": (contrast_offset, "the value is that of the formula"),
    "divided by n - 1": (contrast_unbiased, "the value is that of the formula"),
    "a large eps": (contrast_large_eps, "the value is that of the formula"),
    "detached": (contrast_detached, "the gradient is that of the formula"),
    "half of the slope": (contrast_half_slope, "the gradient is that of the formula"),
    "a floor for uniform images": (contrast_floor, "has the value 0"),
    "drops the batch's gradient": (contrast_hook, "gradient of another"),
    "a hook on the caller's tensor": (contrast_leaves_a_hook, "images stay as they were"),
    "writes into the images": (contrast_writes, "images stay as they were"),
    "one colour is uniform": (contrast_by_channel, "the value is that of the formula"),
    "a threshold above 0.001": (contrast_threshold, "the value is that of the formula"),
}

# ---------------------------------------------------------------- function


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


_SLOPE_LINE = "1 - t.square()"
WRONG_FUNCTION = {
    "the script's": (broken("script-2", "BrokenSoftClip"), "the gradient of x"),
    "slope from the output": (
        variant("function", (_SLOPE_LINE, "1 - (t * wide).square()")),
        "the gradient of x",
    ),
    "s without its second term": (
        variant("function", ("grad * (t - slope * x / wide)", "grad * t")),
        "the gradient of s",
    ),
    "sign of the second term": (
        variant("function", ("t - slope * x / wide", "t + slope * x / wide")),
        "the gradient of s[\\s\\S]*Hint 2",
    ),
    "summed over the batch only": (
        variant("function", ("second.sum(dim=others)", "second.sum(dim=0)")),
        "the gradient of s|no exception",
    ),
    "mean for sum": (variant("function", (".sum(dim=others)", ".mean(dim=others)")), "the gradient of s"),
    "no upstream gradient": (
        variant("function", ("return grad * slope if", "return slope if")),
        "the gradient of x",
    ),
    "forward clamps": (
        variant("function", ("return s * torch.tanh(x / s)", "return torch.maximum(torch.minimum(x, s), -s)")),
        "forward is",
    ),
    "tanh by exp": (
        variant(
            "function",
            ("return s * torch.tanh(x / s)", "e = torch.exp(2 * x / s)\n        return s * (e - 1) / (e + 1)"),
        ),
        "forward is",
    ),
    "s always": (variant("function", (" if needs[1] else None", "")), "gets None"),
    "x always": (variant("function", ("grad * slope if needs[0] else None", "grad * slope")), "gets None"),
    "on ctx": (
        variant(
            "function",
            ("ctx.save_for_backward(x, s)", "ctx.x, ctx.s = x, s"),
            ("x, s = ctx.saved_tensors", "x, s = ctx.x, ctx.s"),
        ),
        "save_for_backward",
    ),
    "in a list on ctx": (
        variant(
            "function",
            ("ctx.save_for_backward(x, s)", "ctx.kept = [(x, s)]"),
            ("x, s = ctx.saved_tensors", "x, s = ctx.kept[0]"),
        ),
        "save_for_backward",
    ),
    "in an object on ctx": (
        variant(
            "function",
            ("ctx.save_for_backward(x, s)", "ctx.kept = type('Kept', (), {})()\n        ctx.kept.both = x, s"),
            ("x, s = ctx.saved_tensors", "x, s = ctx.kept.both"),
        ),
        "held otherwise",
    ),
    "in a function on ctx": (
        variant(
            "function",
            (
                "return s * torch.tanh(x / s)",
                "t = torch.tanh(x / s)\n        ctx.tanh = lambda: t\n        return s * t",
            ),
            ("torch.tanh(x / wide), ctx.needs", "ctx.tanh(), ctx.needs"),
        ),
        "held otherwise",
    ),
    "on the class": (
        variant(
            "function",
            ("ctx.save_for_backward(x, s)", "ctx.save_for_backward(s)\n        SoftClip.kept[id(ctx)] = x"),
            ("x, s = ctx.saved_tensors", "(s,), x = ctx.saved_tensors, SoftClip.kept[id(ctx)]"),
            ('    """s · tanh', '    kept = {}\n    """s · tanh'),
        ),
        "held otherwise",
    ),
}

# ---------------------------------------------------------------- losses


def loss_3_mse(model, x, y):
    centred = x.sub(x.mean((0, 2, 3), keepdim=True))
    return F.mse_loss(model(centred), y[:, None])


def loss_3_rows(model, x, y):
    centred = x.clone()
    for c in range(x.shape[1]):
        centred[:, c] = x[:, c] - x[:, c].mean()
    outputs = model(centred)
    return torch.stack([(outputs[i].sum() - y[i]) ** 2 for i in range(len(y))]).mean()


def loss_4_topk(model, x, y):
    losses = -model(x).log_softmax(1).gather(1, y[:, None])[:, 0]
    weights = torch.cat([p.flatten() for p in model.parameters()])
    return losses.topk(-(-len(y) // 2)).values.mean() + 0.01 * weights.dot(weights)


def loss_4_stack(model, x, y):
    z = model(x)
    losses = sorted((F.cross_entropy(z[i], y[i]) for i in range(len(x))), key=lambda loss: loss.item(), reverse=True)
    kept = losses[: len(losses) - len(losses) // 2]
    return sum(kept) / len(kept) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())


_THREE = "    return (model(x).squeeze(1) - y).square().mean()"
WRONG_LOSSES = {
    "the scripts": (
        (broken("scripts-34", "broken_loss_3"), broken("scripts-34", "broken_loss_4")),
        "loss_3: the value",
    ),
    "script 4 as it was": ((loss_3_mse, broken("scripts-34", "broken_loss_4")), "loss_4: the gradients"),
    "in place, put back": (
        variant(
            "losses",
            (
                "    x = x - x.mean(dim=(0, 2, 3), keepdim=True)\n",
                "    x.data -= x.data.mean(dim=(0, 2, 3), keepdim=True)\n",
            ),
        ),
        "loss_3",
    ),
    "in place": (
        variant(
            "losses",
            (
                "    x = x - x.mean(dim=(0, 2, 3), keepdim=True)\n",
                "    x, whole = x - x.mean(dim=(0, 2, 3), keepdim=True), x\n    whole.data.copy_(x)\n",
            ),
        ),
        "loss_3: x and y stay",
    ),
    "y reshaped in place": (
        variant("losses", (_THREE, "    return (model(x) - y.unsqueeze_(1)).square().mean()")),
        "loss_3: x and y stay",
    ),
    "x needs a gradient afterwards": (
        variant("losses", ("    x = x - x.mean", "    x = x.requires_grad_()\n    x = x - x.mean")),
        "loss_3: x and y stay",
    ),
    "y needs a gradient afterwards": (
        variant("losses", ("    x = x - x.mean", "    y.requires_grad_()\n    x = x - x.mean")),
        "loss_3: x and y stay",
    ),
    "x keeps its gradient afterwards": (
        variant("losses", ("    losses = F", "    if x.requires_grad:\n        x.retain_grad()\n    losses = F")),
        "loss_4: x and y stay",
    ),
    "a hook on x": (
        variant(
            "losses",
            ("    losses = F", "    if x.requires_grad:\n        x.register_hook(torch.clone)\n    losses = F"),
        ),
        "loss_4: x and y stay",
    ),
    "broadcast": (variant("losses", ("model(x).squeeze(1) - y", "model(x) - y")), "loss_3: the value[\\s\\S]*Hint 1"),
    "shape (1,)": (variant("losses", (".square().mean()", ".square().mean().view(1)")), "loss_3: the value"),
    "not centred": (
        variant("losses", ("    x = x - x.mean(dim=(0, 2, 3), keepdim=True)\n", "")),
        "loss_3: the value",
    ),
    "centred by image": (variant("losses", ("dim=(0, 2, 3)", "dim=(2, 3)")), "loss_3: the value"),
    "mean detached": (
        variant("losses", ("x.mean(dim=(0, 2, 3), keepdim=True)", "x.detach().mean(dim=(0, 2, 3), keepdim=True)")),
        "loss_3: the gradients",
    ),
    "summed": (variant("losses", (".square().mean()", ".square().sum()")), "loss_3: the value"),
    "smaller half of an odd number": (
        variant("losses", ("(len(x) + 1) // 2", "max(len(x) // 2, 1)")),
        "loss_4: the value",
    ),
    "the easier half": (variant("losses", ("descending=True", "descending=False")), "loss_4: the value"),
    "penalty from .data": (variant("losses", ("p.square().sum()", "p.data.square().sum()")), "loss_4: the gradients"),
    "penalty of what learns": (
        variant("losses", ("for p in model.parameters())", "for p in model.parameters() if p.requires_grad)")),
        "loss_4: the value",
    ),
    "all that reach the median": (
        variant(
            "losses",
            (
                "hardest = losses.sort(descending=True).values[: (len(x) + 1) // 2]",
                "hardest = losses[losses >= losses.quantile(0.5)]",
            ),
        ),
        "loss_4: the value[\\s\\S]*the same",
    ),
    "penalty over buffers": (
        variant(
            "losses",
            ("p.square().sum() for p in model.parameters()", "p.square().sum() for p in model.state_dict().values()"),
        ),
        "loss_4: the value",
    ),
    "called twice": (
        variant("losses", ("    losses = F", "    model(x)\n    losses = F")),
        "loss_4: the model is called once",
    ),
    "called twice, past the hooks": (
        variant("losses", ("    losses = F", "    model.forward(x.detach())\n    losses = F")),
        "loss_4: the model is called once",
    ),
    "once more for a batch of one": (
        variant("losses", ("    return (model", "    if len(x) == 1:\n        model(x)\n    return (model")),
        "loss_3: the model is called once",
    ),
    "once more where x needs a gradient": (
        variant("losses", ("    losses = F", "    if x.requires_grad:\n        model(x)\n    losses = F")),
        "loss_4: the model is called once",
    ),
    "in training mode after loss_3": (
        variant(
            "losses", (_THREE, "    z = model(x)\n    model.train()\n    return (z.squeeze(1) - y).square().mean()")
        ),
        "loss_3: the model is called once",
    ),
    "unfreezes": (
        variant("losses", ("    losses = F", "    model.requires_grad_(True)\n    losses = F")),
        "loss_4: (the model is called once|the gradients)",
    ),
    "clears the gradients": (
        variant("losses", ("    losses = F", "    model.zero_grad()\n    losses = F")),
        "loss_4: the model is called once",
    ),
    "detached losses": (variant("losses", ("hardest.mean() +", "hardest.detach().mean() +")), "loss_4: the gradients"),
    "writes into x afterwards": (
        variant("losses", ("    hardest = ", "    x.data.mul_(2)\n    hardest = ")),
        "loss_4: x and y stay",
    ),
}

# ---------------------------------------------------------------- loops


def train_5_summed(model, optimizer, batches, every=2):
    """One backward a group, of the mean of its losses."""
    values = []
    for start in range(0, len(batches), every):
        group = [F.cross_entropy(model(x), y) for x, y in batches[start : start + every]]
        values += [loss.item() for loss in group]
        if len(group) == every:
            optimizer.zero_grad(set_to_none=False)
            torch.stack(group).mean().backward()
            optimizer.step()
    return values


def train_5_scaled(model, optimizer, batches, every=2):
    """Sums the gradients and divides them."""
    values = []
    for number, (x, y) in enumerate(batches):
        if number % every == 0:
            model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        values.append(loss.detach().tolist())
        if number % every == every - 1:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.div_(every)
            optimizer.step()
    return values


def train_6_function(model, optimizer, scheduler, batches, validation, epochs):
    def epoch():
        model.train()
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    @torch.inference_mode()
    def measure():
        model.eval()
        hits = int((model(validation[0]).argmax(-1) == validation[1]).sum())
        model.train()
        return hits / len(validation[1])

    optimizer.zero_grad()
    found = []
    while len(found) < epochs:
        epoch()
        found += [measure()]
        scheduler.step()
    return found


def loops(*changes):
    return variant("loops", *changes)


_BACKWARD = "            F.cross_entropy(model(x), y).b"
_CLEARS = "            optimizer.zero_grad()\n        scheduler"
_NO_GRAD = "        with torch.no_grad():\n            right = model(x).argmax(dim=1) == y\n"
WRONG_LOOPS = {
    "the scripts": (
        (broken("scripts-56", "broken_train_5"), broken("scripts-56", "broken_train_6")),
        "train_5: updates",
    ),
    "sum for mean": (loops(("(loss / every).backward()", "loss.backward()")), "train_5: updates"),
    "another default": (loops(("every: int = 2", "every: int = 1")), "train_5: updates"),
    "an update each batch": (loops(("if number % every == 0:", "if True:")), "train_5: updates"),
    "divided losses": (loops(("losses.append(loss.item())", "losses.append(loss.item() / every)")), "train_5: returns"),
    "losses as tensors": (loops(("losses.append(loss.item())", "losses.append(loss.detach())")), "train_5: returns"),
    "a tuple of losses": (loops(("    return losses", "    return tuple(losses)")), "train_5: returns"),
    "an update for what is left": (
        loops(
            (
                "    return losses",
                "    if number % every:\n        optimizer.step()\n        optimizer.zero_grad()\n    return losses",
            )
        ),
        "train_5: (updates|batches that are left over)",
    ),
    "clears after updates only": (
        loops(("    optimizer.zero_grad()\n    for number, (x, y)", "    for number, (x, y)")),
        "train_5: (batches that are left over|a gradient from before)",
    ),
    "clears at the end only": (
        loops(
            ("    optimizer.zero_grad()\n    for number, (x, y)", "    for number, (x, y)"),
            ("    return losses", "    optimizer.zero_grad()\n    return losses"),
        ),
        "train_5: a gradient from before the call",
    ),
    "clears at the start of the first call": (
        loops(
            (
                "    optimizer.zero_grad()\n    for number, (x, y)",
                "    if not optimizer.state:\n        optimizer.zero_grad()\n    for number, (x, y)",
            ),
        ),
        "train_5: batches that are left over",
    ),
    "the update with a larger rate": (
        loops(
            ("(loss / every).backward()", "loss.backward()"),
            (
                "            optimizer.step()\n            optimizer.zero_grad()\n    return losses",
                "            optimizer.param_groups[0]['lr'] /= every\n"
                "            optimizer.step()\n            optimizer.zero_grad()\n"
                "            optimizer.param_groups[0]['lr'] *= every\n    return losses",
            ),
        ),
        "train_5: updates",
    ),
    "losses of full groups only": (
        loops(("    return losses", "    return losses[: len(losses) - len(losses) % every]")),
        "train_5: returns",
    ),
    "train_5 in evaluation mode": (
        loops(
            (
                "    losses = []\n    optimizer.zero_grad()",
                "    losses = []\n    model.eval()\n    optimizer.zero_grad()",
            )
        ),
        "train_5: (updates|modes and frozen)",
    ),
    "evaluation mode behind train_5": (
        loops(("    return losses", "    model.eval()\n    return losses")),
        "train_5: modes and frozen",
    ),
    "unfrozen behind train_5": (
        loops(("    return losses", "    model.requires_grad_(True)\n    return losses")),
        "train_5: modes and frozen",
    ),
    "unfrozen behind train_6": (
        loops(("    return accuracies", "    model.requires_grad_(True)\n    return accuracies")),
        "train_6: weights and buffers",
    ),
    "an old gradient in train_6": (
        loops(
            ("            optimizer.zero_grad()\n            F.cross_entropy(model(x), y).b", _BACKWARD),
            ("            optimizer.step()\n        scheduler", "            optimizer.step()\n" + _CLEARS),
        ),
        "train_6: weights and buffers",
    ),
    "autograd off for good": (
        loops(
            (
                "        with torch.no_grad():\n            right = model(x).argmax(dim=1) == y\n",
                "        torch.set_grad_enabled(False)\n        right = model(x).argmax(dim=1) == y\n",
            ),
            (
                "        model.train()\n        for x, y in batches:",
                "        model.train()\n        torch.set_grad_enabled(True)\n        for x, y in batches:",
            ),
        ),
        "train_6: measures[\\s\\S]*autograd is on",
    ),
    "script 6 as it was": ((train_5_summed, broken("scripts-56", "broken_train_6")), "train_6: the scheduler"),
    "scheduler before the epoch": (
        loops(
            (
                "        model.train()\n        for x, y in batches:",
                "        model.train()\n        scheduler.step()\n        for x, y in batches:",
            ),
            ("        scheduler.step()\n        x, y = validation", "        x, y = validation"),
        ),
        "train_6: the scheduler",
    ),
    "no scheduler": (loops(("        scheduler.step()\n", "")), "train_6: the scheduler"),
    "stays in evaluation mode": (
        loops(
            (
                "        accuracies.append(right.float().mean().item())\n        model.train()\n",
                "        accuracies.append(right.float().mean().item())\n",
            ),
            ("        model.train()\n        for x, y in batches:", "        for x, y in batches:"),
        ),
        "train_6: trains in training mode[\\s\\S]*Hint 2",
    ),
    "training in the mode it finds": (
        loops(("        model.train()\n        for x, y in batches:", "        for x, y in batches:")),
        "train_6: trains in training mode",
    ),
    "the children in training mode": (
        loops(
            (
                "        model.train()\n        for x, y in batches:",
                "        for child in model.children():\n            child.train()\n        for x, y in batches:",
            )
        ),
        "train_6: trains in training mode",
    ),
    "no step after the last epoch": (
        loops(
            ("        scheduler.step()\n", "        if len(accuracies) < epochs - 1:\n            scheduler.step()\n")
        ),
        "train_6: the scheduler",
    ),
    "only the root in training mode": (
        loops(
            (
                "        model.train()\n        for x, y in batches:",
                "        model.training = True\n        for x, y in batches:",
            ),
        ),
        "train_6: trains in training mode",
    ),
    "measured in training mode": (loops(("        model.eval()\n", "")), "train_6: measures"),
    "measured with a graph": (loops((_NO_GRAD, "        right = model(x).argmax(dim=1) == y\n")), "train_6: measures"),
    "accuracies as tensors": (
        loops(("accuracies.append(right.float().mean().item())", "accuracies.append(right.float().mean())")),
        "train_6: returns",
    ),
    "percent": (loops(("right.float().mean().item()", "100 * right.float().mean().item()")), "train_6: returns"),
    "the last accuracy": (loops(("    return accuracies", "    return accuracies[-1:]")), "train_6: returns"),
    "gradients pile up": (
        loops(("        for x, y in batches:\n            optimizer.zero_grad()\n", "        for x, y in batches:\n")),
        "train_6: weights and buffers",
    ),
    "looks at the validation data in training": (
        loops(
            (
                "        scheduler.step()\n",
                "        scheduler.step()\n        with torch.no_grad():\n"
                "            model.body[1](model.body[0](validation[0]))\n",
            )
        ),
        "train_6: weights and buffers",
    ),
    "ends in evaluation mode": (
        loops(
            (
                "        accuracies.append(right.float().mean().item())\n        model.train()\n",
                "        accuracies.append(right.float().mean().item())\n",
            )
        ),
        "train_6: leaves the model in training mode",
    ),
}

# ---------------------------------------------------------------- growth


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


def confusion_by_product(logits, y):
    classes = logits.size(1)
    true, found = ((t[:, None] == torch.arange(classes, device=t.device)).float() for t in (y, logits.argmax(1)))
    return (true.T @ found).long()


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


def growth(*changes):
    return variant("growth", *changes)


_NOTE = "found[name].append(out.detach().abs().mean().item())"
_FINALLY = "    finally:\n        for handle in handles:\n            handle.remove()\n"
_RUN = "        with torch.no_grad():\n            for x, _ in batches:\n                model(x)\n"
_BIN = "counts.index_add_(0, pairs, torch.ones_like(pairs))"
WRONG_GROWTH = {
    "the scripts": (
        (broken("scripts-78", "broken_record_7"), broken("scripts-78", "broken_confusion_8")),
        "record_7: one list for each leaf",
    ),
    "all modules": (growth((" if not list(m.children())", "")), "record_7: one list for each leaf"),
    "late name": (
        growth(
            (
                "register_forward_hook(partial(note, name=name))",
                "register_forward_hook(lambda m, a, out: note(m, a, out, name))",
            ),
            (
                "handles = [m.register_forward_hook(lambda m, a, out: note(m, a, out, name)) "
                "for name, m in leaves.items()]",
                "handles = []\n    for name, m in leaves.items():\n"
                "        handles.append(m.register_forward_hook(lambda m, a, out: note(m, a, out, name)))",
            ),
        ),
        "record_7: one float for each batch",
    ),
    "last batch only": (
        growth((_NOTE, "found[name] = [out.detach().abs().mean().item()]")),
        "record_7: one float for each batch",
    ),
    "signed mean": (growth((".abs().mean().item()", ".mean().item()")), "record_7: one float for each batch"),
    "tensors for floats": (
        growth((_NOTE, "found[name].append(out.detach().abs().mean())")),
        "record_7: one float for each batch",
    ),
    "numbers at the end": (
        growth(
            (_NOTE, "found[name].append(out)"),
            ("    return found\n", "    return {k: [o.abs().mean().item() for o in v] for k, v in found.items()}\n"),
        ),
        "record_7: no output is alive",
    ),
    "the last output stays": (
        growth((_NOTE, _NOTE + "\n        note.last = out")),
        "record_7: no output is alive",
    ),
    "in evaluation mode": (growth((_RUN, "        model.eval()\n" + _RUN)), "record_7: the modes stay"),
    "in training mode afterwards": (
        growth((_FINALLY, _FINALLY + "        model.train()\n")),
        "record_7: the modes stay",
    ),
    "hooks stay": (
        growth(("            handle.remove()\n", "            pass\n")),
        "record_7: (its hooks are gone|one float)",
    ),
    "hooks stay after an exception": (
        growth((_FINALLY, "        for handle in handles:\n            handle.remove()\n    finally:\n        pass\n")),
        "record_7: its hooks are gone[\\s\\S]*raised",
    ),
    "clears everybody's hooks": (
        growth(
            (
                "            handle.remove()\n",
                "            handle.remove()\n        for m in leaves.values():\n"
                "            m._forward_hooks.clear()\n",
            )
        ),
        "record_7: its hooks are gone",
    ),
    "swallows": (
        growth(("    finally:\n", "    except BaseException:\n        pass\n    finally:\n")),
        "record_7: the exception goes on",
    ),
    "transposed": (
        growth(("y * classes + logits.argmax(dim=1)", "logits.argmax(dim=1) * classes + y")),
        "confusion_8: the counts",
    ),
    "fails without images": (
        growth(("    pairs = ", "    assert logits.max() is not None\n    pairs = ")),
        "confusion_8: the counts",
    ),
    "always on the CPU": (growth((", device=logits.device", "")), "confusion_8: the counts are on"),
    "bincount": (
        growth((f"    return {_BIN}", "    return torch.bincount(pairs, minlength=classes * classes)")),
        "confusion_8: (Python reads no value|the counts)",
    ),
    "keeps detached outputs": (
        growth(
            (_NOTE, "found[name].append(out.detach())"),
            ("    return found\n", "    return {k: [o.abs().mean().item() for o in v] for k, v in found.items()}\n"),
        ),
        "record_7: no output is alive",
    ),
    "keeps copies": (
        growth(
            (_NOTE, "found[name].append(out.abs())"),
            ("    return found\n", "    return {k: [o.mean().item() for o in v] for k, v in found.items()}\n"),
        ),
        "record_7: no output is alive",
    ),
    "a model that is a leaf is left out": (
        growth(("if not list(m.children())}", "if name and not list(m.children())}")),
        "record_7: one list for each leaf",
    ),
    "ties count twice": (
        growth(
            (
                f"    return {_BIN}.view(classes, classes)\n",
                "    hit = (logits == logits.amax(1, keepdim=True)).float()\n"
                "    true = (y[:, None] == torch.arange(classes, device=y.device)).float()\n"
                "    return (true.T @ hit).long()\n",
            ),
        ),
        "confusion_8: the counts are right",
    ),
    "in bfloat16": (
        growth(
            (
                f"    return {_BIN}.view(classes, classes)\n",
                "    true, hit = ((t[:, None] == torch.arange(classes, device=y.device)).bfloat16()\n"
                "                 for t in (y, logits.argmax(1)))\n"
                "    return (true.T @ hit).long()\n",
            ),
        ),
        "confusion_8: the counts are right",
    ),
    "prints": (growth(("    pairs = ", "    str(y)\n    pairs = ")), "confusion_8: Python reads no value"),
    "no hooks after Ctrl-C": (
        growth(
            (_FINALLY, "    except Exception:\n        pass\n    for handle in handles:\n        handle.remove()\n")
        ),
        "record_7: (its hooks are gone|the exception)",
    ),
    "floats": (growth((".view(classes, classes)", ".view(classes, classes).float()")), "confusion_8: the counts"),
    "a loop over classes": (
        growth(
            (
                f"    return {_BIN}.view(classes, classes)\n",
                "    rows = [(pairs == i).sum() for i in range(classes * classes)]\n"
                "    return torch.stack(rows).view(classes, classes)\n",
            )
        ),
        "confusion_8: at most 20 operations",
    ),
    "one list": (
        growth(("    counts = ", "    pairs = torch.tensor(pairs.tolist(), dtype=torch.int64)\n    counts = ")),
        "confusion_8: (Python reads no value|at most 20|the counts|the answer runs)",
    ),
    "one_hot": (
        growth((f"    return {_BIN}", "    F.one_hot(y, classes)\n    return " + _BIN)),
        "confusion_8: (Python reads no value|the counts)",
    ),
    "asks for the largest": (
        growth(("    pairs = ", "    assert not len(y) or int(y.max()) < classes\n    pairs = ")),
        "confusion_8: Python reads no value",
    ),
}

# ---------------------------------------------------------------- pair


def train_9_lazily(model, optimizer, images, labels, epochs, held):
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


def train_9_copy(model, optimizer, images, labels, epochs, held):
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
        hits = 0
        with torch.no_grad():
            for x, y in zip(images[:held].split(50), labels[:held].split(50), strict=True):
                hits += (model(x).argmax(1) == y).sum().item()
        accuracies.append(hits / held)
    return accuracies


def train_9_by_count(model, optimizer, images, labels, epochs, held):
    """The deviation divides by the count: the task doesn't say which one."""
    rest = images[held:]
    mean = rest.mean(dim=(0, 2, 3), keepdim=True)
    variance = rest.var(dim=(0, 2, 3), correction=0, keepdim=True)
    standard = (images - mean) * variance.rsqrt()
    accuracies = []
    for _ in range(epochs):
        model.train()
        for x, y in zip(standard[held:].split(64), labels[held:].split(64), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found = model(standard[:held]).argmax(dim=1)
        accuracies.append((found == labels[:held]).float().mean().item())
    return accuracies


def pair(*changes):
    return variant("pair", *changes)


_STANDARD = "    standard = (images - mean) / std\n"
WRONG_PAIR = {
    "the script's": (broken("script-9", "broken_train_9"), "the batches are those of the script[\\s\\S]*Hint 1"),
    "held images as bytes": (
        pair(("model(standard[:held])", "model(images[:held])")),
        "the held images[\\s\\S]*Hint 2",
    ),
    "held images twice": (pair(("model(standard[:held])", "model((standard[:held] - mean) / std)")), "the held images"),
    "held images by their own": (
        pair(("model(standard[:held])", "model((images[:held] - images[:held].mean((0, 2, 3), keepdim=True)) / std)")),
        "the held images",
    ),
    "held images by another deviation": (
        pair(
            ("model(standard[:held])", "model((images[:held] - mean) / other)"),
            (_STANDARD, _STANDARD + "    other = images[held:].std(dim=(0, 2, 3), keepdim=True, correction=0)\n"),
        ),
        "the held images",
    ),
    "mean over all": (pair(("mean = images[held:]", "mean = images")), "the batches are"),
    "each image by itself": (
        pair(("(images - mean) / std", "(images - images.mean((2, 3), keepdim=True)) / std")),
        "the batches are",
    ),
    "each batch by its own mean": (
        pair(
            ("x, y = standard[start : start + 64],", "x, y = images[start : start + 64], "),
            ("F.cross_entropy(model(x), y)", "F.cross_entropy(model((x - x.mean((0, 2, 3), keepdim=True)) / std), y)"),
        ),
        "the batches are",
    ),
    "no deviation": (pair((_STANDARD, "    standard = images - mean\n")), "the batches are"),
    "the last batch dropped": (
        pair(("range(held, len(images), 64)", "range(held, len(images) - 63, 64)")),
        "the batches are",
    ),
    "shuffled": (
        pair(
            (
                _STANDARD,
                _STANDARD + "    order = torch.cat([torch.arange(held), held + torch.randperm(len(images) - held)])\n"
                "    standard, labels = standard[order], labels[order]\n",
            )
        ),
        "the batches are",
    ),
    "measured in training mode": (pair(("        model.eval()\n", "")), "trains in training mode, measures"),
    "eval for good": (
        pair(
            ("    for _ in range(epochs):\n        model.train()\n", "    model.train()\n    for _ in range(epochs):\n")
        ),
        "trains in training mode, measures",
    ),
    "gradients pile up": (pair(("            optimizer.zero_grad()\n", "")), "the training is that of the script"),
    "labels of the held": (
        pair(("labels[start : start + 64]", "labels[start - held : min(start + 64, len(images)) - held]")),
        "the training is that",
    ),
    "in place once": (
        pair((_STANDARD, "    images -= mean\n    images /= std\n    standard = images\n")),
        "images and labels stay",
    ),
    "in place, put back": (
        pair(
            (_STANDARD, "    kept = images.clone()\n    images -= mean\n    images /= std\n    standard = images\n"),
            ("    return accuracies", "    images.copy_(kept)\n    return accuracies"),
        ),
        "images and labels stay[\\s\\S]*changed images",
    ),
    "old gradients": (
        pair(
            ("            optimizer.zero_grad()\n", ""),
            ("            optimizer.step()\n", "            optimizer.step()\n            optimizer.zero_grad()\n"),
        ),
        "the training is that of the script",
    ),
    "in float32": (
        pair((_STANDARD, "    standard = ((images - mean) / std).float().to(images.dtype)\n")),
        "the batches are",
    ),
    "autograd off for good": (
        pair(
            (
                "        with torch.no_grad():\n            right",
                "        torch.set_grad_enabled(False)\n        right",
            ),
            ("        model.train()\n", "        model.train()\n        torch.set_grad_enabled(True)\n"),
        ),
        "the training is[\\s\\S]*autograd is on",
    ),
    "put back with rounding": (
        pair(
            (
                _STANDARD,
                "    images.sub_(mean).div_(std)\n    standard = images.clone()\n    images.mul_(std).add_(mean)\n",
            )
        ),
        "images and labels stay",
    ),
    "tensors": (pair(("right.float().mean().item()", "right.float().mean()")), "one float for each epoch"),
    "the last one": (pair(("    return accuracies", "    return accuracies[-1]")), "one float for each epoch"),
    "errors for accuracies": (
        pair(("right.float().mean().item()", "1 - right.float().mean().item()")),
        "one float for each epoch",
    ),
}


# ---------------------------------------------------------------- all

CHECKS = {
    "contrast": check.contrast,
    "SoftClip": check.soft_clip,
    "LOSSES": check.losses,
    "LOOPS": check.loops,
    "GROWTH": check.growth,
    "train_9": check.pair,
}
RIGHT = {
    "contrast": [contrast_by_norm, contrast_with_eps, contrast_by_rows, contrast_exact_zero, check._contrast],
    "SoftClip": [ClipFromOutput, ClipByAutograd],
    "LOSSES": [(loss_3_mse, loss_4_topk), (loss_3_rows, loss_4_stack)],
    "LOOPS": [(train_5_summed, train_6_function), (train_5_scaled, ANSWERS["train_6"])],
    "GROWTH": [
        (record_by_wrapping, confusion_by_product),
        (record_with_defaults, confusion_by_scatter),
        (record_with_defaults, confusion_by_einsum),
    ],
    "train_9": [train_9_lazily, train_9_copy, train_9_by_count],
}
WRONG = {
    "contrast": WRONG_CONTRAST,
    "SoftClip": WRONG_FUNCTION,
    "LOSSES": WRONG_LOSSES,
    "LOOPS": WRONG_LOOPS,
    "GROWTH": WRONG_GROWTH,
    "train_9": WRONG_PAIR,
}


class TestChecks(CheckProtocol):
    TOPIC = "15-09"
    IDLE = IDLE
    CHECKS, ANSWERS, STUBS = CHECKS, ANSWERS, STUBS
    RIGHT, WRONG = RIGHT, WRONG

    def hold_stand_in(self, name, stand_in):
        if name in ("contrast", "GROWTH", "train_9"):
            assert CHECKS[name].run(stand_in).status == "passed"
        else:
            assert stand_in is None


def test_a_model_that_is_a_leaf_is_recorded():
    found = ANSWERS["record_7"](nn.Linear(3, 2), [(torch.ones(2, 3), None)])
    assert list(found) == [""]
    assert len(found[""]) == 1
