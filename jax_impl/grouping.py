"""Split a unit's parameters into groups by trainability, dtype, gather format, and the model axes that cut them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bridge.core.sharding import Strategy, plan_layout, strategy_named
from bridge.core.sharding.policy.float8 import is_quantized
from bridge.core.sharding.policy.parallel import local_shape
from jax_impl.comm.collectives import Wire
from jax_impl.comm.mesh import DataParallelMesh, ModelAxes, is_tpu
from jax_impl.modules.module_tree import UnitModule
from jax_impl.modules.partitioning import Cuts
from jax_impl.options import Resolved, UnitOptions, within
from jax_impl.runtime.groups.cut_group import CutGroup
from jax_impl.runtime.groups.flat_group import FlatGroup
from jax_impl.runtime.groups.float8_group import CutFloat8Group, Float8Group, Float8LogicalGroup
from jax_impl.runtime.groups.logical_group import Group, LogicalGroup, logical_array
from jax_impl.runtime.groups.precision import is_integer


@dataclass(frozen=True)
class _GroupKey:
    """The common properties of a group's parameters, except the model axes that cut them.

    ``replicated``: whether all devices hold them whole, whatever the unit's strategy is.
    """

    trainable: bool
    wire: Wire
    replicated: bool

    def strategy(self, options: UnitOptions) -> Strategy:
        return strategy_named("no_shard") if self.replicated else options.strategy

    def words(self, several: bool) -> list[str]:
        """Words for the group's name. ``several``: whether the unit's trainable parameters have several main dtypes."""
        wire = self.wire
        named = wire.main != np.float32 and (several or not self.trainable)
        return [
            *([] if self.trainable else ["frozen"]),
            *([wire.main.name] if named else []),
            *([] if wire.float8 is None else [wire.float8]),
            *(["replicated"] if self.replicated else []),
        ]


def groups_of(
    module: UnitModule, options: UnitOptions, resolved: Resolved, cuts: Cuts, engine: str
) -> tuple[Group, ...]:
    """Flat groups, or logical groups for the pjit engine.

    Raises ``ValueError`` for parameters that are neither real numbers nor bools; for trainable parameters that are not
    floating point, have 8 bits, or cannot have main weights in ``main_dtype``; and for a ``gather_dtype`` with main
    weights that are not float32.
    """
    model = ModelAxes.of(resolved.mesh)
    groups: list[Group] = []
    by_key = _numbers_by_key(module, resolved)
    several = len({key.wire.main for key in by_key if key.trainable}) > 1
    for key, own in by_key.items():
        if engine == "pjit":
            groups.append(_logical_group(module, own, options, key, resolved.mesh, cuts))
            continue
        by_axes: dict[tuple[str, ...], list[int]] = {}
        for i in own:
            over = tuple(cut.axis for cut in cuts.get(module.parameters[i], ()))
            by_axes.setdefault(over, []).append(i)
        groups += [
            _flat_group(module, by_axes[over], options, key, [*key.words(several), *over], model, cuts)
            for over in sorted(by_axes, key=lambda over: (len(over), over))
        ]
    return tuple(groups)


def _flat_group(
    module: UnitModule,
    own: Sequence[int],
    options: UnitOptions,
    key: _GroupKey,
    words: Sequence[str],
    model: ModelAxes,
    cuts: Cuts,
) -> FlatGroup:
    wire, strategy, paths = key.wire, key.strategy(options), tuple(module.parameters[i] for i in own)
    of_each = tuple(cuts.get(path, ()) for path in paths)
    names = dict(zip(paths, (module.names[i] for i in own), strict=True))
    shapes = [local_shape(module.shapes[i], cut, model.by_name) for i, cut in zip(own, of_each, strict=True)]
    chosen = within(options, paths, names)
    layout = plan_layout(
        dict(zip(names.values(), shapes, strict=True)),
        wire.axes.shards(strategy.optimizer),
        granularity=chosen.granularity,
        rows=chosen.rows,
        align=chosen.align,
    )
    name = f"{module.path} ({', '.join(words)})" if words else module.path
    common = name, module.path, paths, layout, wire, strategy, key.trainable, module.layers
    if model.names:
        cut = CutGroup if wire.float8 is None else CutFloat8Group
        return cut(*common, model, of_each)
    return FlatGroup(*common) if wire.float8 is None else Float8Group(*common)


def _logical_group(
    module: UnitModule, own: Sequence[int], options: UnitOptions, key: _GroupKey, mesh: Mesh, cuts: Cuts
) -> LogicalGroup:
    stack = () if module.layers is None else (module.layers,)
    wire, strategy, sizes = key.wire, key.strategy(options), ModelAxes.of(mesh).by_name
    arrays = tuple(
        logical_array(
            path, (*stack, *module.shapes[i]), wire, strategy, module.layers, cuts.get(path, ()), sizes
        )
        for i, path in ((i, module.parameters[i]) for i in own)
    )
    group = LogicalGroup if wire.float8 is None else Float8LogicalGroup
    return group(module.path, arrays, mesh, wire, strategy, key.trainable, module.layers)


def _numbers_by_key(module: UnitModule, resolved: Resolved) -> dict[_GroupKey, list[int]]:
    """The indices of a unit's parameters by group: trainable parameters by dtype, then frozen parameters by dtype.

    Within a dtype, parameters that are gathered as float8 come first, and replicated parameters come last.
    """
    precision, axes, in_rows = resolved.precision, DataParallelMesh.of(resolved.mesh), is_tpu(resolved.mesh)
    by_key: dict[_GroupKey, list[int]] = {}
    mains: list[np.dtype] = []
    for i, (path, dtype) in enumerate(zip(module.parameters, module.dtypes, strict=True)):
        trainable = path not in resolved.frozen
        _check_dtype(path, dtype)
        if trainable:
            _check_trained(path, dtype, precision.main_dtype)
        quantized = is_quantized(module.shapes[i])
        dtypes = precision.of_group(dtype, trainable=trainable, quantized=quantized)
        used = (dtypes.main, dtypes.compute, dtypes.reduce, dtypes.grad)
        wire = Wire(axes, *used, in_rows=in_rows, float8=dtypes.gather)
        key = _GroupKey(trainable, wire, path in resolved.replicated)
        by_key.setdefault(key, []).append(i)
        mains.append(dtypes.main)

    def order(key: _GroupKey) -> tuple[bool, int, bool, bool]:
        return not key.trainable, mains.index(key.wire.main), key.wire.float8 is None, key.replicated

    return {key: by_key[key] for key in sorted(by_key, key=order)}


def _check_dtype(path: str, dtype: np.dtype) -> None:
    wide = is_integer(dtype) or (jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 8)
    if not wide:
        raise ValueError(
            f"parameter {path!r}: expected a floating or integer dtype of 8 bits or more, or bool, got {dtype}"
        )


def _check_trained(path: str, dtype: np.dtype, wanted: str | None) -> None:
    if is_integer(dtype):
        raise ValueError(
            f"parameter {path!r}: expected a floating dtype for a trainable parameter, got {dtype}: freeze the "
            f"parameter (frozen=[{path!r}]), which keeps its value"
        )
    if jnp.finfo(dtype).bits < 16:
        raise ValueError(
            f"parameter {path!r}: expected 16 bits or more for a trainable parameter, got {dtype}: freeze the "
            f"parameter (frozen=[{path!r}]), which keeps its value, or pass it as float32"
        )
    if wanted not in ("float32", None) and (wanted == "float64") != (dtype == np.float64):
        raise ValueError(
            f"parameter {path!r}: expected {'' if wanted == 'float64' else 'a dtype narrower than '}float64 with "
            f"main_dtype={wanted!r}, got {dtype}: cast the model first"
        )
