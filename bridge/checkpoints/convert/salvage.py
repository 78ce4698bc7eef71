"""What is whole in a damaged checkpoint: tensors, objects and files that `verify` finds no fault with."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from bridge.checkpoints.ground.selection import SelectedReader, Selection
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import open_checkpoint
from bridge.core.formats.tensors.base import CheckpointError, CheckpointReader
from bridge.core.formats.tensors.wrapping import damage_noted


@contextmanager
def salvaged(
    source: str | os.PathLike[str], items: Sequence[str]
) -> Iterator[tuple[CheckpointReader, CheckpointReader, Mapping[str, str]]]:
    """The source without parts that cannot be opened, its undamaged tensors and objects, and each fault by name.

    Reads the whole source once. CheckpointError if nothing of it is whole.
    """
    report = verify(source, items=items)
    if report.error is not None:
        raise report.error
    faults: dict[str, str] = {}
    for problem in report.problems:
        faults.setdefault(problem.where, problem.text)
    with damage_noted():
        reader = open_checkpoint(source, items=items)
    with reader:
        damaged = [glob.escape(name) for name in (*reader.tensors, *reader.object_paths) if name in faults]
        if len(damaged) == len(reader.tensors) + len(reader.object_paths):
            raise CheckpointError(
                f"{source}: nothing is whole: {'; '.join(map(': '.join, faults.items()))[:500]}"
            )
        yield reader, SelectedReader(reader, Selection(drop=tuple(damaged))) if damaged else reader, faults
