"""The two runtimes as the planner needs them: their layout planner, policies and models, imported when first used.

The bridge works where neither framework is installed; a plan needs one of them, and only the parts of it that allocate
nothing. Both runtimes plan the same layouts and read the same policies, so either will do.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from bridge.planning.errors import PlanError

RUNTIMES = ("torch", "jax")
SHIPPED_POLICIES = Path(__file__).parents[1] / "sharding" / "policies"
_FRAMEWORKS = {"torch": ("torch",), "jax": ("jax", "flax", "optax")}


@dataclass(frozen=True)
class Depths:
    """Over how many of the innermost mesh axes compute weights, gradients and optimizer state are sharded."""

    parameters: int
    gradients: int
    state: int


class Precision(Protocol):
    """Names of dtypes; ``compute``, ``reduce`` and ``grad`` may be None, see ``bridge.planning.dtypes``."""

    main: str
    compute: str | None
    reduce: str | None
    grad: str | None


class UnitPolicy(Protocol):
    """What a policy says of one unit; ``chosen`` is a runtime's strategy."""

    granularity: str
    recompute: bool

    @property
    def chosen(self) -> Any: ...


class Policy(Protocol):
    """The interface that the ``ShardingPolicy`` of both runtimes has."""

    precision: Any
    source: str

    def mesh_sizes(self, devices: int) -> Mapping[str, int]: ...

    def units_of(self, paths: Iterable[str]) -> Mapping[str, Any]: ...

    def to_toml(self) -> str: ...


class Layout(Protocol):
    """The part of a planned layout that numbers follow from; sizes in elements."""

    @property
    def num_shards(self) -> int: ...

    @property
    def shard_sizes(self) -> tuple[int, ...]: ...

    @property
    def shard_size(self) -> int: ...

    @property
    def padded_size(self) -> int: ...

    @property
    def numel(self) -> int: ...

    @property
    def slots(self) -> tuple[Any, ...]: ...


def installed(runtime: str) -> bool:
    """Whether the frameworks of ``runtime`` can be imported; nothing is."""
    return all(importlib.util.find_spec(name) is not None for name in _FRAMEWORKS[runtime])


@cache
def any_runtime() -> str:
    """A runtime that is installed. Raises ``PlanError`` when neither is."""
    found = [runtime for runtime in RUNTIMES if installed(runtime)]
    if not found:
        raise PlanError(
            "expected PyTorch or JAX to be installed, whose layouts are planned with; install twinshard[torch] or "
            "twinshard[jax]"
        )
    return found[0]


def plan_layout(shapes: Mapping[str, tuple[int, ...]], num_shards: int, granularity: str) -> Layout:
    """A layout as both runtimes plan it."""
    planned: Layout = part(any_runtime(), "layout").plan_layout(shapes, num_shards, granularity=granularity)
    return planned


def load_policy(name_or_path: str | Path) -> Policy:
    """A shipped policy by name, or a TOML file. Raises ``PlanError`` for what is no policy."""
    policies = part(any_runtime(), "policy")
    return _checked(policies, lambda: policies.ShardingPolicy.load(name_or_path))


def parse_policy(text: str, source: str) -> Policy:
    """A policy from TOML text. Raises ``PlanError`` for what is none."""
    policies = part(any_runtime(), "policy")
    return _checked(policies, lambda: policies.ShardingPolicy.parse(text, source))


def depths_of(strategy: Any) -> Depths:
    """The numbers of either runtime's strategy."""
    if hasattr(strategy, "parameters"):
        return Depths(strategy.parameters, strategy.gradients, strategy.optimizer)
    return Depths(strategy.weights, strategy.gradients, strategy.state)


def part(runtime: str, name: str) -> ModuleType:
    """A module of a runtime's package. Raises ``PlanError`` when its framework is not installed."""
    if not installed(runtime):
        missing = " and ".join(_FRAMEWORKS[runtime])
        raise PlanError(f"expected {missing} to be installed; install twinshard[{runtime}]")
    return importlib.import_module(f"{runtime}_impl.{name}")


def framework(name: str) -> ModuleType:
    """A framework's own module, such as ``torch`` or ``flax.nnx``."""
    return importlib.import_module(name)


def _checked(policies: ModuleType, make: Callable[[], Any]) -> Policy:
    try:
        policy: Policy = make()
    except (policies.PolicyError, OSError) as error:
        raise PlanError(str(error)) from error
    return policy
