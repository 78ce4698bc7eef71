"""Pieces of HTML for a row of the report: escaped text, numbers, colours, facts."""

from __future__ import annotations

import html
import math

from bridge.core.text import printable
from bridge.parity.partners.rows import Row
from bridge.parity.recorded.distance import FACTOR
from bridge.parity.report_page.depth import shown

SIGNS = {"same": "✓", "inherited": "○", "differs": "◆", "introduced": "▲", "unknown": "?"}
_RED = 3.0
"""log10 of the ratio from which the colour is red."""
_AMBER_STEP, _STEPS = 3, 8
"""Shades of the colour scale: the classes ``c0`` (white) to ``c3`` (amber, counts) to ``c8`` (red)."""
_PALETTES = {
    "light": ((255, 255, 255), (255, 214, 120), (240, 128, 118)),
    "dark": ((27, 30, 35), (104, 76, 0), (140, 32, 32)),
}


def text(value: object) -> str:
    """``value`` as text that cannot become a tag, an attribute or an escape sequence."""
    return html.escape(printable(str(value), lines=True), quote=True)


def number(value: float) -> str:
    """An error or a floor."""
    return "0" if value == 0 else f"{value:.1e}"


def times(value: float) -> str:
    """A ratio."""
    return f"{value:.3g}" if abs(value) < 1e4 else f"{value:.1e}"


def counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def exact(value: float) -> str:
    """An element of an array."""
    return f"{value:.9g}"


def index(where: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, where)) + "]"


def shade(ratio: float) -> str:
    """The class of a ratio's colour: white up to 1, amber above ``FACTOR``, red from 1e3; NaN and inf are red."""
    if math.isnan(ratio) or ratio == math.inf:
        return f"c{_STEPS}"
    if ratio <= FACTOR:
        return "c0" if ratio <= 1 else "c1" if ratio <= math.sqrt(FACTOR) else "c2"
    part = math.log10(ratio / FACTOR) / (_RED - math.log10(FACTOR))
    return f"c{min(_AMBER_STEP + math.floor(part * (_STEPS - _AMBER_STEP)), _STEPS)}"


def shades(mode: str) -> str:
    """The CSS rules of the colour scale for ``light`` or ``dark``."""
    white, amber, red = _PALETTES[mode]
    rules = []
    for step in range(_STEPS + 1):
        if step < _AMBER_STEP:
            begin, end, part = white, amber, step / _AMBER_STEP
        else:
            begin, end, part = amber, red, (step - _AMBER_STEP) / (_STEPS - _AMBER_STEP)
        colour = "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(begin, end, strict=True))
        rules.append(f".c{step}{{background:#{colour}}}")
    return "".join(rules)


def verdict(row: Row) -> str:
    return f'<span class="v {row.verdict}">{SIGNS[row.verdict]} {row.verdict}</span>'


def chip(row: Row, what: str = "") -> str:
    """A row in a few words on its colour."""
    said = f"{what or row.stage}: {row.verdict}, ratio {times(row.ratio)}"
    return f'<span class="chip {shade(row.ratio)}">{SIGNS[row.verdict]} {text(said)}</span>'


def facts(row: Row, below: str | None = None) -> str:
    """Everything that a row says, as pairs of a label and a value. ``below``: a heading that names the module."""
    headed = row.name == below
    pairs = [
        ("stage", row.stage),
        ("torch", "" if headed else row.name or "(model)"),
        ("call", f"#{row.call}" if row.call else ""),
        ("leaf", row.leaf),
        ("JAX", row.partner or "(model)"),
        ("kind", "" if headed else row.kind),
        ("shape", index(row.shape)),
        ("error", number(row.error)),
        ("floor", number(row.floor)),
        ("ratio", times(row.ratio)),
        ("alone", "" if math.isnan(row.local) else times(row.local)),
        ("max ULP", str(row.max_ulp)),
        ("cosine", f"{row.cosine:.9g}"),
        ("largest at", f"{index(row.where)}: torch {exact(row.values[0])}, JAX {exact(row.values[1])}"),
        ("layout", row.layout),
        ("note", row.note),
        ("cause", row.cause),
    ]
    said = "".join(f"<span><i>{label}</i> {text(value)}</span>" for label, value in pairs if value)
    return f'<p class="facts">{verdict(row)}{said}</p>'


def several(name: str) -> str:
    """A name, or the first and last of many with all of them in the tooltip."""
    short = shown(name)
    return text(short) if short == name else f'<span title="{text(name)}">{text(short)}</span>'
