"""Options of `twinshard convert` for conversions in parts: part, commit, engine, parts, bandwidth."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

Engine = Literal["threads", "processes", "ray"]
"""The engines that run the parts of a conversion."""


@dataclass(frozen=True)
class PartRequest:
    """A request for a conversion in parts.

    part, count: from `--part`; None if an engine runs all parts, or if the command only commits. commit: whether the
    last part commits; without part and engine, the command only commits.
    """

    part: int | None
    count: int | None
    commit: bool
    engine: Engine
    bandwidth: float | None
    dry_run: bool


@dataclass(frozen=True)
class PartOptions:
    """The options themselves; ``request`` turns them into a request."""

    part: Annotated[
        str | None,
        typer.Option(
            metavar="K/N",
            help="Write only part K of N, counted from 1, as one job of an array; the last job to "
            "finish commits. All jobs need SRC and DST on a shared file system, and the same options.",
        ),
    ] = None
    commit: Annotated[
        bool | None,
        typer.Option(
            "--commit/--no-commit",
            help="Without --part: check that all parts are complete, and make DST appear. With --part: "
            "whether the last job to finish does so; default: yes.",
        ),
    ] = None
    engine: Annotated[
        Engine,
        typer.Option(
            help="threads: in this process. processes: --workers of them on this machine. ray: a "
            "Ray cluster (RAY_ADDRESS, or one on this machine), --workers CPUs for each part. "
            "Parts of lost workers are repeated."
        ),
    ] = "threads"
    parts: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of parts, each with its own files, for --engine processes and ray; default: "
            "as many as run at once.",
        ),
    ] = None
    bandwidth: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            help="For --dry-run --part: storage bandwidth of one machine each way; default: 1.25, "
            "which is 10 Gbit/s.",
        ),
    ] = None

    def request(self, *, dry_run: bool, resume: bool) -> PartRequest | None:
        """The request for a part; None for a conversion in one piece. Options that do not fit are usage errors."""
        part, commit, engine = self.part, self.commit, self.engine
        parts, bandwidth = self.parts, self.bandwidth
        if part is None:
            if commit is False:
                raise typer.BadParameter(
                    "--no-commit needs --part: a conversion without --part always commits"
                )
            if bandwidth is not None:
                raise typer.BadParameter("--bandwidth needs --dry-run --part K/N: only this estimate uses it")
        elif engine != "threads":
            raise typer.BadParameter(
                f"--part K/N runs one part in this process; --engine {engine} runs all parts: give only one of them"
            )
        if commit and engine != "threads":
            raise typer.BadParameter(
                f"--commit is for parts run with --part; --engine {engine} commits without it"
            )
        if parts is not None and engine == "threads":
            raise typer.BadParameter("--parts needs --engine processes or ray; for one part, use --part K/N")
        if part is None and not commit and engine == "threads":
            return None
        if bandwidth is not None and not (dry_run and bandwidth > 0):
            raise typer.BadParameter(f"expected --dry-run and a bandwidth above 0 GB/s, got {bandwidth}")
        if dry_run and part is None:
            raise typer.BadParameter(
                "--dry-run shows parts with --part K/N: expected --part K/N, or no --commit and --engine"
            )
        if part is None and resume:
            raise typer.BadParameter(
                f"{'--commit' if commit else f'--engine {engine}'} always continues from finished work: "
                "leave out --resume"
            )
        number, count = (None, parts) if part is None else _part(part)
        return PartRequest(number, count, commit is not False, engine, bandwidth, dry_run)


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if match and 1 <= int(match[1]) <= int(match[2]):
        return int(match[1]), int(match[2])
    raise typer.BadParameter(
        f"expected --part K/N with K from 1 to N, such as 3/16, got {text[:40]!r}"
        + ("; arrays that count from 0 need K+1" if text.startswith("0/") else "")
    )
