"""Every tensor of a Llama in every convention against trees written by hand with NumPy and Meta's own formula."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from bridge.core.formats.tensors.base import Box
from bridge.core.mapping import load_mapping, make_plan
from tests.mapping.test_conventions import AXES, HEADS, KV, LAYERS, TITANS, D, M, hf_checkpoint, meta_rows
from tests.support.bridge.bits import same_bits
from tests.support.bridge.memory_reader import MemoryReader

Arrays = dict[str, np.ndarray]
Get = Callable[[str], np.ndarray]


def titan(get: Get, version: str = "", *, moments: bool = False) -> Arrays:
    head = "output" if version == "0_2" else "lm_head"
    tree = {
        "tok_embeddings.weight": get("model.embed_tokens.weight"),
        "norm.weight": get("model.norm.weight"),
        f"{head}.weight": get("lm_head.weight"),
    }
    for i in range(LAYERS):
        old, new = f"model.layers.{i}.", f"layers.{i}."
        qkv = {
            "wq.weight": meta_rows(get(old + "self_attn.q_proj.weight"), HEADS),
            "wk.weight": meta_rows(get(old + "self_attn.k_proj.weight"), KV),
            "wv.weight": get(old + "self_attn.v_proj.weight"),
        }
        gate, up = get(old + "mlp.gate_proj.weight"), get(old + "mlp.up_proj.weight")
        if version == "fused" or (version == "" and moments):
            # torchtitan's FusedQKVLinear: for each key head its query heads, the key head and the value head.
            parts = [rows.reshape(KV, -1, D, M) for rows in qkv.values()]
            qkv = {"wqkv.weight": np.concatenate(parts, axis=1).reshape(-1, M)}
        prefix = "attention." if version == "0_2" else "attention.qkv_linear."
        tree |= {f"{new}{prefix}{name}": array for name, array in qkv.items()}
        if version == "fused":
            tree[new + "feed_forward.w13.weight"] = np.stack([gate, up])
        else:
            tree |= {new + "feed_forward.w1.weight": gate, new + "feed_forward.w3.weight": up}
        tree |= {
            new + "attention_norm.weight": get(old + "input_layernorm.weight"),
            new + "attention.wo.weight": get(old + "self_attn.o_proj.weight"),
            new + "ffn_norm.weight": get(old + "post_attention_layernorm.weight"),
            new + "feed_forward.w2.weight": get(old + "mlp.down_proj.weight"),
        }
    return tree


def jax_layer(get: Get, i: int, rows: Callable[[np.ndarray, int], np.ndarray]) -> Arrays:
    old = f"model.layers.{i}."
    q, k = (rows(get(f"{old}self_attn.{x}_proj.weight"), n) for x, n in (("q", HEADS), ("k", KV)))
    return {
        "norm1": get(old + "input_layernorm.weight"),
        "query": q.T.reshape(M, HEADS, D),
        "key": k.T.reshape(M, KV, D),
        "value": get(old + "self_attn.v_proj.weight").T.reshape(M, KV, D),
        "out": get(old + "self_attn.o_proj.weight").T.reshape(HEADS, D, M),
        "norm2": get(old + "post_attention_layernorm.weight"),
        "gate": get(old + "mlp.gate_proj.weight").T,
        "up": get(old + "mlp.up_proj.weight").T,
        "down": get(old + "mlp.down_proj.weight").T,
    }


def flax(get: Get, *, moments: bool = False) -> Arrays:
    names = {
        "norm1": "attention_norm/scale",
        **{x: f"attention/{x}/kernel" for x in ("query", "key", "value", "out")},
        "norm2": "mlp_norm/scale",
        **{x: f"mlp/{x}/kernel" for x in ("gate", "up", "down")},
    }
    tree = {
        "embed/embedding": get("model.embed_tokens.weight"),
        "norm/scale": get("model.norm.weight"),
        "lm_head/kernel": get("lm_head.weight").T,
    }
    for i in range(LAYERS):
        layer = jax_layer(get, i, lambda weight, _: weight)
        tree |= {f"layers/{i}/{name}": layer[key] for key, name in names.items()}
    return tree


def maxtext(get: Get, *, scanned: bool = True, moments: bool = False) -> Arrays:
    names = {
        "norm1": "pre_self_attention_layer_norm/scale",
        **{x: f"self_attention/{x}/kernel" for x in ("query", "key", "value", "out")},
        "norm2": "post_self_attention_layer_norm/scale",
        **{x: f"mlp/{y}/kernel" for x, y in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo"))},
    }
    layers = [jax_layer(get, i, meta_rows) for i in range(LAYERS)]
    if scanned:
        tree = {
            f"decoder/layers/{name}": np.stack([layer[key] for layer in layers], axis=1)
            for key, name in names.items()
        }
    else:
        tree = {
            f"decoder/layers_{i}/{name}": layer[key]
            for i, layer in enumerate(layers)
            for key, name in names.items()
        }
    return tree | {
        "token_embedder/embedding": get("model.embed_tokens.weight"),
        "decoder/decoder_norm/scale": get("model.norm.weight"),
        "decoder/logits_dense/kernel": get("lm_head.weight").T,
    }


CASES = {
    **{
        name: (
            partial(titan, version=name.partition("_")[2]),
            "",
            "optimizer.state.{}.exp_avg",
            "optimizer.state.{}.exp_avg_sq",
        )
        for name in TITANS
    },
    "flax": (flax, "params/", "opt_state/0/mu/{}", "opt_state/0/nu/{}"),
    "maxtext": (maxtext, "params/params/", "opt_state/0/mu/params/{}", "opt_state/0/nu/params/{}"),
}
CASES["maxtext_unscanned"] = (partial(maxtext, scanned=False), *CASES["maxtext"][1:])


@pytest.mark.parametrize("convention", CASES)
def test_every_tensor_is_what_numpy_makes_of_it_and_comes_back(convention: str) -> None:
    by_hand, root, mu, nu = CASES[convention]
    arrays = hf_checkpoint()
    # The scale has a test of its own below: random bits have no exact one.
    mapping = load_mapping("llama").with_axes(AXES)
    expected: Arrays = {}
    for pattern, after in ((root + "{}", ""), (mu, ".exp_avg"), (nu, ".exp_avg_sq")):
        before = "optimizer.state." if after else ""
        get = lambda name, b=before, a=after: arrays[b + name + a]  # noqa: E731
        tree = by_hand(get, moments=bool(after))
        expected |= {pattern.format(name): np.asarray(array, order="C") for name, array in tree.items()}
    if convention in TITANS:
        expected |= {
            name.replace(".exp_avg_sq", ".step"): np.float32(12) for name in expected if name.endswith("_sq")
        }
    else:
        expected["opt_state/0/count"] = np.asarray(12, np.int32)
    source = MemoryReader("dcp", arrays)
    plan = make_plan(source, "dcp" if convention in TITANS else "orbax", mapping, into=convention)
    assert plan.tensors.keys() == expected.keys()
    assert plan.inexact == ()
    converted = {name: t.read(source, Box.whole(t.shape)) for name, t in plan.tensors.items()}
    assert [name for name, a in expected.items() if not same_bits(converted[name], np.asarray(a))] == []


def test_maxtexts_query_contains_the_division_by_the_root_of_the_head_size() -> None:
    arrays = {name: np.nan_to_num(a, nan=1.5, posinf=2.5, neginf=-2.5) for name, a in hf_checkpoint().items()}
    source = MemoryReader("dcp", arrays)
    plan = make_plan(
        source, "orbax", load_mapping("llama").with_axes({"d": D, "llama3_rope": 1}), into="maxtext"
    )
    name = "decoder/layers/self_attention/query/kernel"
    assert plan.inexact == tuple(
        f"{p}/{name}" for p in ("params/params", "opt_state/0/mu/params", "opt_state/0/nu/params")
    )
    tensor = plan.tensors[f"params/params/{name}"]
    layers = [meta_rows(arrays[f"model.layers.{i}.self_attn.q_proj.weight"], HEADS) for i in range(LAYERS)]
    plain = np.stack([layer.T.reshape(M, HEADS, D) for layer in layers], axis=1)
    expected = (plain.astype(np.float64) * D**-0.5).astype(np.float32)
    assert same_bits(tensor.read(source, Box.whole(tensor.shape)), expected)
