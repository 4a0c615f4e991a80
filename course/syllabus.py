"""Read syllabus.toml, the one place where the topics are described.

`load()` gives frozen objects and refuses a file that misses, misspells or contradicts something, naming the topic and
the key. Standard library only, so that any command can use it cheaply.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course.environment import ROOT

SYLLABUS_FILE = ROOT / "module_15_advanced_pytorch_internals" / "syllabus.toml"

TEMPLATES = ("TEMPLATE_ALGORITHM.ipynb", "TEMPLATE_CAPSTONE.ipynb")
ALLOWED = {"dataset": ("FashionMNIST", "CIFAR-10"), "template": TEMPLATES, "status": ("finished", "draft")}

_ADDRESS = re.compile(r"https://[\w.~:/@%+-]+")  # goes into a text of Python


class SyllabusError(ValueError):
    """syllabus.toml cannot be used; the message names the file, the table and the key."""


@dataclass(frozen=True)
class Module:
    """The `[module]` table."""

    number: int
    title: str
    folder: str
    introduction: str
    repository: str = ""  # the course's address, if it has been filled in


@dataclass(frozen=True)
class Warning_:
    """A place where a topic meets another module's topic, and the numbers its notebook must name."""

    text: str
    references: list[str]


@dataclass(frozen=True)
class Topic:
    """One `[topics."15-NN"]` table, with its number and its notebook's path (absolute; it needn't exist yet).

    `time` is for a GPU with the full data set, `budget_seconds` for two CPU cores with the bundled sample.
    """

    number: str
    path: Path
    title: str
    file: str
    key_content: str
    dataset: str
    time: str
    budget_seconds: int
    category: str
    template: str
    prerequisites: list[str]
    owns: str
    description: str
    status: str = "finished"
    warnings: list[Warning_] = field(default_factory=list)
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


@dataclass(frozen=True)
class Syllabus:
    """The whole file. `topics` maps a number to its topic, in the file's order."""

    path: Path
    module: Module
    topics: dict[str, Topic]


def load(path: Path | None = None) -> Syllabus:
    """Read and validate a syllabus, by default SYLLABUS_FILE. Raises SyllabusError."""
    path = (path or SYLLABUS_FILE).resolve()
    try:
        return parse(path.read_text(encoding="utf-8"), path)
    except UnicodeDecodeError as error:
        raise SyllabusError(f"{path.name}: not UTF-8 text (byte {error.start})") from None


def parse(text: str, path: Path) -> Syllabus:
    """Validate the text of a syllabus that lies, or will lie, at `path`. Raises SyllabusError."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SyllabusError(f"{path.name}: not valid TOML (a table or key given twice?): {error}") from None
    if document.keys() != {"module", "topics"}:
        raise SyllabusError(f"{path.name}: needs the table [module] and tables of topics, and no others")
    module = _made(Module, document["module"], f"{path.name}: [module]")
    if module.repository and not _ADDRESS.fullmatch(module.repository):
        raise SyllabusError(f"{path.name}: [module]: repository must look like https://…, not {module.repository!r}")
    topics = {}
    for number, table in document["topics"].items():
        where = f"{path.name}: topic {number}"
        if not re.fullmatch(rf"{module.number}-\d\d", number):
            raise SyllabusError(f'{where}: the number must look like "{module.number}-01"')
        warnings = [_made(Warning_, row, f"{where}: warnings") for row in table.get("warnings", [])]
        more = {"number": number, "path": path.parent / str(table.get("file"))}
        topic = _made(Topic, {**table, "warnings": warnings}, where, **more)
        for key, allowed in ALLOWED.items():
            if (value := getattr(topic, key)) not in allowed:
                raise SyllabusError(f"{where}: {key} is {value!r}; possible are {', '.join(allowed)}")
        if not re.fullmatch(rf"{number}_[a-z0-9_]+\.ipynb", topic.file):
            raise SyllabusError(f"{where}: file must look like {number}_words_of_the_title.ipynb, not {topic.file!r}")
        references = [other for met in warnings for other in met.references]
        for others, there in ((topic.prerequisites, topics), (references, document["topics"])):
            for other in map(str, others):
                is_here = other in there or not other.startswith(f"{module.number}-")
                if not is_here or not re.fullmatch(r"[1-9]\d?-\d\d", other):
                    raise SyllabusError(f"{where}: names {other!r}, which is no topic; prerequisites stand above it")
        topics[number] = topic
    return Syllabus(path=path, module=module, topics=topics)


def _made(kind: type, table: dict, where: str, **more: Any) -> Any:
    """An object of the table's values, if it has the keys that the class has fields for."""
    try:
        return kind(**{**table, **more})
    except TypeError as error:  # Topic.__init__() missing 1 required positional argument: 'owns'
        raise SyllabusError(f"{where}: {str(error).partition('() ')[2]}") from None


def _needs(number: str, topics: dict[str, Topic]) -> set[str]:
    """All topics of this module that `number` builds on, directly or through others."""
    inside = {other for other in topics[number].prerequisites if other in topics}
    return inside.union(*(_needs(other, topics) for other in inside))


def direct_needs(topic: Topic, topics: dict[str, Topic]) -> tuple[str, ...]:
    """The prerequisites within the module that do not already follow from another prerequisite: a map's arrows."""
    inside = [number for number in topic.prerequisites if number in topics]
    implied = {far for near in inside for far in _needs(near, topics)}
    return tuple(number for number in inside if number not in implied)
