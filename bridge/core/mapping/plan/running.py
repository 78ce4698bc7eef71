"""Mappings between a run that is in progress and its checkpoints: other names and layouts at save and at load.

::

    save    a process's own boxes of the run's tensors  -> boxes of the checkpoint's tensors, one after the other
    load    a box that a process wants of the run's     -> the boxes of the checkpoint's tensors that make it up

Both are planned like a conversion of a whole checkpoint (`translation.py`), so the results are the same. A process
needs the names, shapes and dtypes of all tensors, and the elements of its own boxes: nothing is gathered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointError, CheckpointReader, TensorInfo, TreePath
from bridge.core.formats.tensors.wrapping import ComputedReader
from bridge.core.mapping.language.operations import Change, ChangedView, PaddedView, fill_changed
from bridge.core.mapping.language.relation import Block, Ranges, TensorView, dense_pieces, elements
from bridge.core.mapping.language.rules import mapping_table
from bridge.core.mapping.language.table import MappingTable
from bridge.core.mapping.one_rule.sizes import require_model, with_config, with_config_fields
from bridge.core.mapping.plan.plan import PlannedTensor, TranslationPlan
from bridge.core.mapping.plan.translation import make_plan
from bridge.core.mapping.states.numbered_states import with_named_states
from bridge.core.mapping.states.plain_states import with_plain_states
from bridge.core.mapping.states.source_tree import find

AnyMapping = str | os.PathLike[str] | MappingTable
"""The name of a shipped family, a TOML file, or a table."""


@dataclass(frozen=True)
class RunState(ComputedReader):
    """The state of a run as a `CheckpointReader`: all tensors' descriptions, and the values that every process has.

    path: names the run in errors. whole: by name, the value of a tensor that this process has completely, or None.
    """

    format: str
    path: str
    tensors: Mapping[str, TensorInfo]
    objects: Mapping[str, object]
    object_paths: Mapping[str, TreePath]
    whole: Callable[[str], np.ndarray | None]

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """CheckpointError for a tensor that no process has whole."""
        value = self.whole(name)
        if value is None:
            raise CheckpointError(
                f"{name} of {self.path} is sharded over processes, but this mapping compares its values (tied "
                "weights to be stored once, scales of rows that the mapping joins, or padding): save without the "
                "mapping, and convert the checkpoint"
            )
        return value if box is None else np.ascontiguousarray(value[box.slices()])


@dataclass(frozen=True)
class Move:
    """Elements of a box of the run's tensor that fill a box of a tensor of the checkpoint.

    name, box: in the checkpoint. source_box: in the run.
    """

    name: str
    box: Box
    block: Block
    change: Change | None
    ranges: Ranges
    source_box: Box

    def values(self, source: np.ndarray) -> np.ndarray:
        """The elements of ``box``, C-contiguous; ``source``: those of ``source_box``.

        CheckpointError if one becomes infinite.
        """
        source = np.ascontiguousarray(source).reshape(self.source_box.sizes)
        target = np.empty(self.box.sizes, source.dtype)
        here = elements(source, self.source_box, self.block.source_index, self.ranges)
        there = elements(target, self.box, self.block.target_index, self.ranges)
        fill_changed(there, here, self.change, self.block.source)
        return target


class SavedAs:
    """A run's state as it will be in a checkpoint with the other side of ``mapping``.

    config: fields as in a `config.json`, which give sizes of axes and name the model. Raises CheckpointError
    (MappingError) with everything that does not fit.
    """

    def __init__(
        self, state: RunState, mapping: AnyMapping, config: Mapping[str, object] | None = None
    ) -> None:
        table = mapping_table(mapping)
        assert table is not None
        table = _with_own_config(table, state, config or {})
        self.plan = make_plan(state, state.format, table, into=_other_side(state, table))
        self._state = state

    @property
    def tensors(self) -> Mapping[str, PlannedTensor]:
        """Every tensor of the checkpoint by name."""
        return self.plan.tensors

    @cached_property
    def objects(self) -> dict[TreePath, object]:
        """Values that are not tensors by path."""
        kept = {path: self._state.objects[name] for path, name in self.plan.objects.values()}
        return kept | dict(self.plan.notes.values())

    def moves(self, source: str, box: Box) -> Iterator[Move]:
        """Where the elements of ``box`` of the run's tensor ``source`` go.

        Over all boxes of all sources, each element of the checkpoint occurs once, except values that the plan knows.
        """
        for name, block, change in self._parts.get(source, ()):
            for ranges in dense_pieces(block, box):
                yield Move(name, block.target_box(ranges), block, change, ranges, box)

    @cached_property
    def _parts(self) -> dict[str, list[tuple[str, Block, Change | None]]]:
        """By source tensor, the tensors made from it, and how."""
        parts: dict[str, list[tuple[str, Block, Change | None]]] = {}
        for name, tensor in self.tensors.items():
            content = tensor.content
            if isinstance(content, np.ndarray):
                continue
            if isinstance(content, PaddedView):
                raise CheckpointError(
                    f"{name} would have padding, which no process of {self._state.path} holds: save without the "
                    "mapping, and convert the checkpoint"
                )
            assert isinstance(content, TensorView | ChangedView)
            changes = content.changes if isinstance(content, ChangedView) else (None,) * len(content.blocks)
            for block, change in zip(content.blocks, changes, strict=True):
                parts.setdefault(block.source, []).append((name, block, change))
        return parts


def _with_own_config(table: MappingTable, state: RunState, config: Mapping[str, object]) -> MappingTable:
    where = f"the configuration of {state.path}"
    require_model(table, config, where)
    # Checking ties needs values, and no process has all values of a tensor.
    return replace(with_config_fields(table, config, where), ties=None, told=None)


def _other_side(state: RunState, table: MappingTable) -> str | None:
    """The convention to save in: the only other one, or else the usual one of the format."""
    own = find(state.tensors.values(), table, None, state.path).convention.name
    others = [name for name in table.conventions if name != own]
    return others[0] if len(others) == 1 else None


class LoadedAs(ComputedReader):
    """A checkpoint under the names and layouts of a run: a `CheckpointReader` of ``reader``, translated by the mapping.

    state: the run, whose shapes give sizes of axes that are otherwise open. config: as in `SavedAs`; a `config.json`
    next to the checkpoint takes precedence. A checkpoint that has the run's own names is read unchanged. Notes of
    places are left out. Raises CheckpointError (MappingError) with everything that does not fit.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        state: RunState,
        mapping: AnyMapping,
        config: Mapping[str, object] | None = None,
    ) -> None:
        table = mapping_table(mapping)
        assert table is not None
        table = with_config(table, reader)
        table = _with_own_config(table, state, config or {})
        reader = with_named_states(with_plain_states(reader, table), table)
        run = find(state.tensors.values(), table, None, state.path)
        self._reader = reader
        self._plan: TranslationPlan = make_plan(
            reader, state.format, table, into=run.convention, wanted=run.weights
        )
        self.format, self.path = state.format, reader.path
        self.tensors = {
            name: TensorInfo(name, tensor.path, tensor.shape, tensor.dtype, (Box.whole(tensor.shape),))
            for name, tensor in self._plan.tensors.items()
        }
        self.object_paths = {name: path for name, (path, _) in self._plan.objects.items()}
        self.kinds: Mapping[str, str] = {}

    @property
    def objects(self) -> Mapping[str, object]:
        return {name: self._reader.objects[old] for name, (_, old) in self._plan.objects.items()}

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        tensor = self._plan.tensors[name]
        return tensor.read(self._reader, Box.whole(tensor.shape) if box is None else box)

    def files(self) -> Sequence[Path]:
        return self._reader.files()

    def close(self) -> None:
        self._reader.close()
