"""Norms and means along one of the last two dimensions of a ``RowDTensor``, and outer products.

These are what Adafactor needs. Along the last dimension each rank has whole rows; along the one before it, each rank
adds up its rows slice by slice, and the sums are combined::

    (2, 3, 5) cut, rows [2, 6)      norm, dim=-1: (2, 3, 1), cut alike      norm, dim=-2: (2, 1, 5), replicated
    slice 0  . . #                            . . #                                   #
    slice 1  # # #                            # # #                                   #
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard

from torch_impl.comm import collectives
from torch_impl.dtensor import tensor as dtensor
from torch_impl.dtensor.placement import row_axes

_aten = torch.ops.aten


def can_reduce(tensor: Any, dim: Any, keepdim: bool) -> bool:
    """Whether ``norm_along`` and ``mean_along`` can reduce this dimension."""
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    if not keepdim or len(dims) != 1 or tensor.ndim < 2 or is_tensor_parallel(tensor):
        return False
    return bool(dims[0] % tensor.ndim >= tensor.ndim - 2)


def is_tensor_parallel(tensor: Any) -> bool:
    """Whether tensor-parallel ranks hold different parts of the tensor."""
    return any(isinstance(placement, Shard) for placement in tensor.placements)


def norm_along(tensor: Any, order: float, dim: int, dtype: torch.dtype | None) -> Any:
    """Norm of a positive, finite order along a dimension that ``can_reduce`` accepts, which stays as one."""

    def powers(values: torch.Tensor, at: int) -> torch.Tensor:
        norms = torch.linalg.vector_norm(values, order, at, True, dtype=_wide(values, dtype))
        return norms.double() ** order

    return _along(tensor, dim, dtype, powers, lambda sums: sums ** (1 / order))


def mean_along(tensor: Any, dim: int, dtype: torch.dtype | None) -> Any:
    """Mean along a dimension that ``can_reduce`` accepts, which stays as one."""

    def total(values: torch.Tensor, at: int) -> torch.Tensor:
        return values.sum(at, True, dtype=_wide(values, dtype)).double()

    return _along(tensor, dim, dtype, total, lambda sums: sums / tensor.shape[dim])


def _wide(values: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    return torch.float32 if (dtype or values.dtype) in (torch.float16, torch.bfloat16) else dtype


def _along(
    tensor: Any,
    dim: int,
    dtype: torch.dtype | None,
    partial: Callable[[torch.Tensor, int], torch.Tensor],
    finish: Callable[[torch.Tensor], torch.Tensor],
) -> Any:
    """``finish`` of the sum along ``dim`` of what ``partial`` is of parts of it; float64 in between rounds once."""
    local, bounds = dtensor.local_of(tensor), dtensor.row_bounds_of(tensor)
    dim %= tensor.ndim
    shape = (*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :])
    if bounds is None:
        sums = partial(local, dim)
    elif dim == tensor.ndim - 1:
        sums = partial(local, 1)
    elif tensor.shape[dim] == 1:
        # Rows stay where they are: each is a slice.
        sums = partial(local.unsqueeze(1), 1).squeeze(1)
    else:
        sums, bounds = _sums_of_slices(tensor, partial).view(shape), None
    return dtensor.wrap_rows(tensor, finish(sums).to(dtype or tensor.dtype), shape, bounds)


def _sums_of_slices(tensor: Any, partial: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    length, columns = tensor.shape[-2:]
    local, (r0, _) = dtensor.local_of(tensor), dtensor.row_range_of(tensor)
    sums = local.new_zeros(math.prod(tensor.shape[:-2]), columns, dtype=torch.float64)
    for first, last, rows in _by_slice(local, r0, length):
        sums[first:last] += partial(rows, 1).squeeze(1)
    for axis in row_axes(tensor.placements):
        collectives.all_reduce(sums, tensor.device_mesh.get_group(axis))
    return sums


def _by_slice(local: torch.Tensor, start: int, length: int) -> Sequence[tuple[int, int, torch.Tensor]]:
    """Local rows, the first of which is row ``start``, as ``(first slice, end slice, values (slices, rows, columns))``.

    At most three parts: the rest of a slice, whole slices, the beginning of a slice.
    """
    parts, at, end = [], 0, local.shape[0]
    while at < end:
        here, inside = divmod(start + at, length)
        whole = (end - at) // length if inside == 0 else 0
        rows = whole * length if whole else min(length - inside, end - at)
        part = local[at : at + rows].unflatten(0, (max(whole, 1), -1))
        parts.append((here, here + len(part), part))
        at += rows
    return parts


def zeros_of(tensor: Any, size: Sequence[int], **options: Any) -> Any:
    """``new_zeros``: cut like ``tensor`` if it has as many rows in the same dimensions, else replicated.

    NotImplemented for another shape than that of a tensor-parallel ``tensor``.
    """
    size, local, bounds = tuple(size), dtensor.local_of(tensor), dtensor.row_bounds_of(tensor)
    if size == tuple(tensor.shape):
        return dtensor.wrap_like(tensor, local.new_zeros(local.shape, **options))
    if is_tensor_parallel(tensor):
        return NotImplemented
    if bounds is None or len(size) < 2 or size[:-1] != tuple(tensor.shape[:-1]) or not size[-1]:
        return dtensor.wrap_rows(tensor, local.new_zeros(size, **options), size, None)
    return dtensor.wrap_rows(tensor, local.new_zeros(local.shape[0], size[-1], **options), size, bounds)


def outer_product(left: Any, right: Any) -> Any:
    """``left @ right`` of (..., R, 1) and (..., 1, C): rows of their own. NotImplemented for other products."""
    return left * right if left.shape[-1] == 1 else NotImplemented
