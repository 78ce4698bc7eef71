"""Write an Orbax checkpoint as a stream of chunks, without Orbax or JAX; stock Orbax v0 and v1 read it.

    layout "v0"   <path>/{_METADATA, _CHECKPOINT_METADATA, commit_success.txt, manifest.ocdbt, d/*}
    item "x"      <path>/{_CHECKPOINT_METADATA, commit_success.txt, x/{_METADATA, commit_success.txt, ...}}
    layout "v1"   <path>/{_CHECKPOINT_METADATA, commit_success.txt, orbax.checkpoint, state/{_METADATA, ...}}

Stock `CheckpointManager` restores steps that have items, and names an item "default" unless told otherwise;
`StandardCheckpointer` restores a tree directly under the given path.

Several processes may write one checkpoint, in a directory that all of them see; each chunk is written by one process.
One process makes an `OrbaxWriter` and tells the others its `temporary` directory, where each makes an `OrbaxPart`:

    process 0    OrbaxWriter(path, process=0)           write ...  finish |         | commit(processes=[0, 1])
    process 1    OrbaxPart(path, temporary, process=1)  write ...  finish | barrier |
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import tensorstore as ts

from bridge.core.formats.files.atomic import CommitOrAbort, on_failure
from bridge.core.formats.files.journal import JOURNAL_FILE, Attempt, Journal, working_place
from bridge.core.formats.files.manifest import (
    MANIFEST_FILE,
    Manifest,
    ManifestTensor,
    object_checksum,
    parse_manifest,
    render_manifest,
)
from bridge.core.formats.files.part_files import PARTS_FOLDER, Share
from bridge.core.formats.files.record import ChunkRecord
from bridge.core.formats.files.recorded_chunks import RecordedChunks
from bridge.core.formats.orbax.item import StepMetadata
from bridge.core.formats.orbax.item_files import (
    HANDLERS,
    item_entry,
    mark_item,
    require_key_data,
    write_step,
    write_tree,
)
from bridge.core.formats.orbax.tree import Claims, as_path, encode_object, leaf_name, leaves_of, storage_key
from bridge.core.formats.orbax.zarr.arrays import ArrayLayout, explain, metadata_key, new_context, store_spec
from bridge.core.formats.orbax.zarr.chunks import ChunkStore, array_layout, join_stores, process_store
from bridge.core.formats.reading.model_files import is_companion
from bridge.core.formats.stores.folder import StoredJournal
from bridge.core.formats.stores.upload import UploadPath
from bridge.core.formats.tensors.base import CheckpointError, TensorInfo, TreePath, dtype_name
from bridge.core.formats.tensors.boxes import grid_of_chunks
from bridge.core.long_calls import collection_paused


class OrbaxPart(RecordedChunks):
    """The share of one process in writing a checkpoint: every process declares all tensors, one writes each chunk.

    path: where the checkpoint will be, for errors. item: the directory that will hold its arrays. process: the process
    whose store is written to, None if there is only one. share: the chunks that this process writes, if decided
    beforehand. Writing is thread-safe.
    """

    _sink: ChunkStore

    def __init__(
        self,
        path: Path,
        item: Path,
        process: int | None,
        journal: Journal | StoredJournal | None = None,
        share: Share | None = None,
    ) -> None:
        self.path, self._share = path, share
        self._item = item
        self._process = process
        self._record = ChunkRecord(path, journal)
        directory = item if process is None else process_store(item, process)
        self._sink = ChunkStore(directory, self._record.open, complete=process is None or share is not None)
        # Several threads may declare tensors; claims, record and store must agree on the order.
        self._lock = threading.Lock()
        self._claims = Claims(str(self.path))
        self._layouts: dict[str, ArrayLayout] = {}
        self._alike: dict[
            tuple[tuple[int, ...], np.dtype, tuple[int, ...] | None], tuple[ArrayLayout, TensorInfo]
        ] = {}
        self._ended = False

    def add_tensor(
        self,
        path: str | Sequence[str | int],
        shape: Sequence[int],
        dtype: np.dtype,
        chunk_shape: Sequence[int] | None = None,
    ) -> TensorInfo:
        """Declare a tensor; see `CheckpointWriter.add_tensor`. A requested chunk above 32 MiB is cut into slabs.

        CheckpointError if the leaf collides with an earlier one, even if only in Orbax's store ("a.b" and "a", "b").
        """
        self._require_open()
        leaf, shape, dtype = as_path(path), tuple(shape), np.dtype(dtype)
        name = leaf_name(leaf)
        wish = None if chunk_shape is None else tuple(chunk_shape)
        if (like := self._alike.get((shape, dtype, wish))) is None:
            dtype_name(dtype)
            array = array_layout(leaf, shape, dtype, chunk_shape)
            try:
                boxes = grid_of_chunks(shape, array.chunk)
            except CheckpointError as error:
                raise CheckpointError(f"{self.path}: tensor {name!r}: {error}") from None
            info = TensorInfo(name, leaf, shape, dtype, boxes)
            self._alike[shape, dtype, wish] = array, info
        else:
            # Takes a third of the time, and a model has thousands of tensors that are alike.
            array, info = like[0].named(storage_key(leaf)), like[1].named(name, leaf)
        own = None if self._share is None else self._share.own(name, info.chunks)
        if own is not None:
            info = replace(info, chunks=own)
        with self._lock:
            self._claims.add(leaf)
            self._layouts[name] = array
            self._record.declare(info)
            self._sink.declare(name, array, own)
        return info

    def finish(self) -> None:
        """Commit this process's writes to disk."""
        self._require_open()
        with explain(f"{self.path}: cannot finish the array store"):
            self._sink.finish(self._record.sync)
            if self._process is not None:
                part = Manifest("orbax", self._record.manifest(), {}, {})
                self._item.mkdir(exist_ok=True)
                manifest_part(self._item, self._process).write_bytes(render_manifest(part))

    def abort(self) -> None:
        """Drop everything that is not on disk yet. Does nothing after commit or abort."""
        if not self._ended:
            self._ended = True
            self._record.close()

    @property
    def ended(self) -> bool:
        return self._ended


class OrbaxWriter(OrbaxPart, CommitOrAbort):
    """A new Orbax checkpoint; see `CheckpointWriter`. Writing is thread-safe.

    Tensors become NumPy leaves (zarr3 in OCDBT, uncompressed, with a CRC-32C per chunk that stock Orbax verifies);
    objects are stored in `_METADATA`. Tree paths keep list positions if all of 0, 1, ..., n-1 exist; otherwise they
    become dict keys. Commit refuses a checkpoint without any leaf, as stock Orbax could not read it.

    process: this process's number if several write; see the module docstring. item: the directory below `path` for the
    arrays, none by default; ValueError for a name that cannot name a directory, or for any name in layout v1. like: the
    step of the program that will restore this one, with this item.
    """

    format = "orbax"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layout: Literal["v0", "v1"] = "v0",
        item: str | None = None,
        process: int | None = None,
        attempt: Attempt | None = None,
        like: StepMetadata | None = None,
    ) -> None:
        if layout not in HANDLERS:
            raise ValueError(f"expected layout 'v0' or 'v1', got {layout!r}")
        if item is not None and (layout == "v1" or not re.fullmatch(r"[A-Za-z_][\w-]*", item)):
            raise ValueError(
                f"item: expected letters, digits, '_' and '-' after a letter, and layout 'v0', got {item!r} and "
                f"{layout!r}"
            )
        self._directory = working_place(path, attempt or Attempt())
        self._layout = layout
        self._like = like or StepMetadata({}, {})
        self._item_name = "state" if layout == "v1" else item
        directory = self._directory.temporary / (self._item_name or "")
        with on_failure(self._directory.abort):
            super().__init__(self._directory.path, directory, process, self._directory.journal)
        self._started = time.time_ns()
        self._objects: dict[TreePath, object] = {}
        self._kinds: dict[str, str] = {}
        self._conversion: str | None = None

    @property
    def temporary(self) -> Path:
        """The directory that becomes the checkpoint. Files that are in it at commit become a part of the checkpoint."""
        return self._directory.temporary

    def add_object(self, path: str | Sequence[str | int], value: object) -> None:
        """Store a value that is not a tensor; tuples stay tuples. CheckpointError for other types or a collision."""
        self._require_open()
        leaf = as_path(path)
        encode_object(value, f"{self.path}: object {leaf_name(leaf)!r}")
        with self._lock:
            self._claims.add(leaf)
            self._objects[leaf] = value

    def add_kinds(self, kinds: Mapping[str, str]) -> None:
        """Declare what leaves are for stock Orbax; see `CheckpointWriter.add_kinds`."""
        self._require_open()
        for name, leaf_kind in kinds.items():
            info = self._record.infos.get(name)
            if info is not None:
                require_key_data(f"{self.path}: tensor {name!r}", leaf_kind, info.dtype, info.shape)
        self._kinds.update(kinds)

    @collection_paused()
    def commit(self, processes: Sequence[int] = ()) -> None:
        """Make the checkpoint appear under its name; on any error, leave nothing behind.

        processes: all processes that wrote, each of which must have finished; by default only this one. CheckpointError
        unless every box was written by exactly one process, and every chunk is then found in the store.
        """
        with on_failure(self.abort):
            self._require_open()
            if not self._layouts and not self._leaves():
                raise CheckpointError(f"{self.path}: expected at least one tensor to save, got none")
            if not processes:
                self._record.require_complete()
            with explain(f"{self.path}: cannot finish the array store"):
                self._sink.finish(self._record.sync)
            if processes:
                join_stores(self._item, processes)
            self._require_stored(processes)
            self._write_metadata()
            self._write_manifest(processes)
            self._directory.commit()
        self._ended = True
        self._record.close()

    def abort(self) -> None:
        """Remove everything written. Does nothing after commit or abort."""
        super().abort()
        self._directory.abort()

    def _require_stored(self, processes: Sequence[int]) -> None:
        """Look for every key in the store itself, with a fresh context: no cached data, only what is on disk."""
        # Data that goes to an object store can be read only once it is there.
        if not self._layouts or isinstance(self._item, UploadPath):
            return
        with explain(f"{self.path}: cannot list the array store"):
            spec = store_spec(self._item, ocdbt=True)
            present = set(ts.KvStore.open(spec, context=new_context()).result().list().result())
        missing = "was written but is not stored"
        if processes:
            missing = f"is stored by none of processes {list(processes)}"
        # All keys at once first; one by one takes four times as long, and is needed only to name the first missing key.
        layouts = self._layouts.values()
        keys = chain(
            (metadata_key(layout.key, zarr3=True) for layout in layouts),
            chain.from_iterable(layout.stored_keys() for layout in layouts),
        )
        if present.issuperset(map(str.encode, keys)):
            return
        for name, layout in self._layouts.items():
            for key in (metadata_key(layout.key, zarr3=True), *layout.stored_keys()):
                if key.encode() not in present:
                    raise CheckpointError(f"{self.path}: tensor {name!r}: chunk {key!r} {missing}")

    def _write_metadata(self) -> None:
        root = self._directory.temporary
        handler = HANDLERS[self._layout]
        layouts = {info.path: self._layouts[name] for name, info in self._record.infos.items()}
        write_tree(self._item, str(self.path), layouts, self._objects, self._kinds_by_path())
        if self._layout == "v1":
            (root / "orbax.checkpoint").touch()
        elif self._item_name is not None:
            mark_item(self._item)
        named = {
            name: self._like.handlers.get(name) or handler for name in (self._item_name,) if name is not None
        }
        write_step(root, named or handler, self._started, self._like.custom)

    def _kinds_by_path(self) -> dict[TreePath, str]:
        paths = {info.name: info.path for info in self._record.infos.values()}
        paths |= {leaf_name(path): path for path in self._objects}
        return {paths[name]: leaf_kind for name, leaf_kind in self._kinds.items() if name in paths}

    def _leaves(self) -> Mapping[TreePath, str]:
        arrays = [info.path for info in self._record.infos.values()]
        return leaves_of(arrays, self._objects, self._kinds_by_path())

    def _write_manifest(self, processes: Sequence[int]) -> None:
        tensors = dict(self._record.manifest())
        for process in processes:
            part = manifest_part(self._item, process)
            if process == self._process and not part.exists():
                continue
            for name, tensor in parse_manifest(part.read_bytes(), str(part)).tensors.items():
                chunks = {**tensors[name].chunks, **tensor.chunks}
                tensors[name] = ManifestTensor(tensor.dtype, tensor.shape, chunks)
            part.unlink()
        root = self._directory.temporary
        files = {}
        for path in sorted(p for p in root.rglob("*") if p.is_file() and p.name != JOURNAL_FILE):
            # Files next to the item's own files, and files of an attempt that was killed during its commit.
            if path.relative_to(root).parts[0] in (PARTS_FOLDER, MANIFEST_FILE) or is_companion(path.name):
                continue
            files[str(path.relative_to(root))] = item_entry(path)
        objects = {leaf_name(path): object_checksum(value) for path, value in self._objects.items()}
        manifest = Manifest(self.format, tensors, objects, files, self._conversion)
        (root / MANIFEST_FILE).write_bytes(render_manifest(manifest))


def manifest_part(item: Path, process: int) -> Path:
    """Where a process writes the checksums of its chunks."""
    return item / f"{MANIFEST_FILE}.process_{process}"
