"""Several writers of one checkpoint, each with files of its own: which chunks are whose.

runs/step_40.tmp-5c0de1f2/              becomes step_40 when all parts are there
  twinshard.journal                     what is converted from what, into how many parts; locked by who commits
  twinshard.parts/                      removed once step_40 is there
    plan.json                           all pieces of all parts
    part_1/                             a part that is complete, with its manifest
    part_2.tmp-0b7e99d3/                one that is being written, or whose writer was killed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.core.formats.tensors.base import Box

PARTS_FOLDER = "twinshard.parts"


@dataclass(frozen=True)
class Share:
    """What one of several writers writes.

    number: of the writer, from 1. chunks: for each tensor that it has chunks of, by the tensor's name in the writer,
    the first and the one after the last, counted in row-major order. Objects are written by number 1.
    """

    number: int
    chunks: Mapping[str, tuple[int, int]]

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"expected a writer's number from 1, got {self.number}")

    def own(self, name: str, chunks: tuple[Box, ...]) -> tuple[Box, ...]:
        """Those of a tensor's chunks that this writer writes. KeyError for a tensor of others only."""
        first, stop = self.chunks[name]
        return chunks[first:stop]
