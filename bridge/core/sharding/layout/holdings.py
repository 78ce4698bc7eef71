"""Which device holds which rows of a tensor: drawn to scale, as text in 80 columns and as bars in a notebook.

::

    up (9, 6)
      |            0            |            1             |  2   |
      0: rows 0:4   1: rows 4:8   2: rows 8:9   nothing on 3
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bridge.core.sharding.layout.drawing import MAX_RANKS, MAX_TENSORS, more_tensors, row_bars, slices_text
from bridge.core.sharding.layout.rows import Box
from bridge.core.text import first_lines, printable
from bridge.core.views import Viewed

_WIDTH, _BAR = 80, 60
Holding = tuple[tuple[Box, ...], tuple[int, ...]]
"""Boxes of a tensor, and the devices that hold these boxes. Devices without boxes hold nothing of the tensor."""
Run = tuple[int, int | None, str, str]
"""Cells of a bar, the first device that holds these rows (None: no device), all such devices, and what they hold."""


@dataclass(frozen=True)
class TensorHoldings:
    """The devices that hold a tensor. ``alike``: the number of further tensors with the same shape and holdings."""

    name: str
    shape: tuple[int, ...]
    holdings: tuple[Holding, ...]
    alike: int = 0

    @property
    def title(self) -> str:
        return f"{self.name} {self.shape}".strip() + (f", and {self.alike} alike" if self.alike else "")

    def words(self) -> list[str]:
        """Who holds what: "0-3,8: rows 0:4"."""
        words = [
            f"{_numbers(devices)}: {self._held(boxes)}" if boxes else f"nothing on {_numbers(devices)}"
            for boxes, devices in self.holdings
        ]
        return first_lines(words, MAX_RANKS, " shards")

    def bars(self, cells: int) -> Iterator[tuple[tuple[int, int] | None, list[Run]]]:
        """For each range of columns (None: all of them) the runs of a bar of at most ``cells`` cells."""
        owners = [number for number, (boxes, _) in enumerate(self.holdings) for _ in boxes]
        for bar in row_bars(self.shape, [box for boxes, _ in self.holdings for box in boxes], cells)[
            :MAX_RANKS
        ]:
            runs: list[Run] = []
            for number, run in itertools.groupby(None if c is None else owners[c] for c in bar.cells):
                boxes, devices = ((), ()) if number is None else self.holdings[number]
                runs.append(
                    (len(list(run)), min(devices, default=None), _numbers(devices), self._held(boxes))
                )
            yield bar.columns, runs

    def lines(self) -> Iterator[str]:
        """The title, a line for each bar, and the words."""
        yield self.title
        for columns, runs in self.bars(_BAR):
            ends = [0, *itertools.accumulate(cells for cells, *_ in runs)]
            rooms = [(b * _BAR // ends[-1]) - (a * _BAR // ends[-1]) - 1 for a, b in itertools.pairwise(ends)]
            labels = (
                label if len(label) <= room else ""
                for (_, _, label, _), room in zip(runs, rooms, strict=True)
            )
            drawn = "|".join(label.center(room) for label, room in zip(labels, rooms, strict=True))
            yield f"  |{drawn}|" + (" columns {}:{}".format(*columns) if columns else "")
        # Spaces within an entry do not break.
        legend = "   ".join(word.replace(" ", "\0") for word in self.words())
        for line in textwrap.wrap(legend, _WIDTH, initial_indent="  ", subsequent_indent="  "):
            yield line.replace("\0", " ")

    def _held(self, boxes: Sequence[Box]) -> str:
        if [box.sizes for box in boxes] == [self.shape]:
            return "whole"
        if len(boxes) == 1 and len(self.shape) <= 2 and boxes[0].sizes[1:] == self.shape[1:]:
            return f"rows {boxes[0].offsets[0]}:{boxes[0].offsets[0] + boxes[0].sizes[0]}"
        return " ".join(map(slices_text, boxes[:4])) + (" ..." if len(boxes) > 4 else "")


@dataclass(frozen=True, repr=False)
class HoldingsDrawing(Viewed):
    """The devices that hold each of ``tensors``: ``print`` draws bars as text, a notebook shows them in colour."""

    title: str
    tensors: tuple[TensorHoldings, ...]

    def summary(self) -> str:
        return "\n".join([self.title, *more_tensors(len(self.tensors))])

    def drawings(self) -> list[tuple[str, list[tuple[object, list[Run]]], str]]:
        drawn = self.tensors[:MAX_TENSORS]
        return [(tensor.title, list(tensor.bars(1000)), "; ".join(tensor.words())) for tensor in drawn]

    def __str__(self) -> str:
        drawn = (line for tensor in self.tensors[:MAX_TENSORS] for line in tensor.lines())
        return "\n".join(map(printable, [self.title, *drawn, *more_tensors(len(self.tensors))]))

    __repr__ = __str__


def draw_holdings(
    title: str, tensors: Iterable[tuple[str, Sequence[int], Mapping[int, Sequence[Box]]]]
) -> HoldingsDrawing:
    """Draw tensors from ``(name, shape, boxes by device)``. Equal holdings share a drawing if the names also match.

    Names match if they differ only in numbers, as the names of equal layers do.
    """
    alike: dict[tuple[str, tuple[int, ...], tuple[Holding, ...]], list[str]] = defaultdict(list)
    for name, shape, by_device in tensors:
        holders: dict[tuple[Box, ...], list[int]] = defaultdict(list)
        for device, boxes in sorted(by_device.items()):
            holders[tuple(boxes)].append(device)
        # Sorted by the first row. Devices that hold nothing come last.
        holdings = sorted(
            ((boxes, tuple(devices)) for boxes, devices in holders.items()), key=lambda own: (not own[0], own)
        )
        alike[re.sub(r"\d+", "#", name), tuple(shape), tuple(holdings)].append(name)
    drawn = (TensorHoldings(names[0], *key[1:], len(names) - 1) for key, names in alike.items())
    return HoldingsDrawing(title, tuple(drawn))


def _numbers(devices: Sequence[int]) -> str:
    """The numbers, "0-3,8" for 0, 1, 2, 3 and 8."""
    runs = []
    for _, run in itertools.groupby(enumerate(devices), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        runs.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ",".join(runs)
