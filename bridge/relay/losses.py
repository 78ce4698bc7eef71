"""The losses of a relay and of the uninterrupted run: are they the same experiment (``bridge.parity.curves``)?

Seeds, data and initial weights are equal, so the runs may differ only by rounding. Repeats of the fp32 reference that
differ in nothing else show what rounding does to the losses. Without repeats each step is compared with a tolerance.
The same holds for steps from the first leg on that is coarser than fp32, because fp32 repeats cannot represent them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bridge.parity.curves.compare import compare_series
from bridge.parity.curves.report import CurvesReport
from bridge.parity.curves.series import Series
from bridge.parity.curves.verdict import Departure

FP32_TOLERANCE = 1e-5
# Five times what `twinshard relay bfloat16` measured; one rounding to bfloat16 is off by up to 2 ** -9 = 2e-3.
BF16_TOLERANCE = 1e-2
# For weights that are gathered in float8, and for moments that are stored in it: five times what `twinshard relay
# float8` measured.
FLOAT8_TOLERANCE = 2e-2
# A loss is one fp32 number: distances below one rounding of the loss say nothing.
ROUNDING = 2.0**-23
ALPHA = 0.01
"""Probability that the band of repeats rejects a correct relay, over all its steps."""


def tolerance_of(precision: str) -> float:
    """The tolerance for the losses of a leg with this word of ``Leg.precision_words``."""
    return FLOAT8_TOLERANCE if precision.startswith(("float8", "mxfp8")) else BF16_TOLERANCE


@dataclass(frozen=True)
class LossCurves:
    """Reports of ``compare_series``, the reference as A and the relay as B; None for a part without steps.

    fp32: the steps before the first leg that is coarser than fp32. low: the steps from this leg on. repeats: the number
    of repeats of the reference.
    """

    fp32: CurvesReport | None
    low: CurvesReport | None
    repeats: int

    @property
    def reports(self) -> list[CurvesReport]:
        return [report for report in (self.fp32, self.low) if report is not None]

    @property
    def departures(self) -> list[Departure]:
        """All departures in the order of their steps; none if the relay and the reference are the same experiment."""
        return [departure for report in self.reports for departure in report.departures]

    @property
    def verdict(self) -> str:
        """ "same experiment" or "different from step k"."""
        return next((report.verdict for report in self.reports if not report.same), "same experiment")

    def verdict_between(self, first: int, stop: int) -> str:
        """ "same", or "from k": the first step of ``range(first, stop)`` that departs."""
        starts = [
            max(departure.first, first)
            for departure in self.departures
            if departure.first < stop and departure.last >= first
        ]
        return f"from {min(starts)}" if starts else "same"

    def summary(self) -> str:
        """The verdict and its basis."""
        lines = [f"Losses of relay and fp32 reference: {self.verdict}; {self._grounds()}."]
        if self.fp32 is not None and self.fp32.growth is not None:
            lines.append(self.fp32.growth.summary())
        return "\n".join(lines)

    def _grounds(self) -> str:
        noise = None if self.fp32 is None else self.fp32.noise
        if noise is not None:
            grounds = [
                f"band of {self.repeats} repeats that differ only in rounding: {noise.band:.1e} (median), "
                f"{noise.critical:.1f} standard errors, p = {noise.p:.2g}, false alarms at most {noise.alpha:g}"
            ]
        else:
            grounds = [] if self.fp32 is None else [f"tolerance {self.fp32.rtol:g}, as no run was repeated"]
        if self.low is not None:
            grounds.append(f"tolerance {self.low.rtol:g} from the first leg on that is coarser than fp32")
        return "; ".join(grounds)


def compare_losses(
    relay: Sequence[float],
    reference: Sequence[float],
    repeats: Sequence[Sequence[float]],
    split: int,
    low_tolerance: float = BF16_TOLERANCE,
) -> LossCurves:
    """Compare the losses of the steps 0, 1, ... of a relay whose legs are in fp32 before the step ``split``.

    low_tolerance: for the steps from ``split`` on.
    """
    runs = [
        ("reference", reference),
        *((f"repeat {number}", losses) for number, losses in enumerate(repeats, 1)),
    ]
    end = len(relay)

    def part(
        first: int, stop: int, references: list[tuple[str, Sequence[float]]], rtol: float
    ) -> CurvesReport:
        steps = np.arange(first, stop)
        a = [(name, Series(steps, np.asarray(losses[first:stop], float))) for name, losses in references]
        b = [("relay", Series(steps, np.asarray(relay[first:stop], float)))]
        return compare_series(a, b, alpha=ALPHA, window=1, rtol=rtol)

    return LossCurves(
        part(0, split, runs, ROUNDING if repeats else FP32_TOLERANCE) if split else None,
        part(split, end, runs[:1], low_tolerance) if split < end else None,
        len(repeats),
    )
