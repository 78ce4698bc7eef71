"""The limits of a device by its maker's data sheet: products, memory, links. ``HARDWARE`` has them by name.

``machines.toml`` has the numbers and their sources. ``Machine`` tells the least time that a collective takes on links.

On a ring of ``n`` devices an all-gather of ``B`` bytes brings ``B (n - 1) / n`` to every device; a reduce-scatter takes
as long, and an all-reduce as long as both.

* GPUs of one host receive these bytes over NVLink. In a group that spans hosts, ``r`` GPUs of a host each bring in the
  ``r``-th part by their own adapters, on as many rings, and share it by NVLink: ``min(inside, r between)`` bytes/s.
* A chip of a TPU torus receives from two neighbours on each axis of its group at once: ``2 link`` bytes per second and
  axis, or ``link`` if the axis is a line, whose ends have one neighbour.

Latency is ignored: many small transfers take longer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from bridge.compiling.machines.targets import CARDS, MACHINES, target_named
from bridge.core.hlo.collectives import Transfer
from bridge.planning.models.errors import PlanError


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
    """One device. ``peaks``: flop/s of dense matrix products by class (``product_flops`` in ``timing/program.py``).

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

# To gather or to scatter, a ring passes each part around once; a sum does both, one after the other.
_TIMES_AROUND = {"all_gather": 1, "reduce_scatter": 1, "psum": 2}


@dataclass(frozen=True)
class Machine:
    """``sizes``: the number of GPUs, or a TPU slice's axes in chips.

    Devices are numbered host by host, and on a torus along its first axis first, as JAX lists them.
    """

    hardware: Hardware
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        axes = self.hardware.links.axes if isinstance(self.hardware.links, Torus) else 1
        if len(self.sizes) != axes or min(self.sizes) < 1:
            raise PlanError(
                f"{self.hardware.name}: expected {axes} sizes of at least 1, got {'x'.join(map(str, self.sizes))}"
            )

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)


def machine_named(name: str) -> Machine:
    """A target's machine, such as ``"h100:64"`` or ``"v5e:4x4"``. Raises ``PlanError`` as ``target_named`` does."""
    target = target_named(name)
    sizes = target.name.partition(":")[2].split("x")
    return Machine(HARDWARE[target.kind], tuple(map(int, sizes)))


def seconds_on_links(transfer: Transfer, machine: Machine) -> float:
    """The seconds at the links' peak. Raises ``ValueError`` for devices that the machine lacks."""
    if not transfer.groups:
        return 0.0
    highest = max(max(group) for group in transfer.groups)
    if highest >= machine.devices:
        raise ValueError(
            f"expected a program for {machine.devices} devices, as the machine has, got a {transfer.kind} with "
            f"device {highest}"
        )
    links = machine.hardware.links
    if isinstance(links, Fabric):
        return max(_on_fabric(transfer, group, links) for group in transfer.groups)
    return max(_on_torus(transfer, group, links, machine.sizes) for group in transfer.groups)


def _on_fabric(transfer: Transfer, group: tuple[int, ...], links: Fabric) -> float:
    members, hosts = len(group), Counter(device // links.host for device in group)
    if len(set(group)) < 2:
        return 0.0
    if transfer.kind == "ppermute":
        return transfer.bytes / (links.inside if len(hosts) == 1 else links.between)
    fewest = min(hosts.values())
    if transfer.kind == "all_to_all":
        outside = transfer.bytes * (members - fewest) / members / links.between if len(hosts) > 1 else 0.0
        return max(transfer.bytes * (members - 1) / members / links.inside, outside)
    rate = links.inside if len(hosts) == 1 else min(links.inside, fewest * links.between)
    return _TIMES_AROUND[transfer.kind] * transfer.bytes * (members - 1) / members / rate


def _on_torus(transfer: Transfer, group: tuple[int, ...], links: Torus, sizes: tuple[int, ...]) -> float:
    places = [_coordinates(device, sizes) for device in group]
    lengths = [len({position[axis] for position in places}) for axis in range(len(sizes))]
    # A part of an axis is a line, even if the whole axis is a ring.
    rates = [
        links.link * (2 if ring and length == size else 1)
        for length, size, ring in zip(lengths, sizes, links.rings(sizes), strict=True)
        if length > 1
    ]
    members = len(group)
    if not rates:
        return 0.0
    if transfer.kind == "ppermute":
        return transfer.bytes / links.link
    if transfer.kind == "all_to_all":
        # Pieces travel at most half the ring, a quarter on average, on the longest axis, both ways.
        return transfer.bytes * max(lengths) / 4 / min(rates)
    return _TIMES_AROUND[transfer.kind] * transfer.bytes * (members - 1) / members / sum(rates)


def _coordinates(device: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    coordinates = []
    for size in sizes:
        device, coordinate = divmod(device, size)
        coordinates.append(coordinate)
    return tuple(coordinates)
