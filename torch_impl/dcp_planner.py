"""Saving uneven row shards through stock ``torch.distributed.checkpoint.save``.

Which box of a tensor a rank writes follows from the layout alone::

    rows of rank 1 = [2, 9) of a (3, 4, 5) stack        what the planner hands to DCP on rank 1

    [0]  .....   [1]  #####   [2]  #####                 chunk (0, 2, 0) + (1, 2, 5)
         .....        #####        .....                 chunk (1, 0, 0) + (1, 4, 5)
         #####        #####        .....                 chunk (2, 0, 0) + (1, 1, 5)
         #####        #####        .....

so no rank asks another. A rank without rows has no chunk. A tensor that several ranks hold whole is announced by
each, and DCP lets one of them write it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from torch_impl.dtensor import local_boxes, local_pieces
from torch_impl.rows import Box


class Piece(NamedTuple):
    """A box of a tensor in global coordinates, and this rank's live elements of it (a view of the box's shape)."""

    box: Box
    view: torch.Tensor


def pieces_of(tensor: torch.Tensor) -> tuple[Piece, ...]:
    """What this rank holds of a tensor: its row boxes if sharded, all of it if plain or replicated.

    A tensor without elements is one empty piece on every rank: without any it would vanish from a checkpoint.
    """
    if tensor.numel() == 0:
        local = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)
        return (Piece(_whole(tensor), local),)
    if not isinstance(tensor, DTensor):
        return (Piece(_whole(tensor), tensor.detach()),)
    return tuple(map(Piece, local_boxes(tensor), local_pieces(tensor)))


def _whole(tensor: torch.Tensor) -> Box:
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


class LayoutSavePlanner(DefaultSavePlanner):
    """A stock planner but for DTensors, whose chunks come from a table ``{flat name: pieces}`` instead of DTensor.

    Raises KeyError for a DTensor that the table lacks: a guessed range would save wrong rows without an error.
    """

    def __init__(self, pieces: Mapping[str, Sequence[Piece]]) -> None:
        super().__init__()
        self._pieces = pieces
        self._views: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        sharded = {name: v for name, v in self.state_dict.items() if isinstance(v, DTensor)}
        others = {name: v for name, v in self.state_dict.items() if name not in sharded}
        items = create_default_local_save_plan(others, self.is_coordinator).items
        for name, tensor in sharded.items():
            if name not in self._pieces:
                raise KeyError(f"{name}: expected an entry in the planner's table of row boxes, got none")
            items += [self._item(name, tensor, piece) for piece in self._pieces[name]]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def _item(self, name: str, tensor: DTensor, piece: Piece) -> WriteItem:
        offsets, sizes = map(torch.Size, piece.box)
        index = MetadataIndex(name, offsets)
        self._views[index] = piece.view
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, sizes),
            properties=TensorProperties.create_from_tensor(piece.view),
            size=tensor.size(),
        )
        return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> Any:
        view = self._views.get(write_item.index)
        return super().resolve_data(write_item) if view is None else view


class SharedDirectoryWriter(FileSystemWriter):
    """Writes into a directory that rank 0 made, one file a rank, and records the checkpoint's name but no path."""

    def __init__(self, directory: str | os.PathLike[str], name: str) -> None:
        super().__init__(directory, sync_files=True)
        self._directory = Path(directory)
        self._name = name

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # Stock code would create it, and ranks that share no file system would each write a part of a checkpoint.
        if not self._directory.is_dir():
            raise FileNotFoundError(
                f"expected {self._directory}, which rank 0 made, found nothing: all ranks must share a file system"
            )
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # Travels to the other ranks by pickle, which an exception with arguments of its own may not survive.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._name, save_id=self.save_id)
