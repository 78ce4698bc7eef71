import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_impl import data_parallel_mesh, fully_shard, plan_sharding, shard_weights, unshard
from tests.support.jax_impl.tiny import CONFIG, decoder, named, tokens

COUNTS = [1, 2, 3, 4]


def collected(plan, buffers):
    """``{path: value}`` assembled from the pieces, each element written exactly once."""
    values = {path: np.full(info.shape, np.nan, info.dtype) for path, info in plan.parameters.items()}
    for unit, buffer in buffers.items():
        for piece in plan.local_pieces(unit, buffer):
            assert plan.parameters[piece.path].key == unit
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
            assert np.isnan(values[piece.path][box]).all()
            values[piece.path][box] = piece.values
    return values


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("devices", COUNTS)
def test_pieces_give_every_element_once_without_gathering(strategy, devices):
    model = decoder()
    plan, weights = fully_shard(model, data_parallel_mesh(devices), strategy=strategy)
    pieces = collected(plan, weights)
    expected = named(nnx.state(model))
    assert list(pieces) == list(plan.parameters) == list(expected)
    for path, value in expected.items():
        np.testing.assert_array_equal(pieces[path], value)


def test_ownership_is_uneven_and_some_shards_hold_nothing_of_a_parameter():
    plan, _ = fully_shard(decoder(), data_parallel_mesh(4))
    bounds = plan.units["layers/0"].layout.row_bounds("mlp.down.kernel")
    sizes = [r1 - r0 for r0, r1 in itertools.pairwise(bounds)]
    assert 0 in sizes
    assert len(set(sizes)) > 2


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@pytest.mark.parametrize("devices", COUNTS)
def test_a_buffer_built_from_pieces_equals_the_packed_one(strategy, devices):
    model = decoder()
    plan, weights = fully_shard(model, data_parallel_mesh(devices), strategy=strategy)
    values = {path: np.asarray(value) for path, value in named(nnx.state(model)).items()}
    for unit in plan.arrays:
        built = plan.build_buffer(
            unit, lambda path, o, s: values[path][tuple(slice(a, a + n) for a, n in zip(o, s, strict=True))]
        )
        assert built.sharding == weights[unit].sharding == plan.sharding(unit)
        np.testing.assert_array_equal(built, weights[unit])


def test_pieces_of_one_device_count_build_the_buffers_of_another():
    model = decoder()
    source, weights = fully_shard(model, data_parallel_mesh(3))
    values = collected(source, weights)
    target = plan_sharding(model, data_parallel_mesh(4), strategy="optim")
    buffers = shard_weights(target, values)
    for path, value in unshard(target, buffers).items():
        np.testing.assert_array_equal(value, values[path])


@pytest.mark.parametrize("devices", COUNTS)
def test_unshard_gives_whole_parameters_on_every_device(devices):
    model = decoder()
    plan, weights = fully_shard(model, data_parallel_mesh(devices))
    whole = unshard(plan, weights)
    for path, value in named(nnx.state(model)).items():
        assert whole[path].sharding.is_fully_replicated
        np.testing.assert_array_equal(whole[path], value)


@pytest.mark.slow
def test_merged_parameters_give_the_models_own_logits():
    model = decoder()
    plan, weights = fully_shard(model, data_parallel_mesh(4))
    merged = plan.merge(unshard(plan, weights))
    np.testing.assert_array_equal(merged(tokens(2)), model(tokens(2)))


def test_merge_names_missing_and_unexpected_parameters():
    plan, weights = fully_shard(decoder(), data_parallel_mesh(1))
    values = unshard(plan, weights)
    values["norm/weight"] = values.pop("norm/scale")
    with pytest.raises(ValueError, match=r"missing \['norm/scale'\], unexpected \['norm/weight'\]"):
        plan.merge(values)


def test_a_plan_needs_no_values():
    model = decoder()
    abstract = nnx.eval_shape(lambda: decoder())
    plan = plan_sharding(abstract, data_parallel_mesh(4))
    expected, _ = fully_shard(model, data_parallel_mesh(4))
    assert {k: u.layout.fingerprint for k, u in plan.units.items()} == {
        k: u.layout.fingerprint for k, u in expected.units.items()
    }
    assert plan.parameters == expected.parameters


def test_main_weights_are_the_given_float32_ones_whatever_the_compute_dtype():
    model = decoder()
    plan, weights = fully_shard(model, data_parallel_mesh(2), param_dtype="bfloat16")
    assert {buffer.dtype for buffer in weights.values()} == {jnp.dtype("float32")}
    whole = unshard(plan, weights)
    for path, value in named(nnx.state(model)).items():
        np.testing.assert_array_equal(whole[path], value)


def test_low_precision_parameters_get_float32_main_weights_and_float64_ones_stay():
    plan, weights = fully_shard(decoder(dtype=jnp.bfloat16), data_parallel_mesh(2))
    assert {buffer.dtype for buffer in weights.values()} == {jnp.dtype("float32")}
    with jax.enable_x64(True):
        plan, weights = fully_shard(decoder(dtype=jnp.float64), data_parallel_mesh(2))
        assert {buffer.dtype for buffer in weights.values()} == {jnp.dtype("float64")}
        assert {info.dtype for info in plan.parameters.values()} == {np.dtype("float64")}


def test_blocks_and_tensors_are_not_cut_when_asked():
    mesh = data_parallel_mesh(2)
    plan = plan_sharding(decoder(), mesh, granularity="block", rows=3)
    for unit in plan.units.values():
        for slot in unit.layout.slots:
            if len(slot.shape) == 2:
                assert unit.layout.row_bounds(slot.name)[1] % 3 in (0, slot.num_rows % 3)
    plan = plan_sharding(decoder(), mesh, granularity="tensor")
    for unit in plan.units.values():
        for slot in unit.layout.slots:
            assert unit.layout.row_bounds(slot.name)[1] in (0, slot.num_rows)


def test_a_buffer_of_another_plan_is_refused():
    plan, weights = fully_shard(decoder(), data_parallel_mesh(4))
    other, _ = fully_shard(decoder(), data_parallel_mesh(3))
    with pytest.raises(ValueError, match="array 'layers/0': expected shape"):
        list(other.local_pieces("layers/0", weights["layers/0"]))
    with pytest.raises(ValueError, match=r"expected an array among .*got 'layers/9'"):
        list(plan.local_pieces("layers/9", weights["layers/0"]))


def test_values_of_a_wrong_shape_are_refused_by_name():
    plan, weights = fully_shard(decoder(), data_parallel_mesh(2))
    with pytest.raises(ValueError, match=r"'layers/1/.*': expected values of shape"):
        plan.build_buffer("layers/1", lambda path, offsets, sizes: np.zeros((1, 1, 1, 1)))
    values = unshard(plan, weights)
    del values["norm/scale"]
    with pytest.raises(ValueError, match=r"'norm/scale': expected values of shape \(13,\), got none"):
        shard_weights(plan, values)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"strategy": "zero3"}, "strategy: expected one of no_shard, optim, .*got 'zero3'"),
        ({"strategy": "hsdp"}, r"'hsdp': expected a mesh of two axes \(outer, inner\), got 1"),
        ({"units": ["blocks/*"]}, r"'blocks/\*' matches none"),
        ({"param_dtype": "int8"}, "param_dtype: expected None or one of"),
        ({"reduce_dtype": "float64"}, "reduce_dtype: float64 needs"),
        ({"granularity": "column"}, "granularity: expected one of row, block"),
    ],
)
def test_wrong_arguments_are_refused_with_what_was_expected(keywords, message):
    with pytest.raises(ValueError, match=message):
        fully_shard(decoder(), data_parallel_mesh(2), **keywords)


def test_integers_are_refused_by_name_where_they_are_trained():
    model = decoder()
    model.norm.scale = nnx.Param(jnp.zeros(CONFIG.d_model, jnp.int32))
    with pytest.raises(
        ValueError,
        match=r"'norm/scale': expected a floating dtype .*, got int32: freeze .*\(frozen=\['norm/scale'\]\)",
    ):
        fully_shard(model, data_parallel_mesh(2))


def test_float64_and_float32_parameters_share_a_unit():
    model = decoder()
    with jax.enable_x64(True):
        model.norm.scale = nnx.Param(jnp.zeros(CONFIG.d_model, jnp.float64))
        plan, _ = fully_shard(model, data_parallel_mesh(2))
    paths = {group.key: group.paths for group in plan.units[""].groups}
    assert paths[" (float64)"] == ("norm/scale",)
    assert "norm/scale" not in paths[""]
