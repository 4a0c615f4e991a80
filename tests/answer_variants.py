"""Wrong answers made of the notebook's own: pieces of its text are replaced."""

from collections.abc import Callable, Mapping
from typing import Any

from check_protocol import sources

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
