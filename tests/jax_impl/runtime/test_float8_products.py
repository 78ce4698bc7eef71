"""Products in float8, held to products of rounded factors."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

from jax_impl import (
    data_parallel_mesh,
    float8_dot_general,
    fully_shard,
    init_state,
    main_weight_adamw,
    make_gradients,
    make_train_step,
    shard_batch,
    unshard,
)
from jax_impl.models import Decoder, DecoderConfig
from tests.jax_impl.runtime.test_float8 import quantized

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LINEAR = (((1,), (0,)), ((), ()))
HEADS = (((2,), (0,)), ((), ()))
MERGED = (((2, 3), (0, 1)), ((), ()))


def rounded(values: Any, dtype: Any) -> np.ndarray:
    """To numbers of ``dtype`` times the least power of two with which none is too large."""
    wide = np.asarray(values, np.float32)
    largest = float(ml_dtypes.finfo(dtype).max)
    power = 2.0 ** math.ceil(math.log2(np.abs(wide).max() / largest))
    return (wide / power).astype(dtype).astype(np.float32) * power


def factors(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> list[jax.Array]:
    """Of many magnitudes: most of the rounded ones are subnormal numbers of float8, or 0."""
    random = np.random.default_rng(0)
    return [
        jnp.asarray(random.standard_normal(shape) * 10.0 ** random.integers(-7, 2, shape), dtype)
        for shape in shapes
    ]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("of_lhs", "of_rhs", "dimensions"),
    [((6, 32), (32, 48), LINEAR), ((2, 3, 32), (32, 8, 4), HEADS), ((2, 3, 8, 6), (8, 6, 16), MERGED)],
)
def test_output_and_gradients_are_those_of_rounded_factors(
    of_lhs: tuple[int, ...], of_rhs: tuple[int, ...], dimensions: Any, dtype: Any
) -> None:
    lhs, rhs = factors(of_lhs, of_rhs, dtype=dtype)
    output, back = jax.vjp(jax.jit(lambda x, w: float8_dot_general(x, w, dimensions)), lhs, rhs)
    (grad,) = factors(output.shape, dtype=dtype)
    arrays = (output, *back(grad))
    weight = jnp.asarray(rounded(rhs, E4M3))
    wide = [jnp.asarray(x, jnp.float32) for x in (lhs, rhs, grad)]
    expected, back = jax.vjp(
        lambda x: lax.dot_general(x, weight, dimensions), jnp.asarray(rounded(lhs, E4M3))
    )
    (of_input,) = back(jnp.asarray(rounded(grad, E5M2)))
    _, back = jax.vjp(lambda w: lax.dot_general(wide[0], w, dimensions), wide[1])
    rtol = 2e-6 if dtype == jnp.float32 else 2.0**-8
    for mine, theirs in zip(arrays, (expected, of_input, *back(wide[2])), strict=True):
        assert mine.dtype == dtype
        scale = float(np.abs(np.asarray(theirs)).max())
        np.testing.assert_allclose(np.asarray(mine, np.float32), theirs, rtol=rtol, atol=1e-6 * scale)


def test_a_weight_that_was_gathered_as_float8_loses_nothing() -> None:
    (weight,) = factors((32, 48), dtype=jnp.bfloat16)
    gathered = jnp.asarray(quantized(weight, "float8_e4m3fn"), jnp.bfloat16)
    product = float8_dot_general(jnp.eye(32, dtype=jnp.bfloat16), gathered, LINEAR)
    np.testing.assert_array_equal(product, gathered)
    assert not np.array_equal(gathered, weight)


def test_zeros_infinities_and_nan_stay_where_they_are() -> None:
    weight = jnp.ones((16, 16))
    np.testing.assert_array_equal(float8_dot_general(jnp.zeros((4, 16)), weight, LINEAR), np.zeros((4, 16)))
    bad = jnp.ones((4, 16)).at[1, 3].set(jnp.nan)
    np.testing.assert_array_equal(np.isnan(float8_dot_general(bad, weight, LINEAR)).any(1), [0, 1, 0, 0])
    # 1 is nothing beside infinity, which becomes the largest number.
    product = np.asarray(float8_dot_general(jnp.ones((4, 16)).at[1, 3].set(jnp.inf), weight, LINEAR))
    assert (product[1] > 1e38).all()
    assert not product[[0, 2, 3]].any()


@pytest.mark.parametrize(
    ("of_lhs", "of_rhs", "dtypes"),
    [
        ((6, 32), (32, 40), (jnp.float32, jnp.float32)),
        ((6, 24), (24, 32), (jnp.float32, jnp.float32)),
        ((0, 32), (32, 32), (jnp.float32, jnp.float32)),
        ((6, 32), (32, 32), (jnp.float16, jnp.float16)),
        ((6, 32), (32, 32), (jnp.float32, jnp.bfloat16)),
    ],
)
def test_what_float8_kernels_do_not_take_is_multiplied_as_it_is(
    of_lhs: tuple[int, ...], of_rhs: tuple[int, ...], dtypes: Any
) -> None:
    lhs, rhs = (factor.astype(dtype) for factor, dtype in zip(factors(of_lhs, of_rhs), dtypes, strict=True))
    np.testing.assert_array_equal(
        float8_dot_general(lhs, rhs, LINEAR), lax.dot_general(lhs, rhs, LINEAR), strict=True
    )


def test_modules_of_flax_and_decoders_take_it() -> None:
    x = jnp.ones((2, 3, 32))
    dense = linen.Dense(16, dot_general=float8_dot_general)
    params = dense.init(jax.random.key(0), x)
    plain, narrow = linen.Dense(16).apply(params, x), dense.apply(params, x)
    assert not np.array_equal(plain, narrow)
    np.testing.assert_allclose(narrow, plain, atol=0.2)

    config = DecoderConfig(vocab_size=48, d_model=32, n_layers=1, n_heads=4, head_dim=8, d_ff=64)
    model, tokens = Decoder(config, rngs=nnx.Rngs(0)), jnp.arange(12).reshape(2, 6)
    logits = nnx.jit(lambda model, tokens: model(tokens))
    before = logits(model, tokens)
    model.set_attributes(dot_general=lax.dot_general)
    np.testing.assert_allclose(logits(model, tokens), before, rtol=1e-5, atol=1e-6)
    calls = []

    def counting(*args: Any, **kwargs: Any) -> jax.Array:
        calls.append(args[1].shape)
        return float8_dot_general(*args, **kwargs)

    model.set_attributes(dot_general=counting)
    np.testing.assert_allclose(logits(model, tokens), before, atol=0.1 * float(jnp.abs(before).max()))
    assert len(calls) == 8


class Network(nnx.Module):
    """Two linear modules, the second without a bias, and a head whose size fits no kernel."""

    def __init__(self, product: Any = float8_dot_general) -> None:
        rngs = nnx.Rngs(3)
        layers = [nnx.Linear(32, 48, rngs=rngs), nnx.Linear(48, 16, use_bias=False, rngs=rngs)]
        self.layers, self.head = nnx.List(layers), nnx.Linear(16, 5, rngs=rngs)
        self.set_attributes(dot_general=product)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.layers[1](jnp.tanh(self.layers[0](x))))


def loss(model: Network, x: jax.Array) -> jax.Array:
    """In which small rows count as much as large ones."""
    return jnp.square(model(x) / jnp.abs(x).max(axis=1, keepdims=True)).mean()


@jax.custom_vjp
def emulated(x: jax.Array, weight: jax.Array) -> jax.Array:
    return _emulated(x, weight)[0]


def _emulated(x: jax.Array, weight: jax.Array) -> Any:
    return _cast(x, E4M3) @ _cast(weight, E4M3), (x, weight)


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return jax.pure_callback(lambda x: rounded(x, dtype), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


emulated.defvjp(
    _emulated, lambda saved, grad: (_cast(grad, E5M2) @ _cast(saved[1], E4M3).T, saved[0].T @ grad)
)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["shard_map", pytest.param("pjit", marks=pytest.mark.slow)])
def test_sharded_gradients_are_those_of_each_devices_rounded_rows(engine: str) -> None:
    plan, weights = fully_shard(Network(), data_parallel_mesh(2), engine=engine, gather_dtype="float8_e4m3fn")
    rows = np.random.default_rng(1).standard_normal((8, 32)).astype(np.float32)
    # With a scale of all rows most of these would become zeros.
    rows[4:] *= 2.0**-14
    value, reduced, _ = jax.jit(make_gradients(plan, loss))(weights, shard_batch(plan, rows))

    def product(x: jax.Array, weight: jax.Array, *_: Any, **__: Any) -> jax.Array:
        return emulated(x, weight) if weight.shape != (16, 5) else x @ weight

    graphdef, state = nnx.split(Network(product))
    state = jax.tree.map(lambda x: jnp.asarray(quantized(x, "float8_e4m3fn")), state)
    parts = [rows[:4], rows[4:]] if engine == "shard_map" else [rows]
    compute = jax.value_and_grad(lambda state, x: loss(nnx.merge(graphdef, state), x))
    of_parts = [compute(state, part) for part in parts]
    np.testing.assert_allclose(float(value), np.mean([part_loss for part_loss, _ in of_parts]), rtol=1e-5)
    expected = jax.tree.map(
        lambda *leaves: np.mean(leaves, axis=0), *[gradients for _, gradients in of_parts]
    )
    named = {"/".join(map(str, key)): v.get_value() for key, v in nnx.to_flat_state(expected)}
    for path, gradient in unshard(plan, reduced).items():
        scale = float(np.abs(named[path]).max())
        np.testing.assert_allclose(gradient, named[path], rtol=0, atol=1e-4 * scale, err_msg=path)


class Successor(nnx.Module):
    """Learns which token comes after which."""

    def __init__(self, product: Any) -> None:
        rngs = nnx.Rngs(1)
        self.embed = nnx.Embed(64, 64, rngs=rngs)
        pairs = [(nnx.Linear(64, 96, rngs=rngs), nnx.Linear(96, 64, rngs=rngs)) for _ in range(2)]
        self.layers = nnx.List([nnx.Sequential(up, nnx.silu, down) for up, down in pairs])
        self.head = nnx.Linear(64, 64, rngs=rngs)
        self.set_attributes(nnx.Linear, dot_general=product)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).astype(jnp.float32)


@pytest.mark.slow
def test_losses_stay_beside_those_of_bfloat16() -> None:
    def of_rows(model: Successor, tokens: jax.Array) -> jax.Array:
        chosen = jnp.take_along_axis(model(tokens[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(model(tokens[:, :-1]), axis=-1) - chosen).mean()

    histories = []
    for product, gather in ((lax.dot_general, None), (float8_dot_general, "float8_e4m3fn")):
        plan, weights = fully_shard(
            Successor(product), data_parallel_mesh(2), param_dtype="bfloat16", gather_dtype=gather
        )
        optimizer = main_weight_adamw(3e-3)
        state, step = init_state(plan, weights, optimizer), make_train_step(plan, of_rows, optimizer)
        losses = []
        for index in range(30):
            start = np.random.default_rng(index).integers(0, 64, (16, 1))
            state, metrics = step(state, ((start + np.arange(9) * 5) % 64).astype(np.int32))
            losses.append(float(metrics["loss"]))
        histories.append(losses)
    plain, narrow = np.array(histories)
    assert plain[-1] < 0.5 * plain[0]
    np.testing.assert_allclose(narrow, plain, rtol=0.05)
    assert not np.array_equal(narrow, plain)
