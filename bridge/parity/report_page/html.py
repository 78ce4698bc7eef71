"""A report as one HTML file that needs no network, and no script for anything but sorting and unfolding."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from bridge.parity.partners.rows import STAGES, Row
from bridge.parity.recorded.distance import FACTOR
from bridge.parity.report_page.charts import error_chart, histogram
from bridge.parity.report_page.depth import place_of
from bridge.parity.report_page.markup import (
    counted,
    exact,
    facts,
    index,
    number,
    several,
    shade,
    text,
    times,
    verdict,
)
from bridge.parity.report_page.report import ParityReport
from bridge.parity.report_page.style import SCRIPT, STYLE
from bridge.parity.report_page.tree import anchors, tree_html, tree_of

_TITLES = {
    "weights": "Weights",
    "forward": "Forward: outputs of modules",
    "precision": "Precision: what the compute dtype does to each side's modules",
    "loss": "Loss",
    "backward": "Backward: gradients of modules' outputs",
    "gradients": "Gradients of parameters",
    "update": "First update of the optimizers",
    "steps": "After all steps of training",
}
_WORDS = ("torch", "JAX", "kind", "shape", "verdict")
_NUMBERS = ("error", "floor", "ratio", "alone", "max ULP", "cosine")
_REST = ("largest at", "torch there", "JAX there", "layout", "note", "cause")
_LONG = 24
_MOST_OPEN = 200
"""Rows of a stage that differs, up to which its table is open at first."""


def write_html(report: ParityReport, path: Path) -> None:
    """Write ``report`` to ``path``, UTF-8. Names in it may be anybody's: all of them are escaped."""
    path.write_text(page(report), encoding="utf-8")


def page(report: ParityReport) -> str:
    """The whole document."""
    root = tree_of(report)
    linked = anchors(root)
    first = report.first_divergence
    sections = [
        ("first", "Where the two first part", _first(report, linked)),
        ("modules", "Modules", _tools() + _legend() + f'<div class="tree">{tree_html(root, first)}</div>'),
        ("depth", "Errors over depth", _charts(report, linked)),
        ("ratios", "Ratios", _histograms(report)),
        ("tables", "All rows", "".join(_table(report, stage) for stage in STAGES if report.stage(stage))),
        ("partners", "Without partner", _partners(report)),
        ("selftest", "Self-test", _revealed(report)),
    ]
    sections = [section for section in sections if section[2]]
    links = " ".join(f'<a href="#{key}">{title}</a>' for key, title, _ in sections)
    body = "".join(f'<section id="{key}"><h2>{title}</h2>{inner}</section>' for key, title, inner in sections)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    # Were a name not escaped, the policy would still keep a browser from running or loading it.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Parity: {'same' if report.same else 'different'}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{_heading(report)}<nav>{links}</nav>{body}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _heading(report: ParityReport) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    names = ("torch, float64", "JAX, float64", f"torch, {report.dtype}", f"JAX, {report.dtype}")
    losses = "; ".join(
        f"{name}: {exact(loss)}" for name, loss in zip(names, report.losses, strict=True) if loss is not None
    )
    verdict_class = "verdict same" if report.same else "verdict"
    sign = "✓ Same." if report.same else "▲ Different."
    said = filter(None, (*report.notes, report.order, report.conclusion()))
    return (
        f'<h1>PyTorch and JAX, module by module</h1><p class="{verdict_class}"><strong>{sign}</strong> '
        f'{text(report.summary())}</p><p class="soft">Compute dtype under test: {text(report.dtype)}. '
        f"Compared in {report.seconds:.1f} seconds."
        + (f" Versions: {text(versions)}." if versions else "")
        + (f" Losses: {text(losses)}." if losses else "")
        + "</p>"
        + "".join(f'<p class="soft">{text(note)}</p>' for note in said)
    )


def _first(report: ParityReport, linked: Mapping[int, str]) -> str:
    first = report.first_divergence
    if first is None:
        return f"<p>Nowhere: no difference is more than {FACTOR:g} times what rounding explains.</p>"
    also = "".join(
        f'<li>{verdict(row)} {row.stage}: <a href="#{linked[id(row)]}">{text(place_of(row))}</a></li>'
        for row in report.introduced[1:20]
    )
    more = len(report.introduced) - 20
    rest = f"<p>And {more} more.</p>" if more > 0 else ""
    others = (
        f"<details><summary>Further places where a difference begins</summary><ol>{also}</ol>{rest}</details>"
    )
    return (
        f'<div class="first-card"><h3><a href="#{linked[id(first)]}">{text(place_of(first))}</a>'
        f' <span class="soft">{text(first.kind)}</span></h3>'
        f"{facts(first, None if ', ' in first.name else first.name)}</div>{others if also else ''}"
    )


def _tools() -> str:
    return (
        '<p class="tools"><label><input type="checkbox" id="only"> only what is beyond rounding</label> '
        '<button id="unfold" type="button">unfold all</button> '
        '<button id="fold" type="button">fold all</button></p>'
    )


def _legend() -> str:
    marks = (
        ("c0", "up to 1x: rounding"),
        (shade(FACTOR), f"up to {FACTOR:g}x"),
        (shade(1.1 * FACTOR), f"above {FACTOR:g}x: counts as a difference"),
        (shade(100.0), "100x"),
        (shade(math.inf), "1000x and more, inf, nan"),
    )
    scale = "".join(f'<span class="{style}">{label}</span>' for style, label in marks)
    return (
        f'<p class="legend">Ratio of error to floor: {scale}</p><p class="soft">Error: distance of the two float64 '
        "runs over the norm. Floor: what rounding to the compute dtype explains. Alone: the ratio when the module "
        "runs on torch's inputs, with torch's values of the modules inside. ✓ same, ○ inherited from another "
        "module, ▲ introduced by this one, ◆ differs (origin not asked).</p>"
    )


def _charts(report: ParityReport, linked: Mapping[int, str]) -> str:
    gradients = sorted(
        report.stage("gradients"),
        key=lambda row: math.inf if math.isnan(row.ratio) else row.ratio,
        reverse=True,
    )
    return (
        '<p class="soft">Relative error, logarithmic. Inner band: rounding explains it. Outer band: up to '
        f"{FACTOR:g} times the floor. ▲ introduced, ○ inherited, ◆ differs, ● same.</p>"
        + error_chart(
            report.stage("forward"), "Forward: error of modules' outputs, in the order of the calls", linked
        )
        + error_chart(report.stage("backward"), "Backward: error of modules' gradients, same order", linked)
        + error_chart(gradients, "Gradients of parameters, by ratio, the largest first", linked)
    )


def _histograms(report: ParityReport) -> str:
    drawn = "".join(histogram(report.stage(stage), stage) for stage in STAGES if report.stage(stage))
    return drawn and (
        '<p class="soft">Rows by ratio of error to floor, by decades: a bar is named by where it begins, "less" holds '
        "what lies below the first, 1e6 all above. Dashed: beyond "
        f"{FACTOR:g} a difference counts.</p>"
        f'<div class="histograms">{drawn}</div>'
    )


def _table(report: ParityReport, stage: str) -> str:
    rows = [row for row in report.rows if row.stage == stage]
    beyond = sum(row.counts for row in rows)
    heads = "".join(
        f'<th class="{"number" if name in (*_NUMBERS, *_REST[1:3]) else "word"}">{name}</th>'
        for name in (*_WORDS, *_NUMBERS, *_REST)
    )
    first = report.first_divergence
    body = "".join(_line(row, row is first) for row in rows)
    opened = " open" if beyond and len(rows) <= _MOST_OPEN else ""
    return (
        f"<details{opened}><summary>{_TITLES[stage]}: {counted(len(rows), 'row')}, {beyond} beyond rounding</summary>"
        f'<div class="scroll"><table class="rows"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
        "</details>"
    )


def _line(row: Row, first: bool) -> str:
    classes = " ".join(name for name, there in (("is-same", not row.counts), ("first", first)) if there)
    call = f" #{row.call}" if row.call else ""
    leaf = f" [{text(row.leaf)}]" if row.leaf else ""
    numbers = (
        number(row.error),
        number(row.floor),
        times(row.ratio),
        "" if math.isnan(row.local) else times(row.local),
        str(row.max_ulp),
        f"{row.cosine:.9g}",
    )
    cells = [
        f'<td class="w">{several(row.name or "(model)")}{call}{leaf}</td>',
        f'<td class="w">{several(row.partner or "(model)")}</td>',
        f"{_words(row.kind)}<td>{index(row.shape)}</td><td>{verdict(row)}</td>",
        *(
            f'<td class="r{" " + shade(row.ratio) if place == 2 else ""}">{cell}</td>'
            for place, cell in enumerate(numbers)
        ),
        f'<td>{index(row.where)}</td><td class="r">{exact(row.values[0])}</td>',
        f'<td class="r">{exact(row.values[1])}</td>',
        *(_words(said) for said in (row.layout, row.note, row.cause)),
    ]
    return f'<tr class="{classes}">{"".join(cells)}</tr>' if classes else f"<tr>{''.join(cells)}</tr>"


def _words(said: str) -> str:
    """A cell that breaks lines where what it says is long."""
    return f"<td{' class=w' if len(said) > _LONG else ''}>{text(said)}</td>"


def _partners(report: ParityReport) -> str:
    lists: Sequence[tuple[str, Sequence[str]]] = (
        ("Torch modules", report.torch_only),
        ("JAX modules", report.jax_only),
        ("Torch parameters", report.torch_parameters),
        ("JAX parameters", report.jax_parameters),
    )
    parts = []
    for title, names in lists:
        items = "".join(f"<li><code>{text(name or '(model)')}</code></li>" for name in names)
        opened = " open" if 0 < len(names) <= 40 else ""
        parts.append(
            f"<details{opened}><summary>{title} without partner: {len(names)}</summary><ul>{items}</ul></details>"
            if names
            else f"<p>{title} without partner: none.</p>"
        )
    return "".join(parts)


def _revealed(report: ParityReport) -> str:
    if not report.revealed:
        return ""
    shown = sum(one.shown for one in report.revealed)
    body = "".join(
        f"<tr><td>{text(one.fault)}</td><td>{text(one.module or '(model)')}</td>"
        f"<td>{'✓ shown' if one.shown else '▲ NOT shown'}</td>"
        f'<td class="r {shade(one.ratio)}">{times(one.ratio)}</td></tr>'
        for one in report.revealed
    )
    return (
        f"<p>Faults planted in the JAX side, one at a time: this batch showed {shown} of {len(report.revealed)}.</p>"
        '<div class="scroll"><table class="rows"><thead><tr><th>fault</th><th>module</th><th>shown</th>'
        f'<th class="number">ratio</th></tr></thead><tbody>{body}</tbody></table></div>'
    )
