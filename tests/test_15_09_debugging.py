"""What 15-09 builds: watches, gradient checks, the doctor on all bugs and on healthy models, the leak monitor."""

import ast
import gc
import json
import math
import re
import threading
import warnings
from functools import partial
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
NEEDED = """
    Batch CUTS FIXES GALLERY HEALTHY PROGRESS STAGES TORCH WRONG animals as_bytes bad_labels cleared_after cleared_early
    device images is_animal labels never_cleared scaled_bytes test train x_test x_train y_test y_train
"""


def _kept(node):
    if isinstance(node, ast.For | ast.Expr):
        return re.search(r"\bcollect\(", ast.unparse(node))
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = {leaf.id for target in targets if target for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    return isinstance(node, DEFINING) or names & set(NEEDED.split())


def script_with(lesson, fixes):
    """The inherited script with these fixes."""
    lesson.FIXES.clear()
    lesson.FIXES.update(enumerate(fixes))
    return lesson.script_so_far()


def suspects(lesson, p):
    """What the doctor suspects, without what it could not check."""
    return [suspect for suspect in lesson.diagnose(p) if suspect.name != "not checked"]


@pytest.fixture(scope="module")
def lesson():
    """All definitions of the notebook, without its experiments."""
    namespace = {"__name__": "lesson"}
    for cell in json.loads(PATH.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            nodes = [node for node in ast.parse("".join(cell["source"])).body if _kept(node)]
            exec(compile(ast.Module(nodes, []), cell["id"], "exec"), namespace)
            namespace["report"] = lambda label, p: None  # the gallery's cases print what the doctor says of them
    torch.manual_seed(0)
    return SimpleNamespace(**namespace)


class TestFirstBadLayer:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_the_first_layer_in_forward_is_named(self, lesson, dtype, bad):
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh()).to(dtype)
        with torch.no_grad():
            model[2].weight[1, 2] = bad
            model[0].bias.fill_(1.0)
        with lesson.first_bad_layer(model) as watch:
            model(torch.zeros(2, 3, dtype=dtype))
        assert watch.first() == ("2", "forward")

    def test_large_finite_values_are_no_finding(self, lesson):
        model = nn.Sequential(nn.Identity())
        with lesson.first_bad_layer(model) as watch:
            model(torch.full((1000,), 60000.0, dtype=torch.float16))
        assert watch.first() is None

    def test_float64_beyond_the_range_of_float32_is_no_finding(self, lesson):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4).double())
        with lesson.first_bad_layer(model) as watch:
            model[0](torch.ones(2, 3))
            model[1](torch.full((2, 4), 1e300, dtype=torch.float64))
        assert watch.first() is None
        assert max(event.largest.item() for event in watch.events) > 1e299

    def test_backward_and_hooks_that_are_removed(self, lesson):
        model = lesson.inherited().model
        before = [len(m._forward_hooks) for m in model.modules()]
        watching = lesson.first_bad_layer(model)
        with watching as watch:
            model(torch.randn(2, 3, 32, 32)).sum().backward()
        assert watch.first() == ("enter.3", "backward")
        assert [len(m._forward_hooks) for m in model.modules()] == before

    def test_nested_outputs_and_no_tensor(self, lesson):
        class Nest(nn.Module):
            def forward(self, x):
                return {"a": (x, [x / 0]), "b": "text"}

        model = Nest()
        with lesson.first_bad_layer(model) as watch:
            model(torch.ones(2))
        assert watch.first() == ("", "forward")
        assert lesson.LayerWatch().first() is None


class TestGradcheck:
    def test_verdicts_are_those_of_pytorch(self, lesson):
        """Right and wrong Functions, several inputs, several seeds."""
        backwards = {
            "right": lesson.Softplus.backward,
            **{backward.__name__: backward for backward in lesson.WRONG},
            "small error": lambda ctx, g: g * torch.sigmoid(*ctx.saved_tensors) * 1.0005,
            "larger error": lambda ctx, g: g * torch.sigmoid(*ctx.saved_tensors) * 1.005,
            "nothing": lambda ctx, g: None,
            "NaN": lambda ctx, g: g * math.nan,
        }
        verdicts = set()
        for seed in range(4):
            torch.manual_seed(seed)
            x = (2 * torch.randn(3, 2, dtype=torch.float64)).requires_grad_()
            for name, backward in backwards.items():
                function = lesson.with_backward(lesson.Softplus, backward)
                ours = lesson.numerical_gradcheck(function, [x]).ok
                assert ours == gradcheck(function, [x], raise_exception=False), (name, seed)
                verdicts.add(ours)
        assert verdicts == {True, False}

    def test_several_inputs_and_operators(self, lesson):
        torch.manual_seed(0)
        a, b = lesson.leaf64(torch.randn, 2, 3), lesson.leaf64(torch.randn, 3)
        for function in (torch.mul, torch.sub, lambda a, b: (a @ b).exp(), lambda a, b: a.softmax(1) * b):
            found = lesson.numerical_gradcheck(function, [a, b])
            assert found.ok
            assert found.analytical.shape == found.numerical.shape == (9, function(a, b).numel())
            assert gradcheck(function, [a, b])
            assert lesson.projection_gradcheck(function, [a, b]) < 1e-6

    def test_the_place_is_named(self, lesson):
        def spoil(ctx, grad):
            right = grad * torch.sigmoid(*ctx.saved_tensors)
            right[2] += grad[2]
            return right

        found = lesson.numerical_gradcheck(
            lesson.with_backward(lesson.Softplus, spoil), [lesson.leaf64(torch.randn, 4)]
        )
        assert not found.ok
        assert (~found.close).nonzero().tolist() == [[2, 2]]

    def test_kinks_are_counted_and_float32_is_refused(self, lesson):
        x = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
        assert lesson.numerical_gradcheck(torch.relu, [x]).kinks == 1
        assert lesson.numerical_gradcheck(torch.tanh, [x]).kinks == 0
        with pytest.raises(ValueError, match="float64"):
            lesson.numerical_gradcheck(torch.tanh, [x.detach().float().requires_grad_()])

    def test_inputs_that_are_not_contiguous(self, lesson):
        x = torch.randn(3, 2, dtype=torch.float64).T.requires_grad_()
        assert lesson.numerical_gradcheck(lambda t: t.cos().cumsum(0), [x]).ok


class TestGradientReport:
    def test_against_a_hand_count(self, lesson):
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Linear(2, 2))
        model[3].requires_grad_(False)
        with torch.no_grad():
            model[0].bias.copy_(torch.tensor([-100.0, 0.0, -100.0, 5.0]))
        x = torch.rand(5, 3)
        model[:3](x).square().sum().backward()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        report = lesson.gradient_report(model, before)
        assert set(report) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        row, p = report["0.weight"], model[0].weight
        assert row.dead_share >= 0.5
        assert row.norm == pytest.approx(p.grad.norm().item())
        assert row.update_ratio == pytest.approx((0.1 * p.grad.norm() / before["0.weight"].norm()).item(), rel=1e-4)
        assert lesson.gradient_report(nn.Linear(1, 1))["bias"].norm is None


class Patches(nn.Module):
    """A small transformer on patches of 8 × 8."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 32, 8, stride=8)
        self.mix = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.mix(self.embed(x).flatten(2).transpose(1, 2)).mean(dim=1))


class Autoencoder(nn.Module):
    """A variational one, which draws random numbers in evaluation, too."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(3072, 2 * 16)
        self.decode = nn.Linear(16, 3072)

    def forward(self, x):
        mean, log_variance = self.encode(x.flatten(1)).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decode(z), mean, log_variance


def elbo(outputs, x):
    reconstruction, mean, log_variance = outputs
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return (reconstruction - x.flatten(1)).square().mean() + 0.01 * kl


def clipped(model, loss_fn, batch, optimizer):
    loss = loss_fn(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def brightness(lesson):
    """Images, and their mean as a target."""
    images = lesson.x_train[:512]
    return images, images.mean(dim=(1, 2, 3)).unsqueeze(1)


def more_healthy(lesson):
    images = lesson.x_train[:512]
    smooth = partial(F.cross_entropy, label_smoothing=0.1)
    return {
        "regularized": lambda: lesson.make_patient(
            nn.Sequential(lesson.Net(64), nn.Dropout(), nn.Linear(64, 10)), smooth
        ),
        "transformer": lambda: lesson.make_patient(Patches(), step=clipped),
        "regression": lambda: lesson.make_patient(lesson.Net(1), F.mse_loss, brightness(lesson), lesson.cleared_after),
        "autoencoder": lambda: lesson.make_patient(Autoencoder(), elbo, (images, images)),
    }


class TestDiagnose:
    def test_all_bugs_of_the_gallery_are_named_first_and_their_mends_are_healthy(self, lesson):
        right, alarms = [], []
        for name, (expected, broken, mended) in lesson.GALLERY.items():
            torch.manual_seed(1)
            with warnings.catch_warnings(action="ignore"):
                found = suspects(lesson, broken())
                alarms += [(name, suspect) for suspect in suspects(lesson, mended())]
            right += [name] * bool(found and found[0].name == expected)
        assert len(lesson.GALLERY) == 21
        assert len(right) == len(lesson.GALLERY), set(lesson.GALLERY) - set(right)
        assert not alarms

    def test_no_alarm_on_healthy_models(self, lesson):
        unusual = {**lesson.HEALTHY, **more_healthy(lesson)}
        assert len(unusual) >= 7
        for seed in range(2):
            for name, make in unusual.items():
                torch.manual_seed(seed)
                assert suspects(lesson, make()) == [], name

    def test_the_gradient_of_the_plainest_net_is_right_for_many_starts(self, lesson):
        for seed in range(25):
            torch.manual_seed(seed)
            found = lesson.examine(lesson.make_patient(), {"wrong gradient": lesson.wrong_gradient})
            assert {suspect.name for suspect in found} <= {"not checked"}, seed

    def test_accumulation_on_purpose_is_no_pile(self, lesson):
        calls = []

        def step(model, loss_fn, batch, optimizer):
            loss = loss_fn(model(batch[0]), batch[1])
            (loss / 2).backward()
            calls.append(loss.item())
            if len(calls) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            return loss.item()

        assert suspects(lesson, lesson.make_patient(step=step)) == []

    def test_no_alarm_on_other_healthy_models(self, lesson):
        x, y = lesson.x_train[600:1100].clone(), lesson.y_train[600:1100].clone()
        weights = torch.linspace(0.2, 3.0, 10)
        for model, loss_fn in (
            (nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)), F.cross_entropy),
            (lesson.Net(), lambda z, y: F.cross_entropy(z, y, weight=weights.to(z.dtype))),
            (nn.Sequential(lesson.Net(), nn.Softmax(1)), lambda z, y: F.nll_loss((z + 1e-9).log(), y)),
            (lesson.Net(), lambda z, y: F.cross_entropy(z, y, reduction="sum")),
        ):
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            assert suspects(lesson, lesson.Patient(model, loss_fn, (x, y), optimizer, lesson.plain_step)) == []
        small = (x[:20], y[:20])
        model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
        assert suspects(lesson, lesson.make_patient(model, batch=small)) == []

    def test_everything_is_put_back(self, lesson):
        one = lesson.make_patient()
        one.run(2)
        one.model.features.eval()
        state = {n: t.clone() for n, t in one.model.state_dict().items()}
        grads = {n: p.grad.clone() for n, p in one.model.named_parameters()}
        modes = [m.training for m in one.model.modules()]
        moments = [v["exp_avg"].clone() for v in one.optimizer.state.values()]
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in one.model.modules()]
        batch = tuple(t.clone() for t in one.batch)
        torch.manual_seed(3)
        suspects(lesson, one)
        after = torch.rand(3)
        torch.manual_seed(3)
        assert torch.equal(after, torch.rand(3))
        assert all(torch.equal(state[n], t) for n, t in one.model.state_dict().items())
        assert all(torch.equal(grads[n], p.grad) for n, p in one.model.named_parameters())
        assert modes == [m.training for m in one.model.modules()]
        assert all(torch.equal(m, v["exp_avg"]) for m, v in zip(moments, one.optimizer.state.values(), strict=True))
        assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in one.model.modules()]
        assert all(torch.equal(a, b) for a, b in zip(batch, one.batch, strict=True))

    def test_a_buffer_that_forward_binds_anew_is_put_back(self, lesson):
        class Counting(nn.Linear):
            def __init__(self):
                super().__init__(3072, 10)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x):
                self.calls = self.calls + 1
                return super().forward(x.flatten(1))

        one = lesson.make_patient(Counting())
        suspects(lesson, one)
        assert one.model.calls == 0

    def test_a_model_that_cannot_be_copied(self, lesson):
        model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
        model.lock = threading.Lock()  # deepcopy raises TypeError
        assert suspects(lesson, lesson.make_patient(model)) == []

    def test_other_bugs_are_named(self, lesson):
        x, y = lesson.x_train[:450].clone(), lesson.y_train[:450].clone()
        bad = x.clone()
        bad[3, 0, 0, 0] = math.nan
        found = suspects(lesson, lesson.make_patient(batch=(bad, y)))
        assert found[0].name == "nan in inputs"
        nan_net = lesson.Net(middle=lambda h: (h - h).log())
        assert suspects(lesson, lesson.make_patient(nan_net))[0].name == "nan in forward"
        one = lesson.make_patient()
        one.optimizer = torch.optim.Adam(lesson.Net().parameters())  # another model's
        assert suspects(lesson, one)[0].name == "not in optimizer"
        one = lesson.make_patient(step=lambda model, loss_fn, batch, optimizer: 0.0)
        assert suspects(lesson, one)[0].name == "no update"


def with_rates(lesson, make):
    """A patient whose scheduler steps after each batch."""
    one = lesson.make_patient()
    scheduler = make(one.optimizer)

    def step(*arguments):
        value = lesson.plain_step(*arguments)
        scheduler.step()
        return value

    one.step = step
    return one


def with_closure(lesson, clears):
    one = lesson.make_patient()
    one.optimizer = torch.optim.LBFGS(one.model.parameters(), lr=0.1, max_iter=3)

    def step(model, loss_fn, batch, optimizer):
        def closure():
            if clears:
                optimizer.zero_grad()
            loss = loss_fn(model(batch[0]), batch[1])
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    one.step = step
    return one


class Functional(nn.Module):
    """Dropout as a function."""

    def __init__(self, always=False):
        super().__init__()
        self.a, self.b, self.always = nn.Linear(3072, 32), nn.Linear(32, 10), always

    def forward(self, x):
        return self.b(F.dropout(self.a(x.flatten(1)).relu(), 0.5, self.always or self.training))


class TestDiagnoseBeyondTheGallery:
    """Kinds of bugs and of healthy models that readers brought."""

    def first(self, lesson, one):
        torch.manual_seed(0)
        return next((suspect.name for suspect in suspects(lesson, one)), None)

    @pytest.mark.parametrize("dim", [0, 1])
    def test_softmax_over_either_dimension(self, lesson, dim):
        one = lesson.make_patient(nn.Sequential(lesson.Net(), nn.Softmax(dim)))
        assert self.first(lesson, one) == ("images mixed" if dim == 0 else "softmax twice")

    def test_a_reshape_that_mixes_images(self, lesson):
        one = lesson.make_patient(lesson.Net(middle=lambda h: h.T.reshape(h.shape).relu()))
        assert self.first(lesson, one) == "images mixed"

    def test_dropout_as_a_function(self, lesson):
        assert self.first(lesson, lesson.make_patient(Functional())) is None
        stays = partial(lesson.evaluating, back=False)
        assert self.first(lesson, lesson.make_patient(Functional(), step=stays)) == "trained in evaluation mode"
        (note,) = lesson.diagnose(lesson.make_patient(Functional(always=True)))
        assert note == ("not checked", "images mixed, because two passes in evaluation mode differ")

    def test_rates(self, lesson):
        rates = torch.optim.lr_scheduler
        for make, name in (
            (lambda o: rates.StepLR(o, 6, 0.1), "learning rate collapses"),
            (lambda o: rates.ExponentialLR(o, 0.9), "learning rate collapses"),
            (lambda o: rates.CosineAnnealingLR(o, 6), "learning rate collapses"),  # up again at the end
            (lambda o: rates.LambdaLR(o, lambda n: 0.0), "no update"),
            (lambda o: rates.LambdaLR(o, lambda n: min(n / 100, 1.0)), None),  # warm-up from 0
            (lambda o: rates.CosineAnnealingLR(o, 50), None),
            (lambda o: rates.OneCycleLR(o, 0.01, total_steps=100), None),
        ):
            assert self.first(lesson, with_rates(lesson, make)) == name

    def test_an_optimizer_with_a_closure(self, lesson):
        assert self.first(lesson, with_closure(lesson, clears=True)) is None
        assert self.first(lesson, with_closure(lesson, clears=False)) == "gradients pile up"

    def test_other_bugs(self, lesson):
        constant = lesson.make_patient(nn.Sequential(lesson.Net(1), nn.Softmax(1)), F.mse_loss, brightness(lesson))
        assert self.first(lesson, constant) == "no update"
        rooted = script_with(lesson, [lesson.register_blocks, lesson.leave_out_softmax])
        assert self.first(lesson, rooted) == "nan in backward"

    def test_gradients_at_kinks_and_in_float32_are_not_judged(self, lesson):
        model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Flatten())
        model.append(nn.Linear(512, 10))
        for layer in (model[0], model[2], model[5]):
            nn.init.zeros_(layer.bias)
        x, y = (t.clone() for t in lesson.make_patient().batch)
        x[:, :, :8] = 0.0  # a border, as in MNIST: exactly at the kinks
        assert self.first(lesson, lesson.make_patient(model, batch=(x, y))) is None
        animals = (x, lesson.is_animal[:512].long())
        loss_fn = lambda z, y: F.binary_cross_entropy_with_logits(z.squeeze(1), y.float())  # noqa: E731
        assert self.first(lesson, lesson.make_patient(lesson.Net(1), loss_fn, animals)) is None
        half = lesson.Net(middle=lambda h: h.float().relu().to(h.dtype))
        assert self.first(lesson, lesson.make_patient(half)) is None

    def test_healthy_models_of_other_shapes(self, lesson):
        x, y = (t.clone() for t in lesson.make_patient().batch)

        class Named(lesson.Net):
            def forward(self, x):
                return {"logits": super().forward(x)}

        normed = lesson.Net()
        nn.utils.parametrizations.spectral_norm(normed.head)
        ignored = y.clone()
        ignored[::7] = -100
        body = nn.Sequential(lesson.Net(32), nn.ReLU(), nn.Dropout()).requires_grad_(False)
        frozen = lesson.make_patient(nn.Sequential(body, nn.Linear(32, 10)))
        frozen.optimizer = torch.optim.Adam(frozen.model[1].parameters())
        body.eval()
        for one in (
            frozen,
            lesson.make_patient(Named(), lambda z, y: F.cross_entropy(z["logits"], y)),
            lesson.make_patient(normed),
            lesson.make_patient(batch=(x, ignored)),
            lesson.make_patient(nn.Conv2d(3, 2, 3, padding=1), batch=(x, (x[:, 0] > 0).long())),
        ):
            assert self.first(lesson, one) is None

    @pytest.mark.parametrize(
        ("right", "broken"),
        [
            (lambda z, y: (z - y[:, None]).square().mean(), lambda z, y: (z - y).square().mean()),
            (lambda z, y: F.mse_loss(z, y.unsqueeze(1)), lambda z, y: F.smooth_l1_loss(z, y)),
            (lambda z, y: (z - y[:, None]).abs().sum(), lambda z, y: (z - y).abs().sum()),
            (lambda z, y: F.relu(1 - z * (2 * y[:, None] - 1)).mean(), lambda z, y: (F.softplus(z) - z * y).mean()),
        ],
    )
    def test_a_loss_that_shapes_the_targets_itself_is_healthy(self, lesson, right, broken):
        named = []
        for loss_fn in (right, broken):
            with warnings.catch_warnings(action="ignore"):
                named.append(bool(lesson.loss_broadcasts(lesson.make_patient(lesson.Net(1), loss_fn, lesson.animals))))
        assert named == [False, True]


class TestGrading:
    def test_an_answer_that_asks_the_doctor_gets_one_with_all_checks(self, lesson):
        course = skeleton("15-09")
        above = course.before(next(task for task in course.tasks if task.cell == "ex-ward"))
        statements = [one for source in above.values() for one in ast.parse(source).body]
        taken = "\n".join(map(ast.unparse, needed_for({"diagnose"}, statements)))
        for stage, checks in lesson.STAGES.items():
            assert checks
            assert all(f"STAGES['{stage}']['{name}']" in taken for name in checks)


class TestWhatReadersMet:
    """Bugs, false alarms and crashes that outside readers found in an earlier doctor."""

    def names(self, lesson, one):
        torch.manual_seed(0)
        return [suspect.name for suspect in lesson.diagnose(one)]

    def test_what_could_not_be_checked_is_said(self, lesson):
        weight = torch.ones(10)
        one = lesson.make_patient(loss_fn=lambda z, y: F.cross_entropy(z, y, weight=weight))  # float32 for float64
        assert self.names(lesson, one) == ["not checked"]
        one = lesson.make_patient(lesson.Net(middle=lesson.scaled_data), nn.CrossEntropyLoss(weight=weight))
        assert self.names(lesson, one)[0] == "wrong gradient"
        dice = torch.Generator().manual_seed(0)
        noisy = lesson.Net(middle=lambda h: h.relu() + 0.01 * torch.rand(h.shape, generator=dice).to(h))
        assert set(self.names(lesson, lesson.make_patient(noisy))) == {"not checked"}
        model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
        model.lock = threading.Lock()
        assert set(self.names(lesson, lesson.make_patient(model))) == {"not checked"}

    def test_a_nan_of_a_later_step_is_seen(self, lesson):
        model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 10))
        one = lesson.make_patient(model)
        one.optimizer = torch.optim.SGD(model.parameters(), lr=1000.0)
        (suspect,) = suspects(lesson, one)
        assert suspect.name == "nan in loop"
        assert "step" in suspect.evidence
        assert all(p.isfinite().all() for p in model.parameters())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_low_precision_is_healthy(self, lesson, dtype):
        model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)).to(dtype)
        x, y = lesson.make_patient().batch
        loss_fn = lambda z, y: F.cross_entropy(z.double() if z.dtype == torch.float64 else z.float(), y)  # noqa: E731
        one = lesson.make_patient(model, loss_fn, (x.to(dtype), y))
        one.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        assert suspects(lesson, one) == []
        one.step = lesson.never_cleared
        assert suspects(lesson, one)[0].name == "gradients pile up"

    def test_exceptions_are_findings(self, lesson):
        as_numpy = lesson.Net(middle=lambda h: torch.from_numpy(h.numpy()))
        assert self.names(lesson, lesson.make_patient(as_numpy)) == ["the script raises"]

        def step(*_):
            raise KeyError("a typo")

        assert "the script raises" in self.names(lesson, lesson.make_patient(step=step))
        x, y = lesson.make_patient().batch
        assert self.names(lesson, lesson.make_patient(batch=(x, y + 1)))[0] == "label out of range"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
    def test_an_own_binary_loss_that_broadcasts(self, lesson, dtype):
        x, y = lesson.animals
        loss_fn = lambda z, y: (F.softplus(z) - z * y).mean()  # noqa: E731
        one = lesson.make_patient(lesson.Net(1), loss_fn, (x, y.to(dtype)))
        assert self.names(lesson, one)[0] == "loss broadcasts"

    def test_losses_that_want_something_else(self, lesson):
        softmax = nn.Sequential(lesson.Net(), nn.Softmax(1))
        assert self.names(lesson, lesson.make_patient(softmax, F.nll_loss))[0] == "log softmax missing"


class TestTheInheritedScript:
    def test_each_fix_uncovers_the_next_bug(self, lesson):
        fixes = [
            lesson.use_safe_root,
            lesson.register_blocks,
            lesson.use_right_root,
            lesson.leave_out_softmax,
            lesson.back_to_training,
            lesson.keep_no_graph,
        ]
        named = []
        for count in range(len(fixes) + 1):
            found = suspects(lesson, script_with(lesson, fixes[:count]))
            named += [suspect.name for suspect in found[:1]] or [None]
        assert named == [
            "not registered",
            "not registered",
            "softmax twice",
            "softmax twice",
            "trained in evaluation mode",
            "graphs kept",
            None,
        ]
        wrong = script_with(lesson, [lesson.use_safe_root, lesson.register_blocks, lesson.leave_out_softmax])
        assert suspects(lesson, wrong)[0].name == "wrong gradient"

    def test_the_fixes_help_and_dropout_pays_later(self, lesson):
        script_with(lesson, [lesson.use_right_root, lesson.register_blocks, lesson.leave_out_softmax])
        loss_without, without = lesson.trained_longer(0, dropout=False)
        loss_with, with_dropout = lesson.trained_longer(0, dropout=True)
        assert loss_without < loss_with
        assert with_dropout[0] < without[0]
        assert 20 < without[-1] < with_dropout[-1]


class TestWatching:
    """What the watchers of the loop must not mistake for a bug, and what they must not miss."""

    def test_a_validation_with_a_graph_is_no_training(self, lesson):
        def step(model, loss_fn, batch, optimizer):
            value = lesson.plain_step(model, loss_fn, batch, optimizer)
            model.eval()
            model(batch[0])
            model.train()
            return value

        assert suspects(lesson, lesson.make_patient(step=step)) == []

    def test_gradients_that_are_assigned_do_not_pile_up(self, lesson):
        def step(model, loss_fn, batch, optimizer):
            loss = loss_fn(model(batch[0]), batch[1])
            grads = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad
            optimizer.step()
            return loss.item()

        assert suspects(lesson, lesson.make_patient(step=step)) == []

    def test_gradients_that_pile_up_in_a_part_of_the_model(self, lesson):
        def step(model, loss_fn, batch, optimizer):
            loss = loss_fn(model(batch[0]), batch[1])
            model.head.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        (suspect,) = suspects(lesson, lesson.make_patient(step=step))
        assert suspect.name == "gradients pile up"
        assert suspect.evidence.startswith("8 gradients")

    def test_outputs_that_are_kept_or_changed_in_place(self, lesson):
        def step(model, loss_fn, batch, optimizer):
            z = model(batch[0])
            z /= 2.0
            loss = loss_fn(z, batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        one = lesson.make_patient(step=step)
        assert suspects(lesson, one) == []
        kept = []
        one.model.register_forward_hook(lambda module, args, out: kept.append(out))
        assert suspects(lesson, one)[0].name == "graphs kept"

    def test_sparse_gradients(self, lesson):
        words = torch.randint(50, (420, 12))
        model = nn.Sequential(nn.EmbeddingBag(50, 16, sparse=True), nn.Linear(16, 4))
        one = lesson.make_patient(model, batch=(words, words.sum(dim=1) % 4))
        one.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert suspects(lesson, one) == []

    def test_a_private_list_hides_layers_too(self, lesson):
        layers = lesson.Layers()
        layers._mine = [nn.Linear(2, 2)]
        assert "_mine" in suspects(lesson, lesson.make_patient(lesson.Net(middle=layers)))[0].evidence

    def test_a_write_that_does_nothing_the_second_time(self, lesson):
        one = lesson.make_patient(lesson.Net(enter=lambda x: x.clamp_(min=-1)))
        assert suspects(lesson, one)[0].name == "batch written to"

    def test_softmax_twice_with_two_classes(self, lesson):
        x, _ = lesson.make_patient().batch
        one = lesson.make_patient(nn.Sequential(lesson.Net(2), nn.Softmax(1)), batch=(x, lesson.is_animal[:512].long()))
        assert suspects(lesson, one)[0].name == "softmax twice"


class TestAnomalyLine:
    def test_the_readers_own_line_is_named(self, lesson, capsys):
        x = torch.randn(3, requires_grad=True)
        sigmoid = nn.Sigmoid()

        def spoilt():
            h = sigmoid(x)
            h += 1
            h.sum().backward()

        assert lesson.anomaly_line(spoilt, message="inplace") == "h = sigmoid(x)"


KINDS = ("trained_losses", "validation_losses", "hook_closures", "errors", "caches", "cycles")


class TestLeakMonitor:
    def test_leaks_are_found_with_their_line_and_health_is_silent(self, lesson):
        x, y = lesson.x_train[:16], lesson.y_train[:16]
        grows = {}
        for kind in KINDS:
            gc.collect()
            gc.disable()
            try:
                leaky = lesson.OtherLeaks()
                with lesson.LeakMonitor() as monitor:
                    for _ in range(6):
                        getattr(leaky, kind)(x.clone(), y)
                        monitor.mark()
            finally:
                gc.enable()
            grows[kind] = sum(monitor.growing().values())
        assert 0 < grows["trained_losses"] < 100
        assert all(grows[kind] > 100 for kind in KINDS if kind != "trained_losses")
        lesson.OtherLeaks.caches.cache_clear()
        one = lesson.make_patient()
        with lesson.LeakMonitor() as monitor:
            for _ in range(6):
                lesson.plain_step(one.model, one.loss_fn, (x, y), one.optimizer)
                monitor.mark()
        assert monitor.growing() == {}

    def test_bytes_are_counted_once_and_forgotten(self, lesson):
        with lesson.LeakMonitor() as monitor:
            kept = [torch.zeros(100)]
            kept.append(kept[0].view(10, 10))  # the same memory
            assert monitor.mark() == 400
            kept.clear()
            assert monitor.mark() == 0
        torch.ones(3)  # outside
        assert monitor.mark() == 0

    def test_tensors_made_from_lists_are_seen_and_views_are_not(self, lesson):
        old = torch.ones(50)
        with lesson.LeakMonitor() as monitor:
            kept = [torch.tensor([1.0] * 100), torch.as_tensor([1.0] * 10), old.new_tensor([1.0] * 10)]
            kept += [old[:5], old.detach(), torch.as_tensor(old), torch.zeros(0).set_(old)]
            assert monitor.mark() == 480


class TestExercises:
    def test_script_6_is_mended(self, lesson):
        broken, mended = lesson.script_6(lesson.broken_train_6), lesson.script_6(lesson.train_6)
        assert max(broken[2:]) < 0.2 < min(mended)

    def test_script_2_passes_its_authors_check_and_no_other(self, lesson):
        ones = torch.ones(3, dtype=torch.float64)
        x = lesson.leaf64(torch.randn, 2, 3, 2, 2)
        assert lesson.numerical_gradcheck(lambda x: lesson.BrokenSoftClip.apply(x, ones), [x]).ok
        assert not lesson.numerical_gradcheck(lambda x: lesson.BrokenSoftClip.apply(x, 2 * ones), [x]).ok
        s = (0.5 + torch.rand(3, dtype=torch.float64)).requires_grad_()
        for function, right in ((lesson.BrokenSoftClip, False), (lesson.SoftClip, True)):
            assert lesson.numerical_gradcheck(function.apply, [x, s]).ok is right

    def test_a_right_mend_of_one_bug_of_script_6_looks_worse_at_first(self, lesson):
        half_fixed = partial(lesson.broken_train_6, standardize=lesson.standardize_copy)
        assert lesson.script_6(half_fixed)[0] < lesson.script_6(lesson.broken_train_6)[0]
