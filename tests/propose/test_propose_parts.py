"""What proposals are made of: axes aligned by shape, tensors grouped and compared by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.core.formats import create_checkpoint
from bridge.propose.axes import align
from bridge.propose.names import families, similarity
from bridge.propose.propose import propose
from tests.checkpoints.test_convert import write
from tests.support.bridge.memory_reader import MemoryReader
from tests.support.examples import examples


@examples(60)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_an_alignment_is_a_rearrangement_of_the_elements(shape: list[int], rng: object) -> None:
    """Every alignment of a shape with a permuted, merged one has the right sizes, and the true one is among them."""
    import random

    assert isinstance(rng, random.Random)
    order = list(range(len(shape)))
    rng.shuffle(order)
    cut = rng.randrange(1, len(shape) + 1)
    groups = [sorted(order[:cut]), sorted(order[cut:])] if cut < len(shape) else [sorted(order)]
    merged = [int(np.prod([shape[axis] for axis in group])) for group in groups]
    alignments = list(align(merged, shape))
    names = {axis: f"x{axis}" for axis, size in enumerate(shape) if size != 1}
    truth = tuple(((tuple(names[axis] for axis in group if axis in names)),) for group in groups)
    assert truth in [left for left, _, _ in alignments]
    for left, right, sizes in alignments:
        assert [int(np.prod([sizes[x] for x in dim[0]])) for dim in left] == merged
        assert [int(np.prod([sizes[x] for x in dim[0]])) for dim in right] == shape


def test_families_are_formed_by_layer_but_not_by_matrix() -> None:
    names = [f"layers/layers_{i}/mlp/wi_{k}/kernel" for i in range(3) for k in range(2)]
    infos = MemoryReader("orbax", {name: np.zeros((2, 3)) for name in names}).tensors
    assert [family.path for family in families(infos, "/")] == [
        "layers/layers_{i}/mlp/wi_0/kernel",
        "layers/layers_{i}/mlp/wi_1/kernel",
    ]


@pytest.mark.parametrize(
    ("torch_name", "jax_name"),
    [
        ("layers.0.self_attn.q_proj.weight", "layers/0/attention/query/kernel"),
        ("layers.0.attention.wo.weight", "layers/0/self_attention/out/kernel"),
        ("layers.0.feed_forward.w2.weight", "layers/0/mlp/wo/kernel"),
        ("layers.0.feed_forward.w3.weight", "layers/0/mlp/wi_1/kernel"),
        ("h.0.mlp.c_proj.weight", "h/0/mlp/down/kernel"),
        ("h.0.attn.c_proj.weight", "h/0/attn/out/kernel"),
        ("tok_embeddings.weight", "token_embedder/embedding"),
        ("output.weight", "decoder/logits_dense/kernel"),
        ("layers.0.post_attention_layernorm.weight", "decoder/layers/0/post_self_attention_layer_norm/scale"),
        ("norm.weight", "decoder/decoder_norm/scale"),
    ],
)
def test_names_of_one_thing_are_the_same_words(torch_name: str, jax_name: str) -> None:
    words = []
    for format, name, separator in (("dcp", torch_name, "."), ("orbax", jax_name, "/")):
        infos = MemoryReader(format, {name: np.zeros(2)}).tensors
        words.append(families(infos, separator)[0].words)
    assert similarity(*words) == 1.0


WHOLE = """\
# Proposed by `twinshard map`. torch = a, jax = b
# 7 rules, 4 of them uncertain; 1 and 1 weights are in none.
# unmatched in torch: only.weight
# unmatched in jax: extra

name = "proposed"
drop = ["*num_batches_tracked"]

[convention.torch]

[convention.jax]
weights = "model/{w}"

[axes]
d = 4
up = "gate"
value = 2
beta = 3

[[rule]]
torch = "embed.weight"
jax = "embed/embedding"

[[rule]]
# uncertain: rotary layouts (halves or pairs of rows) cannot be told from names and shapes
torch = "layers.{i}.wq.weight : (h d) m"
jax = "layers/query/kernel : {i} m h d"

[[rule]]
# uncertain: parts of one shape: their order is taken from names
torch = "layers.{i}.w13.weight : (gate + up) m"
jax = ["layers/gate/kernel : {i} m gate", "layers/up/kernel : {i} m up"]

[[rule]]
# uncertain: rotary layouts (halves or pairs of rows) cannot be told from names and shapes
# uncertain: parts of one shape: their order is taken from names
torch = "layers.{i}.kv.weight : (key d + value d) m"
jax = ["layers/key/kernel : {i} m key d", "layers/value/kernel : {i} m value d"]

[[rule]]
torch = "layers.{i}.router.weight : n m"
jax = "layers/{i}/router/kernel : m n"
optional = true

[[rule]]
torch = "layers.1.gain"
jax = "layers/1/gain"

[[rule]]
# uncertain: by shape only
# uncertain: also fits (beta + alpha) n = n beta & n alpha
torch = "mix.weight : (alpha + beta) n"
jax = ["mix/alpha/kernel : n alpha", "mix/beta/kernel : n beta"]
"""


def test_a_whole_proposal(tmp_path: Path) -> None:
    def zeros(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    ours: dict[str, tuple[int, ...]] = {"model.embed.weight": (7, 6), "model.only.weight": (9,)}
    ours |= {f"model.layers.{i}.wq.weight": (8, 6) for i in range(3)}
    ours |= {f"model.layers.{i}.w13.weight": (10, 6) for i in range(3)}
    ours |= {f"model.layers.{i}.kv.weight": (16, 6) for i in range(3)}
    ours |= {f"model.layers.{i}.router.weight": (3, 6) for i in (1, 2)}
    ours |= {"model.layers.1.gain": (3,), "model.norm.num_batches_tracked": (), "model.mix.weight": (5, 4)}
    theirs: dict[str, tuple[int, ...]] = {"model/embed/embedding": (7, 6), "model/extra": (11,)}
    theirs |= {f"model/layers/{n}/kernel": (3, 6, 2, 4) for n in ("query", "key", "value")}
    theirs |= {f"model/layers/{n}/kernel": (3, 6, 5) for n in ("gate", "up")}
    theirs |= {f"model/layers/{i}/router/kernel": (6, 3) for i in (1, 2)}
    theirs |= {"model/layers/1/gain": (3,), "model/mix/alpha/kernel": (4, 2), "model/mix/beta/kernel": (4, 3)}
    write(tmp_path / "a", "dcp", zeros(ours), {})
    write(tmp_path / "b", "orbax", zeros(theirs), {})
    proposal, turned = (propose(tmp_path / first, tmp_path / second) for first, second in ("ab", "ba"))
    assert proposal.text.replace(f"{tmp_path}/", "") == WHOLE
    assert {(rule.b, rule.a) for rule in turned.rules} == {(rule.a, rule.b) for rule in proposal.rules}
    assert turned.doubts == proposal.doubts


def test_equal_numbers_of_another_kind_differ(tmp_path: Path) -> None:
    for name, dtype in (("a", np.int32), ("b", np.float32)):
        np.savez(tmp_path / f"{name}.npz", weight=np.arange(6).astype(dtype))
    (rule,) = propose(tmp_path / "a.npz", tmp_path / "b.npz", values=True).rules
    assert "the sampled elements differ" in rule.doubts


@pytest.mark.slow
def test_thousands_of_tensors_of_one_shape_are_matched_by_name(tmp_path: Path) -> None:
    for format, name in (("dcp", "model.w{}x.weight"), ("orbax", "params/w{}x/kernel")):
        with create_checkpoint(tmp_path / format, format) as writer:
            for k in range(2000):
                path = (
                    tuple(name.format(k).split("/")) if format == "orbax" else ("model", name.format(k)[6:])
                )
                stored = writer.add_tensor(path, (2,), np.dtype(np.float32)).name
                for box in writer.chunks(stored):
                    writer.write(stored, box, np.ones(2, np.float32))
    proposal = propose(tmp_path / "dcp", tmp_path / "orbax")
    assert len(proposal.rules) == 2000
    assert all(rule.a[0].split(".")[0] == rule.b[0].split("/")[0] for rule in proposal.rules)
