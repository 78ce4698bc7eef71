"""The Python reference, read from the source: ``<!-- generated: python PACKAGE -->`` stands for a package's names.

Nothing is imported, so that neither PyTorch nor JAX is needed. A build warns of a public name without an entry, and of
an entry without a docstring.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import griffe
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

from extensions.docstrings import as_code, as_markdown
from extensions.generated_text import fill_in
from extensions.signatures import parameters_of, signature_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("twinshard", "bridge", "torch_impl", "jax_impl")
_LOG = logging.getLogger(__name__)
# Shown though their names begin with underscores.
_SPECIAL = ("__call__",)


def setup(sphinx: Sphinx) -> dict[str, bool]:
    sphinx.connect("source-read", _read)
    sphinx.connect("env-check-consistency", _check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


@functools.cache
def public_names() -> dict[str, tuple[str, ...]]:
    """By module, the names in its ``__all__``, for all modules of the product that have one."""
    files = [ROOT / "twinshard.py"]
    files += [file for package in PACKAGES[1:] for file in sorted((ROOT / package).rglob("*.py"))]
    names = {}
    for file in files:
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        # twinshard.py computes its names, and its stubs list them.
        shown = ROOT / "twinshard-stubs/__init__.pyi" if module == "twinshard" else file
        text = shown.read_text(encoding="utf-8")
        if "__all__" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names[module] = tuple(ast.literal_eval(node.value))
    return names


def _read(_: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = fill_in(source[0], {"python": lambda package: "\n".join(_entries(package))})


def _check(_: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each public name without an entry, and without a docstring."""
    entries = env.get_domain("py").objects  # type: ignore[attr-defined]
    for module, names in public_names().items():
        for name in names:
            if f"{module}.{name}" not in entries:
                _LOG.warning("the Python reference has no entry for the public name %s.%s", module, name)


@functools.cache
def _modules() -> griffe.ModulesCollection:
    loader = griffe.GriffeLoader(search_paths=[ROOT], allow_inspection=False)
    for package in PACKAGES[1:]:
        loader.load(package)
    loader.load("twinshard", find_stubs_package=True)
    return loader.modules_collection


@functools.cache
def _homes() -> dict[str, str]:
    """By path of the definition, the public path under which the reference describes the definition."""
    homes: dict[str, str] = {}
    # A shallow package comes first: users import from it.
    for module in sorted(
        public_names(), key=lambda name: (PACKAGES.index(name.split(".")[0]), name.count("."))
    ):
        for name in public_names()[module]:
            target = _definition(f"{module}.{name}")
            if target is not None and not target.is_module:
                homes.setdefault(target.path, f"{module}.{name}")
    return homes


@functools.cache
def _results() -> dict[str, list[griffe.Object]]:
    """By module, the classes without a public name that public functions of the module are the first to return."""
    results: dict[str, list[griffe.Object]] = {module: [] for module in public_names()}
    known = set(_homes())
    for module, names in public_names().items():
        for name in names:
            function = _definition(f"{module}.{name}")
            returns = function.returns if isinstance(function, griffe.Function) else None
            for part in returns.iterate(flat=True) if isinstance(returns, griffe.Expr) else ():
                result = _definition(part.canonical_path) if isinstance(part, griffe.ExprName) else None
                if result is not None and result.is_class and result.docstring and result.path not in known:
                    known.add(result.path)
                    results[module].append(result)
    return results


def _public_name(path: str) -> str | None:
    """The path under which the reference describes what ``path``, perhaps of an import, stands for."""
    target = _definition(path)
    if target is None:
        return None
    results = (result.path for classes in _results().values() for result in classes)
    return _homes().get(target.path) or (target.path if target.path in results else None)


@functools.cache
def _definition(path: str) -> griffe.Object | None:
    """What a path stands for, imports followed; nothing where this repository does not define it."""
    try:
        member = _modules()[path]
        return member.final_target if isinstance(member, griffe.Alias) else member
    except (KeyError, griffe.AliasResolutionError):
        return None


def _entries(package: str) -> Iterator[str]:
    for name in public_names()[package]:
        path, target = f"{package}.{name}", _definition(f"{package}.{name}")
        if target is None:
            origin = _modules()[package].members[name].target_path
            yield _directive("data", path, "", f"The same as `{origin}`.\n")
        elif target.is_module:
            yield _directive("data", path, "", f"The package `{target.path}`.\n")
        elif _homes()[target.path] != path:
            home = _homes()[target.path]
            yield _directive(_kind(target), path, _signature(target), f"The same as {{py:obj}}`{home}`.\n")
        else:
            yield from _entry(path, target)
    if _results()[package]:
        yield "Types of results:\n"
    for cls in _results()[package]:
        yield from _entry(cls.path, cls)


def _entry(path: str, target: griffe.Object) -> Iterator[str]:
    text = _text(target)
    if not text:
        _LOG.warning("the public name %s has no docstring: %s", path, target.filepath)
    members = _members(path, target) if target.is_class else []
    yield _directive(_kind(target), path, _signature(target), "\n".join([text, *members]))


def _members(path: str, cls: griffe.Object) -> Iterator[str]:
    """Public methods, properties and fields that have docstrings, those of base classes in this repository too."""
    for name, member in cls.all_members.items():
        if name.startswith("_") and name not in _SPECIAL:
            continue
        try:
            target = member.final_target if isinstance(member, griffe.Alias) else member
        except griffe.AliasResolutionError:
            continue
        text = _text(target)
        if text and not target.is_class and not target.is_module:
            directive = {"function": "method"}.get(_kind(target), "attribute")
            options = [":classmethod:"] if "classmethod" in target.labels else []
            options += [":staticmethod:"] if "staticmethod" in target.labels else []
            directive = "property" if "property" in target.labels else directive
            yield _directive(directive, f"{path}.{name}", _signature(target), text, 5, options)


def _text(target: griffe.Object) -> str:
    """The docstring as Markdown; for a value without one its source."""
    if target.docstring:
        return as_markdown(target.docstring.value)
    if (
        target.is_attribute
        and target.parent is not None
        and target.parent.is_module
        and target.value is not None
    ):
        return as_code(f"{target.name} = {target.value}", "python")
    return ""


def _kind(target: griffe.Object) -> str:
    if target.is_class:
        bases = {str(base).rpartition(".")[2] for base in target.bases}
        return "exception" if any(base.endswith(("Error", "Exception")) for base in bases) else "class"
    return "function" if target.is_function else "data"


def _signature(target: griffe.Object) -> str:
    if target.is_function and "property" not in target.labels:
        return signature_of(target, _public_name)
    if target.is_class:
        return parameters_of(target, _public_name)
    return ""


def _directive(
    kind: str, path: str, signature: str, content: str, ticks: int = 7, options: list[str] | None = None
) -> str:
    fence = "`" * ticks
    lines = [f"{fence}{{py:{kind}}} {path}{signature}", *(options or []), "", content, f"{fence}\n"]
    return "\n".join(lines)
