"""Write an Orbax checkpoint as a stream of chunks, without Orbax or JAX; stock Orbax v0 and v1 read it.

    layout "v0"   <path>/{_METADATA, _CHECKPOINT_METADATA, commit_success.txt, manifest.ocdbt, d/*}
    layout "v1"   <path>/{_CHECKPOINT_METADATA, commit_success.txt, orbax.checkpoint, state/{_METADATA, ...}}

Chunks go into a tensorstore transaction, which stays in memory until it is committed, once it holds 32 MiB. Smaller
transactions would cost more: each commit writes a data file and the manifest and syncs both. Chunks are row slabs:

      +-----------------+
      |     chunk 0     |   up to 8 MiB        A row longer than 32 MiB is cut along the next axis in turn.
      +-----------------+
      |     chunk 1     |
      +-----------------+
      |  chunk 2 (rest) |
      +-----------------+
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import tensorstore as ts

from bridge.formats.atomic import AtomicDirectory, CommitOrAbort
from bridge.formats.base import Box, CheckpointError, TensorInfo, TreePath, dtype_name, grid_of_chunks
from bridge.formats.orbax_item import COMMIT_FILE, TREE_FILE
from bridge.formats.orbax_store import ArrayLayout, explain, metadata_key, new_context, store_spec
from bridge.formats.orbax_tree import Claims, as_path, encode_object, leaf_name, render_tree, storage_key

_CHUNK = 8 << 20
_MAX_CHUNK = 32 << 20
_TRANSACTION_BYTES = 32 << 20
# Each array opened in a transaction takes memory too.
_TRANSACTION_ARRAYS = 2000
_HANDLERS = {
    "v0": "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler",
    "v1": "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler",
}


class OrbaxWriter(CommitOrAbort):
    """A new Orbax checkpoint; see `CheckpointWriter`. Writing is thread-safe.

    Tensors become NumPy leaves (zarr3 in OCDBT, uncompressed, with a CRC-32C per chunk that stock Orbax verifies);
    objects ride in `_METADATA`. Tree paths keep list positions where all of 0, 1, ..., n-1 are there, else they become
    dict keys. A checkpoint without any tensor is refused at commit, as stock Orbax could not read it.
    """

    format = "orbax"

    def __init__(self, path: str | os.PathLike[str], *, layout: Literal["v0", "v1"] = "v0") -> None:
        if layout not in _HANDLERS:
            raise ValueError(f"expected layout 'v0' or 'v1', got {layout!r}")
        self._directory = AtomicDirectory(path)
        self.path = self._directory.path
        self._layout = layout
        self._item = self._directory.temporary / ("state" if layout == "v1" else "")
        self._spec = store_spec(self._item, ocdbt=True, create=True)
        self._context = new_context()
        self._started = time.time_ns()
        self._lock = threading.Lock()
        self._claims = Claims(str(self.path))
        self._infos: dict[str, TensorInfo] = {}
        self._layouts: dict[str, ArrayLayout] = {}
        self._unwritten: dict[str, set[Box]] = {}
        self._objects: dict[TreePath, object] = {}
        self._transaction: ts.Transaction | None = None
        self._arrays: dict[str, ts.TensorStore] = {}
        self._pending_bytes = 0
        self._state: Literal["open", "failed", "closed"] = "open"

    def add_tensor(
        self,
        path: str | Sequence[str | int],
        shape: Sequence[int],
        dtype: np.dtype,
        chunk_shape: Sequence[int] | None = None,
    ) -> TensorInfo:
        """Declare a tensor; see `CheckpointWriter.add_tensor`. A wished-for chunk above 32 MiB is cut into slabs.

        CheckpointError when the leaf collides with an earlier one, also only in Orbax's store ("a.b" and "a", "b").
        """
        self._require_open()
        leaf, shape, dtype = as_path(path), tuple(shape), np.dtype(dtype)
        name = leaf_name(leaf)
        dtype_name(dtype)
        if any(n < 0 for n in shape):
            raise CheckpointError(f"tensor {name!r}: expected no negative dimension, got shape {shape}")
        if chunk_shape is None:
            chunk = _row_slab(shape, dtype.itemsize, _CHUNK)
        else:
            if len(chunk_shape) != len(shape) or any(n < 1 for n in chunk_shape):
                raise CheckpointError(
                    f"tensor {name!r}: expected a chunk shape of {len(shape)} positive sizes, got {tuple(chunk_shape)}"
                )
            chunk = _row_slab(tuple(map(min, chunk_shape, shape)), dtype.itemsize, _MAX_CHUNK)
        array = ArrayLayout(
            storage_key(leaf), shape, dtype, chunk, chunk, zarr3=True, raw="shard", checksum=True
        )
        try:
            boxes = grid_of_chunks(shape, chunk)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: tensor {name!r}: {error}") from None
        with self._lock:
            self._claims.add(leaf)
            self._layouts[name] = array
            self._infos[name] = TensorInfo(name, leaf, shape, dtype, boxes)
            self._unwritten[name] = set(self._infos[name].chunks)
        return self._infos[name]

    def chunks(self, name: str) -> tuple[Box, ...]:
        """The boxes that `write` expects. KeyError for an unknown name."""
        return self._infos[name].chunks

    def write(self, name: str, box: Box, array: np.ndarray) -> None:
        """Store one chunk; see `CheckpointWriter.write`. The array may be changed afterwards."""
        self._require_open()
        info, layout = self._infos[name], self._layouts[name]
        what = f"{self.path}: tensor {name!r}"
        if array.shape != box.sizes or array.dtype != info.dtype:
            raise CheckpointError(
                f"{what}: expected {info.dtype} of shape {box.sizes}, got {array.dtype} of shape {array.shape}"
            )
        with self._lock:
            if box not in self._unwritten[name]:
                wanted = (
                    "to be written once" if box in info.chunks else f"to be one of {len(info.chunks)} chunks"
                )
                raise CheckpointError(f"{what}: expected every box {wanted}, got {box}")
            try:
                with explain(f"{what}: cannot write {box}"):
                    if self._pending_bytes + layout.chunk_bytes > _TRANSACTION_BYTES:
                        self._flush()
                    self._array(name)[box.slices()].write(array).result()
            except BaseException:
                self._state = "failed"
                raise
            self._pending_bytes += layout.chunk_bytes
            self._unwritten[name].remove(box)

    def add_object(self, path: str | Sequence[str | int], value: object) -> None:
        """Store a value that is not a tensor; tuples stay tuples. CheckpointError for other types or a collision."""
        self._require_open()
        leaf = as_path(path)
        encode_object(value, f"{self.path}: object {leaf_name(leaf)!r}")
        with self._lock:
            self._claims.add(leaf)
            self._objects[leaf] = value

    def commit(self) -> None:
        """Let the checkpoint appear under its name; on any error nothing is left behind.

        CheckpointError unless every box was written and every chunk is then found in the store.
        """
        try:
            self._require_open()
            with self._lock:
                self._require_complete()
                with explain(f"{self.path}: cannot finish the array store"):
                    for name, layout in self._layouts.items():
                        if not layout.num_stored:
                            self._array(name)
                    self._flush()
                self._require_stored()
                self._write_metadata()
            self._directory.commit()
        except BaseException:
            self.abort()
            raise
        self._state = "closed"

    def abort(self) -> None:
        """Remove everything written. Does nothing after commit or abort."""
        if self._state == "closed":
            return
        self._state = "closed"
        self._arrays.clear()
        if self._transaction is not None:
            self._transaction.abort()
            self._transaction = None
        self._directory.abort()

    @property
    def ended(self) -> bool:
        return self._state == "closed"

    def _require_open(self) -> None:
        if self._state != "open":
            reason = "a write failed" if self._state == "failed" else "it was committed or aborted"
            raise CheckpointError(f"{self.path}: expected an unfinished checkpoint, but {reason}")

    def _array(self, name: str) -> ts.TensorStore:
        """The array, opened (and if need be created) in the current transaction."""
        if len(self._arrays) >= _TRANSACTION_ARRAYS:
            self._flush()
        if self._transaction is None:
            self._transaction = ts.Transaction(atomic=True)
        if name not in self._arrays:
            spec = self._layouts[name].write_spec(self._spec)
            self._arrays[name] = ts.open(
                spec, create=True, open=True, context=self._context, transaction=self._transaction
            ).result()
        return self._arrays[name]

    def _flush(self) -> None:
        self._arrays.clear()
        transaction, self._transaction = self._transaction, None
        self._pending_bytes = 0
        if transaction is not None:
            transaction.commit_async().result()

    def _require_complete(self) -> None:
        if not self._infos:
            raise CheckpointError(f"{self.path}: expected at least one tensor to save, got none")
        for name, info in self._infos.items():
            if left := self._unwritten[name]:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r}: expected all {len(info.chunks)} boxes to be written before commit, "
                    f"but {len(left)} were not, such as {min(left, key=lambda box: box.offsets)}"
                )

    def _require_stored(self) -> None:
        """Look for every key in the store itself, by a fresh context: nothing remembered, only what is on disk."""
        with explain(f"{self.path}: cannot list the array store"):
            spec = store_spec(self._item, ocdbt=True)
            present = set(ts.KvStore.open(spec, context=new_context()).result().list().result())
        for name, layout in self._layouts.items():
            for key in (metadata_key(layout.key, zarr3=True), *layout.stored_keys()):
                if key.encode() not in present:
                    raise CheckpointError(
                        f"{self.path}: tensor {name!r}: chunk {key!r} was written but is not stored"
                    )

    def _write_metadata(self) -> None:
        root = self._directory.temporary
        handler = _HANDLERS[self._layout]
        step = {
            "item_handlers": {self._item.name: handler} if self._layout == "v1" else handler,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": self._started,
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": {},
        }
        tree = render_tree([info.path for info in self._infos.values()], self._objects)
        _write_json(self._item / TREE_FILE, tree)
        _write_json(root / "_CHECKPOINT_METADATA", step)
        if self._layout == "v1":
            (root / "orbax.checkpoint").touch()
        (root / COMMIT_FILE).write_text("This checkpoint is complete.\n")


def _row_slab(shape: tuple[int, ...], itemsize: int, target: int) -> tuple[int, ...]:
    """A chunk shape of about `target` bytes or less: leading axes cut to one index, the next cut, the others whole."""
    for axis, size in enumerate(shape):
        row = itemsize * math.prod(max(1, n) for n in shape[axis + 1 :])
        if row <= _MAX_CHUNK:
            # Equal slabs, rather than full ones and a small rest.
            slabs = max(1, -(-size * row // max(target, row)))
            return (1,) * axis + (max(1, -(-size // slabs)), *(max(1, n) for n in shape[axis + 1 :]))
    return ()


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data))
