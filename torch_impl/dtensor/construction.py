"""``distribute_tensor`` and ``DTensor.from_local`` for the placements of sharded parameters.

Given such placements, torch's own functions raise, or make a DTensor that misinterprets its local tensor::

    distribute_tensor(whole, weight.device_mesh, weight.placements)                 this rank's rows of ``whole``
    DTensor.from_local(weight.to_local(), weight.device_mesh, weight.placements)    over the memory of ``weight``

Neither function offers a hook, so the first ``fully_shard`` of a process wraps both. Placements without ``RowShard`` or
``FusedShard`` are passed to torch unchanged.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from torch_impl.comm.mesh import coordinate_of
from torch_impl.dtensor.local import checked_dtensor, local_of
from torch_impl.dtensor.placement import FusedShard, RowShard, is_tensor_parallel, local_sizes, row_placement
from torch_impl.dtensor.tensor import RowDTensor, distribute, make_placed


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: tuple[int, ...],
    ) -> RowDTensor:
        # A new tensor object, because autograd writes to the object that it is given.
        return make_placed(local.view_as(local), mesh, shape, placements)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return local_of(checked_dtensor(grads[0])), None, None, None


def from_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: Sequence[Placement] | None = None,
) -> RowDTensor:
    """A DTensor over ``local``, whose memory it shares; differentiable. Nothing is communicated.

    ``shape`` is the shape of the whole tensor; None: the shape that the placements of a sharded parameter contain.
    Shapes are always checked, whatever ``run_check``, and the whole is contiguous, whatever ``stride``.

    Raises TypeError for anything but a tensor or a mesh; ValueError for placements that do not fit, and for a ``local``
    whose shape does not match them; RuntimeError for gradients with other placements.
    """
    placements = _checked("from_local", local, mesh, placements)
    if isinstance(local, DTensor):
        raise RuntimeError(
            f"from_local: expected a plain local tensor, got a {type(local).__name__}; use to_local()"
        )
    if grad_placements is not None and tuple(grad_placements) != placements:
        raise RuntimeError(
            f"from_local: expected gradients placed like the tensor, {placements}, got "
            f"grad_placements={grad_placements}; leave grad_placements out"
        )
    whole = _whole_shape(local, mesh, placements) if shape is None else tuple(shape)
    if local.device.type not in (mesh.device_type, "meta"):
        local = local.to(mesh.device_type)
    made: RowDTensor = _FromLocal.apply(local, mesh, placements, whole)
    return made


def _whole_shape(local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, ...]:
    rows = row_placement(placements)
    if rows is None:
        # Equal parts, as torch assumes; other tensors are refused because of their shape.
        sizes = list(local.shape)
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard | FusedShard):
                sizes[placement.dim] *= mesh.size(axis)
        return tuple(sizes)
    if rows.shape is not None:
        return rows.shape
    # Bounds that a program made itself: rows of vectors and matrices determine the whole shape, rows of stacks do not.
    if not is_tensor_parallel(placements) and local.ndim > 0:
        return (rows.bounds[-1], *local.shape[1:])
    raise ValueError(
        f"from_local: expected shape= and stride= of the whole tensor with a local tensor of shape "
        f"{tuple(local.shape)} under {placements}, got neither"
    )


def distribute_tensor(
    whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], src_data_rank: int | None = 0
) -> RowDTensor:
    """This rank's part of ``whole`` in new memory, a leaf that requires gradients if ``whole`` does.

    ``src_data_rank``: the rank on each mesh axis whose ``whole`` is used, as in torch, by a broadcast over each axis;
    None: each rank's own, without communication. A DTensor that already has these placements is returned unchanged.

    Raises TypeError for anything but a tensor or a mesh, RuntimeError for a tensor with history, ValueError for
    placements that do not fit and for other DTensors.
    """
    placements = _checked("distribute_tensor", whole, mesh, placements)
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"distribute_tensor: expected placements of a parameter or of a reduced gradient, got {placements}; reduce "
            "the gradient first"
        )
    if not whole.is_leaf:
        raise RuntimeError(
            "distribute_tensor: expected a leaf tensor, got one with history; use its detach()"
        )
    if isinstance(whole, DTensor):
        if (whole.device_mesh, whole.placements) != (mesh, placements) or not isinstance(whole, RowDTensor):
            raise ValueError(
                f"distribute_tensor: expected a plain tensor or one placed as {placements} on {mesh}, got a DTensor "
                f"placed as {whole.placements} on {whole.device_mesh}; use its full_tensor()"
            )
        return whole
    _check_shape(whole.shape, mesh, placements)
    if src_data_rank is not None and not 0 <= src_data_rank < min(mesh.shape):
        raise ValueError(
            f"distribute_tensor: expected src_data_rank to be a rank of each axis of {mesh}, or None, got "
            f"{src_data_rank}"
        )
    values = whole.detach()
    if not values.is_meta:
        values = values.to(mesh.device_type)
        if src_data_rank is not None:
            values = _of_one_rank(values, mesh, src_data_rank)
    made = distribute(values, mesh, placements)
    made.requires_grad_(whole.requires_grad)
    return made


def _checked(
    function: str, tensor: object, mesh: object, placements: Sequence[Placement]
) -> tuple[Placement, ...]:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{function}: expected a tensor, got {type(tensor).__name__}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{function}: expected param.device_mesh with the placements of a sharded parameter, got {mesh!r}"
        )
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"{function}: expected a placement for each axis of {mesh}, got {tuple(placements)}; pass "
            "param.device_mesh and param.placements of one parameter"
        )
    return tuple(placements)


def _check_shape(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Check before the ranks communicate, since others would wait for a rank that raises later."""
    try:
        local_sizes(shape, mesh, placements)
    except ValueError as error:
        rows = row_placement(placements)
        if rows is not None and rows.shape == tuple(shape):
            # The mesh has another number of ranks.
            raise
        wanted = "that its axes cut in equal parts"
        if rows is not None:
            wanted = f"of shape {rows.shape}" if rows.shape else f"of {rows.bounds[-1]} rows"
        raise ValueError(
            f"distribute_tensor: expected a tensor {wanted}, like the parameter with the placements "
            f"{tuple(placements)}, got one of shape {tuple(shape)}"
        ) from error


def _of_one_rank(values: torch.Tensor, mesh: DeviceMesh, source: int) -> torch.Tensor:
    """The ``values`` of the rank whose coordinate is ``source`` on every axis."""
    for axis, at in enumerate(coordinate_of(mesh)):
        if mesh.size(axis) == 1 or not values.numel():
            continue
        values = values.contiguous() if at == source else torch.empty_like(values).contiguous()
        # Bytes: no backend supports every dtype.
        dist.broadcast(values.view(-1).view(torch.uint8), group=mesh.get_group(axis), group_src=source)
    return values


def _ours(placements: Sequence[Placement] | None) -> bool:
    return any(isinstance(placement, RowShard | FusedShard) for placement in placements or ())


@functools.cache
def accept_row_placements() -> None:
    """Wrap torch's functions, for the whole process; calls after the first do nothing."""
    theirs, their_from_local = torch_tensor.distribute_tensor, DTensor.from_local

    @functools.wraps(theirs)
    def distributing(
        tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        if not _ours(placements):
            return theirs(tensor, device_mesh, placements, **options)
        return distribute_tensor(tensor, device_mesh, placements, **options)  # type: ignore[arg-type]  # checked there

    @functools.wraps(their_from_local)
    def making(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        if not _ours(placements):
            return their_from_local(local_tensor, device_mesh, placements, **options)
        return from_local(local_tensor, device_mesh, placements, **options)  # type: ignore[arg-type]  # checked there

    DTensor.from_local = staticmethod(making)  # type: ignore[method-assign]  # takes the same arguments
    # Programs import the function by its name, mostly before they shard anything.
    rebind("distribute_tensor", theirs, distributing)


def rebind(name: str, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Rebind the name to ``new`` in every module that imported ``old`` by it, for the module's functions too."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get(name) is not old:
            continue
        functions = [function for function in names.values() if isinstance(function, FunctionType)]
        # In a process that multiprocessing spawned, functions of the main module have other globals than the module.
        own = [function.__globals__ for function in functions if function.__module__ == names.get("__name__")]
        for scope in (names, *own):
            if scope.get(name) is old:
                scope[name] = new
