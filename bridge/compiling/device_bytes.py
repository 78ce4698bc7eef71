"""Bytes on one device: of abstract arrays by their shardings, and of a compiled program by XLA's own count.

For the legs, which import JAX; this file imports nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def held(arrays: Iterable[Any]) -> int:
    """Bytes of arrays with a sharding, also abstract ones."""
    return sum(math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in arrays)


def allocated(program: Any) -> dict[str, int]:
    """Bytes of a ``jax.stages.Compiled``. ``total``: the most bytes of it that are alive during a run."""
    analysis = program.memory_analysis()
    parts = {
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "temporary": analysis.temp_size_in_bytes,
        "aliased": analysis.alias_size_in_bytes,
    }
    return {**parts, "total": sum(parts.values()) - 2 * parts["aliased"]}
