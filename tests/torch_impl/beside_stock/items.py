"""All items, in their order."""

from __future__ import annotations

from tests.torch_impl.beside_stock import computing, loading, training, wrong_once

_ROOMS = (wrong_once, loading, training, computing)
ITEMS = tuple(sorted((item for room in _ROOMS for item in room.ITEMS), key=lambda item: item.number))
