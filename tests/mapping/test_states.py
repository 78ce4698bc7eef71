"""Optimizer states: where they are, and which of their parts a weight may lack."""

from __future__ import annotations

import re

import numpy as np
import pytest

from bridge.core.mapping import MappingError, make_plan, parse_mapping
from bridge.core.mapping.language.conventions import State, tree_places
from bridge.core.mapping.states.source_tree import find
from tests.support.bridge.memory_reader import MemoryReader

TABLE = parse_mapping('[[rule]]\ntorch = "w.weight : a b"\njax = "w : b a"\n', "states")
WEIGHT = np.zeros((2, 3), np.float32)


def test_a_state_at_the_root_has_nothing_before_its_moments() -> None:
    arrays = {"w": WEIGHT.T, "mu/w": WEIGHT.T, "nu/w": WEIGHT.T, "count": np.asarray(3)}
    tree = find(MemoryReader("orbax", arrays).tensors.values(), TABLE, None, "here")
    assert tree.convention.states == (State(tree_places("", "", "")),)


def with_state(*entries: str) -> MemoryReader:
    state = {entry: np.asarray(3, np.float32) if entry == "step" else WEIGHT for entry in entries}
    arrays = {f"optimizer.state.w.weight.{entry}": array for entry, array in state.items()}
    return MemoryReader("dcp", {"model.w.weight": WEIGHT, **arrays})


@pytest.mark.parametrize(
    ("entries", "missing"),
    [
        (["step"], "exp_avg, exp_avg_sq are"),
        (["exp_avg", "exp_avg_sq"], "step is"),
        (["exp_avg", "exp_avg_sq", "step", "exp_avg_scale", "momentum_buffer_scale"], "momentum_buffer is"),
    ],
)
def test_what_a_state_lacks_is_named(entries: list[str], missing: str) -> None:
    names = re.sub(r"(\w+)(,| is| are)", r"optimizer.state.w.weight.\1\2", missing)
    message = f"expected the whole optimizer state of each weight in memory, but {names} missing"
    with pytest.raises(MappingError, match=f"^{re.escape(message)}$"):
        make_plan(with_state(*entries), "orbax", TABLE)


def test_momentum_alone_may_have_a_step() -> None:
    plan = make_plan(with_state("momentum_buffer", "step"), "orbax", TABLE)
    assert [*plan.tensors] == ["params/w", "opt_state/trace/w", "opt_state/count"]
