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


TWO = "Expected all tensors to be on the same device"
NO_NUMPY = "can't convert .* device type tensor to numpy. Use Tensor.cpu"
NO_FLOAT64 = "Cannot convert a MPS Tensor to float64 dtype"

SETUP = """
import copy, io, threading
import numpy as np
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(3)
x = torch.randn(4, 3, device=device)
w = torch.randn(4, 3, device=device, requires_grad=True)
net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).to(device)
labels = torch.tensor([0, 1, 1, 0], device=device)

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return 2 * a
    @staticmethod
    def backward(ctx, grad):
        return 2 * grad
"""

# name: (statements, type, message)
MISTAKES = {
    "a factory without a device": ("x + torch.ones(4, 3)", RuntimeError, TWO),
    "numpy of a tensor": ("x.numpy()", TypeError, NO_NUMPY),
    "a plot of a tensor": (
        "import matplotlib; matplotlib.use('Agg')\nimport matplotlib.pyplot as plt; plt.plot(x[:, 0])",
        TypeError,
        NO_NUMPY,
    ),
    "an index on the device": ("torch.ones(4)[labels]", RuntimeError, "indices should be either on cpu"),
    "values from the CPU": ("x[labels] = torch.ones(4, 3)", RuntimeError, "same device|on the same device"),
    "a total on the CPU": ("total = torch.zeros(())\ntotal += x.sum()", RuntimeError, TWO),
    "out= on the CPU": ("torch.add(x, x, out=torch.empty(4, 3))", RuntimeError, TWO),
    "stack of numbers": ("torch.stack([x.sum(), torch.tensor(1.0)])", RuntimeError, TWO),
    "a generator on the CPU": ("torch.randn(3, device=device, generator=torch.Generator())", RuntimeError, "generator"),
    "a generator on the device": ("torch.randperm(5, generator=torch.Generator(device))", RuntimeError, "generator"),
    "a generator in place": ("x.normal_(generator=torch.Generator())", RuntimeError, "generator"),
    "a factory in backward": (
        "Double.backward = staticmethod(lambda ctx, grad: grad * torch.full((4, 3), 2.0))\n"
        "Double.apply(w).sum().backward()",
        RuntimeError,
        TWO,
    ),
    "a gradient from the CPU": (
        "Double.backward = staticmethod(lambda ctx, grad: torch.ones(4, 3))\nDouble.apply(w).sum().backward()",
        RuntimeError,
        "returned an invalid gradient at index 0 - expected device .* but got cpu",
    ),
    "a gradient that is assigned": ("w.grad = torch.ones(4, 3)", RuntimeError, "located on a different device"),
    "in a thread": (
        "caught = []\n"
        "def work():\n"
        "    try: x + torch.ones(4, 3)\n"
        "    except RuntimeError as error: caught.append(error)\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join(60)\n"
        "raise caught[0]",
        RuntimeError,
        TWO,
    ),
    "under vmap": ("torch.func.vmap(lambda a: a @ torch.ones(3))(x)", RuntimeError, TWO),
}

FLOAT64 = {  # on a Mac's GPU
    "to, by keyword": "x.to(dtype=torch.float64)",
    "a factory": "torch.zeros(3, dtype=torch.float64, device=device)",
    "data of NumPy": "torch.tensor(np.ones(3), device=device)",
    "moved": "torch.from_numpy(np.ones(3)).to(device)",
    "a module": "net.double()",
}

# each ends in `result`
RIGHT = {
    "training, foreach and clipping": """
optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
loss = F.cross_entropy(net(x), labels); loss.backward()
norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=True); optimizer.step()
result = [norm, *net.parameters()]""",
    "all ways to move": """
cpu = torch.ones(2, 2)
ways = [cpu.to(device), cpu.to(device=device), cpu.to(str(device)), cpu.to(x),
        cpu.to(device, torch.float32), cpu.to(device, torch.float32, True), cpu.to(device, copy=True),
        cpu.double().to(device, torch.float32), cpu.to(device, memory_format=torch.contiguous_format), cpu.int().to(x),
        torch.as_tensor(cpu, device=device), torch.asarray(cpu, device=device), x.new_tensor([[1.0, 1], [1, 1]])]
assert all(way.device == x.device for way in ways), [way.device for way in ways]
back = [x.cpu(), x.to("cpu"), x.to(cpu), x.to("cpu", torch.float64), x.detach().to(device="cpu", copy=True)]
assert all(way.device == cpu.device for way in back)
assert x.to(device) is x and cpu.to("cpu") is cpu and x.to(x.device, copy=True) is not x
result = sum(ways)""",
    "a copy that stays": """
image = torch.randn(1, 3, 4, 4, device=device)
last = image.to(memory_format=torch.channels_last)
assert last.device == image.device == image.half().device == image.clone(memory_format=torch.channels_last).device
result = nn.Conv2d(3, 2, 3).to(device, memory_format=torch.channels_last)(last)""",
    "indices": """
rows = torch.tensor([0, 2])
y = x.clone(); y[rows] = 0.0; y[rows.to(device)] += 1; y[y > 1] = torch.tensor(5.0); y[0] = torch.ones(3, device=device)
assert x.numpy(force=True).shape == (4, 3)
result = [x[rows], x[labels], x[x > 0], x[[0, 1]], x[rows.to(device), 0], x[:, None], x[0, labels[0]], y]""",
    "numbers on the CPU": """
y = x * torch.tensor(2.0) + np.float64(1.5) - torch.tensor(1.0, dtype=torch.float64); y.mul_(torch.tensor(0.5))
result = torch.where(y > 0, y, torch.tensor(0.0)).clamp(max=torch.tensor(1.0)).masked_fill(y < 0, torch.tensor(2.0))""",
    "factories": """
made = [torch.zeros(2, device=device), torch.arange(2.0, device=device), torch.full((2,), 1.0, device=device),
        torch.eye(2, device=device)[0], torch.linspace(0, 1, 2, device=device), torch.ones_like(x[0, :2]),
        torch.empty(2, device=device).fill_(1), x.new_zeros(2), torch.tensor([1.0, 2.0], device=device),
        torch.zeros_like(torch.ones(2), device=device), torch.tensor(x[0, :2].tolist(), device=device)]
assert all(m.device == x.device for m in made), [m.device for m in made]
assert torch.zeros(2).device == torch.zeros_like(x, device="cpu").device == torch.tensor([x.sum()]).device
assert x.new_zeros(2, device="cpu").device.type == "cpu"
with torch.device(device):
    assert torch.zeros(2).device == torch.tensor([1.0]).device == nn.Linear(2, 2).weight.device == x.device
with torch.device("meta"):
    assert nn.Linear(2, 2).weight.device.type == "meta"
result = torch.stack(made)""",
    "out= and in place": """
out = torch.empty(4, 3, device=device); torch.mul(x, 2, out=out); out.add_(x).relu_(); out.copy_(torch.ones(4, 3))
host = torch.empty(4, 3); host.copy_(x); host += torch.ones(4, 3)
result = [out, host]""",
    "backward and second derivatives": """
(g,) = torch.autograd.grad((w.cpu() ** 3).sum() + (w * x).sum(), w, create_graph=True)
(h,) = torch.autograd.grad(g.sum(), w)
assert g.device == h.device == w.device
leaf = torch.ones(3, requires_grad=True); (leaf.to(device) * x).sum().backward()
assert leaf.grad.device.type == "cpu"
result = [g, h, leaf.grad]""",
    "custom functions": """
class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b): ctx.set_materialize_grads(True); return a * 2, b * 3
    @staticmethod
    def backward(ctx, g, h): return 2 * g, 3 * h
first, _ = Two.apply(w, x.clone().requires_grad_())
first.sum().backward(); Double.apply(w).sum().backward()
result = w.grad""",
    "files": """
file = io.BytesIO(); torch.save({"net": net.state_dict(), "x": x}, file)
def load(**options): file.seek(0); return torch.load(file, **options)
assert load()["x"].device == load(map_location=device)["x"].device == x.device
assert load(map_location="cpu")["x"].device.type == "cpu"
other = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
other.load_state_dict(load(map_location="cpu")["net"]); other.to(device).load_state_dict(load()["net"])
optimizer = torch.optim.Adam(other.parameters()); other(x).sum().backward(); optimizer.step()
optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())); optimizer.step()
result = [other(x), copy.deepcopy(other)(x), copy.copy(x)]""",
    "a lazy module": """
ways = [nn.LazyLinear(2).to(device), nn.LazyLinear(2).to(device).cpu().to(x)]
with torch.no_grad():
    result = [layer(x) * 0 + layer.weight.sum() * 0 for layer in ways]
assert all(parameter.device == x.device for layer in ways for parameter in layer.parameters())""",
    "torch.func": """
from torch.func import functional_call, grad, jacrev, vmap
loss = lambda p, a: functional_call(net.eval(), p, (a,)).sum()
p = dict(net.named_parameters())
per_sample = vmap(grad(lambda p, a: loss(p, a[None])), (None, 0))(p, x)
result = [*grad(loss)(p, x).values(), *per_sample.values(), jacrev(torch.sin)(x[0]),
          grad(lambda a: a.to(device).sin().sum())(x[0].cpu())]""",
    "a Function with numbers under torch.func": """
class Cube(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(lambda x: x**3)
    setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    backward = staticmethod(lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2)
result = torch.func.vmap(torch.func.grad(Cube.apply))(x[0])""",
    "sequences": """
packed = nn.utils.rnn.pack_padded_sequence(x[..., None], torch.tensor([3, 2, 2, 1]), batch_first=True)
result = nn.GRU(1, 2).to(device)(packed)[1]""",
    "fake tensors": """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    net2 = nn.Linear(3, 2, device=device); y = net2(torch.ones(4, 3, device=device)); y.sum().backward()
    assert y.device == torch.ones(4, 3).to(device).device
    cpu = nn.Linear(3, 2); cpu(torch.ones(1, 3)).sum().backward(); torch.optim.Adam(cpu.parameters()).step()
result = x""",
    "tracing, torch.fx and torch.export": """
net.eval()
traced, exported = torch.fx.symbolic_trace(net), torch.export.export(net, (x,)).module()
result = [torch.jit.trace(net, x)(x), traced(x), exported(x), net(x) + x.new_ones(2)]""",
    "a torch.cond in a branch of another": """
def darker(x): return torch.cond(x.mean() > 2, lambda x: x / 2, lambda x: x.clone(), (x,))
result = [torch.cond(a.mean() > 9, lambda a: a * 2, darker, (a,)) for a in (x, x + 5, x + 50)]""",
    "meta tensors": """
big = nn.Linear(100_000, 100_000, device="meta"); assert big.weight.device.type == "meta"
assert x.to("meta").device.type == "meta"
result = nn.Linear(3, 2, device="meta").to_empty(device=device).weight.data.zero_()""",
    "a dispatch mode of one's own": """
from torch.utils._python_dispatch import TorchDispatchMode
names = []
class Names(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names.append(str(func)); return func(*args, **(kwargs or {}))
with Names(): (x * 2).sum()
assert names == ["aten.mul.Tensor", "aten.sum.default"], names
result = x""",
    "generators": """
g = torch.Generator(device).manual_seed(1); assert isinstance(g, torch.Generator)
assert g.device.type == torch.device(device).type
torch.randn(3, device=device, generator=g); torch.bernoulli(x.sigmoid(), generator=g); x.clone().uniform_(generator=g)
result = torch.randperm(4, generator=torch.Generator().manual_seed(1)).to(device)
assert isinstance(torch.default_generator, torch.Generator)""",
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


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused(name, accelerator):
    source, kind, message = MISTAKES[name]
    run("", accelerator)  # what comes before is innocent
    with pytest.raises(kind, match=message):
        run(source, accelerator)


@pytest.mark.parametrize("name", FLOAT64)
def test_float64_is_refused(name):
    with pretended_accelerator() as device, pytest.raises(TypeError, match=NO_FLOAT64):
        run(FLOAT64[name], device)


@pytest.mark.parametrize("name", RIGHT)
def test_right_code_computes_what_the_cpu_computes(name, accelerator):
    want = on_cpu(run(RIGHT[name], "cpu")["result"])
    got = on_cpu(run(RIGHT[name], accelerator)["result"])
    if accelerator.type != "cuda":  # whose arithmetic is another one
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_nothing_is_left_of_it():
    before = {name: vars(torch.Tensor).get(name) for name in ("device", "to", "numpy", "grad", "cpu", "new_zeros")}
    factories = torch.zeros, torch.tensor, torch.Generator, threading.Thread.start, torch.autograd.Function.apply
    with pretended_accelerator() as device:
        kept = torch.ones(2, device=device)
        assert torch.zeros is not factories[0]
    assert kept.device.type == "cpu"
    assert kept.numpy().sum() == (kept + torch.ones(2)).sum() / 2
    assert {name: vars(torch.Tensor).get(name) for name in before} == before
    assert (torch.zeros, torch.tensor, torch.Generator, threading.Thread.start) == factories[:4]
    with pytest.raises(RuntimeError):
        torch.ones(2).to("mps" if not torch.backends.mps.is_available() else "cuda")


def test_a_tensor_says_where_it_is():
    with pretended_accelerator() as device:
        x = torch.ones(2, device=device)
        assert device == torch.device("mps") != x.device == torch.device("mps:0")
        assert "device='mps:0'" in repr(x)
        assert x[:1].device == x.view(1, 2).device == nn.Parameter(x).device == x.data.device == x.device
        assert F.relu(x).device == x.cpu().to(device).device == x.device


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


def test_torch_compile_sees_neither_the_model_nor_the_watch():
    import torch._dynamo.utils

    torch._dynamo.utils.counters.clear()
    graphs = []
    with pretended_accelerator() as device, torch.no_grad():
        net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()).to(device).eval()
        x = torch.rand(2, 1, 6, 6, device=device)
        torch.compiler.reset()
        compiled = torch.compile(net, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
        assert torch.equal(compiled(x), net(x))
    assert graphs == []
    assert torch._dynamo.utils.counters["frames"]["total"] == 0


def test_torchscript_forgets_the_wrappers_of_a_block_that_has_ended():
    """It knows functions by their id, and a later function may get that of a wrapper that is gone."""
    known = torch.jit._builtins._get_builtin_table()
    before = dict(known)
    with pretended_accelerator():
        assert len(known) > len(before)
    assert known == before
