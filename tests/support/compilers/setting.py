"""Settings to compile, and the results. This file imports no JAX: both cross processes as JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from bridge.core.hlo.collectives import KINDS
from jax_impl.diagnostics.scheduled import Array, Scheduled

BY_HAND, BY_HAND_XLA, SHARD_MAP, PJIT = "by hand", "by hand, gathers left to XLA", "shard_map", "pjit"
CONTESTANTS = (BY_HAND, BY_HAND_XLA, SHARD_MAP, PJIT)
SIZES: dict[str, dict[str, int]] = {
    # Compiles in seconds, also for TPUs. No size is a multiple of another.
    "37": {
        "vocab_size": 199,
        "d_model": 37,
        "n_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_dim": 18,
        "d_ff": 91,
    },
    # The sizes of the relay "quick".
    "quick": {
        "vocab_size": 257,
        "d_model": 37,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 6,
        "d_ff": 53,
    },
    # The shipped decoder's sizes, without a common divisor.
    "331": {"n_layers": 2},
    "256": {
        "vocab_size": 1024,
        "d_model": 256,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 4,
        "head_dim": 64,
        "d_ff": 768,
    },
    "512": {
        "vocab_size": 32000,
        "d_model": 512,
        "n_layers": 2,
        "n_heads": 8,
        "n_kv_heads": 8,
        "head_dim": 64,
        "d_ff": 1536,
    },
    "1024": {
        "vocab_size": 32000,
        "d_model": 1024,
        "n_layers": 4,
        "n_heads": 16,
        "n_kv_heads": 16,
        "head_dim": 64,
        "d_ff": 3072,
    },
    "Llama-3-8B": {
        "vocab_size": 128256,
        "d_model": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 14336,
        "rope_theta": 500000,
    },
}
"""Fields of ``DecoderConfig``."""
SIZES["256x12"] = {**SIZES["256"], "n_layers": 12}
SIZES["1024x6"] = {**SIZES["1024"], "n_layers": 6, "vocab_size": 4096}
SIZES["1024x12"], SIZES["1024x48"] = ({**SIZES["1024"], "n_layers": n} for n in (12, 48))

_FLAGS = ("stacked", "recompute", "recommended", "forward", "products")


@dataclass(frozen=True)
class Setting:
    """The gradients of one step, ``rows`` rows of ``length`` tokens for each device and microbatch.

    ``inner``: devices of the inner of two data-parallel axes; 0 for one axis. ``tensors``: of a model axis, which cuts
    heads and features of the layers; 0 for none. ``align``: of layouts. ``recommended``: with XLA's
    options for overlap. ``prefetch``: of an engine. ``forward``: the loss alone, without gradients. ``gather``: a
    float8 format; ``products``: whether projections multiply in float8.

    ``offload``: the share of the moments in the host's memory, for the update of a step instead of its gradients; None
    for those. ``weights_on_host``: whether the weights are there, too. ``update``: what computes it,
    see ``jax_impl.Offload``: gradients go to the host's memory for the host. ``moments``: their dtypes.
    """

    target: str
    contestant: str
    size: str = "256"
    stacked: bool = False
    recompute: bool = False
    strategy: str = "optim_grads_params"
    inner: int = 0
    microbatches: int = 1
    dtype: str = "float32"
    units: tuple[str, ...] = ()
    rows: int = 2
    length: int = 128
    recommended: bool = False
    prefetch: int | None = None
    forward: bool = False
    align: int | Literal["auto"] = "auto"
    tensors: int = 0
    offload: float | None = None
    weights_on_host: bool = False
    update: Literal["device", "host"] = "device"
    moments: tuple[str, str] = ("float32", "float32")
    gather: str | None = None
    products: bool = False

    def __str__(self) -> str:
        flags = [name for name in _FLAGS if getattr(self, name)]
        parts = [self.target, self.contestant, self.size, self.strategy, f"k{self.microbatches}", *flags]
        parts += ["units"] if self.units else []
        parts += [] if self.prefetch is None else [f"prefetch{self.prefetch}"]
        parts += [f"tensors{self.tensors}"] if self.tensors else []
        parts += [] if self.gather is None else [self.gather]
        parts += [] if self.align == "auto" else [f"align{self.align}"]
        parts += [] if self.offload is None else [f"offload{self.offload:g}", *self.moments]
        parts += ["weights"] if self.weights_on_host else []
        parts += ["by-host"] if self.update == "host" else []
        return "-".join(parts).replace(" ", "_")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Stored:
    """An array that a plan keeps: ``size`` elements in each of ``layers`` (1 without a stack); ``cut`` over devices.

    If model axes cut the array, ``size`` is the size of one part.
    """

    name: str
    size: int
    layers: int
    cut: bool


@dataclass(frozen=True)
class Transfer:
    """A transfer of ``bytes`` between host memory and device memory; to the device if ``into``.

    ``computes``: whether some of an update runs while it is under way; ``against``: whether one the other way does.
    """

    into: bool
    bytes: int
    computes: bool
    against: bool


@dataclass(frozen=True)
class Compiled:
    """``temporary``: bytes on one device. ``stored``: of a plan. ``shards``: of each mesh axis, innermost first.

    ``products``: cuBLAS's of float8 numbers.

    ``arguments``, ``host``: bytes of arguments on the device and in the host's memory; ``results``: on the device.

    Of an update: ``travelling``: bytes of each key of ``host``; ``by_host``: how many programs the host runs.
    """

    seconds: float
    temporary: int
    collectives: tuple[Scheduled, ...]
    stored: tuple[Stored, ...] = ()
    shards: tuple[int, ...] = ()
    arguments: int = 0
    host: int = 0
    travelling: tuple[int, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    products: int = 0
    by_host: int = 0
    results: int = 0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(record: dict[str, Any]) -> Compiled:
        collectives = tuple(
            Scheduled(**{**collective, "arrays": tuple(Array(*array) for array in collective["arrays"])})
            for collective in record["collectives"]
        )
        stored = tuple(Stored(**entry) for entry in record["stored"])
        return Compiled(
            record["seconds"],
            record["temporary"],
            collectives,
            stored,
            tuple(record["shards"]),
            record["arguments"],
            record["host"],
            tuple(record["travelling"]),
            tuple(Transfer(**transfer) for transfer in record["transfers"]),
            record["products"],
            record["by_host"],
            record["results"],
        )

    def sizes(self) -> Counter[tuple[str, int]]:
        """How often arrays travel, by kind and number of elements, without scalars."""
        counts: Counter[tuple[str, int]] = Counter()
        for collective in self.collectives:
            for array in collective.arrays:
                if array.size > 1:
                    counts[collective.kind, array.size] += collective.times
        return counts

    def bytes(self, *names: str) -> int:
        return sum(collective.bytes for collective in self.collectives if collective.kind in names)

    def overlap(self, *names: str) -> float:
        return overlap_share(self.collectives, names)


def overlap_share(collectives: Iterable[Scheduled], names: Iterable[str] = KINDS.values()) -> float:
    """The share of bytes whose collective overlaps with a matrix product; 0 without such collectives."""
    chosen = set(names)
    known = [collective for collective in collectives if collective.kind in chosen]
    total = sum(collective.bytes for collective in known)
    return sum(collective.bytes for collective in known if collective.overlaps) / total if total else 0.0
