"""The `.metadata` file of a DCP checkpoint: parsed field by field, and written so that PyTorch reads it.

Metadata
  state_dict_metadata  name -> TensorStorageMetadata(properties, size, chunks) | BytesStorageMetadata()
  planner_data         name -> tree path, e.g. ("optimizer", "param_groups", 0, "lr")
  storage_data         MetadataIndex(name, offset of the chunk) -> _StorageInfo(file, offset, length)

With `use_collectives=False`, DCP saves one such file per rank, `__0.metadata` and so on, each describing what that rank
wrote. Together the files describe one checkpoint, in which every rank stores the replicated tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from bridge.core.formats.dcp.pickle import read_pickle
from bridge.core.formats.dcp.pickle_records import (
    BYTES,
    CHUNK,
    INDEX,
    LAYOUT,
    MEMORY_FORMAT,
    METADATA,
    PROPERTIES,
    SIZE,
    STORAGE_INFO,
    STORAGE_META,
    TENSOR,
    Call,
    Instance,
    Name,
    Vocabulary,
    is_index,
    torch_dtype,
)
from bridge.core.formats.reading.regular_files import is_plain_name
from bridge.core.formats.tensors.base import DTYPES, Box, CheckpointError, TensorInfo, TreePath
from bridge.core.formats.tensors.boxes import check_coverage
from bridge.core.formats.tensors.leaves import MAX_NAME, TREE_PATH_KEYS, is_tree_path

METADATA_FILE: Final = ".metadata"
_RANK_FILE: Final = re.compile(r"__(0|[1-9]\d{0,8})\.metadata")
_DATA_FILE: Final = re.compile(r"__(\d{1,9})_\d+\.distcp")
_VOCABULARY = Vocabulary(
    max_bytes=256 << 20,
    calls=frozenset({SIZE, LAYOUT, MEMORY_FORMAT})
    | {
        f"pathlib{sub}.{kind}Path"
        for sub in ("", "._local")
        for kind in ("Posix", "Windows", "PurePosix", "PureWindows")
    },
    enumerations=frozenset({MEMORY_FORMAT}),
    instances=frozenset({METADATA, STORAGE_META, TENSOR, BYTES, CHUNK, INDEX, PROPERTIES, STORAGE_INFO}),
    constants=re.compile(r"torch\.[a-z][a-z0-9_]*"),
)


class Extent(NamedTuple):
    """One archive: bytes [offset, offset + length) of a file in the checkpoint's directory."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class DcpMetadata:
    """The contents of a DCP checkpoint and their places. `extents[name][i]` holds `tensors[name].chunks[i]`.

    unreadable: why a tensor can only be listed, see `pickle_records.py`. If several ranks stored a chunk or an object,
    its further places are in `copies[name, i]` and `object_copies[name]`.
    """

    tensors: Mapping[str, TensorInfo]
    extents: Mapping[str, tuple[Extent, ...]]
    objects: Mapping[str, Extent]
    object_paths: Mapping[str, TreePath]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[tuple[str, int], Sequence[Extent]] = field(default_factory=dict)
    object_copies: Mapping[str, Sequence[Extent]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """The contents of one metadata file; its chunks need not cover a tensor."""

    what: str
    tensors: Mapping[str, _Claim]
    objects: Mapping[str, tuple[TreePath, Extent]]


class _Form(NamedTuple):
    """The content of a tensor's entry, apart from its name; its chunks, without empty ones.

    Tensors whose entries share their content share one such object in `_Part`, checked once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[Box, ...]
    unreadable: str | None


class _Claim(NamedTuple):
    path: TreePath
    form: _Form
    extents: tuple[Extent, ...]


def metadata_files(directory: Path) -> list[Path]:
    """`.metadata`, or the metadata files of all ranks in rank order; none if this is not a finished DCP checkpoint."""
    if (directory / METADATA_FILE).is_file():
        return [directory / METADATA_FILE]
    of_ranks = [(int(match[1]), p) for p in directory.iterdir() if (match := _RANK_FILE.fullmatch(p.name))]
    return [path for _, path in sorted(of_ranks)]


def parse_metadata(data: bytes, what: str) -> DcpMetadata:
    """Read and check `.metadata`: every tensor covered once by its chunks, every chunk and object stored once.

    Chunks without elements are left out. CheckpointError, beginning with `what`, for anything else.
    """
    return _alone(_part(data, what))


def parse_rank_metadata(files: Mapping[str, bytes], what: str) -> DcpMetadata:
    """Read the metadata files of all ranks, given as content by name: together they cover every tensor.

    A chunk that several ranks stored is taken from the first of these ranks. CheckpointError if ranks contradict each
    other or one is missing.
    """
    expected = [f"__{rank}{METADATA_FILE}" for rank in range(len(files))]
    if list(files) != expected:
        missing = next(name for name in expected if name not in files)
        raise CheckpointError(
            f"{what}: expected the metadata of every rank, found {len(files)} files up to {list(files)[-1]}, but no "
            f"{missing}"
        )
    return _join([_part(data, f"{what}/{name}") for name, data in files.items()], what)


def require_metadata_of_all(directory: Path, ranks: int) -> None:
    """CheckpointError if a data file was written by a rank above the ranks of the metadata files."""
    written = [int(match[1]) for child in directory.iterdir() if (match := _DATA_FILE.fullmatch(child.name))]
    if max(written, default=0) >= ranks:
        raise CheckpointError(
            f"{directory}: expected the metadata of every rank that wrote a file, found {ranks} and no "
            f"__{max(written)}{METADATA_FILE}: the save did not finish, or the file was not copied"
        )


def _part(data: bytes, what: str) -> _Part:
    fields = _state(read_pickle(data, _VOCABULARY, what), METADATA, what)
    entries = fields.get("state_dict_metadata")
    if not isinstance(entries, dict):
        raise CheckpointError(
            f"{what}: expected state_dict_metadata to be a dict, got {type(entries).__name__}"
        )
    stored = _storage(fields.get("storage_data"), what)
    planner_data = fields.get("planner_data")
    # Planners other than the default planner store other things here, or nothing.
    paths = planner_data if isinstance(planner_data, dict) else {}

    tensors: dict[str, _Claim] = {}
    objects: dict[str, tuple[TreePath, Extent]] = {}
    # By the identity of an entry's content, which `entries` keeps alive: `read_pickle` shares it between equal ones.
    forms: dict[int, _Form] = {}
    nowhere: Mapping[tuple[int, ...] | None, Extent] = {}
    for name, entry in entries.items():
        if not isinstance(name, str) or len(name) > MAX_NAME:
            raise CheckpointError(
                f"{what}: expected names to be text of at most {MAX_NAME} characters, got {type(name).__name__}"
            )
        places = stored.pop(name, nowhere)
        path = _path(name, paths.get(name), what)
        if isinstance(entry, Instance) and entry.name == BYTES:
            if places.keys() != {None}:
                raise CheckpointError(
                    f"{what}: expected {_short(name)} to be stored in one place, got {len(places)}"
                )
            objects[name] = path, places[None]
            continue
        state = entry.state if isinstance(entry, Instance) and entry.name == TENSOR else None
        form = forms.get(id(state))
        if form is None:
            form = forms[id(state)] = _form(name, entry, places, what)
        try:
            extents = tuple([places[chunk.offsets] for chunk in form.chunks])
        except KeyError as error:
            raise _not_stored(f"{what}: tensor {_short(name)}", error.args[0]) from None
        tensors[name] = _Claim(path, form, extents)
    if stored:
        raise CheckpointError(f"{what}: storage_data has an entry for unknown {_short(next(iter(stored)))}")
    return _Part(what, tensors, objects)


def _alone(part: _Part) -> DcpMetadata:
    """Like `_join` for one part, which has no copies; tensors that are alike are checked once."""
    tensors: dict[str, TensorInfo] = {}
    extents: dict[str, tuple[Extent, ...]] = {}
    closed: dict[str, str] = {}
    checked: dict[int, TensorInfo] = {}
    for name, (path, form, places) in part.tensors.items():
        like = checked.get(id(form))
        if like is None:
            shape, dtype, chunks, _ = form
            check_coverage(shape, chunks, f"{part.what}: tensor {_short(name)}")
            checked[id(form)] = tensors[name] = TensorInfo(name, path, shape, dtype, chunks)
        else:
            tensors[name] = like.named(name, path)
        extents[name] = places
        if form.unreadable is not None:
            closed[name] = form.unreadable
    objects = {name: extent for name, (_, extent) in part.objects.items()}
    object_paths = {name: path for name, (path, _) in part.objects.items()}
    return DcpMetadata(tensors, extents, objects, object_paths, closed)


def _join(parts: Sequence[_Part], what: str) -> DcpMetadata:
    first: dict[str, tuple[_Part, _Claim]] = {}
    places: dict[str, dict[Box, int]] = {}
    chunks: dict[str, list[Box]] = {}
    extents: dict[str, list[Extent]] = {}
    copies: dict[tuple[str, int], list[Extent]] = {}
    objects: dict[str, Extent] = {}
    object_paths: dict[str, TreePath] = {}
    object_copies: dict[str, list[Extent]] = {}
    for part in parts:
        for name, claim in part.tensors.items():
            other, same = first.setdefault(name, (part, claim))
            if (claim.form.shape, claim.form.dtype, claim.path) != (
                same.form.shape,
                same.form.dtype,
                same.path,
            ):
                raise CheckpointError(
                    f"{part.what}: tensor {_short(name)}: expected {same.form.dtype.name} {same.form.shape} at "
                    f"{same.path!r:.200} as in {other.what}, got {claim.form.dtype.name} {claim.form.shape} at "
                    f"{claim.path!r:.99}"
                )
            known = places.setdefault(name, {})
            for box, extent in zip(claim.form.chunks, claim.extents, strict=True):
                if part is not other and box in known:
                    copies.setdefault((name, known[box]), []).append(extent)
                else:
                    known[box] = len(chunks.setdefault(name, []))
                    chunks[name].append(box)
                    extents.setdefault(name, []).append(extent)
        for name, (path, extent) in part.objects.items():
            if object_paths.setdefault(name, path) != path:
                raise CheckpointError(
                    f"{part.what}: expected the path of {_short(name)} to be the same on all ranks"
                )
            if name in objects:
                object_copies.setdefault(name, []).append(extent)
            else:
                objects[name] = extent
    for name in first.keys() & objects.keys():
        raise CheckpointError(
            f"{what}: {_short(name)} is a tensor on one rank and another kind of value on another"
        )
    tensors: dict[str, TensorInfo] = {}
    for name, (part, claim) in first.items():
        boxes = chunks.get(name, [])
        shape, dtype = claim.form.shape, claim.form.dtype
        check_coverage(shape, boxes, f"{part.what if len(parts) == 1 else what}: tensor {_short(name)}")
        tensors[name] = TensorInfo(name, claim.path, shape, dtype, tuple(boxes))
    whole = {name: tuple(extents.get(name, ())) for name in tensors}
    closed = {
        name: claim.form.unreadable for name, (_, claim) in first.items() if claim.form.unreadable is not None
    }
    return DcpMetadata(tensors, whole, objects, object_paths, closed, copies, object_copies)


def _short(name: str) -> str:
    return repr(name if len(name) <= 200 else name[:200] + "...")


def _state(value: object, class_name: str, what: str) -> dict[object, object]:
    if not isinstance(value, Instance) or value.name != class_name or not isinstance(value.state, dict):
        raise CheckpointError(f"{what}: expected a {class_name}, got {type(value).__name__}")
    return value.state


def _size(value: object, what: str, name: str | None = None) -> tuple[int, ...]:
    if isinstance(value, Call) and value.name == SIZE:
        if value.args == ():
            return ()
        if len(value.args) == 1 and is_index(sizes := value.args[0]):
            return sizes
    what = what if name is None else f"{what}: {_short(name)}"
    raise CheckpointError(f"{what}: expected a torch.Size of up to 64 ints of at least 0, got something else")


def _path(name: str, value: object, what: str) -> TreePath:
    if value is None:
        return (name,)
    if not isinstance(value, tuple) or not is_tree_path(value):
        raise CheckpointError(
            f"{what}: expected the path of {_short(name)} to be a tuple of {TREE_PATH_KEYS}, got something else"
        )
    return value


def _storage(value: object, what: str) -> dict[str, dict[tuple[int, ...] | None, Extent]]:
    """storage_data as name -> offset (None for objects) -> extent."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: expected storage_data to be a dict, got {type(value).__name__}")
    stored: dict[str, dict[tuple[int, ...] | None, Extent]] = {}
    files: set[str] = set()
    for index, info in value.items():
        key, storage = _state(index, INDEX, what), _state(info, STORAGE_INFO, what)
        name = key.get("fqn")
        if not isinstance(name, str):
            raise CheckpointError(
                f"{what}: expected names in storage_data to be text, got {type(name).__name__}"
            )
        raw_offset = key.get("offset")
        offset = None if raw_offset is None else _size(raw_offset, what, name)
        if storage.get("transform_descriptors"):
            raise CheckpointError(
                f"{what}: {_short(name)}: is stored compressed or encrypted by a DCP extension, which is not supported"
            )
        places = stored.setdefault(name, {})
        if offset in places:
            raise CheckpointError(
                f"{what}: {_short(name)}: has two storage entries for the chunk at {offset}"
            )
        file, start, length = storage.get("relative_path"), storage.get("offset"), storage.get("length")
        if not isinstance(file, str) or (file not in files and not is_plain_name(file)):
            raise CheckpointError(
                f"{what}: {_short(name)}: expected the name of a file in the checkpoint's directory, got something else"
            )
        files.add(file)
        if not (type(start) is int and type(length) is int and is_index((start, length))):
            raise CheckpointError(
                f"{what}: {_short(name)}: expected offset and length in {file} to be ints of at least 0"
            )
        places[offset] = Extent(file, start, length)
    return stored


def _form(name: str, entry: object, places: Mapping[tuple[int, ...] | None, Extent], what: str) -> _Form:
    here = f"{what}: tensor {_short(name)}"
    fields = _state(entry, TENSOR, here)
    shape = _size(fields.get("size"), here)
    match fields.get("properties"):
        case Instance(
            name="torch.distributed.checkpoint.metadata.TensorProperties", state=(dtype, layout, *_)
        ):
            pass
        case _:
            raise CheckpointError(f"{here}: expected its properties to start with dtype and layout")
    known = torch_dtype(dtype.dotted) if isinstance(dtype, Name) else None
    if known is None:
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
        state = _state(chunk, CHUNK, here)
        offsets, sizes = _size(state.get("offsets"), here), _size(state.get("sizes"), here)
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise CheckpointError(f"{here}: expected chunks of rank {len(shape)}, got {offsets} and {sizes}")
        box = Box(offsets, sizes)
        # An empty shard may be written as a chunk, even at its neighbour's offset.
        if not box.numel:
            continue
        if not box.inside(shape):
            raise CheckpointError(f"{here}: expected chunks inside shape {shape}, got {box}")
        if offsets not in places:
            raise _not_stored(here, offsets)
        boxes.append(box)
    return _Form(shape, known[0], tuple(boxes), known[1])


def _not_stored(here: str, offsets: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(f"{here}: nothing stored for the chunk at {offsets}")
