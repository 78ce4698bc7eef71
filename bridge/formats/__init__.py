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
    dtype_from_name,
    dtype_name,
)
from bridge.formats.coverage import check_coverage
from bridge.formats.dcp.metadata import metadata_files
from bridge.formats.files.working import Attempt
from bridge.formats.orbax.item import is_unfinished
from bridge.formats.safetensors.files import holds_safetensors
from bridge.formats.stores.listing import StorePath
from bridge.formats.stores.store import is_url

__all__ = [
    "DTYPES",
    "FORMATS",
    "Attempt",
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

FORMATS = ("dcp", "orbax", "safetensors")
_ORBAX_FILES = ("_METADATA", "_CHECKPOINT_METADATA", "orbax.checkpoint")


def detect_format(path: str | os.PathLike[str]) -> str:
    """One of FORMATS, from the names of the files in the directory, or of the file itself.

    Raises FileNotFoundError (no such path), NotADirectoryError (another file), CheckpointError (half-written, or
    unknown).
    """
    place = path if isinstance(path, StorePath) else Path(path)
    if not place.exists():
        raise FileNotFoundError(f"{place} does not exist: expected a checkpoint there")
    if is_unfinished(place if isinstance(place, StorePath) else Path(os.path.abspath(place))):
        raise CheckpointError(
            f"{place} is a checkpoint that was never finished (its writer stopped half-way): remove it, and use an "
            "earlier checkpoint"
        )
    if not place.is_dir():
        if holds_safetensors(place):
            return "safetensors"
        raise NotADirectoryError(
            f"{place} is a file of another kind: expected a checkpoint directory or a .safetensors file"
        )
    if metadata_files(place):
        return "dcp"
    # A directory of steps holds items, which hold the files: <root>/<step>/<item>/_METADATA.
    for pattern in ("", "*/", "*/*/"):
        if any(next(place.glob(pattern + name), None) for name in _ORBAX_FILES):
            return "orbax"
    if holds_safetensors(place):
        return "safetensors"
    names = sorted(p.name for p in place.iterdir())
    if any(n.endswith(".distcp") for n in names):
        raise CheckpointError(f"{place} is a DCP checkpoint whose save did not finish: it has no .metadata")
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    raise CheckpointError(
        f"expected a DCP checkpoint (.metadata), an Orbax one (_METADATA) or *.safetensors files in {place}, found "
        f"{shown or 'an empty directory'}"
    )


def open_checkpoint(path: str | os.PathLike[str], *, verify: bool = True) -> CheckpointReader:
    """Open the checkpoint at a local path or a URL, whatever its format.

    verify: compare chunks with the checksums that the format itself has (DCP, Orbax) when they are read.

    Errors as in `detect_format`, or CheckpointError; OSError when the store at the URL fails.
    """
    if is_url(path):
        from bridge.formats.stores.reader import StoredReader

        return StoredReader(str(path), lambda place: _open(place, verify))
    return _open(path if isinstance(path, StorePath) else Path(path), verify)


def _open(path: Path, verify: bool) -> CheckpointReader:
    # Imported here: reading one format must not need the other's dependencies (tensorstore).
    format = detect_format(path)
    if format == "dcp":
        from bridge.formats.dcp.reader import DcpReader

        return DcpReader(path, verify)
    if format == "safetensors":
        from bridge.formats.safetensors.reader import SafetensorsReader

        return SafetensorsReader(path)
    from bridge.formats.orbax.reader import OrbaxReader

    return OrbaxReader(path, verify=verify)


def create_checkpoint(
    path: str | os.PathLike[str], format: str, *, attempt: Attempt | None = None
) -> CheckpointWriter:
    """Start a new checkpoint at `path`, which must not exist unless `attempt` replaces it.

    `format` is one of FORMATS, else ValueError.
    """
    if format == "dcp":
        from bridge.formats.dcp.writer import DcpWriter

        return DcpWriter(path, attempt)
    if format == "orbax":
        from bridge.formats.orbax.writer import OrbaxWriter

        return OrbaxWriter(path, attempt=attempt)
    if format == "safetensors":
        from bridge.formats.safetensors.writer import SafetensorsWriter

        return SafetensorsWriter(path, attempt)
    raise ValueError(f"expected a checkpoint format out of {', '.join(FORMATS)}, got {format!r}")
