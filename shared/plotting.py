"""One look for every figure: style, palette, how it is shown, and the few kinds that all notebooks share."""

import base64
import hashlib
import io
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from matplotlib.animation import FuncAnimation
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

DPI = 144  # of what `show` stores; sharp enough on a screen with two pixels a point
SCREEN_DPI = 100  # how large a figure appears: an inch is 100 CSS pixels
FEW_COLOURS = 4096  # a drawing has at most these, a photograph has more
STEPS_BYTES = 300_000  # the most that a player takes, with all of its frames
# signs on the player's buttons, in place of a font of icons that matplotlib would fetch from the network
ICONS = {
    "fa-minus": "−", "fa-fast-backward": "|«", "fa-step-backward": "‹", "fa-play fa-flip-horizontal": "◀",
    "fa-pause": "‖", "fa-play": "▶", "fa-step-forward": "›", "fa-fast-forward": "»|", "fa-plus": "+",
}  # fmt: skip

# Okabe and Ito's hues (https://jfly.uni-koeln.de/color/), told apart with every common colour vision, made lighter or
# darker so that they also differ in greyscale. Lightness (CIE L*): ink 13, blue 29, red 41, grey 51, green 60,
# purple 64, orange 72, sky 82, pale 93. Where two colours meet, choose two that are at least 10 apart, as any two
# neighbours and any two of the first four of CYCLE are.
COLOURS = {
    "blue": "#004876",
    "orange": "#EBA31A",
    "green": "#1CA47A",
    "red": "#9F4600",
    "purple": "#CF83AC",
    "sky": "#A6D3F4",
    "grey": "#7A7A7A",
    "ink": "#222222",
    "pale": "#EBEBEB",
}
CYCLE = [COLOURS[name] for name in ("blue", "orange", "green", "red", "purple", "sky", "grey")]
# stored with each picture, so that lint finds those that were drawn with other colours
PALETTE = hashlib.sha256(json.dumps(COLOURS).encode()).hexdigest()[:8]


def use_course_style() -> None:
    """Set matplotlib's defaults for the course: sizes readable at half size, the palette, light grid."""
    mpl.rcParams.update(
        {
            "figure.figsize": (9.0, 3.6),
            "figure.dpi": SCREEN_DPI,
            "figure.constrained_layout.use": True,
            "font.size": 12,
            "axes.titlesize": 13,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.labelsize": 12,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.prop_cycle": mpl.cycler(color=CYCLE),
            "grid.color": COLOURS["pale"],
            "lines.linewidth": 2.2,
            "legend.frameon": False,
            "legend.fontsize": 11,
            "image.cmap": "gray",
            "image.interpolation": "nearest",
        }
    )


def show(alt: str) -> None:
    """Show the current figure with a text for those who don't see it, and close it. The last line of a cell that draws.

    It is stored as `image/png` with the metadata `alt` (which nbconvert's `classic` template and the site use), `width`
    (in CSS pixels) and `palette`, and as `text/plain`, which VS Code and a terminal show. An `<img alt>` in `text/html`
    would double the bytes. Without IPython the figure is only drawn, so that its mistakes come to light.

    Raises ValueError if `alt` is empty, or there is no figure.
    """
    alt = _one_line(alt)
    if not plt.get_fignums():
        raise ValueError("there is no figure to show: draw one before show()")
    figure = plt.gcf()
    try:
        png, width = _png(figure)
        _display({"image/png": png}, alt, width)
    finally:
        plt.close(figure)  # or the inline backend would show it once more, at the end of the cell


def _one_line(alt: str) -> str:
    if not alt.strip():
        raise ValueError("alt is empty: say in a sentence what the figure shows")
    return " ".join(alt.split())


def _display(data: dict[str, Any], alt: str, width: int) -> None:
    """The cell's output; nothing without IPython."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        metadata = {"image/png": {"alt": alt, "width": width, "palette": PALETTE}}
        ipython.display.display({**data, "text/plain": alt}, metadata=metadata, raw=True)


def show_steps(
    figure: Figure,
    draw: Callable[[Any], object],
    frames: Sequence[Any],
    alt: str,
    *,
    still: int = -1,
) -> None:
    """Show a figure that one can step through, in matplotlib's own player. The last line of a cell that draws.

    Where scripts don't run (on GitHub, in print, in a notebook that isn't trusted yet) there is a still picture.
    Nothing is fetched from a network.

    Args:
        figure: with the axes that `draw` uses. Frames have its size, so leave room for the largest.
        draw: called with each of `frames` (possibly more than once), to draw all that this step shows. The axes have
            been cleared; texts that belong to the figure itself stay.
        frames: what `draw` is called with, in order.
        alt: what the figure shows, in a sentence or two.
        still: the frame of the still picture.

    Raises:
        ValueError: `alt` is empty, there are fewer than two frames, or all of them take more than 300 kB.
    """
    alt = _one_line(alt)
    if len(frames) < 2:
        raise ValueError(f"{len(frames)} frames: a figure with one state is for show()")

    def cleared(frame: Any) -> tuple:
        for ax in figure.axes:
            ax.clear()
        draw(frame)
        return ()

    try:
        with mpl.rc_context({"savefig.dpi": DPI}):
            steps = FuncAnimation(figure, cleared, frames=list(frames), init_func=tuple, interval=1000)
            player = _offline(steps.to_jshtml(default_mode="once"))
        cleared(frames[still])
        png, width = _png(figure)
        html = _with_still(player, png, width, round(figure.get_figwidth() * SCREEN_DPI), alt)
        if len(html) > STEPS_BYTES:
            raise ValueError(
                f"{len(frames)} frames take {len(html) / 1000:.0f} kB, the most is {STEPS_BYTES / 1000:.0f} kB: show "
                "fewer steps, a smaller figure, or less in it"
            )
        _display({"text/html": html, "image/png": png}, alt, width)
    finally:
        plt.close(figure)


def _offline(player: str) -> str:
    """Matplotlib's player with small frames, without what it would fetch, and the same in each run."""

    def smaller(found: re.Match) -> str:
        picture = Image.open(io.BytesIO(base64.b64decode(found[1].replace("\\\n", ""))))
        return f'"data:image/png;base64,{base64.b64encode(_compressed(picture)).decode()}"'

    player = re.sub(r"<link[^>]*>", "", player)
    player = re.sub(r'"data:image/png;base64,([^"]*)"', smaller, player)
    player = re.sub(r'<i class="fa ([^"]*)"></i>', lambda icon: ICONS[icon[1]], player)
    random = re.search(r"_anim_img([0-9a-f]{32})", player)[1]
    return player.replace(random, hashlib.sha256(player.replace(random, "").encode()).hexdigest()[:32])


def _with_still(player: str, png: bytes, width: int, player_width: int, alt: str) -> str:
    """The player, and a still picture that the player's script hides, but for print."""
    alt = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    name = re.search(r"_anim_img([0-9a-f]{32})", player)[1]
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    picture = f'<img class="still" width="{width}" alt="{alt}" src="{source}">'
    frame = f'<img id="_anim_img{name}"'
    player = player.replace(f"{frame}>", f'{frame} width="{player_width}" alt="{alt}">')
    return f"""\
<div id="_steps{name}" class="steps">
{picture}
<div class="player" style="display: none">
{player}
</div>
<style>
.steps img {{ max-width: 100%; height: auto; background: white; }}
.steps .animation {{ display: block; text-align: left; }}
.steps input[type=range].anim-slider {{ display: block; width: 374px; max-width: 100%; margin: 0; }}
.steps.on > .still {{ display: none; }}
.steps.on > .player {{ display: block !important; }}
@media print {{
  .steps.on > .still {{ display: inline; }}
  .steps.on > .player {{ display: none !important; }}
}}
</style>
<script>setTimeout(function() {{ document.getElementById("_steps{name}").classList.add("on"); }}, 0);</script>
</div>
"""


def _png(figure: Figure) -> tuple[bytes, int]:
    """The figure as PNG, and how many CSS pixels wide it is to appear.

    A drawing is stored with 256 colours, which takes a third of the bytes and can't be told apart; one with
    photographs in it keeps all of its colours.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight")
    picture = Image.open(buffer)
    return _compressed(picture), round(picture.width * SCREEN_DPI / DPI)


def _compressed(picture: Image.Image) -> bytes:
    """A picture as PNG, a drawing with 256 colours."""
    picture = picture.convert("RGB")
    if picture.getcolors(FEW_COLOURS) is not None:
        picture = picture.quantize(256, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def image_grid(
    images: torch.Tensor,
    titles: Sequence[str] | None = None,
    *,
    columns: int = 8,
    title: str = "",
    size: float = 1.15,
) -> Figure:
    """Show images in a grid, each `size` inches wide.

    They are (N, H, W), (N, 1, H, W) or (N, 3, H, W), or else there is a ValueError; uint8, or float of any range, which
    is scaled over all images.
    """
    if images.dim() == 3:
        images = images.unsqueeze(1)
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images must be (N, H, W), (N, 1, H, W) or (N, 3, H, W), got {tuple(images.shape)}")
    pixels = images.detach().to("cpu", torch.float32)
    pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-12)
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    height = size * (1.25 if titles is not None else 1.05)
    figure, axes = plt.subplots(
        rows, columns, figsize=(columns * size, rows * height + 0.35 * bool(title)), squeeze=False
    )
    for i, ax in enumerate(axes.flat):
        ax.axis("off")
        if i < len(images):
            ax.imshow(pixels[i].permute(1, 2, 0).squeeze(-1).numpy(), vmin=0, vmax=1)
            if titles is not None:
                ax.set_title(titles[i], fontsize=10, fontweight="normal", loc="center")
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    return figure


def curves(
    ax: Axes,
    series: Mapping[str, Sequence[float]],
    *,
    x: Sequence[float] | None = None,
    dashes: bool = True,
    **texts: str,
) -> Axes:
    """Draw one line a series (label → values, at `x` or 0, 1, 2, ...), with a legend if there is more than one.

    `texts` are title, xlabel and ylabel; units belong into the labels. Each series has a line style besides its colour,
    but not with `dashes=False`, for noisy curves, where dashes look like gaps.
    """
    styles = ["-", "--", "-.", ":"] if dashes else ["-"]
    for i, (label, values) in enumerate(series.items()):
        positions = range(len(values)) if x is None else x
        ax.plot(positions, values, styles[i % len(styles)], label=label)
    ax.set(**texts)
    if len(series) > 1:
        ax.legend()
    return ax


def bars(ax: Axes, values: Mapping[str, float], *, form: str = "{:.3g}", **texts: str) -> Axes:
    """Draw horizontal bars (label → length), each with its value written beside it, the first on top.

    `texts` are title and xlabel, into which the unit belongs.
    """
    lengths = [float(value) for value in values.values()]
    drawn = ax.barh(list(values), lengths, color=[CYCLE[i % len(CYCLE)] for i in range(len(lengths))])
    ax.bar_label(drawn, [form.format(length) for length in lengths], padding=4)
    ax.invert_yaxis()
    ax.margins(x=0.18)
    ax.grid(axis="y", visible=False)
    ax.set(**texts)
    return ax


def diagram(width: float, height: float, title: str = "") -> tuple[Figure, Axes]:
    """An empty sheet for boxes and arrows; one unit is about one inch, the origin is at the bottom left."""
    figure, ax = plt.subplots(figsize=(width, height))
    ax.set(xlim=(0, width), ylim=(0, height), title=title)
    ax.axis("off")
    return figure, ax


def box(
    ax: Axes, x: float, y: float, text: str, *, colour: str = "blue", width: float = 1.5, height: float = 0.5
) -> None:
    """A labelled box centred at (x, y) in data units; `colour` is a name in COLOURS."""
    patch = mpl.patches.FancyBboxPatch(
        (x - width / 2, y - height / 2),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=COLOURS[colour] + "22",
        edgecolor=COLOURS[colour],
        linewidth=1.6,
    )
    ax.add_patch(patch)
    ax.text(x, y, text, ha="center", va="center", fontsize=11, color=COLOURS["ink"])


def arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    *,
    text: str = "",
    colour: str = "ink",
    bend: float = 0.0,
) -> None:
    """An arrow between two points in data units, with an optional text at its middle."""
    ax.annotate(
        "",
        xy=end,
        xytext=start,
        arrowprops={
            "arrowstyle": "-|>",
            "color": COLOURS[colour],
            "linewidth": 1.5,
            "connectionstyle": f"arc3,rad={bend}",
            "shrinkA": 2,
            "shrinkB": 2,
        },
    )
    if text:
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        ax.text(*middle, text, fontsize=10, color=COLOURS[colour], ha="center", va="center", backgroundcolor="white")
