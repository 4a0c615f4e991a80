"""What 15-10 builds: the trainer, its parts and callbacks, against plain loops, interruptions and brute force.

What the notebook prints as a checked output isn't tested again: the plain loop's bits, the order of the hooks, groups
in each precision by hand, runs that are killed.
"""

import csv
import json
import math
import os
import pickle
import signal
from collections import namedtuple
from contextlib import suppress
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset

from course.lesson_code import definitions
from shared.launcher import launch
from shared.rank_failures import LaunchError

FRAMEWORK = """data evaluate plain-loop callback recorder signals listeners ex-trainer ex-stopping scripted tensor-slots
    read-together columns ex-log gradient-norm file-log ex-file simple-checkpoint checkpoint newest place forward groups
    count-samples metrics f1-metric default-parts bare one-process ranks bare-model measure trainer-with-parts synced
    ex-step read-means sampler generators fingerprint ex-state trace interrupt job-net job-callbacks job load-weights
    schedule ema load-averages leave health"""


@pytest.fixture(scope="module")
def lesson():
    """The framework's cells with the answers."""
    return SimpleNamespace(**definitions("15-10", "device", *FRAMEWORK.split()))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


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


def resumed(lesson, folder):
    """The state of the newest checkpoint in a folder; a new one if there is none."""
    return lesson.RunState(lesson.newest_undamaged(folder))


def saved_steps(lesson, folder):
    return [int(path.stem[5:]) for path in lesson.step_files(folder)]


# ---------------------------------------------------------------- the loop


@pytest.mark.parametrize("hook", ["epoch_start", "before_step", "validation_start", "fit_end"])
def test_after_an_error_nothing_stays_open_and_the_trainer_can_be_used_again(lesson, hook):
    first, closed, model, error = lesson.Recorder(), [], net(), KeyboardInterrupt()
    opens = at(lesson, "on_fit_start", lambda trainer: trainer.exits["fit"].callback(closed.append, "fit"))
    more = at(lesson, "on_epoch_start", lambda trainer: trainer.exits["epoch"].callback(closed.append, "epoch"))
    trainer = lesson.Trainer([first, opens, more, raising(lesson, f"on_{hook}", error)])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(model, sgd(model), F.cross_entropy, batches(2), batches(1), 2)
    assert closed == ["epoch"] * (2 if hook == "fit_end" else 1) + ["fit"]
    assert first.calls[-1][0] == f"on_{hook}"
    model = net()
    trainer.fit(model, sgd(model), F.cross_entropy, batches(), None, 2)
    assert same(model, fitted(lesson, [], batches(), epochs=2).model)
    assert (trainer.step, trainer.epochs_done) == (14, 2)


def test_limits_and_validations_every_few_steps(lesson):
    heard, log = lesson.Recorder(), lesson.StepLog({"loss": lesson.loss_of})
    fit = {"max_steps": 9, "validate_every": 4}
    trainer = fitted(lesson, [heard, log], batches(7), batches(1), epochs=5, fit=fit)
    assert (trainer.step, trainer.epochs_done, trainer.batches_done) == (9, 1, 2)
    assert [step for name, step in heard.calls if name == "on_validation_end"] == [4, 8]
    assert [row["step"] for row in log.rows if "val_loss" in row] == [4, 8]
    assert heard.calls[-1][0] == "on_fit_end"
    assert trainer.model.training
    # at the end of an epoch it is finished
    trainer = fitted(lesson, [], batches(7), batches(1), epochs=5, fit={"max_steps": 14})
    assert (trainer.step, trainer.epochs_done, trainer.batches_done) == (14, 2, 0)


@pytest.mark.parametrize("name", ["NoState", "RunState"])
def test_a_sampler_hears_the_epoch_with_and_without_a_state_to_keep(lesson, name):
    sampler = lesson.ResumableSampler(40)
    heard = []
    callback = at(lesson, "on_epoch_end", lambda trainer: heard.append((sampler.epoch, sampler.start)))
    loader = DataLoader(Draws(), 5, sampler=sampler)
    assert fitted(lesson, [callback], loader, epochs=3, state=getattr(lesson, name)()).step == 24
    assert heard == [(0, 0), (1, 0), (2, 0)]


def test_what_cannot_be_trained_is_refused(lesson):
    for used_up in (lesson.Groups(iter(batches()), 2), iter(batches())):
        with pytest.raises(ValueError, match="used up"):
            fitted(lesson, [], used_up, epochs=2)
    assert fitted(lesson, [], iter(batches())).step == 7
    with pytest.raises(ValueError, match="'16-mixed'"):
        lesson.Forward("cpu", "16-mixed")
    with pytest.raises(ValueError, match="patience must be at least 1"):
        lesson.EarlyStopping(patience=0)


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


def test_a_batch_keeps_its_nesting_on_another_device(lesson):
    pair, x = namedtuple("pair", "x y"), torch.ones(2)
    batch = {"a": [x, (x, "text")], "b": pair(x, None), "c": 3}
    moved = lesson.to_device(batch, torch.device("meta"))
    assert isinstance(moved["b"], pair)
    assert isinstance(moved["a"][1], tuple)
    assert (moved["a"][1][1], moved["b"].y, moved["c"]) == ("text", None, 3)
    assert {t.device.type for t in (moved["a"][0], moved["a"][1][0], moved["b"].x)} == {"meta"}
    assert lesson.count_samples({"name": "x", "parts": [None, (pair(x, 1), 3)]}) == 2


def test_an_overflow_in_fp16_leaves_the_step_out_and_a_cancelled_one_is_no_trouble(lesson):
    data = batches(6)
    data[1][0][0] = 1e6  # infinite in float16
    step = lesson.GroupStep(torch.amp.GradScaler("cpu"))
    cancel = raising(lesson, "on_before_step", lesson.CancelBatch(), 4)
    options = {"forward": lesson.Forward("cpu", "fp16"), "train_step": step}
    trainer = fitted(lesson, [cancel], lesson.Groups(data, 1), **options)
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    assert step.scaler.get_scale() < 2.0**16
    assert trainer.step == 5


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_compiled_model_keeps_its_names_and_its_bits(lesson, wrapped):
    plain, model = net(), net()
    if not wrapped:
        model.compile(backend="eager")
    compiled = torch.compile(model, backend="eager") if wrapped else model
    for one in (plain, compiled):
        torch.manual_seed(0)
        trainer = fitted(lesson, [], batches(), model=one, state=lesson.RunState())
    assert same(model, plain)
    assert list(trainer.state.collect(trainer)["model"]) == list(plain.state_dict())


# ---------------------------------------------------------------- callbacks


def test_nothing_is_read_from_the_device_between_flushes(lesson):
    norm = lesson.GradientNorm()
    watching = [norm, lesson.StepLog({"norm": norm.column}, 100), lesson.EMA(), lesson.GradientHealth(100)]
    counts = []
    for callbacks in ([], watching):
        with lesson.Reads() as reads:
            fitted(lesson, callbacks, batches(30))
        counts.append(reads.count)
    assert counts[1] - counts[0] <= 10  # those of the epoch's end, none a step


def test_a_log_in_files_has_the_rows_of_one_in_memory_whatever_the_numbers(lesson, tmp_path):
    odd = [1.5, math.nan, math.inf, 3]
    columns = {"loss": lesson.loss_of, "x": lambda trainer: odd[trainer.step - 1]}
    kept = lesson.StepLog(columns, 2)
    log = lesson.FileLog(tmp_path, columns, every=3)
    fitted(lesson, [kept, log], batches(4), batches(2))

    def refuse(text):
        raise AssertionError(text)

    rows = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [row.pop("x", None) for row in rows] == [1.5, "nan", "inf", 3, None]
    assert rows == [{name: value for name, value in row.items() if name != "x"} for row in kept.rows]
    with (tmp_path / "steps.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in table] == [row["loss"] for row in rows[:4]]
    clock = (tmp_path / "clock.csv").read_text().splitlines()[1:]
    seconds = [float(line.split(",")[1]) for line in clock]
    assert seconds == sorted(seconds)


def test_after_an_error_the_log_has_all_rows_and_is_closed(lesson, tmp_path):
    log = lesson.FileLog(tmp_path, {"lr": lesson.rate_of}, every=50)
    with pytest.raises(ValueError, match="x"):
        fitted(lesson, [log, raising(lesson, "on_after_step", ValueError("x"), 5)], batches())
    assert (tmp_path / "steps.csv").read_text().splitlines() == ["step,epoch,lr", *[f"{n},0,0.1" for n in range(1, 6)]]
    assert not log.files.files


@pytest.mark.parametrize(
    ("losses", "best", "options"),
    [
        ([3.0, 5.0, 1.0, 4.0, 6.0, 2.0], 5, {"mode": "max"}),
        ([2.0, math.nan, 3.0, 2.5], 1, {}),
        ([6.0, 5.5, 5.4, 5.0], 3, {"stop": 2}),  # the last value of a run that is stopped counts
    ],
)
def test_the_last_and_the_best_are_kept(lesson, tmp_path, losses, best, options):
    state = lesson.RunState()
    stopper = [lesson.EarlyStopping(patience=options["stop"], min_delta=1.0)] if "stop" in options else []
    keeper = lesson.Checkpoint(tmp_path, state.collect, keep=3, monitor="val_loss", mode=options.get("mode", "min"))
    fitted(lesson, [lesson.Scripted(losses), *stopper, keeper], batches(3), epochs=len(losses), state=state)
    assert lesson.CheckpointFile(tmp_path / "best.ckpt").read()["position"]["step"] == 3 * best
    if not stopper:
        assert saved_steps(lesson, tmp_path) == [3 * (len(losses) - n) for n in range(3)]


def test_the_best_of_the_whole_run_counts_although_it_was_killed_between_two_files(lesson, tmp_path, monkeypatch):
    def run(stop=None):
        state = resumed(lesson, tmp_path)
        keeper = lesson.Checkpoint(tmp_path, state.collect, monitor="val_loss")
        callbacks = [lesson.Scripted([3.0, 1.0, 4.0, 2.0]), keeper, lesson.Interrupt(stop)]
        with suppress(KeyboardInterrupt):
            fitted(lesson, callbacks, batches(3), epochs=4, state=state)

    write, left = lesson.CheckpointFile.write, [3]

    def dies(file, state):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        write(file, state)

    with monkeypatch.context() as patched:
        patched.setattr(lesson.CheckpointFile, "write", dies)
        run()  # of the second epoch's two files one is written
    run(8)
    run()
    assert lesson.CheckpointFile(tmp_path / "best.ckpt").read()["position"]["step"] == 6


def test_averages_and_weights_can_be_loaded_from_a_checkpoint(lesson, tmp_path):
    state, other = lesson.RunState(), net(1)
    keeper = lesson.Checkpoint(tmp_path, state.collect, monitor="val_loss")
    run = fitted(lesson, [lesson.EMA(0.5), keeper], batches(6), batches(2), state=state)
    lesson.load_averages(other, tmp_path / "best.ckpt")
    assert run.validate(other, F.cross_entropy, batches(2)) == run.metrics
    assert run.validate(run.model, F.cross_entropy, batches(2)) != run.metrics
    lesson.load_weights(other, tmp_path / "best.ckpt")
    assert same(other, run.model)


@pytest.mark.parametrize("first", [True, False])
def test_the_average_is_out_of_the_model_whatever_a_validation_raises(lesson, first):
    model, callbacks = net(), [lesson.EMA(0.5), raising(lesson, "on_validation_start", ValueError("x"))]
    with pytest.raises(ValueError, match="x"):
        fitted(lesson, callbacks[:: -1 if first else 1], batches(), batches(1), model)
    assert same(model, fitted(lesson, [], batches()).model)


def test_a_penalty_that_a_callback_adds_to_the_loss_counts(lesson):
    penalty = at(lesson, "on_before_backward", lambda t: setattr(t, "loss", t.loss * 0))
    trained = fitted(lesson, [penalty], batches(4)).model
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), net().parameters(), strict=True))


def test_bad_gradients_are_found_by_name_and_step(lesson):
    data = batches(12)
    data[7][0][2, 1] = math.nan
    with pytest.raises(FloatingPointError, match=r"step 8: .*0\.weight.*4\.bias"):
        fitted(lesson, [lesson.GradientHealth(4)], data)
    with pytest.raises(FloatingPointError, match="step 8"):  # also if the run ends before the next look
        fitted(lesson, [lesson.GradientHealth(50)], data)


def test_what_is_not_saved(lesson, tmp_path, capsys):
    """A failed run, weights that aren't finite, what can't be read back; a cancelled run is."""

    def steps(name, *callbacks, data=None, raises=()):
        state = lesson.RunState()
        with suppress(*raises):
            keeper = lesson.Checkpoint(tmp_path / name, state.collect, 3)
            fitted(lesson, [*callbacks, keeper], data or batches(8), state=state)
        return saved_steps(lesson, tmp_path / name)

    assert steps("failed", raising(lesson, "on_batch_end", ValueError(), 5), raises=(ValueError,)) == [3]
    assert steps("cancelled", raising(lesson, "on_batch_end", lesson.CancelFit(), 5)) == [5, 3]
    data = batches(8)
    data[4][0][0] = math.inf
    assert steps("infinite", data=data) == [3]
    assert "step 6 is not saved: 0.weight" in capsys.readouterr().out
    odd = lesson.Callback()
    odd.state_dict = lambda: {"array": np.ones(3)}
    with pytest.raises(pickle.UnpicklingError, match="ndarray"):
        steps("unreadable", odd)
    assert not list((tmp_path / "unreadable").iterdir())


# ---------------------------------------------------------------- runs that go on


class Draws(Dataset):
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


LOADERS = {
    "shuffled": lambda sampler: DataLoader(Draws(), 4, shuffle=True),
    "two workers": lambda sampler: DataLoader(Draws(), 4, sampler=sampler, num_workers=2, timeout=60),
    "shuffled, two workers": lambda sampler: DataLoader(Draws(), 4, shuffle=True, num_workers=2, timeout=60),
    "a batch sampler": lambda sampler: DataLoader(Draws(), batch_sampler=BatchSampler(sampler, 4, False)),
    "a wrapper": lambda sampler: Wrapped(DataLoader(Draws(), 4, sampler=sampler)),
}
SCHEDULES = {
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=40),
    "cosine": lambda o: CosineAnnealingLR(o, 20),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
    "numpy": lambda o: LambdaLR(o, lambda step: 1 + np.cos(np.float64(step))),
}


@pytest.mark.parametrize(
    ("ends", "loader", "schedule"),
    [
        ([("max_steps", 3)], "shuffled", "one cycle"),
        ([("max_steps", 10)], "shuffled", "cosine"),  # at the end of an epoch
        ([("max_steps", 14), ("max_steps", 15)], "shuffled", "plateau"),
        ([("Ctrl-C", 14)], "shuffled", "numpy"),
        ([("Ctrl-C", 5)], "two workers", "cosine"),
        ([("Ctrl-C", 14)], "shuffled, two workers", "cosine"),
        ([("Ctrl-C", 14)], "a batch sampler", "cosine"),
        ([("Ctrl-C", 5)], "a wrapper", "cosine"),
        ([("on_batch_start", 5)], "shuffled", "cosine"),
        ([("on_before_step", 5)], "shuffled", "cosine"),
        ([("on_after_step", 5)], "shuffled", "cosine"),
        ([("Ctrl-C", 4), ("on_epoch_start", 1)], "shuffled", "cosine"),  # before the state was put back
    ],
)
def test_a_run_that_was_ended_goes_on_with_the_same_bits(lesson, tmp_path, ends, loader, schedule):
    def run(folder, how="", number=0):
        model, state, ema = net(), resumed(lesson, folder), lesson.EMA(0.5)
        first = at(lesson, "on_epoch_start", id)
        if how.startswith("on_"):
            first = raising(lesson, how, lesson.CancelFit(), number)
        log = lesson.StepLog({"loss": lesson.loss_of, "lr": lesson.rate_of})
        per = ("epoch", "val_loss") if schedule == "plateau" else ()
        follow = lesson.LRSchedule(SCHEDULES[schedule], *per)
        keeper = lesson.Checkpoint(folder, state.collect, 3)
        last = lesson.Interrupt(number if how == "Ctrl-C" else None)
        data = LOADERS[loader](lesson.ResumableSampler(40, 5))
        fit = {"validate_every": 4, "max_steps": number if how == "max_steps" else math.inf}
        with suppress(KeyboardInterrupt):
            fitted(lesson, [first, log, follow, ema, keeper, last], data, batches(2), model, 2, fit, state=state)
        return model, log.rows, ema.shadow

    whole, rows, mean = run(tmp_path / "whole")
    for end in ends:
        run(tmp_path / "parts", *end)
    if ends[0][0].startswith("on_"):
        assert saved_steps(lesson, tmp_path / "parts") == [3]  # not in the middle of a step
    for _ in range(2):  # the second time nothing is left to do
        again, more, average = run(tmp_path / "parts")
        assert same(whole, again)
        assert more == rows
        assert all(map(torch.equal, mean, average))


def test_a_run_that_early_stopping_has_ended_stays_ended_unless_it_gets_more_patience(lesson, tmp_path):
    def run(patience, every=None):
        folder = tmp_path / str(every)
        state = resumed(lesson, folder)
        given, stopper = lesson.Scripted([3.0, 4.0, 4.0, 1.0, 1.0, 1.0]), lesson.EarlyStopping(patience=patience)
        keeper = lesson.Checkpoint(folder, state.collect, every, monitor="val_loss")
        return fitted(lesson, [given, stopper, keeper], batches(4), epochs=6, state=state).step

    for every in (None, 4):  # with 4 the newest checkpoint is that of an epoch's last batch
        assert run(2, every) == 12
        assert run(2, every) == 12
    assert run(9) == 24


def used_folder(lesson, folder, stop=None, data=None, resume=True, make=sgd, wrap=lambda data: data, **options):
    """Steps of the checkpoints in a folder after a run that was interrupted."""
    model = net()
    state = resumed(lesson, folder) if resume else lesson.RunState()
    keeper = lesson.Checkpoint(folder, state.collect, every_n_steps=3)
    trainer = lesson.Trainer([keeper, lesson.Interrupt(stop)], state=state, **options)
    with suppress(KeyboardInterrupt):
        trainer.fit(model, make(model), F.cross_entropy, wrap(data or batches(20)))
    return saved_steps(lesson, folder)


def test_a_new_run_in_a_used_folder_keeps_its_own_checkpoints_and_all_older_ones(lesson, tmp_path):
    assert used_folder(lesson, tmp_path, resume=False) == [20, 18]
    aside = (tmp_path / "step-000000018.ckpt").read_bytes()
    assert used_folder(lesson, tmp_path, 10, resume=False) == [9, 6]
    assert (tmp_path / "step-000000018-0.aside").read_bytes() == aside
    assert used_folder(lesson, tmp_path, 14) == [12, 9]
    assert used_folder(lesson, tmp_path, resume=False) == [20, 18]
    assert used_folder(lesson, tmp_path, 10, resume=False) == [9, 6]
    assert (tmp_path / "step-000000018-0.aside").read_bytes() == aside
    assert (tmp_path / "step-000000018-1.aside").exists()


def test_another_run_is_refused_by_name_and_can_be_mended(lesson, tmp_path):
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
    # the same trainer, with the right optimizer
    model, state = net(), resumed(lesson, tmp_path)
    keeper = lesson.Checkpoint(tmp_path, state.collect, every_n_steps=3)
    trainer = lesson.Trainer([keeper, type("Interrupt", (lesson.Callback,), {})()], state=state)
    with pytest.raises(ValueError, match="AdamW"):
        trainer.fit(model, torch.optim.AdamW(model.parameters()), F.cross_entropy, loader(data))
    trainer.callbacks[1] = type("Interrupt", (lesson.Recorder,), {})()
    trainer.fit(model, sgd(model), F.cross_entropy, loader(data))
    assert trainer.callbacks[1].calls[2] == ("on_batch_start", 9)
    assert saved_steps(lesson, tmp_path) == [12, 9]


X = torch.randn(300, 1, 28, 28, generator=torch.Generator().manual_seed(0))
Y = torch.randint(10, (300,), generator=torch.Generator().manual_seed(1))


def everything(lesson, folder, stop=math.inf, kind="shuffled", precision="fp32"):
    """The lesson's job with everything that has a state, interrupted after some step."""

    def make_loader(data):
        if kind == "resumable":
            return DataLoader(data, 64, sampler=lesson.ResumableSampler(len(data), 7))
        own = torch.Generator().manual_seed(3) if kind == "own" else None
        return DataLoader(data, 64, shuffle=True, generator=own)

    def more():
        return [lesson.EMA(), lesson.LRSchedule(lambda o: OneCycleLR(o, 3e-3, total_steps=16))]

    folder.mkdir(exist_ok=True)
    return lesson.job(folder, X, Y, stop, make_loader=make_loader, more=more, precision=precision)


@pytest.mark.parametrize(("kind", "precision"), [("resumable", "fp16"), ("shuffled", "fp32"), ("own", "bf16")])
def test_interrupted_at_any_step_the_run_ends_with_the_same_weights_and_logs(lesson, tmp_path, kind, precision):
    wanted = everything(lesson, tmp_path / "whole", math.inf, kind, precision)
    for stop in (1, 3, 5, 8):  # an epoch has three steps
        everything(lesson, tmp_path / f"{stop}", stop, kind, precision)
        assert wanted == everything(lesson, tmp_path / f"{stop}", math.inf, kind, precision), stop


def test_what_is_damaged_is_reported_and_nothing_else_is_harmed(lesson, tmp_path, capsys):
    wanted = everything(lesson, tmp_path)
    newest, _ = lesson.step_files(tmp_path / "checkpoints")
    newest.write_bytes(newest.read_bytes()[:-1])
    assert wanted == everything(lesson, tmp_path)
    assert capsys.readouterr().out.count("left out: ") == 1
    assert (newest.parent / f"{newest.stem}-0.aside").exists()
    log = tmp_path / "log" / "steps.csv"
    rows = log.read_text()
    log.write_text(rows[:20])
    with pytest.raises(ValueError, match=r"steps\.csv has 20 bytes"):
        everything(lesson, tmp_path)
    log.write_text(rows)
    for path in lesson.step_files(tmp_path / "checkpoints"):
        changed = bytearray(path.read_bytes())
        changed[len(changed) // 2] ^= 4  # one bit
        path.write_bytes(changed)
    with pytest.raises(lesson.DamagedCheckpoint, match="none of the 2"):
        everything(lesson, tmp_path)
    assert log.read_text() == rows  # no log was emptied


def test_who_has_to_leave_does_so_and_the_handler_is_put_back(lesson):
    before = signal.getsignal(signal.SIGTERM)
    term = at(lesson, "on_after_step", lambda t: t.step == 4 and signal.raise_signal(signal.SIGTERM))
    assert fitted(lesson, [term, lesson.Leave()], batches(9)).step == 4
    assert signal.getsignal(signal.SIGTERM) is before
    assert fitted(lesson, [lesson.Leave(0.0)], batches(9)).step == 1


# ---------------------------------------------------------------- several processes


def part_of(lesson, *names):
    """Not the whole lesson travels to other processes."""
    return SimpleNamespace(**{name: getattr(lesson, name) for name in ("Ranks", "Trainer", "Callback", *names)})


def signalled(lesson, hook, everywhere):
    """Two ranks, of which one raises CancelBatch at a hook; or both."""
    ranks = lesson.Ranks(patience=3)
    model = lesson.DistributedDataParallel(net())
    callback = at(lesson, hook, id)
    if everywhere or ranks.rank == 1:
        callback = raising(lesson, hook, lesson.CancelBatch(), 3)
    trainer = lesson.Trainer([callback], ranks=ranks)
    trainer.fit(model, sgd(model), F.cross_entropy, batches(6)[ranks.rank :: 2] * 3)
    return trainer.step


@pytest.mark.parametrize(("hook", "steps"), [("on_before_step", 8), ("on_batch_end", 9)])
def test_a_signal_on_one_rank_is_an_error_and_on_all_ranks_a_signal(lesson, hook, steps):
    part = part_of(lesson, "DistributedDataParallel", "CancelBatch")
    assert launch(signalled, 2, part, hook, True, timeout=60) == [steps, steps]
    with pytest.raises(LaunchError, match="raise it on all ranks"):
        launch(signalled, 2, part, hook, False, timeout=60)


def leaving(lesson, how, folder):
    """Two ranks, of which the second one is asked to leave in its fourth step; or its time is over."""
    ranks = lesson.Ranks(patience=20)
    model = lesson.DistributedDataParallel(net())
    mine = ranks.rank == 1
    asked = how == "SIGTERM to one" and mine
    term = at(lesson, "on_after_step", lambda t: asked and t.step == 4 and os.kill(os.getpid(), signal.SIGTERM))
    leave = lesson.Leave(0.0 if how == "the time of one is over" and mine else math.inf)
    state = lesson.RunState()
    keeper = lesson.Checkpoint(None if mine else folder, state.collect)
    trainer = lesson.Trainer([term, leave, keeper], ranks=ranks, state=state)
    trainer.fit(model, sgd(model), F.cross_entropy, batches(24)[ranks.rank :: 2])
    return trainer.step


@pytest.mark.parametrize("how", ["SIGTERM to one", "the time of one is over"])
def test_if_one_rank_has_to_leave_all_leave_at_the_same_step_with_a_checkpoint(lesson, tmp_path, how):
    part = part_of(lesson, "DistributedDataParallel", "Leave", "RunState", "Checkpoint")
    assert launch(leaving, 2, part, how, tmp_path, timeout=60) == [10, 10]
    assert lesson.newest_undamaged(tmp_path)["position"]["step"] == 10


def rank_run(lesson, folder, size):
    """Train on this rank's share, in the process group if there is one; the weights."""
    ranks = lesson.Ranks()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    dice = torch.Generator().manual_seed(4)
    x, y = torch.randn(96, 6, generator=dice).double(), torch.randint(3, (96,), generator=dice)
    sampler = lesson.ResumableSampler(96, 2, ranks.rank, ranks.count)
    loader = DataLoader(TensorDataset(x, y), size, sampler=sampler)
    log_folder = folder / "log" if ranks.rank == 0 else None
    log = lesson.FileLog(log_folder, {"loss": lesson.loss_of}, 4, lesson.reading_means(ranks))
    trainer = lesson.Trainer([log], ranks=ranks)
    parallel = lesson.DistributedDataParallel(model) if dist.is_initialized() else model
    mine = slice(12 * ranks.rank, 24 if ranks.count == 1 else 12 * ranks.rank + 12)
    trainer.fit(parallel, sgd(model), F.cross_entropy, loader, [(x[mine], y[mine])], max_epochs=3)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_two_ranks_train_validate_and_log_as_one(lesson, tmp_path):
    part = part_of(lesson, "ResumableSampler", "FileLog", "loss_of", "reading_means", "DistributedDataParallel")
    alone = rank_run(part, tmp_path / "one", 16)
    for weights in launch(rank_run, 2, part, tmp_path / "two", 8, timeout=60):
        assert torch.allclose(weights, alone, rtol=0, atol=1e-13)
    one, two = ((tmp_path / name / "log" / "steps.jsonl").read_text().splitlines() for name in ("one", "two"))
    for mine, theirs in zip(one, two, strict=True):
        assert json.loads(mine) == pytest.approx(json.loads(theirs), rel=1e-6)


for function in (signalled, leaving, rank_run):
    function.__module__ = "__main__"  # so they travel by value to other processes
