"""Units whose layouts have two and three buffers: nothing but the layout may tell them from others."""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bridge.core.sharding import Layout, Slot
from jax_impl import (
    count_collectives,
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    main_weight_adamw,
    make_gradients,
    make_train_step,
    memory_report,
    plan_layout,
    plan_sharding,
    save_checkpoint,
    shard_batch,
    unshard,
)
from jax_impl.diagnostics.collectives import Collective
from jax_impl.runtime.groups.flat_group import pack, shard_boxes, unpack
from tests.jax_impl.diagnostics.test_collectives import EXPECTED, unordered_collectives
from tests.support.jax_impl.checkpoint_runs import assert_same_bits, logical, whole_buffer
from tests.support.jax_impl.tiny import named

STRATEGIES = tuple(EXPECTED)
# Widths of the layers of each unit, and its number of buffers by devices.
WIDTHS = {"first": (3, 10, 3, 5), "second": (5, 5, 3, 17)}
BUFFERS = {
    1: {"first": 1, "second": 1},
    2: {"first": 2, "second": 3},
    3: {"first": 3, "second": 3},
    4: {"first": 3, "second": 2},
}
OPTIMIZER = main_weight_adamw(1e-2, b2=0.9, weight_decay=0.1)


class Chain(nnx.Module):
    def __init__(self, widths, rngs):
        for i, (n, m) in enumerate(itertools.pairwise(widths)):
            setattr(self, f"k{i}", nnx.Param(jax.random.normal(rngs.params(), (n, m))))
            setattr(self, f"b{i}", nnx.Param(jax.random.normal(rngs.params(), (m,))))
        self.layers = len(widths) - 1

    def __call__(self, x):
        for i in range(self.layers):
            x = jnp.tanh(x @ getattr(self, f"k{i}")[...] + getattr(self, f"b{i}")[...])
        return x


class Chains(nnx.Module):
    def __init__(self, rngs):
        self.first = Chain(WIDTHS["first"], rngs)
        self.second = Chain(WIDTHS["second"], rngs)
        self.scale = nnx.Param(jnp.float32(1.5))

    def __call__(self, x):
        return self.second(self.first(x)) * self.scale[...]


def model():
    return Chains(nnx.Rngs(0))


def loss(model, rows):
    return jnp.mean((model(rows) - 0.25) ** 2)


def rows(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 3)).astype(np.float32)


@functools.cache
def sharded(devices, strategy, **keywords):
    """Without alignment, for which small units have one buffer."""
    mesh = data_parallel_mesh(devices)
    plan, weights = fully_shard(
        model(), mesh, strategy=strategy, units=["first", "second"], align=1, **keywords
    )
    shards = 1 if strategy == "no_shard" else devices
    if not keywords:
        for unit, expected in BUFFERS[shards].items():
            assert len(plan.units[unit].layout.shard_sizes) == expected, "the widths must be chosen anew"
    return plan, weights, make_train_step(plan, loss, OPTIMIZER, microbatches=2)


def assert_close(arrays, expected):
    assert list(arrays) == list(expected)
    for path, value in expected.items():
        scale = np.abs(value).max(initial=0)
        np.testing.assert_allclose(arrays[path], value, rtol=1e-4, atol=2e-6 * scale + 1e-7, err_msg=path)


@functools.cache
def plain_run():
    """Of the model itself: weights, first loss, first gradients, and weights after three steps."""
    graphdef, start = nnx.split(model())
    flat, unravel = jax.flatten_util.ravel_pytree(start)  # AdamW compiles faster for one array

    @jax.jit
    def stepped(weights, opt_state, batch):
        value, gradients = jax.value_and_grad(lambda w: loss(nnx.merge(graphdef, unravel(w)), batch))(weights)
        return value, gradients, OPTIMIZER.apply(gradients, opt_state, weights)

    weights, opt_state, seen = flat, OPTIMIZER.init(flat), []
    for seed in range(3):
        value, gradients, (weights, opt_state) = stepped(weights, opt_state, rows(24, seed))
        seen.append((value, gradients))
    return named(start), seen[0][0], named(unravel(seen[0][1])), named(unravel(weights))


@pytest.mark.fast_cases("optim_grads_params-2")
@pytest.mark.parametrize(
    ("strategy", "devices"), [("no_shard", 2), *itertools.product(STRATEGIES[1:], [2, 3, 4])]
)
def test_gradients_and_steps_equal_those_of_the_plain_model(strategy, devices):
    start, first_loss, first_gradients, end = plain_run()
    plan, weights, step = sharded(devices, strategy)
    assert_same_bits(unshard(plan, weights), start)
    value, gradients = step.gradients(weights, rows(24))
    np.testing.assert_allclose(value, first_loss, rtol=1e-5)
    assert_close(unshard(plan, gradients), first_gradients)
    state = init_state(plan, jax.tree.map(jnp.copy, weights), OPTIMIZER)
    for seed in range(3):
        state, _ = step(state, rows(24, seed))
    assert_close(unshard(plan, state.weights), end)
    for buffers in (state.weights, state.opt_state.mu, state.opt_state.nu):
        for unit, buffer in buffers.items():
            real = sum(np.count_nonzero(piece.values) for piece in plan.local_pieces(unit, buffer))
            assert np.count_nonzero(np.asarray(buffer)) == real, "padding must stay zero"


@pytest.mark.each_value
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("unit", WIDTHS)
def test_packing_is_undone_by_unpacking_and_puts_each_ranks_rows_into_its_shard(unit, num_shards):
    widths = WIDTHS[unit]
    shapes = {f"k{i}": pair for i, pair in enumerate(itertools.pairwise(widths))} | {
        f"b{i}": (width,) for i, width in enumerate(widths[1:])
    }
    shapes |= {"none": (0, 3)}
    layout = plan_layout(shapes, num_shards, align=1)
    assert len(layout.shard_sizes) == BUFFERS.get(num_shards, {}).get(unit, len(layout.shard_sizes))
    numbers = iter(range(1, 10_000))
    values = {
        name: np.array([next(numbers) for _ in range(int(np.prod(shape)))], np.float32).reshape(shape)
        for name, shape in shapes.items()
    }
    flat = np.asarray(pack(layout, [jnp.asarray(value) for value in values.values()]))
    assert np.count_nonzero(flat) == layout.numel
    assert flat.shape == (layout.padded_size,)
    assert_same_bits(dict(zip(shapes, unpack(layout, jnp.asarray(flat)), strict=True)), values)

    shards = np.zeros((num_shards, layout.shard_size), np.float32)
    for rank in range(num_shards):
        for name, offsets, sizes, where in shard_boxes(layout, rank):
            box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            shards[rank, where] = values[name][box].reshape(-1)
    np.testing.assert_array_equal(shards.reshape(-1), flat)
    for slot in layout.slots:
        whole = whole_buffer(layout, flat, slot.buffer)
        np.testing.assert_array_equal(whole[slot.offset : slot.end], values[slot.name].ravel())


def test_one_buffer_is_cut_where_it_lies():
    layout = plan_layout({"w": (5, 4), "b": (3,)}, num_shards=3, align=1)
    flat = jax.ShapeDtypeStruct((layout.padded_size,), np.float32)
    cut = [e.primitive.name for e in jax.make_jaxpr(lambda x: unpack(layout, x))(flat).eqns]
    assert cut == ["slice", "reshape", "slice"]
    leaves = [jax.ShapeDtypeStruct(slot.shape, np.float32) for slot in layout.slots]
    packed = Counter(e.primitive.name for e in jax.make_jaxpr(lambda x: pack(layout, x))(leaves).eqns)
    assert packed["concatenate"] == 1
    assert packed["reshape"] == 1  # of the matrix


def test_shards_of_more_elements_than_int32_counts_are_packed():
    layout = Layout(2, (2**31, 4096), (Slot("a", (2**20, 4096), 1, 0, 0), Slot("b", (8192,), 1, 1, 0)))
    leaves = [jax.ShapeDtypeStruct(slot.shape, np.float32) for slot in layout.slots]
    flat = jax.eval_shape(lambda x: pack(layout, x), leaves)
    assert flat.shape == (layout.padded_size,)
    assert [x.shape for x in jax.eval_shape(lambda x: unpack(layout, x), flat)] == [(2**20, 4096), (8192,)]


@pytest.mark.fast_cases("optim", "optim_grads_params")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_is_gathered_and_reduced_as_often_as_with_one_buffer(strategy):
    plan, weights, _ = sharded(4, strategy)
    batch = shard_batch(plan, rows(8), 2)
    counts = count_collectives(make_gradients(plan, loss, 2), weights, batch)
    expected = Counter({Collective("psum", "float32", 1): 1})  # the loss
    for unit in plan.units.values():
        for operation, times in EXPECTED[strategy](2).items():
            expected[Collective(operation, "float32", unit.layout.padded_size)] += times
    assert counts == expected
    (mapped,) = jax.make_jaxpr(make_gradients(plan, loss))(weights, shard_batch(plan, rows(4))).eqns
    assert unordered_collectives(mapped.params["jaxpr"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_goes_on_with_another_number_of_devices_and_buffers(strategy, tmp_path):
    source, weights, step = sharded(3, "optim_grads_params")
    state, _ = step(init_state(source, jax.tree.map(jnp.copy, weights), OPTIMIZER), rows(24))
    save_checkpoint(tmp_path / "c", source, state, {"step": 1})
    for devices in (2, 4):
        target, _, step_there = sharded(devices, strategy)
        loaded = load_checkpoint(tmp_path / "c", target, OPTIMIZER)
        assert_same_bits(logical(target, loaded.state), logical(source, state))
        there, _ = step_there(loaded.state, rows(24, 1))
        here, _ = step(jax.tree.map(jnp.copy, state), rows(24, 1))
        assert_close(logical(target, there), logical(source, here))
        save_checkpoint(tmp_path / f"again{devices}", target, there)
        again = load_checkpoint(tmp_path / f"again{devices}", source, OPTIMIZER)
        assert_same_bits(logical(source, again.state), logical(target, there))


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_bytes_at_rest_are_counted_over_all_buffers(devices):
    plan, weights, _ = sharded(devices, "optim")
    report = memory_report(plan, init_state(plan, weights, OPTIMIZER))
    assert sum(d.main_weights for d in report.devices) == 4 * sum(
        unit.layout.numel for unit in plan.units.values()
    )
    shard = sum(sum(unit.layout.shard_sizes) for unit in plan.units.values())
    assert {d.total for d in report.devices} == {12 * shard + 4}


def owned(plan, path):
    group = plan.arrays[plan.parameters[path].key]
    bounds = group.layout.row_bounds(group.layout.slots[group.paths.index(path)].name)
    return [r1 - r0 for r0, r1 in itertools.pairwise(bounds)]


def test_blocks_tensors_and_granularities_by_path_train_alike():
    batch, results = rows(12), []
    by_path = {"first/k1": "tensor", "second/k1": "block(2)", "second/b2": "block", "scale": "tensor"}
    for granularity in ("row", "block(32)", "tensor", by_path):
        plan, weights = fully_shard(
            model(), data_parallel_mesh(3), units=["first", "second"], granularity=granularity, rows=4
        )
        _, gradients = make_train_step(plan, loss, OPTIMIZER).gradients(weights, batch)
        results.append(unshard(plan, gradients))
        if granularity == "tensor":
            assert all(sorted(owned(plan, path))[-2] == 0 for path in plan.parameters)
        if granularity == "block(32)":
            assert plan.units["first"].layout.slot("k1").block == 10
    blocks = {
        path: slot.block
        for group in plan.arrays.values()
        for path, slot in zip(group.paths, group.layout.slots, strict=True)
    }
    asked = {"first/k1": 10, "second/k1": 2, "second/b2": 4}
    assert blocks == {**dict.fromkeys(plan.parameters, 1), **asked}
    for gradients in results[1:]:
        assert_close(gradients, {path: np.asarray(value) for path, value in results[0].items()})


def test_granularities_of_unknown_paths_are_refused_by_name():
    mesh = data_parallel_mesh(2)
    with pytest.raises(ValueError, match=r"paths of the model's parameters, got \['first/k7'\]"):
        plan_sharding(model(), mesh, units=["first"], granularity={"first/k0": "row", "first/k7": "row"})
    with pytest.raises(ValueError, match=r"granularity: expected one of row, .*got 'rows'"):
        plan_sharding(model(), mesh, units=["first"], granularity={"first/k0": "rows"})
