"""Axes whose sizes the shapes leave open: which of them must be given, all at once, and which sizes the shapes allow.

(h d) m        [4096, 4096]      either h or d must be given, and the other follows
(kv d) m       [1024, 4096]      d divides both 4096 and 1024
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bridge.core.mapping.language.entries import HALF, PAIR
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.expression import Axis, Concatenation, Expression, Node, Product, axes_of
from bridge.core.mapping.language.operations import ZEROS
from bridge.core.text import first_of

_USUAL = (128, 64, 256, 96, 80, 32, 192, 512, 16)
"""Sizes of attention heads, the most usual ones first."""
_PROPOSED = 3
_FEW = 4


@dataclass(frozen=True)
class Equation:
    """One axis of a tensor: ``unknown`` axes make up its size. multiples: by axis, a number that it must divide."""

    unknown: frozenset[str]
    multiples: Mapping[str, int]


class OpenAxes(MappingError):
    """The shapes do not determine these axes' sizes. asked: axes in a mapping's tables, which are asked for first."""

    def __init__(
        self,
        rule: str,
        needed: frozenset[str],
        equations: Sequence[Equation],
        asked: Iterable[str],
        absent: Mapping[str, str],
    ) -> None:
        self.rule, self.needed, self.equations = rule, needed, tuple(equations)
        self.asked, self.absent = tuple(asked), absent
        super().__init__(together("", [self]))


def named(axis: str, alias: Mapping[str, str]) -> str:
    """The axis to give: without the suffixes for rotary positions, and following aliases."""
    if axis.startswith("{"):
        return axis
    axis = axis.removesuffix(PAIR).removesuffix(HALF).removesuffix(ZEROS)
    return alias.get(axis, axis)


def equations_of(
    expression: Expression, shape: Sequence[int], sizes: Mapping[str, int], alias: Mapping[str, str]
) -> list[Equation]:
    """The equations of a tensor's axes that contain an unknown."""
    equations = []
    for node, size in zip(expression.dims, shape, strict=False):
        axes = [axis for axis in axes_of(node) if axis not in sizes]
        if not axes:
            continue
        known, factors = _factors(node, sizes)
        multiples = {}
        for axis in factors:
            # Half of a rotary axis is a separate factor, and together with 2 represents the whole.
            number = size * (1 if not axis.endswith(PAIR) else 2)
            if known and number % known == 0:
                multiples[named(axis, alias)] = number // known
        equations.append(Equation(frozenset(named(axis, alias) for axis in axes), multiples))
    return equations


def together(mapping: str, errors: Sequence[OpenAxes]) -> str:
    """One sentence for the rules of a mapping that lack sizes: all sizes to give, with the values that shapes allow."""
    asked = _to_ask(errors)
    multiples: dict[str, int] = {}
    for error in errors:
        for equation in error.equations:
            for axis, number in equation.multiples.items():
                multiples[axis] = math.gcd(multiples.get(axis, 0), number)
    absent = {axis: reason for error in errors for axis, reason in error.absent.items()}
    shown = [f"{axis}{_allowed(multiples.get(axis, 0), absent.get(axis))}" for axis in asked]
    rules = [_short(rule) for rule in dict.fromkeys(error.rule for error in errors)]
    what = f"size of axis {shown[0]} does" if len(asked) == 1 else f"sizes of axes {', '.join(shown)} do"
    options = " ".join(f"--axis {axis}=SIZE" for axis in asked)
    values = ", ".join(f"{axis!r}: SIZE" for axis in asked)
    where = f"mapping {mapping}: " if mapping else ""
    return (
        f"{where}the {what} not follow from the shapes, and rule {first_of(rules, 1)} "
        f"need{'s' if len(rules) == 1 else ''} {'it' if len(asked) == 1 else 'them'}: expected a config.json next to "
        f"the checkpoint that decides, or the mapping's [axes] table, or {options} on the command line, or, in a "
        f"program, load_mapping(...).with_axes({{{values}}})"
    )


def _to_ask(errors: Sequence[OpenAxes]) -> list[str]:
    """A small set of axes, chosen in the order of asking, that determines all others."""
    asked: list[str] = []
    while True:
        left = [axis for error in errors for axis in error.needed - _settled(error, asked)]
        if not left:
            return asked
        first = {axis for error in errors for axis in error.asked}
        asked.append(min(set(left), key=lambda axis: (axis not in first, -left.count(axis), axis)))


def _settled(error: OpenAxes, known_axes: Sequence[str]) -> set[str]:
    known = set(known_axes)
    while True:
        # An equation with one unknown at the start has no solution: a factor is 0, or the unknown multiplies itself.
        solvable = (equation.unknown for equation in error.equations if len(equation.unknown) > 1)
        solved = {axis for unknown in solvable if len(unknown - known) == 1 for axis in unknown} - known
        if not solved:
            return known
        known |= solved


def _short(rule: str) -> str:
    """The name of a rule with many tensors, by its first one."""
    first, more, _ = rule.partition(" & ")
    return f"{first} & ..." if more else rule


def _allowed(multiple: int, absent: str | None) -> str:
    notes = [absent] if absent else []
    if multiple == 1:
        notes.append("by the shapes 1")
    elif multiple > 1:
        fitting = [size for size in _USUAL if multiple % size == 0]
        divisors = [n for n in range(1, min(multiple, 64) + 1) if multiple % n == 0]
        if len(divisors) <= _FEW and multiple <= 64:
            notes.append(f"by the shapes one of {', '.join(map(str, divisors))}")
        else:
            such = f", such as {' or '.join(map(str, fitting[:_PROPOSED]))}" if fitting else ""
            notes.append(f"by the shapes a divisor of {multiple}{such}")
    return f" ({'; '.join(notes)})" if notes else ""


def _factors(node: Node, sizes: Mapping[str, int]) -> tuple[int, list[str]]:
    """The product of the known factors, and the unknown factors; factors inside a concatenation are neither."""
    match node:
        case Axis(name):
            return (sizes[name], []) if name in sizes else (1, [name])
        case Product(nodes):
            parts = [_factors(inner, sizes) for inner in nodes]
            return math.prod(known for known, _ in parts), [axis for _, axes in parts for axis in axes]
        case Concatenation():
            return 1, []
