"""The result of a relay: the measurements of each leg and hop, the verdict, and its JSON and table forms."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.core.text import plain_json
from bridge.core.views import Viewed
from bridge.relay.config import RelayConfig
from bridge.relay.losses import FP32_TOLERANCE, ROUNDING, LossCurves, compare_losses, tolerance_of
from bridge.relay.norms import KINDS, Departure, Norms, distances, first_departure, tolerances

VERSION = 1
"""Version of the report's JSON; see `JSON_VERSION` of the commands."""
# Correct relays had ratios from 0.67 to 1.11: the last bits depend on the CPU and the order of sums.
CLOSENESS = 3.0
# Norms that a failure names, out of all that depart in the step.
NAMED = 3


@dataclass(frozen=True)
class Hop:
    """One conversion between two legs; sizes in bytes.

    ``max_ulp``: the largest distance over all ``tensors``. ``same``: no bit differs, and no tensor is missing, extra or
    has another shape or dtype.
    """

    source: str
    destination: str
    tensors: int
    max_ulp: int
    same: bool
    source_bytes: int
    destination_bytes: int
    seconds: float


@dataclass(frozen=True)
class LegResult:
    """One leg's losses, one per step, and its results. ``hop``: the conversion that made its start state.

    precision: the parts coarser than float32, see ``Leg.precision_words``. norms: of the state after each step.
    """

    title: str
    precision: tuple[str, ...]
    first_step: int
    losses: tuple[float, ...]
    seconds: float
    checkpoint_bytes: int
    hop: Hop | None
    norms: tuple[Norms, ...] = ()


@dataclass(frozen=True, repr=False)
class RelayReport(Viewed):
    """Everything a relay measured. Losses are means over the global batch, before the step's update.

    norms_fp32, norms_fp64: of the references' states after each step. repeats: losses of repeats of the fp32 reference
    that differ from it only in rounding.
    """

    config: RelayConfig
    legs: tuple[LegResult, ...]
    reference_fp32: tuple[float, ...]
    reference_fp64: tuple[float, ...]
    versions: dict[str, str]
    norms_fp32: tuple[Norms, ...] = ()
    norms_fp64: tuple[Norms, ...] = ()
    repeats: tuple[tuple[float, ...], ...] = ()

    @property
    def losses(self) -> list[float]:
        return [loss for leg in self.legs for loss in leg.losses]

    def differences(self, which: str) -> list[float]:
        """Relative loss difference by step: ``relay_fp32``, ``relay_fp64`` or ``fp32_fp64`` (between references).

        ``|a - b| / |b|``; infinite where a loss is NaN.
        """
        runs = {"relay": self.losses, "fp32": self.reference_fp32, "fp64": self.reference_fp64}
        pairs = zip(*(runs[name] for name in which.split("_")), strict=True)
        relative = (abs(a - b) / abs(b) for a, b in pairs)
        return [math.inf if math.isnan(difference) else difference for difference in relative]

    @property
    def all_fp32(self) -> bool:
        return not any(leg.precision for leg in self.legs)

    @property
    def low_from(self) -> int:
        """The first step of the first leg that is coarser than fp32; the number of steps if there is no such leg."""
        low = [leg.first_step for leg in self.legs if leg.precision]
        return min(low, default=len(self.losses))

    @property
    def low_tolerance(self) -> float:
        """The tolerance for the losses from there on: the largest that a leg needs."""
        return max(
            (tolerance_of(word) for leg in self.legs for word in leg.precision), default=FP32_TOLERANCE
        )

    def curves(self) -> LossCurves:
        """Are the losses of the relay and of the fp32 reference the same experiment?"""
        return compare_losses(
            self.losses, self.reference_fp32, self.repeats, self.low_from, self.low_tolerance
        )

    @property
    def good(self) -> bool:
        """Whether the run broke no promise, see `failures`. The truth value of the report."""
        return not self.failures()

    def __bool__(self) -> bool:
        return self.good

    def failures(self) -> list[str]:
        """The promises of the relay that this run broke; empty when all held.

        State must cross every hop bit for bit. An all-fp32 relay must stay within ``FP32_TOLERANCE`` of the fp32
        reference at every step, and its largest distance from float64, divided by the reference's, must be between
        ``1 / CLOSENESS`` and ``CLOSENESS``. The lower bound is needed, since a relay much closer to float64 than the
        fp32 reference did not compute in fp32. From the first leg on that is coarser than fp32, the relay must stay
        within ``low_tolerance`` of the fp32 reference. If the reference was repeated, the losses before that leg must
        stay in the band of the repeats. The references must differ from each other, otherwise one of them was not
        computed in its precision. Before the first coarser leg, the norm of each parameter and of each of its moments
        must stay as close to the fp32 reference's as ``norms.tolerances`` requires.
        """
        failures = [
            f"hop to leg {n}: expected the same {leg.hop.tensors} tensors bit for bit on both sides, got "
            f"{leg.hop.max_ulp} ULP{'' if leg.hop.max_ulp else ' but different tensors'}"
            for n, leg in enumerate(self.legs, 1)
            if leg.hop is not None and not (leg.hop.same and leg.hop.max_ulp == 0)
        ]
        if not any(self.differences("fp32_fp64")):
            failures.append(
                "references: expected float64 losses that differ from the fp32 ones, got the same"
            )
        differences = self.differences("relay_fp32")
        split = self.low_from
        for start, part, tolerance in (
            (0, differences[:split], FP32_TOLERANCE),
            (split, differences[split:], self.low_tolerance),
        ):
            worst = max(part, default=0.0)
            if worst > tolerance:
                step = start + next(k for k, difference in enumerate(part) if difference > tolerance)
                failures.append(
                    f"loss: expected within {tolerance:g} of the fp32 reference, got {worst:.2e}, first exceeded at "
                    f"step {step} ({self._leg_of(step)})"
                )
        fp32 = self.curves().fp32
        departures = () if fp32 is None else fp32.departures
        if beyond := [stretch for stretch in departures if stretch.kind == "band"]:
            failures.append(
                f"loss: expected within the band of the fp32 reference's repeats, got outside from step "
                f"{beyond[0].first} ({self._leg_of(beyond[0].first)}), by at most {beyond[0].largest:+.1e} of the loss"
            )
        if (departure := self.departure) is not None:
            failures.append(self._departure_text(departure))
        if self.all_fp32:
            ratio = self.closeness
            if not 1 / CLOSENESS <= ratio <= CLOSENESS:
                failures.append(
                    f"distance to float64: expected within a factor of {CLOSENESS:g}, got {ratio:.2f}"
                )
        return failures

    @property
    def departure(self) -> Departure | None:
        """The first step before any coarser leg whose norms are too far from the fp32 reference's."""
        norms: list[Norms] = []
        for leg in self.legs:
            if leg.precision:
                break
            norms += leg.norms
        steps = slice(len(norms))
        return first_departure(norms, self.norms_fp32[steps], self.norm_tolerances[steps])

    @property
    def norm_tolerances(self) -> list[dict[str, float]]:
        """For each step, by kind of norm, the largest relative distance from the fp32 reference that is allowed."""
        return tolerances(self.norms_fp32, self.norms_fp64)

    def largest_norm_differences(self) -> list[dict[str, float]]:
        """For each leg and kind that it covers, the largest relative distance of a norm from the fp32 reference's."""
        largest = []
        for leg in self.legs:
            reference = self.norms_fp32[leg.first_step : leg.first_step + len(leg.norms)]
            steps = [distances(a, b) for a, b in zip(leg.norms, reference, strict=True)]
            largest.append(
                {
                    norm_kind: max([0.0, *(d for step in steps for d in step[norm_kind].values())])
                    for norm_kind in KINDS
                    if all(norm_kind in norms for norms in leg.norms)
                }
            )
        return largest

    def _departure_text(self, departure: Departure) -> str:
        farthest = "; ".join(map(str, departure.norms[:NAMED]))
        more = f"; {len(departure.norms) - NAMED} more" if len(departure.norms) > NAMED else ""
        return (
            f"{self._leg_of(departure.step)}, step {departure.step}: expected the norms of the fp32 reference, got at "
            f"relative distances {farthest}{more}"
        )

    def _leg_of(self, step: int) -> str:
        number, leg = [(n, leg) for n, leg in enumerate(self.legs, 1) if leg.first_step <= step][-1]
        return f"leg {number} ({leg.title})"

    @property
    def closeness(self) -> float:
        """Largest distance to float64 of the relay over the fp32 reference's, both at least ``ROUNDING``."""
        relay, reference = (max(ROUNDING, *self.differences(name)) for name in ("relay_fp64", "fp32_fp64"))
        return relay / reference

    def as_dict(self) -> dict[str, Any]:
        differences = {name: self.differences(name) for name in ("relay_fp32", "relay_fp64", "fp32_fp64")}
        # The norms themselves are in the metrics files.
        legs = tuple(dataclasses.replace(leg, norms=()) for leg in self.legs)
        kept = dataclasses.asdict(dataclasses.replace(self, legs=legs, norms_fp32=(), norms_fp64=()))
        for table in (kept, *kept["legs"]):
            for name in ("norms", "norms_fp32", "norms_fp64"):
                table.pop(name, None)
        curves = self.curves()
        return {
            "version": VERSION,
            **kept,
            "curves": {
                "verdict": curves.verdict,
                "compared": [report.as_dict() for report in curves.reports],
            },
            "differences": differences,
            "largest_differences": {name: max(values) for name, values in differences.items()},
            "closeness_to_fp64": self.closeness,
            "norm_tolerances": self.norm_tolerances,
            "largest_norm_differences": self.largest_norm_differences(),
            "failures": self.failures(),
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(plain_json(self.as_dict()), indent=1) + "\n", encoding="utf-8")

    def table(self) -> list[tuple[str, ...]]:
        """A heading and one row per leg: steps, losses, largest differences in the leg, its hop, sizes and seconds."""
        to_fp32, to_fp64 = self.differences("relay_fp32"), self.differences("relay_fp64")
        curves = self.curves()
        rows = []
        for leg in self.legs:
            own = slice(leg.first_step, leg.first_step + len(leg.losses))
            rows.append(
                {
                    "leg": ", ".join([leg.title, *leg.precision]),
                    "steps": f"{own.start}-{own.stop - 1}",
                    "first loss": f"{leg.losses[0]:.5f}",
                    "last loss": f"{leg.losses[-1]:.5f}",
                    "vs fp32": f"{max(to_fp32[own]):.1e}",
                    "vs fp64": f"{max(to_fp64[own]):.1e}",
                    "curve": curves.verdict_between(own.start, own.stop),
                    "hop ULP": "-" if leg.hop is None else str(leg.hop.max_ulp),
                    "MB": f"{leg.checkpoint_bytes / 1e6:.1f}",
                    "hop s": "-" if leg.hop is None else f"{leg.hop.seconds:.1f}",
                    "leg s": f"{leg.seconds:.1f}",
                }
            )
        return [tuple(rows[0]), *(tuple(row.values()) for row in rows)]

    def __repr__(self) -> str:
        verdict = "good" if self.good else f"not good, {self.failures()[0]}"
        return f"<RelayReport: {verdict}, {len(self.legs)} legs, {len(self.losses)} steps>"

    def summary(self) -> str:
        """The meaning of the table's columns, and the distance of each fp32 run from float64."""
        hops = [leg.hop for leg in self.legs if leg.hop is not None]
        tensors = f" over {hops[0].tensors} tensors" if hops else ""
        return (
            "vs fp32, vs fp64: largest relative loss difference from the run that never hopped. curve: are the leg's "
            "losses the same experiment as the fp32 run's? hop ULP: largest distance of the converted state"
            f"{tensors}. MB: the leg's checkpoint.\n"
            f"Distance to float64: relay {max(self.differences('relay_fp64')):.1e}, "
            f"fp32 reference {max(self.differences('fp32_fp64')):.1e}"
            + (f", ratio {self.closeness:.2f}.\n" if self.all_fp32 else ".\n")
            + self.curves().summary()
        )
