"""Saving a training run to a DCP checkpoint and loading it on any number of ranks under any strategy.

Tensors are stored under their global shapes, so a checkpoint does not depend on the ranks that saved it::

    saved by 3 ranks      the checkpoint           loaded by 2 ranks
    rank 0: rows [0,4) \\                          / rank 0: rows [0,7)
    rank 1: rows [4,4)  > model.w: rows [0,11) ---
    rank 2: rows [4,11)/                           \\ rank 1: rows [7,11)

Any program can read it with plain ``torch.distributed.checkpoint.load``. Loading here uses this package's own reader,
because torch's metadata reader executes code that a checkpoint contains.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from bridge.core.formats import CheckpointError, CheckpointReader, open_checkpoint
from bridge.core.formats.saving import pending
from bridge.core.formats.saving.pending import PendingSave, SaveExtras
from bridge.core.formats.saving.steps import choose_step
from bridge.core.formats.stores.store import path_here
from bridge.core.mapping.plan.running import AnyMapping
from bridge.core.mapping.states.plain_states import in_plain_names
from bridge.core.text import first_lines, first_of
from torch_impl.checkpoint.contents import (
    GroupUpdate,
    in_one_piece,
    is_stateless,
    materialize_state,
    model_tensors,
    named_tensors,
    optimizer_tensors,
    plan_group_updates,
    state_tree,
    tensor_of,
    train_values,
)
from torch_impl.checkpoint.mapped import mapped_reader, mapped_tree
from torch_impl.checkpoint.moments import MODES, OtherFormat, held_boxes, other_formats
from torch_impl.checkpoint.saving import PlannedSave
from torch_impl.comm.agreement import agree, background_group, group_of, rank
from torch_impl.diagnostics.tensors import named_main_parameters
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.remainders import set_main_values
from torch_impl.dtensor.tensor import count_write

# How many names an error shows: a model may have thousands.
_SHOWN = 10
# The most frequent reasons why names or dtypes differ.
_SUSPECTS = (
    "(another model? another main_dtype? another exp_avg_dtype, exp_avg_sq_dtype or momentum_dtype of the "
    "optimizer?)"
)

_CASTS = (
    "\nParameters that are frozen when they are sharded keep their original dtype. twinshard convert "
    "--cast 'PATTERN=DTYPE' makes a checkpoint with weights of another dtype"
)


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    train: Mapping[str, Any] | None = None,
    *,
    mapping: AnyMapping | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save weights, optimizer state and train state as one new DCP checkpoint; all ranks of ``process_group`` call it.

    Each rank writes its own rows, which the layout determines. The checkpoint appears at ``path``, on a file system
    that all ranks share, complete and synced to disk, or not at all. Before the first optimizer step, moments are 0.

    Args:
        path: a directory that does not exist yet; missing parents are made.
        model: sharded by ``fully_shard``, or a plain module whose tensors are equal on all ranks.
        optimizer: over the model's parameters.
        train: nested mapping of str to int or numpy array, equal on all ranks; ints become 0-d int64 tensors.
        mapping: a family's name, a file or a table (``bridge.core.mapping``), one side of which matches the model. The
            checkpoint gets the other side's names and layouts, exactly as ``twinshard convert`` with this mapping would
            make it from the plain checkpoint. Each rank translates its own rows. For a mapping with more than two
            conventions, ``load_mapping(name).between("hf", "torchtitan")`` selects two.
        process_group: the ranks that save together, by default the ranks of the meshes of the model's parameters, or
            all ranks for a plain module. Several groups may save at once, to different paths. Pipeline stages that
            have separate meshes save into one checkpoint with a group that contains all of them.

    Raises:
        FileExistsError: ``path`` already exists; nothing was written.
        ValueError: state that cannot be saved, by name; nothing was written.
        CheckpointError: mapping and model do not fit; or ranks of the group were given different paths, or have
            different names, shapes or train states (the text names them); or writing failed, on the rank and for the
            reason in the text; nothing is left behind.
    """
    start_save(
        path, model, optimizer, train, mapping=mapping, process_group=process_group, asynchronous=False
    )


def save_checkpoint_async(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    train: Mapping[str, Any] | None = None,
    *,
    mapping: AnyMapping | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> PendingSave:
    """Save the same files as ``save_checkpoint``, while training continues; the same ranks call it.

    When this returns, the rows that this rank will write have been copied to host memory, so the state may change. A
    thread writes them, and agrees with the other ranks over a separate process group (gloo), so its messages never mix
    with training's collectives. Host memory until the rows are written: the bytes of this rank's own rows, and this
    rank's share of replicated tensors. One save is pending at a time; the next save first waits for it.

    Example::

        pending = save_checkpoint_async("runs/10", model, optimizer, {"step": 10})
        train_some_more(model, optimizer)
        pending.wait()  # complete on disk, or raises

    ``wait`` raises an error of the thread on all ranks. If nobody called ``wait``, the next save raises it, or at the
    end of the program it goes to stderr, and makes the exit status 120. The program ends when the save has ended. Call
    ``wait`` before ``torch.distributed.destroy_process_group``, because ranks cannot agree without a process group.

    Arguments, and errors that are raised at once: as for ``save_checkpoint``, except errors of writing.
    ``CheckpointError`` also for an earlier asynchronous save that failed.
    """
    return start_save(path, model, optimizer, train, mapping=mapping, process_group=process_group)


def start_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    train: Mapping[str, Any] | None,
    *,
    mapping: AnyMapping | None = None,
    process_group: dist.ProcessGroup | None = None,
    extras: SaveExtras | None = None,
    asynchronous: bool = True,
) -> PendingSave:
    """Save, in the background or at once."""

    def tree() -> dict[str, Any]:
        if mapping is None:
            return state_tree(model, optimizer, train)
        return mapped_tree(mapping, model, optimizer, train)

    planned = PlannedSave(
        path,
        tree,
        extras or SaveExtras(),
        copy=asynchronous,
        group=together(model, process_group),
        mesh_ranks=mesh_ranks(model),
    )
    if not asynchronous:
        planned.write()
        return pending.finished(planned.path)
    try:
        group = background_group(planned.group)
    except BaseException:
        planned.abort()
        raise
    return pending.start(planned.path, lambda: planned.write(group))


def mesh_ranks(model: nn.Module) -> list[int]:
    """The ranks of the meshes of the model's parameters, in order; empty for a plain module."""
    meshes = {param.device_mesh for _, param in named_main_parameters(model) if isinstance(param, DTensor)}
    return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})


def together(model: nn.Module, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group of ranks that save or load ``model`` together, see ``save_checkpoint``; None for the default group."""
    return group_of(process_group, () if process_group is not None else mesh_ranks(model))


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    moments: str = "same",
    mapping: AnyMapping | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a DCP checkpoint into a live model and optimizer, in place. Returns the train state.

    All ranks of ``process_group`` call it.

    Each rank reads its own rows. Everything is read and checked on every rank before anything is modified, which takes
    memory for one more copy of this rank's part. A pending save is waited for first, and its error is raised here if
    it failed and nobody has seen the error. The hyperparameters of each parameter group (lr, betas, ...) become the
    saved ones; hyperparameters that were not saved stay. The next forward uses the new weights.

    Args:
        path: the checkpoint's directory, or a directory of steps, whose latest complete step is loaded.
        model: sharded in any way, with the saved tensors' names, global shapes and dtypes.
        optimizer: over the model's parameters; None to load weights only.
        step: the number of the step to load instead of the latest.
        moments: "same": they must have been saved in the format of this optimizer. "convert": moments in another
            format, such as float32 for float8 with scales, become this optimizer's, rounded as an update rounds.
        mapping: a family's name, a file or a table (``bridge.core.mapping``) between the names and layouts of the
            checkpoint and those of the model. The checkpoint may then have any format: Orbax, safetensors, DCP. Each
            rank reads only the elements that its rows need.
        process_group: the ranks that load together, as for ``save_checkpoint``.

    Raises:
        FileNotFoundError, NotADirectoryError: no directory at ``path``.
        CheckpointError: the checkpoint is damaged, or belongs to another model or to other moment dtypes (the text
            lists the names or tensors that differ); or it lacks the step, or has no complete step; or ranks of the
            group were given different paths or steps.
        ValueError: the optimizer's initial state is not known; ``moments`` is another word; ``step`` is not an int.
    """
    if moments not in MODES:
        raise ValueError(f"moments: expected {' or '.join(map(repr, MODES))}, got {moments!r}")
    added: list[torch.Tensor] = []
    directory, group = path_here(path), together(model, process_group)
    first = rank(group) == 0

    def choose() -> str | None:
        # The step to load may be the one that this run is still saving.
        pending.settle()
        # Saves may end meanwhile, so the other ranks take the first rank's choice.
        return os.path.relpath(choose_step(directory, step), directory) if first else None

    claim = {"the call": "a load", "the path": str(directory), "the step": repr(step)}
    _, chosen = agree(choose, lambda choices: choices, group, claim)

    def stage() -> _Staged:
        if optimizer is not None:
            # Saved moments are read into live ones, which an optimizer has only after its first step.
            added.extend(materialize_state(optimizer, overwritten=True))
        with open_checkpoint(directory / str(chosen)) as reader:
            named = in_plain_names(reader)
            if mapping is not None:
                named = mapped_reader(reader, mapping, model, optimizer)
            return _stage(named, model, optimizer, convert=moments == "convert")

    try:
        staged, _ = agree(stage, group=group)
    except BaseException:
        # A failed load leaves the optimizer as it was.
        if optimizer is not None:
            for parameter in added:
                optimizer.state.pop(parameter, None)
        raise
    staged.apply()
    return staged.train


@dataclass(frozen=True)
class _Staged:
    """What was read and checked on this rank; applying it cannot fail.

    split: tensors that are stored with remainders, and their new values.
    """

    live: tuple[torch.Tensor, ...]
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    split: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    groups: tuple[GroupUpdate, ...]
    train: dict[str, Any]

    def apply(self) -> None:
        with torch.no_grad():
            for view, new in self.copies:
                view.copy_(new)
        for tensor in self.live:
            # Ranks without rows must see the change as well: all ranks gather the new weights together, or none does.
            if isinstance(tensor, DTensor):
                count_write(tensor)
        for tensor, values in self.split:
            set_main_values(tensor, local_of(values))
        for group in self.groups:
            group.apply()


def _stage(
    reader: CheckpointReader, model: nn.Module, optimizer: Optimizer | None, *, convert: bool
) -> _Staged:
    if reader.format != "dcp":
        raise CheckpointError(
            f"{reader.path}: expected a DCP checkpoint, found the {reader.format} format: convert it with "
            f"`twinshard convert {reader.path} NEW --to dcp`, or load it with a mapping"
        )
    live = dict(named_tensors({"model": model_tensors(model)}))
    if optimizer is not None:
        live |= named_tensors({"optimizer": {"state": optimizer_tensors(model, optimizer)}})
        # Checked first: the list of all missing names would be less clear.
        stored = any(name.startswith("optimizer.state.") for name in reader.tensors)
        if not stored and not is_stateless(optimizer):
            raise CheckpointError(
                f"{reader.path}: expected optimizer state, found none: load the weights alone with optimizer=None"
            )
    others = [] if optimizer is None else other_formats(reader, model, optimizer)
    if others and not convert:
        raise CheckpointError(_refused(reader, others))
    renewed = {name for moment in others for name in moment.names}
    _check_names(reader, live, optimizer is not None, renewed)
    kept = {name: tensor for name, tensor in live.items() if name not in renewed}
    whole = {name: in_one_piece(tensor) for name, tensor in kept.items()}
    _check_tensors(reader, whole)
    split = {name: tensor for name, tensor in whole.items() if tensor is not kept[name]}
    for name, tensor in split.items():
        for box, view in held_boxes(tensor):
            view.copy_(tensor_of(reader.read(name, box), view.dtype))
    copies = [
        (view, tensor_of(reader.read(name, box), view.dtype))
        for name, tensor in whole.items()
        if name not in split
        for box, view in held_boxes(tensor)
    ]
    copies += [copy for moment in others for copy in moment.copies(reader)]
    groups = plan_group_updates(reader, model, optimizer) if optimizer is not None else ()
    train = {name: reader.read(name) for name in reader.tensors if name.startswith("train.")}
    pairs = tuple((kept[name], tensor) for name, tensor in split.items())
    return _Staged(tuple(live.values()), tuple(copies), pairs, tuple(groups), train_values(train))


def _refused(reader: CheckpointReader, others: Sequence[OtherFormat]) -> str:
    title = (
        f"{reader.path}: {len(others)} moments are stored in another format than the optimizer's exp_avg_dtype and "
        'exp_avg_sq_dtype; load_checkpoint(..., moments="convert") converts them'
    )
    return "\n".join([title, *first_lines([moment.described(reader) for moment in others], _SHOWN)])


def _check_names(
    reader: CheckpointReader, live: Iterable[str], with_optimizer: bool, renewed: Collection[str]
) -> None:
    # Train state is returned unchanged, hyperparameters may be missing, and a conversion's notes concern only the
    # checkpoint, so none of them must match the live run.
    ignored = ("train.", "twinshard.", "optimizer.param_groups." if with_optimizer else "optimizer.")
    stored = {name for name in (*reader.tensors, *reader.objects) if not name.startswith(ignored)} - {
        *renewed
    }
    expected = set(live) - {*renewed}
    problems = [
        f"{len(names)} {what}: {first_of(sorted(names))}"
        for what, names in (("missing", expected - stored), ("unexpected", stored - expected))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{reader.path}: expected the {len(expected)} tensors of this model"
            f"{' and its optimizer' if with_optimizer else ''}, found {'; '.join(problems)} {_SUSPECTS}"
        )


def _check_tensors(reader: CheckpointReader, live: Mapping[str, torch.Tensor]) -> None:
    wrong, casts = [], False
    for name, tensor in live.items():
        info = reader.tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if info.shape != tuple(tensor.shape) or info.dtype.name != dtype:
            casts |= info.shape == tuple(tensor.shape) and name.startswith("model.")
            wrong.append(
                f"{name}: expected {dtype} {tuple(tensor.shape)}, found {info.dtype.name} {info.shape}"
            )
    if wrong:
        raise CheckpointError(
            f"{reader.path}: {len(wrong)} tensors differ {_SUSPECTS}\n"
            + "\n".join(first_lines(wrong, _SHOWN))
            + (_CASTS if casts else "")
        )
