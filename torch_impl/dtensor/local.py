"""A rank's part of a DTensor: its local tensor, its rows, and their position in the whole.

A local tensor holds rows ``[bounds[k], bounds[k + 1])`` of shard k, and has the shape ``[rows]`` for parameters of up
to one dimension, else ``[rows, last dimension]``::

    parameter (2, 3, 4)        bounds (0, 1, 1, 6)      local tensors    boxes (offsets, sizes)
    row 0  [0, 0, :]           rank 0: rows [0, 1)      (1, 4)           (0, 0, 0) (1, 1, 4)
    row 1  [0, 1, :]           rank 1: rows [1, 1)      (0, 4)           none
    ...                        rank 2: rows [1, 6)      (5, 4)           (0, 1, 0) (1, 2, 4); (1, 0, 0) (1, 3, 4)
    row 5  [1, 2, :]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bridge.core.sharding.layout.rows import Box, row_boxes, rows_of
from torch_impl.comm.mesh import shard_index
from torch_impl.dtensor.placement import (
    Ranges,
    row_axes,
    row_placement,
    tensor_parallel_part,
    tensor_parallel_ranges,
    tensor_parallel_sizes,
)
from torch_impl.dtensor.refusals import described


def checked_dtensor(tensor: torch.Tensor) -> DTensor:
    """The tensor; TypeError unless it is a DTensor."""
    if not isinstance(tensor, DTensor):
        raise TypeError(f"expected a DTensor, got {type(tensor).__name__} of shape {tuple(tensor.shape)}")
    return tensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The actual local tensor of a DTensor, outside autograd: not a view, so version counters are shared.

    Any other tensor is its own local value.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory that a tensor wraps, at any depth; the tensor itself if it wraps none."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for wrapped in inner if isinstance(wrapped, torch.Tensor) for part in plain_parts(wrapped)]


def has_plain_values(tensor: torch.Tensor) -> bool:
    """Whether ``plain_values`` can return the tensor's values."""
    local = local_of(tensor)
    return not is_traceable_wrapper_subclass(local) or len(_alike(local)) == 1


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """The local values of a tensor as a plain tensor that shares them.

    Raises RuntimeError for a local tensor that wraps its values in another form, quantized or in several parts.
    """
    local = local_of(tensor)
    if not is_traceable_wrapper_subclass(local):
        return local
    alike = _alike(local)
    if len(alike) != 1:
        raise RuntimeError(
            f"a parameter of shape {tuple(tensor.shape)} is a {type(local).__name__}, which stores its values in "
            "another form, so it has no plain local tensor: use state_dict() and load_state_dict() on the same number "
            "of ranks, torch.optim, and to_local()"
        )
    return alike[0]


def _alike(local: torch.Tensor) -> list[torch.Tensor]:
    return [part for part in plain_parts(local) if (part.shape, part.dtype) == (local.shape, local.dtype)]


def is_partial(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a gradient that is not yet reduced over all data-parallel axes."""
    return isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)


def refuse_partial(tensor: torch.Tensor) -> None:
    """RuntimeError for a gradient that is not yet reduced: its rows are terms of a sum, not values."""
    if is_partial(tensor):
        raise RuntimeError(
            f"expected a sharded or replicated tensor, got a gradient of shape {tuple(tensor.shape)} that is not yet "
            f"reduced over the ranks, placed as {checked_dtensor(tensor).placements}: before reading it, run the "
            "step's last backward without no_sync, set_is_last_backward(False) and set_requires_gradient_sync(False)"
        )


def row_bounds_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Row bounds of all shards, or None for a tensor that every data-parallel rank holds whole."""
    refuse_partial(tensor)
    rows = row_placement(checked_dtensor(tensor).placements)
    return None if rows is None else rows.bounds


def row_range_of(tensor: torch.Tensor, at: Sequence[int] | None = None) -> tuple[int, int]:
    """Rows ``[r0, r1)`` of the rank at a mesh coordinate (default: this rank's), of what tensor-parallel axes leave it.

    Raises ValueError where they leave that rank another shape, since this rank does not know its row bounds then.
    """
    origin = checked_dtensor(tensor)
    where = (origin.shape, origin.device_mesh, origin.placements)
    rows = row_placement(origin.placements)
    if rows is None:
        return 0, rows_of(tensor_parallel_sizes(*where, at))[1]
    if at is not None and tensor_parallel_sizes(*where, at) != tensor_parallel_sizes(*where):
        raise ValueError(
            f"{described(origin)}: expected tensor-parallel axes that cut it evenly, got "
            f"{tensor_parallel_sizes(*where, at)} at {tuple(at)} and {tensor_parallel_sizes(*where)} on this rank"
        )
    shard = shard_index(origin.device_mesh, row_axes(origin.placements), at)
    return rows.bounds[shard], rows.bounds[shard + 1]


def local_boxes(tensor: torch.Tensor, at: Sequence[int] | None = None) -> tuple[Box, ...]:
    """The rows of ``row_range_of`` as boxes ``(offsets, sizes)`` in global coordinates, in the order of local rows.

    A tensor without elements is one empty box on every rank.
    """
    origin = checked_dtensor(tensor)
    if tensor.numel() == 0:
        # Without any box the tensor would vanish from a checkpoint.
        return (Box((0,) * tensor.ndim, tuple(tensor.shape)),)
    refuse_partial(tensor)
    return tuple(part.whole for part in _parts(origin, at))


def write_items(fqn: str, boxes: Iterable[Any], properties: Any, size: torch.Size) -> list[Any]:
    """The plan by which ``torch.distributed.checkpoint`` saves these boxes of a tensor."""
    from torch.distributed.checkpoint import planner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    return [
        planner.WriteItem(
            index=MetadataIndex(fqn, torch.Size(box.offsets)),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                properties=properties,
                size=size,
            ),
        )
        for box in boxes
    ]


def local_pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of the local tensor, one for each of ``local_boxes(tensor)``, shaped like the box."""
    origin = checked_dtensor(tensor)
    flat = plain_values(origin).detach().view(-1)
    if not origin.numel():
        return (flat.view(origin.shape),)
    pieces = []
    for start, sizes, inside, whole in _parts(origin, None):
        piece = flat[start : start + math.prod(sizes)].view(sizes)
        for dim, (offset, size) in enumerate(zip(inside, whole.sizes, strict=True)):
            piece = piece.narrow(dim, offset, size)
        pieces.append(piece)
    return tuple(pieces)


class _Part(NamedTuple):
    """Local elements from ``start`` on, shaped ``sizes``; from the offsets ``inside`` on they are the box ``whole``."""

    start: int
    sizes: tuple[int, ...]
    inside: tuple[int, ...]
    whole: Box


def _parts(origin: DTensor, at: Sequence[int] | None) -> Iterator[_Part]:
    """The rows of ``row_range_of`` by boxes of what tensor-parallel axes leave, and by the ranges that make it up."""
    ranges = tensor_parallel_ranges(origin.shape, origin.device_mesh, origin.placements, at)
    sizes = tuple(sum(stop - start for start, stop in held) for held in ranges)
    start = 0
    for box in row_boxes(sizes, *row_range_of(origin, at)):
        held = [list(_within(*part)) for part in zip(box.offsets, box.sizes, ranges, strict=True)]
        for parts in itertools.product(*held):
            inside, offsets, lengths = zip(*parts, strict=True) if parts else ((), (), ())
            yield _Part(start, box.sizes, inside, Box(offsets, lengths))
        start += math.prod(box.sizes)


def _within(offset: int, size: int, ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """Local positions ``[offset, offset + size)`` of a dimension, as ``(position from offset, global one, length)``."""
    position = 0
    for start, stop in ranges:
        first, last = max(offset, position), min(offset + size, position + stop - start)
        if first < last:
            yield first - offset, start + first - position, last - first
        position += stop - start


def own_part(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``whole``, which has the global shape of ``tensor``, in the local shape."""
    origin = checked_dtensor(tensor)
    local = local_of(origin)
    if not local.numel():
        # reshape(-1, ...) below cannot infer a number of rows from no elements.
        return torch.empty_like(local, dtype=whole.dtype, device=whole.device)
    # Tensor-parallel axes cut first, and row bounds count the rows of their result.
    whole = tensor_parallel_part(whole, origin.device_mesh, origin.placements)
    if row_placement(origin.placements) is None:
        return whole
    r0, r1 = row_range_of(origin)
    return whole.reshape(-1, *local.shape[1:])[r0:r1]
