"""Proposed mappings: right where names and values tell, and doubtful, aloud, wherever something else fits as well."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from typer.testing import CliRunner, Result

from bridge.checkpoints.convert.conversion import convert
from bridge.commands.map import map_
from bridge.core.formats import open_checkpoint
from bridge.core.mapping.language.rules import load_mapping, parse_mapping
from bridge.propose.propose import Proposal, propose
from tests.checkpoints.test_convert import assert_same, tensors, write
from tests.support.bridge.decoder_trees import dcp_arrays, expected_orbax

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Arrays = Mapping[str, np.ndarray]
HEADS, KV, HEAD_DIM, D, FF, VOCAB, LAYERS = 4, 2, 8, 32, 48, 64, 3


@pytest.fixture(scope="module")
def llama() -> dict[str, np.ndarray]:
    """The state dict of a small Hugging Face Llama: query projections are square, as in the real ones."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=D,
        intermediate_size=FF,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        tie_word_embeddings=False,
    )
    state = LlamaForCausalLM(config).state_dict()
    # Norms begin as ones, which would tell nothing.
    return {name: (w + torch.randn(w.shape) / 9).numpy() for name, w in state.items()}


def flax_tree(hf: Arrays) -> dict[str, np.ndarray]:
    """The same weights as a flax tree, written out by hand."""
    tree = {
        "params/embed/embedding": hf["model.embed_tokens.weight"],
        "params/norm/scale": hf["model.norm.weight"],
        "params/lm_head/kernel": hf["lm_head.weight"].T,
    }
    for i in range(LAYERS):
        old, new = f"model.layers.{i}.", f"params/layers/{i}/"
        tree |= {
            new + "attention_norm/scale": hf[old + "input_layernorm.weight"],
            new + "mlp_norm/scale": hf[old + "post_attention_layernorm.weight"],
            new + "attention/query/kernel": hf[old + "self_attn.q_proj.weight"].T.reshape(D, HEADS, HEAD_DIM),
            new + "attention/key/kernel": hf[old + "self_attn.k_proj.weight"].T.reshape(D, KV, HEAD_DIM),
            new + "attention/value/kernel": hf[old + "self_attn.v_proj.weight"].T.reshape(D, KV, HEAD_DIM),
            new + "attention/out/kernel": hf[old + "self_attn.o_proj.weight"].T.reshape(HEADS, HEAD_DIM, D),
            new + "mlp/gate/kernel": hf[old + "mlp.gate_proj.weight"].T,
            new + "mlp/up/kernel": hf[old + "mlp.up_proj.weight"].T,
            new + "mlp/down/kernel": hf[old + "mlp.down_proj.weight"].T,
        }
    return {name: np.ascontiguousarray(array) for name, array in tree.items()}


def scanned_tree(tree: Arrays) -> dict[str, np.ndarray]:
    """As MaxText names and stacks it, layers along axis 1."""
    names = {
        "embed/embedding": "token_embedder/embedding",
        "norm/scale": "decoder/decoder_norm/scale",
        "lm_head/kernel": "decoder/logits_dense/kernel",
        "attention_norm/scale": "decoder/layers/pre_self_attention_layer_norm/scale",
        "mlp_norm/scale": "decoder/layers/post_self_attention_layer_norm/scale",
        "attention": "decoder/layers/self_attention",
        "mlp/gate": "decoder/layers/mlp/wi_0",
        "mlp/up": "decoder/layers/mlp/wi_1",
        "mlp/down": "decoder/layers/mlp/wo",
    }
    members: dict[str, list[np.ndarray]] = {}
    for name, array in tree.items():
        rest = re.sub(r"layers/\d+/", "", name.removeprefix("params/"))
        for old, new in names.items():
            if rest.startswith(old):
                members.setdefault(f"params/params/{new}{rest.removeprefix(old)}", []).append(array)
                break
    return {
        n: np.stack(several, axis=1) if len(several) > 1 else several[0] for n, several in members.items()
    }


def saved(path: Path, format: str, arrays: Arrays) -> Path:
    write(path, format, arrays, {})
    return path


def as_dcp(hf: Arrays) -> dict[str, np.ndarray]:
    return {f"model.{name}": array for name, array in hf.items()}


def rules_of(text: str) -> set[tuple[str, ...]]:
    """Rules without the names of their axes."""
    rules = set()
    for rule in tomllib.loads(text)["rule"]:
        sides = [rule[side] if isinstance(rule[side], list) else [rule[side]] for side in ("torch", "jax")]
        names: dict[str, str] = {}
        texts = []
        for entry in (entry for side in sides for entry in side):
            path, _, axes = entry.partition(" : ")
            for word in re.findall(r"(?<!\{)\b[a-z]\w*\b", axes):
                names.setdefault(word, f"x{len(names)}")
            pieces = re.split(r"(\{\w\}|\W)", axes)
            texts.append(f"{path} : {''.join(names.get(piece, piece) for piece in pieces)}")
        rules.add(tuple(texts))
    return rules


@pytest.mark.fast_cases("decoder_stacked")
@pytest.mark.parametrize("family", ["decoder", "decoder_stacked"])
def test_the_shipped_family_of_our_decoder_is_found_again(tmp_path: Path, family: str) -> None:
    stacked = family == "decoder_stacked"
    a = saved(tmp_path / "a", "dcp", dcp_arrays())
    b = saved(tmp_path / "b", "orbax", expected_orbax(dcp_arrays(), stacked=stacked))
    by_name, by_value = propose(a, b), propose(a, b, values=True)
    assert rules_of(by_name.text) == rules_of(by_value.text)
    assert (by_name.certain, by_value.certain) == (False, True)
    for proposal in (by_name, by_value):
        table = parse_mapping(proposal.text, "proposed")
        shipped = load_mapping(family)
        assert {tuple(e.path.text for e in (*r.sides["torch"], *r.sides["jax"])) for r in table.rules} == {
            tuple(e.path.text for e in (*r.sides["torch"], *r.sides["jax"])) for r in shipped.rules
        }
        convert(a, tmp_path / f"{proposal.certain}", mapping=table)
        assert_same(tensors(tmp_path / f"{proposal.certain}"), tensors(b))


def test_hugging_face_llama_to_flax_by_names_alone_is_right_and_doubted(
    tmp_path: Path, llama: Arrays
) -> None:
    a = saved(tmp_path / "a", "dcp", as_dcp(llama))
    b = saved(tmp_path / "b", "orbax", flax_tree(llama))
    proposal = propose(a, b)
    assert (proposal.left_a, proposal.left_b) == ((), ())
    convert(a, tmp_path / "c", mapping=parse_mapping(proposal.text, "proposed"))
    assert_same(tensors(tmp_path / "c"), tensors(b))
    doubts = {rule.a[0].partition(" : ")[0]: " | ".join(rule.doubts) for rule in proposal.rules}
    layer = "model.layers.{i}."
    # torch's weight is [out, in] and flax's kernel [in, out], also where both are square.
    assert "also fits" not in doubts[layer + "self_attn.q_proj.weight"]
    assert "rotary" in doubts[layer + "self_attn.q_proj.weight"]
    assert doubts[layer + "self_attn.v_proj.weight"] == ""
    assert "layers/{i}/mlp_norm/scale would fit" in doubts[layer + "input_layernorm.weight"]
    assert doubts["model.norm.weight"] == ""
    assert proposal.text.count("# uncertain: ") == proposal.doubts > 0


@pytest.mark.parametrize("scanned", [False, True])
def test_values_settle_every_doubt_about_hugging_face_llama(
    tmp_path: Path, llama: Arrays, scanned: bool
) -> None:
    tree = scanned_tree(flax_tree(llama)) if scanned else flax_tree(llama)
    a, b = saved(tmp_path / "a", "dcp", as_dcp(llama)), saved(tmp_path / "b", "orbax", tree)
    proposal = propose(a, b, values=True)
    assert proposal.certain, proposal.text
    root = "params/params/" if scanned else "params/"
    rules = {rule.a[0].partition(" : ")[0]: rule.b[0] for rule in proposal.rules}
    assert len(rules) == 12
    expressions = {name: text.partition(" : ")[2] for name, text in rules.items()}
    assert expressions["model.layers.{i}.self_attn.q_proj.weight"] == ("m {i} h d" if scanned else "m h d")
    if not scanned:
        convert(b, tmp_path / "c", mapping=parse_mapping(proposal.text, "proposed"))
        assert_same(tensors(tmp_path / "c"), as_dcp(llama))
    assert all((root + name).startswith(root) for name in rules.values())


@pytest.mark.parametrize(
    ("family", "config", "model", "more"),
    [
        ("qwen3", Qwen3Config, Qwen3ForCausalLM, {"head_dim": HEAD_DIM}),
        ("mixtral", MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4}),
        ("gemma2", Gemma2Config, Gemma2ForCausalLM, {"head_dim": HEAD_DIM}),
    ],
)
def test_the_shipped_family_of_a_hugging_face_model_is_found_again(
    tmp_path: Path, family: str, config: Any, model: Any, more: dict[str, int]
) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": D, "intermediate_size": FF, "num_hidden_layers": 2}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV, "tie_word_embeddings": False}
    weights = model(config(**sizes, **heads, **more)).state_dict().items()
    arrays = as_dcp({name: (w + torch.randn(w.shape) / 9).numpy() for name, w in weights})
    a = saved(tmp_path / "a", "dcp", arrays)
    convert(a, tmp_path / "b", mapping=family, axes={"d": HEAD_DIM})
    by_name, by_value = propose(a, tmp_path / "b"), propose(a, tmp_path / "b", values=True)
    assert by_value.certain, by_value.text
    assert {(rule.a, rule.b) for rule in by_name.rules} == {(rule.a, rule.b) for rule in by_value.rules}


def test_values_win_over_names(tmp_path: Path, llama: Arrays) -> None:
    tree = flax_tree(llama)
    for i in range(LAYERS):
        key, value = (f"params/layers/{i}/attention/{projection}/kernel" for projection in ("key", "value"))
        tree[key], tree[value] = tree[value], tree[key]
    a, b = saved(tmp_path / "a", "dcp", as_dcp(llama)), saved(tmp_path / "b", "orbax", tree)
    rules = {r.a[0].partition(" : ")[0]: r.b[0] for r in propose(a, b, values=True).rules}
    assert rules["model.layers.{i}.self_attn.k_proj.weight"].startswith("layers/{i}/attention/value/kernel")


def test_other_values_settle_nothing_and_are_said_to_differ(tmp_path: Path, llama: Arrays) -> None:
    a = saved(tmp_path / "a", "dcp", as_dcp(llama))
    b = saved(tmp_path / "b", "orbax", {n: x + 1 for n, x in flax_tree(llama).items()})
    by_name, by_value = propose(a, b), propose(a, b, values=True)
    assert rules_of(by_name.text) == rules_of(by_value.text)
    assert all("the sampled elements differ" in rule.doubts for rule in by_value.rules)


def test_weights_that_are_all_one_number_settle_nothing(tmp_path: Path) -> None:
    ones = {"model.a.ln_1.weight": np.ones(5, np.float32), "model.a.ln_2.weight": np.ones(5, np.float32)}
    a = saved(tmp_path / "a", "dcp", ones)
    b = saved(
        tmp_path / "b",
        "orbax",
        {
            "params/a/mlp_norm/scale": np.ones(5, np.float32),
            "params/a/attention_norm/scale": np.ones(5, np.float32),
        },
    )
    proposal = propose(a, b, values=True)
    assert [(r.a[0], r.b[0]) for r in proposal.rules] == [
        ("a.ln_1.weight", "a/attention_norm/scale"),
        ("a.ln_2.weight", "a/mlp_norm/scale"),
    ]
    assert all(any("are equal" in doubt for doubt in rule.doubts) for rule in proposal.rules)
    assert all(any("by name only" in doubt for doubt in rule.doubts) for rule in proposal.rules)


def test_fused_projections_of_gpt2_are_taken_apart(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=50, n_positions=20, n_embd=24, n_layer=2, n_head=3)
    state = {n: (w + torch.randn(w.shape)).numpy() for n, w in GPT2LMHeadModel(config).state_dict().items()}
    state.pop("lm_head.weight")
    tree = {}
    for i in range(2):
        w, bias = (state[f"transformer.h.{i}.attn.c_attn.{leaf}"] for leaf in ("weight", "bias"))
        for part, name in enumerate(("query", "key", "value")):
            columns = slice(24 * part, 24 * (part + 1))
            tree[f"params/h/{i}/attn/{name}/kernel"] = w[:, columns].reshape(24, 3, 8)
            tree[f"params/h/{i}/attn/{name}/bias"] = bias[columns].reshape(3, 8)
    source = {f"model.{n}": x for n, x in state.items() if ".c_attn." in n}
    a, b = saved(tmp_path / "a", "dcp", source), saved(tmp_path / "b", "orbax", tree)
    proposal = propose(a, b, values=True)
    assert proposal.certain, proposal.text
    assert {tuple(map(len, (rule.a, rule.b))) for rule in proposal.rules} == {(1, 3)}
    convert(a, tmp_path / "c", mapping=parse_mapping(proposal.text, "proposed"))
    assert_same(tensors(tmp_path / "c"), tensors(b))
    assert any("their order is taken from names" in d for rule in propose(a, b).rules for d in rule.doubts)


def test_values_tell_the_order_of_fused_parts(tmp_path: Path) -> None:
    tree = expected_orbax(dcp_arrays(moments=False))
    for i in range(3):
        gate, up = (f"params/layers/{i}/mlp/{part}/kernel" for part in ("gate", "up"))
        tree[gate], tree[up] = tree[up], tree[gate]
    a = saved(tmp_path / "a", "dcp", dcp_arrays(moments=False))
    b = saved(tmp_path / "b", "orbax", tree)
    proposal = propose(a, b, values=True)
    assert proposal.certain
    convert(a, tmp_path / "c", mapping=parse_mapping(proposal.text, "proposed"))
    assert_same(tensors(tmp_path / "c"), tensors(b))


def test_stacked_experts_get_two_indices(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((2, 4, 5, 7)).astype(np.float32)
    source = {f"model.layers.{i}.moe.experts.{j}.w1.weight": w[i, j] for i in range(2) for j in range(4)}
    a = saved(tmp_path / "a", "dcp", source)
    b = saved(
        tmp_path / "b",
        "orbax",
        {f"params/layers/{i}/moe/gate/kernel": w[i].transpose(0, 2, 1).copy() for i in (0, 1)},
    )
    (rule,) = propose(a, b, values=True).rules
    path, _, axes = rule.b[0].partition(" : ")
    assert path == "layers/{i}/moe/gate/kernel"
    assert axes.split()[0] == "{j}"
    assert rule.doubts == ()


def test_what_has_no_counterpart_is_listed_and_not_guessed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y, z = (rng.standard_normal(n).astype(np.float32) for n in (5, 5, 9))
    a = saved(tmp_path / "a", "dcp", {"model.apple": x, "model.pear": y, "model.alone": z})
    b = saved(tmp_path / "b", "orbax", {"params/cat": x, "params/dog": y, "params/single": z[:7]})
    proposal = propose(a, b)
    assert proposal.rules == ()
    assert (set(proposal.left_a), set(proposal.left_b)) == (
        {"apple", "pear", "alone"},
        {"cat", "dog", "single"},
    )
    assert "# unmatched in torch: alone" in proposal.text
    assert not proposal.certain
    # Unlike names are no hindrance where the values agree.
    by_value = propose(a, b, values=True)
    assert {(r.a, r.b) for r in by_value.rules} == {(("apple",), ("cat",)), (("pear",), ("dog",))}
    assert (by_value.left_a, by_value.left_b) == (("alone",), ("single",))


def test_a_unique_shape_pairs_unlike_names_with_a_doubt(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a = saved(tmp_path / "a", "dcp", {"model.apple": rng.standard_normal((5, 3))})
    b = saved(tmp_path / "b", "orbax", {"params/cat": rng.standard_normal((3, 5))})
    (rule,) = propose(a, b).rules
    assert rule.doubts == ("by shape only: the names have nothing in common",)


def test_names_cannot_write_into_the_mapping_file(tmp_path: Path) -> None:
    evil = 'w\n[[rule]]\ntorch = "y"\x1b[2J'
    a = saved(tmp_path / "a", "dcp", {f"model.{evil}": np.ones(3), 'model.say "hi"\\': np.arange(4.0)})
    names = {f"params/{evil}": np.ones(3), 'params/"hi"\\': np.arange(4.0), "params/a:b": np.ones(3)}
    proposal = propose(a, saved(tmp_path / "b", "orbax", names))
    assert proposal.rules == ()
    assert len(proposal.left_a) == 2
    assert len(proposal.left_b) == 3
    assert all(
        line.startswith("#") or line in ("", 'name = "proposed"') for line in proposal.text.splitlines()
    )
    assert "\x1b" not in proposal.text


def test_quotes_in_names_are_kept(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", "dcp", {'model.say"hi"\\': np.arange(4.0)})
    b = saved(tmp_path / "b", "orbax", {'params/say"hi"\\': np.arange(4.0)})
    (rule,) = parse_mapping(propose(a, b).text, "proposed").rules
    assert (rule.sides["torch"][0].path.text, rule.sides["jax"][0].path.text) == ('say"hi"\\', 'say"hi"\\')


def call(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(map_)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_writes_the_file_and_exits_by_certainty(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", "dcp", dcp_arrays())
    b = saved(tmp_path / "b", "orbax", expected_orbax(dcp_arrays()))
    result = call(a, b, "--out", tmp_path / "m.toml")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "uncertain, 4 of 11 rules: layers.{i}.attention.wq.weight" in result.stderr
    assert load_mapping(tmp_path / "m.toml").rules
    result = call(a, b, "--values")
    assert (result.exit_code, result.stderr) == (0, "")
    assert parse_mapping(result.stdout, "stdout").rules
    document = json.loads(call(a, b, "--values", "--json").stdout)
    assert (document["certain"], len(document["rules"])) == (True, 11)
    again = call(a, b, "--out", tmp_path / "m.toml")
    assert again.exit_code == 2
    # The box around the message may break a long path.
    assert "m.toml" in re.sub(r"[│\s]", "", again.stderr)
    assert call(a, tmp_path / "none").exit_code == 2


def test_both_sides_may_be_of_one_format(tmp_path: Path, llama: Arrays) -> None:
    def torchtitan(name: str) -> str:
        table = {
            "self_attn": "attention",
            "mlp": "feed_forward",
            "q_proj": "wq",
            "k_proj": "wk",
            "v_proj": "wv",
        }
        table |= {"o_proj": "wo", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "lm_head": "output"}
        table |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
        table |= {"embed_tokens": "tok_embeddings"}
        return ".".join(table.get(part, part) for part in name.removeprefix("model.").split("."))

    a = saved(tmp_path / "a", "dcp", as_dcp(llama))
    b = saved(tmp_path / "b", "dcp", {f"model.{torchtitan(name)}": array for name, array in llama.items()})
    proposal: Proposal = propose(a, b, values=True)
    assert proposal.certain
    assert {(r.a[0].partition(" : ")[0], r.b[0].partition(" : ")[0]) for r in proposal.rules} == {
        (re.sub(r"\.\d+\.", ".{i}.", name), re.sub(r"\.\d+\.", ".{i}.", torchtitan(name))) for name in llama
    }
    with open_checkpoint(b) as reader:
        assert len(reader.tensors) == len(llama)
