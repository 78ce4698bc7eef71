"""Copies a planned conversion, region by region, by several threads.

    worker 0   tensor 0: read region, write its chunks; read region, write ...   tensor 2: ...
    worker 1   tensor 1: read region, write its chunks; ...

A tensor of less than 1 MiB that is copied unchanged takes a shortcut: one read, from the source's file into the memory
in which the writer gathers its next write; checksums are computed there, once each.

Copying, checksums and file operations release Python's lock, so threads use all cores. Each worker holds one region of
32 MiB and its read buffers: memory does not depend on the size of the checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from bridge.checkpoints.ground.outputs import Output
from bridge.core.formats.tensors.base import Box, CheckpointReader, CheckpointWriter, Checksums, Loan
from bridge.core.formats.tensors.boxes import Progress, group_boxes
from bridge.core.mapping.language.relation import TensorView, whole_source

RUN_BYTES = 256 << 20
"""Bytes of consecutive regions of one tensor that go to one worker."""

TOGETHER_BYTES = 8 << 20
"""Small tensors up to so many bytes go to one worker: they are neighbours, and are read and written together."""

_MAX_LOOKED_AT = 4096
"""Most source chunks that are searched for each written chunk; with more, readers have better ways."""


@dataclass(frozen=True)
class Region:
    """Chunks of one tensor of the destination that are read together as ``box``.

    all_of: the source tensor that it copies whole and unchanged, if it is one chunk.
    """

    tensor: Output
    stored_name: str
    box: Box
    chunks: list[Box]
    nbytes: int
    all_of: str | None = None


def runs(
    tensors: Iterable[Output], writer: CheckpointWriter, names: Mapping[str, str], run_bytes: int = RUN_BYTES
) -> Iterator[list[Region]]:
    """The regions to copy, without the chunks that a resumed writer already has.

    A run consists of neighbouring regions, for one worker: a large stored chunk is verified as a whole when it is first
    touched, and two workers would verify it twice. Small tensors share a run.
    """
    run: list[Region] = []
    nbytes = 0
    for tensor in tensors:
        name = names[tensor.name]
        stored = writer.stored(name)
        boxes = writer.chunks(name)
        all_of = whole_source(tensor.planned.content) if len(boxes) == 1 and not tensor.is_cast else None
        left = (box for box in boxes if box not in stored)
        for box, chunks in group_boxes(left, tensor.dtype.itemsize):
            size = box.numel * tensor.dtype.itemsize
            run.append(Region(tensor, name, box, chunks, size, all_of))
            nbytes += size
            if nbytes >= run_bytes:
                yield run
                run, nbytes = [], 0
        if nbytes >= TOGETHER_BYTES:
            yield run
            run, nbytes = [], 0
    if run:
        yield run


class Copier:
    """Copies regions with a number of workers; the first error stops all of them and is raised by `run`."""

    def __init__(
        self,
        reader: CheckpointReader,
        writer: CheckpointWriter,
        work: Iterator[list[Region]],
        *,
        done: int,
        total: int,
        progress: Progress | None,
    ) -> None:
        self._reader, self._writer, self._work = reader, writer, work
        self._done, self._total, self._progress = done, total, progress
        # Guards the generator of work, the counts and the first error. Threads copy without the lock.
        self._lock = threading.Lock()
        self._stop = False
        self._error: BaseException | None = None

    def run(self, workers: int) -> None:
        """Copy everything. When it returns or raises, all workers have stopped."""
        if workers == 1:
            self._copy()
            return
        # Threads, not processes: reading, checksums and writing release Python's lock.
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(self._copy) for _ in range(workers)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            except BaseException:
                # A signal ended the wait: the pool's exit below waits until the workers see the flag.
                self._stop = True
                raise
        if self._error is not None:
            # The first error. Later errors may only say that the writer refuses to continue.
            raise self._error

    def _copy(self) -> None:
        while True:
            try:
                # Two threads cannot advance a generator at once.
                with self._lock:
                    run = None if self._stop else next(self._work, None)
                if run is None:
                    return
                for region in self._copy_small(run):
                    if not self._stop:
                        self._copy_region(region)
            except BaseException as error:
                with self._lock:
                    self._stop, self._error = True, self._error or error
                raise

    def _copy_small(self, run: list[Region]) -> list[Region]:
        """Copy small tensors that stay unchanged; return the remaining regions."""
        small = [(region.all_of, region) for region in run if region.all_of is not None]
        if not small:
            return run

        def fill(positions: Sequence[int], targets: Sequence[memoryview]) -> Sequence[Checksums | None]:
            names = [small[position][0] for position in positions]
            return self._reader.read_into(list(zip(names, targets, strict=True)))

        done = self._writer.write_from([(region.stored_name, region.box) for _, region in small], fill)
        copied = {id(region) for (_, region), written in zip(small, done, strict=True) if written}
        for _, region in small:
            if id(region) in copied:
                self._count(region.nbytes, region.tensor.name)
        return [region for region in run if id(region) not in copied]

    def _copy_region(self, region: Region) -> None:
        array: np.ndarray | None = None
        for chunk in region.chunks:
            # Chunks that the source stores as they will be written are lent. At the first other chunk, the region is
            # read, and that array also contains the region's other chunks.
            loans: list[Loan] = []
            if array is None:
                _, offset = self._writer.position(region.stored_name, chunk)
                loans = lend(region.tensor, self._reader, chunk, offset)
            if loans:
                crc = loans[0].crc if len(loans) == 1 else None
                self._writer.write(region.stored_name, chunk, [loan.array for loan in loans], crc=crc)
                for loan in loans:
                    loan.give_back()
                continue
            if array is None:
                array = region.tensor.read(self._reader, region.box)
            part = array if chunk == region.box else array[chunk.slices(region.box)]
            self._writer.write(region.stored_name, chunk, part)
        self._count(region.nbytes, region.tensor.name)

    def _count(self, nbytes: int, name: str) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total, name)


def lend(tensor: Output, reader: CheckpointReader, chunk: Box, offset: int) -> list[Loan]:
    """The elements of a chunk, lent from the source in parts, so that nothing is copied in memory.

    No part if the chunk must be read: if it is cast or calculated, or stored differently in the source.
    """
    content = tensor.planned.content
    if tensor.is_cast or not isinstance(content, TensorView) or len(content.blocks) != 1:
        return []
    block = content.blocks[0]
    chunks = reader.tensors[block.source].chunks
    if block.source_index != block.target_index or len(chunks) > _MAX_LOOKED_AT:
        return []
    if len(chunks) == 1 and chunks[0] == chunk:
        pieces = [chunk]
    else:
        pieces = [piece for stored in chunks if (piece := stored.intersect(chunk)) is not None]
        pieces.sort(key=lambda piece: piece.offsets)
        if not all(_is_run(piece, chunk) for piece in pieces):
            return []
    loans: list[Loan] = []
    for piece in pieces:
        loan = reader.lend(block.source, piece, offset)
        if loan is None:
            return []
        loans.append(loan)
        offset += loan.array.nbytes
    return loans


def _is_run(piece: Box, box: Box) -> bool:
    """Whether the elements of a piece are contiguous in the row-major order of the box."""
    cut = next((axis for axis, n in enumerate(piece.sizes) if n != 1), len(piece.sizes))
    return piece.sizes[cut + 1 :] == box.sizes[cut + 1 :]
