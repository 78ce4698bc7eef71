"""Which device holds which rows of a tensor: drawn to scale, as text in 80 columns and as bars in a notebook.

::

    up (9, 6)
      |         0         |         1         | 2  |
      0: rows 0:4   1: rows 4:8   2: rows 8:9   nothing on 3
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bridge.core.sharding.layout.drawing import MAX_RANKS, MAX_TENSORS, more_tensors, slices_text
from bridge.core.sharding.layout.row_bars import RowBar, row_bars
from bridge.core.sharding.layout.rows import Box
from bridge.core.text import first_lines, printable
from bridge.core.views import Bar, Fold, Viewed

_WIDTH = 80
_BAR = _WIDTH - 20  # so that columns may stand on the right
_MAX_BARS = 16
# Okabe and Ito's, which colour-blind people tell apart, light enough for black labels; black is left out.
_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#8DB8E8", "#BBBBBB")


@dataclass(frozen=True)
class Holding:
    """``boxes`` of one tensor, none for nothing, that each of ``devices`` holds."""

    devices: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def label(self) -> str:
        """The devices' numbers, "0-3,8" for 0, 1, 2, 3 and 8."""
        runs = []
        for _, run in itertools.groupby(enumerate(self.devices), lambda pair: pair[1] - pair[0]):
            numbers = [number for _, number in run]
            runs.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
        return ",".join(runs)


@dataclass(frozen=True)
class TensorHoldings:
    """Where a tensor lies. ``alike``: how many further tensors of the same shape lie in the same way."""

    name: str
    shape: tuple[int, ...]
    holdings: tuple[Holding, ...]
    alike: int = 0

    @property
    def title(self) -> str:
        return f"{self.name} {self.shape}".strip() + (f", and {self.alike} alike" if self.alike else "")

    def lines(self) -> list[str]:
        """The title, the bars, and which rows are whose."""
        bars = [f"  {self._text(bar)}" for bar in self._bars(_BAR)]
        words = first_lines(self._words(), MAX_RANKS, " shards")
        # Spaces within an entry do not break.
        joined = "   ".join(word.replace(" ", "\0") for word in words)
        legend = textwrap.wrap(joined, _WIDTH, initial_indent="  ", subsequent_indent="  ")
        lines = [self.title, *bars[:_MAX_BARS], *(line.replace("\0", " ") for line in legend)]
        return [printable(line) for line in lines]

    def fold(self) -> Fold:
        """The same for a notebook."""
        words = self._words()
        text = "\n".join(first_lines(words, MAX_RANKS, " shards"))
        bars = [Bar(tuple(self._segments(bar)), "; ".join(words[:MAX_RANKS])) for bar in self._bars(1000)]
        return Fold(self.title, bars=bars[:_MAX_BARS], text=text)

    def _words(self) -> list[str]:
        return [f"{own.label}: {self._rows(own)}" for own in self.holdings if own.boxes] + [
            f"nothing on {own.label}" for own in self.holdings if not own.boxes
        ]

    def _rows(self, holding: Holding) -> str:
        boxes = holding.boxes
        if len(boxes) == 1 and boxes[0].sizes == self.shape:
            return "whole"
        if len(boxes) == 1 and len(self.shape) <= 2 and boxes[0].sizes[1:] == self.shape[1:]:
            return f"rows {boxes[0].offsets[0]}:{boxes[0].offsets[0] + boxes[0].sizes[0]}"
        return " ".join(map(slices_text, boxes[:4])) + (" ..." if len(boxes) > 4 else "")

    def _bars(self, width: int) -> tuple[RowBar, ...]:
        return row_bars(self.shape, [box for own in self.holdings for box in own.boxes], width)

    def _runs(self, bar: RowBar) -> Iterator[tuple[int | None, int]]:
        """The numbers of the holdings in a bar, each with how many cells follow one another."""
        owners = [number for number, own in enumerate(self.holdings) for _ in own.boxes]
        cells = (None if cell is None else owners[cell] for cell in bar.cells)
        return ((number, len(list(run))) for number, run in itertools.groupby(cells))

    def _text(self, bar: RowBar) -> str:
        parts, done, start = [], 0, 0
        for number, cells in self._runs(bar):
            done += cells
            stop = done * _BAR // len(bar.cells)
            label = "" if number is None else self.holdings[number].label
            room = max(0, stop - start - 1)
            parts.append((label if len(label) <= room else "").center(room))
            start = stop
        columns = "" if bar.columns is None else " columns {}:{}".format(*bar.columns)
        return f"|{'|'.join(parts)}|{columns}"

    def _segments(self, bar: RowBar) -> Iterator[tuple[int, str, str, str]]:
        for number, cells in self._runs(bar):
            if number is None:
                yield cells, "none", "", "other columns"
                continue
            own = self.holdings[number]
            yield cells, _COLOURS[number % len(_COLOURS)], own.label, f"{own.label}: {self._rows(own)}"


@dataclass(frozen=True, repr=False)
class HoldingsDrawing(Viewed):
    """Of each of ``tensors`` which device holds which rows; ``print`` draws it, and a notebook shows it as bars."""

    title: str
    tensors: tuple[TensorHoldings, ...]

    def __str__(self) -> str:
        drawn = [line for tensor in self.tensors[:MAX_TENSORS] for line in tensor.lines()]
        return "\n".join([printable(self.title), *drawn, *more_tensors(len(self.tensors))])

    def __repr__(self) -> str:
        return str(self)

    def _line(self) -> str:
        return self.title

    def _folds(self) -> Iterable[Fold]:
        yield from (tensor.fold() for tensor in self.tensors[:MAX_TENSORS])
        if more := more_tensors(len(self.tensors)):
            yield Fold(more[0])


def draw_holdings(
    title: str, tensors: Iterable[tuple[str, Sequence[int], Mapping[int, Sequence[Box]]]]
) -> HoldingsDrawing:
    """Draw tensors from ``(name, shape, boxes by device)``, of which those that lie alike share a drawing.

    Tensors are alike when their names differ in numbers only, as those of equal layers do.
    """
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, shape, by_device in tensors:
        holders: dict[tuple[Box, ...], list[int]] = defaultdict(list)
        for device, boxes in by_device.items():
            holders[tuple(boxes)].append(device)
        holdings = tuple(Holding(tuple(sorted(devices)), boxes) for boxes, devices in holders.items())
        series = re.sub(r"\d+", "#", name)
        alike[series, tuple(shape), tuple(sorted(holdings, key=_order))].append(name)
    return HoldingsDrawing(
        title,
        tuple(
            TensorHoldings(names[0], shape, holdings, len(names) - 1)
            for (_, shape, holdings), names in alike.items()
        ),
    )


def _order(holding: Holding) -> tuple[object, ...]:
    """By the first row, those that hold nothing last."""
    return not holding.boxes, [box.offsets for box in holding.boxes], holding.devices
