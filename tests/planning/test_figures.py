"""What pictures of plans draw: each bar, span, line and label.

If a change of a picture is right, write the file again: ``python -m tests.planning.test_figures``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import Collection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from bridge.compiling.target_chart import memory_figure, timeline_figure, visible
from bridge.compiling.target_plan import TargetPlan, TargetRow
from bridge.compiling.target_time import Estimate
from bridge.compiling.timing.step_time import StepTime, Throughput
from bridge.compiling.timing.timeline import DEVICE, LINKS, Span
from bridge.planning import Workload, load_policy, resolve_models
from bridge.planning.answers.chart import chart
from bridge.planning.answers.comparison import compare
from bridge.planning.cost.optimizers import Optimizer
from tests.planning.test_target_report import row_of
from tests.support import golden

FILE = Path(__file__).with_name("golden") / "figures.json"


def described(figure: Figure) -> Iterator[str]:
    """A line for each axis, bar, span, line, text and legend, in the order of drawing."""
    yield f"inches {figure.get_size_inches().round(3).tolist()}"
    for axes in figure.axes:
        limits = [round(float(limit), 4) for limit in (*axes.get_xlim(), *axes.get_ylim())]
        spines = [name for name, spine in axes.spines.items() if spine.get_visible()]
        yield f"axes {limits} {axes.get_title('left')!r} {axes.get_title()!r} {axes.get_xlabel()!r} {spines}"
        ticks = [(int(label.get_position()[1]), label.get_text()) for label in axes.get_yticklabels()]
        yield f"ticks {ticks} {axes.xaxis.get_major_formatter()(3_000_000, 0)!r}"
        for bar in axes.patches:
            edges = bar.get_path().transformed(bar.get_patch_transform()).get_extents()
            yield f"bar {_box(edges)} {_style(bar)} {bar.get_zorder()} {bar.get_clip_on()}"
        children: list[Any] = axes.get_children()
        spans: list[Any] = [child for child in children if isinstance(child, Collection)]
        for span in spans:
            (path,), colour = span.get_paths(), to_hex(span.get_facecolor()[0])
            yield f"span {_box(path.get_extents())} {colour} {span.get_hatch()} {span.get_linewidth()[0]:g}"
        for line in (child for child in children if isinstance(child, Line2D)):
            x, style = np.asarray(line.get_xdata())[0], line.get_linestyle()
            yield f"line {x} {line.get_label()} {style} {line.get_linewidth():g}"
        yield from (
            f"text {text.get_text()!r} {text.xy}" for text in children if isinstance(text, Annotation)
        )
    for legend in (*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))):
        handles = [_style(handle) for handle in legend.legend_handles if isinstance(handle, Patch)]
        yield f"legend {[text.get_text() for text in legend.get_texts()]} {handles}"


def _box(edges: Bbox) -> list[float]:
    return [round(float(edge), 4) for edge in edges.bounds]


def _style(patch: Patch) -> str:
    return f"{to_hex(patch.get_facecolor(), keep_alpha=True)} {patch.get_hatch()} {patch.get_linewidth():g}"


def plans() -> Figure:
    models, works = resolve_models("llama3-8b"), [Workload(length=512), Workload(length=1024, microbatches=2)]
    return chart(compare(models, [load_policy("hsdp")], [8], works, 80 * 10**9, optimizer=Optimizer("sgd")))


def memory() -> Figure:
    rows = [row_of("a.toml", "h100:8", 850), row_of("b", "v5e:4x4", 1900)]
    rows += [TargetRow(rows[0].task, 1000, failed="no"), row_of("c", "h100:8", 0, exhausted=2500)]
    return memory_figure(TargetPlan(tuple(rows)))


SPANS = (
    Span(DEVICE, "products", 0.0, 0.06),
    Span(LINKS, "reduce_scatter", 0.01, 0.09),
    Span(DEVICE, "memory", 0.06, 0.01),
    Span(DEVICE, "waiting", 0.07, 0.03),
    Span(DEVICE, "products", 0.1, 0.9),
)


def step(spans: tuple[Span, ...] = SPANS, mfu: float | None = 0.25) -> Figure:
    rate = None if mfu is None else Throughput(1.0, mfu, 0.5, None)
    time = StepTime(0.96, 0.01, 0.03, 0.09)
    return timeline_figure(Estimate(row_of("a.toml", "h100:8", 850), time, rate), spans)


def step_without_waits() -> Figure:
    return step((Span(DEVICE, "memory", 0.0, 2.0), Span(LINKS, "psum", 0.5, 1.0)), None)


FIGURES = (plans, memory, step, step_without_waits)


@pytest.mark.parametrize("draw", FIGURES)
def test_pictures_draw_what_they_drew(draw: Callable[[], Figure]) -> None:
    assert [*described(draw())] == golden.kept(FILE, draw.__name__)


def test_columns_of_many_spans_lie_where_the_spans_do() -> None:
    # 1,500 columns of 2 s: half of a second of each is busy, then all, then nothing.
    many = [Span(LINKS, "psum", 102.0 + turn, 0.5) for turn in range(1000)]
    many += [Span(LINKS, "all_gather", 1102.0 + turn, 1.0) for turn in range(1000)]
    *halves, whole = visible(many, 100.0, 3100.0)
    assert halves == [Span(LINKS, "psum", 104.0 + 4 * turn, 2.0) for turn in range(250)]
    assert whole == Span(LINKS, "all_gather", 1102.0, 1000.0)


if __name__ == "__main__":
    golden.write(FILE, {draw.__name__: partial(lambda draw: described(draw()), draw) for draw in FIGURES})
