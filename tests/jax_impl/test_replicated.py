"""Parameters that every device has whole, whatever the strategy of their unit, and what a program may do with them."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

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
    layout_report,
    load_checkpoint,
    make_gradients,
    make_train_step,
    memory_report,
    plan_sharding,
    save_checkpoint,
    shard_batch,
    unshard,
)
from tests.support.jax_impl.zoo import by_path, loss_of_layers, pairs

WIDTH = 8


def model() -> dict[str, Any]:
    """Layers of a matrix and a gate; the gates are left alone."""
    rng = np.random.default_rng(0)

    def layer() -> dict[str, jax.Array]:
        return {
            "w": jnp.asarray(rng.standard_normal((WIDTH, WIDTH)) / 3, jnp.float32),
            "gate": jnp.asarray(rng.standard_normal(WIDTH), jnp.float32),
        }

    return {"layers": [layer(), layer()], "head": jnp.asarray(rng.standard_normal((WIDTH, 3)), jnp.float32)}


def apply(unit: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ unit["w"]) * unit["gate"]


loss = loss_of_layers(apply)


def batch(seed: int) -> Any:
    return pairs(1, 16, WIDTH, 3, seed=seed)[0]


def labels(tree: Any) -> Any:
    return jax.tree.map_with_path(
        lambda keys, _: "own" if "gate" in jax.tree_util.keystr(keys) else "rest", tree
    )


# The gates by an optimizer of their own.
OPTIMIZER = optax.multi_transform({"own": optax.sgd(0.5), "rest": optax.adam(0.02)}, labels)


def plainly_trained(steps: int) -> dict[str, jax.Array]:
    tree, state = model(), OPTIMIZER.init(model())
    for number in range(steps):
        updates, state = OPTIMIZER.update(jax.grad(loss)(tree, batch(number)), state, tree)
        tree = optax.apply_updates(tree, updates)
    return by_path(tree)


def sharded(engine: str = "shard_map", devices: Any = 4, **options: Any) -> Any:
    options = {"units": ["layers/*"], "replicated": ["*/gate"], **options}
    return fully_shard(model(), data_parallel_mesh(devices), engine=engine, **options)


def keys_of(plan: Any) -> list[str]:
    return [info.key for path, info in plan.parameters.items() if path.endswith("gate")]


@pytest.mark.fast_cases("shard_map-devices1-options1", "pjit-2-options2")
@pytest.mark.parametrize(
    ("engine", "devices", "options"),
    [
        ("shard_map", 4, {}),
        ("shard_map", {"dp_outer": 2, "dp": 2}, {"strategy": "hfsdp", "prefetch": 1}),
        ("pjit", 2, {"strategy": "optim_grads"}),
        pytest.param("pjit", {"dp_outer": 2, "dp": 2}, {"strategy": "hsdp"}, marks=pytest.mark.slow),
        pytest.param("shard_map", 8, {"strategy": "optim", "prefetch": 1}, marks=pytest.mark.slow),
    ],
)
def test_they_are_trained_by_an_optimizer_of_their_own_as_on_one_device(
    engine: str, devices: Any, options: Any
) -> None:
    plan, weights = sharded(engine, devices, **options)
    state, step = init_state(plan, weights, OPTIMIZER), make_train_step(plan, loss, OPTIMIZER, microbatches=2)
    for number in range(3):
        state, _ = step(state, batch(number))
    for key, array in state.weights.items():
        assert array.sharding.is_fully_replicated == (key in keys_of(plan)), key
    for path, value in plainly_trained(3).items():
        np.testing.assert_allclose(
            unshard(plan, state.weights)[path], value, rtol=1e-5, atol=1e-6, err_msg=path
        )


def test_they_are_gathered_never_and_reduced_once_a_step() -> None:
    def counts(**options: Any) -> Any:
        plan, weights = sharded(align=1, **options)
        return count_collectives(make_gradients(plan, loss, 2), weights, shard_batch(plan, batch(0), 2))

    with_gates, without = counts(), counts(replicated=[])
    for operation in ("all_gather", "reduce_scatter"):
        sizes = [
            sum(call.size * times for call, times in counted.items() if call.kind == operation)
            for counted in (with_gates, without)
        ]
        # Two units and two microbatches; gathers are in forward and in backward.
        passes = 2 * 2 * (2 if operation == "all_gather" else 1)
        assert sizes[1] - sizes[0] == passes * WIDTH, operation
    reduced = [call.size for call in with_gates.elements() if call.kind == "psum" and call.size > 1]
    assert reduced == [WIDTH, WIDTH]


def test_they_are_whole_on_purpose() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="pjit engine")
        plan, weights = sharded("pjit", 4, replicated=["*/gate", "layers/1/w"])
    assert plan.whole_parameters == ()
    report = memory_report(plan, init_state(plan, weights, optax.adam(0.1)))
    whole, cut = 2 * WIDTH + WIDTH**2, WIDTH**2 + 3 * WIDTH
    for device in report.devices:
        assert device.main_weights == 4 * (whole + cut // 4)
        assert device.moments == 2 * device.main_weights


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.filterwarnings("ignore:pjit engine")
def test_the_report_has_their_own_strategy_on_their_rows(engine: str) -> None:
    plan, _ = sharded(engine, strategy="optim")
    by_unit = {unit.name: unit for unit in layout_report(plan).units}
    for name in ("layers/0", "layers/1"):
        assert by_unit[name].strategy == "optim"
        groups = {group.parameters: (group.strategy, group.num_shards) for group in by_unit[name].groups}
        assert groups == {(f"{name}/w",): ("optim", 4), (f"{name}/gate",): ("no_shard", 1)}
    assert [line.count("no_shard") for line in str(plan).splitlines()[2:]] == [0, 1, 0, 0]


def test_a_checkpoint_moves_between_plans_with_and_without_them(tmp_path: Path) -> None:
    plan, weights = sharded()
    state, step = init_state(plan, weights, OPTIMIZER), make_train_step(plan, loss, OPTIMIZER)
    state, _ = step(state, batch(0))
    save_checkpoint(tmp_path / "a", plan, state)
    other, _ = sharded("shard_map", 2, replicated=["head"])
    moved = load_checkpoint(tmp_path / "a", other, OPTIMIZER).state
    for path, value in unshard(plan, state.weights).items():
        np.testing.assert_array_equal(unshard(other, moved.weights)[path], value)
    moved, _ = make_train_step(other, loss, OPTIMIZER)(moved, batch(1))
    state, _ = step(state, batch(1))
    for path, value in unshard(plan, state.weights).items():
        np.testing.assert_allclose(unshard(other, moved.weights)[path], value, rtol=1e-5, atol=1e-6)


@pytest.mark.fast_cases("shard_map")
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_frozen_ones_are_the_programs_own(engine: str) -> None:
    plan, weights = sharded(engine, frozen=["*/gate"])
    optimizer = optax.adam(0.02)
    state, step = init_state(plan, weights, optimizer), make_train_step(plan, loss, optimizer)
    if engine == "shard_map":
        calls = count_collectives(make_gradients(plan, loss), weights, shard_batch(plan, batch(0)))
        assert not any(call.kind == "psum" and call.size > 1 for call in calls)
    state, _ = step(state, batch(0))
    # A program of its own changes them, from what every device has whole.
    changed = {key: jax.jit(lambda x: 0.5 * x)(state.weights[key]) for key in keys_of(plan)}
    state = dataclasses.replace(state, weights={**state.weights, **changed})
    tree = jax.tree.unflatten(jax.tree.structure(model()), list(unshard(plan, state.weights).values()))
    state, metrics = step(state, batch(1))
    np.testing.assert_allclose(metrics["loss"], loss(tree, batch(1)), rtol=1e-6)
    for path, value in unshard(plan, state.weights).items():
        if path.endswith("gate"):
            layer = model()["layers"][int(path.split("/")[1])]
            np.testing.assert_array_equal(value, 0.5 * layer["gate"])


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(
        ValueError, match="replicated: expected patterns of parameter paths, but 'gates' matches"
    ):
        plan_sharding(model(), data_parallel_mesh(2), units=[], replicated=["gates"])


@pytest.mark.parametrize("option", ["replicated", "frozen"])
def test_one_string_in_place_of_patterns_is_refused(option: str) -> None:
    # Its characters would be patterns, of which "*" is that of all parameters.
    with pytest.raises(TypeError, match=rf"{option}: expected a list of patterns.*use \['\*'\]"):
        plan_sharding(model(), data_parallel_mesh(2), units=[], **{option: "*"})


@pytest.mark.parametrize("option", ["replicated", "frozen"])
@pytest.mark.parametrize("given", [None, 5, [5], True])
def test_what_is_neither_patterns_nor_a_filter_is_refused(option: str, given: Any) -> None:
    with pytest.raises(TypeError, match=rf"{option}: expected a list of patterns, or an nnx filter, got"):
        plan_sharding(model(), data_parallel_mesh(2), units=[], **{option: given})
