"""Collect the rows of each matrix on one rank, and send the results back.

The rows of a matrix are spread over several ranks, unevenly, and some ranks may have none. One rank with rows owns each
matrix; owners are chosen to balance the cost of orthogonalization over the ranks. All matrices of a round are sent
together, in bfloat16, the dtype in which they are orthogonalized::

    rank 0   a[0:3] b[0:1]    one all-to-all    a[0:3] a[3:5]    orthogonalize    one all-to-all    a[0:3] b[0:1]
    rank 1   a[3:5] b[1:7]    ------------->    b[0:1] b[1:7]    ------------>    ------------->    a[3:5] b[1:7]

So a rank sends and receives, in each direction, 2 bytes for each element of its rows, except for matrices it owns. If
rows are cut over two axes of a mesh, each axis takes an all-to-all: first to the owner's coordinate on the outer axis,
then to the owner's coordinate on the inner axis. A matrix that is whole on one rank belongs to it and is not sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.comm import collectives
from torch_impl.comm.mesh import coordinate_of, shard_index

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
    """The exchange between ranks that hold rows cut over ``axes`` (outer to inner) of ``mesh``."""

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
