"""The site: what is on its pages, and that a browser without a network shows them as they should be."""

import importlib.util
import io
import os
import re
import time
import zipfile
from argparse import Namespace
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag

import nbformat
import pytest
from browser import PHONE, as_phone, chromium, errors, what_is_missing

from course import release, site, syllabus, ways
from course.edition import solutions as solutions_of

BOOK = syllabus.load()
CAN_BUILD = importlib.util.find_spec("sphinx_book_theme") is not None
IN_BROWSER = pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing())
ADDRESS = "https://github.com/owner/course"


@pytest.fixture(scope="module")
def lessons():
    return site.read_lessons(BOOK)


@pytest.fixture(scope="module")
def built(tmp_path_factory, lessons):
    """The site, built once for all tests of this file."""
    if not CAN_BUILD:
        pytest.skip("pip install -r requirements-site.txt")
    output = tmp_path_factory.mktemp("site")
    before = os.times()
    try:
        bundle = site.student_bundle(BOOK)
    except release.ReleaseError:  # a copy without a history
        bundle = b""
    site.build(BOOK, lessons, output, bundle=bundle)
    after = os.times()  # the processor's: other tests run beside this one
    assert sum(after[:4]) - sum(before[:4]) < 90
    return output


class _Page(HTMLParser):
    """What a page refers to, and the places in it that can be referred to."""

    def __init__(self, path):
        super().__init__()
        self.links, self.parts, self.ids = [], [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        else:
            self.parts += [found[name] for name in ("src", "href") if found.get(name)]


# what is in it ------------------------------------------------------------------------------------------------------


def test_every_topic_has_its_page_its_solutions_and_its_notebook(built, lessons):
    size = sum(path.stat().st_size for path in built.rglob("*"))
    assert size < 60e6
    for lesson in lessons:
        for path in (f"{lesson.page}.html", f"{lesson.solutions_page}.html", f"notebooks/{lesson.page}.zip"):
            assert (built / path).is_file(), path
        front = (built / "index.html").read_text(encoding="utf-8")
        assert f'<a href="{lesson.page}.html">{lesson.topic.number} ' in front, "in the map"
    for name in ("glossary", "INSTRUCTOR_GUIDE", "search"):
        assert (built / f"{name}.html").is_file()


def test_links_and_pictures_are_there_and_nothing_comes_from_elsewhere(built):
    pages = {path: _Page(path) for path in built.glob("*.html")}
    broken = defaultdict(list)
    for path, page in pages.items():
        assert [part for part in page.parts if re.match(r"(https?:)?//", part)] == [], path.name
        for target in page.links + page.parts:
            file, place = urldefrag(target)
            if re.match(r"[a-z]+:", target):
                continue
            found = (built / unquote(file)).resolve() if file else path
            found = found.parent / unquote(file.partition("?")[0]).rpartition("/")[2] if "?" in file else found
            if not found.is_file() or (place and found in pages and unquote(place) not in pages[found].ids):
                broken[path.name].append(target)
    assert not broken
    assert (built / ".nojekyll").is_file(), "GitHub's pages of a branch would leave _static out"


def test_code_that_only_draws_and_hints_are_folded(built, lessons):
    for lesson in lessons:
        page = (built / f"{lesson.page}.html").read_text(encoding="utf-8")
        folded = sum("hide-input" in cell.metadata.get("tags", []) or cell.id == "setup" for cell in lesson.full.cells)
        assert page.count("tag_hide-input") == folded
        hints = sum(
            len(re.findall(r"^<details>", cell.source, re.MULTILINE))
            for cell in lesson.full.cells
            if cell.cell_type == "markdown"
        )
        assert len(re.findall(r"<details>\s*<summary>", page)) == hints
        assert page.count("<details") == page.count("</details>")


def unzipped(path):
    """The texts in a zip."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.mark.parametrize("with_solutions", [False, True])
def test_solutions_are_on_their_own_pages_or_nowhere(tmp_path, lessons, with_solutions):
    source, extra = tmp_path / "source", tmp_path / "extra"
    source.mkdir()
    site.write_pages(BOOK, lessons, source, extra, with_solutions)
    texts = {path.name: path.read_text(encoding="utf-8") for path in source.glob("*.md")}
    notebooks = {path: path.read_text(encoding="utf-8") for path in source.glob("*.ipynb")}
    notebooks |= {f"zip of {name}": text for path in extra.glob("notebooks/*") for name, text in unzipped(path).items()}
    assert len(notebooks) == 2 * len(lessons)
    for path, notebook in notebooks.items():
        texts[path] = "\n".join(cell.source for cell in nbformat.reads(notebook, as_version=4).cells)
    assert sum(str(name).endswith("_solutions.md") for name in texts) == with_solutions * len(lessons)
    assert (site.GUIDE in texts) == with_solutions
    assert ("olution" in texts["index.md"]) == with_solutions
    for lesson in lessons:
        for block in [block for blocks in solutions_of(lesson.full).values() for block in blocks if len(block) > 200]:
            inside = [name for name, text in texts.items() if block in text]
            assert inside == ([f"{lesson.solutions_page}.md"] if with_solutions else [])
        tasks = {cell.id for cell in lesson.full.cells if cell.id.startswith("ex-") and cell.id.endswith("-task")}
        back = re.findall(r"\(#at-15-\d\d-(.+?)\)", texts.get(f"{lesson.solutions_page}.md", ""))
        assert set(back) == (tasks if with_solutions else set())
        page = texts[source / lesson.topic.file]
        assert page.count("[The solution](") == with_solutions * len(tasks)


def test_the_checks_of_the_solutions_are_not_quoted_on_the_students_page(tmp_path, lessons):
    page = site.lesson_page(lessons[0], BOOK, tmp_path, solutions=True)
    graded = [cell for cell in page.cells if cell.metadata.get("nbgrader")]
    assert graded
    assert not any(cell.get("outputs") for cell in graded)
    assert any(cell.get("outputs") for cell in page.cells)


def test_the_words_of_a_term_are_in_the_notebook_that_explains_it(lessons):
    terms = site.read_glossary()
    assert set(terms) <= set(BOOK.topics)
    for lesson in lessons:
        text = " ".join(cell.source for cell in lesson.full.cells).lower()
        assert len(terms[lesson.topic.number]) >= 4
        texts = {cell.id for cell in lesson.full.cells if cell.cell_type == "markdown"}
        for term, (place, _) in terms[lesson.topic.number].items():
            assert place in texts, f"{lesson.topic.number} has no text {place}, which is to explain {term}"
            missing = [word for word in re.findall(r"[\w.]+", term.lower()) if word[:6] not in text]
            assert not missing, f"{lesson.topic.number} has no {term}"
    assert len({term.lower() for topic in terms.values() for term in topic}) == sum(map(len, terms.values()))


def test_what_is_folded_is_markdown_as_well():
    apart = "<details><summary>A</summary>\n\n**b**\n\n</details>"
    assert site.alone_on_its_line("<details><summary>A</summary>\n**b**\n</details>") == apart
    assert site.alone_on_its_line(apart) == apart


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


def test_the_site_has_the_bundle_that_its_front_page_names(built, lessons):
    page = (built / "index.html").read_text(encoding="utf-8")
    name = site.bundle_name(BOOK)
    if not (built / name).is_file():
        pytest.skip("no commit to make the bundle of")
    assert f'<a href="{name}" download>' in page
    with zipfile.ZipFile(io.BytesIO((built / name).read_bytes())) as archive:
        files = [path.removeprefix("module-15-student/") for path in archive.namelist()]
    assert {"README.md", "requirements.txt", "00_START_HERE.ipynb"} | {le.topic.file for le in lessons} <= set(files)


# the command --------------------------------------------------------------------------------------------------------


def test_a_folder_with_something_else_is_left_alone(tmp_path, lessons):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(site.SiteError, match="something else than a site"):
        site.build(BOOK, lessons, tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.skipif(CAN_BUILD, reason="nothing is missing")
def test_what_is_missing_is_named_with_the_lines_that_install_it(tmp_path, capsys):
    assert site.main(Namespace(output=tmp_path)) == 1
    assert ".site/bin/python -m pip install -r requirements-site.txt -c constraints.txt" in capsys.readouterr().err


def test_a_notebook_without_outputs_is_named(tmp_path):
    for lesson in site.read_lessons(BOOK):
        nbformat.write(lesson.edition, tmp_path / lesson.topic.file)
    with pytest.raises(site.SiteError, match=r"15-01_.*: has no outputs: python -m course run 15-01 --save"):
        site.read_lessons(BOOK, tmp_path)


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


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


@IN_BROWSER
@pytest.mark.slow
def test_every_page_on_a_phone_without_a_network(built, browser):
    """No error, no request, mathematics set, nothing wider than the screen."""
    as_phone(browser)
    found, formulas = {}, 0
    for path in sorted(built.glob("*.html")):
        browser.get(path.as_uri())
        page = browser.execute_async_script(READY)
        formulas += page["math"]
        complaints = {key: page[key] for key in ("wrong", "dollars", "missing", "loaded") if page[key]}
        complaints |= {"math": page["math"], "set": page["set"]} if page["math"] != page["set"] else {}
        complaints |= {"wide": page["wide"]} if page["wide"] > PHONE else {}
        complaints |= {"console": said} if (said := errors(browser)) else {}
        found |= {path.name: complaints} if complaints else {}
    assert not found
    assert formulas > 50
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


# code that PyTorch has written may be wider
CUT = """
const fits = e => e.textContent.split("\\n").every(line => line.length <= 100);
return [...document.querySelectorAll(".bd-article pre")]
    .filter(e => e.scrollWidth > e.clientWidth && fits(e)).map(e => e.textContent)
"""


@IN_BROWSER
@pytest.mark.slow
def test_lines_of_100_columns_fit_into_a_window_of_1280(built, browser):
    for path in sorted(built.glob("*.html")):
        browser.get(path.as_uri())
        assert browser.execute_script(CUT) == [], path.name


def results(browser):
    """What search has found, once it has."""
    deadline = time.monotonic() + 20
    while not (found := browser.find_elements("css selector", "#search-results li")) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


@IN_BROWSER
@pytest.mark.slow
def test_search_finds_the_place_that_explains_a_term_and_passes_over_words_that_tell_nothing(built, browser):
    def search(query):
        browser.get(f"{(built / 'search.html').as_uri()}?q={query}")
        found = results(browser)
        return found, {mark.text.lower() for item in found for mark in item.find_elements("css selector", "mark")}

    ring = "15-08_distributed_primitives_and_communication.html#at-15-08-s4"
    for query, first in (("fragmentation", "glossary.html#term-fragmentation"), ("RING all reduce", ring)):
        found, quoted = search(query)
        address = found[0].find_element("css selector", "a").get_attribute("href")
        assert address.endswith(f"/{first}")
        file, place = urldefrag(first)
        assert place in _Page(built / file).ids
        assert all(word in " ".join(quoted) for word in query.lower().split())
    for query in ("out of memory", "what is the gradient checkpointing of a block"):
        _, quoted = search(query)
        assert quoted
        assert not quoted & {"of", "what", "is", "the", "a"}
    browser.get(f"{(built / 'search.html').as_uri()}?q=(zebra tensor")
    assert browser.find_element("id", "search-results").text == "No section has “(zebra”."
    assert errors(browser) == []


@IN_BROWSER
@pytest.mark.slow
def test_a_notebook_is_downloaded_from_a_page_that_was_opened_as_a_file(built, browser, lessons, tmp_path):
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    browser.get((built / f"{lessons[0].page}.html").as_uri())
    browser.find_element("link text", "Download the notebook").click()
    arrived = tmp_path / f"{lessons[0].page}.zip"
    deadline = time.monotonic() + 20
    while not arrived.is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(unzipped(arrived)) == [lessons[0].topic.file]


@IN_BROWSER
@pytest.mark.slow
def test_the_buttons_of_a_player_are_in_one_line_on_a_phone(built, browser, lessons):
    as_phone(browser)
    browser.get((built / f"{lessons[0].page}.html").as_uri())
    tops = """return [...document.querySelectorAll(".anim-buttons")]
        .filter(line => line.getBoundingClientRect().width)
        .map(line => [...line.querySelectorAll("button, .count")].map(b => b.getBoundingClientRect()))
        .map(boxes => new Set(boxes.filter(box => box.width).map(box => box.top)).size)"""
    lines = browser.execute_script(tops)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert lines
    assert set(lines) == {1}


@IN_BROWSER
@pytest.mark.slow
@pytest.mark.parametrize("side", ["primary", "secondary"])
def test_on_a_phone_the_lessons_and_the_contents_open(built, browser, lessons, side):
    as_phone(browser)
    browser.get((built / f"{lessons[0].page}.html").as_uri())
    [button] = [found for found in browser.find_elements("css selector", f".{side}-toggle") if found.is_displayed()]
    button.click()
    opened = browser.find_element("id", f"pst-{side}-sidebar-modal").get_attribute("open")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert opened


@IN_BROWSER
@pytest.mark.slow
def test_the_contents_follow_the_page(built, browser, lessons):
    from selenium.webdriver import ActionChains

    browser.get((built / f"{lessons[0].page}.html").as_uri())
    seen = """const pane = document.querySelector("#pst-secondary-sidebar").getBoundingClientRect();
        const active = [...document.querySelectorAll("#pst-secondary-sidebar .nav-link.active")].pop();
        const link = active?.getBoundingClientRect();
        return Boolean(link) && link.top > 0 && link.top >= pane.top && link.bottom <= pane.bottom"""
    for _ in range(30):
        ActionChains(browser).scroll_by_amount(0, 1500).perform()
    deadline = time.monotonic() + 20
    while not browser.execute_script(seen) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert browser.execute_script(seen)


@IN_BROWSER
@pytest.mark.slow
def test_dark_mode_turns_drawings_and_leaves_photographs(built, browser, lessons):
    browser.get((built / f"{lessons[0].page}.html").as_uri())
    style = "return [...document.querySelectorAll(arguments[0])].map(e => getComputedStyle(e).filter)"
    for mode, turned in (("light", False), ("dark", True)):
        browser.execute_script("document.documentElement.dataset.theme = arguments[0]", mode)
        drawings, photographs = (browser.execute_script(style, f"img.{kind}") for kind in ("drawing", "photograph"))
        assert drawings
        assert photographs
        assert all(("invert" in found) == turned for found in drawings)
        assert not any("invert" in found for found in photographs)
