"""The torch model as a tree of module paths, with the findings in each module."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from bridge.parity.partners.rows import Row
from bridge.parity.report_page.depth import MODULE_STAGES, worst
from bridge.parity.report_page.report import ParityReport

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
