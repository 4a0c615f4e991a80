"""Checks of the exercises in 15-09, Debugging PyTorch Models."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, profiler
from torch.multiprocessing.reductions import StorageWeakRef

from shared.checks.exercise import exercise
from shared.checks.trial import Trial
from shared.checks.words import Sample, gradients, raises, samples, snapshot, unchanged

# ---- 15-09.1

_DIMS = (1, 2, 3)


def _contrast(images: Tensor) -> Tensor:
    """The reference: the formula in float64, with 0 for uniform images."""
    x = images.cpu().double()  # MPS has no float64, and the lesson may go on with this one
    uniform = x.amax(_DIMS) == x.amin(_DIMS)
    variance = torch.where(uniform, 1.0, x.var(_DIMS, correction=0))
    return torch.where(uniform, 0.0, variance.sqrt()).to(images)


def _images(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random images whose contrasts reach from 0.001 to 40."""
    images = torch.randn(shape, dtype=torch.float64)
    images /= images.std(_DIMS, correction=0, keepdim=True)
    spread = torch.logspace(-2.999, 1.6, len(images), dtype=torch.float64).view(-1, 1, 1, 1)
    return (images * spread + torch.rand_like(spread)).to(dtype)


@exercise("15-09.1", "A NaN in the second step", points=10, demands=6, stand_in=lambda: _contrast, stand_in_name="ours")
def contrast(trial: Trial, answer: Any) -> None:
    """`answer(images)` gives each image's deviation, with a gradient of 0 at uniform images."""
    wide = torch.randn(4, 6, 6, 3).permute(0, 3, 1, 2)  # not contiguous
    wide[0, 0] = 0.5  # a flat channel
    wide[2] = torch.tensor([0.9, 0.1, 0.2]).view(-1, 1, 1)  # one colour, and not uniform
    batches = [_images(6, 3, 8, 8), _images(4, 1, 5, 7, dtype=torch.float64), _images(1, 3, 32, 32), wide]
    formula = [Sample(f"images {tuple(x.shape)}", x.requires_grad_()) for x in batches]
    level = torch.cat([torch.tensor([0.0, 0.1, -100.0, 1.7]), torch.rand(40)]).view(-1, 1, 1, 1)
    flat = [Sample(f"uniform images {s}", level.repeat(1, *s).requires_grad_()) for s in ((3, 32, 32), (3, 5, 7))]
    mixed = torch.cat([torch.zeros(1, 3, 8, 8), _images(5, 3, 8, 8)]).requires_grad_()
    same = partial(samples, trial, answer, _contrast)

    def value(result: Tensor, images: Tensor) -> Tensor:
        return result.detach()

    def slope(images: Tensor) -> Tensor:
        x = images.detach().clone().requires_grad_()
        return torch.autograd.grad(answer(x).sum(), x)[0]

    with trial.group("the value is that of the formula", hint="compare with broken_contrast, image by image"):
        same(formula, look=value, rtol=1e-3, atol=0.0)
    with trial.group("the gradient is that of the formula", hint="what is the slope of your value?"):
        same(formula, look=gradients, rtol=1e-3, atol=3e-5)
    with trial.group("a uniform image has the value 0", hint="take a uniform image through your lines"):
        same(flat, look=value, atol=1e-4)
    with trial.group("a uniform image has the gradient 0", hint="which line has a slope that isn't finite?", see=1):
        same(flat, look=gradients, atol=1e-4)
    hint = "what do you do to the whole batch?"
    with trial.group("an image doesn't change the gradient of another", hint=hint, free=True):
        trial.close("beside a uniform image", slope(mixed)[1:], slope(mixed[1:]), rtol=1e-3, atol=3e-5)
    hint = "what do you do to the caller's tensor itself?"
    with trial.group("images stay as they were", hint=hint, free=True), unchanged(trial, "a batch", mixed):
        answer(mixed)


# ---- 15-09.2


def _soft_clip(x: Tensor, s: Tensor) -> Tensor:
    wide = s.view(-1, *[1] * (x.dim() - 2))
    return wide * torch.tanh(x / wide)


@exercise("15-09.2", "A backward that almost works", points=15, demands=5)
def soft_clip(trial: Trial, answer: Any) -> None:
    """`answer.apply(x, s)` is s · tanh(x / s) with its own backward; autograd of the formula says what is right."""
    cases = []
    for shape, dtype in (((4, 3), torch.float64), ((2, 3, 5), torch.float32), ((3, 2, 2, 4), torch.float64)):
        x = 3 * torch.randn(shape, dtype=dtype)
        x[0] *= 1000  # far beyond the bound
        s = 0.3 + 2 * torch.rand(x.shape[1], dtype=dtype)
        cases.append(Sample(f"x {shape}, {dtype}", x.requires_grad_(), s.requires_grad_()))
    same = partial(samples, trial, answer.apply, _soft_clip, cases, rtol=1e-4, atol=1e-5)
    with trial.group("forward is s · tanh(x / s)", hint="compare with the formula; s is one number for each channel"):
        same(look=lambda y, x, s: y.detach())
    hint = "run numerical_gradcheck on such x and s, in float64"
    with trial.group("the gradient of x is right", hint=hint, see=1):
        same(look=lambda y, x, s: gradients(y, x))
    with trial.group("the gradient of s is right", hint=hint, see=2):
        same(look=lambda y, x, s: gradients(y, s))
    with trial.group("an input that needs no gradient gets None", hint="what does ctx say of what is needed?"):
        for needs in ([True, False], [False, True]):
            pair = [t.detach().requires_grad_(need) for t, need in zip(cases[0].arguments, needs, strict=True)]
            y = answer.apply(*pair)
            got = [grad is not None for grad in answer.backward(y.grad_fn, torch.ones_like(y))]
            trial.equal(f"whether backward gives a gradient where {needs} says who needs one", got, needs)
    hint = "how do the Functions of section 2 keep theirs?"
    with trial.group("tensors are kept with save_for_backward", hint=hint, free=True):
        attributes = vars(answer.apply(*cases[0].arguments).grad_fn)
        tensors = [name for name, value in attributes.items() if isinstance(value, Tensor)]
        trial.equal("tensors on ctx itself", tensors, [])


# ---- 15-09.3


class _Block(nn.Linear):
    """A layer with the right values, and with a wrong gradient if it has a fault."""

    def __init__(self, inputs: int, outputs: int, fault: str = "") -> None:
        super().__init__(inputs, outputs)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        def more(tensor: Tensor, share: Any = 0.5) -> Tensor:
            return tensor + share * (tensor - tensor.detach())

        weight, bias = self.weight, self.bias
        if self.fault == "input":
            x = more(x)
        elif self.fault == "far input":
            x = more(x, (x.abs() > 6).to(x))
        elif self.fault == "weight":
            weight = more(weight)
        elif self.fault == "bias":
            bias = more(bias)
        return F.linear(x, weight, bias)


class _Times(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 20 * x


def _stack(**faults: str) -> nn.Module:
    """A network in which blocks have faults, by name with _ for a dot."""
    torch.manual_seed(2)
    blocks = {"stem": (6, 5), "body_1": (5, 5), "body_3": (5, 4), "head": (4, 3)}
    made = {name: _Block(*sizes, faults.get(name, "")) for name, sizes in blocks.items()}
    body = nn.Sequential(_Times(), made["body_1"], nn.Tanh(), made["body_3"])
    parts = [("stem", made["stem"]), ("act", nn.Tanh()), ("body", body), ("norm", nn.LayerNorm(4))]
    return nn.Sequential(OrderedDict([*parts, ("head", made["head"])]))


def borrowed_network() -> nn.Module:
    """Script 3's: nine blocks for images, one of them with a wrong gradient."""
    blocks = [_Block(48, 48, "weight" if number == 4 else "") for number in range(7)]
    layers = [layer for block in blocks for layer in (block, nn.ReLU())]
    stem = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), _Block(192, 48), nn.ReLU())
    for block in (stem[2], *blocks):
        nn.init.kaiming_normal_(block.weight)
    return nn.Sequential(OrderedDict(stem=stem, blocks=nn.Sequential(*layers), head=_Block(48, 10)))


def _wrong_layer(model: nn.Module, x: Tensor) -> str | None:
    """The reference: it reads the fault, which an answer can't know of."""
    for name, module in model.named_modules():
        if isinstance(module, _Block) and module.fault:
            return name
    return None


@exercise(
    "15-09.3",
    "The layer with the wrong gradient",
    points=15,
    demands=5,
    stand_in=lambda: _wrong_layer,
    stand_in_name="ours",
)
def wrong_layer(trial: Trial, answer: Any) -> None:
    """`answer(model, x)` names the leaf whose backward is wrong."""
    x = torch.randn(5, 6)

    def found(*faults: dict[str, str]) -> None:
        cases = [Sample(f"a wrong gradient of {fault}", _stack(**fault), x) for fault in faults]
        samples(trial, answer, _wrong_layer, cases, look=lambda name, *_: name)

    with trial.group("names the layer whose input has a wrong gradient", hint="which gradients has a layer?", see=3):
        found({"stem": "input"}, {"body_3": "input"})
    hint = "which gradients has a layer?"
    with trial.group("names the layer whose parameter has a wrong gradient", hint=hint, see=2):
        found({"stem": "weight"}, {"body_1": "bias"}, {"head": "weight"})
    with trial.group("looks at the inputs that a layer gets", hint="at which points is the gradient checked?", see=1):
        found({"body_1": "far input"})
    with trial.group("None if all are right", hint="how far apart may two right numbers be?", see=3, free=True):
        found({})
        got = answer(nn.Sequential(nn.Linear(6, 4), nn.ReLU()), x)
        trial.equal("layers of PyTorch's own", got, None)
    with trial.group("the model stays as it is", hint="what do you do to the caller's model?", see=2, free=True):
        model = _stack()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with unchanged(trial, "after a search", model):
            answer(model, x)


# ---- 15-09.4


class _Root(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return (h * (h > 0)).sqrt()


class _Body(nn.Module):
    """A small network for images; `act` is its second activation."""

    def __init__(self, fault: str = "", act: nn.Module | None = None) -> None:
        super().__init__()
        parts = [nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 48), nn.ReLU()]
        self.body = nn.Sequential(*parts, _Block(48, 48, fault), act or nn.ReLU(), nn.Linear(48, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _step(model: nn.Module, loss_fn: Callable, batch: tuple[Tensor, Tensor], optimizer: Any, clear: bool) -> float:
    loss = loss_fn(model(batch[0]), batch[1])
    if clear:
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def ward(x: Tensor, y: Tensor) -> dict[str, dict[str, Any]]:
    """Six patients as keyword arguments of the lesson's `Patient`, for 400 or more images and labels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        models = {letter: _Body() for letter in "BDEF"}
        models["A"] = _Body("weight")
        models["C"] = _Body(act=_Root())
        nn.init.constant_(models["D"].body[2].bias, -30.0)
        order = torch.randperm(len(y)).to(y.device)
    found = {}
    for letter, model in sorted(models.items()):
        labels = y[order] if letter == "F" else y.clone()
        optimizer = torch.optim.Adam(model.to(x.device).parameters(), lr=1e-3)
        parts = {"model": model, "loss_fn": F.cross_entropy, "batch": (x.clone(), labels), "optimizer": optimizer}
        found[letter] = {**parts, "step": partial(_step, clear=letter != "E")}
    return found


_VERDICTS = {
    "A": ("wrong gradient", "body.4"),
    "B": ("healthy", ""),
    "C": ("NaN", "body.5"),
    "D": ("dead", "body.2"),
    "E": ("gradients pile up", "step"),
    "F": ("labels", "batch"),
}
_WHAT = {what for what, _ in _VERDICTS.values()}


@exercise("15-09.4", "Six patients", points=20, demands=6)
def verdicts(trial: Trial, answer: Any) -> None:
    """`answer()` says of each patient of the ward what is wrong, and where."""
    got = answer()
    fine = isinstance(got, Mapping) and all(isinstance(pair, Sequence) and len(pair) == 2 for pair in got.values())
    item = "gives a dictionary of pairs"
    trial.needs(item, fine, expected="a pair for each letter", got=repr(got)[:200], hint="look at the example")
    for letter, (what, where) in _VERDICTS.items():
        said, place = got.get(letter, ("nothing", ""))
        if said not in _WHAT:
            expected, hint, see = f"one of {sorted(_WHAT)}", "which words does the task list?", None
        elif said != what:
            expected, hint, see = "another finding", f"which tools have you not asked yet about {letter}?", 1
        else:
            expected, hint, see = f"{said!r} at another place", "who made it, and who only met it?", 2
        right = (said, place) == (what, where)
        trial.that(f"patient {letter}", right, expected=expected, got=repr((said, place)), hint=hint, see=see)


# ---- 15-09.5


def _record_4(model: nn.Module, batches: Any) -> dict[str, list[float]]:
    """The reference."""
    found: dict[str, list[float]] = {}
    handles = []

    def note(name: str, module: nn.Module, args: object, out: Tensor) -> None:
        found[name].append(out.detach().abs().mean().item())

    for name, module in model.named_modules():
        if not list(module.children()):
            found[name] = []
            handles.append(module.register_forward_hook(partial(note, name)))
    try:
        with torch.no_grad():
            for x, _ in batches:
                model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _confusion_5(logits: Tensor, y: Tensor) -> Tensor:
    """The reference."""
    classes = logits.shape[1]
    index = y * classes + logits.argmax(1)
    counts = logits.new_zeros(classes**2, dtype=torch.int64)
    return counts.scatter_add_(0, index, torch.ones_like(index)).view(classes, classes)


def _parts() -> nn.Module:
    inner = nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.2)), nn.Linear(4, 2))
    return nn.Sequential(OrderedDict(first=nn.Linear(3, 5), tanh=nn.Tanh(), inner=inner))


def _numbers(found: Any, model: nn.Module, *_: Any) -> dict[str, list[Any]]:
    """What was noted of each leaf."""
    leaves = [name for name in sorted(found) if not list(model.get_submodule(name).children())]
    return {name: [(type(value).__name__, round(float(value), 4)) for value in found[name]] for name in leaves}


def _check_record_4(trial: Trial, answer: Callable) -> None:
    many = [(torch.randn(n, 3), None) for n in (2, 3, 4)]
    model = _parts()
    model.inner.eval()
    modes: list[list[bool]] = []
    hook = model.inner.register_forward_pre_hook(lambda *_: modes.append([m.training for m in model.modules()]))
    before = [module.training for module in model.modules()]
    answer(model, many)
    hook.remove()
    item = "record_4: the modes stay as they are"
    trial.equal(item, modes, [before] * len(many), hint="the task names no mode to switch to")

    model = _parts().eval()
    cases = [Sample("3 batches", model, many), Sample("a model that is a leaf", nn.Linear(3, 2), many[:1])]
    same = partial(samples, trial, answer, _record_4, cases)
    with trial.group("record_4: one list for each leaf, by its name", hint="who is a leaf, by which name?"):
        same(look=lambda found, *_: sorted(found))
    with trial.group("record_4: one float for each batch, the mean magnitude", hint="what is noted, how often?"):
        same(look=_numbers)

    model = _parts()
    outputs: list[StorageWeakRef] = []
    alive: list[int] = []
    for module in model.modules():
        module.register_forward_hook(lambda _, args, out: outputs.append(StorageWeakRef(out.untyped_storage())))
    model.register_forward_pre_hook(lambda *_: alive.append(sum(not output.expired() for output in outputs)))
    answer(model, many)
    model(many[0][0])
    item = "record_4: no output is alive when a batch is done"
    hint = "what do you keep of an output, and what does that keep?"
    trial.equal(item, max(alive), 0, hint=hint, see=1, free=True)
    wrong = [*many, (torch.randn(2, 7), None)]
    with trial.group("record_4: its hooks are gone", hint="who removes them, and when?", free=True):
        for case, batches in (("a call", many), ("after the model raised", wrong)):
            with unchanged(trial, case, model), suppress(RuntimeError):
                answer(model, batches)
    with trial.group("record_4: the exception goes on", hint="who catches it?"):
        raises(trial, "a batch of the wrong shape", partial(answer, model, wrong), RuntimeError)


def _operations(action: Callable[[], object]) -> tuple[int, int]:
    """How many operations the action calls, as the notebook counts them, and how many boolean masks those read."""
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as recording:
        action()
    names = [event.name for event in recording.events()]
    return sum(event.cpu_parent is None for event in recording.events()), names.count("aten::nonzero")


def _check_confusion_5(trial: Trial, answer: Callable) -> None:
    cases = []
    for n, classes in ((40, 10), (1, 3), (5001, 2)):
        logits = torch.randn(n, classes)
        logits[:, -1] -= 9.0 * (n > 1)  # a class that is neither there nor predicted
        cases.append(Sample(f"{n} images, {classes} classes", logits, torch.randint(classes - 1, (n,))))
    with trial.group("confusion_5: the counts are right", hint="count a few such images by hand", see=2):
        samples(trial, answer, _confusion_5, cases)
    item = "confusion_5: Python reads no value, and the counts are on the device of logits"
    hint = "which call gives Python a number, or does so inside? where does each new tensor lie?"
    with trial.group(item, hint=hint, free=True):  # "meta" has no values: who reads one fails
        counts = answer(torch.randn(3, 4, device="meta"), torch.zeros(3, dtype=torch.int64, device="meta"))
        trial.equal("device of the counts for logits on 'meta'", str(counts.device), "meta")
        trial.equal("boolean masks", _operations(partial(answer, torch.eye(3), torch.arange(3)))[1], 0)
    hint = "what is done once for each image or class?"
    with trial.group("confusion_5: at most 20 operations", hint=hint, see=2, free=True):
        for n, classes in ((200, 3), (60, 25)):
            used, _ = _operations(partial(answer, torch.randn(n, classes), torch.randint(classes, (n,))))
            trial.that(f"{n} images, {classes} classes", used <= 20, expected="20 or fewer", got=used)


@exercise(
    "15-09.5",
    "A script that grows and a script that waits",
    points=20,
    demands=9,
    stand_in=lambda: (_record_4, _confusion_5),
    stand_in_name="ours",
)
def growth(trial: Trial, answer: Any) -> None:
    """`answer` holds record_4 and confusion_5."""
    _check_record_4(trial, answer[0])
    _check_confusion_5(trial, answer[1])


# ---- 15-09.6


class _Eyes(nn.Module):
    """A small net that writes down what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(18, 3)
        object.__setattr__(self, "calls", [])  # mode, graph, images and guesses of each call

    def forward(self, x: Tensor) -> Tensor:
        graph = "with" if torch.is_grad_enabled() else "without"
        z = self.head(self.norm(x).flatten(1))
        self.calls.append((self.norm.training, graph, x.detach().clone(), z.argmax(dim=1)))
        return z


def _train_6(model: Any, optimizer: Any, images: Tensor, labels: Tensor, epochs: int, held: int) -> list[float]:
    """The reference."""
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


def _trained(train: Callable, images: Tensor, labels: Tensor, epochs: int, held: int) -> dict[str, Any]:
    """What a training leaves behind, by the words of the demands."""
    torch.manual_seed(5)
    model = _Eyes().double()
    model(images).sum().backward()  # old gradients
    model.calls.clear()
    sums: set[float] = set()
    model.register_forward_pre_hook(lambda *_: sums.add(images.sum().item()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    returned = train(model, optimizer, images, labels, epochs, held)
    trains = [x for training, _, x, _ in model.calls if training]
    looks = [x for training, _, x, _ in model.calls if not training]
    guesses = [guess for training, _, _, guess in model.calls if not training]
    own = []
    if sum(map(len, guesses)) == epochs * held:
        own = [(part == labels[:held]).double().mean().item() for part in torch.cat(guesses).split(held)]
    return {
        "sizes of the batches": [len(x) for x in trains],
        "batches": trains,
        "weights": snapshot(model.state_dict()),
        "held images": torch.cat(looks) if looks else "none",
        "modes": sorted({f"training {training} {graph} a graph" for training, graph, _, _ in model.calls}),
        "images and labels": [images, labels, *sums],
        "types": [type(one).__name__ for one in returned] if isinstance(returned, list) else "no list",
        "accuracies": [returned, own],
    }


@exercise("15-09.6", "Two bugs and one curve", points=20, demands=5, stand_in=lambda: _train_6, stand_in_name="ours")
def pair(trial: Trial, answer: Any) -> None:
    """`answer(model, optimizer, images, labels, epochs, held)` trains on standardized images."""
    runs = []
    for n, held, epochs in ((150, 20, 3), (90, 31, 1)):
        scale = torch.tensor([40.0, 3.0], dtype=torch.float64).view(1, 2, 1, 1)
        images = torch.randn(n, 2, 3, 3, dtype=torch.float64) * scale + 100
        images[:held] += 25.0  # held images have another mean
        data = images, torch.randint(3, (n,)), epochs, held
        got, want = (_trained(train, *(t.clone() for t in data[:2]), *data[2:]) for train in (answer, _train_6))
        runs.append((f"{n} images, {held} held, {epochs} epochs", got, want))

    def demand(item: str, names: Sequence[str], hint: str, see: int | None = None, free: bool = False) -> None:
        with trial.group(item, hint=hint, see=see, free=free):
            for case, got, want in runs:
                for name in names:
                    # room for a deviation that divides by the count, or by one less
                    trial.close(f"{name}, {case}", got[name], want[name], rtol=5e-3, atol=5e-3)

    hint = "which two calls does the script make in each epoch?"
    demand("trains in training mode, measures in evaluation mode", ("modes",), hint)
    demand(
        "the training is that of the script, on images standardized once",
        ("sizes of the batches", "batches", "weights"),
        "print mean and deviation of each batch, epoch by epoch; else, what did you change beside it?",
        see=1,
    )
    hint = "what does the model see when it is measured?"
    demand("the held images are standardized in the same way", ("held images",), hint, see=2)
    hint = "whose memory do you write to?"
    demand("images and labels stay as they were", ("images and labels",), hint, see=1, free=True)
    with trial.group("returns one float for each epoch", hint="what does the task ask for?"):
        for case, got, want in runs:
            trial.equal(f"types, {case}", got["types"], want["types"])
            returned, own = got["accuracies"]
            if own:
                trial.close(f"accuracies, {case}", returned, own, rtol=1e-5)
