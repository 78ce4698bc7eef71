"""Sharding annotations of parameters, which data-parallel buffers cannot follow, are warned of by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from jax_impl import data_parallel_mesh, fully_shard, init_sharded, plan_sharding
from jax_impl.modules.partitioning import warn_of_annotations
from jax_impl.modules.tree_model import as_module

Tree = Any


class Net(nnx.Module):
    """One annotated parameter, and one whose annotation names no axis."""

    def __init__(self, axis: str | None = "tp") -> None:
        self.up = nnx.Param(jnp.ones((4, 8)), out_sharding=(None, axis), eager_sharding=False)
        self.down = nnx.Param(jnp.ones((8, 4)), out_sharding=(None, None), eager_sharding=False)


def linen_params(partition: Callable[..., Any] = linen.with_partitioning) -> Tree:
    init = partition(linen.initializers.ones, (None, "tp"))
    return jax.eval_shape(linen.Dense(8, kernel_init=init).init, jax.random.key(0), jnp.ones((2, 4)))[
        "params"
    ]


def boxed() -> Tree:
    return {"dense": {"kernel": linen.Partitioned(jnp.ones((4, 8)), (None, "tp")), "bias": jnp.ones(8)}}


def said(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught if "sharding annotations" in str(warning.message)]


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (Net, "'up' (None, 'tp'); jax_impl"),
        (linen_params, "'kernel' (None, 'tp'); jax_impl"),
        (lambda: linen_params(linen.with_logical_partitioning), "'kernel' (None, 'tp'); jax_impl"),
        (lambda: {"a": {"b": boxed()}}, "'a/b/dense/kernel' (None, 'tp'); jax_impl"),
    ],
)
def test_annotations_that_name_an_axis_are_warned_of(make: Callable[[], Any], shown: str) -> None:
    (text,) = said(lambda: warn_of_annotations(as_module(make())))
    assert f"model: 1 parameters have sharding annotations that have no effect: {shown}" in text
    assert "flax.linen.meta.unbox(params)" in text


@pytest.mark.parametrize(
    "make", [lambda: Net(None), lambda: linen.meta.unbox(boxed()), lambda: linen.meta.unbox(linen_params())]
)
def test_parameters_without_an_axis_are_quiet(make: Callable[[], Any]) -> None:
    assert said(lambda: warn_of_annotations(as_module(make()))) == []


@pytest.mark.parametrize("make", [Net, boxed])
@pytest.mark.parametrize(
    "shard",
    [
        lambda make, mesh: fully_shard(make(), mesh, units=[]),
        lambda make, mesh: plan_sharding(make(), mesh, units=[]),
        lambda make, mesh: init_sharded(make, mesh, units=[]),
    ],
    ids=["fully_shard", "plan_sharding", "init_sharded"],
)
def test_every_way_to_shard_warns_once(shard: Callable[..., object], make: Callable[[], Any]) -> None:
    assert len(said(lambda: shard(make, data_parallel_mesh(2)))) == 1
