"""The findings of a verification, and the findings in several items as one report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bridge.checkpoints.ground.checked import Problem
from bridge.core.formats.files.certificate import Certificate
from bridge.core.text import counted, human_bytes
from bridge.core.views import Viewed


@dataclass(frozen=True)
class NotFinite:
    """A tensor with NaN or infinite elements; the parts of complex elements count as two."""

    name: str
    nan: int
    infinite: int


@dataclass(frozen=True, repr=False)
class VerifyReport(Viewed):
    """The findings. ``bytes``:

    of the tensors' elements. opened: whether the checkpoint, or a part of it, could be opened; if not, only files were
    compared with the manifest, and error is the error from opening it. manifest: whether there is one. protected: bytes
    that a checksum of the manifest or of the format covers; None if the format does not say. unread: names of tensors
    whose elements cannot be read, and so were not checked. damaged: names of tensors with a chunk that could not be
    read or has changed; all others are intact. left_alone: why files next to the checkpoint that look like weights were
    not checked; this is not a problem. certificate: of the conversion that made the checkpoint, if one did. Its truth
    value is `good`.
    """

    path: Path | str
    format: str
    opened: bool
    manifest: bool
    problems: tuple[Problem, ...]
    seconds: float
    tensors: int = 0
    chunks: int = 0
    objects: int = 0
    bytes: int = 0
    protected: int | None = None
    not_finite: tuple[NotFinite, ...] = ()
    unread: tuple[str, ...] = ()
    error: Exception | None = None
    damaged: tuple[str, ...] = ()
    left_alone: Mapping[str, str] = field(default_factory=dict)
    certificate: Certificate | None = None

    def summary(self) -> str:
        """The verdict, and what was checked."""
        count = len(self.problems)
        verdict = f"{count} problem{'s' * (count != 1)} found" if count else "no problem found"
        if not self.opened:
            return f"{self.path} cannot be opened{f'; {verdict}' * bool(count)}"
        return f"{verdict} in {self.path}: {self.format}, {counted(self.tensors, 'tensor')}, {human_bytes(self.bytes)}"

    def table(self) -> list[tuple[str, str]]:
        """A heading, and a row for each problem."""
        return [("where", "problem"), *((problem.where, problem.text) for problem in self.problems)]

    @property
    def good(self) -> bool:
        """Whether no problem was found."""
        return self.opened and not self.problems

    def __bool__(self) -> bool:
        return self.good


def joined(where: Path, reports: Mapping[str, VerifyReport], seconds: float) -> VerifyReport:
    """The report of several items that are one tree."""
    of_parts = list(reports.values())
    opened = [report for report in of_parts if report.opened]
    protected = [report.protected for report in opened]
    return VerifyReport(
        where,
        next((report.format for report in of_parts if report.format), ""),
        bool(opened),
        all(report.manifest for report in of_parts),
        tuple(
            Problem(name if p.where == str(report.path) else f"{name}/{p.where}", p.text)
            for name, report in reports.items()
            for p in report.problems
        ),
        seconds,
        tensors=sum(report.tensors for report in of_parts),
        chunks=sum(report.chunks for report in of_parts),
        objects=sum(report.objects for report in of_parts),
        bytes=sum(report.bytes for report in of_parts),
        protected=None if None in protected else sum(p for p in protected if p is not None),
        not_finite=tuple(
            NotFinite(f"{name}/{tensor.name}", tensor.nan, tensor.infinite)
            for name, report in reports.items()
            for tensor in report.not_finite
        ),
        unread=tuple(f"{name}/{tensor}" for name, report in reports.items() for tensor in report.unread),
        error=None if opened else of_parts[0].error,
        damaged=tuple(f"{name}/{tensor}" for name, report in reports.items() for tensor in report.damaged),
        certificate=next((report.certificate for report in of_parts if report.certificate), None),
    )
