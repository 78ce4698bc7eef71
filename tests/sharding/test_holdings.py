"""Drawings of which device holds which rows, and how results show themselves at a prompt and in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from bridge.checkpoints.compare.diff_report import DiffReport
from bridge.checkpoints.compare.ulp import Tolerance
from bridge.checkpoints.ground.checked import Problem
from bridge.checkpoints.verify.verify_report import VerifyReport
from bridge.core.sharding import Layout, plan_layout
from bridge.core.sharding.layout.holdings import HoldingsDrawing, draw_holdings
from bridge.core.sharding.layout.rows import Box, row_boxes
from bridge.core.views import Viewed
from bridge.planning import Workload, load_policy, make_plan
from bridge.planning.answers.comparison import Comparison
from bridge.planning.answers.search import Finding, LargestBatch, Way

SHAPES = {"wq": (7, 6), "wo": (6, 7), "up": (9, 6), "down": (6, 9), "norm": (6,)}
HOSTILE = "<script>w</script>\x1b[2J"


def drawn(layout: Layout, copies: int = 1) -> HoldingsDrawing:
    """The layout on ``copies`` times as many devices as it has shards."""
    return draw_holdings(
        "layout",
        (
            (
                slot.name,
                slot.shape,
                {
                    device: row_boxes(slot.shape, *layout.row_range(slot.name, device % layout.num_shards))
                    for device in range(copies * layout.num_shards)
                },
            )
            for slot in layout.slots
        ),
    )


def test_a_drawing_is_to_scale_and_says_the_rows() -> None:
    lines = str(drawn(plan_layout(SHAPES, 4, align=1))).splitlines()
    assert lines[7:10] == [
        "up (9, 6)",
        "  |            0            |            1             |  2   |",
        "  0: rows 0:4   1: rows 4:8   2: rows 8:9   nothing on 3",
    ]
    assert lines[-1] == "  2: whole   nothing on 0-1,3"
    assert repr(drawn(plan_layout(SHAPES, 4, align=1))) == "\n".join(lines)


def test_replicas_share_a_part_of_the_bar() -> None:
    assert "  0,4: rows 0:4   1,5: rows 4:8   2,6: rows 8:9   nothing on 3,7" in str(
        drawn(plan_layout(SHAPES, 4, align=1), copies=2)
    )


def test_columns_that_are_cut_have_bars_of_their_own() -> None:
    parts = {0: [Box((0, 0), (4, 3))], 1: [Box((0, 3), (4, 3))]}
    assert str(draw_holdings("t", [("w", (4, 6), parts)])).splitlines()[1:] == [
        "w (4, 6)",
        f"  |{'0'.center(59)}| columns 0:3",
        f"  |{'1'.center(59)}| columns 3:6",
        "  0: [0:4, 0:3]   1: [0:4, 3:6]",
    ]


def test_layers_that_lie_alike_are_drawn_once_and_others_are_not() -> None:
    first, second = {0: [Box((0,), (8,))], 1: []}, {0: [], 1: [Box((0,), (8,))]}
    tensors = [(f"layers.{k}.b", (8,), first) for k in range(12)] + [("layers.12.b", (8,), second)]
    titles = [line for line in str(draw_holdings("t", tensors)).splitlines() if line.startswith("layers")]
    assert titles == ["layers.0.b (8,), and 11 alike", "layers.12.b (8,)"]


@pytest.mark.parametrize("devices", [1, 16, 4096])
def test_lines_fit_a_terminal(devices: int) -> None:
    layout = plan_layout({"layers.0.mlp.experts.weight": (64, 33, 7), "v": (100_000,)}, devices, align=1)
    assert max(map(len, str(drawn(layout)).splitlines())) <= 80


class Text(HTMLParser):
    """Tags, and the text between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


class Hostile(Viewed):
    """A result whose every text is hostile."""

    def summary(self) -> str:
        return f"{HOSTILE}\n{HOSTILE}"

    def table(self) -> list[tuple[str, str]]:
        return [(HOSTILE, HOSTILE)] * 500


def results() -> list[Viewed]:
    layout = plan_layout({HOSTILE: (300, 7), **SHAPES}, 4, align=1)
    missing = tuple(f"{HOSTILE}{k}" for k in range(500))
    report = DiffReport(HOSTILE, "b", Tolerance(), (), missing, (), (), (), (), (), ())
    plan = make_plan("llama3-8b", "fsdp", 64, "torch", Workload())
    problems = (Problem(HOSTILE, HOSTILE),) * 500
    verified = VerifyReport(
        HOSTILE, "dcp", True, True, problems, 0.0, tensors=1, chunks=1, bytes=8, protected=8
    )
    policy, batches = load_policy("fsdp"), (LargestBatch("torch", 2),)
    way = Way((HOSTILE,), policy, 10**9, 10**6, batches)
    finding = Finding(policy, 8, Workload(), HOSTILE, batches, (), False, (way,) * 500)
    compared = Comparison((plan,) * 4, 10**12)
    return [layout, report, plan, verified, finding, compared, drawn(layout), Hostile()]


@pytest.mark.parametrize("number", range(8))
def test_a_result_is_a_line_at_a_prompt_and_a_small_escaped_part_of_a_page_in_a_notebook(number: int) -> None:
    result = results()[number]
    if not isinstance(result, HoldingsDrawing):
        assert repr(result).startswith(f"<{type(result).__name__}: ")
        assert len(repr(result)) < 200
        assert repr(result).isprintable()
    page = Text()
    html = result._repr_html_()
    page.feed(html)
    assert "script" not in page.tags
    assert "\x1b" not in html
    assert page.tags[0] == "div"
    assert type(result).__name__ in page.text
    assert len(html) < 40_000


def test_results_say_their_verdict_first() -> None:
    _, different, _, verified, finding, compared, *_ = results()
    assert (
        repr(different) == "<DiffReport: different: 0 tensors compared, 0 ULP apart at most, 500 only in a>"
    )
    assert repr(verified).startswith("<VerifyReport: 500 problems found in <script>")
    assert repr(finding).endswith(
        "does not fit; with 1 change 500 policies do, of which 5 are shown, fewest bytes sent first>"
    )
    assert (
        repr(compared)
        == "<Comparison: 4 plans of llama3-8b; 64 devices: fsdp.toml is the cheapest that fits>"
    )
    assert compared.table()[1][:4] == ("yes", "fsdp.toml", "torch", "64")
