"""The first lines of every notebook: one that was copied elsewhere says what it lacks."""

GUARD = """\
from importlib.util import find_spec

if find_spec("shared") is None:
    raise ImportError("`shared` is missing: run `make lab`, or `pip install -e` its repository")\
"""
