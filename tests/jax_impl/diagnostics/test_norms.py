"""Norms from shards against NumPy on whole parameters."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_impl import (
    count_collectives,
    data_parallel_mesh,
    fully_shard,
    init_state,
    main_weight_adamw,
    make_train_step,
    parameter_norms,
    shard_batch,
    unshard,
)
from tests.support.jax_impl import diagnosed, tiny

MESHES = {"3": 3, "4": 4, "2x3": {"outer": 2, "inner": 3}}


def expected(values, norm_type=2.0):
    return {
        path: np.linalg.norm(np.asarray(x, np.float64).reshape(-1), norm_type) for path, x in values.items()
    }


LAYOUTS = [("3", "optim_grads_params"), ("4", "no_shard"), ("2x3", "hsdp"), ("2x3", "hfsdp"), ("4", "optim")]
QUICK = [("shard_map", ("2x3", "hfsdp"), True, 3.0), ("pjit", ("4", "optim"), False, math.inf)]


@pytest.mark.parametrize(
    ("engine", "layout", "stacked", "norm_type"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
        for case in itertools.product(
            ["shard_map", "pjit"], LAYOUTS, [False, True], [1.0, 2.0, 3.0, math.inf]
        )
    ],
)
@pytest.mark.filterwarnings("ignore:pjit engine")
def test_weights(engine, layout, stacked, norm_type):
    mesh, strategy = layout
    plan, weights = fully_shard(
        diagnosed.parameters(stacked),
        data_parallel_mesh(MESHES[mesh]),
        engine=engine,
        strategy=strategy,
        units=["layers/*", "layers/*/mlp"],
        stacked=["layers"] if stacked else [],
    )
    values = unshard(plan, weights)
    norms = parameter_norms(plan, weights, norm_type=norm_type)
    assert list(norms) == list(plan.parameters)
    assert norms == pytest.approx(expected(values, norm_type), rel=1e-14)
    traced = jax.jit(lambda w: parameter_norms(plan, w, norm_type=norm_type))(weights)
    assert {path: float(norm) for path, norm in traced.items()} == pytest.approx(norms, rel=1e-6)
    layers = parameter_norms(plan, weights, norm_type=norm_type, by_layer=True)
    for path, norm in layers.items():
        assert np.ndim(norm) == (1 if stacked and path.startswith("layers") else 0)
        if stacked and path.startswith("layers"):
            each = expected(dict(enumerate(values[path])), norm_type)
            np.testing.assert_allclose(norm, list(each.values()), rtol=1e-14)
        else:
            assert norm == norms[path]


@pytest.mark.parametrize("engine", ["shard_map", pytest.param("pjit", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:pjit engine")
def test_gradients_and_moments(engine):
    plan, weights = fully_shard(diagnosed.parameters(), data_parallel_mesh(4), engine=engine)
    batch = shard_batch(plan, diagnosed.rows(8))
    gradients = jax.grad(diagnosed.loss)(diagnosed.parameters(), diagnosed.rows(8))
    named = {
        jax.tree_util.keystr(p, simple=True, separator="/"): x
        for p, x in jax.tree.leaves_with_path(gradients)
    }
    optimizer = main_weight_adamw(1e-3, b1=0.75)
    step = make_train_step(plan, diagnosed.loss, optimizer)
    state = init_state(plan, weights, optimizer)
    _, sharded = step.gradients(weights, batch)
    assert parameter_norms(plan, sharded) == pytest.approx(expected(named), rel=1e-5)
    state, _ = step(state, batch)
    first = {path: 0.25 * norm for path, norm in expected(named).items()}
    assert parameter_norms(plan, state.opt_state.mu) == pytest.approx(first, rel=1e-5)
    with pytest.raises(ValueError, match=r"expected one array .*, got two, .* such as state.opt_state.mu"):
        parameter_norms(plan, state.opt_state)


@pytest.mark.filterwarnings("ignore:shard_map engine. this optimizer")
def test_moments_of_an_optimizer_that_sees_parameters():
    plan, weights = fully_shard(diagnosed.parameters(), data_parallel_mesh(4))
    state = init_state(plan, weights, optax.lamb(1e-3))
    mu = jax.tree.map(lambda x: x + 2, state.opt_state[0].mu)
    counts = {path: int(np.prod(info.shape)) for path, info in plan.parameters.items()}
    assert parameter_norms(plan, mu) == pytest.approx({path: 2 * n**0.5 for path, n in counts.items()})


def test_one_maximum_and_one_sum_over_the_devices_however_many_parameters():
    plan, weights = fully_shard(tiny.decoder(), data_parallel_mesh(4))
    counts = count_collectives(lambda w: parameter_norms(plan, w), weights)
    assert {(collective.kind, collective.size): n for collective, n in counts.items()} == {
        ("pmax", 21): 1,
        ("psum", 21): 1,
    }


@pytest.mark.parametrize("scale", [pytest.param(1e-30, marks=pytest.mark.slow), 1e30])
def test_float32_squares_neither_overflow_nor_underflow(scale):
    plan, weights = fully_shard(diagnosed.parameters(), data_parallel_mesh(4))
    small = jax.tree.map(lambda x: x * scale, weights)
    norms = jax.jit(lambda w: parameter_norms(plan, w))(small)
    values = expected(unshard(plan, weights))
    assert {path: float(x) / scale for path, x in norms.items()} == pytest.approx(values, rel=1e-6)


@pytest.mark.each_value
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_spoils_its_own_parameter_alone(bad, norm_type):
    plan, weights = fully_shard(diagnosed.parameters(), data_parallel_mesh(4))
    spoiled = {key: array if key else array.at[3].set(bad) for key, array in weights.items()}
    clean = parameter_norms(plan, weights, norm_type=norm_type)
    for norms in (
        parameter_norms(plan, spoiled, norm_type=norm_type),
        jax.jit(lambda w: parameter_norms(plan, w, norm_type=norm_type))(spoiled),
    ):
        np.testing.assert_equal(float(norms.pop("embed")), bad)
        assert {k: float(v) for k, v in norms.items()} == pytest.approx(
            {k: v for k, v in clean.items() if k != "embed"}, rel=1e-6
        )


def test_bad_input():
    plan, weights = fully_shard(diagnosed.parameters(), data_parallel_mesh(4))
    with pytest.raises(ValueError, match="norm_type: expected a positive number or inf, got 0"):
        parameter_norms(plan, weights, norm_type=0)
    with pytest.raises(
        ValueError, match=r"buffers\['layers'\]: expected an array of the plan, .* got shape \(3,\)"
    ):
        parameter_norms(plan, {"layers": jnp.ones(3)})
    assert parameter_norms(plan, {}) == {}
