"""SGD with momentum on main-weight shards, with the same results as PyTorch's SGD.

For every element, as listed in ``torch_impl.optimizer.main_weight_sgd``. ``[x]`` is a number that is rounded once to
the dtype of the update, ``fma(x, y, z)`` is ``x * y + z`` rounded once; every other operation rounds::

    1   g = the gradient in the dtype of the update
    2   g = fma([weight_decay], w, g)                   if weight_decay
    3   m = fma([1 - dampening], g, m * [momentum])     in the first step m = g; only with momentum
    4   g = fma([momentum], m, g) with nesterov, else m
    5   w = fma([-lr], g, w)

The update computes in float64 for float64 weights, else in float32; bfloat16 and float16 weights are rounded once, when
they are stored.

With the same gradients, the compiled step gives the weights and momentum of ``torch.optim.SGD`` on CPU bit for bit, in
float32 and float64, for any number of devices, except subnormal numbers, which JAX flushes to zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_impl.optimizer.moments import MomentArrays, MomentFormat, MomentRows, Parts
from jax_impl.optimizer.transformation import (
    ByArray,
    MainWeightTransformation,
    as_stored,
    check_flag,
    check_not_negative,
    check_number,
    check_rate,
    negative,
)
from jax_impl.runtime.groups.precision import update_dtype

_NAME = "main_weight_sgd"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SGDState:
    """``count``: int32 scalar, steps done. ``trace``: momentum, shaped and sharded like the weights, or None.

    ``trace_scale``: a float32 scale for each row of a scaled momentum; None for formats without scales.
    """

    count: jax.Array
    trace: Any = None
    trace_scale: Any = None


@dataclass(frozen=True)
class _SGD:
    """The constants of all steps."""

    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool


def main_weight_sgd(
    learning_rate: float | optax.Schedule,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    *,
    momentum_dtype: Any = None,
) -> MainWeightTransformation:
    """SGD with the arguments of PyTorch's SGD; ``learning_rate`` as in ``main_weight_adamw``.

    Works on any pytree of float arrays of 16 bits or more. Gradients have the same shapes and any floating dtype.

    momentum_dtype: the format of momentum between steps, as ``mu_dtype`` of ``main_weight_adamw``.

    Raises ``ValueError`` for numbers below 0, and for ``nesterov`` without momentum or with dampening, and
    ``TypeError`` for wrong types. ``init`` and ``update`` raise for weights of a wrong dtype, ``update`` for gradients
    of a wrong shape and for a schedule that does not return a scalar.
    """
    check_rate("learning_rate", learning_rate, _NAME)
    check_not_negative("momentum", momentum, _NAME)
    check_not_negative("weight_decay", weight_decay, _NAME)
    check_number("dampening", dampening, _NAME)
    check_flag("nesterov", nesterov, _NAME)
    if nesterov and (not momentum or dampening):
        raise ValueError(
            f"{_NAME}: nesterov: expected momentum > 0 and dampening = 0, got momentum={momentum}, "
            f"dampening={dampening}"
        )
    moment_format = MomentFormat.of("momentum_dtype", momentum_dtype)
    settings = _SGD(momentum, dampening, weight_decay, nesterov)
    formats = {"trace": moment_format} if momentum else {}

    def step_size(count: jax.Array, rate: float | jax.Array, dtype: np.dtype) -> Any:
        return negative(rate, dtype)

    update = partial(_update_array, settings)
    return ByArray(_NAME, learning_rate, formats, SGDState, step_size, update).on(MomentArrays())


def _update_array(
    settings: _SGD,
    formats: Sequence[MomentFormat],
    rows: Sequence[MomentRows],
    held: tuple[jax.Array, list[Parts]],
    gradient: jax.Array,
    numbers: Any,
) -> tuple[jax.Array, list[Parts]]:
    (weight, stored), (count, step_size) = held, numbers
    w = weight.astype(update_dtype(weight.dtype))
    number = w.dtype.type

    def opaque(x: Any, of: jax.Array) -> jax.Array:
        # The per-element select forces rounding: see main_weight_adamw.py. Only NaN gives NaN.
        return jnp.where(of == of, x, number(np.nan))

    g = gradient.astype(w.dtype)
    if settings.momentum or settings.weight_decay:
        # A gradient from the same program may be a product.
        g = opaque(g, g)
    if settings.weight_decay:
        g = w * number(settings.weight_decay) + g
    if not settings.momentum:
        return as_stored(w + step_size * g, weight.dtype), stored
    m = rows[0].decode(stored[0])
    # Momentum starts at zero.
    share = (
        jnp.where(count == 1, number(1), number(1 - settings.dampening)) if settings.dampening else number(1)
    )
    m = share * g + opaque(m * number(settings.momentum), m)
    new = rows[0].encode(formats[0], m, count)
    g = m * number(settings.momentum) + g if settings.nesterov else m
    return as_stored(w + step_size * g, weight.dtype), [new]
