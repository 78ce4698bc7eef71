"""Files as readers see them, and the elements of a tensor that is stored there."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bridge.core.formats.dcp.archive import StoredTensor
from bridge.core.formats.reading.source_files import FileArray, FileView, SourceFiles
from bridge.core.formats.tensors.arrays import as_integers


def viewed(path: Path, data: bytes) -> FileView:
    """A new file with this content."""
    path.write_bytes(data)
    return SourceFiles(path.parent).view(path.name)


def elements(file: FileView, stored: StoredTensor) -> np.ndarray:
    """All elements of a tensor in the file, as a copy in memory."""
    size = stored.dtype.itemsize
    strides = tuple(step * size for step in stored.strides)
    start = stored.record.start + stored.first * size
    array = np.empty(stored.shape, stored.dtype)
    source = FileArray(file._name, start, stored.shape, strides, stored.dtype, "w")
    file._files.copy(as_integers(array), source)
    return array
