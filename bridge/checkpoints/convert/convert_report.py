"""The result of a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bridge.checkpoints.convert.destination import format_by_name
from bridge.core.formats.whole.companions import Companions


@dataclass(frozen=True)
class ConvertReport:
    """The result of a conversion.

    bytes: of the tensors' elements. resumed_bytes: those that an earlier attempt or other parts had written. dropped:
    names in the source that did not go along. overflowed: by name, how many finite elements a cast made infinite or
    NaN, without those of an earlier attempt. inexact: names of tensors that the mapping calculated, with rounding.
    verified: whether the source's checksums, where it has any, were compared. companions: files that went along, such
    as `config.json`. kept: those that a replaced checkpoint had, and the source has not. not_copied: why others did not
    go along. conventions, remarks: see `bridge.core.mapping.plan.plan`. left_alone: why files beside the source, which
    look like weights, were not read. As a truth value it is `complete`.
    """

    source: Path | str
    destination: Path | str
    source_format: str
    format: str
    tensors: int
    objects: int
    bytes: int
    resumed_bytes: int
    dropped: tuple[str, ...]
    overflowed: Mapping[str, int]
    inexact: tuple[str, ...]
    verified: bool
    seconds: float
    companions: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    not_copied: Mapping[str, str] = field(default_factory=dict)
    conventions: tuple[str, str] | None = None
    remarks: tuple[str, ...] = ()
    left_alone: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether no file of weights was left alone, and no cast made a finite element infinite or NaN."""
        return not (self.left_alone or self.overflowed)

    def __bool__(self) -> bool:
        return self.complete


def went_along(
    beside: Companions, destination: Path | str
) -> tuple[tuple[str, ...], tuple[str, ...], Mapping[str, str]]:
    """The last three fields of a report: the companions that were copied, kept, and left behind with the reason."""
    alone = (
        format_by_name(destination) is not None if isinstance(destination, str) else not destination.is_dir()
    )
    if not alone:
        return tuple(beside.files), tuple(beside.kept), beside.refused
    one_file = dict.fromkeys(beside.files, f"{destination} is one file, and its directory may be anybody's")
    return (), (), {**beside.refused, **one_file}
