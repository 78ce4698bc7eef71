"""Which transfers may run beside which computation: read from traced programs, as on accelerators.

A chain of layers of one product each: forward k is product k, backward has two products a layer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_impl import (
    ShardingPolicy,
    UnitPolicy,
    data_parallel_mesh,
    fully_shard,
    make_gradients,
    plan_sharding,
    shard_batch,
    unshard,
)
from jax_impl.models import Decoder
from jax_impl.runtime.groups.sharding_plan import ShardingPlan
from tests.support.jax_impl.dependence import Step, steps
from tests.support.jax_impl.tiny import CONFIG, loss, named, tokens
from tests.support.jax_impl.zoo import Chain, Matrix

LAYERS = 5
WIDTH = 8


def chain() -> Chain:
    rngs = nnx.Rngs(0)
    return Chain([Matrix(WIDTH, rngs) for _ in range(LAYERS)], scale=WIDTH)


def program(monkeypatch: Any, prefetch: int, **options: Any) -> list[Step]:
    """Collectives and products of a step on what passes for an accelerator."""
    jaxpr = traced(monkeypatch, prefetch=prefetch, **options).jaxpr
    return steps(jaxpr, ("dot_general", "all_gather", "reduce_scatter"))


def traced(monkeypatch: Any, **options: Any) -> Any:
    function, weights, rows = gradients(monkeypatch, **options)
    return jax.make_jaxpr(function)(weights, rows)


def gradients(monkeypatch: Any, **options: Any) -> tuple[Any, Any, Any]:
    """The function of a step's gradients, and the shapes of its arguments."""
    monkeypatch.setattr(ShardingPlan, "chained", False)
    plan = plan_sharding(nnx.eval_shape(chain), data_parallel_mesh(4), **options)
    weights = {
        key: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=plan.sharding(key))
        for key, array in plan.arrays.items()
    }
    rows = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    return make_gradients(plan, lambda model, rows: jnp.mean(model(rows) ** 2)), weights, rows


def parts(program_steps: list[Step], recompute: bool = False) -> dict[str, list[Any]]:
    """Gathers and products forward; gathers, products (of each layer), reductions backward, in layer order."""
    program_steps = [step for step in program_steps if "layers/" in step.scope]
    gathers = [step for step in program_steps if step.primitive == "all_gather"]
    products = [step for step in program_steps if step.primitive == "dot_general"]
    reductions = [step for step in program_steps if step.primitive == "reduce_scatter"]
    each = 3 if recompute else 2
    backward = [products[i : i + each] for i in range(LAYERS, LAYERS * (1 + each), each)]
    assert len(gathers) == 2 * LAYERS
    assert len(products) == LAYERS * (1 + each)
    assert len(reductions) == LAYERS
    return {
        "gathers": gathers[:LAYERS],
        "products": products[:LAYERS],
        "again": gathers[LAYERS:][::-1],
        "backward": backward[::-1],
        "reductions": reductions[::-1],
    }


def waits(later: Step, earlier: Step) -> bool:
    return earlier.number in later.before


@pytest.mark.parametrize("recompute", [False, True])
def test_with_prefetch_a_gather_runs_beside_the_unit_before_and_no_earlier(monkeypatch, recompute):
    by_role = parts(program(monkeypatch, 1, recompute=recompute), recompute)
    gathers, products, again, backward = (
        by_role[name] for name in ("gathers", "products", "again", "backward")
    )
    for k in range(LAYERS):
        assert waits(products[k], gathers[k])
        assert not any(waits(gathers[k], products[j]) for j in range(max(0, k - 1), LAYERS)), k
        assert all(waits(gathers[k], products[j]) for j in range(k - 1)), k
        # Backward goes down from the last layer.
        own = range(k, min(k + 2, LAYERS))
        if k < LAYERS - 1:
            assert not any(waits(again[k], step) for j in own for step in backward[j]), k
        assert all(any(waits(again[k], step) for step in backward[j]) for j in range(k + 2, LAYERS)), k
        assert all(waits(again[k], product) for product in products) or k < LAYERS - 2
        assert any(waits(step, again[k]) for step in backward[k])


@pytest.mark.parametrize("recompute", [False, True])
def test_with_prefetch_a_reduction_is_waited_for_by_the_next_and_by_the_unit_after_the_next(
    monkeypatch, recompute
):
    by_role = parts(program(monkeypatch, 1, recompute=recompute), recompute)
    backward, reductions = by_role["backward"], by_role["reductions"]
    for k in range(LAYERS - 1):
        assert waits(reductions[k], reductions[k + 1])
        assert not any(waits(step, reductions[k + 1]) for step in backward[k]), k
        assert not waits(by_role["again"][k], reductions[k + 1]), k
    for k in range(LAYERS - 3):
        assert all(waits(step, reductions[k + 2]) for step in backward[k]), k


@pytest.mark.parametrize("recompute", [False, True])
def test_without_prefetch_nothing_runs_beside_a_transfer(monkeypatch, recompute):
    by_role = parts(program(monkeypatch, 0, recompute=recompute), recompute)
    for k in range(1, LAYERS):
        assert waits(by_role["gathers"][k], by_role["products"][k - 1])
        assert all(waits(by_role["again"][k - 1], step) for step in by_role["backward"][k])
        assert waits(by_role["again"][k - 1], by_role["reductions"][k])


@pytest.mark.parametrize(("gather_dtype", "whole"), [(None, "f32[8,8]"), ("mxfp8", "u8[8,8]")])
def test_the_choice_that_holds_a_gather_is_made_on_shards(monkeypatch, gather_dtype, whole):
    function, weights, rows = gradients(monkeypatch, engine="pjit", prefetch=1, gather_dtype=gather_dtype)
    text = jax.jit(function).lower(weights, rows).compile().as_text()
    held = [line for line in text.splitlines() if " select(" in line and "/gather/" in line]
    assert len(held) >= 2 * LAYERS
    # A choice between whole weights follows their gather: it holds nothing, and its result is a copy of them.
    assert [line for line in held if whole in line] == []


def test_other_values_of_prefetch_are_refused():
    model = nnx.eval_shape(chain)
    for value in (2, -1, True, "1"):
        with pytest.raises(ValueError, match=r"prefetch: expected 0, 1 or None"):
            plan_sharding(model, data_parallel_mesh(4), prefetch=value)
    assert plan_sharding(model, data_parallel_mesh(4)).prefetch == 0


def test_a_policys_prefetch_is_that_of_the_keyword_which_wins_beside_it(monkeypatch):
    units = (UnitPolicy("layers.*"), UnitPolicy(""))
    programs = {value: str(traced(monkeypatch, prefetch=value)) for value in (0, 1)}
    assert programs[0] != programs[1]
    for value in (0, 1):
        policy = ShardingPolicy(units, prefetch=value)
        assert str(traced(monkeypatch, policy=policy)) == programs[value]
        assert str(traced(monkeypatch, policy=policy, prefetch=None)) == programs[value]
        assert str(traced(monkeypatch, policy=policy, prefetch=1 - value)) == programs[1 - value]


@pytest.mark.fast_cases("False-True", "True-False")
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_with_prefetch_gradients_are_those_of_the_whole_model(monkeypatch, stacked, recompute):
    # The program of accelerators, on one device: on several simulated ones its collectives could meet and hang.
    monkeypatch.setattr(ShardingPlan, "chained", False)
    model = Decoder(CONFIG, rngs=nnx.Rngs(1), stacked=stacked)
    plan, weights = fully_shard(
        model, data_parallel_mesh(1), prefetch=1, recompute=recompute, stacked=["layers"] if stacked else []
    )
    rows = tokens(6)
    outputs = jax.jit(make_gradients(plan, loss, microbatches=2))(weights, shard_batch(plan, rows, 2))
    graphdef, state = nnx.split(model)
    value, expected = jax.value_and_grad(lambda s: loss(nnx.merge(graphdef, s), jnp.asarray(rows)))(state)
    np.testing.assert_allclose(outputs[0], value, rtol=1e-6)
    own = unshard(plan, outputs[1])
    for path, gradient in named(expected).items():
        scale = float(jnp.abs(gradient).max())
        np.testing.assert_allclose(own[path], gradient, rtol=0, atol=1e-5 * scale, err_msg=path)
