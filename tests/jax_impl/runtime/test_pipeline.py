"""Scanned layers with ``prefetch=1``: gradients are those of the whole model, and transfers are one pass apart.

The program of accelerators runs with different rows on each of two devices, which are mapped axes of one. That of
simulated devices, where reductions stay where they are, runs on those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

from jax_impl import (
    apply_linen,
    call_unit,
    data_parallel_mesh,
    fully_shard,
    make_eval_step,
    make_gradients,
    plan_sharding,
    scan_layers,
    shard_batch,
    stack_layers,
    unshard,
    variable_leaves,
)
from jax_impl.runtime.sharding_plan import ShardingPlan
from tests.support.jax_impl.dependence import loops, runs, steps_and_outputs
from tests.support.jax_impl.mapped_devices import as_accelerators
from tests.support.jax_impl.tiny import named

pytestmark = pytest.mark.filterwarnings("ignore:pjit engine")
WIDTH = 4
KINDS = ("dot_general", "all_gather", "reduce_scatter")


def random(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(0.5 * np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def block(*stack: int, seed: int) -> dict[str, jax.Array]:
    return {"w": random(*stack, WIDTH, WIDTH, seed=seed), "b": random(*stack, WIDTH, seed=seed + 1)}


def apply(block: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ block["w"] + block["b"])


def rows(count: int = 8) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(count, WIDTH)).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """``between``: from the first rows, scaled, to the last, with a pytree; or ``model`` does that with ``loss``."""

    between: Callable[..., Any] | None = None
    blocks: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    model: Callable[[], nnx.Module] | None = None

    @property
    def parameters(self) -> Any:
        if self.model is not None:
            return self.model()
        blocks = self.blocks or {"layers": block(3, seed=2)}
        return {"scale": random(WIDTH, seed=1), **blocks, "out": random(WIDTH, 3, seed=5)}

    def loss(self, model: Any, x: jax.Array) -> jax.Array:
        if self.between is None:
            return jnp.mean((model(x) - 0.3) ** 2)
        return jnp.mean((self.between(model, x * model["scale"]) @ model["out"] - 0.3) ** 2)


def in_turn(x: jax.Array, layers: Any, apply: Any = apply, **options: Any) -> jax.Array:
    return lax.scan(lambda x, layer: (call_unit(apply, layer, x), None), x, layers, **options)[0]


def simple(model: Any, x: jax.Array) -> jax.Array:
    return in_turn(x, model["layers"])


def remat(model: Any, x: jax.Array) -> jax.Array:
    body = jax.checkpoint(lambda x, layer: (call_unit(apply, layer, x), None))
    return lax.scan(body, x, model["layers"])[0]


def two_stacks(model: Any, x: jax.Array) -> jax.Array:
    """What one stacks, the other is over, and in the other direction."""
    x, between = lax.scan(lambda x, layer: (call_unit(apply, layer, x), x), x, model["layers"])

    def body(y: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return call_unit(lambda block, y, x: apply(block, y) + jnp.sin(x), layer[0], y, layer[1]), None

    return lax.scan(body, x, (model["more"], between), reverse=True)[0]


def one_stack_twice(model: Any, x: jax.Array) -> jax.Array:
    return in_turn(jnp.cos(in_turn(x, model["layers"])), model["layers"], reverse=True)


def two_units(model: Any, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return call_unit(apply, layer["mlp"], jnp.sin(call_unit(apply, layer["attention"], x))), None

    return lax.scan(body, x, model["layers"])[0]


def inside(model: Any, x: jax.Array) -> jax.Array:
    def outer(layer: Any, x: jax.Array) -> jax.Array:
        return x * layer["scale"] + call_unit(apply, layer["mlp"], x)

    return in_turn(x, model["layers"], outer)


def twice(model: Any, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return jnp.cos(call_unit(apply, layer, call_unit(apply, layer, x))), None

    return lax.scan(body, x, model["layers"])[0]


def looped(model: Any, x: jax.Array) -> jax.Array:
    def passes(x: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = in_turn(x + shift, model["layers"])
        return x, x.sum(-1, keepdims=True)

    x, sums = lax.scan(passes, x, jnp.arange(3.0) / 7)
    return x + sums.sum(0) / 9


def inputs_and_outputs(model: Any, x: jax.Array) -> jax.Array:
    """Of each pass: inputs that another unit has made, some of no gradient, and outputs that are used."""
    x = call_unit(apply, model["first"], x)
    each = jnp.stack([jnp.sin(x * i) for i in range(3)])

    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
        block, own, turn = layer
        x = call_unit(lambda block, x, own, turn: apply(block, x[:, turn]) + own, block, x, own, turn)
        return x, (x.sum(-1), own, x > 0)

    order = (jnp.arange(WIDTH) + jnp.arange(3)[:, None]) % WIDTH
    x, (sums, own, positive) = lax.scan(body, x, (model["layers"], each, order))
    return x + jnp.where(positive, sums[..., None] * own, 0).sum(0)


def beside_shared(model: Any, x: jax.Array) -> jax.Array:
    """A unit of no stack in each pass, and weights of the root."""

    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        x = call_unit(lambda block, x, scale: apply(block, x) * scale, layer, x, model["scale"])
        return jnp.sin(call_unit(apply, model["first"], x)) * model["scale"], None

    return lax.scan(body, x, model["layers"])[0]


def nothing_carried(model: Any, x: jax.Array) -> jax.Array:
    return lax.map(lambda layer: call_unit(apply, layer, x), model["layers"]).sum(0)


def chosen(model: Any, x: jax.Array) -> jax.Array:
    def body(carried: Any, layer: Any) -> tuple[Any, jax.Array]:
        x, number = carried
        return (lax.cond(number % 2 == 0, lambda: call_unit(apply, layer, x), lambda: x), number + 1), number

    return lax.scan(body, (x, 0), model["layers"])[0][0]


def by_a_carried_number(model: Any, x: jax.Array) -> jax.Array:
    def body(carried: Any, _: None) -> tuple[Any, None]:
        x, number = carried
        layer = jax.tree.map(lambda one: one[number], model["layers"])
        return (call_unit(apply, layer, x), (number + 2) % 3), None

    return lax.scan(body, (x, 0), None, length=3)[0][0]


def in_calls(model: Any, x: jax.Array) -> jax.Array:
    return jax.jit(lambda x, layers: in_turn(x, layers, jax.jit(apply)))(x, model["layers"])


def in_cond(model: Any, x: jax.Array) -> jax.Array:
    return lax.cond(jnp.array(True), lambda: in_turn(x, model["layers"]), lambda: x)


def among_others(model: Any, x: jax.Array) -> jax.Array:
    for layer in model["before"]:
        x = call_unit(apply, layer, x)
    x = in_turn(x, model["layers"])
    for layer in model["after"]:
        x = call_unit(apply, layer, x)
    return x


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, varying: bool) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, momentum=0.5) if varying else None
        self.drop = nnx.Dropout(0.5, rngs=rngs) if varying else None

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.linear(x)
        return x + jnp.tanh(self.drop(self.norm(h)) if self.drop else h)


class Stack(nnx.Module):
    def __init__(self, lifted: bool, varying: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.lifted = lifted
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = stack_layers([Layer(rngs, varying) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        if not self.lifted:
            return scan_layers(self.layers, x)
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


class Scanned(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(linen.Dense(WIDTH, name="up")(x)), None


class Lifted(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        options: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        return linen.scan(Scanned, **options)(name="layers")(x)[0]


PAIR = {"layers": {"attention": block(4, seed=10), "mlp": block(4, seed=12)}}
INSIDE = {"layers": {"scale": random(4, WIDTH, seed=9), "mlp": block(4, seed=12)}}
LISTS = {"before": [block(seed=20), block(seed=22)], "after": [block(seed=24), block(seed=26)]}
ONE_MORE = {"layers": block(3, seed=2), "first": block(seed=14)}
CASES = {
    "one": Case(simple, {"layers": block(1, seed=2)}),
    "two": Case(simple, {"layers": block(2, seed=2)}),
    "three": Case(simple),
    "reverse": Case(lambda model, x: in_turn(x, model["layers"], reverse=True)),
    "unroll": Case(lambda model, x: in_turn(x, model["layers"], unroll=2), {"layers": block(5, seed=2)}),
    "unrolled": Case(lambda model, x: in_turn(x, model["layers"], unroll=True)),
    "checkpoint": Case(remat),
    "recompute": Case(simple, options={"recompute": True}),
    "microbatches": Case(simple, options={"recompute": True}, microbatches=2),
    "optim": Case(simple, options={"strategy": "optim"}),
    "optim_grads": Case(simple, options={"strategy": "optim_grads"}),
    "frozen": Case(simple, options={"frozen": ["layers/b", "scale"]}),
    "frozen stack": Case(simple, options={"frozen": ["layers/b", "layers/w"]}),
    "bfloat16": Case(simple, options={"param_dtype": "bfloat16"}),
    "hsdp": Case(simple, options={"strategy": "hsdp"}),
    "hfsdp": Case(simple, options={"strategy": "hfsdp"}),
    "two stacks": Case(
        two_stacks,
        {"layers": block(3, seed=2), "more": block(3, seed=6)},
        {"units": ["layers/*", "more/*"], "stacked": ["layers", "more"]},
    ),
    "one stack twice": Case(one_stack_twice),
    "two units": Case(two_units, PAIR, {"units": ["layers/*/attention", "layers/*/mlp"]}),
    "inside": Case(inside, INSIDE, {"units": ["layers/*", "layers/*/mlp"]}),
    "inside, recomputed": Case(inside, INSIDE, {"units": ["layers/*", "layers/*/mlp"], "recompute": True}),
    "twice": Case(twice),
    "looped": Case(looped),
    "inputs and outputs": Case(inputs_and_outputs, ONE_MORE, {"units": ["layers/*", "first"]}),
    "beside shared": Case(beside_shared, ONE_MORE, {"units": ["layers/*", "first"]}),
    "nothing carried": Case(nothing_carried),
    "cond": Case(chosen),
    "carried number": Case(by_a_carried_number),
    "calls": Case(in_calls),
    "in cond": Case(in_cond),
    "lists": Case(among_others, {**LISTS, "layers": block(3, seed=2)}, {"units": ["*/*"]}),
    "linen": Case(
        lambda model, x: apply_linen(Lifted(), {"params": {"layers": model["layers"]}}, x),
        {"layers": {"up": {"kernel": random(3, WIDTH, WIDTH, seed=2), "bias": random(3, WIDTH, seed=3)}}},
    ),
    "scan_layers": Case(model=lambda: Stack(False)),
    "nnx.scan": Case(model=lambda: Stack(True)),
}
FAST = {"two", "recompute", "unroll", "optim_grads", "frozen", "two stacks", "inside", "inputs and outputs"}
FAST |= {"linen", "nothing carried", "looped", "nnx.scan", "lists"}
FAST_SIMULATED = {"two stacks", "inside", "carried number"}


def some(fast: set[str]) -> list[Any]:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def mesh_of(case: Case) -> Any:
    two = str(case.options.get("strategy", "")).startswith("h")
    return data_parallel_mesh({"dp_outer": 2, "dp": 2} if two else 2)


def assert_right(case: Case, *, engine: str = "shard_map") -> None:
    model, whole = case.parameters, rows()
    options = {"units": ["layers/*"], "stacked": ["layers"], **case.options}
    plan, weights = fully_shard(model, mesh_of(case), engine=engine, prefetch=1, **options)
    function = jax.jit(make_gradients(plan, case.loss, case.microbatches))
    batch = shard_batch(plan, whole, case.microbatches)
    value, gradients, _ = function(weights, batch, variable_leaves(model))
    found = unshard(plan, gradients)
    if isinstance(model, nnx.Module):
        graphdef, state, rest = nnx.split(model, nnx.Param, ...)
        loss = jax.value_and_grad(lambda s, x: case.loss(nnx.merge(graphdef, s, rest), x))
        expected, alone = loss(state, whole)
        flat = named(alone)
    else:
        expected, alone = jax.value_and_grad(case.loss)(model, whole)
        flat = {
            jax.tree_util.keystr(path, simple=True, separator="/"): one
            for path, one in jax.tree.leaves_with_path(alone)
        }
    rough = "param_dtype" in case.options
    np.testing.assert_allclose(value, expected, rtol=2e-2 if rough else 1e-5)
    assert found.keys() == flat.keys() - set(case.options.get("frozen", ()))
    for path, one in found.items():
        scale = float(jnp.abs(flat[path]).max())
        np.testing.assert_allclose(
            one, flat[path], rtol=0, atol=(5e-2 if rough else 1e-4) * scale, err_msg=path
        )


@pytest.mark.parametrize("name", some(FAST))
def test_gradients_are_those_of_the_whole_model(monkeypatch, name):
    as_accelerators(monkeypatch)
    assert_right(CASES[name])


@pytest.mark.parametrize("name", some(FAST_SIMULATED))
def test_gradients_on_simulated_devices_are_those_of_the_whole_model(name):
    assert_right(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("name", ["three", "recompute", "optim_grads", "two stacks", "inside"])
def test_gradients_of_the_pjit_engine_are_those_of_the_whole_model(monkeypatch, name, chained):
    # One device, where no collectives meet.
    monkeypatch.setattr(ShardingPlan, "chained", chained)
    assert_right(CASES[name], engine="pjit")


def traced(monkeypatch: Any, name: str, engine: str = "shard_map", **options: Any) -> Any:
    """The program of accelerators, of two devices."""
    monkeypatch.setattr(ShardingPlan, "chained", False)
    case = CASES[name]
    options = {"units": ["layers/*"], "stacked": ["layers"], "prefetch": 1, **case.options, **options}
    plan = plan_sharding(case.parameters, mesh_of(case), engine=engine, **options)
    weights = {key: jax.ShapeDtypeStruct(one.shape, one.dtype) for key, one in plan.arrays.items()}
    return jax.make_jaxpr(make_gradients(plan, case.loss))(weights, rows()).jaxpr


@pytest.mark.parametrize("recompute", [False, True])
def test_in_a_pass_transfers_run_beside_a_layer_that_is_not_theirs(monkeypatch, recompute):
    program = traced(monkeypatch, "unroll", recompute=recompute)
    whole = (20,)
    found = [
        (loop, passes) for loop, passes in loops(program) if list(runs(loop.params["jaxpr"].jaxpr, KINDS[1]))
    ]
    (forward, times), (backward, times_back) = found
    # A pass of each stands apart: the last one of forward, and the first and the last of backward.
    assert (times, times_back) == (4, 3)
    for loop in (forward, backward):
        body = loop.params["jaxpr"].jaxpr
        found, outputs = steps_and_outputs(body, KINDS)
        kinds = Counter(step.kind for step in found)
        assert kinds["all_gather"] == 1
        assert kinds["reduce_scatter"] == int(loop is backward)
        products = {step.number for step in found if step.kind == "dot_general"}
        transfers = {step.number for step in found} - products
        rows_in = {i for i, v in enumerate(body.invars) if v.aval.shape == (4, WIDTH)}
        for step in found:
            if step.kind == "dot_general":
                assert step.before.isdisjoint(transfers)
            else:
                assert step.before.isdisjoint(products)
            if step.kind == "all_gather":
                assert not rows_in.isdisjoint(step.inputs)
        carries = loop.params["num_carry"] if "num_carry" in loop.params else len(body.outvars)
        # What the next pass begins with is there when all of this one is done; its weights are the only whole ones.
        begun = [i for i, v in enumerate(body.outvars[:carries]) if v.aval.shape in ((4, WIDTH), whole)]
        assert all(outputs[i] >= products | transfers for i in begun if outputs[i])
        assert sum(v.aval.shape == whole for v in body.outvars[:carries]) == 1
        assert any(outputs[i] for i in begun)


@pytest.mark.parametrize("name", ["two", "unroll", "two stacks", "inside"])
def test_each_layer_is_gathered_twice_and_reduced_once(monkeypatch, name):
    counted = []
    for prefetch in (0, 1):
        program = traced(monkeypatch, name, prefetch=prefetch)
        found: Counter[Any] = Counter()
        for kind, phase in (("all_gather", "gather"), ("reduce_scatter", "reduce")):
            for equation, scope, times in runs(program, kind):
                unit = scope.partition(f"/{phase}")
                assert unit[1], scope
                found[kind, equation.outvars[0].aval.shape, "layers" in unit[0] or "more" in unit[0]] += times
        counted.append(found)
    assert counted[0] == counted[1]


def test_what_is_refused_is_named_with_its_line():
    model = CASES["three"].parameters
    plan, weights = fully_shard(
        model, data_parallel_mesh(2), units=["layers/*"], stacked=["layers"], prefetch=1
    )

    def outside(model: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, jax.Array]:
            penalty = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(nnx.state(layer)))
            return call_unit(apply, layer, x), penalty

        x, penalties = lax.scan(body, x, model["layers"])
        return jnp.mean(x) + jnp.sum(penalties)

    def uneven(model: Any, x: jax.Array) -> jax.Array:
        counted = x[:, 0] > 0
        return jnp.sum(in_turn(x, model["layers"]).sum(-1) * counted) / jnp.sum(counted)

    batch = shard_batch(plan, rows())
    with pytest.raises(
        ValueError, match=r"unit 'layers': .*, got integer_pow at .*test_pipeline\.py:\d+: outside"
    ):
        jax.make_jaxpr(make_gradients(plan, outside))(weights, batch)
    with pytest.raises(ValueError, match="quotient by a sum over the batch"):
        jax.make_jaxpr(make_gradients(plan, uneven))(weights, batch)


def test_random_streams_statistics_and_callbacks_are_those_of_loops_as_they_are(monkeypatch):
    as_accelerators(monkeypatch)
    model = Stack(lifted=False, varying=True)
    found, seen = [], []

    def loss(model: Any, x: jax.Array) -> jax.Array:
        x = model(x)
        return jnp.mean((x - 0.3) ** 2)

    for prefetch in (0, 1):
        plan, weights = fully_shard(
            model, data_parallel_mesh(2), units=["layers/*"], stacked=["layers"], prefetch=prefetch
        )
        results = jax.jit(make_gradients(plan, loss))(
            weights, shard_batch(plan, rows()), variable_leaves(model)
        )
        leaves = [
            jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for x in jax.tree.leaves(results)
        ]
        found.append(leaves)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

    model = CASES["three"].parameters

    def noted(block: Any, x: jax.Array, number: jax.Array) -> jax.Array:
        jax.debug.callback(lambda number: seen.append(int(number)), number, ordered=True)
        return apply(block, x)

    def printing(model: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return call_unit(noted, layer[0], x, layer[1]), None

        return jnp.mean(lax.scan(body, x, (model["layers"], jnp.arange(3)))[0])

    monkeypatch.undo()
    monkeypatch.setattr(ShardingPlan, "chained", False)
    plan, weights = fully_shard(
        model, data_parallel_mesh(1), units=["layers/*"], stacked=["layers"], prefetch=1
    )
    jax.block_until_ready(jax.jit(make_gradients(plan, printing))(weights, shard_batch(plan, rows())))
    jax.effects_barrier()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("chained", [False, True])
def test_evaluation_is_that_of_the_whole_model(monkeypatch, chained):
    monkeypatch.setattr(ShardingPlan, "chained", chained)
    model = CASES["three"].parameters
    plan, weights = fully_shard(
        model, data_parallel_mesh(2 if chained else 1), units=["layers/*"], stacked=["layers"], prefetch=1
    )

    def repeated(model: Any, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 2, lambda _, x: in_turn(x, model["layers"]), x * model["scale"])

    expected = repeated(model, rows())
    np.testing.assert_allclose(
        make_eval_step(plan, repeated)(weights, rows()), expected, rtol=1e-5, atol=1e-6
    )
