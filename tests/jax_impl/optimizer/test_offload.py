"""``Offload``: shares of a state that are born in the host's memory, updated key by key, and saved like any other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_impl import (
    Offload,
    TrainState,
    abstract_state,
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    main_weight_adamw,
    main_weight_muon,
    make_train_step,
    memory_report,
    plan_sharding,
    save_checkpoint,
)
from tests.jax_impl.test_host_memory import DEVICE, HOST, assert_equal, memory_kinds, needs_moves
from tests.support.jax_impl.zoo import Chain, Mlp

# So large that moments travel in parts: two layers have 2 * 1024 elements or more on each of four devices.
SIZE, LAYERS = 96, 6


def model_of(layers: int = LAYERS, stacked: bool = False) -> Chain:
    """Layers of uneven sizes, or one stack of equal ones."""
    rngs = nnx.Rngs(0)
    made = [Mlp(SIZE, SIZE + (0 if stacked else 3 * number), rngs=rngs) for number in range(layers)]
    return Chain(made, stacked=stacked, out=nnx.Linear(SIZE, 3, rngs=rngs))


def loss(model: Chain, rows: Any) -> jax.Array:
    return jnp.mean((model(rows[0]) - rows[1]) ** 2)


def batches(count: int) -> list[Any]:
    rng = np.random.default_rng(1)
    return [
        (rng.standard_normal((8, SIZE), np.float32), rng.standard_normal((8, 3), np.float32))
        for _ in range(count)
    ]


def trained(
    optimizer: Any, offload: Offload | None, steps: int = 3, **options: Any
) -> tuple[Any, TrainState]:
    stacked = bool(options.get("stacked"))
    plan, weights = fully_shard(model_of(stacked=stacked), data_parallel_mesh(4), **options)
    state = init_state(plan, weights, optimizer, offload=offload)
    before = memory_kinds(state)
    step = make_train_step(plan, loss, optimizer)
    for batch in batches(steps):
        state, _ = step(state, batch)
    assert memory_kinds(state) == before
    return plan, state


ON_HOST = Offload(1.0, True, "host")
SCALED = {"mu_dtype": "float16", "nu_dtype": "float8_e4m3fn"}


@pytest.mark.fast_cases("<lambda>-offload4-options4")
@needs_moves
@pytest.mark.parametrize(
    ("make", "offload", "options"),
    [
        (lambda: main_weight_adamw(0.01), Offload(1.0), {}),
        (lambda: main_weight_adamw(0.01, **SCALED), Offload(0.6), {}),
        (lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.lion(0.01)), Offload(0.5, True), {}),
        (lambda: main_weight_adamw(0.01), Offload(0.9, True), {"stacked": ["layers"]}),
        (lambda: main_weight_adamw(0.01), ON_HOST, {}),
        pytest.param(lambda: main_weight_adamw(0.01, **SCALED), ON_HOST, {}, marks=pytest.mark.slow),
        pytest.param(
            lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.lion(0.01)),
            ON_HOST,
            {"stacked": ["layers"]},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: main_weight_adamw(0.01, **SCALED),
            Offload(1.0, True),
            {"engine": "pjit"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: optax.adamw(0.01), Offload(0.4), {"strategy": "no_shard"}, marks=pytest.mark.slow
        ),
        pytest.param(lambda: optax.contrib.muon(0.01), Offload(1.0), {"units": []}, marks=pytest.mark.slow),
        pytest.param(
            lambda: main_weight_muon(0.01, momentum_dtype="float8_e4m3fn", **SCALED),
            Offload(0.6),
            {"units": []},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_has_the_bits_of_a_state_on_the_devices(make: Any, offload: Offload, options: Any) -> None:
    _, expected = trained(make(), None, **options)
    _, state = trained(make(), offload, **options)
    assert_equal(state, expected)
    assert set(memory_kinds(expected)) == {DEVICE}
    assert set(memory_kinds(state.weights)) == {HOST if offload.main_weights else DEVICE}
    assert HOST in memory_kinds(state.opt_state)
    assert (DEVICE in memory_kinds(state)) == (offload.update == "device")


@needs_moves
@pytest.mark.slow
@pytest.mark.parametrize("offload", [Offload(0.7), ON_HOST])
def test_a_scanned_step_streams_too(offload: Offload) -> None:
    optimizer = main_weight_adamw(0.01, **SCALED)
    plan, weights = fully_shard(model_of(), data_parallel_mesh(4))
    step = make_train_step(plan, loss, optimizer, donate=False)
    rows = jax.tree.map(lambda *x: np.stack(x), *batches(3))
    scanned = jax.jit(lambda state: jax.lax.scan(step, state, rows))
    expected, offloaded = (
        scanned(init_state(plan, weights, optimizer, offload=placement))[0] for placement in (None, offload)
    )
    assert_equal(offloaded, expected)
    assert HOST in memory_kinds(offloaded.opt_state)


def update_of(offload: Offload, optimizer: Any, metrics: Any = (), **options: Any) -> Any:
    """The lowered update of a step."""
    plan = plan_sharding(model_of(2), data_parallel_mesh(4), **options)
    rows = jax.sharding.NamedSharding(plan.mesh, plan.axes.batch_spec)
    batch = tuple(jax.ShapeDtypeStruct((8, size), np.float32, sharding=rows) for size in (SIZE, 3))
    state = abstract_state(plan, optimizer, offload=offload)
    return make_train_step(plan, loss, optimizer, metrics=metrics).lower_programs(state, batch)[1]


@needs_moves
def test_the_host_computes_the_update_of_each_key_and_devices_what_keys_share() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.lion(0.01))
    update = update_of(ON_HOST, optimizer)
    keys = len(plan_sharding(model_of(2), data_parallel_mesh(4)).arrays)
    assert update.as_text().count('_xla_compute_type = "host"') == keys > 1
    # What the host calls are functions of their own, without the norm of gradients and the step count.
    bodies = re.findall(r"func.func private @compute_on(?s:.*?)\n  }", update.as_text())
    assert len(bodies) == keys
    assert all("stablehlo.sign" in body and "stablehlo.reduce" not in body for body in bodies)
    assert "stablehlo.reduce" in update.as_text()


@pytest.mark.slow
@needs_moves
def test_metrics_of_an_update_on_the_host_come_to_the_devices() -> None:
    optimizer = optax.inject_hyperparams(optax.sgd)(0.25, momentum=0.5)
    plan, weights = fully_shard(model_of(2), data_parallel_mesh(4))
    state = init_state(plan, weights, optimizer, offload=ON_HOST)
    step = make_train_step(plan, loss, optimizer, metrics=["learning_rate", "grad_norm"])
    _, metrics = step(state, batches(1)[0])
    assert metrics["learning_rate"] == 0.25
    assert set(memory_kinds(metrics)) == {DEVICE}


@needs_moves
@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(lambda: optax.contrib.muon(0.01), {}, marks=pytest.mark.slow),
        # Scales are of rows that may be cut over devices.
        pytest.param(lambda: main_weight_adamw(0.01, **SCALED), {"engine": "pjit"}, marks=pytest.mark.slow),
        # Of one key, the norm is no sum over several.
        (lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.lion(0.01)), {"units": []}),
    ],
)
def test_updates_that_need_more_than_a_device_has_are_refused_on_the_host(make: Any, options: Any) -> None:
    with pytest.raises(
        ValueError, match="update on the host: expected an optimizer that treats all elements alike"
    ):
        update_of(ON_HOST, make(), **options)


def test_an_update_on_the_host_needs_a_step_count() -> None:
    plan = plan_sharding(model_of(2), data_parallel_mesh(4))
    with pytest.raises(ValueError, match="Offload: update='host': expected an optimizer with a step count"):
        abstract_state(plan, optax.sgd(0.1, momentum=0.9), offload=ON_HOST)


def held(state: TrainState, memory_kind: str) -> int:
    """Elements of moments."""
    return sum(
        x.size
        for x in jax.tree.leaves((state.opt_state.mu, state.opt_state.nu))
        if x.sharding.memory_kind == memory_kind
    )


@pytest.mark.fast_cases("0.25-pjit", "1.0-shard_map", "0.5-shard_map")
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_a_share_is_near_what_was_asked(engine: str, share: float) -> None:
    plan, weights = fully_shard(model_of(), data_parallel_mesh(4), engine=engine)
    state = init_state(plan, weights, main_weight_adamw(0.01), offload=Offload(share))
    on_host, whole = held(state, HOST), held(state, HOST) + held(state, DEVICE)
    largest = 2 * max(array.size for array in weights.values())
    assert abs(on_host - share * whole) <= largest / 2
    assert (on_host == 0) == (share == 0)
    assert state.opt_state.count.sharding.memory_kind == DEVICE
    # In the plan's order, both moments of an array together.
    for key in plan.arrays:
        assert memory_kinds(state.opt_state.mu[key]) == memory_kinds(state.opt_state.nu[key])
    expected = abstract_state(plan, main_weight_adamw(0.01), offload=Offload(share))
    assert memory_kinds(expected) == memory_kinds(state)


def test_a_report_tells_host_from_device_by_kind() -> None:
    plan, weights = fully_shard(model_of(), data_parallel_mesh(4))
    plain = memory_report(plan, init_state(plan, weights, main_weight_adamw(0.01, **SCALED)))
    state = init_state(plan, weights, main_weight_adamw(0.01, **SCALED), offload=Offload(0.5, True))
    report = memory_report(plan, state)
    for device, before in zip(report.devices, plain.devices, strict=True):
        host = device.on_host
        assert (device.main_weights, host.main_weights) == (0, before.main_weights)
        assert 0 < host.moments < before.moments
        assert host.moments + device.moments == before.moments
        assert host.padding + device.padding == before.padding
        assert (device.other, host.other) == (before.other, 0)
        assert device.host == host.total
        assert device.total + device.host == before.total
    name, device = report.devices[0].device, report.devices[0]
    _, first, below, *_ = str(report).splitlines()
    assert first.split() == [
        name,
        *(f"{size:,}" for size in (0, device.moments, device.padding, device.other, device.total)),
    ]
    assert below.split()[:3] == ["in", "host", "memory"]
    assert below.split()[-1] == f"{device.host:,}"


def test_a_report_of_a_state_that_the_host_updates_tells_the_step_count_there() -> None:
    plan, weights = fully_shard(model_of(2), data_parallel_mesh(4))
    before, after = (
        memory_report(plan, init_state(plan, weights, main_weight_adamw(0.01), offload=offload)).devices[0]
        for offload in (Offload(1.0, True), ON_HOST)
    )
    assert (after.total, after.other) == (0, 0)
    assert (before.total, before.other) == (4, 4)
    assert after.host == before.host + 4
    assert after.on_host.moments == before.on_host.moments > 0


@pytest.mark.slow
@needs_moves
@pytest.mark.parametrize("offload", [Offload(0.6, True), pytest.param(ON_HOST, marks=pytest.mark.slow)])
def test_a_checkpoint_has_the_bytes_of_one_without_offload_and_loads_where_like_says(
    tmp_path: Path, offload: Offload
) -> None:
    optimizer = main_weight_adamw(0.01, **SCALED)
    plan, plain = trained(optimizer, None)
    _, state = trained(optimizer, offload)
    save_checkpoint(tmp_path / "plain", plan, plain)
    save_checkpoint(tmp_path / "offloaded", plan, state)
    assert contents(tmp_path / "offloaded") == contents(tmp_path / "plain")

    other = plan_sharding(model_of(), data_parallel_mesh(3), engine="pjit")
    like = abstract_state(other, optimizer, offload=ON_HOST if offload == ON_HOST else Offload(0.3))
    loaded = load_checkpoint(tmp_path / "offloaded", other, optimizer, like=like).state
    assert memory_kinds(loaded) == memory_kinds(like)
    back = plan_sharding(model_of(), data_parallel_mesh(4))
    save_checkpoint(tmp_path / "moved", other, loaded)
    restored = load_checkpoint(
        tmp_path / "moved", back, optimizer, like=abstract_state(back, optimizer)
    ).state
    assert_equal(restored, plain)
    rows = (np.ones((6, SIZE), np.float32), np.ones((6, 3), np.float32))
    step = make_train_step(other, loss, optimizer)
    if offload == ON_HOST:
        # Rows of a parameter, of which each has a scale, may lie on several devices in the pjit engine.
        with pytest.raises(
            ValueError, match=r"data of other devices: use Offload\(\.\.\., update='device'\)"
        ):
            step(loaded, rows)
    else:
        further, _ = step(loaded, rows)
        assert memory_kinds(further) == memory_kinds(like)


def contents(folder: Path) -> tuple[Any, bytes]:
    """Shapes, dtypes, chunks and the checksum of each; and the tree. Other files have names of times and chance."""
    return json.loads((folder / "twinshard_manifest.json").read_text())["tensors"], (
        folder / "_METADATA"
    ).read_bytes()


def update_memory(layers: int, optimizer: Any, offload: Offload | None) -> Any:
    plan = plan_sharding(model_of(layers), data_parallel_mesh(4))
    rows = jax.sharding.NamedSharding(plan.mesh, plan.axes.batch_spec)
    batch = tuple(jax.ShapeDtypeStruct((8, size), np.float32, sharding=rows) for size in (SIZE, 3))
    state = abstract_state(plan, optimizer, offload=offload)
    return make_train_step(plan, loss, optimizer).lower_programs(state, batch)[1].compile().memory_analysis()


@needs_moves
def test_a_barrier_stands_before_and_behind_the_update_of_each_key() -> None:
    keys = len(plan_sharding(model_of(2), data_parallel_mesh(4)).arrays)
    update = update_of(Offload(1.0), main_weight_adamw(0.01))
    assert update.as_text().count("stablehlo.optimization_barrier") == 2 * keys > 2


@pytest.mark.slow
@pytest.mark.optimized
@needs_moves
@pytest.mark.parametrize("offload", [None, Offload(1.0)])
def test_temporary_arrays_of_an_update_are_those_of_one_key(offload: Offload | None) -> None:
    """Twice as many layers, the largest of which is hardly larger."""
    analyses = [update_memory(layers, main_weight_adamw(0.01, **SCALED), offload) for layers in (4, 8)]
    few, many = (analysis.temp_size_in_bytes for analysis in analyses)
    largest = 4 * 2 * SIZE * (SIZE + 3 * 8) / 4
    assert many < few + largest
    assert many < 8 * largest
    # All that is stored between steps is updated in its place, but for the gradients.
    weights = 4 * sum(2 * SIZE * (SIZE + 3 * layer) for layer in range(8)) / 4
    assert analyses[1].alias_size_in_bytes > weights


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"moments": 1.5}, ValueError, "Offload: moments: expected a share from 0 to 1, got 1.5"),
        ({"moments": -0.1}, ValueError, "Offload: moments: expected a share from 0 to 1, got -0.1"),
        ({"moments": float("nan")}, ValueError, "Offload: moments: expected a share"),
        ({"moments": "half"}, TypeError, "Offload: moments: expected a number from 0 to 1, got 'half'"),
        ({"moments": True}, TypeError, "Offload: moments: expected a number"),
        ({"update": "cpu"}, ValueError, "Offload: update: expected 'device' or 'host', got 'cpu'"),
        (
            {"update": "host"},
            ValueError,
            "expected moments=1.0, main_weights=True, because the host updates both",
        ),
        (
            {"update": "host", "main_weights": True, "moments": 0.9},
            ValueError,
            "got moments=0.9, main_weights=True",
        ),
        ({"main_weights": 1}, TypeError, "Offload: main_weights: expected True or False, got 1"),
    ],
)
def test_other_shares_are_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Offload(**options)


def test_what_is_no_offload_is_refused() -> None:
    plan, weights = fully_shard(model_of(1), data_parallel_mesh(2), units=["layers/*"])
    optimizer, share = main_weight_adamw(1e-2), 0.5
    message = r"offload: expected None or jax_impl.Offload, .*, got 0.5"
    with pytest.raises(TypeError, match=message):
        init_state(plan, weights, optimizer, offload=share)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=message):
        abstract_state(plan, optimizer, offload=share)  # type: ignore[arg-type]
