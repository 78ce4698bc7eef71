"""A family is for some models: those that `config.json` names, with the fields that would make them others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

import torch_impl
from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.commands.main import app
from bridge.core.formats import open_checkpoint
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.mapping import MappingError, load_mapping, parse_mapping
from bridge.core.mapping.language.rules import family_names
from bridge.core.mapping.one_rule.sizes import with_config
from tests.support.bridge.family_models import FAMILIES, LLAMA_LIKE, PLAIN_ROPE, hf_config, hf_model

SMALL = LLAMA_LIKE | {"rope_parameters": PLAIN_ROPE, "num_hidden_layers": 2, "pad_token_id": 0}
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0156}


def saved(folder: Path, name: str, **changes: Any) -> Path:
    """A small random model of one of transformers' classes, as `save_pretrained` writes it."""
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **changes})
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)
    return folder


OTHERS = {
    "Granite": (MULTIPLIERS, r"model_type 'llama' or 'mistral', found 'granite'"),
    "Helium": ({}, r"model_type 'llama' or 'mistral', found 'helium'"),
    "SmolLM3": ({}, r"model_type 'llama' or 'mistral', found 'smollm3'"),
    "Mistral": ({"sliding_window": 4}, r"sliding_window null, found 4 \(model_type 'mistral'\)"),
}


@pytest.mark.fast_cases("Granite", "Mistral")
@pytest.mark.parametrize("name", OTHERS)
def test_models_with_llamas_names_that_compute_something_else_are_refused(tmp_path: Path, name: str) -> None:
    changes, message = OTHERS[name]
    source = saved(tmp_path / "hub", name, **changes)
    expected = rf"hub/config\.json: mapping llama is not for this model: expected {message}.*--any-model"
    with pytest.raises(MappingError, match=expected):
        convert(source, tmp_path / "out", mapping="llama", into="flax")
    # A single file is beside its config.json, too.
    with pytest.raises(MappingError, match=expected):
        convert(source / "model.safetensors", tmp_path / "out", mapping="llama", into="flax")
    with pytest.raises(MappingError, match=expected):
        diff(source, source, mapping="llama", into="flax")
    assert not (tmp_path / "out").exists()


@pytest.mark.fast_cases("Mistral")
@pytest.mark.parametrize("name", OTHERS)
def test_who_insists_gets_the_weights(tmp_path: Path, name: str) -> None:
    source = saved(tmp_path / "hub", name, **OTHERS[name][0])
    table = load_mapping("llama").for_any_model()
    convert(source, tmp_path / "a", mapping=table, into="flax", axes={"d": 8})
    report = convert(source, tmp_path / "b", mapping="llama", into="flax", axes={"d": 8}, any_model=True)
    assert report.tensors == len(open_checkpoint(source).tensors)
    assert diff(tmp_path / "a", tmp_path / "b").max_ulp == 0
    arguments = [str(source), str(tmp_path / "a"), "--mapping", "llama", "--axis", "d=8"]
    assert CliRunner().invoke(app, ["diff", *arguments]).exit_code == 2
    assert CliRunner().invoke(app, ["diff", *arguments, "--any-model"]).exit_code == 0


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Mistral", {"sliding_window": None}),
    ],
)
def test_models_that_are_llamas_are_converted(tmp_path: Path, name: str, changes: dict) -> None:
    convert(saved(tmp_path / "hub", name, **changes), tmp_path / "out", mapping="llama", into="flax")


def edited(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return edit


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        # The class has a window of 4096 where the file says nothing.
        ("Mistral", lambda c: c.pop("sliding_window"), r"sliding_window null, found none"),
        ("Llama", lambda c: c.update(hidden_act="gelu"), r"hidden_act 'silu', found 'gelu'"),
        ("Llama", lambda c: c.update(attention_bias=True), r"attention_bias false, found true"),
        ("Llama", lambda c: c.update(mlp_bias=[]), r"mlp_bias false, found \[\]"),
        ("Llama", lambda c: c.update(hidden_act=None), r"hidden_act 'silu', found null"),
        ("Llama", lambda c: c.update(model_type=["llama"]), r"'llama' or 'mistral', found \['llama'\]"),
        ("Llama", lambda c: c.update(model_type=None), None),
        ("Llama", lambda c: c.pop("model_type"), None),
        ("Llama", lambda c: (c.pop("mlp_bias"), c.pop("attention_bias"), c.pop("hidden_act")), None),
    ],
)
def test_fields_are_compared_as_the_file_has_them(tmp_path: Path, name, change, message) -> None:
    source = saved(tmp_path / "hub", name, sliding_window=None)
    edited(change)(source)
    if message is None:
        convert(source, tmp_path / "out", mapping="llama", into="flax")
        return
    with pytest.raises(MappingError, match=message):
        convert(source, tmp_path / "out", mapping="llama", into="flax")


def test_a_checkpoint_with_a_config_is_checked_at_a_load(tmp_path: Path) -> None:
    source = saved(tmp_path / "hub", "Granite")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    with pytest.raises(CheckpointError, match=r"expected model_type 'llama' or 'mistral', found 'granite'"):
        torch_impl.load_checkpoint(source, model, mapping="llama")


def test_a_model_whose_own_config_is_of_another_type_is_not_saved_as_a_llama(tmp_path: Path) -> None:
    model = transformers.GraniteForCausalLM(transformers.GraniteConfig(**SMALL))
    table = load_mapping("llama").between("hf", "torchtitan")
    with pytest.raises(CheckpointError, match=r"found 'granite'"):
        torch_impl.save_checkpoint(tmp_path / "out", model, mapping=table)
    assert not (tmp_path / "out").exists()


@pytest.mark.fast_cases("qwen3_moe", "llama", "gpt2", "deepseek_v3")
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_takes_its_own_class(tmp_path: Path, family: str) -> None:
    hf_model(family).save_pretrained(tmp_path / "hub")
    with open_checkpoint(tmp_path / "hub") as reader:
        with_config(load_mapping(family), reader)
    others = {"llama": "qwen2"}.get(family, "llama")
    model_type = hf_config(family).model_type
    with (
        open_checkpoint(tmp_path / "hub") as reader,
        pytest.raises(MappingError, match=rf"found '{model_type}'.*--mapping {family}"),
    ):
        with_config(load_mapping(others), reader)


def test_every_family_of_the_hubs_models_says_which() -> None:
    silent = [name for name in family_names() if not load_mapping(name).models]
    assert silent == ["decoder", "decoder_stacked"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = ['llama']", r"expected a table \[models\]"),
        ("[models]\nllama = 1", r"expected a table \[models\]"),
        ("[models.llama]\nmlp_bias = false", r"expected a table \[models\]"),
        ("[models.llama]\nmlp_bias = [[1]]", r"expected a table \[models\]"),
    ],
)
def test_a_malformed_table_of_models_is_refused(text: str, message: str) -> None:
    with pytest.raises(MappingError, match=message):
        parse_mapping(f"{text}\n[[rule]]\ntorch = 'a'\njax = 'a'\n", "test")
