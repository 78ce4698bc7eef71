"""Sizes of axes that the shapes of weights leave open."""

from __future__ import annotations

from bridge.formats.base import CheckpointReader, TensorInfo
from bridge.mapping.apply import Axes
from bridge.mapping.entries import HALF, PAIR
from bridge.mapping.errors import MappingError
from bridge.mapping.rules import MappingTable


def with_stored_sizes(mapping: MappingTable, reader: CheckpointReader) -> MappingTable:
    """The same with the sizes that scalars of the checkpoint give, for a part of it that may lack those scalars.

    MappingError for a scalar that is no size.
    """
    by_path = {"/".join(map(str, info.path)): info for info in reader.tensors.values()}
    stored = {axis: value for axis, value in mapping.axes.items() if isinstance(value, str) and "/" in value}
    return mapping.with_axes(
        {
            axis: _scalar(reader, mapping, axis, by_path[path])
            for axis, path in stored.items()
            if path in by_path
        }
    )


def known_sizes(reader: CheckpointReader, mapping: MappingTable) -> Axes:
    """The sizes that the mapping's table of axes gives, some of them from scalars of the checkpoint.

    Raises MappingError for axes that name each other, for rotary pairs of an odd size, and as `with_stored_sizes` does.
    """
    sizes: dict[str, int] = {}
    alias: dict[str, str] = {}
    absent: dict[str, str] = {}
    table = with_stored_sizes(mapping, reader).axes
    for axis, value in table.items():
        end, seen = axis, [axis]
        while isinstance(target := table.get(end), str) and "/" not in target:
            if target in seen:
                raise MappingError(
                    f"the axes {' = '.join([*seen, target])} of mapping {mapping.name} form a loop"
                )
            end = target
            seen.append(target)
        if end != axis:
            alias[axis] = end
        elif isinstance(value, int):
            sizes[axis] = value
        else:
            name = value.replace("/", "/" if reader.format == "orbax" else ".")
            absent[axis] = f"the mapping takes it from {name}, which {reader.path} does not have"
    for axis in mapping.rotary_axes():
        sizes[axis + HALF] = 2
        if (size := sizes.get(alias.get(axis, axis))) is not None:
            if size % 2:
                raise MappingError(
                    f"expected an even size for axis {axis} of mapping {mapping.name}, which is of rotary "
                    f"positions, got {size}"
                )
            sizes[axis + PAIR] = size // 2
    return Axes(sizes, alias, absent)


def _scalar(reader: CheckpointReader, mapping: MappingTable, axis: str, info: TensorInfo) -> int:
    if info.shape != () or info.dtype.kind not in "iu":
        raise MappingError(
            f"expected a scalar integer in {info.name} for axis {axis} of mapping {mapping.name}, "
            f"got {info.dtype} of shape {info.shape}"
        )
    size = int(reader.read(info.name))
    if size < 0:
        raise MappingError(f"expected a size of 0 or more in {info.name} for axis {axis}, got {size}")
    return size
