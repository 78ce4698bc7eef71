from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_impl import AdamWState, main_weight_adamw
from jax_impl.optimizer.main_weight_adamw import Constants, step_scalars

pytestmark = pytest.mark.optimized


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
        for arrays, value in zip((w, state.mu, state.nu), expected, strict=True):
            assert arrays["a"].dtype == dtype
            np.testing.assert_allclose(arrays["a"], value, rtol=tolerance, atol=tolerance)
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


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scheduled", [False, True])
def test_scalars_of_a_step_are_doubles_rounded_once(scheduled, dtype):
    rng = np.random.default_rng(0)
    rates = (10.0 ** rng.uniform(-6, 0, 30)).astype(np.float64 if dtype == np.float64 else np.float32)
    # Around 180 steps the power of b1 drops below half a float32 ulp of one, around 340 below one of float64.
    steps = [1, 2, 3, 10, 100, *range(170, 190), *range(330, 350), 2000, 10**6]
    b1, b2, decay = 0.9, 0.999, 0.1
    constants = Constants(b1, b2, 1e-8, decay)

    def scalars(count, rate):
        of_step = step_scalars(count, np.dtype(dtype), rate, constants)
        return of_step.step_size, of_step.correction, of_step.decay

    with jax.enable_x64(dtype == np.float64):
        for rate in rates:
            if scheduled:
                columns = jax.jit(jax.vmap(scalars, (0, None)))(
                    jnp.array(steps, jnp.int32), jnp.asarray(rate)
                )
            else:
                columns = jax.jit(jax.vmap(lambda count, rate=rate: scalars(count, float(rate))))(
                    jnp.array(steps, jnp.int32)
                )
            lr = float(rate)
            np.testing.assert_array_equal(
                columns[0], np.array([lr / (1 - b1**t) for t in steps]).astype(dtype)
            )
            np.testing.assert_array_equal(
                columns[1], np.array([(1 - b2**t) ** 0.5 for t in steps]).astype(dtype)
            )
            np.testing.assert_array_equal(columns[2], np.full(len(steps), dtype(rounded_once(lr, decay))))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_decay_by_a_scheduled_rate_is_rounded_once_as_on_the_host(dtype):
    rates = np.random.default_rng(0).uniform(0.3, 1, 2000).astype(dtype)
    constants = Constants(0.9, 0.999, 1e-8, 0.7)
    with jax.enable_x64(dtype == np.float64):
        decay = jax.jit(
            jax.vmap(
                lambda rate, count: step_scalars(count, np.dtype(dtype), rate, constants).decay, (0, None)
            )
        )
        decays = decay(jnp.asarray(rates), jnp.int32(1))
        np.testing.assert_array_equal(decays, [dtype(rounded_once(float(rate), 0.7)) for rate in rates])


def rounded_once(rate: float, decay: float) -> float:
    return float(1 - Fraction(rate) * Fraction(decay))


def test_a_schedule_sees_the_steps_done_before_this_one():
    weights, gradients = problem(size=8)
    seen = main_weight_adamw(lambda done: jnp.where(done == 2, 1e-2, 0.0))
    w = jnp.asarray(weights)
    state, step = seen.init(w), jax.jit(seen.apply)
    moved = []
    for gradient in gradients:
        before, (w, state) = w, step(jnp.asarray(gradient), state, w)
        moved.append(bool(np.any(np.asarray(before) != np.asarray(w))))
    assert moved == [False, False, True, False, False]


def test_a_schedule_works_in_scan_and_leaves_the_dtypes_alone():
    weights, gradients = problem(size=8)
    optimizer = main_weight_adamw(optax.cosine_decay_schedule(1e-2, 10))
    w, state = jnp.asarray(weights), optimizer.init(jnp.asarray(weights))
    step = jax.jit(optimizer.apply)

    def body(carry, gradient):
        held, state = carry
        return optimizer.apply(gradient, state, held), None

    (scanned, last), _ = jax.jit(lambda *a: jax.lax.scan(body, a[:2], a[2]))(w, state, jnp.stack(gradients))
    for gradient in gradients:
        w, state = step(jnp.asarray(gradient), state, w)
    np.testing.assert_array_equal(scanned, w)
    assert (scanned.dtype, last.mu.dtype, last.nu.dtype, last.count.dtype) == (*[jnp.float32] * 3, jnp.int32)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda done: jnp.zeros(3), r"schedule that returns a scalar, got ArrayImpl of shape \(3,\)"),
        (lambda done: np.zeros(3), r"schedule that returns a scalar, got ndarray of shape \(3,\)"),
        (lambda done: -1.0, "learning_rate >= 0, got -1"),
        (lambda done: done > 3, "schedule that returns a scalar"),
    ],
)
def test_a_schedule_that_gives_no_learning_rate_is_refused(schedule, message):
    optimizer = main_weight_adamw(schedule)
    with pytest.raises(ValueError, match=message):
        optimizer.apply(jnp.ones(3), optimizer.init(jnp.ones(3)), jnp.ones(3))


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


def test_frozen_parts_of_a_tree_stay_as_they_are():
    weights = {"a": jnp.ones(5), "b": None, "c": optax.MaskedNode(), "d": jnp.ones((2, 3))}
    gradients = {"a": jnp.ones(5), "b": None, "c": optax.MaskedNode(), "d": jnp.ones((2, 3), jnp.bfloat16)}
    optimizer = main_weight_adamw(1e-2)
    stepped, state = jax.jit(optimizer.apply)(gradients, optimizer.init(weights), weights)
    assert jax.tree.structure(stepped) == jax.tree.structure(weights) == jax.tree.structure(state.nu)
    assert jax.tree.map(lambda x: x.dtype.name, stepped)["d"] == "float32"
    nothing, _ = optimizer.apply({"b": None}, optimizer.init({"b": None}), {"b": None})
    assert nothing == {"b": None}


def test_masked_updates_only_what_the_mask_names():
    weights = {"a": jnp.ones(5), "b": jnp.ones(3)}
    slopes = jax.tree.map(lambda x: 0.5 * x, weights)
    masked = optax.masked(main_weight_adamw(1e-2), {"a": True, "b": False})
    updates, _ = jax.jit(masked.update)(slopes, masked.init(weights), weights)
    alone, _ = jax.jit(main_weight_adamw(1e-2).update)(
        slopes["a"], main_weight_adamw(1e-2).init(weights["a"]), weights["a"]
    )
    np.testing.assert_array_equal(updates["a"], alone)
    np.testing.assert_array_equal(updates["b"], slopes["b"])


ELEMENTWISE = {
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "nesterov": optax.sgd(optax.linear_schedule(1e-2, 1e-3, 5), momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, 10), weight_decay=0.1),
    "lion": optax.lion(1e-3),
    "rmsprop": optax.rmsprop(1e-3, centered=True),
    "adagrad": optax.adagrad(1e-2),
    "adabelief": optax.adabelief(1e-2),
    "clip": optax.chain(optax.clip(0.1), optax.add_decayed_weights(0.1), optax.sgd(1e-2)),
    "main_weight_adamw": main_weight_adamw(optax.cosine_decay_schedule(1e-2, 10)),
}


def trained(optimizer, weights, gradients, shardings):
    w = jax.tree.map(jax.device_put, weights, shardings)
    state = jax.jit(optimizer.init)(w)

    @jax.jit
    def step(gradient, state, w):
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state

    for gradient in gradients:
        w, state = step(jax.tree.map(jax.device_put, gradient, shardings), state, w)
    return w, state


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_do_the_same_to_shards(name):
    mesh = Mesh(np.array(jax.devices()), ("dp",))
    weights, gradients = problem(size=8 * 125)
    alone = trained(ELEMENTWISE[name], weights, gradients, jax.devices()[0])
    sharded = trained(ELEMENTWISE[name], weights, gradients, NamedSharding(mesh, PartitionSpec("dp")))
    assert sharded[0].sharding.spec == PartitionSpec("dp")
    for leaf, expected in zip(jax.tree.leaves(sharded), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(leaf, expected)


def test_clipping_by_the_global_norm_counts_every_element_once():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("outer", "inner"))
    names = {
        "both": PartitionSpec(("outer", "inner")),
        "inner": PartitionSpec("inner"),
        "outer": PartitionSpec("outer"),
        "none": PartitionSpec(),
    }
    parts = {name: problem(size=8 * (20 + i)) for i, name in enumerate(names)}
    weights = {name: part[0] for name, part in parts.items()}
    gradients = [{name: part[1][step] for name, part in parts.items()} for step in range(5)]
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    alone, _ = trained(optimizer, weights, gradients, dict.fromkeys(names, jax.devices()[0]))
    shardings = {name: NamedSharding(mesh, spec) for name, spec in names.items()}
    sharded, _ = trained(optimizer, weights, gradients, shardings)
    for name in names:
        np.testing.assert_allclose(sharded[name], alone[name], rtol=1e-6, atol=1e-7)
    norm = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in gradients[0].values()))
    assert norm > 0.1
    expected = {name: weights[name] - gradients[0][name] * (0.1 / norm) for name in names}
    once, _ = trained(optimizer, weights, gradients[:1], shardings)
    for name in names:
        np.testing.assert_allclose(once[name], expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate >= 0, got -1"),
        ({"learning_rate": 1e-3, "b1": 1.0}, "0 <= b1 < 1, got 1"),
        ({"learning_rate": 1e-3, "eps": float("nan")}, "eps >= 0, got nan"),
        ({"learning_rate": 1e-3, "weight_decay": float("inf")}, "weight_decay >= 0, got inf"),
        ({"learning_rate": 1e-3, "b2": 0.99999999}, "b2 whose powers vanish"),
        ({"learning_rate": 1e-3, "torch_vector_bytes": 8}, "torch_vector_bytes of 32, 64 or None, got 8"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        main_weight_adamw(**arguments)


def test_update_without_weights_is_refused():
    optimizer = main_weight_adamw(1e-3)
    with pytest.raises(ValueError, match="expected the weights as third argument"):
        optimizer.update(jnp.ones(3), optimizer.init(jnp.ones(3)))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int32])
def test_weights_in_another_dtype_are_refused(dtype):
    optimizer = main_weight_adamw(1e-3)
    with pytest.raises(
        ValueError,
        match=rf"expected weights of a floating dtype of 16 bits .*, got {dtype.__name__} at \['a'\]",
    ):
        optimizer.init({"a": jnp.ones(3, dtype)})


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (jnp.ones(1), r"gradient of shape \(3,\), got float32 of shape \(1,\) at \['a'\]"),
        (jnp.ones(3, jnp.int32), r"gradient of shape \(3,\), got int32"),
        (None, r"gradient of shape \(3,\), got NoneType"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(gradient, message):
    optimizer = main_weight_adamw(1e-3)
    weights = {"a": jnp.ones(3)}
    with pytest.raises(ValueError, match=message):
        optimizer.apply({"a": gradient}, optimizer.init(weights), weights)
