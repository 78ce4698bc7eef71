"""Record which functions and blocks of the product each test reaches, in any process.

A block is the body of a branch, a loop or an exception handler inside a function. The record is made in a copy of the
checkout in which every function and block begins with a call of ``note``. Rank processes, legs of the relay and
commands that tests start import the same files, so their functions count for the running test. If JAX traced a function
for an earlier test, the function does not run again and counts only for the earlier test.
"""

from __future__ import annotations

import ast
import json
import os
import struct
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.support.costs import tree_seconds
from tests.support.mutants.edits import Mutant, product_files

_ROW = struct.Struct("II")

# Written beside the product's packages. A function may be reached from any thread and after a fork, so each row is one
# append; the number of the test that runs is in a page that all processes share.
_NOTE = """
import mmap, os, pathlib
_folder = pathlib.Path(__file__).parent
_rows = os.open(_folder / "reached.rows", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
with open(_folder / "reached.test", "r+b") as _file:
    _test = mmap.mmap(_file.fileno(), 4, access=mmap.ACCESS_READ)
_known, _last = set(), b""

def note(number):
    global _last
    test = _test[:]
    if test != _last:
        _known.clear()
        _last = test
    if number not in _known:
        _known.add(number)
        os.write(_rows, test + number.to_bytes(4, "little"))
"""


def instrument(root: Path) -> None:
    """Make every function of the product below ``root`` record each call."""
    names: list[str] = []
    for file in product_files(root):
        source = file.read_text()
        tree = ast.parse(source)
        calls: list[tuple[int, int, str]] = []
        _collect(tree, str(file.relative_to(root)), (), names, calls)
        if calls:
            lines = source.split("\n")
            # Edit from the bottom up, so that line numbers above stay valid.
            for line, column, call in sorted([*calls, _import_line(tree)], reverse=True):
                lines.insert(line - 1, " " * column + call)
            file.write_text("\n".join(lines))
    (root / "reached.names").write_text(json.dumps(names))
    (root / "reached.test").write_bytes(bytes(4))
    (root / "reached.rows").write_bytes(b"")
    (root / "_reached.py").write_text(_NOTE)


def _import_line(tree: ast.Module) -> tuple[int, int, str]:
    """Before the first statement that may come after another."""
    for statement in tree.body:
        text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not text and not future:
            decorated = getattr(statement, "decorator_list", [])
            line = min([statement.lineno, *(decorator.lineno for decorator in decorated)])
            return line, 0, "from _reached import note as _reached_note"
    raise ValueError("a module with functions has a statement")


def _collect(
    node: ast.AST,
    path: str,
    outer: tuple[str, ...],
    names: list[str],
    calls: list[tuple[int, int, str]],
    in_function: bool = False,
) -> None:
    def add(body: list[ast.stmt], name: str) -> None:
        decorated = getattr(body[0], "decorator_list", [])
        line = min([body[0].lineno, *(decorator.lineno for decorator in decorated)])
        calls.append((line, body[0].col_offset, f"_reached_note({len(names)})"))
        names.append(f"{path}:{name}")

    for child in ast.iter_child_nodes(node):
        inner, inside = outer, in_function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*outer, child.name)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = True
            body = child.body[1:] if ast.get_docstring(child, clean=False) is not None else child.body
            if body and ast.unparse(body[0]) != "...":
                add(body, ".".join(inner))
        elif in_function and isinstance(child, _WITH_BLOCKS):
            for block in _blocks(child):
                add(block, f"{'.'.join(outer)}@{block[0].lineno}-{block[-1].end_lineno}")
        _collect(child, path, inner, names, calls, inside)


_WITH_BLOCKS = ast.If | ast.For | ast.While | ast.ExceptHandler | ast.match_case


def _blocks(node: Any) -> Iterator[list[ast.stmt]]:
    yield node.body
    rest = getattr(node, "orelse", [])
    # An "elif" is an "if" of its own, which has no line before it.
    is_elif = len(rest) == 1 and isinstance(rest[0], ast.If) and rest[0].col_offset == node.col_offset
    if rest and not is_elif:
        yield rest


@dataclass
class Record:
    """``seconds``: CPU time of each test that passed. ``tests``: those that reach ``path:function``, or a block in it,
    ``path:function@first-last`` with its lines.

    ``imported``: functions that run while the tests are imported.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    tests: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    imported: set[str] = field(default_factory=set)

    @classmethod
    def load(cls, path: Path) -> Record:
        record = cls()
        if path.exists():
            stored: dict[str, Any] = json.loads(path.read_text())
            record.seconds = stored["seconds"]
            record.imported = set(stored.get("imported", []))
            order = list(record.seconds)
            for function, numbers in stored["tests"].items():
                record.tests[function] = {order[number] for number in numbers}
        return record

    def save(self, path: Path) -> None:
        number = {test: index for index, test in enumerate(self.seconds)}
        tests = {name: sorted(number[test] for test in tests) for name, tests in self.tests.items()}
        path.write_text(
            json.dumps({"seconds": self.seconds, "tests": tests, "imported": sorted(self.imported)})
        )

    def add_run(self, root: Path) -> int:
        """Read the results of a run in the instrumented copy ``root``. Returns the number of tests."""
        names: list[str] = json.loads((root / "reached.names").read_text())
        order: list[str] = []
        for line in (root / "reached.order").read_text().splitlines():
            test, _, seconds = line.partition("\t")
            order.append(test)
            if seconds:
                self.seconds[test] = float(seconds)
            else:
                self.seconds.pop(test, None)
        for tests in self.tests.values():
            tests.difference_update(order)
        for number, function in _ROW.iter_unpack((root / "reached.rows").read_bytes()):
            if not number:
                self.imported.add(names[function])
            # A test that crashed its process is in no order.
            elif number <= len(order) and order[number - 1] in self.seconds:
                self.tests[names[function]].add(order[number - 1])
        return len(order)

    def reaching(self, mutant: Mutant) -> set[str]:
        """Tests that reach the innermost block around the mutant's line; without such a block, the function."""
        inner = (0, mutant.reach)
        for name in self.blocks.get(mutant.reach, ()):
            first, _, last = name.rpartition("@")[2].partition("-")
            if int(first) <= mutant.line <= int(last):
                inner = max(inner, (int(first), name))
        return self.tests.get(inner[1], set())

    @cached_property
    def blocks(self) -> Mapping[str, list[str]]:
        """The names of each function's blocks."""
        blocks = defaultdict(list)
        for name in self.tests:
            function, at, _ = name.partition("@")
            if at:
                blocks[function].append(name)
        return blocks

    def of_file(self, path: str) -> set[str]:
        """Tests that reach anything in a file."""
        return set().union(*(tests for name, tests in self.tests.items() if name.partition(":")[0] == path))

    def breadth(self) -> dict[str, int]:
        """The number of functions that each test reaches."""
        counts = dict.fromkeys(self.seconds, 0)
        for tests in self.tests.values():
            for test in tests:
                counts[test] += 1
        return counts


# The rest is a plugin of pytest: ``-p tests.support.mutants.reached`` in the instrumented copy.


def _set_test(number: int) -> None:
    with open("reached.test", "r+b") as file:
        file.write(number.to_bytes(4, "little"))


_count = 0
_passed = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    global _count, _passed
    _count += 1
    _passed = True
    _set_test(_count)
    start = tree_seconds()
    outcome = yield
    seconds = f"{tree_seconds() - start:.2f}" if _passed else ""
    with open(os.path.join(item.config.rootpath, "reached.order"), "a") as file:
        file.write(f"{item.nodeid}\t{seconds}\n")
    return outcome


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _passed
    _passed = _passed and report.passed


def by_promise(record: Record, path: str, tests: Iterable[str], breadth: dict[str, int]) -> list[str]:
    """Tests in an order that probably sees a fault in ``path`` soon.

    Tests that reach little else for their cost come first. Each file contributes one test, then the next; files with
    a name like the mutated file contribute several.
    """
    keys = {test: (breadth[test] + 20) * (record.seconds[test] + 0.05) for test in tests}
    stem = Path(path).stem
    turns: dict[str, int] = defaultdict(int)
    ranked = []
    for test in sorted(keys, key=lambda test: (keys[test], test)):
        file = test.partition("::")[0]
        alike = stem in Path(file).stem
        ranked.append((turns[file] // 8 if alike else turns[file] + 1, keys[test], test))
        turns[file] += 1
    return [test for _, _, test in sorted(ranked)]
