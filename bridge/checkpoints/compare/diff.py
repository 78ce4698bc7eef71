"""Comparison of two checkpoints, tensor by tensor and region by region, across formats and through a mapping.

With a mapping, checkpoint `a` is translated into the names and layouts of `b` while it is read; no file is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from bridge.checkpoints.compare.diff_report import DiffReport, TensorDiff
from bridge.checkpoints.compare.diff_tensors import Pair, compared
from bridge.checkpoints.compare.noise import Noise
from bridge.checkpoints.compare.structure import dtype_names, structure_differences
from bridge.checkpoints.compare.ulp import Tolerance
from bridge.checkpoints.ground.outputs import common_dtype, require_readable
from bridge.checkpoints.ground.selection import SelectedReader, Selection, selected_pair
from bridge.checkpoints.ground.workers import large_buffers_returned
from bridge.core.formats import items_of_each, open_checkpoint
from bridge.core.formats.reading.regular_files import Stamp, changed, stamps
from bridge.core.formats.stores.store import place_of
from bridge.core.formats.tensors.base import CheckpointError, CheckpointReader, TensorInfo, is_whole
from bridge.core.formats.tensors.boxes import Progress
from bridge.core.formats.tensors.leaves import LEAVES
from bridge.core.formats.whole.adapters import MergedReader
from bridge.core.formats.whole.companions import left_alone
from bridge.core.formats.whole.quantized import DequantizedReader
from bridge.core.formats.whole.step_paths import Step, each_at_step
from bridge.core.long_calls import Follow, followed
from bridge.core.mapping.language.conventions import Convention
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.rules import MappingLike, mapping_table
from bridge.core.mapping.language.table import MappingTable, Tied
from bridge.core.mapping.one_rule.sizes import with_config, with_stored_sizes
from bridge.core.mapping.plan.plan import PlannedTensor, TranslationPlan
from bridge.core.mapping.plan.translation import make_plan
from bridge.core.mapping.states.notes import PLACES
from bridge.core.mapping.states.numbered_states import with_named_states
from bridge.core.mapping.states.plain_states import with_plain_states
from bridge.core.mapping.states.source_tree import find

_NOTES = (PLACES, LEAVES)
"""Objects that conversions add, which describe the checkpoint."""


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    mapping: MappingLike | None = None,
    into: str | None = None,
    from_: str | None = None,
    axes: Mapping[str, int] | None = None,
    tied: Tied | None = None,
    any_model: bool = False,
    optimizer_order: str | None = None,
    dequantize: bool = False,
    merge_adapter: str | os.PathLike[str] | None = None,
    selection: Selection | None = None,
    tolerance: Tolerance | None = None,
    rounded: bool = False,
    noise: str | os.PathLike[str] | None = None,
    progress: Follow = None,
    workers: int = 1,
    items: Sequence[str] = (),
    step: Step | None = None,
) -> DiffReport:
    """Compare two checkpoints of any format.

    mapping, into, from_, axes, tied, any_model, optimizer_order: as for `convert`; without a mapping names are
    compared as tree paths. dequantize, merge_adapter: take weights of ``a`` decoded, or merged with an adapter, as
    `convert` does. selection: which part of ``a``; what corresponds to the rest of it in ``b`` is left out there,
    too, as are names of ``b`` that are to be dropped. rounded: tensors of different dtypes are compared too, see
    `common_dtype`; so 0 ULP says that the narrower is exactly the other, cast. noise: another run of the same thing
    (another order of summation, or a float64 twin), with the names of ``b``, or of ``a`` through the mapping; a
    tensor then also passes when the difference is at most ``tolerance.noise_factor`` times that of ``b`` and this
    run. progress: see `convert`. workers: regions compared in parallel, some 100 MiB of memory each. items, step: see
    `open_checkpoint`; each is for those of ``a`` and ``b`` that have items or steps.

    Raises FileNotFoundError, or CheckpointError if one is damaged, the mapping does not fit ``a``, or the noise
    checkpoint lacks a compared tensor.
    """
    tolerance, selection = tolerance or Tolerance(), selection or Selection()
    table = mapping_table(mapping, axes, tied, any_model=any_model)
    with large_buffers_returned(), ExitStack() as opened:
        places = each_at_step((a, b), step)
        before: dict[Path, Stamp] = {}
        as_stored = [
            _watched(opened, before, path, own)
            for path, own in zip(places, items_of_each(places, items), strict=True)
        ]
        whole_a, whole_b = as_stored
        if dequantize:
            whole_a = DequantizedReader(whole_a)
        if merge_adapter is not None:
            whole_a = MergedReader(whole_a, _watched(opened, before, merge_adapter))
        sides = _Sides.of(whole_a, whole_b, selection, table, into, from_, optimizer_order)
        mismatched = sides.mismatched(rounded)
        comparable = [name for name in sides.common if name not in mismatched]
        sides.require_readable(comparable)
        third = None
        if noise is not None:
            third = sides.noise(_watched(opened, before, noise), comparable)
        with followed("diff", progress) as tell:
            tensors = sides.compare(comparable, tolerance, third, workers, tell)
        for _, text in changed(before):
            raise CheckpointError(text)
        return DiffReport(
            place_of(a),
            place_of(b),
            tolerance,
            tensors,
            tuple(name for name in sides.plan.tensors if name not in sides.infos),
            tuple(name for name in sides.infos if name not in sides.plan.tensors),
            tuple(mismatched.items()),
            *_objects(sides.reader_a, sides.plan, sides.reader_b, sides.left_out),
            sides.structure(),
            noise=None if noise is None else place_of(noise),
            left_alone=_left_alone(as_stored),
        )


def _watched(
    opened: ExitStack, before: dict[Path, Stamp], path: str | os.PathLike[str], items: Sequence[str] = ()
) -> CheckpointReader:
    """A checkpoint, open until ``opened`` closes; the stamps of its files go into ``before``."""
    reader = opened.enter_context(open_checkpoint(path, items=items))
    before |= stamps(reader.files())
    return reader


@dataclass(frozen=True)
class _Sides:
    """Two checkpoints to compare, by the names of ``b``.

    whole_a, whole_b: everything in them. reader_a, reader_b: the selected parts. table, into, from_: the translation of
    ``a``, see `make_plan`; without a table, names stay.
    """

    whole_a: CheckpointReader
    whole_b: CheckpointReader
    reader_a: CheckpointReader
    reader_b: CheckpointReader
    selection: Selection
    table: MappingTable | None
    into: str | Convention | None
    from_: str | None

    @staticmethod
    def of(
        whole_a: CheckpointReader,
        whole_b: CheckpointReader,
        selection: Selection,
        table: MappingTable | None,
        into: str | None,
        from_: str | None,
        optimizer_order: str | None,
    ) -> _Sides:
        if table is not None:
            whole_a, whole_b = (
                with_named_states(with_plain_states(whole, table), table, optimizer_order)
                for whole in (whole_a, whole_b)
            )
        target: str | Convention | None = into
        pair = selected_pair(whole_a, whole_b, selection)
        if table is not None:
            table = with_config(table, whole_a)
            target = _convention_of(whole_b, table, into) or into
            table = table if selection.everything else with_stored_sizes(table, whole_a).part()
        return _Sides(whole_a, whole_b, *pair, selection, table, target, from_)

    def plan_of(self, reader: CheckpointReader) -> TranslationPlan:
        return make_plan(reader, self.reader_b.format, self.table, into=self.into, from_=self.from_)

    @cached_property
    def plan(self) -> TranslationPlan:
        return self.plan_of(self.reader_a)

    @cached_property
    def left_out(self) -> frozenset[str]:
        """The names in ``b`` of the unselected parts of ``a``; none if the mapping does not fit the whole ``a``."""
        if self.reader_a is self.whole_a:
            return frozenset()
        try:
            full = self.plan_of(self.whole_a)
        except CheckpointError:
            return frozenset()
        return frozenset(_names(full) - _names(self.plan))

    @cached_property
    def infos(self) -> dict[str, TensorInfo]:
        """The tensors of ``b`` that are compared, or that ``a`` lacks."""
        return {name: info for name, info in self.reader_b.tensors.items() if name not in self.left_out}

    @property
    def common(self) -> list[str]:
        return [name for name in self.infos if name in self.plan.tensors]

    def mismatched(self, rounded: bool) -> dict[str, str]:
        """Tensors whose shape or dtype differs, by name, and the difference."""
        keys = dtype_names(self.whole_a, self.plan, self.whole_b, self.common)
        texts = {
            name: _mismatch(self.plan.tensors[name], self.infos[name], rounded, keys.get(name))
            for name in self.common
        }
        return {name: text for name, text in texts.items() if text}

    def require_readable(self, names: Sequence[str]) -> None:
        """Raise CheckpointError if a tensor cannot be read."""
        sources = (source for name in names for source in self.plan.tensors[name].sources)
        require_readable(self.whole_a, sources)
        require_readable(self.whole_b, names)

    def noise(self, whole: CheckpointReader, comparable: Sequence[str]) -> Noise:
        """The checkpoint of another run, with the names of ``b``, or of ``a`` through the mapping."""
        known = (*self.whole_a.tensors, *self.whole_b.tensors)

        def mapped() -> TranslationPlan | None:
            if self.table is None:
                return None
            # As a part: only the compared tensors are needed, and missing ones are named.
            sides = replace(self, table=with_stored_sizes(self.table, self.whole_a).part())
            return sides.plan_of(SelectedReader(whole, self.selection, known))

        wanted = [self.infos[name] for name in comparable if not is_whole(self.infos[name].dtype)]
        return Noise.find(whole, wanted, self.reader_b.format, mapped)

    def compare(
        self,
        names: Sequence[str],
        tolerance: Tolerance,
        noise: Noise | None,
        workers: int,
        progress: Progress | None,
    ) -> tuple[TensorDiff, ...]:
        total, done = sum(self.infos[name].nbytes for name in names), 0
        pairs = (
            Pair(self.reader_a, self.plan.tensors[name], self.reader_b, self.infos[name], tolerance, noise)
            for name in names
        )
        tensors = []
        for tensor in compared(pairs, workers):
            tensors.append(tensor)
            done += self.infos[tensor.name].nbytes
            if progress is not None:
                progress(done, total, tensor.name)
        return tuple(tensors)

    def structure(self) -> tuple[tuple[str, str], ...]:
        """Differences between the trees; empty with a mapping, which changes the tree."""
        if self.table is not None:
            return ()
        return structure_differences(self.whole_a, self.plan, self.reader_b, self.left_out)


def _left_alone(readers: Iterable[CheckpointReader]) -> dict[str, str]:
    return {f"{reader.path}/{name}": why for reader in readers for name, why in left_alone(reader).items()}


def _names(plan: TranslationPlan) -> set[str]:
    return {*plan.tensors, *plan.objects, *plan.notes}


def _convention_of(reader: CheckpointReader, table: MappingTable, only: str | None) -> Convention | None:
    """The naming convention of a checkpoint, and the places of its tensors; None if they cannot be determined."""
    try:
        tree = find(reader.tensors.values(), table, only, str(reader.path))
    except MappingError:
        return None
    return tree.convention if tree.weights else None


def _mismatch(planned: PlannedTensor, info: TensorInfo, rounded: bool, keys: tuple[str, str] | None) -> str:
    parts = []
    if planned.shape != info.shape:
        parts.append(f"shape {list(planned.shape)} in a, {list(info.shape)} in b")
    if keys is not None:
        parts.append(f"dtype {keys[0]} in a, {keys[1]} in b")
    elif planned.dtype != info.dtype and not (rounded and common_dtype(planned.dtype, info.dtype)):
        parts.append(f"dtype {planned.dtype} in a, {info.dtype} in b")
    return "; ".join(parts)


def _objects(
    reader_a: CheckpointReader, plan: TranslationPlan, reader_b: CheckpointReader, left_out: Set[str]
) -> tuple[
    tuple[tuple[str, object, object], ...], tuple[tuple[str, str], ...], tuple[str, ...], tuple[str, ...]
]:
    """Objects: those that differ, those that cannot be read, and the names that only a and that only b has.

    With a mapping, some have other names and values in ``b``'s convention, such as lists of weights' names.
    """
    different, unreadable = [], []
    renamed = {name: value for name, (path, value) in plan.notes.items() if path not in _NOTES}
    kept = {name: old for name, (path, old) in plan.objects.items() if path not in _NOTES}
    for name in (*kept, *renamed):
        if name not in reader_b.objects:
            continue
        try:
            left = renamed[name] if name in renamed else reader_a.objects[kept[name]]
            pair = left, reader_b.objects[name]
        except CheckpointError as error:
            unreadable.append((name, str(error)))
            continue
        if not _same(*pair):
            different.append((name, *pair))
    names_a = {*kept, *renamed}
    names_b = [
        name for name, path in reader_b.object_paths.items() if path not in _NOTES and name not in left_out
    ]
    missing = sorted(names_a - reader_b.object_paths.keys())
    extra = [name for name in names_b if name not in names_a]
    return tuple(different), tuple(unreadable), tuple(missing), tuple(extra)


def _same(a: object, b: object) -> bool:
    """Equal in type and value; NaN equals itself, and a tuple equals a list: training does not depend on these."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    return type(a) is type(b) and (a == b or (a != a and b != b))
