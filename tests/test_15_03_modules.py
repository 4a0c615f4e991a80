"""What 15-03 builds: the small module system, routing, groups, surgery, against PyTorch's own and brute force."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from course.lesson_code import answers, definitions

CELLS = """
    mini-tables mini-walk mini-module split-vit two-vits first-renames rule split-to-fused rule-find rule-complete
    rule-results rule-tensors rule-entries apply-rule remap stems moves exit-net exit-class exit-route skip residual
    gate gate-loss flops-of assert-partition norms successor replace-modules lazy-scale lazy-scale-class norm-linear
"""


@pytest.fixture(scope="module")
def lesson():
    names = definitions("15-03", "device", "helpers", *CELLS.split())
    names.update(answers("15-03", given=names))
    return SimpleNamespace(**names)


def test_a_mini_module_registers_like_nn_module(lesson):
    def build(base):
        root = base()
        root.a, root.b = base(), base()
        root.b.c = base()
        for module in (root.a, root.b.c):
            module.weight = nn.Parameter(torch.zeros(2, 2))
        root.b.again = root.a
        root.scale = nn.Parameter(torch.ones(()))
        root.nothing = None
        root.register_buffer("seen", torch.zeros(0, dtype=torch.int64))
        root.register_buffer("none", None)
        root.plain = torch.ones(1)
        return root

    ours, theirs = build(lesson.MiniModule), build(nn.Module)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    assert not ours.state_dict()["scale"].requires_grad
    assert [p.shape for p in ours.parameters()] == [p.shape for p in theirs.parameters()]
    names = [name for name, _ in ours.named_modules()]
    assert names == [name for name, _ in theirs.named_modules(remove_duplicate=False)]
    assert ours.seen.dtype == torch.int64
    assert ours.none is None
    with pytest.raises(AttributeError, match="nowhere"):
        ours.nowhere  # noqa: B018
    for mode in (False, True):
        assert ours.train(mode) is ours
        assert {module.training for _, module in ours.named_modules()} == {mode}


class TestSkippedComputation:
    @pytest.mark.parametrize("threshold", [0.0, 0.15, 0.3, 2.0])
    def test_each_image_gets_the_first_confident_exit_and_later_stages_see_what_is_left(self, lesson, threshold):
        torch.manual_seed(0)
        net = lesson.ExitNet().eval()
        for head in net.heads:
            head[-1].weight.data *= 4
        x, seen = torch.randn(37, 1, 28, 28), []
        with torch.no_grad():
            everything = net(x)
            for stage in net.stages:
                stage.register_forward_pre_hook(lambda m, args: seen.append(len(args[0])))
            logits, exits = lesson.route(net, x, threshold)
        for row in range(len(x)):
            sure = [z[row].softmax(0).max() >= threshold for z in everything]
            wanted = sure.index(True) if any(sure) else 2
            assert exits[row] == wanted
            assert torch.allclose(logits[row], everything[wanted][row], atol=1e-4)
        assert seen == [int((exits >= k).sum()) for k in range(3) if (exits >= k).any()]

    def test_stochastic_depth_keeps_the_whole_block_of_a_row_or_nothing(self, lesson):
        net = lesson.StochasticDepth(nn.Identity(), survive=0.5)
        torch.manual_seed(0)
        x = torch.ones(200, 3, 2)
        added = net(x) - x
        assert set(added.flatten().tolist()) == {0.0, 2.0}
        assert bool((added.flatten(1).amax(1) == added.flatten(1).amin(1)).all())
        for survive in (0.0, 1.5):
            with pytest.raises(ValueError, match="above 0"):
                lesson.StochasticDepth(nn.Identity(), survive=survive)

    def test_a_gated_net_is_copied_after_its_loss_and_runs_under_autocast(self, lesson):
        net = nn.Sequential(lesson.Gated(nn.Linear(4, 4), 4), nn.Linear(4, 3))
        lesson.gate_loss(net, torch.randn(5, 4), torch.zeros(5, dtype=torch.int64), penalty=0.3).backward()
        copied = copy.deepcopy(net).eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert copied(torch.randn(5, 4)).shape == (5, 3)

    def test_a_shut_gate_runs_nothing_and_an_open_one_everything(self, lesson):
        block, ran = nn.Linear(4, 4), []
        net = lesson.Gated(block, 4).eval()
        net.gate.weight.data.zero_()
        x = torch.randn(5, 4)
        with torch.no_grad():
            opened = x + torch.sigmoid(torch.tensor(1.0)) * block(x)
            block.register_forward_hook(lambda m, args, out: ran.append(len(out)))
            for bias, wanted in ((-1.0, x), (1.0, opened)):
                net.gate.bias.fill_(bias)
                assert torch.allclose(net(x), wanted, atol=1e-6)
        assert ran == [0, 5]


def test_what_is_no_partition_of_the_parameters_is_named(lesson):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    first = list(net[0].parameters())
    lesson.assert_partition(net, [{"params": first}])
    wrong = {
        r"1\.bias in 1 group": [net[1].bias],  # frozen
        r"0\.bias in 2 group": [net[0].bias],
        "not the model's": [nn.Parameter(torch.ones(1))],
    }
    for message, parameters in wrong.items():
        with pytest.raises(ValueError, match=message):
            lesson.assert_partition(net, [{"params": first}, {"params": parameters}])
    with pytest.raises(TypeError, match="must be a list"):
        lesson.assert_partition(net, [{"params": net.parameters()}])


class TestReplacing:
    def test_names_order_modes_dtypes_and_sharing_stay(self, lesson):
        norm = nn.BatchNorm2d(4).double().eval()
        root = nn.ModuleDict({"a": nn.Sequential(nn.Conv2d(1, 4, 3), norm), "b": nn.ModuleList([norm, nn.ReLU()])})
        root.c = nn.BatchNorm2d(4, affine=False).double()
        root.d = nn.BatchNorm2d(4).requires_grad_(False)
        before = [name for name, _ in root.named_modules(remove_duplicate=False)]
        names = lesson.replace_modules(root, nn.BatchNorm2d, lambda old: nn.GroupNorm(2, old.num_features))
        assert names == ["a.1", "b.0", "c", "d"]
        assert [name for name, _ in root.named_modules(remove_duplicate=False)] == before
        assert root["a"][1] is root["b"][0]
        assert [module.weight.dtype for module in (root["a"][1], root.c, root.d)] == [
            *[torch.float64] * 2,
            torch.float32,
        ]
        assert [module.training for module in (root["a"][1], root.c)] == [False, True]
        assert [module.weight.requires_grad for module in (root["a"][1], root.c, root.d)] == [True, True, False]

    def test_only_the_outermost_below_the_root_is_replaced(self, lesson):
        root = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU())), nn.ReLU())
        assert lesson.replace_modules(root, nn.Sequential, lambda old: nn.Identity()) == ["0"]
        assert list(dict(root.named_modules())) == ["", "0", "1"]


def test_a_lazy_scale_takes_channels_and_dtype_from_its_input_or_from_what_is_loaded(lesson):
    x = torch.randn(1, 4, 5, dtype=torch.float64)
    scale, loaded = lesson.LazyScale(), lesson.LazyScale()
    assert torch.equal(scale(x), x)
    assert (scale.factor.shape, scale.factor.dtype) == ((4,), torch.float64)
    loaded.load_state_dict({"factor": torch.tensor([2.0, 3.0])})
    assert torch.equal(loaded(torch.ones(1, 2)), torch.tensor([[2.0, 3.0]]))


class TestRemap:
    def test_every_key_is_accounted_for(self, lesson):
        state = {f"net.{i}.{k}": torch.full((2,), float(i)) for i in (0, 1, 10) for k in ("w", "b")}
        state |= {"step": torch.tensor(3), "stay": torch.zeros(1), "odd": torch.zeros(1), "wide": torch.zeros(3)}
        given = dict(state)
        rules = [
            lesson.Rule(r"net\.(\d+)\.(\w)", r"layers.\1.\2"),
            lesson.Rule(r"layers\.1\.b", r"layers.1.b", torch.neg),
            lesson.Rule("step", None),
        ]
        target = {f"layers.{i}.{k}": torch.zeros(2) for i in (0, 1, 10, 11) for k in ("w", "b")}
        target |= {"stay": torch.zeros(1), "wide": torch.zeros(2)}
        result, report = lesson.remap_state_dict(state, rules, target)
        assert report.kept == ["stay", "wide"]
        assert report.dropped == ["step"]
        assert report.left == ["odd"]
        assert report.missing == ["layers.11.w", "layers.11.b"]
        assert report.mismatched == ["wide"]
        assert report.changed == {f"layers.{i}.{k}": [f"net.{i}.{k}"] for i in (0, 1, 10) for k in ("w", "b")}
        assert (float(result["layers.10.w"][0]), float(result["layers.1.b"][0])) == (10, -1)
        assert state == given

    @pytest.mark.parametrize("found", [{"left"}, {"missing"}, {"mismatched"}, set()])
    def test_a_report_is_complete_if_nothing_is_left_missing_or_mismatched(self, lesson, found):
        state = {"a": torch.zeros(2)} | ({"b": torch.zeros(1)} if "left" in found else {})
        target = {"a": torch.zeros(3 if "mismatched" in found else 2)} | dict.fromkeys(
            found & {"missing"}, torch.ones(1)
        )
        _, report = lesson.remap_state_dict(state, [], target)
        assert report.complete is not bool(found)

    def test_a_rule_may_swap_two_keys_split_one_and_be_left_out(self, lesson):
        state = {"a.b": torch.zeros(1), "b.a": torch.arange(4)}
        swap = lesson.Rule(r"(\w)\.(\w)", r"\2.\1")
        split = lesson.Rule(r"a\.b", ("c", "d"), lambda tensor: tensor.chunk(2))
        missing = lesson.Rule(r"module\.(.+)", r"\1", optional=True)
        swapped, report = lesson.remap_state_dict(state, [missing, swap, split], {})
        assert {key: tensor.tolist() for key, tensor in swapped.items()} == {"b.a": [0], "c": [0, 1], "d": [2, 3]}
        assert report.left == ["b.a", "c", "d"]

    @pytest.mark.parametrize(
        ("rule", "message"),
        [
            ((r"(a|b)", "c"), "both claim 'c'"),
            (((r"a()", r"(\w?)"), "c"), "2 keys that belong together"),
            (("a", ("c", "d"), lambda t: (t, t, t)), "3 tensors for 2 targets"),
            (("a", ("c", "d"), lambda t: t), "1 tensors for 2 targets"),
            (("a", ("c", "c"), lambda t: (t, t)), "two of the targets are the same"),
            ((("a", "b"), "c"), "2 tensors for 1 targets"),
        ],
    )
    def test_errors_say_what_was_wrong(self, lesson, rule, message):
        with pytest.raises(ValueError, match=message):
            lesson.remap_state_dict({"a": torch.ones(1), "b": torch.ones(1)}, [lesson.Rule(*rule)], {})

    def test_lazy_parameters_and_extra_state_have_no_shape_to_compare(self, lesson):
        state = nn.Linear(2, 3).state_dict() | {"_extra_state": {"scale": 2}}
        target = {**nn.LazyLinear(3).state_dict(), "_extra_state": {"scale": 1}}
        result, report = lesson.remap_state_dict(state, [], target)
        assert report.complete
        assert result["_extra_state"] == {"scale": 2}

    def test_split_and_fused_agree_both_ways(self, lesson):
        torch.manual_seed(0)
        sizes = {"channels": 3, "classes": 6, "grid": 3, "width": 8, "depth": 11}
        split, fused = lesson.SplitViT(**sizes).eval(), lesson.FusedViT(**sizes).eval()
        wrapped = {f"module.{key}": value for key, value in split.state_dict().items()}
        state, _ = lesson.remap_state_dict(wrapped, lesson.SPLIT_TO_FUSED, fused.state_dict())
        fused.load_state_dict(state)
        x = torch.randn(2, 3, 12, 12)
        assert torch.allclose(split(x), fused(x), atol=1e-4)
        back = {f"_orig_mod.{k}": v for k, v in {**fused.state_dict(), "steps": torch.tensor(1)}.items()}
        again = lesson.convert(back, split.state_dict(), range(6))
        assert all(torch.equal(again[key], value) for key, value in split.state_dict().items())


@pytest.mark.parametrize("size", [5, 20])
def test_positions_are_resized_like_an_image(lesson, size):
    """Pillow's bicubic is the oracle, which smooths before it shrinks."""
    position = torch.randn(1, 14 * 14, 3)
    resized = lesson.resize_positions(position, size)
    for channel in range(3):
        image = Image.fromarray(position[0, :, channel].reshape(14, 14).numpy())
        wanted = torch.from_numpy(np.array(image.resize((size, size), Image.Resampling.BICUBIC)))
        assert torch.allclose(resized[0, :, channel].reshape(size, size), wanted, atol=1e-5)
    half = lesson.resize_positions(torch.cat([torch.ones(1, 1, 3), position], dim=1).bfloat16(), size, tokens=1)
    assert (half.shape, half.dtype) == ((1, 1 + size**2, 3), torch.bfloat16)
