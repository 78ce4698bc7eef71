"""GPU descriptions for XLA's compiler on a machine without GPUs: facts about a card as a ``GpuTargetConfigProto``.

Source of the facts: ``xla/backends/gpu/target_config/specs`` of XLA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


_H100 = Card(
    description="NVIDIA H100 80GB HBM3",
    capability=9,
    cores=132,
    fpus_per_core=128,
    clock_ghz=1.98,
    bandwidth=3_352_320_000_000,
    l2_cache=52_428_800,
    memory=84_942_979_072,
    shared_memory=233_472,
    shared_memory_optin=232_448,
)
# The same chip with more memory.
_H200 = replace(
    _H100, description="NVIDIA H200 141GB HBM3e", bandwidth=4_800_000_000_000, memory=151_397_597_184
)

CARDS = {
    "a100": Card(
        description="NVIDIA A100-SXM4-80GB",
        capability=8,
        cores=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        bandwidth=2_039_040_000_000,
        l2_cache=41_943_040,
        memory=85_100_068_864,
        shared_memory=167_936,
        shared_memory_optin=166_912,
    ),
    "h100": _H100,
    "h200": _H200,
    "b200": Card(
        description="NVIDIA B200",
        capability=10,
        cores=148,
        fpus_per_core=128,
        clock_ghz=1.965,
        bandwidth=7_672_320_000_000,
        l2_cache=132_644_864,
        memory=191_514_411_008,
        shared_memory=233_472,
        shared_memory_optin=232_448,
    ),
}
"""Cards by their name in a target."""
