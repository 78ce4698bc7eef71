"""The borders between values that are equal on all ranks of a model axis and values that are parts.

::

    x, equal on all ranks      enter      |  its part on each rank  |    leave       y, equal on all ranks
    ------------------------------------->|  colwise ... rowwise    |-------------------------------------->
    backward: sum of the ranks' gradients |                         | backward: the gradient unchanged

``gather`` makes whole values from the ranks' parts of the last dimension, ``scatter`` takes this rank's part: each is
the other's backward. A value that is equal on all ranks has equal gradients on all ranks, never terms of a sum.

::

             forward          backward
    enter    unchanged        all-reduce
    leave    all-reduce       unchanged
    gather   all-gather       own part
    scatter  own part         all-gather

Parameters that are not cut, but are used between enter and leave (such as a norm of queries by head), would get only
terms of their gradients. ``whole_values_inside`` finds them in autograd's graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torch_impl.comm import collectives

_PURPOSE = "activations"


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return sum_over(grads[0], ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return sum_over(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, fused: tuple[int, ...]) -> torch.Tensor:
        ctx.of = group, fused
        return _gathered(x, group, fused)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _own_part(grads[0], *ctx.of), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, fused: tuple[int, ...]) -> torch.Tensor:
        ctx.of = group, fused
        return _own_part(x, group, fused)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _gathered(grads[0], *ctx.of), None, None


def enter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``x``, equal on all ranks, for computations that differ between ranks; its gradients are summed."""
    return _apply(_Enter, x, group)


def leave(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of the ranks' ``x``, equal on all ranks."""
    return _apply(_Leave, x, group)


def gather(x: torch.Tensor, group: dist.ProcessGroup, fused: tuple[int, ...] = (1,)) -> torch.Tensor:
    """Whole values from the ranks' parts of the last dimension, which holds tensors of relative sizes ``fused``."""
    return _apply(_Gather, x, group, fused)


def scatter(x: torch.Tensor, group: dist.ProcessGroup, fused: tuple[int, ...] = (1,)) -> torch.Tensor:
    """This rank's part of the last dimension of ``x``, which is equal on all ranks; ``fused`` as for ``gather``."""
    return _apply(_Scatter, x, group, fused)


def sum_over(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of the ranks' values, in new memory."""
    total = values.clone(memory_format=torch.contiguous_format)
    with collectives.labelled(_PURPOSE):
        collectives.all_reduce(total, group)
    return total


def whole_values_inside(x: torch.Tensor) -> tuple[list[torch.Tensor], bool]:
    """Whole values from which ``x`` was computed without passing ``enter``: each would get a part of its gradient.

    x: a value inside a region, such as the input of a rowwise module.

    Returns the parameters that are not cut, and whether the whole output of another cut module is among the values.
    """
    saved: dict[int, torch.Tensor] = {}
    passed = False
    seen: set[Any] = set()
    waiting = [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node.name() == _ENTERED:
            continue
        seen.add(node)
        if node.name() in _MADE_WHOLE:
            passed = True
            continue
        variable = getattr(node, "variable", None)
        if variable is not None and not isinstance(variable, DTensor):
            saved[id(variable)] = variable
        waiting += [inner for inner, _ in node.next_functions]
    return list(saved.values()), passed


_ENTERED = f"{_Enter.__name__}Backward"
_MADE_WHOLE = tuple(f"{function.__name__}Backward" for function in (_Leave, _Gather))


def _apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)
    return result


def _gathered(x: torch.Tensor, group: dist.ProcessGroup, fused: Sequence[int]) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    parts = x.new_empty(ranks, *x.shape)
    with collectives.labelled(_PURPOSE):
        collectives.all_gather([parts.view(-1)], [x.contiguous().view(-1)], group)
    lengths = [x.shape[-1] // sum(fused) * size for size in fused]
    pieces = [part.split(lengths, -1) for part in parts]
    return torch.cat([piece for tensor in zip(*pieces, strict=True) for piece in tensor], -1)


def _own_part(x: torch.Tensor, group: dist.ProcessGroup, fused: Sequence[int]) -> torch.Tensor:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    tensors = x.split([x.shape[-1] // sum(fused) * size for size in fused], -1)
    return torch.cat([tensor.chunk(ranks, -1)[rank] for tensor in tensors], -1)
