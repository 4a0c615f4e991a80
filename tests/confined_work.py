"""What tests run in a confined process; a module of its own, since such a process imports it."""

from multiprocessing.connection import Connection
from typing import Any

from course.confined import say


def run(link: Connection, source: str, **given: Any) -> None:
    """Run code that may `tell` something."""

    def tell(value: Any) -> None:
        say(link, value)

    exec(source, {"tell": tell, "link": link, **given})
