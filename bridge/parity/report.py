"""The result of a relay: what each leg and hop measured, the verdict, and its JSON and table forms."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.parity.config import RelayConfig
from bridge.text import plain_json

FP32_TOLERANCE = 1e-5
# Five times what `twinshard relay bfloat16` measured; one rounding to bfloat16 is off by up to 2 ** -9 = 2e-3.
BF16_TOLERANCE = 1e-2
CLOSENESS = 3.0
# A loss is one fp32 number: distances below one rounding of it say nothing.
ROUNDING = 2.0**-23


@dataclass(frozen=True)
class Hop:
    """One conversion between two legs; sizes in bytes.

    ``max_ulp``: the largest distance over all ``tensors``. ``same``: no bit differs, and no tensor is missing, extra or
    of another shape or dtype.
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
    """One leg's losses, one per step, and its results. ``hop``: the conversion that made its start state."""

    title: str
    precision: str
    first_step: int
    losses: tuple[float, ...]
    seconds: float
    checkpoint_bytes: int
    hop: Hop | None


def relative_differences(losses: list[float], reference: list[float]) -> list[float]:
    """``|a - b| / |b|`` for each step; infinite where a loss is NaN."""
    distances = [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)]
    return [math.inf if math.isnan(distance) else distance for distance in distances]


@dataclass(frozen=True)
class RelayReport:
    """Everything a relay measured. Losses are means over the global batch, before the step's update."""

    config: RelayConfig
    legs: tuple[LegResult, ...]
    reference_fp32: tuple[float, ...]
    reference_fp64: tuple[float, ...]
    versions: dict[str, str]

    @property
    def losses(self) -> list[float]:
        return [loss for leg in self.legs for loss in leg.losses]

    def differences(self, which: str) -> list[float]:
        """Relative loss difference a step: ``relay_fp32``, ``relay_fp64`` or ``fp32_fp64`` (reference to reference)."""
        fp32, fp64 = list(self.reference_fp32), list(self.reference_fp64)
        pairs = {
            "relay_fp32": (self.losses, fp32),
            "relay_fp64": (self.losses, fp64),
            "fp32_fp64": (fp32, fp64),
        }
        return relative_differences(*pairs[which])

    @property
    def all_fp32(self) -> bool:
        return all(leg.precision == "float32" for leg in self.legs)

    def failures(self) -> list[str]:
        """The promises of the relay that this run broke; empty when all held.

        State must cross every hop bit for bit. An all-fp32 relay must stay within ``FP32_TOLERANCE`` of the fp32
        reference at every step, and its largest distance from float64 over that reference's must lie between
        ``1 / CLOSENESS`` and ``CLOSENESS``. The lower bound holds too, since a relay much closer to float64 than the
        fp32 reference did not compute in fp32. From the first bfloat16 leg on the relay must stay within
        ``BF16_TOLERANCE`` of the fp32 reference. The references must differ from each other, or one of them was not
        computed in its precision.
        """
        found = [
            f"hop to leg {n}: expected the same {leg.hop.tensors} tensors to the bit on both sides, got "
            f"{leg.hop.max_ulp} ULP{'' if leg.hop.max_ulp else ' but other tensors'}"
            for n, leg in enumerate(self.legs, 1)
            if leg.hop is not None and not (leg.hop.same and leg.hop.max_ulp == 0)
        ]
        if not any(self.differences("fp32_fp64")):
            found.append("references: expected float64 losses that differ from the fp32 ones, got the same")
        differences = self.differences("relay_fp32")
        low = [leg.first_step for leg in self.legs if leg.precision != "float32"]
        split = min(low, default=len(differences))
        for part, tolerance in ((differences[:split], FP32_TOLERANCE), (differences[split:], BF16_TOLERANCE)):
            worst = max(part, default=0.0)
            if worst > tolerance:
                found.append(f"loss: expected within {tolerance:g} of the fp32 reference, got {worst:.2e}")
        if self.all_fp32:
            ratio = self.closeness
            if not 1 / CLOSENESS <= ratio <= CLOSENESS:
                found.append(
                    f"distance to float64: expected within a factor of {CLOSENESS:g}, got {ratio:.2f}"
                )
        return found

    @property
    def closeness(self) -> float:
        """Largest distance to float64 of the relay over that of the fp32 reference, both at least ``ROUNDING``."""
        relay, reference = (max(ROUNDING, *self.differences(name)) for name in ("relay_fp64", "fp32_fp64"))
        return relay / reference

    def as_dict(self) -> dict[str, Any]:
        differences = {name: self.differences(name) for name in ("relay_fp32", "relay_fp64", "fp32_fp64")}
        return {
            **dataclasses.asdict(self),
            "differences": differences,
            "largest_differences": {name: max(values) for name, values in differences.items()},
            "closeness_to_fp64": self.closeness,
            "failures": self.failures(),
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(plain_json(self.as_dict()), indent=1) + "\n", encoding="utf-8")

    def table(self) -> list[tuple[str, ...]]:
        """A heading and one row a leg: steps, losses, largest differences in the leg, its hop, sizes and seconds."""
        heading = (
            "leg",
            "steps",
            "first loss",
            "last loss",
            "vs fp32",
            "vs fp64",
            "hop ULP",
            "MB",
            "hop s",
            "leg s",
        )
        to_fp32, to_fp64 = self.differences("relay_fp32"), self.differences("relay_fp64")
        rows: list[tuple[str, ...]] = [heading]
        for leg in self.legs:
            own = slice(leg.first_step, leg.first_step + len(leg.losses))
            title = leg.title if leg.precision == "float32" else f"{leg.title} {leg.precision}"
            steps = f"{own.start}-{own.stop - 1}"
            losses = (f"{leg.losses[0]:.5f}", f"{leg.losses[-1]:.5f}")
            differences = (f"{max(to_fp32[own]):.1e}", f"{max(to_fp64[own]):.1e}")
            hop = ("-", "-") if leg.hop is None else (str(leg.hop.max_ulp), f"{leg.hop.seconds:.1f}")
            size = f"{leg.checkpoint_bytes / 1e6:.1f}"
            rows.append((title, steps, *losses, *differences, hop[0], size, hop[1], f"{leg.seconds:.1f}"))
        return rows

    def summary(self) -> str:
        """The meaning of the table's columns, and the distance of each fp32 run from float64."""
        hops = [leg.hop for leg in self.legs if leg.hop is not None]
        tensors = f" over {hops[0].tensors} tensors" if hops else ""
        return (
            "vs fp32, vs fp64: largest relative loss difference from the run that never hopped. "
            f"hop ULP: largest distance of the converted state{tensors}. MB: the leg's checkpoint.\n"
            f"Distance to float64: relay {max(self.differences('relay_fp64')):.1e}, "
            f"fp32 reference {max(self.differences('fp32_fp64')):.1e}"
            + (f", ratio {self.closeness:.2f}." if self.all_fp32 else ".")
        )
