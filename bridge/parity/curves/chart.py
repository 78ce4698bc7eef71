"""The comparison as a picture: both groups of runs with their spreads, and their difference with the band."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from bridge.parity.curves.band import Noise
from bridge.parity.curves.series import MetricsError
from bridge.parity.curves.verdict import Curves, Departure
from bridge.report_page.palette import BLUE, ORANGE, VERMILION

COLOURS = {"A": BLUE, "B": VERMILION}
_LINES = {"A": "-", "B": "--"}


def curves_figure(
    curves: Curves, departures: Sequence[Departure], noise: Noise | None, *, title: str, metric: str
) -> Figure:
    """Two panels over the step axis: the curves, and B's relative difference from A with the band that allows it."""
    steps = curves.steps
    figure = Figure(figsize=(9, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for name, runs, mean in (("A", curves.a, curves.mean_a), ("B", curves.b, curves.mean_b)):
        colour = COLOURS[name]
        for run in runs:
            top.plot(steps, run, color=colour, lw=0.6, alpha=0.35)
        label = f"{name}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}"
        if noise is not None:
            label += ", mean and spread of one run (smoothed)"
            top.fill_between(
                steps, mean - curves.spread, mean + curves.spread, color=colour, alpha=0.25, lw=0
            )
        top.plot(steps, mean, _LINES[name], color=colour, lw=1.6, label=label)
    with np.errstate(all="ignore"):
        band = curves.half / np.abs(curves.mean_a)
    allowed = "tolerance" if noise is None else f"band of seeds (false alarm {noise.alpha:g})"
    bottom.fill_between(steps, -100 * band, 100 * band, color="grey", alpha=0.3, lw=0, label=allowed)
    bottom.plot(steps, 100 * curves.relative, color="black", lw=1.2, label="(B - A) / |A|")
    bottom.axhline(0, color="grey", lw=0.6)
    for departure in departures:
        for axis in (top, bottom):
            axis.axvspan(departure.first, departure.last, color=ORANGE, alpha=0.2, lw=0)
    if departures:
        for axis in (top, bottom):
            axis.axvline(departures[0].first, color=ORANGE, lw=1.5)
    top.set_title(title, loc="left", fontsize=11)
    top.set_ylabel(metric)
    bottom.set_ylabel("difference (%)")
    bottom.set_xlabel("step" + (" (shaded: a departure)" if departures else ""))
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    return figure


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix. ``MetricsError`` if matplotlib lacks the format."""
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise MetricsError(f"picture {path}: expected a name that ends in .{', .'.join(sorted(known))}")
    figure.savefig(path, dpi=130)
