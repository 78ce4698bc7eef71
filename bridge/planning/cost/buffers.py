"""The flat buffers of one parameter group on a mesh: their elements, by level of sharding.

At level a the buffers are cut over the a innermost axes of the mesh; level 0 is whole. The layout is planned for the
level of the optimizer state, the finest in use, and coarser levels merge its shards::

    mesh 2 x 3          6 shards, of 14 elements and 4 of padding                 a device holds
    level 2   |w w w|w w w|w w b|b b u|u u .|. . .|    optimizer                  3, of them 3, 3, 3, 3, 2 or 0 real
    level 1   |w w w w w w|w w b b b u|u u . . . .|    cut over the inner axis    6
    level 0   |w w w w w w w w b b b u u u . . . .|    whole                      18
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bridge.core.dtype_names import BYTES
from bridge.core.sharding import Align, Layout, Strategy, plan_layout
from bridge.core.sharding.policy.float8 import gather_bytes
from bridge.core.sharding.policy.strategy_collectives import (
    StrategyCollectives,
    collectives_of,
    computes_with_main,
    num_flags,
)
from bridge.planning.cost.mesh import MeshShape
from bridge.planning.cost.units import GroupShape, UnitKind


@dataclass(frozen=True)
class GroupBuffers:
    """One group's buffers on one mesh."""

    shape: GroupShape
    strategy: Strategy
    mesh: MeshShape
    layout: Layout

    @property
    def numel(self) -> int:
        """Elements of the parameters."""
        return self.layout.numel

    @property
    def padded(self) -> int:
        """Elements of the whole buffers."""
        return self.layout.padded_size

    def size(self, level: int) -> int:
        """Elements that a device holds at ``level``, padding included; ``level`` at most the state's level."""
        return self.padded // self.mesh.shards(level)

    def gradient_size(self, level: int, runtime: str) -> int:
        """Elements of a gradient buffer at ``level``: in PyTorch with a flag for each parameter and finest shard."""
        flags = num_flags(self.layout, self.mesh.shards(level)) if runtime == "torch" else 0
        return self.size(level) + flags

    def real_by_device(self, level: int) -> np.ndarray:
        """``int64 [devices]``: elements of parameters that each device holds at ``level``."""
        real = self.layout.elements_by_shard.sum(0).reshape(self.mesh.shards(level), -1).sum(1)
        return real[self.mesh.shard_by_device(level)]

    def real(self, level: int, device: int) -> int:
        """Elements of parameters that ``device`` holds at ``level``."""
        return int(self._real_on(level)[device])

    @property
    def main_bytes(self) -> int:
        """Bytes of an element of the main weights."""
        return BYTES[self.shape.dtypes.main]

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element in forward and backward."""
        return BYTES[self.shape.dtypes.compute]

    @property
    def gather_dtype(self) -> str:
        """The dtype in which compute weights cross the network."""
        return self.shape.dtypes.compute if self.shape.dtypes.gather is None else "uint8"

    def gather_bytes(self, level: int) -> int:
        """Bytes of compute weights at ``level`` as they cross the network, padding and float8 scales included."""
        whole = gather_bytes(self.layout, self.shape.dtypes.gather, self.compute_bytes)
        return whole // self.mesh.shards(level)

    @property
    def reduce_bytes(self) -> int:
        """Bytes of an element of a gradient that crosses the network."""
        return BYTES[self.shape.dtypes.reduce]

    @property
    def grad_bytes(self) -> int:
        """Bytes of an element of a reduced gradient."""
        return BYTES[self.shape.dtypes.grad]

    @property
    def computes_with_main(self) -> bool:
        """Whether forward and backward read the main weights themselves."""
        return computes_with_main(self.strategy, self.shape.dtypes)

    @property
    def collectives(self) -> StrategyCollectives:
        """The axes over which the buffers are gathered and reduced."""
        return collectives_of(self.strategy, self.mesh.ndim)

    @property
    def has_remainders(self) -> bool:
        """Whether PyTorch stores main weights as whole compute weights and remainders."""
        return self.shape.dtypes.remainders and self.strategy.parameters == 0

    def _real_on(self, level: int) -> np.ndarray:
        known = self.__dict__.setdefault("_real_on_level", {})
        if level not in known:
            known[level] = self.real_by_device(level)
        real: np.ndarray = known[level]
        return real


def buffers_of(kind: UnitKind, mesh: MeshShape) -> tuple[GroupBuffers, ...]:
    """The buffers of each group of a unit. The layouts for equal shapes are planned once."""
    shards = mesh.shards(kind.strategy.optimizer)
    return tuple(
        GroupBuffers(
            group,
            kind.strategy,
            mesh,
            _layout(group.names, group.shapes, shards, kind.granularity, kind.align),
        )
        for group in kind.groups
    )


# A comparison needs the layouts of one model for several strategies, numbers of devices and runtimes.
# The key contains everything that a layout depends on, so other dtypes and runtimes share it.
@lru_cache(maxsize=1024)
def _layout(
    names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], shards: int, granularity: str, align: Align
) -> Layout:
    return plan_layout(dict(zip(names, shapes, strict=True)), shards, granularity=granularity, align=align)
