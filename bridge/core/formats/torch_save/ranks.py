"""Files of torch.save that each rank has written, with their pieces joined to whole tensors.

verl's, SkyRL's and others' model_world_size_2_rank_0.pt, ..._rank_1.pt: state dicts of FSDP2, whose DTensors say where
each piece belongs. Everything else must be the same in all files, since nothing says how to join it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from bridge.core.formats.files.manifest import object_checksum
from bridge.core.formats.reading.single_chunk import SingleChunkReader
from bridge.core.formats.reading.source_files import FileArray
from bridge.core.formats.tensors.base import Box, CheckpointError, TensorInfo, UnreadableValue
from bridge.core.formats.tensors.boxes import check_coverage
from bridge.core.formats.tensors.wrapping import ReadWhenAsked
from bridge.core.formats.torch_save.deepspeed import DeepSpeedReader, holds_zero_shards
from bridge.core.formats.torch_save.files import TORCH_FILES
from bridge.core.formats.torch_save.reader import PIECE, TorchSaveReader
from bridge.core.text import counted, first_of


def open_torch_save(path: Path, verify: bool) -> TorchSaveReader | RanksReader | DeepSpeedReader:
    """The reader for torch.save's files at `path`: of one model, or of the pieces of several ranks."""
    if holds_zero_shards(path):
        return DeepSpeedReader(path, verify)
    return (RanksReader if TORCH_FILES.find(path).of_ranks else TorchSaveReader)(path, verify)


class RanksReader(SingleChunkReader):
    """The files of all ranks as one checkpoint, opened for reading; see `CheckpointReader` and `TorchSaveReader`.

    A chunk is one rank's piece. CheckpointError for pieces that do not make up their tensor, and for tensors that are
    not DTensors and differ.
    """

    format = "torch"

    def __init__(self, path: Path, verify: bool = True) -> None:
        super().__init__(path, TORCH_FILES)
        self._ranks: list[TorchSaveReader] = []
        self._pieces: dict[str, list[tuple[Box, TorchSaveReader]]] = {}
        self._copies: list[tuple[str, TorchSaveReader]] = []
        try:
            self._ranks += (TorchSaveReader(file, verify) for file in self._fileset.paths)
            self._join()
        except BaseException:
            self.close()
            raise
        self._object_paths |= {
            n: path for rank in reversed(self._ranks) for n, path in rank.object_paths.items()
        }

    @property
    def objects(self) -> Mapping[str, object]:
        """Values that are not tensors, by name. UnreadableValue from a look-up if ranks have different values."""
        return ReadWhenAsked(self.object_paths, self._object)

    def checksummed(self, name: str) -> bool:
        """Whether each piece's storage has a CRC-32, which reading verifies."""
        return name not in self._unreadable and all(rank.checksummed(name) for _, rank in self._pieces[name])

    def damaged_copies(self) -> Iterator[tuple[str, CheckpointError]]:
        """Tensors with a damaged piece that another file has intact, and what is wrong with the piece."""
        for name, rank in self._copies:
            try:
                rank.check_stored(name)
            except CheckpointError as error:
                yield name, error

    def close(self) -> None:
        """Release the files. Arrays already read stay valid."""
        super().close()
        for rank in self._ranks:
            rank.close()

    def _in_place(self, info: TensorInfo) -> bool:
        return False

    def _part(self, info: TensorInfo, box: Box) -> FileArray:
        raise AssertionError("no tensor is in place")

    def _fill(self, info: TensorInfo, box: Box, target: np.ndarray) -> None:
        for whole, rank in self._pieces[info.name]:
            if (common := whole.intersect(box)) is not None:
                begin = tuple(a - b for a, b in zip(common.offsets, whole.offsets, strict=True))
                rank.read_stored(info.name, Box(begin, common.sizes), target[common.slices(box)])

    def _object(self, name: str) -> object:
        having = [rank for rank in self._ranks if name in rank.object_paths]
        value = having[0].objects[name]
        for rank in having[1:]:
            if object_checksum(rank.objects[name]) != object_checksum(value):
                reason = f"different values in {rank.path.name} and {having[0].path.name}"
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
                if placed.setdefault(box, rank) is rank:
                    continue
                if not rank.holds_the_same(name, placed[box]):
                    differing.append(name)
                    break
                self._copies.append((name, rank))
            else:
                check_coverage(first.shape, placed, f"{self.path}: tensor {name!r:.200}")
            self._pieces[name] = [(box, rank) for box, rank in placed.items() if box.numel]
            chunks = tuple(box for box, _ in self._pieces[name])
            self._tensors[name] = TensorInfo(name, first.path, first.shape, first.dtype, chunks)
        differing += [
            name for name in self._tensors if any(name in rank.object_paths for rank in self._ranks)
        ]
        if differing:
            raise CheckpointError(
                f"{self.path}: expected files of ranks whose pieces are DTensors, found "
                f"{counted(len(differing), 'tensor')} not alike on all ranks, and nothing that says how to join "
                f"them: {first_of(differing)}; join these files with the program that wrote them, or save with "
                "torch.distributed.checkpoint"
            )

    def _boxes(self, name: str, whole: Box, having: Sequence[TorchSaveReader]) -> list[Box] | None:
        """Each rank's piece of a tensor, the whole tensor if it is not a DTensor; None if that is not known."""
        pieces = [rank.pieces.get(name) for rank in having]
        mesh = [max(axis) + 1 for axis in zip(*(p.coordinate for p in pieces if p is not None), strict=False)]
        boxes = [whole if piece is None else piece.box(mesh) for piece in pieces]
        known = [
            box
            for box, rank in zip(boxes, having, strict=True)
            if box is not None and box.sizes == rank.stored_shape(name)
        ]
        return known if len(known) == len(boxes) else None
