"""Checks of the exercises in 15-09, Debugging PyTorch Models."""

import copy
import gc
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn, profiler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.checks.exercise import exercise
from shared.checks.trial import Trial

# ---------------------------------------------------------------- 15-09.1


def _contrast(images: Tensor) -> Tensor:
    """Stand-in of exercise 1."""
    uniform = images.amax(dim=(1, 2, 3)) == images.amin(dim=(1, 2, 3))
    variance = images.var(dim=(1, 2, 3), correction=0)
    return torch.where(uniform, 0.0, torch.where(uniform, 1.0, variance).sqrt())


def _images(n: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random images whose contrasts reach from 0.0012 to 40."""
    spread = torch.logspace(-2.999, 1.6, n, dtype=torch.float64)[torch.randperm(n)]
    images = torch.randn(n, *shape, dtype=torch.float64)
    images /= images.std(dim=(1, 2, 3), correction=0, keepdim=True)
    return (images * spread.view(-1, 1, 1, 1) + torch.rand(n, 1, 1, 1)).to(dtype)


def _slopes(images: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Values and gradient of (weights · contrast) by the formula, in float64."""
    x = images.detach().double()
    centred = x - x.mean(dim=(1, 2, 3), keepdim=True)
    value = centred.square().mean(dim=(1, 2, 3)).sqrt()
    scale = (weights.double() / value / x[0].numel()).view(-1, 1, 1, 1)
    return value, centred * scale


def _gradient(answer: Callable[[Tensor], Tensor], images: Tensor, weights: Tensor) -> Tensor:
    x = images.detach().clone().requires_grad_()
    (answer(x) * weights).sum().backward()
    return torch.zeros_like(x) if x.grad is None else x.grad


@exercise(
    "15-09.1",
    "A NaN in the second step",
    points=10,
    demands=6,
    stand_in=lambda: _contrast,
    stand_in_name="one of the check's",
)
def contrast(trial: Trial, answer: Any) -> None:
    """`answer(images)` gives each image's deviation, with a gradient of 0 at uniform images."""
    cases = [((3, 8, 8), torch.float32, 6), ((1, 5, 7), torch.float64, 4), ((3, 32, 32), torch.float32, 1)]
    batches = [(_images(n, shape, dtype), torch.randn(n, dtype=dtype)) for shape, dtype, n in cases]
    wide = torch.randn(4, 6, 6, 3).permute(0, 3, 1, 2)  # not contiguous
    wide[0, 0], wide[1, :, 0], wide[1, :, -1] = 0.5, 0.25, 0.25  # a flat channel, flat borders
    wide[2] = torch.tensor([0.9, 0.1, 0.2]).view(-1, 1, 1)  # one colour, and not uniform
    batches.append((wide, torch.randn(4)))
    with trial.group("the value is that of the formula", hint="compare with broken_contrast, image by image"):
        for images, _ in batches:
            want = _slopes(images, torch.ones(len(images)))[0].to(images.dtype)
            trial.close(f"images {tuple(images.shape)}", answer(images), want, rtol=1e-3, atol=0.0)
    with trial.group("the gradient is that of the formula", hint="what is the slope of your value?"):
        for images, weights in batches:
            want = _slopes(images, weights)[1].to(images.dtype)
            got = _gradient(answer, images, weights)
            floor = 1e-3 * want.abs().amax().item()
            trial.close(f"images {tuple(images.shape)}", got, want, rtol=1e-3, atol=floor)
    levels = [0.0, 0.5, -2.0, 0.3, 0.1, 1.7, -0.9]
    flat = torch.tensor(levels).view(-1, 1, 1, 1).repeat(1, 3, 32, 32)
    item = "a uniform image has the value 0"
    with trial.group(item, hint="take a uniform image through your lines: which one gives this value?"):
        trial.close("uniform images", answer(flat), torch.zeros(len(flat)), atol=1e-4)
        trial.close("one black image", answer(flat[:1]), torch.zeros(1), atol=1e-4)
    with trial.group("a uniform image has the gradient 0", see=1):
        for dtype in (torch.float32, torch.float64):
            got = _gradient(answer, flat[:3].to(dtype), torch.ones(3, dtype=dtype))
            trial.close(f"uniform images, {dtype}", got, torch.zeros_like(got), atol=1e-4)
        odd = torch.rand(40, 1, 1, 1).repeat(1, 3, 5, 7)
        got = _gradient(answer, odd, torch.ones(len(odd)))
        trial.close("uniform images of other values", got, torch.zeros_like(got), atol=1e-4)
    item = "an image doesn't change the gradient of another"
    with trial.group(item, hint="what does your answer do to the whole batch where one image is uniform?"):
        images, weights = batches[0]
        mixed = torch.cat([images[:2], torch.zeros(1, 3, 8, 8), images[2:]])
        got = _gradient(answer, mixed, torch.cat([weights[:2], torch.ones(1), weights[2:]]))
        want = _gradient(answer, images, weights)
        floor = 1e-3 * want.abs().amax().item()
        trial.close("with a black image", torch.cat([got[:2], got[3:]]), want, rtol=1e-3, atol=floor)
    with trial.group("images stay as they were", hint="what do you do to the caller's tensor itself?", free=True):
        for images in (mixed, flat):
            x = images.clone().requires_grad_()
            answer(x).sum().backward()
            trial.equal("values", x.detach(), images)
            x.grad, later = None, torch.randn_like(images)
            later[0, 0, 0, 0], later[0, 0, 0, 1] = torch.nan, torch.inf
            x.backward(later)
            case = "images.grad, when a gradient with NaN and Inf comes to images another way later"
            trial.equal(case, x.grad, later)


# ---------------------------------------------------------------- 15-09.2


def _soft_clip(x: Tensor, s: Tensor) -> Tensor:
    wide = s.view(-1, *[1] * (x.dim() - 2))
    return wide * torch.tanh(x / wide)


def _tensors_in(value: object) -> bool:
    if isinstance(value, list | tuple | set):
        return any(map(_tensors_in, value))
    return _tensors_in(list(value.values())) if isinstance(value, dict) else isinstance(value, Tensor)


@exercise("15-09.2", "A backward that almost works", points=15, demands=5)
def soft_clip(trial: Trial, answer: Any) -> None:
    """`answer.apply(x, s)` is s · tanh(x / s) with its own backward; autograd of the formula says what is right."""
    seen: list[tuple[Any, Any]] = []

    def spy(ctx: Any, *grads: Tensor) -> Any:
        found = answer.backward(ctx, *grads)
        seen.append((ctx, found))
        return found

    watched = type("Watched", (answer,), {"backward": staticmethod(spy)})
    shapes = [(4, 3), (2, 3, 5), (2, 1, 3, 2), (1, 4, 2, 3), (3, 2, 2, 1, 2), (1, 1)]
    cases = []
    for number, shape in enumerate(shapes):
        dtype = torch.float32 if number % 3 == 1 else torch.float64
        x = 3 * torch.randn(shape, dtype=dtype)
        if number == 3:
            x = torch.randn(1, 2, 3, 4, dtype=dtype).permute(0, 3, 1, 2)
        x[..., 0] *= 1000 if number == 2 else 1  # far beyond the bound
        cases.append((x, 0.3 + 2 * torch.rand(x.shape[1], dtype=dtype)))

    def both(function: Callable, x: Tensor, s: Tensor, summed: bool) -> list[Tensor]:
        x, s = x.detach().clone().requires_grad_(), s.detach().clone().requires_grad_()
        y = function(x, s)
        torch.manual_seed(3)
        upstream = torch.randn_like(y)
        (y.sum() if summed else (y * upstream).sum()).backward()
        return [torch.zeros(0) if t.grad is None else t.grad for t in (x, s)]

    def shown(x: Tensor) -> str:
        return f"x {tuple(x.shape)}" + ", in part far beyond s" * bool(x.abs().amax() > 100)

    with trial.group("forward is s · tanh(x / s)", hint="compare with the formula; s is one number for each channel"):
        for x, s in cases:
            trial.close(shown(x), answer.apply(x, s), _soft_clip(x, s), rtol=1e-5)
    for place, name, see in ((0, "x", 1), (1, "s", 2)):
        hint = "run numerical_gradcheck on such x and s, in float64"
        with trial.group(f"the gradient of {name} is right", hint=hint, see=see):
            for summed in (True, False):
                for x, s in cases:
                    got, want = (both(f, x, s, summed)[place] for f in (answer.apply, _soft_clip))
                    loose = {"rtol": 1e-4, "atol": 1e-5} if x.dtype == torch.float32 else {}
                    trial.close(shown(x), got, want, **loose)
    item = "an input that needs no gradient gets None"
    with trial.group(item, hint="what does ctx say of what is needed?"):
        x, s = cases[0]
        for needs_x in (True, False):
            seen.clear()
            watched.apply(x.clone().requires_grad_(needs_x), s.clone().requires_grad_(not needs_x)).sum().backward()
            found = seen[0][1]
            got = tuple("a gradient" if t is not None else "None" for t in found) if isinstance(found, tuple) else found
            which = "x" if needs_x else "s"
            want = tuple("a gradient" if needs else "None" for needs in (needs_x, not needs_x))
            trial.equal(f"what backward returns for x and for s, where only {which} needs a gradient", got, want)
    kept = vars(seen[0][0])
    with trial.group("tensors are kept with save_for_backward", hint="how do the Functions of section 2 keep theirs?"):
        trial.equal("tensors among the attributes of ctx", [name for name in kept if _tensors_in(kept[name])], [])
        pairs = [[t.clone().requires_grad_() for t in case] for case in cases[::3][:2]]
        outputs = [answer.apply(*pair) for pair in pairs]  # both before the first backward
        for output, (x, s) in zip(outputs, pairs, strict=True):
            output.sum().backward()
            trial.close("x, two calls before backward", x.grad, both(_soft_clip, x, s, True)[0])
        for needs in ((True, True), (True, False), (False, True)):
            leaves = [t.clone().requires_grad_(n) for t, n in zip(cases[1], needs, strict=True)]
            output, held = _given_away(answer.apply, leaves)
            wanted = " and ".join(name for name, n in zip("xs", needs, strict=True) if n)
            trial.equal(f"tensors that are held otherwise, for the gradient of {wanted}", held, 0)
            output.sum().backward()
            if needs[0]:
                want = both(_soft_clip, *leaves, True)[0]
                trial.close("x, from copies of what was saved", leaves[0].grad, want, rtol=1e-4, atol=1e-5)


def _given_away(function: Callable, leaves: Sequence[Tensor]) -> tuple[Tensor, int]:
    """function(...) of tensors that nobody holds, what it saves kept as copies; how much else is alive after it."""
    copies: list[Tensor] = []

    def pack(t: Tensor) -> int:
        copies.append(t.detach().clone())
        return len(copies) - 1

    def alive() -> int:
        known = {StorageWeakRef(t.untyped_storage()).cdata for t in (output, *copies)}
        return len({one.cdata for one in born.seen if not one.expired()} - known)

    with torch.autograd.graph.saved_tensors_hooks(pack, copies.__getitem__), _Born(0) as born:
        output = function(*[t.clone() for t in leaves])
    if alive():
        gc.collect()  # what a cycle of objects holds
    return output, alive()


# ---------------------------------------------------------------- 15-09.3


def _loss_3(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """By brute force, one image after the other."""
    means = [sum(x[i, c].mean() for i in range(len(x))) / len(x) for c in range(x.shape[1])]
    centred = torch.stack([torch.stack([row[c] - means[c] for c in range(x.shape[1])]) for row in x])
    out = model(centred)
    return sum((out[i, 0] - y[i]) ** 2 for i in range(len(x))) / len(x)


def _loss_4(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = model(x)
    losses = [torch.logsumexp(z[i], 0) - z[i, y[i]] for i in range(len(x))]
    largest = sorted(losses, key=lambda loss: -loss.item())[: len(x) // 2 + len(x) % 2]
    penalty = sum((p * p).sum() for p in model.parameters())
    return sum(largest) / len(largest) + 0.01 * penalty


def _half_frozen(outputs: int, dtype: torch.dtype) -> nn.Module:
    """A small net in which one layer learns nothing, with a smooth activation."""
    frozen = nn.Conv2d(2, 3, 2).requires_grad_(False)
    parts = [frozen, nn.Tanh(), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, outputs)]
    return _Counted(*parts).to(dtype)


class _Counted(nn.Sequential):
    """Notes each call, also one that goes round the hooks."""

    calls: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += (len(x),)
        return super().forward(x)


def _given(t: Tensor, kind: str) -> Tensor:
    """A copy that is a constant, a leaf that needs a gradient, or the result of an operation on one."""
    if kind == "a constant":
        return t.clone()
    leaf = t.clone().requires_grad_()
    return leaf if kind == "a leaf that needs a gradient" else leaf.clone()


def _marks(t: Tensor) -> dict[str, object]:
    marks = {name: getattr(t, name) for name in ("requires_grad", "is_leaf", "retains_grad")}
    return marks | {"hooks": len(t._backward_hooks or ())}


def _graded(loss: Callable, model: nn.Module, x: Tensor, y: Tensor, wanted: bool) -> tuple[Tensor, dict[str, Any]]:
    x, y = x.clone().requires_grad_(wanted), y.clone()
    model.zero_grad()
    value = loss(model, x, y)
    if value.requires_grad:
        value.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad} | (
        {"x": x.grad} if wanted else {}
    )
    shown = {name: None if grad is None else grad.clone() for name, grad in grads.items()}
    return value, shown


@exercise("15-09.3", "Two losses that train something else", points=15, demands=8)
def losses(trial: Trial, answer: Any) -> None:
    """`answer` holds loss_3 and loss_4, called with (model, x, y)."""
    cases = [(5, torch.float64), (2, torch.float32), (1, torch.float64), (4, torch.float64), (7, torch.float32)]
    for name, ours, reference, outputs in (
        ("loss_3", answer[0], _loss_3, 1),
        ("loss_4", answer[1], _loss_4, 4),
    ):
        data = []
        for n, dtype in cases:
            x = (torch.randn(n, 2, 3, 3, dtype=torch.float64) + 0.5).to(dtype)
            y = torch.randn(n, dtype=torch.float64).to(dtype) if outputs == 1 else torch.randint(4, (n,))
            data.append((_half_frozen(outputs, dtype), x, y))
        model, x, y = data[0]
        ties = (model, torch.cat([x[:1]] * 4 + [x[1:2]]), torch.cat([y[:1]] * 4 + [y[1:2]]))
        item = f"{name}: the value is that of the docstring"
        hint = "work the value out by hand for so many images, with the shapes"
        if outputs > 1:
            hint = "work the value out by hand for so many images: which of their losses, which parameters?"
        with trial.group(item, hint=hint, see=None if outputs > 1 else 1):
            for model, x, y in [*data, ties]:
                got, want = (_graded(f, model, x, y, False)[0].detach() for f in (ours, reference))
                case = f"{len(x)} images" + ", four of them the same" * (x is ties[1])
                trial.close(case, got, want, rtol=1e-4)
        item = f"{name}: the gradients are those of the docstring"
        hint = "which of them has no gradient, or a part of it?"
        with trial.group(item, hint=hint, see=1):
            for wanted in (False, True):
                for model, x, y in data:
                    got, want = (_graded(f, model, x, y, wanted)[1] for f in (ours, reference))
                    for key in want:
                        see = 2 if got[key] is None and outputs > 1 else 1
                        case = f"{len(x)} images, the gradient of {key}"
                        trial.close(case, got[key], want[key], rtol=1e-3, atol=1e-5, hint=hint, see=see)
        item = f"{name}: x and y stay as they were"
        with trial.group(item, hint="which line does something to the caller's own tensor?", free=True):
            for model, x, y in data:
                for kind in ("a constant", "a leaf that needs a gradient", "a result that needs a gradient"):
                    given = (_given(x, kind), y.clone())
                    marks = [_marks(t) for t in given]
                    ours(model, *given)
                    trial.equal(f"x of {len(x)} images, {kind}", given[0].detach(), x)
                    trial.equal(f"y of {len(x)} images", given[1].detach(), y)
                    trial.equal(f"x of {len(x)} images, {kind}", _marks(given[0]), marks[0])
                    trial.equal(f"y of {len(x)} images", _marks(given[1]), marks[1])
        item = f"{name}: the model is called once and stays as it was"
        with trial.group(item, hint="what else does your answer do with the model?"):
            for training, wanted in itertools.product((True, False), repeat=2):
                for model, x, y in data:
                    model.train(training)
                    for p in model.parameters():
                        p.grad = torch.full_like(p, 2.0)
                    model.calls = ()
                    ours(model, x.clone().requires_grad_(wanted), y.clone())
                    trial.equal("images in each call of the model", model.calls, (len(x),))
                    modes = [m.training for m in model.modules()]
                    trial.equal("training mode of the model and of each layer", modes, [training] * 6)
                    named = dict(model.named_parameters())
                    learns = {name: p.requires_grad for name, p in named.items()}
                    trial.equal("requires_grad afterwards", learns, {name: not name.startswith("0.") for name in named})
                    kept = {name: p.grad is not None and bool((p.grad == 2).all()) for name, p in named.items()}
                    trial.equal("whether .grad is as it was before the call", kept, dict.fromkeys(named, True))
                model.train()


# ---------------------------------------------------------------- 15-09.4


def _batches(count: int, features: int = 4, size: int = 3) -> list[tuple[Tensor, Tensor]]:
    sizes = [size + i % 2 for i in range(count)]
    return [(torch.randn(n, features, dtype=torch.float64), torch.randint(3, (n,))) for n in sizes]


def _train_5(model: nn.Module, optimizer: Any, batches: list, every: int) -> list[float]:
    """With gradients that nobody accumulates."""
    values, group = [], []
    weights = [p for p in model.parameters() if p.requires_grad]
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        values.append(loss.item())
        group.append(torch.autograd.grad(loss, weights))
        if len(group) == every:
            for p, *grads in zip(weights, *group, strict=True):
                p.grad = torch.stack(grads).mean(0)
            optimizer.step()
            group = []
    return values


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _check_train_5(trial: Trial, answer: Callable) -> None:
    def fresh(adam: bool = False) -> tuple[nn.Module, Any]:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
        model[0].requires_grad_(False)
        model[2].eval()
        if adam:
            return model, torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)

    updates, values, stays, left, old = (
        f"train_5: {what}"
        for what in (
            "updates are made with the mean gradient of each group",
            "returns each batch's loss as a float",
            "modes and frozen parameters stay as they were",
            "batches that are left over reach no later update",
            "a gradient from before the call reaches no update",
        )
    )
    for every, count in ((2, 4), (1, 3), (3, 6), (None, 4), (2, 5)):
        batches = _batches(count)
        (model, optimizer), (twin, theirs), seen = fresh(every == 3), fresh(every == 3), []
        model.register_forward_hook(lambda module, args, z, seen=seen: seen.append(z.detach()))
        got = answer(model, optimizer, batches) if every is None else answer(model, optimizer, batches, every)
        _train_5(twin, theirs, batches, every or 2)
        want = [F.cross_entropy(z, y).item() for z, (_, y) in zip(seen, batches, strict=False)]
        case = f"every={every or 'default'}, {count} batches"
        hint = "which batches is a gradient made of at each update, and is it their mean?"
        with trial.group(updates, hint=hint, see=1):
            for key, value in _state(twin).items():
                trial.close(f"{case}, {key}", _state(model)[key], value)
        with trial.group(stays, hint="the task names nothing to switch", free=True):
            modes = [m.training for m in model.modules()]
            trial.equal(f"{case}, training mode of each module", modes, [m.training for m in twin.modules()])
            learns = [p.requires_grad for p in model.parameters()]
            wanted = [p.requires_grad for p in twin.parameters()]
            trial.equal(f"{case}, requires_grad of each parameter", learns, wanted)
        with trial.group(values, hint="what does the task say is returned, as what?"):
            trial.equal(f"{case}, type", type(got), list)
            trial.equal(f"{case}, types", [type(one) for one in got], [float] * count)
            trial.close(
                f"{case}, values", torch.tensor(got, dtype=torch.float64), torch.tensor(want).double(), rtol=1e-6
            )

    def after(*calls: tuple[list, int], gradient: float | None = None) -> dict[str, Tensor]:
        model, optimizer = fresh()
        for p in model.parameters() if gradient is not None else []:
            p.grad = torch.full_like(p, gradient)
        for batches, every in calls:
            answer(model, optimizer, batches, every)
        return _state(model)

    with trial.group(left, hint="what is in .grad when the next call begins?", see=1, free=True):
        for every, count in ((2, 3), (3, 5), (4, 2)):
            first, second = _batches(count), _batches(every)
            used = first[: count - count % every]
            got, want = after((first, every), (second, every)), after((used, every), (second, every))
            for key in want:
                trial.close(f"every={every}, {count} batches and {every} more, {key}", got[key], want[key])
    with trial.group(old, hint="what may .grad hold when train_5 is called?", see=1, free=True):
        batches = _batches(4)
        got, want = after((batches, 2), gradient=5.0), after((batches, 2))
        for key in want:
            trial.close(key, got[key], want[key])


class _Notes(list):
    """A list that the copies of a model share."""

    def __deepcopy__(self, memo: Any) -> "_Notes":
        return self


class _Moody(nn.Module):
    """Dropout and batch normalisation; notes mode and graph of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))
        self.body[0].requires_grad_(False)
        self.head = nn.Linear(6, 3)
        self.calls = _Notes()

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(self.body(x))
        modes = {module.training for module in self.modules()}
        self.calls.append((len(x), modes == {True}, modes == {False}, z.requires_grad))
        return z


def _train_6(model: nn.Module, optimizer: Any, scheduler: Any, batches: list, held: Any, epochs: int) -> list[float]:
    found = []
    for _ in range(epochs):
        model.train()
        for x, y in batches:
            weights = [p for p in model.parameters() if p.requires_grad]
            for p, grad in zip(weights, torch.autograd.grad(F.cross_entropy(model(x), y), weights), strict=True):
                p.grad = grad
            optimizer.step()
        scheduler.step()
        with torch.no_grad():
            z = copy.deepcopy(model).eval()(held[0])
        found.append(sum(int(row.argmax()) == int(label) for row, label in zip(z, held[1], strict=True)) / len(held[1]))
    return found


def _check_train_6(trial: Trial, answer: Callable) -> None:
    def fresh() -> tuple[Any, ...]:
        torch.manual_seed(11)
        model, rates = _Moody().double(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
        optimizer.register_step_pre_hook(lambda one, args, kwargs: rates.append(one.param_groups[0]["lr"]))
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), rates

    held = (torch.randn(11, 4, dtype=torch.float64), torch.randint(3, (11,)))
    for epochs, start in ((3, True), (2, False), (1, True)):
        batches = _batches(3, size=5)
        model, optimizer, scheduler, rates = fresh()
        twin, theirs, other, wanted = fresh()
        want = _train_6(twin, theirs, other, batches, held, epochs)
        torch.manual_seed(11)
        fresh()  # the same random numbers from here on
        model.train(start)
        for p in model.parameters() if epochs == 2 else []:
            p.grad = torch.full_like(p, 3.0) if p.requires_grad else None
        got = answer(model, optimizer, scheduler, batches, held, epochs)
        on = torch.is_grad_enabled()
        torch.set_grad_enabled(True)  # for what follows here
        case = f"{epochs} epochs"
        with trial.group("train_6: the scheduler steps once an epoch", hint="when is it called, and how often?"):
            trial.equal(f"{case}, rates of the updates", rates, wanted)
            trial.equal(f"{case}, steps of the scheduler", scheduler.last_epoch, epochs)
        hint = "in which mode are the model and all its parts when an epoch begins?"
        with trial.group("train_6: trains in training mode", hint=hint, see=2):
            calls = [call for call in model.calls if call[3] and call[0] != 11]
            trial.equal(f"{case}, calls with a graph in training mode", [c[1] for c in calls], [True] * 3 * epochs)
        with trial.group("train_6: measures in evaluation mode without a graph", see=2):
            calls = [call for call in model.calls if not call[3] or call[0] == 11]
            hint = "which modules have which mode, and is autograd on?"
            modes, graphs = [call[2] for call in calls], [call[3] for call in calls]
            trial.equal(f"{case}, evaluation mode in each call that measures", modes, [True] * len(calls), hint=hint)
            trial.equal(f"{case}, a graph in each call that measures", graphs, [False] * len(calls), hint=hint)
            trial.equal(f"{case}, images measured", sum(call[0] for call in calls), 11 * epochs, hint=hint)
            trial.equal(f"{case}, autograd is on after the call", on, True, hint="what do you switch off for good?")
        item = "train_6: weights and buffers are those of the training alone"
        with trial.group(item, hint="what else changes them, and which gradients does each update use?"):
            for key, value in _state(twin).items():
                trial.close(f"{case}, {key}", _state(model)[key], value)
            learns = [p.requires_grad for p in model.parameters()]
            right, hint = [p.requires_grad for p in twin.parameters()], "what does the task say of frozen parameters?"
            trial.equal(f"{case}, requires_grad of each parameter", learns, right, hint=hint)
        item = "train_6: returns one accuracy for each epoch as a float"
        with trial.group(item, hint="what is returned, as what?"):
            trial.equal(f"{case}, type", type(got), list)
            trial.equal(f"{case}, types", [type(one) for one in got], [float] * epochs)
            trial.close(f"{case}, values", torch.tensor(got), torch.tensor(want), rtol=1e-5)
        modes = [module.training for module in model.modules()]
        trial.that(
            "train_6: leaves the model in training mode",
            all(modes),
            expected="all modules in training mode",
            got=f"{modes.count(False)} of {len(modes)} modules in evaluation mode",
            hint="which call comes last?",
            see=2,
        )


@exercise("15-09.4", "Two loops in the wrong order", points=20, demands=11)
def loops(trial: Trial, answer: Any) -> None:
    """`answer` holds train_5 and train_6."""
    _check_train_5(trial, answer[0])
    _check_train_6(trial, answer[1])


# ---------------------------------------------------------------- 15-09.5


def _record_7(model: nn.Module, batches: Any) -> dict[str, list[float]]:
    """Stand-in of exercise 5."""
    leaves = {name: m for name, m in model.named_modules() if not list(m.children())}
    found: dict[str, list[float]] = {name: [] for name in leaves}

    def note(name: str, module: nn.Module, args: object, out: Tensor) -> None:
        found[name].append(out.detach().abs().mean().item())

    handles = [module.register_forward_hook(partial(note, name)) for name, module in leaves.items()]
    try:
        with torch.no_grad():
            for x, _ in batches:
                model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _confusion_8(logits: Tensor, y: Tensor) -> Tensor:
    classes = logits.shape[1]
    index = y * classes + logits.argmax(1)
    return (
        logits.new_zeros(classes**2, dtype=torch.int64)
        .scatter_add_(0, index, torch.ones_like(index))
        .view(classes, classes)
    )


class _Interrupted(BaseException):
    """As KeyboardInterrupt is: not caught by `except Exception`."""


class _Leaf(nn.Linear):
    """Notes its mode; raises when it is told to."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.modes, self.bad = _Notes(), False

    def forward(self, x: Tensor) -> Tensor:
        if self.bad:
            raise _Interrupted("the model fails")
        out = super().forward(x)
        self.modes.append(self.training)
        return out


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.tanh = _Leaf(3, 5), nn.Tanh()
        self.inner = nn.ModuleDict({"a": nn.Sequential(_Leaf(5, 4), nn.Dropout(0.2)), "first": _Leaf(4, 2)})

    def forward(self, x: Tensor) -> Tensor:
        return self.inner["first"](self.inner["a"](self.tanh(self.first(x))))


class _Born(TorchDispatchMode):
    """Keeps weak references to the memory of each result of more bytes (by default than a layer's numbers have)."""

    def __init__(self, more: int = 200) -> None:
        super().__init__()
        self.more = more
        self.seen: list[StorageWeakRef] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() > self.more:
                self.seen.append(StorageWeakRef(tensor.untyped_storage()))
        return result

    def alive(self) -> int:
        return len({reference.cdata for reference in self.seen if not reference.expired()})


def _hooks(model: nn.Module) -> list[tuple[str, int]]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [(kind, key) for module in model.modules() for kind in kinds for key in getattr(module, kind)]


def _same_hooks(trial: Trial, case: str, model: nn.Module, before: list[tuple[str, int]]) -> None:
    now = _hooks(model)
    more, fewer = len(set(now) - set(before)), len(set(before) - set(now))
    got = f"{more} hooks more, {fewer} of others gone" if more or fewer else "these in another order"
    trial.that(case, now == before, expected="the hooks from before the call, and no other", got=got)


def _check_record_7(trial: Trial, answer: Callable) -> None:
    model = _Parts()
    model.inner.eval()
    before = {name: module.training for name, module in model.named_modules()}
    answer(model, [(torch.randn(4, 3), None)])
    during = {"first": model.first.modes[-1], "inner.a.0": model.inner["a"][0].modes[-1]}
    after = {name: module.training for name, module in model.named_modules()}
    with trial.group("record_7: the modes stay as they are", hint="the task names no mode to switch to"):
        trial.equal("training mode while the model runs", during, {"first": True, "inner.a.0": False})
        trial.equal("training mode afterwards", after, before)
    names = ["first", "tanh", "inner.a.0", "inner.a.1", "inner.first"]
    for count in (3, 1):
        model = _Parts().eval()
        batches = [(torch.randn(n, 3), None) for n in range(2, 2 + count)]
        want: dict[str, list[float]] = {name: [] for name in names}
        with torch.no_grad():
            for x, _ in batches:
                outs = [x := model.get_submodule(name)(x) for name in names]
                for name, out in zip(names, outs, strict=True):
                    want[name].append(out.double().abs().mean().item())
        for repeat in range(2):
            got = answer(model, batches)
            item = "record_7: one list for each leaf, by its name"
            found = sorted(got) if isinstance(got, dict) else type(got)
            trial.equal(
                item, found, sorted(want), hint="when is the name looked up, and which modules are leaves?", see=1
            )
            item = "record_7: one float for each batch, the mean magnitude"
            with trial.group(item, hint="what is noted of an output, and as what?"):
                for name in names:
                    case = f"the leaf {name!r}, call {repeat + 1} of record_7"
                    hint = "how often is something noted, and under which name?"
                    trial.equal(f"entries for {case}", len(got[name]), count, hint=hint, see=1)
                    trial.equal(f"types for {case}", [type(v) for v in got[name]], [float] * count)
                    trial.close(f"values for {case}", torch.tensor(got[name]), torch.tensor(want[name]), rtol=1e-4)
    item = "record_7: one list for each leaf, by its name"
    found = list(answer(nn.Linear(3, 2), [(torch.randn(2, 3), None)]))
    hint = "which leaf has a model without children, and what does named_modules() call it?"
    trial.equal(item, found, [""], hint=hint)
    model, alive, born = _Parts(), [], _Born()
    given = [(torch.randn(40, 3), torch.zeros(40)) for _ in range(3)]

    class Watched(Sequence):
        """Three batches; asking for one notes what is alive of those before."""

        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
            if not 0 <= number < 3:
                raise IndexError(number)
            alive.append(born.alive())
            return given[number]

    with born:
        answer(model, Watched())
    alive.append(born.alive())
    item = "record_7: no output is alive when a batch is done"
    trial.that(
        item,
        not max(alive),
        expected="no tensor of a batch that is done",
        got=f"{max(alive)} of them",
        hint="what do you keep of an output, and what does that keep?",
    )
    ran: list[str] = []
    model.first.register_forward_hook(lambda module, args, out: ran.append(f"behind a layer, {len(out)} images"))
    model.register_forward_pre_hook(lambda module, args: ran.append("before the model"))
    theirs = _hooks(model)
    item = "record_7: its hooks are gone, those of others stay"
    with trial.group(item, hint="who removes them, and when?"):
        answer(model, [(torch.randn(4, 3), None)])
        _same_hooks(trial, "hooks after a call", model, theirs)
        trial.equal("calls of another's hooks", ran, ["before the model", "behind a layer, 4 images"])
        model.inner["first"].bad = True
        try:
            answer(model, [(torch.randn(4, 3), None)] * 2)
            raised: type | None = None
        except BaseException as error:
            raised = type(error)
        _same_hooks(trial, "hooks after the model raised", model, theirs)
    trial.that(
        "record_7: the exception goes on",
        raised is _Interrupted,
        expected="the model's exception, one that `except Exception` doesn't catch, as Ctrl-C",
        got="no exception" if raised is None else raised.__name__,
        hint="who catches it?",
    )


class _Readers(TorchFunctionMode):
    """Counts calls that give Python a tensor's values."""

    names: ClassVar = {
        *("tolist", "item", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__"),
        *("__repr__", "__format__"),
    }
    reads = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += getattr(function, "__name__", "") in self.names
        return function(*args, **(kwargs or {}))


class _Waiting(TorchDispatchMode):
    """Counts operations that wait for a value."""

    waiting: ClassVar = {
        "_local_scalar_dense",
        "equal",
        "bincount",
        "nonzero",
        "_unique2",
        "unique_dim",
        "allclose",
        "masked_select",
    }

    reads = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = args[1] if function is torch.ops.aten.index.Tensor else ()
        masked = any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)
        self.reads += masked or function.overloadpacket.__name__ in self.waiting
        return function(*args, **(kwargs or {}))


def _operations(action: Callable[[], object]) -> int:
    """How many operations the action calls, as the notebook's figure counts them: einsum, say, is one, whatever it
    calls inside."""
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as recording:
        action()
    return sum(event.cpu_parent is None for event in recording.events())


def _check_confusion_8(trial: Trial, answer: Callable) -> None:
    cases = [(40, 10), (1, 3), (7, 2), (5001, 2), (0, 5), (12, 12)]
    hint = "read the docstring and the task on the counts, and count a few such images by hand"
    with trial.group("confusion_8: the counts are right", hint=hint, see=2):
        for n, classes in cases:
            logits, y = torch.randn(n, classes), torch.randint(max(classes - 1, 1), (n,))
            if n > 1:
                logits[:, -1] -= 9.0  # a class that is neither there nor predicted
            counts = [[0] * classes for _ in range(classes)]
            for row, label in zip(logits.tolist(), y.tolist(), strict=True):
                counts[label][row.index(max(row))] += 1
            trial.equal(f"{n} images, {classes} classes", answer(logits, y), torch.tensor(counts))
        y, even = torch.tensor([0, 2, 2, 1, 2]), torch.zeros(5, 3)
        trial.equal("images of each class, all logits equal", answer(even, y).sum(1), torch.tensor([1, 1, 3]))
    used, read = {}, {}
    for n, classes in ((5, 3), (200, 3), (60, 25)):
        logits, y = torch.randn(n, classes), torch.randint(classes, (n,))
        used[n, classes] = _operations(partial(answer, logits, y))
        with _Readers() as readers, _Waiting() as waiting:
            answer(logits, y)
        read[n, classes] = waiting.reads + readers.reads
    trial.that(
        "confusion_8: Python reads no value",
        not any(read.values()),
        expected="no read of a value",
        got=f"{max(read.values())} in a call",
        hint="which call gives Python a number, or does so inside?",
    )
    trial.that(
        "confusion_8: at most 20 operations",
        max(used.values()) <= 20,
        expected="20 or fewer for any number of images and classes",
        got=", ".join(f"{count} for {n} images of {c} classes" for (n, c), count in used.items()),
        hint="what is done once for each image or class?",
        see=2,
    )
    with trial.group("confusion_8: the counts are on the device of logits", hint="where does each new tensor lie?"):
        logits, y = torch.randn(3, 4, device="meta"), torch.zeros(3, dtype=torch.int64, device="meta")
        try:
            found = str(answer(logits, y).device)
        except NotImplementedError as error:
            if not error.args:
                raise
            found = "meta"  # an operation that 'meta' lacks, which says nothing of devices
        trial.equal("device of the counts for logits on 'meta'", found, "meta")


@exercise(
    "15-09.5",
    "A script that grows and a script that waits",
    points=20,
    demands=10,
    stand_in=lambda: (_record_7, _confusion_8),
    stand_in_name="two of the check's",
)
def growth(trial: Trial, answer: Any) -> None:
    """`answer` holds record_7 and confusion_8."""
    _check_record_7(trial, answer[0])
    _check_confusion_8(trial, answer[1])


# ---------------------------------------------------------------- 15-09.6


class _Eyes(nn.Module):
    """A small net that keeps the inputs of all calls, with its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(2), nn.Linear(18, 3)
        self.calls, self.written = _Notes(), _Notes()
        self.watched = _Notes()  # pairs: what the caller gave, and how it was

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(self.norm(x).flatten(1))
        mode = self.training and self.norm.training
        self.written.append(not all(torch.equal(now, then) for now, then in self.watched))
        self.calls.append((torch.is_grad_enabled(), x.detach().clone(), mode, z.argmax(dim=1)))
        return z


def _train_9(model: Any, optimizer: Any, images: Tensor, labels: Tensor, epochs: int, held: int) -> list[float]:
    """Stand-in of exercise 6."""
    rest = images[held:]
    standard = (images - rest.mean((0, 2, 3), keepdim=True)) / rest.std((0, 2, 3), keepdim=True)
    found = []
    for _ in range(epochs):
        model.train()
        for x, y in zip(standard[held:].split(64), labels[held:].split(64), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found.append((model(standard[:held]).argmax(1) == labels[:held]).float().mean().item())
    return found


def _same_values(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double())


@exercise(
    "15-09.6",
    "Two bugs and one curve",
    points=20,
    demands=6,
    stand_in=lambda: _train_9,
    stand_in_name="one of the check's",
)
def pair(trial: Trial, answer: Any) -> None:
    """`answer(model, optimizer, images, labels, epochs, held)` trains on standardised images."""

    def fresh() -> tuple[_Eyes, Any]:
        torch.manual_seed(5)
        model = _Eyes().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def replay(calls: list, labels: Tensor) -> dict[str, Tensor]:
        """The weights after plain steps on the inputs that the answer's model saw."""
        model, optimizer = fresh()
        torch.manual_seed(1)
        targets = itertools.cycle(labels.split(64))
        for graph, x, mode, _ in calls:
            model.train(mode)
            with torch.set_grad_enabled(graph):
                z = model(x)
            if graph:
                y = next(targets)
                grads = torch.autograd.grad(F.cross_entropy(z[: len(y)], y[: len(z)]), list(model.parameters()))
                for p, grad in zip(model.parameters(), grads, strict=True):
                    p.grad = grad
                optimizer.step()
        return _state(model)

    def data(n: int, held: int) -> tuple[Tensor, Tensor]:
        scale = torch.tensor([40.0, 3.0], dtype=torch.float64).view(1, 2, 1, 1)
        images = torch.randn(n, 2, 3, 3, dtype=torch.float64) * scale + 100
        images[:held] += 25.0  # held images have another mean
        return images, torch.randint(3, (n,))

    def standardised(images: Tensor, held: int, correction: int) -> Tensor:
        """The deviation may divide by the count (correction 0) or, as the script's, by one less (correction 1)."""
        rest = images[held:]
        std = rest.std((0, 2, 3), keepdim=True, correction=correction)
        return (images - rest.mean((0, 2, 3), keepdim=True)) / std

    for n, held, epochs in ((150, 20, 3), (64 + 7, 7, 2), (90, 31, 1)):
        images, labels = data(n, held)
        given = (images.clone(), labels.clone())
        model, optimizer = fresh()
        model.watched.extend(zip(given, (images, labels), strict=True))
        for p in model.parameters() if epochs == 2 else []:
            p.grad = torch.full_like(p, 3.0)
        torch.manual_seed(1)
        got = answer(model, optimizer, *given, epochs, held)
        on = torch.is_grad_enabled()
        torch.set_grad_enabled(True)  # for what follows here
        case = f"{n} images, {held} held, {epochs} epochs"
        trained = [call[1] for call in model.calls if call[0]]
        measured = [call[1] for call in model.calls if not call[0]]
        standard = standardised(images, held, correction=1)
        by_count = standardised(images, held, correction=0)
        if trained and _same_values(trained[0], by_count[held:][:64]):
            standard = by_count
        item = "the batches are those of the script, standardised once"
        with trial.group(item):
            once = standard[held:].split(64)
            wanted = [rows for _ in range(epochs) for rows in once]
            hint = "how many images has each batch of the script?"
            trial.equal(f"{case}, sizes", [len(rows) for rows in trained], [len(rows) for rows in wanted], hint=hint)
            hint = "compare the batch with the script's: mean and deviation, order, precision"
            for number, (rows, right) in enumerate(zip(trained, wanted, strict=True)):
                epoch, place = divmod(number, len(once))
                if epoch:
                    hint = "print mean and deviation of each batch, epoch by epoch"
                where = f"epoch {epoch + 1}, batch {place + 1}"
                trial.close(f"{case}: {where}", rows, right, rtol=1e-9, atol=1e-9, hint=hint, see=1 if epoch else None)
        item = "the held images are standardised in the same way"
        with trial.group(item, hint="what does the model see when it is measured?", see=2):
            pieces = torch.cat(measured) if measured else torch.zeros(0)
            trial.close(case, pieces, torch.cat([standard[:held]] * epochs), rtol=1e-9, atol=1e-9)
        item = "trains in training mode, measures in evaluation mode"
        modes = [(graph, mode) for graph, _, mode, _ in model.calls]
        trial.that(
            item,
            all(graph == mode for graph, mode in modes),
            expected="training mode where a graph is recorded, evaluation mode where none is",
            got=f"{sum(graph != mode for graph, mode in modes)} of {len(modes)} calls in the other mode ({case})",
            hint="which two calls does the script make in each epoch?",
            free=True,
        )
        with trial.group("the training is that of the script", hint="what else did you change?", free=True):
            for key, value in replay(model.calls, labels[held:]).items():
                old = ", gradients from before the call" * (epochs == 2)
                trial.close(f"{case}{old}, {key}", _state(model)[key], value, rtol=1e-5, atol=1e-7)
            trial.equal(f"{case}, autograd is on after the call", on, True, hint="what do you switch off for good?")
        with trial.group("images and labels stay as they were", hint="whose memory do you write to?", see=1, free=True):
            trial.equal(f"{case}, images", given[0], images)
            trial.equal(f"{case}, labels", given[1], labels)
            trial.equal(f"{case}, calls of the model with changed images", sum(model.written), 0)
        with trial.group("returns one float for each epoch", hint="what does the task ask for?"):
            trial.equal(f"{case}, type", type(got), list)
            trial.equal(f"{case}, types", [type(one) for one in got], [float] * epochs)
            found = torch.cat([call[3] for call in model.calls if not call[0]]).view(epochs, held)
            want = (found == labels[:held]).double().mean(dim=1)
            trial.close(f"{case}, values", torch.tensor(got, dtype=torch.float64), want, rtol=1e-5)
