"""The drawing of a plan's rows against the arrays of its state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_impl import data_parallel_mesh, fully_shard, unshard, visualize
from jax_impl.models import Decoder
from tests.jax_impl.runtime.test_strategy_matrix import EVEN


@pytest.mark.parametrize(("mesh", "copies"), [(3, 1), ({"a": 2, "b": 3}, 2)])
@pytest.mark.parametrize(("engine", "stacked"), [("shard_map", False), ("shard_map", True), ("pjit", False)])
@pytest.mark.filterwarnings("ignore:pjit engine")
def test_drawn_devices_hold_each_element(engine, stacked, mesh, copies):
    plan, weights = fully_shard(
        Decoder(EVEN, rngs=nnx.Rngs(0), stacked=stacked),
        data_parallel_mesh(mesh),
        engine=engine,
        strategy="hsdp" if copies > 1 else "optim_grads_params",
        stacked=["layers"] if stacked else [],
    )
    drawing = visualize(plan)
    assert sum(1 + tensor.alike for tensor in drawing.tensors) == len(plan.parameters)
    whole = unshard(plan, weights)
    for tensor in drawing.tensors:
        held = np.zeros(tensor.shape, int)
        values = np.asarray(whole[tensor.name])
        for boxes, devices in tensor.holdings:
            for offsets, sizes in boxes:
                held[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += len(devices)
        everywhere = tensor.name in plan.whole_parameters
        assert (held == (plan.num_devices if everywhere else copies)).all(), tensor.name
        assert values.shape == tensor.shape
    for array_key, array in weights.items():
        # Element by element: the bytes of each device are what its boxes have.
        for shard in array.addressable_shards:
            real = plan.stored(array_key).numel(shard.index)
            paths = [path for path, info in plan.parameters.items() if info.key == array_key]
            drawn = sum(
                int(np.prod(sizes))
                for path in paths
                for boxes, devices in visualize(plan, path).tensors[0].holdings
                if shard.device.id in devices
                for _, sizes in boxes
            )
            assert drawn == real, (array_key, shard.device)
        break


def test_an_array_is_drawn_by_its_own_sharding():
    mesh = jax.make_mesh((2, 3), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    array = jax.device_put(jnp.zeros((12, 4)), NamedSharding(mesh, PartitionSpec("b", "a")))
    (tensor,) = visualize(array).tensors
    assert {devices: tuple(boxes[0]) for boxes, devices in tensor.holdings} == {
        (shard.device.id,): (tuple(part.start or 0 for part in shard.index), shard.data.shape)
        for shard in array.addressable_shards
    }
    assert str(visualize(jnp.zeros(3), "v")).splitlines()[1:2] == ["v (3,)"]


def test_what_cannot_be_drawn_is_refused():
    plan, _ = fully_shard(Decoder(EVEN, rngs=nnx.Rngs(0)), data_parallel_mesh(2))
    with pytest.raises(ValueError, match="expected parameters at or below 'none', got a plan of"):
        visualize(plan, "none")
    with pytest.raises(TypeError, match=r"expected a ShardingPlan or a jax\.Array, got ndarray"):
        visualize(np.zeros(3))
