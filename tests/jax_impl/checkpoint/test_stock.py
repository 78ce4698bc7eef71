"""Checkpoints that ordinary JAX programs saved by stock Orbax: what is loaded trains on as the program itself does."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState as FlaxTrainState

from bridge.formats import CheckpointError
from jax_impl import (
    LoadedCheckpoint,
    ShardingPlan,
    apply_linen,
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    main_weight_adamw,
    make_train_step,
    plan_sharding,
    unshard,
    variable_leaves,
)

ENGINES = ["shard_map", "pjit"]
ROWS, WIDTH, STEPS = 8, 12, 3
# A large eps keeps Adam from magnifying the rounding of sums where gradients are tiny.
ADAMW = {"learning_rate": 1e-2, "b1": 0.8, "b2": 0.9, "eps": 1e-3, "weight_decay": 0.1}


@functools.cache
def adamw() -> optax.GradientTransformation:
    return optax.adamw(**ADAMW)


@functools.cache
def clipped() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.2), optax.adamw(**ADAMW))


class Net(nnx.Module):
    """Two blocks, and variables that are no parameters."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(3)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.0, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 5, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.head(self.dropout(x))


def rows(seed: int) -> jax.Array:
    """``[ROWS, WIDTH]``, every row, and so every device's, another."""
    return jax.random.normal(jax.random.key(seed), (ROWS, WIDTH))


def loss(model: Net, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 0.5) ** 2)


class Program:
    """An unsharded training loop in plain nnx and optax."""

    def __init__(self, optimizer: optax.GradientTransformation) -> None:
        self.model = Net()
        self.optimizer = nnx.Optimizer(self.model, optimizer, wrt=nnx.Param)

    def train(self, first: int, count: int) -> list[float]:
        losses = []
        for seed in range(first, first + count):
            value, gradients = nnx.value_and_grad(loss)(self.model, rows(seed))
            self.optimizer.update(self.model, gradients)
            losses.append(float(value))
        return losses

    @property
    def parameters(self) -> dict[str, Any]:
        return nnx.to_pure_dict(nnx.state(self.model, nnx.Param))

    def forget(self) -> None:
        """Start over with the optimizer, not with the weights."""
        self.optimizer = nnx.Optimizer(self.model, self.optimizer.tx, wrt=nnx.Param)


def trained(optimizer: optax.GradientTransformation) -> Program:
    program = Program(optimizer)
    program.train(0, 2)
    return program


def tuples(program: Program) -> Any:
    """The optax state with arrays only, as a loop without nnx has it."""
    return nnx.as_pure(program.optimizer.opt_state)


def flax_train_state(program: Program) -> FlaxTrainState:
    return FlaxTrainState(
        step=2,
        apply_fn=None,
        params=program.parameters,
        tx=program.optimizer.tx,
        opt_state=tuples(program),
    )


FORMS: dict[str, Any] = {
    "params": lambda p: {"params": p.parameters},
    "bare": lambda p: p.parameters,
    "nnx parameters": lambda p: nnx.state(p.model, nnx.Param),
    "nnx state": lambda p: nnx.state(p.model),
    "linen variables": lambda p: {"params": {"params": p.parameters}},
    "train state": flax_train_state,
    "inside": lambda p: {"model": flax_train_state(p)},
    "nnx model and optimizer": lambda p: {"model": nnx.state(p.model), "optimizer": nnx.state(p.optimizer)},
    "nnx params and opt_state": lambda p: {
        "params": nnx.state(p.model, nnx.Param),
        "opt_state": nnx.state(p.optimizer),
    },
}
WEIGHTS_ONLY = ["params", "bare", "nnx parameters", "nnx state", "linen variables"]
WITH_OPTIMIZER = [form for form in FORMS if form not in WEIGHTS_ONLY]


def save(path: Path, tree: Any) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


@functools.cache
def plan_of(engine: str) -> ShardingPlan:
    return plan_sharding(nnx.eval_shape(Net), data_parallel_mesh(4), units=["blocks/*"], engine=engine)


@functools.cache
def step_of(engine: str, optimizer: optax.GradientTransformation) -> Any:
    return make_train_step(plan_of(engine), loss, optimizer)


def assert_goes_on_as(
    program: Program, loaded: LoadedCheckpoint, engine: str, optimizer: optax.GradientTransformation
) -> None:
    """The weights' bits, a forward, and steps."""
    plan, state = plan_of(engine), loaded.state
    values = unshard(plan, state.weights)
    expected = nnx.to_flat_state(nnx.state(program.model, nnx.Param))
    for key, variable in expected:
        np.testing.assert_array_equal(values["/".join(map(str, key))], variable.get_raw_value())
    local = {path: value.addressable_shards[0].data for path, value in state.variables.items()}
    model = plan.merge(values, local)
    np.testing.assert_allclose(model(rows(9)), program.model(rows(9)), rtol=1e-6, atol=1e-7)
    losses = []
    for seed in range(2, 2 + STEPS):
        state, metrics = step_of(engine, optimizer)(state, rows(seed))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, program.train(2, STEPS), rtol=1e-6)


def _each(forms: list[str], fast: str) -> list[Any]:
    return [
        pytest.param(form, engine, marks=() if (form, engine) == (fast, "shard_map") else pytest.mark.slow)
        for form in forms
        for engine in ENGINES
    ]


@pytest.mark.parametrize(("form", "engine"), _each(WEIGHTS_ONLY, "params"))
def test_weights_alone_are_loaded(tmp_path: Path, form: str, engine: str) -> None:
    program = trained(clipped())
    path = save(tmp_path / "c", FORMS[form](program))
    given = variable_leaves(Net())
    loaded = load_checkpoint(path, plan_of(engine), variables=given)
    assert loaded.state.opt_state is None
    assert len(loaded.fresh) == (0 if form == "nnx state" else 2)
    program.forget()
    state = init_state(plan_of(engine), loaded.state.weights, clipped(), loaded.state.variables)
    assert_goes_on_as(program, LoadedCheckpoint(state, {}, {}), engine, clipped())
    # The same in one call: moments are fresh ones.
    whole = load_checkpoint(path, plan_of(engine), clipped(), strict=False, variables=given)
    for found, expected in zip(
        jax.tree.leaves(whole.state.opt_state),
        jax.tree.leaves(init_state(plan_of(engine), whole.state.weights, clipped(), given).opt_state),
        strict=True,
    ):
        assert found.sharding.is_equivalent_to(expected.sharding, found.ndim)
        np.testing.assert_array_equal(found, expected)
    assert {name for name in whole.fresh if "variables" not in name} >= {
        "opt_state/1/0/count",
        "opt_state/1/0/mu/blocks/1/kernel",
    }
    with pytest.raises(CheckpointError, match=r"strict=False.*Missing: .*opt_state/1/0/count"):
        load_checkpoint(path, plan_of(engine), clipped(), variables=given)


@pytest.mark.parametrize(("form", "engine"), _each(WITH_OPTIMIZER, "nnx model and optimizer"))
def test_weights_and_moments_are_loaded(tmp_path: Path, form: str, engine: str) -> None:
    program = trained(clipped())
    path = save(tmp_path / "c", FORMS[form](program))
    loaded = load_checkpoint(path, plan_of(engine), clipped(), variables=variable_leaves(Net()))
    assert loaded.train == {"step": 2}
    assert all(name.startswith("variables/") for name in loaded.fresh)
    assert loaded.ignored == ()
    assert_goes_on_as(program, loaded, engine, clipped())


# Optimizers of whole parameters, of other trees than the model's, and with weights of their own.
FURTHER: dict[str, Any] = {
    "muon": lambda: optax.contrib.muon(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "decay of matrices": lambda: optax.adamw(
        **ADAMW, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
    ),
    "several steps": lambda: optax.MultiSteps(optax.adamw(**ADAMW), 2).gradient_transformation(),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", FURTHER)
def test_states_of_other_optimizers_are_loaded(tmp_path: Path, kind: str, engine: str) -> None:
    optimizer = FURTHER[kind]()
    program = trained(optimizer)
    path = save(tmp_path / "c", flax_train_state(program))
    for strict in (False, True):
        loaded = load_checkpoint(
            path, plan_of(engine), optimizer, strict=strict, variables=variable_leaves(Net())
        )
        assert all(name.startswith("variables/") for name in loaded.fresh)
        assert loaded.ignored == ()
    assert_goes_on_as(program, loaded, engine, optimizer)


class Block(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(linen.Dense(WIDTH)(x))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = Block()(x)
        return linen.Dense(5)(x)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_linen_program_goes_on(tmp_path: Path, engine: str) -> None:
    net = LinenNet()

    def linen_loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((apply_linen(net, {"params": params}, x) - 0.5) ** 2)

    def alone(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((net.apply({"params": params}, x) - 0.5) ** 2)

    @jax.jit
    def train(state: FlaxTrainState, x: jax.Array) -> tuple[FlaxTrainState, jax.Array]:
        value, gradients = jax.value_and_grad(alone)(state.params, x)
        return state.apply_gradients(grads=gradients), value

    params = net.init(jax.random.key(2), rows(0))["params"]
    state = FlaxTrainState.create(apply_fn=net.apply, params=params, tx=clipped())
    for seed in range(2):
        state, _ = train(state, rows(seed))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(2, args=ocp.args.StandardSave(state))
    plan, _ = fully_shard(params, data_parallel_mesh(4), units=["Block_*"], engine=engine)
    loaded = load_checkpoint(tmp_path, plan, clipped())
    assert (loaded.train, loaded.fresh, loaded.ignored) == ({"step": 2}, (), ())
    whole = plan.merge(unshard(plan, loaded.state.weights))
    np.testing.assert_array_equal(
        net.apply({"params": whole}, rows(9)), net.apply({"params": state.params}, rows(9))
    )
    step, sharded = make_train_step(plan, linen_loss, clipped()), loaded.state
    for seed in range(2, 2 + STEPS):
        sharded, metrics = step(sharded, rows(seed))
        state, value = train(state, rows(seed))
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)


def test_variables_that_a_checkpoint_has_are_its_own(tmp_path: Path) -> None:
    program = trained(adamw())
    program.model.dropout.rngs.count[...] = jnp.uint32(7)
    path = save(tmp_path / "c", nnx.state(program.model))
    loaded = load_checkpoint(path, plan_of("shard_map"), variables=variable_leaves(Net()))
    assert int(loaded.state.variables["dropout/rngs/count"]) == 7
    assert loaded.fresh == ()
    key = variable_leaves(program.model)["dropout/rngs/key"]
    found = loaded.state.variables["dropout/rngs/key"]
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(key))


def without(tree: Mapping[Any, Any], *path: Any) -> dict[Any, Any]:
    first, *rest = path
    if not rest:
        return {key: value for key, value in tree.items() if key != first}
    return {key: without(value, *rest) if key == first else value for key, value in tree.items()}


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    program, plan = trained(adamw()), plan_of("shard_map")
    given = variable_leaves(Net())
    parameters = save(tmp_path / "a", {"params": program.parameters})
    for strict in (True, False):
        with pytest.raises(
            CheckpointError, match=r"variables=jax_impl.variable_leaves\(model\) gives .*variables/dropout"
        ):
            load_checkpoint(parameters, plan, strict=strict)
    fewer = save(tmp_path / "b", {"params": without(program.parameters, "head", "kernel")})
    changed = {**program.parameters, "head": {"kernel": jnp.zeros((WIDTH, 4))}}
    other = save(tmp_path / "c", {"params": changed})
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"checkpoint\? Missing: params/head/kernel; unexpected"):
            load_checkpoint(fewer, plan, strict=strict, variables=given)
        with pytest.raises(CheckpointError, match=r"another shape .*head/kernel \(expected \(12, 5\), got"):
            load_checkpoint(other, plan, strict=strict, variables=given)
    more = save(tmp_path / "d", {"params": program.parameters, "ema": program.parameters})
    with pytest.raises(CheckpointError, match=r"strict=False .*unexpected: ema/blocks/0/bias"):
        load_checkpoint(more, plan, variables=given)
    ignored = load_checkpoint(more, plan, strict=False, variables=given).ignored
    assert len(ignored) == 5
    assert all(name.startswith("ema/") for name in ignored)
    with pytest.raises(ValueError, match="variables: expected"):
        load_checkpoint(parameters, plan, variables={})


def _is_adam(state: Any) -> bool:
    return isinstance(state, optax.ScaleByAdamState)


CHANGES: dict[str, tuple[Any, Any]] = {
    "chain to adamw": (clipped, adamw),
    "adamw to chain": (adamw, clipped),
    "chain to main weights": (clipped, functools.cache(lambda: main_weight_adamw(**ADAMW))),
    "injected": (adamw, functools.cache(lambda: optax.inject_hyperparams(optax.adamw)(**ADAMW))),
    "schedule": (adamw, functools.cache(lambda: optax.adamw(**ADAMW | {"learning_rate": lambda _: 1e-2}))),
}


@pytest.mark.parametrize(
    ("change", "engine"),
    [
        pytest.param(c, e, marks=() if (c, e) == ("chain to adamw", "shard_map") else pytest.mark.slow)
        for c in CHANGES
        for e in ENGINES
    ],
)
def test_another_optimizer_keeps_the_moments_that_fit(tmp_path: Path, change: str, engine: str) -> None:
    before, after = (make() for make in CHANGES[change])
    program = trained(before)
    path = save(tmp_path / "c", flax_train_state(program))
    given = variable_leaves(Net())
    with pytest.raises(CheckpointError, match=r"strict=False goes on with what fits.*opt_state/"):
        load_checkpoint(path, plan_of(engine), after, variables=given)
    loaded = load_checkpoint(path, plan_of(engine), after, strict=False, variables=given)
    fresh = [name for name in loaded.fresh if not name.startswith("variables/")]
    hyper = {"learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay"}
    assert set(fresh) == {
        "injected": {"opt_state/count", *(f"opt_state/hyperparams/{name}" for name in hyper)},
        "schedule": {"opt_state/2/count"},
    }.get(change, set())
    assert loaded.ignored == ()
    # The same moments, moved by hand.
    old = program.optimizer.opt_state
    program.optimizer = nnx.Optimizer(
        program.model, adamw() if change == "chain to main weights" else after, wrt=nnx.Param
    )
    moments = next(s for s in jax.tree.leaves(old, is_leaf=_is_adam) if _is_adam(s))
    program.optimizer.opt_state = jax.tree.map(
        lambda s: moments if _is_adam(s) else s, program.optimizer.opt_state, is_leaf=_is_adam
    )
    assert_goes_on_as(program, loaded, engine, after)


@pytest.mark.parametrize("engine", ["shard_map", pytest.param("pjit", marks=pytest.mark.slow)])
def test_moments_of_some_parameters_are_kept_and_the_others_fresh(tmp_path: Path, engine: str) -> None:
    """Of one unit, and so of one flat array; accumulators of ``adagrad`` do not begin at zero."""
    optimizer = optax.adagrad(1e-2, initial_accumulator_value=0.5)
    program, plan = trained(optimizer), plan_of(engine)
    tree = flax_train_state(program)
    squares = tree.opt_state[0].sum_of_squares
    blocks = squares["blocks"]
    fewer = without(squares, "blocks", 1, "bias")
    path = save(tmp_path / "c", {"params": tree.params, "opt_state": [{"sum_of_squares": fewer}, None]})
    given = variable_leaves(Net())
    loaded = load_checkpoint(path, plan, optimizer, strict=False, variables=given)
    fresh = {name for name in loaded.fresh if not name.startswith("variables/")}
    assert fresh == {"opt_state/0/sum_of_squares/blocks/1/bias"}
    found = unshard(plan, loaded.state.opt_state[0].sum_of_squares)
    np.testing.assert_array_equal(found["blocks/1/bias"], np.full(WIDTH, 0.5, np.float32))
    np.testing.assert_array_equal(found["blocks/1/kernel"], blocks[1]["kernel"])
    np.testing.assert_array_equal(found["blocks/0/bias"], blocks[0]["bias"])
    assert not np.array_equal(found["blocks/0/bias"], np.full(WIDTH, 0.5, np.float32))


@pytest.mark.parametrize("lacks", ["moments", "count"])
def test_moments_and_their_count_are_taken_together_or_not_at_all(tmp_path: Path, lacks: str) -> None:
    program, plan = trained(adamw()), plan_of("shard_map")
    adam = flax_train_state(program).opt_state[0]
    # The count of a schedule counts no moments.
    state = [{"mu": adam.mu, "nu": adam.nu}, {"count": adam.count}]
    opt_state = [{"count": adam.count}, None] if lacks == "moments" else state
    path = save(tmp_path / "c", {"params": program.parameters, "opt_state": opt_state})
    loaded = load_checkpoint(path, plan, adamw(), strict=False, variables=variable_leaves(Net()))
    assert int(loaded.state.opt_state[0].count) == 0
    assert not any(np.any(moments) for moments in loaded.state.opt_state[0].nu.values())
    assert len(loaded.ignored) == (1 if lacks == "moments" else 11)
    assert {"opt_state/0/count", "opt_state/0/nu/head/kernel"} <= {*loaded.fresh}
