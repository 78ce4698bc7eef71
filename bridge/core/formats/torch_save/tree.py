"""The leaves of an object that torch.save has pickled: tensors, NumPy arrays, and other values, each with its path.

Paths and names are those that DCP gives a state_dict (`torch.distributed.checkpoint.format_utils.torch_save_to_dcp`):
mappings are expanded, and so are lists that contain tensors or mappings; keys are text. Tuples with tensors, which DCP
keeps as one value, are expanded as well.

Each rank's file has a part of a DTensor. `Shard` cuts like `torch.chunk`: ceil(size / ranks) rows, with the last parts
smaller or empty. If several mesh axes cut one dimension, the first axis cuts first. But `_StridedShard`, which FSDP2
writes for a dimension that tensor parallelism has already cut, cuts the result of the later axes.

    model_world_size_2_rank_0.pt    0.weight: local (4, 5) of (7, 5), Shard(0) on a mesh of 2, coordinate 0  -> rows 0:4
    model_world_size_2_rank_1.pt    0.weight: local (3, 5) of (7, 5), Shard(0) on a mesh of 2, coordinate 1  -> rows 4:7
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bridge.core.formats.dcp.archive import REBUILD, REBUILD_UNTYPED
from bridge.core.formats.dcp.pickle_records import Call, Instance, Name, is_index
from bridge.core.formats.dcp.plain_values import (
    ARRAYS,
    REBUILDERS,
    array_of,
    described,
    is_pair,
    plain_from_pickle,
)
from bridge.core.formats.tensors.base import Box, CheckpointError, TreePath, UnreadableValue
from bridge.core.formats.tensors.leaves import TREE_PATH_KEYS, is_tree_path
from bridge.core.formats.tensors.plain import MAX_NODES

_PARAMETERS: Final = frozenset(
    {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
)
_FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"
_TENSOR_TYPES: Final = frozenset(
    {"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
)
META: Final = "torch._utils._rebuild_meta_tensor_no_storage"
_TENSORS: Final = frozenset({REBUILD, REBUILD_UNTYPED, META})
_MAX_DEPTH: Final = 64


def leaves(root: object, what: str) -> Iterator[tuple[TreePath, object]]:
    """Each leaf with its path: the Call of a tensor, an ndarray, or something else.

    CheckpointError, beginning with `what`, if the root is not a mapping or list, and if the tree is too deep or too
    large: a small pickle can describe a large tree by referring to one part many times.
    """
    if not isinstance(root, dict | list | tuple):
        raise CheckpointError(
            f"{what}: expected a state_dict, or a mapping of state_dicts, found {described(root)}: for a module save "
            "its state_dict(), for a tensor a dict with the tensor's name"
        )
    budget = MAX_NODES
    stack: list[tuple[TreePath, object]] = [((), root)]
    tree = _Tree(what)
    while stack:
        path, node = stack.pop()
        node = tree.unwrapped(node)
        below: list[tuple[str | int, object]] = []
        if isinstance(node, dict):
            if any(isinstance(key, Instance) for key in node):
                raise CheckpointError(f"{what}: expected keys that are text or numbers, found an object")
            below = [(str(key), value) for key, value in node.items()]
        elif isinstance(node, list | tuple) and (not path or tree.is_gone_into(node)):
            below = list(enumerate(node))
        budget -= len(below)
        if budget < 0 or len(path) > _MAX_DEPTH:
            raise CheckpointError(
                f"{what}: expected at most {MAX_NODES} entries, nested {_MAX_DEPTH} deep, found more"
            )
        if below:
            stack += [((*path, key), value) for key, value in reversed(below)]
        elif path:
            if not is_tree_path(path):
                raise CheckpointError(f"{what}: expected a path of {TREE_PATH_KEYS}, got {path!r:.80}")
            yield path, node


def is_tensor(node: object) -> bool:
    """Whether this leaf is the description of a strided tensor, or of a tensor on the meta device."""
    return isinstance(node, Call) and node.name in _TENSORS


def value_of(node: object, what: str) -> object:
    """A leaf as a plain value. For other leaves UnreadableValue, beginning with `what`, which names the leaf's type."""
    if isinstance(node, Name) and node.dotted.startswith("torch."):
        return node.dotted
    match node:
        case Call(name=name) if name.startswith(REBUILDERS):
            reason = described(node)
            raise UnreadableValue(
                f"{what}: expected a strided tensor, found {reason}", reason, holds_tensors=True
            )
    return plain_from_pickle(node, what)


class _Tree:
    """Classifies nodes. Each node is inspected once: a pickle may refer to one node a million times."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._arrays: dict[int, np.ndarray | None] = {}
        self._gone_into: dict[int, bool] = {}

    def unwrapped(self, node: object) -> object:
        """A parameter's or buffer's tensor, a NumPy array, the dict of an ordered dict; other nodes unchanged."""
        for _ in range(4):
            match node:
                case Call(name=name, args=(tensor, *_)) if name in _PARAMETERS:
                    node = tensor
                case Call(
                    name=name, args=(Name(dotted=function), Name(dotted=class_name), tuple(args), *_)
                ) if name == _FROM_TYPE and class_name in _TENSOR_TYPES:
                    node = Call(function, args)
                case Call(name="collections.OrderedDict", args=(list(pairs),)) if all(map(is_pair, pairs)):
                    return dict(pairs)
                case Call(name=name) if name in ARRAYS:
                    if id(node) not in self._arrays:
                        self._arrays[id(node)] = array_of(node)
                    array = self._arrays[id(node)]
                    return node if array is None else array
                case _:
                    break
        return node

    def is_gone_into(self, node: list[object] | tuple[object, ...], depth: int = 0) -> bool:
        """Whether a list contains mappings or tensors, at any depth."""
        if id(node) not in self._gone_into:
            if depth > _MAX_DEPTH:
                raise CheckpointError(
                    f"{self._what}: expected lists nested {_MAX_DEPTH} deep at most, found more"
                )
            self._gone_into[id(node)] = False  # for a list that contains itself
            self._gone_into[id(node)] = any(self._counts(self.unwrapped(entry), depth) for entry in node)
        return self._gone_into[id(node)]

    def _counts(self, entry: object, depth: int) -> bool:
        if isinstance(entry, list | tuple):
            return self.is_gone_into(entry, depth + 1)
        rebuilt = isinstance(entry, Call) and entry.name.startswith(REBUILDERS)
        return rebuilt or isinstance(entry, dict | np.ndarray)


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
    """One file's piece of a DTensor. shape: of the whole tensor. local: the description of the elements in the file.

    placements, coordinate: by mesh axis.
    """

    shape: tuple[int, ...]
    local: Call
    placements: tuple[Placement, ...]
    coordinate: tuple[int, ...]

    def box(self, mesh: Sequence[int]) -> Box | None:
        """Where it belongs, on a mesh of these sizes; None if that is not known."""
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
    """The piece that a pickled DTensor describes; None for anything else, and for unknown placements."""
    match node:
        case Call(
            name=name,
            args=(
                Name(dotted=function),
                Name(dotted=class_name),
                tuple(described_by),
                (_, {"_local_tensor": Call() as local, "_spec": spec}),
            ),
        ) if name == _REBUILD and class_name in _CLASSES and len(described_by) > 2:
            # On the meta device the size comes after the dtype, elsewhere after the class and the dtype.
            shape = described_by[1 if function == META else 2]
            if not is_index(shape):
                return None
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
