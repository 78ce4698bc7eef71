"""The relay as a picture: loss curves with the hops marked, and the differences on a log axis."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from bridge.relay.report import RelayReport
from bridge.report_page.palette import BLUE, ORANGE, VERMILION

COLOURS = {"torch": VERMILION, "jax": BLUE}
_MARKERS = {"torch": "o", "jax": "s"}
# A log axis has no place for differences of exactly zero; they are drawn at its foot.
FLOOR = 1e-9


def relay_figure(report: RelayReport) -> Figure:
    """Two panels over the step axis: loss (natural log units per byte), and relative difference from the references."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    steps = list(range(len(report.losses)))
    top.plot(
        steps, report.reference_fp64, color="black", lw=4, alpha=0.15, label="float64, one process, no hops"
    )
    for leg, config in zip(report.legs, report.config.legs, strict=True):
        own = steps[leg.first_step : leg.first_step + len(leg.losses)]
        colour, marker = COLOURS[config.framework], _MARKERS[config.framework]
        top.plot(own, leg.losses, color=colour, marker=marker, ms=3.5, lw=1.5)
        top.annotate(
            leg.title.replace(" ", "\n"),
            (own[0] - 0.35, 0.97),
            xycoords=("data", "axes fraction"),
            va="top",
            fontsize=8,
            color=colour,
        )
    for axis in (top, bottom):
        for leg in report.legs[1:]:
            axis.axvline(leg.first_step - 0.5, color="grey", lw=0.8, ls=":")
        axis.spines[["top", "right"]].set_visible(False)
    top.set_xlim(-0.5, len(steps) - 0.5)
    top.set_ylabel("loss (nats / byte)")
    low, high = top.get_ylim()
    top.set_ylim(low, high + 0.18 * (high - low))
    for name, label, style in (
        ("relay_fp32", "relay to fp32 reference", {"color": BLUE}),
        ("relay_fp64", "relay to float64", {"color": ORANGE, "ls": "-."}),
        ("fp32_fp64", "fp32 reference to float64", {"color": "black", "ls": "--", "lw": 1}),
    ):
        values = [max(value, FLOOR) for value in report.differences(name)]
        bottom.semilogy(steps, values, label=label, **style)
    bottom.set_ylabel("relative loss difference")
    bottom.set_xlabel("step (dotted: a hop, checkpoint converted bit for bit)")
    # Below the panels, where no line can run behind the legend.
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def save_picture(report: RelayReport, path: Path) -> None:
    """Write ``relay_figure`` as a PNG."""
    relay_figure(report).savefig(path, dpi=130)
