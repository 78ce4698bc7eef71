"""Unit paths in the names of compiled operations, as profiles show them."""

import re
from collections import Counter

import jax
import pytest

from jax_impl import data_parallel_mesh, fully_shard, make_gradients, shard_batch
from tests.support.jax_impl import diagnosed

pytestmark = pytest.mark.optimized

OPERATION = re.compile(r' (all-gather|reduce-scatter|tanh|multiply)(?:-start)?\(.*op_name="([^"]*)"')


def operations(engine, strategy, stacked, recompute, microbatches=2, prefetch=0):
    """``(operation, unit, phase)`` of each compiled one: the innermost unit in its name, and what comes after it."""
    plan, weights = fully_shard(
        diagnosed.parameters(stacked),
        data_parallel_mesh(diagnosed.WIDTH),  # so that the pjit engine cuts weights, too
        engine=engine,
        strategy=strategy,
        units=["layers/*", "layers/*/mlp"],
        stacked=["layers"] if stacked else [],
        recompute=recompute,
        prefetch=prefetch,
    )
    batch = shard_batch(plan, diagnosed.rows(diagnosed.WIDTH * microbatches), microbatches)
    function = jax.jit(make_gradients(plan, diagnosed.loss, microbatches))
    text = function.lower(weights, batch).compile().as_text()
    units = sorted((name or "(root)" for name in plan.units), key=len, reverse=True)
    counts = Counter()
    for operation, name in OPERATION.findall(text):
        # A merged operation has the names of all its parts.
        at, unit = max((name.rfind(unit), unit) for unit in units)
        phase = re.search(r"(gather|reduce|recompute)/", name[at:]) if at >= 0 else None
        backward = "backward " if "transpose(" in name else ""
        counts[operation, unit if at >= 0 else "", backward + (phase[1] if phase else "")] += 1
    return counts, list(plan.units)


@pytest.mark.parametrize(
    ("strategy", "stacked", "recompute"),
    [
        ("optim_grads_params", False, True),
        pytest.param("optim_grads_params", True, False, marks=pytest.mark.slow),
        pytest.param("optim_grads", True, True, marks=pytest.mark.slow),
        pytest.param("optim", False, False, marks=pytest.mark.slow),
    ],
)
def test_operations_of_the_shard_map_engine_name_their_unit(strategy, stacked, recompute):
    counts, units = operations("shard_map", strategy, stacked, recompute)
    for name in units:
        unit = name or "(root)"
        gathers = {key[2] for key in counts if key[:2] == ("all-gather", unit)}
        reductions = {key[2] for key in counts if key[:2] == ("reduce-scatter", unit)}
        if strategy == "optim_grads_params":
            # No gradient needs the root's one matrix.
            assert gathers == ({"gather", "backward gather"} if name else {"gather"})
            assert reductions == {"backward reduce"}
        elif strategy == "optim_grads":
            assert (gathers, reductions) == ({"gather"}, {"backward reduce"})
        else:
            assert (gathers, reductions) == ({"gather"}, {"reduce"})
        assert (counts["tanh", unit, "backward recompute"] > 0) == (recompute and unit.endswith("mlp"))
    check_computations(counts, units)


def check_computations(counts, units):
    for unit in units:
        if unit.endswith("mlp"):
            assert counts["tanh", unit, ""]
            assert counts["multiply", unit, "backward "]


@pytest.mark.fast_cases("False-0")
@pytest.mark.filterwarnings("ignore:pjit engine")
@pytest.mark.parametrize(
    ("stacked", "prefetch"),
    [(False, 0), (False, 1), pytest.param(True, 0, marks=pytest.mark.slow)],
)
def test_operations_of_the_pjit_engine_name_their_unit(stacked, prefetch):
    counts, units = operations("pjit", "optim_grads_params", stacked, False, prefetch=prefetch)
    check_computations(counts, units)
    gathers = {key for key in counts if key[0] == "all-gather"}
    assert {phase for *_, phase in gathers} == {"gather", "backward gather"}
    for name in units:
        assert not name.endswith("mlp") or counts["all-gather", name, "gather"]
