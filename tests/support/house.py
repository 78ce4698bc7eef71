"""The imports of the product, read from its source: imports anywhere in a file, and modules named in strings."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("bridge", "jax_impl", "torch_impl")
_IMPORT = re.compile(rf"from ((?:{'|'.join(PACKAGES)})(?:\.\w+)*) import ([\w, ]+)")
_DOTTED = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.[a-z_0-9]+)+")


@functools.cache
def files() -> Mapping[str, Path]:
    """The file of each module of the product, by dotted name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(files()[module].read_text(encoding="utf-8"))


@functools.cache
def imports() -> Mapping[str, frozenset[str]]:
    """For each module, the modules that it imports anywhere, also for type checking.

    If a package re-exports a name from one of its modules, an import of the name counts for that module. A string that
    equals a module's name counts as an import, because ``importlib`` and ``python -m`` use such strings.
    """
    return {module: frozenset(_imported(module)) - {module} for module in files()}


def _imported(module: str) -> Iterator[str]:
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files())
        elif isinstance(node, ast.ImportFrom) and node.module in files():
            yield from (_home(node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            # A string may name a package for its data files, so packages do not count.
            if node.value in files() and files()[node.value].name != "__init__.py":
                yield node.value
        elif isinstance(node, ast.Call):
            yield from _part_of_a_runtime(node)


def _home(module: str, name: str) -> str:
    """The module that defines ``name`` of a package."""
    if f"{module}.{name}" in files():
        return f"{module}.{name}"
    if files()[module].name == "__init__.py":
        for node in tree_of(module).body:
            if isinstance(node, ast.ImportFrom) and node.module in files():
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return _home(node.module, alias.name)
    return module


def _part_of_a_runtime(call: ast.Call) -> Iterator[str]:
    """Modules that ``bridge.planning.models.runtimes.part`` imports."""
    return (name for name in _parts_of_runtimes(call) if name in files())


def _parts_of_runtimes(call: ast.Call) -> Iterator[str]:
    if isinstance(call.func, ast.Name) and call.func.id == "part" and len(call.args) == 2:
        runtime, name = (arg.value if isinstance(arg, ast.Constant) else None for arg in call.args)
        for package in [f"{runtime}_impl"] if runtime else ["jax_impl", "torch_impl"]:
            yield f"{package}.{name}"


def missing_modules(module: str) -> list[str]:
    """Modules of the product that do not exist, but that strings of ``module`` name, alone or with one attribute."""
    named: list[str] = []
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            home, _, attribute = node.value.rpartition(".")
            if home not in files() or not re.search(rf"\b{attribute}\b", files()[home].read_text("utf-8")):
                named.append(node.value)
        elif isinstance(node, ast.Call):
            named += _parts_of_runtimes(node)
    return [name for name in named if name not in files()]


def missing_names_in_programs(path: Path) -> list[str]:
    """Lines ``from a.module import names`` in a file's text, such as a test's programs, whose names do not exist."""
    texts = (
        node.value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " import " in node.value
    )
    lines = (line.strip() for text in texts for line in text.splitlines())
    return [
        match[0] for line in lines if (match := _IMPORT.fullmatch(line)) and not _exists(match[1], match[2])
    ]


def _exists(module: str, names: str) -> bool:
    if module not in files():
        return False
    # A name that is written in the module: whether it is bound there is seen where the program runs.
    source = files()[module].read_text(encoding="utf-8")
    return all(
        re.search(rf"\b{re.escape(name)}\b", source) or f"{module}.{name}" in files()
        for name in re.findall(r"(\w+)(?: as \w+)?(?:,|$)", names)
    )


def rooms() -> list[str]:
    """Dotted names of all packages, and "" for the whole product."""
    return ["", *(module for module, path in files().items() if path.name == "__init__.py")]


def arrows(room: str) -> dict[str, dict[str, list[str]]]:
    """For each child of ``room`` (a module or a package), the children that it imports, with these imports as text."""
    by_child: dict[str, dict[str, list[str]]] = {}
    for module, others in imports().items():
        child = _child(room, module)
        if child is None:
            continue
        targets = by_child.setdefault(child, {})
        for other in others:
            target = _child(room, other)
            if target not in (None, child):
                targets.setdefault(target, []).append(f"{module} imports {other}")
    return by_child


def _child(room: str, module: str) -> str | None:
    if not room:
        # `bridge` holds both the lowest floor (`bridge.core`) and the highest.
        return "bridge.core" if _within(module, "bridge.core") else module.partition(".")[0]
    if not module.startswith(room + "."):
        return None
    return f"{room}.{module.removeprefix(room + '.').partition('.')[0]}"


def _within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Sets of nodes that reach each other (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            position = stack.index(node)
            members = stack[position:]
            del stack[position:]
            if len(members) > 1:
                groups.append(sorted(members))

    for node in graph:
        if node not in index:
            visit(node)
    return groups


def functions(module: str) -> Iterable[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        node for node in ast.walk(tree_of(module)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, without its docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= (first.end_lineno or 0) - first.lineno + 1
    return lines


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of parameters without ``self`` and ``cls``."""
    arguments = function.args
    names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))
