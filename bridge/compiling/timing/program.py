"""A compiled step as a schedule: the computation, the transfers, and what runs during each transfer.

``read_program`` reads the text of ``jax.stages.Compiled.as_text()`` for a GPU or a TPU. The steps are in the order in
which the device gets them::

    Start("ag.1", Transfer("all_gather", ...))
    Work("gemm", flops={"bf16": ...}, bytes=...)      during the transfer
    Done("ag.1")
    Loop(32, (...))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bridge.compiling.timing.products import product_flops
from bridge.compiling.timing.program_traffic import traffic
from bridge.core.hlo.collectives import (
    COPY,
    DONE,
    START,
    Transfer,
    chain_of,
    collectives_of,
    marked,
    partitions_of,
    transfer,
)
from bridge.core.hlo.text import Computation, Module, Operation, check_scheduled, read_module


@dataclass(frozen=True)
class Work:
    """An operation: ``flops`` of its matrix products by class (``products.py``), ``bytes`` of memory traffic."""

    name: str
    flops: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0


@dataclass(frozen=True)
class Start:
    key: str
    transfer: Transfer


@dataclass(frozen=True)
class Done:
    """``key``: of a start in the same iteration of a loop, or in the one before."""

    key: str


@dataclass(frozen=True)
class Loop:
    times: int
    steps: tuple[Step, ...]


Step = Work | Start | Done | Loop


@dataclass(frozen=True)
class Program:
    """The work of one device in one run."""

    steps: tuple[Step, ...]

    @property
    def flops(self) -> Counter[str]:
        """Operations of all matrix products, by class."""
        total: Counter[str] = Counter()
        for step, times in _each(self.steps, 1):
            if isinstance(step, Work):
                total.update({dtype: times * count for dtype, count in step.flops.items()})
        return total

    @property
    def bytes(self) -> int:
        """Bytes of memory traffic, without collectives."""
        works = (times * step.bytes for step, times in _each(self.steps, 1) if isinstance(step, Work))
        copies = (times * transfer.bytes for transfer, times in self.transfers if transfer.kind == COPY)
        return sum(works) + sum(copies)

    @property
    def transfers(self) -> list[tuple[Transfer, int]]:
        """Each transfer with the number of its runs."""
        return [(step.transfer, times) for step, times in _each(self.steps, 1) if isinstance(step, Start)]


def read_program(text: str) -> Program:
    """Raises ``ValueError`` for a text that is no scheduled program, and for a loop of unknown length."""
    check_scheduled(text)
    module = read_module(text)
    return Program(tuple(_Reader(module, partitions_of(text)).steps(module.entry)))


def _each(steps: tuple[Step, ...], times: int) -> Iterator[tuple[Step, int]]:
    for step in steps:
        if isinstance(step, Loop):
            yield from _each(step.steps, times * step.times)
        else:
            yield step, times


class _Reader:
    def __init__(self, module: Module, partitions: int) -> None:
        self._module = module
        self._partitions = partitions

    def steps(self, computation: Computation) -> Iterator[Step]:
        under_way: set[str] = set()
        for operation in computation.operations:
            if operation.op == "while":
                body = next(self._module.called(operation))
                yield Loop(self._module.trips(operation), tuple(self.steps(body)))
            elif operation.op == "call":
                for called in self._module.called(operation):
                    yield from self.steps(called)
            elif operation.op == "conditional":
                yield from self._longest_branch(operation)
            elif operation.op.endswith("-done"):
                yield Done(self._started(computation, operation))
            else:
                yield from self._issued(computation, operation, under_way)

    def _issued(self, computation: Computation, operation: Operation, under_way: set[str]) -> Iterator[Step]:
        """``under_way``: chains of the TPU compiler's asynchronous collectives; the call updates the set."""
        wrapped = collectives_of(self._module, operation)
        begun, ended = (marked(self._module, operation, mark) if wrapped else set() for mark in (START, DONE))
        at_once = [collective for collective in wrapped if chain_of(collective) not in begun | under_way]
        if at_once:
            yield Start(operation.name, transfer(self._module, at_once, operation, self._partitions))
            if not operation.op.endswith("-start"):
                yield Done(operation.name)
        for collective in wrapped:
            if chain_of(collective) in begun:
                yield Start(
                    chain_of(collective), transfer(self._module, [collective], operation, self._partitions)
                )
        for chain in sorted(ended):
            yield Done(chain)
        under_way |= begun
        under_way -= ended
        flops = product_flops(self._module, computation, operation)
        if operation.op.endswith("-start") and not wrapped:
            if flops:
                # Computed at the same time as other operations, but on the same units, so treated as computed here.
                yield Work(operation.name, dict(flops))
            yield Start(operation.name, Transfer(COPY, self._copied(operation)))
            return
        moved = traffic(self._module, computation, operation)
        if flops or moved:
            yield Work(operation.name, dict(flops), moved)

    def _longest_branch(self, operation: Operation) -> tuple[Step, ...]:
        branches = [Program(tuple(self.steps(branch))) for branch in self._module.called(operation)]
        if not branches:
            return ()
        return max(branches, key=lambda branch: (branch.flops.total(), branch.bytes)).steps

    def _copied(self, operation: Operation) -> int:
        """Bytes of ``copy-start``, ``slice-start`` and other asynchronous operations: the result is in HBM, or the
        operand, or both."""
        arrays = operation.arrays
        size = min((array.bytes for array in arrays if array.shape), default=0)
        return size * sum(array.in_hbm for array in arrays if array.shape)

    def _started(self, computation: Computation, done: Operation) -> str:
        name = done.operands[0] if done.operands else done.name
        while name in computation.by_name:
            operation = computation.by_name[name]
            if operation.op.endswith("-start") or not operation.operands:
                return name
            name = operation.operands[0]
        return name
