"""The picture of two curves shows the numbers that were compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bridge.parity.curves.chart import curves_figure

STEPS = np.arange(4.0)


def curves() -> Any:
    a, b = np.array([[4.0, 3.0, 2.0, 1.0], [6.0, 5.0, 4.0, 3.0]]), np.array([[5.0, 5.0, 5.0, 5.0]])
    mean_a, mean_b = a.mean(0), b.mean(0)
    return SimpleNamespace(
        steps=STEPS,
        a=a,
        b=b,
        mean_a=mean_a,
        mean_b=mean_b,
        spread=np.full(4, 0.5),
        half=np.full(4, 0.25),
        relative=(mean_b - mean_a) / mean_a,
    )


def lines(axis: Any) -> dict[str, list[list[float]]]:
    """The lines' numbers by label; lines without a label are under "_"."""
    drawn: dict[str, list[list[float]]] = {}
    for line in axis.lines:
        label = str(line.get_label())
        drawn.setdefault("_" if label.startswith("_") else label, []).append(
            [float(y) for y in line.get_ydata()]
        )
    return drawn


@pytest.mark.parametrize("noise", [None, SimpleNamespace(alpha=0.05)])
def test_means_runs_the_difference_and_what_is_allowed_are_drawn(noise: Any) -> None:
    both = curves()
    figure = curves_figure(both, [SimpleNamespace(first=2, last=3)], noise, title="losses", metric="loss")
    top, bottom = figure.axes
    more = "" if noise is None else ", mean and spread of one run (smoothed)"
    drawn = lines(top)
    assert drawn[f"A: 2 runs{more}"] == [both.mean_a.tolist()]
    assert drawn[f"B: 1 run{more}"] == [both.mean_b.tolist()]
    assert [run for run in drawn["_"] if len(run) == 4] == [*both.a.tolist(), *both.b.tolist()]
    assert [line.get_linestyle() for line in top.lines if not str(line.get_label()).startswith("_")] == [
        "-",
        "--",
    ]
    assert lines(bottom)["(B - A) / |A|"] == [(100 * both.relative).tolist()]
    allowed = "tolerance" if noise is None else "band of seeds (false alarm 0.05)"
    (band,) = [area for area in bottom.collections if area.get_label() == allowed]
    np.testing.assert_allclose(band.get_paths()[0].vertices[:, 1].max(), 100 * 0.25 / both.mean_a.min())
    assert len(top.collections) == (0 if noise is None else 2)
    assert (top.get_title(loc="left"), top.get_ylabel()) == ("losses", "loss")
    assert bottom.get_xlabel() == "step (shaded: a departure)"
    for axis in (top, bottom):
        assert [float(line.get_xdata()[0]) for line in axis.lines][-1] == 2.0


def test_without_a_departure_nothing_is_shaded() -> None:
    top, bottom = curves_figure(curves(), [], None, title="same", metric="loss").axes
    assert bottom.get_xlabel() == "step"
    assert [len(axis.patches) for axis in (top, bottom)] == [0, 0]
