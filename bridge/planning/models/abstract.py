"""An nnx module from shapes alone, in time linear in the number of its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bridge.planning.models.runtimes import framework


def abstract_module(make: Callable[[Any], Any]) -> Any:
    """``nnx.eval_shape`` of ``make(rngs)``.

    A stream of random numbers counts its keys. If the count is traced, flax asks it for a sharding each time, and JAX
    goes through the whole trace to word the refusal: quadratic in the number of parameters. So counts are NumPy arrays.
    """
    nnx, np = framework("flax.nnx"), framework("numpy")

    def made() -> Any:
        rngs = nnx.Rngs(0)
        for _, stream in rngs.items():
            stream.count = nnx.RngCount(np.zeros((), np.uint32), tag=stream.tag)
        return make(rngs)

    return nnx.eval_shape(made)
