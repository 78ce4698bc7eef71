"""Rows cut over one or two axes of a mesh, beside replicas and tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.dtensor_cuts import CUTS, FEW, Cut, distribute, placed, values
from torch_impl.comm.mesh import shard_index
from torch_impl.dtensor.local import (
    is_partial,
    local_boxes,
    local_of,
    local_pieces,
    row_bounds_of,
    row_range_of,
)
from torch_impl.dtensor.tensor import RowDTensor, RowShard, make_dtensor, make_partial, wrap_like


def box_of(full: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return full[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]


@FEW
@on_ranks(4)
def test_boxes_cover_each_element_once_per_replica_and_full_tensor_is_bitwise_right(few: bool) -> None:
    for cut, full, tensor in placed(few=few):
        assert torch.equal(tensor.full_tensor(), full), cut
        mesh = tensor.device_mesh
        everywhere = tensor.redistribute(placements=[Replicate()] * mesh.ndim)
        assert torch.equal(everywhere.to_local(), full)
        assert type(everywhere) is RowDTensor
        covered = torch.zeros_like(full)
        for (offsets, sizes), piece in zip(local_boxes(tensor), local_pieces(tensor), strict=True):
            assert torch.equal(piece, box_of(full, offsets, sizes)), cut
            box_of(covered, offsets, sizes).add_(1)
        dist.all_reduce(covered)
        copies = 1
        for axis, placement in enumerate(tensor.placements):
            copies *= mesh.size(axis) if placement.is_replicate() else 1
        assert torch.equal(covered, torch.full_like(full, copies)), cut
        same = wrap_like(tensor, local_of(tensor).double())
        assert (same.dtype, same.placements, same.stride()) == (
            torch.float64,
            tensor.placements,
            full.stride(),
        )


def literal_shards() -> list[object]:
    mesh = init_device_mesh("cpu", (2, 2))
    m, n = mesh.get_coordinate()
    full = torch.arange(12.0).view(6, 2)
    over_two = distribute(full, Cut((2, 2), axes=2), mesh)
    over_one = distribute(full, Cut((2, 2), axes=1), mesh)
    assert row_bounds_of(over_two) == (0, 3, 4, 4, 6)
    assert row_bounds_of(over_one) == (0, 3, 6)
    assert over_two.placements == (RowShard((0, 3, 4, 4, 6), 2),) * 2
    assert over_one.placements == (Replicate(), RowShard((0, 3, 6)))
    assert shard_index(mesh, (0, 1)) == n * 2 + m
    assert shard_index(mesh, (0, 1), (1, 0)) == 1
    return [row_range_of(over_two), row_range_of(over_one), row_range_of(over_two, (1, 1))]


def test_the_outer_coordinate_counts_fastest(ranks: RankGroup) -> None:
    # Coordinates (0, 0), (0, 1), (1, 0), (1, 1).
    assert ranks.run(4, literal_shards) == [
        [(0, 3), (0, 3), (4, 6)],
        [(4, 4), (3, 6), (4, 6)],
        [(3, 4), (0, 3), (4, 6)],
        [(4, 6), (3, 6), (4, 6)],
    ]


@FEW
@on_ranks(4)
def test_reductions_count_each_element_once_on_every_mesh(few: bool) -> None:
    for cut, full, tensor in placed(few=few):
        for order in (1.0, 2.0, 3.0, float("inf")):
            if full.numel():
                want = torch.linalg.vector_norm(full, order)
                torch.testing.assert_close(torch.linalg.vector_norm(tensor, order), want)
        checks = [(tensor.sum(), full.sum()), ((tensor > 9).any(), (full > 9).any())]
        if full.numel():
            checks += [(tensor.mean(), full.mean()), (tensor.max(), full.max()), (tensor.min(), full.min())]
            checks += [
                ((tensor < full.max()).all(), torch.tensor(False)),
                ((tensor == full.min()).any(), torch.tensor(True)),
            ]
        for got, want in checks:
            got = got.full_tensor() if hasattr(got, "full_tensor") else got
            torch.testing.assert_close(got, want, msg=lambda text, c=cut: f"{c}: {text}")
            everyone = torch.empty(4, *got.shape, dtype=got.dtype)
            dist.all_gather_into_tensor(everyone, got.reshape(1))
            assert (everyone == got).all()


@FEW
@on_ranks(4)
def test_element_wise_operators_and_copies_are_right_on_every_mesh(few: bool) -> None:
    for (cut, full, tensor), (_, full2, other) in zip(placed(few=few), placed(seed=50, few=few), strict=True):
        for got, want in (
            (tensor * 2 + other, full * 2 + full2),
            (tensor.clone().copy_(full2), full2),
            (tensor.clone().zero_(), torch.zeros_like(full)),
            (tensor.to(torch.float64), full.double()),
        ):
            assert (type(got), got.placements) == (RowDTensor, tensor.placements), cut
            torch.testing.assert_close(got.full_tensor(), want)


@FEW
@on_ranks(4)
def test_gradients_of_all_meshes_and_plain_ones_are_clipped_together(few: bool) -> None:
    grads = [(full, tensor) for _, full, tensor in placed(few=few) if full.numel()]
    for foreach in (None, True, False):
        for norm_type in (1.0, 2.0, float("inf")):
            clip(grads, foreach, norm_type)


def clip(grads: list[tuple[torch.Tensor, RowDTensor]], foreach: bool | None, norm_type: float) -> None:
    plain_grads = [values((3, 2), 90), values((4,), 91)]
    sharded = [nn.Parameter(torch.zeros_like(tensor)) for _, tensor in grads]
    sharded += [nn.Parameter(torch.zeros_like(grad)) for grad in plain_grads]
    whole = [nn.Parameter(torch.zeros_like(full)) for full, _ in grads]
    whole += [nn.Parameter(torch.zeros_like(grad)) for grad in plain_grads]
    for param, grad in zip(sharded, [*(t for _, t in grads), *plain_grads], strict=True):
        param.grad = grad.clone()
    for param, grad in zip(whole, [*(f for f, _ in grads), *plain_grads], strict=True):
        param.grad = grad.clone()
    total = nn.utils.get_total_norm([p.grad for p in sharded], norm_type, foreach=foreach)
    norm = nn.utils.clip_grad_norm_(sharded, 0.5, norm_type=norm_type, foreach=foreach)
    want = nn.utils.clip_grad_norm_(whole, 0.5, norm_type=norm_type, foreach=foreach)
    torch.testing.assert_close(total, want, rtol=1e-6, atol=0)
    torch.testing.assert_close(norm, want, rtol=1e-6, atol=0)
    for param, reference in zip(sharded, whole, strict=True):
        grad = param.grad.full_tensor() if isinstance(param.grad, RowDTensor) else param.grad
        torch.testing.assert_close(grad, reference.grad)


@pytest.mark.parametrize("foreach", [True, False])
@on_ranks(4)
def test_the_norm_of_a_tensor_without_elements_is_what_torch_says(foreach: bool) -> None:
    full = torch.zeros(0, 4)
    tensor = distribute(full, Cut((2, 2), axes=2), init_device_mesh("cpu", (2, 2)))
    for norm_type in (1.0, 2.0, float("inf")):
        outcomes = []
        for grad in (full, tensor):
            try:
                outcomes.append(nn.utils.get_total_norm([grad], norm_type, foreach=foreach))
            except RuntimeError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1], outcomes


@on_ranks(4)
def test_a_nan_on_any_rank_of_two_axes_is_the_result_on_all() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for row in range(7):
        full = values((7, 3))
        full[row, 1] = float("nan")
        tensor = distribute(full, Cut((2, 2), axes=2), mesh)
        results = [tensor.max(), tensor.min(), tensor.norm(), torch.linalg.vector_norm(tensor, float("inf"))]
        assert all(result.isnan() for result in results), row


@on_ranks(4)
def test_gradients_unreduced_over_any_axis_cannot_be_read() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    full = values((6, 2))
    (r0, r1), bounds = row_range_of(distribute(full, Cut((2, 2)), mesh)), (0, 3, 6)
    for partial in (
        make_partial(full.clone(), mesh, full.shape, True),
        make_partial(full[r0:r1].clone(), mesh, full.shape, True, bounds=bounds, axes=1),
    ):
        assert is_partial(partial)
        for attempt in (lambda p=partial: p + 1, lambda p=partial: p.norm(), lambda p=partial: p.sum()):
            with pytest.raises(RuntimeError, match="accumulated without reducing it over the ranks"):
                attempt()
        for attempt in (
            partial.full_tensor,
            lambda p=partial: row_bounds_of(p),
            lambda p=partial: local_boxes(p),
        ):
            with pytest.raises(RuntimeError, match="expected a sharded or replicated tensor"):
                attempt()
        partial.zero_()
        assert not local_of(partial).any()
    assert not is_partial(make_dtensor(full, mesh, full.shape, None))
    assert not is_partial(full)


@on_ranks(4)
def test_cuts_that_do_not_fit_the_mesh_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    full = values((6, 2))
    for make, message in (
        (lambda: make_dtensor(full[:3], mesh, (6, 2), (0, 3, 6), axes=2), r"on 4 ranks: expected 5 bounds"),
        (lambda: make_dtensor(full[:3], mesh, (6, 2), (0, 3, 6), axes=3), "cut over 1 or 2 mesh axes"),
        (
            lambda: make_dtensor(full[:3], mesh, (6, 2), (0, 3, 6), axes=2, tensor_parallel=(Shard(0),)),
            "make_dtensor: expected axes <= 1",
        ),
        (
            lambda: make_dtensor(full, mesh, (6, 2), None, tensor_parallel=(Shard(2),)),
            r"expected Replicate\(\) or Shard\(dim\) with 0 <= dim < 2",
        ),
        (
            lambda: make_dtensor(full, mesh, (6, 2), None, tensor_parallel=(Shard(0), Shard(0))),
            "expected one or two data-parallel axes, got 0",
        ),
        (
            lambda: make_dtensor(full, mesh, (6, 2), None, tensor_parallel=(Shard(0),)),
            r"expected shape \(3, 2\), got \(6, 2\)",
        ),
        (lambda: make_partial(full, mesh, (6, 2), True, axes=1), "bounds exactly if axes > 0"),
        (
            lambda: make_partial(full, mesh, (6, 2), True, axes=2, bounds=(0, 1, 2, 3, 6)),
            "expected fewer axes than the 2 data-parallel ones",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    across = distribute(full, Cut((2, 2), axes=2), mesh)
    within = distribute(full, Cut((2, 2), axes=1), mesh)
    with pytest.raises(RuntimeError, match="expected tensors of one shape and placement"):
        across + within
    with pytest.raises(
        RuntimeError, match=r"redistribute of .*: expected placements=\[Replicate\(\), Replicate\(\)\]"
    ):
        across.redistribute(placements=[Replicate()])
    descending = DeviceMesh("cpu", [[3, 1], [2, 0]])
    with pytest.raises(ValueError, match="number the mesh in ascending order"):
        make_dtensor(full, descending, (6, 2), None)


def dcp_tensors(cuts: list[Cut], zeros: bool) -> dict[str, RowDTensor]:
    meshes = {cut: cut.mesh() for cut in cuts}
    tensors = {}
    for index, source in enumerate(CUTS):
        for shape in ((7, 3), (2, 3, 4), (5,), (0, 4)):
            cut = cuts[index % len(cuts)]
            if source.fits(shape) and cut.fits(shape):
                full = torch.zeros(shape) if zeros else values(shape, index)
                tensors[f"{index}.{shape}"] = distribute(full, cut, meshes[cut])
    return tensors


def dcp_save(path: str) -> None:
    dcp.save(dcp_tensors(CUTS, zeros=False), checkpoint_id=path)


def dcp_load(path: str, cuts: list[Cut]) -> None:
    state = dcp_tensors(cuts, zeros=True)
    dcp.load(state, checkpoint_id=path)
    for name, tensor in state.items():
        assert torch.equal(tensor.full_tensor(), values(tensor.shape, int(name.split(".")[0]))), name


def test_plain_dcp_carries_tensors_from_every_mesh_to_every_other(ranks: RankGroup, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    ranks.run(4, dcp_save, path)
    ranks.run(1, dcp_load, path, [Cut((1,))])
    ranks.run(3, dcp_load, path, [Cut((3,)), Cut((1, 3), axes=2)])
    ranks.run(4, dcp_load, path, CUTS[1:])
