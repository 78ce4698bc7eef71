"""The local values of the operands of an element-wise computation.

Tensors that are cut alike are used by their local rows. Next to a cut tensor, replicated tensors and tensors whose last
dimension has size one are broadcast as in a computation on whole tensors::

    (4, 3, 5) cut, rows [2, 9)    local (7, 5)
    (4, 3, 1) cut alike           local (7, 1)
    (4, 1, 1) replicated          its values for rows [2, 9): (7, 1)
    ()                            unchanged
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Shard

from torch_impl.dtensor.local import local_of, row_bounds_of, row_range_of
from torch_impl.dtensor.placement import FusedShard, replicated, row_axes
from torch_impl.dtensor.refusals import described
from torch_impl.dtensor.tensor import wrap_like, wrap_rows


class Placing(NamedTuple):
    """The placement of the result of an element-wise computation: like ``origin``, if any, but with this shape."""

    origin: Any
    shape: torch.Size

    def wrap(self, local: torch.Tensor) -> Any:
        # Only plain scalars took part.
        if self.origin is None:
            return local
        if self.shape == self.origin.shape:
            return wrap_like(self.origin, local)
        return wrap_rows(self.origin, local, self.shape, row_bounds_of(self.origin))


def align(func: Any, operands: Sequence[Any]) -> tuple[list[Any], Placing]:
    """The local values of ``operands``, and the placement of the result.

    Raises RuntimeError for tensors that are cut differently, and for plain tensors other than scalars, since they may
    differ between ranks.
    """
    # An optimizer's step calls this for every parameter; row bounds are as long as the number of ranks.
    if all(_like_first(operands[0], operand) for operand in operands):
        return [local_of(operand) for operand in operands], Placing(operands[0], operands[0].shape)
    tensors = [
        operand for operand in operands if isinstance(operand, torch.Tensor) and not _is_scalar(operand)
    ]
    sharded = [operand for operand in tensors if isinstance(operand, DTensor)]
    if not sharded:
        # Only scalars, or only plain tensors: a DTensor among the scalars makes the result a DTensor.
        scalar = (
            None if tensors else next((operand for operand in operands if isinstance(operand, DTensor)), None)
        )
        return [local_of(operand) for operand in operands], Placing(scalar, torch.Size())
    first = sharded[0]
    if len(sharded) == len(tensors) and all(_cut(operand) == _cut(first) for operand in sharded[1:]):
        return [local_of(operand) for operand in operands], Placing(first, first.shape)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    # A cut tensor, if there is one, determines how the rows of all others are cut.
    origin = next((operand for operand in sharded if _has_rows_of(operand, shape)), first)
    if any(not _fits(operand, origin, shape) for operand in tensors):
        descriptions = ", ".join(map(_describe, tensors))
        raise RuntimeError(
            f"{func}: expected tensors of one shape and placement, got {descriptions}; use full_tensor() of all, or "
            "distribute_tensor() to place a plain tensor like the sharded one"
        )
    return [_rows_for(operand, origin, shape) for operand in operands], Placing(origin, shape)


def _like_first(first: Any, other: Any) -> bool:
    """Whether two DTensors share their placement as an object: the usual case, found without a long comparison."""
    # A replicated scalar may be combined with tensors that are cut: this needs the long comparison.
    if not isinstance(first, DTensor) or first.ndim == 0:
        return False
    if not isinstance(other, DTensor):
        return not isinstance(other, torch.Tensor) or other.ndim == 0
    return (
        other.placements is first.placements
        and other.device_mesh is first.device_mesh
        and other.shape == first.shape
    )


def _describe(tensor: torch.Tensor) -> str:
    placed = f"placed as {tensor.placements}" if isinstance(tensor, DTensor) else "plain"
    return f"{described(tensor)} {placed}"


def _is_scalar(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 0 and (not isinstance(tensor, DTensor) or replicated(tensor.placements))


def _cut(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.placements, tensor.shape, tensor.device_mesh


def _has_rows_of(tensor: DTensor, shape: torch.Size) -> bool:
    """Whether the tensor is cut, at the rows of a tensor of this shape."""
    if not row_axes(tensor.placements):
        return False
    return tensor.shape == shape or (tensor.ndim > 1 and tensor.shape == (*shape[:-1], 1))


def _fits(tensor: torch.Tensor, origin: DTensor, shape: torch.Size) -> bool:
    if not isinstance(tensor, DTensor) or tensor.device_mesh != origin.device_mesh:
        return False
    # Broadcasting would need to know this rank's part of a dimension, or of a sum.
    if any(
        isinstance(placement, Shard | FusedShard | Partial)
        for placement in (*tensor.placements, *origin.placements)
    ):
        return False
    alike = tensor.placements == origin.placements and _has_rows_of(tensor, shape)
    return alike or replicated(tensor.placements)


def _rows_for(value: Any, origin: DTensor, shape: torch.Size) -> Any:
    """The local values of an operand that correspond to the local rows of ``origin``."""
    local = local_of(value)
    cut = row_axes(origin.placements) and isinstance(value, DTensor) and not _is_scalar(value)
    # It fits already: nothing is cut, or the operand is cut like the origin.
    if not cut or row_axes(value.placements):
        return local
    r0, r1 = row_range_of(origin)
    if len(shape) == 1:
        return local.expand(shape)[r0:r1]
    local = local.view((1,) * (len(shape) - local.ndim) + tuple(local.shape))
    columns = local.shape[-1]
    return local.expand(*shape[:-1], columns).reshape(-1, columns)[r0:r1]
