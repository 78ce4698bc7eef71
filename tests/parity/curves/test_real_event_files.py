"""TensorBoard event files that other programs wrote, kept in ``events/``: six losses each, and other things.

- ``torch-2.13.0``: ``torch.utils.tensorboard.SummaryWriter`` over tensorboard 2.21.0. Its ``add_scalar`` writes a
  ``simple_value``, with ``new_style=True`` a tensor of float, with ``double_precision=True`` a tensor of double.
- ``tensorboardX-2.6.5``: ``tensorboardX.SummaryWriter.add_scalar``.
- ``tensorflow-2.21.0``: ``tf.summary.scalar`` (tensors); ``tensorflow-2.21.0-v1``: ``tf.compat.v1.summary.FileWriter``
  with ``simple_value``.

The first three hold a text and a NaN too, the first two a histogram.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bridge.parity.curves.compare import compare_runs
from bridge.parity.curves.metrics_files import read_metrics

EVENTS = Path(__file__).parent / "events"
LOSSES = [(10 * step, 3.0 - step / 8) for step in range(6)]
SCALARS = {
    "torch-2.13.0": {"loss", "as tensor", "double", "nan"},
    "tensorboardX-2.6.5": {"loss", "nan"},
    "tensorflow-2.21.0": {"loss", "half", "nan"},
    "tensorflow-2.21.0-v1": {"loss"},
}


@pytest.mark.parametrize("writer", SCALARS)
def test_every_scalar_of_a_real_writer_is_read_and_nothing_else(writer: str) -> None:
    metrics = read_metrics(EVENTS / f"{writer}.tfevents")
    assert set(metrics) == SCALARS[writer]
    for name in {"loss", "as tensor"} & set(metrics):
        assert list(zip(metrics[name].steps.tolist(), metrics[name].values.tolist(), strict=True)) == LOSSES
    if "nan" in metrics:
        assert (metrics["nan"].steps.tolist(), math.isnan(metrics["nan"].values[0])) == ([3], True)


def test_tensors_of_double_keep_their_digits() -> None:
    series = read_metrics(EVENTS / "torch-2.13.0.tfevents")["double"]
    assert series.values.tolist() == [0.1 * step for step, _ in LOSSES]


def test_runs_logged_by_different_writers_compare_equal() -> None:
    files = [EVENTS / f"{writer}.tfevents" for writer in SCALARS]
    for file in files[1:]:
        assert compare_runs(files[:1], [file]).same
