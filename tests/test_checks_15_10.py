"""The checks of 15-10 accept right answers, however written, and reject what a student might really write."""

import hashlib
import io
import math
import os
from textwrap import indent
from typing import ClassVar

import pytest
import torch
from check_protocol import CheckProtocol

from course.lesson_code import definitions
from shared.checks import topic_15_10 as check

CELLS = """data evaluate callback tiny-trainer wishes dead-units full-disk signals listeners ex-trainer ex-stopping
    tensor-slots read-together columns ex-log ex-file place forward groups count-samples metrics default-parts bare
    one-process bare-model measure trainer-with-parts synced ex-step sampler generators fingerprint ex-state"""
GIVEN = definitions("15-10", "device", *CELLS.split())
CancelFit, DamagedCheckpoint = GIVEN["CancelFit"], GIVEN["DamagedCheckpoint"]

# ---------------------------------------------------------------- right answers


class BySign(GIVEN["EarlyStopping"]):
    """All comparisons in one direction, from infinity on."""

    def on_fit_start(self, trainer):
        self.best = math.inf if self.mode == "min" else -math.inf
        self.wait = 0

    def on_epoch_end(self, trainer):
        sign = {"min": 1, "max": -1}[self.mode]
        value = trainer.metrics[self.monitor]
        if value in (math.inf, -math.inf) or math.isnan(value):
            raise CancelFit
        better = sign * value + self.min_delta < sign * self.best
        self.best, self.wait = (value, 0) if better else (self.best, self.wait + 1)
        if not better and self.wait >= self.patience:
            raise CancelFit


class InColumns(GIVEN["StepLog"]):
    """A list for each column; rows are made when they are read."""

    def on_fit_start(self, trainer):
        self.rows, self.lists = [], {name: [] for name in ("step", "epoch", *self.columns)}
        trainer.exits["fit"].callback(lambda: self.flush())

    @torch.no_grad()
    def on_after_step(self, trainer):
        values = {"step": trainer.step, "epoch": trainer.epoch, **{n: f(trainer) for n, f in self.columns.items()}}
        for name, value in values.items():
            self.lists[name].append(value.clone() if torch.is_tensor(value) else value)
        if len(self.lists["step"]) % self.every == 0:
            self.flush()

    def flush(self):
        rows = [dict(zip(self.lists, values, strict=True)) for values in zip(*self.lists.values(), strict=True)]
        for values in self.lists.values():
            values.clear()
        for row in self.read(rows):
            self.emit(row)


class Digest(GIVEN["CheckpointFile"]):
    """Unbuffered, the sum at the end, with a length."""

    def write(self, state):
        memory = io.BytesIO()
        torch.save(state, memory)
        body = len(memory.getvalue()).to_bytes(8, "big") + memory.getvalue()
        rest = memoryview(body + hashlib.blake2b(body).digest())
        with open(f"{self.path}.tmp", "wb", buffering=0) as file:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file)
        os.rename(f"{self.path}.tmp", self.path)

    def read(self):
        with open(self.path, "rb") as file:
            whole = file.read()
        body, digest = whole[:-64], whole[-64:]
        if len(whole) < 72 or hashlib.blake2b(body).digest() != digest:
            raise DamagedCheckpoint(os.path.basename(self.path) + " was damaged")
        return torch.load(io.BytesIO(body[8:]), "cpu", weights_only=True)


class ByPathlib(GIVEN["CheckpointFile"]):
    """pathlib all the way; forced to the disk through a second opening."""

    def write(self, state):
        memory = io.BytesIO()
        torch.save(state, memory)
        text = hashlib.sha512(memory.getbuffer()).hexdigest().encode() + b"\n"
        other = self.path.parent / f"{self.path.name}.tmp"
        other.write_bytes(text + memory.getvalue())
        with other.open("rb") as file:
            os.fsync(file)
        other.rename(self.path)

    def read(self):
        first, newline, content = self.path.read_bytes().partition(b"\n")
        if not newline or hashlib.sha512(content).hexdigest().encode() != first:
            raise DamagedCheckpoint(f"{self.path} is damaged")
        return torch.load(io.BytesIO(content), map_location=torch.device("cpu"), weights_only=True)


class LastApart(GIVEN["GroupStep"]):
    """All but the last in one block."""

    def __call__(self, trainer):
        trainer.optimizer.zero_grad()
        total = sum(map(self.weigh, trainer.batch))
        self.total = 0
        with GIVEN["synced"](trainer.model, False):
            for batch in trainer.batch[:-1]:
                self.add(trainer, batch, total)
        self.add(trainer, trainer.batch[-1], total)
        trainer.loss = self.total
        self.update(trainer)

    def add(self, trainer, batch, total):
        trainer.loss = trainer.loss_fn(*trainer.forward(trainer.model, batch)) * self.weigh(batch) / total
        trainer.call("on_before_backward")
        share = trainer.loss
        self.scaler.scale(share).backward()
        self.total = self.total + share.detach()


class ByCases(GIVEN["RunState"]):
    """Asks at each moment whether something is pending."""

    def begin(self, trainer):
        state, self.pending = self.saved, None
        if state:
            GIVEN["refuse_another_run"](trainer, state["fingerprint"])
            self.saved = None
            position = state["position"]
            trainer.step, trainer.metrics = position["step"], position["metrics"]
            trainer.epochs_done, trainer.batches_done = position["epochs_done"], position["batches_done"]
            self.pending = state
            if not position["batches_done"]:
                self.put_back(trainer)

    def before_loader(self, trainer):
        self.began = GIVEN["generator_states"](trainer)
        if self.pending:
            self.began = self.pending["generators"][trainer.ranks.rank]["began"]
            GIVEN["set_generator_states"](trainer, self.began)


# ---------------------------------------------------------------- wrong answers

END_HOOK, VALIDATE = 'self.call(f"on_{name}_end")', "if self.val_loader is not None:\n    self.validate()"
TRAINER = {
    "the end hook in finally": ("no end hook", f"yield\n{END_HOOK}", f"try:\n    yield\nfinally:\n    {END_HOOK}"),
    "another error": (
        "no end hook",
        "self.run_epoch()",
        "try:\n    self.run_epoch()\nexcept OSError as error:\n    raise RuntimeError from error",
    ),
    "cleanups only at a good end": (
        "cleanups run",
        "with ExitStack() as self.exits[name]:",
        "self.exits[name] = ExitStack()\nif True:",
        END_HOOK,
        f"{END_HOOK}\nself.exits[name].close()",
    ),
    "cleanups before the end hook": ("cleanups run", f"    {END_HOOK}", END_HOOK),
    "CancelFit absorbed around the stage": (
        "CancelFit",
        'self.stage("fit"), suppress(CancelFit)',
        'suppress(CancelFit), self.stage("fit")',
    ),
    "CancelFit ends one epoch": (
        "CancelFit",
        ", suppress(CancelFit)",
        "",
        "self.run_epoch()",
        "with suppress(CancelFit):\n    self.run_epoch()",
    ),
    "CancelEpoch around the validation": ("CancelEpoch", VALIDATE, indent(VALIDATE, "    ")),
    "CancelBatch ends the loop": ("CancelBatch", "continue", "break"),
    "the end of the batch in any case": (
        "CancelBatch",
        '    self.call("on_batch_end")\nexcept CancelBatch:\n    continue',
        'except CancelBatch:\n    pass\nself.call("on_batch_end")',
    ),
    "validation behind the epoch": ("in their order", indent(VALIDATE, "    "), VALIDATE),
}

FULL = "len(self.waiting) >= self.every"
STOPPING = {
    "the gain over the last value": ("best", "self.wait += 1", "self.best = value\nself.wait += 1"),
    "min_delta only with max": (
        "min_delta",
        "gain > self.min_delta",
        'gain > (self.min_delta if self.mode == "max" else 0)',
    ),
    "the mode doesn't matter": ("mode='max'", ' if self.mode == "min" else value - self.best', ""),
    "one epoch late": ("patience", "self.wait >= self.patience", "self.wait > self.patience"),
    "always val_loss": ("monitor", "metrics[self.monitor]", 'metrics.get("val_loss", 0.0)'),
    "goes on in the second run": ("second run", "self.best = None", "self.best = getattr(self, 'best', None)"),
    "NaN is not better": ("NaN", "if not math.isfinite(value):", "if False:"),
    "only NaN": ("NaN", "not math.isfinite(value)", "math.isnan(value)"),
}
LOG = {
    "tensors as they are": ("numbers of its step", ".detach().clone()", ".detach()"),
    "with the graph": ("no graph", ".detach().clone()", ".clone()"),
    "reads at once": ("nothing else asks", ".detach().clone()", ".item()"),
    "only at the end": ("together", FULL, "False"),
    "at multiples of the step": ("together", FULL, "trainer.step % self.every == 1"),
    "not after an error": ("after an error", 'trainer.exits["fit"].callback(self.flush)', "pass"),
    "without the epoch": ("all columns", '"epoch": trainer.epoch}', "}"),
    "rows stay": ("all columns", "rows = self.waiting\nself.waiting = []", "rows = self.waiting"),
}

SAVE, PARTS = "torch.save(state, buffer)", "digest, content = whole[:32], whole[32:]"
MOVE = "os.replace(temporary, self.path)"
FILE = {
    "writes in place": ("killed anywhere", 'self.path.with_name(self.path.name + ".tmp")', "self.path", MOVE, ""),
    "deletes the old one first": ("killed anywhere", MOVE, f"self.path.unlink(missing_ok=True)\n{MOVE}"),
    "a full disk is silent": ("a write that fails", "with open(", "with suppress(OSError), open("),
    "what can't be saved is silent": ("a write that fails", SAVE, f"try:\n    {SAVE}\nexcept Exception:\n    return"),
    "no fsync": ("on the disk before", "os.fsync(file.fileno())", "pass"),
    "no sum": ("damage is", "hashlib.sha256(content).digest() != digest", "len(digest) < 32"),
    "no name": ("damage is", "{self.path.name} is", "the file is"),
    "loads first": (
        "not unpickled",
        PARTS,
        f"{PARTS}\nwith suppress(Exception):\n    torch.load(io.BytesIO(content), weights_only=True)",
    ),
    "any pickle": ("code in an undamaged file", "weights_only=True", "weights_only=False"),
    "where it was": ("on the CPU", 'map_location="cpu", ', ""),
    "only tensors": ("comes back", SAVE, 'state = {k: v for k, v in state.items() if k != "nested"}\n' + SAVE),
}

BEFORE, SCALE = 'trainer.call("on_before_backward")', "self.scaler.scale(trainer.loss).backward()"
STEP = {
    "divided by the number": ("whole batch", "weight / sum(weights)", "1 / len(group)"),
    "always samples": ("whole batch", "self.weigh(part)", "count_samples(part)"),
    "the loss of the last": ("loss of the group", "trainer.loss = total", "trainer.loss = trainer.loss.detach()"),
    "with a graph": ("loss of the group", "total + trainer.loss.detach()", "total + trainer.loss"),
    "one hook a group": ("hooks", BEFORE, f"if number == 1:\n    {BEFORE}"),
    "a loss of its own": (
        "hooks",
        "trainer.loss = trainer.loss_fn",
        "share = trainer.loss = trainer.loss_fn",
        SCALE,
        "self.scaler.scale(share).backward()",
    ),
    "old gradients stay": ("old gradients", "trainer.optimizer.zero_grad()", "pass"),
    "not scaled": ("scaler", SCALE, "trainer.loss.backward()"),
    "always travels": ("travel once", "last=number == len(group)", "last=True"),
}

NOTES = "self.began = generator_states(trainer)"
REFUSES = 'refuse_another_run(trainer, self.saved["fingerprint"])'
STATE = {
    "all at once": ("saved in an epoch", "if trainer.batches_done == 0:", "if True:"),
    "generators of now before the loader": ("saved in an epoch", 'states["began"]', 'states["now"]'),
    "generators of the first process": (
        "saved in an epoch",
        'self.pending["generators"][trainer.ranks.rank]',
        'self.pending["generators"][0]',
    ),
    "put back before the loader": (
        "saved in an epoch",
        NOTES,
        f"{NOTES}\nif self.pending is not None:\n    self.put_back(trainer)",
    ),
    "never at once": ("saved between", "if trainer.batches_done == 0:", "if False:"),
    "the step isn't moved": (
        "position goes on",
        "setattr(trainer, name, value)",
        'if name != "step":\n    setattr(trainer, name, value)',
    ),
    "began isn't noted": ("go on again", NOTES, "pass"),
    "a second fit resumes again": (
        "a second fit",
        "self.pending = self.saved\nself.saved = None",
        "self.pending = self.saved",
    ),
    "taken before it is refused": (
        "another run",
        f"{REFUSES}\nself.take(trainer)",
        f"self.take(trainer)\n{REFUSES.replace('saved', 'pending')}",
    ),
}


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # as some wrong answers leave it
class TestChecks(CheckProtocol, topic="15-10", given=GIVEN):
    CHECKS: ClassVar = {
        "Trainer": check.trainer,
        "EarlyStopping": check.early_stopping,
        "StepLog": check.step_log,
        "CheckpointFile": check.checkpoint_file,
        "GroupStep": check.group_step,
        "RunState": check.run_state,
    }
    RIGHT: ClassVar = {
        "Trainer": [
            (
                ", suppress(CancelFit)",
                "",
                "self.run_epoch()",
                "try:\n    self.run_epoch()\nexcept CancelFit:\n    break",
            ),
            (
                "with ExitStack() as self.exits[name]:",
                "self.exits[name] = ExitStack()\ntry:",
                f"    {END_HOOK}",
                f"    {END_HOOK}\nfinally:\n    self.exits[name].close()",
            ),
        ],
        "EarlyStopping": [
            BySign,
            (
                'gain = self.best - value if self.mode == "min" else value - self.best\nreturn gain > self.min_delta',
                'if self.mode == "max":\n    return value > self.best + self.min_delta\n'
                "return value < self.best - self.min_delta",
            ),
        ],
        "StepLog": [
            InColumns,
            (".callback(self.flush)", ".push(lambda *_: self.flush())", ".detach().clone()", ".data + 0"),
        ],
        "CheckpointFile": [Digest, ByPathlib],
        "GroupStep": [
            LastApart,
            (
                "total = 0.0",
                "losses = []",
                "total = total + trainer.loss.detach()",
                "losses.append(trainer.loss.detach())",
                "trainer.loss = total",
                "trainer.loss = torch.stack(losses).sum()",
            ),
        ],
        "RunState": [
            ByCases,
            (
                "if self.pending is not None:\n    self.put_back",
                "if trainer.batches_done and self.pending:\n    self.put_back",
            ),
        ],
    }
    WRONG: ClassVar = {
        "Trainer": TRAINER,
        "EarlyStopping": STOPPING,
        "StepLog": LOG,
        "CheckpointFile": FILE,
        "GroupStep": STEP,
        "RunState": STATE,
    }

    def hold_stand_in(self, name, stand_in):
        assert self.CHECKS[name].run(stand_in).status == "passed"
