"""Parameters related by a mapping, and modules paired by the parameters that they own."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.core.mapping import MappingError, MappingTable, parse_mapping
from bridge.parity.partners.modules import pair_modules
from bridge.parity.partners.weight_map import WeightMap, _order
from bridge.parity.recorded.recording import Call, Recording


def table(text: str) -> MappingTable:
    return parse_mapping('name = "test"\n' + text, "test")


STACKED = table(
    """
[[rule]]
torch = "embed.weight : v m"
jax = "embed/embedding : v m"

[[rule]]
torch = "layers.{i}.mlp.up.weight : f m"
jax = "layers/mlp/up/kernel : {i} m f"

[[rule]]
torch = "layers.{i}.mlp.down.weight : m f"
jax = "layers/mlp/down/kernel : {i} f m | times(2)"
"""
)
RNG = np.random.default_rng(0)
TORCH = {"embed.weight": RNG.standard_normal((7, 4))} | {
    f"layers.{i}.mlp.{name}.weight": RNG.standard_normal(shape)
    for i in range(3)
    for name, shape in (("up", (6, 4)), ("down", (4, 6)))
}
JAX = {
    "embed/embedding": np.zeros((7, 4)),
    "layers/mlp/up/kernel": np.zeros((3, 4, 6)),
    "layers/mlp/down/kernel": np.zeros((3, 6, 4)),
}


def test_weights_and_gradients_go_both_ways() -> None:
    relation = WeightMap.of(STACKED, TORCH, JAX)
    assert relation.torch_only == relation.jax_only == ()
    there = relation.to_jax(TORCH)
    assert there.keys() == JAX.keys()
    assert np.array_equal(there["layers/mlp/up/kernel"][1], TORCH["layers.1.mlp.up.weight"].T)
    assert np.array_equal(there["layers/mlp/down/kernel"][2], 2 * TORCH["layers.2.mlp.down.weight"].T)
    back = relation.to_torch(there)
    assert all(np.array_equal(back[name], array) for name, array in TORCH.items())
    # A weight that is stored twice as large has half the gradient.
    gradients = relation.to_jax(TORCH, gradients=True)
    assert np.array_equal(gradients["layers/mlp/down/kernel"][2], TORCH["layers.2.mlp.down.weight"].T / 2)


def test_some_parameters_make_the_layers_of_a_stack_that_they_are() -> None:
    relation = WeightMap.of(STACKED, TORCH, JAX)
    own = {name: array for name, array in TORCH.items() if name.startswith("layers.1.")}
    parts = relation.parts_to_jax(own, gradients=True)
    assert parts.keys() == {("layers/mlp/up/kernel", (1,)), ("layers/mlp/down/kernel", (1,))}
    assert np.array_equal(parts["layers/mlp/up/kernel", (1,)][0], TORCH["layers.1.mlp.up.weight"].T)


def test_a_mapping_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(
        MappingError, match=r"the torch model: expected parameters .* got head.weight; add rules"
    ):
        WeightMap.of(STACKED, {**TORCH, "head.weight": np.zeros(3)}, JAX)
    with pytest.raises(MappingError, match="the JAX model: expected parameters"):
        WeightMap.of(STACKED, TORCH, {"other/kernel": np.zeros(3)})


def recording(*paths: str) -> Recording:
    calls = [Call(path, 0, "Module", {}, {}, parent=None) for path in paths]
    return Recording("float64", calls, None)


@pytest.mark.parametrize("side", ["torch", "jax"])
def test_rules_that_say_two_things_of_one_weight_are_refused(side: str) -> None:
    # Of square matrices both fit, and the first would be taken.
    names = {"torch": ("a.weight", "a.weight"), "jax": ("a.weight", "b.weight")}[side]
    rules = "".join(
        f'[[rule]]\ntorch = "{name} : {axes}"\njax = "a/kernel : i o"\n'
        for name, axes in zip(names, ("o i", "i o"), strict=True)
    )
    square = np.ones((3, 3))
    word = {"torch": "a.weight", "jax": "a/kernel"}[side]
    with pytest.raises(MappingError, match=rf"{word} matches two rules of mapping test: .* and "):
        WeightMap.of(table(rules), dict.fromkeys(names, square), {"a/kernel": square})


def test_modules_that_own_the_same_parameters_are_partners() -> None:
    relation = WeightMap.of(STACKED, TORCH, JAX)
    torch = recording("", "embed", "layers.0", "layers.0.mlp", "layers.0.mlp.act", "layers.1", "layers.1.mlp")
    jax = recording("", "embed", "layers/0/mlp", "layers/1/mlp", "layers/1", "rotary")
    modules = pair_modules(relation, torch, jax)
    assert [(pair.torch, pair.jax) for pair in modules.pairs] == [
        ("", ""),
        ("embed", "embed"),
        ("layers.0.mlp", "layers/0/mlp"),
        ("layers.1", "layers/1"),
        ("layers.1.mlp", "layers/1/mlp"),
    ]
    assert modules.torch_only == ("layers.0", "layers.0.mlp.act")
    assert modules.jax_only == ("rotary",)


def test_the_caller_pairs_modules_without_parameters() -> None:
    relation = WeightMap.of(STACKED, TORCH, JAX)
    torch, jax = recording("", "act"), recording("", "rotary")
    modules = pair_modules(relation, torch, jax, {"act": "rotary"})
    assert ("act", "rotary") in [(pair.torch, pair.jax) for pair in modules.pairs]
    with pytest.raises(ValueError, match=r"expected a jax module that was called, got 'rotaryy'"):
        pair_modules(relation, torch, jax, {"act": "rotaryy"})


def test_features_of_jax_have_the_numbers_that_they_have_in_torch() -> None:
    text = """
    [[rule]]
    torch = "up.weight : o (a b)"
    jax = "up/kernel : (b a) o"
    """
    table = parse_mapping(text, "features").with_axes({"a": 2, "b": 3})
    weight = np.arange(24.0).reshape(4, 6)
    made = WeightMap.of(table, {"up.weight": weight}, {"up/kernel": weight.T})
    assert made.feature_orders("up.weight", (4, 6))[0] == (0, 3, 1, 4, 2, 5)


# As where a third convention has query and key in one tensor.
JOINT = table(
    """
[axes]
d = 4
kd = "d"

[[rule]]
torch = ["layers.{i}.q.weight : (g r d) m", "layers.{i}.k.weight : (g kd) m"]
jax = ["layers/{i}/query : m (g r) interleaved(d)", "layers/{i}/key : m g kd"]
"""
)


def test_tensors_of_one_rule_are_related_where_they_have_elements_of_each_other() -> None:
    ours = {
        f"layers.{i}.{name}.weight": RNG.standard_normal((rows, 6))
        for i in range(2)
        for name, rows in (("q", 16), ("k", 8))
    }
    theirs = {
        f"layers/{i}/{name}": np.zeros((6, heads, 4))
        for i in range(2)
        for name, heads in (("query", 4), ("key", 2))
    }
    relation = WeightMap.of(JOINT, ours, theirs)
    assert relation.sources == {
        f"layers/{i}/{name}": (f"layers.{i}.{name[0]}.weight",) for i in range(2) for name in ("query", "key")
    }
    parts = relation.parts_to_jax({"layers.1.q.weight": ours["layers.1.q.weight"]})
    assert parts.keys() == {("layers/1/query", ())}
    assert np.array_equal(parts["layers/1/query", ()], relation.to_jax(ours)["layers/1/query"])


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (np.tile([2, 0, 1], (4, 1)), (2, 0, 1)),
        (np.tile([[2], [0], [1]], (1, 4)), (2, 0, 1)),
        (np.tile(np.array([[3, 2], [1, 0]])[:, None], (1, 5, 1)), (3, 2, 1, 0)),
        (np.tile([0, 1, 2], (4, 1)), None),  # already in order
        (np.tile([0, 0, 1], (4, 1)), None),  # a number is twice there
    ],
)
def test_an_order_is_found_along_the_axes_in_which_numbers_change(
    numbers: np.ndarray, expected: tuple[int, ...] | None
) -> None:
    assert _order([numbers], len(np.unique(numbers)) if expected else 3) == expected
