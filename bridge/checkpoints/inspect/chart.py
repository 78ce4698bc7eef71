"""Pictures to scale: the contents of each rank's shards, and which rows of a tensor each stored chunk contains."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.checkpoints.inspect.summary import MAX_BARS
from bridge.core.extras import why_no_pictures
from bridge.core.formats.tensors.base import TensorInfo
from bridge.core.sharding import Layout
from bridge.core.sharding.layout.drawing import MAX_TENSORS, drawn_ranks, row_bars
from bridge.core.text import printable
from bridge.report_page.palette import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
MAX_DRAWN_RANKS = 32

_WIDTH = 9.0  # inches that the bars take
_LETTER = 0.065  # inches that a letter takes, at the font size of names
_NARROW = 1.3  # inches of a buffer, below which its label is wider
_GAP = 0.02  # of the width, between two buffers
_BAR_COLUMNS = 1000
_MAX_LABEL = 60


class PictureError(Exception):
    """A picture cannot be drawn, or cannot be written to the requested place."""


def layout_figure(layout: Layout) -> Figure:
    """A row for each rank, with its shards of all buffers side by side; one colour per tensor, hatching for padding."""
    ranks = drawn_ranks(layout.num_shards, MAX_DRAWN_RANKS)
    figure, axis = _canvas(len(ranks))
    # A fraction of all shards, as sizes may exceed floating-point resolution.
    whole = max(1, layout.shard_size)
    starts = [
        start / whole + _GAP * b for b, start in enumerate(accumulate(layout.shard_sizes[:-1], initial=0))
    ]
    for y, rank in enumerate(ranks):
        for buffer, (left, size) in enumerate(zip(starts, layout.shard_sizes, strict=False)):
            if rank is None:
                axis.text(left + size / whole / 2, y, "...", ha="center", va="center")
                continue
            _hatched(axis, left, size / whole, y)
            parts = list(layout.parts(rank, buffer))
            spans = [(left + part.start / whole, (part.stop - part.start) / whole) for part in parts]
            _bars(axis, y, spans, [part.number for part in parts])
            for part, span in zip(parts, spans, strict=True):
                _label(axis, y, span, layout.slots[part.number].name)
    axis.set_yticks(range(len(ranks)), ["..." if rank is None else f"rank {rank}" for rank in ranks])
    # Labels of narrow buffers stand by turns on two levels.
    narrow = any(size / whole * _WIDTH < _NARROW for size in layout.shard_sizes)
    sizes = [
        ("\n\n" if narrow and b % 2 else "") + f"buffer {b}\n{size:,} elements"
        for b, size in enumerate(layout.shard_sizes)
    ]
    centres = [left + size / whole / 2 for left, size in zip(starts, layout.shard_sizes, strict=False)]
    axis.set_xticks(centres, sizes)
    axis.set_title(
        f"{layout.num_shards:,} shards, {layout.numel:,} elements, {100 * layout.overhead():.2f} % padding",
        fontsize=10,
    )
    return figure


def chunks_figure(tensors: Sequence[TensorInfo]) -> Figure:
    """A bar for each of the first tensors (one for each range of columns that chunks cut), a colour for each chunk."""
    rows: list[tuple[str, tuple[int | None, ...]]] = []
    for tensor in tensors[:MAX_TENSORS]:
        bars = row_bars(tensor.shape, tensor.chunks, _BAR_COLUMNS)
        name = printable(tensor.name if len(tensor.name) <= _MAX_LABEL else "..." + tensor.name[-_MAX_LABEL:])
        for bar in bars[:MAX_BARS]:
            where = "" if bar.columns is None else " [..., {}:{}]".format(*bar.columns)
            rows.append((name + where, bar.cells))
        if len(bars) > MAX_BARS:
            rows.append((f"and {len(bars) - MAX_BARS} more", ()))
    more = len(tensors) - MAX_TENSORS
    figure, axis = _canvas(len(rows))
    for y, (_, cells) in enumerate(rows):
        if cells:
            _hatched(axis, 0.0, 1.0, y)
        spans, chunks, column = [], [], 0
        for chunk, run in groupby(cells):
            length = len(list(run))
            if chunk is not None:
                spans.append((column / len(cells), length / len(cells)))
                chunks.append(chunk)
            column += length
        _bars(axis, y, spans, chunks)
        for span, chunk in zip(spans, chunks, strict=True):
            _label(axis, y, span, str(chunk))
    axis.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=7, parse_math=False)
    axis.set_xticks([0, 1], ["first row", "last row"])
    title = "rows of each tensor by the number of the chunk that stores them"
    axis.set_title(title + (f"; {more} more tensors" if more > 0 else ""), fontsize=10)
    return figure


def check_picture_path(path: Path) -> None:
    """PictureError unless a picture can be written there."""
    if (reason := why_no_pictures()) is not None:
        raise PictureError(reason)
    if path.suffix.lower() not in SUFFIXES:
        raise PictureError(f"picture {path}: expected a name ending in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise PictureError(f"picture {path}: expected an existing directory {path.parent}, found none")
    if path.is_dir():
        raise PictureError(f"picture {path}: expected a file or nothing there, found a directory")


def save_picture(figure: Figure, path: Path) -> None:
    """Write the figure in the format of the suffix: whole, or not at all."""
    check_picture_path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        figure.savefig(partial, format=path.suffix[1:], dpi=130)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _canvas(rows: int) -> tuple[Figure, Axes]:
    if (reason := why_no_pictures()) is not None:
        raise PictureError(reason)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH + 1, 1.0 + 0.3 * max(rows, 1)), layout="constrained")
    axis = figure.subplots()
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    axis.margins(x=0.005)
    axis.set_ylim(max(rows, 1) - 0.5, -0.5)
    return figure, axis


def _hatched(axis: Axes, left: float, width: float, y: int) -> None:
    axis.broken_barh(
        [(left, width)], (y - 0.4, 0.8), facecolor="white", edgecolor="#bbbbbb", hatch="//////", lw=0.5
    )


def _bars(axis: Axes, y: int, spans: Sequence[tuple[float, float]], numbers: Sequence[int]) -> None:
    faces = [LIGHT[number % len(LIGHT)] for number in numbers]
    axis.broken_barh(list(spans), (y - 0.4, 0.8), facecolors=faces, edgecolor="white", lw=1)


def _label(axis: Axes, y: int, span: tuple[float, float], text: str) -> None:
    text = printable(text, lines=True)
    if len(text) * _LETTER < span[1] * _WIDTH * 0.9:
        axis.text(span[0] + span[1] / 2, y, text, ha="center", va="center", fontsize=7, parse_math=False)
