"""The answers of targets' compilers, as rows of text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bridge.compiling.machines.compilers import RECOMMENDED
from bridge.compiling.target_plan import GATHERS, REDUCTIONS, TargetPlan, TargetRow
from bridge.core.text import human_bytes
from bridge.planning.models.model import Model

Row = tuple[str, ...]
HEADINGS = (
    *("fits", "policy", "target", "engine", "devices", "peak", "of"),
    *("gathers", "during products", "reductions", "during products"),
    *("weights", "moments", "gradients", "temporary", "compile s"),
)
LEFT = 4
"""The number of columns with words, which are aligned left."""
MANY_LAYERS = 8
"""The number of unscanned layers in a row above which ``--stacked`` is recommended."""
FEW = 0.1
"""The share of gathered bytes during products below which a note about the schedule appears."""
_ANSWERS = {True: "yes", False: "no", None: "failed"}


def table(plan: TargetPlan) -> tuple[Row, list[Row]]:
    """Headings, and a row for each policy, target and engine; with a column for CPU memory if it is used."""
    rows = [_row(row) for row in plan.rows]
    if not any(row.host for row in plan.rows):
        return HEADINGS, rows
    column = HEADINGS.index("of")
    hosts = [human_bytes(row.host) if row.found else "" for row in plan.rows]
    return (
        (*HEADINGS[:column], "in CPU memory", *HEADINGS[column:]),
        [(*row[:column], host, *row[column:]) for row, host in zip(rows, hosts, strict=True)],
    )


def _row(row: TargetRow) -> Row:
    task = row.task
    first = (_ANSWERS[row.fits], task.policy.source, task.target.name, task.engine, str(task.target.devices))
    held: Row = ("",) * 4
    peak = "" if row.found is None else f"{'> ' * row.exhausted}{human_bytes(row.peak or 0)}"
    if row.found is not None:
        held = tuple(human_bytes(row.held[kind]) for kind in ("weights", "moments", "gradients"))
        held += ("" if row.exhausted else human_bytes(row.temporary or 0),)
    known = row.sent is not None
    sent = [cell for kinds in (GATHERS, REDUCTIONS) for cell in _transfers(row, kinds, known)]
    seconds = "" if row.found is None else f"{row.found['seconds']:.1f}{' (cached)' * row.found['cached']}"
    return (*first, peak, human_bytes(row.memory), *sent, *held, seconds)


def _transfers(row: TargetRow, kinds: tuple[str, ...], known: bool) -> tuple[str, str]:
    if not known:
        return "", ""
    times, nbytes, share = row.collectives(kinds)
    return f"{times}, {human_bytes(nbytes)}", f"{share:.0%}" if nbytes else ""


def notes(plan: TargetPlan) -> Iterator[str]:
    """Lines under the table: refusals, warnings and failures, and the cheapest row that fits."""
    yield from (f"left out: {reason}" for reason in plan.refused)
    # Notes that several rows share are printed once.
    said: dict[str, list[str]] = {}
    for row in plan.rows:
        for text in _of_row(row):
            said.setdefault(text, []).append(str(row.task))
    yield from (f"{'; '.join(tasks)}: {text}" for text, tasks in said.items())
    told = dict.fromkeys(text for row in plan.rows for text in (row.found or {}).get("warnings", []))
    yield from (f"warning: {text}" for text in told)
    for target, cheapest in plan.cheapest():
        if cheapest is None:
            yield f"{target.name}: nothing fits with {plan.reserve:.0%} of the memory kept in reserve"
        else:
            sent = "an unknown number of bytes" if cheapest.sent is None else human_bytes(cheapest.sent)
            yield (
                f"{target.name}: {cheapest.task.policy.source} ({cheapest.task.engine}) is the cheapest that fits, "
                f"{sent} sent in a step"
            )


def _of_row(row: TargetRow) -> Iterator[str]:
    if row.failed:
        yield f"failed: {row.failed}"
    if row.exhausted:
        yield "the compiler refused the program because it does not fit the device"
    if row.unread:
        yield f"its collectives are unknown, because the compiled text cannot be read: {row.unread}"
    if row.task.target.platform == "gpu" and not row.task.recommended and _runs_alone(row):
        yield (
            "XLA overlaps no transfers with computation on this card unless its scheduler is told to: "
            f"XLA_FLAGS={' '.join(f'--{name}={str(value).lower()}' for name, value in RECOMMENDED.items())!r}; "
            "--xla recommended compiles with these"
        )


def _runs_alone(row: TargetRow) -> bool:
    _, nbytes, share = row.collectives(GATHERS)
    return nbytes > 0 and share < FEW


def unrolled_layers(model: Model) -> tuple[str, int] | None:
    """The module with the most layers that are not scanned, and their number, if there are many."""
    numbers: dict[str, set[str]] = {}
    for path in model.modules:
        layer = re.fullmatch(r"(.*?)[._](\d+)", path)
        if layer and not any(path.startswith(f"{stack}.") for stack in model.stacks):
            numbers.setdefault(layer[1], set()).add(layer[2])
    longest = max(numbers, key=lambda name: len(numbers[name]), default="")
    return (longest, len(numbers[longest])) if longest and len(numbers[longest]) > MANY_LAYERS else None
