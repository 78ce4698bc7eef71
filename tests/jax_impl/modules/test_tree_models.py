"""Plain functions over pytrees, and linen modules, against plain JAX on the whole batch; every row is different."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jax_impl import (
    apply_linen,
    call_unit,
    count_collectives,
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    main_weight_adamw,
    make_gradients,
    make_train_step,
    save_checkpoint,
    shard_batch,
    unshard,
    variable_leaves,
)

ENGINES = ["shard_map", "pjit"]
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
RUNS = [
    ("optim_grads_params", True, "shard_map"),
    ("optim", False, "shard_map"),
    ("optim_grads_params", False, "pjit"),
]
VOCABULARY, DIM = 11, 5
pytestmark = pytest.mark.filterwarnings("ignore:pjit engine")


class Down(NamedTuple):
    weight: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    up: Any
    down: Down


def random(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(0.5 * np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def layer(seed: int) -> Layer:
    return Layer(random(DIM, 7, seed=seed), Down(random(7, DIM, seed=seed + 50), random(DIM, seed=seed + 99)))


def parameters(layers: int = 4) -> dict[str, Any]:
    return {
        "embed": random(VOCABULARY, DIM, seed=0),
        "layers": [layer(seed) for seed in range(1, layers + 1)],
        "nothing": None,
        "out": (random(DIM, 3, seed=100), random(3, seed=101)),
    }


def rows(count: int = 12) -> np.ndarray:
    return np.random.default_rng(7).integers(0, VOCABULARY, (count, 6)).astype(np.int32)


def apply_layer(layer: Layer, x: jax.Array, scale: jax.Array, *, residual: bool) -> jax.Array:
    y = jnp.tanh(x @ layer.up) @ layer.down.weight * scale + layer.down.bias
    return x + y if residual else y


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens]
    weight, bias = params["out"]
    for layer in params["layers"]:
        x = call_unit(apply_layer, layer, x, jnp.tanh(bias[0]), residual=True)
    return jnp.mean((x @ weight + bias - 0.3) ** 2)


def assert_trees_close(tree: Any, expected: Any, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for (path, value), other in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(tree), strict=True):
        scale = float(jnp.abs(value).max())
        floor = 1e-7 if value.dtype == np.float32 else 1e-15
        np.testing.assert_allclose(
            other, value, rtol=0, atol=tolerance * scale + floor, err_msg=jax.tree_util.keystr(path)
        )


def assert_trains_as_alone(
    params: Any,
    loss_fn: Any,
    batch: Any,
    *,
    microbatches: int = 1,
    reference: Any = None,
    tolerance: float = 2e-5,
    **options: Any,
) -> Any:
    """Loss, gradients and a step; gives the plan."""
    reference = reference or loss_fn
    optimizer = optax.sgd(0.1)
    plan, weights = fully_shard(params, data_parallel_mesh(4), **options)
    step = make_train_step(plan, loss_fn, optimizer, microbatches=microbatches)
    value, gradients = step.gradients(weights, batch)
    expected, whole = jax.value_and_grad(reference)(params, batch)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_trees_close(plan.merge(unshard(plan, gradients)), whole, tolerance)
    state, _ = step(init_state(plan, weights, optimizer, variable_leaves(params)), batch)
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, whole)
    assert_trees_close(plan.merge(unshard(plan, state.weights)), moved, tolerance)
    return plan


@pytest.mark.fast_cases("optim_grads_params-shard_map")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_functions_over_a_pytree_train(strategy, engine):
    # More than ten layers, since "10" sorts before "2"; once is enough.
    layers = 12 if strategy == "optim_grads" else 4
    plan = assert_trains_as_alone(
        parameters(layers), loss, rows(), microbatches=3, strategy=strategy, engine=engine
    )
    assert list(plan.units) == [*(f"layers/{n}" for n in range(layers)), ""]
    assert plan.parameters.keys() >= {f"layers/{layers - 1}/down/bias", "out/1"}


def test_units_of_a_pytree_are_gathered_and_reduced_like_others():
    plan, weights = fully_shard(parameters(), data_parallel_mesh(4), recompute=True)
    counts = count_collectives(make_gradients(plan, loss), weights, shard_batch(plan, rows()))
    totals = {
        operation: sum(n for each, n in counts.items() if each.kind == operation)
        for operation in ("all_gather", "psum")
    }
    assert totals == {"all_gather": 2 * 5, "psum": 1}
    assert sum(n for each, n in counts.items() if each.kind == "reduce_scatter") == 5


@pytest.mark.fast_cases("optim_grads_params-True-shard_map")
@pytest.mark.parametrize(("strategy", "recompute", "engine"), RUNS)
def test_a_stack_is_scanned_by_lax_scan(strategy, recompute, engine):
    params = parameters()
    params["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])

    def scanned(params: Any, tokens: jax.Array) -> jax.Array:
        scale = jnp.tanh(params["out"][1][0])

        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return call_unit(apply_layer, layer, x, scale, residual=True), None

        x, _ = jax.lax.scan(body, params["embed"][tokens], params["layers"])
        return jnp.mean((x @ params["out"][0] + params["out"][1] - 0.3) ** 2)

    plan = assert_trains_as_alone(
        params,
        scanned,
        rows(),
        microbatches=3,
        strategy=strategy,
        recompute=recompute,
        engine=engine,
        stacked=["layers"],
    )
    assert plan.units["layers"].module.layers == 4


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("recompute", [False, True])
def test_units_inside_units_frozen_parameters_and_policies(recompute, engine):
    def nested(params: Any, tokens: jax.Array) -> jax.Array:
        def whole(layer: Any, x: jax.Array) -> jax.Array:
            y = jnp.tanh(x @ layer.up)
            return x + call_unit(lambda down, y: y @ down.weight + down.bias, layer.down, y)

        x = params["embed"][tokens]
        for layer in params["layers"]:
            x = call_unit(whole, layer, x)
        return jnp.mean((x @ params["out"][0]) ** 2)

    assert_trains_as_alone(
        parameters(), nested, rows(), units=["layers/*", "layers/1*/down"], recompute=recompute, engine=engine
    )
    assert_trains_as_alone(parameters(), nested, rows(), policy="zero2", engine=engine)
    plan, weights = fully_shard(parameters(), data_parallel_mesh(4), frozen=["layers/*/up"], engine=engine)
    _, gradients = make_train_step(plan, nested, optax.sgd(0.1)).gradients(weights, rows())
    unsharded = unshard(plan, gradients)
    whole = jax.grad(nested)(parameters(), rows())
    assert "layers/3/up" not in unsharded
    np.testing.assert_allclose(
        unsharded["layers/3/down/bias"], whole["layers"][3].down.bias, rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_of_a_pytree_loads_on_fewer_devices_and_trains_on(tmp_path, engine):
    optimizer = main_weight_adamw(1e-2)
    plan, weights = fully_shard(parameters(), data_parallel_mesh(4), engine=engine)
    step = make_train_step(plan, loss, optimizer)
    state, _ = step(init_state(plan, weights, optimizer), rows())
    save_checkpoint(tmp_path / "checkpoint", plan, state)
    fewer, _ = fully_shard(jax.tree.map(jnp.zeros_like, parameters()), data_parallel_mesh(3), engine=engine)
    loaded = load_checkpoint(tmp_path / "checkpoint", fewer, optimizer)
    after, metrics = step(state, rows())
    other, others = make_train_step(fewer, loss, optimizer)(loaded.state, rows())
    np.testing.assert_allclose(metrics["loss"], others["loss"], rtol=1e-6)
    assert_trees_close(
        fewer.merge(unshard(fewer, other.weights)), plan.merge(unshard(plan, after.weights)), 1e-3
    )


def test_what_does_not_depend_on_weights_may_come_by_closure_and_the_rest_is_refused():
    def closing(params: Any, tokens: jax.Array, what: str) -> jax.Array:
        mask = (tokens > 3)[..., None] * jnp.arange(DIM)
        of_weights = params["out"][1].sum()
        around = mask if what == "batch" else of_weights
        x = params["embed"][tokens]
        for layer in params["layers"]:
            x = call_unit(
                lambda layer, x: apply_layer(layer, x, jnp.float32(1), residual=True) + around, layer, x
            )
        return jnp.mean(x**2)

    assert_trains_as_alone(parameters(), lambda p, t: closing(p, t, "batch"), rows())
    for recompute in (False, True):
        for microbatches in (1, 3):
            plan, weights = fully_shard(parameters(), data_parallel_mesh(4), recompute=recompute)
            step = make_train_step(
                plan, lambda p, t: closing(p, t, "weights"), optax.sgd(0.1), microbatches=microbatches
            )
            with pytest.raises(ValueError, match=r"closure.*pass the array to call_unit as an argument"):
                step.gradients(weights, rows())


def refused(loss_fn: Any, match: str, error: type[Exception] = ValueError, **options: Any) -> None:
    plan, weights = fully_shard(parameters(), data_parallel_mesh(4), **options)
    with pytest.raises(error, match=match):
        make_train_step(plan, loss_fn, optax.sgd(0.1)).gradients(weights, rows())


def test_lists_and_tuples_of_arrays_may_be_units():
    params = [
        (random(DIM, DIM, seed=1), random(DIM, seed=2)),
        (random(DIM, DIM, seed=3), random(DIM, seed=4)),
    ]

    def dense(pair: Any, x: jax.Array) -> jax.Array:
        weight, bias = pair
        return jnp.tanh(x @ weight + bias)

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        for pair in params:
            x = call_unit(dense, pair, x)
        return jnp.mean(x**2)

    x = np.random.default_rng(0).normal(size=(8, DIM)).astype(np.float32)
    assert list(assert_trains_as_alone(params, loss_fn, x, units=["*"]).units) == ["0", "1", ""]


def test_a_tuple_of_stacked_arrays_is_a_stack():
    params = {"layers": (random(3, DIM, DIM, seed=1), random(3, DIM, seed=2))}

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, pair: Any) -> tuple[jax.Array, None]:
            return call_unit(lambda pair, x: jnp.tanh(x @ pair[0] + pair[1]), pair, x), None

        return jnp.mean(jax.lax.scan(body, x, params["layers"])[0] ** 2)

    x = np.random.default_rng(0).normal(size=(8, DIM)).astype(np.float32)
    assert assert_trains_as_alone(params, loss_fn, x, stacked=["layers"]).units["layers"].module.layers == 3


def test_arrays_of_a_loops_passes_must_be_arguments():
    def looped(params: Any, tokens: jax.Array) -> jax.Array:
        def body(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            return call_unit(
                lambda layer, x: jnp.tanh(x @ layer.up).sum() * number + x, params["layers"][0], x
            ), None

        return jax.lax.scan(body, params["embed"][tokens], jnp.arange(3.0))[0].mean()

    refused(looped, "or on the iteration of a loop, as arguments")


def test_weights_of_a_unit_outside_of_call_unit():
    refused(lambda p, _: p["layers"][0].up.sum(), r"'sum' of parameter 'up' of unit 'layers/0': .*call_unit")
    refused(
        lambda p, _: list(p["layers"][0].up), r"__iter__ of parameter 'up' of unit 'layers/0': .*call_unit"
    )
    refused(
        lambda p, _: jax.lax.neg(p["layers"][0].up), r"expected parameters of a unit only inside the unit"
    )
    refused(
        lambda p, _: sum(jnp.sum(x**2) for x in jax.tree.leaves(p)),
        r"unit 'layers/0': .* got integer_pow at .*py:\d+",
    )
    refused(
        lambda p, _: call_unit(lambda a, b: a.up.sum(), p["layers"][0], p["layers"][1]),
        "unit 'layers/0': expected arrays .*, got unit 'layers/1'",
    )


@dataclass(frozen=True, order=True)
class Same:
    number: int

    def __str__(self) -> str:
        return "same"


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"a": {"b//c": jnp.ones(2)}}, "node 'a': expected keys .*got 'b//c'"),
        ({"a.b": jnp.ones(2)}, "node '': expected keys .*got 'a.b'"),
        (
            {"a": {Same(1): jnp.ones(2), Same(2): jnp.ones(2)}},
            "node 'a': expected keys with unique names",
        ),
        ({"a": {"b": 2.0}}, "parameter 'a/b': expected an array, got float"),
        ({"a": [nnx.Linear(2, 2, rngs=nnx.Rngs(0))]}, "parameter 'a/0': .* got an nnx module, Linear"),
        (
            {"a": jax.ShapeDtypeStruct((2,), "float32")},
            "parameter 'a': expected values, got a shape: plan_sharding",
        ),
        ({"a": {"b": jnp.ones(2, int)}}, "parameter 'a/b': expected a floating dtype"),
        (jnp.ones(2), "expected an nnx module or a pytree"),
        (None, "expected an nnx module or a pytree"),
    ],
)
def test_pytrees_that_cannot_be_models(params, match):
    with pytest.raises((ValueError, TypeError), match=match):
        fully_shard(params, data_parallel_mesh(2), units=[])


class Block(linen.Module):
    rate: float = 0.0

    @linen.compact
    def __call__(self, x: jax.Array, scaled: bool = False) -> jax.Array:
        y = linen.Dense(2 * DIM)(linen.LayerNorm()(x))
        y = linen.Dense(DIM)(linen.Dropout(self.rate, deterministic=self.rate == 0)(linen.gelu(y)))
        return x + (2 * y if scaled else y)


class Set(linen.Module):
    """Looks at its parameters in ``setup``, and has a second method."""

    def setup(self) -> None:
        self.weight = self.param("weight", linen.initializers.normal(0.5), (DIM, DIM))
        self.inner = Block()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x @ self.weight)

    def back(self, x: jax.Array) -> jax.Array:
        return x @ self.weight.T


class Net(linen.Module):
    rate: float = 0.0

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = linen.Embed(VOCABULARY, DIM, name="embed")(tokens)
        shared = Block(self.rate)
        x = Block(self.rate)(shared(shared(x), scaled=True))
        x = linen.remat(Block)(name="again")(x)
        both = Set(name="both")
        return linen.Dense(3)(both.back(both(x)))


def linen_loss(net: linen.Module, apply: Any) -> Any:
    return lambda params, tokens: jnp.mean((apply(net, {"params": params}, tokens) - 0.3) ** 2)


@pytest.mark.fast_cases("units2-optim_grads_params-False-pjit")
@pytest.mark.parametrize(("strategy", "recompute", "engine"), RUNS)
@pytest.mark.parametrize(
    "units",
    [["Block_*", "again", "both"], ["Block_*", "both", "both/inner"], ["both/inner/Dense_*", "embed"]],
)
def test_a_linen_module_trains_with_submodules_as_units(units, strategy, recompute, engine):
    net = Net()
    params = net.init(jax.random.key(0), rows())["params"]
    plan = assert_trains_as_alone(
        params,
        linen_loss(net, apply_linen),
        rows(),
        reference=linen_loss(net, linen.Module.apply),
        microbatches=3,
        units=units,
        strategy=strategy,
        recompute=recompute,
        engine=engine,
    )
    assert len(plan.units) > 3


class Pair(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Block(name="Block_1")(Block(name="Block_0")(x))


class Nested(linen.Module):
    """Inside the unit ``Block_0`` are submodules that have the names of units outside."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Block(name="Block_1")(Pair(name="Block_0")(x))


@pytest.mark.slow
@pytest.mark.parametrize("units", [["Block_*"], ["Block_*", "Block_0/Block_1"]])
@pytest.mark.parametrize("recompute", [False, True])
def test_submodules_of_a_linen_unit_may_have_the_names_of_units_outside(units, recompute):
    net, x = Nested(), np.random.default_rng(0).normal(size=(8, DIM)).astype(np.float32)
    params = net.init(jax.random.key(0), x)["params"]
    reference = linen_loss(net, linen.Module.apply)
    assert_trains_as_alone(
        params, linen_loss(net, apply_linen), x, reference=reference, units=units, recompute=recompute
    )


def test_apply_linen_is_apply_without_sharding():
    net = Net()
    variables = net.init(jax.random.key(0), rows())
    np.testing.assert_array_equal(apply_linen(net, variables, rows()), net.apply(variables, rows()))


@pytest.mark.slow
def test_units_of_a_linen_module_draw_their_own_random_numbers():
    net = Net(rate=0.5)
    params = Net().init(jax.random.key(0), rows())["params"]

    def dropped(params: Any, batch: Any) -> jax.Array:
        tokens, seed = batch
        rngs = {"dropout": jax.random.key(seed[0])}
        return jnp.mean(apply_linen(net, {"params": params}, tokens, rngs=rngs) ** 2)

    plan, weights = fully_shard(params, data_parallel_mesh(1), units=["Block_*"], recompute=True)
    step = make_train_step(plan, dropped, optax.sgd(0.1))
    values = [step.gradients(weights, (rows(), np.full(12, seed)))[0] for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]
    # Forward and recomputed forward draw the same: the gradient is that of the loss.
    _, gradients = step.gradients(weights, (rows(), np.zeros(12, int)))
    direction = unshard(plan, gradients)["Block_0/Dense_0/bias"]
    losses = []
    for sign in (1, -1):
        moved = jax.tree.map(lambda x: x, params)
        moved["Block_0"]["Dense_0"]["bias"] = params["Block_0"]["Dense_0"]["bias"] + sign * 1e-3 * direction
        _, weights = fully_shard(moved, data_parallel_mesh(1), units=["Block_*"], recompute=True)
        losses.append(step.gradients(weights, (rows(), np.zeros(12, int)))[0])
    np.testing.assert_allclose((losses[0] - losses[1]) / 2e-3, jnp.sum(direction**2), rtol=2e-2)


class Masked(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = linen.Dropout(0.5, deterministic=False)(jnp.ones_like(x))
        return mask * self.param("scale", linen.initializers.ones, ())


class Twice(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        first, second = Masked(name="first"), Masked(name="second")
        return jnp.mean((first(x) - second(x)) ** 2) * jnp.mean((first(x) - first(x)) ** 2)


@pytest.mark.slow
def test_equal_units_and_calls_of_one_draw_different_numbers():
    net, x = Twice(), np.ones((8, 64), np.float32)
    params = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)["params"]

    def product(params: Any, x: jax.Array) -> jax.Array:
        return apply_linen(net, {"params": params}, x, rngs={"dropout": jax.random.key(2)})

    plan, weights = fully_shard(params, data_parallel_mesh(2), units=["first", "second"])
    assert make_train_step(plan, product, optax.sgd(0.1)).gradients(weights, x)[0] > 0.5


class Counting(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.BatchNorm(use_running_average=True)(linen.Dense(DIM)(x))


def test_collections_other_than_parameters_are_read():
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return Counting(name="unit")(x)

    net, x = Model(), np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    variables = net.init(jax.random.key(0), x)
    statistics = jax.tree.map(lambda s: s + 0.7, variables["batch_stats"])

    def of(apply: Any, **more: Any) -> Any:
        def loss_fn(params: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(apply(net, {"params": params, "batch_stats": statistics}, x, **more) ** 2)

        return loss_fn

    assert_trains_as_alone(
        variables["params"], of(apply_linen), x, reference=of(linen.Module.apply), units=["unit"]
    )
