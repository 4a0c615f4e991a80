"""The generated parts of the module's README.md: introduction, map, table of topics, owned concepts, meeting points.

Each part stands between two marker comments and is written from syllabus.toml; everything else in the page is written
by hand and left alone.
"""

from __future__ import annotations

from course.syllabus import Syllabus, Topic, direct_needs

SOURCE = "syllabus.toml"


class ReadmeError(ValueError):
    """The README.md lacks a marker, so its generated part cannot be found."""


def render(syllabus: Syllabus) -> dict[str, str]:
    """The Markdown of every generated part, by name."""
    topics = list(syllabus.topics.values())
    return {
        "introduction": syllabus.module.introduction,
        "map": _map(syllabus),
        "topics": _topics(topics),
        "ownership": table(("Concept", "Owner"), [(topic.owns, topic.number) for topic in topics]),
        "meetings": table(
            ("Topic", "Names", "Who teaches what"),
            [
                (topic.number, ", ".join(warning.references), warning.text)
                for topic in topics
                for warning in topic.warnings
            ],
        ),
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


def _topics(topics: list[Topic]) -> str:
    rows = []
    for topic in topics:
        # a link only where there is something to open
        title = _escape(topic.title)
        title = f"[{title}]({topic.file})" if topic.path.exists() else title
        title += " (draft)" if topic.is_draft else ""
        requires = ", ".join(topic.prerequisites) or "nothing"
        rows.append((topic.number, title, topic.key_content, topic.dataset, topic.time, topic.category, requires))
    header = ("#", "Topic", "Key content", "Dataset", "Run time", "Category", "Requires")
    return table(header, rows, raw_columns=(1,))


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


def table(header: tuple[str, ...], rows: list[tuple[str, ...]], raw_columns: tuple[int, ...] = ()) -> str:
    """A Markdown table. Cells are escaped, but for those of `raw_columns`, which are Markdown already."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for row in rows:
        cells = [value if column in raw_columns else _escape(value) for column, value in enumerate(row)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _escape(text: str) -> str:
    """Keep a text from ending its table cell or from being read as emphasis around an underscore or asterisk."""
    for sign in "|*":
        text = text.replace(sign, "\\" + sign)
    return text
