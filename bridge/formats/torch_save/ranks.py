"""Files of torch.save that each rank has written, joined to the tensors that they are pieces of.

verl's, SkyRL's and others' model_world_size_2_rank_0.pt, ..._rank_1.pt: state dicts of FSDP2, whose DTensors say where
each piece belongs. What is no DTensor must be the same in all files, or nothing says how to join it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from bridge.formats.arrays import as_integers
from bridge.formats.base import (
    Box,
    CheckpointError,
    TensorInfo,
    TreePath,
    UnreadableValue,
    Wanted,
    require_tensor,
)
from bridge.formats.coverage import check_coverage
from bridge.formats.files.boxes import array_for, box_of
from bridge.formats.files.manifest import object_checksum
from bridge.formats.files.model_files import ModelFiles
from bridge.formats.torch_save.files import TORCH_FILES
from bridge.formats.torch_save.reader import PIECE, TorchSaveReader
from bridge.formats.wrapping import ClosedAtEnd, ReadWhenAsked

_SHOWN = 5


def open_torch_save(path: Path, verify: bool) -> TorchSaveReader | RanksReader:
    """The reader of what torch.save wrote at `path`: of one model, or of the pieces of several ranks."""
    files = TORCH_FILES.find(path)
    return RanksReader(path, files, verify) if files.of_ranks else TorchSaveReader(path, verify)


class RanksReader(ClosedAtEnd):
    """The files of all ranks as one checkpoint, opened for reading; see `CheckpointReader` and `TorchSaveReader`.

    CheckpointError for pieces that do not make up their tensor, and for tensors that are no DTensors and differ.
    """

    format = "torch"

    def __init__(self, path: Path, files: ModelFiles, verify: bool) -> None:
        self.path = path
        self._paths = files.paths
        self._ranks: list[TorchSaveReader] = []
        self._pieces: dict[str, list[tuple[Box, TorchSaveReader]]] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self._unreadable: dict[str, str] = {}
        try:
            self._ranks += (TorchSaveReader(file, verify) for file in files.paths)
            self._join()
        except BaseException:
            self.close()
            raise
        self.unreadable: Mapping[str, str] = MappingProxyType(self._unreadable)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, in the order of the first rank's file."""
        return MappingProxyType(self._tensors)

    @property
    def objects(self) -> Mapping[str, object]:
        """Values that are not tensors, by name. UnreadableValue from a look-up where ranks have different ones."""
        return ReadWhenAsked(self.object_paths, self._object)

    @property
    def object_paths(self) -> Mapping[str, TreePath]:
        """The tree path of every object, by name."""
        return {name: path for rank in reversed(self._ranks) for name, path in rank.object_paths.items()}

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block (default: all) of a tensor; see `CheckpointReader.read`."""
        info = self._tensors[name]
        require_tensor(self, name)
        box = box_of(info, box)
        result = array_for(info, box, self.path)
        for whole, rank in self._pieces[name]:
            if (common := whole.intersect(box)) is not None:
                begin = tuple(a - b for a, b in zip(common.offsets, whole.offsets, strict=True))
                piece = rank.read_stored(name, Box(begin, common.sizes))
                as_integers(result[common.slices(box)])[...] = as_integers(piece)
        return result

    def lend(self, name: str, box: Box) -> None:
        """Never: a block may be in several files."""

    def read_into(self, wanted: Sequence[Wanted]) -> Sequence[None]:
        """None of them; see `SingleChunkReader.read_into`."""
        return [None] * len(wanted)

    def files(self) -> Sequence[Path]:
        """The files of all ranks."""
        return self._paths

    def checksummed(self, name: str) -> bool:
        """Whether each piece's storage has a CRC-32, which reading verifies."""
        return name not in self._unreadable and all(rank.checksummed(name) for _, rank in self._pieces[name])

    def close(self) -> None:
        """Release the files. Arrays already read stay valid."""
        for rank in self._ranks:
            rank.close()

    def _object(self, name: str) -> object:
        having = [rank for rank in self._ranks if name in rank.object_paths]
        value = having[0].objects[name]
        for rank in having[1:]:
            if object_checksum(rank.objects[name]) != object_checksum(value):
                reason = f"another value in {rank.path.name} than in {having[0].path.name}"
                raise UnreadableValue(
                    f"{self.path}: object {name!r:.200}: {reason}", reason, holds_tensors=False
                )
        return value

    def _join(self) -> None:
        differing: list[str] = []
        for name in dict.fromkeys(name for rank in self._ranks for name in rank.tensors):
            having = [rank for rank in self._ranks if name in rank.tensors]
            first = having[0].tensors[name]
            whole = Box.whole(first.shape)
            if len({(rank.tensors[name].shape, rank.tensors[name].dtype) for rank in having}) > 1:
                differing.append(name)
                continue
            boxes = self._boxes(name, whole, having)
            reasons = (rank.unreadable.get(name) for rank in having)
            reason = next((reason for reason in reasons if reason not in (None, PIECE)), None)
            if boxes is None or reason is not None:
                self._unreadable[name] = reason or "a DTensor whose placements do not say what each rank has"
                self._tensors[name] = first
                continue
            placed: dict[Box, TorchSaveReader] = {}
            for box, rank in zip(boxes, having, strict=True):
                if placed.setdefault(box, rank) is not rank and not rank.holds_the_same(name, placed[box]):
                    differing.append(name)
                    break
            else:
                check_coverage(first.shape, placed, f"{self.path}: tensor {name!r:.200}")
            self._pieces[name] = [(box, rank) for box, rank in placed.items() if box.numel]
            chunks = tuple(box for box, _ in self._pieces[name])
            self._tensors[name] = TensorInfo(name, first.path, first.shape, first.dtype, chunks)
        differing += self._tensors.keys() & self.object_paths.keys()
        if differing:
            raise CheckpointError(
                f"{self.path}: expected files of ranks whose pieces are DTensors, found {len(differing)} tensors that "
                f"differ between ranks, and nothing that says how to join them: {', '.join(differing[:_SHOWN])}"
                f"{', ...' if len(differing) > _SHOWN else ''}; join these files with the program that wrote them, or "
                "save with torch.distributed.checkpoint"
            )

    def _boxes(self, name: str, whole: Box, having: Sequence[TorchSaveReader]) -> list[Box] | None:
        """What each rank has of a tensor, all of one that is no DTensor; None where that is not known."""
        pieces = [rank.pieces.get(name) for rank in having]
        mesh = [max(axis) + 1 for axis in zip(*(p.coordinate for p in pieces if p is not None), strict=False)]
        boxes = [whole if piece is None else piece.box(mesh) for piece in pieces]
        known = [
            box
            for box, rank in zip(boxes, having, strict=True)
            if box is not None and box.sizes == rank.stored_shape(name)
        ]
        return known if len(known) == len(boxes) else None
