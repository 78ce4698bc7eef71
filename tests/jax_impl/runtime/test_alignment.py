"""Units with shards of whole tiles train, save and load like any other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import (
    PolicyError,
    ShardingPolicy,
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    make_train_step,
    plan_sharding,
    save_checkpoint,
    unshard,
)
from tests.jax_impl.runtime.test_several_buffers import (
    OPTIMIZER,
    assert_close,
    loss,
    model,
    plain_run,
    rows,
)
from tests.support.jax_impl.checkpoint_runs import assert_same_bits, logical


def sharded(align, devices, strategy="optim_grads_params"):
    plan, weights = fully_shard(
        model(), data_parallel_mesh(devices), strategy=strategy, units=["first", "second"], align=align
    )
    for unit in plan.units.values():
        assert unit.layout.align == align or align == "auto"
        assert not any(size % unit.layout.align for size in unit.layout.shard_sizes)
    return plan, weights, make_train_step(plan, loss, OPTIMIZER, microbatches=2)


@pytest.mark.fast_cases("24-4-optim_grads", "128-3-optim", "auto-3-optim_grads_params")
@pytest.mark.parametrize(
    ("align", "devices", "strategy"),
    [
        (128, 2, "optim_grads_params"),
        (128, 3, "optim"),
        (24, 4, "optim_grads"),
        ("auto", 3, "optim_grads_params"),
    ],
)
def test_gradients_and_steps_equal_those_of_the_plain_model(align, devices, strategy):
    start, first_loss, first_gradients, end = plain_run()
    plan, weights, step = sharded(align, devices, strategy)
    assert_same_bits(unshard(plan, weights), start)
    value, gradients = step.gradients(weights, rows(24))
    np.testing.assert_allclose(value, first_loss, rtol=1e-5)
    assert_close(unshard(plan, gradients), first_gradients)
    state = init_state(plan, jax.tree.map(jnp.copy, weights), OPTIMIZER)
    for seed in range(3):
        state, _ = step(state, rows(24, seed))
    assert_close(unshard(plan, state.weights), end)


@pytest.mark.fast_cases("saved1-loaded1")
@pytest.mark.parametrize(("saved", "loaded"), [((1, 3), (128, 2)), ((128, 2), (1, 4))])
def test_a_checkpoint_moves_between_alignments(saved, loaded, tmp_path):
    source, weights, step = sharded(*saved)
    state, _ = step(init_state(source, weights, OPTIMIZER), rows(24))
    save_checkpoint(tmp_path / "c", source, state, {"step": 1})
    target, _, step_there = sharded(*loaded)
    there = load_checkpoint(tmp_path / "c", target, OPTIMIZER).state
    assert_same_bits(logical(target, there), logical(source, state))
    for seed in (1, 2):
        there, _ = step_there(there, rows(24, seed))
    assert_close(unshard(target, there.weights), plain_run()[3])


def test_a_policy_aligns_all_units_or_one():
    units = '[[unit]]\nmatch = "first"\nalign = 128\n[[unit]]\nmatch = "second"\n[[unit]]\nmatch = ""\n'
    text = "[mesh]\nalign = 16\n" + units
    plan = plan_sharding(model(), data_parallel_mesh(3), ShardingPolicy.parse(text))
    assert {path: unit.layout.align for path, unit in plan.units.items()} == {
        "first": 128,
        "second": 16,
        "": 16,
    }


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_an_alignment_that_is_none_is_refused(engine):
    for wrong in (0, "most", True, 2.0):
        with pytest.raises(ValueError, match='align: expected an int >= 1 or "auto", got'):
            plan_sharding(model(), data_parallel_mesh(2), units=["first"], align=wrong, engine=engine)
    with pytest.raises(
        PolicyError, match=r'\[mesh\] align: expected a number of elements >= 1, or "auto", got 0'
    ):
        ShardingPolicy.parse('[mesh]\nalign = 0\n[[unit]]\nmatch = ""\n')
