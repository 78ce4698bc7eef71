"""Reductions of a ``RowDTensor``, correct for any cut of rows.

Reductions of the whole tensor (norms, sum, mean, extrema, any, all, equal) combine the results of the ranks that hold
different elements, so that replicas count once. Their result is a plain tensor that is equal on all ranks. All ranks
must call them, like every collective.

Norms, sums and means along one of the last two dimensions return a ``RowDTensor``. Along the last dimension, each rank
has whole rows. Along the second-to-last, each rank adds its rows slice by slice, and the ranks' sums are added::

    (2, 3, 5) cut, rows [2, 6)      norm, dim=-1: (2, 3, 1), cut alike      norm, dim=-2: (2, 1, 5), replicated
    slice 0  . . #                            . . #                                   #
    slice 1  # # #                            # # #                                   #

Without ``keepdim`` the result loses that dimension. Then sums of a stack along its last dimension are replicated, since
a shard could end inside a row of the result, and so are reductions over several dimensions, see ``dim_reductions``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torch_impl.dtensor.dim_reductions import (
    OVER_DIMS,
    CutOver,
    combine,
    max_over_ranks,
    norm_over_dims,
    sum_over_dims,
)
from torch_impl.dtensor.local import local_of, row_bounds_of, row_range_of
from torch_impl.dtensor.operands import align
from torch_impl.dtensor.placement import cut_axes, is_tensor_parallel, row_axes
from torch_impl.dtensor.tensor import wrap_rows
from torch_impl.dtensor.views import in_shape

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def _cut_over(tensor: Any) -> CutOver | None:
    """The mesh, and its axes whose ranks hold different elements of the tensor; None if all ranks hold all elements."""
    axes = cut_axes(tensor.placements) if isinstance(tensor, DTensor) else ()
    return (tensor.device_mesh, axes) if axes else None


def norms(
    func: Any, tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Norms of whole tensors of any kind, with one all-reduce for all that are cut over the same mesh axes. Collective.

    Args:
        func: the name in errors.
        dtype: the dtype of a rank's sums and of the results; None for each tensor's dtype.

    Raises RuntimeError for an order of 0 or below if a tensor is sharded.
    """
    cuts = [_cut_over(tensor) for tensor in tensors]
    local_norms = []
    for tensor, cut in zip(tensors, cuts, strict=True):
        local = local_of(tensor)
        # A rank without elements contributes a zero; torch defines the norm of a tensor that has no elements at all.
        if not local.numel() and tensor.numel():
            local = local.new_zeros(1)
        local_norms.append(
            torch.linalg.vector_norm(local, order, dtype=_summed_in(local, dtype) if cut else dtype)
        )
    # In order of appearance, equal on all ranks: a set would order the collectives by hash.
    for cut in dict.fromkeys(cut for cut in cuts if cut):
        where = [i for i, other in enumerate(cuts) if other == cut]
        # Powers and roots in float64, so only the result is rounded.
        values = torch.stack([local_norms[i].double() for i in where])
        if order == float("inf"):
            values = max_over_ranks(values, cut)
        elif order > 0:
            values = values**order
            combine(values, cut)
            values = values ** (1 / order)
        else:
            raise RuntimeError(f"{func}: expected a positive order on a sharded tensor, got {order}")
        for i, value in zip(where, values.unbind(), strict=True):
            local_norms[i] = value.to((dtype or tensors[i].dtype).to_real())
    return local_norms


def _summed_in(local: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype of a rank's part of a result: float32 for half precision, since parts must not be rounded."""
    return torch.float32 if (dtype or local.dtype) in _HALF else dtype


def _can_reduce(tensor: Any, dim: Any, keepdim: bool) -> bool:
    """Whether ``_along`` can reduce this dimension."""
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    if len(dims) != 1 or tensor.ndim == 0 or is_tensor_parallel(tensor.placements):
        return False
    at = dims[0] % tensor.ndim
    # The dimension remains with length 1, or the result's rows are never cut, whatever the bounds are.
    return bool(at >= tensor.ndim - 2 and (keepdim or tensor.ndim <= 2 or at == tensor.ndim - 2))


def _reduces_all(tensor: Any, dim: Any) -> bool:
    dims = {axis % tensor.ndim for axis in dim or ()} if tensor.ndim else set()
    return len(dims) in (0, tensor.ndim)


def _norm_along(tensor: Any, order: float, dim: int, keepdim: bool, dtype: torch.dtype | None) -> Any:
    """Norm of a positive, finite order along a dimension that ``_can_reduce`` accepts."""

    def powers(values: torch.Tensor, at: int) -> torch.Tensor:
        norm = torch.linalg.vector_norm(values, order, at, True, dtype=_summed_in(values, dtype))
        return norm.double() ** order

    return _along(tensor, dim, keepdim, dtype, powers, lambda sums: sums ** (1 / order))


def _along(
    tensor: Any,
    dim: int,
    keepdim: bool,
    dtype: torch.dtype | None,
    partial: Callable[[torch.Tensor, int], torch.Tensor],
    finish: Callable[[torch.Tensor], torch.Tensor],
) -> Any:
    """Reduce ``dim``: ``finish`` of the sum of ``partial(part, dimension)`` over parts of the tensor.

    ``partial`` returns float64, so that the result is rounded once.
    """
    if not keepdim:
        kept = _along(tensor, dim, True, dtype, partial, finish)
        dim %= tensor.ndim
        return in_shape(kept, (*tensor.shape[:dim], *tensor.shape[dim + 1 :]))
    if tensor.ndim == 1:
        return in_shape(_along(in_shape(tensor, (*tensor.shape, 1)), 0, True, dtype, partial, finish), (1,))
    local, bounds = local_of(tensor), row_bounds_of(tensor)
    dim %= tensor.ndim
    shape = (*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :])
    if bounds is None:
        # A replica is whole and keeps the tensor's own shape.
        sums = partial(local, dim)
    elif dim == tensor.ndim - 1:
        # Cut rows form a matrix, whatever the tensor's shape: the last dimension is the matrix's second.
        sums = partial(local, 1)
    elif tensor.shape[dim] == 1:
        # Each row is a separate slice, so the result is cut like the tensor and nothing is communicated.
        sums = partial(local.unsqueeze(1), 1).squeeze(1)
    else:
        sums, bounds = _sums_of_slices(tensor, partial).view(shape), None
    return wrap_rows(tensor, finish(sums).to(dtype or tensor.dtype), shape, bounds)


def _sums_of_slices(tensor: Any, partial: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    length, columns = tensor.shape[-2:]
    local, (r0, _) = local_of(tensor), row_range_of(tensor)
    sums = local.new_zeros(math.prod(tensor.shape[:-2]), columns, dtype=torch.float64)
    # A slice may be spread over several ranks, so every rank fills in its own rows and the ranks' sums are added.
    for first, last, rows in _by_slice(local, r0, length):
        sums[first:last] += partial(rows, 1).squeeze(1)
    combine(sums, (tensor.device_mesh, row_axes(tensor.placements)))
    return sums


def _by_slice(local: torch.Tensor, start: int, length: int) -> Sequence[tuple[int, int, torch.Tensor]]:
    """Local rows, beginning with row ``start``, as ``(first slice, end slice, values (slices, rows, columns))``.

    At most three parts: the rest of a slice, whole slices, the beginning of a slice.
    """
    parts, at, end = [], 0, local.shape[0]
    while at < end:
        here, inside = divmod(start + at, length)
        # Whole slices together: a weight of many experts has many, and each part takes one call.
        whole = (end - at) // length if inside == 0 else 0
        rows = whole * length if whole else min(length - inside, end - at)
        part = local[at : at + rows].unflatten(0, (max(whole, 1), -1))
        parts.append((here, here + len(part), part))
        at += rows
    return parts


def _vector_norm(
    func: Any, tensor: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    # Powers of parts add up to the power of the whole only for positive, finite orders.
    if ord > 0 and ord != float("inf") and _can_reduce(tensor, dim, keepdim):
        return _norm_along(tensor, ord, dim[0], keepdim, dtype)
    if keepdim or not _reduces_all(tensor, dim):
        return norm_over_dims(func, tensor, ord, dim, keepdim, dtype)
    return norms(func, [tensor], ord, dtype)[0].as_subclass(WholeNorm)


def _foreach_norm(func: Any, tensors: list[Any], ord: float = 2, dtype: Any = None) -> list[torch.Tensor]:
    without_elements = [local_of(tensor) for tensor in tensors if not tensor.numel()]
    if without_elements:
        # For torch's own error, which names the operator: torch refuses some orders of tensors without elements.
        torch._foreach_norm(without_elements, ord)
    return [norm.as_subclass(WholeNorm) for norm in norms(func, tensors, ord, dtype)]


def _total(tensor: Any, dtype: torch.dtype | None, count: int) -> torch.Tensor:
    local, cut = local_of(tensor), _cut_over(tensor)
    value = local.sum(dtype=_summed_in(local, dtype))
    if cut:
        combine(value, cut)
    # A sum of integers remains an integer: division would convert it to float.
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


def _sums_along(mean: bool) -> Callable[..., Any]:
    def reduce(
        func: Any, tensor: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Any:
        if not keepdim and _reduces_all(tensor, dim):
            return (_mean if mean else _sum)(func, tensor, dtype=dtype)
        if not _can_reduce(tensor, dim, keepdim) or not tensor.is_floating_point():
            return sum_over_dims(func, tensor, dim, keepdim, dtype, mean=mean)

        def total(values: torch.Tensor, at: int) -> torch.Tensor:
            return values.sum(at, True, dtype=_summed_in(values, dtype)).double()

        count = tensor.shape[dim[0]] if mean else 1
        return _along(tensor, dim[0], keepdim, dtype, total, lambda sums: sums / count if mean else sums)

    return reduce


def _extremum(pick: Callable[[torch.Tensor], torch.Tensor], sign: int) -> Callable[..., torch.Tensor]:
    """``pick`` is the largest (``sign`` 1) or the smallest (-1) of a tensor."""

    def reduce(func: Any, tensor: Any) -> torch.Tensor:
        local, cut = local_of(tensor), _cut_over(tensor)
        if not local.dtype.is_floating_point:
            raise RuntimeError(f"{func}: expected a floating-point tensor, got {local.dtype}")
        if not tensor.numel():
            raise RuntimeError(f"{func}: expected a tensor with elements, got shape {tuple(tensor.shape)}")
        # A rank without elements contributes a value that any element beats.
        value = pick(local) if local.numel() else local.new_full((), -sign * float("inf"))
        return sign * max_over_ranks(sign * value, cut) if cut else value

    return reduce


def _truth(op: Any, pick: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def reduce(func: Any, tensor: Any) -> torch.Tensor:
        value, cut = pick(local_of(tensor)).to(torch.int32), _cut_over(tensor)
        if cut:
            combine(value, cut, op)
        return value.bool()

    return reduce


def _equal(func: Any, tensor: Any, other: Any) -> bool:
    # Shapes are global, so every rank returns here or none does.
    if tensor.shape != other.shape:
        return False
    (left, right), placing = align(func, [tensor, other])
    alike = torch.tensor(torch.equal(left, right), dtype=torch.int32, device=left.device)
    cut = _cut_over(placing.origin)
    if cut:
        combine(alike, cut, dist.ReduceOp.MIN)
    return bool(alike)


def _unscale(func: Any, grads: list[Any], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Unscale gradients for ``torch.amp.GradScaler``; all ranks learn of an infinity on any rank."""
    func([local_of(grad) for grad in grads], found_inf, inv_scale)
    for cut in dict.fromkeys(cut for cut in map(_cut_over, grads) if cut):
        combine(found_inf, cut, dist.ReduceOp.MAX)


REDUCTIONS: dict[Any, Callable[..., Any]] = {
    **OVER_DIMS,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten.sum.default: _sum,
    _aten.mean.default: _mean,
    _aten.mean.dim: _sums_along(mean=True),
    _aten.sum.dim_IntList: _sums_along(mean=False),
    _aten.max.default: _extremum(torch.max, 1),
    _aten.min.default: _extremum(torch.min, -1),
    _aten.any.default: _truth(dist.ReduceOp.MAX, torch.any),
    _aten.equal.default: _equal,
    _aten.all.default: _truth(dist.ReduceOp.MIN, torch.all),
}


# With these functions ``clip_grad_norm_``, and programs that do the same by hand, combine many norms into one.
_STAYS = {torch.Tensor.to, torch.stack, torch.linalg.vector_norm, torch.norm, torch.Tensor.norm}


class WholeNorm(torch.Tensor):
    """A norm of whole tensors, equal on all ranks that hold parts of them.

    Not a DTensor, unlike FSDP2's norms, so that norms over several meshes and of plain tensors can be combined. All
    results computed from it are plain, except norms of norms.
    """

    def full_tensor(self) -> torch.Tensor:
        """Itself, as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(cls) if func in _STAYS else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # So that files with norms can be read without this package.
        return self.full_tensor().__reduce_ex__(protocol)
