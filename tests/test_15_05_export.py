"""What 15-05 builds: recorder, comparison, package, C++ program and shipped files, against eager PyTorch."""

import copy
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from check_protocol import MODULE
from torch import nn

from course.lesson_code import answers, definitions, run_source
from shared import quiet
from shared.lessons.topic_15_05 import native

CELLS = """
    gate gate-inputs traced scripted recorder replay agree judge scanner layer-call copied layer-calls
    first-difference enhance report five five-traces manifest ship
"""


@pytest.fixture(scope="module")
def lesson():
    names = definitions("15-05", *CELLS.split())
    names.update(answers("15-05", given=names))
    return SimpleNamespace(**names)


class TestRecorder:
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: torch.cat([part + 1 for part in x.split(2)]).max(dim=1).values,
            lambda x: x.clone().mul_(3).add_(x)[1:].sum(dim=0, keepdim=True),
            lambda x: F.layer_norm(x, (3,)).softmax(dim=-1),
            lambda x: x,
            lambda x: x * 2 if x.isnan().any().item() else x + (x * 3),
        ],
        ids=["several results", "in place", "composite", "the input", "a bool"],
    )
    def test_a_replay_is_the_function(self, lesson, function):
        tape = lesson.record(function, torch.randn(4, 3))
        x = torch.randn(4, 3)
        assert torch.equal(lesson.replay(tape, x), function(x))

    def test_weights_are_referred_to_and_not_copied(self, lesson):
        net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.GELU()).eval()
        tape = lesson.record(net, torch.randn(4, 3))
        with torch.no_grad():
            net[0].bias.add_(1)
        x = torch.randn(4, 3)
        assert torch.equal(lesson.replay(tape, x), net(x))


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
        assert not agree(torch.tensor([50_003]), torch.tensor([50_000]))
        assert not agree(torch.full((3,), 1e-9), torch.zeros(3))

    @pytest.mark.parametrize("size", [1e-12, 1e9])
    def test_rounding_is_relative_to_the_largest_number(self, lesson, size):
        x = size * torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert lesson.agree([x, 3], [x + 0.99e-4 * x.abs().max(), 3])
        assert not lesson.agree([x, 3], [x + 1.02e-4 * x.abs().max(), 3])
        assert lesson.largest({"a": x, "b": torch.tensor([torch.inf])}) == x.abs().max()

    def test_verdicts_of_all_kinds_and_probes_that_stay_as_they_are(self, lesson):
        def convert(model, example):
            def converted(x):
                if len(x) == 3:
                    raise ValueError
                return x.sub_(float(len(x) == 2))

            return converted

        probes = [torch.zeros(n) for n in (1, 2, 3, 4)]
        said = lesson.judge(nn.Identity(), convert, torch.zeros(1), probes)
        assert said == ["right", "wrong", "refused", "right"]
        assert not any(probe.any() for probe in probes)
        assert lesson.judge(nn.Identity(), lambda model, example: 1 / 0, torch.zeros(1), probes) == ["no file"] * 4


class Functional(nn.Module):
    """Nested and in-place layers, and code between them."""

    def __init__(self, extra=0.0):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ELU(inplace=True), nn.Linear(4, 4)])
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.extra = extra

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + self.extra
        return self.inner(x)


class TestFirstDifference:
    @pytest.mark.parametrize("kind", ["eager", "trace", "export"])
    @pytest.mark.parametrize("changed", ["layers.0", "inner.0", "", None])
    def test_the_layer_that_differs_is_named(self, lesson, kind, changed):
        """The empty name stands for the model's own code between its layers."""
        model, x = Functional().eval(), torch.randn(3, 4)
        other = Functional(extra=0.3 if changed == "" else 0.0).eval()
        other.load_state_dict(model.state_dict())
        if changed:
            with torch.no_grad():
                other.get_submodule(changed).bias[1] += 0.5
        if kind == "trace":
            other = lesson.traced(other, x)
        elif kind == "export":
            other = torch.export.unflatten(torch.export.export(other, (x,)))
        assert lesson.first_difference(model, other, (x,)) == changed

    def test_nothing_stays_on_the_models(self, lesson):
        model, x = lesson.Body(), torch.randn(3, 1, 28, 28)
        other = copy.deepcopy(model)
        with quiet():
            loud = torch.jit.trace(copy.deepcopy(model), x, check_trace=False)  # in training mode
        state, mean = copy.deepcopy(model.state_dict()), loud.bn1.running_mean.clone()
        lesson.first_difference(model.eval(), other.eval(), (x,))
        assert lesson.first_difference(model, loud, (x,)) == "bn1"
        with pytest.raises(RuntimeError):
            lesson.first_difference(model, other, (torch.randn(3, 2, 28, 28),))
        for module in [*model.modules(), *other.modules()]:
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
        for one in (model, other):
            assert all(torch.equal(one.state_dict()[key], value) for key, value in state.items())
        assert torch.equal(loud.bn1.running_mean, mean)


class TestWithoutPython:
    @pytest.mark.slow
    def test_cpp_agrees_with_python(self, lesson, tmp_path, monkeypatch):
        if native.COMPILER is None:
            pytest.skip("no C++ compiler")
        monkeypatch.delenv("COURSE_AOTI", raising=False)
        build = native.start_build(tmp_path / "infer")
        net, x = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10)).eval(), torch.rand(37, 1, 28, 28)
        package = native.package(lesson.export_batches(net, x[:2]), tmp_path / "packaged.pt2")
        with quiet():
            torch.jit.save(torch.jit.freeze(lesson.traced(net, x[:3])), tmp_path / "net.pt")
        assert native.finish_build(build)
        x.numpy().tofile(tmp_path / "images.bin")
        for name, model in (("torchscript", tmp_path / "net.pt"), ("package", package)):
            command = [tmp_path / "infer", name, model, tmp_path / "images.bin", tmp_path / "logits.bin", "28"]
            subprocess.run(command, check=True, timeout=120)
            data = bytearray((tmp_path / "logits.bin").read_bytes())
            got = torch.frombuffer(data, dtype=torch.float32).view(-1, 10)
            assert torch.allclose(got, net(x), atol=1e-5)

    def test_what_cannot_be_compiled_or_is_not_wanted_is_left_out(self, tmp_path, monkeypatch, capsys):
        def fails(*args, **options):
            raise OSError("no such compiler")

        monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fails)
        monkeypatch.setattr(native, "COMPILER", "g++")
        monkeypatch.setenv("COURSE_AOTI", "0")
        assert native.package(None, tmp_path / "none.pt2") is None
        assert not capsys.readouterr().out
        monkeypatch.delenv("COURSE_AOTI")
        assert native.package(None, tmp_path / "none.pt2") is None
        assert "OSError" in capsys.readouterr().out
        monkeypatch.setattr(native, "COMPILER", None)
        assert native.package(None, tmp_path / "none.pt2") is None
        assert native.start_build(tmp_path / "infer") is None

    def test_without_a_compiler_or_onnxruntime_the_lesson_says_what_is_left_out(self, lesson, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        notebook = json.loads(next(MODULE.glob("15-05_*.ipynb")).read_text(encoding="utf-8"))
        names = {**vars(lesson), "cpp_build": None, "package_path": None}
        names |= {"images": torch.rand(3, 1, 28, 28), "enhance": lesson.Enhance(lesson.Body()).eval()}
        for cell in notebook["cells"]:
            if cell["id"] in ("finish-build", "infer", "infer-run", "onnx", "onnx-run"):
                run_source("".join(cell["source"]), cell["id"], names)
        said = capsys.readouterr().out
        assert "stored result" in said
        assert said.endswith("left out: onnxruntime is not installed\n")


def test_what_is_shipped_is_loaded(lesson, tmp_path):
    body, x = lesson.Body().train(), torch.rand(5, 1, 28, 28)
    lesson.ship(body, x, tmp_path)
    forms = [form["file"] for form in json.loads((tmp_path / "manifest.json").read_text())["forms"]]
    want = body.eval()(x)
    for skipped, form in enumerate(forms):
        model, failed = lesson.load_shipped(tmp_path, lesson.Body)
        assert [name for name, _ in failed] == forms[:skipped]
        assert torch.allclose(model(x[:2]), want[:2], atol=1e-5)
        (tmp_path / form).write_bytes(b"")
    with pytest.raises(lesson.LoadError, match=r"model\.pt2.*model\.pt.*weights\.pt"):
        lesson.load_shipped(tmp_path, lesson.Body)
