"""Scanned layers with ``prefetch=1``: gradients are those of the whole model, and transfers are one pass apart.

The program of accelerators runs with different rows on each of two devices, which are mapped axes of one. That of
simulated devices, where reductions stay where they are, runs on those.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jax_impl import (
    call_unit,
    data_parallel_mesh,
    fully_shard,
    make_eval_step,
    make_gradients,
    plan_sharding,
    shard_batch,
    unshard,
    variable_leaves,
)
from jax_impl.runtime.groups.sharding_plan import ShardingPlan
from tests.support.jax_impl.dependence import loops, runs, steps_and_outputs
from tests.support.jax_impl.mapped_devices import as_accelerators
from tests.support.jax_impl.scanned_models import CASES, WIDTH, Case, Stack, apply, in_turn, rows
from tests.support.jax_impl.tiny import named

pytestmark = pytest.mark.filterwarnings("ignore:pjit engine")
PRIMITIVES = ("dot_general", "all_gather", "reduce_scatter")
FAST = {"two", "recompute", "unroll", "optim_grads", "frozen", "two stacks", "inside", "inputs and outputs"}
FAST |= {"linen", "nothing carried", "looped", "nnx.scan", "lists"}
FAST_SIMULATED = {"two stacks", "inside", "carried number"}


def some(fast: set[str]) -> list[Any]:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def mesh_of(case: Case) -> Any:
    two = str(case.options.get("strategy", "")).startswith("h")
    return data_parallel_mesh({"dp_outer": 2, "dp": 2} if two else 2)


def assert_right(case: Case, *, engine: str = "shard_map") -> None:
    model, whole = case.parameters, rows()
    options = {"units": ["layers/*"], "stacked": ["layers"], **case.options}
    plan, weights = fully_shard(model, mesh_of(case), engine=engine, prefetch=1, **options)
    function = jax.jit(make_gradients(plan, case.loss, case.microbatches))
    batch = shard_batch(plan, whole, case.microbatches)
    value, gradients, _ = function(weights, batch, variable_leaves(model))
    unsharded = unshard(plan, gradients)
    if isinstance(model, nnx.Module):
        graphdef, state, rest = nnx.split(model, nnx.Param, ...)
        loss = jax.value_and_grad(lambda s, x: case.loss(nnx.merge(graphdef, s, rest), x))
        expected, alone = loss(state, whole)
        flat = named(alone)
    else:
        expected, alone = jax.value_and_grad(case.loss)(model, whole)
        flat = {
            jax.tree_util.keystr(path, simple=True, separator="/"): gradient
            for path, gradient in jax.tree.leaves_with_path(alone)
        }
    rough = "param_dtype" in case.options
    np.testing.assert_allclose(value, expected, rtol=2e-2 if rough else 1e-5)
    assert unsharded.keys() == flat.keys() - set(case.options.get("frozen", ()))
    for path, gradient in unsharded.items():
        scale = float(jnp.abs(flat[path]).max())
        np.testing.assert_allclose(
            gradient, flat[path], rtol=0, atol=(5e-2 if rough else 1e-4) * scale, err_msg=path
        )


@pytest.mark.fast_cases("two", "lists", "inside", "two stacks", "unroll", "frozen", "nothing carried")
@pytest.mark.parametrize("name", some(FAST))
def test_gradients_are_those_of_the_whole_model(monkeypatch, name):
    as_accelerators(monkeypatch)
    assert_right(CASES[name])


@pytest.mark.fast_cases("inside", "carried number")
@pytest.mark.parametrize("name", some(FAST_SIMULATED))
def test_gradients_on_simulated_devices_are_those_of_the_whole_model(name):
    assert_right(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("name", ["three", "recompute", "optim_grads", "two stacks", "inside"])
def test_gradients_of_the_pjit_engine_are_those_of_the_whole_model(monkeypatch, name, chained):
    # One device, where no collectives meet.
    monkeypatch.setattr(ShardingPlan, "chained", chained)
    assert_right(CASES[name], engine="pjit")


def traced(monkeypatch: Any, name: str, engine: str = "shard_map", **options: Any) -> Any:
    """The program of accelerators, of two devices."""
    monkeypatch.setattr(ShardingPlan, "chained", False)
    case = CASES[name]
    options = {"units": ["layers/*"], "stacked": ["layers"], "prefetch": 1, **case.options, **options}
    plan = plan_sharding(case.parameters, mesh_of(case), engine=engine, **options)
    weights = {key: jax.ShapeDtypeStruct(array.shape, array.dtype) for key, array in plan.arrays.items()}
    return jax.make_jaxpr(make_gradients(plan, case.loss))(weights, rows()).jaxpr


@pytest.mark.parametrize("recompute", [False, True])
def test_in_a_pass_transfers_run_beside_a_layer_that_is_not_theirs(monkeypatch, recompute):
    program = traced(monkeypatch, "unroll", recompute=recompute)
    whole = (20,)
    with_gathers = [
        (loop, passes)
        for loop, passes in loops(program)
        if list(runs(loop.params["jaxpr"].jaxpr, PRIMITIVES[1]))
    ]
    (forward, times), (backward, times_back) = with_gathers
    # A pass of each stands apart: the last one of forward, and the first and the last of backward.
    assert (times, times_back) == (4, 3)
    for loop in (forward, backward):
        body = loop.params["jaxpr"].jaxpr
        body_steps, outputs = steps_and_outputs(body, PRIMITIVES)
        primitives = Counter(step.primitive for step in body_steps)
        assert primitives["all_gather"] == 1
        assert primitives["reduce_scatter"] == int(loop is backward)
        products = {step.number for step in body_steps if step.primitive == "dot_general"}
        transfers = {step.number for step in body_steps} - products
        rows_in = {i for i, v in enumerate(body.invars) if v.aval.shape == (4, WIDTH)}
        for step in body_steps:
            if step.primitive == "dot_general":
                assert step.before.isdisjoint(transfers)
            else:
                assert step.before.isdisjoint(products)
            if step.primitive == "all_gather":
                assert not rows_in.isdisjoint(step.inputs)
        carries = loop.params["num_carry"] if "num_carry" in loop.params else len(body.outvars)
        # What the next pass begins with is there when all of this one is done; its weights are the only whole ones.
        begun = [i for i, v in enumerate(body.outvars[:carries]) if v.aval.shape in ((4, WIDTH), whole)]
        assert all(outputs[i] >= products | transfers for i in begun if outputs[i])
        assert sum(v.aval.shape == whole for v in body.outvars[:carries]) == 1
        assert any(outputs[i] for i in begun)


@pytest.mark.parametrize("name", ["two", "unroll", "two stacks", "inside"])
def test_each_layer_is_gathered_twice_and_reduced_once(monkeypatch, name):
    counted = []
    for prefetch in (0, 1):
        program = traced(monkeypatch, name, prefetch=prefetch)
        counts: Counter[Any] = Counter()
        for primitive, phase in (("all_gather", "gather"), ("reduce_scatter", "reduce")):
            for equation, scope, times in runs(program, primitive):
                unit = scope.partition(f"/{phase}")
                assert unit[1], scope
                counts[
                    primitive, equation.outvars[0].aval.shape, "layers" in unit[0] or "more" in unit[0]
                ] += times
        counted.append(counts)
    assert counted[0] == counted[1]


def test_what_is_refused_is_named_with_its_line():
    model = CASES["three"].parameters
    plan, weights = fully_shard(
        model, data_parallel_mesh(2), units=["layers/*"], stacked=["layers"], prefetch=1
    )

    def outside(model: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, jax.Array]:
            penalty = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(nnx.state(layer)))
            return call_unit(apply, layer, x), penalty

        x, penalties = lax.scan(body, x, model["layers"])
        return jnp.mean(x) + jnp.sum(penalties)

    def uneven(model: Any, x: jax.Array) -> jax.Array:
        counted = x[:, 0] > 0
        return jnp.sum(in_turn(x, model["layers"]).sum(-1) * counted) / jnp.sum(counted)

    batch = shard_batch(plan, rows())
    with pytest.raises(
        ValueError,
        match=r"expected parameters of a unit only inside .*, got another use at .*test_pipeline\.py:\d+ ",
    ):
        jax.make_jaxpr(make_gradients(plan, outside))(weights, batch)
    with pytest.raises(ValueError, match="quotient by a sum over the batch"):
        jax.make_jaxpr(make_gradients(plan, uneven))(weights, batch)


@pytest.mark.slow
def test_random_streams_statistics_and_callbacks_are_those_of_loops_as_they_are(monkeypatch):
    as_accelerators(monkeypatch)
    model = Stack(lifted=False, varying=True)
    by_prefetch, seen = [], []

    def loss(model: Any, x: jax.Array) -> jax.Array:
        x = model(x)
        return jnp.mean((x - 0.3) ** 2)

    for prefetch in (0, 1):
        plan, weights = fully_shard(
            model, data_parallel_mesh(2), units=["layers/*"], stacked=["layers"], prefetch=prefetch
        )
        results = jax.jit(make_gradients(plan, loss))(
            weights, shard_batch(plan, rows()), variable_leaves(model)
        )
        leaves = [
            jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for x in jax.tree.leaves(results)
        ]
        by_prefetch.append(leaves)
    for leaf, other in zip(*by_prefetch, strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-6)

    model = CASES["three"].parameters

    def noted(block: Any, x: jax.Array, number: jax.Array) -> jax.Array:
        jax.debug.callback(lambda number: seen.append(int(number)), number, ordered=True)
        return apply(block, x)

    def printing(model: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return call_unit(noted, layer[0], x, layer[1]), None

        return jnp.mean(lax.scan(body, x, (model["layers"], jnp.arange(3)))[0])

    monkeypatch.undo()
    monkeypatch.setattr(ShardingPlan, "chained", False)
    plan, weights = fully_shard(
        model, data_parallel_mesh(1), units=["layers/*"], stacked=["layers"], prefetch=1
    )
    jax.block_until_ready(jax.jit(make_gradients(plan, printing))(weights, shard_batch(plan, rows())))
    jax.effects_barrier()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("chained", [False, True])
def test_evaluation_is_that_of_the_whole_model(monkeypatch, chained):
    monkeypatch.setattr(ShardingPlan, "chained", chained)
    model = CASES["three"].parameters
    plan, weights = fully_shard(
        model, data_parallel_mesh(2 if chained else 1), units=["layers/*"], stacked=["layers"], prefetch=1
    )

    def repeated(model: Any, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 2, lambda _, x: in_turn(x, model["layers"]), x * model["scale"])

    expected = repeated(model, rows())
    np.testing.assert_allclose(
        make_eval_step(plan, repeated)(weights, rows()), expected, rtol=1e-5, atol=1e-6
    )
