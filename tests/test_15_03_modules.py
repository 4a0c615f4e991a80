"""What 15-03 builds: the small module system, routing, groups, surgery, against PyTorch's own and brute force."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from course.lesson_code import answers, definitions

CELLS = """
    mini-tables mini-walk mini-module mini-module-list split-vit two-vits first-renames rule split-to-fused
    rule-find rule-complete rule-results rule-tensors rule-entries apply-rule remap stems moves tied-net
    exit-net exit-class exit-route skip residual gate gate-loss flops-of assert-partition norms successor
    replace-modules lazy-scale lazy-scale-class norm-linear
"""


@pytest.fixture(scope="module")
def lesson():
    # list-bug defines what mini-module-list shows
    cells = ["mini-net", "list-bug", *CELLS.split()]
    names = definitions("15-03", "device", "helpers", *cells)
    names.update(answers("15-03", given=names))
    return SimpleNamespace(**names)


class TestMiniModule:
    def test_it_registers_like_nn_module(self, lesson):
        def build(base, linear):
            root = base()
            root.a, root.b = linear(), base()
            root.b.c = linear()
            root.b.again = root.a
            root.scale = nn.Parameter(torch.ones(()))
            root.nothing = None
            root.register_buffer("seen", torch.zeros(0, dtype=torch.int64))
            root.register_buffer("none", None)
            root.plain = torch.ones(1)
            return root

        def mini():
            made = lesson.MiniModule()
            made.weight = nn.Parameter(torch.zeros(2, 2))
            return made

        def torchs():
            made = nn.Module()
            made.weight = nn.Parameter(torch.zeros(2, 2))
            return made

        ours, theirs = build(lesson.MiniModule, mini), build(nn.Module, torchs)
        assert set(ours.state_dict()) == set(theirs.state_dict())
        assert [p.shape for p in ours.parameters()] == [p.shape for p in theirs.parameters()]
        names = [name for name, _ in ours.named_modules()]
        assert names == [name for name, _ in theirs.named_modules(remove_duplicate=False)]
        assert ours.seen.dtype == torch.int64
        assert ours.none is None
        with pytest.raises(AttributeError, match="nowhere"):
            ours.nowhere  # noqa: B018

    def test_train_reaches_every_module_and_returns_the_root(self, lesson):
        net = lesson.MiniNet()
        assert net.train(False) is net
        assert not any(module.training for _, module in net.named_modules())
        net.head.training = True
        net.train(True)
        assert all(module.training for _, module in net.named_modules())

    def test_the_state_shares_memory(self, lesson):
        net = lesson.MiniNet()
        state = net.state_dict()
        net.forward(torch.randn(2, 4))
        assert state["head.calls"] == 1
        assert not state["head.weight"].requires_grad

    def test_a_list_is_not_entered_and_a_module_list_is(self, lesson):
        assert len(lesson.ListNet().parameters()) == 2
        assert len(lesson.ListNet(lesson.MiniModuleList).parameters()) == 10


class TestRouting:
    @pytest.mark.parametrize("threshold", [0.0, 0.15, 0.3, 0.5, 1.0, 2.0])
    @pytest.mark.parametrize("rows", [1, 2, 37])
    def test_each_image_gets_the_first_confident_exit(self, lesson, threshold, rows):
        torch.manual_seed(rows)
        net = lesson.ExitNet().eval()
        for head in net.heads:
            head[-1].weight.data *= 4
        x = torch.randn(rows, 1, 28, 28)
        with torch.no_grad():
            logits, exits = lesson.route(net, x, threshold)
            everything = net(x)
        for row in range(rows):
            sure = [z[row].softmax(0).max() >= threshold for z in everything]
            wanted = sure.index(True) if any(sure) else 2
            assert exits[row] == wanted
            assert torch.allclose(logits[row], everything[wanted][row], atol=1e-4)

    def test_later_stages_see_only_what_is_left(self, lesson):
        net = lesson.ExitNet().eval()
        seen = []
        for stage in net.stages:
            stage.register_forward_pre_hook(lambda m, args: seen.append(len(args[0])))
        with torch.no_grad():
            _, exits = lesson.route(net, torch.randn(64, 1, 28, 28), 0.2)
        assert seen == [int((exits >= k).sum()) for k in range(3) if (exits >= k).any()]


class TestStochasticDepth:
    def test_a_row_keeps_the_whole_block_or_nothing(self, lesson):
        net = lesson.StochasticDepth(nn.Identity(), survive=0.5)
        torch.manual_seed(0)
        x = torch.ones(200, 3, 2)
        added = net(x) - x
        assert set(added.flatten().tolist()) == {0.0, 2.0}
        assert bool((added.flatten(1).amax(1) == added.flatten(1).amin(1)).all())

    def test_a_block_that_never_survives_is_refused(self, lesson):
        for survive in (0.0, -0.5, 1.5):
            with pytest.raises(ValueError, match="above 0"):
                lesson.StochasticDepth(nn.Identity(), survive=survive)

    def test_a_gated_net_is_copied_after_its_loss_and_runs_under_autocast(self, lesson):
        net = nn.Sequential(lesson.Gated(nn.Linear(4, 4), 4), nn.Linear(4, 3))
        lesson.gate_loss(net, torch.randn(5, 4), torch.zeros(5, dtype=torch.int64), penalty=0.3).backward()
        copied = copy.deepcopy(net).eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert copied(torch.randn(5, 4)).shape == (5, 3)

    def test_a_shut_gate_runs_nothing_and_an_open_one_everything(self, lesson):
        block = nn.Linear(4, 4)
        net = lesson.Gated(block, 4).eval()
        net.gate.weight.data.zero_()
        ran = []
        block.register_forward_hook(lambda m, args, out: ran.append(len(out)))
        x = torch.randn(5, 4)
        with torch.no_grad():
            net.gate.bias.fill_(-1.0)
            assert torch.equal(net(x), x)
            net.gate.bias.fill_(1.0)
            assert torch.allclose(net(x), x + torch.sigmoid(torch.tensor(1.0)) * block(x), atol=1e-6)
        assert ran == [0, 5, 5]


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(3, 5, bias=False), (3,)),
        (nn.Linear(3, 5), (2, 0, 3)),
        (nn.Conv1d(6, 4, 5, groups=2, stride=3), (2, 6, 11)),
        (nn.Conv2d(3, 6, (1, 5), groups=3, padding="same"), (1, 3, 5, 7)),
        (nn.Conv3d(1, 2, 2, dilation=2), (2, 1, 4, 5, 6)),
    ],
)
def test_flops_equal_the_counter(lesson, module, shape):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        output = module(torch.randn(shape))
    assert lesson.flops_of(module, output) == counter.get_total_flops()


class TestPartition:
    def test_param_groups_partition(self, lesson):
        net = lesson.SplitViT()
        groups = lesson.param_groups(net, 0.1, 0.05, ["patch", "blocks.0", "blocks.1", "norm", "head"], 0.5)
        lesson.assert_partition(net, groups)
        torch.optim.AdamW(groups).step()

    def test_a_frozen_one_a_stranger_and_a_doublet_are_named(self, lesson):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
        first = list(net[0].parameters())
        lesson.assert_partition(net, [{"params": first}])
        with pytest.raises(ValueError, match=r"1\.bias in 1 group"):
            lesson.assert_partition(net, [{"params": first}, {"params": [net[1].bias]}])
        with pytest.raises(ValueError, match=r"0\.bias in 2 group"):
            lesson.assert_partition(net, [{"params": first}, {"params": [net[0].bias]}])
        with pytest.raises(TypeError, match="must be a list"):
            lesson.assert_partition(net, [{"params": net.parameters()}])
        with pytest.raises(ValueError, match="not the model's"):
            lesson.assert_partition(net, [{"params": [*first, nn.Parameter(torch.ones(1))]}])


class TestReplacing:
    def test_names_order_modes_dtypes_and_sharing(self, lesson):
        norm = nn.BatchNorm2d(4).double().eval()
        root = nn.ModuleDict({"a": nn.Sequential(nn.Conv2d(1, 4, 3), norm), "b": nn.ModuleList([norm, nn.ReLU()])})
        root.c = nn.BatchNorm2d(4, affine=False)
        before = [name for name, _ in root.named_modules(remove_duplicate=False)]
        names = lesson.replace_modules(root, nn.BatchNorm2d, lambda old: nn.GroupNorm(2, old.num_features))
        assert names == ["a.1", "b.0", "c"]
        assert [name for name, _ in root.named_modules(remove_duplicate=False)] == before
        assert root["a"][1] is root["b"][0]
        assert root["a"][1].weight.dtype == torch.float64
        assert not root["a"][1].training
        assert root.c.training
        assert not any(isinstance(m, nn.BatchNorm2d) for m in root.modules())

    def test_only_the_outermost_is_replaced(self, lesson):
        root = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU())), nn.ReLU())
        assert lesson.replace_modules(root, nn.Sequential, lambda old: nn.Identity()) == ["0"]
        assert list(dict(root.named_modules())) == ["", "0", "1"]

    def test_a_norm_without_parameters_and_a_frozen_one(self, lesson):
        root = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4).requires_grad_(False)).double()
        lesson.replace_modules(root, nn.BatchNorm1d, lambda old: nn.GroupNorm(2, old.num_features))
        assert root(torch.zeros(3, 4, dtype=torch.float64)).dtype == torch.float64
        assert [p.requires_grad for p in root.parameters()] == [True, True, False, False]

    def test_a_linear_layer_by_a_lazy_one(self, lesson):
        root = nn.Sequential(nn.Linear(3, 4).double(), nn.ReLU())
        weight = root[0].weight.detach().clone()
        assert lesson.replace_modules(root, nn.Linear, lesson.LazyNormLinear.of) == ["0"]
        root(torch.randn(5, 3, dtype=torch.float64))
        assert type(root[0]) is lesson.NormLinear
        assert torch.equal(root[0].direction, weight)

    def test_the_root_stays(self, lesson):
        root = nn.Sequential(nn.ReLU())
        assert lesson.replace_modules(root, nn.Sequential, lambda old: nn.Identity()) == []
        assert isinstance(root[0], nn.ReLU)


class TestLazyScale:
    @pytest.mark.parametrize("shape", [(2, 3), (1, 4, 5), (2, 1, 3, 3)])
    def test_it_becomes_a_scale(self, lesson, shape):
        x = torch.randn(shape, dtype=torch.float64)
        scale = lesson.LazyScale()
        assert torch.equal(scale(x), x)
        assert type(scale) is lesson.Scale
        assert scale.factor.shape == (shape[1],)
        assert scale.factor.dtype == torch.float64

    def test_what_is_loaded_is_kept(self, lesson):
        scale = lesson.LazyScale()
        scale.load_state_dict({"factor": torch.tensor([2.0, 3.0])})
        assert torch.equal(scale(torch.ones(1, 2)), torch.tensor([[2.0, 3.0]]))


class TestRemap:
    def test_every_key_is_accounted_for(self, lesson):
        state = {f"net.{i}.{k}": torch.full((2,), float(i)) for i in (0, 1, 10) for k in ("w", "b")}
        state |= {"step": torch.tensor(3), "stay": torch.zeros(1), "odd": torch.zeros(1)}
        rules = [lesson.Rule(r"net\.(\d+)\.(\w)", r"layers.\1.\2"), lesson.Rule("step", None)]
        target = {f"layers.{i}.{k}": torch.zeros(2) for i in (0, 1, 10, 11) for k in ("w", "b")}
        target["stay"] = torch.zeros(1)
        result, report = lesson.remap_state_dict(state, rules, target)
        assert report.kept == ["stay"]
        assert report.dropped == ["step"]
        assert report.left == ["odd"]
        assert report.missing == ["layers.11.w", "layers.11.b"]
        assert report.changed["layers.10.b"] == ["net.10.b"]
        assert len(report.changed) == 6
        assert float(result["layers.10.w"][0]) == 10
        assert "net.0.w" in state
        assert "layers.0.w" not in state

    def test_a_chain_of_rules_remembers_the_first_key(self, lesson):
        rules = [lesson.Rule(r"module\.(.+)", r"\1"), lesson.Rule("a", ("b", "c"), lambda t: t.chunk(2))]
        result, report = lesson.remap_state_dict(
            {"module.a": torch.arange(4)}, rules, dict.fromkeys("bc", torch.zeros(2))
        )
        assert report.changed == {"b": ["module.a"], "c": ["module.a"]}
        assert result["c"].tolist() == [2, 3]

    def test_a_rule_may_change_a_tensor_under_its_own_key(self, lesson):
        result, report = lesson.remap_state_dict(
            {"a": torch.ones(2)}, [lesson.Rule("a", "a", torch.neg)], {"a": torch.zeros(2)}
        )
        assert result["a"].tolist() == [-1, -1]
        assert report.changed == {"a": ["a"]}
        assert not report.kept

    @pytest.mark.parametrize(
        ("rule", "message"),
        [
            ((r"x", "y"), "matches no key"),
            ((r"(a|b)", "c"), "both claim 'c'"),
            ((r"a", "b"), "both claim 'b'"),
            ((("a", "nowhere"), "c"), "2 keys that belong together"),
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

    def test_a_tensor_of_another_shape_is_reported_and_nothing_else(self, lesson):
        target = {"a": torch.zeros(2), "c": torch.zeros(5)}
        state = {"a": torch.zeros(3), "b": torch.zeros(4)}
        _, report = lesson.remap_state_dict(state, [lesson.Rule("b", "c")], target)
        assert report.mismatched == ["a", "c"]
        assert not report.left
        assert not report.missing
        assert not report.complete
        assert lesson.remap_state_dict({"a": torch.ones(2)}, [], {"a": torch.zeros(2)})[1].complete

    def test_lazy_parameters_and_extra_state_have_no_shape_to_compare(self, lesson):
        state = nn.Linear(2, 3).state_dict()
        state["_extra_state"] = {"scale": 2}
        target = {**nn.LazyLinear(3).state_dict(), "_extra_state": {"scale": 1}}
        result, report = lesson.remap_state_dict(state, [], target)
        assert report.complete
        assert result["_extra_state"] == {"scale": 2}

    def test_an_optional_rule_may_match_nothing_and_is_applied_if_it_does(self, lesson):
        rule = lesson.Rule(r"module\.(.+)", r"\1", optional=True)
        for key in ("a", "module.a"):
            result, report = lesson.remap_state_dict({key: torch.ones(2)}, [rule], {"a": torch.zeros(2)})
            assert list(result) == ["a"]
            assert report.complete

    def test_one_tensor_gets_two_names(self, lesson):
        net = lesson.Tied()
        tensor = torch.randn(10, 4)
        rule = lesson.Rule(r"embed\.weight", ("embed.weight", "head.weight"))
        result, report = lesson.remap_state_dict({"embed.weight": tensor}, [rule], net.state_dict())
        assert report.complete
        net.load_state_dict(result)
        assert net.head.weight is net.embed.weight
        assert torch.equal(net.head.weight, tensor)

    def test_a_rule_may_swap_two_keys(self, lesson):
        state = {"a.b": torch.zeros(1), "b.a": torch.ones(1)}
        swapped, report = lesson.remap_state_dict(state, [lesson.Rule(r"(\w)\.(\w)", r"\2.\1")], state)
        assert swapped["a.b"] == 1
        assert swapped["b.a"] == 0
        assert report.changed == {"b.a": ["a.b"], "a.b": ["b.a"]}

    @pytest.mark.parametrize("depth", [1, 11])
    def test_split_and_fused_agree_both_ways(self, lesson, depth):
        torch.manual_seed(depth)
        sizes = {"channels": 3, "classes": 6, "grid": 3, "width": 8, "depth": depth}
        split, fused = lesson.SplitViT(**sizes).eval(), lesson.FusedViT(**sizes).eval()
        wrapped = {f"module.{key}": value for key, value in split.state_dict().items()}
        state, report = lesson.remap_state_dict(wrapped, lesson.SPLIT_TO_FUSED, fused.state_dict())
        fused.load_state_dict(state)
        assert not report.left
        assert not report.missing
        x = torch.randn(2, 3, 12, 12)
        assert torch.allclose(split(x), fused(x), atol=1e-4)
        back = {f"_orig_mod.{k}": v for k, v in {**fused.state_dict(), "steps": torch.tensor(1)}.items()}
        again = lesson.convert(back, split.state_dict(), range(6))
        assert all(torch.equal(again[key], value) for key, value in split.state_dict().items())


class TestMoves:
    def test_the_stem(self, lesson):
        weight, grey = torch.randn(4, 3, 2, 2), torch.randn(1, 1, 5, 5)
        wanted = F.conv2d(grey.repeat(1, 3, 1, 1), weight)
        assert torch.allclose(F.conv2d(grey, lesson.fold_stem(weight)), wanted, atol=1e-5)

    def test_positions_are_resized_like_an_image(self, lesson):
        ramp = torch.arange(16.0).reshape(1, 16, 1)
        assert torch.equal(lesson.resize_positions(ramp, 4), ramp)
        bigger = lesson.resize_positions(ramp, 8).reshape(8, 8)
        assert torch.allclose(bigger, as_pillow_does(ramp.reshape(4, 4), 8), atol=1e-5)

    def test_a_smaller_grid_is_that_of_an_image_library(self, lesson):
        position = torch.randn(1, 14 * 14, 3)
        smaller = lesson.resize_positions(position, 5)
        for channel in range(3):
            wanted = as_pillow_does(position[0, :, channel].reshape(14, 14), 5)
            assert torch.allclose(smaller[0, :, channel].reshape(5, 5), wanted, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_a_class_token_and_the_dtype_stay(self, lesson, dtype):
        position = torch.randn(1, 17, 3).to(dtype)
        resized = lesson.resize_positions(position, 7, tokens=1)
        assert resized.shape == (1, 50, 3)
        assert resized.dtype == dtype
        assert torch.equal(resized[:, 0], position[:, 0])
        assert torch.equal(resized[:, 1:], lesson.resize_positions(position[:, 1:], 7))
        with pytest.raises(ValueError, match="class token"):
            lesson.resize_positions(position, 7)

    def test_a_grey_stem_for_colours_and_back(self, lesson):
        weight, grey = torch.randn(4, 1, 2, 2), torch.randn(1, 1, 5, 5)
        spread = lesson.spread_stem(weight)
        assert torch.allclose(F.conv2d(grey.repeat(1, 3, 1, 1), spread), F.conv2d(grey, weight), atol=1e-5)
        assert torch.allclose(lesson.fold_stem(spread), weight)


def as_pillow_does(image, size):
    """Pillow's bicubic, which smooths before it shrinks."""
    resized = Image.fromarray(image.numpy()).resize((size, size), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(resized))


def test_a_summary_leaves_a_deep_net_as_it_was(lesson):
    net = lesson.FusedViT(depth=1)
    before = copy.deepcopy(net.state_dict())
    rows = lesson.summarize(net, torch.randn(2, 1, 28, 28))
    assert net.training
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert [row["name"] for row in rows][:1] == ["patch"]
