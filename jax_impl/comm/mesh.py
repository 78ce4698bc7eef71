"""Meshes, the order of shards on a mesh, and simulated devices for trying meshes.

A mesh lists one or two data-parallel axes, outer to inner, and then at most two model axes. Data-parallel axes are
counted from the innermost, because tensors are sharded over the innermost ones first. At *level* a, an array is cut
over the a innermost axes; level 0 is whole. On M x N devices, shard k of level 2 is stored on the device with inner
coordinate n and outer coordinate m, k = n * M + m::

    2 x 3 devices          level 1                          level 2
    m=0:  0  1  2          |   n=0   |   n=1   |   n=2   |  |n0 m0|n0 m1|n1 m0|n1 m1|n2 m0|n2 m1|
    m=1:  3  4  5

With this order a gather over the outer axis joins neighbours, and gathers between any two levels keep the elements in
order.

A step is manual on data-parallel axes: each device has its own rows, and our code writes every collective over these
axes. On model axes the step is automatic: values look whole, and the compiler partitions the computation like the
weights and adds the necessary communication. Only the transfers of weights and gradients are manual on all axes::

                    data-parallel axes      model axes
    shard_map           manual              automatic       the user's model
      on_each           manual              manual          gathers, reductions, buffers to parameters

So a gather moves only a device's own part of a parameter, and nothing over a model axis
(``runtime/groups/cut_group.py``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import xla_bridge
from jax.sharding import AxisType, Mesh, PartitionSpec

from bridge.core.callers import warn_caller
from bridge.core.sharding.policy.mesh_axes import MODEL_AXES, is_model_axis, why_refused

AXIS = "dp"

# Barriers keep the order in which the strategies gather and free: see simulate_devices.
_SIMULATOR_FLAGS = (
    "--xla_disable_hlo_passes=cse_barrier_expander,small-while-loop-hoisting",
    "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
)


@dataclass(frozen=True)
class DataParallelMesh:
    """Names and sizes of a mesh's data-parallel axes, innermost first."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> DataParallelMesh:
        names = tuple(name for name in mesh.axis_names[::-1] if not is_model_axis(name))
        return cls(names, tuple(mesh.shape[name] for name in names))

    @property
    def ndim(self) -> int:
        return len(self.names)

    def shards(self, level: int) -> int:
        """The number of shards into which ``level`` cuts an array."""
        return math.prod(self.sizes[:level])

    def shard_index(self, level: int) -> jax.Array | None:
        """The index of this device's shard, inside a step that is manual on these axes; None if there is one shard."""
        return lax.axis_index(self.names[:level]) if self.shards(level) > 1 else None

    def spec(self, level: int, dimension: int = 0, inner: tuple[str, ...] = ()) -> PartitionSpec:
        """The spec of an array at ``level`` cut along ``dimension``; the axes ``inner`` cut each shard further."""
        cut = (*self.names[:level], *inner)
        if not cut:
            return PartitionSpec()
        return PartitionSpec(*[None] * dimension, cut[0] if len(cut) == 1 else cut)

    @property
    def batch_spec(self) -> PartitionSpec:
        """Rows of a batch: device after device in the order of the mesh."""
        return PartitionSpec(self.names[::-1] if self.ndim > 1 else self.names[0])


def simulate_devices(count: int) -> None:
    """Make JAX show ``count`` CPU devices; call this before anything that touches ``jax.devices()``.

    Sets ``XLA_FLAGS`` and JAX's platform. XLA reads its flags once, so this raises ``ValueError`` when JAX already
    runs without them or with fewer CPU devices; no setting is changed then.

    Four facts explain the flags and the order of collectives:

    - By default XLA's CPU compiler deletes barriers (``cse_barrier_expander``). It then merges the gathers of forward
      and backward, so ``optim_grads_params`` keeps all weights. ``fully_shard`` warns when this flag is missing.
    - The CPU compiler has a path for small loops that does not support barriers and then fails or aborts
      (``small-while-loop-hoisting``).
    - Programs with collectives in a loop sometimes compute NaN, crash or hang if they come from JAX's persistent
      compilation cache (jaxlib 0.10.2). ``fully_shard`` warns when the cache is on.
    - Collectives that do not depend on each other abort or hang the simulator. So every collective of a step waits for
      the previous one, which a test checks on the jaxpr, and on CPU a step waits for its results. Collectives that XLA
      adds over model axes have one channel each, and their inputs wait for earlier collectives; a test repeats this.
    """
    if count < 1:
        raise ValueError(f"expected a device count >= 1, got {count}")
    flags = os.environ.get("XLA_FLAGS", "").split()
    missing: list[str] = []
    # JAX has no public way to ask this that does not start the backend.
    if xla_bridge.backends_are_initialized():
        missing = [flag for flag in _SIMULATOR_FLAGS if flag not in flags]
    else:
        ours = (f"--xla_force_host_platform_device_count={count}", *_SIMULATOR_FLAGS)
        names = {own.split("=")[0] for own in ours}
        kept = [flag for flag in flags if flag.split("=")[0] not in names]
        os.environ["XLA_FLAGS"] = " ".join([*kept, *ours])
        jax.config.update("jax_platforms", "cpu")
    cpu_devices = sum(device.platform == "cpu" for device in jax.devices())
    if missing or cpu_devices < count:
        without = f" and without {' '.join(missing)}" if missing else ""
        raise ValueError(
            f"expected JAX to be unused before {count} devices are simulated, but JAX already runs with {cpu_devices} "
            f"CPU devices{without}: call simulate_devices before anything that touches jax.devices()"
        )


def data_parallel_mesh(sizes: int | Mapping[str, int] | None = None) -> Mesh:
    """A mesh with one axis ``"dp"`` over that many devices (default: all), or with named axes, outer to inner.

    ``data_parallel_mesh({"dp_outer": 2, "dp": 4})`` is for ``hsdp`` and ``hfsdp``: neighbours share the inner axis.
    ``data_parallel_mesh({"dp": 4, "tp": 2})`` has a model axis, which cuts parameters; at most two model axes come
    last. Raises ``ValueError`` if JAX has fewer devices.
    """
    devices = jax.devices()
    if sizes is None:
        sizes = len(devices)
    named = sizes if isinstance(sizes, Mapping) else {AXIS: sizes}
    if any(type(size) is not int or size < 1 for size in named.values()):
        raise ValueError(f"mesh: expected at least one device on each axis, got {dict(named)}")
    _check_names(named)
    count = math.prod(named.values())
    if count > len(devices):
        raise ValueError(
            f"expected 1 to {len(devices)} devices (the devices that JAX sees on {devices[0].platform}), got {count}; "
            "simulate_devices(n) provides n simulated CPU devices"
        )
    return _automatic(np.array(devices[:count]).reshape(*named.values()), tuple(named))


def checked_mesh(mesh: Mesh) -> Mesh:
    """The same devices as a mesh with Auto axes.

    Raises ``ValueError`` unless the mesh has one or two data-parallel axes, then at most two model axes; also inside a
    ``jax.set_mesh`` with Explicit axes.
    """
    check_context()
    _check_names(mesh.shape)
    if mesh.devices.size > 1 and is_simulated(mesh):
        for fault in _simulation_faults():
            warn_caller(f"several CPU devices {fault}", RuntimeWarning)
    # jax.make_mesh returns Explicit axes, on which sharded flat buffers cannot be sliced.
    return _automatic(mesh.devices, mesh.axis_names)


def check_context() -> None:
    """Raise ``ValueError`` inside a ``jax.set_mesh`` with Explicit axes.

    There JAX refuses arrays on Auto axes, even in the user's own code that uses the results of a step.
    """
    context = jax.sharding.get_abstract_mesh()
    explicit = [
        name
        for name, axis_type in zip(context.axis_names, context.axis_types, strict=True)
        if axis_type == AxisType.Explicit
    ]
    if explicit:
        raise ValueError(
            f"jax.set_mesh: expected a mesh with Auto axes, or none, got Explicit axes {explicit}, which "
            "jax.make_mesh gives by default: shard, train and evaluate outside that set_mesh (fully_shard accepts "
            "the same mesh and uses its devices), or inside jax.set_mesh(jax_impl.data_parallel_mesh(...)), or build "
            "the mesh by jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * number of axes)"
        )


def _simulation_faults() -> Iterator[str]:
    if "cse_barrier_expander" not in os.environ.get("XLA_FLAGS", ""):
        yield (
            "without the XLA flags of simulate_devices(): the compiler removes the barriers that order collectives, so "
            "steps can hang and weights stay gathered"
        )
    config: Any = jax.config  # the options are missing from its type
    if config.jax_enable_compilation_cache and config.jax_compilation_cache_dir:
        yield (
            "with JAX's persistent compilation cache: a step with collectives in a loop (scanned layers, microbatches) "
            "that jaxlib loads from the cache can compute NaN, crash or hang. Turn the cache off: "
            'jax.config.update("jax_enable_compilation_cache", False)'
        )


def _check_names(sizes: Mapping[str, int]) -> None:
    wrong = why_refused(sizes)
    if wrong is not None:
        raise ValueError(f"mesh: {wrong}")
    of_model = [is_model_axis(name) for name in sizes]
    if of_model.count(False) not in (1, 2) or of_model.count(True) > 2 or of_model != sorted(of_model):
        raise ValueError(
            "mesh: expected one or two data-parallel axes, outer to inner, then at most two model axes (names "
            f"{', '.join(MODEL_AXES)}), got {dict(sizes)}"
        )


def _automatic(devices: np.ndarray, names: tuple[str, ...]) -> Mesh:
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def is_gpu(mesh: Mesh) -> bool:
    """True on GPUs, also on GPUs that exist only as a compilation target."""
    return bool(mesh.devices.flat[0].platform in ("gpu", "cuda", "rocm"))


def is_simulated(mesh: Mesh) -> bool:
    """True on CPU devices."""
    return bool(mesh.devices.flat[0].platform == "cpu")


def is_tpu(mesh: Mesh) -> bool:
    """True on TPUs, also on TPUs that exist only as a compilation target."""
    return bool(mesh.devices.flat[0].platform == "tpu")


@dataclass(frozen=True)
class ModelAxes:
    """Names and sizes of a mesh's model axes, outer to inner."""

    mesh: Mesh
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> ModelAxes:
        names = tuple(name for name in mesh.axis_names if is_model_axis(name))
        return cls(mesh, names, tuple(mesh.shape[name] for name in names))

    @property
    def by_name(self) -> dict[str, int]:
        return dict(zip(self.names, self.sizes, strict=True))

    def on_each(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Inside a step, run ``function`` on each device's own part: manual on model axes, too.

        Specs name only model axes. A result that no axis cuts must be the same on all axes.
        """
        return jax.shard_map(
            function, in_specs=in_specs, out_specs=out_specs, axis_names=set(self.names), check_vma=False
        )


def data_spec(spec: PartitionSpec) -> PartitionSpec:
    """The spec of an array at rest for a step that is automatic on model axes: ``spec`` without those axes."""

    def kept(entry: Any) -> Any:
        if not isinstance(entry, tuple):
            return None if entry is not None and is_model_axis(entry) else entry
        names = tuple(name for name in entry if not is_model_axis(name))
        return names if len(names) > 1 else names[0] if names else None

    return PartitionSpec(*map(kept, spec))
