"""SVG charts of a report: errors over depth above what rounding explains, and how ratios are distributed.

Colours come from the page's style by classes. Every coordinate is a finite number, whatever the rows hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bridge.parity.partners.rows import Row
from bridge.parity.recorded.distance import FACTOR
from bridge.parity.report_page.depth import Axis, place_of, thinned
from bridge.parity.report_page.markup import counted, number, text, times

_WIDTH, _HEIGHT = 1280, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 118, 14, 34, 124
_MOST_LABELS = 40
_LONGEST = 24
_MOST_NUMBERED = 30
_LOWEST, _HIGHEST = -3, 6
"""Decades of the histogram."""


def error_chart(rows: Sequence[Row], title: str, linked: Mapping[int, str]) -> str:
    """Errors of rows from left to right. ``linked``: an anchor of the page by ``id`` of a row."""
    if not rows:
        return f"<figure><figcaption>{text(title)}: no rows.</figcaption></figure>"
    axis = Axis.of(rows)
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    xs = [_LEFT + (place + 0.5) * wide / len(rows) for place in range(len(rows))]
    foot = _TOP + high

    def y(value: float) -> float:
        return foot - axis.place(value) * high

    parts = []
    for factor, style in ((FACTOR, "band wide"), (1.0, "band")):
        tops = [0.0 if math.isnan(row.floor) else row.floor * factor for row in rows]
        ends = [(_LEFT, tops[0]), *zip(xs, tops, strict=True), (_LEFT + wide, tops[-1])]
        line = " ".join(f"{x:.1f},{y(top):.1f}" for x, top in ends)
        parts.append(f'<polygon class="{style}" points="{_LEFT},{foot} {line} {_LEFT + wide},{foot}"/>')
    for place, label in axis.ticks():
        level = foot - place * high
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + wide}" y1="{level:.1f}" y2="{level:.1f}"/>'
        )
        parts.append(f'<text class="y" x="{_LEFT - 6}" y="{level + 4:.1f}">{label}</text>')
    ys = [y(row.error) for row in rows]
    parts.append(_polyline(xs, ys))
    parts += [_mark(row, x, level) for row, x, level in zip(rows, xs, ys, strict=True)]
    for place in thinned(len(rows), _MOST_LABELS):
        where = f"{xs[place]:.1f} {foot + 14}"
        name = text(place_of(rows[place], _LONGEST))
        parts.append(f'<text class="x" transform="translate({where}) rotate(-40)">{name}</text>')
    places = [place for place, row in enumerate(rows) if row.verdict == "introduced"]
    parts += _numbers(places[:_MOST_NUMBERED], xs, ys)
    drawn = "".join(parts)
    return (
        f'<figure><figcaption>{text(title)}</figcaption><div class="scroll">'
        f'<svg class="depth" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(title)}">{drawn}</svg>'
        f"</div>{_key([rows[place] for place in places], linked)}</figure>"
    )


def histogram(rows: Sequence[Row], title: str) -> str:
    """How many rows have which ratio, by decades; the dashed line is the ratio from which a difference counts."""
    decades = [f"1e{power}" for power in range(_LOWEST, _HIGHEST + 1)]
    names = ["0", "less", *decades, "inf", "nan"]
    counts = [[0, 0] for _ in names]
    for row in rows:
        counts[_bin(row.ratio)][row.counts] += 1
    step, high, top, left = 33, 110, 20, 8
    width, foot = 2 * left + step * len(names), high + top
    most = max(sum(pair) for pair in counts) or 1
    parts = [f'<line class="axis" x1="{left}" x2="{width - left}" y1="{foot}" y2="{foot}"/>']
    for place, (name, (same, beyond)) in enumerate(zip(names, counts, strict=True)):
        x, level = left + place * step, float(foot)
        for count, style in ((same, "same"), (beyond, "beyond")):
            tall = count / most * high
            level -= tall
            if count:
                parts.append(
                    f'<rect class="{style}" x="{x + 3}" y="{level:.1f}" width="{step - 6}" height="{tall:.1f}"/>'
                )
        if same + beyond:
            parts.append(f'<text class="n" x="{x + step / 2}" y="{level - 4:.1f}">{same + beyond}</text>')
        parts.append(f'<text class="n" x="{x + step / 2}" y="{foot + 16}">{text(name)}</text>')
    limit = left + (2 - _LOWEST + math.log10(FACTOR)) * step
    parts.append(f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="{top}" y2="{foot}"/>')
    beyond = sum(row.counts for row in rows)
    said = f"{title}: {counted(len(rows), 'row')}, {beyond} beyond rounding"
    drawn = "".join(parts)
    return (
        f'<figure><figcaption>{text(said)}</figcaption><svg class="histogram" viewBox="0 0 {width} {foot + 26}"'
        f' role="img" aria-label="{text(said)}">{drawn}</svg></figure>'
    )


def _bin(ratio: float) -> int:
    decades = _HIGHEST - _LOWEST + 1
    if math.isnan(ratio):
        return decades + 3
    if ratio == math.inf:
        return decades + 2
    if ratio <= 0:
        return 0
    return 1 + min(max(math.floor(math.log10(ratio)) - _LOWEST + 1, 0), decades)


def _polyline(xs: Sequence[float], ys: Sequence[float]) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    return f'<polyline class="line" points="{points}"/>'


def _mark(row: Row, x: float, y: float) -> str:
    """A shape for each verdict, so that colour is not the only sign."""
    said = f"{place_of(row)}: error {number(row.error)}, floor {number(row.floor)}, ratio {times(row.ratio)}"
    tip = f"<title>{text(f'{said}, {row.verdict}')}</title>"
    if row.verdict == "introduced":
        return f'<path class="introduced" d="M{x - 6:.1f} {y + 5:.1f}h12l-6-11z">{tip}</path>'
    if row.verdict == "differs":
        return f'<path class="differs" d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5-5z">{tip}</path>'
    size = 3.5 if row.verdict == "inherited" else 2.5
    return f'<circle class="{row.verdict}" cx="{x:.1f}" cy="{y:.1f}" r="{size}">{tip}</circle>'


def _numbers(places: Sequence[int], xs: Sequence[float], ys: Sequence[float]) -> list[str]:
    """Numbers above the chart, over the places where differences begin: none over another one."""
    parts, taken = [], -math.inf
    for count, place in enumerate(places, 1):
        x = xs[place]
        parts.append(f'<line class="begin" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{ys[place]:.1f}"/>')
        if x - taken >= 16:
            parts.append(f'<text class="n" x="{x:.1f}" y="{_TOP - 12}">{count}</text>')
            taken = x
    return parts


def _key(rows: Sequence[Row], linked: Mapping[int, str]) -> str:
    """The places where differences begin, by number."""
    if not rows:
        return ""
    items = "".join(
        f'<li><a href="#{linked[id(row)]}">{text(place_of(row))}</a> ({text(row.kind)}): '
        f"error {number(row.error)}, ratio {times(row.ratio)}"
        + ("" if math.isnan(row.local) else f", alone {times(row.local)}")
        + (f"; {text(row.cause)}" if row.cause else "")
        + "</li>"
        for row in rows[:_MOST_NUMBERED]
    )
    more = len(rows) - _MOST_NUMBERED
    rest = f"<p>{more} further places: see the tables.</p>" if more > 0 else ""
    return f'<p>▲ introduced:</p><ol class="key">{items}</ol>{rest}'
