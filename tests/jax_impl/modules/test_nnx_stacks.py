"""nnx stacks and ensembles that nothing names: recognized by flax's own layers, or refused with the keyword."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_impl import (
    call_unit,
    data_parallel_mesh,
    fully_shard,
    init_state,
    make_train_step,
    scan_layers,
    unshard,
    variable_leaves,
)
from jax_impl.modules.stack import recognized_stacks
from jax_impl.runtime.groups.sharding_plan import ShardingPlan

pytestmark = pytest.mark.filterwarnings("ignore:pjit engine")
# Equal, so that a matrix that is no stack has the leading size of one.
DIM, LAYERS = 4, 4


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.up = nnx.Linear(DIM, 6, rngs=rngs)
        self.down = nnx.Linear(6, DIM, rngs=rngs)
        self.shift = nnx.Param(jax.random.normal(rngs.params(), (DIM,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(self.norm(x)))) + self.shift


class Own(nnx.Module):
    """Without any of flax's layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (DIM, DIM)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ self.weight)


def several(cls: type[nnx.Module], rngs: nnx.Rngs) -> Any:
    return nnx.split_rngs(splits=LAYERS)(nnx.vmap(cls))(rngs)


class Model(nnx.Module):
    """How the layers are used is ``use``."""

    def __init__(self, cls: type[nnx.Module], use: str) -> None:
        rngs = nnx.Rngs(0)
        self.use = use
        self.first = nnx.Linear(5, DIM, rngs=rngs)
        self.layers = several(cls, rngs)
        self.last = nnx.Linear(DIM, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        if self.use == "scan":
            run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return self.last(run(x, self.layers))
        if self.use == "scan_layers":
            return self.last(scan_layers(self.layers, x))
        members = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
        return self.last(members(self.layers, x))


class Holder(nnx.Module):
    """Has nothing but a stack, so it looks like one itself; and a list of layers of no stack."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.decoder = Decoder(rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.square = nnx.Linear(DIM, DIM, rngs=rngs)


class Decoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = several(Block, rngs)


def rows(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(8, 5)).astype(np.float32)


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 0.3) ** 2)


def assert_trains_as_alone(model: nnx.Module, **options: Any) -> ShardingPlan:
    """Two steps of SGD with momentum, against plain optax on the whole model."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    plan, weights = fully_shard(model, data_parallel_mesh(4), **options)
    step = make_train_step(plan, loss, optimizer)
    state = init_state(plan, weights, optimizer, variable_leaves(model))
    graphdef, parameters, others = nnx.split(model, nnx.Param, ...)
    alone = nnx.as_pure(parameters)
    value = jax.value_and_grad(lambda p, x: loss(nnx.merge(graphdef, p, others), x))
    moments = optimizer.init(alone)
    for number in range(2):
        state, metrics = step(state, rows(number))
        expected, gradients = jax.jit(value)(alone, rows(number))
        updates, moments = optimizer.update(gradients, moments, alone)
        alone = optax.apply_updates(alone, updates)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    trained = unshard(plan, state.weights)
    flat = {"/".join(map(str, key)): value for key, value in nnx.to_flat_state(alone)}
    assert sorted(trained) == sorted(flat)
    for path, array in flat.items():
        np.testing.assert_allclose(trained[path], array, rtol=1e-4, atol=1e-5, err_msg=path)
    return plan


@pytest.mark.parametrize(
    ("use", "engine", "options"),
    [
        pytest.param("scan", "shard_map", {}, marks=pytest.mark.slow),
        ("ensemble", "shard_map", {"recompute": True}),
        pytest.param("ensemble", "pjit", {}, marks=pytest.mark.slow),
        pytest.param("scan", "pjit", {}, marks=pytest.mark.slow),
        pytest.param("scan_layers", "shard_map", {"units": ["layers/*/down"]}, marks=pytest.mark.slow),
        pytest.param("ensemble", "shard_map", {"strategy": "optim_grads"}, marks=pytest.mark.slow),
        pytest.param("ensemble", "shard_map", {"units": ["layers/*", "layers/*/up"]}, marks=pytest.mark.slow),
        pytest.param("ensemble", "pjit", {"strategy": "optim", "recompute": True}, marks=pytest.mark.slow),
    ],
)
def test_stacks_of_flax_layers_are_recognized_and_train(use, engine, options):
    plan = assert_trains_as_alone(Model(Block, use), engine=engine, **options)
    assert {unit.module.layers for path, unit in plan.units.items() if path} == {LAYERS}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.parametrize("use", ["scan", "ensemble"])
def test_stacks_of_own_modules_train_when_they_are_named(use, engine):
    plan = assert_trains_as_alone(Model(Own, use), engine=engine, stacked=["layers"])
    assert plan.units["layers"].module.layers == LAYERS


def test_only_what_patterns_name_and_layers_show_is_recognized():
    model = Holder()
    assert recognized_stacks(model, ["decoder/layers/*"]) == {"decoder/layers": LAYERS}
    assert recognized_stacks(model, ["*/layers/*/up", "blocks/*"]) == {"decoder/layers": LAYERS}
    assert recognized_stacks(model, ["decoder/*"]) == {"decoder": LAYERS}
    assert recognized_stacks(model, ["blocks/*", "square/*", "blocks/0", "*"]) == {}
    assert recognized_stacks(Model(Own, "scan"), ["layers/*"]) == {}


@pytest.mark.parametrize("use", ["scan", "scan_layers", "ensemble"])
@pytest.mark.parametrize(
    ("cls", "units"), [(Block, ["layers"]), (Block, ["layers/up", "layers/down"]), (Own, ["layers"])]
)
def test_others_are_refused_with_the_keyword(cls, units, use):
    model = Model(cls, use)
    plan, weights = fully_shard(model, data_parallel_mesh(2), units=units)
    with pytest.raises(ValueError, match=rf'over units .*{units[0]}.*stacked=\["layers"\]'):
        make_train_step(plan, loss, optax.sgd(0.1)).gradients(weights, rows(0), variable_leaves(model))


def test_a_stack_that_is_used_at_once_is_refused():
    model = Model(Block, "ensemble")
    plan, weights = fully_shard(model, data_parallel_mesh(2))

    def at_once(model: Any, x: jax.Array) -> jax.Array:
        return call_unit(lambda layers, x: jnp.einsum("bi,eij->", x, layers.up.kernel[...]), model.layers, x)

    step = make_train_step(plan, at_once, optax.sgd(0.1))
    with pytest.raises(
        ValueError, match=r"unit 'layers': expected a loop or map over its 4 layers .*stacked=\[\.\.\.\]"
    ):
        step.gradients(weights, rows(0)[:, :DIM], variable_leaves(model))
