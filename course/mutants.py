"""Mutants of an answer: its code with one small change each, as a student might have it wrong.

    >>> cell = "### BEGIN SOLUTION\\ny = x + 1\\n### END SOLUTION"
    >>> [mutant.change for mutant in mutants(cell)]
    ['- y = x + 1', '- y = x + 1\\n+ y = x - 1', ...]

Only code between the solution markers is changed, never a docstring, an annotation or the text of an exception. The
libraries that exist (mutmut, cosmic-ray) mutate modules and run a whole test suite for each mutant.
"""

from __future__ import annotations

import ast
import difflib
import types
import warnings
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
_SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_KEPT = (ast.Pass, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.ClassDef)  # statements never dropped

# a change: its kind and what takes the node's place (for a statement a list of statements)
Change = tuple[str, ast.expr | ast.keyword | list[ast.stmt]]


@dataclass(frozen=True)
class Mutant:
    """An answer cell with one change."""

    kind: str  # what was done, e.g. "comparison"
    line: int  # of the cell as it is written, from 1
    change: str  # the lines that differ, "- " before the old and "+ " before the new, as `ast.unparse` writes them
    source: str  # the whole cell


def mutants(source: str) -> list[Mutant]:
    """All mutants of an answer cell, by line; no two compile to the same code, and none to the original's.

    Raises SyntaxError, or MarkerError if the solution markers don't pair up.
    """
    found, seen = [], {_code(source)}
    for mutant in candidates(source):
        try:
            code = _code(mutant.source)
        except SyntaxError:  # such as a `return` that left its function
            continue
        if code not in seen:
            seen.add(code)
            found.append(mutant)
    return sorted(found, key=lambda mutant: mutant.line)


def candidates(source: str) -> Iterator[Mutant]:
    """Every change of every node between the markers; some may not compile or be equal to others."""
    tree = ast.parse(source)
    solutions = [range(begin + 2, end + 1) for begin, end in solution_blocks(source)]
    before = ast.unparse(tree)
    names = _names(tree)
    for parent, field, index, node in _slots(tree):
        if not any(node.lineno in lines and node.end_lineno in lines for lines in solutions):
            continue
        whole = getattr(parent, field)
        for kind, new in _changes(node, parent, names):
            if index is None:
                setattr(parent, field, new)
            else:
                inserted = new if isinstance(new, list) else [new]
                setattr(parent, field, [*whole[:index], *inserted, *whole[index + 1 :]])
            after = ast.unparse(tree)
            yield Mutant(kind, node.lineno, _difference(before, after), after)
        setattr(parent, field, whole)


def _slots(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """(parent, field, index in the field's list or None, node) of everything below `node` that may be changed."""
    for field, value in ast.iter_fields(node):
        # not mutated: types, how an f-string formats, and the wording of an error
        if field in ("annotation", "returns", "format_spec") or isinstance(node, ast.Raise):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):  # a docstring, or `...`
                continue
            if isinstance(child, ast.stmt | ast.expr | ast.keyword):
                yield node, field, index, child
            yield from _slots(child)


def _changes(node: ast.AST, parent: ast.AST, names: dict[ast.Name, list[str]]) -> Iterator[Change]:
    """What may take the place of one node."""
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            yield from (("operator", _with(node, op=new())) for new in _OPERATORS[type(op)])
            if isinstance(op, _ORDERED):
                yield "operator", _with(node, left=right, right=left)
        case ast.UnaryOp(op=op, operand=operand):
            yield "condition" if isinstance(op, ast.Not) else "operator", operand
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield from (
                    ("comparison", _with(node, ops=[*ops[:i], new(), *ops[i + 1 :]])) for new in _OPERATORS[type(op)]
                )
        case ast.BoolOp(op=op, values=values):
            yield "boolean", _with(node, op=_OPERATORS[type(op)][0]())
            yield from (("boolean", _with(node, values=rest)) for rest in _each_dropped(values))
        case ast.IfExp(body=body, orelse=orelse):
            yield from (("condition", arm) for arm in (body, orelse))
        case ast.Constant(value=value):
            yield from (("constant", ast.Constant(new)) for new in _shifted(value))
        case ast.Name(id=name, ctx=ast.Load()):
            yield from (("name", _with(node, id=other)) for other in names.get(node, []))
            if name in _OPPOSITE:
                yield "name", _with(node, id=_OPPOSITE[name])
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in _OPPOSITE:
            yield "name", _with(node, attr=_OPPOSITE[name])
        case ast.Slice():
            yield from (("argument", _with(node, **{end: None})) for end in ("lower", "upper") if getattr(node, end))
        case ast.Tuple(elts=elements, ctx=ast.Load()) | ast.List(elts=elements, ctx=ast.Load()):
            yield from (("argument", _with(node, elts=new)) for new in _swapped(elements, apart=1))
        case ast.Call():
            yield from _call_changes(node, parent, names)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            for i, loop in enumerate(node.generators):
                negated = [_negated(test) for test in loop.ifs]
                rests = [*_each_dropped(loop.ifs), *([new] for new in negated[:1] if new and len(loop.ifs) == 1)]
                for rest in rests:
                    loops = [*node.generators[:i], _with(loop, ifs=rest), *node.generators[i + 1 :]]
                    yield "condition", _with(node, generators=loops)
        case ast.stmt():
            yield from _statement_changes(node, parent)


def _call_changes(node: ast.Call, parent: ast.AST, names: dict[ast.Name, list[str]]) -> Iterator[Change]:
    if getattr(node.func, "attr", getattr(node.func, "id", "")) not in _SYMMETRIC:
        yield from (("argument", _with(node, args=new)) for new in _swapped(node.args))
    values = [keyword.value for keyword in node.keywords]
    for new in _swapped(values):
        keywords = [_with(k, value=v) for k, v in zip(node.keywords, new, strict=True)]
        yield "argument", _with(node, keywords=keywords)
    yield from (("keyword", _with(node, keywords=rest)) for rest in _each_dropped(node.keywords))
    if isinstance(parent, ast.Expr):
        return  # without the call the statement would do nothing, which is a mutant already
    root = node.func
    while isinstance(root, ast.Attribute):
        root = root.value
    if isinstance(node.func, ast.Attribute) and (not isinstance(root, ast.Name) or root in names):
        yield "call", node.func.value  # x.detach() → x; not torch.cat(…) → torch
    elif len(node.args) == 1 and not isinstance(node.args[0], ast.Starred):
        yield "call", node.args[0]


def _statement_changes(node: ast.stmt, parent: ast.AST) -> Iterator[Change]:
    if isinstance(node, _KEPT) or (isinstance(node, ast.AnnAssign) and node.value is None):
        return
    # without a function or class that it needs an answer is a NameError, which tells nothing of the check
    if not isinstance(node, ast.FunctionDef) or isinstance(parent, ast.ClassDef):
        yield "statement", [ast.Pass()]
    match node:
        case ast.FunctionDef(args=arguments, decorator_list=decorators):
            yield from (("decorator", [_with(node, decorator_list=rest)]) for rest in _each_dropped(decorators))
            late = [i for i, d in enumerate(arguments.defaults, len(arguments.args) - len(arguments.defaults))
                    if isinstance(d, ast.Name) and d.id == arguments.args[i].arg]  # fmt: skip
            for i in late:  # def hook(x, name=name) in a loop: without it every hook has the last name
                j = i - len(arguments.args) + len(arguments.defaults)
                kept = _with(arguments, args=_without(arguments.args, i), defaults=_without(arguments.defaults, j))
                yield "argument", [_with(node, args=kept)]
        case ast.AugAssign(op=op):
            yield from (("operator", [_with(node, op=new())]) for new in _OPERATORS[type(op)])
            yield "operator", [ast.Assign([node.target], node.value, lineno=node.lineno)]
        case ast.If(test=test, orelse=orelse):
            if negated := _negated(test):
                yield "condition", [_with(node, test=negated)]
            if orelse:
                yield "statement", [_with(node, orelse=[])]
        case ast.While(test=test):
            if negated := _negated(test):
                yield "condition", [_with(node, test=negated)]
        case ast.With(items=items, body=body):
            yield from (("with", [_with(node, items=rest)] if rest else body) for rest in _each_dropped(items))
        case ast.Try(body=body, handlers=handlers, finalbody=final):
            if handlers:
                yield "try", body
            if final:
                without = [_with(node, finalbody=[])] if handlers else body
                yield "try", without
                yield "try", [*without, *final]
        case ast.Continue():
            yield "statement", [ast.Break()]


def _shifted(value: object) -> list:
    """Constants near `value`, in the order in which they are tried."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        near = [value + 1, value - 1, value * 2, type(value)(0)]
        return [new for new in dict.fromkeys(near) if new != value]
    if isinstance(value, str):
        return ["?" if value != "?" else "??"]
    return []


def _negated(test: ast.expr) -> ast.expr | None:
    """not test; None where changes of the test itself do that already."""
    single = isinstance(test, ast.Compare) and len(test.ops) == 1
    negation = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    return None if single or negation else ast.UnaryOp(ast.Not(), test)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of the node with other fields; `node` stays as it is."""
    copy = type(node)(**{**dict(ast.iter_fields(node)), **fields})
    return ast.copy_location(copy, node)


def _without(items: list, index: int) -> list:
    return [*items[:index], *items[index + 1 :]]


def _each_dropped(items: list) -> Iterator[list]:
    return (_without(items, index) for index in range(len(items)))


def _swapped(items: list, apart: int | None = None) -> Iterator[list]:
    """The list with two of its items exchanged: any two, or those that are `apart` places apart."""
    for i in range(len(items)):
        for j in range(i + 1, len(items)):
            if (apart is None or j - i == apart) and not isinstance(items[i], ast.Starred):
                yield [*items[:i], items[j], *items[i + 1 : j], items[i], *items[j + 1 :]]


def _names(tree: ast.AST) -> dict[ast.Name, list[str]]:
    """For each name that is read and local: the other names of the scope it belongs to, that are used alike."""
    found: dict[ast.Name, list[str]] = {}

    def walk(node: ast.AST, scopes: list[dict[str, set[str]]]) -> None:
        if isinstance(node, _SCOPES):
            scopes = [*scopes, _uses(node)]
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            scope = next((scope for scope in reversed(scopes) if node.id in scope), None)
            if scope is not None:
                found[node] = [name for name in scope if name != node.id and scope[name] & scope[node.id]]
        for child in ast.iter_child_nodes(node):
            walk(child, scopes)

    walk(tree, [])
    return found


def _uses(scope: ast.AST) -> dict[str, set[str]]:
    """Names that a function or comprehension binds → the ways in which they are used."""
    bound: dict[str, set[str]] = {}
    inside = [scope]
    while inside:
        for child in ast.iter_child_nodes(inside.pop(0)):
            match child:
                case ast.arg(arg=name, annotation=annotation):
                    bound[name] = {ast.unparse(annotation)} if annotation else set()
                case ast.Name(id=name, ctx=ast.Store()):
                    bound.setdefault(name, set())
                case ast.FunctionDef(name=name):
                    bound.setdefault(name, {"called"})
            if not isinstance(child, _SCOPES):
                inside.append(child)
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.Name) and child.id in bound and isinstance(child.ctx, ast.Load):
                    bound[child.id].add(_use(parent, field, index))
    return bound


def _use(parent: ast.AST, field: str, index: int) -> str:
    match parent:
        case ast.Call(func=func):
            return "called" if field == "func" else f"{ast.unparse(func)} takes it as {index}"
        case ast.keyword(arg=name):
            return f"passed as {name}"
        case ast.BinOp() | ast.UnaryOp() | ast.Compare() | ast.AugAssign() | ast.Slice():
            return "computed with"
        case ast.Subscript():
            return "computed with" if field == "slice" else "indexed"
        case ast.For() | ast.comprehension():
            return "iterated"
        case ast.Attribute(attr=attr):
            return "." + attr
        case _:
            return type(parent).__name__  # such as Return


def _code(source: str) -> types.CodeType:
    """What a cell compiles to, as if it stood on one line: equal for two cells only if they do the same."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            node.lineno = node.end_lineno = 1
            node.col_offset = node.end_col_offset = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `1 is not x` and the like
        return compile(tree, "answer", "exec")


def _difference(before: str, after: str) -> str:
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[2:]
    return "\n".join(f"{line[0]} {line[1:].strip()}" for line in lines if not line.startswith("@@"))
