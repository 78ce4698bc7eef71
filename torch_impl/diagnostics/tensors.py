"""The tensors of a model by name: their kinds, their norms, and unwanted sharing of memory between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from torch_impl.dtensor.local import is_partial, local_of, plain_parts
from torch_impl.dtensor.reductions import norms
from torch_impl.fsdp_module import FSDPModule
from torch_impl.runtime.unit.unit import Unit


def named_units(model: nn.Module) -> dict[Unit, str]:
    """The units of ``model``, outermost first, each with its module's name, or its modules' names joined by "+"."""
    names: dict[Unit, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            names.setdefault(module._unit, []).append(name)
    return {unit: "+".join(parts) for unit, parts in names.items()}


def named_main_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """As ``named_parameters``, but sharded parameters even where a forward or ``unshard`` shows whole weights."""
    sharded = {
        id(whole): main
        for unit in named_units(model)
        for group in unit.groups
        for whole, main in zip(group.unsharded, group.params, strict=True)
    }
    for name, param in model.named_parameters():
        yield name, sharded.get(id(param), param)


def refuse_meta(name: str, tensor: torch.Tensor) -> None:
    """RuntimeError for a tensor on the meta device."""
    if tensor.is_meta:
        raise RuntimeError(
            f"{name}: expected a tensor with values, got one on the meta device; call model.to_empty(device=...), then "
            "initialize the model or load a state dict into it"
        )


def process_groups(model: nn.Module) -> list[ProcessGroup]:
    """The groups of all mesh axes of the sharded parameters, each once, in the same order on every rank."""
    groups: dict[ProcessGroup, None] = {}
    for _, param in named_main_parameters(model):
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            groups.update(dict.fromkeys(mesh.get_group(axis) for axis in range(mesh.ndim)))
    return list(groups)


def parameter_norms(model: nn.Module, *, gradients: bool = False, norm_type: float = 2.0) -> dict[str, float]:
    """The norm of each whole parameter, or of its gradient, by name; the same on every rank. Collective.

    All parameters on one mesh take one all-reduce for each axis over which they are sharded, none if they are
    replicated. Norms are computed in float64. Parameters that are not sharded (ignored ones) count with this rank's
    values. Parameters without a gradient are left out.

    Raises ValueError for a norm type that is not positive, RuntimeError for a gradient that is not reduced yet and for
    a parameter on the meta device.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type: expected a positive number or inf, got {norm_type!r}")
    tensors: dict[str, torch.Tensor] = {}
    for name, param in named_main_parameters(model):
        tensor = param.grad if gradients else param
        if tensor is None:
            continue
        refuse_meta(name, tensor)
        if is_partial(tensor):
            raise RuntimeError(
                f"{name}: expected a reduced gradient, got one whose last microbatch is still to come"
            )
        # torch refuses the maximum of a tensor without elements.
        whole = tensor.detach() if tensor.numel() else torch.zeros(1)
        tensors[name] = whole if whole.is_floating_point() else whole.abs().double()
    tensor_norms = norms("parameter_norms", list(tensors.values()), norm_type, torch.float64)
    if not tensor_norms:
        return {}
    # One copy to the host for all tensors: one copy per tensor would wait for the device each time.
    values = torch.stack([norm.to(tensor_norms[0].device) for norm in tensor_norms]).tolist()
    return dict(zip(tensors, values, strict=True))


class Overlap(NamedTuple):
    """Two tensors, such as "weight a" and "exp_avg of b", and how many bytes they share on this rank."""

    first: str
    second: str
    nbytes: int


class _Range(NamedTuple):
    start: int
    end: int
    label: str


def memory_overlaps(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> tuple[Overlap, ...]:
    """Pairs of live weights, gradients and optimizer states that share memory on this rank; there should be none.

    Checks main weights, compute weights that have memory, gradients, gradients that a backward is collecting, and the
    optimizer's tensors. Tensors that are not contiguous count with the gaps between their elements.
    """
    ranges = sorted(
        extent for label, tensor in _tensors(model, optimizer) for extent in _range(label, tensor)
    )
    overlaps = []
    open_ranges: list[_Range] = []
    for current in ranges:
        open_ranges = [earlier for earlier in open_ranges if earlier.end > current.start]
        overlaps += [
            Overlap(earlier.label, current.label, min(earlier.end, current.end) - current.start)
            for earlier in open_ranges
        ]
        open_ranges.append(current)
    return tuple(overlaps)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, torch.Tensor]]:
    for name, param in named_main_parameters(model):
        yield f"weight {name}", param
        if param.grad is not None:
            yield f"gradient {name}", param.grad
        if optimizer is not None:
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{key} of {name}", value
    for unit, unit_name in named_units(model).items():
        for group in unit.groups:
            for name, whole in zip(group.names, group.unsharded, strict=True):
                # Under no_shard in the main dtype, and with remainders, compute weights contain the main weights.
                if group.weights.separate and not group.dtypes.remainders and group.weights.compute.allocated:
                    yield f"compute weight {unit_name}.{name}", whole
            kept = {local_of(p.grad).untyped_storage().data_ptr() for p in group.params if p.grad is not None}
            for flat in group.gradient.collecting:
                # A backward adds to the sums of earlier microbatches in place.
                if flat.untyped_storage().data_ptr() not in kept:
                    yield f"gradients collected of {unit_name}", flat


def _range(label: str, tensor: torch.Tensor) -> Iterator[_Range]:
    for local in plain_parts(local_of(tensor)):
        if local.numel() == 0 or local.layout != torch.strided or local.is_meta:
            continue
        span = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
        start = local.data_ptr()
        yield _Range(start, start + span * local.element_size(), label)
