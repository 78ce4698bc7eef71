"""The text of a scheduled XLA program as data: its computations, each a list of operations in the order of issue.

::

    %body (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) { ... }
    ENTRY %main (a: f32[8,8]) -> f32[8,8] {
      %a = f32[8,8]{1,0} parameter(0)
      ROOT %d = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    }

Only the standard library is needed, so a machine without JAX can read a program as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "token": 0, "opaque": 0}
_COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(ROOT )?%?(\S+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([^\s,()]+)")
_CALLED = re.compile(r"\b(?:to_apply|calls|body|called_computations=\{)=?%([^\s,)}]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%([^\s,)}]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"\bcondition=%([^\s,)}]+)")
_SPACE = re.compile(r"S\((\d+)\)")


@dataclass(frozen=True)
class Array:
    """``in_hbm``: whether it is in the device's main memory, not in a TPU's VMEM or on the host."""

    dtype: str
    shape: tuple[int, ...]
    in_hbm: bool

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return nbytes(self.dtype, self.size)


@dataclass(frozen=True)
class Operation:
    """``operands``: names in the same computation. ``given``: the text between its parentheses.

    ``attributes``: the text after them, without the metadata for people.
    """

    name: str
    result: str
    op: str
    given: str
    attributes: str
    is_root: bool

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result: several for a tuple."""
        return arrays_of(self.result)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(self.given))

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Computations of a fusion, a call, or an asynchronous start; for a loop, its body."""
        return tuple(_CALLED.findall(self.attributes))

    @cached_property
    def branches(self) -> tuple[str, ...]:
        lists = _BRANCHES.findall(self.attributes) if self.op == "conditional" else []
        listed = ",".join(several or name for several, name in lists)
        return tuple(name.strip(" %") for name in listed.split(",") if name)


@dataclass(frozen=True)
class Computation:
    name: str
    operations: tuple[Operation, ...]

    @cached_property
    def by_name(self) -> dict[str, Operation]:
        return {operation.name: operation for operation in self.operations}

    @property
    def root(self) -> Operation:
        return next((operation for operation in self.operations if operation.is_root), self.operations[-1])

    @cached_property
    def users(self) -> dict[str, list[Operation]]:
        users: dict[str, list[Operation]] = {}
        for operation in self.operations:
            for name in dict.fromkeys(operation.operands):
                users.setdefault(name, []).append(operation)
        return users

    def operand(self, operation: Operation, position: int) -> Operation:
        """Raises ``ValueError`` if the text lacks it."""
        names = operation.operands
        if position >= len(names) or names[position] not in self.by_name:
            raise ValueError(
                f"{operation.op} {operation.name}: expected an operand {position}, got ({operation.given})"
            )
        return self.by_name[names[position]]


@dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: Computation

    def called(self, operation: Operation) -> Iterator[Computation]:
        for name in (*operation.called, *operation.branches):
            if name in self.computations:
                yield self.computations[name]

    def within(self, operation: Operation) -> Iterator[tuple[Computation, Operation]]:
        """All operations of the computations that ``operation`` calls, at any depth."""
        for computation in self.called(operation):
            for inner in computation.operations:
                yield computation, inner
                yield from self.within(inner)

    def trips(self, loop: Operation) -> int:
        """How often a ``while`` runs its body; ``ValueError`` if neither compiler nor condition says so."""
        if told := _TRIPS.search(loop.attributes):
            return int(told[1])
        if (limit := self._limit(loop)) is not None:
            return limit
        raise ValueError(f"expected loops of known length, got {loop.name} without a trip count")

    def _limit(self, loop: Operation) -> int | None:
        # The TPU compiler states the number only in the condition: a counter that begins at 0 must be below it.
        named = _CONDITION.search(loop.attributes)
        condition = self.computations.get(named[1]) if named else None
        for operation in condition.operations if condition else ():
            if (
                condition
                and operation.op == "compare"
                and "direction=LT" in operation.attributes
                and len(operation.operands) == 2
            ):
                counter, limit = (condition.by_name.get(name) for name in operation.operands)
                number = re.match(r"\d+", limit.given) if limit and limit.op == "constant" else None
                counts = counter is not None and counter.op == "get-tuple-element"
                if number and counter and counts and counter.result.startswith(("s32[]", "u32[]")):
                    return int(number[0])
        return None


def check_scheduled(text: str) -> None:
    """Raises ``ValueError`` for a text whose operations are not in the order of issue."""
    head = text.partition("\n")[0]
    if not head.startswith("HloModule") or "is_scheduled=true" not in head:
        raise ValueError(
            "expected a scheduled program, HloModule ... is_scheduled=true, as jax.stages.Compiled.as_text() gives it, "
            f"got {head[:60]!r}"
        )


def read_module(text: str) -> Module:
    """Raises ``ValueError`` for a text without an entry computation."""
    by_computation: dict[str, list[Operation]] = {}
    entry = name = ""
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            name = start[2]
            by_computation[name] = []
            entry = name if start[1] else entry
        elif name and (operation := _OPERATION.match(line)):
            by_computation[name].append(_operation(*operation.groups()))
    if not entry:
        raise ValueError("expected the text of a compiled program, got none with an ENTRY computation")
    computations = {name: Computation(name, tuple(listed)) for name, listed in by_computation.items()}
    return Module(computations, computations[entry])


def arrays_of(result: str) -> tuple[Array, ...]:
    """The arrays of a type such as ``(f32[8]{0}, pred[])``."""
    arrays = []
    for dtype, sizes, layout in _ARRAY.findall(result):
        space = _SPACE.search(layout)
        shape = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
        arrays.append(Array(dtype, shape, space is None or space[1] == "0"))
    return tuple(arrays)


def elements(result: str) -> list[str]:
    """The types in a tuple's type; a type that is not a tuple is its only element."""
    if not result.startswith("("):
        return [result]
    texts, depth, begun = [], 0, 1
    for position, sign in enumerate(result):
        depth += (sign in "([{") - (sign in ")]}")
        if (sign == "," and depth == 1) or depth == 0:
            texts.append(result[begun:position].strip())
            begun = position + 1
            if depth == 0:
                break
    return texts


def _operation(root: str | None, name: str, result: str, op: str, rest: str) -> Operation:
    depth, end = 1, len(rest)
    for position, sign in enumerate(rest):
        depth += (sign == "(") - (sign == ")")
        if depth == 0:
            end = position
            break
    # Names of Python functions in the metadata could look like attributes.
    attributes = re.sub(r'metadata=\{(?:[^"}]|"[^"]*")*\}', "", rest[end + 1 :])
    return Operation(name, result, op, rest[:end], attributes, root is not None)


def nbytes(dtype: str, size: int) -> int:
    """Bytes of ``size`` elements; ``ValueError`` for a dtype without a number of bits in its name."""
    bits = _BITS.get(dtype)
    if bits is None:
        number = re.match(r"[a-z]+(\d+)", dtype)
        if number is None:
            raise ValueError(f"expected an array of a known dtype, got {dtype!r}")
        bits = int(number[1])
    return -(-size * bits // 8)
