"""Which rank holds which rows of a sharded model's parameters."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bridge.core.sharding.layout.holdings import HoldingsDrawing, draw_holdings
from bridge.core.sharding.layout.rows import Box
from torch_impl.diagnostics.tensors import named_main_parameters
from torch_impl.dtensor.local import checked_dtensor, local_boxes


def visualize(model: nn.Module | torch.Tensor, name: str = "") -> HoldingsDrawing:
    """Draw which ranks hold which rows of the parameters of ``model``, or of one DTensor, such as a parameter.

    The result draws itself: ``print`` it, or let a notebook show it. Rows are those at rest, the main weights'. Layers
    that are sharded alike share a drawing. Not collective: all ranks draw the same.

    name: draws only the parameter of this name, or those of the module of this name.

    Raises ValueError where the model has no sharded parameter of that name, and where tensor-parallel axes cut a tensor
    unevenly, so that a rank does not know the rows of all others; TypeError for anything but a module or a DTensor.
    """
    if isinstance(model, torch.Tensor):
        sharded = {name: checked_dtensor(model)}
    elif not isinstance(model, nn.Module):
        raise TypeError(f"visualize: expected a module or a DTensor, got {type(model).__name__}")
    else:
        named = named_main_parameters(model)
        sharded = {path: param for path, param in named if isinstance(param, DTensor) and _is_at(path, name)}
    if not sharded:
        raise ValueError(
            f"visualize: expected a model with sharded parameters{f' at or below {name!r}' if name else ''}, got "
            f"{type(model).__name__} without any"
        )
    meshes = {f"{p.device_mesh.size()} ranks {tuple(p.device_mesh.shape)}": None for p in sharded.values()}
    title = f"{len(sharded)} sharded parameter{'s'[: len(sharded) - 1]} on {' and '.join(meshes)}"
    return draw_holdings(title, ((path, param.shape, _boxes(param)) for path, param in sharded.items()))


def _is_at(path: str, name: str) -> bool:
    return not name or path == name or path.startswith(f"{name}.")


def _boxes(tensor: DTensor) -> dict[int, tuple[Box, ...]]:
    """By rank of the tensor's mesh, the boxes that the rank holds."""
    ranks = tensor.device_mesh.mesh
    coordinates = itertools.product(*map(range, ranks.shape))
    return {int(ranks[at]): local_boxes(tensor, at) for at in coordinates}
