"""JaxSide: what a run of an nnx, a linen or a functional model records, and what calling its modules again gives."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from bridge.parity.pair.jax_side import JaxSide
from bridge.parity.pair.probe import probe_values
from bridge.parity.pair.recording import Recording
from bridge.parity.pair.tap import tap
from jax_impl.models.decoder import Decoder, DecoderConfig

BATCH = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = 4) -> None:
        self.up = nnx.Linear(4, width, rngs=rngs)
        self.down = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


def paths(recording: Recording) -> list[tuple[str, int, str | None]]:
    calls = recording.calls
    return [(c.path, c.number, None if c.parent is None else calls[c.parent].path) for c in calls]


def close(left: Any, right: Any, tolerance: float = 1e-6) -> None:
    assert np.shape(left) == np.shape(right)
    np.testing.assert_allclose(
        np.asarray(left, np.float64), np.asarray(right, np.float64), tolerance, tolerance
    )


def test_an_nnx_model_gives_its_calls_its_loss_and_all_gradients() -> None:
    model = MLP(nnx.Rngs(0))
    recording = JaxSide(model).record(BATCH, "float64")
    assert paths(recording) == [("", 0, None), ("up", 0, ""), ("down", 0, "")]
    assert [call.kind for call in recording.calls] == ["MLP", "Linear", "Linear"]
    with jax.enable_x64(True):
        up, down = (
            (jnp.asarray(one.kernel[...], "float64"), jnp.asarray(one.bias[...], "float64"))
            for one in (model.up, model.down)
        )

        def loss(up: Any, down: Any, first: Any, last: Any) -> Any:
            hidden = jnp.asarray(BATCH, "float64") @ up[0] + up[1] + first
            out = jnp.tanh(hidden) @ down[0] + down[1] + last
            return jnp.sum(out * probe_values("", (3, 4))) / 12**0.5

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


@dataclasses.dataclass
class Output:
    hidden: Any
    cache: Any = None


class Pair(NamedTuple):
    left: Any
    right: Any


class Kinds(nnx.Module):
    """Returns arrays in every kind of container; some floats are used in no way."""

    def __call__(self, x: jax.Array, *, scale: Any) -> Any:
        tables = {"x": 2 * x, "unused": jnp.sin(x), "text": "no leaf", "none": None}
        return Output((x * scale["by"], Pair(x.argmax(-1), tables)), None)


class Containers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kinds = Kinds()
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.by_name = nnx.Dict(first=nnx.Linear(4, 4, rngs=rngs))
        self.embed = nnx.Embed(4, 4, rngs=rngs)
        self.again = self.embed

    def __call__(self, x: jax.Array) -> jax.Array:
        constant = jnp.full((), 3.0, x.dtype)
        out = self.kinds(x, scale={"by": constant, "kind": "plain"})
        scaled, (best, tables) = out.hidden
        y = self.by_name["first"](self.layers[1](self.layers[0](scaled) + self.layers[0](tables["x"])))
        return y + self.again(best)


def test_leaves_are_found_in_containers_and_calls_are_counted() -> None:
    model = Containers(nnx.Rngs(0))
    side = JaxSide(model)
    recording = side.record(BATCH)
    assert [path for path, _, _ in paths(recording)] == [
        "",
        "kinds",
        "layers/0",
        "layers/0",
        "layers/1",
        "by_name/first",
        "again",
    ]
    assert [call.number for call in recording.calls] == [0, 0, 0, 1, 0, 0, 0]
    kinds = recording.find("kinds")
    assert kinds is not None
    assert set(kinds.inputs) == {"0", "scale.by"}
    assert set(kinds.outputs) == {"hidden.0", "hidden.1.0", "hidden.1.1.x", "hidden.1.1.unused"}
    assert kinds.outputs["hidden.1.0"].dtype == np.int32
    # Integers have no gradients; floats that the loss does not depend on have zeros; inputs of no parameter have theirs.
    assert set(kinds.gradients) == {"hidden.0", "hidden.1.1.x", "hidden.1.1.unused"}
    assert not kinds.gradients["hidden.1.1.unused"].any()
    assert kinds.gradients["hidden.0"].all()
    first, second = (recording.find("layers/0", number) for number in (0, 1))
    assert first is not None and second is not None
    close(second.inputs["0"], 2 * BATCH)
    close(first.gradients[""], second.gradients[""])
    again = side.rerun(
        "float32", "kinds", 0, {"scale.by": np.float64(5)}, cotangents={"hidden.0": np.ones((3, 4))}
    )
    close(again.outputs["hidden.0"], 5 * BATCH)
    close(again.input_gradients["scale.by"], BATCH.sum())
    close(again.input_gradients["0"], np.full((3, 4), 5.0))
    assert len(side.weights()) == 7
    assert "again/embedding" in side.weights()
    assert "again/embedding" in recording.gradients


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.linear(x)))


def test_runs_leave_statistics_and_random_counts_as_they_were() -> None:
    model = Normed(nnx.Rngs(0))
    before = jax.tree.map(lambda x: x, nnx.as_pure(nnx.state(model)))
    side = JaxSide(model)
    runs = [side.record(BATCH) for _ in range(2)]
    again = side.rerun("float32", "dropout", 0, {}, cotangents={"": np.ones((3, 4))})
    training = side.train([BATCH] * 3)
    jax.tree.map(
        lambda a, b: jnp.array_equal(a, b) or pytest.fail("changed"), before, nnx.as_pure(nnx.state(model))
    )
    assert runs[0].loss == runs[1].loss == pytest.approx(training.losses[0], rel=1e-5)
    assert set(np.unique(again.input_gradients["0"])) == {0, 2}
    np.testing.assert_array_equal(again.outputs[""], runs[0].find("dropout").outputs[""])  # type: ignore[union-attr]


CONFIG = DecoderConfig(
    vocab_size=11, d_model=8, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=12, tied=True
)


def test_a_scanned_stack_gives_the_calls_of_its_layers() -> None:
    tokens = np.random.default_rng(0).integers(0, 11, (2, 6))
    sides = [
        JaxSide(Decoder(CONFIG, rngs=nnx.Rngs(0), stacked=stacked), "next_token") for stacked in (False, True)
    ]
    plain, stacked = (side.record(tokens) for side in sides)
    assert paths(plain) == paths(stacked)
    assert plain.loss == pytest.approx(stacked.loss, rel=1e-6)
    for one, other in zip(plain.calls, stacked.calls, strict=True):
        for mine, yours in (
            (one.inputs, other.inputs),
            (one.outputs, other.outputs),
            (one.gradients, other.gradients),
        ):
            assert mine.keys() == yours.keys()
            for place in mine:
                close(mine[place], yours[place], 1e-5)
    layers = [plain.gradients[f"layers/{number}/mlp/up/kernel"] for number in range(3)]
    close(stacked.gradients["layers/mlp/up/kernel"], np.stack(layers), 1e-5)
    cotangents = {"": np.random.default_rng(1).standard_normal((2, 5, 8))}
    first, second = (side.rerun("float32", "layers/1", 0, {}, cotangents=cotangents) for side in sides)
    assert [(c.path, c.parent) for c in first.calls] == [(c.path, c.parent) for c in second.calls]
    assert first.calls[0].path == "layers/1/attention_norm"
    assert first.gradients.keys() == second.gradients.keys()
    for name in first.gradients:
        close(first.gradients[name], second.gradients[name], 1e-5)
    close(first.input_gradients["0"], second.input_gradients["0"], 1e-5)


class Scanned(nnx.Module):
    """Two stacks of one shape; all layers of the first are equal. ``inner`` has the scan within its own call."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> MLP:
            return MLP(rngs)

        self.zeros = stack(rngs)
        self.layers = stack(rngs)
        nnx.update(self.zeros, jax.tree.map(jnp.zeros_like, nnx.state(self.zeros)))
        self.inner = Within(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: MLP) -> jax.Array:
            return x + layer(x)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, reverse=True)
        def back(x: jax.Array, layer: MLP) -> jax.Array:
            return x + layer(x)

        return self.inner(back(run(x, self.zeros), self.layers))


class Within(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=(0, 0), out_axes=0)
        def fill(self: Any, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        fill(self, rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def test_layers_of_nnx_stacks_have_their_numbers_in_any_order() -> None:
    model = Scanned(nnx.Rngs(0))
    recording = JaxSide(model).record(BATCH)
    assert [(path, parent) for path, _, parent in paths(recording)] == [
        ("", None),
        *[(f"zeros/{n}{sub}", f"zeros/{n}" if sub else "") for n in (0, 1) for sub in ("", "/up", "/down")],
        *[(f"layers/{n}{sub}", f"layers/{n}" if sub else "") for n in (1, 0) for sub in ("", "/up", "/down")],
        ("inner", ""),
        ("inner/0/linear", "inner"),
        ("inner/1/linear", "inner"),
    ]
    up = recording.find("layers/0/up")
    assert up is not None
    close(up.outputs[""], up.inputs["0"] @ model.layers.up.kernel[0] + model.layers.up.bias[0], 1e-5)


class Wrapped(nnx.Module):
    """Layers inside of jit, of checkpoints in every form, and of vmap."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.jitted, self.kept, self.rematted, self.vectorized = (MLP(rngs) for _ in range(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.jit(lambda layer, x: layer(x))(self.jitted, x)
        x = jax.checkpoint(self.kept)(x)
        x = nnx.remat(lambda layer, x: layer(x))(self.rematted, x)
        return jax.vmap(self.vectorized)(x)


def test_modules_inside_of_transformations_are_seen_except_inside_of_vmap() -> None:
    recording = JaxSide(Wrapped(nnx.Rngs(0))).record(BATCH)
    names = ("jitted", "kept", "rematted")
    assert paths(recording) == [
        ("", 0, None),
        *[(f"{n}{sub}", 0, n if sub else "") for n in names for sub in ("", "/up", "/down")],
    ]
    assert all(call.gradients[""].any() for call in recording.calls)
    assert all(gradient.any() for gradient in recording.gradients.values())


@dataclasses.dataclass(frozen=True)
class Config:
    compute: Any = jnp.bfloat16
    dtype: str = "float32"


class Dtyped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.config = Config()
        self.linear = nnx.Linear(4, 4, dtype=jnp.float32, rngs=rngs)
        self.buffer = nnx.Variable(jnp.full((4,), 0.1, jnp.float32))

    def __call__(self, x: jax.Array) -> Any:
        x = jax.nn.softmax(self.linear(x.astype(self.config.compute)).astype(jnp.float32)) + self.buffer[...]
        return jnp.dot(x, x.T, preferred_element_type=jnp.float32), jnp.zeros(3, self.config.dtype)


def test_in_float64_nothing_is_computed_in_less() -> None:
    model = Dtyped(nnx.Rngs(0))
    recording = JaxSide(model).record(BATCH, "float64")
    assert {x.dtype for call in recording.calls for x in call.outputs.values()} == {np.dtype("float64")}
    with jax.enable_x64(True):
        kernel, bias = (np.asarray(one[...], np.float64) for one in (model.linear.kernel, model.linear.bias))
        hidden = np.asarray(jax.nn.softmax(BATCH.astype(np.float64) @ kernel + bias)) + np.float64(
            np.float32(0.1)
        )
    close(recording.calls[0].outputs["0"], hidden @ hidden.T, 1e-14)
    assert jnp.float32 is not jnp.float64
    assert (model.config, model.linear.dtype) == (Config(), jnp.float32)


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
    with pytest.raises(KeyError, match="'up'.*float64"):
        side.rerun("float64", "up", 0, {})
    with pytest.raises(KeyError, match="'up'.*input leaves among .*'1'"):
        side.rerun("float32", "up", 0, {"1": BATCH})
    with pytest.raises(KeyError, match="'up'.*output leaves among .*'x'"):
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
        losses.append((out * probe_values("", (3, 4))).sum() / 12**0.5)
    assert (losses[0] - losses[1]) / 2 == pytest.approx((up.gradients[""] * step).sum(), rel=1e-7)


class Linen(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> Any:
        x = nn.Dense(5, dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        return {"out": nn.Dense(2)(x), "none": None}


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
        return jnp.sum(out["out"] * probe_values("out", (3, 2))) / 6**0.5

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
    expected = np.cos(hidden) * probe_values("", (3, 3)) / 3
    close(recording.calls[1].gradients[""], expected, 1e-12)
    close(recording.gradients["layers/0/w"], BATCH.T @ expected)
    assert not recording.gradients["unused"].any()
    again = side.rerun("float64", "", 0, {}, replaced={("hidden", 0): {"": np.zeros((3, 3))}})
    assert not again.outputs[""].any()
    close(again.calls[0].outputs[""], hidden)
    with pytest.raises(KeyError, match="no call 0 of module 'hidden'"):
        side.rerun("float64", "hidden", 0, {})
    assert tap("outside", parameters) is parameters


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
        JaxSide(Kinds())
    with pytest.raises(TypeError, match="model: expected .* got int"):
        JaxSide(3)
    with pytest.raises(ValueError, match="'next_token' or 'probe', got 'mse'"):
        JaxSide(MLP(nnx.Rngs(0)), "mse")
    with pytest.raises(ValueError, match="expected one of float32.*'int8'"):
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
