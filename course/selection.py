"""Which notebooks a command is about: topics of the syllabus, files, or all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from course.syllabus import Syllabus


class SelectionError(ValueError):
    """A topic or file that was named doesn't exist; the message names what there is."""


@dataclass(frozen=True)
class Selected:
    """A notebook to work on. `topic` and `budget_seconds` are None outside the syllabus; `path` may not exist yet."""

    topic: str | None
    title: str
    path: Path
    budget_seconds: float | None = None

    @property
    def label(self) -> str:
        """What to call it in one short word."""
        return self.topic or self.path.stem


def select(names: list[str], syllabus: Syllabus) -> list[Selected]:
    """The notebooks that `names` mean, each once, in the order given; without names all topics of the syllabus.

    A name is a topic ("15-01", "15-1", "1"), a notebook file or a folder of notebooks. Topics needn't exist as files;
    raises SelectionError for any other name that means nothing.
    """
    known = {
        topic.path: Selected(number, topic.title, topic.path, topic.budget_seconds)
        for number, topic in syllabus.topics.items()
    }
    by_number = {selected.topic: selected for selected in known.values()}
    found: dict[Path, Selected] = {}
    for name in names or by_number:
        number = re.fullmatch(r"(?:(\d+)-)?(\d+)", name)
        if number:
            topic = f"{number[1] or syllabus.module.number}-{int(number[2]):02d}"
            if topic not in by_number:
                raise SelectionError(f"there is no topic {topic}. The syllabus has {', '.join(by_number)}.")
            matches = [by_number[topic]]
        else:
            matches = [known.get(path, Selected(None, path.stem, path)) for path in _files(Path(name).resolve())]
        found.update({selected.path: selected for selected in matches})
    return list(found.values())


def _files(path: Path) -> list[Path]:
    notebooks = sorted(path.glob("*.ipynb")) if path.is_dir() else [path]
    if not notebooks or notebooks[0].suffix != ".ipynb" or not notebooks[0].is_file():
        raise SelectionError(f"'{path}' is neither a topic (15-01, 15-1, 1) nor a notebook or a folder that has some.")
    return notebooks
