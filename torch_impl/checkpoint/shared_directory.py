"""Writing a DCP checkpoint into one directory that all ranks share."""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


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
