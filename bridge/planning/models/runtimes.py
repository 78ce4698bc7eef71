"""The two runtimes for the planner: the models they ship and their frameworks, imported at first use.

The bridge works without either framework, and so do plans of built-in shapes. The decoder, users' models and traces
need the framework of their runtime, but only parts of it that allocate nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

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
