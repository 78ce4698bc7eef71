"""Random training programs in JAX. A seed draws the model, its sharding, and the user's operations.

Operations are methods of ``Player``. The text of a program suffices to repeat a failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax import lax

from jax_impl import (
    apply_linen,
    call_unit,
    main_weight_adamw,
    main_weight_sgd,
    scan_layers,
    stack_layers,
)
from tests.support.jax_impl.zoo import Mlp

WRAPS = {
    "functions": ("plain", "checkpoint", "scan", "loop", "vmap"),
    "nnx": ("plain", "checkpoint", "scan"),
    "linen": ("plain", "checkpoint"),
}
# Most programs use AdamW, so it occurs at least every three seeds.
OPTIMIZERS = (
    *("adamw", "sgd", "momentum", "adamw", "adam", "injected"),
    *("adamw", "skipping", "by shape", "adamw", "adam"),
)
ON_ONE_AXIS = ("no_shard", "optim", "optim_grads", "optim_grads_params", "optim_grads_params")
ON_TWO_AXES = ("no_shard", "optim", "hsdp", "hfsdp")
MESHES = ((1,), (2,), (3,), (4,), (2, 2))
PRECISIONS = ({}, {}, {"param_dtype": "float32"}, {"param_dtype": "float32", "reduce_dtype": "float64"})


def _falling(count: Any) -> Any:
    return 0.05 / (1 + 0.1 * count)


# A large eps keeps Adam from hiding a wrong gradient scale, and from magnifying rounding where gradients are tiny.
_ADAM = {"b1": 0.8, "b2": 0.9, "eps": 1e-3}
_CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.02, **_ADAM))
# By name: the optimizer of the sharded program, and the reference's.
MADE_OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (optax.sgd(_falling),) * 2,
    "adamw": (
        main_weight_adamw(_falling, **_ADAM, weight_decay=0.1),
        optax.adamw(_falling, **_ADAM, weight_decay=0.1),
    ),
    "momentum": (
        main_weight_sgd(0.05, 0.9, weight_decay=0.1),
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.05, 0.9)),
    ),
    "adam": (_CLIPPED,) * 2,
    "injected": (optax.inject_hyperparams(optax.adam)(0.02, **_ADAM),) * 2,
    "skipping": (optax.apply_if_finite(_CLIPPED, 9),) * 2,
    "by shape": (
        optax.adamw(0.02, **_ADAM, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
    )
    * 2,
}


class World(NamedTuple):
    """How a program's model is sharded, until it loads its checkpoint in another world."""

    mesh: tuple[int, ...]
    strategy: str
    engine: str
    recompute: bool
    prefetch: int
    donate: bool


@dataclass(frozen=True)
class Program:
    """``calls``: the layers in the order of their calls; one may be reused, another unused.

    ``wrap``: what is around a call. ``widths``: of rows, of each layer's hidden values, of targets. ``frozen``,
    ``replicated``: numbers of parameters. ``weighted``: the loss returns ``(sum, weight)``. ``ops``: names of
    ``Player``'s methods, with arguments.
    """

    form: str
    wrap: str
    widths: tuple[int, int, int, int]
    calls: tuple[int, ...]
    weighted: bool
    dtype: str
    precision: dict[str, str]
    frozen: int | None
    replicated: int | None
    optimizer: str
    worlds: tuple[World, World]
    ops: tuple[tuple[Any, ...], ...]


class Stop(Exception):
    pass


class Seen(nnx.Variable[Any]):
    """The sum of all rows that a model was trained with."""


class Net(nnx.Module):
    def __init__(self, program: Program) -> None:
        rows, *hidden, out = program.widths
        layers = [Mlp(rows, width, rngs=nnx.Rngs(0)) for width in hidden]
        self.scale = nnx.Param(jnp.ones(rows))
        self.layers = stack_layers(layers) if program.wrap == "scan" else nnx.List(layers)
        self.head = nnx.Linear(rows, out, rngs=nnx.Rngs(0))
        self.seen = Seen(jnp.zeros(rows, program.dtype))

    def __call__(
        self, x: jax.Array, program: Program, between: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        self.seen[...] += x.sum(0)
        x = x * self.scale[...]
        if program.wrap == "scan":
            return self.head(between(scan_layers(self.layers, x)))
        for number in program.calls:
            layer = self.layers[number]
            x = between(
                nnx.remat(lambda x, layer=layer: layer(x))(x) if program.wrap == "checkpoint" else layer(x)
            )
        return self.head(x)


class Block(linen.Module):
    hidden: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + linen.Dense(x.shape[-1])(jnp.tanh(linen.Dense(self.hidden)(x)))


class LinenNet(linen.Module):
    program: Program

    def setup(self) -> None:
        block = linen.remat(Block) if self.program.wrap == "checkpoint" else Block
        self.layers = [block(width) for width in self.program.widths[1:3]]
        self.head = linen.Dense(self.program.widths[3])

    def __call__(self, x: jax.Array, between: Callable[[jax.Array], jax.Array]) -> jax.Array:
        # An unused layer has no parameters.
        for number in self.program.calls:
            x = between(self.layers[number](x))
        return self.head(x)


def layer_of_functions(layer: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ layer["w"] + layer["b"]) @ layer["v"]


def _tree(program: Program) -> Any:
    rows, *hidden, out = program.widths
    layers = [{"w": np.zeros((rows, h)), "b": np.zeros(h), "v": np.zeros((h, rows))} for h in hidden]
    stack = jax.tree.map(lambda *leaves: np.stack(leaves), *layers) if program.wrap == "scan" else layers
    return {"scale": np.zeros(rows), "layers": stack, "head": {"w": np.zeros((rows, out))}}


def _of_tree(
    tree: Any, x: jax.Array, program: Program, between: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    call = partial(call_unit, layer_of_functions)
    x = x * tree["scale"]
    if program.wrap == "scan":
        x = between(lax.scan(lambda x, layer: (call(layer, x), None), x, tree["layers"])[0])
    for number in program.calls if program.wrap != "scan" else ():
        layer = tree["layers"][number]
        if program.wrap == "loop":
            x = lax.scan(lambda x, _, layer=layer: (call(layer, x), None), x, None, length=2)[0]
        elif program.wrap == "vmap":
            x = jax.vmap(partial(call, layer))(x)
        else:
            x = (
                jax.checkpoint(partial(call, layer)) if program.wrap == "checkpoint" else partial(call, layer)
            )(x)
        x = between(x)
    return call_unit(lambda head, x: x @ head["w"], tree["head"], x)


def make_model(program: Program) -> Any:
    """The model without values."""
    if program.form == "nnx":
        return nnx.eval_shape(lambda: Net(program))
    if program.form == "linen":
        rows = jnp.ones((1, program.widths[0]))
        return jax.eval_shape(
            lambda key: LinenNet(program).init(key, rows, lambda x: x)["params"], jax.random.key(0)
        )
    return _tree(program)


def outputs(
    program: Program, model: Any, x: jax.Array, between: Callable[[jax.Array], jax.Array] = lambda x: x
) -> jax.Array:
    """What the model has for rows ``x``. ``between``: applied to what each layer returns."""
    if program.form == "nnx":
        return model(x, program, between)
    if program.form == "linen":
        return apply_linen(LinenNet(program), {"params": model}, x, between)
    return _of_tree(model, x, program, between)


def loss(program: Program, model: Any, batch: Any, **options: Any) -> Any:
    """The mean of the squared errors of rows, or their sum weighted by the rows' weights, and those weights' sum."""
    x, target, weight = batch
    errors = jnp.mean((outputs(program, model, x, **options) - target) ** 2, axis=-1)
    return (jnp.sum(errors * weight), jnp.sum(weight)) if program.weighted else jnp.mean(errors)


def _world(rng: random.Random, mesh: tuple[int, ...]) -> World:
    strategy = rng.choice(ON_ONE_AXIS if len(mesh) == 1 else ON_TWO_AXES)
    engine = rng.choice(("shard_map", "shard_map", "pjit"))
    return World(mesh, strategy, engine, rng.random() < 0.2, rng.randrange(2), rng.random() < 0.7)


def _operations(rng: random.Random, weighted: bool, optimizer: str) -> list[tuple[Any, ...]]:
    """Each operation that needs no new program at least once, and few others, because compiling is expensive."""
    parts = rng.choice(((1,), (2,), (3,), (1, 2)))
    cheap: dict[str, Callable[[], tuple[Any, ...]]] = {
        "step": lambda: (rng.choice(parts),),
        "gradients": lambda: (rng.choice(parts),),
        "twice": lambda: (rng.choice(parts),),
        "write": lambda: (rng.choice(("one", "model", "scaled")), rng.randrange(20)),
        "recall": lambda: (),
        "save_and_load": lambda: (parts[0], 0, rng.random() < 0.5),
    }
    if weighted:
        cheap["padded"] = cheap["step"]
    if optimizer == "skipping":
        cheap["not_finite"] = cheap["step"]
    if optimizer == "injected":
        cheap["rate"] = lambda: (rng.choice((0.5, 3.0)),)
    names = [*cheap, *rng.choices((*cheap, "step", "step", "recall"), k=6)]
    costly = [("evaluate",), ("predict", rng.choice((67, 67, 72))), ("raises", rng.randrange(3))]
    rare = [("other_rows", parts[0]), ("in_one_program", parts[0])]
    ops = [(name, *cheap[name]()) for name in names] + rng.sample(costly, 2)
    ops += [operation for operation in rare if rng.random() < 0.15]
    rng.shuffle(ops)
    ops = [("step", parts[-1]), *ops, ("step", parts[0])]
    if rng.random() < 0.5:
        # After a change of world everything compiles again.
        ops += [
            ("save_and_load", parts[0], 1, rng.random() < 0.5),
            ("step", parts[0]),
            ("recall",),
            costly[0],
        ]
        ops += [("step", parts[0]), ("recall",), ("step", parts[0])]
    return ops


def draw(seed: int) -> Program:
    """The program of a seed. Seeds in a row have all forms, meshes and optimizers."""
    rng = random.Random(seed)
    form, mesh = tuple(WRAPS)[seed % len(WRAPS)], MESHES[seed % len(MESHES)]
    weighted, optimizer = seed % 2 == 0, OPTIMIZERS[seed % len(OPTIMIZERS)]
    wrap = rng.choice(WRAPS[form])
    rows, first, out = (rng.choice((2, 3, 4, 5, 7, 8)) for _ in range(3))
    return Program(
        form,
        wrap,
        (rows, first, first if wrap == "scan" else rng.choice((1, 4, 6, 9)), out),
        rng.choice(((0, 1), (0, 1), (0, 1, 0), (1, 0), (1,))) if wrap != "scan" else (0, 1),
        weighted,
        rng.choice(("float64", "float64", "float64", "float32")),
        rng.choice(PRECISIONS),
        rng.randrange(20) if rng.random() < 0.4 else None,
        rng.randrange(20) if rng.random() < 0.3 else None,
        optimizer,
        (_world(rng, mesh), _world(rng, rng.choice(MESHES))),
        tuple(_operations(rng, weighted, optimizer)),
    )
