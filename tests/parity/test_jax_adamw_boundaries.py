"""Where arrays, shards and PyTorch's tensors begin and end, and what that does to the bits of ``main_weight_adamw``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, PartitionSpec

from bridge.checkpoints.compare.ulp import Tolerance, compare
from jax_impl import AdamWState, main_weight_adamw
from tests.parity.test_jax_adamw import DTYPES, Result, assert_same_bits, jax_run, problem, torch_run

pytestmark = pytest.mark.optimized

VECTOR_BYTES = 32
MANY_SIZES = (1, 2, 3, 7, 8, 9, 13, 64, 100, 1001, 4097, 20_011)
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}


@functools.cache
def stock(sizes: tuple[int, ...], dtype: type) -> Result:
    return torch_run(*problem(sizes, dtype), **OPTIONS)


def adamw(**options: Any) -> Any:
    return main_weight_adamw(OPTIONS["lr"], weight_decay=OPTIONS["weight_decay"], **options)


def whole_vectors(size: int, dtype: type) -> int:
    """How many of a tensor's elements PyTorch handles in whole vectors."""
    return size - size % (VECTOR_BYTES // np.dtype(dtype).itemsize)


def heads(result: Result, sizes: tuple[int, ...], dtype: type) -> Result:
    """All but the tails."""
    first, second, third = (
        [x[: whole_vectors(size, dtype)] for x, size in zip(part, sizes, strict=True)] for part in result
    )
    return first, second, third


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.each_value
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
# Shards of odd lengths on 3 devices; 7 elements are nothing but tail in float32.
@pytest.mark.parametrize("size", [20_480, 20_011, 7, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_any_number_of_devices_all_but_torchs_tail_has_torchs_bits(
    dtype: type, size: int, devices: int
) -> None:
    with jax.enable_x64(dtype == np.float64):
        trained = jax_run(*problem((size,), dtype), adamw(), devices)
    expected = stock((size,), dtype)
    assert_same_bits(heads(trained, (size,), dtype), heads(expected, (size,), dtype))
    np.testing.assert_array_equal(trained[1][0], expected[1][0])


@pytest.mark.fast_cases("float64-3")
@pytest.mark.parametrize("devices", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_where_arrays_are_torchs_tensors_the_tails_have_torchs_bits_too(dtype: type, devices: int) -> None:
    # Padding would move the tails, so one device only, but for sizes that need none.
    sizes = tuple(size for size in (*MANY_SIZES, 24, 264, 20_472) if size % devices == 0)
    with jax.enable_x64(dtype == np.float64):
        trained = jax_run(*problem(sizes, dtype), adamw(torch_vector_bytes=VECTOR_BYTES), devices)
    assert_same_bits(trained, stock(sizes, dtype))


def test_the_tail_of_an_array_of_more_axes_is_its_last_elements_row_by_row() -> None:
    weights, gradients = problem((7 * 3 * 5,), np.float32, 20)
    optimizer = adamw(torch_vector_bytes=VECTOR_BYTES)
    held = jnp.asarray(weights[0]).reshape(7, 3, 5)
    state = optimizer.init(held)
    step = jax.jit(optimizer.apply)
    for (slope,) in gradients:
        held, state = step(jnp.asarray(slope).reshape(7, 3, 5), state, held)
    trained = tuple([np.asarray(x).reshape(-1)] for x in (held, state.mu, state.nu))
    assert_same_bits(trained, torch_run(weights, gradients, **OPTIONS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_flat_array_has_the_bits_of_many_tensors_cut_anywhere_but_in_their_tails(dtype: type) -> None:
    # The tensors of a model lie one after another in a flat array: their ends have nothing to do with the shards'.
    weights, gradients = problem(MANY_SIZES, dtype)
    flat = [np.concatenate(weights)], [[np.concatenate(slopes)] for slopes in gradients]
    ends = np.cumsum(MANY_SIZES)[:-1]
    with jax.enable_x64(dtype == np.float64):
        trained = jax_run(*flat, adamw(), 8)
    first, second, third = (np.split(part[0], ends) for part in trained)
    expected = stock(MANY_SIZES, dtype)
    assert_same_bits(heads((first, second, third), MANY_SIZES, dtype), heads(expected, MANY_SIZES, dtype))


def test_the_tail_of_a_long_tensor_is_within_five_ulp() -> None:
    size, steps = 20_011, 100
    rng = np.random.default_rng(0)
    start = (0.02 * rng.normal(size=size)).astype(np.float32)
    slopes = [
        (rng.normal(size=size) * 10.0 ** rng.uniform(-6, 0, size)).astype(np.float32) for _ in range(steps)
    ]
    trained = jax_run([start], [[slope] for slope in slopes], adamw())
    expected = torch_run([start], [[slope] for slope in slopes], **OPTIONS)
    for (ours,), (theirs,) in zip(trained, expected, strict=True):
        assert all(np.flatnonzero(ours != theirs) >= whole_vectors(size, np.float32))
        assert compare(ours, theirs, Tolerance()).max_ulp <= 5


@pytest.mark.slow
@pytest.mark.fast_cases("float32")
@pytest.mark.parametrize("dtype", DTYPES)
def test_how_far_torchs_tails_drift(dtype: type) -> None:
    """Tensors that are only tail. The docstring of ``jax_impl.optimizer.main_weight_adamw`` gives these numbers."""
    length = {np.float32: 7, np.float64: 3}[dtype]
    count = 1000
    weights, gradients = problem((length,) * count, dtype)
    flat = [np.concatenate(weights)], [[np.concatenate(slopes)] for slopes in gradients]
    with jax.enable_x64(dtype == np.float64):
        (w,), (m,), (v,) = jax_run(*flat, adamw())
    expected = [np.concatenate(part) for part in torch_run(weights, gradients, **OPTIONS)]
    np.testing.assert_array_equal(m, expected[1])
    assert 5 < compare(v, expected[2], Tolerance()).max_ulp <= 20
    # Weights near zero are off by many of their own units: they were larger before, or were added up from larger ones.
    largest = np.maximum(np.abs(flat[0][0]), np.abs(w))
    assert np.max(np.abs(w - expected[0]) / np.spacing(np.maximum(largest, dtype(0.02)))) <= 8


def by_itself(apply: Any, mesh: Mesh) -> Callable[..., Any]:
    return jax.jit(apply)


def donated(apply: Any, mesh: Mesh) -> Callable[..., Any]:
    return jax.jit(apply, donate_argnums=(1, 2))


def shard_mapped(apply: Any, mesh: Mesh) -> Callable[..., Any]:
    rows = PartitionSpec("dp")
    state = AdamWState(PartitionSpec(), rows, rows)
    return jax.jit(jax.shard_map(apply, mesh=mesh, in_specs=(rows, state, rows), out_specs=(rows, state)))


@pytest.mark.fast_cases("float32-8-shard_mapped")
@pytest.mark.parametrize("compiled", [by_itself, donated, shard_mapped])
@pytest.mark.parametrize("devices", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_do_not_depend_on_devices_donation_or_the_other_arrays(
    dtype: type, devices: int, compiled: Callable[..., Any]
) -> None:
    weights, gradients = problem(MANY_SIZES, dtype, 20)
    with jax.enable_x64(dtype == np.float64):
        assert_same_bits(jax_run(weights, gradients, adamw(), devices, compiled), alone(dtype))


@functools.cache
def alone(dtype: type) -> Result:
    """Each of the arrays in a program of its own, on one device."""
    weights, gradients = problem(MANY_SIZES, dtype, 20)
    runs = [
        jax_run([weights[i]], [[slopes[i]] for slopes in gradients], adamw()) for i in range(len(MANY_SIZES))
    ]
    first, second, third = ([run[part][0] for run in runs] for part in range(3))
    return first, second, third


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_that_the_same_program_multiplies_are_rounded_first(dtype: type) -> None:
    weights, gradients = problem((4097,), dtype, 20)

    def scaled(apply: Any, mesh: Mesh) -> Callable[..., Any]:
        return jax.jit(
            lambda slopes, state, held: apply([g * g.dtype.type(0.7) for g in slopes], state, held)
        )

    before = [[slope * dtype(0.7) for slope in slopes] for slopes in gradients]
    with jax.enable_x64(dtype == np.float64):
        trained = jax_run(weights, gradients, adamw(), 1, scaled)
        assert_same_bits(trained, jax_run(weights, before, adamw()))


@pytest.mark.fast_cases("2")
@pytest.mark.parametrize("threads", [1, 2])
def test_large_arrays_have_torchs_bits_on_any_number_of_threads(threads: int) -> None:
    # Long enough for both frameworks to split it between threads.
    size = (1 << 20) + 5
    weights, gradients = problem((size,), np.float32, 3)
    torch.set_num_threads(threads)
    expected = torch_run(weights, gradients, **OPTIONS)
    for devices in (1, 8):
        trained = jax_run(weights, gradients, adamw(), devices)
        assert_same_bits(heads(trained, (size,), np.float32), heads(expected, (size,), np.float32))
