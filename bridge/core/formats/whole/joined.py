"""Several checkpoints read as one tree: each is what is below one key of it.

step_10/params/_METADATA       kernel, bias         params/kernel, params/bias
step_10/opt_state/_METADATA    0/mu/kernel          opt_state/0/mu/kernel
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType

import numpy as np

from bridge.core.formats.tensors.base import (
    Box,
    CheckpointError,
    CheckpointReader,
    Checksums,
    Loan,
    TensorInfo,
    TreePath,
    Wanted,
    unreadable,
)
from bridge.core.formats.tensors.leaf_kinds import kinds_of
from bridge.core.formats.tensors.leaf_names import separator_of
from bridge.core.formats.tensors.wrapping import ClosedAtEnd, ReadWhenAsked


class JoinedReader(ClosedAtEnd):
    """The checkpoints of one directory, by the key that each is below; see `CheckpointReader`. Closing it closes them.

    Names are keys and names of parts, joined as in the format.
    """

    def __init__(self, path: Path | str, format: str, parts: Mapping[str, CheckpointReader]) -> None:
        self.path, self.format = path, format
        self.parts = parts
        separator = separator_of(format)
        places: dict[str, tuple[CheckpointReader, str]] = {}
        tensors: dict[str, TensorInfo] = {}
        object_paths: dict[str, TreePath] = {}
        kinds: dict[str, str] = {}
        closed: dict[str, str] = {}
        for key, part in parts.items():
            for name, info in part.tensors.items():
                joined = f"{key}{separator}{name}"
                places[joined] = part, name
                tensors[joined] = TensorInfo(joined, (key, *info.path), info.shape, info.dtype, info.chunks)
            for name, below in part.object_paths.items():
                places[f"{key}{separator}{name}"] = part, name
                object_paths[f"{key}{separator}{name}"] = (key, *below)
            kinds |= {f"{key}{separator}{name}": kind for name, kind in kinds_of(part).items()}
            closed |= {f"{key}{separator}{name}": why for name, why in unreadable(part).items()}
        self._places = places
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.object_paths: Mapping[str, TreePath] = MappingProxyType(object_paths)
        self.kinds: Mapping[str, str] = MappingProxyType(kinds)
        self.unreadable: Mapping[str, str] = MappingProxyType(closed)
        self.objects: Mapping[str, object] = ReadWhenAsked(object_paths, self._object)

    def replaced(self, change: Callable[[CheckpointReader], CheckpointReader]) -> JoinedReader:
        """The same tree of parts that ``change`` makes of these."""
        return JoinedReader(self.path, self.format, {key: change(part) for key, part in self.parts.items()})

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block of a tensor; see `CheckpointReader.read`."""
        part, own = self._places[name]
        return part.read(own, box)

    def lend(self, name: str, box: Box, offset: int = 0) -> Loan | None:
        """One block where it is in the file; see `CheckpointReader.lend`."""
        part, own = self._places[name]
        return part.lend(own, box, offset)

    def read_into(self, wanted: Sequence[Wanted]) -> Sequence[Checksums | None]:
        """All of each of these small tensors into memory; see `CheckpointReader.read_into`."""
        found: list[Checksums | None] = []
        places = [(*self._places[name], target) for name, target in wanted]
        for part, run in itertools.groupby(places, itemgetter(0)):
            found += part.read_into([(own, target) for _, own, target in run])
        return found

    def files(self) -> Sequence[Path]:
        """Those of all parts."""
        return tuple(file for part in self.parts.values() for file in part.files())

    def checksummed(self, name: str) -> bool:
        """Whether every chunk of a tensor has a checksum that reading verifies."""
        part, own = self._places[name]
        says: Callable[[str], bool] | None = getattr(part, "checksummed", None)
        return says is not None and says(own)

    def close(self) -> None:
        """Release the files. Arrays already read stay valid."""
        for part in self.parts.values():
            part.close()

    def _object(self, name: str) -> object:
        part, own = self._places[name]
        return part.objects[own]


def require_one_tree(path: Path | str, keys: Sequence[str]) -> None:
    """CheckpointError for keys that are there twice: they could not be told apart."""
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise CheckpointError(f"{path}: expected each item once, got {', '.join(twice)} twice (--item)")
