"""The checks of 15-07 accept right answers, however written, and reject what a student might really write.

A wrong answer is the notebook's own with texts replaced: what the check says of it, then old and new, in turns.
"""

import re

import numpy as np
import torch
import torch.nn.functional as F
from answer_variants import variants
from check_protocol import CheckProtocol, idle

from course.exercise_form import student_source
from course.lesson_code import answers, definitions
from shared.checks import topic_15_07 as check

NAMES = {
    "fixed": "fixed_bytes",
    "post-mortem": "post_mortem",
    "roofline": "matmul_cost",
    "wait-free": "evaluate",
    "prefetch": "prefetch_schedule",
    "plan": "plan",
}
GIVEN = definitions("15-07", "schedule")
Op = GIVEN["Op"]
variant = variants("15-07", NAMES, GIVEN)


def wrong(slug, rows):
    return {
        label: (variant(slug, *zip(texts[::2], texts[1::2], strict=True)), said)
        for label, (said, *texts) in rows.items()
    }


# ---------------------------------------------------------------- fixed bytes


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


P, G, B, END = 'sizes["parameters"] += block', 'sizes["gradients"] += block', "model.buffers()", "    return sizes"
OF = "{{t: 0 for m in [model, *model.children()] for t in m.{}(recurse=False)}}"
SAVED = "[b for n, b in model.state_dict().items() if n not in dict(model.named_parameters({}))]"
WRONG_FIXED = {
    "left of the frozen": (
        "gradients",
        "if parameter.requires_grad:",
        "if parameter.requires_grad or parameter.grad is not None:",
    ),
    "512 bytes for nothing": ("parameters", P, 'sizes["parameters"] += max(512, block)'),
    "children alone": ("parameters", "model.parameters()", OF.format("parameters")),
    "the sum rounded up": (
        "parameters",
        P,
        'sizes["parameters"] += parameter.nbytes',
        END,
        '    sizes["parameters"] = -(-sizes["parameters"] // 512) * 512\n' + END,
    ),
    "tied twice": (
        "parameters",
        "model.parameters()",
        "[p for _, p in model.named_parameters(remove_duplicate=False)]",
    ),
    "floats": ("a float", '"parameters": 0', '"parameters": 0.0'),
    "one number": ("no dictionary with", END, "    return sum(sizes.values())"),
    "no return": ("is `return` missing", END, ""),
    "a misspelt attribute": ("run that line by itself", "parameter.nbytes", "parameter.nbyte"),
    "no buffers": ("buffers", B, "[]"),
    "saved buffers": ("buffers", B, SAVED.format("remove_duplicate=False")),
    "a tied parameter is a buffer": ("buffers", B, SAVED.format("")),
    "a shared buffer twice": ("buffers", B, "[b for m in model.modules() for b in m.buffers(recurse=False)]"),
    "gradients of the frozen": ("gradients", G, "pass", P, f"{P}\n        {G}"),
    "gradients that exist": ("gradients", G, G + " * (parameter.grad is not None)"),
    "float32 gradients": ("gradients", G, 'sizes["gradients"] += -(-4 * parameter.numel() // 512) * 512'),
    "one state for Adam": ("optimizer", '"adam": 2', '"adam": 1'),
    "states of the frozen": ("optimizer", '    sizes["optimizer"]', 'sizes["optimizer"]'),
    **{
        label: (said, END, f"    {line}\n{END}")
        for label, said, line in (
            ("a real optimizer", "operators on", "for p in model.parameters(): torch.zeros_like(p)"),
            (
                "reads the data",
                "operators on",
                "[float(p.flatten()[0]) for p in model.parameters() if p.numel() and not p.is_meta]",
            ),
            ("gradients dropped", "'gradients'", "model.zero_grad()"),
            ("training mode", "nothing is computed", "model.train()"),
            ("a hook stays", "nothing is computed", "model.register_forward_hook(print)"),
        )
    },
}

# ---------------------------------------------------------------- post-mortem


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


def mortem_in_another_order(message, snapshot):
    """The verdict by what isn't so; the last line of the notebook's answer reversed."""
    found = dict(reversed(ANSWERS["post_mortem"](message, snapshot).items()))
    return found | {
        "requested": int(found["requested"]) if found["requested"] == int(found["requested"]) else found["requested"]
    }


def unit(key, words):
    """Numbers after these words have no KiB."""
    line = f'{key} = read("{words}")'
    return key, line, f'units["KiB"] = 1\n    {line}\n    units["KiB"] = 1024'


R, H, CAP = (
    '"reserved": reserved',
    'max(largest_hole, block["size"])',
    "    if free >= requested:",
)
ALLOCATED, HOLE, FITS = "allocated", "largest_hole", "free + reserved - allocated >= requested"
TOO_LARGE = '    elif requested + allocated > capacity:\n        verdict = "does not fit"\n'
WRONG_MORTEM = {
    "decimal units": ("requested", '2**10, "MiB": 2**20, "GiB": 2**30', '1e3, "MiB": 1e6, "GiB": 1e9'),
    "requested has no KiB": unit("requested", "Tried to allocate "),
    "capacity has no KiB": unit("capacity", "total capacity of "),
    "free has no KiB": unit("free", "of which "),
    "free without unit": ("free", 'read("of which ")', 'float(message.split("of which ")[1].split()[0])'),
    "no entry requested": ("no dictionary with 'requested'", '"requested": requested,', ""),
    "None": ("is `return` missing", "    return {", "    return None and {"),
    "GPUs 0 to 9": (ALLOCATED, '.split("GPU ")[1].split()[0]', '.split("GPU ")[1][0]'),
    "all GPUs": (ALLOCATED, 'if segment["device"] != gpu:', "if False:"),
    "a verdict of all GPUs": (
        "verdict",
        CAP,
        '    held, reserved = reserved, sum(s["total_size"] for s in snapshot["segments"])\n' + CAP,
        R,
        '"reserved": held',
    ),
    "pending is allocated": (ALLOCATED, '== "active_allocated"', '!= "inactive"'),
    "the message's allocated": (ALLOCATED, '"allocated": allocated', '"allocated": read("the allocated memory ")'),
    "reserved is active": ("reserved", R, '"reserved": allocated'),
    "the sum of the holes": (HOLE, H, 'largest_hole + block["size"]'),
    "the first hole": (HOLE, H, 'largest_hole or block["size"]'),
    "pending is a hole": (HOLE, 'elif block["state"] == "inactive":', "else:"),
    "no default": ("ValueError", '"largest_hole": largest_hole', '"largest_hole": largest_hole or max([])'),
    "one byte short of the capacity": (
        "verdict '(fragmented|held elsewhere)'",
        "allocated > capacity",
        "allocated >= capacity",
    ),
    "fragmented first": (
        "verdict 'does not fit'",
        TOO_LARGE,
        "",
        "    else:\n        verdict",
        TOO_LARGE + "    else:\n        verdict",
    ),
    "strictly more": ("verdict 'fragmented'", FITS, "free + reserved - allocated > requested"),
    "by the hole": ("verdict 'fragmented'", FITS, FITS + " > largest_hole"),
    "all that fits is fragmented": ("verdict 'held elsewhere'", '"held elsewhere"', '"fragmented"'),
    "reserved counts as free": ("verdict 'held elsewhere'", FITS, "free + reserved >= requested"),
    "no cap": ("verdict 'capped'", CAP, "    if False:"),
    "capped if strictly more is free": ("verdict 'capped'", CAP, "    if free > requested:"),
}

# ---------------------------------------------------------------- a matmul on the roofline


def cost_by_the_roofline(m, k, n, tile, itemsize, peak, bandwidth):
    """A row of tiles at a time; min(P, I·B), as the lesson has it."""
    heights = [min(tile, m - top) for top in range(0, m, tile)]
    widths = [min(tile, n - left) for left in range(0, n, tile)]
    size = sum(h * k + k * w + h * w for h in heights for w in widths) * itemsize
    work = 2 * m * n * k
    slope = work / size * bandwidth
    found = {"flops": work, "bytes": size, "intensity": work / size, "seconds": work / min(peak, slope)}
    return found | {"limit": "bytes" if slope < peak else "arithmetic"}


FLOPS, READ, SECONDS = "flops = 2 * m * k * n", "m * k * tiles_across + k * n * tiles_down", "max(computing, moving)"
LIMIT, INTENSITY = '"bytes" if moving > computing else "arithmetic"', "flops / size"
WRONG_MATMUL = {
    "half the FLOPs": ("flops", FLOPS, "flops = m * k * n"),
    "None": ("is `return` missing", "    return {", "    return None and {"),
    "no tiles": ("bytes", READ, "2 * m * n * k"),
    "A and B exchanged": ("bytes", READ, "m * k * tiles_down + k * n * tiles_across"),
    "C not written": ("bytes", " + m * n", ""),
    "edges forgotten": ("bytes", "-(-m // tile)", "m // tile", "-(-n // tile)", "n // tile"),
    "elements for bytes": ("bytes", '"bytes": size', '"bytes": elements'),
    "whole FLOPs a byte": ("intensity", INTENSITY, "flops // size"),
    "one after the other": ("seconds", SECONDS, "computing + moving"),
    "the faster one": ("seconds", SECONDS, "min(computing, moving)"),
    "always arithmetic": ("limit", LIMIT, '"arithmetic"'),
    "always bytes": ("limit", LIMIT, '"bytes"'),
    "bytes if it is a draw": ("limit", "moving > computing", "moving >= computing"),
}

# ---------------------------------------------------------------- an evaluation that doesn't wait


def evaluate_all_at_once(model, batches):
    """One tensor of all losses, detached; four numbers one by one."""
    pairs = [(model(x).detach(), y) for x, y in batches]
    losses = torch.cat([F.cross_entropy(z, y, reduction="none") for z, y in pairs])
    wrong = torch.cat([z.max(dim=1).indices.ne(y) for z, y in pairs])
    missed = losses.masked_fill(~wrong, 0).sum() / losses.sum()
    numbers = {"missed": missed, "worst": losses.max(), "accuracy": 1 - wrong.double().mean(), "loss": losses.mean()}
    return {name: value.item() for name, value in numbers.items()}


WAITS, MASKED, ROW = "at most four waits", "torch.where(right, 0.0, losses)", "images += len(y)"
WRONG_EVALUATE = {
    "means of means": ("loss", "losses.sum(), right.sum()", "losses.mean(), right.float().mean()", "len(y)", "1"),
    "a count": ("accuracy", "correct / images", "correct"),
    "a mask": (WAITS, MASKED, "losses[~right]"),
    "the last batch's worst": ("worst", "table[:, 2].max()", "table[-1, 2]"),
    "the mean of the worst": ("worst", "table[:, 2].max()", "table[:, 2].mean()"),
    "missed is no share": ("missed", "missed / total", "missed"),
    "the right ones' share": ("missed", MASKED, "torch.where(right, losses, 0.0)"),
    "tensors": ("a Tensor", ".tolist()", ""),
    "the first batch alone": ("loss", "in batches:", "in list(batches)[:1]:"),
    "None": ("is `return` missing", "    return {", "    return None and {"),
    "no worst": ("no dictionary with 'worst'", '"worst": worst,', ""),
    "five waits": (WAITS, ".tolist()", ".tolist()\n    images = [torch.tensor(images).item() for _ in range(4)][0]"),
    **{
        f"{line} in each batch": (WAITS, ROW, f"{ROW}\n        {line}")
        for line in (
            "losses.max().item()",
            "losses.cpu()",
            "repr(losses)",
            "losses.to('cpu')",
            "losses.to(device='cpu')",
            "float(losses.sum())",
            "losses.nonzero()",
            "y.unique()",
        )
    },
}

# ---------------------------------------------------------------- prefetcher


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


FREED, COPY, OPS = '(f"compute {k - depth}",) if k >= depth else ()', '"copies", copy, buffer_free', "    return ops"
COPIED, BUFFER, FAST = 'compute, (f"copy {k}",)', "no buffer is overwritten", "as fast as it can be"
BACK = '(f"compute {{k - {0}}}",) if k >= {0} else ()'
WRONG_PREFETCH = {
    "a copy too many": ("a copy and a compute", OPS, '    return [*ops, Op(f"copy {batches}", "copy", "c", copy)]'),
    "other names": ("a copy and a compute", 'Op(f"copy {k}"', 'Op(f"copy-{k}"'),
    "a generator": ("a copy and a compute", OPS, "    yield from ops"),
    "one engine": ("a copy and a compute", '"copy", "copies"', '"compute", "copies"'),
    "the shorter duration": ("a copy and a compute", "    ops = []", "    ops = []\n    copy = min(copy, compute)"),
    "waits for compute -1": ("an op waits for earlier ones only", " if k >= depth else ()", ""),
    "a string for a tuple": (
        "an op waits for earlier ones only",
        '(f"compute {k - depth}",)',
        'f"compute {k - depth}"',
    ),
    "copies last": ("an op waits for earlier ones only", OPS, "    return sorted(ops, reverse=True)"),
    "no event for the compute": ("a compute starts after its copy", COPIED, "compute, ()"),
    "no event for the buffer": (BUFFER, FREED, "()"),
    "no event for a compute that takes no time": (BUFFER, "if k >= depth", "if compute and k >= depth"),
    "one buffer too many": (BUFFER, FREED, BACK.format("(depth + 1)")),
    "the last reuse forgotten": (BUFFER, "if k >= depth", "if depth <= k < batches - 1"),
    "the engines' order": (BUFFER, COPY, 'f"c{k}", copy, ()', '"main"', 'f"m{k}"'),
    "one stream": (FAST, '"copies"', '"main"'),
    "each copy waits for the last compute": (FAST, FREED, BACK.format(1)),
    "two buffers at most": (FAST, FREED, BACK.format("min(depth, 2)")),
    "one buffer unused": (FAST, FREED, BACK.format("max(1, depth - 1)")),
}

# ---------------------------------------------------------------- a plan


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


RESULT, MEET, ORDER = (
    "    return offsets",
    "other_birth < death and birth < other_death",
    "key=lambda k: -tensors[k][2]",
)
A_LIST, SHARED, ARENA = "a list of ints", "share no byte", "an arena at most"
WRONG_PLANS = {
    "a tuple": (A_LIST, RESULT, "    return tuple(offsets)"),
    "an error for none": ("IndexError", RESULT, "    tensors[0]\n" + RESULT),
    "negative offsets": (A_LIST, RESULT, "    return [-place - 512 for place in offsets]"),
    "all at 0": (SHARED, RESULT, "    return [0] * len(tensors)"),
    "lives that share their last event": (SHARED, MEET, "other_birth < death - 1 and birth < other_death - 1"),
    "only those born before": (SHARED, MEET, "other_birth <= birth < other_death"),
    "in the wrong order": (SHARED, RESULT, "    return [offsets[k] for k in largest_first]"),
    "stacked": (ARENA, MEET, "True"),
    "in the order of birth": (ARENA, ORDER, "key=lambda k: tensors[k][0]"),
    "in the order of death": (ARENA, ORDER, "key=lambda k: tensors[k][1]"),
    "the smallest first": (ARENA, ORDER, "key=lambda k: tensors[k][2]"),
}

CHECKS = {
    "fixed_bytes": check.fixed_bytes,
    "post_mortem": check.post_mortem,
    "matmul_cost": check.matmul_cost,
    "evaluate": check.wait_free,
    "prefetch_schedule": check.prefetch_schedule,
    "plan": check.plan,
}
ANSWERS = answers("15-07", given=GIVEN)
STUBS = answers("15-07", edit=student_source, given=GIVEN)
IDLE = idle("15-07", GIVEN)
RIGHT = {
    "fixed_bytes": [
        fixed_by_storages,
        variant(
            "fixed", ("-(-parameter.nbytes // 512)", "(parameter.numel() * parameter.dtype.itemsize + 511) // 512")
        ),
    ],
    "post_mortem": [mortem_by_pattern, mortem_in_another_order],
    "matmul_cost": [
        cost_by_the_roofline,
        variant("roofline", ("-(-m // tile)", "len(range(0, m, tile))"), ("-(-n // tile)", "(n - 1) // tile + 1")),
    ],
    "evaluate": [
        evaluate_all_at_once,
        variant(
            "wait-free",
            (
                "torch.stack([total, correct, worst, missed]).tolist()",
                "(x.item() for x in (total, correct, worst, missed))",
            ),
        ),
    ],
    "prefetch_schedule": [prefetch_filled_first, prefetch_by_buffers],
    "plan": [plan_on_a_grid, variant("plan", (ORDER, "key=lambda k: tensors[k][0] - tensors[k][1]"))],
}
WRONG = {
    "fixed_bytes": wrong("fixed", WRONG_FIXED),
    "post_mortem": wrong("post-mortem", WRONG_MORTEM),
    "matmul_cost": wrong("roofline", WRONG_MATMUL),
    "evaluate": wrong("wait-free", WRONG_EVALUATE),
    "prefetch_schedule": wrong("prefetch", WRONG_PREFETCH),
    "plan": wrong("plan", WRONG_PLANS),
}


class TestChecks(CheckProtocol):
    TOPIC = "15-07"
    IDLE = IDLE
    CHECKS, ANSWERS, STUBS, RIGHT, WRONG = CHECKS, ANSWERS, STUBS, RIGHT, WRONG

    def hold_stand_in(self, name, stand_in):
        assert stand_in is None or self.CHECKS[name].run(stand_in).status == "passed"
