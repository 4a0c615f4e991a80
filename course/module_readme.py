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
    header = ("#", "Topic", "Key content", "Dataset", "Time limit", "Category", "Requires")
    return {
        "introduction": syllabus.module.introduction,
        "map": _map(syllabus.topics),
        "topics": table(header, map(_topic_row, topics)),
        "ownership": table(("Concept", "Owner"), [(topic.owns, topic.number) for topic in topics]),
        "meetings": table(("Topic", "Names", "Who teaches what"), meetings),
    }


def refresh(text: str, parts: dict[str, str], source: str = SOURCE) -> str:
    """The page with every generated part replaced. Raises ReadmeError when a marker is missing."""
    for name, part in parts.items():
        begin, end = f"<!-- generated from {source}: {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, is_there, after = rest.partition(end)
        if not is_there:
            raise ReadmeError(f"the page needs the lines {begin} and {end}, in this order")
        text = f"{before}{begin}\n\n{part}\n\n{end}{after}"
    return text


def _topic_row(topic: Topic) -> tuple[str, ...]:
    title = f"[{topic.title}]({topic.file})" if topic.path.exists() else topic.title
    title += " (draft)" if topic.is_draft else ""
    requires = ", ".join(topic.prerequisites)
    return topic.number, title, topic.key_content, topic.dataset, topic.time, topic.category, requires


def _map(topics: dict[str, Topic]) -> str:
    """A Mermaid flowchart: an arrow from each topic to those that build on it directly."""
    nodes = {number: f"t{number.replace('-', '_')}" for number in topics}
    boxes, arrows = [], []
    for number, topic in topics.items():
        outside = ", ".join(other for other in topic.prerequisites if other not in topics)
        needs = f"<br/>needs {outside}" if outside else ""
        boxes.append(f'    {nodes[number]}["{number}<br/>{topic.title}{needs}"]')
        arrows += [f"    {nodes[other]} --> {nodes[number]}" for other in direct_needs(topic, topics)]
    return "\n".join(["```mermaid", "flowchart LR", *boxes, *arrows, "```"])


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table. A | or * in a cell is text."""
    escaped = [[re.sub(r"[|*]", r"\\\g<0>", cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *escaped])
