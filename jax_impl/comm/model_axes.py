"""Model axes of a mesh: what is manual on them, and what the compiler does.

A step is manual on data-parallel axes: each device has its own rows, and every collective over these axes is written.
On model axes the step is automatic: values are whole, the compiler cuts the computation as the weights are cut, and
sends what that needs. Only the transfers of weights and gradients are manual on all axes::

                    data-parallel axes      model axes
    shard_map           manual              automatic       the user's model
      on_each           manual              manual          gathers, reductions, buffers to parameters

so that a gather moves what a device has of a parameter, and nothing over a model axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from bridge.core.sharding.policy.mesh_axes import is_model_axis


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
        """Inside of a step, ``function`` on what each device has: manual on model axes, too.

        Specs name model axes only. A result that no axis cuts must be the same on all of them.
        """
        return jax.shard_map(
            function, in_specs=in_specs, out_specs=out_specs, axis_names=set(self.names), check_vma=False
        )


def data_spec(spec: PartitionSpec) -> PartitionSpec:
    """What a step that is automatic on model axes says of an array at rest: ``spec`` without those axes."""

    def kept(entry: Any) -> Any:
        if not isinstance(entry, tuple):
            return None if entry is not None and is_model_axis(entry) else entry
        names = tuple(name for name in entry if not is_model_axis(name))
        return names if len(names) > 1 else names[0] if names else None

    return PartitionSpec(*map(kept, spec))
