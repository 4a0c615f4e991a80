"""The instructors' guide is true of today's notebooks: its pages, hours, headings, exercises, and what checks say."""

import importlib
import re

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from course import instructor_guide, lint, module_readme, start_page
from course.execution import read_notebook
from course.exercise_form import HEADING
from course.syllabus import direct_needs, load

SYLLABUS = load()
TOPICS = {number: topic for number, topic in SYLLABUS.topics.items() if not topic.is_draft}
GUIDE = SYLLABUS.path.parent / instructor_guide.NAME
TEXT = GUIDE.read_text(encoding="utf-8").replace(start_page.NO_BREAK, " ")
BY_HAND = re.sub(r"<!-- generated from .*?<!-- end of [^>]*>", "", TEXT, flags=re.DOTALL)
PAGES = {page[:5]: page for page in re.split(r"^## ", BY_HAND, flags=re.MULTILINE) if re.match(r"\d+-\d\d ", page)}
LESSONS = {number: read_notebook(topic.path)[0] for number, topic in TOPICS.items()}
PARTS = {number: instructor_guide.parts(lesson) for number, lesson in LESSONS.items()}

# a bullet on what goes wrong: the exercise, what the check says in quotes, and which wrong answer of its tests this is
MISTAKE = re.compile(r"^- \*\*(\d+-\d\d\.\d), (.*?)<!-- wrong: ([^:]+): (.+?) -->", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^- \*\*(Section|Milestone) (\d+), “([^”]+)”", re.MULTILINE)


def sources(number, kind):
    return "\n".join(cell.source for cell in LESSONS[number].cells if cell.cell_type == kind)


def words(text):
    """The text in one line, however it was wrapped."""
    return " ".join(text.split())


# --------------------------------------------------------------------------------------------------------------------
# hours and schedules


def test_what_is_generated_is_up_to_date():
    findings = [str(finding) for finding in lint.lint_readme(SYLLABUS) if finding.file == str(GUIDE)]
    assert findings == []


def test_hours_are_those_of_the_students_start_page():
    rows = re.findall(r"^\| (\d+-\d\d) .*? \| .*? \| (.*?) \| (.*?) \| .*? \|$", generated("hours"), re.MULTILINE)
    page = start_page.start_page(SYLLABUS, LESSONS).cells[0].source.replace(start_page.NO_BREAK, " ")
    told = re.findall(r"^\| \[(\d+-\d\d) .*? \| .*? \| (.*?) \| \d+ for \d+ points, (.*?) \|$", page, re.MULTILINE)
    assert [(number, *map(minutes, times)) for number, *times in rows] == [
        (number, *map(minutes, times)) for number, *times in told
    ]
    assert [number for number, *_ in rows] == list(TOPICS)


def test_the_last_row_of_the_hours_is_their_sum():
    *rows, total = [
        [minutes(cell) for cell in line.strip("| ").split(" | ")[-3:]] for line in generated("hours").splitlines()[2:]
    ]
    assert total == [sum(column) for column in zip(*rows, strict=True)]
    assert all(reading + exercises == together for reading, exercises, together in [*rows, total])


@pytest.mark.parametrize("number", TOPICS)
def test_a_topic_s_parts_are_all_of_it(number):
    parts = PARTS[number]
    assert sum(part.reading for part in parts) == pytest.approx(start_page.reading_minutes(LESSONS[number]))
    tasks = {f"{task[0]}.{task[1]}": int(task[4]) for task in HEADING.findall(sources(number, "markdown"))}
    assert instructor_guide.exercises(parts) == tasks
    assert len([part for part in parts if part.stops]) == 1, "one place to stop for the day"
    lesson = [part.heading for part in parts if not part.heading.startswith("Appendix: ")]
    assert (lesson[0], lesson[-1]) == (instructor_guide.BEGINNING, instructor_guide.END)


A_WEEK = [numbers for numbers, _ in instructor_guide.A_WEEK.values()]


@pytest.mark.parametrize("plan", [A_WEEK, instructor_guide.A_TERM.values()], ids=["week", "term"])
def test_a_plan_of_all_has_each_topic_once_and_after_those_it_builds_on(plan):
    order = [number for numbers in plan for number in numbers]
    assert sorted(order) == sorted(TOPICS)
    for place, number in enumerate(order):
        assert set(direct_needs(TOPICS[number], TOPICS)) <= set(order[:place])


def test_picked_topics_bring_what_they_build_on():
    for aim, numbers in instructor_guide.PICKS.items():
        for place, number in enumerate(numbers):
            assert set(direct_needs(TOPICS[number], TOPICS)) <= set(numbers[:place]), aim


def test_the_short_list_names_exercises_that_there_are():
    for numbers, chosen in instructor_guide.A_WEEK.values():
        assert set(chosen) <= {exercise for number in numbers for exercise in instructor_guide.exercises(PARTS[number])}


def test_a_heading_splits_a_cell_and_code_counts_where_it_stands():
    lesson = new_notebook(
        cells=[
            new_markdown_cell("# Title\n\n## Setup"),
            new_markdown_cell("## 1. First\n\n" + "word " * 400),
            new_code_cell("x = 1\n" * 40),
            new_markdown_cell(
                "Stop here for today.\n\n## 2. Second\n\n### Exercise 15-01.1 — A (5 points, 10 minutes)"
            ),
            new_code_cell("answer\n" * 400, metadata={"nbgrader": {}}),
        ]
    )
    title, first, second = instructor_guide.parts(lesson)
    assert [part.heading for part in (title, first, second)] == [instructor_guide.BEGINNING, "1. First", "2. Second"]
    assert round(first.reading) == 4
    assert (first.stops, second.stops) == (True, False)
    assert (first.exercises, second.exercises) == ({}, {"15-01.1": 10})


def generated(name):
    begin, end = (re.escape(marker) for marker in module_readme.markers(name, instructor_guide.SOURCE))
    return re.search(f"{begin}(.*?){end}", TEXT, re.DOTALL)[1].strip()


def minutes(shown):
    hours, rest = (re.search(rf"(\d+) {unit}", shown) for unit in ("h", "min"))
    return 60 * int(hours[1] if hours else 0) + int(rest[1] if rest else 0)


# --------------------------------------------------------------------------------------------------------------------
# what is written by hand


def test_every_topic_has_its_page_in_order():
    assert list(PAGES) == list(TOPICS)
    for number, page in PAGES.items():
        assert page.startswith(f"{number} {TOPICS[number].title}\n")
        for heading in ("**Show live**", "**What goes wrong**", "**To discuss**", "**GPU.**"):
            assert page.count(heading) == 1, f"{number}: {heading}"
        assert len(SHOWN.findall(page)) >= 2
        assert len(MISTAKE.findall(page)) == 3
        assert 3 <= len(re.findall(r"^- \*[^*]", page, re.MULTILINE)) <= 4, f"{number}: questions for discussion"


def test_exercises_that_are_named_exist():
    known = {name for lesson in PARTS.values() for name in instructor_guide.exercises(lesson)}
    assert set(re.findall(r"\b\d+-\d\d\.\d\b", BY_HAND)) <= known


@pytest.mark.parametrize("number", TOPICS)
def test_sections_that_are_named_have_this_heading(number):
    headings = re.findall(r"^##+ (.*)$", sources(number, "markdown"), re.MULTILINE)
    for kind, place, name in SHOWN.findall(words_kept(PAGES[number])):
        heading = f"{place}. {name}" if kind == "Section" else f"Milestone {place}: {name}"
        assert heading in headings
    numbered = {
        re.match(r"(?:Milestone )?(\d+)", heading)[1] for heading in headings if re.match(r"(M\w+ )?\d", heading)
    }
    assert set(re.findall(r"\b(?:[Ss]ections?|milestone) (\d+)", PAGES[number])) <= numbered


@pytest.mark.parametrize("number", TOPICS)
def test_code_that_is_named_stands_in_the_notebook(number):
    lesson = words(sources(number, "markdown") + "\n" + sources(number, "code"))
    named = set(re.findall(r"`([^`]+)`", PAGES[number]))
    unknown = {code for code in named if words(code) not in lesson and code.rstrip("()") not in lesson}
    assert unknown == set(), "not in today's notebook"


def words_kept(page):
    """The page with each bullet in one line."""
    return re.sub(r"\n {2,}", " ", page)


@pytest.mark.parametrize("page", [GUIDE, GUIDE.with_name("README.md"), GUIDE.parents[1] / "README.md"])
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"(?m)^#+ (.*)$", text)}
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if not re.match(r"[a-z]+:", link):
            assert not path or (page.parent / path).exists(), link
            assert not anchor or path or anchor in anchors, link
    assert page == GUIDE or instructor_guide.NAME in text, "links to the guide"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("number", TOPICS)
def test_the_checks_say_of_the_mistakes_what_the_guide_says(number):
    """Each mistake is a wrong answer of the checks' tests; the check is run on it."""
    tests = importlib.import_module(f"test_checks_{number.replace('-', '_')}").TestChecks
    for exercise, text, name, label in MISTAKE.findall(PAGES[number]):
        check = tests.CHECKS[name]
        assert check.number == exercise
        result = check.run(tests.WRONG[name][words(label)][0])
        assert result.status == "failed"
        said = words(str(result))
        quotes = re.findall(r"“([^”]+)”", text)
        assert quotes, f"{exercise}: the guide quotes nothing"
        for quote in quotes:
            assert words(quote) in said, f"{exercise}: {quote!r} is not in:\n{result}"
