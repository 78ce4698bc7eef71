"""Pictures and the page of a plan: what they show, that labels fit, that nothing in a name becomes markup."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from typer.testing import CliRunner

from bridge.checkpoints.inspect.chart import layout_figure
from bridge.commands.main import app
from bridge.compiling.page import comparison_page, targets_page
from bridge.compiling.target_chart import memory_figure, peak_by_kind, timeline_figure, visible
from bridge.compiling.target_plan import TargetPlan, TargetRow
from bridge.compiling.target_time import Roofline
from bridge.compiling.timing.step_time import timeline
from bridge.compiling.timing.timeline import DEVICE, Span
from bridge.core.sharding import ShardingPolicy, plan_layout
from bridge.planning import CostPlan, Workload, load_policy, make_plan, resolve_models
from bridge.planning.answers.chart import chart
from bridge.planning.answers.comparison import Comparison, compare
from bridge.planning.answers.search import search
from bridge.planning.answers.search_report import policy_file
from tests.parity.pair.test_html_in_browser import pytestmark as in_browser
from tests.planning.programs import FACTORS, GATHER_DONE, GATHER_START, PRODUCT, SHARD, program
from tests.planning.test_step_time import MACHINE, products
from tests.planning.test_target_report import row_of

ROOFLINE = Roofline(10**6, 4096)
LONG = "a/policy/with a long name/of its own, in a folder that has one too.toml"
NASTY = '<script>alert("x")</script>'


def rows(folder: Path) -> tuple[TargetRow, ...]:
    """Two with a program, one that does not fit, one without an answer."""
    text = program(*FACTORS, SHARD, GATHER_START, PRODUCT, GATHER_DONE)
    (folder / "program.hlo").write_text(text)
    programs = {"programs": {"gradients": str(folder / "program.hlo")}}
    compiled_rows = (
        row_of(
            "a/policy/with a long name/of its own, in a folder that has one too.toml",
            "h100:8",
            850,
            gathered=90,
            **programs,
        ),
        row_of(NASTY, "h100:64", 300, **programs),
        row_of("b", "v5e:4x4", 1900, reduced=5, **programs),
    )
    return (*compiled_rows, TargetRow(compiled_rows[0].task, 1000, failed="out of luck"))


def plan(folder: Path) -> TargetPlan:
    return TargetPlan(rows(folder))


def comparison() -> Comparison:
    models = resolve_models("llama3-8b", ("torch", "jax"), ())
    policies = [dataclasses.replace(load_policy(name), source=name) for name in ("fsdp", "zero1")]
    return compare(models, policies, (8, 64), [Workload(length=1024)], 80 * 10**9, 0.1)


def drawn(figure: Figure) -> list[Text]:
    """The texts of a figure, all of which must be inside of it and apart."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    # Ticks beyond the axes are not drawn.
    beyond = [
        tick.label1
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    ]
    texts = [
        label
        for label in figure.findobj(Text)
        if label.get_text().strip() and label.get_visible() and label not in beyond
    ]
    boxes = [label.get_window_extent(canvas.get_renderer()) for label in texts]
    width, height = canvas.get_width_height()
    for text, box in zip(texts, boxes, strict=True):
        assert min(box.x0, box.y0) >= -1, text
        assert max(box.x1 - width, box.y1 - height) <= 1, text
    for (first, a), (second, b) in combinations(zip(texts, boxes, strict=True), 2):
        assert not a.overlaps(b), f"{first.get_text()!r} lies on {second.get_text()!r}"
    return texts


def test_labels_of_all_pictures_fit(tmp_path: Path) -> None:
    said = [label.get_text() for label in drawn(memory_figure(plan(tmp_path)))]
    assert "850 B of 1 kB: fits" in said
    assert "1.9 kB of 1 kB: does not fit" in said
    assert "no answer of 1 kB: not compiled" in said
    first = rows(tmp_path)[0]
    texts = drawn(timeline_figure(ROOFLINE.estimate(first), ROOFLINE.timeline(first)))
    assert any("waited for" in label.get_text() for label in texts)
    drawn(chart(comparison()))
    # A chart of one bar is so low that its legend comes near to the numbers of the axis.
    few = comparison()
    drawn(chart(dataclasses.replace(few, plans=few.plans[:1], memory=None)))
    narrow = layout_figure(plan_layout({"a": (16, 1), "b": (16, 64), "c": (16, 1000)}, 8))
    assert narrow.axes[0].get_title().startswith("8 shards, 17,040 elements, ")
    # Two narrow buffers: the label of the first stands lower, below two blank lines.
    sizes = [label.get_text() for label in narrow.axes[0].get_xticklabels()]
    assert [size.startswith("\n\n") for size in sizes] == [False, True, False]


def test_the_kinds_of_a_peak_add_up(tmp_path: Path) -> None:
    first = rows(tmp_path)[0]
    assert peak_by_kind(first) == {"weights": 1, "moments": 1, "gradients": 1, "rest of the peak": 847}
    for peak in (1000, 12, 7, 3):
        row = row_of("a", "h100:8", peak)
        row = dataclasses.replace(
            row, found={**(row.found or {}), "held": {"weights": 3, "moments": 4, "gradients": 5}}
        )
        assert row.peak == max(peak, 3)
        assert sum(peak_by_kind(row).values()) == max(row.peak, 7)


def test_many_spans_become_columns_with_the_same_shares() -> None:
    many = [
        Span(DEVICE, activity, turn + start, length)
        for turn in range(10_000)
        for activity, start, length in (("products", 0.0, 0.6), ("memory", 0.6, 0.3))
    ]
    for stop in (10_000, 1000, 100):
        seen = visible(many, 0, stop)
        shares = {
            activity: sum(span.seconds for span in seen if span.kind == activity)
            for activity in ("products", "memory")
        }
        assert shares == pytest.approx({"products": 0.6 * stop, "memory": 0.3 * stop}, rel=0.05)
    assert visible(many[:10], 0, 100) == many[:10]


def test_a_step_without_time_has_no_timeline(tmp_path: Path) -> None:
    last = rows(tmp_path)[-1]
    with pytest.raises(ValueError, match="expected a step with a time, got none: nothing was compiled"):
        timeline_figure(ROOFLINE.estimate(last), timeline_of_products())


def timeline_of_products() -> tuple[Span, ...]:
    from bridge.compiling.timing.program import Program

    return timeline(Program((products(1),)), MACHINE)


class Reader(HTMLParser):
    """Tags, what they refer to, and the texts of table cells."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("td", "th"):
            self.cells[-1] += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert "script" not in reader.tags
    # Everything is in the file: pictures refer to their own parts only.
    assert all(reference.startswith("#") for reference in reader.references)
    return reader


def test_a_page_of_targets_says_what_the_command_says(tmp_path: Path) -> None:
    page = targets_page("my model & co", "4 parameters", plan(tmp_path), ROOFLINE)
    reader = read(page)
    assert reader.tags.count("svg") == 1 + 3
    assert "my model &amp; co" in page
    assert NASTY not in page
    assert ">▲ v5e:4x4: nothing fits." in page
    assert f"h100:8: {LONG} (shard_map) is the cheapest that fits, 850 B" in page
    assert "waiting for transfers, " in page
    assert {"1.9 kB", "850 B", "failed"} <= set(reader.cells)


def test_an_answer_without_a_time_ends_with_its_peak() -> None:
    page = targets_page("m", "", TargetPlan((row_of("a", "h100:8", 700),)), ROOFLINE)
    assert "h100:8: a (shard_map) is the cheapest that fits, 700 B at the peak." in page


def test_bars_next_to_each_other_differ_in_more_than_colour() -> None:
    for axes in chart(comparison()).axes:
        assert len({bars[0].get_hatch() for bars in axes.containers}) == len(axes.containers)


def test_a_page_of_plans_says_what_the_command_says() -> None:
    asked = comparison()
    page = comparison_page(asked)
    reader = read(page)
    assert reader.tags.count("svg") == 1
    assert ">✓ 8 devices: fsdp is the cheapest that fits." in page
    assert 'of reserve (<code class="option">--reserve</code>)' in page
    assert page.count("<tr>") >= len(asked.plans)


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    def call(*more: object) -> Any:
        return CliRunner().invoke(
            app, ["plan", "fsdp", "--model", "llama3-8b", "--runtime", "torch", *map(str, more)]
        )

    file = tmp_path / "plan.html"
    assert call("--html", file).exit_code == 0
    assert "layers.0 ... layers.31 (32)" in file.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]
    for wrong, said in (
        (tmp_path / "plan.txt", "ends with .html"),
        (tmp_path / "no" / "x.html", "folder that exists"),
    ):
        result = call("--html", wrong)
        assert result.exit_code == 2
        assert said in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1300])
def test_pages_in_a_browser(width: int, tmp_path: Path) -> None:
    for number, text in enumerate(
        (targets_page(NASTY, "a step", plan(tmp_path), ROOFLINE), comparison_page(comparison()))
    ):
        file = tmp_path / f"{number}.html"
        file.write_text(text, encoding="utf-8")
        browser = Path(__file__).parents[1] / "parity" / "pair" / "browser.py"
        done = subprocess.run(
            [sys.executable, str(browser), str(file), str(tmp_path / "page.png"), str(width), "light", "yes"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "HOME": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        shown = json.loads(done.stdout.splitlines()[-1])
        assert shown["width"] <= width, "the page scrolls sideways"
        assert shown["alerts"] == shown["messages"] == []
        assert shown["requests"] == [file.as_uri()]


test_pages_in_a_browser = in_browser[1](test_pages_in_a_browser)


def test_a_policy_is_unknown_if_a_runtime_does_not_know_and_none_says_no() -> None:
    answers = {"a": (None, True), "b": (None, False), "c": (True, False), "d": (None, None)}
    plans = [
        SimpleNamespace(mesh=SimpleNamespace(devices=4), workload="w", policy=policy, answer=answer)
        for policy, of_policy in answers.items()
        for answer in of_policy
    ]
    compared: Any = SimpleNamespace(plans=plans, fits=lambda plan: plan.answer)
    choice = Comparison._choice(compared, 4, "w")  # type: ignore[arg-type]
    assert (choice.policy, choice.unknown) == (None, ("a", "d"))


def test_a_page_has_the_policy_file_of_each_finding() -> None:
    compared = comparison()

    def plan(runtime: str, policy: ShardingPolicy, devices: int, work: Workload) -> CostPlan:
        model = resolve_models("llama3-8b", (runtime,), ())[runtime]
        return make_plan(model, policy, devices, runtime, work)

    small = dataclasses.replace(compared, memory=20 * 10**9)
    policies = [dataclasses.replace(load_policy(name), source=name) for name in ("fsdp", "zero1")]
    findings = search(small, policies, plan)
    files = [policy_file(finding, "llama3-8b") for finding in findings if finding.ways]
    assert files
    page = html.unescape(comparison_page(small, findings))
    assert all(file is not None and file in page for file in files)
