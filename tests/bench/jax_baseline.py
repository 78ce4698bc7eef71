"""The step that a good JAX user writes by hand: optax, ``NamedSharding`` and one ``jax.jit``.

The step uses only the model of ``jax_impl``. Every parameter, like its moments, is sharded along its largest dimension
that the devices divide, as in big_vision. Layers are a stack under ``lax.scan``, or a list. Weights of a layer are cast
and gathered at their use, activations stay with their rows, XLA chooses the collectives, and the state is donated.

Without recompute XLA keeps the gathered weights of a layer until its backward, because there is no simple way to gather
them again. ``gather_weights=False`` sets no sharding for weights in use, so XLA decides what moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_impl.models import Decoder, next_token_loss

State = tuple[dict[str, Any], Any]
"""fp32 parameters by part of the model, and optax's state."""


@dataclass(frozen=True)
class Baseline:
    """``step``: jitted, ``(state, rows) -> (state, loss)``. ``shardings``: the shardings of a state.

    ``gradients``: the first half of a step, jitted, ``(fp32 parameters, rows) -> (loss, gradients)``.
    """

    step: Any
    gradients: Any
    shardings: State
    rows: NamedSharding
    _params: dict[str, Any]
    _optimizer: optax.GradientTransformation

    def state(self) -> State:
        """The state before the first step."""
        placed = jax.device_put(self._params, self.shardings[0])
        return placed, jax.jit(self._optimizer.init, out_shardings=self.shardings[1])(placed)

    def abstract_state(self) -> State:
        """Shapes and shardings of the state."""
        state = (self._params, jax.eval_shape(self._optimizer.init, self._params))
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, self.shardings
        )


def build_baseline(
    model: Decoder,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    *,
    dtype: Any = jnp.float32,
    recompute: bool = False,
    gather_weights: bool = True,
) -> Baseline:
    """``model``: sizes and values; a model of ``nnx.eval_shape`` has no values. ``dtype``: dtype of weights in use."""
    defs, params = _parts(model)
    (axis,) = mesh.axis_names
    rows, whole = NamedSharding(mesh, PartitionSpec(axis)), NamedSharding(mesh, PartitionSpec())

    def used(part: Any) -> Any:
        part = jax.tree.map(lambda x: x.astype(dtype), part)
        return jax.lax.with_sharding_constraint(part, whole) if gather_weights else part

    def apply(name: str, part: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(defs[name], used(part))(x)

    def layer(x: jax.Array, part: Any) -> tuple[jax.Array, None]:
        return jax.lax.with_sharding_constraint(apply("layers", part, x), rows), None

    each = jax.checkpoint(layer) if recompute else layer

    def loss(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        x = apply("embed", params["embed"], tokens[:, :-1])
        x = jax.lax.with_sharding_constraint(x, rows)
        if model.stacked:
            x, _ = jax.lax.scan(each, x, params["layers"])
        else:
            for part in params["layers"]:
                x, _ = each(x, part)
        logits = apply("lm_head", params["lm_head"], apply("norm", params["norm"], x))
        return next_token_loss(logits, tokens[:, 1:])

    def step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        params, opt_state = state
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    placed = {
        name: jax.tree.map(lambda x, skip=name == "layers" and model.stacked: _cut(x.shape, mesh, skip), part)
        for name, part in params.items()
    }
    shardings = (placed, _like_params(optimizer, params, placed, whole))
    jitted = jax.jit(step, in_shardings=(shardings, rows), out_shardings=(shardings, whole), donate_argnums=0)
    gradients = jax.jit(jax.value_and_grad(loss), in_shardings=(placed, rows), out_shardings=(whole, placed))
    return Baseline(jitted, gradients, shardings, rows, params, optimizer)


def _cut(shape: tuple[int, ...], mesh: Mesh, skip_first: bool) -> NamedSharding:
    """Shard the largest dimension that the devices divide, or none. ``skip_first`` keeps a stack's layers together."""
    able = [i for i, size in enumerate(shape) if size % mesh.devices.size == 0 and i >= skip_first]
    if not able:
        return NamedSharding(mesh, PartitionSpec())
    cut = max(able, key=lambda i: shape[i])
    return NamedSharding(mesh, PartitionSpec(*[None] * cut, *mesh.axis_names))


def _like_params(
    optimizer: optax.GradientTransformation, params: Any, shardings: Any, whole: NamedSharding
) -> Any:
    """Moments have the shardings of their parameters; counts are whole."""
    return optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        shardings,
        transform_non_params=lambda _: whole,
    )


def _parts(model: Decoder) -> tuple[dict[str, Any], dict[str, Any]]:
    """Graph definitions and arrays of the model's parts; ``layers`` is a stack, or a list of equal layers."""
    defs, params = {}, {}
    for name in ("embed", "norm", "lm_head"):
        defs[name], state = nnx.split(getattr(model, name))
        params[name] = nnx.as_pure(state)
    split = [nnx.split(layer) for layer in ([model.layers] if model.stacked else model.layers)]
    layers = [nnx.as_pure(state) for _, state in split]
    defs["layers"], params["layers"] = split[0][0], layers[0] if model.stacked else layers
    return defs, params
