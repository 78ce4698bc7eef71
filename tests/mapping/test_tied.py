"""Weights that one code base stores once and another under two names."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bridge.commands.main import app
from bridge.core.formats import open_checkpoint
from bridge.core.formats.tensors.base import Box
from bridge.core.mapping import MappingError, MappingTable, Plan, load_mapping, make_plan, parse_mapping
from bridge.core.mapping.language.table import Tied
from tests.checkpoints.test_convert import write
from tests.support.bridge.bits import random_bits, same_bits
from tests.support.bridge.decoder_trees import HEAD_DIM, dcp_arrays
from tests.support.bridge.memory_reader import MemoryReader

F32 = np.dtype(np.float32)


def decoder(tied: Tied | None) -> MappingTable:
    return load_mapping("decoder").with_tied(tied)


def contents(plan: Plan, reader: MemoryReader) -> dict[str, np.ndarray]:
    return {name: t.read(reader, Box.whole(t.shape)) for name, t in plan.tensors.items()}


def test_a_target_with_both_names_gets_both_from_one() -> None:
    reader = MemoryReader("dcp", dcp_arrays(tied=True))
    converted = contents(make_plan(reader, "orbax", decoder("both")), reader)
    embedding = reader.arrays["model.embed.weight"]
    assert same_bits(converted["params/lm_head/kernel"], np.array(embedding.T, order="C"))
    assert same_bits(converted["params/embed/embedding"], embedding)
    assert "opt_state/mu/lm_head/kernel" not in converted
    assert "opt_state/mu/embed/embedding" in converted


def test_a_target_with_one_name_gets_one_of_two_that_are_equal_and_back() -> None:
    arrays = dcp_arrays(tied=True)
    both = MemoryReader("dcp", arrays | {"model.lm_head.weight": arrays["model.embed.weight"].copy()})
    plan = make_plan(both, "orbax", decoder("once"))
    assert plan.dropped == ("model.lm_head.weight",)
    jax = MemoryReader("orbax", contents(plan, both))
    assert "params/lm_head/kernel" not in jax.arrays
    back = contents(make_plan(jax, "dcp", decoder("both")), jax)
    assert back.keys() == both.arrays.keys()
    assert [name for name, array in both.arrays.items() if not same_bits(back[name], array)] == []


ONE_NAME = """
[[rule]]
torch = "embed.weight : v m"
jax = "embed/embedding : v m"
maxtext = "token_embedder/embedding : v m"
[[rule]]
torch = "lm_head.weight : v m"
jax = "lm_head/kernel : m v"
optional = true
tied_to = "embed.weight"
[convention.torch]
[convention.jax]
[convention.maxtext]
format = ""
"""


def test_a_convention_with_one_name_for_both_gets_one_and_a_state_dict_both_again() -> None:
    embedding = random_bits((5, 3), np.dtype(np.float32), 0)
    arrays = {"model.embed.weight": embedding, "model.lm_head.weight": embedding.copy()}
    both = MemoryReader("dcp", arrays)
    table = parse_mapping(ONE_NAME, "one")
    plan = make_plan(both, "orbax", table, into="maxtext")
    assert plan.dropped == ("model.lm_head.weight",)
    tree = MemoryReader("orbax", contents(plan, both))
    assert len(tree.arrays) == 1
    back = contents(make_plan(tree, "dcp", table, into="torch"), tree)
    assert back.keys() == arrays.keys()
    assert all(same_bits(back[name], embedding) for name in arrays)
    # A convention that has both names keeps both.
    assert make_plan(both, "orbax", table, into="jax").dropped == ()


def test_a_model_of_two_weights_does_not_fit_a_convention_with_one_name() -> None:
    arrays = {
        f"model.{name}.weight": np.full((5, 3), k, np.float32) for k, name in enumerate(["embed", "lm_head"])
    }
    with pytest.raises(
        MappingError, match=r"lm_head\.weight of memory differs .*convention maxtext has one tensor"
    ):
        make_plan(MemoryReader("dcp", arrays), "orbax", parse_mapping(ONE_NAME, "one"), into="maxtext")


def test_two_that_differ_in_one_bit_are_not_tied() -> None:
    arrays = dcp_arrays(tied=True)
    other = arrays["model.embed.weight"].copy()
    other.view(np.uint32)[-1, -1] ^= 1
    reader = MemoryReader("dcp", arrays | {"model.lm_head.weight": other})
    with pytest.raises(
        MappingError, match=r"model\.lm_head\.weight of memory differs from model\.embed\.weight"
    ):
        make_plan(reader, "orbax", decoder("once"))


def test_two_with_an_optimizer_state_each_are_not_tied() -> None:
    arrays = dcp_arrays()
    arrays["model.lm_head.weight"] = arrays["model.embed.weight"].copy()
    reader = MemoryReader("dcp", arrays)
    with pytest.raises(
        MappingError,
        match=r"optimizer\.state.* is optimizer state of a tied weight: expected no state of lm_head\.weight",
    ):
        make_plan(reader, "orbax", decoder("once"))


@pytest.mark.parametrize("tied", [None, "once", "both"])
def test_a_model_that_has_one_or_two_keeps_them_unless_asked(tied: Tied | None) -> None:
    once = MemoryReader("dcp", dcp_arrays(tied=True))
    assert ("params/lm_head/kernel" in make_plan(once, "orbax", decoder(tied)).tensors) == (tied == "both")
    if tied != "once":
        two = MemoryReader("dcp", dcp_arrays())
        converted = contents(make_plan(two, "orbax", decoder(tied)), two)
        assert same_bits(
            converted["params/lm_head/kernel"], np.array(two.arrays["model.lm_head.weight"].T, order="C")
        )
        assert "opt_state/nu/lm_head/kernel" in converted


def test_the_command_line_ties_and_says_what_it_left_out(tmp_path: Path) -> None:
    arrays = dcp_arrays(tied=True)
    both = arrays | {"model.lm_head.weight": arrays["model.embed.weight"].copy()}
    write(tmp_path / "torch", "dcp", both, {})
    arguments = ["convert", str(tmp_path / "torch"), str(tmp_path / "jax"), "--tied", "once"]
    result = CliRunner().invoke(app, [*arguments, "--mapping", "decoder"])
    assert result.exit_code == 0, result.output
    assert "model.lm_head.weight" in result.output
    with open_checkpoint(tmp_path / "jax") as jax_tree:
        assert "params/lm_head/kernel" not in jax_tree.tensors
    for command in ("convert", "diff"):
        result = CliRunner().invoke(
            app, [command, str(tmp_path / "torch"), str(tmp_path / "no"), "--tied", "once"]
        )
        assert result.exit_code == 2
        assert "--tied needs --mapping" in " ".join(result.output.split())
    for option in (["--into", "jax"], ["--from", "torch"]):
        result = CliRunner().invoke(app, ["diff", str(tmp_path / "torch"), str(tmp_path / "jax"), *option])
        assert result.exit_code == 2
        assert f"{option[0]} needs --mapping" in " ".join(result.output.split())


def test_the_same_holds_between_layouts_and_conventions() -> None:
    mapping = load_mapping("llama").with_axes({"d": HEAD_DIM + 1, "llama3_rope": 1})
    entries = [entry for rule in mapping.rules for entry in rule.entries("hf")]
    shapes = {"(gate f) m": (7, 5), "(up f) m": (7, 5), "m f": (5, 7), "m": (5,), "v m": (9, 5)}
    arrays = {}
    for entry in entries:
        axes = entry.expression.text if entry.expression else "m"
        shape = shapes.get(axes, (12, 5) if axes.endswith(" m") else (5, 12))
        for i in range(2 if "{i}" in entry.path.text else 1):
            arrays[entry.path.text.replace("{i}", str(i))] = random_bits(shape, F32, len(arrays))
    del arrays["lm_head.weight"]
    reader = MemoryReader("dcp", arrays)
    plan = make_plan(reader, "orbax", mapping.with_tied("both"), into="maxtext")
    logits = contents(plan, reader)["params/params/decoder/logits_dense/kernel"]
    assert same_bits(logits, np.array(arrays["model.embed_tokens.weight"].T, order="C"))


@pytest.mark.parametrize(
    "family", ["decoder", "decoder_stacked", "gemma2", "gpt2", "llama", "mixtral", "qwen2", "qwen3"]
)
def test_every_family_knows_that_its_head_may_be_its_embedding(family: str) -> None:
    (rule,) = [rule for rule in load_mapping(family).rules if rule.tied_to]
    assert re.search("lm_head.weight : (v|vocab) m", str(rule))
    assert re.search("embed/embedding : (v|vocab) m", str(load_mapping(family).rule_of(rule.tied_to)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('tied_to = "x.y"', "expected the path of a rule of mapping test for tied_to, got 'x.y'"),
        ("tied_to = 3", "expected a path of another rule for tied_to in rule 2"),
        ('tied_to = "e.w"', "expected the same axes on both sides of rule"),
    ],
)
def test_a_rule_that_cannot_be_tied_is_refused(text: str, message: str) -> None:
    first = '[[rule]]\ntorch = "e.w : v m"\njax = "e/w : v m"\n'
    rules = f'{first}[[rule]]\ntorch = "h.w : m n"\njax = "h/w : m n"\n{text}\n'
    with pytest.raises(MappingError, match=message):
        parse_mapping(rules, "test")
    with pytest.raises(MappingError, match="expected once or both for tied in mapping test, got 'twice'"):
        parse_mapping('tied = "twice"\n' + rules.replace(text, ""), "test")
