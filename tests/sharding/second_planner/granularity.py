"""What a caller asks of a layout, checked: shapes, and how many rows of each parameter stay on one rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# "row" | "block" | "block(n)" | "tensor", or one of these by parameter name.
Granularity = str | Mapping[str, str]
Shape = tuple[int, ...]

_NUMBERED_BLOCK = re.compile(r"block\(([1-9][0-9]*)\)")


def is_int(value: Any) -> bool:
    """An integer that is no bool, nor of another type that Python counts among them."""
    return type(value) is int


def checked_count(what: str, value: Any) -> int:
    """Raises ``ValueError`` unless ``value`` is an integer of at least one."""
    if not is_int(value) or value < 1:
        raise ValueError(f"layout: expected {what} >= 1, an integer, got {value!r}")
    return value


def checked_shapes(
    shapes: Mapping[str, Iterable[int]] | Iterable[tuple[str, Iterable[int]]],
) -> dict[str, Shape]:
    """``{name: shape}`` in the order given. Raises ``ValueError`` for what is no name or shape, or a name twice."""
    checked: dict[str, Shape] = {}
    if not isinstance(shapes, Iterable):
        raise ValueError(f"layout: expected a mapping or pairs of names and shapes, got {shapes!r}")
    for pair in shapes.items() if isinstance(shapes, Mapping) else shapes:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[1], (tuple, list)):
            raise ValueError(
                f"layout: expected pairs of a name and a shape, a tuple or list of integers, got {pair!r}"
            )
        name, shape = pair[0], tuple(pair[1])
        if not isinstance(name, str):
            raise ValueError(f"layout: expected parameter names that are strings, got {name!r}")
        if name in checked:
            raise ValueError(f"layout: expected each parameter once, got {name!r} more than once")
        for size in shape:
            if not is_int(size):
                raise ValueError(
                    f"parameter {name!r}: expected dimensions that are integers, got shape {shape}"
                )
            if size < 0:
                raise ValueError(f"parameter {name!r}: expected dimensions >= 0, got shape {shape}")
        checked[name] = shape
    return checked


def block_rows(granularity: str, rows: int) -> int | None:
    """Rows of a block; None for whole tensors. Raises ``ValueError`` for an unknown granularity."""
    if granularity == "row":
        return 1
    if granularity == "block":
        return rows
    if granularity == "tensor":
        return None
    numbered = _NUMBERED_BLOCK.fullmatch(granularity) if isinstance(granularity, str) else None
    if numbered is None:
        raise ValueError(
            f"layout: expected a granularity among 'row', 'block', 'block(n)' with n >= 1 and 'tensor', "
            f"got {granularity!r}"
        )
    return int(numbered[1])


def blocks_by_name(granularity: Granularity, rows: int, names: Iterable[str]) -> dict[str, int | None]:
    """``block_rows`` of each parameter. Raises ``ValueError`` for a mapping that has others."""
    if not isinstance(granularity, Mapping):
        return dict.fromkeys(names, block_rows(granularity, rows))
    chosen = {name: block_rows(each, rows) for name, each in granularity.items()}
    blocks = {name: chosen.get(name, 1) for name in names}
    unknown = [name for name in chosen if name not in blocks]
    if unknown:
        raise ValueError(f"granularity: expected names among the parameters, got {unknown[:5]}")
    return blocks
