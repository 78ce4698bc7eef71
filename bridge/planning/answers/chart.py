"""Plans as a picture: the bytes a device holds, by kind, next to the bytes it sends, by collective."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bridge.core.text import human_bytes
from bridge.planning.answers.comparison import Comparison
from bridge.planning.cost.traffic import KINDS
from bridge.report_page.palette import SERIES, bar_style

_BAR = 0.38
_HATCHES = ("", "///", "---", "...", "\\\\\\", "xxx", "oo", "+++")


def chart(comparison: Comparison) -> Figure:
    """A bar for each plan, in the order of the table; dashed: a device's memory, dotted: memory less the reserve."""
    plans = comparison.plans
    figure = Figure(figsize=(12, 1.6 + _BAR * len(plans)), layout="constrained")
    memory, traffic = figure.subplots(1, 2, sharey=True)
    several = len(comparison.workloads) > 1
    labels = [
        f"{plan.policy}, {plan.mesh.devices}, {plan.runtime}"
        + (f"\n{plan.workload.of(plan.model)}" if several else "")
        for plan in plans
    ]
    terms = list(plans[0].peak.terms)
    _stack(memory, {term.replace("_", " "): [plan.peak.terms[term] for plan in plans] for term in terms})
    kinds = {kind.replace("_", "-"): [plan.traffic.wire_bytes(kind) for plan in plans] for kind in KINDS}
    _stack(traffic, kinds)
    memory.set_yticks(range(len(plans)), labels)
    memory.invert_yaxis()
    if comparison.memory is not None:
        memory.axvline(comparison.memory, color="black", linestyle="--", linewidth=1, label="device's memory")
    if comparison.usable not in (None, comparison.memory):
        memory.axvline(comparison.usable, color="black", linestyle=":", linewidth=1, label="less the reserve")
    first = plans[0]
    memory.set_title(f"{first.model.name}: bytes at the peak, on one device")
    traffic.set_title("bytes that a device sends in a step")
    for axes in (memory, traffic):
        axes.xaxis.set_major_formatter(lambda value, _: human_bytes(int(value)))
        # In units of the font: below the numbers of the axis, however small the chart is.
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=3, ncols=3)
    return figure


def _stack(axes: Axes, values: dict[str, list[int]]) -> None:
    starts: list[int] = []
    for number, (name, lengths) in enumerate(values.items()):
        starts = starts or [0] * len(lengths)
        if any(lengths):
            style = bar_style(SERIES[number % len(SERIES)], _HATCHES[number % len(_HATCHES)])
            axes.barh(range(len(lengths)), lengths, left=starts, height=0.7, label=name, **style)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    axes.spines[["top", "right"]].set_visible(False)
