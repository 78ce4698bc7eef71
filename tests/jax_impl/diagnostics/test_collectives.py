from collections import Counter
from functools import partial

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import count_collectives, data_parallel_mesh, fully_shard, make_gradients, shard_batch
from jax_impl.diagnostics.collectives import Collective
from tests.support.jax_impl.tiny import decoder, loss, tokens

# Gathers and reductions of each unit in one step of K microbatches.
EXPECTED = {
    "no_shard": lambda k: {"psum": 1},
    "optim": lambda k: {"all_gather": 1, "reduce_scatter": 1},
    "optim_grads": lambda k: {"all_gather": 1, "reduce_scatter": k},
    "optim_grads_params": lambda k: {"all_gather": 2 * k, "reduce_scatter": k},
}


def counted(strategy, microbatches, **keywords):
    plan, weights = fully_shard(decoder(), data_parallel_mesh(4), strategy=strategy, **keywords)
    batch = shard_batch(plan, tokens(4 * microbatches), microbatches)
    return plan, count_collectives(make_gradients(plan, loss, microbatches), weights, batch)


@pytest.mark.each_value
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("strategy", EXPECTED)
def test_each_unit_is_gathered_and_reduced_as_often_as_the_strategy_says(strategy, microbatches):
    plan, counts = counted(strategy, microbatches)
    expected = Counter({Collective("psum", "float32", 1): 1})  # the loss
    for unit in plan.units.values():
        for operation, times in EXPECTED[strategy](microbatches).items():
            expected[Collective(operation, "float32", unit.layout.padded_size)] += times
    assert counts == expected
    sizes = {unit.layout.padded_size for unit in plan.units.values()}
    assert len(sizes) == 2, "the root must be told apart from the layers by its size"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "gathered", "reduced"),
    [
        ({}, "float32", "float32"),
        ({"param_dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"param_dtype": "bfloat16", "reduce_dtype": "float32"}, "bfloat16", "float32"),
        ({"reduce_dtype": "bfloat16"}, "float32", "bfloat16"),
    ],
)
def test_what_travels_has_the_dtype_asked_for(precision, gathered, reduced):
    for strategy in ("optim", "optim_grads", "optim_grads_params"):
        _, counts = counted(strategy, 2, **precision)
        dtypes = {(c.kind, c.dtype) for c in counts if c.size > 1}
        assert dtypes == {("all_gather", gathered), ("reduce_scatter", reduced)}
    _, counts = counted("no_shard", 2, **precision)
    assert {c.dtype for c in counts if c.size > 1} == {reduced}


@pytest.mark.optimized
def test_the_compiled_step_gathers_no_less_than_the_traced_one():
    # XLA may drop the gathers of weights that a backward does not read, but not merge forward with backward.
    plan, weights = fully_shard(decoder(), data_parallel_mesh(4))
    batch = shard_batch(plan, tokens(4))
    compiled = jax.jit(make_gradients(plan, loss)).lower(weights, batch).compile().as_text()
    gathers = compiled.count(" all-gather(") + compiled.count(" all-gather-start(")
    scatters = compiled.count(" reduce-scatter(") + compiled.count(" reduce-scatter-start(")
    assert gathers == 2 * len(plan.units)
    assert scatters == len(plan.units)


def unordered_collectives(jaxpr):
    """Collectives of a straight-line jaxpr that do not depend on the one before them."""
    behind, unordered, last = {}, [], 0
    for equation in jaxpr.eqns:
        operands = [v for v in equation.invars if not isinstance(v, jax.extend.core.Literal)]
        newest = max((behind.get(v, 0) for v in operands), default=0)
        if equation.primitive.name in ("all_gather", "reduce_scatter", "psum"):
            if newest != last:
                unordered.append(equation)
            newest = last = last + 1
        behind.update(dict.fromkeys(equation.outvars, newest))
    assert last > 3
    return unordered


@pytest.mark.fast_cases("optim_grads_params-units1", "optim_grads-units0", "optim-units1", "no_shard-units0")
@pytest.mark.parametrize("units", [["layers/*"], ["embed", "layers/*", "layers/*/mlp"]])
@pytest.mark.parametrize("strategy", EXPECTED)
def test_no_two_collectives_of_a_step_can_run_at_once(strategy, units):
    # The CPU simulator aborts or hangs on independent collectives, but only now and then.
    plan, weights = fully_shard(decoder(), data_parallel_mesh(4), strategy=strategy, units=units)
    batch = shard_batch(plan, tokens(4))
    (mapped,) = jax.make_jaxpr(make_gradients(plan, loss))(weights, batch).eqns
    assert mapped.primitive.name == "shard_map"
    assert unordered_collectives(mapped.params["jaxpr"]) == []


def counted_on_two_devices(function, check_vma=False):
    spec = jax.sharding.PartitionSpec("dp")
    mapped = jax.shard_map(
        function, mesh=data_parallel_mesh(2), in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    return count_collectives(mapped, jnp.ones(8, np.float32))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(
    ("function", "operation", "size"),
    [
        (partial(jax.lax.all_gather, axis_name="dp", tiled=True), "all_gather", 8),
        (partial(jax.lax.psum_scatter, axis_name="dp", tiled=True), "reduce_scatter", 4),
        (partial(jax.lax.psum, axis_name="dp"), "psum", 4),
        (partial(jax.lax.pmax, axis_name="dp"), "pmax", 4),
        (partial(jax.lax.pmin, axis_name="dp"), "pmin", 4),
        (partial(jax.lax.ppermute, axis_name="dp", perm=[(0, 1), (1, 0)]), "ppermute", 4),
        (
            partial(jax.lax.all_to_all, axis_name="dp", split_axis=0, concat_axis=0, tiled=True),
            "all_to_all",
            4,
        ),
    ],
)
def test_every_kind_of_collective_is_counted(function, operation, size, check_vma):
    counts = counted_on_two_devices(lambda x: x + function(x).sum(), check_vma)
    assert counts == Counter({Collective(operation, "float32", size): 1})


def test_of_the_branches_of_a_cond_one_is_counted():
    def branches(x):
        return jax.lax.cond(
            x[0] > 0, lambda y: jax.lax.psum(y, "dp"), lambda y: jax.lax.psum(2 * y, "dp") + 1, x
        )

    def looped(x):
        return jax.lax.scan(lambda y, _: (branches(y), None), x, length=3)[0]

    once = Counter({Collective("psum", "float32", 4): 1})
    assert counted_on_two_devices(branches) == once
    assert counted_on_two_devices(looped) == once + once + once


def test_branches_with_other_collectives_are_refused():
    def branches(x):
        return jax.lax.cond(x[0] > 0, lambda y: jax.lax.psum(y, "dp"), lambda y: y, x)

    with pytest.raises(ValueError, match="same collectives in every branch of a cond"):
        counted_on_two_devices(branches)


def test_a_collective_in_a_loop_of_unknown_length_is_refused():
    mesh = data_parallel_mesh(2)

    def loop(x):
        return jax.lax.while_loop(lambda y: y[0] < 3, lambda y: jax.lax.psum(y, "dp"), x)

    spec = jax.sharding.PartitionSpec("dp")
    mapped = jax.shard_map(loop, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with pytest.raises(ValueError, match="outside while loops"):
        count_collectives(mapped, jnp.asarray(np.ones(2, np.float32)))
