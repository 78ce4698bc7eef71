"""What programs do with a plan, on a mesh with a model axis: the same as without the axis, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_impl import (
    ShardingPlan,
    TrainState,
    abstract_state,
    data_parallel_mesh,
    find_nonfinite,
    fully_shard,
    init_state,
    layout_report,
    make_eval_step,
    make_train_step,
    memory_report,
    stack_layers,
    unshard,
    watch_nonfinite_outputs,
)
from jax_impl.api import shard_weights
from jax_impl.train_state import shard_batch
from tests.support.jax_impl.zoo import Chain, Mlp

SLOW = pytest.mark.slow
ROWS = np.random.default_rng(0).normal(size=(8, 8))
CUT = {"layers/*/up": "colwise", "layers/*/down": "rowwise"}
CUT_NOISY = {**CUT, "up": "colwise", "down": "rowwise"}


def block(seed: int) -> Mlp:
    return Mlp(8, 16, rngs=nnx.Rngs(seed), param_dtype=jnp.float64, dtype=jnp.float64)


class Plain(Chain):
    def __init__(self) -> None:
        super().__init__([block(0), block(1)])


class Noisy(Plain):
    """Random numbers of each data-parallel rank, and batch statistics over all of them, of features that are cut."""

    def __init__(self, axis: str | None = "dp") -> None:
        super().__init__()
        options: dict[str, Any] = {"rngs": nnx.Rngs(2), "param_dtype": jnp.float64, "dtype": jnp.float64}
        self.up, self.down = nnx.Linear(8, 16, **options), nnx.Linear(16, 8, **options)
        self.norm = nnx.BatchNorm(16, axis_name=axis, **options)
        # flax's are float32 whatever the other options say, and JAX is about to refuse float64 values for them.
        for statistic in (self.norm.mean, self.norm.var):
            statistic.set_value(statistic.get_value().astype(jnp.float64))
        self.dropout = nnx.Dropout(0.25, rngs=nnx.Rngs(dropout=3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) + self.down(self.dropout(self.norm(self.up(x))))


class Ensemble(nnx.Module):
    def __init__(self) -> None:
        self.layers = stack_layers([block(seed) for seed in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.vmap(lambda block, x: block(x), in_axes=(0, None))(self.layers, x).mean(0)


def loss(model: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    return jnp.mean((model(rows) - 1) ** 2)


def loss_by_row(model: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(rows) - 1) ** 2)


def planned(
    make: Callable[[], nnx.Module], tensors: int, optimizer: Any, **options: Any
) -> tuple[ShardingPlan, TrainState]:
    sizes = {"dp": 2, "tp": tensors} if tensors > 1 else {"dp": 2}
    parallel: dict[str, Any] = {"parallel": options.pop("cut", CUT)} if tensors > 1 else {}
    options.pop("cut", None)
    plan, weights = fully_shard(make(), data_parallel_mesh(sizes), **parallel, **options)
    return plan, init_state(plan, weights, optimizer)


def both(
    make: Callable[[], nnx.Module],
    loss: Any,
    optimizer: Any,
    scanned: bool = False,
    steps: int = 2,
    tolerance: float = 1e-12,
    **options: Any,
) -> None:
    """Steps on 2 x 2 devices equal those on 2 without the model axis."""
    weights = []
    for tensors in (2, 1):
        plan, state = planned(make, tensors, optimizer, **options)
        step = make_train_step(plan, loss, optimizer)
        if scanned and tensors > 1:
            batches = jnp.stack([ROWS] * steps)
            state, _ = jax.jit(lambda state, rows, step=step: jax.lax.scan(step, state, rows))(state, batches)
        else:
            for _ in range(steps):
                state, _ = step(state, ROWS)
        for value in state.variables.values():
            assert value.sharding.is_fully_replicated
        weights.append(
            {p: x for p, x in unshard(plan, state).items() if jnp.issubdtype(x.dtype, jnp.floating)}
        )
    for path, value in weights[1].items():
        np.testing.assert_allclose(weights[0][path], value, rtol=0, atol=tolerance, err_msg=path)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"make": Noisy, "cut": CUT_NOISY}, id="dropout-batchnorm"),
        pytest.param(
            {"make": Noisy, "cut": CUT_NOISY, "scanned": True},
            id="steps-in-one-program",
            marks=SLOW,
        ),
        pytest.param({"make": Ensemble, "stacked": ["layers"]}, id="ensemble"),
        pytest.param(
            {"make": Ensemble, "stacked": ["layers"], "engine": "pjit"}, id="ensemble-pjit", marks=SLOW
        ),
        pytest.param({"loss": loss_by_row}, id="vmap"),
        pytest.param({"frozen": ["layers/0/*"]}, id="frozen", marks=SLOW),
    ],
)
def test_models_of_all_kinds(options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        both(**{"make": Plain, "loss": loss, "optimizer": optax.sgd(0.1), **options})


@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_a_loop_of_steps_or_evaluations_keeps_statistics_whole(engine: str, tensors: int) -> None:
    """The compiler would shard the loop's statistics like their features, and a checkpoint would refuse them."""
    with jax.enable_x64(True):
        axis = "dp" if engine == "shard_map" else None
        plan, state = planned(lambda: Noisy(axis), tensors, optax.sgd(0.1), cut=CUT_NOISY, engine=engine)
        evaluate = make_eval_step(plan, loss, mutable=True)
        for step in (make_train_step(plan, loss, optax.sgd(0.1)), lambda *of: evaluate(*of)[::-1]):
            loop = jax.jit(lambda state, rows, step=step: jax.lax.scan(step, state, rows))
            after, _ = loop(state, jnp.stack([ROWS] * 2))
            for path, value in after.variables.items():
                assert value.sharding.is_equivalent_to(plan.variable_sharding(path), value.ndim), path


@pytest.mark.fast_cases("lamb-shard_map", "mask-pjit")
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), id="clip", marks=SLOW
        ),
        pytest.param(
            lambda: optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), id="mask"
        ),
        pytest.param(lambda: optax.lamb(1e-2), id="lamb"),
        pytest.param(lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8), id="adafactor", marks=SLOW),
        pytest.param(
            lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)), id="noise", marks=SLOW
        ),
    ],
)
def test_optimizers_train_as_without_the_axis(make: Callable[[], Any], engine: str) -> None:
    with jax.enable_x64(True):
        both(Plain, loss, make(), engine=engine, units=["layers/*/up", "layers/*/down"])


@pytest.mark.slow
def test_noise_is_that_of_the_models_order_also_for_a_cut_vector_alone_in_its_array() -> None:
    with jax.enable_x64(True):
        optimizer = optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1))
        options: dict[str, Any] = {"units": ["layers/*/up"], "frozen": ["*/kernel", "layers/*/down/bias"]}
        both(Plain, loss, optimizer, cut={"layers/*/up/bias": "colwise"}, **options)


def test_a_program_of_a_whole_step_is_compiled_ahead() -> None:
    with jax.enable_x64(True):
        optimizer = optax.adam(1e-2)
        plan, state = planned(Plain, 2, optimizer)
        step = make_train_step(plan, loss, optimizer, donate=False)
        _, expected = step(state, ROWS)
        shapes = jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype)
        compiled = step.lower(abstract_state(plan, optimizer), shapes).compile()
        after, metrics = compiled(state, shard_batch(plan, ROWS))
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-12)
        for key, array in after.weights.items():
            plan.check_array(key, array)


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_reports_count_each_part_on_its_device(engine: str) -> None:
    with jax.enable_x64(True):
        optimizer = optax.adam(1e-2)
        plan, state = planned(Plain, 2, optimizer, engine=engine)
        report = layout_report(plan)
        assert report.numel == sum(x.size for x in unshard(plan, state.weights).values())
        assert "over tp" in str(report)
        # Over four devices: all but the second bias once, that one on both devices of the model axis.
        once, twice = 2 * (8 * 16 + 16 + 16 * 8), 2 * 8
        devices = memory_report(plan, state).devices
        assert sum(device.main_weights for device in devices) == 8 * (once + 2 * twice)
        for array in zip(*(x.addressable_shards for x in state.weights.values()), strict=True):
            assert sum(shard.data.nbytes for shard in array) == report.nbytes


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_what_is_not_finite_is_found_in_its_own_rows(engine: str) -> None:
    with jax.enable_x64(True):
        plan, state = planned(Plain, 2, optax.sgd(0.1), engine=engine)
        values = {path: np.array(x) for path, x in unshard(plan, state.weights).items()}
        values["layers/1/down/kernel"][11, 3] = np.nan
        (report,) = find_nonfinite(plan, shard_weights(plan, values))
        assert (report.name, report.nan, report.rows) == ("layers/1/down/kernel", 1, ((11,),))

        def broken(model: Any, rows: jax.Array) -> jax.Array:
            return jnp.mean(jnp.log(model(rows) * 0 - 1))

        with watch_nonfinite_outputs(plan) as outputs:
            make_train_step(plan, broken, optax.sgd(0.1))(state, ROWS)
        assert [(report.unit, len(report.devices)) for report in outputs] == [("", 4)]
