"""Known causes inside an attention: formulas of attention are tried on both sides' mixed values.

    query, key, value  -->  rotary -> scores -> scale, cap -> mask -> softmax -> values of the heads, joined
    (inner modules' outputs)                                                     (what the output projection is given)

First the search finds a usual formula that fits one side to the floor. Then it finds a formula for the other side that
differs in one field or two. The cause names these fields: "torch: rotary base 10000; JAX: rotary base 500000". The
first queries of the first row of the batch refute most formulas cheaply. A formula that is left must fit all values.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from bridge.parity.causes.formulas import MASKS, AttentionFormula, AttentionInputs, attention, base_of
from bridge.parity.recorded.distance import FACTOR

# The bases of public models, the usual ones first: each base that does not fit costs a pass.
_BASES = (1e4, 5e5, 1e6, 1e5, 1e7, 5e6, 1.6e5, 1e3, 1e2)
_TABLES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_OF_ROTARY = ("angles", "share", "later", "turned", "direction")
_FIELDS = tuple(field.name for field in fields(AttentionFormula))
_EARLY, _EARLIEST = 8, 3
"""Queries of the first row that refute most formulas; so few queries are inside any window."""
_SLACK = 4.0
"""How many times the average error the error of a few queries may be."""
_SOLVED = 2e-5
"""How far a solved number may be from the round number that is meant; float32 constants move it."""
_WORK, _LEAST = 1.5e9, 4e5
"""Multiplications that the search of one side may take, and the least that a formula counts as."""
_LARGEST_SCORES = 1 << 24
"""Scores of one row of the batch above which no formula is tried."""


def attention_cause(
    torch: AttentionInputs,
    jax: AttentionInputs,
    floor: float,
    stored: tuple[str, str] = ("", ""),
    *,
    starts: tuple[bool, ...] = (True, False),
) -> str:
    """Why two attentions mix the same values differently; empty if no two formulas explain it.

    ``floor``: relative to the norm of the mixed values. ``stored``: extra words for either side on how its query, key
    and value were found. ``starts``: whether the first formula is a usual one (true, cheap) or nearly so (false).
    """
    sides = _Search(torch, floor), _Search(jax, floor)
    if any(side.scores > _LARGEST_SCORES for side in sides):
        return ""
    for usual in starts:
        for first in (0, 1):
            known = next(sides[first].common() if usual else sides[first].less_common(), None)
            if known is None:
                continue
            changed = sides[1 - first].nearest(known)
            if changed is None:
                return ""
            formulas = (known, changed) if first == 0 else (changed, known)
            return _named(formulas, (torch, jax), stored)
    return ""


class _Search:
    """The formulas of one side. The search counts its work and stops at a limit."""

    def __init__(self, inputs: AttentionInputs, floor: float) -> None:
        self.inputs = inputs
        self._floor = FACTOR * floor
        self._left = _WORK
        _, queries, heads, self._size = inputs.query.shape
        self.scores = heads * queries * inputs.key.shape[1]

    def common(self) -> Iterator[AttentionFormula]:
        """Usual formulas that fit."""
        root = self._size**-0.5
        masks = ("causal", "none", *self.inputs.masks)
        for cap, scale in itertools.product((math.inf, 50.0, 30.0), (root, 1.0)):
            for mask, (rotary, angles) in itertools.product(masks, self._rotaries()):
                yield from self._whole(AttentionFormula(rotary, angles, scale, mask, cap=cap))

    def less_common(self) -> Iterator[AttentionFormula]:
        """Formulas that fit and differ from a usual one in one field."""
        for mask, (rotary, angles) in itertools.product(("causal", "none"), self._rotaries()):
            start = AttentionFormula(rotary, angles, self._size**-0.5, mask)
            yield from self._varied(start)
            yield from self._solved(start)
            for cap in (50.0, 30.0):
                yield from self._solve(replace(start, cap=cap), "scale", -4.0, 4.0)

    def nearest(self, known: AttentionFormula) -> AttentionFormula | None:
        """A formula that fits and differs from ``known`` in as few fields as possible, at best none."""
        return next(
            itertools.chain(
                self._whole(known), self._varied(known), self._solved(known), self._varied_twice(known)
            ),
            None,
        )

    def _rotaries(self) -> Iterator[tuple[str, float | str]]:
        for angles in self.inputs.tables:
            yield from (("half", angles), ("interleaved", angles))
        yield from (("none", _BASES[0]), ("half", 1e4), ("half", 5e5), ("half", 1e6), ("interleaved", 1e4))

    def _options(self, known: AttentionFormula) -> dict[str, tuple[Any, ...]]:
        """Values for each field that has values other than ``known``'s, without ``known``'s."""
        root, width = math.sqrt(self._size), self.inputs.mixed.shape[-1]
        scales = (1 / root, 1.0, 1 / self._size, width**-0.5, root, known.scale / root, known.scale * root)
        window = known.window
        every = _TABLES["choices"] | {
            "angles": (*self.inputs.tables, *_BASES),
            "scale": scales,
            "mask": (*MASKS, *self.inputs.masks),
            "window": (0, window - 1, window + 1) if window > 1 else (),
        }
        return {
            name: tuple(value for value in every[name] if value != getattr(known, name))
            for name in _FIELDS
            if known.rotary != "none" or name not in _OF_ROTARY
        }

    def _varied(self, known: AttentionFormula) -> Iterator[AttentionFormula]:
        for name, values in self._options(known).items():
            for value in values:
                yield from self._whole(replace(known, **{name: value}))

    def _varied_twice(self, known: AttentionFormula) -> Iterator[AttentionFormula]:
        for name, values in self._options(known).items():
            for value in values:
                once = replace(known, **{name: value})
                for other, further in self._options(once).items():
                    if _FIELDS.index(other) > _FIELDS.index(name):
                        for last in further:
                            yield from self._whole(replace(once, **{other: last}))

    def _solved(self, known: AttentionFormula) -> Iterator[AttentionFormula]:
        """With the number that fits, if there is one: the scale of the scores, their cap, or the rotary base."""
        yield from self._solve(known, "scale", -4.0, 4.0)
        yield from self._solve(known, "cap", -1.0, 3.0)
        if known.rotary != "none":
            yield from self._solve(known, "angles", 0.3, 9.0)

    def _solve(
        self, known: AttentionFormula, name: str, low: float, high: float
    ) -> Iterator[AttentionFormula]:
        def at(power: float) -> AttentionFormula:
            return replace(known, **{name: 10.0**power})

        # In powers of ten: scales and bases may be 1e-2 or 1e6.
        power = minimum(lambda power: self._error(at(power)), low, high)
        if power is None or not self._error(at(power)) <= _SLACK * self._floor:
            return
        solved = 10.0**power
        rounded = (float(f"{solved:.{digits}g}") for digits in range(1, 8))
        for value in (*(number for number in rounded if abs(number / solved - 1) < _SOLVED), solved):
            yield from self._whole(replace(known, **{name: value}))

    def _whole(self, formula: AttentionFormula) -> Iterator[AttentionFormula]:
        """The formula if it fits everything, with the window that it needs."""
        if not self._error(formula) <= _SLACK * self._floor:
            return
        if self._fits(formula):
            yield formula
        elif _opens(formula):
            yield from self._windowed(formula)

    def _error(self, formula: AttentionFormula) -> float:
        """The error on the first queries of the first row, over their norm."""
        queries = min(_EARLIEST if _opens(formula) else _EARLY, self.inputs.mixed.shape[1])
        keys = self.inputs.key.shape[1] if formula.mask == "none" else queries
        self._left -= max(_LEAST, queries * keys * self.inputs.mixed.shape[-1])
        if self._left <= 0:
            return math.inf
        with np.errstate(all="ignore"):
            computed = attention(formula, self.inputs, slice(0, 1), queries)
        mixed = self.inputs.mixed[:1, :queries]
        return math.inf if computed is None or computed.shape != mixed.shape else _relative(computed, mixed)

    def _fits(self, formula: AttentionFormula) -> bool:
        square = norm = 0.0
        for row in range(len(self.inputs.mixed)):
            computed = attention(formula, self.inputs, slice(row, row + 1))
            mixed = self.inputs.mixed[row : row + 1]
            if computed is None or computed.shape != mixed.shape:
                return False
            square += float(np.sum((computed - mixed) ** 2))
            norm += float(np.sum(mixed**2))
        return math.sqrt(square) <= self._floor * math.sqrt(norm)

    def _windowed(self, formula: AttentionFormula) -> Iterator[AttentionFormula]:
        """With a window of as many tokens as queries that fit without a window."""
        computed = attention(formula, self.inputs, slice(0, 1))
        if computed is None:
            return
        rows = zip(computed[0], self.inputs.mixed[0], strict=True)
        wrong = [_relative(*row) > _SLACK * self._floor for row in rows]
        windowed = replace(formula, window=wrong.index(True) if True in wrong else 0)
        if windowed.window and self._fits(windowed):
            yield windowed


def _opens(formula: AttentionFormula) -> bool:
    """Whether a window may be missing."""
    return formula.mask == "causal" and not formula.window


def _relative(computed: np.ndarray, expected: np.ndarray) -> float:
    norm = float(np.linalg.norm(expected))
    error = float(np.linalg.norm(computed - expected))
    return error / norm if norm > 0 else (math.inf if error else 0.0)


def _named(
    formulas: tuple[AttentionFormula, AttentionFormula],
    inputs: tuple[AttentionInputs, AttentionInputs],
    stored: tuple[str, str],
) -> str:
    """The fields in which the two formulas differ, in words."""
    every = [
        {**_words(formula, side), "stored": extra}
        for formula, side, extra in zip(formulas, inputs, stored, strict=True)
    ]
    turning = all(formula.rotary != "none" for formula in formulas)
    names = [
        name for name in every[0] if every[0][name] != every[1][name] and (turning or name not in _OF_ROTARY)
    ]
    texts = [", ".join(side[name] for name in names if side[name]) for side in every]
    return f"torch: {texts[0]}; JAX: {texts[1]}" if names else ""


def _words(formula: AttentionFormula, inputs: AttentionInputs) -> dict[str, str]:
    """Words by field; empty for fields that the formula does not have."""
    angles, share = formula.angles, formula.share
    base: float | None
    if isinstance(angles, str):
        cos, sin = inputs.tables[angles]
        base, share = base_of(cos[0], sin[0]), 2 * cos.shape[-1] / inputs.query.shape[-1]
    else:
        base = angles
    roles = {"q": "query", "k": "key", "v": "value"}
    others = {
        "angles": f"rotary angles of {angles}" if base is None else f"rotary base {base:.8g}",
        "share": f"rotary embedding of {share:g} of each head",
        "scale": _scale(formula.scale, inputs.query.shape[-1]),
        "mask": f"{formula.mask} as mask or added to the scores",
        "window": f"window of {formula.window} tokens",
        "cap": f"scores capped at {formula.cap:g}",
        "roles": "projections used as " + ", ".join(roles[role] for role in formula.roles),
    }
    every = _TABLES["words"].items()
    return {name: words.get(str(getattr(formula, name))) or others[name] for name, words in every}


def _scale(scale: float, size: int) -> str:
    """A scale of scores in words: its name if it is a known one, otherwise its value."""
    if abs(scale - 1) < 1e-6:
        return "scores not scaled"
    known = ""
    if abs(scale * math.sqrt(size) - 1) < 1e-6:
        known = f"1 / sqrt({size})"
    elif abs(scale / math.sqrt(size) - 1) < 1e-6:
        known = f"sqrt({size})"
    else:
        for power, text in ((1, "1 / {}"), (2, "1 / sqrt({})")):
            whole = scale**-power
            if not known and 1.5 < whole < 1e6 and abs(whole - round(whole)) < 1e-5 * whole:
                known = text.format(round(whole))
    return f"scores times {known or format(scale, '.6g')}"


def minimum(error: Callable[[float], float], low: float, high: float, points: int = 60) -> float | None:
    """The minimum of ``error``: the best points of a grid, refined by golden sections. None if all are infinite."""
    grid = np.linspace(low, high, points)
    values = [error(x) for x in grid]
    step = float(grid[1] - grid[0])
    best: tuple[float, float] | None = None
    # The two best points: the error may have two valleys, and the grid does not say which is deeper.
    for index in np.argsort(values)[:2]:
        if not math.isfinite(values[index]):
            continue
        left, right = grid[index] - step, grid[index] + step
        golden = (math.sqrt(5) - 1) / 2
        inner = [right - golden * (right - left), left + golden * (right - left)]
        at = [error(x) for x in inner]
        # Forty golden sections narrow a step of the grid to 4e-9 of it, below what float32 constants move.
        for _ in range(40):
            if at[0] <= at[1]:
                right, inner, at = inner[1], [0.0, inner[0]], [0.0, at[0]]
                inner[0] = right - golden * (right - left)
                at[0] = error(inner[0])
            else:
                left, inner, at = inner[0], [inner[1], 0.0], [at[1], 0.0]
                inner[1] = left + golden * (right - left)
                at[1] = error(inner[1])
        if best is None or min(at) < best[0]:
            best = min(at), inner[0] if at[0] <= at[1] else inner[1]
    return None if best is None else best[1]
