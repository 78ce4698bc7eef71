"""What a loss reads of a unit outside of its calls, or writes: true, followed, or refused by name.

Models train as plain optax does on the whole batch, in float64 to 1e-12; every row is different.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import singledispatch
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.traverse_util import flatten_dict
from jax.tree_util import tree_flatten_with_path, tree_leaves
from jax.tree_util import tree_leaves as leaves_by_another_name

from jax_impl import (
    apply_linen,
    call_unit,
    data_parallel_mesh,
    fully_shard,
    init_sharded,
    init_state,
    load_checkpoint,
    make_eval_step,
    make_train_step,
    save_checkpoint,
    unshard,
)
from tests.support.jax_impl.zoo import Chain

DIM = 4
ENGINES = ["shard_map", "pjit"]
pytestmark = pytest.mark.filterwarnings("ignore:pjit engine")


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(8, DIM))


def plain(model: Any, loss: Callable[..., Any], batch: Any) -> tuple[list[float], list[np.ndarray]]:
    """Losses and weights of two steps of SGD without sharding."""
    if isinstance(model, nnx.Module):
        graphdef, weights, rest = nnx.split(model, nnx.Param, ...)
        of = lambda weights: loss(nnx.merge(graphdef, weights, rest, copy=True), batch)  # noqa: E731
    else:
        weights, rest = eqx.partition(model, eqx.is_array)
        of = lambda weights: loss(eqx.combine(weights, rest), batch)  # noqa: E731
    step = jax.jit(jax.value_and_grad(of))
    losses = []
    for _ in range(2):
        value, gradients = step(weights)
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
        losses.append(float(value))
    return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(weights)]


def sharded(
    model: Any, loss: Callable[..., Any], batch: Any, engine: str, **options: Any
) -> tuple[list[float], list[np.ndarray]]:
    plan, weights = fully_shard(model, data_parallel_mesh(2), engine=engine, **options)
    assert len(plan.units) > 1
    optimizer = optax.sgd(0.1)
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, loss, optimizer)
    losses = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    trained = plan.merge(unshard(plan, state))
    trained = (
        nnx.state(trained, nnx.Param)
        if isinstance(trained, nnx.Module)
        else eqx.filter(trained, eqx.is_array)
    )
    return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(trained)]


def assert_trains(model: Any, loss: Callable[..., Any], engine: str = "shard_map", **options: Any) -> None:
    expected, of_shards = plain(model, loss, rows()), sharded(model, loss, rows(), engine, **options)
    np.testing.assert_allclose(of_shards[0], expected[0], rtol=1e-12)
    for ours, theirs in zip(of_shards[1], expected[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-13)


def refused(model: Any, loss: Callable[..., Any], match: str, **options: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        sharded(model, loss, rows(), "shard_map", **options)


def linear(rngs: nnx.Rngs, out: int = DIM) -> nnx.Linear:
    return nnx.Linear(DIM, out, rngs=rngs, param_dtype=jnp.float64)


class Block(nnx.Module):
    causal = False

    def __init__(self, rngs: nnx.Rngs, residual: bool = False) -> None:
        self.up, self.residual, self.mode, self.calls = linear(rngs), residual, "train", 0
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.gate = nnx.Param(jnp.full((DIM,), 0.7))

    @property
    def doubled(self) -> bool:
        return self.up.in_features > DIM

    @property
    def weight_sum(self) -> jax.Array:
        return self.up.kernel[...].sum()

    def widths(self) -> dict[str, int]:
        return {"in": self.up.in_features}

    def set_mode_to(self, mode: str) -> None:
        self.mode = mode

    def reset(self) -> None:
        del self.new

    def label(self) -> str:
        return "block"

    def encode(self, x: jax.Array) -> tuple[jax.Array, str]:
        return jnp.tanh(self.up(x)), self.mode

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls += 1
        x = jnp.tanh(self.up(self.drop(x)) * self.gate[...])
        return -x if self.mode == "eval" else x


class Other(Block):
    """Attributes in place of what are methods of its base."""

    reset = None

    @property
    def label(self) -> str:
        return "other"


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs, True), Other(rngs), Block(rngs)])
        self.layers = nnx.List([linear(rngs), nnx.Dropout(0.5, rngs=rngs), linear(rngs)])
        self.out = linear(rngs, 1)


def net() -> Net:
    return Net(nnx.Rngs(0))


UNITS = {"units": ["blocks/*", "layers/*"]}


@singledispatch
def factor(block: Any) -> float:
    return 3.0


@factor.register
def _(block: Other) -> float:
    return 5.0


def flags(m: Net, x: jax.Array) -> jax.Array:
    """An attribute, a class attribute, properties, static methods' results, getattr, hasattr, vars, shapes, dtypes."""
    m.blocks[2].mode = "other"
    for block in m.blocks:
        y = block(x)
        x = x + y if block.residual else y
        if block.causal or block.doubled or block.up.use_bias is not True or hasattr(block, "absent"):
            x = x * 7
        if getattr(block, "scale", None) is not None or "residual" not in vars(block) or block.gate.ndim != 1:
            x = x * 9
        x = x * (1.5 if block.reset is None else 1.0) * (0.7 if block.label == "other" else 1.0)
        x = x * block.widths()["in"] / block.up.kernel.shape[0]
        x = x + (block.up.kernel.dtype == jnp.float64) * (block.up.out_features - block.gate.size)
        y, mode = block.encode(x)
        # A part of a unit whose class is a unit's, too.
        x = x + y if mode == "train" else x + block.up(x)
    return jnp.mean(m.out(x) ** 2)


def classes(m: Net, x: jax.Array) -> jax.Array:
    """isinstance, type, match, singledispatch, equality, lists of units, callable, modules below."""
    for block in m.blocks:
        match block:
            case Other():
                x = x + 2 * block(x)
            case Block():
                x = x - block(x)
        x = x * factor(block) / 10
        if type(block) is Block and {Block: True, Other: False}[type(block)] and block.__class__ is Block:
            x = x + 1.0
        x = x * 0.2 * (1.0 + (block == m.blocks[0]) + (block in list(m.blocks)) + callable(block))
    for layer in m.layers:
        x = layer(x, deterministic=True) if isinstance(layer, nnx.Dropout) else layer(x)
    counted = [type(module).__name__ for _, module in nnx.iter_modules(m)]
    parameters = nnx.to_flat_state(nnx.state(m, nnx.Param))
    numbers = len(parameters) + sum(variable.size for _, variable in parameters)
    return jnp.mean(m.out(x) ** 2) * len(counted) * counted.count("Linear") / numbers


def written(m: Net, x: jax.Array) -> jax.Array:
    """Attributes that are set on units and below, by attribute, by method, by flax, by a unit's own call."""
    m.eval()
    m.blocks[0].mode = "eval"
    m.blocks[1].set_mode_to("eval")
    m.set_attributes(nnx.Dropout, rate=0.9)
    m.blocks[2].drop.rate, m.blocks[2].drop.deterministic = 0.0, False
    m.blocks[0].up.bias, m.blocks[0].up.use_bias = None, False
    m.blocks[1].gate.set_value(jnp.full((DIM,), 0.3))
    m.blocks[2].new = 3.0
    for block in m.blocks:
        x = block(block(x))
        x = x * block.calls * (2.0 if block.mode == "eval" else 1.0) * getattr(block, "new", 1.0)
    m.blocks[1].set_attributes(mode="train")
    m.blocks[2].reset()
    x = x * getattr(m.blocks[2], "new", 0.5)
    return jnp.mean(m.out(m.blocks[1](x)) ** 2)


@pytest.mark.parametrize("loss", [flags, classes, written])
@pytest.mark.parametrize("engine", ENGINES)
def test_readings_and_writings_of_units_are_true(loss, engine):
    assert_trains(net(), loss, engine, **UNITS)


@pytest.mark.parametrize("recompute", [False, True])
def test_an_outer_unit_reads_what_is_true_of_units_inside(recompute):
    class Outer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.inner, self.mine = Block(rngs, True), linear(rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            self.inner.mode = "eval" if isinstance(self.inner, Block) else "train"
            return x + self.inner(self.mine(x)) if self.inner.residual else x

    class Holding(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.outer, self.out = Outer(rngs), linear(rngs, 1)

    def loss(m: Any, x: jax.Array) -> jax.Array:
        y = m.outer(x)
        return jnp.mean(m.out(y if m.outer.inner.mode == "eval" and m.outer.inner.calls == 1 else x) ** 2)

    assert_trains(Holding(nnx.Rngs(0)), loss, units=["outer", "outer/inner"], recompute=recompute)


def test_classes_are_as_before_after_a_trace_and_after_an_error():
    before = {cls: dict(vars(cls)) for cls in (Block, Other, nnx.Linear, nnx.Dropout)}
    sharded(net(), classes, rows(), "shard_map", **UNITS)
    refused(net(), lambda m, x: m.blocks[0].gate.sum(), "parameter 'gate'", **UNITS)
    for cls, attributes in before.items():
        assert dict(vars(cls)) == attributes


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (lambda m: m.blocks[0].gate * 2, r"__mul__ of parameter 'gate' of unit 'blocks/0'"),
        (lambda m: jnp.sum(m.blocks[0].up.kernel), r"parameter 'up/kernel' of unit 'blocks/0'"),
        (lambda m: m.blocks[0].weight_sum, r"parameter 'up/kernel' of unit 'blocks/0'"),
        (
            lambda m: sum(x.sum() for x in jax.tree.leaves(nnx.state(m, lambda path, _: "gate" in path))),
            "unit 'blocks/0': .* got reduce_sum",
        ),
        (
            lambda m: jax.tree.leaves(nnx.grad(lambda m: m.blocks[0](jnp.ones(DIM)).sum())(m))[0].sum(),
            "expected only first derivatives",
        ),
    ],
)
def test_uses_of_a_units_weights_outside_are_refused_by_name(use, match):
    refused(net(), lambda m, x: jnp.mean(m.blocks[0](x)) + jnp.sum(use(m)), match, **UNITS)


def by_path(change: Callable[[Any], Any]) -> Callable[[Any, Any], jax.Array]:
    """A loss that changes biases, which are not the first parameters of their units."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        named = jax.tree_util.tree_map_with_path
        params = named(lambda path, leaf: change(leaf) if "bias" in str(path) else leaf, params)
        return jnp.mean(
            call_unit(lambda p, x: jnp.tanh(x @ p["a_kernel"] + p["bias"]), params["layers"][0], x) ** 2
        )

    return loss


def tree() -> dict[str, Any]:
    a, b = np.random.default_rng(1).normal(size=(2, DIM, DIM))
    return {
        "layers": [{"a_kernel": jnp.asarray(k), "bias": jnp.ones(DIM)} for k in (a, b)],
        "out": jnp.ones(DIM),
    }


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda leaf: leaf.astype(jnp.float32),
            r"float32\[4\] in place of float64\[4\] of parameter 'bias'.*to cast",
        ),
        (
            lambda leaf: leaf[:2],
            r"float64\[2\] in place of float64\[4\] of parameter 'bias' of unit 'layers/0'",
        ),
        (lambda leaf: leaf * 2, "unit 'layers/0': .* got mul at"),
        (lambda leaf: leaf[::-1], "unit 'layers/0': .* got rev at"),
        (jnp.zeros_like, "unit 'layers/0': .* got replacements for some"),
        (jax.lax.stop_gradient, "unit 'layers/0': expected jax.lax.stop_gradient on all .* frozen="),
    ],
)
def test_what_becomes_of_some_parameters_of_a_unit_is_seen(change, match):
    refused(tree(), by_path(change), match, units=["layers/*"])


def layered(params: Any, x: jax.Array) -> jax.Array:
    run = lambda p, x: jnp.tanh(x @ p["a_kernel"] + p["bias"])  # noqa: E731
    for layer in params["layers"]:
        x = call_unit(run, layer, x)
    return jnp.mean((x @ params["out"]) ** 2)


def counted(params: Any, x: jax.Array) -> jax.Array:
    """Numbers of parameters, as programs count them, and the paths that they know."""
    sizes = [
        sum(leaf.size for leaf in tree_leaves(params)),
        sum(jax.tree.leaves(jax.tree.map(jnp.size, params))),
        jax.tree.reduce(lambda n, leaf: n + leaf.size, params, 0),
        optax.tree.size(params),
        jax.tree.reduce(lambda n, leaf: n + leaf.size, [params], 0, lambda node: hasattr(node, "shape")),
        len(jax.tree.leaves_with_path(params, lambda path, _: len(path) == 2, is_leaf_takes_path=True)),
        sum(
            leaf.size
            for path, leaf in tree_flatten_with_path(params)[0]
            if path[-1].key in ("a_kernel", "bias", "out")
        ),
    ]
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
    leaves, structure = jax.tree.flatten(params)
    params = jax.tree.unflatten(structure, leaves)
    biases = sum(name.endswith("['bias']") for name in names)
    return layered(params, x) * sum(sizes) / 100 * len(leaves) * len(names) * biases


def masked(mask: Any, *, first: bool) -> Callable[[Any, Any], jax.Array]:
    """A loss that stops gradients of what a tree from outside names."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        stop = lambda leaf, trains: leaf if trains else jax.lax.stop_gradient(leaf)  # noqa: E731
        if first:
            return layered(jax.tree.map(lambda trains, leaf: stop(leaf, trains), mask, params), x)
        return layered(jax.tree.map(stop, params, mask), x)

    return loss


WHOLE_LAYERS = {
    "layers": [dict.fromkeys(["a_kernel", "bias"], trains) for trains in (True, False)],
    "out": True,
}


# A function of jax.tree that a module does not have by itself stays JAX's own.
UNSEEN = {"tree_map": jax.tree.map}


@pytest.mark.parametrize(
    "loss",
    [counted, masked(WHOLE_LAYERS, first=True), masked(WHOLE_LAYERS, first=False)],
    ids=["counts", "mask first", "mask last"],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_functions_of_jax_tree_see_one_leaf_a_parameter(loss, engine):
    before = [vars(module)["tree_leaves"] for module in (jax.tree_util, sys.modules[__name__])]
    assert_trains(tree(), loss, engine, units=["layers/*"])
    assert [vars(module)["tree_leaves"] for module in (jax.tree_util, sys.modules[__name__])] == before


def test_parameters_count_once_where_a_module_has_the_function_by_another_name():
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return layered(params, x) * sum(leaf.size for leaf in leaves_by_another_name(params)) / 100

    assert_trains(tree(), loss, "shard_map", units=["layers/*"])


def test_parameters_of_modules_count_once():
    def loss(m: Any, x: jax.Array) -> jax.Array:
        return flags(m, x) * sum(leaf.size for leaf in jax.tree.leaves(nnx.state(m, nnx.Param))) / 100

    assert_trains(net(), loss, **UNITS)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        # By the last entry of the path, which a bias and nothing else has.
        (
            lambda params: jax.tree.map_with_path(
                lambda path, leaf: (
                    jax.lax.stop_gradient(leaf) if getattr(path[-1], "key", "") == "bias" else leaf
                ),
                params,
            ),
            "unit 'layers/0': expected jax.lax.stop_gradient on all .* frozen=",
        ),
        (
            lambda params: {**params, "layers": [jax.tree.map(jnp.add, *params["layers"])]},
            r"jax.tree.map of parameter 'a_kernel' of unit 'layers/1' and .*stacked=",
        ),
        (
            lambda params: jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, params, tree()),
            "use of parameter 'a_kernel' of unit 'layers/0': .*call_unit",
        ),
        (
            lambda params: UNSEEN["tree_map"](lambda a, b: a if b else -a, params, WHOLE_LAYERS),
            "expected no library or renamed function to combine .*jax.tree.map.*frozen=",
        ),
    ],
)
def test_what_maps_make_of_a_units_parameters_is_refused_in_words(change, match):
    refused(tree(), lambda params, x: layered(change(params), x), match, units=["layers/*"])


def test_parameters_of_two_units_that_become_one_are_refused_by_name():
    def mixed(params: Any, x: jax.Array) -> jax.Array:
        first, second = params["layers"]
        run = lambda p, x: jnp.tanh(x @ p["a_kernel"] + p["bias"])  # noqa: E731
        return jnp.mean(call_unit(run, {**first, "bias": second["bias"]}, x) ** 2)

    match = "unit 'layers/0': expected its own parameters, got 'bias' of unit 'layers/1'"
    refused(tree(), mixed, match, units=["layers/*"])


def stack() -> dict[str, Any]:
    kernels = np.random.default_rng(1).normal(size=(2, DIM, DIM))
    layers = {"a_kernel": jnp.asarray(kernels), "bias": jnp.ones((2, DIM)), "skip": jnp.zeros((2, DIM, DIM))}
    return {"layers": layers, "out": jnp.ones(DIM)}


def scanned(change: Callable[[Any], Any], *, inside: bool, wrap: Any) -> Callable[[Any, Any], jax.Array]:
    """A loss that changes the last parameter of a stack, of all layers at once or in each pass of a loop."""
    named = jax.tree_util.tree_map_with_path
    changed = lambda tree: named(lambda path, x: change(x) if "skip" in str(path) else x, tree)  # noqa: E731

    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        def run(p: Any, x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ (p["a_kernel"] + p["skip"]) + p["bias"])

        return call_unit(run, changed(layer) if inside else layer, x), None

    def loss(params: Any, x: jax.Array) -> jax.Array:
        layers = params["layers"] if inside else changed(params["layers"])
        return jnp.mean((jax.lax.scan(wrap(body), x, layers)[0] @ params["out"]) ** 2)

    return loss


@pytest.mark.fast_cases(
    "mul-False-scan", "others-True-scan", "stopped-True-remat", "rev-False-scan", "swapaxes-False-scan"
)
@pytest.mark.parametrize(
    "wrap", [pytest.param(lambda f: f, id="scan"), pytest.param(jax.checkpoint, id="remat")]
)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param(lambda x: x * 2, "got mul at", id="mul"),
        pytest.param(jnp.zeros_like, "got replacements for some", id="others"),
        pytest.param(jax.lax.stop_gradient, "on all of its parameters or on none", id="stopped"),
        pytest.param(lambda x: x[..., ::-1], "got rev at", id="rev"),
        pytest.param(lambda x: jnp.roll(x, 1, -1), "got slice at", id="roll"),
        pytest.param(lambda x: jnp.where(x.ndim > 9, 0, x), "got select_n at", id="where"),
        pytest.param(lambda x: x.swapaxes(-1, -2), "got transpose at", id="swapaxes"),
    ],
)
def test_what_becomes_of_some_parameters_of_a_stack_is_seen(change, match, inside, wrap):
    loss = scanned(change, inside=inside, wrap=wrap)
    refused(stack(), loss, f"unit 'layers': .* {match}", units=["layers/*"], stacked=["layers"])


@pytest.mark.fast_cases("shard_map-reversed")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda layers: jax.tree.map(lambda x: x[::-1], layers), id="reversed"),
        pytest.param(lambda layers: jax.tree.map(lambda x: jnp.stack([x[1], x[0]]), layers), id="stacked"),
        pytest.param(lambda layers: jax.tree.map(lambda x: jnp.roll(x, 1, 0), layers), id="rolled"),
        pytest.param(
            lambda layers: jax.tree.map(lambda x: jnp.concatenate([x[:1], x[jnp.array([1, 0])]]), layers),
            id="taken",
        ),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_layers_of_a_stack_may_come_in_any_order(change, engine):
    plain_loss = scanned(lambda x: x, inside=False, wrap=lambda f: f)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return plain_loss({**params, "layers": change(params["layers"])}, x)

    assert_trains(stack(), loss, engine, units=["layers/*"], stacked=["layers"])


def test_a_dictionary_that_is_a_unit_is_one():
    def loss(params: Any, x: jax.Array) -> jax.Array:
        flat = flatten_dict({"layers": dict(enumerate(params["layers"]))})
        assert {path[-1] for path in flat} == {"a_kernel", "bias"}
        for layer in params["layers"]:
            assert isinstance(layer, dict)
            assert (len(layer), "bias" in layer, layer.get("scale")) == (2, True, None)
            assert isinstance(layer["bias"], jax.Array)
            assert layer["bias"].shape == (DIM,)
            x = call_unit(lambda p, x: jnp.tanh(x @ p["a_kernel"] + p["bias"]), layer, x)
        # A part of a unit is one, too.
        x = call_unit(lambda kernel, x: x @ kernel, params["layers"][1]["a_kernel"], x)
        stopped = jax.lax.stop_gradient(params["layers"][0])
        return jnp.mean((x + call_unit(lambda p: p["bias"], stopped)) @ params["out"])

    for engine in ENGINES:
        assert_trains(tree(), loss, engine, units=["layers/*"])


class Layer(eqx.Module):
    linear: eqx.nn.Linear
    drop: eqx.nn.Dropout
    residual: bool = eqx.field(static=True)
    scale: float
    bias: jax.Array | None

    def __init__(self, key: jax.Array, residual: bool) -> None:
        self.linear, self.drop = eqx.nn.Linear(DIM, DIM, key=key), eqx.nn.Dropout(0.9)
        self.residual, self.scale, self.bias = residual, 0.5, jnp.ones(DIM) if residual else None

    @property
    def width(self) -> int:
        return self.linear.in_features

    def name(self) -> str:
        return type(self).__name__

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.tanh(self.drop(self.linear(x) * self.scale, key=jax.random.key(0)))
        return y if self.bias is None else y + self.bias


class Model(eqx.Module):
    layers: list[Layer]
    out: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            y = layer(x)
            x = x + y if layer.residual else y
            if type(layer) is Layer and layer.name() == "Layer" and isinstance(layer, eqx.Module):
                x = x * layer.width / layer.linear.weight.shape[1]
            if layer.bias is not None and eqx.is_array(layer.bias):
                x = x * 2
            names = [field.name for field in dataclasses.fields(layer)]
            x = x * len(names) / 5 * layer.scale * (1 + layer.linear.use_bias) * callable(layer)
        return x @ self.out


@pytest.mark.parametrize("engine", ENGINES)
def test_readings_of_equinox_modules_are_true(engine):
    model = Model(
        [Layer(key, i == 0) for i, key in enumerate(jax.random.split(jax.random.key(0), 3))], jnp.ones(DIM)
    )

    def loss(model: Model, x: jax.Array) -> jax.Array:
        model = eqx.nn.inference_mode(model)
        model = eqx.tree_at(lambda m: m.layers[1].scale, model, 0.25)
        return jnp.mean(jax.vmap(model)(x) ** 2)

    assert_trains(model, loss, engine)
    refused(
        model,
        lambda m, x: loss(eqx.tree_at(lambda m: m.layers[0].linear.weight, m, replace_fn=lambda w: w * 2), x),
        "__mul__ of parameter 'linear/weight' of unit 'layers/0'",
    )


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = jnp.tanh(linen.Dense(DIM, param_dtype=jnp.float64)(x))
        return linen.Dense(1, use_bias=False, param_dtype=jnp.float64)(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_readings_of_linen_parameters_are_true(engine):
    model = LinenNet()
    params = model.init(jax.random.key(0), rows())["params"]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        biases = [path for path in flatten_dict(params) if path[-1] == "bias"]
        widths = sum(unit["kernel"].size for unit in params.values() if isinstance(unit, dict))
        y = apply_linen(model, {"params": params}, x)
        return jnp.mean(y**2) * len(biases) * widths * sum("bias" in unit for unit in params.values())

    assert_trains(params, loss, engine, units=["Dense_*"])

    def decayed(params: Any, x: jax.Array) -> jax.Array:
        kernels = [value for path, value in flatten_dict(params).items() if path[-1] == "kernel"]
        return loss(params, x) + sum(jnp.sum(kernel**2) for kernel in kernels)

    refused(params, decayed, "parameter 'kernel' of unit 'Dense_0'", units=["Dense_*"])


class Table(nnx.Module):
    def __init__(self) -> None:
        self.values = np.sin(np.arange(DIM))


class Rotating(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, table: Table, remat: bool = False) -> None:
        self.up, self.table, self.own, self.remat = linear(rngs), table, jnp.cos(jnp.arange(DIM)), remat

    def __call__(self, x: jax.Array) -> jax.Array:
        def run(self: Any, x: jax.Array) -> jax.Array:
            return jnp.tanh(self.up(x * self.own) + self.table.values)

        return nnx.remat(run)(self, x) if self.remat else run(self, x)


class WithTables(nnx.Module):
    """Plain arrays at the root, in units, and in a module that all of them share."""

    def __init__(self, rngs: nnx.Rngs, remat: bool = False) -> None:
        self.table, self.positions = Table(), jnp.arange(DIM) / DIM
        self.blocks = nnx.List([Rotating(rngs, self.table, remat) for _ in range(2)])
        self.out = linear(rngs, 1)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.positions * self.table.values * self.blocks[1].own
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def mean_square(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_plain_arrays_of_modules_are_constants(engine, remat):
    assert_trains(WithTables(nnx.Rngs(0), remat), mean_square, engine)


class Router(nnx.Module):
    """Leaves the loss of its choices in a variable, as it is custom for experts."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.gate, self.calls = linear(rngs), linear(rngs, 3), nnx.Variable(jnp.zeros((), jnp.int32))
        self.balance = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        chances = jax.nn.softmax(self.gate(x))
        self.balance[...], self.calls[...] = jnp.mean(chances**2), self.calls[...] + 1
        return x + jnp.tanh(self.up(x)) * chances.max(-1, keepdims=True)


@pytest.mark.fast_cases("False-shard_map", "True-pjit")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_units_leave_in_variables_has_gradients(engine, recompute):
    def loss(model: Chain, x: jax.Array) -> jax.Array:
        return mean_square(model, x) + 3 * sum(block.balance[...] for block in model.layers)

    rngs = nnx.Rngs(0)
    model = Chain([Router(rngs) for _ in range(2)], out=linear(rngs, 1))
    assert_trains(model, loss, engine, variables={"*/balance": "mean"}, recompute=recompute)


def test_plain_arrays_are_not_saved_and_are_there_after_a_load(tmp_path):
    model, optimizer = WithTables(nnx.Rngs(0)), optax.adam(0.1)
    plan, weights = fully_shard(model, data_parallel_mesh(2))
    step = make_train_step(plan, mean_square, optimizer)
    state, _ = step(init_state(plan, weights, optimizer), rows())
    save_checkpoint(tmp_path / "run", plan, state, {})
    other, _ = fully_shard(model, data_parallel_mesh(4), engine="pjit")
    assert not plan.variables
    assert not any("own" in path or "table" in path for path in plan.parameters)
    loaded = load_checkpoint(tmp_path / "run", other, optimizer).state
    merged = other.merge(unshard(other, loaded))
    assert merged.blocks[0].table is merged.table
    outputs = make_eval_step(other, lambda model, x: model(x))(loaded, rows())
    np.testing.assert_allclose(outputs, merged(rows()), rtol=1e-12)
    make_train_step(other, mean_square, optimizer)(loaded, rows())


def test_plain_arrays_that_a_loss_changes_are_refused():
    def loss(model: Any, x: jax.Array) -> jax.Array:
        model.positions = model.positions + 1
        return mean_square(model, x)

    refused(WithTables(nnx.Rngs(0)), loss, "array 'positions': expected a constant.* make it an nnx.Variable")

    def inside(model: Any, x: jax.Array) -> jax.Array:
        call_unit(lambda block: setattr(block, "own", block.own * 2), model.blocks[0])
        return mean_square(model, x)

    refused(WithTables(nnx.Rngs(0)), inside, "array 'blocks/0/own': expected a constant")


def test_tables_of_numpy_are_born_with_sharded_weights_and_those_of_jax_are_refused():
    class Numbered(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.table, self.out = Table(), linear(rngs, 1)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(x * self.table.values)

    plan, weights, _ = init_sharded(lambda: Numbered(nnx.Rngs(0)), data_parallel_mesh(2), units=["out"])
    outputs = make_eval_step(plan, lambda model, x: model(x))(weights, rows())
    np.testing.assert_allclose(outputs, Numbered(nnx.Rngs(0))(rows()), rtol=1e-12)
    with pytest.raises(ValueError, match="array 'blocks/0/own': expected a NumPy array"):
        init_sharded(lambda: WithTables(nnx.Rngs(0)), data_parallel_mesh(2))


@pytest.mark.parametrize("engine", ENGINES)
def test_derivatives_by_inputs_through_units_are_refused_in_words(engine):
    def forces(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(jax.grad(lambda row: model(row[None])[0, 0]))(x) ** 2)

    def divergence(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.jvp(model, (x,), (jnp.ones_like(x),))[1] ** 2)

    for loss in (forces, divergence):
        with pytest.raises(ValueError, match="loss: expected only first derivatives"):
            sharded(WithTables(nnx.Rngs(0)), loss, rows(), engine)


def test_constraints_over_data_axes_are_refused_in_words_or_followed():
    spec = jax.sharding.PartitionSpec("dp", None)

    def constrained(model: Any, x: jax.Array) -> jax.Array:
        return mean_square(model, jax.lax.with_sharding_constraint(x, spec))

    model = WithTables(nnx.Rngs(0))
    refused(
        model,
        constrained,
        r"with_sharding_constraint: expected no data-parallel axis \['dp'\].*engine='pjit'",
    )
    with pytest.raises(
        ValueError, match=r"expected a mesh with the PartitionSpec: .*NamedSharding.*set_mesh"
    ):
        sharded(model, constrained, rows(), "pjit")
    with jax.set_mesh(data_parallel_mesh(2)):
        of_shards = sharded(model, constrained, rows(), "pjit")
    np.testing.assert_allclose(of_shards[0], plain(model, mean_square, rows())[0], rtol=1e-12)
