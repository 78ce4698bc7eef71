"""The picture of errors over depth: whole, and readable."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

from bridge.parity.recorded.distance import FACTOR
from bridge.parity.report_page.depth import Axis, place_of, shown, thinned
from bridge.parity.report_page.picture import depth_figure, parity_figure, tips_of, write_picture
from bridge.parity.report_page.report import ParityReport
from tests.parity.pair.reports import llama, odd, row

NOTHING = ParityReport((), "float32", (None, None, None, None))


@pytest.mark.parametrize("report", [llama(2), odd(), NOTHING], ids=["same", "odd", "nothing"])
def test_picture_is_a_png(report: ParityReport, tmp_path: Path) -> None:
    write_picture(report, tmp_path / "errors.png")
    height, width = imread(tmp_path / "errors.png").shape[:2]
    assert 600 < height < 3000
    assert 1000 < width < 4000


@pytest.mark.fast_cases("True-faults0")
@pytest.mark.parametrize("faults", [(0, 40), tuple(range(80))])
@pytest.mark.parametrize("dense", [False, True])
def test_labels_of_eighty_layers_do_not_overlap(faults: tuple[int, ...], dense: bool) -> None:
    report = llama(80, faults)
    if dense:
        first = next(number for number, row in enumerate(report.rows) if row.verdict == "introduced")
        rows = [
            dataclasses.replace(row, verdict="introduced") if first <= number < first + 30 else row
            for number, row in enumerate(report.rows)
        ]
        report = dataclasses.replace(report, rows=tuple(rows))
    figure = parity_figure(report)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    panel = figure.axes[0]
    labels = [label for label in panel.get_xticklabels() if label.get_text()]
    assert 10 <= len(labels) <= 40
    # Slanted labels lie side by side as long as their feet are a line's height apart.
    feet = [label.get_transform().transform(label.get_position())[0] for label in labels]
    height = labels[0].get_fontsize() * figure.dpi / 72
    assert min(b - a for a, b in itertools.pairwise(feet)) * math.sin(math.radians(40)) > height
    texts = [text for text in panel.texts if text.get_text()]
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in texts]
    for box, other in itertools.combinations(boxes, 2):
        assert not box.overlaps(other)
    assert all(figure.bbox.contains(box.x1, box.y1) and figure.bbox.contains(box.x0, box.y0) for box in boxes)
    named = "\n".join(text.get_text() for text in texts)
    assert f"model.layers.{faults[0]}.attn.q" in named
    assert ("more" in named) == (len(faults) > 8 or dense)


def test_axis_has_a_place_for_every_number() -> None:
    rows = [row("forward", "x", error) for error in (0.0, 1e-12, 1e-3)]
    axis = Axis.of(rows)
    positions = [axis.place(value) for value in (0.0, 1e-12, 1e-6, 1e-3)]
    assert positions == sorted(positions)
    assert len(set(positions)) == 4
    every = (*odd().stage("forward"), *odd().stage("backward"))
    axis = Axis.of(every)
    for value in (0.0, -1.0, 5e-324, 1.0, 1.7e308, math.inf, math.nan):
        assert 0 <= axis.place(value) <= 1
    assert axis.place(1e300) < axis.place(math.inf) < axis.place(math.nan)
    labels = [label for _, label in axis.ticks()]
    assert {"0", "inf", "nan"} <= set(labels)
    assert len(labels) <= 13


def test_names_are_short_and_evenly_thinned() -> None:
    assert shown("a.b") == "a.b"
    assert shown("x" * 50 + ".end", 10) == "…xxxxx.end"
    assert shown("a, b, c") == "a … c (3)"
    deep = dataclasses.replace(row("forward", "x." * 90 + "end"), leaf="leaf" * 20, call=12)
    assert len(place_of(deep, 34)) <= 34
    assert place_of(deep, 34).startswith("…")
    assert "end#12 [" in place_of(deep, 34)
    assert list(thinned(10, 4)) == [0, 3, 6, 9]
    assert len(thinned(2000, 28)) <= 28
    assert list(thinned(0, 5)) == []


def test_a_panel_has_the_errors_the_floors_and_a_mark_for_each_row_by_its_verdict() -> None:
    report = llama(1, (0,))
    rows = report.stage("forward")
    axis, fault = Axis.of(rows), 1
    errors = [axis.place(row.error) for row in rows]
    figure = parity_figure(report)
    panel = figure.axes[0]
    marks = {line.get_gid(): line for line in panel.lines if line.get_gid()}
    for verdict in ("same", "inherited", "differs", "introduced", "unknown"):
        mark = marks[f"marks-{verdict}"]
        chosen = [[x, errors[x]] for x, row in enumerate(rows) if row.verdict == verdict]
        assert mark.get_xydata().tolist() == chosen
        assert (mark.get_markerfacecolor() == "white") == (verdict == "inherited")
    assert panel.lines[0].get_xydata().tolist() == [[x, error] for x, error in enumerate(errors)]
    (dotted,) = [line for line in panel.lines if line.get_linestyle() == ":" and not line.get_gid()]
    assert dotted.get_xydata().tolist() == [[fault, errors[fault]], [fault, 1.02]]
    largest = max(row.floor for row in rows)
    for factor, label in ((FACTOR, "up to 4 times the floor"), (1.0, "rounding explains it")):
        (band,) = [area for area in panel.collections if area.get_label() == label]
        (left, _), (right, top) = band.get_paths()[0].vertices.min(0), band.get_paths()[0].vertices.max(0)
        assert (left, right, top) == (-0.5, len(rows) - 0.5, pytest.approx(axis.place(largest * factor)))
    assert (panel.get_xlim(), panel.get_axisbelow()) == ((-0.5, len(rows) - 0.5), True)
    assert all(line.get_visible() for line in panel.get_ygridlines())
    assert [label.get_text() for label in panel.get_xticklabels()] == [row.name for row in rows]
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["forward: outputs of modules", "backward: gradients of modules' outputs"]
    assert [text.get_text() for text in panel.texts] == ["1", f"introduced:\n1  {rows[fault].name}"]
    # A page has names and tips in addition to its picture.
    assert [text.get_text() for text in depth_figure(rows).axes[0].texts] == ["1"]
    tips = tips_of(rows)
    assert {gid: len(texts) for gid, texts in tips.items()} == {
        f"marks-{verdict}": sum(row.verdict == verdict for row in rows)
        for verdict in ("same", "introduced", "inherited")
    }
    assert tips["marks-introduced"] == [
        "model.layers.0.attn.q: error 1.0e-03, floor 1.0e-08, ratio 1.0e+05, introduced"
    ]
