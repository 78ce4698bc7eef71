"""A train state as tensors of a checkpoint: declared, then written box by box from this process's devices."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from bridge.core.formats import Box, CheckpointReader, TreePath
from bridge.core.formats.orbax.writer import OrbaxPart
from bridge.core.formats.tensors.base import TensorInfo
from bridge.core.mapping.plan.running import AnyMapping, LoadedAs, Move, RunState, SavedAs
from jax_impl.checkpoint.chunks import Chunks
from jax_impl.checkpoint.names import ShapeDtype, as_stored, optimizer_tensors, state_tensors
from jax_impl.comm.mesh import is_simulated
from jax_impl.runtime.groups.logical_group import LogicalArray
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan
from jax_impl.runtime.groups.stored import BufferSlice
from jax_impl.train_state import TrainState, whole_variables

# Above this many bytes, chunks are chosen here: each of the writer's default chunks may need boxes of all devices.
_SLABS = 8 << 20


@dataclass(frozen=True)
class Held:
    """A shard that this process writes: its index in the array, and its values on the host or on a device."""

    index: tuple[slice, ...]
    data: Any


@dataclass(frozen=True)
class HostCopy:
    """This process's own shards of an array, in host memory that nothing else changes."""

    dtype: np.dtype
    shards: tuple[Held, ...]

    @property
    def nbytes(self) -> int:
        return sum(int(shard.data.nbytes) for shard in self.shards)


@dataclass(frozen=True)
class Contents:
    """``arrays``: by name (params, opt_state/mu, ...) and key. ``whole``: by name, arrays that every device holds.

    ``fingerprint``: of names, shapes, dtypes and shardings.
    """

    plan: ShardingPlan
    arrays: Mapping[str, Mapping[str, jax.Array | HostCopy]]
    whole: Mapping[str, jax.Array | np.ndarray]
    fingerprint: str

    @classmethod
    def of(cls, plan: ShardingPlan, state: TrainState) -> Contents:
        """Raises ``ValueError`` for a state of another plan, or with a value that a checkpoint cannot hold."""
        _check_keys("weights", plan.arrays, state.weights)
        _check_keys("variables", plan.variables, state.variables)
        for key, array in state.weights.items():
            plan.check_array(key, array)
        arrays: dict[str, Buffers] = {"params": state.weights}
        whole: dict[str, jax.Array] = {}
        for name, value in optimizer_tensors(plan, state.opt_state).items():
            if isinstance(value, dict):
                arrays[name] = value
                for key, array in value.items():
                    plan.check_array(key, array)
            else:
                whole[name] = as_stored(value.addressable_shards[0].data)
        for path, variable in whole_variables(plan, state.variables).items():
            if variable.shape != plan.variables[path].shape or not variable.sharding.is_fully_replicated:
                raise ValueError(
                    f"variable {path!r}: expected shape {plan.variables[path].shape}, whole on every device, got "
                    f"{variable.shape} with {variable.sharding}"
                )
            whole[f"variables/{path}"] = as_stored(variable.addressable_shards[0].data)
        tensors = state_tensors(plan, state.weights, state.opt_state)
        lying = [(key, stored.shape, str(stored.spec)) for key, stored in plan.arrays.items()]
        text = json.dumps(
            [[[name, tensor.shape, tensor.dtype.name] for name, tensor in tensors.items()], lying]
        )
        return cls(plan, arrays, whole, hashlib.sha256(text.encode()).hexdigest())

    def on_host(self, *, first: bool) -> Contents:
        """The same with copies of the data that this process writes, so that the state may change or be donated.

        In addition to the copies, at most one array's shard is in host memory.
        """
        arrays = {
            name: {key: _host_copy(self.plan, array) for key, array in by_key.items()}
            for name, by_key in self.arrays.items()
        }
        # The other processes need only shapes and dtypes.
        whole = {
            name: np.array(local_value(value)) if first else np.empty(value.shape, value.dtype)
            for name, value in self.whole.items()
        }
        return replace(self, arrays=arrays, whole=whole)

    def write(self, writer: OrbaxPart, chunks: Chunks, *, first: bool) -> None:
        """``first``: whether this process writes the arrays that every device holds."""
        for name, by_key in self.arrays.items():
            self._declare(writer, chunks, name, by_key)
        for name, piece in self.pieces():
            chunks.add(name, Box(piece.offsets, piece.sizes), piece.values)
        for name, value in self.whole.items():
            info = writer.add_tensor(tuple(name.split("/")), value.shape, np.dtype(value.dtype))
            if first:
                values = local_value(value)
                for box in info.chunks:
                    writer.write(info.name, box, values[box.slices()])

    def pieces(self) -> Iterator[tuple[str, BufferSlice]]:
        """The pieces that this process writes, each with the name of its tensor."""
        for name, by_key in self.arrays.items():
            for key, array in by_key.items():
                for piece in _pieces(self.plan, key, array):
                    if not piece.repeated:
                        yield f"{name}/{piece.path}", piece

    def _declare(
        self, writer: OrbaxPart, chunks: Chunks, name: str, by_key: Mapping[str, jax.Array | HostCopy]
    ) -> None:
        for path in self.plan.parameters:
            if (key := self.plan.holding(by_key, path)) is not None:
                dtype, shape = np.dtype(by_key[key].dtype), self.plan.tensor_shape(key, path) or ()
                blocks = _blocks(self.plan, key, shape, dtype.itemsize)
                chunks.add_tensor(
                    writer.add_tensor((*name.split("/"), *path.split("/")), shape, dtype, blocks)
                )


def _blocks(plan: ShardingPlan, key: str, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """The preferred chunk shape, or None for the writer's default slabs of rows.

    If the pjit engine cut an array along another axis than the first, a chunk is a device's shard. For a stack, a chunk
    is a slab of rows of one layer.
    """
    stored = plan.stored(key)
    if isinstance(stored, LogicalArray):
        large = math.prod(shape) * itemsize > _SLABS
        return tuple(plan.sharding(key).shard_shape(shape)) if any(stored.spec[1:]) and large else None
    if stored.layers is None or math.prod(shape[1:]) * itemsize <= _SLABS:
        return None
    slabs = -(-math.prod(shape[1:]) * itemsize // _SLABS)
    return (1, -(-shape[1] // slabs), *shape[2:])


def _pieces(plan: ShardingPlan, key: str, array: jax.Array | HostCopy) -> Iterator[BufferSlice]:
    """The pieces of parameters that this process holds; over all processes every element occurs exactly once, except in
    repeated pieces.

    A stack comes layer by layer, because a whole stack may be as large as the model.
    """
    stored = plan.stored(key)
    shards = _held(array)
    if stored.layers is not None:
        # On the CPU a layer is already on the host.
        on_host = isinstance(array, HostCopy) or is_simulated(plan.mesh)
        layered: list[Any] = [np.asarray(shard.data) if on_host else _Layers(shard.data) for shard in shards]
        by_shard = [stored.pieces(shard.index, layers) for shard, layers in zip(shards, layered, strict=True)]
        yield from heapq.merge(*by_shard, key=lambda piece: piece.offsets[0])
        return
    for shard in shards:
        yield from stored.pieces(shard.index, np.asarray(shard.data))


def _held(array: jax.Array | HostCopy) -> tuple[Held, ...]:
    """The shards that this process writes."""
    if isinstance(array, HostCopy):
        return array.shards
    # An array keeps its host copies as long as it lives, so the copies are made from a short-lived array.
    view = jax.make_array_from_single_device_arrays(
        array.shape, array.sharding, [shard.data for shard in array.addressable_shards]
    )
    return tuple(Held(shard.index, shard.data) for shard in view.addressable_shards if shard.replica_id == 0)


def _host_copy(plan: ShardingPlan, array: jax.Array | HostCopy) -> HostCopy:
    shards = []
    for shard in _held(array):
        values = np.asarray(shard.data)
        # NumPy gets a view, not a copy, of memory that the host can address.
        shared = is_simulated(plan.mesh) or shard.data.sharding.memory_kind != "device"
        shards.append(Held(shard.index, values.copy() if shared else values))
    return HostCopy(np.dtype(array.dtype), tuple(shards))


class _Layers:
    """``data[layer, where]`` for a shard of a stack; only one layer is on the host at a time."""

    def __init__(self, data: jax.Array) -> None:
        self._data = data
        self._layer = -1
        self._values = np.empty(0)

    def __getitem__(self, layer_and_elements: tuple[int, slice]) -> np.ndarray:
        layer, where = layer_and_elements
        if layer != self._layer:
            self._layer, self._values = layer, np.asarray(self._data[layer])
        return self._values[where]


def local_value(array: Any) -> np.ndarray:
    """The value of an array that is the same on all devices."""
    return np.asarray(array.addressable_data(0) if isinstance(array, jax.Array) else array)


def _check_keys(what: str, expected: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    if expected.keys() != got.keys():
        raise ValueError(f"{what}: expected {list(expected)[:12]}, got {list(got)[:12]}")


_TRAIN = "train/"
_WHERE = "the train state"
Values = Mapping[tuple[str, ...], np.ndarray]


class MappedContents:
    """A state under a mapping's other side: its translated tensors, declared and written as those of `Contents`.

    ::

        device 1:  params/mlp/up/kernel [0:40, 0:883] -> model.mlp.w13.weight [883:1766, 0:40]     m up -> (gate + up) m

    Each process translates the boxes of its own devices. Nothing is gathered.

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
