"""The limits of a device by its maker's data sheet: products, memory, links. ``HARDWARE`` has them by name.

``machines.toml`` has the numbers and their sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.compiling.machines.cards import CARDS, MACHINES


@dataclass(frozen=True)
class Fabric:
    """Links of GPUs, in bytes per second and direction of one device.

    ``inside``: NVLink, through switches to all GPUs of the host. ``between``: its own network adapter to other hosts.
    """

    inside: float
    between: float
    host: int = 8


@dataclass(frozen=True)
class Torus:
    """Links of TPUs: ``link`` bytes per second and direction to each of two neighbours on each of ``axes`` axes.

    A slice's axis is a ring if its size is a multiple of ``ring``, else a line. ``cubes``: rings need all sizes so.
    """

    link: float
    axes: int
    ring: int
    cubes: bool = False

    def rings(self, sizes: tuple[int, ...]) -> tuple[bool, ...]:
        """Which axes of a slice of ``sizes`` chips are rings."""
        whole = tuple(size % self.ring == 0 for size in sizes)
        return (all(whole),) * len(sizes) if self.cubes else whole


@dataclass(frozen=True)
class Hardware:
    """One device. ``peaks``: flop/s of dense matrix products by class (``products.py``).

    ``bandwidth``: of its main memory, in bytes per second. The target gives the size of the memory (``targets.py``).
    """

    name: str
    peaks: Mapping[str, float]
    bandwidth: float
    links: Fabric | Torus

    def peak(self, dtype: str) -> float:
        """Raises ``ValueError`` for a class without a peak."""
        if dtype not in self.peaks:
            raise ValueError(
                f"{self.name}: expected matrix products in {', '.join(self.peaks)}, whose peaks are known, got {dtype}"
            )
        return self.peaks[dtype]


def _gpu(bf16: float, f8: float, s8: float, tf32: float, f32: float, f64: float) -> dict[str, float]:
    """From Tflop/s. XLA uses TF32 below the highest precision, and no tensor core at the highest."""
    rates = {"bf16": bf16, "f8": f8, "s8": s8, "f32": tf32, "f32_high": tf32, "f32_highest": f32, "f64": f64}
    return {dtype: value * 1e12 for dtype, value in rates.items()}


def _tpu(bf16: float, s8: float) -> dict[str, float]:
    """From flop/s. float32 takes 1, 3 or 6 passes in bfloat16, by precision; float8 is widened to bfloat16."""
    return {"bf16": bf16, "f8": bf16, "s8": s8, "f32": bf16, "f32_high": bf16 / 3, "f32_highest": bf16 / 6}


HARDWARE = {
    name: Hardware(name, _gpu(**table["tflops"]), CARDS[name].bandwidth, Fabric(**table["links"]))
    for name, table in MACHINES["gpu"].items()
} | {
    name: Hardware(name, _tpu(**table["flops"]), table["bandwidth"], Torus(**table["links"]))
    for name, table in MACHINES["tpu"].items()
}
