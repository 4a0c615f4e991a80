"""What 15-05 builds: recorder, comparison, table, package and C++ program, against eager PyTorch."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from check_protocol import MODULE
from torch import nn
from torch.export import Dim

from course.lesson_code import answers, definitions, run_source
from shared import quiet
from shared.lessons.topic_15_05 import native

CELLS = """
    traced scripted recorder replay gate gate-inputs agree judge zoo zoo-more zoo-models scanner layer-call copied
    layer-calls first-difference enhance report five five-traces manifest ship
"""
NOTEBOOK = json.loads(next(MODULE.glob("15-05_*.ipynb")).read_text(encoding="utf-8"))
SOURCES = {cell["id"]: "".join(cell["source"]) for cell in NOTEBOOK["cells"]}


@pytest.fixture(scope="module")
def lesson():
    names = definitions("15-05", *CELLS.split())
    names.update(answers("15-05", given=names))
    return SimpleNamespace(**names)


class TestRecorder:
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: (x.view(-1).relu() * 2).reshape(x.shape).t() @ x,
            lambda x: torch.cat([part + 1 for part in x.split(2)]).max(dim=1).values,
            lambda x: x.clone().mul_(3).add_(x)[1:].sum(dim=0, keepdim=True),
            lambda x: torch.stack([x, torch.ones_like(x)]).index_select(0, torch.tensor([1, 0, 0])),
            lambda x: F.layer_norm(x, (3,)).softmax(dim=-1),
            lambda x: x,
            lambda x: torch.arange(3.0),
            lambda x: x * 2 if x.isnan().any().item() else x + (x * 3),
        ],
        ids=["views", "several results", "in place", "constants", "composite", "the input", "no input", "a bool"],
    )
    def test_a_replay_is_the_function(self, lesson, function):
        tape = lesson.record(function, torch.randn(4, 3))
        for seed in range(3):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(lesson.replay(tape, x), function(x))

    def test_modules_and_weights(self, lesson):
        net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.GELU()).eval()
        tape = lesson.record(net, torch.randn(4, 3))
        x = torch.randn(4, 3)
        assert torch.equal(lesson.replay(tape, x), net(x))
        with torch.no_grad():
            net[0].bias.add_(1)
        assert torch.equal(lesson.replay(tape, x), net(x))  # weights are referred to, not copied

    def test_a_branch_is_frozen(self, lesson):
        gate, high, low = lesson.gate, lesson.high, lesson.low
        tape = lesson.record(gate, high)
        assert torch.equal(lesson.replay(tape, high), gate(high))
        assert not torch.allclose(lesson.replay(tape, low), gate(low))
        assert torch.equal(lesson.replay(tape, low), gate.fc(low).relu())

    def test_it_is_small(self):
        assert len((SOURCES["recorder"] + SOURCES["replay"]).splitlines()) <= 60


class TestJudge:
    def test_agree(self, lesson):
        agree, nan, inf = lesson.agree, float("nan"), float("inf")
        x = torch.tensor([1.0, 2.0, nan, inf])
        assert agree(x, x.clone())
        assert agree({"a": x, "b": [1, None]}, {"a": x, "b": [1, None]})
        assert agree(torch.zeros(0), torch.zeros(0))
        for got in (
            torch.tensor([1.0, 2.5, nan, inf]),
            torch.tensor([1.0, 2.0, 3.0, inf]),
            torch.tensor([1.0, 2.0, nan, -inf]),
            x.double(),
            x[None],
        ):
            assert not agree(got, x)
        assert not agree({"a": x, "b": 1}, {"a": x, "b": 2})
        assert not agree({"a": x}, {"b": x})
        assert not agree(torch.tensor([1, 5]), torch.tensor([1, 2]))
        assert agree(torch.tensor([True]), torch.tensor([True]))
        assert not agree(torch.tensor([50_003]), torch.tensor([50_000]))

    @pytest.mark.parametrize("size", [1e-12, 1.0, 1e9])
    def test_rounding_is_relative_to_the_largest_number(self, lesson, size):
        x = size * torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert lesson.agree(x.float(), x.float() * (1 + 1e-6))
        assert lesson.agree([x, 3], [x + 0.99e-4 * x.abs().max(), 3])
        assert not lesson.agree([x, 3], [x + 1.02e-4 * x.abs().max(), 3])
        assert not lesson.agree(x, x.float())
        assert lesson.largest({"a": x, "b": torch.tensor([torch.inf])}) == x.abs().max()

    def test_nothing_but_zero_agrees_with_zero(self, lesson):
        assert lesson.agree(torch.zeros(3), torch.zeros(3))
        assert not lesson.agree(torch.full((3,), 1e-9), torch.zeros(3))
        assert lesson.largest(["text", torch.zeros(0)]) == 0

    def test_probes_stay_as_they_are(self, lesson):
        probe = torch.ones(3)
        assert lesson.judge(nn.ReLU(inplace=True), lambda m, _: lambda x: m(x.sub_(2)), probe, [probe]) == ["wrong"]
        assert torch.equal(probe, torch.ones(3))

    def test_the_models_of_the_lesson(self, lesson):
        torch.manual_seed(0)
        example = torch.randn(4, 4)
        probes = [torch.randn(4, 4), 10 * torch.randn(4, 4), torch.randn(6, 4), torch.randn(1, 4)]
        found = [lesson.judge(model, lesson.traced, example, probes) for model in lesson.ZOO]
        right = [type(model).__name__ for model, said in zip(lesson.ZOO, found, strict=True) if set(said) == {"right"}]
        assert right == ["Rows", "Mean"]
        for model in lesson.ZOO:
            said = lesson.judge(model, lesson.scripted, example, probes)
            assert set(said) == {"no file" if type(model).__name__ == "Fallback" else "right"}

    def test_verdicts_of_all_kinds(self, lesson):
        def convert(model, example):
            def converted(x):
                if len(x) == 3:
                    raise ValueError
                return x + (len(x) == 2)

            return converted

        said = lesson.judge(nn.Identity(), convert, torch.zeros(1), [torch.zeros(n) for n in (1, 2, 3, 4)])
        assert said == ["right", "wrong", "refused", "right"]


class Functional(nn.Module):
    """Nested and in-place layers, and code between them."""

    def __init__(self, extra=0.0):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)])
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.extra = extra

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + self.extra
        return self.inner(x)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        return self.fc(x) * scale


class Numbers(nn.Module):
    """A layer that is called twice, with numbers of its own."""

    def __init__(self):
        super().__init__()
        self.sub, self.last = Scaled(), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.sub(self.sub(x, 2.0), scale=3.0))


class Several(nn.Module):
    """A layer whose trace gives its results in another structure."""

    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.lstm(x)[0])


def with_layers(model, x):
    return torch.export.unflatten(torch.export.export(model, (x,)))


class TestFirstDifference:
    @pytest.mark.parametrize("name", ["layers.0", "layers.2", "inner.0"])
    def test_the_layer_of_a_trace(self, lesson, name):
        model, x = Functional().eval(), torch.randn(3, 4)
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.get_submodule(name).bias[1] += 0.5
            assert lesson.first_difference(model, lesson.traced(other, x), (x,)) == name
            assert lesson.first_difference(model, lesson.traced(model, x), (x,)) is None

    def test_outputs_that_are_tiny(self, lesson):
        model, x = Functional().eval(), torch.randn(3, 4)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1e-4)
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.inner[0].bias.zero_()
        assert lesson.first_difference(model, lesson.traced(other, x), (x,)) == "inner.0"

    def test_equal_models(self, lesson):
        model, x = Functional().eval(), torch.randn(3, 4)
        for other in (copy.deepcopy(model), lesson.traced(model, x), with_layers(model, x)):
            assert lesson.first_difference(model, other, (x,)) is None
        body, x = lesson.Body().eval(), torch.rand(2, 1, 28, 28)
        assert lesson.first_difference(body, lesson.scripted(body), (x,)) is None

    @pytest.mark.parametrize("kind", ["eager", "trace", "export"])
    @pytest.mark.parametrize("name", ["layers.0", "layers.2", "inner.0"])
    def test_the_layer_that_differs(self, lesson, kind, name):
        model, x = Functional().eval(), torch.randn(3, 4)
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.get_submodule(name).bias[1] += 0.5
        if kind == "trace":
            other = lesson.traced(other, x)
        elif kind == "export":
            other = with_layers(other, x)
        assert lesson.first_difference(model, other, (x,)) == name

    @pytest.mark.parametrize("kind", ["eager", "trace", "export"])
    def test_the_code_between_layers(self, lesson, kind):
        model, other, x = Functional().eval(), Functional(extra=0.3).eval(), torch.randn(3, 4)
        other.load_state_dict(model.state_dict())
        if kind == "trace":
            other = lesson.traced(other, x)
        elif kind == "export":
            other = with_layers(other, x)
        assert lesson.first_difference(model, other, (x,)) == ""

    def test_a_layer_that_cannot_be_called_on_its_own_stops_it(self, lesson):
        for model, shape in ((Numbers(), (3, 4)), (Several(), (3, 5, 4))):
            x = torch.randn(shape)
            trace = lesson.traced(model.eval(), x)
            with pytest.raises((RuntimeError, TypeError)):
                lesson.first_difference(model, trace, (x,))

    def test_nothing_stays_on_the_models(self, lesson):
        model, x = lesson.Body(), torch.randn(3, 1, 28, 28)
        state = copy.deepcopy(model.state_dict())
        other = copy.deepcopy(model)
        lesson.first_difference(model.eval(), other.eval(), (x,))
        with pytest.raises(RuntimeError):
            lesson.first_difference(model, other, (torch.randn(3, 2, 28, 28),))
        for module in [*model.modules(), *other.modules()]:
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
        for one in (model, other):
            assert all(torch.equal(one.state_dict()[key], value) for key, value in state.items())

    def test_batch_norms_of_the_exported_model_stay(self, lesson):
        model, x = lesson.Body().train(), torch.randn(3, 1, 28, 28)
        with quiet():
            loud = torch.jit.trace(copy.deepcopy(model), x, check_trace=False)
        before = loud.bn1.running_mean.clone()
        assert lesson.first_difference(model.eval(), loud, (x,)) == "bn1"
        assert torch.equal(loud.bn1.running_mean, before)


class TestWithoutPython:
    def test_cpp_and_package_agree_with_python(self, lesson, tmp_path, monkeypatch):
        if native.COMPILER is None:
            pytest.skip("no C++ compiler")
        monkeypatch.delenv("COURSE_AOTI", raising=False)
        body, x = lesson.Body().eval(), torch.rand(37, 1, 28, 28)
        build = native.start_build(tmp_path / "infer")
        program = lesson.export_batches(body, x[:2])
        package = native.package(program, tmp_path / "packaged.pt2")
        with quiet():
            torch.jit.save(torch.jit.freeze(lesson.traced(body, x[:3])), tmp_path / "body.pt")
        with torch.no_grad():
            want = body(x)
        compiled = torch._inductor.aoti_load_package(package)
        assert torch.allclose(compiled(x), want, atol=1e-5)
        assert torch.allclose(compiled(x[:1]), want[:1], atol=1e-5)
        assert native.finish_build(build)
        x.numpy().tofile(tmp_path / "images.bin")
        for name, model in (("torchscript", tmp_path / "body.pt"), ("package", package)):
            command = [tmp_path / "infer", name, model, tmp_path / "images.bin", tmp_path / "logits.bin", "28"]
            subprocess.run(command, check=True, timeout=120)
            data = bytearray((tmp_path / "logits.bin").read_bytes())
            got = torch.frombuffer(data, dtype=torch.float32).view(-1, 10)
            assert torch.allclose(got, want, atol=1e-5)
        assert subprocess.run([tmp_path / "infer"], timeout=60, check=False).returncode == 2

    def test_the_package_can_be_left_out(self, tmp_path, monkeypatch):
        monkeypatch.setenv("COURSE_AOTI", "0")
        assert native.package(None, tmp_path / "none.pt2") is None
        monkeypatch.delenv("COURSE_AOTI")
        monkeypatch.setattr(native, "COMPILER", None)
        assert native.package(None, tmp_path / "none.pt2") is None
        assert native.start_build(tmp_path / "infer") is None

    def test_a_compiler_that_fails_leaves_the_package_out(self, tmp_path, monkeypatch, capsys):
        def fails(*args, **options):
            raise OSError("no such compiler")

        monkeypatch.delenv("COURSE_AOTI", raising=False)
        monkeypatch.setattr(native, "COMPILER", "g++")
        monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fails)
        assert native.package(None, tmp_path / "none.pt2") is None
        assert "OSError" in capsys.readouterr().out

    def test_the_stored_result_is_shown_without_a_compiler(self, lesson, tmp_path, capsys):
        names = {**vars(lesson), "folder": tmp_path, "cpp_build": None, "package_path": None}
        names |= {"images": torch.rand(3, 1, 28, 28), "enhance": lesson.Enhance(lesson.Body()).eval()}
        for cell in ("finish-build", "infer", "infer-run"):
            run_source(SOURCES[cell], cell, names)
        assert "stored result" in capsys.readouterr().out

    def test_onnx_says_what_is_missing(self, lesson, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        names = dict(vars(lesson))
        for cell in ("onnx", "onnx-run"):
            run_source(SOURCES[cell], cell, names)
        assert capsys.readouterr().out == "left out: onnxruntime is not installed\n"

    def test_onnx_agrees(self, lesson, tmp_path, capsys):
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        body, images = lesson.Body().eval(), torch.rand(100, 1, 28, 28)
        names = {**vars(lesson), "folder": tmp_path, "body": body, "images": images, "positive": images[:8]}
        names["free_batch"] = ({0: Dim("batch")},)
        for cell in ("onnx", "onnx-run"):
            run_source(SOURCES[cell], cell, names)
        found = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
        assert len(found) == 3
        assert max(found) < 1e-4


class TestShipping:
    def test_what_is_shipped_is_loaded(self, lesson, tmp_path):
        body, x = lesson.Body().train(), torch.rand(5, 1, 28, 28)
        lesson.ship(body, x, tmp_path / "shipped")
        forms = json.loads((tmp_path / "shipped" / "manifest.json").read_text())["forms"]
        want = body.eval()(x)
        for skipped in range(3):
            model, failed = lesson.load_shipped(tmp_path / "shipped", lesson.Body)
            assert [name for name, _ in failed] == [form["file"] for form in forms[:skipped]]
            assert torch.allclose(model(x[:2]), want[:2], atol=1e-5)
            (tmp_path / "shipped" / forms[skipped]["file"]).write_bytes(b"")
        with pytest.raises(lesson.LoadError, match=r"model\.pt2.*model\.pt.*weights\.pt"):
            lesson.load_shipped(tmp_path / "shipped", lesson.Body)


def test_stored_outputs_hold_no_warning():
    for cell in NOTEBOOK["cells"]:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr", cell["id"]
            text = "".join(output.get("text", ""))
            assert "deprecated" not in text.lower(), cell["id"]
            assert "site-packages" not in text, cell["id"]


def test_the_named_objects_can_be_imported(lesson):
    for name in ("first_difference", "Recorder", "judge", "export_batches", "CondEnhance", "load_shipped"):
        assert callable(getattr(lesson, name))
    assert Path(lesson.__dict__["record"].__code__.co_filename).name.startswith("15-05")
