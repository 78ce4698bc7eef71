"""JaxSide: what a run records, what calling a module again gives, dtypes, training and errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from bridge.parity.jax.run_in_dtype import change_dtypes, only_float64
from bridge.parity.jax.side import JaxSide
from bridge.parity.recorded.recording import probe_values, tap
from tests.parity.pair.jax_support import BATCH, MLP, close, paths


def test_an_nnx_model_gives_its_calls_its_loss_and_all_gradients() -> None:
    model = MLP(nnx.Rngs(0))
    recording = JaxSide(model).record(BATCH, "float64")
    assert paths(recording) == [("", 0, None), ("up", 0, ""), ("down", 0, "")]
    assert [call.kind for call in recording.calls] == ["MLP", "Linear", "Linear"]
    with jax.enable_x64(True):
        up, down = (
            (jnp.asarray(linear.kernel[...], "float64"), jnp.asarray(linear.bias[...], "float64"))
            for linear in (model.up, model.down)
        )

        def loss(up: Any, down: Any, first: Any, last: Any) -> Any:
            hidden = jnp.asarray(BATCH, "float64") @ up[0] + up[1] + first
            out = jnp.tanh(hidden) @ down[0] + down[1] + last
            return jnp.sum(out * probe_values("0", (3, 4))) / 12**0.5

        value, gradients = jax.value_and_grad(loss, (0, 1, 2, 3))(
            up, down, jnp.zeros((3, 4)), jnp.zeros((3, 4))
        )
    close(recording.loss, value)
    for name, expected in [
        ("up/kernel", gradients[0][0]),
        ("up/bias", gradients[0][1]),
        ("down/kernel", gradients[1][0]),
        ("down/bias", gradients[1][1]),
    ]:
        assert recording.gradients[name].dtype == np.float64
        close(recording.gradients[name], expected, 1e-12)
    close(recording.find("up").gradients[""], gradients[2], 1e-12)  # type: ignore[union-attr]
    close(recording.find("down").gradients[""], gradients[3], 1e-12)  # type: ignore[union-attr]
    close(recording.find("down").inputs["0"], np.tanh(recording.find("up").outputs[""]), 1e-12)  # type: ignore[union-attr]


@dataclasses.dataclass(frozen=True)
class Config:
    compute: Any = jnp.bfloat16
    dtype: str = "float32"


def by_default(x: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    return jax.lax.convert_element_type(x, dtype)


class Dtyped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.config = Config()
        self.linear = nnx.Linear(4, 4, dtype=jnp.float32, rngs=rngs)
        self.buffer = nnx.Variable(jnp.full((4,), 0.1, jnp.float32))

    def __call__(self, x: jax.Array) -> Any:
        x = jax.nn.softmax(self.linear(x.astype(self.config.compute)).astype(jnp.float32)) + self.buffer[...]
        x = x.astype("float32").astype(np.float32).astype(dtype=np.dtype("float32")) + by_default(x)
        x = jnp.asarray(x, "float32") + jnp.zeros(4, np.float32)
        return jnp.dot(x, x.T, preferred_element_type=np.float32), jnp.zeros(3, self.config.dtype)


def test_in_float64_nothing_is_computed_in_less() -> None:
    model = Dtyped(nnx.Rngs(0))
    recording = JaxSide(model).record(BATCH, "float64")
    assert {x.dtype for call in recording.calls for x in call.outputs.values()} == {np.dtype("float64")}
    with jax.enable_x64(True):
        kernel, bias = (
            np.asarray(parameter[...], np.float64) for parameter in (model.linear.kernel, model.linear.bias)
        )
        hidden = np.asarray(jax.nn.softmax(BATCH.astype(np.float64) @ kernel + bias)) + np.float64(
            np.float32(0.1)
        )
    close(recording.calls[0].outputs["0"], 4 * hidden @ hidden.T, 1e-14)
    assert jnp.float32 is not jnp.float64
    assert (model.config, model.linear.dtype) == (Config(), jnp.float32)


@pytest.mark.slow
def test_in_bfloat16_only_what_asks_for_float32_stays_wide() -> None:
    side = JaxSide(Dtyped(nnx.Rngs(0)))
    recording = side.record(BATCH, "bfloat16")
    assert recording.calls[0].inputs["0"].dtype == jnp.bfloat16
    assert recording.find("linear").outputs[""].dtype == np.float32  # type: ignore[union-attr]
    assert {x.dtype for x in recording.gradients.values()} == {np.dtype(jnp.bfloat16)}
    plain = JaxSide(MLP(nnx.Rngs(0))).record(BATCH, "float16")
    assert {x.dtype for call in plain.calls for x in call.outputs.values()} == {np.dtype("float16")}
    assert side.weights()["linear/kernel"].dtype == np.float32


def test_a_rerun_takes_inputs_cotangents_and_replaced_outputs() -> None:
    model = MLP(nnx.Rngs(0))
    side = JaxSide(model)
    side.record(BATCH)
    hidden = np.random.default_rng(1).standard_normal((3, 4))
    again = side.rerun(
        "float32",
        "",
        0,
        {"0": 2 * BATCH},
        cotangents={"": np.ones((3, 4))},
        replaced={("up", 0): {"": hidden}},
    )
    kernel, bias = model.down.kernel[...], model.down.bias[...]
    close(again.outputs[""], np.tanh(hidden) @ kernel + bias)
    assert [(call.path, call.parent) for call in again.calls] == [("up", None), ("down", None)]
    close(again.calls[0].inputs["0"], 2 * BATCH)
    close(again.calls[0].outputs[""], 2 * BATCH @ model.up.kernel[...] + model.up.bias[...])
    close(again.gradients["down/bias"], np.full(4, 3.0))
    assert not again.gradients["up/kernel"].any()
    assert not side.rerun("float32", "up", 0, {}).gradients
    with pytest.raises(KeyError, match="no call 1 of module 'up'"):
        side.rerun("float32", "up", 1, {})
    with pytest.raises(KeyError, match=r"'up'.*float64"):
        side.rerun("float64", "up", 0, {})
    with pytest.raises(KeyError, match=r"'up'.*input leaves among .*'1'"):
        side.rerun("float32", "up", 0, {"1": BATCH})
    with pytest.raises(KeyError, match=r"'up'.*output leaves among .*'x'"):
        side.rerun("float32", "up", 0, {}, cotangents={"x": BATCH})


def test_gradients_of_activations_are_those_of_finite_differences() -> None:
    side = JaxSide(MLP(nnx.Rngs(0)))
    recording = side.record(BATCH, "float64")
    up = recording.find("up")
    assert up is not None
    step = 1e-5 * np.random.default_rng(1).standard_normal((3, 4))
    losses = []
    for sign in (1, -1):
        out = side.rerun(
            "float64", "", 0, {}, replaced={("up", 0): {"": up.outputs[""] + sign * step}}
        ).outputs[""]
        losses.append((out * probe_values("0", (3, 4))).sum() / 12**0.5)
    assert (losses[0] - losses[1]) / 2 == pytest.approx((up.gradients[""] * step).sum(), rel=1e-7)


def test_a_sharded_model_is_recorded_whole() -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    model, sharded = MLP(nnx.Rngs(0)), MLP(nnx.Rngs(0))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    nnx.update(sharded, jax.tree.map(lambda x: jax.device_put(x, sharding), nnx.state(sharded)))
    side = JaxSide(sharded)
    whole, recording = (recorder.record(BATCH) for recorder in (JaxSide(model), side))
    assert whole.loss == recording.loss
    np.testing.assert_array_equal(whole.gradients["up/kernel"], recording.gradients["up/kernel"])
    side.load({path: array + 1 for path, array in side.weights().items()})
    assert sharded.up.kernel[...].sharding == sharding
    close(sharded.up.bias[...], np.ones(4))


def test_training_is_the_optimizers_and_of_a_copy() -> None:
    model = MLP(nnx.Rngs(0))
    side = JaxSide(model, lambda model, batch: jnp.mean(model(batch) ** 2), optimizer=optax.sgd(0.5))
    before = side.weights()
    training = side.train([BATCH, BATCH, 2 * BATCH])
    recording = side.record(BATCH)
    assert training.losses[0] == pytest.approx(recording.loss, rel=1e-5)
    for path, array in before.items():
        close(training.first[path], array - 0.5 * recording.gradients[path], 1e-5)
        np.testing.assert_array_equal(side.weights()[path], array)
        assert not np.array_equal(training.last[path], training.first[path])
    side.load(training.first)
    assert side.record(BATCH, backward=False).loss == pytest.approx(training.losses[1], rel=1e-5)
    assert side.train([BATCH], "float64").last["up/kernel"].dtype == np.float64


def test_what_does_not_fit_is_named() -> None:
    side = JaxSide(MLP(nnx.Rngs(0)))
    weights = side.weights()
    kernel = weights.pop("up/kernel")
    with pytest.raises(
        ValueError, match=r"up/kernel: missing; other: unexpected; up/bias: .*\[4\], got \[5\]"
    ):
        side.load({**weights, "other": kernel, "up/bias": np.zeros(5)})
    with pytest.raises(ValueError, match=r"refuses the batch \(x float32\[3, 4\], y int32\[2\]\)"):
        side.record({"x": BATCH, "y": np.zeros(2, np.int64)})
    with pytest.raises(ValueError, match=r"expected a floating scalar, got float32\[3, 4\]"):
        JaxSide(MLP(nnx.Rngs(0)), lambda model, batch: model(batch)).record(BATCH)
    with pytest.raises(ValueError, match="expected parameters, found none"):
        JaxSide(nnx.Dropout(0.5))
    with pytest.raises(TypeError, match=r"model: expected .* got int"):
        JaxSide(3)
    with pytest.raises(ValueError, match="'next_token' or 'probe', got 'mse'"):
        JaxSide(MLP(nnx.Rngs(0)), "mse")
    with pytest.raises(ValueError, match=r"expected one of float32.*'int8'"):
        side.record(BATCH, "int8")


def test_classes_and_names_are_as_before_after_a_run_that_fails() -> None:
    def fails(model: Any, batch: Any) -> Any:
        raise RuntimeError(jnp.dtype(jnp.float32).name)

    call, checkpoint = MLP.__call__, jax.checkpoint
    with pytest.raises(ValueError, match="RuntimeError: float64"):
        JaxSide(MLP(nnx.Rngs(0)), fails).record(BATCH, "float64")
    assert (MLP.__call__, jax.checkpoint) == (call, checkpoint)
    assert jnp.dtype(jnp.float32) == np.float32
    assert tap("hidden", 3) == 3


def test_random_numbers_in_float64_are_those_of_a_float32_run() -> None:
    key = jax.random.key(3)

    def drawn() -> list[np.ndarray]:
        chances = jax.random.bernoulli(key, 0.3, (64,)), jax.random.bernoulli(key, jnp.linspace(0, 1, 64))
        return [np.asarray(x) for x in (*chances, jax.random.normal(key, (8,), jnp.float32))]

    expected = drawn()
    with jax.enable_x64(True), only_float64():
        wide = drawn()
    for narrow, array in zip(expected, wide, strict=True):
        np.testing.assert_array_equal(array, narrow)
    assert wide[-1].dtype == np.float64


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtypes_of_modules_follow_the_run(dtype: str) -> None:
    """A module whose own dtype is narrower computes in the run's dtype."""

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.up = nnx.Linear(4, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
            self.settings = {"out_dtype": "bfloat16"}

        def __call__(self, x: Any) -> Any:
            return self.up(x).astype(self.settings["out_dtype"])

    recording = JaxSide(Model()).record(BATCH, dtype)
    assert {array.dtype.name for call in recording.calls for array in call.outputs.values()} == {dtype}


def test_dtypes_in_attributes_follow_the_run() -> None:
    @dataclasses.dataclass(frozen=True)
    class Config:
        dtype: Any = jnp.bfloat16
        kernel_dtype: str = "float32"
        name: str = "float32"
        parts: tuple[Any, ...] = (jnp.float16, 3)

    config = Config()
    changed = change_dtypes(config, "float64")
    assert (changed.dtype, changed.kernel_dtype, changed.name) == (np.dtype("float64"), "float64", "float32")
    assert changed.parts == (np.dtype("float64"), 3)
    assert config == Config()
    for value in (3, "float32", jnp.int32, {"depth": [1, 2]}, None):
        assert change_dtypes(value, "float64") is value
    assert change_dtypes({"depth": [jnp.float32]}, "float64") == {"depth": [np.dtype("float64")]}
