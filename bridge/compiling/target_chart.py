"""Steps that were compiled for targets, as pictures: the memory of a device at the peak, and the timeline of a step.

::

    fsdp, h100:8     |weights|moments|gradients|rest of the peak|      |reserve|   26.7 GB of 80 GB: fits

    the device       products products memory waiting products ...                  one step, and below
    its links            all-gather    all-gather  reduce-scatter                    where it waits longest, enlarged
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bridge.compiling.target_plan import TargetPlan, TargetRow
from bridge.compiling.target_time import Estimate
from bridge.compiling.timing.timeline import DEVICE, LINKS, Span
from bridge.core.text import human_bytes
from bridge.report_page.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW, bar_style

MEMORY_COLOURS = {"weights": BLUE, "moments": SKY, "gradients": GREEN, "rest of the peak": ORANGE}
TIME_COLOURS = {
    "products": BLUE, "memory": SKY, "waiting": VERMILION, "all_gather": GREEN, "reduce_scatter": PURPLE,
    "psum": ORANGE, "all_to_all": YELLOW, "ppermute": GREY,
}  # fmt: skip
# So that colour is not the only difference in a bar or a lane.
_HATCHES = {
    **{"moments": "///", "gradients": "...", "rest of the peak": "xxx"},
    **{"memory": "///", "waiting": "xxx"},
    **{"reduce_scatter": "...", "psum": "\\\\\\", "all_to_all": "oo", "ppermute": "+++"},
}
_NAMES = {"psum": "all-reduce", "ppermute": "permute", "waiting": "waiting for transfers"}
_COLUMNS = 1500
"""Columns of a picture. If a lane has more spans, each column shows one of them."""
# The least share of a step in the enlarged part: if the longest wait is short, its surroundings show, too.
_ZOOM = 0.05
_WIDTH = 11.0
_LETTERS = 110
"""The letters in a line as wide as the picture."""
_LANES = (DEVICE, LINKS)
_ANSWERS = {True: "fits", False: "does not fit", None: "not compiled"}


def memory_figure(plan: TargetPlan) -> Figure:
    """A bar for each row, in the order of the table: the peak by kind, in the device's memory with its reserve."""
    rows = plan.rows
    figure = Figure(figsize=(_WIDTH, 1.3 + 0.55 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for position, row in enumerate(rows):
        usable = row.memory * (1 - row.reserve)
        axis.barh(position, row.memory, height=0.8, facecolor="none", edgecolor="black", linewidth=1)
        axis.barh(
            position,
            row.memory - usable,
            left=usable,
            height=0.8,
            facecolor="#eeeeee",
            hatch="//",
            edgecolor="#aaaaaa",
            linewidth=0,
            zorder=0,
        )
        start = 0
        for kind, size in peak_by_kind(row).items():
            axis.barh(position, size, left=start, height=0.55, **_style(MEMORY_COLOURS, kind))
            start += size
        peak = "no answer" if row.peak is None else f"{'> ' * row.exhausted}{human_bytes(row.peak)}"
        said = f"{peak} of {human_bytes(row.memory)}: {_ANSWERS[row.fits]}"
        axis.annotate(
            said, (max(row.memory, start), position), (6, 0), textcoords="offset points", va="center"
        )
    axis.set_yticks(range(len(rows)), [textwrap.fill(label(row), _LETTERS // 3) for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    most = max(max(row.memory, row.peak or 0) for row in rows)
    # The text of a row is to the right of the largest bar.
    axis.set_xlim(0, 1.45 * most)
    axis.xaxis.set_major_formatter(lambda value, _: human_bytes(int(value)))
    axis.set_title("bytes of one device at the peak of a step", loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    handles = [Patch(**_style(MEMORY_COLOURS, kind), label=kind) for kind in MEMORY_COLOURS]
    handles += [Patch(facecolor="#eeeeee", hatch="//", edgecolor="#aaaaaa", label="reserve")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def peak_by_kind(row: TargetRow) -> dict[str, int]:
    """Bytes at the peak: arrays of the step, and the rest (activations, gathered weights, buffers)."""
    if row.peak is None:
        return {}
    held = {kind: row.held.get(kind, 0) for kind in ("weights", "moments", "gradients")}
    left = row.peak - sum(held.values())
    if left < 0:
        # At this peak, not all gradients exist yet.
        held["gradients"] = max(0, held["gradients"] + left)
        left = 0
    return {**held, "rest of the peak": left}


def timeline_figure(estimate: Estimate, spans: Sequence[Span]) -> Figure:
    """A step from ``Roofline.timeline``, and below it, enlarged, the part around its longest wait, or its middle.

    Raises ``ValueError`` for an estimate without a time.
    """
    time = estimate.time
    if time is None or not spans:
        raise ValueError(f"{label(estimate.row)}: expected a step with a time, got none: {estimate.why}")
    end = max(span.end for span in spans)
    figure = Figure(figsize=(_WIDTH, 3.9), layout="constrained")
    whole, part = figure.subplots(2, 1)
    _lanes(whole, spans, 0.0, end)
    start, stop = _enlarged(spans, end)
    _lanes(part, spans, start, stop)
    frame = whole.axvspan(
        start * 1e3, stop * 1e3, facecolor="none", edgecolor="black", linewidth=1.2, zorder=3
    )
    frame.set_clip_on(False)
    waits = any(span.kind == "waiting" for span in spans)
    part.set_title(
        f"enlarged, the frame: {'around the longest wait' if waits else 'the middle of the step'}",
        loc="left",
        fontsize="medium",
    )
    part.set_xlabel("milliseconds since the start of the step")
    rate = "" if estimate.rate is None else f", MFU {estimate.rate.mfu:.0%}"
    whole.set_title(
        f"{textwrap.fill(label(estimate.row), _LETTERS)}\n{_ms(time.total)} ms per step{rate}; "
        f"{_ms(time.communication)} ms of transfers, {_ms(time.exposed)} ms of them waited for",
        loc="left",
        fontsize="medium",
    )
    kinds = [kind for kind in TIME_COLOURS if any(span.kind == kind for span in spans)]
    names = {kind: _NAMES.get(kind, kind.replace("_", "-")) for kind in kinds}
    handles = [Patch(**_style(TIME_COLOURS, kind), label=name) for kind, name in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _style(colours: Mapping[str, str], kind: str) -> dict[str, Any]:
    return bar_style(colours[kind], _HATCHES.get(kind, ""))


def label(row: TargetRow) -> str:
    task = row.task
    return f"{task.policy.source.removesuffix('.toml')}, {task.target.name}, {task.engine}"


def _enlarged(spans: Sequence[Span], end: float) -> tuple[float, float]:
    waits = [span for span in spans if span.kind == "waiting"]
    longest = max(waits, key=lambda span: span.seconds, default=Span(DEVICE, "", end / 2, 0.0))
    width = max(_ZOOM * end, 1.5 * longest.seconds)
    start = min(max(0.0, (longest.start + longest.end - width) / 2), max(0.0, end - width))
    return start, min(end, start + width)


def _lanes(axis: Axes, spans: Sequence[Span], start: float, stop: float) -> None:
    for position, lane in enumerate(_LANES):
        seen = [span for span in spans if span.lane == lane and span.start < stop and span.end > start]
        for span in visible(seen, start, stop):
            begin, end = max(start, span.start), min(stop, span.end)
            axis.broken_barh(
                [(begin * 1e3, (end - begin) * 1e3)],
                (position - 0.4, 0.8),
                facecolors=TIME_COLOURS[span.kind],
                hatch=_HATCHES.get(span.kind),
                edgecolor="white",
                linewidth=0,
            )
    axis.set_yticks(range(len(_LANES)), ["the device", "its links"])
    axis.set_ylim(len(_LANES) - 0.4, -0.6)
    axis.set_xlim(start * 1e3, stop * 1e3)
    axis.spines[["top", "right"]].set_visible(False)


def visible(spans: Sequence[Span], start: float, stop: float) -> list[Span]:
    """The spans of one lane; if they are too many to see, columns of the picture with one kind each, or none.

    A column gets the kind that is most behind its share so far, so that each kind covers as much as in ``spans``.
    """
    if len(spans) <= _COLUMNS:
        return list(spans)
    width = (stop - start) / _COLUMNS
    owed: defaultdict[str, float] = defaultdict(float)
    shown: list[Span] = []
    for column, filled in enumerate(_by_column(spans, start, width)):
        for kind, seconds in (*filled.items(), ("", width - sum(filled.values()))):
            owed[kind] += seconds
        kind, left = max(owed, key=owed.__getitem__), start + column * width
        owed[kind] -= width
        if shown and shown[-1].kind == kind and left - shown[-1].end < width / 2:
            shown[-1] = replace(shown[-1], seconds=left + width - shown[-1].start)
        elif kind:
            shown.append(Span(spans[0].lane, kind, left, width))
    return shown


def _by_column(spans: Sequence[Span], start: float, width: float) -> list[dict[str, float]]:
    """Seconds of each kind in each column."""
    filled: list[dict[str, float]] = [{} for _ in range(_COLUMNS)]
    for span in spans:
        for column in range(max(0, int((span.start - start) / width)), _COLUMNS):
            left = start + column * width
            inside = min(span.end, left + width) - max(span.start, left)
            if inside <= 0:
                break
            filled[column][span.kind] = filled[column].get(span.kind, 0.0) + inside
    return filled


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
