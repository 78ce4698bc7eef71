"""Read any local Orbax checkpoint by region, without Orbax or JAX: v0, v1, step directories; OCDBT or files; zarr 2, 3.

A region is read chunk by chunk:

    chunk inside the region           decoded into place; at most 64 MiB of chunks in flight
    raw chunk partly inside           only the bytes needed, in slabs of at most 8 MiB
    other chunk partly inside         decoded whole and kept until another is needed: the next region often wants it

Chunks with a CRC-32C are verified by tensorstore when decoded whole, and here, once, before bytes are taken from them.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Self

import google_crc32c
import numpy as np
import tensorstore as ts

from bridge.formats.base import Box, CheckpointError, TensorInfo, TreePath
from bridge.formats.orbax_item import COMMIT_FILE, TREE_FILE, find_item, is_committed
from bridge.formats.orbax_store import (
    MANIFEST,
    ArrayLayout,
    explain,
    metadata_key,
    new_context,
    parse_array,
    store_spec,
)
from bridge.formats.orbax_tree import Tree, leaf_name, parse_tree, storage_key

_IN_FLIGHT = 64 << 20
_SLAB = 8 << 20
_DECODE_RAW = 64 << 20
_SHARD_INDEX = struct.Struct("<QQI")


class OrbaxReader:
    """An Orbax checkpoint opened for reading; see `CheckpointReader`. Reading is thread-safe.

    path: a checkpoint, an item of one, or a directory of steps with exactly one step. Opening lists every stored
    chunk, so a checkpoint with a missing one is refused at once. Strings, None and empty containers are in `objects`.
    verify: check the CRC-32C of a large raw chunk before its bytes are taken, which reads all of it once.

    Raises CheckpointError for anything malformed, incomplete or ambiguous; FileNotFoundError if nothing is there.
    """

    format = "orbax"

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        self.path = Path(os.path.abspath(path))
        if not self.path.is_dir():
            raise FileNotFoundError(f"expected a checkpoint directory at {self.path}, found none")
        self._item = find_item(self.path)
        if not is_committed(self.path, self._item):
            warnings.warn(
                f"{self._item} has no {COMMIT_FILE}: it was written by Orbax before 0.12.3, or its save did not finish",
                stacklevel=2,
            )
        self._verify = verify
        self._lock = threading.Lock()
        self._decoded: tuple[tuple[str, tuple[int, ...]], np.ndarray] | None = None
        self._raw_starts: dict[str, int] = {}
        self._arrays: dict[str, ts.TensorStore] = {}
        self._context = new_context()
        tree = parse_tree(self._read_json(TREE_FILE), str(self._item / TREE_FILE))
        self._store = self._open_store(tree)
        self._layouts = self._read_layouts(tree)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {
                leaf_name(path): TensorInfo(
                    leaf_name(path),
                    path,
                    layout.shape,
                    layout.dtype,
                    tuple(box for _, box in layout.chunks()),
                )
                for path, layout in zip(tree.arrays, self._layouts.values(), strict=True)
            }
        )
        objects = {**tree.objects, **self._read_strings(tree)}
        self.objects: Mapping[str, object] = MappingProxyType({leaf_name(p): v for p, v in objects.items()})
        self.object_paths: Mapping[str, TreePath] = MappingProxyType({leaf_name(p): p for p in objects})

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block of a tensor; see `CheckpointReader.read`."""
        if self._store is None:
            raise ValueError(f"{self.path}: expected an open reader, got one that was closed")
        layout, whole = self._layouts[name], Box.whole(self.tensors[name].shape)
        box = whole if box is None else box
        if not box.inside(layout.shape):
            raise ValueError(f"tensor {name!r}: expected a box inside shape {layout.shape}, got {box}")
        with explain(f"{self._item}: tensor {name!r}: cannot read {box}"):
            chunks = list(layout.chunks(box))
            if len(chunks) == 1 and chunks[0][1] == box:
                return np.asarray(self._array(name)[box.slices()].read().result(), order="C")
            out = np.empty(box.sizes, layout.dtype)
            whole_chunks = []
            for index, chunk in chunks:
                part = chunk.intersect(box)
                assert part is not None
                if part == chunk or layout.chunk_bytes < _IN_FLIGHT // 16:
                    whole_chunks.append(part)
                elif layout.raw and (not layout.checksum or layout.chunk_bytes > _DECODE_RAW):
                    self._copy_bytes(layout, index, chunk, part, out[part.slices(box)])
                else:
                    out[part.slices(box)] = self._decode(name, index, chunk)[part.slices(chunk)]
            self._copy_decoded(name, whole_chunks, box, out)
        return out

    def close(self) -> None:
        """Release the files."""
        self._store = None
        self._decoded = None
        self._arrays.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _copy_decoded(self, name: str, parts: list[Box], box: Box, out: np.ndarray) -> None:
        """Decode parts of chunks into place, several at a time."""
        most = max(1, _IN_FLIGHT // max(1, self._layouts[name].chunk_bytes))
        for start in range(0, len(parts), most):
            batch = parts[start : start + most]
            reads = [self._array(name)[part.slices()].read() for part in batch]
            for part, read in zip(batch, reads, strict=True):
                out[part.slices(box)] = read.result()

    def _decode(self, name: str, index: tuple[int, ...], chunk: Box) -> np.ndarray:
        """A whole chunk, which stays decoded until another one is asked for."""
        with self._lock:
            if self._decoded is None or self._decoded[0] != (name, index):
                self._decoded = None  # before the next one is decoded: memory for one chunk, not two
                self._decoded = (name, index), self._array(name)[chunk.slices()].read().result()
            return self._decoded[1]

    def _copy_bytes(
        self, layout: ArrayLayout, index: tuple[int, ...], chunk: Box, part: Box, out: np.ndarray
    ) -> None:
        """Copy `part` of a raw chunk into `out` by byte ranges."""
        key, itemsize = layout.chunk_key(index), layout.dtype.itemsize
        start = self._raw_start(layout, key)
        low = tuple(o - c for o, c in zip(part.offsets, chunk.offsets, strict=True))
        for slab in _slabs(layout.chunk, Box(low, part.sizes), itemsize):
            first = start + slab.element * itemsize
            data = self._value(key, first, first + math.prod(slab.shape) * itemsize)
            out[slab.target] = np.frombuffer(data, layout.dtype).reshape(slab.shape)[slab.source]

    def _raw_start(self, layout: ArrayLayout, key: str) -> int:
        """Where the data of a raw chunk begins in its value, once its checksums are found right."""
        if key not in self._raw_starts:
            start, size = 0, layout.chunk_bytes + 4 * layout.checksum
            if layout.raw == "shard":
                index = self._value(key, -_SHARD_INDEX.size, None)
                start, stored, crc = _SHARD_INDEX.unpack(index)
                if google_crc32c.value(index[:16]) != crc or stored != size:
                    raise CheckpointError(f"{self._item}: chunk {key!r}: damaged shard index")
            if layout.checksum and self._verify:
                crc = 0
                for first in range(start, start + layout.chunk_bytes, _SLAB):
                    crc = google_crc32c.extend(
                        crc, self._value(key, first, min(first + _SLAB, start + layout.chunk_bytes))
                    )
                if crc.to_bytes(4, "little") != self._value(key, start + size - 4, start + size):
                    raise CheckpointError(
                        f"{self._item}: chunk {key!r}: checksum mismatch, the data is damaged"
                    )
            self._raw_starts[key] = start
        return self._raw_starts[key]

    def _value(self, key: str, start: int, stop: int | None) -> bytes:
        """A byte range of a stored value, all of it."""
        assert self._store is not None
        result = self._store.read(key, byte_range=slice(start, stop)).result()
        wanted = -start if stop is None else stop - start
        if result.state != "value" or len(result.value) != wanted:
            found = f"{len(result.value)} bytes" if result.state == "value" else "nothing"
            raise CheckpointError(f"{self._item}: chunk {key!r}: expected {wanted} bytes, found {found}")
        return result.value

    def _array(self, name: str) -> ts.TensorStore:
        """The array, opened once. MemoryError when a chunk is larger than any memory there is."""
        # tensorstore ends the process when it gets no memory; NumPy raises.
        np.empty(self._layouts[name].chunk_bytes, np.uint8)
        if name not in self._arrays:
            spec = self._layouts[name].read_spec(self._spec)
            self._arrays[name] = ts.open(spec, read=True, open=True, context=self._context).result()
        return self._arrays[name]

    def _open_store(self, tree: Tree) -> ts.KvStore | None:
        has_manifest = (self._item / MANIFEST).is_file()
        ocdbt = has_manifest if tree.use_ocdbt is None else tree.use_ocdbt
        if ocdbt and not has_manifest and tree.arrays:
            raise CheckpointError(
                f"{self._item}: expected {MANIFEST}, which holds the index of all arrays, found none"
            )
        self._spec = store_spec(self._item, ocdbt=ocdbt)
        with explain(f"{self._item}: cannot open the array store"):
            return ts.KvStore.open(self._spec, context=self._context).result()

    def _read_layouts(self, tree: Tree) -> dict[str, ArrayLayout]:
        """Every array's layout by leaf name, in the order of the tree; all their chunks are known to exist."""
        assert self._store is not None
        with explain(f"{self._item}: cannot list the array store"):
            present = set(self._store.list().result())
            keys = {path: metadata_key(storage_key(path), zarr3=tree.use_zarr3) for path in tree.arrays}
            reads = {path: self._store.read(key) for path, key in keys.items() if key.encode() in present}
            values = {path: read.result().value for path, read in reads.items()}
        layouts = {}
        for path in tree.arrays:
            what = f"{self._item}: tensor {leaf_name(path)!r}"
            if path not in values:
                raise CheckpointError(f"{what}: expected its metadata under {keys[path]!r}, found none")
            data = _parse_json(values[path], f"{what}: {keys[path]}")
            layout = parse_array(storage_key(path), data, zarr3=tree.use_zarr3, what=what)
            # Counted first: a hostile shape may have more chunks than can be listed.
            missing = (
                next((key for key in layout.stored_keys() if key.encode() not in present), None)
                if layout.num_stored <= len(present)
                else f"one of {layout.num_stored}"
            )
            if missing is not None:
                raise CheckpointError(
                    f"{what}: expected {layout.num_stored} stored chunks, but chunk {missing} is missing"
                )
            layouts[leaf_name(path)] = layout
        return layouts

    def _read_strings(self, tree: Tree) -> dict[TreePath, object]:
        if not tree.strings:
            return {}
        values = self._read_json("_strings.json")
        found: dict[TreePath, object] = {}
        for path in tree.strings:
            value = values.get(storage_key(path)) if isinstance(values, dict) else None
            if not isinstance(value, str):
                raise CheckpointError(
                    f"{self._item}/_strings.json: expected a string for {leaf_name(path)!r}, found none"
                )
            found[path] = value
        return found

    def _read_json(self, name: str) -> object:
        try:
            data = (self._item / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{self._item / name}: cannot be read: {error}") from error
        return _parse_json(data, str(self._item / name))


class _Slab(NamedTuple):
    """A contiguous run of a raw chunk: `shape` elements from element `element` of the chunk.

    source: what is wanted of the run. target: where that goes in the part being read.
    """

    element: int
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[int | slice, ...]


def _slabs(shape: tuple[int, ...], part: Box, itemsize: int) -> Iterator[_Slab]:
    """Cut `part` of a C-ordered chunk of this shape into runs of at most _SLAB bytes (or one element).

    axis:   0 .. axis-1      axis           axis+1 ..
            one index each   a few indices  read whole, then sliced
    """
    sizes = [math.prod(shape[a + 1 :]) for a in range(len(shape))]
    axis = next(a for a in range(len(shape)) if sizes[a] * itemsize <= _SLAB or a == len(shape) - 1)
    step = max(1, _SLAB // (sizes[axis] * itemsize))
    inner = tuple(
        slice(o, o + n) for o, n in zip(part.offsets[axis + 1 :], part.sizes[axis + 1 :], strict=True)
    )
    low, stop = part.offsets[axis], part.stops[axis]
    for outer in itertools.product(*map(range, part.sizes[:axis])):
        base = sum((o + i) * n for o, i, n in zip(part.offsets, outer, sizes, strict=False))
        for first in range(low, stop, step):
            last = min(first + step, stop)
            yield _Slab(
                base + first * sizes[axis],
                (last - first, *shape[axis + 1 :]),
                (slice(None), *inner),
                (*outer, slice(first - low, last - low)),
            )


def _parse_json(data: bytes, what: str) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what}: expected JSON, got something else: {error}") from error
