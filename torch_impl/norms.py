"""Norms of single parameters and gradients, of all of a model at once."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from torch_impl import collectives
from torch_impl.dtensor import local_of
from torch_impl.model_tensors import named_main_parameters, sharded_axes


def parameter_norms(model: nn.Module, *, gradients: bool = False, norm_type: float = 2.0) -> dict[str, float]:
    """The norm of each whole parameter, or of its gradient, by name; the same on every rank. Collective.

    All parameters on one mesh take one all-reduce for each axis that they are sharded over, none if they are
    replicated; norms are computed in float64. Parameters that are not sharded (ignored ones) count as this rank has
    them; those without a gradient are left out.

    Raises ValueError for a norm type that is not positive, RuntimeError for a gradient that is not reduced yet.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type: expected a positive number or inf, got {norm_type!r}")
    powers: dict[str, torch.Tensor] = {}
    buckets: dict[tuple[ProcessGroup, ...], list[str]] = {}
    for name, param in named_main_parameters(model):
        tensor = param.grad if gradients else param
        if tensor is None:
            continue
        try:
            axes = sharded_axes(tensor)
        except RuntimeError as error:
            raise RuntimeError(f"{name}: {error}") from None
        powers[name] = _power(local_of(tensor.detach()), norm_type)
        groups = (
            tuple(tensor.device_mesh.get_group(axis) for axis in axes) if isinstance(tensor, DTensor) else ()
        )
        buckets.setdefault(groups, []).append(name)
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    norms: dict[str, float] = {}
    for groups, names in buckets.items():
        values = torch.stack([powers[name] for name in names])
        for group in groups:
            collectives.all_reduce(values, group, op)
        if not math.isinf(norm_type):
            values = values ** (1 / norm_type)
        norms.update(zip(names, values.tolist(), strict=True))
    return {name: norms[name] for name in powers}


def _power(local: torch.Tensor, norm_type: float) -> torch.Tensor:
    """What is summed over ranks: the norm to the power of its type; the norm itself for the maximum."""
    if local.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=local.device)
    if not local.is_floating_point():
        local = local.abs().double()
    norm = torch.linalg.vector_norm(local, norm_type, dtype=torch.float64)
    return norm if math.isinf(norm_type) else norm**norm_type
