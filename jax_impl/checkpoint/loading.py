"""Loading a checkpoint onto any plan: ours in any format, or one that another JAX program saved by stock Orbax.

``matching.py`` says which stored tensor is which; each device's boxes are then read from those.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from bridge.formats import Box, CheckpointError, TreePath
from jax_impl.checkpoint.by_path import TreeReader
from jax_impl.checkpoint.matching import Wanted, kinds_of, match
from jax_impl.checkpoint.names import (
    KEY_IMPLS,
    check_key_impls,
    is_key,
    key_impls,
    kinds,
    parts_of,
    train_values,
)
from jax_impl.checkpoint.steps import choose_step
from jax_impl.comm.agreement import TIMEOUT, Processes
from jax_impl.optimizer.logical import fitted, warn_of_whole_moments
from jax_impl.runtime.memory_kinds import in_memory, kinds_like
from jax_impl.runtime.sharding_plan import ShardingPlan
from jax_impl.runtime.variables import Variables
from jax_impl.train import TrainState, init_state, place_variables, trainable


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What ``load_checkpoint`` returns.

    ``state``: ready for a train step made with the same plan and optimizer. ``train``: the nested dict that was saved,
    with ints for 0-d integers and NumPy arrays for the rest; no value went through JAX, which would cut 64-bit ones. A
    ``step`` beside another program's trees is there, too. ``objects``: values that are no arrays, by tree path, such as
    the hyperparameters in a checkpoint that came from PyTorch. Not used here; give them to ``save_checkpoint`` to keep
    them. ``fresh``: tensors that the checkpoint lacked, by the names that ``save_checkpoint`` gives: moments as
    ``optimizer.init`` makes them, variables as the caller gave them. ``ignored``: the checkpoint's tensors that were
    not read.
    """

    state: TrainState
    train: dict[str, Any]
    objects: dict[TreePath, object]
    fresh: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def load_checkpoint(
    path: str | os.PathLike[str],
    plan: ShardingPlan,
    optimizer: optax.GradientTransformation | None = None,
    *,
    like: TrainState | None = None,
    step: int | None = None,
    strict: bool = True,
    variables: Mapping[str, jax.Array] | None = None,
    timeout: float = TIMEOUT,
) -> LoadedCheckpoint:
    """Load a checkpoint onto the plan's devices, whoever saved it on however many: Orbax, DCP or safetensors.

    Also those of ordinary JAX programs: a tree of parameters at the top or below ``params`` or ``model``, states of nnx
    modules and optimizers, linen train states, optax states. Names, shapes and dtypes are all checked before any data
    is read; no code in the checkpoint is executed.

    Each of several processes calls this and reads what its devices need; an error on one of them is raised on all.
    Extra host memory: one device's part of one unit, as which a stack counts, and under 150 MiB for what is being read.

    Args:
        path: the checkpoint, or a directory of steps, of which the latest that is complete is taken.
        plan: from ``fully_shard`` or ``plan_sharding``, of the model that was saved.
        optimizer: the one that the run goes on with. None: weights only, with ``opt_state`` None in the result.
        like: a state of this plan and optimizer, in whose kinds of memory (``pinned_host``) arrays are placed; by
            default all are in the devices' own. ``abstract_state`` with other ``sharding``s will do.
        step: the number of another step to take.
        strict: whether the checkpoint must have this plan's and optimizer's tensors and no others. If False, tensors
            that nothing asks for are ignored, and moments that are missing, or of another shape or dtype, are fresh
            ones. Moments that fit are kept for another optimizer, too, at any place in a chain. A parameter's
            moments are kept together, and with their count, or not at all. Weights must be there in their shapes; in
            another floating dtype they are cast. Where something is fresh, a device holds the moments of
            ``optimizer.init`` beside the loaded ones for the while.
        variables: ``variable_leaves(model)``, for those variables that the checkpoint lacks; if not strict, also for
            those that are of another shape or dtype.
        timeout: seconds that processes wait for one another.

    Raises:
        FileNotFoundError, NotADirectoryError: no directory at ``path``.
        ValueError: ``variables`` of another model, ``like`` of another plan or optimizer.
        CheckpointError: damaged, of another format, or of another model or optimizer (the differences are listed);
            without the step, or any complete one; or another process failed or was not heard of.
    """
    processes = Processes(plan.mesh, "load", timeout)
    with processes.step("choose") as chosen:
        given = None if variables is None else place_variables(plan, variables)
        directory = Path(os.path.abspath(path))
        if processes.first:
            # Saves may end meanwhile: the others take what the first one saw.
            chosen.shared = os.path.relpath(choose_step(directory, step), directory)
    directory = directory / chosen.shared
    with processes.step("read"):
        with TreeReader(directory) as reader:
            loaded = _load(reader, plan, optimizer, given, like, strict=strict)
        warn_of_whole_moments(plan, loaded.state.opt_state)
        return loaded


def _load(
    reader: TreeReader,
    plan: ShardingPlan,
    optimizer: optax.GradientTransformation | None,
    given: Variables | None,
    like: TrainState | None,
    *,
    strict: bool,
) -> LoadedCheckpoint:
    weights: dict[str, Any] = {
        key: jax.ShapeDtypeStruct(stored.shape, stored.dtype) for key, stored in plan.arrays.items()
    }
    opt_state = None
    if optimizer is not None:
        opt_state = jax.eval_shape(fitted(plan, optimizer).init, trainable(plan, weights))
    places = _places(plan, TrainState(weights, opt_state), like)
    wanted = Wanted(
        kinds(plan, weights, opt_state),
        plan.parameters.keys(),
        with_optimizer=optimizer is not None,
        with_variables=given is not None,
        strict=strict,
    )
    try:
        matched = match(reader.path, kinds_of(reader.tensors), wanted)
    except CheckpointError as error:
        if reader.format == "orbax":
            raise
        raise CheckpointError(
            f"{error}. A {reader.format} checkpoint of another framework's model has other names and layouts: "
            "translate it by `twinshard convert SRC DST --to orbax --mapping NAME`"
        ) from error
    objects = reader.objects
    impls = key_impls(plan)
    typed = {
        path: reader.key_types[source]
        for path in impls
        if (source := matched.sources.get(f"variables/{path}", "")) in reader.key_types
    }
    saved = objects.pop(KEY_IMPLS, None)
    read = {path: impl for path, impl in impls.items() if f"variables/{path}" in matched.sources}
    check_key_impls(reader, read, {**typed, **(saved if isinstance(saved, Mapping) else {})})
    tensors = _Tensors(reader, plan, matched.sources)
    arrays = {
        key: _moved(tensors.array("params", key, weights[key].dtype), places.weights[key]) for key in weights
    }
    variables = {
        path: _moved(
            tensors.variable(path, impls) if f"variables/{path}" in matched.sources else (given or {})[path],
            places.variables[path],
        )
        for path in plan.variables
    }
    fresh = None
    if optimizer is not None and any(name.startswith("opt_state/") for name in matched.fresh):
        fresh = init_state(plan, arrays, optimizer, variables).opt_state
    state = TrainState(arrays, tensors.optimizer(opt_state, fresh, places.opt_state), variables)
    train = train_values(reader)
    if matched.step is not None:
        train.setdefault("step", int(reader.read(matched.step)))
    kept = {path: value for path, value in objects.items() if not _in_the_way(path, wanted.tensors)}
    return LoadedCheckpoint(state, train, kept, matched.fresh, matched.ignored)


def _places(plan: ShardingPlan, state: TrainState, like: TrainState | None) -> Any:
    """The kind of memory for each array of the state."""
    variables: Any = {path: jax.ShapeDtypeStruct(v.shape, v.dtype) for path, v in plan.variables.items()}
    if like is not None and state.opt_state is None:
        like = TrainState(like.weights, None, like.variables)
    return kinds_like(like, TrainState(state.weights, state.opt_state, variables))


def _moved(array: Any, kind: str) -> Any:
    """The array in memory of this kind, "" for the device's own: one array at a time is in both."""
    return array if not kind else jax.device_put(array, in_memory(array.sharding, kind))


def _in_the_way(path: TreePath, tensors: Mapping[str, Any]) -> bool:
    """Whether an object, such as the None of an empty part of a chain, is where the plan's next save has tensors."""
    name = "/".join(map(str, path))
    return any(f"{tensor}/".startswith(f"{name}/") or name.startswith(f"{tensor}/") for tensor in tensors)


@dataclass(frozen=True)
class _Tensors:
    """``names``: the stored name of each tensor of the plan that is stored."""

    reader: TreeReader
    plan: ShardingPlan
    names: Mapping[str, str]

    def array(self, name: str, key: str, dtype: np.dtype, fresh: jax.Array | None = None) -> jax.Array:
        """The array ``key`` of ``name``; ``fresh`` has what is not stored."""
        stored, sharding = self.plan.stored(key), self.plan.sharding(key)
        devices: defaultdict[str, list[jax.Device]] = defaultdict(list)
        indices: dict[jax.Device, Any] = dict(sharding.addressable_devices_indices_map(stored.shape))
        for device, index in indices.items():
            devices[repr(index)].append(device)
        shards = {repr(shard.index): shard for shard in ([] if fresh is None else fresh.addressable_shards)}
        placed = []
        for place, index in {repr(index): index for index in indices.values()}.items():
            own = np.asarray(shards[place].data) if place in shards else None
            kept = {} if own is None else {(p.path, p.offsets): p.values for p in stored.pieces(index, own)}
            values = stored.shard(index, dtype, partial(self._box, name, kept))
            # Waiting frees the host's copy of one shard before the next is read.
            placed += jax.block_until_ready([jax.device_put(values, device) for device in devices[place]])
        return jax.make_array_from_single_device_arrays(stored.shape, sharding, placed)

    def optimizer(self, opt_state: Any, fresh: Any, places: Any) -> Any:
        """Arrays in the place of the abstract ones of ``opt_state``; ``fresh``: the like with values, or None.

        ``places``: the like with kinds of memory.
        """
        memory = jax.tree.leaves(places)
        news: list[Any] = (
            [None] * len(jax.tree.leaves(opt_state)) if fresh is None else jax.tree.leaves(fresh)
        )
        leaves = []
        for number, (keys, leaf) in enumerate(jax.tree.leaves_with_path(opt_state)):
            # A fresh array makes room for the one that takes its place.
            new, news[number] = news[number], None
            leaves.append(_moved(self._moment(keys, leaf, new), memory[number]))
        return jax.tree.unflatten(jax.tree.structure(opt_state), leaves)

    def variable(self, path: str, impls: Mapping[str, str]) -> jax.Array:
        array = self._replicated(f"variables/{path}")
        if not is_key(self.plan.variables[path]):
            return array
        wrap = partial(jax.random.wrap_key_data, impl=impls[path])
        return jax.jit(wrap, out_shardings=self.plan.replicated)(array)

    def _moment(self, keys: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, fresh: jax.Array | None) -> Any:
        located = self.plan.locate_buffer(keys, leaf)
        if located is None:
            name = "/".join(parts_of(keys))
            return self._replicated(name) if name in self.names else fresh
        key, rest = located
        name = "/".join(parts_of(rest))
        held = [path for path in self.plan.parameters if self.plan.holding({key: leaf}, path) is not None]
        lacking = [path for path in held if f"{name}/{path}" not in self.names]
        if held and lacking == held:
            return fresh
        return self.array(name, key, leaf.dtype, fresh if lacking else None)

    def _box(
        self,
        name: str,
        kept: Mapping[tuple[str, tuple[int, ...]], np.ndarray],
        path: str,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
    ) -> np.ndarray:
        source = self.names.get(f"{name}/{path}")
        return kept[path, offsets] if source is None else self.reader.read(source, Box(offsets, sizes))

    def _replicated(self, name: str) -> jax.Array:
        values = self.reader.read(self.names[name])
        # Not device_put, which has all processes compare their values by a collective.
        return jax.make_array_from_callback(
            values.shape, self.plan.replicated, lambda index: np.asarray(values[index])
        )
