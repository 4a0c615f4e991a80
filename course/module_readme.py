"""The generated parts of the module's README.md: introduction, map, table of topics, owned concepts, meeting points.

Each part stands between two marker comments and is written from syllabus.toml; everything else in the page is written
by hand and left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from course.syllabus import Syllabus, Topic, direct_needs

SOURCE = "syllabus.toml"


class ReadmeError(ValueError):
    """The README.md lacks a marker, so its generated part cannot be found."""


def render(syllabus: Syllabus) -> dict[str, str]:
    """The Markdown of every generated part, by name."""
    topics = syllabus.topics.values()
    meetings = [(topic.number, ", ".join(met.references), met.text) for topic in topics for met in topic.warnings]
    return {
        "introduction": syllabus.module.introduction,
        "map": _map(syllabus),
        "topics": table(
            ("#", "Topic", "Key content", "Dataset", "Run time", "Category", "Requires"), map(_topic_row, topics)
        ),
        "ownership": table(("Concept", "Owner"), [(topic.owns, topic.number) for topic in topics]),
        "meetings": table(("Topic", "Names", "Who teaches what"), meetings),
    }


def refresh(text: str, parts: dict[str, str], source: str = SOURCE) -> str:
    """The page with every generated part replaced. Raises ReadmeError when a marker is missing or doubled."""
    for name, part in parts.items():
        begin, end = markers(name, source)
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ReadmeError(f"the page needs the lines {begin} and {end}, once each and in this order")
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        text = f"{before}{begin}\n\n{part}\n\n{end}{after}"
    return text


def markers(name: str, source: str = SOURCE) -> tuple[str, str]:
    """The comments around the part of this name, which say what it is made from."""
    return f"<!-- generated from {source}: {name} -->", f"<!-- end of {name} -->"


def _topic_row(topic: Topic) -> tuple[str, ...]:
    title = f"[{topic.title}]({topic.file})" if topic.path.exists() else topic.title
    title += " (draft)" if topic.is_draft else ""
    requires = ", ".join(topic.prerequisites) or "nothing"
    return topic.number, title, topic.key_content, topic.dataset, topic.time, topic.category, requires


def _map(syllabus: Syllabus) -> str:
    """A Mermaid flowchart: an arrow from each topic to those that build on it directly."""
    lines = ["```mermaid", "flowchart LR"]
    for topic in syllabus.topics.values():
        outside = [number for number in topic.prerequisites if number not in syllabus.topics]
        label = f"{topic.number}<br/>{topic.title.replace(chr(34), '#quot;')}"
        label += f"<br/>needs {', '.join(outside)}" if outside else ""
        lines.append(f'    {_node(topic.number)}["{label}"]')
    for topic in syllabus.topics.values():
        for number in direct_needs(topic, syllabus.topics):
            lines.append(f"    {_node(number)} --> {_node(topic.number)}")
    return "\n".join([*lines, "```"])


def _node(number: str) -> str:
    return "t" + number.replace("-", "_")


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table. A | or * in a cell is text."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for row in rows:
        cells = [re.sub(r"[|*]", r"\\\g<0>", cell) for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
