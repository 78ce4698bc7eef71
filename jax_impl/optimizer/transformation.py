"""The common parts of optimizers of main weights: the optax interface, checks of arguments, and arithmetic. ``of``: the
optimizer's name, for errors.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jax_impl.comm.collectives import fence, round_to
from jax_impl.optimizer.moments import MomentArrays, MomentFormat
from jax_impl.optimizer.plan_moments import PlanMoments
from jax_impl.runtime.groups.precision import update_dtype
from jax_impl.runtime.groups.sharding_plan import ShardingPlan


class MainWeightTransformation(optax.GradientTransformation):
    """An optax transformation that can also return the new weights themselves.

    ``apply(gradients, state, weights) -> (weights, state)``. Adding optax's ``updates`` to the weights rounds once
    more, which does not matter for training but changes bits. ``learning_rate``: a number, or a schedule over the
    completed steps. ``on_plan``: the transformation for the arrays of a plan, if that differs. ``formats``: the formats
    of the moments, by their fields of the state; the scales are in fields next to these (``mu``, ``mu_scale``).
    ``with_formats``: the same transformation with other formats. ``with_arrays``: the same transformation with another
    arrangement of moments.
    """

    apply: Callable[[Any, Any, Any], tuple[Any, Any]]
    learning_rate: float | optax.Schedule
    on_plan: Callable[[ShardingPlan], MainWeightTransformation]
    formats: Mapping[str, MomentFormat]
    with_formats: Callable[[Mapping[str, MomentFormat]], MainWeightTransformation]
    with_arrays: Callable[[MomentArrays], MainWeightTransformation]

    def __new__(
        cls,
        init: Callable[[Any], Any],
        apply: Callable[[Any, Any, Any], tuple[Any, Any]],
        learning_rate: float | optax.Schedule,
        on_plan: Callable[[ShardingPlan], MainWeightTransformation],
        formats: Mapping[str, MomentFormat],
        with_formats: Callable[[Mapping[str, MomentFormat]], MainWeightTransformation],
        name: str,
        with_arrays: Callable[[MomentArrays], MainWeightTransformation] | None = None,
    ) -> MainWeightTransformation:
        def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            if params is None:
                raise ValueError(f"{name}: expected the weights as third argument of update, got None")
            weights, state = apply(gradients, state, params)
            return jax.tree.map(jnp.subtract, weights, params), state

        self = super().__new__(cls, init, update)
        self.apply = apply
        self.learning_rate = learning_rate
        self.on_plan = on_plan
        self.formats = formats
        self.with_formats = with_formats
        self.with_arrays = with_arrays or (lambda _: self)
        return self


@dataclass(frozen=True)
class ByArray:
    """An optimizer that updates each array of weights separately. ``formats``: as in ``MainWeightTransformation``.

    ``state``: makes a state from the count of steps and its other fields. ``scalars(count, rate, dtype)``: what the
    update of all arrays of a dtype needs. ``update(formats, rows, (weight, moments), gradient, (count, scalars))``: the
    new weight and moments of one array, or of a device's shard of the array.
    """

    name: str
    learning_rate: float | optax.Schedule
    formats: Mapping[str, MomentFormat]
    state: Callable[..., Any]
    scalars: Callable[[jax.Array, Any, np.dtype], Any]
    update: Callable[..., tuple[jax.Array, list[Any]]]

    def on(self, arrays: MomentArrays) -> MainWeightTransformation:
        """The transformation with this arrangement of moments."""

        def init(weights: Any) -> Any:
            check_weights(weights, self.name)
            zeros = [arrays.zeros(each, weights) for each in self.formats.values()]
            return self._state(jnp.zeros((), jnp.int32), zeros)

        def on_plan(plan: ShardingPlan) -> MainWeightTransformation:
            # Other formats treat each element alike, wherever it is stored.
            scaled = any(each.scaled for each in self.formats.values())
            return self.on(PlanMoments(plan)) if scaled else own

        def with_formats(formats: Mapping[str, MomentFormat]) -> MainWeightTransformation:
            return replace(self, formats={**self.formats, **formats}).on(arrays)

        apply, rate = partial(self._apply, arrays), self.learning_rate
        own = MainWeightTransformation(
            init, apply, rate, on_plan, self.formats, with_formats, self.name, self.on
        )
        return own

    def _state(self, count: jax.Array, moments: Sequence[tuple[Any, Any]]) -> Any:
        fields: dict[str, Any] = {}
        for name, (values, scales) in zip(self.formats, moments, strict=True):
            fields |= {name: values, f"{name}_scale": scales}
        return self.state(count, **fields)

    def _apply(self, arrays: MomentArrays, gradients: Any, state: Any, weights: Any) -> tuple[Any, Any]:
        check_weights(weights, self.name)
        count, formats = state.count + 1, list(self.formats.values())
        rate = rate_after(self.learning_rate, state.count, self.name)
        structure: Any
        paths, structure = jax.tree.flatten_with_path(weights)
        dtypes = {update_dtype(leaf.dtype) for _, leaf in paths}
        scalars = {dtype: self.scalars(count, rate, dtype) for dtype in dtypes}
        rows = [arrays.rows(each, weights) for each in formats]
        moments = [
            arrays.parts(own, weights, getattr(state, name), getattr(state, f"{name}_scale"))
            for name, own in zip(self.formats, rows, strict=True)
        ]
        slopes = structure.flatten_up_to(gradients)
        done: list[tuple[jax.Array, list[Any]]] = []
        for number, (path, weight) in enumerate(paths):
            check_gradient(path, weight, slopes[number], self.name)
            compute = partial(self.update, formats, [own[number] for own in rows])
            held = weight, [own[number] for own in moments]
            numbers = count, scalars[update_dtype(weight.dtype)]
            done.append(arrays.compute_on(number, weights, compute, held, slopes[number], numbers))
        new = jax.tree.unflatten(structure, [weight for weight, _ in done])
        joined = [
            arrays.join(each, weights, [own[number] for _, own in done])
            for number, each in enumerate(formats)
        ]
        return new, self._state(count, joined)


def check_rate(name: str, value: Any, of: str) -> None:
    """Raise ``TypeError`` unless ``value`` is a number, schedule or scalar array; ``ValueError`` if below 0."""
    if callable(value):
        return
    if isinstance(value, jax.Array | np.ndarray):
        real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
        if value.shape != () or not real:
            raise TypeError(
                f"{of}: {name}: expected a number or a schedule, got an array of {value.dtype}, shape {value.shape}"
            )
        if isinstance(value, jax.core.Tracer):
            return
    elif not _is_number(value):
        raise TypeError(f"{of}: {name}: expected a number or a schedule, got {value!r}")
    _check_range(name, value, of)


def check_number(name: str, value: Any, of: str) -> None:
    """Raise ``TypeError`` unless ``value`` is a number, which becomes a constant of the program."""
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{of}: {name}: expected a number, got an array, into which optax.inject_hyperparams turns each number "
            "that is not listed in static_args: list all numbers except learning_rate, "
            f"optax.inject_hyperparams({of}, static_args=({name!r}, ...)), or drop inject_hyperparams and pass the "
            f"schedule itself to {of}"
        )
    if not _is_number(value):
        raise TypeError(f"{of}: {name}: expected a number, got {value!r}")


def check_not_negative(name: str, value: Any, of: str) -> None:
    """Raise ``TypeError`` as ``check_number`` does; ``ValueError`` for a number below 0."""
    check_number(name, value, of)
    _check_range(name, value, of)


def numbers_of(name: str, values: Any, count: int, of: str) -> tuple[float, ...]:
    """Return a tuple. Raises ``TypeError`` for values that are not numbers, ``ValueError`` for another ``count``."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{of}: {name}: expected {count} numbers, got {values!r}")
    listed = tuple(values)
    for value in listed:
        check_number(name, value, of)
    if len(listed) != count:
        raise ValueError(f"{of}: {name}: expected {count} numbers, got {listed!r}")
    return listed


def check_flag(name: str, value: Any, of: str) -> None:
    """Raise ``TypeError`` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{of}: {name}: expected True or False, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check_range(name: str, value: Any, of: str) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{of}: expected {name} >= 0, got {value}")


def check_weights(weights: Any, of: str) -> None:
    for path, leaf in jax.tree.leaves_with_path(weights):
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.finfo(leaf.dtype).bits < 16:
            raise ValueError(
                f"{of}: expected weights of a floating dtype of 16 bits or more, got {leaf.dtype}{_at(path)}"
            )


def check_gradient(path: Any, weight: Any, gradient: Any, of: str) -> None:
    shape = getattr(gradient, "shape", None)
    if shape != weight.shape or not jnp.issubdtype(gradient.dtype, jnp.floating):
        got = type(gradient).__name__ if shape is None else f"{gradient.dtype} of shape {shape}"
        raise ValueError(
            f"{of}: expected a floating-point gradient of shape {weight.shape}, got {got}{_at(path)}"
        )


def _at(path: Any) -> str:
    return f" at {jax.tree_util.keystr(path)}" if path else ""


def rate_after(given: float | optax.Schedule, done: jax.Array, of: str) -> float | jax.Array:
    """The learning rate after ``done`` steps; a number if ``given`` is one or does not depend on ``done``."""
    if not callable(given):
        return given
    rate = given(done)
    if np.shape(rate) != () or not jnp.issubdtype(jnp.result_type(rate), jnp.number):
        raise ValueError(
            f"{of}: expected a schedule that returns a scalar, got {type(rate).__name__}"
            f" of shape {np.shape(rate)}"
        )
    if isinstance(rate, jax.Array):
        return rate
    check_not_negative("learning_rate", float(rate), of)
    return float(rate)


def as_stored(weights: jax.Array, dtype: np.dtype) -> jax.Array:
    """Updated weights in the dtype of main weights, rounded once."""
    if dtype != jnp.float16:
        return round_to(weights, dtype)
    # ``round_to`` flushes numbers below 2**-14 to zero, and many weights are that small. The fence preserves the
    # rounding of the cast: XLA may drop a cast to float16 and back as excess precision.
    return fence(weights.astype(dtype))


def lerp(m: jax.Array, g: jax.Array, weight: np.floating) -> jax.Array:
    """Interpolate from ``m`` towards ``g``, starting from the nearer one, as in PyTorch."""
    return m + weight * (g - m) if weight < 0.5 else g + (weight - weight.dtype.type(1)) * (g - m)


def negative(rate: float | jax.Array, dtype: np.dtype, factor: float = 1.0) -> Any:
    """``-(rate * factor)``, computed as a double and rounded once to ``dtype``."""
    if not isinstance(rate, jax.Array):
        return dtype.type(-(rate * factor))
    with jax.enable_x64(True):
        double = lax.convert_element_type(rate, np.float64)
        return lax.convert_element_type(-(double * np.float64(factor)), dtype)
