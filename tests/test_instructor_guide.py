"""The instructors' guide is true of today's notebooks: its pages, hours, headings and exercises."""

import re
from dataclasses import replace

import pytest

from course import instructor_guide, lint, start_page
from course.execution import read_notebook
from course.exercise_form import HEADING
from course.module_readme import table
from course.syllabus import direct_needs, load

SYLLABUS = load()
TOPICS = {number: topic for number, topic in SYLLABUS.topics.items() if not topic.is_draft}
GUIDE = SYLLABUS.path.parent / instructor_guide.NAME
TEXT = GUIDE.read_text(encoding="utf-8").replace(start_page.NO_BREAK, " ")
BY_HAND = re.sub(r"<!-- generated from .*?<!-- end of [^>]*>", "", TEXT, flags=re.DOTALL)
PAGES = {page[:5]: page for page in re.split(r"^## ", BY_HAND, flags=re.MULTILINE) if re.match(r"\d+-\d\d ", page)}
LESSONS = {number: read_notebook(topic.path)[0] for number, topic in TOPICS.items()}
PARTS = {number: instructor_guide.parts(lesson) for number, lesson in LESSONS.items()}
EXERCISES = {
    number: {exercise: time for part in parts for exercise, time in part.exercises.items()}
    for number, parts in PARTS.items()
}

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
    assert lint.lint_pages(SYLLABUS) == []


def test_drafts_and_what_cannot_be_read_are_left_out():
    topics = {number: replace(topic, status="draft") for number, topic in TOPICS.items()}
    topics |= {"15-08": replace(TOPICS["15-08"], path=GUIDE), "15-09": TOPICS["15-09"]}
    parts = instructor_guide.render(replace(SYLLABUS, topics=topics))
    assert [name for name in parts if name.startswith("pace")] == ["pace of 15-09"]


def test_a_sign_of_markdown_in_a_table_is_text():
    assert table(("A", "B"), [("x | y", "*args")]).endswith("| x \\| y | \\*args |")


def test_hours_are_those_of_the_students_start_page_and_their_sum():
    hours = r"<!-- generated from the notebooks: hours -->(.*?)<!-- end of hours -->"
    shown = re.search(hours, TEXT, re.DOTALL)[1].strip().splitlines()[2:]
    *rows, total = [[minutes(cell) for cell in line.strip("| ").split(" | ")[-3:]] for line in shown]
    page = start_page.start_page(SYLLABUS, LESSONS).cells[6].source.replace(start_page.NO_BREAK, " ")
    told = re.findall(r"^\| \[\d+-\d\d .*? \| .*? \| (.*?) \| \d+ for \d+ points, (.*?) \|$", page, re.MULTILINE)
    assert [line[2:7] for line in shown[:-1]] == list(TOPICS)
    assert [row[:2] for row in rows] == [list(map(minutes, times)) for times in told]
    assert total == [sum(column) for column in zip(*rows, strict=True)]
    assert all(reading + exercises == together for reading, exercises, together in [*rows, total])


def minutes(shown):
    hours, rest = (re.search(rf"(\d+) {unit}", shown) for unit in ("h", "min"))
    return 60 * int(hours[1] if hours else 0) + int(rest[1] if rest else 0)


@pytest.mark.parametrize("number", TOPICS)
def test_a_topic_s_parts_are_all_of_it_with_a_place_to_stop(number):
    parts = PARTS[number]
    assert sum(part.reading for part in parts) == pytest.approx(start_page.reading_minutes(LESSONS[number]))
    tasks = HEADING.findall(sources(number, "markdown"))
    assert EXERCISES[number] == {f"{task[0]}.{task[1]}": int(task[4]) for task in tasks}
    assert [part.stops for part in parts].count(True) == 1


def test_plans_have_each_topic_after_those_it_builds_on_and_exercises_that_there_are():
    week = [numbers for numbers, _ in instructor_guide.A_WEEK.values()]
    whole = [week, instructor_guide.A_TERM.values()]
    picked = [[numbers] for numbers in instructor_guide.PICKS.values()]
    for plan in [*whole, *picked]:
        order = [number for numbers in plan for number in numbers]
        if plan in whole:
            assert sorted(order) == sorted(TOPICS)
        for place, number in enumerate(order):
            assert set(direct_needs(TOPICS[number], TOPICS)) <= set(order[:place])
    for numbers, chosen in instructor_guide.A_WEEK.values():
        assert set(chosen) <= {exercise for number in numbers for exercise in EXERCISES[number]}


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


@pytest.mark.parametrize("number", TOPICS)
def test_exercises_sections_and_code_that_are_named_are_in_todays_notebook(number):
    page = re.sub(r"\n {2,}", " ", PAGES[number])  # each bullet in one line
    headings = re.findall(r"^##+ (.*)$", sources(number, "markdown"), re.MULTILINE)
    for kind, place, name in SHOWN.findall(page):
        assert (f"{place}. {name}" if kind == "Section" else f"Milestone {place}: {name}") in headings
    numbered = {found[1] for heading in headings if (found := re.match(r"(?:Milestone )?(\d+)", heading))}
    assert set(re.findall(r"\b(?:[Ss]ections?|milestone) (\d+)", page)) <= numbered

    lesson = words(sources(number, "markdown") + "\n" + sources(number, "code"))
    named = set(re.findall(r"`([^`]+)`", PAGES[number]))
    assert {code for code in named if words(code) not in lesson and code.rstrip("()") not in lesson} == set()

    known = {exercise for exercises in EXERCISES.values() for exercise in exercises}
    assert set(re.findall(r"\b\d+-\d\d\.\d\b", BY_HAND)) <= known


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
