"""main_weight_sgd and main_weight_muon on plans: as on the unsharded model, saved and resumed on other devices."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bridge.core.formats import open_checkpoint
from jax_impl import (
    init_state,
    load_checkpoint,
    main_weight_adamw,
    main_weight_muon,
    main_weight_sgd,
    make_train_step,
    memory_report,
    save_checkpoint,
    unshard,
)
from tests.jax_impl.optimizer.test_logical import assert_close, batches, loss, parameters, sharded
from tests.support.jax_impl import checkpoint_runs as runs
from tests.support.jax_impl.zoo import by_path

pytestmark = pytest.mark.filterwarnings("ignore:pjit engine")
RATE = 0.02
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: main_weight_sgd(RATE, weight_decay=0.1),
    "momentum": lambda: main_weight_sgd(RATE, 0.9, nesterov=True, weight_decay=0.1),
    "dampening": lambda: main_weight_sgd(optax.linear_schedule(RATE, 0.1 * RATE, 5), 0.8, dampening=0.3),
    "float8 momentum": lambda: main_weight_sgd(RATE, 0.9, momentum_dtype="float8_e4m3fn"),
    "muon": lambda: main_weight_muon(RATE),
    "scheduled muon": lambda: main_weight_muon(
        optax.linear_schedule(RATE, 0.1 * RATE, 5),
        use_muon=lambda path, leaf: leaf.ndim == 2 and path != "head",
    ),
    "float8 muon": lambda: main_weight_muon(
        RATE, momentum_dtype="float8_e4m3fn", mu_dtype="float16", nu_dtype="float8_e5m2"
    ),
}


def plainly_trained(name: str, steps: int) -> tuple[dict[str, jax.Array], Any]:
    weights, optimizer = parameters(), OPTIMIZERS[name]()
    state = optimizer.init(weights)
    apply = jax.jit(optimizer.apply)
    for batch in batches(steps):
        weights, state = apply(jax.grad(loss)(weights, batch), state, weights)
    return by_path(weights), state


@pytest.mark.fast_cases(
    "no_shard-shard_map-float8 muon",
    "optim_grads_params-pjit-momentum",
    "no_shard-shard_map-dampening",
    "no_shard-shard_map-scheduled muon",
)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_training_is_that_of_the_unsharded_model(engine: str, strategy: str, name: str) -> None:
    plan, weights = sharded(engine, 4, strategy)
    optimizer = OPTIMIZERS[name]()
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, loss, optimizer, metrics=["learning_rate"])
    for batch in batches(4):
        state, metrics = step(state, batch)
    expected, its = plainly_trained(name, 4)
    trained = unshard(plan, state.weights)
    if "muon" not in name and "float8" not in name:
        assert_close(trained, expected)
    for path, value in expected.items():
        # A gradient's last bit may round to another number of bfloat16, or of float8.
        np.testing.assert_allclose(trained[path], value, atol=2e-3, err_msg=path)
        assert np.abs(value - by_path(parameters())[path]).max() > 5e-3
    assert int(state.opt_state.count) == int(its.count) == 4
    assert float(metrics["learning_rate"]) > 0


@pytest.mark.parametrize("name", ["momentum", "muon", "float8 muon"])
def test_state_lies_cut_over_the_devices(name: str) -> None:
    plan, weights = sharded()
    state = init_state(plan, weights, OPTIMIZERS[name]())
    shapes = {path: x.shape for path, x in by_path(parameters()).items()}
    expected = 0
    for shape in shapes.values():
        size, rows = int(np.prod(shape)), shape[0]
        if name == "momentum":
            expected += 4 * size
        elif len(shape) == 1:
            expected += 8 * size
        else:
            expected += 4 * size if name == "muon" else size + 4 * rows
    held = [device.moments for device in memory_report(plan, state).devices]
    # Scales of rows are cut as the rows are, or whole where columns are cut.
    # Flat arrays are padded.
    most = {"momentum": 1.1, "muon": 1.0, "float8 muon": 1.5}[name]
    assert expected <= held[0] * 4 <= most * expected


def read(path: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(path) as reader:
        return {name: reader.read(name) for name in reader.tensors}


CASES: list[Any] = [(4,), (3, "optim"), (2, runs.DEFAULT, "pjit"), ((2, 2), "hfsdp")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["momentum", "muon", "float8 momentum", "float8 muon"])
@pytest.mark.parametrize("other", range(1, len(CASES)))
@pytest.mark.filterwarnings("ignore:shard_map engine")
def test_checkpoints_are_the_same_bytes_on_other_devices(tmp_path: Path, other: int, name: str) -> None:
    here, there, optimizer = CASES[0], CASES[other], OPTIMIZERS[name]()
    plan, target = runs.plan_of(*here), runs.plan_of(*there)
    state = runs.train(runs.fresh(*here, optimizer=optimizer), *here, first=0, count=2, optimizer=optimizer)[
        0
    ]
    save_checkpoint(tmp_path / "a", plan, state)
    tensors = read(tmp_path / "a")
    traces = {name for name in tensors if name.startswith("opt_state/trace/")}
    assert traces, sorted(tensors)
    if "float8" in name:
        assert any(name.startswith("opt_state/trace_scale/") for name in tensors)
    loaded = load_checkpoint(tmp_path / "a", target, optimizer).state
    save_checkpoint(tmp_path / "b", target, loaded)
    runs.assert_same_bits(read(tmp_path / "b"), tensors)
    runs.train(loaded, *there, first=2, count=1, optimizer=optimizer)


@pytest.mark.slow
def test_a_stack_of_layers_is_matrices_and_vectors() -> None:
    case: Any = (2, runs.DEFAULT, "shard_map", "stacked")
    attention = {"query": (1, 2), "key": (1, 2), "value": (1, 2), "out": (2, 1)}
    optimizer = main_weight_muon(
        RATE, use_muon=lambda path, leaf: attention.get(path.split("/")[-2], len(leaf.shape) == 2)
    )
    state = runs.fresh(*case, optimizer=optimizer)
    assert "layers/attention_norm/scale" in state.opt_state.mu
    layers = {path: x.ndim for path, x in state.opt_state.trace.items() if path.startswith("layers")}
    assert len(layers) == 7
    assert {layers[f"layers/attention/{name}/kernel"] for name in attention} == {4}
    runs.train(state, *case, first=0, count=1, optimizer=optimizer)


@pytest.mark.fast_cases("dimensions0-flat0", "True-None")
@pytest.mark.parametrize(("dimensions", "flat"), [((1, 2), (6, 20)), ((2, 1), (24, 5)), (True, None)])
def test_kernels_of_more_dimensions_are_the_matrices_that_the_rule_says(dimensions: Any, flat: Any) -> None:
    rng = np.random.default_rng(0)
    weight, gradient = (jnp.asarray(rng.standard_normal((6, 4, 5)), jnp.float32) for _ in range(2))
    optimizer = main_weight_muon(RATE, use_muon=lambda path, leaf: dimensions)
    updated, state = optimizer.apply({"a": gradient}, optimizer.init({"a": weight}), {"a": weight})
    assert state.trace["a"].shape == weight.shape
    plain = main_weight_muon(RATE)
    apart = (
        [(weight.reshape(flat), gradient.reshape(flat))] if flat else list(zip(weight, gradient, strict=True))
    )
    expected = [plain.apply({"a": g}, plain.init({"a": w}), {"a": w})[0]["a"] for w, g in apart]
    np.testing.assert_allclose(updated["a"], jnp.stack(expected).reshape(weight.shape), atol=1e-4)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: main_weight_sgd(-1.0), "main_weight_sgd: expected learning_rate >= 0"),
        (lambda: main_weight_sgd(0.1, nesterov=True), "nesterov: expected momentum > 0"),
        (lambda: main_weight_sgd(0.1, 0.9, momentum_dtype="int8"), "momentum_dtype: expected one of"),
        (lambda: main_weight_muon(0.1, ns_steps=100), "expected 0 <= ns_steps < 100"),
        (lambda: main_weight_muon(0.1, ns_coefficients=(3, 4)), "ns_coefficients: expected 3 numbers, got"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: main_weight_muon(0.1, adjust_lr_fn="x"), "adjust_lr_fn: expected one of"),
        (lambda: main_weight_muon(0.1, outputs=0), "outputs: expected -1 or -2"),
        (
            lambda: main_weight_muon(0.1, use_muon=["a/*"]),
            "use_muon: expected a function of a parameter's path",
        ),  # type: ignore[arg-type]  # wrong on purpose
        (
            lambda: main_weight_muon(0.1, use_muon=lambda path, leaf: True).init({"a": jnp.ones(3)}),
            r"expected matrices if use_muon is true, got 'a' of shape \(3,\)",
        ),
    ],
)
def test_what_is_out_of_range_is_refused(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: main_weight_sgd("0.1"), "learning_rate: expected a number or a schedule, got '0.1'"),  # type: ignore[arg-type]
        (
            lambda: main_weight_sgd(jnp.ones(2)),
            "learning_rate: expected a number or a schedule, got an array",
        ),  # type: ignore[arg-type]
        (
            lambda: main_weight_adamw(jnp.complex64(1)),
            "learning_rate: expected a number or a schedule, got an array of complex64",
        ),
        (lambda: main_weight_sgd(0.1, None), "main_weight_sgd: momentum: expected a number, got None"),  # type: ignore[arg-type]
        (lambda: main_weight_sgd(0.1, dampening="x"), "dampening: expected a number, got 'x'"),  # type: ignore[arg-type]
        (lambda: main_weight_sgd(0.1, 0.9, nesterov="yes"), "nesterov: expected True or False, got 'yes'"),  # type: ignore[arg-type]
        (lambda: main_weight_muon(0.1, momentum=None), "main_weight_muon: momentum: expected a number"),  # type: ignore[arg-type]
        (lambda: main_weight_muon(0.1, ns_steps=5.5), "ns_steps: expected an integer, got 5.5"),  # type: ignore[arg-type]
        (lambda: main_weight_muon(0.1, ns_coefficients=3), "ns_coefficients: expected 3 numbers, got 3"),  # type: ignore[arg-type]
        (lambda: main_weight_muon(0.1, adamw_eps=None), "main_weight_muon: adamw_eps: expected a number"),  # type: ignore[arg-type]
        (lambda: main_weight_muon(0.1, adamw_b1="x"), "main_weight_muon: adamw_b1: expected a number"),  # type: ignore[arg-type]
        (lambda: main_weight_adamw(0.1, b1="x"), "main_weight_adamw: b1: expected a number, got 'x'"),  # type: ignore[arg-type]
        (lambda: main_weight_adamw(0.1, adam_w_mode=1), "adam_w_mode: expected True or False, got 1"),  # type: ignore[arg-type]
    ],
)
def test_an_argument_of_another_type_is_named(make: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        make()


@pytest.mark.parametrize("make", [main_weight_adamw, main_weight_sgd, main_weight_muon])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_a_rate_may_be_a_scalar_array_of_any_real_dtype(make: Any, dtype: str) -> None:
    weights = {"a": jnp.ones((2, 2))}
    updated, expected = (
        jax.jit(optimizer.apply)(weights, optimizer.init(weights), weights)[0]["a"]
        for optimizer in (make(jnp.asarray(1, dtype)), make(1.0))
    )
    np.testing.assert_allclose(updated, expected, rtol=1e-6)


def test_coefficients_may_be_an_array() -> None:
    weights = {"a": jnp.ones((2, 2))}
    coefficients = (2.0, -1.5, 0.5)
    updated, expected = (
        optimizer.apply(weights, optimizer.init(weights), weights)[0]["a"]
        for optimizer in (
            main_weight_muon(0.1, ns_coefficients=np.array(coefficients)),
            main_weight_muon(0.1, ns_coefficients=coefficients),
        )  # type: ignore[arg-type]
    )
    np.testing.assert_array_equal(updated, expected)


@pytest.mark.parametrize("make", [main_weight_adamw, main_weight_sgd, main_weight_muon])
def test_injected_hyperparameters_must_leave_constants_alone(make: Any) -> None:
    weights = {"a": jnp.ones((2, 2))}
    with pytest.raises(
        TypeError, match=r"optax\.inject_hyperparams.*static_args=.*or drop inject_hyperparams"
    ):
        optax.inject_hyperparams(make)(learning_rate=0.1).init(weights)
    constants = [name for name in inspect.signature(make).parameters if name != "learning_rate"]
    schedule = optax.linear_schedule(0.1, 0.0, 8)
    injected = optax.inject_hyperparams(make, static_args=constants)(learning_rate=schedule)
    plain = make(schedule)

    def after_two(optimizer: Any) -> Any:
        @jax.jit
        def step(weights: Any, state: Any) -> Any:
            updates, state = optimizer.update(weights, state, weights)
            return optax.apply_updates(weights, updates), state

        return step(*step(weights, optimizer.init(weights)))[0]["a"]

    np.testing.assert_allclose(after_two(injected), after_two(plain), rtol=1e-6)
