"""Sharded JAX models captured: the trace of the model on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_impl
from bridge.core.mapping import parse_mapping
from bridge.parity import capture_jax, capture_torch, compare_traces
from bridge.parity.recorded.trace import TraceSide
from tests.support.parity.small_twins import BATCH, MAPPING, JaxMLP, TorchMLP, jax_loss, torch_loss

TABLE = parse_mapping(MAPPING, "small")
DEVICES = 4
ROWS = np.concatenate([BATCH, BATCH[:3] + 1])


def by_pjit() -> JaxMLP:
    """Matrices cut along the axis of 8 over all devices."""
    mesh = jax.make_mesh((DEVICES,), ("x",), devices=jax.devices()[:DEVICES])
    model = JaxMLP()

    def placed(leaf: jax.Array) -> jax.Array:
        axes = tuple("x" if size == 8 else None for size in leaf.shape)
        return jax.device_put(leaf, jax.NamedSharding(mesh, jax.P(*axes)))

    nnx.update(model, jax.tree.map(placed, nnx.state(model)))
    assert len(model.up.kernel[...].sharding.device_set) == DEVICES
    assert not model.up.kernel[...].sharding.is_fully_replicated
    return model


def by_engine(engine: str) -> JaxMLP:
    """After a step of our runtime whose optimizer changes nothing."""
    plan, weights = jax_impl.fully_shard(
        JaxMLP(), jax_impl.data_parallel_mesh(DEVICES), units=["up", "down"], engine=engine
    )
    optimizer = optax.sgd(0.0)
    state = jax_impl.init_state(plan, weights, optimizer)
    step = jax_impl.make_train_step(plan, lambda model, batch: jnp.mean(model(batch) ** 2), optimizer)
    state, _ = step(state, ROWS)
    model = plan.merge(jax_impl.unshard(plan, state))
    assert isinstance(model, JaxMLP)
    return model


MODELS: dict[str, Callable[[], JaxMLP]] = {
    "pjit": by_pjit,
    "engine": lambda: by_engine("shard_map"),
    "pjit engine": lambda: by_engine("pjit"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_sharded_jax_model_is_captured_whole(tmp_path: Path, name: str) -> None:
    capture_jax(MODELS[name](), ROWS, tmp_path / "jax", loss=jax_loss, steps=2)
    capture_jax(JaxMLP(), ROWS, tmp_path / "plain", loss=jax_loss, steps=2)
    sharded, expected = TraceSide.read(tmp_path / "jax"), TraceSide.read(tmp_path / "plain")
    assert list(sharded.arrays) == list(expected.arrays)
    for key, array in expected.arrays.items():
        assert sharded.arrays[key].shape == array.shape, key
        tolerance = 1e-12 if key.startswith("float64") else 1e-5
        np.testing.assert_allclose(sharded.arrays[key], array, tolerance, tolerance, err_msg=key)
    capture_torch(TorchMLP().eval(), ROWS, tmp_path / "torch", loss=torch_loss, steps=2)
    report = compare_traces(tmp_path / "torch", tmp_path / "jax", mapping=TABLE)
    assert report.same, report.summary()
