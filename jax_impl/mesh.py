"""The data-parallel mesh axis, and simulated devices to try it on."""

from __future__ import annotations

import os
import warnings

import jax
import numpy as np
from jax._src import xla_bridge
from jax.sharding import AxisType, Mesh

AXIS = "dp"

# Barriers keep the order in which the strategies gather and free; by default the CPU compiler deletes them.
_SIMULATOR_FLAGS = (
    "--xla_disable_hlo_passes=cse_barrier_expander",
    "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
)


def simulate_devices(count: int) -> None:
    """Make JAX show ``count`` CPU devices; call before anything that touches ``jax.devices()``.

    Sets ``XLA_FLAGS`` and JAX's platform. XLA reads its flags once, so this raises ``ValueError`` when JAX already
    runs without them or with fewer CPU devices; no setting is changed then.
    """
    if count < 1:
        raise ValueError(f"expected a device count >= 1, got {count}")
    given = os.environ.get("XLA_FLAGS", "").split()
    missing: list[str] = []
    if _backend_runs():
        missing = [flag for flag in _SIMULATOR_FLAGS if flag not in given]
    else:
        ours = (f"--xla_force_host_platform_device_count={count}", *_SIMULATOR_FLAGS)
        kept = [flag for flag in given if not _overrides(ours, flag)]
        os.environ["XLA_FLAGS"] = " ".join([*kept, *ours])
        jax.config.update("jax_platforms", "cpu")
    found = sum(device.platform == "cpu" for device in jax.devices())
    if missing or found < count:
        without = f" and without {' '.join(missing)}" if missing else ""
        raise ValueError(
            f"expected JAX not to be in use before {count} devices are simulated, but it already runs with {found} CPU "
            f"devices{without}: call simulate_devices before anything that touches jax.devices()"
        )


def _backend_runs() -> bool:
    # JAX has no public way to ask this that does not start the backend.
    return bool(xla_bridge.backends_are_initialized())


def _overrides(ours: tuple[str, ...], flag: str) -> bool:
    return any(flag.split("=")[0] == own.split("=")[0] for own in ours)


def data_parallel_mesh(num_devices: int | None = None) -> Mesh:
    """A mesh with one axis ``"dp"`` over the first ``num_devices`` devices (default: all).

    Raises ``ValueError`` when there are fewer.
    """
    devices = jax.devices()
    count = len(devices) if num_devices is None else num_devices
    if not 1 <= count <= len(devices):
        raise ValueError(
            f"expected 1 to {len(devices)} devices (what JAX sees on {devices[0].platform}), got {count}; "
            "simulate_devices(n) provides n simulated CPU devices"
        )
    return Mesh(np.array(devices[:count]), (AXIS,), axis_types=(AxisType.Auto,))


def checked_mesh(mesh: Mesh) -> Mesh:
    """The same devices as an automatically typed mesh; raises ``ValueError`` unless its only axis is ``"dp"``."""
    if mesh.axis_names != (AXIS,):
        hint = "; two data-parallel axes (hsdp, hfsdp) are not available" if len(mesh.axis_names) > 1 else ""
        raise ValueError(f"expected a mesh with the single axis {AXIS!r}, got axes {mesh.axis_names}{hint}")
    if (
        mesh.devices.size > 1
        and is_simulated(mesh)
        and "cse_barrier_expander" not in os.environ.get("XLA_FLAGS", "")
    ):
        warnings.warn(
            "several CPU devices without the XLA flags of simulate_devices(): the compiler removes the barriers that "
            "order collectives, so steps can hang and weights stay gathered",
            RuntimeWarning,
            stacklevel=3,
        )
    # jax.make_mesh gives explicitly typed axes, on which sharded flat buffers cannot be sliced.
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,))


def is_simulated(mesh: Mesh) -> bool:
    """True on CPU devices."""
    return bool(mesh.devices.flat[0].platform == "cpu")
