"""The mapping language: what parses, what sizes it solves, and what it says about mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import einops
import numpy as np
import pytest

from bridge.core.mapping import MappingError, load_mapping, make_plan, parse_mapping
from bridge.core.mapping.language.entries import PathPattern
from bridge.core.mapping.language.expression import Affine, Expression, Undetermined
from bridge.core.mapping.language.rules import family_names, mapping_of, mapping_table
from tests.support.bridge.memory_reader import MemoryReader


def solve(
    text: str, shape: tuple[int, ...], known: dict[str, int] | None = None, **alias: str
) -> dict[str, int]:
    return Expression.parse(text).solve(shape, known or {}, alias)


def test_sizes_follow_from_the_shape() -> None:
    assert solve("(h d) m", (320, 331), {"d": 40}) == {"h": 8, "d": 40, "m": 331}
    assert solve("(a (b + c)) 1", (12, 1), {"a": 2, "c": 4}) == {"a": 2, "b": 2, "c": 4}
    assert solve("(gate + up) m", (14, 6), up="gate") == {"gate": 7, "up": 7, "m": 6}
    assert solve("", ()) == {}


def test_sizes_agree_with_einops() -> None:
    array = np.zeros((24, 5))
    assert einops.parse_shape(einops.rearrange(array, "(h d) m -> h d m", d=4), "h d m") == solve(
        "(h d) m", array.shape, {"d": 4}
    )


def test_an_axis_that_the_shape_leaves_open_is_named() -> None:
    expression = Expression.parse("(h d) m")
    with pytest.raises(Undetermined) as caught:
        expression.alternatives(expression.solve((320, 331), {}, {}))
    assert caught.value.axes == ("d", "h")


@pytest.mark.parametrize(
    ("text", "shape", "known", "message"),
    [
        ("(h d) m", (320,), {}, "expected 2 axes for '(h d) m', got shape (320,)"),
        (
            "(h d) m",
            (321, 4),
            {"d": 40},
            "expected a multiple of 40 for the size of an axis with h in it, got 321",
        ),
        (
            "(g (a + b)) m",
            (9, 4),
            {"g": 2, "b": 3},
            "expected a multiple of 2 plus 6 for the size of an axis with a in it, got 9",
        ),
        ("(a + b) m", (3, 4), {"a": 5}, "expected 5 or more"),
        ("a 1", (3, 2), {}, "expected size 1 on axis 1 of 'a 1' (), got 2"),
        ("a b", (3, 2), {"b": 4}, "expected size 4 on axis 1 of 'a b' (b=4), got 2"),
    ],
)
def test_shapes_that_contradict_the_expression_are_refused(
    text: str, shape: tuple[int, ...], known: dict[str, int], message: str
) -> None:
    with pytest.raises(MappingError, match=re.escape(message)):
        solve(text, shape, known)


@pytest.mark.parametrize(
    "text", ["(a", "a)", "a + b", "()", "(a +)", "a ? b", "a a", "(a b) a", "2", "((a + b) a)"]
)
def test_malformed_expressions_are_quoted(text: str) -> None:
    with pytest.raises(MappingError, match=re.escape(repr(text))):
        Expression.parse(text)


def test_a_concatenation_has_one_affine_alternative_per_part() -> None:
    expression = Expression.parse("(g (a + b)) m")
    assert expression.alternatives({"g": 3, "a": 2, "b": 4, "m": 5}) == (
        (Affine(0, (("g", 6), ("a", 1))), Affine(0, (("m", 1),))),
        (Affine(2, (("g", 6), ("b", 1))), Affine(0, (("m", 1),))),
    )


def test_path_indices_are_plain_numbers() -> None:
    pattern = PathPattern("layers.{i}.experts.{e}.w")
    assert pattern.match("layers.3.experts.10.w") == {"{i}": 3, "{e}": 10}
    assert pattern.format({"{i}": 3, "{e}": 10}) == "layers.3.experts.10.w"
    for name in (
        "layers.03.experts.1.w",
        "layers.x.experts.1.w",
        "layersX3.experts.1.w",
        "layers.3.experts.1.w2",
    ):
        assert pattern.match(name) is None


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ('torch = "a : x y"\njax = "b : x z"', "only torch has x y; only jax has x z"),
        ('torch = "a : (x + y) m"\njax = ["b : x m"]', "only torch has m y; only jax has none"),
        ('torch = "a.{i} : x"\njax = "b : x"', "only torch has x {i}; only jax has x"),
        ('torch = "a.{i}"\njax = "b"', "expected the same path indices on both sides"),
        ('torch = "a"\njax = "b : x"', "axis expressions on every entry or on none"),
        ('torch = "a"\njax = ["b", "c"]', "axis expressions on every entry or on none"),
        ('torch = "a.{i} : {i} x"\njax = "b : {i} x"', "either in the path or as an axis"),
        (
            'torch = "a : (x + x) m"\njax = "b : (x + x) m"',
            "every part of a concatenation to name its own axis",
        ),
        (
            'torch = ["a.{i} : x", "b : {i} y"]\njax = ["c : {i} x", "d : {i} y"]',
            "same path indices in all entries",
        ),
        ('torch = "a.{i}.{i}"\njax = "b"', "each index once in path"),
        ('torch = "a b"\njax = "b"', "expected a path such as"),
        ('torch = 3\njax = "b"', "a text or a list of texts for torch in rule 1"),
        ('jax = "b"', "a text or a list of texts for torch in rule 1"),
        ('torch = "a"\njax = "b"\nmaybe = true', "got maybe"),
        ('torch = "a"\njax = "b"\noptional = 1', "true or false for optional"),
    ],
)
def test_a_bad_rule_is_named_with_its_mistake(rule: str, message: str) -> None:
    with pytest.raises(MappingError, match=re.escape(message)) as caught:
        parse_mapping(f"[[rule]]\n{rule}\n", "mine.toml")
    assert "rule 1" in str(caught.value)
    assert "mine.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[rule", "expected a mapping file (TOML), got an error at: "),
        ("", "expected [[rule]] tables"),
        ("colour = 1", "got colour"),
        ("drop = 'x'\n[[rule]]\ntorch='a'\njax='b'", "a list of tensor names for drop"),
        ("[axes]\nd = -1\n[[rule]]\ntorch='a'\njax='b'", "for axis d of mapping mine.toml, got -1"),
        ("[axes]\nd = true\n[[rule]]\ntorch='a'\njax='b'", "for axis d of mapping mine.toml, got True"),
    ],
)
def test_a_bad_mapping_file_is_named_with_its_mistake(content: str, message: str) -> None:
    with pytest.raises(MappingError, match=re.escape(message)):
        parse_mapping(content, "mine.toml")


def test_families_ship_with_the_package_and_load() -> None:
    assert {"decoder", "decoder_stacked", "gemma2", "gpt2", "mixtral", "qwen2", "qwen3"} <= set(
        family_names()
    )
    for name in family_names():
        assert load_mapping(name).name == name


def test_an_unknown_family_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(MappingError, match=r"families .*decoder, decoder_stacked, .*, got 'decodr'"):
        load_mapping("decodr")
    with pytest.raises(MappingError, match="cannot read the mapping file"):
        load_mapping(tmp_path / "none.toml")


def test_a_mapping_file_loads_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('drop = ["model.rope.{i}", "extra.*"]\n[[rule]]\ntorch = "a"\njax = "b"\n')
    table = load_mapping(file)
    assert table.name == "mine"
    assert [table.drops(name) for name in ("model.rope.7", "model.rope.x", "extra.a.b", "model.a")] == [
        True,
        False,
        True,
        False,
    ]


def test_sizes_of_axes_that_no_rule_has_are_refused() -> None:
    rule = '[[rule]]\ntorch = "w : (h d)"\njax = "v : h d"'
    with pytest.raises(MappingError, match=r"expected sizes for axes of mapping test \(d, h\), got head"):
        parse_mapping(f"[axes]\nhead = 3\n{rule}", "test")
    with pytest.raises(MappingError, match=r"\(d, h\), got headdim"):
        parse_mapping(rule, "test").with_axes({"headdim": 7})


def test_an_axis_may_have_the_size_of_one_that_only_the_table_has() -> None:
    table = parse_mapping('[axes]\nh = "n"\nn = 4\n[[rule]]\ntorch = "w : (h d)"\njax = "v : h d"', "test")
    plan = make_plan(MemoryReader("dcp", {"model.w": np.zeros(12)}), "orbax", table)
    assert plan.tensors["params/v"].shape == (4, 3)


@pytest.mark.parametrize(
    "content",
    ['[[rule]]\ntorch = "w : ' + "(" * 3000 + "h" + ")" * 3000 + '"\njax = "v : h"', "drop = " + "[" * 5000],
)
def test_a_mapping_nested_beyond_reason_is_refused(content: str) -> None:
    with pytest.raises(MappingError, match="mapping test"):
        parse_mapping(content, "test")


def test_a_mapping_is_given_as_a_table_too() -> None:
    """For parity, convert and diff alike, which all ask ``mapping_table``."""
    text = 'name = "x"\n[[rule]]\ntorch = "w : o i_"\njax = "w : i_ o"\n'
    content = {"name": "x", "rule": [{"torch": "w : o i_", "jax": "w : i_ o"}]}
    mapping = mapping_table(content, {"o": 3})
    assert mapping is not None
    assert mapping.rules == parse_mapping(text, "x").rules
    assert mapping.axes == {"o": 3}
    for wrong, words in (
        ({"rules": []}, "expected only .* got rules"),
        ({"rule": {"torch": "w"}}, r"expected \[\[rule\]\] tables in mapping \(given as a table\)"),
        ({"rule": ["w"]}, "expected a table for rule 1"),
    ):
        with pytest.raises(MappingError, match=words):
            mapping_of(wrong, "(given as a table)")
