"""Granularity: how many rows of each parameter no shard boundary separates.

"row"        1
"block"      the ``rows`` given beside it
"block(n)"   n, for example the 32 or 128 rows of a quantization block
"tensor"     all, for optimizers that need whole matrices
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from bridge.sharding.slot import is_size

Granularity = str | Mapping[str, str]


def blocks_of(names: Sequence[str], granularity: Granularity, rows: int) -> Callable[[str], int | None]:
    """A function from a parameter's name to its rows of a block; None for whole tensors.

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
    blocks = {name: _block_of(one, rows) for name, one in granularity.items()}
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
