"""A report as one HTML file; ``bridge/report_page/templates/parity.html`` has the markup."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from bridge.core.extras import why_no_pictures
from bridge.core.text import counted
from bridge.parity.partners.rows import STAGES, Row
from bridge.parity.recorded.distance import FACTOR
from bridge.parity.report_page.depth import place_of, shown
from bridge.parity.report_page.markup import alone, exact, facts_of, index, number, shade, times
from bridge.parity.report_page.picture import MOST_NUMBERED, depth_figure, tips_of
from bridge.parity.report_page.report import ParityReport
from bridge.parity.report_page.tree import anchors, tree_of
from bridge.report_page.charts import inline_svg
from bridge.report_page.page import render

_LOWEST, _HIGHEST = -3, 6
"""Decades of ratios."""
_BINS = ("0", "less", *(f"1e{power}" for power in range(_LOWEST, _HIGHEST + 1)), "inf", "nan")


def write_html(report: ParityReport, path: Path) -> None:
    """Write ``report`` to ``path`` in UTF-8. All names are escaped, since anybody may have chosen them."""
    path.write_text(page(report), encoding="utf-8")


def page(report: ParityReport) -> str:
    """The whole document."""
    root = tree_of(report)
    linked = anchors(root)
    stages = [(stage, rows) for stage in STAGES if (rows := report.stage(stage))]
    names = ("torch, float64", "JAX, float64", f"torch, {report.dtype}", f"JAX, {report.dtype}")
    losses = zip(names, report.losses, strict=True)
    return render(
        "parity.html",
        title=f"Parity: {'same' if report.same else 'different'}",
        report=report,
        first=report.first_divergence,
        root=root,
        stages=stages,
        losses=[(name, loss) for name, loss in losses if loss is not None],
        remarks=list(filter(None, (*report.notes, report.order, report.conclusion()))),
        charts=list(_charts(report)),
        bins=_BINS,
        factor=f"{FACTOR:g}",
        most_numbered=MOST_NUMBERED,
        anchor_of=lambda row: linked[id(row)],
        **{f.__name__: f for f in (alone, counted, exact, facts_of, index, number, shade, times)},
        **{f.__name__: f for f in (histogram, place_of, shown)},
    )


def _charts(report: ParityReport) -> Iterator[tuple[str, Sequence[Row], str]]:
    """Titles, rows from left to right, and their charts; without matplotlib why there are none."""
    missing = why_no_pictures()
    by_ratio = sorted(
        report.stage("gradients"),
        key=lambda row: math.inf if math.isnan(row.ratio) else row.ratio,
        reverse=True,
    )
    for title, rows in (
        ("Forward: error of modules' outputs, in the order of the calls", report.stage("forward")),
        ("Backward: error of modules' gradients, same order", report.stage("backward")),
        ("Gradients of parameters, by ratio, the largest first", by_ratio),
    ):
        if missing or not rows:
            yield title, rows, missing or ""
        else:
            yield title, rows, inline_svg(depth_figure(rows), title, tips_of(rows))


def histogram(rows: Sequence[Row]) -> list[list[int]]:
    """For each bin of ratios, the number of rows that are the same and the number beyond rounding."""
    counts = [[0, 0] for _ in _BINS]
    for row in rows:
        counts[_bin(row.ratio)][row.counts] += 1
    return counts


def _bin(ratio: float) -> int:
    if math.isnan(ratio):
        return _BINS.index("nan")
    if ratio == math.inf:
        return _BINS.index("inf")
    if ratio <= 0:
        return 0
    return 1 + min(max(math.floor(math.log10(ratio)) - _LOWEST + 1, 0), _HIGHEST - _LOWEST + 1)
