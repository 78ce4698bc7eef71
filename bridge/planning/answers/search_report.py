"""The findings of a search as rows of text, as JSON values, and as a policy file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge.core.text import human_bytes
from bridge.planning.answers.search import MOST_DEVICES, FewestDevices, Finding, LargestBatch, Nearest
from bridge.planning.models.errors import PlanError

Row = tuple[str, ...]
SHOWN = 5
"""Rows shown for policies that fit."""


def answers(findings: Sequence[Finding]) -> tuple[Row, list[Row]]:
    """Headings, and a row for each policy, number of devices, workload and runtime."""
    several = len({finding.workload for finding in findings}) > 1
    rows = []
    for finding in findings:
        for batch, fewest in zip(finding.batches, finding.fewest, strict=True):
            row: Row = (finding.policy.source, str(finding.devices), batch.runtime)
            if several:
                row += (str(finding.workload.microbatches), str(finding.workload.length))
            rows.append((*row, _batch(batch), _devices(fewest)))
    work = ("microbatches", "length") if several else ()
    return ("policy", "devices", "runtime", *work, "largest batch", "fewest devices"), rows


def _batch(largest: LargestBatch) -> str:
    if largest.batch is None:
        return "unknown"
    return f"{largest.batch} or more" if largest.batch else "none"


def _devices(fewest: FewestDevices) -> str:
    if fewest.devices is not None:
        return f"{fewest.devices}" + ("" if fewest.not_below is None else f", perhaps {fewest.not_below}")
    return f"> {MOST_DEVICES:,}" if fewest.not_below is None else f"unknown, >= {fewest.not_below}"


def heading(finding: Finding) -> str:
    """One sentence: whether the policy fits, and if not, which changes make it fit."""
    where = f"{finding.policy.source} on {finding.devices} devices, {finding.work}"
    if finding.fits:
        return f"{where}: fits without changes"
    if finding.ways:
        count = len(finding.ways[0].changes)
        changes = "1 change" if count == 1 else f"{count} changes"
        fitting = "one policy does" if len(finding.ways) == 1 else f"{len(finding.ways)} policies do"
        shown = f", of which {SHOWN} are shown" if len(finding.ways) > SHOWN else ""
        start = "does not fit" if finding.fits is False else "is not known to fit"
        return f"{where}: {start}; with {changes} {fitting}{shown}, fewest bytes sent first"
    nearest = finding.nearest
    if nearest is None:
        return f"{where}: does not fit, and there is nothing to change"
    lowest = f"{human_bytes(nearest.peak)} with {', '.join(nearest.changes)}"
    if nearest.bound == "lower" and not nearest.above:
        return (
            f"{where}: unknown, because the peak is incomplete; the fewest bytes at rest are {lowest}: run a step "
            "and measure, or compile it with --target"
        )
    needed = ", ".join(f"{fewest.runtime} {_devices(fewest)}" for fewest in nearest.fewest)
    fits = (
        "fits; the fewest bytes at rest are"
        if nearest.bound == "lower"
        else "is known to fit; the lowest peak is"
    )
    return f"{where}: no set of changes {fits} {lowest}; sufficient numbers of devices: {needed}"


def ways_table(finding: Finding) -> tuple[Row, list[Row]]:
    """Headings, and a row for each of the first policies that fit."""
    runtimes = [batch.runtime for batch in finding.batches]
    rows: list[Row] = [
        (
            ", ".join(way.changes),
            human_bytes(way.peak),
            human_bytes(way.sent),
            *(_batch(batch) for batch in way.batches),
        )
        for way in finding.ways[:SHOWN]
    ]
    return ("changes", "peak", "sent", *(f"largest batch, {runtime}" for runtime in runtimes)), rows


def policy_file(finding: Finding, model: str) -> str | None:
    """The content of a policy file that fits: the given policy, or the first of the ways; None if nothing fits."""
    where = f"{model} on {finding.devices} devices, {finding.workload} per device and step"
    if finding.fits:
        return f"# {finding.policy.source}: {where}\n{finding.policy.to_toml()}"
    if not finding.ways:
        return None
    way = finding.ways[0]
    made = f"# {finding.policy.source} with {', '.join(way.changes)}: found by twinshard plan --search"
    return f"{made}\n# {where}\n{way.policy.to_toml()}"


def only_file(findings: Sequence[Finding], model: str) -> str:
    """The one policy file to save. Raises ``PlanError`` for several searches, or if the search found no policy."""
    if len(findings) != 1:
        raise PlanError(
            "--save: expected one policy, one number of devices and one workload, got "
            f"{len(findings)} searches; run the command once for each"
        )
    text = policy_file(findings[0], model)
    if text is None:
        raise PlanError(f"--save: {heading(findings[0])}")
    return text


def as_json(findings: Sequence[Finding], model: str) -> list[dict[str, Any]]:
    """See ``document``."""
    return [
        {
            "policy": finding.policy.source,
            "devices": finding.devices,
            "workload": vars(finding.workload),
            "fits": finding.fits,
            "largest_batch": {batch.runtime: batch.batch for batch in finding.batches},
            "more_may_fit": {batch.runtime: bool(batch.batch) for batch in finding.batches},
            "fewest_devices": _fewest(finding.fewest),
            "ways": [
                {
                    "changes": way.changes,
                    "peak": way.peak,
                    "wire_bytes": way.sent,
                    "all_counted": way.all_counted,
                    "largest_batch": {batch.runtime: batch.batch for batch in way.batches},
                    "policy": way.policy.to_toml(),
                }
                for way in finding.ways
            ],
            "nearest": finding.nearest and _nearest(finding.nearest),
            "file": policy_file(finding, model),
        }
        for finding in findings
    ]


def _fewest(fewest: Sequence[FewestDevices]) -> dict[str, dict[str, int | None]]:
    return {answer.runtime: {"devices": answer.devices, "not_below": answer.not_below} for answer in fewest}


def _nearest(nearest: Nearest) -> dict[str, Any]:
    return {
        "changes": nearest.changes,
        "peak": nearest.peak,
        "lower_bound": nearest.bound == "lower",
        "upper_bound": nearest.bound == "upper",
        "policy": nearest.policy.to_toml(),
        "fewest_devices": _fewest(nearest.fewest),
    }
