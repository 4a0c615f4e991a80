"""The checks of 15-07 accept right answers, however written, and reject what a student might really write."""

import re
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from check_protocol import CheckProtocol

from course.lesson_code import definitions
from shared.checks import topic_15_07 as check

GIVEN = definitions("15-07", "schedule")
Op = GIVEN["Op"]

# ---------------------------------------------------------------- right answers


def fixed_by_storages(model, optimizer):
    """Detached views, storages by identity, NumPy's ceil."""

    def blocks(tensors):
        sizes = {t.data_ptr() or id(t): t.detach().untyped_storage().nbytes() for t in tensors}
        return int(np.sum(np.ceil(np.array(list(sizes.values())) / 512)) * 512)

    parameters = [p for m in model.modules() for p in m.parameters(recurse=False)]
    trained = blocks([p for p in parameters if p.requires_grad])
    state = {"sgd": 0, "momentum": trained, "adam": trained + trained}[optimizer]
    buffers = blocks([b for m in model.modules() for b in m.buffers(recurse=False)])
    return {"optimizer": state, "gradients": trained, "buffers": buffers, "parameters": blocks(parameters)}


def mortem_by_pattern(message, snapshot):
    """One regular expression, sums over generators."""
    size = r"([\d.]+) (bytes|KiB|MiB|GiB)"
    match = re.search(rf"allocate {size}\. GPU (\d+) has a total capacity of {size} of which {size} is free", message)
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    requested, capacity, free = (float(match[k]) * units[match[k + 1]] for k in (1, 4, 6))
    blocks = [
        (b["size"], b["state"]) for s in snapshot["segments"] if str(s["device"]) == match[3] for b in s["blocks"]
    ]
    reserved = sum(size for size, _ in blocks)
    allocated = sum(size for size, state in blocks if state == "active_allocated")
    verdict = "fragmented" if requested <= free + reserved - allocated else "held elsewhere"
    verdict = "does not fit" if capacity - allocated < requested else verdict
    hole = max([0, *(size for size, state in blocks if state == "inactive")])
    found = {"requested": requested, "capacity": capacity, "free": free, "reserved": np.int64(reserved)}
    return found | {"allocated": allocated, "largest_hole": hole, "verdict": verdict if free < requested else "capped"}


def cost_by_the_roofline(m, k, n, tile, itemsize, peak, bandwidth):
    """A row of tiles at a time; min(P, I·B), as the lesson has it."""
    heights = [min(tile, m - top) for top in range(0, m, tile)]
    widths = [min(tile, n - left) for left in range(0, n, tile)]
    size = sum(h * k + k * w + h * w for h in heights for w in widths) * itemsize
    work = 2 * m * n * k
    slope = work / size * bandwidth
    found = {"flops": work, "bytes": size, "intensity": work / size, "seconds": work / min(peak, slope)}
    return found | {"limit": "bytes" if slope < peak else "arithmetic"}


def evaluate_all_at_once(model, batches):
    """One tensor of all losses, detached; four numbers one by one."""
    pairs = [(model(x).detach(), y) for x, y in batches]
    losses = torch.cat([F.cross_entropy(z, y, reduction="none") for z, y in pairs])
    wrong = torch.cat([z.max(dim=1).indices.ne(y) for z, y in pairs])
    missed = losses.masked_fill(~wrong, 0).sum() / losses.sum()
    numbers = {"missed": missed, "worst": losses.max(), "accuracy": 1 - wrong.double().mean(), "loss": losses.mean()}
    return {name: value.item() for name, value in numbers.items()}


def prefetch_filled_first(batches, copy, compute, depth):
    """The copies that fill the buffers are issued first, the others after the compute that they wait for."""
    ops = [Op(f"copy {k}", "copy", "c", copy) for k in range(min(depth, batches))]
    for k in range(batches):
        ops.append(Op(f"compute {k}", "compute", "x", compute, (f"copy {k}",)))
        if k + depth < batches:
            ops.append(Op(f"copy {k + depth}", "copy", "c", copy, (f"compute {k}",)))
    return ops


def prefetch_by_buffers(batches, copy, compute, depth):
    """A stream for each buffer: its own order does it all, without one event."""
    ops = []
    for k in range(batches):
        stream = f"buffer {k % depth}"
        ops += [Op(f"copy {k}", "copy", stream, copy), Op(f"compute {k}", "compute", stream, compute)]
    return ops


def plan_on_a_grid(tensors):
    """The largest first; spans that are taken at each event; NumPy's integers."""
    spans = {event: [] for birth, death, _ in tensors for event in range(birth, death)}
    result = [0] * len(tensors)
    for k in sorted(range(len(tensors)), key=lambda k: tensors[k][2], reverse=True):
        birth, death, size = tensors[k]
        place = np.int64(0)
        for start, end in sorted({span for event in range(birth, death) for span in spans[event]}):
            if start >= place + size:
                break
            place = max(place, np.int64(end))
        for event in range(birth, death):
            spans[event].append((place, place + size))
        result[k] = place
    return result


# ---------------------------------------------------------------- wrong answers

PARAMETERS, GRADIENTS = 'sizes["parameters"] += block', 'sizes["gradients"] += block'
BUFFERS, END = "model.buffers()", "return sizes"
FIXED = {
    "512 bytes for nothing": ("parameters", PARAMETERS, 'sizes["parameters"] += max(512, block)'),
    "the sum rounded up": (
        "parameters",
        PARAMETERS,
        'sizes["parameters"] += parameter.nbytes',
        END,
        f'sizes["parameters"] = -(-sizes["parameters"] // 512) * 512\n{END}',
    ),
    "tied twice": (
        "parameters",
        "parameter in model.parameters()",
        "_, parameter in model.named_parameters(remove_duplicate=False)",
    ),
    "floats": ("a float", '"parameters": 0', '"parameters": 0.0'),
    "one number": ("no dictionary with", END, "return sum(sizes.values())"),
    "no return": ("is `return` missing", END, ""),
    "saved buffers": (
        "buffers",
        BUFFERS,
        "[b for n, b in model.state_dict().items() if n not in dict(model.named_parameters(remove_duplicate=False))]",
    ),
    "a shared buffer twice": ("buffers", BUFFERS, "[b for m in model.modules() for b in m.buffers(recurse=False)]"),
    "gradients that exist": ("gradients", GRADIENTS, f"{GRADIENTS} * (parameter.grad is not None)"),
    "float32 gradients": ("gradients", GRADIENTS, 'sizes["gradients"] += -(-4 * parameter.numel() // 512) * 512'),
    "states of the frozen": ("optimizer", '    sizes["optimizer"]', 'sizes["optimizer"]'),
    "a real optimizer": ("operators on", END, f"[torch.zeros_like(p) for p in model.parameters()]\n{END}"),
    "training mode": ("nothing is computed", END, f"model.train()\n{END}"),
}


def without_kib(key, words):
    """Numbers after these words have no KiB."""
    line = f'{key} = read("{words}")'
    return key, line, f'units["KiB"] = 1\n{line}\nunits["KiB"] = 1024'


LARGEST, ENOUGH = 'max(largest_hole, block["size"])', "free + reserved - allocated >= requested"
TOO_LARGE, ELSE = (
    'elif requested + allocated > capacity:\n    verdict = "does not fit"',
    'else:\n    verdict = "held elsewhere"',
)
POST_MORTEM = {
    "requested has no KiB": without_kib("requested", "Tried to allocate "),
    "capacity has no KiB": without_kib("capacity", "total capacity of "),
    "free has no KiB": without_kib("free", "of which "),
    "GPUs 0 to 9": ("allocated", '.split("GPU ")[1].split()[0]', '.split("GPU ")[1][0]'),
    "pending is allocated": ("allocated", '== "active_allocated"', '!= "inactive"'),
    "the message's allocated": ("allocated", '"allocated": allocated', '"allocated": read("the allocated memory ")'),
    "reserved is active": ("reserved", '"reserved": reserved', '"reserved": allocated'),
    "the sum of the holes": ("largest_hole", LARGEST, 'largest_hole + block["size"]'),
    "pending is a hole": ("largest_hole", 'elif block["state"] == "inactive":', "else:"),
    "fragmented first": ("verdict 'does not fit'", f"{TOO_LARGE}\n", "", ELSE, f"{TOO_LARGE}\n{ELSE}"),
    "by the hole": ("verdict 'fragmented'", ENOUGH, f"{ENOUGH} > largest_hole"),
    "reserved counts as free": ("verdict 'held elsewhere'", ENOUGH, "free + reserved >= requested"),
    "no cap": ("verdict 'capped'", "if free >= requested:", "if False:"),
}

READ = "m * k * tiles_across + k * n * tiles_down"
MATMUL = {
    "half the FLOPs": ("flops", '"flops": flops', '"flops": m * k * n'),
    "A and B exchanged": ("bytes", READ, "m * k * tiles_down + k * n * tiles_across"),
    "edges forgotten": ("bytes", "-(-m // tile)", "m // tile", "-(-n // tile)", "n // tile"),
    "elements for bytes": ("bytes", '"bytes": size', '"bytes": elements'),
    "whole FLOPs a byte": ("intensity", "flops / size", "flops // size"),
    "one after the other": ("seconds", "max(computing, moving)", "computing + moving"),
    "three digits": ("seconds", "max(computing, moving)", 'float(f"{max(computing, moving):.3g}")'),
    "bytes if it is a draw": ("limit", "moving > computing", "moving >= computing"),
}

WAITS, MASKED, ROW = "at most four waits", "torch.where(right, 0.0, losses)", "images += len(y)"
EVALUATE = {
    "the mean of means": ("loss", '"loss": total / images', '"loss": (table[:, 0] / images).mean().item()'),
    "a count": ("accuracy", "correct / images", "correct"),
    "the last batch's worst": ("worst", "table[:, 2].max()", "table[-1, 2]"),
    "missed is no share": ("missed", "missed / total", "missed"),
    "tensors": ("a Tensor", ".tolist()", ""),
    "a mask": (WAITS, MASKED, "losses[~right]"),
    "five waits": (WAITS, ".tolist()", ".tolist()\nimages = [torch.tensor(images).item() for _ in range(4)][0]"),
    "item in each batch": (WAITS, ROW, f"{ROW}\nlosses.max().item()"),
    "cpu in each batch": (WAITS, ROW, f"{ROW}\nlosses.to(device='cpu')"),
    "float in each batch": (WAITS, ROW, f"{ROW}\nfloat(losses.sum())"),
}

FREED, COPY, OPS = '(f"compute {k - depth}",) if k >= depth else ()', '"copies", copy, buffer_free', "return ops"
LISTED, BUFFER, FAST = "a copy and a compute", "no buffer is overwritten", "as fast as it can be"
PREFETCH = {
    "other names": (LISTED, 'Op(f"copy {k}"', 'Op(f"copy-{k}"', '(f"copy {k}",)', '(f"copy-{k}",)'),
    "one engine": (LISTED, '"copy", "copies"', '"compute", "copies"'),
    "waits for compute -1": ("an op waits for earlier ones only", " if k >= depth else ()", ""),
    "copies last": ("an op waits for earlier ones only", OPS, "return sorted(ops, reverse=True)"),
    "no event for the compute": ("a compute starts after its copy", 'compute, (f"copy {k}",)', "compute, ()"),
    "no event for the buffer": (BUFFER, FREED, "()"),
    "one buffer too many": (BUFFER, FREED, '(f"compute {k - depth - 1}",) if k > depth else ()'),
    "one stream": (FAST, '"copies"', '"main"'),
    "one buffer unused": (FAST, FREED, '(f"compute {k - max(1, depth - 1)}",) if k >= max(1, depth - 1) else ()'),
}

RESULT, MEET, ORDER = "return offsets", "other_birth < death and birth < other_death", "key=lambda k: -tensors[k][2]"
PLANS = {
    "a tuple": ("a list of ints", RESULT, "return tuple(offsets)"),
    "negative offsets": ("a list of ints", RESULT, "return [-place - 512 for place in offsets]"),
    "all at 0": ("share no byte", RESULT, "return [0] * len(tensors)"),
    "in the wrong order": ("share no byte", RESULT, "return [offsets[k] for k in largest_first]"),
    "stacked": ("an arena at most", MEET, "True"),
    "in the order of birth": ("an arena at most", ORDER, "key=lambda k: tensors[k][0]"),
}


class TestChecks(CheckProtocol, topic="15-07", given=GIVEN):
    CHECKS: ClassVar = {
        "fixed_bytes": check.fixed_bytes,
        "post_mortem": check.post_mortem,
        "matmul_cost": check.matmul_cost,
        "evaluate": check.wait_free,
        "prefetch_schedule": check.prefetch_schedule,
        "plan": check.plan,
    }
    RIGHT: ClassVar = {
        "fixed_bytes": [
            fixed_by_storages,
            ("-(-parameter.nbytes // 512)", "(parameter.numel() * parameter.itemsize + 511) // 512"),
        ],
        "post_mortem": [mortem_by_pattern, ("reserved = 0", "reserved = 0.0")],
        "matmul_cost": [
            cost_by_the_roofline,
            ("-(-m // tile)", "len(range(0, m, tile))", "-(-n // tile)", "(n - 1) // tile + 1"),
        ],
        "evaluate": [
            evaluate_all_at_once,
            (
                "torch.stack([total, correct, worst, missed]).tolist()",
                "(x.item() for x in (total, correct, worst, missed))",
            ),
        ],
        "prefetch_schedule": [prefetch_filled_first, prefetch_by_buffers],
        "plan": [plan_on_a_grid, (ORDER, "key=lambda k: tensors[k][0] - tensors[k][1]")],
    }
    WRONG: ClassVar = {
        "fixed_bytes": FIXED,
        "post_mortem": POST_MORTEM,
        "matmul_cost": MATMUL,
        "evaluate": EVALUATE,
        "prefetch_schedule": PREFETCH,
        "plan": PLANS,
    }

    def hold_stand_in(self, name, stand_in):
        assert stand_in is None or self.CHECKS[name].run(stand_in).status == "passed"
