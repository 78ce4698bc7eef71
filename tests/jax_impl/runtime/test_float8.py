"""Float8 weights: the bytes of whole tensors on any number of devices, what travels, and what forward computes with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bridge.core.sharding import plan_layout
from bridge.core.sharding.policy import float8 as reference
from jax_impl import (
    call_unit,
    count_collectives,
    count_compiled_collectives,
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    main_weight_adamw,
    make_gradients,
    make_train_step,
    plan_sharding,
    save_checkpoint,
    shard_batch,
    shard_weights,
    unshard,
)
from jax_impl.models import Decoder
from jax_impl.runtime.groups import float8
from jax_impl.runtime.groups.float8_group import amax_of_tensors, quantize_blocks, quantize_tensors
from tests.support.bridge import float8_reference
from tests.support.jax_impl.tiny import CONFIG, loss, named, tokens

GATHERS = ["mxfp8", "float8_e4m3fn"]
# An expert stack with odd rows and widths, a single column, blocks that end within a row.
ODD = {"experts": (3, 7, 33), "up": (9, 96), "down": (10, 37), "column": (11, 1), "deep": (2, 3, 5, 64)}
# Rows of whole blocks, and odd numbers of them.
EVEN = {"experts": (3, 7, 64), "up": (9, 96), "down": (11, 32), "gate": (13, 128)}
EVEN_CONFIG = dataclasses.replace(CONFIG, d_model=32, d_ff=64, vocab_size=64)
HEADS = {f"layers/*/attention/{name}": "colwise" for name in ("query", "key", "value")} | {
    "layers/*/attention/out": "rowwise"
}


def values_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Of many magnitudes, with zeros, infinity and NaN among them."""
    random = np.random.default_rng(0)
    values = {
        name: (random.standard_normal(shape) * 10.0 ** random.integers(-6, 4, (*shape[:-1], 1))).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }
    values["up"][2, 5:60], values["up"][3, 7] = 0, np.nan
    values["down"][4, 1], values["down"][5] = -np.inf, 1e-40
    return values


def quantized(values: Any, gather: str, stacked: bool = False) -> np.ndarray:
    """What forward computes with."""
    values = np.asarray(values, np.float32)
    if stacked:
        return np.stack([quantized(layer, gather) for layer in values])
    if values.ndim < 2:
        return values
    rows = values.reshape(-1, values.shape[-1])
    if gather == "mxfp8":
        return float8_reference.dequantize_rows(*float8_reference.quantize_rows(rows)).reshape(values.shape)
    return float8_reference.dequantize_tensor(*float8_reference.quantize_tensor(rows)).reshape(values.shape)


def shards_of(layout: Any, values: dict[str, np.ndarray]) -> np.ndarray:
    shards = np.zeros((layout.num_shards, layout.shard_size), np.float32)
    for rank in range(layout.num_shards):
        for name, (r0, r1) in layout.row_ranges(rank).items():
            rows = values[name].reshape(-1, layout.slot(name).row_size)[r0:r1].ravel()
            start = layout.shard_start(name, rank)
            shards[rank, start : start + rows.size] = rows
    return shards


def pieces_of(layout: Any, values: dict[str, np.ndarray]) -> np.ndarray:
    """mxfp8 of whole tensors, put where the layout has each shard's rows."""
    pieces = np.zeros((layout.num_shards, reference.piece_bytes(layout, "mxfp8")), np.uint8)
    whole = {
        name: float8_reference.quantize_rows(array.reshape(-1, array.shape[-1]))
        for name, array in values.items()
    }
    for rank in range(layout.num_shards):
        for part in reference.scale_parts(layout, rank):
            slot = layout.slots[part.number]
            r0, r1 = layout.row_range(slot.name, rank)
            payload, scales = (encoded[r0:r1].ravel() for encoded in whole[slot.name])
            start, at = layout.shard_start(slot.name, rank), layout.shard_size + part.start
            pieces[rank, start : start + payload.size] = payload
            pieces[rank, at : at + scales.size] = scales
    return pieces


@pytest.mark.fast_cases("3-odd-row", "2-even-block(32)")
@pytest.mark.parametrize("granularity", ["row", "block(32)"])
@pytest.mark.parametrize("shapes", [ODD, EVEN], ids=["odd", "even"])
@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8])
def test_each_shards_bytes_are_those_of_whole_tensors(
    shards: int, shapes: dict[str, tuple[int, ...]], granularity: str
) -> None:
    values = values_of(shapes)
    layout = plan_layout(shapes, shards, granularity=granularity)
    assert reference.in_blocks(layout) == (shapes is EVEN)
    ranks: Any = jnp.arange(shards) if shards > 1 else [None]
    local = shards_of(layout, values)
    pieces = [
        jax.jit(quantize_blocks, static_argnums=0)(layout, x, r) for x, r in zip(local, ranks, strict=True)
    ]
    np.testing.assert_array_equal(np.stack(pieces), pieces_of(layout, values))

    amax = np.max([amax_of_tensors(layout, x, r) for x, r in zip(local, ranks, strict=True)], axis=0)
    whole = {name: float8_reference.quantize_tensor(array) for name, array in values.items()}
    scales = np.asarray(float8.scales_of(jnp.asarray(amax)))
    assert scales.tolist() == [int(whole[name][1]) for name in shapes]
    payload = np.stack(
        [quantize_tensors(layout, x, jnp.asarray(scales), r) for x, r in zip(local, ranks, strict=True)]
    )
    expected = np.zeros_like(payload)
    for rank in range(shards):
        for name, (r0, r1) in layout.row_ranges(rank).items():
            mine = whole[name][0].reshape(-1, layout.slot(name).row_size)[r0:r1].ravel()
            start = layout.shard_start(name, rank)
            expected[rank, start : start + mine.size] = mine
    np.testing.assert_array_equal(payload, expected)


def test_bits_are_those_of_the_reference_for_all_exponents() -> None:
    values = np.arange(0, 2**32, 9973, dtype=np.uint32).view(np.float32)
    random = np.random.default_rng(0)
    # Numbers of one block differ by up to 2^24, and the largest ones are at the edge between two scales.
    spread = random.uniform(-2, 2, (512, 32)) * 2.0 ** random.integers(-24, 0, (512, 32))
    spread[:, 0] = 1.75 * 2.0 ** random.integers(0, 4, 512)
    spread[::2, 0] = np.nextafter(np.float32(spread[::2, 0]), np.float32(99))
    blocks = np.concatenate([values[: values.size // 32 * 32].reshape(-1, 32), spread.astype(np.float32)])
    payload, scales = float8_reference.quantize_rows(blocks)
    own_scales = float8.scales_of(float8.magnitudes(jnp.asarray(blocks)).max(axis=1, keepdims=True))
    np.testing.assert_array_equal(own_scales, scales)
    np.testing.assert_array_equal(float8.encode(jnp.asarray(blocks), own_scales), payload)
    np.testing.assert_array_equal(
        float8.decode(jnp.asarray(payload), own_scales), float8_reference.dequantize_rows(payload, scales)
    )


def apply(unit: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    return sum((jnp.nansum(value) for value in unit.values()), x.mean()), dict(unit)


def seen(model: Any, rows: jax.Array) -> tuple[jax.Array, Any]:
    total, leaves = call_unit(apply, model["layers"][0], rows)
    return total * 0, leaves


@pytest.mark.fast_cases(
    "shard_map-2-optim-shapes3-mxfp8",
    "shard_map-mesh1-hfsdp-shapes1-float8_e4m3fn",
    "pjit-4-optim_grads_params-shapes5-mxfp8",
)
@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize(
    ("engine", "mesh", "strategy", "shapes"),
    [
        ("shard_map", 3, "optim_grads_params", ODD),
        ("shard_map", {"outer": 2, "inner": 2}, "hfsdp", EVEN),
        ("shard_map", {"outer": 2, "inner": 2}, "hsdp", ODD),
        ("shard_map", 2, "optim", ODD),
        ("shard_map", 2, "no_shard", EVEN),
        ("pjit", 4, "optim_grads_params", EVEN),
        ("pjit", {"outer": 2, "inner": 2}, "hfsdp", ODD),
        ("pjit", 2, "no_shard", ODD),
    ],
)
def test_forward_has_exactly_the_dequantized_weights(
    engine: str, mesh: Any, strategy: str, shapes: dict[str, tuple[int, ...]], gather: str
) -> None:
    unit = {**values_of(shapes), "vector": np.float32([1e-3, 3.3, 7])}
    tree = {"layers": [{name: jnp.asarray(value) for name, value in unit.items()}]}
    plan, weights = fully_shard(
        tree,
        data_parallel_mesh(mesh),
        units=["layers/*"],
        engine=engine,
        strategy=strategy,
        param_dtype="bfloat16",
        gather_dtype=gather,
        frozen=["layers/0/column"] if shapes is ODD else ["layers/0/gate"],
    )
    rows = np.ones((plan.num_devices, 2), np.float32)
    (_, aux), _, _ = jax.jit(make_gradients(plan, seen, has_aux=True))(weights, rows)
    for name, value in unit.items():
        expected = quantized(value, gather).astype(jnp.bfloat16)
        assert aux[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(aux[name], np.float32), expected.astype(np.float32), name)


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_each_layer_of_a_stack_has_one_scale_for_a_matrix(engine: Any) -> None:
    layers = np.random.default_rng(0).standard_normal((3, 6, 32)).astype(np.float32)
    # A scale for each row would keep bits that a matrix's scale flushes, and a scale for all layers would flush more.
    layers *= np.geomspace(1, 1e5, 18, dtype=np.float32).reshape(6, 3).T[..., None]

    def last_weights(model: Any, rows: jax.Array) -> tuple[jax.Array, Any]:
        def body(total: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            added, leaves = call_unit(apply, layer, rows)
            return total + added, leaves

        total, leaves = jax.lax.scan(body, jnp.float32(0), model["layers"])
        return total * 0, leaves

    plan, weights = fully_shard(
        {"layers": {"up": jnp.asarray(layers)}},
        data_parallel_mesh(2),
        units=["layers/*"],
        stacked=["layers"],
        engine=engine,
        gather_dtype="float8_e4m3fn",
    )
    rows = np.ones((2, 2), np.float32)
    (_, aux), _, _ = jax.jit(make_gradients(plan, last_weights, has_aux=True))(weights, rows)
    np.testing.assert_array_equal(aux["up"], quantized(layers, "float8_e4m3fn", stacked=True))


def unsharded(config: Any, gather: str, stacked: bool) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients with quantized weights."""
    graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(1), stacked=stacked))

    def narrow(path: Any, variable: Any) -> Any:
        return variable.replace(
            jnp.asarray(quantized(variable.get_value(), gather, stacked and path[0] == "layers"))
        )

    flat = [(path, narrow(path, variable)) for path, variable in nnx.to_flat_state(state)]
    compute = jax.jit(jax.value_and_grad(lambda state, rows: loss(nnx.merge(graphdef, state), rows)))
    value, gradients = compute(nnx.from_flat_state(flat), tokens(8))
    return float(value), named(gradients)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gather", "config", "engine", "mesh", "stacked", "options"),
    [
        pytest.param("mxfp8", CONFIG, "shard_map", 4, False, {"recompute": True}, marks=pytest.mark.slow),
        ("mxfp8", EVEN_CONFIG, "shard_map", 4, True, {"prefetch": 1}),
        ("float8_e4m3fn", EVEN_CONFIG, "shard_map", 4, True, {}),
        pytest.param(
            "float8_e4m3fn",
            CONFIG,
            "shard_map",
            {"dp": 2, "tp": 2},
            False,
            {"parallel": HEADS},
            marks=pytest.mark.slow,
        ),
        pytest.param("mxfp8", EVEN_CONFIG, "pjit", 4, True, {"prefetch": 1}, marks=pytest.mark.slow),
        pytest.param(
            "mxfp8",
            CONFIG,
            "shard_map",
            {"o": 2, "i": 2},
            True,
            {"strategy": "hfsdp"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mxfp8",
            EVEN_CONFIG,
            "shard_map",
            {"dp": 2, "tp": 2},
            True,
            {"parallel": HEADS},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "float8_e4m3fn",
            EVEN_CONFIG,
            "pjit",
            {"dp": 2, "tp": 2},
            False,
            {"parallel": HEADS},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "float8_e4m3fn",
            CONFIG,
            "shard_map",
            2,
            False,
            {"strategy": "optim", "prefetch": 1},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gradients_are_those_of_the_unsharded_model_with_quantized_weights(
    gather: str, config: Any, engine: str, mesh: Any, stacked: bool, options: dict[str, Any]
) -> None:
    model = Decoder(config, rngs=nnx.Rngs(1), stacked=stacked)
    plan, weights = fully_shard(
        model,
        data_parallel_mesh(mesh),
        engine=engine,
        gather_dtype=gather,
        stacked=["layers"] if stacked else [],
        **options,
    )
    gradients = jax.jit(make_gradients(plan, loss, 2))
    value, reduced, _ = jax.block_until_ready(gradients(weights, shard_batch(plan, tokens(8))))
    expected, of_each = unsharded(config, gather, stacked)
    np.testing.assert_allclose(float(value), expected, rtol=1e-6)
    for path, gradient in unshard(plan, reduced).items():
        scale = float(np.abs(of_each[path]).max())
        np.testing.assert_allclose(gradient, of_each[path], rtol=0, atol=3e-6 * scale, err_msg=path)


@pytest.mark.fast_cases("mxfp8")
@pytest.mark.parametrize("gather", GATHERS)
def test_payload_travels_and_nothing_wider(gather: str) -> None:
    layer = {"up": jnp.ones((64, 128)), "down": jnp.ones((128, 64)), "scale": jnp.ones(64)}

    def apply(unit: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ unit["up"]) @ unit["down"] * unit["scale"]

    def loss(model: Any, rows: jax.Array) -> jax.Array:
        return call_unit(apply, model["layers"][0], rows).mean()

    for engine in ("shard_map", "pjit"):
        plan, weights = fully_shard(
            {"layers": [layer]}, data_parallel_mesh(4), units=["layers/*"], engine=engine, gather_dtype=gather
        )
        gradients = make_gradients(plan, loss)
        batch = shard_batch(plan, np.ones((8, 64), np.float32))
        compiled = count_compiled_collectives(jax.jit(gradients).lower(weights, batch).compile())
        gathered = [
            (collective.dtype, collective.size)
            for collective, n in compiled.items()
            if collective.kind == "all_gather"
            for _ in range(n)
        ]
        payload = sum(size for dtype, size in gathered if dtype == "uint8")
        assert all(size <= 64 for dtype, size in gathered if dtype != "uint8"), gathered
        # XLA gathers nothing for backward that only the gradient of the rows would need.
        whole = 2 * 64 * 128
        piece = whole + (4 * 128 if gather == "mxfp8" else 0)
        assert payload == 2 * piece if engine == "shard_map" else whole < payload < 2.1 * whole, gathered
        if engine == "shard_map":
            written = count_collectives(gradients, weights, batch)
            expected = [] if gather == "mxfp8" else [("float32", 2)]
            assert [
                (collective.dtype, collective.size) for collective in written if collective.kind == "pmax"
            ] == expected


@pytest.mark.slow
@pytest.mark.parametrize("gather", GATHERS)
def test_losses_stay_within_two_percent_of_bfloat16s(gather: str) -> None:
    histories = []
    for asked in (None, gather):
        model = Decoder(EVEN_CONFIG, rngs=nnx.Rngs(1))
        plan, weights = fully_shard(model, data_parallel_mesh(2), param_dtype="bfloat16", gather_dtype=asked)
        optimizer = main_weight_adamw(3e-3)
        state, step = init_state(plan, weights, optimizer), make_train_step(plan, loss, optimizer)
        losses = []
        for index in range(30):
            state, metrics = step(state, tokens(8, seed=index % 3))
            losses.append(float(metrics["loss"]))
        histories.append(losses)
    plain, narrow = np.array(histories)
    assert plain[-1] < 0.9 * plain[0]
    np.testing.assert_allclose(narrow, plain, rtol=0.02)
    assert not np.array_equal(narrow, plain)


def test_what_is_asked_for_is_checked() -> None:
    tree = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    mesh = data_parallel_mesh(2)
    with pytest.raises(ValueError, match=r"gather_dtype: expected None or one of .*mxfp8.*, got 'bfloat16'"):
        plan_sharding(tree, mesh, units=[], gather_dtype=jnp.bfloat16)
    plan = plan_sharding(tree, mesh, units=[], gather_dtype=jnp.float8_e4m3fn)
    assert list(plan.arrays) == [" (float8_e4m3fn)", ""]
    with jax.enable_x64(True):
        wide = {"w": jnp.ones((4, 4), jnp.float64)}
        with pytest.raises(ValueError, match="expected None for float64 main weights, got 'mxfp8'"):
            plan_sharding(wide, mesh, units=[], gather_dtype="mxfp8")


def test_a_run_goes_on_from_its_checkpoint_also_with_weights_gathered_otherwise(tmp_path: Path) -> None:
    tree = {"w": jnp.asarray(values_of(EVEN)["gate"] / 1e3), "b": jnp.ones(128)}
    optimizer = main_weight_adamw(1e-2)

    def loss(model: Any, rows: jax.Array) -> jax.Array:
        return jnp.mean((rows @ model["w"] + model["b"]) ** 2)

    def plan_of(gather: str | None) -> Any:
        return plan_sharding(tree, data_parallel_mesh(2), units=[], gather_dtype=gather)

    rows = [np.random.default_rng(n).standard_normal((4, 13)).astype(np.float32) for n in range(4)]
    plan = plan_of("mxfp8")
    step = make_train_step(plan, loss, optimizer)
    state = init_state(plan, shard_weights(plan, tree), optimizer)
    for batch in rows[:2]:
        state, _ = step(state, batch)
    save_checkpoint(tmp_path / "a", plan, state)
    other = plan_of(None)
    loaded = load_checkpoint(tmp_path / "a", other, optimizer).state
    save_checkpoint(tmp_path / "b", other, loaded)
    again = load_checkpoint(tmp_path / "b", plan, optimizer).state
    for batch in rows[2:]:
        state, expected = step(state, batch)
        again, metrics = step(again, batch)
        assert float(metrics["loss"]) == float(expected["loss"])
    whole, its = unshard(plan, state.weights), unshard(plan, again.weights)
    assert all(np.array_equal(whole[path], its[path]) for path in tree)
