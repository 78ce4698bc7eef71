"""Arithmetic in mappings, as Python's own parser reads it: ``4 * {block}``, ``d ** -0.5``, ``hidden // text.heads``.

Each kind of text accepts some operators of the syntax tree, and nothing else. Placeholders stand for numbers, names and
indices in the tree, so that an axis may be called ``in``.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

# The first limit also bounds the depth of the tree.
_MOST_CHARACTERS, _MOST_DIGITS = 300, 40
_ATOM = re.compile(r"\{[A-Za-z_]\w*\}|[A-Za-z_][\w.]*|\d+(?:\.\d+)?")


def _quotient(x: int, y: int) -> int:
    if x % y:
        raise ValueError(f"{x} / {y}")
    return x // y


_COMPUTE: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.FloorDiv: operator.floordiv,
    # Powers of integers could have any number of digits.
    ast.Pow: lambda x, y: float(x) ** float(y),
}
PRODUCT = (ast.Mult,)
POWERS = (ast.Mult, ast.Pow, ast.USub)
QUOTIENT = (ast.Div, ast.FloorDiv)


def names_in(text: str, operators: tuple[type[ast.AST], ...]) -> list[str]:
    """The names and indices, each as often as it occurs.

    ValueError for a text that is too long, or is not arithmetic with these operators; fractions come with powers.
    """
    tree, atoms = _parsed(text)
    nodes = (ast.BinOp, ast.UnaryOp, ast.Name, ast.Load, *operators)
    fraction = any("." in atom for atom in atoms if atom[0].isdigit())
    if (fraction and operators != POWERS) or not all(isinstance(node, nodes) for node in ast.walk(tree)):
        raise ValueError(text)
    return [atom for atom in atoms if not atom[0].isdigit()]


def evaluate(text: str, values: Mapping[str, float]) -> Any:
    """The value of ``text`` with these ``values``: int, float or complex.

    Raises KeyError for a name without a value, ValueError ("7 / 2") for a quotient that is not an integer,
    OverflowError and ZeroDivisionError.
    """
    tree, atoms = _parsed(text)

    def value(node: ast.expr) -> Any:
        match node:
            case ast.BinOp(left=left, op=op, right=right):
                return _COMPUTE[type(op)](value(left), value(right))
            # The sign belongs to the number: -2 ** 2 is 4.
            case ast.UnaryOp(operand=ast.BinOp(left=left, right=right)):
                return float(-value(left)) ** float(value(right))
            case ast.UnaryOp(operand=operand):
                return -value(operand)
        assert isinstance(node, ast.Name)
        atom = atoms[int(node.id[1:])]
        return values[atom] if not atom[0].isdigit() else float(atom) if "." in atom else int(atom)

    return value(tree)


@lru_cache
def _parsed(text: str) -> tuple[ast.expr, list[str]]:
    """The tree, in which the name ``_3`` means atom 3, and the atoms."""
    atoms = _ATOM.findall(text)
    numbers = iter(range(len(atoms)))
    code = " ".join(_ATOM.sub(lambda _: f" _{next(numbers)} ", text).split())
    short = len(text) <= _MOST_CHARACTERS and all(len(a) <= _MOST_DIGITS for a in atoms if a[0].isdigit())
    # Nothing else may be a name.
    if not short or not re.fullmatch(r"[\s*/-]*", _ATOM.sub("", text)):
        raise ValueError(text)
    try:
        return ast.parse(code, mode="eval").body, atoms
    except SyntaxError as error:
        raise ValueError(text) from error
