"""The state that optimizers of main weights keep for a parameter, and the elements that an update processes together.

Also which arrays of the state are in CPU memory, so that they make up a given share of all elements.

Moments in float16 and float8 have a float32 scale for each row. Rows with a single element, those of vectors and
scalars, have no scale and stay in the dtype of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from bridge.core.dtype_names import BYTES
from bridge.core.sharding.layout.rows import rows_of

Item = TypeVar("Item")
SCALED: Final = ("float16", "float8_e4m3fn", "float8_e5m2")
MOMENTS: Final = ("float32", "bfloat16", *SCALED)
"""Dtypes in which moments are stored; float32 means the dtype of the update."""
MOMENT_BYTES: Final = {dtype: BYTES.get(dtype, 1) for dtype in MOMENTS}
SCALE_BYTES: Final = 4

# Elements that PyTorch stages together, unless rows that cannot be separated have more.
CHUNK: Final = 1 << 20
# Elements of the longest vector register, AVX-512's, in the shortest dtype of an update: PyTorch cuts at multiples.
VECTOR: Final = 16
# Elements of the matrices that one rank owns per round of PyTorch's Muon, unless one matrix has more.
ROUND: Final = 1 << 22


def together(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Consecutive items, with sizes of up to ``most`` together; a larger item is alone."""
    batch: list[Item] = []
    total = 0
    for item in items:
        own = size(item)
        if batch and total + own > most:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += own
    if batch:
        yield batch


def update_dtype(main: str) -> str:
    """The dtype in which main weights are updated, and in which unrounded moments are stored."""
    return "float64" if main == "float64" else "float32"


def unscaled_bytes(dtype: str | None, main: str) -> int:
    """Bytes per element of a moment without scales; ``main``: the dtype of the main weights."""
    return BYTES[dtype if dtype == "bfloat16" else update_dtype(main)]


def moment_bytes(dtype: str | None, main: str, shape: Sequence[int], numel: int, rows: int) -> int:
    """Bytes, scales included, of ``numel`` elements in so many ``rows`` of a moment, for a parameter of this shape."""
    if dtype in SCALED and rows_of(shape)[0] > 1:
        return numel * MOMENT_BYTES[dtype] + rows * SCALE_BYTES
    return numel * unscaled_bytes(dtype, main)


class OffloadShare:
    """Picks arrays one by one, so that ``fraction`` of all elements is picked, to within half an array."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self._seen = self._picked = 0

    def picks(self, numel: int) -> bool:
        """Whether the next array, with ``numel`` elements, is picked."""
        self._seen += numel
        if numel == 0 or self._picked + numel / 2 > self.fraction * self._seen:
            return False
        self._picked += numel
        return True


def offloaded(sizes: Mapping[str, int], fraction: float) -> frozenset[str]:
    """Names of the picked arrays, from numbers of elements by name."""
    share = OffloadShare(fraction)
    return frozenset(name for name, numel in sizes.items() if share.picks(numel))
