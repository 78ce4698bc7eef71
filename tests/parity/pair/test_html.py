"""The report as an HTML page: whole, self-contained, harmless."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from bridge.parity.partners.rows import STAGES, row_of
from bridge.parity.recorded.distance import FACTOR
from bridge.parity.report_page.html import Node, page, tree_of, write_html
from bridge.parity.report_page.markup import shade
from bridge.parity.report_page.report import ParityReport
from tests.parity.pair.reports import HOSTILE, llama, odd, row

VOID = {"meta", "input", "br"}
NOTHING = ParityReport((), "bfloat16", (None, None, None, None))


class Page(HTMLParser):
    """Tags that balance, attributes and text of a page."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        assert len(self.tags[-1][1]) == len(attrs), f"an attribute twice in {tag}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)

    @property
    def said(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.text))

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


REPORTS = {"same": llama(3), "faults": llama(4, (1, 3)), "odd": odd(), "nothing": NOTHING}


@pytest.mark.parametrize("name", REPORTS)
def test_page_is_well_formed_and_self_contained(name: str) -> None:
    source = page(REPORTS[name])
    parsed = Page(source)
    assert len(parsed.of("script")) == 1
    assert {tag for tag, _ in parsed.tags}.isdisjoint({"img", "link", "iframe", "object", "embed", "base"})
    for tag, attributes in parsed.tags:
        assert not {key for key in attributes if key.startswith("on") or key in ("src", "srcset", "style")}, (
            tag
        )
        assert attributes.get("href", "#").startswith("#")
    style = source[source.index("<style>") : source.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.parametrize("name", REPORTS)
def test_coordinates_are_finite_and_links_lead_somewhere(name: str) -> None:
    parsed = Page(page(REPORTS[name]))
    geometry = (
        "x",
        "y",
        "x1",
        "x2",
        "y1",
        "y2",
        "cx",
        "cy",
        "r",
        "width",
        "height",
        "d",
        "points",
        "transform",
    )
    for tag, attributes in parsed.tags:
        for key in geometry:
            assert not re.search("nan|inf", attributes.get(key, "").lower()), (tag, attributes)
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {link["href"][1:] for link in parsed.of("a")} <= set(ids)


def test_policy_allows_the_page_its_script_and_nothing_else() -> None:
    source = page(NOTHING)
    script = source[source.index("<script>") + 8 : source.index("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(meta["content"] for meta in Page(source).of("meta") if "http-equiv" in meta)
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy


def test_facts_are_on_the_page() -> None:
    report = llama(4, (1, 3))
    said = Page(page(report)).said
    assert report.summary() in said
    for fact in ("float32", "12.5 seconds", "torch 2.11.0, jax 0.10.1", "frequencies times 1.01", "✓ shown"):
        assert fact in said
    for name in ("model.rotary", "rope", "lm_head.weight", "step", "model.layers.1.attn.q"):
        assert name in said
    for chart in (
        "Forward: error of modules' outputs",
        "Backward: error of",
        "Gradients of parameters, by ratio",
    ):
        assert chart in said
    for stage in STAGES:
        assert (f"{stage}: {len(report.stage(stage))} row" in said) == bool(report.stage(stage))


def test_a_row_says_all_it_knows() -> None:
    values = np.arange(6.0).reshape(2, 3)
    other = values + np.asarray([[0, 0, 0], [0, 0.5, 0]])
    known = dataclasses.replace(
        row_of("forward", ("block.attn", "b/a"), values, other, 1e-6, kind="Attention", local=77.0),
        leaf="out.0",
        call=2,
        layout="transposed (1, 0)",
        note="in what it gives to x",
        cause="rotary pairs",
    )
    said = Page(page(ParityReport((known,), "float32", (None,) * 4))).said  # type: ignore[arg-type]
    facts = (
        "block.attn#2 [out.0]", "b/a", "Attention", "[2, 3]", "introduced", f"{known.error:.1e}", f"{known.floor:.1e}",
        f"{known.ratio:.1e}", "77", str(known.max_ulp), f"{known.cosine:.9g}", "[1, 1]: torch 4, JAX 4.5",
        "transposed (1, 0)", "in what it gives to x", "rotary pairs",
    )  # fmt: skip
    for fact in facts:
        assert fact in said, fact


def test_hostile_names_are_text() -> None:
    source = page(odd())
    parsed = Page(source)
    assert "<script>alert(1)</script>" in parsed.said
    assert "<script>alert" not in source
    assert "<img" not in source
    assert "\x1b" not in source
    assert "\x00" not in source
    for name in HOSTILE[:4]:
        assert name in parsed.said


def test_written_file_is_utf8(tmp_path: Path) -> None:
    write_html(odd(), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_bytes().decode("utf-8") == page(odd())


def test_tree_follows_the_modules() -> None:
    report = llama(3, (1,))
    root = tree_of(report)
    layers = root.children["model"].children["layers"]
    assert list(layers.children) == ["0", "1", "2"]
    query = layers.children["1"].children["attn"].children["q"]
    assert query.path == "model.layers.1.attn.q"
    assert {row.stage for row in query.modules} == {"forward", "backward"}
    assert (layers.children["0"].introduced, layers.children["1"].introduced) == (0, 1)
    # The way to the fault is open; what is not on it is not.
    assert [node.open for node in (root, layers, layers.children["1"], query)] == [True] * 4
    assert not layers.children["0"].open
    # A parameter stands in its module, a stack of parameters in the module around the layers.
    assert {row.stage for row in layers.children["0"].children["norm"].parameters} == {"gradients", "weights"}
    stacked = row("gradients", "model.layers.0.w, model.layers.1.w")
    root = tree_of(ParityReport((stacked,), "float32", (None,) * 4))  # type: ignore[arg-type]
    assert root.children["model"].children["layers"].parameters == [stacked]


def test_node_says_what_is_inside() -> None:
    said = Page(page(llama(4, (1, 3)))).said
    assert re.search(r"\(model\) inside: [0-9]+ beyond rounding, 2 introduced", said)
    assert "(model) inside: nothing beyond rounding" in Page(page(llama(2))).said


def test_a_row_of_every_stage_is_on_the_page() -> None:
    report = llama(2)
    rows = [dataclasses.replace(report.rows[0], stage=stage) for stage in STAGES]
    text = html.unescape(page(dataclasses.replace(report, rows=rows)))
    assert len(set(re.findall(r"<summary>(.+): 1 row", text))) == len(STAGES)


def test_first_divergence_is_marked_once() -> None:
    parsed = Page(page(llama(4, (1, 3))))
    marked = [attributes for tag, attributes in parsed.tags if "first" in attributes.get("class", "").split()]
    assert len(marked) == 2, "one node of the tree, one line of a table"
    assert not [
        attributes
        for tag, attributes in Page(page(llama(2))).tags
        if "first" in attributes.get("class", "").split()
    ]


def test_colour_grows_with_the_ratio() -> None:
    ratios = (0.0, 1.0, 1.5, FACTOR, 30.0, 300.0, 1e3)
    steps = [int(shade(ratio)[1:]) for ratio in ratios]
    assert steps[:2] == [0, 0]
    assert steps[2] > 0
    assert steps == sorted(steps)
    assert {shade(ratio) for ratio in (1e3, 1e9, math.inf, math.nan)} == {"c8"}
    style = page(NOTHING)
    assert ".c0{background:#ffffff}" in style


@pytest.mark.slow
def test_thousands_of_rows_stay_a_page_of_few_megabytes() -> None:
    report = llama(96, (5,))
    assert len(report.rows) >= 2000
    assert len(page(report).encode()) < 4_000_000
    everywhere = tuple(row("forward", f"layers.{number}", 0.1, local=1e3) for number in range(2000))
    source = page(ParityReport(everywhere, "float32", (None,) * 4))  # type: ignore[arg-type]
    Page(source)
    assert len(source.encode()) < 6_000_000
    assert source.count("<details id=") == 2002


def test_what_was_not_compared_and_what_order_says_are_on_the_page():
    said = {
        "order": "both models depend on <rows>",
        "notes": ("of samples",),
        "torch_parameters": ("up.bias",),
    }
    words = " ".join(Page(page(dataclasses.replace(NOTHING, **said))).text)
    for part in ("both models depend on <rows>", "of samples", "1 torch parameters without a partner"):
        assert part in words, part


def test_a_module_shows_its_worst_forward_row_or_its_worst_row() -> None:
    forward, backward = row("forward", "a", 1e-3), [row("backward", "a", error) for error in (1e-5, 1e-1)]
    assert Node("a", "a", modules=[*backward, forward]).worst_output is forward
    assert Node("a", "a", modules=backward).worst_output is backward[1]
    assert Node("a", "a").worst_output is None
