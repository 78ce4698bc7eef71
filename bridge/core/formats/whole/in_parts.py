"""A checkpoint written in parts, by processes that need not know about each other, and joined at the end.

with create_part("runs/x/part_1", "dcp", Share(1, {"w": (0, 3)}), Attempt()) as writer:     # on one machine
    ...
join_parts("runs/x", "dcp", [Path("part_1"), Path("part_2")], attempt, "...", declare)      # on any, when all are there

Each part is a separate directory that appears whole or not at all. A part is not a checkpoint.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from bridge.core.formats.files.journal import Attempt, WorkingDirectory
from bridge.core.formats.files.part_files import Share
from bridge.core.formats.tensors.base import CheckpointError, CheckpointWriter, TreePath
from bridge.core.formats.tensors.boxes import default_chunk_shape
from bridge.core.formats.tensors.leaves import flat_name


def create_part(path: Path, format: str, share: Share, attempt: Attempt) -> CheckpointWriter:
    """Start a part at `path`, which must not exist. Declare only tensors of the share, and objects only in part 1."""
    if format == "dcp":
        from bridge.core.formats.dcp.writer import DcpWriter

        return DcpWriter(path, attempt, share=share)
    if format == "orbax":
        from bridge.core.formats.orbax.part_writer import OrbaxShare

        return OrbaxShare(path, attempt, share)
    from bridge.core.formats.safetensors.writer import SafetensorsWriter

    return SafetensorsWriter(path, attempt, share=share)


def join_parts(
    path: str | os.PathLike[str],
    format: str,
    parts: Sequence[Path],
    attempt: Attempt,
    conversion: str,
    declare: Callable[[CheckpointWriter], object],
) -> None:
    """Make the checkpoint at `path` from all its parts, in order, which are in its working directory.

    attempt: has the key of this directory, which has a journal; it is resumed. conversion: for the manifest. declare:
    adds all tensors, objects and kinds to the writer, if the format's metadata is written anew.

    Raises CheckpointError (not the parts of one checkpoint; another process joins them), FileExistsError (something is
    at `path`, and the attempt does not replace it). Then everything stays, so that joining can be repeated.
    """
    if format == "orbax":
        from bridge.core.formats.orbax.part_writer import OrbaxJoin

        with OrbaxJoin(path, attempt, parts, conversion) as writer:
            declare(writer)
        return
    if format == "dcp":
        from bridge.core.formats.dcp.writer import join
    else:
        from bridge.core.formats.safetensors.writer import join
    with WorkingDirectory(path, attempt) as directory:
        join(directory.temporary, parts, conversion)


def chunk_count(format: str, shape: tuple[int, ...], dtype: np.dtype) -> int:
    """How many chunks a tensor has by default."""
    if format == "orbax":
        from bridge.core.formats.orbax.zarr.chunks import default_chunk

        block = default_chunk(shape, dtype)
    else:
        block = default_chunk_shape(shape, dtype)
    return math.prod(-(-n // b) for n, b in zip(shape, block, strict=True))


def require_names(path: Path, format: str, leaves: Iterable[TreePath]) -> None:
    """CheckpointError if two leaves cannot be in one checkpoint: each part sees only its own leaves."""
    if format == "orbax":
        from bridge.core.formats.orbax.tree import Claims, as_path

        claims = Claims(str(path))
        for leaf in leaves:
            claims.add(as_path(leaf))
        return
    names: set[str] = set()
    for leaf in leaves:
        name = flat_name(leaf)[0]
        if name in names:
            raise CheckpointError(f"{path}: two entries are named {name!r} (names join the path by '.')")
        names.add(name)
