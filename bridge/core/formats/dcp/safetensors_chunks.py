"""Chunks of DCP in safetensors files, as `SerializationFormat.SAFETENSORS` writes them.

At the place that `.metadata` gives for each of its tensors, a safetensors file begins.
"""

from __future__ import annotations

from bridge.core.formats.dcp.archives import StoredChunk
from bridge.core.formats.reading.source_files import SourceFiles
from bridge.core.formats.safetensors.header import (
    LENGTH_BYTES,
    Header,
    header_length,
    read_header,
    saved_offsets,
)
from bridge.core.formats.tensors.base import Box, CheckpointError


def read_header_at(files: SourceFiles, name: str, start: int, what: str) -> Header:
    """The header of the safetensors file that begins at this byte of a file. CheckpointError if damaged."""
    # From a store, only these bytes are fetched: first the length, then the header.
    length = header_length(files.view(name, (start, start + LENGTH_BYTES)), start)
    return read_header(files.view(name, (start, start + LENGTH_BYTES + length)), what, start)


def stored_chunk(header: Header, name: str, chunk: Box, what: str) -> StoredChunk:
    """Where the chunk of a tensor is in a safetensors file. CheckpointError if the file has a different chunk."""
    array = header.arrays.get(name)
    if array is None:
        raise CheckpointError(f"{what}: expected the safetensors file to contain the tensor, found none")
    offsets = saved_offsets(header, what).get(name)
    if offsets != chunk.offsets:
        raise CheckpointError(
            f"{what}: expected the chunk that .metadata names, got the chunk at {offsets}: this way of saving keeps "
            "only one chunk of a tensor per file, and the other chunks are lost"
        )
    return StoredChunk(array, array.start, None)
