"""Proposals of the shell at TAB: names of families, conventions, axes, dtypes, policies, models and relays.

`twinshard --install-completion` sets the shell up. Where this file has no proposals, bash, zsh and fish propose
files. A completion must never fail or wait, so it reads files of this package only.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from bridge.core.mapping.language.table import MappingTable

_Proposals = list[tuple[str, str]]
_FAMILIES = Path(__file__).parents[1] / "core" / "mapping" / "families"


def families(incomplete: str) -> _Proposals:
    """Shipped families with their models."""
    proposals = []
    for name in _starting(_names(_FAMILIES), incomplete):
        table = _table(name)
        proposals.append((name, "" if table is None else f"{', '.join(table.models)}"[:60]))
    return proposals


def conventions(ctx: typer.Context, incomplete: str) -> _Proposals:
    """Conventions of the family that --mapping names, or of all families without --mapping."""
    mapping = ctx.params.get("mapping")
    tables = [_table(mapping)] if mapping else [_table(name) for name in _names(_FAMILIES)]
    names = dict.fromkeys(name for table in tables if table is not None for name in table.conventions)
    return [(name, "") for name in _starting(names, incomplete)]


def axes(ctx: typer.Context, incomplete: str) -> _Proposals:
    """Axes of the mapping, with the "=" before their size."""
    mapping = ctx.params.get("mapping")
    table = _table(mapping) if mapping else None
    known = () if table is None else dict.fromkeys((*table.config, *table.axes))
    return [(f"{name}=", "") for name in _starting(known, incomplete)]


def casts(incomplete: str) -> _Proposals:
    """Floating-point dtypes after a pattern."""
    from bridge.core.formats.tensors.base import DTYPES

    pattern, equals, name = incomplete.rpartition("=")
    start = f"{pattern}=" if equals else "*="
    dtypes = [dtype_name for dtype_name, dtype in DTYPES.items() if dtype.kind in "fV"]
    return [(start + dtype, "") for dtype in _starting(dtypes, name)] if equals or not incomplete else []


def policies(incomplete: str) -> _Proposals:
    """Shipped policies."""
    folder = Path(__file__).parents[1] / "core" / "sharding" / "policies"
    return _stems(folder, incomplete)


def relays(incomplete: str) -> _Proposals:
    """Built-in relays."""
    return _stems(Path(__file__).parents[1] / "relay" / "configs", incomplete)


def models(incomplete: str) -> _Proposals:
    """Models that `plan` knows by name."""
    from bridge.planning.models.shipped_models import SHIPPED

    return [(name, "") for name in _starting([*SHIPPED, "decoder:default"], incomplete)]


def optimizers(incomplete: str) -> _Proposals:
    """Optimizers that `plan` knows."""
    from bridge.planning.cost.optimizers import NAMES

    return [(name, "") for name in _starting(NAMES, incomplete)]


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _stems(folder: Path, incomplete: str) -> _Proposals:
    return [(name, "") for name in _starting(_names(folder), incomplete)]


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def _table(name: str) -> MappingTable | None:
    from bridge.core.formats.tensors.base import CheckpointError
    from bridge.core.mapping.language.rules import load_mapping

    try:
        return load_mapping(name)
    except (CheckpointError, OSError):
        return None
