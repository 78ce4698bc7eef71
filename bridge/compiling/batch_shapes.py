"""The batch of a user's own loss, as shapes from a TOML file: arrays by name, for one device and microbatch.

::

    tokens = { shape = [2, 1025], dtype = "int32" }
    mask   = { shape = [2, 1024] }                      # float32

The first dimension counts rows and is the same for all arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bridge.core.dtype_names import BYTES, full_name
from bridge.core.text_files import load_toml
from bridge.planning.models.errors import PlanError

EXAMPLE = 'tokens = { shape = [2, 1025], dtype = "int32" }'


@dataclass(frozen=True)
class BatchArray:
    """``shape``: rows of one device and microbatch, then the other dimensions."""

    shape: tuple[int, ...]
    dtype: str = "float32"


def load_batch_shapes(path: Path) -> dict[str, BatchArray]:
    """Raises ``PlanError`` that names file, array and key for any other content."""
    try:
        content = load_toml(path, lambda text: PlanError(f"batch shapes {text}"))
    except OSError as error:
        raise PlanError(
            f"batch shapes {path}: expected a TOML file with lines such as {EXAMPLE}: {error.strerror}"
        ) from error
    arrays = {name: _array(f"batch shapes {path}: {name}", entry) for name, entry in content.items()}
    rows = {array.shape[0] for array in arrays.values()}
    if len(rows) != 1:
        raise PlanError(
            f"batch shapes {path}: expected one or more arrays with the same first dimension, rows of a device and "
            f"microbatch, got { ({name: list(array.shape) for name, array in arrays.items()}) }"
        )
    return arrays


def _array(where: str, entry: object) -> BatchArray:
    if not isinstance(entry, dict) or "shape" not in entry or entry.keys() - {"shape", "dtype"}:
        raise PlanError(f"{where}: expected shape and dtype as in {EXAMPLE}, got {entry!r}")
    shape, dtype = entry["shape"], entry.get("dtype", "float32")
    sizes = shape if isinstance(shape, list) else []
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise PlanError(f"{where}: shape: expected a list of ints >= 1, rows first, got {shape!r}")
    if isinstance(dtype, str):
        dtype = full_name(dtype, BYTES)
    if dtype not in BYTES:
        raise PlanError(f"{where}: dtype: expected one of {', '.join(BYTES)}, got {dtype!r}")
    return BatchArray(tuple(sizes), dtype)
