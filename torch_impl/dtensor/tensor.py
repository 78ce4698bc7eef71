"""DTensors over whole rows, cut where a layout says, not where ``torch.chunk`` would cut.

DTensor's own ``Shard(0)`` means "as even as possible"; a tensor that is cut elsewhere but labelled ``Shard(0)`` yields
wrong values without an error. Therefore ``RowShard`` (see ``placement``) is a separate placement, which DTensor does
not know, and ``RowDTensor`` itself implements everything that can be correct on uneven and empty shards:

* ``full_tensor``, ``redistribute`` to ``Replicate``, ``to_local`` (differentiable), ``data``
* element-wise operators (``ops``) and reductions (``reductions``), which suffice for the optimizers of ``torch.optim``
  (for-loop, foreach, fused) and ``clip_grad_norm_``
* pickling and ``copy.deepcopy``: this rank's rows, which ``torch.save`` of a state dict on each rank needs
* the hooks with which ``torch.distributed.checkpoint`` asks for chunks; tensors with remainders give float32 chunks

Everything else raises ``RuntimeError``. ``local`` defines a rank's part of a tensor.

All uses of DTensor's private attributes and classes are in this module and in ``local``.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils

from torch_impl.dtensor.local import (
    checked_dtensor,
    local_boxes,
    local_of,
    local_pieces,
    own_part,
    plain_values,
    refuse_partial,
    write_items,
)
from torch_impl.dtensor.placement import RowShard, check_local, gather, local_sizes, row_axes, row_placement
from torch_impl.dtensor.refusals import NoPlainTensor, described
from torch_impl.dtensor.remainders import join, main_values, remainder_of


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RowDTensor) -> torch.Tensor:
        ctx.origin = tensor.detach()
        return local_of(tensor).view_as(local_of(tensor))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> RowDTensor:
        # Fused optimizers require the memory order, and an in-place change must not reach another parameter's gradient,
        # but autograd passes expanded and shared tensors.
        return wrap_like(ctx.origin, grads[0].clone(memory_format=torch.contiguous_format))


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RowDTensor) -> torch.Tensor:
        ctx.described = described(tensor)
        return _gathered(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        # DTensor would give each rank its part of its own gradient, which is not the gradient of all ranks' loss.
        raise RuntimeError(
            f"backward through full_tensor() of {ctx.described}, whose gradient would not be reduced over the ranks: "
            "use the weight in its module's forward, or detach() the whole tensor"
        )


class RowDTensor(NoPlainTensor, DTensor):
    """A DTensor with the placement of a sharded parameter.

    On data-parallel axes ``RowShard``, ``Replicate`` or, for gradients not yet reduced, ``Partial``; on tensor-parallel
    axes ``Shard`` or ``Replicate``.

    Made by ``make_dtensor`` and ``make_partial``; the module docstring lists the supported operations.
    """

    # The operators make tensors of this class, so this module cannot import them: ``torch_impl.dtensor`` sets this.
    dispatcher: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # DTensor leaves its own version untyped
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls.dispatcher(func, args, kwargs or {})

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank, by an all-gather over each axis that cuts it.

        Raises RuntimeError for a gradient that is not yet reduced, and when a backward reaches the tensor.
        """
        refuse_partial(self)
        if torch.is_grad_enabled() and self.requires_grad:
            return _Whole.apply(self)
        return _gathered(self)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Only to ``Replicate`` on every axis of the same mesh; RuntimeError otherwise."""
        whole = [Replicate()] * self.device_mesh.ndim
        # Rows cut elsewhere would need bounds, which DTensor's placements cannot express.
        if device_mesh not in (None, self.device_mesh) or list(placements or ()) != whole:
            raise RuntimeError(
                f"redistribute of {described(self)}: expected placements={whole} on {self.device_mesh}, got "
                f"{placements} on {device_mesh or 'the same mesh'}; use distribute_tensor() of its full_tensor()"
            )
        return _make(_gathered(self), self.device_mesh, self.shape, tuple(whole))

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's rows, sharing memory with the DTensor; gradients flow back to the DTensor."""
        # DTensor's own backward would make the gradient a DTensor that does not know RowShard.
        if torch.is_grad_enabled() and self.requires_grad:
            return _ToLocal.apply(self)
        return local_of(self).view_as(local_of(self))

    @property
    def data(self) -> RowDTensor:
        """The same rows without autograd history; the next forward sees in-place changes."""
        return wrap_like(self, local_of(self))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise RuntimeError(
            f"cannot rebind .data of {described(self)}, which is a view of its group's flat buffer; use copy_() under "
            "torch.no_grad()"
        )

    def data_ptr(self) -> int:
        """0: the rows belong to the local tensor. So ``dcp.async_save`` knows that there is nothing else to copy."""
        # Torch would return the offset of the local tensor in its buffer.
        return 0

    def __deepcopy__(self, memo: dict[int, Any]) -> RowDTensor:
        with torch.no_grad():
            copy: RowDTensor = wrap_like(self, local_of(self).clone())
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)  # type: ignore[assignment]  # stays a RowDTensor
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """This rank's rows and their placements. For a tensor with remainders, its float32 values."""
        with torch.no_grad():
            # A separate object: attributes of the local tensor belong to its unit.
            local = local_of(self).detach() if remainder_of(self) is None else main_values(self)
        is_parameter = isinstance(self, torch.nn.Parameter)
        placed = self.device_mesh, self.placements, tuple(self.shape)
        return rebuild_dtensor, (local, *placed, self.requires_grad, is_parameter)

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if remainder_of(self) is not None:
            raise RuntimeError(
                f"dcp.load cannot write to a parameter of shape {tuple(self.shape)} that is stored as a bfloat16 "
                "weight and a remainder: use torch_impl.load_checkpoint, which reads files of dcp.save"
            )
        # This is a load plan: DCP writes into views, on ranks with rows. All ranks must agree that the weights change.
        count_write(self)
        return [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in local_boxes(self)]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import TensorProperties

        try:
            like = plain_values(self)
        except RuntimeError as error:
            raise RuntimeError(f"{fqn}: {error}") from error
        if remainder_of(self) is not None:
            # With the shape of the weights: from torch 2.15 on, metadata contains strides.
            like = torch.empty(like.shape, dtype=torch.float32, device="meta")
        return write_items(fqn, local_boxes(self), TensorProperties.create_from_tensor(like), self.shape)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        remainder = remainder_of(self)
        for position, box in enumerate(local_boxes(self)):
            if box.offsets == tuple(index.offset):
                piece = local_pieces(self)[position]
                if remainder is None:
                    return piece
                remainder.settle(local_of(self))
                return join(piece, local_pieces(wrap_like(self, remainder.values))[position])
        raise ValueError(f"{index.fqn}: no chunk at offset {tuple(index.offset)} on this rank")


# torch selects foreach and fused implementations by exact type; without this the optimizers would loop over parameters.
# This adds only RowDTensor, so it is safe at import.
for _supported in (_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    if RowDTensor not in _supported:
        _supported.append(RowDTensor)


def make_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    shape: Sequence[int],
    bounds: Sequence[int] | None,
    *,
    axes: int = 1,
    tensor_parallel: Sequence[Placement] = (),
) -> RowDTensor:
    """A DTensor of global ``shape`` over ``local`` (shared, not copied), a tensor without gradient.

    Args:
        mesh: one or two data-parallel axes, outer first, then one axis for each placement of ``tensor_parallel``.
        bounds: row bounds of all shards, in rows that the tensor-parallel axes leave to this rank; None when every
            data-parallel rank holds all rows.
        axes: the number of innermost data-parallel axes over which rows are cut; the others hold replicas.
        tensor_parallel: ``Shard(dim)`` or ``Replicate()``.

    Raises ValueError when the bounds do not cover the shape or the shape of ``local`` does not match them.
    """
    rows: list[Placement] = [] if bounds is None else [RowShard(bounds, axes, shape)] * axes
    # Replicas are outermost: tensors are sharded over the inner axis first, whose ranks are close to each other.
    copies = _data_axes(mesh, tensor_parallel) - len(rows)
    if copies < 0:
        raise ValueError(
            f"make_dtensor: expected axes <= {copies + len(rows)}, the number of data-parallel axes, got {axes}"
        )
    return _make(local, mesh, shape, (*[Replicate()] * copies, *rows, *tensor_parallel))


def make_partial(
    local: torch.Tensor,
    mesh: DeviceMesh,
    shape: Sequence[int],
    mean: bool,
    *,
    bounds: Sequence[int] | None = None,
    axes: int = 0,
    tensor_parallel: Sequence[Placement] = (),
) -> RowDTensor:
    """An unreduced gradient: the true gradient is the sum (with ``mean``: the average) of the ranks' ``local`` tensors.

    The sum is over all data-parallel axes except the ``axes`` innermost, over which rows are already cut at ``bounds``.
    Other arguments and errors as for ``make_dtensor``.
    """
    unreduced = _data_axes(mesh, tensor_parallel) - axes
    if unreduced < 1 or (axes > 0) != (bounds is not None):
        raise ValueError(
            f"make_partial: expected fewer axes than the {unreduced + axes} data-parallel ones, and bounds exactly if "
            f"axes > 0, got axes={axes}, bounds={bounds}"
        )
    rows: list[Placement] = [] if bounds is None else [RowShard(bounds, axes, shape)] * axes
    return _make(
        local, mesh, shape, (*[Partial("avg" if mean else "sum")] * unreduced, *rows, *tensor_parallel)
    )


def make_placed(
    local: torch.Tensor, mesh: DeviceMesh, shape: Sequence[int], placements: Sequence[Placement]
) -> RowDTensor:
    """A DTensor of global ``shape`` over ``local`` (shared), with these placements on the whole mesh.

    Raises ValueError for placements that do not fit the shape, or when the shape of ``local`` does not match them.
    """
    rows = row_placement(placements)
    if rows is not None and rows.shape != tuple(shape):
        own = RowShard(rows.bounds, rows.axes, shape)
        placements = [own if placement == rows else placement for placement in placements]
    return _make(local, mesh, shape, tuple(placements))


def rebuild_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
) -> RowDTensor:
    """Unpickles a ``RowDTensor``; files contain the name of this function.

    The reading process may have no process groups, or different ones from the writing process.
    """
    tensor = RowDTensor(local, _spec_of(mesh, placements, shape, local.dtype), requires_grad=False)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)  # type: ignore[return-value]  # stays a RowDTensor
    tensor.requires_grad_(requires_grad)
    return tensor


def count_write(tensor: torch.Tensor) -> None:
    """Record an in-place change of the local rows that torch itself does not count."""
    torch.autograd.graph.increment_version(local_of(tensor))


def wrap_like(tensor: torch.Tensor, local: torch.Tensor) -> RowDTensor:
    """A DTensor over ``local`` with the mesh, placements and global shape of ``tensor``; the dtype may differ."""
    origin = checked_dtensor(tensor)
    check_local(local, origin.shape, origin.placements, local_of(origin).shape)
    spec = origin._spec
    # The placements remain the same object in either case, because ``operands`` compares objects first.
    if spec.tensor_meta is None or spec.tensor_meta.dtype != local.dtype:
        spec = _spec_of(origin.device_mesh, origin.placements, origin.shape, local.dtype)
    return RowDTensor(local, spec, requires_grad=False)


def wrap_rows(
    tensor: torch.Tensor, local: torch.Tensor, shape: Sequence[int], bounds: Sequence[int] | None
) -> RowDTensor:
    """A DTensor of another ``shape`` over ``local``, its rows cut at ``bounds`` over the axes that cut ``tensor``.

    With ``bounds`` None the data-parallel axes hold replicas. Errors as for ``make_dtensor``.
    """
    origin = checked_dtensor(tensor)
    axes = row_axes(origin.placements)
    row = Replicate() if bounds is None else RowShard(bounds, len(axes), shape)
    placements = (row if axis in axes else placement for axis, placement in enumerate(origin.placements))
    return _make(local, origin.device_mesh, shape, tuple(placements))


def distribute(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> RowDTensor:
    """A DTensor over a copy of this rank's part of ``whole``, which every rank has; nothing is communicated."""
    sizes = local_sizes(whole.shape, mesh, placements)
    # Needed only for its placements, which ``own_part`` reads.
    empty = torch.empty(sizes, dtype=whole.dtype, device="meta")
    template = make_placed(empty, mesh, whole.shape, placements)
    return wrap_like(template, own_part(template, whole).clone())


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank, plain and without history; collective over the mesh unless it is replicated.

    Raises TypeError for anything else, such as the plain weights that modules show in forward and backward, and in
    between if they do not reshard.
    """
    if not isinstance(tensor, DTensor):
        shape = f" of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else ""
        raise TypeError(
            f"full_tensor: expected a sharded parameter or a DTensor, got a plain {type(tensor).__name__}{shape}; "
            "module.weight is already whole in a forward, after unshard(), and after a forward that does not reshard: "
            "take the sharded parameter from named_parameters() after the forward, or after reshard()"
        )
    return checked_dtensor(tensor.detach()).full_tensor()


def _gathered(tensor: RowDTensor) -> torch.Tensor:
    with torch.no_grad():
        return gather(plain_values(tensor), tensor.shape, tensor.device_mesh, tensor.placements)


def _data_axes(mesh: DeviceMesh, tensor_parallel: Sequence[Placement]) -> int:
    axes = mesh.ndim - len(tensor_parallel)
    if axes not in (1, 2):
        raise ValueError(
            f"mesh of {mesh.ndim} axes, {len(tensor_parallel)} of them tensor-parallel: expected one or two "
            f"data-parallel axes, got {axes}"
        )
    return axes


def _make(
    local: torch.Tensor, mesh: DeviceMesh, shape: Sequence[int], placements: tuple[Placement, ...]
) -> RowDTensor:
    check_local(local, shape, placements, local_sizes(shape, mesh, placements))
    return RowDTensor(local, _spec_of(mesh, placements, shape, local.dtype), requires_grad=False)


def _spec_of(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    # DTensor.from_local treats an empty shape as a missing one.
    stride = tuple(
        itertools.accumulate((max(1, size) for size in reversed(shape[1:])), operator.mul, initial=1)
    )
    meta = TensorMeta(torch.Size(shape), stride[::-1] if shape else (), dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)
