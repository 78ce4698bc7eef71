"""One parameter's place in a layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tests.sharding.second_planner.boxes import rows_of
from tests.sharding.second_planner.granularity import Shape, is_int


@dataclass(frozen=True)
class Slot:
    """One parameter's place: elements ``[offset, offset + numel)`` of a flat buffer, C order.

    ``row_size`` elements make a row: 1 for vectors and scalars, ``shape[1]`` for matrices, ``shape[-1]`` for stacks.
    ``block`` rows are separated by no shard boundary. A parameter without elements has ``row_size == num_rows == 0``,
    block 1, buffer 0 and offset 0.
    """

    name: str
    shape: Shape
    block: int
    buffer: int
    offset: int
    # Set once rather than cached on first use: a cached property takes a lock, which 100,000 slots feel.
    numel: int = field(init=False, repr=False, compare=False)
    row_size: int = field(init=False, repr=False, compare=False)
    num_rows: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"layout: expected parameter names that are strings, got {self.name!r}")
        if not isinstance(self.shape, tuple) or not all(is_int(size) and size >= 0 for size in self.shape):
            raise ValueError(
                f"parameter {self.name!r}: expected a tuple of integers >= 0 as shape, got {self.shape!r}"
            )
        for what in ("block", "buffer", "offset"):
            value = getattr(self, what)
            if not is_int(value) or value < 0:
                raise ValueError(f"parameter {self.name!r}: expected {what} >= 0, an integer, got {value!r}")
        numel = math.prod(self.shape)
        row_size, num_rows = rows_of(self.shape)
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "row_size", row_size)
        object.__setattr__(self, "num_rows", num_rows)
        if not 1 <= self.block <= max(num_rows, 1):
            raise ValueError(
                f"parameter {self.name!r}: expected blocks of 1 to {max(num_rows, 1)} rows, got {self.block}"
            )
        if not numel and (self.buffer or self.offset):
            raise ValueError(
                f"parameter {self.name!r} has no elements: expected buffer 0 and offset 0, got buffer {self.buffer} "
                f"and offset {self.offset}"
            )

    @property
    def end(self) -> int:
        return self.offset + self.numel

    @property
    def unit(self) -> int:
        """Elements of a block, which stay on one rank; 0 for a parameter without elements."""
        return self.block * self.row_size
