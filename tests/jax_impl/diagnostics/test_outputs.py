"""The unit, layer and device where a value stops being finite, told by compiled steps."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import (
    data_parallel_mesh,
    fully_shard,
    init_state,
    main_weight_adamw,
    make_gradients,
    make_train_step,
    shard_batch,
    watch_nonfinite_outputs,
)
from tests.support.jax_impl import diagnosed

pytestmark = pytest.mark.optimized

OPTIMIZER = main_weight_adamw(1e-3)


def sharded(engine="shard_map", stacked=False, bad=None, **options):
    """With infinite weights at ``bad``: ("embed",) or (layer, name in it)."""
    params = diagnosed.parameters(stacked)
    if bad == ("embed",):
        params["embed"] = params["embed"].at[0, 0].set(jnp.inf)
    elif bad:
        number, name = bad
        layer = params["layers"] if stacked else params["layers"][number]
        at = (number, ...) if stacked else ...
        where = layer if name == "scale" else layer["mlp"]
        where[name] = where[name].at[at].set(jnp.nan)
    return fully_shard(
        params,
        data_parallel_mesh(4),
        engine=engine,
        units=["layers/*", "layers/*/mlp"],
        stacked=["layers"] if stacked else [],
        **options,
    )


def gradients(plan, weights, microbatches=1, rows=None):
    batch = shard_batch(plan, diagnosed.rows(4 * microbatches) if rows is None else rows, microbatches)
    return jax.jit(make_gradients(plan, diagnosed.loss, microbatches))(weights, batch)


def unit_and_layer(engine_stack, number, name=""):
    unit = "layers" if engine_stack else f"layers/{number}"
    return (f"{unit}/{name}" if name else unit, number if engine_stack else None)


@pytest.mark.fast_cases("pjit-True-True-2", "shard_map-False-False-1")
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.filterwarnings("ignore:pjit engine")
def test_it_begins_in_the_unit_whose_weights_are_bad(engine, stacked, recompute, microbatches):
    # Of layer 1 the outer unit alone: its inner one is fine, and that of layer 2 is not, but only by its inputs.
    plan, weights = sharded(engine, stacked, (1, "scale"), recompute=recompute)
    with watch_nonfinite_outputs(plan) as reports:
        gradients(plan, weights, microbatches)
    seen = [(report.unit, report.layer, report.begins) for report in reports]
    assert seen == [
        (*unit_and_layer(stacked, 1), True),
        ("", None, True),
        (*unit_and_layer(stacked, 2, "mlp"), False),
        (*unit_and_layer(stacked, 2), False),
    ]
    assert reports[0].devices == tuple(str(device) for device in plan.mesh.devices)
    assert (reports[0].nan, reports[0].inf) == (diagnosed.WIDTH, 0)
    assert reports[0].unit in str(reports[0])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.filterwarnings("ignore:pjit engine")
def test_the_device_whose_rows_are_bad(engine):
    plan, weights = sharded(engine, True)
    rows = diagnosed.rows(8)
    rows[5, 2] = np.nan  # the second microbatch of device 2
    with watch_nonfinite_outputs(plan) as reports:
        gradients(plan, weights, 2, rows)
    inside = [report for report in reports if report.unit]
    assert len(inside) == 2 * diagnosed.LAYERS
    assert not any(report.begins for report in reports)
    assert {report.devices for report in inside} == {(str(plan.mesh.devices[2]),)}


@pytest.mark.slow
def test_a_bad_weight_of_the_root_is_not_laid_on_the_first_unit():
    plan, weights = sharded(bad=("embed",))
    with watch_nonfinite_outputs(plan) as reports:
        gradients(plan, weights)
    assert (reports[0].unit, reports[0].begins) == ("", True)
    assert not any(report.begins for report in reports[1:])


@pytest.mark.slow
def test_a_step_compiled_before_is_watched_and_unwatched_after():
    plan, weights = sharded()
    other, fine = sharded()
    step = make_train_step(plan, diagnosed.loss, OPTIMIZER, donate=False)
    state = init_state(plan, weights, OPTIMIZER)
    batch = diagnosed.rows(4)
    batch[2, 3] = np.inf
    plain = step.lower(state, batch).as_text()
    step(state, batch)
    with watch_nonfinite_outputs(plan) as reports, watch_nonfinite_outputs(other) as none:
        step(state, batch)
        jax.effects_barrier()
        assert (reports[0].unit, reports[0].begins) == ("layers/0/mlp", False)
        assert reports[0].devices == (str(plan.mesh.devices[2]),)
        gradients(other, fine)
        before = list(reports)
        assert "callback" in step.lower(state, batch).as_text()
    assert reports == before
    assert none == []
    assert step.lower(state, batch).as_text() == plain
    assert "callback" not in plain
    reports.clear()
    step(state, batch)
    jax.effects_barrier()
    assert reports == []
    # The watched program is still there, and tells whichever watch is open.
    with watch_nonfinite_outputs(plan) as again:
        step(state, batch)
    assert again == before


@pytest.mark.slow
def test_bits_of_a_watched_step_are_those_of_an_unwatched_one():
    plan, weights = sharded(stacked=True)
    loss, plain, _ = gradients(plan, weights)
    with watch_nonfinite_outputs(plan) as reports:
        watched_loss, watched, _ = gradients(plan, weights)
    assert reports == []
    assert loss == watched_loss
    for key, array in plain.items():
        np.testing.assert_array_equal(array, watched[key])


def test_a_program_compiled_ahead_is_said_to_be_unwatched():
    plan, weights = sharded()
    batch = shard_batch(plan, diagnosed.rows(4))
    compiled = jax.jit(make_gradients(plan, diagnosed.loss)).lower(weights, batch).compile()
    unwatched = pytest.warns(RuntimeWarning, match="expected a step of the plan to run, saw none")
    with unwatched, watch_nonfinite_outputs(plan):
        compiled(weights, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError), watch_nonfinite_outputs(plan):
            raise KeyError
