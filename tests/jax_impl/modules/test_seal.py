"""Weights of a unit used anywhere but in its own call: refused by name and line, before compilation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jax_impl import (
    data_parallel_mesh,
    fully_shard,
    make_gradients,
    make_train_step,
    shard_batch,
    unshard,
)
from jax_impl.modules.seal import check_seals, open_sealed, seal
from tests.support.jax_impl.tiny import decoder, loss, named, tokens
from tests.support.jax_impl.zoo import Chain

ENGINES = ["shard_map", "pjit"]


def penalised(model: Any, rows: jax.Array) -> jax.Array:
    return loss(model, rows) + 1e-3 * sum(jnp.sum(p**2) for p in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.fast_cases("optim-2-pjit", "no_shard-1-shard_map")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@pytest.mark.filterwarnings("ignore:pjit engine")
def test_a_penalty_on_all_parameters_is_refused_since_it_would_see_shards(strategy, microbatches, engine):
    plan, weights = fully_shard(decoder(), data_parallel_mesh(4), strategy=strategy, engine=engine)
    step = make_train_step(plan, penalised, optax.sgd(0.1), microbatches=microbatches)
    with pytest.raises(
        ValueError, match=r"unit 'layers/0': .*, got integer_pow at .*test_seal\.py:\d+: outside"
    ):
        step.gradients(weights, tokens(8))


@pytest.mark.slow
def test_a_penalty_on_weights_of_the_root_is_right():
    def of_the_norm(model: Any, rows: jax.Array) -> jax.Array:
        return loss(model, rows) + jnp.sum(model.norm.scale[...] ** 2)

    model = decoder()
    plan, weights = fully_shard(model, data_parallel_mesh(4))
    sharded_loss, gradients = make_train_step(plan, of_the_norm, optax.sgd(0.1)).gradients(weights, tokens(8))
    expected, whole = nnx.value_and_grad(of_the_norm)(model, tokens(8))
    np.testing.assert_allclose(sharded_loss, expected, rtol=1e-6)
    path = "norm/scale"
    np.testing.assert_allclose(unshard(plan, gradients)[path], named(whole)[path], rtol=1e-5)


def test_the_loss_is_traced_once():
    traced = []

    def counted(model: Any, rows: jax.Array) -> jax.Array:
        traced.append(rows.shape)
        return loss(model, rows)

    plan, weights = fully_shard(decoder(), data_parallel_mesh(4))
    step = make_train_step(plan, counted, optax.sgd(0.1))
    step.gradients(weights, tokens(8))
    step.gradients(weights, tokens(8, seed=1))
    assert len(traced) == 1


def test_every_shape_of_batch_is_checked_and_so_are_bare_gradients():
    def sometimes(model: Any, rows: jax.Array) -> jax.Array:
        return penalised(model, rows) if rows.shape[0] > 1 else loss(model, rows)

    plan, weights = fully_shard(decoder(), data_parallel_mesh(4))
    step = make_train_step(plan, sometimes, optax.sgd(0.1))
    step.gradients(weights, tokens(4))
    with pytest.raises(ValueError, match="unit 'layers/0'"):
        step.gradients(weights, tokens(8))
    with pytest.raises(ValueError, match="unit 'layers/0'"):
        jax.jit(make_gradients(plan, penalised))(weights, shard_batch(plan, tokens(8)))


@pytest.mark.fast_cases("optim_grads_params-True-pjit")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.filterwarnings("ignore:pjit engine")
def test_derivatives_of_derivatives_are_refused_since_they_would_miss_the_units(strategy, recompute, engine):
    def forces(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((jax.grad(lambda x: model(x).sum())(x) - 0.3) ** 2)

    def net() -> Chain:
        rngs = nnx.Rngs(0)
        return Chain([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)], between=jnp.tanh)

    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    options = {"strategy": strategy, "recompute": recompute, "engine": engine}
    plan, weights = fully_shard(net(), data_parallel_mesh(4), **options)
    with pytest.raises(ValueError, match="expected only first derivatives of units"):
        make_train_step(plan, forces, optax.sgd(0.1)).gradients(weights, x)
    plan, weights = fully_shard(net(), data_parallel_mesh(4), **options, units=[])
    sharded_loss, gradients = make_train_step(plan, forces, optax.sgd(0.1)).gradients(weights, x)
    expected, whole = nnx.value_and_grad(forces)(net(), x)
    np.testing.assert_allclose(sharded_loss, expected, rtol=1e-5)
    np.testing.assert_allclose(
        unshard(plan, gradients)["layers/0/kernel"], named(whole)["layers/0/kernel"], rtol=1e-4, atol=1e-6
    )


def used(weights: jax.Array) -> jax.Array:
    return jnp.sum(weights * 2)


ESCAPES = {
    "plain": lambda w: used(w),
    "after a slice": lambda w: used(w[1:3]),
    "traced index": lambda w: jax.jit(lambda w, i: used(w[i]))(w, 1),
    "jit": lambda w: jax.jit(used)(w),
    "remat": lambda w: jax.checkpoint(used)(w),
    "vmap": lambda w: jax.vmap(lambda row: row + 1)(w),
    "scanned over": lambda w: jax.lax.scan(lambda c, row: (c + row.sum(), None), 0.0, w)[0],
    "constant of a scan": lambda w: jax.lax.scan(lambda c, _: (c + w.sum(), None), 0.0, None, length=3)[0],
    # The first pass carries what is free to use, the second the weights.
    "carried": lambda w: jax.lax.scan(lambda c, _: ((w, used(c[0])), None), (w * 0, 0.0), None, length=3)[0][
        1
    ],
    "carried from the second pass": lambda w: jax.lax.scan(
        lambda c, _: ((w, used(c[0])), None), (jnp.zeros((4, 3)), 0.0), None, length=3
    )[0][1],
    "output of a scan": lambda w: used(jax.lax.scan(lambda c, row: (c, row[:2]), 0.0, w)[1]),
    "while body": lambda w: jax.lax.while_loop(
        lambda c: c[1] < 3, lambda c: (c[0] * 2, c[1] + c[0].sum()), (w, 0.0)
    )[1],
    "while condition, before the first pass": lambda w: jax.lax.while_loop(
        lambda c: c.sum() < 3, lambda c: jnp.zeros_like(c) + 5, w
    ).sum(),
    "while result without a pass": lambda w: used(
        jax.lax.while_loop(lambda c: False, lambda c: jnp.zeros_like(c), w)
    ),
    "scatter into": lambda w: w.at[0].add(1.0).sum(),
    "scattered": lambda w: jnp.zeros((4, 3)).at[:].add(w).sum(),
    "predicate": lambda w: jnp.where(w.astype(bool), 1.0, 2.0),
    "result": lambda w: w[0, 0],
    "while condition": lambda w: jax.lax.while_loop(lambda i: i < w.sum(), lambda i: i + 1, 0),
    "one branch": lambda w: jax.lax.cond(True, lambda w: w[0, 0] * 2, lambda w: 0.0, w),
    "out of a branch": lambda w: used(jax.lax.cond(True, lambda w: w, lambda w: jnp.zeros((4, 3)), w)),
    "gradient": lambda w: jax.grad(lambda x: used(x * w))(1.0),
}


@pytest.mark.parametrize("escape", ESCAPES)
def test_every_way_out_is_seen(escape):
    def program(w: jax.Array) -> Any:
        return ESCAPES[escape](seal("layers/7", w))

    with pytest.raises(ValueError, match="unit 'layers/7'"):
        check_seals(jax.make_jaxpr(program)(jnp.ones((4, 3))))


@pytest.mark.parametrize("escape", ESCAPES)
def test_opened_weights_may_be_used_in_any_way(escape):
    def program(w: jax.Array) -> Any:
        return ESCAPES[escape](open_sealed(seal("layers/7", w)))

    check_seals(jax.make_jaxpr(program)(jnp.ones((4, 3))))


def test_what_is_sealed_may_be_moved():
    def program(w: jax.Array) -> Any:
        sealed = checkpoint_name(seal("layers/7", w)[::-1], "mine")
        sealed = jnp.where(jnp.arange(4)[:, None] > 2, sealed, sealed)
        unused = sealed * 2
        del unused
        stacked = jnp.stack([sealed[0], sealed[1]])
        return jax.lax.scan(lambda c, row: (c + open_sealed(row).sum(), None), 0.0, stacked.T)[0]

    check_seals(jax.make_jaxpr(program)(jnp.ones((4, 3))))
