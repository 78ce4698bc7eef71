"""One Muon update of many matrices, of which this rank may hold only some rows.

For each matrix this is the arithmetic of ``torch.optim.Muon``, with the same roundings::

    1   m = lerp(m, g, 1 - momentum)                    this rank's rows, in the dtype of the update
    2   u = lerp(g, m, momentum) with nesterov, else m
    3   o = Newton-Schulz iteration of u                the whole matrix, in bfloat16
    4   w = w * (1 - lr * weight_decay)                 this rank's rows
    5   w = w - adjusted lr * o

A parameter of more than two dimensions is a stack of separate matrices. The placement of the parameter determines which
ranks have a matrix whole for line 3:

whole       on every rank (replicas), or on one rank (``granularity="tensor"``): nothing is sent
rows        on several ranks: each matrix on its owner, see ``muon_exchange``; two all-to-alls per round and axis
otherwise   (tensor parallelism): on every rank, after an all-gather of the parameter over each axis

Ranks that hold replicas compute the same update.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from bridge.core.sharding.layout.matrices import balanced, cost, owner_of_all, rounds, rows_by_shard
from bridge.core.sharding.policy.optimizer_state import ROUND
from torch_impl.comm import collectives
from torch_impl.dtensor.local import checked_dtensor, own_part, row_bounds_of
from torch_impl.dtensor.placement import gather, replicated, row_axes, row_placement
from torch_impl.dtensor.tensor import RowDTensor
from torch_impl.optimizer.moments import MomentFormat
from torch_impl.optimizer.muon_exchange import Cut, Exchange
from torch_impl.optimizer.offload import Transfers
from torch_impl.optimizer.update import Group, ParameterUpdate, Tensors, Updates

TOGETHER: int = ROUND

Orthogonalized = Callable[[Sequence["_Matrix"], list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True, eq=False)
class _Matrix:
    """A matrix of a parameter, or this rank's part of it; the whole stack if all of a parameter is gathered.

    ``part``: selects the matrix from the parameter's local tensors. ``shape``: of the whole matrix.
    """

    update: ParameterUpdate
    grad: torch.Tensor
    part: Callable[[torch.Tensor], torch.Tensor]
    shape: tuple[int, int]

    @property
    def moment(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        stored, scale = self.update.moments[0]
        return self.part(stored), None if scale is None else self.part(scale)


@collectives.labelled("muon")
def update_matrices(updates: Updates, grads: Tensors, group: Group, transfers: Transfers) -> None:
    """Update parameters on one device by local gradients of any floating dtype, together with ranks that share rows.

    All ranks pass the same parameters in the same order.
    """
    for turns, orthogonalized in _by_placement(updates, grads, group):
        batches = [[tensor for matrix in turn for tensor in _travelling(matrix)] for turn in turns]
        for turn, copies in zip(turns, transfers.stream(batches), strict=True):
            _turn(turn, copies, group, orthogonalized)


def _by_placement(
    updates: Updates, grads: Tensors, group: Group
) -> Iterable[tuple[list[list[_Matrix]], Orthogonalized]]:
    """Matrices in rounds, each with the function that orthogonalizes its updates."""
    here: list[_Matrix] = []
    gathered: list[_Matrix] = []
    cut: dict[Any, list[tuple[ParameterUpdate, torch.Tensor]]] = {}
    for update, grad in zip(updates, grads, strict=True):
        param = update.param
        if not isinstance(param, DTensor) or replicated(param.placements):
            here.extend(_whole_matrices(update, grad))
        elif isinstance(param, RowDTensor) and _only_rows(param):
            axes = row_axes(param.placements)
            cut.setdefault((param.device_mesh, axes), []).append((update, grad))
        else:
            gathered.append(_Matrix(update, grad, lambda tensor: tensor, (param.shape[-2], param.shape[-1])))

    def by_owner(
        exchange: Exchange, owned: Sequence[tuple[_Matrix, Cut]]
    ) -> tuple[list[list[_Matrix]], Orthogonalized]:
        turns = rounds([c.owner for _, c in owned], [math.prod(m.shape) for m, _ in owned], TOGETHER)
        cuts = {id(matrix): cut for matrix, cut in owned}

        def run(turn: Sequence[_Matrix], values: list[torch.Tensor]) -> list[torch.Tensor]:
            own = [cuts[id(matrix)] for matrix in turn]
            whole = exchange.together(own, values)
            done = {number: orthogonal(matrix, group) for number, matrix in whole.items()}
            return exchange.apart(own, done, values[0].new_empty(0))

        return [[owned[number][0] for number in turn] for turn in turns], run

    for (mesh, axes), members in cut.items():
        exchange = Exchange(mesh, axes)
        own, travelling = _owned(exchange, members)
        here.extend(own)
        yield by_owner(exchange, travelling)
    yield (
        [[update] for update in here if math.prod(update.shape)],
        lambda _, values: [orthogonal(values[0], group)],
    )
    yield [[update] for update in gathered], lambda turn, values: [_gathered(turn[0], values[0], group)]


def _only_rows(param: DTensor) -> bool:
    rows = row_axes(param.placements)
    return row_placement(param.placements) is not None and all(
        axis in rows or placement.is_replicate() for axis, placement in enumerate(param.placements)
    )


def _whole_matrices(update: ParameterUpdate, grad: torch.Tensor) -> list[_Matrix]:
    """The matrices of a parameter that this rank has whole, in the parameter's own shape."""
    shape = tuple(update.shape)

    def at(index: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tensor: tensor[index]

    return [
        _Matrix(update, grad, at(index), (shape[-2], shape[-1]))
        for index in itertools.product(*map(range, shape[:-2]))
    ]


def _rows(update: ParameterUpdate, grad: torch.Tensor, start: int, stop: int) -> _Matrix:
    """Local rows ``[start, stop)`` of one matrix."""
    shape = tuple(update.shape)
    return _Matrix(update, grad, lambda tensor: tensor[start:stop], (shape[-2], shape[-1]))


def _owned(
    exchange: Exchange, members: Sequence[tuple[ParameterUpdate, torch.Tensor]]
) -> tuple[list[_Matrix], list[tuple[_Matrix, Cut]]]:
    """Matrices that are whole on this rank, and matrices whose rows are on several ranks, with their owners."""
    own: list[_Matrix] = []
    matrices: list[tuple[_Matrix, tuple[int, ...]]] = []
    loads: list[float] = []
    for update, grad in members:
        bounds = row_bounds_of(update.param)
        assert bounds is not None
        loads = loads or [0.0] * (len(bounds) - 1)
        start = 0
        for rows in rows_by_shard(tuple(update.shape), bounds):
            stop = start + rows[exchange.shard]
            matrix = _rows(update, grad, start, stop)
            start = stop
            holder = owner_of_all(rows)
            if holder is None:
                matrices.append((matrix, rows))
                continue
            loads[holder] += cost(matrix.shape)
            if holder == exchange.shard:
                own.append(matrix)
    owners = balanced([cost(matrix.shape) for matrix, _ in matrices], loads)
    return own, [
        (matrix, Cut(rows, matrix.shape[1], owner))
        for (matrix, rows), owner in zip(matrices, owners, strict=True)
    ]


def _travelling(matrix: _Matrix) -> list[torch.Tensor]:
    return [tensor for tensor in matrix.moment if tensor is not None] if matrix.update.offloaded else []


def _turn(
    turn: Sequence[_Matrix], copies: list[torch.Tensor], group: Group, orthogonalized: Orthogonalized
) -> None:
    fetched = iter(copies)
    values = []
    for matrix in turn:
        stored, scale = matrix.moment
        if matrix.update.offloaded:
            stored, scale = next(fetched), None if scale is None else next(fetched)
        values.append(_accumulated(matrix, stored, scale, group))
    for matrix, direction in zip(turn, orthogonalized(turn, values), strict=True):
        _step(matrix, direction, group)


def _accumulated(
    matrix: _Matrix, stored: torch.Tensor, scale: torch.Tensor | None, group: Mapping[str, Any]
) -> torch.Tensor:
    """Lines 1 and 2; the result is in bfloat16."""
    moment_format: MomentFormat = matrix.update.formats[0]
    dtype = matrix.update.dtype
    grad = matrix.part(matrix.grad).to(dtype)
    moment = stored
    if stored.dtype != dtype or scale is not None:
        moment = torch.empty_like(grad)
        moment_format.decode(stored, scale, moment)
    moment.lerp_(grad, 1 - group["momentum"])
    direction = grad.lerp(moment, group["momentum"]) if group["nesterov"] else moment
    # A copy, since the moment may be bfloat16 and must be kept.
    direction = direction.to(torch.bfloat16, copy=True)
    if moment is not stored and moment.numel():
        moment_format.encode(moment, stored, scale, 0, 0)
    return direction


def orthogonal(matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Line 3, on bfloat16 ``[rows, columns]``, which is overwritten: returns a matrix with singular values near 1."""
    a, b, c = group["ns_coefficients"]
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x.div_(x.norm().clamp(min=group["eps"]))
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x


def _gathered(matrix: _Matrix, value: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Gather all matrices of a parameter on every rank; returns this rank's part of the result."""
    param = checked_dtensor(matrix.update.param)
    whole = gather(value, param.shape, param.device_mesh, param.placements)
    for index in itertools.product(*map(range, param.shape[:-2])):
        whole[index] = orthogonal(whole[index], group)
    return own_part(param, whole)


def _step(matrix: _Matrix, direction: torch.Tensor, group: Mapping[str, Any]) -> None:
    """Lines 4 and 5."""
    stored = matrix.part(matrix.update.weight)
    lr = group["lr"].item() if isinstance(group["lr"], torch.Tensor) else group["lr"]
    weight = stored.to(matrix.update.dtype)
    weight.mul_(1 - lr * group["weight_decay"])
    weight.add_(direction, alpha=-adjusted_lr(lr, group["adjust_lr_fn"], matrix.shape))
    if weight is not stored:
        stored.copy_(weight)


def adjusted_lr(lr: float, how: str | None, shape: tuple[int, int]) -> float:
    """The learning rate of a matrix ``[rows, columns]``."""
    rows, columns = shape
    if how == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))
