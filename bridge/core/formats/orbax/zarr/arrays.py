"""The storage half of an Orbax item: arrays as zarr chunks in a key-value store, opened through tensorstore.

    store          OCDBT (a B-tree: manifest.ocdbt, d/*, ocdbt.process_*/*) or plain files below the item
    zarr2 array    <key>/.zarray    and chunks <key>/0.1      0-d: <key>/0
    zarr3 array    <key>/zarr.json  and chunks <key>/c/0/1    0-d: <key>/c

A stored chunk has the full chunk shape, padded at the edges of the array. The content of a raw chunk value:

    zarr2                    data
    zarr3, bytes             data [crc32c of data]
    zarr3, sharding_indexed  data [crc32c of data] | data offset, data size (with crc), crc32c of these two

Orbax writes the last form with one inner chunk per shard; both that and several are read.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import tensorstore as ts

from bridge.core.formats.orbax.zarr.packed_chunks import PACKERS, Packing, packing
from bridge.core.formats.tensors.base import (
    Box,
    CheckpointError,
    TensorInfo,
    TreePath,
    dtype_from_name,
    dtype_name,
    is_whole,
)

MANIFEST = "manifest.ocdbt"
Spec: TypeAlias = dict[str, Any]
# Where chunk data is in a chunk's value: None if it must be decoded.
Raw: TypeAlias = Literal["plain", "shard"] | None

MAX_INNER_CHUNKS = 1 << 18
"""Most inner chunks of a checkpoint: arrays with more are read by whole shard, as every chunk is a Box in memory."""

_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC = {"name": "crc32c"}
_FILL: Mapping[str, Any] = {"b": False, "c": [0.0, 0.0]}
"""zarr's fill value by the kind of dtype; 0 for other integers, 0.0 for the rest."""


@contextmanager
def explain(what: str) -> Iterator[None]:
    """Turn any error of tensorstore into a CheckpointError that begins with `what`."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, KeyError, IndexError, TypeError, MemoryError) as error:
        # Without the file's name: it is in a working directory, which no longer exists when the user reads the message.
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        text = said.splitlines()[0][:500] if said else type(error).__name__
        raise CheckpointError(f"{what}: {text}") from error


def new_context() -> ts.Context:
    """Limits for one reader or one save. Not shared: a context would cache the B-tree of an earlier save there."""
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000},
            "file_io_concurrency": {"limit": 8},
            "data_copy_concurrency": {"limit": 2},
            "file_io_sync": True,
        }
    )


def store_spec(item: Path, *, ocdbt: bool, create: bool = False) -> Spec:
    """The key-value store of an item; `create` for writing (OCDBT only)."""
    files = {"driver": "file", "path": f"{item}/"}
    if not ocdbt:
        return files
    spec: Spec = {"driver": "ocdbt", "base": files, "cache_pool": "cache_pool#ocdbt"}
    if create:
        spec["config"] = {
            "max_inline_value_bytes": 1024,
            "max_decoded_node_bytes": 100_000_000,
            "manifest_kind": "single",
        }
        spec |= {"assume_config": True, "target_data_file_size": 1 << 31}
    return spec


@dataclass(frozen=True)
class ArrayLayout:
    """How one array is stored.

    stored_chunk: shape of the block that one key stores. chunk: shape of the block that is decoded separately, which is
    the reader's chunk; the two differ only for shards with several inner chunks. raw, checksum: see the module
    docstring. packing: the compression of chunks whose first bytes request memory.
    """

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    stored_chunk: tuple[int, ...]
    chunk: tuple[int, ...]
    zarr3: bool
    raw: Raw = None
    checksum: bool = False
    packing: Packing | None = None

    def __post_init__(self) -> None:
        for chunk in (self.stored_chunk, self.chunk):
            if len(chunk) != len(self.shape):
                raise ValueError(
                    f"array {self.key!r}: expected chunks of rank {len(self.shape)}, got {chunk}"
                )

    def named(self, key: str) -> ArrayLayout:
        """The same layout for another array."""
        # Copied with everything that was derived from the shape: `dataclasses.replace` takes seven times as long, and a
        # model has thousands of arrays that are alike.
        other = object.__new__(ArrayLayout)
        other.__dict__.update(self.__dict__, key=key)
        return other

    @cached_property
    def chunk_bytes(self) -> int:
        """Decoded size of a chunk."""
        return math.prod(self.chunk) * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Decoded size of the data under one chunk key."""
        return math.prod(self.stored_chunk) * self.dtype.itemsize

    @cached_property
    def num_stored(self) -> int:
        """How many chunk keys the array has."""
        return math.prod(_grid(self.shape, self.stored_chunk))

    @cached_property
    def only_chunk(self) -> str | None:
        """The only chunk's key after the array's own key, "/c/0/0"; None unless there is exactly one chunk."""
        if self.num_stored != 1:
            return None
        return self.chunk_key((0,) * len(self.shape))[len(self.key) :]

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """All chunks, in C order."""
        return tuple([box for _, box in self.chunks()])

    @cached_property
    def num_inner(self) -> int:
        """Number of chunks inside larger stored chunks."""
        return 0 if self.chunk == self.stored_chunk else math.prod(_grid(self.shape, self.chunk))

    def chunk_key(self, index: tuple[int, ...]) -> str:
        """The key of the chunk at this position of the grid of stored chunks."""
        if self.zarr3:
            return "/".join([self.key, "c", *map(str, index)])
        return f"{self.key}/{'.'.join(map(str, index)) or '0'}"

    def stored_keys(self) -> Iterator[str]:
        """Every key the array must have, apart from its metadata."""
        if self.only_chunk is not None:
            yield self.key + self.only_chunk
            return
        grid = _grid(self.shape, self.stored_chunk)
        if 0 in grid:
            # The other axes may be too long to list.
            return
        for index in itertools.product(*map(range, grid)):
            yield self.chunk_key(index)

    def chunks(self, box: Box | None = None) -> Iterator[tuple[tuple[int, ...], Box]]:
        """(grid position, box) of the chunks that hold elements of `box`, in C order; default: all."""
        box = Box.whole(self.shape) if box is None else box
        if not box.numel:
            return
        ranges = [
            range(low // size, -(-stop // size))
            for low, stop, size in zip(box.offsets, box.stops, self.chunk, strict=True)
        ]
        for index in itertools.product(*ranges):
            low = tuple(i * size for i, size in zip(index, self.chunk, strict=True))
            yield (
                index,
                Box(low, tuple(map(min, self.chunk, (n - o for n, o in zip(self.shape, low, strict=True))))),
            )

    def keys_of(self, box: Box) -> Iterator[str]:
        """The keys of the stored chunks that contain elements of a nonempty box."""
        ranges = [
            range(low // size, -(-stop // size))
            for low, stop, size in zip(box.offsets, box.stops, self.stored_chunk, strict=True)
        ]
        return map(self.chunk_key, itertools.product(*ranges))

    @cached_property
    def described(self) -> bytes:
        """`metadata` as it is stored."""
        return json.dumps(self.metadata()).encode()

    def read_spec(self, store: Spec) -> Spec:
        """The tensorstore spec that opens the array; a missing chunk is an error, not zeros."""
        return {
            "driver": "zarr3" if self.zarr3 else "zarr",
            "kvstore": {**store, "path": f"{store.get('path', '')}{self.key}/"},
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            "fill_missing_data_reads": False,
        }

    def metadata(self) -> dict[str, Any]:
        """The array's zarr.json when it is created here: one raw inner chunk per shard, each with a CRC-32C.

        This is Orbax's own form plus the checksum, which Orbax verifies if it exists.
        """
        inner = {"chunk_shape": self.chunk, "codecs": [_LITTLE, _CRC], "index_codecs": [_LITTLE, _CRC]}
        grid = {"name": "regular", "configuration": {"chunk_shape": self.chunk}}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": self.shape,
            "data_type": dtype_name(self.dtype),
            "chunk_grid": grid,
            "chunk_key_encoding": {"name": "default"},
            "codecs": [{"name": "sharding_indexed", "configuration": {**inner, "index_location": "end"}}],
            "fill_value": _FILL.get(self.dtype.kind, 0 if is_whole(self.dtype) else 0.0),
        }


def metadata_key(key: str, *, zarr3: bool) -> str:
    """The key of an array's own metadata."""
    return f"{key}/zarr.json" if zarr3 else f"{key}/.zarray"


def parse_array(
    key: str, data: object, *, zarr3: bool, what: str, inner: int = MAX_INNER_CHUNKS
) -> ArrayLayout:
    """The layout from an array's parsed metadata JSON. CheckpointError, beginning with `what`, if it is malformed.

    inner: the most chunks inside shards that it may have; with more, its chunks are the shards.
    """
    if not isinstance(data, dict):
        raise CheckpointError(f"{what}: expected a JSON object, got {type(data).__name__}")
    try:
        return _parse_zarr3(key, data, inner) if zarr3 else _parse_zarr2(key, data)
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{what}: malformed or unsupported zarr metadata: {error!r:.200}") from error


def _parse_zarr2(key: str, data: Mapping[str, Any]) -> ArrayLayout:
    _expect(data, zarr_format=2)
    if data.get("dimension_separator", ".") != ".":
        raise ValueError(f"expected dimension_separator '.', got {data['dimension_separator']!r}")
    shape, chunk = _sizes(data["shape"], 0), _sizes(data["chunks"], 1)
    text = data["dtype"]
    if not isinstance(text, str):
        raise ValueError(f"expected dtype to be a string, got {text!r}")
    # NumPy's type strings, except for types that NumPy lacks, which have bare names.
    swapped = text.startswith(">")
    dtype = np.dtype(text).newbyteorder("=") if text[:1] in "<>|" else dtype_from_name(text)
    dtype_name(dtype)
    plain = (
        not swapped
        and data.get("compressor") is None
        and not data.get("filters")
        and data.get("order") == "C"
    )
    name = (data.get("compressor") or {}).get("id")
    packed = Packing(name, math.prod(chunk) * dtype.itemsize) if name in PACKERS else None
    return ArrayLayout(
        key, shape, dtype, chunk, chunk, zarr3=False, raw="plain" if plain else None, packing=packed
    )


def _parse_zarr3(key: str, data: Mapping[str, Any], most_inner: int) -> ArrayLayout:
    _expect(data, zarr_format=3, node_type="array")
    encoding = data.get("chunk_key_encoding", {"name": "default"})
    if encoding["name"] != "default" or encoding.get("configuration", {}).get("separator", "/") != "/":
        raise ValueError(f"expected chunk_key_encoding 'default' with '/', got {encoding!r}")
    _expect(data["chunk_grid"], name="regular")
    shape = _sizes(data["shape"], 0)
    stored = chunk = _sizes(data["chunk_grid"]["configuration"]["chunk_shape"], 1)
    dtype = dtype_from_name(str(data["data_type"]))
    codecs = data["codecs"]
    plain, checksum = _plain_codecs(codecs)
    raw: Raw = "plain" if plain else None
    if len(codecs) == 1 and codecs[0]["name"] == "sharding_indexed":
        shard = codecs[0]["configuration"]
        inner = _sizes(shard["chunk_shape"], 1)
        if inner == stored:
            plain, checksum = _plain_codecs(shard["codecs"])
            raw = "shard" if plain and shard.get("index_location", "end") == "end" else None
        elif math.prod(_grid(shape, inner)) <= most_inner:
            chunk = inner
    packed = None if raw else packing(codecs, stored, dtype.itemsize)
    return ArrayLayout(
        key, shape, dtype, stored, chunk, zarr3=True, raw=raw, checksum=checksum, packing=packed
    )


def _plain_codecs(codecs: list[Mapping[str, Any]]) -> tuple[bool, bool]:
    """Whether the codecs store the data as it is in memory, and whether a CRC-32C follows the data."""
    names = [codec["name"] for codec in codecs]
    little = codecs[0].get("configuration", {}).get("endian", "little") == "little"
    return little and names in (["bytes"], ["bytes", "crc32c"]), names[-1] == "crc32c"


def _expect(data: Mapping[str, Any], **fields: object) -> None:
    for name, value in fields.items():
        if data.get(name) != value:
            raise ValueError(f"expected {name} {value!r}, got {data.get(name)!r}")


def _sizes(value: object, least: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and least <= n < 1 << 62 for n in value):
        raise ValueError(f"expected a list of integers >= {least}, got {value!r:.80}")
    return tuple(value)


def _grid(shape: Iterable[int], chunk: Iterable[int]) -> tuple[int, ...]:
    """How many chunks there are on each axis."""
    return tuple([-(-n // size) for n, size in zip(shape, chunk, strict=True)])


def tensor_infos(
    names: Iterable[str], paths: Iterable[TreePath], layouts: Iterable[ArrayLayout]
) -> Iterator[TensorInfo]:
    """The descriptions of arrays. Arrays that are alike share everything but the name."""
    alike: dict[tuple[tuple[int, ...], np.dtype, tuple[int, ...]], TensorInfo] = {}
    for name, path, layout in zip(names, paths, layouts, strict=True):
        key = layout.shape, layout.dtype, layout.chunk
        like = alike.get(key)
        if like is None:
            alike[key] = like = TensorInfo(name, path, layout.shape, layout.dtype, layout.boxes)
            yield like
        else:
            yield like.named(name, path)


class _Last(threading.local):
    array: ts.TensorStore | None = None
    keys: frozenset[str] = frozenset()


class MemoryArrays:
    """Opens arrays with only some of their chunks, from a store that tensorstore does not access. Thread-safe.

    The values with the wanted boxes are put into a store in memory, and the array is opened there. Each thread keeps
    its last array: the next box is often in the same stored chunk.
    """

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
