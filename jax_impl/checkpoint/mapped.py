"""For saving, a train state under a mapping's other side; for loading, a checkpoint under the plan's own side.

::

    device 1:  params/mlp/up/kernel [0:40, 0:883]   ->   model.mlp.w13.weight [883:1766, 0:40]     m up -> (gate + up) m

Each process translates the boxes of its own devices. Nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bridge.core.formats import Box, CheckpointReader, TreePath
from bridge.core.formats.orbax.writer import OrbaxPart
from bridge.core.formats.tensors.base import TensorInfo
from bridge.core.mapping.plan.running import AnyMapping, LoadedAs, Move, RunState, SavedAs
from jax_impl.checkpoint.chunks import Chunks
from jax_impl.checkpoint.contents import Contents, local_value
from jax_impl.checkpoint.names import ShapeDtype

_TRAIN = "train/"
_WHERE = "the train state"
Values = Mapping[tuple[str, ...], np.ndarray]


class MappedContents:
    """The translated tensors of a state, declared and written in the same way as `Contents`.

    expected: shapes and dtypes of all tensors of the state. train, objects: by tree path. alone: whether this is the
    only process that saves. Raises ``CheckpointError`` if mapping and state do not fit.
    """

    def __init__(
        self,
        mapping: AnyMapping,
        contents: Contents,
        expected: Mapping[str, ShapeDtype],
        train: Values,
        objects: Mapping[TreePath, object],
        *,
        alone: bool,
    ) -> None:
        arrays = {"/".join(path): array for path, array in train.items()}

        def whole(name: str) -> np.ndarray | None:
            if name in arrays or name in contents.whole:
                return arrays[name] if name in arrays else local_value(contents.whole[name])
            return _together(contents, name, expected[name]) if alone else None

        tensors = {name: _info(name, tensor) for name, tensor in expected.items()}
        tensors |= {name: _info(name, ShapeDtype(a.shape, a.dtype)) for name, a in arrays.items()}
        names = {"/".join(map(str, path)): path for path in objects}
        values = {name: objects[path] for name, path in names.items()}
        self._saved = SavedAs(RunState("orbax", _WHERE, tensors, values, names, whole), mapping)

    @property
    def objects(self) -> dict[TreePath, object]:
        """Values that are not tensors, by tree path."""
        return self._saved.objects

    @property
    def fingerprint(self) -> list[Any]:
        """Names, shapes and dtypes."""
        return [[t.name, t.shape, t.dtype.name] for t in self._tensors()]

    def write(self, contents: Contents, writer: OrbaxPart, chunks: Chunks, *, first: bool) -> None:
        """``contents``: the contents given to the constructor, or copies. ``first``: as in ``Contents.write``."""
        names = {}
        for tensor in self._tensors():
            info = writer.add_tensor(tensor.path, tensor.shape, tensor.dtype)
            chunks.add_tensor(info)
            names[tensor.name] = info.name
            if first and isinstance(tensor.content, np.ndarray):
                chunks.add(info.name, Box.whole(tensor.shape), tensor.content)

        def add(moves: Iterator[Move], values: np.ndarray) -> None:
            for move in moves:
                chunks.add(names[move.name], move.box, move.values(values))

        for name, piece in contents.pieces():
            add(self._saved.moves(name, Box(piece.offsets, piece.sizes)), piece.values)
        for name, value in contents.whole.items() if first else ():
            add(self._saved.moves(name, Box.whole(value.shape)), local_value(value))

    def _tensors(self) -> list[Any]:
        """All tensors except train values, which are not translated."""
        return [t for name, t in self._saved.tensors.items() if not name.startswith(_TRAIN)]


def mapped_reader(
    reader: CheckpointReader, mapping: AnyMapping, expected: Mapping[str, ShapeDtype]
) -> LoadedAs:
    """The checkpoint, in any format, with the names and layouts of a plan and optimizer, given by ``expected``.

    Raises ``CheckpointError`` if mapping, plan and checkpoint do not fit.
    """
    tensors = {name: _info(name, tensor) for name, tensor in expected.items()}
    return LoadedAs(reader, RunState("orbax", _WHERE, tensors, {}, {}, lambda _: None), mapping)


def _info(name: str, tensor: ShapeDtype) -> TensorInfo:
    return TensorInfo(name, tuple(name.split("/")), tensor.shape, tensor.dtype, (Box.whole(tensor.shape),))


def _together(contents: Contents, name: str, tensor: ShapeDtype) -> np.ndarray:
    """The whole tensor; this process must have all its pieces."""
    whole = np.empty(tensor.shape, tensor.dtype)
    for tensor_name, piece in contents.pieces():
        if tensor_name == name:
            whole[Box(piece.offsets, piece.sizes).slices()] = piece.values
    return whole
