"""Parts of an Orbax checkpoint, each an OCDBT store `ocdbt.process_K`, and the checkpoint that joins them.

The joining process has number 0 and writes no chunk; parts are numbered from 1. The joint store refers to the files of
all parts, as when several processes of stock Orbax save one checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from bridge.core.formats.files.atomic import on_failure
from bridge.core.formats.files.journal import Attempt, WorkingDirectory
from bridge.core.formats.files.manifest import MANIFEST_FILE
from bridge.core.formats.files.part_files import Share
from bridge.core.formats.files.recorded_chunks import AtomicWriter
from bridge.core.formats.orbax.writer import OrbaxPart, OrbaxWriter, manifest_part
from bridge.core.formats.orbax.zarr.arrays import MANIFEST
from bridge.core.formats.orbax.zarr.chunks import process_store
from bridge.core.formats.tensors.base import CheckpointError


class OrbaxShare(AtomicWriter, OrbaxPart):
    """One part of a checkpoint, a directory at `path` with the store of process `share.number`."""

    format = "orbax"

    def __init__(self, path: str | os.PathLike[str], attempt: Attempt, share: Share) -> None:
        self._directory = WorkingDirectory(path, attempt)
        with on_failure(self._directory.abort):
            OrbaxPart.__init__(
                self,
                self._directory.path,
                self._directory.temporary,
                share.number,
                self._directory.journal,
                share,
            )

    def add_object(self, path: str | Sequence[str | int], value: object) -> None:
        """Does nothing: the process that joins the parts writes the objects."""

    def add_kinds(self, kinds: Mapping[str, str]) -> None:
        """Does nothing: the process that joins the parts notes them."""

    def _finish(self) -> None:
        self.finish()


class OrbaxJoin(OrbaxWriter):
    """The checkpoint made of some parts. Declare all tensors and objects, then commit; only the parts use `write`.

    After a kill at any moment, do the same again.
    """

    def __init__(
        self, path: str | os.PathLike[str], attempt: Attempt, parts: Sequence[Path], conversion: str
    ) -> None:
        super().__init__(path, process=0, attempt=attempt)
        self._parts = parts
        self._conversion = conversion

    def commit(self, processes: Sequence[int] = ()) -> None:
        """Join the stores of all parts, check that every chunk is there, and make the checkpoint appear."""
        with on_failure(self.abort):
            # The joint index and the manifest of a killed attempt.
            (self._item / MANIFEST).unlink(missing_ok=True)
            (self._item / MANIFEST_FILE).unlink(missing_ok=True)
            shutil.rmtree(self._item / "d", ignore_errors=True)
            for number, part in enumerate(self._parts, 1):
                store, target = process_store(part, number), process_store(self._item, number)
                if store.exists():
                    # A rename, not a copy: the joint index refers to the stores by path, and bytes stay where they are.
                    os.rename(store, target)
                elif not target.exists():
                    raise CheckpointError(
                        f"{store}: expected the store of a part, found none: remove {part}, and write this part again"
                    )
                # The commit removes the file that it reads, one of these two.
                shutil.copyfile(manifest_part(part, number), manifest_part(self._item, number))
        super().commit(range(len(self._parts) + 1))
