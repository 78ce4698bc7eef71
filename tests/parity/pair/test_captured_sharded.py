"""Sharded torch models captured on ranks: the trace of one process with all rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bridge.parity import capture_torch
from bridge.parity.pair.distance import epsilon
from bridge.parity.pair.recording import Leaves
from bridge.parity.pair.trace import TraceSide
from tests.support.parity.sharded_captures import ROWS, Net, capture, square_loss
from tests.support.ranks import RankError, RankGroup


def near(found: Leaves, expected: Leaves, eps: float, what: str) -> None:
    assert list(found) == list(expected), what
    for name, one in expected.items():
        assert found[name].shape == one.shape, f"{what} {name}"
        assert found[name].dtype == one.dtype, f"{what} {name}"
        error = np.linalg.norm((found[name] - one).astype(np.float64))
        assert error <= 30 * eps * max(np.linalg.norm(one.astype(np.float64)), 1e-3), f"{what} {name} {error}"


def equal_traces(found: TraceSide, expected: TraceSide, dtypes: tuple[str, ...]) -> None:
    for name, one in expected.weights().items():
        np.testing.assert_array_equal(found.weights()[name], one)
    for name, one in expected.batch().items():
        np.testing.assert_array_equal(found.batch()[name], one)
    for dtype in dtypes:
        eps = epsilon(dtype)
        mine, theirs = found.record(None, dtype), expected.record(None, dtype)
        assert mine.loss == pytest.approx(theirs.loss, rel=30 * eps)
        near(mine.gradients, theirs.gradients, eps, f"{dtype} gradients")
        assert [(one.path, one.number, one.kind, one.parent) for one in mine.calls] == [
            (one.path, one.number, one.kind, one.parent) for one in theirs.calls
        ]
        for one, other in zip(mine.calls, theirs.calls, strict=True):
            near(one.inputs, other.inputs, eps, f"{dtype} {one.path} inputs")
            near(one.outputs, other.outputs, eps, f"{dtype} {one.path} outputs")
            near(one.gradients, other.gradients, eps, f"{dtype} {one.path} gradients")
        if expected.steps:
            trained, other_trained = found.train([], dtype), expected.train([], dtype)
            assert trained.losses == pytest.approx(other_trained.losses, rel=100 * eps)
            near(trained.last, other_trained.last, 100 * eps, "trained")


@pytest.mark.parametrize("loss", ["square", None])
@pytest.mark.parametrize("way", ["fsdp2", "ours", "tensor_parallel"])
def test_a_sharded_model_is_captured_as_one_process_would(
    tmp_path: Path, ranks: RankGroup, way: str, loss: str | None
) -> None:
    done = ranks.run(2, capture, way, str(tmp_path / "mine"), {"loss": loss, "reference": True, "steps": 2})
    assert done == [(0, True), (0, True)]
    capture_torch(Net(), ROWS, tmp_path / "plain", loss=square_loss if loss else None, steps=2)
    found, expected = TraceSide.read(tmp_path / "mine"), TraceSide.read(tmp_path / "plain")
    equal_traces(found, expected, ("float64", "float32"))
    assert len(found.notes) == 1, found.notes
