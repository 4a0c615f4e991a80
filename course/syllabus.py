"""Read syllabus.toml, the one place where the topics are described.

`load()` gives frozen objects and refuses a file that misses, misspells or contradicts something, naming the topic and
the key. Standard library only, so that any command can use it cheaply.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from course.environment import ROOT

SYLLABUS_FILE = ROOT / "module_15_advanced_pytorch_internals" / "syllabus.toml"

DATASETS = ("FashionMNIST", "CIFAR-10")
TEMPLATES = ("TEMPLATE_ALGORITHM.ipynb", "TEMPLATE_CAPSTONE.ipynb")
STATUSES = ("finished", "draft")

# a topic's number in the curriculum: module, hyphen, two digits ("5-07", "15-10")
_NUMBER = re.compile(r"[1-9]\d?-\d\d")
_ADDRESS = re.compile(r"https://[\w.~:/@%+-]+")  # goes into a text of Python


class SyllabusError(ValueError):
    """syllabus.toml cannot be used; the message names the file, the table and the key."""


@dataclass(frozen=True)
class Module:
    """The `[module]` table."""

    number: int
    title: str
    folder: str
    gpu_required: bool
    introduction: str
    repository: str = ""  # the course's address, if it has been filled in


@dataclass(frozen=True)
class Warning_:
    """A place where a topic meets another module's topic, and the numbers its notebook must name."""

    text: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Topic:
    """One `[topics."15-NN"]` table, with its number and its notebook's path (absolute; it needn't exist yet).

    `minutes` is for a GPU with the full data set, `budget_seconds` for two CPU cores with the bundled sample.
    """

    number: str
    path: Path
    title: str
    file: str
    key_content: str
    dataset: str
    time: str
    minutes: int
    budget_seconds: int
    category: str
    template: str
    prerequisites: tuple[str, ...]
    owns: str
    description: str
    status: str = "finished"
    warnings: tuple[Warning_, ...] = ()
    helps_when: str = ""

    @property
    def is_draft(self) -> bool:
        """True while the row says `status = "draft"`."""
        return self.status == "draft"

    @property
    def check_file(self) -> Path:
        """Where the checks of its exercises are, or will be."""
        return self.path.parent.parent / "shared" / "checks" / f"topic_{self.number.replace('-', '_')}.py"

    @property
    def test_file(self) -> Path:
        """Where the tests of these checks are, or will be."""
        return self.path.parent.parent / "tests" / f"test_checks_{self.number.replace('-', '_')}.py"

    @property
    def must_reference(self) -> tuple[str, ...]:
        """Numbers of other topics that the notebook must name: the union over its warnings, in curriculum order."""
        return tuple(sorted({number for warning in self.warnings for number in warning.references}, key=number_key))


@dataclass(frozen=True)
class Syllabus:
    """The whole file. `topics` maps a number to its topic, in the file's order."""

    path: Path
    module: Module
    topics: dict[str, Topic]


def number_key(number: str) -> tuple[int, int]:
    """Sort key that puts "5-07" before "15-01"."""
    module, topic = number.split("-")
    return int(module), int(topic)


def load(path: Path | None = None) -> Syllabus:
    """Read and validate a syllabus, by default SYLLABUS_FILE. Raises SyllabusError."""
    path = (path or SYLLABUS_FILE).resolve()
    try:
        return parse(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise SyllabusError(f"{path} can't be read as UTF-8 text: {error}") from None


def parse(text: str, path: Path) -> Syllabus:
    """Validate the text of a syllabus that lies, or will lie, at `path`. Raises SyllabusError."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SyllabusError(f"{path.name}: not valid TOML (a table or key given twice?): {error}") from None
    if document.keys() != {"module", "topics"} or not document["topics"]:
        raise SyllabusError(f"{path.name}: needs the table [module] and tables of topics, and no others")
    module = _made(Module, document["module"], f"{path.name}: [module]")
    if module.repository and not _ADDRESS.fullmatch(module.repository):
        raise SyllabusError(f"{path.name}: [module]: repository must look like https://…, not {module.repository!r}")
    topics = {
        number: _topic(number, table, module, path.parent, f"{path.name}: topic {number}")
        for number, table in document["topics"].items()
    }
    titles = [topic.title for topic in topics.values()]
    for number, topic in topics.items():
        if titles.count(topic.title) > 1:
            raise SyllabusError(f"{path.name}: topic {number}: another topic has the title {topic.title!r}, too")
        for other in (*topic.prerequisites, *topic.must_reference):
            if number_key(other)[0] == module.number and other not in topics:
                raise SyllabusError(f"{path.name}: topic {number}: names {other}, which is no topic here")
        if number in _needs(number, topics):
            raise SyllabusError(f"{path.name}: topic {number}: prerequisites lead back to {number} itself")
    return Syllabus(path=path, module=module, topics=topics)


def _made(kind: type, table: dict, where: str, **more: Any) -> Any:
    """An object of the table's values, if it has the keys that the class has fields for, and of the right types."""
    _require(dict, table, where)
    for key, value in table.items():
        wanted = kind.__annotations__.get(key)
        if wanted in ("int", "str", "bool") and type(value).__name__ != wanted:
            raise SyllabusError(f"{where}: {key} must be of type {wanted}, not {value!r}")
    try:
        return kind(**{**table, **more})
    except TypeError as error:  # Topic.__init__() missing 1 required positional argument: 'owns'
        raise SyllabusError(f"{where}: {str(error).partition('() ')[2]}") from None


def _require(kind: type, value: Any, where: str) -> None:
    if not isinstance(value, kind):
        raise SyllabusError(f"{where}: must be a {'table' if kind is dict else 'list'}, not {value!r}")


def _numbers(values: list, where: str) -> tuple[str, ...]:
    _require(list, values, where)
    for value in values:
        if not isinstance(value, str) or not _NUMBER.fullmatch(value):
            raise SyllabusError(f'{where} holds {value!r}, which is no topic number like "5-07"')
    return tuple(values)


def _topic(number: str, table: dict, module: Module, folder: Path, where: str) -> Topic:
    if not _NUMBER.fullmatch(number) or number_key(number)[0] != module.number:
        raise SyllabusError(f'{where}: the number must look like "{module.number}-01"')
    _require(dict, table, where)
    warnings = []
    _require(list, table.get("warnings", []), f"{where}: warnings")
    for index, row in enumerate(table.get("warnings", []), start=1):
        warning = _made(Warning_, row, f"{where}: warning {index}")
        references = _numbers(warning.references, f"{where}: warning {index}: references")
        warnings.append(replace(warning, references=references))
    needs = _numbers(table.get("prerequisites", []), f"{where}: prerequisites")
    path = folder / str(table.get("file"))
    more = {"number": number, "path": path, "prerequisites": needs, "warnings": tuple(warnings)}
    topic = _made(Topic, table, where, **more)
    for key, allowed in (("dataset", DATASETS), ("template", TEMPLATES), ("status", STATUSES)):
        if (value := getattr(topic, key)) not in allowed:
            raise SyllabusError(f"{where}: {key} is {value!r}; possible are {', '.join(allowed)}")
    if not re.fullmatch(rf"{number}_[a-z0-9_]+\.ipynb", topic.file):
        raise SyllabusError(f"{where}: file must look like {number}_words_of_the_title.ipynb, not {topic.file!r}")
    return topic


def _needs(number: str, topics: dict[str, Topic]) -> set[str]:
    """All topics of this module that `number` builds on, directly or through others."""
    found: set[str] = set()
    waiting = list(topics[number].prerequisites)
    while waiting:
        other = waiting.pop()
        if other in topics and other not in found:
            found.add(other)
            waiting.extend(topics[other].prerequisites)
    return found


def direct_needs(topic: Topic, topics: dict[str, Topic]) -> tuple[str, ...]:
    """The prerequisites within the module that do not already follow from another prerequisite: a map's arrows."""
    inside = [number for number in topic.prerequisites if number in topics]
    implied = {far for near in inside for far in _needs(near, topics)}
    return tuple(number for number in inside if number not in implied)
