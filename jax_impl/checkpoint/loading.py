"""Load a checkpoint onto any plan: our own in any format, or one that another JAX program saved with stock Orbax.

``matching.py`` matches stored tensors to the plan's; ``placing.py`` reads the boxes of each device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from bridge.core.formats import CheckpointError, CheckpointReader, TreePath
from bridge.core.formats.saving import pending
from bridge.core.formats.saving.steps import choose_step
from bridge.core.formats.stores.store import path_here
from bridge.core.mapping.plan.running import AnyMapping
from jax_impl.checkpoint.by_path import TreeReader
from jax_impl.checkpoint.contents import mapped_reader
from jax_impl.checkpoint.conversion import Conversion, conversion
from jax_impl.checkpoint.matching import Match, Wanted, match, saved_tensors
from jax_impl.checkpoint.names import KEY_IMPLS, check_key_impls, key_impls, state_tensors, train_values
from jax_impl.checkpoint.placing import Tensors
from jax_impl.comm.agreement import TIMEOUT, Processes
from jax_impl.optimizer.logical import fit_to_plan, warn_of_whole_moments
from jax_impl.runtime.groups.memory_kinds import kinds_like, move
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan
from jax_impl.runtime.groups.variables import Variables
from jax_impl.train_state import TrainState, initial_moments, place_variables, trainable

_InitialValues: TypeAlias = tuple[Buffers | None, Variables | None]
"""The caller's weights and variables for tensors that a checkpoint lacks, or None."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The result of ``load_checkpoint``.

    ``state``: ready for a train step made with the same plan and optimizer. ``train``: the nested dict that was saved,
    with ints for 0-d integers and NumPy arrays for the rest. No value goes through JAX, which would truncate 64-bit
    values. If another program saved a ``step`` next to its trees, ``train`` contains that, too. ``objects``: values
    that are not arrays, by tree path, such as the hyperparameters in a checkpoint from PyTorch. A load does not use
    them; pass them to ``save_checkpoint`` to keep them. ``fresh``: tensors that the checkpoint lacked, by their names
    in ``save_checkpoint``: moments from ``optimizer.init``, weights and variables from the caller. ``ignored``: the
    checkpoint's tensors that were not read.
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
    initial: TrainState | Buffers | None = None,
    variables: Mapping[str, jax.Array] | None = None,
    tree: str | None = None,
    moments: str = "same",
    mapping: AnyMapping | None = None,
    timeout: float = TIMEOUT,
) -> LoadedCheckpoint:
    """Load an Orbax, DCP or safetensors checkpoint onto the plan's devices, however many devices saved it.

    Checkpoints of ordinary JAX programs load, too: a tree of parameters at the top or below ``params`` or ``model``,
    states of nnx modules and optimizers, linen train states, optax states. All names, shapes and dtypes are checked
    before any data is read; no code in the checkpoint is executed.

    Every process calls this and reads the data that its devices need; an error on one process is raised on all. Extra
    host memory: one device's part of one unit (a stack counts as one unit), and under 150 MiB of read buffers. The load
    first waits for a pending save, and raises if that save failed and its error was not raised yet.

    Args:
        path: the checkpoint, or a directory of steps, from which the latest complete step is loaded.
        plan: from ``fully_shard`` or ``plan_sharding``, for the model that was saved.
        optimizer: the optimizer with which the run continues. None: load only weights; ``opt_state`` of the result is
            None.
        like: a state of this plan and optimizer; each array is placed in the same kind of memory (``pinned_host``) as
            its counterpart, by default in device memory. ``abstract_state(plan, optimizer, offload=...)`` is enough.
        step: the number of the step to load instead of the latest.
        strict: whether the checkpoint must have exactly the tensors of this plan and optimizer. If False, unused
            tensors are ignored, and moments that are missing, or have another shape or dtype, start fresh. Moments that
            fit are also kept for another optimizer, at any position in a chain. A parameter's moments are kept together
            with their count, or not at all. Weights must exist with the right shapes, unless ``initial`` has
            replacements; another floating dtype is cast. If any moment is fresh, a device temporarily holds the moments
            of ``optimizer.init`` in addition to the loaded ones.
        initial: weights of this plan, or a state. Where the checkpoint lacks weights or variables, or has them in
            another shape, the load copies ``initial``'s and starts fresh moments. Needs ``strict=False``, and a
            checkpoint with at least one of the weights; the result's ``fresh`` names the copied tensors.
        variables: ``variable_leaves(model)``, used for variables that the checkpoint lacks; if not strict, also for
            variables of another shape or dtype. Default: the variables of ``initial``, if ``initial`` is a state.
        tree: the path of the weights in a checkpoint with several models, such as "student" or "ema/params". The tree
            is searched like a whole checkpoint; an optimizer's state may also be next to it. The rest is ignored.
        moments: "same": the moments must have this optimizer's dtypes and scales. "convert": moments in another format
            are decoded and stored in this optimizer's format; a device temporarily holds them in float32. Inside
            another optimizer (a chain), moments with scales are kept or refused, never converted.
        mapping: a family's name, a file or a table (``bridge.core.mapping``) that translates the checkpoint, in any
            format, to the plan's names and layouts. Each device reads only the elements of its own boxes. Moments whose
            scales belong to another model's rows need ``moments="convert"``.
        timeout: seconds that processes wait for each other.

    Raises:
        FileNotFoundError, NotADirectoryError: ``path`` is not a directory.
        ValueError: an unknown ``moments``; ``variables`` of another model; ``like`` of another plan or optimizer;
            ``initial`` of another plan, already donated, or together with ``strict``.
        CheckpointError: the checkpoint is damaged, or belongs to another format, model or optimizer (the error lists
            the differences); the step, or any complete step, is missing; another process failed or did not answer.
    """
    processes = Processes(plan.mesh, "load", timeout)
    with processes.step("choose") as chosen:
        if moments not in ("same", "convert"):
            raise ValueError(f'moments: expected "same" or "convert", got {moments!r}')
        values = _initial_values(plan, initial, variables, strict=strict)
        directory = path_here(path)
        chosen.claim = f"the path {directory}, step={step!r}"
        # The caller wants the checkpoint that this run is still saving.
        pending.settle()
        if processes.first:
            # A save may end meanwhile: the other processes load the step that the first process saw.
            chosen.shared = os.path.relpath(choose_step(directory, step), directory)
    directory = directory / chosen.shared
    with processes.step("read"):
        with TreeReader(directory, _translation(plan, optimizer, mapping)) as reader:
            asked = _Asked(strict, (tree or "").strip("/"), moments == "convert")
            loaded = _load(reader, plan, optimizer, values, like, asked)
        warn_of_whole_moments(plan, loaded.state.opt_state)
        return loaded


@dataclass(frozen=True)
class _Asked:
    strict: bool
    tree: str
    convert: bool


def _initial_values(
    plan: ShardingPlan,
    initial: TrainState | Buffers | None,
    variables: Mapping[str, jax.Array] | None,
    *,
    strict: bool,
) -> _InitialValues:
    if initial is None:
        return None, None if variables is None else place_variables(plan, variables)
    if strict:
        raise ValueError(
            "initial: expected strict=False, since a strict load takes no initial values, got strict=True"
        )
    if variables is None and isinstance(initial, TrainState):
        # Copies, because a step may donate either state.
        variables = {path: jnp.copy(value) for path, value in initial.variables.items()}
    weights = initial.weights if isinstance(initial, TrainState) else initial
    if weights.keys() != plan.arrays.keys():
        raise ValueError(
            f"initial: expected the plan's weights {list(plan.arrays)[:12]}, got {list(weights)[:12]}: init_state or "
            "fully_shard returns them"
        )
    for key, array in weights.items():
        if not isinstance(array, jax.Array) or array.dtype != plan.arrays[key].dtype:
            dtype = getattr(array, "dtype", type(array).__name__)
            raise ValueError(
                f"initial: array {key!r}: expected a jax.Array of {plan.arrays[key].dtype}, got "
                f"{type(array).__name__} of {dtype}"
            )
        plan.check_array(key, array)
    return weights, None if variables is None else place_variables(plan, variables)


def _load(
    reader: TreeReader,
    plan: ShardingPlan,
    optimizer: optax.GradientTransformation | None,
    initial_values: _InitialValues,
    like: TrainState | None,
    asked: _Asked,
) -> LoadedCheckpoint:
    initial_weights, initial_variables = initial_values
    weights, opt_state = _abstract(plan, optimizer)
    memory = _memory_kinds(plan, TrainState(weights, opt_state), like)
    changes: Conversion | None = None
    if asked.convert and optimizer is not None:
        changes = conversion(reader, plan, optimizer, weights, opt_state, asked.tree)
        reader, optimizer = changes.reader, changes.optimizer
        opt_state = jax.eval_shape(fit_to_plan(plan, optimizer).init, trainable(plan, weights))
    wanted = Wanted(
        state_tensors(plan, weights, opt_state),
        plan.parameters.keys(),
        with_optimizer=optimizer is not None,
        with_weights=initial_weights is not None,
        with_variables=initial_variables is not None,
        strict=asked.strict,
        tree=asked.tree,
        convert=asked.convert,
    )
    matched = _match(reader, wanted)
    objects = reader.objects
    impls = _checked_impls(reader, plan, matched.sources, objects.pop(KEY_IMPLS, None))
    tensors = Tensors(reader, plan, matched.sources)
    arrays = tensors.weights(weights, initial_weights, memory.weights)
    variables = {
        path: move(
            tensors.variable(path, impls)
            if f"variables/{path}" in matched.sources
            else (initial_variables or {})[path],
            memory.variables[path],
        )
        for path in plan.variables
    }
    fresh = None
    if optimizer is not None and any(name.startswith("opt_state/") for name in matched.fresh):
        fresh = initial_moments(plan, arrays, optimizer)
    if changes is None:
        opt_state = tensors.optimizer(opt_state, fresh, memory.opt_state)
    else:
        anywhere = jax.tree.map(lambda _: "", opt_state)
        opt_state = changes.converted(tensors.optimizer(opt_state, fresh, anywhere))
        opt_state = jax.tree.map(move, opt_state, memory.opt_state)
    state = TrainState(arrays, opt_state, variables)
    train = train_values(reader)
    if matched.step is not None:
        train.setdefault("step", int(reader.read(matched.step)))
    kept = {path: value for path, value in objects.items() if not _in_the_way(path, wanted.tensors)}
    return LoadedCheckpoint(state, train, kept, matched.fresh, matched.ignored)


def _match(reader: TreeReader, wanted: Wanted) -> Match:
    try:
        return match(reader.path, saved_tensors(reader.tensors), wanted)
    except CheckpointError as error:
        if reader.format == "orbax":
            raise
        raise CheckpointError(
            f"{error}. A {reader.format} checkpoint from another framework has other names and layouts: translate it "
            "by `twinshard convert SRC DST --to orbax --mapping NAME`"
        ) from error


def _checked_impls(
    reader: TreeReader, plan: ShardingPlan, sources: Mapping[str, str], saved: object
) -> Mapping[str, str]:
    """The implementations of the plan's random keys, after a check that the checkpoint's keys have the same ones.

    saved: the implementations that the checkpoint records; keys that stock Orbax saved record theirs in their type.
    """
    impls = key_impls(plan)
    typed = {
        path: reader.key_types[source]
        for path in impls
        if (source := sources.get(f"variables/{path}", "")) in reader.key_types
    }
    read = {path: impl for path, impl in impls.items() if f"variables/{path}" in sources}
    check_key_impls(reader, read, {**typed, **(saved if isinstance(saved, Mapping) else {})})
    return impls


def _abstract(
    plan: ShardingPlan, optimizer: optax.GradientTransformation | None
) -> tuple[dict[str, Any], Any]:
    """Abstract weights and optimizer state, without values."""
    weights: dict[str, Any] = {
        key: jax.ShapeDtypeStruct(stored.shape, stored.dtype) for key, stored in plan.arrays.items()
    }
    if optimizer is None:
        return weights, None
    return weights, jax.eval_shape(fit_to_plan(plan, optimizer).init, trainable(plan, weights))


def _translation(
    plan: ShardingPlan, optimizer: optax.GradientTransformation | None, mapping: AnyMapping | None
) -> Callable[[CheckpointReader], CheckpointReader] | None:
    if mapping is None:
        return None
    tensors = state_tensors(plan, *_abstract(plan, optimizer))
    return lambda reader: mapped_reader(reader, mapping, tensors)


def _memory_kinds(plan: ShardingPlan, state: TrainState, like: TrainState | None) -> Any:
    """The kind of memory for each array of the state."""
    variables: Any = {path: jax.ShapeDtypeStruct(v.shape, v.dtype) for path, v in plan.variables.items()}
    if like is not None and state.opt_state is None:
        like = TrainState(like.weights, None, like.variables)
    return kinds_like(like, TrainState(state.weights, state.opt_state, variables))


def _in_the_way(path: TreePath, tensors: Mapping[str, Any]) -> bool:
    """Whether an object, such as the None of an empty part of a chain, is where the plan's next save puts tensors."""
    name = "/".join(map(str, path))
    return any(f"{tensor}/".startswith(f"{name}/") or name.startswith(f"{tensor}/") for tensor in tensors)
