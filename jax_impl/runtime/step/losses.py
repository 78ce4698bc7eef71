"""The results of a loss for one part of the batch, and how a step combines the results of all parts.

A part contains the rows of one call of the loss: the rows of one device in one microbatch; in the pjit engine, of all
devices. A loss returns the mean over its part, or ``(sum, weight)``, such as summed token losses and the number of
tokens::

    returned          a part adds                the step's loss and gradients      statistics with it (``aux``)
    mean              mean, and 1                sum / number of parts              floats: weighted mean of the parts
    (sum, weight)     sum, and weight            sum / sum of the weights           integers, bools: sum over the parts

Means over unequal parts are silently wrong. Pairs are right: 3 tokens of one device count as much as 3 tokens of
another. The divisor of loss, statistics and gradients over all parts::

    loss returns        grad_divisor     divisor
    mean                None             the number of parts: the mean over equal parts
    (sum, weight)       None             the sum of the weights; 1 where that is zero, since the sums are zeros, too
    sum                 a number         that number; 1 gives sums
    mean                by unit          the number of parts; gradients of these units by their own number

A divisor for a unit is for weights that do not see each part once, such as experts that get the tokens of four devices,
each of which has averaged its own. In float16, reductions take means over the devices (``Wire.averages``), so the
remaining divisor is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl.comm.collectives import divide_exactly, fence
from jax_impl.modules.module_tree import matches
from jax_impl.modules.seal import mark_numbers
from jax_impl.modules.uneven_means import LOSS, WEIGHT
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan


class LossParts(NamedTuple):
    """The results of one part, or summed over several. ``weight``: None if every part counts once. ``aux``: a pytree or
    None."""

    value: jax.Array
    weight: jax.Array | None
    aux: Any

    def metrics(self, has_aux: bool) -> dict[str, Any]:
        """What a step reports of its loss."""
        weight = {} if self.weight is None else {"weight": self.weight}
        return {"loss": self.value, **weight, **({"aux": self.aux} if has_aux else {})}


def as_parts(returned: Any, has_aux: bool, *, trained: bool = True) -> LossParts:
    """A loss's return value in a form that can be summed over parts. Raises ``ValueError`` for anything else.

    ``trained``: whether a step trains on the loss; then ``aux`` has no derivative.
    """
    aux = None
    if has_aux:
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise ValueError(f"loss: expected (loss, aux), since has_aux=True, got {_described(returned)}")
        returned, aux = returned
    pair = _is_pair(returned)
    if not is_loss(returned):
        raise ValueError(
            f"loss: expected a floating-point scalar, or (sum, weight) of two scalars, got {_described(returned)}. To "
            "return statistics with the loss, pass has_aux=True and return (loss, statistics)"
        )
    if not pair:
        return LossParts(mark_numbers(jnp.asarray(returned), LOSS), None, _addable(aux, None, trained))
    value, weight = (jnp.asarray(x) for x in returned)
    # A count in bfloat16 would stop at 256, since 257 rounds to 256.
    dtype = jnp.promote_types(value.dtype, jnp.float32)
    # The loss is sum / weight. A weight that depends on the model is refused (uneven_means.py), so its derivative is
    # zero and need not be traced.
    weight = lax.stop_gradient(mark_numbers(weight.astype(dtype), WEIGHT))
    return LossParts(mark_numbers(value.astype(dtype), LOSS), weight, _addable(aux, weight, trained))


def is_loss(returned: Any) -> bool:
    """Whether the value is a floating-point scalar or ``(sum, weight)``."""
    if _is_pair(returned):
        return True
    return _is_number(returned) and bool(jnp.issubdtype(jnp.result_type(returned), jnp.floating))


def _is_pair(returned: Any) -> bool:
    return isinstance(returned, tuple) and len(returned) == 2 and all(map(_is_number, returned))


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int | np.generic | np.ndarray | jax.Array) and jnp.shape(value) == ()


def _described(returned: Any) -> str:
    if isinstance(returned, tuple):
        return f"a tuple of {', '.join(map(_described, returned)) or 'nothing'}"
    if isinstance(returned, np.ndarray | jax.Array):
        return f"{returned.dtype} of shape {returned.shape}"
    return type(returned).__name__


def _addable(aux: Any, weight: jax.Array | None, trained: bool) -> Any:
    def addable(leaf: Any) -> jax.Array:
        # Statistics are reported, not trained on. A program may derive those of an evaluation.
        value = lax.stop_gradient(jnp.asarray(leaf)) if trained else jnp.asarray(leaf)
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value.astype(jnp.int32) if value.dtype == jnp.bool_ else value
        return value if weight is None else value * weight.astype(value.dtype)

    return jax.tree.map(addable, aux)


def twice_as_many(batch: Any) -> Any:
    """The shapes of a batch with twice the rows.

    A result's first dimension may equal the number of rows by chance: 8 features of 8 rows. Another number of rows
    shows whether it does.
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype), batch)


def sum_over_devices(parts: LossParts, axes: Sequence[str]) -> LossParts:
    """Inside ``shard_map``: sum over devices with one collective per dtype, one after another."""
    leaves, tree = jax.tree.flatten(parts)
    by_dtype: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        by_dtype.setdefault(leaf.dtype, []).append(index)
    last: list[jax.Array] = []
    for indices in by_dtype.values():
        # One after another, as simulated devices require.
        own, last = fence(([leaves[i] for i in indices], last))
        if len(own) == 1:
            own = [lax.psum(own[0], axes)]
        else:
            summed = lax.psum(jnp.concatenate([x.reshape(-1) for x in own]), axes)
            ends = np.cumsum([x.size for x in own])[:-1]
            own = [part.reshape(x.shape) for part, x in zip(jnp.split(summed, ends), own, strict=True)]
        last = own
        for index, value in zip(indices, own, strict=True):
            leaves[index] = value
    return jax.tree.unflatten(tree, leaves)


@dataclass(frozen=True)
class Divisors:
    """``loss``: None to divide by the loss's weight or the number of parts. ``gradients``: other divisors, by key.

    ``averaged``: by key, the factor by which the reduction has already divided.
    """

    parts: int
    loss: float | None
    gradients: Mapping[str, float]
    averaged: Mapping[str, int]

    @classmethod
    def of(
        cls, plan: ShardingPlan, microbatches: int, grad_divisor: float | Mapping[str, float] | None
    ) -> Divisors:
        """Raises ``ValueError`` for a divisor that is not a positive number, and for a pattern that matches no unit."""
        flat = plan.engine == "shard_map"
        by_pattern: Mapping[str, float] = grad_divisor if isinstance(grad_divisor, Mapping) else {}
        own: dict[str, float] = {}
        averaged: dict[str, int] = {}
        for path, unit in plan.units.items():
            divisor = next((d for pattern, d in by_pattern.items() if matches(path, pattern)), None)
            for group in unit.groups:
                for key in group.stored if group.trainable else ():
                    if divisor is not None:
                        own[key] = divisor
                    if flat and group.wire.averages:
                        averaged[key] = plan.data_ranks
        if isinstance(grad_divisor, Mapping):
            _check_patterns(plan, grad_divisor)
        elif grad_divisor is not None:
            _check("grad_divisor", grad_divisor)
        whole = None if isinstance(grad_divisor, Mapping) else grad_divisor
        return cls(microbatches * (plan.data_ranks if flat else 1), whole, own, averaged)

    def divide(self, parts: LossParts, gradients: Buffers) -> tuple[LossParts, Buffers]:
        """Loss, floating-point statistics and gradients from their sums over all parts.

        Raises ``ValueError`` for a ``(sum, weight)`` with a ``grad_divisor``.
        """
        divisor: Any = self.parts if self.loss is None else self.loss
        counted: Any = self.parts
        if parts.weight is not None:
            if self.loss is not None or self.gradients:
                raise ValueError(
                    "loss: expected a scalar, since grad_divisor is given, got (sum, weight), which contains its own "
                    "divisor: return the sum, or remove grad_divisor"
                )
            divisor = counted = jnp.where(parts.weight == 0, jnp.ones_like(parts.weight), parts.weight)

        def statistic(x: jax.Array) -> jax.Array:
            return divide_exactly(x, counted) if jnp.issubdtype(x.dtype, jnp.floating) else x

        def gradient(key: str, x: jax.Array) -> jax.Array:
            left = self.gradients.get(key, divisor) / self.averaged.get(key, 1)
            return divide_exactly(x, left)

        loss = LossParts(
            divide_exactly(parts.value, divisor), parts.weight, jax.tree.map(statistic, parts.aux)
        )
        return loss, {key: gradient(key, x) for key, x in gradients.items()}


def _check_patterns(plan: ShardingPlan, by_pattern: Mapping[str, float]) -> None:
    for pattern, divisor in by_pattern.items():
        _check(f"grad_divisor[{pattern!r}]", divisor)
        if not any(matches(path, pattern) for path in plan.units):
            raise ValueError(
                f"grad_divisor: expected patterns of units, but {pattern!r} matches none of {list(plan.units)[:12]}"
            )


def _check(name: str, divisor: Any) -> None:
    number = isinstance(divisor, int | float) and not isinstance(divisor, bool)
    if not number or not 0 < divisor < math.inf:
        raise ValueError(f"{name}: expected a positive number, got {divisor!r}")
