"""Muon on main weights: matrices with the arithmetic of ``torch.optim.Muon``, the rest with ``main_weight_adamw``.

``muon_update.py`` lists the arithmetic line by line; line 3 needs whole matrices. On a plan (``logical.py``) each step
gathers weights and gradients unit by unit, and moments are cut along a dimension that the number of shards divides. For
line 3, ``u`` travels in bfloat16. A single matrix goes to all devices, which all compute the same. If the number of
shards divides the number of matrices in a stack, each device gets its share of whole matrices and sends ``o`` back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from bridge.core.sharding.layout.matrices import MUON_DIMENSIONS
from jax_impl.comm.collectives import fence
from jax_impl.optimizer.logical import arrays_of_parameters, parameters_of_arrays
from jax_impl.optimizer.main_weight_adamw import AdamWState, main_weight_adamw
from jax_impl.optimizer.moments import MomentArrays, MomentFormat
from jax_impl.optimizer.muon_update import Constants, accumulate, apply_step, orthogonalize
from jax_impl.optimizer.plan_moments import ParameterMoments
from jax_impl.optimizer.transformation import (
    MainWeightTransformation,
    check_flag,
    check_gradient,
    check_not_negative,
    check_number,
    check_rate,
    check_weights,
    numbers_of,
    rate_after,
)
from jax_impl.runtime.groups.precision import update_dtype
from jax_impl.runtime.groups.sharding_plan import ShardingPlan

_NAME = "main_weight_muon"
_ADJUSTMENTS = (None, "original", "match_rms_adamw")
Rule = Callable[[str, jax.ShapeDtypeStruct], bool | tuple[int, int]]
"""See ``main_weight_muon``."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MuonState:
    """By path: ``trace``: momentum of matrices; ``mu``, ``nu``: AdamW's moments of the rest. ``count``: steps done.

    ``trace_scale``, ``mu_scale``, ``nu_scale``: a float32 scale for each row of a scaled moment; None without scales.
    """

    count: jax.Array
    trace: dict[str, jax.Array]
    mu: dict[str, jax.Array]
    nu: dict[str, jax.Array]
    trace_scale: Any = None
    mu_scale: Any = None
    nu_scale: Any = None


def is_matrix(path: str, leaf: jax.ShapeDtypeStruct) -> bool:
    """Whether a parameter has two dimensions."""
    return len(leaf.shape) in MUON_DIMENSIONS["jax"]


@dataclass(frozen=True)
class _Muon:
    """The user's settings. ``adamw``: updates the other parameters. ``trace``: the format of momentum."""

    learning_rate: float | optax.Schedule
    constants: Constants
    use_muon: Rule
    adamw: MainWeightTransformation
    trace: MomentFormat


def main_weight_muon(
    learning_rate: float | optax.Schedule = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    *,
    use_muon: Rule | None = None,
    adamw_learning_rate: float | optax.Schedule | None = None,
    adamw_b1: float = 0.9,
    adamw_b2: float = 0.999,
    adamw_eps: float = 1e-8,
    adamw_weight_decay: float = 0.01,
    momentum_dtype: Any = None,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    outputs: int = -1,
) -> MainWeightTransformation:
    """Muon with the arguments and defaults of ``torch.optim.Muon``; ``learning_rate`` as in ``main_weight_adamw``.

    Works on any pytree of float arrays of 16 bits or more. Gradients have the same shapes and any floating dtype.

    use_muon: whether Muon updates a parameter, given its path ("layers/0/kernel") and its shape and dtype (of one layer
        for a stack). None: all parameters of two dimensions. For more dimensions, True makes matrices of the last two,
        as for experts; ``(1, 2)`` makes matrices of the last three, one input and two output dimensions, as in kernels
        of attention; ``(2, 1)`` is for its output kernel. Embeddings and output heads are matrices, too, but Muon's
        authors leave them to AdamW: exclude them by path.
    adamw_learning_rate, ...: for the rest, as in ``main_weight_adamw``; by default the rate is ``learning_rate``.
    momentum_dtype, mu_dtype, nu_dtype: formats of moments between steps, as ``mu_dtype`` of ``main_weight_adamw``.

    outputs: the output dimension of a matrix, for the adjustment of the rate: -1 for JAX's kernels ``[..., inputs,
        outputs]``, -2 for PyTorch's weights.

    Raises ``ValueError`` for hyperparameters out of range and ``TypeError`` for wrong types. ``init`` and ``update``
    raise for weights of a wrong dtype and for a parameter of less than two dimensions that the rule gives to Muon,
    ``update`` for gradients of a wrong shape and for a schedule that does not return a scalar.
    """
    check_rate("learning_rate", learning_rate, _NAME)
    for name, number in (("weight_decay", weight_decay), ("momentum", momentum), ("eps", eps)):
        check_not_negative(name, number, _NAME)
    check_flag("nesterov", nesterov, _NAME)
    if adjust_lr_fn not in _ADJUSTMENTS:
        raise ValueError(f"{_NAME}: adjust_lr_fn: expected one of {_ADJUSTMENTS}, got {adjust_lr_fn!r}")
    use_muon = is_matrix if use_muon is None else use_muon
    if not callable(use_muon):
        raise ValueError(
            f"{_NAME}: use_muon: expected a function of a parameter's path and shape, such as "
            f"lambda path, leaf: len(leaf.shape) == 2 and path != 'head', got {use_muon!r}"
        )
    if outputs not in (-1, -2):
        raise ValueError(f"{_NAME}: outputs: expected -1 or -2, got {outputs}")
    if isinstance(ns_steps, bool) or not isinstance(ns_steps, int):
        raise TypeError(f"{_NAME}: ns_steps: expected an integer, got {ns_steps!r}")
    if not 0 <= ns_steps < 100:
        raise ValueError(f"{_NAME}: ns_steps: expected 0 <= ns_steps < 100, got {ns_steps}")
    coefficients = numbers_of("ns_coefficients", ns_coefficients, 3, _NAME)
    rate = learning_rate if adamw_learning_rate is None else adamw_learning_rate
    check_rate("adamw_learning_rate", rate, _NAME)
    for name, number in (("eps", adamw_eps), ("weight_decay", adamw_weight_decay)):
        check_not_negative(f"adamw_{name}", number, _NAME)
    for name, number in (("adamw_b1", adamw_b1), ("adamw_b2", adamw_b2)):
        check_number(name, number, _NAME)
    adamw = main_weight_adamw(
        rate, adamw_b1, adamw_b2, adamw_eps, adamw_weight_decay, mu_dtype=mu_dtype, nu_dtype=nu_dtype
    )
    constants = Constants(
        weight_decay, momentum, nesterov, coefficients, eps, ns_steps, adjust_lr_fn, outputs
    )
    settings = _Muon(
        learning_rate, constants, use_muon, adamw, MomentFormat.of("momentum_dtype", momentum_dtype)
    )
    return _on_tree(settings)


@dataclass(frozen=True)
class _Matrices:
    """The placement of matrices. ``plan`` None: for a pytree that belongs to no plan."""

    settings: _Muon
    arrays: MomentArrays
    plan: ShardingPlan | None = None

    def split(self, weights: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Muon's parameters, and the rest."""
        apart: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for path, leaf in sorted(weights.items()):
            shape = self.layer_shape(path, tuple(leaf.shape))
            dimensions = self._dimensions(path, shape, leaf.dtype)
            if dimensions is not None and len(shape) < sum(dimensions):
                raise ValueError(
                    f"{_NAME}: expected matrices if use_muon is true, got {path!r} of shape {shape}"
                )
            apart[1 if dimensions is None else 0][path] = leaf
        return apart

    def matrix_shape(self, path: str, leaf: Any) -> tuple[int, ...]:
        """The shape ``[..., rows, columns]`` of a parameter as one or more matrices."""
        shape = tuple(leaf.shape)
        dimensions = self._dimensions(path, self.layer_shape(path, shape), leaf.dtype)
        assert dimensions is not None
        columns = len(shape) - dimensions[1]
        rows = columns - dimensions[0]
        return (*shape[:rows], math.prod(shape[rows:columns]), math.prod(shape[columns:]))

    def _dimensions(self, path: str, shape: tuple[int, ...], dtype: Any) -> tuple[int, int] | None:
        """The number of a layer's dimensions that are rows, and columns; None if Muon does not update the parameter."""
        muon = self.settings.use_muon(path, jax.ShapeDtypeStruct(shape, dtype))
        return (1, 1) if muon is True else (muon or None)

    def layer_shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape without the layer dimension of a stack."""
        return shape if self.plan is None or self.plan.layers_of(path) is None else shape[1:]

    def whole(self, path: str, direction: jax.Array, stack: bool) -> jax.Array:
        """Place whole matrices on the devices that orthogonalize them. ``stack``: whether they are several."""
        if self.plan is None:
            return direction
        spec = PartitionSpec()
        array = self.plan.logical[path]
        if stack and array.level and not array.cuts:
            shards = array.wire.axes.shards(array.level)
            if direction.shape[0] % shards == 0:
                spec = PartitionSpec(array.wire.axes.names[: array.level])
        return lax.with_sharding_constraint(direction, NamedSharding(self.plan.mesh, spec))

    def apart(self, path: str, direction: jax.Array) -> jax.Array:
        """Shard like the moments of the parameter."""
        if self.plan is None:
            return direction
        return lax.with_sharding_constraint(
            direction, NamedSharding(self.plan.mesh, self.plan.logical[path].spec)
        )


def _on_tree(settings: _Muon) -> MainWeightTransformation:
    """The transformation for any pytree; its ``on_plan`` is for the arrays of a plan."""
    matrices = _Matrices(settings, MomentArrays())

    def init(weights: Any) -> MuonState:
        return _initial(matrices, settings.adamw, _by_path(weights))

    def apply(gradients: Any, state: MuonState, weights: Any) -> tuple[Any, MuonState]:
        structure: Any
        paths, structure = jax.tree.flatten_with_path(weights)
        slopes = dict(
            zip(map(_path, [path for path, _ in paths]), structure.flatten_up_to(gradients), strict=True)
        )
        new, state = _apply(matrices, settings.adamw, slopes, state, _by_path(weights))
        return jax.tree.unflatten(structure, [new[_path(path)] for path, _ in paths]), state

    return _made(settings, init, apply, _on_tree)


def _on_plan(settings: _Muon, plan: ShardingPlan) -> MainWeightTransformation:
    arrays = ParameterMoments(plan)
    matrices, adamw = _Matrices(settings, arrays, plan), settings.adamw.with_arrays(arrays)

    def init(weights: Any) -> MuonState:
        return _initial(matrices, adamw, parameters_of_arrays(plan, weights))

    def apply(gradients: Any, state: MuonState, weights: Any) -> tuple[Any, MuonState]:
        slopes, own = (parameters_of_arrays(plan, buffers) for buffers in (gradients, weights))
        new, state = _apply(matrices, adamw, slopes, state, own)
        return arrays_of_parameters(plan, new), state

    return _made(settings, init, apply, lambda changed: _on_plan(changed, plan))


def _made(
    settings: _Muon, init: Any, apply: Any, with_settings: Callable[[_Muon], MainWeightTransformation]
) -> MainWeightTransformation:
    """``with_settings``: the same transformation with other settings."""
    formats = {"trace": settings.trace, **settings.adamw.formats}

    def with_formats(others: Mapping[str, MomentFormat]) -> MainWeightTransformation:
        changed = {**formats, **others}
        trace = changed.pop("trace")
        return with_settings(replace(settings, trace=trace, adamw=settings.adamw.with_formats(changed)))

    on_plan, rate = partial(_on_plan, settings), settings.learning_rate
    return MainWeightTransformation(init, apply, rate, on_plan, formats, with_formats, _NAME)


def _path(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _by_path(weights: Any) -> dict[str, Any]:
    return {_path(keys): leaf for keys, leaf in jax.tree.leaves_with_path(weights)}


def _initial(matrices: _Matrices, adamw: MainWeightTransformation, weights: Mapping[str, Any]) -> MuonState:
    check_weights(weights, _NAME)
    own, rest = matrices.split(weights)
    trace, trace_scale = matrices.arrays.zeros(matrices.settings.trace, own)
    other: AdamWState = adamw.init(rest)
    return MuonState(other.count, trace, other.mu, other.nu, trace_scale, other.mu_scale, other.nu_scale)


def _apply(
    matrices: _Matrices,
    adamw: MainWeightTransformation,
    gradients: Mapping[str, Any],
    state: MuonState,
    weights: Mapping[str, Any],
) -> tuple[dict[str, Any], MuonState]:
    check_weights(weights, _NAME)
    settings, arrays = matrices.settings, matrices.arrays
    own, rest = matrices.split(weights)
    before = AdamWState(state.count, state.mu, state.nu, state.mu_scale, state.nu_scale)
    new, after = adamw.apply({path: gradients[path] for path in rest}, before, rest)
    rate = rate_after(settings.learning_rate, state.count, _NAME)
    rows = arrays.rows(settings.trace, own)
    moments = arrays.parts(rows, own, state.trace, state.trace_scale)
    stored = []
    last: Any = ()
    for (path, weight), kept, parts in zip(own.items(), rows, moments, strict=True):
        check_gradient((jax.tree_util.DictKey(path),), weight, gradients[path], _NAME)
        # The collectives of one matrix run after the collectives of another: see forward.hold.
        (gradient, parts), last = fence(((gradients[path], parts), last))
        m, direction = accumulate(
            settings.constants, kept.decode(parts), gradient.astype(update_dtype(weight.dtype))
        )
        stored.append(kept.encode(settings.trace, m, after.count))
        shape = matrices.matrix_shape(path, weight)
        whole = matrices.whole(path, direction, stack=len(shape) > 2)
        done = orthogonalize(settings.constants, whole.reshape(shape)).reshape(weight.shape)
        new[path] = last = apply_step(settings.constants, weight, matrices.apart(path, done), rate, shape)
    trace, trace_scale = arrays.join(settings.trace, own, stored)
    return new, MuonState(after.count, trace, after.mu, after.nu, trace_scale, after.mu_scale, after.nu_scale)
