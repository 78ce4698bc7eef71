"""flax nnx models as users write them: library layers, batch statistics, dropout, LoRA, scanned and shared modules.

Each is compared with the plain model on the whole batch, under both engines; every row is different.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jax_impl import (
    data_parallel_mesh,
    fully_shard,
    init_state,
    main_weight_adamw,
    make_train_step,
    unshard,
    variable_leaves,
)
from tests.support.jax_impl.tiny import named
from tests.support.jax_impl.zoo import Chain

ENGINES = ["shard_map", "pjit"]
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
DIM = 8


def rows(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, *shape)).astype(np.float32)


def mean_square(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 0.3) ** 2)


def assert_close(arrays: dict[str, Any], expected: dict[str, Any], tolerance: float = 2e-5) -> None:
    assert sorted(arrays) == sorted(expected)
    for path, value in expected.items():
        scale = float(np.abs(value).max(initial=0))
        np.testing.assert_allclose(arrays[path], value, rtol=0, atol=tolerance * scale + 1e-7, err_msg=path)


def plain(
    model: nnx.Module, loss_fn: Any, batch: Any, of: Any = nnx.Param
) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Loss and gradients of the model on the whole batch, and its other variables after the call."""
    graphdef, parameters, others = nnx.split(model, of, ...)
    rest = nnx.as_pure(others)

    @jax.jit
    @jax.value_and_grad
    def run(parameters: Any) -> jax.Array:
        return loss_fn(nnx.merge(graphdef, parameters, rest), batch)

    @jax.jit
    def after(parameters: Any) -> Any:
        merged = nnx.merge(graphdef, parameters, rest)
        loss_fn(merged, batch)
        return nnx.state(merged, nnx.Not(nnx.Param))

    value, gradients = run(parameters)
    return float(value), named(gradients), named(after(parameters))


def sharded(
    model: nnx.Module, loss_fn: Any, batch: Any, *, devices: Any = 4, microbatches: int = 1, **options: Any
) -> Any:
    plan, weights = fully_shard(model, data_parallel_mesh(devices), **options)
    step = make_train_step(plan, loss_fn, optax.sgd(0.1), microbatches=microbatches)
    variables = {path: jax.device_put(x, plan.replicated) for path, x in variable_leaves(model).items()}
    value, gradients = step.gradients(weights, batch, variables)
    state, _ = step(init_state(plan, weights, optax.sgd(0.1), variable_leaves(model)), batch)
    return float(value), unshard(plan, gradients), state


class Attention(nnx.Module):
    """Library attention, norms, embedding and convolution, in lists and dictionaries."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(3, DIM, kernel_size=(3,), rngs=rngs)
        self.blocks = nnx.List(
            [
                nnx.Dict(
                    norm=nnx.LayerNorm(DIM, rngs=rngs),
                    attend=nnx.MultiHeadAttention(2, DIM, decode=False, rngs=rngs),
                    mlp=nnx.Sequential(
                        nnx.Linear(DIM, 2 * DIM, rngs=rngs), nnx.gelu, nnx.Linear(2 * DIM, DIM, rngs=rngs)
                    ),
                )
                for _ in range(2)
            ]
        )
        self.cells = nnx.RNN(nnx.GRUCell(DIM, DIM, rngs=rngs))
        self.head = nnx.LinearGeneral(DIM, (2, 3), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv(x)
        for block in self.blocks:
            x = x + block["attend"](block["norm"](x), mask=nnx.make_causal_mask(x[..., 0]))
            x = x + block["mlp"](x)
        return self.head(self.cells(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "engine"),
    [
        pytest.param(
            *case,
            marks=() if case == ("optim_grads_params", "shard_map") else pytest.mark.slow,
        )
        for case in itertools.product(STRATEGIES, ENGINES)
    ],
)
def test_a_model_of_library_layers_trains(engine, strategy):
    model, batch = Attention(nnx.Rngs(0)), rows(8, 5, 3)
    units = ["conv", "blocks/*/attend", "blocks/*/mlp", "cells", "head"]
    value, expected, _ = plain(model, mean_square, batch)
    sharded_loss, gradients, _ = sharded(
        model, mean_square, batch, microbatches=2, engine=engine, strategy=strategy, units=units
    )
    np.testing.assert_allclose(sharded_loss, value, rtol=1e-5)
    assert_close(gradients, expected)


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = Layer(rngs)
        self.second = Layer(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.first(x))


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)
        self.norm = nnx.BatchNorm(DIM, rngs=rngs, momentum=0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.norm(self.linear(x)))


@pytest.mark.slow
@pytest.mark.parametrize("units", [[], ["*"], ["*", "*/norm"]])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_batch_statistics_are_means_over_devices_and_pass_through_microbatches(strategy, units):
    model, batch = Normed(nnx.Rngs(0)), rows(12, DIM)
    _, gradients, state = sharded(
        model, mean_square, batch, devices=2, microbatches=3, strategy=strategy, units=units
    )
    # Each device normalises its own microbatch of two rows, one after another; statistics are averaged at the end.
    expected: list[dict[str, Any]] = []
    sums: dict[str, Any] = {}
    for device in range(2):
        current = nnx.clone(model)
        for part in range(3):
            mine = batch[6 * device + 2 * part : 6 * device + 2 * part + 2]
            _, grads, after = plain(current, mean_square, mine)
            for path, value in grads.items():
                sums[path] = sums.get(path, 0) + np.asarray(value) / 6
            nnx.update(current, nnx.from_flat_state([(tuple(p.split("/")), v) for p, v in after.items()]))
        expected.append(after)
    assert_close(gradients, sums)
    means = {path: (expected[0][path] + expected[1][path]) / 2 for path in expected[0]}
    assert_close(state.variables, means)
    assert not np.allclose(expected[0]["first/norm/mean"], expected[1]["first/norm/mean"])


@pytest.mark.fast_cases("units1")
@pytest.mark.parametrize("units", [[], ["*"]])
def test_pjit_normalises_the_whole_microbatch(units):
    model, batch = Normed(nnx.Rngs(0)), rows(12, DIM)
    value, expected, after = plain(model, mean_square, batch)
    sharded_loss, gradients, state = sharded(model, mean_square, batch, engine="pjit", units=units)
    np.testing.assert_allclose(sharded_loss, value, rtol=1e-5)
    assert_close(gradients, expected)
    assert_close(state.variables, after)


class Dropped(nnx.Module):
    """The mean of what is left of ones: the loss tells how many were dropped, its gradient which."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jnp.ones(64))
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(x * self.weight[...])


@pytest.mark.fast_cases("shard_map-units1")
@pytest.mark.parametrize("units", [[], ["drop"]])
@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_differs_between_devices_microbatches_and_steps(engine, units):
    def each_row(model: Any, x: jax.Array) -> jax.Array:
        # Row i is a power of four, so the gradient of a weight has a digit for each row that kept it.
        return jnp.mean(model(x))

    model = Dropped(nnx.Rngs(0, dropout=1))
    batch = np.repeat(np.float32([[1], [4], [16], [64]]), 64, axis=1)
    plan, weights = fully_shard(model, data_parallel_mesh(2), engine=engine, units=units)
    step = make_train_step(plan, each_row, optax.sgd(0.0), microbatches=2)
    state = init_state(plan, weights, optax.sgd(0.0), variable_leaves(model))
    masks = []
    for _ in range(2):
        _, gradients = step.gradients(state.weights, batch, state.variables)
        digits = np.round(np.asarray(unshard(plan, gradients)["weight"]) * 64 * 4 / 2).astype(int)
        masks += [tuple(digits // 4**row % 4) for row in range(4)]
        state, _ = step(state, batch)
    assert len(set(masks)) == 8, "two rows were dropped by the same mask"
    assert all(set(mask) == {0, 1} and 16 < sum(mask) < 48 for mask in masks)


def test_a_model_set_to_eval_inside_the_loss_is_so_in_its_units():
    model, batch = Normed(nnx.Rngs(0)), rows(8, DIM)

    def evaluated(model: Any, x: jax.Array) -> jax.Array:
        model.eval()
        return mean_square(model, x)

    value, expected, after = plain(model, evaluated, batch)
    sharded_loss, gradients, state = sharded(
        model, evaluated, batch, units=["first", "second", "second/norm"]
    )
    np.testing.assert_allclose(sharded_loss, value, rtol=1e-5)
    assert_close(gradients, expected)
    assert_close(state.variables, {path: np.asarray(x) for path, x in variable_leaves(model).items()})
    assert_close(after, {path: np.asarray(x) for path, x in variable_leaves(model).items()})


class Scanned(nnx.Module):
    """Layers made by ``nnx.vmap`` and run by ``nnx.scan``, with dropout and batch statistics of their own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> Layer:
            return Layer(rngs)

        self.layers = make(rngs)
        self.head = nnx.Linear(DIM, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: Layer) -> jax.Array:
            return layer(x)

        return self.head(run(x, self.layers))


@pytest.mark.fast_cases("units2-False-shard_map")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "units", [["layers/*"], ["layers/*/linear"], ["layers/*", "layers/*/linear", "head"]]
)
def test_layers_under_nnx_scan_are_units_layer_by_layer(engine, recompute, units):
    model, batch = Scanned(nnx.Rngs(0)), rows(8, DIM)
    value, expected, after = plain(model, mean_square, batch)
    devices = 4 if engine == "pjit" else 1  # batch norm: on one device both engines see the whole batch
    sharded_loss, gradients, state = sharded(
        model,
        mean_square,
        batch,
        devices=devices,
        engine=engine,
        units=units,
        stacked=["layers"],
        recompute=recompute,
    )
    np.testing.assert_allclose(sharded_loss, value, rtol=1e-5)
    assert_close(gradients, expected)
    assert_close(state.variables, after)


@pytest.mark.fast_cases("frozen0-no_shard-shard_map", "<lambda>-optim-pjit")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("frozen", [("*/kernel", "first/norm/scale"), lambda path, value: "linear" in path])
def test_frozen_parameters_have_no_gradient_no_moments_and_stay(engine, strategy, frozen):
    model, batch = Normed(nnx.Rngs(0)), rows(8, DIM)
    model.eval()
    optimizer = main_weight_adamw(0.1, weight_decay=0.5)
    plan, weights = fully_shard(
        model, data_parallel_mesh(4), engine=engine, strategy=strategy, units=["first"], frozen=frozen
    )
    still = {path for path, info in plan.parameters.items() if not info.trainable}
    assert {"first/linear/kernel", "second/linear/kernel"} <= still
    assert still < set(plan.parameters)
    before = {path: np.asarray(value) for path, value in unshard(plan, weights).items()}
    state = init_state(plan, weights, optimizer, variable_leaves(model))
    step = make_train_step(plan, mean_square, optimizer)
    _, gradients = step.gradients(weights, batch, state.variables)
    _, expected, _ = plain(model, mean_square, batch)
    assert_close(unshard(plan, gradients), {path: x for path, x in expected.items() if path not in still})
    assert set(state.opt_state.mu) == set(plan.trainable)
    state, _ = step(state, batch)
    for path, value in unshard(plan, state.weights).items():
        assert np.array_equal(value, before[path]) == (path in still), path


@pytest.mark.fast_cases("shard_map")
@pytest.mark.parametrize("engine", ENGINES)
def test_lora_trains_the_adapters_alone(engine):
    rngs = nnx.Rngs(0)
    adapted = [nnx.LoRALinear(DIM, DIM, lora_rank=2, rngs=rngs) for _ in range(2)]
    model, batch = Chain(adapted, between=jnp.tanh), rows(8, DIM)
    for layer in model.layers:
        layer.lora.lora_b[...] = jnp.ones_like(layer.lora.lora_b[...]) * 0.1
    _, expected, _ = plain(model, mean_square, batch, nnx.LoRAParam)
    _, gradients, _ = sharded(model, mean_square, batch, engine=engine, frozen=nnx.Not(nnx.LoRAParam))
    assert_close(gradients, expected)
    assert all("lora" in path for path in gradients)


class Methods(nnx.Module):
    """A tied embedding that is a unit, used by its methods."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, DIM, rngs=rngs)
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed.attend(jnp.tanh(self.linear(self.embed(tokens))))


@pytest.mark.fast_cases("optim_grads_params-pjit")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_methods_of_units_can_be_called(engine, strategy):
    model = Methods(nnx.Rngs(0))
    batch = np.random.default_rng(0).integers(0, 16, (8, 3)).astype(np.int32)
    value, expected, _ = plain(model, mean_square, batch)
    sharded_loss, gradients, _ = sharded(
        model, mean_square, batch, engine=engine, strategy=strategy, units=["embed", "linear"]
    )
    np.testing.assert_allclose(sharded_loss, value, rtol=1e-5)
    assert_close(gradients, expected)


def test_weights_of_a_unit_cannot_be_reached_from_outside():
    class Reaching(Methods):
        def __call__(self, tokens: jax.Array) -> jax.Array:
            return self.embed.embedding[...][tokens]

    with pytest.raises(
        ValueError, match="parameter 'embedding' of unit 'embed': expected a use only inside the unit"
    ):
        sharded(Reaching(nnx.Rngs(0)), mean_square, np.zeros((4, 2), np.int32), units=["embed"])


def test_nnx_objects_as_arguments_of_units_are_refused_since_their_changes_would_be_lost():
    class Dropping(nnx.Linear):
        def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
            return nnx.Dropout(0.5)(super().__call__(x), rngs=rngs)

    class Passing(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = Dropping(DIM, DIM, rngs=rngs)
            self.drop = nnx.Dropout(0.5)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.linear(self.drop(x, rngs=nnx.Rngs(1)), nnx.Rngs(0))

    with pytest.raises(
        ValueError, match="unit 'linear': expected arrays and plain values as arguments, got Rngs"
    ):
        sharded(Passing(nnx.Rngs(0)), mean_square, rows(4, DIM), units=["linear", "drop"])
    # A unit without parameters is called as any module.
    sharded(Passing(nnx.Rngs(0)), mean_square, rows(4, DIM), units=["drop"])


class Sowing(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow(nnx.Intermediate, "seen", self.linear(x))
        return self.seen[0]


def test_variables_that_appear_in_a_unit_are_refused_and_at_the_root_a_loss_may_read_them():
    class Holding(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.inner = Sowing(rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.inner(x)

    def loss(model: Any, x: jax.Array) -> jax.Array:
        model(x)
        return jnp.mean(nnx.pop(model, nnx.Intermediate)["seen"][0] ** 2)

    batch = rows(4, DIM)
    value, expected, _ = plain(Sowing(nnx.Rngs(0)), loss, batch)
    sharded_loss, gradients, _ = sharded(Sowing(nnx.Rngs(0)), loss, batch, units=["linear"])
    np.testing.assert_allclose(sharded_loss, value, rtol=1e-5)
    assert_close(gradients, expected)
    sharded(Sowing(nnx.Rngs(0)), mean_square, batch, units=["linear"])
    with pytest.raises(ValueError, match=r"unit 'inner': expected the same variables .*new ones \['seen'\]"):
        sharded(Holding(nnx.Rngs(0)), mean_square, batch, units=["inner"])


def test_a_linen_module_works_through_flaxs_own_bridge():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.Dense(DIM)(jnp.tanh(linen.Dense(2 * DIM)(x)))

    class Wrapped(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.net = nnx.bridge.ToNNX(Net(), rngs=rngs).lazy_init(jnp.zeros((1, DIM)))
            self.out = nnx.Linear(DIM, 2, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(self.net(x))

    model, batch = Wrapped(nnx.Rngs(0)), rows(8, DIM)
    value, expected, _ = plain(model, mean_square, batch)
    for engine in ENGINES:
        sharded_loss, gradients, _ = sharded(model, mean_square, batch, engine=engine, units=["net", "out"])
        np.testing.assert_allclose(sharded_loss, value, rtol=1e-5)
        assert_close(gradients, expected)
