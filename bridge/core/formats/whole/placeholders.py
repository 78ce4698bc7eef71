"""Checkpoints of Orbax and flax before 2024, and of T5X: a tree in msgpack, and a zarr folder for each array.

old/checkpoint                        {"params": {"kernel": "PLACEHOLDER://params.kernel"}, "step": 7}
                                      of T5X: {"driver": "zarr", "kvstore": {"path": "target.kernel"}, ...}
old/params.kernel/.zarray, 0.0, 0.1   the array
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bridge.core.formats.flax_msgpack.reader import MsgpackReader
from bridge.core.formats.orbax.reader import OrbaxReader
from bridge.core.formats.orbax.tree import Tree
from bridge.core.formats.tensors.base import Box, TreePath
from bridge.core.formats.tensors.wrapping import AlteredReader
from bridge.core.formats.whole.read_only import TREE_OF_PLACEHOLDERS


def open_msgpack(path: Path, verify: bool) -> MsgpackReader | PlaceholdersReader:
    """The reader for msgpack at ``path``, with the arrays that lie in folders next to the file."""
    tree = path / TREE_OF_PLACEHOLDERS
    reader = MsgpackReader(tree if tree.is_file() else path)
    if not reader.elsewhere:
        return reader
    folder = path if path.is_dir() else path.parent
    try:
        return PlaceholdersReader(reader, _ZarrFolders(folder, reader.elsewhere, verify))
    except BaseException:
        reader.close()
        raise


class PlaceholdersReader(AlteredReader):
    """The tree of a file with its arrays from ``arrays``; see `CheckpointReader`. Closing it closes both."""

    def __init__(self, tree: MsgpackReader, arrays: OrbaxReader) -> None:
        super().__init__(tree)
        self._arrays, self.path = arrays, arrays.path
        self.tensors = {**tree.tensors, **arrays.tensors}

    def files(self) -> Sequence[Path]:
        """The file with the tree, and the files of all arrays."""
        return (*self._reader.files(), *self._arrays.files())

    @property
    def left_alone(self) -> Mapping[str, str]:
        """Folders of arrays that the file does not name."""
        return dict.fromkeys(self._arrays.left_alone, f"an array that {TREE_OF_PLACEHOLDERS} does not name")

    def checksummed(self, name: str) -> bool:
        """Never: neither format has checksums."""
        return False

    def close(self) -> None:
        super().close()
        self._arrays.close()

    def _own(self, name: str) -> str | None:
        return None if name in self._arrays.tensors else name

    def _made(self, name: str, box: Box | None) -> np.ndarray:
        return self._arrays.read(name, box)


class _ZarrFolders(OrbaxReader):
    """The arrays of an old checkpoint, as an item of Orbax without a tree. folders: path and folder by name."""

    def __init__(self, path: Path, folders: Mapping[str, tuple[TreePath, str]], verify: bool) -> None:
        self._folders = dict(folders.values())
        super().__init__(path, verify=verify)

    def _find_item(self) -> Path:
        return self.path

    def _read_tree(self) -> Tree:
        return Tree(tuple(self._folders), (), {}, {}, False, False, self._folders)

    def files(self) -> Sequence[Path]:
        """The files of the arrays."""
        starts = tuple(f"{self.path / folder}/" for folder in self._folders.values())
        return [file for file in super().files() if str(file).startswith(starts)]
