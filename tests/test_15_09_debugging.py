"""What 15-09 builds: watches, gradient checks, the doctor on bugs and on healthy models, the leak monitor.

That the doctor names each bug of the notebook's gallery, and is silent about its healthy twin, is a checked output.
"""

import ast
import gc
import json
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from check_protocol import MODULE
from torch import nn
from torch.autograd import gradcheck

from course.needs import needed_for
from course.skeleton import skeleton

(PATH,) = MODULE.glob("15-09_*.ipynb")
DEFINING = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
# statements beside definitions that later definitions need
NEEDED = "Batch FIXES STAGES TORCH animals device is_animal test train x_test x_train y_test y_train"


def _kept(node):
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = {leaf.id for target in targets if target for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    return isinstance(node, DEFINING) or names & set(NEEDED.split())


@pytest.fixture(scope="module")
def lesson():
    """All definitions of the notebook, without its experiments."""
    namespace = {"__name__": "lesson"}
    for cell in json.loads(PATH.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            nodes = [node for node in ast.parse("".join(cell["source"])).body if _kept(node)]
            exec(compile(ast.Module(nodes, []), cell["id"], "exec"), namespace)
    return SimpleNamespace(**namespace)


# ---------------------------------------------------------------- watches and gradient checks


@pytest.mark.parametrize(("dtype", "bad"), [(torch.float16, math.nan), (torch.bfloat16, -math.inf)])
def test_the_first_bad_layer_is_named_and_large_values_are_no_finding(lesson, dtype, bad):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh()).to(dtype)
    with torch.no_grad():
        model[2].weight[1, 2] = bad
        model[0].bias.fill_(1.0)
    with lesson.first_bad_layer(model) as watch:
        model(torch.zeros(2, 3, dtype=dtype))
    assert watch.first() == ("2", "forward")
    model = nn.Sequential(nn.Identity())
    with lesson.first_bad_layer(model) as watch:
        model(torch.full((1000,), 60000.0, dtype=torch.float16))
        model(torch.full((2, 4), 1e300, dtype=torch.float64))  # beyond the range of float32
    assert watch.first() is None
    model = lesson.inherited().model
    with lesson.first_bad_layer(model) as watch:
        model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert watch.first() == ("enter.3", "backward")
    assert not any(module._forward_hooks for module in model.modules())


def test_verdicts_on_gradients_are_those_of_pytorch(lesson):
    """Beside the tolerance, several inputs, operators, inputs that aren't contiguous."""
    torch.manual_seed(0)
    a, b = lesson.leaf64(torch.randn, 2, 3), lesson.leaf64(torch.randn, 3)
    flipped = torch.randn(3, 2, dtype=torch.float64).T.requires_grad_()
    backwards = (
        lambda ctx, g: g * torch.sigmoid(*ctx.saved_tensors) * 1.0005,
        lambda ctx, g: g * torch.sigmoid(*ctx.saved_tensors) * 1.005,
        lambda ctx, g: g * math.nan,
    )
    cases = [(lesson.with_backward(lesson.Softplus, backward), [a]) for backward in backwards]
    cases += [(function, [a, b]) for function in (torch.mul, lambda a, b: a.softmax(1) * b)]
    cases.append((lambda t: t.cos().cumsum(0), [flipped]))
    verdicts = [lesson.numerical_gradcheck(*case).ok for case in cases]
    assert verdicts == [gradcheck(*case, raise_exception=False) for case in cases]
    assert verdicts == [True, False, False, True, True, True]
    assert all(lesson.projection_gradcheck(*case) < 1e-6 for case in cases[3:])
    with pytest.raises(ValueError, match="float64"):
        lesson.numerical_gradcheck(torch.tanh, [a.detach().float().requires_grad_()])


def test_a_gradient_report_against_a_hand_count(lesson):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Linear(2, 2))
    model[3].requires_grad_(False)
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([-100.0, 0.0, -100.0, 5.0]))
    model[:3](torch.rand(5, 3)).square().sum().backward()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    report = lesson.gradient_report(model, before)
    assert set(report) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    row, p = report["0.weight"], model[0].weight
    assert row.dead_share >= 0.5
    assert row.norm == pytest.approx(p.grad.norm().item())
    assert row.update_ratio == pytest.approx((0.1 * p.grad.norm() / before["0.weight"].norm()).item(), rel=1e-4)
    assert lesson.gradient_report(nn.Linear(1, 1))["bias"].norm is None


def test_anomaly_mode_names_the_readers_own_line(lesson, capsys):
    x = torch.randn(3, requires_grad=True)
    sigmoid = nn.Sigmoid()

    def spoilt():
        h = sigmoid(x)
        h += 1
        h.sum().backward()

    assert lesson.anomaly_line(spoilt, message="inplace") == "h = sigmoid(x)"


# ---------------------------------------------------------------- what the doctor is asked about


class Functional(nn.Module):
    """Dropout as a function."""

    def __init__(self, always=False):
        super().__init__()
        self.a, self.b, self.always = nn.Linear(3072, 32), nn.Linear(32, 10), always

    def forward(self, x):
        return self.b(F.dropout(self.a(x.flatten(1)).relu(), 0.5, self.always or self.training))


def accumulating():
    """A step that updates every second time."""
    calls = []

    def step(model, loss_fn, batch, optimizer):
        loss = loss_fn(model(batch[0]), batch[1])
        (loss / 2).backward()
        calls.append(loss.item())
        if len(calls) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return step


def clearing_a_part(model, loss_fn, batch, optimizer):
    loss = loss_fn(model(batch[0]), batch[1])
    model.head.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def brightness(lesson):
    """Images, and their mean as a target."""
    images = lesson.x_train[:512]
    return images, images.mean(dim=(1, 2, 3)).unsqueeze(1)


def as_dictionary(lesson):
    class Named(lesson.Net):
        def forward(self, x):
            return {"logits": super().forward(x)}

    return lesson.make_patient(Named(), lambda z, y: F.cross_entropy(z["logits"], y))


def changed_batch(lesson, change, model=None):
    """A patient whose copies of images and labels are changed."""
    x, y = (t.clone() for t in lesson.make_patient().batch)
    return lesson.make_patient(model, batch=change(x, y) or (x, y))


def broadcasting(z, y):
    return (F.softplus(z) - z * y).mean()


def hidden_layers(lesson):
    layers = lesson.Layers()
    layers._mine = [nn.Linear(2, 2)]
    return lesson.make_patient(lesson.Net(middle=layers))


def fixed(lesson, *names):
    """The inherited script with these fixes."""
    lesson.FIXES.clear()
    lesson.FIXES.update({name: getattr(lesson, name) for name in names})
    return lesson.script_so_far()


WEIGHTS = torch.linspace(0.2, 3.0, 10)
FIXES = ["use_safe_root", "register_blocks", "use_right_root", "leave_out_softmax", "back_to_training", "keep_no_graph"]
# how a patient is made of the lesson, and what the doctor must say first
HEALTHY = {
    "regression": lambda t: t.make_patient(t.Net(1), F.mse_loss, brightness(t), t.cleared_after),
    "accumulation on purpose": lambda t: t.make_patient(step=accumulating()),
    "weighted loss": lambda t: t.make_patient(loss_fn=lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS.to(z.dtype))),
    "functional dropout": lambda t: t.make_patient(Functional()),
    "a dictionary": as_dictionary,
    "ignored labels": lambda t: changed_batch(t, lambda x, y: y[::7].fill_(-100) is None),
    "pixel by pixel": lambda t: changed_batch(t, lambda x, y: (x, (x[:, 0] > 0).long()), nn.Conv2d(3, 2, 3, padding=1)),
    "mended script": lambda t: fixed(t, *FIXES),
}
SICK = {
    "NaN in the input": ("nan in inputs", lambda t: changed_batch(t, lambda x, y: x[3, 0].fill_(math.nan) is None)),
    "log of 0": ("nan in forward", lambda t: t.make_patient(t.Net(middle=lambda h: (h - h).log()))),
    "reshape": ("images mixed", lambda t: t.make_patient(t.Net(middle=lambda h: h.T.reshape(h.shape).relu()))),
    "does nothing": ("no update", lambda t: t.make_patient(step=lambda *_: 0.0)),
    "a part is cleared": ("gradients pile up", lambda t: t.make_patient(step=clearing_a_part)),
    "private list": ("not registered", hidden_layers),
    "clamped in place": ("batch written to", lambda t: t.make_patient(t.Net(enter=lambda x: x.clamp_(min=-1)))),
    "no logarithm": (
        "log softmax missing",
        lambda t: t.make_patient(nn.Sequential(t.Net(), nn.Softmax(1)), F.nll_loss),
    ),
    "own binary loss": ("loss broadcasts", lambda t: t.make_patient(t.Net(1), broadcasting, t.animals)),
    "a label too many": ("label out of range", lambda t: changed_batch(t, lambda x, y: y.add_(1) is None)),
    **{
        f"script, {count} fixes": (name, lambda t, count=count: fixed(t, *FIXES[:count]))
        for count, name in enumerate(
            [*["not registered"] * 2, *["softmax twice"] * 2, "trained in evaluation mode", "graphs kept"]
        )
    },
}
UNCHECKED = {
    "weights in float32": lambda t: t.make_patient(loss_fn=lambda z, y: F.cross_entropy(z, y, weight=torch.ones(10))),
    "dropout always on": lambda t: t.make_patient(Functional(always=True)),
}


def said(lesson, make):
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        return [suspect.name for suspect in lesson.diagnose(make(lesson))]


@pytest.mark.parametrize("name", HEALTHY)
def test_no_alarm_on_healthy_models(lesson, name):
    assert set(said(lesson, HEALTHY[name])) <= {"not checked"}


@pytest.mark.parametrize("name", SICK)
def test_bugs_are_named_first(lesson, name):
    diagnosis, make = SICK[name]
    assert said(lesson, make)[0] == diagnosis


@pytest.mark.parametrize("name", UNCHECKED)
def test_what_could_not_be_checked_is_said(lesson, name):
    assert set(said(lesson, UNCHECKED[name])) == {"not checked"}


def test_the_evidence_says_where(lesson):
    (suspect,) = lesson.diagnose(lesson.make_patient(step=clearing_a_part))
    assert suspect.evidence.startswith("8 gradients")
    assert "_mine" in lesson.diagnose(hidden_layers(lesson))[0].evidence
    one = lesson.far_too_fast()
    (suspect,) = lesson.diagnose(one)
    assert suspect.name == "nan in loop"
    assert "step" in suspect.evidence
    assert all(p.isfinite().all() for p in one.model.parameters())  # as they were


def test_everything_is_put_back(lesson):
    one = lesson.make_patient()
    one.run(2)
    one.model.features.eval()

    def everything():
        """Weights and buffers, gradients, moments, the batch, modes and hooks."""
        modules, parameters = list(one.model.modules()), list(one.model.parameters())
        moments = [state["exp_avg"] for state in one.optimizer.state.values()]
        tensors = [*one.model.state_dict().values(), *(p.grad for p in parameters), *moments, *one.batch]
        hooks = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules]
        return [tensor.tolist() for tensor in tensors], hooks

    before = everything()
    torch.manual_seed(3)
    lesson.diagnose(one)
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(3))
    assert everything() == before
    writing = lesson.make_patient(lesson.Net(enter=lambda x: x.clamp_(min=-1)))
    images = writing.batch[0].clone()
    lesson.diagnose(writing)
    assert torch.equal(images, writing.batch[0])


def test_an_answer_that_asks_the_doctor_gets_one_with_all_checks(lesson):
    course = skeleton("15-09")
    above = course.before(next(task for task in course.tasks if task.cell == "ex-ward"))
    statements = [one for source in above.values() for one in ast.parse(source).body]
    taken = "\n".join(map(ast.unparse, needed_for({"diagnose"}, statements)))
    for stage, checks in lesson.STAGES.items():
        assert checks
        assert all(f"STAGES['{stage}']['{name}']" in taken for name in checks)


# ---------------------------------------------------------------- leaks


def test_leaks_are_found_and_health_is_silent(lesson):
    x, y = lesson.x_train[:16], lesson.y_train[:16]
    one, leaky, grows = lesson.make_patient(), lesson.OtherLeaks(), {}
    kinds = ("validation_losses", "hook_closures", "errors", "caches", "cycles")
    steps = {kind: getattr(leaky, kind) for kind in kinds}
    steps["none"] = lambda x, y: lesson.plain_step(one.model, one.loss_fn, (x, y), one.optimizer)
    for kind, step in steps.items():
        gc.collect()
        gc.disable()
        try:
            with lesson.LeakMonitor() as monitor:
                for _ in range(6):
                    step(x.clone(), y)
                    monitor.mark()
        finally:
            gc.enable()
        grows[kind] = sum(monitor.growing().values())
    lesson.OtherLeaks.caches.cache_clear()
    assert grows.pop("none") == 0
    assert all(growth > 100 for growth in grows.values()), grows


def test_bytes_are_counted_once_whatever_makes_the_tensor_and_forgotten(lesson):
    old = torch.ones(50)
    with lesson.LeakMonitor() as monitor:
        kept = [torch.zeros(100)]
        kept.append(kept[0].view(10, 10))  # the same memory
        kept += [torch.tensor([1.0] * 100), old.new_tensor([1.0] * 20), old[:5], torch.as_tensor(old)]
        assert monitor.mark() == 880
        kept.clear()
        assert monitor.mark() == 0
