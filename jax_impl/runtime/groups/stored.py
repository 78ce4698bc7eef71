"""An array of a train state, in either engine, and the boxes of parameters in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from jax.sharding import PartitionSpec

Read = Callable[[str, tuple[int, ...], tuple[int, ...]], np.ndarray]


class BufferSlice(NamedTuple):
    """A box of one parameter, in its global coordinates, with its values (shape ``sizes``).

    ``repeated``: whether another device has the same box in a shard that is not a replica.
    """

    path: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: np.ndarray
    repeated: bool = False


def read_box(read: Read, path: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
    """A box's values; raises ``ValueError`` if their shape is not ``sizes``."""
    values = np.asarray(read(path, offsets, sizes))
    if values.shape != sizes:
        raise ValueError(
            f"parameter {path!r}: expected values of shape {sizes} at {offsets}, got {values.shape}"
        )
    return values


class Stored(Protocol):
    """An array of a train state, and the positions of parameters in it. ``index`` as in ``jax.Shard.index``."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def spec(self) -> PartitionSpec: ...
    @property
    def layers(self) -> int | None:
        """The layers of a stack, if they come one after another in a shard; else None."""

    def tensor_shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of this array's data for a parameter of ``shape``; None if it has none."""

    def numel(self, index: tuple[slice, ...]) -> int:
        """Number of parameter elements in a shard."""

    def pieces(self, index: tuple[slice, ...], values: np.ndarray) -> Iterator[BufferSlice]:
        """A shard's values as boxes of parameters."""

    def shard(self, index: tuple[slice, ...], dtype: np.dtype, read: Read) -> np.ndarray:
        """A shard's values from boxes of parameters."""
