"""Models that no one here wrote, unedited, train as they do alone: both engines, all strategies, unlike rows.

The models come from packages of PyPI (tests/support/third_party.py); where they cannot be had, their tests are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.jax_impl.third_party_programs import split
from tests.support.jax_impl.third_party_runs import (
    PROGRAMS,
    Result,
    built,
    differences,
    named,
    plain,
    sharded,
)
from tests.support.third_party import Unreachable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:pjit engine"),
    # The models' own, which are not edited.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TOLERANCE = 1e-6


@pytest.fixture(params=list(PROGRAMS))
def name(request: pytest.FixtureRequest) -> str:
    try:
        built(request.param, None)
    except Unreachable as error:
        pytest.skip(f"cannot be downloaded: {error}")
    return request.param


@pytest.fixture
def assert_equal_to_plain(name: str, record_property: Any) -> Callable[[Result], None]:
    """The differences go into the file of ``--junitxml``: whence the table of results."""
    return partial(_assert_equal_to_plain, name, record_property)


def _assert_equal_to_plain(name: str, record_property: Any, run: Result) -> None:
    losses, arrays = differences(run, plain(name))
    record_property("losses", losses)
    record_property("arrays", arrays)
    assert losses < TOLERANCE
    assert arrays < TOLERANCE


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_an_unedited_model_trains_as_alone(name, strategy, engine, assert_equal_to_plain):
    assert_equal_to_plain(sharded(name, engine, strategy))


def test_an_unedited_model_trains_as_alone_on_two_axes(name, assert_equal_to_plain):
    if built(name, None).one_axis:
        pytest.skip("the model itself names one axis")
    assert_equal_to_plain(sharded(name, "shard_map", "hsdp", {"outer": 2, "inner": 2}))


def test_every_weight_that_is_compared_matters_to_the_loss(name):
    """Each moves, else its equality would say nothing; rows and batches differ."""
    program, after = built(name, None), plain(name)
    before = named(split(program.model)[0])
    still = [path for path, array in before.items() if np.array_equal(array, after.weights[path])]
    assert not set(still) - set(after.idle)
    assert len(set(after.losses)) == len(after.losses)
