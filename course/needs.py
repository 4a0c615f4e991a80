"""Which statements of a module some code needs: those that bind a name it uses, or a name that these use, and so on."""

from __future__ import annotations

import ast
import functools
import symtable


def needed_for(names: set[str], statements: list[ast.stmt]) -> list[ast.stmt]:
    """Those of the statements that the names need, in their order."""
    chosen: set[int] = set()
    waiting, asked = set(names), set(names)
    while waiting:
        name = waiting.pop()
        for index, statement in enumerate(statements):
            if index not in chosen and name in bound(statement):
                chosen.add(index)
                more = used(ast.unparse(statement)) - asked
                waiting |= more
                asked |= more
    return [statements[index] for index in sorted(chosen)]


@functools.lru_cache(4096)
def bound(statement: ast.stmt) -> set[str]:
    """Names that a statement of a module binds; `Arena.free = …` and `table["a"] = …` belong to what they change."""
    table = symtable.symtable(ast.unparse(statement), "lesson", "exec")
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
        for target in ast.walk(statement):
            if isinstance(target, ast.Attribute | ast.Subscript) and isinstance(target.ctx, ast.Store):
                while isinstance(target, ast.Attribute | ast.Subscript):
                    target = target.value
                if isinstance(target, ast.Name):
                    names.add(target.id)
    return names


def used(source: str) -> set[str]:
    """The module's names that code uses, inside of its functions too."""
    names: set[str] = set()
    tables = [symtable.symtable(source, "lesson", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        at_top = table.get_type() == "module"
        names |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (at_top or s.is_global())}
    return names
