"""Read syllabus.toml, the one place where the topics are described.

`load()` gives frozen objects and refuses a file that misses, misspells or contradicts something, naming the topic and
the key. Standard library only, so that any command can use it cheaply.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from course.environment import ROOT

SYLLABUS_FILE = ROOT / "module_15_advanced_pytorch_internals" / "syllabus.toml"

DATASETS = ("FashionMNIST", "CIFAR-10")
TEMPLATES = ("TEMPLATE_ALGORITHM.ipynb", "TEMPLATE_CAPSTONE.ipynb")
STATUSES = ("finished", "draft")

# a topic's number in the curriculum: module, hyphen, two digits ("5-07", "15-10")
_NUMBER = re.compile(r"[1-9]\d?-\d\d")

_MODULE_KEYS = {"number": int, "title": str, "folder": str, "gpu_required": bool, "introduction": str}
_ADDRESS = re.compile(r"https://[\w.~:/@%+-]+")  # goes into a text of Python
_TOPIC_KEYS = {
    "title": str,
    "file": str,
    "key_content": str,
    "dataset": str,
    "time": str,
    "minutes": int,
    "budget_seconds": int,
    "category": str,
    "template": str,
    "prerequisites": list,
    "owns": str,
    "description": str,
}
_TOPIC_OPTIONAL_KEYS = {"helps_when": str, "status": str, "warnings": list}
_WARNING_KEYS = {"text": str, "references": list}
_TYPE_NAMES = {int: "a whole number", str: "a text", bool: "true or false", list: "a list"}


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
    """One `[topics."15-NN"]` table.

    `minutes` is for a GPU with the full data set, `budget_seconds` for two CPU cores with the bundled sample.
    `path` is where the notebook is, or will be (absolute).
    """

    number: str
    title: str
    file: str
    path: Path
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
    status: str
    warnings: tuple[Warning_, ...]
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


def load(path: Path | str | None = None) -> Syllabus:
    """Read and validate a syllabus.

    path: the file; default: the module's own.
    Raises SyllabusError when the file is missing, is not TOML, or a value is missing, unknown, of the wrong type,
    duplicated or inconsistent.
    """
    path = Path(path if path is not None else SYLLABUS_FILE).resolve()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SyllabusError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SyllabusError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    return parse(text, path)


def parse(text: str, path: Path) -> Syllabus:
    """Validate the text of a syllabus that lies, or will lie, at `path`. Raises SyllabusError like `load`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SyllabusError(f"{path.name}: not valid TOML (a table or key given twice?): {error}") from None

    _check_table(document, {"module": dict, "topics": dict}, {}, f"{path.name}")
    module_table = document["module"]
    if module_table.get("repository") == "":
        del module_table["repository"]  # not filled in yet
    _check_table(module_table, _MODULE_KEYS, {"repository": str}, f"{path.name}: [module]")
    module = Module(**module_table)
    if module.repository and not _ADDRESS.fullmatch(module.repository):
        raise SyllabusError(f"{path.name}: [module]: repository must look like https://…, not {module.repository!r}")

    topics = {
        number: _topic(number, table, module, path.parent, f"{path.name}: topic {number}")
        for number, table in document["topics"].items()
    }
    if not topics:
        raise SyllabusError(f"{path.name}: [topics] is empty")
    _check_between_topics(topics, module, path.name)
    return Syllabus(path=path, module=module, topics=topics)


def _check_table(table: object, required: dict, optional: dict, where: str) -> None:
    """Raise unless `table` is a table with exactly the keys it should have, of the right types, and no empty text."""
    if not isinstance(table, dict):
        raise SyllabusError(f"{where}: must be a table, not {table!r}")
    for key in required:
        if key not in table:
            raise SyllabusError(f"{where}: key {key!r} is missing")
    known = required | optional
    for key, value in table.items():
        if key not in known:
            raise SyllabusError(f"{where}: unknown key {key!r}; known are {', '.join(known)}")
        kind = known[key]
        # True is an int in Python, but not a number of minutes
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise SyllabusError(f"{where}: {key} must be {_TYPE_NAMES.get(kind, 'a table')}, not {value!r}")
        if kind is str and not value.strip():
            raise SyllabusError(f"{where}: {key} is empty")
        if kind is int and value <= 0:
            raise SyllabusError(f"{where}: {key} must be positive, not {value}")


def _numbers(values: list, where: str) -> tuple[str, ...]:
    """Check a list of topic numbers: their form, and that none is given twice."""
    for value in values:
        if not isinstance(value, str) or not _NUMBER.fullmatch(value):
            raise SyllabusError(f'{where} holds {value!r}, which is not a topic number like "5-07"')
    for value in values:
        if values.count(value) > 1:
            raise SyllabusError(f"{where} names {value} twice")
    return tuple(values)


def _topic(number: str, table: object, module: Module, folder: Path, where: str) -> Topic:
    if not _NUMBER.fullmatch(number) or number_key(number)[0] != module.number:
        raise SyllabusError(f'{where}: the number must look like "{module.number}-01"')
    _check_table(table, _TOPIC_KEYS, _TOPIC_OPTIONAL_KEYS, where)
    for key, allowed in (("dataset", DATASETS), ("template", TEMPLATES), ("status", STATUSES)):
        if key in table and table[key] not in allowed:
            raise SyllabusError(f"{where}: {key} is {table[key]!r}; possible are {', '.join(allowed)}")
    if not re.fullmatch(rf"{number}_[a-z0-9_]+\.ipynb", table["file"]):
        raise SyllabusError(f"{where}: file must look like {number}_words_of_the_title.ipynb, not {table['file']!r}")
    if table["minutes"] not in [int(digits) for digits in re.findall(r"\d+", table["time"])]:
        raise SyllabusError(f"{where}: minutes is {table['minutes']}, but time says {table['time']!r}")

    warnings = []
    for index, warning in enumerate(table.get("warnings", []), start=1):
        _check_table(warning, _WARNING_KEYS, {}, f"{where}: warning {index}")
        references = _numbers(warning["references"], f"{where}: warning {index}: references")
        if not references:
            raise SyllabusError(f"{where}: warning {index}: references is empty")
        warnings.append(Warning_(warning["text"], references))

    return Topic(
        **{key: table[key] for key in _TOPIC_KEYS if key != "prerequisites"},
        number=number,
        path=folder / table["file"],
        prerequisites=_numbers(table["prerequisites"], f"{where}: prerequisites"),
        helps_when=table.get("helps_when", ""),
        status=table.get("status", "finished"),
        warnings=tuple(warnings),
    )


def _check_between_topics(topics: dict[str, Topic], module: Module, name: str) -> None:
    """Titles and files are unique; prerequisites and references within the module exist; nothing needs itself."""
    for key in ("title", "file"):
        seen: dict[str, str] = {}
        for topic in topics.values():
            value = getattr(topic, key)
            if value in seen:
                raise SyllabusError(f"{name}: topic {topic.number}: {key} {value!r} is a duplicate of {seen[value]}'s")
            seen[value] = topic.number
    for topic in topics.values():
        for kind, numbers in (("prerequisites", topic.prerequisites), ("references", topic.must_reference)):
            for other in numbers:
                if number_key(other)[0] == module.number and other not in topics:
                    raise SyllabusError(f"{name}: topic {topic.number}: {kind} names {other}, which is no topic here")
    for number in topics:
        if number in _needs(number, topics):
            raise SyllabusError(f"{name}: topic {number}: prerequisites lead back to {number} itself")


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
