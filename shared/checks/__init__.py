"""The exercises' checks, one file a topic: `from shared.checks import topic_15_01 as check`.

The checks hold answers. The wheel that students get therefore has each topic's file packed, as `topic_15_01.packed`, so
that nobody comes across an answer in an editor or a search. That is a curtain and no lock: what Python can import, a
student can read. What is packed is imported as if it were not: `inspect` and tracebacks find its lines.
"""

import sys
import zlib
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

_HERE = Path(__file__).parent


class _PackedLoader(SourceFileLoader):
    def get_data(self, path: str) -> bytes:
        return zlib.decompress(Path(path).with_suffix(".packed").read_bytes())


class _PackedFinder:
    """Python asks it for a module that it hasn't found as a file."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, module = name.rpartition(".")
        source = _HERE / f"{module}.py"
        if package != __name__ or not source.with_suffix(".packed").is_file():
            return None
        return spec_from_file_location(name, source, loader=_PackedLoader(name, str(source)))


sys.meta_path.append(_PackedFinder)
