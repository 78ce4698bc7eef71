"""Devices that only a compiler knows: what a target needs to be compiled for, and why that may be impossible here.

No device takes part. The GPU plugin needs a description of the card, the TPU library only a topology's name. Both read
their settings when JAX starts, so a process serves one of the two: ``worker.py``.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / ".venv" / "compilers"
"""Where ``make compilers`` puts them: apart from the environment, in which JAX would look for their devices."""

INSTALL = 'make compilers, or pip install "twinshard[compilers]"'
_PACKAGES = {
    "gpu": {
        "jax_plugins.xla_cuda12": "jax-cuda12-plugin, jax-cuda12-pjrt",
        "nvidia.cuda_nvcc": "nvidia-cuda-nvcc-cu12",
    },
    "tpu": {"libtpu": "libtpu"},
}

# Facts about the card, in the words of XLA's GpuTargetConfigProto.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84942979072
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# Without a card nothing can be tuned, and the Triton products that tuning would choose among fail for odd sizes.
_GPU_ALWAYS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
RECOMMENDED = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
}
"""XLA's options by which its GPU scheduler moves transfers beside computation; they are off by default."""


@dataclass(frozen=True)
class Target:
    """``topology``: as its compiler names it; for GPUs slices x hosts x devices of a host."""

    name: str
    platform: str
    topology: str
    devices: int


TARGETS = {
    one.name: one
    for one in (
        Target("h100:8", "gpu", "1x1x8", 8),
        Target("h100:64", "gpu", "1x8x8", 64),
        Target("v5e:4x4", "tpu", "v5e:4x4", 16),
        Target("v5p:4x4x4", "tpu", "v5p:4x4x4", 64),
    )
}


def target_named(name: str) -> Target:
    """Look a target up; ValueError for an unknown name."""
    if name not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]


def why_not(platform: str) -> str | None:
    """Why nothing can be compiled for ``platform``, "gpu" or "tpu", on this machine now; None where it can."""
    missing = [packages for module, packages in _PACKAGES[platform].items() if not _found(module)]
    if missing:
        return f"the {platform.upper()} compiler is not installed ({', '.join(missing)}): {INSTALL}"
    if platform == "tpu" and (holder := _held_lock()):
        return f"another process holds libtpu's lock, {holder}: one process at a time compiles for TPUs"
    return None


def _found(module: str) -> bool:
    # No import system: a namespace package such as nvidia may lie in several folders.
    path = Path(*module.split("."))
    return any(Path(folder, path).is_dir() for folder in [*sys.path, str(FOLDER)])


def _held_lock() -> Path | None:
    path = Path(tempfile.gettempdir(), "libtpu_lockfile")
    try:
        with path.open() as file:
            # A shared lock fails only while another process holds its exclusive one.
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except OSError:
        return path
    return None


def environment(platform: str) -> dict[str, str]:
    """Of a process that compiles for ``platform``: this one's, without what is meant for simulated devices."""
    kept = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, [kept.get("PYTHONPATH"), str(FOLDER)])),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        # Else libtpu asks the metadata server of a cloud that this machine may not be in.
        **({"TPU_SKIP_MDS_QUERY": "1"} if platform == "tpu" else {}),
    }


def devices_of(target: Target) -> list[Any]:
    """The target's devices, to build a mesh of; in a process with ``environment(target.platform)``."""
    from jax.experimental import topologies

    if target.platform == "tpu":
        found = topologies.get_topology_desc(platform="tpu", topology_name=target.topology)
    else:
        from jax._src import xla_bridge

        # JAX looks for plugins when it first needs a device; a topology needs none.
        xla_bridge.discover_pjrt_plugins()
        found = topologies.get_topology_desc(
            platform="cuda", topology_name=target.topology, topology=target.topology, target_config=_H100
        )
    return list(found.devices)


def options_of(target: Target, recommended: bool) -> dict[str, Any]:
    """``compiler_options`` of a compilation: XLA's defaults, or what is recommended for steps that shard weights."""
    if target.platform == "tpu":
        return {}
    return {**_GPU_ALWAYS, **(RECOMMENDED if recommended else {})}
