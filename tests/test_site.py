"""The site: what is on its pages, and that a browser without a network shows them as they should be."""

import importlib.util
import os
import re
import zipfile
from argparse import ArgumentParser
from collections import defaultdict
from dataclasses import replace
from html import escape, unescape
from pathlib import Path
from urllib.parse import unquote, urldefrag

import nbformat
import pytest
from browser import PHONE, as_phone, chromium, errors, what_is_missing

from course import instructor_guide, release, site, syllabus, ways
from course.edition import solutions as solutions_of
from course.edition import student_edition
from course.environment import ROOT
from course.exercise_form import HEADING
from course.syllabus import direct_needs

BOOK = syllabus.load()
CAN_BUILD = importlib.util.find_spec("sphinx_book_theme") is not None
ADDRESS = "https://github.com/owner/course"
TOPICS = list(BOOK.topics.values())
PAGE = TOPICS[0].file.replace(".ipynb", ".html")


def main(*arguments):
    """The status of `python -m course site`."""
    parser = ArgumentParser()
    site.add_arguments(parser)
    return site.main(parser.parse_args(list(map(str, arguments))))


@pytest.fixture(scope="module")
def lessons():
    return site.read_lessons(BOOK)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The site, built once for all tests of this file."""
    if not CAN_BUILD:
        pytest.skip("pip install -r requirements-site.txt")
    output = tmp_path_factory.mktemp("site") / "new"
    before = os.times()
    assert main("--output", output) == 0
    after = os.times()  # the processor's: other tests run beside this one
    assert sum(after[:4]) - sum(before[:4]) < 90
    return output


def attributes(page, tags, names):
    """The values of these attributes of these tags, both regular expressions."""
    return [unescape(found) for found in re.findall(rf'<{tags}\b[^<>]*?\s(?:{names})="([^"<>]+)"', page)]


# what is in it ------------------------------------------------------------------------------------------------------


def test_every_topic_has_its_page_its_solutions_and_its_notebook(built):
    size = sum(path.stat().st_size for path in built.rglob("*"))
    assert size < 60e6
    front = (built / "index.html").read_text(encoding="utf-8")
    for number, topic in BOOK.topics.items():
        name = Path(topic.file).stem
        for path in (f"{name}.html", f"{number}_solutions.html", f"notebooks/{name}.zip"):
            assert (built / path).is_file(), path
        assert f'<a href="{name}.html">{number} {escape(topic.title)}</a><span>{escape(topic.helps_when)}' in front
    if (ROOT / ".git").exists():
        assert f'<a href="{site.bundle_name(BOOK)}" download>' in front
        bundle = {path.partition("/")[2] for path in unzipped(built / site.bundle_name(BOOK))}
        assert bundle > {"README.md", "requirements.txt", "00_START_HERE.ipynb"} | {topic.file for topic in TOPICS}
    for name in ("glossary.html", "INSTRUCTOR_GUIDE.html", "search.html", "_static/mathjax/LICENSE", site.MARKER):
        assert (built / name).is_file()
    assert "base64" not in (built / "_static" / "sections.js").read_text(encoding="utf-8")


def test_links_and_pictures_are_there_and_nothing_comes_from_elsewhere(built):
    pages = {path: path.read_text(encoding="utf-8") for path in built.glob("*.html")}
    places = {path: set(attributes(page, r"\w+", "id")) for path, page in pages.items()}
    broken = defaultdict(list)
    for path, page in pages.items():
        parts = attributes(page, r"(?!a\b)\w+", "src|href")
        assert [part for part in parts if re.match(r"(https?:)?//", part)] == [], path.name
        for target in attributes(page, "a", "href") + parts:
            file, place = urldefrag(target)
            if re.match(r"[a-z]+:", target):
                continue
            found = built / unquote(file.partition("?")[0]) if file else path
            if not found.is_file() or (place and found in pages and unquote(place) not in places[found]):
                broken[path.name].append(target)
    assert not broken
    assert (built / ".nojekyll").is_file(), "GitHub's pages of a branch would leave _static out"


def test_figures_have_their_size_and_text_and_what_only_draws_and_hints_are_folded(built, lessons):
    for number, lesson in lessons.items():
        page = (built / BOOK.topics[number].file.replace(".ipynb", ".html")).read_text(encoding="utf-8")
        folded = sum("hide-input" in cell.metadata.get("tags", []) or cell.id == "setup" for cell in lesson.cells)
        assert page.count("tag_hide-input") == folded
        if number == "15-01":
            assert "Show the code of layout, draw_graph" in page, "a folded cell without a figure says what it is"
        assert page.count("<details") == page.count("</details>")
        assert "the curriculum allows" not in page, "a page is what students get"
        shown = [cell for cell in lesson.cells if cell.cell_type == "code" and "nbgrader" not in cell.metadata]
        for output in (output for cell in shown for output in cell.outputs):
            if "image/png" in output.get("data", {}) and "text/html" not in output.data:
                about = output.metadata["image/png"]
                assert f'alt="{escape(about["alt"])}" width="{about["width"]}"' in page


def unzipped(path):
    """The texts in a zip."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode(errors="replace") for name in archive.namelist()}


@pytest.mark.parametrize("with_solutions", [False, True])
def test_solutions_are_on_their_own_pages_or_nowhere(tmp_path, lessons, with_solutions):
    source, extra = tmp_path / "source", tmp_path / "extra"
    source.mkdir()
    site.write_pages(BOOK, lessons, source, extra, with_solutions)
    texts = {path.name: path.read_text(encoding="utf-8") for path in source.glob("*.md")}
    notebooks = {path.name: path.read_text(encoding="utf-8") for path in source.glob("*.ipynb")}
    notebooks |= {f"zip of {name}": text for path in extra.glob("notebooks/*") for name, text in unzipped(path).items()}
    assert len(notebooks) == 2 * len(lessons)
    for path, notebook in notebooks.items():
        cells = nbformat.reads(notebook, as_version=4).cells
        texts[path] = "\n".join(cell.source for cell in cells)
        shown = {
            "nbgrader" in cell.metadata for cell in cells if cell.get("outputs")
        }  # no check's: they judge solutions
        assert shown == (set() if path.startswith("zip") else {False})
    assert sum(str(name).endswith("_solutions.md") for name in texts) == with_solutions * len(lessons)
    assert (instructor_guide.NAME in texts) == with_solutions
    assert ("olution" in texts["index.md"]) == with_solutions
    assert not any("### BEGIN SOLUTION" in text for text in texts.values())
    for number, lesson in lessons.items():
        for block in [block for blocks in solutions_of(lesson).values() for block in blocks if len(block) > 200]:
            inside = [name for name, text in texts.items() if block in text]
            assert inside == ([f"{number}_solutions.md"] if with_solutions else [])
        tasks = {cell.id for cell in lesson.cells if cell.id.startswith("ex-") and cell.id.endswith("-task")}
        back = re.findall(r"\(#at-15-\d\d-(.+?)\)", texts.get(f"{number}_solutions.md", ""))
        assert set(back) == (tasks if with_solutions else set())
        page = texts[BOOK.topics[number].file]
        assert page.count("[The solution](") == with_solutions * len(tasks)
        assert page.count("_solutions.html") == with_solutions
        tasks = HEADING.findall("\n".join(cell.source for cell in lesson.cells))
        assert re.findall(r"^\*(\d+) points, (\d+) minutes\*$", page, re.MULTILINE) == [task[3:] for task in tasks]


def test_a_draft_is_neither_on_the_site_nor_linked(tmp_path):
    book = replace(BOOK, topics=BOOK.topics | {"15-03": replace(BOOK.topics["15-03"], status="draft")})
    (tmp_path / "source").mkdir()
    site.write_pages(book, site.read_lessons(book), tmp_path / "source", tmp_path / "extra", solutions=True)
    texts = [path.read_text(encoding="utf-8") for path in (tmp_path / "source").iterdir()]
    texts += [text for path in tmp_path.glob("extra/notebooks/*") for text in unzipped(path).values()]
    assert len(texts) == 9 * 3 + 3
    assert [text for text in texts if "](15-03_" in text or "15-03</a>" in text] == []


def test_a_term_is_in_the_notebook_that_explains_it_and_the_glossary_is_in_order(lessons):
    terms = site.GLOSSARY
    for number, lesson in lessons.items():
        text = " ".join(cell.source for cell in lesson.cells).lower()
        assert len(terms[number]) >= 4
        for term in terms[number]:
            missing = [word for word in re.findall(r"[\w.]+", term.lower()) if word[:6] not in text]
            assert not missing, f"{number} has no {term}"
    everywhere = [term for topic in terms.values() for term in topic]
    shown = [line for line in site.glossary_page(TOPICS).splitlines() if line in everywhere]
    assert shown == sorted(everywhere, key=str.lower)


# ways to a notebook -------------------------------------------------------------------------------------------------


def with_address(address):
    return replace(BOOK, module=replace(BOOK.module, repository=address))


def test_an_address_on_github_gives_one_click_and_without_one_there_is_the_download():
    topic = BOOK.topics["15-03"]
    own = ["index.html#begin", f"notebooks/{topic.file.removesuffix('.ipynb')}.zip"]
    for address in ("", "https://example.org/course"):
        book = with_address(address)
        assert re.findall('href="([^"]*)"', ways.buttons(book, topic, None)) == own
        assert "b.zip" not in ways.how_to_begin(book)
        assert '<a href="b.zip" download>The students\' bundle</a>** (17 MB)' in ways.how_to_begin(book, "b.zip", 17.4)
    found = re.findall('href="([^"]*)"', ways.buttons(with_address(ADDRESS + ".git"), topic, "15-03_solutions"))
    assert found == [
        *own,
        f"https://colab.research.google.com/github/owner/course/blob/student/{topic.file}",
        f"https://kaggle.com/kernels/welcome?src={ADDRESS}/blob/student/{topic.file}",
        f"https://mybinder.org/v2/gh/owner/course/HEAD?urlpath=lab/tree/workbook/{topic.file}",
        "15-03_solutions.html",
    ]
    assert f"git clone {ADDRESS}" in ways.how_to_begin(with_address(ADDRESS))


# the command --------------------------------------------------------------------------------------------------------


def test_a_folder_with_something_else_is_left_alone(tmp_path, lessons):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(site.SiteError, match="something else than a site"):
        site.build(BOOK, lessons, tmp_path, True, b"")
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.skipif(not CAN_BUILD, reason="pip install -r requirements-site.txt")
def test_a_warning_of_sphinx_ends_the_build_and_the_old_site_stays(tmp_path):
    (tmp_path / site.MARKER).touch()
    with pytest.raises(site.SiteError, match=r"(?s)Sphinx said:.*15-01_custom_autograd"):  # the front page links it
        site.build(BOOK, {}, tmp_path, False, b"")
    assert [path.name for path in tmp_path.iterdir()] == [site.MARKER]


@pytest.mark.skipif(not CAN_BUILD, reason="pip install -r requirements-site.txt")
def test_the_command_leaves_solutions_out_and_does_without_a_commit(monkeypatch, tmp_path):
    def no_commit(_book):
        raise release.ReleaseError("no history")

    wished = []
    monkeypatch.setattr(site, "student_bundle", no_commit)
    monkeypatch.setattr(site, "build", lambda *wish: wished.append(wish[2:]))
    assert main("--no-solutions", "--output", tmp_path) == 0
    assert wished == [(tmp_path, False, b"")]
    (tmp_path / "file").touch()
    assert main("--output", tmp_path / "file") == 2


@pytest.mark.skipif(CAN_BUILD, reason="nothing is missing")
def test_what_is_missing_is_named_with_the_lines_that_install_it(tmp_path, capsys):
    assert main("--output", tmp_path) == 1
    assert ".site/bin/python -m pip install -r requirements-site.txt -c constraints.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (lambda lesson: nbformat.writes(student_edition(lesson)), "has no outputs: python -m course run 15-01 --save"),
        (lambda lesson: nbformat.writes(lesson).replace("### END", "### EMD"), "cell 'ex-.*BEGIN SOLUTION"),
        (lambda lesson: "{", "not JSON"),
    ],
)
def test_a_notebook_that_has_no_page_is_named(tmp_path, lessons, damaged, message):
    topic = replace(TOPICS[0], path=tmp_path / TOPICS[0].file)
    topic.path.write_text(damaged(lessons["15-01"]), encoding="utf-8")
    with pytest.raises(site.SiteError, match=rf"^15-01_.*\.ipynb: {message}"):
        site.read_lessons(replace(BOOK, topics={"15-01": topic}))


# in a browser -------------------------------------------------------------------------------------------------------

READY = """
const done = arguments[arguments.length - 1];
const math = () => window.MathJax && MathJax.startup ? MathJax.startup.promise : Promise.resolve();
math().then(() => requestAnimationFrame(() => done({
    wide: document.documentElement.scrollWidth,
    math: document.querySelectorAll("span.math, div.math").length,
    set: document.querySelectorAll(".math mjx-container").length,
    wrong: [...document.querySelectorAll("mjx-merror, [data-mjx-error]")].map(e => e.textContent),
    dollars: [...document.querySelectorAll("article p, article li, article summary")]
        .filter(e => /\\$[^$]+\\$/.test([...e.childNodes].filter(n => n.nodeType == 3).map(n => n.data).join("")))
        .map(e => e.textContent.slice(0, 80)),
    missing: [...document.images].filter(i => i.loading != "lazy" && !i.naturalWidth).map(i => i.src),
    loaded: performance.getEntriesByType("resource").map(e => e.name).filter(n => !/^(file|data|blob):/.test(n)),
})));
"""


# code that PyTorch has written may be wider
CUT = """
const fits = e => e.textContent.split("\\n").every(line => line.length <= 100);
return [...document.querySelectorAll(".bd-article pre")]
    .filter(e => e.scrollWidth > e.clientWidth && fits(e)).map(e => e.textContent)
"""


@pytest.fixture(scope="module")
def browser():
    if missing := what_is_missing():
        pytest.skip(missing)
    with chromium() as driver:
        yield driver


@pytest.mark.slow
def test_every_page_on_a_phone_without_a_network_and_in_a_window_of_1280(built, browser):
    """No error, no request, mathematics set, nothing wider than the screen; no line of 100 columns is cut."""
    found, formulas = {}, 0
    for path in sorted(built.glob("*.html")):
        as_phone(browser)
        browser.get(path.as_uri())
        page = browser.execute_async_script(READY)
        formulas += page["math"]
        complaints = {key: page[key] for key in ("wrong", "dollars", "missing", "loaded") if page[key]}
        complaints |= {"math": page["math"], "set": page["set"]} if page["math"] != page["set"] else {}
        complaints |= {"wide": page["wide"]} if page["wide"] > PHONE else {}
        complaints |= {"console": said} if (said := errors(browser)) else {}
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        complaints |= {"cut": lines} if (lines := browser.execute_script(CUT)) else {}
        found |= {path.name: complaints} if complaints else {}
    assert not found
    assert formulas > 50


def until(browser, condition):
    """What it gives, once it gives something."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 20).until(condition)


@pytest.mark.slow
def test_search_finds_the_place_that_explains_a_term_and_passes_over_words_that_tell_nothing(built, browser):
    def search(query):
        browser.get(f"{(built / 'search.html').as_uri()}?q={query}")
        found = until(browser, lambda _: browser.find_elements("css selector", "#search-results li"))
        return found, {mark.text.lower() for item in found for mark in item.find_elements("css selector", "mark")}

    # the glossary, a heading, what has the words as they were given; lessons before guide and solutions
    first = {"fragmentation": "glossary.html#term-fragmentation", "RING all reduce": "15-08_d", "dead code": "15-06_t"}
    for query, page in {**first, "hook order": "15-01_c", "trusts no pass": "15-06_t"}.items():
        found, quoted = search(query)
        address = found[0].find_element("css selector", "a").get_attribute("href").rpartition("/")[2]
        assert address.startswith(page)
        file, place = urldefrag(address)
        assert f'id="{place}"' in (built / file).read_text(encoding="utf-8")
        assert quoted & set(query.lower().split())
    for query in ("out of memory", "what is the gradient checkpointing of a block"):
        _, quoted = search(query)
        assert quoted
        assert not quoted & {"of", "what", "is", "the", "a"}
    search("DataLoader num_workers (zebra ackward")
    said = browser.find_element("id", "search-results").text
    assert said.startswith("No section has “(zebra” or “ackward”. These have most of the words:")
    assert "15-02" in said
    browser.get(f"{(built / 'search.html').as_uri()}?q=(zebra")
    assert browser.find_element("id", "search-results").text == "No section has “(zebra”."
    assert errors(browser) == []


@pytest.mark.slow
def test_on_a_phone_a_player_is_in_one_line_counts_and_grows_and_lessons_and_contents_open(built, browser):
    as_phone(browser)
    browser.get((built / PAGE).as_uri())
    tops = """return [...document.querySelectorAll(".anim-buttons")]
        .filter(line => line.getBoundingClientRect().width)
        .map(line => [...line.querySelectorAll("button, .count")].map(b => b.getBoundingClientRect()))
        .map(boxes => new Set(boxes.filter(box => box.width).map(box => box.top)).size)"""
    assert set(browser.execute_script(tops)) == {1}
    count = browser.find_element("css selector", ".animation .count")
    before = count.text
    browser.execute_script("document.querySelector('.animation [title=\"Next frame\"]').click()")
    assert (before[:5], count.text[:5]) == ("1 of ", "2 of ")
    wide = "return [arguments[0].offsetWidth, document.documentElement.scrollWidth]"
    picture = browser.find_element("css selector", ".animation > img")
    assert browser.execute_script(wide, picture)[0] < PHONE
    picture.click()
    assert [width > PHONE for width in browser.execute_script(wide, picture)] == [True, False], "large, and scrolls"
    for side in ("primary", "secondary"):
        browser.get((built / PAGE).as_uri())
        [button] = [found for found in browser.find_elements("css selector", f".{side}-toggle") if found.is_displayed()]
        button.click()
        assert browser.find_element("id", f"pst-{side}-sidebar-modal").get_attribute("open")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_the_contents_follow_the_page(built, browser):
    from selenium.webdriver import ActionChains

    browser.get((built / PAGE).as_uri())
    seen = """const pane = document.querySelector("#pst-secondary-sidebar").getBoundingClientRect();
        const active = [...document.querySelectorAll("#pst-secondary-sidebar .nav-link.active")].pop();
        const link = active?.getBoundingClientRect();
        return Boolean(link) && link.top > 0 && link.top >= pane.top && link.bottom <= pane.bottom"""
    for _ in range(30):
        ActionChains(browser).scroll_by_amount(0, 1500).perform()
    assert until(browser, lambda _: browser.execute_script(seen))


@pytest.mark.slow
def test_pointing_at_a_topic_of_the_map_shows_the_arcs_from_those_that_it_builds_on(built, browser):
    browser.get((built / "index.html").as_uri())
    point = """return [...document.querySelectorAll(".map .stop")].map(stop => {
            stop.dispatchEvent(new Event("mouseenter"));
            const curves = [...document.querySelectorAll(".map.asked path.on")].map(arc => arc.getAttribute("d"));
            stop.dispatchEvent(new Event("mouseleave"));
            return curves.map(curve => Math.floor(curve.split(" ")[2] / 4)); // rows of 4 rem
        })"""
    needs = [[list(BOOK.topics).index(need) for need in direct_needs(topic, BOOK.topics)] for topic in TOPICS]
    assert browser.execute_script(point) == needs
    assert browser.find_elements("css selector", ".map.asked, .map .on") == []


@pytest.mark.slow
def test_dark_mode_turns_drawings_and_leaves_photographs(built, browser):
    browser.get((built / PAGE).as_uri())
    style = "return [...document.querySelectorAll(arguments[0])].map(e => getComputedStyle(e).filter)"
    for mode, turned in (("light", False), ("dark", True)):
        browser.execute_script("document.documentElement.dataset.theme = arguments[0]", mode)
        drawings, photographs = (browser.execute_script(style, f"img.{kind}") for kind in ("drawing", "photograph"))
        assert drawings
        assert photographs
        assert all(("invert" in found) == turned for found in drawings)
        assert not any("invert" in found for found in photographs)
