import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_impl import data_parallel_mesh, fully_shard, make_train_step, unshard
from jax_impl.comm.collectives import divide_exactly, round_to
from jax_impl.runtime.groups.precision import Precision
from tests.support.jax_impl.tiny import decoder, loss, named, tokens
from tests.support.jax_impl.zoo import Weighted

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def mean(model, rows):
    return jnp.mean(model(rows))


def sharded(model, loss_fn, batch, microbatches=1, **keywords):
    plan, weights = fully_shard(model, data_parallel_mesh(4), **keywords)
    step = make_train_step(plan, loss_fn, optax.sgd(1.0), microbatches=microbatches)
    value, gradients = step.gradients(weights, batch)
    return value, unshard(plan, gradients)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_compute_sees_rounded_weights(strategy):
    # XLA removes a plain float32 -> bfloat16 -> float32 pair as excess precision.
    weight = np.float32([1 + 2**-10, 1 - 2**-11, 3 + 2**-9])
    batch = np.eye(4, 3, dtype=np.float32)

    def wide_mean(model, rows):
        return jnp.sum(rows @ model.weight[...].astype(jnp.float32))

    value, _ = sharded(
        Weighted(weight), wide_mean, batch, units=[], strategy=strategy, param_dtype="bfloat16"
    )
    assert float(value) == 5 / 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_reduction_rounds_each_ranks_gradient_and_float32_does_not(strategy):
    exact = np.float32([[1 + 2**-10, 1, 0.5], [-1, 2**-12, 0.5], [0, 1, 0.5], [0, 0, 0.5]])
    keywords = {"units": [], "strategy": strategy}
    _, kept = sharded(Weighted(np.ones(3, np.float32)), mean, exact, **keywords)
    np.testing.assert_array_equal(kept["weight"], exact.sum(0) / 4)
    _, rounded = sharded(Weighted(np.ones(3, np.float32)), mean, exact, reduce_dtype="bfloat16", **keywords)
    assert rounded["weight"].dtype == jnp.float32
    # 1 + 2 ** -10 became 1 before the sum, which is itself rounded: 2 + 2 ** -12 became 2.
    np.testing.assert_array_equal(rounded["weight"], np.float32([0, 0.5, 0.5]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_microbatch_gradients_accumulate_in_float32_under_bfloat16_compute(strategy):
    # In bfloat16, 256 + 1 is 256 however often one is added.
    batch = np.repeat(np.float32([[256, 1], [1, 1], [1, 1], [1, 1]]), 1, axis=0)
    batch = np.concatenate([batch] * 4)
    _, gradients = sharded(
        Weighted(np.ones(2, np.float32)),
        lambda model, rows: jnp.mean(model(rows.astype(jnp.bfloat16)).astype(jnp.float32)),
        batch,
        microbatches=4,
        units=[],
        strategy=strategy,
        param_dtype="bfloat16",
        reduce_dtype="float32",
    )
    np.testing.assert_array_equal(gradients["weight"], np.float32([259 / 4, 1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "bound"),
    [
        ({"param_dtype": "bfloat16", "reduce_dtype": "float32"}, 4e-2),
        ({"param_dtype": "bfloat16"}, 4e-2),
        ({"reduce_dtype": "bfloat16"}, 4e-3),
    ],
)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_low_precision_gradients_are_near_float32_ones_but_not_equal(strategy, precision, bound):
    model, batch = decoder(), tokens(8)
    _, gradients = sharded(model, loss, batch, microbatches=2, strategy=strategy, **precision)
    graphdef, state = nnx.split(model)
    expected = named(jax.jit(jax.grad(lambda s: loss(nnx.merge(graphdef, s), batch)))(state))
    flat = np.concatenate([np.ravel(gradients[path]) for path in expected])
    reference = np.concatenate([np.ravel(value) for value in expected.values()])
    error = np.linalg.norm(flat - reference) / np.linalg.norm(reference)
    assert 1e-4 < error < bound


def test_the_reduce_dtype_defaults_to_the_compute_dtype():
    main = jnp.dtype("float32")
    assert Precision().of_group(main, trainable=True).reduce == main
    assert Precision("bfloat16").of_group(main, trainable=True).reduce == jnp.bfloat16
    assert Precision("bfloat16", "float32").of_group(main, trainable=True).reduce == main
    assert Precision(None, "bfloat16").of_group(main, trainable=True).compute == main


def test_rounding_to_bfloat16_survives_the_compiler():
    x = jnp.float32([1 + 2**-10, 3.14159])
    rounded = jax.jit(lambda x: round_to(x, jnp.dtype("bfloat16")).astype(jnp.float32))(x)
    np.testing.assert_array_equal(rounded, np.asarray(x.astype(jnp.bfloat16), np.float32))
    # Whether XLA keeps a plain cast pair depends on what surrounds it; reduce_precision it must keep.
    assert "reduce_precision" in str(jax.make_jaxpr(lambda x: round_to(x, jnp.dtype("bfloat16")))(x))


def test_means_are_divided_not_multiplied_by_a_rounded_reciprocal():
    x = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    means = jax.jit(lambda x: divide_exactly(x, 3))(x)
    np.testing.assert_array_equal(means, x / np.float32(3))
    assert np.isnan(divide_exactly(jnp.float32(np.nan), 3))
