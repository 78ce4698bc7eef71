"""Axis expressions: the composition of each axis of a stored tensor.

An expression is written in einops notation, one word per tensor axis, with two additions::

    (h d) m            two axes; the first runs over every h and, inside it, every d
    (gate + up) m      the first axis is `gate` followed by `up`: a concatenation
    {i} m h d          the axis `{i}` is the layer number that elsewhere is part of the tensor's path
    (kv (r d + d2)) m  concatenations nest: for every kv, r*d rows of one kind, then d2 of another

`1` is an axis of size one. `(v + zeros(p)) m`, with the axis `p.zeros` here, has p rows of padding at the end, which
other expressions of the same data need not name (`operations.py`). A concatenation splits a tensor into
*alternatives*: blocks that each name a set of elementary axes, and place them in the tensor by an affine index
function. `(gate + up) m` has two::

    alternative 0, axes {gate, m}:   axis 0 = 0    + 1*gate     axis 1 = 0 + 1*m
    alternative 1, axes {up, m}:     axis 0 = gate + 1*up       axis 1 = 0 + 1*m

Two expressions that name the same elementary axes in their alternatives describe the same data; moving data between
them is then index arithmetic only (see `relation.py`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from bridge.core.mapping.language.errors import MappingError

_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_]\w*(?:\.\w+)?)|(?P<index>\{[A-Za-z_]\w*\})|(?P<punctuation>[()+1]))"
)


@dataclass(frozen=True)
class Axis:
    """An elementary axis. The name of a path index keeps its braces: ``{i}``."""

    name: str


@dataclass(frozen=True)
class Product:
    """A composite axis; the first factor is the slowest. Without factors, an axis of size one."""

    factors: tuple[Node, ...]


@dataclass(frozen=True)
class Concatenation:
    """Parts that follow each other along one axis."""

    parts: tuple[Node, ...]


Node = Axis | Product | Concatenation


@dataclass(frozen=True)
class Affine:
    """Position along one tensor axis: ``offset + sum(stride * index of that elementary axis)``, in elements."""

    offset: int
    terms: tuple[tuple[str, int], ...]


Alternative = tuple[Affine, ...]
"""One affine function for every axis of the tensor."""


class Undetermined(MappingError):
    """The sizes of these axes do not follow from the shape."""

    def __init__(self, axes: Sequence[str]) -> None:
        self.axes = tuple(axes)
        super().__init__(f"axis {', '.join(axes)} undetermined")


@dataclass(frozen=True)
class Expression:
    """A parsed axis expression; ``dims`` has one node per tensor axis."""

    text: str
    dims: tuple[Node, ...]

    @staticmethod
    def parse(text: str) -> Expression:
        """Parse ``text``; an empty text describes a 0-d tensor. Raises MappingError, quoting the text."""
        dims = _Parser(text).dims()
        expression = Expression(text.strip(), dims)
        for axes in expression.axis_sets:
            if len(axes) != len(set(axes)):
                raise MappingError(f"expected every axis once in {text.strip()!r}, got {' '.join(axes)}")
        return expression

    @cached_property
    def axis_sets(self) -> tuple[tuple[str, ...], ...]:
        """The elementary axes that each alternative names, in the order of ``alternatives``."""
        ones = dict.fromkeys(axes_of(Product(self.dims)), 1)
        return tuple(tuple(name for dim in a for name, _ in dim.terms) for a in self.alternatives(ones))

    @cached_property
    def axes(self) -> frozenset[str]:
        """All elementary axes named."""
        return frozenset(axes_of(Product(self.dims)))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The tensor's shape under the given axis sizes."""
        return tuple(_size(dim, sizes) for dim in self.dims)

    def solve(
        self, shape: Sequence[int], known: Mapping[str, int], alias: Mapping[str, str]
    ) -> dict[str, int]:
        """``known`` plus the axis sizes that follow from ``shape``; undetermined sizes are left out.

        ``alias`` maps axes to the axis whose size they share. Raises MappingError if shape and sizes disagree.
        """
        if len(shape) != len(self.dims):
            raise MappingError(f"expected {len(self.dims)} axes for {self.text!r}, got shape {tuple(shape)}")
        sizes = dict(known)
        pending = list(zip(self.dims, shape, strict=True))
        while pending:
            remaining = [pair for pair in pending if not _solve_dim(*pair, sizes, alias)]
            if len(remaining) == len(pending):
                break
            pending = remaining
        for name in self.axes:
            if alias.get(name, name) in sizes:
                sizes[name] = sizes[alias.get(name, name)]
        for axis, (dim, size) in enumerate(zip(self.dims, shape, strict=True)):
            if all(name in sizes for name in axes_of(dim)) and _size(dim, sizes) != size:
                known_sizes = ", ".join(f"{name}={sizes[name]}" for name in sorted(set(axes_of(dim))))
                raise MappingError(
                    f"expected size {_size(dim, sizes)} on axis {axis} of {self.text!r} ({known_sizes}), got {size}"
                )
        return sizes

    def alternatives(self, sizes: Mapping[str, int]) -> tuple[Alternative, ...]:
        """Every way of choosing one part of each concatenation, as affine functions of the elementary axes.

        Raises Undetermined if ``sizes`` lacks an axis.
        """
        missing = sorted(self.axes - sizes.keys())
        if missing:
            raise Undetermined(missing)
        return tuple(itertools.product(*(_expand(dim, sizes) for dim in self.dims)))


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        self.tokens: list[str] = []
        position = 0
        while position < len(self.text):
            match = _TOKEN.match(self.text, position)
            if match is None:
                raise MappingError(
                    f"unexpected {self.text[position:].strip()[:20]!r} in expression {self.text!r}"
                )
            self.tokens.append(match.group().strip())
            position = match.end()
        self.at = 0

    def dims(self) -> tuple[Node, ...]:
        dims = []
        while self.at < len(self.tokens):
            dims.append(self.factor())
        return tuple(dims)

    def factor(self) -> Node:
        token = self.take()
        if token == "1":
            return Product(())
        if token == "(":
            node = self.sum()
            if self.take() != ")":
                raise MappingError(f"expected ')' in expression {self.text!r}")
            return node
        if token in ")+":
            raise MappingError(f"unexpected {token!r} in expression {self.text!r}")
        return Axis(token)

    def sum(self) -> Node:
        parts = [self.product()]
        while self.at < len(self.tokens) and self.tokens[self.at] == "+":
            self.at += 1
            parts.append(self.product())
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def product(self) -> Node:
        factors = []
        while self.at < len(self.tokens) and self.tokens[self.at] not in ")+":
            factors.append(self.factor())
        if not factors:
            raise MappingError(f"expected an axis name inside parentheses in expression {self.text!r}")
        return factors[0] if len(factors) == 1 else Product(tuple(factors))

    def take(self) -> str:
        if self.at == len(self.tokens):
            raise MappingError(f"expression {self.text!r} ends inside parentheses")
        self.at += 1
        return self.tokens[self.at - 1]


def axes_of(node: Node) -> tuple[str, ...]:
    """All elementary axes of a node, in order, with repetitions."""
    match node:
        case Axis(name):
            return (name,)
        case Product(nodes) | Concatenation(nodes):
            return tuple(name for inner in nodes for name in axes_of(inner))


def _size(node: Node, sizes: Mapping[str, int]) -> int:
    match node:
        case Axis(name):
            return sizes[name]
        case Product(factors):
            return math.prod(_size(factor, sizes) for factor in factors)
        case Concatenation(parts):
            return sum(_size(part, sizes) for part in parts)


def _expand(node: Node, sizes: Mapping[str, int]) -> list[Affine]:
    match node:
        case Axis(name):
            return [Affine(0, ((name, 1),))]
        case Concatenation(parts):
            starts = itertools.accumulate((_size(part, sizes) for part in parts), initial=0)
            return [
                Affine(start + inner.offset, inner.terms)
                for start, part in zip(starts, parts, strict=False)
                for inner in _expand(part, sizes)
            ]
        case Product(factors):
            strides = [math.prod(_size(f, sizes) for f in factors[k + 1 :]) for k in range(len(factors))]
            return [
                Affine(
                    sum(stride * inner.offset for stride, inner in zip(strides, choice, strict=True)),
                    tuple(
                        (a, stride * s) for stride, i in zip(strides, choice, strict=True) for a, s in i.terms
                    ),
                )
                for choice in itertools.product(*(_expand(factor, sizes) for factor in factors))
            ]


def _solve_dim(node: Node, size: int, sizes: dict[str, int], alias: Mapping[str, str]) -> bool:
    """Solve for the unknown of ``node`` if there is exactly one; True if nothing is left to do."""
    unknown = {alias.get(name, name) for name in axes_of(node)} - sizes.keys()
    if not unknown:
        return True
    if len(unknown) > 1:
        return False
    (name,) = unknown
    # The size is linear in the unknown unless it multiplies itself, so two trial values give both coefficients.
    trials = []
    for trial in (0, 1, 2):
        values = {**sizes, name: trial}
        trials.append(_size(node, {axis: values[alias.get(axis, axis)] for axis in axes_of(node)}))
    constant, slope = trials[0], trials[1] - trials[0]
    if slope == 0 or trials[2] - trials[1] != slope:
        return False
    if size < constant or (size - constant) % slope:
        multiple = f"a multiple of {slope}" + (f" plus {constant}" if constant else "")
        expected = f"{constant} or more" if slope == 1 else multiple
        raise MappingError(
            f"expected {expected} for the size of an axis with {name.partition('.')[0]} in it, got {size}"
        )
    sizes[name] = (size - constant) // slope
    return True
