"""Every optimizer of torch updates sharded tensors as it does whole ones, or refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.dtensor_cuts import Cut, distribute, values
from tests.support.torch_impl.toy import whole
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.tensor import RowDTensor

SHAPES = [(7, 3), (5,), (), (2, 3, 4), (1, 9), (4, 4, 2), (6, 1), (2, 2, 3, 4)]
MESHES = [Cut((4,)), Cut((2, 2)), Cut((2, 2), axes=2), Cut((2, 2), axes=0)]
LOOPS = ({"foreach": False}, {"foreach": True})
FUSED = (*LOOPS, {"fused": True})

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any], tuple[dict[str, bool], ...]]] = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, FUSED),
    (torch.optim.Adam, {"amsgrad": True}, FUSED),
    (torch.optim.AdamW, {"weight_decay": 0.1}, FUSED),
    (torch.optim.AdamW, {"amsgrad": True, "maximize": True}, FUSED),
    (torch.optim.Adagrad, {}, FUSED),
    (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}, LOOPS),
    (torch.optim.RAdam, {}, LOOPS),
    (torch.optim.Adamax, {}, LOOPS),
    (torch.optim.Adadelta, {}, LOOPS),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}, LOOPS),
    (torch.optim.ASGD, {}, LOOPS),
    (torch.optim.Rprop, {}, LOOPS),
    (torch.optim.Adafactor, {"weight_decay": 0.1}, LOOPS),
]


def tensors(cuts: list[Cut], seed: int) -> list[tuple[torch.Tensor, RowDTensor]]:
    meshes = [cut.mesh() for cut in cuts]
    full = [values(shape, seed + index) for index, shape in enumerate(SHAPES)]
    return [
        (tensor, distribute(tensor, cut, mesh))
        for cut, mesh in zip(cuts, meshes, strict=True)
        for tensor in full
    ]


def train(
    optimizer_class: type[torch.optim.Optimizer],
    options: dict[str, Any],
    forms: tuple[dict[str, bool], ...],
    cuts: list[Cut],
) -> None:
    steps = [tensors(cuts, seed) for seed in (0, 100, 200, 300)]
    if optimizer_class is torch.optim.Rprop:
        # It indexes with a mask, which of a scalar is read as a number.
        steps = [[pair for pair in pairs if pair[0].ndim] for pairs in steps]
    for form in forms:
        plain = [nn.Parameter(full.clone()) for full, _ in steps[0]]
        sharded = [nn.Parameter(tensor.clone()) for _, tensor in steps[0]]
        versions = [local_of(param)._version for param in sharded]
        reference, optimizer = (
            optimizer_class(plain, lr=0.1, **options, **form),
            optimizer_class(sharded, lr=0.1, **options, **form),
        )
        for grads in steps[1:]:
            for param, mine, (full, tensor) in zip(plain, sharded, grads, strict=True):
                param.grad, mine.grad = full.clone(), tensor.clone()
            reference.step()
            optimizer.step()
        for param, mine in zip(plain, sharded, strict=True):
            torch.testing.assert_close(
                whole(mine), param.detach(), rtol=1e-5, atol=1e-6, msg=lambda m, f=form: f"{f}: {m}"
            )
            for key, want in reference.state[param].items():
                if isinstance(want, torch.Tensor):
                    got = optimizer.state[mine][key]
                    assert isinstance(got, RowDTensor) or not want.ndim, key
                    got = whole(got) if isinstance(got, RowDTensor) else got
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        # Ranks without rows count the change too.
        assert all(local_of(p)._version > v for p, v in zip(sharded, versions, strict=True))


USUAL = (torch.optim.SGD, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adafactor)


@pytest.mark.fast_cases("SGD0", "RMSprop9")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=() if optimizer_class in USUAL else pytest.mark.slow,
            id=f"{optimizer_class.__name__}{case}",
        )
        for case, (optimizer_class, *_) in enumerate(OPTIMIZERS)
    ],
)
def test_optimizers_update_tensors_of_all_meshes_as_whole_ones(ranks: RankGroup, case: int) -> None:
    ranks.run(4, train, *OPTIMIZERS[case], MESHES)


def refused_optimizers() -> None:
    mesh = init_device_mesh("cpu", (4,))
    for optimizer_class, way_out in (
        (torch.optim.LBFGS, "full_tensor"),
        (torch.optim.Muon, "MainWeightMuon"),
    ):
        full = values((7, 3))
        param = nn.Parameter(distribute(full, Cut((4,)), mesh))
        optimizer = optimizer_class([param], lr=0.1)

        def closure(param: nn.Parameter = param) -> torch.Tensor:
            param.grad = torch.ones_like(param)
            return torch.tensor(1.0)

        with pytest.raises(RuntimeError, match=rf"is not supported on .*, placed as .* use {way_out}"):
            optimizer.step(closure)
    tensor = nn.Parameter(
        distribute(full, Cut((2, 2), tensor_parallel=(Shard(1),)), init_device_mesh("cpu", (2, 2)))
    )
    tensor.grad = torch.ones_like(tensor)
    with pytest.raises(RuntimeError, match=r"aten.new_zeros.default is not supported on .*, placed as"):
        torch.optim.Adafactor([tensor]).step()


def test_optimizers_that_need_whole_tensors_refuse_sharded_ones(ranks: RankGroup) -> None:
    ranks.run(4, refused_optimizers)


@pytest.mark.fast_cases("{'fused': True}-True", "{'foreach': True}-False")
@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("form", [{"foreach": True}, {"fused": True}], ids=str)
@on_ranks(4)
def test_gradient_scaling_skips_the_step_of_all_ranks_when_one_overflows(
    form: dict[str, bool], unscale: bool
) -> None:
    for cut in MESHES:
        mesh = cut.mesh()
        full = [values((7, 3), 1), values((5,), 2)]
        plain = [nn.Parameter(tensor.clone()) for tensor in full]
        sharded = [nn.Parameter(distribute(tensor, cut, mesh)) for tensor in full]
        made = []
        for params in (plain, sharded):
            optimizer = torch.optim.AdamW(params, lr=0.1, **form)
            made.append((params, optimizer, torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)))
        for step, bad in enumerate((None, 0, None, 6, None)):
            grads = [values((7, 3), 10 + step) * 8, values((5,), 20 + step) * 8]
            if bad is not None:
                grads[0][bad, 1] = float("inf") if bad else float("nan")
            scales = []
            for params, optimizer, scaler in made:
                scaler.scale(torch.tensor(1.0))
                for param, grad in zip(params, grads, strict=True):
                    param.grad = (
                        distribute(grad, cut, mesh) if isinstance(param.data, RowDTensor) else grad.clone()
                    )
                if unscale:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(params, 1.0)
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            assert scales[0] == scales[1], (cut, step)
            for param, mine in zip(plain, sharded, strict=True):
                torch.testing.assert_close(whole(mine), param.detach(), rtol=1e-5, atol=1e-6)
