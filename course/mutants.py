"""Mutants of an answer: its code with one small change each, as a student might have it wrong.

    >>> cell = "### BEGIN SOLUTION\\ny = x + 1\\n### END SOLUTION"
    >>> [mutant.change for mutant in mutants(cell)]
    [['- y = x + 1', '+ pass'], ['- y = x + 1', '+ y = x - 1'], ...]

Only code between the solution markers is changed, never a docstring, an annotation or the text of an exception. The
libraries that exist (mutmut, cosmic-ray) mutate modules and run a whole test suite for each mutant.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from course.exercise_form import solution_blocks

_OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,), ast.Pow: (ast.Mult,),
    ast.FloorDiv: (ast.Div, ast.Mod), ast.Mod: (ast.FloorDiv,), ast.MatMult: (ast.Mult,),
    ast.LShift: (ast.RShift,), ast.RShift: (ast.LShift,),
    ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd,), ast.BitXor: (ast.BitOr,),
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.And: (ast.Or,), ast.Or: (ast.And,),
}  # fmt: skip
_ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult, ast.LShift, ast.RShift)
_OPPOSITES = ("min max", "amin amax", "argmin argmax", "any all", "floor ceil", "zeros ones", "isend irecv")
_OPPOSITE = {a: b for pair in _OPPOSITES for a, b in (pair.split(), pair.split()[::-1])}
_SYMMETRIC = ("min", "max", "transpose", "equal", "allclose")  # their arguments may change places
_KEPT = (ast.Pass, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.ClassDef)  # statements never dropped

Names = dict[ast.Name, list[str]]  # a name that is read → what may take its place


@dataclass(frozen=True)
class Mutant:
    """An answer cell with one change."""

    line: int  # of the cell as it is written, from 1
    change: list[str]  # the lines that differ as `ast.unparse` writes them, "- " before the old, "+ " before the new
    source: str  # the whole cell


def mutants(source: str) -> list[Mutant]:
    """All mutants of an answer cell, by line; no two of them are alike, and none is like the original.

    Raises SyntaxError, or MarkerError if the solution markers don't pair up.
    """
    tree = ast.parse(source)
    solutions = [range(begin + 2, end + 1) for begin, end in solution_blocks(source)]
    before = ast.unparse(tree)
    found, seen = [], {before}
    for node, changed in _variants(tree, None, _names(tree)):
        if not any(node.lineno in lines and node.end_lineno in lines for lines in solutions):
            continue
        after = ast.unparse(changed)
        if after not in seen:
            found.append(Mutant(node.lineno, _difference(before, after), after))
        seen.add(after)
    return sorted(found, key=lambda mutant: mutant.line)


def _difference(before: str, after: str) -> list[str]:
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[2:]
    return [f"{line[0]} {line[1:].strip()}" for line in lines if not line.startswith("@@")]


def _variants(node: ast.AST, parent: ast.AST | None, names: Names) -> Iterator[tuple[ast.AST, ast.AST | list]]:
    """(what is changed in it, a copy of `node` with that change, or the statements that take its place)."""
    if isinstance(node, ast.Raise):  # the wording of an error is nobody's business
        yield node, [ast.Pass()]
        return
    where = node.target if isinstance(node, ast.comprehension) else node  # it has no place of its own
    yield from ((where, changed) for changed in _changes(node, parent, names))
    for field, value in ast.iter_fields(node):
        # not mutated: types, and how an f-string formats
        if field in ("annotation", "returns", "format_spec"):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            is_text = isinstance(child, ast.Constant) and isinstance(node, ast.JoinedStr)
            is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if not isinstance(child, ast.AST) or is_text or is_docstring:
                continue
            for place, changed in _variants(child, node, names):
                if isinstance(value, list):
                    inserted = changed if isinstance(changed, list) else [changed]
                    changed = [*value[:index], *inserted, *value[index + 1 :]]
                yield place, _with(node, **{field: changed})


def _changes(node: ast.AST, parent: ast.AST | None, names: Names) -> Iterator[ast.AST | list[ast.stmt]]:
    """What may take the place of one node."""
    if isinstance(node, ast.stmt):
        yield from _statement_changes(node, parent)
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            yield from (_with(node, op=new()) for new in _OPERATORS[type(op)])
            if isinstance(op, _ORDERED):
                yield _with(node, left=right, right=left)
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield from (_with(node, ops=[*ops[:i], new(), *ops[i + 1 :]]) for new in _OPERATORS[type(op)])
        case ast.BoolOp(op=op, values=values):
            yield _with(node, op=_OPERATORS[type(op)][0]())
            yield from (_with(node, values=rest) for rest in _each_dropped(values))
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(value=float(value)):
            yield from (ast.Constant(2 * value), ast.Constant(0.0))
        case ast.Constant(value=str()):
            yield ast.Constant("?")
        case ast.Name(id=name, ctx=ast.Load()):
            others = [*names.get(node, []), *([_OPPOSITE[name]] if name in _OPPOSITE else [])]
            yield from (_with(node, id=other) for other in others)
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in _OPPOSITE:
            yield _with(node, attr=_OPPOSITE[name])
        case ast.Slice():
            yield from (_with(node, **{end: None}) for end in ("lower", "upper") if getattr(node, end))
        case ast.Tuple(elts=elements, ctx=ast.Load()) | ast.List(elts=elements, ctx=ast.Load()):
            yield from (_with(node, elts=new) for new in _swapped(elements))
        case ast.Call(func=function, args=arguments, keywords=keywords):
            if getattr(function, "attr", getattr(function, "id", "")) not in _SYMMETRIC:
                yield from (_with(node, args=new) for new in _swapped(arguments))
            yield from (_with(node, keywords=rest) for rest in _each_dropped(keywords))
            if isinstance(parent, ast.Expr):
                return  # without the call the statement would do nothing, which is a mutant already
            root = function
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(function, ast.Attribute) and (not isinstance(root, ast.Name) or root in names):
                yield function.value  # x.detach() → x; not torch.cat(…) → torch
            elif len(arguments) == 1 and not isinstance(arguments[0], ast.Starred):
                yield arguments[0]
        case ast.comprehension(ifs=conditions):
            yield from (_with(node, ifs=rest) for rest in _each_dropped(conditions))


def _statement_changes(node: ast.stmt, parent: ast.AST | None) -> Iterator[ast.AST | list[ast.stmt]]:
    if isinstance(node, _KEPT) or (isinstance(node, ast.AnnAssign) and node.value is None):
        return
    # without a function that it needs an answer is a NameError, which tells nothing of the check
    if not isinstance(node, ast.FunctionDef) or isinstance(parent, ast.ClassDef):
        yield ast.Pass()
    match node:
        case ast.AugAssign(op=op):
            yield from (_with(node, op=new()) for new in _OPERATORS[type(op)])
            yield ast.Assign([node.target], node.value, lineno=node.lineno)
        case ast.If(test=test) | ast.While(test=test) if not isinstance(test, ast.Compare | ast.UnaryOp):
            yield _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.With(items=items, body=body):
            yield from (_with(node, items=rest) if rest else body for rest in _each_dropped(items))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of the node with other fields; `node` stays as it is."""
    copy = type(node)(**{**dict(ast.iter_fields(node)), **fields})
    return ast.copy_location(copy, node)


def _each_dropped(items: list) -> list[list]:
    return [[*items[:i], *items[i + 1 :]] for i in range(len(items))]


def _swapped(items: list) -> list[list]:
    """The list with two neighbours exchanged."""
    pairs = [i for i in range(len(items) - 1) if not isinstance(items[i], ast.Starred)]
    return [[*items[:i], items[i + 1], items[i], *items[i + 2 :]] for i in pairs]


def _names(tree: ast.AST) -> Names:
    """Each name that belongs to a function; of those that it computes with or compares, the others of these."""
    found: Names = {}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    for function in functions:  # the inner ones come later
        nodes = list(ast.walk(function))
        own = {node.arg for node in nodes if isinstance(node, ast.arg)}
        own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        inner = [name for node in nodes if isinstance(node, ast.comprehension) for name in ast.walk(node.target)]
        places = own - {name.id for name in inner if isinstance(name, ast.Name)}
        operands = [
            child
            for node in nodes
            if isinstance(node, ast.BinOp | ast.Compare)
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.Name) and child.id in places
        ]
        found |= {node: [] for node in nodes if isinstance(node, ast.Name) and node.id in own}
        found |= {name: sorted({other.id for other in operands} - {name.id}) for name in operands}
    return found
