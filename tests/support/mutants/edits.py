"""All small changes that the mutant generator knows, as edits of a function's source text.

An edit replaces one range of characters, so the rest of the file stays as written. Error texts, log texts, annotations
and docstrings stay unchanged, because no test should check each word of a message.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PRODUCT = ("torch_impl", "jax_impl", "bridge")
_BOUNDS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
_OPPOSITE = {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
_SILENT = ("warn", "info", "debug", "warning", "log", "emit_warning")


@dataclass(frozen=True)
class Mutant:
    """Characters ``start`` to ``end`` of ``path`` (relative to the checkout) become ``new``.

    ``function``: the dotted name inside of the file. ``before`` and ``after``: the changed lines, without indentation.
    """

    path: str
    function: str
    operator: str
    start: int
    end: int
    new: str
    line: int
    before: str
    after: str

    @property
    def reach(self) -> str:
        """The name of the mutated function in the record of reached functions."""
        return f"{self.path}:{self.function}"

    def apply(self, source: str) -> str:
        return source[: self.start] + self.new + source[self.end :]

    def __str__(self) -> str:
        head = f"{self.path}:{self.line} {self.function} ({self.operator})"
        minus = "\n".join(f"  - {line}" for line in self.before.splitlines())
        return head + "\n" + minus + "\n" + "\n".join(f"  + {line}" for line in self.after.splitlines())


class _Edits(ast.NodeVisitor):
    """Collects the edits of one file; ``self._name`` is the function that is being visited."""

    def __init__(self, path: str, source: str) -> None:
        self._path, self._source = path, source
        self._name: list[str] = []
        self._in_function = False
        self._lines = [line + "\n" for line in source.split("\n")]
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self.mutants: list[Mutant] = []

    # Which code is visited.

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._enter(node, self._in_function)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self._in_function = self._in_function, True
        self._name.append(node.name)
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        self._body(node)
        self._name.pop()
        self._in_function = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts unchanged."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave the text of errors unchanged."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions unchanged: they are true while the product is right."""

    def _enter(self, node: ast.ClassDef, in_function: bool) -> None:
        self._name.append(node.name)
        for child in node.body:
            if in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.visit(child)
        self._name.pop()

    def _body(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        for index, child in enumerate(body):
            if index and isinstance(
                child, ast.Expr | ast.Assign | ast.AugAssign | ast.If | ast.For | ast.With
            ):
                start = self._at(child.lineno, child.col_offset)
                self._add("early return", child, start, start, f"return\n{' ' * child.col_offset}")
            self.visit(child)

    # The edits.

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self._condition(node.test)
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        # Only a time limit sees an endless loop, so skip such edits.
        self._replace("condition", node.test, "False")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._condition(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            new = {**_BOUNDS, **_OPPOSITE}[type(operator)]
            between = slice(self._end(left), self._start(right))
            old = ast.unparse(ast.Compare(ast.Name("a"), [operator], [ast.Name("b")]))[2:-2]
            text = self._source[between]
            if text.count(old) == 1:
                name = "off by one" if type(operator) in (ast.Lt, ast.LtE, ast.Gt, ast.GtE) else "comparison"
                self._add(name, node, between.start, between.stop, text.replace(old, new))
            left = right
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self._replace("constant plus one", node, str(node.value + 1))
        elif isinstance(node.value, bool):
            self._replace("flag", node, str(not node.value))

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Call):
            if ast.unparse(call.func).rpartition(".")[2] in _SILENT:
                return
            self._replace("dropped call", node, "pass")
        if not isinstance(call, ast.Constant):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("cast", "TypeVar", "NewType"):
            return
        if isinstance(node.func, ast.Name) and node.func.id == "range":
            self._replace("range bound", node.args[-1], f"{self._text(node.args[-1])} - 1")
        symmetric = isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
        for first, second in zip(node.args, node.args[1:], strict=False) if not symmetric else ():
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                old = self._text(first), self._text(second)
                if old[0] != old[1]:
                    start, end = self._start(first), self._end(second)
                    between = self._source[self._end(first) : self._start(second)]
                    self._add("swapped arguments", node, start, end, old[1] + between + old[0])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict)
        sides = (node.left, node.right)
        known = any(
            isinstance(side, texts) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in sides
        )
        if isinstance(node.op, ast.Add | ast.Sub) and not known:
            start, end = self._end(node.left), self._start(node.right)
            old, new = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            text = self._source[start:end]
            if text.count(old) == 1:
                self._add("plus or minus", node, start, end, text.replace(old, new))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub):
            old, new = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
            start, end = self._end(node.target), self._start(node.value)
            self._add("plus or minus", node, start, end, self._source[start:end].replace(old, new))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            start, end = self._end(left), self._start(right)
            text = self._source[start:end]
            if text.count(old) == 1:
                self._add("and or or", node, start, end, text.replace(old, new))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace("dropped not", node, f"({self._text(node.operand)})")
        if not (isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)):
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                self._replace("returned value", node.value, "None")
            self.visit(node.value)

    def _condition(self, test: ast.expr) -> None:
        if isinstance(test, ast.Constant):
            return
        self._replace("condition", test, "True")
        self._replace("condition", test, "False")
        if not isinstance(test, ast.Compare | ast.UnaryOp) or (
            isinstance(test, ast.Compare) and len(test.ops) > 1
        ):
            self._replace("negated condition", test, f"not ({self._text(test)})")

    # Where things are.

    def _at(self, line: int, column: int) -> int:
        # ast counts columns in bytes of UTF-8.
        prefix = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(prefix)

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._at(node.lineno, node.col_offset)

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.expr | ast.stmt) -> str:
        return self._source[self._start(node) : self._end(node)]

    def _replace(self, operator: str, node: ast.expr | ast.stmt, new: str) -> None:
        self._add(operator, node, self._start(node), self._end(node), new)

    def _add(self, operator: str, node: ast.expr | ast.stmt, start: int, end: int, new: str) -> None:
        if not self._in_function:
            return
        first = self._source.rfind("\n", 0, start) + 1
        last = self._source.find("\n", end)
        last = len(self._source) if last < 0 else last
        before = self._source[first:last]
        after = self._source[first:start] + new + self._source[end:last]
        lines = ["\n".join(line.strip() for line in text.splitlines()) for text in (before, after)]
        name = ".".join(self._name)
        line = self._source.count("\n", 0, start) + 1
        self.mutants.append(Mutant(self._path, name, operator, start, end, new, line, *lines))


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All mutants of the functions in a file that Python can still compile."""
    edits = _Edits(path, source)
    edits.visit(ast.parse(source))
    return list(dict.fromkeys(edits.mutants))


def compiles(mutant: Mutant, source: str) -> bool:
    try:
        compile(mutant.apply(source), mutant.path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def product_files(root: Path, rooms: tuple[str, ...] = PRODUCT) -> Iterator[Path]:
    """The product's Python files below ``rooms``, which are folders or files."""
    for room in rooms:
        yield from [root / room] if (root / room).is_file() else sorted((root / room).rglob("*.py"))
