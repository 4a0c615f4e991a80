"""The words that checks are written in: what each of them lets pass, and what not."""

import pytest
import torch
from torch import nn

from shared.checks.exercise import exercise
from shared.checks.words import derived, outcome, raises, script, unchanged


def judged(body):
    """A check that was made of one function of the trial, run."""
    return exercise("15-93.1", "Word", points=1, demands=1)(lambda trial, answer: body(trial)).run(None)


def refuse():
    raise ValueError("layer nowhere")


@pytest.mark.parametrize(
    ("action", "words", "status"),
    [
        (refuse, ("nowhere",), "passed"),
        (refuse, (), "passed"),
        (refuse, ("here I am",), "failed"),
        (int, ("nowhere",), "failed"),
        (lambda: {}["nowhere"], ("nowhere",), "failed"),
    ],
)
def test_raises_wants_the_kind_and_one_of_the_words(action, words, status):
    assert judged(lambda trial: raises(trial, "a case", action, ValueError, *words)).status == status


def test_outcome_is_the_exceptions_name():
    assert outcome(refuse) == "ValueError"
    assert outcome(int) == "no exception"


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.eval(),
        lambda model: model[0].weight.data.add_(1),
        lambda model: model[0].requires_grad_(False),
        lambda model: model.register_forward_hook(print),
        lambda model: setattr(model[1], "seen", 1),
    ],
)
def test_unchanged_sees_modes_values_flags_hooks_and_attributes(change):
    def body(trial, action):
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        with trial.group("stays"), unchanged(trial, "a model", model):
            action(model)

    assert judged(lambda trial: body(trial, change)).status == "failed"
    assert judged(lambda trial: body(trial, lambda model: model(torch.ones(1, 2)))).status == "passed"


def test_script_tells_the_events_before_the_first_difference():
    class Counts:
        total = 0

        def add(self, n):
            self.total += n

    class Forgets(Counts):
        def add(self, n):
            self.total = n

    events = [(f"add({n})", lambda it, n=n: it.add(n)) for n in (1, 2)]

    def body(trial, answer):
        with trial.group("counts"):
            script(trial, answer, Counts(), events, lambda it: {"total": it.total})

    assert judged(lambda trial: body(trial, Counts())).status == "passed"
    failed = judged(lambda trial: body(trial, Forgets()))
    assert "add(1), then add(2)" in str(failed)


def test_derived_gives_the_class_and_ends_the_check_without_it():
    class Base:
        pass

    class Answer(Base):
        pass

    assert judged(lambda trial: trial.equal("found", derived(trial, Answer, "Base") is Base, True)).status == "passed"
    assert judged(lambda trial: derived(trial, int, "Base")).status == "failed"
