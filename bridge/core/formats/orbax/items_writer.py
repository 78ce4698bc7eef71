"""Write an Orbax step whose state is in several items: each item contains everything below one key of the tree.

    <path>/{_CHECKPOINT_METADATA, commit_success.txt}
    <path>/params/{_METADATA, commit_success.txt, manifest.ocdbt, d/*}         its kernel is params/kernel
    <path>/opt_state/{_METADATA, ...}

Stock Orbax restores it by `CheckpointManager` with `args.Composite(params=..., opt_state=...)`. The items appear
together, or not at all.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bridge.core.formats.files.atomic import on_failure
from bridge.core.formats.files.journal import JOURNAL_FILE, Attempt, WorkingDirectory
from bridge.core.formats.files.manifest import MANIFEST_FILE, Manifest, object_checksum, render_manifest
from bridge.core.formats.files.record import ChunkRecord
from bridge.core.formats.files.recorded_chunks import AtomicWriter
from bridge.core.formats.files.sink import Place, Sink
from bridge.core.formats.orbax.item import StepMetadata
from bridge.core.formats.orbax.item_files import (
    HANDLERS,
    item_entry,
    mark_item,
    require_key_data,
    write_step,
    write_tree,
)
from bridge.core.formats.orbax.tree import Claims, as_path, encode_object, leaf_name
from bridge.core.formats.orbax.zarr.arrays import ArrayLayout, explain
from bridge.core.formats.orbax.zarr.chunks import ChunkStore, array_layout
from bridge.core.formats.tensors.base import CheckpointError, Checksums, TensorInfo, TreePath, dtype_name
from bridge.core.formats.tensors.boxes import grid_of_chunks
from bridge.core.formats.tensors.leaves import LEAVES, implied_kinds

_NAME = re.compile(r"[A-Za-z_][\w-]*")


@dataclass
class _Item:
    """One item: its directory, its store, and its leaves by tree path in the item."""

    directory: Path
    store: ChunkStore
    layouts: dict[TreePath, ArrayLayout] = field(default_factory=dict)
    objects: dict[TreePath, object] = field(default_factory=dict)
    kinds: dict[TreePath, str] = field(default_factory=dict)


class _Stores(Sink):
    """The chunks of all items; see `Sink`."""

    placed = True

    def __init__(self, items: Mapping[str, _Item]) -> None:
        self._items = items

    def place(self, info: TensorInfo, number: int) -> Place:
        return self._of(info).place(info, number)

    def encode(
        self, info: TensorInfo, number: int, parts: list[np.ndarray], crc: int
    ) -> list[bytes | memoryview]:
        return self._of(info).encode(info, number, parts, crc)

    def frame(self, info: TensorInfo, number: int) -> tuple[int, int] | None:
        return self._of(info).frame(info, number)

    def around(
        self, info: TensorInfo, number: int, elements: memoryview, sums: Checksums
    ) -> tuple[bytes, bytes]:
        return self._of(info).around(info, number, elements, sums)

    def decode(self, info: TensorInfo, number: int, data: bytes) -> np.ndarray | None:
        return self._of(info).decode(info, number, data)

    def _of(self, info: TensorInfo) -> ChunkStore:
        return self._items[str(info.path[0])].store


class OrbaxItemsWriter(AtomicWriter):
    """A new Orbax step with these items; see `CheckpointWriter`. Writing is thread-safe.

    like: the step of the program that will restore this one.

    CheckpointError for names that cannot name a directory, or for a leaf outside all items. Each item has a manifest.
    """

    format = "orbax"

    def __init__(
        self,
        path: str | os.PathLike[str],
        items: Sequence[str],
        attempt: Attempt | None = None,
        like: StepMetadata | None = None,
    ) -> None:
        self._like = like or StepMetadata({}, {})
        wrong = [name for name in items if not _NAME.fullmatch(name)]
        if wrong or len(set(items)) != len(items):
            raise CheckpointError(
                f"{path}: expected names of items (--write-item) of letters, digits, '_' and '-' after a letter, each "
                f"once, got {', '.join(map(repr, wrong or items))}"
            )
        self._directory = WorkingDirectory(path, attempt or Attempt())
        self.path = self._directory.path
        self._started = time.time_ns()
        self._claims = Claims(str(self.path))
        # As in `OrbaxWriter`: claims, record and store must agree on the order of declarations.
        self._lock = threading.Lock()
        with on_failure(self._directory.abort):
            self._record = ChunkRecord(self.path, self._directory.journal)
            self._items = {name: self._new_item(name) for name in items}
            self._sink = _Stores(self._items)

    def add_tensor(
        self,
        path: str | Sequence[str | int],
        shape: Sequence[int],
        dtype: np.dtype,
        chunk_shape: Sequence[int] | None = None,
    ) -> TensorInfo:
        """Declare a tensor; see `CheckpointWriter.add_tensor`."""
        self._require_open()
        leaf, shape, dtype = as_path(path), tuple(shape), np.dtype(dtype)
        dtype_name(dtype)
        item = self._item_of(leaf)
        layout = array_layout(leaf[1:], shape, dtype, chunk_shape)
        try:
            boxes = grid_of_chunks(shape, layout.chunk)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: tensor {leaf_name(leaf)!r}: {error}") from None
        info = TensorInfo(leaf_name(leaf), leaf, shape, dtype, boxes)
        with self._lock:
            self._claims.add(leaf)
            item.layouts[leaf[1:]] = layout
            self._record.declare(info)
            item.store.declare(info.name, layout)
        return info

    def add_object(self, path: str | Sequence[str | int], value: object) -> None:
        """Store a value that is not a tensor. CheckpointError for other types or a collision."""
        self._require_open()
        leaf = as_path(path)
        encode_object(value, f"{self.path}: object {leaf_name(leaf)!r}")
        item = self._item_of(leaf)
        with self._lock:
            self._claims.add(leaf)
            item.objects[leaf[1:]] = value

    def add_kinds(self, kinds: Mapping[str, str]) -> None:
        """Declare what leaves are for stock Orbax; see `CheckpointWriter.add_kinds`."""
        self._require_open()
        for key, item in self._items.items():
            for path in (*item.layouts, *item.objects):
                leaf_kind = kinds.get(leaf_name((key, *path)))
                layout = item.layouts.get(path)
                if leaf_kind is None:
                    continue
                if layout is not None:
                    what = f"{self.path}: tensor {leaf_name((key, *path))!r}"
                    require_key_data(what, leaf_kind, layout.dtype, layout.shape)
                item.kinds[path] = leaf_kind

    def _finish(self) -> None:
        for name, item in self._items.items():
            if not item.layouts and not item.objects:
                raise CheckpointError(f"{self.path}: expected a leaf below {name!r} (--write-item), got none")
            with explain(f"{self.path}: cannot finish the array store of {name}"):
                item.directory.mkdir(exist_ok=True)
                item.store.finish(self._record.sync)
            # Kinds that the whole tree implies may not be implied in an item, whose root may be the list of a chain.
            implied = implied_kinds(
                ((name, *path) for path in item.layouts),
                {(name, *path): value for path, value in item.objects.items()},
            )
            kinds = {path[1:]: leaf_kind for path, leaf_kind in implied.items()} | item.kinds
            write_tree(item.directory, f"{self.path}/{name}", item.layouts, item.objects, kinds)
            mark_item(item.directory)
            self._write_manifest(name, item)
        handlers = {name: self._like.handlers.get(name) or HANDLERS["v0"] for name in self._items}
        write_step(self._directory.temporary, handlers, self._started, self._like.custom)

    def _new_item(self, name: str) -> _Item:
        directory = self._directory.temporary / name
        return _Item(directory, ChunkStore(directory, self._record.open, complete=True))

    def _item_of(self, leaf: TreePath) -> _Item:
        name = str(leaf[0])
        if name == LEAVES[0] and name not in self._items:
            # Notes that a conversion adds itself: users cannot be asked to name an item for them.
            self._items[name] = self._new_item(name)
        item = self._items.get(name)
        if item is None or len(leaf) < 2:
            raise CheckpointError(
                f"{self.path}: {leaf_name(leaf)!r}: expected leaves below {', '.join(self._items)} (--write-item), "
                "got a leaf elsewhere: name an item after its first "
                f"key{', with more keys below it' if len(leaf) < 2 else ''}, or leave the leaf out (--drop)"
            )
        return item

    def _write_manifest(self, name: str, item: _Item) -> None:
        own = {leaf_name((name, *path)): leaf_name(path) for path in item.layouts}
        tensors = {own[full]: tensor for full, tensor in self._record.manifest().items() if full in own}
        files = {}
        # An attempt that was killed during its commit may have left its manifest.
        others = (JOURNAL_FILE, MANIFEST_FILE)
        for path in sorted(p for p in item.directory.rglob("*") if p.is_file() and p.name not in others):
            files[str(path.relative_to(item.directory))] = item_entry(path)
        objects = {leaf_name(path): object_checksum(value) for path, value in item.objects.items()}
        manifest = Manifest(self.format, tensors, objects, files)
        (item.directory / MANIFEST_FILE).write_bytes(render_manifest(manifest))
