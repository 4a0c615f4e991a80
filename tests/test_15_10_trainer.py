"""What 15-10 builds: the trainer and its callbacks, against plain loops, kills, torchrun and brute force."""

import csv
import json
import math
import os
import pickle
import random
import subprocess
import sys
import time
from collections import namedtuple
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from course.answers import definitions
from shared.killing import kill_here, launch_killed
from shared.launcher import launch

FRAMEWORK = """data helpers plain-loop callback stages loop order ended signals ending-loop safe-loop ex-stopping
    read-together step-rows log-reads metrics-logger ex-ratio ex-file model-checkpoint place ex-groups group-loop engine
    by-hand-loop parallel-engine resumable-sampler savable newest resumable job ex-trainer"""
REST = "progress shelf ema time-limit watchers activation-stats profiler"
ROOT = Path(__file__).parent.parent
HOOKS = "fit_start epoch_start batch_start after_forward before_step after_step batch_end"
HOOKS = f"{HOOKS} validation_start validation_end epoch_end fit_end".split()


def load_lesson(*more):
    """The framework's cells with the answers, others, and callbacks that only tests need."""
    names = definitions("15-10", "device", *FRAMEWORK.split(), *more)
    callback = names["Callback"]

    class Interrupt(callback):
        """Ctrl-C after a step."""

        order = 200

        def __init__(self, step):
            self.step = step

        def on_batch_end(self, loop):
            if loop.step == self.step:
                raise KeyboardInterrupt

    class Losses(callback):
        def on_fit_start(self, loop):
            self.losses = []

        def on_after_step(self, loop):
            self.losses.append(loop.loss.detach())

    return SimpleNamespace(**names, Interrupt=Interrupt, Losses=Losses)


@pytest.fixture(scope="module")
def lesson():
    return load_lesson(*REST.split())


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def batches(count=7, size=5, last=None):
    dice = torch.Generator().manual_seed(count)
    sizes = [*[size] * (count - 1), last or size]
    return [(torch.randn(n, 6, generator=dice), torch.randint(3, (n,), generator=dice)) for n in sizes]


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_the_named_classes_are_there(lesson):
    for name in ("Trainer", "Callback", "EarlyStopping", "ModelCheckpoint", "MetricsLogger"):
        assert isinstance(getattr(lesson, name), type)
    assert issubclass(lesson.Trainer, lesson.Loop)


# ---------------------------------------------------------------- the loop


@pytest.mark.parametrize("kind", ["Loop", "SafeLoop", "Engine", "Trainer"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_the_weights_are_those_of_a_plain_loop(lesson, kind, optimizer):
    data, plain = batches(), net()
    lesson.plain_fit(plain, optimizer(plain.parameters(), 0.05), F.cross_entropy, data, 3)
    watching = [lesson.Told(), lesson.MetricsLogger(), lesson.GradientNorm(), lesson.UpdateRatio(2)]
    for callbacks in ([], [*watching, lesson.GradientHealth(2), lesson.ActivationStats(nn.ReLU)]):
        model = net()
        fit = getattr(lesson, kind)(callbacks).fit
        fit(model, optimizer(model.parameters(), 0.05), F.cross_entropy, data, max_epochs=3)
        assert same(model, plain)
        assert not any(module._forward_hooks for module in model.modules())


def test_hooks_come_in_the_documented_order(lesson):
    told, model = lesson.Told(), net()
    lesson.Trainer([told]).fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches(2), batches(1))
    step = "before_forward after_forward before_backward after_backward before_step after_step"
    wanted = f"fit_start epoch_start {f'batch_start {step} batch_end ' * 2} validation_start validation_end"
    assert [name.removeprefix("on_") for name, *_ in told.told] == f"{wanted} epoch_end fit_end".split()


@pytest.mark.parametrize("kind", ["SafeLoop", "Trainer"])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), "StopFit"])
def test_what_has_started_is_ended(lesson, kind, hook, error):
    error = lesson.StopFit("enough") if error == "StopFit" else error
    first, last, model = lesson.Told(), lesson.Told(), net()
    loop = getattr(lesson, kind)([first, lesson.Raises(f"on_{hook}", error), last])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if isinstance(error, lesson.StopFit):
        loop.fit(model, optimizer, F.cross_entropy, batches(2), batches(1), 2)
    else:
        with pytest.raises(type(error)) as caught:
            loop.fit(model, optimizer, F.cross_entropy, batches(2), batches(1), 2)
        assert caught.value is error
    for told in (first, last):
        names = [name for name, *_ in told.told]
        for stage in ("fit", "epoch", "batch", "validation"):
            starts, ends = names.count(f"on_{stage}_start"), names.count(f"on_{stage}_end")
            assert ends == starts
        assert names[-1] == "on_fit_end"
        assert names.count("on_exception") == (not isinstance(error, lesson.StopFit) and hook != "fit_end")


@pytest.mark.parametrize("hook", ["epoch_start", "batch_start", "after_step", "batch_end", "validation_start"])
def test_an_epoch_that_is_stopped_counts_and_the_next_one_begins(lesson, hook):
    told, model = lesson.Told(), net()
    always = lesson.Callback()
    setattr(always, f"on_{hook}", lambda loop: (_ for _ in ()).throw(lesson.StopEpoch()))
    loop = lesson.Trainer([told, always])
    loop.fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches(3), batches(1), 4)
    names = [name for name, *_ in told.told]
    assert loop.epochs_done == 4
    assert names.count("on_epoch_end") == 4
    assert names.count("on_validation_end") == (0 if hook == "epoch_start" else 4)


def test_a_stop_at_the_start_leaves_no_callback_half_begun(lesson, tmp_path):
    for order in (-100, 1000):
        model, stop = net(), lesson.Raises("on_fit_start", lesson.StopFit("no"))
        stop.order = order
        others = [lesson.ActivationStats(nn.ReLU), lesson.StepProfiler(), lesson.MetricsLogger(tmp_path / "log")]
        others += [lesson.EMA(), lesson.LRSchedule(SCHEDULES["cosine"]), lesson.EarlyStopping(), lesson.Progress()]
        keeper = lesson.ModelCheckpoint(tmp_path, 2)
        loop = lesson.Trainer([stop, keeper, *others])
        loop.fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches(3))
        assert (loop.step, loop.epochs_done) == (0, 0)
        assert not any(module._forward_hooks for module in model.modules())
    for errors, wanted in (([ValueError("a"), OSError("b")], ValueError), ([lesson.StopFit(), OSError("b")], OSError)):
        raising = [lesson.Raises("on_epoch_start", error) for error in errors]
        with pytest.raises(wanted) as caught:
            lesson.SafeLoop(raising).fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches(3))
        assert len(caught.value.__notes__) == 1


@pytest.mark.parametrize("hook", ["on_fit_start", "on_epoch_start"])
def test_a_resumed_run_that_is_stopped_before_its_state_is_there_keeps_its_checkpoint(lesson, tmp_path, hook):
    assert used_folder(lesson, tmp_path, 10) == [9, 6]
    before = [path.read_bytes() for path in sorted(tmp_path.glob("step-*.ckpt"))]
    model, keeper = net(), lesson.ModelCheckpoint(tmp_path, every_n_steps=3)
    loop = lesson.Trainer([keeper, lesson.Raises(hook, lesson.StopFit("now"))])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with suppress(ValueError):
        loop.fit(model, optimizer, F.cross_entropy, batches(20), resume="auto")
    assert [path.read_bytes() for path in sorted(tmp_path.glob("step-*.ckpt"))] == before


def test_the_newest_file_of_all_folders_is_resumed_and_the_best_of_another_run_set_aside(lesson, tmp_path):
    def run(stop, resume, monitor="val_loss"):
        model, told = net(), lesson.Told()
        keepers = [lesson.ModelCheckpoint(tmp_path / "a", 5), lesson.ModelCheckpoint(tmp_path / "b", 2, 2, monitor)]
        loop = lesson.Trainer([*keepers, lesson.Interrupt(stop), told])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with suppress(KeyboardInterrupt):
            loop.fit(model, optimizer, F.cross_entropy, batches(6), batches(1), 2, resume=resume)
        return [done[2] for name, done, _ in told.told if name == "on_batch_start"]

    run(9, None)
    best = (tmp_path / "b" / "best.ckpt").read_bytes()
    assert run(None, "auto") == [8, 9, 10, 11]
    assert (tmp_path / "b" / "best.ckpt").exists()
    assert not (tmp_path / "b" / "best.aside").exists()
    best = (tmp_path / "b" / "best.ckpt").read_bytes()
    run(3, None)  # another run, without a best so far
    assert not (tmp_path / "b" / "best.ckpt").exists()
    assert (tmp_path / "b" / "best.aside").read_bytes() == best


def test_an_error_is_not_hidden_by_a_signal_or_a_later_error(lesson):
    model, error = net(), ValueError("first")
    later = [lesson.Raises("on_epoch_end", lesson.StopFit()), lesson.Raises("on_fit_end", OSError("later"))]
    loop = lesson.Trainer([lesson.Raises("on_after_forward", error), *later])
    with pytest.raises(ValueError, match="first") as caught:
        loop.fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches(2))
    assert caught.value is error
    assert any("later" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("hook", ["batch_start", "after_forward", "before_backward", "after_backward", "before_step"])
def test_a_stopped_batch_gives_no_update_and_leaves_no_gradient(lesson, hook, accumulate):
    data, model, at = batches(6), net().eval(), 5 if hook == "before_step" else 3
    model.train = lambda mode=True: model  # no dropout: all that differs is what is left out

    class Once(lesson.Callback):
        def stop(self, loop):
            if loop.batches_done == at:
                raise lesson.StopBatch

    setattr(Once, f"on_{hook}", Once.stop)
    loop = lesson.Trainer([Once()], accumulate=accumulate)
    loop.fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, data)
    left = data[:3] if accumulate == 3 else [b for i, b in enumerate(data) if i != at]
    other = net().eval()
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    for start in range(0, len(left), accumulate):
        for x, y in left[start : start + accumulate]:
            (F.cross_entropy(other(x), y) * (len(y) / (5 * accumulate))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loop.step == len(left) // accumulate
    assert loop.epochs_done == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


# ---------------------------------------------------------------- the engine


def test_place_keeps_the_nesting(lesson):
    pair, x = namedtuple("pair", "x y"), torch.ones(2)
    batch = {"a": [x, (x, "text")], "b": pair(x, None), "c": 3}
    moved = lesson.place(batch, torch.device("meta"))
    assert isinstance(moved["b"], pair)
    assert isinstance(moved["a"][1], tuple)
    assert (moved["a"][1][1], moved["b"].y, moved["c"]) == ("text", None, 3)
    assert {t.device.type for t in (moved["a"][0], moved["a"][1][0], moved["b"].x)} == {"meta"}
    assert lesson.place(batch, torch.device("cpu"))["a"][0] is x


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("parts", [1, 2, 4, 9])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_precision_accumulation_clipping_and_schedule_equal_a_loop_by_hand(lesson, precision, parts, optimizer):
    def make(model):
        if optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), 0.05)

    def schedule(optimizer):
        return OneCycleLR(optimizer, 0.1, total_steps=15)

    data, dtype, model = batches(7, last=2), lesson.FORMATS[precision], net()
    ema, logger = lesson.EMA(0.9), lesson.MetricsLogger()
    callbacks = [lesson.LRSchedule(schedule), ema, lesson.GradientNorm(0.3), logger]
    loop = lesson.Trainer(callbacks, precision=precision, accumulate=parts)
    loop.fit(model, make(model), F.cross_entropy, data, max_epochs=2)

    other = net().train()
    o, scaler = make(other), torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    s, rows = schedule(o), []
    live = [t for t in other.state_dict().values() if t.is_floating_point()]
    mean = [t.clone() for t in live]
    for start in [*range(0, 7, parts)] * 2:
        group, total = data[start : start + parts], 0.0
        count = sum(len(y) for _, y in group)
        for x, y in group:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = F.cross_entropy(other(x), y)
            share = loss if len(group) == 1 else loss * (len(y) / count)
            scaler.scale(share).backward()
            total += share.item()
        scaler.unscale_(o)
        norm = nn.utils.clip_grad_norm_(other.parameters(), 0.3)
        rows.append((o.param_groups[0]["lr"], total, norm.item()))
        scaler.step(o)
        scaler.update()
        s.step()
        o.zero_grad()
        for average, value in zip(mean, live, strict=True):
            average.lerp_(value, 1 - 0.9)
    assert same(model, other)
    assert all(torch.equal(a, b) for a, b in zip(ema.shadow, mean, strict=True))
    found = [(row["lr"], row["loss"], row["grad_norm"]) for row in logger.rows if "loss" in row]
    for mine, theirs in zip(found, rows, strict=True):
        assert mine[0] == theirs[0]
        assert mine[1:] == pytest.approx(theirs[1:], rel=1e-5, nan_ok=True)


def test_an_overflow_in_fp16_leaves_the_step_out(lesson):
    data, model = batches(4), net()
    data[1][0][0] = 1e6  # infinite in float16
    loop = lesson.Trainer(precision="fp16")
    loop.fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, data)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert loop.scaler.get_scale() < 2.0**16


def test_a_compiled_model_keeps_its_names_and_its_bits(lesson):
    plain, model = net(), net()
    lesson.plain_fit(plain, torch.optim.SGD(plain.parameters(), 0.1), F.cross_entropy, batches())
    torch.manual_seed(0)
    model = net()
    loop = lesson.Trainer(compiler="eager")
    loop.fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches())
    assert same(model, plain)
    assert list(loop.state_dict()["model"]) == list(plain.state_dict())


# ---------------------------------------------------------------- callbacks


def test_nothing_is_read_from_the_device_between_flushes(lesson):
    model, other = net(), net()
    callbacks = [lesson.MetricsLogger(every=100), lesson.GradientNorm(), lesson.UpdateRatio(), lesson.EMA()]
    callbacks += [lesson.GradientHealth(100), lesson.ActivationStats(nn.Linear), lesson.GradientNorm(1.0)]
    counts = []
    for some, found in (([], other), (callbacks, model)):
        with lesson.Reads() as reads:
            optimizer = torch.optim.SGD(found.parameters(), 0.1)
            lesson.Trainer(some).fit(found, optimizer, F.cross_entropy, batches(30))
        counts.append(reads.count)
    assert counts[1] - counts[0] <= 40  # those of the epoch's end, none a step


def test_the_log_is_csv_and_json_whatever_the_numbers(lesson, tmp_path):
    model, odd = net(), lesson.Callback()
    odd.on_before_step = lambda loop: loop.values.update(x=[1.5, math.nan, math.inf, 3][loop.step])
    logger = lesson.MetricsLogger(tmp_path, every=3, columns=("loss", "x", "absent"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lesson.SafeLoop([logger, odd]).fit(model, optimizer, F.cross_entropy, batches(4), batches(2), 1)

    def refuse(text):
        raise AssertionError(text)

    rows = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [row.get("x") for row in rows] == [1.5, "nan", "inf", 3, None]
    assert set(rows[-1]) == {"step", "epoch", "val_loss"}
    with (tmp_path / "steps.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [int(row["step"]) for row in table] == [1, 2, 3, 4]
    assert [float(row["loss"]) for row in table] == [row["loss"] for row in rows[:4]]
    assert {row["absent"] for row in table} == {""}


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 4)])
def test_the_last_and_the_best_are_kept(lesson, tmp_path, mode, best):
    class Given(lesson.Callback):
        order = -1

        def on_epoch_end(self, loop):
            loop.metrics = {"val_loss": [3.0, 5.0, 1.0, 4.0, 6.0, 2.0][loop.epoch]}

    model = net()
    keeper = lesson.ModelCheckpoint(tmp_path, every_n_steps=2, keep=3, monitor="val_loss", mode=mode)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lesson.Trainer([keeper, Given()]).fit(model, optimizer, F.cross_entropy, batches(3), max_epochs=6)
    assert [path.name for path in keeper.files()] == [f"step-{n:09d}.ckpt" for n in (18, 16, 15)]
    found = lesson.CheckpointFile(tmp_path / "best.ckpt").read()["place"]
    assert (found["step"], found["epochs_done"], found["batches_done"]) == (3 * (best + 1), best + 1, 0)


def test_a_run_that_fails_is_not_saved_and_one_that_is_stopped_is(lesson, tmp_path):
    for number, (error, steps) in enumerate(((ValueError("x"), []), (lesson.StopFit(), [3]))):
        keeper, model = lesson.ModelCheckpoint(tmp_path / str(number)), net()
        loop = lesson.Trainer([keeper, lesson.Raises("on_batch_end", error, 3)])
        with suppress(ValueError):
            loop.fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches())
        assert [int(path.stem[5:]) for path in keeper.files()] == steps


SCHEDULES = {
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=40),
    "cosine": lambda o: CosineAnnealingLR(o, 20),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
    "lambda": lambda o: LambdaLR(o, lambda step: 0.9**step),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on(lesson, tmp_path, kind):
    def run(folder, stop=None):
        model, more = net(), ("epoch", "val_loss") if kind == "plateau" else ()
        callbacks = [lesson.LRSchedule(SCHEDULES[kind], *more), lesson.ModelCheckpoint(folder, 2)]
        callbacks += [lesson.Interrupt(stop), log := lesson.MetricsLogger()]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with suppress(KeyboardInterrupt):
            lesson.Trainer(callbacks).fit(model, optimizer, F.cross_entropy, batches(), batches(2), 3, resume="auto")
        return model, [row["lr"] for row in log.rows if "lr" in row]

    whole, rates = run(tmp_path / "a")
    run(tmp_path / "b", 11)
    again, rest = run(tmp_path / "b")
    assert same(whole, again)
    assert rates == rest  # the rows before the interruption are there, too


@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_end"])
@pytest.mark.parametrize("order", [-1, 1])
def test_the_average_is_out_of_the_model_whatever_a_validation_raises(lesson, hook, order):
    model, raises = net(), lesson.Raises(hook, ValueError("x"))
    raises.order = order
    with pytest.raises(ValueError, match="x"):
        lesson.Trainer([lesson.EMA(0.5), raises]).fit(
            model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches(), batches(1)
        )
    plain = net()
    lesson.plain_fit(plain, torch.optim.SGD(plain.parameters(), 0.1), F.cross_entropy, batches())
    assert same(model, plain)


def test_a_stopped_epoch_switches_nothing_off_and_leaves_no_gradient(lesson, tmp_path):
    model, first = net(), []

    class Sees(lesson.Callback):
        def on_epoch_start(self, loop):
            first.append(any(p.grad is not None for p in model.parameters()))

    once = lesson.Callback()

    def stop(loop):
        if (loop.epoch, loop.batches_done) == (0, 1):
            raise lesson.StopEpoch

    once.on_after_backward = stop
    keeper = lesson.ModelCheckpoint(tmp_path, every_n_steps=2)
    loop = lesson.Trainer([once, keeper, Sees(), lesson.EarlyStopping(patience=9)], accumulate=2)
    loop.fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches(4), batches(1), 3)
    assert first == [False] * 3
    assert loop.ending is None
    assert len(keeper.files()) == 2


def test_a_failing_callback_keeps_its_step_from_being_saved(lesson, tmp_path):
    model = net()
    keeper = lesson.ModelCheckpoint(tmp_path, every_n_steps=2)
    loop = lesson.Trainer([lesson.Raises("on_batch_end", OSError("x"), 4), keeper])
    with pytest.raises(OSError, match="x"):
        loop.fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches(9))
    assert [path.stem for path in keeper.files()] == ["step-000000002"]


def used_folder(lesson, folder, stop=None, resume=None, options=None, data=None):
    model, keeper = net(), lesson.ModelCheckpoint(folder, every_n_steps=3)
    loop = lesson.Trainer([keeper, lesson.Interrupt(stop)], **(options or {}))
    with suppress(KeyboardInterrupt):
        loop.fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, data or batches(20), resume=resume)
    return [int(path.stem[5:]) for path in keeper.files()]


def test_a_new_run_in_a_used_folder_keeps_its_own_checkpoints(lesson, tmp_path):
    assert used_folder(lesson, tmp_path) == [20, 18]
    aside = (tmp_path / "step-000000018.ckpt").read_bytes()
    assert used_folder(lesson, tmp_path, 10) == [9, 6]
    assert (tmp_path / "step-000000018.aside").read_bytes() == aside
    (tmp_path / "step-000000006.ckpt").rename(tmp_path / "six")
    assert used_folder(lesson, tmp_path, 14, "auto") == [12, 9]
    assert used_folder(lesson, tmp_path, 8, tmp_path / "six") == []  # 12 and 9 are of another run now
    assert used_folder(lesson, tmp_path, 11, tmp_path / "six") == [9]


def test_a_run_is_not_resumed_with_other_options(lesson, tmp_path):
    used_folder(lesson, tmp_path, 10)
    for options in ({"precision": "fp16"}, {"precision": "bf16"}, {"accumulate": 2}):
        with pytest.raises(ValueError, match="saved with"):
            used_folder(lesson, tmp_path, None, "auto", options)
    with pytest.raises(ValueError, match="fewer batches than the 9"):
        used_folder(lesson, tmp_path, None, "auto", None, batches(8))
    used_folder(lesson, tmp_path, None, "auto")


def test_weights_that_are_not_finite_are_not_saved(lesson, tmp_path, capsys):
    data = batches(20)
    data[10][0][0] = math.inf
    assert used_folder(lesson, tmp_path, data=data) == [9, 6]
    assert "step 12 is not saved: 0.weight" in capsys.readouterr().out


def test_numbers_of_numpy_are_saved_and_what_cannot_be_read_is_refused_at_once(lesson, tmp_path):
    def run(stop, *more):
        schedule = lesson.LRSchedule(lambda o: LambdaLR(o, lambda step: 1 + np.cos(np.float64(step))))
        callbacks = [schedule, lesson.ModelCheckpoint(tmp_path / str(len(more)), 2), lesson.Interrupt(stop), *more]
        model = net()
        loop = lesson.Trainer([*callbacks, logger := lesson.MetricsLogger(tmp_path / "log")])
        with suppress(KeyboardInterrupt):
            loop.fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches(9), resume="auto")
        return logger

    run(5)
    run(None)
    rows = [json.loads(line) for line in (tmp_path / "log" / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, 10), 9]
    odd = lesson.Callback()
    odd.state_dict = lambda: {"array": np.ones(3)}
    with pytest.raises(pickle.UnpicklingError):
        run(None, odd)
    assert not list((tmp_path / "1").iterdir())


class Draws(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.randn(6) + index, torch.randint(3, ()).item()


class Wrapped:
    """A loader of one's own around another one, which leaves a batch out."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return islice(self.loader, 1, None)


@pytest.mark.parametrize("kind", ["two workers", "a batch sampler", "shuffled, two workers", "a wrapper"])
def test_workers_that_draw_and_batch_samplers_go_on_with_the_same_bits(lesson, tmp_path, kind):
    def run(folder, stop=None):
        torch.manual_seed(0)
        sampler, model = lesson.ResumableSampler(40, 5), net()
        if kind == "a batch sampler":
            loader = DataLoader(Draws(), batch_sampler=torch.utils.data.BatchSampler(sampler, 4, False))
        elif kind == "two workers":
            loader = DataLoader(Draws(), 4, sampler=sampler, num_workers=2, timeout=60)
        elif kind == "a wrapper":
            loader = Wrapped(DataLoader(Draws(), 4, sampler=sampler))
        else:
            loader = DataLoader(Draws(), 4, shuffle=True, num_workers=2, timeout=60)
        loop = lesson.Trainer([lesson.ModelCheckpoint(folder, 3), lesson.Interrupt(stop), seen := lesson.Losses()])
        seen.on_epoch_end = lambda loop: None
        with suppress(KeyboardInterrupt):
            loop.fit(
                model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, loader, max_epochs=2, resume="auto"
            )
        return model

    wanted = run(tmp_path / "whole")
    for stop in (5, 14):
        run(tmp_path / str(stop), stop)
        assert same(wanted, run(tmp_path / str(stop)))


def test_why_a_run_was_left_is_known_at_its_end(lesson):
    class Knows(lesson.Callback):
        def on_fit_end(self, loop):
            self.why = loop.ending

    stopper = lesson.EarlyStopping(threshold=99.0)
    for callback, kind in ((stopper, lesson.StopFit), (lesson.Callback(), type(None))):
        model, knows = net(), Knows()
        fit = lesson.Trainer([callback, knows]).fit
        fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches(2), batches(1), 2)
        assert type(knows.why) is kind


def test_a_step_is_named_right_after_a_resume_and_left_batches(lesson, tmp_path):
    data = batches(20)
    data[13][0][2, 1] = math.nan

    def leave(loop):
        if loop.batches_done < 2:
            raise lesson.StopBatch

    for resumed in (False, True):
        model, leaves = net(), lesson.Callback()
        leaves.order, leaves.on_before_step = 5, leave
        stop = lesson.Interrupt(None if resumed else 7)
        fit = lesson.Trainer([lesson.GradientHealth(4), leaves, lesson.ModelCheckpoint(tmp_path, 3), stop]).fit
        error, words = (FloatingPointError, "step 12: ") if resumed else (KeyboardInterrupt, None)
        with pytest.raises(error, match=words):
            fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, data, resume="auto")


def test_the_clock_has_a_row_a_step_and_a_full_disk_closes_the_log(lesson, tmp_path, monkeypatch):
    model, logger = net(), lesson.MetricsLogger(tmp_path / "log", every=5)
    callbacks = [logger, lesson.ModelCheckpoint(tmp_path, 3)]
    lesson.Trainer(callbacks, accumulate=2).fit(
        model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches(20)
    )
    rows = [line.split(",") for line in (tmp_path / "log" / "clock.csv").read_text().splitlines()]
    assert [int(step) for step, _ in rows] == [*range(1, 11), 10]
    assert [float(seconds) for _, seconds in rows] == sorted(float(seconds) for _, seconds in rows)

    def full(self, name, text):
        raise OSError("disk full")

    monkeypatch.setattr("shared.log_files.LogFiles.write", full)
    logger = lesson.MetricsLogger(tmp_path / "more", every=5)
    with pytest.raises(OSError, match="disk full"):
        lesson.Trainer([logger]).fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches(20))
    assert not logger.files.files


def test_bad_gradients_are_found_by_name_and_step(lesson):
    data, model = batches(12), net()
    data[7][0][2, 1] = math.nan
    loop = lesson.Trainer([lesson.GradientHealth(4)])
    with pytest.raises(FloatingPointError, match=r"step 8: .*0\.weight.*4\.bias"):
        loop.fit(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, data)


# ---------------------------------------------------------------- interrupted, killed, distributed

X = torch.randn(300, 1, 28, 28, generator=torch.Generator().manual_seed(0))
Y = torch.randint(10, (300,), generator=torch.Generator().manual_seed(1))


def everything(lesson, folder, stops=(), loader=None, kind="fp32"):
    """The lesson's job with everything that has a state, interrupted after some batches."""
    schedule = lesson.LRSchedule(lambda o: OneCycleLR(o, 3e-3, total_steps=16))
    options = {"precision": kind, "accumulate": 1 if kind == "fp32" else 2, "loader": loader}
    return lesson.job(lesson.Trainer, Path(folder), (X, Y), stops, extra=(schedule, lesson.EMA()), **options)


def timed_everything(*args):
    start = time.perf_counter()
    result = everything(*args)
    return time.perf_counter() - start, result


everything.__module__ = timed_everything.__module__ = "__main__"  # so they travel by value to other processes


def shuffled(data):
    return DataLoader(data, 64, shuffle=True)


def own(data):
    return DataLoader(data, 64, shuffle=True, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
@pytest.mark.parametrize("loader", [None, shuffled, own], ids=["resumable", "shuffled", "own"])
def test_interrupted_at_each_step_the_run_ends_with_the_same_bits(lesson, tmp_path, loader, kind):
    wanted = everything(lesson, tmp_path / "whole", (), loader, kind)
    for stop in range(1, 16 if kind == "fp32" else 10):
        assert wanted == everything(lesson, tmp_path / f"{stop}", [stop], loader, kind), stop


def test_damaged_checkpoints_are_reported_and_older_ones_used(lesson, tmp_path, capsys):
    wanted = everything(lesson, tmp_path)
    assert wanted == everything(lesson, tmp_path)  # a run that has ended
    newest = lesson.ModelCheckpoint(tmp_path).files()[0]
    for damaged in (1, 2):  # the second time all that is left
        found = lesson.ModelCheckpoint(tmp_path).files()[:damaged]
        for path in found:
            path.write_bytes(path.read_bytes()[:-1])
        assert wanted == everything(lesson, tmp_path)
        assert capsys.readouterr().out.count("left out, damaged: ") == damaged
        assert all(path.with_suffix(".aside").exists() for path in found)
    newest.write_bytes(b"")
    with pytest.raises(lesson.DamagedCheckpoint):
        lesson.Trainer().fit(*[None] * 4, resume=newest)


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_twenty_five_kills_at_random_moments_change_nothing(lesson, tmp_path):
    names = ("job", "Trainer", "LRSchedule", "EMA")
    part = SimpleNamespace(**{name: getattr(lesson, name) for name in names})
    seconds, wanted = launch(timed_everything, 1, part, str(tmp_path / "whole"), timeout=60)[0]
    dice, moments = random.Random(1510), []
    for run in range(5):
        folder, kills = tmp_path / str(run), 0
        while kills < 5:
            if launch_killed(everything, seconds * dice.uniform(0.1, 0.9), part, str(folder)) is not None:
                break  # it was quicker: the rest of the kills goes to the next run
            kills += 1
            places = [lesson.CheckpointFile(path).read()["place"]["step"] for path in folder.glob("*.ckpt")]
            moments.append(max(places, default=0))
        assert wanted == launch(everything, 1, part, str(folder), timeout=60)[0]
    while len(moments) < 25:  # one run more for what is missing
        folder = tmp_path / f"more-{len(moments)}"
        if launch_killed(everything, seconds * dice.uniform(0.1, 0.5), part, str(folder)) is None:
            moments.append(0)
        assert wanted == launch(everything, 1, part, str(folder), timeout=60)[0]
    assert len(set(moments)) > 2, "killed before anything was saved"


SCRIPT = """
import os, sys
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.nn
import test_15_10_trainer as t

lesson = t.load_lesson()
folder = Path(sys.argv[1])
dist.init_process_group("gloo")
dies = folder.name == "killed" and not (folder / "died").exists()
state = t.rank_run(lesson, folder, 8, dies)
if dist.get_rank() == 0:
    torch.save(state, folder / "end.pt")
dist.destroy_process_group()
if sys.platform == "linux":  # a thread of gloo that lets go of a tensor while Python ends aborts the rank, now and then
    threads = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert not any("gloo" in name for name in threads), threads
"""


def rank_run(lesson, folder, size, dies=False):
    """Train on this rank's share, in the process group if there is one."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    dice = torch.Generator().manual_seed(4)
    x, y = torch.randn(96, 6, generator=dice).double(), torch.randint(3, (96,), generator=dice)
    loader = DataLoader(TensorDataset(x, y), size, sampler=lesson.ResumableSampler(96, 2, rank, ranks))

    class Dies(lesson.Callback):
        def on_batch_end(self, loop):
            if dies and loop.step == 8 and loop.rank == 1:
                (folder / "died").touch()
                kill_here()

    logger = lesson.MetricsLogger(folder / f"log-{rank}", every=4)
    trainer = lesson.Trainer([lesson.ModelCheckpoint(folder, 3, monitor="val_loss"), logger, Dies()])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    trainer.fit(model, optimizer, F.cross_entropy, loader, [(x[:24], y[:24])], max_epochs=3, resume="auto")
    return model.state_dict()


@pytest.mark.skipif(sys.platform == "win32", reason="torchrun's rendezvous needs libuv there")
def test_under_torchrun_two_ranks_equal_one_and_a_killed_run_resumes(lesson, tmp_path):
    script, found = tmp_path / "train.py", {}
    script.write_text(SCRIPT.format(root=str(ROOT), tests=str(ROOT / "tests")))
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [f"--log-dir={tmp_path}", str(script), str(tmp_path / name)]
        options = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "timeout": 240}
        done = subprocess.run(command, capture_output=True, text=True, **options)
        if name == "killed":
            assert done.returncode != 0
            assert (tmp_path / name / "died").exists()
            done = subprocess.run(command, capture_output=True, text=True, **options)
        assert done.returncode == 0, done.stderr
        found[name] = torch.load(tmp_path / name / "end.pt", weights_only=True)
        assert (tmp_path / name / "log-0" / "steps.csv").exists()
        assert not (tmp_path / name / "log-1").exists()
    (tmp_path / "one").mkdir()
    for name, tensor in rank_run(lesson, tmp_path / "one", 16).items():
        assert torch.allclose(tensor, found["whole"][name], rtol=0, atol=1e-13)
        assert torch.equal(found["whole"][name], found["killed"][name])
    logs = [(tmp_path / name / "log-0" / "steps.csv").read_text() for name in ("whole", "killed")]
    assert logs[0] == logs[1]
