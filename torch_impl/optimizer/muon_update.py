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
rows        on several ranks: each matrix on its owner, see ``Exchange``; two all-to-alls per round and axis
otherwise   (tensor parallelism): on every rank, after an all-gather of the parameter over each axis

Ranks that hold replicas compute the same update.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from bridge.core.sharding.layout.matrices import balanced, cost, owner_of_all, rounds, rows_by_shard
from bridge.core.sharding.policy.optimizer_state import ROUND
from torch_impl.comm import collectives
from torch_impl.comm.mesh import coordinate_of, shard_index
from torch_impl.dtensor.local import checked_dtensor, own_part, row_bounds_of
from torch_impl.dtensor.placement import gather, replicated, row_axes, row_placement
from torch_impl.dtensor.tensor import RowDTensor
from torch_impl.optimizer.moments import MomentFormat
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


Coordinate = tuple[int, ...]
Parts = dict[Coordinate, torch.Tensor]
"""Rows of a matrix, flat, by the coordinate of the rank to which they belong."""


@dataclass(frozen=True)
class Cut:
    """A matrix cut over ranks. ``rows``: the number of rows per shard; ``owner``: the shard that collects all rows."""

    rows: tuple[int, ...]
    columns: int
    owner: int


class Exchange:
    """Collects the rows of each matrix, cut over ``axes`` (outer to inner) of ``mesh``, on one rank, and sends back.

    The rows of a matrix are spread over several ranks, unevenly, and some ranks may have none. One rank with rows owns
    each matrix; owners are chosen to balance the cost of orthogonalization over the ranks. All matrices of a round are
    sent together, in bfloat16, the dtype in which they are orthogonalized::

        rank 0   a[0:3] b[0:1]    one all-to-all    a[0:3] a[3:5]    orthogonalize    one all-to-all    a[0:3] b[0:1]
        rank 1   a[3:5] b[1:7]    ------------->    b[0:1] b[1:7]    ------------>    ------------->    a[3:5] b[1:7]

    So a rank sends and receives, in each direction, 2 bytes for each element of its rows, except for matrices it owns.
    If rows are cut over two axes of a mesh, each axis takes an all-to-all: first to the owner's coordinate on the outer
    axis, then to the owner's coordinate on the inner axis. A matrix that is whole on one rank belongs to it and is not
    sent.
    """

    def __init__(self, mesh: DeviceMesh, axes: Sequence[int]) -> None:
        self._groups = [mesh.get_group(axis) for axis in axes]
        self._sizes = [mesh.size(axis) for axis in axes]
        own = coordinate_of(mesh)
        self._own: Coordinate = tuple(own[axis] for axis in axes)
        self._shards: dict[Coordinate, int] = {}
        for at in itertools.product(*map(range, self._sizes)):
            full = list(own)
            for axis, coordinate in zip(axes, at, strict=True):
                full[axis] = coordinate
            self._shards[at] = shard_index(mesh, axes, full)
        self._places = {shard: at for at, shard in self._shards.items()}

    @property
    def shard(self) -> int:
        """The index of this rank's shard."""
        return self._shards[self._own]

    def together(self, cuts: Sequence[Cut], rows: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The whole matrices that this rank owns, by number; ``rows``: this rank's rows of each, in one dtype."""
        held: list[Parts] = [{self._own: part.reshape(-1)} for part in rows]
        for stage in range(len(self._groups)):
            held = self._moved(stage, cuts, held, rows[0], to_owner=True)
        return {
            number: torch.cat([held[number][at] for _, at in sorted(self._places.items())]).view(
                -1, cut.columns
            )
            for number, cut in enumerate(cuts)
            if cut.owner == self.shard
        }

    def apart(
        self, cuts: Sequence[Cut], whole: dict[int, torch.Tensor], like: torch.Tensor
    ) -> list[torch.Tensor]:
        """This rank's rows ``[rows, columns]`` of all matrices, the inverse of ``together``; ``whole``: those it owns.

        ``like``: an empty tensor of the dtype and on the device of the results.
        """
        held: list[Parts] = [{} for _ in cuts]
        for number, matrix in whole.items():
            flat = matrix.reshape(-1)
            lengths = [rows * cuts[number].columns for rows in cuts[number].rows]
            parts = flat.split(lengths)
            held[number] = {at: parts[shard] for at, shard in self._shards.items()}
        for stage in reversed(range(len(self._groups))):
            held = self._moved(stage, cuts, held, like, to_owner=False)
        return [parts[self._own].view(-1, cut.columns) for parts, cut in zip(held, cuts, strict=True)]

    def _moved(
        self, stage: int, cuts: Sequence[Cut], held: Sequence[Parts], like: torch.Tensor, *, to_owner: bool
    ) -> list[Parts]:
        """One all-to-all over the axis ``stage``: a rank's rows, to or from the owner's coordinate on that axis."""
        leaving = [list(self._travelling(stage, peer, cuts, to_owner)) for peer in range(self._sizes[stage])]
        coming = [
            list(self._travelling(stage, peer, cuts, not to_owner)) for peer in range(self._sizes[stage])
        ]
        # The rows that a peer sends here are the rows that the reverse exchange would send to that peer.
        parts = [held[number][at] for peer in leaving for number, at in peer]
        sent = torch.cat(parts) if parts else like.new_empty(0)
        sizes = [[self._length(cuts[number], at) for number, at in peer] for peer in coming]
        received = like.new_empty(sum(map(sum, sizes)))
        collectives.all_to_all(
            received,
            sent,
            [sum(of_rank) for of_rank in sizes],
            [sum(self._length(cuts[number], at) for number, at in peer) for peer in leaving],
            self._groups[stage],
        )
        moved: list[Parts] = [{} for _ in cuts]
        lengths = list(itertools.chain.from_iterable(sizes))
        names = itertools.chain.from_iterable(coming)
        for (number, at), part in zip(names, received.split(lengths), strict=True):
            moved[number][at] = part
        return moved

    def _travelling(
        self, stage: int, peer: int, cuts: Sequence[Cut], to_owner: bool
    ) -> Iterator[tuple[int, Coordinate]]:
        """The rows that this rank sends to ``peer`` on the way to owners, or returns to ``peer`` on the way back."""
        # The coordinates on this axis of the rank that has the rows, and of the owner.
        source, target = (self._own[stage], peer) if to_owner else (peer, self._own[stage])
        for number, cut in enumerate(cuts):
            owner = self._places[cut.owner]
            if owner[stage] != target or owner[:stage] != self._own[:stage]:
                continue
            behind = self._own[stage + 1 :]
            for before in itertools.product(*map(range, self._sizes[:stage])):
                yield number, (*before, source, *behind)

    def _length(self, cut: Cut, at: Coordinate) -> int:
        return cut.rows[self._shards[at]] * cut.columns
