"""The pretended accelerator: planted mistakes are refused as PyTorch refuses them, right code computes as on a CPU."""

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def pretended_accelerator():
    """As it is imported: it takes torch._dynamo along, 2 s that no other test needs."""
    from shared import pretended

    return pretended.pretended_accelerator()


SETUP = """
import copy, io
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(3)
x = torch.randn(4, 3, device=device)
w = torch.randn(4, 3, device=device, requires_grad=True)
net = nn.Sequential(nn.LazyLinear(5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).to(device); net(x)
labels = torch.tensor([0, 1, 1, 0], device=device)

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, back=lambda grad: 2 * grad):
        ctx.back = back
        return 2 * a
    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad), None
"""

TWO = "Expected all tensors to be on the same device"
MISTAKES = {
    "x + torch.ones(4, 3)": TWO,
    "x.numpy()": "can't convert .* device type tensor to numpy. Use Tensor.cpu",
    "torch.ones(4)[labels]": "indices should be either on cpu",
    "total = torch.zeros(()); total += x.sum()": TWO,
    "torch.add(x, x, out=torch.empty(4, 3))": TWO,
    "torch.stack([x.sum(), torch.tensor(1.0)])": TWO,
    "torch.randn(3, device=device, generator=torch.Generator())": "generator",
    "x.clone().normal_(generator=torch.Generator())": "generator",
    "Double.apply(w, lambda grad: grad * torch.full((4, 3), 2.0)).sum().backward()": TWO,
    "Double.apply(w, lambda grad: torch.ones(4, 3)).sum().backward()": "at index 0 - expected device .* but got cpu",
    "w.grad = torch.ones(4, 3)": "located on a different device",
    "ThreadPoolExecutor(1).submit(lambda: x + torch.ones(4, 3)).result(60)": TWO,
    "torch.func.vmap(lambda a: a @ torch.ones(3))(x)": TWO,
}

# each ends in `result`
RIGHT = {
    "training, clipping and sequences": """
optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
loss = F.cross_entropy(net(x), labels); loss.backward()
norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=True); optimizer.step()
packed = nn.utils.rnn.pack_padded_sequence(x[..., None], torch.tensor([3, 2, 2, 1]), batch_first=True)
result = [norm, *net.parameters(), nn.GRU(1, 2).to(device)(packed)[1]]""",
    "all ways to move": """
cpu = torch.ones(2, 2)
ways = [cpu.to(device), cpu.to(device=device), cpu.to(x), cpu.to(device, torch.float32, True),
        cpu.double().to(device, torch.float32), cpu.to(device, memory_format=torch.contiguous_format), cpu.int().to(x),
        torch.as_tensor(cpu, device=device), x.new_tensor([[1.0, 1], [1, 1]])]
assert all(way.device == x.device for way in ways), [way.device for way in ways]
back = [x.cpu(), x.to("cpu"), x.to(cpu), x.to("cpu", torch.float64), x.detach().to(device="cpu", copy=True)]
assert all(way.device == cpu.device for way in back)
assert x.to(device) is x and cpu.to("cpu") is cpu and x.to(x.device, copy=True) is not x
assert x.to("meta").device.type == "meta"
result = sum(ways)""",
    "indices": """
rows = torch.tensor([0, 2])
y = x.clone(); y[rows] = 0.0; y[rows.to(device)] += 1; y[y > 1] = torch.tensor(5.0); y[0] = torch.ones(3, device=device)
assert x.numpy(force=True).shape == (4, 3)
result = [x[rows], x[labels], x[x > 0], x[[0, 1]], x[rows.to(device), 0], x[:, None], x[0, labels[0]], y]""",
    "numbers on the CPU": """
y = x * torch.tensor(2.0) + np.float64(1.5) - torch.tensor(1.0, dtype=torch.float64); y.mul_(torch.tensor(0.5))
scale = torch.tensor(2.0, requires_grad=True); (x * scale).sum().backward()
result = [torch.where(y > 0, y, torch.tensor(0.0)).clamp(max=torch.tensor(1.0)), scale.grad]""",
    "factories": """
made = [torch.zeros(2, device=device), torch.arange(2.0, device=device), torch.eye(2, device=device)[0],
        torch.ones_like(x[0, :2]), x.new_zeros(2), torch.tensor([1.0, 2.0], device=device),
        torch.zeros_like(torch.ones(2), device=device), torch.tensor(x[0, :2].tolist(), device=device)]
assert all(m.device == x.device for m in made), [m.device for m in made]
assert torch.zeros(2).device == torch.zeros_like(x, device="cpu").device == torch.tensor([x.sum()]).device
with torch.device(device):
    assert torch.zeros(2).device == torch.tensor([1.0]).device == nn.Linear(2, 2).weight.device == x.device
with torch.device("meta"):
    assert nn.Linear(2, 2).weight.device.type == "meta"
empty = nn.Linear(3, 2, device="meta").to_empty(device=device)
generator = torch.Generator(device).manual_seed(1); torch.randn(3, device=device, generator=generator)
assert isinstance(generator, torch.Generator) and generator.device.type == torch.device(device).type
shuffled = torch.randperm(4, generator=torch.Generator().manual_seed(1))
result = [*made, empty.weight.data.zero_(), shuffled.to(device)]""",
    "out= and in place": """
out = torch.empty(4, 3, device=device); torch.mul(x, 2, out=out); out.add_(x).relu_(); out.copy_(torch.ones(4, 3))
host = torch.empty(4, 3); host.copy_(x); host += torch.ones(4, 3)
result = [out, host]""",
    "backward, second derivatives and custom functions": """
(g,) = torch.autograd.grad((w.cpu() ** 3).sum() + (w * x).sum(), w, create_graph=True)
(h,) = torch.autograd.grad(g.sum(), w)
assert g.device == h.device == w.device
leaf = torch.ones(3, requires_grad=True); (leaf.to(device) * x).sum().backward()
assert leaf.grad.device.type == "cpu"
Double.apply(w).sum().backward()
result = [g, h, leaf.grad, w.grad]""",
    "files": """
file = io.BytesIO(); torch.save({"net": net.state_dict(), "x": x}, file)
def load(**options): file.seek(0); return torch.load(file, **options)
assert load()["x"].device == load(map_location=device)["x"].device == x.device
assert load(map_location="cpu")["x"].device.type == "cpu"
other = copy.deepcopy(net); other.load_state_dict(load(map_location="cpu")["net"])
result = [other(x), copy.copy(x)]""",
    "torch.func": """
from torch.func import functional_call, grad, jacrev, vmap
class Cube(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(lambda x: x**3)
    setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    backward = staticmethod(lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2)
loss = lambda p, a: functional_call(net.eval(), p, (a,)).sum()
p = dict(net.named_parameters())
per_sample = vmap(grad(lambda p, a: loss(p, a[None])), (None, 0))(p, x)
result = [*per_sample.values(), jacrev(torch.sin)(x[0]), vmap(grad(Cube.apply))(x[0]),
          grad(lambda a: a.to(device).sin().sum())(x[0].cpu())]""",
    "fake tensors, tracing, torch.fx and torch.export": """
with torch._subclasses.fake_tensor.FakeTensorMode():
    assert torch.ones(2).to(device).device == torch.ones(2, device=device).device
net.eval()
traced, exported = torch.fx.symbolic_trace(net), torch.export.export(net, (x,)).module()
def darker(x): return torch.cond(x.mean() > 2, lambda x: x / 2, lambda x: x.clone(), (x,))
result = [torch.jit.trace(net, x)(x), traced(x), exported(x), net(x) + x.new_ones(2),
          torch.cond(x.mean() > 9, lambda a: a * 2, darker, (x,))]""",
}


def run(source: str, device: object) -> dict:
    names = {"device": device}
    exec(SETUP + "\n" + source, names)
    return names


def on_cpu(value):
    return [on_cpu(v) for v in value] if isinstance(value, list) else value.detach().cpu()


@pytest.fixture(params=["pretended", "real"])
def accelerator(request):
    """The pretended one and, where there is one, a GPU, which knows what is right."""
    if request.param == "pretended":
        with pretended_accelerator() as device:
            yield device
    elif torch.cuda.is_available():
        yield torch.device("cuda")
    else:
        pytest.skip("this machine has no CUDA device")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(mistake, accelerator):
    run("", accelerator)  # what comes before is innocent
    with pytest.raises((RuntimeError, TypeError), match=MISTAKES[mistake]):
        run(mistake, accelerator)


def test_float64_is_refused_as_on_a_mac():
    with pretended_accelerator() as device:
        for source in ("x.to(dtype=torch.float64)", "torch.tensor(np.ones(3), device=device)", "net.double()"):
            with pytest.raises(TypeError, match="Cannot convert a MPS Tensor to float64 dtype"):
                run(source, device)


@pytest.mark.parametrize("name", RIGHT)
def test_right_code_computes_what_the_cpu_computes(name, accelerator):
    want = on_cpu(run(RIGHT[name], "cpu")["result"])
    got = on_cpu(run(RIGHT[name], accelerator)["result"])
    if accelerator.type != "cuda":  # whose arithmetic is another one
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_tensor_says_where_it_is_and_nothing_is_left_of_it():
    before = {name: vars(torch.Tensor).get(name) for name in ("device", "to", "numpy", "grad", "cpu", "new_zeros")}
    factories = torch.zeros, torch.tensor, torch.Generator, threading.Thread.start
    known = dict(torch.jit._builtins._get_builtin_table())  # functions by their id, which a later one may get
    with pretended_accelerator() as device:
        kept = torch.ones(2, device=device)
        assert device == torch.device("mps") != kept.device == torch.device("mps:0")
        assert "device='mps:0'" in repr(kept)
        assert kept[:1].device == nn.Parameter(kept).device == F.relu(kept).device == kept.device
    assert kept.device.type == "cpu"
    assert kept.numpy().sum() == (kept + torch.ones(2)).sum() / 2
    assert {name: vars(torch.Tensor).get(name) for name in before} == before
    assert (torch.zeros, torch.tensor, torch.Generator, threading.Thread.start) == factories
    assert torch.jit._builtins._get_builtin_table() == known


def test_a_forked_worker_cannot_use_the_device(monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # else 5 s of waiting for the worker
    source = """
class OnDevice(torch.utils.data.Dataset):
    def __len__(self): return 1
    def __getitem__(self, i): return torch.zeros(2).to(device)
list(DataLoader(OnDevice(), num_workers=1, multiprocessing_context="fork", timeout=60))"""
    with pretended_accelerator() as device, pytest.raises(RuntimeError, match="in forked subprocess"):
        run(source, device)
    gc.collect()  # the loader, and with it its worker


def test_torch_compile_runs_functions_as_they_are():
    graphs = []
    with pretended_accelerator() as device, torch.no_grad():
        net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()).to(device).eval()
        x = torch.rand(2, 1, 6, 6, device=device)
        compiled = torch.compile(net, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
        assert torch.equal(compiled(x), net(x))
    assert graphs == []
