"""Metrics files as JSON lines and CSV: what is read, and what is said about files that are wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bridge.parity.curves.metrics_files import read_metrics
from bridge.parity.curves.series import MetricsError, Series, as_step
from bridge.relay.config import Leg, RelayConfig
from bridge.relay.job import Job, Metrics


def points(series: Series) -> list[tuple[int, float]]:
    assert (series.steps.dtype, series.values.dtype) == (np.int64, np.float64)
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def written(folder: Path, text: str, name: str = "m.jsonl") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_json_lines_by_metric(tmp_path: Path) -> None:
    lines = (
        '{"step": 1, "loss": 2.5, "phase": "warm", "ok": true}\n\n'
        '{"step": 3, "loss": 2, "lr": "1e-3"}\n{"step": 2.0, "loss": null, "lr": 0.5}\n'
    )
    metrics = read_metrics(written(tmp_path, lines))
    assert {name: points(series) for name, series in metrics.items()} == {
        "loss": [(1, 2.5), (3, 2.0)],
        "lr": [(2, 0.5), (3, 1e-3)],
    }


def test_of_two_values_at_a_step_the_last_counts(tmp_path: Path) -> None:
    lines = "".join(
        f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in [(1, 9), (2, 8), (3, 7), (2, 5)]
    )
    assert points(read_metrics(written(tmp_path, lines))["loss"]) == [(1, 9.0), (2, 5.0), (3, 7.0)]


def test_values_that_are_not_finite_are_read(tmp_path: Path) -> None:
    lines = '{"step": 0, "loss": NaN}\n{"step": 1, "loss": "inf"}\n{"step": 2, "loss": -Infinity}\n'
    assert str(read_metrics(written(tmp_path, lines))["loss"].values.tolist()) == "[nan, inf, -inf]"


def test_a_line_still_being_written_is_left_out_with_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path, '{"step": 0, "loss": 5.0}\n{"step": 1, "lo')
    with pytest.warns(UserWarning, match=r"m\.jsonl, line 2: the last line is incomplete"):
        assert points(read_metrics(path)["loss"]) == [(0, 5.0)]
    path = written(tmp_path, "step,loss\n0,5.0\n1,4.75", "m.csv")
    with pytest.warns(UserWarning, match=r"m\.csv, line 3: the last row is incomplete"):
        assert points(read_metrics(path)["loss"]) == [(0, 5.0)]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "m.jsonl",
            '{"step": 1, "loss": 2}\n{"step": \n{"step": 3}\n',
            r"m\.jsonl, line 2: expected one JSON object",
        ),
        ("m.jsonl", "[1]\n", r"m\.jsonl, line 1: expected a JSON object, found '\[1\]'"),
        (
            "m.jsonl",
            '{"step": 1, "loss": 2}\n{"loss": 1}\n',
            'line 2: expected a "step" as in other lines, found "loss"',
        ),
        ("m.jsonl", '{"step": 1.5, "loss": 2}\n', 'line 1: expected a whole number as "step", found 1.5'),
        ("m.jsonl", '{"step": 1}\n', "expected at least one metric with a number, found none"),
        ("m.jsonl", "", "expected at least one metric with a number, found none"),
        ("m.csv", "", "expected a heading and rows, found an empty file"),
        ("m.csv", "1,2\n3,4\n", "line 1: expected a heading such as step,loss, found numbers: '1,2'"),
        ("m.csv", "step,loss\n1,2\n3\n", "line 3: expected 2 cells as in the heading, found 1"),
        ("m.csv", "step,loss\n1,2\n2,x\n", "line 3: expected a number in column loss, found 'x'"),
        ("m.csv", "step,loss\nx,2\n", "line 2: expected a whole number as step, found 'x'"),
    ],
)
def test_errors_name_file_line_and_what_was_expected(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(MetricsError, match=said) as raised:
        read_metrics(written(tmp_path, text, name))
    assert str(tmp_path / name) in str(raised.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_bytes(b'{"step": 1, "loss": 2}\n{"s\xff": 1}\n')
    with pytest.raises(
        MetricsError, match=r"m\.jsonl, line 2: expected lines of metrics in UTF-8, got byte 0xff"
    ):
        read_metrics(tmp_path / "m.jsonl")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("m.csv", "Wall time,Step,loss\n1.5,10,2.5\n2.5,20,2.25\n"),
        ("m.tsv", "phase\tglobal_step\tloss\nwarm\t10\t2.5\nmain\t20\t2.25\n"),
        ("metrics", "loss,step,val\n2.5,10,\n,15,9\n2.25,20,\n"),
        ("metrics", '{"_step": 10, "loss": 2.5}\n{"_step": 20, "loss": 2.25}\n'),
    ],
)
def test_steps_and_formats_are_found_by_name_and_content(tmp_path: Path, name: str, text: str) -> None:
    assert points(read_metrics(written(tmp_path, text, name))["loss"]) == [(10, 2.5), (20, 2.25)]


@pytest.mark.parametrize(
    ("name", "text"), [("m.csv", "loss\n5\n4\n"), ("m.jsonl", '{"loss": 5}\n{"loss": 4}\n')]
)
def test_without_a_step_rows_are_numbered(tmp_path: Path, name: str, text: str) -> None:
    assert points(read_metrics(written(tmp_path, text, name))["loss"]) == [(0, 5.0), (1, 4.0)]


def test_the_metrics_file_of_a_relay_is_read(tmp_path: Path) -> None:
    config = RelayConfig.load("quick")
    job = Job(
        config.model, config.data, config.optimizer, Leg("torch", 1, "optim", steps=2), tmp_path, None, None
    )
    metrics = Metrics(replace(job, folder=tmp_path))
    metrics.add(4, 3.25, {"weights": {"embed.weight": 1.5}})
    metrics.add(5, float("nan"), {})
    assert str(points(read_metrics(job.metrics)["loss"])) == "[(4, 3.25), (5, nan)]"


@pytest.mark.parametrize(
    ("value", "step"),
    [
        (2**63 - 1, 2**63 - 1),
        (1 - 2**63, 1 - 2**63),
        (2**63, None),
        (-(2**63), None),
        (2.0**53, 2**53),
        (2.0**53 + 2, None),
        (1.5, None),
        ("7", 7),
        (True, None),
        (float("nan"), None),
        (None, None),
    ],
)
def test_steps_are_whole_numbers_of_64_bits(value: object, step: int | None) -> None:
    assert as_step(value) == step


def test_a_device_is_refused() -> None:
    with pytest.raises(
        MetricsError, match=r"^/dev/null: expected a file or a directory, got a pipe or a device"
    ):
        read_metrics("/dev/null")
