"""Machines to compile for without having them, by name: ``h100:64`` is 64 GPUs, ``v5e:4x4`` a slice of 16 TPUs.

A host has up to 8 GPUs, and more GPUs fill whole hosts. The axes of a TPU slice are those of its torus, in chips.
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from bridge.planning.models.errors import PlanError

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
    """Facts about a GPU, for XLA's compiler on a machine without GPUs.

    ``memory``, ``l2_cache``, ``shared_memory`` (per core) in bytes; ``bandwidth`` in bytes per second.
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
HOST = 8
"""The most GPUs of a host."""
TPUS = MACHINES["tpu"]
EXAMPLES = "h100:8, b200:64, v5e:4x4 or v5p:4x4x4"


@dataclass(frozen=True)
class Target:
    """``kind``: of its devices, such as "h100". ``platform``: "gpu" or "tpu". ``memory``: bytes of a device.

    ``topology``: the compiler's name for it; for GPUs slices x hosts x devices of a host.
    """

    name: str
    kind: str
    platform: str
    topology: str
    devices: int
    memory: int


def target_named(name: str) -> Target:
    """Raises ``PlanError`` for a name that is no target, with what was expected."""
    kind, colon, size = name.strip().lower().partition(":")
    if not colon or kind not in (*CARDS, *TPUS):
        raise PlanError(
            f"target: expected GPUs {'|'.join(CARDS)}:N or TPUs {'|'.join(TPUS)}:AxB[xC], such as {EXAMPLES}, got "
            f"{name!r}"
        )
    return _gpus(kind, size, name) if kind in CARDS else _tpus(kind, size, name)


def targets_named(names: str) -> tuple[Target, ...]:
    """``"h100:8,v5e:4x4"``: targets, each once. Raises ``PlanError`` otherwise."""
    return tuple(dict.fromkeys(map(target_named, names.split(","))))


def _gpus(kind: str, size: str, name: str) -> Target:
    count = int(size) if re.fullmatch(r"[1-9][0-9]{0,5}", size) else 0
    if not count or (count > HOST and count % HOST):
        raise PlanError(
            f"target {name}: expected a number of GPUs, up to {HOST} on one host or a multiple of {HOST}, such as "
            f"{kind}:8 or {kind}:64, got {size!r}"
        )
    hosts = max(1, count // HOST)
    return Target(f"{kind}:{count}", kind, "gpu", f"1x{hosts}x{count // hosts}", count, CARDS[kind].memory)


def _tpus(kind: str, size: str, name: str) -> Target:
    axes = TPUS[kind]["links"]["axes"]
    if not re.fullmatch("x".join([r"[1-9][0-9]{0,2}"] * axes), size):
        raise PlanError(
            f"target {name}: expected {axes} sizes of a slice of {kind} in chips, such as "
            f"{kind}:{'x'.join(['4'] * axes)}, got {size!r}"
        )
    count = math.prod(map(int, size.split("x")))
    return Target(f"{kind}:{size}", kind, "tpu", f"{kind}:{size}", count, TPUS[kind]["memory"])
