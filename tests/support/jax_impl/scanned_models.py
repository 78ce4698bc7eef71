"""Models with scanned layers and a training target, with many operations around and inside the loop.

In a pytree model, the layers are stacks under ``layers``. Every layer has other weights, so that a wrong layer shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax

from jax_impl import apply_linen, call_unit, scan_layers, stack_layers

WIDTH = 4


def random(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(0.5 * np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def block(*stack: int, seed: int) -> dict[str, jax.Array]:
    return {"w": random(*stack, WIDTH, WIDTH, seed=seed), "b": random(*stack, WIDTH, seed=seed + 1)}


def apply(block: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ block["w"] + block["b"])


def rows(count: int = 8) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(count, WIDTH)).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """``between``: from the first rows, scaled, to the last, with a pytree; or ``model`` does that with ``loss``."""

    between: Callable[..., Any] | None = None
    blocks: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    model: Callable[[], nnx.Module] | None = None

    @property
    def parameters(self) -> Any:
        if self.model is not None:
            return self.model()
        blocks = self.blocks or {"layers": block(3, seed=2)}
        return {"scale": random(WIDTH, seed=1), **blocks, "out": random(WIDTH, 3, seed=5)}

    def loss(self, model: Any, x: jax.Array) -> jax.Array:
        if self.between is None:
            return jnp.mean((model(x) - 0.3) ** 2)
        return jnp.mean((self.between(model, x * model["scale"]) @ model["out"] - 0.3) ** 2)


def in_turn(x: jax.Array, layers: Any, apply: Any = apply, **options: Any) -> jax.Array:
    return lax.scan(lambda x, layer: (call_unit(apply, layer, x), None), x, layers, **options)[0]


def simple(model: Any, x: jax.Array) -> jax.Array:
    return in_turn(x, model["layers"])


def remat(model: Any, x: jax.Array) -> jax.Array:
    body = jax.checkpoint(lambda x, layer: (call_unit(apply, layer, x), None))
    return lax.scan(body, x, model["layers"])[0]


def two_stacks(model: Any, x: jax.Array) -> jax.Array:
    """Two scans: one stacks what the other scans over, in the opposite direction."""
    x, between = lax.scan(lambda x, layer: (call_unit(apply, layer, x), x), x, model["layers"])

    def body(y: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return call_unit(lambda block, y, x: apply(block, y) + jnp.sin(x), layer[0], y, layer[1]), None

    return lax.scan(body, x, (model["more"], between), reverse=True)[0]


def one_stack_twice(model: Any, x: jax.Array) -> jax.Array:
    return in_turn(jnp.cos(in_turn(x, model["layers"])), model["layers"], reverse=True)


def two_units(model: Any, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return call_unit(apply, layer["mlp"], jnp.sin(call_unit(apply, layer["attention"], x))), None

    return lax.scan(body, x, model["layers"])[0]


def inside(model: Any, x: jax.Array) -> jax.Array:
    def outer(layer: Any, x: jax.Array) -> jax.Array:
        return x * layer["scale"] + call_unit(apply, layer["mlp"], x)

    return in_turn(x, model["layers"], outer)


def twice(model: Any, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return jnp.cos(call_unit(apply, layer, call_unit(apply, layer, x))), None

    return lax.scan(body, x, model["layers"])[0]


def looped(model: Any, x: jax.Array) -> jax.Array:
    def passes(x: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = in_turn(x + shift, model["layers"])
        return x, x.sum(-1, keepdims=True)

    x, sums = lax.scan(passes, x, jnp.arange(3.0) / 7)
    return x + sums.sum(0) / 9


def inputs_and_outputs(model: Any, x: jax.Array) -> jax.Array:
    """Of each pass: inputs that another unit has made, some of no gradient, and outputs that are used."""
    x = call_unit(apply, model["first"], x)
    each = jnp.stack([jnp.sin(x * i) for i in range(3)])

    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
        block, own, turn = layer
        x = call_unit(lambda block, x, own, turn: apply(block, x[:, turn]) + own, block, x, own, turn)
        return x, (x.sum(-1), own, x > 0)

    order = (jnp.arange(WIDTH) + jnp.arange(3)[:, None]) % WIDTH
    x, (sums, own, positive) = lax.scan(body, x, (model["layers"], each, order))
    return x + jnp.where(positive, sums[..., None] * own, 0).sum(0)


def beside_shared(model: Any, x: jax.Array) -> jax.Array:
    """A unit of no stack in each pass, and weights of the root."""

    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        x = call_unit(lambda block, x, scale: apply(block, x) * scale, layer, x, model["scale"])
        return jnp.sin(call_unit(apply, model["first"], x)) * model["scale"], None

    return lax.scan(body, x, model["layers"])[0]


def nothing_carried(model: Any, x: jax.Array) -> jax.Array:
    return lax.map(lambda layer: call_unit(apply, layer, x), model["layers"]).sum(0)


def chosen(model: Any, x: jax.Array) -> jax.Array:
    def body(carried: Any, layer: Any) -> tuple[Any, jax.Array]:
        x, number = carried
        return (lax.cond(number % 2 == 0, lambda: call_unit(apply, layer, x), lambda: x), number + 1), number

    return lax.scan(body, (x, 0), model["layers"])[0][0]


def by_a_carried_number(model: Any, x: jax.Array) -> jax.Array:
    def body(carried: Any, _: None) -> tuple[Any, None]:
        x, number = carried
        layer = jax.tree.map(lambda leaf: leaf[number], model["layers"])
        return (call_unit(apply, layer, x), (number + 2) % 3), None

    return lax.scan(body, (x, 0), None, length=3)[0][0]


def in_calls(model: Any, x: jax.Array) -> jax.Array:
    return jax.jit(lambda x, layers: in_turn(x, layers, jax.jit(apply)))(x, model["layers"])


def in_cond(model: Any, x: jax.Array) -> jax.Array:
    return lax.cond(jnp.array(True), lambda: in_turn(x, model["layers"]), lambda: x)


def among_others(model: Any, x: jax.Array) -> jax.Array:
    for layer in model["before"]:
        x = call_unit(apply, layer, x)
    x = in_turn(x, model["layers"])
    for layer in model["after"]:
        x = call_unit(apply, layer, x)
    return x


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, varying: bool) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, momentum=0.5) if varying else None
        self.drop = nnx.Dropout(0.5, rngs=rngs) if varying else None

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.linear(x)
        return x + jnp.tanh(self.drop(self.norm(h)) if self.drop else h)


class Stack(nnx.Module):
    def __init__(self, lifted: bool, varying: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.lifted = lifted
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = stack_layers([Layer(rngs, varying) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        if not self.lifted:
            return scan_layers(self.layers, x)
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


class Scanned(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(linen.Dense(WIDTH, name="up")(x)), None


class Lifted(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        options: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        return linen.scan(Scanned, **options)(name="layers")(x)[0]


PAIR = {"layers": {"attention": block(4, seed=10), "mlp": block(4, seed=12)}}
INSIDE = {"layers": {"scale": random(4, WIDTH, seed=9), "mlp": block(4, seed=12)}}
LISTS = {"before": [block(seed=20), block(seed=22)], "after": [block(seed=24), block(seed=26)]}
ONE_MORE = {"layers": block(3, seed=2), "first": block(seed=14)}
CASES = {
    "one": Case(simple, {"layers": block(1, seed=2)}),
    "two": Case(simple, {"layers": block(2, seed=2)}),
    "three": Case(simple),
    "reverse": Case(lambda model, x: in_turn(x, model["layers"], reverse=True)),
    "unroll": Case(lambda model, x: in_turn(x, model["layers"], unroll=2), {"layers": block(5, seed=2)}),
    "unrolled": Case(lambda model, x: in_turn(x, model["layers"], unroll=True)),
    "checkpoint": Case(remat),
    "recompute": Case(simple, options={"recompute": True}),
    "microbatches": Case(simple, options={"recompute": True}, microbatches=2),
    "optim": Case(simple, options={"strategy": "optim"}),
    "optim_grads": Case(simple, options={"strategy": "optim_grads"}),
    "frozen": Case(simple, options={"frozen": ["layers/b", "scale"]}),
    "frozen stack": Case(simple, options={"frozen": ["layers/b", "layers/w"]}),
    "bfloat16": Case(simple, options={"param_dtype": "bfloat16"}),
    "hsdp": Case(simple, options={"strategy": "hsdp"}),
    "hfsdp": Case(simple, options={"strategy": "hfsdp"}),
    "two stacks": Case(
        two_stacks,
        {"layers": block(3, seed=2), "more": block(3, seed=6)},
        {"units": ["layers/*", "more/*"], "stacked": ["layers", "more"]},
    ),
    "one stack twice": Case(one_stack_twice),
    "two units": Case(two_units, PAIR, {"units": ["layers/*/attention", "layers/*/mlp"]}),
    "inside": Case(inside, INSIDE, {"units": ["layers/*", "layers/*/mlp"]}),
    "inside, recomputed": Case(inside, INSIDE, {"units": ["layers/*", "layers/*/mlp"], "recompute": True}),
    "twice": Case(twice),
    "looped": Case(looped),
    "inputs and outputs": Case(inputs_and_outputs, ONE_MORE, {"units": ["layers/*", "first"]}),
    "beside shared": Case(beside_shared, ONE_MORE, {"units": ["layers/*", "first"]}),
    "nothing carried": Case(nothing_carried),
    "cond": Case(chosen),
    "carried number": Case(by_a_carried_number),
    "calls": Case(in_calls),
    "in cond": Case(in_cond),
    "lists": Case(among_others, {**LISTS, "layers": block(3, seed=2)}, {"units": ["*/*"]}),
    "linen": Case(
        lambda model, x: apply_linen(Lifted(), {"params": {"layers": model["layers"]}}, x),
        {"layers": {"up": {"kernel": random(3, WIDTH, WIDTH, seed=2), "bias": random(3, WIDTH, seed=3)}}},
    ),
    "scan_layers": Case(model=lambda: Stack(False)),
    "nnx.scan": Case(model=lambda: Stack(True)),
}
