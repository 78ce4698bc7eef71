"""Views of a ``RowDTensor`` that are themselves cut by rows: parts of the first dimension, and other shapes.

The view shares memory with the tensor, and its writes count as writes of the tensor::

    weight (4, 3), bounds (0, 1, 4)      weight[2] (3,)       weight[:2] (2, 3)    weight.view(-1) (12,)
    rank 0: row 0                        rank 0: nothing      rank 0: row 0        rank 0: elements 0, 1, 2
    rank 1: rows 1, 2, 3                 rank 1: all three    rank 1: row 1        rank 1: the other nine

Another shape is possible if no shard ends inside one of its rows: always as a vector, and as a stack of matrices with
rows of the same length; as a matrix with other rows only if the bounds happen to allow it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from bridge.core.sharding.layout.rows import local_shape, rows_of
from torch_impl.dtensor.local import local_of, row_bounds_of, row_range_of
from torch_impl.dtensor.placement import is_tensor_parallel
from torch_impl.dtensor.remainders import remainder_of
from torch_impl.dtensor.tensor import wrap_rows

_aten = torch.ops.aten

_RESHAPES = {
    _aten.view.default, _aten._unsafe_view.default, _aten.expand.default, _aten.squeeze.default,
    _aten.squeeze.dim, _aten.squeeze.dims, _aten.unsqueeze.default,
}  # fmt: skip
# With the names of their arguments after the tensor.
_PARTS = {
    _aten.slice.Tensor: ("dim", "start", "end", "step"),
    _aten.split.Tensor: ("split_size", "dim"),
    _aten.split_with_sizes.default: ("split_sizes", "dim"),
    _aten.unbind.int: ("dim",),
    _aten.select.int: ("dim", "index"),
}
VIEWS = {*_RESHAPES, *_PARTS}


def row_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The view, or the tuple of views, that ``func`` asks for; None if rows cannot represent it."""
    tensor = args[0]
    if is_tensor_parallel(tensor.placements):
        # Row bounds count rows of the tensor-parallel part, but the program asks for a view of the whole.
        return None
    if func in _RESHAPES:
        shape = tuple(func(meant(tensor), *args[1:], **kwargs).shape)
        # Expanding repeats elements.
        return in_shape(tensor, shape) if math.prod(shape) == tensor.numel() else None
    options = dict(zip(_PARTS[func], args[1:], strict=False)) | kwargs
    if not tensor.ndim or options.get("dim", 0) not in (0, -tensor.ndim):
        return None
    if func is _aten.select.int:
        return _item(tensor, options["index"])
    length = tensor.shape[0]
    if func is _aten.unbind.int:
        return tuple(_item(tensor, index) for index in range(length))
    if func is _aten.slice.Tensor:
        start, stop, step = slice(*map(options.get, ("start", "end", "step"))).indices(length)
        return _part(tensor, start, max(start, stop)) if step == 1 else None
    sizes = [len(part) for part in func(meant(tensor), *args[1:], **kwargs)]
    edges = (0, *itertools.accumulate(sizes))
    return tuple(_part(tensor, start, stop) for start, stop in itertools.pairwise(edges))


def meant(value: Any) -> Any:
    """A tensor without elements, for which torch determines result shapes and raises its own errors.

    Any other value is returned unchanged.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def in_shape(tensor: Any, shape: tuple[int, ...]) -> Any:
    """A view of all elements in another shape; None where a shard would end inside a row."""
    bounds, local = row_bounds_of(tensor), local_of(tensor)
    if bounds is None:
        return wrap_rows(tensor, counted_view(local, lambda t: t.view(shape)), shape, None)
    before, after = rows_of(tensor.shape)[0], rows_of(shape)[0]
    if after and any(bound * before % after for bound in bounds):
        return None
    rows = [bound * before // after if after else 0 for bound in bounds]
    size = local_shape(shape, local.numel() // after if after else 0)
    return wrap_rows(tensor, counted_view(local, lambda t: t.view(size)), shape, rows)


def _part(tensor: Any, start: int, stop: int) -> Any:
    """``tensor[start:stop]``."""
    shape = (stop - start, *tensor.shape[1:])
    bounds, local = row_bounds_of(tensor), local_of(tensor)
    if bounds is None:
        return wrap_rows(tensor, counted_view(local, lambda t: t[start:stop]), shape, None)
    per_item = rows_of(tensor.shape)[1] // tensor.shape[0] if tensor.numel() else 0
    first, rows = start * per_item, (stop - start) * per_item

    def within(row: int) -> int:
        return min(max(row - first, 0), rows)

    r0, r1 = row_range_of(tensor)
    # For a part outside the local rows, the start does not matter.
    begin = max(first - r0, 0)
    view = counted_view(local, lambda t: t[begin : begin + within(r1) - within(r0)])
    return wrap_rows(tensor, view, shape, [within(bound) for bound in bounds])


def _item(tensor: Any, index: int) -> Any:
    """``tensor[index]``."""
    length = tensor.shape[0]
    if not -length <= index < length:
        raise IndexError(
            f"index {index} of a tensor of shape {tuple(tensor.shape)}: expected less than {length}"
        )
    # A row of a matrix becomes a vector, whose rows are its elements. A matrix of a stack keeps its rows.
    return in_shape(_part(tensor, index % length, index % length + 1), tuple(tensor.shape[1:]))


def counted_view(local: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A view that shares its version counter, unlike views below autograd, and the remainder."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        rows = view(local)
    remainder = remainder_of(local)
    if remainder is not None:
        remainder.view_for(rows, view(remainder.values))
    return rows
