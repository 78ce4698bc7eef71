"""Comparison of two checkpoints, tensor by tensor and region by region, across formats and through a mapping.

When a mapping is given, checkpoint `a` is translated into the names and layouts of `b` as it is read; no file is
written.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bridge.checkpoints.common_dtype import common_dtype
from bridge.checkpoints.dtypes import require_readable
from bridge.checkpoints.kinds import dtype_names, structure_differences
from bridge.checkpoints.noise import Noise
from bridge.checkpoints.selection import SelectedReader, Selection, selected_pair
from bridge.checkpoints.spread import Spread
from bridge.checkpoints.ulp import Difference, Tolerance, compare, squared_distance, sum_of_squares
from bridge.checkpoints.workers import large_buffers_returned, ordered
from bridge.formats import items_of_each, open_checkpoint
from bridge.formats.base import Box, CheckpointError, CheckpointReader, TensorInfo, is_whole, name_of
from bridge.formats.leaf_kinds import LEAVES
from bridge.formats.quantized import DequantizedReader
from bridge.formats.regions import Progress, group_boxes, split_box
from bridge.formats.step_paths import Step, each_at_step
from bridge.formats.stores.store import place_of
from bridge.mapping.conventions import Convention
from bridge.mapping.errors import MappingError
from bridge.mapping.found import find
from bridge.mapping.notes import PLACES
from bridge.mapping.numbered_states import with_named_states
from bridge.mapping.operations import as_dtype
from bridge.mapping.plan import Plan, PlannedTensor
from bridge.mapping.rules import MappingTable, Tied, mapping_table
from bridge.mapping.sizes import with_config, with_stored_sizes
from bridge.mapping.translation import make_plan

_SMALL = 8 << 20
"""Bytes of a tensor that one worker compares, while others compare its neighbours; a larger one is shared."""

_NOTES = (PLACES, LEAVES)
"""Objects that conversions add, which are about the checkpoint."""


@dataclass(frozen=True)
class TensorDiff:
    """One tensor that both checkpoints have, in the same shape; ``name`` as in ``b``.

    dtype: the one compared in, which both have unless they were compared ``rounded``. dtype_a, dtype_b: as stored.
    relative: norm of the difference over the norm of ``a``, in float64, of all elements that are no NaN in either;
    infinite against zeros, and where a norm is not finite. Norms are Euclidean, over all elements. within: whether the
    tensor passes as a whole, see `Tolerance`. noise: the norm of the difference over that of ``b`` minus the noise
    checkpoint; None without one and for integers.

    percentiles, histogram: of the elements' relative differences, see `Spread`; pairs with a NaN are left out.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    difference: Difference
    dtype_a: str
    dtype_b: str
    relative: float
    within: bool = True
    noise: float | None = None
    percentiles: Mapping[str, float] = field(default_factory=dict)
    histogram: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DiffReport:
    """The comparison of two checkpoints; all names are those of ``b``.

    missing: only ``a`` has it. extra: only ``b``. mismatched: (name, what differs) where shape or dtype does.
    objects: (name, value in a, value in b) of values that are not tensors and that both have, differently; lists
    and tuples are alike, other types are not. unreadable: (name, why) where a value is not plain data in either.
    objects_missing, objects_extra: names of values that only ``a``, only ``b`` has; they are no difference.
    structure: (name, what differs) where the trees differ in None, empty containers and texts that are leaves of one
    only, and in lists that are dicts in the other; not compared through a mapping. noise: the noise checkpoint, if
    there was one.
    """

    a: Path | str
    b: Path | str
    tolerance: Tolerance
    tensors: tuple[TensorDiff, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    mismatched: tuple[tuple[str, str], ...]
    objects: tuple[tuple[str, object, object], ...]
    unreadable: tuple[tuple[str, str], ...]
    objects_missing: tuple[str, ...]
    objects_extra: tuple[str, ...]
    structure: tuple[tuple[str, str], ...] = ()
    noise: Path | str | None = None

    @property
    def total(self) -> Difference:
        """All compared tensors together."""
        return sum((tensor.difference for tensor in self.tensors), Difference())

    @property
    def max_ulp(self) -> int:
        """The largest distance in any compared tensor; 0 only when all their bits agree."""
        return self.total.max_ulp

    @property
    def within(self) -> bool:
        """Whether both hold the same tensors in the same tree, all within the tolerance, and common objects agree."""
        differs = (
            self.missing or self.extra or self.mismatched or self.objects or self.unreadable or self.structure
        )
        return all(tensor.within for tensor in self.tensors) and not differs

    @property
    def offenders(self) -> tuple[TensorDiff, ...]:
        """Tensors that differ: those beyond the tolerance first, then those with NaNs, then by relative error."""
        differing = [tensor for tensor in self.tensors if tensor.difference.differing]
        return tuple(sorted(differing, key=_severity, reverse=True))


def _severity(tensor: TensorDiff) -> tuple[bool, bool, float, int]:
    difference = tensor.difference
    return not tensor.within, bool(difference.nan), tensor.relative, difference.max_ulp


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    mapping: str | os.PathLike[str] | MappingTable | None = None,
    into: str | None = None,
    from_: str | None = None,
    axes: Mapping[str, int] | None = None,
    tied: Tied | None = None,
    any_model: bool = False,
    dequantize: bool = False,
    selection: Selection | None = None,
    tolerance: Tolerance | None = None,
    rounded: bool = False,
    noise: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    workers: int = 1,
    items: Sequence[str] = (),
    step: Step | None = None,
) -> DiffReport:
    """Compare two checkpoints of any format.

    mapping, into, from_, axes, tied, any_model: as for `convert`; without a mapping names are compared as tree paths.
    dequantize: take quantized weights of ``a`` as the numbers that they stand for, as `convert` does. selection: which
    part of ``a``; what corresponds to the rest of it in ``b`` is left out there, too, as are names of ``b`` that are to
    be dropped. rounded: tensors of different dtypes are compared too, see `common_dtype`; so 0 ULP says that the
    narrower is exactly the other, cast. noise: another run of the same thing (another order of summation, or a float64
    twin), with the names of ``b``, or of ``a`` through the mapping; a tensor then also passes when the difference is at
    most ``tolerance.noise_factor`` times that of ``b`` and this run. workers: regions compared in parallel, some 100
    MiB of memory each. items, step: see `open_checkpoint`; each is for those of ``a`` and ``b`` that have items or
    steps.

    Raises FileNotFoundError, or CheckpointError when one is damaged, the mapping does not fit ``a``, or the noise
    checkpoint lacks a tensor that is compared.
    """
    tolerance, selection = tolerance or Tolerance(), selection or Selection()
    table = mapping_table(mapping, axes, tied, any_model=any_model)
    with large_buffers_returned(), ExitStack() as opened:
        places = each_at_step((a, b), step)
        whole_a, whole_b = (
            opened.enter_context(open_checkpoint(path, items=own))
            for path, own in zip(places, items_of_each(places, items), strict=True)
        )
        if dequantize:
            whole_a = DequantizedReader(whole_a)
        if table is not None:
            whole_a, whole_b = with_named_states(whole_a), with_named_states(whole_b)
        reader_a, reader_b = selected_pair(whole_a, whole_b, selection)
        target: str | Convention | None = into
        if table is not None:
            table = with_config(table, whole_a)
            target = _convention_of(whole_b, table, into) or into
            table = table if selection.everything else with_stored_sizes(table, whole_a).part()

        def planned(reader: CheckpointReader) -> Plan:
            return make_plan(reader, reader_b.format, table, into=target, from_=from_)

        plan = planned(reader_a)
        left_out = _left_out(planned, whole_a, plan) if reader_a is not whole_a else frozenset()
        infos = {name: info for name, info in reader_b.tensors.items() if name not in left_out}
        common = [name for name in infos if name in plan.tensors]
        keys = dtype_names(whole_a, plan, whole_b, common)
        mismatched = {
            name: text
            for name in common
            if (text := _mismatch(plan.tensors[name], infos[name], rounded, keys.get(name)))
        }
        comparable = [name for name in common if name not in mismatched]
        require_readable(whole_a, (source for name in comparable for source in plan.tensors[name].sources))
        require_readable(whole_b, comparable)
        third = None
        if noise is not None:
            whole = opened.enter_context(open_checkpoint(noise))
            known = (*whole_a.tensors, *whole_b.tensors)

            def mapped() -> Plan | None:
                if table is None:
                    return None
                # As a part: only the tensors that are compared are needed, and those missing are named.
                its_table = with_stored_sizes(table, whole_a).part()
                selected = SelectedReader(whole, selection, known)
                return make_plan(selected, reader_b.format, its_table, into=target, from_=from_)

            wanted = [infos[name] for name in comparable if not is_whole(infos[name].dtype)]
            third = Noise.find(whole, wanted, reader_b.format, mapped)
        total, done = sum(infos[name].nbytes for name in comparable), 0
        tensors = []
        for found in _compared(
            (
                _Pair(reader_a, plan.tensors[name], reader_b, infos[name], tolerance, third)
                for name in comparable
            ),
            workers,
        ):
            tensors.append(found)
            done += infos[found.name].nbytes
            if progress is not None:
                progress(done, total, found.name)
        return DiffReport(
            place_of(a),
            place_of(b),
            tolerance,
            tuple(tensors),
            tuple(name for name in plan.tensors if name not in infos),
            tuple(name for name in infos if name not in plan.tensors),
            tuple(mismatched.items()),
            *_objects(reader_a, plan, reader_b, left_out),
            () if table is not None else structure_differences(whole_a, plan, reader_b, left_out),
            noise=None if noise is None else place_of(noise),
        )


def _left_out(
    planned: Callable[[CheckpointReader], Plan], whole: CheckpointReader, plan: Plan
) -> frozenset[str]:
    """The names that would correspond to what is not selected; none where the mapping does not fit the whole."""
    try:
        full = planned(whole)
    except CheckpointError:
        return frozenset()
    return frozenset(_names(full) - _names(plan))


def _names(plan: Plan) -> set[str]:
    return {*plan.tensors, *plan.objects, *plan.notes}


def _convention_of(reader: CheckpointReader, table: MappingTable, only: str | None) -> Convention | None:
    """The naming convention of a checkpoint, and at which places it has its tensors; None if that cannot be told."""
    try:
        found = find(reader.tensors.values(), table, only, str(reader.path))
    except MappingError:
        return None
    return found.convention if found.weights else None


def _mismatch(planned: PlannedTensor, info: TensorInfo, rounded: bool, keys: tuple[str, str] | None) -> str:
    parts = []
    if planned.shape != info.shape:
        parts.append(f"shape {list(planned.shape)} in a, {list(info.shape)} in b")
    if keys is not None:
        parts.append(f"dtype {keys[0]} in a, {keys[1]} in b")
    elif planned.dtype != info.dtype and not (rounded and common_dtype(planned.dtype, info.dtype)):
        parts.append(f"dtype {planned.dtype} in a, {info.dtype} in b")
    return "; ".join(parts)


@dataclass(frozen=True)
class _Pair:
    """A tensor of ``b``, and the tensor of ``a`` to compare it with."""

    reader_a: CheckpointReader
    planned: PlannedTensor
    reader_b: CheckpointReader
    info: TensorInfo
    tolerance: Tolerance
    noise: Noise | None

    def compare(self, workers: int) -> TensorDiff:
        dtype = common_dtype(self.planned.dtype, self.info.dtype)
        assert dtype is not None
        boxes = list(self._boxes())
        difference, spread, norms, due = Difference(), Spread(), [], []
        regions = ordered(lambda box: self._region(box, dtype), boxes, workers)
        for box, (one, norm, its_spread) in zip(boxes, regions, strict=True):
            difference += one
            if norm is None:
                due.append(box)
            else:
                norms.append(norm)
                spread.join(its_spread)
        relative, noise = 0.0, None
        if difference.squares:
            # Equal regions took no arithmetic; their norm is needed only now.
            norms += ordered(lambda box: sum_of_squares(self._read_a(box, dtype)), due, workers)
            relative = _ratio(difference.squares, math.fsum(norms))
        floating = not is_whole(dtype)
        if self.noise is not None and floating:
            noise = 0.0
            if difference.squares:
                squares = ordered(self._noise, boxes, workers)
                noise = _ratio(difference.squares, math.fsum(squares))
        compared = difference.elements - difference.nan
        return TensorDiff(
            self.info.name,
            self.info.shape,
            name_of(dtype),
            difference,
            name_of(self.planned.dtype),
            name_of(self.info.dtype),
            relative,
            not difference.beyond or (floating and not difference.nan and self._tolerated(relative, noise)),
            noise,
            spread.percentiles(compared),
            spread.histogram(compared),
        )

    def _tolerated(self, relative: float, noise: float | None) -> bool:
        """Whether the tensor passes whatever its elements are."""
        by_error = self.tolerance.max_error is not None and relative <= self.tolerance.max_error
        return by_error or (noise is not None and noise <= self.tolerance.noise_factor)

    def _boxes(self) -> Iterator[Box]:
        # Along b's stored chunks, as its compressed ones are decoded whole.
        itemsize = max(self.info.dtype.itemsize, self.planned.dtype.itemsize)
        if self.noise is not None:
            itemsize = max(itemsize, self.noise.itemsize(self.info.name))
        for joint, _ in group_boxes(self.info.chunks, itemsize):
            yield from (box for box in split_box(joint, itemsize) if box.numel)

    def _region(self, box: Box, dtype: np.dtype) -> tuple[Difference, float | None, Spread]:
        """The difference within a box, its spread, and the sum of squares of ``a`` there if there is any difference."""
        left, right = self._read_a(box, dtype), as_dtype(self.reader_b.read(self.info.name, box), dtype)
        # A cast does not keep a NaN's payload.
        any_nan = self.planned.dtype != self.info.dtype
        spread = Spread()
        found = compare(left, right, self.tolerance, any_nan=any_nan, spread=spread).shifted(box.offsets)
        return found, sum_of_squares(left) if found.differing else None, spread

    def _noise(self, box: Box) -> float:
        assert self.noise is not None
        return squared_distance(self.reader_b.read(self.info.name, box), self.noise.read(self.info.name, box))

    def _read_a(self, box: Box, dtype: np.dtype) -> np.ndarray:
        return as_dtype(self.planned.read(self.reader_a, box), dtype)


def _compared(pairs: Iterable[_Pair], workers: int) -> Iterator[TensorDiff]:
    """The differences, in order."""
    for small, group in itertools.groupby(pairs, lambda pair: pair.info.nbytes <= _SMALL):
        if small:
            yield from ordered(lambda pair: pair.compare(1), group, workers)
        else:
            for pair in group:
                yield pair.compare(workers)


def _ratio(error: float, reference: float) -> float:
    """Of two norms, from their squares."""
    # Against an infinite norm, which one infinite element makes, every error would be 0.
    if math.isinf(error) or math.isinf(reference) or not reference:
        return math.inf
    return math.sqrt(error) / math.sqrt(reference)


def _objects(
    reader_a: CheckpointReader, plan: Plan, reader_b: CheckpointReader, left_out: Set[str]
) -> tuple[
    tuple[tuple[str, object, object], ...], tuple[tuple[str, str], ...], tuple[str, ...], tuple[str, ...]
]:
    """Of objects: those that both have and that differ, those that cannot be read, and the names only a and only b has.

    With a mapping some have other names and values in ``b``'s convention, such as lists of weights' names.
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
    """Equal in type and value; NaN equals itself, and a tuple a list: that is no difference in training."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    return type(a) is type(b) and (a == b or (a != a and b != b))
