import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_impl import AdamWState, main_weight_adamw


def reference(weights, gradients, lr, b1, b2, eps, decay, start=0):
    """AdamW in float64, as in the paper."""
    w, m, v = np.array(weights, np.float64), np.zeros(len(weights)), np.zeros(len(weights))
    for t, g in enumerate(gradients, start + 1):
        g = np.asarray(g, np.float64)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        w = w - lr * decay * w - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return w, m, v


def problem(size=1000, steps=5, dtype=np.float32):
    rng = np.random.default_rng(0)
    weights = (0.1 * rng.normal(size=size)).astype(dtype)
    gradients = [
        (rng.normal(size=size) * 10.0 ** rng.uniform(-6, 0, size)).astype(dtype) for _ in range(steps)
    ]
    return weights, gradients


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 3e-7), (np.float64, 1e-14)])
def test_steps_follow_adamw_in_float64(dtype, tolerance):
    weights, gradients = problem(dtype=dtype)
    with jax.enable_x64(dtype == np.float64):
        optimizer = main_weight_adamw(1e-2, 0.8, 0.95, 1e-6, 0.1)
        w, state = {"a": jnp.asarray(weights)}, optimizer.init({"a": jnp.asarray(weights)})
        step = jax.jit(optimizer.apply)
        for gradient in gradients:
            w, state = step({"a": jnp.asarray(gradient)}, state, w)
        expected = reference(weights, gradients, 1e-2, 0.8, 0.95, 1e-6, 0.1)
        for found, value in zip((w, state.mu, state.nu), expected, strict=True):
            assert found["a"].dtype == dtype
            np.testing.assert_allclose(found["a"], value, rtol=tolerance, atol=tolerance)
        assert state.count.dtype == jnp.int32
        assert int(state.count) == 5


@pytest.mark.parametrize("done", [0, 1, 7, 500, 20_000, 10_000_000])
def test_bias_corrections_are_the_rounded_host_doubles_at_any_step(done):
    lr, b1, b2 = 1e-3, 0.9, 0.999
    optimizer = main_weight_adamw(lr, b1, b2, eps=1e-8, weight_decay=0.0)
    state = AdamWState(jnp.int32(done), jnp.zeros(1), jnp.zeros(1))
    w, _ = jax.jit(optimizer.apply)(jnp.ones(1), state, jnp.zeros(1))
    t, f32 = done + 1, np.float32
    step_size, correction = f32(lr / (1 - b1**t)), f32((1 - b2**t) ** 0.5)
    expected = (-step_size * f32(1 - b1)) / (np.sqrt(f32(1 - b2)) / correction + f32(1e-8))
    assert w[0] == expected


def test_optax_updates_lead_to_the_same_weights_but_for_rounding():
    weights, gradients = problem()
    optimizer = main_weight_adamw(1e-2, weight_decay=0.1)
    assert isinstance(optimizer, optax.GradientTransformation)
    w = jnp.asarray(weights)
    applied, _ = optimizer.apply(jnp.asarray(gradients[0]), optimizer.init(w), w)
    updates, state = optimizer.update(jnp.asarray(gradients[0]), optimizer.init(w), w)
    np.testing.assert_allclose(optax.apply_updates(w, updates), applied, rtol=1e-6, atol=1e-9)
    assert int(state.count) == 1


def test_it_chains_with_other_optax_transformations():
    weights, gradients = problem()
    chained = optax.chain(optax.clip_by_global_norm(0.1), main_weight_adamw(1e-2))
    w = jnp.asarray(weights)
    gradient = jnp.asarray(gradients[0])
    updates, _ = chained.update(gradient, chained.init(w), w)
    clipped = gradient * (0.1 / jnp.linalg.norm(gradient))
    expected, _ = main_weight_adamw(1e-2).update(clipped, main_weight_adamw(1e-2).init(w), w)
    np.testing.assert_allclose(updates, expected, rtol=1e-5, atol=1e-9)


def test_padding_of_zeros_stays_zero():
    optimizer = main_weight_adamw(1e-2, weight_decay=0.1)
    w, zeros = jnp.zeros(8), jnp.zeros(8)
    state = optimizer.init(w)
    for _ in range(3):
        w, state = jax.jit(optimizer.apply)(zeros, state, w)
    assert not np.any(w)
    assert not np.any(state.mu)
    assert not np.any(state.nu)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate >= 0, got -1"),
        ({"learning_rate": 1e-3, "b1": 1.0}, "0 <= b1 < 1, got 1"),
        ({"learning_rate": 1e-3, "eps": float("nan")}, "eps >= 0, got nan"),
        ({"learning_rate": 1e-3, "weight_decay": float("inf")}, "weight_decay >= 0, got inf"),
        ({"learning_rate": 1e-3, "b2": 0.99999999}, "b2 whose powers vanish"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        main_weight_adamw(**arguments)


def test_update_without_weights_is_refused():
    optimizer = main_weight_adamw(1e-3)
    with pytest.raises(ValueError, match="expected the weights as third argument"):
        optimizer.update(jnp.ones(3), optimizer.init(jnp.ones(3)))
