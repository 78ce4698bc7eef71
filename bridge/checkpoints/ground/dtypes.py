"""Tensors that cannot be read, or not be stored in a destination: named before anything is read or written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bridge.checkpoints.ground.casts import Output
from bridge.core.formats.safetensors.header import DTYPE_NAMES
from bridge.core.formats.tensors.base import (
    DTYPES,
    ORBAX_DTYPES,
    CheckpointError,
    CheckpointReader,
    drop_options,
    unreadable,
)
from bridge.core.text import first_of

_KNOWN: Mapping[str, frozenset[str]] = {
    "dcp": frozenset(DTYPES),
    "orbax": frozenset(ORBAX_DTYPES),
    "safetensors": frozenset(DTYPE_NAMES.values()),
}


def require_readable(reader: CheckpointReader, names: Iterable[str]) -> None:
    """Refuse tensors that cannot be read, all in one CheckpointError."""
    reasons = unreadable(reader)
    if not reasons:
        return
    closed = {name: reasons[name] for name in names if name in reasons}
    if closed:
        raise CheckpointError(
            f"{reader.path}: expected tensors that can be read, found {some_with_reasons(closed)}: leave them out "
            f"({drop_options([*closed])})"
        )


def require_dtypes(reader: CheckpointReader, outputs: Iterable[Output], target: str) -> None:
    """Refuse tensors that cannot be read, and dtypes that the format ``target`` does not have. CheckpointError."""
    outputs = list(outputs)
    require_readable(reader, (name for output in outputs for name in output.sources))
    # There are few dtypes, and NumPy makes a dtype's name anew at each look.
    unknown = {dtype for dtype in {output.dtype for output in outputs} if dtype.name not in _KNOWN[target]}
    if unknown:
        lacking = {o.name: o.dtype.name for o in outputs if o.dtype in unknown}
        sources = [name for output in outputs if output.name in lacking for name in output.sources]
        able = [format for format, known in _KNOWN.items() if known >= set(lacking.values())]
        other = f", or write another format (--to {' or '.join(able)})" if able else ""
        raise CheckpointError(
            f"{reader.path}: expected dtypes that {target} has, found {some_with_reasons(lacking)}: leave these "
            f"tensors out ({drop_options(sources)}){other}"
        )


def some_with_reasons(reasons: Mapping[str, str]) -> str:
    """The first of these names, each with why, and how many more there are."""
    return first_of([f"{name!r:.200} ({why})" for name, why in reasons.items()])
