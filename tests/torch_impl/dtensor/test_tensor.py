"""A DTensor never lies: on uneven and empty shards every operation is right or raises."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import torch_impl
from bridge.core.sharding.layout.rows import local_shape, rows_of
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import Toy, sharded_toy, whole
from torch_impl.dtensor.local import local_boxes, local_of, local_pieces, row_bounds_of, row_range_of
from torch_impl.dtensor.tensor import RowDTensor, RowShard, make_dtensor, make_partial

# Shapes, and row bounds on three ranks: uneven, with empty shards at either end and in the middle.
CUTS = [
    ((7, 3), (0, 4, 4, 7)),
    ((5,), (0, 0, 1, 5)),
    ((), (0, 0, 1, 1)),
    ((2, 3, 4), (0, 1, 5, 6)),
    ((1, 9), (0, 0, 0, 1)),
    ((0, 4), (0, 0, 0, 0)),
    ((4, 4, 2), (0, 16, 16, 16)),
]


def values(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cut(full: torch.Tensor, bounds: tuple[int, ...] | None, mesh: DeviceMesh) -> RowDTensor:
    if bounds is None:
        return make_dtensor(full.clone(), mesh, full.shape, None)
    rank = dist.get_rank()
    rows = bounds[rank + 1] - bounds[rank]
    size = rows_of(full.shape)[0]
    local = full.reshape(-1)[bounds[rank] * size : bounds[rank + 1] * size].clone()
    return make_dtensor(local.view(local_shape(full.shape, rows)), mesh, full.shape, bounds)


def all_cuts(mesh: DeviceMesh, seed: int = 0) -> list[tuple[torch.Tensor, RowDTensor]]:
    full = [values(shape, seed) for shape, _ in CUTS]
    pairs = [(whole, cut(whole, bounds, mesh)) for whole, (_, bounds) in zip(full, CUTS, strict=True)]
    return pairs + [(whole, cut(whole, None, mesh)) for whole in full]


@on_ranks(3)
def test_boxes_cover_each_element_once_and_full_tensor_is_bitwise_right() -> None:
    mesh = init_device_mesh("cpu", (3,))
    for (shape, bounds), (full, tensor) in zip(CUTS, all_cuts(mesh), strict=False):
        assert tensor.shape == full.shape
        assert row_bounds_of(tensor) == bounds
        assert row_range_of(tensor) == (bounds[dist.get_rank()], bounds[dist.get_rank() + 1])
        assert torch.equal(tensor.full_tensor(), full)
        assert torch.equal(tensor.redistribute(placements=[Replicate()]).to_local(), full)
        covered = torch.zeros(shape)
        for rank in range(3):
            for offsets, sizes in local_boxes(tensor, (rank,)):
                covered[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
        assert torch.equal(covered, torch.ones(shape))
        for (offsets, sizes), piece in zip(local_boxes(tensor), local_pieces(tensor), strict=True):
            assert torch.equal(
                piece, full[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            )


@on_ranks(3)
def test_copies_of_all_kinds_keep_type_placement_and_values() -> None:
    mesh = init_device_mesh("cpu", (3,))
    for full, tensor in all_cuts(mesh):
        for same in (
            nn.Parameter(tensor),
            tensor.detach(),
            tensor.clone(),
            tensor.data,
            tensor.to(torch.float64).float(),
            copy.deepcopy(tensor),
            copy.deepcopy(nn.Parameter(tensor)),
            torch.zeros_like(tensor) + tensor,
        ):
            assert type(same) is RowDTensor
            assert same.placements == tensor.placements
            assert torch.equal(whole(same), full)
        assert isinstance(copy.deepcopy(nn.Parameter(tensor)), nn.Parameter)
        assert local_of(nn.Parameter(tensor)) is local_of(tensor)


@on_ranks(3)
def test_elementwise_operators_and_whole_reductions_are_right() -> None:
    mesh = init_device_mesh("cpu", (3,))
    for (full, tensor), (full2, other) in zip(all_cuts(mesh), all_cuts(mesh, seed=1), strict=True):
        for result, want in (
            (tensor + other, full + full2),
            (tensor * 2 - 1, full * 2 - 1),
            (tensor.abs().sqrt(), full.abs().sqrt()),
            (tensor / torch.tensor(3.0), full / 3.0),
            (torch.lerp(tensor, other, 0.3), torch.lerp(full, full2, 0.3)),
            (
                tensor.clone().addcdiv_(other, tensor, value=0.1),
                full.clone().addcdiv_(full2, full, value=0.1),
            ),
            (tensor.clone().copy_(full2), full2),
            (tensor.clone().zero_(), torch.zeros_like(full)),
            (torch.isnan(tensor), torch.isnan(full)),
            (torch.maximum(tensor, other, out=other.clone()), torch.maximum(full, full2)),
        ):
            assert result.placements == tensor.placements
            torch.testing.assert_close(whole(result), want)
        if full.numel():
            for result, want in (
                (tensor.sum(), full.sum()),
                (tensor.mean(), full.mean()),
                (tensor.max(), full.max()),
                (tensor.min(), full.min()),
                (tensor.norm(), full.norm()),
                (
                    torch.linalg.vector_norm(tensor, float("inf")),
                    torch.linalg.vector_norm(full, float("inf")),
                ),
                (torch.linalg.vector_norm(tensor, 1), torch.linalg.vector_norm(full, 1)),
                ((tensor > 1).any(), (full > 1).any()),
                ((tensor < 5).all(), (full < 5).all()),
            ):
                result = result.full_tensor() if hasattr(result, "full_tensor") else result
                torch.testing.assert_close(result, want)


@on_ranks(3)
def test_reductions_that_torch_does_not_define_are_refused() -> None:
    mesh = init_device_mesh("cpu", (3,))
    for full, bounds in ((torch.zeros(0, 3), (0, 0, 0, 0)), (torch.arange(3), (0, 1, 1, 3))):
        for reduce in (torch.max, torch.min) if full.numel() == 0 else (torch.mean,):
            for tensor in (full, cut(full, bounds, mesh)):
                with pytest.raises(RuntimeError):
                    reduce(tensor)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
@on_ranks(3)
def test_tensors_are_equal_on_all_ranks_or_on_none(strategy: str) -> None:
    same = sharded_toy(strategy=strategy)
    for row in (None, 0, 8):
        changed = Toy()
        if row is not None:
            with torch.no_grad():
                changed.embed.weight[row, 0] += 1
        torch_impl.fully_shard(changed.blocks[0], strategy=strategy)
        torch_impl.fully_shard(changed.blocks[1], strategy=strategy)
        torch_impl.fully_shard(changed, strategy=strategy)
        assert torch.equal(same.embed.weight, changed.embed.weight) is (row is None)
    assert not torch.equal(same.embed.weight, same.blocks[0].up.weight)
    with pytest.raises(RuntimeError, match="expected tensors of one shape and placement"):
        torch.equal(same.embed.weight, Toy().embed.weight)


@on_ranks(3)
def test_what_depends_on_the_cut_raises() -> None:
    mesh = init_device_mesh("cpu", (3,))
    full, tensor = all_cuts(mesh)[0]
    elsewhere = cut(full, (0, 1, 2, 7), mesh)
    partial = make_partial(full.clone(), mesh, full.shape, True)
    for attempt in (
        lambda: tensor + full,
        lambda: tensor + full[0],
        lambda: tensor + elsewhere,
        lambda: tensor.clone().copy_(elsewhere),
        lambda: torch._foreach_add([tensor, tensor], [tensor, elsewhere]),
        lambda: torch.add(tensor, tensor, out=elsewhere.clone()),
        lambda: torch.add(tensor, tensor, out=full.clone()),
    ):
        with pytest.raises(RuntimeError, match="expected tensors of one shape and placement"):
            attempt()
    for attempt in (lambda: partial + 1, lambda: partial.sum(), lambda: partial.norm()):
        with pytest.raises(RuntimeError, match="accumulated without reducing it over the ranks"):
            attempt()
    for attempt, message in (
        (lambda: torch.rand_like(tensor), "expected an element-wise operator, a reduction, or a view"),
        (lambda: tensor.clone().copy_(full[:3]), r"expected a tensor of shape \(7, 3\), got \(3, 3\)"),
        (
            lambda: tensor.tolist(),
            r"^tolist\(\) of a tensor of shape \(7, 3\), which is sharded over the ranks",
        ),
        (lambda: tensor.redistribute(placements=[Shard(0)]), r"expected placements=\[Replicate\(\)\]"),
        (lambda: partial.full_tensor(), "expected a sharded or replicated tensor"),
    ):
        with pytest.raises(RuntimeError, match=message):
            attempt()
    assert torch.equal(tensor.full_tensor(), full)
    for bounds in ((0, 7), (0, 3, 3, 6), (0, 4, 3, 7), (1, 3, 3, 7)):
        with pytest.raises(ValueError, match=r"row bounds|ascending row bounds"):
            make_dtensor(local_of(tensor), mesh, (7, 3), bounds)
    with pytest.raises(ValueError, match=r"expected shape .*, got \(9, 3\)"):
        make_dtensor(torch.zeros(9, 3), mesh, (7, 3), (0, 4, 4, 7))


@on_ranks(3)
def test_element_wise_torch_optimizers_and_gradient_clipping_work() -> None:
    mesh = init_device_mesh("cpu", (3,))
    for optimizer_class, options in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.1}),
        (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
        (torch.optim.RMSprop, {"lr": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.Adamax, {"lr": 0.1}),
        (torch.optim.NAdam, {"lr": 0.1}),
        (torch.optim.RAdam, {"lr": 0.1}),
        (torch.optim.Adadelta, {"lr": 0.1}),
        (torch.optim.ASGD, {"lr": 0.1}),
    ):
        for how in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            if "fused" in how and optimizer_class not in (
                torch.optim.SGD,
                torch.optim.AdamW,
                torch.optim.Adam,
            ):
                continue
            pairs = all_cuts(mesh)
            plain = [nn.Parameter(full.clone()) for full, _ in pairs]
            sharded = [nn.Parameter(tensor) for _, tensor in pairs]
            versions = [local_of(param)._version for param in sharded]
            expected, optimizer = (
                optimizer_class(plain, **options, **how),
                optimizer_class(sharded, **options, **how),
            )
            for step in range(3):
                grads = all_cuts(mesh, seed=step + 7)
                for param, mine, (full, tensor) in zip(plain, sharded, grads, strict=True):
                    param.grad, mine.grad = full.clone(), tensor
                norm = nn.utils.clip_grad_norm_(sharded, 1.0)
                torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain, 1.0), rtol=1e-6, atol=0)
                expected.step()
                optimizer.step()
            for param, mine in zip(plain, sharded, strict=True):
                torch.testing.assert_close(
                    whole(mine),
                    param.detach(),
                    rtol=1e-5,
                    atol=1e-6,
                    msg=lambda text, k=optimizer_class, h=how: f"{k} {h}: {text}",
                )
            # Ranks without rows count the change too.
            assert all(local_of(p)._version > v for p, v in zip(sharded, versions, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_ranks(3)
def test_reductions_of_half_precision_round_once_as_those_of_a_whole_tensor(dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (3,))
    # Sums of squares and sums leave the range of float16, and bfloat16 cannot count to 900.
    for full in (torch.full((900,), 200.0), torch.arange(900.0) / 2 + 1, torch.full((900,), 1.0)):
        full = full.to(dtype)
        tensor = cut(full, (0, 300, 300, 900), mesh)
        for order in (1.0, 2.0, 3.0, float("inf")):
            torch.testing.assert_close(
                torch.linalg.vector_norm(tensor, order), torch.linalg.vector_norm(full, order), rtol=0, atol=0
            )
            assert torch.equal(torch._foreach_norm([tensor], order)[0], torch._foreach_norm([full], order)[0])
        for result, want in (
            (tensor.sum(), full.sum()),
            (tensor.mean(), full.mean()),
            (tensor.sum(dtype=torch.float32), full.sum(dtype=torch.float32)),
            (tensor.max(), full.max()),
            (tensor.min(), full.min()),
        ):
            assert result.dtype == want.dtype
            assert torch.equal(result, want), (result, want)
    sharded, plain = nn.Parameter(torch.zeros_like(tensor)), nn.Parameter(torch.zeros_like(full))
    sharded.grad, plain.grad = tensor * 200, full * 200
    clipped = nn.utils.clip_grad_norm_([sharded], 1.0)
    assert torch.equal(clipped, nn.utils.clip_grad_norm_([plain], 1.0))
    assert torch.equal(whole(sharded.grad), plain.grad)
    assert plain.grad.count_nonzero() == 900


@on_ranks(3)
def test_the_norms_of_ranks_are_combined_with_one_rounding() -> None:
    mesh = init_device_mesh("cpu", (3,))
    generator = torch.Generator().manual_seed(7)
    for _ in range(50):
        full = torch.randn(3, generator=generator)
        for order in (2.0, 3.0):
            want = (full.abs().double() ** order).sum() ** (1 / order)
            assert torch.linalg.vector_norm(cut(full, (0, 1, 2, 3), mesh), order) == want.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(3)
def test_a_nan_on_any_rank_is_the_result_on_all(dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (3,))
    for row in (0, 1, 2, 6):
        full = values((7, 3)).to(dtype)
        full[row, 1] = float("nan")
        tensor = cut(full, (0, 1, 2, 7), mesh)
        param = nn.Parameter(torch.zeros_like(tensor))
        for result in (
            tensor.max(),
            tensor.min(),
            tensor.norm(),
            torch.linalg.vector_norm(tensor, float("inf")),
            torch._foreach_norm([tensor], float("inf"))[0],
        ):
            assert result.isnan(), row
            assert result.dtype == dtype
        for order in (2.0, float("inf")):
            param.grad = tensor.clone()
            assert nn.utils.clip_grad_norm_([param], 1.0, norm_type=order).isnan(), (row, order)
            assert whole(param.grad).isnan().all()
            param.grad = tensor.clone()
            with pytest.raises(RuntimeError, match="non-finite"):
                nn.utils.clip_grad_norm_([param], 1.0, norm_type=order, error_if_nonfinite=True)


@on_ranks(3)
def test_gradients_flow_back_through_to_local() -> None:
    mesh = init_device_mesh("cpu", (3,))
    for full, tensor in all_cuts(mesh):
        param = nn.Parameter(tensor)
        (param.to_local() ** 2).sum().backward()
        assert type(param.grad) is RowDTensor
        torch.testing.assert_close(whole(param.grad), 2 * full)


@on_ranks(3)
def test_expanded_and_shared_gradients_of_local_rows_become_the_parameters_own() -> None:
    mesh = init_device_mesh("cpu", (3,))
    for optimizer_class, options in (
        (torch_impl.MainWeightAdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.SGD, {"fused": True}),
    ):
        full = values((300, 7))
        plain, sharded = nn.Parameter(full.clone()), nn.Parameter(cut(full, (0, 100, 100, 300), mesh))
        # The gradient of a sum is one number with strides of zero.
        (plain.sum() * 3).backward()
        (sharded.to_local().sum() * 3).backward()
        reference = torch.optim.AdamW if optimizer_class is torch_impl.MainWeightAdamW else optimizer_class
        reference([plain], lr=0.1, weight_decay=0.0, **options).step()
        optimizer_class([sharded], lr=0.1, weight_decay=0.0, **options).step()
        assert torch.equal(whole(sharded.grad), torch.full_like(full, 3.0))
        torch.testing.assert_close(whole(sharded), plain.detach(), rtol=1e-6, atol=1e-7)
    # Autograd hands the one gradient of a sum of two tensors to both.
    first, second = (nn.Parameter(cut(full, (0, 100, 100, 300), mesh)) for _ in range(2))
    (first.to_local() + second.to_local()).square().sum().backward()
    before = whole(first.grad)
    second.grad.zero_()
    assert torch.equal(whole(first.grad), before)


def plain_dcp_save(path: str) -> None:
    model = sharded_toy()
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in Toy().state_dict().items():
        assert torch.equal(full[name], value), name


def plain_dcp_load(path: str, strategy: str) -> None:
    model = sharded_toy(strategy=strategy)
    for param in model.parameters():
        param.data.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    for name, value in Toy().state_dict().items():
        assert torch.equal(whole(model.state_dict()[name]), value), name
    tokens = torch.arange(4)
    torch.testing.assert_close(model(tokens), Toy()(tokens))


@pytest.mark.slow
def test_plain_dcp_saves_and_loads_state_dicts_across_rank_counts(ranks: RankGroup, tmp_path: Path) -> None:
    for world in (4, 3):
        path = tmp_path / f"from-{world}"
        ranks.run(world, plain_dcp_save, str(path))
        for target, strategy in (
            (1, "optim"),
            (2, "optim_grads_params"),
            (4, "no_shard"),
            (4, "optim_grads"),
        ):
            ranks.run(target, plain_dcp_load, str(path), strategy)


def test_placements_compare_by_their_bounds() -> None:
    assert RowShard((0, 1, 3)) == RowShard([0, 1, 3])
    assert RowShard((0, 1, 3)) != RowShard((0, 2, 3))
    assert RowShard((0, 1, 3)) != Shard(0)
    assert len({RowShard((0, 1)), RowShard((0, 1))}) == 1
    assert pickle.loads(pickle.dumps(RowShard((0, 1, 3)))) == RowShard((0, 1, 3))


@on_ranks(2)
def test_a_backward_through_a_whole_tensor_is_refused() -> None:
    model = sharded_toy()
    weight = model.head.weight
    tensor = weight.full_tensor()
    assert tensor.requires_grad, "as of a DTensor, so that a program does not lose a gradient in silence"
    with pytest.raises(
        RuntimeError, match=r"full_tensor\(\) of parameter 'head.weight' of shape \(1, 5\), .*: use"
    ):
        tensor.sum().backward()
    assert weight.grad is None
    with torch.no_grad():
        assert not weight.full_tensor().requires_grad
    assert not weight.detach().full_tensor().requires_grad
    assert not torch_impl.full_tensor(weight).requires_grad


@on_ranks(2)
def test_whole_tensors_of_weights_that_are_shown_whole_are_refused_with_the_way_out() -> None:
    model = sharded_toy(reshard_after_forward=False)
    wanted = Toy().head.weight.detach()
    model(torch.arange(4))
    with pytest.raises(
        TypeError,
        match=r"got a plain Parameter of shape \(1, 5\); module.weight is already whole .* after reshard\(\)",
    ):
        torch_impl.full_tensor(model.head.weight)
    assert torch.equal(torch_impl.full_tensor(model.state_dict()["head.weight"]), wanted)
    model.reshard()
    assert torch.equal(torch_impl.full_tensor(model.head.weight), wanted)
    with pytest.raises(TypeError, match=r"full_tensor: expected a sharded parameter .*, got a plain Linear;"):
        torch_impl.full_tensor(model.head)
