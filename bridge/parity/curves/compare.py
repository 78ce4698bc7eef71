"""Two groups of runs, compared: common steps, values that are not finite, and the band of seeds or the tolerance."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence, Sized
from functools import reduce

import numpy as np

from bridge.parity.curves.band import Noise, default_window, seed_band
from bridge.parity.curves.metrics_files import read_metrics
from bridge.parity.curves.report import CurvesReport
from bridge.parity.curves.series import MetricsError, Series
from bridge.parity.curves.verdict import Curves, Departure, Growth, growth, relative_difference

PathLike = str | os.PathLike[str]


def compare_runs(
    a: Sequence[PathLike],
    b: Sequence[PathLike],
    metric: str = "loss",
    *,
    alpha: float = 0.05,
    window: int | None = None,
    rtol: float = 0.0,
) -> CurvesReport:
    """Are the runs ``a`` and the runs ``b`` the same experiment?

    Each is a list of metrics files (``read_metrics``), one per run. The steps that all runs have are compared. A NaN or
    an infinity on only one side is a departure; steps where both sides have one are left out.

    With three or more runs in all, the runs of a side must be repeats that differ in their seeds. They give the band of
    seeds (``bridge.parity.curves.band``): runs of one experiment leave the band, anywhere on the curve, with
    probability ``alpha`` at most. ``window`` (odd; by default a twentieth of the curve, 5 to 51) is the number of
    compared steps over which curves are smoothed and which a departure must last; the first step of a departure is
    right to about half a window. Relative differences of ``rtol`` or less never count.

    With one run on each side the noise is unknown: every step that differs by more than ``rtol``, relative to A, is a
    departure.

    Raises ``MetricsError`` for files that cannot be read, that lack ``metric`` (the error names the existing metrics)
    or share no step, and for arguments out of range; ``OSError`` for files that cannot be opened.
    """
    if isinstance(a, str | os.PathLike) or isinstance(b, str | os.PathLike):
        raise MetricsError(
            'expected lists of paths, such as compare_runs(["a.jsonl"], ["b.jsonl"]), found one path'
        )
    _check_arguments(a, b, alpha, window, rtol)
    left, right = (
        [(os.fspath(path), _series(os.fspath(path), metric)) for path in paths] for paths in (a, b)
    )
    return compare_series(left, right, metric, alpha=alpha, window=window, rtol=rtol)


def compare_series(
    a: Sequence[tuple[str, Series]],
    b: Sequence[tuple[str, Series]],
    metric: str = "loss",
    *,
    alpha: float = 0.05,
    window: int | None = None,
    rtol: float = 0.0,
) -> CurvesReport:
    """``compare_runs`` for runs in memory, each with its name in the report."""
    _check_arguments(a, b, alpha, window, rtol)
    names, series = [name for name, _ in (*a, *b)], [run for _, run in (*a, *b)]
    steps = reduce(np.intersect1d, [run.steps for run in series])
    if not len(steps):
        raise MetricsError(f"expected steps that all runs have, found none: {_ranges(names, series)}")
    values = np.stack([run.values[np.searchsorted(run.steps, steps)] for run in series])
    runs_a, runs_b = values[: len(a)], values[len(a) :]
    bad_a, bad_b = (~np.isfinite(runs).all(0) for runs in (runs_a, runs_b))
    notes = _notes(names, series, len(steps))
    if (bad_a & bad_b).any():
        notes.append(
            f"{(bad_a & bad_b).sum()} steps left out: both sides have values that are not finite there"
        )
    departures = [
        Departure("not finite", int(steps[first]), int(steps[last]), last - first + 1, math.nan, math.nan)
        for first, last in _stretches(bad_a ^ bad_b)
    ]
    usable = ~(bad_a | bad_b)
    notes += _equal_runs(names, values)
    curves = _Curves(steps, usable, runs_a, runs_b)
    if not usable.any():
        notes.append("no step has finite values on both sides")
    elif len(names) == 2:
        departures += curves.compare_exactly(rtol)
    else:
        departures += curves.compare_with_band(rtol, alpha, window)
    return CurvesReport(
        metric=metric,
        a=tuple(names[: len(a)]),
        b=tuple(names[len(a) :]),
        steps=len(steps),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        rtol=rtol,
        largest=curves.largest,
        departures=tuple(sorted(departures, key=lambda departure: departure.first)),
        noise=curves.noise,
        growth=curves.growth,
        notes=tuple(notes),
        curves=Curves(steps, runs_a, runs_b, *curves.lines),
    )


class _Curves:
    """The comparison of the finite values; ``lines`` holds the last four fields of ``Curves``."""

    noise: Noise | None = None
    growth: Growth | None = None
    largest = 0.0

    def __init__(self, steps: np.ndarray, usable: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
        self.steps, self.usable = steps[usable], usable
        self.a, self.b = a[:, usable], b[:, usable]
        self.lines = np.full((4, len(steps)), np.nan)

    def compare_exactly(self, rtol: float) -> list[Departure]:
        relative = relative_difference(self.a[0], self.b[0])
        self._keep(self.a[0], self.b[0], np.zeros_like(relative), rtol * np.abs(self.a[0]))
        self.growth = growth(self.steps, np.abs(relative))
        return self._departures("rtol", relative, np.abs(relative) > rtol, 1)

    def compare_with_band(self, rtol: float, alpha: float, window: int | None) -> list[Departure]:
        width = default_window(len(self.steps)) if window is None else window
        band = seed_band(self.a, self.b, alpha=alpha, window=width)
        half = np.maximum(band.half, rtol * np.abs(band.mean_a))
        relative = relative_difference(band.mean_a, band.mean_b)
        self._keep(band.mean_a, band.mean_b, band.spread, half)
        self.noise = band.noise
        allowed = np.abs(relative) <= rtol
        departures = []
        for sign in (1, -1):
            beyond = (sign * band.ratio > band.noise.critical) & ~allowed
            departures += self._departures("band", relative, beyond, band.noise.window)
        return departures

    def _keep(self, mean_a: np.ndarray, mean_b: np.ndarray, spread: np.ndarray, half: np.ndarray) -> None:
        self.lines[:, self.usable] = mean_a, mean_b, spread, half
        self.largest = float(np.abs(relative_difference(mean_a, mean_b)).max())

    def _departures(
        self, kind: str, relative: np.ndarray, beyond: np.ndarray, fewest: int
    ) -> list[Departure]:
        departures = []
        for first, last in _stretches(beyond):
            if last - first + 1 < fewest:
                continue
            part = relative[first : last + 1]
            span = int(self.steps[first]), int(self.steps[last]), last - first + 1
            departures.append(Departure(kind, *span, float(part.mean()), float(part[np.abs(part).argmax()])))
        return departures


def _stretches(flags: np.ndarray) -> Iterator[tuple[int, int]]:
    """The first and last index of every stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    for first, stop in zip(edges[::2], edges[1::2], strict=True):
        yield int(first), int(stop) - 1


def _check_arguments(a: Sized, b: Sized, alpha: float, window: int | None, rtol: float) -> None:
    if not a or not b:
        raise MetricsError(f"expected one run or more on each side, found {len(a)} and {len(b)}")
    if not 0 < alpha < 1:
        raise MetricsError(f"alpha: expected a probability between 0 and 1, found {alpha}")
    if window is not None and (window < 1 or window % 2 == 0):
        raise MetricsError(f"window: expected an odd number of steps, found {window}")
    if not rtol >= 0:
        raise MetricsError(f"rtol: expected 0 or more, found {rtol}")


def _series(path: str, metric: str) -> Series:
    metrics = read_metrics(path)
    if metric not in metrics:
        raise MetricsError(f"{path}: expected the metric {metric!r}, found {', '.join(sorted(metrics))}")
    return metrics[metric]


def _ranges(names: Sequence[str], series: Sequence[Series]) -> str:
    return "; ".join(
        f"{name} has {len(run)} steps, {', '.join(map(str, run.steps[:3]))}{', ...' if len(run) > 3 else ''} "
        f"up to {run.steps[-1]}"
        for name, run in zip(names, series, strict=True)
    )


def _equal_runs(names: Sequence[str], values: np.ndarray) -> list[str]:
    """Repeats that are equal and so say nothing about seeds. Two single runs may be equal."""
    if len(names) == 2:
        return []
    return [
        f"{names[k]} and {names[n]} are equal bit for bit: not two seeds, so the band is too narrow"
        for n in range(len(names))
        for k in range(n)
        if np.array_equal(values[k], values[n], equal_nan=True)
    ]


def _notes(names: Sequence[str], series: Sequence[Series], common: int) -> list[str]:
    """Which runs have steps that others lack."""
    return [
        f"{name}: {len(run) - common} of its {len(run)} steps (the last one {run.steps[-1]}) left out, because other "
        "runs lack them"
        for name, run in zip(names, series, strict=True)
        if len(run) > common
    ]
