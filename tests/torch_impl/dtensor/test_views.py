"""Views, slices, products and partial reductions of sharded tensors: those of whole tensors, or one clear refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing import assert_close

from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.dtensor_cuts import CUTS, FEW, Cut, placed
from tests.support.torch_impl.toy import sharded_toy, whole
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.placement import is_tensor_parallel
from torch_impl.dtensor.tensor import RowDTensor, make_dtensor

PLAIN = [cut for cut in CUTS if not is_tensor_parallel(cut.tensor_parallel)]
# What of a tensor of one, two and three dimensions is right on any cut of rows; writes of views reach the tensor.
VIEWS: dict[str, tuple[set[int], Callable[[Any], Any]]] = {
    "item": ({1, 2, 3}, lambda t: t[0]),
    "last item": ({1, 2, 3}, lambda t: t[-1]),
    "slice": ({1, 2, 3}, lambda t: t[:2]),
    "inner slice": ({1, 2, 3}, lambda t: t[1:-1]),
    "empty slice": ({1, 2, 3}, lambda t: t[5:1]),
    "slice beyond the end": ({1, 2, 3}, lambda t: t[1:99]),
    "slice of a slice": ({1, 2, 3}, lambda t: t[1:][:2]),
    "narrow": ({1, 2, 3}, lambda t: t.narrow(0, 0, 1)),
    "chunk": ({1, 2, 3}, lambda t: t.chunk(3)),
    "more chunks than rows": ({1, 2, 3}, lambda t: t.chunk(50)),
    "split": ({1, 2, 3}, lambda t: t.split(2)),
    "split by sizes": ({1, 2, 3}, lambda t: t.split([1, 0, len(t) - 1])),
    "tensor_split": ({1, 2, 3}, lambda t: t.tensor_split(2)),
    "unbind": ({1, 2, 3}, lambda t: t.unbind()),
    "iteration": ({1, 2, 3}, lambda t: list(t)),
    "view(-1)": ({1, 2, 3}, lambda t: t.view(-1)),
    "flatten": ({1, 2, 3}, lambda t: t.flatten()),
    "and back": ({1, 2, 3}, lambda t: t.view(-1).view(t.shape)),
    "rows of a stack": ({3}, lambda t: t.view(-1, t.shape[-1])),
    "flatten of a stack": ({3}, lambda t: t.flatten(0, 1)),
    "unsqueeze": ({1, 2, 3}, lambda t: t.unsqueeze(0) if t.ndim > 1 else t.unsqueeze(1)),
    "squeeze": ({1, 2, 3}, lambda t: t.unsqueeze(0).squeeze(0) if t.ndim > 1 else t.unsqueeze(1).squeeze()),
    "expand": ({1, 2, 3}, lambda t: t.expand(t.shape)),
}
VALUES: dict[str, tuple[set[int], Callable[[Any], Any]]] = {
    "mean(0)": ({1, 2}, lambda t: t.mean(0)),
    "mean(-1)": ({1, 2}, lambda t: t.mean(-1)),
    "mean(-1, keepdim)": ({1, 2, 3}, lambda t: t.mean(-1, keepdim=True)),
    "mean(-2)": ({2, 3}, lambda t: t.mean(-2)),
    "mean of all": ({1, 2, 3}, lambda t: t.mean(tuple(range(t.ndim)))),
    "sum(0)": ({1, 2}, lambda t: t.sum(0)),
    "sum(dim=1)": ({2}, lambda t: t.sum(dim=1)),
    "sum(-2, keepdim)": ({2, 3}, lambda t: t.sum(-2, keepdim=True)),
    "sum in float64": ({1, 2}, lambda t: t.sum(-1, dtype=torch.float64)),
    "norm(dim=1)": ({2}, lambda t: t.norm(dim=1)),
    "norm(dim=0, p=3)": ({1, 2}, lambda t: torch.linalg.vector_norm(t, 3, 0)),
    "mean of a slice": ({1, 2}, lambda t: t[1:].mean(0)),
    "mean of a stack's rows": ({3}, lambda t: t.mean(-1)),
    "mean over a stack": ({3}, lambda t: t.mean(0)),
    "mean over two": ({3}, lambda t: t.mean((0, 1))),
    "mean over the others": ({3}, lambda t: t.mean((1, 2), keepdim=True)),
    "centered": ({2, 3}, lambda t: t - t.mean(tuple(range(1, t.ndim)), keepdim=True)),
    "sum over all, keepdim": ({1, 2, 3}, lambda t: t.sum(tuple(range(t.ndim)), keepdim=True)),
    "norm over a stack": ({3}, lambda t: t.norm(dim=0)),
    "norm over two": ({3}, lambda t: t.norm(dim=(1, 2), keepdim=True)),
    "norm of order 3 over two": ({3}, lambda t: torch.linalg.vector_norm(t, 3, (0, 2))),
    "largest magnitude by row": ({2, 3}, lambda t: torch.linalg.vector_norm(t, float("inf"), -1)),
    "amax": ({1, 2, 3}, lambda t: t.amax(0)),
    "amin by row": ({2, 3}, lambda t: t.amin(tuple(range(1, t.ndim)), keepdim=True)),
    "amax of all": ({1, 2, 3}, lambda t: t.amax()),
    "prod": ({1, 2, 3}, lambda t: t.prod()),
    "prod(0)": ({1, 2, 3}, lambda t: t.prod(0)),
    "std": ({1, 2, 3}, lambda t: t.std()),
    "std over the others": ({2, 3}, lambda t: t.std(tuple(range(1, t.ndim)), keepdim=True)),
    "var(-1)": ({1, 2, 3}, lambda t: t.var(-1, correction=0)),
    "var of all, without correction": ({1, 2, 3}, lambda t: t.var(unbiased=False)),
    "var_mean": ({2}, lambda t: torch.var_mean(t, 0)[0] + torch.std_mean(t, 0)[1]),
    "NaN in a row": ({2}, lambda t: (t * 0 / (t - t.max())).abs_().amax(1)),
    "new_zeros": ({1, 2, 3}, lambda t: t.new_zeros(t.shape)),
    "new_zeros of another shape": ({1, 2, 3}, lambda t: t.new_zeros(3, 2)),
    "new_ones": ({1, 2, 3}, lambda t: t.new_ones(t.shape)),
    "new_full": ({1, 2, 3}, lambda t: t.new_full((2, 3), 7.0)),
    "new_empty": ({1, 2, 3}, lambda t: t.new_empty(t.shape, dtype=torch.float64).fill_(3)),
    "new_empty without dimensions": ({1, 2, 3}, lambda t: t.new_empty(()).fill_(3)),
}
REFUSED: dict[str, tuple[set[int], Callable[[Any], Any]]] = {
    "t": ({2}, lambda t: t.t()),
    "T": ({2}, lambda t: t.T),
    "transpose": ({3}, lambda t: t.transpose(0, 1)),
    "permute": ({3}, lambda t: t.permute(2, 0, 1)),
    "p @ p.T": ({2}, lambda t: t @ t.T),
    "product": ({2}, lambda t: t @ torch.ones(t.shape[1], 2)),
    "linear": ({2}, lambda t: nn.functional.linear(torch.ones(2, t.shape[1]), t)),
    "embedding": ({2}, lambda t: nn.functional.embedding(torch.tensor([0]), t)),
    "other rows": ({2}, lambda t: t.reshape(t.shape[::-1])),
    "columns": ({2, 3}, lambda t: t[..., :1]),
    "column": ({2}, lambda t: t[:, 0]),
    "every other row": ({1, 2, 3}, lambda t: t[::2]),
    "rows by index": ({1, 2, 3}, lambda t: t[torch.tensor([0, 0])]),
    "mask": ({1, 2, 3}, lambda t: t[t > 0]),
    "chunk of columns": ({2}, lambda t: t.chunk(2, dim=1)),
    "largest": ({2}, lambda t: t.max(0)),
    "sort": ({1, 2}, lambda t: t.sort()),
    "cumsum": ({1, 2}, lambda t: t.cumsum(0)),
    "argmax": ({1, 2}, lambda t: t.argmax()),
    "histc": ({1, 2}, lambda t: t.histc()),
    "svd": ({2}, lambda t: torch.linalg.svd(t)),
    "cat": ({1, 2}, lambda t: torch.cat([t, t])),
    "stack": ({1, 2}, lambda t: torch.stack([t, t])),
    "random values": ({1, 2}, lambda t: torch.rand_like(t)),
    "repeated": ({2}, lambda t: t.expand(2, *t.shape)),
    "no such dimension": ({1, 2, 3}, lambda t: t.unbind(dim=2 * t.ndim)),
    "sum with a plain tensor": ({1, 2, 3}, lambda t: t + torch.ones(t.shape)),
}


def parts(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def tensors(cuts: list[Cut], few: bool) -> Iterator[tuple[Cut, torch.Tensor, RowDTensor]]:
    for cut, full, tensor in placed(cuts=cuts, few=few):
        if full.ndim and full.numel():
            yield cut, full, tensor


@FEW
@on_ranks(4)
def test_views_that_keep_rows_are_those_of_whole_tensors_and_share_memory(few: bool) -> None:
    for cut, full, tensor in tensors(PLAIN, few):
        for name, (dims, view) in VIEWS.items():
            if full.ndim not in dims:
                continue
            version = local_of(tensor)._version
            made, wanted = parts(view(tensor)), parts(view(full))
            assert len(made) == len(wanted), name
            for part, want in zip(made, wanted, strict=True):
                assert type(part) is RowDTensor, name
                assert part.shape == want.shape, (name, cut)
                assert torch.equal(part.full_tensor(), want), (name, cut)
            assert local_of(tensor)._version == version, name
            made[0].mul_(-2)
            wanted[0].mul_(-2)
            assert local_of(tensor)._version > version, name
            assert torch.equal(tensor.full_tensor(), full), (name, cut)
        with pytest.raises(IndexError, match=rf"expected less than {len(full)}"):
            torch.select(tensor, 0, len(full))
        with pytest.raises(RuntimeError, match="is invalid for input of size"):
            tensor.view(full.numel() + 1)
        for sizes in (0, -1, [1, len(full)], [-1, len(full) + 1], []):
            with pytest.raises(RuntimeError, match="split_size"):
                tensor.split(sizes)
        assert [len(part) for part in tensor[:0].split(2)] == [0]
        assert not tensor[:0].split([])


@FEW
@on_ranks(4)
def test_reductions_along_a_dimension_and_new_tensors_are_those_of_whole_tensors(few: bool) -> None:
    for cut, full, tensor in tensors(PLAIN, few):
        for name, (dims, compute) in VALUES.items():
            if full.ndim in dims:
                got, want = compute(tensor), compute(full)
                # Of the same shape, cut alike: optimizers make their states so.
                if name.startswith("new_") and want.shape == full.shape:
                    assert got.placements == tensor.placements, name
                got = got.full_tensor() if isinstance(got, DTensor) else got
                text = f"{name} of {tuple(full.shape)} under {cut}"
                assert_close(
                    got,
                    want,
                    rtol=1e-6,
                    atol=1e-7,
                    equal_nan=True,
                    msg=lambda message, text=text: f"{text}: {message}",
                )


def refused() -> set[str]:
    """Names and answers of what is not refused as it should be."""
    faults = set()
    for cut, full, tensor in tensors([cut for cut in PLAIN if cut.axes], few=False):
        for name, (dims, attempt) in REFUSED.items():
            if full.ndim not in dims or (full.ndim > 1 and min(full.shape) == 1):
                continue
            for operand in (tensor, nn.Parameter(tensor)):
                try:
                    answer = f"answered {attempt(operand)!r}"
                except Exception as error:
                    answer = f"{type(error).__name__}: {error}"
                if "use full_tensor()" not in answer or not answer.startswith("RuntimeError"):
                    faults.add(f"{name}: {answer}")
        assert torch.equal(tensor.full_tensor(), full), cut
    return faults


def test_what_depends_on_the_cut_is_refused_with_the_way_out(ranks: RankGroup) -> None:
    assert ranks.run(4, refused) == [set()] * 4


def beside_torch() -> list[str]:
    """The names of what torch's own sharded tensors answer, too; their values are compared with ours."""
    full = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    mesh = init_device_mesh("cpu", (4,))
    theirs = distribute_tensor(full, mesh, [Shard(0)])
    ours = make_dtensor(
        full.split([5, 0, 2, 1])[mesh.get_local_rank()].clone(), mesh, full.shape, (0, 5, 5, 7, 8)
    )
    answered = []
    for table in (VIEWS, VALUES):
        for name, (dims, compute) in table.items():
            if 2 not in dims:
                continue
            try:
                wanted = [part.full_tensor() for part in parts(compute(theirs))]
            except Exception:  # torch refuses what it lacks by many types
                continue
            answered.append(name)
            for part, want in zip(parts(compute(ours)), wanted, strict=True):
                part = part.full_tensor() if isinstance(part, DTensor) else part
                assert_close(part, want, equal_nan=True, msg=lambda message, text=name: f"{text}: {message}")
    return answered


def test_what_torchs_own_sharded_tensors_answer_has_the_same_values(ranks: RankGroup) -> None:
    answered = ranks.run(4, beside_torch)
    assert {"slice", "chunk", "mean(0)", "new_zeros", "view(-1)"} <= set(answered[0])


@on_ranks(3)
def test_a_write_to_a_view_of_a_parameter_is_seen_by_the_next_forward() -> None:
    """Views of a model's parameters change the next forward; their gradients reach the parameter."""
    model = sharded_toy()
    # A forward with gradients would leave the root's weights whole for its backward.
    with torch.no_grad():
        before = model(torch.arange(4))
        model.embed.weight[1:3].zero_()
        model.head.weight.view(-1)[:2].fill_(1)
        assert whole(model.embed.weight)[1:3].count_nonzero() == 0
        assert not torch.equal(model(torch.arange(4)), before)
    param = nn.Parameter(model.embed.weight.detach().clone())
    (param.view(-1) * 3).to_local().sum().backward()
    assert torch.equal(whole(param.grad), torch.full((9, 5), 3.0))


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "abs_": lambda t: t.abs_(),
    "sign_": lambda t: t.sign_(),
    "clamp_": lambda t: t.clamp_(-0.2, 0.3),
    "nan_to_num_": lambda t: t.div_(0).nan_to_num_(nan=1.0, posinf=2.0, neginf=3.0),
    "neg_": lambda t: t.neg_(),
    "copysign_": lambda t: t.copysign_(-1.0),
    "heaviside_": lambda t: t.heaviside_(torch.zeros_like(t)),
    "gt_": lambda t: t.gt_(0.1),
    "eq_ of two": lambda t: t.eq_(t.clone()),
    "xlogy_": lambda t: t.xlogy_(2.0),
    "threshold_": lambda t: nn.functional.threshold_(t, 0.1, 5.0),
    "mish_": lambda t: nn.functional.mish(t, inplace=True),
    "hardswish_": lambda t: nn.functional.hardswish(t, inplace=True),
    "floor_divide_": lambda t: t.floor_divide_(0.3),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, -1.0),
}


@FEW
@on_ranks(4)
def test_operators_that_write_elements_are_those_of_whole_tensors(few: bool) -> None:
    for cut, full, tensor in tensors(PLAIN, few):
        for name, write in IN_PLACE.items():
            made, wanted = tensor.clone(), full.clone()
            version = local_of(made)._version
            assert write(made) is made, name
            write(wanted)
            text = f"{name} of {tuple(full.shape)} under {cut}"
            assert_close(
                made.full_tensor(),
                wanted,
                rtol=1e-6,
                atol=1e-7,
                msg=lambda message, text=text: f"{text}: {message}",
            )
            assert local_of(made)._version > version, name
