"""How many collectives a program runs, and how many bytes they carry, by unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torch_impl.comm import collectives
from torch_impl.comm.streams import Step, Streams, Transfer
from torch_impl.diagnostics.tensors import named_units

_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
# Collectives that no unit began: the exchange at fully_shard, full_tensor, norms.
_ELSEWHERE = "elsewhere"


class CollectiveCount:
    """Calls and bytes since counting began, by ``(unit, kind)``; kinds are all_gather, reduce_scatter and all_reduce.

    A unit has the name of its module, the root "". Collectives outside units count as "elsewhere", and exchanges of
    modules that are cut over a model axis as "activations". Bytes count the whole buffer: the output of a gather, the
    input of a reduction. All buffers of a group together are one call.
    """

    def __init__(self) -> None:
        self.calls_of: Counter[tuple[str, str]] = Counter()
        self.bytes_of: Counter[tuple[str, str]] = Counter()

    @property
    def calls(self) -> dict[str, int]:
        """Calls of all units, by kind."""
        return _by_kind(self.calls_of)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of all units, by kind."""
        return _by_kind(self.bytes_of)

    def __str__(self) -> str:
        units = list(dict.fromkeys(unit for unit, _ in self.calls_of))
        width = max([len("unit"), *(len(unit or "(root)") for unit in units)])
        lines = ["unit".ljust(width) + "".join(f"{collective:>32}" for collective in _KINDS)]
        for unit in [*units, None]:
            line = ("total" if unit is None else unit or "(root)").ljust(width)
            for collective in _KINDS:
                calls = self.calls[collective] if unit is None else self.calls_of[unit, collective]
                nbytes = self.nbytes[collective] if unit is None else self.bytes_of[unit, collective]
                line += f"{calls:>10} x{nbytes:>18,} B"
            lines.append(line)
        return "\n".join(lines)


@contextmanager
def count_collectives(model: nn.Module | None = None) -> Iterator[CollectiveCount]:
    """Count this rank's collectives while the context is open; with a ``model``, by unit."""
    count, current = CollectiveCount(), [_ELSEWHERE]
    originals = {collective: getattr(collectives, collective) for collective in _KINDS}
    units = {} if model is None else named_units(model)
    schedules = {id(unit.schedule): unit.schedule for unit in units}.values()
    plain = [schedule.streams for schedule in schedules]
    try:
        for collective, original in originals.items():
            setattr(collectives, collective, _counting(collective, original, count, current))
        for schedule in schedules:
            schedule.streams = _LabelledStreams(schedule.streams, current)
        yield count
    finally:
        for collective, original in originals.items():
            setattr(collectives, collective, original)
        for schedule, streams in zip(schedules, plain, strict=True):
            schedule.streams = streams


def _counting(
    collective: str, original: Callable[..., Any], count: CollectiveCount, current: list[str]
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        # The whole buffers: outputs of a gather, inputs of a reduction.
        whole = args[1] if collective == "reduce_scatter" else args[0]
        tensors: Sequence[torch.Tensor] = [whole] if isinstance(whole, torch.Tensor) else whole
        label = collectives.PURPOSE.get() or current[-1]
        count.calls_of[label, collective] += 1
        count.bytes_of[label, collective] += sum(t.numel() * t.element_size() for t in tensors)
        return original(*args, **kwargs)

    return call


class _LabelledStreams:
    """Streams that record to which unit each step belongs, even if the step runs later than it was started."""

    def __init__(self, streams: Streams, current: list[str]) -> None:
        self._streams, self._current = streams, current

    @property
    def copies(self) -> bool:
        return self._streams.copies

    def start(self, steps: Sequence[Step]) -> Transfer:
        label = self._current[-1]
        return self._streams.start([(lane, self._as(label)(step)) for lane, step in steps])

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        # Range names are "<unit> <what>".
        with self._streams.range(name), self._as(name.rpartition(" ")[0]):
            yield

    @contextmanager
    def _as(self, label: str) -> Iterator[None]:
        self._current.append(label)
        try:
            yield
        finally:
            self._current.pop()


def _by_kind(counter: Counter[tuple[str, str]]) -> dict[str, int]:
    return {
        collective: sum(value for (_, of), value in counter.items() if of == collective)
        for collective in _KINDS
    }
