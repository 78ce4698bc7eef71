"""Which arrays of an optimizer's state are in CPU memory, so that they make up a given share of all elements."""

from __future__ import annotations

from collections.abc import Mapping


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
