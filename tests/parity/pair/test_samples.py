"""Traces that keep samples of activations: the same elements on both sides, whatever the layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.core.mapping import parse_mapping
from bridge.parity import capture_jax, capture_torch, compare_traces
from bridge.parity.recorded.samples import Sampling, statistics
from bridge.parity.recorded.trace import TraceError, TraceSide
from bridge.parity.report_page.html import write_html
from tests.support.parity.bugs import BUGS
from tests.support.parity.pairs import build
from tests.support.parity.small_twins import BATCH, MAPPING, JaxMLP, TorchMLP

TABLE = parse_mapping(MAPPING, "small")


def test_an_axis_is_cut_by_its_size_wherever_it_lies() -> None:
    sampling = Sampling.of({8: 2, 32: 4}, {})
    rows, tokens = sampling.kept[8], sampling.kept[32]
    assert (rows, tokens[0], tokens[-1]) == ((0, 7), 0, 31)
    whole = np.arange(8 * 32 * 3 * 5).reshape(8, 32, 3, 5)
    expected = whole[np.ix_(rows, tokens)]
    np.testing.assert_array_equal(sampling.cut(whole), expected)
    np.testing.assert_array_equal(sampling.cut(whole.transpose(0, 2, 1, 3)), expected.transpose(0, 2, 1, 3))
    np.testing.assert_array_equal(sampling.cut(whole.transpose(1, 0, 2, 3)), expected.transpose(1, 0, 2, 3))
    np.testing.assert_array_equal(sampling.cut(whole.reshape(8 * 32, 15)), expected.reshape(8, 15))
    scores = np.arange(32 * 32).reshape(32, 32)
    np.testing.assert_array_equal(sampling.cut(scores), scores[np.ix_(tokens, tokens)])
    assert Sampling.of({8: 2, 32: 4}, {}) == sampling
    assert Sampling.of({8: 1}, {}).kept[8] == (7,)


def test_positions_are_not_at_one_distance() -> None:
    kept = Sampling.of({512: 16}, {}).kept[512]
    assert len(set(kept)) == 16
    assert len(set(np.diff(kept))) > 8


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ({5: 5}, "samples: expected between 1 and 4 positions of an axis of 5, got 5"),
        ({5: 0}, "samples: expected between 1 and 4"),
        ({5: 2, 7: 2, 9: 2}, "samples: expected one size of an axis or two"),
        ({6: 2}, r"samples: (up.weight|down/bias) \[[\d, ]+\] has an axis of 6, too"),
        ({2: 1, 4: 2}, r"has an axis of 8, too, so features would be taken for rows times tokens"),
        ({9: 2}, "samples: expected the size of an axis that a module's array has, got 9"),
    ],
)
def test_samples_that_cannot_be(tmp_path: Path, samples: dict[int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        capture_torch(TorchMLP(), BATCH, tmp_path / "torch", steps=0, samples=samples)
    with pytest.raises(ValueError, match=words):
        capture_jax(JaxMLP(), BATCH, tmp_path / "jax", steps=0, samples=samples)
    assert not list(tmp_path.iterdir())


def captured(folder: Path, pair: Any, samples: dict[int, int] | None) -> tuple[Path, Path]:
    options: dict[str, Any] = {"loss": pair.loss, "steps": 0, "samples": samples}
    capture_torch(pair.torch_model, pair.batch, folder / "torch", **options)
    capture_jax(pair.jax_model, pair.batch, folder / "jax", **options)
    return folder / "torch", folder / "jax"


# NCHW and NHWC; heads split and merged; tables of one row.
MODELS = [("convnet", {5: 2, 6: 3}), ("llama", {3: 2, 16: 5}), ("gpt2", {3: 2, 16: 5}), ("vit", {5: 2})]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "samples"), MODELS)
def test_right_models_are_the_same_in_all_that_whole_traces_compare(
    tmp_path: Path, name: str, samples: dict[int, int]
) -> None:
    reports = []
    for folder, chosen in (("whole", None), ("samples", samples)):
        (tmp_path / folder).mkdir()
        pair = build(name, 0)
        traces = captured(tmp_path / folder, pair, chosen)
        reports.append(compare_traces(*traces, mapping=pair.mapping, axes=pair.axes))
    for report in reports:
        assert report.same, report.summary()
    whole, sampled = (
        [(row.stage, row.name, row.leaf, row.verdict) for row in report.rows] for report in reports
    )
    assert sampled == whole
    assert reports[0].notes == ()
    kept = ", ".join(f"{number} of {size}" for size, number in samples.items())
    assert reports[1].notes[0].startswith("compared from samples of activations (" + kept)
    assert next(reports[1].remarks()) == reports[1].notes[0]
    write_html(reports[1], tmp_path / "report.html")
    assert "compared from samples of activations" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_bug_is_named_from_samples(tmp_path: Path) -> None:
    bug = next(
        bug for bug in BUGS if bug.pair == "llama" and bug.side == "jax" and bug.module.endswith("mlp")
    )
    pair = build("llama", 0)
    bug.apply(pair)
    traces = captured(tmp_path, pair, {3: 1, 16: 4})
    report = compare_traces(*traces, mapping=pair.mapping, axes=pair.axes)
    assert report.first_divergence is not None
    assert report.first_divergence.name == bug.module


def test_a_trace_of_samples_has_statistics_of_all(tmp_path: Path) -> None:
    for samples, name in ((None, "whole"), ({5: 2}, "samples")):
        capture_torch(TorchMLP(), BATCH, tmp_path / name, steps=1, samples=samples)
    sampled, whole = (
        json.loads((tmp_path / name / "trace.json").read_text()) for name in ("samples", "whole")
    )
    assert sampled["statistics"] == whole["statistics"]
    numbers = sampled["statistics"]["float64:0:outputs:"]
    array = TraceSide.read(tmp_path / "whole").record(None, "float64").calls[0].outputs[""]
    assert numbers["shape"] == [5, 6]
    assert numbers["norm"] == pytest.approx(np.linalg.norm(array))
    side = TraceSide.read(tmp_path / "samples")
    np.testing.assert_array_equal(side.record(None, "float64").calls[0].outputs[""], array[[0, 4]])
    assert side.record(None).gradients["up.weight"].shape == (8, 6)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("samples", "whole")]
    assert sizes[0] < sizes[1]


def test_statistics_count_what_is_not_finite() -> None:
    stats = statistics(np.asarray([1.0, np.nan, -3.0, np.inf]))
    assert (stats["nonfinite"], stats["mean"], stats["least"], stats["largest"]) == (2, -1.0, -3.0, 1.0)
    assert statistics(np.full(2, np.nan)) == {"shape": [2], "dtype": "float64", "nonfinite": 2}


def test_traces_of_other_samples_do_not_belong_together(tmp_path: Path) -> None:
    capture_torch(TorchMLP(), BATCH, tmp_path / "torch", steps=0, samples={5: 2})
    capture_jax(JaxMLP(), BATCH, tmp_path / "jax", steps=0)
    with pytest.raises(TraceError, match="expected traces with the same samples, got 2 of 5 and none"):
        compare_traces(tmp_path / "torch", tmp_path / "jax", mapping=TABLE)
