"""What 15-05 builds: recorder, comparison, package, C++ program and shipped files, against eager PyTorch.

What the notebook prints as a checked output isn't tested again: the verdicts on each conversion.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from check_protocol import MODULE
from torch import nn

from course.lesson_code import definitions, run_source
from shared import quiet
from shared.lessons.topic_15_05 import native

CELLS = """
    gate gate-inputs traced recorder replay agree scanner layer-call copied layer-calls first-difference enhance report
    ex-batches manifest ship ex-loader
"""


@pytest.fixture(scope="module")
def lesson():
    return SimpleNamespace(**definitions("15-05", *CELLS.split()))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat([part + 1 for part in x.split(2)]).max(dim=1).values,
        lambda x: x.clone().mul_(3).add_(x)[1:].sum(dim=0, keepdim=True),
        lambda x: F.layer_norm(x, (3,)).softmax(dim=-1),
        lambda x: x,
    ],
    ids=["several results", "in place", "composite", "the input"],
)
def test_a_replay_is_the_function(lesson, function):
    tape = lesson.record(function, torch.randn(4, 3))
    x = torch.randn(4, 3)
    assert torch.equal(lesson.replay(tape, x), function(x))


def test_values_agree_up_to_rounding_of_the_largest(lesson):
    agree, nan, inf = lesson.agree, float("nan"), float("inf")
    x = torch.tensor([1.0, 2.0, nan, inf])
    assert agree({"a": x, "b": [1, None]}, {"a": x.clone(), "b": [1, None]})
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
    for size in (1e-12, 1e9):
        x = size * torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert agree([x, 3], [x + 0.99e-4 * x.abs().max(), 3])
        assert not agree([x, 3], [x + 1.02e-4 * x.abs().max(), 3])


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


@pytest.mark.parametrize("kind", ["eager", "trace", "export"])
def test_the_layer_that_differs_is_named_and_nothing_stays_on_the_models(lesson, kind):
    """The empty name stands for the model's own code between its layers."""
    for changed in ("layers.0", "inner.0", "", None):
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
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.slow
def test_cpp_agrees_with_python(lesson, tmp_path, monkeypatch):
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


def test_without_a_compiler_or_onnxruntime_the_lesson_says_what_is_left_out(lesson, tmp_path, monkeypatch, capsys):
    def fails(*args, **options):
        raise OSError("no such compiler")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fails)
    monkeypatch.setattr(native, "COMPILER", "g++")
    monkeypatch.delenv("COURSE_AOTI", raising=False)
    assert native.package(None, tmp_path / "none.pt2") is None
    assert "OSError" in capsys.readouterr().out
    monkeypatch.setattr(native, "COMPILER", None)
    assert native.package(None, tmp_path / "none.pt2") is None
    assert native.start_build(tmp_path / "infer") is None

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


def test_what_is_shipped_is_loaded_in_the_first_form_that_is_whole(lesson, tmp_path):
    body, x = lesson.Body().train(), torch.rand(5, 1, 28, 28)
    lesson.ship(body, x, tmp_path)
    forms = [form["file"] for form in json.loads((tmp_path / "manifest.json").read_text())["forms"]]
    want = body.eval()(x)
    for skipped, form in enumerate(forms):
        model, failed = lesson.load_shipped(tmp_path, lesson.Body)
        assert [name for name, _ in failed] == forms[:skipped]
        assert torch.allclose(model(x[:2]), want[:2], atol=1e-5)
        (tmp_path / form).write_bytes(b"")
