"""Settings of the JAX benchmark: model, batch and devices. This file imports no JAX: a setting crosses processes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

BASELINE, SHARD_MAP, PJIT, BASELINE_XLA = "baseline", "shard_map", "pjit", "baseline_xla"
NAMES = {
    BASELINE: "by hand",
    SHARD_MAP: "shard_map engine",
    PJIT: "pjit engine",
    BASELINE_XLA: "by hand, gathers left to XLA",
}
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 64,
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 2,
        "head_dim": 16,
        "d_ff": 64,
    },
    "5M": {
        "vocab_size": 1024,
        "d_model": 256,
        "n_layers": 6,
        "n_heads": 4,
        "n_kv_heads": 4,
        "head_dim": 64,
        "d_ff": 672,
    },
    "26M": {
        "vocab_size": 1024,
        "d_model": 512,
        "n_layers": 8,
        "n_heads": 8,
        "n_kv_heads": 8,
        "head_dim": 64,
        "d_ff": 1360,
    },
}
"""Fields of ``DecoderConfig``. 8 devices divide a dimension of each weight, as ``NamedSharding`` needs."""


@dataclass(frozen=True)
class Setting:
    """``rows``: rows of a step over all devices. ``length``: tokens of a row.

    ``stacked``: layers are scanned instead of unrolled. ``simulated``: devices are CPU threads instead of real devices.
    """

    devices: int
    dtype: str = "float32"
    stacked: bool = True
    recompute: bool = False
    strategy: str = "optim_grads_params"
    size: str = "5M"
    rows: int = 8
    length: int = 256
    simulated: bool = True

    def __post_init__(self) -> None:
        if self.rows % self.devices:
            raise ValueError(
                f"rows: expected a multiple of the number of devices, {self.devices}, got {self.rows}"
            )

    @property
    def where(self) -> str:
        """A short name that distinguishes this setting from the other settings of a run."""
        parts = [f"{self.devices} devices", self.dtype, "scan" if self.stacked else "unrolled"]
        return ", ".join([*parts, "recompute"] if self.recompute else parts)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
