"""Changes of a policy that reduce its memory: the search space.

Four things may change, each in one way or not at all::

    recompute   layers      units of which there are several recompute their activations
    precision   compute     forward and backward in bfloat16; gradients keep their dtype on the network
    strategy    rung        every unit is sharded at least as far as the rung; units that are sharded further stay
    mesh        inner axis  with two data-parallel axes: another number of devices on the inner axis

    rungs       one axis    no_shard  optim  optim_grads  optim_grads_params
                two axes    no_shard  optim  optim_grads  hsdp  hfsdp  and all three kinds sharded over both axes
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bridge.core.sharding import Placements, PolicyError, ShardingPolicy, UnitPolicy
from bridge.core.sharding.policy.strategy import STRATEGIES, StrategyName
from bridge.planning.cost.units import ROOT, outward
from bridge.planning.models.model import Model

Depths = tuple[int, int, int]
# The numbers of innermost axes over which parameters, gradients and optimizer state are sharded.
_RUNGS: dict[int, tuple[Depths, ...]] = {
    1: ((0, 0, 1), (0, 1, 1), (1, 1, 1)),
    2: ((0, 0, 1), (0, 1, 1), (1, 1, 1), (1, 1, 2), (2, 2, 2)),
}


@dataclass(frozen=True)
class Variant:
    """A policy, and the changes that led to it, in words."""

    changes: tuple[str, ...]
    policy: ShardingPolicy


@dataclass(frozen=True)
class _Change:
    words: str
    apply: Callable[[ShardingPolicy], ShardingPolicy]


def variants(policy: ShardingPolicy, model: Model, devices: int) -> Iterator[Variant]:
    """The policies that changes lead to on ``devices`` devices, each once, fewer changes first; not ``policy``."""
    kinds = (
        _recomputed(policy, model),
        [_Change("compute in bfloat16", _narrow)],
        [_sharded(rung, len(policy.data_axes)) for rung in _RUNGS[len(policy.data_axes)]],
        _other_meshes(policy, devices),
    )
    seen = [policy]
    for number in range(1, len(kinds) + 1):
        for some in itertools.combinations(kinds, number):
            for changes in itertools.product(*some):
                made = functools.reduce(lambda made, change: change.apply(made), changes, policy)
                if made not in seen:
                    seen.append(made)
                    yield Variant(tuple(change.words for change in changes), made)


def _recomputed(policy: ShardingPolicy, model: Model) -> list[_Change]:
    """Of nested units only the outer ones, because the inner of two recomputing units would run three times."""
    try:
        chosen = policy.units_of(model.modules)
    except PolicyError:
        return []
    outermost = Counter(
        unit.match
        for path, unit in chosen.items()
        if path and not any(outer in chosen for outer in outward(path) if outer not in (path, ROOT))
    )
    layers = [match for match, count in outermost.items() if count > 1]

    def apply(made: ShardingPolicy) -> ShardingPolicy:
        units = [replace(unit, recompute=unit.recompute or unit.match in layers) for unit in made.units]
        return replace(made, units=tuple(units))

    return [_Change(f"recompute {' and '.join(layers)}", apply)] if layers else []


def _narrow(policy: ShardingPolicy) -> ShardingPolicy:
    precision = policy.precision
    if precision.compute_dtype in (None, "bfloat16", "float16"):
        return policy
    # If it were left out, the dtype of reductions would follow the dtype of the computation.
    return replace(policy, precision=replace(precision, compute="bfloat16", reduce=precision.reduce_dtype))


def _sharded(rung: Depths, ndim: int) -> _Change:
    def apply(policy: ShardingPolicy) -> ShardingPolicy:
        return replace(policy, units=tuple(_raised(unit, rung, ndim) for unit in policy.units))

    return _Change(f"strategy {_named(rung, ndim) or 'sharded over both axes'}", apply)


def _raised(unit: UnitPolicy, rung: Depths, ndim: int) -> UnitPolicy:
    own = unit.chosen
    own_depths = own.parameters, own.gradients, own.optimizer
    parameters, gradients, optimizer = depths = tuple(map(max, own_depths, rung))
    if depths == own_depths:
        return unit
    name = _named((parameters, gradients, optimizer), ndim)
    if name is not None:
        return replace(unit, strategy=name, placements=None)
    words = [
        ["replicate"] * (ndim - parameters) + ["shard"] * parameters,
        ["partial"] * (ndim - gradients) + ["shard"] * gradients,
        ["replicate"] * (ndim - optimizer) + ["shard"] * optimizer,
    ]
    return replace(unit, strategy=None, placements=Placements(*words))


def _named(depths: Depths, ndim: int) -> StrategyName | None:
    known = [
        name
        for name, strategy in STRATEGIES.items()
        if (strategy.parameters, strategy.gradients, strategy.optimizer) == depths
    ]
    # If one strategy has two names, the later name is the one for two axes, hsdp.
    return known[-1 if ndim == 2 else 0] if known else None


def _other_meshes(policy: ShardingPolicy, devices: int) -> list[_Change]:
    if len(policy.data_axes) != 2:
        return []
    outer, inner = policy.data_axes
    asked = policy.mesh[outer]
    sizes = policy.mesh_sizes(devices)
    both = sizes[outer] * sizes[inner]

    def change(count: int) -> _Change:
        mesh = {**policy.mesh, outer: asked if asked == "all" else both // count, inner: count}
        return _Change(f"{inner} = {count}", lambda made: replace(made, mesh=mesh))

    return [change(count) for count in range(2, both) if both % count == 0 and count != sizes[inner]]
