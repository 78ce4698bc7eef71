"""The report that `convert` prints at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bridge.commands.grouping import grouped, print_left_alone
from bridge.commands.options import some
from bridge.commands.output import Console, print_json, print_line
from bridge.core.text import counted, human_bytes

if TYPE_CHECKING:
    from bridge.checkpoints.convert.conversion import ConvertReport
    from bridge.checkpoints.prove.proof import Proof

ASKED_FOR = 5
"""How many of the names left out on request are shown; a selection may leave out most of a checkpoint."""


def print_result(report: ConvertReport, json: bool, proof: Proof | None = None) -> None:
    """Print what was converted, the time it took, the remarks, and the proof, if there is one."""
    out = Console()
    if json:
        print_json(out, report if proof is None else {**vars(report), "proof": proof})
        return
    print_line(
        out,
        f"{report.source} ({report.source_format}) -> {report.destination} ({report.format}): "
        f"{counted(report.tensors, 'tensor')}, {counted(report.objects, 'object')}, "
        f"{written_in(report.bytes, report.resumed_bytes, report.seconds)}{names_of(report.conventions)}",
    )
    print_remarks(out, report)
    for line in () if proof is None else proof.summary().splitlines():
        print_line(out, f"proof: {line}")


def names_of(conventions: tuple[str, str] | None) -> str:
    """The conventions of source and destination, for the end of a result line; "" without a mapping."""
    return "" if conventions is None else f", names of {' -> '.join(conventions)}"


def written_in(nbytes: int, before: int, seconds: float) -> str:
    """Bytes and seconds, and the rate of the bytes that this run wrote, if it wrote any."""
    written = nbytes - before
    earlier = f", {human_bytes(before) if written else 'all'} of it before," if before else ""
    # The seconds of a commit, or of an attempt that found all bytes already written, give no rate.
    rate = f" ({human_bytes(int(written / max(seconds, 1e-9)))}/s)" if written else ""
    return f"{human_bytes(nbytes)}{earlier} in {seconds:.1f} s{rate}"


def print_remarks(out: Console, report: ConvertReport) -> None:
    """Print the other facts: files copied along, rounded tensors, dropped names."""
    for remark in report.remarks:
        print_line(out, f"note: {remark}")
    print_filled(out, report.filled)
    if report.companions:
        print_line(out, f"copied along: {some(report.companions)}")
    if report.kept:
        print_line(out, f"kept from the checkpoint that was replaced: {some(report.kept)}")
    is_folder = report.format == "safetensors" and not str(report.destination).endswith(".safetensors")
    of_transformers = report.conventions is not None and report.conventions[1] in ("hf", "torch")
    if is_folder and of_transformers and not (report.companions or report.kept):
        print_line(
            out,
            "note: no config.json went along, and from_pretrained needs it: copy it and the tokenizer files into the "
            "new folder",
        )
    for line in grouped(report.faults.items()):
        print_line(out, f"damaged in the source: {line}")
    print_left_alone(out, report.left_alone)
    for line in grouped(report.not_copied.items()):
        print_line(out, f"not copied: {line}")
    if not report.verified:
        print_line(
            out,
            "warning: not verified: damage in the source was copied into the new checkpoint, whose checksums confirm "
            "the damaged bytes",
        )
    if report.inexact:
        print_line(out, f"rounded, {len(report.inexact)}: {some(report.inexact)}")
    lost = "finite elements became infinite or NaN by the cast"
    for line in grouped((name, f"{count} {lost}") for name, count in report.overflowed.items()):
        print_line(out, f"warning: {line}")
    if report.dropped:
        print_line(out, f"dropped {len(report.dropped)}: {some(report.dropped, ASKED_FOR)}")


def print_filled(out: Console, filled: Mapping[str, str]) -> None:
    """Say which leaves of a template the source lacks, and what is in them."""
    for line in grouped(filled.items()):
        print_line(out, f"not in the source: {line}")
