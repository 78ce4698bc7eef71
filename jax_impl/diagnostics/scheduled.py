"""Read a scheduled XLA program: its collectives, and whether a matrix product runs during each of them.

An asynchronous transfer has a start and a done; operations between them can overlap with the transfer::

    %s = (f32[16], f32[128]) all-gather-start(%shard), ...
    %p = f32[8,8] custom-call(...), custom_call_target="__cublas$gemm"
    %d = f32[128] all-gather-done(%s)

``bridge.core.hlo.collectives`` explains how the TPU compiler writes both.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bridge.core.hlo.collectives import (
    DONE,
    START,
    chain_of,
    collectives_of,
    full_arrays,
    is_collective,
    kind_of,
    marked,
    partitions_of,
)
from bridge.core.hlo.text import Computation, Module, Operation, nbytes, read_module

_PRODUCT = re.compile(r'custom_call_target="__(?:cublas|cudnn|triton_gemm|triton_nested_gemm)')
_HAVE_OPERATIONS = ("fusion", "while", "call", "conditional", "async-start")


class Array(NamedTuple):
    """``size``: elements."""

    dtype: str
    size: int

    @property
    def bytes(self) -> int:
        return nbytes(self.dtype, self.size)


@dataclass(frozen=True)
class Scheduled:
    """One collective of a program; ``kind`` is JAX's name.

    ``arrays``: full arrays, several if XLA merged that many collectives. ``times``: how often the surrounding loops run
    the collective. ``overlaps``: whether a matrix product is between its start and its done. ``name``: as in the text.
    """

    kind: str
    arrays: tuple[Array, ...]
    times: int
    overlaps: bool
    name: str

    @property
    def bytes(self) -> int:
        """Bytes of the full arrays, over all executions."""
        return self.times * sum(array.bytes for array in self.arrays)


def read_collectives(text: str) -> list[Scheduled]:
    """The collectives of a program's text, as ``jax.stages.Compiled.as_text()`` returns it.

    Raises ``ValueError`` for a text without an entry computation, and for a collective in a loop of unknown length or
    in a branch.
    """
    module = read_module(text)
    return list(_Reader(module, partitions_of(text)).collectives(module.entry, 1))


class _Reader:
    def __init__(self, module: Module, partitions: int) -> None:
        self._module = module
        self._partitions = partitions
        self._known: dict[tuple[str, Callable[[Operation], bool]], bool] = {}

    def collectives(self, computation: Computation, times: int) -> Iterator[Scheduled]:
        under_way: set[str] = set()
        for number, operation in enumerate(computation.operations):
            after = computation.operations[number + 1 :]
            if wrapped := collectives_of(self._module, operation):
                started, new = marked(self._module, operation, START), []
                for inner in wrapped:
                    chain = chain_of(inner)
                    if chain in started:
                        yield self._scheduled(
                            operation, [inner], times, self._overlaps(operation, after, chain)
                        )
                    elif chain not in under_way:
                        new.append(inner)
                if new:
                    yield self._scheduled(operation, new, times, self._overlaps(operation, after, None))
                under_way = (under_way | started) - marked(self._module, operation, DONE)
            else:
                yield from self._inside(operation, times)

    def _inside(self, operation: Operation, times: int) -> Iterator[Scheduled]:
        """The collectives in the computations that an operation calls."""
        called = list(self._module.called(operation))
        if not any(self._has(computation, is_collective) for computation in called):
            return
        if operation.branches:
            raise ValueError(f"expected no collective in a branch, got one in {operation.name}")
        if operation.op == "while":
            try:
                times *= self._module.trips(operation)
            except ValueError as error:
                raise ValueError(f"collectives in a loop: {error}") from None
        for computation in called if operation.op in ("while", "call", "fusion") else ():
            yield from self.collectives(computation, times)

    def _scheduled(
        self, operation: Operation, wrapped: list[Operation], times: int, overlaps: bool
    ) -> Scheduled:
        arrays = tuple(
            Array(array.dtype, array.size)
            for inner in wrapped
            for array in full_arrays(inner, self._partitions)
        )
        return Scheduled(kind_of(self._module, wrapped, operation), arrays, times, overlaps, operation.name)

    def _overlaps(self, start: Operation, after: Sequence[Operation], chain: str | None) -> bool:
        def ends(operation: Operation) -> bool:
            if chain is not None:
                return chain in marked(self._module, operation, DONE)
            return operation.op.endswith("-done") and start.name in operation.operands

        if chain is None and not start.op.endswith("-start"):
            return False
        # A collective without an end in its computation ends in the next iteration of a loop.
        return any(map(self._is_product, itertools.takewhile(lambda later: not ends(later), after)))

    def _is_product(self, operation: Operation) -> bool:
        if operation.op in ("dot", "convolution") or _PRODUCT.search(operation.attributes):
            return True
        return operation.op in _HAVE_OPERATIONS and any(
            self._has(computation, self._is_product) for computation in self._module.called(operation)
        )

    def _has(self, computation: Computation, wanted: Callable[[Operation], bool]) -> bool:
        key = (computation.name, wanted)
        if key not in self._known:
            self._known[key] = any(
                wanted(operation) or any(self._has(inner, wanted) for inner in self._module.called(operation))
                for operation in computation.operations
            )
        return self._known[key]
