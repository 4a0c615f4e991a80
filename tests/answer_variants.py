"""Wrong answers made of the notebook's own: pieces of its text are replaced."""

from collections.abc import Callable, Mapping
from typing import Any

from check_protocol import answer_cell, sources

from course.lesson_code import fresh_namespace, run_source


def variants(number: str, names: Mapping[str, str], given: Mapping[str, Any]) -> Callable[..., Any]:
    """A function `variant(slug, (old, new), ...)`: the answer cell `ex-slug` with each `old` text replaced, run.

    `names` maps slugs to the name that the cell defines; `given` are names that it uses.
    """
    cells = sources(number)

    def variant(slug: str, *changes: tuple[str, str]) -> Any:
        source = cells[f"ex-{slug}"]
        for old, new in changes:
            assert old in source, old
            source = source.replace(old, new)
        namespace = fresh_namespace(given)
        run_source(source, slug, namespace)
        return namespace[names[slug]]

    return variant


def edits(topic: str, given: Mapping[str, Any]) -> Callable[..., Any]:
    """A function `edit(name, old, new, ...)`: the notebook's answer `name` with each `old` text replaced.

    Lines after the first stand in both texts as if the line in which `old` begins were not indented. `given` are names
    that the answer uses.
    """

    def edit(name: str, *texts: str) -> Any:
        cell = answer_cell(topic, name)
        source = sources(topic)[cell]
        for old, new in zip(texts[::2], texts[1::2], strict=True):
            before = source.partition(old.partition("\n")[0])[0].rpartition("\n")[2]
            margin = "\n" + before[: len(before) - len(before.lstrip())]
            found = old.replace("\n", margin)
            assert found in source, f"{cell} has no {old!r}"
            source = source.replace(found, new.replace("\n", margin))
        namespace = fresh_namespace(given)
        run_source(source, cell, namespace)
        return namespace[name]

    return edit


def wrong_answers(
    edit: Callable[..., Any], tables: Mapping[str, Mapping[str, tuple]]
) -> dict[str, dict[str, tuple[Any, str]]]:
    """`CheckProtocol.WRONG`, of rows (what the check says, old, new, ...) and (what it says, the answer)."""
    return {
        name: {
            label: (edit(name, *what) if isinstance(what[0], str) else what[0], says)
            for label, (says, *what) in table.items()
        }
        for name, table in tables.items()
    }
