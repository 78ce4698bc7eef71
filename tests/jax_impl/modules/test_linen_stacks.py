"""linen stacks whose layers are units, under nn.scan and nn.vmap, against the unsharded model; all rows differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from jax_impl import (
    apply_linen,
    count_collectives,
    data_parallel_mesh,
    fully_shard,
    make_gradients,
    make_train_step,
    shard_batch,
)
from tests.jax_impl.modules.test_tree_models import (
    DIM,
    assert_trains_as_alone,
    linen_loss,
)

pytestmark = pytest.mark.filterwarnings("ignore:pjit engine")
LAYERS = 5


def features(count: int = 8) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(count, DIM)).astype(np.float32)


class Mlp(linen.Module):
    """Looks at its parameters in ``setup``."""

    def setup(self) -> None:
        self.up = linen.Dense(2 * DIM)
        self.down = linen.Dense(DIM)
        self.scale = self.param("scale", linen.initializers.ones, (DIM,)) / 2

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(linen.gelu(self.up(x))) * self.scale


class Layer(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + Mlp(name="mlp")(linen.LayerNorm()(x)) + shift
        return x, x.mean(-1, keepdims=True)


def lifted(layer: Any, length: int = LAYERS, **more: Any) -> Callable[..., Any]:
    axes = {"params": 0, **more}
    return linen.scan(
        layer,
        variable_axes=axes,
        split_rngs={"params": True},
        in_axes=linen.broadcast,
        length=length,
    )


class ByClass(linen.Module):
    remat: bool = False
    length: int = LAYERS

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = linen.remat(Layer) if self.remat else Layer
        shift = self.param("shift", linen.initializers.ones, (DIM,))
        x, means = lifted(layer, self.length)(name="layers")(linen.Dense(DIM)(x), shift)
        return linen.Dense(3)(x) + means.sum(0)


class ByFunction(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        body = lifted(lambda layer, x, shift: layer(x, shift))
        x, _ = body(Layer(name="layers"), x, jnp.float32(0.1))
        x, _ = body(Layer(name="more"), x, 0.1 * x)
        return linen.Dense(3)(x)


class Members(linen.Module):
    """An ensemble, whose members see the same rows."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        members = linen.vmap(
            Mlp, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=3
        )
        return members(name="members")(linen.Dense(DIM)(x))


class InPlace(linen.Module):
    """Its own method is the loop."""

    @partial(linen.scan, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
    @linen.remat
    @linen.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + linen.gelu(linen.Dense(DIM, name="mlp")(x)), None


class LoopedInPlace(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(3)(InPlace(name="layers")(linen.Dense(DIM)(x), None)[0])


class OtherAxis(linen.Module):
    """As many layers as features, so that sizes alone do not tell the axis."""

    axis: int
    bias: bool

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        loop = linen.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=DIM,
        )
        return loop(linen.Dense(DIM, use_bias=self.bias, name="layers"), x, None)[0]


CASES = [
    (LoopedInPlace(), ["layers/*"], ["layers"], {}, False),
    (LoopedInPlace(), ["layers/*", "layers/*/mlp"], ["layers"], {"recompute": True}, True),
    (ByClass(remat=True), ["layers/*", "layers/*/mlp"], ["layers"], {"recompute": True}, False),
    (ByClass(), ["layers/*"], ["layers"], {}, True),
    (ByClass(remat=True), ["layers/*"], ["layers"], {"strategy": "optim"}, True),
    (ByFunction(), ["layers/*/mlp", "more/*"], ["layers", "more"], {"strategy": "optim_grads"}, True),
    (Members(), ["members/*"], ["members"], {}, True),
]


@pytest.mark.fast_cases("shard_map-net0-units0-stacked0-options0")
@pytest.mark.parametrize(
    ("net", "units", "stacked", "options"),
    [pytest.param(*case, marks=[pytest.mark.slow] if slow else []) for *case, slow in CASES],
)
@pytest.mark.parametrize("engine", ["shard_map", pytest.param("pjit", marks=pytest.mark.slow)])
def test_stacks_train(net, units, stacked, options, engine):
    x = features()
    params = net.init(jax.random.key(0), x)["params"]
    # In float32 the gradients of so many layers lose five digits, by one process as by four.
    with jax.enable_x64(True):
        plan = assert_trains_as_alone(
            jax.tree.map(lambda x: x.astype(np.float64), params),
            linen_loss(net, apply_linen),
            x.astype(np.float64),
            reference=linen_loss(net, linen.Module.apply),
            microbatches=2,
            tolerance=1e-12,
            units=units,
            stacked=stacked,
            engine=engine,
            **options,
        )
    layers = {unit.module.layers for path, unit in plan.units.items() if path}
    assert layers == {3 if stacked == ["members"] else LAYERS}


def test_layers_are_gathered_and_reduced_one_by_one_and_the_program_does_not_grow():
    sizes = []
    for length in (3, 30):
        net, x = ByClass(length=length), features()
        params = net.init(jax.random.key(0), x)["params"]
        plan, weights = fully_shard(params, data_parallel_mesh(4), units=["layers/*"], stacked=["layers"])
        gradients = make_gradients(plan, linen_loss(net, apply_linen))
        counted = count_collectives(gradients, weights, shard_batch(plan, x))
        counts = {
            operation: sum(n for each, n in counted.items() if each.kind == operation)
            for operation in ("all_gather", "reduce_scatter")
        }
        assert counts == {"all_gather": 2 * (length + 1), "reduce_scatter": length + 1}
        sizes.append(equations(jax.make_jaxpr(gradients)(weights, shard_batch(plan, x)).jaxpr))
    assert sizes[0] == sizes[1]


def equations(jaxpr: Any) -> int:
    """How many there are, also in calls and loops."""
    inner = [
        getattr(leaf, "jaxpr", leaf)
        for equation in jaxpr.eqns
        for leaf in jax.tree.leaves([*equation.params.values()], is_leaf=lambda p: hasattr(p, "eqns"))
    ]
    return len(jaxpr.eqns) + sum(equations(program) for program in inner if hasattr(program, "eqns"))


@pytest.mark.fast_cases("net0-units0-stacked0", "net1-units1-stacked1")
@pytest.mark.parametrize(
    ("net", "units", "stacked"),
    [
        (ByFunction(), ["layers"], []),
        (ByFunction(), ["layers/mlp"], []),
        (ByFunction(), ["layers/*", "more"], ["layers"]),
    ],
)
def test_stacks_that_are_not_named_are_refused_with_the_keyword(net, units, stacked):
    x = features()
    params = net.init(jax.random.key(0), x)["params"]
    plan, weights = fully_shard(params, data_parallel_mesh(2), units=units, stacked=stacked)
    with pytest.raises(ValueError, match=r"no stack: .*stacked=\[\"layers\"\]"):
        make_train_step(plan, linen_loss(net, apply_linen), optax.sgd(0.1)).gradients(weights, x)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("net", "axes"),
    [(OtherAxis(1, True), "1"), (OtherAxis(1, False), "1 or 2"), (OtherAxis(2, False), "1 or 2")],
)
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_loops_over_another_axis_are_refused_with_the_axis(net, axes, engine):
    x = features()
    params = net.init(jax.random.key(0), x)["params"]
    plan, weights = fully_shard(
        params, data_parallel_mesh(2), units=["layers/*"], stacked=["layers"], engine=engine
    )
    message = rf"unit 'layers', a stack of 5 layers: .*axis 0 .*got one over axis {axes}: .*\"params\": 0"
    with pytest.raises(ValueError, match=message):
        make_train_step(plan, linen_loss(net, apply_linen), optax.sgd(0.1)).gradients(weights, x)


def test_a_loop_over_another_axis_that_is_no_stack_is_refused_with_the_axis():
    class Three(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            loop = linen.scan(
                Layer,
                variable_axes={"params": 1},
                split_rngs={"params": True},
                in_axes=linen.broadcast,
                length=3,
            )
            return loop(name="layers")(x, 0.1)[0]

    net, x = Three(), features()
    params = net.init(jax.random.key(0), x)["params"]
    plan, weights = fully_shard(params, data_parallel_mesh(2), units=["layers"])
    with pytest.raises(ValueError, match=r"unit 'layers', no stack: .*got one over axis 1: "):
        make_train_step(plan, linen_loss(net, apply_linen), optax.sgd(0.1)).gradients(weights, x)
    with pytest.raises(ValueError, match=r"'layers' with one leading axis .*variable_axes={\"params\": 0}"):
        fully_shard(params, data_parallel_mesh(2), units=["layers/*"], stacked=["layers"])


def test_a_module_that_nothing_scans_is_no_stack():
    class Square(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.Dense(DIM, name="layers")(x)

    net, x = Square(), features()
    params = net.init(jax.random.key(0), x)["params"]
    plan, weights = fully_shard(params, data_parallel_mesh(2), units=["layers/*"], stacked=["layers"])
    with pytest.raises(ValueError, match=r"unit 'layers', a stack of 5 layers: .*name exactly the lifted"):
        make_train_step(plan, linen_loss(net, apply_linen), optax.sgd(0.1)).gradients(weights, x)
