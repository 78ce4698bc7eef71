"""Checkpoint formats behind one reader and one writer protocol, with neither PyTorch nor JAX.

with open_checkpoint("runs/leg_0") as source:                       # format detected
    row = source.read("model.embed.weight", Box((5, 0), (1, 331)))

with create_checkpoint("copy", "orbax") as target:                  # appears on a clean exit, whole
    name = target.add_tensor(("params", "scale"), (331,), np.dtype("float32")).name
    for box in target.chunks(name):
        target.write(name, box, array[box.slices()])
"""

from __future__ import annotations

import os
from pathlib import Path

from bridge.formats.base import (
    DTYPES,
    Box,
    CheckpointError,
    CheckpointReader,
    CheckpointWriter,
    TensorInfo,
    TreePath,
    check_coverage,
    dtype_from_name,
    dtype_name,
)
from bridge.formats.orbax_item import is_unfinished

__all__ = [
    "DTYPES",
    "FORMATS",
    "Box",
    "CheckpointError",
    "CheckpointReader",
    "CheckpointWriter",
    "TensorInfo",
    "TreePath",
    "check_coverage",
    "create_checkpoint",
    "detect_format",
    "dtype_from_name",
    "dtype_name",
    "open_checkpoint",
]

FORMATS = ("dcp", "orbax")
_ORBAX_FILES = ("_METADATA", "_CHECKPOINT_METADATA", "orbax.checkpoint")


def detect_format(path: str | os.PathLike[str]) -> str:
    """ "dcp" or "orbax", from the names of the files in the directory.

    Raises FileNotFoundError (no such path), NotADirectoryError (a file), CheckpointError (half-written, or unknown).
    """
    directory = Path(path)
    if not directory.exists():
        raise FileNotFoundError(f"expected a checkpoint directory at {directory}, found nothing there")
    if not directory.is_dir():
        raise NotADirectoryError(f"expected a checkpoint directory at {directory}, found a file")
    if is_unfinished(Path(os.path.abspath(directory))):
        raise CheckpointError(
            f"{directory} is a checkpoint that was never finished (its writer stopped half-way): "
            "use an earlier one and remove this directory"
        )
    if (directory / ".metadata").is_file():
        return "dcp"
    # A directory of steps holds items, which hold the files: <root>/<step>/<item>/_METADATA.
    for pattern in ("", "*/", "*/*/"):
        if any(next(directory.glob(pattern + name), None) for name in _ORBAX_FILES):
            return "orbax"
    names = sorted(p.name for p in directory.iterdir())
    if any(n.endswith(".metadata") for n in names):
        raise CheckpointError(
            f"{directory} is a DCP checkpoint with one metadata file per rank (saved with use_collectives=False), "
            "which is not supported: load it with PyTorch and save it again"
        )
    if any(n.endswith(".distcp") for n in names):
        raise CheckpointError(
            f"{directory} is a DCP checkpoint whose save did not finish: it has no .metadata"
        )
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    raise CheckpointError(
        f"expected a DCP checkpoint (.metadata) or an Orbax one (_METADATA) in {directory}, found "
        f"{shown or 'an empty directory'}"
    )


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointReader:
    """Open the checkpoint in this directory, whatever its format. Errors as in `detect_format`, or CheckpointError."""
    # Imported here: reading one format must not need the other's dependencies (tensorstore).
    if detect_format(path) == "dcp":
        from bridge.formats.dcp_reader import DcpReader

        return DcpReader(path)
    from bridge.formats.orbax_reader import OrbaxReader

    return OrbaxReader(path)


def create_checkpoint(path: str | os.PathLike[str], format: str) -> CheckpointWriter:
    """Start a new checkpoint at `path`, which must not exist. `format` is one of FORMATS, else ValueError."""
    if format == "dcp":
        from bridge.formats.dcp_writer import DcpWriter

        return DcpWriter(path)
    if format == "orbax":
        from bridge.formats.orbax_writer import OrbaxWriter

        return OrbaxWriter(path)
    raise ValueError(f"expected a checkpoint format out of {', '.join(FORMATS)}, got {format!r}")
