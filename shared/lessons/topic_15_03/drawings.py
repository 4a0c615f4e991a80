"""Two drawings of 15-03: a tree of modules, and which key of a state dict goes where."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

from shared.plotting import COLOURS, arrow, box, diagram


def module_tree(root: torch.nn.Module, title: str = "") -> Axes:
    """Draw a tree of modules as boxes; below a module stand its parameters (orange) and buffers (green).

    `root` may be anything that has the tables `_parameters`, `_buffers` and `_modules`.
    """
    _, ax = diagram(7.8, 3.7, title)
    next_leaf = 1.4  # where the next module without children is drawn

    def draw(name, module, y):
        nonlocal next_leaf
        centres = [draw(key, child, y - 1.1) for key, child in module._modules.items()]
        if centres:
            x = sum(centres) / len(centres)
        else:
            x = next_leaf
            next_leaf += 2.4
        box(ax, x, y, f"{name}\n{type(module).__name__}", height=0.62)
        for centre in centres:
            arrow(ax, (x, y - 0.31), (centre, y - 0.79))
        tensors = [(key, "orange") for key, tensor in module._parameters.items() if tensor is not None]
        tensors += [(key, "green") for key, tensor in module._buffers.items() if tensor is not None]
        left = x - 0.39 * (len(tensors) - 1)
        for i, (key, colour) in enumerate(tensors):
            box(ax, left + 0.78 * i, y - 0.75, key, colour=colour, width=0.74, height=0.34)
        return x

    draw("(root)", root, 3.2)
    return ax


def key_map(old: Sequence[str], changed: Mapping[str, Sequence[str]], title: str = "") -> Axes:
    """Draw which key goes where: old keys on the left, new ones on the right, a line for each tensor.

    `changed` is new key → the old keys that it was made from; those made from several are orange and bold.
    """
    rows = max(len(old), len(changed))
    _, ax = plt.subplots(figsize=(9.5, 0.32 * rows + 0.7))
    ax.axis("off")
    ax.set(xlim=(0, 10), ylim=(-0.6, rows - 0.3), title=title)
    heights = {key: rows - 1 - i for i, key in enumerate(old)}
    for key, height in heights.items():
        ax.text(3.5, height, key, ha="right", va="center", fontsize=11)
    for new, sources in changed.items():
        middle = sum(heights[key] for key in sources) / len(sources)
        colour, weight = (COLOURS["orange"], "bold") if len(sources) > 1 else (COLOURS["blue"], "normal")
        ax.text(6.1, middle, new, va="center", fontsize=11, fontweight=weight)
        for key in sources:
            ax.plot([3.6, 6.0], [heights[key], middle], color=colour, linewidth=1.8)
    return ax
