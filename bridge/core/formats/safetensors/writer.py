"""Writes safetensors files chunk by chunk, without the safetensors package; it and `transformers` read them.

    out.safetensors         a path with this suffix: one file of any size
    out/model.safetensors   any other path: a directory, with one file, or Hugging Face shards above a size

A file's header comes first and gives every tensor its place. So all tensors and objects must be declared before the
first chunk is written; then chunks go to their places in any order and from several threads.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from bridge.core.formats.files.atomic import sidecar_of
from bridge.core.formats.files.journal import Attempt, working_place
from bridge.core.formats.files.manifest import (
    MANIFEST_FILE,
    MARK,
    Manifest,
    ManifestFile,
    file_entry,
    object_checksum,
    render_manifest,
    rest_checksum,
)
from bridge.core.formats.files.part_files import Share, move_up, part_manifest, write_joint_manifest
from bridge.core.formats.files.record import ChunkRecord
from bridge.core.formats.files.recorded_chunks import FlatWriter
from bridge.core.formats.files.sink import Place, Sink
from bridge.core.formats.safetensors.extras import EXTRAS_KEY, Extras, encode_value, format_extras
from bridge.core.formats.safetensors.files import INDEX_FILE, SINGLE_FILE, SUFFIX
from bridge.core.formats.safetensors.header import METADATA_KEY, dtype_code, format_header
from bridge.core.formats.safetensors.reader import FORMAT_KEY, FORMAT_VALUE, HIDDEN_KEYS
from bridge.core.formats.tensors.base import CheckpointError, Checksums, TensorInfo, TreePath
from bridge.core.formats.tensors.leaves import flat_name

SHARD_BYTES: Final = 5_000_000_000
"""Largest shard, as Hugging Face cuts them; a larger tensor gets its own shard."""


class SafetensorsWriter(FlatWriter):
    """A new safetensors checkpoint at `path`, a file or a directory; see `CheckpointWriter`.

    FileExistsError when `path` exists, CheckpointError if the place of its manifest is taken. shard_bytes: tensors with
    more bytes in total are spread over several files, unless `path` names one file. Tensors are written in pieces of at
    most 32 MiB. Memory: none beyond the caller's array, or one copy of it if it is not contiguous. May be used by
    several threads.

    share: if given, the declared tensors are those of one part, and `path` becomes a directory of that part, with an
    index; see `formats/whole/in_parts.py`.
    """

    format = "safetensors"

    def __init__(
        self,
        path: str | os.PathLike[str],
        attempt: Attempt | None = None,
        *,
        shard_bytes: int = SHARD_BYTES,
        share: Share | None = None,
    ) -> None:
        if shard_bytes < 1:
            raise ValueError(f"expected shards of 1 byte or more, got {shard_bytes}")
        single = Path(path).name if Path(path).name.endswith(SUFFIX) else None
        if single is not None:
            # The manifest goes next to the file, where a file of the user may already exist.
            _require_manifest(sidecar_of(Path(path)))
        self._directory = working_place(path, attempt or Attempt(), payload=single)
        self.path: Path = self._directory.path
        self._single, self._share = single, share
        self._shard_bytes = shard_bytes
        self._record = ChunkRecord(self.path, self._directory.journal)
        self._alike = {}
        self._objects: dict[str, tuple[TreePath, object]] = {}
        self._metadata: dict[str, str] = {FORMAT_KEY: FORMAT_VALUE}
        self._object_checksums: dict[str, int] = {}
        self._places: dict[str, Place] | None = None
        self._sink = _Rows(self._laid_out)
        self._names: list[str] = []
        # The order of declarations determines offsets in the header, so declare one tensor at a time.
        self._lock = threading.Lock()

    def add_tensor(
        self,
        path: str | Sequence[str | int],
        shape: Sequence[int],
        dtype: np.dtype,
        chunk_shape: Sequence[int] | None = None,
    ) -> TensorInfo:
        """Declare a tensor; its name is the path joined by ".".

        chunk_shape: at least 1 per axis; without effect, as a tensor is stored in one piece. CheckpointError for a
        repeated name, an empty path, a dtype the format lacks, or after the first `write`.
        """
        name, tree_path = self._name(path)
        info = self._info(name, tree_path, shape, dtype, chunk_shape, dtype_code, whole=True)
        with self._lock:
            self._require_undecided(name)
            self._record.declare(info)
        return info

    def add_object(self, path: str | Sequence[str | int], value: object) -> None:
        """Keep None, bool, int, float, str, bytes, or a list, tuple or dict of these (keys str, int, bool, None).

        It goes into the header as text. Text at path ("__metadata__", key) goes into the header under this key.
        CheckpointError for anything else (NumPy scalars included), for a repeated name, or after the first `write`.
        """
        name, tree_path = self._name(path)
        encode_value(value, f"{self.path}: object {name!r}")
        with self._lock:
            self._require_undecided(name)
            match tree_path:
                case (str(first), str(key)) if (
                    first == METADATA_KEY and isinstance(value, str) and key not in HIDDEN_KEYS
                ):
                    self._metadata[key] = value
                case _:
                    self._objects[name] = tree_path, value
            # Every file gets this text, and readers leave it out.
            if (tree_path, value) != ((METADATA_KEY, FORMAT_KEY), FORMAT_VALUE):
                self._object_checksums[name] = object_checksum(value)

    def _laid_out(self) -> dict[str, Place]:
        """Every tensor's place; the first call decides the places and writes the headers."""
        with self._lock:
            if self._places is None:
                self._places = self._lay_out()
            return self._places

    def _lay_out(self) -> dict[str, Place]:
        shards = self._shards()
        places: dict[str, Place] = {}
        weight_map: dict[str, str] = {}
        total = 0
        for number, shard in enumerate(shards):
            file = f"model-{number + 1:05}-of-{len(shards):05}{SUFFIX}" if len(shards) > 1 else SINGLE_FILE
            extras = Extras(
                {info.name: info.path for info in shard if info.path != (info.name,)},
                self._objects if number == 0 else {},
            )
            metadata = dict(self._metadata)
            if extras.paths or extras.objects:
                metadata[EXTRAS_KEY] = format_extras(extras)
            try:
                header = format_header([(info.name, info.dtype, info.shape) for info in shard], metadata)
            except CheckpointError as error:
                raise CheckpointError(f"{self.path}: {error}") from None
            name, position = self._single or file, len(header)
            self._names.append(name)
            stored = self._record.open(self._directory.temporary / name)
            for info in shard:
                nbytes = info.nbytes
                places[info.name] = Place(stored, position, nbytes)
                weight_map[info.name] = file
                position += nbytes
            stored.truncate(position)
            stored.write(0, header)
            total += position - len(header)
        if len(shards) > 1 or self._share is not None:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self._directory.temporary / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        return places

    def _shards(self) -> list[list[TensorInfo]]:
        """The tensors of each file, in the order of its data; cut as Hugging Face does."""
        shards: list[list[TensorInfo]] = []
        current: list[TensorInfo] = []
        size = 0
        # A path that names one file gets one file, whatever its size.
        limit = None if self._single else self._shard_bytes
        for info in self._record.infos.values():
            nbytes = info.nbytes
            # A tensor is stored in one file: a larger tensor gets its own shard, and the previous shard continues.
            if limit is not None and nbytes > limit:
                shards.append([info])
                continue
            if limit is not None and size + nbytes > limit:
                shards.append(current)
                current, size = [], 0
            current.append(info)
            size += nbytes
        if current or not shards:
            shards.append(current)
        # Readers that map the file need every tensor at a multiple of its itemsize.
        return [sorted(shard, key=lambda info: -info.dtype.itemsize) for shard in shards]

    def _finish(self) -> None:
        folder = self._directory.temporary
        places = self._laid_out().values()
        files = {}
        for file in self._names:
            ranges = [
                (where.offset, where.offset + where.length)
                for where in places
                if str(where.file.path).rpartition("/")[2] == file
            ]
            rest = rest_checksum(folder / file, ranges)
            files[file] = ManifestFile((folder / file).stat().st_size, None, rest)
        if (folder / INDEX_FILE).exists():
            files[INDEX_FILE] = file_entry(folder / INDEX_FILE)
        manifest = Manifest(self.format, self._record.manifest(), self._object_checksums, files)
        (folder / MANIFEST_FILE).write_bytes(render_manifest(manifest))
        if self._single is not None:
            self._directory.place_beside(MANIFEST_FILE)

    def _name(self, path: str | Sequence[str | int]) -> tuple[str, TreePath]:
        self._require_open()
        try:
            name, tree_path = flat_name(path)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        if name == METADATA_KEY:
            raise CheckpointError(
                f"{self.path}: the name {METADATA_KEY!r} is reserved for the header: choose another"
            )
        return name, tree_path

    def _require_undecided(self, name: str) -> None:
        if self._places is not None:
            raise CheckpointError(
                f"{self.path}: expected {name!r} to be declared before the first chunk is written: the header comes "
                "first"
            )
        self._refuse_repeated(name, self._object_checksums)


def _require_manifest(path: Path) -> None:
    """CheckpointError if a file that is not a manifest has the manifest's name: that file must not be overwritten."""
    if not os.path.lexists(path):
        return
    start = b""
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(256)
    if MARK.encode() not in start:
        raise CheckpointError(
            f"{path} has the name of the checkpoint's manifest, but is not a manifest: move the file away, or choose "
            "another name for the checkpoint"
        )


class _Rows(Sink):
    """Chunks that are runs of whole rows, or parts of a row, of tensors stored in one piece; see `Sink`.

    places: of all tensors, decided at the first call.
    """

    placed = True

    def __init__(self, places: Callable[[], Mapping[str, Place]]) -> None:
        self._places = places

    def place(self, info: TensorInfo, number: int) -> Place:
        tensor, box = self._places()[info.name], info.chunks[number]
        first = sum(o * math.prod(info.shape[axis + 1 :]) for axis, o in enumerate(box.offsets))
        itemsize = info.dtype.itemsize
        return Place(tensor.file, tensor.offset + first * itemsize, box.numel * itemsize)

    def encode(
        self, info: TensorInfo, number: int, parts: list[np.ndarray], crc: int
    ) -> list[bytes | memoryview]:
        return [part.data for part in parts]

    def frame(self, info: TensorInfo, number: int) -> tuple[int, int]:
        return 0, 0

    def around(
        self, info: TensorInfo, number: int, elements: memoryview, sums: Checksums
    ) -> tuple[bytes, bytes]:
        return b"", b""

    def decode(self, info: TensorInfo, number: int, data: bytes) -> np.ndarray | None:
        whole = len(data) == info.chunks[number].numel * info.dtype.itemsize
        return np.frombuffer(data, np.uint8) if whole else None


def join(folder: Path, parts: Sequence[Path], conversion: str) -> None:
    """Make `folder` a checkpoint of these parts, in their order.

    After a kill at any moment, call it again. CheckpointError if a file of a part is missing.
    """
    manifests = [part_manifest(part) for part in parts]
    indexes = [json.loads((part / INDEX_FILE).read_text()) for part in parts]
    shards = [
        (number, name)
        for number, index in enumerate(indexes)
        for name in dict.fromkeys(index["weight_map"].values())
    ]
    # Without any tensor, the first part contains the objects.
    shards = shards or [(0, SINGLE_FILE)]
    files: dict[str, ManifestFile] = {}
    renamed: dict[tuple[int, str], str] = {}
    for position, (number, name) in enumerate(shards):
        new = f"model-{position + 1:05}-of-{len(shards):05}{SUFFIX}" if len(shards) > 1 else SINGLE_FILE
        renamed[number, name] = new
        files[new] = manifests[number].files[name]
        move_up(parts[number] / name, folder / new, files[new].size)
    if len(shards) > 1:
        weight_map = {
            tensor: renamed[number, name]
            for number, index in enumerate(indexes)
            for tensor, name in index["weight_map"].items()
        }
        total = sum(index["metadata"]["total_size"] for index in indexes)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        files[INDEX_FILE] = file_entry(folder / INDEX_FILE)
    write_joint_manifest(folder, "safetensors", manifests, files, conversion)
