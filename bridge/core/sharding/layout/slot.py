"""One parameter's place in the flat buffers, its validity, and how many of its rows stay together.

The *granularity* of a parameter is the number of rows that no shard boundary separates::

    "row"        1
    "block"      the given ``rows``
    "block(n)"   n, for example the 32 or 128 rows of a quantization block
    "tensor"     all, for optimizers that need whole matrices
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bridge.core.sharding.layout.rows import rows_of

Granularity = str | Mapping[str, str]


class Part(NamedTuple):
    """Elements ``[start, stop)`` of one rank's shard of a buffer, with rows of the layout's slot ``number``."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class Slot:
    """One parameter's place: elements ``[offset, offset + numel)`` of a buffer, row-major.

    Args:
        name: of the parameter.
        shape: of the parameter.
        block: rows that no shard boundary separates: 1, or more for blocks; all rows for whole tensors.
        buffer: index of the flat buffer.
        offset: first element in that buffer.

    ``row_size`` (elements of a row), ``num_rows`` and ``numel`` follow from the shape. A parameter without elements has
    block 1, and 0 for everything else.
    """

    name: str
    shape: tuple[int, ...]
    block: int
    buffer: int
    offset: int
    row_size: int = field(init=False, repr=False, compare=False)
    num_rows: int = field(init=False, repr=False, compare=False)
    numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_shape(self.name, self.shape)
        row_size, num_rows = rows_of(self.shape)
        # Set once here: there may be a hundred thousand slots, and each cached property takes a lock.
        object.__setattr__(self, "row_size", row_size)
        object.__setattr__(self, "num_rows", num_rows)
        object.__setattr__(self, "numel", row_size * num_rows)
        if not is_size(self.buffer) or not is_size(self.offset):
            raise ValueError(
                f"place of {self.name!r}: expected ints >= 0, got buffer {self.buffer!r}, offset {self.offset!r}"
            )
        if not is_size(self.block) or not 1 <= self.block <= max(1, num_rows):
            raise ValueError(
                f"block of {self.name!r}: expected 1 to {max(1, num_rows)} rows, got {self.block!r}"
            )
        if num_rows == 0 and (self.buffer or self.offset):
            raise ValueError(
                f"place of {self.name!r}, which has no elements: expected buffer 0, offset 0, got buffer "
                f"{self.buffer}, offset {self.offset}"
            )

    @property
    def block_numel(self) -> int:
        """Elements that no shard boundary separates; 0 if the parameter has no elements."""
        return self.block * self.row_size

    @property
    def end(self) -> int:
        """The first element of the buffer after the parameter."""
        return self.offset + self.numel

    def rows_before(self, element: int) -> int:
        """How many of the parameter's rows are before this element of its buffer."""
        return min(max(element - self.offset, 0), self.numel) // self.row_size if self.numel else 0

    def check_cuts(self, shard_size: int) -> None:
        """ValueError if a boundary between shards of this size separates rows of a block."""
        first = (self.offset // shard_size + 1) * shard_size
        # Each later boundary is one shard further, so the first two decide.
        for boundary in (first, first + shard_size):
            if boundary < self.end and (boundary - self.offset) % self.block_numel:
                raise ValueError(
                    f"{self.name!r}: expected shard boundaries at multiples of {self.block_numel} elements from its "
                    f"start (blocks of {self.block} rows), got one at {boundary - self.offset}"
                )


def is_size(value: object) -> bool:
    """An int, not a bool, that is not negative."""
    return type(value) is int and value >= 0


def check_shape(name: object, shape: object) -> None:
    """ValueError unless the name is a str and the shape a tuple of ints >= 0."""
    if not isinstance(name, str):
        raise ValueError(f"name of a tensor: expected a str, got {name!r}")
    if isinstance(shape, tuple):
        for size in shape:
            if type(size) is not int or size < 0:
                break
        else:
            return
    raise ValueError(f"shape of {name!r}: expected a tuple of ints >= 0, got {shape!r}")


def blocks_of(names: Sequence[str], granularity: Granularity, rows: int) -> Callable[[str], int | None]:
    """A function from a parameter's name to the rows of its blocks; None for whole tensors.

    Raises ValueError for an unknown granularity, a mapping with other names than these, and ``rows`` below 1.
    """
    if not is_size(rows) or rows == 0:
        raise ValueError(f"rows: expected an int >= 1, got {rows!r}")
    if not isinstance(granularity, Mapping):
        block = _block_of(granularity, rows)
        return lambda _: block
    known = set(names)
    unknown = [name for name in granularity if name not in known]
    if unknown:
        raise ValueError(
            f"granularity: expected names of parameters ({', '.join(names[:5])}, ...), got {unknown[0]!r}"
        )
    blocks = {name: _block_of(asked, rows) for name, asked in granularity.items()}
    return lambda name: blocks.get(name, 1)


def _block_of(granularity: object, rows: int) -> int | None:
    if granularity in ("row", "block", "tensor"):
        return {"row": 1, "block": rows, "tensor": None}[str(granularity)]
    match = re.fullmatch(r"block\(([1-9][0-9]*)\)", granularity) if isinstance(granularity, str) else None
    if match is None:
        raise ValueError(
            f"granularity: expected one of row, block, block(n) with n >= 1, tensor, got {granularity!r}"
        )
    return int(match[1])
