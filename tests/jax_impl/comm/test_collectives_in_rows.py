"""Shards that travel as rows of 128 elements, as on TPUs, arrive as those that travel as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_impl import data_parallel_mesh
from jax_impl.comm.collectives import Wire
from jax_impl.comm.mesh import DataParallelMesh
from jax_impl.modules.seal import jaxpr_of

SIZES = (1, 127, 128, 129, 300)


def both_ways(size: int, dtype: str, *, in_rows: bool) -> Any:
    """Gathers over both axes, and sums of what was gathered, of a ``[4 * size]`` array whose elements all differ."""
    mesh = data_parallel_mesh({"outer": 2, "inner": 2})
    axes = DataParallelMesh.of(mesh)
    main, compute = jnp.dtype("float32"), jnp.dtype(dtype)
    wire = Wire(axes, main, compute, main, main, in_rows=in_rows)

    def local(shard: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole = wire.all_gather(shard, (1, 0)).astype(main)
        own = axes_index(axes) + 1
        return whole, wire.reduce_scatter(whole * own, range(2))

    def axes_index(axes: DataParallelMesh) -> jax.Array:
        return sum(
            (2**digit * jax.lax.axis_index(name) for digit, name in enumerate(axes.names)),
            start=jnp.int32(0),
        )

    spec = axes.spec(2, 0)
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=(PartitionSpec(), spec), check_vma=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_gathers_and_sums_are_the_same(dtype):
    for size in SIZES:
        values = jnp.arange(4.0 * size) % 13 + 1
        plain, rows = (jax.jit(both_ways(size, dtype, in_rows=way))(values) for way in (False, True))
        for expected, other in zip(plain, rows, strict=True):
            np.testing.assert_array_equal(other, expected, err_msg=f"shards of {size}")
        np.testing.assert_array_equal(rows[0], values.astype(dtype).astype("float32"))
        # Each of four devices adds its number, 1 to 4, times the whole.
        np.testing.assert_array_equal(rows[1], 10 * rows[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("row", [128, 384])
def test_what_stays_in_rows_is_the_same(row, dtype):
    mesh = data_parallel_mesh({"outer": 2, "inner": 2})
    axes = DataParallelMesh.of(mesh)
    main, compute = jnp.dtype("float32"), jnp.dtype(dtype)
    wire = Wire(axes, main, compute, main, main, in_rows=True)
    values = jnp.arange(4.0 * 768) % 13 + 1

    def local(shard: jax.Array) -> tuple[jax.Array, ...]:
        inner = wire.all_gather(shard, (1,))
        outputs = []
        for part, level in ((shard, 2), (inner.astype(main), 1)):
            whole = wire.all_gather(part, reversed(range(level)), row).astype(main)
            assert whole.shape == (2**level, part.size // row, row)
            outputs.append(whole.reshape(-1))
            number = 2 * jax.lax.axis_index("outer") + jax.lax.axis_index("inner") + 1
            outputs += [wire.reduce_scatter(whole * number, range(2))]
        return (*outputs, wire.reduce_scatter(whole, range(0)))

    spec, whole = axes.spec(2, 0), PartitionSpec()
    run = jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=(whole, spec, whole, spec, whole), check_vma=False
    )
    expected = values.astype(dtype).astype("float32")
    for output, times in zip(jax.jit(run)(values), (1, 10, 1, 10, 1), strict=True):
        np.testing.assert_array_equal(output, times * expected)


def sent(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """Shapes of what collectives get."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("all_gather", "reduce_scatter"):
            yield equation.invars[0].aval.shape
        for value in equation.params.values():
            if jaxpr_of(value) is not None:
                yield from sent(jaxpr_of(value))


def test_whole_rows_travel_whatever_the_size_of_a_shard():
    for size in SIZES:
        shapes = list(
            sent(jax.make_jaxpr(both_ways(size, "float32", in_rows=True))(jnp.ones(4 * size)).jaxpr)
        )
        assert len(shapes) == 4
        assert all(shape[1:] == (128,) for shape in shapes), shapes
