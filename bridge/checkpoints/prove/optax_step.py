"""Restores by stock Orbax, and steps by stock optax."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from bridge.checkpoints.convert.tree_reader import key_of
from bridge.checkpoints.prove.weight_state import LARGEST, MOMENTUM, WeightState

LIBRARY = f"orbax {ocp.__version__}, optax {optax.__version__}"


def restored(item: Path, template: object) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """The bytes of each array of an item as stock Orbax restores it, by tree path, as uint8 arrays.

    template: an item with the tree that the program restores, the tree itself, or None. Raises ValueError, in Orbax's
    words, for another tree.
    """
    with warnings.catch_warnings():
        # Orbax warns that shardings are unknown; arrays on one device are what is wanted.
        warnings.simplefilter("ignore")
        if template is None:
            with ocp.PyTreeCheckpointer() as checkpointer:
                tree = checkpointer.restore(item.absolute())
        else:
            target = template
            if isinstance(template, Path):
                with ocp.PyTreeCheckpointer() as checkpointer:
                    target = checkpointer.restore(template.absolute())
            with ocp.StandardCheckpointer() as standard:
                tree = standard.restore(item.absolute(), target)
    for path, value in jax.tree.leaves_with_path(tree):
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        if hasattr(value, "dtype"):
            yield (
                tuple(str(key_of(key)) for key in path),
                np.ascontiguousarray(value).reshape(-1).view(np.uint8),
            )


def update(state: WeightState) -> np.ndarray:
    """What one step of optax's SGD with momentum, `adamw` or AMSGrad adds to the weight."""
    with jax.enable_x64(True):
        weight, gradient = jnp.asarray(state.weight), jnp.asarray(state.gradient)
        moments = {name: jnp.asarray(values) for name, values in state.moments.items()}
        count = jnp.asarray(int(state.step), jnp.int32)
        transform: optax.GradientTransformation
        own: Any
        if MOMENTUM in moments:
            nesterov = bool(state.options.get("nesterov", False))
            transform = optax.trace(state.number("momentum", 0.9), nesterov)
            own = optax.TraceState(moments[MOMENTUM])
        else:
            rates = (*state.betas, state.number("eps", 1e-8))
            adam = (count, moments["exp_avg"], moments["exp_avg_sq"])
            if LARGEST in moments:
                transform = optax.scale_by_amsgrad(*rates)
                own = optax.ScaleByAmsgradState(*adam, moments[LARGEST])
            else:
                transform, own = optax.scale_by_adam(*rates), optax.ScaleByAdamState(*adam)
        # In the place where torch's optimizer has it.
        decay = state.number("weight_decay", 0.0) * weight
        direction, _ = transform.update(gradient if state.decoupled else gradient + decay, own, weight)
        return np.asarray(-state.number("lr", 1e-3) * (direction + decay if state.decoupled else direction))
