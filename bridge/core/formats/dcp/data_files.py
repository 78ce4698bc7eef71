"""A data file of a DCP checkpoint in the manifest: its size, and the checksum of the bytes around the elements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bridge.core.formats.dcp.archives import Archives
from bridge.core.formats.files.manifest import ManifestFile, rest_checksum
from bridge.core.formats.reading.source_files import SourceFiles


class StoredChunk(NamedTuple):
    """The archive of one chunk: where it is in the file, and the bytes of its elements."""

    offset: int
    length: int
    nbytes: int


def data_file_entry(path: Path, chunks: Sequence[StoredChunk]) -> ManifestFile:
    """The entry of a file with archives of these chunks; reads all bytes but elements. CheckpointError if damaged."""
    size = path.stat().st_size
    ranges = []
    archives = Archives()
    if chunks:
        files = SourceFiles(path.parent)
        view = files.view(path.name)
        for chunk in chunks:
            stored = archives.find(view, chunk.offset, chunk.length, str(path))
            start = stored.record.start + stored.first * stored.dtype.itemsize
            ranges.append((start, start + chunk.nbytes))
        files.close()
    return ManifestFile(size, None, rest_checksum(path, ranges))
