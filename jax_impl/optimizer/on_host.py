"""An update of weights and moments in the host's memory by the host's processor, one key after another.

XLA runs all that the host computes as one program where it can, and would lay out the gradients of all keys for it at
once. So a key's gradients wait for an element of what the key before became, which the host gives back to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.compute_on import compute_on2
from jax.sharding import Mesh, PartitionSpec

from jax_impl.optimizer.streaming import are_there
from jax_impl.runtime.memory_kinds import in_host, is_on_device, on_device
from jax_impl.runtime.traced import holds_any

# Sums and the like over what devices have a part of, and what devices tell each other.
_REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce argmax argmin dot_general "
    "conv_general_dilated sort cumsum cumprod cummax cummin cumlogsumexp top_k".split()
)
_COLLECTIVES = frozenset(
    "psum psum_invariant pmax pmin all_gather all_gather_invariant reduce_scatter all_to_all ppermute pbroadcast".split()
)


def is_local(equation: Any) -> bool:
    """Whether each device computes its own part of an equation's results from its own parts of the operands."""
    if equation.primitive.name == "shard_map":
        return not holds_any(equation, _COLLECTIVES)
    return not holds_any(equation, _COLLECTIVES | _REDUCTIONS)


class Host:
    """Of one update, whose keys come one after the other."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        # An element a device of what was computed last.
        self._last: jax.Array | None = None

    def computed(
        self, function: Callable[[Sequence[Any]], Sequence[Any]], values: Sequence[Any], spec: PartitionSpec
    ) -> Sequence[Any]:
        """``function(values)``, in the host's memory; values of the device are sent there.

        ``spec``: how the first result is cut.
        """
        everywhere = PartitionSpec(tuple(self._mesh.axis_names))

        def run(values: Sequence[Any]) -> tuple[Sequence[Any], jax.Array]:
            # To JAX what a program makes is on the device, and does not mix with what lies elsewhere.
            results = function(on_device(values))
            element: Any = jax.shard_map(
                _element, mesh=self._mesh, in_specs=(spec,), out_specs=everywhere, check_vma=False
            )
            return results, element(results[0])

        sent = [in_host(x) if is_on_device(x) else x for x in self._after(values)]
        spaces = jax.memory.Space.Host, jax.memory.Space.Device
        results, self._last = compute_on2(run, compute_type="device_host", out_memory_spaces=spaces)(sent)
        return results

    def _after(self, values: Sequence[Any]) -> Sequence[Any]:
        """The same, arrays on the device not before what was computed last."""
        if self._last is None:
            return values
        run: Any = jax.shard_map(
            lambda element: are_there({0: element}),
            mesh=self._mesh,
            in_specs=(PartitionSpec(tuple(self._mesh.axis_names)),),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        there = run(self._last)
        return [jnp.where(there, x, jnp.zeros_like(x)) if x.ndim and is_on_device(x) else x for x in values]


def _element(x: jax.Array) -> jax.Array:
    return lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(1)
