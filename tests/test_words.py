"""The words that checks are written in: what each of them lets pass, and what not."""

import pytest
import torch
from torch import nn

from shared.checks.exercise import exercise
from shared.checks.words import Sample, derived, gradients, outcome, raises, samples, script, unchanged


def judged(body):
    """A check that was made of one function of the trial, run."""
    return exercise("15-93.1", "Word", points=1, demands=1)(lambda trial, answer: body(trial)).run(None)


def sampled(answer, reference, *cases, **options):
    """The status of a check that calls both on the cases."""

    def body(trial):
        with trial.group("the same"):
            samples(trial, answer, reference, cases, **options)

    return judged(body).status


def test_a_forgotten_return_is_told_once():
    def body(trial):
        for demand in ("double", "double again"):
            with trial.group(demand):
                samples(trial, lambda x: None, lambda x: 2 * x, [Sample("ones", torch.ones(2))])

    (failure,) = judged(body).failures
    assert (failure.name, failure.hint) == ("double", "the function returned None: is `return` missing?")


def refuse():
    raise ValueError("layer nowhere")


@pytest.mark.parametrize(
    ("action", "words", "status"),
    [
        (refuse, ("nowhere",), "passed"),
        (refuse, ("elsewhere", "nowhere"), "passed"),
        (refuse, (), "passed"),
        (refuse, ("here I am",), "failed"),
        (int, ("nowhere",), "failed"),
        (lambda: {}["nowhere"], ("nowhere",), "failed"),
    ],
)
def test_raises_wants_the_kind_and_one_of_the_words(action, words, status):
    assert judged(lambda trial: raises(trial, "a case", action, ValueError, *words)).status == status
    assert [outcome(refuse), outcome(int)] == ["ValueError", "no exception"]


@pytest.mark.parametrize(
    ("action", "status"),
    [
        (lambda model: model(torch.ones(1, 2)), "passed"),
        (lambda model: model.eval(), "failed"),
        (lambda model: model[0].weight.data.add_(1), "failed"),
        (lambda model: model[0].requires_grad_(False), "failed"),
        (lambda model: model(torch.ones(1, 2)).sum().backward(), "failed"),
        (lambda model: model.register_forward_hook(print), "failed"),
        (lambda model: setattr(model[1], "seen", 1), "failed"),
    ],
)
def test_unchanged_sees_modes_values_flags_gradients_hooks_and_attributes(action, status):
    def body(trial):
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        with trial.group("stays"), unchanged(trial, "a model", model):
            action(model)

    assert judged(body).status == status


def test_script_tells_the_events_before_the_first_difference():
    class Counts:
        total = 0

        def add(self, n):
            self.total += n

    class Forgets(Counts):
        def add(self, n):
            self.total = n

    class Refuses(Counts):
        def add(self, n):
            raise TypeError

    def body(trial, answer):
        with trial.group("counts"):
            events = [(f"add({n})", lambda it, n=n: it.add(n)) for n in (1, 2)]
            script(trial, answer, Counts(), events, lambda it: {"total": it.total})

    assert judged(lambda trial: body(trial, Counts())).status == "passed"
    assert "add(1), then add(2)" in str(judged(lambda trial: body(trial, Forgets())))
    assert "TypeError" in str(judged(lambda trial: body(trial, Refuses())))


def test_derived_gives_the_class_and_ends_the_check_without_it():
    answer = type("Answer", (nn.Linear,), {})
    found = judged(lambda trial: trial.equal("found", derived(trial, answer, "Linear") is nn.Linear, True))
    assert found.status == "passed"
    assert judged(lambda trial: derived(trial, int, "Linear")).status == "failed"


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (lambda x: x.sum() / x.numel(), "passed"),
        (lambda x: x.mean() + 1e-3, "failed"),
        (lambda x: x.double().mean(), "failed"),
        (lambda x: x.mean(0, keepdim=True), "failed"),
        (lambda x: x.mean() + x.zero_().sum(), "failed"),
        (lambda x: x.mean().item(), "failed"),
        (lambda x: None, "failed"),
        (lambda x: refuse(), "failed"),
    ],
)
def test_samples_compares_value_dtype_shape_and_what_was_given(answer, status):
    assert sampled(answer, torch.mean, *(Sample(f"{n} numbers", torch.randn(n)) for n in (1, 7))) == status


def test_samples_gives_copies_and_options_and_allows_the_room_that_it_is_told():
    given = torch.ones(3)
    assert sampled(torch.Tensor.zero_, torch.zeros_like, Sample("ones", given), look=lambda y, x: y) == "passed"
    assert given.tolist() == [1.0, 1.0, 1.0]

    def nearly(x, dim):
        return x.sum(dim) * (1 + 1e-3)

    rows = Sample("of rows", torch.ones(2, 3), dim=1)
    assert sampled(nearly, torch.sum, rows, rtol=1e-2) == "passed"
    assert sampled(nearly, torch.sum, rows, rtol=1e-4) == "failed"


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (torch.sin, "passed"),
        (lambda x: x + (torch.sin(x) - x).detach(), "failed"),
        (lambda x: torch.sin(x.detach()), "failed"),
    ],
)
def test_gradients_of_equal_values_are_compared_and_zero_for_what_was_not_used(answer, status):
    x, unused = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert sampled(answer, torch.sin, Sample("5 numbers", x), look=gradients) == status
    assert gradients(torch.sin(x), x, unused)[1].tolist() == [0.0] * 5
