"""Checks of the exercises in 15-10, Building a Mini Training Framework."""

import hashlib
import io
import math
import os
import random
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shared.checks.exercise import exercise
from shared.checks.trial import Trial
from shared.checks.words import outcome, raises, script

_LESSON: dict[str, Any] = {}  # what the lesson defines, and the answer, for stand-ins


def _look_up(answer: Any, method: str) -> None:
    """Find the names of the lesson through a method of the answer."""
    _LESSON.update(getattr(answer, method).__globals__, answer=answer)


def _net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))


# ---------------------------------------------------------------- 15-10.1


def _trainer() -> type:
    """The answer's class with the four methods that are asked for: the stand-in, and what the check compares with."""

    # names of the function, not the lesson's whole namespace: a class that ranks get travels with what it refers to
    cancel_batch, cancel_epoch, cancel_fit = (_LESSON[f"Cancel{name}"] for name in ("Batch", "Epoch", "Fit"))

    class Trainer(_LESSON["answer"]):
        @contextmanager
        def stage(self, name: str) -> Iterator[None]:
            with ExitStack() as self.exits[name]:
                self.call(f"on_{name}_start")
                yield
                self.call(f"on_{name}_end")

        def run_epochs(self, max_epochs: int) -> None:
            with self.stage("fit"), suppress(cancel_fit):
                for self.epoch in range(max_epochs):
                    self.run_epoch()

        def run_epoch(self) -> None:
            with self.stage("epoch"):
                with suppress(cancel_epoch):
                    self.run_batches()
                if self.val_loader is not None:
                    self.validate()

        def run_batches(self) -> None:
            self.model.train()
            for self.batch in self.train_loader:  # noqa: B020
                with suppress(cancel_batch):
                    self.call("on_batch_start")
                    self.train_step()
                    self.call("on_batch_end")

    return Trainer


def _heard(kind: type, batches: int, validates: bool, place: str, call: int, error: type) -> dict[str, list[str]]:
    """What callbacks hear of a run of two epochs, and which cleanups run, if a call of a hook raises an error."""
    hooks: list[str] = []
    cleanups: list[str] = []

    def note(hook: str, trainer: Any) -> None:
        hooks.append(f"{hook} at step {trainer.step} of epoch {trainer.epoch}")
        stage = hook.removeprefix("on_").removesuffix("_start")
        if stage in ("fit", "epoch", "validation"):
            trainer.exits[stage].callback(lambda: cleanups.append(f"that of {stage}, after {len(hooks)} hooks"))
        if hook == f"on_{place}" and sum(entry.startswith(hook) for entry in hooks) == call:
            raise error

    body = {hook: lambda self, trainer, hook=hook: note(hook, trainer) for hook in _LESSON["HOOKS"]}
    probe = type("Probe", (_LESSON["Callback"],), body)()
    net = nn.Linear(5, 3)
    data = [(torch.randn(4, 5), torch.randint(3, (4,)))]
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    fit = partial(kind([probe]).fit, net, sgd, F.cross_entropy, data * batches, data if validates else None, 2)
    hooks.append(f"the end of fit: {outcome(fit)}")
    return {"hooks": hooks, "cleanups": cleanups}


def _beside(answer: Any, heard: str, *case: Any) -> Iterator[tuple[int, tuple[str, str]]]:
    """The number of each hook or cleanup, and what it is in the answer's run and in the right one."""
    got, want = (_heard(kind, *case)[heard] for kind in (answer, _trainer()))
    return enumerate(zip_longest(got, want, fillvalue="nothing"), start=1)


@exercise("15-10.1", "A trainer that cleans up", points=15, demands=5, stand_in=_trainer, stand_in_name="ours")
def trainer(trial: Trial, answer: Any) -> None:
    """`answer` is TinyTrainer with stages and signals: runs in which a callback raises end as they should."""
    _look_up(answer, "fit")
    for batches in range(4):
        for number, (got, want) in _beside(answer, "hooks", batches, batches % 2 > 0, "", 0, OSError):
            trial.needs(
                "the hooks of a run come in their order",
                got == want,
                expected=want,
                got=f"{got} (hook {number} of a run)",
                hint="which stage is inside of which?",
                see=1,
            )
    inside = ["batch_start", "before_backward", "before_step", "after_step", "batch_end"]
    around = ["fit_start", "epoch_start", "epoch_end"]
    table = [
        ("after an error no end hook is called, and it comes out of fit", OSError, "hooks",
         [*inside, *around, "validation_start", "validation_end"],
         "what does your stage do when an error passes through it?", 1),
        ("cleanups run when their stage is left", OSError, "cleanups", [*inside, *around], "what keeps them?", 1),
        ("CancelBatch ends its batch alone", _LESSON["CancelBatch"], "hooks", inside, "what goes on after it?", 3),
        ("CancelEpoch: validation and end of the epoch follow", _LESSON["CancelEpoch"], "hooks",
         inside, "what is skipped?", 2),
        ("CancelFit: on_fit_end follows, nothing else", _LESSON["CancelFit"], "hooks",
         [*inside, "epoch_start", "epoch_end", "validation_end"], "in which block is it absorbed?", 2),
    ]  # fmt: skip
    for demand, error, heard, places, hint, see in table:
        with trial.group(demand, hint=hint, see=see):
            for place, call in product(places, (1, 2)):
                batches = random.randint(1, 3)
                case = f"{error.__name__} in call {call} of on_{place}, {batches} batches an epoch"
                for number, (got, want) in _beside(answer, heard, batches, True, place, call, error):
                    trial.equal(f"number {number} of the {heard}: {case}", got, want)


# ---------------------------------------------------------------- 15-10.2


def _early_stopping() -> type:
    """The right answer: the check compares with it, and it is the stand-in."""

    cancel_fit = _LESSON["CancelFit"]

    class EarlyStopping(_LESSON["answer"]):
        def on_fit_start(self, trainer: Any) -> None:
            self.best, self.wait = None, 0

        def on_epoch_end(self, trainer: Any) -> None:
            value = trainer.metrics[self.monitor]
            if not math.isfinite(value):
                raise cancel_fit(f"{self.monitor} is {value}")
            sign = 1 if self.mode == "min" else -1
            if self.best is None or sign * (self.best - value) > self.min_delta:
                self.best, self.wait = value, 0
            else:
                self.wait += 1
            if self.wait >= self.patience:
                raise cancel_fit(f"no improvement for {self.wait} epochs")

    return EarlyStopping


_STOPPING: list[tuple[str, dict[str, list], str, int | None]] = [  # demand, options, hint, folded hint
    ("best and wait follow the values and min_delta", {"min_delta": [0.0, 0.25, 0.5]}, "how far is it from best?", 1),
    ("mode='max'", {"mode": ["max"], "min_delta": [0.0, 0.25]}, "where does a larger one win?", 1),
    ("stops when wait reaches patience", {"patience": [1, 2, 3]}, "how large is wait then, and what ends a run?", 2),
    ("monitor is the metric's name", {"monitor": ["val_accuracy"]}, "which of the metrics is looked at?", None),
    ("a second run begins anew", {}, "what is left over from the first run?", 3),
    ("NaN or infinity: stops, best and wait stay", {}, "what do comparisons with it give?", 2),
]


def _shown(stopper: Any) -> dict[str, Any]:
    begun = stopper.best is not None and math.isfinite(stopper.best)  # None or infinity: no value yet
    return {"best": stopper.best if begun else None, "wait": stopper.wait}


@exercise("15-10.2", "Early stopping", points=15, demands=6, stand_in=_early_stopping, stand_in_name="ours")
def early_stopping(trial: Trial, answer: Any) -> None:
    """`answer(monitor, mode, patience, min_delta)` raises CancelFit at the end of an epoch."""
    _look_up(answer, "on_epoch_end")
    reference = _early_stopping()
    for demand, choices, hint, see in _STOPPING:
        with trial.group(demand, hint=hint, see=see):
            for _ in range(40):
                options = {"patience": 99} | {name: random.choice(values) for name, values in choices.items()}
                right = reference(**options)
                events: list[tuple[str, Callable[[Any], None]]] = []
                for _ in range(2 if "second" in demand else 1):
                    # multiples of 1/8: no rounding, many gains of exactly min_delta
                    values = [number / 8 for number in random.sample(range(-8, 9), 8)]
                    if "NaN" in demand:
                        values.insert(random.randint(1, 4), random.choice((math.nan, math.inf, -math.inf)))
                    begins = SimpleNamespace(metrics={})
                    events.append((f"a run with {options}", lambda it, run=begins: it.on_fit_start(run)))
                    right.on_fit_start(begins)
                    for value in values:
                        run = SimpleNamespace(metrics={"other": 0.0, options.get("monitor", "val_loss"): value})
                        events.append((f"{value}", lambda it, run=run: it.on_epoch_end(run)))
                        if outcome(partial(right.on_epoch_end, run)) != "no exception":
                            break
                script(trial, answer(**options), reference(**options), events, _shown)


# ---------------------------------------------------------------- 15-10.3


def _step_log() -> type:
    class StepLog(_LESSON["answer"]):
        def on_fit_start(self, trainer: Any) -> None:
            self.rows, self.waiting = [], []
            trainer.exits["fit"].callback(self.flush)

        def on_after_step(self, trainer: Any) -> None:
            row = {"step": trainer.step, "epoch": trainer.epoch}
            for name, column in self.columns.items():
                value = column(trainer)
                row[name] = value.detach().clone() if isinstance(value, Tensor) else value
            self.waiting.append(row)
            if len(self.waiting) == self.every:
                self.flush()

        def flush(self) -> None:
            rows, self.waiting = self.waiting, []
            for row in self.read(rows):
                self.emit(row)

    return StepLog


def _logged(answer: Any, steps: int, every: int, device: str = "cpu") -> SimpleNamespace:
    """A log after some steps in which a tensor that it shows is changed in place."""
    run = SimpleNamespace(epoch=2, metrics={}, exits={"fit": ExitStack()}, total=torch.zeros((), device=device))
    found = SimpleNamespace(run=run, read=[], emitted=[], wanted=[], leaves=[])

    def read(rows: list) -> list:
        if rows:
            found.read.append(len(rows))
        return [{k: v.item() if isinstance(v, Tensor) else v for k, v in row.items()} for row in rows]

    def loss(trainer: Any) -> Tensor:
        leaf = torch.full((), float(trainer.step), device=device, requires_grad=True)
        found.leaves.append(weakref.ref(leaf))
        return leaf * 2

    columns = {"loss": loss, "total": lambda trainer: trainer.total, "lr": lambda trainer: 0.5 / trainer.step}
    found.log = answer(columns, every, read)
    found.log.emit = found.emitted.append
    found.log.on_fit_start(run)
    for run.step in range(1, steps + 1):
        run.total += run.step
        found.log.on_after_step(run)
        found.wanted.append({"step": run.step, "epoch": 2, "loss": 2.0 * run.step, "lr": 0.5 / run.step})
    return found


@exercise("15-10.3", "A log of every step", points=15, demands=6, stand_in=_step_log, stand_in_name="ours")
def step_log(trial: Trial, answer: Any) -> None:
    """`answer(columns, every, read)` is a callback: rows wait as tensors, are read together, and go to emit."""
    _look_up(answer, "on_after_step")
    sizes = [(1, 1), (4, 2), (7, 3), (5, 9)]
    with trial.group("a row for each step, with all columns", hint="which names, and which rows?"):
        for steps, every in sizes:
            found = _logged(answer, steps, every)
            trial.equal("rows in self.rows that weren't emitted", found.log.rows, [])
            found.log.on_epoch_end(found.run)
            got = [{name: row.get(name) for name in ("step", "epoch", "loss", "lr")} for row in found.emitted]
            trial.equal(f"rows after {steps} steps with every={every}", got, found.wanted)
    with trial.group("the numbers of its step, if a tensor is changed later", hint="whose memory is in a row?", see=1):
        found = _logged(answer, 7, 3)
        found.log.on_epoch_end(found.run)
        got = [row.get("total") for row in found.emitted]
        trial.equal("a running sum in 7 steps, every=3", got, [1.0, 3.0, 6.0, 10.0, 15.0, 21.0, 28.0])
    with trial.group("read every `every` steps, together", hint="how many rows wait when they are read?"):
        for steps, every in sizes:
            found = _logged(answer, steps, every)
            trial.equal(f"rows read at a time, {steps} steps, every={every}", found.read, [every] * (steps // every))
    with trial.group("nothing else asks the device", hint="which line needs a tensor's value?", see=1, free=True):
        _logged(answer, 7, 99, device="meta")  # tensors without values: asking for one raises
    with trial.group("what waits is read after an error, too", hint="who calls flush then?", see=2):
        for steps, every in sizes:
            found = _logged(answer, steps, every)
            found.run.exits["fit"].close()
            trial.equal(f"rows after {steps} steps and an error, every={every}", len(found.emitted), steps)
    with trial.group("a waiting row keeps no graph alive", hint="what does a loss hold besides its value?", see=1):
        alive = [leaf() is not None for leaf in _logged(answer, 7, 99).leaves]
        trial.equal("whether the graph of a step is alive, after 7 steps", alive, [False] * 7)


# ---------------------------------------------------------------- 15-10.4


@contextmanager
def _disk(folder: Path, killed_at: int = 0) -> Iterator[SimpleNamespace]:
    """Watch the calls of fsync and the renamings; the process can be killed at one of them.

    Yields: how many calls there were, and of each renaming whether the file's content had been forced to the disk.
    """
    found = SimpleNamespace(calls=0, forced=set(), renamed=[])

    def watch(name: str) -> Callable[..., None]:
        original = getattr(os, name)

        def call(file: Any, *arguments: Any, **options: Any) -> None:
            found.calls += 1
            if found.calls == killed_at:
                raise SystemExit
            if name == "fsync":  # what Python's buffers still hold isn't there
                found.forced.update(path.read_bytes() for path in folder.iterdir())
            else:
                found.renamed.append(Path(file).read_bytes() in found.forced)
            original(file, *arguments, **options)

        return call

    with mock.patch.multiple(os, **{name: watch(name) for name in ("fsync", "replace", "rename")}):
        yield found


def _checkpoint_file() -> type:
    damaged = _LESSON["DamagedCheckpoint"]

    class CheckpointFile(_LESSON["answer"]):
        def write(self, state: Any) -> None:
            torch.save(state, buffer := io.BytesIO())
            content = buffer.getvalue()
            temporary = Path(f"{self.path}.tmp")
            with open(temporary, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)

        def read(self) -> Any:
            whole = self.path.read_bytes()
            if hashlib.sha256(whole[32:]).digest() != whole[:32]:
                raise damaged(f"{self.path.name} is damaged")
            return torch.load(io.BytesIO(whole[32:]), map_location="cpu", weights_only=True)

    return CheckpointFile


_FIRST = {"tensors": [torch.arange(35.0).view(5, 7).t(), torch.tensor(2)], "step": 3, "nested": {"x": [1.5, (2, True)]}}
_SECOND = {"tensors": [torch.arange(300.0)], "step": 4}


@exercise(
    "15-10.4", "A checkpoint that is whole", points=20, demands=8, stand_in=_checkpoint_file, stand_in_name="ours"
)
def checkpoint_file(trial: Trial, answer: Any) -> None:
    """`answer(path)` has `write(state)` and `read()`."""
    _look_up(answer, "write")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.ckpt"
        with trial.group("what was written comes back", hint="which bytes are written, and which are read?"):
            for state in (_FIRST, _SECOND):
                answer(path).write(state)
                trial.equal("what is read", answer(path).read(), state)
        _always_whole(trial, answer(path), path)
        _noticed(trial, answer(path), path)


def _always_whole(trial: Trial, file: Any, path: Path) -> None:
    with trial.group("killed anywhere, the old file or the new one is there", hint="what is at path meanwhile?", see=1):
        file.write(_FIRST)
        old, kept = path.read_bytes(), path.with_name("kept")
        os.link(path, kept)  # shows what is written into the old file, however it ends
        with _disk(path.parent) as disk:
            file.write(_SECOND)
        trial.equal("whether the old file was written over", kept.read_bytes() != old, False)
        for number in range(1, disk.calls + 1):
            file.write(_FIRST)
            with suppress(SystemExit), _disk(path.parent, number):
                file.write(_SECOND)
            case = f"whether a state is read, killed at call {number} of fsync or a renaming"
            trial.equal(case, file.read()["step"] in (3, 4), True)
    with trial.group("a write that fails raises, and leaves the old file", hint="what becomes of an exception?", see=1):
        unknown = {"step": 4, "code": lambda: None}
        for case, calls, state in (
            ("on a full disk", ["fsync"], _SECOND),
            ("at the renaming", ["replace", "rename"], _SECOND),
            ("of something that can't be saved", [], unknown),
        ):
            file.write(_FIRST)
            full = mock.Mock(side_effect=OSError(28, "No space left on device"))
            with mock.patch.dict(vars(os), dict.fromkeys(calls, full)):
                ended = outcome(lambda state=state: file.write(state))
            if full.called or not calls:
                trial.equal(f"whether write raises {case}", ended != "no exception", True)
                trial.equal(f"the step that is read after a write {case}", file.read()["step"], 3)
    hint = "whose buffer still holds what, when the file gets its name?"
    with trial.group("the content is on the disk before it gets its name", hint=hint, see=2):
        with _disk(path.parent) as disk:
            file.write(_SECOND)
        trial.equal("whether a renamed file's content was on the disk", set(disk.renamed), {True})


def _noticed(trial: Trial, file: Any, path: Path) -> None:
    file.write(_FIRST)
    whole = path.read_bytes()
    changes = {"with a byte added": whole + b"\0"}
    for end in (0, 32, len(whole) - 1, *random.sample(range(len(whole)), 8)):
        changes[f"cut off behind {end} bytes"] = whole[:end]
    for place in range(0, len(whole), 5):
        byte = bytes([whole[place] ^ (1 << random.randrange(8))])
        changes[f"with a bit of byte {place} of {len(whole)} changed"] = whole[:place] + byte + whole[place + 1 :]
    with (
        mock.patch.object(torch, "load", side_effect=torch.load) as load,
        trial.group("damage is a DamagedCheckpoint with the file's name", hint="what is compared, and named?", see=3),
    ):
        for name, content in changes.items():
            path.write_bytes(content)
            raises(trial, f"a file {name}", file.read, _LESSON["DamagedCheckpoint"], path.name)
    trial.that(
        "a damaged file is not unpickled",
        not load.called,
        expected="no call of torch.load for a damaged file",
        got=f"{load.call_count} calls",
        hint="what comes first, the comparison or torch.load?",
        see=3,
    )
    file.write({"step": 1, "code": SimpleNamespace()})
    trial.equal(
        "code in an undamaged file is refused, and not called damage",
        outcome(file.read),
        "UnpicklingError",
        hint="which option of torch.load refuses code, and what comes out of read then?",
    )
    file.write(_FIRST)
    with mock.patch.object(torch, "load", side_effect=torch.load) as load:
        file.read()
    trial.that(
        "tensors arrive on the CPU",
        "cpu" in str(load.call_args),
        expected="a map_location that leads to the CPU",
        got=load.call_args,
        hint="what does a state from a GPU need, of whichever number?",
    )


# ---------------------------------------------------------------- 15-10.5


def _group_step() -> type:
    synced = _LESSON["synced"]

    class GroupStep(_LESSON["answer"]):
        def __call__(self, trainer: Any) -> None:
            weights = [self.weigh(batch) for batch in trainer.batch]
            losses = []
            trainer.optimizer.zero_grad()
            for number, batch in enumerate(trainer.batch):
                with synced(trainer.model, number == len(weights) - 1):
                    output, y = trainer.forward(trainer.model, batch)
                    trainer.loss = trainer.loss_fn(output, y) * (weights[number] / sum(weights))
                    trainer.call("on_before_backward")
                    self.scaler.scale(trainer.loss).backward()
                losses.append(trainer.loss.detach())
            trainer.loss = sum(losses)
            self.update(trainer)

    return GroupStep


def _stepped(
    answer: Any, sizes: list[int], *, weigh: Any = None, old: Any = None, scaler: Any = None, factor: float = 1.0
) -> SimpleNamespace:
    """What a step for a group of these sizes leaves behind, and the gradient and loss of one whole batch.

    Args:
        weigh: another than the lesson's, which counts samples.
        old: a gradient that is there already.
        factor: what a callback multiplies the loss of each part by.
    """
    torch.manual_seed(len(sizes))
    group = [(torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))) for n in sizes]
    model = nn.Linear(4, 3, dtype=torch.float64)
    weights = [weigh(part) if weigh else len(part[1]) for part in group]
    losses = [F.cross_entropy(model(x), y) * w / sum(weights) for (x, y), w in zip(group, weights, strict=True)]
    sum(losses).backward()
    found = SimpleNamespace(calls=[], travelled=[], whole_gradient=model.weight.grad, whole_loss=sum(losses).item())
    model.weight.grad = old
    model.quiet = False

    @contextmanager
    def no_sync() -> Iterator[None]:
        model.quiet = True
        yield
        model.quiet = False

    def forward(model: Any, part: tuple) -> tuple:
        output = model(part[0])
        output.register_hook(lambda grad: found.travelled.append(not model.quiet))
        return output, part[1]

    def call(hook: str) -> None:
        found.calls.append(hook)
        if hook == "on_before_backward":
            run.loss = run.loss * factor
        if hook == "on_before_step":
            found.gradient, found.loss = model.weight.grad.clone(), run.loss

    model.no_sync = no_sync
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    run = SimpleNamespace(model=model, optimizer=sgd, forward=forward, step=0, call=call, batch=group)
    run.loss_fn = F.cross_entropy
    answer(scaler, **({"weigh": weigh} if weigh else {}))(run)
    return found


@exercise("15-10.5", "A step for a group", points=15, demands=6, stand_in=_group_step, stand_in_name="ours")
def group_step(trial: Trial, answer: Any) -> None:
    """`answer(scaler, weigh)(trainer)` takes one step for the list trainer.batch."""
    _look_up(answer, "__call__")
    groups = [[8], [1, 7, 2], [5, 5, 5, 1]]
    with trial.group("the gradient of the whole batch, by the shares of weigh", hint="what does a batch count?", see=1):
        for sizes, weigh in product(groups, (None, lambda part: 1.0 + part[1].sum().item())):
            found = _stepped(answer, sizes, weigh=weigh)
            trial.close(f"parts of {sizes}" + ", another weigh" * bool(weigh), found.gradient, found.whole_gradient)
    hint = "what is the loss when the group is done?"
    with trial.group("trainer.loss is the loss of the group, without a graph", hint=hint, see=2):
        for sizes in groups:
            found = _stepped(answer, sizes, factor=3.0)
            case = f"trainer.loss, tripled by a callback, parts of {sizes}"
            trial.close(case, float(found.loss.detach()), 3 * found.whole_loss)
            trial.equal(f"whether trainer.loss has a graph, parts of {sizes}", found.loss.requires_grad, False)
    hint = "how often does each moment come, and what is backward called on?"
    with trial.group(
        "hooks: before each backward, with its loss in trainer.loss, and around one step", hint=hint, see=1
    ):
        for sizes in groups:
            found = _stepped(answer, sizes, factor=3.0)
            parts = ["on_before_backward"] * len(sizes)
            trial.equal(f"hooks, parts of {sizes}", found.calls, [*parts, "on_before_step", "on_after_step"])
            case = f"the gradient, if a callback triples trainer.loss in on_before_backward, parts of {sizes}"
            trial.close(case, found.gradient, 3 * _stepped(answer, sizes).gradient)
    with trial.group("old gradients don't count", hint="what is in the gradients before the first part?", see=1):
        for sizes in groups:
            found = _stepped(answer, sizes, old=torch.ones(3, 4, dtype=torch.float64))
            trial.close(f"the gradient, parts of {sizes}", found.gradient, _stepped(answer, sizes).gradient)
    hint = "what goes through self.scaler, and what doesn't?"
    with trial.group("backward is called on what the scaler has scaled", hint=hint):
        for sizes in groups:
            found = _stepped(answer, sizes, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
            plain = _stepped(answer, sizes)
            trial.close(f"the unscaled gradient, parts of {sizes}", found.gradient, plain.gradient)
            trial.close(f"trainer.loss, parts of {sizes}", float(found.loss.detach()), float(plain.loss.detach()))
    with trial.group("gradients travel once, with the last part", hint="what is computed in the block of synced?"):
        for sizes in groups:
            travelled = _stepped(answer, sizes).travelled
            trial.equal(f"whether they travel, parts of {sizes}", travelled, [False] * (len(sizes) - 1) + [True])


# ---------------------------------------------------------------- 15-10.6


def _run_state() -> type:
    refuse, set_states, states_of = (
        _LESSON[name] for name in ("refuse_another_run", "set_generator_states", "generator_states")
    )

    class RunState(_LESSON["answer"]):
        def begin(self, trainer: Any) -> None:
            self.pending = None
            if self.saved is not None:
                refuse(trainer, self.saved["fingerprint"])
                self.pending, self.saved = self.saved, None
                vars(trainer).update(self.pending["position"])
                if trainer.batches_done == 0:
                    self.put_back(trainer)

        def before_loader(self, trainer: Any) -> None:
            if self.pending is not None:
                set_states(trainer, self.pending["generators"][trainer.ranks.rank]["began"])
            self.began = states_of(trainer)

        def after_skip(self, trainer: Any) -> None:
            if self.pending is not None:
                self.put_back(trainer)

    return RunState


def _run(answer: Any, saved: Any = None, optimizer: type = torch.optim.Adam) -> SimpleNamespace:
    """A run whose `fit()` starts from the saved state, if there is one, and keeps a state for each batch and epoch."""
    found = SimpleNamespace(states=[], state=answer(saved), net=_net(0 if saved is None else 1))

    class Keeps(_LESSON["Callback"]):
        def on_epoch_start(self, trainer: Any) -> None:
            torch.rand(1)

        def on_batch_end(self, trainer: Any) -> None:
            found.states.append(found.state.collect(trainer))

        on_epoch_end = on_batch_end

    final_trainer = _LESSON["fingerprint"].__globals__["Trainer"]  # the lesson's second; the first is an exercise's
    found.trainer = final_trainer([Keeps()], state=found.state)
    ranks = found.trainer.ranks  # those of the second of two processes
    ranks.rank, ranks.gather = 1, lambda mine: [{"began": mine["now"], "now": mine["began"]}, mine]
    data = TensorDataset(torch.arange(60.0).view(12, 5).sin(), torch.arange(12) % 3)
    loader = DataLoader(data, 4, shuffle=True)
    made = optimizer(found.net.parameters(), lr=0.01)
    found.fit = partial(found.trainer.fit, found.net, made, F.cross_entropy, loader, [data[:]], max_epochs=2)
    return found


def _positions(states: list[dict]) -> list[dict]:
    """Where each state was saved, with the names of the metrics that were known."""
    return [state["position"] | {"metrics": list(state["position"]["metrics"])} for state in states]


@exercise("15-10.6", "A run that goes on", points=20, demands=6, stand_in=_run_state, stand_in_name="ours")
def run_state(trial: Trial, answer: Any) -> None:
    """`answer(saved)` puts a run back where it was saved: begin, before_loader, after_skip."""
    _look_up(answer, "begin")
    whole = _run(_run_state())
    whole.fit()
    right = list(whole.net.state_dict().values())
    for demand, between, hint, see in (
        ("saved in an epoch: the same bits", False, "which states do the generators have, and when?", 2),
        ("saved between epochs: the same bits", True, "what may a callback do in on_epoch_start?", 1),
    ):
        with trial.group(demand, hint=hint, see=see):
            for saved in whole.states[:-1]:
                if (saved["position"]["batches_done"] == 0) == between:
                    found = _run(answer, saved)
                    found.fit()
                    got = list(found.net.state_dict().values())
                    trial.equal(f"weights at the end, saved at {saved['position']}", got, right)
    with trial.group("the position goes on", hint="what is a callback told in the first step after it?"):
        for number in (1, 3):
            found = _run(answer, whole.states[number])
            found.fit()
            got, want = _positions(found.states), _positions(whole.states[number + 1 :])
            trial.equal("positions of a run that goes on", got, want)
    with trial.group("a run that went on can be saved and go on again", hint="what does the next file need?", see=2):
        found = _run(answer, whole.states[1])
        found.fit()
        began = [state["generators"][1]["began"]["torch"] for state in (found.states[0], whole.states[2])]
        trial.equal("the generators at the beginning of the epoch, in the next state", *began)
    with trial.group("a second fit begins anew", hint="what does self.saved hold when its state was taken?", free=True):
        found = _run(answer, whole.states[1])
        found.fit()
        found.states.clear()
        found.fit()
        trial.equal("batches and epochs of the second fit", len(found.states), len(whole.states))
    with trial.group("another run is refused before anything is changed", hint="what comes first in begin?"):
        found = _run(answer, whole.states[3], torch.optim.SGD)
        trial.equal("how a fit with another optimizer ends", outcome(found.fit), "ValueError")
        trial.equal("the trainer's step", found.trainer.step, 0)
        trial.equal("whether the saved state is still there for the next fit", found.state.saved is not None, True)
