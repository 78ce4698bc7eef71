"""The `.metadata` file of a DCP checkpoint: parsed field by field, and written so that PyTorch reads it.

Metadata
  state_dict_metadata  name -> TensorStorageMetadata(properties, size, chunks) | BytesStorageMetadata()
  planner_data         name -> tree path, e.g. ("optimizer", "param_groups", 0, "lr")
  storage_data         MetadataIndex(name, offset of the chunk) -> _StorageInfo(file, offset, length)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bridge.formats.base import (
    DTYPES,
    Box,
    CheckpointError,
    TensorInfo,
    TreePath,
    check_coverage,
    dtype_name,
)
from bridge.formats.dcp_archive import is_index
from bridge.formats.dcp_pickle import Call, Instance, Name, Vocabulary, read_pickle
from bridge.formats.dcp_pickle_writer import write_pickle

_PACKAGE: Final = "torch.distributed.checkpoint"
_METADATA: Final = f"{_PACKAGE}.metadata.Metadata"
_STORAGE_META: Final = f"{_PACKAGE}.metadata.StorageMeta"
_TENSOR: Final = f"{_PACKAGE}.metadata.TensorStorageMetadata"
_BYTES: Final = f"{_PACKAGE}.metadata.BytesStorageMetadata"
_CHUNK: Final = f"{_PACKAGE}.metadata.ChunkStorageMetadata"
_INDEX: Final = f"{_PACKAGE}.metadata.MetadataIndex"
_PROPERTIES: Final = f"{_PACKAGE}.metadata.TensorProperties"
_MEMORY_FORMAT: Final = f"{_PACKAGE}.metadata._MEM_FORMAT_ENCODING"
_STORAGE_INFO: Final = f"{_PACKAGE}.filesystem._StorageInfo"
_SIZE: Final = "torch.Size"
_LAYOUT: Final = "torch.serialization._get_layout"

_MAX_NAME = 4096
_VOCABULARY = Vocabulary(
    max_bytes=256 << 20,
    calls=frozenset({_SIZE, _LAYOUT, _MEMORY_FORMAT})
    | {
        f"pathlib{sub}.{kind}Path"
        for sub in ("", "._local")
        for kind in ("Posix", "Windows", "PurePosix", "PureWindows")
    },
    instances=frozenset(
        {_METADATA, _STORAGE_META, _TENSOR, _BYTES, _CHUNK, _INDEX, _PROPERTIES, _STORAGE_INFO}
    ),
    constants=re.compile(r"torch\.[a-z][a-z0-9_]*"),
)


@dataclass(frozen=True, slots=True)
class Extent:
    """One archive: bytes [offset, offset + length) of a file in the checkpoint's directory."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class DcpMetadata:
    """What a DCP checkpoint holds and where. `extents[name][i]` holds `tensors[name].chunks[i]`."""

    tensors: Mapping[str, TensorInfo]
    extents: Mapping[str, tuple[Extent, ...]]
    objects: Mapping[str, Extent]
    object_paths: Mapping[str, TreePath]


def parse_metadata(data: bytes, what: str) -> DcpMetadata:
    """Read and check `.metadata`: every tensor covered once by its chunks, every chunk and object stored once.

    Chunks without elements are left out. CheckpointError, beginning with `what`, for anything else.
    """
    fields = _state(read_pickle(data, _VOCABULARY, what), _METADATA, what)
    entries = fields.get("state_dict_metadata")
    if not isinstance(entries, dict):
        raise CheckpointError(
            f"{what}: expected state_dict_metadata to be a dict, got {type(entries).__name__}"
        )
    stored = _storage(fields.get("storage_data"), what)
    planner_data = fields.get("planner_data")
    # Planners other than the default one put other things here, or nothing.
    paths = planner_data if isinstance(planner_data, dict) else {}

    tensors: dict[str, TensorInfo] = {}
    extents: dict[str, tuple[Extent, ...]] = {}
    objects: dict[str, Extent] = {}
    object_paths: dict[str, TreePath] = {}
    for name, entry in entries.items():
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            raise CheckpointError(
                f"{what}: expected names to be text of at most {_MAX_NAME} characters, got {type(name).__name__}"
            )
        places = stored.pop(name, {})
        path = _path(name, paths.get(name), what)
        if isinstance(entry, Instance) and entry.name == _BYTES:
            if places.keys() != {None}:
                raise CheckpointError(
                    f"{what}: expected {_short(name)} to be stored in one place, got {len(places)}"
                )
            objects[name], object_paths[name] = places[None], path
        else:
            tensors[name] = info = _tensor(name, path, entry, what)
            extents[name] = _extents_of(info, places, what)
    if stored:
        raise CheckpointError(f"{what}: storage_data has an entry for unknown {_short(next(iter(stored)))}")
    return DcpMetadata(tensors, extents, objects, object_paths)


def _short(name: str) -> str:
    return repr(name if len(name) <= 200 else name[:200] + "...")


def _state(value: object, kind: str, what: str) -> dict[object, object]:
    if not isinstance(value, Instance) or value.name != kind or not isinstance(value.state, dict):
        raise CheckpointError(f"{what}: expected a {kind}, got {type(value).__name__}")
    return value.state


def _size(value: object, what: str) -> tuple[int, ...]:
    match value:
        case Call(name="torch.Size", args=()):
            return ()
        case Call(name="torch.Size", args=(sizes,)) if is_index(sizes):
            return sizes
    raise CheckpointError(f"{what}: expected a torch.Size of up to 64 ints of at least 0, got something else")


def _path(name: str, value: object, what: str) -> TreePath:
    if value is None:
        return (name,)
    if not isinstance(value, tuple) or not 0 < len(value) <= 256:
        raise CheckpointError(
            f"{what}: expected the path of {_short(name)} to be a tuple, got {type(value).__name__}"
        )
    if not all(type(part) is str or (type(part) is int and 0 <= part < 1 << 63) for part in value):
        raise CheckpointError(f"{what}: expected the path of {_short(name)} to consist of str and int")
    return value


def _storage(value: object, what: str) -> dict[str, dict[tuple[int, ...] | None, Extent]]:
    """storage_data as name -> offset (None for objects) -> extent."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: expected storage_data to be a dict, got {type(value).__name__}")
    stored: dict[str, dict[tuple[int, ...] | None, Extent]] = {}
    for index, info in value.items():
        key, place = _state(index, _INDEX, what), _state(info, _STORAGE_INFO, what)
        name = key.get("fqn")
        if not isinstance(name, str):
            raise CheckpointError(
                f"{what}: expected names in storage_data to be text, got {type(name).__name__}"
            )
        here = f"{what}: {_short(name)}"
        raw_offset = key.get("offset")
        offset = None if raw_offset is None else _size(raw_offset, here)
        if place.get("transform_descriptors"):
            raise CheckpointError(
                f"{here}: is stored compressed or encrypted by a DCP extension, which is not supported"
            )
        places = stored.setdefault(name, {})
        if offset in places:
            raise CheckpointError(f"{here}: has two storage entries for the chunk at {offset}")
        places[offset] = _extent(place, here)
    return stored


def _extent(place: Mapping[object, object], what: str) -> Extent:
    file, offset, length = (place.get(field) for field in ("relative_path", "offset", "length"))
    # Only plain names: anything else could lead out of the checkpoint's directory.
    if (
        not isinstance(file, str)
        or not 0 < len(file) < 256
        or file in (".", "..")
        or re.search(r"[/\\\0]", file)
    ):
        raise CheckpointError(
            f"{what}: expected the name of a file in the checkpoint's directory, got something else"
        )
    if not (type(offset) is int and type(length) is int and is_index((offset, length))):
        raise CheckpointError(f"{what}: expected offset and length in {file} to be ints of at least 0")
    return Extent(file, offset, length)


def _tensor(name: str, path: TreePath, entry: object, what: str) -> TensorInfo:
    here = f"{what}: tensor {_short(name)}"
    fields = _state(entry, _TENSOR, here)
    shape = _size(fields.get("size"), here)
    match fields.get("properties"):
        case Instance(
            name="torch.distributed.checkpoint.metadata.TensorProperties", state=(dtype, layout, *_)
        ):
            pass
        case _:
            raise CheckpointError(f"{here}: expected its properties to start with dtype and layout")
    kind = DTYPES.get(dtype.dotted.removeprefix("torch.")) if isinstance(dtype, Name) else None
    if kind is None:
        got = dtype.dotted if isinstance(dtype, Name) else type(dtype).__name__
        raise CheckpointError(f"{here}: expected a dtype out of {', '.join(DTYPES)}, got {got}")
    match layout:
        case Call(args=("torch.strided",)):
            pass
        case _:
            raise CheckpointError(f"{here}: expected a strided tensor, got another layout")
    chunks = fields.get("chunks")
    if not isinstance(chunks, list):
        raise CheckpointError(f"{here}: expected a list of chunks, got {type(chunks).__name__}")
    boxes = []
    for chunk in chunks:
        state = _state(chunk, _CHUNK, here)
        offsets, sizes = _size(state.get("offsets"), here), _size(state.get("sizes"), here)
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise CheckpointError(f"{here}: expected chunks of rank {len(shape)}, got {offsets} and {sizes}")
        box = Box(offsets, sizes)
        # An empty shard may be written as a chunk, even at its neighbour's offset.
        if box.numel:
            boxes.append(box)
    check_coverage(shape, boxes, here)
    return TensorInfo(name, path, shape, kind, tuple(boxes))


def _extents_of(
    info: TensorInfo, places: Mapping[tuple[int, ...] | None, Extent], what: str
) -> tuple[Extent, ...]:
    extents = []
    for chunk in info.chunks:
        if chunk.offsets not in places:
            raise CheckpointError(
                f"{what}: tensor {_short(info.name)}: nothing stored for the chunk at {chunk.offsets}"
            )
        extents.append(places[chunk.offsets])
    return tuple(extents)


def format_metadata(metadata: DcpMetadata) -> bytes:
    """The `.metadata` file for this content. The same content gives the same bytes."""
    entries: dict[object, object] = {}
    paths: dict[object, object] = {}
    storage: dict[object, object] = {}
    for name, info in metadata.tensors.items():
        entries[name] = Instance(
            _TENSOR,
            {
                "properties": _properties(info),
                "size": Call(_SIZE, (info.shape,)),
                "chunks": [
                    Instance(_CHUNK, {"offsets": Call(_SIZE, (c.offsets,)), "sizes": Call(_SIZE, (c.sizes,))})
                    for c in info.chunks
                ],
            },
        )
        paths[name] = info.path
        for index, (chunk, extent) in enumerate(zip(info.chunks, metadata.extents[name], strict=True)):
            storage[_index(name, Call(_SIZE, (chunk.offsets,)), index)] = _storage_info(extent)
    for name, extent in metadata.objects.items():
        entries[name] = Instance(_BYTES, {})
        paths[name] = metadata.object_paths[name]
        storage[_index(name, None, None)] = _storage_info(extent)
    # No checkpoint_id: PyTorch writes the absolute path of the directory there, which means nothing elsewhere.
    meta: dict[str, object] = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
    return write_pickle(
        Instance(
            _METADATA,
            {
                "state_dict_metadata": entries,
                "planner_data": paths,
                "storage_data": storage,
                "storage_meta": Instance(_STORAGE_META, meta),
                "version": "1.0.0",
            },
        ),
        4,
    )


def _properties(info: TensorInfo) -> Instance:
    layout, contiguous = Call(_LAYOUT, ("torch.strided",)), Call(_MEMORY_FORMAT, (0,))
    return Instance(_PROPERTIES, (Name(f"torch.{dtype_name(info.dtype)}"), layout, False, contiguous, False))


def _index(name: str, offset: object, index: int | None) -> Instance:
    return Instance(_INDEX, {"fqn": name, "offset": offset, "index": index})


def _storage_info(extent: Extent) -> Instance:
    return Instance(
        _STORAGE_INFO, {"relative_path": extent.file, "offset": extent.offset, "length": extent.length}
    )
