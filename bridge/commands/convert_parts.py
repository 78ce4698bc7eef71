"""`twinshard convert` with `--part`, `--commit` or `--engine`: conversions in parts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bridge.checkpoints.convert.conversion import ConvertReport
from bridge.checkpoints.convert.plan import ConvertOptions, planned
from bridge.checkpoints.ground.workers import default_workers
from bridge.checkpoints.jobs.array_jobs import PartReport, commit_parts, convert_part
from bridge.checkpoints.jobs.pieces import BANDWIDTH, PartEstimate, PartPlan, estimate_parts, make_part_plan
from bridge.commands.convert_options import RunOptions
from bridge.commands.convert_report import print_remarks, print_result, written_in
from bridge.commands.options import user_errors
from bridge.commands.output import Console, byte_progress, print_json, print_line, print_table
from bridge.commands.part_options import PartRequest
from bridge.commands.stopping import leaving
from bridge.core.formats.tensors.boxes import Progress
from bridge.core.formats.whole.step_paths import Step, at_step
from bridge.core.text import human_bytes

_PIECES_SHOWN = 20


def convert_in_parts(
    request: PartRequest,
    src: str,
    step: Step | None,
    dst: str,
    options: ConvertOptions,
    run: RunOptions,
    json: bool,
) -> None:
    """Run the request, and print the result."""
    with user_errors(json=json):
        src = str(at_step(src, step))
    if request.dry_run:
        with user_errors(json=json):
            _print_estimate(request, src, options, run.workers or default_workers(), json)
    elif request.part is not None and request.count is not None:
        with (
            leaving(lambda: _left(run.resume)),
            user_errors(json=json),
            byte_progress(Console(stderr=True), "convert") as progress,
        ):
            part = convert_part(
                src,
                dst,
                options,
                request.part,
                request.count,
                commit=request.commit,
                replace=run.replace,
                resume=run.resume,
                workers=run.workers,
                progress=progress,
            )
        _print_part(part, json)
    elif request.engine == "threads":
        with leaving(lambda: _left(run.resume)), user_errors(json=json):
            report = commit_parts(src, dst, options, replace=run.replace)
        print_result(report, json)
    else:
        with (
            leaving(lambda: _left(resume=True)),
            user_errors(json=json),
            byte_progress(Console(stderr=True), "convert") as progress,
        ):
            report = _on_engine(request, src, dst, options, run, progress)
        print_result(report, json)


def _left(resume: bool) -> str:
    """The state after a conversion in parts was stopped."""
    own = "so does this part's finished work, for the same command" if resume else "this part leaves nothing"
    return f"complete parts stay; {own}"


def _on_engine(
    request: PartRequest, src: str, dst: str, options: ConvertOptions, run: RunOptions, progress: Progress
) -> ConvertReport:
    from bridge.checkpoints.jobs.cluster import Cluster, convert_on

    workers = run.workers or default_workers()
    cluster: Cluster[Any]
    if request.engine == "processes":
        from bridge.checkpoints.jobs.processes import Processes

        cluster, workers = Processes(workers), 1
    else:
        from bridge.checkpoints.jobs.ray_cluster import RayCluster

        cluster = RayCluster(workers)
    parts = request.count or cluster.slots
    return convert_on(
        cluster, src, dst, options, parts=parts, replace=run.replace, workers=workers, progress=progress
    )


def _print_part(report: PartReport, json: bool) -> None:
    out = Console()
    if json:
        print_json(out, report)
        return
    if report.found:
        print_line(out, f"part {report.part} of {report.parts} was complete already")
    else:
        print_line(
            out,
            f"part {report.part} of {report.parts}: {report.pieces} pieces, "
            f"{written_in(report.bytes, report.resumed_bytes, report.seconds)}",
        )
    for name, count in () if report.whole is not None else report.overflowed.items():
        print_line(out, f"warning: {name}: {count} finite elements became infinite or NaN by the cast")
    if report.committed:
        print_line(out, f"{report.destination} is complete")
        if report.whole is not None:
            print_remarks(out, report.whole)
    elif report.missing:
        print_line(out, f"{len(report.missing)} of {report.parts} parts are missing for {report.destination}")
    else:
        print_line(out, f"all {report.parts} parts are complete: --commit makes {report.destination} appear")


def _print_estimate(
    request: PartRequest, src: str, options: ConvertOptions, workers: int, json: bool
) -> None:
    out = Console()
    assert request.part is not None
    assert request.count is not None
    with planned(src, options) as (conversion, _):
        plan = make_part_plan(conversion.format, conversion.outputs, request.count)
        bandwidth = request.bandwidth or BANDWIDTH
        parts = estimate_parts(plan, conversion.outputs, workers=workers, bandwidth=bandwidth)
        if json:
            pieces = plan.parts[request.part - 1]
            print_json(out, {"part": parts[request.part - 1], "pieces": pieces, "parts": parts})
            return
        _print_pieces(out, plan, request.part)
        _print_parts(out, parts, request.part)
        slowest = max(parts, key=lambda part: part.seconds)
        busy = statistics.fmean(part.seconds for part in parts)
        print_line(
            out,
            f"{conversion.source} ({conversion.source_format}) -> {conversion.format}: "
            f"{human_bytes(sum(plan.sizes))} in {request.count} parts, one machine each, {workers} workers, "
            f"{bandwidth:g} GB/s of storage each way: about {slowest.seconds:.0f} s, "
            f"limited by {slowest.limit}; the slowest part takes {slowest.seconds / max(busy, 1e-9):.2f} times the "
            f"mean; all machines together read and write {sum(p.rate for p in parts) / 1e9:.1f} GB/s",
        )


def _print_pieces(out: Console, plan: PartPlan, part: int) -> None:
    pieces = plan.parts[part - 1]
    rows = [(p.tensor, f"{p.first}:{p.stop}", human_bytes(p.bytes)) for p in pieces[:_PIECES_SHOWN]]
    print_table(out, (f"part {part}", "chunks", "size"), rows, left=1)
    if len(pieces) > _PIECES_SHOWN:
        print_line(out, f"and {len(pieces) - _PIECES_SHOWN} more pieces")


def _print_parts(out: Console, parts: Sequence[PartEstimate], chosen: int) -> None:
    shown = {chosen, *range(1, 17)} if len(parts) > 16 else range(1, len(parts) + 1)
    rows = [
        {
            "part": str(e.part),
            "limit": e.limit,
            "rate": f"{human_bytes(int(e.rate))}/s",
            "writes": human_bytes(e.bytes),
            "reads": human_bytes(e.read_bytes),
            "memory": human_bytes(e.memory),
            "cache": human_bytes(e.cache),
            "rearranged": human_bytes(e.rearranged_bytes),
            "cores s": f"{e.cpu_seconds:.0f}",
            "storage s": f"{e.transfer_seconds:.0f}",
            "pieces": str(e.pieces),
        }
        for e in parts
        if e.part in shown
    ]
    print_table(out, [*rows[0]], [[*row.values()] for row in rows], left=2)
    if len(parts) > len(rows):
        print_line(out, f"and {len(parts) - len(rows)} more parts")
