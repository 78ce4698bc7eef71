"""Views of a ``RowDTensor`` that are cut by rows themselves: ``tensor[i]``, and the same rows in another shape.

The view shares memory with the tensor, and its writes count as writes of the tensor::

    weight (4, 3), bounds (0, 1, 4)      weight[2] (3,), bounds (0, 0, 3)
    rank 0: row 0                        rank 0: nothing
    rank 1: rows 1, 2, 3                 rank 1: the three elements of row 2
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from bridge.sharding.rows import local_shape, rows_of
from torch_impl.dtensor.local import local_of, row_bounds_of, row_range_of
from torch_impl.dtensor.placement import is_tensor_parallel
from torch_impl.dtensor.remainders import remainder_of
from torch_impl.dtensor.tensor import wrap_rows

_aten = torch.ops.aten

_RESHAPES = {_aten.view.default, _aten._unsafe_view.default, _aten.expand.default}
VIEWS = {_aten.select.int, _aten.unsqueeze.default, *_RESHAPES}


def row_view(func: Any, args: tuple[Any, ...]) -> Any:
    """The view that ``func`` asks for, or None if it is none that rows can represent."""
    tensor = args[0]
    if is_tensor_parallel(tensor.placements):
        # Row bounds count rows of what the tensor-parallel axes leave, not of the whole whose view is asked for.
        return None
    if func is _aten.select.int and args[1] % tensor.ndim == 0:
        return _select(tensor, args[2])
    if func is _aten.unsqueeze.default and tensor.ndim == 0:
        return _same_rows(tensor, (1,))
    if func in _RESHAPES:
        return _same_rows(tensor, tuple(args[1]))
    return None


def _same_rows(tensor: Any, size: tuple[int, ...]) -> Any:
    """The tensor in another shape with rows of the same length; None for a shape with other rows."""
    if -1 in size and len(size) == tensor.ndim:
        size = tuple(old if new == -1 else new for new, old in zip(size, tensor.shape, strict=True))
    matrices = len(size) > 1 and tensor.ndim > 1 and size[-1] == tensor.shape[-1]
    alike = matrices or (len(size) <= 1 and tensor.ndim <= 1)
    if size != tuple(tensor.shape) and not (alike and math.prod(size) == tensor.numel()):
        return None
    bounds, local = row_bounds_of(tensor), local_of(tensor)
    # Cut rows lie in a matrix or a vector, which no view of the same rows changes.
    own = size if bounds is None else tuple(local.shape)
    return wrap_rows(tensor, counted_view(local, lambda t: t.view(own)), size, bounds)


def _select(tensor: Any, index: int) -> Any:
    length = tensor.shape[0]
    if not -length <= index < length:
        raise IndexError(
            f"index {index} of a tensor of shape {tuple(tensor.shape)}: expected less than {length}"
        )
    index, shape = index % length, tensor.shape[1:]
    bounds, local = row_bounds_of(tensor), local_of(tensor)
    if bounds is None:
        return wrap_rows(tensor, counted_view(local, lambda t: t[index]), shape, None)
    row_size, num_rows = rows_of(tensor.shape)
    per_slice = num_rows // length
    # A row of a matrix becomes a vector, whose rows are its elements.
    scale = row_size if tensor.ndim == 2 else 1

    def within(row: int) -> int:
        return min(max(row - index * per_slice, 0), per_slice)

    first, (r0, r1) = index * per_slice, row_range_of(tensor)
    start, rows = first + within(r0) - r0, within(r1) - within(r0)
    # Beside the slice the start may lie outside of the local rows, where even an empty view raises.
    start = max(start, 0) if rows else 0
    size = local_shape(shape, rows * scale)
    view = counted_view(local, lambda t: t[start : start + rows].view(size))
    return wrap_rows(tensor, view, shape, [within(bound) * scale for bound in bounds])


def counted_view(local: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A view that shares its version counter, which below autograd views do not, and the remainder."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        rows = view(local)
    remainder = remainder_of(local)
    if remainder is not None:
        remainder.view_for(rows, view(remainder.values))
    return rows
