"""What a part of a conversion will take, on paper: pieces, bytes, memory, seconds, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bridge.checkpoints.ground.outputs import Output
from bridge.checkpoints.jobs.pieces import ConversionPiece, PartPlan
from bridge.core.formats.tensors.boxes import REGION_BYTES
from bridge.core.mapping.language.relation import READ_BYTES

CPU_SECONDS_PER_GB: Final = 0.8
"""Reading, checking, writing and its checksums, of one core, where elements lie in the source as they are written."""

REARRANGED_CPU_SECONDS_PER_GB: Final = 3.5
"""The same for elements that are transposed, cast or calculated; both as `tests/bench/README.md` has them."""

BANDWIDTH: Final = 1.25
"""Default GB/s between one machine and its storage, each way: 10 Gbit/s."""


@dataclass(frozen=True)
class PartEstimate:
    """One part on one machine.

    bytes: written; read_bytes: of the source, about. rearranged_bytes: those of the written ones that do not lie so in
    the source. memory: above the interpreter with its imports. cache: what the system's page cache should hold besides
    it, so that a tensor that is read across its rows comes from storage once. cpu_seconds, transfer_seconds: how long
    cores and storage are busy; seconds: the larger of the two. rate: bytes a second to and from storage. limit: which
    of the two is busier, "cores" or "storage"; "nothing to do" for an empty part.
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
