"""Pipelines of diffusers, a folder for each model, converted in one go."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import CLIPTextConfig, CLIPTextModel

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.inspect.summary import inspect
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import CheckpointError, open_checkpoint
from tests.support.bridge.bits import random_bits, same_bits

INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.30.0",
    "feature_extractor": [None, None],
    "requires_safety_checker": False,
    "scheduler": ["diffusers", "PNDMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline"
    for folder in ("scheduler", "tokenizer", "unet", "vae"):
        (path / folder).mkdir(parents=True)
    (path / "model_index.json").write_text(json.dumps(INDEX))
    (path / "README.md").write_text("no part of it")
    (path / "scheduler" / "scheduler_config.json").write_text("{}")
    (path / "tokenizer" / "vocab.json").write_text('{"a": 0}')
    (path / "tokenizer" / "merges.txt").write_text("a b")
    (path / "unet" / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        projection_dim=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
    )
    CLIPTextModel(config).save_pretrained(path / "text_encoder")
    weight_map = {}
    for number in (1, 2):
        file = f"diffusion_pytorch_model-0000{number}-of-00002.safetensors"
        weight_map[f"down.{number}.weight"] = file
        save_file(
            {f"down.{number}.weight": random_bits((3, 5), np.dtype(np.float32), number)}, path / "unet" / file
        )
    index = path / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    save_file(
        {"encoder.w": random_bits((4,), np.dtype(np.float16), 3)},
        path / "vae" / "diffusion_pytorch_model.safetensors",
    )
    save_file({"encoder.w": np.zeros(4)}, path / "vae" / "diffusion_pytorch_model.fp16.safetensors")
    return path


@pytest.mark.parametrize("to", ["orbax", "dcp"])
def test_all_models_and_configurations_go_in_one_go(pipeline: Path, tmp_path: Path, to: str) -> None:
    convert(pipeline, tmp_path / "b", to=to)
    report = diff(pipeline, tmp_path / "b")
    assert (report.max_ulp, report.within) == (0, True)
    with open_checkpoint(tmp_path / "b") as reader:
        assert {str(info.path[0]) for info in reader.tensors.values()} == {"text_encoder", "unet", "vae"}
        separator = "/" if to == "orbax" else "."
        name = separator.join(("unet", "down.1.weight"))
        assert same_bits(reader.read(name), random_bits((3, 5), np.dtype(np.float32), 1))
    for name in ("model_index.json", "tokenizer/vocab.json", "tokenizer/merges.txt", "unet/config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (pipeline / name).read_bytes()
    assert (tmp_path / "b" / "text_encoder" / "config.json").is_file()
    assert not (tmp_path / "b" / "README.md").exists()
    assert verify(tmp_path / "b").good
    assert verify(pipeline).good


def test_some_folders_are_asked_for_as_items(pipeline: Path, tmp_path: Path) -> None:
    assert [t.name for t in inspect(pipeline, items=["vae", "unet"]).tensors] == [
        "vae.encoder.w",
        "unet.down.1.weight",
        "unet.down.2.weight",
    ]
    assert [t.name for t in inspect(pipeline, items=["vae"]).tensors] == ["encoder.w"]
    with pytest.raises(
        CheckpointError, match=r"expected tokenizer \(--item\), found folders with weights: text_enc"
    ):
        inspect(pipeline, items=["tokenizer"])
    convert(pipeline, tmp_path / "b", write_items=["unet", "vae", "text_encoder"])
    assert diff(pipeline, tmp_path / "b", items=["text_encoder", "unet", "vae"]).within


def test_folders_of_pytorch_files_among_them(pipeline: Path, tmp_path: Path) -> None:
    for file in (pipeline / "vae").iterdir():
        file.unlink()
    torch.save({"encoder.w": torch.ones(4)}, pipeline / "vae" / "diffusion_pytorch_model.bin")
    convert(pipeline, tmp_path / "b")
    with open_checkpoint(tmp_path / "b") as reader:
        assert reader.read("vae/encoder.w").tolist() == [1.0] * 4


def test_a_pipeline_that_is_not_whole_is_named(pipeline: Path, tmp_path: Path) -> None:
    shutil.rmtree(pipeline / "vae")
    with pytest.raises(CheckpointError, match=r"expected a folder 'vae' next to this file, found none"):
        open_checkpoint(pipeline)
    for name in ("../pipeline/unet", "/etc", "..", "a\0b", ""):
        (pipeline / "model_index.json").write_text(json.dumps({name: ["a", "b"]}))
        with pytest.raises(CheckpointError, match="expected names of folders"):
            convert(pipeline, tmp_path / "b")
    (pipeline / "model_index.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="expected JSON, got brackets nested too deeply"):
        open_checkpoint(pipeline)
    (pipeline / "model_index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected names of folders"):
        open_checkpoint(pipeline)


def test_a_pipeline_at_a_url(pipeline: Path, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").put(str(pipeline), "/pipelines/p", recursive=True)
    convert("memory://pipelines/p", tmp_path / "b")
    assert diff(pipeline, tmp_path / "b").within


@pytest.mark.parametrize("format", ["dcp", "orbax", "safetensors"])
def test_a_converted_pipeline_is_replaced_and_goes_along_as_a_whole(
    tmp_path: Path, pipeline: Path, format: str
) -> None:
    convert(pipeline, tmp_path / "a", to=format)
    report = convert(pipeline, tmp_path / "a", to=format, replace=True)
    assert {"model_index.json", "unet/config.json", "tokenizer/vocab.json"} <= set(report.companions)
    convert(tmp_path / "a", tmp_path / "b", to="orbax")
    for name in report.companions:
        assert (tmp_path / "b" / name).read_bytes() == (pipeline / name).read_bytes()
    (tmp_path / "a/unet/notes.md").write_text("mine")
    with pytest.raises(CheckpointError, match="found also unet"):
        convert(pipeline, tmp_path / "a", to=format, replace=True)


def test_a_pipeline_in_a_store_takes_its_configurations_along(tmp_path: Path, pipeline: Path) -> None:
    convert(pipeline, "memory://diffusers/a", to="safetensors")
    assert json.loads(fsspec.filesystem("memory").cat_file("/diffusers/a/model_index.json")) == INDEX
    convert("memory://diffusers/a", tmp_path / "b")
    assert (tmp_path / "b/tokenizer/vocab.json").read_bytes() == (
        pipeline / "tokenizer/vocab.json"
    ).read_bytes()
    report = diff(pipeline, tmp_path / "b")
    assert (report.max_ulp, report.within) == (0, True)


def test_folders_at_a_url_are_held_to_their_manifests(pipeline: Path, tmp_path: Path) -> None:
    for folder in ("text_encoder", "unet", "vae"):
        convert(pipeline / folder, tmp_path / folder, to="safetensors")
        shutil.rmtree(pipeline / folder)
        (tmp_path / folder).rename(pipeline / folder)
    store = fsspec.filesystem("memory")
    store.put(str(pipeline), "/pipelines/held", recursive=True)
    assert inspect("memory://pipelines/held").manifest
    assert convert("memory://pipelines/held", tmp_path / "a", items=["unet"]).companions == ("config.json",)
    file = "/pipelines/held/vae/model.safetensors"
    store.pipe_file(file, store.cat_file(file)[:-1] + b"\x55")
    for items in ([], ["vae"]):
        with pytest.raises(CheckpointError, match=r"vae: encoder\.w: .* does not match its manifest"):
            convert("memory://pipelines/held", tmp_path / "b", items=items)


def test_our_manifests_of_a_pipelines_weights_stay_with_the_weights(pipeline: Path, tmp_path: Path) -> None:
    vae = pipeline / "vae" / "diffusion_pytorch_model.safetensors"
    vae.unlink()
    convert(pipeline / "unet", vae)
    assert vae.with_name(f"{vae.name}.manifest.json").is_file()
    report = convert(pipeline, tmp_path / "b")
    assert not any("manifest" in name for name in report.companions)
