"""The numbers, colours and facts of a report's row, as a page shows them."""

from __future__ import annotations

import math

from bridge.parity.partners.rows import Row
from bridge.parity.recorded.distance import FACTOR

_RED = 3.0
"""log10 of the ratio from which the colour is red."""
_AMBER_STEP, _STEPS = 3, 8
"""Shades of the page's style: the classes ``c0`` (white) to ``c3`` (amber, counts) to ``c8`` (red)."""


def number(value: float) -> str:
    """An error or a floor."""
    return "0" if value == 0 else f"{value:.1e}"


def times(value: float) -> str:
    """A ratio."""
    return f"{value:.3g}" if abs(value) < 1e4 else f"{value:.1e}"


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


def alone(row: Row) -> str:
    """The ratio when the module runs on torch's inputs; empty if it did not."""
    return "" if math.isnan(row.local) else times(row.local)


def facts_of(row: Row, below: str | None) -> list[tuple[str, str]]:
    """All facts of a row: labels and values. ``below``: a heading that already names the module."""
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
        ("alone", alone(row)),
        ("max ULP", str(row.max_ulp)),
        ("cosine", f"{row.cosine:.9g}"),
        ("largest at", f"{index(row.where)}: torch {exact(row.values[0])}, JAX {exact(row.values[1])}"),
        ("layout", row.layout),
        ("note", row.note),
        ("cause", row.cause),
    ]
    return [(label, value) for label, value in pairs if value]
