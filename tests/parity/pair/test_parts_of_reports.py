"""Small parts of a comparison: growth, rounding, statistics that moved apart, and what a report did not compare."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from bridge.parity.causes.causes import _offset, statistics_cause
from bridge.parity.curves.verdict import growth
from bridge.parity.partners.rows import BUFFER, Stage
from bridge.parity.report_page.depth import Axis, worst
from bridge.parity.report_page.html import histogram, tree_of
from bridge.parity.report_page.markup import alone, facts_of, number, shade, times
from bridge.parity.report_page.report import ParityReport
from bridge.parity.stages.rerun_module import rounding
from tests.parity.pair.reports import llama, row

RNG = np.random.default_rng(0)
NOTHING = ParityReport((), "float32", (None, None, None, None))


def test_an_exponential_growth_has_its_rate_and_is_explained_by_it() -> None:
    steps = np.arange(40) * 10
    exact = growth(steps, 1e-7 * np.exp(steps / 50))
    assert exact is not None
    assert exact.rate is not None
    assert exact.r2 is not None
    assert (exact.rate, exact.r2) == (pytest.approx(1 / 50), pytest.approx(1))
    noisy = growth(steps, 1e-7 * np.exp(steps / 50 + RNG.normal(size=40)))
    assert noisy is not None
    assert noisy.r2 is not None
    assert 0.5 < noisy.r2 < 0.99
    constant = growth(steps, np.full(40, 1e-3))
    assert constant is not None
    assert constant.rate is None or constant.r2 is None or math.isnan(constant.r2) or constant.rate == 0
    assert growth(steps, np.zeros(40)) is None


def test_rounding_between_the_sides_needs_both_values_of_one_shape() -> None:
    wide = RNG.normal(size=(4, 3))
    low = wide.astype(np.float32)
    other = low + np.float32(1e-3)
    both = rounding("float32", (low, wide), (other, wide))
    assert both.between == pytest.approx(1e-3 * 12**0.5, rel=0.1)
    assert both.floor == max(both.torch, both.jax) > 1e-4
    for torch, jax in ((None, low), (low, None), (low, low[:2])):
        assert math.isnan(rounding("float32", (torch, wide), (jax, wide)).between)


def moved(start: np.ndarray, values: np.ndarray, momentum: float) -> np.ndarray:
    return (1 - momentum) * start + momentum * values


def test_statistics_that_moved_apart_have_their_cause() -> None:
    start, mean, variance = np.zeros(8), RNG.normal(size=8), RNG.uniform(1, 2, size=8)
    farther = statistics_cause(
        "b.running_mean", start, start, moved(start, mean, 0.1), moved(start, mean, 0.9), 1e-9
    )
    assert farther.startswith("JAX's moves 9 times as far in a step as torch's: momentum a in torch is 1 - a")
    ones = np.ones(8)
    unbiased, biased = moved(ones, variance * 6 / 5, 0.1), moved(ones, variance, 0.1)
    assert "6 / 5 times the batch's" in statistics_cause("b.running_mean", ones, ones, unbiased, biased, 1e-9)
    assert (
        statistics_cause("b.running_mean", ones, ones, unbiased, biased + 0.01 * RNG.normal(size=8), 1e-9)
        == ""
    )
    assert statistics_cause("b.running_mean", ones[:2], ones[:2], unbiased[:2], biased[:2], 1e-9) == ""
    assert statistics_cause("b.running_mean", ones, start, unbiased, biased, 1e-9) == ""
    assert (
        statistics_cause(
            "b.running_mean", start, start, moved(start, mean, 0.1), moved(start, mean, 0.1), 1e-9
        )
        == ""
    )


def test_only_the_statistics_of_a_norm_have_a_momentum() -> None:
    start, steps = np.zeros(8), np.arange(1.0, 9.0)
    assert statistics_cause("usage", start, start, steps, 4 * steps, 1e-9) == (
        "JAX's moves 4 times as far in a step as torch's"
    )
    away = statistics_cause("b.running_mean", start, start, steps, -3 * steps, 1e-9)
    assert away == "JAX's moves -3 times as far in a step as torch's"
    # Any factor explains a single number.
    assert statistics_cause("b.running_mean", start[:1], start[:1], steps[:1], 4 * steps[:1], 1e-9) == ""


def test_a_bias_that_is_missing_is_named_within_the_noise_of_its_sum() -> None:
    bias, floor = RNG.normal(size=4), 1e-4
    x = RNG.normal(size=(3, 4))
    near = bias * (1 + (1e-5 + 0.5 * floor / float(np.linalg.norm(bias))))
    assert _offset(x + near, x, floor, {"up.bias": bias}) == "JAX does not add torch's up.bias"
    far = bias * (1 + (1e-5 + 1.5 * floor / float(np.linalg.norm(bias))))
    assert (
        _offset(x + far, x, floor, {"up.bias": bias}) == "JAX's is torch's plus one vector at every position"
    )
    # At one position any difference is one vector.
    assert _offset((x + far)[:1], x[:1], floor, {"up.bias": bias}) == ""
    assert _offset((x + near)[:1], x[:1], floor, {"up.bias": bias}) == "JAX does not add torch's up.bias"


def test_outputs_that_could_not_be_compared_are_named() -> None:
    whole = llama(1)
    assert not any(text.startswith("the outputs") for text in whole.not_compared)
    unknown = row("forward", "rotary", verdict="unknown"), row("forward", "", verdict="unknown")
    report = dataclasses.replace(whole, rows=(*whole.rows, *unknown))
    assert "the outputs of (model), rotary" in report.not_compared
    assert not report.complete


def test_numbers_of_a_page() -> None:
    assert [number(value) for value in (0.0, 1.0, 2.34e-7, math.nan)] == ["0", "1.0e+00", "2.3e-07", "nan"]
    assert [times(value) for value in (0.0, 12.345, 9999.0, 1e4)] == ["0", "12.3", "1e+04", "1.0e+04"]
    assert [alone(row("forward", "a", local=local)) for local in (math.nan, 77.0)] == ["", "77"]
    shown = ["stage", "torch", "JAX", "shape", "error", "floor", "ratio", "max ULP", "cosine", "largest at"]
    assert [label for label, _ in facts_of(row("forward", "a"), None)] == shown
    # Below a heading with the module's name.
    assert [label for label, _ in facts_of(row("forward", "a", kind="Linear"), "a")] == [shown[0], *shown[2:]]


def test_shades_begin_at_one_at_the_factor_and_at_a_thousand() -> None:
    bounds = {1.0: "c0", 1.1: "c1", 2.0: "c1", 2.1: "c2", 4.0: "c2", 4.1: "c3"}
    bounds |= {30.0: "c4", 300.0: "c6", 999.0: "c7", 1000.0: "c8", 1e9: "c8", math.inf: "c8"}
    assert {ratio: shade(ratio) for ratio in bounds} == bounds


def test_a_histogram_counts_ratios_by_decade_and_verdict() -> None:
    ratios = (0.0, 1e-9, 1e-3, 0.5, 1.0, 9.9, 10.0, 1e6, 1e12, math.inf, math.nan)
    rows = [dataclasses.replace(row("forward", "a"), ratio=ratio, verdict="same") for ratio in ratios]
    rows.append(dataclasses.replace(rows[3], verdict="differs"))
    counts = [[1, 0], [1, 0], [1, 0], [0, 0], [1, 1], [2, 0], [1, 0], *[[0, 0]] * 4, [2, 0], [1, 0], [1, 0]]
    assert histogram(rows) == counts


def test_an_axis_of_errors_has_whole_decades_and_lanes_for_what_is_no_power_of_ten() -> None:
    axis = Axis.of([row("forward", "a", error, floor=2e-8) for error in (0.03, 2e-6)])
    assert axis == Axis(-8, -1, False, False, False)
    assert axis.ticks() == [(pytest.approx(k / 7), f"1e{k - 8}") for k in range(8)]
    assert Axis.of([]) == Axis(-8, 0, False, False, False)
    narrow = [dataclasses.replace(row("forward", "a"), error=error, floor=2e-8) for error in (0.0, math.nan)]
    assert Axis.of(narrow) == Axis(-8, -6, True, False, True)
    lanes = Axis(-4, 0, True, True, True)
    assert [
        lanes.place(value) for value in (-1.0, 0.0, 1e-9, 1e-2, 9.0, math.inf, math.nan)
    ] == pytest.approx([0.0225, 0.0225, 0.09, 0.455, 0.82, 0.8875, 0.9775])
    assert [label for _, label in lanes.ticks()] == ["0", "1e-4", "1e-3", "1e-2", "1e-1", "1e0", "inf", "nan"]
    assert [label for _, label in Axis(-330, 310, False, False, False).ticks()] == [
        f"1e{power}" for power in range(-250, 309, 80)
    ]


def test_the_worst_row_has_the_largest_ratio_or_none() -> None:
    rows = [dataclasses.replace(row("forward", "a"), ratio=ratio) for ratio in (1.0, math.nan, 1e9)]
    assert (worst(rows), worst([rows[0], rows[2]]), worst([])) == (rows[1], rows[2], None)


def test_a_report_of_models_that_are_the_same_shows_its_five_largest_rows() -> None:
    report = llama(1)
    heading, *rows = report.table()
    assert [cells[2].rpartition(".")[2] for cells in rows] == ["norm", "q", "k", "v", "o"]
    assert dict(zip(heading, rows[0], strict=True)) == {
        **{"verdict": "same", "stage": "forward", "torch": "model.layers.0.norm", "jax": "jax/x"},
        **{"ratio": "0.10", "alone": "0.30", "error": "1.0e-09", "floor": "1.0e-08", "max ULP": "0"},
        **{"cosine": "1.000000", "cause": ""},
    }


def test_a_tree_counts_what_is_beyond_rounding_in_each_module() -> None:
    layers = tree_of(llama(3, (1,))).children["model"].children["layers"]
    assert (layers.introduced, layers.introduced_inside, layers.children["1"].introduced_inside) == (1, 1, 1)
    # Forward from the query projection on, all of backward, and one gradient.
    assert [node.beyond for node in layers.children.values()] == [10 + 1, 9 + 10 + 1, 10 + 10 + 1]
    assert layers.children["1"].beyond_inside == 8 + 9 + 1
    query = layers.children["1"].children["attn"].children["q"]
    assert (query.style, query.kind, query.partner) == ("begin", "Linear", "jax/x")
    assert [words for _, words in query.chips()] == ["forward", "backward"]
    norm = layers.children["2"].children["norm"]
    assert [words for _, words in norm.chips()] == ["forward", "backward", "worst of gradients"]
    assert (norm.style, tree_of(llama(1)).style) == ("plain", "quiet")


@pytest.mark.parametrize(
    ("stage", "kind", "said"),
    [
        ("weights", "", "The weights differ: a.b"),
        ("weights", BUFFER, "The buffers differ: a.b"),
        ("forward", "Linear", "The models first diverge in a.b (Linear), in forward"),
        ("backward", "Linear", "The models first diverge in a.b (Linear), in backward"),
        ("precision", "Linear", "The models diverge in a.b (Linear), in the precision of float32"),
        ("buffers", BUFFER, "The buffers after the forward differ: a.b"),
        ("loss", "", "The models' outputs are the same, the losses differ"),
        ("gradients", "", "The gradients differ: a.b"),
        ("update", "", "The optimizers' first update differs: a.b"),
        ("update", BUFFER, "The buffers after the first training step differ: a.b"),
        ("steps", "", "The trainings differ: a.b"),
        ("steps", BUFFER, "The buffers differ in training: a.b, at last"),
    ],
)
def test_a_summary_names_the_first_difference_by_its_stage(stage: Stage, kind: str, said: str) -> None:
    first = row(stage, "a.b", 0.1, kind=kind, note="at last", cause="of itself")
    report = dataclasses.replace(NOTHING, rows=(first,))
    assert report.summary() == f"{said}, {first.ratio:.3g} times what rounding explains: of itself."


def test_a_summary_in_full() -> None:
    assert llama(1).summary() == (
        "The two models are the same: 1 weights, 10 forward, 10 backward, 1 gradients compared, no difference above 4 "
        "times what rounding to float32 explains (the largest is 0.1 times)."
    )
    left_out = {
        "torch_buffers": ("t",),
        "jax_buffers": ("j",),
        "dropped_buffers": ("d", "e"),
        "left_out": ("l",),
    }
    assert dataclasses.replace(llama(3, (0, 2)), **left_out).summary() == (
        "The models first diverge in model.layers.0.attn.q (Linear), in forward, 2e+04 times what rounding explains. "
        "Further places: 1. Neither copied nor compared: torch buffers without a partner: t; JAX buffers without a "
        "partner: j; buffers that the mapping drops: d, e; l."
    )


def test_remarks_name_what_was_not_compared_and_which_layouts_are_doubtful() -> None:
    rows = (
        row("forward", "a", note="layout not certain: b"),
        row("forward", "", note="values alone chose c"),
        row("forward", "d", note="made up for in e"),
        row("forward", "f", verdict="unknown", note="not compared: g"),
    )
    report = dataclasses.replace(llama(1), rows=rows, notes=("of samples",), order="no other order")
    assert list(report.remarks()) == [
        "of samples",
        "torch modules without a partner: model.rotary",
        "JAX modules without a partner: rope",
        "torch parameters without a partner: lm_head.weight",
        "JAX parameters without a partner: step",
        "no other order",
        "a: layout not certain: b",
        "(model): values alone chose c",
        "f: not compared: g",
        "self-test: this batch shows 1 of 1 planted faults",
    ]
    assert list(dataclasses.replace(NOTHING, rows=rows[2:3]).remarks()) == []
