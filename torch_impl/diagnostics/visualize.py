"""Which rank holds which rows of a sharded model's parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bridge.core.sharding.layout.holdings import HoldingsDrawing, draw_holdings
from bridge.core.sharding.layout.rows import Box
from torch_impl.diagnostics.tensors import named_main_parameters
from torch_impl.dtensor.local import local_boxes


def visualize(model: nn.Module | torch.Tensor, name: str = "") -> HoldingsDrawing:
    """Draw which ranks hold which rows of the parameters of ``model``, or of one parameter or other DTensor.

    The result draws itself: ``print`` it, or let a notebook show it. Rows are those at rest, the main weights'. Layers
    that are sharded alike share a drawing. Not collective: all ranks draw the same.

    Args:
        model: a model with sharded parameters, or one DTensor.
        name: draws only the parameter of this name, or those of the module of this name.

    Raises ValueError where the model has no such name or no sharded parameter, and where a tensor-parallel axis cuts a
    tensor unevenly, so that no rank knows the rows of all others; TypeError for a tensor that is no DTensor.
    """
    if isinstance(model, torch.Tensor):
        if not isinstance(model, DTensor):
            raise TypeError(
                f"visualize: expected a sharded model or a DTensor, got {type(model).__name__} of shape "
                f"{tuple(model.shape)}"
            )
        return draw_holdings(_mesh_words(model), [(name, tuple(model.shape), _boxes(name, model))])
    sharded = {
        path: param
        for path, param in named_main_parameters(model)
        if isinstance(param, DTensor) and (path == name or f"{path}.".startswith(f"{name}." if name else ""))
    }
    if not sharded:
        raise ValueError(
            f"visualize: expected a model with sharded parameters{f' at or below {name!r}' if name else ''}, got "
            f"{type(model).__name__} without one"
        )
    meshes = dict.fromkeys(_mesh_words(param) for param in sharded.values())
    title = f"{len(sharded)} sharded parameter{'s' if len(sharded) > 1 else ''} on {' and '.join(meshes)}"
    return draw_holdings(title, ((path, param.shape, _boxes(path, param)) for path, param in sharded.items()))


def _mesh_words(tensor: DTensor) -> str:
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or [f"axis {axis}" for axis in range(mesh.ndim)]
    return f"{mesh.size()} ranks {dict(zip(names, mesh.shape, strict=True))}"


def _boxes(name: str, tensor: DTensor) -> dict[int, tuple[Box, ...]]:
    """By rank of the tensor's mesh, the boxes that the rank holds."""
    return {rank: tuple(boxes) for rank, boxes in _by_rank(name, tensor)}


def _by_rank(name: str, tensor: DTensor) -> Iterator[tuple[int, tuple[Box, ...]]]:
    mesh = tensor.device_mesh
    ranks = mesh.mesh.flatten().tolist()
    coordinates = itertools.product(*(range(size) for size in mesh.mesh.shape))
    for rank, coordinate in zip(ranks, coordinates, strict=True):
        try:
            yield rank, local_boxes(tensor, coordinate=coordinate)
        except ValueError as error:
            raise ValueError(f"visualize: {name or 'the tensor'}, rank {rank}: {error}") from None
