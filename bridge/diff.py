"""Comparison of two checkpoints, tensor by tensor and region by region, across formats and through a mapping.

When a mapping is given, checkpoint `a` is translated into the names and layouts of `b` as it is read; no file is
written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from bridge.formats import open_checkpoint
from bridge.formats.base import CheckpointError, CheckpointReader, TensorInfo
from bridge.mapping.plan import Plan, PlannedTensor, make_plan
from bridge.mapping.rules import MappingTable, mapping_table
from bridge.mapping.trees import Format
from bridge.memory import large_buffers_returned
from bridge.regions import Progress, group_boxes, split_box
from bridge.ulp import Difference, Tolerance, compare


@dataclass(frozen=True)
class TensorDiff:
    """One tensor that both checkpoints have, in the same shape and dtype; ``name`` as in ``b``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    difference: Difference


@dataclass(frozen=True)
class DiffReport:
    """The comparison of two checkpoints; all names are those of ``b``.

    missing: only ``a`` has it. extra: only ``b``. mismatched: (name, what differs) where shape or dtype does.
    objects: (name, value in a, value in b) of values that are not tensors and that both have, differently; lists
    and tuples are alike, other types are not. unreadable: (name, why) where a value is not plain data in either.
    """

    a: Path
    b: Path
    tolerance: Tolerance
    tensors: tuple[TensorDiff, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    mismatched: tuple[tuple[str, str], ...]
    objects: tuple[tuple[str, object, object], ...]
    unreadable: tuple[tuple[str, str], ...]

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
        """Whether both hold the same tensors, every element within the tolerance, and all common objects agree."""
        differs = self.missing or self.extra or self.mismatched or self.objects or self.unreadable
        return not (self.total.beyond or differs)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    mapping: str | os.PathLike[str] | MappingTable | None = None,
    axes: Mapping[str, int] | None = None,
    tolerance: Tolerance | None = None,
    progress: Progress | None = None,
) -> DiffReport:
    """Compare two checkpoint directories of any format.

    mapping, axes: as for `convert`; without a mapping names are compared as tree paths. Memory stays at a few regions
    of 32 MiB. Raises FileNotFoundError, or CheckpointError when one is damaged or the mapping does not fit ``a``.
    """
    tolerance = tolerance or Tolerance()
    table = mapping_table(mapping, axes)
    with large_buffers_returned(), open_checkpoint(a) as reader_a, open_checkpoint(b) as reader_b:
        plan = make_plan(reader_a, cast(Format, reader_b.format), table)
        infos = reader_b.tensors
        common = [name for name in infos if name in plan.tensors]
        mismatched = {name: text for name in common if (text := _mismatch(plan.tensors[name], infos[name]))}
        comparable = [name for name in common if name not in mismatched]
        total, done = sum(infos[name].nbytes for name in comparable), 0
        tensors = []
        for name in comparable:
            difference = _compare(reader_a, plan.tensors[name], reader_b, infos[name], tolerance)
            tensors.append(TensorDiff(name, infos[name].shape, infos[name].dtype.name, difference))
            done += infos[name].nbytes
            if progress is not None:
                progress(done, total, name)
        return DiffReport(
            Path(a),
            Path(b),
            tolerance,
            tuple(tensors),
            tuple(name for name in plan.tensors if name not in infos),
            tuple(name for name in infos if name not in plan.tensors),
            tuple(mismatched.items()),
            *_objects(reader_a, plan, reader_b),
        )


def _mismatch(planned: PlannedTensor, info: TensorInfo) -> str:
    parts = []
    if planned.shape != info.shape:
        parts.append(f"shape {list(planned.shape)} in a, {list(info.shape)} in b")
    if planned.dtype != info.dtype:
        parts.append(f"dtype {planned.dtype} in a, {info.dtype} in b")
    return "; ".join(parts)


def _compare(
    reader_a: CheckpointReader,
    planned: PlannedTensor,
    reader_b: CheckpointReader,
    info: TensorInfo,
    tolerance: Tolerance,
) -> Difference:
    itemsize = info.dtype.itemsize
    result = Difference()
    # Along b's stored chunks, as its compressed ones are decoded whole.
    for joint, _ in group_boxes(info.chunks, itemsize):
        for box in split_box(joint, itemsize):
            if box.numel:
                result += compare(planned.read(reader_a, box), reader_b.read(info.name, box), tolerance)
    return result


def _objects(
    reader_a: CheckpointReader, plan: Plan, reader_b: CheckpointReader
) -> tuple[tuple[tuple[str, object, object], ...], tuple[tuple[str, str], ...]]:
    """What differs among the objects that both have, and which of them cannot be read."""
    different, unreadable = [], []
    for name, (_, old) in plan.objects.items():
        if name not in reader_b.objects:
            continue
        try:
            pair = reader_a.objects[old], reader_b.objects[name]
        except CheckpointError as error:
            unreadable.append((name, str(error)))
            continue
        if not _same(*pair):
            different.append((name, *pair))
    return tuple(different), tuple(unreadable)


def _same(a: object, b: object) -> bool:
    """Equal in type and value; NaN equals itself, and a tuple a list: that is no difference in training."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    return type(a) is type(b) and (a == b or (a != a and b != b))
