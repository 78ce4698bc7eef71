"""What XLA makes of a step: the collectives that were written, however layers, microbatches and axes are arranged."""

from __future__ import annotations

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from jax_impl import (
    count_collectives,
    count_compiled_collectives,
    data_parallel_mesh,
    fully_shard,
    make_gradients,
    shard_batch,
)
from jax_impl.diagnostics.collectives import Collective
from tests.jax_impl.runtime.test_strategy_matrix import decoder
from tests.support.jax_impl.tiny import loss, tokens

MESHES = {"4": 4, "2x2": {"outer": 2, "inner": 2}, "2x3": {"outer": 2, "inner": 3}}
# Of a unit: gathers before the microbatches by axis, gathers and reductions in each, and reductions after them. An axis
# is counted from the innermost; sizes are those of the array that is gathered to, or reduced from.
G, R, A = "all_gather", "reduce_scatter", "psum"


def expected_of(
    strategy: str, mesh: str, size: int, shards: tuple[int, ...], k: int
) -> Counter[tuple[str, int]]:
    inner = size // shards[0]
    if mesh == "4":
        return {
            "no_shard": Counter({(A, size): 1}),
            "optim": Counter({(G, size): 1, (R, size): 1}),
            "optim_grads": Counter({(G, size): 1, (R, size): k}),
            "optim_grads_params": Counter({(G, size): 2 * k, (R, size): k}),
        }[strategy]
    return {
        "no_shard": Counter({(A, size): 2}),
        "optim": Counter({(G, size): 1, (R, size): 1, (A, inner): 1}),
        "optim_grads": Counter({(G, size): 1, (R, size): k, (A, inner): 1}),
        "hsdp": Counter({(G, size): 2 * k, (R, size): k, (A, inner): 1}),
        "hfsdp": Counter({(G, inner): 1, (G, size): 2 * k, (R, size): k, (R, inner): 1}),
    }[strategy]


CASES = list(
    itertools.product(
        [
            *(("4", strategy) for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")),
            *(("2x2", strategy) for strategy in ("no_shard", "optim", "optim_grads", "hsdp", "hfsdp")),
            ("2x3", "hfsdp"),
        ],
        [1, 3],
        [False, True],
        [False, True],
    )
)


@pytest.mark.fast_cases("case33-1-False-True", "case66-1-True-False", "case44-3-False-False")
@pytest.mark.parametrize(
    ("case", "microbatches", "stacked", "recompute"),
    # A stride that has no factor in common with the lengths of the axes above visits all their values.
    [pytest.param(*case, marks=[] if i % 11 == 0 else [pytest.mark.slow]) for i, case in enumerate(CASES)],
)
def test_each_unit_is_gathered_and_reduced_as_the_contract_says(case, microbatches, stacked, recompute):
    mesh, strategy = case
    with jax.enable_x64(True):
        plan, weights = fully_shard(
            decoder("shard_map", stacked),
            data_parallel_mesh(MESHES[mesh]),
            strategy=strategy,
            recompute=recompute,
            stacked=["layers"] if stacked else [],
        )
        batch = shard_batch(plan, tokens(plan.num_devices * microbatches), microbatches)
        gradients = make_gradients(plan, loss, microbatches)
        expected = Counter({Collective(A, "float64", 1): 1})  # the loss
        for unit in plan.units.values():
            of_unit = expected_of(strategy, mesh, unit.layout.padded_size, plan.axes.sizes, microbatches)
            for (operation, size), times in of_unit.items():
                expected[Collective(operation, "float64", size)] += times * (unit.module.layers or 1)
        traced = count_collectives(gradients, weights, batch)
        assert traced == expected
        compiled = jax.jit(gradients).lower(weights, batch).compile()
        assert count_compiled_collectives(compiled) == expected


def test_a_pjit_step_has_gathers_and_reductions_only_xla_knows_how_many():
    with jax.enable_x64(True):
        plan, weights = fully_shard(decoder("pjit", False), data_parallel_mesh(4), engine="pjit")
        batch = shard_batch(plan, tokens(4))
        counts = count_compiled_collectives(
            jax.jit(make_gradients(plan, loss)).lower(weights, batch).compile()
        )
    operations = Counter(collective.kind for collective in counts.elements())
    assert operations["all_gather"] >= 2 * len(plan.model.parameters) // 2
    assert operations["psum"] + operations["reduce_scatter"] >= len(plan.model.parameters) // 2


def test_loops_are_multiplied_out_and_the_full_size_of_a_reduce_scatter_is_told():
    def body(x):
        return jax.lax.psum_scatter(jax.lax.all_gather(x, "dp", tiled=True), "dp", tiled=True)

    def looped(x):
        def outer(x, _):
            return jax.lax.scan(lambda x, _: (body(x), None), x, length=3)[0], None

        return jax.lax.scan(outer, x, length=5)[0]

    mesh = data_parallel_mesh(4)
    spec = jax.sharding.PartitionSpec("dp")
    mapped = jax.shard_map(looped, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(mesh, spec))
    counts = count_compiled_collectives(jax.jit(mapped).lower(x).compile())
    assert counts == {Collective(G, "float32", 8): 15, Collective(R, "float32", 8): 15}


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="expected the text of a compiled program"):
        count_compiled_collectives("HloModule nothing")


def test_a_loop_of_unknown_length_around_a_collective_is_refused():
    mesh = data_parallel_mesh(2)

    def loop(x):
        return jax.lax.while_loop(lambda y: y.sum() < 100, lambda y: jax.lax.psum(y, "dp"), x)

    spec = jax.sharding.PartitionSpec("dp")
    mapped = jax.shard_map(loop, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.device_put(jnp.ones(2), jax.sharding.NamedSharding(mesh, spec))
    with pytest.raises(ValueError, match="loops of known length"):
        count_compiled_collectives(jax.jit(mapped).lower(x).compile())


@pytest.mark.parametrize(
    ("groups", "members"),
    [
        ("{{0,1},{2,3}}", 2),
        ("[2,4]<=[8]", 4),
        ("mesh['dp_outer'=2,'dp'=4] {'dp'}", 4),
        ("mesh['dp_outer'=2,'dp'=4] {'dp_outer','dp'}", 8),
    ],
)
def test_groups_of_a_collective_are_read_as_every_version_of_xla_writes_them(groups: str, members: int):
    assert count_compiled_collectives(scattering(groups)) == {
        Collective("reduce_scatter", "float32", 3 * members): 1
    }


def test_a_collective_over_a_part_of_an_axis_raises():
    with pytest.raises(ValueError, match="expected a collective over whole axes of its mesh"):
        count_compiled_collectives(scattering("mesh['dp'=8] {'dp':(1)2}"))


def scattering(groups: str) -> str:
    return (
        "ENTRY %main (p: f32[24]) -> f32[3] {\n"
        f"  %r = f32[3]{{0}} reduce-scatter(%p), channel_id=1, replica_groups={groups}, dimensions={{0}}\n"
        "}\n"
    )
