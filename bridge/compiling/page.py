"""A plan as one HTML file that needs no network and runs no script: the answer, pictures, tables, notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.compiling import target_chart, target_report, target_time
from bridge.compiling.target_plan import TargetPlan, TargetRow
from bridge.compiling.target_time import Estimate, Roofline
from bridge.core.text import human_bytes
from bridge.planning.answers import report, search_report
from bridge.planning.answers.chart import chart
from bridge.planning.answers.comparison import Comparison
from bridge.planning.answers.search import Finding
from bridge.report_page.page import inline_svg, render

if TYPE_CHECKING:
    from markupsafe import Markup

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Headings and rows."""


@dataclass(frozen=True)
class Answer:
    """``good``: whether something fits; None if it is unknown."""

    text: str
    good: bool | None


@dataclass(frozen=True)
class Block:
    """A part of a section. The first ``left`` columns of ``table`` are words."""

    heading: str = ""
    text: str = ""
    chart: Markup | None = None
    table: Table | None = None
    left: int = 1
    code: str = ""


def comparison_page(comparison: Comparison, findings: Sequence[Finding] = ()) -> str:
    """The page of policies that are planned without compilation.

    ``findings``: of a search among changes of the policies.
    """
    first = comparison.plans[0]
    caption = "bytes at the peak of a step, and bytes that a device sends"
    headings, rows = report.overview(comparison)
    works = comparison.workloads
    work = works[0].of(first.model) if len(works) == 1 else f"{len(works)} workloads"
    numbers = [Block(table=(headings, rows), left=headings.index("devices"))]
    for plan in comparison.plans if len(comparison.plans) <= 2 else ():
        title = f"{plan.policy} on {plan.mesh.devices} devices, {plan.runtime}, by unit"
        numbers.append(Block(heading=title, table=report.by_unit(plan), left=2))
        numbers.append(Block(table=report.by_axis(plan), left=2))
        numbers.append(Block(table=report.by_term(plan)))
    return render(
        "plan.html",
        title=f"Plan: {first.model.name}",
        lead=f"{first.model.numel:,} parameters; {work} per device and step. Planned from shapes alone.",
        answers=list(_comparison_answers(comparison)),
        sections=[
            ("Memory and traffic", [Block(chart=inline_svg(chart(comparison), caption))]),
            ("Search", list(_search(findings, first.model.name))),
            ("Numbers", numbers),
        ],
        notes=report.notes(comparison),
    )


def targets_page(name: str, lead: str, plan: TargetPlan, roofline: Roofline) -> str:
    """The page of steps that were compiled for targets. ``lead``: a step in one line."""
    estimates = [roofline.estimate(row) for row in plan.rows]
    timed = [estimate for estimate in estimates if estimate.time and estimate.time.total]
    memory = inline_svg(
        target_chart.memory_figure(plan), "bytes of one device at the peak, by policy and target"
    )
    times = target_time.table(estimates, roofline.price is not None)
    return render(
        "plan.html",
        title=f"Plan: {name}",
        lead=lead,
        answers=[_target_answer(target.name, row, estimates) for target, row in plan.cheapest()],
        sections=[
            ("Memory", [Block(chart=memory)]),
            ("A step in time", [Block(chart=_timeline(estimate, roofline)) for estimate in timed]),
            (
                "Numbers",
                [
                    Block(table=target_report.table(plan), left=target_report.LEFT),
                    Block(table=times, left=target_time.LEFT),
                ],
            ),
        ],
        notes=[*target_report.notes(plan), *target_time.notes(roofline, estimates)],
    )


def _target_answer(target: str, row: TargetRow | None, estimates: Sequence[Estimate]) -> Answer:
    if row is None:
        return Answer(f"{target}: nothing fits.", False)
    return Answer(
        f"{target}: {row.task.policy.source} ({row.task.engine}) is the cheapest that fits, "
        f"{human_bytes(row.peak or 0)} at the peak{_time_in_words(row, estimates)}.",
        True,
    )


def _comparison_answers(comparison: Comparison) -> Iterator[Answer]:
    for choice in comparison.choices:
        where = comparison.where(choice)
        good = True if choice.policy is not None else None if choice.unknown else False
        more = comparison.in_runtimes if good is False else ""
        yield Answer(f"{where}: {choice.answer}{more}.", good)


def _search(findings: Sequence[Finding], model: str) -> Iterator[Block]:
    if findings:
        yield Block(table=search_report.answers(findings))
    for finding in findings:
        if finding.ways:
            policy = search_report.policy_file(finding, model) or ""
            headings, *rows = finding.table()
            yield Block(text=finding.summary(), table=(headings, rows), code=policy)
        else:
            yield Block(text=finding.summary())


def _time_in_words(row: TargetRow, estimates: Sequence[Estimate]) -> str:
    estimate = next((estimate for estimate in estimates if estimate.row is row), None)
    if estimate is None or estimate.time is None or not estimate.time.total:
        return ""
    time, rate = estimate.time, estimate.rate
    words = (
        f", about {1e3 * time.total:,.3g} ms per step, {time.exposed / time.total:.0%} of this waiting "
        "for transfers"
    )
    return words if rate is None else f"{words}, {rate.tokens_per_second:,.0f} tokens/s on all devices"


def _timeline(estimate: Estimate, roofline: Roofline) -> Markup:
    spans = roofline.timeline(estimate.row)
    return inline_svg(
        target_chart.timeline_figure(estimate, spans), f"a step of {target_chart.label(estimate.row)}"
    )
