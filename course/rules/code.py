"""Rules on code: plain Python that runs everywhere, in cells and lines that a reader can take in."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator

from course.guard import GUARD
from course.rules.names import read_and_written
from course.rules.notebook import Cell, Notebook
from course.rules.table import Complaint, rule

IMPORTABLE = frozenset(sys.stdlib_module_names) | {"torch", "torchvision", "numpy", "matplotlib", "shared"}
IMPORTABLE_IN_WORDS = "torch, torchvision, numpy, matplotlib, shared and the standard library"

MAX_COLUMNS = 100
MAX_DEFINITIONS = 3
FOLDED = '{"jupyter": {"source_hidden": true}, "tags": ["hide-input"]}'

# %magic, !command, ?name, name?, and name = %magic or !command
_MAGIC = re.compile(r"^\s*(?:[%!?]|[\w, ]+=\s*[%!])|^[^#]*\?\s*$")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_PLOTTING = frozenset({"plt", "ax", "axes", "fig", "figure"})
_PRINTING = frozenset({"print", "display", "expect_error", "check"})


@rule("syntax")
def syntax(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        try:
            ast.parse(cell.source)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            lines = cell.source.splitlines()
            text = lines[line - 1].strip() if line <= len(lines) else ""
            text = lines[0] if cell.source.startswith("%%") else text
            if _MAGIC.search(text):
                yield cell.id, f"uses IPython syntax, {text!r}; write plain Python, which runs everywhere"
            else:
                yield cell.id, f"is not valid Python: line {line}: {getattr(error, 'msg', error)}: {text!r}"
        if "get_ipython" in {node.id for node in cell.nodes if isinstance(node, ast.Name)}:
            yield cell.id, "uses get_ipython, which is a magic by another name; write plain Python"


@rule("exit")
def leaving_early(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        for name in cell.calls:
            if name in ("exit", "quit", "sys.exit", "os._exit", "os.abort"):
                yield cell.id, f"calls {name}(), after which the notebook counts as passed; raise an exception instead"


@rule("device-cell")
def device_cell(notebook: Notebook) -> Iterator[Complaint]:
    callers = [cell.id for cell in notebook.code for name in cell.calls if name.split(".")[-1] == "get_device"]
    if notebook.module.gpu_required and not callers:
        place = "device" if "device" in notebook.by_id else "-"
        yield place, "never calls get_device(); the cell 'device' must: device = get_device()"
    for id_ in callers:
        if id_ != "device":
            yield id_, "calls get_device(); only the cell 'device' does, others use the variable device"
    if callers.count("device") > 1:
        yield "device", "calls get_device() more than once; call it once: device = get_device()"


@rule("imports")
def imports(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        guarded = {id(node) for attempt in cell.nodes if _catches_import_error(attempt) for node in _inside(attempt)}
        for node in cell.nodes:
            for name in _imported(node):
                allowed = name.split(".")[0] in IMPORTABLE
                if "optional" in cell.tags:
                    if not allowed and id(node) not in guarded:
                        yield cell.id, f"imports {name} outside try … except ImportError, so the notebook needs it"
                elif cell.id not in ("course", "setup"):
                    yield cell.id, f"imports {name}; only the cell 'setup' imports: move it there"
                elif not allowed:
                    yield cell.id, f"imports {name}; allowed are {IMPORTABLE_IN_WORDS}"


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + (node.module or "")]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("__import__", "import_module"):
        first = node.args[0] if node.args else None
        return [first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else "something"]
    return []


def _catches_import_error(node: ast.AST | None) -> bool:
    if not isinstance(node, ast.Try):
        return False
    types = [handler.type for handler in node.handlers if handler.type]
    caught = {name.id for type_ in types for name in ast.walk(type_) if isinstance(name, ast.Name)}
    return bool(caught & {"ImportError", "ModuleNotFoundError"})


def _inside(attempt: ast.Try) -> Iterator[ast.AST]:
    for statement in attempt.body:
        yield from ast.walk(statement)


@rule("guard")
def guard(notebook: Notebook) -> Iterator[Complaint]:
    cell = notebook.by_id.get("course")
    if cell is None:
        return  # the rule "cell-ids" says so
    if cell.source != GUARD:
        lines = textwrap.indent(GUARD, "    ")
        yield "course", f"must be these lines, for a reader who has the notebook alone:\n{lines}"
    if not cell.is_folded:
        yield "course", f"must be folded, since it teaches nothing: {FOLDED}"
    # a single cell is also run after `setup` alone, as the grader and the tests of the lessons do
    in_setup, of_guard = _names_imported(notebook.by_id.get("setup")), _names_imported(cell)
    for other in notebook.code:
        for name in sorted({node.id for node in other.nodes if isinstance(node, ast.Name)} & of_guard - in_setup):
            if other is not cell and name not in _names_imported(other):
                yield other.id, f"uses {name}, which only the cell `course` imports; import it in `setup` too"


def _names_imported(cell: Cell | None) -> set[str]:
    imports = [node for node in (cell.nodes if cell else []) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}


def _is_preamble(node: ast.stmt) -> bool:
    future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
    return future or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


@rule("line-length")
def line_length(notebook: Notebook) -> Iterator[Complaint]:
    for cell in notebook.code:
        for place, line in enumerate(cell.source.splitlines(), start=1):
            if len(line) > MAX_COLUMNS:
                yield cell.id, f"line {place} has {len(line)} characters, the most is {MAX_COLUMNS}; break it"


@rule("definitions", not_for=("draft",))
def definitions(notebook: Notebook) -> Iterator[Complaint]:
    row = 0
    for cell in notebook.code:
        row = row + 1 if _only_defines(cell) else 0
        if row == MAX_DEFINITIONS + 1:
            yield cell.id, f"is the {row}th cell in a row that only defines something; show first what the others do"


def _only_defines(cell: Cell) -> bool:
    """Whether the cell holds functions and classes, with constants of theirs, and shows nothing."""
    if not cell.tree or cell.id == "setup":
        return False
    others = [node for node in cell.tree.body if not isinstance(node, _DEFINITIONS) and not _is_preamble(node)]
    return len(others) < len(cell.tree.body) and all(
        isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.Pass) for node in others
    )


# --- folding ----------------------------------------------------------------------------------------------------------


@rule("folding")
def folding(notebook: Notebook) -> Iterator[Complaint]:
    drawing = _names_that(notebook, _PLOTTING | _from_plotting(notebook))
    printing = _names_that(notebook, _PRINTING)
    fixed = {"course", "setup", "device", "data"}
    fixed |= {cell.id for cells in notebook.exercises.values() for cell in cells.values()}
    needed = _needed_below(notebook)
    for cell in notebook.code:
        if cell.is_folded != ("hide-input" in cell.tags) or cell.metadata.get("jupyter", {}).keys() - {"source_hidden"}:
            yield cell.id, f"is half folded; a folded cell has the metadata {FOLDED}"
            continue
        draws = bool(_roots(cell.nodes) & drawing)
        if cell.is_folded and not draws and cell.id != "course":
            yield cell.id, "is folded, but draws nothing; show its code"
        if cell.is_folded or not draws or cell.id in fixed or _says(cell, printing):
            continue
        taught = {node.name for node in cell.tree.body if isinstance(node, _DEFINITIONS)} - drawing
        if not taught and not read_and_written(cell.tree.body)[1] & needed[cell.id]:
            yield cell.id, f"only draws; fold it with the metadata {FOLDED}, or print what it computes"


def _from_plotting(notebook: Notebook) -> set[str]:
    """What the setup cell imports of shared.plotting, but for what draws nothing."""
    setup = notebook.by_id.get("setup")
    froms = [
        n for n in (setup.nodes if setup else []) if isinstance(n, ast.ImportFrom) and n.module == "shared.plotting"
    ]
    return {alias.asname or alias.name for node in froms for alias in node.names} - {"use_course_style"}


def _names_that(notebook: Notebook, roots: set[str] | frozenset[str]) -> set[str]:
    """`roots`, and the functions and classes of the notebook that call one of them, directly or through others."""
    found = set(roots)
    nodes = [node for cell in notebook.code for node in cell.nodes if isinstance(node, _DEFINITIONS)]
    own = {node.name: _roots(list(ast.walk(node))) for node in nodes}
    while new := {name for name, called in own.items() if called & found} - found:
        found |= new
    return found


def _roots(nodes: list[ast.AST]) -> set[str]:
    """First names of everything called: "axes" of axes[0].plot(x), "print" of print(x)."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Call):
            function: ast.AST = node.func
            while isinstance(function, ast.Attribute | ast.Subscript | ast.Call):
                function = function.func if isinstance(function, ast.Call) else function.value
            found |= {function.id} if isinstance(function, ast.Name) else set()
    return found


def _says(cell: Cell, printing: set[str]) -> bool:
    """Whether the cell shows more than figures: by what it calls, and by what is stored below it."""
    stored = (not any(kind.startswith("image/") for kind in output.get("data", {"": 0})) for output in cell.outputs)
    return bool(_roots(cell.nodes) & printing) or any(stored)


def _needed_below(notebook: Notebook) -> dict[str, set[str]]:
    """Cell id → names that the cells below it read before they write them."""
    needed: dict[str, set[str]] = {}
    names: set[str] = set()
    for cell in reversed(notebook.code):
        needed[cell.id] = names
        read, written = read_and_written(cell.tree.body if cell.tree else [])
        names = names - written | read
    return needed
