"""A report as one HTML file, with the findings in the tree of the torch model's module paths.

``bridge/report_page/templates/parity.html`` has the markup.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bridge.core.extras import why_no_pictures
from bridge.core.text import counted
from bridge.parity.partners.rows import STAGES, Row
from bridge.parity.recorded.distance import FACTOR
from bridge.parity.report_page.depth import MODULE_STAGES, place_of, shown, worst
from bridge.parity.report_page.markup import alone, exact, facts_of, index, number, shade, times
from bridge.parity.report_page.picture import MOST_NUMBERED, depth_figure, tips_of
from bridge.parity.report_page.report import ParityReport
from bridge.report_page.page import inline_svg, render

_LOWEST, _HIGHEST = -3, 6
"""Decades of ratios."""
_BINS = ("0", "less", *(f"1e{power}" for power in range(_LOWEST, _HIGHEST + 1)), "inf", "nan")


def write_html(report: ParityReport, path: Path) -> None:
    """Write ``report`` to ``path`` in UTF-8. All names are escaped, since anybody may have chosen them."""
    path.write_text(page(report), encoding="utf-8")


def page(report: ParityReport) -> str:
    """The whole document."""
    root = tree_of(report)
    linked = anchors(root)
    stages = [(stage, rows) for stage in STAGES if (rows := report.stage(stage))]
    names = ("torch, float64", "JAX, float64", f"torch, {report.dtype}", f"JAX, {report.dtype}")
    losses = zip(names, report.losses, strict=True)
    return render(
        "parity.html",
        title=f"Parity: {'same' if report.same else 'different'}",
        report=report,
        first=report.first_divergence,
        root=root,
        stages=stages,
        losses=[(name, loss) for name, loss in losses if loss is not None],
        remarks=list(filter(None, (*report.notes, report.order, report.conclusion()))),
        charts=list(_charts(report)),
        bins=_BINS,
        factor=f"{FACTOR:g}",
        most_numbered=MOST_NUMBERED,
        anchor_of=lambda row: linked[id(row)],
        **{f.__name__: f for f in (alone, counted, exact, facts_of, index, number, shade, times)},
        **{f.__name__: f for f in (histogram, place_of, shown)},
    )


def _charts(report: ParityReport) -> Iterator[tuple[str, Sequence[Row], str]]:
    """Titles, rows from left to right, and their charts; without matplotlib why there are none."""
    missing = why_no_pictures()
    by_ratio = sorted(
        report.stage("gradients"),
        key=lambda row: math.inf if math.isnan(row.ratio) else row.ratio,
        reverse=True,
    )
    for title, rows in (
        ("Forward: error of modules' outputs, in the order of the calls", report.stage("forward")),
        ("Backward: error of modules' gradients, same order", report.stage("backward")),
        ("Gradients of parameters, by ratio, the largest first", by_ratio),
    ):
        if missing or not rows:
            yield title, rows, missing or ""
        else:
            yield title, rows, inline_svg(depth_figure(rows), title, tips_of(rows))


def histogram(rows: Sequence[Row]) -> list[list[int]]:
    """For each bin of ratios, the number of rows that are the same and the number beyond rounding."""
    counts = [[0, 0] for _ in _BINS]
    for row in rows:
        counts[_bin(row.ratio)][row.counts] += 1
    return counts


def _bin(ratio: float) -> int:
    if math.isnan(ratio):
        return _BINS.index("nan")
    if ratio == math.inf:
        return _BINS.index("inf")
    if ratio <= 0:
        return 0
    return 1 + min(max(math.floor(math.log10(ratio)) - _LOWEST + 1, 0), _HIGHEST - _LOWEST + 1)


_MOST_DEPTH = 40
"""Browsers flatten elements that are nested deeper than some hundred levels."""
_MOST_OPEN = 24
"""The path from the root is open at first for this many places."""


@dataclass
class Node:
    """A module path. ``modules``: rows of its calls; ``parameters``: rows of its own parameters, or of those below."""

    path: str
    label: str
    children: dict[str, Node] = field(default_factory=dict)
    modules: list[Row] = field(default_factory=list)
    parameters: list[Row] = field(default_factory=list)
    partnerless: bool = False
    anchor: str = ""
    open: bool = False
    introduced: int = 0
    beyond: int = 0

    @property
    def rows(self) -> list[Row]:
        return [*self.modules, *self.parameters]

    @property
    def beyond_inside(self) -> int:
        """Rows beyond rounding in the modules inside."""
        return sum(child.beyond for child in self.children.values())

    @property
    def introduced_inside(self) -> int:
        """Places inside where a difference begins."""
        return sum(child.introduced for child in self.children.values())

    @property
    def style(self) -> str:
        """A class of the page: a difference begins here, or no difference is here or inside."""
        if not self.beyond:
            return "quiet"
        return "begin" if any(row.verdict == "introduced" for row in self.rows) else "plain"

    @property
    def worst_output(self) -> Row | None:
        """The module's own row with the largest ratio, from forward rows if there are any."""
        return worst(row for row in self.modules if row.stage == "forward") or worst(self.modules)

    @property
    def kind(self) -> str:
        """The module's class, "" if it is unknown."""
        return next((row.kind for row in self.modules if row.kind), "")

    @property
    def partner(self) -> str:
        """The path of the JAX module, "" if there is none."""
        return next((row.partner or "(model)" for row in self.modules), "")

    def chips(self) -> Iterator[tuple[Row, str]]:
        """The most important row of forward, backward and parameters, each with its words."""
        for rows in (
            [row for row in self.modules if row.stage == "forward"],
            [row for row in self.modules if row.stage == "backward"],
            self.parameters,
        ):
            # The begin of a difference is named even if an inherited difference is larger.
            row = worst([row for row in rows if row.verdict == "introduced"] or rows)
            if row is not None:
                single = row.stage in MODULE_STAGES or len(self.parameters) == 1
                yield row, row.stage if single else f"worst of {row.stage}"

    def walk(self) -> Iterator[Node]:
        """The node and the nodes below it, outer nodes first."""
        yield self
        for child in self.children.values():
            yield from child.walk()


def tree_of(report: ParityReport) -> Node:
    """The root. Modules are in the order in which they compute."""
    root = Node("", "(model)")
    modules = [row for stage in MODULE_STAGES for row in report.rows if row.stage == stage]
    for row in modules:
        _at(root, row.name).modules.append(row)
    for name in report.torch_only:
        _at(root, name).partnerless = True
    for row in report.rows:
        if row.stage not in MODULE_STAGES:
            _at(root, _owner(row.name)).parameters.append(row)
    begin = {id(row) for row in report.introduced}
    for count, node in enumerate(root.walk()):
        node.anchor = f"m{count}"
    _count(root, begin)
    _open(root, report)
    return root


def anchors(root: Node) -> dict[int, str]:
    """The anchor on the page of each row, by the row's ``id``."""
    return {id(row): node.anchor for node in root.walk() for row in node.rows}


def _at(root: Node, name: str) -> Node:
    node, parts = root, name.split(".", _MOST_DEPTH) if name else []
    for count, part in enumerate(parts, 1):
        if part not in node.children:
            node.children[part] = Node(".".join(parts[:count]), part or "(empty)")
        node = node.children[part]
    return node


def _owner(name: str) -> str:
    """The module of a parameter; for several names, the module that contains all of them."""
    owners = [path.split(".")[:-1] for path in name.split(", ")]
    alike = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*owners, strict=False))
    return ".".join(parts[0] for parts in alike)


def _count(node: Node, begin: set[int]) -> None:
    for child in node.children.values():
        _count(child, begin)
    node.introduced = sum(id(row) in begin for row in node.rows)
    node.beyond = sum(row.counts for row in node.rows)
    for child in node.children.values():
        node.introduced += child.introduced
        node.beyond += child.beyond


def _open(root: Node, report: ParityReport) -> None:
    node = root
    node.open = True
    while len(node.children) == 1:
        node = next(iter(node.children.values()))
        node.open = True
    first = report.first_divergence
    for row in ([first] if first else []) + list(report.introduced[:_MOST_OPEN]):
        name = row.name if row.stage in MODULE_STAGES else _owner(row.name)
        node = root
        for part in name.split(".", _MOST_DEPTH) if name else []:
            node.open = True
            node = node.children[part]
        node.open = node.open or row is first
