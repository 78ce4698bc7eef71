"""The drawing of a model's rows against what the ranks hold."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import on_ranks
from tests.support.torch_impl.dtensor_cuts import placed
from torch_impl import fully_shard, visualize
from torch_impl.dtensor.local import local_boxes
from torch_impl.dtensor.placement import row_placement, tensor_parallel_sizes


@on_ranks(4)
def test_every_rank_knows_the_boxes_of_all_ranks() -> None:
    compared = 0
    for cut, _, tensor in placed(few=True):
        if not tensor.numel():
            continue
        held: list[object] = [None] * 4
        dist.all_gather_object(held, local_boxes(tensor))
        ranks = tensor.device_mesh.mesh
        for at in itertools.product(*map(range, ranks.shape)):
            where = (tensor.shape, tensor.device_mesh, tensor.placements)
            uneven = tensor_parallel_sizes(*where, at) != tensor_parallel_sizes(*where)
            if uneven and row_placement(tensor.placements) is not None:
                with pytest.raises(ValueError, match="expected tensor-parallel axes that cut it evenly"):
                    local_boxes(tensor, at)
                continue
            assert local_boxes(tensor, at) == held[int(ranks[at])], (cut, at)
            compared += 1
    assert compared > 20


@on_ranks(4)
def test_a_model_is_drawn_alike_on_all_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6)) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    drawn: list[object] = [None] * 4
    dist.all_gather_object(drawn, str(visualize(model)))
    assert len(set(drawn)) == 1
    assert "12 sharded parameters on 4 ranks (2, 2)" in str(drawn[0])
    weight = visualize(model, "1.0.weight").tensors[0]
    assert weight.name == "1.0.weight"
    assert weight.shape == (10, 6)
    # One of the two shards of hsdp, on both replicas.
    holders = {devices for boxes, devices in weight.holdings if boxes}
    assert holders <= {(0, 2), (1, 3)}
    assert visualize(model[1][0].weight).tensors[0].holdings == weight.holdings
    assert len(visualize(model, "1").tensors) == 4
    with pytest.raises(ValueError, match=r"at or below 'none', got FSDPSequential without any"):
        visualize(model, "none")
    with pytest.raises(TypeError, match="visualize: expected a module or a DTensor, got int"):
        visualize(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a DTensor, got Tensor"):
        visualize(torch.zeros(3))
