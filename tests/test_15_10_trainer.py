"""What 15-10 builds: the trainer, its parts and callbacks, against plain loops, interruptions and brute force.

What the notebook prints as a checked output isn't tested again: the plain loop's bits, the order of the hooks, errors
and signals in each of them, limits, groups in each precision, checkpoints, schedules, runs that are killed.
"""

import json
import math
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
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset

from course.lesson_code import definitions
from shared.launcher import launch
from shared.rank_failures import LaunchError

FRAMEWORK = """data evaluate plain-loop callback recorder signals listeners ex-trainer ex-stopping scripted tensor-slots
    read-together columns ex-log gradient-norm file-log ex-file simple-checkpoint checkpoint newest place forward groups
    count-samples metrics f1-metric default-parts bare one-process ranks bare-model measure trainer-with-parts synced
    ex-step read-means sampler generators fingerprint ex-state trace interrupt load-weights schedule ema load-averages
    leave health"""


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


def fitted(lesson, callbacks, data, val=None, model=None, epochs=1, fit=None, make=sgd, **options):
    """A trainer after its fit."""
    model = model or net()
    trainer = lesson.Trainer(callbacks, **options)
    trainer.fit(model, make(model), F.cross_entropy, data, val, epochs, **(fit or {}))
    return trainer


def resumed(lesson, folder):
    """The state of the newest checkpoint in a folder; a new one if there is none."""
    return lesson.RunState(lesson.newest_undamaged(folder))


def saved_steps(lesson, folder):
    return [int(path.stem[5:]) for path in lesson.step_files(folder)]


# ---------------------------------------------------------------- the loop and its parts


def test_what_cannot_be_trained_is_refused(lesson):
    for used_up in (lesson.Groups(iter(batches()), 2), iter(batches())):
        with pytest.raises(ValueError, match="used up"):
            fitted(lesson, [], used_up, epochs=2)
    assert fitted(lesson, [], iter(batches())).step == 7
    with pytest.raises(ValueError, match="'16-mixed'"):
        lesson.Forward("cpu", "16-mixed")


def test_a_sampler_hears_the_epoch_without_a_state_to_keep(lesson):
    sampler, heard = lesson.ResumableSampler(40), []
    callback = at(lesson, "on_epoch_end", lambda trainer: heard.append((sampler.epoch, sampler.start)))
    fitted(lesson, [callback], DataLoader(Draws(), 5, sampler=sampler), epochs=3)
    assert heard == [(0, 0), (1, 0), (2, 0)]


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


def test_a_compiled_model_keeps_its_names_and_its_bits(lesson):
    plain, compiled = net(), torch.compile(net(), backend="eager")
    for one in (plain, compiled):
        torch.manual_seed(0)
        trainer = fitted(lesson, [], batches(), model=one, state=lesson.RunState())
    assert same(compiled, plain)
    assert list(trainer.state.collect(trainer)["model"]) == list(plain.state_dict())


# ---------------------------------------------------------------- callbacks


def test_a_log_in_files_has_the_rows_of_one_in_memory_whatever_the_numbers_and_after_an_error(lesson, tmp_path):
    odd = [1.5, math.nan, math.inf, 3]
    columns = {"loss": lesson.loss_of, "x": lambda trainer: odd[trainer.step - 1]}
    kept = lesson.StepLog(columns, 2)
    log = lesson.FileLog(tmp_path, columns, every=3)
    with pytest.raises(KeyError):
        fitted(lesson, [kept, log, raising(lesson, "on_validation_end", KeyError())], batches(4), batches(2))
    assert not log.files.files, "they are closed"

    def refuse(text):
        raise AssertionError(text)

    rows = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [row.pop("x", None) for row in rows] == [1.5, "nan", "inf", 3, None]
    assert rows == [{name: value for name, value in row.items() if name != "x"} for row in kept.rows]
    head, *lines = (tmp_path / "steps.csv").read_text().splitlines()
    assert head == "step,epoch,loss,x"
    assert [float(line.split(",")[2]) for line in lines] == [row["loss"] for row in rows[:4]]


@pytest.mark.parametrize(
    ("losses", "best", "mode", "patience"),
    [
        ([3.0, 5.0, 1.0, 6.0, 2.0], 4, "max", 9),
        ([2.0, math.nan, 3.0, 2.5], 1, "min", None),
        ([6.0, 5.5, 5.4, 5.0], 3, "min", 2),  # the last value of a run that is stopped counts
    ],
)
def test_the_best_is_kept(lesson, tmp_path, losses, best, mode, patience):
    state = lesson.RunState()
    stopper = [lesson.EarlyStopping(mode=mode, patience=patience, min_delta=1.0)] if patience else []
    keeper = lesson.Checkpoint(tmp_path, state.collect, 3, monitor="val_loss", mode=mode)
    fitted(lesson, [lesson.Scripted(losses), *stopper, keeper], batches(3), epochs=len(losses), state=state)
    assert lesson.CheckpointFile(tmp_path / "best.ckpt").read()["position"]["step"] == 3 * best


def test_the_best_is_written_first_so_that_a_run_killed_in_between_writes_both_again(lesson, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(lesson.CheckpointFile, "write", lambda file, state: written.append(file.path.name))
    lesson.Checkpoint(tmp_path, dict).write({}, 5, better=True)
    assert written == ["best.ckpt", "step-000000005.ckpt"]


def test_averages_and_weights_can_be_loaded_from_a_checkpoint(lesson, tmp_path):
    state, other = lesson.RunState(), net(1)
    keeper = lesson.Checkpoint(tmp_path, state.collect, monitor="val_loss")
    run = fitted(lesson, [lesson.EMA(0.5), keeper], batches(6), batches(2), state=state)
    lesson.load_averages(other, tmp_path / "best.ckpt")
    assert run.validate(other, F.cross_entropy, batches(2)) == run.metrics
    assert run.validate(run.model, F.cross_entropy, batches(2)) != run.metrics
    lesson.load_weights(other, tmp_path / "best.ckpt")
    assert same(other, run.model)


def test_the_average_is_out_of_the_model_if_a_validation_raises(lesson):
    model, callbacks = net(), [lesson.EMA(0.5), raising(lesson, "on_validation_start", ValueError("x"))]
    with pytest.raises(ValueError, match="x"):
        fitted(lesson, callbacks, batches(), batches(1), model)
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


def test_who_has_no_time_left_leaves_all_ranks_do_at_the_same_step_and_the_handler_is_put_back(lesson):
    class OfTwo(lesson.OneProcess):
        count = 2

        def gather(self, mine):
            return [mine, True]  # the other one wants to leave

    before = signal.getsignal(signal.SIGTERM)
    assert fitted(lesson, [lesson.Leave(0.0)], batches(9)).step == 1
    assert fitted(lesson, [lesson.Leave()], batches(24), ranks=OfTwo()).step == 10
    assert signal.getsignal(signal.SIGTERM) is before


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
    "a batch sampler": lambda sampler: DataLoader(Draws(), batch_sampler=BatchSampler(sampler, 4, False)),
    "a wrapper": lambda sampler: Wrapped(DataLoader(Draws(), 4, sampler=sampler)),
}
SCHEDULES = {
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
    "numpy": lambda o: LambdaLR(o, lambda step: 1 + np.cos(np.float64(step))),
}


@pytest.mark.parametrize(
    ("ends", "loader", "schedule"),
    [
        ([("max_steps", 10)], "shuffled", "numpy"),  # at the end of an epoch
        ([("max_steps", 14), ("max_steps", 15)], "shuffled", "plateau"),
        ([("Ctrl-C", 5)], "two workers", "numpy"),
        ([("Ctrl-C", 14)], "a batch sampler", "numpy"),
        ([("Ctrl-C", 5)], "a wrapper", "numpy"),
        ([("on_before_step", 5)], "shuffled", "numpy"),
        ([("Ctrl-C", 4), ("on_epoch_start", 1)], "shuffled", "numpy"),  # before the state was put back
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
    def run(patience):
        state = resumed(lesson, tmp_path)
        given, stopper = lesson.Scripted([3.0, 4.0, 4.0, 1.0, 1.0, 1.0]), lesson.EarlyStopping(patience=patience)
        keeper = lesson.Checkpoint(tmp_path, state.collect, 4, monitor="val_loss")
        return fitted(lesson, [given, stopper, keeper], batches(4), epochs=6, state=state).step

    assert [run(2), run(2), run(9)] == [12, 12, 24]


def used_folder(lesson, folder, stop=None, data=None, resume=True, make=sgd, **options):
    """Steps of the checkpoints in a folder after a run that was interrupted."""
    state = resumed(lesson, folder) if resume else lesson.RunState()
    log = lesson.FileLog(folder / "log", {"loss": lesson.loss_of})
    keeper = lesson.Checkpoint(folder, state.collect, every_n_steps=3)
    callbacks = [log, keeper, lesson.Interrupt(stop)]
    with suppress(KeyboardInterrupt):
        fitted(lesson, callbacks, data or batches(20), state=state, make=make, **options)
    return saved_steps(lesson, folder)


def test_a_new_run_in_a_used_folder_keeps_its_own_checkpoints_and_all_older_ones(lesson, tmp_path):
    assert used_folder(lesson, tmp_path, resume=False) == [20, 18]
    aside = (tmp_path / "step-000000018.ckpt").read_bytes()
    assert used_folder(lesson, tmp_path, 10, resume=False) == [9, 6]
    assert used_folder(lesson, tmp_path) == [20, 18]
    assert used_folder(lesson, tmp_path, 10, resume=False) == [9, 6]
    assert (tmp_path / "step-000000018-0.aside").read_bytes() == aside
    assert (tmp_path / "step-000000018-1.aside").exists()


def test_a_run_with_other_parts_or_a_log_that_was_cut_is_refused_and_harms_nothing(lesson, tmp_path):
    data = TensorDataset(torch.randn(60, 6), torch.arange(60) % 3)

    def loader(size=5, seed=1, **options):
        return DataLoader(data, size, sampler=lesson.ResumableSampler(60, seed), **options)

    used_folder(lesson, tmp_path, 10, loader())
    log = tmp_path / "log" / "steps.csv"
    rows = log.read_text()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    cases = {
        "batch size": {"data": loader(6)},
        "seed": {"data": loader(seed=2)},
        "optimizer: saved SGD, here AdamW": {"make": lambda model: torch.optim.AdamW(model.parameters())},
        "precision: saved fp32, here bf16": {"forward": lesson.Forward("cpu", "bf16")},
        "parts in a group": {"data": lesson.Groups(loader(), 2), "train_step": lesson.GroupStep()},
        "persistent workers": {"data": loader(num_workers=1, persistent_workers=True)},
    }
    for words, options in cases.items():
        with pytest.raises(ValueError, match=words):
            used_folder(lesson, tmp_path, None, **{"data": loader(), **options})
    log.write_text(rows[:20])
    with pytest.raises(ValueError, match=r"steps\.csv has 20 bytes"):
        used_folder(lesson, tmp_path, None, loader())
    log.write_text(rows)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before
    assert used_folder(lesson, tmp_path, None, loader()) == [12, 9]
    assert len(log.read_text().splitlines()) == 13


# ---------------------------------------------------------------- several processes


def part_of(lesson, *names):
    """Not the whole lesson travels to other processes."""
    return SimpleNamespace(**{name: getattr(lesson, name) for name in ("Ranks", "Trainer", "Callback", *names)})


def signalled(lesson, everywhere):
    """Two ranks, of which one raises CancelBatch in its third batch; or both."""
    ranks = lesson.Ranks(patience=3)
    model = lesson.DistributedDataParallel(net())
    callback = at(lesson, "on_before_step", id)
    if everywhere or ranks.rank == 1:
        callback = raising(lesson, "on_before_step", lesson.CancelBatch(), 3)
    trainer = lesson.Trainer([callback], ranks=ranks)
    trainer.fit(model, sgd(model), F.cross_entropy, batches(6)[ranks.rank :: 2] * 3)
    return trainer.step


def test_a_signal_on_one_rank_is_an_error_and_on_all_ranks_a_signal(lesson):
    part = part_of(lesson, "DistributedDataParallel", "CancelBatch")
    assert launch(signalled, 2, part, True, timeout=60) == [8, 8]
    with pytest.raises(LaunchError, match="raise it on all ranks"):
        launch(signalled, 2, part, False, timeout=60)


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


for function in (signalled, rank_run):
    function.__module__ = "__main__"  # so they travel by value to other processes
