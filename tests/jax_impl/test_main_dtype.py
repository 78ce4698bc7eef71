"""The dtype of main weights: one for all, or each parameter's own, several of them and frozen integers in one unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from bridge.core.formats import CheckpointError, open_checkpoint
from jax_impl import (
    PolicyError,
    apply_linen,
    call_unit,
    count_collectives,
    data_parallel_mesh,
    fully_shard,
    init_sharded,
    init_state,
    layout_report,
    load_checkpoint,
    main_weight_adamw,
    main_weight_muon,
    main_weight_sgd,
    make_gradients,
    make_train_step,
    memory_report,
    parameter_norms,
    plan_sharding,
    save_checkpoint,
    shard_batch,
    shard_weights,
    unshard,
)
from jax_impl.optimizer.chosen_form import chosen_form
from jax_impl.optimizer.forms import arrays_of, trees_of
from tests.support.jax_impl.zoo import Chain, by_path, loss_of_layers, pairs

FROZEN = ["*/table", "*/mask", "*/place", "*/scale"]
ADAMW = main_weight_adamw(0.02)
FLOATS = {"param_dtype": "float32", "grad_dtype": "float32"}


def model() -> dict[str, Any]:
    """Two layers of a payload of one byte an element with its bfloat16 scale, and what is trained in three dtypes."""
    rng = np.random.default_rng(0)

    def layer() -> dict[str, jax.Array]:
        return {
            "table": jnp.asarray(rng.integers(0, 256, (8, 8)), jnp.uint8),
            "scale": jnp.asarray(rng.random((8, 1)) / 255, jnp.bfloat16),
            "mask": jnp.asarray(rng.random(8) > 0.3),
            "place": jnp.asarray(rng.permutation(8), jnp.int32),
            "down": jnp.asarray(rng.standard_normal((8, 3)), jnp.bfloat16),
            "up": jnp.asarray(rng.standard_normal((3, 8)), jnp.float32),
            "shift": jnp.asarray(rng.standard_normal(8) / 8, jnp.float16),
            "gain": jnp.asarray(1 + rng.standard_normal(8) / 8, jnp.bfloat16),
        }

    return {"layers": [layer(), layer()], "head": jnp.asarray(rng.standard_normal((8, 5)), jnp.bfloat16)}


def apply(unit: Any, x: jax.Array) -> jax.Array:
    assert (unit["table"].dtype, unit["mask"].dtype, unit["place"].dtype) == (jnp.uint8, jnp.bool_, jnp.int32)
    wide = {
        name: unit[name].astype(jnp.float32) for name in ("table", "scale", "down", "up", "shift", "gain")
    }
    kernel = wide["table"] * wide["scale"] + wide["down"] @ wide["up"]
    y = wide["gain"] * jnp.tanh(x @ kernel + wide["shift"])[:, unit["place"]]
    return jnp.where(unit["mask"], y, x)


loss = loss_of_layers(apply)


def batch(seed: int) -> Any:
    return pairs(1, 16, 8, 5, seed=seed)[0]


def is_trained(path: str) -> bool:
    return path == "head" or path.endswith(("down", "up", "shift", "gain"))


def sharded(engine: str = "shard_map", devices: Any = 4, **options: Any) -> Any:
    options = {"units": ["layers/*"], "frozen": FROZEN, "main_dtype": None, **options}
    return fully_shard(model(), data_parallel_mesh(devices), engine=engine, **options)


def full_batch_gradients(parameters: dict[str, jax.Array], rows: Any) -> dict[str, jax.Array]:
    """Of the whole batch on one device, in float32."""
    structure = jax.tree.structure(model())
    paths = list(by_path(model()))
    trained = {path: x.astype(jnp.float32) for path, x in parameters.items() if is_trained(path)}

    def of(trained: dict[str, jax.Array]) -> jax.Array:
        leaves = [trained.get(path, parameters[path]) for path in paths]
        return loss(jax.tree.unflatten(structure, leaves), rows)

    return jax.grad(of)(trained)


def bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()


CASES = [
    ("shard_map", "optim_grads_params", 4, 0),
    ("shard_map", "hfsdp", {"dp_outer": 2, "dp": 2}, 1),
    ("pjit", "optim_grads_params", 2, 0),
    *(
        pytest.param(engine, strategy, devices, prefetch, marks=pytest.mark.slow)
        for engine in ("shard_map", "pjit")
        for strategy, devices, prefetch in (
            ("no_shard", 2, 0),
            ("optim", 8, 1),
            ("optim_grads", 4, 0),
            ("optim_grads_params", 8, 1),
            ("hsdp", {"dp_outer": 2, "dp": 4}, 0),
        )
    ),
]


@pytest.mark.fast_cases("shard_map-hfsdp-devices1-1")
@pytest.mark.parametrize(("engine", "strategy", "devices", "prefetch"), CASES)
def test_a_step_has_the_full_batchs_gradient_and_the_update_of_whole_weights(
    engine: str, strategy: str, devices: Any, prefetch: int
) -> None:
    plan, weights = sharded(engine, devices, strategy=strategy, prefetch=prefetch, **FLOATS)
    state, step = init_state(plan, weights, ADAMW), make_train_step(plan, loss, ADAMW, microbatches=2)
    whole = {path: x for path, x in by_path(model()).items() if is_trained(path)}
    expected, update = ADAMW.init(whole), jax.jit(ADAMW.apply)
    for number in range(3):
        before = unshard(plan, state.weights)
        gradients = unshard(plan, step.gradients(state.weights, batch(number))[1])
        wanted = full_batch_gradients(before, batch(number))
        assert gradients.keys() == wanted.keys() == whole.keys()
        for path, gradient in gradients.items():
            scale = float(jnp.max(jnp.abs(wanted[path])))
            np.testing.assert_allclose(gradient, wanted[path], rtol=0, atol=1e-5 * scale, err_msg=path)
        state, _ = step(state, batch(number))
        whole, expected = update(gradients, expected, whole)
        after = unshard(plan, state.weights)
        for path, initial in by_path(model()).items():
            assert after[path].dtype == initial.dtype, path
            assert bits(after[path]) == bits(whole.get(path, initial)), path
            assert is_trained(path) == (bits(after[path]) != bits(initial)), path


@pytest.mark.fast_cases("sgd-optimizer0")
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("sgd", main_weight_sgd(0.1, 0.9, momentum_dtype="bfloat16")),
        ("float8", main_weight_adamw(0.02, mu_dtype="float8_e4m3fn", nu_dtype="float8_e4m3fn")),
        ("muon", main_weight_muon(0.02, use_muon=lambda path, leaf: path.endswith("down"))),
    ],
)
def test_other_main_weight_optimizers_update_shards_as_whole_weights(name: str, optimizer: Any) -> None:
    plan, weights = sharded(**FLOATS)
    state, step = init_state(plan, weights, optimizer), make_train_step(plan, loss, optimizer)
    whole = {path: x for path, x in by_path(model()).items() if is_trained(path)}
    expected, update = optimizer.init(whole), jax.jit(optimizer.apply)
    for number in range(3):
        gradients = unshard(plan, step.gradients(state.weights, batch(number))[1])
        state, _ = step(state, batch(number))
        whole, expected = update(gradients, expected, whole)
        after = unshard(plan, state.weights)
        for path, value in whole.items():
            assert after[path].dtype == value.dtype
            assert bits(after[path]) == bits(value), path


def test_each_dtype_of_a_unit_has_an_array_and_no_element_is_widened() -> None:
    plan, weights = sharded()
    dtypes = {"": "bfloat16"}
    for layer in ("layers/0", "layers/1"):
        dtypes |= {layer: "float32", f"{layer} (bfloat16)": "bfloat16", f"{layer} (float16)": "float16"}
        dtypes |= {f"{layer} (frozen, {dtype})": dtype for dtype in ("uint8", "bfloat16", "bool", "int32")}
    assert {key: array.dtype.name for key, array in weights.items()} == dtypes
    trained = {"bfloat16": 2 * (24 + 8) + 40, "float32": 2 * 24, "float16": 2 * 8}
    frozen = 2 * (64 + 8 * 2 + 8 + 8 * 4)
    state = init_state(plan, weights, ADAMW)
    report = memory_report(plan, state)
    at_rest = sum(jnp.dtype(dtype).itemsize * count for dtype, count in trained.items())
    assert sum(device.main_weights for device in report.devices) == at_rest + frozen
    # Moments are float32, and frozen parameters have none.
    assert sum(device.moments for device in report.devices) == 2 * 4 * sum(trained.values())
    groups = [group for unit in layout_report(plan).units for group in unit.groups]
    assert sum(group.numel * jnp.dtype(group.main_dtype).itemsize for group in groups) == at_rest + frozen
    assert "uint8" in str(plan)
    assert "bool" in str(plan)


def test_what_is_no_float_is_gathered_as_it_is() -> None:
    plan, weights = sharded(param_dtype="bfloat16")
    counts = count_collectives(make_gradients(plan, loss), weights, shard_batch(plan, batch(0)))
    gathered = {call.dtype for call in counts if call.kind == "all_gather"}
    assert gathered == {"bfloat16", "uint8", "bool", "int32"}
    reduced = {call.dtype for call in counts if call.kind == "reduce_scatter"}
    assert reduced == {"bfloat16"}


def ties() -> np.ndarray:
    """Float32 numbers between two of bfloat16: in the middle, and a little beside it."""
    middle = (np.arange(0x3F80, 0x3F90, dtype=np.uint32) << 16) + 0x8000
    return np.concatenate([middle, middle + 1, middle - 1]).view(np.float32).reshape(6, 8)


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_bfloat16_main_weights_are_the_given_ones_rounded_once_to_nearest_even(engine: str) -> None:
    def make() -> nnx.Module:
        return nnx.Dict({"w": nnx.Param(jnp.asarray(ties())), "b": nnx.Param(jnp.ones(3, jnp.float16))})

    options: dict[str, Any] = {"units": [], "engine": engine, "main_dtype": jnp.bfloat16}
    plan, weights = fully_shard(make(), data_parallel_mesh(3), **options)
    _, born, *_ = init_sharded(make, data_parallel_mesh(3), **options)
    number = ties().view(np.uint32)
    nearest = ((number + 0x7FFF + ((number >> 16) & 1)) >> 16).astype(np.uint16)
    for held in (weights, born):
        whole = unshard(plan, held)
        assert bits(whole["w"]) == bits(nearest)
        assert whole["b"].dtype == jnp.bfloat16
    # What computes, travels and comes out as a gradient has that dtype as well, where nothing else is asked for.
    (group,) = plan.units[""].groups
    assert {group.wire.compute, group.wire.reduce, group.wire.grad} == {np.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_gradients_of_float16_weights_overflow_no_earlier_than_their_mean(engine: str) -> None:
    tree = {"w": jnp.ones(4, jnp.float16)}
    plan, weights = fully_shard(
        tree, data_parallel_mesh(4), units=[], engine=engine, main_dtype=None, param_dtype="float32"
    )
    rows = np.asarray([[30000.0], [32000.0], [34000.0], [36000.0]], np.float32)
    gradients = make_gradients(plan, lambda tree, rows: jnp.sum(tree["w"]) * jnp.mean(rows))
    gradient = unshard(plan, jax.jit(gradients)(weights, shard_batch(plan, rows))[1])["w"]
    assert gradient.dtype == jnp.float16
    np.testing.assert_array_equal(gradient, np.full(4, 33000, np.float16))


def test_training_in_bfloat16_alone_stays_near_to_that_with_float32_main_weights() -> None:
    losses = {}
    for main in ("bfloat16", "float32"):
        plan, weights = sharded(main_dtype=main, param_dtype="bfloat16", reduce_dtype="float32")
        state, step = init_state(plan, weights, ADAMW), make_train_step(plan, loss, ADAMW)
        losses[main] = []
        for _ in range(20):
            state, metrics = step(state, batch(0))
            losses[main].append(float(metrics["loss"]))
    assert losses["bfloat16"][-1] < 0.7 * losses["bfloat16"][0]
    assert losses["bfloat16"] != losses["float32"]
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=0.05)


@pytest.mark.parametrize(
    ("first", "then"), [("shard_map", "pjit"), pytest.param("pjit", "shard_map", marks=pytest.mark.slow)]
)
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(tmp_path: Path, first: str, then: str) -> None:
    plan, weights = sharded(first, **FLOATS)
    state, step = init_state(plan, weights, ADAMW), make_train_step(plan, loss, ADAMW)
    state, _ = step(state, batch(0))
    save_checkpoint(tmp_path / "a", plan, state)
    with open_checkpoint(tmp_path / "a") as reader:
        for path, value in by_path(model()).items():
            assert reader.tensors[f"params/{path}"].dtype == value.dtype
            assert (f"opt_state/mu/{path}" in reader.tensors) == is_trained(path)
            if not is_trained(path):
                assert reader.read(f"params/{path}").tobytes() == bits(value)
    again = load_checkpoint(tmp_path / "a", plan, ADAMW).state
    other, _ = sharded(then, 2, strategy="optim", **FLOATS)
    moved = load_checkpoint(tmp_path / "a", other, ADAMW).state
    for path, value in unshard(plan, state.weights).items():
        assert bits(unshard(other, moved.weights)[path]) == bits(value), path
    expected, metrics = step(state, batch(1))
    same, _ = step(again, batch(1))
    for key, array in expected.weights.items():
        assert bits(same.weights[key]) == bits(array), key
    moved, moved_metrics = make_train_step(other, loss, ADAMW)(moved, batch(1))
    np.testing.assert_allclose(moved_metrics["loss"], metrics["loss"], rtol=1e-6)


def test_weights_of_another_dtype_are_cast_only_where_that_is_asked_for(tmp_path: Path) -> None:
    wide, weights = sharded(main_dtype="float32")
    state, step = init_state(wide, weights, ADAMW), make_train_step(wide, loss, ADAMW)
    state, _ = step(state, batch(0))
    save_checkpoint(tmp_path / "wide", wide, state)
    narrow, _ = sharded(main_dtype="bfloat16")
    with pytest.raises(
        CheckpointError, match=r"another dtype.*expected bfloat16, got float32.*strict=False casts"
    ):
        load_checkpoint(tmp_path / "wide", narrow, ADAMW)
    loaded = load_checkpoint(tmp_path / "wide", narrow, ADAMW, strict=False)
    assert loaded.fresh == ()
    for path, value in unshard(wide, state.weights).items():
        trained = value.astype(jnp.bfloat16) if is_trained(path) else value
        assert bits(unshard(narrow, loaded.state.weights)[path]) == bits(trained), path
    # Moments are float32 beside both.
    for path, value in unshard(wide, state.opt_state.nu).items():
        assert bits(unshard(narrow, loaded.state.opt_state.nu)[path]) == bits(value), path
    after, _ = make_train_step(narrow, loss, ADAMW)(loaded.state, batch(1))
    save_checkpoint(tmp_path / "narrow", narrow, after)
    back = load_checkpoint(tmp_path / "narrow", wide, ADAMW, strict=False).state
    for path, value in unshard(narrow, after.weights).items():
        wanted = value.astype(jnp.float32) if is_trained(path) else value
        assert bits(unshard(wide, back.weights)[path]) == bits(wanted), path


POLICY = """
[mesh]
dp = 4
[precision]
main = "{main}"
compute = "float32"
[[unit]]
match = "layers.*"
strategy = "optim_grads_params"
[[unit]]
match = ""
strategy = "optim"
"""


@pytest.mark.fast_cases("given")
@pytest.mark.parametrize("main", ["bfloat16", "given"])
def test_a_policy_file_says_the_dtype_of_main_weights(tmp_path: Path, main: str) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(POLICY.format(main=main))
    plan, weights = fully_shard(model(), data_parallel_mesh(4), policy=file, frozen=FROZEN)
    for path, value in by_path(model()).items():
        wanted = jnp.bfloat16 if main == "bfloat16" and is_trained(path) else value.dtype
        assert plan.parameters[path].dtype == wanted, path
        assert bits(unshard(plan, weights)[path]) == bits(value.astype(wanted)), path
    state, step = init_state(plan, weights, ADAMW), make_train_step(plan, loss, ADAMW)
    wanted = full_batch_gradients(unshard(plan, weights), batch(0))
    for path, gradient in unshard(plan, step.gradients(weights, batch(0))[1]).items():
        assert gradient.dtype == plan.parameters[path].dtype
        scale = float(jnp.max(jnp.abs(wanted[path])))
        np.testing.assert_allclose(
            gradient.astype(jnp.float32), wanted[path], rtol=0, atol=2**-8 * scale, err_msg=path
        )
    state, _ = step(state, batch(0))
    save_checkpoint(tmp_path / "a", plan, state)
    loaded = load_checkpoint(tmp_path / "a", plan, ADAMW).state
    (first, _), (second, _) = step(state, batch(1)), step(loaded, batch(1))
    assert all(bits(first.weights[key]) == bits(second.weights[key]) for key in first.weights)


def test_a_policy_file_takes_float64_where_it_says_so_and_frozen_ones_always(tmp_path: Path) -> None:
    file, mesh = tmp_path / "policy.toml", data_parallel_mesh(4)
    with jax.enable_x64(True):
        tree = {"w": jnp.ones(4, jnp.float64), "fixed": jnp.ones(4, jnp.float32)}
        for main in ("bfloat16", "float32"):
            file.write_text(POLICY.format(main=main))
            with pytest.raises(
                PolicyError, match=rf"expected parameters for {main} main weights, got float64"
            ):
                plan_sharding(tree, mesh, policy=file, units=[])
            plan_sharding(tree, mesh, policy=file, units=[], frozen=["w"])
        file.write_text(POLICY.format(main="float64"))
        with pytest.raises(PolicyError, match="expected parameters for float64 main weights, got float32"):
            plan_sharding(tree, mesh, policy=file, units=[])
        plan = plan_sharding(tree, mesh, policy=file, units=[], frozen=["fixed"])
        assert {path: info.dtype.name for path, info in plan.parameters.items()} == {
            "w": "float64",
            "fixed": "float32",
        }


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        ("int8", {}, r"'w': expected a floating dtype for a trainable parameter, got int8: freeze"),
        ("bool", {}, r"'w': expected a floating dtype for a trainable parameter, got bool: freeze"),
        ("complex64", {"frozen": ["w"]}, r"'w': expected a floating or integer dtype .*, got complex64"),
        (
            "int4",
            {"frozen": ["w"]},
            r"'w': expected a floating or integer dtype of 8 bits or more.*, got int4",
        ),
        (
            "bfloat16",
            {"main_dtype": None, "gather_dtype": "mxfp8"},
            r"gather_dtype: expected None for bfloat16 main weights, got 'mxfp8'",
        ),
        (
            "float32",
            {"main_dtype": "bfloat16", "gather_dtype": "mxfp8"},
            "for bfloat16 main weights, got 'mxfp8'",
        ),
        (
            "float32",
            {"main_dtype": "float8_e4m3fn"},
            "main_dtype: expected None or one of .*, got 'float8_e4m3fn'",
        ),
        ("float32", {"main_dtype": "float64"}, "main_dtype: float64 needs jax.config.update"),
    ],
)
def test_what_has_no_right_meaning_is_refused(dtype: str, options: Any, message: str) -> None:
    tree = {"w": jax.ShapeDtypeStruct((4, 4), jnp.dtype(dtype)), "v": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(ValueError, match=message):
        plan_sharding(tree, data_parallel_mesh(2), units=[], **options)


def test_integers_of_numpy_are_as_wide_as_jax_has_them() -> None:
    tree = {"low": np.array([-128, 3], np.int8), "order": np.arange(7), "w": np.ones((4, 4))}
    plan, weights = fully_shard(tree, data_parallel_mesh(2), units=[], frozen=["low", "order"])
    dtypes = {path: info.dtype.name for path, info in plan.parameters.items()}
    assert dtypes == {"low": "int8", "order": "int32", "w": "float32"}
    # The magnitude of the least integer is none of its dtype.
    assert parameter_norms(plan, weights, norm_type=np.inf)["low"] == 128
    np.testing.assert_array_equal(unshard(plan, weights)["order"], np.arange(7))
    with pytest.raises(
        ValueError, match="'order': expected values that int32 can represent, got int64 values that it cannot"
    ):
        shard_weights(plan, {**tree, "order": np.arange(7) << 40})


def test_float64_is_beside_main_dtype_as_it_is_given() -> None:
    with jax.enable_x64(True):
        tree = {
            "w": jax.ShapeDtypeStruct((4, 4), jnp.float64),
            "v": jax.ShapeDtypeStruct((3,), jnp.float32),
        }
        for main in ("float32", None):
            plan = plan_sharding(tree, data_parallel_mesh(2), units=[], main_dtype=main)
            assert [info.dtype.name for info in plan.parameters.values()] == ["float32", "float64"]
        for main, path in (("bfloat16", "w"), ("float64", "v")):
            with pytest.raises(ValueError, match=rf"parameter '{path}': expected .*float64 with main_dtype"):
                plan_sharding(tree, data_parallel_mesh(2), units=[], main_dtype=main)


class Table(nnx.Module):
    """Looks up rows by a table of int32 that is a parameter."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.order = nnx.Param(jnp.asarray([3, 1, 4, 0, 2], jnp.int32))
        self.linear = nnx.Linear(5, 5, rngs=rngs, param_dtype=jnp.bfloat16)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x[:, self.order[...]].astype(jnp.float32))


def tables() -> Chain:
    rngs = nnx.Rngs(0)
    return Chain([Table(rngs), Table(rngs)])


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("recompute", [False, True, "dots_saveable"])
def test_an_nnx_model_has_frozen_integers(recompute: Any) -> None:
    rows = np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32)

    def of(model: Any, rows: jax.Array) -> jax.Array:
        return jnp.mean(model(rows) ** 2)

    plan, weights = fully_shard(
        tables(), data_parallel_mesh(4), frozen=["*/order"], recompute=recompute, param_dtype="float32"
    )
    sharded_loss, gradients, _ = jax.jit(make_gradients(plan, of))(weights, shard_batch(plan, rows))
    graph, trained, rest = nnx.split(tables(), lambda path, _: path[-1] in ("kernel", "bias"), ...)
    trained = jax.tree.map(lambda x: x.astype(jnp.float32), trained)
    expected, wanted = jax.value_and_grad(lambda trained: of(nnx.merge(graph, trained, rest), rows))(trained)
    np.testing.assert_allclose(sharded_loss, expected, rtol=1e-6)
    assert unshard(plan, gradients).keys() == by_path(nnx.to_pure_dict(wanted)).keys()
    for path, value in by_path(nnx.to_pure_dict(wanted)).items():
        np.testing.assert_allclose(unshard(plan, gradients)[path], value, rtol=1e-5, atol=1e-6)


class LinenTables(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for number in range(2):
            x = LinenTable(name=f"layers_{number}")(x)
        return x


class LinenTable(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        order = self.param("order", lambda _: jnp.asarray([3, 1, 4, 0, 2], jnp.int32))
        return nn.Dense(5, param_dtype=jnp.bfloat16)(x[:, order].astype(jnp.float32))


def test_a_linen_model_has_frozen_integers() -> None:
    module, rows = LinenTables(), np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32)
    params = module.init(jax.random.key(0), rows)["params"]
    plan, weights = fully_shard(params, data_parallel_mesh(4), frozen=["*/order"], param_dtype="float32")
    assert set(plan.units) == {"layers_0", "layers_1", ""}

    def of(params: Any, rows: jax.Array) -> jax.Array:
        return jnp.mean(apply_linen(module, {"params": params}, rows) ** 2)

    sharded_loss, gradients, _ = jax.jit(make_gradients(plan, of))(weights, shard_batch(plan, rows))
    whole = by_path(params)
    trained = {path: x.astype(jnp.float32) for path, x in whole.items() if x.dtype == jnp.bfloat16}
    structure = jax.tree.structure(params)

    def of_trained(trained: Any) -> jax.Array:
        return of(jax.tree.unflatten(structure, [trained.get(path, x) for path, x in whole.items()]), rows)

    expected, wanted = jax.value_and_grad(of_trained)(trained)
    np.testing.assert_allclose(sharded_loss, expected, rtol=1e-6)
    assert unshard(plan, gradients).keys() == wanted.keys()
    for path, value in unshard(plan, gradients).items():
        np.testing.assert_allclose(value, wanted[path], rtol=1e-5, atol=1e-6)


@pytest.mark.fast_cases("1")
@pytest.mark.parametrize("prefetch", [0, 1])
def test_integers_of_a_stack_are_gathered_layer_by_layer(prefetch: int) -> None:
    def stack() -> Any:
        return {"layers": jax.tree.map(lambda *x: jnp.stack(x), *model()["layers"])}

    def of_stack(tree: Any, rows: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            return call_unit(apply, weights, x), None

        return jnp.mean(jax.lax.scan(layer, rows, tree["layers"])[0] ** 2)

    rows = batch(0)[0]
    plan, weights = fully_shard(
        stack(),
        data_parallel_mesh(4),
        units=["layers/*"],
        stacked=["layers"],
        frozen=FROZEN,
        main_dtype=None,
        prefetch=prefetch,
        **FLOATS,
    )
    sharded_loss, gradients, _ = jax.jit(make_gradients(plan, of_stack))(weights, shard_batch(plan, rows))
    tree = stack()["layers"]
    names = ("down", "up", "shift", "gain")
    expected, wanted = jax.value_and_grad(lambda own: of_stack({"layers": {**tree, **own}}, rows))(
        {name: tree[name].astype(jnp.float32) for name in names}
    )
    np.testing.assert_allclose(sharded_loss, expected, rtol=1e-6)
    for path, value in unshard(plan, gradients).items():
        np.testing.assert_allclose(value, wanted[path.split("/")[1]], rtol=1e-5, atol=1e-6)
    for path, value in unshard(plan, weights).items():
        assert bits(value) == bits(tree[path.split("/")[1]]), path


def test_an_optax_optimizer_runs_on_half_precision_shards_as_on_parameters() -> None:
    """Also where one has to see parameters: its float32 updates are rounded with the weights, not before."""
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0, momentum=0.9))
    decayed = optax.adamw(0.5, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree))
    plan, weights = sharded(**FLOATS)
    for optimizer, form in ((clipped, None), (decayed, "name")):
        assert chosen_form(optimizer, arrays_of(plan), trees_of(plan), True) == form
        state, step = (
            init_state(plan, weights, optimizer),
            make_train_step(plan, loss, optimizer, donate=False),
        )
        whole = {path: x for path, x in by_path(model()).items() if is_trained(path)}
        gradients = unshard(plan, step.gradients(state.weights, batch(0))[1])
        updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(whole), whole)
        after = unshard(plan, step(state, batch(0))[0].weights)
        expected = optax.apply_updates(whole, updates)
        assert all(after[path].dtype == value.dtype for path, value in expected.items())
        # The global norm is a sum in another order, after which few numbers round to a neighbour.
        apart = [np.asarray(after[path] != value).ravel() for path, value in expected.items()]
        halves = [x for x, value in zip(apart, expected.values(), strict=True) if value.dtype != jnp.float32]
        assert np.mean(np.concatenate(halves)) < 0.02
