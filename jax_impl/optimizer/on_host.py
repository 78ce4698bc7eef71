"""The host's processor, not the devices, updates weights and moments in host memory.

XLA:TPU runs the update as one host program, which changes weights and moments in place and reads gradients from the
device. That program has no collectives, so each device's part of an array is updated separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import compute_on

from jax_impl.runtime.groups.memory_kinds import in_host, is_on_device, on_device
from jax_impl.runtime.program.traced import runs_any

# In earlier versions, a host program cannot choose the memory of its results.
_SINCE = (0, 10, 1)
# Reductions of sharded arrays, outside shard_map.
_REDUCTIONS = frozenset([
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
    "reduce_xor", "reduce", "argmax", "argmin", "sort", "top_k", "dot_general",
    "conv_general_dilated", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp",
])  # fmt: skip
_COLLECTIVES = frozenset([
    "psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant",
    "reduce_scatter", "all_to_all", "ppermute", "pbroadcast",
])  # fmt: skip


def is_local(equation: Any) -> bool:
    """Whether each device's part of the results depends only on its own parts of the operands."""
    names = _COLLECTIVES if equation.primitive.name == "shard_map" else _COLLECTIVES | _REDUCTIONS
    return not runs_any(equation, names)


def compute_on_host(
    function: Callable[[Sequence[Any]], Sequence[Any]], values: Sequence[Any]
) -> Sequence[Any]:
    """Inside a program: run ``function(values)`` in host memory; values on the device are sent there.

    Raises ``ValueError`` for a version of JAX that does not support this.
    """
    if jax.__version_info__ < _SINCE:
        since = ".".join(map(str, _SINCE))
        raise ValueError(
            f"update on the host: expected jax {since} or later, got {jax.__version__}: update jax"
        )
    # In JAX 0.12 this function has the name that earlier versions use for a context manager.
    placed: Any = compute_on.compute_on2 if hasattr(compute_on, "compute_on2") else compute_on.compute_on

    def run(values: Sequence[Any]) -> Sequence[Any]:
        # JAX assumes that a program's own values are on the device, and refuses to mix memories.
        return function(on_device(values))

    sent = [in_host(x) if is_on_device(x) else x for x in values]
    on_host = placed(run, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    results: Sequence[Any] = on_host(sent)
    return results
