"""What torch's and flax's own modules store is proposed as certain, what their names do not say is not."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from bridge.propose.propose import Proposal, propose

Shapes = dict[str, tuple[int, ...]]


def proposed(folder: Path, ours: Shapes, theirs: Shapes, *, values: bool = False) -> Proposal:
    for name, shapes in (("torch", ours), ("jax", theirs)):
        np.savez(
            folder / f"{name}.npz", **{key: np.zeros(shape, np.float32) for key, shape in shapes.items()}
        )
    return propose(folder / "torch.npz", folder / "jax.npz", values=values)


def rules(proposal: Proposal) -> dict[str, tuple[str, ...]]:
    """Names alone: of each torch tensor those that it holds, in its order."""
    return {
        a.partition(" : ")[0]: tuple(b.partition(" : ")[0] for b in rule.b)
        for rule in proposal.rules
        for a in rule.a
    }


H = 6
RECURRENT = {
    f"rnn.{name}_{side}_l0{way}": ((4 * H, H) if name == "weight" else (4 * H,))
    for name in ("weight", "bias")
    for side in ("ih", "hh")
    for way in ("", "_reverse")
}
CELLS = {
    f"rnn/{way}/cell/{side}{gate}/{leaf}": ((H, H) if leaf == "kernel" else (H,))
    for way in ("backward_rnn", "forward_rnn")
    for side in "hi"
    for gate in "fgio"
    for leaf in (("kernel", "bias") if side == "h" else ("kernel",))
}


def test_gates_are_in_torchs_order_and_directions_are_not_exchanged(tmp_path: Path) -> None:
    proposal = proposed(tmp_path, RECURRENT, CELLS)
    assert rules(proposal) == {
        f"rnn.{name}_{side}_l0{suffix}": tuple(f"rnn/{way}/cell/{side[0]}{gate}/{leaf}" for gate in "ifgo")
        for suffix, way in (("", "forward_rnn"), ("_reverse", "backward_rnn"))
        for name, side, leaf in (
            ("weight", "ih", "kernel"),
            ("weight", "hh", "kernel"),
            ("bias", "hh", "bias"),
        )
    }
    assert proposal.doubts == 0
    # flax's cells have one bias for torch's two.
    assert proposal.left_a == ("rnn.bias_ih_l0", "rnn.bias_ih_l0_reverse")
    assert "store the sum in the bias that a rule names" in proposal.text


def test_a_gru_has_gates_of_its_own_and_a_fused_twin(tmp_path: Path) -> None:
    ours = {"gru.weight_ih_l0": (3 * H, H), "gru.weight_hh_l0": (3 * H, H)}
    gates = {f"gru/{side}{gate}/kernel": (H, H) for side in "hi" for gate in "nrz"}
    proposal = proposed(tmp_path, ours, gates)
    assert proposal.certain, proposal.text
    assert rules(proposal)["gru.weight_ih_l0"] == ("gru/ir/kernel", "gru/iz/kernel", "gru/in/kernel")
    (tmp_path / "fused").mkdir()
    fused = {"gru/cell/dense_h/kernel": (H, 3 * H), "gru/cell/dense_i/kernel": (H, 3 * H)}
    proposal = proposed(tmp_path / "fused", ours, fused)
    assert proposal.certain, proposal.text
    assert rules(proposal)["gru.weight_ih_l0"] == ("gru/cell/dense_i/kernel",)


@pytest.mark.parametrize(
    ("part", "leaf", "shape"),
    [("{}", "kernel", (48, 4, 12)), ("{}", "kernel", (48, 48)), ("{}_proj", "weight", (48, 48))],
    ids=["flax", "one axis", "equinox"],
)
def test_attention_of_torch_is_query_key_value(
    tmp_path: Path, part: str, leaf: str, shape: tuple[int, ...]
) -> None:
    ours = {"attn.in_proj_weight": (144, 48), "attn.in_proj_bias": (144,)}
    theirs = {f"attn/{part.format(name)}/{leaf}": shape for name in ("key", "query", "value")}
    theirs |= {f"attn/{part.format(name)}/bias": shape[1:] for name in ("key", "query", "value")}
    proposal = proposed(tmp_path, ours, theirs)
    assert proposal.certain, proposal.text
    for name, own in (("in_proj_weight", leaf), ("in_proj_bias", "bias")):
        assert rules(proposal)[f"attn.{name}"] == tuple(
            f"attn/{part.format(projection)}/{own}" for projection in ("query", "key", "value")
        )


def test_convolutions_norms_and_tables_are_certain(tmp_path: Path) -> None:
    ours = {"conv.weight": (8, 8, 3, 3), "fc.weight": (8, 8), "emb.weight": (8, 8)}
    ours |= {f"bn.{name}": (8,) for name in ("weight", "bias", "running_mean", "running_var")}
    theirs = {"conv/kernel": (3, 3, 8, 8), "fc/kernel": (8, 8), "emb/embedding": (8, 8)}
    theirs |= {f"bn/{name}": (8,) for name in ("scale", "bias", "mean", "var")}
    proposal = proposed(tmp_path, {**ours, "bn.num_batches_tracked": ()}, theirs)
    assert proposal.certain, proposal.text
    assert rules(proposal) == {
        "conv.weight": ("conv/kernel",),
        "fc.weight": ("fc/kernel",),
        "emb.weight": ("emb/embedding",),
        "bn.weight": ("bn/scale",),
        "bn.bias": ("bn/bias",),
        "bn.running_mean": ("bn/mean",),
        "bn.running_var": ("bn/var",),
    }
    assert 'drop = ["*num_batches_tracked"]' in proposal.text
    (conv,) = (rule for rule in proposal.rules if rule.a[0].startswith("conv"))
    out, in_, *window = conv.a[0].partition(" : ")[2].split()
    assert conv.b[0].partition(" : ")[2].split() == [*window, in_, out]


@pytest.mark.parametrize(
    ("name", "weight", "kernel"),
    [("deconv", (8, 8, 3, 3), (3, 3, 8, 8)), ("c", (4, 6, 3, 2), (3, 2, 4, 6))],
    ids=["by name", "by shape"],
)
def test_a_transposed_convolution_may_be_flipped(
    tmp_path: Path, name: str, weight: tuple[int, ...], kernel: tuple[int, ...]
) -> None:
    proposal = proposed(tmp_path, {f"{name}.weight": weight}, {f"{name}/kernel": kernel})
    assert not proposal.certain
    assert any("flax flips" in doubt for rule in proposal.rules for doubt in rule.doubts)


def test_an_order_that_no_name_says_is_not_that_of_the_alphabet(tmp_path: Path) -> None:
    theirs = {f"a/{name}/kernel": (8, 8) for name in ("beta", "alpha", "gamma")}
    proposal = proposed(tmp_path, {"a.mix.weight": (24, 8)}, theirs)
    assert (proposal.rules, proposal.left_a) == ((), ("a.mix.weight",))
    # Of query, key and value there is a usual order, which is said to be a guess.
    (tmp_path / "named").mkdir()
    theirs = {f"a/{name}/kernel": (8, 8) for name in ("key", "query", "value")}
    proposal = proposed(tmp_path / "named", {"a.mix.weight": (24, 8)}, theirs)
    assert rules(proposal) == {"a.mix.weight": ("a/query/kernel", "a/key/kernel", "a/value/kernel")}
    assert "by shape only" in proposal.rules[0].doubts


def test_gpt2s_linear_layers_are_not_taken_for_torchs(tmp_path: Path) -> None:
    proposal = proposed(tmp_path, {"h.0.attn.c_proj.weight": (8, 8)}, {"h/0/attn/out/kernel": (8, 8)})
    assert any("also fits" in doubt for rule in proposal.rules for doubt in rule.doubts)


def test_a_bilinear_layer_is_not_taken_for_a_convolution(tmp_path: Path) -> None:
    proposal = proposed(tmp_path, {"bilinear.weight": (8, 4, 4)}, {"bilinear/kernel": (4, 4, 8)})
    assert not proposal.certain
    assert any("also fits" in doubt for rule in proposal.rules for doubt in rule.doubts), proposal.text


def test_automatic_names_of_linen_are_layers_where_the_other_side_has_as_many(tmp_path: Path) -> None:
    theirs = {
        f"Dense_{i}/{leaf}": shape for i in range(3) for leaf, shape in (("kernel", (4, 4)), ("bias", (4,)))
    }
    ours = {
        f"net.{i}.{leaf}": shape for i in range(3) for leaf, shape in (("weight", (4, 4)), ("bias", (4,)))
    }
    folders = [tmp_path / name for name in ("layers", "modules", "turned")]
    for folder in folders:
        folder.mkdir()
    proposal = proposed(folders[0], ours, theirs)
    assert rules(proposal) == {"net.{i}.weight": ("Dense_{i}/kernel",), "net.{i}.bias": ("Dense_{i}/bias",)}
    # Also if they are the first side's.
    turned = proposed(folders[2], theirs, ours)
    assert rules(turned) == {"Dense_{i}/kernel": ("net.{i}.weight",), "Dense_{i}/bias": ("net.{i}.bias",)}
    # Of modules with names of their own, numbers are names, too.
    named = {f"{name}.weight": (n, 4) for n, name in enumerate(("a", "b", "c"), 3)}
    shapes = {f"Dense_{n - 3}/kernel": (4, n) for n in (3, 4, 5)}
    assert len(proposed(folders[1], named, shapes).rules) == 3


def test_automatic_names_are_modules_where_the_other_side_counts_no_layers(tmp_path: Path) -> None:
    theirs = {f"Dense_{i}/kernel": (4, 4) for i in range(3)}
    proposal = proposed(tmp_path, {f"{name}.weight": (4, 4) for name in "abc"}, theirs)
    assert (proposal.left_a, proposal.left_b) == (("a.weight", "b.weight", "c.weight"), tuple(theirs))


@pytest.mark.parametrize(
    ("gate", "up", "certain"), [("mlp.w1", "mlp.w3", False), ("layers.mlp.gate", "layers.mlp.up", True)]
)
def test_words_that_code_bases_use_differently_are_certain_only_as_equal_names(
    tmp_path: Path, gate: str, up: str, certain: bool
) -> None:
    ours: Shapes = {f"{gate}.weight": (5, 6), f"{up}.weight": (5, 6)}
    proposal = proposed(tmp_path, ours, {"mlp/gate/kernel": (6, 5), "mlp/up/kernel": (6, 5)})
    assert rules(proposal) == {f"{gate}.weight": ("mlp/gate/kernel",), f"{up}.weight": ("mlp/up/kernel",)}
    assert proposal.certain is certain


def test_a_stack_of_square_layers_lies_as_each_layer_does(tmp_path: Path) -> None:
    ours: Shapes = {f"layers.{i}.down.weight": (6, 6) for i in range(3)}
    proposal = proposed(tmp_path, ours, {"layers/down/kernel": (3, 6, 6)})
    assert proposal.certain, proposal.text


def sequential(sizes: tuple[int, ...], step: int = 2, stem: str = "net") -> Shapes:
    """Linear layers of torch with other modules between, which have no tensors."""
    shapes: Shapes = {}
    for number, (size, out) in enumerate(itertools.pairwise(sizes)):
        shapes |= {f"{stem}.{step * number}.weight": (out, size), f"{stem}.{step * number}.bias": (out,)}
    return shapes


def dense(sizes: tuple[int, ...], first: int = 0, name: str = "Dense") -> Shapes:
    """Linear layers with linen's automatic names."""
    shapes: Shapes = {}
    for number, (size, out) in enumerate(itertools.pairwise(sizes), first):
        shapes |= {f"{name}_{number}/kernel": (size, out), f"{name}_{number}/bias": (out,)}
    return shapes


@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("sizes", [(4, 8, 16, 3), (4, 8, 8, 8, 3), (8, 8, 8, 8)], ids=str)
def test_layers_that_linen_counts_otherwise_are_paired_in_order(
    tmp_path: Path, sizes: tuple[int, ...], step: int
) -> None:
    proposal = proposed(tmp_path, sequential(sizes, step), dense(sizes))
    assert rules(proposal) == {
        f"net.{step * number}.{leaf}": (f"Dense_{number}/{twin}",)
        for number in range(len(sizes) - 1)
        for leaf, twin in (("weight", "kernel"), ("bias", "bias"))
    }
    doubted = {rule.a[0].partition(" : ")[0] for rule in proposal.rules if rule.doubts}
    # Layers of the same sizes may have been exchanged: order alone says which is which.
    layers = list(itertools.pairwise(sizes))
    assert doubted == {
        f"net.{step * number}.{leaf}"
        for number, layer in enumerate(layers)
        for leaf in ("weight", "bias")
        if layers.count(layer) > 1
    }
    assert all("by order only" in doubt for rule in proposal.rules for doubt in rule.doubts)
    assert proposal.certain is (not doubted)


def test_norms_between_layers_are_counted_apart(tmp_path: Path) -> None:
    norms = {
        f"net.{number}.{leaf}": (size,) for number, size in ((1, 8), (4, 16)) for leaf in ("weight", "bias")
    }
    theirs = {f"LayerNorm_{n}/{leaf}": (size,) for n, size in ((0, 8), (1, 16)) for leaf in ("scale", "bias")}
    pairs = rules(proposed(tmp_path, sequential((4, 8, 16), 3) | norms, dense((4, 8, 16)) | theirs))
    assert pairs["net.3.weight"] == ("Dense_1/kernel",)
    assert pairs["net.3.bias"] == ("Dense_1/bias",)
    assert (pairs["net.1.weight"], pairs["net.1.bias"]) == (("LayerNorm_0/scale",), ("LayerNorm_0/bias",))
    assert (pairs["net.4.weight"], pairs["net.4.bias"]) == (("LayerNorm_1/scale",), ("LayerNorm_1/bias",))


def test_layers_that_may_be_those_of_another_series_are_not_certain(tmp_path: Path) -> None:
    """Two stacks on one side, one count of all layers on the other: nothing says which come first."""
    sizes = (4, 8, 16, 3)
    ours = sequential(sizes) | sequential(sizes, stem="head")
    proposal = proposed(tmp_path, ours, dense(sizes) | dense(sizes, first=3))
    assert not proposal.certain
    assert not any("by order only" in doubt for rule in proposal.rules for doubt in rule.doubts)


def test_two_attentions_of_one_shape_have_parts_of_their_own(tmp_path: Path) -> None:
    """A decoder layer of torch: the attention whose name only one side has must not take the other one's parts."""
    names = ("self_attn", "multihead_attn")
    ours: Shapes = {f"{name}.in_proj_weight": (24, 8) for name in names}
    ours |= {f"{name}.in_proj_bias": (24,) for name in names}
    theirs: Shapes = {}
    for name, part in itertools.product(("self_attn", "cross_attn"), ("query", "key", "value")):
        theirs |= {f"{name}/{part}/kernel": (8, 2, 4), f"{name}/{part}/bias": (2, 4)}
    proposal = proposed(tmp_path, ours, theirs)
    rule_of = {rule.fit.a[0].family.path: rule for rule in proposal.rules}
    for ours_name, theirs_name in zip(names, ("self_attn", "cross_attn"), strict=True):
        for leaf in ("weight", "bias"):
            rule = rule_of[f"{ours_name}.in_proj_{leaf}"]
            parts = [entry.family.path.rpartition("/")[0] for entry in rule.fit.b]
            assert parts == [f"{theirs_name}/{part}" for part in ("query", "key", "value")]
            assert bool(rule.doubts) == (ours_name == "multihead_attn")
    assert (proposal.left_a, proposal.left_b) == ((), ())
