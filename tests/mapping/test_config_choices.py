"""What a config.json decides beside sizes: MaxText's rotary rows, and whether the output layer is the embedding."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.core.formats import open_checkpoint
from bridge.core.mapping import MappingError, load_mapping, parse_mapping
from bridge.core.mapping.one_rule.sizes import with_config_fields

HEAD, HEADS, KV, M, V = 8, 4, 2, 24, 65
LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
ROWS: dict[str, tuple[dict[str, Any], bool]] = {
    "Llama 3.1, transformers 4": ({"rope_scaling": LLAMA3}, True),
    "Llama 3.1, transformers 5": ({"rope_parameters": LLAMA3}, True),
    "Llama 2": ({"rope_scaling": None}, False),
    "Llama 2, transformers 5": ({"rope_parameters": {"rope_type": "default"}}, False),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, False),
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, False),
    "Mistral": ({"model_type": "mistral", "sliding_window": None}, False),
}


def llama(folder: Path, config: dict[str, Any] | None = None, **extra: np.ndarray) -> Path:
    """A Llama of one layer, and its configuration unless that is None."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (V, M),
        "model.norm.weight": (M,),
        "lm_head.weight": (V, M),
        "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD, M),
        "model.layers.0.self_attn.k_proj.weight": (KV * HEAD, M),
        "model.layers.0.self_attn.v_proj.weight": (KV * HEAD, M),
        "model.layers.0.self_attn.o_proj.weight": (M, HEADS * HEAD),
        "model.layers.0.input_layernorm.weight": (M,),
        "model.layers.0.post_attention_layernorm.weight": (M,),
        "model.layers.0.mlp.gate_proj.weight": (30, M),
        "model.layers.0.mlp.up_proj.weight": (30, M),
        "model.layers.0.mlp.down_proj.weight": (M, 30),
    }
    arrays = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()} | extra
    save_file({n: a for n, a in arrays.items() if a.size}, folder / "model.safetensors", {"format": "pt"})
    if config is not None:
        fields = {
            "model_type": "llama",
            "head_dim": HEAD,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV,
        }
        (folder / "config.json").write_text(json.dumps(fields | {"vocab_size": V} | config))
    return folder


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def keys_of(folder: Path, scanned: bool) -> np.ndarray:
    """The key kernel, ``[m, heads, head]``."""
    base = "params/params/decoder/layers"
    with open_checkpoint(folder) as reader:
        if scanned:
            return reader.read(f"{base}/self_attention/key/kernel")[:, 0]
        return reader.read(f"{base}_0/self_attention/key/kernel")


def halves(source: Path) -> np.ndarray:
    rows = weights(source)["model.layers.0.self_attn.k_proj.weight"]
    return rows.reshape(KV, HEAD, M).transpose(2, 0, 1)


def side_by_side(source: Path) -> np.ndarray:
    """Row ``2 p + e`` is element e of pair p, which is at ``p + e * HEAD / 2`` in halves."""
    order = [p + e * HEAD // 2 for p in range(HEAD // 2) for e in range(2)]
    return halves(source)[..., order]


@pytest.mark.parametrize("into", ["maxtext", "maxtext_unscanned"])
@pytest.mark.parametrize("rotary_type", ROWS)
def test_the_type_of_rotary_positions_decides_about_maxtexts_rows(
    tmp_path: Path, rotary_type: str, into: str
) -> None:
    config, interleaved = ROWS[rotary_type]
    source = llama(tmp_path / "hf", config)
    convert(source, tmp_path / "out", to="orbax", mapping="llama", into=into)
    expected = (side_by_side if interleaved else halves)(source)
    assert np.array_equal(keys_of(tmp_path / "out", into == "maxtext"), expected)
    # The configuration goes along, so that the way back knows, too.
    convert(tmp_path / "out", tmp_path / "back", to="safetensors", mapping="llama")
    name = "model.layers.0.self_attn.k_proj.weight"
    assert np.array_equal(weights(tmp_path / "back")[name], weights(source)[name])


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "longrope"}},
        {"rope_parameters": {"rope_type": "yarn"}, "model_type": "mistral", "sliding_window": None},
    ],
)
def test_a_type_that_maxtext_has_in_two_ways_is_asked_for(tmp_path: Path, config: dict[str, Any]) -> None:
    source = llama(tmp_path / "hf", config)
    with pytest.raises(MappingError, match=re.escape("--axis llama3_rope=1 or --axis llama3_rope=0")):
        convert(source, tmp_path / "out", to="orbax", mapping="llama", into="maxtext")
    axes = {"llama3_rope": 1}
    convert(source, tmp_path / "out", to="orbax", mapping="llama", into="maxtext", axes=axes)
    assert np.array_equal(keys_of(tmp_path / "out", True), side_by_side(source))
    # Where neither side has such rows, nothing is asked.
    convert(source, tmp_path / "flax", to="orbax", mapping="llama")


def test_without_a_configuration_both_directions_ask(tmp_path: Path) -> None:
    source = llama(tmp_path / "hf")
    asks = re.escape("--axis llama3_rope=1 or --axis llama3_rope=0")
    with pytest.raises(MappingError, match=asks):
        convert(source, tmp_path / "out", to="orbax", mapping="llama", into="maxtext", axes={"d": HEAD})
    wrong = {"d": HEAD, "llama3_rope": 2}
    with pytest.raises(MappingError, match=asks):
        convert(source, tmp_path / "out", to="orbax", mapping="llama", into="maxtext", axes=wrong)
    for choice, expected in ((0, halves), (1, side_by_side)):
        out = tmp_path / f"out{choice}"
        axes = {"d": HEAD, "llama3_rope": choice}
        convert(source, out, to="orbax", mapping="llama", into="maxtext", axes=axes)
        assert np.array_equal(keys_of(out, True), expected(source))
        # The caller's word is noted.
        convert(out, tmp_path / f"back{choice}", to="safetensors", mapping="llama")
        name = "model.layers.0.self_attn.k_proj.weight"
        assert np.array_equal(weights(tmp_path / f"back{choice}")[name], weights(source)[name])
    # Where neither side has such rows nothing is asked.
    convert(source, tmp_path / "flax", to="orbax", mapping="llama", axes={"d": HEAD})
    convert(source, tmp_path / "titan", to="dcp", mapping="llama", into="torchtitan", axes={"d": HEAD})
    with pytest.raises(MappingError, match=asks):
        convert(tmp_path / "titan", tmp_path / "x", to="orbax", mapping="llama", into="maxtext")


def test_a_configuration_that_names_no_model_decides_nothing(tmp_path: Path) -> None:
    source = llama(tmp_path / "hf", {"model_type": None})
    with pytest.raises(MappingError, match="--axis llama3_rope=1"):
        convert(source, tmp_path / "out", to="orbax", mapping="llama", into="maxtext")
    # As of a run in progress that has no configuration.
    assert "llama3_rope" not in with_config_fields(load_mapping("llama"), {}, "a run").axes


def test_maxtext_of_others_asks_on_the_way_to_torch(tmp_path: Path) -> None:
    source = llama(tmp_path / "hf", {"rope_scaling": LLAMA3})
    convert(source, tmp_path / "out", to="orbax", mapping="llama", into="maxtext", companions=False)
    with pytest.raises(MappingError, match="llama3_rope=1"):
        convert(tmp_path / "out", tmp_path / "back", to="safetensors", mapping="llama")


def test_a_size_that_contradicts_the_configuration_is_refused(tmp_path: Path) -> None:
    source = llama(tmp_path / "hf", {"rope_scaling": LLAMA3})
    for axes in ({"d": 4}, {"llama3_rope": 0}, {"r": 1}):
        (axis,) = axes
        with pytest.raises(MappingError, match=rf"config\.json says that {axis} is .*--any-model"):
            convert(source, tmp_path / "out", to="orbax", mapping="llama", into="maxtext", axes=axes)
    convert(
        source,
        tmp_path / "out",
        to="orbax",
        mapping="llama",
        into="maxtext",
        axes={"llama3_rope": 0},
        any_model=True,
    )
    assert np.array_equal(keys_of(tmp_path / "out", True), halves(source))


def test_two_choices_in_one_entry_are_refused() -> None:
    rule = '[[rule]]\ntorch = "a : (h interleaved(d, x)) (k interleaved(e, y))"\njax = "a : h d k e"\n'
    with pytest.raises(MappingError, match="expected one axis that decides"):
        parse_mapping(rule, "two.toml")


NO_HEAD = {"lm_head.weight": np.zeros(0, np.float32)}


def test_an_untied_model_without_its_output_layer_is_refused(tmp_path: Path) -> None:
    source = llama(tmp_path / "hf", {"tie_word_embeddings": False}, **NO_HEAD)
    with pytest.raises(
        MappingError, match=r"tie_word_embeddings is false: expected lm_head\.weight.*--tied once"
    ):
        convert(source, tmp_path / "out", to="orbax", mapping="llama")
    convert(source, tmp_path / "once", to="orbax", mapping="llama", tied="once")
    convert(source, tmp_path / "any", to="orbax", mapping="llama", any_model=True)
    part = Selection(select=("model.layers.*",))
    convert(source, tmp_path / "part", to="orbax", mapping="llama", selection=part)
    # From a tree, too.
    with pytest.raises(MappingError, match=r"expected lm_head/kernel, found none"):
        convert(tmp_path / "once", tmp_path / "back", to="safetensors", mapping="llama")
    convert(
        llama(tmp_path / "tied", {"tie_word_embeddings": True}, **NO_HEAD), tmp_path / "t", mapping="llama"
    )


def test_a_tied_model_with_another_output_layer_is_refused(tmp_path: Path) -> None:
    source = llama(tmp_path / "hf", {"tie_word_embeddings": True})
    with pytest.raises(
        MappingError, match=r"true, but lm_head\.weight differs from model\.embed_tokens\.weight.*--drop"
    ):
        convert(source, tmp_path / "out", to="orbax", mapping="llama")
    convert(
        source, tmp_path / "drop", to="orbax", mapping="llama", selection=Selection(drop=("lm_head.weight",))
    )
    embedding = weights(source)["model.embed_tokens.weight"]
    equal = llama(tmp_path / "equal", {"tie_word_embeddings": True}, **{"lm_head.weight": embedding})
    convert(equal, tmp_path / "out", to="orbax", mapping="llama")
    with open_checkpoint(tmp_path / "out") as reader:
        assert np.array_equal(reader.read("params/lm_head/kernel"), embedding.T)
    convert(llama(tmp_path / "untied", {"tie_word_embeddings": False}), tmp_path / "u", mapping="llama")


def test_ties_inside_of_a_text_config_and_in_a_mapping_of_ones_own(tmp_path: Path) -> None:
    source = llama(tmp_path / "hf", {"text_config": {"tie_word_embeddings": False}}, **NO_HEAD)
    with pytest.raises(MappingError, match="tie_word_embeddings is false"):
        convert(source, tmp_path / "out", to="orbax", mapping="llama")
    own = parse_mapping(
        '[[rule]]\ntorch = "e.weight : v m"\njax = "e/embedding : v m"\n'
        '[[rule]]\ntorch = "h.weight : v m"\njax = "h/kernel : m v"\noptional = true\ntied_to = "e.weight"\n',
        "own.toml",
    )
    folder = tmp_path / "own"
    folder.mkdir()
    save_file({"e.weight": np.zeros((3, 2), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"tie_word_embeddings": false}')
    with pytest.raises(MappingError, match=r"expected h\.weight, found none"):
        convert(folder, tmp_path / "x", to="orbax", mapping=own)


def test_only_the_family_with_two_layouts_has_a_choice() -> None:
    assert "llama3_rope" in load_mapping("llama").config
    assert "llama3_rope" not in load_mapping("mixtral").config


def test_fewer_layers_than_the_configuration_says_are_told(tmp_path: Path) -> None:
    told = "says that the model has 2 layers, but these are the weights of 1"
    source = llama(tmp_path / "hf", {"num_hidden_layers": 2})
    report = convert(source, tmp_path / "flax", to="orbax", mapping="llama", into="flax")
    assert any(told in remark for remark in report.remarks)
    back = convert(tmp_path / "flax", tmp_path / "back", to="safetensors", mapping="llama")
    assert any(told in remark for remark in back.remarks)
    # A part that was asked for, and a file that is said to be of another model.
    part = convert(source, tmp_path / "p", mapping="llama", selection=Selection(select=("model.layers.*",)))
    other = convert(source, tmp_path / "o", mapping="llama", any_model=True)
    whole = convert(llama(tmp_path / "whole", {"num_hidden_layers": 1}), tmp_path / "w", mapping="llama")
    assert not any("layers" in remark for r in (part, other, whole) for remark in r.remarks)


def test_sizes_that_do_not_fit_name_the_configuration_and_the_way_out(tmp_path: Path) -> None:
    source = llama(tmp_path / "hf", {"vocab_size": V - 1})
    with pytest.raises(
        MappingError, match=rf"config\.json gives vocab={V - 1}, .*--axis AXIS=SIZE --any-model"
    ):
        convert(
            source, tmp_path / "out", to="orbax", mapping="llama", into="maxtext", axes={"llama3_rope": 0}
        )
    axes = {"vocab": V, "llama3_rope": 0}
    convert(source, tmp_path / "out", to="orbax", mapping="llama", into="maxtext", axes=axes, any_model=True)
