"""Layers that one convention numbers and another counts in blocks, or from another start."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.core.formats.tensors.base import Box
from bridge.core.mapping import MappingError, make_plan, parse_mapping
from bridge.core.mapping.language.numbers import Numbering
from tests.support.bridge.memory_reader import MemoryReader

CONVENTIONS = '[convention.torch]\n[convention.jax]\n[convention.maxtext]\nformat = ""\n'
BLOCKS = """
[numbers]
local = "{i} = 4 * {block} + {turn}, {turn} < 3"
full = "{i} = 4 * {block} + 3"
[[rule]]
torch = "layers.{i}.w : f m"
jax = "blocks/{i}/w : m f"
maxtext.local = "local/w : m {block} {turn} f"
maxtext.full = "global_{block}/w : m f"
"""
START = """
[config]
first = ["first_dense"]
[numbers]
dense = "{i} = {k}, {k} < first"
moe = "{i} = first + {k}"
[[rule]]
torch = "layers.{i}.w : f m"
jax = "blocks/{i}/w : m f"
maxtext.dense = "dense/w : m {k} f"
maxtext.moe = "moe/w : m {k} f"
[[rule]]
torch = "layers.{i}.n : m"
jax = "blocks/{i}/n : m"
maxtext.dense = "dense/n : m {k}"
maxtext.moe = "moe/n : m {k}"
[[rule]]
torch = "layers.{i}.up"
jax = "blocks/{i}/up"
maxtext.moe = "moe_{k}/up"
optional = "experts of layer {i}"
"""


def layers(count: int, *, experts: int | None = None) -> dict[str, np.ndarray]:
    """Layers of different values; from layer ``experts`` on with a second tensor."""
    rng = np.random.default_rng(0)
    tensors = {f"layers.{i}.w": rng.standard_normal((2, 3)) for i in range(count)}
    more = range(count if experts is None else experts, count)
    tensors |= {} if experts is None else {f"layers.{i}.n": rng.standard_normal(3) for i in range(count)}
    return tensors | {f"layers.{i}.up": rng.standard_normal(5) for i in more}


def translated(table: str, tensors: dict[str, np.ndarray], into: str, **axes: int) -> dict[str, np.ndarray]:
    reader = MemoryReader("orbax" if into == "torch" else "dcp", tensors)
    mapping = parse_mapping(CONVENTIONS + table, "table").with_axes(axes)
    plan = make_plan(reader, "dcp" if into == "torch" else "orbax", mapping, into=into)
    made = {name: t.read(reader, Box.whole(t.shape)) for name, t in plan.tensors.items()}
    return {name.removeprefix("model.").removeprefix("params/"): array for name, array in made.items()}


def back(table: str, made: dict[str, np.ndarray], **axes: int) -> dict[str, np.ndarray]:
    return translated(table, {f"params/{name}": array for name, array in made.items()}, "torch", **axes)


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_blocks_of_layers_are_stacked_along_two_axes_and_numbered_by_block() -> None:
    torch = layers(8)
    made = translated(BLOCKS, torch, "maxtext")
    local = [[torch[f"layers.{4 * block + turn}.w"].T for turn in range(3)] for block in range(2)]
    assert made.keys() == {"local/w", "global_0/w", "global_1/w"}
    assert np.array_equal(made["local/w"], np.moveaxis(np.array(local), 2, 0))
    assert np.array_equal(made["global_1/w"], torch["layers.7.w"].T)
    assert equal(back(BLOCKS, made), torch)


def test_layers_are_counted_from_a_size_on() -> None:
    torch = layers(5, experts=2)
    made = translated(START, torch, "maxtext", first=2)
    assert made.keys() == {"dense/w", "dense/n", "moe/w", "moe/n", "moe_0/up", "moe_1/up", "moe_2/up"}
    assert np.array_equal(made["moe/w"][:, 1], torch["layers.3.w"].T)
    assert np.array_equal(made["moe_1/up"], torch["layers.3.up"])
    assert equal(back(START, made, first=2), torch)
    assert made["dense/w"].shape == (3, 2, 2)


def test_a_model_may_lack_the_layers_of_a_case() -> None:
    torch = layers(3, experts=0)
    made = translated(START, torch, "maxtext", first=0)
    assert made.keys() == {"moe/w", "moe/n", "moe_0/up", "moe_1/up", "moe_2/up"}
    assert equal(back(START, made, first=0), torch)


def test_between_conventions_that_both_number_nothing_is_asked() -> None:
    assert "blocks/1/w" in translated(START, layers(5, experts=2), "jax")


@pytest.mark.parametrize(
    ("count", "experts", "first", "message"),
    [
        # A layer whose second tensor the case of dense layers has no place for.
        (5, 1, 2, r"expected a number of one of the cases moe .* in layers\.1\.up, got a number of no case"),
        (5, 2, None, r"size of axis first does not follow from the shapes.* --axis first=SIZE"),
    ],
)
def test_numbers_that_do_not_fit_are_named(count: int, experts: int, first: int | None, message: str) -> None:
    axes = {} if first is None else {"first": first}
    with pytest.raises(MappingError, match=message):
        translated(START, layers(count, experts=experts), "maxtext", **axes)


def test_a_block_that_is_not_whole_is_refused() -> None:
    with pytest.raises(MappingError, match=r"found no tensor layers\.6\.w, which the rule needs with"):
        translated(BLOCKS, layers(6), "maxtext")


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ("dense/w", r"dense/w: expected size 2 on axis 1"),
        ("moe/w", r"each layers\.\{i\} that other rules have, found none for 3, 4"),
    ],
)
def test_a_stack_of_another_height_than_the_sizes_say_is_refused(spoilt: str, message: str) -> None:
    made = translated(START, layers(5, experts=2), "maxtext", first=2)
    made[spoilt] = made[spoilt][:, :1]
    with pytest.raises(MappingError, match=message):
        back(START, made, first=2)


def test_a_tensor_that_a_tree_lacks_is_named_by_its_layer() -> None:
    made = translated(BLOCKS, layers(8), "maxtext")
    del made["global_1/w"]
    two = BLOCKS + BLOCKS[BLOCKS.index("[[rule]]") :].replace("w :", "v :").replace(".w", ".v")
    made |= {
        name.replace("w", "v"): array for name, array in translated(BLOCKS, layers(8), "maxtext").items()
    }
    with pytest.raises(
        MappingError, match=r"tensor for each layers\.\{i\} that other rules have, found none for 7"
    ):
        back(two, made)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("i = 2 * {a}", "expected numbers x such as"),
        ("{i} = 2 * {a} +", "expected numbers x such as"),
        ("{i} = 2", "expected numbers x such as"),
        ("{i} = 2 * {a} + {b}", r"expected a bound of at most 2 for \{b\}.*got none"),
        ("{i} = 2 * {a} + {b}, {b} < 3", "of at most 2.*got 3"),
        ("{i} = 3 * {a} + 2 * {b}, {b} < 1", "of at most 1"),
        ("{i} = 2 * {a} + {a}, {a} < 2", "once"),
        ("{i} = {a}, {b} < 2", "bounds for these only"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(MappingError, match=message):
        Numbering.parse("x", text)


def test_numbers_are_split_and_joined() -> None:
    numbering = Numbering.parse("x", "{i} = {turn} + 6 * {block} + 2 * first, {turn} < 5").at({"first": 3})
    assert numbering.split(5) is None
    assert numbering.split(6 + 5) is None
    assert numbering.split(6 + 12 + 4) == {"{block}": 2, "{turn}": 4}
    assert numbering.join({"{block}": 2, "{turn}": 4}) == 22


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("maxtext.full =", "maxtext.other =", r"expected only .*full, local.* in maxtext in rule 1"),
        ('"blocks/{i}/w : m f"', '"blocks/w : {i} m f"', r"expected \{i\} in the paths of jax"),
        ("local/w : m {block} {turn} f", "local/w : m {block} f", "expected the same axes on both sides"),
        ("full =", "weights =", "expected other names for numbers"),
        ('local = "', 'local = 2 #"', "expected a table .numbers. of texts"),
    ],
)
def test_rules_whose_cases_do_not_fit_are_refused(old: str, new: str, message: str) -> None:
    assert old in BLOCKS
    with pytest.raises(MappingError, match=message):
        parse_mapping(CONVENTIONS + BLOCKS.replace(old, new, 1), "table")
