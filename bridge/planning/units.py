"""A model cut into units by a policy, and each unit's parameters into groups.

    Unit "layers.3"    owns every parameter below it that no inner unit owns
      group 0          its parameters of one dtype and one trainability, in definition order
      group 1          frozen, or (PyTorch) given in another dtype: flat buffers of its own
  group 2          (JAX) cut over other model axes

Shapes are those of the part of a parameter that one place of the model axes has.

Units that differ in nothing but their path are one ``UnitKind`` and are planned once: 126 equal layers cost one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bridge.planning.dtypes import GroupDtypes
from bridge.planning.errors import PlanError
from bridge.planning.model import Model, Parameter
from bridge.planning.model_axes import Cuts, cuts_of
from bridge.sharding import Align, ShardingPolicy, Strategy, local_shape

ROOT = ""


@dataclass(frozen=True)
class GroupShape:
    """Parameters that share flat buffers: names below the unit, shapes, and the dtype and trainability in common."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    trainable: bool
    dtypes: GroupDtypes


@dataclass(frozen=True)
class UnitKind:
    """Everything that a unit's plan depends on.

    recompute: whether backward computes the unit's activations again. reruns: the number of recomputed units around
    this one, each of which runs its forward again; 0 for PyTorch, which keeps weights gathered from the second forward
    to backward.
    """

    groups: tuple[GroupShape, ...]
    strategy: Strategy
    granularity: str
    align: Align
    recompute: bool
    reruns: int


@dataclass(frozen=True)
class Unit:
    """One unit of a model."""

    path: str
    kind: UnitKind


@dataclass(frozen=True)
class CutModel:
    """Units in definition order, the root last."""

    units: tuple[Unit, ...]

    def kinds(self) -> dict[UnitKind, list[str]]:
        """Each kind once, with the paths of its units."""
        found: dict[UnitKind, list[str]] = {}
        for unit in self.units:
            found.setdefault(unit.kind, []).append(unit.path)
        return found


def cut(model: Model, policy: ShardingPolicy, runtime: str, model_axes: Mapping[str, int]) -> CutModel:
    """Apply a policy's patterns; ``model_axes``: sizes. Raises ``PlanError`` when one of them matches nothing."""
    try:
        chosen = policy.units_of(model.modules)
    except ValueError as error:
        raise PlanError(f"model {model.name}: {error}") from error
    cuts = cuts_of(model, policy, model_axes, runtime) if model_axes else {}
    owned: dict[str, list[Parameter]] = {path: [] for path in chosen}
    for parameter in model.parameters:
        # The root is always a unit.
        owned[next(path for path in outward(parameter.module) if path in owned)].append(parameter)
    units = []
    for path, unit in chosen.items():
        kind = UnitKind(
            groups=_groups(path, owned[path], policy, runtime, cuts, model_axes),
            strategy=unit.chosen,
            granularity=unit.granularity,
            align=policy.align_of(unit),
            recompute=unit.recompute,
            reruns=sum(
                chosen[outer].recompute for outer in outward(path) if outer != path and outer in chosen
            )
            if runtime == "jax"
            else 0,
        )
        units.append(Unit(path, kind))
    if runtime == "jax":
        _check_stacks(model, units)
    return CutModel(tuple(units))


def _check_stacks(model: Model, units: Iterable[Unit]) -> None:
    """Scanned layers run one program, so all of a stack must be cut alike."""
    layers: dict[str, dict[str, dict[str, UnitKind]]] = {stack: {} for stack in model.stacks}
    for path in model.modules:
        if place := model.layer_of(path):
            layers[place[0]].setdefault(place[1], {})
    for unit in units:
        if place := model.layer_of(unit.path):
            layers[place[0]][place[1]][place[2]] = unit.kind
    for stack, cuts in layers.items():
        first, *others = cuts
        for other in others:
            if cuts[other] != cuts[first]:
                raise PlanError(
                    f"model {model.name}: expected one policy for all layers of the stack {stack!r}, since they are "
                    f"scanned, got another for layer {other} than for layer {first}"
                )


def outward(path: str) -> Iterable[str]:
    """``path``, the module around it, and so on to the root."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ROOT


def _groups(
    path: str,
    owned: Iterable[Parameter],
    policy: ShardingPolicy,
    runtime: str,
    cuts: Cuts,
    model_axes: Mapping[str, int],
) -> tuple[GroupShape, ...]:
    members: dict[tuple[str, bool, tuple[str, ...]], list[Parameter]] = {}
    for parameter in owned:
        # In JAX the main weights that a unit trains have one dtype, whatever they were given in.
        own = runtime == "torch" or not parameter.trainable
        dtype = parameter.dtype if own else policy.precision.main
        over = tuple(one.axis for one in cuts.get(parameter.path, ())) if runtime == "jax" else ()
        members.setdefault((dtype, parameter.trainable, over), []).append(parameter)
    dtypes = list(dict.fromkeys(kind[:2] for kind in members))

    def order(kind: tuple[str, bool, tuple[str, ...]]) -> tuple[bool, int, int, tuple[str, ...]]:
        return not kind[1], dtypes.index(kind[:2]), len(kind[2]), kind[2]

    kinds = list(members) if runtime == "torch" else sorted(members, key=order)
    start = len(path) + 1 if path else 0
    return tuple(
        GroupShape(
            names=tuple(one.path[start:] for one in members[kind]),
            shapes=tuple(local_shape(one.shape, cuts.get(one.path, ()), model_axes) for one in members[kind]),
            trainable=kind[1],
            dtypes=GroupDtypes.of(kind[0], policy.precision, kept=runtime == "jax" and not kind[1]),
        )
        for kind in kinds
    )
