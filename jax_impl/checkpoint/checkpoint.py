"""Save a train state as logical arrays from any mesh, strategy and engine, to be loaded with any other.

::

    plan of 3 devices                     checkpoint (Orbax)            plan of 2 devices, other strategy
    flat buffer   [..a..|..a b.|.b..]     params/a   [ chunk | chunk ]  [...a...|.b....]
    pieces          ^     ^             -> opt_state/mu/a ...         ->   boxes read by region
                  one device at a time    opt_state/count, train/*

Nothing is gathered: a device's shard is cut into boxes of parameters. A chunk of the file may need boxes of several
devices; ``chunks.py`` assembles the chunk as the boxes arrive. Loading reads, for each device, the boxes that it owns.
``names.py`` defines the names.

Several processes save in four steps; a step begins when the previous step has succeeded on all processes::

    open       the first process makes a temporary directory
    write      each writes its complete chunks to its own store, and the boxes of other chunks to files next to it
    assemble   each assembles its part of those other chunks
    commit     the first process joins the stores, checks that every chunk exists, and renames the directory

An asynchronous save copies this process's data to host memory in the first step, and runs the other steps in a thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.formats import CheckpointError, TreePath
from bridge.core.formats.orbax.writer import OrbaxPart, OrbaxWriter
from bridge.core.formats.saving import pending
from bridge.core.formats.saving.pending import PendingSave, SaveExtras
from bridge.core.formats.stores.store import path_here
from bridge.core.mapping.plan.running import AnyMapping
from jax_impl.checkpoint.chunks import Chunks
from jax_impl.checkpoint.contents import Contents, MappedContents
from jax_impl.checkpoint.names import KEY_IMPLS, key_impls, state_tensors, train_tensors
from jax_impl.comm.agreement import TIMEOUT, Processes
from jax_impl.runtime.groups.sharding_plan import ShardingPlan
from jax_impl.train_state import TrainState

_SPILLED = "spilled"


def save_checkpoint(
    path: str | os.PathLike[str],
    plan: ShardingPlan,
    state: TrainState,
    train: Mapping[str, Any] | None = None,
    *,
    objects: Mapping[TreePath, object] | None = None,
    item: str | None = None,
    mapping: AnyMapping | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Save weights, optimizer state and ``train`` as a new Orbax checkpoint, which stock Orbax can read on any devices.

    The checkpoint appears complete and synced to disk, or not at all. Extra host memory: one unit's part of the weights
    (one layer's part for a stack) if devices have their own memory, and under 200 MiB of write buffers.

    With several processes (``jax.distributed``), each process that has devices of the mesh calls this and writes the
    rows that its devices hold. The processes need a shared file system. An error on one process is raised on all.

    Args:
        path: a directory that does not exist yet; missing parent directories are created.
        plan: the plan that ``state`` belongs to.
        train: nested mapping of str to int (64 bits) or NumPy array. ints become 0-d int64 arrays. With several
            processes, the first process's values are saved.
        objects: JSON values by tree path: None, bool, int, float, str, and lists, tuples and dicts of these.
        item: name of a directory in ``path`` for the arrays. Stock ``CheckpointManager`` restores ``path`` as one of
            its steps with ``item="default"`` only; stock ``StandardCheckpointer`` then restores ``path/default``, and
            ``path`` without an item. ``load_checkpoint`` and ``twinshard`` accept both.
        mapping: a family's name, a file or a table (``bridge.core.mapping``); the plan matches one of its sides. The
            checkpoint gets the other side's names and layouts, as ``twinshard convert`` with this mapping would write
            them from the plain checkpoint. Each process translates its own rows; all processes pass the same ``train``,
            which may contain sizes of axes. ``load_mapping(name).between("hf", "flax")`` selects two of a mapping's
            conventions.
        timeout: seconds that processes wait for each other in each of the four steps.

    Raises:
        FileExistsError: ``path`` exists already.
        ValueError: a state or train value that cannot be saved, by name; an ``item`` that is not a valid name.
        CheckpointError: names collide, the mapping does not fit the state, or another process failed, was given another
            path, or did not answer.
        OSError: a write failed.
    """
    request = SaveRequest(path, plan, state, train, objects, item, mapping, timeout)
    start_save(request, asynchronous=False)


def save_checkpoint_async(
    path: str | os.PathLike[str],
    plan: ShardingPlan,
    state: TrainState,
    train: Mapping[str, Any] | None = None,
    *,
    objects: Mapping[TreePath, object] | None = None,
    item: str | None = None,
    mapping: AnyMapping | None = None,
    timeout: float = TIMEOUT,
) -> PendingSave:
    """Save as ``save_checkpoint`` does while training continues. Only timestamps and random numbers differ.

    When this returns, the rows that this process will write have been copied to host memory, so a step may donate the
    state. A thread writes the copies, and agrees with the other processes through the key-value store of
    ``jax.distributed``, not by collectives. Host memory: the bytes of this process's own rows (one process copies an
    array that several processes hold whole), one array's shard during the copying, and under 200 MiB of write buffers.
    Only one save is pending at a time; the next save first waits for it.

    Example::

        pending = save_checkpoint_async("runs/10", plan, state, {"step": 10})
        state, metrics = step(state, tokens)
        pending.wait()  # complete on disk, or raises

    An error in the thread is raised on all processes by ``wait``, or by the next save if nobody called ``wait``. If
    there is no next save, the error goes to stderr at the end of the program, and the exit status is 120. The program
    ends only when the save has ended.

    Arguments and immediate errors: as ``save_checkpoint``, except for write errors. Raises ``CheckpointError`` also for
    an earlier asynchronous save that failed.
    """
    return start_save(SaveRequest(path, plan, state, train, objects, item, mapping, timeout))


@dataclass(frozen=True)
class SaveRequest:
    """The arguments of ``save_checkpoint``."""

    path: str | os.PathLike[str]
    plan: ShardingPlan
    state: TrainState
    train: Mapping[str, Any] | None
    objects: Mapping[TreePath, object] | None
    item: str | None
    mapping: AnyMapping | None
    timeout: float


def start_save(
    request: SaveRequest, extras: SaveExtras | None = None, *, asynchronous: bool = True
) -> PendingSave:
    """Save, in the background or at once."""
    opened = _OpenedSave(request, extras or SaveExtras(), copy=asynchronous)
    if not asynchronous:
        opened.write()
        return pending.finished(opened.target)
    return pending.start(opened.target, opened.write)


class _OpenedSave:
    """A checkpoint whose directory exists but is still empty. ``write`` completes the checkpoint.

    copy: whether the state may change before ``write`` has finished.
    """

    def __init__(self, request: SaveRequest, extras: SaveExtras, *, copy: bool) -> None:
        plan, state, objects = request.plan, request.state, request.objects
        self.target = path_here(request.path)
        self._processes = processes = Processes(plan.mesh, "save", request.timeout, background=copy)
        self._item = request.item
        self._extras = extras
        self._writer: OrbaxWriter | None = None
        self._mapped: MappedContents | None = None
        try:
            with processes.step("open") as opened:
                opened.claim = f"the path {self.target}"
                # Inside the step: some processes may already know that the previous save failed.
                pending.settle()
                self._contents = Contents.of(plan, state := state.placed(plan))
                values = dict(train_tensors(request.train or {}))
                if request.mapping is not None:
                    self._mapped = MappedContents(
                        request.mapping,
                        self._contents,
                        state_tensors(plan, state.weights, state.opt_state),
                        values,
                        objects or {},
                        alone=not processes.several,
                    )
                    objects = self._mapped.objects
                if processes.first:
                    extras.before()
                    self._writer = OrbaxWriter(
                        self.target, item=self._item, process=processes.index if processes.several else None
                    )
                    opened.shared = json.dumps(
                        [self.target.name, self._writer.temporary.name, self._fingerprint]
                    )
                    self._own = _Own(values, dict(objects or {}), key_impls(plan))
                if copy:
                    self._contents = self._contents.on_host(first=processes.first)
                    if processes.first:
                        self._own = deepcopy(self._own)
        except BaseException:
            if self._writer is not None:
                self._writer.abort()
            raise
        self._shared = opened.shared

    def write(self) -> None:
        processes, writer = self._processes, self._writer
        part: OrbaxPart | None = writer
        name, working, fingerprint = json.loads(self._shared)
        temporary = self.target.with_name(working)
        try:
            with processes.step("write"):
                if self._fingerprint != fingerprint:
                    raise CheckpointError(
                        "expected the first process's plan and state on all processes, got other names, shapes, "
                        "dtypes or shardings on this process"
                    )
                part = part or _join(self.target, name, temporary, self._item, processes.index)
                chunks = Chunks(part, temporary / _SPILLED, processes.index)
                if self._mapped is None:
                    self._contents.write(part, chunks, first=processes.first)
                else:
                    self._mapped.write(self._contents, part, chunks, first=processes.first)
                chunks.finish()
                if writer is not None:
                    self._own.write(writer)
            with processes.step("assemble"):
                chunks.write_spilled(processes.members)
                part.finish()
            with processes.step("commit"):
                if writer is not None:
                    shutil.rmtree(temporary / _SPILLED, ignore_errors=True)
                    for file, content in self._extras.files.items():
                        (temporary / file).write_bytes(content)
                    writer.commit(processes.members if processes.several else ())
                    self._extras.committed()
        except BaseException:
            # All processes have stopped writing: a step fails only after it has ended on all of them.
            if part is not None:
                part.abort()
            raise

    @property
    def _fingerprint(self) -> str:
        mapped = [] if self._mapped is None else self._mapped.fingerprint
        return self._contents.fingerprint + hashlib.sha256(json.dumps(mapped).encode()).hexdigest()


def _join(target: Path, name: str, temporary: Path, item: str | None, process: int) -> OrbaxPart:
    if target.name != name or not temporary.is_dir():
        raise CheckpointError(
            f"{target}: expected all processes to save the same {name!r} and to see {temporary}, which the first "
            "process created: give all processes the same path in a shared file system"
        )
    return OrbaxPart(target, temporary / (item or ""), process)


@dataclass(frozen=True)
class _Own:
    """Data of the first process only: train values by path, objects by tree path, algorithms of random keys."""

    values: Mapping[tuple[str, ...], np.ndarray]
    objects: Mapping[TreePath, object]
    impls: dict[str, str]

    def write(self, writer: OrbaxWriter) -> None:
        for leaf, array in self.values.items():
            info = writer.add_tensor(leaf, array.shape, array.dtype)
            for box in info.chunks:
                writer.write(info.name, box, array[box.slices()])
        for leaf_path, value in {**self.objects, **({KEY_IMPLS: self.impls} if self.impls else {})}.items():
            writer.add_object(leaf_path, value)
