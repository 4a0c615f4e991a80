"""What chosen cells of a notebook define, taken out of the notebook, so that tests hold the lesson's own code."""

import json
from pathlib import Path
from typing import Any

MODULE = Path(__file__).parent.parent / "module_15_advanced_pytorch_internals"


def definitions(number: str, *cells: str) -> dict[str, Any]:
    """Run a notebook's setup cell and the cells with the given ids, in the order of the page; return their names.

    The functions belong to a module that nobody can import, so cloudpickle sends them to other processes by value.

    Raises:
        KeyError: the notebook has no code cell with one of the ids.
    """
    (path,) = MODULE.glob(f"{number}_*.ipynb")
    found = {
        cell["id"]: "".join(cell["source"])
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    }
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for missing in [cell for cell in cells if cell not in found]:
        raise KeyError(f"{path.name} has no code cell {missing!r}")
    for name, source in found.items():
        if name == "setup" or name in cells:
            exec(compile(source, f"{path.name}#{name}", "exec"), namespace)
    return namespace
