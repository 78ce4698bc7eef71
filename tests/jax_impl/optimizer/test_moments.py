"""Low-precision moments in training, and what of a program they make."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_impl import data_parallel_mesh, fully_shard, init_state, main_weight_adamw, make_train_step
from jax_impl.optimizer.moments import MomentFormat, Rows, decode_rows
from tests.support.jax_impl import checkpoint_runs as runs
from tests.support.jax_impl.tiny import decoder, loss, tokens

pytestmark = pytest.mark.filterwarnings("ignore:pjit engine")
BITS = pytest.mark.optimized


def losses(steps: int, engine: str, **dtypes: Any) -> np.ndarray:
    """Of training with other rows on each of four devices and in each of four steps."""
    case, optimizer = (4, runs.DEFAULT, engine), main_weight_adamw(1e-2, **dtypes)
    step, state = runs.step_of(*case, optimizer=optimizer), runs.fresh(*case, optimizer=optimizer)
    history = []
    for number in range(steps):
        state, metrics = step(state, tokens(8, seed=number % 4))
        history.append(float(metrics["loss"]))
    return np.array(history)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["shard_map", pytest.param("pjit", marks=pytest.mark.slow)])
def test_training_with_float8_moments_stays_close_to_float32(engine: str) -> None:
    expected = losses(40, engine)
    narrow = losses(40, engine, mu_dtype="float8_e4m3fn", nu_dtype="float8_e4m3fn")
    assert expected[-1] < 0.5 * expected[0]
    assert np.any(narrow != expected)
    np.testing.assert_allclose(narrow, expected, rtol=0.05)


@functools.cache
def encoding(moment_format: MomentFormat) -> Any:
    return jax.jit(lambda values, numbers, step: moment_format.encode(values, Rows(numbers), step))


def stored(moment_format: MomentFormat, values: np.ndarray, step: int = 1) -> tuple[np.ndarray, np.ndarray]:
    number, scale = encoding(moment_format)(values, np.arange(len(values), dtype=np.int32), np.int32(step))
    return np.asarray(number.astype(moment_format.dtype)), np.asarray(scale)


@BITS
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16"])
def test_first_moments_are_rounded_to_nearest_and_ties_to_even(dtype: str) -> None:
    moment_format = MomentFormat.of("mu_dtype", dtype)
    most = float(jnp.finfo(moment_format.dtype).max)
    bits = (
        np.arange(256, dtype=np.uint8)
        if moment_format.dtype.itemsize == 1
        else np.arange(1 << 16, dtype=np.uint16)
    )
    numbers = np.unique(bits.view(moment_format.dtype).astype(np.float32))
    numbers = numbers[np.isfinite(numbers)]
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(ties, np.float32(sign) * np.inf) for sign in (1, -1)]
    values = np.concatenate([numbers, ties, *near])
    # The largest number is there, so the scale is 1; of each row another part.
    assert numbers[-1] == most
    payload, scale = stored(moment_format, values[None])
    assert scale == 1
    with np.errstate(over="ignore"):
        expected = values.astype(moment_format.dtype)
    np.testing.assert_array_equal(payload[0].astype(np.float32), expected.astype(np.float32))
    # Of any size, a row has its largest element at the largest number.
    large, scale = stored(moment_format, np.array([[1e30, -3e38, 2e30], [1e-30, 2e-30, -1e-31]], np.float32))
    assert np.abs(large.astype(np.float32)).max(-1).tolist() == [most, most]
    assert np.all(np.isfinite(scale))


@BITS
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16"])
def test_second_moments_are_never_rounded_to_zero(dtype: str) -> None:
    moment_format = MomentFormat.of("nu_dtype", dtype, positive=True)
    values = np.array([[1.0, 1e-15, 1e-20, 0.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
    for step in range(1, 9):
        payload, scale = stored(moment_format, values, step)
        least = float(jnp.finfo(moment_format.dtype).smallest_subnormal)
        assert payload[0, 1:].astype(np.float32).tolist() == [least, least, 0]
        assert not payload[1].astype(np.float32).any()
        assert scale[1] == 0
        np.testing.assert_array_equal(decode_rows(payload, scale)[1], values[1])


@BITS
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_second_moments_are_right_on_average_over_steps(dtype: str) -> None:
    moment_format = MomentFormat.of("nu_dtype", dtype, positive=True)
    values = (0.01 + np.random.default_rng(0).uniform(size=(4, 50))).astype(np.float32)
    mean = np.mean([decode_rows(*stored(moment_format, values, step)) for step in range(1, 401)], axis=0)
    np.testing.assert_allclose(mean, values, rtol=2e-3)
    once = decode_rows(*stored(moment_format, values))
    assert np.abs(once / values - 1).max() > 0.05


@BITS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_steps_in_one_program_round_moments_as_steps_of_their_own_do(dtype: str) -> None:
    rng = np.random.default_rng(0)
    weights = {"w": jnp.asarray(rng.normal(size=(5, 33)), jnp.float32), "b": jnp.ones(7)}
    slopes = jax.tree.map(lambda w: jnp.asarray(rng.normal(size=(4, *w.shape)), jnp.float32), weights)
    optimizer = main_weight_adamw(1e-2, mu_dtype=dtype, nu_dtype=dtype)

    def step(held: Any, gradient: Any) -> tuple[Any, None]:
        return optimizer.apply(gradient, held[1], held[0]), None

    start = weights, optimizer.init(weights)
    unrolled, _ = jax.jit(lambda start: jax.lax.scan(step, start, slopes, unroll=4))(start)
    single, held = jax.jit(step), start
    for number in range(4):
        held, _ = single(held, jax.tree.map(lambda x, number=number: x[number], slopes))
    for leaf, expected in zip(jax.tree.leaves(unrolled), jax.tree.leaves(held), strict=True):
        assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:shard_map engine")
def test_in_a_chain_the_model_s_own_rows_have_scales() -> None:
    plan, weights = fully_shard(decoder(), data_parallel_mesh(2), units=["layers/*"])
    chain = optax.chain(optax.clip(1.0), main_weight_adamw(1e-2, mu_dtype="float8_e4m3fn"))
    state = init_state(plan, weights, chain)
    state, _ = make_train_step(plan, loss, chain)(state, tokens(4))
    scales = {leaf.shape for leaf in jax.tree.leaves(state.opt_state[1].mu_scale)}
    assert scales == {(*info.shape[:-1], 1) for info in plan.parameters.values() if len(info.shape) > 1}


@pytest.mark.parametrize("dtype", ["int8", "float64", "float8_e4m3fnuz", "nothing"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match="nu_dtype: expected one of float32, bfloat16, float16"):
        main_weight_adamw(1e-3, nu_dtype=dtype)
