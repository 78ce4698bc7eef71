"""Which tensors of a checkpoint are weights, where two checkpoints have equal names."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.core.mapping import MappingError
from bridge.core.mapping.states.equal_names import SOURCE, table_of_equal_names
from tests.support.bridge.memory_reader import MemoryReader


def reader(format: str, *names: str) -> MemoryReader:
    return MemoryReader(format, {name: np.zeros(2) for name in names})


@pytest.mark.parametrize(
    ("format", "tensors", "weights"),
    [
        ("dcp", ["model.a.w", "model.b", "optimizer.state.a.w.exp_avg"], ["a.w", "b"]),
        ("dcp", ["model.a.w", "model.b", "optimizer.state.model.a.w.exp_avg"], ["model.a.w", "model.b"]),
        # nnx keeps a weight below `value`, and a weight may have this name.
        ("orbax", ["params/a/value", "params/b/value", "opt_state/0/mu/a/value"], ["a", "b"]),
        ("orbax", ["a/w", "value"], ["a/w", "value"]),
        # A weight may have the name of a root.
        ("orbax", ["b", "weights"], ["b", "weights"]),
        ("orbax", ["params/params/a/w", "params/params/b", "history"], ["a/w", "b"]),
        ("orbax", ["params/a", "rng/key", "opt_state/0/scale"], ["a"]),
    ],
)
def test_weights_are_named_without_a_root_that_states_lack(
    format: str, tensors: list[str], weights: list[str]
) -> None:
    table = table_of_equal_names(reader(format, *tensors), reader(format, *tensors))
    assert [rule.sides[SOURCE][0].path.text for rule in table.rules] == weights


def test_half_of_the_names_is_not_enough() -> None:
    source = reader("dcp", "model.a", "model.b", "model.c")
    assert len(table_of_equal_names(source, reader("orbax", "params/a", "params/b")).rules) == 3
    with pytest.raises(MappingError) as refused:
        table_of_equal_names(source, reader("orbax", "params/a", "params/b", "params/d"))
    assert str(refused.value) == (
        "memory and memory have weights with other names: 2 of 3 names are equal, but not c, and there d"
    )
