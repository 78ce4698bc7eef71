"""The way of TPUs, on simulated devices: arrays in rows, and residuals made anew, give the plain model's gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_impl.grouping
import jax_impl.runtime.step.forward
from bridge.core.sharding import Layout, Slot
from jax_impl import count_collectives, data_parallel_mesh, fully_shard, make_gradients, plan_layout, unshard
from jax_impl.models import Decoder
from jax_impl.modules.seal import jaxpr_of
from jax_impl.runtime.groups.flat_group import pack, row_size, unpack
from tests.support.jax_impl.cut_models import DECODER
from tests.support.jax_impl.tiny import CONFIG, loss, named, tokens

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "a matrix alone": {"w": (48, 256)},
    "rows that no number of devices divides": {"w": (17, 384)},
    "a tensor alone": {"w": (6, 2, 128)},
    "other rows than a tile's": {"w": (128, 37)},
    "a vector": {"w": (512,)},
    "several": {"a": (16, 256), "b": (256, 16), "c": (256,), "none": (0, 3)},
    "scalar": {"s": ()},
    "empty": {"w": (0, 128)},
}


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_hold_what_the_flat_array_holds(name, num_shards):
    layout = plan_layout(SHAPES[name], num_shards, align=128)
    row = row_size(layout)
    if not layout.shard_size:
        assert row is None
        return
    values = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(SHAPES[name].values())]
    flat, rows = pack(layout, values), pack(layout, values, row)
    assert rows.shape == (num_shards, layout.shard_size // row, row)
    np.testing.assert_array_equal(rows.reshape(-1), flat)
    for unpacked, other in zip(unpack(layout, rows), values, strict=True):
        np.testing.assert_array_equal(unpacked, other)


def test_a_matrix_alone_is_neither_cut_nor_copied():
    layout = Layout(4, (12 * 256,), (Slot("w", (48, 256), 1, 0, 0),), align=128)
    assert row_size(layout) == 256
    rows = jax.ShapeDtypeStruct((4, 12, 256), np.float32)
    steps = [equation.primitive.name for equation in jax.make_jaxpr(lambda x: unpack(layout, x))(rows).eqns]
    assert steps == ["reshape"]


def test_shards_of_no_whole_rows_have_none():
    assert row_size(plan_layout({"w": (7, 6)}, 4, align=1)) is None


WIDE = dataclasses.replace(CONFIG, vocab_size=24, d_model=128, n_heads=2, n_kv_heads=2, head_dim=32, d_ff=64)


@pytest.fixture
def as_on_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    on_tpus(monkeypatch)


def on_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards travel in rows, and units save what ``residuals.py`` says."""
    monkeypatch.setattr(jax_impl.grouping, "is_tpu", lambda mesh: True)
    monkeypatch.setattr(jax_impl.runtime.step.forward, "is_simulated", lambda mesh: False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "engine", "strategy", "devices", "options"),
    [
        (WIDE, "shard_map", "hfsdp", {"outer": 2, "inner": 2}, {"stacked": ["layers"], "prefetch": 1}),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in (
                (WIDE, "shard_map", "optim_grads_params", 4, {"units": ["embed", "layers/*", "lm_head"]}),
                (CONFIG, "shard_map", "hsdp", {"outer": 2, "inner": 2}, {"prefetch": 1}),
                (CONFIG, "shard_map", "optim_grads_params", 3, {"stacked": ["layers"], "recompute": True}),
                (WIDE, "pjit", "optim_grads_params", 4, {"stacked": ["layers"]}),
                (
                    WIDE,
                    "shard_map",
                    "hfsdp",
                    {"outer": 2, "inner": 2, "tp": 2},
                    {"units": ["embed", "layers/*"], "prefetch": 1, "parallel": DECODER},
                ),
            )
        ),
    ],
)
def test_gradients_are_those_of_the_plain_model(as_on_tpus, config, engine, strategy, devices, options):
    rows = tokens(24)

    def value(model: Any) -> jax.Array:
        return loss(model, rows)

    with jax.enable_x64(True):
        model = Decoder(config, rngs=nnx.Rngs(1), dtype=jnp.float64, stacked="stacked" in options)
        expected, gradients = nnx.jit(nnx.value_and_grad(value))(model)
        plan, weights = fully_shard(
            model, data_parallel_mesh(devices), strategy=strategy, engine=engine, **options
        )
        sharded_loss, reduced, *_ = jax.jit(make_gradients(plan, loss, microbatches=2))(weights, rows)
        np.testing.assert_allclose(sharded_loss, expected, rtol=1e-12)
        for path, gradient in unshard(plan, reduced).items():
            wanted = np.asarray(named(gradients)[path])
            np.testing.assert_allclose(gradient, wanted, atol=1e-11 * np.abs(wanted).max(), err_msg=path)


def test_as_many_transfers_and_fewer_residuals(monkeypatch):
    model = nnx.eval_shape(lambda: Decoder(WIDE, rngs=nnx.Rngs(1)))

    def traced() -> tuple[Any, int]:
        plan = jax_impl.plan_sharding(model, data_parallel_mesh(4))
        weights = {key: jax.ShapeDtypeStruct(array.shape, array.dtype) for key, array in plan.arrays.items()}
        function = make_gradients(plan, loss)
        batch = jax.ShapeDtypeStruct((16, 33), jnp.int32)
        return count_collectives(function, weights, batch), held(jax.make_jaxpr(function)(weights, batch))

    plain, before = traced()
    on_tpus(monkeypatch)
    transfers, after = traced()
    assert transfers == plain
    assert after < 0.75 * before


def held(program: Any) -> int:
    """Bytes that barriers let through."""
    jaxpr = jaxpr_of(program)
    size = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "optimization_barrier":
            size += sum(v.aval.size * v.aval.dtype.itemsize for v in equation.outvars)
        for value in equation.params.values():
            if jaxpr_of(value) is not None:
                size += held(value)
    return size
