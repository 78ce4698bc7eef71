"""Writing a state tree as one DCP checkpoint with a manifest: all ranks plan together, then each rank writes.

::

    plan       agree on path, contents and directory; rank 0 assigns each chunk to one of the ranks that hold it
    copy       asynchronous saves only: the chunks that this rank writes go to host memory
    write      each rank writes and syncs its file, and records a checksum of every chunk       \\  in the background of
    commit     rank 0 writes .metadata and the manifest, and renames the directory               / an asynchronous save

PyTorch's ``dcp.save`` does all of this in one call, so it can neither copy only the chunks that a rank writes nor keep
away from training's collectives. Planner and writer are PyTorch's own, and so are the files.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from bridge.core.formats import Box, CheckpointError
from bridge.core.formats.dcp.archives import SavedChunk, data_file_entry
from bridge.core.formats.files.atomic import AtomicDirectory
from bridge.core.formats.files.manifest import (
    MANIFEST_FILE,
    Manifest,
    ManifestFile,
    ManifestTensor,
    file_entry,
    object_checksum,
    render_manifest,
)
from bridge.core.formats.saving import pending
from bridge.core.formats.saving.pending import SaveExtras
from bridge.core.formats.stores.store import path_here
from bridge.core.formats.tensors.arrays import array_checksum
from bridge.core.formats.tensors.base import dtype_from_name
from torch_impl.checkpoint.contents import named_tensors
from torch_impl.comm.agreement import agree, exchange, gather, rank, require_same_claims, scatter

Tree = Mapping[str, Any]


class PlannedSave:
    """A checkpoint that all ranks have planned and none has written. ``write`` or ``abort`` ends it.

    tree: makes this rank's state tree. extras: extra files; the first rank's are used. copy: whether the state may
    change before ``write`` returns. group: the ranks that save together, None for the default group. mesh_ranks: ranks
    that hold parts of this rank's tensors, and so must have the same tensors. Errors as for ``save_checkpoint``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tree: Callable[[], Tree],
        extras: SaveExtras,
        *,
        copy: bool,
        group: dist.ProcessGroup | None = None,
        mesh_ranks: Sequence[int] = (),
    ) -> None:
        self.path = path_here(path)
        self.group, self._mesh_ranks = group, tuple(mesh_ranks)
        self._extras = extras
        self._directory: AtomicDirectory | None = None
        self._planner = ChunkPlanner()
        self._metadata: Metadata | None = None
        try:
            self._plan(tree, copy)
        except BaseException:
            # BaseException, so that a KeyboardInterrupt leaves no half-written directory either.
            self.abort()
            raise

    @property
    def copied_bytes(self) -> int:
        """Host memory in bytes that the copies of this rank's chunks take."""
        return self._planner.copied_bytes

    def _plan(self, tree: Callable[[], Tree], copy: bool) -> None:
        group, first = self.group, rank(self.group) == 0

        def make() -> Tree:
            # Inside the agreement: some ranks may already know that the previous save failed.
            pending.settle()
            # Before the directory is made: state that cannot be saved leaves nothing on disk.
            return tree()

        state = agree(make, group=group, claim={"the call": "a save", "the path": str(self.path)}).value
        self._require_same_contents(state)

        def open_directory() -> None:
            if first:
                self._extras.before()
                self._directory = AtomicDirectory(self.path)

        _, temporary = agree(
            open_directory, lambda _: str(self._directory and self._directory.temporary), group
        )
        self._temporary = Path(str(temporary))
        self._writer = SharedDirectoryWriter(self._temporary, self.path.name)

        def local_plan() -> SavePlan:
            self._planner.set_up_planner(
                state_dict=dict(state), storage_meta=self._writer.storage_meta(), is_coordinator=first
            )
            self._writer.set_up_storage_writer(first)
            return self._writer.prepare_local_plan(self._planner.create_local_plan())

        plans = gather(agree(local_plan, group=group).value, group)

        group_ranks = dist.get_process_group_ranks(group) if dist.is_initialized() else [0]

        def global_plans() -> list[SavePlan]:
            if not first:
                return []
            try:
                shared, self._metadata = self._planner.create_global_plan(plans)
            except ValueError as error:
                # Rows of a tensor are missing: DCP says how many, but not why.
                raise CheckpointError(
                    f"expected ranks that together hold all rows, got ranks {group_ranks}: pass the process_group= "
                    f"of all ranks that share the model's rows, or pass none ({str(error)[:300]})"
                ) from error
            return self._writer.prepare_global_plan(shared)

        plan = scatter(agree(global_plans, group=group).value, group)

        def finish() -> None:
            self._final = self._planner.finish_plan(plan)
            self._planner.check(self._final)
            if copy:
                self._planner.copy(self._final)

        agree(finish, group=group)

    def _require_same_contents(self, state: Tree) -> None:
        """CheckpointError unless ranks with parts of the same tensors save the same tensors, and one train state."""
        contents = _contents(state)
        digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
        digests = exchange((self._mesh_ranks, digest), self.group)
        # Stages of a pipeline save different tensors into one checkpoint.
        alike = [
            [k for k, entry in digests.items() if entry[0] == mesh]
            for mesh in {entry[0] for entry in digests.values()}
        ]
        if any(len({digests[k] for k in ranks}) > 1 for ranks in alike):
            everyone = exchange(contents, self.group)
            for ranks in alike:
                require_same_claims([everyone[k] for k in ranks], ranks)

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write this rank's chunks, then make the checkpoint appear; all ranks call it.

        group: to agree over; by default the group in which the save was planned.
        """
        group = group or self.group
        try:
            parts = gather(agree(self._write, group=group).value, group)
            # A rank that returned before the commit could start a run from a path that does not exist yet.
            agree(lambda: self._commit(parts), group=group)
        except BaseException as error:
            self.abort()
            # Errors of the ranks' own actions have other types: this one is gloo's.
            if group is not None and isinstance(error, RuntimeError):
                raise CheckpointError(
                    f"{self.path}: expected word from all ranks, got none from some: a rank has died, or the "
                    f"process group was destroyed before the save was complete ({error})"
                ) from error
            raise

    def abort(self) -> None:
        if self._directory is not None:
            self._directory.abort()

    def _write(self) -> Part:
        try:
            written = self._writer.write_data(self._final, self._planner).wait()
        except Exception as error:
            # When the operating system refuses a write, torch's archive writer raises another error about the position
            # in its file. And an error while writing to an open file does not contain the file's name.
            refused = _refusal_in(error)
            if refused is not None and (refused is not error or refused.filename is None):
                raise OSError(refused.errno, refused.strerror, str(self._temporary)) from error
            raise
        return self._planner.part(written, self._temporary, self._final)

    def _commit(self, parts: list[Part]) -> None:
        if self._directory is None:
            return
        assert self._metadata is not None
        self._writer.finish(self._metadata, [list(part.written) for part in parts])
        files = {name: file for part in parts for name, file in part.files.items()}
        for name, content in self._extras.files.items():
            (self._temporary / name).write_bytes(content)
        for name in (".metadata", *self._extras.files):
            files[name] = file_entry(self._temporary / name)
        chunks: dict[str, dict[Box, int]] = {}
        kinds: dict[str, ManifestTensor] = {}
        for part in parts:
            kinds |= part.tensors
            for name, tensor in part.tensors.items():
                chunks.setdefault(name, {}).update(tensor.chunks)
        tensors = {
            name: ManifestTensor(planned.dtype, planned.shape, chunks[name])
            for name, planned in kinds.items()
        }
        objects = {name: crc for part in parts for name, crc in part.objects.items()}
        manifest = Manifest("dcp", tensors, objects, files)
        (self._temporary / MANIFEST_FILE).write_bytes(render_manifest(manifest))
        self._directory.commit()
        self._extras.committed()


def _contents(state: Tree) -> dict[str, str]:
    """The values that ranks compare: dtype and shape of each tensor, by name, and values of the train state."""
    contents = {}
    for name, tensor in named_tensors(state):
        contents[name] = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        # Tensors under a mapping have no values before they are written.
        if name.startswith("train.") and not tensor.is_meta:
            value = (
                f"with checksum {array_checksum(_bytes_of(tensor)):08x}"
                if tensor.ndim
                else str(tensor.item())
            )
            contents[name] += f" {value}"
    return contents


@dataclass(frozen=True)
class Part:
    """What one rank wrote, for rank 0: positions of chunks for .metadata, checksums for the manifest."""

    written: list[WriteResult]
    tensors: Mapping[str, ManifestTensor] = field(default_factory=dict)
    objects: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, ManifestFile] = field(default_factory=dict)


class ChunkPlanner(dcp.DefaultSavePlanner):
    """Copies the chunks that this rank writes to host memory if asked to, and records checksums of written chunks."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}
        self._crcs: dict[MetadataIndex, int] = {}
        self.copied_bytes = 0

    def check(self, plan: SavePlan) -> None:
        """ValueError, with the name, for a tensor whose dtype no reader of this package knows."""
        for item in plan.items:
            if item.tensor_data is not None:
                try:
                    dtype_from_name(_dtype_of(item))
                except CheckpointError as error:
                    raise ValueError(f"{item.index.fqn}: {error}") from error

    def copy(self, plan: SavePlan) -> None:
        for item in plan.items:
            value = super().resolve_data(item)
            if not isinstance(value, torch.Tensor):
                self._crcs[item.index] = object_checksum(self.lookup_object(item.index))
            else:
                value = _own_host_copy(value)
                self.copied_bytes += value.nbytes
            self._copies[item.index] = value
        # Live tensors may now be freed.
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        # A copy is released once it is written.
        copied = self._copies.pop(index, None)
        value = super().resolve_data(write_item) if copied is None else copied
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            self._crcs[index] = array_checksum(_bytes_of(value))
        elif copied is None:
            self._crcs[index] = object_checksum(self.lookup_object(index))
        return value

    def part(self, written: list[WriteResult], directory: Path, plan: SavePlan) -> Part:
        """The manifest's entries of this rank's chunks, from the files to which they were written."""
        results = {result.index: result for result in written}
        tensors: dict[str, tuple[str, tuple[int, ...], dict[Box, int]]] = {}
        objects: dict[str, int] = {}
        extents: dict[str, list[SavedChunk]] = {}
        for item in plan.items:
            extent = results[item.index].storage_data
            held = extents.setdefault(extent.relative_path, [])
            if item.tensor_data is None:
                objects[item.index.fqn] = self._crcs[item.index]
                continue
            box = Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
            shape = tuple(item.tensor_data.size)
            chunks = tensors.setdefault(item.index.fqn, (_dtype_of(item), shape, {}))[2]
            chunks[box] = self._crcs[item.index]
            nbytes = box.numel * item.tensor_data.properties.dtype.itemsize
            held.append(SavedChunk(extent.offset, extent.length, nbytes))
        return Part(
            written,
            {name: ManifestTensor(*entry) for name, entry in tensors.items()},
            objects,
            {name: data_file_entry(directory / name, held) for name, held in extents.items()},
        )


def _refusal_in(error: BaseException) -> OSError | None:
    """The operating system's error, found in ``error`` and the errors that caused it."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError) and chain.errno is not None:
            return chain
        chain = chain.__cause__ or chain.__context__
    return None


def _dtype_of(item: WriteItem) -> str:
    assert item.tensor_data is not None
    return str(item.tensor_data.properties.dtype).removeprefix("torch.")


def _own_host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory with the strides that PyTorch's writer would store."""
    tensor = tensor.detach()
    copy = tensor.clone() if tensor.is_cpu else tensor.cpu()
    return copy if copy.untyped_storage().size() == copy.nbytes else copy.clone()


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The elements in row-major order, as bytes, because torch and NumPy share no names of small floats."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


class SharedDirectoryWriter(FileSystemWriter):
    """Writes into a directory that rank 0 made, one file per rank, and records the checkpoint's name but no path."""

    def __init__(self, directory: str | os.PathLike[str], name: str) -> None:
        super().__init__(directory, sync_files=True)
        self._directory = Path(directory)
        self._name = name

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # torch would create the directory, and ranks that share no file system would each write part of a checkpoint.
        if not self._directory.is_dir():
            raise FileNotFoundError(
                f"expected {self._directory}, which rank 0 made, found nothing: all ranks must share a file system"
            )
        return super().prepare_local_plan(plan)

    def storage_meta(self) -> StorageMeta:
        # torch would record the temporary directory's path.
        return StorageMeta(checkpoint_id=self._name, save_id=self.save_id)
