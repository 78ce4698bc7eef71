"""Read a scheduled program of XLA: its collectives, and whether a matrix product runs while one is under way.

The text has one computation after another, each a list of operations in the order in which they are issued. A transfer
that runs beside other work has a start and a done, and what stands between them can overlap with it::

    %s = (f32[16], f32[128]) all-gather-start(%shard), ...
    %p = f32[8,8] custom-call(...), custom_call_target="__cublas$gemm"
    %d = f32[128] all-gather-done(%s)

The TPU compiler writes both, and the steps between them, as fusions that each repeat the collective. Custom calls in
them, ``AsyncCollectiveStart`` and ``AsyncCollectiveDone``, tell which is which, and a step has the product beside it::

    %f1 (...) { %g = f32[128] all-gather(...), channel_id=7 ... custom-call(%g), ...="AsyncCollectiveStart" }
    %f2 (...) { %g = f32[128] all-gather(...), channel_id=7 ... %c = f32[8,8] convolution(...) }
    %f3 (...) { %g = f32[128] all-gather(...), channel_id=7 ... custom-call(%g), ...="AsyncCollectiveDone" }

A fusion that reduces and keeps a shard is a reduce-scatter. An all-reduce whose result is sliced elsewhere is none: all
of its bytes travel. A loop names its body and how often it runs: ``while(...), body=%body, ...
"known_trip_count":{"n":"8"}``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "psum",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "ppermute",
}
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8}
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:to_apply|calls|body|condition)=%([^\s,)}]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%([^\s,)}]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# From jax 0.11 on: replica_groups=mesh['dp_outer'=2,'dp'=4] {'dp'}
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\]|mesh\[([^\]]*)\][^{]*\{([^}]*)\})")
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_CHAIN = re.compile(r'channel_id=(\d+)|chain_id="(\d+)"')
_START, _DONE = (f'custom_call_target="AsyncCollective{half}"' for half in ("Start", "Done"))
_PRODUCT = re.compile(r'custom_call_target="__(?:cublas|cudnn|triton_gemm|triton_nested_gemm)')


class Array(NamedTuple):
    """``size``: elements."""

    dtype: str
    size: int

    @property
    def bytes(self) -> int:
        return self.size * _BYTES.get(self.dtype, 1 if self.dtype.startswith("f8") else 4)


@dataclass(frozen=True)
class Scheduled:
    """One collective of a program; ``kind`` is JAX's name.

    ``arrays``: full ones, several where XLA has merged as many collectives. ``times``: how often the loops around it
    run it. ``overlaps``: whether a matrix product stands between its start and its done. ``name``: of the operation, to
    find it in the text.
    """

    kind: str
    arrays: tuple[Array, ...]
    times: int
    overlaps: bool
    name: str

    @property
    def bytes(self) -> int:
        """Of the full arrays, all times together."""
        return self.times * sum(array.bytes for array in self.arrays)


@dataclass(frozen=True)
class _Operation:
    name: str
    result: str
    op: str
    rest: str

    @property
    def called(self) -> list[str]:
        return _CALLED.findall(self.rest)

    def takes(self, name: str) -> bool:
        return re.search(rf"%{re.escape(name)}[,)]", self.rest) is not None


def read_collectives(text: str) -> list[Scheduled]:
    """The collectives of a program's text, as ``jax.stages.Compiled.as_text()`` has it.

    Raises ``ValueError`` for a text without an entry computation, and for a collective in a loop of unknown length or
    in a branch.
    """
    computations, entry = _parsed(text)
    if not entry:
        raise ValueError("expected the text of a compiled program, got none with an ENTRY computation")
    return list(_Reader(computations).collectives(entry, 1))


def overlap_share(collectives: Iterable[Scheduled], kinds: Iterable[str] = KINDS.values()) -> float:
    """The share of bytes whose collective overlaps with a matrix product; 0 where there are none."""
    chosen = set(kinds)
    known = [one for one in collectives if one.kind in chosen]
    total = sum(one.bytes for one in known)
    return sum(one.bytes for one in known if one.overlaps) / total if total else 0.0


def _parsed(text: str) -> tuple[dict[str, list[_Operation]], str]:
    computations: dict[str, list[_Operation]] = {}
    entry = name = ""
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            name = start[2]
            computations[name] = []
            entry = name if start[1] else entry
        elif name and (operation := _OPERATION.match(line)):
            computations[name].append(_Operation(*operation.groups()))
    return computations, entry


class _Reader:
    def __init__(self, computations: dict[str, list[_Operation]]) -> None:
        self._computations = computations
        self._known: dict[tuple[str, str], bool] = {}

    def collectives(self, name: str, times: int) -> Iterator[Scheduled]:
        operations = self._computations.get(name, [])
        under_way: set[str] = set()
        for place, operation in enumerate(operations):
            if wrapped := self._wrapped(operation):
                started, new = self._marked(operation, _START), []
                for one in wrapped:
                    if _chain(one) in started:
                        overlaps = self._overlaps(operation, operations[place + 1 :], _chain(one))
                        yield Scheduled(*self._read(operation, [one]), times, overlaps, operation.name)
                    elif _chain(one) not in under_way:
                        new.append(one)
                if new:
                    overlaps = self._overlaps(operation, operations[place + 1 :], None)
                    yield Scheduled(*self._read(operation, new), times, overlaps, operation.name)
                under_way = (under_way | started) - self._marked(operation, _DONE)
                continue
            for branch in self._branches(operation):
                if self._has(branch, _is_collective):
                    raise ValueError(f"expected no collective in a branch, got one in {operation.name}")
            trips = self._trips(operation) if operation.op == "while" else 1
            for called in operation.called if operation.op in ("while", "call", "fusion") else []:
                if trips is None and self._has(called, _is_collective):
                    raise ValueError(
                        f"expected loops of known length around collectives, got {operation.name} without a trip count"
                    )
                yield from self.collectives(called, times * (trips or 1))

    def _trips(self, loop: _Operation) -> int | None:
        if told := _TRIPS.search(loop.rest):
            return int(told[1])
        # The TPU compiler leaves the number to the condition: that a counter, which begins at 0, is below it.
        condition = re.search(r"condition=%([^\s,)}]+)", loop.rest)
        by_name = {one.name: one for one in self._computations.get(condition[1], [])} if condition else {}
        for one in by_name.values():
            operands = [by_name.get(name) for name in re.findall(r"%([^\s,)]+)", one.rest.split(")")[0])]
            if one.op == "compare" and "direction=LT" in one.rest and len(operands) == 2 and all(operands):
                counter, limit = operands
                number = re.match(r"\d+", limit.rest) if limit and limit.op == "constant" else None
                if number and counter and counter.op == "get-tuple-element" and counter.result[:5] == "s32[]":
                    return int(number[0])
        return None

    def _wrapped(self, operation: _Operation) -> list[_Operation]:
        """The collectives that an operation is, or that stand behind it."""
        if _is_collective(operation):
            return [operation]
        if operation.op not in ("async-start", "fusion"):
            return []
        return [one for called in operation.called for one in self._within(called) if _is_collective(one)]

    def _read(self, operation: _Operation, wrapped: list[_Operation]) -> tuple[str, tuple[Array, ...]]:
        """Kind and full arrays."""
        kinds = {one.op.removesuffix("-start") for one in wrapped}
        if len(kinds) > 1:
            raise ValueError(f"expected one kind of collective in {operation.name}, got {sorted(kinds)}")
        (kind,) = kinds
        arrays = tuple(array for one in wrapped for array in _full(kind, one))
        inner = [one for called in operation.called for one in self._within(called)]
        if (
            operation.op == "fusion"
            and kind == "all-reduce"
            and any(one.op == "dynamic-slice" for one in inner)
        ):
            kind = "reduce-scatter"
        return KINDS[kind], arrays

    def _marked(self, operation: _Operation, marker: str) -> set[str]:
        """The chains that a fusion starts, or ends."""
        if operation.op != "fusion":
            return set()
        inner = [one for called in operation.called for one in self._within(called)]
        marks = [one for one in inner if marker in one.rest]
        return {
            _chain(one)
            for one in inner
            if _is_collective(one) and any(mark.takes(one.name) for mark in marks)
        }

    def _overlaps(self, start: _Operation, after: list[_Operation], chain: str | None) -> bool:
        def ends(operation: _Operation) -> bool:
            if chain is not None:
                return chain in self._marked(operation, _DONE)
            return operation.op.endswith("-done") and operation.takes(start.name)

        if chain is None and not start.op.endswith("-start"):
            return False
        # One without an end in its computation ends in the next turn of a loop.
        return any(map(self._is_product, itertools.takewhile(lambda one: not ends(one), after)))

    def _is_product(self, operation: _Operation) -> bool:
        if operation.op in ("dot", "convolution") or _PRODUCT.search(operation.rest):
            return True
        inside = [*operation.called, *self._branches(operation)]
        return operation.op in ("fusion", "while", "call", "conditional", "async-start") and any(
            self._has(called, self._is_product) for called in inside
        )

    def _has(self, name: str, wanted: Callable[[_Operation], bool]) -> bool:
        key = (name, wanted.__name__)
        if key not in self._known:
            self._known[key] = False
            self._known[key] = any(wanted(one) for one in self._within(name))
        return self._known[key]

    def _within(self, name: str) -> Iterator[_Operation]:
        for operation in self._computations.get(name, []):
            yield operation
            for called in [*operation.called, *self._branches(operation)]:
                yield from self._within(called)

    @staticmethod
    def _branches(operation: _Operation) -> list[str]:
        found = _BRANCHES.findall(operation.rest) if operation.op == "conditional" else []
        listed = ",".join(several or one for several, one in found)
        return [one.strip(" %") for one in listed.split(",") if one]


def _chain(operation: _Operation) -> str:
    """What all pieces of one asynchronous collective of the TPU compiler have in common."""
    return str(_CHAIN.findall(operation.rest))


def _is_collective(operation: _Operation) -> bool:
    return operation.op.removesuffix("-start") in KINDS


def _full(kind: str, operation: _Operation) -> tuple[Array, ...]:
    parts = [operation.result]
    if operation.op.endswith("-start") and kind != "all-reduce":
        # (operands, results, and what a platform adds)
        parts = _elements(operation.result)
        parts = parts[:1] if kind == "reduce-scatter" else parts[1:2]
    members = _members(operation.rest) if kind == "reduce-scatter" and len(parts) == 1 else 1
    if operation.op.endswith("-start"):
        members = 1
    return tuple(
        Array(dtype, members * math.prod(int(n) for n in sizes.split(",") if n))
        for part in parts
        for dtype, sizes in _ARRAY.findall(part)
    )


def _elements(result: str) -> list[str]:
    """Of a tuple's type, its elements' types."""
    found, depth, begun = [], 0, 1
    for place, sign in enumerate(result):
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        if (sign == "," and depth == 1) or (depth == 0 and place == len(result) - 1):
            found.append(result[begun:place])
            begun = place + 1
    return found


def _members(rest: str) -> int:
    """How many devices take part in each group of a collective."""
    group = _GROUPS.search(rest)
    if group is None:
        return 1
    if group[3] is not None:
        sizes = dict(_AXIS.findall(group[3]))
        axes = [axis.strip(" '") for axis in group[4].split(",")]
        if not sizes.keys() >= set(axes):
            raise ValueError(f"expected a collective over whole axes of its mesh, got {group[0]}")
        return math.prod(int(sizes[axis]) for axis in axes)
    return len(group[1].split(",")) if group[1] else int(group[2] or 1)
