"""Chunks of many arrays into one OCDBT store, a bounded transaction at a time; several stores joined into one.

A transaction stays in memory until it is committed, once it holds 32 MiB. Smaller ones would cost more: each commit
writes a data file and the manifest and syncs both.

Processes that write one checkpoint have a store each, since an OCDBT manifest has one writer. Joining copies no data:
the item's own B-tree refers to the files of the stores, by relative paths.

    <item>/manifest.ocdbt, d/*           keys of all arrays, written by join_stores
    <item>/ocdbt.process_0/d/*           chunks that process 0 wrote
    <item>/ocdbt.process_1/d/*           chunks that process 1 wrote
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tensorstore as ts

from bridge.formats.base import Box, CheckpointError
from bridge.formats.orbax_store import MANIFEST, ArrayLayout, explain, new_context, store_spec

_TRANSACTION_BYTES = 32 << 20
# Each array opened in a transaction takes memory too.
_TRANSACTION_ARRAYS = 2000


def process_store(item: Path, process: int) -> Path:
    """The directory of a process's own store, named as Orbax names it."""
    return item / f"ocdbt.process_{process}"


class ChunkStore:
    """An OCDBT store that chunks are written to. Not thread-safe; after an error nothing but `drop` may be called."""

    def __init__(self, directory: Path) -> None:
        self._spec = store_spec(directory, ocdbt=True, create=True)
        self._context = new_context()
        self._transaction: ts.Transaction | None = None
        self._arrays: dict[str, ts.TensorStore] = {}
        self._pending_bytes = 0

    def write(self, layout: ArrayLayout, box: Box, values: np.ndarray) -> None:
        """Store one chunk. `values` may be changed afterwards."""
        if self._pending_bytes + layout.chunk_bytes > _TRANSACTION_BYTES:
            self.flush()
        self.array(layout)[box.slices()].write(values).result()
        self._pending_bytes += layout.chunk_bytes

    def array(self, layout: ArrayLayout) -> ts.TensorStore:
        """The array, opened (and if need be created) in the current transaction."""
        if len(self._arrays) >= _TRANSACTION_ARRAYS:
            self.flush()
        if self._transaction is None:
            self._transaction = ts.Transaction(atomic=True)
        if layout.key not in self._arrays:
            self._arrays[layout.key] = ts.open(
                layout.write_spec(self._spec),
                create=True,
                open=True,
                context=self._context,
                transaction=self._transaction,
            ).result()
        return self._arrays[layout.key]

    def flush(self) -> None:
        """Commit what is pending to disk."""
        self._arrays.clear()
        transaction, self._transaction = self._transaction, None
        self._pending_bytes = 0
        if transaction is not None:
            transaction.commit_async().result()

    def drop(self) -> None:
        """Forget what is pending."""
        self._arrays.clear()
        if self._transaction is not None:
            self._transaction.abort()
            self._transaction = None


def join_stores(item: Path, processes: Iterable[int]) -> None:
    """Refer to the chunks of the processes' stores from the item's own; a process that wrote nothing has no store.

    CheckpointError when two processes wrote one chunk: one of them would be lost.
    """
    with explain(f"{item}: cannot join the stores of the processes"):
        context, transaction = new_context(), ts.Transaction(atomic=True)
        own = ts.KvStore.open(store_spec(item, ocdbt=True, create=True), context=context).result()
        writers: dict[bytes, int] = {}
        for process in processes:
            directory = process_store(item, process)
            if not (directory / MANIFEST).exists():
                continue
            store = ts.KvStore.open(store_spec(directory, ocdbt=True), context=context).result()
            for key in store.list().result():
                # Each writer of an array stores the array's metadata, the same.
                if writers.setdefault(key, process) != process and not key.endswith(b"/zarr.json"):
                    raise CheckpointError(
                        f"{item}: expected one writer for each chunk, but processes {writers[key]} and {process} wrote "
                        f"{key.decode()!r}"
                    )
            store.experimental_copy_range_to(own.with_transaction(transaction)).result()
        transaction.commit_async().result()
