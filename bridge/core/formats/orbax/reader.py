"""Read any local Orbax checkpoint by region, without Orbax or JAX: v0, v1, step directories; OCDBT or files; zarr 2, 3.

A region is read chunk by chunk:

    raw chunk                         read from the file, only the wanted bytes
    other chunk inside the region     decoded into place; at most 64 MiB of chunks in flight
    other chunk partly inside         decoded whole and kept until another is needed: the next region often needs it

Chunks with a CRC-32C are verified: raw chunks by `raw_chunks.py` when first touched, other chunks by tensorstore.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import add, floordiv, le, mul
from pathlib import Path
from types import MappingProxyType

import numpy as np
import tensorstore as ts

from bridge.core.callers import warn_caller
from bridge.core.formats.orbax.item import COMMIT_FILE, TREE_FILE, find_item, is_committed, items_beside
from bridge.core.formats.orbax.item_files import STRINGS_FILE, find_strings, read_keys
from bridge.core.formats.orbax.tree import Tree, leaf_name, parse_tree, storage_key
from bridge.core.formats.orbax.zarr.arrays import (
    MANIFEST,
    MAX_INNER_CHUNKS,
    ArrayLayout,
    MemoryArrays,
    explain,
    metadata_key,
    new_context,
    parse_array,
    store_spec,
    tensor_infos,
)
from bridge.core.formats.orbax.zarr.packed_chunks import Packing
from bridge.core.formats.orbax.zarr.raw_chunks import RawChunks
from bridge.core.formats.orbax.zarr.values import (
    Place,
    StoredValues,
    places_in_files,
    stored_sizes,
    unmerged_processes,
    values_in_ocdbt,
)
from bridge.core.formats.reading.read_memory import array_for
from bridge.core.formats.reading.regular_files import files_below, regular_file, small_file
from bridge.core.formats.stores.folder import CLAIM
from bridge.core.formats.stores.listing import StorePath
from bridge.core.formats.tensors.arrays import as_integers
from bridge.core.formats.tensors.base import (
    Box,
    CheckpointError,
    Checksums,
    Loan,
    TensorInfo,
    TreePath,
    Wanted,
)
from bridge.core.formats.tensors.leaves import key_kind
from bridge.core.formats.tensors.wrapping import ClosedAtEnd, one_part
from bridge.core.text_files import parse_json

_IN_FLIGHT = 64 << 20
# tensorstore aborts the process if it gets no memory for data that it reads whole.
_MAX_MANIFEST = 64 << 20  # OCDBT's: it names roots, not arrays
_MAX_METADATA = 256 << 20  # of all arrays together
_FREE_CHUNK = 64 << 20
_DESCRIPTIONS = (b"/.zarray", b"/zarr.json")
_STORED_PER_BYTE = 64  # shards of tiny chunks have an index with 16 bytes per chunk


class OrbaxReader(ClosedAtEnd):
    """An Orbax checkpoint opened for reading; see `CheckpointReader`. Reading is thread-safe.

    path: a checkpoint, an item of one, or a directory of steps with exactly one step. Opening lists every stored
    chunk, so a checkpoint with a missing one is refused at once. Strings, None and empty containers are in `objects`.
    `kinds`, by name, says which tensors are typed PRNG keys, and what other leaves are; see `tensors/leaves.py`.
    verify: check the CRC-32C of a raw chunk before its bytes are used, which reads the whole chunk once.

    Raises CheckpointError for anything malformed, incomplete or ambiguous; FileNotFoundError if nothing is there.
    """

    format = "orbax"

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        self.path = path if isinstance(path, StorePath) else Path(os.path.abspath(path))
        if not self.path.is_dir():
            raise FileNotFoundError(f"expected a checkpoint directory at {self.path}, found none")
        self._item = self._find_item()
        self._decoder = MemoryArrays() if isinstance(self._item, StorePath) else None
        self._lock = threading.Lock()
        self._decoded: tuple[tuple[str, tuple[int, ...]], np.ndarray] | None = None
        self._arrays: dict[str, ts.TensorStore] = {}
        self._bounded: set[str] = set()
        self._places: dict[str, Place] = {}
        self._inline: dict[str, bytes] = {}
        self._closed = False
        self._context = new_context()
        tree = self._read_tree()
        self._store = self._open_store(tree)
        names = list(map(leaf_name, tree.arrays))
        self._layouts = self._read_layouts(tree, names)
        self._values = self._find_values()
        self._raw = RawChunks(self._item, self._values, self._layouts, verify)
        paths = [path for name, path in zip(names, tree.arrays, strict=True) if name in self._layouts]
        infos = tensor_infos(self._layouts, paths, self._layouts.values())
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            dict(zip(self._layouts, infos, strict=True))
        )
        typed = read_keys(self._item)
        keys = {path: typed.get(storage_key(path)) for path in tree.arrays} if typed else {}
        kinds = {**tree.kinds, **{path: key_kind(name) for path, name in keys.items() if name is not None}}
        self.kinds: Mapping[str, str] = MappingProxyType(
            {leaf_name(p): leaf_kind for p, leaf_kind in kinds.items()}
        )
        objects = {**tree.objects, **self._read_strings(tree)}
        self.objects: Mapping[str, object] = MappingProxyType({leaf_name(p): v for p, v in objects.items()})
        self.object_paths: Mapping[str, TreePath] = MappingProxyType({leaf_name(p): p for p in objects})

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block of a tensor; see `CheckpointReader.read`."""
        if self._closed:
            raise ValueError(f"{self.path}: expected an open reader, got one that was closed")
        layout, whole = self._layouts[name], Box.whole(self.tensors[name].shape)
        box = whole if box is None else box
        if not box.inside(layout.shape):
            raise ValueError(f"tensor {name!r}: expected a box inside shape {layout.shape}, got {box}")
        with explain(f"{self._item}: tensor {name!r}: cannot read {box}"):
            chunks = list(layout.chunks(box))
            if len(chunks) == 1 and chunks[0][1] == box and not layout.raw:
                return np.asarray(self._array(name, [box])[box.slices()].read().result(), order="C")
            out = array_for(self.tensors[name], box, self.path)
            whole_chunks = []
            for index, chunk in chunks:
                part = chunk.intersect(box)
                assert part is not None
                if layout.raw and layout.chunk_key(index) in self._values:
                    target = out[part.slices(box)]
                    source, compare = self._raw.part(name, index, part, target.flags.c_contiguous)
                    self._raw.files.copy(as_integers(target), source)
                    compare(target)
                elif part == chunk or layout.chunk_bytes < _IN_FLIGHT // 16:
                    whole_chunks.append(part)
                else:
                    out[part.slices(box)] = self._decode(name, index, chunk)[part.slices(chunk)]
            self._copy_decoded(name, whole_chunks, box, out)
        return out

    def lend(self, name: str, box: Box, offset: int = 0) -> Loan | None:
        """A block of one raw chunk, without moving it; see `CheckpointReader.lend`."""
        layout = self._layouts[name]
        index = tuple(map(floordiv, box.offsets, layout.chunk))
        first = tuple(map(mul, index, layout.chunk))
        inside = all(map(le, box.stops, map(add, first, layout.chunk)))
        if not (box.numel and layout.raw and inside and layout.chunk_key(index) in self._values):
            return None
        with explain(f"{self._item}: tensor {name!r}: cannot read {box}"):
            source, compare = self._raw.part(name, index, box)
            loan = self._raw.files.lend(source, offset)
            return None if loan is None else replace(loan, crc=compare(loan.array))

    def read_into(self, wanted: Sequence[Wanted]) -> Sequence[Checksums | None]:
        """Whole arrays that are one raw shard; see `CheckpointReader.read_into`."""
        layouts = [(self._layouts[name], target) for name, target in wanted]
        return self._raw.read_into(layouts) if self._ocdbt else [None] * len(wanted)

    def files(self) -> Sequence[Path]:
        """All files of the item that holds the arrays."""
        return files_below(self._item)

    @property
    def left_alone(self) -> Mapping[str, str]:
        """What is not read of the checkpoint, by name, with the reason: other items, arrays, folders of processes."""
        arrays = sorted(key.rpartition(b"/")[0].decode(errors="replace") for key in self._unnamed)
        return {
            **{f"{name}/": "an item that is not read" for name in items_beside(self.path, self._item)},
            **dict.fromkeys(arrays, f"an array that {TREE_FILE} does not name"),
            **(unmerged_processes(self._item, self._places, self._inline) if self._ocdbt else {}),
        }

    def checksummed(self, name: str) -> bool:
        """Whether every chunk of a tensor has a CRC-32C, which reading verifies."""
        return self._layouts[name].checksum

    def close(self) -> None:
        """Release the files."""
        self._closed = True
        self._store = None
        self._decoded = None
        self._arrays.clear()
        self._values.close()

    def _find_item(self) -> Path:
        item = find_item(self.path)
        if not is_committed(self.path, item):
            if (self.path / CLAIM).is_file():
                raise CheckpointError(
                    f"{self.path} is a checkpoint that was never finished, or is being written ({CLAIM} is there, and "
                    f"no {COMMIT_FILE}): convert again with --resume, or use an earlier checkpoint"
                )
            warn_caller(
                f"{item} has no {COMMIT_FILE}: it was written by Orbax before 0.12.3, or its save did not finish"
            )
        if others := items_beside(self.path, item):
            warn_caller(
                f"{item.parent} also contains {', '.join(others)}, which is not read: only the item with arrays is read"
            )
        return item

    def _read_tree(self) -> Tree:
        return parse_tree(self._read_json(TREE_FILE), str(self._item / TREE_FILE))

    def _copy_decoded(self, name: str, parts: list[Box], box: Box, out: np.ndarray) -> None:
        """Decode parts of chunks into place, several at a time."""
        most = max(1, _IN_FLIGHT // max(1, self._layouts[name].chunk_bytes))
        for start in range(0, len(parts), most):
            batch = parts[start : start + most]
            array = self._array(name, batch)
            reads = [array[part.slices()].read() for part in batch]
            for part, read in zip(batch, reads, strict=True):
                out[part.slices(box)] = read.result()

    def _decode(self, name: str, index: tuple[int, ...], chunk: Box) -> np.ndarray:
        """A whole chunk, which stays decoded until another chunk is requested."""
        with self._lock:
            if self._decoded is None or self._decoded[0] != (name, index):
                self._decoded = None  # before the next one is decoded: memory for one chunk, not two
                self._decoded = (name, index), self._array(name, [chunk])[chunk.slices()].read().result()
            return self._decoded[1]

    def _array(self, name: str, boxes: Iterable[Box]) -> ts.TensorStore:
        """The array from which these boxes will be read. MemoryError if a chunk is larger than the memory."""
        # tensorstore aborts the process if it gets no memory; NumPy raises an error.
        layout = self._layouts[name]
        np.empty(layout.chunk_bytes, np.uint8)
        if layout.packing is not None:
            keys = {key for box in boxes for key in layout.keys_of(box)}
            for key in keys - self._bounded:
                self._require_bounded(layout.packing, name, key)
        if self._decoder is not None:
            return self._decoder.open(layout, boxes, self._value)
        if name not in self._arrays:
            spec = layout.read_spec(self._spec)
            self._arrays[name] = ts.open(spec, read=True, open=True, context=self._context).result()
        return self._arrays[name]

    def _require_bounded(self, packing: Packing, name: str, key: str) -> None:
        def read(start: int, stop: int) -> bytes:
            if stored is None:
                return self._inline[key][start:stop]
            return self._values.files.read(stored.file, stored.start + start, stored.start + stop, what)

        stored, what = self._values.find(key), f"tensor {name!r}, chunk {key!r}"
        size = len(self._inline[key]) if stored is None else stored.size
        packing.require_bounded(read, size, f"{self._item}: {what}")
        self._bounded.add(key)

    def _value(self, key: str) -> bytes:
        """A whole value of the store, wherever it is."""
        if key in self._inline:
            return self._inline[key]
        if key in self._values:
            return self._values.read(key)
        file = self._item / key
        assert isinstance(file, StorePath), "this machine's files are left to tensorstore"
        return file.read_range(0, file.stat().st_size)

    def _open_store(self, tree: Tree) -> ts.KvStore | None:
        has_manifest = (self._item / MANIFEST).is_file()
        ocdbt = has_manifest if tree.use_ocdbt is None else tree.use_ocdbt
        if ocdbt and not has_manifest and tree.arrays:
            raise CheckpointError(
                f"{self._item}: expected {MANIFEST}, which holds the index of all arrays, found none"
            )
        self._ocdbt = ocdbt and has_manifest
        if self._ocdbt:
            file, size = regular_file(self._item, MANIFEST, "the index", links=True)
            if size > _MAX_MANIFEST:
                raise CheckpointError(f"{file}: expected at most {_MAX_MANIFEST} bytes, got {size}")
        if isinstance(self._item, StorePath):
            return None
        self._spec = store_spec(self._item, ocdbt=ocdbt)
        with explain(f"{self._item}: cannot open the array store"):
            return ts.KvStore.open(self._spec, context=self._context).result()

    def _read_layouts(self, tree: Tree, names: Sequence[str]) -> dict[str, ArrayLayout]:
        """Every array's layout by leaf name, in the order of the tree; all their chunks are known to exist."""
        stored_as = [tree.keys.get(path) or storage_key(path) for path in tree.arrays]
        described = [metadata_key(key, zarr3=tree.use_zarr3) for key in stored_as]
        with explain(f"{self._item}: cannot list the array store"):
            if self._ocdbt:
                # Before tensorstore reads the keys: a hostile tree may have any number of keys.
                self._places, self._inline = values_in_ocdbt(self._item, str(self._item))
            present = self._keys()
            places = self._places if self._ocdbt else None
            named = {key.encode() for key in described}
            self._unnamed = [key for key in present - named if key.endswith(_DESCRIPTIONS)]
            stored = [key for key in described if key.encode() in present]
            size = sum(size for _, size in stored_sizes(self._item, stored, places))
            if size > _MAX_METADATA:
                raise CheckpointError(
                    f"{self._item}: expected at most {_MAX_METADATA} bytes of arrays' metadata, got {size}"
                )
            values = self._read_values(stored)
        layouts: dict[str, ArrayLayout] = {}
        alike: dict[bytes, ArrayLayout] = {}
        inner = MAX_INNER_CHUNKS
        # One text and one object for all arrays: there may be many thousands of arrays.
        item, part = str(self._item), one_part("")
        for part.name, key, metadata in zip(names, stored_as, described, strict=True):
            with part:
                what = f"{item}: tensor {part.name!r}"
                value = values.get(metadata)
                if value is None:
                    raise CheckpointError(f"{what}: expected its metadata under {metadata!r}, found none")
                if (like := alike.get(value)) is not None:
                    layout = like.named(key)
                else:
                    data = parse_json(value, f"{what}: {metadata}", CheckpointError, "JSON")
                    layout = parse_array(key, data, zarr3=tree.use_zarr3, what=what, inner=inner)
                    # Whether inner chunks are read one by one depends on the number that earlier arrays have.
                    if not layout.num_inner:
                        alike[value] = layout
                inner -= layout.num_inner
                # Counted first: a hostile shape may imply more chunks than can be listed.
                missing = (
                    next((chunk for chunk in layout.stored_keys() if chunk.encode() not in present), None)
                    if layout.num_stored <= len(present)
                    else f"one of {layout.num_stored}"
                )
                if missing is not None:
                    raise CheckpointError(
                        f"{what}: expected {layout.num_stored} stored chunks, but chunk {missing} is missing"
                    )
                if not layout.raw:
                    most = _FREE_CHUNK + _STORED_PER_BYTE * layout.stored_bytes
                    for chunk, size in stored_sizes(self._item, layout.stored_keys(), places):
                        if size > most:
                            raise CheckpointError(
                                f"{what}: expected at most {most} bytes in the stored chunk {chunk!r}, got {size}"
                            )
                layouts[part.name] = layout
        return layouts

    def _find_values(self) -> StoredValues:
        """The places of the chunks that are read here, at least in part."""
        mapped = [
            layout
            for layout in self._layouts.values()
            if layout.raw or layout.packing is not None or self._decoder is not None
        ]
        places = self._places
        with explain(f"{self._item}: cannot find the stored chunks"):
            if mapped and not self._ocdbt:
                places = places_in_files(
                    self._item, (key for layout in mapped for key in layout.stored_keys())
                )
        return StoredValues(self._item, places)

    def _keys(self) -> set[bytes]:
        """Every key of the store."""
        if self._store is not None:
            return set(self._store.list().result())
        if self._ocdbt:
            return {key.encode("utf-8", "surrogateescape") for key in (*self._places, *self._inline)}
        start = len(str(self._item)) + 1
        return {str(file)[start:].encode() for file in files_below(self._item)}

    def _read_values(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Small values, all at once."""
        # tensorstore has checked the nodes that contain these values, and takes 60 us to look up one value again.
        values = {key: self._inline[key] for key in keys if key in self._inline}
        left = [key for key in keys if key not in values]
        if self._store is not None:
            reads = {key: self._store.read(key) for key in left}
            return values | {key: read.result().value for key, read in reads.items()}
        if not self._ocdbt:
            return {key: (self._item / key).read_bytes() for key in left}
        stored = StoredValues(self._item, self._places)
        return values | {key: stored.read(key) for key in left}

    def _read_strings(self, tree: Tree) -> Mapping[TreePath, str]:
        if not tree.strings:
            return {}
        return find_strings(self._read_json(STRINGS_FILE), tree.strings, str(self._item / STRINGS_FILE))

    def _read_json(self, name: str) -> object:
        data = small_file(self._item, name, "the tree")
        return parse_json(data, str(self._item / name), CheckpointError, "JSON")
