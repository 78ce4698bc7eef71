"""Errors over depth as a picture: outputs and gradients of modules over the floor of rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.parity.partners.rows import Row, Verdict
from bridge.parity.recorded.distance import FACTOR
from bridge.parity.report_page.depth import Axis, place_of, thinned
from bridge.parity.report_page.markup import number, times
from bridge.parity.report_page.report import ParityReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS: dict[Verdict, tuple[str, str, float]] = {
    "same": ("o", "#5b7690", 3),
    "inherited": ("o", "#9c4a7b", 5),
    "differs": ("D", "#9c4a7b", 5),
    "introduced": ("^", "#b84a00", 8),
    "unknown": ("x", "#6b7280", 4),
}
_MOST_LABELS = 28
_MOST_NAMED = 8
MOST_NUMBERED = 30
"""The number of introduced places that get a number on a page."""
_LONGEST = 34
_FOOT = -0.03
"""The end of the error axis, with room for marks at the lowest value."""


def write_picture(report: ParityReport, path: Path) -> None:
    """Write ``parity_figure`` as a PNG."""
    parity_figure(report).savefig(path, dpi=130, format="png")


def parity_figure(report: ParityReport) -> Figure:
    """A panel of forward rows and one of backward rows, in the order of the calls; introduced places are named."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), layout="constrained")
    top, bottom = figure.subplots(2, 1)
    _panel(top, report.stage("forward"), "forward: outputs of modules")
    _panel(bottom, report.stage("backward"), "backward: gradients of modules' outputs")
    handles, labels = top.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def depth_figure(rows: Sequence[Row]) -> Figure:
    """One panel, for a page, which has title and names beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.8, 4.5))
    # Fixed margins with room for the longest label, because measuring every label takes as long as drawing the figure.
    figure.subplots_adjust(left=0.14, right=0.99, top=0.99, bottom=0.38)
    _panel(figure.subplots(), rows, "", MOST_NUMBERED)
    return figure


def tips_of(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The tooltip of each mark, by the ``gid`` of its verdict's marks."""
    tips: dict[str, list[str]] = {}
    for row in rows:
        numbers = f"error {number(row.error)}, floor {number(row.floor)}, ratio {times(row.ratio)}"
        tips.setdefault(f"marks-{row.verdict}", []).append(f"{place_of(row)}: {numbers}, {row.verdict}")
    return tips


def _panel(panel: Axes, rows: Sequence[Row], title: str, numbered: int = 0) -> None:
    """``numbered``: how many introduced places get numbers; 0: the places get names next to the panel."""
    panel.set_title(title, loc="left", fontsize=11)
    panel.spines[["top", "right"]].set_visible(False)
    axis = Axis.of(rows)
    xs = list(range(len(rows)))
    for factor, label, colour in (
        (FACTOR, f"up to {FACTOR:g} times the floor", "#e6ebf0"),
        (1.0, "rounding explains it", "#c9d3de"),
    ):
        tops = [0.0 if math.isnan(row.floor) else axis.place(row.floor * factor) for row in rows]
        # The band extends over the full width of the panel, even for one row.
        edges, tops = [x - 0.5 for x in xs] + [x + 0.5 for x in xs[-1:]], tops + tops[-1:]
        panel.fill_between(edges, tops, _FOOT, step="post", color=colour, lw=0, label=label)
    errors = [axis.place(row.error) for row in rows]
    panel.plot(xs, errors, color="#9aa7b4", lw=0.8)
    for verdict, (mark, colour, size) in _MARKS.items():
        chosen = [x for x in xs if rows[x].verdict == verdict]
        panel.plot(
            chosen,
            [errors[x] for x in chosen],
            mark,
            color=colour,
            markerfacecolor="white" if verdict == "inherited" else colour,
            ms=size,
            label=verdict,
            gid=f"marks-{verdict}",
        )
    _number_introduced(panel, rows, axis, numbered or _MOST_NAMED)
    if not numbered:
        _name_introduced(panel, rows)
    places, names = zip(*axis.ticks(), strict=True)
    panel.set_yticks(places, names, fontsize=9)
    panel.set_ylim(_FOOT, 1.09)
    panel.set_xlim(-0.5, max(len(rows), 1) - 0.5)
    panel.grid(axis="y", lw=0.4)
    panel.set_axisbelow(True)
    panel.set_ylabel("relative error")
    labelled = list(thinned(len(rows), _MOST_LABELS))
    panel.set_xticks(
        labelled,
        [_plain(place_of(rows[x], _LONGEST)) for x in labelled],
        rotation=40,
        ha="right",
        rotation_mode="anchor",
        fontsize=8,
        parse_math=False,
    )
    if not rows:
        panel.text(0.5, 0.5, "no rows", transform=panel.transAxes, ha="center")


def _number_introduced(panel: Axes, rows: Sequence[Row], axis: Axis, most: int) -> None:
    """Put numbers above the panel, without overlap."""
    taken = -math.inf
    for count, x in enumerate(_introduced(rows)[:most], 1):
        panel.plot([x, x], [axis.place(rows[x].error), 1.02], color="#b84a00", lw=0.8, ls=":")
        if x - taken >= len(rows) / 70:
            panel.text(x, 1.03, str(count), ha="center", color="#b84a00", fontsize=9)
            taken = x


def _introduced(rows: Sequence[Row]) -> list[int]:
    return [x for x, row in enumerate(rows) if row.verdict == "introduced"]


def _name_introduced(panel: Axes, rows: Sequence[Row]) -> None:
    """Put the names of the first places next to the panel."""
    begin = _introduced(rows)
    names = [
        f"{count}  {_plain(place_of(rows[x], _LONGEST))}" for count, x in enumerate(begin[:_MOST_NAMED], 1)
    ]
    if len(begin) > _MOST_NAMED:
        names.append(f"and {len(begin) - _MOST_NAMED} more")
    if names:
        panel.annotate(
            "introduced:\n" + "\n".join(names),
            (1.01, 1.0),
            xycoords="axes fraction",
            va="top",
            fontsize=8,
            color="#b84a00",
            parse_math=False,
        )


def _plain(name: str) -> str:
    """Replace characters that the font lacks: it covers the letters of a few alphabets only."""
    return name.replace("…", "..").encode("ascii", "backslashreplace").decode()
