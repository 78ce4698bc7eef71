"""Where the chunks and objects of a DCP checkpoint are: in files that are long enough, each in a place of its own."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Final, TypeAlias

from bridge.core.formats.dcp.metadata import DcpMetadata, Extent
from bridge.core.formats.reading.regular_files import regular_file
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.tensors.damaged_parts import one_part

_Place: TypeAlias = tuple[str, int, int, int, str]
"""An extent (file, offset, length), the bytes of elements that it is to hold, and whose these are."""

_NOWHERE: Final[_Place] = ("", 0, 0, 0, "")


def data_files_of(
    directory: Path, metadata: DcpMetadata, is_safetensors: Callable[[Extent], bool]
) -> tuple[str, ...]:
    """The names of the files with chunks and objects. is_safetensors: whether a place is in a file of that format.

    CheckpointError unless all of these lie inside of regular files, as long as they should be, apart from each other.
    """
    places: list[_Place] = []
    for name, info in metadata.tensors.items():
        for index, (chunk, extent) in enumerate(zip(info.chunks, metadata.extents[name], strict=True)):
            nbytes = chunk.numel * info.dtype.itemsize
            places.append((*extent, nbytes, name))
            if metadata.copies:
                copies = metadata.copies.get((name, index), ())
                places += [(*copy, nbytes, name) for copy in copies]
    for name, extent in metadata.objects.items():
        places += [(*e, 0, name) for e in (extent, *metadata.object_copies.get(name, ()))]
    sizes: dict[str, int] = {}
    for file, offset, length, nbytes, name in places:
        size = sizes.get(file)
        if size is None:
            # Where damage is noted, reading the chunks says what a missing file lacks.
            size = 1 << 62
            with one_part(file):
                _, size = regular_file(directory, file, repr(name))
            sizes[file] = size
        if offset + length > size:
            with one_part(file):
                raise CheckpointError(
                    f"{directory / file} is truncated: expected at least {offset + length} bytes (for {name!r}), got "
                    f"{size}"
                )
        if length < nbytes:
            raise CheckpointError(
                f"{directory / file}: tensor {name!r}: expected {nbytes} bytes for a chunk, but {length} are stored"
            )
    places.sort(key=itemgetter(0, 1, 2))
    last, end = _NOWHERE, 0
    for place in places:
        file, offset, length, _, name = place
        # All tensors of one safetensors file have its place.
        if offset < end and file == last[0] and not (offset == last[1] and is_safetensors(Extent(*last[:3]))):
            raise CheckpointError(
                f"{directory / file}: {last[4]!r} and {name!r} are stored in the same place, at {offset}"
            )
        last, end = place, offset + length
    return tuple(sizes)
