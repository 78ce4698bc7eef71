"""Which files make up a model that is one file, or several with an index, in a format whose files end in some way.

weights.pt                               one file, whatever its name
model/pytorch_model.bin                  the usual name, or the only such file of the directory
model/pytorch_model.bin.index.json       Hugging Face shards: the index says which file holds which tensor
     /pytorch_model-00001-of-00002.bin   without an index: all numbers must be there
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.core.formats.reading.numbered_files import NumberedFiles, numbered_sets
from bridge.core.formats.reading.weight_index import INDEX_END, read_weight_map
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.text import first_of


@dataclass(frozen=True)
class ModelFiles:
    """The files of a checkpoint, all in one directory.

    weight_map: the index's, index: its name; None without one. of_ranks: whether each file has pieces of the tensors.
    """

    directory: Path
    names: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None
    index: str | None = None
    of_ranks: bool = False

    @property
    def paths(self) -> tuple[Path, ...]:
        """The index and the files."""
        return tuple(self.directory / name for name in (*((self.index,) if self.index else ()), *self.names))


@dataclass(frozen=True)
class FileKind:
    """How the files of a format are named.

    ends: of their names. usual: names of files and indexes that come before others, in this order. beside: names of
    other things that programs write beside a model in such files. rank: what begins the name of a file that each rank
    wrote of its own pieces, where the format says in each where these belong. joins_ranks: whether files that only
    their names say to be of several ranks are joined, too.
    """

    ends: tuple[str, ...]
    usual: tuple[str, ...] = ()
    beside: re.Pattern[str] | None = None
    rank: re.Pattern[str] | None = None
    joins_ranks: bool = False

    def is_one(self, path: Path) -> bool:
        """Whether a file, or an index of such files, or a directory with one, is named so."""
        if path.is_dir():
            return bool(self._candidates(path))
        return path.name.endswith((*self.ends, *(end + INDEX_END for end in self.ends)))

    def find(self, path: Path) -> ModelFiles:
        """The files of the checkpoint at `path`: a file, an index or a directory.

        CheckpointError when several could be meant, when names are numbered and not all of the numbers are there, and
        when an index is malformed or names anything but files beside it.
        """
        if not path.is_dir():
            return (
                indexed_files(path)
                if path.name.endswith(INDEX_END)
                else ModelFiles(path.parent, (path.name,))
            )
        found = self._candidates(path)
        indexes = [name for name in found if name.endswith(INDEX_END)]
        files = [name for name in found if not name.endswith(INDEX_END)]
        usual = next((name for name in self.usual if name in found), None)
        if usual in files and usual + INDEX_END in indexes:
            # The index is obeyed where it is of this file, which else comes first, as in `from_pretrained`.
            listed = indexed_files(path / (usual + INDEX_END))
            return listed if listed.names == (usual,) else ModelFiles(path, (usual,))
        if usual in files:
            return ModelFiles(path, (usual,))
        if usual is not None or len(indexes) == 1:
            return indexed_files(path / (usual or indexes[0]))
        return self._without_index(path, found, files)

    def _without_index(self, path: Path, candidates: Sequence[str], files: list[str]) -> ModelFiles:
        if files == candidates and self.rank is not None and all(map(self.rank.match, files)):
            self._require_all(path, numbered_sets({self.rank.sub("", name): None for name in files}))
            return ModelFiles(path, tuple(files))
        sets = numbered_sets(files)
        if files == candidates and len(sets) == 1 and len(sets[0].names) == len(files):
            self._require_all(path, sets)
            several = sets[0].of_ranks and len(files) > 1
            if self.joins_ranks or not several:
                return ModelFiles(path, sets[0].names, of_ranks=several)
        elif len(candidates) == 1 and files:
            return ModelFiles(path, (files[0],))
        shown = first_of(candidates) or "none"
        if any(numbered.of_ranks and len(numbered.names) > 1 for numbered in sets):
            raise CheckpointError(
                f"{path}: expected one file of weights, found files of several ranks, {shown}: each has a piece of the "
                "same tensors, and these are not joined here; join them with the program that wrote them, or save "
                "with torch.distributed.checkpoint"
            )
        raise CheckpointError(
            f"{path}: expected one file of weights, found {shown}: "
            f"{'give the path of one of them' if candidates else 'is this the directory?'}"
        )

    def _require_all(self, path: Path, sets: Sequence[NumberedFiles]) -> None:
        for numbered in sets:
            if not numbered.complete:
                raise CheckpointError(
                    f"{path}: expected every file that the numbers in the names call for, found "
                    f"{first_of(numbered.names)}, but {numbered.problem}: fetch all of them, or give "
                    "the path of one file to take what is in it alone"
                )

    def _candidates(self, directory: Path) -> list[str]:
        ends = (*self.ends, *(end + INDEX_END for end in self.ends))
        names = sorted(child.name for child in directory.iterdir() if child.name.endswith(ends))
        return [name for name in names if self.beside is None or self.beside.fullmatch(name) is None]


def indexed_files(index: Path) -> ModelFiles:
    """The files that an index names. CheckpointError when it is malformed or names anything but files beside it."""
    weight_map = read_weight_map(index)
    return ModelFiles(index.parent, tuple(dict.fromkeys(weight_map.values())), weight_map, index.name)
