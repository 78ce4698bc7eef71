"""For saving: a state tree under the other side of a mapping. For loading: a checkpoint under the model's side.

::

    rank 1: w13.weight rows [700, 1400)    ->   gate_proj.weight rows [700, 883)     (gate + up) m  ->  gate m, up m
                                                up_proj.weight   rows [0, 517)

Each rank translates the boxes that it holds. Nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from bridge.core.formats import Box, CheckpointReader, TreePath
from bridge.core.formats.tensors.base import TensorInfo, dtype_from_name
from bridge.core.mapping.plan.running import AnyMapping, LoadedAs, Move, RunState, SavedAs
from torch_impl.checkpoint.contents import (
    in_one_piece,
    model_tensors,
    optimizer_tensors,
    state_tree,
    tensor_of,
)
from torch_impl.checkpoint.moments import held_boxes
from torch_impl.dtensor.local import write_items

_Part = tuple[Move, torch.Tensor]
"""This rank's elements of a box of the checkpoint, and the live box that contains them."""


def mapped_tree(
    mapping: AnyMapping, model: nn.Module, optimizer: Optimizer | None, train: Mapping[str, Any] | None
) -> dict[str, Any]:
    """``state_tree`` under the other side of the mapping. Its tensors compute their elements when they are written.

    Raises ``ValueError`` as ``state_tree`` does, and ``CheckpointError`` if mapping and model do not fit.
    """
    leaves = _joined(state_tree(model, optimizer, train))
    tensors = {".".join(map(str, p)): t for p, t in leaves.items() if isinstance(t, torch.Tensor)}
    saved = SavedAs(_run_state(leaves, model), mapping, _config(model))
    parts: dict[str, list[_Part]] = {}
    for source, tensor in tensors.items():
        for box, piece in held_boxes(tensor):
            for move in saved.moves(source, box):
                parts.setdefault(move.name, []).append((move, piece))
    made: dict[TreePath, Any] = dict(saved.objects)
    for name, planned in saved.tensors.items():
        if isinstance(planned.content, np.ndarray):
            made[planned.path] = torch.from_numpy(planned.content.copy())
        else:
            dtype = getattr(torch, planned.dtype.name)
            made[planned.path] = MappedTensor(planned.shape, dtype, parts.get(name, []))
    return _tree(made)


def mapped_reader(
    reader: CheckpointReader, mapping: AnyMapping, model: nn.Module, optimizer: Optimizer | None
) -> LoadedAs:
    """The checkpoint, in any format, under the names and in the layouts of the model and its optimizer.

    Raises ``CheckpointError`` if mapping, model and checkpoint do not fit.
    """
    tree: dict[str, Any] = {"model": model_tensors(model)}
    if optimizer is not None:
        tree["optimizer"] = {"state": optimizer_tensors(model, optimizer)}
    return LoadedAs(reader, _run_state(_joined(tree), model), mapping, _config(model))


class MappedTensor(torch.Tensor):
    """This rank's boxes of a tensor of the checkpoint, made from the boxes that it holds of the model's tensors.

    A tensor with the checkpoint's shape and dtype that has no elements itself: only DCP's planners can use it.
    """

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[_Part]) -> MappedTensor:
        return torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(cls)

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[_Part]) -> None:
        self._parts = {move.box.offsets: (move, piece) for move, piece in parts}

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import TensorProperties

        # Without any box, a tensor without elements would be missing from the checkpoint.
        boxes = (
            [move.box for move, _ in self._parts.values()]
            if math.prod(self.shape)
            else [Box.whole(self.shape)]
        )
        return write_items(fqn, boxes, TensorProperties(dtype=self.dtype), self.shape)

    def __create_chunk_list__(self) -> list[Any]:
        raise TypeError("expected a tensor to load into, got one that exists only to plan a save")

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        if not math.prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype)
        if tuple(index.offset) not in self._parts:
            raise ValueError(f"{index.fqn}: no chunk at offset {tuple(index.offset)} on this rank")
        move, piece = self._parts[tuple(index.offset)]
        values = move.values(_array(piece))
        return tensor_of(values, self.dtype)


def _run_state(leaves: Mapping[TreePath, Any], model: nn.Module) -> RunState:
    by_name = {".".join(map(str, path)): (path, value) for path, value in leaves.items()}
    tensors: dict[str, TensorInfo] = {}
    values: dict[str, Any] = {}
    for name, (path, value) in by_name.items():
        if isinstance(value, torch.Tensor):
            dtype = dtype_from_name(str(value.dtype).removeprefix("torch."))
            tensors[name] = TensorInfo(name, path, tuple(value.shape), dtype, (Box.whole(value.shape),))
        else:
            values[name] = value

    def whole(name: str) -> np.ndarray | None:
        _, tensor = by_name[name]
        return None if isinstance(tensor, DTensor) else _array(tensor)

    paths = {name: by_name[name][0] for name in values}
    return RunState("dcp", f"the {type(model).__name__}", tensors, values, paths, whole)


def _config(model: nn.Module) -> Mapping[str, object]:
    """The fields of the config.json of a transformers model; empty for other models."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    fields = to_dict() if callable(to_dict) else {}
    return fields if isinstance(fields, Mapping) else {}


def _joined(tree: Mapping[str, Any]) -> dict[TreePath, Any]:
    """The leaves; tensors that are stored with remainders are replaced by float32 copies."""
    return {
        path: in_one_piece(value) if isinstance(value, torch.Tensor) else value
        for path, value in _leaves(tree)
    }


def _leaves(value: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    """Path and value of each value that DCP stores separately; only lists with mappings or tensors are taken apart."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(item, (Mapping, torch.Tensor)) for item in value):
        for position, inner in enumerate(value):
            yield from _leaves(inner, (*path, position))
    else:
        yield path, value


def _tree(leaves: Mapping[TreePath, Any]) -> dict[str, Any]:
    """The nested mappings and lists that ``_leaves`` takes apart into these."""
    root: dict[Any, Any] = {}
    for path, value in leaves.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return {str(key): _with_lists(value) for key, value in root.items()}


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict) or not node:
        return node
    inner = {key: _with_lists(value) for key, value in node.items()}
    return [inner[k] for k in range(len(inner))] if set(inner) == set(range(len(inner))) else inner


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The elements on the host. torch does not know ml_dtypes, so bits are copied as bytes."""
    dtype = dtype_from_name(str(tensor.dtype).removeprefix("torch."))
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().view(dtype).reshape(tensor.shape)
