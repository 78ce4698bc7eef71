"""The limits of a device by its maker's data sheet: products, memory, links. ``HARDWARE`` has them by name.

Sources; for GPUs, their makers' figures for SXM cards without sparsity:

* a100: NVIDIA's A100 80GB data sheet as at glennklockwood.com/garden/processors/A100; one 200 Gb/s adapter per GPU, as
  in a DGX A100.
* h100, h200: NVIDIA's data sheets as at glennklockwood.com/garden/processors/h100; one
  400 Gb/s adapter per GPU, as in a DGX H100.
* b200: an eighth of NVIDIA's HGX B200, as at hmc-tech.com/gpus/nvidia-b200-vs-nvidia-gb200; one 400 Gb/s
  adapter per GPU, as in a DGX B200.
* v4, v5e, v5p, v6e: the tables of jax-ml.github.io/scaling-book/tpus, for a chip, which is one device.

Bandwidths of GPU memory come from XLA's own descriptions of the cards (``cards.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.compiling.machines.cards import CARDS


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

    A slice's axis is a ring if its size is a multiple of ``ring``, else a line. ``cubes``: rings need such sizes on all
    axes.
    """

    link: float
    axes: int
    ring: int
    cubes: bool = False

    def rings(self, sizes: tuple[int, ...]) -> tuple[bool, ...]:
        """Which axes of a slice of ``sizes`` chips are rings."""
        whole = tuple(size % self.ring == 0 for size in sizes)
        return tuple(all(whole) for _ in sizes) if self.cubes else whole


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
    machine.name: machine
    for machine in (
        # Ampere has no float8: XLA widens it.
        Hardware("a100", _gpu(312, 312, 624, 156, 19.5, 19.5), CARDS["a100"].bandwidth, Fabric(300e9, 25e9)),
        Hardware(
            "h100",
            _gpu(989.4, 1978.9, 1978.9, 494.7, 66.9, 66.9),
            CARDS["h100"].bandwidth,
            Fabric(450e9, 50e9),
        ),
        Hardware(
            "h200",
            _gpu(989.4, 1978.9, 1978.9, 494.7, 66.9, 66.9),
            CARDS["h200"].bandwidth,
            Fabric(450e9, 50e9),
        ),
        Hardware("b200", _gpu(2250, 4500, 4500, 1125, 75, 37), CARDS["b200"].bandwidth, Fabric(900e9, 50e9)),
        # A cube of 4 x 4 x 4 chips is the smallest slice whose links close its rings.
        Hardware("v4", _tpu(2.75e14, 2.75e14), 1.2e12, Torus(4.5e10, 3, 4, cubes=True)),
        Hardware("v5p", _tpu(4.59e14, 9.18e14), 2.8e12, Torus(9e10, 3, 4, cubes=True)),
        # Only the full length of a pod of 16 x 16 chips is a ring.
        Hardware("v5e", _tpu(1.97e14, 3.94e14), 8.1e11, Torus(4.5e10, 2, 16)),
        Hardware("v6e", _tpu(9.20e14, 1.84e15), 1.6e12, Torus(9e10, 2, 16)),
    )
}
