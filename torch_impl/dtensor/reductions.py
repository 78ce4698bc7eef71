"""Reductions of a ``RowDTensor``: right on any cut of rows.

Reductions of the whole tensor (norms, sum, mean, extrema, any, all, equal) combine the results of the ranks that hold
different elements, so that replicas count once, and return a plain tensor that is equal on all ranks. Like every
collective they must be reached by all ranks. Norms and means along a dimension are in ``dtensor_matrix``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_impl.comm import collectives
from torch_impl.dtensor import tensor as dtensor
from torch_impl.dtensor.matrix import can_reduce, mean_along, norm_along
from torch_impl.dtensor.operands import align
from torch_impl.dtensor.placement import cut_axes

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_Cut: TypeAlias = tuple[DeviceMesh, tuple[int, ...]]


def _cut_over(tensor: Any) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh and the axes of it whose ranks hold different elements of the tensor; None if all hold all."""
    axes = cut_axes(tensor.placements) if isinstance(tensor, DTensor) else ()
    return (tensor.device_mesh, axes) if axes else None


def _combine(values: torch.Tensor, cut: _Cut, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    mesh, axes = cut
    for axis in axes:
        collectives.all_reduce(values, mesh.get_group(axis), op)


def _max_over_ranks(values: torch.Tensor, cut: _Cut) -> torch.Tensor:
    """Largest of the ranks' values, NaN where any rank's is: backends differ in what their MAX does with NaN."""
    nan = values.isnan()
    both = torch.stack([values.masked_fill(nan, float("-inf")), nan.to(values.dtype)])
    _combine(both, cut, dist.ReduceOp.MAX)
    return both[0].masked_fill(both[1] > 0, float("nan"))


def norms(
    func: Any, tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Norms of whole tensors of any kind, with one all-reduce for all that are cut over the same mesh axes. Collective.

    Args:
        func: what errors name.
        dtype: in which a rank sums and of the results; None for that of each tensor.

    Raises RuntimeError for an order below or equal to 0 where a tensor is sharded.
    """
    cuts = [_cut_over(tensor) for tensor in tensors]
    found = []
    for tensor, cut in zip(tensors, cuts, strict=True):
        local = dtensor.local_of(tensor)
        # A rank without elements contributes a zero; of a tensor without any, torch says what its norm is.
        if not local.numel() and tensor.numel():
            local = local.new_zeros(1)
        found.append(torch.linalg.vector_norm(local, order, dtype=_summed_in(local, dtype) if cut else dtype))
    for cut in dict.fromkeys(cut for cut in cuts if cut):
        where = [i for i, one in enumerate(cuts) if one == cut]
        # Powers and roots in float64 leave one rounding, that of the result.
        values = torch.stack([found[i].double() for i in where])
        if order == float("inf"):
            values = _max_over_ranks(values, cut)
        elif order > 0:
            values = values**order
            _combine(values, cut)
            values = values ** (1 / order)
        else:
            raise RuntimeError(f"{func}: expected a positive order on a sharded tensor, got {order}")
        for i, value in zip(where, values.unbind(), strict=True):
            found[i] = value.to((dtype or tensors[i].dtype).to_real())
    return found


def _summed_in(local: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    """``dtype`` for a rank's part of a result, float32 for half precision: what is combined must not be rounded."""
    return torch.float32 if (dtype or local.dtype) in _HALF else dtype


def _vector_norm(
    func: Any, tensor: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    if ord > 0 and ord != float("inf") and can_reduce(tensor, dim, keepdim):
        return norm_along(tensor, ord, dim[0], dtype)
    if keepdim or (dim is not None and len(dim) not in (0, tensor.ndim)):
        raise RuntimeError(
            f"{func}: expected a norm of the whole tensor, or a finite one along one of the last two dimensions with "
            f"keepdim=True, got dim={dim}, keepdim={keepdim}"
        )
    return norms(func, [tensor], ord, dtype)[0]


def _foreach_norm(func: Any, tensors: list[Any], ord: float = 2, dtype: Any = None) -> list[torch.Tensor]:
    without_elements = [dtensor.local_of(tensor) for tensor in tensors if not tensor.numel()]
    if without_elements:
        torch._foreach_norm(without_elements, ord)  # torch refuses some orders
    return norms(func, tensors, ord, dtype)


def _total(tensor: Any, dtype: torch.dtype | None, count: int) -> torch.Tensor:
    local, cut = dtensor.local_of(tensor), _cut_over(tensor)
    value = local.sum(dtype=_summed_in(local, dtype))
    if cut:
        _combine(value, cut)
    value = value / count if count != 1 else value
    wanted = dtype or local.dtype
    return value.to(wanted) if wanted in _HALF else value


def _sum(func: Any, tensor: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _total(tensor, dtype, 1)


def _mean(func: Any, tensor: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    wanted = dtype or tensor.dtype
    if not (wanted.is_floating_point or wanted.is_complex):
        raise RuntimeError(f"{func}: expected a floating-point or complex dtype, got {wanted}")
    return _total(tensor, dtype, tensor.numel())


def _mean_along(
    func: Any, tensor: Any, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if not can_reduce(tensor, dim, keepdim):
        raise RuntimeError(
            f"{func}: expected a mean of the whole tensor, or along one of the last two dimensions with keepdim=True, "
            f"got dim={dim}, keepdim={keepdim}"
        )
    return mean_along(tensor, dim[0], dtype)


def _extremum(pick: Callable[[torch.Tensor], torch.Tensor], sign: int) -> Callable[..., torch.Tensor]:
    """``pick`` is the largest (``sign`` 1) or the smallest (-1) of a tensor."""

    def reduce(func: Any, tensor: Any) -> torch.Tensor:
        local, cut = dtensor.local_of(tensor), _cut_over(tensor)
        if not local.dtype.is_floating_point:
            raise RuntimeError(f"{func}: expected a floating-point tensor, got {local.dtype}")
        if not tensor.numel():
            raise RuntimeError(f"{func}: expected a tensor with elements, got shape {tuple(tensor.shape)}")
        value = pick(local) if local.numel() else local.new_full((), -sign * float("inf"))
        return sign * _max_over_ranks(sign * value, cut) if cut else value

    return reduce


def _truth(op: Any, pick: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def reduce(func: Any, tensor: Any) -> torch.Tensor:
        value, cut = pick(dtensor.local_of(tensor)).to(torch.int32), _cut_over(tensor)
        if cut:
            _combine(value, cut, op)
        return value.bool()

    return reduce


def _equal(func: Any, tensor: Any, other: Any) -> bool:
    if tensor.shape != other.shape:
        return False
    (left, right), placing = align(func, [tensor, other])
    alike = torch.tensor(torch.equal(left, right), dtype=torch.int32, device=left.device)
    cut = _cut_over(placing.origin)
    if cut:
        _combine(alike, cut, dist.ReduceOp.MIN)
    return bool(alike)


def _unscale(func: Any, grads: list[Any], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """What ``torch.amp.GradScaler`` does to gradients; all ranks learn of an infinity on any."""
    func([dtensor.local_of(grad) for grad in grads], found_inf, inv_scale)
    for cut in dict.fromkeys(cut for cut in map(_cut_over, grads) if cut):
        _combine(found_inf, cut, dist.ReduceOp.MAX)


REDUCTIONS: dict[Any, Callable[..., Any]] = {
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten.sum.default: _sum,
    _aten.mean.default: _mean,
    _aten.mean.dim: _mean_along,
    _aten.max.default: _extremum(torch.max, 1),
    _aten.min.default: _extremum(torch.min, -1),
    _aten.any.default: _truth(dist.ReduceOp.MAX, torch.any),
    _aten.equal.default: _equal,
    _aten.all.default: _truth(dist.ReduceOp.MIN, torch.all),
}
