"""Tensors of a staged update cut into pieces, so that an update needs memory for one chunk, whatever is updated.

    tensor of 5 rows, chunks of 2 rows      chunk 0    chunk 1    chunk 2
    |r0 r1 r2 r3 r4| |small|                |r0 r1|    |r2 r3|    |r4 small|

A piece consists of whole rows if a moment has a scale for each row, else of any run of elements. Every piece except a
tensor's last has a multiple of ``VECTOR`` elements. Torch's CPU kernel rounds the elements after a tensor's last whole
vector differently (``update.py``, line 4), so this gives a piece the same bits as the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bridge.core.sharding.policy import optimizer_state
from bridge.core.sharding.policy.optimizer_state import VECTOR
from torch_impl.optimizer.moments import MomentFormat

CHUNK: int = optimizer_state.CHUNK
Moments = list[tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(slots=True, eq=False)
class UpdatePiece:
    """Part of a parameter's update: local tensors of one shape, or views of their parts.

    ``moments``: for each, the stored values and the scale or None. ``row``: the index, in the parameter, of the first
    row. ``dtype``: of the update. ``remainder``: the weight's remainder, if it has one.
    """

    weight: torch.Tensor
    grad: torch.Tensor
    moments: Moments
    formats: tuple[MomentFormat, ...]
    step: torch.Tensor
    row: int
    dtype: torch.dtype
    remainder: torch.Tensor | None = None

    @property
    def stored(self) -> list[torch.Tensor]:
        """The moments and scales: the tensors that are fetched and sent back when they are offloaded."""
        return [tensor for pair in self.moments for tensor in pair if tensor is not None]


def cut(piece: UpdatePiece) -> Iterator[UpdatePiece]:
    """A whole tensor's update in pieces of at most ``CHUNK`` elements."""
    numel = piece.weight.numel()
    values = [piece.weight, piece.grad, *(tensor for tensor, _ in piece.moments)]
    # Pieces of a tensor with gaps, or in another order, could not be views.
    if numel <= CHUNK or not all(tensor.is_contiguous() for tensor in values):
        yield piece
        return
    scaled = any(scale is not None for _, scale in piece.moments)
    columns = piece.weight.shape[-1] if scaled else 1
    together = columns * (VECTOR // math.gcd(VECTOR, columns))
    length = max(1, CHUNK // together) * together
    for start in range(0, numel, length):
        rows = slice(start // columns, min(start + length, numel) // columns)

        def part(tensor: torch.Tensor, rows: slice = rows) -> torch.Tensor:
            return tensor.view(-1, columns)[rows] if scaled else tensor.view(-1)[rows]

        moments: Moments = [
            (part(tensor), None if scale is None else scale.view(-1, 1)[rows])
            for tensor, scale in piece.moments
        ]
        yield UpdatePiece(
            part(piece.weight),
            part(piece.grad),
            moments,
            piece.formats,
            piece.step,
            piece.row + (rows.start if scaled else 0),
            piece.dtype,
            None if piece.remainder is None else part(piece.remainder),
        )


def chunks(pieces: Sequence[UpdatePiece]) -> Iterator[list[UpdatePiece]]:
    """Lists of consecutive pieces of one dtype, with up to ``CHUNK`` elements together."""
    chunk: list[UpdatePiece] = []
    size = 0
    for whole in pieces:
        for piece in cut(whole):
            numel = piece.weight.numel()
            if chunk and (size + numel > CHUNK or chunk[0].dtype != piece.dtype):
                yield chunk
                chunk, size = [], 0
            chunk.append(piece)
            size += numel
    if chunk:
        yield chunk
