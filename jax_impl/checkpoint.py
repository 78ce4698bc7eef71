"""Saving a train state as logical arrays, whatever the mesh and strategy; loading it on any other.

::

    plan of 3 devices                     checkpoint (Orbax)            plan of 2 devices, other strategy
    flat buffer   [..a..|..a b.|.b..]     params/a   [ chunk | chunk ]  [...a...|.b....]
    pieces          ^     ^             -> opt_state/mu/a ...         ->   boxes read by region
                  one device at a time    opt_state/count, train/*

Nothing is gathered: a device's shard is cut into boxes of parameters. A chunk of the file may need boxes of several
devices; it is put together as they come by. Loading reads for each device the boxes it owns.

Optimizer states are saved by structure: every dict of flat buffers by unit becomes one array a parameter
(``opt_state/mu/<path>``), everything else a leaf (``opt_state/count``); of an optax chain, ``opt_state/0/mu/<path>``.
Units that ``optax.masked`` leaves out have no arrays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from bridge.formats import Box, CheckpointError, TreePath, detect_format
from bridge.formats.base import CheckpointReader, CheckpointWriter, TensorInfo
from bridge.formats.orbax_reader import OrbaxReader
from bridge.formats.orbax_writer import OrbaxWriter
from jax_impl.plan import Buffers, ShardingPlan
from jax_impl.train import TrainState

_SHOWN = 10


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What ``load_checkpoint`` returns.

    ``state``: ready for a train step made with the same plan and optimizer. ``train``: the nested dict that was saved,
    with ints for 0-d integers and NumPy arrays for the rest; no value went through JAX, which would cut 64-bit ones.
    ``objects``: values that are no arrays, by tree path, such as the hyperparameters in a checkpoint that came from
    PyTorch. Not used here; give them to ``save_checkpoint`` to keep them.
    """

    state: TrainState
    train: dict[str, Any]
    objects: dict[TreePath, object]


def save_checkpoint(
    path: str | os.PathLike[str],
    plan: ShardingPlan,
    state: TrainState,
    train: Mapping[str, Any] | None = None,
    *,
    objects: Mapping[TreePath, object] | None = None,
) -> None:
    """Save weights, optimizer state and ``train`` as a new Orbax checkpoint that stock Orbax reads on any devices.

    The checkpoint appears complete and synced to disk, or not at all. Extra host memory: one unit's part of the weights
    where devices have memory of their own, and under 200 MiB for what is being written.

    Args:
        path: a directory that does not exist yet; missing parents are made.
        plan: the plan that ``state`` belongs to.
        train: nested mapping of str to int (64 bits) or NumPy array. ints become 0-d int64 arrays.
        objects: JSON values by tree path: None, bool, int, float, str, and lists, tuples and dicts of these.

    Raises:
        FileExistsError: something is at ``path``.
        ValueError: a state or train value that cannot be saved, by name.
        CheckpointError: names that collide, or a write that failed.
        RuntimeError: several processes (``jax.distributed``); each would hold only some of the rows.
    """
    _require_one_process()
    _check_weights(plan, state.weights)
    leaves = dict(_train_leaves(train or {}, ()))
    buffers: dict[str, Buffers] = {"params": state.weights}
    for name, value in _optimizer_entries(plan, state.opt_state).items():
        if isinstance(value, dict):
            buffers[name] = value
        else:
            leaves[tuple(name.split("/"))] = np.asarray(value)
    with OrbaxWriter(path) as writer:
        for name, kind in buffers.items():
            _write_buffers(writer, plan, name, kind)
        for leaf, array in leaves.items():
            info = writer.add_tensor(leaf, array.shape, array.dtype)
            for box in info.chunks:
                writer.write(info.name, box, array[box.slices()])
        for leaf_path, value in (objects or {}).items():
            writer.add_object(leaf_path, value)


def load_checkpoint(
    path: str | os.PathLike[str], plan: ShardingPlan, optimizer: optax.GradientTransformation | None = None
) -> LoadedCheckpoint:
    """Load an Orbax checkpoint onto the plan's devices, whoever saved it on however many.

    Names, shapes and dtypes are all checked before any data is read; no code in the checkpoint is executed.

    Args:
        path: the checkpoint, or a directory of steps with exactly one step.
        plan: from ``fully_shard`` or ``plan_sharding``, of the model that was saved.
        optimizer: the one that the run goes on with. None: weights only, with ``opt_state`` None in the result.

    Raises:
        FileNotFoundError, NotADirectoryError: no directory at ``path``.
        CheckpointError: damaged, of another format, or of another model or optimizer (the differences are listed).
        RuntimeError: several processes.
    """
    _require_one_process()
    if detect_format(path) != "orbax":
        raise CheckpointError(
            f"{path}: expected an Orbax checkpoint, got a DCP one: convert it with `twinshard convert`"
        )
    shapes = {
        name: jax.ShapeDtypeStruct((unit.layout.padded_size,), unit.wire.main)
        for name, unit in plan.units.items()
    }
    opt_state = None if optimizer is None else jax.eval_shape(optimizer.init, shapes)
    with OrbaxReader(path) as reader:
        _check_tensors(reader, _expected(plan, shapes, opt_state), with_optimizer=optimizer is not None)
        weights = {
            unit: _read_buffer(reader, plan, "params", unit, shape.dtype) for unit, shape in shapes.items()
        }
        state = TrainState(weights, _read_optimizer(reader, plan, opt_state))
        return LoadedCheckpoint(
            state,
            _train_values(reader),
            {reader.object_paths[name]: value for name, value in reader.objects.items()},
        )


class _ChunkAssembly:
    """Writes one tensor's chunks as soon as the boxes seen so far complete them."""

    def __init__(self, writer: CheckpointWriter, info: TensorInfo) -> None:
        self._writer = writer
        self._info = info
        self._started: dict[Box, np.ndarray] = {}
        self._missing = {chunk: chunk.numel for chunk in info.chunks}

    def add(self, box: Box, values: np.ndarray) -> None:
        for chunk in self._info.chunks:
            part = chunk.intersect(box)
            if part is None:
                continue
            self._missing[chunk] -= part.numel
            if part == chunk:
                self._writer.write(self._info.name, chunk, values[part.slices(box)])
                continue
            if chunk not in self._started:
                self._started[chunk] = np.empty(chunk.sizes, self._info.dtype)
            self._started[chunk][part.slices(chunk)] = values[part.slices(box)]
            if not self._missing[chunk]:
                self._writer.write(self._info.name, chunk, self._started.pop(chunk))


def _write_buffers(writer: CheckpointWriter, plan: ShardingPlan, name: str, buffers: Buffers) -> None:
    """Write one array a parameter of the given units, from one device's shard after another."""
    assemblies = {}
    for path, param in plan.parameters.items():
        if param.unit not in buffers:
            continue
        dtype = np.dtype(buffers[param.unit].dtype)
        info = writer.add_tensor((*name.split("/"), *path.split("/")), param.shape, dtype)
        assemblies[path] = _ChunkAssembly(writer, info)
    for unit, buffer in buffers.items():
        # An array keeps the host copies made of it for as long as it lives; this one does not live long.
        view = jax.make_array_from_single_device_arrays(
            buffer.shape, buffer.sharding, [shard.data for shard in buffer.addressable_shards]
        )
        for piece in plan.local_pieces(unit, view):
            assemblies[piece.path].add(Box(piece.offsets, piece.sizes), piece.values)


def _read_buffer(
    reader: CheckpointReader, plan: ShardingPlan, name: str, unit: str, dtype: np.dtype
) -> jax.Array:
    def read(path: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
        return reader.read(f"{name}/{path}", Box(offsets, sizes))

    # Waiting frees the host's copy of one buffer before the next is read.
    return jax.block_until_ready(plan.build_buffer(unit, read, dtype))


def _read_optimizer(reader: CheckpointReader, plan: ShardingPlan, opt_state: Any) -> Any:
    """Arrays in the place of the abstract ones of ``opt_state``."""

    def read(keys: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        located = plan.locate_buffer(keys, leaf)
        if located is None:
            return jax.device_put(reader.read("/".join(_parts(keys))), plan.replicated)
        unit, rest = located
        return _read_buffer(reader, plan, "/".join(_parts(rest)), unit, leaf.dtype)

    return jax.tree.map_with_path(read, opt_state)


def _optimizer_entries(plan: ShardingPlan, opt_state: Any) -> dict[str, Any]:
    """Buffers by unit, or a single array, by name, of an optimizer state, abstract or not."""
    entries: dict[str, Any] = {}
    for keys, leaf in jax.tree.leaves_with_path(opt_state):
        located = plan.locate_buffer(keys, leaf)
        parts = _parts(keys if located is None else located[1])
        name = "/".join(parts)
        if located is not None:
            entries.setdefault(name, {})[located[0]] = leaf
        elif leaf.shape == () and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended) and all(parts):
            entries[name] = leaf
        else:
            raise ValueError(
                f"optimizer state {name!r}: expected one flat buffer a unit or a single named number, got {leaf.dtype} "
                f"of shape {leaf.shape}"
            )
    return entries


def _parts(keys: tuple[Any, ...]) -> list[str]:
    return ["opt_state", *(jax.tree_util.keystr((key,), simple=True) for key in keys)]


def _check_weights(plan: ShardingPlan, weights: Buffers) -> None:
    if weights.keys() != plan.units.keys():
        raise ValueError(
            f"weights: expected one buffer for each of units {list(plan.units)}, got {list(weights)}"
        )
    for unit, unit_plan in plan.units.items():
        found, expected = tuple(weights[unit].shape), (unit_plan.layout.padded_size,)
        if found != expected:
            raise ValueError(f"weights: buffer of unit {unit!r}: expected shape {expected}, got {found}")


class _Kind(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype


def _expected(plan: ShardingPlan, weights: Mapping[str, Any], opt_state: Any) -> dict[str, _Kind]:
    """Shape and dtype of every array that a checkpoint of this plan and optimizer has, besides ``train``."""
    expected = {}
    for name, value in {"params": weights, **_optimizer_entries(plan, opt_state)}.items():
        if isinstance(value, Mapping):
            for path, param in plan.parameters.items():
                if param.unit not in value:
                    continue
                expected[f"{name}/{path}"] = _Kind(param.shape, np.dtype(value[param.unit].dtype))
        else:
            expected[name] = _Kind(tuple(value.shape), np.dtype(value.dtype))
    return expected


def _check_tensors(reader: CheckpointReader, expected: Mapping[str, _Kind], *, with_optimizer: bool) -> None:
    """Compare names, then shapes, then dtypes, so that each error speaks of one kind of difference."""
    found = {
        name: _Kind(info.shape, info.dtype)
        for name, info in reader.tensors.items()
        if not _is_train(info) and (with_optimizer or info.path[0] != "opt_state")
    }
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    if missing or unexpected:
        raise CheckpointError(
            f"{reader.path}: is this another model's or optimizer's checkpoint? Missing: {_listed(missing)}; "
            f"unexpected: {_listed(unexpected)}"
        )
    for field in _Kind._fields:
        wrong = [
            f"{name} (expected {getattr(kind, field)}, got {getattr(found[name], field)})"
            for name, kind in expected.items()
            if getattr(kind, field) != getattr(found[name], field)
        ]
        if wrong:
            raise CheckpointError(
                f"{reader.path}: tensors of another {field} than this model's: {_listed(wrong)}"
            )


def _is_train(info: TensorInfo) -> bool:
    return len(info.path) > 1 and info.path[0] == "train"


def _listed(names: list[str]) -> str:
    rest = f", ... ({len(names)} in all)" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest or "none"


def _train_leaves(
    train: Mapping[str, Any], parents: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    for key, value in train.items():
        path = (*parents, key)
        name = "/".join(map(str, ("train", *path)))
        if not isinstance(key, str) or not key or "/" in key:
            raise ValueError(f"{name}: expected keys to be non-empty strings without '/', got {key!r}")
        if isinstance(value, Mapping) and value:
            yield from _train_leaves(value, path)
        elif isinstance(value, np.ndarray | np.generic):
            yield ("train", *path), np.asarray(value)
        elif type(value) is int and -(2**63) <= value < 2**63:
            yield ("train", *path), np.asarray(value, np.int64)
        else:
            raise ValueError(
                f"{name}: expected a NumPy array, an int of at most 64 bits or a mapping of these, got "
                f"{type(value).__name__} {value!r:.80}"
            )


def _train_values(reader: CheckpointReader) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, info in reader.tensors.items():
        if not _is_train(info):
            continue
        *parents, last = map(str, info.path[1:])
        node = values
        for key in parents:
            node = node.setdefault(key, {})
        array = reader.read(name)
        node[last] = int(array) if array.ndim == 0 and array.dtype.kind in "iu" else array
    return values


def _require_one_process() -> None:
    if jax.process_count() > 1:
        raise RuntimeError(
            f"checkpoints: expected a single JAX process, got {jax.process_count()}; each process holds only "
            "some rows, and putting them together is not supported"
        )
