"""The answer of ``compare_runs``: the verdict, the departures, and its JSON, table and text forms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.extras import why_no_pictures
from bridge.core.text import first_lines
from bridge.core.views import Viewed
from bridge.parity.curves.band import Noise
from bridge.parity.curves.series import MetricsError
from bridge.parity.curves.verdict import Curves, Departure, Growth

_ROWS = 11


@dataclass(frozen=True, eq=False, repr=False)
class CurvesReport(Viewed):
    """Whether runs ``a`` and ``b`` are one experiment, as far as ``metric`` shows.

    ``steps``: how many were compared, from ``first_step`` to ``last_step``. ``departures``: in order of their steps;
    none if the runs are the same. ``noise``: None if each side has one run, since noise was not estimated then.
    ``growth``: of the difference of two single runs, if it grows. ``notes``: steps and values that were left out.
    """

    metric: str
    a: tuple[str, ...]
    b: tuple[str, ...]
    steps: int
    first_step: int
    last_step: int
    rtol: float
    largest: float
    departures: tuple[Departure, ...]
    noise: Noise | None
    growth: Growth | None
    notes: tuple[str, ...]
    curves: Curves

    @property
    def same(self) -> bool:
        return not self.departures

    def __bool__(self) -> bool:
        return self.same

    @property
    def verdict(self) -> str:
        """ "same experiment" or "different from step k"."""
        return "same experiment" if self.same else f"different from step {self.departures[0].first}"

    def as_dict(self) -> dict[str, Any]:
        """Everything but the curves themselves."""
        fields = {name: value for name, value in vars(self).items() if name != "curves"}
        return {"same": self.same, "verdict": self.verdict, **fields}

    def table(self) -> list[tuple[str, ...]]:
        """A heading and a dozen rows: evenly spaced steps and the first step of every departure (at most ten)."""
        curves, steps = self.curves, self.curves.steps
        evenly = np.linspace(0, len(steps) - 1, min(_ROWS, len(steps))).round().astype(int)
        starts = np.searchsorted(steps, [departure.first for departure in self.departures[:10]])
        rows: list[tuple[str, ...]] = [("verdict", "step", "A", "B", "difference", "band")]
        relative = curves.relative
        with np.errstate(all="ignore"):
            band = curves.half / np.abs(curves.mean_a)
        for k in sorted({*map(int, evenly), *map(int, starts)}):
            kinds = {stretch.kind for stretch in self.departures if stretch.first <= steps[k] <= stretch.last}
            verdict = "within" if not kinds else "not finite" if "not finite" in kinds else "beyond"
            shown = (f"{curves.mean_a[k]:.6g}", f"{curves.mean_b[k]:.6g}", _percent(relative[k], sign=True))
            rows.append((verdict, str(steps[k]), *shown, _percent(band[k])))
        return rows

    def summary(self) -> str:
        """The verdict with its reasons, in lines of text."""
        compared = f"{self.steps} common steps {self.first_step} to {self.last_step}"
        lines = [f"{self.verdict}: {self.metric} of {len(self.a)} + {len(self.b)} runs, {compared}"]
        stretches = [_explained(departure, self.last_step) for departure in self.departures]
        lines += first_lines(stretches, 5, " stretches beyond")
        lines.append(self._about_noise())
        if self.growth is not None:
            lines.append(self.growth.summary())
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _about_noise(self) -> str:
        noise = self.noise
        if noise is None:
            return (
                f"Noise was not estimated: one run on each side. Largest relative difference {self.largest:.3g}, "
                f"allowed {self.rtol:g}. Give repeats with other seeds (three on each side) to learn what seeds do."
            )
        how = (
            f"from {noise.tests} ways to deal the labels A and B"
            if noise.method == "permutation"
            else f"from Student's t ({noise.dof:.1f} degrees of freedom, {noise.tests} tests, Bonferroni)"
        )
        return (
            f"Band of seeds: {_percent(noise.band)} (median), {noise.critical:.2f} standard errors, {how}. A departure "
            f"stays beyond for {noise.window} steps or more, on running medians over {noise.window} steps. False "
            f"alarms: at most {noise.alpha:g} for the whole curve; p = {noise.p:.2g}."
        )

    def plot(self, path: str | Path) -> None:
        """Write a picture of the curves, the bands and the departures; the suffix gives the format.

        ``MetricsError`` without matplotlib, and for a suffix that matplotlib does not know.
        """
        if (reason := why_no_pictures()) is not None:
            raise MetricsError(reason)
        from bridge.parity.curves.chart import curves_figure, save_picture

        drawn = self.curves, self.departures, self.noise
        save_picture(curves_figure(*drawn, title=self.verdict, metric=self.metric), Path(path))


def _percent(value: float, sign: bool = False) -> str:
    if value == 0 or math.isnan(value):
        return f"{abs(value):.3g} %"
    return f"{100 * value:{'+' if sign else ''}.3g} %"


def _explained(departure: Departure, last_step: int) -> str:
    end = "to the end" if departure.last == last_step else f"until step {departure.last}"
    steps = "1 step" if departure.count == 1 else f"{departure.count} compared steps"
    span = f"from step {departure.first} {end} ({steps})"
    if departure.kind == "not finite":
        return f"{span}: values that are not finite (NaN, infinity) on one side only"
    beyond = "the band of seeds" if departure.kind == "band" else "the tolerance"
    return (
        f"{span}: beyond {beyond}, B is {_percent(departure.mean, sign=True)} from A on average, "
        f"{_percent(departure.largest, sign=True)} where it is furthest"
    )
