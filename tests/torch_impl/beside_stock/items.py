"""All items, in their order."""

from __future__ import annotations

from tests.torch_impl.beside_stock import loading, training, wrong_once

ITEMS = tuple(
    sorted((*wrong_once.ITEMS, *loading.ITEMS, *training.ITEMS), key=lambda item: item.number)
)
