"""Saving a train state as logical arrays, whatever the mesh, strategy and engine; loading it on any other.

::

    plan of 3 devices                     checkpoint (Orbax)            plan of 2 devices, other strategy
    flat buffer   [..a..|..a b.|.b..]     params/a   [ chunk | chunk ]  [...a...|.b....]
    pieces          ^     ^             -> opt_state/mu/a ...         ->   boxes read by region
                  one device at a time    opt_state/count, train/*

Nothing is gathered: a device's shard is cut into boxes of parameters. A chunk of the file may need boxes of several
devices; it is put together as they come by (``chunks.py``). Loading reads for each device the boxes it owns.
Names are those of ``names.py``.

Several processes save in four steps, none of which begins before the one before has succeeded on all of them::

    open       the first process makes a temporary directory
    write      each writes the chunks that it has all of to a store of its own, boxes of other chunks to files there
    assemble   each puts together its part of those other chunks
    commit     the first process joins the stores, checks that every chunk is there, and renames the directory
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from bridge.formats import Box, CheckpointError, TreePath, detect_format
from bridge.formats.base import CheckpointReader
from bridge.formats.orbax.reader import OrbaxReader
from bridge.formats.orbax.writer import OrbaxPart, OrbaxWriter
from jax_impl.checkpoint.chunks import Chunks
from jax_impl.checkpoint.contents import Contents
from jax_impl.checkpoint.names import (
    check_key_impls,
    check_tensors,
    is_key,
    key_impls,
    kinds,
    parts_of,
    train_tensors,
    train_values,
)
from jax_impl.comm.agreement import Processes
from jax_impl.optimizer.logical import fitted, warn_of_whole_moments
from jax_impl.runtime.memory_kinds import in_memory, kinds_like
from jax_impl.runtime.sharding_plan import ShardingPlan
from jax_impl.runtime.variables import Variables
from jax_impl.train import TrainState, trainable

TIMEOUT = 900.0
_SPILLED = "spilled"
# Random keys are saved as numbers; the object of this name tells their algorithms.
_KEY_IMPLS: TreePath = ("random_key_impls",)


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
    timeout: float = TIMEOUT,
) -> None:
    """Save weights, optimizer state and ``train`` as a new Orbax checkpoint that stock Orbax reads on any devices.

    The checkpoint appears complete and synced to disk, or not at all. Extra host memory: one unit's part of the weights
    where devices have memory of their own (of a stack, one layer's), and under 200 MiB for what is being written.

    With several processes (``jax.distributed``) each one that has devices of the mesh calls this, and writes what its
    devices hold; they need a file system in common. An error on one of them is raised on all.

    Args:
        path: a directory that does not exist yet; missing parents are made.
        plan: the plan that ``state`` belongs to.
        train: nested mapping of str to int (64 bits) or NumPy array. ints become 0-d int64 arrays. Of several processes
            the first one's are saved.
        objects: JSON values by tree path: None, bool, int, float, str, and lists, tuples and dicts of these.
        timeout: seconds that processes wait for one another in each of the four steps.

    Raises:
        FileExistsError: something is at ``path``.
        ValueError: a state or train value that cannot be saved, by name.
        CheckpointError: names that collide, or another process that failed or was not heard of.
        OSError: the system refused a write.
    """
    processes = Processes(plan.mesh, "save", timeout)
    target = Path(os.path.abspath(path))
    writer: OrbaxWriter | None = None
    part: OrbaxPart | None = None
    try:
        with processes.step("open") as opened:
            contents = Contents.of(plan, state)
            if processes.first:
                values = dict(train_tensors(train or {}))
                part = writer = OrbaxWriter(target, process=processes.index if processes.several else None)
                opened.shared = json.dumps([target.name, writer.temporary.name, contents.fingerprint])
        name, working, fingerprint = json.loads(opened.shared)
        temporary = target.with_name(working)
        with processes.step("write"):
            _require_equal(contents.fingerprint, fingerprint)
            part = part or _join(target, name, temporary, processes.index)
            chunks = Chunks(part, temporary / _SPILLED, processes.index)
            contents.write(part, chunks, first=processes.first)
            chunks.finish()
            if writer is not None:
                _write_own(writer, values, objects or {}, key_impls(plan))
        with processes.step("assemble"):
            chunks.write_spilled(processes.members)
            part.finish()
        with processes.step("commit"):
            if writer is not None:
                shutil.rmtree(temporary / _SPILLED, ignore_errors=True)
                writer.commit(processes.members if processes.several else ())
    except BaseException:
        # All processes have stopped writing: a step fails when it has ended on all of them.
        if part is not None:
            part.abort()
        raise


def _join(target: Path, name: str, temporary: Path, process: int) -> OrbaxPart:
    if target.name != name or not temporary.is_dir():
        raise CheckpointError(
            f"{target}: expected all processes to save one {name!r} and to see {temporary}, which the first process "
            "made: give all of them the same path, in a file system that they share"
        )
    return OrbaxPart(target, temporary, process)


def _require_equal(own: str, first: str) -> None:
    if own != first:
        raise CheckpointError(
            "expected a plan and a state like the first process's on all processes, got other names, shapes, dtypes or "
            "shardings"
        )


def _write_own(
    writer: OrbaxWriter,
    values: Mapping[tuple[str, ...], np.ndarray],
    objects: Mapping[TreePath, object],
    impls: dict[str, str],
) -> None:
    """What only the first process has."""
    for leaf, array in values.items():
        info = writer.add_tensor(leaf, array.shape, array.dtype)
        for box in info.chunks:
            writer.write(info.name, box, array[box.slices()])
    for leaf_path, value in {**objects, **({_KEY_IMPLS: impls} if impls else {})}.items():
        writer.add_object(leaf_path, value)


def load_checkpoint(
    path: str | os.PathLike[str],
    plan: ShardingPlan,
    optimizer: optax.GradientTransformation | None = None,
    *,
    like: TrainState | None = None,
    timeout: float = TIMEOUT,
) -> LoadedCheckpoint:
    """Load an Orbax checkpoint onto the plan's devices, whoever saved it on however many.

    Names, shapes and dtypes are all checked before any data is read; no code in the checkpoint is executed. Each of
    several processes calls this and reads what its devices need; an error on one of them is raised on all. Extra host
    memory: one device's part of one unit, as which a stack counts, and under 150 MiB for what is being read.

    Args:
        path: the checkpoint, or a directory of steps with exactly one step.
        plan: from ``fully_shard`` or ``plan_sharding``, of the model that was saved.
        optimizer: the one that the run goes on with. None: weights only, with ``opt_state`` None in the result.
        like: a state of this plan and optimizer, in whose kinds of memory (``pinned_host``) arrays are placed; by
            default all are in the devices' own. ``abstract_state`` with other ``sharding``s will do.
        timeout: seconds that processes wait for one another.

    Raises:
        FileNotFoundError, NotADirectoryError: no directory at ``path``.
        ValueError: ``like`` is a state of another plan or optimizer.
        CheckpointError: damaged, of another format, or of another model or optimizer (the differences are listed); or
            another process failed or was not heard of.
    """
    with Processes(plan.mesh, "load", timeout).step("read"):
        if detect_format(path) != "orbax":
            raise CheckpointError(
                f"{path}: expected an Orbax checkpoint, got a DCP one: convert it with `twinshard convert`"
            )
        weights: dict[str, Any] = {
            key: jax.ShapeDtypeStruct(stored.shape, stored.dtype) for key, stored in plan.arrays.items()
        }
        opt_state = None
        if optimizer is not None:
            opt_state = jax.eval_shape(fitted(plan, optimizer).init, trainable(plan, weights))
        with OrbaxReader(path) as reader:
            check_tensors(reader, kinds(plan, weights, opt_state), with_optimizer=optimizer is not None)
            objects = {reader.object_paths[name]: value for name, value in reader.objects.items()}
            impls = key_impls(plan)
            check_key_impls(reader, impls, objects.pop(_KEY_IMPLS, None))
            variables: dict[str, Any] = {
                path: jax.ShapeDtypeStruct(v.shape, v.dtype) for path, v in plan.variables.items()
            }
            if like is not None and optimizer is None:
                like = TrainState(like.weights, None, like.variables)
            places: Any = kinds_like(like, TrainState(weights, opt_state, variables))
            state = TrainState(
                {
                    key: _read_array(reader, plan, "params", key, weights[key].dtype, places.weights[key])
                    for key in weights
                },
                _read_optimizer(reader, plan, opt_state, places.opt_state),
                _read_variables(reader, plan, impls, places.variables),
            )
            warn_of_whole_moments(plan, state.opt_state)
            return LoadedCheckpoint(state, train_values(reader), objects)


def _read_array(
    reader: CheckpointReader, plan: ShardingPlan, name: str, key: str, dtype: np.dtype, kind: str
) -> jax.Array:
    """``kind``: of memory, "" for the default."""

    def read(path: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
        return reader.read(f"{name}/{path}", Box(offsets, sizes))

    stored, sharding = plan.stored(key), in_memory(plan.sharding(key), kind)
    devices: defaultdict[str, list[jax.Device]] = defaultdict(list)
    indices: dict[jax.Device, Any] = dict(sharding.addressable_devices_indices_map(stored.shape))
    for device, index in indices.items():
        devices[repr(index)].append(device)
    placed = []
    for index in {repr(index): index for index in indices.values()}.values():
        values = stored.shard(index, dtype, read)
        # Waiting frees the host's copy of one shard before the next is read.
        places = [SingleDeviceSharding(device, memory_kind=kind or None) for device in devices[repr(index)]]
        placed += jax.block_until_ready([jax.device_put(values, place) for place in places])
    return jax.make_array_from_single_device_arrays(stored.shape, sharding, placed)


def _read_optimizer(reader: CheckpointReader, plan: ShardingPlan, opt_state: Any, kinds: Any) -> Any:
    """Arrays in the place of the abstract ones of ``opt_state``."""

    def read(keys: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, kind: str) -> jax.Array:
        located = plan.locate_buffer(keys, leaf)
        if located is None:
            return _replicated(plan, reader.read("/".join(parts_of(keys))), kind)
        key, rest = located
        return _read_array(reader, plan, "/".join(parts_of(rest)), key, leaf.dtype, kind)

    return jax.tree.map_with_path(read, opt_state, kinds)


def _read_variables(
    reader: CheckpointReader, plan: ShardingPlan, impls: Mapping[str, str], kinds: Mapping[str, str]
) -> Variables:
    variables: Variables = {}
    for path, info in plan.variables.items():
        kind = kinds[path]
        array = _replicated(plan, reader.read(f"variables/{path}"), "" if is_key(info) else kind)
        if is_key(info):
            place = in_memory(plan.replicated, kind)
            array = jax.jit(partial(jax.random.wrap_key_data, impl=impls[path]), out_shardings=place)(array)
        variables[path] = array
    return variables


def _replicated(plan: ShardingPlan, values: np.ndarray, kind: str) -> jax.Array:
    # Not device_put, which has all processes compare their values by a collective.
    return jax.make_array_from_callback(
        values.shape, in_memory(plan.replicated, kind), lambda index: np.asarray(values[index])
    )
