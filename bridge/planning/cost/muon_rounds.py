"""Bytes of the matrices that a Muon update in PyTorch brings together, see ``torch_impl.optimizer.muon_update``.

A matrix that spans several shards is orthogonalized by one of them, in bfloat16. Matrices travel in rounds: a rank
owns up to 2^22 elements of a round, or one larger matrix. Let V be the elements of the rank's rows, W of its own
matrices, T of its taller-than-wide matrices, M and S the size and shorter side of the largest. A round holds at most::

    products      2 V + 2 W + 2 (W - M) + 4 M + 4 S^2     rows, whole matrices, results; operand, result, two squares
    way back      4 V + 6 W + 2 T                         rows; whole matrices, results, sent data; the transposed

A matrix on a single shard is processed alone: 6 M + 4 S^2; with low-precision momentum 10 M while the momentum is
float32 and the direction is made from it. Moments in CPU memory come to the device a round ahead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bridge.core.sharding.layout.matrices import num_cut
from bridge.core.sharding.layout.rows import rows_of
from bridge.core.sharding.policy.optimizer_state import ROUND
from bridge.planning.cost.buffers import GroupBuffers


@dataclass
class MuonRounds:
    """Parameters, added one after another. ``converted``: whether momentum is stored in low precision.

    cut: by number of shards, how many matrices have a height and width. alone: heights and widths of matrices on a
    single shard. moved, numel: bytes of moments in CPU memory, and elements, that a device has.
    """

    converted: bool
    cut: dict[int, Counter[tuple[int, int]]] = field(default_factory=dict)
    alone: set[tuple[int, int]] = field(default_factory=set)
    moved: int = 0
    numel: int = 0

    def add(
        self, group: GroupBuffers, name: str, shape: Sequence[int], times: int, moved: int, numel: int
    ) -> None:
        """Add ``times`` equal parameters."""
        height, width = shape[-2], shape[-1]
        rows = rows_of(shape)[1]
        if not rows:
            return
        cut = num_cut(shape, group.layout.row_bounds(name))
        if cut:
            self.cut.setdefault(group.layout.num_shards, Counter())[height, width] += cut * times
        if cut < rows // height:
            self.alone.add((height, width))
        self.moved += moved * times
        self.numel += numel * times

    @property
    def nbytes(self) -> int:
        """Bytes on the device at once, at most; including the travelling moments of two rounds."""
        each = self.moved / self.numel if self.numel else 0
        largest = 0
        for height, width in self.alone:
            numel = height * width
            own = 6 * numel + 4 * min(height, width) ** 2
            if self.converted:
                own = max(own, 10 * numel)
            largest = max(largest, own + int(2 * numel * each))
        for shards, members in self.cut.items():
            numels = {shape: math.prod(shape) * count for shape, count in members.items()}
            total = sum(numels.values())
            held = -(-total // shards)
            whole = max(min(ROUND, held), *map(math.prod, members))
            rows = min(whole, held)
            tall = whole * sum(numel for shape, numel in numels.items() if shape[0] > shape[1]) // total
            products = max(2 * math.prod(shape) + 4 * min(shape) ** 2 for shape in members)
            own = max(4 * rows + 6 * whole + 2 * tall, 2 * rows + 4 * whole + products)
            largest = max(largest, own + int(min(2 * rows, held) * each))
        return largest
