"""Calls of nnx models: containers, statistics, stacks, transformations, shared parameters."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bridge.parity.jax.side import JaxSide
from bridge.parity.recorded.recording import tap
from jax_impl.models.decoder import Decoder, DecoderConfig
from tests.parity.pair.jax_support import BATCH, MLP, close, paths


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
    call = recording.find("kinds")
    assert call is not None
    assert set(call.inputs) == {"0", "scale.by"}
    assert set(call.outputs) == {"hidden.0", "hidden.1.left", "hidden.1.right.x", "hidden.1.right.unused"}
    assert call.outputs["hidden.1.left"].dtype == np.int32
    # Integers have no gradients. Floats that no parameter made have, and those that the loss does not use have zeros.
    assert set(call.gradients) == {"hidden.0", "hidden.1.right.x", "hidden.1.right.unused"}
    assert not call.gradients["hidden.1.right.unused"].any()
    assert call.gradients["hidden.0"].all()
    first, second = (recording.find("layers/0", number) for number in (0, 1))
    assert first is not None
    assert second is not None
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
        self.dropout = nnx.Dropout(0.5)
        self.rngs = nnx.Rngs(1)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + 1e-3 * jax.random.normal(self.rngs(), x.shape, x.dtype)
        return self.dropout(self.norm(self.linear(x)), rngs=self.rngs)


@pytest.mark.slow
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
    # The random numbers are the same ones in float64.
    assert side.record(BATCH, "float64").loss == pytest.approx(runs[0].loss, rel=1e-5)
    np.testing.assert_array_equal(again.outputs[""], runs[0].find("dropout").outputs[""])  # type: ignore[union-attr]


CONFIG = DecoderConfig(
    vocab_size=11, d_model=8, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=12, tied=True
)


@pytest.mark.slow
def test_a_scanned_stack_gives_the_calls_of_its_layers() -> None:
    tokens = np.random.default_rng(0).integers(0, 11, (2, 6))
    sides = [
        JaxSide(Decoder(CONFIG, rngs=nnx.Rngs(0), stacked=stacked), "next_token") for stacked in (False, True)
    ]
    plain, stacked = (side.record(tokens) for side in sides)
    assert paths(plain) == paths(stacked)
    assert plain.loss == pytest.approx(stacked.loss, rel=1e-6)
    for call, other in zip(plain.calls, stacked.calls, strict=True):
        for mine, yours in (
            (call.inputs, other.inputs),
            (call.outputs, other.outputs),
            (call.gradients, other.gradients),
        ):
            assert mine.keys() == yours.keys()
            for leaf in mine:
                close(mine[leaf], yours[leaf], 1e-5)
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


@nnx.split_rngs(splits=2)
@nnx.vmap(in_axes=(0,), out_axes=0)
def stack(rngs: nnx.Rngs) -> MLP:
    """Two layers in one module, whose arrays have a dimension of layers."""
    return MLP(rngs)


class Scanned(nnx.Module):
    """Two stacks of one shape; all layers of the first are equal. ``inner`` has the scan within its own call."""

    def __init__(self, rngs: nnx.Rngs) -> None:
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


class Narrowed(nnx.Module):
    """Calls each layer of a stack after it has cast the layer's weights, and multiplied them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = stack(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(self.layers)
        for number in range(2):
            own = jax.tree.map(lambda stacked, k=number: 3 * stacked[k].astype(jnp.float32), state)
            x = nnx.merge(graphdef, own)(x)
        return x


def test_layers_whose_weights_change_before_the_call_have_their_numbers() -> None:
    recording = JaxSide(Narrowed(nnx.Rngs(0))).record(BATCH)
    named = [path for path, _, _ in paths(recording)]
    assert [path for path in named if path.count("/") == 1] == ["layers/0", "layers/1"]


@jax.checkpoint
def decorated(model: Wrapped, x: jax.Array) -> jax.Array:
    return model.last(x)


class Wrapped(nnx.Module):
    """Layers inside of jit, of checkpoints in every form, and of vmap."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.jitted, self.kept, self.rematted, self.vectorized = (MLP(rngs) for _ in range(4))
        self.last = MLP(rngs)
        self.decorated: Any = None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.jit(lambda layer, x: layer(x))(self.jitted, x)
        x = jax.checkpoint(self.kept)(x)
        x = nnx.remat(lambda layer, x: layer(x))(self.rematted, x)
        x = self.decorated(decorated(self, x))
        return jax.vmap(self.vectorized)(x)


def test_modules_inside_of_transformations_are_seen_except_inside_of_vmap() -> None:
    class Local(MLP):
        @nnx.remat
        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(x)

    model = Wrapped(nnx.Rngs(0))
    model.decorated = nnx.data(Local(nnx.Rngs(1)))
    recording = JaxSide(model).record(BATCH)
    names = ("jitted", "kept", "rematted", "last", "decorated")
    assert paths(recording) == [
        ("", 0, None),
        *[(f"{n}{sub}", 0, n if sub else "") for n in names for sub in ("", "/up", "/down")],
    ]
    assert all(call.gradients[""].any() for call in recording.calls)
    assert all(gradient.any() for gradient in recording.gradients.values())


class Shared(nnx.Module):
    """A parameter of two names, one of integers, and a tap."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.second = nnx.Linear(4, 4, rngs=rngs)
        self.second.kernel = self.first.kernel
        self.table = nnx.Param(jnp.arange(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(tap("between", self.first(x))) * self.table[...].max()


def test_shared_parameters_have_their_first_name_everywhere() -> None:
    side = JaxSide(Shared(nnx.Rngs(0)))
    recording = side.record(BATCH)
    assert set(side.weights()) == {"first/kernel", "first/bias", "second/bias", "table"}
    assert set(recording.gradients) == {"first/kernel", "first/bias", "second/bias"}
    assert [path for path, _, _ in paths(recording)] == ["", "first", "between", "second"]
    again = side.rerun("float32", "second", 0, {}, cotangents={"": np.ones((3, 4))})
    assert set(again.gradients) == {"first/kernel", "second/bias"}
    close(again.gradients["first/kernel"], np.outer(recording.calls[3].inputs["0"].sum(0), np.ones(4)))


def test_two_arrays_of_one_place_are_refused() -> None:
    def ambiguous(parameters: Any, x: jax.Array) -> Any:
        return {"a.b": x * parameters, "a": {"b": x}}

    with pytest.raises(ValueError, match=r"two arrays at 'a\.b'"):
        JaxSide((ambiguous, np.float32([1]))).record(BATCH)
