"""An update of weights and moments in the host's memory that the host's processor computes, in place of the devices.

XLA:TPU runs it as one program of the host, which changes weights and moments in their place and reads gradients from
the device. It has no collectives, so each device's part of an array is updated by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import compute_on

from jax_impl.runtime.groups.memory_kinds import in_host, is_on_device, on_device
from jax_impl.runtime.program.traced import runs_any

# Before, a program of the host cannot say in which memory its results lie.
_SINCE = (0, 10, 1)
# Of arrays that are cut over devices, outside of shard_map.
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
    """Whether each device's part of the results depends on its own parts of the operands alone."""
    names = _COLLECTIVES if equation.primitive.name == "shard_map" else _COLLECTIVES | _REDUCTIONS
    return not runs_any(equation, names)


def compute_on_host(
    function: Callable[[Sequence[Any]], Sequence[Any]], values: Sequence[Any]
) -> Sequence[Any]:
    """Inside of a program: ``function(values)``, in the host's memory; values of the device are sent there.

    Raises ``ValueError`` for a version of JAX that cannot do so.
    """
    if jax.__version_info__ < _SINCE:
        since = ".".join(map(str, _SINCE))
        raise ValueError(
            f"update on the host: expected jax {since} or later, got {jax.__version__}: update jax"
        )
    # JAX 0.12 has it by the name of the context manager that the versions before have, too.
    placed: Any = compute_on.compute_on2 if hasattr(compute_on, "compute_on2") else compute_on.compute_on

    def run(values: Sequence[Any]) -> Sequence[Any]:
        # To JAX what a program makes lies on the device, and does not mix with what lies elsewhere.
        return function(on_device(values))

    sent = [in_host(x) if is_on_device(x) else x for x in values]
    on_host = placed(run, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    results: Sequence[Any] = on_host(sent)
    return results
