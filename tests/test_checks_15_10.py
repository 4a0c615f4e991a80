"""The checks of 15-10 accept right answers, however written, and reject what a student might really write."""
# ruff: noqa: E501 (pieces of the notebook's code are quoted as they stand)

import hashlib
import io
import math
import os
from contextlib import ExitStack, contextmanager
from textwrap import indent
from typing import ClassVar

import pytest
import torch
from answer_variants import variants
from check_protocol import CheckProtocol, idle

from course.exercise_form import student_source
from course.lesson_code import answers, definitions
from shared.checks import topic_15_10 as check

CELLS = """data evaluate callback tiny-trainer wishes dead-units full-disk signals listeners ex-trainer tensor-slots read-together columns
    ex-log ex-file place forward groups count-samples metrics default-parts bare one-process bare-model measure trainer-with-parts synced
    ex-step sampler generators fingerprint ex-state"""
GIVEN = definitions("15-10", "device", *CELLS.split())
ANSWERS = answers("15-10", given=GIVEN)
STUBS = answers("15-10", edit=student_source, given=GIVEN)
IDLE = idle("15-10", GIVEN)
NAMES = {
    "trainer": "Trainer",
    "stopping": "EarlyStopping",
    "log": "StepLog",
    "file": "CheckpointFile",
    "step": "GroupStep",
    "state": "RunState",
}
variant = variants("15-10", NAMES, GIVEN)
CancelBatch, CancelEpoch, CancelFit = (GIVEN[name] for name in ("CancelBatch", "CancelEpoch", "CancelFit"))
DamagedCheckpoint = GIVEN["DamagedCheckpoint"]

# ---------------------------------------------------------------- 1, the trainer


class WithFlags(ANSWERS["Trainer"]):
    """An ExitStack that is closed by hand, and loops that ask for signals."""

    @contextmanager
    def stage(self, name):
        self.exits[name] = ExitStack()
        try:
            self.call(f"on_{name}_start")
            yield
            self.call(f"on_{name}_end")
        finally:
            self.exits[name].close()

    def run_epochs(self, max_epochs):
        with self.stage("fit"):
            try:
                for epoch in range(max_epochs):
                    self.epoch = epoch
                    self.run_epoch()
            except CancelFit:
                pass


class StageByStage(ANSWERS["Trainer"]):
    """Every signal is absorbed by a function of its own."""

    def absorbed(self, kind, work):
        try:
            work()
        except kind:
            return True
        return False

    def run_epoch(self):
        with self.stage("epoch"):
            self.absorbed(CancelEpoch, self.run_batches)
            if self.val_loader is not None:
                self.validate()

    def run_batches(self):
        self.model.train()
        for batch in self.train_loader:
            self.batch = batch
            self.absorbed(CancelBatch, self.whole_batch)

    def whole_batch(self):
        self.call("on_batch_start")
        self.train_step()
        self.call("on_batch_end")


_STAGE = """        with ExitStack() as self.exits[name]:
            self.call(f"on_{name}_start")
            yield
            self.call(f"on_{name}_end")
"""
_BATCH = """            try:
                self.call("on_batch_start")
                self.train_step()
                self.call("on_batch_end")
            except CancelBatch:
                continue
"""
_EPOCH = """            with suppress(CancelEpoch):
                self.run_batches()
            if self.val_loader is not None:
                self.validate()
"""
WRONG_TRAINER = {
    "the end hook in finally": (
        variant(
            "trainer",
            (
                _STAGE,
                """        with ExitStack() as self.exits[name]:
            self.call(f"on_{name}_start")
            try:
                yield
            finally:
                self.call(f"on_{name}_end")
""",
            ),
        ),
        "no end hook",
    ),
    "cleanups only at a good end": (
        variant(
            "trainer",
            (
                _STAGE,
                """        self.exits[name] = ExitStack()
        self.call(f"on_{name}_start")
        yield
        self.call(f"on_{name}_end")
        self.exits[name].close()
""",
            ),
        ),
        "cleanups run",
    ),
    "a start hook that fails leaves cleanups": (
        variant(
            "trainer",
            (
                _STAGE,
                """        self.exits[name] = ExitStack()
        self.call(f"on_{name}_start")
        with self.exits[name]:
            yield
            self.call(f"on_{name}_end")
""",
            ),
        ),
        "cleanups run",
    ),
    "one stack for all stages": (
        variant(
            "trainer",
            (
                _STAGE,
                """        stack = self.exits.setdefault("fit", ExitStack())
        self.exits[name] = stack
        try:
            self.call(f"on_{name}_start")
            yield
            self.call(f"on_{name}_end")
        finally:
            if name == "fit":
                stack.close()
""",
            ),
        ),
        "cleanups run",
    ),
    "cleanups before the end hook": (
        variant(
            "trainer",
            (
                _STAGE,
                """        with ExitStack() as self.exits[name]:
            self.call(f"on_{name}_start")
            yield
        self.call(f"on_{name}_end")
""",
            ),
        ),
        "cleanups run",
    ),
    "CancelFit absorbed around the stage": (
        variant(
            "trainer", ('with self.stage("fit"), suppress(CancelFit):', 'with suppress(CancelFit), self.stage("fit"):')
        ),
        "CancelFit",
    ),
    "CancelFit ends one epoch": (
        variant(
            "trainer",
            ('self.stage("fit"), suppress(CancelFit):', 'self.stage("fit"):'),
            (
                "                self.run_epoch()\n",
                "                with suppress(CancelFit):\n                    self.run_epoch()\n",
            ),
        ),
        "CancelFit",
    ),
    "CancelEpoch around the validation": (
        variant(
            "trainer",
            (
                _EPOCH,
                """            with suppress(CancelEpoch):
                self.run_batches()
                if self.val_loader is not None:
                    self.validate()
""",
            ),
        ),
        "CancelEpoch",
    ),
    "CancelBatch around the loop": (
        variant(
            "trainer",
            (
                "        for batch in self.train_loader:\n            self.batch = batch\n" + _BATCH,
                """        with suppress(CancelBatch):
            for batch in self.train_loader:
                self.batch = batch
                self.call("on_batch_start")
                self.train_step()
                self.call("on_batch_end")
""",
            ),
        ),
        "CancelBatch",
    ),
    "the end of the batch in any case": (
        variant(
            "trainer",
            (
                _BATCH,
                """            with suppress(CancelBatch):
                self.call("on_batch_start")
                self.train_step()
            self.call("on_batch_end")
""",
            ),
        ),
        "CancelBatch",
    ),
    "no hooks of batches": (
        variant("trainer", ('                self.call("on_batch_start")\n', "")),
        "in their order",
    ),
    "validation behind the epoch": (
        variant(
            "trainer",
            (
                "            if self.val_loader is not None:\n                self.validate()\n",
                "        if self.val_loader is not None:\n            self.validate()\n",
            ),
        ),
        "in their order",
    ),
    "the epoch isn't counted": (variant("trainer", ("                self.epoch = epoch\n", "")), "in their order"),
    "another error": (
        variant(
            "trainer",
            (
                "                self.run_epoch()\n",
                "                try:\n                    self.run_epoch()\n                except OSError as error:\n                    raise RuntimeError from error\n",
            ),
        ),
        "no end hook",
    ),
    "errors are swallowed": (variant("trainer", ("suppress(CancelFit)", "suppress(Exception)")), "no end hook"),
}
# ---------------------------------------------------------------- 2, early stopping


class ByHistory(ANSWERS["EarlyStopping"]):
    """The best value is found again in a list at each epoch."""

    def on_fit_start(self, trainer):
        self.values, self.best, self.wait = [], None, 0

    def on_epoch_end(self, trainer):
        value = trainer.metrics[self.monitor]
        if value - value != 0:
            raise CancelFit
        self.values.append(value)
        if self.best is None or (
            value < self.best - self.min_delta if self.mode == "min" else value > self.best + self.min_delta
        ):
            self.best, self.since = value, len(self.values)
        self.wait = len(self.values) - self.since
        if self.wait == self.patience:
            raise CancelFit(f"{self.wait} epochs without a better {self.monitor}")


class BySign(ANSWERS["EarlyStopping"]):
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


_NAN = """        if not math.isfinite(value):
            raise CancelFit(f"{self.monitor} is {value}")
"""
WRONG_STOPPING = {
    "the gain over the last value": (
        variant(
            "stopping",
            (
                "        else:\n            self.wait += 1\n",
                "        else:\n            self.best = value\n            self.wait += 1\n",
            ),
        ),
        "best",
    ),
    "equal values are better": (variant("stopping", ("gain > self.min_delta", "gain >= self.min_delta")), "best"),
    "wait goes on": (
        variant("stopping", ("            self.wait = 0\n        else", "            pass\n        else")),
        "best and wait",
    ),
    "min_delta only with max": (
        variant("stopping", ("gain > self.min_delta", 'gain > (self.min_delta if self.mode == "max" else 0)')),
        "min_delta",
    ),
    "without min_delta": (variant("stopping", ("gain > self.min_delta", "gain > 0")), "min_delta"),
    "the mode doesn't matter": (
        variant("stopping", ('self.best - value if self.mode == "min" else value - self.best', "self.best - value")),
        "mode='max'",
    ),
    "one epoch late": (variant("stopping", ("self.wait >= self.patience", "self.wait > self.patience")), "patience"),
    "one epoch early": (
        variant("stopping", ("self.wait >= self.patience", "self.wait + 1 >= self.patience")),
        "patience",
    ),
    "never stops": (variant("stopping", ("if self.wait >= self.patience:", "if False:")), "patience"),
    "always val_loss": (
        variant("stopping", ("trainer.metrics[self.monitor]", 'trainer.metrics.get("val_loss", 0.0)')),
        "monitor",
    ),
    "goes on in the second run": (
        variant(
            "stopping",
            (
                "        self.best = None\n        self.wait = 0\n        ### END",
                "        self.best = getattr(self, 'best', None)\n        self.wait = 0\n        ### END",
            ),
        ),
        "second run",
    ),
    "NaN is not better": (variant("stopping", (_NAN, "")), "NaN"),
    "only NaN": (variant("stopping", ("not math.isfinite(value)", "math.isnan(value)")), "NaN"),
    "NaN counts as an epoch": (
        variant("stopping", (_NAN, _NAN.replace("            raise", "            self.wait += 1\n            raise"))),
        "NaN",
    ),
}
# ---------------------------------------------------------------- 3, the log


class InColumns(ANSWERS["StepLog"]):
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
        [self.emit(row) for row in self.read(rows)]


class ByStack(ANSWERS["StepLog"]):
    """Closes by a context manager, copies by arithmetic."""

    def on_fit_start(self, trainer):
        super().on_fit_start(trainer)
        trainer.exits["fit"].pop_all()
        trainer.exits["fit"].push(lambda *error: self.flush())

    def on_after_step(self, trainer):
        found = {name: column(trainer) for name, column in self.columns.items()}
        found = {name: value.data + 0 if hasattr(value, "data") else value for name, value in found.items()}
        self.waiting.append({"step": trainer.step, "epoch": trainer.epoch} | found)
        if len(self.waiting) == self.every:
            self.flush()


_VALUE = "value.detach().clone() if isinstance(value, Tensor) else value"
_EXIT = '        trainer.exits["fit"].callback(self.flush)\n'
_FULL = "        if len(self.waiting) >= self.every:\n            self.flush()\n"
WRONG_LOG = {
    "tensors as they are": (
        variant("log", (_VALUE, "value.detach() if isinstance(value, Tensor) else value")),
        "numbers of its step",
    ),
    "with the graph": (variant("log", (_VALUE, "value.clone() if isinstance(value, Tensor) else value")), "no graph"),
    "reads at once": (
        variant("log", (_VALUE, "value.item() if isinstance(value, Tensor) else value")),
        "nothing else asks",
    ),
    "moves to the CPU": (
        variant("log", (_VALUE, 'value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value')),
        "nothing else asks",
    ),
    "only at the end": (variant("log", (_FULL, "")), "together"),
    "one row too late": (
        variant("log", ("len(self.waiting) >= self.every", "len(self.waiting) > self.every")),
        "together",
    ),
    "at multiples of the step": (
        variant("log", ("len(self.waiting) >= self.every", "trainer.step % self.every == 1")),
        "together",
    ),
    "not after an error": (variant("log", (_EXIT, "")), "after an error"),
    "without the epoch": (
        variant("log", ('{"step": trainer.step, "epoch": trainer.epoch}', '{"step": trainer.step}')),
        "all columns",
    ),
    "steps from zero": (variant("log", ('{"step": trainer.step,', '{"step": trainer.step - 1,')), "all columns"),
    "the newest row only": (
        variant("log", ("        self.waiting.append(row)\n", "        self.waiting = [row]\n")),
        "all columns",
    ),
    "waits in rows": (
        variant(
            "log", ("        self.waiting = []\n        trainer", "        self.waiting = self.rows\n        trainer")
        ),
        "all columns",
    ),
    "rows stay": (variant("log", ("        self.waiting = []\n        for", "        for")), "all columns"),
    "emits nothing": (
        variant(
            "log",
            (
                "        for row in self.read(rows):\n            self.emit(row)\n",
                "        self.rows += self.read(rows)\n",
            ),
        ),
        "all columns",
    ),
}
# ---------------------------------------------------------------- 4, checkpoint files


class Digest(ANSWERS["CheckpointFile"]):
    """Unbuffered, the sum at the end, with a length."""

    def write(self, state):
        folder, name = os.path.split(os.path.abspath(self.path))
        memory = io.BytesIO()
        torch.save(state, memory)
        body = len(memory.getvalue()).to_bytes(8, "big") + memory.getvalue()
        rest = memoryview(body + hashlib.blake2b(body).digest())
        with open(os.path.join(folder, name + ".tmp"), "wb", buffering=0) as file:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file)
        os.rename(os.path.join(folder, name + ".tmp"), self.path)

    def read(self):
        with open(self.path, "rb") as file:
            whole = file.read()
        body, digest = whole[:-64], whole[-64:]
        if len(whole) < 72 or hashlib.blake2b(body).digest() != digest:
            raise DamagedCheckpoint(os.path.basename(self.path) + " was damaged")
        return torch.load(io.BytesIO(body[8:]), "cpu", weights_only=True)


class ByPathlib(ANSWERS["CheckpointFile"]):
    """pathlib all the way."""

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


_MOVE = "        os.replace(temporary, self.path)\n"
_FLUSH = "            file.flush()\n            os.fsync(file.fileno())\n"
_WITH = '        with open(temporary, "wb") as file:\n'
_CONTENT = "            file.write(hashlib.sha256(content).digest() + content)\n"
_SUM = "        if hashlib.sha256(content).digest() != digest:\n"
_RAISE = '            raise DamagedCheckpoint(f"{self.path.name} is no checkpoint of ours, or was damaged")\n'
_RETURN = '        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)\n'
_NAME = 'self.path.with_name(self.path.name + ".tmp")'
WRONG_FILE = {
    "writes in place": (variant("file", (_NAME, "self.path"), (_MOVE, "")), "killed anywhere"),
    "moves the old one away first": (
        variant(
            "file",
            (
                _MOVE,
                '        if self.path.exists():\n            os.replace(self.path, str(self.path) + ".old")\n'
                + _MOVE
                + '        Path(str(self.path) + ".old").unlink(missing_ok=True)\n',
            ),
        ),
        "killed anywhere",
    ),
    "deletes the old one first": (
        variant("file", (_MOVE, "        self.path.unlink(missing_ok=True)\n" + _MOVE)),
        "killed anywhere",
    ),
    "copies the new one over": (
        variant("file", (_MOVE, "        self.path.write_bytes(temporary.read_bytes())\n")),
        "killed anywhere",
    ),
    "a failed write is silent": (
        variant(
            "file",
            (
                _WITH + _CONTENT + _FLUSH + _MOVE,
                "        try:\n"
                + indent(_WITH + _CONTENT + _FLUSH + _MOVE, "    ")
                + "        except OSError:\n            temporary.unlink()\n",
            ),
        ),
        "a write that fails",
    ),
    "a failed write is silent, and done all the same": (
        variant(
            "file",
            (_WITH, _WITH.replace("with", "from contextlib import suppress\n        with suppress(OSError),")),
            (_MOVE, "        if not temporary.exists():\n            return\n" + _MOVE),
        ),
        "a write that fails",
    ),
    "what can't be saved is silent": (
        variant(
            "file",
            (
                "        torch.save(state, buffer)\n",
                "        try:\n            torch.save(state, buffer)\n        except Exception:\n            return\n",
            ),
        ),
        "a write that fails",
    ),
    "copies the new one over first": (
        variant("file", (_MOVE, "        self.path.write_bytes(temporary.read_bytes())\n" + _MOVE)),
        "killed anywhere",
    ),
    "behind what was left": (variant("file", (_WITH, _WITH.replace('"wb"', '"ab"'))), "killed anywhere"),
    "no fsync": (variant("file", (_FLUSH, "            file.flush()\n")), "on the disk before"),
    "fsync before flush": (variant("file", (_FLUSH, "            os.fsync(file.fileno())\n")), "on the disk before"),
    "fsync behind the name": (
        variant(
            "file",
            (_FLUSH, ""),
            (_MOVE, _MOVE + "        with open(self.path, 'rb') as file:\n            os.fsync(file.fileno())\n"),
        ),
        "on the disk before",
    ),
    "no sum": (variant("file", (_SUM, "        if len(digest) < 32:\n")), "damage is"),
    "ValueError": (variant("file", ("raise DamagedCheckpoint(", "raise ValueError(")), "damage is"),
    "no name": (variant("file", ("{self.path.name} is", "the file is")), "damage is"),
    "loads first": (
        variant(
            "file",
            (
                _SUM + _RAISE + _RETURN,
                "        try:\n            state = torch.load(io.BytesIO(content), map_location='cpu', weights_only=True)\n        except Exception:\n            state = None\n"
                + _SUM
                + _RAISE
                + "        if state is None:\n            return torch.load(io.BytesIO(content), map_location='cpu', weights_only=True)\n        return state\n",
            ),
        ),
        "not unpickled",
    ),
    "any pickle": (variant("file", ("weights_only=True", "weights_only=False")), "code in an undamaged file"),
    "all is damage": (
        variant(
            "file",
            (
                _RETURN,
                "        try:\n    "
                + _RETURN
                + "        except Exception:\n            raise DamagedCheckpoint(self.path.name) from None\n",
            ),
        ),
        "code in an undamaged file",
    ),
    "where it was": (variant("file", ('map_location="cpu", ', "")), "on the CPU"),
    "weights only": (
        variant(
            "file",
            ("torch.save(state, buffer)", 'torch.save({k: v for k, v in state.items() if k != "nested"}, buffer)'),
        ),
        "comes back",
    ),
}
# ---------------------------------------------------------------- 5, the step


class ByLists(ANSWERS["GroupStep"]):
    """Weights and losses in lists."""

    def __call__(self, trainer):
        trainer.optimizer.zero_grad(set_to_none=False)
        group = list(trainer.batch)
        sizes = torch.tensor([float(self.weigh(batch)) for batch in group], dtype=torch.float64)
        shares = (sizes / sizes.sum()).tolist()
        found = []
        while group:
            batch = group.pop(0)
            with GIVEN["synced"](trainer.model, not group):
                output, target = trainer.forward(trainer.model, batch)
                trainer.loss = shares[len(found)] * trainer.loss_fn(output, target)
                trainer.call("on_before_backward")
                self.scaler.scale(trainer.loss).backward()
                found.append(trainer.loss.detach())
        trainer.loss = torch.stack(found).sum()
        self.update(trainer)


class LastApart(ANSWERS["GroupStep"]):
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


_SHARE = "(weight / sum(weights))"
_SCALE = "self.scaler.scale(trainer.loss).backward()"
_BEFORE = '                trainer.call("on_before_backward")\n'
WRONG_STEP = {
    "divided by the number": (variant("step", (_SHARE, "(1 / len(group))")), "whole batch"),
    "by the largest": (variant("step", (_SHARE, "(weight / max(weights) / len(group))")), "whole batch"),
    "always samples": (variant("step", ("self.weigh(part)", "count_samples(part)")), "whole batch"),
    "only the loss is weighed": (
        variant("step", (_SCALE, "self.scaler.scale(trainer.loss_fn(output, y) / len(group)).backward()")),
        "whole batch",
    ),
    "the loss of the last": (
        variant("step", ("trainer.loss = total", "trainer.loss = trainer.loss.detach()")),
        "loss of the group",
    ),
    "the sum before the hook": (
        variant(
            "step",
            ("            total = total + trainer.loss.detach()\n", ""),
            (_BEFORE, "                total = total + trainer.loss.detach()\n" + _BEFORE),
        ),
        "loss of the group",
    ),
    "the scaled loss": (
        variant(
            "step",
            (_SCALE, "trainer.loss = self.scaler.scale(trainer.loss)\n                trainer.loss.backward()"),
        ),
        "scaler",
    ),
    "with a graph": (variant("step", ("total + trainer.loss.detach()", "total + trainer.loss")), "loss of the group"),
    "the mean of losses": (
        variant(
            "step",
            ("total + trainer.loss.detach()", "total + trainer.loss.detach() / weight * sum(weights) / len(group)"),
        ),
        "loss of the group",
    ),
    "a loss of its own": (
        variant(
            "step",
            (
                "                trainer.loss = trainer.loss_fn",
                "                share = trainer.loss = trainer.loss_fn",
            ),
            (_SCALE, "self.scaler.scale(share).backward()"),
        ),
        "hooks",
    ),
    "no hook": (variant("step", (_BEFORE, "")), "hooks"),
    "one hook a group": (
        variant(
            "step",
            (
                _BEFORE,
                '                if number == 1:\n                    trainer.call("on_before_backward")\n',
            ),
        ),
        "hooks",
    ),
    "a step for each batch": (
        variant(
            "step",
            (
                "        trainer.loss = total\n        self.update(trainer)\n",
                "            trainer.loss = total\n            self.update(trainer)\n",
            ),
        ),
        "hooks",
    ),
    "old gradients stay": (variant("step", ("        trainer.optimizer.zero_grad()\n", "")), "old gradients"),
    "zeroed for each batch": (
        variant(
            "step",
            (
                "                output, y =",
                "                trainer.optimizer.zero_grad()\n                output, y =",
            ),
        ),
        "whole batch",
    ),
    "not scaled": (variant("step", (_SCALE, "trainer.loss.backward()")), "scaler"),
    "scaled twice": (
        variant("step", (_SCALE, "self.scaler.scale(self.scaler.scale(trainer.loss)).backward()")),
        "scaler",
    ),
    "always travels": (variant("step", ("last=number == len(group)", "last=True")), "travel once"),
    "travels with the first": (variant("step", ("last=number == len(group)", "last=number == 1")), "travel once"),
    "never travels": (variant("step", ("last=number == len(group)", "last=False")), "travel once"),
}
# ---------------------------------------------------------------- 6, the run's state


class ByCases(ANSWERS["RunState"]):
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


class ByFlag(ANSWERS["RunState"]):
    """Notes in `begin` whether there is something to be put back later."""

    def begin(self, trainer):
        super().begin(trainer)
        self.later = self.pending is not None

    def after_skip(self, trainer):
        if self.later:
            self.put_back(trainer)
        self.later = False


_BEGAN = '            set_generator_states(trainer, states["began"])\n'
_NOTES = "        self.began = generator_states(trainer)\n"
_REFUSES = '        refuse_another_run(trainer, self.saved["fingerprint"])\n'
_TAKE = "        self.take(trainer)\n"
_TAKES = "        self.pending = self.saved\n        self.saved = None\n"
_AT_ONCE = "        if trainer.batches_done == 0:\n            self.put_back(trainer)\n"
_LATER = "        if self.pending is not None:\n            self.put_back(trainer)\n"
_POSITION = '        for name, value in self.pending["position"].items():\n            setattr(trainer, name, value)\n'
WRONG_STATE = {
    "all at once": (variant("state", (_AT_ONCE, "        self.put_back(trainer)\n")), "saved in an epoch"),
    "generators of now before the loader": (
        variant("state", ('states["began"]', 'states["now"]')),
        "saved in an epoch",
    ),
    "generators of the first process": (
        variant("state", ('["generators"][trainer.ranks.rank]\n            set', '["generators"][0]\n            set')),
        "saved in an epoch",
    ),
    "generators aren't set": (variant("state", (_BEGAN, "            pass\n")), "saved in an epoch"),
    "put back before the loader": (
        variant(
            "state", (_NOTES, _NOTES + "        if self.pending is not None:\n            self.put_back(trainer)\n")
        ),
        "saved in an epoch",
    ),
    "never at once": (variant("state", (_AT_ONCE, "")), "saved between"),
    "put back in each epoch": (
        variant(
            "state",
            (
                _LATER,
                "        if self.pending is not None:\n            state = self.pending\n            self.put_back(trainer)\n            self.pending = state\n",
            ),
        ),
        "same bits",
    ),
    "began isn't noted": (variant("state", (_NOTES, "")), "go on again"),
    "notes before it sets": (
        variant(
            "state",
            (
                "        if self.pending is not None:\n            states",
                _NOTES + "        if self.pending is not None:\n            states",
            ),
            (_BEGAN + _NOTES, _BEGAN),
        ),
        "go on again",
    ),
    "notes behind the skip": (variant("state", (_NOTES, ""), (_LATER, _NOTES + _LATER)), "go on again"),
    "no other run": (variant("state", (_REFUSES, "")), "another run"),
    "refused too late": (
        variant(
            "state",
            (_REFUSES, ""),
            (
                _AT_ONCE,
                _AT_ONCE
                + '        refuse_another_run(trainer, (self.pending or {"fingerprint": fingerprint(trainer)})["fingerprint"])\n',
            ),
        ),
        "another run",
    ),
    "taken before it is refused": (
        variant("state", (_REFUSES + _TAKE, _TAKE + _REFUSES.replace("saved", "pending"))),
        "another run",
    ),
    "a second fit resumes again": (variant("state", (_TAKES, _TAKES.splitlines(True)[0])), "a second fit"),
    "the step isn't moved": (
        variant("state", (_POSITION, _POSITION + "        trainer.step = 0\n")),
        "position goes on",
    ),
    "the epoch begins anew": (
        variant("state", (_POSITION, _POSITION + "        trainer.batches_done = 0\n")),
        "saved in an epoch",
    ),
    "the metrics are lost": (
        variant("state", (_POSITION, _POSITION + "        trainer.metrics = {}\n")),
        "position goes on",
    ),
}
CHECKS = {
    "Trainer": check.trainer,
    "EarlyStopping": check.early_stopping,
    "StepLog": check.step_log,
    "CheckpointFile": check.checkpoint_file,
    "GroupStep": check.group_step,
    "RunState": check.run_state,
}


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # as some wrong answers leave it
class TestChecks(CheckProtocol):
    TOPIC = "15-10"
    IDLE = IDLE
    CHECKS, ANSWERS, STUBS = CHECKS, ANSWERS, STUBS
    RIGHT: ClassVar = {
        "Trainer": [WithFlags, StageByStage],
        "EarlyStopping": [ByHistory, BySign],
        "StepLog": [InColumns, ByStack],
        "CheckpointFile": [Digest, ByPathlib],
        "GroupStep": [ByLists, LastApart],
        "RunState": [ByCases, ByFlag],
    }
    WRONG: ClassVar = {
        "Trainer": WRONG_TRAINER,
        "EarlyStopping": WRONG_STOPPING,
        "StepLog": WRONG_LOG,
        "CheckpointFile": WRONG_FILE,
        "GroupStep": WRONG_STEP,
        "RunState": WRONG_STATE,
    }

    def hold_stand_in(self, name, stand_in):
        assert CHECKS[name].run(stand_in).status == "passed"
