"""Which steps stay, and the metrics that say which one is the best."""

from __future__ import annotations

import math

import pytest

from bridge.core.formats.saving.steps import METRICS_FILE, Retention, read_metrics, render_metrics
from bridge.core.formats.tensors.base import CheckpointError


def test_the_latest_steps_the_period_and_the_best_stay() -> None:
    retention = Retention(max_to_keep=2, keep_period=10, best_metric="loss")
    assert retention.superseded([8, 9, 10, 11, 12], best=9, saved=12) == [8]
    assert retention.superseded([8, 9, 10, 11, 12], best=None, saved=12) == [8, 9]
    assert Retention(max_to_keep=1).superseded([0, 1, 2], best=None, saved=2) == [0, 1]
    assert Retention(keep_period=2).superseded([1, 2, 3], best=None, saved=3) == []


def test_the_step_that_was_just_saved_stays_even_if_others_have_later_numbers() -> None:
    assert Retention(max_to_keep=1).superseded([3, 7, 9], best=None, saved=3) == [7]


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 5)])
def test_the_best_is_the_latest_of_equal_ones_and_never_no_number(mode: str, best: int) -> None:
    retention = Retention(best_metric="loss", best_mode=mode)  # type: ignore[arg-type]  # a parameter of the test
    values = {0: math.nan, 1: 0.5, 2: 0.5, 3: 0.75, 4: 1.0, 5: 1.0}
    metrics = {step: {"loss": value} for step, value in values.items()} | {6: {"accuracy": 9.0}, 7: {}}
    assert retention.best(metrics) == best
    assert retention.best({7: {}}) is None
    assert Retention().best(metrics) is None


@pytest.mark.parametrize(
    "options", [{"max_to_keep": 0}, {"keep_period": -1}, {"max_to_keep": True}, {"best_mode": "least"}]
)
def test_options_out_of_range_are_refused_by_name(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Retention(**options)


def test_metrics_come_back_and_damaged_ones_are_named(tmp_path) -> None:
    (tmp_path / METRICS_FILE).write_bytes(render_metrics({"loss": 0.1, "tokens": 7, "worst": math.inf}))
    assert read_metrics(tmp_path) == {"loss": 0.1, "tokens": 7.0, "worst": math.inf}
    (tmp_path / METRICS_FILE).write_text('{"loss": ')
    for text in ('{"loss": ', "[]"):
        (tmp_path / METRICS_FILE).write_text(text)
        with pytest.raises(CheckpointError, match=r"twinshard_metrics\.json: expected the metrics of a step"):
            read_metrics(tmp_path)
    assert read_metrics(tmp_path / "none") == {}
    with pytest.raises(ValueError, match="metrics: note: expected a number, got 'good'"):
        render_metrics({"note": "good"})  # type: ignore[dict-item]  # the case
