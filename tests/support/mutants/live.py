"""Put a mutant into functions that are already imported, so that a test run need not import the product again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tests.support import ranks

_OPTIMIZED = 0x1  # of functions, not of modules and classes
_SERVE = ranks._serve


def serve(mutant: tuple[str, str] | None, *arguments: Any) -> None:
    """Run a rank process with a mutant."""
    if mutant is not None:
        replace_code(Path.cwd(), *mutant)
    _SERVE(*arguments)


def replace_code(root: Path, path: str, function: str) -> bool:
    """Give the outermost function around ``function``, and the functions that it has made, the code of their file now.

    Returns False if this changes nothing or is impossible: defaults and decorators are not in a function's code.
    """
    file = root / path
    module = compile(file.read_text(), str(file), "exec", dont_inherit=True)
    codes = [inner for code in _outermost(module, function.split(".")) for inner in _inside(code)]
    gc.unfreeze()
    changed = 0
    for live in [function for function in gc.get_objects() if isinstance(function, FunctionType)]:
        old = live.__code__
        for code in codes:
            # Functions of a property share a name, and an edit can move later functions by a line.
            moved = code.co_firstlineno - old.co_firstlineno
            if (
                old.co_filename == code.co_filename
                and old.co_qualname == code.co_qualname
                and moved in (0, 1)
            ):
                if old.co_freevars != code.co_freevars:
                    return False
                changed += old != code
                live.__code__ = code
                break
    return changed > 0


def _inside(code: CodeType) -> Iterator[CodeType]:
    """The code and all functions inside, which may have been made while their module was imported."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _inside(inner)


def _outermost(code: CodeType, names: list[str]) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and inner.co_name == names[0]:
            if inner.co_flags & _OPTIMIZED:
                yield inner
            elif len(names) > 1:
                yield from _outermost(inner, names[1:])
