"""DTensors that torch.save has pickled: what each rank's file has of a tensor, and where that belongs.

    model_world_size_2_rank_0.pt    0.weight: local (4, 5) of (7, 5), Shard(0) on a mesh of 2, coordinate 0  -> rows 0:4
    model_world_size_2_rank_1.pt    0.weight: local (3, 5) of (7, 5), Shard(0) on a mesh of 2, coordinate 1  -> rows 4:7

`Shard` cuts as `torch.chunk` does: pieces of ceil(size / ranks) rows, the last ones smaller or empty. Of mesh axes that
cut one dimension the first cuts first; but `_StridedShard`, which FSDP2 writes for a dimension that tensor parallelism
has cut before, cuts what the axes after it leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bridge.core.formats.dcp.pickle_records import Call, Instance, Name, is_index
from bridge.core.formats.tensors.base import Box

_REBUILD: Final = "torch._tensor._rebuild_from_type_v2"
_CLASSES: Final = frozenset({"torch.distributed.tensor.DTensor", "torch.distributed._tensor.api.DTensor"})
_MODULE: Final = "torch.distributed."


@dataclass(frozen=True)
class Placement:
    """How one axis of the mesh cuts a tensor. dim: None for replicas. factor: the split factor of a `_StridedShard`."""

    dim: int | None
    factor: int | None = None


@dataclass(frozen=True)
class LocalPiece:
    """What one file has of a DTensor. shape: of the whole. local: the description of the elements in the file.

    placements, coordinate: by axis of the mesh.
    """

    shape: tuple[int, ...]
    local: Call
    placements: tuple[Placement, ...]
    coordinate: tuple[int, ...]

    def box(self, mesh: Sequence[int]) -> Box | None:
        """Where it belongs, on a mesh of these sizes; None where that is not known."""
        if len(mesh) != len(self.placements):
            return None
        offsets, sizes = [0] * len(self.shape), [*self.shape]
        plain = [axis for axis, p in enumerate(self.placements) if p.dim is not None and p.factor is None]
        strided = [axis for axis, p in enumerate(self.placements) if p.factor is not None]
        for axis in strided:
            after = [other for other in plain if other > axis]
            dim, factor = self.placements[axis].dim, 1
            for other in after:
                factor *= mesh[other] if self.placements[other].dim == dim else 1
            if factor != self.placements[axis].factor or len(strided) > 1:
                return None
        for axis in (*plain, *strided):
            dim = self.placements[axis].dim
            if dim is None or not 0 <= dim < len(sizes):
                return None
            step = -(-sizes[dim] // mesh[axis])
            begin = min(self.coordinate[axis] * step, sizes[dim])
            offsets[dim] += begin
            sizes[dim] = min(step, sizes[dim] - begin)
        return Box(tuple(offsets), tuple(sizes))


def local_piece(node: object) -> LocalPiece | None:
    """The piece that a pickled DTensor describes; None for anything else, and for placements that are not known."""
    match node:
        case Call(
            name=name,
            args=(
                _,
                Name(dotted=class_name),
                (_, _, tuple(shape), *_),
                (_, {"_local_tensor": Call() as local, "_spec": spec}),
            ),
        ) if name == _REBUILD and class_name in _CLASSES and is_index(shape):
            pass
        case _:
            return None
    match spec:
        case Instance(
            state={"mesh": Instance(state={"_coordinate_on_dim": coordinate}), "placements": tuple(placed)}
        ) if isinstance(coordinate, list | tuple) and is_index(tuple(coordinate)):
            placements = [_placement(placement) for placement in placed]
            if None in placements or len(placements) != len(coordinate):
                return None
            return LocalPiece(shape, local, tuple(p for p in placements if p is not None), tuple(coordinate))
    return None


def _placement(node: object) -> Placement | None:
    if not isinstance(node, Instance) or not node.name.startswith(_MODULE):
        return None
    match node.name.rpartition(".")[2], node.state:
        case "Replicate", _:
            return Placement(None)
        case "Shard", {"dim": int(dim)}:
            return Placement(dim)
        case "_StridedShard", {"dim": int(dim), "split_factor": int(factor)}:
            return Placement(dim, factor)
    return None
