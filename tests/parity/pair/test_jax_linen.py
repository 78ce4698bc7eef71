"""Calls of linen models and of functions of parameters."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.parity.jax.side import JaxSide
from bridge.parity.recorded.recording import probe_values, tap
from tests.parity.pair.jax_support import BATCH, close, paths


class Linen(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> Any:
        x = nn.Dense(5, dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        return {"out": nn.Dense(2)(x), "none": None}


@pytest.mark.slow
def test_a_linen_model_is_recorded_and_its_statistics_stay() -> None:
    module = Linen()
    variables = module.init(jax.random.key(0), BATCH)
    side = JaxSide((module, variables))
    recording = side.record(BATCH, "float64")
    assert paths(recording) == [("", 0, None), ("Dense_0", 0, ""), ("norm", 0, ""), ("Dense_1", 0, "")]
    assert {x.dtype for call in recording.calls for x in call.outputs.values()} == {np.dtype("float64")}
    assert list(recording.gradients) == list(side.weights())
    assert not variables["batch_stats"]["norm"]["mean"].any()

    def loss(params: Any) -> Any:
        out, _ = module.apply({**variables, "params": params}, BATCH, mutable=["batch_stats"])
        return jnp.sum(out["out"] * probe_values("0", (3, 2))) / 6**0.5

    expected = jax.grad(loss)(variables["params"])
    close(recording.gradients["Dense_0/kernel"], expected["Dense_0"]["kernel"], 1e-4)
    again = side.rerun("float64", "Dense_0", 0, {"0": 2 * BATCH}, cotangents={"": np.ones((3, 5))})
    close(again.gradients["Dense_0/bias"], np.full(5, 3.0))
    root = side.rerun("float64", "", 0, {}, replaced={("Dense_0", 0): {"": np.ones((3, 5))}})
    assert [call.path for call in root.calls] == ["Dense_0", "norm", "Dense_1"]
    close(root.calls[1].inputs["0"], np.ones((3, 5)))
    side.load({path: array + 1 for path, array in side.weights().items()})
    close(side.weights()["Dense_1/bias"], np.ones(2))
    assert len(side.train([BATCH, BATCH]).losses) == 2
    narrow = JaxSide((Linen(jnp.bfloat16), variables)).record(BATCH, backward=False)
    assert {x.dtype for call in narrow.calls for x in call.outputs.values()} == {np.dtype("float32")}


class Layer(nn.Module):
    dtype: Any = jnp.float32  # a default that is set before any run

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.Dense(4, dtype=self.dtype, name="dense")(x), None


class LinenStack(nn.Module):
    def setup(self) -> None:
        stack = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        self.layers = stack()
        self.head = nn.Dense(2, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "x")))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.layers(x, None)[0])


@pytest.mark.slow
def test_a_linen_stack_gives_the_calls_of_its_layers() -> None:
    module = LinenStack()
    variables = module.init(jax.random.key(0), BATCH)
    side = JaxSide((module, variables))
    assert "head/kernel" in side.weights()
    recording = side.record(BATCH, "float64")
    layers = [(f"layers/{n}{sub}", 0, f"layers/{n}" if sub else "") for n in (0, 1) for sub in ("", "/dense")]
    assert paths(recording) == [("", 0, None), *layers, ("head", 0, "")]
    assert {x.dtype for call in recording.calls for x in call.outputs.values()} == {np.dtype("float64")}
    again = side.rerun("float64", "layers/1", 0, {}, cotangents={"0": np.ones((3, 4))})
    close(again.gradients["layers/1/dense/bias"], np.full(4, 3.0))
    assert [call.path for call in again.calls] == ["layers/1/dense"]
    kernel = np.asarray(variables["params"]["layers"]["dense"]["kernel"], np.float64)[1]
    dense = recording.find("layers/1/dense")
    assert dense is not None
    close(dense.outputs[""], dense.inputs["0"] @ kernel, 1e-12)


def forward(parameters: Any, x: jax.Array, shift: jax.Array) -> Any:
    hidden = tap("hidden", x @ parameters["layers"][0]["w"] + shift)
    return jax.jit(lambda x: tap("wave", {"sin": jnp.sin(x), "top": x.argmax(-1)}))(hidden)["sin"]


def test_a_function_is_recorded_by_its_taps() -> None:
    parameters = {"layers": [{"w": BATCH.T.copy()}], "unused": np.ones(2, np.float32)}
    side = JaxSide((forward, parameters))
    shift = np.float32([1, 2, 3])
    recording = side.record((BATCH, shift), "float64")
    assert paths(recording) == [("", 0, None), ("hidden", 0, ""), ("wave", 0, "")]
    assert set(recording.calls[0].inputs) == {"0", "1"}
    hidden = BATCH.astype(np.float64) @ BATCH.T + shift
    expected = np.cos(hidden) * probe_values("0", (3, 3)) / 3
    close(recording.calls[1].gradients[""], expected, 1e-12)
    close(recording.gradients["layers/0/w"], BATCH.T @ expected)
    assert not recording.gradients["unused"].any()
    again = side.rerun("float64", "", 0, {}, replaced={("hidden", 0): {"": np.zeros((3, 3))}})
    assert not again.outputs[""].any()
    close(again.calls[0].outputs[""], hidden)
    with pytest.raises(KeyError, match="no call 0 of module 'hidden'"):
        side.rerun("float64", "hidden", 0, {})
    assert tap("outside", parameters) is parameters
