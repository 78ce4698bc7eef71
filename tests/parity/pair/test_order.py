"""The run with the rows of the batch in another order: a second estimate of rounding, where the order means nothing."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from bridge.core.mapping import parse_mapping
from bridge.parity.compare.parity import parity
from bridge.parity.jax.side import JaxSide
from bridge.parity.partners.runs import Runs
from bridge.parity.partners.weight_map import WeightMap
from bridge.parity.recorded.recording import in_rows
from bridge.parity.stages.compare import OrderNoise, rerun_reordered
from bridge.parity.torch.side import TorchSide
from tests.parity.pair.test_edges import both
from tests.support.parity.small_twins import BATCH, MAPPING, JaxMLP, TorchMLP, jax_loss, torch_loss

TABLE = parse_mapping(MAPPING, "small")
SUMMANDS = np.asarray([4096, -4096, 0.37, 0.11, 0.73, 0.59, 0.31, 0.17], np.float32)
"""Their sum is exact to float32 from left to right, and off by 1e-4 in most other orders."""


def linear(f: Any, x: Any) -> Any:
    return f(x)


def by_place(f: Any, x: Any) -> Any:
    """Each row with a part of its neighbour, as after a reshape that takes one axis for another, but the last alone."""
    return f(x) + f(x[np.asarray([*range(1, len(x)), len(x) - 1])]) ** 2


def torch_sum(model: Any, batch: Any) -> Any:
    return batch[:, 0].cumsum(0)[-1] * (model(batch[:, 1:]) ** 2).mean()


def jax_sum(model: Any, batch: Any) -> Any:
    return jnp.cumsum(batch[:, 0])[-1] * (model(batch[:, 1:]) ** 2).mean()


def other_order(torch_side: Any, jax_side: Any, batch: Any) -> tuple[Runs, OrderNoise]:
    runs = Runs(torch_side, jax_side, batch, "float32")
    weights = WeightMap.of(TABLE, torch_side.weights(), jax_side.weights())
    return runs, rerun_reordered(runs, batch, weights)


def test_rounding_that_only_another_order_shows_raises_the_floor() -> None:
    x = np.random.default_rng(0).standard_normal((len(SUMMANDS), 6)).astype(np.float32)
    batch = np.concatenate([SUMMANDS[:, None], x], 1)
    report = parity(TorchMLP().eval(), JaxMLP(), batch, mapping=TABLE, loss=(torch_sum, jax_sum), steps=0)
    assert report.same, report.summary()
    assert not report.order
    for row in (*report.stage("loss"), *report.stage("gradients")):
        assert 1e-5 < row.floor < 1e-3, row


@pytest.mark.slow
def test_no_calls_are_replaced_and_the_gradients_are_those_of_the_batch() -> None:
    sides = TorchSide(TorchMLP().eval(), torch_loss), JaxSide(JaxMLP(), jax_loss)
    runs, noise = other_order(*sides, BATCH)
    assert noise.remark == ""
    assert set(noise.gradients) == set(runs.jax_high.gradients)
    for path, other, side in (("up", "0", runs.torch), ("up", "0", runs.jax)):
        recorded = (runs.torch_low if side is runs.torch else runs.jax_low).find(path)
        assert recorded is not None
        # With its own inputs, those of the batch as it is.
        again = side.rerun("float32", path, 0, {})
        np.testing.assert_allclose(again.outputs[""], recorded.outputs[""], rtol=1e-6)
        np.testing.assert_array_equal(recorded.inputs[other], BATCH)


@pytest.mark.fast_cases("loss1")
@pytest.mark.parametrize("loss", [None, (torch_loss, jax_loss)])
def test_a_model_that_takes_a_rows_place_for_its_content_is_named(loss: Any) -> None:
    report = both(linear, by_place, loss=loss, steps=0)
    assert report.order.startswith(
        "the JAX model depends on the order of the batch's rows, the other one does"
    )
    assert report.order in list(report.remarks())
    assert both(by_place, linear, loss=loss, steps=0).order.startswith("the torch model depends")
    report = both(by_place, by_place, loss=loss, steps=0)
    assert report.same, report.summary()
    assert report.order.startswith("both models depend on the order of the batch's rows: in torch ")


def test_a_probes_numbers_go_with_their_rows() -> None:
    assert both(linear, linear, steps=0).order == ""
    # Time before the batch, in the output.
    batch = np.random.default_rng(0).standard_normal((5, 3, 6)).astype(np.float32)
    report = both(linear, lambda f, x: f(x).transpose(1, 0, 2), batch=batch, steps=0)
    assert report.order == ""
    numbers = np.arange(12).reshape(4, 3)
    np.testing.assert_array_equal(in_rows(numbers, [2, 0, 1]), numbers[:, [2, 0, 1]])
    assert in_rows(numbers, [1, 0]) is numbers
    assert in_rows(numbers, None) is numbers


@pytest.mark.slow
def test_one_row_has_one_order() -> None:
    _, noise = other_order(TorchSide(TorchMLP().eval()), JaxSide(JaxMLP()), BATCH[:1])
    assert noise == OrderNoise()
