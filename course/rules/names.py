"""Which names a cell takes from the cells before it, and which it gives to those after it."""

from __future__ import annotations

import ast
from collections.abc import Iterable

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def read_and_written(statements: Iterable[ast.stmt]) -> tuple[set[str], set[str]]:
    """Names that the statements read before they have written them, and names that they write, in their own scope.

    What a function's body reads counts as read where it is defined. A name that only one branch writes counts as
    written.
    """
    read: set[str] = set()
    written: set[str] = set()

    def follow(*parts: ast.AST | list | None) -> None:
        for part in parts:
            if isinstance(part, list):
                follow(*part)
            elif isinstance(part, ast.For | ast.AsyncFor):
                follow(part.iter, part.target, part.body, part.orelse)
            elif isinstance(part, ast.If | ast.While):
                follow(part.test, part.body, part.orelse)
            elif isinstance(part, ast.With | ast.AsyncWith):
                follow(part.items, part.body)
            elif isinstance(part, ast.Try | ast.TryStar):
                follow(part.body, part.handlers, part.orelse, part.finalbody)
            elif isinstance(part, ast.ExceptHandler):
                written.update({part.name} - {None})
                follow(part.type, part.body)
            elif part is not None:
                own = {part.name} if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) else set()  # recursion
                read.update(_reads(part) - own - written)
                written.update(_writes(part))

    follow(*statements)
    return read, written


def _reads(node: ast.AST) -> set[str]:
    """Names of the surrounding scope that are read anywhere in the node."""
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Store) else {node.id}
    inner = set().union(*map(_reads, ast.iter_child_nodes(node)))
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return inner | {node.target.id}
    if isinstance(node, _SCOPES):
        body = node.body if isinstance(node.body, list) else [node.body]
        arguments = {argument.arg for argument in ast.walk(node) if isinstance(argument, ast.arg)}
        shared = {name for part in ast.walk(node) if isinstance(part, ast.Global) for name in part.names}
        return inner - (arguments | set().union(*map(_writes, body)) - shared)
    if isinstance(node, _COMPREHENSIONS):
        return inner - set().union(*(_writes(generator.target) for generator in node.generators))
    return inner


def _writes(node: ast.AST) -> set[str]:
    """Names that the node gives a value in its own scope."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, (ast.Lambda, *_COMPREHENSIONS)):
        return set()
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    if isinstance(node, ast.alias):
        return {(node.asname or node.name).split(".")[0]}
    named = {node.name} if isinstance(node, ast.ExceptHandler) and node.name else set()
    return named.union(*map(_writes, ast.iter_child_nodes(node)))
