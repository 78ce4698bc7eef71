"""XLA's compilers for GPUs and TPUs: where they are installed, and the environment of a process that compiles.

No device is needed. The GPU plugin needs a description of the card, the TPU library only a topology's name. Both read
their settings when JAX starts, so a process serves only one of the two (``leg_process.py``).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from bridge.compiling.machines.targets import CARDS, Target
from bridge.core.extras import install_advice, installed_versions
from bridge.planning.models.errors import PlanError

VARIABLE = "TWINSHARD_COMPILERS"
"""The variable that names a folder with the compilers."""
FOLDER = Path(__file__).parents[3] / ".venv" / "compilers"
"""Where ``make compilers`` puts them: outside the environment, in which JAX would look for their devices."""

_PACKAGES = {
    "gpu": {
        "jax_plugins.xla_cuda12": "jax-cuda12-plugin, jax-cuda12-pjrt",
        "nvidia.cuda_nvcc": "nvidia-cuda-nvcc-cu12",
    },
    "tpu": {"libtpu": "libtpu"},
}
# Without a card XLA cannot autotune, and the Triton products among which it would choose fail for odd sizes.
_GPU_ALWAYS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
RECOMMENDED = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
}
"""XLA's options that let its GPU scheduler overlap transfers with computation; they are off by default."""


def folders() -> list[Path]:
    """Folders in addition to ``sys.path`` that may contain compilers. ``PlanError`` if the variable names no folder."""
    named = os.environ.get(VARIABLE)
    if named and not Path(named).is_dir():
        raise PlanError(f"{VARIABLE}: expected a folder with compilers, got {named!r}")
    return [*([Path(named)] if named else []), FOLDER]


def why_not(platform: str) -> str | None:
    """Why this machine cannot compile for ``platform``, "gpu" or "tpu"; None if it can."""
    searched = [*map(Path, sys.path), *folders()]
    missing = [
        packages
        for module, packages in _PACKAGES[platform].items()
        # No import system: a namespace package such as nvidia may lie in several folders.
        if not any(Path(folder, *module.split(".")).is_dir() for folder in searched)
    ]
    if missing:
        return (
            f"the {platform.upper()} compiler is not installed ({', '.join(missing)}): make compilers in a clone of "
            f"Twinshard, or set {VARIABLE} to a folder that has it, or {install_advice(f'{platform}-compiler')}"
        )
    return None


def environment(platform: str) -> dict[str, str]:
    """The environment of a process that compiles for ``platform``: this one's, without settings for simulation."""
    kept = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    path = [kept.get("PYTHONPATH"), *map(str, folders())]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        # Otherwise libtpu asks the metadata server of a cloud, although this machine may not be in one.
        **({"TPU_SKIP_MDS_QUERY": "1"} if platform == "tpu" else {}),
    }


def devices_of(target: Target) -> list[Any]:
    """The target's devices, to build a mesh; call it in a process with ``environment(target.platform)``.

    Raises ``PlanError`` if the compiler knows no such machine.
    """
    from jax.errors import JaxRuntimeError
    from jax.experimental import topologies

    platform = "cuda" if target.platform == "gpu" else "tpu"
    # A v4 chip has two cores, which act as one device.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if target.kind == "v4" else {}
    try:
        if platform == "cuda":
            from jax._src import xla_bridge

            # JAX looks for plugins when it first needs a device; a topology does not need one.
            xla_bridge.discover_pjrt_plugins()
            options = {"topology": target.topology, "target_config": CARDS[target.kind].proto()}
        topology = topologies.get_topology_desc(target.topology, platform, **options).devices
    except JaxRuntimeError as error:
        if "lockfile" in str(error):
            raise
        reason = re.sub(r"\s+", " ", str(error))[:300]
        raise PlanError(f"target {target.name}: the compiler knows no such machine: {reason}") from error
    if len(topology) != target.devices:
        raise PlanError(
            f"target {target.name}: expected {target.devices} devices, the compiler has {len(topology)}"
        )
    return list(topology)


def options_of(target: Target, recommended: bool = False) -> dict[str, Any]:
    """``compiler_options`` of a compilation: XLA's defaults, or the recommendations for steps that shard weights."""
    if target.platform == "tpu":
        return {}
    return {**_GPU_ALWAYS, **(RECOMMENDED if recommended else {})}


def versions(platform: str) -> dict[str, str]:
    """Versions of JAX and the compiler, by package."""
    own = {"gpu": ("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12"), "tpu": ("libtpu",)}[platform]
    names = ("jax", "jaxlib", *own)
    return {**dict.fromkeys(names, "unknown"), **installed_versions(*names)}
