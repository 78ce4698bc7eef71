"""Batches, losses and separated weights of public models, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

DEVICES, ROWS, STEPS = 4, 8, 3

AXIS = "batch"

# The mesh axes over which BatchNorm takes its statistics: none where a program sees the whole batch.
Axis = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Program:
    """``model``: what ``fully_shard`` takes. ``loss(model, rows)``: the mean over rows. ``batches``: one a step.

    ``idle``: paths of what training does not determine, since the gradient is rounding error or follows from such.
    ``one_axis``: the model names the axis of the mesh itself. ``statistics``: what a linen module writes; the loss then
    takes it as a third argument, and returns what it has become beside the mean.
    """

    model: Any
    loss: Callable[..., Any]
    batches: Sequence[Any]
    units: Sequence[str]
    stacked: Sequence[str] = ()
    idle: Sequence[str] = ()
    one_axis: bool = False
    statistics: Any = None


def tokens(vocabulary: int, length: int = 6) -> list[np.ndarray]:
    """A different batch for every step, and different rows on every device."""
    random = np.random.default_rng(0)
    return [random.integers(1, vocabulary, (ROWS, length)).astype(np.int32) for _ in range(STEPS)]


def features(*shape: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.normal(size=(ROWS, *shape)).astype(np.float32) for _ in range(STEPS)]


def labels(classes: int) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.integers(0, classes, ROWS).astype(np.int32) for _ in range(STEPS)]


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


def causal(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions ``[B, T]`` and mask ``[B, T, T]`` of rows without padding."""
    count, length = rows.shape
    positions = jnp.broadcast_to(jnp.arange(length), (count, length))
    return positions, jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (count, length, length))


def decoder_loss(model: Any, rows: jax.Array) -> jax.Array:
    """For the three that are called with tokens, positions, cache and mask."""
    positions, mask = causal(rows)
    logits, _ = model(rows, positions, None, mask)
    return next_token_loss(logits, rows)


def with_values(model: Any) -> Any:
    """Weights as after training. Initial weights are partly zero, so that other weights have no gradient."""
    weights, rest, merge = split(model)
    random = np.random.default_rng(1)

    def value(leaf: jax.Array) -> jax.Array:
        return leaf + jnp.asarray(random.normal(scale=0.2, size=leaf.shape), leaf.dtype)

    return merge(jax.tree.map(value, weights), rest)


def split(model: Any) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """Weights, what else the model has, and what makes a model of both."""
    if isinstance(model, nnx.Module):
        graphdef, weights, rest = nnx.split(model, nnx.Param, ...)
        return nnx.as_pure(weights), nnx.as_pure(rest), partial(nnx.merge, graphdef)
    leaves, structure = jax.tree.flatten_with_path(model)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    # equinox modules hold functions and settings next to arrays.
    arrays = {
        path: leaf for path, (_, leaf) in zip(paths, leaves, strict=True) if isinstance(leaf, jax.Array)
    }

    def merge(weights: Any, _: Any) -> Any:
        values = [weights.get(path, leaf) for path, (_, leaf) in zip(paths, leaves, strict=True)]
        return structure.unflatten(values)

    return arrays, {}, merge


def classifier_loss(model: Any, rows: Any) -> jax.Array:
    features, classes = rows
    return optax.softmax_cross_entropy_with_integer_labels(model(features), classes).mean()
