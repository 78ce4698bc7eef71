"""Sizes that the shapes leave open: all asked for at once; and problems of one kind in one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.rules import load_mapping, parse_mapping
from bridge.core.mapping.plan.translation import make_plan
from tests.support.bridge.memory_reader import MemoryReader


def told(arrays: dict[str, Any], mapping: Any, to: str = "orbax", **options: Any) -> str:
    with pytest.raises(MappingError) as caught:
        make_plan(MemoryReader("dcp", arrays), to, mapping, **options)
    return str(caught.value)


def llama(heads: int = 32, kv_heads: int = 8, size: int = 128, layers: int = 2) -> dict[str, Any]:
    wide = 16

    def zeros(*shape: int) -> np.ndarray:
        return np.broadcast_to(np.zeros((), np.float32), shape)

    arrays: dict[str, Any] = {
        "model.embed_tokens.weight": zeros(50, wide),
        "lm_head.weight": zeros(50, wide),
        "model.norm.weight": zeros(wide),
    }
    for i in range(layers):
        at = f"model.layers.{i}."
        arrays |= {
            f"{at}self_attn.q_proj.weight": zeros(heads * size, wide),
            f"{at}self_attn.k_proj.weight": zeros(kv_heads * size, wide),
            f"{at}self_attn.v_proj.weight": zeros(kv_heads * size, wide),
            f"{at}self_attn.o_proj.weight": zeros(wide, heads * size),
            **{f"{at}mlp.{n}_proj.weight": zeros(24, wide) for n in ("gate", "up")},
            f"{at}mlp.down_proj.weight": zeros(wide, 24),
            **{f"{at}{n}.weight": zeros(wide) for n in ("input_layernorm", "post_attention_layernorm")},
        }
    return arrays


def test_all_rules_of_a_family_ask_for_one_size_in_one_sentence_with_what_the_shapes_allow() -> None:
    message = told(llama(), load_mapping("llama"), into="flax")
    assert "\n" not in message
    assert (
        "mapping llama: the size of axis d (by the shapes a divisor of 1024, such as 128 or 64 or 256)"
        in message
    )
    assert "and 1 more need it: expected a config.json next to the checkpoint" in message
    assert "--axis d=SIZE on the command line" in message
    mapping = load_mapping("llama").with_axes({"d": 128})
    assert make_plan(MemoryReader("dcp", llama()), "orbax", mapping, into="flax").tensors


FUSED = """
[[rule]]
torch = "qkv.{i} : (k (r interleaved(d) + interleaved(d2) + d3)) m"
jax = [
    "{i}/q : m (k r) d",
    "{i}/k : m k d2",
    "{i}/v : m k d3",
]
"""


def test_all_sizes_of_a_fused_rule_are_asked_for_at_once_and_suffice() -> None:
    arrays = {f"model.qkv.{i}": np.zeros((4 * (2 * 6 + 6 + 6), 5), np.float32) for i in range(3)}
    message = told(arrays, parse_mapping(FUSED, "fused"))
    # The fifth follows from the others.
    assert message == (
        "mapping fused: the sizes of axes d, d2, d3, k (by the shapes a divisor of 96, such as 96 or 32 or 16) do not "
        "follow from the shapes, and rule qkv.{i} : (k (r interleaved(d) + interleaved(d2) + d3)) m <-> {i}/q : m (k "
        "r) d & ... needs them: expected a config.json next to the checkpoint that decides, or the mapping's [axes] "
        "table, or --axis d=SIZE --axis d2=SIZE --axis d3=SIZE --axis k=SIZE on the command line, or, in a program, "
        "load_mapping(...).with_axes({'d': SIZE, 'd2': SIZE, 'd3': SIZE, 'k': SIZE})"
    )
    table = parse_mapping(FUSED, "fused").with_axes({"d": 6, "d2": 6, "d3": 6, "k": 4})
    plan = make_plan(MemoryReader("dcp", arrays), "orbax", table)
    assert plan.tensors["params/2/q"].shape == (5, 8, 6)
    assert plan.tensors["params/0/v"].shape == (5, 4, 6)


@pytest.mark.parametrize(
    ("third", "names", "told_text"),
    [
        ("", ["x"], "1 of 1 tensors match no rule: model.x. 2 of 2 rules found no tensor: a, b.{i}."),
        ("", ["x", "a", "b.0"], "1 of 3 tensors match no rule: model.x. Mapping m knows a, b.{i}."),
        ("", ["a"], "1 of 2 rules found no tensor: b.{i}."),
        (
            'hf = "c"',
            ["a"],
            "The nearest of its conventions (torch, jax, hf) is torch. 1 of 2 rules found no tensor: b.{i}.",
        ),
    ],
)
def test_what_does_not_fit_is_told_in_full(third: str, names: list[str], told_text: str) -> None:
    conventions = "[convention.torch]\n[convention.jax]\n" + ("[convention.hf]\n" if third else "")
    rules = f'[[rule]]\ntorch = "a"\njax = "a"\n{third}\n[[rule]]\ntorch = "b.{{i}}"\njax = "b/{{i}}"\n'
    arrays = {f"model.{name}": np.zeros(2) for name in names}
    assert told(arrays, parse_mapping(conventions + rules, "m"), into="jax") == (
        f"mapping m does not fit memory; is this another model? {told_text} Add rules, list the tensors to leave out "
        "under drop, or leave the mapping out to keep the names."
    )


def test_sizes_that_the_tables_of_a_mapping_name_are_asked_for_first() -> None:
    text = 'torch = "w : (h a) m"\njax = "w : m h a"\n'
    for axis in ("h", "a"):
        table = parse_mapping(f'[config]\n{axis} = ["n"]\n[[rule]]\n{text}', "t")
        message = told({"model.w": np.zeros((12, 2))}, table)
        assert f"the size of axis {axis} (by the shapes a divisor of 12)" in message
        assert f"--axis {axis}=SIZE" in message


@pytest.mark.parametrize(
    ("expression", "shape", "allowed"),
    [
        ("(h a) m", (1, 2), "(by the shapes 1)"),
        ("(h a) m", (6, 2), "(by the shapes one of 1, 2, 3, 6)"),
        ("(h a) m", (67, 2), "(by the shapes a divisor of 67)"),
        ("(h a) m", (0, 2), "axis a does"),
        ("(h a) m", (4096, 2), "(by the shapes a divisor of 4096, such as 128 or 64 or 256)"),
        ("(h interleaved(a)) m", (64, 2), "(by the shapes a divisor of 64, such as 64 or 32 or 16)"),
    ],
)
def test_what_the_shapes_allow(expression: str, shape: tuple[int, int], allowed: str) -> None:
    jax = "w : m h a"
    table = parse_mapping(f'[config]\na = ["n"]\n[[rule]]\ntorch = "w : {expression}"\njax = "{jax}"\n', "t")
    assert allowed in told({"model.w": np.zeros(shape)}, table)


def test_a_divisor_that_is_asked_for_fits_all_tensors() -> None:
    message = told(llama(heads=6, kv_heads=2, size=12), load_mapping("llama"), into="flax")
    assert "axis d (by the shapes a divisor of 24)" in message


RULES = """
[[rule]]
torch = "layers.{i}.a"
jax = "layers/{i}/a"
[[rule]]
torch = "layers.{i}.b"
jax = "layers/{i}/b"
[[rule]]
torch = "layers.{i}.c"
jax = "layers/{i}/c"
[[rule]]
torch = "layers.{i}.d"
jax = "layers/{i}/d"
[[rule]]
torch = "layers.{i}.e"
jax = "layers/{i}/e"
"""


def test_rules_that_lack_the_same_numbers_are_one_sentence() -> None:
    arrays = {f"model.layers.{i}.{n}": np.zeros(2) for n in "abcde" for i in range(3) if n == "a" or i == 0}
    message = told(arrays, parse_mapping(RULES, "rules"))
    assert message == (
        "rule layers.{i}.b <-> layers/{i}/b, layers.{i}.c <-> layers/{i}/c, layers.{i}.d <-> layers/{i}/d, "
        "layers.{i}.e <-> layers/{i}/e: expected a tensor for each layers.{i} that other rules have, found none for "
        "1, 2; if the model really lacks the tensor, mark the rule optional"
    )


def test_tensors_with_one_problem_are_one_sentence_with_a_count_and_five_names() -> None:
    rules = '[[rule]]\ntorch = "a.{i}"\njax = "a/{i}"\n[[rule]]\ntorch = "a.{k}"\njax = "b/{k}"\n'
    message = told({f"model.a.{i}": np.zeros(2) for i in range(30)}, parse_mapping(rules, "twice"))
    assert message.splitlines()[0] == (
        "tensor model.a.0, model.a.1, model.a.2, model.a.3, model.a.4 and 25 more matches two rules: "
        "a.{i} <-> a/{i} and a.{k} <-> b/{k}"
    )
