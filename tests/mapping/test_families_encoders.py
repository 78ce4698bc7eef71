"""T5, BERT, ViT and Whisper: transformers' classes, through the names of its former Flax classes and back."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from torch import nn

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.core.mapping import MappingError
from tests.support.bridge.family_checkpoints import (
    dcp_tensors,
    flat,
    load_dcp,
    optimizer_of,
    orbax_tree,
    same_bits,
    save_dcp,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Arrays = Mapping[str, np.ndarray]

# No two sizes are equal, where a model allows it.
T5 = {"vocab_size": 40, "d_model": 12, "d_kv": 5, "d_ff": 28, "num_layers": 3, "num_decoder_layers": 2}
T5 |= {"num_heads": 4, "relative_attention_num_buckets": 8}
GATED = {"feed_forward_proj": "gated-gelu"}
BERT = {"vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3}
BERT |= {"intermediate_size": 28, "max_position_embeddings": 9}
VIT = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 28}
VIT |= {"image_size": 8, "patch_size": 4, "encoder_stride": 4}
WHISPER = {"vocab_size": 40, "d_model": 12, "encoder_layers": 3, "decoder_layers": 2, "num_mel_bins": 7}
WHISPER |= {"encoder_attention_heads": 3, "decoder_attention_heads": 4, "encoder_ffn_dim": 28}
WHISPER |= {"decoder_ffn_dim": 20, "max_source_positions": 10, "max_target_positions": 11, "pad_token_id": 0}
WHISPER |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, "classifier_proj_size": 9}


@dataclass(frozen=True)
class Case:
    """A class of transformers. tied: the name of an output that may share the embedding, and its flax name."""

    class_name: str
    config: Mapping[str, Any]
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return next(f for f in ("t5", "bert", "vit", "whisper") if f in self.class_name.lower())

    def model(self, seed: int = 0) -> nn.Module:
        """Float32; every parameter is random and matters to the outputs."""
        model_class = getattr(transformers, self.class_name)
        config = model_class.config_class(**copy.deepcopy(dict(self.config)))
        config._attn_implementation = "eager"
        model = model_class(config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(
                    1 + 0.3 * noise if parameter.ndim == 1 else noise / parameter.shape[-1] ** 0.5
                )
        return model


LM_HEAD = {"lm_head.weight": "lm_head/kernel"}
PREDICTIONS = {"cls.predictions.decoder.weight": "cls/predictions/decoder/kernel"}
CASES = {
    "t5": Case("T5ForConditionalGeneration", T5, LM_HEAD),
    "t5-gated": Case("T5ForConditionalGeneration", T5 | GATED, LM_HEAD),
    "t5-encoder": Case("T5EncoderModel", T5 | GATED),
    "t5-model": Case("T5Model", T5),
    "t5-answers": Case("T5ForQuestionAnswering", T5),
    "mt5": Case("MT5ForConditionalGeneration", T5 | GATED, LM_HEAD),
    "bert-model": Case("BertModel", BERT),
    "bert-pretraining": Case("BertForPreTraining", BERT, PREDICTIONS),
    "bert-masked": Case("BertForMaskedLM", BERT, PREDICTIONS),
    "bert-sentences": Case("BertForSequenceClassification", BERT | {"num_labels": 5}),
    "bert-words": Case("BertForTokenClassification", BERT),
    "bert-answers": Case("BertForQuestionAnswering", BERT),
    "bert-choice": Case("BertForMultipleChoice", BERT),
    "bert-next": Case("BertForNextSentencePrediction", BERT),
    "bert-decoder": Case(
        "BertLMHeadModel", BERT | {"is_decoder": True, "add_cross_attention": True}, PREDICTIONS
    ),
    "vit-model": Case("ViTModel", VIT),
    "vit-classes": Case("ViTForImageClassification", VIT | {"num_labels": 5}),
    "vit-no-bias": Case("ViTForImageClassification", VIT | {"qkv_bias": False}),
    "vit-masked": Case("ViTForMaskedImageModeling", VIT),
    "whisper": Case("WhisperForConditionalGeneration", WHISPER, {"proj_out.weight": "lm_head/kernel"}),
    "whisper-model": Case("WhisperModel", WHISPER),
    "whisper-decoder": Case("WhisperForCausalLM", WHISPER, {"proj_out.weight": "lm_head/kernel"}),
    "whisper-classes": Case("WhisperForAudioClassification", WHISPER | {"use_weighted_layer_sum": True}),
}


def outputs(model: nn.Module) -> dict[str, np.ndarray]:
    """What the class computes of fixed random inputs."""
    random = np.random.default_rng(0)
    rows = torch.from_numpy(random.integers(0, 40, (2, 6)))
    class_name = type(model).__name__
    if "T5" in class_name:
        inputs = {"input_ids": rows} | (
            {} if "Encoder" in class_name else {"decoder_input_ids": rows.flip(1)}
        )
    elif "Bert" in class_name:
        inputs = {"input_ids": rows[:, None] if "Choice" in class_name else rows}
        if getattr(model.config, "add_cross_attention", False):
            inputs["encoder_hidden_states"] = torch.from_numpy(random.standard_normal((2, 4, 12), np.float32))
    elif "ViT" in class_name:
        inputs = {"pixel_values": torch.from_numpy(random.standard_normal((2, 3, 8, 8), np.float32))}
        if "Masked" in class_name:
            inputs["bool_masked_pos"] = torch.from_numpy(random.integers(0, 2, (2, 4))).bool()
    elif "CausalLM" in class_name:
        inputs = {"input_ids": rows}
        inputs["encoder_outputs"] = (torch.from_numpy(random.standard_normal((2, 10, 12), np.float32)),)
    else:
        inputs = {"input_features": torch.from_numpy(random.standard_normal((2, 7, 20), np.float32))}
        inputs |= {} if "Audio" in class_name else {"decoder_input_ids": rows}
    with torch.no_grad():
        output = model(**inputs)
    return {name: value.numpy() for name, value in output.items() if isinstance(value, torch.Tensor)}


def hub_names(model: nn.Module) -> dict[str, str]:
    """Names of the class -> names on the Hub, which differ for ViT alone."""
    parts = {".layers.": ".encoder.layer.", "attention.q_proj": "attention.attention.query"}
    parts |= {"attention.k_proj": "attention.attention.key", "attention.v_proj": "attention.attention.value"}
    parts |= {"attention.o_proj": "attention.output.dense", "mlp.fc1": "intermediate.dense"}
    parts |= {"mlp.fc2": "output.dense"}
    names = {}
    for name in model.state_dict():
        hub = f".{name}"
        for ours, theirs in parts.items() if "ViT" in type(model).__name__ else ():
            hub = hub.replace(ours, theirs)
        names[name] = hub[1:]
    return names


def flax_names(model: nn.Module, state: Arrays, case: Case) -> dict[str, np.ndarray]:
    """As the former Flax classes had it: what a module is says how its parameters are called and laid out there."""
    modules, hub = dict(model.named_modules()), hub_names(model)
    tree = {}
    for name, array in state.items():
        owner, _, last = name.rpartition(".")
        path = hub[name].replace(".", "/")
        match modules[owner], last:
            case nn.Linear() | nn.Conv1d() | nn.Conv2d(), "weight":
                axes = (*range(2, array.ndim), 1, 0)
                path, array = path.removesuffix("weight") + "kernel", array.transpose(axes)
            case nn.Embedding(), "weight":
                path = path.removesuffix("weight") + "embedding"
            case nn.LayerNorm(), "weight":
                path = path.removesuffix("weight") + "scale"
        tree[case.tied.get(name, path)] = array
    return tree


def own_names(model: nn.Module) -> set[str]:
    """Each parameter once, and buffers."""
    return {name for name, _ in model.named_parameters()}


def state_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def only(arrays: Arrays, names: set[str]) -> dict[str, np.ndarray]:
    return {name: array for name, array in arrays.items() if name in names}


@pytest.mark.fast_cases("t5", "vit-classes")
@pytest.mark.parametrize("name", CASES)
def test_what_save_pretrained_writes_becomes_flax_and_what_from_pretrained_reads(
    tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    model = case.model()
    model.save_pretrained(tmp_path / "hub")
    convert(tmp_path / "hub", tmp_path / "orbax", mapping=case.family)
    tree = orbax_tree(tmp_path / "orbax")
    same_bits(dict(flat(tree["params"])), flax_names(model, only(state_of(model), own_names(model)), case))
    assert diff(tmp_path / "hub", tmp_path / "orbax", mapping=case.family).max_ulp == 0
    # As if trained in JAX: nothing says where it came from.
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "jax", {"params": tree["params"]})
    convert(tmp_path / "jax", tmp_path / "back", to="safetensors", mapping=case.family)
    same_bits(
        load_file(tmp_path / "back" / "model.safetensors"), load_file(tmp_path / "hub" / "model.safetensors")
    )
    shutil.copy(tmp_path / "hub" / "config.json", tmp_path / "back")
    again, info = type(model).from_pretrained(
        tmp_path / "back", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    same_bits(state_of(again), state_of(model))
    same_bits(outputs(again.eval()), outputs(model))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: tuple[int, ...]) -> None:
    """Steps of AdamW with random gradients, the same for the same seed."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def moments(model: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> dict[str, np.ndarray]:
    return {
        name: optimizer.state[parameter][key].numpy()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


@pytest.mark.fast_cases("t5")
@pytest.mark.parametrize("name", CASES)
def test_a_trained_model_becomes_an_optax_state_and_goes_on(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = case.model()
    optimizer = optimizer_of(model)
    steps(model, optimizer, (0, 1))
    save_dcp(tmp_path / "dcp", model, optimizer)
    # DCP has a tied weight twice; flax once.
    once: dict[str, Any] = {"tied": "once"} if case.tied else {}
    from_: dict[str, Any] = {"from_": "hf_base"} if name == "whisper-model" else {}
    convert(tmp_path / "dcp", tmp_path / "orbax", mapping=case.family, **once, **from_)
    tree = orbax_tree(tmp_path / "orbax")
    expected = {
        "params": only(state_of(model), own_names(model)),
        "mu": moments(model, optimizer, "exp_avg"),
        "nu": moments(model, optimizer, "exp_avg_sq"),
    }
    flax = {section: flax_names(model, arrays, case) for section, arrays in expected.items()}
    adam = tree["opt_state"][0]
    same_bits(dict(flat(tree["params"])), flax["params"])
    same_bits(dict(flat(adam["mu"])), flax["mu"])
    same_bits(dict(flat(adam["nu"])), flax["nu"])
    assert int(adam["count"]) == 2
    # The state is one of optax.adamw, which updates these parameters.
    fresh = optax.adamw(1e-3).init(tree["params"])
    assert len(tree["opt_state"]) == len(fresh)

    both: dict[str, Any] = {"tied": "both"} if case.tied else {}
    convert(tmp_path / "orbax", tmp_path / "back", to="dcp", mapping=case.family, **both)
    same_bits(dcp_tensors(tmp_path / "back"), dcp_tensors(tmp_path / "dcp"))
    other = case.model(seed=1)
    its = optimizer_of(other)
    steps(other, its, (7,))
    load_dcp(tmp_path / "back", other, its)
    same_bits(outputs(other), outputs(model))
    steps(model, optimizer, (2, 3))
    steps(other, its, (2, 3))
    same_bits(state_of(other), state_of(model))


@pytest.mark.parametrize("name", ["t5", pytest.param("t5-gated", marks=pytest.mark.slow)])
def test_t5_under_the_names_of_t5x(tmp_path: Path, name: str) -> None:
    """The names and transposes of transformers' own script for T5X checkpoints."""
    model = CASES[name].model()
    model.save_pretrained(tmp_path / "hub")
    convert(tmp_path / "hub", tmp_path / "t5x", mapping="t5", into="t5x")
    target, state = dict(flat(orbax_tree(tmp_path / "t5x")["target"])), state_of(model)
    gates = ("wi",) if name == "t5" else ("wi_0", "wi_1")
    expected = {
        "token_embedder/embedding": state["shared.weight"],
        "encoder/encoder_norm/scale": state["encoder.final_layer_norm.weight"],
        "decoder/decoder_norm/scale": state["decoder.final_layer_norm.weight"],
    }
    roles = {
        "encoder": {"attention": ("SelfAttention", "pre_attention_layer_norm")},
        "decoder": {
            "self_attention": ("SelfAttention", "pre_self_attention_layer_norm"),
            "encoder_decoder_attention": ("EncDecAttention", "pre_cross_attention_layer_norm"),
        },
    }
    for side, layers in (("encoder", 3), ("decoder", 2)):
        at = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        expected[f"{side}/relpos_bias/rel_embedding"] = state[at].T
        for i in range(layers):
            to = f"{side}/layers_{i}"
            for j, (theirs, (ours, norm)) in enumerate(roles[side].items()):
                at = f"{side}.block.{i}.layer.{j}"
                expected[f"{to}/{norm}/scale"] = state[f"{at}.layer_norm.weight"]
                for part, short in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
                    expected[f"{to}/{theirs}/{part}/kernel"] = state[f"{at}.{ours}.{short}.weight"].T
            at = f"{side}.block.{i}.layer.{len(roles[side])}"
            expected[f"{to}/pre_mlp_layer_norm/scale"] = state[f"{at}.layer_norm.weight"]
            for part in (*gates, "wo"):
                expected[f"{to}/mlp/{part}/kernel"] = state[f"{at}.DenseReluDense.{part}.weight"].T
    same_bits(target, expected)
    convert(tmp_path / "t5x", tmp_path / "back", to="safetensors", mapping="t5", into="hf")
    hub = load_file(tmp_path / "hub" / "model.safetensors")
    same_bits(load_file(tmp_path / "back" / "model.safetensors"), hub)


def test_files_with_tensors_that_no_class_reads(tmp_path: Path) -> None:
    """The oldest files of T5 and BERT, and T5 with all names of the embedding."""
    extra = {
        "t5": "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        "bert-masked": "bert.embeddings.position_ids",
    }
    for name, more in extra.items():
        model = CASES[name].model()
        model.save_pretrained(tmp_path / name)
        file = tmp_path / name / "model.safetensors"
        weights = load_file(file) | {more: np.ones((2, 3), np.float32)}
        second = [path for path in state_of(model) if "embed_tokens" in path or path.endswith("decoder.bias")]
        save_file(weights | {path: state_of(model)[path] for path in second}, file, {"format": "pt"})
        report = convert(tmp_path / name, tmp_path / f"{name}-flax", mapping=CASES[name].family)
        assert {*report.dropped} == {more, *second}
        own = only(state_of(model), own_names(model))
        same_bits(
            dict(flat(orbax_tree(tmp_path / f"{name}-flax")["params"])), flax_names(model, own, CASES[name])
        )


def test_an_untied_output_is_a_weight_of_its_own(tmp_path: Path) -> None:
    for name, output in (("t5-gated", "lm_head.weight"), ("whisper", "proj_out.weight")):
        model = CASES[name].model()
        model.save_pretrained(tmp_path / name)
        file = tmp_path / name / "model.safetensors"
        weights = load_file(file) | {output: np.random.default_rng(0).standard_normal((40, 12), np.float32)}
        save_file(weights, file, {"format": "pt"})
        # The configuration says that the two are tied, which the caller knows better.
        with pytest.raises(MappingError, match=f"tie_word_embeddings is true, but {output} differs from"):
            convert(tmp_path / name, tmp_path / f"{name}-flax", mapping=CASES[name].family)
        convert(tmp_path / name, tmp_path / f"{name}-flax", mapping=CASES[name].family, any_model=True)
        tree = dict(flat(orbax_tree(tmp_path / f"{name}-flax")["params"]))
        same_bits({"head": tree["lm_head/kernel"]}, {"head": weights[output].T})
        back = tmp_path / f"{name}-back"
        convert(tmp_path / f"{name}-flax", back, to="safetensors", mapping=CASES[name].family, any_model=True)
        same_bits(load_file(back / "model.safetensors"), weights)


def test_berts_second_bias_must_be_the_first_unless_one_is_left_out(tmp_path: Path) -> None:
    case = Case("BertForMaskedLM", BERT | {"tie_word_embeddings": False})
    model = case.model()
    model.save_pretrained(tmp_path / "hub")
    with pytest.raises(
        MappingError, match=r"decoder\.bias of .* differs from cls\.predictions\.bias.*--drop"
    ):
        convert(tmp_path / "hub", tmp_path / "flax", mapping="bert")
    # The class adds decoder.bias alone.
    drop = Selection(drop=("cls.predictions.bias",))
    convert(tmp_path / "hub", tmp_path / "flax", mapping="bert", selection=drop)
    tree = dict(flat(orbax_tree(tmp_path / "flax")["params"]))
    state = state_of(model)
    same_bits({"bias": tree["cls/predictions/bias"]}, {"bias": state["cls.predictions.decoder.bias"]})
    kernel = {"kernel": state["cls.predictions.decoder.weight"].T}
    same_bits({"kernel": tree["cls/predictions/decoder/kernel"]}, kernel)


@pytest.mark.fast_cases("umt5", "relative", "gelu")
@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("t5", {"model_type": "umt5"}, "expected model_type 't5' or 'mt5', found 'umt5'"),
        ("bert-masked", {"model_type": "roberta"}, "expected model_type 'bert', found 'roberta'"),
        (
            "bert-masked",
            {"position_embedding_type": "relative_key"},
            "expected position_embedding_type 'absolute'",
        ),
        ("vit-model", {"pooler_act": "gelu"}, "expected pooler_act 'tanh', found 'gelu'"),
        ("vit-model", {"model_type": "vit_msn"}, "expected model_type 'vit', found 'vit_msn'"),
        ("whisper", {"model_type": "moonshine"}, "expected model_type 'whisper', found 'moonshine'"),
    ],
    ids=["umt5", "roberta", "relative", "gelu", "vit_msn", "moonshine"],
)
def test_another_model_is_refused_unless_insisted(
    tmp_path: Path, name: str, fields: dict, message: str
) -> None:
    CASES[name].model().save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(MappingError, match=rf"{message}.*--any-model"):
        convert(tmp_path / "hub", tmp_path / "out", mapping=CASES[name].family)
    assert convert(tmp_path / "hub", tmp_path / "out", mapping=CASES[name].family, any_model=True).tensors
