"""Runs compared by their files: verdicts, steps that differ, values that are not finite, the growth of rounding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bridge.parity.curves.compare import compare_runs, compare_series
from bridge.parity.curves.report import CurvesReport
from bridge.parity.curves.series import MetricsError, Series
from bridge.parity.curves.verdict import growth

STEPS = 300
BASE = 2 + 3 * np.exp(-np.arange(STEPS) / 60)


def write(path: Path, values: np.ndarray, every: int = 1) -> Path:
    lines = [json.dumps({"step": k, "loss": float(values[k])}) for k in range(0, len(values), every)]
    path.write_text("\n".join(lines) + "\n")
    return path


def experiment(folder: Path, name: str, runs: int, seed: int, change: np.ndarray | float = 1.0) -> list[Path]:
    """Runs of one experiment: seeds move a whole curve by 0.1 % and every step by 0.5 %; ``change`` is the truth."""
    random = np.random.default_rng(seed)
    curves = BASE * (
        1 + 1e-3 * random.standard_normal((runs, 1)) + 5e-3 * random.standard_normal((runs, STEPS))
    )
    return [write(folder / f"{name}{k}.jsonl", curve) for k, curve in enumerate(curves * change)]


def from_step(k: int, factor: float, stop: int = STEPS) -> np.ndarray:
    change = np.ones(STEPS)
    change[k:stop] = factor
    return change


@pytest.mark.parametrize(("a", "b"), [(3, 3), (4, 4), (3, 2)])
@pytest.mark.parametrize("factor", [1.02, 0.98])
def test_a_change_of_two_percent_is_found_where_it_begins(
    tmp_path: Path, a: int, b: int, factor: float
) -> None:
    for seed in range(2):
        left = experiment(tmp_path, "a", a, seed)
        right = experiment(tmp_path, "b", b, 100 + seed, from_step(120, factor))
        report = compare_runs(left, right)
        first = report.departures[0]
        assert report.noise is not None
        assert abs(first.first - 120) <= report.noise.window // 2
        assert report.verdict == f"different from step {first.first}"
        assert first.mean == pytest.approx(factor - 1, abs=6e-3)
        assert (first.kind, report.same) == ("band", False)
        assert report.noise.p <= 0.05


def test_runs_of_one_experiment_are_the_same(tmp_path: Path) -> None:
    report = compare_runs(experiment(tmp_path, "a", 3, 1), experiment(tmp_path, "b", 3, 2))
    assert (report.same, report.verdict, report.steps) == (True, "same experiment", STEPS)


def test_stray_points_are_no_departure_and_a_stretch_ends(tmp_path: Path) -> None:
    stray = from_step(0, 1.0)
    stray[[40, 110, 111, 200]] = 1.5
    a = experiment(tmp_path, "a", 3, 1)
    assert compare_runs(a, experiment(tmp_path, "b", 3, 2, stray)).same
    report = compare_runs(a, experiment(tmp_path, "b", 3, 2, from_step(100, 1.03, 180)))
    [departure] = report.departures
    assert report.noise is not None
    assert abs(departure.last - 179) <= report.noise.window // 2


def test_an_allowed_difference_is_no_departure(tmp_path: Path) -> None:
    a, b = experiment(tmp_path, "a", 3, 1), experiment(tmp_path, "b", 3, 2, from_step(0, 1.02))
    assert not compare_runs(a, b).same
    assert compare_runs(a, b, rtol=0.05).same


def single(folder: Path, a: np.ndarray, b: np.ndarray, every: int = 1, **options: float) -> CurvesReport:
    return compare_runs([write(folder / "a.jsonl", a)], [write(folder / "b.jsonl", b, every)], **options)


def test_two_single_runs_are_compared_exactly(tmp_path: Path) -> None:
    other = BASE.copy()
    other[70] *= 1 + 1e-9
    report = single(tmp_path, BASE, other)
    [departure] = report.departures
    assert (departure.kind, departure.first, departure.last) == ("rtol", 70, 70)
    assert report.largest == pytest.approx(1e-9, rel=1e-5)
    assert report.noise is None
    assert "Noise was not estimated" in report.summary()
    assert single(tmp_path, BASE, other, rtol=1e-8).same
    assert single(tmp_path, BASE, BASE).same


def test_the_growth_of_rounding_is_measured(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    size = np.minimum(2e-8 * np.exp(np.arange(STEPS) / 15), 1e-2) * random.uniform(0.5, 1, STEPS)
    fitted = single(tmp_path, BASE, BASE * (1 + size * random.choice([-1, 1], STEPS))).growth
    assert fitted is not None
    assert fitted.rate == pytest.approx(1 / 15, rel=0.05)
    assert 25 <= fitted.first_step <= 45
    assert "as rounding does" in fitted.summary()
    jump = single(tmp_path, BASE, BASE * from_step(50, 1.01)).growth
    assert jump is not None
    assert (jump.first_step, jump.rate) == (50, None)
    assert "does not grow exponentially" in jump.summary()
    seeds = single(tmp_path, BASE, BASE * (1 + 1e-2 * random.standard_normal(STEPS))).growth
    assert seeds is not None
    assert "does not grow exponentially" in seeds.summary()
    assert single(tmp_path, BASE, BASE * (1 + 1e-9)).growth is None


def test_common_steps_alone_are_compared_and_the_rest_is_told(tmp_path: Path) -> None:
    report = single(tmp_path, BASE, BASE[:205], every=10)
    assert (report.steps, report.first_step, report.last_step, report.same) == (21, 0, 200, True)
    [note] = report.notes
    assert note.endswith(
        "a.jsonl: 279 of its 300 steps (the last one 299) left out, because other runs lack them"
    )


def test_a_value_that_is_not_finite_on_one_side_is_a_departure(tmp_path: Path) -> None:
    bad = BASE.copy()
    bad[[150, 151, 299]] = np.nan, np.inf, np.nan
    report = single(tmp_path, BASE, bad)
    assert [(departure.kind, departure.first, departure.last) for departure in report.departures] == [
        ("not finite", 150, 151),
        ("not finite", 299, 299),
    ]
    a, b = experiment(tmp_path, "a", 3, 1), experiment(tmp_path, "b", 3, 2)
    write(b[1], bad)
    assert compare_runs(a, b).verdict == "different from step 150"
    both = single(tmp_path, bad, bad)
    assert both.same
    assert both.notes == ("3 steps left out: both sides have values that are not finite there",)
    nothing = np.full(5, np.nan)
    assert single(tmp_path, nothing, nothing).notes[1] == "no step has finite values on both sides"
    assert single(tmp_path, BASE[:5], nothing).verdict == "different from step 0"


def test_equal_repeats_are_told(tmp_path: Path) -> None:
    a, b = experiment(tmp_path, "a", 2, 1), experiment(tmp_path, "b", 2, 2)
    [note] = compare_runs([*a, a[0]], b).notes
    assert "a0.jsonl and" in note
    assert "equal bit for bit" in note


@pytest.mark.parametrize("steps", [1, 2, 4, 7])
def test_curves_of_a_few_steps(tmp_path: Path, steps: int) -> None:
    a = [write(tmp_path / f"a{k}.jsonl", BASE[:steps] + k) for k in range(3)]
    assert compare_runs(a, a[:1]).same
    far = [write(tmp_path / f"b{k}.jsonl", BASE[:steps] + 1000 + k) for k in range(3)]
    report = compare_runs(a, far)
    assert report.verdict == "different from step 0"
    assert len(report.table()) == steps + 1


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", BASE)
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"step": 1001, "loss": 1, "lr": 2}\n')
    with pytest.raises(MetricsError, match=r"odd.jsonl: expected the metric 'perplexity', found loss, lr"):
        compare_runs([odd], [a], "perplexity")
    with pytest.raises(
        MetricsError, match=r"found none: .*a.jsonl has 300 steps, 0, 1, 2, ... up to 299; .*odd"
    ):
        compare_runs([a], [odd])
    for wrong in ({"alpha": 0}, {"alpha": 1.0}, {"window": 4}, {"window": -1}, {"rtol": -1.0}):
        with pytest.raises(MetricsError, match=f"{next(iter(wrong))}: expected"):
            compare_runs([a], [a], **wrong)
    with pytest.raises(MetricsError, match="expected one run or more on each side, found 1 and 0"):
        compare_runs([a], [])
    with pytest.raises(MetricsError, match="found one path"):
        compare_runs(str(a), [a])


def test_the_curves_of_a_report_are_those_of_its_own_sides(tmp_path: Path) -> None:
    left, right = experiment(tmp_path, "a", 3, 1), experiment(tmp_path, "b", 3, 2, 2.0)
    report = compare_runs(left, right)
    curves = report.curves
    # Smoothing changes the ends of a falling curve.
    inside = slice(STEPS // 4, -STEPS // 4)
    assert curves.mean_a[inside] == pytest.approx(BASE[inside], rel=0.01)
    assert curves.mean_b[inside] == pytest.approx(2 * BASE[inside], rel=0.01)
    assert (curves.half > 0).all()
    assert report.noise is not None
    assert np.median(curves.half / curves.mean_a) == report.noise.band < 0.02
    # Three runs on each side.
    assert curves.half == pytest.approx(report.noise.critical * np.sqrt(2 / 3) * curves.spread)


def in_memory(a: list[float], b: list[float], **options: float) -> CurvesReport:
    runs = [[(name, Series(np.arange(len(run)), np.array(run)))] for name, run in (("a", a), ("b", b))]
    return compare_series(*runs, **options)


def test_a_report_of_single_runs_in_full() -> None:
    report = in_memory([4.0, 2.0, 1.0, 0.5, 3.0], [4.0, 2.5, 1.0, 0.375, np.nan], rtol=0.125)
    assert report.table() == [
        ("verdict", "step", "A", "B", "difference", "band"),
        ("within", "0", "4", "4", "0 %", "12.5 %"),
        ("beyond", "1", "2", "2.5", "+25 %", "12.5 %"),
        ("within", "2", "1", "1", "0 %", "12.5 %"),
        ("beyond", "3", "0.5", "0.375", "-25 %", "12.5 %"),
        ("not finite", "4", "nan", "nan", "nan %", "nan %"),
    ]
    assert report.summary().splitlines() == [
        "different from step 1: loss of 1 + 1 runs, 5 common steps 0 to 4",
        "from step 1 until step 1 (1 step): beyond the tolerance, B is +25 % from A on average, +25 % where it is "
        "furthest",
        "from step 3 until step 3 (1 step): beyond the tolerance, B is -25 % from A on average, -25 % where it is "
        "furthest",
        "from step 4 to the end (1 step): values that are not finite (NaN, infinity) on one side only",
        "Noise was not estimated: one run on each side. Largest relative difference 0.25, allowed 0.125. Give repeats "
        "with other seeds (three on each side) to learn what seeds do.",
        "The difference exceeds rounding from step 1 on, where it is 0.25; it does not grow exponentially.",
    ]
    assert report.as_dict().keys() == {"same", "verdict", *vars(report)} - {"curves"}


def test_a_table_has_steps_at_even_distances_and_the_begin_of_each_stretch() -> None:
    a = np.ones(101)
    b = a * np.where((np.arange(101) >= 37) & (np.arange(101) < 45), 1.5, 1.0)
    (_, *rows) = in_memory(list(a), list(b)).table()
    assert [row[1] for row in rows if row[0] == "beyond"] == ["37", "40"]
    assert [row[1] for row in rows if row[0] == "within"] == [str(k) for k in range(0, 101, 10) if k != 40]


GROWS = ", and grows by a factor of e in 2 steps (R2 1.00)"


@pytest.mark.parametrize(
    ("rate", "size", "said"),
    [
        (0.5, 2e-7, f"{GROWS}, as rounding does in two runs of one experiment."),
        (0.5, 2e-5, f"{GROWS}."),
        (-0.5, 2e-7, "; it does not grow exponentially."),
    ],
)
def test_growth_says_whether_it_is_that_of_rounding(rate: float, size: float, said: str) -> None:
    difference = size * np.exp(rate * np.arange(8))
    fitted = growth(np.arange(8), difference)
    assert fitted is not None
    start = f"The difference exceeds rounding from step 0 on, where it is {size:.2g}"
    assert fitted.summary() == start + said
