"""The two runtimes for the planner: the models they ship and their frameworks, imported at first use.

The bridge works without either framework, and so do plans of built-in shapes. The decoder, users' models and traces
need the framework of their runtime, but only parts of it that allocate nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

from bridge.core.extras import install_advice
from bridge.planning.models.errors import PlanError

RUNTIMES = ("torch", "jax")
_FRAMEWORKS = {"torch": ("torch",), "jax": ("jax", "flax", "optax")}


def installed(runtime: str) -> bool:
    """Whether the frameworks of ``runtime`` can be imported. Imports nothing."""
    return all(importlib.util.find_spec(name) is not None for name in _FRAMEWORKS[runtime])


def part(runtime: str, name: str) -> ModuleType:
    """A module of a runtime's package. Raises ``PlanError`` when its framework is not installed."""
    if not installed(runtime):
        missing = " and ".join(_FRAMEWORKS[runtime])
        raise PlanError(f"expected {missing} to be installed: {install_advice(runtime)}")
    return importlib.import_module(f"{runtime}_impl.{name}")


def framework(name: str) -> ModuleType:
    """A framework's own module, such as ``torch`` or ``flax.nnx``."""
    return importlib.import_module(name)


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
