"""What torch's and flax's own modules store is proposed as certain, what their names do not say is not."""

from __future__ import annotations

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
    f"rnn.{kind}_{side}_l0{way}": ((4 * H, H) if kind == "weight" else (4 * H,))
    for kind in ("weight", "bias")
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
    found = proposed(tmp_path, RECURRENT, CELLS)
    assert rules(found) == {
        f"rnn.{kind}_{side}_l0{suffix}": tuple(f"rnn/{way}/cell/{side[0]}{gate}/{leaf}" for gate in "ifgo")
        for suffix, way in (("", "forward_rnn"), ("_reverse", "backward_rnn"))
        for kind, side, leaf in (
            ("weight", "ih", "kernel"),
            ("weight", "hh", "kernel"),
            ("bias", "hh", "bias"),
        )
    }
    assert found.doubts == 0
    # flax's cells have one bias for torch's two.
    assert found.left_a == ("rnn.bias_ih_l0", "rnn.bias_ih_l0_reverse")


def test_a_gru_has_gates_of_its_own_and_a_fused_twin(tmp_path: Path) -> None:
    ours = {"gru.weight_ih_l0": (3 * H, H), "gru.weight_hh_l0": (3 * H, H)}
    gates = {f"gru/{side}{gate}/kernel": (H, H) for side in "hi" for gate in "nrz"}
    found = proposed(tmp_path, ours, gates)
    assert found.certain, found.text
    assert rules(found)["gru.weight_ih_l0"] == ("gru/ir/kernel", "gru/iz/kernel", "gru/in/kernel")
    (tmp_path / "fused").mkdir()
    fused = {"gru/cell/dense_h/kernel": (H, 3 * H), "gru/cell/dense_i/kernel": (H, 3 * H)}
    found = proposed(tmp_path / "fused", ours, fused)
    assert found.certain, found.text
    assert rules(found)["gru.weight_ih_l0"] == ("gru/cell/dense_i/kernel",)


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
    found = proposed(tmp_path, ours, theirs)
    assert found.certain, found.text
    for name, own in (("in_proj_weight", leaf), ("in_proj_bias", "bias")):
        assert rules(found)[f"attn.{name}"] == tuple(
            f"attn/{part.format(one)}/{own}" for one in ("query", "key", "value")
        )


def test_convolutions_norms_and_tables_are_certain(tmp_path: Path) -> None:
    ours = {"conv.weight": (8, 8, 3, 3), "fc.weight": (8, 8), "emb.weight": (8, 8)}
    ours |= {f"bn.{name}": (8,) for name in ("weight", "bias", "running_mean", "running_var")}
    theirs = {"conv/kernel": (3, 3, 8, 8), "fc/kernel": (8, 8), "emb/embedding": (8, 8)}
    theirs |= {f"bn/{name}": (8,) for name in ("scale", "bias", "mean", "var")}
    found = proposed(tmp_path, {**ours, "bn.num_batches_tracked": ()}, theirs)
    assert found.certain, found.text
    assert rules(found) == {
        "conv.weight": ("conv/kernel",),
        "fc.weight": ("fc/kernel",),
        "emb.weight": ("emb/embedding",),
        "bn.weight": ("bn/scale",),
        "bn.bias": ("bn/bias",),
        "bn.running_mean": ("bn/mean",),
        "bn.running_var": ("bn/var",),
    }
    assert 'drop = ["*num_batches_tracked"]' in found.text
    (conv,) = (rule for rule in found.rules if rule.a[0].startswith("conv"))
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
    found = proposed(tmp_path, {f"{name}.weight": weight}, {f"{name}/kernel": kernel})
    assert not found.certain
    assert any("is flipped" in doubt for rule in found.rules for doubt in rule.doubts)


def test_an_order_that_no_name_says_is_not_that_of_the_alphabet(tmp_path: Path) -> None:
    theirs = {f"a/{name}/kernel": (8, 8) for name in ("beta", "alpha", "gamma")}
    found = proposed(tmp_path, {"a.mix.weight": (24, 8)}, theirs)
    assert (found.rules, found.left_a) == ((), ("a.mix.weight",))
    # Of query, key and value there is a usual order, which is said to be a guess.
    (tmp_path / "named").mkdir()
    theirs = {f"a/{name}/kernel": (8, 8) for name in ("key", "query", "value")}
    found = proposed(tmp_path / "named", {"a.mix.weight": (24, 8)}, theirs)
    assert rules(found) == {"a.mix.weight": ("a/query/kernel", "a/key/kernel", "a/value/kernel")}
    assert "by shape only" in found.rules[0].doubts


def test_gpt2s_linear_layers_are_not_taken_for_torchs(tmp_path: Path) -> None:
    found = proposed(tmp_path, {"h.0.attn.c_proj.weight": (8, 8)}, {"h/0/attn/out/kernel": (8, 8)})
    assert any("also fits" in doubt for rule in found.rules for doubt in rule.doubts)


def test_automatic_names_of_linen_are_layers_where_the_other_side_has_as_many(tmp_path: Path) -> None:
    theirs = {
        f"Dense_{i}/{leaf}": shape for i in range(3) for leaf, shape in (("kernel", (4, 4)), ("bias", (4,)))
    }
    ours = {
        f"net.{i}.{leaf}": shape for i in range(3) for leaf, shape in (("weight", (4, 4)), ("bias", (4,)))
    }
    folders = [tmp_path / name for name in ("layers", "modules")]
    for folder in folders:
        folder.mkdir()
    found = proposed(folders[0], ours, theirs)
    assert rules(found) == {"net.{i}.weight": ("Dense_{i}/kernel",), "net.{i}.bias": ("Dense_{i}/bias",)}
    # Of modules with names of their own, numbers are names, too.
    named = {f"{name}.weight": (n, 4) for n, name in enumerate(("a", "b", "c"), 3)}
    shapes = {f"Dense_{n - 3}/kernel": (4, n) for n in (3, 4, 5)}
    assert len(proposed(folders[1], named, shapes).rules) == 3
