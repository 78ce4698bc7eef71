"""A model cut into units by a policy, and each unit's parameters into groups.

    Unit "layers.3"    owns every parameter below it that no inner unit owns
      group 0          its parameters of one dtype and one trainability, in definition order
      group 1          where matrices are gathered as float8, its vectors and scalars
      group 2          frozen, or (PyTorch, main = "given") given in another dtype: flat buffers of its own
  group 3          (JAX) cut over other model axes

Shapes are shapes of the part of a parameter at one place of the model axes.

Units that differ only in their path are one ``UnitKind`` and are planned once: 126 equal layers cost as much as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bridge.core.dtype_names import FLOATING
from bridge.core.sharding import Align, ShardingPolicy, Strategy, UnitPolicy, local_shape
from bridge.core.sharding.policy.float8 import is_quantized
from bridge.core.sharding.policy.group_dtypes import GroupDtypes
from bridge.core.sharding.policy.recompute import Recompute, why_not_around
from bridge.planning.cost.model_axes import Cuts, cuts_of
from bridge.planning.models.errors import PlanError
from bridge.planning.models.model import Model, Parameter

ROOT = ""
TWICE = 2


@dataclass
class Gathers:
    """A walk through forward and backward of one microbatch in JAX, which gathers units twice, or more often.

    PyTorch keeps the weights of units inside a recomputed unit from the unit's second forward to its backward. JAX
    keeps the weights of the last ones, as many as ``prefetch`` allows at once, and gathers the others a third time
    (``jax_impl/runtime/unit/order.py``). Here units are assumed to run in the order in which the model defines them.

    sharded, recomputed: paths of units that are gathered, and of units that recompute. inside: for each unit, the units
    directly inside, in the order in which they run. traced: whether the inner of two units runs in the program of the
    outer one, not in a loop. limit: for how many units there may be whole weights at once.
    """

    sharded: Collection[str]
    recomputed: Collection[str]
    inside: Mapping[str, Sequence[str]]
    traced: Callable[[str, str], bool]
    limit: int
    _times: Counter[str] = field(default_factory=Counter)
    _kept: list[str] = field(default_factory=list)

    def of_each(self, root: str) -> Mapping[str, int]:
        """The number of gathers of each gathered unit."""
        self._forward(root, again=False)
        self._backward(root)
        return self._times

    def _forward(self, path: str, *, again: bool) -> None:
        """``again``: whether the backward of the same program follows."""
        if path in self.sharded:
            self._times[path] += 1
            del self._kept[: max(0, len(self._kept) - self.limit + 1)]
        # Forward and backward of the inner units are traced separately, unless the unit neither gathers nor recomputes.
        plain = again and path not in self.sharded and path not in self.recomputed
        for inner in self.inside[path]:
            self._forward(inner, again=plain and self.traced(path, inner))
        if again and path in self.sharded:
            self._kept.append(path)

    def _backward(self, path: str) -> None:
        if self._kept[-1:] == [path]:
            self._kept.pop()
        elif path in self.sharded:
            self._times[path] += 1
            self._kept.clear()
        if path in self.recomputed:
            for inner in self.inside[path]:
                self._forward(inner, again=self.traced(path, inner))
        for inner in reversed(self.inside[path]):
            self._backward(inner)


@dataclass(frozen=True)
class GroupShape:
    """Parameters that share flat buffers: names below the unit, shapes, and their common dtype and trainability.

    ``over``: the model axes that cut all of them, in JAX.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    trainable: bool
    dtypes: GroupDtypes[str]
    over: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnitKind:
    """Everything that a unit's plan depends on.

    recompute: the unit's activations that backward recomputes (``bridge.core.sharding.policy.recompute``).
    gathers: how often a microbatch gathers the unit, if its strategy shards parameters.
    """

    groups: tuple[GroupShape, ...]
    strategy: Strategy
    granularity: str
    align: Align
    recompute: Recompute
    gathers: int


def cut(
    model: Model, policy: ShardingPolicy, runtime: str, model_axes: Mapping[str, int], prefetch: int
) -> dict[str, UnitKind]:
    """The kind of each unit by its path, in definition order, the root last. ``model_axes``: sizes.

    Raises ``PlanError`` if a pattern matches nothing.
    """
    try:
        chosen = policy.units_of(model.modules)
    except ValueError as error:
        raise PlanError(f"model {model.name}: {error}") from error
    cuts = cuts_of(model, policy, model_axes, runtime) if model_axes else {}
    owned: dict[str, list[Parameter]] = {path: [] for path in chosen}
    for parameter in model.parameters:
        # The root is always a unit.
        owned[next(path for path in outward(parameter.module) if path in owned)].append(parameter)
    sharded = {path for path, parameters in owned.items() if parameters and chosen[path].chosen.parameters}
    gathers = _gathers(model, chosen, sharded, prefetch) if runtime == "jax" else {}
    kinds: dict[str, UnitKind] = {}
    for path, unit in chosen.items():
        inside = next((inner for inner in chosen if inner != path and path in outward(inner)), None)
        if inside is not None and (reason := why_not_around(unit.recompute, path, inside)):
            raise PlanError(f"model {model.name}: {policy.source}: {reason}")
        kinds[path] = UnitKind(
            groups=_groups(path, owned[path], policy, runtime, cuts, model_axes),
            strategy=unit.chosen,
            granularity=unit.granularity,
            align=policy.align_of(unit),
            recompute=unit.recompute,
            gathers=gathers.get(path, TWICE),
        )
    if runtime == "jax":
        _check_stacks(model, kinds)
    return kinds


def _gathers(
    model: Model, units: Mapping[str, UnitPolicy], sharded: Collection[str], prefetch: int
) -> Mapping[str, int]:
    inside: dict[str, list[str]] = {path: [] for path in units}
    for path in units:
        if path != ROOT:
            inside[next(outer for outer in outward(path) if outer != path and outer in units)].append(path)

    def is_traced(outer: str, inner: str) -> bool:
        mine, around = model.layer_of(inner), model.layer_of(outer)
        return mine is None or (around is not None and mine[:2] == around[:2])

    recomputed = {path for path, unit in units.items() if unit.recompute is True}
    return Gathers(sharded, recomputed, inside, is_traced, 1 + prefetch).of_each(ROOT)


def _check_stacks(model: Model, kinds: Mapping[str, UnitKind]) -> None:
    """Scanned layers run one program, so all layers of a stack must be cut alike."""
    layers: dict[str, dict[str, dict[str, UnitKind]]] = {stack: {} for stack in model.stacks}
    for path in model.modules:
        if layer := model.layer_of(path):
            layers[layer[0]].setdefault(layer[1], {})
    for path, kind in kinds.items():
        if layer := model.layer_of(path):
            layers[layer[0]][layer[1]][layer[2]] = kind
    for stack, cuts in layers.items():
        first, *others = cuts
        for other in others:
            if cuts[other] != cuts[first]:
                raise PlanError(
                    f"model {model.name}: expected one policy for all layers of the stack {stack!r}, since they are "
                    f"scanned, got different policies for layers {other} and {first}"
                )


def outward(path: str) -> Iterable[str]:
    """``path``, its enclosing module, and so on to the root."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ROOT


class _Kind(NamedTuple):
    """The common properties of a group's parameters. ``over``: model axes that cut them, in JAX."""

    dtype: str
    trainable: bool
    quantized: bool
    over: tuple[str, ...]


def _groups(
    path: str,
    owned: Iterable[Parameter],
    policy: ShardingPolicy,
    runtime: str,
    cuts: Cuts,
    model_axes: Mapping[str, int],
) -> tuple[GroupShape, ...]:
    members: dict[_Kind, list[Parameter]] = {}
    for parameter in owned:
        # In JAX the main weights that a unit trains form one group, whatever dtypes they were given in.
        own = runtime == "torch" or not parameter.trainable
        dtype = parameter.dtype if own else policy.precision.main_dtype or parameter.dtype
        over = tuple(own_cut.axis for own_cut in cuts.get(parameter.path, ())) if runtime == "jax" else ()
        narrow = policy.precision.gather is not None and dtype in FLOATING and is_quantized(parameter.shape)
        members.setdefault(_Kind(dtype, parameter.trainable, narrow, over), []).append(parameter)
    dtypes = list(dict.fromkeys((kind.dtype, kind.trainable) for kind in members))

    def order(kind: _Kind) -> tuple[bool, int, bool, int, tuple[str, ...]]:
        position = dtypes.index((kind.dtype, kind.trainable))
        return not kind.trainable, position, not kind.quantized, len(kind.over), kind.over

    kinds = list(members) if runtime == "torch" else sorted(members, key=order)
    start, asked = len(path) + 1 if path else 0, policy.precision.asked(runtime)
    return tuple(
        GroupShape(
            names=tuple(parameter.path[start:] for parameter in members[kind]),
            shapes=tuple(
                local_shape(parameter.shape, cuts.get(parameter.path, ()), model_axes)
                for parameter in members[kind]
            ),
            trainable=kind.trainable,
            dtypes=asked.of_group(kind.dtype, trainable=kind.trainable, quantized=kind.quantized),
            over=kind.over,
        )
        for kind in kinds
    )
