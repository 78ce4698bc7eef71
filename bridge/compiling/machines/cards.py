"""GPU descriptions for XLA's compiler on a machine without GPUs: facts about a card as a ``GpuTargetConfigProto``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

# The same for all cards, except the placeholders.
_PROTO = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared_memory_optin}
  shared_memory_per_core: {shared_memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {cores} fpus_per_core: {fpus_per_core} clock_rate_ghz: {clock_ghz}
  memory_bandwidth: {bandwidth} l2_cache_size: {l2_cache} device_memory_size: {memory}
  cuda_compute_capability {{ major: {capability} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{description}"
"""


@dataclass(frozen=True)
class Card:
    """``memory``, ``l2_cache``, ``shared_memory`` (per core) in bytes; ``bandwidth`` in bytes per second.

    ``shared_memory_optin``: bytes that a block may request. ``capability``: the major compute capability of CUDA.
    """

    description: str
    capability: int
    cores: int
    fpus_per_core: int
    clock_ghz: float
    bandwidth: int
    l2_cache: int
    memory: int
    shared_memory: int
    shared_memory_optin: int

    def proto(self) -> str:
        """The text of a ``GpuTargetConfigProto``."""
        return _PROTO.format(**vars(self))


MACHINES = tomllib.loads(Path(__file__).with_name("machines.toml").read_text(encoding="utf-8"))
CARDS = {
    name: Card(**{known.name: table[known.name] for known in fields(Card)})
    for name, table in MACHINES["gpu"].items()
}
"""Cards by their name in a target."""
