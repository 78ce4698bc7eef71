"""A conversion as a list of independent pieces, assigned to parts: the same on every machine, without communication.

    pieces    w1 0:8 | w1 8:16 | w1 16:20 | w2 0:8 | w2 8:11 | w3 0:1 | ...     chunks of the destination, in its order
    parts     part 1 ------------------- | part 2 ----------- | part 3 ...      as many bytes each as pieces allow

Any piece may be remade at any time: its bytes follow from the source and the plan.

`PartEstimate` is the estimated cost of a part: pieces, bytes, memory, seconds, and what limits the part.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Final

from bridge.checkpoints.ground.outputs import Output
from bridge.core.formats.files.part_files import Share
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.tensors.boxes import REGION_BYTES
from bridge.core.formats.whole.in_parts import chunk_count
from bridge.core.mapping.language.relation import READ_BYTES

PIECE_BYTES = 256 << 20
"""Bytes of a piece; the last piece of a tensor may be smaller."""

_SMALLEST_PIECE = 32 << 20
_PIECES_PER_PART = 8
MAX_PARTS = 100_000


@dataclass(frozen=True)
class ConversionPiece:
    """Chunks [first, stop) of a tensor of the destination, in row-major order, and the bytes of their elements.

    A tensor without elements is a piece without chunks.
    """

    tensor: str
    first: int
    stop: int
    bytes: int


@dataclass(frozen=True)
class PartPlan:
    """All pieces of a conversion, by part. Parts may be empty if there are more parts than pieces."""

    parts: tuple[tuple[ConversionPiece, ...], ...]

    def share(self, number: int) -> Share:
        """The chunks of part `number`, from 1."""
        chunks: dict[str, tuple[int, int]] = {}
        for piece in self.parts[number - 1]:
            first, _ = chunks.get(piece.tensor, (piece.first, 0))
            chunks[piece.tensor] = first, piece.stop
        return Share(number, chunks)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each part."""
        return tuple(sum(piece.bytes for piece in part) for part in self.parts)

    def to_json(self) -> str:
        return json.dumps({"parts": [[asdict(piece) for piece in part] for part in self.parts]})

    @classmethod
    def from_json(cls, text: str) -> PartPlan:
        """The plan with this text. ValueError, KeyError or TypeError for any other text."""
        return cls(
            tuple(tuple(ConversionPiece(**piece) for piece in part) for part in json.loads(text)["parts"])
        )


def make_part_plan(format: str, outputs: Mapping[str, Output], count: int) -> PartPlan:
    """Assign a conversion's tensors to `count` parts, 1 to MAX_PARTS; the first is not empty if there is any piece.

    CheckpointError for any other count.
    """
    if not 1 <= count <= MAX_PARTS:
        raise CheckpointError(f"expected 1 to {MAX_PARTS} parts, got {count}")
    total = sum(output.nbytes for output in outputs.values())
    parts: list[list[ConversionPiece]] = [[] for _ in range(count)]
    position = 0
    most = min(PIECE_BYTES, max(_SMALLEST_PIECE, total // (count * _PIECES_PER_PART)))
    for piece in _pieces(format, outputs.values(), most):
        parts[position * count // total if total else 0].append(piece)
        # A tensor without elements at the end stays in the last part.
        position = min(position + piece.bytes, max(total - 1, 0))
    return PartPlan(tuple(map(tuple, parts)))


def _pieces(format: str, outputs: Iterable[Output], most: int) -> Iterable[ConversionPiece]:
    for output in outputs:
        count, nbytes = chunk_count(format, output.shape, output.dtype), output.nbytes
        # Chunks at the upper ends are smaller; which ones matters little here.
        # In safetensors a tensor is in one file, so one part has all of its chunks.
        step = max(count, 1) if format == "safetensors" else max(1, count * most // max(nbytes, 1))
        for first in range(0, max(count, 1), step):
            stop = min(first + step, count)
            yield ConversionPiece(
                output.name, first, stop, _share_of(nbytes, stop, count) - _share_of(nbytes, first, count)
            )


def _share_of(nbytes: int, chunks: int, count: int) -> int:
    return nbytes * chunks // count if count else 0


CPU_SECONDS_PER_GB: Final = 0.8
"""Speed of reading, checking, writing and checksums on one core, if the source stores elements as they are written."""

REARRANGED_CPU_SECONDS_PER_GB: Final = 3.5
"""The same for elements that are transposed, cast or calculated; `docs/measured/convert.md` has both measurements."""

BANDWIDTH: Final = 1.25
"""Default GB/s between one machine and its storage, each way: 10 Gbit/s."""


@dataclass(frozen=True)
class PartEstimate:
    """One part on one machine.

    bytes: written; read_bytes: read from the source, approximately. rearranged_bytes: written bytes that the source
    stores in another order. memory: in addition to the interpreter with its imports. cache: additional page cache that
    the system should have, so that a tensor that is read across its rows is fetched from storage once. cpu_seconds,
    transfer_seconds: how long cores and storage are busy; seconds: the larger of the two. rate: bytes per second to and
    from storage. limit: which of the two is busier, "cores" or "storage"; "nothing to do" for an empty part.
    """

    part: int
    pieces: int
    bytes: int
    read_bytes: int
    rearranged_bytes: int
    memory: int
    cache: int
    cpu_seconds: float
    transfer_seconds: float
    seconds: float
    rate: float
    limit: str


def estimate_parts(
    plan: PartPlan, outputs: Mapping[str, Output], *, workers: int, bandwidth: float = BANDWIDTH
) -> list[PartEstimate]:
    """All parts, each alone on a machine with `workers` cores and `bandwidth` GB/s each way.

    ValueError for a bandwidth that is not above 0.
    """
    if not bandwidth > 0:
        raise ValueError(f"expected a bandwidth above 0 GB/s, got {bandwidth}")
    return [
        _estimate(number, pieces, outputs, workers, bandwidth) for number, pieces in enumerate(plan.parts, 1)
    ]


def _estimate(
    number: int,
    pieces: Sequence[ConversionPiece],
    outputs: Mapping[str, Output],
    workers: int,
    bandwidth: float,
) -> PartEstimate:
    written = sum(piece.bytes for piece in pieces)
    read = rearranged = cache = 0
    for piece in pieces:
        output = outputs[piece.tensor]
        if output.sources:
            read += piece.bytes * output.planned.dtype.itemsize // output.dtype.itemsize
        if output.is_cast or not output.planned.unchanged:
            rearranged += piece.bytes
            cache = max(cache, output.planned.nbytes)
    cpu = CPU_SECONDS_PER_GB * (written - rearranged) + REARRANGED_CPU_SECONDS_PER_GB * rearranged
    cpu, transfer = cpu / 1e9 / workers, max(read, written) / 1e9 / bandwidth
    seconds = max(cpu, transfer)
    return PartEstimate(
        number,
        len(pieces),
        written,
        read,
        rearranged,
        workers * (REGION_BYTES + READ_BYTES),
        cache,
        cpu,
        transfer,
        seconds,
        (read + written) / seconds if seconds else 0.0,
        ("cores" if cpu > transfer else "storage") if written else "nothing to do",
    )
