"""Padding: rows that one convention has and another one lacks.

    hf = "model.embed_tokens.weight : vocab m"
    maxtext = "token_embedder/embedding : (vocab + zeros(padding)) m"

MaxText rounds a vocabulary up, and no token has the further rows. To a convention with such an axis they are written as
zeros, as many as the axis has: none, where nobody gives a size. To one without the axis they are left out. Then they
have to be zeros, unless the caller gave the size of the axis: training changes the logits of all rows, and so the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointReader, TensorInfo
from bridge.core.formats.tensors.boxes import split_box
from bridge.core.mapping.language.entries import ZEROS
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.operations import ChangedView
from bridge.core.mapping.language.relation import Block, TensorView


@dataclass(frozen=True)
class PaddedView:
    """A tensor that begins with all of ``view``, and is 0 elsewhere."""

    view: TensorView | ChangedView
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.view.dtype

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.view.blocks

    @property
    def exact(self) -> bool:
        """Whether no element is rounded."""
        return not isinstance(self.view, ChangedView) or self.view.exact

    def read(self, reader: CheckpointReader, box: Box) -> np.ndarray:
        """The elements of ``box``, C-contiguous. Raises as the view does."""
        part = box.intersect(Box.whole(self.view.shape))
        if part == box:
            return self.view.read(reader, box)
        target = np.zeros(box.sizes, self.dtype)
        if part is not None:
            target[part.slices(box)] = self.view.read(reader, part)
        return target


@dataclass(frozen=True)
class LeftOut:
    """The end of a tensor along ``dim``, from ``start`` on, for which the target has no place. axis: the padding."""

    info: TensorInfo
    dim: int
    start: int
    axis: str


def require_zeros(reader: CheckpointReader, ends: Iterable[LeftOut], target: str) -> None:
    """Raises MappingError for an element that is left out and is not 0. target: the convention without padding."""
    for end in ends:
        shape, start, axis = end.info.shape, end.start, end.axis.removesuffix(ZEROS)
        size = shape[end.dim]
        whole = Box(
            tuple(start if k == end.dim else 0 for k in range(len(shape))),
            tuple(size - start if k == end.dim else n for k, n in enumerate(shape)),
        )
        for box in split_box(whole, end.info.dtype.itemsize):
            if box.numel and reader.read(end.info.name, box).any():
                raise MappingError(
                    f"{end.info.name} of {reader.path} has {size} elements along axis {end.dim}, and the model "
                    f"{start}: expected zeros as padding from {start} on, found others, for which convention {target} "
                    f"has no place. If the model has {size}, say so (--axis {axis}=0). If it does not use the others, "
                    f"leave them out (--axis {axis}={size - start}; in a program "
                    f"load_mapping(...).with_axes({{{axis!r}: {size - start}}}))"
                )
