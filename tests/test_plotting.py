"""Figures: how they are shown and described, the palette, the kinds that notebooks share."""

import base64
import html
import io
import itertools
import re
import textwrap
import time
from types import SimpleNamespace

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import nbformat
import pytest
import torch
from browser import PHONE, as_phone, chromium, errors, what_is_missing
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image

from course.environment import ROOT
from course.execution import execute_blocking
from course.rules import Cell, outputs
from shared.plotting import (
    COLOURS,
    CYCLE,
    PALETTE,
    _png,
    bars,
    curves,
    image_grid,
    show,
    show_steps,
    use_course_style,
)


@pytest.fixture(autouse=True)
def _restored():
    with mpl.rc_context():
        yield
        plt.close("all")


# ---------------------------------------------------------------- showing


@pytest.fixture(scope="module")
def shown() -> nbformat.NotebookNode:
    """A notebook whose cells were executed in a kernel, with the inline backend at work."""
    cells = [
        """
        import matplotlib.pyplot as plt
        from shared.plotting import show, show_steps, use_course_style
        use_course_style()
        fig, ax = plt.subplots(figsize=(9, 3.6))
        ax.plot([1, 2, 4])
        show("A line that rises\\nfrom 1 to 4.")
        """,
        """
        draw = lambda step: ax.bar(range(8), [min(i, step) for i in range(8)]) and ax.set(title=f"step {step}")
        for _ in range(2):
            fig, ax = plt.subplots(figsize=(9, 3.6))
            show_steps(fig, draw, range(6), 'Bars that "grow" & are < 6,\\nstep by step.')
        """,
    ]
    notebook = new_notebook(cells=[new_code_cell(textwrap.dedent(cell)) for cell in cells])
    assert execute_blocking(notebook, ROOT, timeout=120).failure is None
    return notebook


@pytest.mark.notebook
def test_a_figure_is_stored_once_with_its_text_and_its_size(shown):
    (output,) = shown.cells[0].outputs  # the inline backend doesn't show it again
    text = "A line that rises from 1 to 4."
    assert output.metadata["image/png"]["alt"] == output.data["text/plain"] == text
    assert output.metadata["image/png"]["palette"] == PALETTE
    picture = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"])))
    assert picture.width == pytest.approx(9 * 144, abs=40)
    assert output.metadata["image/png"]["width"] == pytest.approx(9 * 100, abs=28)
    assert len(output.data["image/png"]) < 50_000


@pytest.mark.notebook
def test_a_player_has_its_frames_a_still_picture_and_no_address(shown):
    first, second = shown.cells[1].outputs
    page = first.data["text/html"]
    assert page == second.data["text/html"], "the same in each run"
    assert len(page) < 300_000
    assert "://" not in page
    assert "fa-" not in page, "a button without a sign"
    frames = [base64.b64decode(found) for found in re.findall(r'] = "data:image/png;base64,([^"]*)"', page)]
    assert len(set(frames)) == 6
    assert {Image.open(io.BytesIO(frame)).size for frame in frames} == {(9 * 144, round(3.6 * 144))}
    still = re.search(r'<img class="still" width="\d+" alt="([^"]*)" src="data:image/png;base64,([^"]*)"', page)
    text = 'Bars that "grow" & are < 6, step by step.'
    assert html.unescape(still[1]) == text
    assert "<" not in still[1]
    assert base64.b64decode(still[2]) == base64.b64decode(first.data["image/png"]), "what GitHub and print show"
    assert first.metadata["image/png"]["alt"] == first.data["text/plain"] == text
    read = SimpleNamespace(code=[Cell(cell) for cell in shown.cells])
    complaints = [*outputs.outputs(read), *outputs.alternative_text(read), *outputs.palette(read)]
    assert complaints == [], "lint has nothing to say"


@pytest.mark.notebook
@pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing())
def test_one_can_step_through_a_player_without_a_network(shown, tmp_path):
    page = tmp_path / "page.html"
    head = '<!DOCTYPE html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    page.write_text(head + shown.cells[1].outputs[0].data["text/html"], encoding="utf-8")
    with chromium() as driver:
        as_phone(driver)
        driver.get(page.as_uri())
        picture = driver.find_element("css selector", ".animation img")
        deadline = time.monotonic() + 20
        while not picture.get_attribute("src") and time.monotonic() < deadline:
            time.sleep(0.1)
        seen = []
        for _ in range(6):
            seen.append(picture.get_attribute("src"))
            driver.find_element("css selector", '[aria-label="Next frame"]').click()
        assert len(set(seen)) == 6
        assert seen[-1] == picture.get_attribute("src"), "it stays at the last one"
        assert picture.is_displayed()
        assert not driver.find_element("css selector", ".still").is_displayed()
        assert driver.execute_script("return document.documentElement.scrollWidth") <= PHONE
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        assert not picture.is_displayed()
        assert driver.find_element("css selector", ".still").is_displayed()
        assert errors(driver) == []


def test_each_frame_is_drawn_on_cleared_axes_and_the_last_drawn_is_the_still(monkeypatch):
    figure, ax = plt.subplots(figsize=(2, 1))
    drawn = []

    def draw(step):
        ax.plot([1, 2])
        drawn.append((step, len(ax.lines)))

    show_steps(figure, draw, "abc", "three lines", still=1)
    assert set(drawn) == {("a", 1), ("b", 1), ("c", 1)}
    assert drawn[-1] == ("b", 1)
    assert plt.get_fignums() == []
    monkeypatch.setattr("shared.plotting.STEPS_BYTES", 3000)
    with pytest.raises(ValueError, match=r"3 frames take \d+ kB, the most is 3 kB"):
        show_steps(figure, draw, "abc", "three lines")


def test_outside_a_notebook_a_figure_is_drawn_and_closed_even_if_it_fails(recwarn):
    plt.subplots()
    show("nothing to see")
    assert plt.get_fignums() == recwarn.list == []
    plt.title("$\\nosuchcommand$")
    with pytest.raises(ValueError, match="nosuchcommand"):
        show("a formula")
    assert plt.get_fignums() == []


def test_a_figure_needs_a_text_and_a_player_steps():
    with pytest.raises(ValueError, match="no figure to show"):
        show("nothing")
    figure, _ = plt.subplots()
    with pytest.raises(ValueError, match="say in a sentence what the figure shows"):
        show("  ")
    with pytest.raises(ValueError, match="say in a sentence"):
        show_steps(figure, print, range(3), "")
    with pytest.raises(ValueError, match="1 frames"):
        show_steps(figure, print, range(1), "one")


def test_photographs_keep_their_colours_and_drawings_are_small():
    noise = torch.randint(0, 256, (1, 3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert Image.open(io.BytesIO(_png(image_grid(noise))[0])).mode == "RGB"
    figure, ax = plt.subplots()
    ax.plot([1, 3, 2])
    assert Image.open(io.BytesIO(_png(figure)[0])).mode == "P", "which takes a third of the bytes"


def test_the_picture_of_the_readme_is_the_stored_figure():
    folder = ROOT / "module_15_advanced_pytorch_internals"
    lesson = nbformat.read(next(folder.glob("15-01_*.ipynb")), as_version=4)
    cell = next(cell for cell in lesson.cells if cell.id == "hooks-figure")
    figures = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    assert base64.b64decode(figures[0]) == (folder / "images" / "15-01_hooks.png").read_bytes()


MEETING = {
    *itertools.pairwise([*CYCLE, CYCLE[0]]),  # bars and lines in order, all round
    *itertools.combinations(CYCLE[:4], 2),  # four ranks, in any order
    # areas of a memory map: parameter, gradient, activation, optimizer state, temporary
    *itertools.combinations([COLOURS[name] for name in ("blue", "red", "green", "sky", "orange")], 2),
}


def test_colours_that_meet_differ_in_greyscale_and_so_for_every_vision():
    """As Pillow, and many a printer, turns colours into grey."""
    grey = {colour: Image.new("RGB", (1, 1), colour).convert("L").getpixel((0, 0)) for colour in COLOURS.values()}
    assert min(abs(grey[one] - grey[other]) for one, other in MEETING) >= 0.1 * 255


# ---------------------------------------------------------------- kinds of figure


def test_image_grid_shows_every_image_in_order_on_the_whole_scale():
    images = torch.arange(-3.0, 8.0, requires_grad=True).reshape(11, 1, 1, 1).expand(11, 1, 4, 4)
    figure = image_grid(images, [str(i) for i in range(11)], columns=4, title="eleven")
    shown = [ax for ax in figure.axes if ax.images]
    assert [ax.get_title() for ax in shown] == [str(i) for i in range(11)]
    brightness = [float(ax.images[0].get_array().mean()) for ax in shown]
    assert brightness == pytest.approx([i / 10 for i in range(11)])
    assert {ax.images[0].get_clim() for ax in shown} == {(0, 1)}
    assert image_grid(torch.ones(1, 4, 4)).axes[0].images[0].get_array().max() == 0, "all alike is no mistake"
    for shape in ((3, 8, 8), (3, 3, 8, 8)):
        assert len([ax for ax in image_grid(torch.rand(shape)).axes if ax.images]) == 3
    with pytest.raises(ValueError, match=r"images must be .*, got \(2, 4, 8, 8\)"):
        image_grid(torch.rand(2, 4, 8, 8))


def test_curves_and_bars_label_what_they_draw():
    use_course_style()
    _, (left, right) = plt.subplots(1, 2)
    curves(left, {"a": [1, 2, 3], "b": [3, 2, 1]}, x=[10, 20, 30], title="T", xlabel="step", ylabel="loss")
    assert [t.get_text() for t in left.get_legend().get_texts()] == ["a", "b"]
    assert left.lines[0].get_xdata().tolist() == [10, 20, 30]
    assert left.lines[0].get_linestyle() != left.lines[1].get_linestyle()
    assert (left.get_title(loc="left"), left.get_xlabel(), left.get_ylabel()) == ("T", "step", "loss")
    curves(left, {"noisy": [1, 2], "too": [2, 1]}, dashes=False)
    assert {line.get_linestyle() for line in left.lines[2:]} == {"-"}
    assert curves(plt.figure().subplots(), {"alone": [1, 2]}).get_legend() is None
    bars(right, {"one": 1.0, "two": 2.5}, form="{:.1f}")
    assert [t.get_text() for t in right.texts] == ["1.0", "2.5"]
    assert [bar.get_width() for bar in right.patches] == [1.0, 2.5]
    assert right.yaxis_inverted(), "the first bar is on top"
    assert len(bars(plt.figure().subplots(), dict(zip("abcdefgh", range(8), strict=True))).patches) == 8, "or more"
