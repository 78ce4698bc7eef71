"""Models and data that tests share: trees of arrays, flax modules, and rows that all differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_impl import call_unit, stack_layers
from jax_impl.modules.stack import scan_layers


def _same(x: jax.Array) -> jax.Array:
    return x


class Matrix(nnx.Module):
    """``tanh(x @ w)``: one product."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jax.random.normal(rngs.params(), (width, width)) / width**0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ self.w[...])


class Mlp(nnx.Module):
    """``x + down(tanh(up(x)))``; ``options`` are those of ``nnx.Linear``."""

    def __init__(self, width: int, hidden: int, **options: Any) -> None:
        self.up, self.down = nnx.Linear(width, hidden, **options), nnx.Linear(hidden, width, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class Chain(nnx.Module):
    """Calls ``layers`` in turn, or as one stack, and then each module of ``after``.

    scale: the width of a weight before the first layer, for which this layer has a gradient of its input.
    residual: adds a layer's output to its input. between: applied to each layer's output.
    """

    def __init__(
        self,
        layers: Sequence[nnx.Module],
        *,
        stacked: bool = False,
        scale: int | None = None,
        residual: bool = False,
        between: Callable[[jax.Array], jax.Array] = _same,
        **after: nnx.Module,
    ) -> None:
        self.layers = stack_layers(list(layers)) if stacked else nnx.List(layers)
        self.residual, self.between, self.after = residual, between, tuple(after)
        if scale is not None:
            self.scale = nnx.Param(jnp.ones(scale))
        for name, module in after.items():
            setattr(self, name, module)

    def __call__(self, x: jax.Array) -> jax.Array:
        if hasattr(self, "scale"):
            x = x * self.scale[...]
        if not isinstance(self.layers, nnx.List):
            x = scan_layers(self.layers, x)
        else:
            for layer in self.layers:
                y = self.between(layer(x))
                x = x + y if self.residual else y
        for name in self.after:
            x = getattr(self, name)(x)
        return x


class Weighted(nnx.Module):
    """The mean of what it returns is that of ``weight . row``, so gradients are means of rows."""

    def __init__(self, weight: Any) -> None:
        self.weight = nnx.Param(jnp.asarray(weight))

    def __call__(self, rows: jax.Array) -> jax.Array:
        return rows @ self.weight[...]


def dense_tree(
    *layers: tuple[int, int], head: tuple[int, int], bias: bool = False, dtype: str = "float32"
) -> dict[str, Any]:
    """A model as a tree of arrays: ``layers`` of a matrix ``w`` and a ``b``, a matrix ``head``, perhaps ``bias``."""
    rng = np.random.default_rng(0)

    def values(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    tree = {
        "layers": [{"w": values(*shape), "b": values(shape[1])} for shape in layers],
        "head": values(*head),
    }
    return {**tree, "bias": values(head[1])} if bias else tree


def tanh_layer(unit: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ unit["w"] + unit["b"])


def loss_of_layers(layer: Callable[[Any, jax.Array], jax.Array] = tanh_layer) -> Callable[..., jax.Array]:
    """The mean squared error of such a tree, whose layers are units: ``loss(tree, (x, y))``."""

    def loss(tree: Any, batch: Any) -> jax.Array:
        x, y = batch
        for unit in tree["layers"]:
            x = call_unit(layer, unit, x)
        x = x @ tree["head"].astype(x.dtype)
        return jnp.mean((x + tree["bias"] - y if "bias" in tree else x - y) ** 2)

    return loss


def pairs(count: int, rows: int, *widths: int, seed: int = 1, growing: bool = False) -> list[Any]:
    """``count`` batches of an input and a target, float32 ``[rows, width]`` each. All rows differ.

    growing: float64, and each row is larger than the rows before.
    """
    rng = np.random.default_rng(seed)
    scale, dtype = (1 + np.arange(rows)[:, None], np.float64) if growing else (1.0, np.float32)
    return [
        tuple((rng.standard_normal((rows, width)) * scale).astype(dtype) for width in widths)
        for _ in range(count)
    ]


def by_path(tree: Any) -> dict[str, jax.Array]:
    """The leaves by their names in a plan, such as ``layers/0/w``."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): x for keys, x in leaves}


class Everything:
    """Replaces the programs that a step checked. The step checks no other program."""

    def __contains__(self, _: Any) -> bool:
        return True
