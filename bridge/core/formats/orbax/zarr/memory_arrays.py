"""Arrays whose chunks tensorstore decodes from memory: for checkpoints in a store that tensorstore does not access.

The values with the wanted boxes are put into a store in memory, and the array is opened there. Each thread keeps its
last array: the next box is often in the same stored chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import tensorstore as ts

from bridge.core.formats.orbax.zarr.arrays import ArrayLayout, metadata_key, new_context
from bridge.core.formats.tensors.base import Box


class _Last(threading.local):
    array: ts.TensorStore | None = None
    keys: frozenset[str] = frozenset()


class MemoryArrays:
    """Opens arrays with only some of their chunks. Thread-safe."""

    def __init__(self) -> None:
        self._last = _Last()

    def open(
        self, layout: ArrayLayout, boxes: Iterable[Box], value: Callable[[str], bytes]
    ) -> ts.TensorStore:
        """The array with the chunks that contain these boxes. value: reads a key's value from the checkpoint's store.

        Errors of `value` and of tensorstore.
        """
        keys = frozenset(key for box in boxes for key in layout.keys_of(box))
        described = metadata_key(layout.key, zarr3=layout.zarr3)
        if self._last.array is None or not keys | {described} <= self._last.keys:
            # Before the values are loaded: this needs memory for one chunk, not two.
            self._last.array, self._last.keys = None, frozenset()
            context = new_context()
            store = ts.KvStore.open({"driver": "memory"}, context=context).result()
            for key in (described, *keys):
                store.write(key, value(key)).result()
            spec = layout.read_spec({"driver": "memory"})
            self._last.array = ts.open(spec, read=True, open=True, context=context).result()
            self._last.keys = keys | {described}
        return self._last.array
