"""``private_apis.md`` lists exactly the private APIs that the code uses, with the files that use them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch_impl", "jax_impl", "bridge")
# Modules of jax that have no underscore and yet promise no stability.
UNSTABLE = ("jax.core", "jax.extend", "jax.interpreters", "jax.experimental.compute_on")
# Functions that import the module which their first argument names.
IMPORTERS = {"framework", "import_module"}
# Public in spite of their names, because Python documents them.
PUBLIC = {"os._exit", "sys._getframe", "._replace", "._asdict", "._fields", "._make"}
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \|", re.MULTILINE)


def uses(text: str, own: frozenset[str] = frozenset()) -> set[str]:
    """Private APIs of other packages in a source text: ``torch._C._name``, or ``._name`` on an object.

    ``own``: private names that the text's package defines itself.
    """
    tree = ast.parse(text)
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    apis = set(map(_cut, _reached(tree, imported, own)))
    # Of a chain such as torch._C._autograd._name, only the whole is an API.
    return {api for api in apis if not any(other.startswith(f"{api}.") for other in apis)} - PUBLIC


def _reached(tree: ast.AST, imported: dict[str, str], own: frozenset[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _private(alias.name))
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in names if _private(name))
        elif isinstance(node, ast.Attribute):
            path = _path(node, imported)
            if path is not None:
                if _private(path):
                    yield path
            elif _underscored(node.attr) and node.attr not in own:
                yield f".{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            words = [
                argument.value
                for argument in node.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
            if called in IMPORTERS and words and _private(words[0]):
                yield words[0]
            if called in ("getattr", "hasattr") and words and _underscored(words[0]) and words[0] not in own:
                yield f".{words[0]}"
        elif isinstance(node, ast.Tuple):
            # (module, "_name", replacement)
            module, *rest = node.elts or [None]
            path = None if module is None else _path(module, imported)
            for argument in rest if path is not None else ():
                if isinstance(argument, ast.Constant) and _private(f"{path}.{argument.value}"):
                    yield f"{path}.{argument.value}"


def _path(node: ast.expr, imported: dict[str, str]) -> str | None:
    """The dotted path of an attribute of an imported thing; None for an attribute of any other object."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if isinstance(node, ast.Attribute):
        around = _path(node.value, imported)
        return None if around is None else f"{around}.{node.attr}"
    return None


def _private(path: str) -> bool:
    root, *parts = path.split(".")
    if root in PACKAGES or root == "__future__":
        return False
    return any(map(_underscored, parts)) or any(path.startswith(f"{prefix}.") for prefix in UNSTABLE)


def _cut(path: str) -> str:
    """The path up to one name after the last private name. Later names belong to that object and do not count."""
    parts = path.split(".")
    last = max((index for index, part in enumerate(parts) if _underscored(part)), default=len(parts))
    return ".".join(parts[: last + 2])


def _underscored(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(text: str) -> Iterator[str]:
    """Private names that a source text defines, at any depth."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, ast.FunctionDef):
                yield member.name
            elif isinstance(member, ast.AnnAssign | ast.Assign):
                targets = [member.target] if isinstance(member, ast.AnnAssign) else member.targets
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def in_code() -> set[tuple[str, str]]:
    used = set()
    for package in PACKAGES:
        files = {path: path.read_text() for path in sorted((ROOT / package).rglob("*.py"))}
        own = frozenset(name for text in files.values() for name in own_names(text) if _underscored(name))
        for path, text in files.items():
            used |= {(api, path.relative_to(ROOT).as_posix()) for api in uses(text, own)}
    return used


def in_table() -> set[tuple[str, str]]:
    table = Path(__file__).with_name("private_apis.md").read_text(encoding="utf-8")
    return {
        # The code shows only the last name of an operator of torch.ops and of an attribute of an object.
        (f".{api.split('.')[-1]}" if api[0].isupper() or api.startswith("torch.ops.") else api, file)
        for api, files in ROW.findall(table)
        for file in re.findall(r"`([^`]+)`", files)
    }


def test_the_table_names_every_private_api_and_every_file_that_uses_it():
    code, table = in_code(), in_table()
    assert not code - table, "use a public API, or add a row to tests/private_apis.md"
    assert not table - code, "remove the row from tests/private_apis.md"


@pytest.mark.parametrize(
    ("text", "api"),
    [
        ("from torch._C import name", "torch._C.name"),
        ("import jax._src.core", "jax._src.core"),
        ("from jax.experimental.compute_on import compute_on2", "jax.experimental.compute_on.compute_on2"),
        ("import torch\ntorch._C._distributed.call()", "torch._C._distributed.call"),
        ("from torch.utils import _pytree as tree\ntree.tree_map(f, x)", "torch.utils._pytree.tree_map"),
        ("from jax.interpreters import partial_eval", "jax.interpreters.partial_eval"),
        ("def f(tensor): return tensor._local_tensor", "._local_tensor"),
        ("def f(tensor): return getattr(tensor, '_spec', None)", "._spec"),
        ("base = framework('torch.utils._pytree').tree_map", "torch.utils._pytree"),
        ("from torch import nn\nWRAPPED = ((nn, '_name', wrap),)", "torch.nn._name"),
    ],
)
def test_a_private_api_is_seen_however_it_is_reached(text: str, api: str):
    assert uses(text) == {api}


def test_own_names_public_names_and_python_itself_are_none():
    assert (
        uses("import torch, os\nself._own\ntorch.add\nos._exit(0)\nx.__dict__", frozenset({"_own"})) == set()
    )
