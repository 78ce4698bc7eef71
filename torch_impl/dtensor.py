"""DTensors over whole rows cut where a layout says, not where ``torch.chunk`` would cut.

DTensor's own ``Shard(0)`` means "as even as possible"; a tensor cut elsewhere and labelled ``Shard(0)`` yields wrong
values without an error. ``RowShard(bounds)`` therefore is a placement of its own, which DTensor does not know, and
``RowDTensor`` answers itself for all that can be right on uneven and empty shards:

* ``full_tensor``, ``redistribute`` to ``Replicate``, ``to_local`` (differentiable), ``data``
* element-wise operators and whole-tensor reductions (see ``dtensor_ops``), which carries every ``torch.optim``
  optimizer (for-loop, foreach, fused) and ``clip_grad_norm_``
* the hooks by which ``torch.distributed.checkpoint`` asks for chunks

Everything else raises ``RuntimeError``.

A local tensor holds rows ``[bounds[rank], bounds[rank + 1])``, and has the shape ``[rows]`` for parameters of up to one
dimension, else ``[rows, last dimension]``::

    parameter (2, 3, 4)        bounds (0, 1, 1, 6)      local tensors
    row 0  [0, 0, :]           rank 0: rows [0, 1)      (1, 4)
    row 1  [0, 1, :]           rank 1: rows [1, 1)      (0, 4)
    ...                        rank 2: rows [1, 6)      (5, 4)
    row 5  [1, 2, :]

All use of DTensor's private attributes and classes is in this module.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils

from torch_impl import collectives, dtensor_ops
from torch_impl.rows import Box, row_boxes, rows_of


class RowShard(Placement):
    """Rank ``k`` of the mesh axis holds rows ``[bounds[k], bounds[k + 1])``; ranges may be empty and unequal."""

    bounds: tuple[int, ...]

    def __init__(self, bounds: Sequence[int]) -> None:
        super().__init__()
        self.bounds = tuple(bounds)
        descends = any(a > b for a, b in itertools.pairwise(self.bounds))
        if len(self.bounds) < 2 or self.bounds[0] != 0 or descends:
            raise ValueError(f"RowShard: expected two or more ascending row bounds from 0, got {self.bounds}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowShard) and self.bounds == other.bounds

    def __hash__(self) -> int:
        return hash((RowShard, self.bounds))

    def __repr__(self) -> str:
        return f"RowShard{self.bounds}"

    def __reduce__(self) -> tuple[type[RowShard], tuple[tuple[int, ...]]]:
        return RowShard, (self.bounds,)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RowDTensor) -> torch.Tensor:
        ctx.origin = tensor.detach()
        return local_of(tensor).view_as(local_of(tensor))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> RowDTensor:
        # Fused optimizers read memory order, and an in-place change must not reach another parameter's gradient;
        # autograd hands out expanded and shared tensors.
        return wrap_like(ctx.origin, grads[0].clone(memory_format=torch.contiguous_format))


class RowDTensor(DTensor):
    """A DTensor whose single placement is ``RowShard``, ``Replicate`` or, for a gradient not yet reduced, ``Partial``.

    Made by ``make_dtensor`` and ``make_partial``; see the module text for what it can do.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # DTensor leaves its own version untyped
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dtensor_ops.dispatch(func, args, kwargs or {})

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank: one all-gather padded to the longest shard. Not differentiable.

        Raises RuntimeError for a gradient that was not reduced yet.
        """
        with torch.no_grad():
            return _gather(self)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Only to ``Replicate`` on the same mesh; RuntimeError otherwise."""
        if device_mesh not in (None, self.device_mesh) or list(placements or ()) != [Replicate()]:
            raise RuntimeError(
                f"redistribute: expected placements=[Replicate()] on the tensor's own mesh, got {placements}"
            )
        return make_dtensor(self.full_tensor(), self.device_mesh, self.shape, None)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's rows, sharing memory with the DTensor; gradients flow back to the DTensor."""
        if torch.is_grad_enabled() and self.requires_grad:
            return _ToLocal.apply(self)
        return local_of(self).view_as(local_of(self))

    @property
    def data(self) -> RowDTensor:
        """The same rows, without autograd history; in-place changes are seen by the next forward."""
        return wrap_like(self, local_of(self))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise RuntimeError(
            "cannot rebind .data: the tensor is a view of its group's flat buffer; use copy_() under torch.no_grad()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RowDTensor:
        with torch.no_grad():
            copy: RowDTensor = wrap_like(self, local_of(self).clone())
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)  # type: ignore[assignment]  # stays a RowDTensor
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "cannot pickle a sharded tensor: use torch_impl.save_checkpoint, torch.distributed.checkpoint, or "
            "full_tensor() for a small one"
        )

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        # A load plan: DCP writes into views, on ranks that hold rows. All ranks must agree that the weights change.
        dtensor_ops.count_write(self)
        return [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in local_boxes(self)]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint import planner
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )

        return [
            planner.WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    properties=TensorProperties.create_from_tensor(local_of(self)),
                    size=self.shape,
                ),
            )
            for offsets, sizes in local_boxes(self)
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        for box, piece in zip(local_boxes(self), local_pieces(self), strict=True):
            if box.offsets == tuple(index.offset):
                return piece
        raise ValueError(f"{index.fqn}: no chunk at offset {tuple(index.offset)} on this rank")


# torch picks foreach and fused implementations by exact type; without this the optimizers loop over parameters.
for _supported in (_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    if RowDTensor not in _supported:
        _supported.append(RowDTensor)


def local_shape(shape: Sequence[int], rows: int) -> tuple[int, ...]:
    """Shape of a local tensor with ``rows`` rows of a parameter of this global shape."""
    return (rows,) if len(shape) <= 1 else (rows, shape[-1])


def make_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, shape: Sequence[int], bounds: Sequence[int] | None
) -> RowDTensor:
    """A DTensor of global ``shape`` over ``local`` (shared, not copied), a tensor without gradient.

    ``bounds`` are the row bounds of every rank of the one-axis ``mesh``, or None for a tensor that each rank holds
    whole. Raises ValueError when the bounds do not cover the shape or ``local`` has another shape than they say.
    """
    if bounds is None:
        return _make(local, mesh, shape, Replicate(), tuple(shape))
    placement = RowShard(bounds)
    _, num_rows = rows_of(shape)
    if len(placement.bounds) != mesh.size() + 1 or placement.bounds[-1] != num_rows:
        raise ValueError(
            f"row bounds of a tensor of shape {tuple(shape)} on {mesh.size()} ranks: expected {mesh.size() + 1} "
            f"bounds ending at {num_rows}, got {placement.bounds}"
        )
    rank = mesh.get_local_rank()
    rows = placement.bounds[rank + 1] - placement.bounds[rank]
    return _make(local, mesh, shape, placement, local_shape(shape, rows))


def make_partial(local: torch.Tensor, mesh: DeviceMesh, shape: Sequence[int], mean: bool) -> RowDTensor:
    """An unreduced gradient: the true one is the sum (with ``mean``: the average) of the ranks' ``local`` tensors."""
    return _make(local, mesh, shape, Partial("avg" if mean else "sum"), tuple(shape))


def wrap_like(tensor: torch.Tensor, local: torch.Tensor) -> RowDTensor:
    """A DTensor over ``local`` with the mesh, placement and global shape of ``tensor``; the dtype may differ."""
    origin = _dtensor(tensor)
    return _make(local, origin.device_mesh, origin.shape, origin.placements[0], local_of(origin).shape)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The very local tensor of a DTensor, outside autograd: no view, so version counters are shared.

    An ordinary tensor is its own local tensor.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def row_bounds_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Row bounds of all ranks, or None for a tensor that every rank holds whole."""
    placement = _dtensor(tensor).placements[0]
    if isinstance(placement, RowShard):
        return placement.bounds
    if placement.is_replicate():
        return None
    raise RuntimeError(f"expected a sharded or replicated tensor, got placement {placement}")


def row_range_of(tensor: torch.Tensor, rank: int | None = None) -> tuple[int, int]:
    """Rows ``[r0, r1)`` that ``rank`` (default: this one) of the mesh axis holds."""
    bounds = row_bounds_of(tensor)
    if bounds is None:
        return 0, rows_of(tensor.shape)[1]
    rank = _dtensor(tensor).device_mesh.get_local_rank() if rank is None else rank
    return bounds[rank], bounds[rank + 1]


def local_boxes(tensor: torch.Tensor, rank: int | None = None) -> tuple[Box, ...]:
    """The rows of ``row_range_of`` as boxes ``(offsets, sizes)`` in global coordinates, in the order of local rows.

    A tensor without elements is one empty box on every rank: without any it would vanish from a checkpoint.
    """
    if tensor.numel() == 0:
        return (Box((0,) * tensor.ndim, tuple(tensor.shape)),)
    return row_boxes(tuple(tensor.shape), *row_range_of(tensor, rank))


def local_pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of the local tensor, one for each of ``local_boxes(tensor)``, shaped like the box."""
    flat = local_of(tensor).detach().view(-1)
    sizes = [box.sizes for box in local_boxes(tensor)]
    parts = (
        torch.split(flat[: sum(map(math.prod, sizes))], [math.prod(size) for size in sizes]) if sizes else ()
    )
    return tuple(part.view(size) for part, size in zip(parts, sizes, strict=True))


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank, a plain tensor; collective over the mesh unless it is replicated."""
    return _dtensor(tensor).full_tensor()


def _dtensor(tensor: torch.Tensor) -> DTensor:
    if not isinstance(tensor, DTensor):
        raise TypeError(f"expected a DTensor, got {type(tensor).__name__} of shape {tuple(tensor.shape)}")
    return tensor


def _make(
    local: torch.Tensor, mesh: DeviceMesh, shape: Sequence[int], placement: Placement, expected: Sequence[int]
) -> RowDTensor:
    if tuple(local.shape) != tuple(expected):
        raise ValueError(
            f"local tensor of a tensor of shape {tuple(shape)} under {placement}: expected shape {tuple(expected)}, "
            f"got {tuple(local.shape)}"
        )
    stride = torch.empty(tuple(shape), device="meta").stride()
    # DTensor.from_local takes an empty shape for a missing one.
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    return RowDTensor(local, DTensorSpec(mesh, (placement,), tensor_meta=meta), requires_grad=False)


def _gather(tensor: RowDTensor) -> torch.Tensor:
    bounds, local = row_bounds_of(tensor), local_of(tensor)
    if bounds is None:
        return local.clone()
    row_size, _ = rows_of(tensor.shape)
    ranks = len(bounds) - 1
    longest = row_size * max(b - a for a, b in itertools.pairwise(bounds))
    if longest == 0:
        return local.new_empty(tuple(tensor.shape))
    # gloo refuses all-gathers of unequal sizes, hence the padding.
    padded = local.new_zeros(longest)
    padded[: local.numel()] = local.reshape(-1)
    gathered = local.new_empty(ranks, longest)
    collectives.all_gather([gathered.view(-1)], [padded], tensor.device_mesh.get_group())
    parts = [gathered[k, : (bounds[k + 1] - bounds[k]) * row_size] for k in range(ranks)]
    return torch.cat(parts).view(tuple(tensor.shape))
