"""The relay's verdict: what it must call a failure, and that its table, JSON and picture show what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bridge.relay.chart import relay_figure, save_picture
from bridge.relay.config import RelayConfig
from bridge.relay.report import Hop, LegResult, RelayReport


def report(
    *,
    worst: float = 1e-7,
    ulp: int = 0,
    precision: tuple[str, ...] = (),
    fp32_error: float = 2e-7,
    same: bool = True,
) -> RelayReport:
    config = RelayConfig.load("quick")
    exact = [5.0 - 0.1 * step for step in range(config.steps)]
    fp32 = [loss * (1 + fp32_error) for loss in exact]
    relayed = [loss * (1 + worst) for loss in fp32]
    legs, first = [], 0
    for number, leg in enumerate(config.legs):
        hop = (
            Hop("a", "b", 31, ulp if number == 2 else 0, same or number != 2, 1000, 1100, 0.5)
            if number
            else None
        )
        losses = tuple(relayed[first : first + leg.steps])
        legs.append(LegResult(leg.title, precision, first, losses, 3.0, 2_000_000, hop))
        first += leg.steps
    return RelayReport(config, tuple(legs), tuple(fp32), tuple(exact), {"python": "3"})


def test_a_relay_within_its_promises_has_no_failures() -> None:
    assert report().failures() == []


def test_one_rounding_of_the_loss_is_not_held_against_a_relay() -> None:
    assert report(worst=9e-8, fp32_error=1e-8).failures() == []


@pytest.mark.parametrize(("worst", "fp32_error"), [(5.8e-7, 3e-7), (-5.8e-7, 9e-7)])
def test_a_relay_nearly_three_times_as_far_or_as_close_is_within_its_promises(
    worst: float, fp32_error: float
) -> None:
    measured = report(worst=worst, fp32_error=fp32_error)
    assert measured.closeness == pytest.approx(2.93 if worst > 0 else 1 / 2.8, rel=0.01)
    assert measured.failures() == []


def test_fp32_legs_before_a_bfloat16_one_keep_their_tolerance() -> None:
    mixed = report(worst=1e-3)
    legs = (*mixed.legs[:3], replace(mixed.legs[3], precision=("bfloat16",)))
    assert replace(mixed, legs=legs).failures() == [
        "loss: expected within 1e-05 of the fp32 reference, got 1.00e-03, first exceeded at step 0 "
        "(leg 1 (torch x3 fsdp))"
    ]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            report(ulp=1, same=False),
            "hop to leg 3: expected the same 31 tensors bit for bit on both sides, got 1",
        ),
        (report(same=False), "got 0 ULP but different tensors"),
        (report(worst=2e-5), "loss: expected within 1e-05 of the fp32 reference, got 2.00e-05"),
        (report(worst=9e-7, fp32_error=2e-7), "distance to float64: expected within a factor of 3"),
        (report(worst=-9e-7, fp32_error=9e-7), "distance to float64: expected within a factor of 3, got 0.1"),
        (report(fp32_error=0.0), "references: expected float64 losses that differ from the fp32 ones"),
        (report(fp32_error=0.0, precision=("bfloat16",)), "references: expected float64 losses that differ"),
    ],
)
def test_each_broken_promise_is_named(broken: RelayReport, message: str) -> None:
    assert any(message in failure for failure in broken.failures())


def test_low_precision_losses_may_differ_more_but_not_without_bound_nor_may_the_state() -> None:
    assert report(worst=5e-3, precision=("bfloat16",)).failures() == []
    assert "within 0.01 of the fp32" in report(worst=2e-2, precision=("bfloat16",)).failures()[0]
    assert len(report(worst=1e-3, precision=("bfloat16",), ulp=4).failures()) == 1


def with_repeats(measured: RelayReport, number: int = 4) -> RelayReport:
    """With losses of repeats of the fp32 reference that are off by some 1e-7 of it."""
    noise = 1e-7 * np.random.default_rng(0).standard_normal((number, measured.config.steps))
    repeats = np.array(measured.reference_fp32) * (1 + noise)
    return replace(measured, repeats=tuple(map(tuple, repeats.tolist())))


def departing_in_leg_3(by: float) -> RelayReport:
    right = report()
    losses = tuple(loss * (1 + by) for loss in right.legs[2].losses)
    return replace(right, legs=(*right.legs[:2], replace(right.legs[2], losses=losses), right.legs[3]))


def test_losses_in_the_band_of_repeats_are_the_same_experiment() -> None:
    measured = with_repeats(report())
    curves = measured.curves()
    assert measured.failures() == []
    assert (curves.verdict, curves.verdict_between(4, 6)) == ("same experiment", "same")
    assert curves.fp32 is not None
    assert curves.fp32.noise is not None
    assert 1e-7 < curves.fp32.noise.band < 3e-6
    assert "same experiment; band of 4 repeats" in measured.summary()


def test_losses_beyond_the_band_of_repeats_fail_by_step_and_leg() -> None:
    # Within the tolerance: only the band shows it.
    measured = with_repeats(departing_in_leg_3(8e-6))
    assert departing_in_leg_3(8e-6).curves().verdict == "same experiment"
    wanted = "got outside from step 4 (leg 3 (torch x2 zero2)), by at most +8.2e-06 of the loss"
    assert any(failure.endswith(wanted) for failure in measured.failures())
    heading, *rows = measured.table()
    assert [row[heading.index("curve")] for row in rows] == ["same", "same", "from 4", "same"]
    assert measured.as_dict()["curves"]["verdict"] == "different from step 4"


def test_repeats_of_the_fp32_reference_say_nothing_of_bfloat16_legs() -> None:
    measured = departing_in_leg_3(5e-3)
    legs = (*measured.legs[:2], replace(measured.legs[2], precision=("bfloat16",)), measured.legs[3])
    mixed = with_repeats(replace(measured, legs=legs))
    assert mixed.failures() == []
    assert mixed.curves().verdict == "same experiment"
    low = tuple(replace(leg, precision=("bfloat16",)) for leg in measured.legs)
    assert with_repeats(replace(measured, legs=low)).curves().fp32 is None


@pytest.mark.parametrize("step", [0, 1])
def test_a_loss_that_is_not_a_number_is_a_failure(step: int) -> None:
    good = report()
    losses = list(good.legs[0].losses)
    losses[step] = float("nan")
    broken = replace(good.legs[0], losses=tuple(losses))
    assert "got inf" in replace(good, legs=(broken, *good.legs[1:])).failures()[0]


def test_json_table_and_picture_show_what_was_measured(tmp_path: Path) -> None:
    measured = report()
    measured.write(tmp_path / "report.json")
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored["failures"] == []
    assert stored["largest_differences"]["relay_fp32"] == pytest.approx(1e-7, rel=1e-6)
    assert [leg["hop"] and leg["hop"]["max_ulp"] for leg in stored["legs"]] == [None, 0, 0, 0]

    heading, *rows = measured.table()
    assert [row[0] for row in rows] == [leg.title for leg in measured.legs]
    assert [row[heading.index("hop ULP")] for row in rows] == ["-", "0", "0", "0"]
    assert dict(zip(heading, rows[1], strict=True)) == {
        **{"leg": "jax x4 zero1", "steps": "2-3", "first loss": "4.80000", "last loss": "4.70000"},
        **{"vs fp32": "1.0e-07", "vs fp64": "3.0e-07", "curve": "same", "hop ULP": "0"},
        **{"MB": "2.0", "hop s": "0.5", "leg s": "3.0"},
    }
    assert measured.summary().splitlines() == [
        "vs fp32, vs fp64: largest relative loss difference from the run that never hopped. curve: are the leg's "
        "losses the same experiment as the fp32 run's? hop ULP: largest distance of the converted state over 31 "
        "tensors. MB: the leg's checkpoint.",
        "Distance to float64: relay 3.0e-07, fp32 reference 2.0e-07, ratio 1.50.",
        "Losses of relay and fp32 reference: same experiment; tolerance 1e-05, as no run was repeated.",
    ]
    assert repr(measured) == "<RelayReport: good, 4 legs, 8 steps>"

    figure = relay_figure(measured)
    drawn = [y for line in figure.axes[0].lines for y in line.get_ydata() if len(line.get_ydata()) == 2]
    assert measured.losses[0] in drawn
    # A dotted line before each leg but the first.
    hops = [leg.first_step - 0.5 for leg in measured.legs][1:]
    for axis in figure.axes:
        assert [line.get_xdata()[0] for line in axis.lines if line.get_linestyle() == ":"] == hops
    save_picture(measured, tmp_path / "relay.png")
    assert (tmp_path / "relay.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "tolerance"),
    [(("bfloat16",), 1e-2), (("mxfp8 weights",), 2e-2), (("bfloat16", "float8_e4m3fn moments"), 2e-2)],
)
def test_the_coarsest_leg_says_how_far_losses_may_be(words: tuple[str, ...], tolerance: float) -> None:
    assert report(worst=0.9 * tolerance, precision=words).failures() == []
    (failure,) = report(worst=1.1 * tolerance, precision=words).failures()
    assert f"within {tolerance:g} of the fp32" in failure
