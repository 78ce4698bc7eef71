"""Reductions of cut rows over any dimensions, with a replicated result; each rank fills in what its rows contribute.

The local rows are ``[r0, r1)`` of a matrix of all leading dimensions by the last one. The leading dimensions that are
kept number the rows of the result::

    (2, 3, 5) cut, rows [2, 6)      sum over (0, 2): (3,)      row of the result
    slice 0  . . #                  # # #                      2
    slice 1  # # #                                             0 1 2

The ranks' results are combined by one all-reduce for each axis that cuts rows. Sums are computed in float64 and rounded
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.comm import collectives
from torch_impl.dtensor.local import local_of, row_bounds_of, row_range_of
from torch_impl.dtensor.placement import is_tensor_parallel, row_axes
from torch_impl.dtensor.tensor import wrap_rows

_aten = torch.ops.aten
_OPS = {"sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT}
_IDENTITY = {"sum": 0.0, "amax": -math.inf, "prod": 1.0}
CutOver: TypeAlias = tuple[DeviceMesh, tuple[int, ...]]
"""A mesh, and its axes whose ranks hold different elements."""


def combine(values: torch.Tensor, cut: CutOver, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Combine ``values`` over the ranks, in place. Collective."""
    mesh, axes = cut
    for axis in axes:
        collectives.all_reduce(values, mesh.get_group(axis), op)


def max_over_ranks(values: torch.Tensor, cut: CutOver) -> torch.Tensor:
    """The largest of the ranks' values, NaN if any rank's is: backends differ in how their MAX treats NaN."""
    nan = values.isnan()
    both = torch.stack([values.masked_fill(nan, -math.inf), nan.to(values.dtype)])
    combine(both, cut, dist.ReduceOp.MAX)
    return both[0].masked_fill(both[1] > 0, math.nan)


class RowsOverDims:
    """The local rows of a floating-point ``tensor``, to be reduced over ``dims``; none or empty: over all.

    Raises RuntimeError, which names ``func``, for other dtypes and for a tensor that is cut in anything but rows.
    """

    def __init__(self, func: Any, tensor: Any, dims: Sequence[int] | int | None, keepdim: bool) -> None:
        if is_tensor_parallel(tensor.placements) or not tensor.is_floating_point():
            raise RuntimeError(
                f"{func}: expected a floating-point tensor that no tensor-parallel axis cuts, got {tensor.dtype} "
                f"placed as {tensor.placements}; use full_tensor()"
            )
        ndim, listed = tensor.ndim, [dims] if isinstance(dims, int) else [*(dims or range(tensor.ndim))]
        for dim in listed:
            if not -max(ndim, 1) <= dim < max(ndim, 1):
                raise IndexError(f"{func}: expected a dimension of a tensor of {ndim}, got {dim}")
        reduced = {dim % ndim for dim in listed} if ndim else set[int]()
        self._tensor, self._whole = tensor, row_bounds_of(tensor) is None
        self._last = ndim > 1 and ndim - 1 in reduced
        shape = tuple(tensor.shape)
        self.count = math.prod(shape[dim] for dim in reduced)
        kept = [1 if dim in reduced else size for dim, size in enumerate(shape)]
        self.shape = tuple(
            kept if keepdim else [size for dim, size in enumerate(shape) if dim not in reduced]
        )
        local = local_of(tensor)
        columns = shape[-1] if ndim > 1 else 1
        self.rows = local.reshape(-1, columns) if columns else local.reshape(math.prod(shape[:-1]), 0)
        leading = shape[:-1] if ndim > 1 else shape
        first = 0 if self._whole else row_range_of(tensor)[0]
        at = torch.arange(first, first + len(self.rows), device=local.device)
        number, below = torch.zeros_like(at), math.prod(leading)
        for dim, size in enumerate(leading):
            below //= max(size, 1)
            if dim not in reduced:
                number = number * size + at // max(below, 1) % max(size, 1)
        # For each local row, the row of the result to which it belongs.
        self._number = number
        groups = math.prod(size for dim, size in enumerate(leading) if dim not in reduced)
        self._size = groups, 1 if self._last else columns

    def combined(self, values: torch.Tensor, how: str) -> torch.Tensor:
        """``values``, shaped like ``rows``, reduced by "sum" (float64), "amax" or "prod" over all ranks. Collective."""
        if how == "sum":
            values = values.double()
        if self._last:
            values = getattr(torch, how)(values, 1, keepdim=True)
        result = values.new_full(self._size, _IDENTITY[how])
        if how == "sum":
            result.index_add_(0, self._number, values)
        else:
            result.scatter_reduce_(0, self._number[:, None].expand_as(values), values, how)
        if self._whole:
            return result
        cut = self._tensor.device_mesh, row_axes(self._tensor.placements)
        if how == "amax":
            return max_over_ranks(result, cut)
        combine(result, cut, _OPS[how])
        return result

    def spread(self, result: torch.Tensor) -> torch.Tensor:
        """For each local row, its row of a result."""
        return result[self._number]

    def wrapped(self, result: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
        """The result in its shape and dtype (default: the tensor's); a plain scalar if it has no dimension."""
        result = result.to(dtype or self._tensor.dtype).view(self.shape)
        return wrap_rows(self._tensor, result, self.shape, None) if self.shape else result


def sum_over_dims(
    func: Any, tensor: Any, dims: Any, keepdim: bool, dtype: torch.dtype | None, *, mean: bool
) -> Any:
    """Sum or mean over dimensions."""
    rows = RowsOverDims(func, tensor, dims, keepdim)
    total = rows.combined(rows.rows, "sum")
    return rows.wrapped(total / rows.count if mean else total, dtype)


def norm_over_dims(
    func: Any, tensor: Any, order: float, dims: Any, keepdim: bool, dtype: torch.dtype | None
) -> Any:
    """Norm of a positive order, infinity included, over dimensions."""
    rows = RowsOverDims(func, tensor, dims, keepdim)
    if not order > 0:
        raise RuntimeError(
            f"{func}: expected a positive order on a sharded tensor, got {order}; use full_tensor()"
        )
    if order == math.inf:
        return rows.wrapped(rows.combined(rows.rows.abs(), "amax").clamp_min(0), dtype)
    return rows.wrapped(rows.combined(rows.rows.double().abs() ** order, "sum") ** (1 / order), dtype)


def _extremum(sign: int) -> Callable[..., Any]:
    def reduce(func: Any, tensor: Any, dim: Any = (), keepdim: bool = False) -> Any:
        rows = RowsOverDims(func, tensor, dim, keepdim)
        if not rows.count:
            raise RuntimeError(
                f"{func}: expected elements to reduce, got shape {tuple(tensor.shape)}, dim={dim}"
            )
        return rows.wrapped(sign * rows.combined(sign * rows.rows, "amax"))

    return reduce


def _prod(func: Any, tensor: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    rows = RowsOverDims(func, tensor, dim, keepdim)
    return rows.wrapped(rows.combined(rows.rows.double(), "prod"), dtype)


def _variance(root: bool, with_mean: bool) -> Callable[..., Any]:
    def reduce(
        func: Any, tensor: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
    ) -> Any:
        rows = RowsOverDims(func, tensor, dim, keepdim)
        mean = rows.combined(rows.rows, "sum") / rows.count
        squares = rows.combined((rows.rows.double() - rows.spread(mean)) ** 2, "sum")
        # A division by a tensor: by 0 it gives NaN, as in torch.
        variance = squares / squares.new_tensor(
            max(rows.count - (1 if correction is None else correction), 0)
        )
        result = rows.wrapped(variance.sqrt() if root else variance)
        return (result, rows.wrapped(mean)) if with_mean else result

    return reduce


OVER_DIMS: dict[Any, Callable[..., Any]] = {
    _aten.amax.default: _extremum(1),
    _aten.amin.default: _extremum(-1),
    _aten.prod.default: _prod,
    _aten.prod.dim_int: _prod,
    _aten.var.correction: _variance(root=False, with_mean=False),
    _aten.std.correction: _variance(root=True, with_mean=False),
    _aten.var_mean.correction: _variance(root=False, with_mean=True),
    _aten.std_mean.correction: _variance(root=True, with_mean=True),
}
