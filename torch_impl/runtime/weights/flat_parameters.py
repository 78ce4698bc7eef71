"""Parameters over flat buffers: sharded over main weights, whole over compute weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from torch_impl.dtensor.remainders import attach, split
from torch_impl.dtensor.tensor import make_dtensor
from torch_impl.runtime.ground import tensor_parallel
from torch_impl.runtime.ground.buffer import FlatBuffer
from torch_impl.runtime.ground.group_spec import GroupSpec

GivenParameter: TypeAlias = tuple[nn.Parameter, torch.Tensor]
"""A parameter, and its values or, under tensor parallelism, this rank's part of them."""


def sharded_parameters(
    spec: GroupSpec,
    main: FlatBuffer,
    originals: Sequence[GivenParameter],
    wholes: Sequence[torch.Tensor],
    finish_gather: Callable[[], None],
) -> list[nn.Parameter]:
    """DTensors over this rank's rows in ``main``, with the values of ``originals``, if any.

    ``wholes`` are views of the compute weights, which contain the rows if ``main`` has remainders.
    """
    # From the original values: weights that were first cast to bfloat16 would train to other losses.
    return [
        _sharded_parameter(spec, main, index, param, values, whole, finish_gather)
        for index, ((param, values), whole) in enumerate(zip(originals, wholes, strict=True))
    ]


def _sharded_parameter(
    spec: GroupSpec,
    main: FlatBuffer,
    index: int,
    param: nn.Parameter,
    values: torch.Tensor,
    whole: torch.Tensor,
    finish_gather: Callable[[], None],
) -> nn.Parameter:
    axes, name = spec.strategy.optimizer, spec.names[index]
    stored, bounds, shard = main.view(name), None, spec.levels.mesh.index(axes)
    if axes:
        bounds = spec.levels.row_bounds(axes, name)
    rows = stored
    if spec.dtypes.remainders:
        first = 0 if bounds is None else bounds[shard] * spec.layout.slot(name).row_size
        rows = whole.view(-1)[first : first + stored.numel()].view(stored.shape)
    if not values.is_meta:
        if bounds is not None and rows.numel():
            values = values.reshape(-1, *rows.shape[1:])[bounds[shard] : bounds[shard + 1]]
        elif bounds is not None:
            # reshape(-1, ...) cannot infer a number of rows from no elements.
            values = rows
        if spec.dtypes.remainders:
            split(values.to(spec.dtypes.main), rows, stored)
        else:
            rows.copy_(values)
    if spec.dtypes.remainders:
        attach(rows, stored, finish_gather)
    mesh, others = spec.placed(index)
    tensor = make_dtensor(rows, mesh, param.shape, bounds, axes=max(axes, 1), tensor_parallel=others)
    return nn.Parameter(tensor, requires_grad=param.requires_grad)


def unsharded_parameters(
    spec: GroupSpec,
    originals: Sequence[GivenParameter],
    sharded: Sequence[nn.Parameter],
    wholes: Sequence[torch.Tensor],
) -> list[nn.Parameter]:
    """Parameters over ``wholes``; they and ``sharded`` get the attributes of ``originals``."""
    unsharded = [spec.whole_parameter(index, whole) for index, whole in enumerate(wholes)]
    # Attributes that a program set on its parameters control optimizers and kernels.
    for (param, _), *copies in zip(originals, sharded, unsharded, strict=True):
        marks = {key: value for key, value in vars(param).items() if key != tensor_parallel.MARK}
        for copy in copies:
            vars(copy).update(marks)
    for param in unsharded:
        # This group collects its gradient, and sums the terms of the model axes.
        setattr(param, tensor_parallel.SUMMED, None)
    return unsharded
