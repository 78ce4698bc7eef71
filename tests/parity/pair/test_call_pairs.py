"""Which inputs of partner calls stand for the same thing."""

from __future__ import annotations

import numpy as np

from bridge.parity.partners.modules import ModulePair
from bridge.parity.partners.runs import CallPair, decide_layouts
from bridge.parity.recorded.recording import Call


def call(path: str, **inputs: np.ndarray) -> Call:
    return Call(path, 0, "Attention", inputs, {"": np.zeros((2, 3))})


def matched(torch: dict[str, np.ndarray], jax: dict[str, np.ndarray]) -> list[str]:
    return [name for name, _ in matches(torch, jax)]


def matches(torch: dict[str, np.ndarray], jax: dict[str, np.ndarray]) -> list[tuple[str, str]]:
    pair = CallPair(
        ModulePair("attention", "attention", 0), 0, call("attention", **torch), call("attention", **jax)
    )
    return [(name, other) for name, other, _ in pair.inputs]


def test_query_key_and_value_that_are_one_array_on_both_sides_are_given_together():
    # A fault above has made them far apart.
    x, y = np.random.default_rng(0).normal(size=(2, 2, 3))
    assert matched({"0": x, "1": x, "2": x}, {"0": y, "1": y, "2": y}) == ["0", "1", "2"]


def test_an_array_that_only_one_side_repeats_has_the_twin_of_its_first():
    x, y, z = np.random.default_rng(1).normal(size=(3, 2, 3))
    ours, theirs = {"0": x, "1": x, "2": z}, {"0": y, "1": z, "2": z + 1e-9}
    assert matches(ours, theirs) == [("0", "0"), ("2", "2"), ("1", "0")]
    # Three times the same here, once there, by position or by name.
    assert matches({"0": x, "1": x, "key_value": x}, {"0": y}) == [("0", "0"), ("1", "0"), ("key_value", "0")]
    assert matches({"0": x}, {"inputs.q": y, "inputs.kv": y}) == [("0", "inputs.q"), ("0", "inputs.kv")]


def unlike(torch_kind: str, jax_kind: str, path: str = "module") -> CallPair:
    """A pair whose outputs have four equal axes and nothing in common."""
    ours, theirs = np.random.default_rng(2).normal(size=(2, 4, 4, 4, 4))
    calls = [
        Call(path, 0, module_class, {}, {"": out})
        for module_class, out in ((torch_kind, ours), (jax_kind, theirs))
    ]
    return CallPair(ModulePair(path, path, 0), 0, *calls)


def test_kinds_of_modules_and_other_pairs_decide_layouts_that_values_do_not():
    ((_, _, conv),) = decide_layouts([unlike("Conv2d", "Conv")])[0].outputs
    assert (conv.axes, conv.certain) == ((0, 2, 3, 1), True)
    ((_, _, alone),) = decide_layouts([unlike("Block", "Block")])[0].outputs
    assert (str(alone), alone.certain) == ("", False)
    image = np.random.default_rng(3).normal(size=(4, 2, 3, 5))
    calls = [Call("stem", 0, "Stem", {}, {"": out}) for out in (image, image.transpose(0, 2, 3, 1))]
    stem = CallPair(ModulePair("stem", "stem", 0), 0, *calls)
    ((_, _, output_layout),) = decide_layouts([stem, unlike("Block", "Block")])[1].outputs
    assert (output_layout.axes, output_layout.certain) == ((0, 2, 3, 1), True)
