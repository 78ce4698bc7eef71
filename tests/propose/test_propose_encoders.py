"""What is proposed for encoders of transformers and their former Flax classes is converted both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from bridge.core.formats.tensors.base import Box
from bridge.core.mapping.language.rules import load_mapping
from bridge.core.mapping.plan.translation import make_plan
from bridge.propose.propose import Proposal
from tests.mapping.test_families_encoders import CASES, only, own_names, state_of
from tests.mapping.test_families_gpt_oss import gpt_oss
from tests.propose.test_propose_numbers import assert_converts, proposed
from tests.support.bridge.memory_reader import MemoryReader

pytestmark = pytest.mark.slow


def compared(folder: Path, family: str, model: nn.Module, **axes: int) -> Proposal:
    """What is proposed between the class's weights and the shipped family's tree of them."""
    tensors = only(state_of(model), own_names(model))
    reader = MemoryReader("dcp", {f"model.{path}": array for path, array in tensors.items()})
    plan = make_plan(reader, "orbax", load_mapping(family).with_axes(axes))
    tree = {path: tensor.read(reader, Box.whole(tensor.shape)) for path, tensor in plan.tensors.items()}
    return proposed(folder, tensors, tree)


@pytest.mark.parametrize(
    "name",
    ["t5-gated", "bert-pretraining", "bert-model", "vit-classes", "vit-model", "whisper", "whisper-model"],
)
def test_what_is_proposed_converts(tmp_path: Path, name: str) -> None:
    proposal = compared(tmp_path, CASES[name].family, CASES[name].model())
    assert proposal.certain, proposal.text
    assert_converts(tmp_path, proposal)


def test_alternating_gates_and_ups_are_doubted(tmp_path: Path) -> None:
    proposal = compared(tmp_path, "gpt_oss", gpt_oss(), d=10)
    doubted = {rule.a[0].partition(" : ")[0]: rule.doubts[0] for rule in proposal.rules if rule.doubts}
    both = "model.layers.{i}.mlp.experts.gate_up_proj"
    assert doubted == dict.fromkeys((both, f"{both}_bias"), "the sampled elements differ")
