"""Loading a checkpoint onto any plan: ours in any format, or one that another JAX program saved by stock Orbax.

``matching.py`` says which stored tensor is which, ``placing.py`` reads each device's boxes of those.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bridge.core.formats import CheckpointError, CheckpointReader, TreePath
from bridge.core.formats.saving import pending
from bridge.core.formats.saving.steps import choose_step
from bridge.core.formats.stores.store import path_here
from bridge.core.mapping.plan.running import AnyMapping
from jax_impl.checkpoint.by_path import TreeReader
from jax_impl.checkpoint.conversion import Conversion, conversion
from jax_impl.checkpoint.mapped import mapped_reader
from jax_impl.checkpoint.matching import Match, Wanted, match, saved_tensors
from jax_impl.checkpoint.names import KEY_IMPLS, check_key_impls, key_impls, state_tensors, train_values
from jax_impl.checkpoint.placing import Tensors
from jax_impl.comm.agreement import TIMEOUT, Processes
from jax_impl.optimizer.logical import fit_to_plan, warn_of_whole_moments
from jax_impl.runtime.groups.memory_kinds import kinds_like, move
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan
from jax_impl.runtime.groups.variables import Variables
from jax_impl.train_state import TrainState, initial_moments, place_variables, trainable


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What ``load_checkpoint`` returns.

    ``state``: ready for a train step made with the same plan and optimizer. ``train``: the nested dict that was saved,
    with ints for 0-d integers and NumPy arrays for the rest; no value went through JAX, which would cut 64-bit ones. A
    ``step`` beside another program's trees is there, too. ``objects``: values that are no arrays, by tree path, such as
    the hyperparameters in a checkpoint that came from PyTorch. Not used here; give them to ``save_checkpoint`` to keep
    them. ``fresh``: tensors that the checkpoint lacked, by the names that ``save_checkpoint`` gives: moments as
    ``optimizer.init`` makes them, weights and variables as the caller gave them. ``ignored``: the checkpoint's tensors
    that were not read.
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
    """Load a checkpoint onto the plan's devices, whoever saved it on however many: Orbax, DCP or safetensors.

    Also those of ordinary JAX programs: a tree of parameters at the top or below ``params`` or ``model``, states of nnx
    modules and optimizers, linen train states, optax states. Names, shapes and dtypes are all checked before any data
    is read; no code in the checkpoint is executed.

    Each of several processes calls this and reads what its devices need; an error on one of them is raised on all.
    Extra host memory: one device's part of one unit, as which a stack counts, and under 150 MiB for what is being read.
    A save that is still pending is waited for first, and raises if it failed and nobody was told.

    Args:
        path: the checkpoint, or a directory of steps, of which the latest that is complete is taken.
        plan: from ``fully_shard`` or ``plan_sharding``, of the model that was saved.
        optimizer: the one that the run goes on with. None: weights only, with ``opt_state`` None in the result.
        like: a state of this plan and optimizer, in whose kinds of memory (``pinned_host``) arrays are placed; by
            default all are in the devices' own. ``abstract_state(plan, optimizer, offload=...)`` will do.
        step: the number of another step to take.
        strict: whether the checkpoint must have this plan's and optimizer's tensors and no others. If False, tensors
            that nothing asks for are ignored, and moments that are missing, or of another shape or dtype, are fresh
            ones. Moments that fit are kept for another optimizer, too, at any place in a chain. A parameter's
            moments are kept together, and with their count, or not at all. Weights must be there in their shapes,
            unless ``initial`` has others; in another floating dtype they are cast. Where a moment is fresh, a device
            holds the moments of ``optimizer.init`` besides the loaded ones for the while.
        initial: weights of this plan, or a state. Copies of its weights and variables are taken where the checkpoint
            has none or those of another shape, with fresh moments. Needs ``strict=False``, and a checkpoint with at
            least one of the weights; the result's ``fresh`` names what was taken.
        variables: ``variable_leaves(model)``, for those variables that the checkpoint lacks; if not strict, also for
            those that are of another shape or dtype. Default: those of a state that ``initial`` is.
        tree: the place of the weights in a checkpoint that has several models', such as "student" or "ema/params". The
            tree is searched like a whole checkpoint; an optimizer's state may also be beside it. All else is ignored.
        moments: "same": they must have been saved in the dtypes, and with the scales, of this optimizer. "convert":
            those saved otherwise are decoded and stored as this optimizer stores them; a device holds them in float32
            for the while. Moments with scales of an optimizer inside of another (a chain) are kept or refused.
        mapping: a family's name, a file or a table (``bridge.core.mapping``) between the names and layouts of the
            checkpoint, of any format, and those of the plan. Only what a device's boxes are made of is read for it.
            Moments with scales of another model's rows need ``moments="convert"``.
        timeout: seconds that processes wait for one another.

    Raises:
        FileNotFoundError, NotADirectoryError: no directory at ``path``.
        ValueError: another word for ``moments``; ``variables`` of another model, ``like`` of another plan or optimizer,
            ``initial`` of another plan, donated or with ``strict``.
        CheckpointError: damaged, of another format, or of another model or optimizer (the differences are listed);
            without the step, or any complete one; or another process failed or was not heard of.
    """
    processes = Processes(plan.mesh, "load", timeout)
    with processes.step("choose") as chosen:
        if moments not in ("same", "convert"):
            raise ValueError(f'moments: expected "same" or "convert", got {moments!r}')
        initial_values = _initial_values(plan, initial, variables, strict=strict)
        directory = path_here(path)
        chosen.claim = f"the path {directory}, step={step!r}"
        # What this run is still saving is what it means to load.
        pending.settle()
        if processes.first:
            # Saves may end meanwhile: the others take what the first one saw.
            chosen.shared = os.path.relpath(choose_step(directory, step), directory)
    directory = directory / chosen.shared
    with processes.step("read"):
        with TreeReader(directory, _translation(plan, optimizer, mapping)) as reader:
            asked = _Asked(strict, (tree or "").strip("/"), moments == "convert")
            loaded = _load(reader, plan, optimizer, initial_values, like, asked)
        warn_of_whole_moments(plan, loaded.state.opt_state)
        return loaded


@dataclass(frozen=True)
class _InitialValues:
    """The caller's values for what a checkpoint lacks; None: none."""

    weights: Buffers | None
    variables: Variables | None


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
        return _InitialValues(None, None if variables is None else place_variables(plan, variables))
    if strict:
        raise ValueError(
            "initial: expected strict=False with it: a strict load keeps nothing, got strict=True"
        )
    if variables is None and isinstance(initial, TrainState):
        # Copies, because a step may be given all of either state (donated).
        variables = {path: jnp.copy(value) for path, value in initial.variables.items()}
    weights = initial.weights if isinstance(initial, TrainState) else initial
    if weights.keys() != plan.arrays.keys():
        raise ValueError(
            f"initial: expected the plan's weights {list(plan.arrays)[:12]}, got {list(weights)[:12]}: "
            "init_state, or fully_shard, gives them"
        )
    for key, array in weights.items():
        if not isinstance(array, jax.Array) or array.dtype != plan.arrays[key].dtype:
            dtype = getattr(array, "dtype", type(array).__name__)
            raise ValueError(
                f"initial: array {key!r}: expected a jax.Array of {plan.arrays[key].dtype}, got "
                f"{type(array).__name__} of {dtype}"
            )
        plan.check_array(key, array)
    return _InitialValues(weights, None if variables is None else place_variables(plan, variables))


def _load(
    reader: TreeReader,
    plan: ShardingPlan,
    optimizer: optax.GradientTransformation | None,
    initial_values: _InitialValues,
    like: TrainState | None,
    asked: _Asked,
) -> LoadedCheckpoint:
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
        with_weights=initial_values.weights is not None,
        with_variables=initial_values.variables is not None,
        strict=asked.strict,
        tree=asked.tree,
        convert=asked.convert,
    )
    matched = _match(reader, wanted)
    objects = reader.objects
    impls = _checked_impls(reader, plan, matched.sources, objects.pop(KEY_IMPLS, None))
    tensors = Tensors(reader, plan, matched.sources)
    arrays = tensors.weights(weights, initial_values.weights, memory.weights)
    variables = {
        path: move(
            tensors.variable(path, impls)
            if f"variables/{path}" in matched.sources
            else (initial_values.variables or {})[path],
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
            f"{error}. A {reader.format} checkpoint of another framework's model has other names and layouts: "
            "translate it by `twinshard convert SRC DST --to orbax --mapping NAME`"
        ) from error


def _checked_impls(
    reader: TreeReader, plan: ShardingPlan, sources: Mapping[str, str], saved: object
) -> Mapping[str, str]:
    """The implementations of the plan's random keys, which those of the checkpoint's keys were found to be.

    saved: what the checkpoint notes of them; keys that stock Orbax saved have their own in their type.
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
    """Weights and optimizer state without values."""
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
    """Whether an object, such as the None of an empty part of a chain, is where the plan's next save has tensors."""
    name = "/".join(map(str, path))
    return any(f"{tensor}/".startswith(f"{name}/") or name.startswith(f"{tensor}/") for tensor in tensors)
