"""One unit of a sharding plan: its groups of parameters, and their arrays at rest, as either engine has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import PartitionSpec

from bridge.core.sharding import Layout, Strategy
from bridge.core.sharding.policy.parallel import Cut
from bridge.core.sharding.policy.recompute import Recompute
from jax_impl.comm.collectives import Wire
from jax_impl.modules.module_tree import UnitModule

Arrays = Sequence[jax.Array]
Read = Callable[[str, tuple[int, ...], tuple[int, ...]], np.ndarray]


class BufferSlice(NamedTuple):
    """A box of one parameter, in its global coordinates, with its values (shape ``sizes``).

    ``repeated``: whether another device has the same, in a shard that is no replica.
    """

    path: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: np.ndarray
    repeated: bool = False


def read_box(read: Read, path: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
    """A box's values; raises ``ValueError`` for those of another shape than ``sizes``."""
    values = np.asarray(read(path, offsets, sizes))
    if values.shape != sizes:
        raise ValueError(
            f"parameter {path!r}: expected values of shape {sizes} at {offsets}, got {values.shape}"
        )
    return values


class Stored(Protocol):
    """An array of a train state, and which parts of parameters lie where in it. ``index`` as in ``jax.Shard.index``."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def spec(self) -> PartitionSpec: ...
    @property
    def layers(self) -> int | None:
        """Of a stack whose layers come one after the other in a shard, or None."""

    def tensor_shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Of what it has of a parameter of ``shape``; None where it has nothing."""

    def numel(self, index: tuple[slice, ...]) -> int:
        """Elements of parameters in a shard."""

    def pieces(self, index: tuple[slice, ...], values: np.ndarray) -> Iterator[BufferSlice]:
        """A shard's values as boxes of parameters."""

    def shard(self, index: tuple[slice, ...], dtype: np.dtype, read: Read) -> np.ndarray:
        """A shard's values from boxes of parameters."""


class Group(Protocol):
    """Parameters of one unit that are gathered and reduced together; see ``FlatGroup`` for what the methods do."""

    @property
    def trainable(self) -> bool: ...
    @property
    def paths(self) -> tuple[str, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def wire(self) -> Wire: ...
    @property
    def layers(self) -> int | None: ...
    @property
    def stored(self) -> Mapping[str, Stored]: ...
    @property
    def strategy(self) -> Strategy: ...
    @property
    def sends_once(self) -> bool: ...
    @property
    def holds_at_rest(self) -> bool: ...
    def cuts_of(self, path: str) -> tuple[Cut, ...]: ...
    def layer_shape(self, path: str) -> tuple[int, ...]: ...
    def hold(self, arrays: Arrays) -> tuple[jax.Array, ...]: ...
    def collectors(self) -> tuple[jax.Array, ...]: ...
    def gather(self, sources: Arrays) -> tuple[jax.Array, ...]: ...
    def leaves(self, whole: Arrays) -> tuple[jax.Array, ...]: ...
    def reduce(self, gradients: Arrays) -> tuple[jax.Array, ...]: ...
    def finish(self, gradients: Arrays) -> tuple[jax.Array, ...]: ...
    def logical(self, arrays: Arrays) -> tuple[jax.Array, ...]: ...
    def at_rest(self, leaves: Arrays) -> tuple[jax.Array, ...]: ...


@dataclass(frozen=True)
class UnitPlan:
    """One unit: its module, strategy, and groups (trainable, then frozen by dtype; those that have parameters)."""

    module: UnitModule
    strategy: Strategy
    recompute: Recompute
    groups: tuple[Group, ...]

    @property
    def layout(self) -> Layout:
        """Of the trainable group, or the only one. Raises ``ValueError`` where there is none."""
        layouts = [group.layout for group in self.groups if hasattr(group, "layout")]
        if not layouts:
            raise ValueError(
                f"unit {self.module.path!r}: expected a flat group, got {len(self.groups)} groups without layout"
            )
        return layouts[0]
