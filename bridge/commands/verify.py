"""`twinshard verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bridge.commands.grouping import grouped, print_left_alone
from bridge.commands.option_groups import grouped_options
from bridge.commands.options import SHOWN, ItemOptions, JsonOption, explained, user_errors
from bridge.commands.output import Console, byte_progress, failure, print_json, print_line, print_table
from bridge.core.text import counted, first_of, human_bytes

if TYPE_CHECKING:
    from bridge.checkpoints.verify.verify_report import VerifyReport


@grouped_options
def verify(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Checkpoint of any format.")],
    *,
    finite: Annotated[bool, typer.Option("--finite", help="Report NaNs and infinities as problems.")] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Threads; each takes 64 MiB of memory; default: one per core, at most 4."),
    ] = None,
    which: ItemOptions,
    json: JsonOption = False,
) -> None:
    """Read a whole checkpoint and check that it has not changed since it was written.

    The command checks the structure, the completeness of chunks, and the checksums of the format and of the manifest,
    if convert wrote one. The exit status is 1 when a problem is found, 2 when the checkpoint cannot be opened.

    \b
    Example:
      twinshard verify runs/jax/step_40
      twinshard verify runs/jax/step_40 --finite --json
    """
    from bridge.checkpoints.verify.verification import verify as run

    step = which.step_number()
    with user_errors(json=json), byte_progress(Console(stderr=True), "verify") as progress:
        report = run(path, finite=finite, workers=workers, progress=progress, items=which.items, step=step)
    out = Console()
    if json:
        _print_json(out, report)
    else:
        _print(out, report)
    raise typer.Exit(0 if report.good else 1 if report.opened else 2)


def _print_json(out: Console, report: VerifyReport) -> None:
    document = {"good": report.good, **vars(report)}
    error = document.pop("error")
    if error is not None:
        message = f"{report.path}: cannot be opened: {explained(error)}"
        print_line(Console(stderr=True), f"error: {message}")
        document["error"] = failure(error, message, 2)
    print_json(out, document)


def _print(out: Console, report: VerifyReport) -> None:
    for line in grouped((problem.where, problem.text) for problem in report.problems):
        print_line(out, line)
    if not report.opened:
        return
    if report.not_finite:
        rows = [(t.name, str(t.nan), str(t.infinite)) for t in report.not_finite[:SHOWN]]
        print_table(out, ("tensor", "NaN", "infinite"), rows)
        if len(report.not_finite) > SHOWN:
            print_line(out, f"... and {len(report.not_finite) - SHOWN} more tensors with NaNs or infinities")
    print_left_alone(out, report.left_alone)
    if report.unread:
        names = first_of(report.unread, SHOWN)
        print_line(
            out, f"{len(report.unread)} of the tensors cannot be read, so they were not checked: {names}"
        )
    if report.protected is None:
        checked = "read; it has no manifest, and it is unknown whether its format has checksums"
    elif report.protected == report.bytes:
        checked = "all of them protected by a checksum"
    else:
        checked = f"{human_bytes(report.protected)} of them protected by a checksum, the rest by none"
    manifest = "with its manifest" if report.manifest else "no manifest"
    print_line(
        out,
        f"{report.path}: {report.format}, {manifest}; {counted(report.tensors, 'tensor')} in "
        f"{counted(report.chunks, 'chunk')}, {counted(report.objects, 'object')}, "
        f"{human_bytes(report.bytes)}, {checked}; {report.seconds:.1f} s",
    )
    if report.certificate is not None:
        print_line(out, str(report.certificate))
    count, damaged = len(report.problems), len(report.damaged)
    others = ", the others are whole" if damaged < report.tensors else ""
    whole = f"; {damaged} of {report.tensors} tensors are damaged{others}" if damaged else ""
    print_line(out, f"{counted(count, 'problem')} found{whole}" if count else "no problem found")
