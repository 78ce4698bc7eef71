"""What a user can reach in each half, and which parts of one half answer which of the other.

An atom is a public name (``fully_shard``), a keyword of a public callable (``fully_shard(mesh=)``), or a method or
field of a public class (``FSDPModule.no_sync``). Atoms with the same name in both halves are twins. A ``Row`` lists
every other atom, with its counterparts or with the reason why the other half has none.

``python -m tests.support.surfaces`` prints the table of ``docs/reference/features.md``, and ``--write`` puts it there.
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- features -->", "<!-- end of features -->"
PAGE = ROOT / "docs" / "reference" / "features.md"


@dataclass(frozen=True)
class Row:
    """``torch``, ``jax``: atoms, or other code that is shown as it is (after "~"). ``why``: of an empty side.

    feature: as the page shows it; "" for a row that only this file shows.
    """

    feature: str
    torch: tuple[str, ...] = ()
    jax: tuple[str, ...] = ()
    why: str = ""


def atoms(module: ModuleType, extra: dict[str, list[str]]) -> set[str]:
    """All atoms of a runtime. ``extra``: keywords that a signature hides in ``**options``, by callable.

    Only optional keywords of callables count, because required arguments are the runtime's own way to name a model.
    """
    names: set[str] = set()
    for name in module.__all__:
        value = getattr(module, name)
        names.add(name)
        names.update(f"{name}({keyword}=)" for keyword in extra.get(name, []))
        if inspect.isclass(value):
            if _has_members(name, value):
                names.update(f"{name}.{member}" for member in _members(value, module))
            if not _is_shared(value):
                names.update(f"{name}({keyword}=)" for keyword in _keywords(value) - _fields(value))
        elif callable(value):
            names.update(f"{name}({keyword}=)" for keyword in _keywords(value))
    return names


def _has_members(name: str, class_: type) -> bool:
    """Whether users call or set members of the class. Members of result classes are only read and do not count."""
    return not _is_shared(class_) and name.endswith(("Module", "Manager", "Policy", "Save"))


def _members(class_: type, module: ModuleType) -> set[str]:
    """Public methods and fields that the runtime itself defines."""
    own = [base for base in class_.__mro__ if base.__module__.startswith(module.__name__)]
    defined = {name for base in own for name in vars(base) if not name.startswith("_")}
    return defined | _fields(class_)


def _fields(class_: type) -> set[str]:
    return set(getattr(class_, "__dataclass_fields__", {}))


def _is_shared(class_: type) -> bool:
    """Whether both runtimes share the class."""
    return class_.__module__.startswith("bridge")


def _keywords(value: Any) -> set[str]:
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return set()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        parameter.name
        for parameter in parameters
        if parameter.kind not in variadic and parameter.default is not parameter.empty
    }


def table(rows: tuple[Row, ...]) -> str:
    """The features as Markdown."""

    def cell(codes: tuple[str, ...], why: str) -> str:
        return ", ".join(f"`{code.lstrip('~')}`" for code in codes) or f"none: {why}"

    lines = ["| feature | torch_impl | jax_impl |", "|---|---|---|"]
    for row in rows:
        if row.feature:
            lines.append(f"| {row.feature} | {cell(row.torch, row.why)} | {cell(row.jax, row.why)} |")
    return "\n".join(lines) + "\n"


def on_page() -> str:
    """The table that the page has now; "" without one."""
    match = re.search(f"{BEGIN}\n(.*?){END}", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return match[1] if match else ""


def main() -> None:
    from tests.support.surface_rows import ROWS

    features = table(ROWS)
    print(features, end="")
    if "--write" in sys.argv:
        text = PAGE.read_text(encoding="utf-8")
        start, stop = text.index(BEGIN) + len(BEGIN) + 1, text.index(END)
        PAGE.write_text(text[:start] + features + text[stop:], encoding="utf-8")


if __name__ == "__main__":
    main()
