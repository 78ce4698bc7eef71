"""The findings of a search as rows of text, as JSON values, and as a policy file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge.planning.answers.search import FewestDevices, Finding, Nearest
from bridge.planning.models.errors import PlanError

Row = tuple[str, ...]


def answers(findings: Sequence[Finding]) -> tuple[Row, list[Row]]:
    """Headings, and a row for each policy, number of devices, workload and runtime."""
    several = len({finding.workload for finding in findings}) > 1
    rows = []
    for finding in findings:
        for batch, fewest in zip(finding.batches, finding.fewest, strict=True):
            row: Row = (finding.policy.source, str(finding.devices), batch.runtime)
            if several:
                row += (str(finding.workload.microbatches), str(finding.workload.length))
            rows.append((*row, str(batch), str(fewest)))
    work = ("microbatches", "length") if several else ()
    return ("policy", "devices", "runtime", *work, "largest batch", "fewest devices"), rows


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
        raise PlanError(f"--save: {findings[0].summary()}")
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
