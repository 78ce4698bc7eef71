"""Faults inside of a Llama's attentions are named with their cause, one in each layer; an unknown one has none."""

from __future__ import annotations

import pytest

from tests.support.parity.bugs import TABLE, plant
from tests.support.parity.pair_tools import compare_pair
from tests.support.parity.pairs import build

LAYERS = tuple(f"model.layers.{layer}.self_attn" for layer in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("what", TABLE["attention"])
def test_causes_inside_of_attentions(what: str) -> None:
    faults, causes = TABLE["attention"][what]
    pair = build("llama", 0)
    for fault in faults:
        plant(*fault)(pair)
    rows = {row.name: row for row in compare_pair(pair).stage("forward")}
    assert [rows[name].cause for name in LAYERS] == causes
    assert all(rows[name].local > 4 for name in LAYERS)
