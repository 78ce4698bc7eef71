"""Conversion of a checkpoint to another format, and through a mapping to another model family's names and layouts.

    source reader -> plan (names, index relations) -> destination chunk by chunk -> commit

Only the chunks in work are in memory. The destination appears complete or not at all, and the source is never written
to. Nothing is cast: every bit arrives.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from bridge.formats import FORMATS, create_checkpoint, open_checkpoint
from bridge.formats.base import Box, CheckpointError, CheckpointReader, CheckpointWriter
from bridge.mapping.plan import Plan, PlannedTensor, make_plan
from bridge.mapping.rules import MappingTable, mapping_table
from bridge.mapping.trees import Format
from bridge.memory import large_buffers_returned
from bridge.regions import Progress, group_boxes


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion wrote. ``bytes`` are those of the tensors' elements; ``dropped`` are names in the source."""

    source: Path
    destination: Path
    source_format: str
    format: str
    tensors: int
    objects: int
    bytes: int
    dropped: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class _Region:
    """Some chunks of one destination tensor that are read together as ``box``."""

    tensor: PlannedTensor
    stored_name: str
    box: Box
    chunks: list[Box]


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    mapping: str | os.PathLike[str] | MappingTable | None = None,
    axes: Mapping[str, int] | None = None,
    progress: Progress | None = None,
    workers: int = 1,
) -> ConvertReport:
    """Convert the checkpoint directory ``src`` to the new directory ``dst``.

    to: "dcp" or "orbax"; default: the one that ``src`` is not. mapping: a shipped family's name, a TOML file or a
    table; without one names pass through as tree paths, also to the same format. axes: sizes for the mapping's axes,
    over its own table. workers: regions read in parallel; memory grows with it, about 64 MiB each.

    Raises FileNotFoundError (no source), FileExistsError (destination there already), CheckpointError (source
    damaged, or mapping and source do not fit), ValueError (unknown format, workers < 1). After any error, an
    interruption too, no destination exists.
    """
    started = time.perf_counter()
    if to is not None and to not in FORMATS:
        raise ValueError(f"expected a checkpoint format out of {', '.join(FORMATS)}, got {to!r}")
    if workers < 1:
        raise ValueError(f"expected 1 worker or more, got {workers}")
    source, destination = Path(src), Path(dst)
    table = mapping_table(mapping, axes)
    with open_checkpoint(source) as reader:
        if os.path.lexists(destination):
            raise FileExistsError(
                f"expected no file or directory at {destination}, found one: remove it first or choose another name"
            )
        if Path(os.path.abspath(source)) in Path(os.path.abspath(destination)).parents:
            raise CheckpointError(f"expected a destination outside the source {source}, got {destination}")
        target = to or ("orbax" if reader.format == "dcp" else "dcp")
        plan = make_plan(reader, cast(Format, target), table)
        objects = {name: (path, reader.objects[old]) for name, (path, old) in plan.objects.items()}
        with large_buffers_returned(), create_checkpoint(destination, target) as writer:
            names = {t.name: writer.add_tensor(t.path, t.shape, t.dtype).name for t in plan.tensors.values()}
            for path, value in objects.values():
                writer.add_object(path, value)
            _copy(reader, writer, plan, names, progress, workers)
        return ConvertReport(
            source,
            destination,
            reader.format,
            target,
            len(plan.tensors),
            len(objects),
            plan.nbytes,
            plan.dropped,
            time.perf_counter() - started,
        )


def _copy(
    reader: CheckpointReader,
    writer: CheckpointWriter,
    plan: Plan,
    names: Mapping[str, str],
    progress: Progress | None,
    workers: int,
) -> None:
    done = 0
    for region, array in _read_ahead(reader, _regions(plan, writer, names), workers):
        for chunk in region.chunks:
            part = array if chunk == region.box else array[chunk.slices(region.box)]
            writer.write(region.stored_name, chunk, part)
        done += region.box.numel * region.tensor.dtype.itemsize
        if progress is not None:
            progress(done, plan.nbytes, region.tensor.name)


def _regions(plan: Plan, writer: CheckpointWriter, names: Mapping[str, str]) -> Iterator[_Region]:
    for tensor in plan.tensors.values():
        name = names[tensor.name]
        for box, chunks in group_boxes(writer.chunks(name), tensor.dtype.itemsize):
            yield _Region(tensor, name, box, chunks)


def _read_ahead(
    reader: CheckpointReader, regions: Iterator[_Region], workers: int
) -> Iterator[tuple[_Region, np.ndarray]]:
    """Each region with its elements, in order; at most ``workers`` of them are read or waiting at a time."""
    if workers == 1:
        for region in regions:
            yield region, region.tensor.read(reader, region.box)
        return
    waiting: deque[tuple[_Region, Future[np.ndarray]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for region in regions:
                waiting.append((region, pool.submit(region.tensor.read, reader, region.box)))
                if len(waiting) == workers:
                    first, array = waiting.popleft()
                    yield first, array.result()
            while waiting:
                first, array = waiting.popleft()
                yield first, array.result()
        finally:
            pool.shutdown(cancel_futures=True)
