"""The tensors of a model by name, for diagnostics."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from torch_impl.fsdp_module import FSDPModule
from torch_impl.runtime.unit import Unit


def named_units(model: nn.Module) -> dict[Unit, str]:
    """The units of ``model``, outermost first, each with the name of its module; of several modules joined by "+"."""
    names: dict[Unit, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            names.setdefault(module._unit, []).append(name)
    return {unit: "+".join(parts) for unit, parts in names.items()}


def named_main_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """As ``named_parameters``, with sharded parameters also where a forward or ``unshard`` shows whole ones."""
    sharded = {
        id(whole): main
        for unit in named_units(model)
        for group in unit.groups
        for whole, main in zip(group.unsharded, group.params, strict=True)
    }
    for name, param in model.named_parameters():
        yield name, sharded.get(id(param), param)


def process_groups(model: nn.Module) -> list[ProcessGroup]:
    """The groups of all mesh axes of the sharded parameters, each once, in the same order on every rank."""
    groups: dict[ProcessGroup, None] = {}
    for _, param in named_main_parameters(model):
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            groups.update(dict.fromkeys(mesh.get_group(axis) for axis in range(mesh.ndim)))
    return list(groups)
