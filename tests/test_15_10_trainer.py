"""What 15-10 builds: the trainer, its parts and callbacks, against plain loops, kills, torchrun and brute force."""

import csv
import json
import math
import os
import pickle
import random
import signal
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

from course.lesson_code import definitions
from shared.launcher import launch
from shared.lessons.topic_15_10.killed_process import kill_here, launch_killed
from shared.rank_failures import LaunchError

FRAMEWORK = """data evaluate plain-loop callback tiny-trainer recorder wishes dead-units full-disk signals listeners
    ex-trainer ex-stopping scripted tensor-slots read-together columns ex-log gradient-norm dead-units-again
    file-log progress ex-file simple-checkpoint checkpoint newest place forward groups count-samples metrics f1-metric
    default-parts bare one-process ranks bare-model measure trainer-with-parts synced ex-step read-means
    sampler generators fingerprint ex-state trace interrupt job-net job-callbacks job load-weights schedule ema
    load-averages leave health"""
ROOT = Path(__file__).parent.parent


def load_lesson():
    """The framework's cells with the answers."""
    return SimpleNamespace(**definitions("15-10", "device", *FRAMEWORK.split()))


@pytest.fixture(scope="module")
def lesson():
    return load_lesson()


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr)


def batches(count=7, size=5, last=None):
    dice = torch.Generator().manual_seed(count)
    sizes = [*[size] * (count - 1), last or size]
    return [(torch.randn(n, 6, generator=dice), torch.randint(3, (n,), generator=dice)) for n in sizes]


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def at(lesson, hook, action):
    """A callback that calls `action(trainer)` at one hook."""
    return type("At", (lesson.Callback,), {hook: lambda self, trainer: action(trainer)})()


def raising(lesson, hook, error, call=1):
    """A callback that raises in the n-th call of a hook."""
    left = [call]

    def act(trainer):
        left[0] -= 1
        if left[0] == 0:
            raise error

    return at(lesson, hook, act)


def fitted(lesson, callbacks, data, val=None, model=None, epochs=1, fit=None, **options):
    """A trainer after its fit."""
    model = model or net()
    trainer = lesson.Trainer(callbacks, **options)
    trainer.fit(model, sgd(model), F.cross_entropy, data, val, epochs, **(fit or {}))
    return trainer


# ---------------------------------------------------------------- the loop


def test_the_named_classes_are_there(lesson):
    for name in ("Trainer", "Callback", "EarlyStopping", "Checkpoint", "StepLog", "RunState", "GroupStep"):
        assert isinstance(getattr(lesson, name), type)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_the_weights_are_those_of_a_plain_loop(lesson, optimizer):
    data, plain = batches(), net()
    lesson.plain_fit(plain, optimizer(plain.parameters(), 0.05), F.cross_entropy, data, 3)
    log = lesson.StepLog({"loss": lesson.loss_of, "lr": lesson.rate_of})
    watching = [lesson.Recorder(), log, lesson.GradientNorm(), lesson.GradientHealth(2)]
    for callbacks in ([], watching):
        model = net()
        lesson.Trainer(callbacks).fit(model, optimizer(model.parameters(), 0.05), F.cross_entropy, data, None, 3)
        assert same(model, plain)


def test_a_trainer_that_is_used_twice_trains_as_a_new_one(lesson):
    data = batches()
    fresh = fitted(lesson, [], data, epochs=2).model
    trainer = lesson.Trainer([raising(lesson, "on_before_step", OSError("x"), 3)], train_step=lesson.GroupStep())
    model = net()
    with pytest.raises(OSError, match="x"):
        trainer.fit(model, sgd(model), F.cross_entropy, lesson.Groups(data, 2))
    trainer.train_step = lesson.plain_step
    model = net()
    trainer.fit(model, sgd(model), F.cross_entropy, data, None, 2)
    assert same(model, fresh)
    assert (trainer.step, trainer.epochs_done) == (14, 2)


@pytest.mark.parametrize(
    "hook", ["epoch_start", "batch_start", "before_step", "batch_end", "validation_start", "fit_end"]
)
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_after_an_error_nothing_stays_open_and_nothing_claims_to_be_finished(lesson, hook, error):
    first, closed, model = lesson.Recorder(), [], net()
    opens = at(lesson, "on_fit_start", lambda trainer: trainer.exits["fit"].callback(closed.append, "fit"))
    more = at(lesson, "on_epoch_start", lambda trainer: trainer.exits["epoch"].callback(closed.append, "epoch"))
    trainer = lesson.Trainer([first, lesson.DeadUnits(), opens, more, raising(lesson, f"on_{hook}", error)])
    model = nn.Sequential(net(), nn.Identity(), nn.Identity(), nn.ReLU())
    with pytest.raises(type(error)) as caught:
        trainer.fit(model, sgd(model), F.cross_entropy, batches(2), batches(1), 2)
    assert caught.value is error
    assert closed[-1] == "fit"
    assert closed.count("epoch") == (2 if hook == "fit_end" else 1)
    assert first.calls[-1][0] == f"on_{hook}"
    assert not any(module._forward_hooks for module in model.modules())


def test_signals_end_what_they_name(lesson):
    def run(error, hook="on_before_step"):
        heard = lesson.Recorder()
        trainer = fitted(lesson, [heard, raising(lesson, hook, error, 2)], batches(4), batches(1), epochs=2)
        names = [name for name, _ in heard.calls]
        return trainer.step, names.count("on_validation_end"), names.count("on_epoch_end"), names.count("on_fit_end")

    assert run(lesson.CancelBatch()) == (7, 2, 2, 1)
    assert run(lesson.CancelEpoch()) == (5, 2, 2, 1)
    assert run(lesson.CancelFit()) == (1, 0, 0, 1)
    assert run(lesson.CancelFit(), "on_epoch_end") == (8, 2, 2, 1)
    with pytest.raises(lesson.CancelBatch):
        run(lesson.CancelBatch(), "on_epoch_end")


@pytest.mark.parametrize("parts", [1, 3])
def test_a_cancelled_batch_gives_no_update_and_leaves_no_gradient_behind(lesson, parts):
    data, model = batches(6), net().eval()
    model.train = lambda mode=True: model  # no dropout: all that differs is what is left out
    cancel = raising(lesson, "on_before_backward", lesson.CancelBatch(), 3)
    trainer = lesson.Trainer([cancel], train_step=lesson.GroupStep())
    trainer.fit(model, sgd(model), F.cross_entropy, lesson.Groups(data, parts))
    left = data[3:] if parts == 3 else [*data[:2], *data[3:]]
    other = net().eval()
    optimizer = sgd(other)
    for group in lesson.Groups(left, parts):
        for x, y in group:
            (F.cross_entropy(other(x), y) * (1 / len(group))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert trainer.step == len(left) // parts
    assert all(torch.allclose(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_steps_can_be_limited_and_validation_comes_every_few_steps(lesson):
    heard = lesson.Recorder()
    fit = {"max_steps": 9, "validate_every": 4}
    trainer = fitted(lesson, [heard], batches(7), batches(1), epochs=5, fit=fit)
    assert (trainer.step, trainer.epochs_done, trainer.batches_done) == (9, 1, 2)
    assert [step for name, step in heard.calls if name == "on_validation_end"] == [4, 8]
    assert [name for name, _ in heard.calls].count("on_epoch_end") == 1
    assert heard.calls[-1][0] == "on_fit_end"
    assert trainer.model.training


def test_max_steps_at_the_end_of_an_epoch_finishes_it(lesson):
    trainer = fitted(lesson, [], batches(7), batches(1), epochs=5, fit={"max_steps": 14})
    assert (trainer.step, trainer.epochs_done, trainer.batches_done) == (14, 2, 0)


@pytest.mark.parametrize("name", ["NoState", "RunState"])
def test_a_sampler_hears_the_epoch_with_and_without_a_state_to_keep(lesson, name):
    sampler = lesson.ResumableSampler(35)
    loader = DataLoader(TensorDataset(*map(torch.cat, zip(*batches(7), strict=True))), 5, sampler=sampler)
    heard = []
    callback = at(lesson, "on_epoch_end", lambda trainer: heard.append((sampler.epoch, sampler.start)))
    assert fitted(lesson, [callback], loader, epochs=3, state=getattr(lesson, name)()).step == 21
    assert heard == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("first", [3, 7, 9, 14])
def test_a_run_that_max_steps_has_ended_goes_on_with_the_same_bits_and_validations(lesson, tmp_path, first):
    def run(folder, max_steps):
        model, state, heard = net(), lesson.RunState(lesson.newest_undamaged(folder)), lesson.Recorder()
        callbacks = [heard, lesson.Checkpoint(folder, state.collect)]
        loader = DataLoader(TensorDataset(*map(torch.cat, zip(*batches(7), strict=True))), 5, shuffle=True)
        torch.manual_seed(1)
        fit = {"max_steps": max_steps, "validate_every": 4}
        fitted(lesson, callbacks, loader, batches(2), model, 5, fit, state=state)
        return model, [step for name, step in heard.calls if name == "on_validation_end"]

    whole, validated = run(tmp_path / "whole", 20)
    _, before = run(tmp_path / "parts", first)
    again, after = run(tmp_path / "parts", 20)
    assert same(whole, again)
    assert before + after == validated == [4, 8, 12, 16, 20]
    done, nothing = run(tmp_path / "parts", 20)  # nothing is left to do: the weights are those of the file
    assert same(whole, done)
    assert not nothing


def test_a_loader_that_is_used_up_after_one_epoch_is_refused(lesson):
    with pytest.raises(ValueError, match="used up"):
        fitted(lesson, [], lesson.Groups((batch for batch in batches()), 2), epochs=2)
    with pytest.raises(ValueError, match="used up"):
        fitted(lesson, [], iter(batches()), epochs=2)
    assert fitted(lesson, [], iter(batches())).step == 7


def test_metrics_are_of_the_whole_set_and_validate_needs_no_fit(lesson):
    torch.manual_seed(1)
    model, data = net(), batches(9, last=2)
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    trainer = lesson.Trainer(metrics={"f1": lesson.F1(1)})
    model.train()
    found = trainer.validate(model, F.cross_entropy, data)
    assert model.training
    model.eval()
    guess = model(x).argmax(1)
    hits = ((guess == 1) & (y == 1)).sum().item()
    assert found["val_f1"] == pytest.approx(2 * hits / ((guess == 1).sum() + (y == 1).sum()).item())
    assert found["val_loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)


def test_a_log_of_any_column_is_a_table(lesson, tmp_path):
    fitted(lesson, [lesson.FileLog(tmp_path, {"lr": lesson.rate_of})], batches(5), batches(1))
    assert (tmp_path / "steps.csv").read_text().splitlines() == ["step,epoch,lr", *[f"{n},0,0.1" for n in range(1, 6)]]


# ---------------------------------------------------------------- the parts


def test_a_batch_keeps_its_nesting_on_another_device(lesson):
    pair, x = namedtuple("pair", "x y"), torch.ones(2)
    batch = {"a": [x, (x, "text")], "b": pair(x, None), "c": 3}
    moved = lesson.to_device(batch, torch.device("meta"))
    assert isinstance(moved["b"], pair)
    assert isinstance(moved["a"][1], tuple)
    assert (moved["a"][1][1], moved["b"].y, moved["c"]) == ("text", None, 3)
    assert {t.device.type for t in (moved["a"][0], moved["a"][1][0], moved["b"].x)} == {"meta"}
    assert lesson.to_device(batch, torch.device("cpu"))["a"][0] is x
    assert lesson.count_samples({"name": "x", "parts": [None, (pair(x, 1), 3)]}) == 2


def test_a_precision_of_another_name_is_named(lesson):
    with pytest.raises(ValueError, match="'16-mixed'"):
        lesson.Forward("cpu", "16-mixed")


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
    ema, norm = lesson.EMA(0.9), lesson.GradientNorm(0.3)
    log = lesson.StepLog({"loss": lesson.loss_of, "lr": lesson.rate_of, "norm": lambda trainer: norm.norm})
    step = lesson.GroupStep(torch.amp.GradScaler("cpu", enabled=precision == "fp16"))
    callbacks = [norm, ema, log, lesson.LRSchedule(schedule)]
    trainer = lesson.Trainer(callbacks, forward=lesson.Forward("cpu", precision), train_step=step)
    trainer.fit(model, make(model), F.cross_entropy, lesson.Groups(data, parts), None, 2)

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
            share = loss * (len(y) / count)
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
    for mine, theirs in zip(log.rows, rows, strict=True):
        assert mine["lr"] == theirs[0]
        assert (mine["loss"], mine["norm"]) == pytest.approx(theirs[1:], rel=1e-5, nan_ok=True)


def test_an_overflow_in_fp16_leaves_the_step_out_and_a_cancelled_one_is_no_trouble(lesson):
    data, model = batches(6), net()
    data[1][0][0] = 1e6  # infinite in float16
    step = lesson.GroupStep(torch.amp.GradScaler("cpu"))
    cancel = raising(lesson, "on_before_step", lesson.CancelBatch(), 4)
    trainer = lesson.Trainer([cancel], forward=lesson.Forward("cpu", "fp16"), train_step=step)
    trainer.fit(model, sgd(model), F.cross_entropy, lesson.Groups(data, 1))
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert step.scaler.get_scale() < 2.0**16
    assert trainer.step == 5


def test_a_compiled_model_keeps_its_names_and_its_bits(lesson):
    plain = net()
    lesson.plain_fit(plain, sgd(plain), F.cross_entropy, batches())
    for model, wrapped in ((net(), False), (net(), True)):
        compiled = torch.compile(model, backend="eager") if wrapped else model
        if not wrapped:
            model.compile(backend="eager")
        torch.manual_seed(0)
        net()  # draws as many numbers as before
        trainer = fitted(lesson, [], batches(), model=compiled, state=lesson.RunState())
        assert same(model, plain)
        assert list(trainer.state.collect(trainer)["model"]) == list(plain.state_dict())


# ---------------------------------------------------------------- callbacks


def test_nothing_is_read_from_the_device_between_flushes(lesson):
    norm = lesson.GradientNorm()
    columns = {"loss": lesson.loss_of, "norm": lambda trainer: norm.norm}
    counts = []
    watching = [norm, lesson.StepLog(columns, 100), lesson.EMA(), lesson.GradientHealth(100)]
    for callbacks in ([], watching):
        with lesson.Reads() as reads:
            fitted(lesson, callbacks, batches(30))
        counts.append(reads.count)
    assert counts[1] - counts[0] <= 10  # those of the epoch's end, none a step


def test_logged_numbers_are_those_of_their_step(lesson):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3))
    log = lesson.StepLog({"lr": lesson.rate_of})
    schedule = lesson.LRSchedule(lambda o: LambdaLR(o, lambda step: 0.5**step))
    lesson.Trainer([log, schedule]).fit(model, optimizer, F.cross_entropy, batches(9))
    assert [row["lr"] for row in log.rows] == pytest.approx([1e-3 * 0.5**n for n in range(9)])


def test_each_validation_within_an_epoch_is_logged_at_its_step(lesson):
    log = lesson.StepLog({"loss": lesson.loss_of})
    fitted(lesson, [log], batches(6), batches(2), epochs=2, fit={"validate_every": 4})
    assert [row["step"] for row in log.rows if "val_loss" in row] == [4, 8, 12]


def test_the_averages_of_a_checkpoint_are_those_that_were_validated(lesson, tmp_path):
    state, ema, other = lesson.RunState(), lesson.EMA(0.5), net(1)
    keeper = lesson.Checkpoint(tmp_path, state.collect, monitor="val_loss")
    run = fitted(lesson, [ema, keeper], batches(6), batches(2), epochs=1, state=state)
    lesson.load_averages(other, tmp_path / "best.ckpt")
    assert run.validate(other, F.cross_entropy, batches(2)) == run.metrics
    assert run.validate(run.model, F.cross_entropy, batches(2)) != run.metrics


def test_several_logs_have_all_columns(lesson, tmp_path):
    norm = lesson.GradientNorm()
    columns = {"loss": lesson.loss_of, "norm": lambda trainer: norm.norm}
    logs = [lesson.StepLog(columns, 3), lesson.StepLog(columns), lesson.FileLog(tmp_path, columns, 2)]
    fitted(lesson, [norm, *logs], batches(), batches(2))
    assert logs[0].rows == logs[1].rows
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert lines == logs[0].rows
    assert [set(row) for row in lines[:7]] == [{"step", "epoch", "loss", "norm"}] * 7


def test_the_log_is_csv_and_json_whatever_the_numbers(lesson, tmp_path):
    odd = [1.5, math.nan, math.inf, 3]
    log = lesson.FileLog(tmp_path, {"loss": lesson.loss_of, "x": lambda trainer: odd[trainer.step - 1]}, every=3)
    fitted(lesson, [log], batches(4), batches(2))

    def refuse(text):
        raise AssertionError(text)

    rows = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [row.get("x") for row in rows] == [1.5, "nan", "inf", 3, None]
    assert set(rows[-1]) == {"step", "epoch", "val_loss"}
    with (tmp_path / "steps.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in table] == [row["loss"] for row in rows[:4]]
    clock = (tmp_path / "clock.csv").read_text().splitlines()[1:]
    seconds = [float(line.split(",")[1]) for line in clock]
    assert seconds == sorted(seconds)


def test_after_an_error_the_log_has_all_rows_and_is_closed(lesson, tmp_path):
    log = lesson.FileLog(tmp_path, {"loss": lesson.loss_of}, every=50)
    with pytest.raises(ValueError, match="x"):
        fitted(lesson, [log, raising(lesson, "on_after_step", ValueError("x"), 5)], batches())
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 5
    assert not log.files.files


def test_progress_needs_no_loss(lesson):
    class Slow:
        def __iter__(self):
            time.sleep(0.25)
            yield from batches(3)

    cancel = raising(lesson, "on_batch_start", lesson.CancelBatch())
    assert fitted(lesson, [cancel, lesson.Progress()], Slow()).step == 2


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 4)])
def test_the_last_and_the_best_are_kept(lesson, tmp_path, mode, best):
    state = lesson.RunState()
    given = lesson.Scripted([3.0, 5.0, 1.0, 4.0, 6.0, 2.0])
    keeper = lesson.Checkpoint(tmp_path, state.collect, 2, keep=3, monitor="val_loss", mode=mode)
    fitted(lesson, [given, keeper], batches(3), epochs=6, state=state)
    assert [path.name for path in lesson.step_files(tmp_path)] == [f"step-{n:09d}.ckpt" for n in (18, 16, 15)]
    position = lesson.CheckpointFile(tmp_path / "best.ckpt").read()["position"]
    assert (position["step"], position["epochs_done"], position["batches_done"]) == (3 * (best + 1), best + 1, 0)


def test_the_best_of_the_whole_run_counts_after_a_resume(lesson, tmp_path):
    def run(stop=None):
        state = lesson.RunState(lesson.newest_undamaged(tmp_path))
        given = lesson.Scripted([3.0, 1.0, 4.0, 2.0])
        keeper = lesson.Checkpoint(tmp_path, state.collect, monitor="val_loss")
        with suppress(KeyboardInterrupt):
            fitted(lesson, [given, keeper, lesson.Interrupt(stop)], batches(3), epochs=4, state=state)

    run(8)
    run()
    assert lesson.CheckpointFile(tmp_path / "best.ckpt").read()["position"]["step"] == 6


def used_folder(lesson, folder, stop=None, data=None, resume=True, make=sgd, wrap=lambda data: data, **options):
    """Steps of the checkpoints in a folder after a run that was interrupted."""
    model = net()
    state = lesson.RunState(lesson.newest_undamaged(folder) if resume is True else resume)
    keeper = lesson.Checkpoint(folder, state.collect, every_n_steps=3)
    trainer = lesson.Trainer([keeper, lesson.Interrupt(stop)], state=state, **options)
    with suppress(KeyboardInterrupt):
        trainer.fit(model, make(model), F.cross_entropy, wrap(data or batches(20)))
    return [int(path.stem[5:]) for path in lesson.step_files(folder)]


def test_a_new_run_in_a_used_folder_keeps_its_own_checkpoints_and_all_older_ones(lesson, tmp_path):
    assert used_folder(lesson, tmp_path, resume=None) == [20, 18]
    aside = (tmp_path / "step-000000018.ckpt").read_bytes()
    assert used_folder(lesson, tmp_path, 10, resume=None) == [9, 6]
    assert (tmp_path / "step-000000018-0.aside").read_bytes() == aside
    assert used_folder(lesson, tmp_path, 14) == [12, 9]
    assert used_folder(lesson, tmp_path, resume=None) == [20, 18]
    assert used_folder(lesson, tmp_path, 10, resume=None) == [9, 6]
    assert (tmp_path / "step-000000018-0.aside").read_bytes() == aside
    assert (tmp_path / "step-000000018-1.aside").exists()


def test_a_refused_run_can_be_mended_and_tried_again(lesson, tmp_path):
    used_folder(lesson, tmp_path, 10)
    state, model = lesson.RunState(lesson.newest_undamaged(tmp_path)), net()
    trainer = lesson.Trainer([lesson.Checkpoint(tmp_path, state.collect, 3), lesson.Interrupt(None)], state=state)
    with pytest.raises(ValueError, match="optimizer: saved SGD, here AdamW"):
        trainer.fit(model, torch.optim.AdamW(model.parameters()), F.cross_entropy, batches(20))
    assert [int(path.stem[5:]) for path in lesson.step_files(tmp_path)] == [9, 6]
    heard = trainer.callbacks[1] = type("Interrupt", (lesson.Recorder,), {})()
    trainer.fit(model, sgd(model), F.cross_entropy, batches(20))
    assert heard.calls[2] == ("on_batch_start", 9)


@pytest.mark.parametrize("hook", ["on_batch_start", "on_before_step", "on_after_step"])
def test_a_run_that_is_cancelled_in_mid_step_isnt_saved_there_and_goes_on_with_the_same_bits(lesson, tmp_path, hook):
    def run(folder, cancel):
        model, state, ema = net(), lesson.RunState(lesson.newest_undamaged(folder)), lesson.EMA(0.5)
        first = at(lesson, hook, lambda t: None)
        if cancel:
            first = raising(lesson, hook, lesson.CancelFit(), 5)
        log = lesson.StepLog({"loss": lesson.loss_of})
        callbacks = [first, log, ema, lesson.Checkpoint(folder, state.collect, 3)]
        fitted(lesson, callbacks, batches(8), None, model, 2, state=state)
        return model, log.rows, ema.shadow

    whole, rows, mean = run(tmp_path / "a", False)
    run(tmp_path / "b", True)
    assert [int(path.stem[5:]) for path in lesson.step_files(tmp_path / "b")] == [3]
    again, more, average = run(tmp_path / "b", False)
    assert same(whole, again)
    assert more == rows
    assert all(map(torch.equal, mean, average))


def test_a_run_that_is_cancelled_before_it_was_put_back_keeps_its_checkpoint(lesson, tmp_path):
    def run(folder, stop=None, cancel=False):
        model, state = net(), lesson.RunState(lesson.newest_undamaged(folder))
        first = raising(lesson, "on_epoch_start", lesson.CancelFit()) if cancel else at(lesson, "on_epoch_start", id)
        keeper = lesson.Checkpoint(folder, state.collect, 3)
        with suppress(KeyboardInterrupt):
            fitted(lesson, [first, keeper, lesson.Interrupt(stop)], batches(8), None, model, 2, state=state)
        return model

    whole = run(tmp_path / "a")
    run(tmp_path / "b", 4)
    run(tmp_path / "b", cancel=True)
    assert same(whole, run(tmp_path / "b"))


def test_a_run_that_early_stopping_has_ended_stays_ended_unless_it_gets_more_patience(lesson, tmp_path):
    def run(patience, every=None):
        state = lesson.RunState(lesson.newest_undamaged(tmp_path / str(every)))
        given, stopper = lesson.Scripted([3.0, 4.0, 4.0, 1.0, 1.0, 1.0]), lesson.EarlyStopping(patience=patience)
        keeper = lesson.Checkpoint(tmp_path / str(every), state.collect, every, monitor="val_loss")
        return fitted(lesson, [given, stopper, keeper], batches(4), epochs=6, state=state).step

    for every in (None, 4):  # with 4 the newest checkpoint is that of an epoch's last batch
        assert run(2, every) == 12
        assert run(2, every) == 12
    assert run(9) == 24
    with pytest.raises(ValueError, match="patience must be at least 1"):
        lesson.EarlyStopping(patience=0)


def test_the_first_trainer_can_be_stopped_and_saved(lesson, tmp_path):
    cells = FRAMEWORK.split()
    early = SimpleNamespace(**definitions("15-10", "device", *cells[: cells.index("newest")]))
    given, stopper = early.Scripted([1.0, 2.0, 3.0]), early.EarlyStopping(patience=1)
    keeper = early.Checkpoint(tmp_path, lambda trainer: {"step": trainer.step}, monitor="val_loss")
    fitted(early, [given, stopper, keeper], batches(4), epochs=3)
    assert [int(path.stem[5:]) for path in early.step_files(tmp_path)] == [8, 4]


def test_nan_is_no_best_value_and_the_last_best_value_of_a_stopped_run_counts(lesson, tmp_path):
    def best(folder, losses, *more):
        state = lesson.RunState()
        keeper = lesson.Checkpoint(folder, state.collect, monitor="val_loss")
        fitted(lesson, [lesson.Scripted(losses), *more, keeper], batches(3), epochs=len(losses), state=state)
        return lesson.CheckpointFile(folder / "best.ckpt").read()["position"]["step"] // 3

    assert best(tmp_path / "nan", [2.0, math.nan, 3.0, 2.5]) == 1
    stopper = lesson.EarlyStopping(patience=2, min_delta=1.0)
    assert best(tmp_path / "stopped", [6.0, 5.5, 5.4, 5.0], stopper) == 3


def test_killed_between_two_files_the_best_one_is_written_again(lesson, tmp_path, monkeypatch):
    def run():
        state = lesson.RunState(lesson.newest_undamaged(tmp_path))
        keeper = lesson.Checkpoint(tmp_path, state.collect, monitor="val_loss")
        fitted(lesson, [lesson.Scripted([3.0, 1.0, 2.0]), keeper], batches(3), epochs=3, state=state)

    write, left = lesson.CheckpointFile.write, [3]

    def dies(file, state):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        write(file, state)

    monkeypatch.setattr(lesson.CheckpointFile, "write", dies)
    with pytest.raises(KeyboardInterrupt):  # of the second epoch's two files one is written
        run()
    monkeypatch.undo()
    run()
    assert lesson.CheckpointFile(tmp_path / "best.ckpt").read()["position"]["step"] == 6


def test_without_a_limit_the_gradient_norm_only_looks(lesson):
    model = nn.Linear(2, 1)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e30)  # the norm of these overflows
    norm = lesson.GradientNorm()
    norm.on_before_step(SimpleNamespace(model=model))
    assert all((p.grad == 1e30).all() for p in model.parameters())
    assert norm.norm == math.inf


def test_a_penalty_that_a_callback_adds_to_the_loss_counts_in_each_kind_of_step(lesson):
    penalty = at(lesson, "on_before_backward", lambda t: setattr(t, "loss", t.loss * 0))
    plain = fitted(lesson, [penalty], batches(4)).model
    groups = fitted(lesson, [penalty], lesson.Groups(batches(4), 1), train_step=lesson.GroupStep()).model
    assert same(plain, groups)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), net().parameters(), strict=True))


def test_another_run_is_refused_by_name_and_nothing_is_changed(lesson, tmp_path):
    data = TensorDataset(torch.randn(60, 6), torch.arange(60) % 3)

    def loader(data, size=5, seed=1, **options):
        return DataLoader(data, size, sampler=lesson.ResumableSampler(len(data), seed), **options)

    used_folder(lesson, tmp_path, 10, loader(data))
    before = [path.read_bytes() for path in sorted(tmp_path.glob("step-*"))]
    other = TensorDataset(*[tensor[:50] for tensor in data.tensors])
    cases = {
        "samples": {"data": loader(other)},
        "batch size": {"data": loader(data, 6)},
        "batches": {"data": loader(data, drop_last=True, size=7)},
        "seed": {"data": loader(data, seed=2)},
        "optimizer: saved SGD, here AdamW": {"make": lambda model: torch.optim.AdamW(model.parameters())},
        "precision: saved fp32, here bf16": {"forward": lesson.Forward("cpu", "bf16")},
        "parts in a group": {"wrap": lambda d: lesson.Groups(d, 2), "train_step": lesson.GroupStep()},
        "persistent workers": {"data": loader(data, num_workers=1, persistent_workers=True)},
    }
    for words, options in cases.items():
        with pytest.raises(ValueError, match=words):
            used_folder(lesson, tmp_path, None, **{"data": loader(data), **options})
    assert [path.read_bytes() for path in sorted(tmp_path.glob("step-*"))] == before
    assert used_folder(lesson, tmp_path, None, loader(data)) == [12, 9]


def test_weights_that_are_not_finite_are_not_saved(lesson, tmp_path, capsys):
    data = batches(20)
    data[10][0][0] = math.inf
    assert used_folder(lesson, tmp_path, data=data) == [9, 6]
    assert "step 12 is not saved: 0.weight" in capsys.readouterr().out


def test_a_run_that_fails_is_not_saved_and_one_that_is_cancelled_is(lesson, tmp_path):
    for number, (error, steps) in enumerate(((ValueError("x"), []), (lesson.CancelFit(), [3]))):
        folder, state = tmp_path / str(number), lesson.RunState()
        keeper = lesson.Checkpoint(folder, state.collect)
        with suppress(ValueError):
            fitted(lesson, [raising(lesson, "on_batch_end", error, 3), keeper], batches(), state=state)
        assert [int(path.stem[5:]) for path in lesson.step_files(folder)] == steps


def test_weights_alone_can_be_loaded(lesson, tmp_path):
    state, model = lesson.RunState(), net(3)
    trained = fitted(lesson, [lesson.Checkpoint(tmp_path, state.collect)], batches(), state=state).model
    lesson.load_weights(model, lesson.step_files(tmp_path)[0])
    assert same(model, trained)


def test_sigterm_ends_the_run_with_a_checkpoint_and_the_handler_is_put_back(lesson, tmp_path):
    before, state = signal.getsignal(signal.SIGTERM), lesson.RunState()
    term = at(lesson, "on_after_step", lambda t: t.step == 4 and os.kill(os.getpid(), signal.SIGTERM))
    keeper = lesson.Checkpoint(tmp_path, state.collect, every_n_steps=3)
    trainer = fitted(lesson, [term, lesson.Leave(), keeper], batches(9), state=state)
    assert trainer.step == 4
    assert lesson.newest_undamaged(tmp_path)["position"]["step"] == 4
    assert signal.getsignal(signal.SIGTERM) is before
    assert fitted(lesson, [lesson.Leave(0.0)], batches(9)).step == 1


SCHEDULES = {
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=40),
    "cosine": lambda o: CosineAnnealingLR(o, 20),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
    "numpy": lambda o: LambdaLR(o, lambda step: 1 + np.cos(np.float64(step))),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on(lesson, tmp_path, kind):
    def run(folder, stop=None):
        model, more = net(), ("epoch", "val_loss") if kind == "plateau" else ()
        state = lesson.RunState(lesson.newest_undamaged(folder))
        log = lesson.StepLog({"lr": lesson.rate_of})
        keeper = lesson.Checkpoint(folder, state.collect, 2)
        callbacks = [log, lesson.LRSchedule(SCHEDULES[kind], *more), keeper, lesson.Interrupt(stop)]
        with suppress(KeyboardInterrupt):
            fitted(lesson, callbacks, batches(), batches(2), model, 3, state=state)
        return model, log.rows

    whole, rows = run(tmp_path / "a")
    run(tmp_path / "b", 11)
    again, rest = run(tmp_path / "b")
    assert same(whole, again)
    assert rows == rest  # the rows before the interruption are there, too


@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_end"])
@pytest.mark.parametrize("first", [True, False])
def test_the_average_is_out_of_the_model_whatever_a_validation_raises(lesson, hook, first):
    model, callbacks = net(), [lesson.EMA(0.5), raising(lesson, hook, ValueError("x"))]
    with pytest.raises(ValueError, match="x"):
        fitted(lesson, callbacks[:: -1 if first else 1], batches(), batches(1), model)
    plain = net()
    lesson.plain_fit(plain, sgd(plain), F.cross_entropy, batches())
    assert same(model, plain)


def test_bad_gradients_are_found_by_name_and_step(lesson):
    data = batches(12)
    data[7][0][2, 1] = math.nan
    with pytest.raises(FloatingPointError, match=r"step 8: .*0\.weight.*4\.bias"):
        fitted(lesson, [lesson.GradientHealth(4)], data)
    with pytest.raises(FloatingPointError, match="step 8"):  # also if the run ends before the next look
        fitted(lesson, [lesson.GradientHealth(50)], data)


def test_what_cannot_be_read_is_refused_when_it_is_written(lesson, tmp_path):
    state, odd = lesson.RunState(), lesson.Callback()
    odd.state_dict = lambda: {"array": np.ones(3)}
    with pytest.raises(pickle.UnpicklingError, match="ndarray"):
        fitted(lesson, [odd, lesson.Checkpoint(tmp_path, state.collect)], batches(), state=state)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- interrupted, killed, distributed


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
        state = lesson.RunState(lesson.newest_undamaged(folder))
        keeper = lesson.Checkpoint(folder, state.collect, 3)
        with suppress(KeyboardInterrupt):
            fitted(lesson, [keeper, lesson.Interrupt(stop)], loader, None, model, 2, state=state)
        return model

    wanted = run(tmp_path / "whole")
    for stop in (5, 14):
        run(tmp_path / str(stop), stop)
        assert same(wanted, run(tmp_path / str(stop)))


X = torch.randn(300, 1, 28, 28, generator=torch.Generator().manual_seed(0))
Y = torch.randint(10, (300,), generator=torch.Generator().manual_seed(1))


def everything(lesson, folder, stop=math.inf, loader=None, precision="fp32"):
    """The lesson's job with everything that has a state, interrupted after some step."""

    def more():
        return [lesson.EMA(), lesson.LRSchedule(lambda o: OneCycleLR(o, 3e-3, total_steps=16))]

    options = {"make_loader": loader or shuffled, "more": more, "precision": precision}
    Path(folder).mkdir(exist_ok=True)
    return lesson.job(Path(folder), X, Y, stop, **options)


def timed_everything(*args):
    start = time.perf_counter()
    result = everything(*args)
    return time.perf_counter() - start, result


everything.__module__ = timed_everything.__module__ = "__main__"  # so they travel by value to other processes


def shuffled(data):
    return DataLoader(data, 64, shuffle=True)


def own(data):
    return DataLoader(data, 64, shuffle=True, generator=torch.Generator().manual_seed(3))


def loader_of(lesson, kind):
    sampler = lesson.ResumableSampler  # so that not the whole lesson travels with the loader
    loaders = {"shuffled": shuffled, "own": own}
    loaders["resumable"] = lambda data: DataLoader(data, 64, sampler=sampler(len(data), 7))
    return loaders[kind]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["resumable", "shuffled", "own"])
def test_interrupted_at_each_step_the_run_ends_with_the_same_bits(lesson, tmp_path, kind, precision):
    loader = loader_of(lesson, kind)
    wanted = everything(lesson, tmp_path / "whole", math.inf, loader, precision)
    for stop in range(1, 10):
        everything(lesson, tmp_path / f"{stop}", stop, loader, precision)
        assert wanted == everything(lesson, tmp_path / f"{stop}", math.inf, loader, precision), stop


def test_damaged_checkpoints_are_reported_and_older_ones_used(lesson, tmp_path, capsys):
    wanted = everything(lesson, tmp_path)
    newest, _ = lesson.step_files(tmp_path / "checkpoints")
    newest.write_bytes(newest.read_bytes()[:-1])
    assert wanted == everything(lesson, tmp_path)
    assert capsys.readouterr().out.count("left out: ") == 1
    assert (newest.parent / f"{newest.stem}-0.aside").exists()
    logs = {path: path.read_bytes() for path in (tmp_path / "log").iterdir()}
    for path in lesson.step_files(tmp_path / "checkpoints"):
        changed = bytearray(path.read_bytes())
        changed[len(changed) // 2] ^= 4  # one bit
        path.write_bytes(changed)
    with pytest.raises(lesson.DamagedCheckpoint, match="none of the 2"):
        everything(lesson, tmp_path)
    assert {path: path.read_bytes() for path in logs} == logs  # no log was emptied


def test_a_log_that_was_shortened_is_refused(lesson, tmp_path):
    everything(lesson, tmp_path, 5)
    log = tmp_path / "log" / "steps.csv"
    log.write_text(log.read_text()[:20])
    with pytest.raises(ValueError, match=r"steps\.csv has 20 bytes"):
        everything(lesson, tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize(("kind", "precision"), [("shuffled", "fp32"), ("resumable", "bf16"), ("own", "fp16")])
def test_sixty_six_kills_at_random_moments_of_three_jobs_change_nothing(lesson, tmp_path, kind, precision):
    job = (math.inf, loader_of(lesson, kind), precision)
    names = ("job", "LRSchedule", "EMA")
    part = SimpleNamespace(**{name: getattr(lesson, name) for name in names})
    seconds, wanted = launch(timed_everything, 1, part, str(tmp_path / "whole"), *job, timeout=60)[0]
    dice, moments, runs = random.Random(1510), [], 0
    while len(moments) < 22:
        folder, kills, runs = tmp_path / str(runs), 0, runs + 1  # a folder that is done can't be killed again
        assert runs < 50, f"only {len(moments)} kills"
        while kills < 5 and len(moments) < 22:
            if launch_killed(everything, seconds * dice.uniform(0.1, 0.9), part, str(folder), *job) is not None:
                seconds *= 0.8  # the machine has become quicker than it was at first
                break
            kills += 1
            files = lesson.step_files(folder / "checkpoints")
            moments.append(int(files[0].stem[5:]) if files else 0)
        assert wanted == launch(everything, 1, part, str(folder), *job, timeout=60)[0]
    assert len(set(moments)) > 2, "killed before anything was saved"


def rank_job(lesson, hook, everywhere):
    """Two ranks, of which one raises CancelBatch at a hook; or both."""
    ranks = lesson.Ranks(patience=3)
    model = lesson.DistributedDataParallel(net())
    leaves = lesson.CancelBatch if everywhere or ranks.rank == 1 else Exception
    callback = at(lesson, hook, lambda t: None) if leaves is Exception else raising(lesson, hook, leaves(), 3)
    log = lesson.StepLog({"loss": lesson.loss_of}, 4, lesson.reading_means(ranks))
    share = batches(6)[ranks.rank :: 2] * 3
    trainer = lesson.Trainer([log, callback], ranks=ranks)
    trainer.fit(model, sgd(model), F.cross_entropy, share)
    return trainer.step, [row["loss"] for row in log.rows]


rank_job.__module__ = "__main__"


@pytest.mark.parametrize("hook", ["on_batch_start", "on_before_step", "on_batch_end"])
def test_a_signal_on_one_rank_is_an_error_and_on_all_ranks_a_signal(lesson, hook):
    names = [
        "Ranks",
        "DistributedDataParallel",
        "CancelBatch",
        "StepLog",
        "loss_of",
        "reading_means",
        "Trainer",
        "Callback",
    ]
    part = SimpleNamespace(**{name: getattr(lesson, name) for name in names})
    (one, losses), (two, others) = launch(rank_job, 2, part, hook, True, timeout=60)
    assert one == two == (9 if hook == "on_batch_end" else 8)
    assert losses == others
    with pytest.raises(LaunchError, match="raise it on all ranks"):
        launch(rank_job, 2, part, hook, False, timeout=60)


def leaving(lesson, how, folder):
    """Two ranks, of which the second one is asked to leave in its fourth step; or its time is over."""
    ranks = lesson.Ranks(patience=20)
    model = lesson.DistributedDataParallel(net())
    mine = ranks.rank == 1
    seconds = 0.0 if how == "the time of one is over" and mine else math.inf
    term = at(lesson, "on_after_step", lambda t: t.step == 4 and os.kill(os.getpid(), signal.SIGTERM))
    first = [term] if how == "SIGTERM to one" and mine else [at(lesson, "on_after_step", id)]
    state = lesson.RunState()
    keeper = lesson.Checkpoint(None if mine else folder, state.collect)
    trainer = lesson.Trainer([*first, lesson.Leave(seconds), keeper], ranks=ranks, state=state)
    trainer.fit(model, sgd(model), F.cross_entropy, batches(40)[ranks.rank :: 2] * 3)
    return trainer.step


leaving.__module__ = "__main__"


@pytest.mark.parametrize("how", ["SIGTERM to one", "the time of one is over", "nobody leaves"])
def test_if_one_rank_has_to_leave_all_leave_at_the_same_step_with_a_checkpoint(lesson, tmp_path, how):
    names = ["Ranks", "DistributedDataParallel", "Leave", "RunState", "Checkpoint", "Trainer", "Callback"]
    part = SimpleNamespace(**{name: getattr(lesson, name) for name in names})
    steps = launch(leaving, 2, part, how, tmp_path, timeout=60)
    assert steps == ([60, 60] if how == "nobody leaves" else [10, 10])
    assert lesson.newest_undamaged(tmp_path)["position"]["step"] == steps[0]


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
"""


def rank_run(lesson, folder, size, dies=False):
    """Train on this rank's share, in the process group if there is one."""
    ranks = lesson.Ranks()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    dice = torch.Generator().manual_seed(4)
    x, y = torch.randn(96, 6, generator=dice).double(), torch.randint(3, (96,), generator=dice)
    sampler = lesson.ResumableSampler(96, 2, ranks.rank, ranks.count)
    loader = DataLoader(TensorDataset(x, y), size, sampler=sampler)

    def die(trainer):
        if dies and trainer.step == 8 and ranks.rank == 1:
            (folder / "died").touch()
            kill_here()

    first = ranks.rank == 0
    state = lesson.RunState(lesson.newest_undamaged(folder))
    log = lesson.FileLog(folder / "log" if first else None, {"loss": lesson.loss_of}, 4, lesson.reading_means(ranks))
    keeper = lesson.Checkpoint(folder if first else None, state.collect, 3, monitor="val_loss")
    trainer = lesson.Trainer([log, keeper, at(lesson, "on_batch_end", die)], ranks=ranks, state=state)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    parallel = lesson.DistributedDataParallel(model) if dist.is_initialized() else model
    mine = slice(12 * ranks.rank, 24 if ranks.count == 1 else 12 * ranks.rank + 12)
    trainer.fit(parallel, optimizer, F.cross_entropy, loader, [(x[mine], y[mine])], max_epochs=3)
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
    (tmp_path / "one").mkdir()
    for name, tensor in rank_run(lesson, tmp_path / "one", 16).items():
        assert torch.allclose(tensor, found["whole"][name], rtol=0, atol=1e-13)
        assert torch.equal(found["whole"][name], found["killed"][name])
    logs = [(tmp_path / name / "log" / "steps.jsonl").read_text() for name in ("whole", "killed", "one")]
    assert logs[0] == logs[1]
    for mine, theirs in zip(logs[0].splitlines(), logs[2].splitlines(), strict=True):
        assert json.loads(mine) == pytest.approx(json.loads(theirs), rel=1e-6)
