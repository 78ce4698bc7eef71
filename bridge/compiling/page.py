"""A plan as one HTML file that needs no network and runs no script: the answer, pictures, tables.

::

    heading     model, workload
    answer      what fits and is cheapest, in words
    pictures    bytes at the peak; a step's timeline, for each target
    tables      those of the command
    notes       what the numbers are, and are not
"""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib as mpl

from bridge.compiling import target_chart, target_report, target_time
from bridge.compiling.target_plan import TargetPlan, TargetRow
from bridge.compiling.target_time import Estimate, Roofline
from bridge.core.text import human_bytes, printable
from bridge.planning.answers import report, search_report
from bridge.planning.answers.chart import chart
from bridge.planning.answers.comparison import Comparison
from bridge.planning.answers.search import Finding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Table = tuple[Sequence[str], Sequence[Sequence[str]]]

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f6f7f9;--ink:#1b1f24;--soft:#59636e;--rule:#d4dae1}
@media(prefers-color-scheme:dark){:root{--paper:#14171b;--card:#1b1e23;--ink:#e6e9ed;--soft:#a3adb8;--rule:#3a424c}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1200px;margin:0 auto;padding:12px 16px 60px}
h1{font-size:1.5rem;margin:.4em 0}h2{font-size:1.2rem;margin:1.8em 0 .5em}
h1,p,li{overflow-wrap:anywhere}
.soft,figcaption{color:var(--soft)}
.answer{font-size:1.15rem;border-left:6px solid #0072B2;background:var(--card);padding:.6em .9em;margin:.5em 0}
.answer.none{border-color:#D55E00}
pre{overflow-x:auto;background:var(--card);padding:.6em .9em}
.scroll{overflow-x:auto;max-width:100%;margin:.8em 0}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{border:1px solid var(--rule);padding:.15em .5em;text-align:right;white-space:nowrap}
th.word,td.word{text-align:left}th{background:var(--card)}
figure{margin:1em 0;background:#fff;border:1px solid var(--rule);border-radius:6px;overflow-x:auto}
figure svg{display:block;width:100%;min-width:720px;height:auto}
"""


@dataclass(frozen=True)
class Answer:
    """``good``: whether something fits; None where nothing was asked."""

    text: str
    good: bool | None = None


def comparison_page(comparison: Comparison, findings: Sequence[Finding] = ()) -> str:
    """The page of policies that are planned without compiling. ``findings``: of a search among changes of them."""
    first = comparison.plans[0]
    lead = f"{first.model.numel:,} parameters; {_workloads(comparison)} a device and step. Planned from shapes alone."
    figure = _figure(chart(comparison), "bytes at the peak of a step, and bytes that a device sends")
    tables = [_table(report.overview(comparison), 3)]
    if len(comparison.plans) <= 2:
        for plan in comparison.plans:
            tables.append(
                f"<h3>{_text(plan.policy)} on {plan.mesh.devices} devices, {plan.runtime}, by unit</h3>"
            )
            tables += [
                _table(report.by_unit(plan), 2),
                _table(report.by_axis(plan), 2),
                _table(report.by_term(plan), 1),
            ]
    sections = [
        ("Memory and traffic", figure),
        ("Search", _search(findings, first.model.name)),
        ("Numbers", "".join(tables)),
    ]
    return _page(
        f"Plan: {first.model.name}",
        lead,
        list(_comparison_answers(comparison)),
        sections,
        report.notes(comparison),
    )


def targets_page(name: str, lead: str, plan: TargetPlan, roofline: Roofline) -> str:
    """The page of steps that were compiled for targets. ``lead``: what a step is, in a line."""
    estimates = [roofline.estimate(row) for row in plan.rows]
    timelines = "".join(_timeline(one, roofline) for one in estimates if one.time and one.time.total)
    sections = [
        (
            "Memory",
            _figure(
                target_chart.memory_figure(plan), "bytes of one device at the peak, by policy and target"
            ),
        ),
        ("A step in time", timelines),
        (
            "Numbers",
            _table(target_report.table(plan), target_report.LEFT)
            + _table(target_time.table(estimates, roofline.price is not None), target_report.LEFT),
        ),
    ]
    answers = [
        Answer(
            f"{target.name}: nothing fits."
            if row is None
            else f"{target.name}: {row.task.policy.source} ({row.task.engine}) is the cheapest that fits, "
            f"{human_bytes(row.peak or 0)} at the peak{_time_in_words(row, estimates)}.",
            row is not None,
        )
        for target, row in plan.cheapest()
    ]
    notes = [*target_report.notes(plan), *target_time.notes(roofline, estimates)]
    return _page(f"Plan: {name}", lead, answers, sections, notes)


def _comparison_answers(comparison: Comparison) -> Iterator[Answer]:
    several = len(comparison.workloads) > 1
    for choice in comparison.choices:
        where = f"{choice.devices} devices" + (f", {choice.workload}" if several else "")
        if choice.policy is not None:
            yield Answer(f"{where}: {choice.policy} is the cheapest that fits.", True)
        elif choice.unknown:
            yield Answer(f"{where}: unknown whether {', '.join(choice.unknown)} fit.", False)
        else:
            yield Answer(f"{where}: no policy fits{comparison.in_runtimes}.", False)


def _search(findings: Sequence[Finding], model: str) -> str:
    if not findings:
        return ""
    parts = [_table(search_report.answers(findings), 1)]
    for finding in findings:
        parts.append(f"<p>{_text(search_report.heading(finding))}</p>")
        if finding.ways:
            parts.append(_table(search_report.ways_table(finding), 1))
            parts.append(f"<pre>{_text(search_report.policy_file(finding, model) or '')}</pre>")
    return "".join(parts)


def _workloads(comparison: Comparison) -> str:
    works = comparison.workloads
    return str(works[0]) if len(works) == 1 else f"{len(works)} workloads"


def _time_in_words(row: TargetRow, estimates: Sequence[Estimate]) -> str:
    found = next((one for one in estimates if one.row is row), None)
    if found is None or found.time is None or not found.time.total:
        return ""
    time = found.time
    said = f", about {1e3 * time.total:,.3g} ms a step, {time.exposed / time.total:.0%} of them waiting for transfers"
    return (
        said if found.rate is None else f"{said}, {found.rate.tokens_per_second:,.0f} tokens/s on all devices"
    )


def _timeline(estimate: Estimate, roofline: Roofline) -> str:
    spans = roofline.timeline(estimate.row)
    return _figure(
        target_chart.timeline_figure(estimate, spans), f"a step of {target_chart.label(estimate.row)}"
    )


def _figure(figure: Figure, caption: str) -> str:
    written = io.StringIO()
    # Letters as shapes: a browser's own font would be wider than the place that the picture leaves for a label.
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": caption}):
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{_text(caption)}"', 1)
    return f"<figure>{svg}</figure>"


def _table(table: Table, left: int) -> str:
    headings, rows = table

    def line(cells: Iterable[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=word' if place < left else ''}>{_text(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{line(headings, 'th')}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _page(
    title: str,
    lead: str,
    answers: Sequence[Answer],
    sections: Sequence[tuple[str, str]],
    notes: Sequence[str],
) -> str:
    said = "".join(
        f'<p class="answer{" none" if answer.good is False else ""}">{_text(answer.text)}</p>'
        for answer in answers
    )
    body = "".join(f"<section><h2>{name}</h2>{inner}</section>" for name, inner in sections if inner)
    listed = "".join(f"<li>{_text(note)}</li>" for note in notes)
    # Were a name not escaped, the policy would still keep a browser from running or loading it.
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n"
        f'<body><main><h1>{_text(title)}</h1><p class="soft">{_text(lead)}</p>{said}{body}'
        f"<section><h2>Notes</h2><ul>{listed}</ul></section></main></body></html>\n"
    )


def _text(value: str) -> str:
    """As text that cannot become a tag or an attribute."""
    return html.escape(printable(value, lines=True), quote=True)
