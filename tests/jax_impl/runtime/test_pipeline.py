"""Loops over layers whose transfers have moved into other passes: gradients, and what stands where in the program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_impl import (
    data_parallel_mesh,
    fully_shard,
    make_eval_step,
    make_gradients,
    scan_layers,
    shard_batch,
    stack_layers,
    unshard,
)
from jax_impl.modules.seal import jaxpr_of
from jax_impl.runtime.sharding_plan import ShardingPlan
from tests.support.jax_impl.dependence import steps
from tests.support.jax_impl.tiny import named

WIDTH = 6
SLOW = pytest.mark.slow
# Of steps under optim_grads_params; every layer has other weights, so that a wrong one shows.
COLLECTIVES = ("all_gather", "reduce_scatter")


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, normalized: bool) -> None:
        self.w = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 2)
        self.b = nnx.Param(jax.random.normal(rngs.params(), (WIDTH,)))
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs) if normalized else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + jnp.tanh(x @ self.w[...] + self.b[...])
        return x if self.norm is None else self.norm(x)


class Stacks(nnx.Module):
    """``ways``: of each stack how it is run; ``layers``: of each stack how many."""

    def __init__(self, rngs: nnx.Rngs, ways: str, layers: int, normalized: bool = False) -> None:
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH))
        self.ways = ways.split(", ")
        self.length = layers
        for i in range(len(self.ways)):
            setattr(self, f"stack{i}", stack_layers([Layer(rngs, normalized) for _ in range(layers)]))
        self.head = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, 3)))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x * self.scale[...]
        for i, way in enumerate(self.ways):
            x = self.run(way, getattr(self, f"stack{i}"), x)
        return x @ self.head[...]

    def run(self, way: str, layers: nnx.Module, x: jax.Array) -> jax.Array:
        def call(x: Any, layer: Any) -> Any:
            return layer(x)

        scan: Any = nnx.scan
        if way == "scan_layers":
            return scan_layers(layers, x)
        if way == "stacked outputs":

            def both(x: Any, layer: Any) -> Any:
                x = layer(x)
                return x, x.sum(-1)

            x, sums = scan(both, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(x, layers)
            return x * jnp.tanh(sums.mean(0))[:, None]
        if way == "stacked inputs":

            def added(x: Any, layer: Any, more: Any) -> Any:
                return layer(x + more)

            more = jnp.stack([x * k for k in range(self.length)])
            return scan(added, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)(x, layers, more)
        options: dict[str, Any] = {"reverse": {"reverse": True}, "unroll": {"unroll": 2}}.get(way, {})
        step = nnx.remat(call) if way == "remat" else call
        return scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **options)(x, layers)


def loss(model: Any, rows: jax.Array) -> jax.Array:
    return jnp.mean((model(rows) - 1.0) ** 2)


def sharded(model: Stacks, devices: int, **options: Any) -> tuple[ShardingPlan, Any]:
    stacks = [f"stack{i}" for i in range(len(model.ways))]
    return fully_shard(
        model,
        data_parallel_mesh(devices),
        prefetch=1,
        units=[f"{name}/*" for name in stacks],
        stacked=stacks,
        **options,
    )


def rows_of(devices: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(12 * devices, WIDTH)).astype(np.float32)


CASES = [
    pytest.param(1, "scan_layers", 3, {}, id="one device"),
    pytest.param(1, "scan_layers", 2, {"recompute": True}, id="recomputed, two layers"),
    pytest.param(1, "reverse, stacked outputs", 4, {}, id="two stacks, one in reverse, stacked outputs"),
    pytest.param(1, "stacked inputs", 3, {}, id="stacked inputs with gradients"),
    pytest.param(1, "scan_layers", 5, {"engine": "pjit"}, id="pjit"),
    pytest.param(2, "scan_layers", 4, {}, id="two devices"),
    pytest.param(1, "scan_layers", 1, {}, id="one layer", marks=SLOW),
    pytest.param(1, "unroll", 5, {}, id="unrolled by two", marks=SLOW),
    pytest.param(1, "remat", 4, {}, id="checkpointed by the model", marks=SLOW),
    pytest.param(1, "scan_layers", 4, {"strategy": "optim_grads"}, id="reductions only", marks=SLOW),
    pytest.param(1, "scan_layers", 4, {"strategy": "no_shard"}, id="no_shard", marks=SLOW),
    pytest.param(
        2, "reverse, stacked outputs", 3, {"recompute": True}, id="two devices, two stacks", marks=SLOW
    ),
    pytest.param(2, "scan_layers", 4, {"engine": "pjit"}, id="two devices, pjit", marks=SLOW),
]


@pytest.mark.parametrize(("devices", "ways", "layers", "options"), CASES)
def test_gradients_are_those_of_the_whole_model(monkeypatch, devices, ways, layers, options):
    if devices == 1:
        # The program of accelerators. On several simulated devices its collectives could meet and hang.
        monkeypatch.setattr(ShardingPlan, "chained", False)
    model = Stacks(nnx.Rngs(1), ways, layers)
    plan, weights = sharded(model, devices, **options)
    rows = rows_of(devices)
    found = jax.jit(make_gradients(plan, loss, microbatches=3))(weights, shard_batch(plan, rows, 3))
    graphdef, state = nnx.split(model)
    value, expected = jax.value_and_grad(lambda s: loss(nnx.merge(graphdef, s), jnp.asarray(rows)))(state)
    np.testing.assert_allclose(found[0], value, rtol=1e-6)
    own = unshard(plan, found[1])
    for path, one in named(expected).items():
        scale = float(jnp.abs(one).max())
        np.testing.assert_allclose(own[path], one, rtol=0, atol=1e-5 * scale, err_msg=path)


def test_variables_and_low_precision_pass_through_moved_loops(monkeypatch):
    monkeypatch.setattr(ShardingPlan, "chained", False)
    found = []
    for prefetch in (0, 1):
        model = Stacks(nnx.Rngs(1), "scan_layers", 3, normalized=True)
        plan, weights = fully_shard(
            model,
            data_parallel_mesh(1),
            prefetch=prefetch,
            units=["stack0/*"],
            stacked=["stack0"],
            param_dtype="bfloat16",
        )
        variables = dict(plan.given_variables or {})
        step = jax.jit(make_gradients(plan, loss, microbatches=2))
        found.append(step(weights, shard_batch(plan, rows_of(1), 2), variables))
    assert any("stack0/norm" in path for path in found[0][2])
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(one, other)


def test_callbacks_in_a_layer_run_once_a_layer_and_in_order(monkeypatch):
    monkeypatch.setattr(ShardingPlan, "chained", False)
    model = Stacks(nnx.Rngs(1), "scan_layers", 4)
    seen: list[float] = []
    call = Layer.__call__

    def told(self: Layer, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: seen.append(float(value)), self.b[...][0], ordered=False)
        return call(self, x)

    monkeypatch.setattr(Layer, "__call__", told)
    plan, weights = sharded(model, 1)
    jax.block_until_ready(jax.jit(make_gradients(plan, loss))(weights, shard_batch(plan, rows_of(1))))
    jax.effects_barrier()
    np.testing.assert_allclose(seen, model.stack0.b[...][:, 0])


def test_a_step_without_backward_gives_what_the_model_gives(monkeypatch):
    monkeypatch.setattr(ShardingPlan, "chained", False)
    model = Stacks(nnx.Rngs(1), "scan_layers, reverse", 4)
    plan, weights = sharded(model, 1)
    found = make_eval_step(plan, lambda model, rows: model(rows))(weights, rows_of(1))
    np.testing.assert_allclose(found, model(jnp.asarray(rows_of(1))), rtol=1e-5, atol=1e-6)


def loops(jaxpr: Any) -> Iterator[Any]:
    """Loops with collectives, in the order of the program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan" and any(text in str(equation) for text in COLLECTIVES):
            yield equation
            continue
        for value in equation.params.values():
            if jaxpr_of(value) is not None:
                yield from loops(jaxpr_of(value))


def counted(jaxpr: Any, times: int = 1) -> dict[str, int]:
    """How often collectives run, loops multiplied out."""
    found = dict.fromkeys(COLLECTIVES, 0)
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in found:
            found[name] += times
        each = times * (equation.params["length"] if name == "scan" else 1)
        for value in equation.params.values():
            if jaxpr_of(value) is not None:
                for key, count in counted(jaxpr_of(value), each).items():
                    found[key] += count
    return found


def traced(monkeypatch: Any, layers: int, **options: Any) -> Any:
    monkeypatch.setattr(ShardingPlan, "chained", False)
    plan, weights = sharded(Stacks(nnx.Rngs(1), "scan_layers", layers), 4, **options)
    return jax.make_jaxpr(make_gradients(plan, loss))(weights, shard_batch(plan, rows_of(4))).jaxpr


@pytest.mark.parametrize("recompute", [False, True])
def test_no_transfer_is_lost_or_added(monkeypatch, recompute):
    for layers in (2, 5):
        # The root's, forward and backward, and each layer's.
        expected = {"all_gather": 2 * (layers + 1), "reduce_scatter": layers + 1}
        assert counted(traced(monkeypatch, layers, recompute=recompute)) == expected


@pytest.mark.parametrize("recompute", [False, True])
def test_in_a_pass_transfers_are_those_of_other_layers(monkeypatch, recompute):
    forward, backward = loops(traced(monkeypatch, 5, recompute=recompute))
    kinds = ("dot_general", "optimization_barrier", *COLLECTIVES)
    products = {}
    for name, loop in (("forward", forward), ("backward", backward)):
        found = steps(jaxpr_of(loop.params["jaxpr"]), kinds)
        moved = [step for step in found if step.kind in COLLECTIVES]
        own = [step for step in found if step.kind == "dot_general"]
        products[name] = len(own)
        assert [step.kind for step in moved] == list(COLLECTIVES[: 1 + (name == "backward")])
        for transfer in moved:
            assert not any(transfer.number in step.before or step.number in transfer.before for step in own)
        barriers = {step.number for step in found if step.kind == "optimization_barrier"}
        # The next layer's gather waits for this layer's input, which a barrier holds together with its weights.
        assert moved[0].before & barriers
    assert products == {"forward": 1, "backward": 3 if recompute else 2}


def test_profiles_name_moved_transfers_by_their_unit(monkeypatch):
    for loop, kinds in zip(loops(traced(monkeypatch, 4)), (["gather"], ["gather", "reduce"]), strict=True):
        found = steps(jaxpr_of(loop.params["jaxpr"]), COLLECTIVES)
        for step, kind in zip(found, kinds, strict=True):
            assert "stack0" in step.scope
            assert f"{kind}" in step.scope


def test_misuses_are_still_named(monkeypatch):
    monkeypatch.setattr(ShardingPlan, "chained", False)
    plan, weights = sharded(Stacks(nnx.Rngs(1), "scan_layers", 3), 4)
    rows = shard_batch(plan, rows_of(4))

    def decayed(model: Any, rows: jax.Array) -> jax.Array:
        return loss(model, rows) + sum(jnp.sum(x**2) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))

    with pytest.raises(
        ValueError, match=r"unit 'stack0': expected its weights in its own calls only, got .*test_pipe"
    ):
        make_gradients(plan, decayed)(weights, rows)

    def masked(model: Any, rows: jax.Array) -> jax.Array:
        mask = (rows[:, 0] > 0).astype(jnp.float32)
        return jnp.sum(((model(rows) - 1.0) ** 2).mean(-1) * mask) / jnp.sum(mask)

    with pytest.raises(ValueError, match="a quotient by a sum over the batch"):
        make_gradients(plan, masked)(weights, rows)
