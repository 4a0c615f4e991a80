"""Checks of the exercises in 15-10, Building a Mini Training Framework."""

import hashlib
import io
import math
import os
import random
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
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
from shared.lessons.topic_15_10.host_reads import Reads

_LESSON: dict[str, Any] = {}  # what the lesson defines, for stand-ins


def _lesson(answer: Any, method: str) -> SimpleNamespace:
    """The names of the lesson, found through a method of the answer."""
    _LESSON.update(getattr(answer, method).__globals__, answer=answer)
    return SimpleNamespace(**{name: value for name, value in _LESSON.items() if name.isidentifier()})


def _net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))


# ---------------------------------------------------------------- 15-10.1


def _trainer() -> type:
    """The stand-in: the answer's class with the four methods that are asked for."""

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


_INSIDE = ["before_backward", "before_step", "after_step"]


def _heard(kind: type, case: Mapping[str, Any]) -> dict[str, list[str]]:
    """What callbacks hear of a run in which one raises, which cleanups run, and how it ends."""
    hooks: list[str] = []
    closed: list[str] = []

    def note(hook: str, self: Any, trainer: Any) -> None:
        number = sum(entry.startswith(hook) for entry in hooks) + 1
        mode = "training" if trainer.model.training else "evaluating"
        hooks.append(f"{hook} at step {trainer.step} of epoch {trainer.epoch}, {mode}")
        stage = hook[3:].removesuffix("_start")
        if hook.endswith("_start") and stage != "batch":
            for cleanup in ("first", "second"):
                trainer.exits[stage].callback(
                    lambda c=cleanup: closed.append(f"{c} of {stage}, after {len(hooks)} hooks")
                )
        if hook == f"on_{case['hook']}" and number == case["call"]:
            raise case["error"]

    body = {hook: lambda self, trainer, hook=hook: note(hook, self, trainer) for hook in _LESSON["HOOKS"]}
    probe = type("Probe", (_LESSON["Callback"],), body)()
    net = _net(0)
    batches = [(torch.randn(4, 5), torch.randint(3, (4,))) for _ in range(case["batches"])]
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    held_out = [(torch.randn(4, 5), torch.randint(3, (4,)))] if case["validates"] else None
    fit = partial(kind([probe]).fit, net, sgd, F.cross_entropy, batches, held_out, case["epochs"])
    return {"how it ends": [outcome(fit)], "hooks": hooks, "cleanups": closed}


@exercise(
    "15-10.1",
    "A trainer that cleans up",
    points=15,
    demands=5,
    stand_in=_trainer,
    stand_in_name="the check's own answer",
)
def trainer(trial: Trial, answer: Any) -> None:
    """`answer` is TinyTrainer with stages and signals: random runs, in which a callback raises, end as they should."""
    lesson = _lesson(answer, "fit")
    anywhere = [*_INSIDE, "batch_start", "batch_end"]
    table = [
        (
            "after an error no end hook is called, and it comes out of fit",
            OSError,
            [*anywhere, "validation_start", "validation_end", "epoch_start", "epoch_end", "fit_start"],
            "hooks",
            "what does your stage do when an error passes through it?",
            1,
        ),
        (
            "cleanups run when their stage is left",
            OSError,
            [*anywhere, "fit_start", "epoch_start", "epoch_end", ""],
            "cleanups",
            "what keeps them?",
            1,
        ),
        ("CancelBatch ends its batch alone", lesson.CancelBatch, anywhere, "hooks", "what goes on after it?", 3),
        (
            "CancelEpoch: validation and end of the epoch follow",
            lesson.CancelEpoch,
            anywhere,
            "hooks",
            "what is skipped?",
            2,
        ),
        (
            "CancelFit: on_fit_end follows, nothing else",
            lesson.CancelFit,
            [*anywhere, "epoch_start", "epoch_end", "validation_end"],
            "hooks",
            "in which block is it absorbed?",
            2,
        ),
    ]  # fmt: skip
    for number in range(6):
        case = {"hook": "", "call": 1, "error": None, "batches": number, "epochs": 2, "validates": number % 2 > 0}
        got, want = _heard(answer, case), _heard(_trainer_of(answer), case)
        right = got["hooks"] == want["hooks"] and got["how it ends"] == want["how it ends"]
        first = _first_difference(got["hooks"], want["hooks"])
        trial.needs(
            "the hooks of a run come in their order",
            right,
            expected=(want["hooks"][first:] or ["nothing"])[0],
            got=f"{(got['hooks'][first:] or ['nothing'])[0]} (hook {first + 1} of a run), {got['how it ends'][0]}",
            hint="which stage is inside of which?",
            see=1,
        )
    for demand, error, places, looked_at, hint, see in table:
        with trial.group(demand, hint=hint, see=see):
            for number in range(24):
                case = {"hook": places[number % len(places)], "call": random.randint(1, 3), "error": error and error()}
                case |= {"batches": random.randint(0, 3), "epochs": random.randint(1, 3), "validates": number % 3 > 0}
                if error is OSError and number < len(places):
                    case |= {"call": 1, "batches": 2, "epochs": 2, "validates": True}
                text = ", ".join(f"{name} {value!r}" for name, value in case.items())
                got, want = _heard(answer, case), _heard(_trainer_of(answer), case)
                for name in ("how it ends", looked_at) if looked_at == "hooks" else (looked_at,):
                    first = _first_difference(got[name], want[name])
                    begins = f", from number {first + 1} on" if first else ""
                    trial.equal(f"{name} of a run{begins}: {text}", got[name][first:], want[name][first:])


def _first_difference(got: list, want: list) -> int:
    """From where on two lists differ; 0 if they don't."""
    if got == want:
        return 0
    alike = [one == other for one, other in zip(got, want, strict=False)]
    return alike.index(False) if False in alike else len(alike)


def _trainer_of(answer: Any) -> type:
    _LESSON["answer"] = answer
    return _trainer()


# ---------------------------------------------------------------- 15-10.2


def _early_stopping(base: type | None = None, signal: type[Exception] | None = None) -> type:
    """The right answer: the check compares with it, and it is the stand-in."""

    stop = signal or _LESSON["CancelFit"]

    class EarlyStopping(base or _LESSON["Callback"]):
        def __init__(self, monitor="val_loss", mode="min", patience=3, min_delta=0.0) -> None:
            self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
            self.sign = 1 if mode == "min" else -1

        def on_fit_start(self, trainer: Any) -> None:
            self.best, self.wait = None, 0

        def on_epoch_end(self, trainer: Any) -> None:
            value = trainer.metrics[self.monitor]
            if not math.isfinite(value):
                raise stop(f"{self.monitor} is {value}")
            if self.best is None or self.sign * (self.best - value) > self.min_delta:
                self.best, self.wait = value, 0
            else:
                self.wait += 1
            if self.wait >= self.patience:
                raise stop(f"no improvement for {self.wait} epochs")

        def on_epoch_start(self, trainer: Any) -> None:
            if self.wait >= self.patience:
                raise stop(f"no improvement for {self.wait} epochs")

        def state_dict(self) -> dict[str, Any]:
            return {"best": self.best, "wait": self.wait}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.best, self.wait = state["best"], state["wait"]

    return EarlyStopping


_STOPPING: list[tuple[str, dict[str, list], str, int | None]] = [  # demand, options, hint, folded hint
    (
        "best and wait follow the values and min_delta",
        {"min_delta": [0.0, 0.25, 0.5]},
        "how far is it from best?",
        1,
    ),
    ("mode='max'", {"mode": ["max"], "min_delta": [0.0, 0.25]}, "where does a larger one win?", 1),
    ("stops when wait reaches patience", {"patience": [1, 2, 3]}, "how large is wait then, and what ends a run?", 2),
    ("monitor is the metric's name", {"monitor": ["val_accuracy"]}, "which of the metrics is looked at?", None),
    ("a second run begins anew", {}, "what is left over from the first run?", 3),
    ("NaN or infinity: stops, best and wait stay", {}, "what do comparisons with it give?", 2),
]


@exercise(
    "15-10.2",
    "Early stopping",
    points=15,
    demands=6,
    stand_in=_early_stopping,
    stand_in_name="the check's own answer",
)
def early_stopping(trial: Trial, answer: Any) -> None:
    """`answer(monitor, mode, patience, min_delta)` raises CancelFit at the end of an epoch."""
    lesson = _lesson(answer, "on_epoch_end")
    reference = _early_stopping(object, lesson.CancelFit)

    def look(stopper: Any) -> dict[str, Any]:
        begun = stopper.best is not None and math.isfinite(stopper.best)  # None or infinity: no value yet
        return {"best": stopper.best if begun else None, "wait": stopper.wait}

    for demand, choices, hint, see in _STOPPING:
        with trial.group(demand, hint=hint, see=see):
            for _ in range(40):
                options = {"patience": 99} | {name: random.choice(values) for name, values in choices.items()}
                events = []
                for _ in range(2 if "second" in demand else 1):
                    # multiples of 1/8: no rounding, many gains of exactly min_delta. Equal values are in the first two
                    # demands alone, so that who takes them for better ones loses only those.
                    numbers = random.choices(range(-8, 9), k=8) if see == 1 else random.sample(range(-8, 9), 8)
                    values = [number / 8 for number in numbers]
                    if "NaN" in demand:
                        values.insert(random.randint(1, 4), random.choice((math.nan, math.inf, -math.inf)))
                    events.append(("on_fit_start", lambda it: it.on_fit_start(SimpleNamespace(metrics={}))))
                    for value in values:
                        metrics = {"other": 0.0, options.get("monitor", "val_loss"): value}
                        there = SimpleNamespace(metrics=metrics)
                        events.append((f"{value} with {options}", lambda it, there=there: it.on_epoch_end(there)))
                right = reference(**options)
                last = _first_end(right, events)
                script(trial, answer(**options), reference(**options), events[:last], look)


def _first_end(reference: Any, events: list) -> int:
    """How many events there are up to the first that ends the run."""
    for number, (_, action) in enumerate(events, start=1):
        if outcome(lambda action=action: action(reference)) != "no exception":
            return number
    return len(events)


# ---------------------------------------------------------------- 15-10.3


def _step_log() -> type:
    class StepLog(_LESSON["answer"]):
        def on_fit_start(self, trainer: Any) -> None:
            self.rows, self.waiting = [], []
            trainer.exits["fit"].callback(lambda: self.flush())

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


def _logged(answer: Any, steps: int, every: int, ends: str = "epoch", device: str = "cpu") -> SimpleNamespace:
    """A log after some steps in which a tensor that it shows is changed in place."""
    run = SimpleNamespace(step=0, epoch=2, metrics={}, exits={"fit": ExitStack()}, total=torch.zeros((), device=device))
    found = SimpleNamespace(read=[], emitted=[], wanted=[], graphs=[], reads=0)

    def number(value: Any) -> float:  # detached, so that a row with its graph is rejected for the graph alone
        return float(value.detach() if isinstance(value, Tensor) else value)

    def read(rows: list) -> list:
        if rows:
            found.read.append(len(rows))
        return [{name: number(value) for name, value in row.items()} for row in rows]

    def loss(trainer: Any) -> Tensor:
        trainer.leaf = torch.full((), float(trainer.step), device=device, requires_grad=True)
        return trainer.leaf * 2

    columns = {"loss": loss, "total": lambda trainer: trainer.total, "lr": lambda trainer: 0.5 / trainer.step}
    log = answer(columns, every, read)
    log.emit = found.emitted.append
    log.on_fit_start(run)
    for step in range(1, steps + 1):
        run.step = step
        run.total += step
        with Reads() as reads:
            log.on_after_step(run)
        found.reads += reads.count
        found.graphs.append(weakref.ref(run.leaf))
        total = sum(range(step + 1))
        found.wanted.append({"step": step, "epoch": 2, "loss": 2 * step, "total": total, "lr": 0.5 / step})
    run.leaf = None
    found.alive = sum(graph() is not None for graph in found.graphs)
    found.rows = list(log.rows)  # emit puts none there
    if ends == "epoch":
        log.on_epoch_end(run)
    elif ends == "error":
        run.exits["fit"].close()
    return found


@exercise(
    "15-10.3",
    "A log of every step",
    points=15,
    demands=6,
    stand_in=_step_log,
    stand_in_name="the check's own answer",
)
def step_log(trial: Trial, answer: Any) -> None:
    """`answer(columns, every, read)` is a callback: rows wait as tensors, are read together, and go to emit."""
    _lesson(answer, "on_after_step")
    sizes = [(1, 1), (3, 1), (4, 2), (7, 3), (5, 9)]
    names = ["step", "epoch", "loss", "lr"]
    with trial.group("a row for each step, with all columns", hint="which names, and which rows?"):
        for steps, every in sizes:
            found = _logged(answer, steps, every)
            got = [{name: row.get(name) for name in names} for row in found.emitted]
            want = [{name: float(row[name]) for name in names} for row in found.wanted]
            trial.equal(f"rows after {steps} steps with every={every}", got, want)
            trial.equal("rows in self.rows that weren't emitted", found.rows, [])
    with trial.group("the numbers of its step, if a tensor is changed later", hint="whose memory is in a row?", see=1):
        for steps, every in sizes:
            found = _logged(answer, steps, every)
            got = [row.get("total") for row in found.emitted]
            want = [float(row["total"]) for row in found.wanted]
            trial.equal(f"a running sum in {steps} steps, every={every}", got, want)
    with trial.group("read every `every` steps, together", hint="how many rows wait when they are read?"):
        for steps, every in sizes:
            found = _logged(answer, steps, every, ends="nothing")
            trial.equal(f"rows read at a time, {steps} steps, every={every}", found.read, [every] * (steps // every))
    with trial.group("nothing else asks the device", hint="which of your lines needs a tensor's value?", see=1):
        trial.equal("values asked for in 7 steps", _logged(answer, 7, 99, ends="nothing").reads, 0)
        asked = outcome(lambda: _logged(answer, 7, 99, ends="nothing", device="meta"))
        trial.equal("7 steps with tensors that have no values (device 'meta')", asked, "no exception")
    with trial.group("what waits is read after an error, too", hint="who calls flush then?", see=2):
        for steps, every in sizes:
            found = _logged(answer, steps, every, ends="error")
            trial.equal(f"rows after {steps} steps and an error, every={every}", len(found.emitted), steps)
    with trial.group("a waiting row keeps no graph alive", hint="what does a loss hold besides its value?", see=1):
        trial.equal("graphs that are alive after 7 steps", _logged(answer, 7, 99, ends="nothing").alive, 0)


# ---------------------------------------------------------------- 15-10.4

_SPRUNG: list[str] = []  # what unpickling has executed


class _Trap:
    """An object whose unpickling calls a function."""

    def __reduce__(self) -> Any:
        return _SPRUNG.append, ("unpickled",)


class _Power(BaseException):
    """The process ends here."""


class _Disk:
    """Watches a file: what is at its path at each call of fsync or a renaming, and what is on the disk."""

    def __init__(self, path: Path, fail_at: int | None = None) -> None:
        self.path, self.fail_at, self.calls = path, fail_at, 0
        self.contents: list[bytes | None] = []  # of the file, at each call
        self.durable: dict[int, bytes] = {}  # inode → content that has been forced to the disk
        self.renamed: list[bool] = []  # for each renaming, whether the content was on the disk

    def _look(self) -> None:
        self.contents.append(self.path.read_bytes() if self.path.exists() else None)
        self.calls += 1
        if self.calls == self.fail_at:
            raise _Power

    @contextmanager
    def watched(self) -> Iterator["_Disk"]:
        fsync, names = os.fsync, ("replace", "rename")
        originals = {name: getattr(os, name) for name in names}

        def forced(file: Any) -> None:
            self._look()
            fsync(file)
            found = os.fstat(file if isinstance(file, int) else file.fileno())
            for other in self.path.parent.iterdir():
                if other.is_file() and os.path.samestat(found, os.stat(other)):
                    self.durable[found.st_ino] = other.read_bytes()

        def moved(name: str) -> Callable[..., None]:
            def move(source: Any, target: Any, **options: Any) -> None:
                self._look()
                forced_to_disk = self.durable.get(os.stat(source).st_ino)
                self.renamed.append(forced_to_disk == Path(source).read_bytes())
                originals[name](source, target, **options)

            return move

        with mock.patch.multiple(os, fsync=forced, **{name: moved(name) for name in names}):
            yield self


def _checkpoint_file() -> type:
    damaged = _LESSON["DamagedCheckpoint"]

    class CheckpointFile:
        def __init__(self, path: Path | str) -> None:
            self.path = Path(path)

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
    "15-10.4",
    "A checkpoint that is whole",
    points=20,
    demands=8,
    stand_in=_checkpoint_file,
    stand_in_name="the check's own answer",
)
def checkpoint_file(trial: Trial, answer: Any) -> None:
    """`answer(path)` has `write(state)` and `read()`."""
    _lesson(answer, "write")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.b.ckpt"
        with trial.group("what was written comes back", hint="which bytes are written, and which are read?"):
            for kind in (Path, str):
                for state in (_FIRST, _SECOND, {}):
                    answer(kind(path)).write(state)
                    trial.equal(f"read from a path that is a {kind.__name__}", answer(kind(path)).read(), state)
        _whole_always(trial, answer, path)
        _noticed(trial, answer, path)


def _whole_always(trial: Trial, answer: Any, path: Path) -> None:
    disk = _Disk(path)
    with trial.group("killed anywhere, the old file or the new one is there", hint="what is at path meanwhile?", see=1):
        answer(path).write(_FIRST)
        old = path.read_bytes()
        kept = path.with_name("kept")
        os.link(path, kept)
        with disk.watched():
            answer(path).write(_SECOND)
        trial.equal("the old file's bytes, for somebody who has it open", kept.read_bytes() == old, True)
        kept.unlink()
        known = {old: "the old one", path.read_bytes(): "the new one", None: "nothing"}
        for number, content in enumerate(disk.contents, start=1):
            found = known.get(content, "something else")
            whole = found in ("the old one", "the new one")
            case = f"at path, at call {number} of fsync or a renaming"
            trial.that(case, whole, expected="the old one or the new one", got=found)
        for number in range(1, disk.calls + 1):
            answer(path).write(_FIRST)
            with suppress(_Power), _Disk(path, number).watched():
                answer(path).write(_SECOND)
            trial.equal(f"the step that is read, killed at call {number}", answer(path).read()["step"] in (3, 4), True)
    with trial.group("a write that fails raises, and leaves the old file", hint="what becomes of an exception?", see=1):
        full = OSError(28, "No space left on device")
        for case, state, error in (
            ("something that can't be saved", {"step": 1, "call": lambda: None}, None),
            ("a full disk", _SECOND, full),
        ):
            answer(path).write(_FIRST)
            with mock.patch.object(os, "fsync", side_effect=error or os.fsync) as fsync:
                ended = outcome(lambda state=state: answer(path).write(state))
            if fsync.called or error is None:
                trial.equal(f"whether write raises: {case}", ended != "no exception", True)
                trial.equal(f"the step that is read afterwards: {case}", answer(path).read()["step"], 3)
    trial.that(
        "the content is on the disk before it gets its name",
        bool(disk.renamed) and all(disk.renamed),
        expected="a renaming of a file whose content is on the disk",
        got=f"renamings: {len(disk.renamed)}, of such files: {sum(disk.renamed)}",
        hint="whose buffer still holds what, when the file gets its name?",
        see=2,
    )


def _noticed(trial: Trial, answer: Any, path: Path) -> None:
    answer(path).write(_FIRST)
    whole = path.read_bytes()
    changes = {"empty": b"", "without its last byte": whole[:-1], "with a byte added": whole + b"\0"}
    changes["with a byte in front"] = b"\0" + whole
    for end in (1, 31, 32, 33, *random.sample(range(len(whole)), 8)):
        changes[f"cut off behind {end} bytes"] = whole[:end]
    places = [*range(0, 140, 3), *range(len(whole) - 140, len(whole), 3), *random.sample(range(len(whole)), 60)]
    for place in places:
        byte = bytes([whole[place] ^ (1 << random.randrange(8))])
        changes[f"with a bit of byte {place} of {len(whole)} changed"] = whole[:place] + byte + whole[place + 1 :]
    with mock.patch.object(torch, "load", side_effect=torch.load) as load:
        with trial.group(
            "damage is a DamagedCheckpoint with the file's name",
            hint="what is compared, and named?",
            see=3,
        ):
            for name, content in changes.items():
                path.write_bytes(content)
                raises(trial, f"a file {name}", answer(path).read, _LESSON["DamagedCheckpoint"], path.name)
        calls = load.call_count
    trial.that(
        "a damaged file is not unpickled",
        calls == 0,
        expected="no call of torch.load for a damaged file",
        got=f"{calls} calls",
        hint="what comes first, the comparison or torch.load?",
        see=3,
    )
    answer(path).write({"step": 1, "trap": _Trap()})
    _SPRUNG.clear()
    ended = outcome(answer(path).read)
    trial.that(
        "code in an undamaged file is refused, and not called damage",
        ended not in ("no exception", "DamagedCheckpoint") and not _SPRUNG,
        expected="an error of torch.load, and no code that ran",
        got=f"{ended}, code that ran: {_SPRUNG}",
        hint="which option of torch.load refuses code, and what comes out of read then?",
    )
    answer(path).write(_FIRST)
    with mock.patch.object(torch, "load", side_effect=torch.load) as load:
        answer(path).read()
    devices = [call.args[1] if len(call.args) > 1 else call.kwargs.get("map_location") for call in load.call_args_list]
    trial.that(
        "tensors arrive on the CPU",
        bool(devices) and all(callable(where) or where in ("cpu", torch.device("cpu")) for where in devices),
        expected="a map_location that leads from each accelerator to the CPU",
        got=", ".join("a function" if callable(where) else repr(where) for where in devices) or "no call of torch.load",
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


class _Scaler:
    """Multiplies the loss and divides the gradients, as a GradScaler does."""

    scale = staticmethod(lambda loss: loss * 1024)
    update = staticmethod(lambda: None)

    def unscale_(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad /= 1024

    def step(self, optimizer: Any) -> None:
        optimizer.step()


class _Travels(nn.Linear):
    """A model that notes in which backward passes processes would average their gradients."""

    def __init__(self, travelled: list[bool]) -> None:
        super().__init__(4, 3, dtype=torch.float64)
        self.quiet, self.travelled = False, travelled

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.quiet = True
        yield
        self.quiet = False

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        output.register_hook(lambda grad: self.travelled.append(not self.quiet))
        return output


def _stepped(
    answer: Any,
    sizes: list[int],
    seed: int,
    *,
    weigh: Any = None,
    old: bool = False,
    scaler: Any = None,
    factor: float = 1.0,
) -> Any:
    """What a step for a group of these sizes leaves behind, and the same of one whole batch."""
    torch.manual_seed(seed)
    group = [(torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))) for n in sizes]
    weights = [(weigh or (lambda batch: len(batch[1])))(batch) for batch in group]
    found = SimpleNamespace(calls=[], travelled=[])
    model = _Travels(found.travelled)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parts = [F.cross_entropy(model(x), y) * (w / sum(weights)) for (x, y), w in zip(group, weights, strict=True)]
    sum(parts).backward()
    found.right = {"gradient": model.weight.grad.clone(), "loss": sum(parts).item()}
    found.travelled.clear()
    model.zero_grad()
    if old:
        model.weight.grad = torch.ones_like(model.weight)

    def call(hook: str) -> None:
        found.calls.append(hook)
        if hook == "on_before_backward":
            run.loss = run.loss * factor
        if hook == "on_before_step":
            found.gradient = model.weight.grad.clone()
            found.loss = run.loss

    forward = lambda model, batch: (model(batch[0]), batch[1])  # noqa: E731
    run = SimpleNamespace(model=model, optimizer=optimizer, forward=forward, step=0, call=call, batch=group)
    run.loss_fn = F.cross_entropy
    more = {"weigh": weigh} if weigh else {}
    answer(scaler, **more)(run)
    return found


_FOLLOWS = "a callback triples trainer.loss in on_before_backward: the gradient is tripled"


def _follows(found: Any, gradient: Tensor) -> str:
    return _FOLLOWS if torch.allclose(found.gradient, gradient) else _FOLLOWS.replace("is tripled", "isn't")


@exercise(
    "15-10.5",
    "A step for a group",
    points=15,
    demands=6,
    stand_in=_group_step,
    stand_in_name="the check's own answer",
)
def group_step(trial: Trial, answer: Any) -> None:
    """`answer(scaler, weigh)(trainer)` takes one step for the list trainer.batch."""
    _lesson(answer, "__call__")
    mine = lambda sizes: _stepped(answer, sizes, groups.index(sizes)).gradient  # noqa: E731
    groups = [[8], [4, 4], [5, 5, 5, 1], [1, 7, 2], [3, 3, 3, 3, 2]]
    table: list[tuple[str, str, int | None, dict, Callable[[Any, list[int]], tuple]]] = [
        ("trainer.loss is the loss of the group, without a graph", "what is the loss when the group is done?", 2,
         {"factor": 3.0, "scaler": _Scaler()},
         lambda it, sizes: ([float(it.loss), it.loss.requires_grad], [3 * it.right["loss"], False])),
        ("hooks: before each backward, with its loss in trainer.loss, and around one step",
         "how often does each moment come, and what is backward called on?", 1, {"factor": 3.0},
         lambda it, sizes: ([*it.calls, _follows(it, 3 * mine(sizes))],
                            ["on_before_backward"] * len(sizes) + ["on_before_step", "on_after_step", _FOLLOWS])),
        ("old gradients don't count", "what is in the gradients before the first part?", 1, {"old": True},
         lambda it, sizes: (it.gradient, mine(sizes))),
        ("backward is called on what the scaler has scaled", "what goes through self.scaler, and what doesn't?", None,
         {"scaler": _Scaler()}, lambda it, sizes: (it.gradient, mine(sizes))),
        ("gradients travel once, with the last part", "what is computed in the block of synced?", None, {},
         lambda it, sizes: (it.travelled, [False] * (len(sizes) - 1) + [True])),
    ]  # fmt: skip
    with trial.group("the gradient of the whole batch, by the shares of weigh", hint="what does a batch count?", see=1):
        for weigh in (None, lambda batch: 1.0 + batch[1].sum().item()):
            for seed, sizes in enumerate(groups):
                found = _stepped(answer, sizes, seed, weigh=weigh)
                case = f"parts of {sizes}" + ", another weigh" * bool(weigh)
                trial.close(case, found.gradient, found.right["gradient"])
    for demand, hint, see, options, look in table:
        with trial.group(demand, hint=hint, see=see):
            for seed, sizes in enumerate(groups):
                got, want = look(_stepped(answer, sizes, seed, **options), sizes)
                case = f"parts of {sizes}"
                if isinstance(want, Tensor):
                    trial.close(case, got, want)
                elif isinstance(want[0], float):
                    trial.close(f"trainer.loss, tripled by a callback, {case}", got[0], want[0])
                    trial.equal(f"whether trainer.loss requires a gradient, {case}", got[1], want[1])
                else:
                    trial.equal(case, got, want)


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
                self._put_back_if(trainer, trainer.batches_done == 0)

        def before_loader(self, trainer: Any) -> None:
            if self.pending is not None:
                began = self.pending["generators"][trainer.ranks.rank]["began"]
                set_states(trainer, began)
            self.began = states_of(trainer)

        def after_skip(self, trainer: Any) -> None:
            self._put_back_if(trainer, self.pending is not None)

        def _put_back_if(self, trainer: Any, now: bool) -> None:
            if now:
                self.put_back(trainer)

    return RunState


def _final_trainer() -> type:
    """The lesson's second class of this name; the first is an exercise's answer."""
    return _LESSON["fingerprint"].__globals__["Trainer"]


class _Second:
    """The second of two processes. The first one's generators stand elsewhere."""

    rank, count = 1, 2
    add_up = staticmethod(lambda numbers: numbers)
    gather = staticmethod(lambda mine: [{"now": mine["began"], "began": mine["now"]}, mine])


def _run(answer: Any, saved: Any = None, *, epochs: int = 2, size: int = 4, draws: bool = False) -> SimpleNamespace:
    """Train, from a saved state if there is one. Keeps a state for each batch and epoch."""
    lesson = SimpleNamespace(Callback=_LESSON["Callback"], Trainer=_final_trainer())
    found = SimpleNamespace(states=[], state=answer(saved))

    class Keeps(lesson.Callback):
        def on_batch_end(self, trainer: Any) -> None:
            found.states.append(found.state.collect(trainer))

        def on_epoch_start(self, trainer: Any) -> None:
            torch.rand(1 if draws else 0)

        def on_epoch_end(self, trainer: Any) -> None:
            found.states.append(found.state.collect(trainer))

    data = TensorDataset(torch.arange(60.0).view(12, 5).sin(), torch.arange(12) % 3)
    found.net = _net(0 if saved is None else 1)
    found.trainer = lesson.Trainer([Keeps()], state=found.state, ranks=_Second())
    sgd = torch.optim.SGD(found.net.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(3 if saved is None else 4)
    loader = DataLoader(data, size, shuffle=True)
    found.trainer.fit(found.net, sgd, F.cross_entropy, loader, [data[:]], max_epochs=epochs)
    found.weights = [tensor.clone() for tensor in found.net.state_dict().values()]
    return found


def _positions(states: list[dict]) -> list[dict]:
    """Where each state was saved, with the names of the metrics that were known."""
    return [state["position"] | {"metrics": list(state["position"]["metrics"])} for state in states]


@exercise(
    "15-10.6",
    "A run that goes on",
    points=20,
    demands=6,
    stand_in=_run_state,
    stand_in_name="the check's own answer",
)
def run_state(trial: Trial, answer: Any) -> None:
    """`answer(saved)` puts a run back where it was saved: begin, before_loader, after_skip."""
    _lesson(answer, "begin")
    right = _run_state()
    for demand, draws, between, hint, see in (
        ("saved in an epoch: the same bits", False, False, "which states do the generators have, and when?", 2),
        ("saved between epochs: the same bits", True, True, "what may a callback do in on_epoch_start?", 1),
    ):
        whole = _run(right, draws=draws)
        with trial.group(demand, hint=hint, see=see):
            for saved in whole.states[:-1]:
                position = saved["position"]
                if (position["batches_done"] == 0) == between:
                    got = _run(answer, saved, draws=draws).weights
                    trial.equal(f"weights at the end, saved at {position}", got, whole.weights)
    whole = _run(right)
    with trial.group("the position goes on", hint="what is a callback told in the first step after it?"):
        for number in (1, 3, 4):
            got = _positions(_run(answer, whole.states[number]).states)
            trial.equal("positions of a run that goes on", got, _positions(whole.states[number + 1 :]))
    with trial.group("a run that went on can be saved and go on again", hint="what does the next file need?", see=2):
        again = _run(answer, whole.states[1]).states[0]
        began = [state["generators"][1]["began"]["torch"] for state in (again, whole.states[2])]
        trial.equal("the generators at the beginning of the epoch, in the next state", *began)
    with trial.group("a second fit begins anew", hint="what does self.saved hold when its state was taken?", free=True):
        found = _run(answer, whole.states[1])
        found.states.clear()
        sgd = torch.optim.SGD(found.net.parameters(), 0.1, momentum=0.9)
        found.trainer.fit(found.net, sgd, F.cross_entropy, found.trainer.train_loader, max_epochs=2)
        trial.equal("batches and epochs of the second fit", len(found.states), len(whole.states))
    with trial.group("another run is refused before anything is changed", hint="what comes first in begin?"):
        for number in (1, 3):
            state = answer(whole.states[number])
            net = _net(1)
            other = _final_trainer()([], state=state, ranks=_Second())
            adam = torch.optim.Adam(net.parameters())
            before = [tensor.clone() for tensor in net.state_dict().values()]
            with mock.patch.object(torch, "set_rng_state", side_effect=AssertionError("generators were set")):
                ended = outcome(lambda o=other, n=net, a=adam: o.fit(n, a, F.cross_entropy, [], max_epochs=2))
            trial.equal("how a fit with another optimizer ends", ended, "ValueError")
            trial.equal("the trainer's step", other.step, 0)
            trial.equal("the weights", list(net.state_dict().values()), before)
            trial.equal("whether the saved state is still there for the next fit", state.saved is not None, True)
