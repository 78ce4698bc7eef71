"""Numbers that only some tensors have: a proposal says them, so that `convert` takes what `map` proposes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import T5Config, T5ForConditionalGeneration

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.core.mapping.language.rules import parse_mapping
from bridge.propose.propose import Proposal, propose
from tests.checkpoints.test_convert import write

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Arrays = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def t5() -> dict[str, np.ndarray]:
    """A small T5: a block's layers are attention, in the decoder attention to the encoder, and an MLP."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "d_model": 12, "d_kv": 5, "d_ff": 28, "num_layers": 3, "num_heads": 4}
    config = T5Config(**sizes, relative_attention_num_buckets=8, tie_word_embeddings=False)
    state = T5ForConditionalGeneration(config).state_dict()
    tied = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    return {name: (w + torch.randn(w.shape) / 9).numpy() for name, w in state.items() if name not in tied}


def flax_tree(hf: Arrays) -> dict[str, np.ndarray]:
    """As transformers' flax T5 named them: kernels are transposed."""
    tree = {}
    for name, array in hf.items():
        *path, last = name.split(".")
        table = "shared" in path or "relative_attention_bias" in path
        if array.ndim == 2 and not table:
            tree["/".join(["params", *path, "kernel"])] = np.ascontiguousarray(array.T)
        else:
            tree["/".join(["params", *path, "embedding" if table else last])] = array
    return tree


def proposed(folder: Path, a: Arrays, b: Arrays, *, values: bool = True) -> Proposal:
    (folder / "a").mkdir()
    save_file(dict(a), folder / "a" / "model.safetensors")
    write(folder / "b", "orbax", b, {})
    return propose(folder / "a", folder / "b", values=values)


def assert_converts(folder: Path, proposal: Proposal) -> None:
    mapping = parse_mapping(proposal.text, "proposed")
    convert(folder / "a", folder / "there", to="orbax", mapping=mapping)
    assert diff(folder / "there", folder / "b").within
    convert(folder / "b", folder / "back", to="safetensors", mapping=mapping)
    assert diff(folder / "back", folder / "a").within


def test_what_is_proposed_for_t5_is_converted_both_ways(tmp_path: Path, t5: dict[str, np.ndarray]) -> None:
    proposal = proposed(tmp_path, t5, flax_tree(t5))
    assert proposal.certain, proposal.text
    # A number that has a role is written as it is.
    assert '"decoder.block.{i}.layer.0.SelfAttention.q.weight' in proposal.text
    assert '"decoder.block.{i}.layer.1.EncDecAttention.q.weight' in proposal.text
    assert '"decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight' in proposal.text
    assert '"decoder.block.{i}.layer.{j}.layer_norm.weight"' in proposal.text
    assert "optional" not in proposal.text
    assert_converts(tmp_path, proposal)


def random_arrays(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_layers_that_are_unlike_the_others_are_optional(tmp_path: Path) -> None:
    """Layer 0 is dense, the others have experts, of which layer 2 lacks one part."""
    shapes: dict[str, tuple[int, ...]] = {f"layers.{i}.norm.weight": (6,) for i in range(4)}
    shapes |= {"layers.0.mlp.up_proj.weight": (9, 6)}
    shapes |= {f"layers.{i}.moe.router.weight": (4, 6) for i in range(1, 4)}
    shapes |= {f"layers.{i}.moe.bias": (4,) for i in (1, 3)}
    shapes |= {f"layers.{i}.experts.{e}.down.weight": (6, 5) for i in range(1, 4) for e in range(4)}
    a = random_arrays(shapes)
    b = {f"params/{name.replace('.', '/').replace('weight', 'kernel')}": array for name, array in a.items()}
    b = {name: np.ascontiguousarray(array.T) if array.ndim == 2 else array for name, array in b.items()}
    proposal = proposed(tmp_path, a, b)
    rules = parse_mapping(proposal.text, "proposed").rules
    optional = {rule.sides["hf"][0].path.text for rule in rules if rule.optional}
    assert optional == {
        "layers.{i}.moe.router.weight",
        "layers.{i}.moe.bias",
        "layers.{i}.experts.{j}.down.weight",
    }
    assert '"layers.0.mlp.up_proj.weight' in proposal.text
    assert_converts(tmp_path, proposal)


def test_a_stack_of_one_layer_stays_a_stack(tmp_path: Path) -> None:
    """Where the number is an axis of the other side it cannot be written out."""
    shapes: dict[str, tuple[int, ...]] = {f"layers.{i}.norm.weight": (6,) for i in range(3)}
    shapes |= {"layers.0.first.weight": (9, 6)}
    a = random_arrays(shapes)
    b = {f"params/layers/{i}/norm/scale": a[f"layers.{i}.norm.weight"] for i in range(3)}
    b["params/first/kernel"] = np.ascontiguousarray(a["layers.0.first.weight"].T)[None]
    proposal = proposed(tmp_path, a, b)
    rules = {rule.sides["hf"][0].path.text: rule for rule in parse_mapping(proposal.text, "proposed").rules}
    assert rules["layers.{i}.first.weight"].optional
    assert not rules["layers.{i}.norm.weight"].optional
    assert_converts(tmp_path, proposal)
