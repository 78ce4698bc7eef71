"""Which files make up a model that is one file, or several with an index, in a format whose files end in some way.

weights.pt                               one file, whatever its name
model/pytorch_model.bin                  the usual name, or the only such file of the directory
model/pytorch_model.bin.index.json       Hugging Face shards: the index says which file holds which tensor
     /pytorch_model-00001-of-00002.bin
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.formats.base import CheckpointError
from bridge.formats.files.weight_index import INDEX_END, read_weight_map

_SHOWN = 5


@dataclass(frozen=True)
class ModelFiles:
    """The files of a checkpoint, all in one directory. weight_map: the index's, index: its name; None without one."""

    directory: Path
    names: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None
    index: str | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The index and the files."""
        return tuple(self.directory / name for name in (*((self.index,) if self.index else ()), *self.names))


@dataclass(frozen=True)
class FileKind:
    """How the files of a format are named. ends: of their names. usual: names that come before others. beside: names
    of other things that programs write beside a model in such files."""

    ends: tuple[str, ...]
    usual: tuple[str, ...] = ()
    beside: re.Pattern[str] | None = None

    def is_one(self, path: Path) -> bool:
        """Whether a file, or an index of such files, or a directory with one, is named so."""
        if path.is_dir():
            return bool(self._candidates(path))
        return path.name.endswith((*self.ends, *(end + INDEX_END for end in self.ends)))

    def find(self, path: Path) -> ModelFiles:
        """The files of the checkpoint at `path`: a file, an index or a directory. CheckpointError when several fit."""
        if not path.is_dir():
            return _files_of(path)
        found = self._candidates(path)
        indexes = [name for name in found if name.endswith(INDEX_END)]
        usual = next((n for name in self.usual for n in (name + INDEX_END, name) if n in found), None)
        chosen = usual or (indexes[0] if len(indexes) == 1 else found[0] if len(found) == 1 else None)
        if chosen is None:
            raise CheckpointError(
                f"{path}: expected one file of weights, found {', '.join(found[:_SHOWN]) or 'none'}"
                f"{', ...' if len(found) > _SHOWN else ''}: give the path of one of them"
            )
        return _files_of(path / chosen)

    def _candidates(self, directory: Path) -> list[str]:
        ends = (*self.ends, *(end + INDEX_END for end in self.ends))
        names = sorted(child.name for child in directory.iterdir() if child.name.endswith(ends))
        return [name for name in names if self.beside is None or self.beside.fullmatch(name) is None]


def indexed_files(index: Path) -> ModelFiles:
    """The files that an index names. CheckpointError when it is malformed or names anything but files beside it."""
    weight_map = read_weight_map(index)
    return ModelFiles(index.parent, tuple(dict.fromkeys(weight_map.values())), weight_map, index.name)


def _files_of(file: Path) -> ModelFiles:
    return indexed_files(file) if file.name.endswith(INDEX_END) else ModelFiles(file.parent, (file.name,))
